//! Answers without a decision.

use axum::Json;
use axum::response::{IntoResponse, Response};
use http::header::CONTENT_TYPE;
use http::{HeaderMap, StatusCode};
use serde::Serialize;
use tollgate::rules::{Attributes, RuleSet};
use tollgate::{Charged, Error, ErrorKind};

/// No decision, as HTTP and gRPC report it.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The request can't be read: this was expected.
    Request(String),
    /// Its path can be read in two ways, and the rules don't say how the application reads it.
    AmbiguousPath,
    /// It can, but doesn't fit the rules in force.
    Unfit(String),
    /// No rule with limits applies, so there is nothing to settle, renew or give back.
    Nothing(String),
    /// The limiter made none.
    Limiter(Error),
}

/// The body of an HTTP response without a decision.
#[derive(Serialize)]
struct Body<'a> {
    error: &'a str,
    kind: &'a str,
    /// Whether units were taken all the same; null if nobody can tell.
    charged: Option<bool>,
    /// What tells this error from others of its kind, where a program has to.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'a str>,
}

impl Failure {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::Request(_) | Self::AmbiguousPath | Self::Unfit(_) => ErrorKind::Input,
            Self::Nothing(_) => ErrorKind::UnknownId,
            Self::Limiter(error) => error.kind(),
        }
    }

    fn charged(&self) -> Option<bool> {
        match self {
            Self::Request(_) | Self::AmbiguousPath | Self::Unfit(_) | Self::Nothing(_) => Some(false),
            Self::Limiter(error) => match error.charged() {
                Charged::Yes => Some(true),
                Charged::No => Some(false),
                _ => None,
            },
        }
    }

    /// Whether another request would have got a decision.
    pub(crate) fn is_of_caller(&self) -> bool {
        matches!(self.kind(), ErrorKind::Input | ErrorKind::UnknownId)
    }

    fn message(&self) -> String {
        match self {
            Self::Request(why) | Self::Unfit(why) | Self::Nothing(why) => why.clone(),
            Self::AmbiguousPath => {
                "path: servers may read it in different ways: say in the file of rules how yours does (paths)"
                    .to_owned()
            }
            Self::Limiter(error) => error.to_string(),
        }
    }

    /// The word for it in the body, beside its kind.
    fn reason(&self) -> Option<&'static str> {
        matches!(self, Self::AmbiguousPath).then_some("ambiguous-path")
    }
}

impl Failure {
    /// What a request says can't be an attribute.
    pub(crate) fn unreadable(error: Error) -> Self {
        Self::Request(error.to_string())
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Limiter(error)
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let status = match (&self, self.kind()) {
            (Self::Request(_) | Self::AmbiguousPath, _) => StatusCode::BAD_REQUEST,
            // What the limiter refuses is a matter of the rule, such as permits without an id.
            (_, ErrorKind::Input) => StatusCode::CONFLICT,
            (_, ErrorKind::UnknownId) => StatusCode::NOT_FOUND,
            _ => StatusCode::SERVICE_UNAVAILABLE,
        };
        let (error, kind) = (&*self.message(), self.kind().name());
        (status, Json(Body { error, kind, charged: self.charged(), reason: self.reason() })).into_response()
    }
}

impl From<Failure> for tonic::Status {
    fn from(failure: Failure) -> Self {
        match failure.kind() {
            ErrorKind::Input => Self::invalid_argument(failure.message()),
            ErrorKind::UnknownId => Self::not_found(failure.message()),
            ErrorKind::Deadline => Self::deadline_exceeded(failure.message()),
            _ => Self::unavailable(failure.message()),
        }
    }
}

/// A response without a decision.
pub(crate) fn refusal(status: StatusCode, error: &str, kind: &str, charged: Option<bool>) -> Response {
    (status, Json(Body { error, kind, charged, reason: None })).into_response()
}

/// Whether these are the header fields of a call of gRPC. Any visitor of a proxy may write so.
pub(crate) fn is_grpc(headers: &HeaderMap) -> bool {
    headers.get(CONTENT_TYPE).is_some_and(|content| content.as_bytes().starts_with(b"application/grpc"))
}

/// Adds what a call of gRPC reads. The status stays: a proxy that asks by HTTP takes 200, which other answers by gRPC
/// have, for a decision that allows.
pub(crate) fn for_grpc(mut response: Response, code: tonic::Code, error: &str) -> Response {
    let _fits = tonic::Status::new(code, error).add_header(response.headers_mut());
    response
}

/// What a request gets in place of an answer that failed.
pub(crate) fn unanswered(is_grpc: bool, why: Unanswered) -> Response {
    let (status, code, error, kind) = match why {
        Unanswered::Late => {
            (StatusCode::REQUEST_TIMEOUT, tonic::Code::DeadlineExceeded, LATE, ErrorKind::Deadline.name())
        }
        Unanswered::Panicked => (StatusCode::INTERNAL_SERVER_ERROR, tonic::Code::Internal, PANICKED, "internal"),
    };
    let response = refusal(status, error, kind, None);
    if is_grpc { for_grpc(response, code, error) } else { response }
}

const LATE: &str = "reading the request and answering it took too long";
const PANICKED: &str = "the service failed on this request: see its log";

/// Why there is no answer.
#[derive(Clone, Copy)]
pub(crate) enum Unanswered {
    Late,
    Panicked,
}

/// Gives what the router itself refuses, which has no body, the form of the other errors.
pub(crate) async fn as_json(response: Response) -> Response {
    let error = match response.status() {
        // A rule's own status of a denial.
        _ if response.headers().contains_key(CONTENT_TYPE) => return response,
        StatusCode::NOT_FOUND => "path: nothing is served there; GET /v1/openapi.json lists what is",
        StatusCode::METHOD_NOT_ALLOWED => "method: expected one that the Allow header lists",
        _ => return response,
    };
    refusal(response.status(), error, ErrorKind::Input.name(), Some(false))
}

/// Refuses a path that servers read differently, as the middleware does, unless the rules say how theirs reads it.
pub(crate) fn check_path(rules: &RuleSet, attributes: &Attributes<'_>) -> Result<(), Failure> {
    match rules.reads_two_ways(attributes) {
        true => Err(Failure::AmbiguousPath),
        false => Ok(()),
    }
}
