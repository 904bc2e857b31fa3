//! How decisions are printed: JSON lines that other programs read, tables for people.

use std::borrow::Cow;
use std::io::{self, Write};
use std::time::Duration;

use anstyle::{AnsiColor, Style};
use serde::Serialize;
use tollgate::{Decision, LimitDecision, RetryAfter};

use crate::escape::shown;
use crate::options::Shape;
use crate::records::Op;
use crate::rule_arguments::Subject;
use crate::verdict::VerdictLine;

pub(crate) const RIGHT: Style = AnsiColor::Green.on_default();
pub(crate) const WRONG: Style = AnsiColor::Red.on_default();
pub(crate) const QUIET: Style = Style::new().dimmed();

/// One decision, with the field names and order that other programs rely on.
#[derive(Debug, Serialize)]
pub(crate) struct Line<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    t_us: Option<u64>,
    op: Op,
    key: String,
    cost: u64,
    rule: &'a str,
    allowed: bool,
    limit: u64,
    remaining: u64,
    retry_after_us: RetryAfter,
    reset_after_us: u64,
    denied_by: Option<&'a str>,
    by: String,
    /// The key of the override that decided in place of the rule's own limits, in a service's set.
    #[serde(rename = "override", skip_serializing_if = "Option::is_none")]
    overridden: Option<String>,
    /// Each limit's own decision, if the rule has several.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    limits: Vec<LimitLine<'a>>,
    /// The error of the request to Redis, if something else decided.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'static str>,
    /// The units that at-most took.
    #[serde(skip_serializing_if = "Option::is_none")]
    granted: Option<u64>,
    /// Present only if the key is blocked.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    blocked: bool,
    /// Present only if denials are counted.
    #[serde(skip_serializing_if = "Option::is_none")]
    overage: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    /// How long a block lasts.
    #[serde(rename = "for", skip_serializing_if = "Option::is_none")]
    length: Option<String>,
    /// For how long it held its permits, in seconds; null if the log doesn't say.
    #[serde(skip_serializing_if = "Option::is_none")]
    request_time: Option<Option<String>>,
}

/// One limit's part of a decision.
#[derive(Debug, Serialize)]
pub(crate) struct LimitLine<'a> {
    name: Cow<'a, str>,
    /// The key that it counts.
    key: String,
    allowed: bool,
    limit: u64,
    remaining: u64,
    retry_after_us: RetryAfter,
    reset_after_us: u64,
}

/// Prints decisions as they are made.
#[derive(Debug)]
pub(crate) struct Printer<W: Write> {
    out: W,
    shape: Shape,
    rows: u64,
}

impl<'a> Line<'a> {
    pub(crate) fn new(subject: &'a Subject, op: Op, key: &[u8], cost: u64, decision: &'a Decision) -> Self {
        let limits = decision.limits.iter().map(|limit| LimitLine::new(limit, subject.counted_by(limit, key)));
        Self {
            t_us: None,
            op,
            key: shown(key),
            cost,
            rule: subject.name(),
            allowed: decision.allowed,
            limit: decision.limit,
            remaining: decision.remaining,
            retry_after_us: decision.retry_after,
            reset_after_us: micros(decision.reset_after),
            denied_by: decision.denied_by.as_deref(),
            by: decision.by.to_string(),
            overridden: subject.overridden.as_ref().map(|key| shown(key.as_bytes())),
            limits: limits.collect(),
            error: decision.error.as_ref().map(|error| error.class()),
            granted: (op == Op::AtMost).then_some(decision.granted),
            blocked: decision.blocked,
            overage: decision.overage,
            id: None,
            length: None,
            request_time: None,
        }
    }

    /// Adds the call's id.
    pub(crate) fn named(mut self, id: Option<&[u8]>) -> Self {
        self.id = id.map(shown);
        self
    }

    /// Adds the length of a block.
    pub(crate) fn lasting(mut self, length: Option<Duration>) -> Self {
        let length = length.and_then(|length| jiff::SignedDuration::try_from(length).ok());
        self.length = length.map(|length| format!("{length:#}"));
        self
    }

    /// Adds for how long the call held its permits.
    pub(crate) fn held_for(mut self, request_time: Option<Option<String>>) -> Self {
        self.request_time = request_time;
        self
    }

