//! A limit's share for one of several that decide by themselves.

use std::num::NonZeroU32;

use super::{Debt, Limit, LimitBuilder};
use crate::algorithm::Algorithm;
use crate::error::RuleError;

impl Limit {
    /// What one of so many may admit by itself, so that all together never exceed this limit: an equal part of the
    /// capacity and of the rate, rounded down.
    ///
    /// # Errors
    ///
    /// A part without a unit.
    pub(crate) fn share(&self, of: NonZeroU32) -> Result<Self, RuleError> {
        let parts = u64::from(of.get());
        let too_few = |what: &str, units: u64| {
            RuleError::new(format!("{self}: expected a {what} of at least {parts}, one for each process, got {units}"))
        };
        if parts == 1 {
            return Ok(self.clone());
        }
        let mut share = LimitBuilder {
            algorithm: self.algorithm,
            rate: self.rate / parts,
            period: self.period(),
            capacity: None,
            max_debt: None,
            start: None,
            max: None,
        };
        let capacity = self.capacity / parts;
        match self.algorithm {
            Algorithm::TokenBucket | Algorithm::Gcra => {
                // Units come evenly, so a fraction of the rate is as well said by a longer period.
                (share.rate, share.period) = (self.rate, self.period() * of.get());
                share = share.capacity(capacity);
            }
            Algorithm::FixedWindow => share = share.capacity(capacity).start(self.start),
            Algorithm::SlidingLog => share = share.max(self.max),
            Algorithm::SlidingWindow | Algorithm::Concurrency => {}
        }
        if self.max_debt() > 0 {
            share = share.max_debt(Debt::Units(self.max_debt() / parts));
        }
        if share.rate == 0 {
            return Err(too_few("rate", self.rate));
        }
        if share.capacity == Some(0) && (self.capacity > 0 || self.max_debt() < parts) {
            return Err(too_few("burst", self.capacity));
        }
        let share = share.build()?;
        match &self.name {
            Some(name) => share.named(name),
            None => Ok(share),
        }
    }
}

#[cfg(test)]
mod tests {
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
            ("gcra 5/1h burst 100", 10, "gcra 5/10h burst 10"),
            ("token-bucket 10/1s max-debt 50", 4, "token-bucket 10/4s burst 2 max-debt 12"),
            ("fixed-window 100/1h burst 300 start 8m", 7, "fixed-window 14/1h burst 42 start 8m"),
            ("fixed-window 100/1h start first-hit", 2, "fixed-window 50/1h start first-hit"),
            ("sliding-window 1000/1h", 3, "sliding-window 333/1h"),
            ("sliding-log 50000/1d max 50000", 2, "sliding-log 25000/1d max 50000"),
            ("concurrency 8 ttl 30s", 3, "concurrency 2 ttl 30s"),
        ] {
            assert_eq!(share(text, of), Ok(expected.into()), "{text} of {of}");
        }
    }

    #[test]
    fn a_share_without_a_unit_is_refused() {
        for (text, of, expected) in [
            ("gcra 5/1s", 6, "gcra 5/1s: expected a burst of at least 6, one for each process, got 5"),
            (
                "gcra 10/1s burst 3 max-debt 50",
                10,
                "gcra 10/1s burst 3 max-debt 50: expected a burst of at least 10, one for each process, got 3",
            ),
            ("sliding-log 5/1s", 6, "sliding-log 5/1s: expected a rate of at least 6, one for each process, got 5"),
            (
                "fixed-window 9/1s burst 90",
                10,
                "fixed-window 9/1s burst 90: expected a rate of at least 10, one for each process, got 9",
            ),
        ] {
            assert_eq!(share(text, of), Err(expected.into()));
        }
    }
}
