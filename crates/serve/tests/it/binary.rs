//! The process: its options, signals and end.

use std::path::Path;
use std::process::Stdio;
use std::time::Instant;

use serde_json::json;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::process::{Child, Command};
use tollgate_serve::listen::Bounds;
use tollgate_testing::polling::{in_time, wait_until};
use tollgate_testing::redis_server::Server;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use crate::client::{post, send};

pub(crate) struct Process {
    child: Child,
    /// The address of each port, by its name.
    ports: Vec<(String, String)>,
}

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tollgate-serve"));
    command.args(arguments).env_clear().env("NO_COLOR", "1").kill_on_drop(true);
    command
}

impl Process {
    pub(crate) async fn start(arguments: &[&str], ports: usize) -> Self {
        Self::of(command(arguments).stderr(Stdio::null()), ports).await
    }

    /// One of which the log is kept.
    #[cfg(feature = "otlp")]
    pub(crate) async fn logging(arguments: &[&str], ports: usize) -> Self {
        Self::of(command(arguments).stderr(Stdio::piped()), ports).await
    }

    #[cfg(feature = "otlp")]
    pub(crate) fn log(&mut self) -> tokio::process::ChildStderr {
        self.child.stderr.take().expect("its log")
    }

    async fn of(command: &mut Command, ports: usize) -> Self {
        let mut child = command.stdout(Stdio::piped()).spawn().expect("a process");
        let mut lines = BufReader::new(child.stdout.take().expect("its output")).lines();
        let mut opened = Vec::new();
        while opened.len() < ports {
            let line = in_time(lines.next_line()).await.expect("a line").expect("it listens");
            let (name, address) = line.split_once(' ').expect("a name and an address");
            opened.push((name.to_owned(), address.to_owned()));
        }
        Self { child, ports: opened }
    }

    pub(crate) fn port(&self, name: &str) -> &str {
        &self.ports.iter().find(|(own, _)| own == name).expect("an open port").1
    }

    fn signal(&self, name: &str) {
        let id = self.child.id().expect("it runs").to_string();
        let sent = std::process::Command::new("kill").args([&format!("-{name}"), &id]).status();
        assert!(sent.expect("kill").success());
    }

    pub(crate) async fn end(mut self) {
        self.signal("TERM");
        assert!(in_time(self.child.wait()).await.expect("an end").success());
    }
}

fn write(path: &Path, limit: u64) {
    let text = format!("[[rule]]\nname = \"users\"\nkey = \"user\"\nlimits = [\"fixed-window {limit}/30d\"]\n");
    std::fs::write(path, text).expect("a file");
}

pub(crate) const FREE: [&str; 6] = ["--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0", "--metrics", "127.0.0.1:0"];

