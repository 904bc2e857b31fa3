//! The packed form of the scripts, which decides many keys in one call, decides as their text form does. By raw calls
//! of the scripts on a real server; a packed call's arguments are read from the scripts' headers.

mod numbers_of_calls;
mod receipts;

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use tollgate::Algorithm;
use tollgate::redis::{Cmd, Connection, RedisError, cmd, pipe};
use tollgate_testing::effort::cases;
use tollgate_testing::redis_server::Server;
use tollgate_testing::repository::read;
use tollgate_testing::scripts::{Record, records};

const NOW: i64 = 1 << 50;
const KEYS: [&str; 3] = ["a", "b", "c"];

/// A script with a packed form, and the numbers that it takes.
#[derive(Debug)]
struct Form {
    algorithm: Algorithm,
    number: u8,
    names: Vec<&'static str>,
    widths: Vec<usize>,
}

#[derive(Clone, Copy, Debug)]
struct Numbers {
    capacity: i64,
    rate: i64,
    period: i64,
    tick: i64,
    max_debt: i64,
    start: i64,
}

/// A key, a cost, and how many calls of it.
type Group<'a> = (&'a str, i64, u32);
const SAMPLE: Numbers = Numbers { capacity: 5, rate: 5, period: 1_000_000, tick: 1, max_debt: 0, start: 0 };

impl Form {
    /// As the headers say it, such as `packed: BI5I7: 5, these`.
    fn all() -> Vec<Self> {
        let packs = |algorithm: &Algorithm| !algorithm.holds();
        let form = |algorithm: Algorithm| {
            let text = algorithm.script().text();
            let (_, section) = text.split_once("-- Numbers\n").expect("numbers");
            let (section, _) = section.split_once("\n--\n").expect("their end");
            let lines = section.lines().filter_map(|line| line.strip_prefix("--   "));
            let is_name = |name: &&str| name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_');
            let names: Vec<_> =
                lines.clone().filter_map(|line| line.split_once("  ")).map(|(name, _)| name).filter(is_name).collect();
            let packed = lines.clone().find_map(|line| line.strip_prefix("packed: B")).expect("how they are packed");
            let (format, number) = packed.split_once(": ").expect("a number");
            let (number, _) = number.split_once(", these").expect("a number");
            let widths: Vec<_> =
                format.split(['I', 'i']).skip(1).map(|width| width.parse().expect("a width")).collect();
            assert_eq!(names.len(), widths.len(), "{algorithm}");
            Self { algorithm, number: number.parse().expect("a byte"), names, widths }
        };
        let forms: Vec<_> = Algorithm::all().filter(packs).map(form).collect();
        assert_eq!(forms.len(), 5, "all but permits");
        forms
    }

    /// The script's own arguments at this time, as text.
    fn own(&self, numbers: &Numbers, now_us: i64) -> Vec<i64> {
        // Calendar windows are arguments of the script: here they follow each other as fixed ones do.
        let first = now_us - now_us.rem_euclid(numbers.period);
        let number = |name: &&str| match *name {
            "capacity" => numbers.capacity,
            "limit" => numbers.capacity.max(1),
            "rate" => numbers.rate,
            "period" => numbers.period,
            "tick" => numbers.tick,
            "max_debt" => numbers.max_debt,
            "first" => first,
            "second" => first + numbers.period,
            "stop" => first + 2 * numbers.period,
            "start" => numbers.start.min(numbers.period - 1),
            other => panic!("{other}: what is it?"),
        };
        self.names.iter().map(number).collect()
    }

    /// The longest reset, in microseconds.
    fn longest(&self, numbers: &Numbers) -> i64 {
        let Numbers { capacity, rate, period, tick, max_debt, .. } = *numbers;
        let span = capacity + max_debt;
        match self.algorithm {
            Algorithm::TokenBucket => (span * period + rate - 1) / rate * tick,
            Algorithm::FixedWindow => (span + rate - 1) / rate * period,
            Algorithm::SlidingWindow => 2 * period * tick,
            Algorithm::CalendarWindow | Algorithm::SlidingLog => period,
            other => panic!("{other}: when is it as if never used?"),
        }
    }

