//! The scripts as callers in other languages call them, by their text: numbers up to their bounds, and arguments that
//! are missing or bad.

use tollgate::redis::{Connection, RedisError, cmd};
use tollgate::{Algorithm, Script};
use tollgate_testing::redis_server::Server;
use tollgate_testing::repository::read;
use tollgate_testing::scripts::records;

/// 2001, in microseconds: a whole number of seconds, minutes, hours and days before it.
const T: &str = "1000000000000000";

/// The whole text of the script of these algorithms, whose names `+` joins.
fn text(names: &str) -> &'static str {
    let named =
        |name: &str| Algorithm::all().find(|algorithm| algorithm.script().name() == name).expect("an algorithm");
    Script::for_algorithms(names.split('+').map(named)).text()
}

fn call(redis: &mut Connection, name: &str, keys: &[&str], arguments: &[&str]) -> Result<Vec<i64>, RedisError> {
    cmd("EVAL").arg(text(name)).arg(keys.len()).arg(keys).arg(arguments).query(redis)
}

/// What `redis-cli --eval lua/NAME.lua KEY , ARGUMENTS` answers, its words apart by spaces.
fn answer(redis: &mut Connection, name: &str, key: &str, arguments: &str) -> Vec<i64> {
    call(redis, name, &[key], &words(arguments)).unwrap_or_else(|error| panic!("{name} {arguments}: {error}"))
}

fn words(text: &str) -> Vec<&str> {
    text.split_whitespace().collect()
}

/// How many calls are allowed, the limit, what remains, wait and reset, of each key.
fn packed(redis: &mut Connection, name: &str, keys: &[&str], arguments: &[&[u8]]) -> Result<Vec<[i64; 5]>, RedisError> {
    let bytes: Vec<u8> = cmd("EVAL").arg(text(name)).arg(keys.len()).arg(keys).arg(arguments).query(redis)?;
    let limit = arguments[0][1..8].iter().rev().fold(0, |limit, byte| limit << 8 | i64::from(*byte));
    Ok(records(&bytes, limit))
}

/// Numbers, each in so many bytes.
fn pack(numbers: &[(i64, usize)]) -> Vec<u8> {
    numbers.iter().flat_map(|(number, width)| number.to_le_bytes()[..*width].to_vec()).collect()
}

/// The shape of acquires of this cost, without options, under these numbers.
fn shape(numbers: &[(i64, usize)], cost: i64) -> Vec<u8> {
    pack(&[numbers, &[(128, 1), (0, 1), (cost, 7)]].concat())
}

/// The same of a bucket: the algorithm, capacity, rate, period, tick, debt, and the cost.
fn bucket([number, capacity, rate, period, tick, debt, cost]: [i64; 7]) -> Vec<u8> {
    shape(&[(number, 1), (capacity, 7), (rate, 7), (period, 7), (tick, 3), (debt, 7)], cost)
}

fn server() -> (Server, Connection) {
    let server = Server::start();
    let redis = server.connection();
    (server, redis)
}

#[test]
fn a_debt_is_carried_whole_into_numbers_that_take_longer() {
    let (_server, mut redis) = server();
    for (script, first, then) in [
        ("fixed_window", "0 1 86400000000 0 12000", "20000 1 86400000000 0 0"),
        ("token_bucket", "0 1 86400000000 1 12000", "20000 1 86400000000 1 0"),
    ] {
        assert_eq!(answer(&mut redis, script, script, &format!("{first} 12000 reserve {T}"))[0], 1, "{script}");
        let peek = answer(&mut redis, script, script, &format!("{then} 0 peek {T}"));
        assert_eq!(peek[..3], [1, 20000, 8000], "{script}: 12000 of 20000 are used");
    }
}

