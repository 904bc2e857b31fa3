//! Metrics of the service itself, beside those of the library, by the facade `metrics`.

use std::time::Duration;

use metrics::{counter, histogram};
use tollgate::rules::{Reason, Verdict};

/// An allowed request is near its limit where no more than this part of the capacity is left: a fifth.
const NEAR: u64 = 5;

/// Counts a verdict where no rule applied, and one that is over its limits or near them, by the rule.
pub(crate) fn judged(verdict: &Verdict) {
    if verdict.reason == Reason::NoRule {
        counter!("tollgate_serve_unmatched_total").increment(1);
    }
    let (Some(rule), Some(decision)) = (&verdict.rule, &verdict.decision) else { return };
    if !verdict.allowed {
        counter!("tollgate_serve_over_limit_total", "rule" => rule.to_string()).increment(1);
    } else if decision.limits.iter().any(|limit| limit.remaining <= limit.capacity / NEAR) {
        counter!("tollgate_serve_near_limit_total", "rule" => rule.to_string()).increment(1);
    }
}

/// Counts a request without a token of the service's.
pub(crate) fn unauthorized() {
    counter!("tollgate_serve_unauthorized_total").increment(1);
}

/// Counts a request that was answered, and how long that took; `allowed` is none if there was no decision.
pub(crate) fn answered(protocol: &'static str, allowed: Option<bool>, took: Duration) {
    let outcome = match allowed {
        Some(true) => "allowed",
        Some(false) => "denied",
        None => "error",
    };
    counter!("tollgate_serve_requests_total", "protocol" => protocol, "outcome" => outcome).increment(1);
    histogram!("tollgate_serve_request_duration_seconds", "protocol" => protocol).record(took.as_secs_f64());
}
