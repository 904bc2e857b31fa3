//! A constant rate: when each call is due, and a thread that signals it in time.
//!
//! The runtime's timers have a resolution of milliseconds. A thread's sleep is late by some tens of microseconds, so
//! this thread sleeps until shortly before a call is due and spins for the rest: for at most a tenth of the time
//! between two calls, so that it never takes much of a core. Any remaining delay counts as latency, and is reported.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::watch;

/// The longest that the thread spins before a call is due.
const SPIN: Duration = Duration::from_micros(100);

#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    pub(super) start: Instant,
    pub(super) per_second: u64,
    /// How many calls there are.
    pub(super) calls: u64,
}

impl Pace {
    /// When a call is due, by its number from 0. Each is rounded down separately, so that errors don't add up.
    pub(super) fn due(&self, number: u64) -> Instant {
        let (seconds, rest) = (number / self.per_second, number % self.per_second);
        // At most a second's calls times the nanoseconds in a second.
        let nanos = u128::from(rest) * 1_000_000_000 / u128::from(self.per_second);
        self.start + Duration::from_secs(seconds) + Duration::from_nanos(u64::try_from(nanos).unwrap_or_default())
    }

    /// Sends how many calls are due, from a thread that ends with the last call, or soon after `stop` is set.
    pub(super) fn keep(self, stop: Arc<AtomicBool>) -> watch::Receiver<u64> {
        let (told, due) = watch::channel(0);
        std::thread::spawn(move || {
            let spin = SPIN.min(Duration::from_secs(1) / u32::try_from(self.per_second * 10).unwrap_or(u32::MAX));
            let mut number = 0;
            while number < self.calls && !stop.load(Ordering::Relaxed) {
                let next = self.due(number);
                if !wait_until(next, spin, &stop) {
                    return;
                }
                let now = Instant::now();
                while number < self.calls && self.due(number) <= now {
                    number += 1;
                }
                if told.send(number).is_err() {
                    return;
                }
            }
        });
        due
    }
}

/// Waits until the time; false if stopped first.
fn wait_until(due: Instant, spin: Duration, stop: &AtomicBool) -> bool {
    /// How soon a stop is noticed.
    const NAP: Duration = Duration::from_millis(50);
    loop {
        let left = due.saturating_duration_since(Instant::now());
        if left <= spin {
            break;
        }
        if stop.load(Ordering::Relaxed) {
            return false;
        }
        std::thread::sleep((left - spin).min(NAP));
    }
    while Instant::now() < due {
        std::hint::spin_loop();
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_due_at_a_constant_rate_that_does_not_drift() {
        let pace = Pace { start: Instant::now(), per_second: 3, calls: 10 };
        let after = |number| pace.due(number) - pace.start;
        assert_eq!(after(0), Duration::ZERO);
        assert_eq!(after(1), Duration::from_nanos(333_333_333));
        assert_eq!(after(2), Duration::from_nanos(666_666_666));
        assert_eq!(after(3_000_000), Duration::from_secs(1_000_000));
    }

    #[tokio::test]
    async fn all_calls_come_due_and_none_before_its_time() {
        let pace = Pace { start: Instant::now(), per_second: 10_000, calls: 200 };
        let mut due = pace.keep(Arc::default());
        while due.changed().await.is_ok() {
            let number = *due.borrow_and_update();
            assert!(Instant::now() >= pace.due(number - 1), "{number}");
        }
        assert_eq!(*due.borrow(), 200);
    }
}
