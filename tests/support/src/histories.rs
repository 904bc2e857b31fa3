//! Random histories for property tests: operations on one key, and how the clock moves between them.

use std::ops::RangeInclusive;
use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::TestCaseError;
use tollgate::{Decision, Error, Limit, Limiter, OnChange, Operation, Request, Rule};

use crate::engines::{Engine, Micros, Subject, micros};
use crate::limits::{SECOND, any_limit, logarithmic};
use crate::oracle::{self, Oracle, Retry};
use crate::oracle_spec::{oracle as oracle_of, spec};

/// How long a block lasts.
const BLOCK: Duration = Duration::from_secs(60);

/// Makes the call; a block lasts a minute.
pub async fn call_of(
    operation: Operation,
    limiter: &Limiter,
    rule: &Rule,
    request: Request<'_>,
) -> Result<Decision, Error> {
    limiter.call(operation, rule, request.block_for(BLOCK)).await
}

/// The cost of a call, and how the clock moves before it.
#[derive(Clone, Debug)]
pub struct Step {
    pub clock: Move,
    pub cost: Cost,
}

/// How the clock moves before a call. Most faults hide at the edges of waits, so most moves aim there.
#[derive(Clone, Copy, Debug)]
pub enum Move {
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
pub enum Cost {
    Units(u64),
    /// This part of the capacity, in hundredths; above 100 it can never be had.
    Part(u64),
    /// All that remains, and so many more.
    Remaining(u64),
}

impl Step {
    /// The cost and the time of this step, for a key that was last called at `now`.
    pub fn aim(&self, subject: &Subject<'_>, now: Micros) -> (u64, Micros) {
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

pub fn steps(count: RangeInclusive<usize>) -> impl Strategy<Value = Vec<Step>> {
    proptest::collection::vec(step(), count)
}

/// Any time that leaves room for a history.
pub fn beginning() -> impl Strategy<Value = Micros> {
    let day = 86_400 * SECOND;
    prop_oneof![
        Just(1 << 50),
        (day * 365 * 30)..(day * 365 * 40),
        (0..1_000_000_u64).prop_map(|s| (1 << 50) + s * SECOND)
    ]
}

pub fn step() -> impl Strategy<Value = Step> {
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

/// Steps, each with one of these: its weight says how often.
pub fn steps_with<T: Clone + std::fmt::Debug + 'static>(
    weighted: &[(u32, T)],
    count: RangeInclusive<usize>,
) -> impl Strategy<Value = Vec<(T, Step)>> + use<T> {
    let one = weighted.iter().map(|(weight, value)| (*weight, Just(value.clone()))).collect();
    proptest::collection::vec((proptest::strategy::Union::new_weighted(one), step()), count)
}

/// A key's past, and the step after it.
pub fn histories() -> impl Strategy<Value = (Limit, Micros, Vec<Step>, Step)> {
    (any_limit(), beginning(), steps(0..=12), step())
}

/// A key with a past of acquires: the subject, and the time that it has come to.
pub fn lived<'a>(engine: &'a Engine, limit: Limit, begin: Micros, steps: &[Step]) -> (Subject<'a>, Micros) {
    let subject = engine.subject(limit);
    let mut now = begin;
    for step in steps {
        let (cost, then) = step.aim(&subject, now);
        subject.acquire(cost, then);
        now = then;
    }
    (subject, now)
}

/// What a rule does with its state when its numbers change, as the limiter and the oracle name it.
pub fn any_change() -> impl Strategy<Value = (OnChange, oracle::Change)> {
    use oracle::Change as Of;
    let all = vec![(OnChange::KeepUsed, Of::KeepUsed), (OnChange::AsIs, Of::AsIs), (OnChange::Reset, Of::Reset)];
    proptest::sample::select(all)
}

/// A rule on one key and the oracle of the same, which must give the same answers.
pub struct Compared<'a> {
    pub subject: Subject<'a>,
    pub oracle: Oracle,
    /// The numbers that the rule changes to next.
    other: Limit,
}

impl<'a> Compared<'a> {
    pub fn new(
        engine: &'a Engine,
        (limit, other): (Limit, Limit),
        (change, of): (OnChange, oracle::Change),
        counts_overage: bool,
        block_for: Option<Micros>,
    ) -> Self {
        let mut oracle = oracle_of(&limit);
        oracle.on_change(of);
        if counts_overage {
            oracle.count_overage();
        }
        oracle.block_for(block_for);
        Self { subject: engine.subject(limit).with(change, counts_overage, block_for), oracle, other }
    }

    /// Changes the rule's numbers to the other ones, and back the next time.
    pub fn change(&mut self) {
        let other = std::mem::replace(&mut self.other, self.subject.limit().clone());
        self.subject = self.subject.changed(other.clone().named("limit").expect("a good name"));
        self.oracle.change(spec(&other));
    }

    /// Makes the call on both; a block lasts this long. Permits are held, renewed and given back under one of a few
    /// ids, or taken without one.
    pub fn call(&mut self, operation: Operation, cost: u64, block: Micros, now: Micros) -> Result<(), TestCaseError> {
        let Self { subject, oracle, .. } = self;
        let algorithm = subject.limit().algorithm();
        let id = ["a", "b", "c"][usize::try_from(cost % 3).expect("below 3")];
        let said = format!("{operation:?} {cost} at {now} under {}", subject.rule);
        match operation {
            Operation::Acquire if algorithm.holds() && cost % 2 == 1 => {
                prop_assert_eq!(subject.hold(id, cost, now), oracle.hold(id, cost, now), "{}", said);
            }
            Operation::Acquire => prop_assert_eq!(subject.acquire(cost, now), oracle.acquire(cost, now), "{}", said),
            Operation::AtMost => prop_assert_eq!(subject.at_most(cost, now), oracle.at_most(cost, now), "{}", said),
            Operation::Reserve if algorithm.reserves() => {
                prop_assert_eq!(subject.reserve(cost, now), oracle.reserve(cost, now), "{}", said);
            }
            Operation::Refund if algorithm.holds() => {
                prop_assert_eq!(subject.give_back(id, cost, now), oracle.give_back(id, cost, now), "{}", said);
            }
            Operation::Refund => prop_assert_eq!(subject.refund(cost, now), oracle.refund(cost, now), "{}", said),
            Operation::Penalty if algorithm.holds() => {
                let cost = cost.min(100);
                prop_assert_eq!(subject.penalty_by(id, cost, now), oracle.penalty_by(id, cost, now), "{}", said);
            }
            Operation::Penalty => prop_assert_eq!(subject.penalty(cost, now), oracle.penalty(cost, now), "{}", said),
            Operation::Block => {
                prop_assert_eq!(subject.block(block, now), oracle.block(block, now), "{} for {}", said, block);
            }
            Operation::Renew if algorithm.holds() => {
                prop_assert_eq!(subject.renew(id, now), oracle.renew(id, now), "{}", said);
            }
            Operation::Release if algorithm.holds() => {
                prop_assert_eq!(subject.release(id, now), oracle.release(id, now), "{}", said);
            }
            // What the algorithm doesn't support.
            Operation::Reserve | Operation::Renew | Operation::Release => {}
            _ => panic!("{operation:?}: the oracle is not asked"),
        }
        prop_assert_eq!(subject.peek(1, now), oracle.peek(1, now), "peek after {}", said);
        Ok(())
    }
}
