//! A call for a decision, from the request to the answer. This future itself makes an acquire. What is rare shares one
//! boxed future: another operation, an id with a time of its own, keys in several slots of a cluster, an answer that
//! must be asked for again or that the rule's policy gives.

use std::fmt;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker, ready};

use futures_util::future::{BoxFuture, FusedFuture};

use super::cached_denials::Recalled;
use super::call::Call;
use super::counted::{counted, ended};
use super::handle::Limiter;
use crate::decision::Decision;
use crate::denial_cache::Sighting;
use crate::engine::Acquiring;
use crate::engine::deadline::Deadline;
use crate::error::Error;
use crate::operation::Operation;
use crate::request::{PlainRequest, Request};
use crate::rule::Rule;
use crate::telemetry::Observed;

/// A call in progress: the future of [`Limiter::acquire`]. It does nothing until it is polled, and its deadline counts
/// from then. Dropping it gives the call up: what isn't sent yet is never sent, and what was sent may be charged. (A
/// call on [several nodes](crate::guide::load#keys-on-several-nodes) continues without its caller until its deadline,
/// and gives back what it took.) Polled after its decision, it stays pending, which [`FusedFuture`] reports.
///
/// It is `Send` and `Unpin`, so a `select!` in a loop can poll it by reference, and at most 256 bytes large without the
/// features `metrics` and `tracing`.
///
/// It borrows the limiter, the rule and the request's key. [`Limiter::acquire_owned`] is for where `'static` is needed.
#[must_use = "futures do nothing unless polled"]
pub struct Deciding<'a> {
    limiter: &'a Limiter,
    rule: &'a Rule,
    request: PlainRequest<'a>,
    /// The shard that decides, if the limit is split.
    shard: Option<u32>,
    operation: Operation,
    /// Whether its decision is counted, or a part of a call that is.
    is_counted: bool,
    observed: Option<Observed>,
    sighting: Option<Box<Sighting>>,
    state: State<'a>,
}

enum State<'a> {
    New,
    Asked(Acquiring<'a>),
    AskedAgain(BoxFuture<'a, Result<Decision, Error>>),
    Elsewhere(BoxFuture<'a, Result<Decision, Error>>),
    Ended,
}

impl Limiter {
    /// Decides by Redis or, while it is unreachable, by the rule's policy.
    pub(crate) fn decide<'a>(&'a self, rule: &'a Rule, request: Request<'a>, operation: Operation) -> Deciding<'a> {
        let (shard, state) = match operation {
            Operation::Acquire if !request.has_id_ttl() && !self.may_need_parts(rule) => {
                (self.shard_of_acquire(rule, &request), State::New)
            }
            _ => (None, State::Elsewhere(self.decide_in_full(rule, request, operation))),
        };
        Deciding {
            limiter: self,
            rule,
            request: *request.plain(),
            shard,
            operation,
            is_counted: operation.decides(),
            observed: None,
            sighting: None,
            state,
        }
    }
}

impl<'a> Deciding<'a> {
    /// Leaves counting the decision to the caller, since it may take several calls.
    pub(crate) fn uncounted(self) -> Self {
        Self { is_counted: false, ..self }
    }

