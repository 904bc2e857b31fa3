//! Permits of a concurrency limit, held for as long as a value lives.

use std::fmt;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::future::{Either, pending, select};
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::background::persist_while;
use super::call::Call;
use super::counted::counted;
use super::handle::Limiter;
use super::tries::Tries;
use super::wait::JITTER;
use crate::decision::{Balance, DecidedBy, Decision, Denied, RetryAfter};
use crate::error::{Charged, Error, Kind};
use crate::lock::Lock;
use crate::operation::Operation;
use crate::random::{jittered, unique_id};
use crate::request::{OwnedRequest, Request};
use crate::rule::Rule;
use crate::runtime::{self, LONGEST_WAIT};
use crate::telemetry;

/// The result of [`Limiter::hold`]: a permit, or the state without one.
#[derive(Debug)]
#[must_use]
#[non_exhaustive]
pub struct HoldDecision {
    /// The decision.
    pub decision: Decision,
    /// The permit, if the call was allowed.
    pub permit: Option<Permit>,
}

/// Permits, given back on drop by a background task: on the runtime of the drop or, outside one, on the runtime in
/// which they were taken; if that has ended or has a single thread, on a thread of the library's own. While Redis is
/// unreachable, the release is retried for some 15 seconds, at most for the limit's ttl. With an id of the caller's own
/// it is sent once, since another holder may use that id by then. If the process ends first, the permits expire after
/// the ttl. [`Limiter::finish`] waits for releases in progress.
#[must_use = "a permit that is dropped is given back"]
pub struct Permit {
    limiter: Limiter,
    rule: Rule,
    request: OwnedRequest,
    /// Whether no other caller knows the id that it is held by.
    own_id: bool,
    /// Whether there is anything to give back.
    held: bool,
    /// Whether that was done when the rule's longest hold was over.
    given_back: bool,
    renewing: Option<Arc<Renewing>>,
    /// When the call began that last took or renewed it.
    held_from: Lock<Instant>,
    /// The runtime to give it back on, if it is dropped outside one.
    runtime: Handle,
}

/// What a permit shares with the task that renews it.
#[derive(Debug)]
struct Renewing {
    /// Whether no other caller knows the id that it is held by.
    own_id: bool,
    /// Whether a renewal has begun before, on a runtime that has ended.
    begun: AtomicBool,
    /// Set by the first to give the permit back.
    over: AtomicBool,
    ended: Notify,
    /// When the rule's longest hold is over.
    until: Option<Instant>,
    /// Whether the longest hold was over first, so that the task gives the permit back.
    overdue: AtomicBool,
    /// When the call began that last took or renewed it: it lasts this long from then at least.
    held_from: Lock<Instant>,
    ttl: Duration,
    lost: AtomicBool,
    becomes_lost: Notify,
}

/// The first pause between a waiter's tries for a permit. It grows by half each time. Tries don't wait for expiry,
/// since permits are usually released before.
const FIRST_LOOK: Duration = Duration::from_millis(5);
const LAST_LOOK: Duration = Duration::from_millis(250);
/// The least time between renewals, and the least deadline of one.
const SHORTEST: Duration = Duration::from_millis(1);
/// The longest pause after a renewal that failed, before jitter.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

