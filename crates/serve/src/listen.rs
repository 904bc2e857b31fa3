//! Ports that outlast careless clients: a number of connections, a time for each of their parts, a size of each, and an
//! end that lets what has begun be answered.

use std::convert::Infallible;
use std::fmt;
use std::future::Future;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};
use std::pin::{Pin, pin};
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use futures_util::FutureExt;
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::Semaphore;
use tokio::time::Sleep;
use tower::Service;

use crate::failure::{Unanswered, is_grpc, unanswered};
use crate::metrics;
use crate::stream::Stream;
#[cfg(feature = "tls")]
use crate::tls::Certificate;
use crate::unread::Unread;

/// Where a port is: `127.0.0.1:8080`, or a socket in the file system, `unix:/run/tollgate.sock`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Address {
    /// A host and a port.
    Tcp(String),
    /// A socket's path. One that is left there from before is replaced.
    Unix(PathBuf),
}

/// What clients may take of a port.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Bounds {
    /// Connections at once: more wait to be accepted.
    pub connections: usize,
    /// How long a client may take for the head of a request, which begins with its connection or the end of the request
    /// before; also for a TLS handshake.
    pub head: Duration,
    /// How long a request may take, its body and its answer included.
    pub request: Duration,
    /// Requests at once on a connection of HTTP/2.
    pub streams: u32,
    /// Bytes of a request's head.
    pub head_bytes: u32,
    /// How long requests may go on once the service is to end.
    pub ending: Duration,
}

impl Default for Bounds {
    /// 10,000 connections, 10 s for a head, 10 s for a request, 250 streams, 16 KiB, and 10 s for the end.
    fn default() -> Self {
        let seconds = Duration::from_secs(10);
        Self {
            connections: 10_000,
            head: seconds,
            request: seconds,
            streams: 250,
            head_bytes: 16 << 10,
            ending: seconds,
        }
    }
}

/// A port that is open.
#[derive(Debug)]
pub struct Port {
    listener: Listener,
    #[cfg(feature = "tls")]
    certificate: Option<Certificate>,
}

#[derive(Debug)]
enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener, Socket),
}

/// A socket's file, which goes with its port.
#[derive(Debug)]
struct Socket {
    path: PathBuf,
    /// Device and number: another service may have put its own in this one's place.
    made: Option<(u64, u64)>,
}

impl Socket {
    fn of(path: &Path) -> Self {
        Self { path: path.to_owned(), made: file_at(path) }
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        if file_at(&self.path) == self.made {
            let _gone = std::fs::remove_file(&self.path);
        }
    }
}

/// Which file is at this path.
fn file_at(path: &Path) -> Option<(u64, u64)> {
    let file = std::fs::symlink_metadata(path).ok()?;
    Some((file.dev(), file.ino()))
}

impl Port {
    /// Opens a port.
    ///
    /// # Errors
    ///
    /// An address that is in use, or isn't this machine's.
    pub async fn open(address: &Address) -> io::Result<Self> {
        let listener = match address {
            Address::Tcp(address) => Listener::Tcp(TcpListener::bind(address).await?),
            Address::Unix(path) => {
                remove_unused(path).await?;
                Listener::Unix(UnixListener::bind(path)?, Socket::of(path))
            }
        };
        Ok(Self {
            listener,
            #[cfg(feature = "tls")]
            certificate: None,
        })
    }

    /// The port as others reach it: with the number that the system has chosen, if the address had 0.
    #[must_use]
    pub fn address(&self) -> String {
        match &self.listener {
            Listener::Tcp(listener) => {
                listener.local_addr().map_or_else(|_| "?".to_owned(), |address| address.to_string())
            }
            Listener::Unix(_, socket) => format!("unix:{}", socket.path.display()),
        }
    }

    /// The same by TLS with this certificate.
    #[cfg(feature = "tls")]
    #[must_use]
    pub fn with_certificate(mut self, certificate: Certificate) -> Self {
        self.certificate = Some(certificate);
        self
    }

