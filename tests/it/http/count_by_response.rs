//! Rules that count requests by the status of their response.

use std::convert::Infallible;
use std::future::{Future, pending, poll_fn};
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, SystemTime};

use axum::body::Body;
use axum::http::{Request, Response};
use tollgate::middleware::{RateLimitLayer, Usage};
use tollgate::rules::{Attributes, Effect};
use tollgate::{Clock, Cluster, Embedded, Limiter};
use tollgate_testing::cluster::ClusterServers;
use tollgate_testing::polling::PATIENCE;
use tollgate_testing::redis_server::Server;
use tower::{Layer, ServiceExt, service_fn};

use super::{answer, get, redis_limiter, rule_set};

/// What remains of each limit of this rule.
async fn remaining(limiter: &Limiter, rules: &str, rule: &str) -> Vec<u64> {
    limiter.finish().await;
    let rules = rule_set(rules);
    let now = limiter.peek(rules.rule(rule).expect("a rule"), "global").await.expect("an answer");
    now.limits.iter().map(|limit| limit.remaining).collect()
}

/// A rule with this limit, which counts failures.
fn failures(name: &str, limits: &str, more: &str) -> String {
    format!("[[rule]]\nname = \"{name}\"\nkey = \"global\"\nlimits = [{limits}]\ncount = [\"401\", \"5xx\"]\n{more}\n")
}

/// A request to a service that answers with the status that the request asks for.
async fn ask(layer: &RateLimitLayer, status: u16) -> super::Answer {
    let service = service_fn(|request: Request<Body>| async move {
        let status: u16 = request.uri().path()[1..].parse().expect("a status");
        let response = Response::builder().status(status).body(Body::from("hello"));
        Ok::<_, Infallible>(response.expect("a response"))
    });
    answer(layer.layer(service).oneshot(get(&format!("/{status}"), &[])).await.expect("infallible")).await
}

#[tokio::test]
async fn only_the_statuses_of_the_rule_stay_charged_and_fields_say_so() {
    let limiter = Limiter::new(Embedded::new());
    let rules = failures("login", "\"fixed-window 3/1h start first-hit\"", "");
    let layer = RateLimitLayer::new(limiter.clone(), rule_set(&rules));
    let mut left = 3;
    for status in [200, 200, 303, 404, 401, 200, 500, 200, 503] {
        let got = ask(&layer, status).await;
        assert_eq!(got.status.as_u16(), status);
        let counts = status == 401 || status >= 500;
        left -= u64::from(counts);
        assert_eq!(remaining(&limiter, &rules, "login").await, [left], "{status}");
        let field = got.header("ratelimit").expect("a field").to_owned();
        let shown = format!("\"login\";r={left}");
        assert!(field.starts_with(&shown), "{status}: {field}, not {shown}");
        // Untouched, there is nothing to wait for.
        assert_eq!(field.contains(";t="), left < 3, "{status}: {field}");
    }
    assert_eq!(ask(&layer, 200).await.status.as_u16(), 429);
}

/// Charged when it comes, until there is a response: so guesses made at once don't pass together.
#[tokio::test]
async fn a_request_without_a_response_stays_charged() {
    let limiter = Limiter::new(Embedded::new());
    let rules = failures("login", "\"fixed-window 3/1h start first-hit\"", "");
    let layer = RateLimitLayer::new(limiter.clone(), rule_set(&rules));
    let never = service_fn(|_: Request<Body>| pending::<Result<Response<Body>, Infallible>>());
    let mut call = Box::pin(layer.layer(never).oneshot(get("/", &[])));
    let polled = poll_fn(|context| Poll::Ready(call.as_mut().poll(context))).await;
    assert!(polled.is_pending());
    assert_eq!(remaining(&limiter, &rules, "login").await, [2]);
    drop(call);
    assert_eq!(remaining(&limiter, &rules, "login").await, [2], "the client left");
    let fails = service_fn(|_: Request<Body>| async { Err::<Response<Body>, _>("no answer") });
    assert_eq!(layer.layer(fails).oneshot(get("/", &[])).await.map(drop), Err("no answer"));
    assert_eq!(remaining(&limiter, &rules, "login").await, [1], "the service failed");
}

