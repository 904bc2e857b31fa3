//! How many calls took how long: buckets whose bounds are 1, 2 and 5 times the powers of ten.

use std::time::Duration;

use hdrhistogram::Histogram;
use indicatif::HumanCount;
use serde::Serialize;

use crate::output::human;

/// The longest bar.
const LONGEST: usize = 40;

/// Calls that took longer than the bound of the bucket before, and up to this long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Bucket {
    up_to_us: u64,
    calls: u64,
}

impl Bucket {
    /// From the first bucket that has calls to the last. Times are known to three digits.
    pub(super) fn all_of(times: &Histogram<u64>) -> Vec<Self> {
        let mut buckets: Vec<Self> = Vec::new();
        for recorded in times.iter_recorded() {
            let (us, calls) = (recorded.value_iterated_to().min(times.max()), recorded.count_since_last_iteration());
            let up_to_us = bound(us);
            while let Some(last) = buckets.last().filter(|last| last.up_to_us < up_to_us) {
                buckets.push(Self { up_to_us: bound(last.up_to_us + 1), calls: 0 });
            }
            match buckets.last_mut() {
                Some(last) => last.calls += calls,
                None => buckets.push(Self { up_to_us, calls }),
            }
        }
        buckets
    }

    /// A line for each, with a bar if the width allows.
    pub(super) fn lines(buckets: &[Self], width: usize) -> Vec<String> {
        let most = buckets.iter().map(|bucket| bucket.calls).max().unwrap_or_default().max(1);
        let line = |Self { up_to_us, calls }: &Self| {
            let numbers =
                format!("{:>7} {:>9}", human(Duration::from_micros(*up_to_us)), HumanCount(*calls).to_string());
            let room = width.saturating_sub(numbers.len() + 1).min(LONGEST);
            format!("{numbers} {}", bar(*calls, most, room)).trim_end().to_owned()
        };
        buckets.iter().map(line).collect()
    }
}

/// In eighths of a character; at least one if there are any calls.
fn bar(calls: u64, most: u64, room: usize) -> String {
    const PARTS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];
    let eighths = (calls as f64 / most as f64 * room as f64 * 8.0).round() as usize;
    let eighths = if calls > 0 && room > 0 { eighths.max(1) } else { eighths };
    "█".repeat(eighths / 8) + PARTS[eighths % 8]
}

/// The least bound at or above this.
fn bound(us: u64) -> u64 {
    let mut power = 1;
    loop {
        for times in [1, 2, 5] {
            if power * times >= us {
                return power * times;
            }
        }
        power *= 10;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn histogram(times: &[(u64, u64)]) -> Histogram<u64> {
        let mut histogram = Histogram::new_with_bounds(1, 3_600_000_000, 3).expect("bounds");
        times.iter().for_each(|(us, calls)| histogram.record_n(*us, *calls).expect("in range"));
        histogram
    }

    #[test]
    fn every_call_is_in_the_bucket_of_its_time() {
        let times = histogram(&[(0, 1), (1, 1), (2, 3), (3, 5), (50, 7), (51, 11), (3_600_000_000, 1)]);
        let buckets = Bucket::all_of(&times);
        let some: Vec<_> =
            buckets.iter().filter(|bucket| bucket.calls > 0).map(|one| (one.up_to_us, one.calls)).collect();
        assert_eq!(some, [(1, 2), (2, 3), (5, 5), (50, 7), (100, 11), (5_000_000_000, 1)]);
        assert_eq!(buckets.iter().map(|bucket| bucket.calls).sum::<u64>(), times.len());
        assert!(
            buckets.is_sorted_by_key(|bucket| bucket.up_to_us) && buckets.len() == 30,
            "none is left out: {buckets:?}"
        );
        assert!(Bucket::all_of(&histogram(&[])).is_empty());
    }

    #[test]
    fn lines_fit_their_width_and_the_fewest_calls_have_a_bar() {
        let buckets = Bucket::all_of(&histogram(&[(90, 1), (150, 1_234_567), (450, 600_000)]));
        assert_eq!(
            Bucket::lines(&buckets, 30),
            ["  100us         1 ▏", "  200us 1,234,567 ████████████", "  500us   600,000 █████▉",]
        );
        for width in [0, 17, 18, 26, 66, 500] {
            let lines = Bucket::lines(&buckets, width);
            assert!(lines.iter().all(|line| line.chars().count() <= width.clamp(17, 18 + LONGEST)), "{lines:?}");
        }
    }
}
