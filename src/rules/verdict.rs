//! The verdict of a set of rules on one request.

use std::sync::Arc;

use super::account::UserBlock;
use super::compiled::Response;
use crate::decision::Decision;
use crate::error::Error;
use crate::telemetry;

/// The verdict of a set of rules on a request.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Verdict {
    /// Whether the request may proceed.
    pub allowed: bool,
    /// The name of the rule that applied; none if no rule did. Of several, the first that denies or, if the request is
    /// allowed, the first.
    pub rule: Option<Arc<str>>,
    /// The names of all rules that applied, in their order, if several did: those before the last continue.
    pub together: Vec<Arc<str>>,
    /// Why.
    pub reason: Reason,
    /// What the rule's limits decided, if they were asked.
    pub decision: Option<Decision>,
    /// How to answer, if it is denied.
    pub response: Option<Response>,
    /// What the shadow rules before that rule decided, in their order.
    pub shadows: Vec<ShadowVerdict>,
}

/// Why a request was allowed or denied.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reason {
    /// Allowed: no rule applies.
    NoRule,
    /// Allowed by a rule that allows, or a key that it allows.
    Allowed,
    /// Denied by a rule that blocks, or because the rule blocks the key.
    Blocked,
    /// Denied: the user behind the request is blocked.
    UserBlocked(Arc<UserBlock>),
    /// Denied: the request doesn't have this attribute, which its rule counts by.
    Missing(String),
    /// The limits decided.
    Limits,
}

impl Verdict {
    /// Counts it, and those of shadow rules.
    pub(super) fn counted(&self) {
        telemetry::judged(self.rule.as_ref(), Ok((self.allowed, self.reason.name())));
        self.shadows.iter().for_each(|shadow| telemetry::shadowed(&shadow.rule, shadow.allowed));
    }

    /// For a decision made without a set of rules.
    #[cfg(feature = "http")]
    pub(crate) fn of(decision: Decision) -> Self {
        let (allowed, rule) = (decision.allowed, decision.rule().map(Into::into));
        let reason = Reason::Limits;
        Self {
            allowed,
            rule,
            together: Vec::new(),
            reason,
            decision: Some(decision),
            response: None,
            shadows: Vec::new(),
        }
    }
}

impl Reason {
    /// In a word: no-rule, allowed, blocked, user-blocked, missing or limits.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::NoRule => "no-rule",
            Self::Allowed => "allowed",
            Self::Blocked => "blocked",
            Self::UserBlocked(_) => "user-blocked",
            Self::Missing(_) => "missing",
            Self::Limits => "limits",
        }
    }
}

/// What a shadow rule decided. It has no effect.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ShadowVerdict {
    /// Its name.
    pub rule: Arc<str>,
    /// Whether it would have allowed the request; true if its limits made no decision.
    pub allowed: bool,
    /// What its limits decided, if they were asked.
    pub decision: Option<Result<Decision, Error>>,
}
