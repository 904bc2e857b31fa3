//! A rate limiter for async Rust services: every decision is one atomic Lua script on Redis.
//!
//! ```
//! # #[cfg(feature = "embedded")]
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use tollgate::{Embedded, Limiter, Rule};
//!
//! // Redis::open("redis://127.0.0.1/")? in a service; the embedded engine runs the same scripts without one.
//! let limiter = Limiter::new(Embedded::new());
//! let rule = Rule::new("api", "token-bucket 5/10s")?;
//!
//! let decision = limiter.acquire(&rule, "user:42").await?;
//! assert!(decision.allowed);
//! assert_eq!(decision.remaining, 4);
//! # Ok(())
//! # }
//! # #[cfg(not(feature = "embedded"))]
//! # fn main() {}
//! ```
//!
//! The [guide] begins with the choice of a limit and has [answers to frequent questions](guide::faq); [operations] is
//! about the Redis that decides, and [`operations::runbook`] is for whoever is on call.
//!
//! # Calls
//!
//! | call | does |
//! | --- | --- |
//! | `acquire_by` (feature `rules`) | finds the rule of a [file of rules](rules#the-file) that applies to a request, and decides by it; `WatchedRules` reload their file as it changes |
//! | [`acquire`](Limiter::acquire) | takes the cost now, or is denied and takes nothing |
//! | [`acquire_many`](Limiter::acquire_many) | the same of many requests at once |
//! | [`acquire_all`](Limiter::acquire_all) | several calls, each by its own rule and key, as one: all are allowed, or nothing is taken |
//! | [`acquire_owned`](Limiter::acquire_owned) | `acquire` for `tokio::spawn`: a future that owns what it needs |
//! | [`peek`](Limiter::peek) | answers as `acquire` would, taking nothing |
//! | [`reserve`](Limiter::reserve) | takes the cost for later, into debt down to the rule's `max-debt`: allowed, after a wait |
//! | [`at_most`](Limiter::at_most) | takes what is available, up to the cost, and says how much |
//! | [`refund`](Limiter::refund) | gives units back, never above full |
//! | [`penalty`](Limiter::penalty) | takes the cost whether it is available or not |
//! | [`block`](Limiter::block), [`unblock`](Limiter::unblock) | denies every call on the key for a time, whatever remains; lifts the block |
//! | [`settle`](Limiter::settle) | replaces the cost of an earlier call, named by its id, with what it really used |
//! | [`cancel`](Limiter::cancel) | gives back what an earlier call took, and forgets its id |
//! | [`acquire_wait`](Limiter::acquire_wait) | sleeps until the cost is available, in order, up to a bound |
//! | [`hold`](Limiter::hold), [`hold_wait`](Limiter::hold_wait) | takes a permit, which is given back when it is dropped; `renew` and `release` do it by id |
//! | [`lease`](Limiter::lease) | takes units of a hot limit in batches and spends them in the process, never above the rule |
//! | [`reset`](Limiter::reset), [`reset_all`](Limiter::reset_all) | forgets what each of the rule's limits counted for the request, or every key of a rule |
//! | [`inspect`](Limiter::inspect) | explains a key's state |
//!
//! A call with an [id](Request::id) is charged once however often it is sent, so one that got no answer can be sent
//! again. A limiter is cheap to clone and shares one connection for each runtime (on a cluster, one to each node).
//! [`Engine::open`] takes any address: `redis://`, `unix://`, `redis-sentinel://host:26379,.../primary`,
//! `redis-cluster://host:7000,...`. Keys are any bytes.
//!
//! The system of record on PostgreSQL is the crate `tollgate-record`, the command-line tool `tollgate-cli`. The layout
//! of the source, and the path of a decision through it, are in the repository's `ARCHITECTURE.md`.

#![cfg_attr(docsrs, feature(doc_cfg))]

mod algorithm;
mod background;
mod backoff;
mod batch;
mod call;
mod decision;
mod denial_cache;
mod engine;
mod error;
pub mod guide;
mod key;
mod limit;
mod limiter;
mod lock;
#[cfg(feature = "http")]
pub mod middleware;
mod operation;
mod quota;
mod random;
mod request;
mod rule;
#[cfg(feature = "rules")]
pub mod rules;
mod runtime;
mod script;
#[cfg(all(test, feature = "embedded"))]
mod simulation;
mod single_flight;
mod telemetry;
mod wall_clock;