#[test]
fn a_state_further_ahead_than_any_penalty_could_make_it_is_none() {
    let (_server, mut redis) = server();
    let longest: i64 = 1 << 51;
    let now: i64 = T.parse().expect("a number");
    // How long a unit takes to come back; the script's own arguments; what a state holds beside its usage.
    for (script, unit, own, numbers) in [
        ("token_bucket", 1_000_000, "5 1 1 1000000 0", [(1, 1), (5, 7), (1, 7), (1, 7), (1_000_000, 3)].as_slice()),
        ("fixed_window", 1_000_000, "5 1 1000000 0 0", &[(2, 1), (5, 7), (1, 7), (1_000_000, 7), (0, 7)]),
    ] {
        let window = if script == "fixed_window" { vec![(now, 7)] } else { vec![] };
        let state = |used: i64| pack(&[&[(now, 7), (used, 7)], window.as_slice(), &[(0, 5)], numbers].concat());
        let shape = shape(&[numbers, &[(0, 7)]].concat(), 1);
        for (mode, cost) in [("acquire", 1), ("peek", 0), ("penalty", 1), ("block", 1)] {
            let call_text = format!("{own} {cost} {mode} {T}");
            // The longest that a penalty makes, and a unit more.
            cmd("SET").arg(script).arg(state(longest / unit)).exec(&mut redis).expect("written");
            let reply = answer(&mut redis, script, script, &call_text);
            assert!(reply[3] >= 0 && (1..=longest).contains(&reply[4]), "{script} {mode}: {reply:?}");
            let ttl: i64 = cmd("PTTL").arg(script).query(&mut redis).expect("an expiry");
            assert!(ttl <= 2 * longest / 1000, "{script} {mode}: {ttl} ms");
            for used in [longest / unit + 2, 1 << 53] {
                cmd("SET").arg(script).arg(state(used)).exec(&mut redis).expect("poisoned");
                let error = call(&mut redis, script, &[script], &words(&call_text)).expect_err("no state");
                assert_eq!(error.code(), Some("BADSTATE"), "{script} {mode} {used}: {error}");
            }
        }
        let records =
            packed(&mut redis, script, &[script, &format!("{script}-2")], &[&shape, T.as_bytes()]).expect("decisions");
        assert_eq!([records[0][0], records[1][0]], [-2, 1], "{script}");
    }
}

/// A call of these keys, of any slots of a node, and of these arguments.
fn across_slots(redis: &mut Connection, keys: &[String], arguments: &[&[u8]]) -> Result<Vec<u8>, RedisError> {
    let script = [&read("lua/across_slots.lua"), text("token_bucket")].concat();
    cmd("EVAL").arg(script).arg(0).arg(keys.len()).arg(keys).arg(arguments).query(redis)
}

#[test]
fn a_call_across_slots_has_7997_keys_at_most() {
    let (_server, mut redis) = server();
    let keys: Vec<_> = (0..7998).map(|number| format!("key:{number}")).collect();
    let shape = bucket([1, 5, 1, 1_000_000, 1, 0, 1]);
    let decided = across_slots(&mut redis, &keys[1..], &[&shape, T.as_bytes()]).expect("decisions");
    assert!(records(&decided, 5).iter().all(|record| record[..3] == [1, 5, 4]));
    let error = across_slots(&mut redis, &keys, &[&shape, T.as_bytes()]).expect_err("too many");
    assert_eq!(error.code(), Some("BADARG"), "{error}");
}

/// A key that the user may not write in every way that a call might must not leave another key written.
#[test]
fn a_call_across_slots_takes_and_gives_back_nothing_if_a_key_may_not_be_written() {
    let (server, mut redis) = server();
    let numbers = [(1, 1), (5, 7), (1, 7), (1_000_000, 7), (1, 3), (0, 7)];
    let keys = ["first", "second"].map(str::to_owned);
    let state = |redis: &mut Connection| cmd("GET").arg("first").query::<Option<Vec<u8>>>(redis).expect("an answer");
    let of_user = |rights: &str| {
        let url = server.user("limiter", rights);
        tollgate::redis::Client::open(url).and_then(|client| client.get_connection()).expect("a connection")
    };

    // An acquire with an id, whose marker the user may read alone.
    let mut user = of_user("~first %R~second +@all");
    let acquire = pack(&[&numbers[..], &[(128, 1), (32, 1), (1, 7), (60_000, 7)]].concat());
    across_slots(&mut user, &keys, &[&acquire, b"-1"]).expect_err("no right");
    assert_eq!(state(&mut redis), None);

    // A refund of all that was taken, which deletes keys, of a user who may not delete the second.
    let two = |operation| pack(&[&numbers[..], &numbers[..], &[(operation, 1), (0, 1), (1, 7)]].concat());
    across_slots(&mut redis, &keys, &[&two(128), b"-1"]).expect("taken");
    let taken = state(&mut redis);
    let mut user = of_user("~first +@all (~second +get +set +setrange)");
    across_slots(&mut user, &keys, &[&two(133), b"-1"]).expect_err("no right");
    assert_eq!(state(&mut redis), taken);
}

