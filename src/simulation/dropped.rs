//! What callers drop while Redis is unreachable, for however long: waits, settled costs, leases and permits. Whatever
//! is given back late, or twice, no more is admitted than the rules say.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::join_all;
use tokio::runtime::Handle;
use tokio::time::{Instant, sleep, timeout};

use super::chance::Chance;
use super::faults::{self, Injection};
use super::network::Network;
use super::oracle::Verdict;
use super::run::{Run, alone, build, opener, shown};
use super::{NETWORK, Topology};
use crate::algorithm::Algorithm;
use crate::{Decision, Limit, Limiter, Request, Rule};

/// How long callers go on after the outage, and before it at most.
const AROUND: Duration = Duration::from_secs(5);
/// After this, everything that anything could wait for has ended: the longest wait, and tries to give back for 15 s.
const AFTER: Duration = Duration::from_secs(25);
const LONGEST_DEADLINE: Duration = Duration::from_millis(500);

const WAITS: [&str; 5] = [
    "token-bucket 20/1s burst 20 max-debt 200",
    "gcra 30/1s burst 10 max-debt 300",
    "fixed-window 40/1s max-debt 200",
    "token-bucket 30/2s burst 60 max-debt 60, token-bucket 40/1s burst 40 max-debt 100",
    "sliding-log 40/1s",
];
const SETTLED: [&str; 3] = ["token-bucket 20/1s burst 60", "sliding-log 40/2s", "sliding-window 40/1s"];
const LEASED: [&str; 2] = ["token-bucket 40/1s burst 60", "fixed-window 120/3s"];
const PROCESSES: NonZeroU32 = NonZeroU32::new(2).unwrap();
const PERMITS: &str = "concurrency 3 ttl 1m";
/// These expire while they are held.
const SHORT_PERMITS: &str = "concurrency 3 ttl 2s";

/// All that callers got, in milliseconds of simulated time.
#[derive(Default)]
struct Got {
    calls: usize,
    failed: usize,
    /// Units by key, each with the time of its answer or the end of its wait.
    units: BTreeMap<&'static str, Vec<(u64, u64)>>,
    /// Permits by key, from when until when.
    permits: BTreeMap<&'static str, Vec<(u64, u64)>>,
}

struct Callers {
    limiter: Limiter,
    network: Arc<Network>,
    got: Mutex<Got>,
}

pub(super) fn run(seed: u64) -> Run {
    let outage = faults::outage(&mut Chance::new(seed, 2));
    let mut run = alone(seed, simulate(seed, &outage));
    run.shown = shown(seed, "dropped while Redis is unreachable", std::slice::from_ref(&outage), &run.verdict);
    run
}

async fn simulate(seed: u64, outage: &Injection) -> Run {
    let network = Network::new(Chance::new(seed, 4), 262_144);
    NETWORK.set(Some(Arc::clone(&network)));
    let engine = opener(&network).open(build(&network, Topology::OneNode)).expect("an address");
    let limiter = Limiter::new(engine);
    let before = Handle::current().metrics().num_alive_tasks();
    let callers = Arc::new(Callers { limiter, network: Arc::clone(&network), got: Mutex::default() });
    let last = Instant::now() + outage.end() + AROUND;
    let tasks: Vec<_> = (0..12)
        .map(|caller| tokio::spawn(Arc::clone(&callers).call(caller, Chance::new(seed, 100 + caller), last)))
        .collect();
    faults::play(&network, std::slice::from_ref(outage), outage.end()).await;
    let mut broken = Vec::new();
    if timeout(AROUND + AFTER, join_all(tasks)).await.is_err() {
        broken.push("a caller didn't end".into());
    }
    sleep(AFTER).await;
    broken.extend(callers.judge(outage).await);
    let (calls, failed) = {
        let got = callers.got.lock().expect("nobody panicked");
        (got.calls, got.failed)
    };
    drop(callers);
    sleep(AFTER).await;
    let left = Handle::current().metrics().num_alive_tasks() - before;
    if left > 0 {
        broken.push(format!("{left} tasks are left after all was dropped"));
    }
    let digest = network.medium.digest();
    network.forget();
    Run { verdict: Verdict { broken, calls, failed, recovered: 0 }, digest, shown: String::new() }
}

