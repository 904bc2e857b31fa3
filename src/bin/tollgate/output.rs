//! How decisions are printed: JSON lines that other programs read, tables for people.

use std::io::{self, Write};
use std::time::Duration;

use anstyle::{AnsiColor, Style};
use serde::Serialize;
use tollgate::{Decision, RetryAfter, Rule};

use crate::options::Shape;
use crate::records::Op;

pub(crate) const RIGHT: Style = AnsiColor::Green.on_default();
pub(crate) const WRONG: Style = AnsiColor::Red.on_default();
pub(crate) const QUIET: Style = Style::new().dimmed();

/// One decision, with the names and the order that other programs rely on.
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
    /// What went wrong where Redis was asked, if somebody else answered.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'static str>,
    /// What at-most took.
    #[serde(skip_serializing_if = "Option::is_none")]
    granted: Option<u64>,
    /// Only of a key that is blocked.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    blocked: bool,
    /// Only where denials are counted.
    #[serde(skip_serializing_if = "Option::is_none")]
    overage: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    /// How long a block lasts.
    #[serde(rename = "for", skip_serializing_if = "Option::is_none")]
    length: Option<String>,
}

/// Prints decisions as they come.
#[derive(Debug)]
pub(crate) struct Printer<W: Write> {
    out: W,
    shape: Shape,
    rows: u64,
}

impl<'a> Line<'a> {
    pub(crate) fn new(rule: &'a Rule, op: Op, key: &[u8], cost: u64, decision: &'a Decision) -> Self {
        Self {
            t_us: None,
            op,
            key: String::from_utf8_lossy(key).into_owned(),
            cost,
            rule: rule.name().unwrap_or_default(),
            allowed: decision.allowed,
            limit: decision.limit,
            remaining: decision.remaining,
            retry_after_us: decision.retry_after,
            reset_after_us: micros(decision.reset_after),
            denied_by: decision.denied_by.as_deref(),
            by: decision.by.to_string(),
            error: decision.error.as_ref().map(|error| error.class()),
            granted: (op == Op::AtMost).then_some(decision.granted),
            blocked: decision.blocked,
            overage: decision.overage,
            id: None,
            length: None,
        }
    }

    /// With the name of the call.
    pub(crate) fn named(mut self, id: Option<&[u8]>) -> Self {
        self.id = id.map(|id| String::from_utf8_lossy(id).into_owned());
        self
    }

    /// With the length of a block.
    pub(crate) fn lasting(mut self, length: Option<Duration>) -> Self {
        let length = length.and_then(|length| jiff::SignedDuration::try_from(length).ok());
        self.length = length.map(|length| format!("{length:#}"));
        self
    }

    /// With the time that the decision was made at.
    pub(crate) fn at(mut self, t_us: u64) -> Self {
        self.t_us = Some(t_us);
        self
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

    fn row(&mut self, line: &Line<'_>) -> io::Result<()> {
        // Times come from records only, so all rows have one or none has.
        let time = |t_us: u64| format!("{:<27} ", timestamp(t_us));
        if self.rows == 0 {
            let time = line.t_us.map(|_| format!("{:<27} ", "time")).unwrap_or_default();
            let overage = line.overage.map(|_| format!("{:>9} ", "overage")).unwrap_or_default();
            let names = format!(
                "{time}{:<8} {:>15} {:>12} {:>12} {overage} {:<8} key",
                "decision", "remaining", "retry after", "reset after", "by"
            );
            writeln!(self.out, "{QUIET}{names}{QUIET:#}")?;
        }
        self.rows += 1;
        let (style, verdict) = match (line.allowed, line.op) {
            (true, Op::Acquire | Op::Peek | Op::Reserve | Op::AtMost) => (RIGHT, "allowed"),
            (true, op) => (QUIET, op.name()),
            (false, _) if line.blocked => (WRONG, "blocked"),
            (false, _) => (WRONG, "denied"),
        };
        let remaining = format!("{} / {}", line.remaining, line.limit);
        let retry = match line.retry_after_us {
            RetryAfter::Now => "-".to_owned(),
            RetryAfter::After(wait) => human(wait),
            RetryAfter::Never => "never".to_owned(),
        };
        let reset =
            if line.reset_after_us == 0 { "-".to_owned() } else { human(Duration::from_micros(line.reset_after_us)) };
        let time = line.t_us.map(time).unwrap_or_default();
        let overage = line.overage.map(|count| format!("{count:>9} ")).unwrap_or_default();
        let key = line.key.escape_debug();
        writeln!(
            self.out,
            "{time}{style}{verdict:<8}{style:#} {remaining:>15} {retry:>12} {reset:>12} {overage} {:<8} {key}",
            line.by
        )
    }
}

/// One JSON object on a line of its own.
pub(crate) fn json(mut out: impl Write, value: &impl Serialize) -> io::Result<()> {
    serde_json::to_writer(&mut out, value)?;
    out.write_all(b"\n")
}

/// Names and values below each other.
pub(crate) fn facts(mut out: impl Write, facts: &[(&str, String)]) -> io::Result<()> {
    let width = facts.iter().map(|(name, _)| name.len()).max().unwrap_or_default();
    for (name, value) in facts {
        writeln!(out, "{QUIET}{name:<width$}{QUIET:#}  {value}")?;
    }
    Ok(())
}

/// A time of day in UTC, to the microsecond.
pub(crate) fn timestamp(t_us: u64) -> String {
    let time = i64::try_from(t_us).ok().and_then(|t_us| jiff::Timestamp::from_microsecond(t_us).ok());
    time.map_or_else(|| format!("{t_us}us"), |time| format!("{time:.6}"))
}

/// A duration for people, rounded up to three digits after its unit or to the second: `1.976s`, `4m10s`.
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
}