#[test]
fn the_latest_time_is_2_to_the_52_microseconds() {
    let (_server, mut redis) = server();
    for (script, own) in [
        ("token_bucket", "5 1 1000000 1 0"),
        ("fixed_window", "5 1 1000000 0 0"),
        ("sliding_window_counter", "5 1000000 1"),
        ("sliding_window_log", "5 1000000"),
        ("concurrency", "5 1000000 me"),
    ] {
        let latest = answer(&mut redis, script, script, &format!("{own} 1 acquire {}", 1_i64 << 52));
        assert_eq!(latest[..3], [1, 5, 4], "{script}");
        let later = format!("{own} 1 acquire {}", (1_i64 << 52) + 1);
        let error = call(&mut redis, script, &[script], &words(&later)).expect_err("out of range");
        assert!(error.to_string().contains("now_us"), "{script}: {error}");
    }
}

/// By a caller's own time the state's numbers decide, whatever Redis's clock says: it is kept for an hour at least, also
/// where a call in the server's time had kept it for a moment.
#[test]
fn a_call_at_its_own_time_keeps_a_state_that_the_servers_time_would_soon_end() {
    let (_server, mut redis) = server();
    for (script, own) in [
        ("token_bucket", "5 5 1000000 1 0"),
        ("fixed_window", "5 5 1000000 0 0"),
        ("sliding_window_counter", "5 1000000 1"),
        ("sliding_window_log", "5 1000000"),
        ("concurrency", "5 1000000 me"),
    ] {
        let time_to_live = |redis: &mut Connection| cmd("PTTL").arg(script).query::<i64>(redis).expect("PTTL");
        answer(&mut redis, script, script, &format!("{own} 1 acquire -1"));
        assert!((1..=5000).contains(&time_to_live(&mut redis)), "{script}: {}", time_to_live(&mut redis));
        let [seconds, more]: [i64; 2] = cmd("TIME").query(&mut redis).expect("TIME");
        // For which, in the server's time, what the first call has armed would be enough.
        let now = seconds * 1_000_000 + more;
        answer(&mut redis, script, script, &format!("{own} 1 acquire {now}"));
        assert!(time_to_live(&mut redis) > 3_590_000, "{script}: {}", time_to_live(&mut redis));
    }
}

#[test]
fn a_reservation_is_denied_for_as_long_as_it_takes_to_the_tick() {
    let (_server, mut redis) = server();
    let script = "token_bucket";
    let own = "0 5 3 1 3002399751580328";
    let first = answer(&mut redis, script, script, &format!("{own} 3002399751580328 reserve {T}"));
    assert_eq!(first[0], 1, "{script}");
    // 3 * 3002399751580327 parts have to come back, 5 in a tick.
    let cost = "3002399751580327";
    let denied = answer(&mut redis, script, script, &format!("{own} {cost} reserve {T}"));
    assert_eq!(denied[..4], [0, 0, 0, 1_801_439_850_948_197], "{script}");
    for (early, allowed) in [(1, 0), (0, 1)] {
        let then = T.parse::<i64>().expect("a number") + denied[3] - early;
        let again = answer(&mut redis, script, script, &format!("{own} {cost} reserve {then}"));
        assert_eq!(again[0], allowed, "{script}: {early} early");
    }
}

