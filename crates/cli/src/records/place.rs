//! One field of a line of an access log, as options name it.

use std::fmt;
use std::str::FromStr;

use super::field::{quoted, shown};

/// A field of a line.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Place {
    /// The position in a line of words: from 1, or from the end with -1 for the last.
    At(i16),
    /// The last quoted word of a line of words.
    LastQuoted,
    /// A field of an object, with dots between names; a column; or the value of `NAME=` in a line of words.
    Named(String),
}

impl Place {
    pub(super) fn name(&self) -> Option<&str> {
        match self {
            Self::Named(name) => Some(name),
            Self::At(_) | Self::LastQuoted => None,
        }
    }
}

impl FromStr for Place {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match (text, text.parse::<i16>()) {
            ("", _) | (_, Ok(0)) => Err(format!(
                "expected a field's name, its position from 1, or last-quoted, got {}",
                quoted(text.as_bytes())
            )),
            (_, Ok(at)) => Ok(Self::At(at)),
            ("last-quoted", _) => Ok(Self::LastQuoted),
            (name, Err(_)) => Ok(Self::Named(name.to_owned())),
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::At(at) => at.fmt(f),
            Self::LastQuoted => f.write_str("last-quoted"),
            Self::Named(name) => f.write_str(&shown(name.as_bytes())),
        }
    }
}
