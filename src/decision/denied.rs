//! A denial as an error.

use std::fmt;

use super::{Decision, RetryAfter};

/// A denial as an error, for callers that use `?`. The message names the rule and the limit that denied, and contains no time, so that logs can
/// be grouped by it; [`decision`](Self::decision) has the wait.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Denied {
    decision: Box<Decision>,
}

impl Denied {
    pub(crate) fn of(decision: Decision) -> Self {
        Self { decision: Box::new(decision) }
    }

    /// The decision that denied.
    #[must_use]
    pub fn decision(&self) -> &Decision {
        &self.decision
    }

    /// The decision itself.
    #[must_use]
    pub fn into_decision(self) -> Decision {
        *self.decision
    }
}

impl fmt::Display for Denied {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Decision { blocked, retry_after, denied_by, limits, .. } = &*self.decision;
        let denying = limits.iter().find(|limit| !limit.allowed).or(limits.first());
        if let Some(rule) = denying.and_then(|limit| limit.quota.rule()) {
            write!(f, "rule {rule}: ")?;
        }
        f.write_str("denied")?;
        if let Some(name) = denied_by {
            write!(f, " by {name}")?;
        }
        match retry_after {
            RetryAfter::Never => {
                let never = limits.iter().find(|limit| limit.retry_after == RetryAfter::Never);
                let capacity = never.map_or(self.decision.capacity, |limit| limit.capacity);
                write!(f, ": the cost is above the limit of {capacity}")
            }
            _ if *blocked => f.write_str(": blocked"),
            _ => Ok(()),
        }
    }
}

impl std::error::Error for Denied {}
