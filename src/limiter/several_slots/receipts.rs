//! Plain acquires in several slots, which take without an id: each part answers a receipt, and by that what it took is
//! given back where another denies. No marker stays in Redis. But two calls with one receipt would give back twice, so
//! one that may have run isn't repeated.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures_util::future::{BoxFuture, join_all};
use smallvec::SmallVec;
use tokio::runtime::Handle;
use tokio::time::Instant;

use super::{Answers, GivenBack, PATIENCE, Part, Took};
use crate::background::{AtOnce, Counted};
use crate::call::{Mode, Receipt};
use crate::decision::Decision;
use crate::denial_cache::Changing;
use crate::engine::deadline::Deadline;
use crate::error::{Charged, Error};
use crate::limiter::background::persist_while;
use crate::limiter::call::Call;
use crate::limiter::decide::garbled;
use crate::limiter::handle::Limiter;
use crate::limiter::prepare::Targets;
use crate::lock::Lock;
use crate::operation::Operation;
use crate::request::{OwnedRequest, Request};
use crate::rule::Rule;
use crate::runtime;

/// An acquire that goes on without its caller: until it is known what it took, and that is given back.
struct UnattendedAcquire {
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
    /// Whether there was one.
    took: AtomicBool,
}

impl Taken {
    fn of(part: &Part<'_>) -> Self {
        Self { places: part.places.clone(), receipt: Lock::default(), took: AtomicBool::new(false) }
    }

    fn keep(&self, receipt: Option<Receipt>) {
        self.took.fetch_or(receipt.is_some(), Ordering::AcqRel);
        *self.receipt.lock() = receipt;
    }
}

/// A step of an acquire: its parts are asked, or given back. If the caller leaves meanwhile, the step continues, and
/// all that they took is given back.
struct Step<T: Send + 'static> {
    acquire: Arc<UnattendedAcquire>,
    runtime: Handle,
    /// None once it has ended.
    going: Option<BoxFuture<'static, T>>,
    /// Its place in the background, while what was taken is being given back.
    place: Option<Counted>,
}

