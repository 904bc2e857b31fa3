//! Metrics and traces, with the features of these names. Labels and fields are bounded: rules, algorithms, outcomes and
//! what answered, never a key. Messages contain no varying numbers, so that logs can be grouped by them.
//!
//! All values are plain: measured code depends on this module, which depends on none of it.

#![cfg_attr(
    not(all(feature = "metrics", feature = "tracing", feature = "http")),
    allow(unused_variables, unused_imports, dead_code, reason = "unused without these features")
)]

use std::fmt::Display;
use std::sync::Arc;
use std::time::Instant;

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

/// How a call ended: whether it was allowed, and what answered; or the class of its error.
pub(crate) type Ended = Result<(bool, &'static str), &'static str>;

/// Names of metrics, with their units and meanings.
#[cfg(feature = "metrics")]
mod names {
    /// Decisions, by rule, algorithm, outcome (allowed, denied or error) and source (what answered).
    pub(super) const DECISIONS: &str = "tollgate_decisions_total";
    /// How long a call for a decision took, by source; when a caller waits for its turn, each call counts.
    pub(super) const DURATION: &str = "tollgate_decision_duration_seconds";
    /// Calls without a decision, by class.
    pub(super) const ERRORS: &str = "tollgate_errors_total";
    /// Keys in a batch that was sent to Redis.
    pub(super) const BATCH: &str = "tollgate_batch_keys";
    /// Open breakers: at most one for each Redis and tokio runtime.
    pub(super) const BREAKERS: &str = "tollgate_breakers_open";
    /// Releases, cancellations and the like that were never sent, since too many were waiting.
    pub(super) const UNSENT: &str = "tollgate_background_dropped_total";
    /// Rule reloads, by outcome: taken or refused.
    pub(super) const RELOADS: &str = "tollgate_rules_reloads_total";
    /// Requests decided by a set of rules, by rule, outcome (allowed, denied or error) and reason (for an error, its
    /// class).
    pub(super) const VERDICTS: &str = "tollgate_verdicts_total";
    /// What shadow rules would have done, by rule and outcome.
    pub(super) const SHADOWS: &str = "tollgate_shadow_verdicts_total";
}

/// Describes the metrics to the installed recorder: call it once, after installing one.
#[cfg(feature = "metrics")]
pub fn describe_metrics() {
    use metrics::{Unit, describe_counter, describe_gauge, describe_histogram};
    describe_counter!(names::DECISIONS, "Decisions, by rule, algorithm, outcome and source");
    describe_histogram!(names::DURATION, Unit::Seconds, "How long a call for a decision took, by source");
    describe_counter!(names::ERRORS, "Calls without a decision, by class");
    describe_histogram!(names::BATCH, "Keys in a batch that was sent to Redis");
    describe_gauge!(names::BREAKERS, "Open breakers, at most one for each Redis and tokio runtime");
    describe_counter!(names::UNSENT, "Releases, cancellations and the like never sent: too many were waiting");
    if cfg!(feature = "rules") {
        describe_counter!(names::RELOADS, "Reloads of changed rules, from files or a database, by outcome");
        describe_counter!(names::VERDICTS, "Requests decided by a set of rules, by rule, outcome and reason");
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
    pub(crate) fn begin(rule: Option<&str>, operation: &'static str, decides: bool) -> Self {
        Self {
            #[cfg(feature = "metrics")]
            began: decides.then(Instant::now),
            #[cfg(feature = "tracing")]
            span: tracing::debug_span!(
                target: "tollgate",
                "decision",
                rule,
                operation,
                allowed = tracing::field::Empty,
                source = tracing::field::Empty,
                error = tracing::field::Empty,
            ),
        }
    }

    /// Polls its future within its span.
    pub(crate) fn within<T>(&self, poll: impl FnOnce() -> T) -> T {
        #[cfg(feature = "tracing")]
        let _entered = self.span.enter();
        poll()
    }

    pub(crate) fn end(self, ended: Ended) {
        traced! {
            match ended {
                Ok((allowed, source)) => {
                    self.span.record("allowed", allowed);
                    self.span.record("source", source);
                }
                Err(class) => {
                    self.span.record("error", class);
                }
            }
        }
        measured! {
            if let Some(began) = self.began {
                let source = ended.map_or("none", |(_, source)| source);
                metrics::histogram!(names::DURATION, "source" => source).record(began.elapsed());
            }
        }
    }
}

/// The answer to a caller, counted once, however many calls it took.
pub(crate) fn decided(rule: Option<&Arc<str>>, algorithm: &'static str, ended: Ended) {
    measured! {
        let (outcome, source) = match ended {
            Ok((allowed, source)) => (outcome(allowed), source),
            Err(class) => {
                metrics::counter!(names::ERRORS, "class" => class).increment(1);
                ("error", "none")
            }
        };
        metrics::counter!(
            names::DECISIONS, "rule" => label(rule), "algorithm" => algorithm, "outcome" => outcome, "source" => source
        )
        .increment(1);
    }
}

#[cfg(feature = "metrics")]
fn outcome(allowed: bool) -> &'static str {
    if allowed { "allowed" } else { "denied" }
}

/// A rule's name as a label, without a copy.
#[cfg(feature = "metrics")]
fn label(rule: Option<&Arc<str>>) -> metrics::SharedString {
    use metrics::SharedString;
    rule.map_or(SharedString::const_str(""), |rule| SharedString::from_shared(Arc::clone(rule)))
}

/// The number of keys sent to Redis together.
pub(crate) fn sent_together(keys: impl FnOnce() -> usize) {
    #[allow(clippy::cast_precision_loss, reason = "batches have far less than 2^52 keys")]
    {
        measured! { metrics::histogram!(names::BATCH).record(keys() as f64); }
    }
}

/// Redis won't be asked for a while, after an error of this class.
pub(crate) fn breaker_opened(class: &'static str) {
    measured! { metrics::gauge!(names::BREAKERS).increment(1); }
    traced! {
        tracing::warn!(
            target: "tollgate",
            error = class,
            "the breaker is open: redis is not called for a while, since calls to it failed"
        );
    }
}

/// Redis answered again.
pub(crate) fn breaker_closed() {
    breaker_gone();
    traced! { tracing::info!(target: "tollgate", "redis answers again"); }
}

/// The Redis with this breaker is no longer used.
pub(crate) fn breaker_gone() {
    measured! { metrics::gauge!(names::BREAKERS).decrement(1); }
}

/// A rule's policy, or the engine in this process, answered in Redis's place. In an outage, the breaker has reported
/// the error already.
pub(crate) fn answered_instead(rule: Option<&str>, policy: &'static str, class: &'static str, is_outage: bool) {
    traced! {
        if is_outage {
            tracing::debug!(
                target: "tollgate", rule, policy, error = class, "the rule's policy answers in place of redis"
            );
        } else {
            tracing::warn!(
                target: "tollgate", rule, policy, error = class, "the rule's policy answers in place of redis"
            );
        }
    }
}

/// A permit in use has expired, or Redis has forgotten it: others may take as many again.
pub(crate) fn permit_lost(rule: Option<&str>) {
    traced! {
        tracing::warn!(target: "tollgate", rule, "a permit in use has expired: more may be held than the limit allows");
    }
}

/// A permit in use has reached its rule's longest hold, and is given back.
pub(crate) fn permit_overdue(rule: Option<&str>) {
    traced! {
        tracing::warn!(target: "tollgate", rule, "a permit in use has reached its rule's max_hold: it is released");
    }
}

/// A release, a cancellation or the like isn't sent: too many are waiting.
pub(crate) fn background_full() {
    measured! { metrics::counter!(names::UNSENT).increment(1); }
    traced! {
        tracing::debug!(target: "tollgate", "what was taken is not given back: too many calls are waiting");
    }
}

/// Rules use an attribute that the middleware never sets.
pub(crate) fn unsourced(attribute: &str) {
    traced! { tracing::warn!(target: "tollgate", attribute, "rules use an attribute that no request has"); }
}

/// Rules use the client's address, and the server doesn't provide it. This is a mistake in the service's own code, so
/// it is reported once even without tracing.
pub(crate) fn no_peer(why: &str) {
    static SAID: std::sync::Once = std::sync::Once::new();
    SAID.call_once(|| {
        eprintln!("tollgate: {why}");
        traced! {
            tracing::error!(
                target: "tollgate", why, "rules use the client's address, which the server does not provide"
            );
        }
    });
}

/// Why a request was refused without a decision.
#[derive(Clone, Copy)]
pub(crate) enum Unanswered {
    /// Its rule can't be decided.
    Input,
    /// The breaker has reported it already, and this would be a line for each request.
    Outage,
    Other,
}

/// A request was refused because no decision could be made.
pub(crate) fn unanswered(why: Unanswered, error: &dyn Display, class: &'static str) {
    traced! {
        match why {
            Unanswered::Input => {
                tracing::error!(target: "tollgate", %error, "a request is refused: its rule cannot be decided");
            }
            Unanswered::Outage => {
                tracing::debug!(target: "tollgate", error = class, "a request is refused: no decision could be made");
            }
            Unanswered::Other => {
                tracing::warn!(target: "tollgate", error = class, "a request is refused: no decision could be made");
            }
        }
    }
}

/// A request's final cost couldn't be charged.
pub(crate) fn unsettled(class: &'static str) {
    measured! { metrics::counter!(names::ERRORS, "class" => class).increment(1); }
    traced! {
        tracing::warn!(target: "tollgate", error = class, "a cost could not be settled: the first charge stands");
    }
}

/// The other side asked for a pause, which couldn't be recorded.
pub(crate) fn upstream_backoff_failed(error: &dyn Display) {
    traced! {
        tracing::warn!(target: "tollgate", %error, "the upstream asks for a pause, but its key could not be blocked");
    }
}

/// A file of rules that can be used has a value that probably doesn't match as meant.
pub(crate) fn doubtful_rule(warning: &dyn Display) {
    traced! { tracing::warn!(target: "tollgate", %warning, "a rule probably does not match as meant"); }
}

/// A file of rules has changed: the number of rules now in force, or why they were refused.
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

/// The verdict of a set of rules on a request, and its reason; or the class of the error, with the rule that couldn't
/// decide, if one applied.
pub(crate) fn judged(rule: Option<&Arc<str>>, judged: Result<(bool, &'static str), &'static str>) {
    measured! {
        let (outcome, reason) = match judged {
            Ok((allowed, reason)) => (outcome(allowed), reason),
            Err(class) => ("error", class),
        };
        metrics::counter!(names::VERDICTS, "rule" => label(rule), "outcome" => outcome, "reason" => reason)
            .increment(1);
    }
}

/// What a shadow rule would have done.
pub(crate) fn shadowed(rule: &Arc<str>, allowed: bool) {
    measured! {
        metrics::counter!(names::SHADOWS, "rule" => label(Some(rule)), "outcome" => outcome(allowed)).increment(1);
    }
}
