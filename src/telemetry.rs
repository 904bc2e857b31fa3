//! Metrics and traces, with the features of these names. Labels and fields are bounded: rules, algorithms, outcomes and
//! what answered, never a key. Messages contain no varying numbers, so that logs can be grouped by them.

use std::future::Future;
#[cfg(any(feature = "metrics", feature = "rules"))]
use std::sync::Arc;
#[cfg(feature = "metrics")]
use std::time::Instant;

use crate::call::Mode;
use crate::decision::Decision;
use crate::error::Error;
use crate::rule::{OnError, Rule};

/// Names of metrics, with their units and meanings.
#[cfg(feature = "metrics")]
pub(crate) mod names {
    /// Decisions, by rule, algorithm, outcome (allowed, denied or error) and source (what answered).
    pub(crate) const DECISIONS: &str = "tollgate_decisions_total";
    /// How long a call for a decision took, by source; when a caller waits for its turn, each call counts.
    pub(crate) const DURATION: &str = "tollgate_decision_duration_seconds";
    /// Calls without a decision, by class.
    pub(crate) const ERRORS: &str = "tollgate_errors_total";
    /// Keys that went to Redis together.
    pub(crate) const BATCH: &str = "tollgate_batch_keys";
    /// Open breakers: at most one for each Redis and tokio runtime.
    pub(crate) const BREAKERS: &str = "tollgate_breakers_open";
    /// Releases, cancellations and the like that were never sent, since too many were waiting.
    pub(crate) const UNSENT: &str = "tollgate_background_dropped_total";
    /// Rule reloads, from files or a database, by outcome: taken or refused.
    #[cfg(feature = "rules")]
    pub(crate) const RELOADS: &str = "tollgate_rules_reloads_total";
    /// Requests decided by a set of rules, by rule, outcome (allowed, denied or error) and reason (for an error, its
    /// class).
    #[cfg(feature = "rules")]
    pub(crate) const VERDICTS: &str = "tollgate_verdicts_total";
    /// API keys in requests, by outcome: valid, or why not.
    #[cfg(feature = "postgres")]
    pub(crate) const API_KEYS: &str = "tollgate_api_keys_total";
    /// Entries in Redis that were refused, since they weren't sealed with the secret.
    #[cfg(feature = "postgres")]
    pub(crate) const CACHE_REFUSED: &str = "tollgate_cache_refused_total";
    /// Whether the database can be reached.
    #[cfg(feature = "postgres")]
    pub(crate) const DATABASE: &str = "tollgate_database_connected";
    /// The age of the oldest request that isn't in the database's totals yet.
    #[cfg(feature = "postgres")]
    pub(crate) const TOTALS_LAG: &str = "tollgate_totals_lag_seconds";
    /// Requests lost to the database's totals for good.
    #[cfg(feature = "postgres")]
    pub(crate) const TOTALS_LOST: &str = "tollgate_totals_lost_total";
    /// The age of the oldest decision that isn't in the database's history yet.
    #[cfg(feature = "postgres")]
    pub(crate) const HISTORY_LAG: &str = "tollgate_history_lag_seconds";
    /// Decisions lost to the database's history for good.
    #[cfg(feature = "postgres")]
    pub(crate) const HISTORY_LOST: &str = "tollgate_history_lost_total";
    /// What shadow rules would have done, by rule and outcome.
    #[cfg(feature = "rules")]
    pub(crate) const SHADOWS: &str = "tollgate_shadow_verdicts_total";
}

