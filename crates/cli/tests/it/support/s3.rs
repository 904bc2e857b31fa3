//! A server of S3, and the tool that archives on it.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use tollgate_testing::python::python;
use tollgate_testing::redis_server::free_port;

use crate::support::tool::command;

/// A server of S3 with one bucket, `logs`.
pub(crate) struct S3 {
    process: Child,
    pub(crate) port: u16,
}

impl S3 {
    pub(crate) fn start() -> Self {
        let port = free_port();
        let mut server = Command::new(python());
        server.args(["-m", "moto.server", "-H", "127.0.0.1", "-p", &port.to_string()]);
        let process = server.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("Python");
        let server = Self { process, port };
        let began = Instant::now();
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(began.elapsed() < Duration::from_secs(60), "moto doesn't answer");
            std::thread::sleep(Duration::from_millis(50));
        }
        assert_eq!(server.put("/logs", "", ""), 200);
        server
    }

    /// Puts something past the tool; answers the status.
    pub(crate) fn put(&self, path: &str, header: &str, body: &str) -> u16 {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).expect("connected");
        let length = body.len();
        // Any key is accepted, whatever the signature.
        let key = "Credential=AKIATOLLGATE/20200301/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=none";
        let header = format!("Authorization: AWS4-HMAC-SHA256 {key}\r\n{header}");
        let request = format!(
            "PUT {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n{header}Content-Length: {length}\r\n\r\n{body}"
        );
        stream.write_all(request.as_bytes()).expect("sent");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer");
        answer.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status")
    }

    pub(crate) fn tool(&self, arguments: &[&str]) -> Command {
        let mut tool = command(&[&["archive"], arguments, &["--store", "s3://logs/of/tollgate"]].concat());
        for (name, value) in [
            ("AWS_ENDPOINT", format!("http://127.0.0.1:{}", self.port).as_str()),
            ("AWS_ALLOW_HTTP", "true"),
            ("AWS_REGION", "eu-west-1"),
            ("AWS_ACCESS_KEY_ID", "AKIATOLLGATE"),
            ("AWS_SECRET_ACCESS_KEY", "sesame"),
        ] {
            tool.env(name, value);
        }
        tool
    }

    pub(crate) fn run(&self, arguments: &[&str]) -> Output {
        self.tool(arguments).output().expect("the tool runs")
    }
}

impl Drop for S3 {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
