//! The answer to one call.

mod balance;
#[cfg(feature = "serde")]
mod serialized;
mod several;

use std::fmt;
use std::ops::Deref;
use std::slice;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use smallvec::{SmallVec, smallvec};

use crate::algorithm::Algorithm;
use crate::call::LimitReply;
use crate::error::Error;
use crate::limit::CalendarUnit;
use crate::quota::Quota;
use crate::random::jittered;
use crate::wall_clock;

pub use balance::{Balance, LimitBalance};

/// The answer: allow or deny, and the state after it.
///
/// For a rule of several limits, `capacity` and `remaining` are those of the limit with the least remaining, and the
/// waits are the largest.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Decision {
    /// Whether the request may proceed. Always true of a penalty.
    pub allowed: bool,
    /// The most units that can be taken at one instant.
    pub capacity: u64,
    /// Whole units that can be taken right now, after this decision.
    pub remaining: u64,
    /// When the same request would be allowed if no other takes units; for a reservation, when it may run.
    pub retry_after: RetryAfter,
    /// How long until the key is as if it had never been used.
    pub reset_after: Duration,
    /// Units that this call took; if limits have [costs of their own](crate::Rule::cost_of), the most of any.
    pub granted: u64,
    /// Whether the key is blocked, whatever it has left: by [`block`](crate::Limiter::block), or by a denial, this one
    /// included, under a rule with [`block_for`](crate::Rule::block_for).
    pub blocked: bool,
    /// Denied calls, counted from the first of them for the limit's longest reset, which distinguishes a surge from a
    /// small excess. None unless the rule [counts them](crate::Rule::count_overage).
    pub overage: Option<u64>,
    /// The first limit that denied: its name or, if unnamed, its text.
    pub denied_by: Option<Arc<str>>,
    /// Each limit's own decision, in the rule's order. Empty if the policy answered, which doesn't know the state.
    pub limits: LimitDecisions,
    /// What answered; if that wasn't Redis because Redis failed, with its error.
    pub by: DecidedBy,
    /// The caller's `now`, otherwise this machine's time when the answer arrived.
    decided_at: SystemTime,
    /// The id of the try that took the units, if it wasn't the first.
    taken_by: Option<Arc<[u8]>>,
}

/// One limit's part in a decision.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LimitDecision {
    /// The limit: its name and its numbers.
    pub(crate) quota: Arc<Quota>,
    /// Whether this limit allowed. If another denied, nothing was taken here either.
    pub allowed: bool,
    /// The most units that can be taken from it at one instant.
    pub capacity: u64,
    /// Whole units that can be taken from it right now.
    pub remaining: u64,
    /// When it would allow the same request.
    pub retry_after: RetryAfter,
    /// How long until its key is as if never used.
    pub reset_after: Duration,
    /// Units that this call took from it.
    pub granted: u64,
    /// Whether its key is blocked.
    pub blocked: bool,
    /// Denied calls on it, if the rule counts them.
    pub overage: Option<u64>,
}

/// The decisions of a rule's limits: a slice of [`LimitDecision`]. A single one, as most rules have, needs no
/// allocation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LimitDecisions(SmallVec<[LimitDecision; 1]>);

/// When a request would be allowed, counted from the decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum RetryAfter {
    /// It is allowed.
    Now,
    /// Not before this time has passed, and exactly then if no other call takes units.
    After(Duration),
    /// The cost is above what the rule could ever admit.
    Never,
}

/// What answered: an engine, this process for it, or something in place of a Redis that failed, with the error. So `?`
/// on a call ends it where the policy is [`Closed`](crate::OnError::Closed), and goes on where the policy answers; who
/// must know which of both it was asks [`error`](Self::error).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DecidedBy {
    /// Redis.
    Redis,
    /// The engine in this process.
    Embedded,
    /// A [`DenialCache`](crate::DenialCache), which remembers what the engine said.
    DenialCache,
    /// A [`Lease`](crate::Lease), from the units that it holds.
    Lease,
    /// The engine in this process, since Redis failed with this: `OnError::Local`. None for a call that gives back what
    /// was taken here, for which Redis wasn't asked.
    Local(Option<Arc<Error>>),
    /// The rule's policy, since Redis failed with this: [`OnError::Open`](crate::OnError::Open). Nothing was taken,
    /// unless the error [says](Error::charged) otherwise; see [`Request::after`](crate::Request::after). None for a call
    /// that gives back what such a call had let through, for which Redis wasn't asked.
    Policy(Option<Arc<Error>>),
}

