//! What is said to people, on standard error. Where nobody listens any more, nothing is said, and nothing fails.

use std::fmt::Display;
use std::io::Write;

use crate::output::WRONG;

/// Something worth knowing.
pub(crate) fn note(message: impl Display) {
    say(&format!("tollgate: {message}\n"));
}

pub(crate) fn warning(message: impl Display) {
    say(&format!("{WRONG}warning:{WRONG:#} {message}\n"));
}

pub(crate) fn error(message: impl Display) {
    say(&format!("{WRONG}error:{WRONG:#} {message}\n"));
}

/// A whole line at once, so that lines of several tools don't mix.
fn say(line: &str) {
    let _ = anstream::stderr().write_all(line.as_bytes());
}