/// Of many at once, exactly those stay charged.
#[tokio::test]
async fn of_many_requests_exactly_those_that_count_stay_charged() {
    let server = Server::start();
    let limiter = redis_limiter(&server);
    for limit in ["token-bucket 1000/1000d", "fixed-window 1000/1h start first-hit", "sliding-log 1000/1h"] {
        let two = format!("\"{limit}\", {{ name = \"two\", limit = \"{limit}\", cost = 2 }}");
        let rules = failures("login", &two, "");
        let layer = RateLimitLayer::new(limiter.clone(), rule_set(&rules));
        let statuses: Vec<u16> = (0..200).map(|at| [200, 302, 401, 404, 500][(at + at / 7) % 5]).collect();
        let asked = statuses.iter().map(|status| ask(&layer, *status));
        for (got, status) in futures_util::future::join_all(asked).await.iter().zip(&statuses) {
            assert_eq!(got.status.as_u16(), *status);
        }
        let counted = statuses.iter().filter(|status| matches!(status, 401 | 500)).count() as u64;
        assert_eq!(remaining(&limiter, &rules, "login").await, [1000 - counted, 1000 - 2 * counted], "{limit}");
        let rule = rule_set(&rules);
        limiter.reset(rule.rule("login").expect("a rule"), "global").await.expect("an answer");
    }
}

/// By the id of the request, on each node that has one of its keys.
#[tokio::test]
async fn on_several_nodes_exactly_those_that_count_stay_charged() {
    const LIMIT: &str = "fixed-window 1000/1h start first-hit";
    let servers = ClusterServers::of_primaries();
    let limiter = Limiter::builder(Cluster::open(&servers.url()).expect("an address")).deadline(PATIENCE).build();
    let two = format!("\"{LIMIT}\", {{ name = \"paths\", limit = \"{LIMIT}\", key = \"path\", cost = 2 }}");
    let rules = failures("login", &two, "");
    let layer = RateLimitLayer::new(limiter.clone(), rule_set(&rules));
    let statuses = [200, 401, 500, 404, 401, 200, 401].repeat(8);
    let asked = statuses.iter().map(|status| ask(&layer, *status));
    for (got, status) in futures_util::future::join_all(asked).await.iter().zip(&statuses) {
        assert_eq!(got.status.as_u16(), *status);
    }
    limiter.finish().await;
    let rules = rule_set(&rules);
    for (path, failed) in [("/200", 0), ("/401", 24), ("/500", 8), ("/404", 0)] {
        let applies = rules.applies(&Attributes::new().path(path)).expect("a rule");
        let Effect::Limit(charge) = applies.effect else { panic!("it has limits") };
        let now = limiter.peek(charge.rule(), charge.request()).await.expect("an answer");
        let left: Vec<_> = now.limits.iter().map(|limit| limit.remaining).collect();
        assert_eq!(left, [1000 - 32, 1000 - 2 * failed], "{path}");
    }
}

/// A trial of such a rule counts as the rule will, also where another rule denies the request.
#[tokio::test]
async fn a_shadow_rule_counts_by_the_response_too() {
    let limiter = Limiter::new(Embedded::new());
    let shadow = failures("trial", "\"fixed-window 9/1h start first-hit\"", "shadow = true\npriority = 1");
    let own = "[[rule]]\nname = \"all\"\nkey = \"global\"\nlimits = [\"fixed-window 4/1h start first-hit\"]\n";
    let rules = format!("{shadow}{own}");
    let layer = RateLimitLayer::new(limiter.clone(), rule_set(&rules));
    let mut statuses = Vec::new();
    for status in [200, 401, 200, 500, 401, 200] {
        statuses.push(ask(&layer, status).await.status.as_u16());
    }
    assert_eq!(statuses, [200, 401, 200, 500, 429, 429]);
    assert_eq!(remaining(&limiter, &rules, "trial").await, [7]);
    assert_eq!(remaining(&limiter, &rules, "all").await, [0]);
}

/// What counts is settled at the cost that the handler reports; what doesn't is given back, whatever it reports.
#[tokio::test]
async fn a_cost_is_settled_only_of_what_counts() {
    let limiter = Limiter::new(Embedded::new());
    let rules = failures("login", "\"fixed-window 100/1h start first-hit\"", "cost = 10");
    let layer = RateLimitLayer::new(limiter.clone(), rule_set(&rules)).settle();
    let mut left = 100;
    for (status, said) in [(200, Some(30)), (401, Some(30)), (200, None), (500, None), (401, Some(0))] {
        let service = service_fn(move |request: Request<Body>| async move {
            if let Some(units) = said {
                request.extensions().get::<Usage>().expect("a cost to be settled").set(units);
            }
            Ok::<_, Infallible>(Response::builder().status(status).body(Body::from("hello")).expect("a response"))
        });
        answer(layer.layer(service).oneshot(get("/", &[])).await.expect("infallible")).await;
        left -= if status == 200 { 0 } else { said.unwrap_or(10) };
        assert_eq!(remaining(&limiter, &rules, "login").await, [left], "{status}, {said:?}");
    }
}

