//! One Redis, by EVALSHA over one connection that all callers of a runtime share.
//!
//! redis-rs pipelines the calls of all tasks over it. A connection out of a pool of the caller's is kept, since getting one
//! costs a round trip each time. Where Sentinel says which Redis it is, a broken one is replaced by one to the primary of
//! then.

pub(crate) mod address;
pub(crate) mod breaker;
mod commands;
mod connecting;
mod dispatch;
mod errors;
mod exchange;
mod link;
mod local;
mod queue;
mod sending;
mod sentinel;
mod sweep;
#[cfg(feature = "tls")]
pub(crate) mod tls;
mod transport;

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use arc_swap::ArcSwap;
use deadpool_redis::Pool;
use redis::Client;

use super::deadline::{Deadline, LONGEST_DEADLINE};
use crate::error::{Error, Kind};
use crate::script::{Call, Reply};
use address::{Endpoint, address};
use breaker::Breaker;
pub(crate) use dispatch::{Many, Queued};
use local::Local;
pub(super) use sending::{Asking, Confirm};
use sentinel::Sentinels;
#[cfg(feature = "tls")]
use tls::Tls;

/// A Redis (7.0 or newer) or Valkey (7.2 or newer), by address, by its Sentinels, or by a pool of the caller's own.
///
/// Connects at the first decision, and again after the connection broke.
#[derive(Clone, Debug)]
pub struct Redis {
    shared: Arc<Shared>,
}

struct Shared {
    connector: Connector,
    /// Where that leads to, for messages.
    address: String,
    /// Read by every call, so without a lock.
    locals: ArcSwap<Vec<Arc<Local>>>,
    made: AtomicU64,
    /// Which server process answered last, by its own name for itself.
    process: Mutex<Option<String>>,
    restarts: AtomicU64,
    confirm: OnceLock<Confirm>,
}

/// How it is connected to.
enum Connector {
    Address(Box<Endpoint>),
    /// By a pool of the caller's.
    Pool(Pool),
    Sentinels(Box<Sentinels>),
}

impl fmt::Debug for Shared {
    /// Nothing of the pool, which knows the password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("address", &self.address).finish_non_exhaustive()
    }
}

impl Redis {
    /// The Redis at `redis://[user:password@]host[:port][/db]`, `unix:///path/of.sock`, with `?protocol=resp3` at
    /// will; or the primary of this name that the Sentinels know of (one of them suffices, as long as it is up) at
    /// `redis-sentinel://[user:password@]host[:port][,host[:port]...]/primary[/db]`. Connects later.
    ///
    /// User and password are the primary's; the Sentinels' own are `?sentinel-user=...&sentinel-password=...`. The primary
    /// is looked up whenever a connection has broken, was given up or has turned out to be a replica's, and it must say
    /// of itself that it is one.
    ///
    /// With the feature `tls` also at `rediss://...` and `rediss-sentinel://...`, if its certificate is for this host and
    /// by one of the platform's authorities; `open_with_tls` says otherwise.
    ///
    /// # Errors
    ///
    /// An address that can't be read, or one that ends in `#insecure`: no certificate goes unchecked.
    pub fn open(url: &str) -> Result<Self, Error> {
        if address::is_of_sentinels(url) {
            return Self::watched(address::sentinels(url)?);
        }
        Self::at(address(url)?)
    }

    /// The Redis at `rediss://...` or `rediss-sentinel://...`, with authorities or a client's certificate of the caller's
    /// own. Connects later.
    ///
    /// Where the program has set no [`CryptoProvider`](rustls::crypto::CryptoProvider) by the first decision, it will be
    /// aws-lc-rs.
    ///
    /// # Errors
    ///
    /// An address that can't be read, or that isn't one of TLS.
    #[cfg(feature = "tls")]
    pub fn open_with_tls(url: &str, tls: &Tls) -> Result<Self, Error> {
        if address::is_of_sentinels(url) {
            let mut watched = address::sentinels(url)?;
            watched.primary = watched.primary.by(tls, url)?;
            let sentinels = watched.sentinels.into_iter().map(|sentinel| sentinel.by(tls, url));
            watched.sentinels = sentinels.collect::<Result<_, _>>()?;
            return Self::watched(watched);
        }
        Self::at(address(url)?.by(tls, url)?)
    }

    pub(super) fn at(endpoint: Endpoint) -> Result<Self, Error> {
        Client::open(endpoint.info().clone()).map_err(|error| unusable(&error.to_string()))?;
        let address = endpoint.to_string();
        Ok(Self::new(Connector::Address(Box::new(endpoint)), address))
    }

    fn watched(watched: address::Watched) -> Result<Self, Error> {
        let address = watched.to_string();
        Ok(Self::new(Connector::Sentinels(Box::new(Sentinels::new(watched)?)), address))
    }

