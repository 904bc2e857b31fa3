//! Chance: jitter and names, from the random keys of the standard library's hash maps.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

pub(crate) fn random() -> u64 {
    #[cfg(all(test, feature = "embedded"))]
    if let Some(drawn) = seeded::draw() {
        return drawn;
    }
    RandomState::new().build_hasher().finish()
}

/// The wait and, by chance, up to so many hundredths of it more.
pub(crate) fn jittered(wait: Duration, hundredths: u8) -> Duration {
    let fraction = (random() >> 11) as f64 / (1_u64 << 53) as f64;
    wait + wait.mul_f64(f64::from(hundredths) / 100.0 * fraction)
}

/// An id that no other call has: random for the process, counted within it.
pub(crate) fn unique_id(what: &str) -> String {
    // What is counted over the process differs from run to run.
    #[cfg(all(test, feature = "embedded"))]
    if let Some(drawn) = seeded::draw() {
        return format!("{what}-{drawn:016x}{:016x}-0", random());
    }
    static CALLS: AtomicU64 = AtomicU64::new(0);
    static PROCESS: OnceLock<u64> = OnceLock::new();
    let process = PROCESS.get_or_init(random);
    format!("{what}-{process:016x}{:016x}-{}", random(), CALLS.fetch_add(1, Ordering::Relaxed))
}

/// Chance that a seed repeats, for a thread that simulates.
#[cfg(all(test, feature = "embedded"))]
pub(crate) mod seeded {
    use std::cell::Cell;

    thread_local! {
        static STATE: Cell<Option<u64>> = const { Cell::new(None) };
    }

    /// From here on this thread draws by this seed; by the hash maps' keys again if none.
    pub(crate) fn seed(seed: Option<u64>) {
        STATE.set(seed);
    }

    pub(super) fn draw() -> Option<u64> {
        let mut state = STATE.get()?;
        let drawn = next(&mut state);
        STATE.set(Some(state));
        Some(drawn)
    }

    /// splitmix64, by Sebastiano Vigna.
    pub(crate) fn next(state: &mut u64) -> u64 {
        *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
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
}
