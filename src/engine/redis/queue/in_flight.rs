//! What a batch's waiters share: whether it was sent, each waiter's position in it, and the answers.

use std::sync::{Arc, OnceLock};
use std::task::Waker;

use tokio::time::Instant;

use super::Queue;
use super::machine::IN_FLIGHT;
use crate::batch::{Batch, GroupId, Position, Records};
use crate::call::Reply;
use crate::engine::deadline::Deadline;
use crate::error::{Error, Kind};
use crate::lock::Lock;
use crate::runtime;

/// A caller waiting for a batch.
#[derive(Debug)]
pub(super) struct Waiter {
    pub(super) waker: Option<Waker>,
    pub(super) until: Instant,
    /// None once the caller has given up.
    pub(super) group: Option<GroupId>,
}

/// The state that a batch's waiters share.
#[derive(Debug)]
pub(super) struct BatchState {
    pub(super) queue: Arc<Queue>,
    /// Higher than that of every batch before it.
    pub(super) number: u64,
    /// Its waiters, from when it is sent until it is answered.
    pub(super) waiters: Lock<Vec<Waiter>>,
    pub(super) sent: OnceLock<Sent>,
    /// Why it isn't answered, and never will be.
    pub(super) failed: OnceLock<Error>,
}

#[derive(Debug)]
pub(super) struct Sent {
    /// Each waiter's position, if it was sent.
    positions: Vec<Option<Position>>,
    calls: Vec<SentCall>,
    /// The second sending: what didn't run, for callers that were still waiting.
    again: OnceLock<Box<Sent>>,
}

#[derive(Debug, Default)]
struct SentCall {
    answer: OnceLock<Result<Records, Error>>,
    stage: Lock<Stage>,
}

/// How far an unanswered call has come.
#[derive(Clone, Debug, Default)]
pub(in crate::engine::redis) enum Stage {
    #[default]
    Sent,
    Unsent,
    /// It was refused with this error, and is retried shortly.
    Refused(Error),
}

/// A batch being sent. However it ends, its waiters are answered.
#[derive(Debug)]
pub(in crate::engine::redis) struct InFlight<'a> {
    pub(in crate::engine::redis) batch: Batch,
    /// The latest deadline of its waiters.
    pub(in crate::engine::redis) last: Instant,
    pub(super) shared: Arc<BatchState>,
    pub(super) queue: &'a Queue,
}

impl Sent {
    pub(super) fn new(positions: Vec<Option<Position>>, batch: &Batch) -> Self {
        let calls = std::iter::repeat_with(SentCall::default).take(batch.call_count()).collect();
        Self { positions, calls, again: OnceLock::new() }
    }

    fn call_of(&self, index: usize) -> Option<(&SentCall, Position)> {
        let position = self.positions[index]?;
        Some((&self.calls[position.group.call as usize], position))
    }
}

impl BatchState {
    pub(super) fn of(queue: &Arc<Queue>, number: u64) -> Arc<Self> {
        let (waiters, sent, failed) = Default::default();
        Arc::new(Self { queue: Arc::clone(queue), number, waiters, sent, failed })
    }

    /// Each sending of it, the latest last.
    fn sent(&self) -> impl Iterator<Item = &Sent> {
        std::iter::successors(self.sent.get(), |sent| sent.again.get().map(Box::as_ref))
    }

    fn latest(&self) -> Option<&Sent> {
        self.sent().last()
    }

    pub(super) fn answer(&self, index: usize) -> Option<Result<Reply, Error>> {
        // Read first: once it is set, no more answers arrive.
        let failed = self.failed.get();
        for (call, position) in self.sent().filter_map(|sent| sent.call_of(index)) {
            if let Some(answer) = call.answer.get() {
                return Some(answer.as_ref().map_err(Error::clone).and_then(|answer| answer.reply(position)));
            }
        }
        // A caller left out because its deadline had passed notices that itself, and returns that error.
        let left_out = self.latest().is_some_and(|sent| sent.positions[index].is_none());
        failed.filter(|_| !left_out).map(|error| Err(error.clone()))
    }

