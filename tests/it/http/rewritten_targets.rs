//! A target that a layer in front has rewritten, on each version of HTTP: rules see the one that the client asked for.

use std::net::SocketAddr;

use axum::Router;
use axum::http::header::HOST;
use axum::http::{HeaderValue, Request, Uri};
use axum::routing::{any, get};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tower::util::MapRequestLayer;

use super::{embedded, serve};

type Incoming = Request<axum::body::Body>;

/// How a request names its target.
#[derive(Clone, Copy, Debug)]
enum Form {
    /// `GET /path`, with a header `Host`.
    Origin,
    /// `GET http://host/path`, as to a proxy.
    Absolute,
    Http2,
}

const FORMS: [Form; 3] = [Form::Origin, Form::Absolute, Form::Http2];

/// The status of a request for this host and path, with more header lines.
async fn status(address: SocketAddr, form: Form, host: &str, path: &str, more: &str) -> u16 {
    let stream = TcpStream::connect(address).await.expect("connected");
    let target = match form {
        Form::Origin => path.to_owned(),
        Form::Absolute | Form::Http2 => format!("http://{host}{path}"),
    };
    if matches!(form, Form::Http2) {
        let (client, connection) = h2::client::handshake(stream).await.expect("HTTP/2");
        tokio::spawn(connection);
        let mut client = client.ready().await.expect("ready");
        let mut request = Request::get(target).body(()).expect("a request");
        for (name, value) in more.lines().filter_map(|line| line.split_once(": ")) {
            let name = name.parse::<axum::http::HeaderName>().expect("a name");
            request.headers_mut().append(name, value.parse().expect("a value"));
        }
        let (response, _) = client.send_request(request, true).expect("sent");
        return response.await.expect("an answer").status().as_u16();
    }
    // Whoever sends an absolute target repeats its host.
    line(stream, &format!("GET {target} HTTP/1.1\r\nHost: {host}\r\n{more}Connection: close\r\n\r\n")).await
}

async fn line(mut stream: TcpStream, head: &str) -> u16 {
    stream.write_all(head.as_bytes()).await.expect("sent");
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.expect("an answer");
    let answer = String::from_utf8_lossy(&answer);
    answer.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or_else(|| panic!("{answer:?}"))
}

/// `/de/items` as `/items`, and whatever host as another.
fn rewritten(uri: &Uri, host: Option<&str>, keeps_authority: bool) -> Uri {
    let path = uri.path_and_query().map_or("/", |path| path.as_str());
    let path = path.strip_prefix("/de").unwrap_or(path);
    let mut builder = Uri::builder().path_and_query(path);
    let authority = host.or(uri.authority().map(|authority| authority.as_str()).filter(|_| keeps_authority));
    if let Some(authority) = authority {
        builder = builder.scheme("http").authority(authority);
    }
    builder.build().expect("a target")
}

