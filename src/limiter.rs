//! One call: rule + key + cost -> decision.

mod background;
#[cfg(feature = "rules")]
mod by_rules;
mod cached_denials;
mod fallback;
mod follow_up;
pub(crate) mod hold;
pub(crate) mod lease;
#[cfg(feature = "embedded")]
mod local;
mod maintenance;
mod many;
mod prepare;
mod releases;
mod run;
mod sharded;
mod turns;
pub(crate) mod wait;

use std::future::poll_fn;
#[cfg(feature = "embedded")]
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::{Duration, Instant, SystemTime};

use crate::algorithm::ALL_OR_NOTHING;
use crate::algorithm::numbers::LONGEST_RESET_US;
use crate::call::{Mode, Reply, granted};
use crate::decision::{Decision, LimitAnswer, LimitDecision};
use crate::denial_cache::DenialCache;
use crate::engine::Engine;
#[cfg(feature = "embedded")]
use crate::engine::embedded::Embedded;
use crate::error::{Error, Kind};
use crate::key::{self, KeySecret};
use crate::request::Request;
use crate::rule::{OnError, Rule, Target};
use crate::telemetry::{self, Observed};

use background::Background;
#[cfg(feature = "http")]
pub(crate) use background::persist;
#[cfg(feature = "http")]
pub(crate) use by_rules::Acquisition;
#[cfg(feature = "rules")]
#[allow(unreachable_pub, reason = "exported with sets of rules, which are a feature of their own")]
pub use by_rules::HeldVerdict;
pub use maintenance::{Progress, State};
use prepare::concerned;

/// Makes decisions. Cheap to clone, and shared between tasks by cloning or by reference.
///
/// Unless a method says otherwise, it costs one round trip to Redis. It costs two if the server has lost its scripts,
/// or if its clock has left [the calendar windows](crate::guide#windows-of-the-calendar) that the call names. The first
/// call also connects.
#[derive(Clone, Debug)]
pub struct Limiter {
    engine: Engine,
    prefix: String,
    pub(crate) deadline: Duration,
    on_error: OnError,
    denials: Option<DenialCache>,
    key_secret: Option<KeySecret>,
    background: Background,
    /// Decides while Redis is away, for rules that say `local`. Created on first use.
    #[cfg(feature = "embedded")]
    local: Arc<OnceLock<Embedded>>,
}

impl Limiter {
    /// The engine, and the prefix of its keys: for what is stored beside them.
    #[cfg(feature = "postgres")]
    pub(crate) fn engine(&self) -> (&Engine, &str) {
        (&self.engine, &self.prefix)
    }

    /// A limiter on this engine: prefix `tollgate`, deadline 500 ms, and an error while Redis is away.
    pub fn new(engine: impl Into<Engine>) -> Self {
        Self {
            engine: engine.into(),
            prefix: "tollgate".into(),
            deadline: Duration::from_millis(500),
            on_error: OnError::Closed,
            denials: None,
            key_secret: None,
            background: Background::default(),
            #[cfg(feature = "embedded")]
            local: Arc::default(),
        }
    }

    /// The prefix of every key in Redis. Default: `tollgate`.
    ///
    /// # Errors
    ///
    /// An empty prefix, or one with braces.
    pub fn prefix(mut self, prefix: &str) -> Result<Self, Error> {
        self.prefix = key::checked_prefix(prefix)?.to_owned();
        Ok(self)
    }

    /// How long a decision may take, connecting included. After that the rule's [policy](Rule::on_error) answers;
    /// [`Error::charged`] says whether the units may have been taken. Default: 500 ms.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// The answer while Redis is away, for rules that [don't set one](Rule::on_error). Default:
    /// [closed](OnError::Closed), which returns the error. Under [`Local`](OnError::Local), a rule with less than one
    /// unit for each of its processes is closed too.
    ///
    /// # Errors
    ///
    /// `Local` without the feature `embedded`.
    ///
    /// ```
    /// use tollgate::{Limiter, OnError, Redis};
    ///
    /// let limiter = Limiter::new(Redis::open("redis://127.0.0.1/")?).on_error(OnError::Open)?;
    /// # Ok::<(), tollgate::Error>(())
    /// ```
    pub fn on_error(mut self, on_error: OnError) -> Result<Self, Error> {
        on_error.checked().map_err(|why| Error::new(Kind::Input, why))?;
        self.on_error = on_error;
        Ok(self)
    }