    /// Adds the time at which the decision was made.
    pub(crate) fn at(mut self, t_us: u64) -> Self {
        self.t_us = Some(t_us);
        self
    }
}

impl<'a> LimitLine<'a> {
    pub(crate) fn new(limit: &'a LimitDecision, key: &[u8]) -> Self {
        Self {
            name: Cow::Borrowed(&limit.name),
            key: shown(key),
            allowed: limit.allowed,
            limit: limit.limit,
            remaining: limit.remaining,
            retry_after_us: limit.retry_after,
            reset_after_us: micros(limit.reset_after),
        }
    }

    /// For a rule's only limit.
    pub(crate) fn only(name: String, key: &[u8], decision: &Decision) -> Self {
        Self {
            name: Cow::Owned(name),
            key: shown(key),
            allowed: decision.allowed,
            limit: decision.limit,
            remaining: decision.remaining,
            retry_after_us: decision.retry_after,
            reset_after_us: micros(decision.reset_after),
        }
    }
}

impl<W: Write> Printer<W> {
    pub(crate) fn new(out: W, shape: Shape) -> Self {
        Self { out, shape, rows: 0 }
    }

    pub(crate) fn print(&mut self, line: &Line<'_>) -> io::Result<()> {
        match self.shape {
            Shape::Jsonl => json(&mut self.out, line),
            Shape::Table => self.row(line),
        }
    }

    pub(crate) fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }

    /// Prints a decision by a set of rules.
    pub(crate) fn print_verdict(&mut self, line: &VerdictLine<'_>) -> io::Result<()> {
        match self.shape {
            Shape::Jsonl => json(&mut self.out, line),
            Shape::Table => {
                if self.rows == 0 {
                    self.names(line.t_us.is_some(), false, "rule: key")?;
                }
                self.rows += 1;
                line.row(&mut self.out)
            }
        }
    }

    /// Prints the header.
    fn names(&mut self, with_time: bool, with_overage: bool, whom: &str) -> io::Result<()> {
        let time = if with_time { format!("{:<27} ", "time") } else { String::new() };
        let overage = if with_overage { format!("{:>9} ", "overage") } else { String::new() };
        let names = format!(
            "{time}{:<8} {:>15} {:>12} {:>12} {overage} {:<8} {whom}",
            "decision", "remaining", "retry after", "reset after", "by"
        );
        writeln!(self.out, "{QUIET}{names}{QUIET:#}")
    }

    fn row(&mut self, line: &Line<'_>) -> io::Result<()> {
        // Times come from records only, so either all rows have one or none has.
        if self.rows == 0 {
            self.names(line.t_us.is_some(), line.overage.is_some(), "key")?;
        }
        self.rows += 1;
        let (style, verdict) = verdict(line.op, line.allowed, line.blocked);
        let numbers = numbers(line.remaining, line.limit, line.retry_after_us, line.reset_after_us);
        let time = time(line.t_us);
        let overage = line.overage.map(|count| format!("{count:>9} ")).unwrap_or_default();
        let id = line.id.as_ref().map(|id| format!("  {QUIET}id {id}{QUIET:#}")).unwrap_or_default();
        let (by, key) = (&line.by, &line.key);
        writeln!(self.out, "{time}{style}{verdict:<8}{style:#} {numbers} {overage} {by:<8} {key}{id}")?;
        // Followed by each limit's own.
        let (time, overage) = (" ".repeat(time.len()), " ".repeat(overage.len()));
        line.limits.iter().try_for_each(|limit| limit.row(&mut self.out, &time, &overage))
    }
}

impl LimitLine<'_> {
    /// A row below the decision that it is part of.
    pub(crate) fn row(&self, mut out: impl Write, time: &str, overage: &str) -> io::Result<()> {
        let (style, verdict) = if self.allowed { (QUIET, " allowed") } else { (WRONG, " denied") };
        let numbers = numbers(self.remaining, self.limit, self.retry_after_us, self.reset_after_us);
        let Self { name, key, .. } = self;
        writeln!(out, "{time}{style}{verdict:<8}{style:#} {numbers} {overage} {:<8}  {name} of {key}", "")
    }
}

/// The word for a decision in a table.
pub(crate) fn verdict(op: Op, allowed: bool, blocked: bool) -> (Style, &'static str) {
    match (allowed, op) {
        (true, op) if op.asks() => (RIGHT, "allowed"),
        (true, op) => (QUIET, op.name()),
        (false, _) if blocked => (WRONG, "blocked"),
        (false, _) => (WRONG, "denied"),
    }
}

