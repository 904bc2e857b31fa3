//! A lone call is sent at once; concurrent calls are queued and sent together, in one pipeline of as few script calls
//! as possible.
//!
//! Callers that arrive while a call is in flight join the batch that is being filled, and share its answer. A caller
//! that gives up before the batch is sent is taken out of it. One that gives up later changes nothing for the others,
//! and each keeps its own deadline.

mod in_flight;
mod machine;
#[cfg(test)]
mod tests;
mod watch;

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::batch::{Batch, Hashes, MOST_WEIGHT};
use crate::call::{Ask, Reply};
use crate::engine::deadline::Deadline;
use crate::error::{Error, Kind};
use crate::lock::Lock;
use crate::runtime::{self, Timer};
use in_flight::{BatchState, Sent, Waiter};
pub(super) use in_flight::{InFlight, Stage};
use machine::{Action, Event, Machine};
use watch::WatchEnds;

/// Callers in one batch; bounded so that a batch whose callers have all given up is soon freed.
const MOST_WAITERS: usize = 16_384;

/// The calls of one runtime to one Redis.
#[derive(Debug)]
pub(super) struct Queue {
    /// Runs the watch.
    runtime: Handle,
    state: Lock<State>,
    /// Wakes the deadline watch: there is an earlier deadline, or the queue is being dropped.
    earlier: Arc<Notify>,
}

#[derive(Debug, Default)]
struct State {
    /// Batches waiting to be sent, by lane. The last one of each lane takes new entries.
    lanes: [VecDeque<Filling>; 3],
    /// The lane whose turn is next, if anything waits in it.
    turn: usize,
    /// How many batches there were so far.
    begun: u64,
    /// Batches awaiting answers, including those given up.
    in_flight: Vec<Arc<BatchState>>,
    /// Decides which task sends them.
    machine: Machine,
    /// Memory of earlier batches, for reuse.
    spare: Vec<(Batch, Vec<Waiter>)>,
}

/// A batch that isn't sent yet.
#[derive(Debug)]
struct Filling {
    batch: Batch,
    waiters: Vec<Waiter>,
    /// Callers that haven't given up.
    waiting: usize,
    /// No caller in it has an earlier deadline.
    earliest: Option<Instant>,
    shared: Arc<BatchState>,
}

/// Lanes take turns, so that nobody waits for more than one batch of each other kind.
#[derive(Clone, Copy, Debug)]
enum Lane {
    /// Plain acquires of one limit, each with a caller of its own.
    Plain,
    /// Other calls with a caller of their own, which take Redis longer.
    Other,
    /// Acquires of callers that make many at once.
    Many,
}

/// Waits for the answer of a batch.
#[derive(Debug)]
pub(crate) struct Waiting {
    shared: Arc<BatchState>,
    index: usize,
    until: Deadline,
    /// Whether the caller's waker was registered on entering. The first poll, which follows in the same poll of its
    /// task, then has nothing to do.
    registered: bool,
    /// Its own timer where another runtime polls it: the one whose watch wakes it may be blocked.
    elsewhere: Option<Box<Timer>>,
    ended: bool,
}

/// The tasks to start for callers just queued, once the lock is released: a runtime that has ended drops a new task at
/// once, and a task that is dropped takes the lock.
#[derive(Debug, Default)]
#[must_use]
pub(super) struct ToBegin {
    watch: bool,
    /// The generation in which to send what waits.
    pub(super) dispatch: Option<u64>,
}

/// The result of entering the queue.
#[derive(Debug)]
pub(super) enum Entered {
    /// No other call is in flight, in this generation.
    Alone(u64),
    Queued(Waiting, ToBegin),
}

impl Queue {
    pub(super) fn new(runtime: &Handle) -> Arc<Self> {
        Arc::new(Self { runtime: runtime.clone(), state: Lock::default(), earlier: Arc::default() })
    }

    /// Enters with this: alone, or queued to be woken when there is an answer.
    pub(super) fn enter(self: &Arc<Self>, ask: &Ask<'_>, until: Deadline, waker: &Waker) -> Entered {
        let (hashes, waker) = (ask.hashes(), waker.clone());
        let lane = if ask.is_plain() { Lane::Plain } else { Lane::Other };
        let mut state = self.state.lock();
        if let Action::SendOwn(generation) = state.machine.on(Event::Entered) {
            return Entered::Alone(generation);
        }
        let waiter = Waiter { waker: Some(waker), until: until.at, group: None };
        let (shared, index) = state.add(self, ask, &hashes, waiter, lane);
        let begin = ToBegin { watch: self.claim_watch(&mut state, until.at), dispatch: state.dispatch(Event::Queued) };
        drop(state);
        Entered::Queued(Waiting::new(shared, index, until, true), begin)
    }

