//! Makes the connection that a runtime's calls go over, keeps it, and replaces it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

#[cfg(feature = "redis-rs")]
use deadpool_redis::{Connection as PoolConnection, PoolError};
use futures_util::stream::{FuturesUnordered, StreamExt};
use redis::aio::MultiplexedConnection;
use redis::{ErrorKind, ServerErrorKind, Value};
use tokio::task::JoinError;
use tokio::time::{Instant, timeout};

use super::connection::{Connection, RENEW_AGAIN};
use super::credentials::Login;
use super::errors::from_connecting;
use super::per_runtime::PerRuntime;
use super::transport::{self, Opened, Wire};
use super::{Connector, Redis};
use crate::error::{Error, Kind};
use crate::runtime;
#[cfg(feature = "redis-rs")]
use crate::runtime::LONGEST_WAIT;

/// How long one attempt to connect may take, whatever its waiters' deadlines.
const LONGEST_CONNECT: Duration = Duration::from_secs(5);
/// After this long Redis counts as away, though the attempt goes on.
const SLOW_CONNECT: Duration = Duration::from_secs(1);
/// How long after an attempt another one starts beside it.
const AGAIN: Duration = Duration::from_millis(500);

impl Redis {
    pub(super) async fn connection(&self, per_runtime: &Arc<PerRuntime>) -> Result<Connection, Error> {
        if let Some(held) = per_runtime.current_connection() {
            if held.is_usable().await {
                if held.is_due() {
                    self.succeed(per_runtime, &held);
                }
                return Ok(held);
            }
            per_runtime.drop_connection(held.number);
            held.lose();
        }
        let attempt = loop {
            let ended = per_runtime.connecting.ended();
            // If the attempt's runtime is stuck, another attempt would be stuck too: its runtime is the same.
            let attempt = per_runtime.connecting.begin(None);
            if let Some(held) = per_runtime.current_connection() {
                return Ok(held);
            }
            if let Some(attempt) = attempt {
                break attempt;
            }
            ended.await;
            // The attempt may have failed.
            if let Some(held) = per_runtime.current_connection() {
                return Ok(held);
            }
            per_runtime.breaker.check()?;
        };
        // A separate task, so that callers with deadlines shorter than connecting takes still leave a connection for
        // the next one. The caller may be polled on another runtime than the one that the connection is for.
        let (this, per_runtime) = (self.clone(), Arc::clone(per_runtime));
        let connect = per_runtime.runtime.clone().spawn(async move {
            let made = this.make_at_last(&per_runtime).await;
            match &made {
                Ok(connection) => {
                    per_runtime.set_connection(connection.clone());
                    per_runtime.breaker.connected();
                }
                Err(error) => per_runtime.report_failure(error),
            }
            drop(attempt);
            made
        });
        connect.await.unwrap_or_else(|ended| Err(interrupted(ended)))
    }

    /// Replaces a connection whose credentials expire soon, while calls go on over it. If that fails, the next call
    /// after a while tries again; once the server has closed it, callers connect as they do at first.
    fn succeed(&self, per_runtime: &Arc<PerRuntime>, held: &Connection) {
        // One at a time, and beside the attempts of callers who have no connection, if this one breaks meanwhile.
        held.due_again_after(LONGEST_CONNECT);
        let (this, per_runtime, held) = (self.clone(), Arc::clone(per_runtime), held.clone());
        per_runtime.runtime.clone().spawn(async move {
            match timeout(LONGEST_CONNECT, this.make()).await {
                Ok(Ok(connection)) => per_runtime.replace(&held, connection),
                _ => held.due_again_after(RENEW_AGAIN),
            }
        });
    }

    /// The first of several attempts to succeed. Another starts every half a second meanwhile: one attempt may never be
    /// answered, and the next immediately.
    async fn make_at_last(&self, per_runtime: &PerRuntime) -> Result<Connection, Error> {
        let late = |after| Error::deadline(after, false).at_connecting();
        let (began, mut failed) = (Instant::now(), None);
        let mut next = began + AGAIN;
        let mut attempts = FuturesUnordered::new();
        attempts.push(self.make());
        loop {
            match tokio::time::timeout_at(next, attempts.next()).await {
                Ok(Some(Ok(connection))) => return Ok(connection),
                // A refusal will be repeated.
                Ok(Some(Err(error))) if attempts.is_empty() || !error.goes_to_policy() => return Err(error),
                Ok(Some(Err(error))) => failed = Some(error),
                Ok(None) => return Err(late(began.elapsed())),
                Err(_) if began.elapsed() >= LONGEST_CONNECT => {
                    let late = late(LONGEST_CONNECT);
                    return Err(match failed {
                        Some(error) => late.caused_by(error),
                        None => late,
                    });
                }
                Err(_) => {
                    if began.elapsed() >= SLOW_CONNECT {
                        // Callers from now on needn't wait for it.
                        per_runtime.report_away(&late(SLOW_CONNECT));
                    }
                    next += AGAIN;
                    attempts.push(self.make());
                }
            }
        }
    }

