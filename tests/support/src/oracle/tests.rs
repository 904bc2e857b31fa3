//! Tests of the oracle itself: by hand, by other implementations' vectors, and by random histories.

mod by_hand;
mod known_vectors;
mod random_histories;

pub(super) use random_histories::Random;

use Retry::{AfterUs, Never, Now};

use super::rule::*;
use super::*;

/// `(cost, now, retry, remaining, reset_after)` of successive acquires.
pub(in crate::oracle) fn table(oracle: &mut Oracle, rows: &[(u64, u64, Retry, u64, u64)]) {
    for &(cost, now, retry, remaining, reset_after_us) in rows {
        let a = oracle.acquire(cost, now);
        let got = (a.retry, a.remaining, a.reset_after_us);
        assert_eq!(got, (retry, remaining, reset_after_us), "{cost} at {now}: {oracle:?}");
        assert_eq!(a.allowed, retry == Now);
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::oracle) enum Call {
    Acquire,
    Reserve,
    AtMost,
    Refund,
    Penalty,
    /// For as many microseconds as the cost.
    Block,
    Hold(&'static str),
    /// Of permits that are held.
    Renew(&'static str),
    Release(&'static str),
    GiveBack(&'static str),
    PenaltyBy(&'static str),
}
use Call::{Acquire, AtMost, Block, GiveBack, Hold, Penalty, PenaltyBy, Refund, Release, Renew, Reserve};

impl Call {
    /// The answer, and the units taken.
    pub(in crate::oracle) fn on(self, o: &mut Oracle, cost: u64, now: u64) -> (Answer, u64) {
        let before = level(o, now);
        let (a, at_most) = match self {
            Acquire => (o.acquire(cost, now), cost),
            Reserve => (o.reserve(cost, now), cost),
            AtMost => o.at_most(cost, now),
            Refund => (o.refund(cost, now), 0),
            Penalty => (o.penalty(cost, now), cost),
            Block => (o.block(cost, now), 0),
            // Nothing if the id had it already.
            Hold(id) => (o.hold(id, cost, now), u64_of(before - level(o, now))),
            Renew(id) => (o.renew(id, now).expect("held"), 0),
            Release(id) => (o.release(id, now), 0),
            GiveBack(id) => (o.give_back(id, cost, now), 0),
            PenaltyBy(id) => (o.penalty_by(id, cost, now), cost),
        };
        (a, if a.allowed { at_most } else { 0 })
    }
}

/// Call, cost, now; units taken if allowed, retry, remaining, reset_after.
pub(in crate::oracle) type Row = (Call, u64, u64, Option<u64>, Retry, u64, u64);

pub(in crate::oracle) fn calls(oracle: &mut Oracle, rows: &[Row]) {
    for &(call, cost, now, taken, retry, remaining, reset_after_us) in rows {
        let (a, units) = call.on(oracle, cost, now);
        let got = (a.allowed.then_some(units), a.retry, a.remaining, a.reset_after_us);
        let expected = (taken, retry, remaining, reset_after_us);
        assert_eq!(got, expected, "{call:?} {cost} at {now}: {oracle:?}");
        assert_eq!(a.blocked, !oracle.peek(0, now).allowed, "{call:?} {cost} at {now}: {oracle:?}");
    }
}

/// Capacity minus used, in parts of the numbers that it passes under.
pub(in crate::oracle) fn level(o: &Oracle, now: u64) -> i128 {
    let found = o.find(now);
    Rule::of(o.spec).capacity * found.rule().parts() - found.used()
}

pub(in crate::oracle) fn bucket(rate: u64, period_us: u64, capacity: u64, tick_us: u64) -> Spec {
    Spec::TokenBucket { rate, period_us, capacity, max_debt: 0, tick_us }
}

pub(in crate::oracle) fn window(rate: u64, period_us: u64, capacity: u64, start: Start) -> Spec {
    Spec::FixedWindow { rate, period_us, capacity, max_debt: 0, start }
}
