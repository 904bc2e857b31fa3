//! Whether decisions can be made: the scripts that were called, and the commands that this user can't run.

use std::collections::BTreeMap;

use tollgate::Algorithm;

use super::super::commands::{ASKING, CALLS, EXTRAS, called_by};
use super::super::facts::{Facts, Finding, Level, Missing, Trial, Why};

/// Whether every shipped script could be called.
pub(super) fn scripts(facts: &Facts) -> Option<Finding> {
    let trials = &facts.trials;
    let refused = |of: fn(&Trial) -> Option<&super::super::facts::Refusal>| {
        let mut by_message = BTreeMap::<&str, Vec<&str>>::new();
        for trial in trials {
            if let Some(refusal) = of(trial) {
                by_message.entry(&refusal.message).or_default().push(trial.script);
            }
        }
        let one = |(message, scripts): (&str, Vec<&str>)| match scripts.len() {
            count if count == trials.len() => format!("every script: {message}"),
            _ => format!("{}: {message}", scripts.join(", ")),
        };
        by_message.into_iter().map(one).collect::<Vec<_>>().join("; ")
    };
    let took = trials.iter().filter(|trial| trial.took.is_ok()).count();
    let looked = trials.iter().filter(|trial| trial.looked.is_ok()).count();
    let some_may_not = trials.iter().all(|trial| trial.took.as_ref().err().is_none_or(|refusal| refusal.permission));
    let mut finding = if took < trials.len() {
        let level = if took > 0 && some_may_not { Level::Warning } else { Level::Unfit };
        let message = refused(|trial| trial.took.as_ref().err());
        let finding = Finding::new("scripts", level, format!("{took} of {} decide; {message}", trials.len()));
        match step(&message) {
            Some(step) => finding.advise(step),
            None => finding,
        }
    } else if looked < trials.len() {
        let message = refused(|trial| trial.looked.as_ref().err());
        let found = format!("all {took} scripts decide, but only {looked} can peek and inspect; {message}");
        Finding::new("scripts", Level::Warning, found)
    } else {
        Finding::new("scripts", Level::Ok, format!("all {took} decide, each tried on a key of its own"))
    };
    let left = trials.iter().filter(|trial| trial.left.is_some()).count();
    if left > 0 {
        finding.found += &format!("; {left} keys made for this couldn't be removed, and expire within 41s");
    }
    Some(finding.number("decide", took).number("peek", looked).number("left", left))
}

/// What to do about a refusal other than a missing permission.
fn step(message: &str) -> Option<&'static str> {
    let steps = [
        ("BUSY", "SCRIPT KILL or FUNCTION KILL ends the running script; if it has already written, wait"),
        ("OOM", "see memory"),
        ("MISCONF", "see saves"),
        ("NOREPLICAS", "see replication"),
        ("READONLY", "see replication"),
        ("MASTERDOWN", "see replication"),
        ("CLUSTERDOWN", "see cluster"),
        ("LOADING", "see loading"),
    ];
    steps.iter().find(|(code, _)| message.contains(code)).map(|(_, step)| *step)
}

/// What each missing command is needed for.
pub(super) fn commands(facts: &Facts) -> Option<Finding> {
    let (prefix, user) = (&facts.prefix, &facts.user);
    if facts.missing.is_empty() {
        let found = format!("user {user} may run every command that tollgate calls");
        return Some(Finding::new("permissions", Level::Ok, found));
    }
    let names: Vec<_> = facts.missing.iter().map(|missing| missing.command).collect();
    let of_why = |why| {
        let missing = facts.missing.iter().filter(move |missing| missing.why == why);
        missing.map(|missing| missing.command).collect::<Vec<_>>()
    };
    if !of_why(Why::Key).is_empty() {
        let found = format!("user {user} may not touch keys that begin with {prefix}:");
        let finding = Finding::new("permissions", Level::Unfit, found).number("missing", names);
        return Some(finding.advise(format!("ACL SETUSER {user} ~{prefix}:*")));
    }
    let level = facts.missing.iter().map(importance).max().unwrap_or(Level::Ok);
    let mut missing: Vec<_> = facts.missing.iter().collect();
    missing.sort_by_key(|missing| std::cmp::Reverse(importance(missing)));
    let mut by_need = Vec::<(String, Vec<&str>)>::new();
    for Missing { command, .. } in missing {
        let need = needed_for(command);
        match by_need.iter_mut().find(|(known, _)| *known == need) {
            Some((_, commands)) => commands.push(command),
            None => by_need.push((need, vec![command])),
        }
    }
    let needs = by_need.iter().map(|(need, commands)| format!("{} ({need})", commands.join(", ")));
    let found = format!("can't be run: {}", needs.collect::<Vec<_>>().join("; "));
    let mut finding = Finding::new("permissions", level, found).number("missing", names);
    let (forbidden, unknown) = (of_why(Why::Command), of_why(Why::Unknown));
    if !forbidden.is_empty() {
        let rights: Vec<_> = forbidden.iter().map(|command| format!("+{}", command.to_ascii_lowercase())).collect();
        finding = finding.advise(format!("ACL SETUSER {user} {}", rights.join(" ")));
    }
    if !unknown.is_empty() {
        let step = format!("the server doesn't know {}: see rename-command in its redis.conf", unknown.join(", "));
        finding = finding.advise(step);
    }
    Some(finding)
}

fn importance(missing: &Missing) -> Level {
    let command = missing.command;
    if EXTRAS.iter().any(|(extra, _)| *extra == command) {
        return Level::Note;
    }
    if command.ends_with("_RO") || command == "DEL" {
        return Level::Warning;
    }
    if CALLS.contains(&command) {
        return Level::Unfit;
    }
    // Unfit if most algorithms need it; a warning if only some do, which may not be in use.
    let (deciding, all) = (deciding_by(command).len(), Algorithm::all().count());
    if deciding * 2 > all { Level::Unfit } else { Level::Warning }
}

/// What doesn't work without the command.
fn needed_for(command: &str) -> String {
    if let Some((_, need)) = EXTRAS.iter().find(|(extra, _)| *extra == command) {
        return format!("for {need}");
    }
    let deciding = deciding_by(command);
    match command {
        _ if command.ends_with("_RO") => "to peek and inspect".into(),
        _ if CALLS.contains(&command) => "for every decision".into(),
        "MGET" => "for concurrent calls".into(),
        "DEL" => "to reset, refund and release".into(),
        ASKING => "for keys whose slot is moving".into(),
        _ if deciding.is_empty() => "to inspect".into(),
        _ if deciding.len() == Algorithm::all().count() => "for every algorithm".into(),
        _ => format!("for {}", deciding.join(", ")),
    }
}

/// The algorithms whose decisions may call the command.
fn deciding_by(command: &str) -> Vec<String> {
    let calls = |algorithm: &Algorithm| {
        let called = called_by(algorithm.script());
        called.iter().any(|called| called.command == command && !called.only_inspects)
    };
    Algorithm::all().filter(calls).map(|algorithm| algorithm.to_string()).collect()
}
