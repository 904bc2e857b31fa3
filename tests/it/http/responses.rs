//! Cases, statuses, fields and bodies, as the documentation has them in a table.

use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderName, Request, Version};
use serde_json::json;
use tollgate::middleware::{HeaderStyle, RateLimitLayer, Rejection};
use tollgate::rules::{RuleSet, Verdict};
use tollgate::{Decision, Embedded, Limiter, OnError, Redis, Rule};

use super::{Answer, ask, embedded, get};

const RULES: &str = r#"
    [[rule]]
    name = "banned"
    priority = 9
    match = { api_key = "evil" }
    action = "block"
    message = "Write to abuse@example.com"

    [[rule]]
    name = "health"
    priority = 8
    match = { path = "/health" }
    action = "allow"

    [[rule]]
    name = "login"
    priority = 7
    match = { path = "/login" }
    key = "api_key"
    limits = ["sliding-log 1/15m"]
    block_for = "15m"

    [[rule]]
    name = "slow"
    priority = 6
    match = { path = "/slow" }
    key = "api_key"
    limits = ["gcra 1/1m"]
    status = 420
    message = "slow \"down\""
    retry_after = "1h"

    [[rule]]
    name = "big"
    priority = 5
    match = { path = "/big" }
    key = "api_key"
    limits = ["gcra 5/1s"]
    cost = "units"

    [[rule]]
    name = "api"
    key = "api_key"
    limits = ["token-bucket 6/1m burst 1", "fixed-window 100/day"]
"#;

fn layer(rules: &str) -> RateLimitLayer {
    embedded(rules).api_key(HeaderName::from_static("x-api-key")).header("units", HeaderName::from_static("x-units"))
}

const KEY: (&str, &str) = ("x-api-key", "k");

#[tokio::test]
async fn an_allowed_request_gets_the_services_response_and_the_fields() {
    let layer = layer(RULES);
    let answer = ask(&layer, get("/", &[KEY])).await;
    assert_eq!((answer.status.as_u16(), &answer.body[..]), (200, &b"hello"[..]));
    let policies = "\"api/token-bucket-1m\";q=6;w=60, \"api/fixed-window-day\";q=100;w=86400";
    assert_eq!(answer.header("ratelimit-policy"), Some(policies));
    let stands = answer.header("ratelimit").expect("it");
    assert!(stands.starts_with("\"api/token-bucket-1m\";r=0, \"api/fixed-window-day\";r=99;t="), "{stands}");
    assert_eq!(answer.header("retry-after"), None);
    // Of a rule that allows, or where none applies, there is nothing to say.
    let answer = ask(&layer, get("/health", &[KEY])).await;
    assert_eq!((answer.status.as_u16(), answer.headers.len()), (200, 0), "{answer:?}");
}

