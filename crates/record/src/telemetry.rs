//! Metrics and traces, with the features of these names. Labels and fields are bounded, and never a key. Messages
//! contain no varying numbers, so that logs can be grouped by them.
//!
//! All values are plain: the code that is measured knows this module, and this module knows none of it.

#![cfg_attr(not(all(feature = "metrics", feature = "tracing")), allow(unused_variables, reason = "nobody looks"))]

use std::fmt::Display;
use std::time::{Duration, SystemTime};

/// Nothing without the feature `metrics`.
macro_rules! measured {
    ($($statements:tt)*) => {
        #[cfg(feature = "metrics")]
        {
            $($statements)*
        }
    };
}

/// Nothing without the feature `tracing`.
macro_rules! traced {
    ($($statements:tt)*) => {
        #[cfg(feature = "tracing")]
        {
            $($statements)*
        }
    };
}

/// Names of metrics, with their units and meanings.
#[cfg(feature = "metrics")]
mod names {
    /// Changed rules of a database, by outcome: taken or refused. The library counts those of files under this name.
    pub(super) const RELOADS: &str = "tollgate_rules_reloads_total";
    /// API keys in requests, by outcome: valid, or why not.
    pub(super) const API_KEYS: &str = "tollgate_api_keys_total";
    /// Entries in Redis that were refused, since they weren't sealed with the secret.
    pub(super) const CACHE_REFUSED: &str = "tollgate_cache_refused_total";
    /// Failed attempts to reach and read the database, by reason.
    pub(super) const DATABASE_FAILURES: &str = "tollgate_database_failures_total";
    /// Whether the database can be reached.
    pub(super) const DATABASE: &str = "tollgate_database_connected";
    /// The age of the oldest request that isn't in the database's totals yet.
    pub(super) const TOTALS_LAG: &str = "tollgate_totals_lag_seconds";
    /// Requests lost to the database's totals for good.
    pub(super) const TOTALS_LOST: &str = "tollgate_totals_lost_total";
    /// How often this process found that somebody else has written under its name.
    pub(super) const RENAMED: &str = "tollgate_writer_renamed_total";
    /// The age of the oldest decision that isn't in the database's history yet.
    pub(super) const HISTORY_LAG: &str = "tollgate_history_lag_seconds";
    /// Decisions lost to the database's history for good.
    pub(super) const HISTORY_LOST: &str = "tollgate_history_lost_total";
}

/// Describes the metrics to the installed recorder: call it once, after installing one, beside the library's function
/// of this name.
#[cfg(feature = "metrics")]
pub fn describe_metrics() {
    use metrics::{Unit, describe_counter, describe_gauge};
    describe_counter!(names::API_KEYS, "API keys that came with requests, by outcome");
    describe_counter!(names::CACHE_REFUSED, "Cached entries in Redis that were refused: not written with this secret");
    describe_counter!(names::DATABASE_FAILURES, "Failed attempts to reach and read the database, by reason");
    describe_gauge!(names::DATABASE, "Whether the database answers: 1, or 0");
    describe_gauge!(names::TOTALS_LAG, Unit::Seconds, "Age of the oldest request that is not in the totals yet");
    describe_counter!(names::TOTALS_LOST, "Requests that are lost to the totals for good");
    describe_counter!(names::RENAMED, "Batches found under this process's name that are not its own");
    describe_gauge!(names::HISTORY_LAG, Unit::Seconds, "Age of the oldest decision that is not in the history yet");
    describe_counter!(names::HISTORY_LOST, "Decisions that are lost to the history for good");
}

/// The rules in the database have changed: the number now in force, or why they were refused.
pub(crate) fn reloaded(result: Result<usize, &dyn Display>) {
    measured! {
        let outcome = if result.is_ok() { "taken" } else { "refused" };
        metrics::counter!(names::RELOADS, "outcome" => outcome).increment(1);
    }
    traced! {
        match result {
            Ok(rules) => tracing::info!(target: "tollgate", rules, "changed rules are in force"),
            Err(error) => {
                tracing::error!(target: "tollgate", %error, "changed rules were refused: the old ones stay in force");
            }
        }
    }
}

/// An attempt to reach and read the database has failed; the reason is a word.
pub(crate) fn database_failed(reason: &'static str) {
    measured! { metrics::counter!(names::DATABASE_FAILURES, "reason" => reason).increment(1); }
}

/// The database with the rules can't be used any more. A denial is an error, since somebody must act.
pub(crate) fn database_lost(error: &dyn Display, reason: &'static str, is_denied: bool) {
    traced! {
        if is_denied {
            tracing::error!(
                target: "tollgate", reason, %error, "the database cannot be used: the last rules stay in force"
            );
        } else {
            tracing::warn!(
                target: "tollgate", reason, %error, "the database cannot be used: the last rules stay in force"
            );
        }
    }
}

/// Somebody holds a lock on a table, so its changes can't be read for now.
pub(crate) fn changes_unread(error: &dyn Display) {
    traced! {
        tracing::warn!(
            target: "tollgate",
            %error,
            "changes cannot be read until another session releases its lock"
        );
    }
}

