//! Reservations, permits and other calls that take by an id of this process's own: by that, the parts are given back.

use std::sync::Arc;

use futures_util::future::{BoxFuture, join_all};
use smallvec::SmallVec;
use tokio::runtime::Handle;
use tokio::time::Instant;

use super::{Answers, GivenBack, PATIENCE, Part, Took, millis, remembered_for};
use crate::algorithm::numbers::EXACT;
use crate::decision::Decision;
use crate::engine::deadline::Deadline;
use crate::error::Error;
use crate::limiter::call::Call;
use crate::limiter::handle::Limiter;
use crate::limiter::prepare::Targets;
use crate::operation::Operation;
use crate::random::unique_id;
use crate::request::{OwnedRequest, Request};
use crate::rule::Rule;
use crate::runtime;

/// A call that may have taken some of its parts. Unless it is over, they are given back when it is dropped: once they
/// have answered, since a cancellation that is faster would find nothing.
struct Taking {
    whole: Arc<CallInParts>,
    runtime: Handle,
    /// While the parts are asked.
    asking: Option<BoxFuture<'static, Answers>>,
    is_over: bool,
}

struct CallInParts {
    limiter: Limiter,
    rule: Rule,
    request: OwnedRequest,
    /// The limits of each part, among the rule's.
    parts: Vec<SmallVec<[usize; 2]>>,
}