#[tokio::test]
async fn a_denied_request_gets_problem_json() {
    let layer = layer(RULES);
    let twice = async |path: &str, headers: &[(&str, &str)]| {
        ask(&layer, get(path, headers)).await;
        ask(&layer, get(path, headers)).await
    };
    let quota = "https://iana.org/assignments/http-problem-types#quota-exceeded";
    let abnormal = "https://iana.org/assignments/http-problem-types#abnormal-usage-detected";
    let check = |answer: Answer, status: u16, retry_after: Option<&str>, body: serde_json::Value| {
        assert_eq!(answer.status.as_u16(), status, "{answer:?}");
        assert_eq!(answer.header("content-type"), Some("application/problem+json"));
        assert_eq!(answer.header("cache-control"), Some("no-store"));
        assert_eq!((answer.header("retry-after"), answer.json()), (retry_after, body));
    };
    check(
        twice("/", &[KEY]).await,
        429,
        Some("10"),
        json!({"type": quota, "title": "Too many requests", "status": 429, "violated-policies": ["api/token-bucket-1m"]}),
    );
    check(
        twice("/slow", &[KEY]).await,
        420,
        Some("3600"),
        json!({"type": quota, "title": "Too many requests", "status": 420, "detail": "slow \"down\"", "violated-policies": ["slow"]}),
    );
    check(
        twice("/login", &[KEY]).await,
        429,
        Some("900"),
        json!({"type": abnormal, "title": "Blocked after too many requests", "status": 429, "violated-policies": ["login"]}),
    );
    check(
        ask(&layer, get("/", &[("x-api-key", "evil")])).await,
        403,
        None,
        json!({"type": "about:blank", "title": "Forbidden", "status": 403, "detail": "Write to abuse@example.com"}),
    );
    // Two of the same field: another program may use either, so neither can be used to bypass a rule.
    for headers in [[KEY, KEY], [KEY, ("X-API-Key", "other")], [("x-api-key", "evil"), KEY]] {
        check(
            ask(&layer, get("/health", &headers)).await,
            400,
            None,
            json!({"type": "about:blank", "title": "Bad Request", "status": 400,
                   "detail": "the header x-api-key was sent more than once"}),
        );
    }
    let units = ("x-units", "1");
    let twice = ask(&layer, get("/big", &[KEY, units, units])).await;
    assert_eq!(twice.json()["detail"], "the header x-units was sent more than once");
    // Without what the rule counts by.
    for headers in [&[][..], &[("x-api-key", "")]] {
        check(
            ask(&layer, get("/", headers)).await,
            400,
            None,
            json!({"type": "about:blank", "title": "Bad Request", "status": 400,
                   "detail": "this request lacks api_key, which its rate limit needs"}),
        );
    }
    // Never.
    let answer = ask(&layer, get("/big", &[KEY, ("x-units", "6")])).await;
    assert_eq!((answer.status.as_u16(), answer.header("retry-after")), (429, None));
    assert_eq!(answer.header("ratelimit"), Some("\"big\";r=5"));
    assert_eq!(answer.json()["detail"], "this request costs more than its limit can ever allow");
    // What is said of denials says nothing of these.
    assert_eq!(
        ask(&layer, get("/slow", &[])).await.json()["detail"],
        "this request lacks api_key, which its rate limit needs"
    );
    check(
        ask(&layer, get("/big", &[KEY, ("x-units", "many")])).await,
        400,
        None,
        json!({"type": "about:blank", "title": "Bad Request", "status": 400,
               "detail": "the cost that this request gives must be a whole number up to 2^53"}),
    );
}

/// HTTP's status is always 200 there, and gRPC's own says the rest.
#[tokio::test]
async fn a_grpc_call_is_answered_in_its_own_terms() {
    let layer = layer(RULES);
    let call = async |path: &str, key: &str| {
        let request = Request::post(path)
            .version(Version::HTTP_2)
            .header("content-type", "application/grpc+proto")
            .header("x-api-key", key);
        ask(&layer, request.body(Body::empty()).expect("a request")).await
    };
    assert_eq!(call("/pkg.Service/Method", "k").await.header("grpc-status"), None);
    let denied = call("/pkg.Service/Method", "k").await;
    assert_eq!((denied.status.as_u16(), denied.body.len()), (200, 0));
    assert_eq!((denied.header("content-type"), denied.header("grpc-status")), (Some("application/grpc"), Some("8")));
    assert_eq!(denied.header("grpc-message"), Some("Too many requests"));
    let pushback: u64 = denied.header("grpc-retry-pushback-ms").expect("it").parse().expect("milliseconds");
    assert!((9_000..=10_000).contains(&pushback), "{pushback}");
    // google.rpc.Status { code: 8, message, details: [RetryInfo { retry_delay }] }, as Protocol Buffers have them.
    let details = denied.header("grpc-status-details-bin").expect("details");
    let text = base64_decoded(details);
    let inner = [b"\x0a\x28type.googleapis.com/google.rpc.RetryInfo\x12".as_slice()].concat();
    assert!(text.starts_with(b"\x08\x08\x12\x11Too many requests\x1a"), "{text:?}");
    assert!(text.windows(inner.len()).any(|window| window == inner), "{text:?}");
    assert_eq!(denied.header("ratelimit").map(|text| text.starts_with("\"api/token-bucket-1m\";r=0;t=")), Some(true));
    let banned = call("/pkg.Service/Method", "evil").await;
    assert_eq!((banned.header("grpc-status"), banned.header("grpc-retry-pushback-ms")), (Some("7"), Some("-1")));
    assert_eq!(banned.header("grpc-message"), Some("Write to abuse@example.com"));
    assert_eq!(call("/pkg.Service/Method", "").await.header("grpc-status"), Some("3"));
}