impl Limiter {
    /// Acquires all parts or none.
    pub(super) async fn take_by_receipts(
        &self,
        call: Call<'_>,
        parts: &[Part<'_>],
        until: Deadline,
    ) -> Result<Decision, Error> {
        let runtime = runtime::with_timers()?;
        let acquire = UnattendedAcquire::of(self, call, parts);
        let answers = Step::of(&acquire, &runtime, |acquire| async move { acquire.ask().await }).ended().await;
        if answers.iter().all(|answer| answer.as_ref().is_ok_and(|decision| decision.allowed)) {
            return self.whole(parts.iter().zip(answers.into_iter().flatten()));
        }
        let took: Vec<_> = answers.iter().map(Took::by).collect();
        let given_back = match took.contains(&Took::Units) {
            true => acquire.give_back_to_caller(&runtime, until).await,
            false => None,
        };
        let given_back = given_back.unwrap_or_else(|| parts.iter().map(|_| None).collect());
        let is_over = took.iter().zip(&given_back).all(|(took, state)| match took {
            Took::Nothing => true,
            Took::Units => state.as_ref().is_some_and(Result::is_ok),
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

impl<T: Send + 'static> Step<T> {
    fn of<F>(acquire: &Arc<UnattendedAcquire>, runtime: &Handle, step: impl FnOnce(Arc<UnattendedAcquire>) -> F) -> Self
    where
        F: Future<Output = T> + Send + 'static,
    {
        let going: BoxFuture<'static, T> = Box::pin(step(Arc::clone(acquire)));
        Self { acquire: Arc::clone(acquire), runtime: runtime.clone(), going: Some(going), place: None }
    }

    /// Waits for its end, once.
    async fn ended(&mut self) -> T {
        let ended = match &mut self.going {
            Some(going) => going.await,
            None => std::future::pending().await,
        };
        self.going = None;
        ended
    }
}

impl<T: Send + 'static> Drop for Step<T> {
    fn drop(&mut self) {
        if let Some(going) = self.going.take() {
            self.acquire.go_on(&self.runtime, self.place.take(), Box::pin(async move { _ = going.await }));
        }
    }
}

impl UnattendedAcquire {
    fn of(limiter: &Limiter, call: Call<'_>, parts: &[Part<'_>]) -> Arc<Self> {
        let (limiter, rule, request) = (limiter.clone(), call.rule.clone(), call.request.into_owned());
        Arc::new(Self { limiter, rule, request, parts: parts.iter().map(Taken::of).collect() })
    }

    /// Asks all parts at the same time.
    async fn ask(&self) -> Answers {
        let request = Request::from(&self.request);
        let call = Call::acquire(&self.rule, &request);
        join_all(self.parts.iter().map(async |part| {
            let asked = self.limiter.ask_by_receipt(call, &self.targets(part), None).await;
            let (decision, receipt) = asked.inspect_err(|error| {
                // The error of a part that took units, which too few replicas have, carries the receipt.
                part.keep(error.note::<Receipt>().cloned());
            })?;
            part.keep(receipt.filter(|_| decision.allowed));
            Ok(decision)
        }))
        .await
    }

    fn targets(&self, part: &Taken) -> Targets<'_> {
        let limits = self.rule.scoped_limits();
        part.places.iter().filter_map(|place| Some(limits.get(*place)?.whole())).collect()
    }

    /// While the caller waits: for a bounded time, or, while the background has no place for the rest, until its
    /// deadline. The background does the rest.
    async fn give_back_to_caller(self: &Arc<Self>, runtime: &Handle, until: Deadline) -> Option<GivenBack> {
        let mut giving_back = Step::of(self, runtime, |acquire| async move { acquire.give_back(None).await });
        let given_back = loop {
            giving_back.place = giving_back.place.take().or_else(|| self.limiter.background.place());
            let left = until.left();
            match runtime::timeout_at(Instant::now() + left.min(PATIENCE), giving_back.ended()).await {
                Some(given_back) => break given_back,
                None if giving_back.place.is_some() || left <= PATIENCE => {
                    // Giving back later wouldn't end a denial that this process remembers, so none may be remembered.
                    drop(self.changing(&Request::from(&self.request)));
                    return None;
                }
                None => {}
            }
        };
        if self.parts.iter().any(|part| part.receipt.lock().is_some()) {
            self.go_on(runtime, giving_back.place.take(), Box::pin(std::future::ready(())));
        }
        given_back
    }

    /// Marks the keys that this took of as being changed, for the denials that this process remembers.
    fn changing(&self, request: &Request<'_>) -> Option<Changing<'_>> {
        let taken = self.parts.iter().filter(|part| part.took.load(Ordering::Acquire));
        let changed = taken.flat_map(|part| self.targets(part));
        self.limiter.changing_those(&self.rule, request, changed).ok().flatten()
    }

    /// In the background: once this step has ended, gives back what is left to be given back.
    fn go_on(self: &Arc<Self>, runtime: &Handle, place: Option<Counted>, step: BoxFuture<'static, ()>) {
        let acquire = Arc::clone(self);
        // Shared between attempts: if this runtime ends, another one continues.
        let step = Arc::new(Lock::new(Some(step)));
        let background = &self.limiter.background;
        background.spawn(place.or_else(|| background.place()), runtime, move |at_once| {
            let (acquire, step) = (Arc::clone(&acquire), Arc::clone(&step));
            async move {
                let step = step.lock().take();
                if let Some(step) = step {
                    step.await;
                }
                acquire.give_back(Some(&at_once)).await.is_some()
            }
        });
    }

    /// Once, or in the background again while a node is away, for some seconds. None if this runtime can't.
    async fn give_back(&self, at_once: Option<&AtOnce>) -> Option<GivenBack> {
        let request = Request::from(&self.request);
        let request = self.limiter.unhurried(request);
        let call = Call { rule: &self.rule, request: &request, operation: Operation::Cancel };
        // What this process gives back ends the denials that it remembers of these keys.
        let changing = self.changing(&request);
        let given_back = join_all(self.parts.iter().map(|part| self.give_back_part(call, part, at_once))).await;
        if let Some(changing) = changing.filter(|_| given_back.iter().all(Result::is_ok)) {
            changing.done();
        }
        let is_able = !given_back.iter().any(|answer| answer.as_ref().is_err_and(Error::is_input));
        is_able.then(|| given_back.into_iter().map(Result::transpose).collect())
    }

    /// Isn't repeated if it may have run.
    async fn give_back_part(
        &self,
        call: Call<'_>,
        part: &Taken,
        at_once: Option<&AtOnce>,
    ) -> Result<Option<Decision>, Error> {
        if part.receipt.lock().is_none() {
            return Ok(None);
        }
        let is_temporary = |error: &Error| error.goes_to_policy() || error.is_refusal();
        let may_retry = |error: &Error| is_temporary(error) && error.charged() == Charged::No;
        let state = Lock::new(None);
        let attempt = || async {
            let receipt = part.receipt.lock().take().ok_or_else(garbled)?;
            let answer = self.limiter.ask_by_receipt(call, &self.targets(part), Some(&receipt)).await;
            let answer = answer.map(|(decision, _)| decision);
            match &answer {
                Ok(decision) => *state.lock() = Some(decision.clone()),
                Err(error) if may_retry(error) || error.is_input() => *part.receipt.lock() = Some(receipt),
                Err(_) => {}
            }
            answer
        };
        match at_once {
            // The receipt stays here until it is its turn: this runtime may end before.
            Some(at_once) => _ = persist_while(may_retry, None, || at_once.call(attempt())).await?,
            None => _ = attempt().await?,
        }
        Ok(state.lock().take())
    }
}