    /// Serves these routes by HTTP/1.1 and HTTP/2 until `ended`, and then what has begun.
    pub async fn serve(self, routes: Router, bounds: Bounds, ended: impl Future<Output = ()>) {
        let (server, connections) = (Arc::new(server(bounds)), Arc::new(Semaphore::new(bounds.connections)));
        let graceful = GracefulShutdown::new();
        // Gone once nothing new is accepted.
        #[cfg(feature = "tls")]
        let (serving, ending) = tokio::sync::watch::channel(());
        let address = self.address();
        let mut ended = pin!(ended);
        loop {
            let next = async {
                let place = Arc::clone(&connections).acquire_owned().await;
                (place, self.accept().await)
            };
            let (place, stream) = tokio::select! {
                () = &mut ended => break,
                accepted = next => accepted,
            };
            let stream = match stream {
                Ok(stream) => stream,
                Err(error) => {
                    // Of a client that has gone, or a process out of file descriptors, which others may soon close.
                    tracing::warn!(%error, "a connection couldn't be accepted");
                    tokio::time::sleep(Duration::from_millis(250)).await;
                    continue;
                }
            };
            let (server, watcher, routes) = (Arc::clone(&server), graceful.watcher(), routes.clone());
            #[cfg(feature = "tls")]
            let (certificate, mut ending) = (self.certificate.clone(), ending.clone());
            let open = metrics::Connection::opened(&address);
            tokio::spawn(async move {
                let (_place, _open) = (place, open);
                #[cfg(feature = "tls")]
                let stream = match certificate {
                    None => stream,
                    Some(certificate) => tokio::select! {
                        shaken = tokio::time::timeout(bounds.head, certificate.accept(stream)) => match shaken {
                            Ok(Ok(stream)) => stream,
                            _ => return,
                        },
                        _ended = ending.changed() => return,
                    },
                };
                let unread = Arc::new(Unread::default());
                let answers = Arc::clone(&unread);
                // Not as a layer of the routes, which would box each request's future once more.
                let service = tower::service_fn(move |request: http::Request<Incoming>| {
                    let (mut routes, answers) = (routes.clone(), Arc::clone(&answers));
                    async move {
                        let is_grpc = is_grpc(request.headers());
                        let answer = AssertUnwindSafe(routes.call(request.map(Body::new))).catch_unwind();
                        let answer = match tokio::time::timeout(bounds.request, answer).await {
                            Ok(Ok(Ok(answer))) => answer,
                            // It would take the connection's other requests with it. The panic itself is on stderr.
                            Ok(Err(_)) => unanswered(is_grpc, Unanswered::Panicked),
                            Err(_) => unanswered(is_grpc, Unanswered::Late),
                        };
                        Ok::<_, Infallible>(answers.count(answer))
                    }
                });
                let service = TowerToHyperService::new(service);
                let (stream, begun) = Watched::of(stream, bounds.request);
                let connection = server.serve_connection(TokioIo::new(stream), service).into_owned();
                let mut connection = pin!(watcher.watch(connection));
                let mut head = pin!(tokio::time::sleep(bounds.head));
                let (mut turns, mut has_begun) = (tokio::time::interval(bounds.request), false);
                loop {
                    tokio::select! {
                        // A client that breaks off has nobody to tell.
                        _ended = &mut connection => return,
                        () = &mut head, if !has_begun => {
                            has_begun = begun.load(Ordering::Relaxed) >= PREFACE;
                            if !has_begun {
                                return;
                            }
                        }
                        _ = turns.tick() => {
                            if unread.is_stuck_after_turn() {
                                return;
                            }
                        }
                    }
                }
            });
        }
        // Nothing new is accepted.
        drop(self);
        #[cfg(feature = "tls")]
        drop(serving);
        let _in_time = tokio::time::timeout(bounds.ending, graceful.shutdown()).await;
    }

    async fn accept(&self) -> io::Result<Stream> {
        match &self.listener {
            Listener::Tcp(listener) => {
                let (stream, _) = listener.accept().await?;
                stream.set_nodelay(true)?;
                Ok(Box::pin(stream))
            }
            Listener::Unix(listener, _) => Ok(Box::pin(listener.accept().await?.0)),
        }
    }
}