fn rule(text: &str) -> Rule {
    Rule::new("dropped", text).expect("a name")
}

impl Callers {
    async fn call(self: Arc<Self>, caller: u64, mut chance: Chance, last: Instant) {
        while Instant::now() < last {
            match caller % 4 {
                0 | 1 => self.wait(&mut chance).await,
                2 => self.hold(&mut chance).await,
                _ if chance.one_in(4) => self.lease(&mut chance).await,
                _ => self.settle(&mut chance, caller).await,
            }
            sleep(chance.ms(0, 300)).await;
        }
    }

    async fn wait(&self, chance: &mut Chance) {
        let text = chance.pick(&WAITS);
        let rule = rule(text);
        let cost = chance.between(1, rule.limits().map(Limit::capacity).min().unwrap_or_default());
        let request = Request::new(text).cost(cost).deadline(deadline(chance));
        let wait = self.limiter.acquire_wait(&rule, request, chance.ms(0, 10_000));
        // Some are dropped while they sleep, some while their answer is on the way.
        let patience = if chance.one_in(3) { chance.ms(0, 50) } else { chance.ms(0, 15_000) };
        let answer = timeout(patience, wait).await;
        self.count(answer.as_ref().is_ok_and(Result::is_err));
        if let Ok(Ok(Decision { allowed: true, .. })) = answer {
            self.admitted(text, cost);
        }
    }

    /// By an id, settled to a lower cost than it had, or cancelled, some time later and perhaps by two tasks.
    async fn settle(&self, chance: &mut Chance, caller: u64) {
        let text = chance.pick(&SETTLED);
        let (rule, id) = (rule(text), format!("{caller}-{}", self.network.medium.ms()));
        let (cost, deadline) = (chance.between(1, 40), deadline(chance));
        let used = if chance.one_in(2) { 0 } else { chance.between(1, cost) };
        let request = Request::new(text).id(&id).cost(cost).deadline(deadline);
        let answer = self.limiter.acquire(&rule, request).await;
        self.count(answer.is_err());
        let Ok(decision @ Decision { allowed: true, .. }) = answer else { return };
        self.admitted(text, used);
        for _ in 0..chance.between(1, 2) {
            sleep(chance.ms(0, 3_000)).await;
            let after = request.after(&decision).cost(used);
            // Whether it came through doesn't matter: it never gives back more than is owed.
            let _ = match used {
                0 => self.limiter.cancel(&rule, after).await,
                _ => self.limiter.settle(&rule, after).await,
            };
        }
    }

    async fn lease(&self, chance: &mut Chance) {
        let text = chance.pick(&LEASED);
        let Ok(lease) = self.limiter.lease(&rule(text), text, PROCESSES) else { return };
        let until = Instant::now() + chance.ms(100, 6_000);
        while Instant::now() < until {
            let cost = chance.between(1, 4);
            let answer = lease.acquire(cost).await;
            self.count(answer.is_err());
            if answer.is_ok_and(|decision| decision.allowed) {
                self.admitted(text, cost);
            }
            sleep(chance.ms(0, 40)).await;
        }
    }

