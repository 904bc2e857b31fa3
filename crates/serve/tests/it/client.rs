//! A client of HTTP/1.1 that says what it likes.

use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tollgate_testing::polling::in_time;

/// A response: its status, header fields in lower case, and body.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: String,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    pub(crate) fn field(&self, name: &str) -> Option<&str> {
        let mut lines = self.head.lines().filter_map(|line| line.split_once(": "));
        lines.find(|(own, _)| *own == name).map(|(_, value)| value)
    }
}

pub(crate) struct Connection(TcpStream);

impl Connection {
    pub(crate) async fn open(address: &str) -> Self {
        Self(in_time(TcpStream::connect(address)).await.expect("a connection"))
    }

    pub(crate) async fn write(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        in_time(self.0.write_all(bytes)).await
    }

    /// The next response; none if the connection was closed.
    pub(crate) async fn answer(&mut self) -> Option<Answer> {
        let mut read = Vec::new();
        let head = loop {
            if let Some(at) = read.windows(4).position(|window| window == b"\r\n\r\n") {
                break at;
            }
            let mut part = [0; 4096];
            match in_time(self.0.read(&mut part)).await {
                Ok(0) | Err(_) => return None,
                Ok(count) => read.extend_from_slice(&part[..count]),
            }
        };
        let text = String::from_utf8(read[..head].to_vec()).expect("a head of text");
        let status = text.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
        let mut answer = Answer { status, head: text, body: String::new() };
        let length = answer.field("content-length").map_or(0, |length| length.parse().expect("a length"));
        while read.len() < head + 4 + length {
            let mut part = [0; 4096];
            let count = in_time(self.0.read(&mut part)).await.expect("a body");
            assert!(count > 0, "the body ends early: {answer:?}");
            read.extend_from_slice(&part[..count]);
        }
        answer.body = String::from_utf8_lossy(&read[head + 4..]).into_owned();
        Some(answer)
    }

    pub(crate) async fn send(&mut self, method: &str, path: &str, fields: &[(&str, &str)], body: &str) -> Answer {
        let fields: String = fields.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
        let length = body.len();
        let request = format!("{method} {path} HTTP/1.1\r\nhost: a\r\ncontent-length: {length}\r\n{fields}\r\n{body}");
        self.write(request.as_bytes()).await.expect("a request");
        self.answer().await.expect("an answer")
    }
}

/// One request on a connection of its own.
pub(crate) async fn send(address: &str, method: &str, path: &str, fields: &[(&str, &str)], body: &str) -> Answer {
    Connection::open(address).await.send(method, path, fields, body).await
}

pub(crate) async fn post(address: &str, path: &str, body: &Value) -> Answer {
    send(address, "POST", path, &[], &body.to_string()).await
}
