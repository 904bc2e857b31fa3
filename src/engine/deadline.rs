//! The time by which a call must be answered.

use std::time::Duration;

use tokio::time::Instant;

use crate::error::Error;
use crate::runtime::LONGEST_WAIT;

/// How long a call may take, and the instant at which that time is over.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadline {
    pub(super) at: Instant,
    length: Duration,
}

impl Deadline {
    pub(crate) fn after(length: Duration) -> Self {
        Self::counted_from(Instant::now(), length)
    }

    pub(crate) fn counted_from(began: Instant, length: Duration) -> Self {
        Self { at: began + length.min(LONGEST_WAIT), length }
    }

    /// The time left.
    pub(crate) fn left(self) -> Duration {
        self.at.saturating_duration_since(Instant::now())
    }

    /// The error if no time is left.
    pub(crate) fn check(self) -> Result<(), Error> {
        if self.left().is_zero() { Err(self.missed(false)) } else { Ok(()) }
    }

    /// The error of a call that missed it, before or after it was sent.
    pub(super) fn missed(self, sent: bool) -> Error {
        Error::deadline(self.length, sent)
    }
}
