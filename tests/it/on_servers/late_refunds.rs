//! Units given back late: never more than is still owed, so the rule's bound holds whatever comes in between.

use std::num::NonZeroU32;
use std::time::{Duration, UNIX_EPOCH};

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use tollgate::redis::cmd;
use tollgate::{
    Algorithm, Clock, DecidedBy, Decision, Embedded, Limit, Limiter, Operation, Redis, Request, Rule, Script,
};
use tollgate_testing::effort::cases;
use tollgate_testing::engines::{Engine, Micros, micros, on_both_engines, time};
use tollgate_testing::oracle::Oracle;
use tollgate_testing::oracle_spec::oracle;
use tollgate_testing::redis_server::Server;
use tollgate_testing::rules::{FIVE, assert_of_every_algorithm, limit, rule};

/// Ten sleepers each reserve 100 units; Redis is unreachable, they are dropped, and their cancellations arrive one by
/// one, between the calls of others. All of it may have at most the capacity and what refills.
#[tokio::test]
async fn reservations_cancelled_after_an_outage_give_back_what_is_still_owed() {
    let server = Server::start();
    let redis =
        Limiter::builder(Redis::open(&server.url()).expect("an address")).deadline(Duration::from_secs(10)).build();
    for (engine, limiter) in [("redis", redis), ("embedded", Limiter::new(Embedded::new()))] {
        let text = "token-bucket 100/1s burst 100 max-debt 1000";
        for outage in [250, 1_000, 2_500, 6_000, 9_900, 11_000, 30_000_u64] {
            let (rule, begin) = (rule(text), 1_u64 << 50);
            let key = format!("{engine} {text} {outage}");
            let ids: Vec<_> = (0..10).map(|n| format!("sleeper {n}")).collect();
            let at = |ms: u64| Request::new(&key).at(time(begin + ms * 1000));
            assert!(limiter.acquire(&rule, at(0).cost(100)).await.expect("a decision").allowed);
            for id in &ids {
                assert!(limiter.reserve(&rule, at(0).cost(100).id(id)).await.expect("a decision").allowed);
            }
            // Each cancellation a while after the one before, and before it a caller who takes what there is.
            let mut taken = 100;
            for (n, id) in ids.iter().enumerate() {
                let now = outage + 150 * n as u64;
                taken += limiter.at_most(&rule, at(now).cost(100)).await.expect("a decision").granted;
                limiter.cancel(&rule, at(now).id(id)).await.expect("an answer");
            }
            let last = outage + 150 * 9;
            taken += limiter.at_most(&rule, at(last).cost(100)).await.expect("a decision").granted;
            let most = 100 + 100 * last / 1000;
            assert!(taken <= most, "{key}: {taken} of {most}");
            // What nobody used and nobody owes is there again.
            let rested = limiter.peek(&rule, at(last + 12_000).cost(100)).await.expect("a decision");
            assert!(rested.allowed, "{key}: {rested:?}");
        }
    }
}

/// A call of a history: who, when, and what.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// Reserves under an id of its own, and keeps it.
    Keeps(u64),
    /// Reserves under an id of its own, to be cancelled by a later step.
    Drops(u64),
    /// Takes what there is, up to this.
    Takes(u64),
    /// Cancels one of those that are to be cancelled.
    Cancels(usize),
    /// Lets so many milliseconds pass.
    Passes(u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        2 => (1_u64..=100).prop_map(Step::Keeps),
        3 => (1_u64..=100).prop_map(Step::Drops),
        3 => (1_u64..=100).prop_map(Step::Takes),
        3 => any::<usize>().prop_map(Step::Cancels),
        4 => (1_u64..=1500).prop_map(Step::Passes),
    ]
}

