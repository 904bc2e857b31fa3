//! The primary that Sentinels know of, by redis-rs's client of theirs.

use std::fmt;

#[cfg(feature = "tls")]
use deadpool_redis::redis::TlsMode;
use deadpool_redis::redis::sentinel::{SentinelClient, SentinelClientBuilder, SentinelServerType};
use deadpool_redis::redis::{Client, ConnectionInfo, ErrorKind, RedisError};
use futures_util::future::select_ok;
use tokio::sync::Mutex;

use super::address::Watched;
use super::unusable;
use crate::error::{Error, Kind};

/// One client for each Sentinel, so that all are asked at once: a dead one delays nobody.
pub(super) struct Sentinels {
    each: Vec<Mutex<SentinelClient>>,
    watched: Watched,
}

impl fmt::Debug for Sentinels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sentinels({})", self.watched)
    }
}

impl Sentinels {
    pub(super) fn new(watched: Watched) -> Result<Self, Error> {
        let each = watched.sentinels.iter().map(|sentinel| client(sentinel, &watched).map(Mutex::new));
        let each = each.collect::<Result<_, _>>().map_err(|error| unusable(&error.to_string()))?;
        Ok(Self { each, watched })
    }

    /// How to connect to the primary: where the first Sentinel to answer says, if who is there says the same of itself.
    pub(super) async fn primary(&self) -> Result<Client, Error> {
        let lookups = self.each.iter().map(|client| Box::pin(async { client.lock().await.async_get_client().await }));
        let found = select_ok(lookups).await.map_err(|error| self.told(&error))?.0;
        let there = self.watched.primary.clone().set_addr(found.get_connection_info().addr().clone());
        Client::open(there).map_err(|error| self.told(&error))
    }

    pub(super) fn themselves(&self) -> (&str, Vec<Client>) {
        let clients = self.watched.sentinels.iter().filter_map(|sentinel| Client::open(sentinel.clone()).ok());
        (&self.watched.name, clients.collect())
    }

    fn told(&self, error: &RedisError) -> Error {
        if error.kind() == ErrorKind::MasterNameNotFoundBySentinel {
            let why = "they know of none by this name that is up";
            return Error::new(Kind::Unreachable, format!("no {}: {why}", self.watched));
        }
        super::errors::from_connecting(error, &self.watched.to_string())
    }
}

fn client(sentinel: &ConnectionInfo, watched: &Watched) -> Result<SentinelClient, RedisError> {
    let (of_sentinel, of_primary) = (sentinel.redis_settings(), watched.primary.redis_settings());
    let at = [sentinel.addr().clone()];
    let mut builder = SentinelClientBuilder::new(at, &watched.name, SentinelServerType::Master)?
        .set_client_to_sentinel_protocol(of_sentinel.protocol())
        .set_client_to_redis_protocol(of_primary.protocol())
        .set_client_to_redis_db(of_primary.db());
    if let Some(user) = of_sentinel.username() {
        builder = builder.set_client_to_sentinel_username(user);
    }
    if let Some(password) = of_sentinel.password() {
        builder = builder.set_client_to_sentinel_password(password);
    }
    if let Some(user) = of_primary.username() {
        builder = builder.set_client_to_redis_username(user);
    }
    if let Some(password) = of_primary.password() {
        builder = builder.set_client_to_redis_password(password);
    }
    #[cfg(feature = "tls")]
    if super::by_tls(&watched.primary) {
        builder = builder.set_client_to_redis_tls_mode(TlsMode::Secure);
        if let Some(certificates) = &watched.tls {
            builder = builder.set_client_to_redis_certificates(certificates.clone());
        }
    }
    builder.build()
}