    /// The shape of acquires without options.
    fn pack(&self, own: &[i64], cost: i64) -> Vec<u8> {
        let packed = |(number, width): (&i64, &usize)| number.to_le_bytes()[..*width].to_vec();
        let numbers: Vec<_> = own.iter().zip(&self.widths).flat_map(packed).collect();
        [&[self.number], numbers.as_slice(), &[128, 0], &cost.to_le_bytes()[..7]].concat()
    }

    fn evalsha(&self, keys: &[&str]) -> Cmd {
        let mut call = cmd("EVALSHA");
        call.arg(self.algorithm.script().digest()).arg(keys.len()).arg(keys);
        call
    }

    fn text(&self, numbers: &Numbers, key: &str, cost: i64, mode: &str, now_us: i64) -> Cmd {
        let mut call = self.evalsha(&[key]);
        call.arg(self.own(numbers, now_us)).arg(cost).arg(mode).arg(now_us);
        call
    }

    /// One cost for all where they are alike, else a list; in server time without a `now_us`.
    fn packed(&self, numbers: &Numbers, groups: &[Group<'_>], now_us: Option<i64>) -> Cmd {
        let cost = groups[0].1;
        let twice = (1..groups.len()).any(|at| groups[..at].iter().any(|group| group.0 == groups[at].0));
        let alike = !twice && groups.iter().all(|group| (group.1, group.2) == (cost, 1));
        let mut call = self.evalsha(&groups.iter().map(|group| group.0).collect::<Vec<_>>());
        let server_us = || SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_micros() as i64;
        let own = self.own(numbers, now_us.unwrap_or_else(server_us));
        call.arg(self.pack(&own, cost)).arg(now_us.or((!alike).then_some(-1)).as_slice());
        if alike { call } else { call.arg(several(groups)).clone() }
    }
}

fn several(groups: &[Group<'_>]) -> Vec<u8> {
    groups.iter().flat_map(|(_, cost, calls)| [&calls.to_le_bytes()[..3], &cost.to_le_bytes()[..7]].concat()).collect()
}

fn decide(
    redis: &mut Connection,
    form: &Form,
    numbers: &Numbers,
    groups: &[Group<'_>],
    now_us: Option<i64>,
) -> Vec<Record> {
    let answer: Vec<u8> = form.packed(numbers, groups, now_us).query(redis).expect("decisions");
    let limit = form.own(numbers, NOW)[0];
    records(&answer, limit)
}

/// A server that knows the scripts.
fn server() -> (Server, Connection) {
    let server = Server::start();
    let mut redis = server.connection();
    for form in Form::all() {
        cmd("SCRIPT").arg("LOAD").arg(form.algorithm.script().text()).exec(&mut redis).expect("loaded");
    }
    (server, redis)
}

fn dumps(redis: &mut Connection, keys: &[&str]) -> Vec<Option<Vec<u8>>> {
    let mut all = pipe();
    keys.iter().for_each(|key| _ = all.cmd("DUMP").arg(key));
    all.query(redis).expect("values")
}

#[derive(Clone, Debug)]
enum Do {
    Packed(Vec<Group<'static>>),
    /// A cost in a mode of the text form, on both twins.
    Text(&'static str, i64, &'static str),
    Renumber,
}

fn numbers() -> impl Strategy<Value = Numbers> {
    let capacity = prop_oneof![3 => 0_i64..=12, 1 => 13_i64..=1000];
    let period = prop_oneof![1_i64..=30, 1_i64..=3_000_000];
    let start = prop_oneof![Just(-1_i64), 0_i64..=3_000_000];
    let tick = prop_oneof![3 => Just(1_i64), 1 => 1_i64..=1000];
    (capacity, 1_i64..=9, period, tick, 0_i64..=5, start).prop_map(|(capacity, rate, period, tick, max_debt, start)| {
        Numbers { capacity, rate, period, tick, max_debt, start }
    })
}

/// How far the time moves, in thousandths of the longest reset and microseconds, and what happens then.
type Step = (i64, i64, Do);
type Case = ([Numbers; 2], Vec<Step>);

fn step() -> impl Strategy<Value = Step> {
    let part =
        prop_oneof![4 => Just(0_i64), 8 => 0_i64..=30, 3 => 0_i64..=1200, 2 => -60_i64..=-1, 1 => -5000_i64..=-1000];
    let key = || proptest::sample::select(KEYS.to_vec());
    let groups = || proptest::collection::vec((key(), 0_i64..=8, 0_u32..=6), 1..=6);
    let alike = |(groups, cost): (Vec<Group<'static>>, _)| groups.into_iter().map(|(key, ..)| (key, cost, 1)).collect();
    let modes = proptest::sample::select(vec!["refund", "penalty", "block", "reserve", "acquire+overage"]);
    let what = prop_oneof![
        6 => groups().prop_map(Do::Packed),
        6 => (groups(), 0_i64..=8).prop_map(alike).prop_map(Do::Packed),
        3 => (key(), 0_i64..=20, modes).prop_map(|(key, cost, mode)| Do::Text(key, cost, mode)),
        1 => Just(Do::Renumber),
    ];
    (part, -2_i64..=3, what)
}

#[test]
fn a_packed_call_decides_as_calls_of_the_text_form_do() {
    let server = server().0;
    for form in Form::all() {
        let pairs = (numbers(), numbers(), any::<bool>()).prop_map(|(numbers, other, whole)| {
            let some = Numbers { capacity: other.capacity, rate: other.rate, ..numbers };
            [numbers, if whole { other } else { some }]
        });
        let config = Config { cases: cases(30), failure_persistence: None, ..Config::default() };
        let all = (pairs, proptest::collection::vec(step(), 1..=40));
        let outcome = TestRunner::new(config).run(&all, |case| play(&mut server.connection(), &form, case));
        outcome.unwrap_or_else(|failure| panic!("{}: {failure}", form.algorithm));
    }
}

fn play(redis: &mut Connection, form: &Form, ([mut numbers, mut other], steps): Case) -> Result<(), TestCaseError> {
    cmd("FLUSHALL").exec(redis).expect("flushed");
    let mut now = NOW;
    for (part, few, what) in steps {
        let longest = form.longest(&numbers);
        // Back by little or by much for both versions: what lies between is brought back by a batch's first call only
        // once that has written it.
        let both = [longest, form.longest(&other)];
        let reach = match part {
            0.. => longest,
            -999.. => both[0].min(both[1]),
            _ => both[0].max(both[1]),
        };
        now += reach * part / 1000 + few;
        match what {
            Do::Packed(groups) => {
                let decided = decide(redis, form, &numbers, &groups, Some(now));
                let expected = one_by_one(redis, form, &numbers, &groups, now);
                prop_assert_eq!(decided, expected, "{:?} {:?} at {}", numbers, groups, now);
            }
            Do::Text(key, cost, mode) => {
                let mode = if mode == "reserve" && !form.algorithm.reserves() { "penalty" } else { mode };
                let cost = if mode == "block" { longest * (cost / 2) / 10 } else { cost };
                for key in [key, &twin(key)] {
                    form.text(&numbers, key, cost, mode, now).exec(redis).expect("done");
                }
            }
            Do::Renumber => std::mem::swap(&mut numbers, &mut other),
        }
        let twins = KEYS.map(twin);
        let (states, expected) = (dumps(redis, &KEYS), dumps(redis, &twins.each_ref().map(String::as_str)));
        prop_assert_eq!(states, expected, "{:?} at {}", numbers, now);
    }
    Ok(())
}

fn twin(key: &str) -> String {
    format!("{key}-twin")
}

/// What the groups are answered if their calls are made one after the other, on the twins of the keys.
fn one_by_one(redis: &mut Connection, form: &Form, numbers: &Numbers, groups: &[Group<'_>], now: i64) -> Vec<Record> {
    let mut calls = pipe();
    for (key, cost, count) in groups {
        // No calls of it are like one that takes nothing, but for how many are allowed.
        let call = form.text(numbers, &twin(key), if *count == 0 { 0 } else { *cost }, "acquire", now);
        (0..(*count).max(1)).for_each(|_| _ = calls.add_command(call.clone()));
    }
    let replies: Vec<Vec<i64>> = calls.query(redis).expect("decisions");
    let mut rest = replies.as_slice();
    let record = |(_, _, count): &Group<'_>| {
        let (own, others) = rest.split_at((*count).max(1) as usize);
        rest = others;
        let last = own.last().expect("one at least");
        let blocked = last.len() > 5;
        let allowed: i64 = own.iter().take(*count as usize).map(|reply| reply[0]).sum();
        // Where no call is made, none has to wait.
        let wait = if *count == 0 { 0 } else { last[3] };
        [if blocked { -1 } else { allowed }, last[1], last[2], wait, last[4]]
    };
    groups.iter().map(record).collect()
}

#[test]
fn a_value_that_is_no_state_is_reported_as_such_and_left_unchanged() {
    let (_server, mut redis) = server();
    let numbers = Numbers { capacity: 100, ..SAMPLE };
    for form in Form::all() {
        let name = form.algorithm;
        cmd("FLUSHALL").exec(&mut redis).expect("flushed");
        for twin in ["", "-alone"] {
            for at in NOW - 40..NOW {
                form.text(&numbers, &format!("used{twin}"), 1, "acquire", at).exec(&mut redis).expect("decided");
            }
            form.text(&numbers, &format!("blocked{twin}"), 7_000_000, "block", NOW).exec(&mut redis).expect("blocked");
        }
        cmd("RPUSH").arg("list").arg("x").exec(&mut redis).expect("a list");
        let state: Vec<u8> = cmd("GET").arg("used").query(&mut redis).expect("a state");
        let poisoned = [
            ("junk", b"junk".to_vec()),
            ("empty", vec![]),
            ("ones", vec![255; state.len()]),
            ("longer", [state.as_slice(), b"x"].concat()),
            ("shorter", state[..state.len() - 1].to_vec()),
        ];
        for (key, value) in &poisoned {
            cmd("SET").arg(key).arg(value).exec(&mut redis).expect("set");
        }
        let bad: Vec<_> = poisoned.iter().map(|poison| poison.0).chain(["list"]).collect();
        let before = dumps(&mut redis, &bad);
        let keys = [&["fresh", "list", "used"], bad.as_slice(), &["blocked", "fresh"]].concat();
        let groups: Vec<_> = keys.iter().map(|key| (*key, 2, 1)).collect();
        for (key, record) in keys.iter().zip(decide(&mut redis, &form, &numbers, &groups, Some(NOW))) {
            if bad.contains(key) {
                assert_eq!(record[..2], [-2, 100], "{name}: {key}");
            } else {
                let alone = format!("{key}-alone");
                let alone = decide(&mut redis, &form, &numbers, &[(&alone, 2, 1)], Some(NOW));
                assert_eq!(alone, [record], "{name}: {key}");
            }
            if *key == "blocked" {
                assert_eq!(record[..4], [-1, 100, 0, 7_000_000], "{name}");
            }
        }
        let alone = dumps(&mut redis, &["fresh-alone", "used-alone", "blocked-alone"]);
        assert_eq!(dumps(&mut redis, &["fresh", "used", "blocked"]), alone, "{name}");
        for key in &bad {
            let code = if *key == "list" { "WRONGTYPE" } else { "BADSTATE" };
            for call in [form.packed(&numbers, &[(key, 2, 1)], Some(NOW)), form.text(&numbers, key, 2, "acquire", NOW)]
            {
                let error = call.exec(&mut redis).expect_err("no state");
                assert_eq!(error.code(), Some(code), "{name}: {key}: {error}");
            }
        }
        assert_eq!(dumps(&mut redis, &bad), before, "{name}");
    }
}

#[test]
fn in_server_time_every_key_expires_after_its_reset_and_time_is_read_once() {
    let (server, mut redis) = server();
    let numbers = Numbers { capacity: 8, rate: 8, period: 400_000, ..SAMPLE };
    server.reset_command_counts();
    for round in 0..12 {
        for form in Form::all() {
            let keys = KEYS.map(|key| format!("{}:{key}", form.algorithm));
            // Every other round one of them twice, which takes a list.
            let groups = [(0, 1), (1, 1 + round % 2), (0, 1), (2, 1)].map(|(at, calls)| (keys[at].as_str(), 1, calls));
            let begun = Instant::now();
            let decided = decide(&mut redis, &form, &numbers, &groups, None);
            for ((key, ..), record) in groups.iter().zip(&decided) {
                let ttl_ms: i64 = cmd("PTTL").arg(key).query(&mut redis).expect("an expiry");
                let passed = begun.elapsed().as_millis() as i64 + 1;
                let twice = 2 * form.longest(&numbers) / 1000;
                // A new key's expiry is far enough away for it not to be written with each call.
                let least =
                    if round == 0 && form.algorithm != Algorithm::CalendarWindow { twice } else { record[4] / 1000 }
                        - passed;
                let most = twice + 1000;
                assert!(record[4] > 0 && (least..=most).contains(&ttl_ms), "{key}: {record:?}, {ttl_ms} ms");
            }
        }
        std::thread::sleep(Duration::from_millis(150));
    }
    let (commands, forms) = (server.commands(), Form::all().len() as u64);
    assert_eq!([commands["evalsha"].0, commands["time"].0], [12 * forms; 2]);
    assert!(commands["setrange"].0 > 0 && commands["set"].0 > 3 * forms, "{commands:?}");
}

#[test]
fn bad_arguments_are_refused_and_nothing_is_written() {
    let (_server, mut redis) = server();
    for form in Form::all() {
        cmd("FLUSHALL").exec(&mut redis).expect("flushed");
        form.text(&SAMPLE, "a", 2, "acquire", NOW).exec(&mut redis).expect("decided");
        if form.algorithm == Algorithm::SlidingLog {
            let most = Numbers { capacity: 1 << 39, ..SAMPLE };
            form.text(&most, "a", 1, "peek", NOW).exec(&mut redis).expect("the largest limit");
        }
        let (own, now) = (form.own(&SAMPLE, NOW), NOW.to_string().into_bytes());
        let good = form.pack(&own, 1);
        let before = dumps(&mut redis, &KEYS);
        let mut refused = |why: String, arguments: &[&[u8]]| {
            for keys in [["a"].as_slice(), &["a", "b"]] {
                let error = form.evalsha(keys).arg(arguments).exec(&mut redis).expect_err(&why);
                // Numbers out of range may make windows that aren't around the time.
                let is_told = matches!(error.code(), Some("BADARG" | "STALE"));
                assert!(is_told, "{}: {why}: {error:?}", form.algorithm);
                assert_eq!(dumps(&mut redis, &KEYS), before, "{}: {why}", form.algorithm);
            }
        };
        for number in (0..=255_u8).filter(|number| *number != form.number) {
            refused(format!("algorithm {number}"), &[&[&[number], &good[1..]].concat(), &now]);
        }
        for length in 0..good.len() {
            refused(format!("{length} bytes of a shape"), &[&good[..length], &now]);
        }
        // An option whose value isn't there: block, within, id, taken, and all of them.
        for (options, values) in [(8, 7), (16, 7), (32, 7), (64, 14), (127, 35)] {
            let mut shape = [good.as_slice(), &[1; 35]].concat();
            shape[good.len() - 8] = options;
            for length in good.len()..good.len() + values {
                refused(format!("options {options} with {length} bytes"), &[&shape[..length], &now]);
            }
        }
        for now in ["-2", "0.5", "4503599627370497", "nan", "", "x"] {
            refused(format!("now {now:?}"), &[&good, now.as_bytes()]);
        }
        for length in [0, 1, 9, 11, 19, 21, 30] {
            let list = several(&[("", 1, 1); 3]);
            refused(format!("{length} bytes of costs"), &[&good, &now, &list[..length]]);
        }
        for (index, name) in form.names.iter().enumerate() {
            let with = |number: i64| form.pack(&[&own[..index], &[number], &own[index + 1..]].concat(), 1);
            if ["limit", "rate", "period", "tick"].contains(name) {
                refused(format!("{name} 0"), &[&with(0), &now]);
            }
            // The largest of its width but one; -2 where it has a sign, when a window may have begun.
            if *name != "first" {
                refused(format!("{name} too large"), &[&with(-2), &now]);
            }
            if ["limit", "capacity", "rate", "max_debt"].contains(name) {
                refused(format!("{name} 2^53"), &[&with(1 << 53), &now]);
            }
            // A window starts within its period.
            if let (&"start", Some(period)) = (name, form.names.iter().position(|name| *name == "period")) {
                refused("start at the period".into(), &[&with(own[period]), &now]);
            }
        }
    }
}

#[test]
fn a_denied_call_writes_nothing_and_a_key_given_often_is_not_over_admitted() {
    let (server, mut redis) = server();
    let allowed = |decided: &[Record]| decided.iter().map(|record| record[0]).collect::<Vec<_>>();
    for form in Form::all() {
        cmd("FLUSHALL").exec(&mut redis).expect("flushed");
        let decided = decide(&mut redis, &form, &SAMPLE, &[("a", 1, 1); 8], Some(NOW));
        assert_eq!(allowed(&decided), [1, 1, 1, 1, 1, 0, 0, 0], "{}", form.algorithm);
        let groups = [("b", 1, 3), ("c", 2, 3), ("b", 1, 3), ("c", 1, 3)];
        let decided = decide(&mut redis, &form, &SAMPLE, &groups, Some(NOW));
        assert_eq!(allowed(&decided), [3, 2, 2, 1], "{}", form.algorithm);
        server.reset_command_counts();
        let groups = [("a", 1, 3), ("b", 5, 1), ("a", 6, 2), ("fresh", 6, 1), ("c", 1, 1)];
        for groups in [groups.as_slice(), &groups.map(|group| (group.0, 6, 1)), &groups[4..]] {
            let decided = decide(&mut redis, &form, &SAMPLE, groups, Some(NOW));
            assert!(decided.iter().all(|record| record[0] == 0 && record[3] != 0), "{}: {decided:?}", form.algorithm);
        }
        let reads = ["evalsha", "get", "mget", "getrange", "exists", "strlen", "config|resetstat", "info"];
        let commands = server.commands();
        assert_eq!(commands["evalsha"].0, 3);
        assert!(commands.keys().all(|name| reads.contains(&name.as_str())), "{}: {commands:?}", form.algorithm);
    }
}

#[test]
fn a_call_across_slots_says_how_many_keys_follow() {
    let (_server, mut redis) = server();
    let form = Form::all().into_iter().find(|form| form.algorithm == Algorithm::TokenBucket).expect("a form");
    let text = read("lua/across_slots.lua") + form.algorithm.script().text();
    let numbers = form.pack(&form.own(&SAMPLE, NOW), 1);
    let mut ask = |count: &str, keys: usize| -> Result<Vec<u8>, RedisError> {
        let keys: Vec<_> = (0..keys).map(|key| format!("{key} of {keys}")).collect();
        cmd("EVAL").arg(&text).arg(0).arg(count).arg(keys).arg(&numbers).query(&mut redis)
    };
    for (count, keys) in
        [("0", 0), ("1", 1), ("-2", 2), ("2.5", 3), ("nan", 2), ("inf", 2), ("two", 2), ("4", 2), ("7998", 7998)]
    {
        let error = ask(count, keys).expect_err("a bad count");
        assert!(error.code() == Some("BADARG") && error.to_string().contains("across_slots"), "{count}: {error}");
    }
    for keys in [2, 7997] {
        let answer = ask(&keys.to_string(), keys).expect("decisions");
        assert!(records(&answer, 5).iter().all(|record| record[..3] == [1, 5, 4]), "{keys}");
    }
}
