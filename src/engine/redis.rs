//! One Redis, using EVALSHA over one connection that all callers of a runtime share.
//!
//! redis-rs pipelines all tasks' calls over it. A connection from a caller's pool is kept, since getting one costs a
//! round trip each time. If Sentinels name the Redis, a broken connection is replaced by one to the current primary.

pub(crate) mod address;
pub(crate) mod breaker;
mod commands;
mod connecting;
mod connection;
mod dispatch;
mod errors;
mod exchange;
mod per_runtime;
mod pipeline;
mod queue;
pub(super) mod redirect;
mod sentinel;
mod shown_address;
mod silence;
mod spelling;
mod sweep;
mod texts;
#[cfg(feature = "tls")]
pub(crate) mod tls;
mod transport;

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use arc_swap::ArcSwap;
use deadpool_redis::Pool;
use redis::Client;
use tokio::task::JoinSet;

use super::deadline::Deadline;
use crate::error::{Error, Kind};
use crate::lock::Lock;
use crate::runtime;
use address::{Endpoint, Sentinels, address};
pub(crate) use breaker::Admission;
use breaker::Breaker;
pub(crate) use dispatch::Many;
use per_runtime::PerRuntime;
pub(super) use pipeline::{Asking, Confirm};
pub(crate) use queue::Waiting;
#[cfg(feature = "tls")]
use tls::Tls;

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
    confirm: OnceLock<Confirm>,
}

/// How to connect.
enum Connector {
    Address(Box<Endpoint>),
    /// Through the caller's pool.
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
    /// this host and from one of the platform's authorities. `open_with_tls` changes the authorities.
    ///
    /// # Errors
    ///
    /// An address that can't be read, or has anything but the above, such as another option; the error doesn't show the
    /// password. One that ends in `#insecure`: certificates are always checked.
    pub fn open(url: &str) -> Result<Self, Error> {
        if address::is_of_sentinels(url) {
            return Self::behind(address::sentinels(url)?);
        }
        Self::at(address(url)?)
    }

    /// The Redis at `rediss://...` or `rediss-sentinel://...`, with the caller's own authorities or client certificate.
    /// Connects later.
    ///
    /// If the program has set no [`CryptoProvider`](rustls::crypto::CryptoProvider) by the first decision, it will be
    /// aws-lc-rs.
    ///
    /// # Errors
    ///
    /// An address that can't be read, or that isn't a TLS address.
    #[cfg(feature = "tls")]
    pub fn open_with_tls(url: &str, tls: &Tls) -> Result<Self, Error> {
        if address::is_of_sentinels(url) {
            let mut sentinels = address::sentinels(url)?;
            sentinels.primary = sentinels.primary.by(tls, url)?;
            sentinels.nodes = sentinels.nodes.into_iter().map(|node| node.by(tls, url)).collect::<Result<_, _>>()?;
            return Self::behind(sentinels);
        }
        Self::at(address(url)?.by(tls, url)?)
    }

    pub(super) fn at(endpoint: Endpoint) -> Result<Self, Error> {
        Client::open(endpoint.info().clone()).map_err(|error| unusable(&error.to_string()))?;
        let address = endpoint.to_string();
        Ok(Self::new(Connector::Address(Box::new(endpoint)), address))
    }

    fn behind(sentinels: Sentinels) -> Result<Self, Error> {
        sentinels.check()?;
        let address = sentinels.to_string();
        Ok(Self::new(Connector::Sentinels(Arc::new(sentinels)), address))
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
    #[must_use]
    pub fn with_pool(pool: Pool) -> Self {
        Self::new(Connector::Pool(pool), "the pool's address".into())
    }

    fn new(connector: Connector, address: String) -> Self {
        let shared = Shared {
            connector,
            address,
            runtimes: ArcSwap::default(),
            made: AtomicU64::new(0),
            process: Lock::default(),
            restarts: AtomicU64::new(0),
            confirm: OnceLock::new(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Returns an allowed decision only once this many replicas have what it took, so that a failover to one of them
    /// doesn't forget it. The primary is asked to WAIT for them, in the same pipeline and for at most `within`. If
    /// fewer have it by then, the call ends in an [error](Error::is_unconfirmed) that says [charged](Error::charged),
    /// and the rule's policy answers. Default: 0, no waiting. Set it once, before the first decision.
    ///
    /// Costs the round trip from the primary to its replicas. Redis waits on the shared connection, so while replicas
    /// are missing each batch of calls holds up the next, denials too, and most calls end at their deadline or through
    /// the [breaker](Self::breaker), with the charge unknown. Redis may notice up to 100 ms late that the time is over,
    /// so `within` is cut to half of the remaining time less 100 ms, or to a quarter of it if that is more: of calls
    /// sent together, of the one with the latest deadline. Calls that only look or give back, and
    /// [blocks](crate::Limiter::block), wait only if they are sent with others that take.
    #[must_use]
    pub fn confirmed_by(self, replicas: u8, within: Duration) -> Self {
        self.confirm(Confirm::by(replicas, within));
        self
    }

    pub(super) fn confirm(&self, confirm: Option<Confirm>) {
        if let Some(confirm) = confirm {
            // Only the first call has an effect.
            let _ = self.shared.confirm.set(confirm);
        }
    }

    fn confirms(&self, left: Duration) -> Option<Confirm> {
        self.shared.confirm.get().map(|confirm| confirm.before(left))
    }

    /// A redis-rs client for the same Redis (with Sentinels, for the current primary), for work other than decisions.
    ///
    /// # Errors
    ///
    /// The Sentinels name no primary by the deadline, or there is no runtime to ask them on. The caller's own pool, which
    /// doesn't reveal its address.
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
    /// without Sentinels.
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
            Connector::Pool(_) => Some(self.shared.address.clone()),
            Connector::Sentinels(sentinels) => sentinels.remote_address(),
        }
    }

    /// The breaker's state. Each runtime has its own connection and so its own breaker; if any of them isn't closed, this
    /// isn't either.
    #[must_use]
    pub fn breaker(&self) -> Breaker {
        let mut breakers = self.runtimes().into_iter().map(|per_runtime| per_runtime.breaker.current());
        breakers.find(|breaker| *breaker != Breaker::Closed).unwrap_or(Breaker::Closed)
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
