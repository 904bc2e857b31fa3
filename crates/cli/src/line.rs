//! Prints decisions: JSON lines for other programs, a table for people.

use std::borrow::Cow;
use std::io::{self, Write};
use std::time::Duration;

use anstyle::Style;
use serde::Serialize;
use tollgate::rules::Effect;
use tollgate::{Decision, Limit, LimitDecision, Operation, RetryAfter};

use crate::attributes::Shown;
use crate::escape::shown;
use crate::held;
use crate::operation;
use crate::output::{QUIET, RIGHT, Shape, WRONG, json, micros, numbers, time};
use crate::records::Record;
use crate::rules_file::Listed;
use crate::subject::{Subject, title};
use crate::verdict::{AMBIGUOUS, Call, Judged};

/// One decision, with the field names and order that other programs rely on.
#[derive(Debug, Serialize)]
pub(crate) struct Line<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    t_us: Option<u64>,
    op: Operation,
    /// The request's attributes, if a set of rules decided.
    #[serde(skip_serializing_if = "Option::is_none")]
    attrs: Option<Shown<'a>>,
    /// The key that the rule counts; `None` if it counts none.
    key: Option<String>,
    cost: Option<u64>,
    rule: Option<&'a str>,
    /// All rules that apply, if several do.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    together: Vec<&'a str>,
    /// Why, if a set of rules decided: no-rule, allowed, blocked, missing (an attribute that the rule counts by),
    /// limits or ambiguous (its path).
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'static str>,
    allowed: bool,
    /// `None` if no limit was checked.
    limit: Option<u64>,
    remaining: Option<u64>,
    retry_after_us: RetryAfter,
    reset_after_us: Option<u64>,
    denied_by: Option<&'a str>,
    /// What decided: the rules themselves, if no limit was checked.
    by: String,
    /// Each limit's own decision: if a set of rules decided, or the rule has several.
    #[serde(skip_serializing_if = "Option::is_none")]
    limits: Option<Vec<LimitLine<'a>>>,
    /// The attribute that the rule counts by and the request lacks.
    #[serde(skip_serializing_if = "Option::is_none")]
    missing: Option<&'a str>,
    /// The key of the override that decided in place of the rule's own limits.
    #[serde(rename = "override", skip_serializing_if = "Option::is_none")]
    overridden: Option<String>,
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
    /// The decisions of shadow rules, which have no effect.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    shadows: Vec<ShadowLine<'a>>,
}

/// One limit's part of a decision.
#[derive(Debug, Serialize)]
struct LimitLine<'a> {
    /// Its rule, if several apply together.
    #[serde(skip_serializing_if = "Option::is_none")]
    rule: Option<&'a str>,
    name: Cow<'a, str>,
    /// The key that it counts.
    key: String,
    allowed: bool,
    limit: u64,
    remaining: u64,
    retry_after_us: RetryAfter,
    reset_after_us: u64,
}

/// What a shadow rule would have done.
#[derive(Debug, Serialize)]
struct ShadowLine<'a> {
    rule: Option<&'a str>,
    reason: &'static str,
    allowed: bool,
    key: Option<String>,
    denied_by: Option<&'a str>,
}

/// Prints decisions as they are made.
#[derive(Debug)]
pub(crate) struct Printer<W: Write> {
    out: W,
    shape: Shape,
    rows: u64,
}

impl<'a> Line<'a> {
    /// The fields that every decision has.
    fn of(op: Operation, allowed: bool, decision: Option<&'a Decision>) -> Self {
        // A denial without limits never ends by waiting.
        let without = if allowed { RetryAfter::Now } else { RetryAfter::Never };
        Self {
            t_us: None,
            op,
            attrs: None,
            key: None,
            cost: None,
            rule: None,
            together: Vec::new(),
            reason: None,
            allowed,
            limit: decision.map(|decision| decision.capacity),
            remaining: decision.map(|decision| decision.remaining),
            retry_after_us: decision.map_or(without, |decision| decision.retry_after),
            reset_after_us: decision.map(|decision| micros(decision.reset_after)),
            denied_by: decision.and_then(|decision| decision.denied_by.as_deref()),
            by: decision.map_or_else(|| "rules".to_owned(), |decision| decision.by.to_string()),
            limits: None,
            missing: None,
            overridden: None,
            error: decision.and_then(|decision| decision.by.error()).map(|error| error.kind().name()),
            granted: decision.filter(|_| op == Operation::AtMost).map(|decision| decision.granted),
            blocked: decision.is_some_and(|decision| decision.blocked),
            overage: decision.and_then(|decision| decision.overage),
            id: None,
            length: None,
            request_time: None,
            shadows: Vec::new(),
        }
    }

