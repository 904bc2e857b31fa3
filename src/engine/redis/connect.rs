//! Opens byte streams to servers: over TCP, or however the caller does.

use std::future::poll_fn;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::task::Poll;

use futures_util::future::select_ok;
use redis::io::tcp::socket2::{SockRef, TcpKeepalive};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

/// After this long without traffic, the system checks whether the other side is still there.
const IDLE: Duration = Duration::from_secs(15);

/// Bytes to and from a server.
pub trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// A stream that is being opened.
pub type StreamFuture<'a> = Pin<Box<dyn Future<Output = io::Result<Box<dyn Stream>>> + Send + 'a>>;

/// Opens a stream of bytes to a server: through a proxy, a tunnel, or a network of a test's own. By default it is TCP.
///
/// It is called on the runtime that drives the connection, for each attempt to connect, of which there may be several
/// at once. TLS, the protocol and the user's login come on top of it. `unix://` addresses don't use it. Its errors are
/// shown in messages, and a panic is an error too.
///
/// ```no_run
/// use tollgate::Redis;
/// use tollgate::connect::{Connect, StreamFuture};
///
/// /// Every server, by way of a proxy that knows where it is.
/// struct Proxied;
///
/// impl Connect for Proxied {
///     fn connect<'a>(&'a self, host: &'a str, port: u16) -> StreamFuture<'a> {
///         Box::pin(async move {
///             let mut stream = tokio::net::TcpStream::connect("127.0.0.1:1080").await?;
///             stream.set_nodelay(true)?;
///             tokio::io::AsyncWriteExt::write_all(&mut stream, format!("{host}:{port}\n").as_bytes()).await?;
///             Ok(Box::new(stream) as _)
///         })
///     }
/// }
///
/// # fn main() -> Result<(), tollgate::Error> {
/// let redis = Redis::builder().connector(Proxied).open("redis://redis.internal")?;
/// # Ok(())
/// # }
/// ```
pub trait Connect: Send + Sync {
    /// A stream to this host, a name or an address, and port.
    fn connect<'a>(&'a self, host: &'a str, port: u16) -> StreamFuture<'a>;
}

/// Code of the caller's that connects. Its panic is an error of this attempt, as any other is.
pub(super) async fn guarded<T>(what: &str, connecting: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    let mut connecting = pin!(connecting);
    poll_fn(|context| {
        catch_unwind(AssertUnwindSafe(|| connecting.as_mut().poll(context)))
            .unwrap_or_else(|_| Poll::Ready(Err(io::Error::other(format!("{what} panicked")))))
    })
    .await
}

/// A connector of the caller's.
pub(in crate::engine) struct Own<C>(pub(in crate::engine) C);

impl<C: Connect> Connect for Own<C> {
    fn connect<'a>(&'a self, host: &'a str, port: u16) -> StreamFuture<'a> {
        Box::pin(guarded("the connector", async move { self.0.connect(host, port).await }))
    }
}

/// TCP, with TCP_NODELAY and keepalive.
pub(super) struct Tcp;

impl Connect for Tcp {
    /// Connects to whichever of the host's addresses answers first.
    fn connect<'a>(&'a self, host: &'a str, port: u16) -> StreamFuture<'a> {
        Box::pin(async move {
            let addresses = tokio::net::lookup_host((host, port)).await?;
            let attempts: Vec<_> = addresses.map(TcpStream::connect).map(Box::pin).collect();
            if attempts.is_empty() {
                return Err(io::Error::new(io::ErrorKind::NotFound, "no address is known for this host"));
            }
            let (stream, _) = select_ok(attempts).await?;
            stream.set_nodelay(true)?;
            // Lets the system detect that an idle connection, or one that delivers nothing, is dead.
            let socket = SockRef::from(&stream);
            socket.set_tcp_keepalive(&TcpKeepalive::new().with_time(IDLE).with_interval(IDLE / 3))?;
            #[cfg(any(target_os = "android", target_os = "fuchsia", target_os = "linux"))]
            socket.set_tcp_user_timeout(Some(2 * IDLE))?;
            Ok(Box::new(stream) as Box<dyn Stream>)
        })
    }
}
