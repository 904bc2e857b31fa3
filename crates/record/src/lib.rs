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

// The pages on operations are also read in the repository. Their links are named, and their last lines define the names
// as files; the definitions here come first, so that in this documentation the links lead to its items.
/// [runbook]: crate::operations::runbook
/// [silent]: crate::operations::runbook#no-answer-in-time
/// [cached]: crate::operations::runbook#started-without-the-database
/// [locked]: crate::operations::runbook#changes-not-read
/// [backup]: crate::operations::backup
/// [redis]: tollgate::operations
/// [tls]: tollgate::operations#tls
/// [redis-sizing]: tollgate::operations#sizing
///
#[doc = include_str!("operations.md")]
pub mod operations {
    /// [rights]: crate::operations#the-system-of-record
    /// [metrics]: crate::operations#metrics
    /// [forged]: crate::operations#the-system-of-record
    /// [tls]: tollgate::operations#tls
    /// [restore]: crate::operations::backup#backup-of-the-system-of-record
    /// [sizing]: crate::operations#sizing
    /// [redis]: tollgate::operations::runbook
    /// [alerts]: tollgate::guide#metrics-and-traces
    ///
    #[doc = include_str!("operations/runbook.md")]
    pub mod runbook {}

    /// [archive]: crate::operations#archive-of-the-audit-log
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
pub use spool::numbering::{Writer, WriterCounts, Written};
pub use stored::input::OwnLimits;
pub use stored::key_text::NewKey;
pub use stored::keys::{KeyTerms, StoredKey};
pub use stored::rules::StoredRules;
pub use stored::users::StoredUser;
#[cfg(feature = "metrics")]
pub use telemetry::describe_metrics;
