//! Turns to take units or return them: one task has the turn at a time, unless it is stuck.

use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Id;
use tokio::sync::OwnedMutexGuard;
use tokio::time::Instant;

use crate::lock::Lock;
use crate::runtime::{self, LONGEST_WAIT};

#[derive(Debug)]
pub(super) struct Turns {
    /// A turn that takes longer is stuck: its runtime is blocked.
    longest: Duration,
    current: Lock<Current>,
}

#[derive(Debug)]
struct Current {
    /// Replaced if the one who holds it is stuck.
    lock: Arc<tokio::sync::Mutex<()>>,
    /// When the last turn began, and where.
    began: Instant,
    runtime: Option<Id>,
}

#[derive(Debug)]
pub(super) struct Turn {
    lock: Arc<tokio::sync::Mutex<()>>,
    is_first: bool,
    _guard: OwnedMutexGuard<()>,
}

impl Turns {
    /// Turns of at most three calls with this deadline each.
    pub(super) fn new(deadline: Duration) -> Self {
        let current = Current { lock: Arc::default(), began: Instant::now(), runtime: None };
        Self { longest: deadline.min(LONGEST_WAIT / 3) * 3, current: Lock::new(current) }
    }

    /// The turn, unless a task has it.
    pub(super) fn try_take(&self) -> Option<Turn> {
        let mut current = self.current.lock();
        let guard = Arc::clone(&current.lock).try_lock_owned();
        let is_first = guard.is_err() && current.began.elapsed() > self.longest;
        if is_first {
            current.lock = Arc::default();
        }
        let guard = guard.or_else(|_| Arc::clone(&current.lock).try_lock_owned()).ok()?;
        Some(current.begin(guard, is_first))
    }

    /// Waits for the turn.
    pub(super) async fn take(&self) -> Turn {
        loop {
            if let Some(turn) = self.try_take() {
                return turn;
            }
            let (lock, until) = {
                let current = self.current.lock();
                (Arc::clone(&current.lock), current.began + self.longest)
            };
            let until = until.max(Instant::now() + Duration::from_millis(1));
            let Some(guard) = runtime::timeout_at(until, lock.lock_owned()).await else { continue };
            let mut current = self.current.lock();
            if Arc::ptr_eq(OwnedMutexGuard::mutex(&guard), &current.lock) {
                return current.begin(guard, false);
            }
        }
    }

    /// Until when to wait for the turn in progress, if that is worthwhile: it is on this runtime, and hasn't taken this
    /// long yet.
    pub(super) fn worth_waiting_until(&self, patience: Duration) -> Option<Instant> {
        let (current, here) = (self.current.lock(), runtime::current().ok()?.id());
        let until = current.began + patience.min(LONGEST_WAIT);
        (current.runtime == Some(here) && Instant::now() < until).then_some(until)
    }

    /// Whether nobody has replaced this one.
    pub(super) fn has(&self, turn: &Turn) -> bool {
        Arc::ptr_eq(&self.current.lock().lock, &turn.lock)
    }
}

impl Current {
    fn begin(&mut self, guard: OwnedMutexGuard<()>, is_first: bool) -> Turn {
        self.began = Instant::now();
        self.runtime = runtime::current().ok().map(|runtime| runtime.id());
        Turn { lock: Arc::clone(&self.lock), is_first, _guard: guard }
    }
}

impl Turn {
    /// Whether the turn before it is stuck, whose calls may be stuck too.
    pub(super) fn replaces_a_stuck_one(&self) -> bool {
        self.is_first
    }
}
