//! A limit's numbers: as written, as its script computes with them (reduced, in ticks, so that every product is exact),
//! and in the order of the script's own arguments.

use std::time::Duration;

/// The largest count and the largest product in the scripts: doubles are exact up to here.
pub(crate) const EXACT: u64 = 1 << 53;
/// Above every limit, and the least such number that is a double.
pub(crate) const ABOVE_ALL: u64 = EXACT + 2;
/// The longest reset of a rule, in microseconds (71 years): that far ahead of any time that a script accepts (2^52 us,
/// the year 2112), times are still exact.
pub(crate) const LONGEST_RESET_US: u64 = 1 << 51;
/// The coarsest tick that a rule may have: a second.
const COARSEST_TICK: u64 = 1_000_000;

/// Where the windows of a fixed window start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum WindowStart {
    /// At this offset from multiples of the period since the epoch, less than the period. Default: zero.
    At(Duration),
    /// At the first request that finds the key unused.
    FirstHit,
    /// At a per-key offset, hashed from the key, so that callers don't all come back at once.
    Spread,
}

/// How far reservations may go below zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MaxDebt {
    /// Down to this many units. Default: 0, no debt.
    Units(u64),
    /// As far as the arithmetic stays exact.
    Unlimited,
}

/// The numbers as written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Numbers {
    pub(crate) rate: u64,
    /// In microseconds.
    pub(crate) period: u64,
    pub(crate) capacity: u64,
    pub(crate) max_debt: MaxDebt,
    pub(crate) start: WindowStart,
}

/// The numbers as a script computes with them: `rate` and `period` reduced if that changes nothing, time in ticks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Exact {
    pub(crate) rate: u64,
    /// In ticks.
    pub(crate) period: u64,
    /// In microseconds.
    pub(crate) tick: u64,
    pub(crate) max_debt: u64,
    /// In microseconds.
    pub(crate) longest_reset: u64,
}

/// Buckets: the product that must be exact is the whole span, capacity plus debt, times the reduced period.
pub(crate) fn fit_bucket(numbers: &Numbers) -> Result<Exact, String> {
    let shared = gcd(numbers.rate, numbers.period);
    let (rate, period) = (numbers.rate / shared, numbers.period / shared);
    let units = |debt: u64| u128::from(numbers.capacity) + u128::from(debt) + 1;
    let bounded = match numbers.max_debt {
        MaxDebt::Units(units) => units,
        MaxDebt::Unlimited => 0,
    };
    // For any span, with all else equal.
    let product = |span: u128, period: u128| (span + 1) * period + u128::from(rate);
    let tick = finest_tick(
        numbers,
        period,
        units(bounded) - 1,
        product,
        match numbers.max_debt {
            MaxDebt::Units(1..) => "burst and max-debt together",
            _ => "burst",
        },
    )?;
    let period = period / tick;
    let max_debt = match numbers.max_debt {
        MaxDebt::Units(units) => units,
        MaxDebt::Unlimited => {
            let by_product = (u128::from(EXACT) - u128::from(rate)) / u128::from(period);
            let by_reset = u128::from(LONGEST_RESET_US / tick) * u128::from(rate) / u128::from(period);
            u64::try_from(by_product.min(by_reset).saturating_sub(units(0))).unwrap_or(EXACT)
        }
    };
    let span = (u128::from(numbers.capacity) + u128::from(max_debt)) * u128::from(period);
    let longest = span.div_ceil(u128::from(rate)) * u128::from(tick);
    Ok(Exact { rate, period, tick, max_debt, longest_reset: u64::try_from(longest).unwrap_or(u64::MAX) })
}

/// Fixed windows: the only product is windows times period, which the longest reset bounds.
pub(crate) fn fit_window(numbers: &Numbers) -> Result<Exact, String> {
    let Numbers { rate, period, capacity, .. } = *numbers;
    let max_debt = match numbers.max_debt {
        MaxDebt::Units(units) => units,
        MaxDebt::Unlimited => {
            let by_reset = u128::from(LONGEST_RESET_US / period) * u128::from(rate);
            let by_sum = u128::from(EXACT - rate);
            u64::try_from(by_reset.min(by_sum)).unwrap_or(EXACT).saturating_sub(capacity)
        }
    };
    let span = u128::from(capacity) + u128::from(max_debt);
    if span + u128::from(rate) > u128::from(EXACT) {
        let got = span + u128::from(rate);
        return Err(format!("expected burst, max-debt and rate to add up to at most 2^53, got {got}"));
    }
    let longest = span.div_ceil(u128::from(rate)) * u128::from(period);
    Ok(Exact { rate, period, tick: 1, max_debt, longest_reset: u64::try_from(longest).unwrap_or(u64::MAX) })
}

/// Calendar windows: only times are added. A window's own length plus a day covers any clock change within it.
pub(crate) fn fit_calendar(numbers: &Numbers) -> Result<Exact, String> {
    Ok(Exact { longest_reset: numbers.period + 86_400_000_000, ..fit_log(numbers)? })
}

/// Sliding windows: a count times the window must be exact.
pub(crate) fn fit_counter(numbers: &Numbers) -> Result<Exact, String> {
    let tick =
        finest_tick(numbers, numbers.period, u128::from(numbers.rate), |rate, period| (rate + 1) * period, "rate")?;
    let (rate, period) = (numbers.rate, numbers.period / tick);
    Ok(Exact { rate, period, tick, max_debt: 0, longest_reset: 2 * numbers.period })
}

