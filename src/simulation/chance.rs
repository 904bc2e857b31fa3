//! Random draws from a seed.

use std::time::Duration;

use crate::random::seeded::next;

/// Each source of randomness is separate, so that more draws from one don't change the others.
#[derive(Clone, Debug)]
pub(super) struct Chance(u64);

impl Chance {
    pub(super) fn new(seed: u64, what: u64) -> Self {
        let mut state = seed.wrapping_mul(0x2545_f491_4f6c_dd1d) ^ what.wrapping_mul(0x9e6d_62d0_6f6a_9a9b);
        next(&mut state);
        Self(state)
    }

    pub(super) fn draw(&mut self) -> u64 {
        next(&mut self.0)
    }

    /// From 0 up to, but excluding, `end`.
    pub(super) fn below(&mut self, end: u64) -> u64 {
        self.draw() % end.max(1)
    }

    pub(super) fn between(&mut self, first: u64, last: u64) -> u64 {
        first + self.below(last - first + 1)
    }

    pub(super) fn one_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }

    pub(super) fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u64) as usize]
    }

    pub(super) fn ms(&mut self, first: u64, last: u64) -> Duration {
        Duration::from_millis(self.between(first, last))
    }
}