/// Of 2^53 parts, 22 a unit, as many whole units as leave room for one more; 27 parts pass in a tick, which is of 3 us.
/// The last comes back in tick 333599972397814; the taking is dated one later.
#[test]
fn a_penalty_of_all_that_can_be_counted_ends_when_it_says() {
    let (_server, mut redis) = server();
    let now = 536_845_000_886_831;
    let script = "token_bucket";
    let own = "5 27 22 3 0";
    let reply = answer(&mut redis, script, script, &format!("{own} 1000000000000000000 penalty {now}"));
    assert_eq!(reply, [1, 5, 0, 0, 1_000_799_917_193_443], "{script}");
    for ticks in 0..200 {
        let then = now + 3 * ticks;
        let peek = answer(&mut redis, script, script, &format!("{own} {} peek {then}", 1 + ticks % 5));
        assert_eq!(peek[4], 1_000_799_917_193_443 - 3 * ticks, "{script}");
        let numbers = bucket([1, 5, 27, 22, 3, 0, 1 + ticks % 5]);
        let record = packed(&mut redis, script, &[script], &[&numbers, then.to_string().as_bytes()]);
        let record = record.expect("a decision");
        assert_eq!(record[0][3..], peek[3..5], "{script}");
    }
}

#[test]
fn products_of_just_more_than_can_be_counted_are_refused() {
    let (_server, mut redis) = server();
    // (capacity + max_debt + 1) * period + rate, and capacity + max_debt + rate: 2^53, then one more.
    let most = 1_i64 << 53;
    for (script, fits, one_more) in [
        ("token_bucket", format!("0 4 1 1 {}", most - 5), format!("0 5 1 1 {}", most - 5)),
        ("token_bucket", format!("1 4 1 1 {}", most - 6), format!("1 5 1 1 {}", most - 6)),
        ("fixed_window", format!("{} 4 1 0 1", most - 5), format!("{} 5 1 0 1", most - 5)),
    ] {
        assert_eq!(answer(&mut redis, script, "fits", &format!("{fits} 1 peek {T}")).len(), 5, "{script}: {fits}");
        let error =
            call(&mut redis, script, &["key"], &words(&format!("{one_more} 1 peek {T}"))).expect_err("too much");
        assert_eq!(error.code(), Some("BADARG"), "{script}: {one_more}: {error}");
    }
}

#[test]
fn a_packed_call_takes_as_many_keys_as_lua_can_unpack_and_no_more() {
    let (_server, mut redis) = server();
    let keys: Vec<String> = (0..8000).map(|key| key.to_string()).collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    let window = shape(&[(2, 1), (5, 7), (5, 7), (1_000_000, 7), (0, 7), (0, 7)], 1);
    let counter = shape(&[(4, 1), (5, 7), (1_000_000, 7), (1, 3)], 1);
    for (script, numbers) in [
        ("token_bucket", bucket([1, 5, 1, 1_000_000, 1, 0, 1])),
        ("fixed_window", window),
        ("sliding_window_counter", counter),
    ] {
        cmd("FLUSHALL").exec(&mut redis).expect("flushed");
        packed(&mut redis, script, &keys, &[&numbers]).expect_err("too many");
        let size: u64 = cmd("DBSIZE").query(&mut redis).expect("a size");
        assert_eq!(size, 0, "{script}");
        let records = packed(&mut redis, script, &keys[..7999], &[&numbers]).expect("decisions");
        assert!(records.iter().all(|record| record[..3] == [1, 5, 4]), "{script}");
    }
}

/// The own arguments of each script, good ones.
const OWN: [(&str, &str); 6] = [
    ("token_bucket", "5 1 2000000 1 0"),
    ("fixed_window", "5 5 10000000 0 0"),
    ("calendar_window", "5 0 1000000000000001 4503599627370496"),
    ("sliding_window_counter", "5 10000000 1"),
    ("sliding_window_log", "5 10000000"),
    ("concurrency", "5 10000000 me"),
];

/// The names of a limit's arguments, as the file's header has them, and of those that follow in every script.
fn names(script: &str) -> Vec<String> {
    let header = read(&format!("lua/{script}.lua"));
    let numbers = header.lines().skip_while(|line| *line != "-- Numbers").skip(1).take_while(|line| *line != "--");
    let own = numbers.filter_map(|line| line.strip_prefix("--   ")?.split_once("  ")).map(|(name, _)| name);
    own.chain(["cost", "mode", "now_us"]).map(str::to_owned).collect()
}

