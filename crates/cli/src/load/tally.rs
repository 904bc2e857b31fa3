//! What is counted during a run.

use std::fmt;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use tollgate::{Charged, Decision, Error, ErrorKind};

use super::drawing::Recent;
use super::ledger::{Call, Ledger, Verdict};
use crate::output::micros;
use crate::over_time::OverTime;

/// Counts of the measured calls, and every call's entry for the audit.
#[derive(Debug)]
pub(super) struct Tally {
    pub(super) sent: u64,
    /// Not sent because too many calls were awaiting their replies.
    pub(super) unsent: u64,
    pub(super) allowed: u64,
    pub(super) denied: u64,
    pub(super) errors: Errors,
    pub(super) first_error: Option<String>,
    /// How many replies came from each source.
    pub(super) by: Vec<(&'static str, u64)>,
    /// Permits that were not released.
    pub(super) unreleased: u64,
    pub(super) warmup: Warmup,
    /// In an open loop, the time in which the measured calls were due, from the first to when the next would be due.
    pub(super) planned: Option<Duration>,
    /// From when a call was due, or sent if it had no due time, to its reply.
    pub(super) latency: Histogram<u64>,
    /// From when a call was due until it was sent.
    pub(super) lateness: Histogram<u64>,
    /// The measured calls that were answered, from when the first one was due.
    pub(super) over_time: OverTime,
    first_due: Option<Instant>,
    /// The longest time from sending a measured call to its end, with or without a reply.
    pub(super) longest: Duration,
    /// From sending the first measured call to the last reply.
    pub(super) span: Option<(Instant, Instant)>,
    /// Replies to all calls, warm-up included, for the display of progress.
    pub(super) answers: u64,
    /// The same for the last second, if it is drawn.
    pub(super) recent: Option<Recent>,
    pub(super) ledger: Option<Ledger>,
    /// Calls that aren't in the ledger, since the engine certainly didn't decide them.
    pub(super) left_out: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub(crate) struct Errors {
    /// No reply by the deadline.
    pub(super) deadline: u64,
    /// No connection, or a broken one.
    pub(super) unreachable: u64,
    pub(super) other: u64,
}

/// The outcome of the calls before the measurement.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub(crate) struct Warmup {
    pub(super) answered: u64,
    pub(super) errors: u64,
    pub(super) unsent: u64,
}

impl Errors {
    pub(super) fn total(&self) -> u64 {
        let Self { deadline, unreachable, other } = *self;
        deadline + unreachable + other
    }
}

impl fmt::Display for Errors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { deadline, unreachable, other } = *self;
        let kinds = [
            (deadline, "past the deadline"),
            (unreachable, "unreachable (or not sent after others had failed)"),
            (other, "others"),
        ];
        let kinds = kinds.iter().filter(|(count, _)| *count > 0).map(|(count, kind)| format!("{count} {kind}"));
        f.write_str(&kinds.collect::<Vec<_>>().join(", "))
    }
}

/// What went wrong, as an addition to another message.
impl fmt::Display for Warmup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { answered, errors, unsent } = *self;
        if errors + unsent == 0 {
            return Ok(());
        }
        let all = answered + errors + unsent;
        write!(f, "; in the warm-up {errors} of {all} calls failed and {unsent} were not sent")
    }
}

