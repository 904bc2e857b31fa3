//! How connections are opened and logged in where a service says so itself: by a connector of its own, and by
//! credentials that expire.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tollgate::connect::{Connect, CredentialFuture, CredentialSource, Credentials, StreamFuture};
use tollgate::{ErrorKind, Limiter, OnError, Redis};
use tollgate_testing::cluster::ClusterServers;
use tollgate_testing::polling::{PATIENCE, once_sent, wait_until};
use tollgate_testing::redis_server::{Server, command_text, run_command};
use tollgate_testing::rules::rule;
use tollgate_testing::sentinels::Sentinels;

/// Tokens that are numbered, of which the server accepts those that it was told of.
#[derive(Clone, Default)]
struct Tokens {
    asked: Arc<AtomicU64>,
    lifetime: Option<Duration>,
}

impl Tokens {
    fn asked(&self) -> u64 {
        self.asked.load(Ordering::Relaxed)
    }

    fn name(number: u64) -> String {
        format!("token-{number}")
    }

    /// Makes it accept the tokens of these numbers.
    fn accepted_by(server: &Server, numbers: std::ops::Range<u64>) {
        let tokens: Vec<_> = numbers.map(|number| format!(">{}", Self::name(number))).collect();
        let words = ["ACL", "SETUSER", "limiter", "reset", "on", "~*", "+@all"];
        run_command(server, &[&words[..], &tokens.iter().map(String::as_str).collect::<Vec<_>>()].concat());
    }
}

impl CredentialSource for Tokens {
    fn credentials(&self) -> CredentialFuture<'_> {
        let number = self.asked.fetch_add(1, Ordering::Relaxed);
        Box::pin(async move {
            let credentials = Credentials::new("limiter", Self::name(number));
            Ok(match self.lifetime {
                Some(lifetime) => credentials.expiring_in(lifetime),
                None => credentials,
            })
        })
    }
}

/// Its second answer never comes.
struct HangingOnce(Tokens);

impl CredentialSource for HangingOnce {
    fn credentials(&self) -> CredentialFuture<'_> {
        let answer = self.0.credentials();
        if self.0.asked() == 2 { Box::pin(std::future::pending()) } else { answer }
    }
}

/// No credentials, for this reason; panics if there is none.
struct Without(&'static str);

impl CredentialSource for Without {
    fn credentials(&self) -> CredentialFuture<'_> {
        assert!(!self.0.is_empty(), "a mistake of the source's own");
        Box::pin(async { Err(self.0.into()) })
    }
}

struct Panicking;

impl Connect for Panicking {
    fn connect<'a>(&'a self, host: &'a str, _: u16) -> StreamFuture<'a> {
        panic!("a mistake on the way to {host}")
    }
}

/// TCP that counts.
#[derive(Clone, Default)]
struct Counting(Arc<AtomicU64>);