/// Describes the metrics to the installed recorder: call it once, after installing one.
#[cfg(feature = "metrics")]
pub fn describe_metrics() {
    use metrics::{Unit, describe_counter, describe_gauge, describe_histogram};
    describe_counter!(names::DECISIONS, "Decisions, by rule, algorithm, outcome and source");
    describe_histogram!(names::DURATION, Unit::Seconds, "How long a call for a decision took, by source");
    describe_counter!(names::ERRORS, "Calls without a decision, by class");
    describe_histogram!(names::BATCH, "Keys that went to Redis together");
    describe_gauge!(names::BREAKERS, "How many Redis are not asked for a while, since they did not answer");
    describe_counter!(names::UNSENT, "Releases, cancellations and the like never sent: too many were waiting");
    #[cfg(feature = "postgres")]
    {
        describe_counter!(names::API_KEYS, "API keys that came with requests, by outcome");
        describe_counter!(names::CACHE_REFUSED, "Cached entries in Redis that were refused: somebody else wrote them");
        describe_gauge!(names::DATABASE, "Whether the database is heard from: 1, or 0");
        describe_gauge!(names::TOTALS_LAG, Unit::Seconds, "Age of the oldest request that is not in the totals yet");
        describe_counter!(names::TOTALS_LOST, "Requests that the totals will never have");
        describe_gauge!(names::HISTORY_LAG, Unit::Seconds, "Age of the oldest decision that is not in the history yet");
        describe_counter!(names::HISTORY_LOST, "Decisions that the history will never have");
    }
    #[cfg(feature = "rules")]
    {
        describe_counter!(names::RELOADS, "Changed rules, of files or a database, by outcome");
        describe_counter!(names::VERDICTS, "Requests by a set of rules, by rule, outcome and reason");
        describe_counter!(names::SHADOWS, "What shadow rules would have done, by rule and outcome");
    }
}

/// A call in progress.
pub(crate) struct Observed {
    /// None for calls that aren't decisions, such as a block.
    #[cfg(feature = "metrics")]
    began: Option<Instant>,
    #[cfg(feature = "tracing")]
    span: tracing::Span,
}

impl Observed {
    #[cfg_attr(not(feature = "tracing"), allow(unused_variables, reason = "nobody looks"))]
    pub(crate) fn begin(rule: &Rule, mode: Mode) -> Self {
        Self {
            #[cfg(feature = "metrics")]
            began: matches!(mode, Mode::Acquire | Mode::Reserve | Mode::AtMost).then(Instant::now),
            #[cfg(feature = "tracing")]
            span: tracing::debug_span!(
                target: "tollgate",
                "decision",
                rule = rule.name(),
                operation = mode.text(),
                allowed = tracing::field::Empty,
                source = tracing::field::Empty,
                error = tracing::field::Empty,
            ),
        }
    }

    #[cfg(feature = "tracing")]
    pub(crate) fn around<F: Future>(&self, decision: F) -> impl Future<Output = F::Output> {
        tracing::Instrument::instrument(decision, self.span.clone())
    }

    #[cfg(not(feature = "tracing"))]
    #[allow(clippy::unused_self, reason = "as with traces")]
    pub(crate) fn around<F: Future>(&self, decision: F) -> impl Future<Output = F::Output> {
        decision
    }

    #[cfg_attr(not(feature = "metrics"), allow(unused_variables, reason = "nobody counts"))]
    pub(crate) fn end(self, decided: &Result<Decision, Error>) {
        #[cfg(feature = "tracing")]
        match decided {
            Ok(decision) => {
                self.span.record("allowed", decision.allowed);
                self.span.record("source", decision.by.name());
            }
            Err(error) => {
                self.span.record("error", error.class());
            }
        }
        #[cfg(feature = "metrics")]
        if let Some(began) = self.began {
            let source = decided.as_ref().map_or("none", |decision| decision.by.name());
            metrics::histogram!(names::DURATION, "source" => source).record(began.elapsed());
        }
    }
}