/// The first column, for records.
pub(crate) fn time(t_us: Option<u64>) -> String {
    t_us.map(|t_us| format!("{:<27} ", timestamp(t_us))).unwrap_or_default()
}

/// The remaining units and the waits, in columns.
pub(crate) fn numbers(remaining: u64, limit: u64, retry_after: RetryAfter, reset_after_us: u64) -> String {
    let remaining = format!("{remaining} / {limit}");
    let retry = match retry_after {
        RetryAfter::Now => "-".to_owned(),
        RetryAfter::After(wait) => human(wait),
        RetryAfter::Never => "never".to_owned(),
    };
    let reset = if reset_after_us == 0 { "-".to_owned() } else { human(Duration::from_micros(reset_after_us)) };
    format!("{remaining:>15} {retry:>12} {reset:>12}")
}

/// One JSON object on a line of its own.
pub(crate) fn json(mut out: impl Write, value: &impl Serialize) -> io::Result<()> {
    serde_json::to_writer(&mut out, value)?;
    out.write_all(b"\n")
}

/// The width of lines: the terminal's, but no more than is comfortable to read.
pub(crate) fn width() -> usize {
    const UNKNOWN: usize = 80;
    const WIDEST: usize = 120;
    console::Term::stdout().size_checked().map_or(UNKNOWN, |(_, columns)| usize::from(columns)).min(WIDEST)
}

/// Wraps text to lines of at most this width, unless a word is longer.
pub(crate) fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split(' ') {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

/// Names and values, one pair a line.
pub(crate) fn facts(mut out: impl Write, facts: &[(&str, String)]) -> io::Result<()> {
    let width = facts.iter().map(|(name, _)| name.len()).max().unwrap_or_default();
    for (name, value) in facts {
        writeln!(out, "{QUIET}{name:<width$}{QUIET:#}  {value}")?;
    }
    Ok(())
}

/// `1 key`, `2 keys`.
pub(crate) fn counted(count: u64, thing: &str) -> String {
    if count == 1 { format!("1 {thing}") } else { format!("{count} {thing}s") }
}

/// A time of day in UTC, to the microsecond.
pub(crate) fn timestamp(t_us: u64) -> String {
    let time = i64::try_from(t_us).ok().and_then(|t_us| jiff::Timestamp::from_microsecond(t_us).ok());
    time.map_or_else(|| format!("{t_us}us"), |time| format!("{time:.6}"))
}

/// A duration for people, rounded up to three digits after the point or to the second: `1.976s`, `4m10s`.
pub(crate) fn human(duration: Duration) -> String {
    let us = micros(duration);
    let digits = |thousandths: u64, unit: &str| {
        let (whole, rest) = (thousandths / 1000, thousandths % 1000);
        let text = format!("{whole}.{rest:03}");
        format!("{}{unit}", text.trim_end_matches('0').trim_end_matches('.'))
    };
    match us {
        0..1000 => format!("{us}us"),
        1000..1_000_000 => digits(us, "ms"),
        1_000_000..60_000_000 => digits(us.div_ceil(1000), "s"),
        _ => {
            let seconds = us.div_ceil(1_000_000);
            let parts =
                [("d", seconds / 86_400), ("h", seconds / 3600 % 24), ("m", seconds / 60 % 60), ("s", seconds % 60)];
            parts.iter().filter(|(_, count)| *count > 0).map(|(unit, count)| format!("{count}{unit}")).collect()
        }
    }
}

pub(crate) fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_read_well_and_never_too_short() {
        for (us, expected) in [
            (0, "0us"),
            (999, "999us"),
            (1500, "1.5ms"),
            (250_000, "250ms"),
            (1_975_001, "1.976s"),
            (2_000_000, "2s"),
            (59_999_999, "60s"),
            (250_000_000, "4m10s"),
            (2_592_000_000_000, "30d"),
        ] {
            assert_eq!(human(Duration::from_micros(us)), expected);
        }
    }

    #[test]
    fn lines_break_between_words() {
        assert_eq!(wrapped("one two three", 7), ["one two", "three"]);
        assert_eq!(wrapped("one two three", 4), ["one", "two", "three"]);
        assert_eq!(wrapped("", 4), [""]);
    }
}
