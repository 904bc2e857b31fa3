//! Permits of a concurrency limit, held for as long as a value lives.

use std::fmt;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::task::JoinHandle;

use super::wait::LONGEST_WAIT;
use super::{Limiter, persist};
use crate::decision::{Decision, Denied};
use crate::error::{Error, Kind};
use crate::random::{jittered, unique_id};
use crate::request::{OwnedRequest, Request};
use crate::rule::Rule;
use crate::runtime;
use crate::script::Mode;
use crate::telemetry;

/// What [`Limiter::hold`] answers: a permit, or how things stand without one.
#[derive(Debug)]
#[must_use]
pub struct Held {
    /// The answer.
    pub decision: Decision,
    /// The permit, if it is allowed.
    pub permit: Option<Permit>,
}

/// Permits that are given back when this is dropped, by a task of the runtime that it is dropped on, or else of the one in
/// which they were taken: while Redis is away, again for some 15 seconds, unless by an id of the caller's, which somebody
/// else may hold by then. If the runtime or the process has ended, they expire
/// after the limit's ttl; [`Limiter::finish`] waits for what is still under way.
#[must_use = "a permit that is dropped is given back"]
pub struct Permit {
    limiter: Limiter,
    rule: Rule,
    request: OwnedRequest,
    /// Whether nobody else knows the id that it is held by.
    own_id: bool,
    held: bool,
    renewing: Option<JoinHandle<()>>,
    /// To give it back by, wherever it is dropped.
    runtime: Handle,
}

/// The first pause between a waiter's tries for a permit, which grows by half each time, since permits are released before
/// they expire.
const FIRST_LOOK: Duration = Duration::from_millis(5);
const LAST_LOOK: Duration = Duration::from_millis(250);

impl Limiter {
    /// Takes permits of the rule's concurrency limits (so many as the cost says) and, of its other limits, the cost,
    /// all or nothing; the permits are held until the [`Permit`] is dropped, and for the limit's ttl unless it is
    /// renewed.
    ///
    /// A dropped future gives back the permits that it may have taken; what it took of other limits stays taken. With an
    /// [id](Request::id) of the caller's, all who hold by it share its permits, and the first to go gives them back.
    ///
    /// A call that reaches Redis after its caller gave up may hold a permit until it expires.
    ///
    /// # Errors
    ///
    /// A rule without a concurrency limit; no decision could be made, see [`Error`].
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

    /// The same, for a caller who counts what becomes of it, and who says whether the request's id, if it has one, is
    /// nobody else's.
    pub(crate) async fn hold_once(&self, rule: &Rule, request: Request<'_>, own_id: bool) -> Result<Held, Error> {
        if !rule.limits().any(|limit| limit.algorithm().holds()) {
            return Err(Error::new(Kind::Input, format!("hold: expected a concurrency limit, got {rule}")));
        }
        let own = unique_id("held");
        let request = if request.has_id() { request } else { request.id(&own) };
        // Made first: whatever happens to the call, what it took is given back.
        let (limiter, rule, owned) = (self.clone(), rule.clone(), request.into_owned());
        let runtime = runtime::current()?;
        let mut permit = Permit { limiter, rule, request: owned, own_id, held: true, renewing: None, runtime };
        let decision = self.look(&permit.rule, &request, Mode::Acquire).await?;
        // What was asked of Redis may have been charged there, whoever answered.
        permit.held = decision.allowed || decision.error.is_some();
        permit.request = request.after(&decision).into_owned();
        Ok(Held { permit: decision.allowed.then_some(permit), decision })
    }

    /// As [`hold`](Self::hold), waiting for at most so long until there is a permit. Whoever looks first is served;
    /// each look is a call, and a denial that is counted if the rule counts them.
    ///
    /// # Errors
    ///
    /// As [`hold`](Self::hold).
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

    /// The same, for a caller who counts what becomes of it.
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
    /// Makes it last for the limit's whole ttl from now.
    ///
    /// # Errors
    ///
    /// [`Error::is_unknown_id`] if it has expired and may be somebody else's; no answer, see [`Error`].
    pub async fn renew(&self) -> Result<(), Error> {
        self.limiter.renew(&self.rule, &self.request).await.map(|_| ())
    }

    /// Renews it every third of the limit's ttl for as long as it is held, in a task of its own, which ends when the
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

    /// Gives it back, and says how things stand then.
    ///
    /// # Errors
    ///
    /// No answer: it is given back by the limit's ttl; see [`Error`].
    pub async fn release(mut self) -> Result<Decision, Error> {
        self.stop_renewing();
        let answer = self.limiter.release(&self.rule, &self.request).await;
        // Where a policy answered for Redis, dropping this tries once more.
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
        // Once the runtime has ended there is nothing left to send it by: the permit expires.
        self.limiter.spawn(&self.runtime, move || {
            let (limiter, rule, request) = (limiter.clone(), rule.clone(), request.clone());
            async move {
                let release = || limiter.release(&rule, &request);
                // By an id of the caller's, somebody else may hold the permit soon.
                let released = if own { persist(release).await } else { release().await.map(|_| ()) };
                // Nobody waits for this answer.
                !released.is_err_and(|error| error.is_input())
            }
        });
    }
}
