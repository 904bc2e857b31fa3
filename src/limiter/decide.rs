//! From a request to its decision: which limits are asked, by which call, and what their reply says.

use std::time::SystemTime;

use futures_util::future::BoxFuture;

use super::cached_denials::Recalled;
use super::call::Call;
use super::handle::Limiter;
use super::prepare::concerned;
use crate::algorithm::numbers::EXACT;
use crate::call::{Ask, Mode, Reply};
use crate::decision::{Decision, LimitDecision, LimitDecisions, count};
use crate::engine::deadline::Deadline;
use crate::error::{Charged, Error, Kind};
use crate::operation::Operation;
use crate::request::{PlainRequest, Request};
use crate::rule::{Rule, Target};
use crate::wall_clock;

impl Limiter {
    /// Decides by whatever the rule and the request need: a remembered denial, script calls, or the rule's policy.
    pub(super) fn decide_in_full<'a>(
        &'a self,
        rule: &'a Rule,
        request: Request<'a>,
        operation: Operation,
    ) -> BoxFuture<'a, Result<Decision, Error>> {
        Box::pin(async move {
            let call = Call { rule, request: &request, operation };
            let recalled = self.changing(call).and_then(|changing| Ok((changing, self.recall(call)?)));
            let (changing, recalled) = match recalled {
                Ok(recalled) => recalled,
                Err(misuse) => {
                    tokio::task::consume_budget().await;
                    return Err(misuse);
                }
            };
            let decided = match recalled {
                Recalled::Denial(denial) => {
                    // The answer is ready at once, and the caller may ask again at once: other tasks must get their
                    // turn.
                    tokio::task::consume_budget().await;
                    Ok(*denial)
                }
                Recalled::Nothing(sighting) => {
                    let decided = match self.sharded(rule) {
                        Some(scoped) => Box::pin(self.decide_by_shards(call, scoped)).await,
                        None => match concerned(rule, &request, operation) {
                            Ok(targets) => self.decide_by_limits(call, &targets).await,
                            Err(error) => Err(error),
                        },
                    };
                    decided.inspect(|decision| self.remember(sighting, &request.units(rule), decision))
                }
            };
            let may_yet_run = decided.as_ref().is_err_and(|error| error.charged() == Charged::Unknown);
            if let Some(changing) = changing.filter(|_| !may_yet_run) {
                changing.done();
            }
            let decided = match decided {
                Ok(decision) => Ok(decision),
                Err(error) => Box::pin(self.answer_instead(error, call)).await,
            };
            decided.map(|decision| decision.jittered(request.wait_jitter()))
        })
    }

    /// Asks for a decision of these limits together: by one script call or, where their keys are in several slots of a
    /// cluster, by one in each.
    pub(super) async fn decide_by_limits(&self, call: Call<'_>, targets: &[Target<'_>]) -> Result<Decision, Error> {
        match self.parts(call.rule, targets, call.request)? {
            Some(parts) => Box::pin(self.decide_by_parts(call, &parts)).await,
            None => self.decide_in_one_slot(call, targets).await,
        }
    }

    /// The same for limits whose keys are in one slot.
    pub(super) async fn decide_in_one_slot(&self, call: Call<'_>, targets: &[Target<'_>]) -> Result<Decision, Error> {
        let Call { rule, request, operation } = call;
        let until = Deadline::after(request.deadline_or(self.deadline));
        let ask = |server_us| self.ask_for(rule, targets, request, Mode::Call(operation), server_us);
        let reply = self.ask(ask, until).await?;
        self.decision(call, targets, &reply)
    }

    /// What an acquire asks: of all limits, or of this shard of the only one.
    pub(super) fn ask_to_acquire<'r>(
        &self,
        rule: &'r Rule,
        shard: Option<u32>,
        request: &Request<'_>,
        server_us: Option<u64>,
    ) -> Result<Ask<'r>, Error> {
        let targets = self.targets_of_acquire(rule, shard);
        self.ask_for(rule, &targets, request, Mode::Call(Operation::Acquire), server_us)
    }

    /// The decision in the reply to such an acquire.
    pub(super) fn decision_of_acquire(
        &self,
        rule: &Rule,
        shard: Option<u32>,
        request: &PlainRequest<'_>,
        reply: &Reply,
    ) -> Result<Decision, Error> {
        let targets = self.targets_of_acquire(rule, shard);
        self.decision(Call::acquire(rule, &Request::of_plain(*request)), &targets, reply)
    }

    /// The decision in a reply about these limits.
    pub(super) fn decision(&self, call: Call<'_>, targets: &[Target<'_>], reply: &Reply) -> Result<Decision, Error> {
        let Call { rule, request, operation } = call;
        let allowed = reply.limits.iter().all(|limit| limit.allowed);
        let costs = request.plain().units_of(rule, targets.iter().map(|target| target.scoped));
        let limits = targets
            .iter()
            .zip(&reply.limits)
            .zip(costs.each(targets.len()))
            .map(|((target, reply), cost)| {
                let mut granted = granted(cost, operation, allowed, reply.granted)?;
                if operation == Operation::Penalty {
                    granted = granted.min(target.limit.most_counted());
                }
                let counts_overage = rule.rule_of(target.scoped).counts_overage();
                LimitDecision::new(&target.scoped.quota, target.limit.capacity(), reply, granted, counts_overage)
            })
            .collect::<Option<LimitDecisions>>()
            .filter(|limits| limits.len() == targets.len())
            .ok_or_else(garbled)?;
        let at = self.decided_at(request.plain(), reply);
        Decision::of(limits, self.engine.by(), at).ok_or_else(garbled)
    }

    /// When this reply was made, by the clock that [`Self::now`] uses.
    pub(super) fn decided_at(&self, request: &PlainRequest<'_>, reply: &Reply) -> SystemTime {
        request.time().or_else(|| self.engine.given_time()).unwrap_or(reply.at)
    }

    /// The time of a call that doesn't give one: by the clock given to the engine, or this machine's.
    pub(super) fn now(&self) -> SystemTime {
        self.engine.given_time().unwrap_or_else(wall_clock::now)
    }
}

/// Units that a call took from a limit: what the reply says, otherwise the whole cost or nothing. None if no call can
/// have taken that many.
fn granted(cost: u64, operation: Operation, allowed: bool, took: Option<i64>) -> Option<u64> {
    match (operation, took) {
        _ if !Mode::Call(operation).takes() => Some(0),
        // Scripts get ABOVE_ALL in place of a cost above EXACT.
        (Operation::Penalty, Some(_)) if allowed && cost > EXACT => Some(cost),
        (_, Some(took)) => count(took),
        (Operation::Acquire | Operation::Reserve | Operation::Penalty, None) if allowed => Some(cost),
        _ => Some(0),
    }
}

/// A well-formed reply that no script gives.
pub(super) fn garbled() -> Error {
    Error::new(Kind::Garbled, "the script's reply can't be used: expected a decision of each limit, within its bounds")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_penalty_above_what_can_be_counted_is_no_malformed_answer() {
        let above = i64::try_from(EXACT + 2).ok();
        assert_eq!(granted(u64::MAX, Operation::Penalty, true, above), Some(u64::MAX));
        assert_eq!(granted(u64::MAX, Operation::Penalty, true, None), Some(u64::MAX));
        assert_eq!(granted(u64::MAX, Operation::AtMost, true, above), None);
        assert_eq!(granted(3, Operation::Penalty, true, Some(3)), Some(3));
    }
}
