//! Expiry in the server's own time: no state is forgotten before it resets, whatever the rule was before, and none
//! stays much longer. On the embedded engine, whose clock is the test's.

use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use tollgate::{Algorithm, Clock, Embedded, Limit, Limiter, Operation, Request, Rule};
use tollgate_testing::effort::cases;
use tollgate_testing::engines::{Micros, answer, micros, time};
use tollgate_testing::histories::beginning;
use tollgate_testing::limits::two_limits;
use tollgate_testing::oracle::Retry;
use tollgate_testing::oracle_spec::{oracle, spec};
use tollgate_testing::rules::{assert_of_every_algorithm, by_own_id};

/// How the clock moves before a call, the call with its cost, and whether the rule changes after it.
type Step = (u64, Aim, Operation, u64, bool);

#[derive(Clone, Copy, Debug)]
enum Aim {
    /// By this part of the longest reset, in thousandths.
    Part,
    Retry,
    /// To the reset or a microsecond before.
    Reset,
}

fn step() -> impl Strategy<Value = Step> {
    let aim = prop_oneof![3 => Just(Aim::Part), 2 => Just(Aim::Retry), 2 => Just(Aim::Reset)];
    let operation = prop_oneof![
        5 => Just(Operation::Acquire), 2 => Just(Operation::Peek), 2 => Just(Operation::AtMost),
        2 => Just(Operation::Refund), 2 => Just(Operation::Penalty),
    ];
    (0_u64..=2200, aim, operation, 1_u64..=101, proptest::bool::weighted(0.2))
}

#[test]
fn in_server_time_nothing_is_forgotten_before_it_resets() {
    let histories = (two_limits(), beginning(), proptest::collection::vec(step(), 1..=30), any::<bool>());
    let config =
        Config { cases: cases(200), failure_persistence: None, max_global_rejects: 100_000, ..Config::default() };
    let outcome = TestRunner::new(config).run(&histories, |((limit, other), begin, steps, counting)| {
        let clock = Clock::new(time(begin));
        let limiter = Limiter::new(Embedded::with_clock(clock.clone()));
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        let named = |limit: &Limit| {
            let rule = limit.clone().named("limit").and_then(|limit| Rule::new("test", limit)).expect("names");
            rule.count_overage(counting)
        };
        let (mut rule, mut next) = (named(&limit), named(&other));
        let mut oracle = oracle(&limit);
        if counting {
            oracle.count_overage();
        }
        let (mut now, mut expires_at, mut penalized_until): (Micros, _, Micros) = (begin, None, begin);
        for (part, aim, operation, hundredths, changes) in steps {
            let limit = rule.limits().next().expect("a limit");
            let cost = (limit.capacity() / 100 * hundredths).max(1);
            let ahead = match (aim, oracle.peek(cost, now).retry, oracle.peek(0, now).reset_after_us) {
                (Aim::Part, ..) => {
                    u64::try_from(u128::from(micros(limit.longest_reset())) * u128::from(part) / 1000).expect("fits")
                }
                (Aim::Retry, Retry::AfterUs(wait), _) => wait - part % 2,
                (Aim::Reset, _, reset) if reset > 0 => reset - part % 2,
                _ => 0,
            };
            if now + ahead + 3 * micros(limit.longest_reset()) < 1 << 52 {
                clock.advance(Duration::from_micros(ahead));
                now += ahead;
            }
            let request = Request::new("key").cost(cost);
            let before = runtime.block_on(limiter.inspect(&rule, request)).expect("a state").remove(0);
            let untouched = oracle.peek(0, now);
            let reset = untouched.reset_after_us == 0 && untouched.overage == 0;
            if !before.exists && (reset || expires_at.is_some_and(|at| at <= now)) {
                // Gone once it had reset, by all numbers that were in force: a denial that is counted makes the key
                // anew, and other numbers find no usage.
                oracle.reset();
            }
            let operation = if limit.algorithm().holds() { Operation::Acquire } else { operation };
            let call = limiter.call(operation, &rule, by_own_id(&rule, request));
            let decision = runtime.block_on(call).expect("a decision");
            if operation == Operation::Penalty {
                penalized_until = penalized_until.max(now + micros(decision.reset_after));
            }
            let expected = match operation {
                Operation::Peek => oracle.peek(cost, now),
                Operation::AtMost => oracle.at_most(cost, now).0,
                Operation::Refund => oracle.refund(cost, now),
                Operation::Penalty => oracle.penalty(cost, now),
                _ => oracle.acquire(cost, now),
            };
            prop_assert_eq!(answer(&decision), expected, "{} {} at {} under {}", operation, cost, now, &rule);
            let state = runtime.block_on(limiter.inspect(&rule, request)).expect("a state").remove(0);
            expires_at = state.expires_after.map(|ttl| now + micros(ttl));
            if let Some(ttl) = state.expires_after {
                prop_assert!(ttl + Duration::from_millis(1) >= decision.reset_after, "forgotten early: {:?}", ttl);
                // While two versions are in force, the key is kept for either.
                let longest = [&rule, &next].map(|rule| rule.limits().next().expect("a limit").longest_reset());
                // After a penalty, until that is over.
                let penalty = Duration::from_micros(penalized_until.saturating_sub(now));
                let most = longest.into_iter().max().expect("two") * 2 + penalty + Duration::from_secs(1);
                prop_assert!(!decision.allowed || ttl <= most + Duration::from_millis(1), "kept too long: {:?}", ttl);
            }
            if changes {
                // What was reset and forgotten under the old numbers is not remembered for the new ones.
                if !state.exists {
                    oracle.reset();
                }
                std::mem::swap(&mut rule, &mut next);
                oracle.change(spec(rule.limits().next().expect("a limit")));
                // The first call after a change sees to the expiry.
                let cost = rule.limits().next().expect("a limit").capacity();
                let request = by_own_id(&rule, Request::new("key").cost(cost));
                let decision = runtime.block_on(limiter.acquire(&rule, request)).expect("a decision");
                let state = runtime.block_on(limiter.inspect(&rule, request)).expect("a state").remove(0);
                expires_at = state.expires_after.map(|ttl| now + micros(ttl));
                if let Some(ttl) = state.expires_after {
                    prop_assert!(ttl + Duration::from_millis(1) >= decision.reset_after, "forgotten early: {:?}", ttl);
                }
                prop_assert_eq!(
                    answer(&decision),
                    oracle.acquire(cost, now),
                    "acquire {} at {} under {}",
                    cost,
                    now,
                    &rule
                );
            }
        }
        Ok(())
    });
    outcome.unwrap_or_else(|failure| panic!("{failure}"));
}

