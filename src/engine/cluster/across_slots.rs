//! Whether a node decides on keys of several slots in one call.
//!
//! Such a call declares no keys, and its script has the flag `allow-cross-slot-keys`. A server that is out of memory
//! refuses a script with flags before it runs, a proxy may route calls by the keys that they declare, and another
//! server program may know no flags. Then calls are made slot by slot, and declare their keys.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use crate::lock::Lock;

/// How long a node that has refused isn't asked that way. Trying again costs one batch a round trip.
const PAUSE: Duration = Duration::from_secs(60);

#[derive(Debug, Default)]
pub(super) struct AcrossSlots {
    /// Read by every call.
    are_refused: AtomicBool,
    /// When they may be tried again.
    next: Lock<Option<Instant>>,
}

impl AcrossSlots {
    pub(super) fn are_allowed(&self) -> bool {
        if !self.are_refused.load(Ordering::Relaxed) {
            return true;
        }
        let next = self.next.lock();
        let allowed = next.is_none_or(|next| next <= Instant::now());
        if allowed {
            self.are_refused.store(false, Ordering::Relaxed);
        }
        allowed
    }

    pub(super) fn refused(&self) {
        let mut next = self.next.lock();
        *next = Some(Instant::now() + PAUSE);
        self.are_refused.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_node_that_refuses_is_tried_again_after_a_pause() {
        let calls = AcrossSlots::default();
        assert!(calls.are_allowed());
        calls.refused();
        assert!(!calls.are_allowed());
        tokio::time::advance(PAUSE - Duration::from_millis(1)).await;
        assert!(!calls.are_allowed());
        tokio::time::advance(Duration::from_millis(1)).await;
        assert!(calls.are_allowed() && calls.are_allowed());
        calls.refused();
        assert!(!calls.are_allowed());
    }
}
