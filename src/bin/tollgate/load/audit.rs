//! What was admitted, held against what an exact limiter could have admitted.
//!
//! When each decision was made isn't known, only that it was between the call's being sent and answered. So nothing is
//! called a fault unless no choice of those times makes it right:
//!
//! - **Over-admissions.** Is there a time for each admitted call, within its bounds, at which an exact limiter admits
//!   it? All cost the same, so only how many are taken by when matters, and taking earlier never leaves less for
//!   later. Where calls are answered in the order in which they are sent, each is therefore best decided in that
//!   order and as early as possible, and one that can't be decided before its answer came is one too many. A call
//!   that others overtook may have been decided before or after them, and deciding it early may be the wrong choice:
//!   so those who overtook it count as sent when it was. That can hide a fault and never makes one up.
//! - **False denials.** Let every call that was admitted, or may have been, be charged as late as it can have been,
//!   whether there is room or not. What is left then is the least that can have been left as the denied call was
//!   sent. Calls that may have come between it and its answer take their cost each. A denial is false if there was
//!   enough even so.
//!
//! A limit with shards is held against the whole limit, so its false denials are what the shards cost.
//!
//! Both rest on two laws of every limit but those that [`fits`] refuses: what is left grows with time while nobody
//! takes, and a unit that is taken later leaves no more. The exact limiter is the embedded engine, which runs the
//! scripts themselves on the times of the calls: there is no arithmetic of limits here.

use std::time::{Duration, UNIX_EPOCH};

use serde::Serialize;
use tollgate::{Clock, Decision, Embedded, Error, Limiter, Request, RetryAfter, Rule, RuleError, Start};

use super::ledger::{Call, Verdict};
use crate::attributes::Pairs;
use crate::output::micros;
use crate::subject::Subject;

/// By how much a decision may lie outside of its call's bounds: what the clock of Redis may differ from this
/// process's. They are one clock on one machine, but each reads it in its own way, and a run ends unaudited if the two
/// are found further apart.
pub(super) const SLACK: Duration = Duration::from_millis(1);

/// What the audit found, with the names and the order that other programs rely on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Audit {
    pub(super) calls: u64,
    /// So many there were to judge: the audit is of a sample if they were more than are kept.
    pub(super) total: u64,
    /// So many more were certainly not decided by the engine: they failed before they were sent, or somebody answered in
    /// its place. They prove nothing.
    pub(super) left_out: u64,
    pub(super) keys: u64,
    pub(super) admitted: u64,
    /// What an exact limiter admits of these calls if each is decided midway between its bounds: to compare, not to
    /// judge by.
    pub(super) exact_admitted: u64,
    /// So many calls were admitted at least that no exact limiter would have admitted.
    pub(super) over_admissions: u64,
    /// So many were denied that every exact limiter would have admitted.
    pub(super) false_denials: u64,
    /// Of no key more could be left out, so the end of the run was.
    #[serde(skip)]
    pub(super) of_beginning: bool,
    /// That one shard denies what others still had is what shards cost, and no fault.
    #[serde(skip)]
    pub(super) sharded: bool,
}

impl Audit {
    pub(super) fn found_faults(&self) -> bool {
        self.over_admissions > 0 || (self.false_denials > 0 && !self.sharded)
    }
}

/// What a rule is held against: one limiter, also where its limit is split into shards.
pub(super) struct Standard {
    rule: Rule,
    sharded: bool,
}

impl Standard {
    pub(super) fn of(rule: &Rule) -> Result<Self, RuleError> {
        let Some(limit) = rule.limits().find(|limit| limit.shards() > 1) else {
            return Ok(Self { rule: rule.clone(), sharded: false });
        };
        Ok(Self { rule: Rule::new(rule.name().unwrap_or_default(), limit.whole())?, sharded: true })
    }
}

/// Whether the rule can be audited, or why not.
pub(super) fn fits(subject: &Subject) -> Result<(), String> {
    if let Some(limit) = subject.counts_a_part() {
        return Err(format!("{limit}: it counts a part that all keys share, and the audit is of each key by itself"));
    }
    if subject.rule.blocks_for().is_some() {
        return Err(
            "a denial blocks its key, so which call was denied first decides the rest, which can't be known".into()
        );
    }
    for limit in subject.rule.limits() {
        let why = if limit.algorithm().holds() {
            "permits are held and released, which the audit doesn't follow".to_owned()
        } else if limit.start() == Start::FirstHit {
            "where its windows start depends on which call came first, which can't be known".to_owned()
        } else if limit.tick() > Duration::from_micros(1) {
            format!("its clock ticks in steps of {:?}, and is rounded against the caller", limit.tick())
        } else {
            continue;
        };
        return Err(format!("{limit}: {why}"));
    }
    Ok(())
}

