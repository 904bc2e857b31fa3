//! The command-line tool: makes decisions by hand, replays recorded traffic, generates load and audits it, explains a
//! key's state, examines and watches a Redis.
//!
//! # Layout
//!
//! Each command has a file of its own with its name: `probe`, `replay`, `compare`, `suggest`, `inspect`, `load`,
//! `doctor`, `watch`, `rules`, `block`, `reset`, `script`; with the feature `postgres` `db`, `users`, `keys`, `audit`,
//! `stats`, and with `archive` `archive`. They share:
//!
//! - input: `options` (where to decide, how to print), `rule_arguments` and `rules_file` (which rule), `attributes`,
//!   `time_options`, `secrets`, `records` (recorded traffic);
//! - its meaning: `subject` (a rule, and what it counts), `operation`, `verdict` (what a set of rules decides on a
//!   record), `held` (permits of recorded requests), `fresh_key` (where a key without state probably is);
//! - recorded requests between the passes over them: `by_time` (sorted), `spool` (kept);
//! - statistics of decisions: `over_time` (when they were denied), `waits` (how long they would have waited);
//! - output: `line` (a decision), `database_output` (rows), `output` (parts of these), `page` (a report in HTML),
//!   `escape` (bytes as text), `messages` (on standard error);
//! - what Redis reports about itself: `info`.
//!
//! It uses only the public interfaces of the library and, where built in, of the system of record.
//!
//! Exit code: 0 allowed, 1 denied or a fault found, 2 an error (under load, a single call without a reply) or misuse.

#[cfg(feature = "archive")]
mod archive;
mod attributes;
#[cfg(feature = "postgres")]
mod audit;
mod block;
mod by_time;
mod compare;
mod completions;
#[cfg(feature = "postgres")]
mod database_output;
#[cfg(feature = "postgres")]
mod db;
mod doctor;
mod escape;
mod fresh_key;
mod held;
mod info;
mod inspect;
mod interrupted;
#[cfg(feature = "postgres")]
mod keys;
mod line;
mod load;
#[cfg(feature = "man")]
mod man;
mod messages;
mod operation;
mod options;
mod output;
mod over_time;
#[cfg_attr(not(feature = "reports"), allow(dead_code, reason = "pages are described, and nothing writes them"))]
mod page;
mod probe;
mod records;
mod refusal;
mod replay;
mod reset;
mod rule_arguments;
mod rules;
mod rules_file;
mod script;
mod secrets;
mod spool;
#[cfg(feature = "postgres")]
mod stats;
mod subject;
mod suggest;
#[cfg(feature = "postgres")]
mod time_options;
#[cfg(feature = "postgres")]
mod users;
mod verdict;
mod version;
mod waits;
#[cfg(feature = "watch")]
mod watch;

#[cfg(test)]
mod help_tests;

use std::io;
use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Parser, Subcommand};

