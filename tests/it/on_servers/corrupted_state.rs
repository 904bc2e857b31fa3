//! State that another program has written: an error of its own, or a decision within the rule's bounds.

use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError, TestRunner};
use tollgate::redis::{Connection, RedisError, cmd};
use tollgate::{Algorithm, Charged, Decision, Error, ErrorKind, Operation, Request, Rule};
use tollgate_testing::effort;
use tollgate_testing::engines::{Engine, Micros, micros, time};
use tollgate_testing::histories::call_of;
use tollgate_testing::redis_server::Server;
use tollgate_testing::rules::{assert_of_every_algorithm, by_own_id};

/// Long enough that nothing refills during a test.
const RULES: [&str; 9] = [
    "token-bucket 5/1d max-debt 3",
    "token-bucket 1000000/30d burst 3000000",
    "fixed-window 5/1d burst 7 max-debt 3",
    "fixed-window 5/1d start first-hit",
    "fixed-window 5/month",
    "sliding-window 5/1d",
    "sliding-window 1000000/30d",
    "sliding-log 5/1d",
    "sliding-log 60/1d",
];
const NOW: Micros = 1_700_000_040_000_000;
const KEY: &str = "key";
/// Longer than any wait is.
const AGE: Micros = 1 << 53;
const CASES: u32 = 30;

/// What is done to the bytes of a state.
#[derive(Clone, Debug)]
enum Harm {
    Flip(usize, u8),
    Overwrite(usize, Vec<u8>),
    Cut(usize),
    Extend(Vec<u8>),
    Replace(Vec<u8>),
}

fn harm() -> impl Strategy<Value = Harm> {
    let extreme = (proptest::sample::select(vec![0_u8, 1, 0x7f, 0x80, 0xff]), 1..=9_usize);
    let bytes = prop_oneof![
        2 => proptest::collection::vec(any::<u8>(), 1..=8),
        3 => extreme.prop_map(|(byte, count)| vec![byte; count]),
    ];
    let whole = prop_oneof![
        proptest::collection::vec(any::<u8>(), 0..=130),
        proptest::sample::select(vec!["nan", "inf", "-inf", "1e308", "0", "-1", "{}", "\0"])
            .prop_map(|text| text.into()),
    ];
    prop_oneof![
        6 => (any::<usize>(), 0..8_u8).prop_map(|(at, bit)| Harm::Flip(at, bit)),
        6 => (any::<usize>(), bytes.clone()).prop_map(|(at, bytes)| Harm::Overwrite(at, bytes)),
        1 => any::<usize>().prop_map(Harm::Cut),
        1 => bytes.prop_map(Harm::Extend),
        1 => whole.prop_map(Harm::Replace),
    ]
}

fn harmed(mut state: Vec<u8>, harms: &[Harm]) -> Vec<u8> {
    for harm in harms {
        let length = state.len().max(1);
        match harm {
            Harm::Flip(at, bit) => _ = state.get_mut(at % length).map(|byte| *byte ^= 1 << bit),
            Harm::Overwrite(at, bytes) => {
                for (byte, new) in state.iter_mut().skip(at % length).zip(bytes) {
                    *byte = *new;
                }
            }
            Harm::Cut(at) => state.truncate(at % length),
            Harm::Extend(bytes) => state.extend_from_slice(bytes),
            Harm::Replace(bytes) => state = bytes.clone(),
        }
    }
    state
}