    /// Another connection, not yet used by any caller.
    pub(super) async fn make(&self) -> Result<Connection, Error> {
        let began = Instant::now();
        let (mut connection, wire, login) = self.connect().await.map_err(Error::at_connecting)?;
        let took = began.elapsed().saturating_sub(login.asked_for);
        self.notice_restart(&mut connection).await;
        let number = self.shared.made.fetch_add(1, Ordering::Relaxed);
        let owner = Arc::downgrade(&self.shared);
        Ok(Connection::new(owner, number, (connection, wire), took, login))
    }

    /// A connection, what is known of its bytes, and by what it was authenticated.
    async fn connect(&self) -> Result<(MultiplexedConnection, Option<Arc<Wire>>, Login), Error> {
        let address = &self.shared.address;
        let (mut connection, wire, login) = match &self.shared.connector {
            Connector::Address(endpoint) => {
                let Opened { connection, wire, login } =
                    transport::open(endpoint).await.map_err(|error| from_connecting(&error, address))?;
                (connection, Some(wire), login)
            }
            #[cfg(feature = "redis-rs")]
            Connector::Pool(pool) => {
                let mut connection = PoolConnection::take(pool.get().await.map_err(|error| match error {
                    PoolError::Backend(error) => from_connecting(&error, address),
                    other => Error::new(Kind::Unreachable, format!("no connection to redis at {address}: {other}")),
                })?);
                // redis-rs's default is 500 ms.
                connection.set_response_timeout(LONGEST_WAIT);
                (connection, None, Login::default())
            }
            Connector::Sentinels(sentinels) => {
                let (_, Opened { connection, wire, login }) = sentinels.primary().await?;
                (connection, Some(wire), login)
            }
        };
        check_version(&mut connection, address, wire.as_deref()).await?;
        Ok((connection, wire, login))
    }

    async fn notice_restart(&self, connection: &mut MultiplexedConnection) {
        // Without that permission, restarts aren't counted.
        let Ok(info) = redis::cmd("INFO").arg("server").query_async::<String>(connection).await else { return };
        let Some(process) = info.lines().find_map(|line| line.strip_prefix("run_id:")) else { return };
        let mut last = self.shared.process.lock();
        if last.replace(process.to_owned()).is_some_and(|last| last != process) {
            self.shared.restarts.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// The error of a task that was to connect and didn't end by itself.
pub(super) fn interrupted(ended: JoinError) -> Error {
    let error = match ended.is_panic() {
        true => runtime::misused("this one has no I/O"),
        false => Error::new(Kind::Unreachable, "no connection to redis: the runtime is shutting down"),
    };
    error.caused_by(ended)
}

/// Redis 7.0 introduced EVALSHA_RO and error codes from scripts. If the user may not ask, the version isn't known.
async fn check_version(
    connection: &mut MultiplexedConnection,
    address: &str,
    wire: Option<&Wire>,
) -> Result<(), Error> {
    let answer = redis::cmd("HELLO").query_async::<std::collections::HashMap<String, Value>>(connection).await;
    let too_old = |version: &str| {
        let expected = "expected Redis 7.0 or newer, or Valkey 7.2 or newer";
        Error::new(Kind::Unsupported, format!("redis version: {expected}, got {version}"))
    };
    let refusal = wire.and_then(Wire::refusal);
    match answer {
        Err(error) if refusal.is_some() || error.to_string().contains("max number of clients") => {
            Err(from_connecting(&refusal.unwrap_or(error), address))
        }
        Ok(server) => {
            let text = |name| match server.get(name) {
                Some(Value::BulkString(text)) => Some(String::from_utf8_lossy(text)),
                _ => None,
            };
            if text("mode").is_some_and(|mode| mode == "sentinel") {
                let expected = "expected a Redis, or redis-sentinel://HOST:PORT/PRIMARY";
                return Err(Error::new(Kind::Unsupported, format!("url: {expected}, got a Sentinel at {address}")));
            }
            let Some(version) = text("version") else { return Ok(()) };
            let major = version.split('.').next().and_then(|major| major.parse::<u32>().ok());
            if major.is_none_or(|major| major >= 7) {
                return Ok(());
            }
            // A proxy reports its own version.
            match text("server").filter(|server| server != "redis") {
                Some(server) => Err(too_old(&format!("{server} {version}"))),
                None => Err(too_old(&version)),
            }
        }
        Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoPerm) => Ok(()),
        Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::ResponseError) => {
            Err(too_old("a server that doesn't answer HELLO (older than 6.2, or HELLO is renamed)"))
        }
        Err(error) => Err(from_connecting(&error, address)),
    }
}
