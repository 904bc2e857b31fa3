//! How a limit is divided: into equal shares for several processes, and into shards.

use std::num::NonZeroU32;
use std::sync::Arc;

use super::{Limit, LimitBuilder, MaxDebt};
use crate::algorithm::Algorithm;
use crate::algorithm::numbers::gcd;
use crate::error::RuleError;

/// The parts of a sharded limit, which together are the limit.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Shards {
    pub(super) count: u32,
    /// Equal parts are stored once, with the number of the first of them.
    runs: Arc<[(u32, Limit)]>,
}

impl Shards {
    /// How many there are.
    pub(crate) fn count(&self) -> u32 {
        self.count
    }

    /// The shard of this number, from 0.
    pub(crate) fn shard(&self, number: u32) -> &Limit {
        let after = self.runs.partition_point(|(first, _)| *first <= number);
        &self.runs[after.max(1) - 1].1
    }

    /// The last shard; no other has less.
    pub(crate) fn smallest(&self) -> &Limit {
        self.shard(self.count - 1)
    }
}

impl Limit {
    /// The share that one of this many processes may admit by itself, so that all together never exceed this limit: an
    /// equal part of the capacity and of the rate, rounded down.
    ///
    /// # Errors
    ///
    /// A share without a unit.
    #[allow(dead_code, reason = "asked where there is an engine in this process, which is a feature")]
    pub(crate) fn share(&self, of: NonZeroU32) -> Result<Self, RuleError> {
        let of = u64::from(of.get());
        let (spread, kept_back) = self.but_for_estimates(of);
        if let Some((what, units)) = spread.too_few_for(of) {
            // An estimate for each part but one: `kept_back`, if the rate has as many.
            let least = if kept_back > 0 { 2 * of - 1 } else { of };
            let units = units + kept_back;
            return Err(RuleError::new(format!(
                "{self}: expected a {what} of at least {least} for {of} processes, got {units}"
            )));
        }
        if of == 1 {
            return Ok(self.whole());
        }
        // Remainders go to the first parts, so the last is the smallest.
        let share = spread.part(of - 1, of)?;
        match &self.name {
            Some(name) => share.named(name),
            None => Ok(share),
        }
    }

    /// Splits the limit into this many parts; the remainder goes to the first ones, one unit each.
    pub(super) fn in_shards(&self, of: u64) -> Result<Shards, RuleError> {
        let (spread, kept_back) = self.but_for_estimates(of);
        if let Some((what, units)) = spread.too_few_for(of) {
            let (most, why) = match kept_back {
                0 => (units, format!("each needs a unit of the {what}")),
                _ => (self.rate.div_ceil(2), "n shards of a sliding window need a rate of 2n - 1".to_owned()),
            };
            return Err(RuleError::new(format!(
                "shards: expected a whole number from 1 to {most}, since {why}, got {of}"
            )));
        }
        spread.divided(of)
    }

    /// What can be divided into this many parts, and the units that can't.
    ///
    /// Each part of a sliding window estimates its count in the previous window, and rounds that down. If N parts added
    /// up to the limit, the rounding could admit `N - 1` units more than the whole would. With P and C the parts' total
    /// of the previous window, weighted, and of the current one, each part keeps `p + c < l + 1`, so together
    /// `P + C < L + N`, where L is the sum of the l. With `N - 1` units kept back, `floor(P) + C` is the limit at most.
    fn but_for_estimates(&self, parts: u64) -> (Self, u64) {
        let kept_back = match self.algorithm {
            Algorithm::SlidingWindow => parts.saturating_sub(1).min(self.rate),
            Algorithm::TokenBucket
            | Algorithm::FixedWindow
            | Algorithm::CalendarWindow
            | Algorithm::SlidingLog
            | Algorithm::Concurrency => 0,
        };
        let (rate, capacity) = (self.rate - kept_back, self.capacity - kept_back);
        (Self { rate, capacity, ..self.clone() }, kept_back)
    }