/// Each operation on what `put` has written, then all that can be taken of it, then a reset.
fn survive(
    engine: &Engine,
    redis: &mut Connection,
    rule: &Rule,
    operations: &[Operation],
    now: Option<Micros>,
    put: impl Fn(&mut Connection),
) -> Result<(), TestCaseError> {
    let on = |cost| {
        let request = Request::new(KEY).cost(cost);
        now.map_or(request, |now| request.at(time(now)))
    };
    let (limiter, run) = (&engine.limiter, &engine.runtime);
    let owes = rule.limits().all(|limit| limit.algorithm().reserves());
    let operations = operations.iter().filter(|operation| **operation != Operation::Reserve || owes);
    for (operation, cost) in operations.flat_map(|operation| [(*operation, 2), (*operation, 1 << 52)]) {
        put(redis);
        let before = dumps(redis);
        let mut requests = vec![on(cost).id("id")];
        match operation {
            Operation::Peek | Operation::Block => requests = vec![on(cost)],
            _ if of_an_id(operation, rule) => {}
            _ => requests.push(by_own_id(rule, on(cost))),
        }
        for request in requests {
            put(redis);
            let answer = run.block_on(call_of(operation, limiter, rule, request));
            let decided = answer.is_ok();
            judge(answer, operation, &before, redis)?;
            let left = run.block_on(limiter.inspect(rule, on(1)));
            // An entry of a log is looked at when its turn comes.
            let later = rule.to_string().starts_with("sliding-log");
            prop_assert!(!decided || later || left.is_ok(), "after {operation:?}: {left:?}");
        }
    }
    put(redis);
    if let Err(error) = run.block_on(limiter.inspect(rule, on(1))) {
        prop_assert!(error.kind() == ErrorKind::UnreadableState, "inspect: {error}");
    }

    put(redis);
    let (mut admitted, most) = (0, rule.limits().map(|limit| limit.capacity()).min().expect("a limit"));
    for _ in 0..8 {
        for answer in [
            run.block_on(limiter.at_most(rule, by_own_id(rule, on(most)))),
            run.block_on(limiter.acquire(rule, by_own_id(rule, on(1)))),
        ] {
            admitted += answer.map_or(0, |decision| decision.granted);
        }
    }
    prop_assert!(admitted <= most, "{admitted} admitted of {most}");

    put(redis);
    run.block_on(limiter.reset(rule, on(1).id("id"))).expect("repaired");
    let fresh = run.block_on(limiter.acquire(rule, on(1).id("id"))).expect("a decision");
    prop_assert!(fresh.allowed && fresh.remaining == most - 1, "after a reset: {fresh:?}");
    Ok(())
}

fn of_an_id(operation: Operation, rule: &Rule) -> bool {
    matches!(operation, Operation::Settle | Operation::Cancel | Operation::Renew | Operation::Release)
        || (operation == Operation::Refund && rule.to_string().contains("concurrency"))
}

/// An error that says what is wrong and has changed nothing, or an answer that can be true.
fn judge(
    answer: Result<Decision, Error>,
    operation: Operation,
    before: &[(String, Vec<u8>)],
    redis: &mut Connection,
) -> Result<(), TestCaseError> {
    let decision = match answer {
        Ok(decision) => decision,
        Err(error) => {
            let ends = matches!(operation, Operation::Settle | Operation::Cancel | Operation::Renew);
            // A harmed marker may read as one of another operation.
            let misused = error.is_input() && error.to_string().contains("another operation has used this id");
            let told = error.kind() == ErrorKind::UnreadableState || misused || (ends && error.is_unknown_id());
            prop_assert!(told, "{operation:?}: {error}");
            prop_assert_eq!(error.charged(), Charged::No);
            prop_assert_eq!(dumps(redis), before, "{:?} wrote: {}", operation, error);
            return Ok(());
        }
    };
    prop_assert!(decision.remaining <= decision.capacity, "{operation:?}: {decision:?}");
    let wait = decision.retry_after.duration().map_or(0, micros);
    prop_assert!(wait <= AGE && micros(decision.reset_after) <= AGE, "{operation:?}: {decision:?}");
    if !decision.allowed {
        prop_assert!(decision.retry_after != tollgate::RetryAfter::Now, "{operation:?}: {decision:?}");
    }
    Ok(())
}

fn dumps(redis: &mut Connection) -> Vec<(String, Vec<u8>)> {
    let mut keys: Vec<String> = cmd("KEYS").arg("*").query(redis).expect("keys");
    keys.sort();
    keys.into_iter().map(|key| (key.clone(), cmd("DUMP").arg(&key).query(redis).expect("a dump"))).collect()
}

const STRINGS: [Operation; 9] = [
    Operation::Acquire,
    Operation::Peek,
    Operation::AtMost,
    Operation::Reserve,
    Operation::Refund,
    Operation::Penalty,
    Operation::Block,
    Operation::Settle,
    Operation::Cancel,
];

/// States as calls leave them: used, used up and in debt, old, blocked, and with denials counted.
fn states(engine: &Engine, redis: &mut Connection, rule: &Rule, now: Option<Micros>) -> Vec<Vec<u8>> {
    let counting = rule.clone().count_overage(true);
    let most = rule.limits().next().expect("a limit").capacity();
    let on = |cost, back| {
        let request = Request::new(KEY).cost(cost);
        now.map_or(request, |now| request.at(time(now - back)))
    };
    let name = name(engine, rule);
    let (limiter, run) = (&engine.limiter, &engine.runtime);
    (0..5)
        .map(|which| {
            cmd("FLUSHALL").exec(redis).expect("flushed");
            for n in 0..most.min(40) / 2 {
                run.block_on(limiter.acquire(rule, on(1, 5_000_000 - n * 100_000))).expect("a decision");
            }
            let after = match which {
                0 => Ok(()),
                1 => run.block_on(limiter.penalty(rule, on(most, 0))).map(drop),
                2 => run.block_on(limiter.block(rule, on(1, 0), std::time::Duration::from_secs(60))).map(drop),
                3 => run.block_on(limiter.acquire(&counting, on(most, 0))).map(drop),
                _ => run.block_on(limiter.acquire(rule, on(1, 86_390_000_000))).map(drop),
            };
            after.expect("an answer");
            cmd("GET").arg(&name).query(redis).expect("a state")
        })
        .collect()
}