    /// The stage of this caller, which isn't answered yet.
    pub(super) fn stage(&self, index: usize) -> Stage {
        let latest = self.sent().filter_map(|sent| sent.call_of(index)).last();
        latest.map_or(Stage::Unsent, |(call, _)| call.stage.lock().clone())
    }
}

impl InFlight<'_> {
    pub(in crate::engine::redis) fn set_stage(&self, call: usize, stage: Stage) {
        if let Some(sent) = self.shared.latest() {
            *sent.calls[call].stage.lock() = stage;
        }
    }

    pub(in crate::engine::redis) fn answer(&self, call: usize, answer: Result<Records, Error>) {
        if let Some(sent) = self.shared.latest() {
            let _ = sent.calls[call].answer.set(answer);
        }
    }

    /// Fails all unanswered calls.
    pub(in crate::engine::redis) fn answer_all(&self, error: &Error) {
        for call in self.shared.latest().iter().flat_map(|sent| &sent.calls) {
            let _ = call.answer.set(Err(error.clone()));
        }
    }

    /// Wakes the answered callers.
    pub(in crate::engine::redis) fn wake(&self) {
        let mut woken = Vec::new();
        if let Some(sent) = self.shared.latest() {
            let answered = |index| sent.call_of(index).is_some_and(|(call, _)| call.answer.get().is_some());
            let mut waiters = self.shared.waiters.lock();
            let waiters = waiters.iter_mut().enumerate().filter(|(index, _)| answered(*index));
            woken.extend(waiters.filter_map(|(_, waiter)| waiter.waker.take()));
        }
        woken.into_iter().for_each(runtime::wake);
    }

    /// Whether everybody who asked by this call still waits for it.
    pub(in crate::engine::redis) fn is_awaited(&self, call: usize) -> bool {
        let (waiters, now) = (self.shared.waiters.lock(), Instant::now());
        let asked = |index| {
            let position = self.shared.latest().and_then(|sent| sent.positions[index]);
            position.is_some_and(|position: Position| position.group.call as usize == call)
        };
        let mut asked = waiters.iter().enumerate().filter(|(index, _)| asked(*index));
        asked.all(|(_, waiter)| waiter.group.is_some() && now < waiter.until)
    }

    /// Prepares to resend the asks without an answer whose callers still wait. Callers that gave up
    /// before were told whether they may have been charged. False if nobody waits.
    pub(in crate::engine::redis) fn prepare_resend(&mut self) -> bool {
        let waiters = self.shared.waiters.lock();
        let now = Instant::now();
        let Some(latest) = self.shared.latest() else { return false };
        let unanswered = |index| latest.call_of(index).is_some_and(|(call, _)| call.answer.get().is_none());
        let waits =
            |(index, waiter): (usize, &Waiter)| waiter.group.filter(|_| now < waiter.until && unanswered(index));
        let positions = self.batch.mark_sent(waiters.iter().enumerate().map(waits));
        let waits = positions.iter().any(Option::is_some);
        let _ = latest.again.set(Box::new(Sent::new(positions, &self.batch)));
        waits
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        // For those that aren't answered: the task that sent them was dropped.
        let ended = "the call to redis was given up before it was answered";
        let _ = self.shared.failed.set(Error::new(Kind::Disconnected, ended));
        let mut waiters = std::mem::take(&mut *self.shared.waiters.lock());
        waiters.drain(..).filter_map(|waiter| waiter.waker).for_each(runtime::wake);
        self.batch.clear();
        let mut state = self.queue.state.lock();
        state.in_flight.retain(|shared| !Arc::ptr_eq(shared, &self.shared));
        if state.spare.len() < IN_FLIGHT {
            state.spare.push((std::mem::take(&mut self.batch), waiters));
        }
    }
}

impl Stage {
    /// The error for a caller whose deadline passes at this stage.
    pub(in crate::engine::redis) fn missed(self, until: Deadline) -> Error {
        match self {
            Self::Sent => until.missed(true),
            Self::Unsent => until.missed(false),
            // More specific than that there was no time for a retry.
            Self::Refused(error) => error,
        }
    }
}
