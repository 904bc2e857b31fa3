//! Warnings of what every request may meet.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// Warns, unless such a warning was given in the same second, so that none fills the log.
pub(crate) fn warn_seldom(warn: impl FnOnce()) {
    static LAST: AtomicU64 = AtomicU64::new(0);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    if LAST.swap(now, Ordering::Relaxed) != now {
        warn();
    }
}
