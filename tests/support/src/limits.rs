//! Random limits for property tests: from 1 per 30 days to 1,000,000 per second.

use std::ops::RangeInclusive;
use std::time::Duration;

use proptest::prelude::*;
use tollgate::{Algorithm, CalendarUnit, Limit, LimitBuilder, MaxDebt, WindowStart};

use crate::engines::micros;

pub(super) const SECOND: u64 = 1_000_000;

/// Any limit that can be built.
pub fn any_limit() -> impl Strategy<Value = Limit> {
    algorithm().prop_flat_map(limit_of)
}

/// Any limit of this algorithm.
pub fn limit_of(algorithm: Algorithm) -> impl Strategy<Value = Limit> {
    // Whether it has a burst, where its windows begin, and its highest rate: small, where each unit is remembered.
    let (bursts, starts, most) = match algorithm {
        Algorithm::TokenBucket => (true, false, 1_000_000),
        Algorithm::FixedWindow => (true, true, 1_000_000),
        Algorithm::CalendarWindow | Algorithm::SlidingWindow => (false, false, 1_000_000),
        Algorithm::SlidingLog | Algorithm::Concurrency => (false, false, 60),
        other => panic!("{other}: which limits of it can be built?"),
    };
    let rate = logarithmic(1..=most);
    let capacity = proptest::option::of(logarithmic(1..=2_000_000));
    let debt = prop_oneof![3 => Just(0), 1 => logarithmic(1..=1000)];
    let parameters = (rate, period(), capacity, debt, start(), any_window());
    parameters.prop_filter_map("can be built", move |(rate, period, capacity, debt, start, (unit, zone))| {
        let mut limit: LimitBuilder = Limit::builder(algorithm, rate, period);
        if algorithm == Algorithm::CalendarWindow {
            limit = Limit::calendar(rate, unit).tz(zone);
        }
        if bursts {
            limit = limit.capacity(capacity.unwrap_or(rate));
        }
        if algorithm.reserves() {
            limit = limit.max_debt(MaxDebt::Units(debt));
        }
        if starts {
            let within = |offset: Duration| Duration::from_micros(micros(offset) % micros(period));
            limit = limit.start(match start {
                WindowStart::At(offset) => WindowStart::At(within(offset)),
                other => other,
            });
        }
        // Room for a history of several resets before the last time that a decision can be made at.
        limit.build().ok().filter(|limit| micros(limit.longest_reset()) <= 1 << 49)
    })
}

/// Of zones where clocks are set by an hour and by half of one, where a day was left out, and where midnight is.
fn any_window() -> impl Strategy<Value = (CalendarUnit, &'static str)> {
    let units = vec![CalendarUnit::Day, CalendarUnit::Week, CalendarUnit::Month, CalendarUnit::Year];
    let zones =
        vec!["UTC", "Europe/Zurich", "America/Havana", "Australia/Lord_Howe", "Pacific/Apia", "America/Santiago"];
    (proptest::sample::select(units), proptest::sample::select(zones))
}

/// Two limits of one algorithm, for a rule that changes.
pub fn two_limits() -> impl Strategy<Value = (Limit, Limit)> {
    algorithm().prop_flat_map(|algorithm| (limit_of(algorithm), limit_of(algorithm)))
}

pub fn algorithm() -> impl Strategy<Value = Algorithm> {
    proptest::sample::select(Algorithm::all().collect::<Vec<_>>())
}

fn period() -> impl Strategy<Value = Duration> {
    let unit = proptest::sample::select(vec![1, 1000, SECOND, 60 * SECOND, 3600 * SECOND, 86_400 * SECOND]);
    let whole = (unit, 1_u64..=30).prop_map(|(unit, count)| unit * count);
    prop_oneof![4 => whole, 1 => logarithmic(1..=30 * 86_400 * SECOND)].prop_map(Duration::from_micros)
}

fn start() -> impl Strategy<Value = WindowStart> {
    prop_oneof![
        2 => Just(WindowStart::At(Duration::ZERO)),
        2 => logarithmic(1..=86_400 * SECOND).prop_map(|offset| WindowStart::At(Duration::from_micros(offset))),
        2 => Just(WindowStart::FirstHit),
    ]
}

/// Small and large numbers alike.
pub fn logarithmic(range: RangeInclusive<u64>) -> impl Strategy<Value = u64> {
    let (least, most) = range.into_inner();
    let bits = most.ilog2() + 1;
    (0..=bits, any::<u64>()).prop_map(move |(bits, noise)| (noise & ((1 << bits) - 1)).clamp(least, most))
}

/// The same limit in so many shards, as far as it can be.
pub fn split(limit: &Limit, shards: u64) -> Option<Limit> {
    (2..=shards).rev().find_map(|shards| format!("{} shards {shards}", limit.whole()).parse().ok())
}

/// Any limit with shards.
pub fn sharded() -> impl Strategy<Value = Limit> {
    (any_limit(), prop_oneof![Just(2_u64), 3_u64..=9, Just(1024)])
        .prop_filter_map("has shards", |(limit, shards)| split(&limit, shards))
}
