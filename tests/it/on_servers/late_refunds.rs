//! Units given back late: never more than is still owed, so the rule's bound holds whatever comes in between.

use std::num::NonZeroU32;
use std::time::{Duration, UNIX_EPOCH};

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use tollgate::{Algorithm, By, Clock, Embedded, Limiter, Redis, Request, Rule};
use tollgate_testing::effort::cases;
use tollgate_testing::engines::{micros, time};
use tollgate_testing::oracle_spec::oracle;
use tollgate_testing::redis_server::Server;
use tollgate_testing::rules::{FIVE, assert_of_every_algorithm, rule};

/// Ten sleepers each reserve 100 units; Redis is unreachable, they are dropped, and their cancellations arrive one by
/// one, between the calls of others. All of it may have at most the capacity and what refills.
#[tokio::test]
async fn reservations_cancelled_after_an_outage_give_back_what_is_still_owed() {
    let server = Server::start();
    let redis = Limiter::new(Redis::open(&server.url()).expect("an address")).deadline(Duration::from_secs(10));
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
    let config = Config { cases: cases(500), failure_persistence: None, ..Config::default() };
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
            let (rule, clock, later) = (rule(text), Clock::set_to(begin), Duration::from_secs(later));
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
            assert!(after.retry_at() == Some(begin + later), "{text}: {:?}", after.retry_at());
            seen += u64::from(after.remaining < 5 && after.remaining < before + 3);
        }
        let limiter = Limiter::new(Embedded::with_clock(Clock::set_to(begin)));
        let hot = rule("token-bucket 1000/1d");
        let lease = limiter.lease(&hot, "hot", NonZeroU32::MIN).expect("a lease");
        let mut decision = lease.acquire(1).await.expect("a decision");
        while decision.by != By::Lease {
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
    let clock = Clock::set_to(time(1_000_000_000_000_100));
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
