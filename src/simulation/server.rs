//! A server: its data, its role, and its current faults.

use std::collections::BTreeSet;
use std::sync::{Arc, MutexGuard};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use super::medium::Medium;
use super::slots::Slots;
use super::wire::Wire;
use crate::engine::embedded::raw::Store;
use crate::lock::Lock;

/// All servers of a simulation, which know each other.
#[derive(Default)]
pub(super) struct Servers(Lock<Vec<Arc<Server>>>);

pub(super) struct Server {
    /// Its index among the servers.
    pub(super) at: usize,
    host: String,
    port: u16,
    pub(super) medium: Arc<Medium>,
    pub(super) others: Arc<Servers>,
    /// The connections to it.
    wires: Lock<Vec<Arc<Wire>>>,
    state: Lock<State>,
    /// One thread serves all connections in turn.
    pub(super) turn: tokio::sync::Mutex<()>,
    pub(super) thawed: Notify,
}

pub(super) struct State {
    pub(super) up: bool,
    /// Identifies the process.
    pub(super) run: u64,
    pub(super) store: Store,
    /// Digests of the scripts loaded into it.
    pub(super) scripts: BTreeSet<String>,
    pub(super) role: Role,
    /// Its primary or its replica; and what the replica lacks, and since when it lacks nothing older.
    pub(super) other: Option<usize>,
    pub(super) unsynced: Vec<Vec<u8>>,
    pub(super) synced_at: Instant,
    pub(super) slots: Option<Slots>,
    pub(super) trouble: Trouble,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Primary,
    Replica,
    /// A Sentinel, and which server it believes is the primary.
    Sentinel(usize),
}

#[derive(Clone, Debug, Default)]
pub(super) struct Trouble {
    pub(super) frozen: bool,
    pub(super) loading: bool,
    pub(super) busy: bool,
    /// Writes wait until this instant.
    pub(super) paused: Option<Instant>,
    /// How long each command takes.
    pub(super) slow: Option<Duration>,
    /// The error that refuses every write.
    pub(super) refusal: Option<&'static str>,
    /// The error that refuses every script.
    pub(super) refuses_scripts: Option<&'static str>,
    /// Every other script is run all the same.
    pub(super) spares_some: bool,
    pub(super) spared: bool,
    /// It crashes after this many more commands.
    pub(super) crash_after: Option<u32>,
    /// A connection is closed after this long without traffic.
    pub(super) idle: Option<Duration>,
    /// Its replica receives nothing.
    pub(super) lags: bool,
}

impl Servers {
    pub(super) fn add(self: &Arc<Self>, port: u16, role: Role, medium: &Arc<Medium>) {
        let mut all = self.0.lock();
        let server = Server::new(all.len(), port, role, Arc::clone(medium), Arc::clone(self));
        all.push(Arc::new(server));
    }

    pub(super) fn at(&self, at: usize) -> Arc<Server> {
        Arc::clone(&self.0.lock()[at])
    }

    pub(super) fn all(&self) -> Vec<Arc<Server>> {
        self.0.lock().clone()
    }

    pub(super) fn forget(&self) {
        self.0.lock().clear();
    }
}

impl Server {
    fn new(at: usize, port: u16, role: Role, medium: Arc<Medium>, others: Arc<Servers>) -> Self {
        let state = State {
            up: true,
            run: at as u64,
            store: Store::default(),
            scripts: BTreeSet::new(),
            role,
            other: None,
            unsynced: Vec::new(),
            synced_at: Instant::now(),
            slots: None,
            trouble: Trouble::default(),
        };
        Self {
            at,
            host: format!("10.0.0.{}", at + 1),
            port,
            medium,
            others,
            wires: Lock::default(),
            state: Lock::new(state),
            turn: tokio::sync::Mutex::default(),
            thawed: Notify::new(),
        }
    }

    pub(super) fn is_at(&self, host: &str, port: u16) -> bool {
        self.host == host && self.port == port
    }

    pub(super) fn host(&self) -> &str {
        &self.host
    }

    pub(super) fn port(&self) -> u16 {
        self.port
    }

    pub(super) fn address(&self) -> String {
        format!("{}:{}", self.host, self.port)
    }

