//! Answers in place of the service's own: to requests that are denied, and where no decision could be made.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use bytes::Bytes;
use http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER};
use http::request::Parts;
use http::{Method, Response, StatusCode};
use serde::Serialize;

use super::headers::HeaderStyle;
use crate::decision::{Decision, Denied, RetryAfter};
use crate::error::Error;
use crate::rules::{Reason, Verdict};
use crate::telemetry;

/// How the client expects an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Protocol {
    Http,
    Grpc,
}

/// RFC 9457, with the member of the draft of RateLimit.
#[derive(Serialize)]
struct Problem<'a> {
    r#type: &'static str,
    title: &'static str,
    status: u16,
    #[serde(skip_serializing_if = "Option::is_none")]
    detail: Option<&'a str>,
    #[serde(rename = "violated-policies", skip_serializing_if = "Vec::is_empty")]
    violated_policies: Vec<String>,
}

const QUOTA_EXCEEDED: &str = "https://iana.org/assignments/http-problem-types#quota-exceeded";
const ABNORMAL_USAGE: &str = "https://iana.org/assignments/http-problem-types#abnormal-usage-detected";
const REDUCED_CAPACITY: &str = "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity";

// Of gRPC.
const INVALID_ARGUMENT: u8 = 3;
const PERMISSION_DENIED: u8 = 7;
const RESOURCE_EXHAUSTED: u8 = 8;
const INTERNAL: u8 = 13;
const UNAVAILABLE: u8 = 14;

/// What a request is that can't be decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// It says something about itself that can't be read: this.
    Request(&'static str),
    /// The limiter can't decide by these rules.
    Configuration,
    /// Nobody could be asked, or nobody answered.
    Away,
}

/// The answer to a request whose handler decides by itself: a denial or an error as the [layer](super::RateLimitLayer) would
/// answer it over HTTP. `?` makes one of either, and with the feature `axum` a handler may return it.
///
/// ```
/// use tollgate::middleware::Rejection;
/// use tollgate::{Limiter, Rule};
///
/// async fn send_code(limiter: &Limiter, rule: &Rule, phone: &str) -> Result<&'static str, Rejection> {
///     limiter.acquire(rule, phone).await?.into_result()?;
///     Ok("sent")
/// }
/// ```
#[derive(Debug)]
pub struct Rejection {
    // Boxed, since it is the error of handlers whose results are small.
    response: Box<Response<Bytes>>,
}

impl From<Denied> for Rejection {
    fn from(denied: Denied) -> Self {
        let verdict = Verdict::of(denied.into_decision());
        Self { response: Box::new(Protocol::Http.denied(verdict, HeaderStyle::default())) }
    }
}

impl From<Error> for Rejection {
    fn from(error: Error) -> Self {
        Self { response: Box::new(Protocol::Http.failed(Failure::of(&error), &error)) }
    }
}

impl From<Rejection> for Response<Bytes> {
    fn from(rejection: Rejection) -> Self {
        *rejection.response
    }
}

#[cfg(feature = "axum")]
impl axum::response::IntoResponse for Rejection {
    fn into_response(self) -> axum::response::Response {
        self.response.map(axum::body::Body::from)
    }
}

impl Failure {
    /// Of a decision that wasn't made.
    pub(super) fn of(error: &Error) -> Self {
        if error.is_input() { Self::Configuration } else { Self::Away }
    }
}

impl Protocol {
    /// A call of gRPC is a POST of this type, with `+proto` or the like after it.
    pub(super) fn of(parts: &Parts) -> Self {
        let kind = parts.headers.get(CONTENT_TYPE).map(HeaderValue::as_bytes).unwrap_or_default();
        let after = kind.get(..16).filter(|kind| kind.eq_ignore_ascii_case(b"application/grpc")).map(|_| &kind[16..]);
        let grpc = after.is_some_and(|after| after.is_empty() || after.starts_with(b"+") || after.starts_with(b";"));
        if grpc && parts.method == Method::POST { Self::Grpc } else { Self::Http }
    }