#[tokio::test]
async fn it_serves_follows_its_file_and_ends_with_what_has_begun_answered() {
    let (server, directory) = (Server::start(), tempfile::tempdir().expect("a directory"));
    let file = directory.path().join("rules.toml");
    write(&file, 5);
    let url = server.url();
    let arguments = [&[file.to_str().expect("text"), "--url", &url, "--deadline", "100s"], FREE.as_slice()].concat();
    let process = Process::start(&arguments, 3).await;
    let decide = async |cost: u64| {
        let answer =
            post(process.port("http"), "/v1/decide", &json!({ "attributes": { "user": 1 }, "cost": cost })).await;
        (answer.status, answer.json()["limit"].as_u64())
    };
    assert_eq!(decide(5).await, (200, Some(5)));
    assert_eq!(decide(1).await, (429, Some(5)));
    write(&file, 6);
    wait_until("the change is in force", async || decide(0).await.1 == Some(6)).await;
    assert_eq!(decide(1).await, (200, Some(6)));
    std::fs::write(&file, "[[rule]]\nname = 1").expect("a file");
    process.signal("HUP");
    let metrics = async || send(process.port("metrics"), "GET", "/metrics", &[], "").await.body;
    wait_until("the failure is counted", async || {
        metrics().await.contains("tollgate_rules_reloads_total{outcome=\"refused\"} 1")
    })
    .await;
    assert_eq!(decide(1).await, (429, Some(6)), "the rules before stay");
    assert_eq!(post(process.port("http"), "/v1/settle", &json!({ "attributes": {} })).await.status, 400);
    let text = metrics().await;
    for name in [
        "tollgate_serve_over_limit_total{rule=\"users\"} ",
        "tollgate_serve_near_limit_total{rule=\"users\"} ",
        "tollgate_serve_unmatched_total 0",
        "tollgate_serve_unauthorized_total 0",
        "tollgate_serve_requests_total{protocol=\"json\",outcome=\"allowed\"}",
        "tollgate_serve_requests_total{protocol=\"json\",outcome=\"invalid\"} 1",
        "tollgate_decisions_total{rule=\"users\"",
        "tollgate_serve_build_info{version=\"",
        &format!("tollgate_serve_connections{{address=\"{}\"}} ", process.port("http")),
        "# HELP tollgate_serve_requests_total Requests, by protocol and outcome",
        "tollgate_batch_keys_bucket{le=\"1\"} ",
        "# HELP tollgate_decisions_total Decisions, by rule",
    ] {
        assert!(text.contains(name), "{name}: {text}");
    }
    assert_eq!(send(process.port("metrics"), "GET", "/readyz", &[], "").await.status, 200);
    process.end().await;
}

#[tokio::test]
async fn misuse_is_one_line_that_names_it() {
    let directory = tempfile::tempdir().expect("a directory");
    let (good, bad) = (directory.path().join("good.toml"), directory.path().join("bad.toml"));
    let tokens = directory.path().join("tokens");
    write(&good, 5);
    std::fs::write(&bad, "[[rule]]\nname = \"a b\"").expect("a file");
    std::fs::write(&tokens, "\n\n").expect("a file");
    let [good, bad, tokens] = [&good, &bad, &tokens].map(|path| path.to_str().expect("text"));
    for (arguments, expected) in [
        (vec![], "RULES"),
        (vec!["missing.toml"], "missing.toml"),
        (vec![bad], "name"),
        (vec![good, "--url", "http://localhost"], "--url"),
        (vec![bad, "--check"], "name"),
        (vec!["--database", "postgres://localhost/a", "--check"], "cannot be used with"),
        (vec![good, "--deadline", "0ms"], "expected a duration above 0, such as 15ms or 1s"),
        (vec![good, "--deadline", "soon"], "expected a duration above 0, such as 15ms or 1s"),
        (vec![good, "--drain", "soon"], "expected a duration such as 5s, or 0s"),
        (
            vec![good, "--http", "localhost"],
            "expected an address such as 127.0.0.1:8080, or unix:PATH, got \"localhost\" (or off)",
        ),
        (vec![good, "--grpc", "off", "--http", "192.0.2.1:80"], "--http 192.0.2.1:80"),
        (vec![good, "--grpc", "off", "--http", "off", "--metrics", "off"], "all are off, so there is nothing to serve"),
        (vec![good, "--headers", "X"], "draft, x-ratelimit, ratelimit, off"),
        (vec![good, "--tokens", tokens], "expected a token on each line, got none"),
        (vec![good, "--tokens", bad], "without blanks, got several words"),
        (vec![good, "--tokens", "nowhere"], "--tokens nowhere"),
        (vec![good, "--cert", "nowhere", "--key", "nowhere"], "--cert, --key"),
        (vec!["--database", "http://localhost"], "--database"),
    ] {
        let output = in_time(command(&arguments).output()).await.expect("a process");
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {told}");
        assert!(told.contains(expected), "{arguments:?}: {told}");
    }
    let checked = in_time(command(&[good, "--check"]).output()).await.expect("a process");
    assert!(checked.status.success());
    assert!(String::from_utf8_lossy(&checked.stdout).ends_with("good.toml: valid (rules: 1)\n"));
    let mut help = command(&["--help"]).stdout(Stdio::piped()).spawn().expect("a process");
    let mut text = String::new();
    in_time(help.stdout.take().expect("its output").read_to_string(&mut text)).await.expect("text");
    for default in ["127.0.0.1:8081", "127.0.0.1:8080", "127.0.0.1:9090", "15ms"] {
        assert!(text.contains(default), "{default}: {text}");
    }
}