/// Whatever is cancelled, and whenever: the key never has more than if the cancelled calls had never been; but for
/// reservations that are given up before their turn, which give back all, though those before them may have left too.
#[test]
fn however_late_a_cancellation_comes_the_key_has_no_more_than_without_its_call() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    let config = Config { cases: cases(150), failure_persistence: None, ..Config::default() };
    let texts = [
        "token-bucket 100/1s burst 100 max-debt 300",
        "fixed-window 100/1s burst 200 max-debt 300",
        "fixed-window 100/1s",
        "sliding-window 100/1s",
        "sliding-log 100/1s",
    ];
    // Permits are given back by their holder, and of the calendar's windows only one begins in a while.
    assert_of_every_algorithm(&texts, &[Algorithm::CalendarWindow, Algorithm::Concurrency]);
    let histories = (proptest::sample::select(texts.to_vec()), proptest::collection::vec(step(), 1..=60));
    let outcome = TestRunner::new(config).run(&histories, |(text, steps)| {
        let rule: Rule = rule(text);
        let limit = rule.limits().next().expect("a limit");
        let limiter = Limiter::new(Embedded::new());
        let mut without = oracle(limit);
        let (mut now, mut dropped, mut unused) = (1_u64 << 50, Vec::new(), 0);
        for (n, step) in steps.into_iter().enumerate() {
            let at = Request::new("key").at(time(now));
            match step {
                Step::Keeps(cost) | Step::Drops(cost) => {
                    let (id, reserves) = (format!("call {n}"), limit.max_debt() > 0);
                    let request = at.cost(cost).id(&id);
                    let decision = match reserves {
                        true => runtime.block_on(limiter.reserve(&rule, request)),
                        false => runtime.block_on(limiter.acquire(&rule, request)),
                    };
                    let decision = decision.expect("a decision");
                    let wait = decision.retry_after.duration().unwrap_or_default();
                    match step {
                        _ if !decision.allowed => {}
                        Step::Drops(_) => dropped.push((id, now + micros(wait), cost)),
                        _ => drop(without.penalty(cost, now)),
                    }
                }
                Step::Takes(most) => {
                    let decision = runtime.block_on(limiter.at_most(&rule, at.cost(most))).expect("a decision");
                    without.penalty(decision.granted, now);
                }
                Step::Cancels(which) if !dropped.is_empty() => {
                    let (id, turn, cost) = dropped.swap_remove(which % dropped.len());
                    unused += if now < turn { cost } else { 0 };
                    runtime.block_on(limiter.cancel(&rule, at.id(&id))).expect("an answer");
                }
                Step::Cancels(_) => {}
                Step::Passes(ms) => now += ms * 1000,
            }
            let has = runtime.block_on(limiter.peek(&rule, Request::new("key").at(time(now)).cost(0)));
            let (has, most) = (has.expect("a decision"), without.peek(0, now));
            prop_assert!(has.remaining <= most.remaining + unused, "{}: {:?}, without {:?}", text, has, most);
        }
        Ok(())
    });
    outcome.unwrap_or_else(|failure| panic!("{failure}"));
}

/// Wherever that clock stands beside the machine's.
#[tokio::test]
async fn a_refund_after_a_decision_goes_by_the_clock_that_the_engine_was_given() {
    let mut seen = 0;
    for begin in [1_000_000_000, 4_000_000_000].map(|seconds| UNIX_EPOCH + Duration::from_secs(seconds)) {
        for (text, later) in FIVE.into_iter().flat_map(|text| [0, 3, 4, 9, 12, 90_000].map(|later| (text, later))) {
            let (rule, clock, later) = (rule(text), Clock::new(begin), Duration::from_secs(later));
            let given = Limiter::new(Embedded::with_clock(clock.clone()));
            let first = given.acquire(&rule, Request::new("key").cost(3)).await.expect("a decision");
            given.acquire(&rule, Request::new("key").cost(2)).await.expect("a decision");
            clock.advance(later);
            let before = given.peek(&rule, "key").await.expect("a decision").remaining;
            let after = given.refund(&rule, Request::new("key").cost(3).after(&first)).await.expect("an answer");

            let told = Limiter::new(Embedded::new());
            let at = Request::new("key").at(begin);
            let first = told.acquire(&rule, at.cost(3)).await.expect("a decision");
            told.acquire(&rule, at.cost(2)).await.expect("a decision");
            let request = at.at(begin + later).cost(3).after(&first);
            let expected = told.refund(&rule, request).await.expect("an answer");
            assert_eq!(after.remaining, expected.remaining, "{text}, {later:?} later");
            seen += u64::from(after.remaining < 5 && after.remaining < before + 3);
        }
        let limiter = Limiter::new(Embedded::with_clock(Clock::new(begin)));
        let hot = rule("token-bucket 1000/1d");
        let lease = limiter.lease(&hot, "hot", NonZeroU32::MIN).expect("a lease");
        let mut decision = lease.acquire(1).await.expect("a decision");
        while decision.by != DecidedBy::Lease {
            decision = lease.acquire(1).await.expect("a decision");
        }
        lease.give_back().await.expect("an answer");
        let before = limiter.peek(&hot, "hot").await.expect("a decision").remaining;
        let after = limiter.refund(&hot, Request::new("hot").after(&decision)).await.expect("an answer");
        assert_eq!(after.remaining, before + 1, "{begin:?}");
    }
    assert!(seen >= 4, "{seen} refunds of units that had come back in part");
}

