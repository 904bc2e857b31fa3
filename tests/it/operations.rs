//! Reserve, refund, at most and penalty, among acquires, peeks and changed rules: every answer is the oracle's, on both
//! engines.

use proptest::prelude::*;

use crate::laws::everywhere;
use crate::limits::{Step, beginning, steps, two_limits};
use crate::oracle::Retry;
use crate::subject::{Engine, limit, oracle, spec};

#[derive(Clone, Copy, Debug, PartialEq)]
enum Verb {
    Acquire,
    Reserve,
    AtMost,
    Refund,
    Penalty,
    Change,
}

fn calls() -> impl Strategy<Value = Vec<(Verb, Step)>> {
    let verb = prop_oneof![
        6 => Just(Verb::Acquire),
        4 => Just(Verb::Reserve),
        4 => Just(Verb::AtMost),
        4 => Just(Verb::Refund),
        1 => Just(Verb::Penalty),
        1 => Just(Verb::Change),
    ];
    let step = steps(1..=1).prop_map(|mut steps| steps.pop().expect("one step"));
    proptest::collection::vec((verb, step), 1..=25)
}

#[test]
fn every_operation_is_the_oracles() {
    everywhere((two_limits(), beginning(), calls()), |engine, ((limit, other), begin, calls)| {
        let mut subject = engine.subject(limit.clone());
        let mut oracle = oracle(&limit);
        let (mut now, mut next) = (begin, other);
        for (verb, step) in calls {
            let (cost, then) = step.aim(&subject, now);
            // Deep penalties make long waits; the last time that a decision can be made at is the year 2112.
            now = if then < 1 << 51 { then } else { now };
            match verb {
                Verb::Acquire => {
                    prop_assert_eq!(subject.acquire(cost, now), oracle.acquire(cost, now), "acquire {}", cost)
                }
                Verb::Reserve if subject.limit().algorithm().reserves() => {
                    prop_assert_eq!(subject.reserve(cost, now), oracle.reserve(cost, now), "reserve {}", cost);
                }
                Verb::Reserve => {}
                Verb::AtMost => {
                    prop_assert_eq!(subject.at_most(cost, now), oracle.at_most(cost, now), "at most {}", cost)
                }
                Verb::Refund => prop_assert_eq!(subject.refund(cost, now), oracle.refund(cost, now), "refund {}", cost),
                Verb::Penalty => {
                    prop_assert_eq!(subject.penalty(cost, now), oracle.penalty(cost, now), "penalty {}", cost)
                }
                Verb::Change => {
                    let was = std::mem::replace(&mut next, subject.limit().clone());
                    subject = subject.changed(was.clone().named("limit").expect("a good name"));
                    oracle.change(spec(&was));
                }
            }
            prop_assert_eq!(subject.peek(1, now), oracle.peek(1, now), "peek after {:?} {}", verb, cost);
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
        for text in ["token-bucket 5/1d", "gcra 5/1d", "fixed-window 5/1d", "sliding-window 5/1d", "sliding-log 5/1d"] {
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
fn only_what_can_owe_can_be_reserved() {
    let engine = Engine::embedded();
    let rule: tollgate::Rule = "sliding-log 5/1s".parse().expect("a rule");
    let error = engine.runtime.block_on(engine.limiter.reserve(&rule, "key")).expect_err("a log can't owe");
    assert!(error.is_input() && error.to_string().contains("got sliding-log 5/1s"), "{error}");
}
