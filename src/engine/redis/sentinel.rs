//! The primary that Sentinels know of, by redis-rs's client of theirs.

use std::fmt;

#[cfg(feature = "tls")]
use deadpool_redis::redis::TlsMode;
use deadpool_redis::redis::sentinel::{SentinelClient, SentinelClientBuilder, SentinelServerType};
use deadpool_redis::redis::{Client, ConnectionInfo, ErrorKind, RedisError, Value, cmd};
use futures_util::stream::{self, StreamExt};

use super::address::Watched;
use super::errors::from_connecting;
use super::unusable;
use crate::error::{Error, Kind};

/// All Sentinels are asked at once, so that a dead one delays nobody, and each by a connection of its own: one that was kept
/// would be driven by the runtime that made it.
pub(super) struct Sentinels {
    watched: Watched,
}

impl fmt::Debug for Sentinels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sentinels({})", self.watched)
    }
}

impl Sentinels {
    pub(super) fn new(watched: Watched) -> Result<Self, Error> {
        for sentinel in &watched.sentinels {
            client(sentinel, &watched).map_err(|error| unusable(&error.to_string()))?;
        }
        Ok(Self { watched })
    }

    /// How to connect to the primary: where the first Sentinel to answer says, if who is there says the same of itself.
    /// If none does and one was refused, that is why: nobody takes a wrong password for an outage because another
    /// Sentinel is down.
    pub(super) async fn primary(&self) -> Result<Client, Error> {
        let lookups = (0..self.watched.sentinels.len()).map(|at| self.lookup(at));
        let mut lookups = stream::iter(lookups).buffer_unordered(self.watched.sentinels.len());
        let mut why = None;
        while let Some(found) = lookups.next().await {
            match found {
                Ok(found) => {
                    let there = self.watched.primary.clone().set_addr(found.get_connection_info().addr().clone());
                    return Client::open(there).map_err(|error| self.told(&error));
                }
                Err(_) if why.as_ref().is_some_and(Error::is_authentication) => {}
                Err(error) => why = Some(error),
            }
        }
        Err(why.unwrap_or_else(|| Error::new(Kind::Unreachable, format!("no {}", self.watched))))
    }

    async fn lookup(&self, at: usize) -> Result<Client, Error> {
        let sentinel = &self.watched.sentinels[at];
        let mut asked = client(sentinel, &self.watched).map_err(|error| self.told(&error))?;
        let error = match asked.async_get_client().await {
            Ok(found) => return Ok(found),
            Err(error) => self.told(&error),
        };
        if !error.is_authentication() {
            return Err(error);
        }
        // redis-rs doesn't say whether the Sentinel refused or the primary.
        Err(self.refused(sentinel).await.unwrap_or(error))
    }

    /// What this Sentinel says if it is the one that refuses.
    async fn refused(&self, sentinel: &ConnectionInfo) -> Option<Error> {
        let asked = async {
            let client = Client::open(sentinel.clone())?;
            let mut connection = client.get_multiplexed_async_connection().await?;
            cmd("SENTINEL").arg("GET-MASTER-ADDR-BY-NAME").arg(&self.watched.name).query_async(&mut connection).await
        };
        let answer: Result<Value, RedisError> = asked.await;
        let error = from_connecting(&answer.err()?, &format!("sentinel {}", sentinel.addr()));
        error.is_authentication().then_some(error)
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
        from_connecting(error, &self.watched.to_string())
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
