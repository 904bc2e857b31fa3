//! The faults: a script drawn from the seed, and how each is played.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::{Instant, sleep, sleep_until};

use super::Topology;
use super::chance::Chance;
use super::ledger::request_key;
use super::network::{Network, Reach};
use super::server::{Role, Server, Trouble};
use super::slots::{DOWN, group_of};
use super::wire::Direction::{ToClient, ToServer};
use super::wire::{Direction, Hole};

/// A fault, when it begins, and how long it lasts.
#[derive(Clone, Debug)]
pub(super) struct Injection {
    at: Duration,
    length: Duration,
    /// The server; if it has a replica, whichever of the two is the primary at the time.
    server: usize,
    what: What,
    /// For random choices while it is played.
    chance: Chance,
}

#[derive(Clone, Debug)]
enum What {
    /// Delays every message, in milliseconds.
    Delays(u64, u64),
    /// Affects existing connections, and with `new` also those made meanwhile.
    BlackHole {
        hole: Hole,
        directions: &'static [Direction],
        new: bool,
        everywhere: bool,
    },
    Resets,
    CutsReplyAfter(usize),
    ClosesIdleAfter(Duration),
    Refuses,
    ConnectsHang {
        everywhere: bool,
    },
    Freezes,
    Restarts {
        keeps: bool,
        loading: Duration,
    },
    CrashesAfter {
        commands: u32,
        keeps: bool,
    },
    IsBusy,
    RefusesWrites(&'static str),
    /// Refuses all of them, or every other one.
    RefusesScripts(&'static str, bool),
    PausesWrites,
    IsSlow(Duration),
    FlushesScripts,
    ReplicaLags,
    FailsOver {
        crashes: bool,
        kills: bool,
    },
    /// With `splits`, keys of one call may be in two places meanwhile.
    MovesSlots {
        group: usize,
        splits: bool,
    },
}

/// What a run must satisfy, given its faults.
#[derive(Clone, Copy, Debug)]
pub(super) struct Expected {
    /// From then on every call with enough time succeeds.
    pub(super) well_from: Duration,
    /// From then on only existing connections fail, while new ones work, so recovery depends on how soon one is made.
    pub(super) only_connections_fail_from: Option<Duration>,
    /// A cluster's nodes redirect to each other only while slots move.
    pub(super) nodes_agree: bool,
    /// No call fails because the breaker is open.
    pub(super) is_always_asked: bool,
    /// Every call with enough time succeeds.
    pub(super) all_succeed: bool,
}

/// How soon after a connection falls silent another one is used.
pub(super) const RECONNECTED: Duration = Duration::from_secs(1);
/// The breaker's, with their jitter.
const FIRST_PAUSE: Duration = Duration::from_millis(125);
const LONGEST_PAUSE: Duration = Duration::from_millis(625);

const BOTH: &[Direction] = &[ToServer, ToClient];

/// This seed's faults, in order, and when all of them are over.
pub(super) fn script(chance: &mut Chance, topology: Topology) -> (Vec<Injection>, Duration) {
    // Sometimes a single fault, to see its effect alone.
    let (count, last) = if chance.one_in(3) { (1, 800) } else { (chance.between(2, 7), chance.between(1500, 5000)) };
    let mut faults: Vec<_> = (0..count).map(|_| fault(chance, topology, last)).collect();
    // A crashed server stays away long enough that its successor must be found.
    if let [Injection { length, what: What::FailsOver { .. }, .. }] = faults.as_mut_slice() {
        *length = Duration::from_secs(8);
    }
    faults.sort_by_key(|fault| fault.at);
    let end = faults.iter().map(Injection::end).max().unwrap_or_default();
    (faults, end)
}

/// One outage of the only server, of any length from a millisecond to 12 seconds.
pub(super) fn outage(chance: &mut Chance) -> Injection {
    let digits = chance.between(1, 13);
    let length = chance.ms(1, 1 << digits).min(Duration::from_secs(12));
    let at = chance.ms(0, 5000);
    let what = match chance.below(6) {
        0 | 1 => What::Restarts { keeps: true, loading: Duration::ZERO },
        2 => What::ConnectsHang { everywhere: true },
        3 => What::Freezes,
        _ => What::BlackHole {
            hole: chance.pick(&[Hole::Held, Hole::Lost]),
            directions: chance.pick(&[BOTH, &[ToClient], &[ToServer]]),
            new: true,
            everywhere: true,
        },
    };
    Injection { at, length, server: 0, what, chance: Chance::new(chance.draw(), 0) }
}

pub(super) fn expected(faults: &[Injection], end: Duration, confirmed: bool) -> Expected {
    let first = faults.iter().map(|fault| fault.at).min().unwrap_or_default();
    // The breaker's pause is about as long as the outage was, but no shorter than its first.
    let pauses = (end - first).clamp(FIRST_PAUSE, LONGEST_PAUSE);
    let (well_from, only_connections_fail_from) = match faults {
        [Injection { at, what: What::BlackHole { new: false, everywhere: false, .. }, .. }] => {
            (end + RECONNECTED, Some(*at))
        }
        // The crashed server is still away by then, and all others know its successor.
        [Injection { at, length, what: What::FailsOver { crashes: true, .. }, .. }] if !confirmed => {
            (*at + *length / 2 + RECONNECTED, None)
        }
        _ => (end + RECONNECTED + pauses, None),
    };
    let is_mild = |fault: &Injection| {
        matches!(fault.what, What::Resets | What::CutsReplyAfter(_) | What::FlushesScripts | What::ReplicaLags)
    };
    Expected {
        well_from,
        only_connections_fail_from,
        nodes_agree: !faults.iter().any(|fault| {
            matches!(fault.what, What::FailsOver { .. } | What::Restarts { .. } | What::CrashesAfter { .. })
        }),
        is_always_asked: faults.len() <= 2 && faults.iter().all(is_mild),
        all_succeed: faults
            .iter()
            .all(|fault| matches!(fault.what, What::FlushesScripts | What::MovesSlots { splits: false, .. })),
    }
}

fn fault(chance: &mut Chance, topology: Topology, last: u64) -> Injection {
    let at = chance.ms(200, last);
    let length = if chance.one_in(3) { chance.ms(1, 100) } else { chance.ms(50, 2000) };
    let server = match topology {
        Topology::OneNode => 0,
        // Some are for the Sentinels.
        Topology::Sentinel if chance.one_in(4) => chance.between(2, 4) as usize,
        Topology::Sentinel => 0,
        Topology::Cluster => chance.below(3) as usize,
    };
    let special = topology != Topology::OneNode && chance.one_in(4);
    let what = match chance.below(30) {
        _ if special && topology == Topology::Cluster && chance.one_in(2) => {
            What::MovesSlots { group: chance.below(super::slots::GROUPS as u64) as usize, splits: chance.one_in(2) }
        }
        _ if special => What::FailsOver { crashes: chance.one_in(2), kills: chance.one_in(2) },
        0 => What::Delays(0, chance.between(5, 30)),
        1 => What::Delays(chance.between(5, 40), chance.between(40, 300)),
        2..=6 => What::BlackHole {
            hole: chance.pick(&[Hole::Held, Hole::Lost, Hole::Lost]),
            directions: chance.pick(&[BOTH, BOTH, &[ToClient], &[ToServer]]),
            new: chance.one_in(3),
            everywhere: chance.one_in(4),
        },
        7 => What::Resets,
        8 | 9 => What::CutsReplyAfter(chance.below(200) as usize),
        10 => What::ClosesIdleAfter(chance.ms(1, 200)),
        11 => What::Refuses,
        12 => What::ConnectsHang { everywhere: chance.one_in(3) },
        13 | 14 => What::Freezes,
        15 => What::Restarts { keeps: chance.one_in(2), loading: chance.ms(0, 500) },
        16 | 17 => What::CrashesAfter { commands: chance.between(1, 20) as u32, keeps: chance.one_in(2) },
        18 => What::IsBusy,
        19 => What::RefusesWrites(chance.pick(&[
            "OOM command not allowed when used memory > 'maxmemory'.",
            "NOREPLICAS Not enough good replicas to write.",
            "MISCONF Redis is configured to save RDB snapshots, but it's currently unable to persist to disk.",
        ])),
        20 if topology == Topology::Cluster => What::RefusesScripts(DOWN, false),
        20 => {
            let why = "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.";
            What::RefusesScripts(why, chance.one_in(2))
        }
        21 => What::PausesWrites,
        22 => What::IsSlow(chance.ms(1, 40)),
        23 if topology != Topology::OneNode => What::ReplicaLags,
        23 => What::Resets,
        24 | 25 => What::FlushesScripts,
        26 => What::IsBusy,
        27 => What::RefusesScripts("LOADING Redis is loading the dataset in memory", chance.one_in(2)),
        28 => {
            let why = "BUSY Redis is busy running a script. You can only call SCRIPT KILL.";
            What::RefusesScripts(why, chance.one_in(2))
        }
        _ => What::Resets,
    };
    Injection { at, length, server, what, chance: Chance::new(chance.draw(), 0) }
}

/// Plays all of them, and repairs everything at the end.
pub(super) async fn play(network: &Arc<Network>, faults: &[Injection], end: Duration) {
    let began = Instant::now();
    let each = faults.iter().map(|fault| {
        let (mut fault, network) = (fault.clone(), Arc::clone(network));
        async move {
            sleep_until(began + fault.at).await;
            network.medium.note(|| fault.to_string());
            fault.play(&network).await;
        }
    });
    join_all(each).await;
    sleep_until(began + end).await;
    heal(network);
}

fn heal(network: &Network) {
    network.medium.note(|| "all is well".into());
    network.medium.set_delay((0, 2));
    for server in network.servers() {
        server.start(true);
        server.state().trouble = Trouble::default();
        server.thaw();
        network.set_reach(server.at, Reach::Open);
    }
    network.wires().iter().for_each(|wire| wire.climb_out());
    // Servers that missed a change learn the slot map.
    let servers = network.servers();
    let primary = primary_of(network, 0).at;
    for server in &servers {
        if let Role::Sentinel(named) = &mut server.state().role {
            *named = primary;
        }
    }
    let mut owners = None;
    for server in servers.iter().filter(|server| server.state().role == Role::Primary) {
        let mut state = server.state();
        if let Some(slots) = &mut state.slots {
            let owned = owners.get_or_insert(slots.owners);
            let own = slots.owners.iter().enumerate().filter(|(_, owner)| **owner == server.at);
            own.for_each(|(group, _)| owned[group] = server.at);
        }
    }
    if let Some(mut owners) = owners {
        // A replaced primary owns nothing.
        owners.iter_mut().for_each(|owner| *owner = primary_of(network, *owner).at);
        servers.iter().for_each(|server| server.state().slots.as_mut().expect("slots").owners = owners);
    }
}

impl Injection {
    pub(super) fn end(&self) -> Duration {
        self.at + self.length
    }

    /// Whether what was sent before its end may arrive after it.
    pub(super) fn delivers_late(&self) -> bool {
        matches!(self.what, What::Freezes | What::BlackHole { hole: Hole::Held, .. })
    }

    async fn play(&mut self, network: &Arc<Network>) {
        let server = primary_of(network, self.server);
        let at = server.at;
        match self.what.clone() {
            What::Delays(first, last) => {
                network.medium.set_delay((first, last.max(first)));
                sleep(self.length).await;
                network.medium.set_delay((0, 2));
            }
            What::BlackHole { hole, directions, new, everywhere } => {
                let those: Vec<_> = if everywhere { network.servers() } else { vec![Arc::clone(&server)] };
                for server in &those {
                    server.wires().iter().for_each(|wire| wire.fall_into(hole, directions));
                    if new {
                        network.set_reach(server.at, Reach::Hole(hole, directions));
                    }
                }
                sleep(self.length).await;
                for server in &those {
                    network.set_reach(server.at, Reach::Open);
                    server.wires().iter().for_each(|wire| wire.climb_out());
                }
            }
            What::Resets => server.drop_connections(),
            What::CutsReplyAfter(bytes) => {
                server.wires().iter().for_each(|wire| wire.cut_after(bytes));
            }
            What::ClosesIdleAfter(idle) => self.with(&server, |trouble| trouble.idle = Some(idle)).await,
            What::Refuses => self.reached(network, &[at], Reach::Refused).await,
            What::ConnectsHang { everywhere } => {
                let all: Vec<_> = network.servers().iter().map(|server| server.at).collect();
                // A hang matters only to clients that must connect.
                server.drop_connections();
                self.reached(network, if everywhere { &all } else { std::slice::from_ref(&at) }, Reach::Hangs).await;
            }
            What::Freezes => {
                server.state().trouble.frozen = true;
                sleep(self.length).await;
                server.thaw();
            }
            What::Restarts { keeps, loading } => {
                server.crash();
                sleep(self.length.saturating_sub(loading)).await;
                server.start(keeps);
                server.state().trouble.loading = true;
                sleep(loading.min(self.length)).await;
                server.state().trouble.loading = false;
            }
            What::CrashesAfter { commands, keeps } => {
                server.state().trouble.crash_after = Some(commands);
                sleep(self.length).await;
                server.state().trouble.crash_after = None;
                server.start(keeps);
            }
            What::IsBusy => self.with(&server, |trouble| trouble.busy = true).await,
            What::RefusesWrites(why) => self.with(&server, |trouble| trouble.refusal = Some(why)).await,
            What::RefusesScripts(why, some) => {
                let refuse = |trouble: &mut Trouble| (trouble.refuses_scripts, trouble.spares_some) = (Some(why), some);
                self.with(&server, refuse).await;
            }
            What::PausesWrites => {
                server.state().trouble.paused = Some(Instant::now() + self.length);
                sleep(self.length).await;
            }
            What::IsSlow(each) => self.with(&server, |trouble| trouble.slow = Some(each)).await,
            What::FlushesScripts => server.state().scripts.clear(),
            What::ReplicaLags => self.with(&server, |trouble| trouble.lags = true).await,
            What::FailsOver { crashes, kills } => self.fail_over(network, &server, crashes, kills).await,
            What::MovesSlots { group, splits } => self.move_slots(network, group, splits).await,
        }
    }

    async fn with(&self, server: &Server, sets: impl FnOnce(&mut Trouble)) {
        let run = {
            let mut state = server.state();
            sets(&mut state.trouble);
            state.run
        };
        sleep(self.length).await;
        // Another process has its own faults.
        if server.is_run(run) {
            let frozen = server.state().trouble.frozen;
            server.state().trouble = Trouble { frozen, ..Trouble::default() };
        }
    }

    async fn reached(&self, network: &Network, servers: &[usize], reach: Reach) {
        servers.iter().for_each(|at| network.set_reach(*at, reach));
        sleep(self.length).await;
        servers.iter().for_each(|at| network.set_reach(*at, Reach::Open));
    }

    /// The other servers notice after a while; the replaced primary learns of it last.
    async fn fail_over(&mut self, network: &Arc<Network>, old: &Arc<Server>, crashes: bool, kills: bool) {
        let Some(other) = old.state().other else { return };
        if old.state().role != Role::Primary || !network.server(other).is_up() {
            return;
        }
        if crashes {
            old.crash();
        }
        sleep(self.length / 4).await;
        let replica = network.server(other);
        if old.state().role != Role::Primary || !replica.is_up() || replica.state().role != Role::Replica {
            return;
        }
        old.promote_replica();
        let mut told: Vec<_> = network.servers().into_iter().map(|server| (self.chance.ms(0, 300), server)).collect();
        told.sort_by_key(|(after, server)| (*after, server.at));
        let since = Instant::now();
        for (after, server) in told {
            if server.at != old.at {
                sleep_until(since + if server.at == other { Duration::ZERO } else { after.min(self.length / 4) }).await;
                let mut state = server.state();
                if let Role::Sentinel(primary) = &mut state.role {
                    *primary = other;
                }
                if let Some(slots) = &mut state.slots {
                    slots.replace(old.at, other);
                }
            }
        }
        sleep(self.length / 2).await;
        // Unless its own replica has replaced it meanwhile.
        let is_succeeded = replica.state().role == Role::Primary;
        if old.is_up() && is_succeeded {
            old.demote(kills);
            if let Some(slots) = &mut old.state().slots {
                slots.replace(old.at, other);
            }
        } else {
            old.start(true);
        }
    }

    /// Moves a few keys at a time.
    async fn move_slots(&mut self, network: &Arc<Network>, group: usize, splits: bool) {
        const STEPS: u32 = 4;
        let has = |server: &Arc<Server>| {
            let state = server.state();
            state.role == Role::Primary && state.slots.as_ref().is_some_and(|slots| slots.owners[group] == server.at)
        };
        let Some(from) = network.servers().into_iter().find(has) else { return };
        let to = primary_of(network, (from.at % 3 + 1 + self.chance.below(2) as usize) % 3);
        let well = |server: &Server| server.is_up() && server.state().role == Role::Primary;
        let under_way =
            |server: &Server| server.state().slots.as_ref().is_some_and(|slots| !slots.migrating.is_empty());
        if !well(&from) || !well(&to) || under_way(&from) || to.at == from.at {
            return;
        }
        from.state().slots.as_mut().expect("slots").migrating.insert(group, to.at);
        to.state().slots.as_mut().expect("slots").importing.insert(group, from.at);
        let (runs, mut moved) = ((from.state().run, to.state().run), true);
        for step in 1..=STEPS {
            sleep(self.length / (STEPS + 1)).await;
            moved &= well(&from) && well(&to) && from.is_run(runs.0) && to.is_run(runs.1);
            if moved {
                let sum = |key: &[u8]| key.iter().map(|byte| u32::from(*byte)).sum::<u32>();
                let which = |key: &[u8]| match splits {
                    true => sum(key) % STEPS < step,
                    false => sum(request_key(key).as_bytes()) % STEPS < step,
                };
                carry(&from, &to, |key| group_of(key) == group && which(key));
            }
        }
        for server in [&from, &to] {
            let mut state = server.state();
            let slots = state.slots.as_mut().expect("slots");
            slots.migrating.remove(&group);
            slots.importing.remove(&group);
        }
        if !moved {
            // Keys carried over already are lost.
            network.medium.ledger().emptied += 1;
            return;
        }
        for server in [&to, &from] {
            server.state().slots.as_mut().expect("slots").owners[group] = to.at;
        }
        for server in network.servers() {
            sleep(self.chance.ms(0, 40)).await;
            server.state().slots.as_mut().expect("slots").owners[group] = to.at;
        }
    }
}

fn carry(from: &Server, to: &Server, which: impl Fn(&[u8]) -> bool) {
    let mut moving = std::mem::take(&mut from.state().store);
    let keys = moving.move_to(&mut to.state().store, which);
    let mut source = from.state();
    source.store = moving;
    source.unsynced.extend_from_slice(&keys);
    drop(source);
    to.state().unsynced.extend_from_slice(&keys);
    to.medium.ledger().carried += keys.len();
}

/// The current primary among a server and its replica.
fn primary_of(network: &Network, at: usize) -> Arc<Server> {
    let server = network.server(at);
    let (role, other) = {
        let state = server.state();
        (state.role.clone(), state.other)
    };
    other.filter(|_| role == Role::Replica).map_or(server, |other| network.server(other))
}

impl fmt::Display for Injection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { at, length, server, what, .. } = self;
        write!(f, "{:>5} ms, for {:>4} ms, server {server}: {what:?}", at.as_millis(), length.as_millis())
    }
}