/// Of a window whose unused units roll over, what a call left may have passed in part with the window that it was in.
#[tokio::test]
async fn a_refund_after_a_decision_gives_back_no_units_of_a_window_that_has_ended() {
    let clock = Clock::new(time(1_000_000_000_000_100));
    let limiter = Limiter::new(Embedded::with_clock(clock.clone()));
    let rule = rule("fixed-window 3/1s burst 5");
    let take = async |cost: u64| limiter.acquire(&rule, Request::new("key").cost(cost)).await.expect("a decision");
    assert!(take(2).await.allowed);
    let attempt = take(3).await;
    clock.advance(Duration::from_secs(1));
    assert_eq!(take(1).await.remaining, 2);
    // Three of the first five have passed with their window, at most one of the attempt's is known to be owed.
    let refund = Request::new("key").cost(3).after(&attempt);
    assert_eq!(limiter.refund(&rule, refund).await.expect("an answer").remaining, 3);
}

/// A limit of which a few units come back within seconds.
fn quick() -> impl Strategy<Value = Limit> {
    (0..6, 1_u64..=12, 0_u64..=12, 1_u64..=10).prop_map(|(algorithm, rate, more, seconds)| {
        limit(&match algorithm {
            0 => format!("token-bucket {rate}/{seconds}s burst {}", more + 1),
            1 => format!("fixed-window {rate}/{seconds}s burst {}", rate + more),
            2 => format!("fixed-window {rate}/{seconds}s burst {} start first-hit", rate + more),
            3 => format!("sliding-window {rate}/{seconds}s"),
            4 => format!("sliding-log {rate}/{seconds}s"),
            _ => format!("fixed-window {rate}/day"),
        })
    })
}

/// A call on all limits, some time after the one before.
#[derive(Clone, Copy, Debug)]
enum Call {
    Acquire(u64),
    Penalty(u64),
    /// Of what one of the calls before took.
    Refund(usize, u64),
}

fn calls() -> impl Strategy<Value = Vec<(Micros, Call)>> {
    let later = prop_oneof![2 => Just(0), 4 => (1_u64..=12).prop_map(|n| n * 250_000), 1 => 0_u64..=5_000_000];
    let call = prop_oneof![
        6 => (1_u64..=6).prop_map(Call::Acquire),
        1 => (1_u64..=20).prop_map(Call::Penalty),
        4 => (any::<usize>(), 1_u64..=8).prop_map(|(which, units)| Call::Refund(which, units)),
    ];
    proptest::collection::vec((later, call), 1..=40)
}

/// A call that took units: its answer, how it left each limit, and what others have given back to each since.
struct Taker {
    decision: Decision,
    at: Micros,
    left: Vec<Oracle>,
    given_since: Vec<u64>,
}

