//! A limit's numbers as its script computes with them: reduced, in ticks, so that every product is exact.

use super::{Debt, Limit, Start};
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
    // Of more units, all else alike.
    let product = |span: u128, period: u128| (span + 1) * period + u128::from(rate);
    let tick = finest_tick(
        limit,
        period,
        units(bounded) - 1,
        product,
        match limit.max_debt {
            Debt::Units(1..) => "burst and max-debt together",
            _ => "burst",
        },
    )?;
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

/// Windows of the calendar: only times are added up. A day more than a window's own length is more than any clock is set
/// back in it.
pub(crate) fn fit_calendar(limit: &Limit) -> Result<Exact, RuleError> {
    Ok(Exact { longest_reset: limit.period + 86_400_000_000, ..fit_log(limit)? })
}

/// Sliding windows: a count times the window must be exact.
pub(crate) fn fit_counter(limit: &Limit) -> Result<Exact, RuleError> {
    let tick = finest_tick(limit, limit.period, u128::from(limit.rate), |rate, period| (rate + 1) * period, "rate")?;
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

/// The bounds of two windows, last, are each call's own.
pub(crate) fn calendar_arguments(limit: &Limit) -> Vec<i64> {
    vec![number(limit.rate), 0, 0, 0]
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

/// The finest tick, in microseconds, at which the product of these units and the period is exact. Only a divisor of the
/// period makes the product smaller, so only divisors are tried.
fn finest_tick(
    limit: &Limit,
    period: u64,
    units: u128,
    product: impl Fn(u128, u128) -> u128,
    what: &str,
) -> Result<u64, RuleError> {
    let exact = |units: u128, tick: u64| product(units, u128::from(period / tick)) <= u128::from(EXACT);
    let least = u64::try_from(product(units, u128::from(period)) / u128::from(EXACT)).unwrap_or(u64::MAX).max(1);
    let coarsest = COARSEST_TICK.min(limit.period / 100).max(1);
    if let Some(tick) = (least..=coarsest).find(|&tick| period.is_multiple_of(tick) && exact(units, tick)) {
        return Ok(tick);
    }
    // More fit at the coarsest tick than at any other.
    let tick = (1..=coarsest).rev().find(|&tick| period.is_multiple_of(tick)).unwrap_or(1);
    let (mut most, mut too_many) = (0, units);
    while too_many - most > 1 {
        let middle = u128::midpoint(most, too_many);
        if exact(middle, tick) { most = middle } else { too_many = middle }
    }
    // And no more than are forgotten in time.
    let most = most.min(u128::from(LONGEST) * u128::from(limit.rate) / u128::from(limit.period));
    let (what, most, units) = if most > 0 { (what, most, units) } else { lower_rate(limit, coarsest) };
    let why = "since its numbers must multiply to at most 2^53";
    Err(RuleError::new(format!("{limit}: expected {what} at most {most} or a shorter period, {why}, got {units}")))
}

/// A rate that fits with as much burst, where the rate alone is too much.
fn lower_rate(limit: &Limit, coarsest: u64) -> (&'static str, u128, u128) {
    let tick = (1..=coarsest).rev().find(|&tick| limit.period.is_multiple_of(tick)).unwrap_or(1);
    let period = u128::from(limit.period / tick);
    ("rate", u128::from(EXACT).saturating_sub(period) / (period + 1), u128::from(limit.rate))
}

pub(super) fn gcd(mut a: u64, mut b: u64) -> u64 {
    while b > 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_do_not_fit_are_told_with_those_that_would() {
        for (text, fits, most) in [
            ("sliding-window 9007199254740992/30d", "sliding-window {}/30d", Some(3_474_999_711)),
            ("gcra 1/1s burst 9007199254740992", "gcra 1/1s burst {}", Some(2_251_799_813)),
            ("token-bucket 7/1s burst 9007199254740992", "token-bucket 7/1s burst {}", None),
            ("gcra 1/1s burst 1 max-debt 9007199254740992", "gcra 1/1s burst 0 max-debt {}", Some(2_251_799_813)),
            ("gcra 1/1s burst 9007199254740992 max-debt none", "gcra 1/1s burst {} max-debt none", None),
            ("gcra 9007199254740991/30d", "gcra {}/30d", None),
            ("gcra 9007199254740991/1us", "gcra {}/1us", None),
        ] {
            let error = text.parse::<Limit>().unwrap_err().to_string();
            let told = error.split(" at most ").nth(1).and_then(|rest| rest.split(' ').next()).expect("a number");
            let number: u64 = told.parse().expect("a number");
            assert!(most.is_none_or(|most| most == number), "{error}");
            let limit = |number: u64| fits.replace("{}", &number.to_string()).parse::<Limit>();
            limit(number).unwrap_or_else(|why| panic!("{error}, and then {why}"));
            assert!(most.is_none() || limit(number + 1).is_err(), "{error}");
            assert!(error.contains(", got ") && !error.contains('\n'), "{error}");
        }
    }
}
