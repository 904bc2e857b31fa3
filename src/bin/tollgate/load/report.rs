//! What a run came to: one JSON object, or a table.

use std::io::{self, Write};
use std::time::Duration;

use hdrhistogram::Histogram;
use serde::{Serialize, Serializer};

use super::audit::Audit;
use super::tally::{Errors, Tally};
use crate::options::Shape;
use crate::output::{QUIET, RIGHT, WRONG, facts, human, json};

/// With the names and the order that other programs rely on.
#[derive(Debug, Serialize)]
pub(super) struct Report<'a> {
    pub(super) rules: Vec<String>,
    pub(super) by: String,
    #[serde(flatten)]
    pub(super) mode: Mode,
    pub(super) keys: String,
    pub(super) key_count: u32,
    /// Of zipf only.
    pub(super) zipf_exponent: Option<f64>,
    pub(super) cost: u64,
    pub(super) seed: u64,
    #[serde(flatten, serialize_with = "counts")]
    pub(super) tally: &'a Tally,
    /// Calls sent more than a millisecond after they were due.
    pub(super) late: Option<u64>,
    pub(super) lateness_us: Option<Quantiles>,
    pub(super) latency_us: Option<Quantiles>,
    pub(super) audit: Option<&'a Audit>,
    /// Why there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) no_audit: Option<&'a String>,
}

#[derive(Clone, Copy, Debug, Serialize)]
#[serde(tag = "mode", rename_all = "lowercase")]
pub(super) enum Mode {
    Open { rate: u64 },
    Closed { callers: u32 },
}

/// How times are spread, in microseconds.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Quantiles {
    min: u64,
    p50: u64,
    p90: u64,
    p99: u64,
    p99_9: u64,
    max: u64,
    mean: f64,
}

impl Quantiles {
    /// None of nothing.
    pub(super) fn of(times: &Histogram<u64>) -> Option<Self> {
        let at = |percent| times.value_at_percentile(percent).min(times.max());
        (!times.is_empty()).then(|| Self {
            min: times.min(),
            p50: at(50.0),
            p90: at(90.0),
            p99: at(99.0),
            p99_9: at(99.9),
            max: times.max(),
            mean: tenths(times.mean()),
        })
    }

    fn row(&self) -> String {
        let mean = self.mean.round() as u64;
        let times = [self.min, self.p50, self.p90, self.p99, self.p99_9, self.max, mean];
        times.map(|us| format!("{:>10}", human(Duration::from_micros(us)))).concat()
    }
}

#[derive(Serialize)]
struct Counts<'a> {
    sent: u64,
    unsent: u64,
    answered: u64,
    allowed: u64,
    denied: u64,
    errors: Errors,
    #[serde(skip_serializing_if = "Option::is_none")]
    first_error: Option<&'a str>,
    seconds: f64,
    per_second: f64,
}

fn counts<S: Serializer>(tally: &Tally, serializer: S) -> Result<S::Ok, S::Error> {
    let Tally { sent, unsent, allowed, denied, errors, .. } = *tally;
    let (answered, first_error) = (tally.answered(), tally.first_error.as_deref());
    let (seconds, per_second) = ((tally.seconds() * 1e6).round() / 1e6, per_second(tally));
    Counts { sent, unsent, answered, allowed, denied, errors, first_error, seconds, per_second }.serialize(serializer)
}

fn per_second(tally: &Tally) -> f64 {
    // A single answer has no rate.
    let seconds = tally.seconds();
    if seconds > 0.0 { tenths(tally.answered() as f64 / seconds) } else { 0.0 }
}

fn tenths(number: f64) -> f64 {
    (number * 10.0).round() / 10.0
}

impl Report<'_> {
    pub(super) fn print(&self, mut out: impl Write, shape: Shape) -> io::Result<()> {
        match shape {
            Shape::Jsonl => json(&mut out, self)?,
            Shape::Table => facts(&mut out, &self.as_facts())?,
        }
        out.flush()
    }

    fn as_facts(&self) -> Vec<(&'static str, String)> {
        let tally = self.tally;
        let mut lines: Vec<_> = self.rules.iter().map(|rule| ("rule", rule.clone())).collect();
        for (name, _) in lines.iter_mut().skip(1) {
            *name = "";
        }
        let how = match self.mode {
            Mode::Open { rate } => format!("open loop, {rate} calls a second"),
            Mode::Closed { callers: 1 } => "closed loop, 1 caller".to_owned(),
            Mode::Closed { callers } => format!("closed loop, {callers} callers"),
        };
        let keys = match (self.keys.as_str(), self.zipf_exponent) {
            ("hot", _) => "one hot key".to_owned(),
            (keys, None) => format!("{} keys, {keys}", self.key_count),
            (keys, Some(exponent)) => format!("{} keys, {keys} {exponent}", self.key_count),
        };
        lines.push(("load", format!("{how}; {keys}; cost {}; seed {}", self.cost, self.seed)));
        lines.push(("decided by", self.by.clone()));
        lines.push((
            "answered",
            format!(
                "{} of {} calls in {:.1}s: {} a second",
                tally.answered(),
                tally.sent,
                tally.seconds(),
                per_second(tally)
            ),
        ));
        lines.push(("decisions", format!("{} allowed, {} denied", tally.allowed, tally.denied)));
        let Errors { deadline, unreachable, other } = tally.errors;
        if deadline + unreachable + other > 0 {
            let kinds = [(deadline, "past the deadline"), (unreachable, "unreachable"), (other, "others")];
            let kinds = kinds.iter().filter(|(count, _)| *count > 0).map(|(count, kind)| format!("{count} {kind}"));
            lines.push(("errors", format!("{WRONG}{}{WRONG:#}", kinds.collect::<Vec<_>>().join(", "))));
            lines.push(("", tally.first_error.clone().unwrap_or_default()));
        }
        if tally.unsent > 0 {
            lines.push(("unsent", format!("{WRONG}{}{WRONG:#}, since too many were unanswered", tally.unsent)));
        }
        if let Some(latency) = self.latency_us {
            let names = ["min", "p50", "p90", "p99", "p99.9", "max", "mean"].map(|name| format!("{name:>10}")).concat();
            lines.push(("", format!("{QUIET}{names}{QUIET:#}")));
            lines.push(("latency", latency.row()));
        }
        if let (Some(lateness), Some(late)) = (self.lateness_us, self.late) {
            let late = if late > 0 { format!("  ({late} by more than 1ms)") } else { String::new() };
            lines.push(("sent late", lateness.row() + &late));
        }
        lines.extend(self.audit_facts());
        lines
    }

    fn audit_facts(&self) -> Vec<(&'static str, String)> {
        let Some(audit) = self.audit else {
            let why = self.no_audit.map(String::as_str).unwrap_or_default();
            return vec![("audit", format!("none: {why}"))];
        };
        let Audit { calls, keys, admitted, exact_admitted, over_admissions, false_denials } = *audit;
        let style = if audit.found_faults() { WRONG } else { RIGHT };
        vec![
            ("audit", format!("{style}{over_admissions} over-admissions, {false_denials} false denials{style:#}")),
            ("", format!("in {calls} calls on {keys} {}, warm-up included", if keys == 1 { "key" } else { "keys" })),
            ("", format!("{admitted} admitted; an exact limiter, about {exact_admitted}")),
        ]
    }
}