impl Counting {
    fn opened(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Connect for Counting {
    fn connect<'a>(&'a self, host: &'a str, port: u16) -> StreamFuture<'a> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Box::pin(async move { Ok(Box::new(TcpStream::connect((host, port)).await?) as _) })
    }
}

/// How many of its connections are this user's.
fn logged_in(server: &Server) -> usize {
    command_text(server, &["CLIENT", "LIST"]).lines().filter(|client| client.contains(" user=limiter ")).count()
}

#[tokio::test]
async fn each_connection_logs_in_by_credentials_of_its_own() {
    let server = Server::start();
    Tokens::accepted_by(&server, 0..1000);
    let tokens = Tokens::default();
    let redis = Redis::builder().credentials(tokens.clone()).open(&server.url()).expect("an address");
    let limiter = Limiter::builder(redis.clone()).deadline(PATIENCE).build();
    let rule = rule("token-bucket 100/1d");
    for _ in 0..3 {
        limiter.acquire(&rule, "key").await.expect("a decision");
    }
    assert_eq!((redis.connections(), logged_in(&server)), (1, 1));
    let asked = tokens.asked();

    // Another token, once the connection is gone.
    Tokens::accepted_by(&server, asked..1000);
    run_command(&server, &["CLIENT", "KILL", "USER", "limiter"]);
    wait_until("decided by another token", async || limiter.acquire(&rule, "key").await.is_ok()).await;
    assert!(tokens.asked() > asked && redis.connections() == 2);

    // One that isn't accepted is a refusal.
    Tokens::accepted_by(&server, 0..1);
    run_command(&server, &["CLIENT", "KILL", "USER", "limiter"]);
    wait_until("refused", async || {
        limiter.acquire(&rule, "key").await.is_err_and(|error| error.kind() == ErrorKind::Authentication)
    })
    .await;
}

#[tokio::test]
async fn a_connection_is_replaced_before_its_credentials_expire_and_no_call_fails_for_it() {
    let server = Server::start();
    Tokens::accepted_by(&server, 0..1000);
    let tokens = Tokens { lifetime: Some(Duration::from_millis(100)), ..Tokens::default() };
    let redis = Redis::builder().credentials(tokens.clone()).open(&server.url()).expect("an address");
    let limiter = Limiter::builder(redis.clone()).deadline(PATIENCE).build();
    let rule = rule("fixed-window 1000000/30d start first-hit");
    let (mut calls, began) = (0, Instant::now());
    wait_until("replaced twice", async || {
        let ask = || limiter.acquire(&rule, "key");
        calls +=
            join_all((0..10).map(|_| once_sent(ask))).await.iter().filter(|decision| decision.allowed).count() as u64;
        redis.connections() >= 3
    })
    .await;
    let made = redis.connections();
    assert!(made <= began.elapsed().as_secs() + 1, "each lived a second, though its token did not: {made}");
    let left = 1_000_000 - calls;
    assert_eq!(limiter.peek(&rule, "key").await.expect("a decision").remaining, left, "each call was charged once");
    assert!(tokens.asked() >= redis.connections(), "one login for each");
    // Those before are closed.
    wait_until("only the latest are left", async || logged_in(&server) <= 2).await;

    // Nothing is replaced that nobody uses.
    let made = redis.connections();
    tokio::time::sleep(Duration::from_millis(1200)).await;
    assert!(redis.connections() <= made + 1);
}

#[tokio::test]
async fn while_a_connection_cannot_be_replaced_calls_go_on_over_it() {
    let server = Server::start();
    Tokens::accepted_by(&server, 0..1000);
    let tokens = Tokens { lifetime: Some(Duration::from_secs(1)), ..Tokens::default() };
    let redis = Redis::builder().credentials(tokens.clone()).open(&server.url()).expect("an address");
    let limiter = Limiter::builder(redis.clone()).deadline(PATIENCE).build();
    let rule = rule("token-bucket 1000000/1d");
    limiter.acquire(&rule, "key").await.expect("a decision");
    let (asked, made) = (tokens.asked(), redis.connections());
    Tokens::accepted_by(&server, 0..0);
    wait_until("others were asked for in vain", async || {
        once_sent(|| limiter.acquire(&rule, "key")).await;
        tokens.asked() >= asked + 2
    })
    .await;
    assert_eq!((redis.connections(), logged_in(&server)), (made, 1));
}

/// One attempt to replace a connection may never be answered.
#[tokio::test]
async fn a_connection_is_replaced_although_its_source_hung_once() {
    let server = Server::start();
    Tokens::accepted_by(&server, 0..1000);
    let (tokens, began) = (Tokens { lifetime: Some(Duration::from_secs(1)), ..Tokens::default() }, Instant::now());
    let source = HangingOnce(tokens.clone());
    let redis = Redis::builder().credentials(source).open(&server.url()).expect("an address");
    let limiter = Limiter::builder(redis.clone()).deadline(PATIENCE).build();
    let rule = rule("token-bucket 1000000/1d");
    wait_until("it is replaced", async || {
        once_sent(|| limiter.acquire(&rule, "key")).await;
        redis.connections() >= 2
    })
    .await;
    // The first is asked after 0.8 s.
    assert!(tokens.asked() >= 3 && began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
}

#[tokio::test]
async fn without_credentials_redis_is_unreachable_and_the_policy_answers() {
    let server = Server::start();
    let source = || async { Err("the token service answers 503".into()) };
    let redis = Redis::builder().credentials(source).open(&server.url()).expect("an address");
    let limiter = Limiter::builder(redis).deadline(PATIENCE).build();
    let error = limiter.acquire(&rule("token-bucket 5/1d"), "key").await.expect_err("no login");
    let expected = "no credentials were given: the token service answers 503";
    assert!(error.is_unreachable() && error.to_string().contains(expected), "{error}");
    assert!(!error.to_string().contains('\n'), "{error}");
    let open = limiter.to_builder().on_error(OnError::Open).build();
    assert!(open.acquire(&rule("token-bucket 5/1d"), "key").await.expect("a decision").allowed);

    // Whatever it says, or if it panics.
    let limiter = |source| {
        let redis = Redis::builder().credentials(source).open(&server.url()).expect("an address");
        Limiter::builder(redis).deadline(PATIENCE).on_error(OnError::Open).build()
    };
    for (source, expected) in [
        (
            Without("Authentication required, said\nthe token service"),
            "Authentication required, said the token service",
        ),
        (Without("no permissions to run this"), "no permissions to run this"),
        (Without(""), "the source of credentials panicked"),
    ] {
        let decision = limiter(source).acquire(&rule("token-bucket 5/1d"), "key").await.expect("open");
        let error = decision.by.error().expect("why").to_string();
        assert!(error.contains(expected) && !error.contains('\n'), "{error}");
    }

    // So is a connector that panics.
    let redis = Redis::builder().connector(Panicking).open(&server.tcp_url()).expect("an address");
    let open = Limiter::builder(redis).deadline(PATIENCE).on_error(OnError::Open).build();
    let decision = open.acquire(&rule("token-bucket 5/1d"), "key").await.expect("open");
    assert!(decision.by.error().expect("why").to_string().contains("the connector panicked"), "{decision:?}");

    // One that never answers is as a server that never does.
    let source = || std::future::pending();
    let redis = Redis::builder().credentials(source).open(&server.url()).expect("an address");
    let limiter = Limiter::builder(redis).deadline(Duration::from_millis(50)).build();
    let error = limiter.acquire(&rule("token-bucket 5/1d"), "key").await.expect_err("no login");
    assert!(error.is_unreachable(), "{error}");
}

/// A stream that works until so many bytes have been read, and then ends, or panics.
struct Failing {
    stream: TcpStream,
    left: usize,
    panics: bool,
}

impl AsyncRead for Failing {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.left == 0 {
            assert!(!this.panics, "a mistake of the stream's own");
            return Poll::Ready(Ok(()));
        }
        let mut bytes = [0; 4096];
        let most = this.left.min(buffer.remaining()).min(bytes.len());
        let mut some = ReadBuf::new(&mut bytes[..most]);
        let polled = Pin::new(&mut this.stream).poll_read(context, &mut some);
        this.left -= some.filled().len();
        buffer.put_slice(some.filled());
        polled
    }
}

impl AsyncWrite for Failing {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        if this.left == 0 {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        Pin::new(&mut this.stream).poll_write(context, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(context)
    }
}

/// After so many bytes, whether its streams panic.
#[derive(Clone)]
struct FailingAfter(usize, bool, Counting);

impl Connect for FailingAfter {
    fn connect<'a>(&'a self, host: &'a str, port: u16) -> StreamFuture<'a> {
        self.2.0.fetch_add(1, Ordering::Relaxed);
        Box::pin(async move {
            let stream = TcpStream::connect((host, port)).await?;
            Ok(Box::new(Failing { stream, left: self.0, panics: self.1 }) as _)
        })
    }
}

/// Wherever that is: within the login, after it, or in a script's answer.
#[tokio::test]
async fn streams_that_always_fail_are_an_unreachable_redis_and_connected_to_a_few_times_alone() {
    let server = Server::start();
    for panics in [false, true] {
        for bytes in [0, 10, 100, 260, 300, 340, 380, 420, 500, 5000] {
            let connector = FailingAfter(bytes, panics, Counting::default());
            let redis = Redis::builder().connector(connector.clone()).open(&server.tcp_url()).expect("an address");
            let open = Limiter::builder(redis).deadline(PATIENCE).on_error(OnError::Open).build();
            let rule = rule("token-bucket 1000/1d");
            for _ in 0..40 {
                let decision = open.acquire(&rule, "key").await.expect("open");
                assert!(decision.allowed, "{bytes}, {panics}: {decision:?}");
                tokio::task::yield_now().await;
            }
            let opened = connector.2.opened();
            // The breaker opens after five, and a call looks again after some tenths of a second.
            assert!((1..=15).contains(&opened), "{bytes}, {panics}: {opened} streams for 40 calls");
        }
    }
}

/// Nothing can be written to it, and nothing ever comes.
struct Deaf;

impl AsyncRead for Deaf {
    fn poll_read(self: Pin<&mut Self>, _: &mut Context<'_>, _: &mut ReadBuf<'_>) -> Poll<std::io::Result<()>> {
        Poll::Pending
    }
}

impl AsyncWrite for Deaf {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, _: &[u8]) -> Poll<std::io::Result<usize>> {
        Poll::Ready(Err(std::io::Error::other("the tunnel is not for this user")))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

impl Connect for Deaf {
    fn connect<'a>(&'a self, _: &'a str, _: u16) -> StreamFuture<'a> {
        Box::pin(async { Ok(Box::new(Self) as _) })
    }
}

#[tokio::test]
async fn a_stream_that_cannot_be_written_to_says_why() {
    let redis = Redis::builder().connector(Deaf).open("redis://redis.internal/").expect("an address");
    let limiter = Limiter::builder(redis).deadline(PATIENCE).build();
    let error = limiter.acquire(&rule("gcra 1/1s"), "key").await.expect_err("nothing is written");
    let said = error.to_string();
    assert!(error.kind() == ErrorKind::Unreachable && said.ends_with("the tunnel is not for this user"), "{said}");
}

#[test]
fn credentials_are_shown_nowhere() {
    let credentials = Credentials::new("limiter", "s3cret").expiring_in(Duration::from_secs(900));
    assert_eq!(format!("{credentials:?}"), "Credentials { user: Some(\"limiter\"), lifetime: Some(900s), .. }");
    let builder = Redis::builder().credentials(move || std::future::ready(Ok(credentials.clone())));
    let redis = builder.open("redis://127.0.0.1").expect("an address");
    assert!(!format!("{builder:?} {redis:?}").contains("s3cret"));
}

/// On a cluster each node is logged in to, and behind Sentinels the primary alone, over the service's own streams.
#[tokio::test]
async fn several_servers_are_reached_and_logged_in_to_in_the_same_way() {
    let cluster = ClusterServers::of_primaries();
    cluster.nodes().iter().for_each(|node| Tokens::accepted_by(node, 0..1000));
    let (tokens, streams) = (Tokens::default(), Counting::default());
    let builder = Redis::builder().credentials(tokens.clone()).connector(streams.clone());
    let limiter =
        Limiter::builder(builder.open_cluster(&cluster.url()).expect("an address")).deadline(PATIENCE).build();
    let rule = rule("token-bucket 100/1d");
    for node in 0..cluster.nodes().len() {
        let key = cluster.keys_of(node, 1).remove(0);
        assert_eq!(limiter.acquire(&rule, &key).await.expect("a decision").remaining, 99);
        assert_eq!(logged_in(cluster.node(node)), 1);
    }
    assert!(streams.opened() >= tokens.asked() && tokens.asked() >= 3, "{} {}", streams.opened(), tokens.asked());

    let sentinels = Sentinels::start();
    let primary = sentinels.server(sentinels.primary().expect("a primary"));
    Tokens::accepted_by(primary, 0..1000);
    let (tokens, streams) = (Tokens::default(), Counting::default());
    let builder = Redis::builder().credentials(tokens.clone()).connector(streams.clone());
    let limiter =
        Limiter::builder(builder.open_engine(&sentinels.url()).expect("an address")).deadline(PATIENCE).build();
    assert_eq!(limiter.acquire(&rule, "key").await.expect("a decision").remaining, 99);
    assert_eq!(logged_in(primary), 1);
    assert!(streams.opened() > tokens.asked(), "the Sentinels are asked without a login");
}

#[tokio::test]
async fn a_connector_that_fails_is_an_unreachable_redis() {
    struct Refusing;
    impl Connect for Refusing {
        fn connect<'a>(&'a self, host: &'a str, port: u16) -> StreamFuture<'a> {
            Box::pin(async move { Err(io::Error::other(format!("the proxy knows no {host}:{port}"))) })
        }
    }
    let redis = Redis::builder().connector(Refusing).open("redis://redis.internal:6380").expect("an address");
    let error = Limiter::builder(redis).deadline(PATIENCE).build().acquire(&rule("token-bucket 5/1d"), "key").await;
    let error = error.expect_err("no stream");
    assert!(error.is_unreachable() && error.to_string().ends_with("the proxy knows no redis.internal:6380"), "{error}");
}

#[tokio::test]
async fn a_password_alone_is_that_of_the_default_user_whoever_the_address_names() {
    let server = Server::start();
    run_command(&server, &["CONFIG", "SET", "requirepass", "secret"]);
    let url = server.tcp_url().replace("redis://", "redis://alice:wrong@");
    let source = || async { Ok(Credentials::for_default_user("secret")) };
    let redis = Redis::builder().credentials(source).open(&url).expect("an address");
    let limiter = Limiter::builder(redis).deadline(PATIENCE).build();
    assert!(limiter.acquire(&rule("token-bucket 5/1d"), "key").await.expect("a decision").allowed);
}