fn refused(redis: &mut Connection, script: &str, keys: &[&str], arguments: &[&str], fault: &str) {
    let error = call(redis, script, keys, arguments).expect_err("bad arguments");
    let said = error.to_string();
    let by = if script.contains('+') { "tollgate" } else { script };
    assert!(error.code() == Some("BADARG") && said.contains(by), "{script} {arguments:?}: {said}");
    assert!(said.contains(fault), "{script} {arguments:?}: {said}, not {fault}");
    let size: u64 = cmd("DBSIZE").query(redis).expect("a size");
    assert_eq!(size, 0, "{script} {arguments:?}");
}

#[test]
fn an_argument_that_is_missing_or_no_number_is_named() {
    let (_server, mut redis) = server();
    for script in Algorithm::all().map(|algorithm| algorithm.script().name()) {
        let (_, own) = OWN.iter().find(|(of, _)| *of == script).expect(script);
        let good = [words(own), vec!["1", "acquire", T]].concat();
        let names = names(script);
        assert_eq!(names.len(), good.len(), "{script}");
        for given in 0..good.len() {
            refused(&mut redis, script, &["key"], &good[..given], &format!("missing {}", names[given]));
        }
        refused(&mut redis, script, &[], &good, "0 KEYS");
        // Also a marker, which only calls that name their limits have.
        refused(&mut redis, script, &["key", "marker"], &good, "2 KEYS");
        for (at, name) in names.iter().enumerate().filter(|(_, name)| !["mode", "holder"].contains(&name.as_str())) {
            for bad in ["", "x", "1x", "1 000", "\0"] {
                // At the beginning, this tells the packed form.
                if (at, bad) == (0, "\0") {
                    continue;
                }
                let mut arguments = good.clone();
                arguments[at] = bad;
                refused(&mut redis, script, &["key"], &arguments, &format!("{name} is no number"));
            }
            for bad in ["0.5", "-7", "nan", "inf", "-inf", "1e300"] {
                let mut arguments = good.clone();
                arguments[at] = bad;
                // A cost that can never be had is denied, and a window may have begun before 1970.
                if ![("cost", "1e300"), ("first", "-7")].contains(&(name.as_str(), bad)) {
                    refused(&mut redis, script, &["key"], &arguments, "");
                }
            }
        }
        let more = [good.as_slice(), &["-1"]].concat();
        refused(&mut redis, script, &["key"], &more, "more than these");
        let mut arguments = good.clone();
        arguments[good.len() - 2] = "acquire+nothing";
        refused(&mut redis, script, &["key"], &arguments, "");
    }
}

#[test]
fn a_packed_argument_that_is_bad_is_refused() {
    let (_server, mut redis) = server();
    let good = bucket([1, 5, 1, 1_000_000, 1, 0, 1]);
    for (arguments, fault) in [
        (vec![&good[..31]], "expected a shape of this script's algorithms"),
        (vec![&bucket([2, 5, 1, 1_000_000, 1, 0, 1])[..]], "expected a shape of this script's algorithms"),
        (vec![&good[..40]], "expected an operation after the limits"),
        (vec![&good[..], b"x"], "now_us is out of range"),
        (vec![&good[..], b"-1", b"123456789"], "expected KEYS and costs for each limit of each call"),
    ] {
        for keys in [["key"].as_slice(), &[]] {
            let error = packed(&mut redis, "token_bucket", keys, &arguments).expect_err("bad arguments").to_string();
            assert!(error.contains("BADARG") && error.contains(fault), "{arguments:?}: {error}");
        }
    }
    let error = packed(&mut redis, "token_bucket", &[], &[&good]).expect_err("no key").to_string();
    assert!(error.contains("BADARG") && error.contains("expected KEYS"), "{error}");
}

