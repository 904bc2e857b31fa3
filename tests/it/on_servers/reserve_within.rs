//! The scripts' option `+within`: a reservation that would wait too long is denied and takes nothing. By raw calls.

use std::cell::{Cell, RefCell};

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use tollgate::Algorithm;
use tollgate::redis::{Connection, cmd};
use tollgate_testing::oracle::{Answer, Oracle, Retry, Spec, Start};
use tollgate_testing::redis_server::Server;

const T: u64 = 1_000_000_000_000_000;

fn call(redis: &mut Connection, script: &str, keys: &[&str], arguments: &str) -> Vec<i64> {
    let text = Algorithm::all().map(Algorithm::script).find(|known| known.name() == script).expect("a script").text();
    let arguments: Vec<_> = arguments.split(' ').collect();
    let answer = cmd("EVAL").arg(text).arg(keys.len()).arg(keys).arg(&arguments).query(redis);
    answer.unwrap_or_else(|error| panic!("{script} {arguments:?}: {error}"))
}

/// The first five numbers.
fn five(answer: &Answer) -> [i64; 5] {
    let number = |value: u64| i64::try_from(value).expect("small");
    let retry = match answer.retry {
        Retry::Now => 0,
        Retry::AfterUs(us) => number(us),
        Retry::Never => -1,
    };
    [answer.allowed.into(), number(answer.limit), number(answer.remaining), retry, number(answer.reset_after_us)]
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Acquire,
    Reserve(Option<u64>),
    Peek,
    Owed,
    Refund,
    Penalty,
    Block,
}

/// Steps, each with its cost and the time since the one before.
fn steps() -> impl Strategy<Value = Vec<(Step, u64, u64)>> {
    let within = prop_oneof![Just(0), 0_u64..20_000_000, Just(1 << 51)];
    let step = prop_oneof![
        2 => Just(Step::Acquire),
        1 => Just(Step::Reserve(None)),
        6 => within.prop_map(|within| Step::Reserve(Some(within))),
        1 => Just(Step::Peek),
        2 => Just(Step::Owed),
        1 => Just(Step::Refund),
        1 => Just(Step::Penalty),
        1 => Just(Step::Block),
    ];
    prop::collection::vec((step, 0_u64..9, prop_oneof![Just(0), 0_u64..3_000_000]), 1..30)
}

#[test]
fn a_reservation_waits_no_longer_than_it_says_as_the_oracle_has_it() {
    let server = Server::start();
    let (redis, key) = (RefCell::new(server.connection()), Cell::new(0));
    for (script, own, spec) in [
        (
            "token_bucket",
            "4 3 1000000 1 7",
            Spec::TokenBucket { rate: 3, period_us: 1_000_000, capacity: 4, max_debt: 7, tick_us: 1 },
        ),
        (
            "token_bucket",
            "0 3 1000000 1 7",
            Spec::TokenBucket { rate: 3, period_us: 1_000_000, capacity: 0, max_debt: 7, tick_us: 1 },
        ),
        (
            "token_bucket",
            "4 3 1000 1000 7",
            Spec::TokenBucket { rate: 3, period_us: 1_000_000, capacity: 4, max_debt: 7, tick_us: 1000 },
        ),
        (
            "fixed_window",
            "5 2 700000 -1 6",
            Spec::FixedWindow { rate: 2, period_us: 700_000, capacity: 5, max_debt: 6, start: Start::FirstHit },
        ),
    ] {
        let mut runner = TestRunner::new(Config { cases: 64, failure_persistence: None, ..Config::default() });
        let result = runner.run(&(steps(), 0_u64..3), |(steps, option)| {
            key.set(key.get() + 1);
            let (name, mut now, mut oracle) = (format!("{script}-{}", key.get()), T, Oracle::new(spec));
            let options = ["", "+overage", "+block=400000"][usize::try_from(option).expect("small")];
            match option {
                1 => oracle.count_overage(),
                2 => oracle.block_for(Some(400_000)),
                _ => {}
            }
            for (step, cost, pause) in steps {
                now += pause;
                let (cost, mode, expected) = match step {
                    Step::Acquire => (cost, "acquire".to_owned(), oracle.acquire(cost, now)),
                    Step::Reserve(None) => (cost, "reserve".to_owned(), oracle.reserve(cost, now)),
                    Step::Reserve(Some(within)) => {
                        let expected = oracle.reserve_within(cost, Some(within), now);
                        (cost, format!("reserve+within={within}"), expected)
                    }
                    Step::Peek => (cost, "peek".to_owned(), oracle.peek(cost, now)),
                    Step::Owed => (0, "peek+within=0".to_owned(), oracle.clone().reserve_within(0, Some(0), now)),
                    Step::Refund => (cost, "refund".to_owned(), oracle.refund(cost, now)),
                    Step::Penalty => (cost, "penalty".to_owned(), oracle.penalty(cost, now)),
                    Step::Block => (cost * 100_000, "block".to_owned(), oracle.block(cost * 100_000, now)),
                };
                let answer = format!("{own} {cost} {mode}{options} {now}");
                let answer = call(&mut redis.borrow_mut(), script, &[&name], &answer);
                prop_assert_eq!(&answer[..5], five(&expected), "{} {} at {}: {:?}", mode, cost, now - T, oracle);
            }
            Ok(())
        });
        result.unwrap_or_else(|error| panic!("{script}: {error}"));
    }
}

