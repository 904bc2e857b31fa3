//! One Redis, using EVALSHA over one connection that all callers of a runtime share.
//!
//! redis-rs pipelines all tasks' calls over it. A connection from a caller's pool is kept, since getting one costs a
//! round trip each time. If Sentinels name the Redis, a broken connection is replaced by one to the current primary.

pub(crate) mod address;
pub(crate) mod breaker;
mod commands;
mod confirm;
pub(crate) mod connect;
mod connecting;
mod connection;
pub(crate) mod credentials;
mod dispatch;
mod errors;
mod exchange;
mod per_runtime;
mod pipeline;
mod queue;
pub(super) mod redirect;
mod sentinel;
pub(super) mod settings;
mod shown_address;
mod silence;
mod spelling;
mod sweep;
mod texts;
#[cfg(feature = "tls")]
pub(crate) mod tls;
mod transport;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use arc_swap::ArcSwap;
#[cfg(feature = "redis-rs")]
use deadpool_redis::Pool;
use redis::Client;
#[cfg(feature = "redis-rs")]
use tokio::task::JoinSet;

#[cfg(feature = "redis-rs")]
use super::deadline::Deadline;
use crate::error::{Error, Kind};
use crate::lock::Lock;
#[cfg(feature = "redis-rs")]
use crate::runtime;
use address::{Endpoint, Sentinels, address};
pub(crate) use breaker::Admission;
use breaker::BreakerState;
pub(super) use confirm::Confirm;
pub(crate) use dispatch::Many;
use per_runtime::PerRuntime;
pub(super) use pipeline::Asking;
pub(crate) use queue::Waiting;
use settings::Settings;

/// A Redis (7.0 or newer) or Valkey (7.2 or newer), given its address, its Sentinels, or the caller's own pool.
///
/// Connects at the first decision, and again after the connection breaks.
#[derive(Clone, Debug)]
pub struct Redis {
    shared: Arc<Shared>,
}

struct Shared {
    connector: Connector,
    /// The address, for messages.
    address: String,
    /// Read by every call, so lock-free.
    runtimes: ArcSwap<Vec<Arc<PerRuntime>>>,
    made: AtomicU64,
    /// The server process that answered last, by its own run id.
    process: Lock<Option<String>>,
    restarts: AtomicU64,
    confirm: Option<Confirm>,
}

/// How to connect.
enum Connector {
    Address(Box<Endpoint>),
    /// Through the caller's pool.
    #[cfg(feature = "redis-rs")]
    Pool(Pool),
    Sentinels(Arc<Sentinels>),
}

impl fmt::Debug for Shared {
    /// Shows nothing of the pool, which contains the password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("address", &self.address).finish_non_exhaustive()
    }
}

impl Redis {
    /// The Redis at `redis://[user:password@]host[:port][/db]`, optionally with `?protocol=resp3`, or at
    /// `unix:///path/of.sock`, optionally with `?user=...&pass=...&db=...&protocol=resp3`. In a user or password, `@`,
    /// `:`, `/`, `?`, `#`, `%` and space are percent-encoded. `valkey://` is the same as `redis://`, and
    /// `redis+unix://` and `valkey+unix://` the same as `unix://`. At
    /// `redis-sentinel://[user:password@]host[:port][,host[:port]...]/primary[/db]` it is the primary of this name,
    /// found through its Sentinels; one of them suffices, if it is up. Connects later.
    ///
    /// User and password are the primary's; the Sentinels' own are `?sentinel-user=...&sentinel-password=...`. The
    /// primary is looked up again whenever a connection has broken, was given up or turned out to lead to a replica. It
    /// must itself report being a primary.
    ///
    /// With the feature `tls`, `rediss://...` and `rediss-sentinel://...` work too, if the server's certificate is for
    /// this host and from one of the platform's authorities. [`RedisBuilder::tls`](crate::RedisBuilder::tls)
    /// changes the authorities.
    ///
    /// # Errors
    ///
    /// An address that can't be read, or has anything but the above, such as another option; the error doesn't show the
    /// password. One that ends in `#insecure`: certificates are always checked.
    pub fn open(url: &str) -> Result<Self, Error> {
        Self::with(url, &Settings::default())
    }

    pub(super) fn with(url: &str, settings: &Settings) -> Result<Self, Error> {
        if !address::is_of_sentinels(url) {
            return Self::at(address(url)?.with(settings, url)?, settings.confirm);
        }
        let sentinels = address::sentinels(url)?.with(settings, url)?;
        sentinels.check()?;
        let address = sentinels.to_string();
        Ok(Self::new(Connector::Sentinels(Arc::new(sentinels)), address, settings.confirm))
    }

    pub(super) fn at(endpoint: Endpoint, confirm: Option<Confirm>) -> Result<Self, Error> {
        Client::open(endpoint.info().clone()).map_err(|error| unusable(&error.to_string()))?;
        let address = endpoint.to_string();
        Ok(Self::new(Connector::Address(Box::new(endpoint)), address, confirm))
    }

