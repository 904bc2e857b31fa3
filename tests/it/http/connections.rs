//! Permits and counts on real connections: slow readers, clients that hang up, upgrades, and HTTP/2.

use std::net::SocketAddr;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::{Response, StatusCode};
use axum::routing::get;
use axum::{Extension, Router};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tollgate::middleware::{RateLimitLayer, ResponsePermits};
use tollgate_testing::redis_server::Server;

use super::{PERMITS, left, redis_limiter, rule_set, serve, until_left};

const MEGABYTES: usize = 32;

/// An answer that its reader takes its time for.
async fn long() -> Body {
    let frames = (0..MEGABYTES).map(|_| Ok::<_, std::convert::Infallible>(Bytes::from(vec![b'x'; 1 << 20])));
    Body::from_stream(futures_util::stream::iter(frames))
}

async fn asked(address: SocketAddr, path: &str, headers: &str) -> TcpStream {
    let mut stream = TcpStream::connect(address).await.expect("connected");
    let text = format!("GET {path} HTTP/1.1\r\nHost: test\r\n{headers}\r\n");
    stream.write_all(text.as_bytes()).await.expect("sent");
    stream
}

/// The head of an answer, of whose body nothing has come yet that is needed.
async fn head(stream: &mut TcpStream) -> String {
    let mut text = Vec::new();
    while !text.ends_with(b"\r\n\r\n") {
        text.push(stream.read_u8().await.expect("more of the head"));
    }
    String::from_utf8(text).expect("text")
}