#[tokio::test]
async fn a_layer_that_cuts_a_prefix_or_changes_the_host_leads_around_no_rule() {
    const RULES: &str = "
        [[rule]]
        name = \"items\"
        match = { route = \"/de/items/{id}\", path = \"/de/items/*\" }
        key = [\"path\", \"route\"]
        limits = [\"fixed-window 2/1h start first-hit\"]
        [[rule]]
        name = \"rest\"
        action = \"allow\"
    ";
    for (host, keeps_authority) in [(None, false), (None, true), (Some("inner.example"), true)] {
        for waits in [false, true] {
            let layer = embedded(RULES);
            // A layer that waits may be on either side.
            let layer = if waits { layer.wait(std::time::Duration::from_millis(1)) } else { layer };
            let rewrites = MapRequestLayer::new(move |mut request: Incoming| {
                *request.uri_mut() = rewritten(request.uri(), host, keeps_authority);
                request
            });
            let items = get(|uri: Uri| async move { assert_eq!(uri.path(), "/items/7") });
            let app = Router::new().route("/de/items/{id}", items).layer(layer).layer(rewrites);
            let address = serve(app).await;
            // Together they are one count, whichever version comes first.
            let mut statuses = Vec::new();
            for form in FORMS {
                statuses.push(status(address, form, "shop.example", "/de/items/7", "").await);
            }
            assert_eq!(statuses, [200, 200, 429], "{host:?} {keeps_authority} {waits}");
            for form in FORMS {
                let answer = status(address, form, "other.example", "/de/items/7?x", "").await;
                assert_eq!(answer, 429, "{host:?} {keeps_authority} {waits} {form:?}");
            }
        }
    }
}

/// CONNECT has a host and a port for a target, and no path.
#[tokio::test]
async fn connect_is_counted_as_the_root_on_each_version() {
    let rules = "[[rule]]\nname = \"tunnels\"\nmatch = { method = \"CONNECT\", path = \"/\" }\nkey = \"path\"\n\
                 limits = [\"fixed-window 2/1h start first-hit\"]";
    let app = Router::new().fallback(any(|| async {})).layer(embedded(rules));
    let address = serve(app).await;
    let head = "CONNECT theirs.example:443 HTTP/1.1\r\nHost: theirs.example:443\r\n\r\n";
    let mut statuses = Vec::new();
    for http2 in [false, true, false, true] {
        let stream = TcpStream::connect(address).await.expect("connected");
        if http2 {
            let (client, connection) = h2::client::handshake(stream).await.expect("HTTP/2");
            tokio::spawn(connection);
            let mut client = client.ready().await.expect("ready");
            let request = Request::connect("theirs.example:443").body(()).expect("a request");
            let (response, _) = client.send_request(request, false).expect("sent");
            statuses.push(response.await.expect("an answer").status().as_u16());
        } else {
            let mut stream = stream;
            stream.write_all(head.as_bytes()).await.expect("sent");
            let mut answer = [0; 12];
            stream.read_exact(&mut answer).await.expect("an answer");
            statuses.push(std::str::from_utf8(&answer[9..]).expect("text").parse().expect("a status"));
        }
    }
    assert_eq!(statuses, [200, 200, 429, 429]);
}

const BY_HOST: &str = "
    [[rule]]
    name = \"hosts\"
    key = \"host\"
    limits = [\"fixed-window 3/1h start first-hit\"]
";

/// The recipe for a limit per host, on each version of HTTP.
#[tokio::test]
async fn all_spellings_of_a_host_are_one_count_on_each_version() {
    let app = || Router::new().fallback(get(|| async {})).layer(embedded(BY_HOST).header("host", HOST));
    let spellings = ["victim.example", "Victim.example", "victim.example.", "VICTIM.EXAMPLE:8443", "victim.example.:"];
    for order in 0..FORMS.len() {
        let address = serve(app()).await;
        let mut statuses = Vec::new();
        for (at, spelling) in spellings.iter().enumerate() {
            statuses.push(status(address, FORMS[(at + order) % FORMS.len()], spelling, "/", "").await);
        }
        assert_eq!(statuses, [200, 200, 200, 429, 429]);
        for form in FORMS {
            assert_eq!(status(address, form, "other.example", "/", "").await, 200, "{form:?}");
        }
    }
    // A layer that cuts a prefix off, and the host with it, doesn't make it unknown.
    let cuts = MapRequestLayer::new(|mut request: Incoming| {
        *request.uri_mut() = rewritten(request.uri(), None, false);
        request
    });
    let address = serve(app().layer(cuts)).await;
    for expected in [200, 200, 200, 429] {
        assert_eq!(status(address, Form::Http2, "victim.example", "/de/x", "").await, expected);
    }
}

/// Servers take either of two hosts, and read what is no host as they like.
#[tokio::test]
async fn a_host_that_can_be_read_in_two_ways_is_refused() {
    let address = serve(Router::new().fallback(get(|| async {})).layer(embedded(BY_HOST).header("host", HOST))).await;
    let connect = async || TcpStream::connect(address).await.expect("connected");
    for head in [
        "GET http://victim.example/ HTTP/1.1\r\nHost: other.example\r\n",
        "GET / HTTP/1.1\r\nHost: victim.example\r\nHost: victim.example\r\n",
        "GET / HTTP/1.1\r\nHost: victim.example, other.example\r\n",
        "GET / HTTP/1.1\r\nHost: user@victim.example\r\n",
        "GET / HTTP/1.1\r\nHost: victim..example\r\n",
        "GET / HTTP/1.1\r\nHost: \u{ff}\u{fffd}\r\n",
    ] {
        assert_eq!(line(connect().await, &format!("{head}Connection: close\r\n\r\n")).await, 400, "{head:?}");
    }
    let long = format!("GET / HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n", "a.".repeat(20_000));
    assert_eq!(line(connect().await, &long).await, 400);
    assert_eq!(status(address, Form::Http2, "victim.example", "/", "host: other.example\r\n").await, 400);
    // The same host twice is no other.
    assert_eq!(status(address, Form::Http2, "victim.example", "/", "host: Victim.example.:80\r\n").await, 200);
    // None, as HTTP/1.0 may have it: the rule lacks what it counts by.
    assert_eq!(line(connect().await, "GET / HTTP/1.0\r\n\r\n").await, 400);
}

/// What is sent counts by where it goes, whatever `Host` the request it came from had.
#[tokio::test]
async fn outgoing_calls_are_counted_by_the_host_that_they_go_to() {
    let layer = embedded(BY_HOST).for_outgoing().header("host", HOST);
    let mut statuses = Vec::new();
    for target in
        ["https://Theirs.example/a", "https://theirs.example./b", "http://theirs.example:81/", "http://theirs.example"]
    {
        let mut request = super::get(target, &[("host", "ours.example")]);
        request.extensions_mut().insert(axum::extract::OriginalUri("http://ours.example/x".parse().expect("a target")));
        statuses.push(super::ask(&layer, request).await.status.as_u16());
    }
    assert_eq!(statuses, [200, 200, 200, 429]);
    // Over a socket that needs no address, the header says.
    let mut request = super::get("/a", &[]);
    request.headers_mut().insert(HOST, HeaderValue::from_static("THEIRS.example"));
    assert_eq!(super::ask(&layer, request).await.status.as_u16(), 429);
}
