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
mod server;
pub(super) mod settings;
mod shown_address;
mod silence;
mod spelling;
mod sweep;
mod texts;
#[cfg(feature = "tls")]
pub(crate) mod tls;
mod transport;
mod writing;

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

#[cfg(feature = "deadpool-redis")]
use deadpool_redis::Pool;
#[cfg(feature = "redis-rs")]
use redis::Client;

use crate::error::{Error, Kind};
use address::{Endpoint, address};
pub(crate) use breaker::Admission;
use breaker::BreakerState;
pub(super) use confirm::Confirm;
use connection::{Connection, Owner};
pub(crate) use dispatch::Many;
use per_runtime::{PerRuntime, Runtimes};
pub(super) use pipeline::Asking;
pub(crate) use queue::Waiting;
use server::Server;
use settings::Settings;

/// A Redis (7.0 or newer) or Valkey (7.2 or newer), given its address, its Sentinels, or the caller's own pool.
///
/// Connects at the first decision, and again after the connection breaks.
#[derive(Clone, Debug)]
pub struct Redis {
    shared: Arc<Shared>,
}

struct Shared {
    server: Server,
    runtimes: Runtimes,
    confirm: Option<Confirm>,
}

impl fmt::Debug for Shared {
    /// Shows nothing of the pool, which contains the password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("address", &self.server.address()).finish_non_exhaustive()
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
        let server = match address::is_of_sentinels(url) {
            true => Server::known_to(address::sentinels(url)?.with(settings, url)?)?,
            false => Server::at(address(url)?.with(settings, url)?)?,
        };
        Ok(Self::of(server, settings.confirm))
    }

    pub(super) fn at(endpoint: Endpoint, confirm: Option<Confirm>) -> Result<Self, Error> {
        Ok(Self::of(Server::at(endpoint)?, confirm))
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
    #[cfg(feature = "deadpool-redis")]
    #[must_use]
    pub fn with_pool(pool: Pool) -> Self {
        Self::of(Server::of_pool(pool), None)
    }

    fn of(server: Server, confirm: Option<Confirm>) -> Self {
        Self { shared: Arc::new(Shared { server, runtimes: Runtimes::default(), confirm }) }
    }

    /// Another connection, not yet used by any caller.
    async fn connect(&self) -> Result<Connection, Error> {
        self.shared.server.connect(Arc::downgrade(&self.shared) as Weak<dyn Owner>).await
    }

    /// The state of the runtime that this is called on.
    fn per_runtime(&self) -> Result<Arc<PerRuntime>, Error> {
        self.with_per_runtime(Arc::clone)
    }

    fn with_per_runtime<T>(&self, with: impl FnOnce(&Arc<PerRuntime>) -> T) -> Result<T, Error> {
        self.shared.runtimes.with_current(with)
    }

    fn confirms(&self, left: Duration) -> Option<Confirm> {
        self.shared.confirm.map(|confirm| confirm.before(left))
    }

    /// A redis-rs client for the same Redis (with Sentinels, for the current primary), for work other than decisions,
    /// by the address's user and password alone: neither [credentials](crate::RedisBuilder::credentials) nor a
    /// [connector](crate::RedisBuilder::connector) of the builder's are used.
    ///
    /// # Errors
    ///
    /// The Sentinels name no primary by the deadline, or there is no runtime to ask them on. The caller's own pool,
    /// which doesn't reveal its address.
    #[cfg(feature = "redis-rs")]
    pub async fn client(&self, deadline: Duration) -> Result<Client, Error> {
        self.shared.server.client(deadline).await
    }

    /// The name under which Sentinels know the primary, and a redis-rs client for each Sentinel in the address. None
    /// without Sentinels. Unstable: for the tool.
    #[cfg(feature = "redis-rs")]
    #[doc(hidden)]
    #[must_use]
    pub fn sentinels(&self) -> Option<(&str, Vec<Client>)> {
        self.shared.server.sentinels()
    }

    /// The address for messages: without user and password.
    #[must_use]
    pub fn address(&self) -> &str {
        self.shared.server.address()
    }

    pub(super) fn remote_address(&self) -> Option<String> {
        self.shared.server.remote_address()
    }

    /// The breaker's state. Each runtime has its own connection and so its own breaker; if any of them isn't closed,
    /// this isn't either.
    #[must_use]
    pub fn breaker(&self) -> BreakerState {
        let mut breakers = self.shared.runtimes.living().into_iter().map(|per_runtime| per_runtime.breaker.current());
        breakers.find(|breaker| *breaker != BreakerState::Closed).unwrap_or(BreakerState::Closed)
    }

    /// Connections made so far: one for each runtime that asks, and another each time one broke, was given up, or was
    /// tried beside a silent one. Failed attempts don't count.
    #[must_use]
    pub fn connections(&self) -> u64 {
        self.shared.server.connections()
    }

    /// How often a new connection found a different server process than the last one did: a restarted one, or another
    /// in its place. Keys that the new process doesn't have start unused. 0 if the user may not run INFO.
    #[must_use]
    pub fn restarts(&self) -> u64 {
        self.shared.server.restarts()
    }
}

fn unusable(why: &str) -> Error {
    Error::new(Kind::Input, format!("url: {why}"))
}