/// A rate limiter: every decision is one atomic Lua script on Redis.
#[derive(Debug, Parser)]
#[command(name = "tollgate", version, long_version = version::text())]
#[command(max_term_width = 100, arg_required_else_help = true)]
#[command(after_help = rule_arguments::SEE_RULES)]
struct Tollgate {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Make decisions and show them.
    ///
    /// Exit code: 0 if all were allowed, 1 if any was denied, 2 on an error.
    Probe(probe::Probe),
    /// Run recorded traffic through a rule or a set of rules.
    ///
    /// On a clock taken from the records.
    ///
    /// A permit is held for the record's request_time, in seconds, and renewed meanwhile; in an access log, that is
    /// nginx's $request_time: what follows rt= or request_time=, or the first number with three decimals after the
    /// request. The times of an access log's lines are when requests ended. Where a duration isn't known, a record's
    /// permit lasts until another record gives its id back or the ttl ends, and an access log's is given back at once,
    /// with a note. With --rules, requests that the middleware refuses, since servers read their path in two ways, are
    /// denied.
    ///
    /// Exit code: 0, whatever was decided; 2 on an error.
    Replay(replay::Replay),
    /// Suggest limits from recorded traffic: the lowest that deny a given share.
    ///
    /// For each algorithm, it finds the smallest numbers under which at most the given share would have been denied:
    /// for token buckets the burst for each rate, for windows and logs the rate. Keys start unused, as in a replay.
    /// What is printed keeps to the share, and one unit less doesn't. If the share is of keys, or if every request
    /// costs one unit and the algorithm isn't sliding-window, no smaller number does either. Limits are checked by a
    /// replay before they are printed.
    ///
    /// Only acquires are counted, each by its own cost, whatever their ids; a rule with several limits gets numbers for
    /// each as if it were alone. Concurrency isn't suggested.
    ///
    /// Exit code: 0; 2 on an error.
    Suggest(suggest::Suggest),
    /// Play recorded traffic under several rules, and show what each denies.
    ///
    /// Each RULE is one text, such as "token-bucket 100/1m burst 20"; several limits in it, separated by commas, are
    /// decided together. The embedded engine decides, on a clock taken from the records, and every rule starts with no
    /// keys.
    ///
    /// Exit code: 0; 2 on an error.
    Compare(compare::Compare),
    /// Put a rule under load, and audit what it admits.
    ///
    /// The audit compares what was admitted with an exact limiter. For a run of more than 500,000 calls, it takes a
    /// sample of the keys, each with all its calls, or the beginning of the run if there are too few keys. What a
    /// policy (--on-error) answered in place of Redis is shown separately and isn't counted against Redis. With a
    /// concurrency limit, each call holds its own permits and gives them back once it is answered.
    ///
    /// Exit code: 0; 1 if the audit found calls that were wrongly admitted or denied; otherwise 2 if any measured call
    /// got no answer (it failed, or was never sent because too many were unanswered), or on an error.
    Load(load::Load),
    /// Show a key's state, decoded and explained, and when it expires.
    ///
    /// Exit code: 0; 2 on an error.
    Inspect(inspect::Inspect),
    /// Deny every call on a key for a time, whatever remains, or lift the block.
    ///
    /// A key that nobody has used yet is blocked too, with a note. If a similar key exists, with another prefix, rule's
    /// name or limit, a warning names it, and the --prefix or --name that lead there. To find it, at most 20,000 keys
    /// are scanned, within --deadline, and none if the user may not SCAN.
    ///
    /// Exit code: 0; 2 on an error.
    #[command(override_usage = rule_arguments::usage_of_rules_and_key!("block"))]
    Block(block::Block),
    /// Forget every key of a rule, in small steps, or one key of a rule of --rules.
    ///
    /// If nobody has used that one key yet, a note says so, as for block, after the same scan.
    ///
    /// Exit code: 0; 2 on an error.
    Reset(reset::Reset),
    /// Work with a service's set of rules: check, explain, compare.
    #[command(subcommand, after_long_help = rule_arguments::GRAMMAR)]
    Rules(rules::Rules),
    /// Check a Redis before you rely on it for limits.
    ///
    /// Exit code: 0; 1 if there are warnings; 2 if it is unfit or can't be reached.
    Doctor(doctor::Doctor),
    /// Watch a live Redis and, by its metrics, a service that it limits.
    ///
    /// Shows the hottest keys and rules, script calls and their microseconds, memory and evictions; with --metrics also
    /// decisions by outcome and source, their latency, batch sizes and open breakers. On a terminal the screen is
    /// redrawn each --interval: p pauses, s sorts, / filters, Tab shows another table, q quits, ? lists all keys. With
    /// --format jsonl, or where there is no terminal, each interval is one JSON object.
    ///
    /// Hottest keys are a sample, which costs Redis less than 1 % of a core: writes are seen for a part of the time,
    /// and keys are scanned in small steps. No state is read or changed, and no key counts as used. A denied call
    /// writes nothing: a key that is touched and not written is one whose calls are denied.
    ///
    /// Exit code: 0; 2 on an error, with --once also if a node or an endpoint can't be read.
    #[cfg(feature = "watch")]
    Watch(watch::Watch),
    /// Print the Lua script of an algorithm, or of several, for other languages.
    ///
    /// Also for `redis-cli --eval`. Exit code: 0; 2 on an error.
    Script(script::ScriptCommand),
    /// Print the completions of this command for a shell.
    ///
    /// Such as `tollgate completions bash > /etc/bash_completion.d/tollgate`. Exit code: 0; 2 on an error.
    Completions(completions::Completions),
    /// Print the manual page, or write one for each command.
    ///
    /// Exit code: 0; 2 on an error.
    #[cfg(feature = "man")]
    Man(man::ManPages),
    /// Create the tables of the system of record, or show which exist.
    #[cfg(feature = "postgres")]
    #[command(subcommand)]
    Db(db::Db),
    /// Move old months of the audit log to Parquet files, and query these.
    ///
    /// On disk or on S3; list, verify, query and delete them.
    ///
    /// Each month is read back and compared by count and checksum before its table is detached and dropped. If a run is
    /// interrupted at any point, the next run continues it.
    ///
    /// Exit code: 0; 1 if a month wasn't moved (a line for each says why); 2 if the database or the store can't be
    /// reached, or on misuse.
    #[cfg(feature = "archive")]
    Archive(archive::ArchiveCommand),
    /// Block users, or give them a tier or their own limits.
    ///
    /// In the system of record.
    #[cfg(feature = "postgres")]
    #[command(subcommand)]
    Users(users::Users),
    /// Create, rotate and revoke API keys in the system of record.
    #[cfg(feature = "postgres")]
    #[command(subcommand)]
    Keys(keys::Keys),
    /// Show why a user was denied at a given time.
    ///
    /// From the decisions that services have recorded.
    ///
    /// Exit code: 0; 1 if none is recorded; 2 on an error.
    #[cfg(feature = "postgres")]
    Audit(audit::Audit),
    /// Show totals of decisions: how many were denied, and how long they took.
    ///
    /// Percentiles are within 2.2 %, even over many rows. Exit code: 0; 1 if nothing is counted; 2 on an error.
    #[cfg(feature = "postgres")]
    Stats(stats::Stats),
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let arguments = match Tollgate::try_parse_from(secrets::arguments()) {
        Ok(arguments) => arguments,
        Err(error) => return misused(&error),
    };
    let outcome = match arguments.command {
        Command::Probe(probe) => probe.run().await,
        Command::Replay(replay) => replay.run().await,
        Command::Suggest(suggest) => suggest.run().await,
        Command::Compare(compare) => compare.run().await,
        Command::Load(load) => load.run().await,
        Command::Inspect(inspect) => inspect.run().await,
        Command::Block(block) => block.run().await,
        Command::Reset(reset) => reset.run().await,
        Command::Rules(rules) => rules.run().await,
        Command::Script(script) => script.run(),
        Command::Completions(completions) => completions.run(),
        #[cfg(feature = "man")]
        Command::Man(pages) => pages.run(),
        Command::Doctor(doctor) => doctor.run().await,
        #[cfg(feature = "watch")]
        Command::Watch(watch) => watch.run().await,
        #[cfg(feature = "postgres")]
        Command::Db(db) => db.run().await,
        #[cfg(feature = "archive")]
        Command::Archive(archive) => archive.run().await,
        #[cfg(feature = "postgres")]
        Command::Users(users) => users.run().await,
        #[cfg(feature = "postgres")]
        Command::Keys(keys) => keys.run().await,
        #[cfg(feature = "postgres")]
        Command::Audit(audit) => audit.run().await,
        #[cfg(feature = "postgres")]
        Command::Stats(stats) => stats.run().await,
    };
    match outcome {
        Ok(code) => code,
        Err(error) if reader_is_gone(&error) => ExitCode::SUCCESS,
        Err(error) => failed(&messages::line(&error)),
    }
}

