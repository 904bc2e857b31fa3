//! A PostgreSQL database: its connections, and how transactions begin.

mod address;
pub(crate) mod client;
pub(crate) mod connecting;
mod error;
pub(crate) mod migrations;
mod ownership;
pub(crate) mod seal;
#[cfg(feature = "tls")]
mod tls;
pub(crate) mod transactions;

pub use error::PostgresError;

use std::fmt;
use std::panic::catch_unwind;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use deadpool_postgres::{
    ClientWrapper, Hook, HookError, Manager, ManagerConfig, Pool, PoolError, RecyclingMethod, Runtime, TimeoutType,
};
use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use tokio::time::timeout;
#[cfg(not(feature = "tls"))]
use tokio_postgres::NoTls as Connector;
use tokio_postgres::config::{Host, SslMode};
use tokio_postgres::tls::MakeTlsConnect;
use tokio_postgres::types::ToSql;
use tokio_postgres::{Config, Connection, IsolationLevel, Row, Socket};

use client::{Client, Deadline, Transaction};
use connecting::{Connecting, SAFE_PATH};
use seal::Seal;

#[cfg(feature = "tls")]
use tls::Connector;
#[cfg(feature = "tls")]
use tollgate::Tls;

/// Most connections held. Look-ups need one, since they go one batch at a time; a batch of totals and reading the ids
/// of keys may each hold another meanwhile.
const MOST_CONNECTIONS: usize = 4;
/// How many changes may use connections at the same time.
const MOST_CHANGES_AT_ONCE: usize = 2;
/// How long making a connection, or waiting for one, may take.
const CONNECTED_WITHIN: Duration = Duration::from_secs(5);
/// How long a pooled connection may take to show that it still works.
const ASKED_WITHIN: Duration = Duration::from_secs(2);
/// How long a server may be silent in a statement, unless the caller has chosen a deadline: longer than any wait for a
/// lock, so that the server says who holds it.
const ANSWERED_WITHIN: Duration = Duration::from_secs(20);
/// The same where an archiver reads, sorts or drops a month's table.
#[cfg(feature = "archive")]
const WHOLE_TABLE_WITHIN: Duration = Duration::from_secs(3600);
/// How long a query of the history may take: a little longer than the server allows it.
const READ_WITHIN: Duration = Duration::from_secs(17);
/// How long a server may leave sent data unacknowledged.
const SILENT_FOR: Duration = Duration::from_secs(10);
/// How long a statement waits for a lock, unless its transaction says otherwise: a server doesn't notice that a waiting
/// client has gone, so abandoned statements would add up.
const PATIENCE: &str = "SET lock_timeout = '1500ms'";
/// The same within a transaction that writes, or reads history.
const LONGER_PATIENCE: &str = "SET LOCAL lock_timeout = '14s'";
/// The longest timeout that PostgreSQL accepts, in milliseconds.
const MOST_MILLIS: u128 = i32::MAX as u128;
/// The least length of a secret, in bytes.
const SHORTEST_SECRET: usize = 16;
/// The end of the year 9999, since the epoch.
pub(crate) const LAST_TIME: Duration = Duration::from_secs(253_402_300_799);
/// The version number that servers of version 14 report.
const OLDEST: u32 = 140_000;

/// What a TLS connection is read and written through.
type Stream = <Connector as MakeTlsConnect<Socket>>::Stream;

/// A PostgreSQL database with the configuration of limits. Cheap to clone; connects on first use.
#[derive(Clone)]
pub struct Postgres {
    pub(crate) pool: Pool,
    pub(crate) config: Config,
    connector: Connector,
    /// The hosts, ports and database, without user and password.
    pub(crate) address: Arc<str>,
    /// How long a statement may take, if the caller has chosen a deadline.
    deadline: Option<Duration>,
    /// Authenticates what is cached in Redis, in place of the database's own secret.
    pub(crate) seal: Option<Seal>,
    /// Held while history is being read.
    reading: Arc<Semaphore>,
    /// Held while the configuration is changed: changes wait for one another, and leave a connection to look-ups.
    pub(crate) changing: Arc<Semaphore>,
}

