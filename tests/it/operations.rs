//! Every operation among acquires, peeks and changed rules: every answer is the oracle's, on both engines.

use proptest::prelude::*;
use tollgate::Change;

use crate::support::engines::{Engine, micros, on_both_engines};
use crate::support::histories::{Step, beginning, steps};
use crate::support::limits::two_limits;
use crate::support::oracle::{self, Retry};
use crate::support::oracle_spec::{oracle as oracle_of, spec};
use crate::support::rules::limit;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Verb {
    Acquire,
    Reserve,
    AtMost,
    Refund,
    Penalty,
    Block,
    Renew,
    Release,
    Change,
}

fn calls() -> impl Strategy<Value = Vec<(Verb, Step)>> {
    let verb = prop_oneof![
        6 => Just(Verb::Acquire),
        4 => Just(Verb::Reserve),
        4 => Just(Verb::AtMost),
        4 => Just(Verb::Refund),
        1 => Just(Verb::Penalty),
        1 => Just(Verb::Block),
        2 => Just(Verb::Renew),
        2 => Just(Verb::Release),
        1 => Just(Verb::Change),
    ];
    let step = steps(1..=1).prop_map(|mut steps| steps.pop().expect("one step"));
    proptest::collection::vec((verb, step), 1..=25)
}

fn changes() -> impl Strategy<Value = (Change, oracle::Change)> {
    use oracle::Change as Of;
    let all = vec![(Change::KeepUsed, Of::KeepUsed), (Change::AsIs, Of::AsIs), (Change::Reset, Of::Reset)];
    proptest::sample::select(all)
}

#[test]
fn every_operation_is_the_oracles() {
    // Up to three times the longest reset, in hundredths of it.
    let blocks = proptest::option::weighted(0.3, 0..300_u64);
    let cases = (two_limits(), beginning(), calls(), changes(), any::<bool>(), blocks);
    on_both_engines(cases, |engine, ((limit, other), begin, calls, (change, of), counting, blocks)| {
        let block_for = blocks.map(|parts| micros(limit.longest_reset()) / 100 * parts + 1);
        let mut subject = engine.subject(limit.clone()).with(change, counting, block_for);
        let mut oracle = oracle_of(&limit);
        oracle.on_change(of);
        if counting {
            oracle.count_denials();
        }
        oracle.block_for(block_for);
        let holds = limit.algorithm().holds();
        let (mut now, mut next) = (begin, other);
        for (verb, step) in calls {
            let (cost, then) = step.aim(&subject, now);
            // Deep penalties make long waits; the last time that a decision can be made at is the year 2112.
            now = if then < 1 << 51 { then } else { now };
            let holder = ["a", "b", "c"][usize::try_from(cost % 3).expect("below 3")];
            let said = format!("{verb:?} {cost} at {now}");
            match verb {
                Verb::Acquire if holds && cost % 2 == 1 => {
                    prop_assert_eq!(subject.hold(holder, cost, now), oracle.hold(holder, cost, now), "{}", said)
                }
                Verb::Acquire => prop_assert_eq!(subject.acquire(cost, now), oracle.acquire(cost, now), "{}", said),
                Verb::Reserve if subject.limit().algorithm().reserves() => {
                    prop_assert_eq!(subject.reserve(cost, now), oracle.reserve(cost, now), "{}", said);
                }
                Verb::AtMost => prop_assert_eq!(subject.at_most(cost, now), oracle.at_most(cost, now), "{}", said),
                Verb::Refund if holds => {
                    prop_assert_eq!(
                        subject.give_back(holder, cost, now),
                        oracle.give_back(holder, cost, now),
                        "{}",
                        said
                    )
                }
                Verb::Refund => prop_assert_eq!(subject.refund(cost, now), oracle.refund(cost, now), "{}", said),
                Verb::Penalty if holds => {
                    let cost = cost.min(100);
                    let answer = subject.penalty_by(holder, cost, now);
                    prop_assert_eq!(answer, oracle.penalty_by(holder, cost, now), "{}", said)
                }
                Verb::Penalty => prop_assert_eq!(subject.penalty(cost, now), oracle.penalty(cost, now), "{}", said),
                Verb::Block => {
                    let length = micros(subject.limit().longest_reset()) / 100 * (cost % 300);
                    prop_assert_eq!(subject.block(length, now), oracle.block(length, now), "{} for {}", said, length)
                }
                Verb::Renew if holds => {
                    prop_assert_eq!(subject.renew(holder, now), oracle.renew(holder, now), "{}", said)
                }
                Verb::Release if holds => {
                    prop_assert_eq!(subject.release(holder, now), oracle.release(holder, now), "{}", said)
                }
                Verb::Reserve | Verb::Renew | Verb::Release => {}
                Verb::Change => {
                    let was = std::mem::replace(&mut next, subject.limit().clone());
                    subject = subject.changed(was.clone().named("limit").expect("a good name"));
                    oracle.change(spec(&was));
                }
            }
            prop_assert_eq!(subject.peek(1, now), oracle.peek(1, now), "peek after {}", said);
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
fn only_algorithms_with_debt_can_reserve() {
    let engine = Engine::embedded();
    let rule = crate::support::rules::rule("sliding-log 5/1s");
    let error = engine.runtime.block_on(engine.limiter.reserve(&rule, "key")).expect_err("a log can't owe");
    assert!(error.is_input() && error.to_string().contains("got sliding-log 5/1s"), "{error}");
}
