//! HTTP with JSON.

use futures_util::future::join_all;
use serde_json::{Value, json};
use tollgate_serve::{Tokens, Unmatched};
use tollgate_testing::polling::wait_until;
use tollgate_testing::redis_server::Server;

use crate::client::{Connection, post, send};
use crate::running::{Running, builder};

const RULES: &str = r#"
    [[rule]]
    name = "watched"
    shadow = true
    match = { user = "ada" }
    key = "user"
    limits = ["fixed-window 2/30d"]

    [[rule]]
    name = "nobody"
    match = { user = "mallory" }
    action = "block"
    message = "not you"

    [[rule]]
    name = "users"
    match = { user = "*" }
    key = "user"
    limits = ["fixed-window 10/30d"]

    [[rule]]
    name = "models"
    match = { model = "*" }
    key = "model"
    limits = [
        { name = "requests", limit = "fixed-window 30/30d", cost = 1 },
        { name = "tokens", limit = "fixed-window 1000/30d", cost = "tokens" },
    ]

    [[rule]]
    name = "jobs"
    match = { job = "*" }
    key = "job"
    limits = ["concurrency 1 ttl 30s"]

    [[rule]]
    name = "short"
    match = { short = "*" }
    key = "short"
    limits = ["concurrency 1 ttl 300ms"]

    [[rule]]
    name = "office"
    match = { ip = "10.0.0.0/8" }
    action = "allow"
"#;

#[tokio::test]
async fn a_decision_is_told_as_the_tool_prints_it() {
    let server = Server::start();
    let running = Running::start(builder(&server, RULES).build()).await;
    let answer = post(&running.http, "/v1/decide", &json!({ "attributes": { "user": "ada" }, "cost": 4 })).await;
    assert_eq!((answer.status, answer.field("ratelimit-policy")), (200, Some("\"users\";q=10;w=2592000")));
    let mut told = answer.json();
    let reset = told["reset_after_us"].take();
    assert!(reset.as_u64().is_some_and(|reset| reset > 0), "{reset}");
    assert_eq!(told["limits"][0]["reset_after_us"].take(), reset);
    assert_eq!(
        told,
        json!({
            "op": "acquire", "key": "user:ada", "cost": 4, "rule": "users", "reason": "limits", "allowed": true,
            "limit": 10, "remaining": 6, "retry_after_us": null, "reset_after_us": null, "denied_by": null,
            "by": "redis",
            "limits": [{
                "name": "fixed-window 10/30d", "algorithm": "fixed-window", "key": "user:ada", "allowed": true,
                "limit": 10, "remaining": 6, "retry_after_us": null, "reset_after_us": null,
            }],
            "shadows": [{ "rule": "watched", "allowed": false, "denied_by": "fixed-window 2/30d" }],
        })
    );
    let answer = post(&running.http, "/v1/decide", &json!({ "attributes": { "user": "ada" }, "cost": 11 })).await;
    let told = answer.json();
    assert_eq!((answer.status, &told["allowed"], &told["retry_after_us"]), (429, &json!(false), &json!("never")));
    let answer = post(&running.http, "/v1/decide", &json!({ "attributes": { "user": "ada" }, "cost": 7 })).await;
    assert!(answer.field("retry-after").is_some_and(|wait| wait.parse::<u64>().is_ok()), "{answer:?}");
    let answer = post(&running.http, "/v1/decide", &json!({ "attributes": { "user": "mallory" } })).await;
    let told = answer.json();
    assert_eq!((answer.status, &told["reason"], &told["message"]), (403, &json!("blocked"), &json!("not you")));
    let answer = post(&running.http, "/v1/decide", &json!({ "attributes": { "ip": "10.1.2.3" } })).await;
    assert_eq!((answer.status, &answer.json()["rule"]), (200, &json!("office")));
    let answer = post(&running.http, "/v1/peek", &json!({ "attributes": { "user": "bob" }, "cost": 10 })).await;
    assert_eq!((answer.status, &answer.json()["remaining"]), (200, &json!(10)));
    running.end().await;
}

#[tokio::test]
async fn what_a_request_took_is_settled_and_given_back() {
    let server = Server::start();
    let running = Running::start(builder(&server, RULES).build()).await;
    let call = async |path: &str, body: Value| {
        let answer = post(&running.http, path, &body).await;
        let told = answer.json();
        let left: Vec<_> =
            told["limits"].as_array().into_iter().flatten().map(|own| own["remaining"].clone()).collect();
        (answer.status, left)
    };
    let of =
        |id: &str, tokens: u64| json!({ "attributes": { "model": "large" }, "costs": { "tokens": tokens }, "id": id });
    assert_eq!(call("/v1/decide", of("a", 900)).await, (200, vec![json!(29), json!(100)]));
    assert_eq!(call("/v1/decide", of("a", 900)).await, (200, vec![json!(29), json!(100)]), "once by its id");
    assert_eq!(call("/v1/settle", of("a", 250)).await, (200, vec![json!(29), json!(750)]));
    assert_eq!(call("/v1/decide", of("b", 750)).await, (200, vec![json!(28), json!(0)]));
    assert_eq!(call("/v1/decide", of("c", 1)).await.0, 429);
    let cancel = json!({ "attributes": { "model": "large" }, "id": "b" });
    assert_eq!(call("/v1/cancel", cancel.clone()).await, (200, vec![json!(29), json!(750)]), "it needs no cost");
    assert_eq!(call("/v1/cancel", cancel).await.0, 404);
    let refund = json!({ "attributes": { "user": "bob" }, "cost": 3 });
    assert_eq!(call("/v1/decide", refund.clone()).await, (200, vec![json!(7)]));
    assert_eq!(call("/v1/refund", refund).await, (200, vec![json!(10)]));
    running.end().await;
}