impl Postgres {
    /// The database at a URL, `postgres://user:password@host:port/database`, or in libpq's form, `host=... dbname=...`.
    ///
    /// With the feature `tls`, an address with `sslmode=require` is connected to over TLS. The server's certificate
    /// must then be for this host and from one of the platform's authorities (libpq's `verify-full`); `open_with_tls`
    /// takes other authorities. Any other address is connected to without TLS.
    ///
    /// # Errors
    ///
    /// An address that can't be read, or one that asks for TLS without the feature or on a Unix socket.
    ///
    /// ```
    /// use tollgate_record::Postgres;
    ///
    /// let postgres = Postgres::open("postgres://limits@127.0.0.1/app")?;
    /// # Ok::<(), tollgate_record::PostgresError>(())
    /// ```
    pub fn open(url: &str) -> Result<Self, PostgresError> {
        let mut config = address::config(url)?;
        if config.get_ssl_mode() != SslMode::Require {
            // `prefer`, the default, would use TLS wherever a server has it, and few servers' certificates can be
            // verified.
            config.ssl_mode(SslMode::Disable);
        } else if !cfg!(feature = "tls") {
            let why = "but this program was built without tollgate's feature \"tls\"";
            return Err(PostgresError::input(format!("postgres: sslmode=require needs TLS, {why}")));
        }
        #[cfg(feature = "tls")]
        let connector = Connector::default();
        #[cfg(not(feature = "tls"))]
        let connector = Connector;
        Self::at(config, connector)
    }

    /// Like `open`, but always over TLS, with the caller's own authorities or client certificate, even if the address
    /// doesn't say `sslmode=require`.
    ///
    /// ```no_run
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use tollgate::Tls;
    /// use tollgate_record::Postgres;
    ///
    /// let tls = Tls::new().authority(&std::fs::read("ca.pem")?)?;
    /// let postgres = Postgres::open_with_tls("postgres://limits@db.internal/app", &tls)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// An address that can't be read, or one that rules TLS out: `sslmode=disable`, or a Unix socket.
    #[cfg(feature = "tls")]
    pub fn open_with_tls(url: &str, tls: &Tls) -> Result<Self, PostgresError> {
        let mut config = address::config(url)?;
        if config.get_ssl_mode() == SslMode::Disable {
            return Err(PostgresError::input("postgres: expected sslmode=require for TLS, got sslmode=disable"));
        }
        config.ssl_mode(SslMode::Require);
        Self::at(config, Connector::from(tls))
    }

    fn at(mut config: Config, connector: Connector) -> Result<Self, PostgresError> {
        let by_tcp = |host: &Host| matches!(host, Host::Tcp(_));
        if config.get_ssl_mode() == SslMode::Require && !config.get_hosts().iter().all(by_tcp) {
            return Err(PostgresError::input("postgres: expected a host for TLS, got a Unix socket"));
        }
        config.application_name("tollgate").connect_timeout(CONNECTED_WITHIN);
        // Notices a server that vanished silently.
        config.tcp_user_timeout(SILENT_FOR).keepalives_idle(SILENT_FOR).keepalives_interval(SILENT_FOR / 5);
        // An idle connection may have died silently, so it is checked before use.
        let recycled = ManagerConfig { recycling_method: RecyclingMethod::Verified };
        let connecting = Connecting(Connector::clone(&connector));
        let manager = Manager::from_connect(config.clone(), connecting, recycled);
        let pool = Pool::builder(manager)
            .max_size(MOST_CONNECTIONS)
            .wait_timeout(Some(CONNECTED_WITHIN))
            .create_timeout(Some(CONNECTED_WITHIN))
            .recycle_timeout(Some(ASKED_WITHIN))
            .runtime(Runtime::Tokio1)
            .post_create(Hook::async_fn(|client: &mut ClientWrapper, _| {
                let settings = format!("{SAFE_PATH}; {PATIENCE}");
                Box::pin(async move { client.batch_execute(&settings).await.map_err(HookError::Backend) })
            }))
            .build()
            .map_err(|error| PostgresError::input(format!("postgres: {error}")))?;
        let address = address::shown(&config);
        Ok(Self {
            pool,
            config,
            connector,
            address: address.into(),
            deadline: None,
            seal: None,
            reading: Arc::new(Semaphore::new(1)),
            changing: Arc::new(Semaphore::new(MOST_CHANGES_AT_ONCE)),
        })
    }

