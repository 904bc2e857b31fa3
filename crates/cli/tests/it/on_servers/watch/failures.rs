//! Servers that go away, endpoints that answer nonsense, readers that are gone, and misuse.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Stdio;

use serde_json::Value;
use tollgate_testing::redis_server::{Server, free_port};

use super::Running;
use crate::support::tool::{code, command, lines, stderr, stdout, tollgate};

/// An endpoint that writes this to each connection once it is asked for anything; returns its address.
fn endpoint(answer: impl Fn(&mut TcpStream) + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("its address");
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            // Whoever hangs up isn't answered.
            let _ = stream.read(&mut [0; 4096]);
            answer(&mut stream);
        }
    });
    format!("http://{address}/metrics")
}

/// One that answers with this body.
fn of_body(body: impl Into<Vec<u8>>) -> String {
    let body = body.into();
    endpoint(move |stream| {
        let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len());
        let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(&body));
    })
}

const DECISIONS: &str = "# TYPE tollgate_decisions_total counter\n\
    tollgate_decisions_total{rule=\"api\",algorithm=\"token-bucket\",outcome=\"allowed\",source=\"redis\"} 41\n\
    tollgate_breakers_open 1\nprocess_cpu_seconds_total 5\n";

#[test]
fn a_service_is_read_where_it_exports_its_metrics() {
    let server = Server::start();
    let chunked = endpoint(|stream| {
        let (one, two) = DECISIONS.split_at(60);
        let chunk = |text: &str| format!("{:x}\r\n{text}\r\n", text.len());
        let head = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
        let _ = stream.write_all(format!("{head}{}{}0\r\n\r\n", chunk(one), chunk(two)).as_bytes());
    });
    let url = server.url();
    let both = [
        "watch",
        "--once",
        "--deadline",
        "10s",
        "--url",
        &url,
        "--metrics",
        &chunked,
        "--metrics",
        &of_body(DECISIONS),
    ];
    let output = tollgate(&both);
    let service = &lines(&output)[0]["service"];
    assert_eq!((code(&output), stderr(&output).as_str()), (0, ""), "{service}");
    let decisions = &service["decisions"][0];
    assert_eq!((&decisions["total"], &decisions["source"]), (&82.0.into(), &"redis".into()), "{service}");
    assert_eq!((&decisions["per_second"], &service["breakers_open"]), (&0.0.into(), &2.0.into()), "{service}");
    let none = tollgate(&["watch", "--once", "--deadline", "10s", "--url", &url]);
    assert_eq!(lines(&none)[0]["service"], Value::Null);
}

#[test]
fn nonsense_from_an_endpoint_is_one_line_and_the_rest_is_shown() {
    let server = Server::start();
    let nobody = format!("http://127.0.0.1:{}/metrics", free_port());
    let megabyte = "tollgate nonsense ".repeat(1 << 16);
    let endless = endpoint(|stream| {
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n");
        while stream.write_all(&[b'\n'; 1 << 16]).is_ok() {}
    });
    let answer = |text: &'static str| endpoint(move |stream| drop(stream.write_all(text.as_bytes())));
    for (endpoint, expected) in [
        (of_body("<!DOCTYPE html>\n<p>hello"), "expected Prometheus's text format, got \"<!DOCTYPE html>\" in line 1"),
        (of_body(megabyte), "got \"tollgate nonsense tollgate nonsense toll\" in line 1"),
        (of_body([0xff, 0xfe, b'\n']), "the response isn't UTF-8"),
        (endless, "the response is larger than 8 MiB"),
        (
            answer("HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"),
            "expected the status 200 OK, got 404 Not Found",
        ),
        (answer("+OK\r\n"), "no HTTP response"),
        (answer(""), "no HTTP response"),
        (answer("HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nup 1\n"), "the response broke off"),
        (nobody, "no connection: "),
    ] {
        let output =
            tollgate(&["watch", "--once", "--deadline", "10s", "--url", &server.url(), "--metrics", &endpoint]);
        let told = stderr(&output);
        assert_eq!((code(&output), told.lines().count()), (2, 1), "{expected}: {told}");
        assert!(told.starts_with(&format!("error: {endpoint}: ")) && told.contains(expected), "{expected}: {told}");
        assert_eq!(lines(&output)[0]["nodes"][0]["error"], Value::Null, "what is known is shown");
    }
}

