//! A service behind a proxy as it is usually run.

use std::net::SocketAddr;

use axum::Router;
use axum::routing::get;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket};
use tollgate::middleware::{ClientAddress, RateLimitLayer};
use tollgate::{Embedded, Limiter};
use tollgate_testing::nginx::Nginx;
use tollgate_testing::rules::rule_set;

/// The statuses of such requests by nginx, from this address of loopback.
async fn by_nginx(nginx: &Nginx, client: [u8; 4], header: &[u8], count: usize) -> Vec<u16> {
    let mut statuses = Vec::new();
    for _ in 0..count {
        let socket = TcpSocket::new_v4().expect("a socket");
        socket.bind(SocketAddr::from((client, 0))).expect("an address of loopback");
        let mut stream = socket.connect(nginx.address).await.expect("connected");
        let head = [b"GET / HTTP/1.1\r\nHost: test\r\nConnection: close\r\n", header, b"\r\n"].concat();
        stream.write_all(&head).await.expect("sent");
        let mut response = Vec::new();
        stream.read_to_end(&mut response).await.expect("an answer");
        let text = String::from_utf8_lossy(&response);
        statuses
            .push(text.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or_else(|| panic!("{text}")));
    }
    statuses
}

#[tokio::test]
async fn behind_a_real_nginx_a_client_counts_and_is_banned_whatever_bytes_it_sends() {
    let rules = "[[rule]]\nname = \"banned\"\nmatch = { ip = \"127.0.0.66\" }\naction = \"block\"\n\
                 [[rule]]\nname = \"anybody\"\nkey = \"ip\"\nlimits = [\"fixed-window 2/1h start first-hit\"]\n\
                 missing = \"skip\"\n";
    let layer = RateLimitLayer::new(Limiter::new(Embedded::new()), rule_set(rules))
        .client_address(ClientAddress::behind(["127.0.0.1"]).expect("a proxy"));
    let app = Router::new().route("/", get(|| async { "hello" })).layer(layer);
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let nginx = Nginx::before(listener.local_addr().expect("an address"));
    let app = app.into_make_service_with_connect_info::<SocketAddr>();
    tokio::spawn(async move { axum::serve(listener, app).await });
    let lines =
        |values: &[&[u8]]| values.iter().flat_map(|value| [b"X-Forwarded-For: ", *value, b"\r\n"].concat()).collect();
    let headers: [Vec<u8>; 7] = [
        Vec::new(),
        lines(&[b"\xff"]),
        lines(&[b"198.51.100.1, \xe9"]),
        lines(&[b"127.0.0.1, \xff"]),
        lines(&[&b"\xff".repeat(32_000)]),
        lines(&[b"\xff", b"nonsense", b"198.51.100.1"]),
        lines(&[&b"127.0.0.1,".repeat(3000)]),
    ];
    for (at, header) in (1..).zip(&headers) {
        assert_eq!(by_nginx(&nginx, [127, 0, 0, 66], header, 1).await, [403], "{at}");
        assert_eq!(by_nginx(&nginx, [127, 0, 1, at], header, 4).await, [200, 200, 429, 429], "{at}");
    }
}
