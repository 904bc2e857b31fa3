//! Permits of a concurrency limit, held for as long as a value lives.

use std::fmt;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::task::JoinHandle;

use super::wait::LONGEST_WAIT;
use super::{Limiter, persist};
use crate::call::Mode;
use crate::decision::{Decision, Denied};
use crate::error::{Error, Kind};
use crate::random::{jittered, unique_id};
use crate::request::{OwnedRequest, Request};
use crate::rule::Rule;
use crate::runtime;
use crate::telemetry;

/// The result of [`Limiter::hold`]: a permit, or the state without one.
#[derive(Debug)]
#[must_use]
pub struct Held {
    /// The decision.
    pub decision: Decision,
    /// The permit, if the call was allowed.
    pub permit: Option<Permit>,
}

/// Permits that are given back on drop, by a task on the runtime that the drop happens on, otherwise on the one in
/// which they were taken. While Redis is away that is retried for some 15 seconds, unless the id is the caller's own,
/// since another holder may use it by then. If the runtime or the process has ended, the permits expire after the
/// limit's ttl. [`Limiter::finish`] waits for releases in progress.
#[must_use = "a permit that is dropped is given back"]
pub struct Permit {
    limiter: Limiter,
    rule: Rule,
    request: OwnedRequest,
    /// Whether no other caller knows the id that it is held by.
    own_id: bool,
    held: bool,
    renewing: Option<JoinHandle<()>>,
    /// The runtime to give it back on, wherever it is dropped.
    runtime: Handle,
}

/// The first pause between a waiter's tries for a permit. It grows by half each time. Tries don't wait for expiry,
/// since permits are usually released before.
const FIRST_LOOK: Duration = Duration::from_millis(5);
const LAST_LOOK: Duration = Duration::from_millis(250);

impl Limiter {
    /// Takes as many permits of the rule's concurrency limits as the cost, and the cost from its other limits, all or
    /// nothing. The permits are held until the [`Permit`] is dropped, and for the limit's ttl unless it is renewed.
    ///
    /// A dropped future gives back the permits that it may have taken; what it took from other limits stays taken. With
    /// an [id](Request::id) of the caller's own, everyone holding by that id shares its permits, and the first to
    /// release gives them back.
    ///
    /// A call that reaches Redis after its caller gave up may hold a permit until it expires.
    ///
    /// # Errors
    ///
    /// A rule without a concurrency limit. No decision could be made; see [`Error`].
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
    /// let permit = limiter.hold(&rule, "reports").await?.into_result()?;
    /// assert!(limiter.hold(&rule, "reports").await?.into_result().is_err());
    /// permit.release().await?;
    /// assert!(limiter.hold(&rule, "reports").await?.into_result().is_ok());
    /// # Ok(())
    /// # }
    /// # #[cfg(not(feature = "embedded"))]
    /// # fn main() {}
    /// ```
    pub async fn hold<'a>(&self, rule: &Rule, request: impl Into<Request<'a>>) -> Result<Held, Error> {
        let request = request.into();
        let held = self.hold_once(rule, request, !request.has_id()).await;
        telemetry::decided(rule, held.as_ref().map(|held| &held.decision));
        held
    }

    /// The same, for a caller that counts the outcome and says whether the request's id, if any, is known to nobody
    /// else.
    pub(crate) async fn hold_once(&self, rule: &Rule, request: Request<'_>, own_id: bool) -> Result<Held, Error> {
        if !rule.limits().any(|limit| limit.algorithm().holds()) {
            return Err(Error::new(Kind::Input, format!("hold: expected a concurrency limit, got {rule}")));
        }
        let own = unique_id("held");
        let request = if request.has_id() { request } else { request.id(&own) };
        // Made first: whatever happens to the call, its permits are given back.
        let (limiter, rule, owned) = (self.clone(), rule.clone(), request.into_owned());
        let runtime = runtime::current()?;
        let mut permit = Permit { limiter, rule, request: owned, own_id, held: true, renewing: None, runtime };
        let decision = self.decide_uncounted(&permit.rule, &request, Mode::Acquire).await?;
        // Redis may have charged for the call, even if a policy answered.
        permit.held = decision.allowed || decision.error.is_some();
        permit.request = request.after(&decision).into_owned();
        Ok(Held { permit: decision.allowed.then_some(permit), decision })
    }

    /// The same as [`hold`](Self::hold), but waits for a permit for at most this long. The first caller to ask is
    /// served. Each try is a call, and a denial that counts if the rule counts denials.
    ///
    /// # Errors
    ///
    /// The same as [`hold`](Self::hold).
    pub async fn hold_wait<'a>(
        &self,
        rule: &Rule,
        request: impl Into<Request<'a>>,
        max_wait: Duration,
    ) -> Result<Held, Error> {
        let held = self.hold_within(rule, request.into(), max_wait).await;
        telemetry::decided(rule, held.as_ref().map(|held| &held.decision));
        held
    }

    /// The same, for a caller that counts the outcome.
    pub(crate) async fn hold_within(
        &self,
        rule: &Rule,
        request: Request<'_>,
        max_wait: Duration,
    ) -> Result<Held, Error> {
        runtime::with_timers()?;
        let until = tokio::time::Instant::now() + max_wait.min(LONGEST_WAIT);
        let mut look = FIRST_LOOK;
        loop {
            let held = self.hold_once(rule, request, !request.has_id()).await?;
            let left = until.saturating_duration_since(tokio::time::Instant::now());
            let Some(expires) = held.decision.retry_after.duration() else { return Ok(held) };
            if held.permit.is_some() || left.is_zero() {
                return Ok(held);
            }
            tokio::time::sleep(jittered(look.min(expires), 50).min(left)).await;
            look = (look * 3 / 2).min(LAST_LOOK);
        }
    }
}

