//! Translates redis-rs's errors into what they mean for a decision.

use std::borrow::Cow;

use redis::{ErrorKind, RedisError, ServerErrorKind};

use super::redirect::Redirect;
use crate::batch::ScriptCall;
use crate::error::{Error, Kind};
use crate::script::Script;

pub(super) fn from_connecting(error: &RedisError, address: &str) -> Error {
    let kind = match (error.kind(), error.code()) {
        (ErrorKind::AuthenticationFailed, _) | (_, Some("NOAUTH" | "WRONGPASS")) => Kind::Authentication,
        (ErrorKind::RESP3NotSupported, _) => Kind::Unsupported,
        (ErrorKind::Server(ServerErrorKind::NoPerm), _) => Kind::Permission,
        // Of the system, or of the caller's connector or source of credentials, whatever they say.
        (ErrorKind::Io, _) => Kind::Unreachable,
        // For SELECT, redis-rs returns the text only.
        _ if error.to_string().contains("Authentication required") => Kind::Authentication,
        _ if error.to_string().contains("no permissions to run") => Kind::Permission,
        // From a database that doesn't exist, or a server that has only one.
        _ if ["DB index is out of range", "SELECT is not allowed", "unknown command"]
            .iter()
            .any(|said| error.to_string().contains(said)) =>
        {
            Kind::Unsupported
        }
        _ => Kind::Unreachable,
    };
    let what = match kind {
        Kind::Authentication => "redis refused the user or the password",
        Kind::Permission => "redis doesn't let this user connect",
        Kind::Unsupported => "redis refused the protocol or the database",
        _ => "no connection to redis",
    };
    Error::new(kind, format!("{what} at {address}: {}", described(error)))
}

/// What was called, if it was a script.
#[derive(Clone, Copy)]
pub(super) struct Called {
    pub(super) script: &'static Script,
    /// Whether it writes several keys, so that it may have written some before an error.
    pub(super) writes_several: bool,
}

impl Called {
    pub(super) fn of(call: ScriptCall<'_>) -> Self {
        Self { script: call.script(), writes_several: call.key_count() > 1 }
    }
}

pub(super) fn from_answer(error: &RedisError) -> Error {
    from_call(error, None)
}

/// The same for a script's call: the message names the command that was refused.
pub(super) fn from_call(error: &RedisError, called: Option<Called>) -> Error {
    let kind = match (error.kind(), error.code().unwrap_or_default()) {
        (ErrorKind::Io, _) => Kind::Disconnected,
        (ErrorKind::Parse, _) if is_cut_short(error) => Kind::Disconnected,
        (ErrorKind::Parse, _) if repeats_what_was_sent(error) => Kind::Unsupported,
        // From a cluster's node; the cluster engine follows the redirect.
        (_, "MOVED" | "ASK") => Kind::Unsupported,
        (_, "WRONGTYPE" | "BADSTATE") => Kind::Unreadable,
        (_, "NOAUTH" | "WRONGPASS") => Kind::Authentication,
        (_, "NOPERM") => Kind::Permission,
        (_, "BADID") => Kind::UnknownId,
        (_, "STALE") => return Error::stale_from_message(&described(error)),
        // Misuse, such as an id of another operation, which no policy may allow.
        (_, "BADARG") => Kind::Input,
        (_, "CLUSTERDOWN") if Redirect::in_answer(error) == Some(Redirect::Nobody) => Kind::Refused,
        (_, "LOADING" | "BUSY" | "MASTERDOWN" | "READONLY" | "CLUSTERDOWN" | "TRYAGAIN") => Kind::NotNow,
        (ErrorKind::Server(_) | ErrorKind::Extension, _) => {
            // Within a script these errors have no code of their own.
            if is_unknown_command(error) || is_forbidden_to_scripts(error) {
                Kind::Unsupported
            } else if says(error, &FORBIDDEN_IN_SCRIPT) {
                Kind::Permission
            } else {
                Kind::Refused
            }
        }
        _ => Kind::Garbled,
    };
    if kind == Kind::UnknownId {
        return Error::unknown_id(&described(error));
    }
    let command = || named_by(error, called.map(|called| called.script));
    let what: Cow<'static, str> = match kind {
        Kind::Disconnected => "the connection to redis broke before the answer came".into(),
        Kind::Unreadable => "the limit's state can't be read (a reset repairs it)".into(),
        Kind::Authentication => "redis refused the user or the password".into(),
        Kind::Permission if is_of_a_key(error) => {
            "redis doesn't let this user have these keys (ACL SETUSER ... ~PREFIX:*)".into()
        }
        Kind::Permission => match command() {
            Some(command) => format!("redis doesn't let this user run '{command}' (ACL SETUSER ... +{command})").into(),
            None => "redis doesn't let this user run what a decision needs".into(),
        },
        Kind::Unsupported if is_forbidden_to_scripts(error) => {
            let what = command().map_or("what a decision needs".into(), |command| format!("'{command}'"));
            let where_else = "(tollgate::operations lists servers that allow it)";
            format!("on this server, scripts may not run {what} {where_else}").into()
        }
        Kind::Unsupported if error.redirect_node().is_some() => {
            "redis is a node of a cluster: give its url as redis-cluster://...".into()
        }
        Kind::Unsupported => match command() {
            Some(command) => {
                let expected = "expected Redis 7.0 or newer, or Valkey 7.2 or newer, with no command renamed";
                format!("redis has no command '{command}': {expected}").into()
            }
            None => "redis version: expected Redis 7.0 or newer, or Valkey 7.2 or newer".into(),
        },
        Kind::Garbled => "redis's answer can't be read".into(),
        Kind::NotNow if Redirect::in_answer(error) == Some(Redirect::Again) => {
            "a slot is being moved to another node, and not all keys of this call are there".into()
        }
        Kind::NotNow => "redis can't run this script now".into(),
        Kind::Input => "a script refused its arguments".into(),
        _ => "redis refused".into(),
    };
    let told = Error::new(kind, format!("{what}: {}", described(error)));
    let told = match Redirect::in_answer(error) {
        Some(redirect) => told.redirected(redirect),
        None => told,
    };
    // When Redis is out of memory, it refuses a script's first write, but lets a script that has already written go on.
    let is_first_write = error.code() == Some("OOM");
    let begun = error.detail().is_some_and(|detail| detail.contains(" script: ") || detail.contains(" command: "));
    // A script reads all it needs, and finds what it can't read, before it writes.
    let writing = matches!(kind, Kind::Permission | Kind::Unsupported | Kind::Refused);
    // Every script asks for the time first. One that writes a single key takes nothing before all else has succeeded.
    let charged = |called: Called| called.writes_several && command().as_deref() != Some("time");
    if begun && writing && !is_first_write && called.is_some_and(charged) { told.half_way() } else { told }
}

