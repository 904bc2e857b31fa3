//! Metrics of the service itself, beside those of the library, by the facade `metrics`.

use std::time::Duration;

use metrics::{Gauge, Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram};
use tollgate::Operation;
use tollgate::rules::{Reason, Verdict};

use crate::failure::Failure;

const REQUESTS: &str = "tollgate_serve_requests_total";
const DURATION: &str = "tollgate_serve_request_duration_seconds";
const UNMATCHED: &str = "tollgate_serve_unmatched_total";
const OVER: &str = "tollgate_serve_over_limit_total";
const NEAR: &str = "tollgate_serve_near_limit_total";
const UNAUTHORIZED: &str = "tollgate_serve_unauthorized_total";
const CONNECTIONS: &str = "tollgate_serve_connections";
const BUILD: &str = "tollgate_serve_build_info";

/// An allowed request is near its limit where no more than this part of the capacity is left: a fifth.
const NEARLY: u64 = 5;

/// Describes the service's metrics to the recorder that is installed; [`tollgate::describe_metrics`] does so for the
/// library's.
pub fn describe_metrics() {
    describe_counter!(REQUESTS, "Requests, by protocol and outcome");
    describe_histogram!(DURATION, Unit::Seconds, "How long a request took, by protocol");
    describe_counter!(UNMATCHED, "Requests and descriptors that no rule applied to");
    describe_counter!(OVER, "Denials by limits, by rule");
    describe_counter!(NEAR, "Allowed with at most a fifth of a limit's capacity left, by rule");
    describe_counter!(UNAUTHORIZED, "Requests whose token is missing or wrong");
    describe_gauge!(CONNECTIONS, "Connections that are open, by address");
    describe_gauge!(BUILD, "1, with the version");
    gauge!(BUILD, "version" => env!("CARGO_PKG_VERSION")).set(1);
    // There from the start, so that the first one is a rise.
    counter!(UNMATCHED).increment(0);
    counter!(UNAUTHORIZED).increment(0);
}

/// Counts a verdict where no rule applied, and of requests that take units one that is over its limits or near them, by
/// the rule.
pub(crate) fn judged(operation: Operation, verdict: &Verdict) {
    if verdict.reason == Reason::NoRule {
        counter!(UNMATCHED).increment(1);
    }
    let (Some(rule), Some(decision)) = (&verdict.rule, &verdict.decision) else { return };
    if operation != Operation::Acquire {
        return;
    }
    if !verdict.allowed {
        counter!(OVER, "rule" => rule.to_string()).increment(1);
    } else if decision.limits.iter().any(|limit| limit.remaining <= limit.capacity / NEARLY) {
        counter!(NEAR, "rule" => rule.to_string()).increment(1);
    }
}

/// A connection that is counted as long as this lives.
pub(crate) struct Connection(Gauge);

impl Connection {
    /// One to the port at this address.
    pub(crate) fn opened(address: &str) -> Self {
        let all = gauge!(CONNECTIONS, "address" => address.to_owned());
        all.increment(1);
        Self(all)
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.0.decrement(1);
    }
}

/// Counts a request without a token of the service's.
pub(crate) fn unauthorized() {
    counter!(UNAUTHORIZED).increment(1);
}

/// Counts a request that was answered, and how long that took: it was allowed or not, or there was no decision.
pub(crate) fn answered(protocol: &'static str, answer: Result<bool, &Failure>, took: Duration) {
    let outcome = match answer {
        Ok(true) => "allowed",
        Ok(false) => "denied",
        Err(failure) if failure.is_of_caller() => "invalid",
        Err(_) => "error",
    };
    counter!(REQUESTS, "protocol" => protocol, "outcome" => outcome).increment(1);
    histogram!(DURATION, "protocol" => protocol).record(took.as_secs_f64());
}
