//! What is done after callers have gone: permits are given back, costs settled, reservations cancelled.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::Notify;

use super::Limiter;
use crate::decision::Decision;
use crate::error::Error;
use crate::runtime;

const PAUSES: [Duration; 3] = [Duration::from_millis(200), Duration::from_secs(1), Duration::from_secs(5)];

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

/// One of them, until it has ended or was dropped with its runtime.
struct Task {
    running: Arc<Running>,
}

impl Limiter {
    /// Runs this on the runtime that it is called on or, outside of any, on this one. Where that has ended, it is dropped.
    pub(crate) fn spawn(&self, runtime: &Handle, work: impl Future<Output = ()> + Send + 'static) {
        let running = Arc::clone(&self.background.running);
        running.tasks.fetch_add(1, Ordering::AcqRel);
        let task = Task { running };
        let current = runtime::with_timers();
        current.as_ref().unwrap_or(runtime).spawn(async move {
            work.await;
            drop(task);
        });
    }

    /// Waits until this limiter and its clones have done what they do after their callers have gone: given back permits
    /// that were dropped, settled costs, cancelled reservations, returned leased units. A runtime that ends drops what is
    /// left of that, so call this after a server has shut down gracefully, and before `main` returns. Where Redis is away
    /// they are tried again for some seconds; a timeout around this bounds that.
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
            // Before it is counted, so that no end is missed.
            let none_left = running.none_left.notified();
            if running.tasks.load(Ordering::Acquire) == 0 {
                return;
            }
            none_left.await;
        }
    }
}

/// Does what may be done twice, again after each of some pauses as long as Redis is away.
pub(crate) async fn persist<F: Future<Output = Result<Decision, Error>>>(attempt: impl Fn() -> F) -> Result<(), Error> {
    let mut pauses = PAUSES.into_iter();
    loop {
        let failure = match attempt().await {
            Ok(Decision { error: None, .. }) => return Ok(()),
            Ok(Decision { error: Some(error), .. }) => Error::clone(&error),
            Err(error) => error,
        };
        match pauses.next() {
            Some(pause) if failure.goes_to_policy() && runtime::with_timers().is_ok() => {
                tokio::time::sleep(pause).await;
            }
            _ => return Err(failure),
        }
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        if self.running.tasks.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.running.none_left.notify_waiters();
        }
    }
}
