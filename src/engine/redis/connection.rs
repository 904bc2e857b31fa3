//! One connection, and the task that watches whether it still answers.
//!
//! Callers may give up at any time, so the outcome of their calls says little about Redis. Instead, a task watches the
//! connection while anything on it is unanswered. If nothing is answered for a while, it asks the connection's owner
//! what that means.

use std::fmt;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::future::{BoxFuture, Either, select};
use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::{Cmd, Pipeline, RedisError, Value};
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::credentials::Login;
use super::texts::Texts;
use super::transport::Wire;

/// How long a connection lives at least before it is replaced, and how long after a failed replacement the next one is
/// tried.
pub(super) const RENEW_AGAIN: Duration = Duration::from_secs(1);
/// How often to check whether anything was answered.
const TICK: Duration = Duration::from_millis(50);
/// A connection is suspect once silent for this long or, if that is longer, for four times as long as connecting took,
/// up to [`LONGEST_SILENCE`].
const SILENCE: Duration = Duration::from_millis(250);
const LONGEST_SILENCE: Duration = Duration::from_secs(1);
/// The cap on the extra silence while waiting for replicas, whatever wait was asked for.
const LONGEST_WAIT: Duration = Duration::from_secs(10);
/// A connection from a pool that was idle for this long is checked before use.
const IDLE: Duration = Duration::from_secs(1);
/// How often a new connection is tried while Redis is unreachable, for callers waiting on the silent one.
const AWAY: Duration = Duration::from_secs(1);

#[derive(Clone, Debug)]
pub(super) struct Connection {
    /// So that a caller that saw it break doesn't drop its successor.
    pub(super) number: u64,
    multiplexed: MultiplexedConnection,
    /// None for a connection from a pool.
    wire: Option<Arc<Wire>>,
    health: Arc<Health>,
    texts: Arc<Texts>,
}

#[derive(Debug)]
struct Health {
    owner: Weak<dyn Owner>,
    /// The runtime that drives the connection.
    runtime: Handle,
    /// How long it may be silent.
    silence: Duration,
    /// Whether a source gave the credentials: for another connection it is asked again, which may take long.
    has_source: bool,
    /// Milliseconds added to `silence` while the connection waits for replicas.
    waits: AtomicU64,
    began: Instant,
    /// When it is to be replaced, in milliseconds since it was opened; never if that is the largest number.
    due: AtomicU64,
    /// Requests sent, and the latest of them that was answered: answers come in the order of the requests.
    sent: AtomicU64,
    answered: AtomicU64,
    /// For a connection from a pool: when anything was last answered, in milliseconds since it was opened.
    heard: AtomicU64,
    /// Callers still waiting.
    waiting: AtomicUsize,
    /// When its watch last showed that it runs, in milliseconds since it was opened, plus one; 0 while there is no
    /// watch.
    last_beat: AtomicU64,
    lost: AtomicBool,
    losing: Notify,
}

/// The owner of connections, which is asked when one of them falls silent, and notified when one has ended.
pub(super) trait Owner: fmt::Debug + Send + Sync {
    /// What it means that nothing has been answered on the connection since this request; none if nobody uses it any
    /// more.
    fn diagnose<'a>(self: Arc<Self>, connection: &'a Connection, answered: u64) -> BoxFuture<'a, Option<Diagnosis>>;

    /// The connection is given up. `broke`: that was noticed by its watch.
    fn ended(self: Arc<Self>, connection: &Connection, broke: bool);
}

/// What the silence of a connection was found to mean.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Diagnosis {
    /// It answers after all, or the cause is unknown.
    Unresolved,
    /// Another connection answers.
    Dead,
    /// Nothing is answered on any connection, or no scripts run for now.
    Waits,
}

/// A request in flight.
struct Request<'a> {
    number: u64,
    health: &'a Health,
}