/// Judges calls, which are about these keys and parts, that are sorted by key and by the time at which they were sent. Every call that was sent until `until`
/// is among them.
pub(super) async fn audit(
    standard: &Standard,
    whom: &(dyn Fn(u32) -> (Vec<u8>, Pairs) + Sync),
    cost: u64,
    calls: &[Call],
    until: u64,
    mut progress: impl FnMut(usize),
) -> Result<Audit, Error> {
    let mut audit = Audit { sharded: standard.sharded, ..Audit::default() };
    // Its clock stands still: nothing expires but in the time of the calls.
    let limiter = Limiter::new(Embedded::with_clock(Clock::set_to(UNIX_EPOCH)));
    for calls in calls.chunk_by(|one, other| one.key == other.key) {
        let (name, parts) = calls.first().map(|call| whom(call.key)).unwrap_or_default();
        let parts: Vec<_> = parts.iter().map(|(name, value)| (name.as_str(), value.as_slice())).collect();
        let exact = Exact { limiter: &limiter, rule: &standard.rule, key: &name, parts: &parts, cost };
        let with = |verdict| calls.iter().filter(move |call| call.verdict == verdict).copied().map(Bounds::of);
        let (admitted, unknown): (Vec<_>, Vec<_>) =
            (with(Verdict::Allowed).collect(), with(Verdict::Unknown).collect());
        // Who was denied after calls that aren't among these may have been denied because of them.
        let denied: Vec<_> = with(Verdict::Denied).filter(|denied| denied.last <= until).collect();
        audit.keys += 1;
        audit.calls += calls.len() as u64;
        audit.admitted += admitted.len() as u64;
        audit.exact_admitted += exact.admits(calls).await?;
        audit.over_admissions += exact.over_admissions(admitted.clone()).await?;
        audit.false_denials += exact.false_denials(admitted, &unknown, denied).await?;
        progress(calls.len());
        // Someone may want to interrupt.
        tokio::task::yield_now().await;
    }
    Ok(audit)
}

/// The earliest and the latest time at which a decision can have been made.
#[derive(Clone, Copy, Debug)]
struct Bounds {
    first: u64,
    last: u64,
}

impl Bounds {
    fn of(call: Call) -> Self {
        let slack = micros(SLACK);
        Self { first: call.sent.saturating_sub(slack), last: call.answered.saturating_add(slack) }
    }
}

/// The exact limiter, for one key.
#[derive(Clone, Copy)]
struct Exact<'a> {
    limiter: &'a Limiter,
    rule: &'a Rule,
    key: &'a [u8],
    /// The tag of its keys is one.
    parts: &'a [(&'a str, &'a [u8])],
    cost: u64,
}

impl Exact<'_> {
    async fn over_admissions(&self, mut admitted: Vec<Bounds>) -> Result<u64, Error> {
        admitted.sort_unstable_by_key(|call| call.last);
        let mut first = u64::MAX;
        for call in admitted.iter_mut().rev() {
            first = first.min(call.first);
            call.first = first;
        }
        self.forget().await?;
        let (mut over, mut now) = (0, 0);
        for call in admitted {
            now = call.first.max(now);
            let decision = self.acquire(now).await?;
            if decision.allowed {
                continue;
            }
            match decision.retry_after {
                RetryAfter::After(wait) if now + micros(wait) <= call.last => {
                    now += micros(wait);
                    self.acquire(now).await?;
                }
                _ => over += 1,
            }
        }
        Ok(over)
    }

    async fn false_denials(
        &self,
        mut admitted: Vec<Bounds>,
        unknown: &[Bounds],
        mut denied: Vec<Bounds>,
    ) -> Result<u64, Error> {
        admitted.sort_unstable_by_key(|call| call.last);
        denied.sort_unstable_by_key(|call| call.first);
        // A call without an answer may still be on its way to Redis: it is charged at no time that is known.
        let mut begun: Vec<_> = admitted.iter().chain(unknown).map(|call| call.first).collect();
        begun.sort_unstable();
        self.forget().await?;
        let (mut found, mut charged) = (0, 0);
        for denied in denied {
            while let Some(call) = admitted.get(charged).filter(|call| call.last <= denied.first) {
                self.limiter.penalty(self.rule, self.request(self.cost, call.last)).await?;
                charged += 1;
            }
            let between = begun.partition_point(|first| *first <= denied.last) - charged;
            let enough = self.cost.saturating_mul(between as u64 + 1);
            found += u64::from(self.limiter.peek(self.rule, self.request(enough, denied.first)).await?.allowed);
        }
        Ok(found)
    }

    async fn admits(&self, calls: &[Call]) -> Result<u64, Error> {
        let answered = calls.iter().filter(|call| call.verdict != Verdict::Unknown);
        let mut times: Vec<_> = answered.map(|call| call.sent.midpoint(call.answered)).collect();
        times.sort_unstable();
        self.forget().await?;
        let mut admitted = 0;
        for time in times {
            admitted += u64::from(self.acquire(time).await?.allowed);
        }
        Ok(admitted)
    }

    async fn acquire(&self, time: u64) -> Result<Decision, Error> {
        self.limiter.acquire(self.rule, self.request(self.cost, time)).await
    }

    async fn forget(&self) -> Result<(), Error> {
        self.limiter.reset(self.rule, Request::new(self.key).parts(self.parts)).await.map(|_| ())
    }

    fn request(&self, cost: u64, time: u64) -> Request<'_> {
        Request::new(self.key).parts(self.parts).cost(cost).at(UNIX_EPOCH + Duration::from_micros(time))
    }
}

#[cfg(test)]
mod tests;
