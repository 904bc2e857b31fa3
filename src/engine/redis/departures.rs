//! Who asks while others are under way leaves with those who ask meanwhile, in one pipeline of as few calls as will do.
//!
//! A caller who finds nobody under way asks at once: nothing waits for company. Others stand in line, and all who stand
//! there leave together, as soon as those tasks have run that are ready to ask as well, and fewer than two flights are
//! under way. Flights are tasks of their own, so that no caller who gives up holds up another.

use std::collections::VecDeque;
use std::pin::pin;
use std::sync::{Arc, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use futures_util::future::{Either, join_all, select};
use tokio::runtime::Handle;
use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;

use super::errors::Called;
use super::local::Local;
use super::sending::{Guest, of_batch};
use super::{Redis, records};
use crate::batch::{Ask, Batch};
use crate::error::{Error, Kind};
use crate::script::Reply;

/// Flights under way at once: while one's answer travels, the server works on another. More would only be smaller.
const FLIGHTS: usize = 2;
/// Callers in one flight.
const MOST_CALLERS: usize = 1024;
/// How late somebody may be told of a deadline. All whose deadlines lie as close are told at once, since to look at each
/// by itself would take the square of their number.
pub(super) const GRAIN: Duration = Duration::from_millis(1);
/// A deadline beyond this is as good as none, and an instant so far ahead can be told.
pub(in crate::engine) const LONGEST_DEADLINE: Duration = Duration::from_secs(365 * 86_400);

/// Who stands in line, in the order in which they came.
#[derive(Debug, Default)]
pub(super) struct Line {
    under_way: usize,
    /// How often those under way were given up: they no longer count.
    forsaken: u64,
    /// Whether one of those under way has yet to take its callers.
    boarding: bool,
    waiting: VecDeque<Caller>,
    /// When somebody next looks for those whose deadline has passed.
    watched: Option<Instant>,
}

#[derive(Debug)]
pub(super) struct Caller {
    pub(super) ask: Ask,
    pub(super) answer: Answer,
}

/// Where an answer goes, and until when it is of use.
#[derive(Debug)]
pub(super) struct Answer {
    to: oneshot::Sender<Result<Reply, Error>>,
    pub(super) until: Instant,
    deadline: Duration,
}

/// How an ask is decided.
#[derive(Debug)]
enum Place {
    /// At once, on its own.
    Alone(Ask, Turn),
    InLine(Answered),
}

/// A turn to be under way. Whoever has it passes it on to those in line, in whatever way it ends.
#[derive(Debug)]
struct Turn {
    redis: Redis,
    local: Arc<Local>,
    runtime: Handle,
    /// The line's, as it began.
    forsaken: u64,
    /// Whether it has yet to take its callers.
    boarding: bool,
}

type Answered = oneshot::Receiver<Result<Reply, Error>>;

impl Redis {
    /// Decides this ask, alone or with others.
    pub(crate) async fn acquire(&self, ask: Ask, deadline: Duration) -> Result<Reply, Error> {
        let local = self.local()?;
        let _entry = local.guard.enter()?;
        match self.place(&local, ask, deadline) {
            // Boxed, so that those who stand in line, of whom there may be thousands, stay small.
            Place::Alone(ask, turn) => Box::pin(self.alone(ask, turn, deadline)).await,
            Place::InLine(answered) => received(answered).await,
        }
    }

    async fn alone(&self, ask: Ask, turn: Turn, deadline: Duration) -> Result<Reply, Error> {
        let answer = self.alone_as(&turn.local, Guest::No, &ask, deadline).await;
        drop(turn);
        answer
    }

    async fn alone_as(&self, local: &Arc<Local>, guest: Guest, ask: &Ask, deadline: Duration) -> Result<Reply, Error> {
        let batch = Batch::of_one(ask);
        let confirm = self.confirms(deadline).filter(|_| ask.cost > 0);
        let called = Called::of_batch(&batch);
        let (value, lacking) = self.call(local, guest, confirm, called, |how| of_batch(&batch, how), deadline).await?;
        records(value, &batch)?.only(ask.script)?.unless(lacking)
    }

    /// Decides this ask by a call of its own.
    pub(in crate::engine) async fn acquire_apart(
        &self,
        guest: Guest,
        ask: &Ask,
        deadline: Duration,
    ) -> Result<Reply, Error> {
        let local = self.local()?;
        let _entry = local.guard.enter()?;
        self.alone_as(&local, guest, ask, deadline).await
    }

    /// Decides all of these together, each by itself and by its deadline.
    pub(crate) async fn acquire_all(&self, asks: Vec<(Ask, Duration)>) -> Vec<Result<Reply, Error>> {
        if asks.is_empty() {
            return Vec::new();
        }
        let all = |error: &Error| asks.iter().map(|_| Err(error.clone())).collect();
        let local = match self.local() {
            Ok(local) => local,
            Err(error) => return all(&error),
        };
        let _entry = match local.guard.enter() {
            Ok(entry) => entry,
            Err(error) => return all(&error),
        };
        let (answers, boards): (Vec<_>, _) = {
            let mut line = local.line();
            let stand = |(ask, deadline)| {
                let (caller, answered) = Caller::new(ask, deadline);
                local.stand(&mut line, caller);
                answered
            };
            (asks.into_iter().map(stand).collect(), line.boards().then_some(line.forsaken))
        };
        if let Some(forsaken) = boards {
            self.launch(Arc::clone(&local), Handle::current(), forsaken);
        }
        join_all(answers.into_iter().map(received)).await
    }

    /// Whether this ask may go at once, or its place in line.
    fn place(&self, local: &Arc<Local>, ask: Ask, deadline: Duration) -> Place {
        // Before the lock, which others wait for.
        let (caller, answered) = Caller::new(ask, deadline);
        let boards = {
            let mut line = local.line();
            if line.under_way == 0 {
                line.under_way = 1;
                let (redis, runtime, forsaken) = (self.clone(), Handle::current(), line.forsaken);
                let local = Arc::clone(local);
                return Place::Alone(caller.ask, Turn { redis, local, runtime, forsaken, boarding: false });
            }
            local.stand(&mut line, caller);
            line.boards().then_some(line.forsaken)
        };
        if let Some(forsaken) = boards {
            self.launch(Arc::clone(local), Handle::current(), forsaken);
        }
        Place::InLine(answered)
    }

    /// Sends off the flight that boards. Not under the line's lock: a runtime that has ended drops it at once.
    fn launch(&self, local: Arc<Local>, runtime: Handle, forsaken: u64) {
        let redis = self.clone();
        runtime.spawn(Turn { redis, local, runtime: runtime.clone(), forsaken, boarding: true }.fly_on());
    }
}

impl Local {
    /// Gives up those under way, whose connection has fallen silent, so that they hold up nobody else; and tells those in
    /// line, who would have to wait for the breaker.
    pub(super) fn forsake(&self, unsent: &Error) {
        let waiting = {
            let mut line = self.line();
            line.forsaken += 1;
            (line.under_way, line.boarding) = (0, false);
            std::mem::take(&mut line.waiting)
        };
        waiting.into_iter().for_each(|caller| caller.answer.tell(Err(unsent.clone())));
    }

    fn stand(self: &Arc<Self>, line: &mut Line, caller: Caller) {
        let until = caller.answer.until;
        line.waiting.push_back(caller);
        if line.watched.is_none_or(|watched| until < watched) {
            match line.watched.replace(until) {
                None => _ = tokio::spawn(watch(Arc::downgrade(self), Arc::clone(&self.earlier))),
                Some(_) => self.earlier.notify_one(),
            }
        }
    }

    fn line(&self) -> MutexGuard<'_, Line> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Tells those in line whose deadline passes that they were not sent. One timer for all of them: a timer each would cost
/// more than the rest of what a caller does.
async fn watch(local: Weak<Local>, earlier: Arc<Notify>) {
    loop {
        let at = local.upgrade().and_then(|local| local.line().watched);
        let Some(at) = at else { return };
        if let Either::Right(_) = select(pin!(tokio::time::sleep_until(at + GRAIN)), pin!(earlier.notified())).await {
            continue;
        }
        let Some(local) = local.upgrade() else { return };
        let (late, over) = {
            let mut line = local.line();
            let now = Instant::now();
            let (late, waiting): (VecDeque<_>, _) =
                std::mem::take(&mut line.waiting).into_iter().partition(|caller| caller.answer.until <= now);
            line.waiting = waiting;
            line.watched = line.waiting.iter().map(|caller| caller.answer.until).min();
            (late, line.watched.is_none())
        };
        late.into_iter().for_each(|caller| caller.answer.give_up(false));
        if over {
            // Whoever stands in line from now on begins another watch.
            return;
        }
    }
}

async fn received(answered: Answered) -> Result<Reply, Error> {
    let ended = || Error::new(Kind::Disconnected, "the call to redis was given up before its answer");
    answered.await.unwrap_or_else(|_| Err(ended()))
}

impl Caller {
    fn new(ask: Ask, deadline: Duration) -> (Self, Answered) {
        let until = Instant::now() + deadline.min(LONGEST_DEADLINE);
        let (to, answered) = oneshot::channel();
        (Self { ask, answer: Answer { to, until, deadline } }, answered)
    }
}

impl Answer {
    pub(super) fn tell(self, reply: Result<Reply, Error>) {
        // Who gave up meanwhile needs no answer.
        let _ = self.to.send(reply);
    }

    /// Whether nobody waits for it any more.
    pub(super) fn is_unwanted(&self) -> bool {
        self.to.is_closed()
    }

    pub(super) fn late(&self, sent: bool) -> Error {
        Error::deadline(self.deadline, sent)
    }

    pub(super) fn give_up(self, sent: bool) {
        let late = self.late(sent);
        self.tell(Err(late));
    }
}

impl Turn {
    /// Flies as long as somebody stands in line.
    async fn fly_on(mut self) {
        loop {
            // Whoever is about to ask, as those that were just answered may be, comes along.
            tokio::task::yield_now().await;
            let callers = {
                let mut line = self.local.line();
                if line.forsaken != self.forsaken {
                    return;
                }
                line.boarding = false;
                self.boarding = false;
                line.leave()
            };
            if callers.is_empty() {
                return;
            }
            self.redis.fly(&self.local, callers).await;
            let mut line = self.local.line();
            if line.forsaken != self.forsaken {
                return;
            }
            line.boarding = true;
            drop(line);
            self.boarding = true;
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let (boards, stranded) = {
            let mut line = self.local.line();
            if line.forsaken != self.forsaken {
                return;
            }
            line.under_way -= 1;
            line.boarding &= !self.boarding;
            // Its runtime has ended before it could leave, and another flight would get no further.
            let stranded = if self.boarding { std::mem::take(&mut line.waiting) } else { VecDeque::new() };
            (line.boards(), stranded)
        };
        for caller in stranded {
            caller.answer.tell(Err(Error::new(Kind::Unreachable, "redis was not asked: the runtime is shutting down")));
        }
        if boards {
            self.redis.launch(Arc::clone(&self.local), self.runtime.clone(), self.forsaken);
        }
    }
}

impl Line {
    /// As many as one flight takes.
    fn leave(&mut self) -> Vec<Caller> {
        let leaving = self.waiting.len().min(MOST_CALLERS);
        self.waiting.drain(..leaving).collect()
    }

    /// Whether a flight is to be launched for those in line: none boards yet, and another may be under way.
    fn boards(&mut self) -> bool {
        let boards = self.under_way < FLIGHTS && !self.boarding && !self.waiting.is_empty();
        self.under_way += usize::from(boards);
        self.boarding |= boards;
        boards
    }
}
