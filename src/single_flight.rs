//! Work that many callers wait for and one does, such as connecting.

use std::sync::Arc;

use tokio::sync::Notify;
use tokio::sync::futures::Notified;
use tokio::time::Instant;

use crate::lock::Lock;

/// Only one caller at a time does the work. The others wait until it ends and check the result; if there is none, one
/// of them begins. The turn isn't handed to a particular one, whose future may no longer be polled.
#[derive(Debug, Default)]
pub(crate) struct SingleFlight {
    running: Lock<Running>,
    ended: Notify,
}

#[derive(Debug, Default)]
struct Running {
    /// Which work is in progress, and when it counts as stuck.
    current: Option<(u64, Option<Instant>)>,
    begun: u64,
}

/// The work in progress. However it is dropped, another may begin.
#[derive(Debug)]
pub(crate) struct Flight {
    of: Arc<SingleFlight>,
    number: u64,
}

impl SingleFlight {
    /// Begins the work. None while it is in progress. From `stuck_at` on, another may begin beside it: a runtime that
    /// is blocked, or that nobody drives any more, doesn't end what it began.
    pub(crate) fn begin(self: &Arc<Self>, stuck_at: Option<Instant>) -> Option<Flight> {
        let mut running = self.running.lock();
        if running.current.is_some_and(|(_, stuck_at)| stuck_at.is_none_or(|at| Instant::now() < at)) {
            return None;
        }
        running.begun += 1;
        running.current = Some((running.begun, stuck_at));
        Some(Flight { of: Arc::clone(self), number: running.begun })
    }

    /// The next end of the work, counted from this call, not from the first poll.
    pub(crate) fn ended(&self) -> Notified<'_> {
        self.ended.notified()
    }
}

impl Flight {
    /// Whether no other has begun in place of this one.
    pub(crate) fn is_current(&self) -> bool {
        self.of.running.lock().current.is_some_and(|(number, _)| number == self.number)
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        {
            let mut running = self.of.running.lock();
            // Another may have begun in place of this one.
            running.current.take_if(|(number, _)| *number == self.number);
        }
        self.of.ended.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn one_at_a_time_and_all_who_wait_hear_of_its_end() {
        let work = Arc::new(SingleFlight::default());
        let first = work.begin(None).unwrap();
        tokio::time::advance(Duration::from_secs(3_600)).await;
        assert!(work.begin(None).is_none());
        let (one, other) = (work.ended(), work.ended());
        drop(first);
        tokio::join!(one, other);
        assert!(work.begin(None).is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_stuck_is_replaced_and_its_end_ends_nothing_else() {
        let work = Arc::new(SingleFlight::default());
        let stuck_at = Instant::now() + Duration::from_secs(2);
        let stuck = work.begin(Some(stuck_at)).unwrap();
        assert!(work.begin(None).is_none());
        tokio::time::advance(Duration::from_secs(2)).await;
        let second = work.begin(None).unwrap();
        assert!(second.is_current() && !stuck.is_current());
        drop(stuck);
        assert!(work.begin(None).is_none());
        drop(second);
        assert!(work.begin(None).is_some());
    }
}
