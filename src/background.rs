//! Work that goes on after its callers have gone.
//!
//! One task on each runtime does it for all callers that have gone there, with a bounded number of calls at a time. A
//! call that pauses before it is tried again holds up no other, which may be for another server. The work in progress
//! is bounded: what is beyond that is dropped and counted.

use std::collections::VecDeque;
use std::fmt;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures_util::future::{BoxFuture, Either, select};
use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::sync::{Notify, Semaphore};

use crate::lock::Lock;
use crate::runtime;
use crate::telemetry;

/// Calls in progress on one runtime.
const AT_ONCE: usize = 512;
/// Calls in progress, waiting or paused of a limiter and its clones.
const MOST: usize = 8192;

/// The work of whoever shares this; clones do.
#[derive(Clone, Default)]
pub(crate) struct Background {
    running: Arc<Running>,
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

/// While it lives, [`Background::finish`] waits.
pub(crate) struct Counted {
    running: Arc<Running>,
}

/// Limits how many calls are in progress on a runtime.
#[derive(Clone, Debug)]
pub(crate) struct AtOnce {
    calls: Arc<Semaphore>,
}

impl fmt::Debug for Background {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tasks = self.running.tasks.load(Ordering::Acquire);
        f.debug_struct("Background").field("tasks", &tasks).finish_non_exhaustive()
    }
}

impl Background {
    /// A place for [work](Self::spawn), unless too much has one.
    pub(crate) fn place(&self) -> Option<Counted> {
        let another = |tasks| (tasks < MOST).then_some(tasks + 1);
        self.running.tasks.fetch_update(Ordering::AcqRel, Ordering::Acquire, another).ok()?;
        Some(Counted { running: Arc::clone(&self.running) })
    }

    /// For work that isn't [spawned](Self::spawn) here.
    pub(crate) fn count(&self) -> Counted {
        self.running.tasks.fetch_add(1, Ordering::AcqRel);
        Counted { running: Arc::clone(&self.running) }
    }

    /// Runs `work` on the current runtime; if there is none, or it ends too early, on `runtime`; and if that has ended,
    /// or perhaps nobody drives it, on the library's own. Dropped if it has no place. The output of `work` says whether
    /// the runtime was able to run it.
    pub(crate) fn spawn<D>(&self, place: Option<Counted>, runtime: &Handle, work: impl Fn(AtOnce) -> D + Send + 'static)
    where
        D: Future<Output = bool> + Send + 'static,
    {
        let Some(counted) = place else { return telemetry::background_full() };
        let work: Work = Box::new(move |at_once| Box::pin(work(at_once)));
        let (work, counted) = (Some(work), Some(counted));
        let (at, otherwise) = match Handle::try_current() {
            Ok(current) => (current, Some(runtime.clone())),
            // Nobody may be driving a runtime with a single thread just now.
            Err(_) if runtime.runtime_flavor() == RuntimeFlavor::CurrentThread => {
                (runtime::own().unwrap_or_else(|| runtime.clone()), None)
            }
            Err(_) => (runtime.clone(), None),
        };
        self.running.give(&at, Task { work, counted, otherwise, is_last: false });
    }

    /// Waits until none is left.
    pub(crate) async fn finish(&self) {
        let running = &self.running;
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

impl AtOnce {
    /// Makes the call when its turn comes.
    pub(crate) async fn call<T>(&self, call: impl Future<Output = T>) -> T {
        // It is never closed.
        let _turn = self.calls.acquire().await;
        call.await
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