    /// Enters with the many asks of one caller, which waits for one after another.
    pub(super) fn enter_all<'r>(
        self: &Arc<Self>,
        asks: impl Iterator<Item = (Ask<'r>, Deadline)>,
    ) -> (Vec<Waiting>, ToBegin) {
        let mut waiting = Vec::with_capacity(asks.size_hint().1.unwrap_or_default());
        for (ask, until) in asks {
            let (hashes, waiter) = (ask.hashes(), Waiter { waker: None, until: until.at, group: None });
            // Releases the lock in between, so that others get their turn.
            let (shared, index) = self.state.lock().add(self, &ask, &hashes, waiter, Lane::Many);
            waiting.push(Waiting::new(shared, index, until, false));
        }
        let mut state = self.state.lock();
        let dispatch = if state.waits() { state.dispatch(Event::Queued) } else { None };
        (waiting, ToBegin { watch: false, dispatch })
    }

    /// What to send next: one batch, or several that count as one; none if nothing waits, or a newer generation sends
    /// it. Also the generation in which to send another batch at the same time, if more waits.
    pub(super) fn next(&self, generation: u64) -> Option<(Vec<InFlight<'_>>, Option<u64>)> {
        let mut state = self.state.lock();
        let waits = state.waits();
        if state.machine.on(Event::Connected { generation, waits }) != Action::SendNext {
            return None;
        }
        let taken = state.take_next();
        // From now on they are found in `in_flight`.
        let own: Vec<_> = taken.iter().map(|filling| Arc::clone(&filling.shared)).collect();
        let waiters: Vec<_> = own.iter().map(|shared| shared.waiters.lock()).collect();
        state.in_flight.extend(own.iter().cloned());
        let waits = state.waits();
        let more = state.dispatch(Event::Taken { waits });
        drop(state);
        let now = Instant::now();
        let batches = taken.into_iter().zip(waiters).map(|(filling, mut in_flight)| {
            let Filling { mut batch, waiters, shared, .. } = filling;
            // A caller whose deadline has just passed isn't sent.
            let positions = batch.mark_sent(waiters.iter().map(|waiter| waiter.group.filter(|_| now < waiter.until)));
            let last = waiters.iter().filter(|waiter| waiter.group.is_some()).map(|waiter| waiter.until).max();
            *in_flight = waiters;
            let _ = shared.sent.set(Sent::new(positions, &batch));
            drop(in_flight);
            InFlight { batch, last: last.unwrap_or(now), shared, queue: self }
        });
        Some((batches.collect(), more))
    }

    /// Whether a batch of this generation waits to be sent. If none does, the caller is no longer responsible for those
    /// to come.
    pub(super) fn keep_dispatch(&self, generation: u64) -> bool {
        let mut state = self.state.lock();
        let waits = state.waits();
        state.machine.on(Event::Looked { generation, waits }) == Action::GoOn
    }

    /// Makes the caller, whose batch is done, responsible for those that wait. False if a newer generation sends them.
    pub(super) fn resume_dispatch(&self, generation: u64) -> bool {
        self.state.lock().machine.on(Event::Sent { generation }) == Action::GoOn
    }

    /// Ends one of the dispatches; returns the generation of another to start, if there is work for one. `stranded`:
    /// the batches that wait can't be sent any more, since the runtime is shutting down.
    pub(super) fn leave(&self, generation: u64, stranded: bool) -> Option<u64> {
        if stranded {
            let error = Error::new(Kind::Unreachable, "the call to redis was not sent: the runtime is shutting down");
            self.fail_waiting(Event::Stranded { generation }, &error);
            return None;
        }
        let mut state = self.state.lock();
        let waits = state.waits();
        state.dispatch(Event::Left { generation, waits })
    }

    /// Fails all callers waiting to be sent, since there is no connection.
    pub(super) fn unconnected(&self, generation: u64, error: &Error) {
        self.fail_waiting(Event::Unconnected { generation }, error);
    }

