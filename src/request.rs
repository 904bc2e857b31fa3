//! What a call counts by, and what it takes.

mod owned;
mod plain;

use std::time::{Duration, SystemTime};

use crate::algorithm::numbers::LONGEST_RESET_US;
use crate::call::{Costs, Taken};
use crate::decision::{DecidedBy, Decision, LimitDecision};
use crate::error::{Charged, Error, Kind};
use crate::quota::Quota;
use crate::rule::{Rule, ScopedLimit};

pub use owned::OwnedRequest;
pub(crate) use plain::PlainRequest;
use plain::{LAST_TIME, OwnCosts, Parts, Terms, microseconds};

/// How long an id is remembered by default.
const ID_TTL: Duration = Duration::from_secs(600);

/// What a call counts by, and what it takes. A plain key is a request at the rule's [cost](Rule::cost).
///
/// ```
/// use tollgate::Request;
///
/// let request = Request::new("user:42").cost(5);
/// ```
///
/// It borrows its key, parts, id and decision; [`into_owned`](Self::into_owned) copies them, for a function that
/// returns a request.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    plain: PlainRequest<'a>,
    rare: Rare,
    /// What each limit answered to the call whose units a refund gives back.
    answers: &'a [LimitDecision],
}

/// The fields that few requests have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Rare {
    id_ttl: Duration,
    after: Option<Earlier>,
    /// How long a reservation may wait. If set, a cost of 0 asks for the wait until no units are owed.
    within: Option<Duration>,
    /// How long a block lasts.
    block: Option<Duration>,
    /// Whether this process made its id, for one call alone.
    has_own_id: bool,
}

impl Rare {
    const NONE: Self = Self { id_ttl: ID_TTL, after: None, within: None, block: None, has_own_id: false };
}

/// The facts about an earlier call that matter to a call that gives back what it took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Earlier {
    pub(crate) at: TakenAt,
    /// Units that it took.
    pub(crate) granted: u64,
    /// Whether Redis took the units as well, if a policy answered in its place.
    pub(crate) charged: Charged,
    /// When it took them, in microseconds since the epoch.
    taken_us: u64,
}

/// Where a call has taken its units, as far as its answer says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TakenAt {
    /// At the limiter's engine.
    Engine,
    /// In this process, in place of Redis.
    Here,
    /// Nowhere: a policy let the call through.
    Nowhere,
}

impl Earlier {
    fn of(decision: &Decision) -> Self {
        let charged = decision.by.error().map_or(Charged::No, Error::charged);
        let at = match decision.by {
            DecidedBy::Policy(_) => TakenAt::Nowhere,
            DecidedBy::Local(_) => TakenAt::Here,
            _ => TakenAt::Engine,
        };
        let taken_us = microseconds(decision.decided_at()).unwrap_or_default();
        Self { at, granted: decision.granted, charged, taken_us }
    }
}

impl<'a> Request<'a> {
    /// A request for this key, at the rule's cost. Any bytes except an empty key.
    #[must_use]
    pub fn new(key: &'a (impl AsRef<[u8]> + ?Sized)) -> Self {
        let plain = PlainRequest {
            key: key.as_ref(),
            id: None,
            parts: Parts::NONE,
            costs: OwnCosts::NONE,
            terms: Terms::default(),
        };
        Self::of_plain(plain)
    }

    /// The request with these fields alone.
    pub(crate) fn of_plain(plain: PlainRequest<'a>) -> Self {
        Self { plain, rare: Rare::NONE, answers: &[] }
    }

    /// How long the key is denied, for [`Operation::Block`](crate::Operation::Block): at most 71 years; 0 lifts a
    /// block. Other operations don't use it. ([`Rule::block_for`](crate::Rule::block_for) blocks keys that are denied.)
    #[must_use]
    pub fn block_for(mut self, time: Duration) -> Self {
        self.rare.block = Some(time);
        self
    }

