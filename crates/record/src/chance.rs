//! Randomness: jitter, and unique names.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The wait, plus a random share of it: up to so many percent.
pub(crate) fn jittered(wait: Duration, percent: u8) -> Duration {
    wait + wait.mul_f64(f64::from(percent) / 100.0 * fastrand::f64())
}

/// A name that no other process has, counted within this one.
pub(crate) fn unique_id(what: &str) -> String {
    static NAMES: AtomicU64 = AtomicU64::new(0);
    format!("{what}-{:016x}{:016x}-{}", drawn(), drawn(), NAMES.fetch_add(1, Ordering::Relaxed))
}

/// A random number that no other process draws.
pub(crate) fn mark() -> i64 {
    drawn().cast_signed()
}

/// From the system's generator, if it works: two processes that share a state, as after a fork or on a cloned machine,
/// would draw the same numbers and lose batches.
fn drawn() -> u64 {
    getrandom::u64().unwrap_or_else(|_| fastrand::u64(..))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jitter_makes_a_wait_longer_by_its_part_at_most_and_not_always_the_same() {
        let wait = Duration::from_secs(10);
        let waits: Vec<_> = (0..100).map(|_| jittered(wait, 20)).collect();
        assert!(waits.iter().all(|jittered| (wait..=wait * 12 / 10).contains(jittered)));
        assert!(waits.iter().any(|jittered| *jittered != waits[0]));
        assert_eq!(jittered(wait, 0), wait);
    }

    #[test]
    fn no_two_names_are_alike() {
        let (one, other) = (unique_id("service"), unique_id("service"));
        assert!(one.starts_with("service-"), "{one}");
        assert_ne!(one, other);
    }
}