impl Held {
    /// The permit, or the denial.
    ///
    /// # Errors
    ///
    /// The denial.
    pub fn into_result(self) -> Result<Permit, Denied> {
        self.permit.ok_or_else(|| Denied::of(self.decision))
    }
}

impl Permit {
    /// Extends the permit to the limit's whole ttl from now.
    ///
    /// # Errors
    ///
    /// [`Error::is_unknown_id`] if it has expired and may belong to another holder. No answer; see [`Error`].
    pub async fn renew(&self) -> Result<(), Error> {
        self.limiter.renew(&self.rule, &self.request).await.map(|_| ())
    }

    /// Renews the permit every third of the limit's ttl while it is held, in a task of its own, which ends when the
    /// permit is lost. For work of unknown length; [`renew`](Self::renew) tells whether it is still held.
    pub fn renewed(mut self) -> Self {
        self.stop_renewing();
        let permits = self.rule.limits().filter(|limit| limit.algorithm().holds());
        let every = permits.map(|limit| limit.period() / 3).min().unwrap_or_default().max(Duration::from_millis(1));
        let (limiter, rule, request) = (self.limiter.clone(), self.rule.clone(), self.request.clone());
        self.renewing = Some(self.runtime.spawn(async move {
            loop {
                tokio::time::sleep(every).await;
                let renewal = limiter.renew(&rule, &request).await;
                if renewal.is_err_and(|error| error.is_unknown_id()) {
                    telemetry::permit_lost(&rule);
                    return;
                }
            }
        }));
        self
    }

    /// Gives the permit back, and returns the state after that.
    ///
    /// # Errors
    ///
    /// No answer; see [`Error`]. The permit then expires with the limit's ttl.
    pub async fn release(mut self) -> Result<Decision, Error> {
        self.stop_renewing();
        let answer = self.limiter.release(&self.rule, &self.request).await;
        // If a policy answered for Redis, the drop tries once more.
        self.held = answer.as_ref().map_or(true, |decision| decision.error.is_some());
        answer
    }

    fn stop_renewing(&mut self) {
        if let Some(task) = self.renewing.take() {
            task.abort();
        }
    }
}

/// Hides the key.
impl fmt::Debug for Permit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Permit").field("rule", &self.rule.name()).field("held", &self.held).finish_non_exhaustive()
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.stop_renewing();
        if !self.held {
            return;
        }
        let (limiter, rule, request) = (self.limiter.clone(), self.rule.clone(), self.request.clone());
        let own = self.own_id;
        // Once the runtime has ended nothing is left to send the release: the permit expires.
        self.limiter.spawn(&self.runtime, move || {
            let (limiter, rule, request) = (limiter.clone(), rule.clone(), request.clone());
            async move {
                let release = || limiter.release(&rule, &request);
                // With the caller's own id, another holder may soon have the permit.
                let released = if own { persist(release).await } else { release().await.map(|_| ()) };
                // Nobody reads this answer.
                !released.is_err_and(|error| error.is_input())
            }
        });
    }
}