/// The answer to a caller, counted once, however many calls it took.
#[cfg_attr(not(feature = "metrics"), allow(unused_variables, reason = "nobody counts"))]
pub(crate) fn decided(rule: &Rule, decided: Result<&Decision, &Error>) {
    #[cfg(feature = "metrics")]
    {
        use metrics::{SharedString, counter};
        let quota = &rule.scoped_limits()[0].quota;
        let name =
            quota.rule_name().map_or(SharedString::const_str(""), |name| SharedString::from_shared(Arc::clone(name)));
        let algorithm = if rule.scoped_limits().len() > 1 { "several" } else { quota.algorithm().name() };
        let (outcome, source) = match decided {
            Ok(decision) => (if decision.allowed { "allowed" } else { "denied" }, decision.by.name()),
            Err(error) => {
                counter!(names::ERRORS, "class" => error.class()).increment(1);
                ("error", "none")
            }
        };
        counter!(names::DECISIONS, "rule" => name, "algorithm" => algorithm, "outcome" => outcome, "source" => source)
            .increment(1);
    }
}

/// The number of keys sent to Redis together.
#[cfg_attr(not(feature = "metrics"), allow(unused_variables, reason = "nobody counts"))]
pub(crate) fn sent_together(keys: impl FnOnce() -> usize) {
    #[cfg(feature = "metrics")]
    #[allow(clippy::cast_precision_loss, reason = "batches have far less than 2^52 keys")]
    metrics::histogram!(names::BATCH).record(keys() as f64);
}

/// Redis won't be asked for a while.
#[cfg_attr(not(feature = "tracing"), allow(unused_variables, reason = "nobody traces"))]
pub(crate) fn breaker_opened(error: &Error) {
    #[cfg(feature = "metrics")]
    metrics::gauge!(names::BREAKERS).increment(1);
    #[cfg(feature = "tracing")]
    tracing::warn!(target: "tollgate", error = error.class(), "redis is not asked for a while: it did not answer");
}

/// Redis answered again.
pub(crate) fn breaker_closed() {
    breaker_gone();
    #[cfg(feature = "tracing")]
    tracing::info!(target: "tollgate", "redis answers again");
}

/// The Redis with this breaker is no longer used.
pub(crate) fn breaker_gone() {
    #[cfg(feature = "metrics")]
    metrics::gauge!(names::BREAKERS).decrement(1);
}

/// A rule's policy, or the engine in this process, answered in Redis's place.
#[cfg_attr(not(feature = "tracing"), allow(unused_variables, reason = "nobody traces"))]
pub(crate) fn answered_instead(rule: &Rule, policy: OnError, error: &Error) {
    #[cfg(feature = "tracing")]
    {
        let policy = match policy {
            OnError::Closed => "closed",
            OnError::Open => "open",
            OnError::Local { .. } => "local",
        };
        let (rule, class) = (rule.name(), error.class());
        if error.is_outage() {
            // The breaker has reported it already.
            tracing::debug!(target: "tollgate", rule, policy, error = class, "the rule's policy answers for redis");
        } else {
            tracing::warn!(target: "tollgate", rule, policy, error = class, "the rule's policy answers for redis");
        }
    }
}

/// A permit in use has expired, or Redis has forgotten it: others may take as many again.
#[cfg_attr(not(feature = "tracing"), allow(unused_variables, reason = "nobody traces"))]
pub(crate) fn permit_lost(rule: &Rule) {
    #[cfg(feature = "tracing")]
    tracing::warn!(target: "tollgate", rule = rule.name(), "a permit that is in use has expired: others may hold it too");
}

/// A permit in use was given back because its rule's longest hold is over.
#[cfg_attr(not(feature = "tracing"), allow(unused_variables, reason = "nobody traces"))]
pub(crate) fn permit_overdue(rule: &Rule) {
    #[cfg(feature = "tracing")]
    tracing::warn!(target: "tollgate", rule = rule.name(), "a permit in use was held for longest: it is given back");
}

/// A release, a cancellation or the like isn't sent: too many are waiting.
pub(crate) fn background_full() {
    #[cfg(feature = "metrics")]
    metrics::counter!(names::UNSENT).increment(1);
    #[cfg(feature = "tracing")]
    tracing::debug!(target: "tollgate", "what was taken is not given back: too much waits to be");
}

