//! Plain acquires in several slots, which take without an id: each part answers a receipt, and by that what it took is
//! given back where another denies. No marker stays in Redis. But two calls with one receipt would give back twice, so
//! one that may have been made isn't made again.

use std::sync::Arc;

use futures_util::future::{BoxFuture, join_all};
use smallvec::SmallVec;
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::{Answers, Limiter, PATIENCE, Part, Took};
use crate::call::{Mode, Receipt};
use crate::decision::Decision;
use crate::engine::deadline::Deadline;
use crate::error::{Charged, Error};
use crate::limiter::background::{AtOnce, persist_while};
use crate::limiter::call::Call;
use crate::limiter::decide::garbled;
use crate::limiter::prepare::Targets;
use crate::lock::Lock;
use crate::operation::Operation;
use crate::request::{OwnedRequest, Request};
use crate::rule::Rule;
use crate::runtime;

/// An acquire that goes on without its caller: until it is known what it took, and that is given back.
struct Acquire {
    limiter: Limiter,
    rule: Rule,
    request: OwnedRequest,
    parts: SmallVec<[Taken; 2]>,
}

/// A part, and the receipt for what it took until that is about to be given back.
struct Taken {
    /// Its limits, among the rule's.
    places: SmallVec<[usize; 2]>,
    receipt: Lock<Option<Receipt>>,
}

/// What the parts have after they were given back, in their order; none of one that took nothing, or that isn't given
/// back yet.
type GivenBack = Vec<Option<Decision>>;

/// Its parts are being asked. If the caller leaves meanwhile, all that they take is given back.
struct Asking {
    acquire: Arc<Acquire>,
    runtime: Handle,
    /// None once they have answered.
    answers: Option<BoxFuture<'static, Answers>>,
}

impl Limiter {
    /// Acquires all parts or none.
    pub(super) async fn take_by_receipts(
        &self,
        call: Call<'_>,
        parts: &[Part<'_>],
        until: Deadline,
    ) -> Result<Decision, Error> {
        let mut asking = Asking::of(self, call, parts)?;
        let answers = asking.answers().await;
        if answers.iter().all(|answer| answer.as_ref().is_ok_and(|decision| decision.allowed)) {
            let decided = answers.into_iter().collect::<Result<Vec<_>, _>>()?;
            return self.whole(parts.iter().zip(decided));
        }
        let took: Vec<_> = answers.iter().map(Took::by).collect();
        let given_back = if took.contains(&Took::Units) {
            // What this process gives back ends the denials that it remembers of these keys.
            let taken = parts.iter().zip(&took).filter(|(_, took)| **took == Took::Units);
            let changed = taken.flat_map(|(part, _)| part.targets.iter().copied());
            let changing = self.changing_those(call.rule, call.request, changed).ok().flatten();
            let answer = asking.acquire.give_back_later(&asking.runtime, None);
            let answered = runtime::timeout_at(Instant::now() + until.left().min(PATIENCE), answer).await;
            if let (Some(Ok(_)), Some(changing)) = (&answered, changing) {
                changing.done();
            }
            answered.and_then(Result::ok).unwrap_or_else(|| vec![None; parts.len()])
        } else {
            vec![None; parts.len()]
        };
        let is_over = took.iter().zip(&given_back).all(|(took, state)| match took {
            Took::Nothing => true,
            Took::Units => state.is_some(),
            Took::Perhaps => false,
        });
        self.denied(call, parts, answers, given_back, is_over)
    }

    /// The reply of these limits to an acquire that answers a receipt, or to a cancel by one.
    async fn ask_by_receipt(
        &self,
        call: Call<'_>,
        targets: &Targets<'_>,
        receipt: Option<&Receipt>,
    ) -> Result<(Decision, Option<Receipt>), Error> {
        let until = Deadline::after(call.request.deadline_or(self.deadline));
        let ask = |server_us| {
            let mut ask = self.ask_for(call.rule, targets, call.request, Mode::Call(call.operation), server_us)?;
            ask.terms.id_ttl_ms = Some(0);
            ask.holder = receipt.map(|receipt| receipt.0.clone());
            Ok(ask)
        };
        let reply = self.ask(ask, until).await?;
        Ok((self.decision(call, targets, &reply)?, reply.receipt))
    }
}

impl Asking {
    fn of(limiter: &Limiter, call: Call<'_>, parts: &[Part<'_>]) -> Result<Self, Error> {
        let runtime = runtime::with_timers()?;
        let (limiter, rule, request) = (limiter.clone(), call.rule.clone(), call.request.into_owned());
        let parts = parts.iter().map(|part| Taken { places: part.places.clone(), receipt: Lock::default() }).collect();
        let acquire = Arc::new(Acquire { limiter, rule, request, parts });
        let asked = Arc::clone(&acquire);
        Ok(Self { acquire, runtime, answers: Some(Box::pin(async move { asked.ask().await })) })
    }