/// Of rules that apply together, each gives back by what it says itself, and what is left of each is settled.
#[tokio::test]
async fn of_several_rules_those_that_count_by_the_response_give_back() {
    let limiter = Limiter::new(Embedded::new());
    let limits = "\"fixed-window 99/1h start first-hit\"";
    let login = failures("login", limits, "continue = true\npriority = 1");
    let all = format!("[[rule]]\nname = \"all\"\nkey = \"global\"\nlimits = [{limits}]\ncost = 2\n");
    let rules = format!("{login}{all}");
    let layer = RateLimitLayer::new(limiter.clone(), rule_set(&rules)).settle();
    let mut left = [99, 99];
    for (status, said) in [(200, None), (401, None), (200, Some(5)), (401, Some(5)), (500, Some(0))] {
        let service = service_fn(move |request: Request<Body>| async move {
            if let Some(units) = said {
                request.extensions().get::<Usage>().expect("a cost to be settled").set(units);
            }
            Ok::<_, Infallible>(Response::builder().status(status).body(Body::from("hello")).expect("a response"))
        });
        let got = answer(layer.layer(service).oneshot(get("/", &[])).await.expect("infallible")).await;
        let shown = if status == 200 { left[0] } else { left[0] - 1 };
        let fields = [got.header("ratelimit"), got.header("ratelimit-policy")].map(|field| field.expect("a field"));
        assert!(fields[0].starts_with(&format!("\"login/fixed-window-1h\";r={shown}")), "{status}: {fields:?}");
        assert!(
            fields[1].contains("\"login/fixed-window-1h\"") && fields[1].contains("\"all/fixed-window-1h\""),
            "{fields:?}"
        );
        left[0] -= if status == 200 { 0 } else { said.unwrap_or(1) };
        left[1] -= said.unwrap_or(2);
        for (rule, left) in ["login", "all"].iter().zip(left) {
            assert_eq!(remaining(&limiter, &rules, rule).await, [left], "{rule}: {status}, {said:?}");
        }
    }
}

/// The units go back with the head of the response, the permit with its end.
#[tokio::test]
async fn permits_are_held_until_the_body_has_ended_whatever_its_status() {
    for limiter in [Limiter::new(Embedded::new()), redis_limiter(&Server::start())] {
        let limits = "\"fixed-window 5/1h start first-hit\", \"concurrency 2 ttl 30s\"";
        let rules = failures("jobs", limits, "");
        let layer = RateLimitLayer::new(limiter.clone(), rule_set(&rules));
        for (status, back) in [(200, 5), (401, 4), (204, 4)] {
            let (rule, set) = ("jobs", rule_set(&rules));
            let service = service_fn(move |_: Request<Body>| async move {
                let response = Response::builder().status(status).body(Body::from("hello"));
                Ok::<_, Infallible>(response.expect("a response"))
            });
            let response = layer.layer(service).oneshot(get("/", &[])).await.expect("infallible");
            let left = async || {
                let now = limiter.peek(set.rule(rule).expect("a rule"), "global").await.expect("an answer");
                [0, 1].map(|at| now.limits[at].remaining)
            };
            let what = format!("{status}: {back} remain while its body is read");
            tollgate_testing::polling::wait_until(&what, async || left().await == [back, 1]).await;
            answer(response).await;
            assert_eq!(remaining(&limiter, &rules, rule).await, [back, 2], "{status}");
        }
    }
}

/// A layer that waits gives back too, by the id of its reservation, or of the try that was allowed.
#[tokio::test(start_paused = true)]
async fn calls_that_waited_are_given_back() {
    for debt in ["", " max-debt 9"] {
        let limiter = Limiter::new(Embedded::with_clock(Clock::new(SystemTime::UNIX_EPOCH)));
        let limits = format!("\"token-bucket 1/10s burst 2{debt}\"");
        let rules = failures("theirs", &limits, "");
        let layer = RateLimitLayer::new(limiter.clone(), rule_set(&rules)).wait(Duration::from_secs(60));
        for status in [200, 200, 200, 401, 200] {
            assert_eq!(ask(&layer, status).await.status.as_u16(), status);
        }
        assert_eq!(remaining(&limiter, &rules, "theirs").await, [1], "{limits}");
    }
}

