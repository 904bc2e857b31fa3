//! The embedded engine answers as a real Redis does, call by call; and what Redis holds behind the answers is what the
//! laws say: unchanged by denials and peeks, expiring in time, and never overwritten where it can't be read.

use std::cell::RefCell;
use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError, TestRunner};
use tollgate::redis::{Connection, cmd};
use tollgate::{
    Algorithm, Charged, DecidedBy, Decision, Error, ErrorKind, KeyState, Limit, MaxDebt, Operation, Request,
    WindowStart,
};
use tollgate_testing::engines::{Engine, Micros, Subject, micros, time};
use tollgate_testing::histories::{beginning, call_of, lived, steps, steps_with};
use tollgate_testing::limits::{limit_of, two_limits};
use tollgate_testing::rules::{FIVE, FOUR, by_own_id, limit};

#[test]
fn the_embedded_engine_answers_as_redis_does() {
    let (embedded, redis) = (Engine::embedded(), Engine::redis());
    let limits = prop_oneof![4 => two_limits(), 1 => (spread(), spread())];
    let calls = steps_with(&CALLS, 1..=40);
    let keys = proptest::collection::vec(0_usize..3, 40);
    check(300, (limits, beginning(), calls, keys), |(limits, begin, calls, keys)| {
        // Both engines number their keys alike.
        let start = |engine| [0; 3].map(|_| Engine::subject(engine, limits.0.clone()));
        let (mut here, mut there) = (start(&embedded), start(&redis));
        let mut now = begin;
        for ((call, step), key) in calls.into_iter().zip(keys) {
            let (here, there) = (&mut here[key], &mut there[key]);
            prop_assert_eq!(&here.key, &there.key);
            let (cost, then) = step.aim(here, now);
            now = then;
            if matches!(call, Call::Change) {
                let other = if is(here, &limits.0) { &limits.1 } else { &limits.0 };
                (*here, *there) = (here.changed(other.clone()), there.changed(other.clone()));
                continue;
            }
            let ours = answer_to(&embedded, here, call, cost, now);
            let theirs = answer_to(&redis, there, call, cost, now);
            prop_assert_eq!(&ours.0, &theirs.0, "{:?} {} at {} on {}", call, cost, now, &here.rule);
            // Expiry runs in real time, and some passes between the two calls.
            match (ours.1, theirs.1) {
                (Some(ours), Some(theirs)) => prop_assert!(ours.abs_diff(theirs) < Duration::from_secs(5)),
                (ours, theirs) => prop_assert_eq!(ours, theirs),
            }
        }
        Ok(())
    });
}

#[derive(Clone, Copy, Debug)]
enum Call {
    Of(Operation),
    Inspect,
    Change,
}

const CALLS: [(u32, Call); 5] = [
    (8, Call::Of(Operation::Acquire)),
    (3, Call::Of(Operation::Peek)),
    (1, Call::Of(Operation::Reset)),
    (3, Call::Inspect),
    (1, Call::Change),
];

/// Fixed windows that start at an offset of the key's own.
fn spread() -> impl Strategy<Value = Limit> {
    limit_of(Algorithm::FixedWindow).prop_map(|like| {
        let limit = Limit::builder(Algorithm::FixedWindow, like.rate(), like.period()).capacity(like.capacity());
        let limit = limit.max_debt(MaxDebt::Units(like.max_debt())).start(WindowStart::Spread);
        limit.build().expect("only its start differs from one that can be built")
    })
}

fn is(subject: &Subject<'_>, limit: &Limit) -> bool {
    subject.limit().to_string() == limit.to_string()
}