/// How the error begins when a user may not run a command that a script calls: in Redis 7.0; in newer versions and
/// Valkey.
const FORBIDDEN_IN_SCRIPT: [&str; 2] = ["The user executing the script can't", "ACL failure in script"];

/// Whether no script may run this command, whoever calls it: `This Redis command is not allowed from script`, with the
/// product's name or none, as Amazon ElastiCache Serverless says of TIME; `bad lua script`, as Alibaba Tair says of
/// keys that it can't see; and Valkey without its Lua module.
fn is_forbidden_to_scripts(error: &RedisError) -> bool {
    let within = |detail: &str| detail.starts_with("This ") && detail.contains("command is not allowed from script");
    says(error, &["bad lua script", "Could not find scripting engine"]) || error.detail().is_some_and(within)
}

/// `unknown command 'X'`, or within a script `Unknown Redis command called from script`, with the product's name or
/// none.
fn is_unknown_command(error: &RedisError) -> bool {
    let within = |detail: &str| detail.starts_with("Unknown ") && detail.contains("command called from script");
    says(error, &["unknown command"]) || error.detail().is_some_and(within) || repeats_what_was_sent(error)
}

/// For an unknown command, a server repeats what it was sent, and redis-rs can't read such a line if it isn't text, as
/// a script's packed numbers may not be. Before these comes the script's digest. A line that stops being text earlier
/// isn't an answer of Redis.
fn repeats_what_was_sent(error: &RedisError) -> bool {
    const DIGEST: usize = 40;
    let said = error.to_string();
    let index = said.split_once("invalid utf-8").and_then(|(_, said)| said.split_once("from index ")).map(|(_, at)| at);
    let digits = index.map(|at| at.split(|character: char| !character.is_ascii_digit()).next().unwrap_or_default());
    error.kind() == ErrorKind::Parse
        && digits.is_some_and(|at| at.parse().is_ok_and(|at: usize| at > "ERR unknown command".len() + DIGEST))
}

fn says(error: &RedisError, beginnings: &[&str]) -> bool {
    error.detail().is_some_and(|detail| beginnings.iter().any(|beginning| detail.starts_with(beginning)))
}

/// Whether the refusal is about a key rather than a command.
pub(super) fn is_of_a_key(error: &RedisError) -> bool {
    let refused = ["access a key", "access one of the keys", "access at least one of the keys"];
    error.detail().is_some_and(|detail| refused.iter().any(|refused| detail.contains(refused)))
}

/// The command that a user may not run, or that the server doesn't have: named by the error, or found in the script on
/// the line that the error names.
fn named_by(error: &RedisError, script: Option<&Script>) -> Option<String> {
    if repeats_what_was_sent(error) {
        return Some("evalsha".into());
    }
    let detail = error.detail()?;
    if let Some((_, rest)) = detail.split_once("run the '").or_else(|| detail.split_once("unknown command '")) {
        return rest.split_once('\'').map(|(command, _)| command.to_lowercase());
    }
    if let Some((_, command)) = detail.rsplit_once(" command: ") {
        return Some(command.to_lowercase());
    }
    let (_, line) = detail.split_once("@user_script:")?;
    let line: usize = line.split(|character: char| !character.is_ascii_digit()).next()?.parse().ok()?;
    let (_, called) = script?.text().lines().nth(line.checked_sub(1)?)?.split_once("call('")?;
    called.split_once('\'').map(|(command, _)| command.to_lowercase())
}

