//! Many callers with less time than a round trip takes, beside two with enough of it, in an outage of seconds. Whatever
//! the many do, the two are answered again within a second of the servers' return.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::join_all;
use tokio::runtime::Handle;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::chance::Chance;
use super::network::{Network, Reach};
use super::oracle::Verdict;
use super::run::{Run, alone, build};
use super::wire::Direction::{ToClient, ToServer};
use super::wire::{Direction, Hole};
use super::{NETWORK, Topology};
use crate::{Limiter, Request, Rule};

const CALLERS: usize = 100;
/// The time of each of them; and of a message, in milliseconds, of which a round trip takes two.
const IMPATIENT: Duration = Duration::from_millis(1);
const DELAYS: (u64, u64) = (2, 3);
const PATIENT: Duration = Duration::from_millis(500);
const RECOVERY: Duration = Duration::from_secs(1);
/// For a connection, the slots of a cluster, and the answer; and for messages that are lost and sent again.
const ROUND_TRIPS: Duration = Duration::from_millis(250);
const AFTER: Duration = Duration::from_secs(3);
const BOTH: &[Direction] = &[ToServer, ToClient];

#[derive(Clone, Copy, Debug)]
enum Outage {
    Crash,
    Hangs,
    Freezes,
    /// Nothing comes through, of what is sent meanwhile not even later.
    Hole(Hole),
}

/// How the impatient callers ask.
#[derive(Clone, Copy, Debug)]
enum Asking {
    ByDeadline,
    /// They drop their futures instead.
    GivingUp,
    OfTwoLimits,
    Many,
    Peeking,
}

/// When a call of a patient caller began, and whether it was answered, in milliseconds.
type Asked = Arc<Mutex<Vec<(u64, bool)>>>;

pub(super) fn run(seed: u64) -> Run {
    let mut chance = Chance::new(seed, 2);
    let topology = chance.pick(&[Topology::OneNode, Topology::OneNode, Topology::Sentinel, Topology::Cluster]);
    let outage = chance.pick(&[
        Outage::Crash,
        Outage::Crash,
        Outage::Hangs,
        Outage::Freezes,
        Outage::Hole(Hole::Held),
        Outage::Hole(Hole::Lost),
    ]);
    let asking = chance.pick(&[
        Asking::ByDeadline,
        Asking::ByDeadline,
        Asking::GivingUp,
        Asking::OfTwoLimits,
        Asking::Many,
        Asking::Peeking,
    ]);
    let length = if chance.one_in(2) { Duration::from_secs(3) } else { chance.ms(1, 8_000) };
    let mut run = alone(seed, simulate(seed, topology, outage, asking, length));
    run.shown = format!("seed {seed} ({topology:?}, {outage:?} for {length:?}, impatient callers: {asking:?}) broke\n");
    run.verdict.broken.iter().for_each(|broken| run.shown += &format!("  BROKEN: {broken}\n"));
    run.shown += &format!("  again: bash tests/simulate.sh --seeds 1 --from {seed} --trace\n");
    run
}