/// The bytes by which a connection says that it speaks HTTP/2. Until so many have come, hyper doesn't know which
/// protocol's time for a head applies, and waits for ever.
const PREFACE: usize = 24;

/// A connection that counts what was read from it, and ends if its client reads nothing of what is written for too long:
/// otherwise clients that never read would take all places.
struct Watched {
    stream: Stream,
    read: Arc<AtomicUsize>,
    /// How long a write may wait, and for how long it does.
    patience: Duration,
    waiting: Option<Pin<Box<Sleep>>>,
}

impl Watched {
    fn of(stream: Stream, patience: Duration) -> (Self, Arc<AtomicUsize>) {
        let read = Arc::new(AtomicUsize::new(0));
        (Self { stream, read: Arc::clone(&read), patience, waiting: None }, read)
    }

    /// What a write has come to; an error if it has waited for too long.
    fn written<T>(&mut self, polled: Poll<io::Result<T>>, context: &mut Context<'_>) -> Poll<io::Result<T>> {
        if polled.is_ready() {
            self.waiting = None;
            return polled;
        }
        let patience = self.patience;
        let waiting = self.waiting.get_or_insert_with(|| Box::pin(tokio::time::sleep(patience)));
        match waiting.as_mut().poll(context) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl AsyncRead for Watched {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buffer.filled().len();
        let polled = this.stream.as_mut().poll_read(context, buffer);
        this.read.fetch_add(buffer.filled().len() - before, Ordering::Relaxed);
        polled
    }
}

impl AsyncWrite for Watched {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let polled = this.stream.as_mut().poll_write(context, bytes);
        this.written(polled, context)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let polled = this.stream.as_mut().poll_flush(context);
        this.written(polled, context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let polled = this.stream.as_mut().poll_shutdown(context);
        this.written(polled, context)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let polled = this.stream.as_mut().poll_write_vectored(context, parts);
        this.written(polled, context)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

fn server(bounds: Bounds) -> auto::Builder<TokioExecutor> {
    let mut server = auto::Builder::new(TokioExecutor::new());
    let head_bytes = bounds.head_bytes as usize;
    server.http1().timer(TokioTimer::new()).header_read_timeout(bounds.head).max_buf_size(head_bytes.max(8 << 10));
    server
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(bounds.streams)
        .max_header_list_size(bounds.head_bytes)
        // A whole request fits, and no more of all that are only half there.
        .initial_connection_window_size(256 << 10)
        .initial_stream_window_size(256 << 10)
        .max_pending_accept_reset_streams(Some(32))
        // A client that is gone without a word is noticed.
        .keep_alive_interval(Some(bounds.head))
        .keep_alive_timeout(bounds.head);
    server
}

/// Removes a socket on which nobody listens any more.
async fn remove_unused(path: &Path) -> io::Result<()> {
    if !path.exists() {
        return Ok(());
    }
    // One whose queue is full lives too.
    let answer = tokio::net::UnixStream::connect(path).await;
    if !answer.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused) {
        return Err(io::Error::new(io::ErrorKind::AddrInUse, "another process listens on this socket"));
    }
    let is_socket = std::os::unix::fs::FileTypeExt::is_socket(&std::fs::symlink_metadata(path)?.file_type());
    if !is_socket {
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, "a file that is no socket has this name"));
    }
    std::fs::remove_file(path)
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => f.write_str(address),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// Text that isn't an [`Address`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AddressError(String);

impl fmt::Display for AddressError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for AddressError {}

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        match text.strip_prefix("unix:") {
            Some("") => Err(AddressError("expected a path after unix:".into())),
            Some(path) => Ok(Self::Unix(path.into())),
            None if text
                .rsplit_once(':')
                .is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok()) =>
            {
                Ok(Self::Tcp(text.to_owned()))
            }
            None => {
                let expected = "expected an address such as 127.0.0.1:8080, or unix:PATH";
                Err(AddressError(format!("{expected}, got {text:?}")))
            }
        }
    }
}