#[tokio::test]
async fn a_slow_reader_holds_its_permit_until_the_end_and_a_closed_connection_holds_none() {
    let server = Server::start();
    let limiter = redis_limiter(&server);
    let hangs = get(std::future::pending::<&'static str>);
    let app = Router::new().route("/long", get(long)).route("/hangs", hangs);
    let address = serve(app.layer(RateLimitLayer::new(limiter.clone(), rule_set(PERMITS)))).await;

    let mut slow = asked(address, "/long", "Connection: close\r\n").await;
    let mut leaves = asked(address, "/long", "").await;
    assert!(head(&mut slow).await.starts_with("HTTP/1.1 200"));
    assert!(head(&mut leaves).await.starts_with("HTTP/1.1 200"));
    assert!(head(&mut asked(address, "/long", "").await).await.starts_with("HTTP/1.1 429"));
    // More than the buffers between hold is still to be read.
    assert_eq!(left(&limiter, PERMITS).await, 0);
    drop(leaves);
    until_left(&limiter, 1).await;
    let mut rest = Vec::new();
    slow.read_to_end(&mut rest).await.expect("all of it");
    assert!(rest.len() > MEGABYTES << 20);
    until_left(&limiter, 2).await;

    // Before there is an answer.
    let hanging = asked(address, "/hangs", "").await;
    until_left(&limiter, 1).await;
    drop(hanging);
    until_left(&limiter, 2).await;
}

/// Switches to a protocol that echoes everything twice; holds its permit while it lasts if the path says so.
async fn doubled(Extension(permits): Extension<ResponsePermits>, mut request: Request) -> Response<Body> {
    let held = request.uri().path().ends_with("held").then(|| permits.hold().expect("permits"));
    let upgrade = hyper::upgrade::on(&mut request);
    tokio::spawn(async move {
        let mut stream = TokioIo::new(upgrade.await.expect("switched"));
        let mut word = [0; 4];
        while stream.read_exact(&mut word).await.is_ok() {
            stream.write_all(&[word, word].concat()).await.expect("sent");
        }
        drop(held);
    });
    let response = Response::builder().status(StatusCode::SWITCHING_PROTOCOLS);
    response.header("connection", "upgrade").header("upgrade", "doubled").body(Body::empty()).expect("a response")
}

#[tokio::test]
async fn an_upgraded_connection_holds_a_permit_if_its_handler_does() {
    let server = Server::start();
    let limiter = redis_limiter(&server);
    let app = Router::new().route("/held", get(doubled)).route("/free", get(doubled));
    let address = serve(app.layer(RateLimitLayer::new(limiter.clone(), rule_set(PERMITS)))).await;
    for (path, held) in [("/held", true), ("/free", false)] {
        let mut stream = asked(address, path, "Connection: upgrade\r\nUpgrade: doubled\r\n").await;
        let text = head(&mut stream).await;
        assert!(text.starts_with("HTTP/1.1 101") && text.contains("ratelimit-policy: \"jobs\""), "{text}");
        for _ in 0..3 {
            stream.write_all(b"word").await.expect("sent");
            let mut answer = [0; 8];
            stream.read_exact(&mut answer).await.expect("an answer");
            assert_eq!(&answer, b"wordword");
        }
        until_left(&limiter, if held { 1 } else { 2 }).await;
        tokio::time::sleep(Duration::from_millis(50)).await;
        until_left(&limiter, if held { 1 } else { 2 }).await;
        drop(stream);
        until_left(&limiter, 2).await;
    }
}

/// What stood in the request line has fields of its own there: whatever they say of host and scheme, the path counts.
#[tokio::test]
async fn over_http2_the_path_counts_whatever_its_other_pseudo_headers_say() {
    let server = Server::start();
    let rules = rule_set(
        "
        [[rule]]
        name = \"api\"
        match = { path = \"/api/*\" }
        key = \"ip\"
        limits = [\"fixed-window 4/1h start first-hit\"]
    ",
    );
    let app = Router::new().fallback(async || "hello");
    let address = serve(app.layer(RateLimitLayer::new(redis_limiter(&server), rules))).await;
    let stream = TcpStream::connect(address).await.expect("connected");
    let (mut client, connection) = h2::client::handshake(stream).await.expect("HTTP/2");
    tokio::spawn(connection);
    let mut ask = async |method: &str, target: &str| {
        std::future::poll_fn(|context| client.poll_ready(context)).await.expect("ready");
        let request = axum::http::Request::builder().method(method).uri(target).header("host", "other.example");
        let (response, _) = client.send_request(request.body(()).expect("a request"), true).expect("sent");
        response.await.expect("an answer").status().as_u16()
    };
    for target in [
        "http://a.example/api/items",
        "https://b.example/api/items?x=/other",
        "http://user@c.example:99/api/items/",
        "http://d.example/api/%20items",
    ] {
        assert_eq!(ask("GET", target).await, 200, "{target}");
    }
    assert_eq!(ask("GET", "http://a.example/other/../api/./items").await, 400, "to routers another than to proxies");
    for (method, target) in
        [("GET", "http://e.example/api/items"), ("POST", "https://f.example/api/x"), ("OPTIONS", "http://g/api/x")]
    {
        assert_eq!(ask(method, target).await, 429, "{method} {target}");
    }
    assert_eq!(ask("GET", "http://a.example/other").await, 200);
    assert_eq!(ask("OPTIONS", "http://a.example/*").await, 200);
}

/// A handler may take the permits of any request: there are none where its rule has none.
#[tokio::test]
async fn a_rule_without_permits_has_none_to_hold() {
    let server = Server::start();
    let free = rule_set("[[rule]]\nname = \"free\"\nkey = \"global\"\nlimits = [\"gcra 9/1s\"]");
    let handler = get(async |Extension(permits): Extension<ResponsePermits>| format!("{}", permits.hold().is_none()));
    let app = Router::new().route("/", handler).layer(RateLimitLayer::new(redis_limiter(&server), free));
    let mut stream = asked(serve(app).await, "/", "Connection: close\r\n").await;
    let mut text = String::new();
    stream.read_to_string(&mut text).await.expect("an answer");
    assert!(text.starts_with("HTTP/1.1 200") && text.ends_with("true"), "{text}");
}
