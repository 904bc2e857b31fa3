//! The answer to one call.

mod balance;
mod decided_by;
mod decisions;
mod denied;
mod limits;
mod retry_after;
#[cfg(feature = "serde")]
mod serialized;
mod several;

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use crate::error::Error;
use crate::quota::Quota;
use crate::random::jittered;
use crate::wall_clock;

pub use balance::{Balance, LimitBalance};
pub use decided_by::DecidedBy;
pub use decisions::Decisions;
pub use denied::Denied;
pub use limits::{LimitDecision, LimitDecisions};
pub use retry_after::RetryAfter;

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
    /// When the same request would be allowed if no other takes units: the longest wait of its limits. For a
    /// reservation that is allowed, how long it must wait before it may run.
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
    /// The first limit that denied: its name or, if unnamed, its text. If several do, another may have the longest
    /// wait: [`limits`](Self::limits) has each.
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
            limits: LimitDecisions::of_one(limit),
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

/// Scripts return no negative counts, and none beyond what their numbers can hold.
pub(crate) fn count(value: i64) -> Option<u64> {
    u64::try_from(value).ok().filter(|count| *count <= 1 << 53)
}
