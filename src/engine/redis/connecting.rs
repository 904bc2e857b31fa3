//! The one connection that calls go over: made, kept, and replaced.

use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard, PoisonError, RwLockWriteGuard};
use std::time::{Duration, Instant};

use deadpool_redis::redis::aio::MultiplexedConnection;
use deadpool_redis::redis::{self, ErrorKind, ServerErrorKind, Value};
use deadpool_redis::{Connection, PoolError};

use super::errors::from_connecting;
use super::link::Link;
use super::{Confirm, LONGEST_DEADLINE, Redis, Way, patient};
use crate::error::{Error, Kind};

/// How long one attempt to connect may take, whatever the deadlines of those who wait for it.
const LONGEST_CONNECT: Duration = Duration::from_secs(5);

/// Held while connecting, so that one task connects and all callers wait for what it gets.
#[derive(Debug, Default)]
pub(super) struct Connecting {
    turn: Arc<tokio::sync::Mutex<()>>,
    since: Option<Instant>,
}

impl Connecting {
    /// Whose turn it was too long ago may belong to a runtime that nobody drives any more.
    fn turn(&mut self) -> Arc<tokio::sync::Mutex<()>> {
        if self.since.is_some_and(|since| since.elapsed() > LONGEST_CONNECT) && self.turn.try_lock().is_err() {
            *self = Self::default();
        }
        Arc::clone(&self.turn)
    }
}

impl Redis {
    pub(super) async fn connection(&self) -> Result<Link, Error> {
        if let Some(held) = self.held() {
            return Ok(held);
        }
        let turn = self.connecting().turn();
        let connecting = turn.lock_owned().await;
        self.connecting().since = Some(Instant::now());
        if let Some(held) = self.held() {
            return Ok(held);
        }
        // While this waited, others may have tried in vain.
        self.shared.guard.check()?;
        // A task of its own, so that a caller whose deadline is shorter than a connect takes leaves a connection to the
        // next one.
        let this = self.clone();
        let connect = tokio::spawn(async move {
            let made = tokio::time::timeout(LONGEST_CONNECT, this.make()).await;
            let made = made.unwrap_or_else(|_| Err(Error::deadline(LONGEST_CONNECT, false).at_connecting()));
            match &made {
                Ok(link) => this.hold(link.clone()),
                Err(error) => this.failed(error),
            }
            drop(connecting);
            made
        });
        let ended = || Error::new(Kind::Unreachable, "no connection to redis: the runtime is shutting down");
        connect.await.unwrap_or_else(|_| Err(ended()))
    }

    /// Another connection, which nobody uses yet.
    pub(super) async fn make(&self) -> Result<Link, Error> {
        let began = Instant::now();
        let mut connection = self.connect().await.map_err(Error::at_connecting)?;
        let took = began.elapsed();
        self.notice_restart(&mut connection).await;
        let number = self.shared.made.fetch_add(1, Ordering::Relaxed);
        let longer = self.shared.confirm.get().map_or(Duration::ZERO, Confirm::longest);
        Ok(Link::new(Arc::downgrade(&self.shared), number, connection, took, longer))
    }

    async fn connect(&self) -> Result<MultiplexedConnection, Error> {
        let address = &self.shared.address;
        let mut connection = match self.shared.way() {
            Way::Pool(pool, _) => Connection::take(pool.get().await.map_err(|error| match error {
                PoolError::Backend(error) => from_connecting(&error, address),
                other => Error::new(Kind::Unreachable, format!("no connection to redis at {address}: {other}")),
            })?),
            Way::Sentinels(sentinels) => {
                let primary = sentinels.primary().await?;
                let connected = primary.get_multiplexed_async_connection_with_config(&patient()).await;
                connected.map_err(|error| from_connecting(&error, address))?
            }
        };
        // A pool's connections have redis-rs's own 500 ms unless they were told otherwise.
        connection.set_response_timeout(LONGEST_DEADLINE);
        check_version(&mut connection, address).await?;
        Ok(connection)
    }

    async fn notice_restart(&self, connection: &mut MultiplexedConnection) {
        // Who may not ask doesn't learn of it.
        let Ok(info) = redis::cmd("INFO").arg("server").query_async::<String>(connection).await else { return };
        let Some(process) = info.lines().find_map(|line| line.strip_prefix("run_id:")) else { return };
        let mut last = self.shared.process.lock().unwrap_or_else(PoisonError::into_inner);
        if last.replace(process.to_owned()).is_some_and(|last| last != process) {
            self.shared.restarts.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn connecting(&self) -> MutexGuard<'_, Connecting> {
        self.shared.connecting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn held(&self) -> Option<Link> {
        self.shared.current.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn hold(&self, link: Link) {
        *self.current() = Some(link);
    }

    pub(super) fn is_current(&self, link: &Link) -> bool {
        self.held().is_some_and(|held| held.number == link.number)
    }

    /// Whether it was the one that calls go over.
    pub(super) fn drop_link(&self, number: u64) -> bool {
        self.current().take_if(|held| held.number == number).is_some()
    }

    /// Unless another has taken its place meanwhile.
    pub(super) fn replace(&self, link: &Link, by: Link) {
        let mut current = self.current();
        if current.as_ref().is_none_or(|held| held.number == link.number) {
            *current = Some(by);
        }
    }

    pub(super) fn current(&self) -> RwLockWriteGuard<'_, Option<Link>> {
        self.shared.current.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Redis 7.0 brought EVALSHA_RO and error codes out of scripts. Where the user may not ask, nothing is known.
async fn check_version(connection: &mut MultiplexedConnection, address: &str) -> Result<(), Error> {
    let answer = redis::cmd("HELLO").query_async::<std::collections::HashMap<String, Value>>(connection).await;
    let too_old = |version: &str| {
        let expected = "expected Redis 7.0 or newer, or Valkey 7.2 or newer";
        Error::new(Kind::Unsupported, format!("redis version: {expected}, got {version}"))
    };
    match answer {
        Ok(server) => {
            let text = |name| match server.get(name) {
                Some(Value::BulkString(text)) => Some(String::from_utf8_lossy(text)),
                _ => None,
            };
            if text("mode").is_some_and(|mode| mode == "sentinel") {
                let expected = "expected a Redis, or redis-sentinel://HOST:PORT/PRIMARY as the url";
                return Err(Error::new(Kind::Unsupported, format!("{expected}, got a Sentinel at {address}")));
            }
            let Some(version) = text("version") else { return Ok(()) };
            let major = version.split('.').next().and_then(|major| major.parse::<u32>().ok());
            if major.is_none_or(|major| major >= 7) {
                return Ok(());
            }
            // A proxy answers for itself.
            match text("server").filter(|server| server != "redis") {
                Some(server) => Err(too_old(&format!("{server} {version}"))),
                None => Err(too_old(&version)),
            }
        }
        Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoPerm) => Ok(()),
        Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::ResponseError) => {
            Err(too_old("one that doesn't answer HELLO (older than 6.2, or HELLO is renamed)"))
        }
        Err(error) => Err(from_connecting(&error, address)),
    }
}