    fn divided(&self, of: u64) -> Result<Shards, RuleError> {
        let number = |count: u64| u32::try_from(count).unwrap_or(u32::MAX);
        let rest = |units: u64| number(units % of);
        let mut starts = vec![0, rest(self.rate), rest(self.capacity), rest(self.exact.max_debt)];
        starts.sort_unstable();
        starts.dedup();
        let part = |first: u32| {
            let part = self.part(first.into(), of);
            let why = |error| RuleError::new(format!("shards: the limit can't be split into {of}: {error}"));
            part.map(|part| (first, part)).map_err(why)
        };
        Ok(Shards { count: number(of), runs: starts.into_iter().map(part).collect::<Result<_, _>>()? })
    }

    /// What is too small to give each part a unit, and how much of it there is.
    fn too_few_for(&self, parts: u64) -> Option<(&'static str, u64)> {
        // Where units refill evenly, a fraction of the rate is a longer period.
        let needs_whole_rates = match self.algorithm {
            Algorithm::TokenBucket => false,
            Algorithm::FixedWindow
            | Algorithm::CalendarWindow
            | Algorithm::SlidingWindow
            | Algorithm::SlidingLog
            | Algorithm::Concurrency => true,
        };
        if needs_whole_rates && self.rate < parts {
            Some(("rate", self.rate))
        } else if self.capacity < parts && (self.capacity > 0 || self.max_debt() < parts) {
            // With a burst of 0, only debt is possible.
            let all = if self.capacity > 0 { ("burst", self.capacity) } else { ("max-debt", self.max_debt()) };
            Some(all)
        } else {
            None
        }
    }

