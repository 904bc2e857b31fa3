//! The answer to a call that takes nothing.

use std::time::Duration;

use super::{DecidedBy, Decision, LimitDecision, LimitDecisions};

/// What a key has after a call that asks for nothing: one that gives back, settles, extends, blocks or forgets.
///
/// For a rule of several limits, `capacity` and `remaining` are those of the limit with the least remaining, and
/// `reset_after` is the longest.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Balance {
    /// The most units that can be taken at one instant.
    pub capacity: u64,
    /// Whole units that can be taken right now, after this call. 0 if the policy answered, which doesn't know the state.
    pub remaining: u64,
    /// How long until the key is as if it had never been used.
    pub reset_after: Duration,
    /// Units that this call leaves taken, as a settlement does; if limits have [costs of their
    /// own](crate::Rule::cost_of), the most of any.
    pub granted: u64,
    /// Whether the key is blocked, whatever it has left.
    pub blocked: bool,
    /// What answered; if that wasn't Redis because Redis failed, with its error, whose [charge](crate::Error::charged) says
    /// whether something may have been given back there all the same.
    pub by: DecidedBy,
    limits: LimitDecisions,
}

/// One limit's part in a balance.
#[derive(Clone, Copy, Debug)]
pub struct LimitBalance<'a>(&'a LimitDecision);

impl Balance {
    pub(crate) fn of(decision: Decision) -> Self {
        let Decision { capacity, remaining, reset_after, granted, blocked, by, limits, .. } = decision;
        Self { capacity, remaining, reset_after, granted, blocked, by, limits }
    }

    /// Each limit's own balance, in the rule's order. Empty if the policy answered, which doesn't know the state.
    pub fn limits(&self) -> impl ExactSizeIterator<Item = LimitBalance<'_>> {
        self.limits.iter().map(LimitBalance)
    }
}

impl<'a> LimitBalance<'a> {
    /// The name of the limit or, if unnamed, its text.
    #[must_use]
    pub fn name(&self) -> &'a str {
        self.0.name()
    }

    /// The most units that can be taken from it at one instant.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        self.0.capacity
    }

    /// Whole units that can be taken from it right now.
    #[must_use]
    pub fn remaining(&self) -> u64 {
        self.0.remaining
    }

    /// How long until its key is as if never used.
    #[must_use]
    pub fn reset_after(&self) -> Duration {
        self.0.reset_after
    }

    /// Units that this call leaves taken from it.
    #[must_use]
    pub fn granted(&self) -> u64 {
        self.0.granted
    }

    /// Whether its key is blocked.
    #[must_use]
    pub fn blocked(&self) -> bool {
        self.0.blocked
    }
}