    pub(super) fn is_up(&self) -> bool {
        self.state().up
    }

    /// Whether this process still runs.
    pub(super) fn is_run(&self, run: u64) -> bool {
        let state = self.state();
        state.up && state.run == run
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Kills its process, with all connections.
    pub(super) fn crash(&self) {
        self.medium.note(|| format!("server {} crashes", self.at));
        {
            let mut state = self.state();
            state.up = false;
            state.trouble = Trouble::default();
            state.scripts.clear();
        }
        self.thawed.notify_waiters();
        self.drop_connections();
    }

    /// Starts another process in its place, empty or with what was on disk.
    pub(super) fn start(&self, keeps: bool) {
        if self.is_up() {
            return;
        }
        self.medium.note(|| format!("server {} starts", self.at));
        // Others may have learned meanwhile that its replica replaced it.
        let succeeded = self.state().other.filter(|other| self.others.at(*other).state().role == Role::Primary);
        if let Some(other) = succeeded.filter(|_| self.state().role == Role::Primary) {
            self.demote(false);
            if let Some(slots) = &mut self.state().slots {
                slots.replace(self.at, other);
            }
        }
        let mut state = self.state();
        state.up = true;
        state.run += 1000;
        if !keeps && state.role == Role::Primary {
            state.store = Store::default();
            self.medium.ledger().emptied += 1;
        }
        state.unsynced.clear();
        let (role, other, store) = (state.role.clone(), state.other, state.store.clone());
        drop(state);
        if role == Role::Primary
            && let Some(other) = other
        {
            let other = self.others.at(other);
            other.state().store = store;
        }
    }

    pub(super) fn connected(&self, wire: &Arc<Wire>) {
        self.wires.lock().push(Arc::clone(wire));
    }

    /// The connections to it that either side still has open.
    pub(super) fn wires(&self) -> Vec<Arc<Wire>> {
        let mut wires = self.wires.lock();
        wires.retain(|wire| !wire.is_over());
        wires.clone()
    }

    pub(super) fn drop_connections(&self) {
        self.wires().iter().for_each(|wire| wire.reset());
    }

    pub(super) fn thaw(&self) {
        self.state().trouble.frozen = false;
        self.thawed.notify_waiters();
    }

    /// Waits while it is stopped.
    pub(super) async fn awake(&self) {
        loop {
            let thawed = self.thawed.notified();
            if !self.state().trouble.frozen {
                return;
            }
            thawed.await;
        }
    }

    /// Sends its changes to the replica.
    pub(super) fn replicate(&self) {
        let mut state = self.state();
        let Some(other) = state.other.filter(|_| state.role == Role::Primary && state.up && !state.trouble.lags) else {
            return;
        };
        let replica = self.others.at(other);
        let listens = {
            let replica = replica.state();
            replica.up && replica.role == Role::Replica
        };
        if !listens {
            return;
        }
        state.synced_at = Instant::now();
        if state.unsynced.is_empty() {
            return;
        }
        let changed = std::mem::take(&mut state.unsynced);
        let store = std::mem::take(&mut state.store);
        drop(state);
        store.copy_to(&mut replica.state().store, &changed);
        self.state().store = store;
    }

    /// The replica takes over with the data that it has; this server becomes its replica once it learns of that.
    pub(super) fn promote_replica(&self) -> Option<usize> {
        let other = self.state().other?;
        self.medium.note(|| format!("server {other} takes the place of {}", self.at));
        let replica = self.others.at(other);
        let mut state = replica.state();
        state.role = Role::Primary;
        state.unsynced.clear();
        drop(state);
        self.medium.ledger().succeeded += 1;
        Some(other)
    }

    /// It learns that another server is the primary in its place.
    pub(super) fn demote(&self, kills: bool) {
        let Some(other) = self.state().other else { return };
        self.medium.note(|| format!("server {} is a replica now", self.at));
        let store = self.others.at(other).state().store.clone();
        let mut state = self.state();
        state.role = Role::Replica;
        state.store = store;
        state.unsynced.clear();
        drop(state);
        if kills {
            self.drop_connections();
        }
    }
}