/// A client that takes 8 KiB of headers, the least that gRPC suggests, gets the answer whatever a rule's message says.
#[tokio::test]
async fn a_long_message_leaves_a_grpc_answer_that_clients_take() {
    for message in
        ["slow down ".repeat(2_000), "d\u{e9}j\u{e0} vu ".repeat(2_000), "\u{1f6d1}".repeat(9_000), "%".repeat(683)]
    {
        let rules =
            format!("[[rule]]\nname = \"all\"\nkey = \"global\"\nlimits = [\"gcra 1/1h\"]\nmessage = \"{message}\"\n");
        let app = axum::Router::new().fallback(axum::routing::any(|| async {})).layer(embedded(&rules));
        let stream = tokio::net::TcpStream::connect(super::serve(app).await).await.expect("connected");
        let mut client = h2::client::Builder::new();
        let handshake = client.max_header_list_size(8 << 10).handshake::<_, axum::body::Bytes>(stream);
        let (mut client, connection) = handshake.await.expect("HTTP/2");
        tokio::spawn(connection);
        let mut call = async || {
            let request = Request::post("http://a/pkg.Service/Method").header("content-type", "application/grpc");
            client = client.clone().ready().await.expect("ready");
            let (response, _) = client.send_request(request.body(()).expect("a request"), true).expect("sent");
            response.await.expect("an answer that the client takes")
        };
        call().await;
        let denied = call().await;
        let header = |name: &str| denied.headers()[name].to_str().expect("text").to_owned();
        assert_eq!(header("grpc-status"), "8");
        // Both say the same: its beginning, in whole characters.
        let details = base64_decoded(&header("grpc-status-details-bin"));
        let end = details.windows(3).rposition(|window| window == b"...").expect("it is cut");
        let text = std::str::from_utf8(&details[5..end]).expect("whole characters");
        assert!(text.len() > 500 && message.starts_with(text), "{text}");
        let sent = header("grpc-message");
        assert!(sent.ends_with("...") && (2_000..=2_048).contains(&sent.len()), "{sent}");
    }
}

/// Base64 without padding.
fn base64_decoded(text: &str) -> Vec<u8> {
    const DIGITS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let bits = text.bytes().flat_map(|byte| {
        let value = DIGITS.iter().position(|digit| *digit == byte).expect("a digit");
        (0..6).rev().map(move |bit| value >> bit & 1)
    });
    let bits: Vec<_> = bits.collect();
    bits.chunks_exact(8)
        .map(|byte| byte.iter().fold(0, |value, bit| value << 1 | u8::try_from(*bit).expect("a bit")))
        .collect()
}

/// A port where no server listens.
fn away() -> Limiter {
    Limiter::builder(Redis::open("redis://127.0.0.1:1/").expect("an address"))
        .deadline(Duration::from_millis(200))
        .build()
}

#[tokio::test]
async fn a_closed_policy_is_a_503_and_an_open_one_invents_nothing() {
    let rule = Rule::new("api", "gcra 5/1s").expect("a name");
    let rules = RuleSet::single(&rule, "global").expect("a set");
    let layer = RateLimitLayer::new(away(), rules.clone());
    let closed = ask(&layer, get("/", &[])).await;
    assert_eq!((closed.status.as_u16(), closed.header("retry-after")), (503, Some("1")));
    let kind = "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity";
    assert_eq!(closed.json(), json!({"type": kind, "title": "Service Unavailable", "status": 503}));
    assert_eq!(closed.header("ratelimit"), None);
    let call_over = |version: Version, method: &str, kind: &str| {
        let request =
            Request::builder().version(version).method(method).uri("/pkg.Service/Method").header("content-type", kind);
        request.body(Body::empty()).expect("a request")
    };
    let call = |method: &str, kind: &str| call_over(Version::HTTP_2, method, kind);
    let grpc = ask(&layer, call("POST", "application/grpc")).await;
    assert_eq!((grpc.status.as_u16(), grpc.header("grpc-status"), grpc.body.len()), (200, Some("14"), 0));
    assert_eq!((grpc.header("grpc-retry-pushback-ms"), grpc.header("retry-after")), (Some("1000"), None));
    // No other request is answered so, whatever it says of itself.
    for (method, kind) in [("GET", "application/grpc"), ("POST", "application/grpc-web"), ("POST", "application/grpcx")]
    {
        assert_eq!(ask(&layer, call(method, kind)).await.status.as_u16(), 503, "{method} {kind}");
    }
    let older = call_over(Version::HTTP_11, "POST", "application/grpc");
    assert_eq!(ask(&layer, older).await.status.as_u16(), 503, "gRPC is over HTTP/2");

    for style in [HeaderStyle::Draft, HeaderStyle::XRateLimit] {
        let open = RateLimitLayer::new(away().to_builder().on_error(OnError::Open).build(), rules.clone());
        let allowed = ask(&open.header_style(style), get("/", &[])).await;
        assert_eq!((allowed.status.as_u16(), allowed.headers.len()), (200, 0), "{allowed:?}");
    }
    // A rule that can't decide is a mistake of the service's.
    let hashed = RuleSet::single(&rule.hash_keys(true), "global").expect("a set");
    assert_eq!(ask(&RateLimitLayer::new(away(), hashed), get("/", &[])).await.status.as_u16(), 500);
}