    /// A secret of at least 16 bytes that authenticates what is cached in Redis, in place of the database's own. All
    /// processes must have the same, and nobody else: whoever has it and may write to Redis can be any user.
    ///
    /// The database's secret can't be read while PostgreSQL is unreachable. A process that [starts](Self::follow) then
    /// takes rules and users from Redis unverified, and no API keys; with a secret from its service, it verifies all of
    /// them. Default: the database's.
    ///
    /// ```
    /// use tollgate_record::Postgres;
    ///
    /// let secret = b"32 random bytes, from a vault...";
    /// let postgres = Postgres::open("postgres://limits@127.0.0.1/app")?.cache_secret(secret)?;
    /// # Ok::<(), tollgate_record::PostgresError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// A shorter secret.
    pub fn cache_secret(self, secret: impl AsRef<[u8]>) -> Result<Self, PostgresError> {
        let secret = secret.as_ref();
        if secret.len() < SHORTEST_SECRET {
            let got = secret.len();
            return Err(PostgresError::input(format!(
                "cache secret: expected at least {SHORTEST_SECRET} bytes, got {got}"
            )));
        }
        Ok(Self { seal: Some(Seal::new(secret)), ..self })
    }

    /// How long the server may be silent in a statement, or between two rows of its answer, before the call fails and
    /// the connection is given up. The error then says that nothing was changed or, if only the confirmation of a
    /// change is missing, that the change [may have been made](PostgresError::is_unknown). Default: 20 seconds; 15 for
    /// [`stats`](Self::stats) and [`audit`](Self::audit), 10 minutes for [`migrate`](Self::migrate), and an hour where
    /// an archiver reads a whole table. A chosen deadline replaces all of these.
    ///
    /// What a service does by itself ([`follow`](Self::follow), [`record`](Self::record)) also has shorter deadlines of
    /// its own, which stay.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tollgate_record::Postgres;
    ///
    /// let postgres = Postgres::open("postgres://limits@127.0.0.1/app")?.deadline(Duration::from_secs(60));
    /// # Ok::<(), tollgate_record::PostgresError>(())
    /// ```
    #[must_use]
    pub fn deadline(self, deadline: Duration) -> Self {
        Self { deadline: Some(deadline), ..self }
    }

    /// The host, port and database, without user and password; all hosts, where the address has several.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Which server answers, where the address has several: its own address and port, as it knows them. `None` over a
    /// Unix socket. One round trip.
    ///
    /// # Errors
    ///
    /// No connection.
    pub async fn server(&self) -> Result<Option<String>, PostgresError> {
        let select = "SELECT CASE family(inet_server_addr()) WHEN 6 THEN '[' || host(inet_server_addr()) || ']'
            ELSE host(inet_server_addr()) END || ':' || inet_server_port()";
        Ok(self.connection().await?.query_one(select, &[]).await?.get(0))
    }

    /// The name of the database among those that share a Redis.
    pub(crate) fn name(&self) -> String {
        address::first(&self.config)
    }

    /// The time by the database's clock. Compute the ends of blocks and keys from it: this host's clock may be wrong.
    /// One round trip.
    ///
    /// # Errors
    ///
    /// No connection.
    pub async fn now(&self) -> Result<SystemTime, PostgresError> {
        Ok(self.connection().await?.query_one("SELECT now()", &[]).await?.get(0))
    }

    /// A connection to a server that is new enough.
    pub(crate) async fn connection(&self) -> Result<Client, PostgresError> {
        runtime_with_timers()?;
        let connected = timeout(self.at_most(CONNECTED_WITHIN), self.pool.get()).await;
        let connection = connected.unwrap_or(Err(PoolError::Timeout(TimeoutType::Create)));
        let connection = connection.map_err(|error| PostgresError::unreachable(&self.address, &error))?;
        let client = Client::pooled(connection, self.deadlines());
        let checked = timeout(self.at_most(ASKED_WITHIN), checked_version(&client)).await;
        checked.map_err(|_| PostgresError::late(&self.address))??;
        Ok(client)
    }

    /// This, or the chosen deadline if that is shorter.
    fn at_most(&self, within: Duration) -> Duration {
        self.deadline.map_or(within, |deadline| deadline.min(within))
    }

    fn deadlines(&self) -> Deadline {
        Deadline {
            within: self.deadline.unwrap_or(ANSWERED_WITHIN),
            #[cfg(feature = "archive")]
            whole_table_within: self.deadline.unwrap_or(WHOLE_TABLE_WITHIN),
            is_chosen: self.deadline.is_some(),
            so_far: "nothing was changed",
            address: Arc::clone(&self.address),
            is_spent: Arc::default(),
        }
    }

