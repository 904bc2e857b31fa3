//! Outgoing calls: they wait instead of being denied, and pause where the server's Retry-After says so.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use axum::body::Body;
use axum::http::{Request, Response};
use tollgate::middleware::{HeaderStyle, RateLimitLayer};
use tollgate::rules::RuleSet;
use tollgate::{Clock, Embedded, Limiter};
use tower::{Layer, ServiceExt, service_fn};

use super::{get, rule_set};

#[tokio::test(start_paused = true)]
async fn calls_wait_in_order_up_to_a_bound() {
    let rules = rule_set(
        "[[rule]]\nname = \"theirs\"\nkey = \"global\"\nlimits = [\"token-bucket 1/200ms burst 1 max-debt 100\"]",
    );
    let limiter = Limiter::new(Embedded::with_clock(Clock::new(SystemTime::UNIX_EPOCH)));
    let layer = RateLimitLayer::new(limiter, rules).wait(Duration::from_millis(1300));
    let order = Arc::new(std::sync::Mutex::new(Vec::new()));
    let mut calls = Vec::new();
    let began = tokio::time::Instant::now();
    for number in 0..10 {
        let order = Arc::clone(&order);
        let service = service_fn(move |_: Request<Body>| {
            order.lock().expect("it").push(number);
            async { Ok::<_, Infallible>(Response::new(Body::empty())) }
        });
        calls.push(layer.layer(service).oneshot(get("/", &[])));
    }
    let answers = futures_util::future::join_all(calls).await.into_iter();
    let statuses: Vec<_> = answers.map(|response| response.expect("infallible").status().as_u16()).collect();
    assert_eq!(*order.lock().expect("it"), [0, 1, 2, 3, 4, 5, 6]);
    // One at once, and one for each 200 ms until the bound.
    assert_eq!(statuses, [[200; 7].as_slice(), &[429; 3]].concat());
    assert!((1200..1300).contains(&began.elapsed().as_millis()), "{:?}", began.elapsed());
}

#[tokio::test]
async fn retry_after_holds_back_all_callers_of_the_key() {
    for (status, fields, held) in [
        (429, &[("retry-after", "7")][..], Some(7)),
        (503, &[("retry-after", "7")], Some(7)),
        (529, &[("retry-after", "7")], Some(7)),
        (403, &[("retry-after", "6.5")], Some(7)),
        (429, &[("retry-after", "3"), ("retry-after", "7")], Some(7)),
        (429, &[("date", "Sun, 06 Nov 1994 08:30:00 GMT"), ("retry-after", "Sun, 06 Nov 1994 08:30:07 GMT")], Some(7)),
        (429, &[("date", "Sat, 06 Nov 2094 08:30:00 GMT"), ("retry-after", "Sat, 06 Nov 2094 08:30:07 GMT")], Some(7)),
        (200, &[("ratelimit", "limit=5, remaining=0, reset=6")], Some(6)),
        (200, &[("ratelimit-limit", "5"), ("ratelimit-remaining", "0"), ("ratelimit-reset", "6")], Some(6)),
        (200, &[("retry-after", "7")], None),
        (200, &[("ratelimit", "\"theirs\";r=0;t=6")], Some(6)),
        (200, &[("ratelimit", "\"theirs\";r=3;t=9")], None),
        (429, &[("retry-after", "2"), ("ratelimit", "\"theirs\";r=0;t=7")], Some(7)),
        // No longer than the bound set for it.
        (429, &[("retry-after", "86400")], Some(8)),
        (429, &[], None),
        (200, &[], None),
    ] {
        let rules = rule_set("[[rule]]\nname = \"theirs\"\nkey = \"global\"\nlimits = [\"gcra 100/1s burst 100\"]");
        let limiter = Limiter::new(Embedded::new());
        let layer = RateLimitLayer::new(limiter.clone(), rules.clone()).upstream_backoff(Duration::from_secs(8));
        let calls = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&calls);
        let service = service_fn(move |_: Request<Body>| {
            counted.fetch_add(1, Ordering::Relaxed);
            let response = fields
                .iter()
                .fold(Response::builder().status(status), |response, (name, value)| response.header(*name, *value));
            async move { Ok::<_, Infallible>(response.body(Body::empty()).expect("a response")) }
        });
        let first = layer.layer(service.clone()).oneshot(get("/", &[])).await.expect("infallible");
        assert_eq!(first.status().as_u16(), status, "the answer goes through");
        let then = limiter.peek(rules.rule("theirs").expect("a rule"), "global").await.expect("an answer");
        assert_eq!(then.blocked, held.is_some(), "{status} {fields:?}");
        let wait = then.retry_after.duration().map(|wait| wait.as_secs_f64().ceil() as u64);
        assert_eq!(wait.filter(|_| then.blocked), held, "{status} {fields:?}");
        let second = layer.layer(service).oneshot(get("/", &[])).await.expect("infallible");
        let expected = if held.is_some() { (1, 429) } else { (2, status) };
        assert_eq!((calls.load(Ordering::Relaxed), second.status().as_u16()), expected, "{status} {fields:?}");
    }
}