#[tokio::test]
async fn skipped_requests_and_shadow_rules_pass() {
    let layer = layer(
        "[[rule]]\nname = \"trial\"\nkey = \"global\"\nlimits = [\"gcra 1/1h\"]\nshadow = true\n\
         [[rule]]\nname = \"all\"\nkey = \"global\"\nlimits = [\"fixed-window 3/1h\"]\n",
    )
    .skip(|request| request.uri.path() == "/health");
    for at in 0..3 {
        assert_eq!(ask_unverified(&layer, "/health").await, 200);
        assert_eq!(ask(&layer, get("/", &[])).await.status.as_u16(), 200, "{at}");
    }
    assert_eq!(ask(&layer, get("/", &[])).await.status.as_u16(), 429);
    assert_eq!(ask_unverified(&layer, "/health").await, 200);
}

/// A handler that asks for permits is answered where there are none: as of a rule without, and where it is skipped.
#[tokio::test]
async fn a_skipped_request_has_no_permits_rather_than_an_error() {
    use axum::routing::get as on_get;
    use axum::{Extension, Router};
    use tollgate::middleware::{ResponsePermits, Usage};
    use tower::ServiceExt;
    let layer = embedded("[[rule]]\nname = \"r\"\nkey = \"global\"\nlimits = [\"concurrency 8 ttl 1m\"]")
        .settle()
        .skip(|request| request.uri.path() == "/health");
    let held =
        |permits: Extension<ResponsePermits>, _: Extension<Usage>| async move { permits.hold().is_some().to_string() };
    let app = Router::new().route("/health", on_get(held)).route("/", on_get(held)).layer(layer);
    for (path, expected) in [("/health", "false"), ("/", "true")] {
        let response = app.clone().oneshot(get(path, &[])).await.expect("infallible");
        assert_eq!(response.status().as_u16(), 200, "{path}");
        let body = http_body_util::BodyExt::collect(response.into_body()).await.expect("a body").to_bytes();
        assert_eq!(&body[..], expected.as_bytes(), "{path}");
    }
}

/// As in a service that forgot `into_make_service_with_connect_info`: said to whoever develops it, once.
#[tokio::test]
async fn a_server_that_provides_no_address_is_told_in_debug_builds_and_on_stderr() {
    const RUN_ALONE: &str = "TOLLGATE_TEST_NO_ADDRESS";
    let layer = embedded("[[rule]]\nname = \"r\"\nkey = \"ip\"\nlimits = [\"gcra 5/1s\"]");
    for _ in 0..3 {
        let answer = ask(&layer, get("/", &[])).await;
        let detail = answer.json()["detail"].to_string();
        assert_eq!(answer.status.as_u16(), 500);
        assert!(detail.contains("into_make_service_with_connect_info::<SocketAddr>()"), "{detail}");
    }
    if std::env::var(RUN_ALONE).is_ok() {
        return;
    }
    let mut alone = std::process::Command::new(std::env::current_exe().expect("this program"));
    alone.args(["--exact", "http::responses::a_server_that_provides_no_address_is_told_in_debug_builds_and_on_stderr"]);
    let output = alone.args(["--nocapture"]).env(RUN_ALONE, "1").output().expect("its end");
    let told = "tollgate: ip: the server doesn't provide the connection's";
    let said = String::from_utf8_lossy(&output.stderr).matches(told).count();
    assert!(output.status.success() && said == 1, "{output:?}");
}

