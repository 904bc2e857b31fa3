//! Ports under careless clients.

use std::time::{Duration, Instant};

use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tollgate_serve::listen::{Address, Bounds, Port};
use tollgate_serve::tls::Certificate;
use tollgate_testing::certificates::Authority;
use tollgate_testing::polling::{in_time, wait_until};
use tollgate_testing::redis_server::Server;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

use crate::client::{Connection, send};
use crate::running::{Running, builder};

const RULES: &str = "[[rule]]\nname = \"users\"\nkey = \"user\"\nlimits = [\"fixed-window 1000/30d\"]";

fn bounds(change: impl FnOnce(&mut Bounds)) -> Bounds {
    let mut bounds = Bounds::default();
    change(&mut bounds);
    bounds
}

fn request(user: &str) -> String {
    let body = json!({ "attributes": { "user": user } }).to_string();
    format!("POST /v1/decide HTTP/1.1\r\nhost: a\r\ncontent-length: {}\r\n\r\n{body}", body.len())
}

#[tokio::test]
async fn slow_clients_are_cut_off_and_others_are_served_meanwhile() {
    let server = Server::start();
    let short = Duration::from_millis(300);
    let bounds = bounds(|bounds| (bounds.head, bounds.request) = (short, short));
    let running = Running::bounded(builder(&server, RULES).build(), bounds).await;
    let mut silent = Vec::new();
    for _ in 0..500 {
        silent.push(Connection::open(&running.http).await);
    }
    let mut slow_head = Connection::open(&running.http).await;
    slow_head.write(b"POST /v1/decide HTTP/1.1\r\nhos").await.expect("half of a head");
    let mut slow_body = Connection::open(&running.http).await;
    slow_body.write(b"POST /v1/decide HTTP/1.1\r\nhost: a\r\ncontent-length: 40\r\n\r\n{").await.expect("a head");
    assert_eq!(send(&running.http, "POST", "/v1/peek", &[], "{\"attributes\":{\"user\":1}}").await.status, 200);
    let late = slow_body.answer().await.expect("an answer");
    assert_eq!((late.status, &late.json()["kind"], &late.json()["charged"]), (408, &json!("deadline"), &json!(null)));
    // hyper may say why before it closes.
    assert!(slow_head.answer().await.is_none_or(|answer| answer.status == 408));
    for mut connection in silent {
        assert!(connection.answer().await.is_none_or(|answer| answer.status == 408));
    }
    running.end().await;
}

#[tokio::test]
async fn a_client_that_reads_no_answers_loses_its_connection() {
    let server = Server::start();
    let bounds = bounds(|bounds| (bounds.request, bounds.connections) = (Duration::from_millis(300), 1));
    let running = Running::bounded(builder(&server, RULES).build(), bounds).await;
    let mut deaf = Connection::open(&running.http).await;
    let requests = "GET /v1/openapi.json HTTP/1.1\r\nhost: a\r\n\r\n".repeat(300_000);
    // Until both ends' buffers are full, and longer.
    assert!(deaf.write(requests.as_bytes()).await.is_err(), "it is closed");
    assert_eq!(send(&running.http, "GET", "/healthz", &[], "").await.status, 200, "its place is free");
    running.end().await;
}

/// By HTTP/2, a client grants each answer its room. This one answers pings, and grants none.
#[tokio::test]
async fn a_client_that_takes_no_answers_by_http_2_loses_its_connection_and_a_watch_lasts() {
    let server = Server::start();
    let bounds =
        bounds(|bounds| (bounds.head, bounds.request) = (Duration::from_secs(100), Duration::from_millis(300)));
    let running = Running::bounded(builder(&server, RULES).build(), bounds).await;
    let endpoint = tonic::transport::Endpoint::from_shared(format!("http://{}", running.grpc)).expect("an address");
    let channel = endpoint.connect().await.expect("a connection");
    let watch = HealthClient::new(channel.clone()).watch(HealthCheckRequest::default()).await;
    let mut statuses = watch.expect("a watch").into_inner();
    assert!(in_time(statuses.message()).await.expect("no error").is_some());

    let frame = |kind: u8, flags: u8, stream: u8, payload: &[u8]| {
        [&[0, 0, u8::try_from(payload.len()).expect("short"), kind, flags, 0, 0, 0, stream], payload].concat()
    };
    let field = |name: &str, value: &str| {
        let part = |text: &str| [&[u8::try_from(text.len()).expect("short")], text.as_bytes()].concat();
        [vec![0], part(name), part(value)].concat()
    };
    let fields = [(":method", "GET"), (":scheme", "http"), (":path", "/v1/openapi.json"), (":authority", "a")];
    let request = fields.map(|(name, value)| field(name, value)).concat();
    let mut client = tokio::net::TcpStream::connect(&running.http).await.expect("a connection");
    let bytes = [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(),
        // The room that each answer is granted at first: none.
        frame(4, 0, 0, &[0, 4, 0, 0, 0, 0]),
        frame(1, 5, 1, &request),
    ];
    client.write_all(&bytes.concat()).await.expect("a request");
    let mut read = Vec::new();
    in_time(client.read_to_end(&mut read)).await.expect("its end");
    // SETTINGS, the acknowledgement of the client's, the head of the answer; nothing of 30 KiB.
    assert!(read.len() < 1000, "{}", read.len());
    let next = tokio::time::timeout(3 * bounds.request, statuses.message()).await;
    assert!(next.is_err(), "the watch has ended: {next:?}");
    assert_eq!(send(&running.http, "GET", "/healthz", &[], "").await.status, 200);
    drop((statuses, channel));
    running.end().await;
}

