//! The bytes between here and a server: over what a [`Connect`](super::connect::Connect) opens, TLS, or a Unix socket.
//!
//! It counts the bytes written. When a call fails because its connection is lost, the count shows whether the server
//! can have read any of it.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, ConnectionAddr, RedisError, Value};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::task::AbortHandle;
use tokio::time::{Sleep, sleep};

use super::address::Endpoint;
use super::connect::Stream;
use super::credentials::Login;
use crate::lock::Lock;

/// How much of a first line is kept.
const LONGEST_LINE: usize = 128;

/// How long a first line is waited for once nothing can be written.
const LAST_LINE: Duration = Duration::from_millis(100);

/// A connection, and what is known about its bytes.
pub(super) struct Opened {
    pub(super) connection: MultiplexedConnection,
    pub(super) wire: Arc<Wire>,
    pub(super) login: Login,
}

/// What is known about a connection's bytes. Dropping it closes the connection.
#[derive(Debug)]
pub(super) struct Wire {
    traffic: Arc<Lock<Traffic>>,
    driver: AbortHandle,
}

#[derive(Debug, Default)]
struct Traffic {
    written: u64,
    /// What was read first, up to the end of its line.
    said: Vec<u8>,
    /// Whether no more is written.
    closed: bool,
}

/// A stream that counts the bytes written.
struct Counted {
    stream: Box<dyn Stream>,
    /// Whether the first line has been read.
    heard: bool,
    /// Why nothing can be written, until the first line is read.
    failed: Option<(io::Error, Pin<Box<Sleep>>)>,
    traffic: Arc<Lock<Traffic>>,
}

/// Connects and authenticates, taking as long as both need.
pub(super) async fn open(endpoint: &Endpoint) -> Result<Opened, RedisError> {
    let traffic = Arc::default();
    let stream = connect(endpoint, &traffic).await?;
    // Each decision's deadline bounds how long a connection may take.
    let patient = AsyncConnectionConfig::new().set_connection_timeout(None).set_response_timeout(None);
    let (settings, login) = endpoint.credentials.applied_to(endpoint.info().redis_settings()).await?;
    let opened = MultiplexedConnection::new_with_config(&settings, stream, patient).await;
    let (connection, driver) = opened.map_err(|error| refusal(&traffic).unwrap_or(error))?;
    let driver = tokio::spawn(driver).abort_handle();
    Ok(Opened { connection, wire: Arc::new(Wire { traffic, driver }), login })
}

/// What a server says before it is asked anything: it has too many clients, and closes the connection. redis-rs reports
/// only that the connection ended, unless the refusal comes late enough to be read as an answer.
fn refusal(traffic: &Lock<Traffic>) -> Option<RedisError> {
    let traffic = traffic.lock();
    let refuses = traffic.said.starts_with(b"-ERR max number of clients") && traffic.said.ends_with(b"\r\n");
    refuses.then(|| redis::parse_redis_value(&traffic.said).and_then(Value::extract_error).err()).flatten()
}

/// Counts what the system accepts: below TLS, which may have written a part of what it failed to write.
async fn connect(endpoint: &Endpoint, traffic: &Arc<Lock<Traffic>>) -> io::Result<Box<dyn Stream>> {
    let counted =
        |stream: Box<dyn Stream>| Counted { stream, heard: false, failed: None, traffic: Arc::clone(traffic) };
    match endpoint.info().addr() {
        ConnectionAddr::Tcp(host, port) => Ok(Box::new(counted(endpoint.connector.connect(host, *port).await?))),
        #[cfg(feature = "tls")]
        ConnectionAddr::TcpTls { host, port, .. } => {
            let name = rustls::pki_types::ServerName::try_from(host.clone()).map_err(io::Error::other)?;
            let connector = tokio_rustls::TlsConnector::from(endpoint.tls().client_config()?);
            let stream = counted(endpoint.connector.connect(host, *port).await?);
            Ok(Box::new(connector.connect(name, stream).await?))
        }
        #[cfg(unix)]
        ConnectionAddr::Unix(path) => Ok(Box::new(counted(Box::new(tokio::net::UnixStream::connect(path).await?)))),
        other => Err(io::Error::new(io::ErrorKind::Unsupported, format!("this program can't connect to {other}"))),
    }
}

impl Wire {
    /// Bytes written so far.
    pub(super) fn written(&self) -> u64 {
        self.traffic.lock().written
    }

    /// What the server said as it refused the connection, if it did.
    pub(super) fn refusal(&self) -> Option<RedisError> {
        refusal(&self.traffic)
    }

    pub(super) fn is_closed(&self) -> bool {
        self.traffic.lock().closed
    }

    /// From here on no more is written.
    pub(super) fn close(&self) {
        self.traffic.lock().closed = true;
        self.driver.abort();
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.close();
    }
}

impl Counted {
    fn read(&mut self, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut *self.stream).poll_read(cx, buffer))?;
        if !self.heard {
            let said = &mut self.traffic.lock().said;
            said.extend(&buffer.filled()[before..]);
            let end = said.iter().position(|byte| *byte == b'\n');
            said.truncate(end.map_or(LONGEST_LINE, |end| end + 1));
            self.heard = end.is_some() || said.len() == LONGEST_LINE;
        }
        Poll::Ready(Ok(()))
    }

    /// Writes unless closed, and counts. After an error nobody reads any more, but a server that refuses a connection
    /// says why before it closes it: so the first line is read before the error is returned, if it comes soon.
    fn write(
        &mut self,
        cx: &mut Context<'_>,
        write: impl FnOnce(Pin<&mut dyn Stream>, &mut Context<'_>) -> Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        if self.failed.is_none() {
            let mut traffic = self.traffic.lock();
            if traffic.closed {
                return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
            }
            match ready!(write(Pin::new(&mut *self.stream), cx)) {
                Ok(count) => {
                    traffic.written += count as u64;
                    return Poll::Ready(Ok(count));
                }
                Err(error) if self.heard => return Poll::Ready(Err(error)),
                Err(error) => self.failed = Some((error, Box::pin(sleep(LAST_LINE)))),
            }
        }
        let Some((error, mut patience)) = self.failed.take() else {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        };
        let mut said = [0; LONGEST_LINE];
        if self.read(cx, &mut ReadBuf::new(&mut said)).is_pending() && patience.as_mut().poll(cx).is_pending() {
            self.failed = Some((error, patience));
            return Poll::Pending;
        }
        Poll::Ready(Err(error))
    }
}

impl AsyncRead for Counted {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.read(cx, buffer)
    }
}

impl AsyncWrite for Counted {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.write(cx, |stream, cx| stream.poll_write(cx, bytes))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.write(cx, |stream, cx| stream.poll_write_vectored(cx, bytes))
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.stream).poll_shutdown(cx)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.traffic.lock().closed = true;
    }
}
