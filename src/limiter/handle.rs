//! A limiter as callers have it: what its calls share.

use std::sync::Arc;
use std::time::Duration;

#[cfg(feature = "embedded")]
use super::local_engine::LocalEngine;
use super::releases::Releases;
use super::reservations::Reservations;
use super::server_clock::ServerClock;
use crate::background::Background;
use crate::denial_cache::DenialCache;
use crate::engine::Engine;
use crate::key::KeySecret;
use crate::rule::{OnError, Rule};

/// Makes decisions. Cheap to clone, and shared between tasks by cloning or by reference.
///
/// Unless a method says otherwise, it costs one round trip to Redis. It costs two if the server has lost its scripts,
/// or if its clock has left [the calendar windows](crate::guide::algorithms#windows-of-the-calendar) that the call
/// names; and on a cluster if a limit's node denies, or grants less than, what [other
/// nodes](crate::guide::load#keys-on-several-nodes) have admitted at the same time. The first call also connects.
#[derive(Clone, Debug)]
pub struct Limiter {
    pub(super) engine: Engine,
    pub(super) prefix: Arc<str>,
    pub(super) deadline: Duration,
    pub(super) on_error: OnError,
    pub(super) denials: Option<DenialCache>,
    pub(super) key_secret: Option<KeySecret>,
    pub(super) background: Background,
    pub(super) releases: Arc<Releases>,
    pub(super) reservations: Arc<Reservations>,
    pub(super) server_clock: ServerClock,
    #[cfg(feature = "embedded")]
    pub(super) local: LocalEngine,
}

impl Limiter {
    /// The engine that decides.
    #[must_use]
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// The [prefix](crate::LimiterBuilder::prefix) of its keys in Redis.
    #[must_use]
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// How long a decision may take whose request sets no [deadline](crate::Request::deadline).
    #[must_use]
    pub fn deadline(&self) -> Duration {
        self.deadline
    }

    /// The rule's policy while Redis is unreachable.
    pub(super) fn policy(&self, rule: &Rule) -> OnError {
        rule.policy_or(self.on_error)
    }
}