/// A longer block, such as an operator's, is kept whatever the server's Retry-After says.
#[tokio::test]
async fn an_upstream_backoff_never_shortens_a_block() {
    // Of the second, no cost but what is owed can ever be had.
    for limit in ["gcra 100/1s burst 100", "token-bucket 5/1s burst 0 max-debt 100"] {
        let rules = rule_set(&format!("[[rule]]\nname = \"theirs\"\nkey = \"global\"\nlimits = [\"{limit}\"]"));
        never_shortened(rules).await;
    }
}

async fn never_shortened(rules: RuleSet) {
    let limiter = Limiter::new(Embedded::new());
    let layer = RateLimitLayer::new(limiter.clone(), rules.clone())
        .wait(Duration::from_secs(1))
        .upstream_backoff(Duration::MAX);
    let blocking = (limiter.clone(), rules.clone());
    let service = service_fn(move |_: Request<Body>| {
        let (limiter, rules) = blocking.clone();
        async move {
            let rule = rules.rule("theirs").expect("a rule");
            limiter.block(rule, "global", Duration::from_secs(60)).await.expect("blocked");
            let response = Response::builder().status(429).header("retry-after", "2").body(Body::empty());
            Ok::<_, Infallible>(response.expect("a response"))
        }
    });
    layer.layer(service).oneshot(get("/", &[])).await.expect("infallible");
    let request = tollgate::Request::new("global").cost(0);
    let then = limiter.peek(rules.rule("theirs").expect("a rule"), request).await.expect("an answer");
    assert!(then.retry_after.duration().is_some_and(|wait| wait > Duration::from_secs(50)), "{then:?}");
}

/// A proxy that sends its own request on, with all that its router noted of it: the path that it goes to counts.
#[tokio::test]
async fn outgoing_calls_are_counted_by_their_destination() {
    let rules = "[[rule]]\nname = \"theirs\"\nmatch = { path = \"/v1/*\" }\nkey = \"global\"\nlimits = [\"gcra 1/1h\"]";
    let elsewhere = [
        ("https://theirs.example/v1/chat", "/proxy/chat"),
        ("https://theirs.example/v1/chat", "/proxy/chat"),
        ("https://theirs.example/chat", "/v1/chat"),
    ];
    // Routers within others, over HTTP/1 and HTTP/2; one of them cuts off a slash. Or sent on within one connection.
    let here = [
        ("/chat", "/v1/chat"),
        ("https://ours.example/chat", "https://ours.example/v1/chat"),
        ("/", "/v1/chat"),
        ("/chat", "/v1/chat/"),
        ("/v1/x", "/proxy/x"),
    ];
    let statuses = async |layer: RateLimitLayer, requests: &[(&str, &str)]| {
        let mut statuses = Vec::new();
        for (target, original) in requests {
            let mut request = get(target, &[]);
            request.extensions_mut().insert(axum::extract::OriginalUri(original.parse().expect("a target")));
            statuses.push(super::ask(&layer, request).await.status.as_u16());
        }
        statuses
    };
    let outgoing = || super::embedded(rules).for_outgoing();
    assert_eq!(statuses(outgoing(), &elsewhere).await, [200, 429, 200]);
    assert_eq!(statuses(outgoing(), &here).await, [200, 200, 200, 200, 200]);
    // Otherwise the path that was asked for, also of a layer that waits or backs off.
    let bound = Duration::from_millis(1);
    for layer in [
        super::embedded(rules),
        super::embedded(rules).wait(bound),
        super::embedded(rules).upstream_backoff(bound),
        super::embedded(rules).wait(bound).upstream_backoff(bound),
    ] {
        assert_eq!(statuses(layer.clone(), &elsewhere).await, [200, 200, 200]);
        assert_eq!(statuses(layer, &here).await, [429, 429, 429, 429, 200]);
    }
}