/// Logs, where only costs are added up, and permits, where only times are.
pub(crate) fn fit_log(numbers: &Numbers) -> Result<Exact, String> {
    let Numbers { rate, period, .. } = *numbers;
    Ok(Exact { rate, period, tick: 1, max_debt: 0, longest_reset: period })
}

/// As far as the level and the time to refill it are exact.
pub(crate) fn most_of_bucket(exact: &Exact) -> u64 {
    let by_reset = u128::from(LONGEST_RESET_US) * u128::from(exact.rate) / u128::from(exact.tick);
    u64::try_from(by_reset).unwrap_or(EXACT).min(EXACT) / exact.period
}

pub(crate) fn most_of_window(exact: &Exact) -> u64 {
    let by_reset = u128::from(LONGEST_RESET_US / exact.period) * u128::from(exact.rate);
    u64::try_from(by_reset).unwrap_or(EXACT).min(EXACT - exact.rate)
}

/// The index of a fixed window's start among its numbers.
pub(crate) const START: usize = 3;

pub(crate) fn bucket_arguments(numbers: &Numbers, exact: &Exact) -> Vec<i64> {
    [numbers.capacity, exact.rate, exact.period, exact.tick, exact.max_debt].map(number).to_vec()
}

/// Spread windows start at a per-key time, which each call fills in.
pub(crate) fn window_arguments(numbers: &Numbers, exact: &Exact) -> Vec<i64> {
    let start = match numbers.start {
        WindowStart::At(offset) => i64::try_from(offset.as_micros()).unwrap_or(i64::MAX),
        WindowStart::FirstHit => -1,
        WindowStart::Spread => 0,
    };
    vec![number(numbers.capacity), number(exact.rate), number(exact.period), start, number(exact.max_debt)]
}

/// The last three, the bounds of the two windows, are filled in by each call.
pub(crate) fn calendar_arguments(numbers: &Numbers, _: &Exact) -> Vec<i64> {
    windows_arguments(numbers.rate, [0; 3]).to_vec()
}

/// For calendar windows: given the starts of two consecutive ones, and the end of the second.
pub(crate) fn windows_arguments(limit: u64, [first, second, stop]: [i64; 3]) -> [i64; 4] {
    [number(limit), first, second, stop]
}

pub(crate) fn counter_arguments(numbers: &Numbers, exact: &Exact) -> Vec<i64> {
    [numbers.rate, exact.period, exact.tick].map(number).to_vec()
}

pub(crate) fn log_arguments(numbers: &Numbers, _: &Exact) -> Vec<i64> {
    [numbers.rate, numbers.period].map(number).to_vec()
}

/// All of a limit's numbers are at most 2^53.
fn number(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

/// The finest tick, in microseconds, at which the product of these units and the period is exact. Only divisors of the
/// period make the product smaller, so only divisors are tried.
fn finest_tick(
    numbers: &Numbers,
    period: u64,
    units: u128,
    product: impl Fn(u128, u128) -> u128,
    what: &str,
) -> Result<u64, String> {
    let exact = |units: u128, tick: u64| product(units, u128::from(period / tick)) <= u128::from(EXACT);
    let least = u64::try_from(product(units, u128::from(period)) / u128::from(EXACT)).unwrap_or(u64::MAX).max(1);
    let coarsest = COARSEST_TICK.min(numbers.period / 100).max(1);
    if let Some(tick) = (least..=coarsest).find(|&tick| period.is_multiple_of(tick) && exact(units, tick)) {
        return Ok(tick);
    }
    // The coarsest tick admits the most units.
    let tick = (1..=coarsest).rev().find(|&tick| period.is_multiple_of(tick)).unwrap_or(1);
    let (mut most, mut too_many) = (0, units);
    while too_many - most > 1 {
        let middle = u128::midpoint(most, too_many);
        if exact(middle, tick) { most = middle } else { too_many = middle }
    }
    // And no more than resets within the longest time allowed.
    let most = most.min(u128::from(LONGEST_RESET_US) * u128::from(numbers.rate) / u128::from(numbers.period));
    let (what, most, units) = if most > 0 { (what, most, units) } else { lower_rate(numbers, coarsest) };
    let why = "since its numbers must multiply to at most 2^53";
    Err(format!("expected {what} at most {most} or a shorter period, {why}, got {units}"))
}

/// A lower rate that fits with as much burst, if the rate alone is too high.
fn lower_rate(numbers: &Numbers, coarsest: u64) -> (&'static str, u128, u128) {
    let tick = (1..=coarsest).rev().find(|&tick| numbers.period.is_multiple_of(tick)).unwrap_or(1);
    let period = u128::from(numbers.period / tick);
    ("rate", u128::from(EXACT).saturating_sub(period) / (period + 1), u128::from(numbers.rate))
}

pub(crate) fn gcd(mut a: u64, mut b: u64) -> u64 {
    while b > 0 {
        (a, b) = (b, a % b);
    }
    a
}

/// A cost as scripts get it. One above every limit might be rounded to a limit, or not fit the packed form.
pub(crate) fn cost_sent(cost: u64) -> u64 {
    if cost > EXACT { ABOVE_ALL } else { cost }
}