/// Whether the connection was closed in the middle of an answer.
fn is_cut_short(error: &RedisError) -> bool {
    error.to_string().contains("nexpected end of input")
}

/// The server's or system's message. redis-rs puts no password into its errors.
fn described(error: &RedisError) -> String {
    match (error.code(), error.detail()) {
        (Some(code), Some(detail)) => format!("{code} {detail}"),
        _ => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use redis::parse_redis_value;

    use super::*;
    use crate::error::Charged;

    /// A server's message, as redis-rs passes it on.
    fn said(text: &str) -> RedisError {
        parse_redis_value(format!("-{text}\r\n").as_bytes()).unwrap().extract_error().unwrap_err()
    }

    /// The messages are those of Redis 7.0.15 and 8.2.3, of Valkey 8.1.8 and 9.1.2, and of Redict 7.3.6.
    #[test]
    fn what_a_user_may_not_do_and_what_a_server_lacks_is_named_on_every_version() {
        let script = Script::all().next().unwrap();
        let line = 1 + script.text().lines().position(|line| line.contains("call('SET', ")).unwrap();
        let old = "ERR The user executing the script can't run this command or subcommand";
        let new = "ERR ACL failure in script: User limiter has no permissions to run the 'set' command";
        let at_line = [
            format!("script: bd6f3018b28bbdb36260f19d3c44afed740db987, on @user_script:{line}."),
            format!("script: on @user_script:{line}."),
        ];
        let forbidden = "redis doesn't let this user run 'set' (ACL SETUSER ... +set): ";
        let lacking = "redis has no command 'set': expected Redis 7.0 or newer, or Valkey 7.2 or newer, with no \
            command renamed: ";
        let keys = "redis doesn't let this user have these keys (ACL SETUSER ... ~PREFIX:*): ";
        for (text, class, begins) in [
            (format!("{old} {}", at_line[0]), "permission", forbidden),
            (format!("{old} command: set"), "permission", forbidden),
            (format!("{new} {}", at_line[0]), "permission", forbidden),
            (format!("{new} {}", at_line[1]), "permission", forbidden),
            (new.replace("limiter", "access"), "permission", forbidden),
            ("NOPERM this user has no permissions to run the 'set' command".into(), "permission", forbidden),
            ("NOPERM User u has no permissions to run the 'set' command".into(), "permission", forbidden),
            (format!("ERR Unknown Redis command called from script {}", at_line[0]), "unsupported", lacking),
            (format!("ERR Unknown command called from script {}", at_line[1]), "unsupported", lacking),
            (format!("ERR Unknown Redict command called from script {}", at_line[1]), "unsupported", lacking),
            (
                format!("ERR This Redis command is not allowed from script {}", at_line[0]),
                "unsupported",
                "on this server, scripts may not run 'set' (tollgate::operations lists servers that allow it): ",
            ),
            (
                format!("ERR This Valkey command is not allowed from script {}", at_line[1]),
                "unsupported",
                "on this server, scripts may not run 'set' (tollgate::operations lists servers that allow it): ",
            ),
            (
                "ERR Could not find scripting engine 'lua'".into(),
                "unsupported",
                "on this server, scripts may not run what a decision needs (tollgate::operations lists servers that \
                 allow it): ",
            ),
            (
                "ERR bad lua script for redis cluster, all the keys that the script uses should be passed using the \
                 KEYS array"
                    .into(),
                "unsupported",
                "on this server, scripts may not run what a decision needs (tollgate::operations lists servers that \
                 allow it): ",
            ),
            ("ERR unknown command 'SET', with args beginning with: 'a' ".into(), "unsupported", lacking),
            (
                "NOPERM this user has no permissions to access one of the keys used as arguments".into(),
                "permission",
                keys,
            ),
            ("NOPERM No permissions to access a key".into(), "permission", keys),
            (format!("ERR ACL failure in script: No permissions to access a key {}", at_line[1]), "permission", keys),
            (
                "ERR The user executing the script can't access at least one of the keys mentioned in the command \
                 arguments script: 6ffc, on @user_script:1."
                    .into(),
                "permission",
                keys,
            ),
        ] {
            let error = from_call(&said(&text), Some(Called { script, writes_several: false }));
            assert_eq!((error.kind().name(), error.goes_to_policy()), (class, false), "{text}");
            assert_eq!(error.to_string(), format!("{begins}{text}"));
        }
    }

    #[test]
    fn what_stops_a_script_that_writes_several_keys_may_have_charged_some() {
        let script = Script::all().next().unwrap();
        let charged =
            |text: &str, writes_several| from_call(&said(text), Some(Called { script, writes_several })).charged();
        let within =
            "ERR ACL failure in script: User u has no permissions to run the 'set' command script: on @user_script:1.";
        assert_eq!([false, true].map(|several| charged(within, several)), [Charged::No, Charged::Unknown]);
        let before = "NOPERM User u has no permissions to run the 'evalsha' command";
        let read = "WRONGTYPE Operation against a key holding the wrong kind of value script: a, on @user_script:1.";
        assert_eq!([before, read].map(|text| charged(text, true)), [Charged::No; 2]);
    }
}
