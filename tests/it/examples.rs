//! The examples, built and started as a reader would, and called.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crate::server::Server;
use crate::tidy::root;

/// Where they are built: once for all tests, beside what else is.
fn built() -> &'static PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let target = root().join("target/examples");
        let manifest = root().join("examples/services/Cargo.toml");
        let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
        let built = Command::new(cargo)
            .args(["build", "--quiet", "--locked", "--manifest-path"])
            .arg(manifest)
            .arg("--target-dir")
            .arg(&target)
            .status()
            .expect("cargo");
        assert!(built.success(), "the examples are built");
        target.join("debug")
    })
}

/// A service that runs until the test ends.
struct Running {
    child: Child,
    address: String,
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn command(name: &str, url: Option<&str>) -> Command {
    let mut command = Command::new(built().join(name));
    command.current_dir(root()).env("LISTEN", "127.0.0.1:0").env_remove("TOLLGATE_URL");
    if let Some(url) = url {
        command.env("TOLLGATE_URL", url);
    }
    command
}

fn start(name: &str, url: Option<&str>, variables: &[(&str, &str)]) -> Running {
    let mut child = command(name, url)
        .envs(variables.iter().copied())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect(name);
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().expect("its output")).read_line(&mut line).expect("a line");
    let address = line.trim().strip_prefix("listening on ").unwrap_or_else(|| panic!("{name}: {line:?}")).to_owned();
    Running { child, address }
}

/// Status and text of an answer.
fn call(address: &str, request: &str, headers: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).expect("connected");
    stream.set_read_timeout(Some(Duration::from_secs(10))).expect("a timeout");
    write!(stream, "{request} HTTP/1.1\r\nHost: test\r\nConnection: close\r\nContent-Length: 0\r\n{headers}\r\n")
        .expect("sent");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("an answer");
    (text.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or_else(|| panic!("{text:?}")), text)
}

#[test]
fn the_axum_service_follows_its_rules_on_both_engines() {
    let server = Server::start();
    for url in [None, Some(server.tcp_url())] {
        let service = start("service", url.as_deref(), &[]);
        let (status, text) = call(&service.address, "GET /api/v1/items", "X-User: 42\r\nX-Tier: free\r\n");
        assert!(status == 200 && text.contains("\r\nratelimit-policy: \"free"), "{text}");
        assert_eq!(call(&service.address, "GET /api/v1/items", "X-User: 666\r\nX-Tier: free\r\n").0, 403);
        let guesses: Vec<_> = (0..7).map(|_| call(&service.address, "POST /login", "X-User: eve\r\n").0).collect();
        assert_eq!(guesses, [200, 200, 200, 200, 200, 429, 429]);
        let (_, metrics) = call(&service.address, "GET /metrics", "");
        let series = "tollgate_verdicts_total{rule=\"login\",outcome=\"denied\",reason=\"limits\"} 2";
        assert!(metrics.contains(series), "{metrics}");
    }
}

#[test]
fn the_actix_service_answers_with_fields_of_both_kinds() {
    let server = Server::start();
    for url in [None, Some(server.tcp_url())] {
        let service = start("actix", url.as_deref(), &[]);
        let answers: Vec<_> = (0..7).map(|_| call(&service.address, "GET /", "")).collect();
        assert!(answers[..5].iter().all(|(status, _)| *status == 200) && answers[6].0 == 429, "{answers:?}");
        let denied = &answers[6].1;
        for field in ["retry-after: 1\r\n", "ratelimit-policy: \"hello\";q=60;w=60\r\n", "x-ratelimit-limit: 60\r\n"] {
            assert!(denied.contains(field), "{field}: {denied}");
        }
    }
    let away = start("actix", Some("redis://127.0.0.1:1"), &[]);
    assert_eq!(call(&away.address, "GET /", "").0, 503);
}

#[test]
fn two_workers_share_five_jobs_a_second() {
    let server = Server::start();
    let began = Instant::now();
    let workers: Vec<_> = (0..2)
        .map(|_| command("worker", Some(&server.tcp_url())).stdout(Stdio::piped()).spawn().expect("a worker"))
        .collect();
    for worker in workers {
        let output = worker.wait_with_output().expect("its end");
        assert_eq!(String::from_utf8_lossy(&output.stdout).lines().count(), 10, "{output:?}");
    }
    assert!(began.elapsed() >= Duration::from_millis(19 * 200), "{:?}", began.elapsed());
}

#[test]
fn the_tonic_service_answers_in_grpcs_terms() {
    let server = Server::start();
    for url in [None, Some(server.tcp_url())] {
        let service = start("grpc", url.as_deref(), &[]);
        let output =
            command("grpc", None).args(["call", &format!("http://{}", service.address)]).output().expect("a client");
        let text = String::from_utf8_lossy(&output.stdout);
        let lines: Vec<_> = text.lines().collect();
        assert_eq!((lines.len(), lines[..5].iter().all(|line| *line == "ok")), (10, true), "{output:?}");
        assert!(lines[9].starts_with("ResourceExhausted: Too many requests, retry after "), "{text}");
    }
}

/// It waits for its own turn, and for as long as the other side says.
#[test]
fn the_client_stays_under_a_third_partys_limit() {
    let rules = "[[rule]]\nname = \"strict\"\nkey = \"global\"\nlimits = [\"fixed-window 4/2s start first-hit\"]\n";
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), rules).expect("rules");
    let third_party = start("service", None, &[("RULES", file.path().to_str().expect("text"))]);
    let target = format!("http://{}/", third_party.address);
    let output = command("client", None).env("TARGET", target).output().expect("a client");
    let text = String::from_utf8_lossy(&output.stdout);
    let statuses: Vec<_> = text.lines().map(|line| line.rsplit(": ").next().unwrap_or_default()).collect();
    assert_eq!(statuses.len(), 10, "{output:?}");
    // It learns of each limit by an answer, and isn't denied twice for one.
    let refused = statuses.iter().filter(|status| status.starts_with("429")).count();
    assert!(refused <= 3 && statuses.iter().filter(|status| status.starts_with("200")).count() >= 7, "{text}");
}