fn failed(message: &str) -> ExitCode {
    messages::error(message);
    ExitCode::from(2)
}

/// Prints clap's message on one line; help is printed as it is.
fn misused(error: &clap::Error) -> ExitCode {
    if let Some(missing) = feature_of(error) {
        return failed(&missing);
    }
    let asked_for = matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion);
    if asked_for || error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        return match error.print() {
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => failed(&messages::line(&error.into())),
            _ if asked_for => ExitCode::SUCCESS,
            _ => ExitCode::from(2),
        };
    }
    // Before its lines are joined, which would alter what it quotes.
    let text = secrets::hidden(&error.to_string());
    let first = text.split("\n\n").next().unwrap_or_default();
    // Clap's suggestions of known names, if it has any.
    let tips = text.lines().filter_map(|line| line.trim().strip_prefix("tip: ")).map(|tip| format!("; {tip}"));
    let message = first.split_whitespace().collect::<Vec<_>>().join(" ") + &tips.collect::<String>();
    failed(message.strip_prefix("error: ").unwrap_or(&message))
}

/// The message for a command that exists but isn't built in: which feature provides it.
fn feature_of(error: &clap::Error) -> Option<String> {
    const OF_FEATURES: [(&str, &str); 8] = [
        ("watch", "watch"),
        ("man", "man"),
        ("db", "postgres"),
        ("users", "postgres"),
        ("keys", "postgres"),
        ("audit", "postgres"),
        ("stats", "postgres"),
        ("archive", "archive"),
    ];
    let Some(ContextValue::String(name)) = error.get(ContextKind::InvalidSubcommand) else { return None };
    let (name, feature) = OF_FEATURES.iter().find(|(known, _)| known == name)?;
    Some(version::lacking(name, feature))
}

/// The command's exit code, also if its reader is gone before the end.
pub(crate) fn found(code: ExitCode, printed: io::Result<()>) -> anyhow::Result<ExitCode> {
    match printed {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(code),
    }
}

/// Whether a command ended early because the reader of its output closed it.
pub(crate) fn reader_is_gone(error: &anyhow::Error) -> bool {
    messages::of_output(error).is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}
