//! HTTP: what a service under rules answers, on axum and as a plain tower service.

mod addresses;
mod answers;
mod connections;
mod fields;
mod held;
mod outgoing;
mod served;

use std::convert::Infallible;

use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::BodyExt;
use tollgate::middleware::{RateLimit, RateLimitLayer, ResponseBody};
use tollgate::rules::RuleSet;
use tollgate::{Embedded, Limiter};
use tower::{Layer, ServiceExt, service_fn};

pub(crate) fn set(text: &str) -> RuleSet {
    text.parse().unwrap_or_else(|error| panic!("{error}\n{text}"))
}

/// By the engine in this process.
fn embedded(rules: &str) -> RateLimitLayer {
    RateLimitLayer::new(Limiter::new(Embedded::new()), set(rules))
}

/// What came back, read to its end.
#[derive(Debug)]
struct Answer {
    status: StatusCode,
    headers: HeaderMap,
    body: Bytes,
}

impl Answer {
    fn header(&self, name: &str) -> Option<&str> {
        let mut values = self.headers.get_all(name).iter();
        let first = values.next()?;
        assert!(values.next().is_none(), "{name} stands twice");
        Some(first.to_str().expect("text"))
    }

    fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {:?}", self.body))
    }
}

/// Of a service that says hello, and of which rules its requests came by.
async fn ask(layer: &RateLimitLayer, request: Request<Body>) -> Answer {
    let hello = service_fn(|request: Request<Body>| async move {
        assert!(request.extensions().get::<tollgate::rules::Verdict>().is_some_and(|verdict| verdict.allowed));
        Ok::<_, Infallible>(Response::new(Body::from("hello")))
    });
    answer(layer.layer(hello).oneshot(request).await.expect("infallible")).await
}

async fn answer(response: Response<ResponseBody<Body>>) -> Answer {
    let (parts, body) = response.into_parts();
    let body = body.collect().await.expect("a body").to_bytes();
    Answer { status: parts.status, headers: parts.headers, body }
}

fn get(path: &str, headers: &[(&str, &str)]) -> Request<Body> {
    let request = headers.iter().fold(Request::get(path), |request, (name, value)| request.header(*name, *value));
    request.body(Body::empty()).expect("a request")
}

/// A service of this handler under a layer.
fn under<S>(layer: &RateLimitLayer, service: S) -> RateLimit<S> {
    layer.layer(service)
}
