//! The answer to a call that takes nothing.

use std::sync::Arc;
use std::time::Duration;

use super::{DecidedBy, Decision, LimitDecision};
use crate::quota::Quota;

/// What a key has after a call that asks for nothing: one that gives back, settles, extends, blocks or forgets.
///
/// For a rule of several limits, `capacity` and `remaining` are those of the limit with the least remaining, and
/// `reset_after` is the longest.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Balance {
    /// The most units that can be taken at one instant.
    pub capacity: u64,
    /// Whole units that can be taken right now, after this call. 0 if the policy answered, which doesn't know the
    /// state.
    pub remaining: u64,
    /// How long until the key is as if it had never been used.
    pub reset_after: Duration,
    /// Units that this call leaves taken, as a settlement does; if limits have [costs of their
    /// own](crate::Rule::cost_of), the most of any.
    pub granted: u64,
    /// Whether the key is blocked, whatever it has left.
    pub blocked: bool,
    /// What answered; if that wasn't Redis because Redis failed, with its error, whose [charge](crate::Error::charged)
    /// says whether something may have been given back there all the same.
    pub by: DecidedBy,
    /// Each limit's own balance, in the rule's order. Empty if the policy answered, which doesn't know the state.
    pub limits: Vec<LimitBalance>,
}

/// One limit's part in a balance.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LimitBalance {
    quota: Arc<Quota>,
    /// The most units that can be taken from it at one instant.
    pub capacity: u64,
    /// Whole units that can be taken from it right now.
    pub remaining: u64,
    /// How long until its key is as if never used.
    pub reset_after: Duration,
    /// Units that this call leaves taken from it.
    pub granted: u64,
    /// Whether its key is blocked.
    pub blocked: bool,
}

impl Balance {
    pub(crate) fn of(decision: Decision) -> Self {
        let limits = decision.limits.iter().map(LimitBalance::of).collect();
        let Decision { capacity, remaining, reset_after, granted, blocked, by, .. } = decision;
        Self { capacity, remaining, reset_after, granted, blocked, by, limits }
    }
}

impl LimitBalance {
    fn of(decision: &LimitDecision) -> Self {
        let LimitDecision { capacity, remaining, reset_after, granted, blocked, .. } = *decision;
        Self { quota: Arc::clone(&decision.quota), capacity, remaining, reset_after, granted, blocked }
    }

    /// The name of the limit or, if unnamed, its text. To keep it costs no copy.
    #[must_use]
    pub fn name(&self) -> &Arc<str> {
        self.quota.title()
    }
}
