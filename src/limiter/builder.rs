//! What a limiter is made from.

use std::sync::Arc;
use std::time::Duration;

use super::handle::Limiter;
#[cfg(feature = "embedded")]
use super::local_engine::LocalEngine;
use super::server_clock::ServerClock;
use crate::background::Background;
use crate::denial_cache::DenialCache;
use crate::engine::Engine;
use crate::error::Error;
use crate::key::{self, KeySecret};
use crate::rule::OnError;

/// Makes a [`Limiter`]: see [`Limiter::builder`] and [`Limiter::to_builder`].
///
/// ```
/// use std::time::Duration;
/// use tollgate::{Limiter, OnError, Redis};
///
/// let redis = Redis::open("redis://127.0.0.1/")?;
/// let deadline = Duration::from_millis(100);
/// let limiter = Limiter::builder(redis).prefix("shop")?.deadline(deadline).on_error(OnError::Open).build();
/// # Ok::<(), tollgate::Error>(())
/// ```
#[derive(Clone, Debug)]
#[must_use = "a builder makes nothing before `build`"]
pub struct LimiterBuilder(Limiter);

impl Limiter {
    /// A limiter on this engine with the defaults: prefix `tollgate`, deadline 500 ms, and an error while Redis is
    /// unreachable. Sends nothing; the first call connects.
    pub fn new(engine: impl Into<Engine>) -> Self {
        Self::builder(engine).build()
    }

    /// For a limiter on this engine with settings of its own.
    pub fn builder(engine: impl Into<Engine>) -> LimiterBuilder {
        LimiterBuilder(Self {
            engine: engine.into(),
            prefix: "tollgate".into(),
            deadline: Duration::from_millis(500),
            on_error: OnError::Closed,
            denials: None,
            key_secret: None,
            background: Background::default(),
            releases: Arc::default(),
            reservations: Arc::default(),
            server_clock: ServerClock::default(),
            #[cfg(feature = "embedded")]
            local: LocalEngine::default(),
        })
    }

    /// For a limiter with other settings that shares the rest with this one, as a clone does: connections, cached
    /// denials, and what is decided in this process while Redis is unreachable.
    pub fn to_builder(&self) -> LimiterBuilder {
        LimiterBuilder(self.clone())
    }
}

impl LimiterBuilder {
    /// The prefix of every key in Redis. Default: `tollgate`.
    ///
    /// # Errors
    ///
    /// An empty prefix, or one with braces.
    pub fn prefix(mut self, prefix: &str) -> Result<Self, Error> {
        self.0.prefix = key::checked_prefix(prefix)?.into();
        Ok(self)
    }

    /// How long a decision may take, connecting included, unless its request [says
    /// otherwise](crate::Request::deadline). After that the rule's [policy](crate::Rule::on_error) answers;
    /// [`Error::charged`] says whether the units may have been taken. Default: 500 ms.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.0.deadline = deadline;
        self
    }

    /// The answer while Redis is unreachable, for rules that [don't set one](crate::Rule::on_error). Default:
    /// [closed](OnError::Closed), which returns the error. Under `Local`, a rule with less than one unit for each of
    /// its processes is closed too.
    pub fn on_error(mut self, on_error: OnError) -> Self {
        self.0.on_error = on_error;
        self
    }

    /// Denies in this process what Redis has just denied. Limiters with the same Redis and prefix may share a cache.
    /// Default: none.
    pub fn denial_cache(mut self, cache: DenialCache) -> Self {
        self.0.denials = Some(cache);
        self
    }

    /// Hashes keys, parts and tags with this secret, for rules that don't say [otherwise](crate::Rule::hash_keys).
    /// Redis then stores and shows only the first 128 bits of their HMAC-SHA256. All limiters that count together need
    /// the same secret; a new secret starts every key afresh. Ids aren't hashed. Costs no round trip, and some 0.3 µs.
    /// Default: none; keys are stored as given.
    pub fn key_secret(mut self, secret: &KeySecret) -> Self {
        self.0.key_secret = Some(secret.clone());
        self
    }

    /// The limiter. Sends nothing.
    #[must_use]
    pub fn build(self) -> Limiter {
        self.0
    }
}
