//! Who asks while others are under way leaves with those who ask meanwhile, in one pipeline of as few calls as will do.
//!
//! A caller who finds nobody under way asks at once: nothing waits for company. Others stand in line, and all who stand
//! there leave together, as soon as those tasks have run that are ready to ask as well, and fewer than two flights are
//! under way. Flights are tasks of their own, so that no caller who gives up holds up another.

use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use deadpool_redis::redis::aio::ConnectionLike;
use deadpool_redis::redis::{self, RedisError, Value};
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::{Held, How, Redis, Shared, is_noscript, of_batch, records};
use crate::batch::{Ask, Batch, Records};
use crate::error::{Error, Kind};
use crate::script::Reply;

/// Flights under way at once: while one's answer travels, the server works on another. More would only be smaller.
const FLIGHTS: usize = 2;
/// Callers in one flight.
const MOST_CALLERS: usize = 1024;

/// Who stands in line, in the order in which they came.
#[derive(Debug, Default)]
pub(super) struct Line {
    under_way: usize,
    /// Whether one of those under way has yet to take its callers.
    boarding: bool,
    waiting: Vec<Caller>,
    /// When somebody next looks for those whose deadline has passed.
    watched: Option<Instant>,
}

#[derive(Debug)]
struct Caller {
    ask: Ask,
    answer: Answer,
}

/// Where an answer goes, and until when it is of use.
#[derive(Debug)]
struct Answer {
    to: oneshot::Sender<Result<Reply, Error>>,
    until: Instant,
    deadline: Duration,
}

/// A turn to be under way. Whoever has it passes it on to those in line, in whatever way it ends.
#[derive(Debug)]
struct Turn {
    redis: Redis,
    runtime: Handle,
    /// Whether it has yet to take its callers.
    boarding: bool,
}

type Answered = oneshot::Receiver<Result<Reply, Error>>;

impl Redis {
    /// Decides this ask, alone or with others.
    pub(crate) async fn acquire(&self, ask: Ask, deadline: Duration) -> Result<Reply, Error> {
        match self.turn_or_place(ask, deadline) {
            // Boxed, so that those who stand in line, of whom there may be thousands, stay small.
            Ok((turn, ask)) => Box::pin(self.alone(turn, ask, deadline)).await,
            Err(answered) => received(answered).await,
        }
    }

    async fn alone(&self, turn: Turn, ask: Ask, deadline: Duration) -> Result<Reply, Error> {
        let batch = Batch::of_one(&ask);
        let answer = self.call(|how| of_batch(&batch, how), deadline).await;
        drop(turn);
        records(answer?, &batch)?.only(ask.script)
    }

    /// Decides all of these together, each by itself.
    pub(crate) async fn acquire_all(&self, asks: Vec<Ask>, deadline: Duration) -> Vec<Result<Reply, Error>> {
        let (answered, boards): (Vec<_>, _) = {
            let mut line = self.line();
            let answered = asks.into_iter().map(|ask| self.stand(&mut line, ask, deadline)).collect();
            (answered, line.boards())
        };
        if boards {
            self.launch(Handle::current());
        }
        let mut replies = Vec::with_capacity(answered.len());
        for one in answered {
            replies.push(received(one).await);
        }
        replies
    }

    /// A turn for this ask, or, where others are ahead, what will bring its answer.
    fn turn_or_place(&self, ask: Ask, deadline: Duration) -> Result<(Turn, Ask), Answered> {
        let (answered, boards) = {
            let mut line = self.line();
            if line.under_way == 0 {
                line.under_way = 1;
                return Ok((Turn { redis: self.clone(), runtime: Handle::current(), boarding: false }, ask));
            }
            (self.stand(&mut line, ask, deadline), line.boards())
        };
        if boards {
            self.launch(Handle::current());
        }
        Err(answered)
    }

    /// Sends off the flight that boards. Not under the line's lock: a runtime that has ended drops it at once.
    fn launch(&self, runtime: Handle) {
        runtime.spawn(Turn { redis: self.clone(), runtime: runtime.clone(), boarding: true }.fly_on());
    }

    fn stand(&self, line: &mut Line, ask: Ask, deadline: Duration) -> Answered {
        let now = Instant::now();
        let until = now + deadline;
        let (to, answered) = oneshot::channel();
        line.waiting.push(Caller { ask, answer: Answer { to, until, deadline } });
        // A watch that is late may have ended with its runtime.
        if line.watched.is_none_or(|watched| until < watched || watched < now) {
            line.watched = Some(until);
            tokio::spawn(watch(Arc::downgrade(&self.shared), until));
        }
        answered
    }

    fn line(&self) -> MutexGuard<'_, Line> {
        self.shared.line.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends these callers' asks, and gives each its answer.
    async fn fly(&self, callers: Vec<Caller>) {
        let present = callers.into_iter().filter(|caller| !caller.answer.to.is_closed());
        let (asks, mut answers): (Vec<_>, Vec<_>) = present.map(|caller| (caller.ask, Some(caller.answer))).unzip();
        let (batches, places) = Batch::of(&asks);
        let sent = AtomicBool::new(false);
        let mut flight = pin!(self.send(&batches, &sent));
        let results = loop {
            let Some(first) = answers.iter().flatten().map(|answer| answer.until).min() else { return };
            if let Ok(results) = tokio::time::timeout_at(first, &mut flight).await {
                break results;
            }
            for answer in &mut answers {
                if let Some(late) = answer.take_if(|answer| answer.until <= first) {
                    late.give_up(sent.load(Ordering::Relaxed));
                }
            }
        };
        for ((answer, ask), place) in answers.into_iter().zip(&asks).zip(places) {
            let reply = match &results[place.batch] {
                Ok(records) => records.reply(place, ask.script),
                Err(error) => Err(error.clone()),
            };
            // Who gave up meanwhile needs no answer.
            let _ = answer.map(|answer| answer.to.send(reply));
        }
    }

