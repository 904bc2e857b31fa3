//! The result of a run: one JSON object, or a table.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::time::Duration;

use hdrhistogram::Histogram;
use serde::{Serialize, Serializer};

use super::audit::Audit;
use super::histogram::Bucket;
use super::tally::{Errors, Tally, Warmup};
use crate::output::{QUIET, RIGHT, Shape, WRONG, facts, human, json, micros, width};

/// How long after the last due time the last reply may normally come.
const OVERRUN: Duration = Duration::from_millis(100);
/// The width of the names of facts, and the space after it.
const NAMES: usize = 14;

/// The field names and order are those that other programs rely on.
#[derive(Debug, Serialize)]
pub(super) struct Report<'a> {
    pub(super) rules: Vec<String>,
    pub(super) by: String,
    #[serde(flatten)]
    pub(super) mode: Mode,
    pub(super) keys: String,
    pub(super) key_count: u32,
    /// For zipf only.
    pub(super) zipf_exponent: Option<f64>,
    pub(super) cost: u64,
    pub(super) seed: u64,
    #[serde(flatten, serialize_with = "counts")]
    pub(super) tally: &'a Tally,
    /// Permits that were not released, if the rule holds permits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) unreleased: Option<u64>,
    /// Calls sent more than a millisecond after they were due.
    pub(super) late: Option<u64>,
    pub(super) lateness_us: Option<Quantiles>,
    pub(super) latency_us: Option<Quantiles>,
    pub(super) latency_histogram: Vec<Bucket>,
    pub(super) audit: Option<&'a Audit>,
    /// Why there is no audit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) no_audit: Option<&'a String>,
}

#[derive(Clone, Copy, Debug, Serialize)]
#[serde(tag = "mode", rename_all = "lowercase")]
pub(super) enum Mode {
    Open { rate: u64 },
    Closed { callers: u32 },
}

/// Distribution of times, in microseconds.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Quantiles {
    pub(super) min: u64,
    pub(super) p50: u64,
    pub(super) p90: u64,
    pub(super) p99: u64,
    pub(super) p99_9: u64,
    pub(super) max: u64,
    pub(super) mean: f64,
}

impl Quantiles {
    /// `None` if there are no times.
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
    /// Present only if the engine didn't decide all of them.
    #[serde(skip_serializing_if = "Option::is_none")]
    answered_by: Option<BTreeMap<String, u64>>,
    errors: Errors,
    #[serde(skip_serializing_if = "Option::is_none")]
    first_error: Option<&'a str>,
    /// The longest time from sending a call to its end, with or without a reply.
    longest_us: u64,
    seconds: f64,
    planned_seconds: Option<f64>,
    per_second: Option<f64>,
    warmup: Warmup,
}

fn counts<S: Serializer>(tally: &Tally, serializer: S) -> Result<S::Ok, S::Error> {
    let Tally { sent, unsent, allowed, denied, errors, warmup, .. } = *tally;
    let by = |(by, count): &(&str, u64)| (by.to_string(), *count);
    let counts = Counts {
        sent,
        unsent,
        answered: tally.answered(),
        allowed,
        denied,
        answered_by: tally.has_stand_ins().then(|| tally.by.iter().map(by).collect()),
        errors,
        first_error: tally.first_error.as_deref(),
        longest_us: micros(tally.longest),
        seconds: micros_of(tally.seconds()),
        planned_seconds: tally.planned.map(|planned| micros_of(planned.as_secs_f64())),
        per_second: per_second(tally),
        warmup,
    };
    counts.serialize(serializer)
}

/// Replies per second, over the time until the last reply or, if longer, in which calls were due: the next call, due
/// half a millisecond later, would count towards the rate too.
fn per_second(tally: &Tally) -> Option<f64> {
    let planned = tally.planned.unwrap_or_default().as_secs_f64();
    let seconds = tally.seconds().max(planned);
    // A single reply has no rate.
    (tally.answered() > 1 && seconds > 0.0).then(|| tenths(tally.answered() as f64 / seconds))
}

fn micros_of(seconds: f64) -> f64 {
    (seconds * 1e6).round() / 1e6
}

fn tenths(number: f64) -> f64 {
    (number * 10.0).round() / 10.0
}

