//! Closed-loop callers: each calls again as soon as it gets a reply.

use std::future::Future;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use tokio::task::JoinHandle;

use crate::Random;

/// The results of one time slice with a number of callers.
#[derive(Clone, Copy, Debug)]
pub struct Slice {
    pub calls: u64,
    pub allowed: u64,
    pub per_second: f64,
    pub p99_us: f64,
}

/// Runs this many callers for this long. `ask` gets a random number, and returns whether the call was allowed.
pub async fn callers<F, A>(count: usize, time: Duration, ask: F) -> Slice
where
    F: Fn(u64) -> A + Copy + Send + 'static,
    A: Future<Output = bool> + Send,
{
    let started = Instant::now();
    let until = started + time;
    let caller = |number: usize| async move {
        // A list is written sequentially: a histogram for each caller would push everything else out of the cache.
        let mut latencies_ns = Vec::<u32>::with_capacity(4096);
        let mut allowed = 0;
        for random in Random::seeded(number as u64) {
            let sent = Instant::now();
            if sent >= until {
                break;
            }
            allowed += u64::from(ask(random).await);
            latencies_ns.push(u32::try_from(sent.elapsed().as_nanos()).unwrap_or(u32::MAX));
        }
        (latencies_ns, allowed)
    };
    let tasks: Vec<_> = (0..count).map(|number| tokio::spawn(caller(number))).collect();
    summed(tasks, started).await
}

/// The same, where all callers together call so many times a second. Latency counts from the time at which a call was
/// due, so that a late one isn't hidden by what it delays.
pub async fn paced<F, A>(count: usize, per_second: u64, time: Duration, ask: F) -> Slice
where
    F: Fn(u64) -> A + Copy + Send + 'static,
    A: Future<Output = bool> + Send,
{
    let (started, between) = (Instant::now(), Duration::from_secs(1) * count as u32 / per_second as u32);
    let caller = |number: usize| async move {
        let (mut latencies, mut allowed) = (Vec::<u32>::with_capacity(4096), 0);
        let mut due = started + between * number as u32 / count as u32;
        for random in Random::seeded(number as u64) {
            if due >= started + time {
                break;
            }
            tokio::time::sleep_until(due.into()).await;
            let sent = Instant::now();
            allowed += u64::from(ask(random).await);
            // The runtime's timers have a resolution of a millisecond, which isn't the callee's.
            let late = sent.saturating_duration_since(due);
            let late = late.saturating_sub(Duration::from_millis(2));
            latencies.push(u32::try_from((sent.elapsed() + late).as_nanos()).unwrap_or(u32::MAX));
            due += between;
        }
        (latencies, allowed)
    };
    let tasks: Vec<_> = (0..count).map(|number| tokio::spawn(caller(number))).collect();
    summed(tasks, started).await
}

/// What callers that were started then have done.
async fn summed(tasks: Vec<JoinHandle<(Vec<u32>, u64)>>, started: Instant) -> Slice {
    let mut done = Vec::with_capacity(tasks.len());
    for task in tasks {
        done.push(task.await.expect("a caller that was answered"));
    }
    let seconds = started.elapsed().as_secs_f64();

    let mut latencies = Histogram::<u64>::new_with_bounds(1, u32::MAX.into(), 3).expect("good bounds");
    done.iter().flat_map(|(all, _)| all).for_each(|ns| latencies.saturating_record((*ns).into()));
    Slice {
        calls: latencies.len(),
        allowed: done.iter().map(|(_, allowed)| allowed).sum(),
        per_second: latencies.len() as f64 / seconds,
        p99_us: latencies.value_at_quantile(0.99) as f64 / 1000.0,
    }
}

/// The slices of each variant. In every round the variants take turns, after a short unmeasured slice of each.
pub async fn in_turn<V: Copy>(
    variants: impl Iterator<Item = V> + Clone,
    rounds: usize,
    time: Duration,
    slice: impl AsyncFn(V, Duration) -> Slice,
) -> Vec<Vec<Slice>> {
    for variant in variants.clone() {
        slice(variant, Duration::from_millis(50)).await;
    }
    let mut slices: Vec<_> = variants.clone().map(|_| Vec::with_capacity(rounds)).collect();
    for _ in 0..rounds {
        for (slices, variant) in slices.iter_mut().zip(variants.clone()) {
            slices.push(slice(variant, time).await);
        }
    }
    slices
}
