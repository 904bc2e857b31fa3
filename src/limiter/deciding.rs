//! An acquire of one limit, from the request to its decision. Whatever few calls need is behind one boxed
//! call: an id, several limits, an answer that must be asked for again or that the rule's policy gives.

use std::fmt;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker, ready};

use futures_util::future::BoxFuture;

use super::Limiter;
use super::counted::{counted, ended};
use crate::call::Reply;
use crate::decision::Decision;
use crate::denial_cache::Sighting;
use crate::engine::Acquiring;
use crate::engine::deadline::Deadline;
use crate::error::Error;
use crate::operation::Operation;
use crate::request::{PlainRequest, Request};
use crate::rule::{Rule, Target};
use crate::telemetry::Observed;

/// An acquire in progress: the future of [`Limiter::acquire`]. It does nothing until it is polled, and its deadline counts
/// from then. Dropping it gives the call up: what isn't sent yet is never sent, and what was sent may be charged. Polled
/// after its decision, it stays pending.
///
/// It borrows the limiter, the rule and the request's key, which a task of its own must have:
///
/// ```
/// # #[cfg(feature = "embedded")]
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use tollgate::{Embedded, Limiter, Rule};
///
/// let limiter = Limiter::new(Embedded::new());
/// let rule = "gcra 10/1m".parse::<Rule>()?.named("api")?;
/// let decided = tokio::spawn(async move { limiter.acquire(&rule, "user:42").await });
/// assert!(decided.await??.allowed);
/// # Ok(())
/// # }
/// # #[cfg(not(feature = "embedded"))]
/// # fn main() {}
/// ```
#[must_use = "futures do nothing unless polled"]
pub struct Acquire<'a> {
    limiter: &'a Limiter,
    rule: &'a Rule,
    request: PlainRequest<'a>,
    /// The limit that decides, alone.
    target: Target<'a>,
    /// Whether its decision is counted, or a part of a call that is.
    is_counted: bool,
    observed: Option<Observed>,
    state: State<'a>,
}

enum State<'a> {
    New,
    Asked(Acquiring<'a>, Option<Box<Sighting>>),
    Elsewhere(BoxFuture<'a, Result<Decision, Error>>),
    Ended,
}

impl<'a> Acquire<'a> {
    pub(super) fn new(limiter: &'a Limiter, rule: &'a Rule, request: Request<'a>, is_counted: bool) -> Self {
        let (target, state) = match limiter.target_of_ask(rule, &request) {
            Some(target) => (target, State::New),
            None => (rule.scoped_limits()[0].whole(), State::in_full(limiter, rule, request)),
        };
        Self { limiter, rule, request: *request.plain(), target, is_counted, observed: None, state }
    }

    fn poll_decided(&mut self, context: &mut Context<'_>) -> Poll<Result<Decision, Error>> {
        loop {
            let reply = match &mut self.state {
                State::New => match self.begin(context.waker()) {
                    Ok(None) => continue,
                    // It is there at once, and the caller may ask again at once: others must have their turn.
                    Ok(Some(recalled)) => {
                        return pin!(tokio::task::consume_budget()).poll(context).map(|()| Ok(recalled));
                    }
                    Err(error) => Err(error),
                },
                State::Asked(acquiring, _) => ready!(Pin::new(acquiring).poll(context)),
                State::Elsewhere(decided) => return decided.as_mut().poll(context),
                State::Ended => return Poll::Pending,
            };
            match reply.and_then(|reply| self.decision(&reply)) {
                Ok(decision) => return Poll::Ready(Ok(decision.jittered(self.request.wait_jitter()))),
                Err(error) => self.state = self.after(error),
            }
        }
    }

    /// Asks the engine, unless it has just denied the same.
    fn begin(&mut self, waker: &Waker) -> Result<Option<Decision>, Error> {
        let Self { limiter, rule, ref request, .. } = *self;
        let mut sighting = None;
        if let Some(cache) = &limiter.denials
            && let Some(sighted) = limiter.sight(cache, rule, &Request::of_plain(*request))?
        {
            if let Some(denial) = cache.recall(&sighted, request.units(rule)) {
                return Ok(Some(denial.jittered(request.wait_jitter())));
            }
            sighting = Some(Box::new(sighted));
        }
        let Some(ask) = limiter.ask(rule, self.target, request)? else {
            self.state = State::in_full(limiter, rule, Request::of_plain(*request));
            return Ok(None);
        };
        let until = Deadline::after(request.deadline_or(limiter.deadline));
        self.state = State::Asked(limiter.engine.acquire(&ask, until, waker)?, sighting);
        Ok(None)
    }

    /// The decision in the engine's reply, remembered if it is a denial.
    fn decision(&mut self, reply: &Reply) -> Result<Decision, Error> {
        let decision = self.limiter.decision_of_ask(self.rule, self.target, &self.request, reply)?;
        if let (State::Asked(_, sighting), Some(cache)) = (&mut self.state, &self.limiter.denials)
            && let Some(sighting) = sighting.take()
        {
            cache.remember(*sighting, self.request.units(self.rule), &decision);
        }
        Ok(decision)
    }

    /// What comes after this error: the same is asked again for other windows, or the rule's policy answers.
    fn after(&mut self, error: Error) -> State<'a> {
        let (limiter, rule, request, target) = (self.limiter, self.rule, self.request, self.target);
        let (until, sighting) = match std::mem::replace(&mut self.state, State::Ended) {
            State::Asked(acquiring, sighting) => (Some(acquiring.until()), sighting),
            _ => (None, None),
        };
        State::Elsewhere(Box::pin(async move {
            let request = Request::of_plain(request);
            let decided = match until.filter(|_| Limiter::is_asked_again_after(&error)) {
                Some(until) => limiter.acquire_again(rule, target, request.plain(), error, until).await,
                None => Err(error),
            };
            let decided = match decided {
                Ok(decision) => {
                    if let (Some(cache), Some(sighting)) = (&limiter.denials, sighting) {
                        cache.remember(*sighting, request.units(rule), &decision);
                    }
                    Ok(decision)
                }
                Err(error) => limiter.answer_instead(error, rule, &request, Operation::Acquire).await,
            };
            decided.map(|decision| decision.jittered(request.wait_jitter()))
        }))
    }
}

impl<'a> State<'a> {
    fn in_full(limiter: &'a Limiter, rule: &'a Rule, request: Request<'a>) -> Self {
        let decided = async move { limiter.decide_or_fall_back(rule, &request, Operation::Acquire).await };
        Self::Elsewhere(Box::pin(decided))
    }
}

impl Future for Acquire<'_> {
    type Output = Result<Decision, Error>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        if matches!(this.state, State::Ended) {
            return Poll::Pending;
        }
        let begin = || Observed::begin(this.rule.name(), Operation::Acquire.name(), true);
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

impl fmt::Debug for Acquire<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rule, request, .. } = self;
        f.debug_struct("Acquire").field("rule", rule).field("request", request).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// There may be thousands of callers, and each keeps one. What telemetry adds is there only with its features.
    #[test]
    fn a_caller_keeps_little_while_it_waits() {
        let size = size_of::<Acquire<'_>>() - size_of::<Option<Observed>>();
        assert!(size <= 256, "{size}");
    }
}
