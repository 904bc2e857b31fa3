//! The verdict of a set of rules on a recorded request, and how it is printed.

use std::io::{self, Write};
use std::time::{Duration, UNIX_EPOCH};

use serde::Serialize;
use tollgate::rules::{Applies, Charge, Effect};
use tollgate::{Decision, Error, Limit, Limiter, OwnedRequest, RetryAfter, Rule};

use crate::attributes::{Pairs, Shown};
use crate::escape::shown;
use crate::held::{self, Held};
use crate::output::{LimitLine, QUIET, WRONG, micros, numbers, time, verdict};
use crate::probe::decide;
use crate::records::{Op, Record};
use crate::rule_arguments::title;
use crate::rules_file::Listed;

/// Why a request is refused whose path can be read in two ways.
pub(crate) const AMBIGUOUS: &str = "ambiguous";

/// Why a request is denied that lacks an attribute which a rule's key names.
pub(crate) const MISSING: &str = "missing";

/// A rule that applies to a record, or would if it weren't a shadow rule, and the outcome.
#[derive(Debug)]
pub(crate) struct Judged<'s> {
    /// None if the middleware refuses the request before any rule.
    applies: Option<Applies<'s>>,
    pub(crate) allowed: bool,
    /// If its limits were asked: what they decided, and whom they charged.
    asked: Option<Asked>,
}

#[derive(Debug)]
struct Asked {
    rule: Rule,
    request: OwnedRequest,
    cost: u64,
    /// The call's id: the record's, or a generated one if it holds permits.
    id: Option<Vec<u8>>,
    /// What each limit counts.
    counted: Vec<Vec<u8>>,
    decision: Decision,
}

impl<'s> Judged<'s> {
    /// A request whose path can be read in two ways.
    pub(crate) fn refused(record: &Record) -> Self {
        Self { applies: None, allowed: !record.op.asks(), asked: None }
    }

    /// Decides with the rule's limits, if it has some, at the record's time; `adapted` changes a rule as the options
    /// ask.
    pub(crate) async fn of(
        applies: Applies<'s>,
        limiter: &Limiter,
        adapted: &(dyn Fn(Rule) -> Rule + Sync),
        record: &Record,
    ) -> Result<Self, Error> {
        let Record { line, t_us, op, cost, ref id, length, .. } = *record;
        let Effect::Limit(charge) = &applies.effect else {
            let allowed = !op.asks() || matches!(applies.effect, Effect::Allow);
            return Ok(Self { applies: Some(applies), allowed, asked: None });
        };
        let rule = adapted(charge.rule().clone());
        let cost = cost.unwrap_or(charge.cost());
        // Permits are held by an id: the same one in every replay of the file.
        let own = (id.is_none() && op.takes() && held::holds(&rule)).then(|| format!("replay-{t_us}-{line}"));
        let mut request = charge.request().cost(cost).at(UNIX_EPOCH + Duration::from_micros(t_us));
        let id = id.clone().or(own.map(String::into_bytes));
        if let Some(id) = &id {
            request = request.id(id);
        }
        let decision = decide(limiter, &rule, op, request, length).await?;
        let (request, counted) = (request.into_owned(), counted(charge));
        let asked = Asked { rule, request, cost, id, counted, decision };
        Ok(Self { allowed: asked.decision.allowed, applies: Some(applies), asked: Some(asked) })
    }

    /// The rule and the request that were charged.
    pub(crate) fn charged(&self) -> Option<(&Rule, &OwnedRequest)> {
        self.asked.as_ref().map(|asked| (&asked.rule, &asked.request))
    }

    /// Notes the permits that it holds.
    pub(crate) async fn hold(&self, held: &mut Held, limiter: &Limiter, record: &Record) -> Result<(), Error> {
        match self.charged() {
            Some((rule, request)) => held.note(limiter, rule, request, record, self.allowed).await,
            None => Ok(()),
        }
    }