    async fn hold(&self, chance: &mut Chance) {
        let text = chance.pick(&[PERMITS, SHORT_PERMITS]);
        let (rule, began) = (rule(text), self.network.medium.ms());
        let request = Request::new(text).deadline(deadline(chance));
        let waits = self.limiter.hold_wait(&rule, request, chance.ms(0, 2_000));
        let held = timeout(chance.ms(0, 4_000), waits).await;
        self.count(held.as_ref().is_ok_and(Result::is_err));
        let Ok(Ok(held)) = held else { return };
        let Some(permit) = held.permit else { return };
        let from = self.network.medium.ms();
        let permit = if chance.one_in(2) { permit.renewed() } else { permit };
        sleep(chance.ms(0, 3_000)).await;
        // Some time of its ttl had passed when the answer came.
        let ttl = rule.limits().map(Limit::period).min().unwrap_or_default().as_millis() as u64;
        let until = self.network.medium.ms().min(began + ttl);
        self.got().permits.entry(text).or_default().push((from, until));
        match chance.one_in(3) {
            true => drop(permit.release().await),
            false => drop(permit),
        }
    }

    fn got(&self) -> std::sync::MutexGuard<'_, Got> {
        self.got.lock().expect("nobody panicked")
    }

    fn count(&self, failed: bool) {
        let mut got = self.got();
        got.calls += 1;
        got.failed += usize::from(failed);
    }

    fn admitted(&self, key: &'static str, units: u64) {
        let now = self.network.medium.ms();
        self.network.medium.note(|| format!("{units} admitted by {key}"));
        self.got().units.entry(key).or_default().push((now, units));
    }

    async fn judge(&self, outage: &Injection) -> Vec<String> {
        let mut broken = Vec::new();
        let got = std::mem::take(&mut *self.got());
        for (key, admitted) in &got.units {
            // What a lease gives back may arrive after the limit has refilled it: at most its share.
            let shares = if LEASED.contains(key) && outage.delivers_late() { u64::from(PROCESSES.get()) } else { 0 };
            for limit in rule(key).limits() {
                broken.extend(
                    exceeded(limit, admitted, limit.capacity() / 4 * shares).map(|how| format!("{key}: {how}")),
                );
            }
        }
        for (key, held) in &got.permits {
            let most = rule(key).limits().map(Limit::capacity).min().unwrap_or_default() as usize;
            let at_once = |at: u64| held.iter().filter(|(from, until)| *from <= at && at < *until).count();
            let found = held.iter().map(|(from, _)| (at_once(*from), from)).max();
            broken.extend(
                found
                    .filter(|(count, _)| *count > most)
                    .map(|(count, at)| format!("{key}: {count} permits held at once at {at} ms")),
            );
        }
        if !outage.delivers_late() {
            match self.limiter.peek(&rule(PERMITS), PERMITS).await {
                Ok(Decision { remaining: 3, .. }) => {}
                other => broken.push(format!("permits that didn't come back: {other:?}")),
            }
        }
        *self.got() = got;
        broken
    }
}

fn deadline(chance: &mut Chance) -> Duration {
    Duration::from_millis(chance.pick(&[20, 100, 100, 500, 500])).min(LONGEST_DEADLINE)
}

/// Whether more was admitted between any two times than this limit admits, which decides up to a deadline before its
/// answer comes.
fn exceeded(limit: &Limit, admitted: &[(u64, u64)], slack: u64) -> Option<String> {
    let mut admitted = admitted.to_vec();
    admitted.sort_unstable();
    let period = limit.period().as_millis() as u64;
    let most = |ms: u64| {
        let ms = ms + LONGEST_DEADLINE.as_millis() as u64 + 1;
        limit.capacity()
            + slack
            + match limit.algorithm() {
                Algorithm::FixedWindow | Algorithm::SlidingLog | Algorithm::SlidingWindow => {
                    limit.rate() * ms.div_ceil(period)
                }
                Algorithm::TokenBucket => (limit.rate() * ms).div_ceil(period),
                other @ (Algorithm::CalendarWindow | Algorithm::Concurrency) => panic!("{other}: not of these callers"),
            }
    };
    for (at, (first, _)) in admitted.iter().enumerate() {
        let mut sum = 0;
        for (last, units) in &admitted[at..] {
            sum += units;
            if sum > most(last - first) {
                let span = last - first;
                return Some(format!("{sum} units from {first} ms on within {span} ms, at most {}", most(span)));
            }
        }
    }
    None
}