    /// What limits count by instead of the key, by name; see [`Rule::and_by`].
    ///
    /// ```
    /// use tollgate::Request;
    ///
    /// let request = Request::new("user:42").parts(&[("org", b"acme")]);
    /// ```
    #[must_use]
    pub fn parts(mut self, parts: &'a [(&'a str, &'a [u8])]) -> Self {
        self.plain.parts = Parts::Borrowed(parts);
        self
    }

    /// A name for this call, of any bytes, such as a UUID. While it is remembered, the same id for the same key and
    /// rule gets the same answer and is charged once, so a call that got no answer can be sent again; and its cost can
    /// be [settled](crate::Limiter::settle). Only allowed calls are remembered. If a rule has permits, they are held by
    /// this id, and the call is remembered only while they are held. Calls about it, such as a release or a settlement,
    /// name the same key and [parts](Self::parts).
    ///
    /// On a cluster, a rule whose limits count by different keys needs a [tag](crate::Rule::tagged) for calls with an
    /// id; without one, they are errors of class `input`.
    ///
    /// An id belongs to one operation: an acquire by the id of a reservation is misuse, an error of class `input`.
    ///
    /// Under a rule of permits alone, an id only names their holder: acquires, at-mosts and penalties may share it.
    /// Each penalty adds permits to it and each refund takes some back, even one that is sent again.
    #[must_use]
    pub fn id(mut self, id: &'a (impl AsRef<[u8]> + ?Sized)) -> Self {
        self.plain.id = Some(id.as_ref());
        self
    }

    /// How long the id is remembered. Default: 10 minutes.
    #[must_use]
    pub fn id_ttl(mut self, ttl: Duration) -> Self {
        self.rare.id_ttl = ttl;
        self
    }

    /// Units that it takes of each limit without a cost of its own; 0 takes nothing. Default: the [rule's](Rule::cost),
    /// which itself defaults to 1.
    #[must_use]
    pub fn cost(mut self, units: u64) -> Self {
        self.plain.terms.cost = Some(units);
        self
    }

