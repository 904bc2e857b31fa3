//! From a request to its decision: which limits are asked, by what call, and what their reply says.

use std::time::SystemTime;

use futures_util::future::BoxFuture;

use super::Limiter;
use super::cached_denials::Recalled;
use super::prepare::concerned;
use crate::algorithm::ALL_OR_NOTHING;
use crate::call::{Mode, Reply, granted};
use crate::decision::{Decision, LimitDecision, LimitDecisions};
use crate::error::{Charged, Error, Kind};
use crate::operation::Operation;
use crate::request::{PlainRequest, Request};
use crate::rule::{Rule, Target};
use crate::wall_clock;

impl Limiter {
    /// Decides by whatever the rule and the request need: a denial that this process remembers, script calls, or the
    /// rule's policy.
    pub(super) fn decide_in_full<'a>(
        &'a self,
        rule: &'a Rule,
        request: Request<'a>,
        operation: Operation,
    ) -> BoxFuture<'a, Result<Decision, Error>> {
        Box::pin(async move {
            let recalled = self.changing(rule, &request, operation).and_then(|changing| {
                let recalled = self.recall(rule, &request, operation)?;
                Ok((changing, recalled))
            });
            let (changing, recalled) = match recalled {
                Ok(recalled) => recalled,
                Err(misuse) => {
                    tokio::task::consume_budget().await;
                    return Err(misuse);
                }
            };
            let decided = match recalled {
                Recalled::Denial(denial) => {
                    // It is there at once, and the caller may ask again at once: others must have their turn.
                    tokio::task::consume_budget().await;
                    Ok(*denial)
                }
                Recalled::Nothing(sighting) => {
                    let decided = match self.sharded(rule) {
                        Some(scoped) => self.decide_by_shards(rule, scoped, &request, operation).await,
                        None => match concerned(rule, operation, &request) {
                            Ok(targets) => self.decide_by_limits(rule, &targets, &request, operation).await,
                            Err(error) => Err(error),
                        },
                    };
                    decided.inspect(|decision| self.remember(sighting, request.units(rule), decision))
                }
            };
            let may_yet_run = decided.as_ref().is_err_and(|error| error.charged() == Charged::Unknown);
            if let Some(changing) = changing.filter(|_| !may_yet_run) {
                changing.done();
            }
            let decided = match decided {
                Ok(decision) => Ok(decision),
                Err(error) => self.answer_instead(error, rule, &request, operation).await,
            };
            decided.map(|decision| decision.jittered(request.wait_jitter()))
        })
    }

    /// Asks for a decision of these limits together, by one script call.
    pub(super) async fn decide_by_limits(
        &self,
        rule: &Rule,
        targets: &[Target<'_>],
        request: &Request<'_>,
        operation: Operation,
    ) -> Result<Decision, Error> {
        let marker = self.marker(rule, targets, request, operation)?;
        let inputs = self.limit_inputs(rule, targets, request, operation)?;
        let script = match (inputs.as_slice(), &marker) {
            ([input], None) => input.script,
            _ => &ALL_OR_NOTHING,
        };
        let reply = self.run(rule, script, &inputs, marker.as_ref(), request, Mode::Call(operation)).await?;
        self.decision(rule, targets, request, operation, &reply)
    }

    /// The decision in a reply about these limits.
    pub(super) fn decision(
        &self,
        rule: &Rule,
        targets: &[Target<'_>],
        request: &Request<'_>,
        operation: Operation,
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
        let counts_denials = rule.counts_denials();
        let answered = targets.iter().zip(fives.zip(notes));
        let limits = answered
            .map(|(target, (five, notes))| LimitDecision::new(&target.scoped.quota, *five, notes, counts_denials))
            .collect::<Option<LimitDecisions>>()
            .ok_or_else(garbled)?;
        let allowed = limits.iter().all(|limit| limit.allowed);
        let mut granted = granted(request.units(rule), operation, allowed, appended.first()).ok_or_else(garbled)?;
        if operation == Operation::Penalty {
            granted = targets.iter().map(|target| target.limit.most_counted()).fold(granted, u64::min);
        }
        let at = self.decided_at(request.plain(), reply);
        Decision::of(limits, granted, self.engine.by(), at).ok_or_else(garbled)
    }

    /// The decision in a reply to an ask.
    pub(super) fn decision_of_ask(
        &self,
        rule: &Rule,
        target: Target<'_>,
        request: &PlainRequest<'_>,
        reply: &Reply,
    ) -> Result<Decision, Error> {
        let notes = reply.appended.first_chunk().copied().unwrap_or_default();
        let limit = LimitDecision::new(&target.scoped.quota, reply.decision, notes, false).ok_or_else(garbled)?;
        let granted = if limit.allowed { request.units(rule) } else { 0 };
        Ok(Decision::of_one(limit, granted, self.engine.by(), self.decided_at(request, reply)))
    }

    /// When this reply was made, by the clock that [`Self::now`] goes by.
    pub(super) fn decided_at(&self, request: &PlainRequest<'_>, reply: &Reply) -> SystemTime {
        request.time().or_else(|| self.engine.given_time()).unwrap_or(reply.at)
    }

    /// The time of a call that doesn't give one: by the clock given to the engine, or this machine's.
    pub(super) fn now(&self) -> SystemTime {
        self.engine.given_time().unwrap_or_else(wall_clock::now)
    }
}

/// A well-formed reply that no script gives.
pub(super) fn garbled() -> Error {
    Error::new(Kind::Garbled, "expected a decision of each limit within its bounds, got something else")
}