#[test]
fn a_bad_argument_of_several_limits_is_named_and_nothing_is_charged() {
    let (_server, mut redis) = server();
    let limits = "token_bucket 5 1 2000000 1 0 fixed_window 5 5 10000000 0 0";
    let (two, three) = (["a", "b"].as_slice(), ["a", "b", "m"].as_slice());
    let both = "token_bucket+fixed_window";
    for (keys, arguments, fault) in [
        (two, "token_bucket".into(), "missing capacity"),
        (two, "token_bucket x".into(), "capacity is no number"),
        (two, limits.into(), "missing id_ttl"),
        (two, format!("{limits} 0"), "missing cost"),
        (two, format!("{limits} 0 1"), "missing mode"),
        (two, format!("{limits} 0 1 acquire"), "missing now_us"),
        (two, format!("{limits} 0 1 acquire+junk -1"), "an unknown option junk"),
        (two, format!("{limits} 0 1 refund+taken=1,2 -1"), "taken has other values than it needs"),
        (two, format!("{limits} 0 1 refund+taken=1,2,3,4 -1"), "taken has other values than it needs"),
        (two, format!("{limits} 0 1 refund+taken=1,2,4503599627370497 -1"), "taken is out of range"),
        (two, format!("{limits} x 1 acquire -1"), "id_ttl is no number"),
        (two, format!("{limits} 0 x acquire -1"), "cost is no number"),
        (two, format!("{limits} 0 1 acquire x"), "now_us is no number"),
        (two, format!("{limits} other 0 1 acquire -1"), "id_ttl is no number"),
        (
            two,
            "token_bucket 5 1 2000000 1 fixed_window 5 5 10000000 0 0 0 1 acquire -1".into(),
            "max_debt is no number",
        ),
        (&["a"], format!("{limits} 0 1 acquire -1"), "1 KEYS"),
        (&[], format!("{limits} 0 1 acquire -1"), "0 KEYS"),
        (two, format!("{limits} 1000 1 acquire -1"), "2 KEYS"),
        (&["a", "a"], format!("{limits} 0 1 acquire -1"), "two of KEYS are alike"),
        // What PX doesn't take, units that are no whole ones, and a marker that is a limit's state.
        (three, format!("{limits} 9223372036854775807 1 acquire -1"), "id_ttl is out of range"),
        (three, format!("{limits} 4503599627370497 1 acquire -1"), "id_ttl is out of range"),
        (three, format!("{limits} 0.5 1 acquire -1"), "id_ttl is out of range"),
        (three, format!("{limits} -1 1 acquire -1"), "id_ttl is out of range"),
        (three, format!("{limits} 1000 0.5 acquire -1"), "cost is out of range"),
        (three, format!("{limits} 1000 0.5 settle -1"), "cost is out of range"),
        (three, format!("{limits} 1000 1.5 cancel -1"), "cost is out of range"),
        (three, format!("{limits} 1000 0.5 at-most -1"), "cost is out of range"),
        (three, format!("{limits} 1000 9007199254740994 acquire -1"), "cost is out of range"),
        (two, format!("{limits} 0 0.5 refund -1"), "cost is out of range"),
        (two, format!("{limits} 0 nan acquire -1"), "cost is no number"),
        (two, format!("{limits} 0 1,2,3 acquire -1"), "expected one cost, or one for each limit"),
        (two, format!("{limits} 0 1,-1 acquire -1"), "cost is out of range"),
        (two, format!("{limits} 0 1,x acquire -1"), "cost is out of range"),
        (three, format!("{limits} 1000 1 acquire 0.5"), "now_us is out of range"),
        (&["a", "b", "a"], format!("{limits} 1000 1 acquire -1"), "two of KEYS are alike"),
    ] {
        refused(&mut redis, both, keys, &words(&arguments), fault);
    }
    let holders = "concurrency 8 30000000 ann concurrency 4 30000000 bob 0 1 acquire -1";
    refused(&mut redis, "token_bucket+concurrency", two, &words(holders), "one holder of all permits");
    let error = call(&mut redis, both, two, &words(&format!("{limits} 0 1 settle -1"))).expect_err("no id");
    assert!(error.code() == Some("BADARG") && error.to_string().contains("or an id"), "{error}");
}