#[test]
fn a_reservation_denied_for_its_wait_writes_nothing() {
    let server = Server::start();
    let mut redis = server.connection();
    let own = "1 1 1000000 1 9";
    let script = "token_bucket";
    let mut ask = |mode: &str| call(&mut redis, script, &[script], &format!("{own} 1 {mode} {T}"))[..4].to_vec();
    assert_eq!(ask("reserve+within=0"), [1, 1, 0, 0]);
    assert_eq!(ask("reserve+within=1000000"), [1, 1, 0, 1_000_000]);
    assert_eq!(ask("reserve+within=1999999"), [0, 1, 0, 2_000_000]);
    let before: Vec<u8> = cmd("DUMP").arg(script).query(&mut server.connection()).expect("a dump");
    assert_eq!(ask("reserve+within=0"), [0, 1, 0, 2_000_000]);
    let after: Vec<u8> = cmd("DUMP").arg(script).query(&mut server.connection()).expect("a dump");
    assert_eq!(before, after);
    assert_eq!(ask("reserve"), [1, 1, 0, 2_000_000]);
    let above = call(&mut redis, script, &[script], &format!("{own} 11 reserve+within=5 {T}"));
    assert_eq!(above[..4], [0, 1, 0, -1], "never, however long one waits");
}

#[test]
fn of_several_limits_one_that_would_wait_too_long_denies_for_all() {
    let server = Server::start();
    let mut redis = server.connection();
    let limits = "token_bucket 1 1 1000000 1 9 token_bucket 1 1 10000000 1 9";
    let mut ask = |mode: &str| {
        let (keys, id_ttl) = (&["fast", "slow", "id"][..if mode.starts_with("peek") { 2 } else { 3 }], 1000);
        let id_ttl = if keys.len() == 3 { id_ttl } else { 0 };
        call(&mut redis, "token_bucket", keys, &format!("{limits} {id_ttl} 1 {mode} {T}"))
    };
    assert_eq!(ask("reserve+within=0")[3], 0);
    assert_eq!(ask("cancel")[3], 0);
    assert_eq!(ask("reserve")[8], 0);
    let mut other = server.connection();
    let again = |redis: &mut Connection, mode: &str, key: &str| {
        call(redis, "token_bucket", &["fast", "slow", key], &format!("{limits} 1000 1 {mode} {T}"))
    };
    let denied = again(&mut other, "reserve+within=9999999", "second");
    assert_eq!((denied[0], denied[3], denied[5], denied[8], denied[10]), (1, 0, 0, 10_000_000, 0));
    let allowed = again(&mut other, "reserve+within=10000000", "second");
    assert_eq!((allowed[0], allowed[3], allowed[5], allowed[8], allowed[10]), (1, 1_000_000, 1, 10_000_000, 1));
    let same = again(&mut other, "reserve+within=10000000", "second");
    assert_eq!(same, allowed, "remembered by its id");
}
