//! Latencies of decisions as counts by bucket. The buckets are those of Prometheus's native histograms of schema 4:
//! each begins at 2^(1/16) times the previous one's start. Histograms merge by adding buckets, so a percentile over
//! many is as exact as over one: the middle of a bucket is within 2.2 % of every time in it. `sql/0002_history.sql`
//! uses the same buckets.

use std::time::Duration;

const BUCKETS_PER_DOUBLING: f64 = 16.0;

/// The non-empty buckets and their counts, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Histogram {
    counts: Vec<(i16, u64)>,
}

impl Histogram {
    pub(super) fn add(&mut self, time: Duration) {
        self.add_count(bucket(time), 1);
    }

    pub(super) fn add_count(&mut self, bucket: i16, count: u64) {
        match self.counts.binary_search_by_key(&bucket, |(bucket, _)| *bucket) {
            Ok(at) => self.counts[at].1 = self.counts[at].1.saturating_add(count),
            Err(at) => self.counts.insert(at, (bucket, count)),
        }
    }

    pub(super) fn add_all(&mut self, other: &Self) {
        other.counts.iter().for_each(|(bucket, count)| self.add_count(*bucket, *count));
    }

    /// The time within which this share of the decisions was made, as the middle of its bucket; the SQL function of the
    /// same name computes the same. `None` if the histogram is empty.
    pub(super) fn percentile(&self, share: f64) -> Option<Duration> {
        let all: u128 = self.counts.iter().map(|(_, count)| u128::from(*count)).sum();
        // The product of large numbers may be rounded up.
        let rank = ((all as f64 * share).ceil() as u128).clamp(1, all.max(1));
        let mut so_far = 0;
        let reached = self.counts.iter().find(|(_, count)| {
            so_far += u128::from(*count);
            so_far >= rank
        });
        reached.map(|(bucket, _)| middle(*bucket))
    }

    /// The two columns, as array literals.
    pub(super) fn columns(&self) -> (String, String) {
        let array = |items: Vec<String>| format!("{{{}}}", items.join(","));
        let buckets = self.counts.iter().map(|(bucket, _)| bucket.to_string()).collect();
        (array(buckets), array(self.counts.iter().map(|(_, count)| count.to_string()).collect()))
    }
}

/// Bucket n holds times above 2^((n-1)/16) and up to 2^(n/16) microseconds; bucket 0 holds those up to one.
fn bucket(time: Duration) -> i16 {
    let micros = u64::try_from(time.as_micros()).unwrap_or(u64::MAX).max(1);
    // At most 16 * 64.
    ((micros as f64).log2() * BUCKETS_PER_DOUBLING).ceil() as i16
}

fn middle(bucket: i16) -> Duration {
    let exponent = if bucket <= 0 { 0.0 } else { (f64::from(bucket) - 0.5) / BUCKETS_PER_DOUBLING };
    Duration::from_nanos((exponent.exp2() * 1e3) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_within_their_stated_error_also_of_histograms_added_up() {
        let times: Vec<u64> = (1..=20_000_u64).map(|n| n * n % 999_983 + 1).collect();
        let mut parts = vec![Histogram::default(); 7];
        for (at, time) in times.iter().enumerate() {
            parts[at % 7].add(Duration::from_micros(*time));
        }
        let mut all = Histogram::default();
        parts.iter().for_each(|part| all.add_all(part));
        let mut sorted = times;
        sorted.sort_unstable();
        for share in [0.0, 0.01, 0.5, 0.9, 0.95, 0.99, 0.999, 1.0] {
            let rank = ((sorted.len() as f64 * share).ceil() as usize).max(1);
            let (exact, got) = (sorted[rank - 1] as f64 / 1e6, all.percentile(share).expect("some").as_secs_f64());
            assert!((got / exact - 1.0).abs() <= 0.0222, "{share}: expected about {exact}, got {got}");
        }
    }

    #[test]
    fn extremes_have_a_bucket() {
        assert_eq!(Histogram::default().percentile(0.5), None);
        for time in [Duration::ZERO, Duration::from_nanos(1), Duration::from_micros(1)] {
            assert_eq!(bucket(time), 0);
        }
        assert_eq!((bucket(Duration::from_micros(2)), bucket(Duration::from_micros(3))), (16, 26));
        assert_eq!(bucket(Duration::MAX), 1024);
        let mut histogram = Histogram::default();
        histogram.add(Duration::MAX);
        assert!(histogram.percentile(0.5).is_some_and(|time| time > Duration::from_secs(1 << 33)));
        (0..4).for_each(|bucket| histogram.add_count(bucket * 16, u64::MAX));
        histogram.add_count(0, 1);
        assert!([0.5, 1.0].iter().all(|share| histogram.percentile(*share).is_some()));
    }
}