    /// The rule's name; none if no rule applies.
    pub(crate) fn rule(&self) -> Option<&'s str> {
        self.applies.as_ref().and_then(|applies| applies.rule)
    }

    /// Whether the middleware refuses the request before any rule.
    pub(crate) fn is_refused(&self) -> bool {
        self.applies.is_none()
    }

    /// Why it is allowed or denied.
    pub(crate) fn reason(&self) -> &'static str {
        self.applies.as_ref().map_or(AMBIGUOUS, reason)
    }

    fn overridden(&self) -> Option<&'s str> {
        self.applies.as_ref().and_then(|applies| applies.overridden)
    }

    pub(crate) fn denied_by(&self) -> Option<&str> {
        self.asked.as_ref().and_then(|asked| asked.decision.denied_by.as_deref())
    }

    /// The key that the rule counts, or that an override names.
    pub(crate) fn key(&self) -> Option<&[u8]> {
        match &self.applies.as_ref()?.effect {
            Effect::Limit(charge) => Some(charge.key()),
            _ => self.overridden().map(str::as_bytes),
        }
    }

    /// The counted key or, if there is none, the client.
    pub(crate) fn whom(&self, attributes: &Pairs) -> Vec<u8> {
        if let Some(key) = self.key() {
            return key.to_vec();
        }
        let found = ["user", "api_key", "ip"].iter().find_map(|name| attributes.iter().find(|(own, _)| own == name));
        match found.or(attributes.first()) {
            Some((name, value)) => [name.as_bytes(), b":", value].concat(),
            None => b"nobody".to_vec(),
        }
    }
}

/// Why a request is allowed or denied: no-rule, allowed, blocked, missing or limits.
pub(crate) fn reason(applies: &Applies<'_>) -> &'static str {
    match applies.effect {
        Effect::Allow if applies.rule.is_none() => "no-rule",
        Effect::Allow => "allowed",
        Effect::Block => "blocked",
        Effect::Missing(_) => MISSING,
        _ => "limits",
    }
}

/// What each limit of a charge counts, in order.
pub(crate) fn counted(charge: &Charge<'_>) -> Vec<Vec<u8>> {
    let part = |name: &str| charge.parts().find(|(other, _)| *other == name).map(|(_, value)| value.to_vec());
    let parts = charge.rule().counted_parts();
    parts.map(|name| name.and_then(part).unwrap_or_else(|| charge.key().to_vec())).collect()
}

/// One verdict, with the field names and order that other programs rely on.
#[derive(Debug, Serialize)]
pub(crate) struct VerdictLine<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) t_us: Option<u64>,
    op: Op,
    #[serde(skip_serializing_if = "Option::is_none")]
    attrs: Option<Shown<'a>>,
    /// The key that the rule counts; `None` if it counts none.
    key: Option<String>,
    cost: Option<u64>,
    rule: Option<&'a str>,
    /// Why: no-rule, allowed, blocked, missing (an attribute that the rule counts by), limits or ambiguous (its path).
    reason: &'static str,
    allowed: bool,
    /// `None` if no limit was asked.
    limit: Option<u64>,
    remaining: Option<u64>,
    retry_after_us: RetryAfter,
    reset_after_us: Option<u64>,
    denied_by: Option<&'a str>,
    /// What decided: the rules themselves, if no limit was asked.
    by: String,
    /// Each limit's own decision.
    limits: Vec<LimitLine<'a>>,
    /// The attribute that the rule counts by and the request lacks.
    #[serde(skip_serializing_if = "Option::is_none")]
    missing: Option<&'a str>,
    /// The key of the override that decided in place of the rule's own limits.
    #[serde(rename = "override", skip_serializing_if = "Option::is_none")]
    overridden: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    granted: Option<u64>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    blocked: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    overage: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(rename = "for", skip_serializing_if = "Option::is_none")]
    length: Option<String>,
    /// For how long it held its permits, in seconds; null if the log doesn't say.
    #[serde(skip_serializing_if = "Option::is_none")]
    request_time: Option<Option<String>>,
    /// The decisions of shadow rules, which have no effect.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    shadows: Vec<ShadowLine<'a>>,
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

