//! Shared by all measurements.

use tollgate::Rule;

pub mod arguments;
pub mod callers;
pub mod options;
pub mod peers;
pub mod pipeline;
pub mod postgres;
pub mod process;
pub mod report;
pub mod server;

/// Does nothing, with a reply about as large as a decision's. Called with one key and five arguments, it is what
/// everything is compared with: ratios to it carry over between machines, times don't.
pub const NO_OP: &str = "return {1,2,3,4}";

/// The rule with these limits.
///
/// # Panics
/// If it can't be parsed.
#[must_use]
pub fn rule(text: &str) -> Rule {
    Rule::new("bench", text).unwrap_or_else(|error| panic!("{text}: {error}"))
}

/// A stream of random numbers: xorshift, as cheap as possible, and the same in every run.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    pub fn seeded(seed: u64) -> Self {
        Self(0x9e37_79b9_7f4a_7c15 ^ ((seed + 1) << 20))
    }
}

impl Iterator for Random {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        Some(self.0)
    }
}
