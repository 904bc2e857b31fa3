//! The example services, built and started as a reader would, and called.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use crate::support::repository::root;

/// Where they are built, once for all tests.
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
    let mut command = Command::new(built().join(name));
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