    /// Gives up the batches in flight, whose connection has fallen silent, so that they hold up no others; and fails
    /// the callers waiting to be sent, which would have to wait for the breaker.
    pub(super) fn abandon(&self, unsent: &Error) {
        self.fail_waiting(Event::Abandoned, unsent);
    }

    fn fail_waiting(&self, event: Event, error: &Error) {
        let failed = {
            let mut state = self.state.lock();
            match state.machine.on(event) {
                Action::FailWaiting => state.take_waiting(error),
                _ => return,
            }
        };
        failed.into_iter().for_each(Filling::wake);
    }

    /// Ensures that a caller with this deadline is woken. Returns whether a watch must be started for that.
    fn claim_watch(&self, state: &mut State, until: Instant) -> bool {
        match state.machine.on(Event::Waits(until)) {
            Action::StartWatch => return true,
            Action::WakeWatch => self.earlier.notify_one(),
            _ => {}
        }
        false
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.earlier.notify_one();
    }
}

impl ToBegin {
    pub(super) fn begin_watch(&self, queue: &Arc<Queue>) {
        if self.watch {
            let mut ends = WatchEnds::of(queue);
            let earlier = Arc::clone(&queue.earlier);
            // The caller may be polled on another runtime.
            queue.runtime.spawn(async move { ends.watch(&earlier).await });
        }
    }
}

impl State {
    fn add(
        &mut self,
        queue: &Arc<Queue>,
        ask: &Ask<'_>,
        hashes: &Hashes,
        waiter: Waiter,
        lane: Lane,
    ) -> (Arc<BatchState>, usize) {
        let lane = &mut self.lanes[lane as usize];
        let is_full = |last: &Filling| last.waiters.len() >= MOST_WAITERS || !last.batch.has_room(ask, hashes);
        if lane.back().is_none_or(is_full) {
            let (batch, waiters) = self.spare.pop().unwrap_or_default();
            self.begun += 1;
            let shared = BatchState::of(queue, self.begun);
            lane.push_back(Filling { batch, waiters, waiting: 0, earliest: None, shared });
        }
        let last = lane.len() - 1;
        let Filling { batch, waiters, waiting, earliest, shared } = &mut lane[last];
        let group = batch.add(ask, hashes);
        *waiting += 1;
        *earliest = earlier_of(*earliest, waiter.waker.is_some().then_some(waiter.until));
        waiters.push(Waiter { group: Some(group), ..waiter });
        (Arc::clone(shared), waiters.len() - 1)
    }

    /// Whether anything waits to be sent.
    fn waits(&self) -> bool {
        self.lanes.iter().any(|lane| !lane.is_empty())
    }

    /// The batch to send next: that of the lane whose turn it is, or of the next one in which something waits. Also
    /// those behind it, as far as they fit into it: if most of their callers have given up, those still waiting must
    /// not wait for each of these batches.
    fn take_next(&mut self) -> Vec<Filling> {
        let mut turns = (0..self.lanes.len()).map(|step| (self.turn + step) % self.lanes.len());
        let Some(lane) = turns.find(|lane| !self.lanes[*lane].is_empty()) else { return Vec::new() };
        self.turn = (lane + 1) % self.lanes.len();
        let (mut weight, mut callers, lane) = (0, 0, &mut self.lanes[lane]);
        let fit = lane.iter().take_while(|filling| {
            weight += filling.batch.weight();
            callers += filling.waiting;
            weight <= MOST_WEIGHT && callers <= MOST_WAITERS
        });
        let count = fit.count().max(1);
        lane.drain(..count).collect()
    }

    /// The generation in which to start a dispatch after this event, if one is needed.
    fn dispatch(&mut self, event: Event) -> Option<u64> {
        match self.machine.on(event) {
            Action::StartDispatch(generation) => Some(generation),
            _ => None,
        }
    }

    /// The lane of this batch and its index there, if it isn't sent yet.
    fn filling_of(&self, shared: &Arc<BatchState>) -> Option<(usize, usize)> {
        // In the order of their numbers, since thousands of batches may wait.
        let at = |lane: &VecDeque<Filling>| lane.binary_search_by_key(&shared.number, |filling| filling.shared.number);
        self.lanes.iter().enumerate().find_map(|(lane, batches)| Some((lane, at(batches).ok()?)))
    }

