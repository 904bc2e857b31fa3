//! What the callers of one tokio runtime share.
//!
//! A connection is driven by the runtime that made it. If several runtimes shared one, it would stall whenever that
//! runtime is blocked, isn't driven, or has ended. And what one runtime can't reach, another may be connected to.

use std::sync::{Arc, PoisonError, RwLock, RwLockWriteGuard};
use std::time::Duration;

use arc_swap::ArcSwap;
use redis::{RedisError, ServerErrorKind, Value};
use tokio::runtime::Handle;
use tokio::sync::{Notify, oneshot};
use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::breaker::{BreakerState, CircuitBreaker};
use super::connection::{Connection, lost};
use super::errors::{Called, from_call};
use super::pipeline::Answers;
use super::queue::Queue;
use super::writing::Writing;
use crate::error::{Error, ErrorKind};
use crate::runtime;
use crate::single_flight::SingleFlight;

#[derive(Debug)]
pub(super) struct PerRuntime {
    pub(super) runtime: Handle,
    current: RwLock<Option<Connection>>,
    /// One attempt to connect at a time, however many callers wait for it.
    pub(super) connecting: Arc<SingleFlight>,
    pub(super) queue: Arc<Queue>,
    pub(super) breaker: Arc<CircuitBreaker>,
    pub(super) writing: Writing,
    /// A task that lives as long as both the runtime and this.
    lifetime: AbortHandle,
    dropped: Arc<Notify>,
}

/// Dropped as the runtime ends.
struct RuntimeEnds {
    breaker: Arc<CircuitBreaker>,
}

/// Those of one Redis.
#[derive(Default)]
pub(super) struct Runtimes {
    /// Read by every call, so lock-free.
    all: ArcSwap<Vec<Arc<PerRuntime>>>,
}

impl Runtimes {
    /// Calls this with the state of the runtime that this is called on, without cloning the Arc, whose count all
    /// threads would contend for.
    pub(super) fn with_current<T>(&self, with: impl FnOnce(&Arc<PerRuntime>) -> T) -> Result<T, Error> {
        let runtime = runtime::current()?;
        if let Some(per_runtime) = of_runtime(&self.all.load(), &runtime) {
            return Ok(with(per_runtime));
        }
        let runtime = runtime::with_timers()?;
        let made = Arc::new(PerRuntime::of(&runtime));
        self.all.rcu(|runtimes| {
            let living = runtimes.iter().filter(|per_runtime| !per_runtime.lifetime.is_finished());
            let mut runtimes: Vec<_> = living.cloned().collect();
            // Another thread of the runtime may have been faster.
            if of_runtime(&runtimes, &runtime).is_none() {
                runtimes.push(Arc::clone(&made));
            }
            runtimes
        });
        let runtimes = self.all.load();
        Ok(with(of_runtime(&runtimes, &runtime).unwrap_or(&made)))
    }

    /// Those of runtimes that haven't ended.
    pub(super) fn living(&self) -> Vec<Arc<PerRuntime>> {
        self.all.load().iter().filter(|per_runtime| !per_runtime.lifetime.is_finished()).cloned().collect()
    }
}

fn of_runtime<'a>(runtimes: &'a [Arc<PerRuntime>], runtime: &Handle) -> Option<&'a Arc<PerRuntime>> {
    runtimes.iter().find(|per_runtime| per_runtime.runtime.id() == runtime.id())
}

impl PerRuntime {
    fn of(runtime: &Handle) -> Self {
        let dropped = Arc::new(Notify::new());
        let until = Arc::clone(&dropped);
        let (current, queue, breaker) = (RwLock::default(), Queue::new(runtime), Arc::default());
        let ends = RuntimeEnds { breaker: Arc::clone(&breaker) };
        let lifetime = async move {
            let _ends = ends;
            until.notified().await;
        };
        let lifetime = runtime.spawn(lifetime).abort_handle();
        let connecting = Arc::default();
        let (runtime, writing) = (runtime.clone(), Writing::default());
        Self { runtime, current, connecting, queue, breaker, writing, lifetime, dropped }
    }

    /// Sleeps on whichever runtime polls the caller; outside a runtime, no longer than this one lives.
    pub(super) async fn sleep(&self, time: Duration) {
        let _ = runtime::sleep_by(&self.runtime, Instant::now() + time).await;
    }

    /// The connection, unless the other side has closed it, as some do when it is idle.
    pub(super) fn current_connection(&self) -> Option<Connection> {
        let held = self.current.read().unwrap_or_else(PoisonError::into_inner).clone();
        held.filter(|connection| !connection.is_lost())
    }