/// A block by address, or a limit that skips who has none, isn't led around.
#[tokio::test]
async fn a_server_that_provides_no_address_opens_no_rule_by_address() {
    const RULES: &str = r#"
        [[rule]]
        name = "banned"
        match = { ip = "192.0.2.0/24", path = "/a/*" }
        action = "block"
        [[rule]]
        name = "anybody"
        match = { path = "/b/*" }
        key = "ip"
        missing = "skip"
        limits = ["gcra 1/1h"]
        [[rule]]
        name = "everybody"
        match = { path = "/d/*" }
        key = "global"
        limits = ["gcra 100/1h burst 100", { limit = "gcra 1/1h", key = "ip", missing = "skip" }]
        [[rule]]
        name = "tried"
        match = { ip = "192.0.2.0/24" }
        action = "block"
        shadow = true
        [[rule]]
        name = "rest"
        key = "global"
        limits = ["gcra 100/1h burst 100"]"#;
    let layer = embedded(RULES);
    for (path, status) in [("/a/1", 500), ("/b/1", 500), ("/d/1", 500), ("/c", 200)] {
        assert_eq!(ask(&layer, get(path, &[])).await.status.as_u16(), status, "{path}");
    }
}

async fn ask_unverified(layer: &RateLimitLayer, path: &str) -> u16 {
    use tower::ServiceExt;
    let service = tower::service_fn(|_: Request<Body>| async {
        Ok::<_, std::convert::Infallible>(axum::response::Response::new(Body::empty()))
    });
    super::under(layer, service).oneshot(get(path, &[])).await.expect("infallible").status().as_u16()
}

/// The service's own fields, and those of a layer within, stay.
#[tokio::test]
async fn fields_of_two_layers_are_both_sent() {
    use tower::{Layer, ServiceExt};
    let outer =
        embedded("[[rule]]\nname = \"outer\"\nkey = \"global\"\nlimits = [\"fixed-window 9/1h start first-hit\"]");
    let inner =
        embedded("[[rule]]\nname = \"inner\"\nkey = \"global\"\nlimits = [\"fixed-window 5/1h start first-hit\"]");
    let service = tower::service_fn(|_: Request<Body>| async {
        let response = axum::response::Response::builder().header("ratelimit", "\"own\";r=1").body(Body::empty());
        Ok::<_, std::convert::Infallible>(response.expect("a response"))
    });
    let response = outer.layer(inner.layer(service)).oneshot(get("/", &[])).await.expect("infallible");
    let told: Vec<_> =
        response.headers().get_all("ratelimit").iter().map(|value| value.to_str().expect("text")).collect();
    assert_eq!(told, ["\"own\";r=1", "\"inner\";r=4;t=3600", "\"outer\";r=8;t=3600"]);
}

/// For services that answer in a form of their own.
#[tokio::test]
async fn a_denial_carries_its_verdict_for_a_layer_around() {
    use tower::{Layer, ServiceExt};
    let layer = embedded("[[rule]]\nname = \"api\"\nkey = \"global\"\nlimits = [\"gcra 1/1h\"]");
    let service = tower::service_fn(|_: Request<Body>| async {
        Ok::<_, std::convert::Infallible>(axum::response::Response::new(Body::empty()))
    });
    let service = tower::util::MapResponse::new(layer.layer(service), |response: axum::response::Response<_>| {
        response
            .extensions()
            .get::<Verdict>()
            .map(|verdict| (verdict.allowed, verdict.rule.as_deref().map(String::from)))
    });
    assert_eq!(service.clone().oneshot(get("/", &[])).await.expect("infallible"), None);
    assert_eq!(service.oneshot(get("/", &[])).await.expect("infallible"), Some((false, Some("api".to_owned()))));
}