/// When a call was due, was sent, and got its reply.
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
            by: Vec::new(),
            unreleased: 0,
            warmup: Warmup::default(),
            planned: None,
            latency: histogram(),
            lateness: histogram(),
            over_time: OverTime::default(),
            first_due: None,
            longest: Duration::ZERO,
            span: None,
            answers: 0,
            recent: None,
            ledger,
            left_out: 0,
        }
    }

    pub(super) fn answered(&self) -> u64 {
        self.allowed + self.denied
    }

    /// Measured calls, sent or not.
    pub(super) fn asked(&self) -> u64 {
        self.sent + self.unsent
    }

    /// How many calls got no reply, and why, if any.
    pub(super) fn unanswered(&self) -> Option<String> {
        let (failed, unsent) = (self.errors.total(), self.unsent);
        if failed + unsent == 0 {
            return None;
        }
        let failures = (failed > 0).then(|| self.errors.to_string());
        let unsent = (unsent > 0).then(|| format!("{unsent} not sent since too many were waiting"));
        let why = failures.into_iter().chain(unsent).collect::<Vec<_>>().join(", ");
        let first = self.first_error.as_ref().map(|error| format!("; first: {error}")).unwrap_or_default();
        let (unanswered, asked) = (failed + self.unsent, self.asked());
        Some(format!("{unanswered} of {asked} calls were not answered: {why}{first}{}", self.warmup))
    }

    /// Whether any decision was made in the engine's place.
    pub(super) fn has_stand_ins(&self) -> bool {
        self.by.iter().any(|(by, _)| ["policy", "local"].contains(by))
    }

    /// Seconds from the first measured call to the last reply.
    pub(super) fn seconds(&self) -> f64 {
        self.span.map_or(0.0, |(first, last)| last.saturating_duration_since(first).as_secs_f64())
    }

    /// Calls sent more than this long after they were due.
    pub(super) fn later_than(&self, delay: Duration) -> u64 {
        self.lateness.len() - self.lateness.count_between(0, micros(delay))
    }

    pub(super) fn measure(&mut self, times: Times, answer: &Result<Decision, Error>) {
        let Times { due, sent, answered } = times;
        self.sent += 1;
        let (first, last) = self.span.unwrap_or((sent, answered));
        self.span = Some((first.min(sent), last.max(answered)));
        self.longest = self.longest.max(answered.saturating_duration_since(sent));
        record(&mut self.lateness, sent.saturating_duration_since(due));
        match answer {
            Ok(decision) => {
                if let Some(error) = decision.by.error() {
                    self.first_error.get_or_insert_with(|| error.to_string());
                }
                match self.by.iter_mut().find(|(by, _)| *by == decision.by.name()) {
                    Some((_, count)) => *count += 1,
                    None => self.by.push((decision.by.name(), 1)),
                }
                self.allowed += u64::from(decision.allowed);
                self.denied += u64::from(!decision.allowed);
                record(&mut self.latency, answered.saturating_duration_since(due));
                let first_due = *self.first_due.get_or_insert(due);
                self.over_time.note(micros(due.saturating_duration_since(first_due)), decision.allowed);
            }
            Err(error) => {
                self.first_error.get_or_insert_with(|| error.to_string());
                if error.kind() == ErrorKind::Deadline {
                    self.errors.deadline += 1;
                } else if error.is_unreachable() || error.kind() == ErrorKind::Disconnected {
                    self.errors.unreachable += 1;
                } else {
                    self.errors.other += 1;
                }
            }
        }
    }

    pub(super) fn warm_up(&mut self, answer: &Result<Decision, Error>) {
        *(if answer.is_ok() { &mut self.warmup.answered } else { &mut self.warmup.errors }) += 1;
    }

    /// Starts to count what is drawn during the run.
    pub(super) fn draw_recent(&mut self) {
        self.recent = Some(Recent { answers: 0, denials: 0, latency: histogram() });
    }

    /// Counts a call, warm-up included, for what is drawn.
    pub(super) fn glance(&mut self, times: Times, answer: &Result<Decision, Error>) {
        if let (Some(recent), Ok(decision)) = (&mut self.recent, answer) {
            recent.answers += 1;
            recent.denials += u64::from(!decision.allowed);
            record(&mut recent.latency, times.answered.saturating_duration_since(times.due));
        }
    }

    pub(super) fn leave_unsent(&mut self, is_measured: bool) {
        *(if is_measured { &mut self.unsent } else { &mut self.warmup.unsent }) += 1;
    }

    /// Records the call for the audit, unless the engine certainly neither charged nor denied it.
    pub(super) fn note(&mut self, key: u32, sent: u64, answered: u64, answer: &Result<Decision, Error>) {
        self.answers += u64::from(answer.is_ok());
        // If something else decided in the engine's place, the outcome of the engine's own request counts.
        let verdict = match answer.as_ref().map(|decision| (decision.allowed, decision.by.error())) {
            Ok((true, None)) => Verdict::Allowed,
            Ok((false, None)) => Verdict::Denied,
            Ok((_, Some(error))) | Err(error) if error.charged() == Charged::No => {
                self.left_out += 1;
                return;
            }
            Ok(_) | Err(_) => Verdict::Unknown,
        };
        if let Some(ledger) = &mut self.ledger {
            ledger.add(Call { key, verdict, sent, answered });
        }
    }
}

fn histogram() -> Histogram<u64> {
    // Three digits up to an hour: bounds that are always valid.
    Histogram::new_with_bounds(1, 3_600_000_000, 3).expect("bounds in order, and at most five digits")
}

fn record(histogram: &mut Histogram<u64>, time: Duration) {
    histogram.saturating_record(micros(time));
}