    async fn answers(&mut self) -> Answers {
        let Some(asked) = &mut self.answers else { return Answers::new() };
        let answers = asked.await;
        self.answers = None;
        answers
    }
}

impl Drop for Asking {
    fn drop(&mut self) {
        if let Some(answers) = self.answers.take() {
            self.acquire.give_back_later(&self.runtime, Some(answers));
        }
    }
}

impl Acquire {
    /// Asks all parts at the same time.
    async fn ask(&self) -> Answers {
        let request = Request::from(&self.request);
        let call = Call::acquire(&self.rule, &request);
        join_all(self.parts.iter().map(async |part| {
            let asked = self.limiter.ask_by_receipt(call, &self.targets(part), None).await;
            let (decision, receipt) = asked.inspect_err(|error| {
                // Too few replicas know what it took.
                *part.receipt.lock() = error.note::<Receipt>().cloned();
            })?;
            *part.receipt.lock() = receipt.filter(|_| decision.allowed);
            Ok(decision)
        }))
        .await
    }

    fn targets(&self, part: &Taken) -> Targets<'_> {
        let limits = self.rule.scoped_limits();
        part.places.iter().filter_map(|place| Some(limits.get(*place)?.whole())).collect()
    }

    /// In the background, whoever waits: once these answers have come, if there are any to wait for.
    fn give_back_later(
        self: &Arc<Self>,
        runtime: &Handle,
        answers: Option<BoxFuture<'static, Answers>>,
    ) -> oneshot::Receiver<GivenBack> {
        let (sender, receiver) = oneshot::channel();
        let acquire = Arc::clone(self);
        // For who makes it: another runtime may, if this one ends.
        let once = Arc::new((Lock::new(answers), Lock::new(Some(sender))));
        self.limiter.spawn(runtime, move |at_once| {
            let (acquire, once) = (Arc::clone(&acquire), Arc::clone(&once));
            async move {
                let answers = once.0.lock().take();
                if let Some(answers) = answers {
                    answers.await;
                }
                let given_back = acquire.give_back(&at_once).await;
                let is_able = given_back.is_some();
                if let (Some(given_back), Some(sender)) = (given_back, once.1.lock().take()) {
                    // The caller may have gone on.
                    let _ = sender.send(given_back);
                }
                is_able
            }
        });
        receiver
    }

    /// None if this runtime can't.
    async fn give_back(&self, at_once: &AtOnce) -> Option<GivenBack> {
        let request = Request::from(&self.request);
        let request = self.limiter.unhurried(request);
        let call = Call { rule: &self.rule, request: &request, operation: Operation::Cancel };
        let given_back = join_all(self.parts.iter().map(|part| self.give_back_part(call, part, at_once))).await;
        let is_able = !given_back.iter().any(|answer| answer.as_ref().is_err_and(Error::is_input));
        is_able.then(|| given_back.into_iter().map(|answer| answer.ok().flatten()).collect())
    }

    /// Again while the node is away, for some seconds, unless it may have been done.
    async fn give_back_part(&self, call: Call<'_>, part: &Taken, at_once: &AtOnce) -> Result<Option<Decision>, Error> {
        if part.receipt.lock().is_none() {
            return Ok(None);
        }
        let state = Lock::new(None);
        let attempt = || async {
            let receipt = part.receipt.lock().take().ok_or_else(garbled)?;
            let targets = self.targets(part);
            let answer = at_once.call(self.limiter.ask_by_receipt(call, &targets, Some(&receipt))).await;
            let answer = answer.map(|(decision, _)| decision);
            match &answer {
                Ok(decision) => *state.lock() = Some(decision.clone()),
                Err(error) if error.charged() == Charged::No => *part.receipt.lock() = Some(receipt),
                Err(_) => {}
            }
            answer
        };
        let may_retry = |error: &Error| error.goes_to_policy() && error.charged() == Charged::No;
        persist_while(may_retry, None, attempt).await?;
        Ok(state.lock().take())
    }
}
