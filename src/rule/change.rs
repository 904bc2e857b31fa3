//! What a change of a limit's numbers does to its state.

use std::fmt;
use std::str::FromStr;

use crate::error::RuleError;

/// What happens to a key's state when its limit's numbers have changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum OnChange {
    /// Units that were taken stay taken, also above a smaller capacity. While several versions are in force at once,
    /// each counts what all of them admit.
    #[default]
    KeepUsed,
    /// Units that were left stay, capped to the new capacity.
    AsIs,
    /// The key is as if it had never been used.
    Reset,
}

impl FromStr for OnChange {
    type Err = RuleError;

    fn from_str(text: &str) -> Result<Self, RuleError> {
        match text {
            "keep-used" => Ok(Self::KeepUsed),
            "as-is" => Ok(Self::AsIs),
            "reset" => Ok(Self::Reset),
            _ => Err(RuleError::new(format!("on-change: expected keep-used, as-is or reset, got {text:?}"))),
        }
    }
}

impl fmt::Display for OnChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::KeepUsed => "keep-used",
            Self::AsIs => "as-is",
            Self::Reset => "reset",
        })
    }
}
