//! Calls that nobody waits for: giving back permits, settling costs, cancelling reservations. What the background has
//! no room for is dropped: permits expire by their ttl, and reservations and costs stay charged.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::runtime::Handle;
use tokio::time::Instant;

use super::call::Call;
use super::handle::Limiter;
use crate::background::AtOnce;
use crate::backoff::Backoff;
use crate::decision::Decision;
use crate::error::Error;
use crate::lock::Lock;
use crate::operation::Operation;
use crate::request::Request;
use crate::runtime;

/// The pauses between tries, each up to twice as long.
const PAUSES: Backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(2), 100);
/// A failure later than this after the first one isn't retried.
const PATIENCE: Duration = Duration::from_secs(15);

/// The least deadline of such a call: nobody waits for it, and one given up early would only be repeated.
const LEAST: Duration = Duration::from_millis(500);

impl Limiter {
    /// The request with a deadline that suits a call that nobody waits for.
    pub(crate) fn unhurried<'a>(&self, request: impl Into<Request<'a>>) -> Request<'a> {
        let request = request.into();
        request.deadline(request.deadline_or(self.deadline).max(LEAST))
    }

    /// Runs `work` in the background, begun on the current runtime or else on `runtime`, unless too much is waiting
    /// there. The output of `work` says whether the runtime was able to run it.
    pub(crate) fn spawn<D>(&self, runtime: &Handle, work: impl Fn(AtOnce) -> D + Send + 'static)
    where
        D: Future<Output = bool> + Send + 'static,
    {
        self.background.spawn(self.background.place(), runtime, work);
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

    /// Waits until this limiter and its clones have finished their background work: giving back dropped permits and
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
    /// let rule = Rule::new("reports", "concurrency 1 ttl 30s")?;
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
        self.background.finish().await;
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