#[tokio::test]
async fn no_more_connections_than_may_be_are_served() {
    let server = Server::start();
    let bounds = bounds(|bounds| bounds.connections = 2);
    let running = Running::bounded(builder(&server, RULES).build(), bounds).await;
    let mut first = Connection::open(&running.http).await;
    let mut second = Connection::open(&running.http).await;
    for connection in [&mut first, &mut second] {
        connection.write(request("ada").as_bytes()).await.expect("a request");
        assert!(connection.answer().await.is_some());
    }
    let mut third = Connection::open(&running.http).await;
    third.write(request("ada").as_bytes()).await.expect("a request");
    assert!(tokio::time::timeout(Duration::from_millis(100), third.answer()).await.is_err(), "it waits");
    drop(first);
    assert_eq!(third.answer().await.expect("an answer").status, 200);
    running.end().await;
}

#[tokio::test]
async fn heads_that_are_too_large_and_bytes_of_no_protocol_are_refused() {
    let server = Server::start();
    let running = Running::start(builder(&server, RULES).build()).await;
    let mut rng = fastrand::Rng::with_seed(51);
    let large = format!("POST /v1/decide HTTP/1.1\r\nhost: a\r\nx: {}\r\n\r\n", "y".repeat(40_000));
    let mut connection = Connection::open(&running.http).await;
    connection.write(large.as_bytes()).await.ok();
    assert!(connection.answer().await.is_none_or(|answer| answer.status == 431));
    for _ in 0..200 {
        let mut bytes: Vec<u8> = (0..rng.usize(1..300)).map(|_| rng.u8(..)).collect();
        if rng.bool() {
            let good = request("ada").into_bytes();
            let at = rng.usize(0..good.len());
            bytes = [&good[..at], &bytes[..1], &good[at..]].concat();
        }
        for address in [&running.http, &running.grpc] {
            let mut connection = Connection::open(address).await;
            connection.write(&bytes).await.ok();
        }
    }
    assert_eq!(send(&running.http, "GET", "/healthz", &[], "").await.status, 200);
    running.end().await;
}