    fn poll_decided(&mut self, context: &mut Context<'_>) -> Poll<Result<Decision, Error>> {
        loop {
            let decided = match &mut self.state {
                State::New => match self.begin(context.waker()) {
                    Ok(None) => continue,
                    // The answer is ready at once, and the caller may ask again at once: other tasks must get their
                    // turn.
                    Ok(Some(denial)) => {
                        return pin!(tokio::task::consume_budget()).poll(context).map(|()| Ok(denial));
                    }
                    Err(error) => Err(error),
                },
                State::Asked(acquiring) => ready!(Pin::new(acquiring).poll(context))
                    .and_then(|reply| self.limiter.decision_of_acquire(self.rule, self.shard, &self.request, &reply)),
                State::AskedAgain(decided) => ready!(decided.as_mut().poll(context)),
                State::Elsewhere(decided) => return decided.as_mut().poll(context),
                State::Ended => return Poll::Pending,
            };
            match decided {
                Ok(decision) => {
                    self.limiter.remember(self.sighting.take(), &self.request.units(self.rule), &decision);
                    return Poll::Ready(Ok(decision.jittered(self.request.wait_jitter())));
                }
                // Returned without yielding, since it has waited; thousands of deadlines may pass together.
                Err(error)
                    if matches!(self.state, State::Asked(_))
                        && !Limiter::is_asked_again_after(&error)
                        && !self.limiter.may_answer_instead(&error, self.rule) =>
                {
                    return Poll::Ready(Err(error));
                }
                Err(error) => self.state = self.after(error),
            }
        }
    }

    /// Asks the engine, unless it has just denied the same.
    fn begin(&mut self, waker: &Waker) -> Result<Option<Decision>, Error> {
        let Self { limiter, rule, shard, ref request, .. } = *self;
        match limiter.recall(Call::acquire(rule, &Request::of_plain(*request)))? {
            Recalled::Denial(denial) => return Ok(Some(denial.jittered(request.wait_jitter()))),
            Recalled::Nothing(sighting) => self.sighting = sighting,
        }
        let ask = limiter.ask_to_acquire(rule, shard, &Request::of_plain(*request), None)?;
        let until = Deadline::after(request.deadline_or(limiter.deadline));
        self.state = State::Asked(limiter.engine.begin(&ask, until, waker)?);
        Ok(None)
    }

    /// What follows this error: the call is repeated, or the rule's policy answers.
    fn after(&mut self, error: Error) -> State<'a> {
        let (limiter, rule, request, shard) = (self.limiter, self.rule, self.request, self.shard);
        match &self.state {
            State::Asked(acquiring) if Limiter::is_asked_again_after(&error) => {
                let until = acquiring.until();
                State::AskedAgain(Box::pin(async move {
                    let again = Request::of_plain(request);
                    let ask = |server_us| limiter.ask_to_acquire(rule, shard, &again, server_us);
                    let reply = limiter.ask_again(ask, error, until).await?;
                    limiter.decision_of_acquire(rule, shard, &request, &reply)
                }))
            }
            _ => State::Elsewhere(Box::pin(async move {
                let request = Request::of_plain(request);
                let decided = limiter.answer_instead(error, Call::acquire(rule, &request)).await;
                decided.map(|decision| decision.jittered(request.wait_jitter()))
            })),
        }
    }
}

impl Future for Deciding<'_> {
    type Output = Result<Decision, Error>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        if matches!(this.state, State::Ended) {
            return Poll::Pending;
        }
        let begin = || Observed::begin(this.rule.name(), this.operation.name(), this.operation.decides());
        let observed = this.observed.take().unwrap_or_else(begin);
        match observed.within(|| this.poll_decided(context)) {
            Poll::Pending => {
                this.observed = Some(observed);
                Poll::Pending
            }
            Poll::Ready(decided) => {
                this.state = State::Ended;
                observed.end(ended(decided.as_ref()));
                if this.is_counted {
                    counted(this.rule, decided.as_ref());
                }
                Poll::Ready(decided)
            }
        }
    }
}

impl FusedFuture for Deciding<'_> {
    fn is_terminated(&self) -> bool {
        matches!(self.state, State::Ended)
    }
}

/// Hides the key.
impl fmt::Debug for Deciding<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Deciding");
        shown.field("operation", &self.operation).field("rule", &self.rule.name()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// There may be thousands of callers, and each keeps one. What telemetry adds is there only with its features.
    #[test]
    fn a_caller_keeps_little_while_it_waits() {
        let size = size_of::<Deciding<'_>>() - size_of::<Option<Observed>>();
        assert!(size <= 256, "{size}");
    }
}
