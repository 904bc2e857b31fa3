//! Messages to people, on standard error. If it is closed, they are dropped without an error.

use std::fmt::Display;
use std::io::{self, Write};

use tollgate::Charged;
use tollgate::rules::RuleSet;

use crate::escape::is_visible;
use crate::output::{WRONG, human};
use crate::secrets::hidden;

/// A remark worth knowing.
pub(crate) fn note(message: impl Display) {
    say("tollgate:", message);
}

pub(crate) fn warning(message: impl Display) {
    say(format_args!("{WRONG}warning:{WRONG:#}"), message);
}

pub(crate) fn error(message: impl Display) {
    say(format_args!("{WRONG}error:{WRONG:#}"), message);
}

/// A line that other programs parse: `rules.toml:12:10: ...`.
pub(crate) fn fault(fault: impl Display) {
    let line = printable(&fault.to_string());
    let _ = anstream::stderr().write_all(format!("{line}\n").as_bytes());
}

/// What is valid in a set of rules and probably doesn't match as meant.
pub(crate) fn doubts(rules: &RuleSet) {
    for doubt in rules.warnings() {
        let (place, message) = (doubt.to_string(), doubt.message());
        let place = place.strip_suffix(message).unwrap_or_default();
        fault(format_args!("{place}warning: {message}"));
    }
}

/// The error that ended a command: what it was about, and what went wrong. The library's messages are complete, so
/// their sources aren't printed.
pub(crate) fn line(error: &anyhow::Error) -> String {
    if let Some(error) = of_output(error) {
        return format!("output: {error}");
    }
    let mut line = Vec::new();
    for cause in error.chain() {
        if let Some(error) = cause.downcast_ref::<tollgate::Error>() {
            let unknown =
                if error.charged() == Charged::Unknown { "; whether it took units can't be known" } else { "" };
            line.push(in_full(error) + unknown);
            break;
        }
        line.push(cause.to_string());
        #[cfg(feature = "archive")]
        if cause.is::<tollgate_record::archive::ArchiveError>() {
            break;
        }
    }
    line.join(": ")
}

/// An error of the output. Errors of files that are read or written have a context, which names the file.
pub(crate) fn of_output(error: &anyhow::Error) -> Option<&io::Error> {
    error.chain().next()?.downcast_ref()
}

/// The error with the times that its own message leaves out.
pub(crate) fn in_full(error: &tollgate::Error) -> String {
    match (error.missed_deadline(), error.retry_in()) {
        (Some(deadline), _) => {
            error.to_string().replacen("the deadline", &format!("the deadline of {}", human(deadline)), 1)
        }
        (None, Some(wait)) => format!("{error}; redis is called again in {}", human(wait)),
        (None, None) => error.to_string(),
    }
}

/// Makes a message one line, without passwords; invisible characters are escaped.
fn printable(message: &str) -> String {
    let mut line = String::with_capacity(message.len());
    for character in hidden(message).chars() {
        match character {
            '\n' | '\r' | '\t' => line.push(' '),
            _ if is_visible(character) => line.push(character),
            _ => line.extend(character.escape_unicode()),
        }
    }
    line
}

/// Prints one line, whatever the message quotes, in one write, so that lines of several processes don't mix.
fn say(what: impl Display, message: impl Display) {
    let message = printable(&message.to_string());
    let _ = anstream::stderr().write_all(format!("{what} {message}\n").as_bytes());
}

#[cfg(test)]
mod tests {
    use anyhow::Context;

    use super::*;
    use crate::reader_is_gone;

    #[test]
    fn an_error_of_the_output_has_no_context_and_any_other_names_what_it_is_about() {
        let broken = || io::Error::from(io::ErrorKind::BrokenPipe);
        let output = anyhow::Error::from(broken());
        assert!(reader_is_gone(&output));
        let file = Err::<(), _>(broken()).context("--out: a.lua").unwrap_err();
        assert!(!reader_is_gone(&file));
        assert_eq!(line(&file), format!("--out: a.lua: {}", broken()));
        let full = io::Error::from(io::ErrorKind::StorageFull);
        assert_eq!(line(&full.into()), format!("output: {}", io::Error::from(io::ErrorKind::StorageFull)));
    }

    #[test]
    fn a_source_of_the_library_is_not_shown() {
        let error = tollgate::Redis::open("http://localhost").unwrap_err();
        assert!(std::error::Error::source(&error).is_some());
        let message = error.to_string();
        assert_eq!(line(&anyhow::Error::from(error).context("here")), format!("here: {message}"));
    }
}
