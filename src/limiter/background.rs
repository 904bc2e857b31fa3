//! Work done after callers have gone: giving back permits, settling costs, cancelling reservations.
//!
//! One task on each runtime does it for all callers that have gone there, with a bounded number of calls at a time. A
//! call that pauses before it is tried again holds up no other, which may be for another server. The work in progress
//! is bounded: what is beyond that is dropped and counted, permits expire by their ttl, and reservations and costs stay
//! charged.

use std::collections::VecDeque;
use std::fmt;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::future::{BoxFuture, Either, select};
use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::sync::{Notify, Semaphore};
use tokio::time::Instant;

use super::Limiter;
use super::call::Call;
use super::releases::Releases;
use super::reservations::Reservations;
use crate::backoff::Backoff;
use crate::decision::Decision;
use crate::error::Error;
use crate::lock::Lock;
use crate::operation::Operation;
use crate::request::Request;
use crate::runtime;
use crate::telemetry;

/// The pauses between tries, each up to twice as long.
const PAUSES: Backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(2), 100);
/// A failure later than this after the first one isn't retried.
const PATIENCE: Duration = Duration::from_secs(15);

/// The least deadline of such a call: nobody waits for it, and one given up early would only be repeated.
const LEAST: Duration = Duration::from_millis(500);

/// Calls in progress on one runtime.
const AT_ONCE: usize = 512;
/// Calls in progress, waiting or paused of a limiter and its clones.
const MOST: usize = 8192;

/// What a limiter and its clones share beside their engine.
#[derive(Clone, Default)]
pub(super) struct Background {
    running: Arc<Running>,
    pub(super) releases: Arc<Releases>,
    pub(super) reservations: Arc<Reservations>,
}

#[derive(Default)]
struct Running {
    tasks: AtomicUsize,
    none_left: Notify,
    /// The workers that have something to do.
    workers: Lock<Vec<Arc<Worker>>>,
}

/// What waits to be done on one runtime.
struct Worker {
    runtime: Handle,
    waiting: Lock<VecDeque<Task>>,
    more: Notify,
}

/// Does a worker's work; when its runtime ends, the work moves to another.
struct AtWork {
    running: Arc<Running>,
    worker: Arc<Worker>,
}

/// Work that can be restarted on another runtime.
type Work = Box<dyn Fn(AtOnce) -> BoxFuture<'static, bool> + Send>;

/// One call, until it has ended or no runtime is left to make it.
struct Task {
    /// None once it is done.
    work: Option<Work>,
    counted: Option<Counted>,
    /// Where to restart it if its runtime ends first; then the library's own.
    otherwise: Option<Handle>,
    is_last: bool,
}

/// While it lives, [`Limiter::finish`] waits.
pub(super) struct Counted {
    running: Arc<Running>,
}

/// Limits how many calls are in progress on a runtime.
#[derive(Clone, Debug)]
pub(crate) struct AtOnce {
    calls: Arc<Semaphore>,
}

/// Hides the keys of callers.
impl fmt::Debug for Background {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tasks = self.running.tasks.load(Ordering::Acquire);
        f.debug_struct("Background").field("tasks", &tasks).finish_non_exhaustive()
    }
}

impl Background {
    /// A place for a [task](Limiter::spawn), unless too many have one.
    pub(super) fn place(&self) -> Option<Counted> {
        let another = |tasks| (tasks < MOST).then_some(tasks + 1);
        self.running.tasks.fetch_update(Ordering::AcqRel, Ordering::Acquire, another).ok()?;
        Some(Counted { running: Arc::clone(&self.running) })
    }

    /// For work that no [task](Limiter::spawn) does.
    pub(super) fn count(&self) -> Counted {
        self.running.tasks.fetch_add(1, Ordering::AcqRel);
        Counted { running: Arc::clone(&self.running) }
    }
}

impl AtOnce {
    /// Makes the call when its turn comes.
    pub(crate) async fn call<T>(&self, call: impl Future<Output = T>) -> T {
        // It is never closed.
        let _turn = self.calls.acquire().await;
        call.await
    }
}

