//! Answers by the rule's policy when Redis gives none: it is unreachable, refuses for now, or its answer can't be used.

use super::call::Call;
use super::handle::Limiter;
#[cfg(feature = "embedded")]
use crate::algorithm::numbers::EXACT;
use crate::decision::Decision;
#[cfg(feature = "embedded")]
use crate::decision::RetryAfter;
use crate::error::Error;
use crate::limit::Limit;
use crate::operation::Operation;
#[cfg(feature = "embedded")]
use crate::request::{OwnedRequest, Request};
#[cfg(feature = "embedded")]
use crate::rule::{ALL, apart};
use crate::rule::{OnError, Rule, ScopedLimit};
use crate::telemetry;

impl Limiter {
    /// Whether the rule's policy may answer in place of this error.
    pub(super) fn may_answer_instead(&self, error: &Error, rule: &Rule) -> bool {
        error.goes_to_policy() && self.policy(rule) != OnError::Closed
    }

    /// What the rule's policy answers in place of this error, or the error.
    pub(super) async fn answer_instead(&self, error: Error, call: Call<'_>) -> Result<Decision, Error> {
        let Call { rule, request, operation } = call;
        // An open breaker refuses at once, and the caller may ask again at once: other tasks must get their turn.
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
            telemetry::answered_instead(rule.name(), policy.name(), error.kind().name(), error.is_outage());
        }
        match policy {
            OnError::Closed => Err(error),
            _ if gives_back => Ok(Decision::by_policy(rule.capacity(), 0).instead_of(error)),
            OnError::Open => {
                let granted = match operation {
                    Operation::Peek => 0,
                    Operation::AtMost => request.units(rule).most().min(rule.capacity()),
                    _ => request.units(rule).most(),
                };
                let decision = Decision::by_policy(rule.capacity(), granted).instead_of(error);
                Ok(if operation == Operation::AtMost || self.may_fit(call) { decision } else { decision.never() })
            }
            #[cfg(feature = "embedded")]
            OnError::Local { processes } => {
                let raised = self.raised_if_never_admitted(call);
                let raised = Call { request: &Request::from(&raised), ..call };
                match self.decide_locally(raised, processes).await {
                    Ok(decision) if decision.retry_after == RetryAfter::Never && self.may_fit(call) => Err(error.and(
                        format_args!("this process's share of the rule, one of {processes}, never admits this cost"),
                    )),
                    Ok(decision) => Ok(decision.instead_of(error)),
                    Err(why) => Err(error.and(why)),
                }
            }
        }
    }

    /// The request, at a cost above every share if the whole rule could never admit it: its local share must not admit
    /// it either, whatever the rounding. Of rules that apply together, only those that could never admit it are raised.
    #[cfg(feature = "embedded")]
    fn raised_if_never_admitted(&self, call: Call<'_>) -> OwnedRequest {
        let Call { rule, request, operation } = call;
        if operation == Operation::AtMost || self.may_fit(call) {
            return request.into_owned();
        }
        let most = request.units(rule).most().max(EXACT);
        if !rule.is_joined() {
            return request.cost_of_all(most).into_owned();
        }
        let mut raised = request.into_owned();
        for name in rule.each().iter().filter_map(Rule::name) {
            if !self.may_fit_of(call, |scoped| scoped.quota.rule() == Some(name)) {
                raised.set_cost_of(&apart(name, ALL), most);
            }
        }
        raised
    }

    /// Whether the rule could ever admit this.
    pub(crate) fn may_fit(&self, call: Call<'_>) -> bool {
        self.may_fit_of(call, |_| true)
    }

    /// Whether these of its limits could.
    fn may_fit_of(&self, call: Call<'_>, is_meant: impl Fn(&ScopedLimit) -> bool) -> bool {
        let Call { rule, request, operation } = call;
        let costs = request.units(rule);
        let part = |limit| if self.engine.is_cluster() { Limit::smallest_shard(limit) } else { limit };
        let meant = rule.scoped_limits().iter().enumerate().filter(|(_, scoped)| is_meant(scoped));
        meant
            .into_iter()
            .all(|(at, scoped)| costs.of(at) <= part(&scoped.limit).largest_cost(operation == Operation::Reserve))
    }
}