impl Limiter {
    /// Takes as many permits of the rule's concurrency limits as the cost, and the cost from its other limits, all or
    /// nothing. The permits are held until the [`Permit`] is dropped, and for the limit's ttl unless it is renewed.
    ///
    /// A dropped future, and a call whose answer doesn't come in time, give back the permits that they may have taken;
    /// what they took from other limits stays taken, unless the keys are [on several
    /// nodes](crate::guide::load#keys-on-several-nodes). With an [id](Request::id) of the caller's own, everyone
    /// holding by that id shares its permits, and the first to release, drop or fail gives them back for all. A hold by
    /// the id of a permit that was just dropped comes after its release, which may cost a round trip more; if the
    /// runtime that has begun the release is blocked, the hold ends by its deadline with an error. A release by such an
    /// id is sent once: if its future is dropped, or its answer lost, the permits may stay until they expire.
    ///
    /// A call that reaches Redis after its caller gave up, since a connection failed, may hold a permit until it expires.
    /// While Redis is unreachable, a policy that is [open](crate::OnError::Open) gives a permit that limits nobody.
    ///
    /// To poll its future by reference, as in a `select!` in a loop, pin it first (`tokio::pin!`).
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
    /// let rule = Rule::new("reports", "concurrency 1 ttl 30s")?;
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
    pub async fn hold<'a>(&self, rule: &Rule, request: impl Into<Request<'a>>) -> Result<HoldDecision, Error> {
        let request = request.into();
        let held = self.hold_once(rule, request).await;
        counted(rule, held.as_ref().map(|held| &held.decision));
        held
    }

    /// The same, for a caller that counts the outcome.
    pub(crate) async fn hold_once(&self, rule: &Rule, request: Request<'_>) -> Result<HoldDecision, Error> {
        if !rule.limits().any(|limit| limit.algorithm().holds()) {
            return Err(Error::new(Kind::Input, format!("hold: expected a concurrency limit, got {rule}")));
        }
        let own = unique_id("held");
        let request = if request.has_id() { request } else { request.own_id(&own) };
        let own_id = request.has_own_id();
        // What a call takes in several slots it gives back itself, permits and units, unless it is allowed.
        let in_parts = self.parts(rule, &self.targets_of_acquire(rule, None), &request)?.is_some();
        // Made first: whatever happens to the call, its permits are given back.
        let (limiter, rule, owned) = (self.clone(), rule.clone(), request.into_owned());
        let (runtime, held_from) = (runtime::current()?, Lock::new(Instant::now()));
        let held = !in_parts;
        let mut permit = Permit {
            limiter,
            rule,
            request: owned,
            own_id,
            held,
            given_back: false,
            renewing: None,
            held_from,
            runtime,
        };
        let decided = if own_id {
            self.acquire(&permit.rule, request).uncounted().await
        } else {
            match Box::pin(self.after_releases(&permit.rule, &request)).await {
                Ok(left) => self.acquire(&permit.rule, request.deadline(left)).uncounted().await,
                Err(error) => Box::pin(self.answer_instead(error, Call::acquire(&permit.rule, &request)))
                    .await
                    .map(|decision| decision.jittered(request.wait_jitter())),
            }
        };
        let decision = decided.inspect_err(|error| permit.held = !in_parts && error.charged() != Charged::No)?;
        // Redis may have charged for the call, even if a policy answered.
        permit.held = match decision.by.error() {
            None => decision.allowed,
            Some(error) => {
                !in_parts && error.charged() != Charged::No
                    || (decision.allowed && matches!(decision.by, DecidedBy::Local(_)))
            }
        };
        permit.request.follow(&decision);
        Ok(HoldDecision { permit: decision.allowed.then_some(permit), decision })
    }

    /// Like [`hold`](Self::hold), but waits for a permit for at most `max_wait`. Whichever caller asks first once one
    /// is free gets it. Each try costs a round trip and, if denied, counts where the rule counts denials; pauses
    /// between tries grow by half from 5 ms to 250 ms, each lengthened by up to half. If another limit of the rule
    /// denies, or the key is blocked, the next try comes after that `retry_after`; if that exceeds the time left, the
    /// call is denied at once. An outage isn't waited for: while Redis is unreachable, the error or the policy answers.
    ///
    /// # Errors
    ///
    /// The same as [`hold`](Self::hold).
    pub async fn hold_wait<'a>(
        &self,
        rule: &Rule,
        request: impl Into<Request<'a>>,
        max_wait: Duration,
    ) -> Result<HoldDecision, Error> {
        let request = request.into();
        let held = self.hold_within(rule, request, max_wait).await;
        counted(rule, held.as_ref().map(|held| &held.decision));
        held
    }

    /// The same, for a caller that counts the outcome.
    pub(crate) async fn hold_within(
        &self,
        rule: &Rule,
        request: Request<'_>,
        max_wait: Duration,
    ) -> Result<HoldDecision, Error> {
        runtime::with_timers()?;
        let (started, jitter, mut look) = (Instant::now(), request.wait_jitter(), FIRST_LOOK);
        let mut tries = Tries::of(&request);
        loop {
            let id = tries.next_id();
            let mut held = self.hold_once(rule, request.jitter(0).tried_by(&id)).await?;
            let left = max_wait.min(LONGEST_WAIT).saturating_sub(started.elapsed());
            let waits = Waits::of(rule, &held.decision);
            let wait = match waits {
                Some(Waits { certain, permit }) if held.permit.is_none() && certain <= left && !left.is_zero() => {
                    let looked = permit.map_or(Duration::ZERO, |expires| jittered(look.min(expires), 50));
                    jittered(certain, JITTER).max(looked).min(left)
                }
                _ => {
                    held.decision = held.decision.jittered(jitter).of_try(id);
                    return Ok(held);
                }
            };
            runtime::sleep(wait).await?;
            look = (look * 3 / 2).min(LAST_LOOK);
        }
    }
}