impl Limiter {
    /// The request with a deadline that suits a call that nobody waits for.
    pub(crate) fn unhurried<'a>(&self, request: impl Into<Request<'a>>) -> Request<'a> {
        let request = request.into();
        request.deadline(request.deadline_or(self.deadline).max(LEAST))
    }

    /// Runs this on the current runtime; if there is none, or it ends too early, on this one; and if that has ended, or
    /// nobody may be driving it, on the library's own. Dropped if too much is waiting. Its result says whether the
    /// runtime was able to run it.
    pub(crate) fn spawn<D>(&self, runtime: &Handle, work: impl Fn(AtOnce) -> D + Send + 'static)
    where
        D: Future<Output = bool> + Send + 'static,
    {
        self.spawn_at(self.background.place(), runtime, work);
    }

    /// The same at this place, if there is one.
    pub(super) fn spawn_at<D>(
        &self,
        place: Option<Counted>,
        runtime: &Handle,
        work: impl Fn(AtOnce) -> D + Send + 'static,
    ) where
        D: Future<Output = bool> + Send + 'static,
    {
        let Some(counted) = place else { return telemetry::background_full() };
        let running = &self.background.running;
        let work: Work = Box::new(move |at_once| Box::pin(work(at_once)));
        let (work, counted) = (Some(work), Some(counted));
        let (at, otherwise) = match Handle::try_current() {
            Ok(current) => (current, Some(runtime.clone())),
            // A runtime with a single thread may not be driven.
            Err(_) if runtime.runtime_flavor() == RuntimeFlavor::CurrentThread => {
                (runtime::own().unwrap_or_else(|| runtime.clone()), None)
            }
            Err(_) => (runtime.clone(), None),
        };
        running.give(&at, Task { work, counted, otherwise, is_last: false });
    }

    /// Makes this call in the background, repeatedly while Redis is away, for some seconds and no later than this.
    pub(super) fn call_later(&self, runtime: &Handle, call: Call<'_>, due: Option<Instant>) {
        self.call_later_after(None, runtime, call, due);
    }

    /// The same, once this has ended.
    pub(super) fn call_later_after(
        &self,
        before: Option<BoxFuture<'static, ()>>,
        runtime: &Handle,
        call: Call<'_>,
        due: Option<Instant>,
    ) {
        let Call { rule, request, operation } = call;
        let made = Arc::new((self.clone(), rule.clone(), request.into_owned()));
        // If a runtime ends meanwhile, it ends there: another one makes the call.
        let before = Lock::new(before);
        self.spawn(runtime, move |at_once| {
            let (made, before) = (Arc::clone(&made), before.lock().take());
            async move {
                if let Some(before) = before {
                    before.await;
                }
                let (limiter, rule, request) = &*made;
                let make = || at_once.call(limiter.call(operation, rule, limiter.unhurried(request)));
                let outcome = persist_until(due, make).await;
                if operation == Operation::Cancel && matches!(outcome, Ok(true)) {
                    limiter.move_up(rule, &Request::from(request)).await;
                }
                // Nobody reads this answer.
                !outcome.is_err_and(|error| error.is_input())
            }
        });
    }

    /// Waits until this limiter and its clones have finished their background work: giving back dropped permits, and
    /// what dropped calls took on several nodes, settling costs, cancelling reservations, returning leased units. When
    /// its runtime ends, a thread of the library's own goes on with it, over a connection of its own; the end of the
    /// process drops what is left, so call this before `main` returns. While Redis is unreachable, that work is retried
    /// for some seconds; put a timeout around this call to bound the wait. At most 8,192 calls wait or run at a time
    /// for a limiter and its clones; further ones are dropped: permits expire by their ttl, and what was charged stays
    /// charged.
    ///
    /// ```
    /// # #[cfg(feature = "embedded")]
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use tollgate::{Embedded, Limiter, Rule};
    ///
    /// let limiter = Limiter::new(Embedded::new());
    /// let rule = "concurrency 1 ttl 30s".parse::<Rule>()?.named("reports")?;
    ///
    /// drop(limiter.hold(&rule, "reports").await?);
    /// limiter.finish().await;
    /// assert_eq!(limiter.peek(&rule, "reports").await?.remaining, 1);
    /// # Ok(())
    /// # }
    /// # #[cfg(not(feature = "embedded"))]
    /// # fn main() {}
    /// ```
    pub async fn finish(&self) {
        let running = &self.background.running;
        loop {
            // Registered before counting, so that no end is missed.
            let none_left = running.none_left.notified();
            if running.tasks.load(Ordering::Acquire) == 0 {
                return;
            }
            none_left.await;
        }
    }
}