/// A layer around another learns of the other's denial as of any response.
#[tokio::test]
async fn what_an_inner_layer_denies_is_a_response_with_its_status() {
    let limiter = Limiter::new(Embedded::new());
    let outer = failures("outer", "\"fixed-window 9/1h start first-hit\"", "");
    let inner = "[[rule]]\nname = \"inner\"\nkey = \"global\"\nlimits = [\"fixed-window 1/1h start first-hit\"]\n";
    let around = RateLimitLayer::new(limiter.clone(), rule_set(&outer));
    let within = RateLimitLayer::new(limiter.clone(), rule_set(inner));
    let service = service_fn(|_: Request<Body>| async {
        Ok::<_, Infallible>(Response::builder().status(401).body(Body::empty()).expect("a response"))
    });
    for (expected, left) in [(401, 8), (429, 8), (429, 8)] {
        let response = around.layer(within.layer(service)).oneshot(get("/", &[])).await.expect("infallible");
        assert_eq!(response.status().as_u16(), expected);
        assert_eq!(remaining(&limiter, &outer, "outer").await, [left]);
    }
}

/// The id of a call that waited is known to nobody else: so its permit is given back however long that takes.
#[tokio::test]
async fn a_permit_of_a_call_that_waited_outlasts_an_outage() {
    let server = Server::start();
    let limiter = redis_limiter(&server).to_builder().deadline(Duration::from_secs(2)).build();
    let limits = "\"fixed-window 50/1h start first-hit\", \"concurrency 2 ttl 60s\"";
    let rules = failures("jobs", limits, "");
    let layer = RateLimitLayer::new(limiter.clone(), rule_set(&rules)).wait(Duration::from_secs(30));
    let service = service_fn(|_: Request<Body>| async { Ok::<_, Infallible>(Response::new(Body::from("hello"))) });
    let response = layer.layer(service).oneshot(get("/", &[])).await.expect("infallible");
    assert_eq!(response.status().as_u16(), 200);
    server.signal("-STOP");
    drop(response);
    tokio::time::sleep(Duration::from_millis(3500)).await;
    server.signal("-CONT");
    assert_eq!(remaining(&limiter, &rules, "jobs").await, [50, 2]);
}

/// Redis may have taken what the engine in this process then decided: both give it back.
#[tokio::test]
async fn what_redis_took_before_the_local_policy_answered_is_given_back_there() {
    let server = Server::start();
    let limiter = redis_limiter(&server).to_builder().deadline(Duration::from_millis(200)).build();
    let more = "on_error = \"local\"\nprocesses = 1";
    let rules = failures("login", "\"fixed-window 50/1h start first-hit\"", more);
    let layer = RateLimitLayer::new(limiter.clone(), rule_set(&rules));
    let service = service_fn(|_: Request<Body>| async {
        tokio::time::sleep(Duration::from_millis(700)).await;
        Ok::<_, Infallible>(Response::new(Body::empty()))
    });
    let call = || async { layer.layer(service).oneshot(get("/", &[])).await.expect("infallible").status().as_u16() };
    assert_eq!(call().await, 200);
    server.signal("-STOP");
    assert_eq!(futures_util::future::join_all((0..12).map(|_| call())).await, [200; 12]);
    tokio::time::sleep(Duration::from_millis(1000)).await;
    server.signal("-CONT");
    limiter.finish().await;
    let watching = redis_limiter(&server);
    let back = async || remaining(&watching, &rules, "login").await == [50];
    tollgate_testing::polling::wait_until("all is given back", back).await;
}

/// A response while Redis is away is given back once it is there again.
#[tokio::test]
async fn what_is_to_be_given_back_outlasts_an_outage() {
    let server = Server::start();
    let limiter = redis_limiter(&server).to_builder().deadline(Duration::from_secs(2)).build();
    let rules = failures("login", "\"fixed-window 3/1h start first-hit\"", "");
    let layer = RateLimitLayer::new(limiter.clone(), rule_set(&rules));
    let server = Arc::new(server);
    let away = Arc::clone(&server);
    let service = service_fn(move |_: Request<Body>| {
        away.signal("-STOP");
        async { Ok::<_, Infallible>(Response::new(Body::empty())) }
    });
    let response = layer.layer(service).oneshot(get("/", &[])).await.expect("infallible");
    assert_eq!(response.status().as_u16(), 200);
    // The first try is over.
    tokio::time::sleep(Duration::from_millis(2500)).await;
    server.signal("-CONT");
    assert_eq!(remaining(&limiter, &rules, "login").await, [3]);
}
