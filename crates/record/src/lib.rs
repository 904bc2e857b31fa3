//! The system of record of [tollgate](https://docs.rs/tollgate) on PostgreSQL 14 or newer: rules, users and API keys in
//! the schema `tollgate`, a history of decisions beside them, and old months of it in an archive.
//!
//! ```no_run
//! use axum::Router;
//! use axum::routing::get;
//! use tollgate::middleware::{ApiKeyLayer, RateLimitLayer};
//! use tollgate::{Limiter, Redis};
//! use tollgate_record::history::HistorySettings;
//! use tollgate_record::Postgres;
//!
//! # async fn router() -> Result<Router, Box<dyn std::error::Error>> {
//! let limiter = Limiter::new(Redis::open("redis://127.0.0.1/")?);
//! let postgres = Postgres::open("postgres://limits@127.0.0.1/app")?;
//! let configuration = postgres.follow(&limiter).await?;
//! let history = postgres.record(HistorySettings::new())?;
//! let app = Router::new()
//!     .route("/items", get(|| async { "items" }))
//!     .layer(RateLimitLayer::new(limiter, configuration.clone()).record(history))
//!     // Added last, so it comes first.
//!     .layer(ApiKeyLayer::new(configuration));
//! # Ok(app)
//! # }
//! ```
//!
//! No decision waits for it: a thread of its own reads rules and users. Only an API key that neither the process nor
//! Redis has cached is looked up for its request. [`Postgres::migrate`] creates its tables; nothing calls that
//! automatically. The page on [operations] helps you run the database, and
//! [`operations::runbook`] is for whoever is on call.
//!
//! # Layout
//!
//! In reading order; each imports only what stands before it:
//!
//! - `telemetry`: metrics and traces. `chance`: jitter and names. `lock`: a mutex that a panic doesn't close.
//! - `postgres`: connections, TLS, transactions, the tables, and what authenticates entries in Redis.
//! - `stored`: what is in the tables, read and written: rules, users, API keys.
//! - `spool`: writing in batches, each once.
//! - `totals`: what users and keys have taken, counted for the database.
//! - `configuration`: what is in force in a process, followed from the database and cached in Redis. It is a
//!   [`RuleSource`](tollgate::rules::RuleSource), an [`ApiKeyLookup`](tollgate::rules::ApiKeyLookup) and, to count what
//!   users have taken, a [`DecisionSink`](tollgate::rules::DecisionSink).
//! - [`history`]: decisions, recorded and read back. It is a [`DecisionSink`](tollgate::rules::DecisionSink).
//! - `archive`: old months of the history as Parquet files.
//!
//! What can be done with a [`Postgres`] stands where it is done: `follow` in `configuration`, `record` in `history`, users
//! and keys in `stored`. Of the library it uses what everybody may use.

#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(feature = "archive")]
pub mod archive;
mod chance;
mod configuration;
pub mod history;
mod lock;
mod postgres;
mod spool;
mod stored;
mod telemetry;
mod totals;

// The pages on operations are read in the repository too. Their links to other files are named, and their last lines say
// which files; here the names come first, and so lead to this documentation.
/// [runbook]: crate::operations::runbook
/// [backup]: crate::operations::backup
/// [redis]: tollgate::operations
/// [tls]: tollgate::operations#tls
/// [redis-sizing]: tollgate::operations#sizing
///
#[doc = include_str!("operations.md")]
pub mod operations {
    /// [rights]: crate::operations#the-system-of-record
    /// [forged]: crate::operations#the-system-of-record
    /// [tls]: tollgate::operations#tls
    /// [restore]: crate::operations::backup#backup-of-the-system-of-record
    /// [sizing]: crate::operations#sizing
    ///
    #[doc = include_str!("operations/runbook.md")]
    pub mod runbook {}

    /// [redis]: tollgate::operations::backup
    /// [redis-lost]: tollgate::operations::backup#when-redis-is-lost
    ///
    #[doc = include_str!("operations/backup.md")]
    pub mod backup {}
}

/// The README's examples compile.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;

/// So do those of the page on migration.
#[cfg(doctest)]
#[doc = include_str!("../../../MIGRATION.md")]
struct MigrationPage;

pub use configuration::{Configuration, Status};
pub use postgres::migrations::{Migration, Schema};
pub use postgres::{Postgres, PostgresError};
pub use spool::numbering::{Writer, Written};
pub use stored::input::OwnLimits;
pub use stored::key_text::NewKey;
pub use stored::keys::{KeyTerms, StoredKey};
pub use stored::rules::StoredRules;
pub use stored::users::StoredUser;
#[cfg(feature = "metrics")]
pub use telemetry::describe_metrics;