    /// A decision on a key.
    pub(crate) fn new(subject: &'a Subject, op: Operation, key: &[u8], cost: u64, decision: &'a Decision) -> Self {
        let limits = decision.limits.iter().map(|limit| LimitLine::new(limit, subject.counted_by(limit, key)));
        Self {
            key: Some(shown(key)),
            cost: Some(cost),
            rule: Some(subject.name()),
            // With a single limit, the line itself is its decision.
            limits: (decision.limits.len() > 1).then(|| limits.collect()),
            overridden: subject.overridden.as_ref().map(|key| shown(key.as_bytes())),
            ..Self::of(op, decision.allowed, Some(decision))
        }
    }

    /// The verdict of a set of rules on a record.
    pub(crate) fn of_verdict(judged: &'a Judged<'_>, shadows: &'a [Judged<'_>], record: &'a Record) -> Self {
        let Record { t_us, op, ref attributes, ref id, length, .. } = *record;
        let (call, decision) = judged.asked.as_ref().map(|(call, decision)| (call, decision)).unzip();
        Self {
            t_us: Some(t_us),
            attrs: Some(Shown(attributes)),
            key: judged.key().map(shown),
            cost: call.map(|call| call.cost).or(record.cost),
            rule: judged.rule(),
            together: judged.together(),
            reason: Some(judged.reason()),
            limits: Some(judged.asked.as_ref().map(limits).unwrap_or_default()),
            missing: match judged.applies.as_ref().map(|applies| &applies.effect) {
                Some(Effect::Missing(attribute)) => Some(attribute),
                _ => None,
            },
            overridden: judged.overridden().map(|key| shown(key.as_bytes())),
            id: call.and_then(|call| call.id.as_ref()).or(id.as_ref()).map(|id| shown(id)),
            request_time: call.filter(|call| held::holds(&call.rule)).and_then(|_| record.request_time()),
            shadows: shadows.iter().map(ShadowLine::new).collect(),
            ..Self::of(op, judged.allowed, decision)
        }
        .lasting(length)
    }

    /// A key that an override allows or blocks.
    pub(crate) fn of_listed(listed: &'a Listed, op: Operation) -> Self {
        let Listed { rule, key, allowed } = listed;
        let key = shown(key.as_bytes());
        Self {
            key: Some(key.clone()),
            rule: Some(rule),
            reason: Some(if *allowed { "allowed" } else { "blocked" }),
            limits: Some(Vec::new()),
            overridden: Some(key),
            ..Self::of(op, *allowed, None)
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

    /// The word for the outcome in a table.
    fn verdict(&self) -> (Style, &'static str) {
        let by_rule = self.reason.is_some_and(|reason| ["blocked", AMBIGUOUS].contains(&reason));
        match (self.allowed, self.op) {
            (true, op) if operation::asks(op) => (RIGHT, "allowed"),
            (true, Operation::Block) if self.length.as_deref() == Some("0s") => (QUIET, "unblock"),
            (true, op) => (QUIET, op.name()),
            (false, _) if self.blocked || by_rule => (WRONG, "blocked"),
            (false, _) => (WRONG, "denied"),
        }
    }

    /// Counted denials, for the column of a table. A set has no such column, since its rules may differ in this.
    fn counted_denials(&self) -> Option<u64> {
        self.overage.filter(|_| self.reason.is_none())
    }

    /// The last column of a table: the rule and the key of the decision.
    fn rule_and_key(&self) -> String {
        let Some(reason) = self.reason else {
            let id = self.id.as_ref().map(|id| format!("  {QUIET}id {id}{QUIET:#}")).unwrap_or_default();
            return format!("{}{id}", self.key.as_deref().unwrap_or_default());
        };
        let overridden = self.overridden.as_ref().map_or("", |_| " (override)");
        match (self.rule, &self.key, self.missing) {
            (None, ..) if reason == AMBIGUOUS => "refused: the path can be read in two ways".to_owned(),
            (None, ..) => "no rule applies".to_owned(),
            (Some(rule), _, Some(missing)) => format!("{rule}: no {missing}"),
            (Some(rule), Some(key), _) => format!("{rule}: {key}{overridden}"),
            (Some(rule), None, _) => rule.to_owned(),
        }
    }
}

/// Each limit's own decision.
fn limits((call, decision): &(Call, Decision)) -> Vec<LimitLine<'_>> {
    let Call { rule, keys, .. } = call;
    let limits: Vec<&Limit> = rule.limits().collect();
    let counted = |at: usize| keys.get(at).map(Vec::as_slice).unwrap_or_default();
    if let [only] = limits.as_slice() {
        return vec![LimitLine::only(title(only), counted(0), decision)];
    }
    // The limits that the operation asks, in their order; rules that apply together may have limits with the same name.
    let mut from = 0;
    let mut at = |name: &str| {
        let found = limits[from..].iter().position(|limit| title(limit) == name).map_or(0, |at| from + at);
        from = found + 1;
        found
    };
    let first = decision.limits.first().and_then(|limit| limit.rule());
    let several = decision.limits.iter().any(|limit| limit.rule() != first);
    let mut lines = Vec::with_capacity(limits.len());
    for limit in &decision.limits {
        let rule = limit.rule().filter(|_| several);
        lines.push(LimitLine { rule, ..LimitLine::new(limit, counted(at(limit.name()))) });
    }
    lines
}