    /// Units that it takes of these limits, by their [names](crate::Limit::named) (of a limit without a name, its
    /// text), whatever cost the rule [gives them](Rule::cost_of). A name that no limit of the rule has is an error of
    /// class `input`.
    ///
    /// ```
    /// use tollgate::{Limit, Request, Rule};
    ///
    /// let requests: Limit = "token-bucket 60/1m".parse()?;
    /// let tokens: Limit = "token-bucket 100000/1m".parse()?;
    /// let rule = Rule::new("model", requests)?.and(tokens.named("tokens")?)?;
    /// // One of 60 requests, and 900 of 100,000 tokens.
    /// let request = Request::new("user:42").costs(&[("tokens", 900)]);
    /// # Ok::<(), tollgate::RuleError>(())
    /// ```
    #[must_use]
    pub fn costs(mut self, units: &'a [(&'a str, u64)]) -> Self {
        self.plain.costs = OwnCosts::Borrowed(units);
        self
    }

    /// Decides as if it were this time, from 1970 to 2112. Default: the engine's own clock.
    #[must_use]
    pub fn at(mut self, now: SystemTime) -> Self {
        self.plain.terms.at = Some(now);
        self
    }

    /// Lengthens a denial's wait randomly, by at most this many percent, so that callers denied together don't come
    /// back together. Default: 0, the exact wait.
    #[must_use]
    pub fn jitter(mut self, percent: u8) -> Self {
        self.plain.terms.jitter = percent;
        self
    }

    /// How long this call may take. Default: the limiter's deadline.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.plain.terms.deadline = Some(deadline);
        self
    }

    /// Gives back what the call with this decision took: for [`refund`](crate::Limiter::refund),
    /// [`settle`](crate::Limiter::settle), [`cancel`](crate::Limiter::cancel), [`release`](crate::Limiter::release),
    /// [`renew`](crate::Limiter::renew) and [`reset`](crate::Limiter::reset). Other calls ignore it.
    ///
    /// A refund gives back no more than was granted, so nothing for a call that was denied; and to each limit no more
    /// than is still owed to it: what has refilled or left its window since then is gone. What has refilled is computed
    /// from the two calls' times on this machine (or on an embedded engine's own clock), so it is off by at most a
    /// round trip, plus whatever the clock was set back in between. A refund doesn't know what was given back since:
    /// two refunds after one decision give back its units twice. If the call was made while its key was blocked, such
    /// as a penalty, or the rule's numbers have changed since, it gives back less, mostly nothing.
    /// [`cancel`](crate::Limiter::cancel) and [`settle`](crate::Limiter::settle) know all that, in Redis, and give back
    /// once.
    ///
    /// If a [policy](crate::OnError) answered that call, nothing is given back, unless Redis may have taken the units
    /// all the same. That is no error: the answer is [`DecidedBy::Policy`](crate::DecidedBy::Policy). If the engine in
    /// this process answered ([`DecidedBy::Local`](crate::DecidedBy::Local)), the units are given back there. If Redis
    /// may have taken the units although something else answered, it is also asked to settle, cancel, release or reset,
    /// none of which can give back what it didn't take. A refund could, so it is sent only if Redis certainly took them
    /// ([`Charged::Yes`](crate::Charged::Yes)).
    ///
    /// ```
    /// use tollgate::{Decision, Request};
    ///
    /// /// A request that forgets this attempt to log in, and all before it.
    /// fn forgotten<'a>(account: &'a str, attempt: &'a Decision) -> Request<'a> {
    ///     Request::new(account).after(attempt)
    /// }
    /// ```
    #[must_use]
    pub fn after(self, decision: &'a Decision) -> Self {
        Self { answers: &decision.limits, ..self.following(decision) }
    }

    /// The same for any call but a refund, which alone has to know what each limit answered.
    pub(crate) fn following(mut self, decision: &Decision) -> Self {
        self.rare.after = Some(Earlier::of(decision));
        self
    }

    /// With an id that this process made for this call: nobody else knows it, and no other call has it.
    pub(crate) fn own_id(mut self, id: &'a (impl AsRef<[u8]> + ?Sized)) -> Self {
        self.rare.has_own_id = true;
        self.id(id)
    }

    /// The same at this cost of all limits, also of those with a cost of their own.
    pub(crate) fn cost_of_all(mut self, units: u64) -> Self {
        self.plain.terms = Terms { cost: Some(units), of_all: true, ..self.plain.terms };
        self
    }

    /// The same, at the time, by the deadline and with the jitter of another one.
    pub(crate) fn with_terms_of(mut self, other: &Request<'_>) -> Self {
        let Terms { at, deadline, jitter, .. } = other.plain.terms;
        self.plain.terms = Terms { at, deadline, jitter, ..self.plain.terms };
        self
    }

    /// The same, with copies of what it borrows.
    #[must_use]
    pub fn into_owned(self) -> OwnedRequest {
        OwnedRequest::of(self)
    }
}

