//! Every operation among acquires, peeks and changed rules: every answer is the oracle's, on both engines.

use std::time::{Duration, UNIX_EPOCH};

use proptest::prelude::*;
use tollgate::{Embedded, Limiter, Operation, Request};
use tollgate_testing::engines::{Engine, micros, on_both_engines};
use tollgate_testing::histories::{Compared, any_change, beginning, steps_with};
use tollgate_testing::limits::two_limits;
use tollgate_testing::oracle::Retry;
use tollgate_testing::rules::{FOUR, limit, rule};

/// None changes the rule's numbers.
const OPERATIONS: [(u32, Option<Operation>); 9] = [
    (6, Some(Operation::Acquire)),
    (4, Some(Operation::Reserve)),
    (4, Some(Operation::AtMost)),
    (4, Some(Operation::Refund)),
    (1, Some(Operation::Penalty)),
    (1, Some(Operation::Block)),
    (2, Some(Operation::Renew)),
    (2, Some(Operation::Release)),
    (1, None),
];

#[test]
fn every_operation_is_the_oracles() {
    // Up to three times the longest reset, in hundredths of it.
    let blocks = proptest::option::weighted(0.3, 0..300_u64);
    let calls = steps_with(&OPERATIONS, 1..=25);
    let cases = (two_limits(), beginning(), calls, any_change(), any::<bool>(), blocks);
    on_both_engines(cases, |engine, (limits, begin, calls, change, counting, blocks)| {
        let block_for = blocks.map(|parts| micros(limits.0.longest_reset()) / 100 * parts + 1);
        let mut compared = Compared::new(engine, limits, change, counting, block_for);
        let mut now = begin;
        for (operation, step) in calls {
            let (cost, then) = step.aim(&compared.subject, now);
            // Deep penalties make long waits; the last time that a decision can be made at is the year 2112.
            now = if then < 1 << 51 { then } else { now };
            match operation {
                Some(operation) => {
                    let block = micros(compared.subject.limit().longest_reset()) / 100 * (cost % 300);
                    compared.call(operation, cost, block, now)?;
                }
                None => {
                    compared.change();
                    prop_assert_eq!(compared.subject.peek(1, now), compared.oracle.peek(1, now), "after a change");
                }
            }
        }
        Ok(())
    });
}

/// On both engines, at a time of day that has no meaning.
fn on_both(check: impl Fn(&Engine, u64)) {
    for engine in [Engine::embedded(), Engine::redis()] {
        check(&engine, 1 << 50);
    }
}

#[test]
fn reservations_queue_up_to_the_debt_and_later_callers_see_it() {
    on_both(|engine, now| {
        // Evenly spaced: no burst, one a second, three may wait.
        let subject = engine.subject(limit("gcra 1/1s burst 0 max-debt 3"));
        let waits: Vec<Retry> = (0..4).map(|_| subject.reserve(1, now).retry).collect();
        assert_eq!(waits, [1, 2, 3, 1].map(|seconds| Retry::AfterUs(seconds * 1_000_000)));
        assert!(!subject.reserve(1, now).allowed, "the fourth would owe more");
        assert!(subject.reserve(1, now + 1_000_000).allowed);
        // Given back before its time, a reservation makes room for another.
        assert!(!subject.reserve(1, now + 1_000_000).allowed);
        subject.refund(1, now + 1_000_000);
        assert!(subject.reserve(1, now + 1_000_000).allowed);
    });
}

#[test]
fn a_penalty_is_taken_even_where_nothing_is_left_and_a_refund_forgives_it() {
    on_both(|engine, now| {
        for text in ["token-bucket 5/1d", "fixed-window 5/1d", "sliding-window 5/1d", "sliding-log 5/1d"] {
            let subject = engine.subject(limit(text));
            subject.acquire(4, now);
            subject.penalty(10, now);
            assert!(
                !subject.refund(9, now).allowed || subject.peek(1, now).remaining == 0,
                "{text}: nine forgiven of ten"
            );
            assert_eq!(subject.refund(1, now).remaining, 1, "{text}: as before the penalty");
            assert_eq!(subject.refund(100, now).remaining, 5, "{text}: never above full");
        }
    });
}

#[test]
fn only_algorithms_with_debt_can_reserve() {
    let engine = Engine::embedded();
    let rule = tollgate_testing::rules::rule("sliding-log 5/1s");
    let error = engine.runtime.block_on(engine.limiter.reserve(&rule, "key")).expect_err("a log can't owe");
    assert!(error.is_input() && error.to_string().contains("got sliding-log 5/1s"), "{error}");
}

/// Of an unused key that is all that the script can take.
#[tokio::test]
async fn a_penalty_reports_no_more_than_can_be_taken() {
    let limiter = Limiter::new(Embedded::new());
    for text in FOUR.into_iter().chain(["fixed-window 5/month", "gcra 3/7s burst 9 max-debt 8", "gcra 1/1d"]) {
        for cost in [u64::MAX, 1 << 53, 1 << 20] {
            let rule = rule(text);
            limiter.reset(&rule, "key").await.expect("an answer");
            let at = Request::new("key").at(UNIX_EPOCH + Duration::from_secs(1_000_000));
            let taken = limiter.penalty(&rule, at.cost(cost)).await.expect("an answer").granted;
            assert!(taken <= cost && taken >= 1 << 14, "{text}: {taken}");
            let left = limiter.refund(&rule, at.cost(taken - 1)).await.expect("an answer");
            assert_eq!(left.remaining, left.capacity - 1, "{text}: {taken} of {cost}");
            let left = limiter.refund(&rule, at.cost(1)).await.expect("an answer");
            assert_eq!(
                (left.remaining, left.reset_after),
                (left.capacity, Duration::ZERO),
                "{text}: {taken} of {cost}"
            );
        }
    }
}