impl Running {
    fn give(self: &Arc<Self>, runtime: &Handle, task: Task) {
        let mut workers = self.workers.lock();
        if let Some(worker) = workers.iter().find(|worker| worker.runtime.id() == runtime.id()) {
            // Under the lock: it isn't about to leave.
            worker.waiting.lock().push_back(task);
            worker.more.notify_one();
            return;
        }
        let waiting = Lock::new(VecDeque::from([task]));
        let worker = Arc::new(Worker { runtime: runtime.clone(), waiting, more: Notify::new() });
        workers.push(Arc::clone(&worker));
        drop(workers);
        // A runtime that has ended drops it at once.
        runtime.spawn(AtWork { running: Arc::clone(self), worker }.run());
    }

    /// Takes out a worker that has nothing left to do.
    fn leave(&self, worker: &Arc<Worker>) -> bool {
        let mut workers = self.workers.lock();
        let leaves = worker.waiting.lock().is_empty();
        if leaves {
            workers.retain(|other| !Arc::ptr_eq(other, worker));
        }
        leaves
    }
}

impl AtWork {
    async fn run(self) {
        let at_once = AtOnce { calls: Arc::new(Semaphore::new(AT_ONCE)) };
        let mut active = FuturesUnordered::new();
        loop {
            let waiting = std::mem::take(&mut *self.worker.waiting.lock());
            active.extend(waiting.into_iter().map(|task| task.run(at_once.clone())));
            if active.is_empty() {
                if self.running.leave(&self.worker) {
                    return;
                }
                continue;
            }
            match select(active.next(), pin!(self.worker.more.notified())).await {
                Either::Left(_) | Either::Right(_) => {}
            }
        }
    }
}

impl Drop for AtWork {
    fn drop(&mut self) {
        self.running.workers.lock().retain(|other| !Arc::ptr_eq(other, &self.worker));
        // Each task moves on as it is dropped.
        let left = std::mem::take(&mut *self.worker.waiting.lock());
        drop(left);
    }
}

impl Task {
    async fn run(mut self, at_once: AtOnce) {
        let working = self.work.as_ref().map(|work| work(at_once));
        let fits = match working {
            Some(working) => working.await,
            None => true,
        };
        if fits {
            drop(self.work.take());
        }
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        let (Some(work), Some(counted), false) = (self.work.take(), self.counted.take(), self.is_last) else { return };
        let otherwise = self.otherwise.take();
        let is_last = otherwise.is_none();
        if let Some(runtime) = otherwise.or_else(runtime::own) {
            let running = Arc::clone(&counted.running);
            running.give(&runtime, Self { work: Some(work), counted: Some(counted), otherwise: None, is_last });
        }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        if self.running.tasks.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.running.none_left.notify_waiters();
        }
    }
}

/// Retries an idempotent call for a while, as long as Redis is unreachable or refuses it and there is something to give
/// back: false if that time was over before an answer came.
pub(crate) async fn persist_until<F: Future<Output = Result<Decision, Error>>>(
    due: Option<Instant>,
    attempt: impl Fn() -> F,
) -> Result<bool, Error> {
    persist_while(|error| error.goes_to_policy() || error.is_refusal(), due, attempt).await
}

/// The same, as long as attempts fail like this.
pub(super) async fn persist_while<F: Future<Output = Result<Decision, Error>>>(
    may_retry: impl Fn(&Error) -> bool,
    due: Option<Instant>,
    attempt: impl Fn() -> F,
) -> Result<bool, Error> {
    let (mut pauses, mut began) = (PAUSES, None);
    loop {
        if due.is_some_and(|due| due <= Instant::now()) {
            return Ok(false);
        }
        let failure = match attempt().await {
            Ok(decision) => match decision.by.error() {
                None => return Ok(true),
                Some(error) => error.clone(),
            },
            Err(error) => error,
        };
        if !may_retry(&failure) || began.get_or_insert_with(Instant::now).elapsed() > PATIENCE {
            return Err(failure);
        }
        runtime::sleep(pauses.pause()).await?;
    }
}
