//! Answers by the rule's policy when Redis gives none: it is unreachable, refuses for now, or its answer can't be used.

use super::Limiter;
#[cfg(feature = "embedded")]
use crate::algorithm::numbers::EXACT;
use crate::decision::Decision;
#[cfg(feature = "embedded")]
use crate::decision::RetryAfter;
use crate::error::Error;
use crate::limit::Limit;
use crate::operation::Operation;
use crate::request::Request;
use crate::rule::{OnError, Rule};
use crate::telemetry;

impl Limiter {
    /// Whether the rule's policy may answer in place of this error.
    pub(super) fn may_answer_instead(&self, error: &Error, rule: &Rule) -> bool {
        error.goes_to_policy() && self.policy(rule) != OnError::Closed
    }

    /// What the rule's policy answers in place of this error, or the error.
    pub(super) async fn answer_instead(
        &self,
        error: Error,
        rule: &Rule,
        request: &Request<'_>,
        operation: Operation,
    ) -> Result<Decision, Error> {
        // An open breaker refuses at once, and the caller may ask again at once: others must have their turn.
        tokio::task::consume_budget().await;
        let asks = matches!(operation, Operation::Acquire | Operation::Peek | Operation::Reserve | Operation::AtMost);
        let gives_back = matches!(
            operation,
            Operation::Refund | Operation::Settle | Operation::Cancel | Operation::Release | Operation::Reset
        );
        if !(asks || gives_back) || !error.goes_to_policy() {
            return Err(error);
        }
        let policy = self.policy(rule);
        if policy != OnError::Closed {
            telemetry::answered_instead(rule.name(), policy.name(), error.class(), error.is_outage());
        }
        match policy {
            OnError::Open | OnError::Local { .. } if gives_back => {
                Ok(Decision::by_policy(rule.capacity(), 0).instead_of(error))
            }
            OnError::Open => {
                let granted = match operation {
                    Operation::Peek => 0,
                    Operation::AtMost => request.units(rule).most().min(rule.capacity()),
                    _ => request.units(rule).most(),
                };
                let decision = Decision::by_policy(rule.capacity(), granted).instead_of(error);
                Ok(if operation == Operation::AtMost || self.may_fit(rule, request, operation) {
                    decision
                } else {
                    decision.never()
                })
            }
            #[cfg(feature = "embedded")]
            OnError::Local { processes } => match self
                .decide_locally(rule, processes, &self.raised_if_never_admitted(rule, request, operation), operation)
                .await
            {
                // The share could never admit what the rule may.
                Ok(decision) if decision.retry_after == RetryAfter::Never && self.may_fit(rule, request, operation) => {
                    Err(error)
                }
                Ok(decision) => Ok(decision.instead_of(error)),
                Err(_) => Err(error),
            },
            _ => Err(error),
        }
    }

    /// The request, at a cost above every share if the whole rule could never admit it: its local share must not admit
    /// it either, whatever the rounding.
    #[cfg(feature = "embedded")]
    fn raised_if_never_admitted<'a>(&self, rule: &Rule, request: &Request<'a>, operation: Operation) -> Request<'a> {
        let refused = operation != Operation::AtMost && !self.may_fit(rule, request, operation);
        if refused { request.cost_of_all(request.units(rule).most().max(EXACT)) } else { *request }
    }

    /// Whether the rule could ever admit this.
    pub(super) fn may_fit(&self, rule: &Rule, request: &Request<'_>, operation: Operation) -> bool {
        let costs = request.units(rule);
        let part = |limit| if self.splits_limits() { Limit::smallest_shard(limit) } else { limit };
        rule.limits()
            .enumerate()
            .all(|(at, limit)| costs.of(at) <= part(limit).largest_cost(operation == Operation::Reserve))
    }
}
