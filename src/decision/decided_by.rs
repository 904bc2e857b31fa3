//! What answered a call, and why that wasn't Redis.

use std::fmt;
use std::sync::Arc;

use crate::error::Error;

/// What answered: an engine, this process for it, or something in place of a Redis that failed, with the error. A
/// [closed](crate::OnError::Closed) policy returns that error from the call; the others answer, and
/// [`error`](Self::error) says why.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DecidedBy {
    /// Redis.
    Redis,
    /// The engine in this process.
    Embedded,
    /// A [`DenialCache`](crate::DenialCache), which remembers what the engine said.
    DenialCache,
    /// A [`Lease`](crate::Lease), from the units that it holds.
    Lease,
    /// The engine in this process, since Redis failed with this: `OnError::Local`. None if Redis wasn't asked; for a
    /// call that gives back what was taken here, also if Redis was asked as well and didn't fail.
    Local(Option<Arc<Error>>),
    /// The rule's policy, since Redis failed with this: [`OnError::Open`](crate::OnError::Open). Nothing was taken,
    /// unless the error [says](Error::charged) otherwise; see [`Request::after`](crate::Request::after). None if Redis
    /// wasn't asked; for a call that gives back what this policy had let through, also if Redis was asked and failed,
    /// or knew nothing of it.
    Policy(Option<Arc<Error>>),
}

impl DecidedBy {
    /// The word in metrics, logs and JSON: `redis`, `embedded`, `denial-cache`, `lease`, `local` or `policy`.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Redis => "redis",
            Self::Embedded => "embedded",
            Self::DenialCache => "denial-cache",
            Self::Lease => "lease",
            Self::Local(_) => "local",
            Self::Policy(_) => "policy",
        }
    }

    /// Whether the failure policy answered in the place of Redis, whether or not that was asked.
    #[must_use]
    pub fn is_fallback(&self) -> bool {
        matches!(self, Self::Local(_) | Self::Policy(_))
    }

    /// What Redis failed with, if something else answered in its place.
    #[must_use]
    pub fn error(&self) -> Option<&Error> {
        match self {
            Self::Local(error) | Self::Policy(error) => error.as_deref(),
            _ => None,
        }
    }

    /// The same with this error of Redis, if it answered in the place of Redis.
    pub(crate) fn because_of(self, error: Option<Arc<Error>>) -> Self {
        match self {
            Self::Local(_) => Self::Local(error),
            Self::Policy(_) => Self::Policy(error),
            by => by,
        }
    }
}

impl fmt::Display for DecidedBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
