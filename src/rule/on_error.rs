//! The policy that answers while Redis is unreachable.

use std::fmt;
use std::num::NonZeroU32;
#[cfg(feature = "embedded")]
use std::sync::Arc;

use super::Rule;
#[cfg(feature = "embedded")]
use super::ScopedLimit;
use crate::error::RuleError;

/// A rule's answer when Redis gives none: it is unreachable, loading, busy, out of memory or otherwise refuses for now,
/// too few replicas confirm, or the state can't be read.
///
/// It applies to acquires, peeks, reservations and at-mosts. `Open` and `Local` also answer calls that give something
/// back or forget it (refund, settle, cancel, release, reset): nothing is given back, and that is no error, so that
/// finished work doesn't fail for it. Penalties, blocks and renewals of permits that Redis gave are errors. So are
/// calls that Redis refuses because of the user, the password or the version: those stay closed until an operator fixes
/// the cause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum OnError {
    /// The error, so that the call doesn't proceed. Nothing is admitted beyond the rule.
    #[default]
    Closed,
    /// Allowed, with [`DecidedBy::Policy`](crate::DecidedBy::Policy). Nothing bounds what is admitted until Redis
    /// answers again. The remaining units are unknown, and reported as 0.
    Open,
    /// The engine in this process decides, with [`DecidedBy::Local`](crate::DecidedBy::Local), by one process's share
    /// of the rule: an equal part of each limit's capacity and rate, rounded down. Together the processes admit no more
    /// than the rule. On top of what Redis had admitted before, that is at most one capacity more in each outage. If
    /// only some processes have lost Redis, it still admits the whole rule for the others, and the shares of the
    /// cut-off ones come on top for as long as that lasts: at most twice the rule in total.
    ///
    /// Clones of a limiter share their local state; limiters created separately each count as a process. Single calls
    /// that miss their deadline are decided here too, so a Redis that keeps losing some of them may lead to up to the
    /// rate being admitted on top of the share's.
    ///
    /// At most 100,000 keys are kept, in some 40 MB; more for a sliding log or permits, which keep an entry for each
    /// request or permit. Beyond that, keys are forgotten, those closest to never used first.
    ///
    /// What is given back later goes to Redis, which did not take it, unless the request says [after which
    /// decision](crate::Request::after) it comes. Permits are released where they were taken.
    ///
    /// Needs the feature `embedded`.
    #[cfg(feature = "embedded")]
    Local {
        /// How many processes share this rule.
        processes: NonZeroU32,
    },
}

impl OnError {
    /// The policy in a word: closed, open or local.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::Open => "open",
            #[cfg(feature = "embedded")]
            Self::Local { .. } => "local",
        }
    }

    /// `Local`, for so many processes; why not, in a build without that engine.
    #[allow(dead_code, reason = "asked by rules as serde types, which are a feature")]
    #[cfg_attr(feature = "embedded", allow(clippy::unnecessary_wraps, reason = "refused without the engine"))]
    pub(super) fn local(processes: NonZeroU32) -> Result<Self, &'static str> {
        #[cfg(feature = "embedded")]
        return Ok(Self::Local { processes });
        #[cfg(not(feature = "embedded"))]
        let _ = processes;
        #[cfg(not(feature = "embedded"))]
        Err("expected closed or open, got local, which needs the feature embedded")
    }

    /// How many processes share the rule under `Local`.
    #[allow(dead_code, reason = "asked by rules as serde types, which are a feature")]
    pub(super) fn processes(self) -> Option<NonZeroU32> {
        match self {
            #[cfg(feature = "embedded")]
            Self::Local { processes } => Some(processes),
            _ => None,
        }
    }

    /// The higher, the fewer requests it admits: the share of one among many processes is smaller.
    pub(super) fn strictness(self) -> (u8, u32) {
        match self {
            Self::Open => (0, 0),
            #[cfg(feature = "embedded")]
            Self::Local { processes } => (1, processes.get()),
            Self::Closed => (2, 0),
        }
    }
}

impl Rule {
    /// The answer while Redis is unreachable. Default: the [limiter's](crate::LimiterBuilder::on_error).
    ///
    /// # Errors
    ///
    /// `Local` for a limit with less than one unit for each process.
    pub fn on_error(mut self, on_error: OnError) -> Result<Self, RuleError> {
        self.on_error = Some(on_error);
        self.checked()
    }

    /// Returns the rule if it can follow its policy.
    pub(super) fn can_follow_policy(self) -> Result<Self, RuleError> {
        #[cfg(feature = "embedded")]
        if let Some(OnError::Local { processes }) = self.on_error {
            self.share(processes)?;
        }
        Ok(self)
    }

    /// The same rule with the policy `Closed`.
    pub(crate) fn closed(self) -> Self {
        Self { on_error: Some(OnError::Closed), ..self }
    }

    /// The same limits with another rule's policy, or closed if they can't follow that.
    #[allow(dead_code, reason = "asked by sets of rules, which are a feature")]
    pub(crate) fn governed_as(&self, other: &Self) -> Self {
        match other.on_error {
            #[cfg(feature = "embedded")]
            Some(OnError::Local { processes }) if self.share(processes).is_err() => self.clone().closed(),
            on_error => Self { on_error, ..self.clone() },
        }
    }

    /// One process's share of the rule. The shares' limits have the same names as this rule's.
    #[cfg(feature = "embedded")]
    pub(crate) fn share(&self, processes: NonZeroU32) -> Result<Self, RuleError> {
        let share = |scoped: &ScopedLimit| {
            let limit = Arc::new(scoped.limit.share(processes)?);
            Ok(ScopedLimit { limit, ..scoped.clone() })
        };
        let limits = self.limits.iter().map(share).collect::<Result<_, RuleError>>()?;
        Ok(Self { limits, ..self.clone().closed() })
    }
}

impl fmt::Display for OnError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