#[tokio::test]
async fn a_request_that_fails_is_answered_in_its_own_protocol_and_alone() {
    let port = Port::open(&"127.0.0.1:0".parse().expect("an address")).await.expect("a port");
    let address = port.address();
    let routes = axum::Router::new()
        .route("/panics", axum::routing::get(async || -> &'static str { panic!("as this test wants it") }))
        .route("/hangs", axum::routing::get(async || std::future::pending::<&'static str>().await));
    let (end, ended) = tokio::sync::oneshot::channel::<()>();
    let bounds = bounds(|bounds| bounds.request = Duration::from_millis(300));
    let serving = tokio::spawn(port.serve(routes, bounds, async { ended.await.unwrap_or(()) }));
    let mut connection = Connection::open(&address).await;
    for (path, status, kind, code) in [("/panics", 500, "internal", "13"), ("/hangs", 408, "deadline", "4")] {
        let answer = connection.send("GET", path, &[], "").await;
        assert_eq!((answer.status, &answer.json()["kind"]), (status, &json!(kind)), "{answer:?}");
        let answer = connection.send("GET", path, &[("content-type", "application/grpc")], "").await;
        assert_eq!((answer.status, answer.field("grpc-status")), (status, Some(code)), "{answer:?}");
    }
    drop((end, connection));
    in_time(serving).await.expect("an end");
}

#[tokio::test]
async fn who_asks_the_port_of_grpc_by_http_gets_no_status_that_could_be_a_decision() {
    let server = Server::start();
    let running = Running::start(builder(&server, RULES).build()).await;
    for (method, path) in
        [("POST", "/v1/decide"), ("GET", "/v1/forward-auth"), ("GET", "/v1/auth-request"), ("GET", "/")]
    {
        let answer = send(&running.grpc, method, path, &[], "{}").await;
        assert_eq!((answer.status, &answer.json()["kind"]), (415, &json!("input")), "{path}");
    }
    let answer = send(&running.grpc, "POST", "/other.Service/Call", &[("content-type", "application/grpc")], "").await;
    assert_eq!((answer.status, answer.field("grpc-status")), (200, Some("12")));
    running.end().await;
}

#[tokio::test]
async fn a_socket_in_the_file_system_is_a_port() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("tollgate.sock");
    let address: Address = format!("unix:{}", path.display()).parse().expect("an address");
    let server = Server::start();
    let service = builder(&server, RULES).build();
    let port = Port::open(&address).await.expect("a port");
    let error = Port::open(&address).await.expect_err("it is in use");
    assert_eq!(error.to_string(), "another process listens on this socket");
    let (end, ended) = tokio::sync::oneshot::channel::<()>();
    let serving = tokio::spawn(port.serve(service.http(), Bounds::default(), async { ended.await.unwrap_or(()) }));
    let mut stream = in_time(tokio::net::UnixStream::connect(&path)).await.expect("a connection");
    tokio::io::AsyncWriteExt::write_all(&mut stream, request("ada").as_bytes()).await.expect("a request");
    let mut answer = [0; 12];
    in_time(tokio::io::AsyncReadExt::read_exact(&mut stream, &mut answer)).await.expect("an answer");
    assert_eq!(&answer, b"HTTP/1.1 200");
    drop((end, stream));
    in_time(serving).await.expect("an end");
    assert!(!path.exists());
    // One that has taken another's place isn't removed by that one.
    let before = Port::open(&address).await.expect("a port");
    std::fs::remove_file(&path).expect("a socket");
    let next = Port::open(&address).await.expect("a port");
    drop(before);
    assert!(path.exists());
    drop(next);
    assert!(!path.exists());
    // What is left of a process that was killed is replaced; another file isn't.
    drop(std::os::unix::net::UnixListener::bind(&path).expect("a socket"));
    drop(Port::open(&address).await.expect("a port"));
    std::fs::write(&path, "kept").expect("a file");
    assert_eq!(Port::open(&address).await.expect_err("a file").to_string(), "a file that is no socket has this name");
}

#[tokio::test]
async fn what_has_begun_is_answered_at_the_end() {
    let server = Server::start();
    let running = Running::start(builder(&server, RULES).build()).await;
    let address = running.http.clone();
    let mut begun = Connection::open(&address).await;
    let whole = request("ada");
    let (head, rest) = whole.split_at(whole.len() - 5);
    begun.write(head.as_bytes()).await.expect("a part of a request");
    // Until the service has read the head.
    tokio::time::sleep(Duration::from_millis(100)).await;
    let ending = tokio::spawn(running.end());
    wait_until("nobody is accepted", async || tokio::net::TcpStream::connect(&address).await.is_err()).await;
    begun.write(rest.as_bytes()).await.expect("the rest");
    assert_eq!(begun.answer().await.expect("an answer").status, 200);
    assert!(begun.answer().await.is_none(), "and is then closed");
    in_time(ending).await.expect("an end");
}

#[tokio::test]
async fn a_certificate_may_be_replaced_while_it_is_in_use() {
    let directory = tempfile::tempdir().expect("a directory");
    let (cert, key) = (directory.path().join("cert.pem"), directory.path().join("key.pem"));
    let authorities = [Authority::new("first"), Authority::new("second")];
    let write = |authority: &Authority| {
        let pair = authority.signs(&["localhost"]);
        std::fs::write(&cert, pair.certificate).expect("a file");
        std::fs::write(&key, pair.key).expect("a file");
    };
    write(&authorities[0]);
    let certificate = Certificate::read(&cert, &key).expect("a certificate");
    let server = Server::start();
    let port = Port::open(&"127.0.0.1:0".parse().expect("an address")).await.expect("a port");
    let address = port.address();
    let (end, ended) = tokio::sync::oneshot::channel::<()>();
    let routes = builder(&server, RULES).build().http();
    let port = port.with_certificate(certificate.clone());
    let serving = tokio::spawn(port.serve(routes, Bounds::default(), async { ended.await.unwrap_or(()) }));
    let trusts = async |authority: &Authority| {
        let connector = tokio_rustls::TlsConnector::from(authority.trusted().client_config().expect("settings"));
        let stream = in_time(tokio::net::TcpStream::connect(&address)).await.expect("a connection");
        in_time(connector.connect("localhost".try_into().expect("a name"), stream)).await.is_ok()
    };
    assert_eq!((trusts(&authorities[0]).await, trusts(&authorities[1]).await), (true, false));
    std::fs::write(&cert, "nothing").expect("a file");
    let error = certificate.reload().expect_err("no certificate");
    assert!(error.to_string().starts_with(&cert.display().to_string()), "{error}");
    assert!(trusts(&authorities[0]).await, "it stays");
    write(&authorities[1]);
    certificate.reload().expect("a certificate");
    assert_eq!((trusts(&authorities[0]).await, trusts(&authorities[1]).await), (false, true));
    // A connection without a handshake doesn't delay the end.
    let mut silent = Connection::open(&address).await;
    assert!(trusts(&authorities[1]).await, "it was accepted before this one");
    let began = Instant::now();
    drop(end);
    in_time(serving).await.expect("an end");
    assert!(began.elapsed() < Bounds::default().ending);
    assert!(silent.answer().await.is_none());
}