/// Whatever came in between, and at whatever rates.
#[test]
fn after_a_decision_each_limit_gets_back_no_more_than_is_still_owed_to_it() {
    let limits = proptest::collection::vec(quick(), 1..=4);
    // Also across the end of a day.
    let begin = (0_u64..=80).prop_map(|quarters| 86_400_000_000 * 13_000 - quarters * 250_000);
    on_both_engines((limits, begin, calls()), |engine, (limits, begin, calls)| {
        let mut named =
            limits.iter().enumerate().map(|(n, limit)| limit.clone().named(&format!("l{n}")).expect("a name"));
        let first = Rule::new("test", named.next().expect("a limit")).expect("a name");
        let rule = named.try_fold(first, Rule::and).expect("different names");
        let mut oracles: Vec<Oracle> = limits.iter().map(oracle).collect();
        let (key, mut now, mut takers) = (engine.fresh_key(), begin, Vec::<Taker>::new());
        for (later, call) in calls {
            now += later;
            let at = Request::new(&key).at(time(now));
            let said = format!("{call:?} at {now} on {rule}");
            let (decision, expected) = match call {
                Call::Refund(which, units) if !takers.is_empty() => {
                    let Taker { decision, at: since, left, given_since } = takers.swap_remove(which % takers.len());
                    let units = units.min(decision.granted);
                    let answer =
                        engine.call(engine.limiter.call(Operation::Refund, &rule, at.cost(units).after(&decision)));
                    let mut expected = Vec::new();
                    for (n, oracle) in oracles.iter_mut().enumerate() {
                        let reset = micros(decision.limits[n].reset_after);
                        let (answer, given) = oracle.refund_after((since, reset), units, now);
                        let owed = units.min(left[n].in_use(now));
                        prop_assert!(given <= owed + given_since[n], "{}: l{} gets {} of {}", said, n, given, owed);
                        takers.iter_mut().for_each(|taker| taker.given_since[n] += given);
                        expected.push(answer);
                    }
                    (answer, expected)
                }
                Call::Refund(..) => continue,
                Call::Acquire(cost) if oracles.iter().any(|oracle| !oracle.peek(cost, now).allowed) => {
                    let denied = engine.call(engine.limiter.acquire(&rule, at.cost(cost)));
                    prop_assert!(!denied.allowed && denied.granted == 0, "{}: {:?}", said, denied);
                    continue;
                }
                Call::Acquire(cost) => {
                    let decision = engine.call(engine.limiter.acquire(&rule, at.cost(cost)));
                    (decision, oracles.iter_mut().map(|oracle| oracle.acquire(cost, now)).collect())
                }
                Call::Penalty(cost) => {
                    let decision = engine.call(engine.limiter.penalty(&rule, at.cost(cost)));
                    (decision, oracles.iter_mut().map(|oracle| oracle.penalty(cost, now)).collect())
                }
            };
            for (own, expected) in decision.limits.iter().zip(&expected) {
                let own = (own.remaining, micros(own.reset_after));
                prop_assert_eq!(own, (expected.remaining, expected.reset_after_us), "{}: {:?}", said, decision);
            }
            if decision.granted > 0 {
                takers.push(Taker { decision, at: now, left: oracles.clone(), given_since: vec![0; limits.len()] });
            }
        }
        Ok(())
    });
}

#[test]
fn a_limit_that_the_decision_does_not_know_gets_nothing_back() {
    for engine in [Engine::embedded(), Engine::redis()] {
        let (one, two) = (rule("token-bucket 5/10s"), rule("token-bucket 5/10s, fixed-window 5/day"));
        let request = Request::new("key").at(time(1 << 50));
        let decision = engine.call(engine.limiter.acquire(&one, request.cost(3)));
        engine.call(engine.limiter.acquire(&two, request.cost(2)));
        // By a copy of the request, which outlives the decision's.
        let refund = request.cost(3).after(&decision).into_owned();
        drop(decision);
        let after = engine.call(engine.limiter.refund(&two, &refund));
        assert_eq!(after.limits.iter().map(|limit| limit.remaining).collect::<Vec<_>>(), [3, 3]);
    }
}

/// What the reset says of the units that are left goes by the numbers of then.
#[test]
fn a_refund_after_a_decision_under_slower_numbers_gives_back_no_units_that_have_passed() {
    for engine in [Engine::embedded(), Engine::redis()] {
        let (slow, fast) = (rule("token-bucket 1/10s burst 10"), rule("token-bucket 10/10s burst 10"));
        let at = |seconds: u64| Request::new("key").cost(5).at(time((1 << 50) + seconds * 1_000_000));
        let first = engine.call(engine.limiter.acquire(&slow, at(0)));
        assert!(engine.call(engine.limiter.acquire(&slow, at(0))).allowed);
        // Six have passed at the faster rate, the first five among them.
        let after = engine.call(engine.limiter.refund(&fast, at(6).after(&first)));
        assert_eq!(after.remaining, 6);
    }
}