#[tokio::test]
async fn a_permit_of_a_process_that_was_killed_comes_back_at_its_ttl() {
    let (server, directory) = (Server::start(), tempfile::tempdir().expect("a directory"));
    let file = directory.path().join("rules.toml");
    std::fs::write(&file, "[[rule]]\nname = \"jobs\"\nkey = \"job\"\nlimits = [\"concurrency 1 ttl 500ms\"]")
        .expect("a file");
    let url = server.url();
    let arguments = [&[file.to_str().expect("text"), "--url", &url, "--deadline", "100s"], FREE.as_slice()].concat();
    let (mut first, second) = (Process::start(&arguments, 3).await, Process::start(&arguments, 3).await);
    let take = async |process: &Process, id: &str| {
        post(process.port("http"), "/v1/decide", &json!({ "attributes": { "job": "a" }, "id": id })).await.status
    };
    assert_eq!(take(&first, "first").await, 200);
    first.child.kill().await.expect("an end");
    wait_until("the ttl is over", async || take(&second, "second").await == 200).await;
    second.end().await;
}

#[tokio::test]
async fn who_watches_its_health_learns_of_its_end_and_does_not_delay_it() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("rules.toml");
    write(&file, 5);
    let process = Process::start(&[&[file.to_str().expect("text")], FREE.as_slice()].concat(), 3).await;
    let endpoint = tonic::transport::Endpoint::from_shared(format!("http://{}", process.port("grpc")));
    let channel = endpoint.expect("an address").connect().await.expect("a connection");
    let watch = HealthClient::new(channel).watch(HealthCheckRequest::default()).await;
    let mut statuses = watch.expect("a watch").into_inner();
    let first = in_time(statuses.message()).await.expect("a status").expect("one");
    assert_eq!(first.status(), ServingStatus::Serving);
    let began = Instant::now();
    process.signal("TERM");
    let last = in_time(statuses.message()).await.expect("no error").expect("a status");
    assert_eq!(last.status(), ServingStatus::NotServing);
    assert!(in_time(statuses.message()).await.expect("no error").is_none(), "the watch is over");
    process.end().await;
    assert!(began.elapsed() < Bounds::default().ending, "it waited for the watch");
}

#[tokio::test]
async fn one_that_drains_serves_on_while_health_checks_say_that_it_ends() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("rules.toml");
    write(&file, 5);
    let arguments = [&[file.to_str().expect("text"), "--drain", "1h"], FREE.as_slice()].concat();
    let process = Process::start(&arguments, 3).await;
    let ready = async || send(process.port("metrics"), "GET", "/readyz", &[], "").await;
    assert_eq!(ready().await.status, 200);
    process.signal("TERM");
    wait_until("it isn't ready", async || ready().await.status == 503).await;
    assert_eq!(ready().await.json()["ending"], true);
    let endpoint = tonic::transport::Endpoint::from_shared(format!("http://{}", process.port("grpc")));
    let mut health = HealthClient::new(endpoint.expect("an address").connect().await.expect("a connection"));
    let status = health.check(HealthCheckRequest::default()).await.expect("a status").into_inner();
    assert_eq!(status.status(), ServingStatus::NotServing);
    drop(health);
    process.signal("HUP");
    assert_eq!(send(process.port("metrics"), "GET", "/healthz", &[], "").await.status, 200);
    let asked = json!({ "attributes": { "user": 1 } });
    assert_eq!(post(process.port("http"), "/v1/decide", &asked).await.status, 200, "a new connection");
    // A second signal ends the drain.
    process.end().await;
}