/// A lead or a debt so long that sums with it must be taken in the right order to stay exact.
#[tokio::test]
async fn after_the_largest_penalty_an_acquire_in_server_time_waits_as_its_peek_says() {
    let rule = tollgate_testing::rules::rule("token-bucket 5/1000003us burst 10");
    let clock = Clock::new(time(1 << 50));
    let limiter = Limiter::new(Embedded::with_clock(clock.clone()));
    limiter.penalty(&rule, Request::new("key").cost(1 << 53)).await.expect("taken");
    for step in 0..3000 {
        clock.advance(Duration::from_micros(1 + step * 7 % 997));
        let request = Request::new("key").cost(1 + step % 10);
        let peek = limiter.peek(&rule, request).await.expect("a decision");
        let denial = limiter.acquire(&rule, request).await.expect("a decision");
        assert!(!denial.allowed);
        assert_eq!((denial.retry_after, denial.reset_after), (peek.retry_after, peek.reset_after), "{step}");
    }
}

#[tokio::test]
async fn denials_are_counted_for_their_time_whenever_the_key_was_armed() {
    let texts =
        ["sliding-window 2/1s", "sliding-log 2/1s", "fixed-window 2/1s", "token-bucket 2/1s", "concurrency 2 ttl 1s"];
    // Windows of the calendar count denials until they end.
    assert_of_every_algorithm(&texts, &[Algorithm::CalendarWindow]);
    for text in texts {
        let rule: Rule = text.parse().and_then(|rule: Rule| rule.named("t")).expect("a rule");
        let rule = rule.count_overage(true);
        let longest = micros(rule.limits().next().expect("a limit").longest_reset());
        // Whatever part of the longest reset lies between the key's first call and the first denial.
        for part in 0..60 {
            for server_time in [true, false] {
                let clock = Clock::new(time(1 << 50));
                let limiter = Limiter::new(Embedded::with_clock(clock.clone()));
                let mut now = 1 << 50;
                let mut pass = |by: Micros| {
                    clock.advance(Duration::from_micros(by));
                    now += by;
                    let request = Request::new("key").id("holder");
                    if server_time { request } else { request.at(time(now)) }
                };
                let first = pass(0);
                limiter.acquire(&rule, first).await.expect("a decision");
                let then = pass(longest * part / 20);
                limiter.acquire(&rule, then.id("other")).await.expect("a decision");
                for (after, count) in [(0, 1), (longest - 1, 2), (1, 1)] {
                    let denied = limiter.acquire(&rule, pass(after).id("third").cost(3)).await.expect("a decision");
                    assert_eq!((denied.allowed, denied.overage), (false, Some(count)), "{text}: {part}, {after}");
                }
            }
        }
    }
}

/// A day and a week that begin at the same midnight: what the day's key counts, the week counts to its end.
#[tokio::test]
async fn a_days_usage_is_not_forgotten_before_the_week_ends_that_began_with_it() {
    let monday = time(1_786_320_000_000_000);
    let named = |text: &str| {
        let limit = text.parse::<Limit>().and_then(|limit| limit.named("limit")).expect("a limit");
        Rule::new("test", limit).expect("a rule")
    };
    let (day, week) = (named("fixed-window 1/day"), named("fixed-window 1/week"));
    // By itself, and together with others.
    for many in [false, true] {
        let clock = Clock::new(monday);
        let limiter = Limiter::new(Embedded::with_clock(clock.clone()));
        let decide = async |rule: &Rule| match many {
            true => limiter.acquire_many(rule, ["key", "other"]).await.remove(0).expect("a decision"),
            false => limiter.acquire(rule, "key").await.expect("a decision"),
        };
        assert!(decide(&day).await.allowed);
        clock.advance(Duration::from_secs(3600));
        let denied = decide(&week).await;
        let reset = Duration::from_secs(7 * 86_400 - 3600);
        assert_eq!((denied.allowed, denied.reset_after), (false, reset), "{many}");
        let state = limiter.inspect(&week, "key").await.expect("a state").remove(0);
        assert!(state.expires_after.is_some_and(|ttl| ttl >= reset), "{many}: {state:?}");
        clock.advance(Duration::from_secs(6 * 86_400));
        assert!(!decide(&week).await.allowed, "{many}");
    }
}
