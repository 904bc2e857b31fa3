//! Reservations that wait in this process. When others leave, the debt is paid sooner than those behind them were told:
//! they learn of it by a look at what is owed, shared by all that wait for the same limits.
//!
//! A look finds when nothing is owed any more. Whoever had reserved before it was sent is paid for by then, so it may
//! proceed then at the latest: whoever reserves later waits for that debt and its own.

use std::collections::HashMap;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use futures_util::future::{Either, select};
use tokio::sync::watch;
use tokio::time::Instant;

use super::Limiter;
use super::sharded::ShardChoice;
use crate::call::Mode;
use crate::error::Error;
use crate::request::Request;
use crate::rule::Rule;
use crate::runtime;

/// How long after the reservation to look first. The time between looks doubles.
const FIRST_LOOK: Duration = Duration::from_millis(100);

#[derive(Debug, Default)]
pub(super) struct Turns {
    queues: Mutex<HashMap<Vec<u8>, Weak<Queue>>>,
}

/// Those that wait for the same limits.
#[derive(Debug)]
struct Queue {
    seen: watch::Sender<Option<Seen>>,
    looking: AtomicBool,
    /// Somebody has left since the last look was sent.
    again: AtomicBool,
}

#[derive(Clone, Copy, Debug)]
struct Seen {
    asked_at: Instant,
    /// When nothing of what was owed then is left.
    paid_at: Instant,
}

/// A place among those that wait.
pub(super) struct Place {
    turns: Arc<Turns>,
    name: Vec<u8>,
    queue: Arc<Queue>,
}

impl Limiter {
    /// Waits with a reservation whose answer has just come, until its turn; sooner if others leave.
    pub(super) async fn until_turn(
        &self,
        rule: &Rule,
        request: &Request<'_>,
        wait: Duration,
        may_look: bool,
    ) -> Result<(), Error> {
        let reserved_at = Instant::now();
        let mut turn = reserved_at + wait;
        let name = if may_look { self.queue_name(rule, request) } else { None };
        let place = name.map(|name| self.background.turns.join(name));
        let Some(Place { queue, .. }) = &place else { return runtime::sleep_until(turn).await };
        let (mut seen, mut pause) = (queue.seen.subscribe(), FIRST_LOOK);
        let mut next = reserved_at + pause;
        loop {
            let last = *seen.borrow_and_update();
            if let Some(Seen { asked_at, paid_at }) = last
                && asked_at >= reserved_at
            {
                turn = turn.min(paid_at);
            }
            if turn <= Instant::now() {
                return Ok(());
            }
            match select(pin!(runtime::sleep_until(turn.min(next))), pin!(seen.changed())).await {
                Either::Left((slept, _)) => slept?,
                Either::Right(_) => continue,
            }
            let now = Instant::now();
            if now >= turn {
                return Ok(());
            }
            let is_recent = last.is_some_and(|last| last.asked_at + pause / 2 > now);
            pause *= 2;
            next = now + pause;
            if !is_recent {
                runtime::timeout_at(turn, queue.look(self, rule, request)).await;
            }
        }
    }

    /// Looks what is still owed, for those in this process that wait for the same as a reservation just cancelled.
    pub(super) async fn move_up(&self, rule: &Rule, request: &Request<'_>) {
        let Some(name) = self.queue_name(rule, request) else { return };
        let waits = self.background.turns.queues().get(&name).is_some_and(|queue| queue.strong_count() > 0);
        if waits {
            self.background.turns.join(name).queue.look(self, rule, request).await;
        }
    }

    fn queue_name(&self, rule: &Rule, request: &Request<'_>) -> Option<Vec<u8>> {
        let mut name = self.state_keys(rule, request).ok()?;
        name.extend_from_slice(&rule.fingerprint().to_le_bytes());
        if let Some(scoped) = rule.sharded()
            && let ShardChoice::One(shard) = self.choose_shard(rule, scoped, request, Mode::Reserve)
        {
            name.extend_from_slice(&shard.to_le_bytes());
        }
        Some(name)
    }
}

impl Turns {
    fn queues(&self) -> MutexGuard<'_, HashMap<Vec<u8>, Weak<Queue>>> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn join(self: &Arc<Self>, name: Vec<u8>) -> Place {
        let mut queues = self.queues();
        let found = queues.get(&name).and_then(Weak::upgrade);
        let queue = found.unwrap_or_else(|| {
            let (seen, looking, again) = (watch::Sender::new(None), AtomicBool::new(false), AtomicBool::new(false));
            let queue = Arc::new(Queue { seen, looking, again });
            queues.insert(name.clone(), Arc::downgrade(&queue));
            queue
        });
        drop(queues);
        Place { turns: Arc::clone(self), name, queue }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut queues = self.turns.queues();
        if Arc::strong_count(&self.queue) == 1 {
            queues.remove(&self.name);
        }
    }
}

impl Queue {
    /// Asks when nothing is owed any more, once for all who want to know meanwhile.
    async fn look(&self, limiter: &Limiter, rule: &Rule, request: &Request<'_>) {
        self.again.store(true, Ordering::SeqCst);
        while self.again.load(Ordering::SeqCst) && !self.looking.swap(true, Ordering::SeqCst) {
            let _looking = Looking(self);
            self.again.store(false, Ordering::SeqCst);
            let asked_at = Instant::now();
            let owed = request.cost(0).jitter(0).within(Duration::ZERO);
            // What something else answers for Redis says nothing of its state, nor does a block.
            if let Ok(now) = limiter.decide_uncounted(rule, &owed, Mode::Peek).await
                && let (true, None, Some(wait)) = (now.allowed, &now.error, now.retry_after.duration())
            {
                self.seen.send_replace(Some(Seen { asked_at, paid_at: Instant::now() + wait }));
            }
        }
    }
}

struct Looking<'a>(&'a Queue);

impl Drop for Looking<'_> {
    fn drop(&mut self) {
        self.0.looking.store(false, Ordering::SeqCst);
    }
}