    /// To a request that its rule denies. Why is in its extensions, for whoever answers in another form.
    pub(super) fn denied(self, verdict: Verdict, style: HeaderStyle) -> Response<Bytes> {
        let decision = verdict.decision.as_ref();
        let response = verdict.response.as_ref();
        let status = response.and_then(|response| StatusCode::from_u16(response.status.get()).ok());
        let status = status.unwrap_or(StatusCode::TOO_MANY_REQUESTS);
        let missing = match &verdict.reason {
            Reason::Missing(attribute) => Some(format!("this request needs {attribute}, by which its limit counts")),
            _ => None,
        };
        let detail = response.and_then(|response| response.message.as_deref()).or(missing.as_deref());
        let (kind, title) = match decision {
            Some(decision) if decision.blocked => (ABNORMAL_USAGE, "Blocked after too many requests"),
            Some(_) => (QUOTA_EXCEEDED, "Too many requests"),
            None => ("about:blank", status.canonical_reason().unwrap_or("Denied")),
        };
        let mut answer = match self {
            Self::Http => {
                let violated_policies = decision.map(violated).unwrap_or_default();
                problem(&Problem { r#type: kind, title, status: status.as_u16(), detail, violated_policies })
            }
            Self::Grpc => {
                let code = match verdict.reason {
                    Reason::Blocked => PERMISSION_DENIED,
                    Reason::Missing(_) => INVALID_ARGUMENT,
                    _ => RESOURCE_EXHAUSTED,
                };
                let wait = verdict.wait().map_or(RetryAfter::Never, RetryAfter::After);
                grpc(code, detail.unwrap_or(title), wait)
            }
        };
        append(answer.headers_mut(), verdict.headers(style));
        answer.extensions_mut().insert(verdict);
        answer
    }

    /// To a request for which no decision could be made. Why is nothing that a client should learn, but of its own request.
    pub(super) fn failed(self, failure: Failure, error: &Error) -> Response<Bytes> {
        if !matches!(failure, Failure::Request(_)) {
            telemetry::unanswered(error);
        }
        let (status, code, kind, title, detail) = match failure {
            Failure::Request(detail) => {
                (StatusCode::BAD_REQUEST, INVALID_ARGUMENT, "about:blank", "Bad Request", Some(detail))
            }
            Failure::Configuration => {
                (StatusCode::INTERNAL_SERVER_ERROR, INTERNAL, "about:blank", "Internal Server Error", None)
            }
            Failure::Away => {
                (StatusCode::SERVICE_UNAVAILABLE, UNAVAILABLE, REDUCED_CAPACITY, "Service Unavailable", None)
            }
        };
        match self {
            Self::Http => {
                let violated_policies = Vec::new();
                let mut answer =
                    problem(&Problem { r#type: kind, title, status: status.as_u16(), detail, violated_policies });
                if matches!(failure, Failure::Away) {
                    answer.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
                }
                answer
            }
            Self::Grpc => {
                let away = matches!(failure, Failure::Away);
                let wait = if away { RetryAfter::After(Duration::from_secs(1)) } else { RetryAfter::Never };
                grpc(code, detail.unwrap_or(title), wait)
            }
        }
    }
}

/// Fields of a decision, beside those of a layer within, none of which is overwritten. Older ones are no lists: the inner
/// layer's stay alone.
pub(super) fn append(headers: &mut HeaderMap, fields: Vec<(&'static str, String)>) {
    let inner = headers.contains_key("x-ratelimit-limit");
    for (name, value) in fields {
        if let Ok(value) = HeaderValue::try_from(value)
            && !(inner && name.starts_with("x-"))
        {
            headers.append(HeaderName::from_static(name), value);
        }
    }
}

fn violated(decision: &Decision) -> Vec<String> {
    let rule = decision.rule().unwrap_or_default();
    if decision.quota.is_some() {
        return vec![rule.to_owned()];
    }
    let denied = decision.limits.iter().filter(|limit| !limit.allowed);
    denied.map(|limit| format!("{rule}/{}", limit.quota.label())).collect()
}

fn problem(problem: &Problem<'_>) -> Response<Bytes> {
    let body = serde_json::to_vec(problem).unwrap_or_default();
    let mut answer = Response::new(Bytes::from(body));
    *answer.status_mut() = StatusCode::from_u16(problem.status).unwrap_or(StatusCode::TOO_MANY_REQUESTS);
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
    answer.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    answer
}

/// An answer of headers alone. gRPC's status is in a header of its own; HTTP's is always 200.
fn grpc(code: u8, message: &str, wait: RetryAfter) -> Response<Bytes> {
    let mut answer = Response::new(Bytes::new());
    let headers = answer.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    headers.insert("grpc-status", HeaderValue::from(u16::from(code)));
    if let Ok(message) = HeaderValue::try_from(percent_encoded(message)) {
        headers.insert("grpc-message", message);
    }
    let pushback = match wait {
        // Clients don't retry then.
        RetryAfter::Never => Some("-1".to_owned()),
        RetryAfter::After(wait) => Some(wait.as_nanos().div_ceil(1_000_000).to_string()),
        RetryAfter::Now => None,
    };
    if let Some(Ok(pushback)) = pushback.map(HeaderValue::try_from) {
        headers.insert("grpc-retry-pushback-ms", pushback);
    }
    if let RetryAfter::After(wait) = wait {
        let details =
            STANDARD_NO_PAD.encode(status_with_retry_info(code, message, wait.as_secs(), wait.subsec_nanos()));
        if let Ok(details) = HeaderValue::try_from(details) {
            headers.insert("grpc-status-details-bin", details);
        }
    }
    answer
}

/// As gRPC over HTTP/2 has it: what isn't printable ASCII, and the percent sign itself.
fn percent_encoded(message: &str) -> String {
    message.bytes().fold(String::with_capacity(message.len()), |mut text, byte| {
        match byte {
            b' '..=b'~' if byte != b'%' => text.push(char::from(byte)),
            _ => text.push_str(&format!("%{byte:02X}")),
        }
        text
    })
}

/// A `google.rpc.Status` whose one detail is a `google.rpc.RetryInfo`, in Protocol Buffers' wire format:
/// <https://github.com/googleapis/googleapis/blob/master/google/rpc/error_details.proto>.
fn status_with_retry_info(code: u8, message: &str, seconds: u64, nanos: u32) -> Vec<u8> {
    let mut duration = Vec::new();
    number(&mut duration, 1, seconds);
    number(&mut duration, 2, u64::from(nanos));
    let mut info = Vec::new();
    bytes(&mut info, 1, &duration);
    let mut any = Vec::new();
    bytes(&mut any, 1, b"type.googleapis.com/google.rpc.RetryInfo");
    bytes(&mut any, 2, &info);
    let mut status = Vec::new();
    number(&mut status, 1, u64::from(code));
    bytes(&mut status, 2, message.as_bytes());
    bytes(&mut status, 3, &any);
    status
}

fn number(out: &mut Vec<u8>, field: u64, value: u64) {
    // Zero is left out.
    if value > 0 {
        varint(out, field << 3);
        varint(out, value);
    }
}

fn bytes(out: &mut Vec<u8>, field: u64, value: &[u8]) {
    varint(out, field << 3 | 2);
    varint(out, value.len() as u64);
    out.extend_from_slice(value);
}

fn varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push((value & 0x7f) as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}