    /// The Redis that this pool connects to; [`deadpool_redis`](crate::deadpool_redis) is tollgate's own, so that versions
    /// can't differ. One connection is taken out of it and kept for each runtime that asks, and one more where that one falls
    /// silent: without room for it, that Redis is away is known late. A runtime that isn't driven while it connects keeps its
    /// place in the pool, so the pool should have room for one connection more than there are runtimes.
    ///
    /// Of a connection out of a pool it isn't known whether a call was written before it broke. So one that was idle for a
    /// second is asked by PING first, which costs a round trip, whether others have closed it meanwhile.
    ///
    /// TCP_NODELAY is the pool's to set: see [`Manager::new_with_config`](deadpool_redis::Manager::new_with_config).
    #[must_use]
    pub fn with_pool(pool: Pool) -> Self {
        Self::new(Connector::Pool(pool), "the pool's address".into())
    }

    fn new(connector: Connector, address: String) -> Self {
        let shared = Shared {
            connector,
            address,
            locals: ArcSwap::default(),
            made: AtomicU64::new(0),
            process: Mutex::default(),
            restarts: AtomicU64::new(0),
            confirm: OnceLock::new(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Lets an allowed call be an answer only when so many replicas have what it took, so that no failover to one of them
    /// forgets it: the primary is asked to WAIT for them, in the same pipeline and for so long at most. Where they are
    /// fewer by then, the call ends in an [error](Error::is_unconfirmed) that says [charged](Error::charged), and the
    /// rule's policy answers. Default: 0, none is waited for. Said once, before the first decision.
    ///
    /// Costs the round trip from the primary to its replicas. Redis waits on the connection that all share, so where
    /// replicas are missing each batch of calls holds up the next, denials too, and most end at their deadline or by the
    /// [breaker](Self::breaker), with the charge unknown. Redis may look up to 100 ms too late whether the time is over, so
    /// it is cut to half of the time that is left, less 100 ms, or a quarter of it if that is more. What gives back, and
    /// [blocks](crate::Limiter::block), isn't waited for.
    #[must_use]
    pub fn confirmed_by(self, replicas: u8, within: Duration) -> Self {
        self.confirm(Confirm::by(replicas, within));
        self
    }

    pub(super) fn confirm(&self, confirm: Option<Confirm>) {
        if let Some(confirm) = confirm {
            // A second call changes nothing.
            let _ = self.shared.confirm.set(confirm);
        }
    }

    fn confirms(&self, left: Duration) -> Option<Confirm> {
        self.shared.confirm.get().map(|confirm| confirm.before(left))
    }

    /// A client of redis-rs to the same Redis (to the primary of now, if it is found by Sentinels), for what isn't decided
    /// here.
    ///
    /// # Errors
    ///
    /// Sentinels that know of no primary by the deadline; a pool of the caller's own, which doesn't tell its address.
    pub async fn client(&self, deadline: Duration) -> Result<Client, Error> {
        match &self.shared.connector {
            Connector::Address(endpoint) => endpoint.client().map_err(|error| unusable(&error.to_string())),
            Connector::Pool(_) => Err(unusable("expected a Redis that was opened by address, got a pool")),
            Connector::Sentinels(sentinels) => {
                let found = tokio::time::timeout(deadline, sentinels.primary()).await;
                let (primary, _) = found.unwrap_or_else(|_| Err(Error::deadline(deadline, false)))?;
                primary.client().map_err(|error| unusable(&error.to_string()))
            }
        }
    }

    /// Where Sentinels find it: the name by which they know it, and a client of redis-rs to each that was named. None if it
    /// is found otherwise.
    #[must_use]
    pub fn sentinels(&self) -> Option<(&str, Vec<Client>)> {
        match &self.shared.connector {
            Connector::Sentinels(sentinels) => Some(sentinels.themselves()),
            Connector::Address(_) | Connector::Pool(_) => None,
        }
    }

    /// Where it is, for messages: without user and password.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.shared.address
    }

    /// Whether it is asked at present. Each runtime that asks has its own connection, and so its own view: here it isn't
    /// asked as soon as one of them doesn't.
    #[must_use]
    pub fn breaker(&self) -> Breaker {
        let mut breakers = self.locals().into_iter().map(|local| local.guard.look());
        breakers.find(|breaker| *breaker != Breaker::Closed).unwrap_or(Breaker::Closed)
    }

    /// Connections made so far: one for each runtime that asks, and one more for each time that one broke, was given up, or
    /// was tried beside a silent one. Attempts that came to nothing don't count.
    #[must_use]
    pub fn connections(&self) -> u64 {
        self.shared.made.load(Ordering::Relaxed)
    }

    /// How often a new connection found another server process than the last one did: restarted, or another in its
    /// place. What that doesn't remember starts anew. 0 if the user may not run INFO.
    #[must_use]
    pub fn restarts(&self) -> u64 {
        self.shared.restarts.load(Ordering::Relaxed)
    }

    pub(crate) async fn run(&self, call: &Call<'_>, deadline: Duration) -> Result<Reply, Error> {
        self.run_as(Asking::No, call, deadline).await
    }

    /// The same of a slot that is on its way to this node, or that it has.
    pub(super) async fn run_as(&self, asking: Asking, call: &Call<'_>, deadline: Duration) -> Result<Reply, Error> {
        let local = self.local()?;
        let _entry = local.guard.enter()?;
        let confirmed = call.mode.takes() && call.cost > 0;
        self.ask_one(&local, call, asking, confirmed, Deadline::after(deadline)).await
    }
}

fn unusable(why: &str) -> Error {
    Error::new(Kind::Input, format!("url: {why}"))
}
