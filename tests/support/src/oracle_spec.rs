//! The oracle for a limit, and its numbers as the oracle has them.

use tollgate::{Algorithm, CalendarUnit, Limit, WindowStart};

use crate::engines::micros;
use crate::oracle::calendar::Window;
use crate::oracle::{self, Oracle, Spec};

/// The oracle for this limit.
pub fn oracle(limit: &Limit) -> Oracle {
    Oracle::new(spec(limit))
}

pub fn spec(limit: &Limit) -> Spec {
    let (rate, period_us, capacity) = (limit.rate(), micros(limit.period()), limit.capacity());
    let (max_debt, tick_us) = (limit.max_debt(), micros(limit.tick()));
    let start = match limit.start() {
        WindowStart::At(offset) => oracle::Start::At(micros(offset)),
        _ => oracle::Start::FirstHit,
    };
    match limit.algorithm() {
        Algorithm::TokenBucket => Spec::TokenBucket { rate, period_us, capacity, max_debt, tick_us },
        Algorithm::FixedWindow => Spec::FixedWindow { rate, period_us, capacity, max_debt, start },
        Algorithm::CalendarWindow => {
            let zone = limit.tz().and_then(|zone| zone.parse().ok()).expect("a zone that both know");
            Spec::CalendarWindow { limit: rate, window: window(limit), zone }
        }
        Algorithm::SlidingWindow => Spec::SlidingWindow { limit: rate, period_us, tick_us },
        Algorithm::SlidingLog => Spec::SlidingLog { limit: rate, period_us },
        Algorithm::Concurrency => Spec::Concurrency { limit: rate, ttl_us: period_us },
        other => panic!("{other}: the oracle doesn't know it"),
    }
}

/// What a limit's windows of the calendar are.
pub fn window(limit: &Limit) -> Window {
    match limit.window() {
        Some(CalendarUnit::Day) => Window::Day,
        Some(CalendarUnit::Week) => Window::Week,
        Some(CalendarUnit::Month) => Window::Month,
        Some(CalendarUnit::Year) => Window::Year,
        other => panic!("{limit}: {other:?}: the oracle doesn't know it"),
    }
}