/// What the guide says of turns, of which one is cancelled.
#[test]
fn who_reserves_after_a_cancelled_reservation_gets_the_last_turn_too() {
    let engine = Engine::embedded();
    let rule = rule("token-bucket 1/1s burst 0 max-debt 10");
    let request = Request::new("key").at(time(1 << 50));
    let turn = |id| {
        let reserved = engine.call(engine.limiter.reserve(&rule, request.id(id)));
        reserved.retry_after.duration().expect("a wait").as_secs()
    };
    assert_eq!([turn("a"), turn("b"), turn("c")], [1, 2, 3]);
    engine.call(engine.limiter.cancel(&rule, request.id("b")));
    assert_eq!([turn("d"), turn("e")], [3, 4]);
}

/// As other languages call them: a second after two of five, and a unit of them has come back to the first limit.
#[test]
fn the_text_form_has_a_reset_for_each_limit() {
    let server = Server::start();
    let mut redis = server.connection();
    let text = Script::for_algorithms([Algorithm::TokenBucket]).text();
    let mut call = |cost: u64, mode: &str, seconds: u64| -> Vec<i64> {
        let now = format!("{}", 1_000_000_000_000_000 + seconds * 1_000_000);
        let limits = "token_bucket 5 1 1000000 1 0 token_bucket 5 1 10000000 1 0 0";
        let mut eval = cmd("EVAL");
        eval.arg(text).arg(2).arg("a").arg("b").arg(limits.split(' ').collect::<Vec<_>>());
        eval.arg(cost).arg(mode).arg(now).query(&mut redis).expect("an answer")
    };
    let taken = call(2, "acquire", 0);
    assert_eq!(taken, [1, 5, 3, 0, 2_000_000, 1, 5, 3, 0, 20_000_000]);
    assert_eq!(call(1, "acquire", 1)[2..9], [3, 0, 2_000_000, 1, 5, 2, 0]);
    let refund = format!("refund+taken=1000000,{},{}", taken[4], taken[9]);
    assert_eq!(call(2, &refund, 1), [1, 5, 4, 0, 1_000_000, 1, 5, 4, 0, 10_000_000]);
}

/// Whatever writes a state under other numbers: from then on, what an earlier reset says is unknown.
#[test]
fn after_a_write_under_other_numbers_an_earlier_reset_gives_nothing_back() {
    let server = Server::start();
    let mut redis = server.connection();
    for (algorithm, slow, fast) in [
        (Algorithm::TokenBucket, "5 1 10000000 1 0", "5 1 1000000 1 0"),
        (Algorithm::FixedWindow, "5 1 10000000 0 0", "5 1 1000000 0 0"),
    ] {
        for write in ["acquire+overage", "acquire+block=1", "refund", "block"] {
            let key = format!("{algorithm} {write}");
            let mut call = |numbers: &str, cost: u64, mode: &str, seconds: u64| -> Vec<i64> {
                let now = (1_000_000_000_000_000 + seconds * 1_000_000).to_string();
                let mut eval = cmd("EVAL");
                eval.arg(algorithm.script().text()).arg(1).arg(&key).arg(numbers.split(' ').collect::<Vec<_>>());
                eval.arg(cost).arg(mode).arg(now).query(&mut redis).expect("an answer")
            };
            assert_eq!(call(slow, 5, "acquire", 0)[4], 50_000_000);
            call(fast, 1, write, 0);
            // Three have passed since, and three are taken by another.
            assert_eq!(call(fast, 3, "acquire", 3)[0], 1, "{key}");
            let before = call(fast, 0, "peek", 3)[2];
            assert_eq!(call(fast, 5, "refund+taken=3000000,50000000", 3)[2], before, "{key}");
        }
    }
}

/// A reset is rounded up to a microsecond, in which ten units pass here.
#[test]
fn after_a_decision_at_many_units_a_tick_no_more_comes_back_than_is_owed() {
    for engine in [Engine::embedded(), Engine::redis()] {
        let rule = rule("token-bucket 10/1us burst 100");
        let at = |us: u64, cost: u64| Request::new("key").cost(cost).at(time((1 << 50) + us));
        let first = engine.call(engine.limiter.acquire(&rule, at(0, 11)));
        assert_eq!(engine.call(engine.limiter.acquire(&rule, at(1, 9))).remaining, 90);
        assert_eq!(engine.call(engine.limiter.refund(&rule, at(1, 11).after(&first))).remaining, 91);
    }
}
