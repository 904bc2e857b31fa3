//! Why a source can't be read.

use crate::escape::shown;

/// The longest piece of a source that is quoted, in characters.
const LONGEST: usize = 80;

#[derive(Debug)]
pub(super) struct Fault {
    pub(super) line: usize,
    pub(super) what: String,
}

/// `expected X, got Y`
pub(super) fn expected(line: usize, what: &str, got: &str) -> Fault {
    Fault { line, what: format!("expected {what}, got {}", quoted(got)) }
}

/// A fault without a value to quote, such as a missing field.
pub(super) fn fault(line: usize, what: impl Into<String>) -> Fault {
    Fault { line, what: what.into() }
}

/// A piece of the source on one line.
pub(super) fn quoted(text: &str) -> String {
    let short: String = text.chars().take(LONGEST).collect();
    let more = if short.len() < text.len() { "..." } else { "" };
    shown(short.as_bytes()) + more
}
