//! Waiting until a request is allowed.

use std::time::Duration;

use tokio::runtime::Handle;
use tokio::time::Instant;

use super::call::Call;
use super::counted::counted;
use super::handle::Limiter;
use super::tries::Tries;
use crate::algorithm::numbers::EXACT;
use crate::decision::{Decision, RetryAfter};
use crate::error::{Charged, Error, Kind};
use crate::operation::Operation;
use crate::random::{jittered, unique_id};
use crate::request::Request;
use crate::rule::Rule;
use crate::runtime::{self, LONGEST_WAIT};

/// Jitter on a denied caller's wait, in percent, so that callers don't all come back at once.
pub(super) const JITTER: u8 = 10;

impl Limiter {
    /// Takes the cost as soon as it is available, sleeping until then for at most `max_wait`. If that isn't enough, the
    /// call is denied at once, with the wait in `retry_after`. It doesn't wait for Redis: while that is unreachable,
    /// the error or the policy answers.
    ///
    /// If every limit of the rule has a `max-debt` (only token buckets and fixed windows that aren't calendar windows can),
    /// callers are served in order of arrival, except those that arrived while the key was blocked. That takes one round trip, and
    /// one more after each block. Callers whose wait would be too long reserve nothing. When one gives up, those behind
    /// it in this process move up at once, one by one as the limit refills. When a caller of another process gives up,
    /// those waiting here notice it by asking Redis what is still owed, 0.1, 0.3, 0.7, 1.5 seconds and so on into the
    /// wait: a round trip, shared by all that wait in this process for the same limits. Until then the units of the
    /// caller that gave up are lost to those behind it; after that they may be used at once, beside what the limit has
    /// refilled. After a [`reset`](Self::reset), or with an empty Redis, nothing is owed: at their next look, all
    /// waiting callers proceed.
    ///
    /// Otherwise each caller retries after its `retry_after` and up to a tenth more, and the first to ask is served.
    ///
    /// Dropping the future while it sleeps charges nothing: a background task cancels the reservation, unless its turn
    /// comes before Redis can be reached; its units have refilled by then. An acquire without reservation that is
    /// dropped while its answer is on the way may stay charged. A future may move to another runtime while it waits.
    ///
    /// # Errors
    ///
    /// A request with an id. A rule with a `concurrency` limit: use [`hold_wait`](Self::hold_wait). No decision could
    /// be made; see [`Error`].
    pub async fn acquire_wait<'a>(
        &self,
        rule: &Rule,
        request: impl Into<Request<'a>>,
        max_wait: Duration,
    ) -> Result<Decision, Error> {
        let request = request.into();
        let decided = if request.has_id() {
            let why = "the request has an id: leave it out, since a wait reserves under an id of its own";
            Err(Error::new(Kind::Input, format!("acquire_wait: {why}")))
        } else {
            self.wait_within(rule, request, max_wait, Blocks::Outrun).await
        };
        counted(rule, decided.as_ref());
        decided
    }

    /// The same, for a caller that counts the outcome, and whose request may have an id that nobody else knows.
    pub(crate) async fn wait_within(
        &self,
        rule: &Rule,
        request: Request<'_>,
        max_wait: Duration,
        blocks: Blocks,
    ) -> Result<Decision, Error> {
        if rule.limits().any(|limit| limit.algorithm().holds()) {
            let why = "expected a rule without permits (Limiter::hold_wait waits for those)";
            return Err(Error::new(Kind::Input, format!("acquire_wait: {why}, got {rule}")));
        }
        if rule.limits().all(|limit| limit.max_debt() > 0) {
            self.wait_by_reservation(rule, request, max_wait, blocks).await
        } else {
            self.wait_by_retry(rule, request, max_wait).await
        }
    }

    async fn wait_by_reservation(
        &self,
        rule: &Rule,
        request: Request<'_>,
        max_wait: Duration,
        blocks: Blocks,
    ) -> Result<Decision, Error> {
        // An abandoned reservation must still be known when it is cancelled.
        let longest = rule.limits().map(|limit| limit.longest_reset()).max().unwrap_or_default();
        // No limit admits this much, the largest cost of a call with an id.
        let request = if request.units(rule).most() > EXACT { request.cost_of_all(EXACT) } else { request };
        let asked = request.jitter(0).id_remembered_beyond(max_wait.min(longest));
        runtime::with_timers()?;
        let (started, mut left, mut tries) = (Instant::now(), max_wait, Tries::of(&request));
        loop {
            let (own, id) = (unique_id("wait"), tries.next_id());
            let asked = if request.has_id() { asked.tried_by(&id) } else { asked.own_id(&own) };
            let decision = self.wait_with_reservation(rule, asked, left, blocks).await?;
            left = max_wait.saturating_sub(started.elapsed());
            match decision.retry_after {
                // Nobody can queue while the key is blocked.
                RetryAfter::After(blocked) if !decision.allowed && decision.blocked && blocked <= left => {
                    runtime::sleep(blocked).await?;
                    left = max_wait.saturating_sub(started.elapsed());
                }
                _ => return Ok(decision.jittered(request.wait_jitter()).of_try(id)),
            }
        }
    }

    /// Reserves by the request's id, and waits for the turn. Denied if that would take longer.
    async fn wait_with_reservation(
        &self,
        rule: &Rule,
        asked: Request<'_>,
        max_wait: Duration,
        blocks: Blocks,
    ) -> Result<Decision, Error> {
        let runtime = runtime::with_timers()?;
        let until = Instant::now() + max_wait.min(LONGEST_WAIT);
        let mut reservation = Reservation { limiter: self, rule, request: asked, due: None, kept: false, runtime };
        let mut decision = match self.decide(rule, asked.within(max_wait), Operation::Reserve).uncounted().await {
            Ok(decision) => decision,
            Err(error) => {
                reservation.kept = error.charged() == Charged::No;
                return Err(error);
            }
        };
        reservation.request = asked.following(&decision);
        let wait = decision.retry_after.duration().filter(|_| decision.allowed);
        let Some(wait) = wait else {
            // Redis may have reserved what the fallback then denied.
            reservation.kept = decision.by.error().is_none_or(|error| error.charged() == Charged::No);
            return Ok(decision);
        };
        if !wait.is_zero() {
            reservation.due = Some(Instant::now() + wait);
            let waited = self.until_turn(rule, &asked, &decision).await;
            waited.map_err(Error::after_charging)?;
            decision.waited();
            if blocks == Blocks::Respected
                && let Some(blocked) = self.after_blocks(rule, asked, until).await
            {
                decision.wait_as(&blocked);
                let after = match self.make(Operation::Cancel, rule, reservation.request).await {
                    // During a block the id may have expired; by then its units have refilled by themselves.
                    Err(error) if error.is_unknown_id() => decision.clone(),
                    after => after.map_err(Error::after_charging)?,
                };
                if let Some(error) = after.by.error() {
                    return Err(error.clone().after_charging());
                }
                reservation.kept = true;
                return Ok(after.denied_instead(&decision));
            }
        }
        reservation.kept = true;
        Ok(decision)
    }

    /// Waits until the key is no longer blocked, or returns its present state if that takes too long.
    async fn after_blocks(&self, rule: &Rule, request: Request<'_>, until: Instant) -> Option<Decision> {
        // While Redis is unreachable, a block can't be known.
        while let Ok(now) = self.decide(rule, request.cost_of_all(0), Operation::Peek).uncounted().await {
            let wait = now.retry_after.duration().filter(|_| now.blocked)?;
            if wait > until.saturating_duration_since(Instant::now()) {
                return Some(now);
            }
            runtime::sleep(wait).await.ok()?;
        }
        None
    }

    async fn wait_by_retry(&self, rule: &Rule, request: Request<'_>, max_wait: Duration) -> Result<Decision, Error> {
        runtime::with_timers()?;
        let (started, jitter, mut tries) = (Instant::now(), request.wait_jitter(), Tries::of(&request));
        loop {
            let id = tries.next_id();
            // The wait without jitter must fit.
            let decision = self.acquire(rule, request.jitter(0).tried_by(&id)).uncounted().await?;
            let left = max_wait.saturating_sub(started.elapsed());
            // What Redis took, or may have taken, isn't requested again.
            let charged = decision.by.error().is_some_and(|error| error.charged() != Charged::No);
            match decision.retry_after {
                RetryAfter::After(wait) if !decision.allowed && !charged && wait <= left => {
                    runtime::sleep(jittered(wait, JITTER).min(left)).await?;
                }
                _ => return Ok(decision.jittered(jitter).of_try(id)),
            }
        }
    }
}

/// What happens to callers whose turn comes while their key is blocked, if it wasn't when they arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Blocks {
    /// They proceed: their units were taken before.
    Outrun,
    /// They wait for the end of the block, at one more round trip for each caller that has waited.
    #[allow(dead_code, reason = "asked for by the middleware, which is a feature")]
    Respected,
}

/// Cancels a reservation unless it is kept.
struct Reservation<'a> {
    limiter: &'a Limiter,
    rule: &'a Rule,
    request: Request<'a>,
    /// Its turn, once that is known: from then on nothing of it is owed.
    due: Option<Instant>,
    kept: bool,
    /// The runtime that cancels it, if it is dropped outside one.
    runtime: Handle,
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        if self.kept || self.due.is_some_and(|due| due <= Instant::now()) {
            return;
        }
        let call = Call { rule: self.rule, request: &self.request, operation: Operation::Cancel };
        self.limiter.call_later(&self.runtime, call, self.due);
    }
}
