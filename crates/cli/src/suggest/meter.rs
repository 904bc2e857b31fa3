//! How high a limit would have to be for one key's requests, in whole numbers and at a microsecond's resolution.
//!
//! This doesn't decide anything: whatever is suggested from it is checked by the limiter's own scripts. It asks of each
//! request how high the limit would have to be to admit it, which is the same question for all algorithms: the highest
//! answer is what the key needs, and a request is denied where the answer is higher than the limit.

use std::collections::VecDeque;
use std::time::Duration;

use tollgate::{Algorithm, Limit, RuleError, WindowStart};

use crate::output::micros;

/// The highest limit of a log that doesn't raise its `max`.
const MOST_OF_A_LOG: u64 = 10_000;

/// An algorithm with all its numbers except the one to be found: the burst of a bucket, the rate of a window.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Meter {
    pub(super) algorithm: Algorithm,
    /// Units per period, of a bucket.
    pub(super) rate: u64,
    pub(super) period_us: u64,
    /// Where fixed windows start after the epoch.
    start_us: u64,
    /// The rate and the period of a bucket, reduced.
    reduced: (u64, u64),
}

/// What a key has taken.
#[derive(Clone, Debug)]
pub(super) enum State {
    /// How far the theoretical arrival time lies ahead of the time, in 1/rate of a microsecond.
    Bucket {
        t_us: u64,
        lead: u64,
    },
    /// The number of the current window, and what was taken in it and in the one before.
    Windows {
        number: u64,
        previous: u64,
        current: u64,
    },
    Log(Box<Log>),
}

#[derive(Clone, Debug, Default)]
pub(super) struct Log {
    entries: VecDeque<(u64, u64)>,
    used: u64,
    /// More than any log may hold, so that it remembers nothing more.
    over: bool,
}

impl Meter {
    /// Of a token bucket.
    pub(super) fn bucket(rate: u64, period_us: u64) -> Self {
        let (algorithm, divisor) = (Algorithm::TokenBucket, greatest_common_divisor(rate, period_us));
        Self { algorithm, rate, period_us, start_us: 0, reduced: (rate / divisor, period_us / divisor) }
    }

    /// Of windows or a log.
    pub(super) fn window(algorithm: Algorithm, period_us: u64) -> Self {
        Self { algorithm, rate: 0, period_us, start_us: 0, reduced: (0, 1) }
    }

    /// The meter of this limit without its burst or its window's rate; `None` if it is of another kind, or has what is
    /// never suggested: shards, debts, unused units that roll over, windows without a common start.
    pub(super) fn of(limit: &Limit) -> Option<Self> {
        let (algorithm, period_us) = (limit.algorithm(), micros(limit.period()));
        if limit.shards() > 1 || limit.max_debt() > 0 {
            return None;
        }
        match (algorithm, limit.start()) {
            (Algorithm::TokenBucket, _) => Some(Self::bucket(limit.rate(), period_us)),
            (Algorithm::SlidingWindow | Algorithm::SlidingLog, _) => Some(Self::window(algorithm, period_us)),
            (Algorithm::FixedWindow, WindowStart::At(start)) if limit.capacity() == limit.rate() => {
                Some(Self { start_us: micros(start), ..Self::window(algorithm, period_us) })
            }
            _ => None,
        }
    }

    pub(super) fn is_bucket(&self) -> bool {
        self.algorithm == Algorithm::TokenBucket
    }

    /// The limit with this burst or, if it has none, this rate.
    pub(super) fn limit(&self, units: u64) -> Result<Limit, RuleError> {
        let period = Duration::from_micros(self.period_us);
        if self.is_bucket() {
            return Limit::builder(self.algorithm, self.rate, period).capacity(units).build();
        }
        let limit = Limit::builder(self.algorithm, units, period);
        if self.start_us == 0 {
            return limit.build();
        }
        limit.start(WindowStart::At(Duration::from_micros(self.start_us))).build()
    }

