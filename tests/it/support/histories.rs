//! Random histories for property tests: calls of one key, and how the clock moves between them.

use std::ops::RangeInclusive;

use proptest::prelude::*;

use crate::support::engines::{Micros, Subject, micros};
use crate::support::limits::{SECOND, logarithmic};
use crate::support::oracle::Retry;

/// A call, and how the clock moves before it.
#[derive(Clone, Debug)]
pub(crate) struct Step {
    pub(crate) clock: Move,
    pub(crate) cost: Cost,
}

/// How the clock moves before a call. Most faults hide at the edges of waits, so most moves aim there.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Move {
    Stay,
    /// By this part of the limit's longest reset, in thousandths.
    Part(u64),
    Forward(Micros),
    /// To the moment at which the cost is allowed, or a microsecond before it.
    Retry {
        early: bool,
    },
    /// To the moment at which the key is as if never used, or a microsecond before it.
    Reset {
        early: bool,
    },
    /// Back by this part of the longest reset, in thousandths; beyond 1,000 it is rebased.
    Back(u64),
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Cost {
    Units(u64),
    /// This part of the capacity, in hundredths; above 100 it can never be had.
    Part(u64),
    /// All that remains, and so many more.
    Remaining(u64),
}

impl Step {
    /// The cost and the time of this step, for a key that was last called at `now`.
    pub(crate) fn aim(&self, subject: &Subject<'_>, now: Micros) -> (u64, Micros) {
        let limit = subject.limit();
        let longest = micros(limit.longest_reset());
        let cost = match self.cost {
            Cost::Units(units) => units,
            Cost::Part(hundredths) => product(limit.capacity(), hundredths, 100),
            Cost::Remaining(more) => subject.peek(0, now).remaining + more,
        };
        let then = match self.clock {
            Move::Stay => now,
            Move::Part(thousandths) => now + product(longest, thousandths, 1000),
            Move::Forward(by) => now + by,
            Move::Back(thousandths) => now.saturating_sub(product(longest, thousandths, 1000)),
            Move::Retry { early } => match subject.peek(cost, now).retry {
                Retry::AfterUs(wait) => now + wait - u64::from(early),
                _ => now,
            },
            Move::Reset { early } => match subject.peek(0, now).reset_after_us {
                0 => now,
                wait => now + wait - u64::from(early),
            },
        };
        (cost, if then + 3 * longest < 1 << 52 { then } else { now })
    }
}

fn product(value: u64, parts: u64, whole: u64) -> u64 {
    u64::try_from(u128::from(value) * u128::from(parts) / u128::from(whole)).expect("within range")
}

pub(crate) fn steps(count: RangeInclusive<usize>) -> impl Strategy<Value = Vec<Step>> {
    proptest::collection::vec(step(), count)
}

/// Any time that leaves room for a history.
pub(crate) fn beginning() -> impl Strategy<Value = Micros> {
    let day = 86_400 * SECOND;
    prop_oneof![
        Just(1 << 50),
        (day * 365 * 30)..(day * 365 * 40),
        (0..1_000_000_u64).prop_map(|s| (1 << 50) + s * SECOND)
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let clock = prop_oneof![
        4 => Just(Move::Stay),
        3 => (1_u64..=300).prop_map(Move::Part),
        1 => (300_u64..=2100).prop_map(Move::Part),
        2 => logarithmic(1..=100 * SECOND).prop_map(Move::Forward),
        4 => any::<bool>().prop_map(|early| Move::Retry { early }),
        2 => any::<bool>().prop_map(|early| Move::Reset { early }),
        1 => (1_u64..=1000).prop_map(Move::Back),
        1 => (1001_u64..=3000).prop_map(Move::Back),
    ];
    let cost = prop_oneof![
        4 => Just(Cost::Units(1)),
        1 => Just(Cost::Units(0)),
        2 => (1_u64..=101).prop_map(Cost::Part),
        1 => logarithmic(1..=1_000_000).prop_map(Cost::Units),
        2 => (0_u64..=1).prop_map(Cost::Remaining),
    ];
    (clock, cost).prop_map(|(clock, cost)| Step { clock, cost })
}
