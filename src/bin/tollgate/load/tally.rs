//! What is counted while a run goes on.

use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use tollgate::{By, Charged, Decision, Error};

use super::ledger::{Call, Ledger, Verdict};
use crate::output::micros;

/// Counts of the measured calls, and every call's part in the audit.
#[derive(Debug)]
pub(super) struct Tally {
    pub(super) sent: u64,
    /// Left out because too many calls were waiting for their answers.
    pub(super) unsent: u64,
    pub(super) allowed: u64,
    pub(super) denied: u64,
    pub(super) errors: Errors,
    pub(super) first_error: Option<String>,
    pub(super) by: Option<By>,
    /// From the time that a call was due, or was sent if none was set, to its answer.
    pub(super) latency: Histogram<u64>,
    /// From the time that a call was due to its being sent.
    pub(super) lateness: Histogram<u64>,
    /// From the first measured call's being sent to the last answer.
    pub(super) span: Option<(Instant, Instant)>,
    /// Answers of all calls, warm-up included, for those who watch,
    pub(super) answers: u64,
    /// and how many of them were denials.
    pub(super) denials: u64,
    pub(super) ledger: Option<Ledger>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub(crate) struct Errors {
    /// No answer by the deadline.
    pub(super) deadline: u64,
    /// No connection, or one that broke.
    pub(super) unreachable: u64,
    pub(super) other: u64,
}

/// When a call was due, sent and answered.
#[derive(Clone, Copy, Debug)]
pub(super) struct Times {
    pub(super) due: Instant,
    pub(super) sent: Instant,
    pub(super) answered: Instant,
}

impl Tally {
    pub(super) fn new(ledger: Option<Ledger>) -> Self {
        Self {
            sent: 0,
            unsent: 0,
            allowed: 0,
            denied: 0,
            errors: Errors::default(),
            first_error: None,
            by: None,
            latency: histogram(),
            lateness: histogram(),
            span: None,
            answers: 0,
            denials: 0,
            ledger,
        }
    }

    pub(super) fn answered(&self) -> u64 {
        self.allowed + self.denied
    }

    /// Between the first measured call and the last answer.
    pub(super) fn seconds(&self) -> f64 {
        self.span.map_or(0.0, |(first, last)| last.saturating_duration_since(first).as_secs_f64())
    }

    /// Calls that were sent so much after they were due.
    pub(super) fn later_than(&self, delay: Duration) -> u64 {
        self.lateness.len() - self.lateness.count_between(0, micros(delay))
    }

    pub(super) fn measure(&mut self, times: Times, answer: &Result<Decision, Error>) {
        let Times { due, sent, answered } = times;
        self.sent += 1;
        let (first, last) = self.span.unwrap_or((sent, answered));
        self.span = Some((first.min(sent), last.max(answered)));
        record(&mut self.lateness, sent.saturating_duration_since(due));
        match answer {
            Ok(decision) => {
                self.by = Some(decision.by);
                self.allowed += u64::from(decision.allowed);
                self.denied += u64::from(!decision.allowed);
                record(&mut self.latency, answered.saturating_duration_since(due));
            }
            Err(error) => {
                self.first_error.get_or_insert_with(|| error.to_string());
                if error.is_deadline() {
                    self.errors.deadline += 1;
                } else if error.is_unreachable() || error.is_disconnected() {
                    self.errors.unreachable += 1;
                } else {
                    self.errors.other += 1;
                }
            }
        }
    }

    /// Notes the call for the audit, unless it certainly took nothing and was not denied.
    pub(super) fn note(&mut self, key: u32, sent: u64, answered: u64, answer: &Result<Decision, Error>) {
        self.answers += u64::from(answer.is_ok());
        self.denials += u64::from(answer.as_ref().is_ok_and(|decision| !decision.allowed));
        let verdict = match answer {
            Ok(decision) if decision.allowed => Verdict::Allowed,
            Ok(_) => Verdict::Denied,
            Err(error) if error.charged() == Charged::No => return,
            Err(_) => Verdict::Unknown,
        };
        if let Some(ledger) = &mut self.ledger {
            ledger.add(Call { key, verdict, sent, answered });
        }
    }
}

fn histogram() -> Histogram<u64> {
    // Three digits up to an hour: bounds that are always fine.
    Histogram::new_with_bounds(1, 3_600_000_000, 3).expect("bounds in order, and at most five digits")
}

fn record(histogram: &mut Histogram<u64>, time: Duration) {
    histogram.saturating_record(micros(time));
}
