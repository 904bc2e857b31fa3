//! A limit's numbers as its script computes with them: reduced, in ticks, so that every product is exact.

use super::{Debt, Limit, Start, text};
use crate::error::RuleError;

/// The largest count and the largest product that the scripts compute with: doubles are exact up to here.
pub(crate) const EXACT: u64 = 1 << 53;
/// The longest time that a rule may take to forget, in microseconds (71 years): a time that far ahead of any that a
/// script accepts (2^52 us, the year 2112) is still exact.
pub(crate) const LONGEST: u64 = 1 << 51;
/// The coarsest tick that a rule may have: a second.
const COARSEST_TICK: u64 = 1_000_000;

/// The numbers as a script computes with them: `rate` and `period` reduced where that changes nothing, time in ticks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Exact {
    pub(super) rate: u64,
    /// In ticks.
    pub(super) period: u64,
    /// In microseconds.
    pub(super) tick: u64,
    pub(super) max_debt: u64,
    /// In microseconds.
    pub(super) longest_reset: u64,
}

/// Buckets: the product that must be exact is the whole span, capacity and debt, in units * reduced period.
pub(crate) fn fit_bucket(limit: &Limit) -> Result<Exact, RuleError> {
    let shared = gcd(limit.rate, limit.period);
    let (rate, period) = (limit.rate / shared, limit.period / shared);
    let units = |debt: u64| u128::from(limit.capacity) + u128::from(debt) + 1;
    let bounded = match limit.max_debt {
        Debt::Units(units) => units,
        Debt::Unbounded => 0,
    };
    let tick = finest_tick(limit, period, |period| units(bounded) * period + u128::from(rate))?;
    let period = period / tick;
    let max_debt = match limit.max_debt {
        Debt::Units(units) => units,
        Debt::Unbounded => {
            let by_product = (u128::from(EXACT) - u128::from(rate)) / u128::from(period);
            let by_reset = u128::from(LONGEST / tick) * u128::from(rate) / u128::from(period);
            u64::try_from(by_product.min(by_reset).saturating_sub(units(0))).unwrap_or(EXACT)
        }
    };
    let span = (u128::from(limit.capacity) + u128::from(max_debt)) * u128::from(period);
    let longest = span.div_ceil(u128::from(rate)) * u128::from(tick);
    Ok(Exact { rate, period, tick, max_debt, longest_reset: u64::try_from(longest).unwrap_or(u64::MAX) })
}

/// Fixed windows: no product but windows times period, which the longest reset bounds.
pub(crate) fn fit_window(limit: &Limit) -> Result<Exact, RuleError> {
    let Limit { rate, period, capacity, .. } = *limit;
    let max_debt = match limit.max_debt {
        Debt::Units(units) => units,
        Debt::Unbounded => {
            let by_reset = u128::from(LONGEST / period) * u128::from(rate);
            let by_sum = u128::from(EXACT - rate);
            u64::try_from(by_reset.min(by_sum)).unwrap_or(EXACT).saturating_sub(capacity)
        }
    };
    let span = u128::from(capacity) + u128::from(max_debt);
    if span + u128::from(rate) > u128::from(EXACT) {
        return Err(RuleError::new(format!("{limit}: expected burst, max-debt and rate to add up to at most 2^53")));
    }
    let longest = span.div_ceil(u128::from(rate)) * u128::from(period);
    Ok(Exact { rate, period, tick: 1, max_debt, longest_reset: u64::try_from(longest).unwrap_or(u64::MAX) })
}

/// Sliding windows: a count times the window must be exact.
pub(crate) fn fit_counter(limit: &Limit) -> Result<Exact, RuleError> {
    let tick = finest_tick(limit, limit.period, |period| (u128::from(limit.rate) + 1) * period)?;
    let (rate, period) = (limit.rate, limit.period / tick);
    Ok(Exact { rate, period, tick, max_debt: 0, longest_reset: 2 * limit.period })
}

/// Logs: sums of costs only.
pub(crate) fn fit_log(limit: &Limit) -> Result<Exact, RuleError> {
    let Limit { rate, period, .. } = *limit;
    Ok(Exact { rate, period, tick: 1, max_debt: 0, longest_reset: period })
}

/// Permits: only times are added up.
pub(crate) fn fit_permits(limit: &Limit) -> Result<Exact, RuleError> {
    fit_log(limit)
}

pub(crate) fn bucket_arguments(limit: &Limit) -> Vec<i64> {
    let Exact { rate, period, tick, max_debt, .. } = limit.exact;
    [limit.capacity, rate, period, tick, max_debt].map(number).to_vec()
}

pub(crate) fn window_arguments(limit: &Limit) -> Vec<i64> {
    let Exact { rate, period, max_debt, .. } = limit.exact;
    let start = match limit.start {
        Start::At(offset) => i64::try_from(offset.as_micros()).unwrap_or(i64::MAX),
        Start::FirstHit => -1,
        Start::Spread => 0,
    };
    vec![number(limit.capacity), number(rate), number(period), start, number(max_debt)]
}

pub(crate) fn counter_arguments(limit: &Limit) -> Vec<i64> {
    [limit.rate, limit.exact.period, limit.exact.tick].map(number).to_vec()
}

pub(crate) fn log_arguments(limit: &Limit) -> Vec<i64> {
    [limit.rate, limit.period].map(number).to_vec()
}

/// The holder, last, is each call's own.
pub(crate) fn permits_arguments(limit: &Limit) -> Vec<i64> {
    [limit.rate, limit.period, 0].map(number).to_vec()
}

/// All numbers of a limit are at most 2^53.
fn number(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

/// The finest tick, in microseconds, at which the product is exact. Only a divisor of the period makes the product
/// smaller, so only divisors are tried.
fn finest_tick(limit: &Limit, period: u64, product: impl Fn(u128) -> u128) -> Result<u64, RuleError> {
    let fits = |tick: u64| period.is_multiple_of(tick) && product(u128::from(period / tick)) <= u128::from(EXACT);
    let least = u64::try_from(product(u128::from(period)) / u128::from(EXACT)).unwrap_or(u64::MAX).max(1);
    let coarsest = COARSEST_TICK.min(limit.period / 100).max(1);
    (least..=coarsest).find(|&tick| fits(tick)).ok_or_else(|| {
        let most = text::Period(coarsest);
        RuleError::new(format!(
            "{limit}: its numbers multiply to more than 2^53 at every tick up to {most}; lower them"
        ))
    })
}

pub(super) fn gcd(mut a: u64, mut b: u64) -> u64 {
    while b > 0 {
        (a, b) = (b, a % b);
    }
    a
}
