//! The example services, started as a reader would, and called.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use tollgate_testing::repository::root;

/// The program of this example.
pub(crate) fn program(name: &str) -> &'static str {
    match name {
        "actix" => env!("CARGO_BIN_EXE_actix"),
        "client" => env!("CARGO_BIN_EXE_client"),
        "completions" => env!("CARGO_BIN_EXE_completions"),
        "grpc" => env!("CARGO_BIN_EXE_grpc"),
        "service" => env!("CARGO_BIN_EXE_service"),
        "worker" => env!("CARGO_BIN_EXE_worker"),
        other => panic!("{other}: no such example"),
    }
}

/// A service that runs until the test ends.
pub(crate) struct Running {
    pub(crate) child: Child,
    pub(crate) address: String,
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) fn command(name: &str, url: Option<&str>) -> Command {
    let mut command = Command::new(program(name));
    command.current_dir(root()).env("LISTEN", "127.0.0.1:0").env_remove("TOLLGATE_URL");
    if let Some(url) = url {
        command.env("TOLLGATE_URL", url);
    }
    command
}

pub(crate) fn start(name: &str, url: Option<&str>, variables: &[(&str, &str)]) -> Running {
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
pub(crate) fn call(address: &str, request: &str, headers: &str) -> (u16, String) {
    send(address, request, headers, "")
}

/// The same, of a request with a body.
pub(crate) fn send(address: &str, request: &str, headers: &str, body: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).expect("connected");
    stream.set_read_timeout(Some(Duration::from_secs(10))).expect("a timeout");
    let length = body.len();
    let headers = format!("Host: test\r\nConnection: close\r\nContent-Length: {length}\r\n{headers}");
    write!(stream, "{request} HTTP/1.1\r\n{headers}\r\n{body}").expect("sent");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("an answer");
    (text.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or_else(|| panic!("{text:?}")), text)
}