/// What a denied caller waits for.
struct Waits {
    /// Until then no other caller's release can help.
    certain: Duration,
    /// Until a permit expires, if one is missing: it may be released before.
    permit: Option<Duration>,
}

impl Waits {
    /// None if the request is allowed, or could never be.
    fn of(rule: &Rule, decision: &Decision) -> Option<Self> {
        let mut waits = Self { certain: Duration::ZERO, permit: None };
        let RetryAfter::After(_) = decision.retry_after else { return None };
        for (limit, decided) in rule.limits().zip(&decision.limits).filter(|(_, decided)| !decided.allowed) {
            let wait = decided.retry_after.duration()?;
            if limit.algorithm().holds() && !decided.blocked {
                waits.permit = waits.permit.max(Some(wait));
            } else {
                waits.certain = waits.certain.max(wait);
            }
        }
        Some(waits)
    }
}

impl HoldDecision {
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
        let asked_at = Instant::now();
        let renewed = self.limiter.renew(&self.rule, &self.request).await;
        if renewed.as_ref().is_ok_and(|renewed| renewed.by.error().is_none()) {
            *self.held_from.lock() = asked_at;
        }
        if let Some(renewing) = &self.renewing {
            renewing.answered(asked_at, renewed.as_ref());
        }
        renewed.map(|_| ())
    }

    /// Renews the permit every third of the limit's ttl while it is held, in a task of its own, which ends when the
    /// permit is [lost](Self::lost). A renewal that fails, or isn't answered within a sixth of the ttl, is soon tried
    /// again. If the task's runtime ends, a thread of the library's own goes on with it. The permit may expire if the
    /// runtime is blocked for two thirds of the ttl, or if Redis is unreachable for that long less 1.5 s, the time that
    /// a new connection may take. When the rule's [longest hold](Rule::max_hold) is over, the task gives the permit
    /// back. For work of unknown length.
    pub fn renewed(mut self) -> Self {
        self.given_back |= !self.stop_renewing();
        if !self.held || self.given_back {
            return self;
        }
        let until = self.rule.holds_for().map(|time| Instant::now() + time.min(LONGEST_WAIT));
        let permits = self.rule.limits().filter(|limit| limit.algorithm().holds());
        let ttl = permits.map(|limit| limit.period()).min().unwrap_or_default();
        let renewing = Arc::new(Renewing::new(self.own_id, until, *self.held_from.lock(), ttl));
        self.renewing = Some(Arc::clone(&renewing));
        let (limiter, rule, request) = (self.limiter.clone(), self.rule.clone(), self.request.clone());
        let runtime = runtime::current().unwrap_or_else(|_| self.runtime.clone());
        runtime::spawn_lasting(&runtime, move || {
            let (limiter, rule, request) = (limiter.clone(), rule.clone(), request.clone());
            Arc::clone(&renewing).renew(limiter, rule, request)
        });
        self
    }

    /// Whether this permit, which is [renewed](Self::renewed), is lost: it has expired, was released or reset by
    /// another caller, no renewal has been answered for the limit's whole ttl, or the rule's [longest
    /// hold](Rule::max_hold) is over. Others may hold it by now, so work that must not run beside theirs stops. False
    /// if it isn't renewed, and for a permit of a policy that is open, which limits nobody. Costs no round trip.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.renewing.as_ref().is_some_and(|renewing| renewing.is_lost())
    }

    /// Returns once the permit [is lost](Self::is_lost); never, if it isn't renewed. Costs no round trip, and loses
    /// nothing if it is dropped.
    ///
    /// ```
    /// use tollgate::Permit;
    ///
    /// async fn work_alone(permit: &Permit, work: impl Future<Output = ()>) -> Result<(), &'static str> {
    ///     tokio::select! {
    ///         () = work => Ok(()),
    ///         () = permit.lost() => Err("others may hold the permit by now"),
    ///     }
    /// }
    /// ```
    pub async fn lost(&self) {
        let Some(renewing) = &self.renewing else { return pending().await };
        loop {
            // Made before looking, so that no loss is missed.
            let becomes_lost = renewing.becomes_lost.notified();
            if renewing.is_lost() {
                return;
            }
            // By the timers of the runtime that polls this; without any, the renewing task tells.
            let until = renewing.lasts_until();
            if runtime::timeout_at(until, becomes_lost).await.is_none() && Instant::now() < until {
                let becomes_lost = renewing.becomes_lost.notified();
                if !renewing.is_lost() {
                    becomes_lost.await;
                }
            }
        }
    }

    /// Gives the permit back, and returns the state after that. A drop does the same in the background: for work that
    /// is done whatever becomes of its permit.
    ///
    /// # Errors
    ///
    /// No answer; see [`Error`]. It is then given back as by a drop: in the background, repeatedly while Redis is away.
    /// One that is held by an id of the caller's own is tried once more alone, and only if the first call wasn't made;
    /// otherwise it expires with the limit's ttl.
    pub async fn release(mut self) -> Result<Balance, Error> {
        self.given_back |= !self.stop_renewing();
        if self.given_back {
            // Another holder may have it.
            return self.limiter.peek(&self.rule, &self.request).await.map(Balance::of);
        }
        // By an id that others know it isn't repeated: if this future is dropped, it may have been made.
        self.held = self.own_id;
        let answer = self.limiter.release(&self.rule, &self.request).await;
        // Unless Redis answered, the drop tries once more.
        let failed = answer.as_ref().map_or_else(Some, |balance| balance.by.error());
        self.held = failed.is_some_and(|error| may_retry(self.own_id, error));
        answer
    }

    /// Whether the permit is this one's to give back.
    fn stop_renewing(&mut self) -> bool {
        let Some(renewing) = self.renewing.take() else { return true };
        let over = renewing.over.swap(true, Ordering::AcqRel);
        renewing.ended.notify_one();
        !over
    }
}

