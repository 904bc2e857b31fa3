//! A decision as JSON, with the names and units that `tollgate probe --format jsonl` prints, and each limit's
//! algorithm.

use serde::{Serialize, Serializer};
use tollgate::rules::{Applies, Charge, Effect, Reason, Verdict};
use tollgate::{Algorithm, LimitDecision, Operation, RetryAfter};

/// One decision.
#[derive(Debug, Serialize)]
pub(crate) struct Answer<'a> {
    op: Operation,
    /// The key that the rule counts; null if it counts none.
    key: Option<String>,
    cost: Option<u64>,
    rule: Option<&'a str>,
    /// All rules that apply, if several do.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    together: Vec<&'a str>,
    reason: &'static str,
    allowed: bool,
    limit: Option<u64>,
    remaining: Option<u64>,
    retry_after_us: RetryAfter,
    reset_after_us: Option<u64>,
    denied_by: Option<&'a str>,
    by: String,
    limits: Vec<LimitAnswer<'a>>,
    /// The attribute that the rule counts by and the request lacks.
    #[serde(skip_serializing_if = "Option::is_none")]
    missing: Option<&'a str>,
    /// The key of the override that decided in place of the rule's own limits.
    #[serde(rename = "override", skip_serializing_if = "Option::is_none")]
    overridden: Option<&'a str>,
    /// The error of Redis, if something else decided.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'static str>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    blocked: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    overage: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'a str>,
    /// What the rule has to say to whom it denies.
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<&'a str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    shadows: Vec<ShadowAnswer<'a>>,
}

/// One limit's part of a decision.
#[derive(Debug, Serialize)]
struct LimitAnswer<'a> {
    /// Its rule, if several apply together.
    #[serde(skip_serializing_if = "Option::is_none")]
    rule: Option<&'a str>,
    name: &'a str,
    #[serde(serialize_with = "as_text")]
    algorithm: Algorithm,
    key: String,
    allowed: bool,
    limit: u64,
    remaining: u64,
    retry_after_us: RetryAfter,
    reset_after_us: u64,
}

/// What a shadow rule would have done.
#[derive(Debug, Serialize)]
struct ShadowAnswer<'a> {
    rule: &'a str,
    allowed: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    denied_by: Option<&'a str>,
}

impl<'a> Answer<'a> {
    /// A verdict on a request to which these rules apply.
    pub(crate) fn new(op: Operation, applies: &'a Applies<'_>, verdict: &'a Verdict, id: Option<&'a str>) -> Self {
        let decision = verdict.decision.as_ref();
        let charge = charge(applies);
        // A denial without limits never ends by waiting.
        let without = if verdict.allowed { RetryAfter::Now } else { RetryAfter::Never };
        let shadows = verdict.shadows.iter().map(|shadow| ShadowAnswer {
            rule: &shadow.rule,
            allowed: shadow.allowed,
            denied_by: shadow.decision.as_ref().and_then(|decided| decided.as_ref().ok()?.denied_by.as_deref()),
        });
        Self {
            op,
            key: charge.map(|charge| shown(charge.key())),
            cost: charge.map(Charge::cost),
            rule: verdict.rule.as_deref(),
            together: verdict.together.iter().map(|name| &**name).collect(),
            reason: verdict.reason.name(),
            allowed: verdict.allowed,
            limit: decision.map(|decision| decision.capacity),
            remaining: decision.map(|decision| decision.remaining),
            retry_after_us: decision.map_or(without, |decision| decision.retry_after),
            reset_after_us: decision.map(|decision| micros(decision.reset_after)),
            denied_by: decision.and_then(|decision| decision.denied_by.as_deref()),
            by: decision.map_or_else(|| "rules".to_owned(), |decision| decision.by.to_string()),
            limits: limits(charge, verdict),
            missing: match &verdict.reason {
                Reason::Missing(attribute) => Some(attribute),
                _ => None,
            },
            overridden: applies.overridden,
            error: decision.and_then(|decision| decision.by.error()).map(|error| error.kind().name()),
            blocked: decision.is_some_and(|decision| decision.blocked),
            overage: decision.and_then(|decision| decision.overage),
            id,
            message: verdict.response.as_ref().and_then(|response| response.message.as_deref()),
            shadows: shadows.collect(),
        }
    }
}

impl Answer<'_> {
    /// The same, denied by the service, since no rule applies.
    pub(crate) fn denied(self) -> Self {
        let retry_after_us = if self.allowed { RetryAfter::Never } else { self.retry_after_us };
        Self { allowed: false, retry_after_us, ..self }
    }
}

/// What a request is charged, if limits decide.
fn charge<'a>(applies: &'a Applies<'_>) -> Option<&'a Charge<'a>> {
    match &applies.effect {
        Effect::Limit(charge) => Some(charge),
        _ => None,
    }
}

/// Each limit's own decision, with what it counts.
fn limits<'a>(charge: Option<&Charge<'_>>, verdict: &'a Verdict) -> Vec<LimitAnswer<'a>> {
    let Some(decision) = &verdict.decision else { return Vec::new() };
    let several = !verdict.together.is_empty();
    let counted = |at: usize| {
        let charge = charge?;
        let part = charge.rule().counted_parts().nth(at)?;
        let Some(part) = part else { return Some(shown(charge.key())) };
        charge.parts().find(|(name, _)| *name == part).map(|(_, value)| shown(value))
    };
    let answer = |(at, limit): (usize, &'a LimitDecision)| LimitAnswer {
        rule: limit.rule().filter(|_| several),
        name: limit.name(),
        algorithm: limit.algorithm(),
        key: counted(at).unwrap_or_default(),
        allowed: limit.allowed,
        limit: limit.capacity,
        remaining: limit.remaining,
        retry_after_us: limit.retry_after,
        reset_after_us: micros(limit.reset_after),
    };
    decision.limits.iter().enumerate().map(answer).collect()
}

fn as_text<S: Serializer>(algorithm: &Algorithm, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(algorithm)
}

fn shown(key: &[u8]) -> String {
    String::from_utf8_lossy(key).into_owned()
}

fn micros(time: std::time::Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