impl<'a> VerdictLine<'a> {
    pub(crate) fn new(judged: &'a Judged<'_>, shadows: &'a [Judged<'_>], record: &'a Record) -> Self {
        let Record { t_us, op, ref attributes, ref id, length, .. } = *record;
        let asked = judged.asked.as_ref();
        let decision = asked.map(|asked| &asked.decision);
        let never = if judged.allowed { RetryAfter::Now } else { RetryAfter::Never };
        let length = length.and_then(|length| jiff::SignedDuration::try_from(length).ok());
        Self {
            t_us: Some(t_us),
            op,
            attrs: Some(Shown(attributes)),
            key: judged.key().map(shown),
            cost: asked.map(|asked| asked.cost).or(record.cost),
            rule: judged.rule(),
            reason: judged.reason(),
            allowed: judged.allowed,
            limit: decision.map(|decision| decision.limit),
            remaining: decision.map(|decision| decision.remaining),
            // A denial by a rule without limits lasts however long one waits.
            retry_after_us: decision.map_or(never, |decision| decision.retry_after),
            reset_after_us: decision.map(|decision| micros(decision.reset_after)),
            denied_by: judged.denied_by(),
            by: decision.map_or_else(|| "rules".to_owned(), |decision| decision.by.to_string()),
            limits: asked.map(Asked::limits).unwrap_or_default(),
            missing: match judged.applies.as_ref().map(|applies| &applies.effect) {
                Some(Effect::Missing(attribute)) => Some(attribute),
                _ => None,
            },
            overridden: judged.overridden().map(|key| shown(key.as_bytes())),
            error: decision.and_then(|decision| decision.error.as_ref()).map(|error| error.class()),
            granted: decision.filter(|_| op == Op::AtMost).map(|decision| decision.granted),
            blocked: decision.is_some_and(|decision| decision.blocked),
            overage: decision.and_then(|decision| decision.overage),
            id: asked.and_then(|asked| asked.id.as_ref()).or(id.as_ref()).map(|id| shown(id)),
            length: length.map(|length| format!("{length:#}")),
            request_time: asked.filter(|asked| held::holds(&asked.rule)).and_then(|_| record.request_time()),
            shadows: shadows.iter().map(ShadowLine::new).collect(),
        }
    }

    /// The line for a key that an override allows or blocks.
    pub(crate) fn of_listed(listed: &'a Listed, op: Op) -> Self {
        let Listed { rule, key, allowed } = listed;
        Self {
            t_us: None,
            op,
            attrs: None,
            key: Some(shown(key.as_bytes())),
            cost: None,
            rule: Some(rule),
            reason: if *allowed { "allowed" } else { "blocked" },
            allowed: *allowed,
            limit: None,
            remaining: None,
            retry_after_us: if *allowed { RetryAfter::Now } else { RetryAfter::Never },
            reset_after_us: None,
            denied_by: None,
            by: "rules".to_owned(),
            limits: Vec::new(),
            missing: None,
            overridden: Some(shown(key.as_bytes())),
            error: None,
            granted: None,
            blocked: false,
            overage: None,
            id: None,
            length: None,
            request_time: None,
            shadows: Vec::new(),
        }
    }

    pub(crate) fn row(&self, mut out: impl Write) -> io::Result<()> {
        let time = time(self.t_us);
        let by_rule = !self.allowed && ["blocked", AMBIGUOUS].contains(&self.reason);
        let (style, verdict) = verdict(self.op, self.allowed, self.blocked || by_rule);
        let numbers = match (self.remaining, self.limit, self.reset_after_us) {
            (Some(remaining), Some(limit), Some(reset)) => numbers(remaining, limit, self.retry_after_us, reset),
            _ => format!("{:>15} {:>12} {:>12}", "-", if self.allowed { "-" } else { "never" }, "-"),
        };
        let overridden = self.overridden.as_ref().map_or("", |_| " (override)");
        let whom = match (self.rule, &self.key, self.missing) {
            (None, ..) if self.reason == AMBIGUOUS => "refused: the path can be read in two ways".to_owned(),
            (None, ..) => "no rule applies".to_owned(),
            (Some(rule), _, Some(missing)) => format!("{rule}: no {missing}"),
            (Some(rule), Some(key), _) => format!("{rule}: {key}{overridden}"),
            (Some(rule), None, _) => rule.to_owned(),
        };
        writeln!(out, "{time}{style}{verdict:<8}{style:#} {numbers}  {:<8} {whom}", self.by)?;
        let indent = " ".repeat(time.len());
        if self.limits.len() > 1 {
            self.limits.iter().try_for_each(|limit| limit.row(&mut out, &indent, ""))?;
        }
        for shadow in &self.shadows {
            let (style, does) = if shadow.allowed { (QUIET, "would allow") } else { (WRONG, "would deny") };
            let rule = shadow.rule.unwrap_or_default();
            let key = shadow.key.as_ref().map(|key| format!(": {key}")).unwrap_or_default();
            writeln!(out, "{indent} {style}{does}{style:#} by the shadow rule {rule}{key}")?;
        }
        Ok(())
    }
}

impl Asked {
    fn limits(&self) -> Vec<LimitLine<'_>> {
        let Self { rule, counted, decision, .. } = self;
        let limits: Vec<&Limit> = rule.limits().collect();
        let counted = |at: usize| counted.get(at).map(Vec::as_slice).unwrap_or_default();
        if let [only] = limits.as_slice() {
            return vec![LimitLine::only(title(only), counted(0), decision)];
        }
        let at = |name: &str| limits.iter().position(|limit| title(limit) == name).unwrap_or(0);
        decision.limits.iter().map(|limit| LimitLine::new(limit, counted(at(&limit.name)))).collect()
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