impl Renewing {
    fn new(own_id: bool, until: Option<Instant>, held_from: Instant, ttl: Duration) -> Self {
        let [begun, over, overdue, lost] = [(); 4].map(|()| AtomicBool::new(false));
        let (ended, becomes_lost) = (Notify::new(), Notify::new());
        let held_from = Lock::new(held_from);
        Self { own_id, begun, over, ended, until, overdue, held_from, ttl, lost, becomes_lost }
    }

    /// Notes the answer to a renewal that was asked for at this time.
    fn answered(&self, asked_at: Instant, renewed: Result<&Balance, &Error>) {
        match renewed {
            Ok(renewed) if renewed.by.error().is_none() => *self.held_from.lock() = asked_at,
            Err(error) if error.is_unknown_id() => self.lose(),
            _ => {}
        }
    }

    fn lose(&self) {
        self.lost.store(true, Ordering::Release);
        self.becomes_lost.notify_waiters();
    }

    /// Until when it certainly lasts, by the renewals so far.
    fn lasts_until(&self) -> Instant {
        *self.held_from.lock() + self.ttl.min(LONGEST_WAIT)
    }

    /// Also while the task that renews it is held up, since its runtime is blocked.
    fn is_lost(&self) -> bool {
        if !self.lost.load(Ordering::Acquire) && Instant::now() >= self.lasts_until() {
            self.lose();
        }
        self.lost.load(Ordering::Acquire)
    }

