//! The system of record on PostgreSQL 14 or newer: rules, users and API keys, in the schema `tollgate`.
//!
//! No decision waits for it. Its tables are made by [`Postgres::migrate`], which nothing calls by itself.

mod cache;
mod configuration;
mod error;
mod follow;
mod input;
mod key_text;
mod keys;
mod look_up;
mod migrations;
mod rules;
mod snapshot;
mod totals;
mod users;

pub use configuration::{Configuration, Status};
pub use error::PostgresError;
pub use input::OwnLimits;
pub use key_text::NewKey;
pub use keys::{KeyTerms, StoredKey};
pub use look_up::ApiKeyError;
pub use migrations::{Migration, Schema};
pub use rules::StoredRules;
pub use totals::TotalsWriter;
pub use users::StoredUser;

use std::fmt;
use std::time::Duration;

use deadpool_postgres::{Manager, ManagerConfig, Object, Pool, RecyclingMethod, Runtime};
use tokio_postgres::{Config, NoTls};

/// Connections that are held at most: configuration is read seldom, and by one task at a time.
const MOST_CONNECTIONS: usize = 4;
/// How long a connection may take to be made, or to be waited for.
const CONNECTED_WITHIN: Duration = Duration::from_secs(5);
/// The number by which servers say that they are of version 14.
const OLDEST: u32 = 140_000;

/// A PostgreSQL with the configuration of limits. Cheap to clone; connects when it is first used.
#[derive(Clone)]
pub struct Postgres {
    pool: Pool,
    config: Config,
    /// Where it is, without what is secret.
    address: String,
}

impl Postgres {
    /// The database at a URL, `postgres://user:password@host:port/database`, or in libpq's form, `host=... dbname=...`.
    ///
    /// # Errors
    ///
    /// An address that can't be read.
    ///
    /// ```
    /// use tollgate::postgres::Postgres;
    ///
    /// let postgres = Postgres::open("postgres://limits@127.0.0.1/app")?;
    /// # Ok::<(), tollgate::postgres::PostgresError>(())
    /// ```
    pub fn open(url: &str) -> Result<Self, PostgresError> {
        let mut config: Config = url.parse().map_err(|error| PostgresError::address(&error))?;
        if config.get_hosts().is_empty() {
            return Err(PostgresError::input("postgres: expected an address with a host, got one without"));
        }
        config.application_name("tollgate").connect_timeout(CONNECTED_WITHIN);
        let address = address(&config);
        let manager =
            Manager::from_config(config.clone(), NoTls, ManagerConfig { recycling_method: RecyclingMethod::Fast });
        let pool = Pool::builder(manager)
            .max_size(MOST_CONNECTIONS)
            .wait_timeout(Some(CONNECTED_WITHIN))
            .create_timeout(Some(CONNECTED_WITHIN))
            .runtime(Runtime::Tokio1)
            .build()
            .map_err(|error| PostgresError::input(format!("postgres: {error}")))?;
        Ok(Self { pool, config, address })
    }

    /// Where it is: host, port and database, without user and password.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }

    /// A connection to a server that is new enough.
    async fn connection(&self) -> Result<Object, PostgresError> {
        let connection = self.pool.get().await.map_err(|error| PostgresError::unreachable(&self.address, &error))?;
        let row = connection.query_one("SELECT current_setting('server_version_num')::int4", &[]).await?;
        let version = u32::try_from(row.get::<_, i32>(0)).unwrap_or_default();
        if version < OLDEST {
            let got = format!("{}.{}", version / 10_000, version % 10_000);
            return Err(PostgresError::input(format!("postgres: expected version 14 or newer, got {got}")));
        }
        Ok(connection)
    }
}

/// `host:port/database`, of the first host where there are several.
fn address(config: &Config) -> String {
    let host = match config.get_hosts().first() {
        Some(tokio_postgres::config::Host::Tcp(host)) => host.clone(),
        #[cfg(unix)]
        Some(tokio_postgres::config::Host::Unix(path)) => path.display().to_string(),
        None => String::new(),
    };
    let port = config.get_ports().first().copied().unwrap_or(5432);
    let database = config.get_dbname().or(config.get_user()).unwrap_or("postgres");
    format!("{host}:{port}/{database}")
}

/// Hides user and password.
impl fmt::Debug for Postgres {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Postgres").field("address", &self.address).finish_non_exhaustive()
    }
}
