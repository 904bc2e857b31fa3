//! What a request holds until its response has ended: permits, and a cost that is known only then.

use std::convert::Infallible;
use std::future::{Future, pending, poll_fn};
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, UNIX_EPOCH};

use axum::body::{Body, Bytes};
use axum::http::{Request, Response};
use http_body_util::{BodyExt, StreamBody};
use tokio::sync::{Notify, mpsc};
use tollgate::middleware::{RateLimitLayer, ResponsePermits, Usage};
use tollgate::rules::RuleSet;
use tollgate::{Clock, Embedded, Limiter, Redis, Rule};
use tollgate_testing::polling::{wait_for_value, wait_until};
use tollgate_testing::redis_server::{Server, patient};
use tower::{Layer, ServiceExt, service_fn};

use super::{PERMITS, answer, get, left, redis_limiter, rule_set, until_left};

#[tokio::test]
async fn a_permit_is_held_until_the_body_has_ended_or_is_dropped() {
    let server = Server::start();
    let limiter = redis_limiter(&server);
    let layer = RateLimitLayer::new(limiter.clone(), rule_set(PERMITS));
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
async fn clients_that_hang_up_time_out_or_fail_keep_no_permit() {
    let server = Server::start();
    let limiter = redis_limiter(&server);
    let layer = RateLimitLayer::new(limiter.clone(), rule_set(PERMITS));
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
    let limiter = redis_limiter(&server);
    let rules = rule_set(TOKENS);
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
        let rule = rules.rule("tokens").expect("a rule");
        let remaining = async || limiter.peek(rule, "global").await.expect("an answer").remaining;
        wait_until(&format!("{said:?}: {expected} remain"), async || remaining().await.abs_diff(expected) <= 1).await;
    }
}

/// What the file calls them is what the handler settles; a request stays one.
#[tokio::test]
async fn what_single_limits_take_is_settled_by_their_names() {
    let limiter = Limiter::new(tollgate::Embedded::new());
    let rules = rule_set(
        r#"
        [[rule]]
        name = "model"
        key = "global"
        limits = [
            { limit = "fixed-window 60/1h", cost = 1 },
            { limit = "fixed-window 1000/1h", cost = "tokens", name = "input" },
            { limit = "fixed-window 1000/1d", cost = "tokens" },
            { limit = "fixed-window 50/1d", name = "cents" },
        ]
        "#,
    );
    let layer = RateLimitLayer::new(limiter.clone(), rules.clone()).attribute("tokens", |_| Some("400")).settle();
    let service = service_fn(|request: Request<Body>| async move {
        let usage = request.extensions().get::<Usage>().expect("a cost to be settled").clone();
        usage.set(7);
        usage.set_of("tokens", 999);
        usage.set_of("tokens", 150);
        usage.set_of("nothing", 3);
        Ok::<_, Infallible>(Response::new(Body::from("answer")))
    });
    let response = layer.layer(service).oneshot(get("/", &[])).await.expect("infallible");
    let rule = rules.rule("model").expect("a rule");
    let left = async || {
        let now = limiter.peek(rule, tollgate::Request::new("global").cost(0)).await.expect("an answer");
        [0, 1, 2, 3].map(|at| now.limits[at].remaining)
    };
    assert_eq!(left().await, [59, 600, 600, 49]);
    assert_eq!(&answer(response).await.body[..], b"answer");
    limiter.finish().await;
    assert_eq!(left().await, [59, 850, 850, 43]);
}