    /// Denies in this process what Redis has just denied. Limiters with the same Redis and prefix may share a cache.
    /// Default: none.
    #[must_use]
    pub fn denial_cache(mut self, cache: DenialCache) -> Self {
        self.denials = Some(cache);
        self
    }

    /// Hashes keys, parts and tags with this secret, for rules that don't say [otherwise](Rule::hash_keys). Redis then
    /// stores and shows only the first 128 bits of their HMAC-SHA256. All limiters that count together need the same
    /// secret; a new secret starts every key afresh. Ids aren't hashed. Costs no round trip, and some 0.3 µs. Default:
    /// none; keys are stored as given.
    #[must_use]
    pub fn key_secret(mut self, secret: &KeySecret) -> Self {
        self.key_secret = Some(secret.clone());
        self
    }

    /// Takes the cost now, or denies and takes nothing.
    ///
    /// # Errors
    ///
    /// No decision could be made, and the rule's [policy](Rule::on_error) is the error; see [`Error`]. A rule without a
    /// name. Permits of a `concurrency` limit without an [id](Request::id) to release them by: [`hold`](Self::hold)
    /// makes one.
    pub async fn acquire<'a>(&self, rule: &Rule, request: impl Into<Request<'a>>) -> Result<Decision, Error> {
        self.decide(rule, &request.into(), Mode::Acquire).await
    }

    /// What [`acquire`](Self::acquire) would answer, without taking anything. `remaining` and `reset_after` describe
    /// the untouched key, and so does the wait if an acquire would [block](Rule::block_for) the key.
    ///
    /// # Errors
    ///
    /// No decision could be made; see [`Error`].
    pub async fn peek<'a>(&self, rule: &Rule, request: impl Into<Request<'a>>) -> Result<Decision, Error> {
        self.decide(rule, &request.into(), Mode::Peek).await
    }

    /// Takes the cost now for later: the call is allowed with a wait, after which the work may run. The level may go
    /// below zero by the rule's `max-debt`; later callers see that debt.
    ///
    /// # Errors
    ///
    /// No decision could be made; see [`Error`]. Only a token bucket, gcra or a fixed window of a period can reserve.
    pub async fn reserve<'a>(&self, rule: &Rule, request: impl Into<Request<'a>>) -> Result<Decision, Error> {
        if let Some(limit) = rule.limits().find(|limit| !limit.algorithm().reserves()) {
            let why = "expected a token bucket, gcra or fixed window of a period, which can owe units";
            return Err(Error::new(Kind::Input, format!("reserve: {why}, got {limit}")));
        }
        self.decide(rule, &request.into(), Mode::Reserve).await
    }

    /// Takes what is available, up to the cost: [`Decision::granted`] says how much. Denied if nothing is.
    ///
    /// # Errors
    ///
    /// No decision could be made; see [`Error`].
    pub async fn at_most<'a>(&self, rule: &Rule, request: impl Into<Request<'a>>) -> Result<Decision, Error> {
        self.decide(rule, &request.into(), Mode::AtMost).await
    }

    /// Gives the cost back, never above full. In windows and logs the newest units go first, and expired units give
    /// nothing back. Redis doesn't know whose units they were: a unit that has already refilled is given back a second
    /// time, so refund soon, and say [after which decision](Request::after).
    ///
    /// # Errors
    ///
    /// A rule with permits beside other limits; permits without the [id](Request::id) that holds them; no answer, see
    /// [`Error`].
    pub async fn refund<'a>(&self, rule: &Rule, request: impl Into<Request<'a>>) -> Result<Decision, Error> {
        let permits = rule.limits().filter(|limit| limit.algorithm().holds()).count();
        if permits > 0 && permits < rule.limits().len() {
            let why = "expected a rule without permits beside other limits (settle or cancel the call instead)";
            return Err(Error::new(Kind::Input, format!("refund: {why}, got {rule}")));
        }
        let request = request.into();
        match request.earlier() {
            Some(earlier) => {
                let cost = request.units(rule).min(earlier.granted);
                self.follow_up(rule, &request.cost(cost), Mode::Refund).await
            }
            None => self.follow_up(rule, &request, Mode::Refund).await,
        }
    }

    /// Takes the cost whether or not it is available, as far as the rule's arithmetic stays exact; `granted` is never
    /// more than that. [`refund`](Self::refund) forgives it; in a calendar window, the end of the window does too.
    ///
    /// # Errors
    ///
    /// No answer; see [`Error`].
    pub async fn penalty<'a>(&self, rule: &Rule, request: impl Into<Request<'a>>) -> Result<Decision, Error> {
        self.decide(rule, &request.into(), Mode::Penalty).await
    }

    /// Denies every call on the key for this long, whatever it has left; refunds, penalties and releases still count.
    /// In a rule of several limits, those that count the request's key are blocked. A call that is remembered by its id
    /// still gets its answer. [`unblock`](Self::unblock) and [`reset`](Self::reset) lift the block.
    ///
    /// # Errors
    ///
    /// A block of more than 71 years. A rule with no limit that counts the key. No answer; see [`Error`].
    pub async fn block<'a>(
        &self,
        rule: &Rule,
        request: impl Into<Request<'a>>,
        time: Duration,
    ) -> Result<Decision, Error> {
        let length = u64::try_from(time.as_nanos().div_ceil(1000)).ok().filter(|us| *us <= LONGEST_RESET_US);
        let bad = || Error::new(Kind::Input, format!("block: expected at most 71 years, got {time:?}"));
        self.decide(rule, &request.into().cost(length.ok_or_else(bad)?), Mode::Block).await
    }

    /// Lifts a [block](Self::block).
    ///
    /// # Errors
    ///
    /// The same as [`block`](Self::block).
    pub async fn unblock<'a>(&self, rule: &Rule, request: impl Into<Request<'a>>) -> Result<Decision, Error> {
        self.block(rule, request, Duration::ZERO).await
    }

    /// Extends the permits held by this [id](Request::id) to a whole ttl from now.
    ///
    /// # Errors
    ///
    /// A request without an id; [`Error::is_unknown_id`] if none is held: released or expired; no answer, see [`Error`].
    pub async fn renew<'a>(&self, rule: &Rule, request: impl Into<Request<'a>>) -> Result<Decision, Error> {
        self.change_permits("renew", rule, request.into(), Mode::Renew).await
    }

    /// Gives back the permits held by this [id](Request::id), if any are left, and forgets the id.
    ///
    /// # Errors
    ///
    /// A request without an id; no answer, see [`Error`].
    pub async fn release<'a>(&self, rule: &Rule, request: impl Into<Request<'a>>) -> Result<Decision, Error> {
        self.change_permits("release", rule, request.into(), Mode::Release).await
    }

    async fn change_permits(
        &self,
        what: &str,
        rule: &Rule,
        request: Request<'_>,
        mode: Mode,
    ) -> Result<Decision, Error> {
        if request.id.is_none() {
            return Err(Error::new(Kind::Input, format!("{what}: expected the id that holds the permits, got none")));
        }
        // Unless the request says where they were taken, look in this process first.
        #[cfg(feature = "embedded")]
        if request.earlier().is_none()
            && let Some(decision) = Box::pin(self.change_local_permits(rule, &request, mode)).await
        {
            return Ok(decision);
        }
        self.follow_up(rule, &request, mode).await
    }

    /// Replaces the cost taken by the call of this [id](Request::id) with this one, once. More is charged, available or
    /// not (as far as the arithmetic stays exact); less is given back.
    ///
    /// # Errors
    ///
    /// A request without an id; a rule of permits alone; [`Error::is_unknown_id`] if nothing is remembered of the id; no
    /// answer, see [`Error`].
    pub async fn settle<'a>(&self, rule: &Rule, request: impl Into<Request<'a>>) -> Result<Decision, Error> {
        self.change_charge("settle", rule, request.into(), Mode::Settle).await
    }

    /// Gives back what the call of this [id](Request::id) took, and forgets the id.
    ///
    /// # Errors
    ///
    /// A request without an id; a rule of permits alone; [`Error::is_unknown_id`] if nothing is remembered of the id; no
    /// answer, see [`Error`].
    pub async fn cancel<'a>(&self, rule: &Rule, request: impl Into<Request<'a>>) -> Result<Decision, Error> {
        self.change_charge("cancel", rule, request.into(), Mode::Cancel).await
    }

    async fn change_charge(
        &self,
        what: &str,
        rule: &Rule,
        request: Request<'_>,
        mode: Mode,
    ) -> Result<Decision, Error> {
        if request.id.is_none() {
            return Err(Error::new(Kind::Input, format!("{what}: expected the id of the call to {what}, got none")));
        }
        if rule.limits().all(|limit| limit.algorithm().holds()) {
            let why = format!("expected a limit that isn't concurrency, whose permits are released, got {rule}");
            return Err(Error::new(Kind::Input, format!("{what}: {why}")));
        }
        self.follow_up(rule, &request, mode).await
    }

    /// Forgets what each limit of the rule counts for this request, and the request's id if it has one. A limit that
    /// counts a [part](Request::parts), such as an organisation, is forgotten for everyone who shares that part; a
    /// limit that must outlast a reset needs a rule of its own. Repairs state that can't be read.
    ///
    /// # Errors
    ///
    /// No answer; see [`Error`].
    pub async fn reset<'a>(&self, rule: &Rule, request: impl Into<Request<'a>>) -> Result<Decision, Error> {
        self.follow_up(rule, &request.into(), Mode::Reset).await
    }

    /// The policy while Redis is away.
    fn policy(&self, rule: &Rule) -> OnError {
        rule.policy().unwrap_or(self.on_error)
    }

    async fn decide(&self, rule: &Rule, request: &Request<'_>, mode: Mode) -> Result<Decision, Error> {
        let decided = self.decide_uncounted(rule, request, mode).await;
        if matches!(mode, Mode::Acquire | Mode::Reserve | Mode::AtMost) {
            telemetry::decided(rule, decided.as_ref());
        }
        decided
    }

    /// Decides, but leaves it to the caller to count the decision: it may take several calls.
    pub(crate) async fn decide_uncounted(
        &self,
        rule: &Rule,
        request: &Request<'_>,
        mode: Mode,
    ) -> Result<Decision, Error> {
        let observed = Observed::begin(rule, mode);
        let decided = observed.around(self.decide_or_fall_back(rule, request, mode)).await;
        observed.end(&decided);
        decided
    }

    /// Decides by Redis or, while it is away, by the rule's policy.
    async fn decide_or_fall_back(&self, rule: &Rule, request: &Request<'_>, mode: Mode) -> Result<Decision, Error> {
        let decided = match &self.denials {
            None => self.decide_by_engine(rule, request, mode).await,
            Some(cache) => Box::pin(self.decide_or_recall(cache, rule, request, mode)).await,
        };
        let decision = match decided {
            Ok(decision) => decision,
            Err(error) => Box::pin(self.answer_instead(error, rule, request, mode)).await?,
        };
        Ok(decision.jittered(request.wait_jitter()))
    }

    async fn decide_by_engine(&self, rule: &Rule, request: &Request<'_>, mode: Mode) -> Result<Decision, Error> {
        // Boxed to keep the common path's future small: there may be thousands of callers.
        match rule.scoped_limits() {
            [scoped] if scoped.limit.shards() > 1 => {
                let choice = self.choose_shard(rule, scoped, request, mode);
                Box::pin(self.decide_sharded(rule, scoped, request, mode, choice)).await
            }
            [scoped] if mode == Mode::Acquire => self.decide_one(rule, scoped.whole(), request, mode).await,
            _ => Box::pin(self.decide_in_full(rule, &concerned(rule, mode, request)?, request, mode)).await,
        }
    }

    /// Decides by a single limit, or one shard of it.
    async fn decide_one(
        &self,
        rule: &Rule,
        target: Target<'_>,
        request: &Request<'_>,
        mode: Mode,
    ) -> Result<Decision, Error> {
        if mode == Mode::Acquire {
            let deadline = request.deadline_or(self.deadline);
            let began = target.limit.windows().map(|_| Instant::now());
            let begin =
                |context: &mut Context<'_>| Poll::Ready(self.begin(rule, target, request, deadline, context.waker()));
            if let Some(acquiring) = poll_fn(begin).await? {
                let reply = match acquiring.await {
                    Err(stale) if stale.stale_at().is_some() => {
                        Box::pin(self.acquire_again(rule, target, request, stale, began)).await?
                    }
                    reply => reply?,
                };
                return self.decision_of_ask(rule, target, request, &reply);
            }
        }
        Box::pin(self.decide_in_full(rule, &[target], request, mode)).await
    }

    async fn decide_in_full(
        &self,
        rule: &Rule,
        targets: &[Target<'_>],
        request: &Request<'_>,
        mode: Mode,
    ) -> Result<Decision, Error> {
        let marker = self.marker(rule, targets, request, mode)?;
        let inputs = self.limit_inputs(rule, targets, request, mode)?;
        let script = match (inputs.as_slice(), &marker) {
            ([input], None) => input.script,
            _ => &ALL_OR_NOTHING,
        };
        let reply = self.run(rule, script, &inputs, marker.as_ref(), request, mode).await?;
        self.decision(rule, targets, request, mode, &reply)
    }

    /// The decision in a reply about these limits.
    fn decision(
        &self,
        rule: &Rule,
        targets: &[Target<'_>],
        request: &Request<'_>,
        mode: Mode,
        reply: &Reply,
    ) -> Result<Decision, Error> {
        let (others, rest) = reply.appended.split_at_checked(5 * (targets.len() - 1)).ok_or_else(garbled)?;
        let fives = std::iter::once(&reply.decision).chain(others.as_chunks::<5>().0);
        // An odd count begins with `granted`; then come `blocked_us` and `overage` of each limit.
        let (appended, notes) = rest.split_at(rest.len() % 2);
        let notes = notes.as_chunks::<2>().0;
        if !notes.is_empty() && notes.len() != targets.len() {
            return Err(garbled());
        }
        let notes = notes.iter().copied().chain(std::iter::repeat([0, 0]));
        let answers = fives.zip(notes).map(|(reply, notes)| LimitAnswer::new(*reply, notes, rule.counts_denials()));
        let answers = answers.collect::<Option<Vec<_>>>().ok_or_else(garbled)?;
        let allowed = answers.iter().all(|answered| answered.allowed);
        let mut granted = granted(request.units(rule), mode, allowed, appended.first()).ok_or_else(garbled)?;
        if mode == Mode::Penalty {
            granted = targets.iter().map(|target| target.limit.most_counted()).fold(granted, u64::min);
        }
        let mut limits = targets.iter().map(|target| &target.scoped.quota).zip(&answers);
        let (by, at) = (self.engine.by(), decided_at(request, reply));
        match targets.len() {
            1 => limits.next().map(|(quota, answered)| Decision::of_one(quota, answered, granted, by, at)),
            _ => {
                let limits = limits.map(|(quota, answered)| LimitDecision::new(quota, answered)).collect();
                Decision::of_several(limits, granted, by, at)
            }
        }
        .ok_or_else(garbled)
    }

    fn decision_of_ask(
        &self,
        rule: &Rule,
        target: Target<'_>,
        request: &Request<'_>,
        reply: &Reply,
    ) -> Result<Decision, Error> {
        let notes = reply.appended.first_chunk().copied().unwrap_or_default();
        let answered = LimitAnswer::new(reply.decision, notes, false).ok_or_else(garbled)?;
        let granted = if answered.allowed { request.units(rule) } else { 0 };
        Ok(Decision::of_one(&target.scoped.quota, &answered, granted, self.engine.by(), decided_at(request, reply)))
    }
}

/// A well-formed reply that no script gives.
fn garbled() -> Error {
    Error::new(Kind::Garbled, "expected a decision of each limit within its bounds, got something else")
}

fn decided_at(request: &Request<'_>, reply: &Reply) -> SystemTime {
    request.time().unwrap_or(reply.at)
}