// The pages on operations are read in the repository too, where their last lines define the targets of their links.
// Here the definitions below come first, so that the links lead to this documentation.
/// [runbook]: crate::operations::runbook
/// [backup]: crate::operations::backup
/// [conf]: #a-redisconf-to-start-from
/// [scripts]: crate::Script
/// [changing]: crate::guide#changing-a-rule
/// [shards]: crate::guide#shards
/// [nodes]: crate::guide::load#keys-on-several-nodes
/// [metrics]: crate::guide#metrics-and-traces
/// [losses]: #faults
///
#[doc = include_str!("operations.md")]
///
/// ```text
#[doc = include_str!("../examples/redis.conf")]
/// ```
pub mod operations {
    /// [units]: crate::operations#what-can-be-lost-in-units
    /// [backup]: crate::operations::backup
    /// [conf]: crate::operations#a-redisconf-to-start-from
    /// [user]: crate::operations#the-smallest-user
    /// [tls]: crate::operations#tls
    /// [failover]: crate::operations#how-long-a-failover-takes
    /// [forgets]: crate::operations#what-a-failover-forgets
    /// [servers]: crate::operations#which-server
    /// [several]: crate::operations#more-than-one-redis
    /// [mistakes-in-rules-or-code]: crate::operations::limits#mistakes-in-rules-or-code
    /// [rules-refused]: crate::operations::limits#rules-refused
    /// [permits-lost-or-overdue]: crate::operations::limits#permits-lost-or-overdue
    /// [background-calls-dropped]: crate::operations::limits#background-calls-dropped
    /// [costs-not-settled]: crate::operations::limits#costs-not-settled
    /// [a-pause-not-recorded]: crate::operations::limits#a-pause-not-recorded
    /// [limits]: crate::operations::limits
    /// [record]: https://docs.rs/tollgate-record/latest/tollgate_record/operations/runbook/
    /// [alerts]: crate::guide#metrics-and-traces
    /// [fields]: https://docs.rs/tollgate/latest/tollgate/rules/#fields
    /// [policy]: crate::guide#choosing-a-failure-policy
    ///
    #[doc = include_str!("operations/runbook.md")]
    pub mod runbook {}

    /// [runbook]: crate::operations::runbook
    /// [error-classes]: crate::operations::runbook#error-classes
    /// [policy]: crate::operations::runbook#the-failure-policy
    /// [changes]: crate::guide::changes#changing-a-rule
    /// [clock-steps]: crate::operations::runbook#clock-steps
    /// [evictions]: crate::operations::runbook#evictions
    /// [latency]: crate::operations::runbook#latency
    ///
    #[doc = include_str!("operations/limits.md")]
    pub mod limits {}

    #[doc = include_str!("operations/backup.md")]
    pub mod backup {}
}

/// How connections to Redis are opened and logged in, where an address doesn't say it: streams of the caller's own, and
/// credentials that expire; see [`RedisBuilder`].
pub mod connect {
    pub use crate::engine::redis::connect::{Connect, Stream, StreamFuture};
    pub use crate::engine::redis::credentials::{CredentialError, CredentialFuture, CredentialSource, Credentials};
}

#[cfg(feature = "deadpool-redis")]
pub use deadpool_redis;
#[cfg(feature = "redis-rs")]
pub use redis;

pub use algorithm::Algorithm;
pub use decision::{
    Balance, DecidedBy, Decision, Decisions, Denied, LimitBalance, LimitDecision, LimitDecisions, RetryAfter,
};
pub use denial_cache::DenialCache;
pub use engine::Engine;
pub use engine::builder::RedisBuilder;
pub use engine::cluster::Cluster;
#[cfg(feature = "embedded")]
pub use engine::embedded::{Clock, Embedded};
pub use engine::redis::Redis;
pub use engine::redis::breaker::BreakerState;
#[cfg(feature = "tls")]
pub use engine::redis::tls::Tls;
pub use error::{Charged, Error, ErrorKind, RuleError};
pub use key::KeySecret;
pub use limit::{CalendarUnit, Limit, LimitBuilder, MaxDebt, WindowStart};
pub use limiter::hold::{HoldDecision, Permit};
pub use limiter::lease::Lease;
pub use limiter::{Deciding, KeyState, Limiter, LimiterBuilder, ResetProgress};
pub use operation::Operation;
pub use request::{OwnedRequest, Request};
pub use rule::{IntoRule, OnChange, OnError, Rule};
pub use script::Script;
#[cfg(feature = "metrics")]
pub use telemetry::describe_metrics;
