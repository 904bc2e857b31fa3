//! Which limits are tried, and which of the found ones is recommended.

use tollgate::Algorithm;

use super::meter::Meter;

const SECOND: u64 = 1_000_000;
/// The periods that are tried unless one is given.
const PERIODS: [u64; 3] = [SECOND, 60 * SECOND, 3600 * SECOND];
/// The most rates that are tried, and the most that are shown below and above the recommended one.
const MOST_RATES: usize = 32;
const SHOWN_BELOW: usize = 4;
const SHOWN_ABOVE: usize = 5;
/// The fewest units in a period that make a sensible limit.
const FEWEST: u64 = 10;

/// The periods of windows for traffic of this length. A longer window would never be complete.
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

/// Of rates and bursts by rate, those that no other beats in both; and the recommended one, under which a key can take
/// the fewest units in any one period: the least sum of rate and burst.
pub(super) fn frontier(found: &[(u64, u64)]) -> (Vec<(u64, u64)>, usize) {
    let mut best: Vec<(u64, u64)> = Vec::new();
    for point in found {
        if best.last().is_none_or(|(_, burst)| point.1 < *burst) {
            best.push(*point);
        }
    }
    let knee = (0..best.len()).rev().min_by_key(|at| best[*at].0.saturating_add(best[*at].1)).unwrap_or_default();
    let from = knee.saturating_sub(SHOWN_BELOW);
    let to = best.len().min(knee + 1 + SHOWN_ABOVE);
    (best[from..to].to_vec(), knee - from)
}

/// Fixed windows whose needs determine which rates per period to try.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_longer_than_the_traffic_is_not_tried() {
        assert_eq!(periods(None, 0), [SECOND]);
        assert_eq!(periods(None, 60 * SECOND), [SECOND, 60 * SECOND]);
        assert_eq!(periods(None, 1 << 52), PERIODS);
        assert_eq!(periods(Some(7), 0), [7]);
    }

    #[test]
    fn the_period_is_one_in_which_a_limit_is_a_sensible_number() {
        assert_eq!(main_period(&[(SECOND, 9), (60 * SECOND, 10), (3600 * SECOND, 500)]), 60 * SECOND);
        assert_eq!(main_period(&[(SECOND, 9), (60 * SECOND, 9)]), 60 * SECOND);
        assert_eq!(main_period(&[]), SECOND);
    }

    #[test]
    fn rates_reach_from_the_average_to_the_worst_second() {
        // 30 in the worst second, 600 in an hour.
        assert_eq!(
            rates(60 * SECOND, &[(SECOND, 30), (3600 * SECOND, 600)]),
            [5, 10, 20, 50, 100, 200, 500, 1000, 2000]
        );
        assert_eq!(rates(60 * SECOND, &[(3600 * SECOND, 1)]), [1]);
        assert_eq!(rates(SECOND, &[]), [1]);
        assert!(rates(3600 * SECOND, &[(1, u64::MAX), (u64::MAX, 1)]).len() <= MOST_RATES);
    }

    #[test]
    fn the_frontier_has_no_point_that_another_betters_and_the_knee_has_the_least_sum() {
        let found = [(1, 90), (2, 90), (5, 60), (10, 55), (20, 45), (50, 45), (100, 7), (200, 3)];
        let (frontier, knee) = frontier(&found);
        assert_eq!(frontier, [(1, 90), (5, 60), (10, 55), (20, 45), (100, 7), (200, 3)]);
        assert_eq!(frontier[knee], (20, 45), "of three with a sum of 65");
        assert_eq!(super::frontier(&[]), (Vec::new(), 0));
        // Only what is near the knee is shown.
        let many: Vec<_> = (1..=30).map(|rate| (rate, 31 + (30 - rate) * 2)).collect();
        let (frontier, knee) = super::frontier(&many);
        assert_eq!((frontier.len(), frontier[knee]), (5, (30, 31)));
    }
}