/// A denial as an error, for callers that use `?`. The message names what denied and contains no time, so that logs can
/// be grouped by it; [`decision`](Self::decision) has the wait.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Denied {
    decision: Box<Decision>,
}

impl Decision {
    /// The decision of these limits; none if there are no limits.
    pub(crate) fn of(limits: LimitDecisions, by: DecidedBy, decided_at: SystemTime) -> Option<Self> {
        let scarcest = limits.iter().min_by_key(|limit| limit.remaining)?;
        let denied_by = limits.first_denial();
        Some(Self {
            allowed: denied_by.is_none(),
            capacity: scarcest.capacity,
            remaining: scarcest.remaining,
            retry_after: limits.iter().map(|limit| limit.retry_after).max()?,
            reset_after: limits.iter().map(|limit| limit.reset_after).max()?,
            granted: limits.iter().map(|limit| limit.granted).max()?,
            blocked: limits.iter().any(|limit| limit.blocked),
            overage: limits.iter().filter_map(|limit| limit.overage).max(),
            denied_by,
            limits,
            by,
            decided_at,
            taken_by: None,
        })
    }

    /// The same of a single limit.
    pub(crate) fn of_one(limit: LimitDecision, by: DecidedBy, decided_at: SystemTime) -> Self {
        Self {
            allowed: limit.allowed,
            capacity: limit.capacity,
            remaining: limit.remaining,
            retry_after: limit.retry_after,
            reset_after: limit.reset_after,
            granted: limit.granted,
            blocked: limit.blocked,
            overage: limit.overage,
            denied_by: (!limit.allowed).then(|| Arc::clone(limit.quota.title())),
            limits: LimitDecisions(smallvec![limit]),
            by,
            decided_at,
            taken_by: None,
        }
    }

    /// The name of the rule that decided, of several that apply together the first that denies; none if its policy did.
    #[must_use]
    pub fn rule(&self) -> Option<&str> {
        let denies = self.limits.iter().find(|limit| !limit.allowed);
        denies.or(self.limits.first())?.quota.rule()
    }

    /// Whether the limits of this rule allowed, whatever those of others said.
    pub(crate) fn is_allowed_by(&self, rule: Option<&str>) -> bool {
        let mut own = self.limits.iter().filter(|limit| limit.quota.rule() == rule).peekable();
        if own.peek().is_none() { self.allowed } else { own.all(|limit| limit.allowed) }
    }

    /// When it was made, by this machine's clock or, if the caller gave a time or a clock, by that.
    pub(crate) fn decided_at(&self) -> SystemTime {
        self.decided_at
    }

    /// The time since it was made, by this machine's clock.
    pub(crate) fn age(&self) -> Duration {
        wall_clock::now().duration_since(self.decided_at).unwrap_or_default()
    }

    /// The same denial, repeated this long after it was made. `remaining` is as it was then.
    pub(crate) fn recalled(&self, since: Duration) -> Self {
        let mut again = self.clone();
        again.by = DecidedBy::DenialCache;
        again.decided_at += since;
        again.retry_after = again.retry_after.less(since);
        again.reset_after = again.reset_after.saturating_sub(since);
        for limit in again.limits.0.iter_mut() {
            limit.retry_after = limit.retry_after.less(since);
            limit.reset_after = limit.reset_after.saturating_sub(since);
            limit.allowed = limit.retry_after == RetryAfter::Now;
        }
        again.denied_by = again.limits.first_denial().or(again.denied_by);
        again
    }

    /// An allowed call that took units held in this process.
    pub(crate) fn leased(
        quota: &Arc<Quota>,
        remaining: u64,
        granted: u64,
        reset_after: Duration,
        at: SystemTime,
    ) -> Self {
        let limit = LimitDecision {
            quota: Arc::clone(quota),
            allowed: true,
            capacity: quota.capacity(),
            remaining,
            retry_after: RetryAfter::Now,
            reset_after,
            granted,
            blocked: false,
            overage: None,
        };
        Self::of_one(limit, DecidedBy::Lease, at)
    }

    /// Allowed without knowing the state, while Redis is unreachable.
    pub(crate) fn by_policy(capacity: u64, granted: u64) -> Self {
        Self {
            allowed: true,
            capacity,
            remaining: 0,
            retry_after: RetryAfter::Now,
            reset_after: Duration::ZERO,
            granted,
            blocked: false,
            overage: None,
            denied_by: None,
            limits: LimitDecisions::default(),
            by: DecidedBy::Policy(None),
            decided_at: wall_clock::now(),
            taken_by: None,
        }
    }

