//! Times counted by intervals: few enough to draw, however many times there are.

use std::time::Duration;

use hdrhistogram::Histogram;

use super::plot::Mark;
use crate::output::human;

/// The maximum number of intervals.
const MOST: usize = 40;

/// How many times lie in each interval.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Bins {
    /// The ends of the intervals, in microseconds: one more than there are intervals. An interval includes its upper
    /// end but not its lower one.
    pub(crate) edges: Vec<u64>,
    pub(crate) counts: Vec<u64>,
}

/// Widths that a reader can count with, in microseconds.
const WIDTHS: [u64; 34] = [
    1,
    2,
    5,
    10,
    20,
    50,
    100,
    200,
    500,
    1_000,
    2_000,
    5_000,
    10_000,
    20_000,
    50_000,
    100_000,
    200_000,
    500_000,
    1_000_000,
    2_000_000,
    5_000_000,
    10_000_000,
    30_000_000,
    60_000_000,
    120_000_000,
    300_000_000,
    600_000_000,
    1_800_000_000,
    3_600_000_000,
    10_800_000_000,
    21_600_000_000,
    43_200_000_000,
    86_400_000_000,
    604_800_000_000,
];

/// Steps within a factor of ten, each longer than the one before by about the same factor; twenty, ten, five or three
/// of them.
const STEPS: [&[f64]; 4] = [
    &[1.0, 1.12, 1.25, 1.4, 1.6, 1.8, 2.0, 2.24, 2.5, 2.8, 3.15, 3.55, 4.0, 4.5, 5.0, 5.6, 6.3, 7.1, 8.0, 9.0],
    &[1.0, 1.25, 1.6, 2.0, 2.5, 3.15, 4.0, 5.0, 6.3, 8.0],
    &[1.0, 1.6, 2.5, 4.0, 6.3],
    &[1.0, 2.0, 5.0],
];

impl Bins {
    /// Intervals of equal length, from zero: for times of one order of magnitude.
    pub(crate) fn even(times: &Histogram<u64>) -> Self {
        let longest = longest(times);
        let fits = |width: &u64| longest.div_ceil(*width) <= MOST as u64 / 2;
        let width = WIDTHS.into_iter().find(fits).unwrap_or_else(|| longest.div_ceil(MOST as u64 / 2)).max(1);
        let count = longest.div_ceil(width).max(1);
        Self::between(times, (0..=count).map(|number| number * width).collect())
    }

    /// Intervals each longer than the one before by about the same factor: for times of several orders of magnitude.
    pub(crate) fn by_factor(times: &Histogram<u64>) -> Self {
        let (shortest, longest) = (times.min().max(1), longest(times).max(1));
        let edges = |steps: &&[f64]| {
            let all =
                (0..16).flat_map(|power| steps.iter().map(move |step| (step * 10_f64.powi(power)).round() as u64));
            let mut edges: Vec<u64> = std::iter::once(0).chain(all).collect();
            edges.dedup();
            // The shortest time is above the lower end of the first interval.
            let from = edges.partition_point(|edge| *edge < shortest) - 1;
            let to = edges.partition_point(|edge| *edge < longest).min(edges.len() - 1);
            edges[from..=to].to_vec()
        };
        let few = |edges: &Vec<u64>| edges.len() <= MOST + 1;
        let chosen = STEPS.iter().map(edges).find(few).or_else(|| STEPS.last().map(edges));
        Self::between(times, chosen.unwrap_or_default())
    }

    fn between(times: &Histogram<u64>, edges: Vec<u64>) -> Self {
        let mut counts = vec![0; edges.len().saturating_sub(1)];
        for recorded in times.iter_recorded() {
            let time = times.lowest_equivalent(recorded.value_iterated_to());
            let at = edges.partition_point(|edge| *edge < time).saturating_sub(1);
            if let Some(count) = counts.get_mut(at.min(edges.len().saturating_sub(2))) {
                *count += recorded.count_since_last_iteration();
            }
        }
        Self { edges, counts }
    }

    pub(crate) fn labels(&self) -> Vec<String> {
        self.edges.iter().map(|us| if *us == 0 { "0".to_owned() } else { human(Duration::from_micros(*us)) }).collect()
    }

    /// The interval at this place, in words.
    pub(crate) fn name(&self, at: usize) -> String {
        let labels = [at, at + 1].map(|at| Duration::from_micros(self.edges[at]));
        let [from, to] = labels.map(human);
        if self.edges[at] == 0 { format!("up to {to}") } else { format!("{from} to {to}") }
    }

    /// Where a time is among the intervals.
    pub(crate) fn mark(&self, us: u64, name: &str) -> Mark {
        let last = self.edges.len().saturating_sub(2);
        let at = self.edges.partition_point(|edge| *edge < us).saturating_sub(1).min(last);
        let [low, high] = [at, at + 1].map(|at| self.edges.get(at).copied().unwrap_or_default());
        let within = us.saturating_sub(low) as f64 / high.saturating_sub(low).max(1) as f64;
        Mark { at: at as f64 + within.min(1.0), name: format!("{name} {}", human(Duration::from_micros(us))) }
    }
}

/// A histogram rounds up within its precision. Rounded down, a round number stays in the interval that ends with it.
fn longest(times: &Histogram<u64>) -> u64 {
    times.lowest_equivalent(times.max())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(times: impl IntoIterator<Item = u64>) -> Histogram<u64> {
        let mut all = Histogram::new(3).expect("three digits");
        times.into_iter().for_each(|us| all.record(us).expect("within the range"));
        all
    }

    #[test]
    fn every_time_is_in_its_interval_and_the_intervals_are_few() {
        let mut random = fastrand::Rng::with_seed(3);
        for most in [1, 2, 9, 1_000, 60_000_000, 1 << 45] {
            let all: Vec<_> = (0..1_000).map(|_| random.u64(1..=most)).collect();
            let counted = times(all.iter().copied());
            for bins in [Bins::even(&counted), Bins::by_factor(&counted)] {
                assert_eq!(bins.counts.iter().sum::<u64>(), 1_000, "{most}: {bins:?}");
                assert!(bins.counts.len() <= 2 * MOST && bins.edges.len() == bins.counts.len() + 1, "{bins:?}");
                assert!(bins.edges.is_sorted() && bins.edges[0] < counted.min(), "{bins:?}");
                let longest = *all.iter().max().unwrap();
                assert!(*bins.edges.last().unwrap() >= longest - longest / 500, "{bins:?}");
            }
        }
    }

    #[test]
    fn intervals_have_numbers_that_a_reader_can_count_with() {
        let bins = Bins::even(&times([1_000_000, 30_000_000, 60_000_000]));
        assert_eq!((bins.edges.len(), bins.edges[1]), (13, 5_000_000));
        assert_eq!((bins.name(0), bins.name(1)), ("up to 5s".to_owned(), "5s to 10s".to_owned()));
        assert_eq!((bins.counts[0], bins.counts[5], bins.counts[11]), (1, 1, 1));
        let bins = Bins::by_factor(&times([100, 1_000]));
        assert_eq!((bins.edges[0], *bins.edges.last().unwrap()), (90, 1_000));
        let mark = bins.mark(1_000, "max");
        assert_eq!((mark.at, mark.name), ((bins.counts.len()) as f64, "max 1ms".to_owned()));
    }

    #[test]
    fn without_times_there_is_nothing() {
        let none = times([]);
        assert_eq!(Bins::even(&none).counts, [0]);
        assert_eq!(Bins::by_factor(&none).counts.iter().sum::<u64>(), 0);
    }
}