/// The key of a rule that has no state yet.
fn name(engine: &Engine, rule: &Rule) -> String {
    engine.runtime.block_on(engine.limiter.inspect(rule, KEY)).expect("a state").remove(0).key
}

fn cases() -> TestRunner {
    TestRunner::new(Config { cases: effort::cases(CASES), failure_persistence: None, ..Config::default() })
}

fn poisoned_strings(now: Option<Micros>) {
    let engine = Engine::redis();
    let redis = std::cell::RefCell::new(engine.server.as_ref().expect("a redis").connection());
    assert_of_every_algorithm(&RULES, &[Algorithm::Concurrency]);
    for text in RULES {
        let rule = tollgate_testing::rules::rule(text);
        let mut redis = redis.borrow_mut();
        let valid = states(&engine, &mut redis, &rule, now);
        cmd("FLUSHALL").exec(&mut *redis).expect("flushed");
        let name = name(&engine, &rule);
        let redis = std::cell::RefCell::new(&mut *redis);
        let harms = proptest::collection::vec(harm(), 1..=3);
        let cases_of = (proptest::sample::select(valid), harms, proptest::sample::select(STRINGS.to_vec()));
        let result = cases().run(&cases_of, |(state, harms, operation)| {
            let poison = harmed(state, &harms);
            survive(&engine, &mut redis.borrow_mut(), &rule, &[operation, Operation::Acquire], now, |redis| {
                cmd("FLUSHALL").exec(redis).expect("flushed");
                cmd("SET").arg(&name).arg(&poison).exec(redis).expect("poisoned");
            })
        });
        result.unwrap_or_else(|error| panic!("{text}: {error}"));
    }
}

#[test]
fn a_state_that_was_harmed_is_unreadable_or_decides_within_bounds() {
    poisoned_strings(Some(NOW));
}

#[test]
fn so_it_is_by_the_servers_time_and_the_scripts_short_way() {
    poisoned_strings(None);
}

/// Keys of another type and of no number, under every rule and every operation.
#[test]
fn every_operation_reports_a_foreign_value_as_unreadable_state() {
    let engine = Engine::redis();
    let mut redis = engine.server.as_ref().expect("a redis").connection();
    let poisons: [&[&str]; 12] = [
        &["SET", "", "nan"],
        &["SET", "", "inf"],
        &["SET", "", "-1e308"],
        &["SET", "", ""],
        &["RPUSH", "", "a"],
        &["HSET", "", "a", "b"],
        &["SADD", "", "a"],
        &["XADD", "", "1-1", "a", "b"],
        &["GEOADD", "", "1", "1", "a"],
        &["SETBIT", "", "900", "1"],
        &["ZADD", "", "1", "a"],
        &["ZADD", "", "-inf", "time"],
    ];
    for text in RULES.into_iter().chain(["concurrency 5 ttl 1d"]) {
        let rule = tollgate_testing::rules::rule(text);
        cmd("FLUSHALL").exec(&mut redis).expect("flushed");
        let name = name(&engine, &rule);
        let operations: &[Operation] = if text.starts_with("concurrency") { &PERMITS } else { &STRINGS };
        for poison in poisons {
            let put = |redis: &mut Connection| {
                cmd("FLUSHALL").exec(redis).expect("flushed");
                cmd(poison[0]).arg(&name).arg(&poison[2..]).exec(redis).expect("poisoned");
            };
            survive(&engine, &mut redis, &rule, operations, None, put)
                .unwrap_or_else(|error| panic!("{text}: {poison:?}: {error}"));
            put(&mut redis);
            let request = by_own_id(&rule, KEY);
            let error = engine.runtime.block_on(engine.limiter.acquire(&rule, request)).expect_err("no state");
            assert!(error.kind() == ErrorKind::UnreadableState, "{text}: {poison:?}: {error}");
        }
    }
}

