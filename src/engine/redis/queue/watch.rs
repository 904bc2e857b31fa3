//! Wakes callers whose deadline passes, which then find no answer. One timer serves all: a timer each would cost more
//! than the rest of a caller's work.

use std::pin::pin;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::future::{Either, select};
use tokio::sync::Notify;
use tokio::time::Instant;

use super::in_flight::Waiter;
use super::machine::{Action, Event};
use super::{Queue, earlier_of};
use crate::runtime;

/// How late a caller may be woken after its deadline. Callers with deadlines this close are woken together: checking
/// for each by itself would take quadratic time.
const GRAIN: Duration = Duration::from_millis(1);

/// Lets another watch begin if this one ends early, with the runtime it runs on.
#[derive(Debug)]
pub(super) struct WatchEnds {
    queue: Weak<Queue>,
    over: bool,
}

impl WatchEnds {
    pub(super) fn of(queue: &Arc<Queue>) -> Self {
        Self { queue: Arc::downgrade(queue), over: false }
    }

    /// Runs until nobody waits. `earlier` notifies it of an earlier deadline, or that the queue is being dropped.
    pub(super) async fn watch(&mut self, earlier: &Notify) {
        loop {
            let at = self.queue.upgrade().and_then(|queue| queue.state.lock().machine.next_check());
            let Some(at) = at else { return };
            if let Either::Right(_) = select(pin!(tokio::time::sleep_until(at + GRAIN)), pin!(earlier.notified())).await
            {
                continue;
            }
            let Some(queue) = self.queue.upgrade() else { return };
            let (mut late, mut next) = (Vec::new(), None);
            let over = {
                let (mut state, now) = (queue.state.lock(), Instant::now());
                // Returns the earliest deadline of those that it doesn't wake.
                let mut look = |waiters: &mut Vec<Waiter>| {
                    late.extend(
                        waiters.iter_mut().filter(|waiter| waiter.until <= now).filter_map(|late| late.waker.take()),
                    );
                    waiters.iter().filter(|waiter| waiter.waker.is_some()).map(|waiter| waiter.until).min()
                };
                // Thousands of batches may wait, in most of which no deadline has passed.
                for filling in state.lanes.iter_mut().flatten() {
                    if filling.earliest.is_some_and(|earliest| earliest <= now) {
                        filling.earliest = look(&mut filling.waiters);
                    }
                    next = earlier_of(next, filling.earliest);
                }
                for shared in &state.in_flight {
                    next = earlier_of(next, look(&mut shared.waiters.lock()));
                }
                // The next caller starts another watch.
                self.over = state.machine.on(Event::Checked(next)) == Action::End;
                self.over
            };
            late.into_iter().for_each(runtime::wake);
            if over {
                return;
            }
        }
    }
}

impl Drop for WatchEnds {
    fn drop(&mut self) {
        if let Some(queue) = self.queue.upgrade().filter(|_| !self.over) {
            queue.state.lock().machine.on(Event::WatchLost);
        }
    }
}