/// Fields that a layer of our own within has added, and its denials, are no word of the other side.
#[tokio::test]
async fn only_what_the_other_side_says_causes_a_backoff() {
    for style in [HeaderStyle::Draft, HeaderStyle::XRateLimit] {
        let limiter = Limiter::new(Embedded::new());
        let all = rule_set("[[rule]]\nname = \"all\"\nkey = \"global\"\nlimits = [\"gcra 1000/1s burst 1000\"]");
        let users = rule_set("[[rule]]\nname = \"users\"\nkey = \"user\"\nlimits = [\"fixed-window 1/1h\"]");
        let outer = RateLimitLayer::new(limiter.clone(), all.clone()).upstream_backoff(Duration::from_secs(600));
        let user = axum::http::HeaderName::from_static("x-user");
        let inner = RateLimitLayer::new(limiter.clone(), users).header("user", user).header_style(style);
        let told = Arc::new(std::sync::Mutex::new(Response::new(Body::empty())));
        let answers = Arc::clone(&told);
        let service = outer.layer(inner.layer(service_fn(move |_: Request<Body>| {
            let answer = std::mem::take(&mut *answers.lock().expect("it"));
            async { Ok::<_, Infallible>(answer) }
        })));
        let ask = async |user: &str| {
            service.clone().oneshot(get("/", &[("x-user", user)])).await.expect("infallible").status().as_u16()
        };
        for (user, expected) in [("alice", 200), ("alice", 429), ("bob", 200), ("bob", 429), ("carol", 200)] {
            assert_eq!(ask(user).await, expected, "{user}");
        }
        told.lock().expect("it").headers_mut().insert("ratelimit", "\"theirs\";r=0;t=60".parse().expect("a value"));
        assert_eq!((ask("dave").await, ask("erin").await), (200, 429));
        let then = limiter.peek(all.rule("all").expect("a rule"), "global").await.expect("an answer");
        assert!(then.blocked, "what they say counts beside our own");
    }
}

/// Calls waiting in order when a Retry-After arrives wait for that too.
#[tokio::test]
async fn a_waiting_call_keeps_waiting_while_its_key_is_blocked() {
    let rules =
        rule_set("[[rule]]\nname = \"theirs\"\nkey = \"global\"\nlimits = [\"gcra 1/1s burst 0 max-debt 100\"]");
    for (bound, expected) in
        [(Duration::from_secs(12), [200, 200, 200, 429]), (Duration::from_millis(4500), [200, 429, 429, 429])]
    {
        let layer = RateLimitLayer::new(Limiter::new(Embedded::new()), rules.clone());
        let layer = layer.wait(bound).upstream_backoff(Duration::from_secs(5));
        let calls = Arc::new(AtomicU64::new(0));
        let sent = Arc::new(std::sync::Mutex::new(Vec::new()));
        let began = Instant::now();
        let asked = (0..4).map(|_| {
            let (calls, sent) = (Arc::clone(&calls), Arc::clone(&sent));
            let service = service_fn(move |_: Request<Body>| {
                sent.lock().expect("it").push(began.elapsed());
                let response = match calls.fetch_add(1, Ordering::Relaxed) {
                    1 => Response::builder().status(429).header("retry-after", "60"),
                    _ => Response::builder(),
                };
                async { Ok::<_, Infallible>(response.body(Body::empty()).expect("a response")) }
            });
            layer.layer(service).oneshot(get("/", &[]))
        });
        let answers = futures_util::future::join_all(asked).await.into_iter();
        let mut statuses: Vec<_> = answers.map(|answer| answer.expect("infallible").status().as_u16()).collect();
        // A busy machine may wake two of them together, in either order.
        statuses.sort_unstable();
        assert_eq!(statuses, expected);
        let sent = sent.lock().expect("it").clone();
        assert!(sent.iter().skip(2).all(|at| *at >= Duration::from_secs(5)), "{sent:?}");
        assert_eq!(sent.len(), if expected[1] == 200 { 4 } else { 2 });
    }
}
