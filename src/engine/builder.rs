//! Opens engines on servers with settings of the caller's own.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::Engine;
use super::cluster::Cluster;
use super::redis::connect::{self, Connect};
use super::redis::credentials::{Asked, CredentialSource};
use super::redis::settings::Settings;
#[cfg(feature = "tls")]
use super::redis::tls::Tls;
use super::redis::{Confirm, Redis, address};
use crate::error::Error;

/// Settings for the connections to a Redis, a cluster, or what Sentinels name, which is then opened by its address.
///
/// ```no_run
/// # fn main() -> Result<(), tollgate::Error> {
/// use std::time::Duration;
/// use tollgate::{Limiter, Redis};
///
/// let redis = Redis::builder().confirmed_by(1, Duration::from_millis(50)).open("redis://redis.internal")?;
/// let limiter = Limiter::new(redis);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Default)]
pub struct RedisBuilder {
    settings: Settings,
}

impl Redis {
    /// Settings other than those of an address: [`Redis::open`] has none of them.
    #[must_use]
    pub fn builder() -> RedisBuilder {
        RedisBuilder::default()
    }
}

impl RedisBuilder {
    /// Trusts these authorities, and presents this certificate, at a TLS address: `rediss://`, `rediss-cluster://` or
    /// `rediss-sentinel://`. Default: the platform's authorities, and no certificate.
    ///
    /// If the program has set no [`CryptoProvider`](rustls::crypto::CryptoProvider) by the first decision, it will be
    /// aws-lc-rs.
    #[cfg(feature = "tls")]
    #[must_use]
    pub fn tls(mut self, tls: &Tls) -> Self {
        self.settings.tls = Some(tls.clone());
        self
    }

    /// Asks for user and password at each new connection, in place of the address's. Of Sentinels, that is the login at
    /// the primary; of a cluster, at each node.
    #[must_use]
    pub fn credentials(mut self, source: impl CredentialSource + 'static) -> Self {
        self.settings.credentials = Asked::of(source);
        self
    }

    /// Opens the streams to all servers. Default: TCP.
    #[must_use]
    pub fn connector(mut self, connector: impl Connect + 'static) -> Self {
        self.settings.connector = Arc::new(connect::Own(connector));
        self
    }

    /// Returns an allowed decision only once this many replicas have what it took, so that a failover to one of them
    /// doesn't forget it. The primary is asked to WAIT for them, in the same pipeline and for at most `within`. If
    /// fewer have it by then, the call ends in an [error](crate::ErrorKind::Unconfirmed) that says
    /// [charged](Error::charged), and the rule's policy answers. Default: 0, no waiting.
    ///
    /// Costs the round trip from the primary to its replicas. Redis waits on the shared connection, so while replicas
    /// are missing each batch of calls holds up the next, denials too, and most calls end at their deadline or through
    /// the [breaker](Redis::breaker), with the charge unknown. Redis may notice up to 100 ms late that the time is
    /// over, so `within` is cut to half of the remaining time less 100 ms, or to a quarter of the remaining time if
    /// that is more. For calls sent together, the latest deadline counts. Calls that only look or give back, and
    /// [blocks](crate::Limiter::block), wait only where they are sent with others that take.
    #[must_use]
    pub fn confirmed_by(mut self, replicas: u8, within: Duration) -> Self {
        self.settings.confirm = Confirm::by(replicas, within);
        self
    }

    /// The Redis at this address, as [`Redis::open`] has it. Connects later.
    ///
    /// # Errors
    ///
    /// Those of [`Redis::open`]; with [`tls`](Self::tls), an address that isn't a TLS address.
    pub fn open(&self, url: &str) -> Result<Redis, Error> {
        Redis::with(url, &self.settings)
    }

    /// The cluster at this address, as [`Cluster::open`] has it. Connects later.
    ///
    /// # Errors
    ///
    /// Those of [`Cluster::open`]; with [`tls`](Self::tls), an address that isn't a TLS address.
    pub fn open_cluster(&self, url: &str) -> Result<Cluster, Error> {
        Cluster::with(url, &self.settings)
    }

    /// The engine at any address, as [`Engine::open`] has it. Connects later.
    ///
    /// # Errors
    ///
    /// Those of [`open`](Self::open) and [`open_cluster`](Self::open_cluster).
    pub fn open_engine(&self, url: &str) -> Result<Engine, Error> {
        match address::is_of_cluster(url) {
            true => self.open_cluster(url).map(Engine::from),
            false => self.open(url).map(Engine::from),
        }
    }
}

/// Credentials and what opens streams are the caller's, and stay out of logs.
impl fmt::Debug for RedisBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("RedisBuilder");
        #[cfg(feature = "tls")]
        shown.field("tls", &self.settings.tls);
        shown.field("confirm", &self.settings.confirm).finish_non_exhaustive()
    }
}
