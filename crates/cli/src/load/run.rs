//! Makes the calls: at a constant rate regardless of replies (open loop), or by callers who each call again on the
//! reply (closed loop).

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fastrand::Rng;
use tokio::sync::Semaphore;
use tollgate::{Decision, Error, Limiter, Request};

use super::clock::Timeline;
use super::keys::Keys;
use super::pace::Pace;
use super::tally::{Tally, Times};
use crate::subject::Subject;

/// The most calls that await their replies at once: further ones are counted as unsent.
const OUTSTANDING: usize = 100_000;

/// The limiter, the calls to make, and the counts of their results. Shared by all calls.
#[derive(Debug)]
pub(super) struct Run {
    pub(super) limiter: Limiter,
    pub(super) subject: Subject,
    /// Whether calls hold permits that must be released.
    pub(super) holds: bool,
    pub(super) cost: u64,
    pub(super) keys: Keys,
    pub(super) seed: u64,
    pub(super) bounds: Bounds,
    pub(super) timeline: Timeline,
    pub(super) tally: Mutex<Tally>,
    /// Set to end the run early.
    pub(super) stop: Arc<AtomicBool>,
}

/// When a run ends: whichever bound comes first.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    /// Precedes the measurement.
    pub(super) warmup: Duration,
    pub(super) duration: Option<Duration>,
    pub(super) count: Option<u64>,
}

impl Bounds {
    /// The share of the run that is over, from 0 to 1, after this time and number of measured calls.
    pub(super) fn share(&self, elapsed: Duration, measured: u64) -> f64 {
        let of_time = |duration: Duration| elapsed.as_secs_f64() / (self.warmup + duration).as_secs_f64().max(1e-9);
        let by_time = self.duration.map_or(0.0, of_time);
        let by_count = self.count.map_or(0.0, |count| measured as f64 / count as f64);
        by_time.max(by_count).min(1.0)
    }
}

impl Run {
    pub(super) fn tally(&self) -> MutexGuard<'_, Tally> {
        self.tally.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends every call when it is due, whether or not earlier ones got replies. Its latency counts from then, so that
    /// waiting caused by a slow Redis is measured, not left out.
    pub(super) async fn open(self: &Arc<Self>, per_second: u64) {
        let warmup = calls_in(self.bounds.warmup, per_second);
        let by_time = self.bounds.duration.map(|duration| calls_in(duration, per_second).max(1));
        let measured = by_time.unwrap_or(u64::MAX).min(self.bounds.count.unwrap_or(u64::MAX));
        let pace = Pace { start: Instant::now(), per_second, calls: warmup.saturating_add(measured) };
        let room = Arc::new(Semaphore::new(OUTSTANDING));
        let mut chance = Rng::with_seed(self.seed);
        let mut due = pace.keep(Arc::clone(&self.stop));
        let mut number = 0;
        while due.changed().await.is_ok() {
            let until = *due.borrow_and_update();
            for number in number..until {
                let (key, is_measured) = (self.keys.draw(&mut chance), number >= warmup);
                let Ok(place) = Arc::clone(&room).try_acquire_owned() else {
                    self.tally().leave_unsent(is_measured);
                    continue;
                };
                let (run, due) = (Arc::clone(self), pace.due(number));
                tokio::spawn(async move {
                    run.call(key, Some(due), is_measured).await;
                    drop(place);
                });
            }
            number = until;
        }
        // Calls in flight end by their deadlines. The semaphore is never closed.
        let _ = room.acquire_many(OUTSTANDING as u32).await;
        self.tally().planned = Some(pace.due(number.max(warmup)) - pace.due(warmup));
    }

    pub(super) async fn closed(self: &Arc<Self>, callers: u32) {
        let start = Instant::now() + self.bounds.warmup;
        let end = self.bounds.duration.map(|duration| start + duration);
        let measured = Arc::new(AtomicU64::new(0));
        let all: Vec<_> = (0..callers)
            .map(|caller| {
                let (run, measured) = (Arc::clone(self), Arc::clone(&measured));
                // Each caller draws its own keys, the same in every run with this seed.
                let mut chance = Rng::with_seed(run.seed.wrapping_add(u64::from(caller)));
                tokio::spawn(async move {
                    while !run.stop.load(Ordering::Relaxed) && end.is_none_or(|end| Instant::now() < end) {
                        let is_measured = Instant::now() >= start;
                        let most = run.bounds.count.unwrap_or(u64::MAX);
                        if is_measured && measured.fetch_add(1, Ordering::Relaxed) >= most {
                            return;
                        }
                        run.call(run.keys.draw(&mut chance), None, is_measured).await;
                        // The embedded engine never yields, so other tasks get a turn here.
                        tokio::task::yield_now().await;
                    }
                })
            })
            .collect();
        for caller in all {
            // A caller doesn't panic.
            let _ = caller.await;
        }
    }

    async fn call(&self, key: u32, due: Option<Instant>, is_measured: bool) {
        let ((name, parts), rule) = (self.subject.drawn(key), &self.subject.rule);
        let parts: Vec<_> = parts.iter().map(|(name, value)| (name.as_str(), value.as_slice())).collect();
        let own_costs = self.subject.own_costs();
        let request = Request::new(&name).parts(&parts).costs(&own_costs).cost(self.cost);
        let sent = Instant::now();
        let (answer, permit) = if self.holds {
            match self.limiter.hold(rule, request).await {
                Ok(held) => (Ok(held.decision), held.permit),
                Err(error) => (Err(error), None),
            }
        } else {
            (self.limiter.acquire(rule, request).await, None)
        };
        let times = Times { due: due.unwrap_or(sent), sent, answered: Instant::now() };
        self.count(key, times, is_measured, &answer);
        if let Some(permit) = permit {
            let released = permit.release().await.is_ok();
            self.tally().unreleased += u64::from(!released);
        }
    }

    fn count(&self, key: u32, times: Times, is_measured: bool, answer: &Result<Decision, Error>) {
        let mut tally = self.tally();
        if is_measured {
            tally.measure(times, answer);
        } else {
            tally.warm_up(answer);
        }
        tally.glance(times, answer);
        tally.note(key, self.timeline.at(times.sent), self.timeline.at(times.answered), answer);
    }
}

fn calls_in(time: Duration, per_second: u64) -> u64 {
    let calls = time.as_nanos().saturating_mul(u128::from(per_second)) / 1_000_000_000;
    u64::try_from(calls).unwrap_or(u64::MAX)
}
