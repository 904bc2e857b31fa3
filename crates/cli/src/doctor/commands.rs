//! The commands that decisions need, and how to try each without changing anything.

use tollgate::redis::{Cmd, RedisError, cmd};
use tollgate::{Algorithm, Script};

use super::facts::Why;

/// The ways to call a script. Decisions need the first two, peeks the others.
pub(super) const CALLS: [&str; 4] = ["EVALSHA", "EVAL", "EVALSHA_RO", "EVAL_RO"];
/// Commands that decisions don't need, and what needs them.
pub(super) const EXTRAS: [(&str, &str); 3] =
    [("SCAN", "`tollgate reset`"), ("UNLINK", "`tollgate reset`"), ("DBSIZE", "`tollgate reset`")];

/// What a cluster's client sends before a call on a slot that is moving to this node.
pub(super) const ASKING: &str = "ASKING";

/// A command that a script calls, as the headers of its files list it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Called {
    pub(super) command: &'static str,
    /// Called only by `inspect`.
    pub(super) only_inspects: bool,
}

/// Every command that a decision of this algorithm may call.
pub(super) fn called_by(script: &'static Script) -> Vec<Called> {
    let mut lines = script.text().lines();
    let mut called = Vec::new();
    while lines.any(|line| line == "-- Commands") {
        let section = lines.by_ref().take_while(|line| line.starts_with("--  "));
        let mut only_inspects = false;
        for part in section.flat_map(|line| line.trim_start_matches('-').split_inclusive(';')) {
            let words = part.split(|character: char| !character.is_alphabetic()).filter(|word| !word.is_empty());
            for word in words {
                match word {
                    "inspect" => only_inspects = true,
                    _ if word.len() > 1 && word.bytes().all(|byte| byte.is_ascii_uppercase()) => {
                        called.push(Called { command: word, only_inspects });
                    }
                    _ => {}
                }
            }
            only_inspects &= !part.ends_with(';');
        }
    }
    called
}

/// Every command to try, once each.
pub(super) fn all() -> Vec<&'static str> {
    let mut all: Vec<_> = CALLS.to_vec();
    all.extend(Algorithm::all().flat_map(|algorithm| called_by(algorithm.script())).map(|called| called.command));
    all.extend(EXTRAS.map(|(command, _)| command));
    let mut seen = std::collections::BTreeSet::new();
    all.retain(|command| seen.insert(*command));
    all
}

/// A call that changes nothing, since the key doesn't exist; it only shows whether the command is permitted.
pub(super) fn attempt(command: &str, key: &str) -> Cmd {
    // Any digest will do.
    const NOBODY: &str = "0000000000000000000000000000000000000000";
    let mut attempt = cmd(command);
    match command {
        "EVALSHA" | "EVALSHA_RO" => attempt.arg(NOBODY).arg(1).arg(key),
        "EVAL" | "EVAL_RO" => attempt.arg("return 0").arg(1).arg(key),
        "TIME" | "DBSIZE" | ASKING => &mut attempt,
        "SCAN" => attempt.arg(0).arg("MATCH").arg(key).arg("COUNT").arg(1),
        "SET" => attempt.arg(key).arg("").arg("XX"),
        "SETRANGE" => attempt.arg(key).arg(0).arg(""),
        "GETRANGE" | "ZRANGE" | "ZCOUNT" | "ZREMRANGEBYSCORE" => attempt.arg(key).arg(0).arg(0),
        "PEXPIRE" | "PEXPIREAT" | "ZREM" | "ZSCORE" => attempt.arg(key).arg(1),
        "ZADD" => attempt.arg(key).arg("XX").arg(1).arg(1),
        _ => attempt.arg(key),
    };
    attempt
}

/// Why the command can't be run, if the error says so.
pub(super) fn why(error: &RedisError) -> Option<Why> {
    let detail = error.detail().unwrap_or_default();
    match error.code() {
        // Both cases have the same code.
        Some("NOPERM") if detail.contains(" run the ") => Some(Why::Command),
        Some("NOPERM") => Some(Why::Key),
        _ if detail.starts_with("unknown command") => Some(Why::Unknown),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_say_what_is_called_and_what_only_inspects() {
        let called = called_by(Algorithm::TokenBucket.script());
        let names: Vec<_> = called.iter().map(|called| called.command).collect();
        assert_eq!(names, ["TIME", "GET", "MGET", "SET", "SETRANGE", "DEL", "PTTL"]);
        let inspecting: Vec<_> = called.iter().filter(|called| called.only_inspects).collect();
        assert_eq!(inspecting, [&Called { command: "PTTL", only_inspects: true }]);
        for algorithm in Algorithm::all() {
            let called = called_by(algorithm.script());
            assert!(called.iter().any(|called| called.command == "DEL" && !called.only_inspects), "{algorithm}");
        }
    }

    #[test]
    fn every_command_has_an_attempt_of_its_own_kind() {
        let alone = ["GET", "MGET", "DEL", "PTTL", "STRLEN", "EXISTS", "UNLINK", "TIME", "DBSIZE"];
        for command in all() {
            let words = attempt(command, "k").args_iter().count();
            let expected = match command {
                "TIME" | "DBSIZE" => 1,
                _ if alone.contains(&command) => 2,
                _ => 3,
            };
            assert!(words >= expected, "{command}: {words} words");
            assert!(alone.contains(&command) || words > 2, "{command}: what does it take beside a key?");
        }
    }
}