    /// Denied, since the rule could never admit it.
    pub(crate) fn never(self) -> Self {
        Self { allowed: false, granted: 0, retry_after: RetryAfter::Never, ..self }
    }

    /// With the error from asking Redis, in whose place this was decided.
    pub(crate) fn instead_of(mut self, error: Error) -> Self {
        self.by = self.by.because_of(Some(Arc::new(error)));
        self
    }

    /// After a reservation's wait.
    pub(crate) fn waited(&mut self) {
        self.retry_after = RetryAfter::Now;
        self.limits.0.iter_mut().for_each(|limit| limit.retry_after = RetryAfter::Now);
    }

    /// With the waits of this decision, which blocks it.
    pub(crate) fn wait_as(&mut self, blocked: &Self) {
        self.retry_after = blocked.retry_after;
        for (limit, blocked) in self.limits.0.iter_mut().zip(&blocked.limits) {
            limit.retry_after = blocked.retry_after;
        }
    }

    /// The state after a reservation was cancelled, and why it was.
    pub(crate) fn denied_instead(mut self, reservation: &Self) -> Self {
        self.allowed = false;
        self.granted = 0;
        self.retry_after = reservation.retry_after;
        for (limit, reserved) in self.limits.0.iter_mut().zip(&reservation.limits) {
            limit.retry_after = reserved.retry_after;
            limit.allowed = limit.retry_after == RetryAfter::Now;
            limit.granted = 0;
        }
        self.denied_by = self.limits.first_denial();
        self
    }

    /// The same after what these rules took, except permits, is given back, as far as known without asking; for header
    /// fields.
    pub(crate) fn given_back(mut self, has: impl Fn(Option<&str>) -> bool) -> Self {
        let units = |limit: &&mut LimitDecision| !limit.quota.algorithm().holds() && has(limit.quota.rule());
        for limit in self.limits.0.iter_mut().filter(units) {
            let back = std::mem::take(&mut limit.granted);
            limit.remaining = limit.remaining.saturating_add(back).min(limit.capacity);
            if limit.remaining == limit.capacity {
                limit.reset_after = Duration::ZERO;
            }
        }
        self
    }

    /// With a denial's wait lengthened randomly, by at most this many percent.
    pub(crate) fn jittered(mut self, percent: u8) -> Self {
        if let (false, 1.., RetryAfter::After(wait)) = (self.allowed, percent, self.retry_after) {
            self.retry_after = RetryAfter::After(jittered(wait, percent));
            if let [only] = self.limits.0.as_mut_slice() {
                only.retry_after = self.retry_after;
            }
        }
        self
    }

    /// The time at which the same request would be allowed; none if never.
    #[must_use]
    pub fn retry_at(&self) -> Option<SystemTime> {
        match self.retry_after {
            RetryAfter::Now => Some(self.decided_at),
            RetryAfter::After(wait) => Some(self.decided_at + wait),
            RetryAfter::Never => None,
        }
    }

    /// The time at which the key is as if never used.
    #[must_use]
    pub fn reset_at(&self) -> SystemTime {
        self.decided_at + self.reset_after
    }

    /// The decision if it allows, otherwise a [`Denied`].
    ///
    /// # Errors
    ///
    /// The denial.
    pub fn into_result(self) -> Result<Self, Denied> {
        if self.allowed { Ok(self) } else { Err(Denied::of(self)) }
    }
}

impl LimitDecision {
    /// From the reply for a limit with this capacity, which granted this many units. None if no script can give that
    /// reply.
    pub(crate) fn new(
        quota: &Arc<Quota>,
        capacity: u64,
        reply: &LimitReply,
        granted: u64,
        counts_overage: bool,
    ) -> Option<Self> {
        let LimitReply { allowed, remaining, retry_after_us, reset_after_us, blocked, granted: _, overage } = *reply;
        let remaining = count(remaining)?;
        if remaining > capacity || retry_after_us < if allowed { 0 } else { -1 } || !allowed && retry_after_us == 0 {
            return None;
        }
        Some(Self {
            quota: Arc::clone(quota),
            allowed,
            capacity,
            remaining,
            retry_after: RetryAfter::from_reply(retry_after_us)?,
            reset_after: Duration::from_micros(count(reset_after_us)?),
            granted,
            blocked,
            overage: Some(count(overage)?).filter(|_| counts_overage),
        })
    }

