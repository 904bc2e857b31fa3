//! When a request would be allowed.

use std::time::Duration;

use super::count;

/// When a request would be allowed, counted from the decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum RetryAfter {
    /// It is allowed.
    Now,
    /// Not before this time has passed, and exactly then if no other call takes units. Of permits, when the next one
    /// expires; one that is given back may come sooner.
    After(Duration),
    /// The cost is above what the rule could ever admit.
    Never,
}

impl RetryAfter {
    pub(super) fn from_reply(us: i64) -> Option<Self> {
        Some(match us {
            0 => Self::Now,
            -1 => Self::Never,
            _ => Self::After(Duration::from_micros(count(us)?)),
        })
    }

    /// What is left after this time.
    pub(super) fn less(self, passed: Duration) -> Self {
        match self {
            Self::After(wait) if wait > passed => Self::After(wait - passed),
            Self::After(_) => Self::Now,
            other => other,
        }
    }

    /// The wait: zero for `Now`, none for `Never`.
    #[must_use]
    pub fn duration(self) -> Option<Duration> {
        match self {
            Self::Now => Some(Duration::ZERO),
            Self::After(wait) => Some(wait),
            Self::Never => None,
        }
    }
}
