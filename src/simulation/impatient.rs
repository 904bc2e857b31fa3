//! Many callers with less time than a round trip takes, beside one with enough of it, in an outage of seconds. Whatever
//! the many do, the one is answered again within a second of the servers' return.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::join_all;
use tokio::runtime::Handle;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::chance::Chance;
use super::network::{Network, Reach};
use super::oracle::Verdict;
use super::run::{Run, alone, build, opener};
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
const AFTER: Duration = Duration::from_millis(2500);
const BOTH: &[Direction] = &[ToServer, ToClient];

#[derive(Clone, Copy, Debug)]
enum Outage {
    Crash,
    Hangs,
    Freezes,
    /// Nothing comes through; if it is lost, not even later.
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

/// When a call of the patient caller began, and whether it was answered, in milliseconds.
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
    // As in a service with little traffic, or all the time.
    let every = Duration::from_millis(chance.pick(&[1000, 1000, 10]));
    let mut run = alone(seed, simulate(seed, topology, outage, asking, length, every));
    run.shown = format!("seed {seed} ({topology:?}, {outage:?} for {length:?}, {asking:?}, every {every:?}) broke\n");
    run.verdict.broken.iter().for_each(|broken| run.shown += &format!("  BROKEN: {broken}\n"));
    run.shown += &format!("  again: bash tests/simulate.sh --seeds 1 --from {seed} --trace\n");
    run
}

async fn simulate(
    seed: u64,
    topology: Topology,
    outage: Outage,
    asking: Asking,
    length: Duration,
    every: Duration,
) -> Run {
    let network = Network::new(Chance::new(seed, 4), 262_144);
    NETWORK.set(Some(Arc::clone(&network)));
    let url = build(&network, topology);
    network.medium.set_delay(DELAYS);
    let limiter = Limiter::new(opener(&network).open_engine(url).expect("an address"));
    let before = Handle::current().metrics().num_alive_tasks();
    let begins = Instant::now() + Chance::new(seed, 5).ms(200, 1200);
    let (returns, last) = (begins + length, begins + length + AFTER);
    let impatient = (0..CALLERS).map(|caller| {
        let (limiter, chance) = (limiter.clone(), Chance::new(seed, 100 + caller as u64));
        tokio::spawn(ask_impatiently(limiter, asking, chance, last))
    });
    let impatient: Vec<_> = impatient.collect();
    let asked = Asked::default();
    let patient = ask_patiently(limiter.clone(), Arc::clone(&network), every, Arc::clone(&asked), last);
    let patient = tokio::spawn(patient);
    sleep_until(begins).await;
    begin(&network, outage);
    sleep_until(returns).await;
    let returned = network.medium.ms();
    end(&network);
    let mut broken = Vec::new();
    if timeout(2 * AFTER, join_all(impatient.into_iter().chain([patient]))).await.is_err() {
        broken.push("a caller didn't end".to_owned());
    }
    let well_from = returned + (RECOVERY + ROUND_TRIPS).as_millis() as u64;
    let asked = std::mem::take(&mut *asked.lock().expect("nobody panicked"));
    let answered = asked.iter().filter(|(began, answered)| *answered && *began >= returned).count();
    let unanswered = asked.iter().filter(|(_, answered)| !answered);
    let last = unanswered.clone().map(|(began, _)| *began).max().unwrap_or_default();
    if answered == 0 || last > well_from {
        broken.push(format!("not answered at {last} ms, though all is well since {returned} ms"));
    }
    let (calls, failed, recovered) = (asked.len(), unanswered.count(), last.saturating_sub(returned));
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

/// More callers with less time than a round trip takes than can be sent, all the time, beside some with enough of it:
/// as soon as the many have given up, the others' calls are sent.
pub(super) fn crowd(seed: u64) -> Run {
    const ROUND_TRIP: u64 = 30;
    const CALLERS: usize = 1000;
    const PATIENT: usize = 64;
    const LONGEST: Duration = Duration::from_millis(500);
    let mut run = alone(seed, async {
        let network = Network::new(Chance::new(seed, 4), 262_144);
        NETWORK.set(Some(Arc::clone(&network)));
        let url = build(&network, Topology::OneNode);
        let limiter = Limiter::builder(opener(&network).open_engine(url).expect("an address"))
            .deadline(Duration::from_secs(5))
            .build();
        let rule = rule("gcra 1000000/1s, fixed-window 1000000/1s");
        limiter.acquire(&rule, "first").await.expect("a decision");
        network.medium.set_delay((ROUND_TRIP / 2, ROUND_TRIP / 2 + 1));
        let impatient = (0..CALLERS).map(|caller| {
            let (limiter, rule, key) = (limiter.clone(), rule.clone(), format!("impatient {caller}"));
            let begins = Chance::new(seed, 100 + caller as u64).ms(0, 20);
            tokio::spawn(async move {
                sleep(begins).await;
                loop {
                    let request = Request::new(&key).deadline(Duration::from_millis(20));
                    let _ = limiter.acquire(&rule, request).await;
                }
            })
        });
        let impatient: Vec<_> = impatient.collect();
        let patient = (0..PATIENT).map(|caller| {
            let (limiter, rule, key) = (limiter.clone(), rule.clone(), format!("patient {caller}"));
            let mut chance = Chance::new(seed, 10_000 + caller as u64);
            async move {
                let mut longest = Duration::ZERO;
                for _ in 0..5 {
                    sleep(chance.ms(0, 100)).await;
                    let began = Instant::now();
                    limiter.acquire(&rule, &key).await.expect("a decision");
                    longest = longest.max(began.elapsed());
                }
                longest
            }
        });
        let longest = join_all(patient).await.into_iter().max().unwrap_or_default();
        impatient.iter().for_each(tokio::task::JoinHandle::abort);
        let late = (longest > LONGEST).then(|| format!("a caller with enough time waited {longest:?}"));
        let (digest, recovered) = (network.medium.digest(), longest.as_millis() as u64);
        network.forget();
        let broken = late.into_iter().collect();
        Run { verdict: Verdict { broken, calls: 5 * PATIENT, failed: 0, recovered }, digest, shown: String::new() }
    });
    run.shown = format!("seed {seed} broke: {:?}\n", run.verdict.broken);
    run
}

fn rule(text: &str) -> Rule {
    Rule::new("impatient", text).expect("a name")
}

async fn ask_impatiently(limiter: Limiter, asking: Asking, mut chance: Chance, last: Instant) {
    let (one, two) = (rule("gcra 1000000/1s"), rule("gcra 1000000/1s, fixed-window 1000000/1s"));
    while Instant::now() < last {
        let key = format!("impatient {}", chance.below(20));
        let request = Request::new(&key).deadline(IMPATIENT);
        let began = Instant::now();
        match asking {
            Asking::ByDeadline => drop(limiter.acquire(&one, request).await),
            Asking::GivingUp => drop(timeout(IMPATIENT, limiter.acquire(&one, &*key)).await),
            Asking::OfTwoLimits => drop(limiter.acquire(&two, request).await),
            Asking::Many => drop(limiter.acquire_many(&one, [request, request]).await),
            Asking::Peeking => drop(limiter.peek(&one, request).await),
        }
        // While calls are refused, somebody is always about to probe.
        let refused = Instant::now() == began;
        sleep(if refused { chance.ms(1, 10) } else { chance.ms(20, 100) }).await;
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
