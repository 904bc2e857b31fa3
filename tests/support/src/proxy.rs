//! A TCP proxy to a server, which can drop, delay and redirect traffic.

use std::borrow::Cow;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// Forwards connections on loopback for as long as its runtime lives.
#[derive(Clone, Debug)]
pub struct Proxy {
    port: u16,
    ways: Arc<Ways>,
}

#[derive(Debug)]
struct Ways {
    to: AtomicU16,
    /// Nothing passes, and nothing is closed.
    swallows: AtomicBool,
    /// The same for the connections that were accepted before this one.
    swallowed: AtomicU64,
    /// Reads of replies that pass before others wait, and how many wait now.
    passing: AtomicU64,
    held: AtomicU64,
    /// How long each reply is held up, in milliseconds.
    delay: AtomicU64,
    /// Bytes of replies that pass before a connection is closed.
    replies_left: AtomicU64,
    /// Requests whose replies pass, counted over all connections.
    answered: AtomicU64,
    accepted: AtomicU64,
    /// Reads of requests, swallowed or not. Those of HELLO, by which a connection begins and asks whether a server that
    /// is late still answers, aren't counted.
    requested: AtomicU64,
    /// The script that is called in place of the next one.
    instead: Mutex<Option<String>>,
}

impl Proxy {
    pub async fn to(port: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let ways = Arc::new(Ways {
            to: AtomicU16::new(port),
            swallows: AtomicBool::new(false),
            swallowed: AtomicU64::new(0),
            passing: AtomicU64::new(u64::MAX),
            held: AtomicU64::new(0),
            delay: AtomicU64::new(0),
            replies_left: AtomicU64::new(u64::MAX),
            answered: AtomicU64::new(u64::MAX),
            accepted: AtomicU64::new(0),
            requested: AtomicU64::new(0),
            instead: Mutex::default(),
        });
        let proxy = Self { port: listener.local_addr().expect("an address").port(), ways: Arc::clone(&ways) };
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let number = ways.accepted.fetch_add(1, Ordering::Relaxed);
                tokio::spawn(forward(client, number, Arc::clone(&ways)));
            }
        });
        proxy
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    pub fn lead_to(&self, port: u16) {
        self.ways.to.store(port, Ordering::Relaxed);
    }

    pub fn swallow(&self, yes: bool) {
        self.ways.swallows.store(yes, Ordering::Relaxed);
    }

    /// The connections that there are, and no others.
    pub fn swallow_those_there(&self) {
        self.ways.swallowed.store(self.accepted(), Ordering::Relaxed);
    }

    /// After so many reads of replies, others wait until more may pass.
    pub fn pass_replies(&self, count: u64) {
        self.ways.passing.store(count, Ordering::Relaxed);
    }

    /// How many replies wait now, one of each connection at most.
    pub fn held_replies(&self) -> u64 {
        self.ways.held.load(Ordering::Relaxed)
    }

    pub fn delay(&self, by: Duration) {
        self.ways.delay.store(u64::try_from(by.as_millis()).expect("not long"), Ordering::Relaxed);
    }

    pub fn cut_after(&self, bytes: u64) {
        self.ways.replies_left.store(bytes, Ordering::Relaxed);
    }

    /// After so many requests, the server still gets more, and no reply passes.
    pub fn answer(&self, requests: u64) {
        self.ways.answered.store(requests, Ordering::Relaxed);
    }

    /// Has the server run this script in place of the next one that is called, so that its answer comes in its turn.
    pub fn run_instead(&self, script: String) {
        *self.ways.instead.lock().expect("nobody panics") = Some(script);
    }

    /// How often something has come that is meant for the server, but for a connection's own questions.
    pub fn requested(&self) -> u64 {
        self.ways.requested.load(Ordering::Relaxed)
    }

    pub fn accepted(&self) -> u64 {
        self.ways.accepted.load(Ordering::Relaxed)
    }
}

impl Ways {
    /// What is sent for these requests.
    fn passed<'a>(&self, requests: &'a [u8]) -> Cow<'a, [u8]> {
        let called = requests.windows(7).position(|word| word == b"EVALSHA");
        let Some(start) = called.and_then(|at| requests[..at].iter().rposition(|byte| *byte == b'*')) else {
            return requests.into();
        };
        match self.instead.lock().expect("nobody panics").take() {
            Some(script) => {
                let call = format!("*3\r\n$4\r\nEVAL\r\n${}\r\n{script}\r\n$1\r\n0\r\n", script.len());
                [&requests[..start], call.as_bytes()].concat().into()
            }
            None => requests.into(),
        }
    }

    fn may_pass(&self) -> bool {
        let one_less = |left: u64| if left == u64::MAX { Some(left) } else { left.checked_sub(1) };
        self.passing.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less).is_ok()
    }

    fn swallow(&self, number: u64) -> bool {
        self.swallows.load(Ordering::Relaxed) || number < self.swallowed.load(Ordering::Relaxed)
    }
}

async fn forward(client: TcpStream, number: u64, ways: Arc<Ways>) {
    let Ok(server) = TcpStream::connect(("127.0.0.1", ways.to.load(Ordering::Relaxed))).await else { return };
    for way in [&client, &server] {
        way.set_nodelay(true).expect("a socket");
    }
    let (mut requests, mut answers) = client.into_split();
    let (mut replies, mut server) = server.into_split();
    let there = async {
        let mut bytes = [0; 4096];
        while let Ok(count @ 1..) = requests.read(&mut bytes).await {
            let has = |word: &[u8]| bytes[..count].windows(word.len()).any(|part| part == word);
            ways.requested.fetch_add(u64::from(!has(b"HELLO") || has(b"EVAL")), Ordering::Relaxed);
            if !ways.swallow(number) && server.write_all(&ways.passed(&bytes[..count])).await.is_err() {
                return;
            }
        }
    };
    let back = async {
        let mut bytes = [0; 4096];
        while let Ok(count @ 1..) = replies.read(&mut bytes).await {
            if ways.swallow(number) || ways.requested.load(Ordering::Relaxed) > ways.answered.load(Ordering::Relaxed) {
                continue;
            }
            tokio::time::sleep(Duration::from_millis(ways.delay.load(Ordering::Relaxed))).await;
            ways.held.fetch_add(1, Ordering::Relaxed);
            while !ways.may_pass() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            ways.held.fetch_sub(1, Ordering::Relaxed);
            let wanted = count as u64;
            let left = ways.replies_left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| {
                (left < u64::MAX).then(|| left.saturating_sub(wanted))
            });
            let passing = left.map_or(count, |left| count.min(usize::try_from(left).unwrap_or(count)));
            if answers.write_all(&bytes[..passing]).await.is_err() || passing < count {
                return;
            }
        }
    };
    // Whichever ends closes both.
    tokio::select! {
        () = there => {}
        () = back => {}
    }
}