#[tokio::test]
async fn a_permit_is_held_by_an_id_until_it_is_released_or_its_ttl_is_over() {
    let server = Server::start();
    let running = Running::start(builder(&server, RULES).build()).await;
    let call = async |path: &str, name: &str, id: &str| {
        post(&running.http, path, &json!({ "attributes": { name: "a" }, "id": id })).await.status
    };
    assert_eq!(call("/v1/decide", "job", "first").await, 200);
    assert_eq!(call("/v1/decide", "job", "second").await, 429);
    assert_eq!(call("/v1/renew", "job", "first").await, 200);
    assert_eq!(call("/v1/renew", "job", "second").await, 404);
    assert_eq!(call("/v1/release", "job", "first").await, 200);
    assert_eq!(call("/v1/decide", "job", "second").await, 200);
    // Of one who is killed.
    assert_eq!(call("/v1/decide", "short", "killed").await, 200);
    wait_until("the permit's ttl is over", async || call("/v1/decide", "short", "next").await == 200).await;
    running.end().await;
}

#[tokio::test]
async fn what_cant_be_used_is_named() {
    let server = Server::start();
    let running = Running::start(builder(&server, RULES).build()).await;
    let huge = format!("{{\"attributes\":{{\"user\":\"{}\"}}}}", "x".repeat(70_000));
    for (path, body, status, error) in [
        ("/v1/decide", "", 400, "body: EOF while parsing a value at line 1 column 0"),
        ("/v1/decide", " []", 400, "body: expected an object, {\"attributes\": ...}"),
        ("/v1/decide", "{}", 400, "body: missing field `attributes` at line 1 column 2"),
        (
            "/v1/decide",
            r#"{"attributes":{},"cots":1}"#,
            400,
            "body: unknown field `cots`, expected one of `attributes`, `cost`, `costs`, `id`, `id_ttl_ms` at line 1 column 23",
        ),
        (
            "/v1/decide",
            r#"{"attributes":{"user":["ada"]}}"#,
            400,
            "attributes.user: expected text, a number, true or false, got [\"ada\"]",
        ),
        (
            "/v1/decide",
            r#"{"attributes":{"ip":"localhost"}}"#,
            400,
            "ip: expected an address such as 192.0.2.1 or 2001:db8::1, got \"localhost\"",
        ),
        (
            "/v1/decide",
            r#"{"attributes":{"user":"ada"},"cost":9007199254740993}"#,
            400,
            "cost: expected a whole number from 0 to 9007199254740992, got 9007199254740993",
        ),
        (
            "/v1/decide",
            r#"{"attributes":{"job":"a"}}"#,
            409,
            "id: it is missing: rule jobs has permits, which are held and released by it",
        ),
        (
            "/v1/decide",
            r#"{"attributes":{"user":"ada"},"cost":1.5}"#,
            400,
            "cost: expected a whole number from 0 to 9007199254740992, got 1.5",
        ),
        (
            "/v1/decide",
            r#"{"attributes":{"user":"ada"},"cost":1.0,"costs":{"tokens":-1}}"#,
            400,
            "costs.tokens: expected a whole number from 0 to 9007199254740992, got -1",
        ),
        (
            "/v1/settle",
            r#"{"attributes":{"user":"ada"}}"#,
            400,
            "id: it is missing: settle needs the id of an earlier call",
        ),
        (
            "/v1/decide",
            r#"{"attributes":{"user":"ada","user":"bob"}}"#,
            400,
            "body: \"user\" is given twice at line 1 column 41",
        ),
        (
            "/v1/decide",
            r#"{"attributes":{"user":18446744073709551616}}"#,
            400,
            "attributes.user: expected a number up to 9007199254740992, or text, got 1.8446744073709552e+19",
        ),
        ("/v1/decide", r#"{"attributes":{},"id":""}"#, 400, "id: expected at least one character, got none"),
        (
            "/v1/release",
            r#"{"attributes":{"user":"ada"},"id":"a","cost":null,"costs":null}"#,
            409,
            "release: expected a concurrency limit, got fixed-window 10/30d",
        ),
        (
            "/v1/settle",
            r#"{"attributes":{"nothing":"a"},"id":"a","cost":1}"#,
            404,
            "no rule applies to these attributes",
        ),
        (
            "/v1/settle",
            r#"{"attributes":{"user":"mallory"},"id":"a","cost":1}"#,
            404,
            "rule nobody has no limits for this request",
        ),
        (
            "/v1/settle",
            r#"{"attributes":{"user":"ada"},"id":"a"}"#,
            400,
            "cost: it is missing: settle needs the final cost, or costs",
        ),
        (
            "/v1/settle",
            r#"{"attributes":{"model":"a"},"id":"a","cost":1}"#,
            409,
            "costs.tokens: it is missing: rule models takes its cost from it",
        ),
    ] {
        let answer = send(&running.http, "POST", path, &[], body).await;
        assert_eq!((answer.status, answer.json()["error"].as_str()), (status, Some(error)), "{path} {body}");
        assert_eq!(answer.json()["charged"], json!(false));
    }
    // What the router itself refuses has the same form.
    for (method, path, body, status, error) in [
        ("POST", "/v1/decide", &*huge, 413, "body: expected at most 65536 bytes"),
        ("GET", "/v1/decide", "", 405, "method: expected one that the Allow header lists"),
        ("POST", "/v1/decied", "{}", 404, "path: nothing is served there; GET /v1/openapi.json lists what is"),
    ] {
        let answer = send(&running.http, method, path, &[], body).await;
        let told = json!({ "error": error, "kind": "input", "charged": false });
        assert_eq!((answer.status, answer.json()), (status, told), "{path}");
        assert_eq!(answer.field("allow"), (status == 405).then_some("POST"));
    }
    // On one connection, after all of that.
    let mut connection = Connection::open(&running.http).await;
    for remaining in (0..10).rev() {
        let body = json!({ "attributes": { "user": 42 } }).to_string();
        let answer = connection.send("POST", "/v1/decide", &[], &body).await;
        assert_eq!((answer.status, &answer.json()["remaining"]), (200, &json!(remaining)));
    }
    running.end().await;
}

#[tokio::test]
async fn totals_are_exact_whatever_the_connections() {
    let server = Server::start();
    let running = Running::start(builder(&server, RULES).build()).await;
    let body = json!({ "attributes": { "user": "all" } });
    let statuses = join_all((0..100).map(|_| post(&running.http, "/v1/decide", &body))).await;
    assert_eq!(statuses.iter().filter(|answer| answer.status == 200).count(), 10);
    assert_eq!(statuses.iter().filter(|answer| answer.status == 429).count(), 90);
    running.end().await;
}

#[tokio::test]
async fn who_may_ask_and_what_nobody_needs_a_token_for() {
    let server = Server::start();
    let service = builder(&server, RULES).tokens(Tokens::new(["secret", "next"])).unmatched(Unmatched::Deny).build();
    let running = Running::start(service).await;
    let body = json!({ "attributes": { "user": "ada" } }).to_string();
    for (token, status) in [("Bearer secret", 200), ("Bearer next", 200), ("Bearer other", 401), ("secret", 401)] {
        let answer = send(&running.http, "POST", "/v1/decide", &[("authorization", token)], &body).await;
        assert_eq!(answer.status, status, "{token}");
    }
    for (method, path, body) in [("POST", "/v1/decide", &*body), ("GET", "/v1/forward-auth", "")] {
        let answer = send(&running.http, method, path, &[], body).await;
        let told = answer.json();
        assert_eq!((answer.status, answer.field("www-authenticate")), (401, Some("Bearer")));
        assert_eq!((&told["kind"], &told["charged"]), (&json!("unauthorized"), &json!(false)), "{told}");
        // Whatever the visitor of a proxy says that it is.
        let answer = send(&running.http, method, path, &[("content-type", "application/grpc")], body).await;
        assert_eq!((answer.status, answer.field("grpc-status")), (401, Some("16")));
    }
    for path in ["/healthz", "/readyz", "/v1/openapi.json"] {
        assert_eq!(send(&running.http, "GET", path, &[], "").await.status, 200, "{path}");
    }
    // Denied, since no rule applies.
    let unmatched = json!({ "attributes": { "usr": "ada" } }).to_string();
    let answer = send(&running.http, "POST", "/v1/decide", &[("authorization", "Bearer next")], &unmatched).await;
    let told = answer.json();
    assert_eq!((answer.status, &told["allowed"], &told["reason"]), (429, &json!(false), &json!("no-rule")));
    running.end().await;
}

#[tokio::test]
async fn readiness_knows_redis() {
    let mut server = Server::start();
    let running = Running::start(builder(&server, RULES).build()).await;
    let ready = send(&running.http, "GET", "/readyz", &[], "").await;
    assert_eq!(
        (ready.status, ready.json()),
        (200, json!({ "ready": true, "rules": 7, "redis": "ok", "ending": false }))
    );
    server.stop();
    let ready = send(&running.http, "GET", "/readyz", &[], "").await;
    assert_eq!((ready.status, &ready.json()["ready"]), (503, &json!(false)), "{ready:?}");
    assert_eq!(send(&running.http, "GET", "/healthz", &[], "").await.status, 200);
    let answer = post(&running.http, "/v1/decide", &json!({ "attributes": { "user": "ada" } })).await;
    assert_eq!((answer.status, answer.json()["charged"].is_boolean()), (503, true), "{answer:?}");
    running.end().await;
}
