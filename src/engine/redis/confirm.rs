//! How many replicas must have what a call took.

use std::time::Duration;

/// How often Redis checks whether a WAIT has timed out, with its default `hz`.
pub(super) const WAIT_CHECK: Duration = Duration::from_millis(100);

/// How many replicas must have what a call wrote, and how long that may take.
#[derive(Clone, Copy, Debug)]
pub(in crate::engine) struct Confirm {
    pub(super) replicas: u8,
    pub(super) within: Duration,
}

impl Confirm {
    pub(in crate::engine) fn by(replicas: u8, within: Duration) -> Option<Self> {
        (replicas > 0).then_some(Self { replicas, within })
    }

    /// Limits the wait of a call to half of the time left less [`WAIT_CHECK`], or to a quarter of the time left if that
    /// is more. The call may have to wait twice: a server that has lost the script makes it wait for earlier writes as
    /// well.
    pub(super) fn before(self, left: Duration) -> Self {
        let most = (left / 2).saturating_sub(WAIT_CHECK).max(left / 4);
        Self { within: self.within.min(most), ..self }
    }
}