const PERMITS: [Operation; 8] = [
    Operation::Acquire,
    Operation::Peek,
    Operation::AtMost,
    Operation::Refund,
    Operation::Penalty,
    Operation::Block,
    Operation::Renew,
    Operation::Release,
];

#[test]
fn permits_that_were_harmed_are_unreadable_or_decide_within_bounds() {
    let engine = Engine::redis();
    let redis = std::cell::RefCell::new(engine.server.as_ref().expect("a redis").connection());
    let rule = tollgate_testing::rules::rule("concurrency 5 ttl 10s");
    let name = name(&engine, &rule);
    let member = proptest::sample::select(vec![
        "time", "blocked", "denied", "denials", "1:id", "2:id", "3:id", "4:id", "5:id", "6:id", "1:other", "2:other",
        "1:", ":", "junk", "0:id", "-1:id", "1e1:id",
    ]);
    let now = NOW as f64;
    let near = proptest::sample::select(vec![0.0, 0.5, 1.0, -1.0, 5e6, 9_999_999.5, 1e7, 2e7, 1e9, -1e9]);
    let score = prop_oneof![
        6 => near.prop_map(move |offset| now + offset),
        2 => proptest::sample::select(vec![0.0, 0.5, 1.0, 3.7, 9007199254740993.0, 1e18, 1e300, f64::INFINITY]),
        1 => any::<f64>().prop_filter("a number", |score| !score.is_nan()),
    ];
    let signed = (score, any::<bool>()).prop_map(|(score, note)| if note { -score.abs() } else { score });
    let entries = proptest::collection::vec((member, signed), 0..=8);
    let stamp = proptest::option::weighted(0.8, proptest::sample::select(vec![0.0, 0.5, -3e6, 5e6, 3e7]));
    let operation = proptest::sample::select(PERMITS.to_vec());
    let result = TestRunner::new(Config { cases: effort::cases(60), failure_persistence: None, ..Config::default() })
        .run(&(entries, stamp, operation), |(entries, stamp, operation)| {
            survive(&engine, &mut redis.borrow_mut(), &rule, &[operation], Some(NOW), |redis| {
                cmd("FLUSHALL").exec(redis).expect("flushed");
                for (member, score) in &entries {
                    cmd("ZADD").arg(&name).arg(score).arg(member).exec(redis).expect("poisoned");
                }
                if let Some(offset) = stamp {
                    cmd("ZADD").arg(&name).arg(-(now + offset)).arg("time").exec(redis).expect("stamped");
                }
            })
        });
    result.unwrap_or_else(|error| panic!("{error}"));
}

/// The marker of an id, and the states in the same slot.
#[test]
fn a_marker_that_was_harmed_is_unreadable_or_answers_within_bounds() {
    let engine = Engine::redis();
    let redis = std::cell::RefCell::new(engine.server.as_ref().expect("a redis").connection());
    for texts in
        [&["token-bucket 5/1d"][..], &["token-bucket 5/1d", "sliding-log 7/1d"], &["gcra 5/1d", "concurrency 6 ttl 1d"]]
    {
        let first = tollgate_testing::rules::rule(texts[0]);
        let rule =
            texts[1..].iter().fold(first, |rule, text| rule.and(text.parse().expect("a limit")).expect("a rule"));
        let mut redis = redis.borrow_mut();
        let mut markers: Vec<(String, Vec<u8>)> = Vec::new();
        for operation in [Operation::Acquire, Operation::AtMost, Operation::Penalty, Operation::Settle] {
            cmd("FLUSHALL").exec(&mut *redis).expect("flushed");
            let request = Request::new(KEY).cost(2).at(time(NOW)).id("id");
            if operation == Operation::Settle {
                if texts.len() > 1 && texts[1].starts_with("concurrency") {
                    continue;
                }
                engine
                    .runtime
                    .block_on(call_of(Operation::Acquire, &engine.limiter, &rule, request))
                    .expect("a decision");
            }
            engine.runtime.block_on(call_of(operation, &engine.limiter, &rule, request)).expect("a decision");
            let keys: Vec<String> = cmd("KEYS").arg("*#*").query(&mut *redis).expect("keys");
            markers.push((keys[0].clone(), cmd("GET").arg(&keys[0]).query(&mut *redis).expect("a marker")));
        }
        let redis = std::cell::RefCell::new(&mut *redis);
        let operations =
            [Operation::Acquire, Operation::AtMost, Operation::Penalty, Operation::Settle, Operation::Cancel];
        let cases_of = (
            proptest::sample::select(markers),
            proptest::collection::vec(harm(), 1..=2),
            proptest::sample::select(operations.to_vec()),
        );
        let result = cases().run(&cases_of, |((name, marker), harms, operation)| {
            let poison = harmed(marker, &harms);
            let redis = &mut *redis.borrow_mut();
            cmd("FLUSHALL").exec(redis).expect("flushed");
            cmd("SET").arg(&name).arg(&poison).exec(redis).expect("poisoned");
            let before = dumps(redis);
            let request = Request::new(KEY).cost(2).at(time(NOW)).id("id");
            let answer = engine.runtime.block_on(call_of(operation, &engine.limiter, &rule, request));
            let of_another = "another operation has used this id";
            if answer
                .as_ref()
                .is_err_and(|error| error.kind() == ErrorKind::Refused && error.to_string().contains(of_another))
            {
                prop_assert_eq!(dumps(redis), before);
                return Ok(());
            }
            judge(answer, operation, &before, redis)
        });
        result.unwrap_or_else(|error| panic!("{texts:?}: {error}"));
    }
}