impl Limiter {
    /// Takes all parts or none.
    pub(super) async fn take_by_id(
        &self,
        call: Call<'_>,
        parts: &[Part<'_>],
        until: Deadline,
    ) -> Result<Decision, Error> {
        let Call { rule, request, operation } = call;
        let own = unique_id("part");
        let remembered = remembered_for(request.deadline_or(self.deadline));
        let asked = if request.has_id() { *request } else { request.own_id(&own).id_ttl(remembered) };
        let asked = if asked.id_ttl_ms()? < millis(remembered) { asked.id_ttl(remembered) } else { asked };
        // No limit has more than this, the largest cost of a call with an id.
        let asked = if asked.units(rule).most() > EXACT { asked.cost_of_all(EXACT) } else { asked };
        let mut taking = Taking::of(self, Call { request: &asked, ..call }, parts)?;
        let answers = taking.ask(operation).await;
        let took: Vec<_> = answers.iter().map(Took::by).collect();
        let all_allow = answers.iter().all(|answer| answer.as_ref().is_ok_and(|decision| decision.allowed));
        taking.is_over = all_allow || took.iter().all(|took| *took == Took::Nothing);
        if all_allow {
            let decision = self.whole(parts.iter().zip(answers.into_iter().flatten()))?;
            return match operation {
                Operation::AtMost => self.evened(taking, parts, decision, until).await,
                _ => Ok(decision),
            };
        }
        let given_back = match taking.is_over {
            true => parts.iter().map(|_| None).collect(),
            false => taking.give_back(parts, &took, until).await,
        };
        self.denied(call, parts, answers, given_back, taking.is_over)
    }

    /// Takes from each limit what the scarcest had, where others had more.
    async fn evened(
        &self,
        mut taking: Taking,
        parts: &[Part<'_>],
        mut decision: Decision,
        until: Deadline,
    ) -> Result<Decision, Error> {
        taking.is_over = false;
        let least = decision.limits.iter().map(|limit| limit.granted).min().unwrap_or_default();
        if decision.limits.iter().any(|limit| limit.granted > least) {
            let request = Request::from(&taking.whole.request).cost_of_all(least);
            let call = Call { rule: &taking.whole.rule, request: &request, operation: Operation::Settle };
            let settled = runtime::timeout_at(Instant::now() + until.left().min(PATIENCE), self.ask_parts(call, parts));
            match settled.await.map(|answers| answers.into_iter().collect::<Result<Vec<Decision>, Error>>()) {
                Some(Ok(settled)) => decision = self.whole(parts.iter().zip(settled))?,
                _ => {
                    self.call_later(&taking.runtime, call, None);
                    decision = decision.granting(least);
                }
            }
        }
        taking.is_over = true;
        Ok(decision)
    }
}

impl Taking {
    fn of(limiter: &Limiter, call: Call<'_>, parts: &[Part<'_>]) -> Result<Self, Error> {
        let whole = CallInParts {
            limiter: limiter.clone(),
            rule: call.rule.clone(),
            request: call.request.into_owned(),
            parts: parts.iter().map(|part| part.places.clone()).collect(),
        };
        Ok(Self { whole: Arc::new(whole), runtime: runtime::with_timers()?, asking: None, is_over: false })
    }

    /// Asks all parts at the same time.
    async fn ask(&mut self, operation: Operation) -> Answers {
        let whole = Arc::clone(&self.whole);
        let asking = self.asking.insert(Box::pin(async move { whole.ask(operation).await }));
        let answers = asking.await;
        self.asking = None;
        answers
    }

    /// Gives back these parts, and waits for the answers for a while.
    async fn give_back(&mut self, parts: &[Part<'_>], took: &[Took], until: Deadline) -> GivenBack {
        let whole = Arc::clone(&self.whole);
        let (limiter, operation, request) = (&whole.limiter, whole.gives_back_by(), Request::from(&whole.request));
        let call = Call { rule: &whole.rule, request: &request, operation };
        // What this process gives back ends the denials that it remembers of these keys.
        let given_back = parts.iter().zip(took).filter(|(_, took)| **took != Took::Nothing);
        let changed = given_back.flat_map(|(part, _)| part.targets.iter().copied());
        let changing = limiter.changing_those(&whole.rule, &request, changed).ok().flatten();
        let each = parts.iter().zip(took).map(async |(part, took)| match took {
            Took::Nothing => None,
            _ => Some(limiter.decide_in_one_slot(call, &part.targets).await),
        });
        let given = runtime::timeout_at(Instant::now() + until.left().min(PATIENCE), join_all(each)).await;
        let given = given.unwrap_or_else(|| parts.iter().map(|_| None).collect());
        let is_done = |(given, took): (&Option<Result<Decision, Error>>, &Took)| match (given, took) {
            (_, Took::Nothing) => true,
            // A late call could still take, unless what it took was found.
            (Some(Ok(_)), Took::Perhaps) => operation == Operation::Cancel,
            (Some(Ok(_)), Took::Units) => true,
            (Some(Err(error)), Took::Units) => error.is_unknown_id(),
            _ => false,
        };
        self.is_over = given.iter().zip(took).all(is_done);
        if let Some(changing) = changing.filter(|_| self.is_over) {
            changing.done();
        }
        given
    }
}

impl CallInParts {
    async fn ask(&self, operation: Operation) -> Answers {
        let (limits, request) = (self.rule.scoped_limits(), Request::from(&self.request));
        let call = Call { rule: &self.rule, request: &request, operation };
        join_all(self.parts.iter().map(async |places| {
            let targets: Targets<'_> = places.iter().filter_map(|place| Some(limits.get(*place)?.whole())).collect();
            self.limiter.decide_in_one_slot(call, &targets).await
        }))
        .await
    }

    /// Permits alone are released; whatever else was taken is cancelled.
    fn gives_back_by(&self) -> Operation {
        let permits_alone = self.rule.limits().all(|limit| limit.algorithm().holds());
        if permits_alone { Operation::Release } else { Operation::Cancel }
    }
}

impl Drop for Taking {
    fn drop(&mut self) {
        if self.is_over {
            return;
        }
        let request = Request::from(&self.whole.request);
        let call = Call { rule: &self.whole.rule, request: &request, operation: self.whole.gives_back_by() };
        let after = self.asking.take().map(|asking| -> BoxFuture<'static, ()> { Box::pin(async { _ = asking.await }) });
        self.whole.limiter.call_later_after(after, &self.runtime, call, None);
    }
}