    /// The Redis that this pool connects to. [`deadpool_redis`](crate::deadpool_redis) is tollgate's own, so that
    /// versions can't differ. Each runtime takes one connection from the pool and keeps it, and takes one more if the
    /// first falls silent: without room for that one, an outage is noticed late. A runtime that isn't driven while it
    /// connects keeps its place in the pool, so the pool should have room for one connection more than there are
    /// runtimes.
    ///
    /// When a connection from a pool breaks, it isn't known whether a call was written before. So after a second of
    /// idleness a PING checks first whether the other side has closed it, which costs a round trip.
    ///
    /// The pool sets TCP_NODELAY: see [`Manager::new_with_config`](deadpool_redis::Manager::new_with_config).
    #[cfg(feature = "redis-rs")]
    #[must_use]
    pub fn with_pool(pool: Pool) -> Self {
        Self::new(Connector::Pool(pool), "the pool's address".into(), None)
    }

    fn new(connector: Connector, address: String, confirm: Option<Confirm>) -> Self {
        let shared = Shared {
            connector,
            address,
            runtimes: ArcSwap::default(),
            made: AtomicU64::new(0),
            process: Lock::default(),
            restarts: AtomicU64::new(0),
            confirm,
        };
        Self { shared: Arc::new(shared) }
    }

    fn confirms(&self, left: Duration) -> Option<Confirm> {
        self.shared.confirm.map(|confirm| confirm.before(left))
    }

    /// A redis-rs client for the same Redis (with Sentinels, for the current primary), for work other than decisions, by
    /// the address's user and password alone: neither [credentials](crate::RedisBuilder::credentials) nor a
    /// [connector](crate::RedisBuilder::connector) of the builder's are used.
    ///
    /// # Errors
    ///
    /// The Sentinels name no primary by the deadline, or there is no runtime to ask them on. The caller's own pool,
    /// which doesn't reveal its address.
    #[cfg(feature = "redis-rs")]
    pub async fn client(&self, deadline: Duration) -> Result<Client, Error> {
        match &self.shared.connector {
            Connector::Address(endpoint) => endpoint.client().map_err(|error| unusable(&error.to_string())),
            Connector::Pool(_) => Err(unusable("expected a Redis that was opened by address, got a pool")),
            Connector::Sentinels(sentinels) => {
                // In a task of its own, since it needs a runtime with I/O.
                runtime::with_timers()?;
                let (sentinels, mut looking) = (Arc::clone(sentinels), JoinSet::new());
                looking.spawn(async move { sentinels.primary().await });
                let found = runtime::timeout_at(Deadline::after(deadline).at, looking.join_next()).await.flatten();
                let found = found.unwrap_or_else(|| Ok(Err(Error::deadline(deadline, false))));
                let (primary, _) = found.unwrap_or_else(|ended| Err(connecting::interrupted(ended)))?;
                primary.client().map_err(|error| unusable(&error.to_string()))
            }
        }
    }

    /// The name under which Sentinels know the primary, and a redis-rs client for each Sentinel in the address. None
    /// without Sentinels. Unstable: for the tool.
    #[cfg(feature = "redis-rs")]
    #[doc(hidden)]
    #[must_use]
    pub fn sentinels(&self) -> Option<(&str, Vec<Client>)> {
        match &self.shared.connector {
            Connector::Sentinels(sentinels) => Some(sentinels.themselves()),
            Connector::Address(_) | Connector::Pool(_) => None,
        }
    }

    /// The address for messages: without user and password.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.shared.address
    }

    pub(super) fn remote_address(&self) -> Option<String> {
        match &self.shared.connector {
            Connector::Address(endpoint) => endpoint.remote(),
            #[cfg(feature = "redis-rs")]
            Connector::Pool(_) => Some(self.shared.address.clone()),
            Connector::Sentinels(sentinels) => sentinels.remote_address(),
        }
    }

    /// The breaker's state. Each runtime has its own connection and so its own breaker; if any of them isn't closed,
    /// this isn't either.
    #[must_use]
    pub fn breaker(&self) -> BreakerState {
        let mut breakers = self.runtimes().into_iter().map(|per_runtime| per_runtime.breaker.current());
        breakers.find(|breaker| *breaker != BreakerState::Closed).unwrap_or(BreakerState::Closed)
    }

    /// Connections made so far: one for each runtime that asks, and another each time one broke, was given up, or was
    /// tried beside a silent one. Failed attempts don't count.
    #[must_use]
    pub fn connections(&self) -> u64 {
        self.shared.made.load(Ordering::Relaxed)
    }

    /// How often a new connection found a different server process than the last one did: a restarted one, or another
    /// in its place. State that the new process doesn't have starts anew. 0 if the user may not run INFO.
    #[must_use]
    pub fn restarts(&self) -> u64 {
        self.shared.restarts.load(Ordering::Relaxed)
    }
}

fn unusable(why: &str) -> Error {
    Error::new(Kind::Input, format!("url: {why}"))
}