    /// The name of the limit or, if unnamed, its text. To keep it costs no copy.
    #[must_use]
    pub fn name(&self) -> &Arc<str> {
        self.quota.title()
    }

    /// The name of the rule that has the limit.
    #[must_use]
    pub fn rule(&self) -> Option<&str> {
        self.quota.rule()
    }

    /// The limit's algorithm.
    #[must_use]
    pub fn algorithm(&self) -> Algorithm {
        self.quota.algorithm()
    }

    /// Units per [period](Self::period); for permits, how many at once.
    #[must_use]
    pub fn rate(&self) -> u64 {
        self.quota.rate()
    }

    /// The limit's period, as in [`Limit::period`](crate::Limit::period).
    #[must_use]
    pub fn period(&self) -> Duration {
        self.quota.period()
    }

    /// The unit of the limit's calendar windows, if it has any: day, week, month or year.
    #[must_use]
    pub fn window(&self) -> Option<CalendarUnit> {
        self.quota.window()
    }
}

impl LimitDecisions {
    /// The name of the first limit that denied.
    fn first_denial(&self) -> Option<Arc<str>> {
        self.iter().find(|limit| !limit.allowed).map(|limit| Arc::clone(limit.quota.title()))
    }
}

impl FromIterator<LimitDecision> for LimitDecisions {
    fn from_iter<I: IntoIterator<Item = LimitDecision>>(limits: I) -> Self {
        Self(limits.into_iter().collect())
    }
}

impl Deref for LimitDecisions {
    type Target = [LimitDecision];

    fn deref(&self) -> &[LimitDecision] {
        &self.0
    }
}

impl<'a> IntoIterator for &'a LimitDecisions {
    type Item = &'a LimitDecision;
    type IntoIter = slice::Iter<'a, LimitDecision>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

/// Scripts return no negative counts, and none beyond what their numbers can hold.
pub(crate) fn count(value: i64) -> Option<u64> {
    u64::try_from(value).ok().filter(|count| *count <= 1 << 53)
}

impl Denied {
    pub(crate) fn of(decision: Decision) -> Self {
        Self { decision: Box::new(decision) }
    }

    /// The decision that denied.
    #[must_use]
    pub fn decision(&self) -> &Decision {
        &self.decision
    }

    /// The decision itself.
    #[must_use]
    pub fn into_decision(self) -> Decision {
        *self.decision
    }
}

impl fmt::Display for Denied {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Decision { blocked, retry_after, capacity, denied_by, .. } = &*self.decision;
        f.write_str("denied")?;
        if let Some(name) = denied_by {
            write!(f, " by {name}")?;
        }
        match retry_after {
            RetryAfter::Never => write!(f, ": the cost is above the limit of {capacity}"),
            _ if *blocked => f.write_str(": blocked"),
            _ => Ok(()),
        }
    }
}

impl std::error::Error for Denied {}

impl RetryAfter {
    fn from_reply(us: i64) -> Option<Self> {
        Some(match us {
            0 => Self::Now,
            -1 => Self::Never,
            _ => Self::After(Duration::from_micros(count(us)?)),
        })
    }

    /// What is left after this time.
    fn less(self, passed: Duration) -> Self {
        match self {
            Self::After(wait) if wait > passed => Self::After(wait - passed),
            Self::After(_) => Self::Now,
            other => other,
        }
    }

    /// The wait: zero for `Now`, none for `Never`.
    #[must_use]
    pub fn duration(self) -> Option<Duration> {
        match self {
            Self::Now => Some(Duration::ZERO),
            Self::After(wait) => Some(wait),
            Self::Never => None,
        }
    }
}

impl DecidedBy {
    /// The word in metrics, logs and JSON: `redis`, `embedded`, `denial-cache`, `lease`, `local` or `policy`.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Redis => "redis",
            Self::Embedded => "embedded",
            Self::DenialCache => "denial-cache",
            Self::Lease => "lease",
            Self::Local(_) => "local",
            Self::Policy(_) => "policy",
        }
    }

    /// What Redis failed with, if something else answered in its place.
    #[must_use]
    pub fn error(&self) -> Option<&Error> {
        match self {
            Self::Local(error) | Self::Policy(error) => error.as_deref(),
            _ => None,
        }
    }

    /// The same with this error of Redis, if it answered in the place of Redis.
    pub(crate) fn because_of(self, error: Option<Arc<Error>>) -> Self {
        match self {
            Self::Local(_) => Self::Local(error),
            Self::Policy(_) => Self::Policy(error),
            by => by,
        }
    }
}

impl fmt::Display for DecidedBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
