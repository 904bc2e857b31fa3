//! A simulation's network: its servers, and how they are reached.

use std::io;
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, SystemTime};

use super::chance::Chance;
use super::medium::Medium;
use super::server::{Role, Server, Servers};
use super::wire::{ClientEnd, Direction, Hole, Wire};
use crate::engine::redis::connect::{Connect, StreamFuture};
use crate::lock::Lock;

/// The state that all tasks of a simulation share.
pub(crate) struct Network {
    pub(super) medium: Arc<Medium>,
    servers: Arc<Servers>,
    reach: Lock<Vec<Reach>>,
    /// How many unread bytes a connection can hold in each direction.
    room: usize,
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

/// TCP retries after a second, and then after twice as long each time.
const SYN_AGAIN: Duration = Duration::from_secs(1);

impl Network {
    pub(super) fn new(chance: Chance, room: usize) -> Arc<Self> {
        Arc::new(Self { medium: Medium::new(chance), servers: Arc::default(), reach: Lock::default(), room })
    }

    pub(super) fn add(&self, port: u16, role: Role) {
        self.servers.add(port, role, &self.medium);
        self.reach().push(Reach::Open);
    }

    pub(super) fn server(&self, at: usize) -> Arc<Server> {
        self.servers.at(at)
    }

    pub(super) fn servers(&self) -> Vec<Arc<Server>> {
        self.servers.all()
    }

    /// What the client's clock shows, which is what the servers' clocks show.
    pub(super) fn time_of_day(&self) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_micros(self.medium.now_us())
    }

    async fn client_end(&self, host: &str, port: u16) -> io::Result<ClientEnd> {
        let found = self.servers().into_iter().find(|server| server.is_at(host, port));
        let server = found.ok_or(io::ErrorKind::HostUnreachable)?;
        self.medium.note(|| format!("connects to {host}:{port}"));
        let mut again = SYN_AGAIN;
        loop {
            // There and back.
            tokio::time::sleep_until(self.medium.arrival(None)).await;
            tokio::time::sleep_until(self.medium.arrival(None)).await;
            let reach = self.reach()[server.at];
            match reach {
                Reach::Hangs => {
                    tokio::time::sleep(again).await;
                    again *= 2;
                }
                Reach::Refused => return Err(io::ErrorKind::ConnectionRefused.into()),
                _ if !server.is_up() => return Err(io::ErrorKind::ConnectionRefused.into()),
                _ => return Ok(self.connected(server, reach)),
            }
        }
    }

    fn connected(&self, to: Arc<Server>, reach: Reach) -> ClientEnd {
        let (client, server) = Wire::ends(Arc::clone(&self.medium), self.room);
        if let Reach::Hole(hole, directions) = reach {
            server.wire.fall_into(hole, directions);
        }
        to.connected(&server.wire);
        self.medium.record(&[server.wire.number, to.at as u64], b"connected");
        tokio::spawn(to.serve(server));
        client
    }

    pub(super) fn set_reach(&self, server: usize, reach: Reach) {
        self.reach()[server] = reach;
    }

    /// All connections, in the order in which they were made.
    pub(super) fn wires(&self) -> Vec<Arc<Wire>> {
        let mut wires: Vec<_> = self.servers().iter().flat_map(|server| server.wires()).collect();
        wires.sort_by_key(|wire| wire.number);
        wires
    }

    /// Drops the servers, which refer to each other.
    pub(super) fn forget(&self) {
        self.servers.forget();
    }

    fn reach(&self) -> MutexGuard<'_, Vec<Reach>> {
        self.reach.lock()
    }
}

impl Connect for Arc<Network> {
    fn connect<'a>(&'a self, host: &'a str, port: u16) -> StreamFuture<'a> {
        Box::pin(async move { Ok(Box::new(self.client_end(host, port).await?) as _) })
    }
}
