//! What is said to people, on standard error. Where nobody listens any more, nothing is said, and nothing fails.

use std::fmt::Display;
use std::io::Write;

use crate::output::{WRONG, human};

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

/// A line that other programs look for: `rules.toml:12:10: ...`.
pub(crate) fn fault(fault: impl Display) {
    let line = printable(&fault.to_string());
    let _ = anstream::stderr().write_all(format!("{line}\n").as_bytes());
}

/// What went wrong, with the times that its own message leaves out.
pub(crate) fn in_full(error: &tollgate::Error) -> String {
    match (error.missed_deadline(), error.retry_in()) {
        (Some(deadline), _) => format!("{error} of {}", human(deadline)),
        (None, Some(wait)) => format!("{error}; it is asked again in {}", human(wait)),
        (None, None) => error.to_string(),
    }
}

/// In one line, and without what would turn a terminal's text around.
fn printable(message: &str) -> String {
    let turns =
        |character| matches!(character, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    message.replace(|character: char| character.is_control() || turns(character), " ")
}

/// One line, whatever the message quotes, and at once, so that lines of several tools don't mix.
fn say(what: impl Display, message: impl Display) {
    let message = printable(&message.to_string());
    let _ = anstream::stderr().write_all(format!("{what} {message}\n").as_bytes());
}
