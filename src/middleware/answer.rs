//! Responses in place of the service's own: to denied requests, and when no decision could be made.

use std::time::Duration;

use bytes::Bytes;
use http::header::WWW_AUTHENTICATE;
use http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER};
use http::request::Parts;
use http::{Extensions, Method, Response, StatusCode, Version};
use serde::Serialize;

use super::grpc;
use super::headers::{HeaderStyle, policy_name};
use crate::decision::{Decision, Denied, RetryAfter};
use crate::error::Error;
use crate::rules::{Reason, Verdict};
use crate::telemetry::{self, Unanswered};

/// The form in which the client expects a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Protocol {
    Http,
    Grpc,
}

/// RFC 9457, with the member defined by the RateLimit draft.
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

/// Why a request could not be decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failure<'a> {
    /// The request contains something that can't be read: this.
    Request(&'a str),
    /// The limiter can't decide with these rules.
    Configuration,
    /// Redis couldn't be asked, or didn't answer.
    Away,
}

/// The response for a handler that decides by itself: a denial or an error as the [layer](super::RateLimitLayer) would
/// answer it over HTTP, in the default style of header fields. `?` converts either into one, and with the feature
/// `axum` a handler may return it.
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
    // Boxed to keep handlers' results small.
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

impl Failure<'_> {
    /// For a decision that couldn't be made.
    pub(super) fn of(error: &Error) -> Self {
        if error.is_empty_key() {
            Self::Request("the value that this request is counted by is empty")
        } else if error.is_input() {
            Self::Configuration
        } else {
            Self::Away
        }
    }
}

impl Protocol {
    /// A gRPC call is a POST with this content type over HTTP/2, possibly followed by `+proto` or the like.
    pub(super) fn of(parts: &Parts) -> Self {
        let kind = parts.headers.get(CONTENT_TYPE).map(HeaderValue::as_bytes).unwrap_or_default();
        let after = kind.get(..16).filter(|kind| kind.eq_ignore_ascii_case(b"application/grpc")).map(|_| &kind[16..]);
        let grpc = after.is_some_and(|after| after.is_empty() || after.starts_with(b"+") || after.starts_with(b";"));
        if grpc && parts.method == Method::POST && parts.version == Version::HTTP_2 { Self::Grpc } else { Self::Http }
    }

