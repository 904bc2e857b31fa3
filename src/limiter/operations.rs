//! Each operation: what it asks of the rule and the request, and where it is made.

use super::call::Call;
use super::counted::counted;
use super::handle::Limiter;
use crate::algorithm::numbers::LONGEST_RESET_US;
use crate::decision::Decision;
use crate::error::{Error, Kind};
use crate::operation::Operation;
use crate::request::Request;
use crate::rule::Rule;

impl Limiter {
    /// Makes a call of this operation, once it is known that the rule and the request allow it.
    pub(crate) async fn make(
        &self,
        operation: Operation,
        rule: &Rule,
        request: Request<'_>,
    ) -> Result<Decision, Error> {
        match operation {
            Operation::Acquire | Operation::Peek | Operation::Penalty => self.decide(rule, request, operation).await,
            Operation::Reserve => {
                can_reserve(rule).inspect_err(|error| counted(rule, Err(error)))?;
                self.decide(rule, request, operation).await
            }
            Operation::AtMost => {
                has_one_cost(rule, &request).inspect_err(|error| counted(rule, Err(error)))?;
                self.decide(rule, request, operation).await
            }
            Operation::Block => self.decide(rule, request.cost_of_all(length_of_block(&request)?), operation).await,
            Operation::Refund => {
                can_refund(rule)?;
                self.follow_up(Call { rule, request: &request, operation }).await
            }
            Operation::Renew | Operation::Release => self.change_permits(rule, request, operation).await,
            Operation::Settle | Operation::Cancel => self.change_charge(rule, request, operation).await,
            Operation::Reset => self.follow_up(Call { rule, request: &request, operation }).await,
        }
    }

    async fn change_permits(&self, rule: &Rule, request: Request<'_>, operation: Operation) -> Result<Decision, Error> {
        if !request.has_id() {
            return Err(Error::new(
                Kind::Input,
                format!("{operation}: the id that holds the permits is missing (Request::id)"),
            ));
        }
        let call = Call { rule, request: &request, operation };
        // Unless the request says where they were taken, look in this process first.
        #[cfg(feature = "embedded")]
        if request.earlier().is_none()
            && let Some(decision) = Box::pin(self.change_local_permits(call)).await
        {
            return Ok(decision);
        }
        self.follow_up(call).await
    }

    async fn change_charge(&self, rule: &Rule, request: Request<'_>, operation: Operation) -> Result<Decision, Error> {
        if !request.has_id() {
            let message = format!("{operation}: the id of the call to {operation} is missing (Request::id)");
            return Err(Error::new(Kind::Input, message));
        }
        if rule.limits().all(|limit| limit.algorithm().holds()) {
            let why = format!("expected a limit other than concurrency (its permits are released instead), got {rule}");
            return Err(Error::new(Kind::Input, format!("{operation}: {why}")));
        }
        self.follow_up(Call { rule, request: &request, operation }).await
    }
}

fn can_reserve(rule: &Rule) -> Result<(), Error> {
    let Some(limit) = rule.limits().find(|limit| !limit.algorithm().reserves()) else { return Ok(()) };
    let why = "expected a token bucket or fixed window of a period, which can owe units";
    Err(Error::new(Kind::Input, format!("reserve: {why}, got {limit}")))
}

fn has_one_cost(rule: &Rule, request: &Request<'_>) -> Result<(), Error> {
    if request.units(rule).of_all().is_some() {
        return Ok(());
    }
    let why = "have different costs, and at_most takes the same number of units from each";
    Err(Error::new(Kind::Input, format!("at_most: the limits of {rule} {why}")))
}

/// In microseconds.
fn length_of_block(request: &Request<'_>) -> Result<u64, Error> {
    let missing = || Error::new(Kind::Input, "block: the time that it lasts is missing (Request::block_for)");
    let time = request.block_time().ok_or_else(missing)?;
    let length = u64::try_from(time.as_nanos().div_ceil(1000)).ok().filter(|us| *us <= LONGEST_RESET_US);
    length.ok_or_else(|| Error::new(Kind::Input, format!("block: expected at most 71 years, got {time:?}")))
}

fn can_refund(rule: &Rule) -> Result<(), Error> {
    let permits = rule.limits().filter(|limit| limit.algorithm().holds()).count();
    if permits == 0 || permits == rule.limits().len() {
        return Ok(());
    }
    let why = "a rule with both permits and other limits can't be refunded: settle or cancel the call instead";
    Err(Error::new(Kind::Input, format!("refund: {why}, got {rule}")))
}