/// Rules use an attribute that the middleware never sets.
#[cfg(feature = "http")]
#[cfg_attr(not(feature = "tracing"), allow(unused_variables, reason = "nobody traces"))]
pub(crate) fn unsourced(attribute: &str) {
    #[cfg(feature = "tracing")]
    tracing::warn!(target: "tollgate", attribute, "rules ask for an attribute that no request has");
}

/// Rules use the client's address, and the server doesn't provide it. This is a mistake in the service's own code, so it
/// is said even if nobody traces, once.
#[cfg(feature = "http")]
pub(crate) fn no_peer(why: &str) {
    static SAID: std::sync::Once = std::sync::Once::new();
    SAID.call_once(|| {
        eprintln!("tollgate: {why}");
        #[cfg(feature = "tracing")]
        tracing::error!(target: "tollgate", why, "rules use an address that no request has");
    });
}

/// A request was refused because no decision could be made.
#[cfg(feature = "http")]
#[cfg_attr(not(feature = "tracing"), allow(unused_variables, reason = "nobody traces"))]
pub(crate) fn unanswered(error: &Error) {
    #[cfg(feature = "tracing")]
    if error.is_input() {
        tracing::error!(target: "tollgate", %error, "a request is refused: its rule cannot be decided");
    } else if error.is_outage() {
        // The breaker has reported it already: this would be a line for each request.
        tracing::debug!(target: "tollgate", error = error.class(), "a request is refused: no decision could be made");
    } else {
        tracing::warn!(target: "tollgate", error = error.class(), "a request is refused: no decision could be made");
    }
}

/// A request's final cost couldn't be charged.
#[cfg(feature = "http")]
#[cfg_attr(not(any(feature = "tracing", feature = "metrics")), allow(unused_variables, reason = "nobody looks"))]
pub(crate) fn unsettled(error: &Error) {
    #[cfg(feature = "metrics")]
    metrics::counter!(names::ERRORS, "class" => error.class()).increment(1);
    #[cfg(feature = "tracing")]
    tracing::warn!(target: "tollgate", error = error.class(), "a cost is not settled: what was charged at first stays");
}

/// The other side asked for a pause, which couldn't be recorded.
#[cfg(feature = "http")]
#[cfg_attr(not(feature = "tracing"), allow(unused_variables, reason = "nobody traces"))]
pub(crate) fn unheeded(error: &Error) {
    #[cfg(feature = "tracing")]
    tracing::warn!(target: "tollgate", %error, "the other side asks to be left alone, and its key is not blocked");
}

/// A file of rules that can be used has a value that probably doesn't match as meant.
#[cfg(feature = "rules")]
#[cfg_attr(not(feature = "tracing"), allow(unused_variables, reason = "nobody traces"))]
pub(crate) fn doubtful_rule(warning: &crate::rules::Fault) {
    #[cfg(feature = "tracing")]
    tracing::warn!(target: "tollgate", %warning, "a rule probably does not match as meant");
}

/// Changed rules, from a file or a database, were taken or, with the error, refused.
#[cfg(feature = "rules")]
#[cfg_attr(not(feature = "tracing"), allow(unused_variables, reason = "nobody traces"))]
pub(crate) fn reloaded(result: Result<&crate::rules::RuleSet, &dyn std::error::Error>) {
    #[cfg(feature = "metrics")]
    {
        let outcome = if result.is_ok() { "taken" } else { "refused" };
        metrics::counter!(names::RELOADS, "outcome" => outcome).increment(1);
    }
    #[cfg(feature = "tracing")]
    match result {
        Ok(rules) => tracing::info!(target: "tollgate", rules = rules.len(), "changed rules are in force"),
        Err(error) => {
            tracing::error!(target: "tollgate", %error, "changed rules are refused: those before stay in force")
        }
    }
}

/// The database with the rules can't be reached any more.
#[cfg(feature = "postgres")]
#[cfg_attr(not(feature = "tracing"), allow(unused_variables, reason = "nobody traces"))]
pub(crate) fn database_lost(error: &crate::postgres::PostgresError) {
    #[cfg(feature = "tracing")]
    tracing::warn!(target: "tollgate", %error, "the database is away: the last rules stay in force");
}