async fn simulate(seed: u64, topology: Topology, outage: Outage, asking: Asking, length: Duration) -> Run {
    let network = Network::new(Chance::new(seed, 4), 262_144);
    NETWORK.set(Some(Arc::clone(&network)));
    let url = build(&network, topology);
    network.medium.set_delay(DELAYS);
    let limiter = Limiter::new(crate::Engine::open(url).expect("an address"));
    let before = Handle::current().metrics().num_alive_tasks();
    let begins = Instant::now() + Chance::new(seed, 5).ms(1000, 2000);
    let (returns, last) = (begins + length, begins + length + AFTER);
    let impatient = (0..CALLERS).map(|caller| {
        let (limiter, chance) = (limiter.clone(), Chance::new(seed, 100 + caller as u64));
        tokio::spawn(ask_impatiently(limiter, asking, chance, last))
    });
    let impatient: Vec<_> = impatient.collect();
    // One asks once a second, as in a service with little traffic, and one all the time.
    let asked: [Asked; 2] = Default::default();
    let patient =
        [(Duration::from_secs(1), &asked[0]), (Duration::from_millis(10), &asked[1])].map(|(every, asked)| {
            let (limiter, network, asked) = (limiter.clone(), Arc::clone(&network), Arc::clone(asked));
            tokio::spawn(ask_patiently(limiter, network, every, asked, last))
        });
    sleep_until(begins).await;
    begin(&network, outage);
    sleep_until(returns).await;
    let returned = network.medium.ms();
    end(&network);
    let mut broken = Vec::new();
    if timeout(2 * AFTER, join_all(patient.into_iter().chain(impatient))).await.is_err() {
        broken.push("a caller didn't end".to_owned());
    }
    let (mut calls, mut failed, mut recovered) = (0, 0, 0);
    let well_from = returned + (RECOVERY + ROUND_TRIPS).as_millis() as u64;
    for (who, asked) in ["once a second", "all the time"].into_iter().zip(asked) {
        let asked = asked.lock().expect("nobody panicked");
        let answered = asked.iter().filter(|(began, answered)| *answered && *began >= returned).count();
        let unanswered = asked.iter().filter(|(_, answered)| !answered);
        let last = unanswered.clone().map(|(began, _)| *began).max().unwrap_or_default();
        (calls, failed) = (calls + asked.len(), failed + unanswered.count());
        recovered = recovered.max(last.saturating_sub(returned));
        if answered == 0 || last > well_from {
            broken.push(format!("asked {who}: not answered at {last} ms, though all is well since {returned} ms"));
        }
    }
    drop(limiter);
    sleep(Duration::from_secs(12)).await;
    let left = Handle::current().metrics().num_alive_tasks() - before;
    if left > 0 {
        broken.push(format!("{left} tasks are left after all was dropped"));
    }
    let digest = network.medium.digest();
    network.forget();
    Run { verdict: Verdict { broken, calls, failed, recovered }, digest, shown: String::new() }
}

fn rule(text: &str) -> Rule {
    text.parse::<Rule>().expect(text).named("impatient").expect("a name")
}

async fn ask_impatiently(limiter: Limiter, asking: Asking, mut chance: Chance, last: Instant) {
    let (one, two) = (rule("gcra 1000000/1s"), rule("gcra 1000000/1s, fixed-window 1000000/1s"));
    while Instant::now() < last {
        let key = format!("impatient {}", chance.below(20));
        let request = Request::new(&key).deadline(IMPATIENT);
        match asking {
            Asking::ByDeadline => drop(limiter.acquire(&one, request).await),
            Asking::GivingUp => drop(timeout(IMPATIENT, limiter.acquire(&one, &*key)).await),
            Asking::OfTwoLimits => drop(limiter.acquire(&two, request).await),
            Asking::Many => drop(limiter.acquire_many(&one, [request, request]).await),
            Asking::Peeking => drop(limiter.peek(&one, request).await),
        }
        sleep(chance.ms(10, 100)).await;
    }
}

async fn ask_patiently(limiter: Limiter, network: Arc<Network>, every: Duration, asked: Asked, last: Instant) {
    let (rule, mut number) = (rule("gcra 1000000/1s"), 0);
    while Instant::now() < last {
        let (began, next) = (network.medium.ms(), Instant::now() + every);
        // On all nodes in turn.
        number += 1;
        let request = format!("patient {number}");
        let answer = limiter.acquire(&rule, Request::new(&request).deadline(PATIENT)).await;
        network.medium.note(|| format!("{began}: every {every:?}: {:?}", answer.as_ref().map(|_| ())));
        asked.lock().expect("nobody panicked").push((began, answer.is_ok()));
        sleep_until(next).await;
    }
}

fn begin(network: &Network, outage: Outage) {
    network.medium.note(|| format!("{outage:?}"));
    for server in network.servers() {
        match outage {
            Outage::Crash => server.crash(),
            Outage::Hangs => {
                server.drop_connections();
                network.set_reach(server.at, Reach::Hangs);
            }
            Outage::Freezes => server.state().trouble.frozen = true,
            Outage::Hole(hole) => {
                server.wires().iter().for_each(|wire| wire.fall_into(hole, BOTH));
                network.set_reach(server.at, Reach::Hole(hole, BOTH));
            }
        }
    }
}

fn end(network: &Network) {
    network.medium.note(|| "all is well".into());
    for server in network.servers() {
        server.start(true);
        server.thaw();
        network.set_reach(server.at, Reach::Open);
        server.wires().iter().for_each(|wire| wire.climb_out());
    }
}
