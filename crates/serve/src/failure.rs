//! Answers without a decision.

use axum::Json;
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use http::header::CONTENT_TYPE;
use serde::Serialize;
use tollgate::rules::{Attributes, RuleSet};
use tollgate::{Charged, Error, ErrorKind};

/// No decision, as HTTP and gRPC report it.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The request can't be read: this was expected.
    Request(String),
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
}

impl Failure {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::Request(_) | Self::Unfit(_) => ErrorKind::Input,
            Self::Nothing(_) => ErrorKind::UnknownId,
            Self::Limiter(error) => error.kind(),
        }
    }

    fn charged(&self) -> Option<bool> {
        match self {
            Self::Request(_) | Self::Unfit(_) | Self::Nothing(_) => Some(false),
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
            Self::Limiter(error) => error.to_string(),
        }
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
            (Self::Request(_), _) => StatusCode::BAD_REQUEST,
            // What the limiter refuses is a matter of the rule, such as permits without an id.
            (_, ErrorKind::Input) => StatusCode::CONFLICT,
            (_, ErrorKind::UnknownId) => StatusCode::NOT_FOUND,
            _ => StatusCode::SERVICE_UNAVAILABLE,
        };
        refusal(status, &self.message(), self.kind().name(), self.charged())
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
    (status, Json(Body { error, kind, charged })).into_response()
}

/// Gives what the router itself refuses, which has no body, the form of the other errors.
pub(crate) async fn as_json(response: Response) -> Response {
    let error = match response.status() {
        // A rule's own status of a denial.
        _ if response.headers().contains_key(CONTENT_TYPE) => return response,
        StatusCode::NOT_FOUND => "path: nothing is served there; GET /v1/openapi.json lists what is",
        StatusCode::METHOD_NOT_ALLOWED => "method: expected the one that the header field Allow names",
        _ => return response,
    };
    refusal(response.status(), error, ErrorKind::Input.name(), Some(false))
}

/// Refuses a path that servers read differently, as the middleware does, unless the rules say how theirs reads it.
pub(crate) fn check_path(rules: &RuleSet, attributes: &Attributes<'_>) -> Result<(), Failure> {
    match rules.reads_two_ways(attributes) {
        true => Err(Failure::Request(
            "path: it can be read in two ways: let the file of rules say how the service reads it (paths)".into(),
        )),
        false => Ok(()),
    }
}