    /// Renews until the permit is given up or lost, or has been held for the longest time allowed.
    async fn renew(self: Arc<Self>, limiter: Limiter, rule: Rule, request: OwnedRequest) {
        let ttl = self.ttl;
        let every = (ttl / 3).max(SHORTEST);
        // Leaves room for further tries within the ttl.
        let request = Request::from(&request);
        let request = request.deadline(request.deadline_or(limiter.deadline).min(ttl / 6).max(SHORTEST));
        let again = (ttl / 24).clamp(SHORTEST, LONGEST_PAUSE);
        let mut wait = if self.begun.swap(true, Ordering::AcqRel) { Duration::ZERO } else { every };
        let renewals = async {
            while runtime::sleep(wait).await.is_ok() {
                let asked_at = Instant::now();
                let renewed = limiter.renew(&rule, request).await;
                self.answered(asked_at, renewed.as_ref());
                wait = match renewed {
                    Ok(renewed) if renewed.by.error().is_none() => every,
                    Err(error) if error.is_unknown_id() => return telemetry::permit_lost(rule.name()),
                    _ => jittered(again, 50),
                };
            }
        };
        let longest = async {
            match self.until {
                Some(until) => drop(runtime::sleep(until.saturating_duration_since(Instant::now())).await),
                None => pending().await,
            }
        };
        // By an id that others know, only while the permit certainly lasts.
        let due = || (!self.own_id).then(|| Instant::now() + ttl / 3);
        let release = || {
            persist_while(
                |error| may_retry(self.own_id, error),
                due(),
                || limiter.make(Operation::Release, &rule, request),
            )
        };
        if self.overdue.load(Ordering::Acquire) {
            // Its runtime ended while it gave the permit back, which it may have done.
            if self.own_id {
                let _ = release().await;
            }
            return;
        }
        if self.over.load(Ordering::Acquire) {
            return;
        }
        let (renewals, longest, ended) = (pin!(renewals), pin!(longest), pin!(self.ended.notified()));
        if !matches!(select(select(renewals, longest), ended).await, Either::Left((Either::Right(_), _))) {
            return;
        }
        // Either this task gives the permit back or its value does: the first to set `over`.
        if !self.over.swap(true, Ordering::AcqRel) {
            self.overdue.store(true, Ordering::Release);
            self.lose();
            telemetry::permit_overdue(rule.name());
            let _ = release().await;
        }
    }
}

/// Whether a release that failed like this may be repeated. By an id that others know it may not if Redis may have run
/// it: another holder may have the permit by now.
fn may_retry(own_id: bool, error: &Error) -> bool {
    (error.goes_to_policy() || error.is_refusal()) && (own_id || error.charged() == Charged::No)
}

/// Hides the key.
impl fmt::Debug for Permit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Permit").field("rule", &self.rule.name()).field("held", &self.held).finish_non_exhaustive()
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if !self.stop_renewing() || !self.held || self.given_back {
            return;
        }
        if !self.own_id {
            let Some(release) = self.limiter.pending_release(&self.rule, &self.request).map(Arc::new) else { return };
            let limiter = self.limiter.clone();
            self.limiter.spawn(&self.runtime, move |at_once| {
                let (limiter, release) = (limiter.clone(), Arc::clone(&release));
                // Made once: another holder may soon have the permit.
                async move {
                    let made = at_once.call(limiter.release_pending(&release)).await;
                    !made.is_some_and(|made| made.is_err_and(|error| error.is_input()))
                }
            });
            return;
        }
        let ttl = self.rule.limits().filter(|limit| limit.algorithm().holds()).map(|limit| limit.period()).max();
        let expires = Instant::now() + ttl.unwrap_or_default().min(LONGEST_WAIT);
        let call = Call { rule: &self.rule, request: &Request::from(&self.request), operation: Operation::Release };
        self.limiter.call_later(&self.runtime, call, Some(expires));
    }
}