#[tokio::test]
async fn a_cost_that_the_handler_never_reports_stays_as_charged() {
    let server = Server::start();
    let limiter = redis_limiter(&server);
    let rules = rule_set(TOKENS);
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

/// Tokens are settled, how many are at work isn't; and permits are given back after that.
#[tokio::test]
async fn of_a_rule_with_permits_the_other_limits_are_settled() {
    let server = Server::start();
    let limiter = redis_limiter(&server);
    let text = "[[rule]]\nname = \"jobs\"\nkey = \"global\"\nlimits = [\"concurrency 2 ttl 30s\", \"fixed-window 1000/1h start first-hit\"]";
    let layer = RateLimitLayer::new(limiter.clone(), rule_set(text)).settle();
    let service = service_fn(|request: Request<Body>| async move {
        request.extensions().get::<Usage>().expect("it").set(250);
        Ok::<_, Infallible>(Response::new(Body::from("hello")))
    });
    for expected in [750, 500, 250] {
        let response = layer.layer(service).oneshot(get("/", &[])).await.expect("infallible");
        assert_eq!(left(&limiter, text).await, 1);
        assert_eq!(&answer(response).await.body[..], b"hello");
        limiter.finish().await;
        let now = limiter.peek(rule_set(text).rule("jobs").expect("a rule"), "global").await.expect("an answer");
        assert_eq!([0, 1].map(|at| now.limits[at].remaining), [2, expected]);
    }
    // What is remembered of a call stays for a minute, in case that an answer was lost.
    let keys: Vec<String> = tollgate::redis::cmd("KEYS").arg("*").query(&mut server.connection()).expect("keys");
    let markers: Vec<_> = keys.iter().filter(|key| key.contains("http")).collect();
    for key in &markers {
        let ttl: i64 = tollgate::redis::cmd("PTTL").arg(key).query(&mut server.connection()).expect("a time");
        assert!(ttl <= 60_000, "{key}: {ttl}");
    }
}

/// They are released when there is a Redis again, long before they expire, however many they are.
#[tokio::test]
async fn permits_dropped_during_a_short_redis_outage_are_given_back() {
    let mut server = Server::start();
    let limiter = redis_limiter(&server);
    let rule = Rule::new("jobs", "concurrency 500 ttl 1h").expect("a rule");
    let mut permits = Vec::new();
    for _ in 0..200 {
        permits.push(limiter.hold(&rule, "key").await.expect("an answer").permit.expect("a permit"));
    }
    tollgate::redis::cmd("SAVE").exec(&mut server.connection()).expect("saved");
    server.stop();
    drop(permits);
    tokio::time::sleep(Duration::from_millis(1500)).await;
    server.start_again(&[]);
    server.wait_until_it_answers();
    limiter.finish().await;
    assert_eq!(limiter.peek(&rule, "key").await.expect("an answer").remaining, 500);
}

/// Whatever runtime it is dropped on, and if that ends at once.
#[test]
fn permits_are_given_back_by_whichever_runtime_lives() {
    let lives = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
    let server = Server::start();
    let limiter = patient(&server.tcp_url());
    let rule = Rule::new("jobs", "concurrency 9 ttl 1h").expect("a rule");
    let hold = async || limiter.hold(&rule, "key").await.expect("an answer").permit.expect("a permit");
    let left = || {
        lives.block_on(async {
            limiter.finish().await;
            limiter.peek(&rule, "key").await.expect("an answer").remaining
        })
    };
    let short = || tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    // Taken on one that lives, and dropped on one that ends; within none; and the other way round.
    let permit = lives.block_on(hold());
    short().block_on(async { drop(permit) });
    assert_eq!(left(), 9);
    let permit = lives.block_on(hold());
    drop(permit);
    assert_eq!(left(), 9);
    let ends = short();
    let permit = ends.block_on(hold());
    drop(ends);
    lives.block_on(async { drop(permit) });
    assert_eq!(left(), 9);
}

/// By an id that others know, the next holder's permit isn't given back by a late try for the one before.
#[tokio::test]
async fn by_an_id_of_the_callers_a_permit_is_given_back_once() {
    let server = Server::start();
    let limiter = Limiter::builder(Redis::open(&server.tcp_url()).expect("an address"))
        .deadline(Duration::from_millis(150))
        .build();
    let rule = Rule::new("jobs", "concurrency 1 ttl 1h").expect("a rule");
    let request = tollgate::Request::new("key").id("job-7");
    // On a busy machine a call may miss its short deadline.
    let first = wait_for_value(async || limiter.hold(&rule, request).await.ok()?.permit).await;
    server.signal("-STOP");
    drop(first);
    limiter.finish().await;
    server.signal("-CONT");
    let patient = limiter.to_builder().deadline(Duration::from_secs(5)).build();
    let again = wait_for_value(async || patient.hold(&rule, request).await.ok()).await;
    tokio::time::sleep(Duration::from_millis(1000)).await;
    again.permit.expect("a permit").renew().await.expect("it is still held");
}

/// A handler meters its stream by a value that reports the cost when it is dropped.
#[tokio::test]
async fn the_cost_that_a_body_reports_when_dropped_is_charged_however_it_ends() {
    struct Meter(Usage);
    impl Drop for Meter {
        fn drop(&mut self) {
            self.0.set(300);
        }
    }
    let limiter = Limiter::new(tollgate::Embedded::new());
    let rules = rule_set("[[rule]]\nname = \"tokens\"\nkey = \"global\"\nlimits = [\"fixed-window 1000/1h\"]");
    let layer = RateLimitLayer::new(limiter.clone(), rules.clone()).settle();
    let service = service_fn(move |request: Request<Body>| async move {
        let meter = Meter(request.extensions().get::<Usage>().expect("it").clone());
        let frames = futures_util::stream::iter([b"one", b"two"]);
        let frames = futures_util::StreamExt::map(frames, move |frame| {
            let _ = &meter;
            Ok::<_, Infallible>(Bytes::from_static(frame))
        });
        Ok::<_, Infallible>(Response::new(Body::from_stream(frames)))
    });
    for (read, expected) in [(true, 700), (false, 400)] {
        let response = layer.layer(service).oneshot(get("/", &[])).await.expect("infallible");
        if read {
            let mut body = response.into_body();
            while let Some(frame) = body.frame().await {
                frame.expect("infallible");
            }
            // The body itself is still there.
            limiter.finish().await;
            let now = limiter.peek(rules.rule("tokens").expect("a rule"), "global").await.expect("an answer");
            assert_eq!(now.remaining, expected);
        } else {
            drop(response);
            limiter.finish().await;
            let now = limiter.peek(rules.rule("tokens").expect("a rule"), "global").await.expect("an answer");
            assert_eq!(now.remaining, expected);
        }
    }
}

/// One layer around the retries, and one within: an attempt that says nothing isn't charged for another's.
#[tokio::test]
async fn attempts_of_one_request_are_settled_each_by_itself() {
    let limiter = Limiter::new(tollgate::Embedded::new());
    let rule = |name: &str| {
        rule_set(&format!("[[rule]]\nname = \"{name}\"\nkey = \"global\"\nlimits = [\"fixed-window 1000/1h\"]"))
    };
    let (around, each) = (rule("around"), rule("each"));
    let outer = RateLimitLayer::new(limiter.clone(), around.clone()).settle();
    let inner = RateLimitLayer::new(limiter.clone(), each.clone()).settle();
    let attempts = Arc::new(std::sync::atomic::AtomicU64::new(0));
    let counted = Arc::clone(&attempts);
    let service = inner.layer(service_fn(move |request: Request<Body>| {
        if counted.fetch_add(1, std::sync::atomic::Ordering::Relaxed) == 0 {
            request.extensions().get::<Usage>().expect("it").set(50);
        }
        async { Ok::<_, Infallible>(Response::new(Body::empty())) }
    }));
    let thrice = service_fn(move |request: Request<Body>| {
        let service = service.clone();
        async move {
            let extensions = request.extensions().clone();
            for _ in 0..2 {
                let mut attempt = get("/", &[]);
                *attempt.extensions_mut() = extensions.clone();
                service.clone().oneshot(attempt).await?;
            }
            service.oneshot(request).await
        }
    });
    outer.layer(thrice).oneshot(get("/", &[])).await.expect("infallible");
    limiter.finish().await;
    let mut remaining = Vec::new();
    for (rules, name) in [(&around, "around"), (&each, "each")] {
        let rule = rules.rule(name).expect("a rule");
        remaining.push(limiter.peek(rule, "global").await.expect("an answer").remaining);
    }
    assert_eq!(remaining, [950, 948]);
}

/// A client that reads its response a byte a minute, or a handler that hangs, holds a permit for the rule's longest
/// time; the request goes on.
#[tokio::test(start_paused = true)]
async fn a_permit_is_given_back_after_the_longest_hold_of_its_rule() {
    let text = "[[rule]]\nname = \"jobs\"\nkey = \"global\"\nlimits = [\"concurrency 2 ttl 30s\"]\nmax_hold = \"10m\"";
    for rules in
        [rule_set(text), RuleSet::single(rule_set(text).rule("jobs").expect("a rule"), "global").expect("a set")]
    {
        let clock = Clock::new(UNIX_EPOCH);
        let limiter = Limiter::new(Embedded::with_clock(clock.clone()));
        let layer = RateLimitLayer::new(limiter.clone(), rules.clone());
        let trickles = service_fn(|request: Request<Body>| async move {
            let held = request.extensions().get::<ResponsePermits>().expect("permits").hold();
            let frames = futures_util::stream::repeat_with(move || {
                let _ = &held;
                Ok::<_, Infallible>(Bytes::from_static(b"."))
            });
            Ok::<_, Infallible>(Response::new(Body::from_stream(frames)))
        });
        let hangs = service_fn(|_: Request<Body>| pending::<Result<Response<Body>, Infallible>>());
        let hung = tokio::spawn(layer.layer(hangs).oneshot(get("/", &[])));
        let mut body = layer.layer(trickles).oneshot(get("/", &[])).await.expect("infallible").into_body();
        let remaining =
            async || limiter.peek(rules.rule("jobs").expect("a rule"), "global").await.expect("an answer").remaining;
        for second in 1..=620 {
            tokio::time::sleep(Duration::from_secs(1)).await;
            clock.advance(Duration::from_secs(1));
            let expected = if second < 600 { 0 } else { 2 };
            assert!(second == 600 || remaining().await == expected, "after {second} s: {}", remaining().await);
            assert!(body.frame().await.expect("it goes on").is_ok());
        }
        assert!(!hung.is_finished());
        // What others hold by now isn't given back with it.
        let other = limiter.hold(rules.rule("jobs").expect("a rule"), "global").await.expect("an answer");
        drop(body);
        hung.abort();
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(remaining().await, 1);
        drop(other);
    }
}

/// By an id that others know too, it isn't given back a second time, when the next holder has it.
#[tokio::test(start_paused = true)]
async fn a_permit_whose_longest_hold_is_over_is_given_back_once() {
    let limiter = Limiter::new(Embedded::with_clock(Clock::new(UNIX_EPOCH)));
    let rule = Rule::new("jobs", "concurrency 1 ttl 1h").expect("a rule");
    let rule = rule.max_hold(Duration::from_secs(60)).expect("a time");
    let request = tollgate::Request::new("key").id("job-7");
    let hold = async || limiter.hold(&rule, request).await.expect("an answer").permit.expect("a permit");
    let first = hold().await.renewed();
    tokio::time::sleep(Duration::from_secs(61)).await;
    assert!(first.renew().await.expect_err("it is given back").is_unknown_id());
    let second = hold().await;
    drop(first);
    limiter.finish().await;
    second.renew().await.expect("it is still held");
    let bad = "gcra 1/1s".parse::<Rule>().expect("a rule").max_hold(Duration::from_secs(1)).expect_err("no permits");
    assert_eq!(bad.to_string(), "rule: max_hold: only a rule with a concurrency limit can have it");
}

/// Layers of others, such as one for CORS, answer by themselves with an empty body.
#[test]
fn a_response_body_can_be_empty_by_default() {
    let body = <tollgate::middleware::ResponseBody<Body>>::default();
    assert!(http_body::Body::is_end_stream(&body));
}

/// Nothing was taken, so nothing is to be given back.
#[tokio::test]
async fn requests_refused_while_redis_is_away_leave_no_task() {
    let limiter = Limiter::new(Redis::open("redis://127.0.0.1:1").expect("a good address"));
    for settles in [false, true] {
        let layer = RateLimitLayer::new(limiter.clone(), rule_set(PERMITS));
        let layer = if settles { layer.settle() } else { layer };
        let service = service_fn(|_: Request<Body>| async { Ok::<_, Infallible>(Response::new(Body::empty())) });
        for _ in 0..1_000 {
            let response = layer.layer(service).oneshot(get("/", &[])).await.expect("infallible");
            assert_eq!(response.status(), 503);
        }
    }
    let tasks = tokio::runtime::Handle::current().metrics().num_alive_tasks();
    assert!(tasks < 10, "{tasks} tasks");
}