impl<'a> LimitLine<'a> {
    fn new(limit: &'a LimitDecision, key: &[u8]) -> Self {
        Self {
            rule: None,
            name: Cow::Borrowed(limit.name()),
            key: shown(key),
            allowed: limit.allowed,
            limit: limit.capacity,
            remaining: limit.remaining,
            retry_after_us: limit.retry_after,
            reset_after_us: micros(limit.reset_after),
        }
    }

    /// The only limit of a rule, for which a policy may have answered.
    fn only(name: String, key: &[u8], decision: &Decision) -> Self {
        Self {
            rule: None,
            name: Cow::Owned(name),
            key: shown(key),
            allowed: decision.allowed,
            limit: decision.capacity,
            remaining: decision.remaining,
            retry_after_us: decision.retry_after,
            reset_after_us: micros(decision.reset_after),
        }
    }
}

impl<'a> ShadowLine<'a> {
    fn new(judged: &'a Judged<'_>) -> Self {
        Self {
            rule: judged.rule(),
            reason: judged.reason(),
            allowed: judged.allowed,
            key: judged.key().map(shown),
            denied_by: judged.denied_by(),
        }
    }
}

impl Printer<Vec<u8>> {
    /// Takes what was printed since the last call.
    pub(crate) fn take(&mut self) -> Vec<u8> {
        let room = self.out.len();
        std::mem::replace(&mut self.out, Vec::with_capacity(room))
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

    /// Prints lines of another printer.
    pub(crate) fn print_lines(&mut self, lines: &[u8]) -> io::Result<()> {
        self.out.write_all(lines)
    }

    pub(crate) fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }

    /// Prints the header.
    fn names(&mut self, line: &Line<'_>) -> io::Result<()> {
        let time = line.t_us.map(|_| format!("{:<27} ", "time")).unwrap_or_default();
        let overage = line.counted_denials().map(|_| format!("{:>9} ", "overage")).unwrap_or_default();
        let last = line.reason.map_or("key", |_| "rule: key");
        let names = format!(
            "{time}{:<8} {:>15} {:>12} {:>12} {overage} {:<8} {last}",
            "decision", "remaining", "retry after", "reset after", "by"
        );
        writeln!(self.out, "{QUIET}{names}{QUIET:#}")
    }

    fn row(&mut self, line: &Line<'_>) -> io::Result<()> {
        // Times come from records only, so either all rows have one or none has.
        if self.rows == 0 {
            self.names(line)?;
        }
        self.rows += 1;
        let (style, verdict) = line.verdict();
        let numbers = match (line.remaining, line.limit, line.reset_after_us) {
            (Some(remaining), Some(limit), Some(reset)) => numbers(remaining, limit, line.retry_after_us, reset),
            _ => format!("{:>15} {:>12} {:>12}", "-", if line.allowed { "-" } else { "never" }, "-"),
        };
        let time = time(line.t_us);
        let overage = line.counted_denials().map(|count| format!("{count:>9} ")).unwrap_or_default();
        let (by, last) = (&line.by, line.rule_and_key());
        writeln!(self.out, "{time}{style}{verdict:<8}{style:#} {numbers} {overage} {by:<8} {last}")?;
        // Each limit's own decision follows, then what shadow rules would have done.
        let (indent, gap) = (" ".repeat(time.len()), " ".repeat(overage.len()));
        for limit in line.limits.iter().flatten().filter(|_| line.limits.as_ref().is_some_and(|all| all.len() > 1)) {
            let (style, verdict) = if limit.allowed { (QUIET, " allowed") } else { (WRONG, " denied") };
            let numbers = self::numbers(limit.remaining, limit.limit, limit.retry_after_us, limit.reset_after_us);
            let LimitLine { rule, name, key, .. } = limit;
            let rule = rule.map(|rule| format!("{rule}: ")).unwrap_or_default();
            writeln!(
                self.out,
                "{indent}{style}{verdict:<8}{style:#} {numbers} {gap} {:<8}  {rule}{name} of {key}",
                ""
            )?;
        }
        for shadow in &line.shadows {
            let (style, does) = if shadow.allowed { (QUIET, "would allow") } else { (WRONG, "would deny") };
            let rule = shadow.rule.unwrap_or_default();
            let key = shadow.key.as_ref().map(|key| format!(": {key}")).unwrap_or_default();
            writeln!(self.out, "{indent} {style}{does}{style:#} by the shadow rule {rule}{key}")?;
        }
        Ok(())
    }
}
