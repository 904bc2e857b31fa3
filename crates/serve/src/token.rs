//! Tokens: a request without one of the service's is refused.

use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use http::header::{AUTHORIZATION, WWW_AUTHENTICATE};
use http::{HeaderMap, HeaderValue, StatusCode};
use subtle::ConstantTimeEq;

use crate::failure::{for_grpc, is_grpc, refusal};
use crate::metrics;
use crate::warning::warn_seldom;

/// The tokens of those who may ask, sent as `Authorization: Bearer TOKEN`, by gRPC as metadata of that name. Several, so
/// that one can be replaced while both are in use. None: anybody may ask.
#[derive(Clone, Default)]
pub struct Tokens(Arc<[Box<[u8]>]>);

impl Tokens {
    /// These tokens; empty ones are left out.
    pub fn new(tokens: impl IntoIterator<Item = impl AsRef<[u8]>>) -> Self {
        let mut own: Vec<Box<[u8]>> = tokens.into_iter().map(|token| token.as_ref().trim_ascii().into()).collect();
        own.retain(|token| !token.is_empty());
        Self(own.into())
    }

    /// Whether there are none, so that anybody may ask.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether a request with these header fields may ask. Takes as long for a token that is nearly right as for any
    /// other of its length.
    fn admit(&self, headers: &HeaderMap) -> bool {
        let given = headers.get(AUTHORIZATION).and_then(|value| {
            let (scheme, token) = value.as_bytes().split_at_checked(7)?;
            scheme.eq_ignore_ascii_case(b"bearer ").then(|| token.trim_ascii())
        });
        let given = given.unwrap_or_default();
        // All are compared, whichever is the right one.
        let right = self.0.iter().map(|token| token.ct_eq(given)).fold(0, |right, same| right | same.unwrap_u8());
        self.is_empty() || right == 1
    }
}

/// These routes, for those alone who have a token.
pub(crate) fn require<S: Clone + Send + Sync + 'static>(tokens: &Tokens, routes: Router<S>) -> Router<S> {
    match tokens.is_empty() {
        true => routes,
        false => routes.route_layer(axum::middleware::from_fn_with_state(tokens.clone(), refuse)),
    }
}

/// Refuses requests without a token.
async fn refuse(State(tokens): State<Tokens>, request: Request, next: Next) -> Response {
    if tokens.admit(request.headers()) {
        return next.run(request).await;
    }
    metrics::unauthorized();
    // A gateway that is refused may let everything pass.
    warn_seldom(|| tracing::warn!("a request is refused: its token is missing or wrong"));
    const WHY: &str = "the token is missing or wrong: send one of the service's as Authorization: Bearer TOKEN";
    let mut refused = refusal(StatusCode::UNAUTHORIZED, WHY, "unauthorized", Some(false));
    refused.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    if is_grpc(request.headers()) { for_grpc(refused, tonic::Code::Unauthenticated, WHY) } else { refused }
}

impl std::fmt::Debug for Tokens {
    /// How many there are: they are secrets.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tokens({})", self.0.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_of_the_tokens_admits_and_nothing_else_does() {
        let tokens = Tokens::new(["first", " second\n", ""]);
        let admits = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(AUTHORIZATION, value.parse().expect("a header's value"));
            tokens.admit(&headers)
        };
        for right in ["Bearer first", "bearer second", "BEARER  first "] {
            assert!(admits(right), "{right}");
        }
        for wrong in
            ["", "Bearer", "Bearer ", "Basic first", "first", "Bearer firs", "Bearer firstsecond", "Bearer third"]
        {
            assert!(!admits(wrong), "{wrong}");
        }
        assert!(!tokens.admit(&HeaderMap::new()));
        assert!(Tokens::default().admit(&HeaderMap::new()));
        assert_eq!(format!("{tokens:?}"), "Tokens(2)");
    }
}
