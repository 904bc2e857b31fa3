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
//! let rule = "token-bucket 5/10s".parse::<Rule>()?.named("api")?;
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
//! | [`peek`](Limiter::peek) | answers as `acquire` would, taking nothing |
//! | [`reserve`](Limiter::reserve) | takes the cost for later, into debt down to the rule's `max-debt`: allowed, after a wait |
//! | [`at_most`](Limiter::at_most) | takes what is available, up to the cost, and says how much |
//! | [`refund`](Limiter::refund) | gives units back, never above full |
//! | [`penalty`](Limiter::penalty) | takes the cost whether it is available or not |
//! | [`block`](Limiter::block), [`unblock`](Limiter::unblock) | denies every call on the key for a time, whatever remains; lifts that |
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
//! # Layout
//!
//! In reading order:
//!
//! - [`Algorithm`]: the algorithms, one row each; each has a script in `lua/`.
//! - [`Limit`]: an algorithm and its numbers, validated; its text form; its parts, if it is shared or has shards.
//! - [`Rule`]: a named limit, or several that are decided together; what its policy answers while Redis is unreachable.
//! - [`Request`]: whom a call is about, and what it takes.
//! - [`Operation`]: what a call asks for.
//! - [`Decision`]: the answer. [`Quota`]: what a limit admits, as its decisions report it. [`Error`]: why there is no
//!   answer.
//! - `key`: the format of keys in Redis.
//! - [`Script`]: a script's text and digest; `call`: one call of it, with its mode and its reply.
//! - [`Limiter`]: one call: rule + key + cost -> decision; and what extends it: many calls, shards, waiting (`wait`),
//!   permits for as long as a value lives (`hold`), units of a hot limit that are spent in the process (`lease`).
//! - `rules`: which rule applies to a request, from a file that is reloaded as it changes, or from a source of your own.
//! - `middleware`: HTTP services and clients under rules, and a decision's header fields. It knows where rules come from,
//!   where decisions go and who looks API keys up as traits of `rules`.
//! - `batch`: decisions that are made together. `denial_cache`: denials that are remembered in the process.
//! - `random`: jitter and random names. `backoff`: pauses between tries. `lock`: a mutex that a panic doesn't close.
//!   `single_flight`: work that many wait for and one does. `runtime`: timers, and work that outlasts its caller.
//!   `wall_clock`: this machine's time of day.
//! - `telemetry`: metrics and traces, of plain values.
//! - `engine`: the interface that runs a script, and its implementations: [`Redis`] (`Tls`: whom it trusts), a
//!   [`Cluster`] of them, and the embedded engine.
//! - `simulation`, of the unit tests: the client and its servers on a virtual network, by seeds.
//!
//! The system of record on PostgreSQL is the crate `tollgate-record`, the command-line tool `tollgate-cli`. Both use what
//! everybody may use of this one, which knows neither.
//!
//! # The path of an acquire
//!
//! What an acquire of one limit on one Redis passes through, by the function that is called and its file in `src/`:
//!
//! 1. `acquire` in `limiter.rs` makes the future, a [`Deciding`]; `decide` in `limiter/deciding.rs` chooses how it goes on.
//! 2. `poll` in `limiter/deciding.rs` looks for a remembered denial, if the limiter has a cache of them (`recall` in
//!    `limiter/cached_denials.rs`, and `remember` after 15), asks once, and waits.
//! 3. `ask` in `limiter/prepare.rs` takes the limit's numbers and the request's cost,
//! 4. `state_key` in `key.rs` spells the key.
//! 5. `acquire` in `engine.rs` chooses the engine;
//! 6. `acquire` in `engine/redis/dispatch.rs` finds the runtime's queue, whose breaker may refuse.
//! 7. `enter` in `engine/redis/queue.rs` puts the call into the batch that is being filled, under the one lock that a
//!    caller takes. While no other call is under way, it goes by itself instead: `by_itself` in `dispatch.rs`, `ask_one` in
//!    `exchange.rs`, then 10 to 12 and 15.
//! 8. `add` in `batch.rs` writes the call's numbers and key into the batch.
//! 9. `run` in `engine/redis/dispatch.rs` takes the batch and a connection, in a task of its own; its `send` sends again
//!    what certainly didn't run.
//! 10. `exchange` in `engine/redis/exchange.rs` sends the calls, and by their text those that the server doesn't know,
//! 11. `packed_command` in `engine/redis/pipeline.rs` writes each EVALSHA.
//! 12. `read` in `batch.rs` reads what the script answers: a record of each key and cost. `queue/in_flight.rs` wakes the
//!    callers.
//! 13. `poll` in `engine/redis/queue.rs` finds the caller's record,
//! 14. `reply` in `batch/records.rs` its own answer in that,
//! 15. `decision_of_ask` in `limiter/decide.rs` the [`Decision`].
//!
//! Whatever few calls need is behind one boxed call, from `decide` in `limiter/deciding.rs` to `decide_in_full` in
//! `limiter/decide.rs`: other operations, several limits, ids, two shards, windows that start by key, and rules that count
//! denials, block or say what a change does. What the rule's policy answers comes from `limiter/fallback.rs`.
//!
//! On a cluster, `acquire` in `engine/cluster.rs` finds the node that has the key's slot between 5 and 6, `ask` sends the
//! call there, and `after` follows a redirect.
//!
//! # Invariants
//!
//! - The core (`algorithm`, `batch`, `call`, `decision`, `error`, `key`, `limit`, `operation`, `quota`, `request`, `rule`,
//!   `script`)
//!   does no I/O, knows no async runtime, and names no feature but `serde`, and `embedded` where a rule's policy needs
//!   that engine.
//! - Arrows point to the core: `middleware` knows `rules`, these know the limiter, it knows engines, and they know scripts,
//!   never rules, and never each other, except that a cluster consists of nodes that are each a `Redis`. All of them may
//!   know `telemetry`, `random`, `backoff`, `lock`, `single_flight`, `runtime` and `wall_clock`, which know no more than
//!   the core's errors. Of these the core knows `random`, for jitter, and `wall_clock`.
//! - A decision is one round trip.
//! - The limiter arithmetic is Lua's alone. Rust prepares a rule's arguments, reads replies, and words them for others:
//!   seconds of header fields, what remains of all shards, who waits in order.
//! - An algorithm is one script, one row of `algorithm`, one vectors file, one section of [`guide::algorithms`] and one
//!   picture of [`guide::trace`]; `lua/README.md` lists what else a new one touches.

