//! HTTP: what a service under rules answers, on axum and as a plain tower service.

mod axum_servers;
mod client_addresses;
mod connections;
mod count_by_response;
mod header_fields;
mod outgoing_calls;
mod permits;
mod refusals;
mod responses;
mod rewritten_targets;
mod routes;
mod sentences_under_load;

use std::convert::Infallible;
use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::BodyExt;
use tokio::net::TcpListener;
use tollgate::middleware::{RateLimit, RateLimitLayer, ResponseBody};
use tollgate::{Embedded, Limiter, Redis};
use tollgate_testing::polling::wait_until;
use tollgate_testing::redis_server::Server;
pub(crate) use tollgate_testing::rules::rule_set;
use tower::{Layer, ServiceExt, service_fn};

/// By the engine in this process.
fn embedded(rules: &str) -> RateLimitLayer {
    RateLimitLayer::new(Limiter::new(Embedded::new()), rule_set(rules))
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

const PERMITS: &str = "[[rule]]\nname = \"jobs\"\nkey = \"global\"\nlimits = [\"concurrency 2 ttl 30s\"]";

fn redis_limiter(server: &Server) -> Limiter {
    Limiter::builder(Redis::open(&server.tcp_url()).expect("an address")).deadline(Duration::from_secs(5)).build()
}

/// Permits that are left of two.
async fn left(limiter: &Limiter, layer_rules: &str) -> u64 {
    let rules = rule_set(layer_rules);
    let rule = rules.rule("jobs").expect("a rule");
    limiter.peek(rule, "global").await.expect("an answer").remaining
}

async fn until_left(limiter: &Limiter, expected: u64) {
    wait_until(&format!("{expected} permits are left"), async || left(limiter, PERMITS).await == expected).await;
}

/// Serves until the test ends.
async fn serve(app: Router) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    let app = app.into_make_service_with_connect_info::<SocketAddr>();
    tokio::spawn(async move { axum::serve(listener, app).await });
    address
}