    /// The rows of a history query, which may read a lot. Such queries run one at a time, so that connections are left
    /// for short ones, and the server itself ends them when they take too long.
    pub(crate) async fn read(
        &self,
        select: &str,
        parameters: &[&(dyn ToSql + Sync)],
    ) -> Result<Vec<Row>, PostgresError> {
        runtime_with_timers()?;
        let within = self.deadline.unwrap_or(READ_WITHIN);
        let reading = timeout(within, self.reading.acquire()).await;
        let _reading = reading.map_err(|_| PostgresError::late(&self.address))?;
        let mut connection = self.connection().await?.within(within);
        let transaction = begin_reading(&mut connection).await?;
        // A little sooner, so that the server doesn't go on working once the caller has given up.
        let allowed = (within.saturating_mul(15) / 17).as_millis().clamp(1, MOST_MILLIS);
        transaction.batch_execute(&format!("SET LOCAL statement_timeout = {allowed}")).await?;
        transaction.batch_execute(LONGER_PATIENCE).await?;
        let pid = transaction.pid().await?;
        let rows = self.naming_blockers(pid, transaction.query(select, parameters)).await?;
        transaction.commit().await?;
        Ok(rows)
    }

    /// A connection of its own; the caller drives it, reads its notifications, and sets its search path first.
    pub(crate) async fn connect(&self) -> Result<(Client, Connection<Socket, Stream>), PostgresError> {
        let connecting = connecting::connect(&self.config, &self.connector);
        let Ok(connected) = timeout(self.at_most(CONNECTED_WITHIN), connecting).await else {
            return Err(PostgresError::late(&self.address));
        };
        let connected = connected.map_err(|error| PostgresError::not_connected(&self.address, &error));
        connected.map(|(client, connection)| (Client::own(client, self.deadlines()), connection))
    }

    /// The same for another module, with the future that drives the connection.
    #[cfg(feature = "archive")]
    pub(crate) async fn connect_alone(
        &self,
    ) -> Result<(Client, impl Future<Output = ()> + Send + Unpin + use<>), PostgresError> {
        let (client, connection) = self.connect().await?;
        // Callers waiting for a reply learn of the connection's end, so its result is dropped.
        Ok((client, futures_util::FutureExt::map(connection, drop)))
    }
}

/// A transaction that writes, whatever isolation the role or the database has as its default: at a stricter level, one
/// of two changes at once would fail instead of waiting.
pub(crate) async fn begin_writing(client: &mut Client) -> Result<Transaction<'_>, PostgresError> {
    let transaction = client.begin(IsolationLevel::ReadCommitted, true).await?;
    transaction.batch_execute(LONGER_PATIENCE).await?;
    Ok(transaction)
}

/// A transaction that reads as of one moment.
pub(crate) async fn begin_reading(client: &mut Client) -> Result<Transaction<'_>, PostgresError> {
    client.begin(IsolationLevel::RepeatableRead, false).await
}

/// Waits for the server's answer for this long, where that is shorter than the [client's](client) deadline. After a
/// timeout the answer may still come; the pool verifies a connection before it is used again.
pub(crate) async fn in_time<T>(
    most: Duration,
    work: impl Future<Output = Result<T, PostgresError>>,
) -> Result<T, PostgresError> {
    timeout(most, work).await.unwrap_or_else(|_| Err(PostgresError::unanswered(most)))
}

/// Checks that a server is new enough.
pub(crate) async fn checked_version(client: &Client) -> Result<(), PostgresError> {
    // May be a connection's first query, before its search path is set: so names are qualified.
    let select = "SELECT pg_catalog.current_setting('server_version_num')::pg_catalog.int4";
    let row = client.query_one(select, &[]).await?;
    let version = u32::try_from(row.get::<_, i32>(0)).unwrap_or_default();
    if version >= OLDEST {
        return Ok(());
    }
    let got = format!("{}.{}", version / 10_000, version % 10_000);
    Err(PostgresError::input(format!("postgres: expected version 14 or newer, got {got}")))
}

/// The runtime of this call, which must have timers.
pub(crate) fn runtime_with_timers() -> Result<Handle, PostgresError> {
    let misused =
        |got: &str| PostgresError::input(format!("runtime: call this within a tokio runtime with enable_all: {got}"));
    let runtime = Handle::try_current().map_err(|_| misused("there is none here"))?;
    // There is no other way to ask whether a runtime has timers.
    catch_unwind(|| drop(tokio::time::sleep(Duration::ZERO))).map_err(|_| misused("this one has no timers"))?;
    Ok(runtime)
}

/// The nearest moment from 1970 to 9999, which PostgreSQL can compare with.
pub(crate) fn in_range(time: SystemTime) -> SystemTime {
    time.clamp(UNIX_EPOCH, UNIX_EPOCH + LAST_TIME)
}

/// Hides user and password.
impl fmt::Debug for Postgres {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Postgres").field("address", &self.address).finish_non_exhaustive()
    }
}
