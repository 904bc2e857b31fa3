//! What is said to people, on standard error. Where nobody listens any more, nothing is said, and nothing fails.

use std::fmt::Display;
use std::io::Write;

use crate::output::WRONG;

/// Something worth knowing.
pub(crate) fn note(message: impl Display) {
    say("tollgate:", message);
}

pub(crate) fn warning(message: impl Display) {
    say(format_args!("{WRONG}warning:{WRONG:#}"), message);
}

pub(crate) fn error(message: impl Display) {
    say(format_args!("{WRONG}error:{WRONG:#}"), message);
}

/// One line, whatever the message quotes, and at once, so that lines of several tools don't mix.
fn say(what: impl Display, message: impl Display) {
    let message = message.to_string().replace(char::is_control, " ");
    let _ = anstream::stderr().write_all(format!("{what} {message}\n").as_bytes());
}
