//! One simulation, from its seed to the verdict.

use std::cell::Cell;
use std::sync::{Arc, Once};
use std::time::Duration;

use futures_util::future::join_all;
use tokio::runtime::Handle;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::callers::Callers;
use super::chance::Chance;
use super::faults::{self, Injection};
use super::network::Network;
use super::oracle::{RECOVERY, Verdict, judge};
use super::server::Role;
use super::slots::{GROUPS, Slots};
use super::{NETWORK, Topology, network};
use crate::random::seeded;
use crate::wall_clock::simulated;
use crate::{DenialCache, Limiter, OnError, Redis, RedisBuilder};

pub(super) struct Run {
    pub(super) verdict: Verdict,
    /// The digest and the number of all events.
    pub(super) digest: (u64, u64),
    /// The seed, what was drawn from it, and what broke, as text.
    pub(super) shown: String,
}

/// Calls in a run, roughly.
const CALLS: u64 = 220;
/// After this, everything that anything could wait for has ended: the longest deadline, and the longest pause.
const AFTER: Duration = Duration::from_secs(12);

thread_local! {
    static PANICS: Cell<u64> = const { Cell::new(0) };
}

pub(super) fn run(seed: u64) -> Run {
    let topology = [Topology::OneNode, Topology::Sentinel, Topology::Cluster][(seed % 3) as usize];
    let (faults, end) = faults::script(&mut Chance::new(seed, 2), topology);
    let mut run = alone(seed, simulate(seed, topology, &faults, end));
    run.shown = shown(seed, &format!("{topology:?}"), &faults, &run.verdict);
    run
}

/// Runs this simulation on a runtime of its own, in virtual time, with this seed for all that the client draws.
pub(super) fn alone(seed: u64, simulation: impl Future<Output = Run>) -> Run {
    count_panics();
    PANICS.set(0);
    seeded::seed(Some(Chance::new(seed, 1).draw()));
    simulated::set(Some(|| network().map(|network| network.time_of_day())));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build();
    let runtime = runtime.expect("a runtime");
    let mut run = runtime.block_on(simulation);
    drop(runtime);
    NETWORK.set(None);
    simulated::set(None);
    seeded::seed(None);
    let panics = PANICS.get();
    if panics > 0 {
        run.verdict.broken.push(format!("{panics} tasks panicked"));
    }
    run
}

async fn simulate(seed: u64, topology: Topology, faults: &[Injection], end: Duration) -> Run {
    let mut chance = Chance::new(seed, 3);
    let room = chance.pick(&[4_096, 32_768, 262_144, 262_144]) as usize;
    let network = Network::new(Chance::new(seed, 4), room);
    NETWORK.set(Some(Arc::clone(&network)));
    let url = build(&network, topology);
    let resp3 = if chance.one_in(2) { "?protocol=resp3" } else { "" };
    let confirmed = topology != Topology::OneNode && chance.one_in(3);
    let opener = opener(&network).confirmed_by(u8::from(confirmed), Duration::from_millis(100));
    let engine = opener.open_engine(&format!("{url}{resp3}")).expect("an address");
    let on_error = if chance.one_in(4) { OnError::Open } else { OnError::Closed };
    let mut limiter = Limiter::builder(engine).on_error(on_error).build();
    if chance.one_in(4) {
        limiter = limiter.to_builder().denial_cache(DenialCache::new(100)).build();
    }
    let before = Handle::current().metrics().num_alive_tasks();

    let callers = Callers::new(limiter, &network);
    let began = Instant::now();
    let healed = began + end;
    let last = healed + RECOVERY + Duration::from_secs(1);
    let count = chance.pick(&[5, 8, 16, 32, 60]);
    let pause = (last - began).as_millis() as u64 * count / CALLS;
    let replication = tokio::spawn(replicate(Arc::clone(&network), chance.ms(1, if confirmed { 5 } else { 50 })));
    let tasks: Vec<_> = (0..count)
        .map(|caller| {
            let chance = Chance::new(seed, 100 + caller);
            tokio::spawn(Arc::clone(&callers).call(caller as usize, chance, pause, last))
        })
        .collect();
    faults::play(&network, faults, end).await;
    let healed = network.medium.ms();
    sleep_until(last).await;
    let aborts: Vec<_> = tasks.iter().map(|task| task.abort_handle()).collect();
    let ended = timeout(AFTER, join_all(tasks)).await;
    aborts.iter().for_each(tokio::task::AbortHandle::abort);
    let mut verdict = judge(&callers, topology, confirmed, healed, faults::expected(faults, end, confirmed));
    if ended.is_err() {
        verdict.broken.push("a caller didn't end".into());
    }

    drop(callers);
    replication.abort();
    sleep(AFTER).await;
    let left = Handle::current().metrics().num_alive_tasks() - before;
    let open = network.wires().iter().filter(|wire| wire.is_open_at_server()).count();
    if (left, open) != (0, 0) {
        verdict.broken.push(format!("{left} tasks and {open} connections are left after all was dropped"));
    }
    let digest = network.medium.digest();
    network.forget();
    Run { verdict, digest, shown: String::new() }
}

/// Creates the servers; returns the address of all of them.
pub(super) fn build(network: &Arc<Network>, topology: Topology) -> &'static str {
    let pair = |primary: usize, replica: usize| {
        network.server(primary).state().other = Some(replica);
        network.server(replica).state().other = Some(primary);
    };
    match topology {
        Topology::OneNode => {
            network.add(6379, Role::Primary);
            "redis://10.0.0.1:6379/"
        }
        Topology::Sentinel => {
            network.add(6379, Role::Primary);
            network.add(6379, Role::Replica);
            (2..5).for_each(|_| network.add(26379, Role::Sentinel(0)));
            pair(0, 1);
            "redis-sentinel://10.0.0.3:26379,10.0.0.4:26379,10.0.0.5:26379/main"
        }
        Topology::Cluster => {
            (0..3).for_each(|_| network.add(7000, Role::Primary));
            (3..6).for_each(|_| network.add(7000, Role::Replica));
            (0..3).for_each(|at| pair(at, at + 3));
            let owners = std::array::from_fn(|group| group * 3 / GROUPS);
            network.servers().iter().for_each(|server| server.state().slots = Some(Slots::new(owners)));
            "redis-cluster://10.0.0.1:7000,10.0.0.2:7000,10.0.0.3:7000"
        }
    }
}

/// What opens engines on this network.
pub(super) fn opener(network: &Arc<Network>) -> RedisBuilder {
    Redis::builder().connector(Arc::clone(network))
}

async fn replicate(network: Arc<Network>, every: Duration) {
    loop {
        sleep(every).await;
        network.servers().iter().for_each(|server| server.replicate());
    }
}

pub(super) fn shown(seed: u64, what: &str, faults: &[Injection], verdict: &Verdict) -> String {
    let mut text = format!("seed {seed} ({what}) broke\n");
    faults.iter().for_each(|fault| text += &format!("  {fault}\n"));
    let broken = &verdict.broken;
    broken.iter().take(5).for_each(|broken| text += &format!("  BROKEN: {broken}\n"));
    if broken.len() > 5 {
        text += &format!("  ... and {} more\n", broken.len() - 5);
    }
    text + &format!("  again: bash tests/simulate.sh --seeds 1 --from {seed} --trace\n")
}

/// A panic in a task goes unnoticed unless it is counted.
fn count_panics() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            PANICS.set(PANICS.get() + 1);
            before(panic);
        }));
    });
}