#![cfg_attr(docsrs, feature(doc_cfg))]

mod algorithm;
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

// The pages on operations are read in the repository too. Their links to other files are named, and their last lines say
// which files; here the names come first, and so lead to this documentation.
/// [runbook]: crate::operations::runbook
/// [backup]: crate::operations::backup
/// [conf]: #a-redisconf-to-start-from
/// [scripts]: crate::Script
/// [changing]: crate::guide#changing-a-rule
/// [shards]: crate::guide#shards
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
    ///
    #[doc = include_str!("operations/runbook.md")]
    pub mod runbook {}

    /// [runbook]: crate::operations::runbook
    /// [error-classes]: crate::operations::runbook#error-classes
    /// [clock-steps]: crate::operations::runbook#clock-steps
    /// [evictions]: crate::operations::runbook#evictions
    /// [latency]: crate::operations::runbook#latency
    ///
    #[doc = include_str!("operations/limits.md")]
    pub mod limits {}

    #[doc = include_str!("operations/backup.md")]
    pub mod backup {}
}

pub use deadpool_redis;
pub use redis;

pub use algorithm::Algorithm;
pub use decision::{By, Decision, Denied, LimitDecision, LimitDecisions, RetryAfter};
pub use denial_cache::DenialCache;
pub use engine::Engine;
pub use engine::cluster::Cluster;
#[cfg(feature = "embedded")]
pub use engine::embedded::{Clock, Embedded};
pub use engine::redis::Redis;
pub use engine::redis::breaker::Breaker;
#[cfg(feature = "tls")]
pub use engine::redis::tls::Tls;
pub use error::{Charged, Error, RuleError};
pub use key::KeySecret;
pub use limit::{Calendar, Debt, Limit, LimitBuilder, Start};
pub use limiter::hold::{Held, Permit};
pub use limiter::lease::Lease;
pub use limiter::{Deciding, Limiter, ResetProgress, State};
pub use operation::Operation;
pub use quota::Quota;
pub use request::{OwnedRequest, Request};
pub use rule::{Change, OnError, Rule};
pub use script::Script;
#[cfg(feature = "metrics")]
pub use telemetry::describe_metrics;