    fn part(&self, number: u64, of: u64) -> Result<Self, RuleError> {
        let part = |units: u64| units / of + u64::from(number < units % of);
        let mut builder = LimitBuilder {
            algorithm: self.algorithm,
            rate: part(self.rate),
            period: self.period(),
            capacity: None,
            max_debt: None,
            start: None,
            max: None,
            shards: None,
            calendar: self.window(),
            zone: self.tz().map(str::to_owned),
        };
        match self.algorithm {
            Algorithm::TokenBucket => {
                // Units refill evenly, so a fraction of the rate can be expressed as a longer period: every part's is
                // equal.
                let shared = gcd(self.rate, of);
                let longer = u32::try_from(of / shared).unwrap_or(u32::MAX);
                (builder.rate, builder.period) = (self.rate / shared, self.period() * longer);
                builder = builder.capacity(part(self.capacity));
            }
            Algorithm::FixedWindow => builder = builder.capacity(part(self.capacity)).start(self.start),
            Algorithm::SlidingLog => builder = builder.max(self.max),
            Algorithm::SlidingWindow | Algorithm::Concurrency | Algorithm::CalendarWindow => {}
        }
        match self.max_debt {
            MaxDebt::Units(0) => {}
            MaxDebt::Units(units) => builder = builder.max_debt(MaxDebt::Units(part(units))),
            MaxDebt::Unlimited => builder = builder.max_debt(MaxDebt::Unlimited),
        }
        builder.build()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn share(text: &str, of: u32) -> Result<String, String> {
        let limit: Limit = text.parse().unwrap();
        let share = limit.share(NonZeroU32::new(of).unwrap());
        share.map(|share| share.to_string()).map_err(|error| error.to_string())
    }

    #[test]
    fn all_shares_together_are_at_most_the_limit() {
        for (text, of, expected) in [
            ("token-bucket 100/1m burst 200", 1, "token-bucket 100/1m burst 200"),
            ("token-bucket 100/1m burst 200", 3, "token-bucket 100/3m burst 66"),
            ("token-bucket 5/1h burst 100", 10, "token-bucket 1/2h burst 10"),
            ("token-bucket 10/1s max-debt 50", 4, "token-bucket 5/2s burst 2 max-debt 12"),
            ("fixed-window 100/1h burst 300 start 8m", 7, "fixed-window 14/1h burst 42 start 8m"),
            ("fixed-window 100/1h start first-hit", 2, "fixed-window 50/1h start first-hit"),
            ("sliding-window 1000/1h", 3, "sliding-window 332/1h"),
            ("sliding-log 50000/1d max 50000", 2, "sliding-log 25000/1d max 50000"),
            ("concurrency 8 ttl 30s", 3, "concurrency 2 ttl 30s"),
            // A share of the whole limit: shards are for a cluster.
            ("token-bucket 100/1s shards 8", 1, "token-bucket 100/1s"),
            ("token-bucket 100/1s shards 8", 4, "token-bucket 25/1s"),
        ] {
            assert_eq!(share(text, of), Ok(expected.into()), "{text} of {of}");
        }
    }

    #[test]
    fn a_share_without_a_unit_is_refused() {
        for (text, of, expected) in [
            ("token-bucket 5/1s", 6, "token-bucket 5/1s: expected a burst of at least 6 for 6 processes, got 5"),
            (
                "token-bucket 10/1s burst 3 max-debt 50",
                10,
                "token-bucket 10/1s burst 3 max-debt 50: expected a burst of at least 10 for 10 processes, got 3",
            ),
            ("sliding-log 5/1s", 6, "sliding-log 5/1s: expected a rate of at least 6 for 6 processes, got 5"),
            ("sliding-window 2/1s", 4, "sliding-window 2/1s: expected a rate of at least 7 for 4 processes, got 2"),
            ("sliding-window 6/1s", 4, "sliding-window 6/1s: expected a rate of at least 7 for 4 processes, got 6"),
            (
                "fixed-window 9/1s burst 90",
                10,
                "fixed-window 9/1s burst 90: expected a rate of at least 10 for 10 processes, got 9",
            ),
        ] {
            assert_eq!(share(text, of), Err(expected.into()));
        }
    }

    fn shards(text: &str) -> Result<Vec<String>, String> {
        let limit: Limit = text.parse().map_err(|error: RuleError| error.to_string())?;
        let parts = limit.shard_limits().unwrap();
        Ok((0..limit.shards()).map(|number| parts.shard(number).to_string()).collect())
    }

    #[test]
    fn what_does_not_divide_goes_to_the_first_shards() {
        for (text, expected) in [
            (
                "token-bucket 100/1m burst 11 max-debt 4 shards 3",
                &[
                    "token-bucket 100/3m burst 4 max-debt 2",
                    "token-bucket 100/3m burst 4 max-debt 1",
                    "token-bucket 100/3m burst 3 max-debt 1",
                ][..],
            ),
            ("token-bucket 6/1s burst 8 shards 4", &["token-bucket 3/2s burst 2"; 4]),
            // With a burst of 0, only debt is possible.
            (
                "token-bucket 10/1s burst 0 max-debt 3 shards 2",
                &["token-bucket 5/1s burst 0 max-debt 2", "token-bucket 5/1s burst 0 max-debt 1"],
            ),
            (
                "fixed-window 7/1h burst 10 max-debt 1 start spread shards 3",
                &[
                    "fixed-window 3/1h burst 4 max-debt 1 start spread",
                    "fixed-window 2/1h burst 3 start spread",
                    "fixed-window 2/1h burst 3 start spread",
                ],
            ),
            ("sliding-window 6/1m shards 2", &["sliding-window 3/1m", "sliding-window 2/1m"]),
            (
                "sliding-log 20001/1d max 20001 shards 2",
                &["sliding-log 10001/1d max 20001", "sliding-log 10000/1d max 20001"],
            ),
            ("concurrency 5 ttl 30s shards 2", &["concurrency 3 ttl 30s", "concurrency 2 ttl 30s"]),
            // The period of each would exceed 71 years if it weren't reduced.
            ("token-bucket 1024/30d burst 2048 shards 1024", &["token-bucket 1/30d burst 2"; 1024]),
        ] {
            assert_eq!(
                shards(text).as_deref(),
                Ok(expected.iter().map(|part| (*part).to_owned()).collect::<Vec<_>>().as_slice())
            );
        }
    }

    /// Compared in units and in units per microsecond, cross-multiplied, so that nothing is rounded.
    #[test]
    fn shards_are_the_limit_together_and_the_last_is_the_smallest() {
        for (numbers, max) in [
            ("1000/1s", ""),
            ("1000/1h", "burst 4321"),
            ("1031/7s", "burst 1033 max-debt 1039"),
            ("2000/1m", "max-debt unlimited"),
        ] {
            for algorithm in Algorithm::all() {
                let options =
                    if algorithm.row().options.contains(&crate::algorithm::Setting::MaxDebt) { max } else { "" };
                let text = match algorithm {
                    Algorithm::CalendarWindow => "fixed-window 1031/week tz Asia/Tokyo".to_owned(),
                    Algorithm::Concurrency => format!("{algorithm} 1000 ttl 30s"),
                    _ => format!("{algorithm} {numbers} {options}"),
                };
                let estimates = algorithm == Algorithm::SlidingWindow;
                for count in [2, 3, 7, 10, 64, 999, 1000] {
                    if estimates && count > 500 {
                        continue;
                    }
                    let kept_back = if estimates { u64::from(count) - 1 } else { 0 };
                    let limit: Limit = format!("{text} shards {count}").parse().unwrap();
                    let parts: Vec<_> = (0..count).map(|number| limit.shard_limits().unwrap().shard(number)).collect();
                    let sum = |units: fn(&Limit) -> u64| parts.iter().map(|part| units(part)).sum::<u64>();
                    assert_eq!(sum(Limit::capacity), limit.capacity() - kept_back, "{limit}");
                    // Without a bound, each may owe as much as its numbers can express.
                    let debts = sum(Limit::max_debt);
                    assert!(debts == limit.max_debt() || options == "max-debt unlimited", "{limit}: {debts}");
                    let period = parts[0].period();
                    assert!(parts.iter().all(|part| part.period() == period));
                    let product = |rate: u64, period: Duration| u128::from(rate) * period.as_micros();
                    let whole = product(limit.rate() - kept_back, period);
                    assert_eq!(product(sum(Limit::rate), limit.period()), whole, "{limit}");
                    let smallest = limit.smallest_shard();
                    let of = |part: &Limit| [part.rate(), part.capacity(), part.largest_cost(true)];
                    assert!(
                        parts
                            .iter()
                            .all(|part| of(part).iter().zip(of(smallest)).all(|(units, least)| *units >= least))
                    );
                    assert_eq!(limit.whole().shards(), 1);
                }
            }
        }
    }

    #[test]
    fn shards_without_a_unit_are_refused() {
        for (text, expected) in [
            (
                "token-bucket 100/1s burst 5 shards 6",
                "shards: expected a whole number from 1 to 5, since each needs a unit of the burst, got 6",
            ),
            (
                "sliding-log 5/1s shards 6",
                "shards: expected a whole number from 1 to 5, since each needs a unit of the rate, got 6",
            ),
            (
                "sliding-window 5/1s shards 4",
                "shards: expected a whole number from 1 to 3, since n shards of a sliding window need a rate of \
                 2n - 1, got 4",
            ),
            (
                "fixed-window 5/1s burst 60 shards 6",
                "shards: expected a whole number from 1 to 5, since each needs a unit of the rate, got 6",
            ),
            (
                "token-bucket 9/1s burst 0 max-debt 5 shards 6",
                "shards: expected a whole number from 1 to 5, since each needs a unit of the max-debt, got 6",
            ),
            ("token-bucket 5000/1s shards 0", "shards: expected a whole number from 1 to 1024, got 0"),
            ("token-bucket 5000/1s shards 1025", "shards: expected a whole number from 1 to 1024, got 1025"),
            ("token-bucket 5000/1s shards 8 shards 8", "shards: given twice, the second time as \"8\""),
            (
                "fixed-window 10/1s start first-hit shards 2",
                "shards: expected windows that all shards share (start at an offset, or spread), got start first-hit",
            ),
            (
                "token-bucket 1021/300d shards 1019",
                "shards: the limit can't be split into 1019: period: expected whole microseconds, from 1us to 71 years, got 305700d",
            ),
        ] {
            assert_eq!(shards(text), Err(expected.into()));
        }
        assert_eq!("token-bucket 5/1s shards 1".parse::<Limit>().unwrap().to_string(), "token-bucket 5/1s");
    }
}
