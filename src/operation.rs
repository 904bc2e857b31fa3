//! What a call asks for.

use std::fmt;
use std::str::FromStr;

#[cfg(feature = "serde")]
use serde::{Deserialize, Serialize};

use crate::error::{Error, Kind};

/// What a call asks for: the operations of [`Limiter::call`](crate::Limiter::call), by the names that records, the
/// command line and the scripts have for them.
///
/// ```
/// use tollgate::Operation;
///
/// assert_eq!("at-most".parse::<Operation>()?, Operation::AtMost);
/// assert_eq!(Operation::AtMost.to_string(), "at-most");
/// # Ok::<(), tollgate::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(Serialize, Deserialize), serde(rename_all = "kebab-case"))]
#[non_exhaustive]
pub enum Operation {
    /// Take the cost now, or be denied: [`acquire`](crate::Limiter::acquire).
    #[default]
    Acquire,
    /// What acquire would answer: [`peek`](crate::Limiter::peek).
    Peek,
    /// Take the cost for later, into debt if need be: [`reserve`](crate::Limiter::reserve).
    Reserve,
    /// Take what there is, up to the cost: [`at_most`](crate::Limiter::at_most).
    AtMost,
    /// Give the cost back: [`refund`](crate::Limiter::refund).
    Refund,
    /// Take the cost whether it is there or not: [`penalty`](crate::Limiter::penalty).
    Penalty,
    /// Deny the key for as long as the request [says](crate::Request::block_for): [`block`](crate::Limiter::block).
    Block,
    /// Extend the permits of an id: [`renew`](crate::Limiter::renew).
    Renew,
    /// Give the permits of an id back: [`release`](crate::Limiter::release).
    Release,
    /// Replace the cost that an earlier call took with this one: [`settle`](crate::Limiter::settle).
    Settle,
    /// Give back what an earlier call took: [`cancel`](crate::Limiter::cancel).
    Cancel,
    /// Forget what is counted for the key: [`reset`](crate::Limiter::reset).
    Reset,
}

impl Operation {
    /// Every operation, in the order in which messages name them.
    pub const ALL: &'static [Self] = &[
        Self::Acquire,
        Self::Peek,
        Self::Reserve,
        Self::AtMost,
        Self::Refund,
        Self::Penalty,
        Self::Block,
        Self::Renew,
        Self::Release,
        Self::Settle,
        Self::Cancel,
        Self::Reset,
    ];

    /// Its name, such as `at-most`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Acquire => "acquire",
            Self::Peek => "peek",
            Self::Reserve => "reserve",
            Self::AtMost => "at-most",
            Self::Refund => "refund",
            Self::Penalty => "penalty",
            Self::Block => "block",
            Self::Renew => "renew",
            Self::Release => "release",
            Self::Settle => "settle",
            Self::Cancel => "cancel",
            Self::Reset => "reset",
        }
    }

    /// Whether it takes units or is denied, which telemetry counts as a decision.
    pub(crate) fn decides(self) -> bool {
        matches!(self, Self::Acquire | Self::Reserve | Self::AtMost)
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Operation {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        Self::ALL.iter().copied().find(|operation| operation.name() == name).ok_or_else(|| {
            let names: Vec<_> = Self::ALL.iter().map(|operation| operation.name()).collect();
            Error::new(Kind::Input, format!("operation: expected one of {}, got {name:?}", names.join(", ")))
        })
    }
}
