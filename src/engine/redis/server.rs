//! One server as connections to it are made: by its address, by way of its Sentinels, or from the caller's own pool;
//! and whether it is still the same process.

use std::any::Any;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
#[cfg(feature = "redis-rs")]
use std::time::Duration;

#[cfg(feature = "deadpool-redis")]
use deadpool_redis::{Connection as PoolConnection, Pool, PoolError};
use redis::aio::MultiplexedConnection;
use redis::{Client, ErrorKind, ServerErrorKind, Value};
use tokio::task::JoinError;
#[cfg(feature = "redis-rs")]
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::address::{Endpoint, Sentinels};
use super::connection::{Connection, Owner};
use super::credentials::Login;
use super::errors::from_connecting;
use super::transport::{self, Opened, Wire};
use super::unusable;
#[cfg(feature = "redis-rs")]
use crate::engine::deadline::Deadline;
use crate::error::{Error, Kind};
use crate::lock::Lock;
use crate::runtime;
#[cfg(feature = "deadpool-redis")]
use crate::runtime::LONGEST_WAIT;

pub(super) struct Server {
    connector: Connector,
    /// The address, for messages.
    address: String,
    connections: AtomicU64,
    /// The process that answered last, by its own run id.
    process: Lock<Option<String>>,
    restarts: AtomicU64,
}

/// How to connect.
enum Connector {
    Address(Box<Endpoint>),
    /// Through the caller's pool.
    #[cfg(feature = "deadpool-redis")]
    Pool(Pool),
    Sentinels(Arc<Sentinels>),
}

impl Server {
    pub(super) fn at(endpoint: Endpoint) -> Result<Self, Error> {
        Client::open(endpoint.info().clone()).map_err(|error| unusable(&error.to_string()))?;
        let address = endpoint.to_string();
        Ok(Self::of(Connector::Address(Box::new(endpoint)), address))
    }

    pub(super) fn known_to(sentinels: Sentinels) -> Result<Self, Error> {
        sentinels.check()?;
        let address = sentinels.to_string();
        Ok(Self::of(Connector::Sentinels(Arc::new(sentinels)), address))
    }

    #[cfg(feature = "deadpool-redis")]
    pub(super) fn of_pool(pool: Pool) -> Self {
        Self::of(Connector::Pool(pool), "the pool's address".into())
    }

    fn of(connector: Connector, address: String) -> Self {
        let (connections, restarts) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { connector, address, connections, process: Lock::default(), restarts }
    }

    /// The address for messages: without user and password.
    pub(super) fn address(&self) -> &str {
        &self.address
    }

    /// The address unless it is of this machine.
    pub(super) fn remote_address(&self) -> Option<String> {
        match &self.connector {
            Connector::Address(endpoint) => endpoint.remote(),
            #[cfg(feature = "deadpool-redis")]
            Connector::Pool(_) => Some(self.address.clone()),
            Connector::Sentinels(sentinels) => sentinels.remote_address(),
        }
    }

    /// How many connections were made.
    pub(super) fn connections(&self) -> u64 {
        self.connections.load(Ordering::Relaxed)
    }

    /// How often a new connection found a different process than the last one did.
    pub(super) fn restarts(&self) -> u64 {
        self.restarts.load(Ordering::Relaxed)
    }

    /// Another connection, not yet used by any caller.
    pub(super) async fn connect(&self, owner: Weak<dyn Owner>) -> Result<Connection, Error> {
        let began = Instant::now();
        let (mut connection, wire, login) = self.open().await.map_err(Error::at_connecting)?;
        let took = began.elapsed().saturating_sub(login.asked_for);
        self.notice_restart(&mut connection).await;
        let number = self.connections.fetch_add(1, Ordering::Relaxed);
        Ok(Connection::new(owner, number, (connection, wire), took, login))
    }

    /// A connection, what is known of its bytes, and by what it was authenticated.
    async fn open(&self) -> Result<(MultiplexedConnection, Option<Arc<Wire>>, Login), Error> {
        let address = &self.address;
        let (mut connection, wire, login) = match &self.connector {
            Connector::Address(endpoint) => {
                let Opened { connection, wire, login } =
                    transport::open(endpoint).await.map_err(|error| from_connecting(&error, address))?;
                (connection, Some(wire), login)
            }
            #[cfg(feature = "deadpool-redis")]
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
        let mut last = self.process.lock();
        if last.replace(process.to_owned()).is_some_and(|last| last != process) {
            self.restarts.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[cfg(feature = "redis-rs")]
    pub(super) async fn client(&self, deadline: Duration) -> Result<Client, Error> {
        match &self.connector {
            Connector::Address(endpoint) => endpoint.client().map_err(|error| unusable(&error.to_string())),
            #[cfg(feature = "deadpool-redis")]
            Connector::Pool(_) => Err(unusable("expected a Redis that was opened by address, got a pool")),
            Connector::Sentinels(sentinels) => {
                // In a task of its own, since it needs a runtime with I/O.
                runtime::with_timers()?;
                let (sentinels, mut looking) = (Arc::clone(sentinels), JoinSet::new());
                looking.spawn(async move { sentinels.primary().await });
                let found = runtime::timeout_at(Deadline::after(deadline).at, looking.join_next()).await.flatten();
                let found = found.unwrap_or_else(|| Ok(Err(Error::deadline(deadline, false))));
                let (primary, _) = found.unwrap_or_else(|ended| Err(interrupted(ended)))?;
                primary.client().map_err(|error| unusable(&error.to_string()))
            }
        }
    }

    /// The name under which Sentinels know the server, and a client for each of them.
    #[cfg(feature = "redis-rs")]
    pub(super) fn sentinels(&self) -> Option<(&str, Vec<Client>)> {
        match &self.connector {
            Connector::Sentinels(sentinels) => Some(sentinels.themselves()),
            _ => None,
        }
    }
}

/// The error of a task that was to connect and didn't end by itself.
pub(super) fn interrupted(ended: JoinError) -> Error {
    let why = match ended.try_into_panic() {
        Ok(panic) if is_without_io(&*panic) => return runtime::misused("this one has no I/O"),
        Ok(_) => "the task that was connecting panicked",
        Err(_) => "the runtime is shutting down",
    };
    Error::new(Kind::Unreachable, format!("no connection to redis: {why}"))
}

/// Whether tokio panicked since the runtime was made without I/O. There is no other way to ask.
fn is_without_io(panic: &(dyn Any + Send)) -> bool {
    let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
    text.is_some_and(|text| text.contains("IO is disabled") || text.contains("enable_io"))
}

/// Redis 7.0 introduced EVALSHA_RO and error codes from scripts. If the user may not ask, the version isn't known.
async fn check_version(
    connection: &mut MultiplexedConnection,
    address: &str,
    wire: Option<&Wire>,
) -> Result<(), Error> {
    let answer = redis::cmd("HELLO").query_async::<std::collections::HashMap<String, Value>>(connection).await;
    let expected = "expected Redis 7.0 or newer, or Valkey 7.2 or newer";
    let too_old = |version: &str| Error::new(Kind::Unsupported, format!("redis version: {expected}, got {version}"));
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
            let why = "this server rejects HELLO, so it is older than 6.2, or HELLO is renamed";
            Err(Error::new(Kind::Unsupported, format!("redis version: {expected}: {why}")))
        }
        Err(error) => Err(from_connecting(&error, address)),
    }
}
