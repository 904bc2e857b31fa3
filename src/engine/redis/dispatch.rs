//! Sends queued calls while there are any, in a task, so that no caller that gives up holds up another. Only a lone
//! caller sends its own ask.

use std::sync::Arc;
use std::task::Waker;

use futures_util::future::join_all;

use super::Redis;
use super::breaker::Admission;
use super::connection::Connection;
use super::exchange::{CallOptions, Outcome, Retries};
use super::per_runtime::PerRuntime;
use super::pipeline::Asking;
use super::queue::{Entered, InFlight, Stage, ToBegin, Waiting};
use crate::call::{Ask, Reply};
use crate::engine::Acquiring;
use crate::engine::deadline::Deadline;
use crate::error::Error;
use crate::telemetry;

/// A task that sends batches, or a lone caller that sends its own ask; two may run at once. However one ends, what is
/// queued by then is sent, or failed if the runtime is shutting down.
#[derive(Debug)]
struct Dispatch {
    redis: Redis,
    per_runtime: Arc<PerRuntime>,
    generation: u64,
    /// Whether this one is responsible for the batches that wait to be sent. False while its own batch is in flight.
    is_responsible: bool,
}

/// The asks of one caller that waits for all of them.
#[derive(Debug)]
pub(crate) struct Many {
    waiting: std::vec::IntoIter<Waiting>,
    _entry: Option<Admission>,
    /// The error for those that weren't queued, and how many they are.
    failed: Option<(Error, usize)>,
}

impl Redis {
    /// Begins to ask for this, alone or with others, for the task that owns this waker.
    pub(in crate::engine) fn begin<'a>(
        &'a self,
        ask: &Ask<'a>,
        until: Deadline,
        waker: &Waker,
    ) -> Result<Acquiring<'a>, Error> {
        self.with_per_runtime(|per_runtime| {
            let admission = per_runtime.breaker.enter()?;
            Ok(match per_runtime.queue.enter(ask, until, waker) {
                Entered::Alone(generation) => {
                    let (dispatch, ask) = (Dispatch::new(self, per_runtime, generation, false), ask.clone());
                    let asked = async move {
                        let (_admission, dispatch) = (admission, dispatch);
                        self.by_itself(&dispatch.per_runtime, Asking::No, &ask, until).await
                    };
                    Acquiring::Otherwise(Box::pin(asked), until)
                }
                Entered::Queued(waiting, to_begin) => {
                    self.start(per_runtime, &to_begin);
                    Acquiring::Queued { waiting, _admission: admission }
                }
            })
        })?
    }

    /// Asks for this in a call of its own.
    pub(in crate::engine) async fn ask_by_itself(
        &self,
        asking: Asking,
        ask: &Ask<'_>,
        until: Deadline,
    ) -> Result<Reply, Error> {
        let per_runtime = self.per_runtime()?;
        let _admission = per_runtime.breaker.enter()?;
        self.by_itself(&per_runtime, asking, ask, until).await
    }

    async fn by_itself(
        &self,
        per_runtime: &Arc<PerRuntime>,
        asking: Asking,
        ask: &Ask<'_>,
        until: Deadline,
    ) -> Result<Reply, Error> {
        let alone = ask.alone();
        let reply = self.ask_one(per_runtime, alone.call(), asking, until).await?.only();
        telemetry::sent_together(|| ask.keys.len());
        reply
    }

    /// Decides all of these together, each independently and by its own deadline. They are queued at once.
    pub(in crate::engine) fn acquire_all<'r>(&self, asks: impl Iterator<Item = (Ask<'r>, Deadline)>) -> Many {
        match self.per_runtime().and_then(|per_runtime| Ok((per_runtime.breaker.enter()?, per_runtime))) {
            Ok((entry, per_runtime)) => {
                let (waiting, begin) = per_runtime.queue.enter_all(asks);
                self.start(&per_runtime, &begin);
                // A call without asks leaves probing to others.
                let entry = (!waiting.is_empty()).then_some(entry);
                Many { waiting: waiting.into_iter(), _entry: entry, failed: None }
            }
            Err(error) => Many { waiting: Vec::new().into_iter(), _entry: None, failed: Some((error, asks.count())) },
        }
    }

    fn start(&self, per_runtime: &Arc<PerRuntime>, begin: &ToBegin) {
        begin.begin_watch(&per_runtime.queue);
        if let Some(generation) = begin.dispatch {
            Dispatch::new(self, per_runtime, generation, true).spawn();
        }
    }

    /// Sends a batch, and resends what didn't run, for callers still waiting. Each call is answered as its reply
    /// arrives.
    async fn send(&self, per_runtime: &Arc<PerRuntime>, mut connection: Connection, mut in_flight: InFlight<'_>) {
        let (mut retries, mut is_again) = (Retries::new(), false);
        loop {
            let exchanged = async {
                if is_again && !in_flight.prepare_resend() {
                    return None;
                }
                let (numbers, calls): (Vec<_>, Vec<_>) = in_flight.batch.calls().unzip();
                if calls.is_empty() {
                    // All have given up.
                    return None;
                }
                telemetry::sent_together(|| calls.iter().map(|call| call.key_count()).sum());
                let confirm_by = calls.iter().any(|call| call.takes()).then_some(in_flight.last);
                let options = CallOptions { asking: Asking::No, confirm_by };
                let is_awaited = |at: usize| in_flight.is_awaited(numbers[at]);
                let outcomes = self.exchange(per_runtime, &connection, &calls, options, &retries, is_awaited).await;
                Some((numbers, outcomes))
            };
            // The first time, the dispatch that calls this writes in order.
            let exchanged = match is_again {
                false => exchanged.await,
                true => per_runtime.writing.in_order(exchanged).await,
            };
            let Some((numbers, outcomes)) = exchanged else { return };
            is_again = true;
            let (mut unsent, mut refused) = (false, false);
            for (call, outcome) in numbers.into_iter().zip(outcomes) {
                match outcome {
                    Outcome::Answered(answer) => in_flight.answer(call, answer),
                    Outcome::Unsent => {
                        unsent = true;
                        in_flight.set_stage(call, Stage::Unsent);
                    }
                    Outcome::Refused(error) => {
                        refused = true;
                        in_flight.set_stage(call, Stage::Refused(error));
                    }
                }
            }
            if !unsent && !refused {
                return;
            }
            in_flight.wake();
            match retries.next(self, per_runtime, refused).await {
                Ok(connected) => connection = connected,
                Err(error) => return in_flight.answer_all(&error),
            }
        }
    }
}

