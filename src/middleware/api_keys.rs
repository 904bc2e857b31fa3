//! The layer that admits requests with a valid API key, and identifies the account.

use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::header::{HeaderName, HeaderValue};
use http::request::Parts;
use http::{Request, Response};
use http_body::Body;
use tower_layer::Layer;
use tower_service::Service;

use super::answer::{Failure, Protocol};
use super::body::ResponseBody;
use super::request_attributes::{self, Read};
use super::side::Side;
use crate::rules::{Account, ApiKeyError, ApiKeyLookup};

/// Authenticates requests by API keys, of the system of record or of any other [look-up](ApiKeyLookup). Put it around a
/// [`RateLimitLayer`](super::RateLimitLayer), which then counts by the key's user, tier and id: the layer puts an
/// [`Account`] into the request's extensions, where handlers find it too.
///
/// ```no_run
/// # #[cfg(feature = "axum")]
/// # mod example {
/// use axum::Router;
/// use axum::routing::get;
/// use tollgate::Limiter;
/// use tollgate::middleware::{ApiKeyLayer, RateLimitLayer};
/// use tollgate::rules::{ApiKeyLookup, WatchedRules};
///
/// fn router(limiter: Limiter, rules: WatchedRules, keys: impl ApiKeyLookup) -> Router {
///     Router::new()
///         .route("/items", get(|| async { "items" }))
///         .layer(RateLimitLayer::new(limiter, rules))
///         // Added last, so it comes first.
///         .layer(ApiKeyLayer::new(keys))
/// }
/// # }
/// ```
///
/// | the key | status | gRPC | fields |
/// | --- | --- | --- | --- |
/// | valid | the service's | the service's | |
/// | missing, malformed, unknown, revoked, expired | 401 | 16 | `WWW-Authenticate` |
/// | sent twice | 400 | 3 | |
/// | can't be looked up now | 503 | 14 | `Retry-After` |
///
/// The reason for a refusal is in the response's extensions, as an [`ApiKeyError`], unless the request had no key. The
/// look-up determines how long each request waits for it.
#[derive(Clone, Debug)]
pub struct ApiKeyLayer {
    settings: Settings,
}

/// A service behind API keys, created by an [`ApiKeyLayer`].
#[derive(Clone, Debug)]
pub struct ApiKeys<S> {
    settings: Arc<Settings>,
    service: S,
}

#[derive(Clone)]
struct Settings {
    keys: Arc<dyn ApiKeyLookup>,
    read: Read,
    challenge: HeaderValue,
    is_optional: bool,
}

impl ApiKeyLayer {
    /// Keys are sent as `Authorization: Bearer ...`.
    #[must_use]
    pub fn new(keys: impl ApiKeyLookup) -> Self {
        let challenge = HeaderValue::from_static("Bearer");
        Self {
            settings: Settings {
                keys: Arc::new(keys),
                read: request_attributes::bearer(),
                challenge,
                is_optional: false,
            },
        }
    }

    /// Keys are sent in this header, such as `x-api-key`, and nowhere else.
    #[must_use]
    pub fn header(mut self, header: HeaderName) -> Self {
        let challenge = format!("ApiKey header=\"{header}\"");
        self.settings.challenge = HeaderValue::try_from(challenge).unwrap_or(HeaderValue::from_static("ApiKey"));
        self.settings.read = request_attributes::header(header);
        self
    }

    /// Admits requests without a key, with no account. A request with an invalid key is still refused.
    #[must_use]
    pub fn optional(mut self) -> Self {
        self.settings.is_optional = true;
        self
    }
}

impl<S> Layer<S> for ApiKeyLayer {
    type Service = ApiKeys<S>;

    fn layer(&self, service: S) -> ApiKeys<S> {
        ApiKeys { settings: Arc::new(self.settings.clone()), service }
    }
}

impl<S, B, R> Service<Request<B>> for ApiKeys<S>
where
    S: Service<Request<B>, Response = Response<R>> + Clone + Send + 'static,
    S::Future: Send,
    B: Send + 'static,
    R: Body<Data = Bytes> + Send + 'static,
{
    type Response = Response<ResponseBody<R>>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.service.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        // Takes the instance that is ready.
        let again = self.service.clone();
        let mut service = mem::replace(&mut self.service, again);
        let settings = Arc::clone(&self.settings);
        Box::pin(async move {
            let (mut parts, body) = request.into_parts();
            match settings.account(&parts).await {
                Ok(Some(account)) => drop(parts.extensions.insert(account)),
                Ok(None) => {}
                Err(answer) => return Ok(answer.map(ResponseBody::answer)),
            }
            let response = service.call(Request::from_parts(parts, body)).await?;
            Ok(response.map(|body| ResponseBody::inner(body, None)))
        })
    }
}

impl Settings {
    /// The account behind the request, or the response in place of the service's.
    async fn account(&self, parts: &Parts) -> Result<Option<Account>, Response<Bytes>> {
        let protocol = Protocol::of(parts);
        let twice = "the header of the API key was sent more than once";
        let sent =
            (self.read)(parts, Side::Incoming).map_err(|error| protocol.failed(Failure::Request(twice), &error))?;
        let Some(key) = sent.filter(|key| !key.is_empty()) else {
            return match self.is_optional {
                true => Ok(None),
                false => Err(protocol.unauthenticated(&self.challenge, "this request needs an API key")),
            };
        };
        let error = match self.keys.account_of_key(key).await {
            Ok(account) => return Ok(Some(account)),
            Err(error) => error,
        };
        let mut answer = match error {
            ApiKeyError::Unavailable { retry_after } => protocol.unavailable(retry_after.max(Duration::from_secs(1))),
            ApiKeyError::Expired => protocol.unauthenticated(&self.challenge, "this API key has expired"),
            ApiKeyError::Revoked => protocol.unauthenticated(&self.challenge, "this API key was revoked"),
            _ => protocol.unauthenticated(&self.challenge, "there is no such API key"),
        };
        answer.extensions_mut().insert(error);
        Err(answer)
    }
}

impl std::fmt::Debug for Settings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Settings").field("is_optional", &self.is_optional).finish_non_exhaustive()
    }
}
