//! Who answers where Redis can't.

use std::fmt;
use std::num::NonZeroU32;

use super::{Rule, ScopedLimit};
use crate::error::RuleError;

/// What a rule answers where Redis is away, or its state can't be read.
///
/// It answers acquires, peeks, reservations and at-mosts. `Open` and `Local` also answer what gives something back or
/// forgets it (refund, settle, cancel, release, reset): nothing is given back, and that is no error, so that work that is
/// done doesn't fail for it. Penalties, blocks and renewals are errors, and so is every call that Redis refuses for its
/// user, its password or its version: those stay closed until somebody puts them right.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum OnError {
    /// The error, so that nothing goes on. Nothing is admitted beyond the rule.
    #[default]
    Closed,
    /// Allowed, by [`By::Policy`](crate::By::Policy). Nothing bounds what is admitted until Redis answers again. What
    /// remains isn't known, and told as 0.
    Open,
    /// The engine in this process decides, by [`By::Local`](crate::By::Local), with the rule's share of one of so many
    /// processes: an equal part of each limit's capacity and rate, rounded down. Together they admit no more than the
    /// rule; with what Redis had admitted before, at most one capacity more in each outage.
    ///
    /// Clones of a limiter share what is decided here; limiters made apart each count as a process. Calls that miss their
    /// deadline one at a time are decided here too, so a Redis that loses some of them for long may admit up to the rate
    /// beside the share's.
    ///
    /// At most 100,000 keys are kept, in some 40 MB; more of a sliding log or of permits, which keep an entry for each.
    /// Beyond that, keys are forgotten, first those that would be as if never used soonest.
    ///
    /// What is given back later goes to Redis, which did not take it, unless the request says
    /// [after which decision](crate::Request::after) it comes. Permits are released where they were taken.
    Local {
        /// How many processes decide by this rule.
        processes: NonZeroU32,
    },
}

impl Rule {
    /// What is answered where Redis is away. Default: the [limiter's](crate::Limiter::on_error).
    ///
    /// # Errors
    ///
    /// `Local` for a limit with less than a unit for each process, or without the feature `embedded`.
    pub fn on_error(mut self, on_error: OnError) -> Result<Self, RuleError> {
        self.on_error = Some(on_error);
        self.checked()
    }

    /// Itself, if its policy can be followed.
    pub(super) fn can_follow_policy(self) -> Result<Self, RuleError> {
        if let Some(policy) = self.on_error {
            policy.checked().map_err(|why| self.error(why))?;
        }
        if let Some(OnError::Local { processes }) = self.on_error {
            self.share(processes)?;
        }
        Ok(self)
    }

    /// The same, answered by an error where Redis is away.
    pub(crate) fn closed(self) -> Self {
        Self { on_error: Some(OnError::Closed), ..self }
    }

    /// Its policy, if it says one.
    pub(crate) fn policy(&self) -> Option<OnError> {
        self.on_error
    }

    /// The same limits with the policy of another rule, or closed if they can't follow that.
    #[allow(dead_code, reason = "asked by sets of rules, which are a feature")]
    pub(crate) fn governed_as(&self, other: &Self) -> Self {
        match other.on_error {
            Some(OnError::Local { processes }) if self.share(processes).is_err() => self.clone().closed(),
            on_error => Self { on_error, ..self.clone() },
        }
    }

    /// What one of so many processes may admit by itself. Its limits are called as this rule's are.
    pub(crate) fn share(&self, processes: NonZeroU32) -> Result<Self, RuleError> {
        let share = |scoped: &ScopedLimit| Ok(ScopedLimit { limit: scoped.limit.share(processes)?, ..scoped.clone() });
        let limits = self.limits.iter().map(share).collect::<Result<_, RuleError>>()?;
        Ok(Self { limits, ..self.clone() })
    }
}

impl OnError {
    /// Why this build can't follow it, if so.
    pub(crate) fn checked(self) -> Result<(), &'static str> {
        match self {
            Self::Local { .. } if !cfg!(feature = "embedded") => {
                Err("on-error: expected closed or open, got local, which needs the feature embedded")
            }
            _ => Ok(()),
        }
    }
}

impl fmt::Display for OnError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Closed => "closed",
            Self::Open => "open",
            Self::Local { .. } => "local",
        })
    }
}