impl Connection {
    /// A connection to a Redis that the current runtime drives, given how long connecting took.
    pub(super) fn new(
        owner: Weak<dyn Owner>,
        number: u64,
        (multiplexed, wire): (MultiplexedConnection, Option<Arc<Wire>>),
        took: Duration,
        login: Login,
    ) -> Self {
        let began = Instant::now();
        // A source may hand out what is about to expire.
        let due = login.due.map_or(u64::MAX, |due| millis(due.saturating_duration_since(began).max(RENEW_AGAIN)));
        let health = Health {
            owner,
            runtime: Handle::current(),
            silence: SILENCE.max(took * 4).min(LONGEST_SILENCE),
            has_source: login.has_source,
            waits: AtomicU64::new(0),
            began,
            due: AtomicU64::new(due),
            sent: AtomicU64::new(0),
            answered: AtomicU64::new(0),
            heard: AtomicU64::new(0),
            waiting: AtomicUsize::new(0),
            last_beat: AtomicU64::new(0),
            lost: AtomicBool::new(false),
            losing: Notify::new(),
        };
        Self { number, multiplexed, wire, health: Arc::new(health), texts: Arc::default() }
    }

    /// The answer of each command, in one round trip.
    pub(super) async fn pipeline(&self, commands: &Pipeline, count: usize) -> Result<Vec<Value>, RedisError> {
        let mut connection = self.multiplexed.clone();
        self.answered(connection.req_packed_commands(commands, 0, count)).await
    }

    pub(super) async fn command(&self, command: &Cmd) -> Result<Value, RedisError> {
        let mut connection = self.multiplexed.clone();
        self.answered(connection.req_packed_command(command)).await?.extract_error()
    }

    /// Allows for a wait for replicas, which holds up everything sent after it.
    pub(super) fn may_wait(&self, time: Duration) {
        self.health.waits.fetch_max(millis(time.min(LONGEST_WAIT)), Ordering::Relaxed);
    }

    /// The answer, unless the connection is given up first.
    async fn answered<T>(&self, answer: impl Future<Output = Result<T, RedisError>>) -> Result<T, RedisError> {
        let request = self.request();
        let losing = pin!(self.health.losing.notified());
        if self.is_lost() {
            return Err(lost());
        }
        match select(pin!(answer), losing).await {
            Either::Left((answer, _)) => {
                // A server error is an answer as well.
                if answer.as_ref().err().is_none_or(|error| !error.is_io_error()) {
                    self.health.answered.fetch_max(request.number, Ordering::Relaxed);
                    if self.wire.is_none() {
                        self.health.heard.store(self.health.now(), Ordering::Relaxed);
                    }
                }
                answer
            }
            Either::Right(_) => Err(lost()),
        }
    }

