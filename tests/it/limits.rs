//! Random limits and histories for property tests: from 1 per 30 days to 1,000,000 per second.

use std::ops::RangeInclusive;
use std::time::Duration;

use proptest::prelude::*;
use tollgate::{Algorithm, Calendar, Debt, Limit, LimitBuilder, Start};

use crate::oracle::Retry;
use crate::subject::{Micros, Subject, micros};

const SECOND: u64 = 1_000_000;

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

/// Any limit that can be built.
pub(crate) fn any_limit() -> impl Strategy<Value = Limit> {
    algorithm().prop_flat_map(limit_of)
}

/// Any limit of this algorithm.
pub(crate) fn limit_of(algorithm: Algorithm) -> impl Strategy<Value = Limit> {
    let bucket = matches!(algorithm, Algorithm::TokenBucket | Algorithm::Gcra);
    let window = algorithm == Algorithm::FixedWindow;
    let remembers_each = matches!(algorithm, Algorithm::SlidingLog | Algorithm::Concurrency);
    let rate = if remembers_each { logarithmic(1..=60) } else { logarithmic(1..=1_000_000) };
    let capacity = proptest::option::of(logarithmic(1..=2_000_000));
    let debt = prop_oneof![3 => Just(0), 1 => logarithmic(1..=1000)];
    let parameters = (rate, period(), capacity, debt, start(), any_window());
    parameters.prop_filter_map("can be built", move |(rate, period, capacity, debt, start, (unit, zone))| {
        let mut limit: LimitBuilder = Limit::of(algorithm, rate, period);
        if algorithm == Algorithm::CalendarWindow {
            limit = Limit::calendar(rate, unit).tz(zone);
        }
        if bucket || window {
            limit = limit.capacity(capacity.unwrap_or(rate)).max_debt(Debt::Units(debt));
        }
        if window {
            let within = |offset: Duration| Duration::from_micros(micros(offset) % micros(period));
            limit = limit.start(match start {
                Start::At(offset) => Start::At(within(offset)),
                other => other,
            });
        }
        // Room for a history of several resets before the last time that a decision can be made at.
        limit.build().ok().filter(|limit| micros(limit.longest_reset()) <= 1 << 49)
    })
}

/// Of zones where clocks are set by an hour and by half of one, where a day was left out, and where midnight is.
fn any_window() -> impl Strategy<Value = (Calendar, &'static str)> {
    let units = vec![Calendar::Day, Calendar::Week, Calendar::Month, Calendar::Year];
    let zones =
        vec!["UTC", "Europe/Zurich", "America/Havana", "Australia/Lord_Howe", "Pacific/Apia", "America/Santiago"];
    (proptest::sample::select(units), proptest::sample::select(zones))
}

/// Two limits of one algorithm, for a rule that changes.
pub(crate) fn two_limits() -> impl Strategy<Value = (Limit, Limit)> {
    algorithm().prop_flat_map(|algorithm| (limit_of(algorithm), limit_of(algorithm)))
}

pub(crate) fn algorithm() -> impl Strategy<Value = Algorithm> {
    proptest::sample::select(Algorithm::all().collect::<Vec<_>>())
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

fn period() -> impl Strategy<Value = Duration> {
    let unit = proptest::sample::select(vec![1, 1000, SECOND, 60 * SECOND, 3600 * SECOND, 86_400 * SECOND]);
    let whole = (unit, 1_u64..=30).prop_map(|(unit, count)| unit * count);
    prop_oneof![4 => whole, 1 => logarithmic(1..=30 * 86_400 * SECOND)].prop_map(Duration::from_micros)
}

fn start() -> impl Strategy<Value = Start> {
    prop_oneof![
        2 => Just(Start::At(Duration::ZERO)),
        2 => logarithmic(1..=86_400 * SECOND).prop_map(|offset| Start::At(Duration::from_micros(offset))),
        2 => Just(Start::FirstHit),
    ]
}

/// Small and large numbers alike.
fn logarithmic(range: RangeInclusive<u64>) -> impl Strategy<Value = u64> {
    let (least, most) = range.into_inner();
    let bits = most.ilog2() + 1;
    (0..=bits, any::<u64>()).prop_map(move |(bits, noise)| (noise & ((1 << bits) - 1)).clamp(least, most))
}
