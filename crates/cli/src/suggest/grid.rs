//! Which limits are tried, and which of those that were found is recommended.

use tollgate::Algorithm;

use super::meter::Meter;

const SECOND: u64 = 1_000_000;
/// The periods that are tried unless one is given.
const PERIODS: [u64; 3] = [SECOND, 60 * SECOND, 3600 * SECOND];
/// The most rates that are tried, and the most that are shown below and above the recommended one.
const MOST_RATES: usize = 32;
const SHOWN_BELOW: usize = 4;
const SHOWN_ABOVE: usize = 5;
/// The fewest units in a period of which a limit is a sensible number.
const FEWEST: u64 = 10;

/// The periods of windows for traffic that lasts so long. A window that is longer was never seen in full.
pub(super) fn periods(asked: Option<u64>, span_us: u64) -> Vec<u64> {
    match asked {
        Some(period) => vec![period],
        None => PERIODS.into_iter().filter(|period| *period == PERIODS[0] || *period <= span_us).collect(),
    }
}

/// The period of the rates and of the windows that are recommended: the first in which a window needs at least ten
/// units, or else the last. `needed` are the periods and what fixed windows need in them.
pub(super) fn main_period(needed: &[(u64, u64)]) -> u64 {
    let sensible = needed.iter().find(|(_, units)| *units >= FEWEST).or(needed.last());
    sensible.map_or(PERIODS[0], |(period, _)| *period)
}

/// The rates per period to try, in steps of 1, 2 and 5: from what the heaviest keys take on average, below which the
/// burst grows as long as the traffic lasts, to what they take in the worst window, above which it hardly shrinks.
/// `needed` are periods and what windows need in them; the longest is all of the traffic.
pub(super) fn rates(period_us: u64, needed: &[(u64, u64)]) -> Vec<u64> {
    let per_period =
        |(of_us, units): &(u64, u64)| u128::from(*units) * u128::from(period_us) / u128::from(*of_us).max(1);
    let low = needed.iter().map(per_period).min().unwrap_or(1);
    let high = needed.iter().map(per_period).max().unwrap_or(1);
    let mut rates: Vec<_> = steps().skip_while(|rate| u128::from(*rate) * 5 / 2 <= low).take(MOST_RATES).collect();
    let last = rates.iter().position(|rate| u128::from(*rate) >= high).unwrap_or(rates.len());
    rates.truncate(last + 1);
    rates
}

/// 1, 2, 5, 10, 20 and so on.
fn steps() -> impl Iterator<Item = u64> {
    (0..15).flat_map(|power| [1, 2, 5].map(|digit| digit * 10_u64.pow(power)))
}

/// Of rates and bursts by rate, those that no other betters in both; and which of them is recommended: the one under
/// which a key can take the fewest units in any one period, which is their sum.
pub(super) fn frontier(found: &[(u64, u64)]) -> (Vec<(u64, u64)>, usize) {
    let mut best: Vec<(u64, u64)> = Vec::new();
    for point in found {
        if best.last().is_none_or(|(_, burst)| point.1 < *burst) {
            best.push(*point);
        }
    }
    let knee = (0..best.len()).min_by_key(|at| best[*at].0.saturating_add(best[*at].1)).unwrap_or_default();
    let from = knee.saturating_sub(SHOWN_BELOW);
    let to = best.len().min(knee + 1 + SHOWN_ABOVE);
    (best[from..to].to_vec(), knee - from)
}

/// Fixed windows of which the needs tell which rates per period to try.
pub(super) fn around(period_us: u64) -> impl Iterator<Item = Meter> {
    let periods = [SECOND.min(period_us), period_us];
    let distinct = if periods[0] == period_us { 1 } else { 2 };
    periods.into_iter().take(distinct).map(|period| Meter::window(Algorithm::FixedWindow, period))
}

/// The windows and the log of this period.
pub(super) fn windows(period_us: u64) -> impl Iterator<Item = Meter> {
    let algorithms = [Algorithm::FixedWindow, Algorithm::SlidingWindow, Algorithm::SlidingLog];
    algorithms.into_iter().map(move |algorithm| Meter::window(algorithm, period_us))
}
