//! Work done after callers have gone: giving back permits, settling costs, cancelling reservations.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tokio::runtime::Handle;
use tokio::sync::Notify;

use super::Limiter;
use crate::decision::Decision;
use crate::error::Error;
use crate::random::jittered;

/// The pause before the second try. It doubles with each try, up to the longest; jitter makes it up to twice as long,
/// so that clients don't all come back at once.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// A failure later than this after the first one isn't retried.
const PATIENCE: Duration = Duration::from_secs(15);

/// The tasks of a limiter and its clones.
#[derive(Clone, Debug, Default)]
pub(super) struct Background {
    running: Arc<Running>,
}

#[derive(Debug, Default)]
struct Running {
    tasks: AtomicUsize,
    none_left: Notify,
}

/// One task, until it has ended or no runtime is left to run it.
struct Task<W: Work> {
    running: Arc<Running>,
    work: Option<W>,
    /// Where to restart it if its own runtime ends first.
    otherwise: Option<Handle>,
}

/// Work that can be restarted. Its result says whether the runtime was able to run it.
pub(crate) trait Work: Fn() -> Self::Doing + Send + 'static {
    type Doing: Future<Output = bool> + Send;
}

impl<W, D> Work for W
where
    W: Fn() -> D + Send + 'static,
    D: Future<Output = bool> + Send,
{
    type Doing = D;
}

impl Limiter {
    /// Runs this on the current runtime; if there is none, or it ends too early, on this one.
    pub(crate) fn spawn(&self, runtime: &Handle, work: impl Work) {
        let running = Arc::clone(&self.background.running);
        running.tasks.fetch_add(1, Ordering::AcqRel);
        let work = Some(work);
        match Handle::try_current() {
            Ok(current) => Task { running, work, otherwise: Some(runtime.clone()) }.start(&current),
            Err(_) => Task { running, work, otherwise: None }.start(runtime),
        }
    }

    /// Waits until this limiter and its clones have finished their background work: giving back dropped permits,
    /// settling costs, cancelling reservations, returning leased units. A runtime that ends drops what is left of it,
    /// so call this after a server has shut down gracefully, and before `main` returns. While Redis is away, that work
    /// is retried for some seconds; put a timeout around this call to bound the wait.
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

impl<W: Work> Task<W> {
    fn start(mut self, runtime: &Handle) {
        runtime.spawn(async move {
            let fits = match &self.work {
                Some(work) => work().await,
                None => true,
            };
            if fits {
                drop(self.work.take());
            }
        });
    }
}

impl<W: Work> Drop for Task<W> {
    fn drop(&mut self) {
        if let (Some(work), Some(runtime)) = (self.work.take(), self.otherwise.take()) {
            let running = Arc::clone(&self.running);
            running.tasks.fetch_add(1, Ordering::AcqRel);
            Self { running, work: Some(work), otherwise: None }.start(&runtime);
        }
        if self.running.tasks.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.running.none_left.notify_waiters();
        }
    }
}

/// Retries an idempotent call for a while, as long as Redis is away.
pub(crate) async fn persist<F: Future<Output = Result<Decision, Error>>>(attempt: impl Fn() -> F) -> Result<(), Error> {
    let (mut pause, mut began) = (FIRST_PAUSE, None);
    loop {
        let failure = match attempt().await {
            Ok(Decision { error: None, .. }) => return Ok(()),
            Ok(Decision { error: Some(error), .. }) => Error::clone(&error),
            Err(error) => error,
        };
        if !failure.goes_to_policy() || began.get_or_insert_with(Instant::now).elapsed() > PATIENCE {
            return Err(failure);
        }
        tokio::time::sleep(jittered(pause, 100)).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}
