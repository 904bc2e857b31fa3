//! What each limit of a rule says.

use std::ops::Deref;
use std::slice;
use std::sync::Arc;
use std::time::Duration;

use smallvec::{SmallVec, smallvec};

use super::{RetryAfter, count};
use crate::algorithm::Algorithm;
use crate::call::LimitReply;
use crate::limit::CalendarUnit;
use crate::quota::Quota;

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
pub struct LimitDecisions(pub(super) SmallVec<[LimitDecision; 1]>);

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
    pub(super) fn of_one(limit: LimitDecision) -> Self {
        Self(smallvec![limit])
    }

    /// The name of the first limit that denied.
    pub(super) fn first_denial(&self) -> Option<Arc<str>> {
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