/// Somebody holds a lock on a table, so its changes can't be read for now.
#[cfg(feature = "postgres")]
#[cfg_attr(not(feature = "tracing"), allow(unused_variables, reason = "nobody traces"))]
pub(crate) fn changes_unread(error: &crate::postgres::PostgresError) {
    #[cfg(feature = "tracing")]
    tracing::warn!(target: "tollgate", %error, "changes cannot be read: others are, and these once they can");
}

/// The database can be reached again.
#[cfg(feature = "postgres")]
pub(crate) fn database_found() {
    #[cfg(feature = "tracing")]
    tracing::info!(target: "tollgate", "the database is there again");
}

/// A process starts with the configuration cached in Redis.
#[cfg(feature = "postgres")]
#[cfg_attr(not(feature = "tracing"), allow(unused_variables, reason = "nobody traces"))]
pub(crate) fn started_from_cache(error: &crate::postgres::PostgresError) {
    #[cfg(feature = "tracing")]
    tracing::warn!(target: "tollgate", %error, "the database is away: the configuration cached in redis is in force");
}

/// A configuration without rules is in force.
#[cfg(feature = "postgres")]
pub(crate) fn no_rules() {
    #[cfg(feature = "tracing")]
    tracing::warn!(target: "tollgate", "the database has no rules: every request is allowed");
}

/// Totals couldn't be written, and are kept for now.
#[cfg(feature = "postgres")]
#[cfg_attr(not(feature = "tracing"), allow(unused_variables, reason = "nobody traces"))]
pub(crate) fn totals_unwritten(error: &crate::postgres::PostgresError) {
    #[cfg(feature = "tracing")]
    tracing::warn!(target: "tollgate", %error, "totals cannot be written: they are kept until they can");
}

/// The lag of the totals in the database, how many requests they have lost for good, and whether the database is
/// connected.
#[cfg(feature = "postgres")]
#[cfg_attr(not(feature = "metrics"), allow(unused_variables, reason = "nobody counts"))]
pub(crate) fn totals(lag: std::time::Duration, lost: u64, is_connected: bool) {
    #[cfg(feature = "metrics")]
    {
        metrics::gauge!(names::DATABASE).set(if is_connected { 1.0 } else { 0.0 });
        metrics::gauge!(names::TOTALS_LAG).set(lag.as_secs_f64());
        metrics::counter!(names::TOTALS_LOST).absolute(lost);
    }
}

/// Decisions couldn't be written, and are kept for now, as far as there is room.
#[cfg(feature = "postgres")]
#[cfg_attr(not(feature = "tracing"), allow(unused_variables, reason = "nobody traces"))]
pub(crate) fn history_unwritten(error: &crate::postgres::PostgresError) {
    #[cfg(feature = "tracing")]
    tracing::warn!(target: "tollgate", %error, "history cannot be written: it is kept as far as there is room");
}

/// For the first time, there is no room for a decision.
#[cfg(feature = "postgres")]
pub(crate) fn history_full() {
    #[cfg(feature = "tracing")]
    tracing::warn!(target: "tollgate", "the queue of the history is full: decisions are not recorded");
}

/// For the first time, decisions have times that no partition covers.
#[cfg(feature = "postgres")]
pub(crate) fn history_misdated() {
    #[cfg(feature = "tracing")]
    tracing::warn!(target: "tollgate", "this machine's clock is a day ahead of the database's, or a month behind it: decisions are not recorded");
}

/// What was recorded can't be stored, and is dropped.
#[cfg(feature = "postgres")]
#[cfg_attr(not(feature = "tracing"), allow(unused_variables, reason = "nobody traces"))]
pub(crate) fn history_refused(error: &crate::postgres::PostgresError) {
    #[cfg(feature = "tracing")]
    tracing::error!(target: "tollgate", %error, "a part of the history cannot be written: it is lost");
}

