//! Compares what was admitted with what an exact limiter could have admitted.
//!
//! It isn't known exactly when each decision was made, only that it was between sending the call and receiving its
//! reply. So a decision counts as a fault only if no choice of those times makes it right:
//!
//! - **Over-admissions.** Is there a time for each admitted call, within its bounds, at which an exact limiter admits
//!   it? All calls cost the same, so only the number taken by each time matters, and taking earlier never leaves less
//!   for later. Where replies come in the order in which calls were sent, the best choice is therefore to decide each
//!   call in that order and as early as possible; a call that can't be decided before its reply came is one too many. A
//!   call that others overtook may have been decided before or after them, and deciding it early may be the wrong
//!   choice, so calls that overtook it count as sent when it was. That can hide a fault, but never invents one.
//! - **False denials.** Charge every call that was admitted, or may have been, as late as possible, whether there is
//!   room or not. What is left then is the least that can have been left when the denied call was sent. Subtract the
//!   cost of each call that may have been decided between sending the denied call and its reply. The denial is false if
//!   even then enough was left.
//!
//! A limit with shards is compared with the whole limit, so on a cluster its false denials are the price of sharding.
//!
//! Both checks rest on two laws that hold for every limit but those that [`fits`] refuses: what is left grows with time
//! while nobody takes, and taking a unit later never leaves more. The exact limiter is the embedded engine, which runs
//! the scripts themselves at the times of the calls, so no limit's arithmetic is repeated here.

use std::time::{Duration, UNIX_EPOCH};

use serde::Serialize;
use tollgate::{Clock, Decision, Embedded, Error, Limiter, Request, RetryAfter, Rule, WindowStart};

use super::ledger::{Call, Verdict};
use crate::attributes::Pairs;
use crate::output::micros;
use crate::subject::Subject;

/// How far a decision may lie outside its call's bounds: the most that Redis's clock may differ from this process's. On
/// one machine both are the same clock, but each reads it in its own way. If the two are found further apart, the run
/// ends without an audit.
pub(super) const SLACK: Duration = Duration::from_millis(1);

/// The audit's result, with the field names and order that other programs rely on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Audit {
    pub(super) calls: u64,
    /// How many calls there were; if that is more than were kept, the audit is of a sample.
    pub(super) total: u64,
    /// Further calls that the engine certainly didn't decide: they failed before they were sent, or something else
    /// decided in its place. They can't be judged.
    pub(super) left_out: u64,
    pub(super) keys: u64,
    pub(super) admitted: u64,
    /// How many of these calls an exact limiter admits if each is decided midway between its bounds: for comparison,
    /// not for judging.
    pub(super) exact_admitted: u64,
    /// The least number of admitted calls that no exact limiter would have admitted.
    pub(super) over_admissions: u64,
    /// Denied calls that every exact limiter would have admitted.
    pub(super) false_denials: u64,
    /// Too few keys were left to drop any more, so the end of the run was dropped.
    #[serde(skip)]
    pub(super) of_beginning: bool,
    /// With shards, one may deny while others have units left; that is the price of sharding, and no fault.
    #[serde(skip)]
    pub(super) sharded: bool,
}

impl Audit {
    pub(super) fn found_faults(&self) -> bool {
        self.over_admissions > 0 || (self.false_denials > 0 && !self.sharded)
    }
}

/// Checks that the rule can be audited; the error says why not.
pub(super) fn fits(subject: &Subject) -> Result<(), String> {
    if let Some(limit) = subject.counts_a_part() {
        return Err(format!("{limit}: it counts a part that all keys share, and the audit is of each key by itself"));
    }
    if subject.rule.blocks_for().is_some() {
        return Err("a denial blocks its key, and the audit can't know which call was denied first".into());
    }
    for limit in subject.rule.limits() {
        let why = if limit.algorithm().holds() {
            "permits are held and released, which the audit doesn't follow".to_owned()
        } else if limit.start() == WindowStart::FirstHit {
            "where its windows start depends on which call came first, which can't be known".to_owned()
        } else if limit.tick() > Duration::from_micros(1) {
            format!("it counts time in steps of {:?}, so an exact limiter would decide differently", limit.tick())
        } else {
            continue;
        };
        return Err(format!("{limit}: {why}"));
    }
    Ok(())
}

/// Judges calls on these keys and parts, which are sorted by key and by the time sent. They include every call sent
/// before `until` on their keys.
pub(super) async fn audit(
    rule: &Rule,
    identity: &(dyn Fn(u32) -> (Vec<u8>, Pairs) + Sync),
    cost: u64,
    calls: &[Call],
    until: u64,
    mut progress: impl FnMut(usize),
) -> Result<Audit, Error> {
    let mut audit = Audit { sharded: rule.limits().any(|limit| limit.shards() > 1), ..Audit::default() };
    // A clock that stands still, so that keys expire only by the calls' times. Limits are decided whole, without
    // shards.
    let limiter = Limiter::new(Embedded::with_clock(Clock::new(UNIX_EPOCH)));
    for calls in calls.chunk_by(|one, other| one.key == other.key) {
        let (name, parts) = calls.first().map(|call| identity(call.key)).unwrap_or_default();
        let parts: Vec<_> = parts.iter().map(|(name, value)| (name.as_str(), value.as_slice())).collect();
        let exact = Exact { limiter: &limiter, rule, key: &name, parts: &parts, cost };
        let with = |verdict| calls.iter().filter(move |call| call.verdict == verdict).copied().map(Bounds::of);
        let (admitted, unknown): (Vec<_>, Vec<_>) =
            (with(Verdict::Allowed).collect(), with(Verdict::Unknown).collect());
        // A call denied later may have been denied because of calls that aren't among these.
        let denied: Vec<_> = with(Verdict::Denied).filter(|denied| denied.last <= until).collect();
        audit.keys += 1;
        audit.calls += calls.len() as u64;
        audit.admitted += admitted.len() as u64;
        audit.exact_admitted += exact.admits(calls).await?;
        audit.over_admissions += exact.over_admissions(admitted.clone()).await?;
        audit.false_denials += exact.false_denials(admitted, &unknown, denied).await?;
        progress(calls.len());
        // Lets other tasks run, such as the one that handles an interrupt.
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
    /// Includes the tag of its keys.
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
        // A call without a reply may still be on its way to Redis: there is no known time to charge it at.
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
