//! The clock of the server that decides, as far as this process knows it.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use crate::limit::system_us;

/// How far ahead of this machine's clock the server's is, in microseconds: 0 until a call with windows of the calendar
/// was refused, since the server's time had left them. Shared by clones of a limiter.
#[derive(Clone, Debug, Default)]
pub(super) struct ServerClock(Arc<AtomicI64>);

impl ServerClock {
    pub(super) fn ahead_us(&self) -> i64 {
        self.0.load(Ordering::Relaxed)
    }

    /// The server says that this is its time.
    pub(super) fn heard(&self, server_us: u64) {
        let server_us = i64::try_from(server_us).unwrap_or(i64::MAX);
        self.0.store(server_us.saturating_sub(system_us()), Ordering::Relaxed);
    }
}