#[tokio::test]
async fn a_handlers_own_denials_and_errors_are_answered_alike() {
    let rule: Rule = "gcra 1/1m".parse().expect("a rule");
    let decide = async |limiter: &Limiter, rule: &Rule| -> Result<Decision, Rejection> {
        Ok(limiter.acquire(rule, "key").await?.into_result()?)
    };
    let answer = |rejection: Rejection| axum::http::Response::<axum::body::Bytes>::from(rejection);
    let limiter = Limiter::new(Embedded::new());
    let named = rule.clone().named("codes").expect("a name");
    decide(&limiter, &named).await.expect("allowed");
    let denied = answer(decide(&limiter, &named).await.expect_err("denied"));
    assert_eq!((denied.status().as_u16(), &denied.headers()["retry-after"]), (429, &"60".parse().expect("a value")));
    let body: serde_json::Value = serde_json::from_slice(denied.body()).expect("JSON");
    assert_eq!(body["violated-policies"], json!(["codes"]));
    assert_eq!(answer(decide(&away(), &named).await.expect_err("away")).status().as_u16(), 503);
    let unnamed = answer(decide(&limiter, &rule).await.expect_err("no name"));
    assert_eq!(unnamed.status().as_u16(), 500);
    assert!(unnamed.extensions().get::<tollgate::Error>().is_some_and(tollgate::Error::is_input));
    let empty = limiter.acquire(&named, "").await.expect_err("an empty key");
    assert_eq!(answer(empty.into()).status().as_u16(), 400);
}

/// Axum's routes see `/api/..%2Fadmin` within `/api`, and a proxy that decodes sees `/admin`.
#[tokio::test]
async fn a_path_that_can_be_read_in_two_ways_is_refused_unless_the_set_says_which() {
    let rules = "[[rule]]\nname = \"api\"\nmatch = { path = \"/api/*\" }\nkey = \"global\"\nlimits = [\"gcra 1/1h\"]";
    for (said, expected) in
        [("", [400, 400]), ("paths = \"segments\"\n", [200, 429]), ("paths = \"decoded\"\n", [200, 200])]
    {
        let layer = embedded(&format!("{said}{rules}"));
        let mut statuses = Vec::new();
        // Axum's routes see neither of the others within `/api`.
        for path in ["//api/x", "/%61pi/x", "/api/./x"] {
            let expected = if said.is_empty() { 400 } else { 200 };
            let status = ask(&embedded(&format!("{said}{rules}")), get(path, &[])).await.status.as_u16();
            assert_eq!(status, expected, "{said}{path}");
        }
        for path in ["/api/..%2Fadmin", "/api/%2e%2e/x"] {
            statuses.push(ask(&layer, get(path, &[])).await.status.as_u16());
        }
        assert_eq!(statuses, expected, "{said}");
        assert_eq!(ask(&layer, get("/other/%20b/", &[])).await.status.as_u16(), 200, "{said}");
    }
    // What has a single spelling is served.
    for (path, expected) in [
        ("/users/%40me", 400),
        ("/users/@me", 200),
        ("/users/a;b", 400),
        ("/users/a%2Cb", 400),
        ("/users/a,b", 200),
        ("/users/a%20b", 200),
        ("/users/caf%C3%A9", 200),
        ("/users/caf%c3%a9", 400),
        ("/users/%FF", 400),
        ("/users/%2541", 400),
        ("/users/%", 400),
    ] {
        assert_eq!(ask(&embedded(rules), get(path, &[])).await.status.as_u16(), expected, "{path}");
    }
    // It is never read.
    let layer = embedded("[[rule]]\nname = \"all\"\nkey = \"global\"\nlimits = [\"gcra 1/1h\"]");
    assert_eq!(ask(&layer, get("/api/..%2Fadmin", &[])).await.status.as_u16(), 200);
}

/// No client's fault.
#[tokio::test]
async fn a_server_that_notes_no_addresses_is_misconfigured() {
    let layer = embedded("[[rule]]\nname = \"all\"\nkey = \"ip\"\nlimits = [\"gcra 1/1h\"]");
    assert_eq!(ask(&layer, get("/", &[])).await.status.as_u16(), 500);
    let mut noted = get("/", &[]);
    noted.extensions_mut().insert(std::net::SocketAddr::from(([192, 0, 2, 1], 99)));
    assert_eq!(ask(&layer, noted).await.status.as_u16(), 200);
}