    pub(super) fn set_connection(&self, connection: Connection) {
        *self.current_mut() = Some(connection);
    }

    pub(super) fn is_current(&self, connection: &Connection) -> bool {
        self.current_connection().is_some_and(|held| held.number == connection.number)
    }

    /// Whether it was the current connection.
    pub(super) fn drop_connection(&self, number: u64) -> bool {
        self.current_mut().take_if(|held| held.number == number).is_some()
    }

    /// Replaces the connection, unless that has already happened.
    pub(super) fn replace(&self, connection: &Connection, by: Connection) {
        let mut current = self.current_mut();
        if current.as_ref().is_none_or(|held| held.number == connection.number) {
            *current = Some(by);
        }
    }

    pub(super) fn current_mut(&self) -> RwLockWriteGuard<'_, Option<Connection>> {
        self.current.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PerRuntime {
    /// Notes how calls that were sent together ended: with answers, or with an error. Connections that can't be made,
    /// that break or that fall silent are reported where that is noticed, once each; and a missed deadline says more
    /// about its caller than about Redis.
    pub(super) fn report_outcome(&self, error: Option<&Error>) {
        match error {
            Some(error) if error.kind() == ErrorKind::Disconnected => {}
            Some(error) if error.is_outage() => self.report_failure(error),
            _ => self.breaker.answered(),
        }
    }

    /// Sends this over the connection in a task of its own, while earlier calls have failed: the answer counts even if
    /// its caller has given up by then. Otherwise callers with deadlines below a round trip would keep the breaker open
    /// for all, since most probes are theirs.
    pub(super) async fn send_in_task<F>(
        self: &Arc<Self>,
        connection: &Connection,
        count: usize,
        send: impl FnOnce(Connection) -> F,
    ) -> Answers
    where
        F: Future<Output = Answers> + Send + 'static,
    {
        let (tell, told) = oneshot::channel();
        let (this, number, sending) = (Arc::clone(self), connection.number, send(connection.clone()));
        self.runtime.spawn(async move {
            if let Err((answers, _)) = tell.send(sending.await) {
                this.report_unheard(&answers, number);
            }
        });
        // If the runtime has ended, so has the connection.
        told.await.unwrap_or_else(|_| ((0..count).map(|_| Err(lost())).collect(), None))
    }

    fn report_unheard(&self, answers: &[Result<Value, RedisError>], number: u64) {
        let (mut answered, mut failed) = (false, None);
        for answer in answers {
            match answer.as_ref().map_err(|error| self.interpret(error, None, number)) {
                Err(error) if error.is_outage() => failed = Some(error),
                _ => answered = true,
            }
        }
        self.report_outcome(failed.filter(|_| !answered).as_ref());
    }

    /// An attempt failed, on behalf of all callers that share it.
    pub(super) fn report_failure(&self, error: &Error) {
        if error.is_outage() && !error.is_unsent() {
            self.stop_asking(self.breaker.failed(error));
        }
    }

    /// Nothing is answered on a connection, while another one is answered.
    pub(super) fn report_silence(&self, error: &Error) {
        match self.breaker.current() {
            BreakerState::Closed => self.report_failure(error),
            BreakerState::Open(_) | BreakerState::Probing => self.breaker.answered(),
        }
    }

    /// Nothing is answered on any connection.
    pub(super) fn report_away(&self, error: &Error) {
        self.stop_asking(self.breaker.away(error));
    }

    /// If the breaker opened: gives up the connection, and fails the calls waiting to be sent with this error.
    fn stop_asking(&self, opened: Option<Error>) {
        if let Some(unsent) = opened {
            self.current_mut().take();
            self.queue.abandon(&unsent);
        }
    }

    /// Interprets an error on this connection, of a script's call if one is given, and drops the connection if it is no
    /// longer of use.
    pub(super) fn interpret(&self, said: &RedisError, called: Option<Called>, number: u64) -> Error {
        let error = from_call(said, called);
        // A server that has become a replica may have a successor at the same address.
        let replica = said.kind() == redis::ErrorKind::Server(ServerErrorKind::ReadOnly);
        let useless = said.is_unrecoverable_error() || said.is_io_error() || replica;
        if useless && self.drop_connection(number) && error.kind() == ErrorKind::Disconnected {
            self.report_failure(&error);
        }
        error
    }
}

impl Drop for RuntimeEnds {
    fn drop(&mut self) {
        self.breaker.ended();
    }
}

impl Drop for PerRuntime {
    fn drop(&mut self) {
        self.dropped.notify_one();
    }
}