    /// The most units for which the limit counts in microseconds, as is done here.
    pub(super) fn most(&self) -> u64 {
        const EXACT: u64 = 1 << 53;
        match self.algorithm {
            Algorithm::SlidingLog => MOST_OF_A_LOG,
            Algorithm::SlidingWindow => EXACT / self.period_us - 1,
            Algorithm::FixedWindow => EXACT / 2,
            _ => {
                let (rate, period) = self.reduced;
                // A bucket must also be full again within 71 years.
                ((EXACT - rate.min(EXACT)) / period).saturating_sub(1).min(((1 << 51) / period).saturating_mul(rate))
            }
        }
    }

    /// The state of a key that has taken nothing.
    pub(super) fn unused(&self) -> State {
        match self.algorithm {
            Algorithm::SlidingLog => State::Log(Box::default()),
            Algorithm::FixedWindow | Algorithm::SlidingWindow => State::Windows { number: 0, previous: 0, current: 0 },
            _ => State::Bucket { t_us: 0, lead: 0 },
        }
    }

    /// The most entries that the state of a key with so many requests may hold, each of 16 bytes.
    pub(super) fn most_entries(&self, requests: u64) -> u64 {
        if self.algorithm == Algorithm::SlidingLog { requests.min(MOST_OF_A_LOG) } else { 0 }
    }

    /// How many units the limit must have to admit this cost now. Times never step back.
    ///
    /// Numbers too large for a limit needn't be exact, only too large.
    pub(super) fn asks(&self, state: &mut State, now_us: u64, cost: u64) -> u64 {
        let used = match state {
            State::Bucket { t_us, lead } => {
                let (rate, period) = self.reduced;
                *lead = lead.saturating_sub((now_us - *t_us).saturating_mul(rate));
                *t_us = now_us;
                lead.div_ceil(period)
            }
            State::Windows { number, previous, current } => {
                let since = now_us + self.period_us - self.start_us;
                let (now, elapsed) = (since / self.period_us, since % self.period_us);
                if now != *number {
                    *previous = if now == *number + 1 { *current } else { 0 };
                    (*number, *current) = (now, 0);
                }
                match self.algorithm {
                    Algorithm::SlidingWindow => {
                        overlapping(*previous, self.period_us - elapsed, self.period_us).saturating_add(*current)
                    }
                    _ => *current,
                }
            }
            State::Log(log) => {
                log.expire(now_us, self.period_us);
                if log.over { u64::MAX } else { log.used }
            }
        };
        // A cost of nothing is always admitted.
        if cost == 0 { 0 } else { used.saturating_add(cost) }
    }

    /// Takes these units now, after a call of [`asks`](Self::asks) with the same time.
    pub(super) fn take(&self, state: &mut State, now_us: u64, cost: u64) {
        match state {
            State::Bucket { lead, .. } => *lead = lead.saturating_add(cost.saturating_mul(self.reduced.1)),
            State::Windows { current, .. } => *current = current.saturating_add(cost),
            State::Log(log) => log.take(now_us, cost),
        }
    }
}

impl Log {
    /// Forgets entries that are a period old or older.
    fn expire(&mut self, now_us: u64, period_us: u64) {
        while let Some((t_us, units)) = self.entries.front()
            && *t_us + period_us <= now_us
        {
            self.used -= units;
            self.entries.pop_front();
        }
    }

    fn take(&mut self, now_us: u64, cost: u64) {
        if cost == 0 || self.over {
            return;
        }
        self.used = self.used.saturating_add(cost);
        match self.entries.back_mut() {
            Some((t_us, units)) if *t_us == now_us => *units += cost,
            _ => self.entries.push_back((now_us, cost)),
        }
        if self.used > MOST_OF_A_LOG {
            (self.over, self.entries) = (true, VecDeque::new());
        }
    }
}

/// The part of the units that overlaps, rounded down.
fn overlapping(units: u64, overlap: u64, period: u64) -> u64 {
    match units.checked_mul(overlap) {
        Some(product) => product / period,
        None => u64::try_from(u128::from(units) * u128::from(overlap) / u128::from(period)).unwrap_or(u64::MAX),
    }
}

fn greatest_common_divisor(one: u64, other: u64) -> u64 {
    if other == 0 { one } else { greatest_common_divisor(other, one % other) }
}