#[test]
fn an_id_given_at_the_beginning_of_time_is_forgotten_in_time() {
    let (_server, mut redis) = server();
    let mut remaining = |now: u64| {
        let arguments = format!("token_bucket 5 1 1000000000000 1 0 1000 1 acquire {now}");
        call(&mut redis, "token_bucket", &["key", "marker"], &words(&arguments)).expect("a decision")[2]
    };
    assert_eq!([0, 999_999, 1_000_000, 1_000_001, 1_999_999, 2_000_000].map(&mut remaining), [4, 4, 3, 3, 3, 2]);
}

/// Redis 7.0 says on which line it refused a command, not which command that was.
#[test]
fn an_error_leads_to_the_command_that_redis_refused() {
    let (server, mut redis) = server();
    let (both, keys) = ("token_bucket+concurrency", ["a", "b", "m"]);
    let limits = "token_bucket 5 1 2000000 1 0 concurrency 5 10000000 me";
    let (acquire, reset) = (format!("{limits} 1000 1 acquire -1"), format!("{limits} 1000 1 reset -1"));
    for (command, arguments) in [("get", &acquire), ("time", &acquire), ("set", &acquire), ("del", &reset)] {
        cmd("FLUSHALL").exec(&mut redis).expect("flushed");
        let url = server.user("caller", &format!("~* +@all -{command}"));
        let mut caller = tollgate::redis::Client::open(url).and_then(|client| client.get_connection()).expect("a user");
        let said = call(&mut caller, both, &keys, &words(arguments)).expect_err("refused").to_string();
        let server_says = ["can't run this command or subcommand", "no permissions to run"];
        assert!(server_says.iter().any(|words| said.contains(words)), "{said}");
        let line = said.split_once("@user_script:").and_then(|(_, line)| line.trim_end_matches('.').parse().ok());
        let line = line.and_then(|line: usize| text(both).lines().nth(line - 1)).unwrap_or_default();
        let named = format!("'{}'", command.to_uppercase());
        assert!(line.contains(&named) || said.contains(&format!("'{command}'")), "{command}: {said}: {line}");
    }
    // A key of another type is said in full, and nothing is charged.
    cmd("FLUSHALL").exec(&mut redis).expect("flushed");
    cmd("RPUSH").arg("b").arg("x").exec(&mut redis).expect("a list");
    let error = call(&mut redis, both, &keys, &words(&acquire)).expect_err("a list");
    assert!(error.code() == Some("WRONGTYPE") && error.to_string().contains("wrong kind of value"), "{error}");
    let size: u64 = cmd("DBSIZE").query(&mut redis).expect("a size");
    assert_eq!(size, 1, "nothing was charged");
}

#[test]
fn a_log_keeps_what_exceeds_a_lowered_limit() {
    let (_server, mut redis) = server();
    let now: i64 = T.parse().expect("a number");
    for (entries, limit) in [(10, 5), (60, 20)] {
        let key = format!("{entries}");
        for n in 0..entries {
            let reply =
                answer(&mut redis, "sliding_window_log", &key, &format!("{entries} 10000000 1 acquire {}", now + n));
            assert_eq!(reply[0], 1);
        }
        let half = limit / 2;
        let at = now + entries;
        let own = format!("{limit} 10000000");
        // All that exceed the limit, and one more, have to leave first.
        let denied = answer(&mut redis, "sliding_window_log", &key, &format!("{own} 1 acquire {at}"));
        assert_eq!(denied[..4], [0, limit, 0, now + entries - limit + 10_000_000 - at]);
        for (given, remaining) in [(entries - limit, 0), (half, half), (limit - half, limit)] {
            let refund = answer(&mut redis, "sliding_window_log", &key, &format!("{own} {given} refund {at}"));
            assert_eq!(refund[..3], [1, limit, remaining]);
        }
    }
}