impl<'a> Request<'a> {
    /// The fields that an acquire depends on, without its id's own time.
    pub(crate) fn plain(&self) -> &PlainRequest<'a> {
        &self.plain
    }

    pub(crate) fn key(&self) -> &'a [u8] {
        self.plain.key
    }

    /// See [`PlainRequest::units`].
    pub(crate) fn units(&self, rule: &Rule) -> Costs {
        self.plain.units(rule)
    }

    /// What a refund gives back: of a known call, no more than it took.
    pub(crate) fn units_to_give_back<'r>(
        &self,
        rule: &Rule,
        limits: impl Iterator<Item = &'r ScopedLimit> + Clone,
    ) -> Costs {
        let units = self.plain.units_of(rule, limits.clone());
        let Some(earlier) = self.rare.after else { return units };
        Costs::each_of(limits.enumerate().map(|(at, scoped)| {
            let its = answer_of(self.answers, &scoped.quota);
            units.of(at).min(its.map_or(earlier.granted, |its| its.granted))
        }))
    }

    /// See [`PlainRequest::now_us`].
    pub(crate) fn now_us(&self) -> Result<Option<u64>, Error> {
        self.plain.now_us()
    }

    /// See [`PlainRequest::time`].
    pub(crate) fn time(&self) -> Option<SystemTime> {
        self.plain.time()
    }

    /// See [`PlainRequest::deadline_or`].
    pub(crate) fn deadline_or(&self, deadline: Duration) -> Duration {
        self.plain.deadline_or(deadline)
    }

    /// See [`PlainRequest::wait_jitter`].
    pub(crate) fn wait_jitter(&self) -> u8 {
        self.plain.wait_jitter()
    }

    /// A reservation that is denied if it would have to wait longer.
    pub(crate) fn within(mut self, wait: Duration) -> Self {
        self.rare.within = Some(wait);
        self
    }

    pub(crate) fn block_time(&self) -> Option<Duration> {
        self.rare.block
    }

    /// How long a reservation may wait, in microseconds, as far as scripts take it.
    pub(crate) fn within_us(&self) -> Option<u64> {
        let us = self.rare.within?.as_micros();
        Some(u64::try_from(us).map_or(LONGEST_RESET_US, |us| us.min(LONGEST_RESET_US)))
    }

    /// The call whose units it gives back.
    pub(crate) fn earlier(&self) -> Option<Earlier> {
        self.rare.after
    }

    /// The same as these limits take it: how long ago it was, and the reset that each of them answered.
    pub(crate) fn taken<'q>(
        &self,
        limits: impl Iterator<Item = &'q Quota>,
        now: impl FnOnce() -> SystemTime,
    ) -> Option<Taken> {
        let earlier = self.rare.after?;
        let now_us = microseconds(now()).unwrap_or_default();
        let reset_us = |quota: &Quota| {
            let its = answer_of(self.answers, quota);
            // Where the reset isn't known, as of a blocked key, nothing is given back.
            let reset = its.filter(|its| !its.blocked).map_or(Duration::ZERO, |its| its.reset_after);
            u64::try_from(reset.as_micros()).unwrap_or(LAST_TIME).min(LAST_TIME)
        };
        let resets_us = limits.map(reset_us).collect();
        Some(Taken { ago_us: now_us.saturating_sub(earlier.taken_us), resets_us })
    }

    /// How long the id is remembered, in milliseconds.
    pub(crate) fn id_ttl_ms(&self) -> Result<u64, Error> {
        let got = self.rare.id_ttl;
        let ttl_ms = u64::try_from(got.as_millis()).ok().filter(|ms| (1..=LAST_TIME).contains(ms));
        ttl_ms.ok_or_else(|| Error::new(Kind::Input, format!("id_ttl: expected 1ms to 2^52 ms, got {got:?}")))
    }

    /// Whether it sets its own cost.
    pub(crate) fn has_cost(&self) -> bool {
        self.plain.terms.cost.is_some() || !self.plain.costs.is_empty()
    }

    pub(crate) fn has_id(&self) -> bool {
        self.plain.id.is_some()
    }

    /// Whether its id, if it has one, is [this process's own](Self::own_id).
    pub(crate) fn has_own_id(&self) -> bool {
        self.rare.has_own_id
    }

    /// Whether its id is remembered for a time of its own.
    pub(crate) fn has_id_ttl(&self) -> bool {
        self.rare.id_ttl != ID_TTL
    }

    /// Keeps the id for as long after the wait as it would be kept without one.
    pub(crate) fn id_remembered_beyond(self, wait: Duration) -> Self {
        self.id_ttl(wait.saturating_add(self.rare.id_ttl))
    }
}

/// What this limit answered.
fn answer_of<'d>(answers: &'d [LimitDecision], quota: &Quota) -> Option<&'d LimitDecision> {
    answers.iter().find(|its| its.quota.label() == quota.label() && its.quota.rule() == quota.rule())
}

impl<'a, K: AsRef<[u8]> + ?Sized> From<&'a K> for Request<'a> {
    fn from(key: &'a K) -> Self {
        Self::new(key)
    }
}
