//! Chance, from the random keys of the standard library's hash maps.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::time::Duration;

pub(crate) fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

/// The wait and, by chance, up to so many hundredths of it more.
pub(crate) fn jittered(wait: Duration, hundredths: u8) -> Duration {
    let fraction = (random() >> 11) as f64 / (1_u64 << 53) as f64;
    wait + wait.mul_f64(f64::from(hundredths) / 100.0 * fraction)
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