impl Many {
    /// The next answer, in the order of the asks.
    pub(in crate::engine) async fn next(&mut self) -> Option<Result<Reply, Error>> {
        if let Some((error, left)) = &mut self.failed {
            *left = left.checked_sub(1)?;
            return Some(Err(error.clone()));
        }
        let answer = self.waiting.next()?.await;
        tokio::task::consume_budget().await;
        Some(answer)
    }
}

impl Dispatch {
    fn new(redis: &Redis, per_runtime: &Arc<PerRuntime>, generation: u64, is_responsible: bool) -> Self {
        Self { redis: redis.clone(), per_runtime: Arc::clone(per_runtime), generation, is_responsible }
    }

    fn spawn(self) {
        self.per_runtime.runtime.clone().spawn(self.run());
    }

    /// Sends one batch after another.
    async fn run(mut self) {
        let generation = self.generation;
        while self.is_responsible {
            // Lets callers that are about to ask join the batch, such as those that were just answered.
            tokio::task::yield_now().await;
            let queue = &self.per_runtime.queue;
            self.is_responsible = queue.keep_dispatch(generation);
            if !self.is_responsible {
                return;
            }
            let connection = match self.redis.connection(&self.per_runtime).await {
                Ok(connection) => connection,
                Err(error) => {
                    self.is_responsible = false;
                    return queue.unconnected(generation, &error);
                }
            };
            self.is_responsible = false;
            // Calls that are given up before this aren't sent. Those that are sent are written before any later call.
            let sending = async {
                let Some((batches, more)) = queue.next(generation) else { return };
                if let Some(generation) = more {
                    Self::new(&self.redis, &self.per_runtime, generation, true).spawn();
                }
                let send = |batch| self.redis.send(&self.per_runtime, connection.clone(), batch);
                join_all(batches.into_iter().map(send)).await;
            };
            self.per_runtime.writing.in_order(sending).await;
            self.is_responsible = queue.resume_dispatch(generation);
        }
    }
}

impl Drop for Dispatch {
    fn drop(&mut self) {
        // If dropped before it has sent what waits, its runtime has ended, and another dispatch would get no further.
        if let Some(generation) = self.per_runtime.queue.leave(self.generation, self.is_responsible) {
            Self::new(&self.redis, &self.per_runtime, generation, true).spawn();
        }
    }
}
