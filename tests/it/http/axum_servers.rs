//! Real servers on axum, called over TCP.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::Router;
use axum::http::HeaderName;
use axum::routing::get;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tollgate::middleware::RateLimitLayer;
use tollgate::rules::WatchedRules;
use tollgate::{Limiter, Redis};
use tollgate_testing::polling::wait_until;
use tollgate_testing::redis_server::Server;

use super::{rule_set, serve};

fn limiter(server: &Server) -> Limiter {
    Limiter::builder(Redis::open(&server.tcp_url()).expect("an address")).deadline(Duration::from_secs(2)).build()
}

/// Status and head of one request, on a connection of its own.
async fn call(address: SocketAddr, method: &str, target: &str, headers: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).await.expect("connected");
    let text =
        format!("{method} {target} HTTP/1.1\r\nHost: test\r\nConnection: close\r\nContent-Length: 0\r\n{headers}\r\n");
    stream.write_all(text.as_bytes()).await.expect("sent");
    let mut response = String::new();
    stream.read_to_string(&mut response).await.expect("an answer");
    let status = response.split(' ').nth(1).expect("a status").parse().expect("a number");
    (status, response)
}

#[tokio::test]
async fn addresses_routes_and_nested_paths_are_known() {
    let server = Server::start();
    let rules = rule_set(
        "
        [[rule]]
        name = \"users\"
        match = { route = \"/users/{id}\" }
        key = [\"route\", \"ip\"]
        limits = [\"fixed-window 2/1h\"]
        [[rule]]
        name = \"inner\"
        match = { path = \"/api/*\" }
        key = \"ip\"
        limits = [\"fixed-window 1/1h\"]
    ",
    );
    let layer = RateLimitLayer::new(limiter(&server), rules);
    let inner = Router::new().route("/items", get(|| async { "items" })).layer(layer.clone());
    let app = Router::new()
        .route("/users/{id}", get(|| async { "a user" }))
        .route("/", get(|| async { "home" }))
        .layer(layer);
    let address = serve(app.nest("/api", inner)).await;
    let statuses = async |target: &str, times: usize| {
        let mut statuses = Vec::new();
        for _ in 0..times {
            statuses.push(call(address, "GET", target, "").await.0);
        }
        statuses
    };
    // Whichever user it is: the route counts.
    assert_eq!(statuses("/users/1", 1).await, [200]);
    assert_eq!(statuses("/users/2", 2).await, [200, 429]);
    assert_eq!(statuses("/", 3).await, [200, 200, 200]);
    assert_eq!(statuses("/api/items", 2).await, [200, 429]);
    assert_eq!(statuses("/api//items", 1).await, [400], "another spelling");
    let keys: Vec<String> =
        tollgate::redis::cmd("KEYS").arg("*ip:127.0.0.1*").query(&mut server.connection()).expect("keys");
    assert_eq!(keys.len(), 2, "{keys:?}");
}

/// Two instances and one Redis, which is killed and restarted while the rules are changed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_instances_admit_what_the_rules_allow_through_redis_outages_and_rule_changes() {
    let mut server = Server::start();
    let directory = tempfile::TempDir::new().expect("a directory");
    let path = directory.path().join("rules.toml");
    let write = |limit: u32, more: &str| {
        let text = format!(
            "[[rule]]\nname = \"api\"\nkey = \"api_key\"\nlimits = [\"fixed-window {limit}/1h start first-hit\"]\n{more}"
        );
        let next = directory.path().join("next");
        std::fs::write(&next, text).expect("a file");
        std::fs::rename(&next, &path).expect("replaced");
    };
    write(300, "");
    let mut addresses = Vec::new();
    let mut watched = Vec::new();
    for _ in 0..2 {
        let rules = WatchedRules::open(&path).expect("rules");
        watched.push(rules.clone());
        let layer = RateLimitLayer::new(limiter(&server), rules).api_key(HeaderName::from_static("x-api-key"));
        addresses.push(serve(Router::new().route("/", get(|| async { "hello" })).layer(layer)).await);
    }
    let (allowed, denied, away) =
        (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let load = async |calls: usize| {
        let tasks = (0..8).map(|task| {
            let (address, counters) =
                (addresses[task % 2], [Arc::clone(&allowed), Arc::clone(&denied), Arc::clone(&away)]);
            tokio::spawn(async move {
                for _ in 0..calls {
                    let (status, text) = call(address, "GET", "/", "X-API-Key: k\r\n").await;
                    let at = match status {
                        200 => 0,
                        429 => {
                            assert!(
                                text.contains("\r\nretry-after: ") && text.contains("\r\nratelimit: \"api\";r=0;t="),
                                "{text}"
                            );
                            1
                        }
                        503 => {
                            assert!(text.contains("\r\nretry-after: 1\r\n") && !text.contains("ratelimit"), "{text}");
                            2
                        }
                        other => panic!("{other}: {text}"),
                    };
                    counters[at].fetch_add(1, Ordering::Relaxed);
                }
            })
        });
        for ended in futures_util::future::join_all(tasks).await {
            ended.expect("a task");
        }
        [&allowed, &denied, &away].map(|counter| counter.swap(0, Ordering::Relaxed))
    };
    assert_eq!(load(20).await, [160, 0, 0]);
    server.stop();
    let [none, _, unavailable] = load(5).await;
    assert_eq!((none, unavailable), (0, 40), "a closed policy");
    server.restart();
    // It kept nothing: as many again may pass, and no more.
    let mut passed = 0;
    for _ in 0..20 {
        let [more, refused, _] = load(20).await;
        passed += more;
        if refused > 0 {
            break;
        }
    }
    assert_eq!(passed, 300);
    // A bad file changes nothing, and a good one is in force within a second.
    write(400, "colour = \"red\"\n");
    tokio::time::sleep(Duration::from_millis(600)).await;
    assert_eq!(load(2).await, [0, 16, 0]);
    write(310, "");
    for rules in &watched {
        let took = wait_until("the rules are followed", async || rules.reloads() > 0).await;
        assert!(took < Duration::from_secs(10), "{took:?}");
    }
    assert_eq!(load(3).await, [10, 14, 0]);
}