    /// To a request that its rule denies. The extensions contain the verdict, for code that answers in another form.
    pub(super) fn denied(self, verdict: Verdict, style: HeaderStyle) -> Response<Bytes> {
        let decision = verdict.decision.as_ref();
        let response = verdict.response.as_ref();
        let status = response.and_then(|response| StatusCode::from_u16(response.status.get()).ok());
        let status = status.unwrap_or(StatusCode::TOO_MANY_REQUESTS);
        let missing = match &verdict.reason {
            Reason::Missing(attribute) => Some(format!("this request lacks {attribute}, which its rate limit needs")),
            _ => None,
        };
        let never = decision.is_some_and(|decision| decision.retry_after == RetryAfter::Never);
        let never = never.then_some("this request costs more than its limit can ever allow");
        let message = response.and_then(|response| response.message.as_deref());
        let detail = missing.as_deref().or(message).or(never);
        let (kind, title) = match decision {
            Some(decision) if decision.blocked => (ABNORMAL_USAGE, "Blocked after too many requests"),
            Some(_) => (QUOTA_EXCEEDED, "Too many requests"),
            None => ("about:blank", status.canonical_reason().unwrap_or("Denied")),
        };
        let answer = match self {
            Self::Http => {
                let violated_policies = decision.map(violated).unwrap_or_default();
                problem(&Problem { r#type: kind, title, status: status.as_u16(), detail, violated_policies })
            }
            Self::Grpc => {
                let code = match verdict.reason {
                    Reason::Blocked | Reason::UserBlocked(_) => grpc::PERMISSION_DENIED,
                    Reason::Missing(_) => grpc::INVALID_ARGUMENT,
                    _ => grpc::RESOURCE_EXHAUSTED,
                };
                grpc::answer(code, detail.unwrap_or(title), verdict.wait())
            }
        };
        let (mut parts, body) = answer.into_parts();
        append(&mut parts.headers, &mut parts.extensions, verdict.headers(style));
        parts.extensions.insert(verdict);
        Response::from_parts(parts, body)
    }

    /// To a request for which no decision could be made, with the error in its extensions. The body doesn't give the
    /// reason, unless the client's own request is at fault or, in debug builds, the service's code or rules.
    pub(super) fn failed(self, failure: Failure<'_>, error: &Error) -> Response<Bytes> {
        if !matches!(failure, Failure::Request(_)) {
            let why = match error {
                _ if error.is_input() => Unanswered::Input,
                _ if error.is_outage() => Unanswered::Outage,
                _ => Unanswered::Other,
            };
            telemetry::unanswered(why, error, error.kind().name());
        }
        let (status, code, kind, title) = match failure {
            Failure::Request(_) => (StatusCode::BAD_REQUEST, grpc::INVALID_ARGUMENT, "about:blank", "Bad Request"),
            Failure::Configuration => {
                (StatusCode::INTERNAL_SERVER_ERROR, grpc::INTERNAL, "about:blank", "Internal Server Error")
            }
            Failure::Away => {
                (StatusCode::SERVICE_UNAVAILABLE, grpc::UNAVAILABLE, REDUCED_CAPACITY, "Service Unavailable")
            }
        };
        let mistake = (cfg!(debug_assertions) && failure == Failure::Configuration).then(|| error.to_string());
        let detail = match failure {
            Failure::Request(detail) => Some(detail),
            _ => mistake.as_deref(),
        };
        let mut answer = match self {
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
                let wait = matches!(failure, Failure::Away).then_some(Duration::from_secs(1));
                grpc::answer(code, detail.unwrap_or(title), wait)
            }
        };
        answer.extensions_mut().insert(error.clone());
        answer
    }
}

/// Responses to requests with API keys.
impl Protocol {
    /// To a request without a valid key.
    pub(super) fn unauthenticated(self, challenge: &HeaderValue, detail: &str) -> Response<Bytes> {
        let mut answer = match self {
            Self::Http => problem(&Problem {
                r#type: "about:blank",
                title: "Unauthorized",
                status: 401,
                detail: Some(detail),
                violated_policies: Vec::new(),
            }),
            Self::Grpc => grpc::answer(grpc::UNAUTHENTICATED, detail, None),
        };
        answer.headers_mut().insert(WWW_AUTHENTICATE, challenge.clone());
        answer
    }

    /// To a request whose key can't be looked up now.
    pub(super) fn unavailable(self, retry_after: Duration) -> Response<Bytes> {
        let detail = "this API key can't be looked up now";
        match self {
            Self::Http => {
                let mut answer = problem(&Problem {
                    r#type: REDUCED_CAPACITY,
                    title: "Service Unavailable",
                    status: 503,
                    detail: Some(detail),
                    violated_policies: Vec::new(),
                });
                let seconds = retry_after.as_secs() + u64::from(retry_after.subsec_nanos() > 0);
                answer.headers_mut().insert(RETRY_AFTER, HeaderValue::from(seconds));
                answer
            }
            Self::Grpc => grpc::answer(grpc::UNAVAILABLE, detail, Some(retry_after)),
        }
    }
}

/// The fields that inner layers, and nothing else, have added to a response: the last lines of `RateLimit`, and whether
/// there are older fields.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Added {
    pub(super) lines: usize,
    pub(super) older: bool,
}

/// Adds a decision's fields to those of an inner layer. `X-RateLimit-*` can't be lists, so the inner layer's are kept.
pub(super) fn append(headers: &mut HeaderMap, extensions: &mut Extensions, fields: Vec<(&'static str, String)>) {
    let inner = headers.contains_key("x-ratelimit-limit");
    let added = extensions.get_or_insert_default::<Added>();
    for (name, value) in fields {
        if let Ok(value) = HeaderValue::try_from(value)
            && !(inner && name.starts_with("x-"))
        {
            added.lines += usize::from(name == "ratelimit");
            added.older |= name.starts_with("x-");
            headers.append(HeaderName::from_static(name), value);
        }
    }
}

fn violated(decision: &Decision) -> Vec<String> {
    let denied = decision.limits.iter().filter(|limit| !limit.allowed);
    denied.map(|limit| policy_name(&limit.quota, decision.limits.len() > 1)).collect()
}

fn problem(problem: &Problem<'_>) -> Response<Bytes> {
    let body = serde_json::to_vec(problem).unwrap_or_default();
    let mut answer = Response::new(Bytes::from(body));
    *answer.status_mut() = StatusCode::from_u16(problem.status).unwrap_or(StatusCode::TOO_MANY_REQUESTS);
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
    answer.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    answer
}
