//! Whether the service runs, and whether it can decide.

use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use serde_json::json;
use tollgate::{Error, OnError, Request, Rule};

use crate::service::Service;

/// The process answers.
pub(crate) async fn healthz() -> &'static str {
    "ok\n"
}

/// It has rules, Redis answers, and it isn't to end.
pub(crate) async fn readyz(State(service): State<Service>) -> Response {
    let rules = service.rules().len();
    let redis = service.redis().await;
    let is_ending = service.is_ending();
    let is_ready = rules > 0 && redis.is_ok() && !is_ending;
    let status = if is_ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let redis = redis.map_or_else(|error| error.kind().name(), |()| "ok");
    (status, Json(json!({ "ready": is_ready, "rules": rules, "redis": redis, "ending": is_ending }))).into_response()
}

impl Service {
    /// Whether Redis decides, by an acquire of a key of its own: a replica that is read-only, and a Redis without memory,
    /// answer looks. One round trip.
    ///
    /// # Errors
    ///
    /// Why it doesn't.
    #[doc(hidden)]
    pub async fn redis(&self) -> Result<(), Error> {
        let rule = Rule::new("tollgate-serve-ready", "fixed-window 1000000000/1s");
        let rule = rule.and_then(|rule| rule.on_error(OnError::Closed)).expect("a good rule");
        // A connection that is still being made is no outage, however short the time for a decision.
        let request = Request::new("ready").deadline(Duration::from_secs(1));
        self.limiter().acquire(&rule, request).await.map(drop)
    }
}
