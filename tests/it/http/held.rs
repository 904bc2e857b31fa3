//! What a request holds until its response has ended: permits, and a cost that becomes known late.

use std::convert::Infallible;
use std::future::{Future, pending, poll_fn};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{Request, Response};
use http_body_util::{BodyExt, StreamBody};
use tokio::sync::{Notify, mpsc};
use tollgate::middleware::{RateLimitLayer, Usage};
use tollgate::{Limiter, Redis};
use tower::{Layer, ServiceExt, service_fn};

use super::{answer, get, set};
use crate::server::Server;

pub(super) const PERMITS: &str = "[[rule]]\nname = \"jobs\"\nkey = \"global\"\nlimits = [\"concurrency 2 ttl 30s\"]";

pub(super) fn limiter(server: &Server) -> Limiter {
    Limiter::new(Redis::open(&server.tcp_url()).expect("an address")).deadline(Duration::from_secs(5))
}

/// Permits that are left of two.
pub(super) async fn left(limiter: &Limiter, layer_rules: &str) -> u64 {
    let rules = set(layer_rules);
    let rule = rules.rule("jobs").expect("a rule");
    limiter.peek(rule, "global").await.expect("an answer").remaining
}

pub(super) async fn until_left(limiter: &Limiter, expected: u64) {
    for _ in 0..1000 {
        if left(limiter, PERMITS).await == expected {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("expected {expected} permits, got {}", left(limiter, PERMITS).await);
}

#[tokio::test]
async fn a_permit_is_held_until_the_body_has_ended_or_is_dropped() {
    let server = Server::start();
    let limiter = limiter(&server);
    let layer = RateLimitLayer::new(limiter.clone(), set(PERMITS));
    // A body that ends when its sender is dropped.
    let (senders, mut opened) = mpsc::unbounded_channel();
    let service = service_fn(move |_: Request<Body>| {
        let (sender, mut receiver) = mpsc::channel::<Bytes>(1);
        senders.send(sender).expect("it is heard");
        let frames = futures_util::stream::poll_fn(move |context| receiver.poll_recv(context));
        let frames = futures_util::StreamExt::map(frames, Ok::<_, Infallible>);
        let body = Body::from_stream(frames);
        async move { Ok::<_, Infallible>(Response::new(body)) }
    });
    let call = || layer.layer(service.clone()).oneshot(get("/", &[]));
    let first = call().await.expect("infallible");
    let second = call().await.expect("infallible");
    let third = call().await.expect("infallible");
    assert_eq!([&first, &second, &third].map(|response| response.status().as_u16()), [200, 200, 429]);
    assert_eq!(left(&limiter, PERMITS).await, 0);
    // Read to its end.
    let sender = opened.recv().await.expect("opened");
    sender.send(Bytes::from_static(b"part")).await.expect("read");
    drop(sender);
    let mut body = first.into_body();
    assert!(body.frame().await.expect("a frame").is_ok());
    assert_eq!(left(&limiter, PERMITS).await, 0, "it hasn't ended");
    assert!(body.frame().await.is_none());
    until_left(&limiter, 1).await;
    drop(body);
    until_left(&limiter, 1).await;
    // A client that hangs up.
    drop(second);
    until_left(&limiter, 2).await;
    assert_eq!(answer(third).await.header("ratelimit-policy"), Some("\"jobs\";q=2;qu=\"concurrent-requests\""));
}

#[tokio::test]
async fn clients_who_hang_up_or_time_out_or_fail_keep_no_permit() {
    let server = Server::start();
    let limiter = limiter(&server);
    let layer = RateLimitLayer::new(limiter.clone(), set(PERMITS));
    let begun = Arc::new(Notify::new());
    let told = Arc::clone(&begun);
    let hangs = service_fn(move |_: Request<Body>| {
        let told = Arc::clone(&told);
        async move {
            told.notify_one();
            pending::<Result<Response<Body>, Infallible>>().await
        }
    });
    for round in 0..5 {
        let call = tokio::spawn(layer.layer(hangs.clone()).oneshot(get("/", &[])));
        begun.notified().await;
        assert_eq!(left(&limiter, PERMITS).await, 1, "{round}");
        call.abort();
        until_left(&limiter, 2).await;
    }
    // At whatever await it is dropped.
    for polls in 0..20 {
        let mut call = Box::pin(layer.layer(hangs.clone()).oneshot(get("/", &[])));
        for _ in 0..polls {
            let polled = poll_fn(|context| Poll::Ready(call.as_mut().poll(context))).await;
            assert!(polled.is_pending());
            tokio::time::sleep(Duration::from_micros(200)).await;
        }
        drop(call);
    }
    until_left(&limiter, 2).await;
    let fails = service_fn(|_: Request<Body>| async { Err::<Response<Body>, _>("broken") });
    for _ in 0..5 {
        assert_eq!(layer.layer(fails).oneshot(get("/", &[])).await.expect_err("its own error"), "broken");
    }
    until_left(&limiter, 2).await;
    // A body that breaks.
    let breaks = service_fn(|_: Request<Body>| async {
        let frames = futures_util::stream::iter([Err::<http_body::Frame<Bytes>, _>(std::io::Error::other("broken"))]);
        Ok::<_, Infallible>(Response::new(Body::new(StreamBody::new(frames))))
    });
    let broken = layer.layer(breaks).oneshot(get("/", &[])).await.expect("a head");
    let mut body = broken.into_body();
    assert!(body.frame().await.expect("a frame").is_err());
    until_left(&limiter, 2).await;
    // One that is switched to another protocol has no body: the permit ends with the handshake.
    let upgrades = service_fn(|_: Request<Body>| async {
        Ok::<_, Infallible>(Response::builder().status(101).body(Body::empty()).expect("a response"))
    });
    drop(layer.layer(upgrades).oneshot(get("/", &[])).await.expect("a head"));
    until_left(&limiter, 2).await;
}

const TOKENS: &str = "[[rule]]\nname = \"tokens\"\nkey = \"global\"\nlimits = [\"token-bucket 1000/1h\"]\ncost = 100";

/// A model's tokens are known when its answer has ended.
#[tokio::test]
async fn a_cost_that_is_known_late_is_settled_when_the_response_has_ended() {
    let server = Server::start();
    let limiter = limiter(&server);
    let rules = set(TOKENS);
    let layer = RateLimitLayer::new(limiter.clone(), rules.clone()).settle();
    for (said, expected) in [(Some(40), 960), (Some(250), 710), (None, 610), (Some(0), 610)] {
        let service = service_fn(move |request: Request<Body>| async move {
            let usage = request.extensions().get::<Usage>().expect("a cost to be settled").clone();
            let frames = futures_util::stream::once(async move {
                usage.set(7);
                if let Some(units) = said {
                    usage.set(units);
                } else {
                    usage.set(100);
                }
                Ok::<_, Infallible>(Bytes::from_static(b"answer"))
            });
            Ok::<_, Infallible>(Response::new(Body::from_stream(frames)))
        });
        let response = layer.layer(service).oneshot(get("/", &[])).await.expect("infallible");
        let taken = limiter.peek(rules.rule("tokens").expect("a rule"), "global").await.expect("an answer").remaining;
        assert!(taken < 1000, "{taken}: it is charged first");
        assert_eq!(&answer(response).await.body[..], b"answer");
        let mut remaining = 0;
        for _ in 0..1000 {
            remaining =
                limiter.peek(rules.rule("tokens").expect("a rule"), "global").await.expect("an answer").remaining;
            if remaining.abs_diff(expected) <= 1 {
                break;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert!(remaining.abs_diff(expected) <= 1, "{said:?}: expected {expected}, got {remaining}");
    }
}

#[tokio::test]
async fn what_a_handler_never_says_stays_as_it_was_charged() {
    let server = Server::start();
    let limiter = limiter(&server);
    let rules = set(TOKENS);
    let layer = RateLimitLayer::new(limiter.clone(), rules.clone()).settle();
    let service = service_fn(|_: Request<Body>| async { Ok::<_, Infallible>(Response::new(Body::from("hello"))) });
    let response = layer.layer(service).oneshot(get("/", &[])).await.expect("infallible");
    assert_eq!(&answer(response).await.body[..], b"hello");
    // What the end of the body has begun is sent before the second of these.
    for _ in 0..2 {
        let now = limiter.peek(rules.rule("tokens").expect("a rule"), "global").await.expect("an answer");
        assert_eq!(now.remaining, 900);
    }
}

/// Its cost is permits too: what is said of it late is not charged, and permits are given back all the same.
#[tokio::test]
async fn a_rule_with_permits_is_not_settled() {
    let server = Server::start();
    let limiter = limiter(&server);
    let text =
        "[[rule]]\nname = \"jobs\"\nkey = \"global\"\nlimits = [\"concurrency 2 ttl 30s\", \"token-bucket 1000/1h\"]";
    let layer = RateLimitLayer::new(limiter.clone(), set(text)).settle();
    let service = service_fn(|request: Request<Body>| async move {
        request.extensions().get::<Usage>().expect("also where it isn't settled").set(250);
        Ok::<_, Infallible>(Response::new(Body::from("hello")))
    });
    let response = layer.layer(service).oneshot(get("/", &[])).await.expect("infallible");
    assert_eq!(left(&limiter, text).await, 1);
    assert_eq!(&answer(response).await.body[..], b"hello");
    for _ in 0..1000 {
        let rules = set(text);
        let now = limiter.peek(rules.rule("jobs").expect("a rule"), "global").await.expect("an answer");
        if now.limits[0].remaining == 2 {
            assert_eq!(now.limits[1].remaining, 999);
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("the permit is kept");
}

/// Layers of others, such as one for CORS, answer by themselves with an empty body.
#[test]
fn a_response_body_can_be_empty_by_default() {
    let body = <tollgate::middleware::ResponseBody<Body>>::default();
    assert!(http_body::Body::is_end_stream(&body));
}
