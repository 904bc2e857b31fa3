//! Randomness: jitter and unique names, from the random keys of the standard library's hash maps. A forked process
//! inherits these keys, and all that is counted, so names have a salt that each process draws anew. Jitter and the
//! choice of a shard do without: asking for the process's id takes a system call, 0.7 µs where it was measured.

use std::fs::File;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::Read;
use std::process;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// Random for this process alone: the process that it was forked from, and that one's other forks, draw others.
static PROCESS: Salt = Salt::new();

struct Salt {
    /// The process it was drawn in; 0 if none.
    of: AtomicU32,
    drawn: AtomicU64,
}

pub(crate) fn random() -> u64 {
    #[cfg(all(test, feature = "embedded"))]
    if let Some(drawn) = seeded::draw() {
        return drawn;
    }
    RandomState::new().build_hasher().finish()
}

impl Salt {
    const fn new() -> Self {
        Self { of: AtomicU32::new(0), drawn: AtomicU64::new(0) }
    }

    /// The salt of the calling process, which has this id; drawn anew when the id has changed.
    fn of_process(&self, id: u32) -> u64 {
        if self.of.load(Ordering::Acquire) == id {
            return self.drawn.load(Ordering::Relaxed);
        }
        let mut hasher = RandomState::new().build_hasher();
        hasher.write_u32(id);
        // Two processes may have the same id one after the other. Without this file there is no fork, as on Windows.
        let mut bytes = [0; 8];
        if File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes)).is_ok() {
            hasher.write(&bytes);
        }
        let drawn = hasher.finish();
        // Two threads may draw at once: either's will do.
        self.drawn.store(drawn, Ordering::Relaxed);
        self.of.store(id, Ordering::Release);
        drawn
    }
}

/// The wait, lengthened randomly by up to this many percent.
pub(crate) fn jittered(wait: Duration, percent: u8) -> Duration {
    let fraction = (random() >> 11) as f64 / (1_u64 << 53) as f64;
    wait + wait.mul_f64(f64::from(percent) / 100.0 * fraction)
}

/// An id that no other call has: random for the process, counted within it.
pub(crate) fn unique_id(what: &str) -> String {
    // A count over the whole process would differ from run to run.
    #[cfg(all(test, feature = "embedded"))]
    if let Some(drawn) = seeded::draw() {
        return format!("{what}-{drawn:016x}{:016x}-0", random());
    }
    static CALLS: AtomicU64 = AtomicU64::new(0);
    let process = PROCESS.of_process(process::id());
    format!("{what}-{process:016x}{:016x}-{}", random(), CALLS.fetch_add(1, Ordering::Relaxed))
}

/// Random numbers that are the same for the same seed, for a thread that simulates.
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

    /// As after a fork, which leaves everything as it was but the process id.
    #[test]
    fn another_process_draws_by_another_salt() {
        let salt = Salt::new();
        let parents = salt.of_process(1);
        let inherits =
            || Salt { of: salt.of.load(Ordering::Relaxed).into(), drawn: salt.drawn.load(Ordering::Relaxed).into() };
        let (child, same_id) = (inherits(), inherits());
        assert_eq!((salt.of_process(1), child.of_process(1)), (parents, parents));
        let drawn = [parents, child.of_process(2), same_id.of_process(2), salt.of_process(3), salt.of_process(1)];
        for (at, one) in drawn.iter().enumerate() {
            assert!(drawn[..at].iter().all(|other| other != one), "{drawn:x?}");
        }
        assert_eq!(child.of_process(2), drawn[1]);
    }

    #[test]
    fn jitter_makes_a_wait_longer_by_its_part_at_most_and_not_always_the_same() {
        let wait = Duration::from_secs(10);
        let waits: Vec<_> = (0..100).map(|_| jittered(wait, 20)).collect();
        assert!(waits.iter().all(|jittered| (wait..=wait * 12 / 10).contains(jittered)));
        assert!(waits.iter().any(|jittered| *jittered != waits[0]));
        assert_eq!(jittered(wait, 0), wait);
    }
}