#[test]
fn an_endpoint_that_never_answers_does_not_keep_the_rest_waiting_for_ever() {
    let server = Server::start();
    let silent = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let url = format!("http://{}", silent.local_addr().expect("its address"));
    let output = tollgate(&["watch", "--once", "--deadline", "10s", "--url", &server.url(), "--metrics", &url]);
    assert_eq!(code(&output), 2);
    assert_eq!(stderr(&output), format!("error: {url}/metrics: no answer within 2s\n"));
}

#[test]
fn a_redis_that_goes_away_is_said_to_be_and_watched_again_once_it_is_back() {
    let mut server = Server::start();
    let mut watch = Running::start(&["--url", &server.tcp_url()]);
    assert_eq!(watch.next()["nodes"][0]["error"], Value::Null);
    server.stop();
    let away = watch.until("it is unreachable", |snapshot| !snapshot["nodes"][0]["error"].is_null());
    assert_eq!((&away["scripts"]["calls_per_second"], &away["keys"]), (&Value::Null, &Value::Array(vec![])), "{away}");
    server.start_again(&[]);
    let back = watch.until("it is back", |snapshot| snapshot["nodes"][0]["error"].is_null());
    assert!(back["nodes"][0]["used_memory"].as_u64().is_some_and(|bytes| bytes > 0), "{back}");
}

#[test]
fn a_redis_that_is_not_there_at_first_or_is_frozen_is_one_line() {
    let frozen = Server::start();
    frozen.signal("-STOP");
    let nobody = format!("redis://127.0.0.1:{}", free_port());
    for (url, expected) in [(nobody.as_str(), "refused"), (&frozen.tcp_url(), "no answer within 500ms")] {
        for how in [&["--once"][..], &["--format", "jsonl"], &["--format", "table"]] {
            let output = tollgate(&[&["watch", "--url", url], how].concat());
            let told = stderr(&output);
            assert_eq!((code(&output), told.lines().count(), stdout(&output).as_str()), (2, 1, ""), "{told}");
            assert!(
                told.starts_with("error: no connection to redis at 127.0.0.1:") && told.contains(expected),
                "{told}"
            );
        }
    }
    frozen.signal("-CONT");
}

#[test]
fn a_reader_that_is_gone_ends_it_without_an_error() {
    let server = Server::start();
    for format in ["jsonl", "table"] {
        let arguments = ["watch", "--format", format, "--interval", "100ms", "--url", &server.url()];
        let mut process =
            command(&arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the tool runs");
        let mut some = [0; 16];
        process.stdout.take().expect("piped").read_exact(&mut some).expect("something");
        let output = process.wait_with_output().expect("it ends");
        assert_eq!((code(&output), stderr(&output).as_str()), (0, ""), "{format}");
    }
}

#[test]
fn misuse_is_one_line_and_exits_with_two() {
    let nobody = format!("redis://127.0.0.1:{}", free_port());
    let with = |option: &'static str, value: &'static str| vec!["--url", &nobody, option, value];
    for (arguments, expected) in [
        (vec![], "--url is missing: give the Redis to watch"),
        (with("--prefix", "{"), "prefix: expected some text without braces, got \"{\""),
        (with("--interval", "1ms"), "'1ms' for '--interval <D>': expected from 100ms to 1h"),
        (with("--interval", "2h"), "expected from 100ms to 1h"),
        (with("--interval", "x"), "expected a duration such as 200ms, 1m30s or 7d"),
        (with("--metrics", "localhost:9000"), "for '--metrics <URL>': expected http://HOST[:PORT][/PATH]"),
        (with("--metrics", "https://h/metrics"), "TLS isn't supported here"),
        (with("--metrics", "http://u:s3cret@h/metrics"), "expected http://HOST[:PORT][/PATH]"),
        (with("--format", "xml"), "xml"),
    ] {
        let output = tollgate(&[&["watch"], arguments.as_slice()].concat());
        let told = stderr(&output);
        assert_eq!((code(&output), told.lines().count()), (2, 1), "{arguments:?}: {told}");
        assert!(told.contains(expected) && !told.contains("s3cret"), "{arguments:?}: {told}");
    }
}
