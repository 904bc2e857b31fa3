//! Decisions over time: in a few equal intervals, however long the traffic is.

mod section;

use std::time::Duration;

use serde::Serialize;

use crate::output::{human, percent, timestamp};

/// The maximum number of intervals.
const MOST: u64 = 48;

/// The lengths of intervals in seconds, each a multiple of the one before; beyond these, lengths double.
const SECONDS: [u64; 11] = [1, 5, 15, 60, 300, 900, 3600, 10_800, 21_600, 43_200, 86_400];

/// Counts by interval, from the first that has a record to the last.
#[derive(Debug, Default)]
pub(crate) struct OverTime {
    each_us: u64,
    /// The number of the first interval, counted from 1970.
    first: u64,
    intervals: Vec<Interval>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Interval {
    allowed: u64,
    denied: u64,
}

/// The counts as other programs read them.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Counted {
    pub(crate) each_us: u64,
    pub(crate) from_us: u64,
    pub(crate) allowed: Vec<u64>,
    pub(crate) denied: Vec<u64>,
}

impl OverTime {
    pub(crate) fn note(&mut self, t_us: u64, allowed: bool) {
        let interval = self.reach(t_us);
        if allowed { interval.allowed += 1 } else { interval.denied += 1 }
    }

    /// Adds the counts of another.
    pub(crate) fn add(&mut self, other: &Self) {
        for (number, counted) in (other.first..).zip(&other.intervals) {
            // Intervals can only be merged, so that both have the longer ones.
            while !self.intervals.is_empty() && self.each_us < other.each_us {
                self.merge();
            }
            if self.intervals.is_empty() {
                (self.each_us, self.first, self.intervals) = (other.each_us, number, vec![Interval::default()]);
            }
            let interval = self.reach(number * other.each_us);
            interval.allowed += counted.allowed;
            interval.denied += counted.denied;
        }
    }

    /// The interval of this time, created if needed.
    pub(crate) fn reach(&mut self, t_us: u64) -> &mut Interval {
        if self.intervals.is_empty() {
            self.each_us = SECONDS[0] * 1_000_000;
            self.first = t_us / self.each_us;
            self.intervals.push(Interval::default());
        }
        while !self.covers(t_us) {
            self.merge();
        }
        let number = t_us / self.each_us;
        // A time before the first interval, as by a clock that steps back, prepends intervals.
        let missing = usize::try_from(self.first.saturating_sub(number)).unwrap_or(0);
        self.intervals.splice(0..0, std::iter::repeat_n(Interval::default(), missing));
        self.first = self.first.min(number);
        let at = usize::try_from(number - self.first).unwrap_or(usize::MAX);
        if self.intervals.len() <= at {
            self.intervals.resize(at + 1, Interval::default());
        }
        &mut self.intervals[at]
    }

    /// Whether there are still at most `MOST` intervals once this time is covered.
    fn covers(&self, t_us: u64) -> bool {
        let (number, last) = (t_us / self.each_us, self.first + self.intervals.len() as u64 - 1);
        last.max(number) - self.first.min(number) < MOST
    }

    /// Merges intervals into longer ones.
    fn merge(&mut self) {
        let longer = SECONDS.iter().map(|seconds| seconds * 1_000_000).find(|us| *us > self.each_us);
        let longer = longer.unwrap_or(self.each_us * 2);
        let times = longer / self.each_us;
        let before = std::mem::take(&mut self.intervals);
        let first = self.first / times;
        for (number, interval) in (self.first..).zip(before) {
            let at = usize::try_from(number / times - first).unwrap_or(usize::MAX);
            if self.intervals.len() <= at {
                self.intervals.resize(at + 1, Interval::default());
            }
            self.intervals[at].allowed += interval.allowed;
            self.intervals[at].denied += interval.denied;
        }
        (self.first, self.each_us) = (first, longer);
    }

    /// None if there was no record.
    pub(crate) fn counted(&self) -> Option<Counted> {
        (!self.intervals.is_empty()).then(|| Counted {
            each_us: self.each_us,
            from_us: self.first * self.each_us,
            allowed: self.intervals.iter().map(|interval| interval.allowed).collect(),
            denied: self.intervals.iter().map(|interval| interval.denied).collect(),
        })
    }
}

impl Counted {
    /// The share of each interval's records that were denied, as a line of bars relative to the highest, with a legend.
    /// None if nothing was denied.
    pub(crate) fn drawn(&self) -> Option<String> {
        let most = self.highest();
        let each = human(Duration::from_micros(self.each_us));
        let meaning = format!("denied in each {each} from {}, {} at most", self.beginning(), percent(most));
        (most > 0.0).then(|| format!("{}  {meaning}", self.bars(most)))
    }

    /// The share of each interval's records that were denied, as a line of bars, of which a full one is this share.
    pub(crate) fn bars(&self, full: f64) -> String {
        const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
        let bar = |at| match (self.total(at), self.denied[at]) {
            (0, _) => ' ',
            (_, 0) => '·',
            _ => BARS[((self.share(at) / full * 8.0).ceil() as usize).clamp(1, 8) - 1],
        };
        (0..self.denied.len()).map(bar).collect()
    }

    /// The highest share of an interval's records that were denied.
    pub(crate) fn highest(&self) -> f64 {
        (0..self.denied.len()).map(|at| self.share(at)).fold(0.0, f64::max)
    }

