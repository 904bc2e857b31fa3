//! What proxies ask by header fields.

use tollgate_testing::redis_server::Server;

use crate::client::send;
use crate::running::{Running, builder};

const RULES: &str = r#"
    paths = "decoded"

    [[rule]]
    name = "users"
    match = { path = "/api/*", method = "POST" }
    key = "user"
    limits = ["fixed-window 2/30d"]
    message = "slow down"

    [[rule]]
    name = "addresses"
    match = { path = "/*" }
    key = "ip"
    limits = ["fixed-window 1/30d"]
"#;

/// As the middleware does, which the service stands in the place of.
#[tokio::test]
async fn a_path_that_servers_read_differently_is_refused() {
    let server = Server::start();
    let rules = "[[rule]]\nname = \"admin\"\nmatch = { path = \"/admin/*\" }\naction = \"block\"";
    let running = Running::start(builder(&server, rules).build()).await;
    for (path, status) in
        [("/admin/a", 403), ("/admin;x/a", 400), ("/..;/admin/a", 400), ("/%2561dmin", 400), ("/a", 200)]
    {
        let answer = send(&running.http, "GET", "/v1/forward-auth", &[("x-forwarded-uri", path)], "").await;
        assert_eq!(answer.status, status, "{path}");
        let body = serde_json::json!({ "attributes": { "path": path } }).to_string();
        let answer = send(&running.http, "POST", "/v1/decide", &[], &body).await;
        assert_eq!(answer.status, status, "{path}");
        // For middlewares, whose own mistakes are refused alike.
        assert_eq!(answer.json()["reason"] == "ambiguous-path", status == 400, "{path}");
    }
    running.end().await;
}

#[tokio::test]
async fn a_proxy_names_the_request_by_header_fields() {
    let mut server = Server::start();
    let running = Running::start(builder(&server, RULES).build()).await;
    let traefik = |user: &'static str| {
        vec![
            ("x-forwarded-method", "POST"),
            ("x-forwarded-uri", "/api/items?page=2"),
            ("x-forwarded-for", "198.51.100.7, 192.0.2.1"),
            ("x-tollgate-user", user),
        ]
    };
    for status in [200, 200, 429] {
        let answer = send(&running.http, "GET", "/v1/forward-auth", &traefik("ada"), "").await;
        assert_eq!(answer.status, status);
        assert_eq!(answer.field("ratelimit-policy"), Some("\"users\";q=2;w=2592000"));
        assert_eq!(answer.body, if status == 429 { "slow down" } else { "" });
        assert_eq!(answer.field("retry-after").is_some(), status == 429);
    }
    let nginx = |user: &'static str| {
        vec![
            ("x-original-method", "POST"),
            ("x-original-uri", "/api/items"),
            ("x-real-ip", "192.0.2.1"),
            ("x-tollgate-user", user),
        ]
    };
    for (user, status, own) in [("ada", 403, "429"), ("bob", 200, "200")] {
        let answer = send(&running.http, "GET", "/v1/auth-request", &nginx(user), "").await;
        assert_eq!((answer.status, answer.field("x-tollgate-status")), (status, Some(own)), "{user}");
    }
    // The last address of the list is the one that the proxy has added.
    for (list, status) in [("203.0.113.9, 192.0.2.5", 200), ("203.0.113.8, 192.0.2.5", 429), ("192.0.2.6", 200)] {
        let fields = [("x-forwarded-uri", "/"), ("x-forwarded-for", list)];
        assert_eq!(send(&running.http, "GET", "/v1/forward-auth", &fields, "").await.status, status, "{list}");
    }
    // Some load balancers add the port; a client's own fields of another proxy aren't read.
    for (address, status) in [("192.0.2.6:4711", 429), ("[2001:db8::1]:443", 200), ("[2001:db8::2]", 429)] {
        let fields = [("x-forwarded-uri", "/"), ("x-forwarded-for", address), ("x-real-ip", "203.0.113.1")];
        let fields = [&fields[..], &[("x-tollgate-ip", "203.0.113.2"), ("x-original-uri", "/api/a")]].concat();
        assert_eq!(send(&running.http, "GET", "/v1/forward-auth", &fields, "").await.status, status, "{address}");
    }
    // A byte that is no ASCII, which a client may put in, hides nothing of the request.
    for uri in ["/api/é", "/api/items?é", "/api/\u{ff}?x"] {
        let fields = [("x-original-method", "POST"), ("x-original-uri", uri), ("x-tollgate-user", "eve")];
        let answer = send(&running.http, "GET", "/v1/auth-request", &fields, "").await;
        let policy = answer.field("ratelimit-policy");
        assert_eq!(policy, Some("\"users\";q=2;w=2592000"), "{uri}: {answer:?}");
    }
    let fields = [("x-forwarded-uri", "/"), ("x-forwarded-for", "é, 192.0.2.44")];
    for status in [200, 429] {
        assert_eq!(send(&running.http, "GET", "/v1/forward-auth", &fields, "").await.status, status);
    }
    let answer = send(&running.http, "GET", "/v1/auth-request", &[("x-real-ip", "localhost")], "").await;
    assert_eq!((answer.status, answer.json()["kind"].as_str()), (400, Some("input")));
    // The answer is for clients, who need not know where Redis is.
    server.stop();
    let fields = [("x-original-uri", "/"), ("x-real-ip", "192.0.2.77")];
    let answer = send(&running.http, "GET", "/v1/auth-request", &fields, "").await;
    assert_eq!((answer.status, answer.body.as_str()), (503, ""));
    running.end().await;
}

/// Also with the statuses that a router has for what it doesn't serve.
#[tokio::test]
async fn a_denial_has_the_rules_own_status_and_message() {
    let server = Server::start();
    for status in [404, 405, 413, 418, 503] {
        let rules = format!(
            "[[rule]]\nname = \"r{status}\"\nkey = \"global\"\nlimits = [\"fixed-window 1/30d\"]\nstatus = {status}\n\
             message = \"no such thing\""
        );
        let running = Running::start(builder(&server, &rules).build()).await;
        assert_eq!(send(&running.http, "GET", "/v1/forward-auth", &[], "").await.status, 200);
        let answer = send(&running.http, "GET", "/v1/forward-auth", &[], "").await;
        assert_eq!((answer.status, &*answer.body), (status, "no such thing"), "{answer:?}");
        assert!(answer.field("retry-after").is_some(), "{answer:?}");
        let answer = send(&running.http, "POST", "/v1/decide", &[], "{\"attributes\":{}}").await;
        assert_eq!((answer.status, answer.json()["message"].as_str()), (status, Some("no such thing")));
        running.end().await;
    }
}