/// The time since then is none that a number holds, so the next window would begin at none that can be read.
#[test]
fn a_window_before_all_time_is_no_state() {
    let engine = Engine::redis();
    let mut redis = engine.server.as_ref().expect("a redis").connection();
    let rule = tollgate_testing::rules::rule("fixed-window 5/3us");
    let (name, request) = (name(&engine, &rule), Request::new(KEY).at(time(NOW)));
    let acquire = || engine.runtime.block_on(engine.limiter.acquire(&rule, request));
    acquire().expect("a decision");
    let [window @ .., _] = (-24 * ((1_i64 << 54) / 24 + 1)).to_le_bytes();
    cmd("SETRANGE").arg(&name).arg(7).arg(&window).exec(&mut redis).expect("poisoned");
    assert!(acquire().expect_err("no state").kind() == ErrorKind::UnreadableState);
}

#[test]
fn numbers_out_of_range_take_nothing_also_where_the_key_is_of_the_others() {
    let server = Server::start();
    let mut redis = server.connection();
    let hour = 3_600_000_000;
    let seconds: i64 = cmd("TIME").query::<(i64, i64)>(&mut redis).expect("the time").0;
    let begun = (seconds - 60) * 1_000_000;
    // Of each limit the good numbers, each in so many bytes, and the one that becomes another.
    type Numbers = Vec<(i64, usize)>;
    let bucket = |debt| vec![(1, 1), (5, 7), (1, 7), (hour, 7), (1, 3), (debt, 7)];
    let window = |debt| vec![(2, 1), (5, 7), (5, 7), (hour, 7), (0, 7), (debt, 7)];
    let calendar = |stop| vec![(3, 1), (5, 7), (begun, 7), (begun + hour, 7), (stop, 7)];
    let cases: [(Algorithm, Numbers, Numbers); 5] = [
        (Algorithm::TokenBucket, bucket(0), bucket((1 << 53) - 1)),
        (Algorithm::FixedWindow, window(0), window((1 << 53) - 1)),
        (Algorithm::CalendarWindow, calendar(begun + 2 * hour), calendar(begun + hour)),
        (Algorithm::CalendarWindow, calendar(begun + 2 * hour), calendar(0)),
        (Algorithm::CalendarWindow, calendar(begun + 2 * hour), calendar(begun)),
    ];
    for (algorithm, good, bad) in cases {
        let shape = |numbers: &Numbers| -> Vec<u8> {
            let acquire = [(128, 1), (0, 1), (1, 7)];
            numbers.iter().chain(&acquire).flat_map(|(number, width)| number.to_le_bytes()[..*width].to_vec()).collect()
        };
        for keys in [["a"].as_slice(), &["a", "missing"]] {
            cmd("FLUSHALL").exec(&mut redis).expect("flushed");
            let mut call = |numbers: &Numbers, keys: &[&str]| -> Result<Vec<u8>, RedisError> {
                let text = algorithm.script().text();
                cmd("EVAL").arg(text).arg(keys.len()).arg(keys).arg(shape(numbers)).query(&mut redis)
            };
            call(&good, &["a"]).expect("a decision");
            let error = call(&bad, keys).expect_err("numbers out of range");
            assert_eq!(error.code(), Some("BADARG"), "{algorithm} {bad:?}: {error}");
            let left = call(&good, &["a"]).expect("a decision");
            assert_eq!(left[0], 3, "{algorithm} {bad:?}");
        }
    }
}
