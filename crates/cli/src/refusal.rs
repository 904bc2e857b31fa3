//! What a server says when it refuses a connection, where redis-rs may only report that the connection was closed.

use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::net::TcpStream;
use tollgate::redis::{Client, ConnectionAddr, RedisError};

/// How long a server may take to say it; one that doesn't refuse the connection says nothing.
const PATIENCE: Duration = Duration::from_millis(300);

/// The error of a failed connection, or the server's refusal in its place.
pub(crate) async fn explained(client: &Client, error: &RedisError, told: impl Fn(&RedisError) -> String) -> String {
    let refused =
        if error.is_io_error() { tokio::time::timeout(PATIENCE, said(client)).await.ok().flatten() } else { None };
    refused.unwrap_or_else(|| told(error))
}

async fn said(client: &Client) -> Option<String> {
    match client.get_connection_info().addr() {
        ConnectionAddr::Tcp(host, port) => line(TcpStream::connect((host.as_str(), *port)).await.ok()?).await,
        #[cfg(unix)]
        ConnectionAddr::Unix(path) => line(tokio::net::UnixStream::connect(path).await.ok()?).await,
        _ => None,
    }
}

async fn line(mut from: impl AsyncRead + Unpin) -> Option<String> {
    let mut bytes = [0; 128];
    let count = from.read(&mut bytes).await.ok()?;
    let said = String::from_utf8_lossy(&bytes[..count]);
    let said = said.strip_prefix('-')?.trim_end();
    said.starts_with("ERR max number of clients").then(|| said.to_owned())
}
