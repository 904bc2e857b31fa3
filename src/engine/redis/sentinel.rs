//! Finds the primary through Sentinels.

use std::time::Duration;

use futures_util::stream::{self, StreamExt};
use redis::{Client, RedisError, ServerErrorKind, Value, cmd};

use super::address::{Endpoint, Sentinels};
use super::errors::from_connecting;
use super::transport::{self, Opened};
use super::unusable;
use crate::error::{Error, ErrorKind, Kind};

/// How long a Sentinel may take to answer, connecting by TLS over a long distance included. After that, the others'
/// answers are used.
const PATIENCE: Duration = Duration::from_secs(3);

impl Sentinels {
    /// Whether all of these addresses can be connected to.
    pub(super) fn check(&self) -> Result<(), Error> {
        for endpoint in self.nodes.iter().chain([&self.primary]) {
            Client::open(endpoint.info().clone()).map_err(|error| unusable(&error.to_string()))?;
        }
        Ok(())
    }

    /// The primary, and a connection to it: at the address of the first Sentinel to answer, if the server there reports
    /// being a primary. If none works and one was refused, the refusal is returned, so that a wrong password isn't
    /// mistaken for an outage because another Sentinel is down.
    ///
    /// All are asked at once, so that a dead one delays no caller. Each is asked over a new connection: a kept one
    /// would be driven by the runtime that made it.
    pub(super) async fn primary(&self) -> Result<(Endpoint, Opened), Error> {
        let count = self.nodes.len();
        let mut lookups = stream::iter((0..count).map(|at| self.lookup(at))).buffer_unordered(count);
        let mut why = None;
        while let Some(found) = lookups.next().await {
            match found {
                Ok(found) => return Ok(found),
                Err(_) if why.as_ref().is_some_and(|why: &Error| why.kind() == ErrorKind::Authentication) => {}
                Err(error) => why = Some(error),
            }
        }
        Err(why.unwrap_or_else(|| self.absent("no Sentinel is named")))
    }

    async fn lookup(&self, at: usize) -> Result<(Endpoint, Opened), Error> {
        let sentinel = &self.nodes[at];
        let named = tokio::time::timeout(PATIENCE, self.ask(sentinel)).await;
        let named = named.unwrap_or_else(|_| Err(std::io::Error::from(std::io::ErrorKind::TimedOut).into()));
        let named = named.map_err(|error| from_connecting(&error, &format!("sentinel {sentinel}")))?;
        let Some((host, port)) = named else { return Err(self.absent("a Sentinel knows none by this name")) };
        let primary = self.primary.elsewhere(&host, port);
        let opened = async {
            let mut opened = transport::open(&primary).await?;
            let role = cmd("ROLE").query_async(&mut opened.connection).await;
            let role: Value = role.map_err(|error| opened.wire.refusal().unwrap_or(error))?;
            Ok((opened, role))
        };
        let (opened, role) = opened.await.map_err(|error: RedisError| match error.kind() {
            redis::ErrorKind::Server(ServerErrorKind::NoPerm) => Error::new(
                Kind::Permission,
                format!("redis doesn't let this user run 'role' (ACL SETUSER ... +role): {error}"),
            ),
            _ => from_connecting(&error, &self.to_string()),
        })?;
        match role {
            Value::Array(role) if role.first() == Some(&Value::BulkString(b"master".to_vec())) => Ok((primary, opened)),
            _ => Err(self.absent("the server that a Sentinel names is a replica")),
        }
    }

    /// Where this Sentinel locates the primary, if it knows one by this name.
    async fn ask(&self, sentinel: &Endpoint) -> Result<Option<(String, u16)>, RedisError> {
        let mut opened = transport::open(sentinel).await?;
        let mut question = cmd("SENTINEL");
        question.arg("GET-MASTER-ADDR-BY-NAME").arg(&self.name);
        let named = question.query_async(&mut opened.connection).await;
        named.map_err(|error| opened.wire.refusal().unwrap_or(error))
    }

    pub(super) fn remote_address(&self) -> Option<String> {
        self.nodes.iter().find_map(Endpoint::remote)
    }

    #[cfg(feature = "redis-rs")]
    pub(super) fn themselves(&self) -> (&str, Vec<Client>) {
        let clients = self.nodes.iter().filter_map(|sentinel| sentinel.client().ok());
        (&self.name, clients.collect())
    }

    fn absent(&self, why: &str) -> Error {
        Error::new(Kind::Unreachable, format!("no {self}: {why}"))
    }
}