    fn request(&self) -> Request<'_> {
        let health = &*self.health;
        health.waiting.fetch_add(1, Ordering::Relaxed);
        let number = health.sent.fetch_add(1, Ordering::SeqCst) + 1;
        if health.begins_a_watch() {
            // The caller may be polled on another runtime.
            health.runtime.spawn(self.clone().watch());
        }
        Request { number, health }
    }

    /// Ends all calls waiting on it, as if it had broken.
    pub(super) fn lose(&self) {
        self.health.lost.store(true, Ordering::Release);
        if let Some(wire) = &self.wire {
            wire.close();
        }
        self.health.losing.notify_waiters();
    }

    /// Given up, or closed by the other side.
    pub(super) fn is_lost(&self) -> bool {
        self.health.lost.load(Ordering::Acquire) || self.wire.as_ref().is_some_and(|wire| wire.is_closed())
    }

    /// Whether a call may go over it. For a connection from a pool it isn't known what was written before it broke, so
    /// one that may have been closed while idle is checked first.
    pub(super) async fn is_usable(&self) -> bool {
        let heard = Duration::from_millis(self.health.heard.load(Ordering::Relaxed));
        if self.wire.is_some() || self.health.began.elapsed().saturating_sub(heard) < IDLE {
            return true;
        }
        // Any answer will do, even a refusal. If none comes, the watch gives the connection up.
        let answer = self.command(&redis::cmd("PING")).await;
        answer.err().is_none_or(|error| !error.is_io_error())
    }

    /// Whether its credentials expire soon.
    pub(super) fn is_due(&self) -> bool {
        let due = self.health.due.load(Ordering::Relaxed);
        due != u64::MAX && self.health.now() > due
    }

    pub(super) fn due_again_after(&self, time: Duration) {
        self.health.due.store(self.health.now() + millis(time), Ordering::Relaxed);
    }

    /// The scripts' texts that were sent over it.
    pub(super) fn texts(&self) -> &Texts {
        &self.texts
    }

    /// How long it may be silent.
    pub(super) fn patience(&self) -> Duration {
        self.health.patience()
    }

    /// How long another connection may take, so that this one's silence shows whether Redis is away.
    pub(super) fn patience_for_another(&self) -> Duration {
        self.patience() + if self.health.has_source { LONGEST_SILENCE } else { Duration::ZERO }
    }

    /// The latest of its requests that was answered.
    pub(super) fn last_answered(&self) -> u64 {
        self.health.last_answered()
    }

    /// Whether callers wait for answers on it.
    pub(super) fn is_waited_for(&self) -> bool {
        self.health.waiting.load(Ordering::Relaxed) > 0
    }

    /// Bytes written so far, if they are counted.
    pub(super) fn written(&self) -> Option<u64> {
        self.wire.as_ref().map(|wire| wire.written())
    }

    /// Whether a lost connection has written nothing since this count, so that no later call can have reached the
    /// server, or will.
    pub(super) fn wrote_nothing_since(&self, written: Option<u64>) -> bool {
        let closed = |wire: &Arc<Wire>| {
            wire.close();
            wire.written()
        };
        written.is_some() && self.wire.as_ref().map(closed) == written
    }

    /// Runs while anything is unanswered.
    async fn watch(self) {
        let (health, mut broke) = (&*self.health, false);
        while !self.is_lost() {
            health.beat();
            let (began, answered) = (Instant::now(), health.last_answered());
            tokio::time::sleep(TICK).await;
            health.beat();
            if health.is_idle() {
                health.last_beat.store(0, Ordering::SeqCst);
                // A caller that sent just now may have seen this watch running.
                if health.is_idle() {
                    return;
                }
            }
            if health.last_answered() != answered {
                continue;
            }
            // Answered after all other requests, including those of callers that gave up. Any answer will do, even a
            // refusal.
            let hello = redis::cmd("HELLO");
            match tokio::time::timeout(health.patience() - TICK, self.command(&hello)).await {
                Ok(Err(error)) if error.is_io_error() => {
                    broke = true;
                    break;
                }
                Ok(_) => continue,
                Err(_) => {}
            }
            // If this runtime stalled, the silence proves nothing.
            if health.last_answered() != answered || began.elapsed() > 2 * health.patience() {
                continue;
            }
            let Some(owner) = health.owner.upgrade() else { break };
            health.beat();
            match owner.diagnose(&self, answered).await {
                None => break,
                Some(Diagnosis::Waits) => {
                    let until = Instant::now() + AWAY;
                    while Instant::now() < until {
                        tokio::time::sleep(TICK).await;
                        health.beat();
                    }
                }
                Some(_) => {}
            }
        }
        self.lose();
        if let Some(owner) = health.owner.upgrade() {
            owner.ended(&self, broke);
        }
    }
}

impl Health {
    fn last_answered(&self) -> u64 {
        self.answered.load(Ordering::Relaxed)
    }

    /// Whether everything is answered.
    fn is_idle(&self) -> bool {
        self.last_answered() >= self.sent.load(Ordering::SeqCst)
    }

    fn patience(&self) -> Duration {
        self.silence + Duration::from_millis(self.waits.load(Ordering::Relaxed))
    }

    fn beat(&self) {
        self.last_beat.store(self.now(), Ordering::SeqCst);
    }

    /// Whether the caller must start a watch: none is running, or it is on a runtime that is no longer driven.
    fn begins_a_watch(&self) -> bool {
        let (last, now) = (self.last_beat.load(Ordering::SeqCst), self.now());
        let longest = 4 * TICK + 4 * self.patience();
        let stale = u128::from(now.saturating_sub(last)) > longest.as_millis();
        (last == 0 || stale) && self.last_beat.compare_exchange(last, now, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    fn now(&self) -> u64 {
        millis(self.began.elapsed()) + 1
    }
}

/// Below the largest number.
fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX).min(u64::MAX / 2)
}

impl Drop for Request<'_> {
    fn drop(&mut self) {
        self.health.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

pub(super) fn lost() -> RedisError {
    let why = "tollgate closed it, since no answers came or they no longer matched the calls";
    std::io::Error::new(std::io::ErrorKind::ConnectionAborted, why).into()
}