#[test]
fn a_log_that_was_given_back_to_counts_from_its_newest_entry_where_the_clock_steps_back() {
    let (_server, mut redis) = server();
    let now: i64 = T.parse().expect("a number");
    for limit in [3, 40] {
        let key = format!("{limit}");
        let mut at = |offset: i64, cost: i64, mode: &str| {
            let call = format!("{limit} 10000000 {cost} {mode} {}", now + offset);
            answer(&mut redis, "sliding_window_log", &key, &call)
        };
        assert_eq!(at(0, 1, "acquire")[0], 1);
        for n in 1..limit {
            assert_eq!(at(9_000_000 + n, 1, "acquire")[0], 1);
        }
        // The first has left: one more is taken and given back.
        assert_eq!(at(10_000_000, 1, "acquire")[2], 0);
        assert_eq!(at(10_000_000, 1, "refund")[2], 1);
        // Half a second earlier the first would count, but it has been forgotten. What is taken now comes after the
        // newest that is left.
        let again = at(9_500_000, 1, "acquire");
        assert_eq!(again, [1, limit, 0, 0, 10_000_000]);
        assert_eq!(at(9_500_000, 1, "acquire")[..4], [0, limit, 0, 9_500_001]);
        assert_eq!(at(19_000_001 - 1, 1, "acquire")[0], 0);
        assert_eq!(at(19_000_001, 1, "acquire")[0], 1);
    }
}

/// Its tail outlasts the refund, and what it held must not.
#[test]
fn a_long_log_whose_denials_were_counted_is_as_new_once_all_is_given_back() {
    let (_server, mut redis) = server();
    let mut call = |cost: u64, mode: &str, after_us: u64| {
        let now = 1_000_000_000_000_000 + after_us;
        answer(&mut redis, "sliding_window_log", "log", &format!("100 1000000 {cost} {mode} {now}"))
    };
    for entry in 0..22 {
        assert_eq!(call(1, "acquire", entry * 10_000)[0], 1);
    }
    assert_eq!(call(101, "acquire+overage", 700_000)[..4], [0, 100, 78, -1]);
    assert_eq!(call(100, "refund", 700_001)[..3], [1, 100, 100]);
    assert_eq!(call(99, "acquire", 700_002)[..3], [1, 100, 1]);
    assert_eq!(call(23, "acquire", 1_255_000)[..3], [0, 100, 1], "99 of them half a second ago");
    assert_eq!(call(1, "acquire", 1_255_000)[..3], [1, 100, 0]);
}

#[test]
fn scripts_refuse_an_option_that_is_malformed() {
    let (_server, mut redis) = server();
    let last = |mode: &str| ["1".to_owned(), mode.to_owned(), T.to_owned()];
    for (script, own) in [
        ("token_bucket", "1 1 10000000 1 0"),
        ("fixed_window", "1 1 10000000 0 0"),
        ("sliding_window_counter", "1 10000000 1"),
        ("sliding_window_log", "1 10000000"),
        ("concurrency", "1 10000000 me"),
    ] {
        let own: Vec<_> = own.split(' ').map(str::to_owned).collect();
        let together = [vec![script.to_owned()], own.clone(), vec!["0".to_owned()]].concat();
        for (name, own) in [(script, own), ("tollgate", together)] {
            let script_text = text(script);
            let mut call = |mode: &str| -> Result<Vec<i64>, _> {
                cmd("EVAL").arg(script_text).arg(1).arg(script).arg(&own).arg(&last(mode)).query(&mut redis)
            };
            for option in [
                "+block",
                "+block=",
                "+block=0",
                "+block=-1",
                "+block=1.5",
                "+block=1e3",
                "+block=0x10",
                "+block=x",
                "+block=2251799813685249",
                "+block=99999999999999999999",
                "+block=5x",
                "+block =5",
                "+blocks=5",
                "+block=5+block=6",
                "+within=2251799813685249",
                "+within=5+within=5",
                "+overage=5",
                "+taken=5",
                "+taken=5,6,7",
            ] {
                let error = call(&format!("acquire{option}")).expect_err(option).to_string();
                assert!(error.contains("BADARG") && error.contains(name), "{name} {option}: {error}");
            }
            for option in [
                "+block=1",
                "+block=2251799813685248",
                "+overage+block=7",
                "+within=2251799813685248",
                "+within=0+as-is",
            ] {
                let peeked = call(&format!("peek{option}")).unwrap_or_else(|error| panic!("{name} {option}: {error}"));
                assert_eq!(peeked[0], 1, "{name} {option}");
            }
        }
    }
}