    /// One pipeline, and another one for what the server has no script of.
    async fn send(&self, batches: &[Batch<'_>], sent: &AtomicBool) -> Vec<Result<Records, Error>> {
        let Held { number, mut connection } = match self.connection().await {
            Ok(held) => held,
            Err(error) => return batches.iter().map(|_| Err(error.clone())).collect(),
        };
        sent.store(true, Ordering::Relaxed);
        let mut answers = pipeline(&mut connection, batches.iter(), How::ByDigest).await;
        let missing: Vec<_> = (0..batches.len()).filter(|at| answers[*at].as_ref().is_err_and(is_noscript)).collect();
        if !missing.is_empty() {
            let again = pipeline(&mut connection, missing.iter().map(|at| &batches[*at]), How::ByText).await;
            missing.into_iter().zip(again).for_each(|(at, answer)| answers[at] = answer);
        }
        let read = |(answer, batch): (Result<Value, RedisError>, _)| match answer {
            Ok(value) => records(value, batch),
            Err(error) => Err(self.told(&error, number)),
        };
        answers.into_iter().zip(batches).map(read).collect()
    }
}

/// Calls all of these in one round trip.
async fn pipeline<'a>(
    connection: &mut impl ConnectionLike,
    batches: impl ExactSizeIterator<Item = &'a Batch<'a>>,
    how: How,
) -> Vec<Result<Value, RedisError>> {
    let count = batches.len();
    let mut pipeline = redis::Pipeline::with_capacity(count);
    for batch in batches {
        pipeline.add_command(of_batch(batch, how));
    }
    match connection.req_packed_commands(&pipeline, 0, count).await {
        Ok(mut values) => {
            values.resize(count, Value::Nil);
            values.into_iter().map(Value::extract_error).collect()
        }
        Err(error) => (0..count).map(|_| Err(error.clone())).collect(),
    }
}

/// Tells those in line whose deadline passes that they were not sent. One timer for all of them: a timer each would cost
/// more than the rest of what a caller does.
async fn watch(shared: Weak<Shared>, mut at: Instant) {
    loop {
        tokio::time::sleep_until(at).await;
        let Some(shared) = shared.upgrade() else { return };
        let (late, next) = {
            let mut line = shared.line.lock().unwrap_or_else(PoisonError::into_inner);
            let (late, waiting): (Vec<_>, _) =
                std::mem::take(&mut line.waiting).into_iter().partition(|caller| caller.answer.until <= at);
            line.waiting = waiting;
            // Unless somebody with an earlier deadline came and is looked after by another watch.
            let next = line.waiting.iter().map(|caller| caller.answer.until).min().filter(|_| line.watched == Some(at));
            if line.watched == Some(at) {
                line.watched = next;
            }
            (late, next)
        };
        late.into_iter().for_each(|caller| caller.answer.give_up(false));
        match next {
            Some(next) => at = next,
            None => return,
        }
    }
}

async fn received(answered: Answered) -> Result<Reply, Error> {
    let ended = || Error::new(Kind::Disconnected, "the call to redis was given up: the runtime is shutting down");
    answered.await.unwrap_or_else(|_| Err(ended()))
}

impl Answer {
    fn give_up(self, sent: bool) {
        let _ = self.to.send(Err(Error::deadline(self.deadline, sent)));
    }
}

impl Turn {
    /// Flies as long as somebody stands in line.
    async fn fly_on(mut self) {
        loop {
            // Whoever is about to ask, as those that were just answered may be, comes along.
            tokio::task::yield_now().await;
            let callers: Vec<_> = {
                let mut line = self.redis.line();
                line.boarding = false;
                self.boarding = false;
                let leaving = line.waiting.len().min(MOST_CALLERS);
                line.waiting.drain(..leaving).collect()
            };
            if callers.is_empty() {
                return;
            }
            self.redis.fly(callers).await;
            self.redis.line().boarding = true;
            self.boarding = true;
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let (boards, stranded) = {
            let mut line = self.redis.line();
            line.under_way -= 1;
            line.boarding &= !self.boarding;
            // Its runtime has ended before it could leave, and another flight would get no further.
            let stranded = if self.boarding { std::mem::take(&mut line.waiting) } else { Vec::new() };
            (line.boards(), stranded)
        };
        drop(stranded);
        if boards {
            self.redis.launch(self.runtime.clone());
        }
    }
}

impl Line {
    /// Whether a flight is to be launched for those in line: none boards yet, and another may be under way.
    fn boards(&mut self) -> bool {
        let boards = self.under_way < FLIGHTS && !self.boarding && !self.waiting.is_empty();
        self.under_way += usize::from(boards);
        self.boarding |= boards;
        boards
    }
}
