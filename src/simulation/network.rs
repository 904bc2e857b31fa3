//! A simulation's network: its servers, the connections to them, and the record of all events.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::chance::Chance;
use super::ledger::Ledger;
use super::resp::Requests;
use super::server::Server;
use super::wire::{ClientEnd, Direction, Hole, Wire};

/// The state that all tasks of a simulation share.
pub(crate) struct Network {
    began: Instant,
    state: Mutex<State>,
    record: Mutex<Record>,
    pub(super) ledger: Mutex<Ledger>,
    traced: bool,
}

struct State {
    servers: Vec<Arc<Server>>,
    reach: Vec<Reach>,
    wires: Vec<Arc<Wire>>,
    connections: u64,
    chance: Chance,
    /// The range, in milliseconds.
    delay: (u64, u64),
    room: usize,
    /// Everything written on each connection.
    written: Vec<Vec<u8>>,
}

/// What happens to a client that connects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reach {
    Open,
    Refused,
    /// Nothing is answered.
    Hangs,
    /// It connects, and then nothing gets through in these directions.
    Hole(Hole, &'static [Direction]),
}

/// A digest of all events, in order.
struct Record {
    digest: u64,
    events: u64,
}

/// TCP retries after a second, and then after twice as long each time.
const SYN_AGAIN: Duration = Duration::from_secs(1);

impl Network {
    pub(super) fn new(chance: Chance, room: usize) -> Arc<Self> {
        let state = State {
            servers: Vec::new(),
            reach: Vec::new(),
            wires: Vec::new(),
            connections: 0,
            chance,
            delay: (0, 2),
            room,
            written: Vec::new(),
        };
        Arc::new(Self {
            began: Instant::now(),
            state: Mutex::new(state),
            record: Mutex::new(Record { digest: 0xcbf2_9ce4_8422_2325, events: 0 }),
            ledger: Mutex::default(),
            traced: std::env::var_os("TOLLGATE_SIMULATE_TRACE").is_some(),
        })
    }

    pub(super) fn add(&self, server: Arc<Server>) {
        let mut state = self.state();
        state.servers.push(server);
        state.reach.push(Reach::Open);
    }

    pub(super) fn server(&self, at: usize) -> Arc<Server> {
        Arc::clone(&self.state().servers[at])
    }

    pub(super) fn servers(&self) -> Vec<Arc<Server>> {
        self.state().servers.clone()
    }

    pub(crate) async fn connect(self: &Arc<Self>, host: &str, port: u16) -> io::Result<ClientEnd> {
        let found = self.state().servers.iter().position(|server| server.is_at(host, port));
        let at = found.ok_or(io::ErrorKind::HostUnreachable)?;
        self.note(|| format!("connects to {host}:{port}"));
        let mut again = SYN_AGAIN;
        loop {
            // There and back.
            tokio::time::sleep_until(self.arrival(None)).await;
            tokio::time::sleep_until(self.arrival(None)).await;
            let reach = self.state().reach[at];
            match reach {
                Reach::Hangs => {
                    tokio::time::sleep(again).await;
                    again *= 2;
                }
                Reach::Refused => return Err(io::ErrorKind::ConnectionRefused.into()),
                _ if !self.server(at).is_up() => return Err(io::ErrorKind::ConnectionRefused.into()),
                _ => return Ok(self.connected(at, reach)),
            }
        }
    }

    fn connected(self: &Arc<Self>, at: usize, reach: Reach) -> ClientEnd {
        let mut state = self.state();
        let number = state.connections;
        state.connections += 1;
        let (client, server) = Wire::ends(number, at, Arc::clone(self), state.room);
        if let Reach::Hole(hole, directions) = reach {
            server.wire.fall_into(hole, directions);
        }
        state.wires.push(Arc::clone(&server.wire));
        state.written.push(Vec::new());
        let host = Arc::clone(&state.servers[at]);
        drop(state);
        self.record(&[number, at as u64], b"connected");
        tokio::spawn(host.serve(server));
        client
    }

    /// When something sent now arrives: after everything sent before it.
    pub(super) fn arrival(&self, last: Option<Instant>) -> Instant {
        let mut state = self.state();
        let (first, end) = state.delay;
        // Sometimes a message is lost and sent again.
        let again = if state.chance.one_in(200) { 30 } else { 0 };
        let at = Instant::now() + state.chance.ms(first, end) + Duration::from_millis(again);
        last.map_or(at, |last| last.max(at))
    }

    pub(super) fn set_delay(&self, delay: (u64, u64)) {
        self.state().delay = delay;
    }

    pub(super) fn set_reach(&self, server: usize, reach: Reach) {
        self.state().reach[server] = reach;
    }

    /// The connections to this server, or to all.
    pub(super) fn wires(&self, server: Option<usize>) -> Vec<Arc<Wire>> {
        let mut state = self.state();
        state.wires.retain(|wire| !wire.is_over());
        state.wires.iter().filter(|wire| server.is_none_or(|server| wire.server == server)).cloned().collect()
    }

    /// Drops all references, so that cycles are freed.
    pub(super) fn forget(&self) {
        let mut state = self.state();
        state.wires.clear();
        state.servers.clear();
    }

    pub(super) fn wrote(&self, wire: &Wire, bytes: &[u8]) {
        self.state().written[wire.number as usize].extend_from_slice(bytes);
    }

    /// Each request that was written completely, and whether none was cut off.
    pub(super) fn requests(&self) -> (Vec<Vec<Vec<u8>>>, bool) {
        let (mut all, mut whole) = (Vec::new(), true);
        for written in &self.state().written {
            let mut requests = Requests::default();
            requests.push(written);
            all.extend(std::iter::from_fn(|| requests.next()));
            whole &= !requests.is_half_way();
        }
        (all, whole)
    }

    pub(super) fn ms(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// The servers' time of day.
    pub(super) fn now_us(&self) -> u64 {
        1_700_000_000_000_000 + u64::try_from(self.began.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    pub(super) fn record(&self, what: &[u64], bytes: &[u8]) {
        let now = self.began.elapsed().as_nanos() as u64;
        let mut record = self.record.lock().unwrap_or_else(PoisonError::into_inner);
        record.events += 1;
        // FNV-1a, by words.
        let mut mix = |word: u64| record.digest = (record.digest ^ word).wrapping_mul(0x0000_0100_0000_01b3);
        mix(now);
        what.iter().for_each(|word| mix(*word));
        let (words, rest) = bytes.as_chunks::<8>();
        words.iter().for_each(|word| mix(u64::from_le_bytes(*word)));
        rest.iter().for_each(|byte| mix(u64::from(*byte)));
        drop(record);
        if self.traced && !what.is_empty() {
            let shown = String::from_utf8_lossy(&bytes[..bytes.len().min(160)]).replace("\r\n", " ");
            eprintln!("{:>6} {what:?} {shown}", self.ms());
        }
    }

    /// Records an event described in words.
    pub(super) fn note(&self, what: impl FnOnce() -> String) {
        let what = what();
        self.record(&[], what.as_bytes());
        if self.traced {
            eprintln!("{:>6} {what}", self.ms());
        }
    }

    /// A digest of all events so far, and their number.
    pub(super) fn digest(&self) -> (u64, u64) {
        let record = self.record.lock().unwrap_or_else(PoisonError::into_inner);
        (record.digest, record.events)
    }

    pub(super) fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
