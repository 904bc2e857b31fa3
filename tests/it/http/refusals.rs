//! Requests that are refused before any limit is asked: for which rules, and who hears of it.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use axum::http::{Request, Response};
use tollgate::middleware::{ClientAddress, RateLimitLayer};
use tollgate::rules::{Account, Attributes, DecisionSink, OnResponse, RuleSet, RuleSource, Verdict};
use tollgate::{Embedded, Limiter};
use tower::{Layer, ServiceExt, service_fn};

use super::{ask, embedded, get, rule_set};

const ALL: &str = "[[rule]]\nname = \"all\"\npriority = -1\nkey = \"global\"\nlimits = [\"gcra 100/1s\"]\n";

fn from(peer: [u8; 4], path: &str, headers: &[(&str, &str)]) -> Request<Body> {
    let mut request = get(path, headers);
    request.extensions_mut().insert(SocketAddr::from((peer, 99)));
    request
}

#[tokio::test]
async fn a_rule_on_trial_refuses_nothing() {
    for (matched, path, forwarded, named) in [
        ("match = { path = \"/admin\" }", "/users/%40me", "192.0.2.7", "192.0.2.8"),
        ("match = { path = \"/admin\" }", "/a//b", "192.0.2.7", "192.0.2.8"),
        ("match = { ip = \"192.0.2.0/24\" }", "/", "unknown", "192.0.2.8"),
        ("match = { ip = \"192.0.2.0/24\" }", "/", "192.0.2.7", "nowhere"),
    ] {
        for (shadow, expected) in [(true, 200), (false, 400)] {
            let trial = format!("[[rule]]\nname = \"trial\"\nshadow = {shadow}\n{matched}\naction = \"block\"\n");
            let mut layer = embedded(&format!("{trial}{ALL}"))
                .client_address(ClientAddress::behind(["10.0.0.1"]).expect("a proxy"));
            let headers = [("x-forwarded-for", forwarded), ("x-named", named)];
            if named == "nowhere" {
                layer = layer.header("ip", "x-named".parse().expect("a name"));
            }
            let status = ask(&layer, from([10, 0, 0, 1], path, &headers)).await.status.as_u16();
            assert_eq!(status, expected, "{matched} {path} {headers:?}");
        }
    }
    // By the file's defaults, too.
    let all_on_trial = format!("[defaults]\nshadow = true\n{}", ALL.replace("\"global\"", "\"path\""));
    assert_eq!(ask(&embedded(&all_on_trial), get("/a//b", &[])).await.status.as_u16(), 200);
}

/// What was decided.
#[derive(Clone, Default)]
struct Seen(Arc<Mutex<Vec<&'static str>>>);

impl DecisionSink for Seen {
    fn decided(&self, _: &Attributes<'_>, verdict: &Verdict, _: Duration) -> Option<Box<dyn OnResponse>> {
        self.0.lock().expect("it").push(verdict.reason.name());
        None
    }
}

/// A source of rules that counts each decision by them.
struct Counting(RuleSet, Seen);

impl RuleSource for Counting {
    fn rules(&self) -> RuleSet {
        self.0.clone()
    }

    fn sink(&self) -> Option<&dyn DecisionSink> {
        Some(&self.1)
    }
}

#[tokio::test]
async fn a_request_without_a_decision_is_no_denial_to_anybody() {
    let (of_source, of_layer) = (Seen::default(), Seen::default());
    let rules = rule_set("[[rule]]\nname = \"all\"\nkey = \"ip\"\nlimits = [\"gcra 1/1h\"]");
    let layer = RateLimitLayer::new(Limiter::new(Embedded::new()), Counting(rules, of_source.clone()));
    let layer = layer.record(of_layer.clone());
    // The server notes no address.
    assert_eq!(ask(&layer, get("/", &[])).await.status.as_u16(), 500);
    assert_eq!(ask(&layer, from([192, 0, 2, 1], "/", &[])).await.status.as_u16(), 200);
    for seen in [of_source, of_layer] {
        assert_eq!(*seen.0.lock().expect("it"), ["limits"]);
    }
}

#[tokio::test]
async fn a_blocked_user_is_denied_whatever_else_is_unknown() {
    let layer =
        embedded(&format!("[[rule]]\nname = \"net\"\nmatch = {{ ip = \"10.0.0.0/8\" }}\naction = \"allow\"\n{ALL}"));
    let mut request = get("/", &[]);
    assert_eq!(ask(&layer, get("/", &[])).await.status.as_u16(), 500, "the server notes no address");
    request.extensions_mut().insert(Account::new("42").blocked(None, None));
    assert_eq!(ask(&layer, request).await.status.as_u16(), 403);
}

/// It may take long, and a large set much memory.
#[tokio::test]
async fn a_handler_keeps_no_set_of_rules() {
    for skips in [false, true] {
        let rules = rule_set(ALL);
        let source = Arc::new(Mutex::new(rules.clone()));
        /// Rules that change.
        struct Changing(Arc<Mutex<RuleSet>>);
        impl RuleSource for Changing {
            fn rules(&self) -> RuleSet {
                self.0.lock().expect("it").clone()
            }
        }
        let layer = RateLimitLayer::new(Limiter::new(Embedded::new()), Changing(Arc::clone(&source)));
        let layer = layer.skip(move |_| skips);
        let service = layer.layer(service_fn(move |_: Request<Body>| {
            *source.lock().expect("it") = rule_set(ALL);
            let shared = rules.is_shared();
            async move { Ok::<_, Infallible>(Response::new(Body::from(shared.to_string()))) }
        }));
        let response = service.oneshot(get("/", &[])).await.expect("infallible");
        let body = axum::body::to_bytes(Body::new(response.into_body()), 9).await.expect("a body");
        assert_eq!(body, "false");
    }
}
