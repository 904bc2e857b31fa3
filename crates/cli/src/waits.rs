//! How long denied callers would have waited: the waits that denials have.

use std::time::Duration;

use hdrhistogram::Histogram;
use serde::Serialize;
use tollgate::RetryAfter;

use crate::output::{grouped, human, micros, percent};
use crate::page::{Bins, Columns, Ink, Plot, Section, Series, Table};

/// Waits, within 0.1 %, and denials that never end by waiting.
#[derive(Debug)]
pub(crate) struct Waits {
    times: Histogram<u64>,
    longest_us: u64,
    never: u64,
}

/// The waits as other programs read them, in microseconds.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Quantiles {
    pub(crate) p50: u64,
    pub(crate) p90: u64,
    pub(crate) max: u64,
}

/// A hundred years, longer than any rule's period.
const LONGEST_US: u64 = 100 * 366 * 86_400 * 1_000_000;

impl Default for Waits {
    fn default() -> Self {
        let times = Histogram::new(3).expect("three digits are within the bounds");
        Self { times, longest_us: 0, never: 0 }
    }
}

impl Waits {
    /// Notes the wait that a denial has.
    pub(crate) fn note(&mut self, retry_after: RetryAfter) {
        match retry_after {
            RetryAfter::Never => self.never += 1,
            wait => {
                let us = micros(wait.duration().unwrap_or_default()).max(1);
                // The histogram grows with the longest wait.
                self.times.record(us.min(LONGEST_US)).expect("within what it can grow to");
                self.longest_us = self.longest_us.max(us);
            }
        }
    }

    /// Adds the waits of another.
    pub(crate) fn add(&mut self, other: &Self) {
        self.times.add(&other.times).expect("within what it can grow to");
        self.longest_us = self.longest_us.max(other.longest_us);
        self.never += other.never;
    }

    pub(crate) fn never(&self) -> u64 {
        self.never
    }

    /// `None` if no denial has a wait.
    pub(crate) fn quantiles(&self) -> Option<Quantiles> {
        let at = |percent| self.shown(self.times.value_at_percentile(percent)).min(self.longest_us);
        (!self.times.is_empty()).then(|| Quantiles { p50: at(50.0), p90: at(90.0), max: self.longest_us })
    }

    /// A time at the histogram's precision: rounded to three digits if that is in the same bucket, otherwise up to
    /// four.
    fn shown(&self, us: u64) -> u64 {
        let unit = |digits: u32| 10_u64.pow(us.checked_ilog10().unwrap_or_default().saturating_sub(digits - 1));
        let short = (us + unit(3) / 2) / unit(3) * unit(3);
        if self.times.equivalent(short, us) { short } else { us.next_multiple_of(unit(4)) }
    }

    /// As a part of a page. `None` if there was no denial.
    pub(crate) fn section(&self) -> Option<Section> {
        let never = match self.never {
            0 => String::new(),
            never => format!(" {} more would never have been allowed, however long they waited.", grouped(never)),
        };
        let title = "How long denied callers would have waited".to_owned();
        let Some(Quantiles { p50, p90, max }) = self.quantiles() else {
            let says = format!("No denial has a wait.{never}");
            return (self.never > 0).then(|| Section { title, says, ..Section::default() });
        };
        let bins = Bins::even(&self.times);
        let mut table = Table::new(["wait", "denied requests", "of those with a wait"]);
        for (at, count) in bins.counts.iter().enumerate() {
            table.row([bins.name(at), grouped(*count), percent(*count as f64 / self.times.len() as f64)]);
        }
        let [half, most, longest] = [p50, p90, max].map(|us| human(Duration::from_micros(us)));
        let says = format!(
            "Each denial has the wait after which the same request would be allowed, without other traffic. Half of \
             the waits are {half} or less, nine in ten {most} or less, and none is longer than {longest}.{never}"
        );
        let plot = Columns {
            edges: bins.labels(),
            across: "the wait that a denial has".into(),
            up: "denied requests".into(),
            marks: vec![bins.mark(p50, "half wait up to"), bins.mark(p90, "nine in ten up to")],
            series: vec![Series { name: "denied".into(), ink: Ink::Denied, counts: bins.counts }],
            top: None,
        };
        Some(Section { title, says, plot: Some(Plot::Columns(plot)), table })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_are_summed_up_and_those_without_end_are_counted() {
        let mut waits = Waits::default();
        assert!(waits.section().is_none() && waits.quantiles().is_none());
        waits.note(RetryAfter::Never);
        assert!(waits.section().is_some_and(|section| section.plot.is_none() && section.says.contains("1 more")));
        for second in 1..=100 {
            waits.note(RetryAfter::After(Duration::from_secs(second)));
        }
        let Quantiles { p50, p90, max } = waits.quantiles().unwrap();
        assert_eq!((p50, p90, max), (50_000_000, 90_000_000, 100_000_000));
        let mut near = Waits::default();
        (0..30).for_each(|_| near.note(RetryAfter::After(Duration::from_micros(1_004_000))));
        near.note(RetryAfter::After(Duration::from_micros(1_999_999)));
        let Quantiles { p50, max, .. } = near.quantiles().unwrap();
        assert!((1_004_000..1_006_000).contains(&p50) && max == 1_999_999, "{p50} {max}");
        let section = waits.section().unwrap();
        assert!(section.says.contains("1 more would never") && section.table.rows.len() == 20, "{section:?}");
    }
}