/// The database can be reached again.
pub(crate) fn database_found() {
    traced! { tracing::info!(target: "tollgate", "the database is back"); }
}

/// A process starts with the configuration cached in Redis.
pub(crate) fn started_from_cache(error: &dyn Display, reason: &'static str, is_denied: bool) {
    traced! {
        if is_denied {
            tracing::error!(
                target: "tollgate",
                reason,
                %error,
                "the database cannot be used: the configuration cached in Redis is in force"
            );
        } else {
            tracing::warn!(
                target: "tollgate",
                reason,
                %error,
                "the database cannot be used: the configuration cached in Redis is in force"
            );
        }
    }
}

/// A configuration without rules is in force.
pub(crate) fn no_rules() {
    traced! { tracing::warn!(target: "tollgate", "the database has no rules: every request is allowed"); }
}

/// A request had an API key; the outcome is `valid`, or the error's name.
pub(crate) fn api_key(outcome: &'static str) {
    measured! { metrics::counter!(names::API_KEYS, "outcome" => outcome).increment(1); }
}

/// An entry of the configuration in Redis wasn't sealed with the secret.
pub(crate) fn cache_refused(is_first: bool) {
    measured! { metrics::counter!(names::CACHE_REFUSED).increment(1); }
    traced! {
        if is_first {
            tracing::warn!(
                target: "tollgate",
                "a cached entry in Redis was refused: another program wrote it, or one with another secret"
            );
        }
    }
}

/// Totals couldn't be written, and are kept for now.
pub(crate) fn totals_unwritten(error: &dyn Display) {
    traced! {
        tracing::warn!(target: "tollgate", %error, "totals cannot be written: they are kept, and written later");
    }
}

/// Some of the totals can't be stored, and are dropped.
pub(crate) fn totals_refused(error: &dyn Display) {
    traced! { tracing::error!(target: "tollgate", %error, "a part of the totals cannot be written: it is lost"); }
}

/// The last of the totals couldn't be written before they were given up.
pub(crate) fn totals_given_up(error: &dyn Display) {
    traced! { tracing::error!(target: "tollgate", %error, "the last totals cannot be written: they are lost"); }
}

/// The lag of the totals in the database, how many requests they have lost for good, and whether the database is
/// connected.
pub(crate) fn totals(lag: Duration, lost: u64, is_connected: bool) {
    measured! {
        metrics::gauge!(names::DATABASE).set(if is_connected { 1.0 } else { 0.0 });
        metrics::gauge!(names::TOTALS_LAG).set(lag.as_secs_f64());
        metrics::counter!(names::TOTALS_LOST).absolute(lost);
    }
}

/// Another process ended before writing everything; its last write was at this moment.
pub(crate) fn writer_killed(writer: &str, last_written: SystemTime) {
    traced! {
        let after = last_written.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
        tracing::warn!(
            target: "tollgate",
            writer,
            after_unix = after,
            "a process was killed: what it had not yet written is lost"
        );
    }
}

/// Somebody else has written under this process's name in the database; it goes on under another one.
pub(crate) fn writer_renamed(writes: &'static str, former: &str, writer: &str) {
    measured! { metrics::counter!(names::RENAMED).increment(1); }
    traced! {
        tracing::warn!(
            target: "tollgate",
            writes,
            former,
            writer,
            "the database has a batch under this process's name that is not its own: the process takes another name"
        );
    }
}

/// Decisions couldn't be written, and are kept for now, as far as there is room.
pub(crate) fn history_unwritten(error: &dyn Display) {
    traced! {
        tracing::warn!(
            target: "tollgate",
            %error,
            "history cannot be written: decisions are kept until the queue is full"
        );
    }
}

/// For the first time, there is no room for a decision.
pub(crate) fn history_full() {
    traced! { tracing::warn!(target: "tollgate", "the queue of the history is full: decisions are not recorded"); }
}

/// For the first time, decisions have times that no partition covers.
pub(crate) fn history_misdated() {
    traced! {
        tracing::warn!(
            target: "tollgate",
            "this machine's clock is a day ahead of the database's, or a month behind it: decisions are not recorded"
        );
    }
}

/// What was recorded can't be stored, and is dropped.
pub(crate) fn history_refused(error: &dyn Display) {
    traced! { tracing::error!(target: "tollgate", %error, "a part of the history cannot be written: it is lost"); }
}

/// The partitions for the next months could not be created.
pub(crate) fn partitions_unmade(error: &dyn Display) {
    traced! {
        tracing::warn!(
            target: "tollgate",
            %error,
            "partitions for the next months cannot be created: the existing ones are used"
        );
    }
}

/// The lag of the history in the database, and how many decisions it has lost for good.
pub(crate) fn history(lag: Duration, lost: u64) {
    measured! {
        metrics::gauge!(names::HISTORY_LAG).set(lag.as_secs_f64());
        metrics::counter!(names::HISTORY_LOST).absolute(lost);
    }
}
