//! Passwords in the addresses of arguments and of the environment: kept out of messages, and of what `ps` shows to
//! other users of the machine.

use std::env;
use std::ffi::OsString;
use std::ops::Range;

/// Shown in place of a password.
const HIDDEN: &str = "***";
/// The environment variable, with the argument's number, that an argument with a password is moved to. Other users
/// can't read the environment of a process.
const MOVED: &str = "TOLLGATE_ARGUMENT_";
/// Shorter passwords are hidden only as parts of their address, since they may be parts of other words.
const LEAST: usize = 6;

/// This command's arguments. If one has a password, this process executes the tool again, without passwords in its
/// arguments. If that fails, it runs as it was started.
pub(crate) fn arguments() -> Vec<OsString> {
    let given: Vec<OsString> = env::args_os().collect();
    let full = |(number, shown): (usize, &OsString)| {
        let moved = env::var(format!("{MOVED}{number}")).ok();
        let moved = moved.filter(|full| shown.to_str().is_some_and(|shown| without_password(full) == shown));
        moved.map_or_else(|| shown.clone(), OsString::from)
    };
    let arguments: Vec<OsString> = given.iter().enumerate().map(full).collect();
    #[cfg(unix)]
    if arguments == given {
        start_without_passwords(&given);
    }
    arguments
}

/// Returns only if there is nothing to hide, or that isn't possible.
#[cfg(unix)]
fn start_without_passwords(given: &[OsString]) {
    use std::os::unix::process::CommandExt;
    use std::process::Command;

    let Some((name, rest)) = given.split_first() else { return };
    let Ok(program) = env::current_exe() else { return };
    let mut again = Command::new(program);
    again.arg0(name);
    let mut has_any = false;
    for (number, argument) in (1..).zip(rest) {
        match argument.to_str().filter(|text| password(text).is_some()) {
            Some(text) => {
                has_any = true;
                again.arg(without_password(text)).env(format!("{MOVED}{number}"), text);
            }
            None => _ = again.arg(argument),
        }
    }
    if has_any {
        let _ = again.exec();
    }
}

/// A message without the passwords that this command was given.
pub(crate) fn hidden(message: &str) -> String {
    let variables = ["TOLLGATE_URL", "TOLLGATE_DATABASE", "TOLLGATE_ARCHIVE"].map(|name| env::var(name).ok());
    let arguments = arguments_as_given().chain(variables.into_iter().flatten());
    hidden_of(message, arguments)
}

fn arguments_as_given() -> impl Iterator<Item = String> {
    env::args_os().enumerate().skip(1).filter_map(|(number, given)| {
        let moved = env::var(format!("{MOVED}{number}")).ok();
        moved.or_else(|| given.into_string().ok())
    })
}

fn hidden_of(message: &str, arguments: impl Iterator<Item = String>) -> String {
    let mut message = message.to_owned();
    for argument in arguments {
        let Some(password) = password(&argument).map(|range| argument[range].to_owned()) else { continue };
        // A message may have its line breaks and runs of spaces as one space.
        for quoted in [argument.clone(), argument.split_whitespace().collect::<Vec<_>>().join(" ")] {
            message = message.replace(&quoted, &without_password(&argument));
        }
        if password.len() >= LEAST {
            message = message.replace(&password, HIDDEN);
        }
    }
    message
}

fn without_password(text: &str) -> String {
    let mut text = text.to_owned();
    if let Some(range) = password(&text) {
        text.replace_range(range, HIDDEN);
    }
    text
}

/// Where the password of an address is, which may end this text: `--url=redis://user:password@host`. In libpq's form
/// its end isn't certain, so it is all that follows.
fn password(text: &str) -> Option<Range<usize>> {
    let of_user = |begin: usize| {
        let end = begin + text[begin..].rfind('@')?;
        Some(begin + text[begin..end].find(':')? + 1..end)
    };
    let in_url = text.find("://").and_then(|at| of_user(at + 3));
    let range = match (in_url, option(text)) {
        // With both, everything from the first on.
        (Some(url), Some(option)) => url.start.min(option)..text.len(),
        (Some(url), None) => url,
        (None, Some(option)) => option..text.len(),
        (None, None) => return None,
    };
    (!range.is_empty() && &text[range.clone()] != HIDDEN).then_some(range)
}

/// Where the value of libpq's option begins, which may have spaces around its sign.
fn option(text: &str) -> Option<usize> {
    text.match_indices("password").find_map(|(at, name)| {
        let after = text[at + name.len()..].trim_start().strip_prefix('=')?;
        Some(text.len() - after.trim_start().len())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_is_hidden_wherever_its_address_is_quoted() {
        for (argument, shown) in [
            ("postgres://u:sesame@h/db", "postgres://u:***@h/db"),
            ("--url=redis://:open@sesame@h", "--url=redis://:***@h"),
            ("redis-cluster://u:sesame@a:1,b:2", "redis-cluster://u:***@a:1,b:2"),
            ("host=h password=open sesame=x", "host=h password=***"),
            ("postgres://h/db?password=open&sesame=x", "postgres://h/db?password=***"),
            ("host = h password = sesame", "host = h password = ***"),
            ("postgres://u:sesame@h/db?password=x", "postgres://u:***"),
            ("postgres://u:xpassword=y@h", "postgres://u:***"),
            ("redis://localhost:6379/0", "redis://localhost:6379/0"),
            ("postgres://u@h:5432/db", "postgres://u@h:5432/db"),
            ("user:42", "user:42"),
        ] {
            assert_eq!(without_password(argument), shown);
            assert_eq!(without_password(shown), shown);
            let message = format!("unexpected argument '{argument}' found");
            assert_eq!(hidden_of(&message, [argument.to_owned()].into_iter()), message.replace(argument, shown));
        }
        let decoded = hidden_of("got sesame1", ["redis://u:sesame1@h".to_owned()].into_iter());
        assert_eq!(decoded, "got ***");
    }
}