    /// The most records of an interval.
    pub(crate) fn busiest(&self) -> u64 {
        (0..self.denied.len()).map(|at| self.total(at)).max().unwrap_or(0)
    }

    /// When the first interval begins.
    pub(crate) fn beginning(&self) -> String {
        timestamp(self.from_us).replace(".000000", "")
    }

    /// The same counts in at most so many intervals, each a multiple as long.
    pub(crate) fn in_at_most(&self, most: usize) -> Self {
        let times = self.denied.len().div_ceil(most.max(1)).max(1);
        let sums = |counts: &[u64]| counts.chunks(times).map(|counts| counts.iter().sum()).collect();
        let each_us = self.each_us.saturating_mul(times as u64);
        Self { each_us, from_us: self.from_us, allowed: sums(&self.allowed), denied: sums(&self.denied) }
    }

    fn total(&self, at: usize) -> u64 {
        self.allowed[at] + self.denied[at]
    }

    fn share(&self, at: usize) -> f64 {
        self.denied[at] as f64 / self.total(at).max(1) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000;

    #[test]
    fn few_intervals_hold_all_records_whatever_their_order() {
        let mut random = fastrand::Rng::with_seed(5);
        for span in [1, 60 * SECOND, 86_400 * SECOND, 1 << 52] {
            let (mut over_time, mut denied) = (OverTime::default(), 0);
            for at in 0..2_000_u64 {
                over_time.note(random.u64(0..span), !at.is_multiple_of(3));
                denied += u64::from(at.is_multiple_of(3));
                assert!(over_time.intervals.len() as u64 <= MOST);
            }
            let counted = over_time.counted().unwrap();
            assert_eq!(counted.denied.iter().sum::<u64>(), denied, "{span}");
            assert_eq!(counted.allowed.iter().sum::<u64>(), 2_000 - denied, "{span}");
            assert!(counted.from_us + counted.each_us * counted.denied.len() as u64 >= span / 2, "{span}");
        }
    }

    #[test]
    fn counts_that_are_added_are_as_if_counted_together() {
        let mut random = fastrand::Rng::with_seed(6);
        for span in [1, 9 * SECOND, 70 * SECOND, 5_000 * SECOND, 86_400 * SECOND, 1 << 52] {
            for records in [0, 1, 3, 500] {
                let mut all = OverTime::default();
                let mut parts: [OverTime; 3] = Default::default();
                for at in 0..records {
                    let (t_us, allowed) = (random.u64(0..span), random.bool());
                    all.note(t_us, allowed);
                    parts[if at == 0 { 2 } else { random.usize(0..2) }].note(t_us, allowed);
                }
                let [mut one, other, third] = parts;
                one.add(&other);
                one.add(&third);
                let [one, all] = [one, all].map(|counts| serde_json::to_string(&counts.counted()).unwrap());
                assert_eq!(one, all, "{records} within {span}");
            }
        }
    }

    #[test]
    fn each_record_is_counted_in_its_interval() {
        let mut over_time = OverTime::default();
        for (second, allowed) in [(100, true), (100, false), (103, true), (99, false)] {
            over_time.note(second * SECOND + 7, allowed);
        }
        let counted = over_time.counted().unwrap();
        assert_eq!((counted.each_us, counted.from_us), (SECOND, 99 * SECOND));
        assert_eq!((counted.allowed, counted.denied), (vec![0, 1, 0, 0, 1], vec![1, 1, 0, 0, 0]));
        // Too far away for intervals of a second, so they become five seconds long.
        over_time.note(200 * SECOND, true);
        let counted = over_time.counted().unwrap();
        assert_eq!((counted.each_us, counted.from_us, counted.denied.len()), (5 * SECOND, 95 * SECOND, 22));
        assert_eq!((&counted.denied[..3], &counted.allowed[..3]), (&[1, 1, 0][..], &[0, 2, 0][..]));
        assert_eq!(
            counted.drawn().unwrap(),
            "█▃                   ·  denied in each 5s from 1970-01-01T00:01:35Z, 100.00 % at most"
        );
    }

    #[test]
    fn a_time_without_a_record_has_an_interval_too() {
        let mut over_time = OverTime::default();
        over_time.reach(7 * SECOND);
        over_time.note(9 * SECOND, false);
        over_time.reach(10 * SECOND);
        let counted = over_time.counted().unwrap();
        assert_eq!((counted.from_us, counted.denied.as_slice()), (7 * SECOND, &[0, 0, 1, 0][..]));
    }

    #[test]
    fn nothing_is_drawn_where_nothing_was_denied() {
        assert!(OverTime::default().counted().is_none());
        let mut over_time = OverTime::default();
        over_time.note(1, true);
        assert!(over_time.counted().unwrap().drawn().is_none());
    }

    #[test]
    fn fewer_intervals_have_the_same_sums() {
        let mut over_time = OverTime::default();
        for second in 0..10 {
            over_time.note(second * SECOND, second % 2 == 0);
        }
        let counted = over_time.counted().unwrap();
        let few = counted.in_at_most(4);
        assert_eq!((few.each_us, few.from_us), (3 * SECOND, 0));
        assert_eq!((&few.allowed, &few.denied), (&vec![2, 1, 2, 0], &vec![1, 2, 1, 1]));
        assert_eq!(few.bars(1.0), "▃▆▃█");
        assert_eq!(counted.in_at_most(80).denied, counted.denied);
    }
}
