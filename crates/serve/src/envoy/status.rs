//! A verdict as Envoy reads it.

use std::collections::HashMap;
use std::time::Duration;

use envoy_types::pb::envoy::config::core::v3::HeaderValue;
use envoy_types::pb::envoy::service::ratelimit::v3::RateLimitResponse;
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::rate_limit::Unit;
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::{Code, DescriptorStatus, RateLimit};
use envoy_types::pb::google::protobuf::{self, ListValue, Struct, Value, value};
use tollgate::rules::{Reason, Verdict};
use tollgate::{Algorithm, CalendarUnit, LimitDecision};

use super::descriptor::Asked;
use crate::service::Unmatched;
use tollgate::middleware::HeaderStyle;

/// The longest duration that the protocol's type holds: some 10,000 years.
const LONGEST: u64 = 315_576_000_000;

/// The response to a request with these descriptors, in their order.
pub(super) fn response(
    asked: &[Asked],
    verdicts: &[Verdict],
    unmatched: Unmatched,
    style: HeaderStyle,
) -> RateLimitResponse {
    let statuses: Vec<_> =
        asked.iter().zip(verdicts).map(|(asked, verdict)| status(asked, verdict, unmatched)).collect();
    let over = statuses.iter().any(|status| status.code == Code::OverLimit as i32);
    let (decisive, asked) = match decisive(verdicts, unmatched).map(|at| (&verdicts[at], &asked[at])) {
        Some((verdict, asked)) => (Some(verdict), Some(asked)),
        None => (None, None),
    };
    // A limit of nothing stands for itself by another.
    let style = if asked.is_some_and(Asked::is_refused) { HeaderStyle::Off } else { style };
    let headers = decisive.map(|verdict| verdict.headers(style)).unwrap_or_default();
    let message = decisive.and_then(|verdict| verdict.response.as_ref()?.message.as_deref());
    RateLimitResponse {
        overall_code: if over { Code::OverLimit } else { Code::Ok }.into(),
        statuses,
        response_headers_to_add: headers.into_iter().map(|(name, value)| header(name, value)).collect(),
        request_headers_to_add: Vec::new(),
        raw_body: message.unwrap_or_default().into(),
        dynamic_metadata: Some(metadata(decisive, verdicts)),
        quota: None,
    }
}

/// The place of the verdict that a client hears of: the first denial or, if there is none, of what is left least.
fn decisive(verdicts: &[Verdict], unmatched: Unmatched) -> Option<usize> {
    let remaining = |at: &usize| verdicts[*at].decision.as_ref().map_or(u64::MAX, |decision| decision.remaining);
    let denied = verdicts.iter().position(|verdict| !is_allowed(verdict, unmatched));
    denied.or_else(|| (0..verdicts.len()).min_by_key(remaining))
}

/// Whether a descriptor is within its limits, as far as a rule applies to it.
fn is_allowed(verdict: &Verdict, unmatched: Unmatched) -> bool {
    verdict.allowed && (verdict.reason != Reason::NoRule || unmatched == Unmatched::Allow)
}

fn status(asked: &Asked, verdict: &Verdict, unmatched: Unmatched) -> DescriptorStatus {
    let code = if is_allowed(verdict, unmatched) { Code::Ok } else { Code::OverLimit };
    let limits = verdict.decision.as_ref().map(|decision| &*decision.limits).unwrap_or_default();
    let denies = limits.iter().find(|limit| !limit.allowed);
    let Some(limit) = denies.or_else(|| limits.iter().min_by_key(|limit| limit.remaining)) else {
        return DescriptorStatus { code: code.into(), ..DescriptorStatus::default() };
    };
    let wait = if limit.allowed { Some(limit.reset_after) } else { limit.retry_after.duration() };
    let mut current = current_limit(limit);
    let mut remaining = saturated(limit.remaining.into());
    if asked.is_refused() {
        (current.requests_per_unit, remaining) = (0, 0);
    }
    DescriptorStatus {
        code: code.into(),
        current_limit: Some(current),
        limit_remaining: remaining,
        duration_until_reset: wait.map(whole_seconds),
        quota: None,
    }
}

/// Rounded up: Envoy reads whole seconds, and no client should come back too early.
fn whole_seconds(wait: Duration) -> protobuf::Duration {
    let seconds = wait.as_secs().saturating_add(u64::from(wait.subsec_nanos() > 0)).min(LONGEST);
    protobuf::Duration { seconds: seconds.try_into().unwrap_or(i64::MAX), nanos: 0 }
}

/// The limit in the units that the protocol knows: the shortest that isn't shorter than its period, so that nothing is
/// rounded up.
fn current_limit(limit: &LimitDecision) -> RateLimit {
    const DAY: u64 = 24 * 60 * 60;
    const UNITS: [(u64, Unit); 6] = [
        (1, Unit::Second),
        (60, Unit::Minute),
        (60 * 60, Unit::Hour),
        (DAY, Unit::Day),
        (7 * DAY, Unit::Week),
        (365 * DAY, Unit::Year),
    ];
    let of_calendar = limit.window().and_then(|window| match window {
        CalendarUnit::Day => Some(Unit::Day),
        CalendarUnit::Week => Some(Unit::Week),
        CalendarUnit::Month => Some(Unit::Month),
        CalendarUnit::Year => Some(Unit::Year),
        _ => None,
    });
    let rate = u128::from(limit.rate());
    let (requests, unit) = match of_calendar {
        _ if limit.algorithm() == Algorithm::Concurrency => (rate, Unit::Unknown),
        Some(unit) => (rate, unit),
        None => {
            let period = limit.period().as_micros().max(1);
            let micros = |seconds: u64| u128::from(seconds) * 1_000_000;
            let (seconds, unit) = *UNITS.iter().find(|(seconds, _)| micros(*seconds) >= period).unwrap_or(&UNITS[5]);
            (rate * micros(seconds) / period, unit)
        }
    };
    RateLimit { name: limit.name().to_string(), requests_per_unit: saturated(requests), unit: unit.into() }
}

fn saturated(number: u128) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

fn header(name: &str, value: String) -> HeaderValue {
    HeaderValue { key: name.to_owned(), value, raw_value: Vec::new() }
}

/// For whoever routes or logs by it: the decisive verdict's `rule` and `reason`, and `by`, who decided (`policy` where Redis
/// gave no answer); and `shadow_denied`, the shadow rules that would have denied.
fn metadata(decisive: Option<&Verdict>, verdicts: &[Verdict]) -> Struct {
    let text = |text: &str| Value { kind: Some(value::Kind::StringValue(text.to_owned())) };
    let mut fields = HashMap::new();
    if let Some(verdict) = decisive {
        fields.insert("reason".to_owned(), text(verdict.reason.name()));
        fields.extend(verdict.decision.as_ref().map(|decision| ("by".to_owned(), text(&decision.by.to_string()))));
        fields.extend(verdict.rule.as_ref().map(|rule| ("rule".to_owned(), text(rule))));
    }
    let shadows = verdicts.iter().flat_map(|verdict| &verdict.shadows).filter(|shadow| !shadow.allowed);
    let values: Vec<_> = shadows.map(|shadow| text(&shadow.rule)).collect();
    if !values.is_empty() {
        let list = Value { kind: Some(value::Kind::ListValue(ListValue { values })) };
        fields.insert("shadow_denied".to_owned(), list);
    }
    Struct { fields }
}