/// How many replies came, in which time, at which rate.
pub(super) fn answered(tally: &Tally) -> String {
    let mut text = format!("{} of {} calls", tally.answered(), tally.asked());
    let taken = Duration::from_secs_f64(tally.seconds());
    let planned = tally.planned.unwrap_or(taken);
    if !taken.is_zero() {
        text += &format!(" in {}", human(taken.max(planned)));
    }
    if taken > planned + OVERRUN.max(planned / 10) {
        text += &format!(", though due within {}", human(planned));
    }
    if let Some(rate) = per_second(tally) {
        text += &format!(": {rate} a second");
    }
    text
}

impl Report<'_> {
    pub(super) fn print(&self, mut out: impl Write, shape: Shape) -> io::Result<()> {
        match shape {
            Shape::Jsonl => json(&mut out, self)?,
            Shape::Table => facts(&mut out, &self.as_facts())?,
        }
        out.flush()
    }

    /// How calls were made, for people.
    pub(super) fn load(&self) -> String {
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
        format!("{how}; {keys}; cost {}; seed {}", self.cost, self.seed)
    }

    fn as_facts(&self) -> Vec<(&'static str, String)> {
        let tally = self.tally;
        let mut lines: Vec<_> = self.rules.iter().map(|rule| ("rule", rule.clone())).collect();
        for (name, _) in lines.iter_mut().skip(1) {
            *name = "";
        }
        lines.push(("load", self.load()));
        if tally.has_stand_ins() {
            let by = tally.by.iter().map(|(by, count)| format!("{count} by {by}"));
            lines.push(("decided", by.collect::<Vec<_>>().join(", ")));
            if tally.errors.total() == 0 {
                lines.push(("", tally.first_error.as_ref().map(|why| format!("first: {why}")).unwrap_or_default()));
            }
        } else {
            lines.push(("decided by", self.by.clone()));
        }
        lines.push(("answered", answered(tally)));
        lines.push(("decisions", format!("{} allowed, {} denied", tally.allowed, tally.denied)));
        if tally.errors.total() > 0 {
            lines.push(("errors", format!("{WRONG}{}{WRONG:#}", tally.errors)));
            lines.push(("", tally.first_error.clone().unwrap_or_default()));
        }
        if tally.unsent > 0 {
            lines.push(("unsent", format!("{WRONG}{}{WRONG:#}, since too many were waiting", tally.unsent)));
        }
        if tally.errors.total() > 0 || tally.has_stand_ins() {
            lines.push(("longest call", format!("{} from sending to end, answered or not", human(tally.longest))));
        }
        let Warmup { answered, errors, unsent } = tally.warmup;
        if errors + unsent > 0 {
            let told = format!("{answered} answered, {WRONG}{errors} failed, {unsent} not sent{WRONG:#}");
            lines.push(("warm-up", told));
        }
        if let Some(unreleased) = self.unreleased {
            let left = match unreleased {
                0 => String::new(),
                count => format!("; {WRONG}{count} could not be released{WRONG:#}"),
            };
            lines.push(("permits", format!("released after each answer, which isn't measured{left}")));
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
        let histogram = Bucket::lines(&self.latency_histogram, width().saturating_sub(NAMES));
        let mut name = "took up to";
        for line in histogram {
            lines.push((std::mem::take(&mut name), line));
        }
        lines.extend(self.audit_facts());
        lines
    }

    fn audit_facts(&self) -> Vec<(&'static str, String)> {
        let Some(audit) = self.audit else {
            let why = self.no_audit.map(String::as_str).unwrap_or_default();
            return vec![("audit", format!("none: {why}"))];
        };
        let Audit { calls, total, left_out, keys, admitted, exact_admitted, .. } = *audit;
        let Audit { over_admissions, false_denials, of_beginning, .. } = *audit;
        let style = if audit.found_faults() { WRONG } else { RIGHT };
        let on = if keys == 1 { "key" } else { "keys" };
        let (of, sample) = match calls < total {
            true if of_beginning => (format!(" of {total}"), " (the first ones)"),
            true => (format!(" of {total}"), " (a sample of the keys)"),
            false => (String::new(), ""),
        };
        let mut lines = vec![
            ("audit", format!("{style}{over_admissions} over-admissions, {false_denials} false denials{style:#}")),
            ("", format!("in {calls}{of} calls on {keys} {on}{sample}, warm-up included")),
            ("", format!("{admitted} admitted; an exact limiter, about {exact_admitted}")),
        ];
        if audit.sharded && false_denials > 0 {
            lines.push(("", "with shards: one denied while others had units left".to_owned()));
        }
        if left_out > 0 {
            lines.push(("", format!("{left_out} more calls left out, which {} didn't decide", self.by)));
        }
        lines
    }
}