/// The partitions for the next months could not be created.
#[cfg(feature = "postgres")]
#[cfg_attr(not(feature = "tracing"), allow(unused_variables, reason = "nobody traces"))]
pub(crate) fn partitions_unmade(error: &crate::postgres::PostgresError) {
    #[cfg(feature = "tracing")]
    tracing::warn!(target: "tollgate", %error, "partitions cannot be made: those that there are will do");
}

/// The lag of the history in the database, and how many decisions it has lost for good.
#[cfg(feature = "postgres")]
#[cfg_attr(not(feature = "metrics"), allow(unused_variables, reason = "nobody counts"))]
pub(crate) fn history(lag: std::time::Duration, lost: u64) {
    #[cfg(feature = "metrics")]
    {
        metrics::gauge!(names::HISTORY_LAG).set(lag.as_secs_f64());
        metrics::counter!(names::HISTORY_LOST).absolute(lost);
    }
}

/// A request had an API key: a valid one, or one with this error.
#[cfg(feature = "postgres")]
#[cfg_attr(not(feature = "metrics"), allow(unused_variables, reason = "nobody counts"))]
pub(crate) fn api_key(error: Option<&crate::postgres::ApiKeyError>) {
    #[cfg(feature = "metrics")]
    {
        let outcome = error.map_or("valid", crate::postgres::ApiKeyError::name);
        metrics::counter!(names::API_KEYS, "outcome" => outcome).increment(1);
    }
}

/// An entry of the configuration in Redis wasn't sealed with the secret.
#[cfg(feature = "postgres")]
#[cfg_attr(not(feature = "tracing"), allow(unused_variables, reason = "nobody traces"))]
pub(crate) fn cache_refused(is_first: bool) {
    #[cfg(feature = "metrics")]
    metrics::counter!(names::CACHE_REFUSED).increment(1);
    #[cfg(feature = "tracing")]
    if is_first {
        tracing::warn!(target: "tollgate", "an entry of the configuration in Redis was refused: another program wrote it, or one with another secret");
    }
}

/// Another process ended before writing everything; its last write was at this moment.
#[cfg(feature = "postgres")]
#[cfg_attr(not(feature = "tracing"), allow(unused_variables, reason = "nobody traces"))]
pub(crate) fn writer_killed(writer: &str, last_written: std::time::SystemTime) {
    #[cfg(feature = "tracing")]
    {
        let after = last_written.duration_since(std::time::UNIX_EPOCH).unwrap_or_default().as_secs();
        tracing::warn!(target: "tollgate", writer, after_unix = after, "a process was killed: what it had not yet written is lost");
    }
}

/// The verdict of a set of rules on a request; or the error, and the rule that couldn't decide, if one applied.
#[cfg(feature = "rules")]
#[cfg_attr(not(feature = "metrics"), allow(unused_variables, reason = "nobody counts"))]
pub(crate) fn judged(judged: Result<&crate::rules::Verdict, (Option<&Arc<str>>, &Error)>) {
    #[cfg(feature = "metrics")]
    {
        use metrics::{SharedString, counter};
        let name = |rule: Option<&Arc<str>>| {
            rule.map_or(SharedString::const_str(""), |rule| SharedString::from_shared(Arc::clone(rule)))
        };
        let outcome = |allowed| if allowed { "allowed" } else { "denied" };
        let (rule, outcome_of_all, reason) = match judged {
            Ok(verdict) => (verdict.rule.as_ref(), outcome(verdict.allowed), verdict.reason.name()),
            Err((rule, error)) => (rule, "error", error.class()),
        };
        counter!(names::VERDICTS, "rule" => name(rule), "outcome" => outcome_of_all, "reason" => reason).increment(1);
        for shadow in judged.iter().flat_map(|verdict| &verdict.shadows) {
            let rule = name(Some(&shadow.rule));
            counter!(names::SHADOWS, "rule" => rule, "outcome" => outcome(shadow.allowed)).increment(1);
        }
    }
}