/// An answer without the engine that gave it; of inspect, also the key, whether it exists, and its fields.
type Told = (Decision, Option<(String, bool, Vec<(&'static str, i64)>)>);

fn answer_to(engine: &Engine, subject: &Subject<'_>, call: Call, cost: u64, now: Micros) -> (Told, Option<Duration>) {
    let Engine { limiter, runtime, .. } = engine;
    let request = Request::new(&subject.key).cost(cost).at(time(now));
    let rule = &subject.rule;
    let operation = match call {
        Call::Of(operation) => operation,
        Call::Inspect | Call::Change => {
            let KeyState { key, decision, exists, expires_after, fields, .. } =
                runtime.block_on(limiter.inspect(rule, request)).expect("a state").remove(0);
            return ((by_redis(decision), Some((key, exists, fields))), expires_after);
        }
    };
    let request = if operation == Operation::Acquire { by_own_id(rule, request) } else { request };
    let decision = runtime.block_on(call_of(operation, limiter, rule, request));
    ((by_redis(decision.expect("a decision")), None), None)
}

fn by_redis(mut decision: Decision) -> Decision {
    decision.by = DecidedBy::Redis;
    decision
}

#[test]
fn a_denial_and_a_peek_leave_every_byte_in_redis() {
    let engine = Engine::redis();
    let redis = RefCell::new(behind(&engine));
    let stored = |subject: &Subject<'_>| stored_at(&mut redis.borrow_mut(), &name(subject));
    let limits = prop_oneof![5 => two_limits().prop_map(|(limit, _)| limit), 1 => spread()];
    check(300, (limits, beginning(), steps(1..=12), steps(1..=4)), |(limit, begin, past, next)| {
        let (subject, mut now) = lived(&engine, limit, begin, &past);
        for step in &next {
            let (cost, then) = step.aim(&subject, now);
            now = then;
            let before = stored(&subject);
            subject.peek(cost, then);
            prop_assert_eq!(&stored(&subject), &before, "a peek wrote");
            let rebased = is_far_ahead(&subject, then);
            if !subject.acquire(cost, then).allowed && !rebased {
                prop_assert_eq!(&stored(&subject), &before, "a denial wrote");
            }
        }
        Ok(())
    });
}

/// Whether the state's time lies further ahead than the longest reset, and so may be brought back (law 7).
fn is_far_ahead(subject: &Subject<'_>, now: Micros) -> bool {
    let limit = subject.limit();
    let is_time = |name: &str| ["time_us", "newest_us"].contains(&name);
    let written = subject.state(now).into_iter().find(|(name, _)| is_time(name)).expect("every state has a time");
    // Of the calendar, a window that is a short one is reach enough.
    let reach = if limit.window().is_some() { 0 } else { micros(limit.longest_reset()) - micros(limit.tick()) };
    let bound = now + reach;
    u64::try_from(written.1).expect("not before 1970") > bound
}

#[test]
fn state_that_cannot_be_read_charges_nothing_and_stays_until_a_reset() {
    let engine = Engine::redis();
    let mut redis = behind(&engine);
    let now = 1 << 50;
    let valid = FIVE.map(|rule| {
        let subject = engine.subject(limit(rule));
        subject.acquire(2, now);
        let state = cmd("GET").arg(name(&subject)).query::<Vec<u8>>(&mut redis).expect("state");
        (subject, state)
    });
    for (subject, state) in &valid {
        let mut poisons: Vec<Vec<u8>> = vec![b"abc".to_vec(), b"nan".to_vec(), b"100".to_vec()];
        poisons.extend((1..=20).flat_map(|seed| [44, 48, 59, 107].map(|size| noise(seed, size))));
        poisons.extend((1..state.len()).map(|end| state[..end].to_vec()));
        poisons.push([state.as_slice(), b"\0"].concat());
        poisons.extend(valid.iter().map(|(_, other)| other.clone()).filter(|other| other != state));
        let name = name(subject);
        for poison in poisons {
            cmd("SET").arg(&name).arg(&poison).exec(&mut redis).expect("poisoned");
            assert_unreadable(&engine, subject, &format!("{}: {poison:?}", subject.rule));
        }
        cmd("DEL").arg(&name).exec(&mut redis).expect("deleted");
        cmd("RPUSH").arg(&name).arg("a list").exec(&mut redis).expect("poisoned");
        assert_unreadable(&engine, subject, &format!("{}: a list", subject.rule));
    }
}

#[test]
fn an_empty_value_is_no_state_either() {
    let engine = Engine::redis();
    let mut redis = behind(&engine);
    for rule in FIVE {
        let subject = engine.subject(limit(rule));
        cmd("SET").arg(name(&subject)).arg("").exec(&mut redis).expect("poisoned");
        assert_unreadable(&engine, &subject, rule);
    }
}

/// Such a log isn't read at once: only its head shows how long it should be.
#[test]
fn a_long_log_cut_short_cannot_be_read_either() {
    let engine = Engine::redis();
    let mut redis = behind(&engine);
    let subject = engine.subject(limit("sliding-log 100/10s"));
    for n in 0..60 {
        assert!(subject.acquire(1, (1 << 50) + n).allowed);
    }
    let name = name(&subject);
    let state: Vec<u8> = cmd("GET").arg(&name).query(&mut redis).expect("state");
    for end in [240, 400, state.len() - 1] {
        cmd("SET").arg(&name).arg(&state[..end]).exec(&mut redis).expect("poisoned");
        assert_unreadable(&engine, &subject, &format!("{end} of {} bytes", state.len()));
    }
}

fn assert_unreadable(engine: &Engine, subject: &Subject<'_>, what: &str) {
    let mut redis = engine.server.as_ref().map(|_| behind(engine));
    let mut bytes = || redis.as_mut().map(|redis| stored_at(redis, &name(subject)));
    let before = bytes();
    let Engine { limiter, runtime, .. } = engine;
    let request = Request::new(&subject.key).at(time(1 << 50));
    let errors: [Option<Error>; 3] = [
        subject.try_acquire(1, 1 << 50).err(),
        runtime.block_on(limiter.peek(&subject.rule, request)).err(),
        runtime.block_on(limiter.inspect(&subject.rule, request)).err(),
    ];
    for error in errors {
        let error = error.unwrap_or_else(|| panic!("{what}: was read"));
        assert!(error.kind() == ErrorKind::UnreadableState, "{what}: {error:?}");
        assert_eq!(error.charged(), Charged::No, "{what}");
    }
    assert_eq!(bytes(), before, "{what}: something was written");
    subject.reset();
    assert_eq!(subject.acquire(1, 1 << 50).remaining, subject.limit().capacity() - 1, "{what}: reset");
    subject.reset();
}

#[test]
fn state_outlives_its_reset_and_is_gone_within_twice_the_longest_and_a_second() {
    let engine = Engine::redis();
    let mut redis = behind(&engine);
    for rule in FOUR.map(|rule| rule.replace("10s", "20ms")) {
        // Over some periods, so that the expiry is both kept and armed anew.
        let subject = engine.subject(limit(&rule));
        let (mut allowed, mut armed) = (0, Vec::new());
        while allowed < 100 {
            let began = server_time(&mut redis);
            let call = engine.limiter.acquire(&subject.rule, &subject.key);
            let decision = engine.runtime.block_on(call).expect("a decision");
            let ended = server_time(&mut redis);
            if !decision.allowed {
                continue;
            }
            let Some(expiry) = expiry(&mut redis, &name(&subject)) else {
                // A machine that is slow looks too late.
                let late = server_time(&mut redis);
                assert!(late >= began + micros(decision.reset_after), "{rule}: gone before it is reset");
                continue;
            };
            allowed += 1;
            let longest = micros(subject.limit().longest_reset());
            assert!(expiry >= began + micros(decision.reset_after), "{rule}: forgotten before it is reset");
            assert!(expiry <= ended + 2 * longest + 1_000_000, "{rule}: {} us left", expiry - ended);
            armed.push(expiry);
        }
        armed.dedup();
        assert!(armed.len() < allowed / 2, "{rule}: armed anew by nearly every call: {}", armed.len());
    }
}

#[test]
fn at_a_virtual_time_state_stays_for_an_hour_until_a_call_in_server_time() {
    let engine = Engine::redis();
    let mut redis = behind(&engine);
    for rule in FIVE {
        let subject = engine.subject(limit(rule));
        let now = server_time(&mut redis);
        assert!(subject.acquire(1, now).allowed);
        let armed = expiry(&mut redis, &name(&subject)).expect("a state");
        assert!(armed >= now + 3_600_000_000 - 1000, "{rule}: {} us", armed - now);

        let call = engine.limiter.acquire(&subject.rule, &subject.key);
        assert!(engine.runtime.block_on(call).expect("a decision").allowed);
        let armed = expiry(&mut redis, &name(&subject)).expect("a state");
        let (now, longest) = (server_time(&mut redis), micros(subject.limit().longest_reset()));
        assert!(armed <= now + 2 * longest + 1_000_000, "{rule}: not armed anew: {} us", armed - now);
    }
}

fn check<S: Strategy>(cases: u32, of: S, property: impl Fn(S::Value) -> Result<(), TestCaseError>) {
    let config = Config { cases, failure_persistence: None, max_global_rejects: 100_000, ..Config::default() };
    TestRunner::new(config).run(&of, property).unwrap_or_else(|failure| panic!("{failure}"));
}

/// A connection to look behind the engine's answers with.
fn behind(engine: &Engine) -> Connection {
    engine.server.as_ref().expect("a redis").connection()
}

fn name(subject: &Subject<'_>) -> String {
    format!("tollgate:{{{}}}:test/limit/{}", subject.key, subject.limit().algorithm())
}

/// The key's bytes, type and expiry.
fn stored_at(redis: &mut Connection, name: &str) -> (Option<Vec<u8>>, i64) {
    let bytes = cmd("DUMP").arg(name).query(redis).expect("a dump");
    (bytes, cmd("PEXPIRETIME").arg(name).query(redis).expect("an expiry"))
}

/// When a key expires; none if there is no key any more.
fn expiry(redis: &mut Connection, name: &str) -> Option<Micros> {
    let ms: i64 = cmd("PEXPIRETIME").arg(name).query(redis).expect("an expiry");
    assert_ne!(ms, -1, "the key has no expiry");
    Micros::try_from(ms).ok().map(|ms| 1000 * ms)
}

fn server_time(redis: &mut Connection) -> Micros {
    let (seconds, micros): (Micros, Micros) = cmd("TIME").query(redis).expect("the time");
    seconds * 1_000_000 + micros
}

/// Bytes without meaning, the same at every run.
fn noise(seed: u64, size: usize) -> Vec<u8> {
    let step = |state: &mut u64| {
        *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (*state >> 56) as u8
    };
    let mut state = seed;
    (0..size).map(|_| step(&mut state)).collect()
}