    /// Takes out all callers waiting to be sent. They are marked under the lock, so that a caller that registers later
    /// sees it.
    fn take_waiting(&mut self, error: &Error) -> Vec<Filling> {
        let filling: Vec<_> = std::mem::take(&mut self.lanes).into_iter().flatten().collect();
        filling.iter().for_each(|filling| _ = filling.shared.failed.set(error.clone()));
        filling
    }
}

impl Waiting {
    fn new(shared: Arc<BatchState>, index: usize, until: Deadline, registered: bool) -> Self {
        Self { shared, index, until, registered, elsewhere: None, ended: false }
    }

    pub(crate) fn until(&self) -> Deadline {
        self.until
    }

    /// Registers to be woken at an answer or at the deadline. False if either is already there.
    fn register(&self, waker: &Waker) -> bool {
        let (queue, waker) = (&self.shared.queue, waker.clone());
        let mut state = queue.state.lock();
        // Dropped once no lock is held: a waker may own its task.
        let before;
        if let Some((lane, at)) = state.filling_of(&self.shared) {
            let Filling { waiters, earliest, .. } = &mut state.lanes[lane][at];
            before = waiters[self.index].waker.replace(waker);
            *earliest = earlier_of(*earliest, Some(self.until.at));
        } else {
            drop(state);
            before = self.shared.waiters.lock().get_mut(self.index).and_then(|waiter| waiter.waker.replace(waker));
            state = queue.state.lock();
        }
        // After registering: a watch that has just ended didn't see this caller.
        let begin = ToBegin { watch: queue.claim_watch(&mut state, self.until.at), dispatch: None };
        drop(state);
        drop(before);
        begin.begin_watch(queue);
        // It may have been answered meanwhile, or left out of the batch that was sent, for which nothing wakes it.
        self.shared.answer(self.index).is_none() && Instant::now() < self.until.at
    }

    /// Whether its deadline has passed, if another runtime polls it.
    fn is_late_elsewhere(&mut self, context: &mut Context<'_>) -> bool {
        let home = self.shared.queue.runtime.id();
        if runtime::current().is_ok_and(|here| here.id() != home) {
            let timer = self.elsewhere.get_or_insert_with(|| Box::new(Timer::until(self.until.at)));
            return timer.poll(context).is_ready() && self.until.at <= Instant::now();
        }
        false
    }

    /// Takes the caller out of its batch if that isn't sent yet. Returns how far the call has come.
    fn give_up(&mut self) -> Stage {
        self.ended = true;
        let mut state = self.shared.queue.state.lock();
        if let Some((lane, at)) = state.filling_of(&self.shared) {
            let Filling { batch, waiters, waiting, .. } = &mut state.lanes[lane][at];
            let waiter = &mut waiters[self.index];
            let waker = waiter.waker.take();
            if let Some(group) = waiter.group.take() {
                *waiting -= 1;
                batch.give_up(group);
            }
            // Batches that nobody waits for would pile up while Redis pauses.
            let forgotten = if *waiting == 0 { state.lanes[lane].remove(at) } else { None };
            drop(state);
            drop((waker, forgotten));
            return Stage::Unsent;
        }
        drop(state);
        let waker = self.shared.waiters.lock().get_mut(self.index).and_then(|waiter| {
            waiter.group = None;
            waiter.waker.take()
        });
        drop(waker);
        self.shared.stage(self.index)
    }
}

impl Future for Waiting {
    type Output = Result<Reply, Error>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if std::mem::take(&mut self.registered) {
            return Poll::Pending;
        }
        loop {
            if let Some(answer) = self.shared.answer(self.index) {
                self.ended = true;
                return Poll::Ready(answer);
            }
            if self.until.at <= Instant::now() {
                let until = self.until;
                return Poll::Ready(Err(self.give_up().missed(until)));
            }
            if self.register(context.waker()) && !self.is_late_elsewhere(context) {
                return Poll::Pending;
            }
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if !self.ended {
            self.give_up();
        }
    }
}

/// The earlier of the two, if there are any.
fn earlier_of(one: Option<Instant>, other: Option<Instant>) -> Option<Instant> {
    one.into_iter().chain(other).min()
}

impl Filling {
    fn wake(self) {
        self.waiters.into_iter().filter_map(|waiter| waiter.waker).for_each(runtime::wake);
    }
}
