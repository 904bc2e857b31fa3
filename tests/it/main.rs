//! One binary for all tests that need more than a single module. A missing redis-server is a failure, never a skip.

mod beyond;
mod block;
mod calendar;
#[cfg_attr(not(feature = "tls"), allow(dead_code))]
mod certificates;
mod chaos;
mod concurrency;
mod costs;
#[cfg(feature = "postgres")]
mod database;
mod denials;
mod differential;
mod doctor;
mod examples;
mod expiry;
mod faults;
mod fleet;
mod hostile;
#[cfg(feature = "axum")]
mod http;
mod ids;
mod keys;
mod laws;
mod lease;
mod limits;
mod load;
mod lua;
mod merges;
mod mixed;
mod operations;
mod oracle;
mod package;
mod packed;
mod permissions;
mod permits;
mod poison;
#[cfg(feature = "postgres")]
mod postgres;
mod python;
mod recipes;
mod redis;
mod replies;
mod rule;
mod rules;
mod script_cache;
mod scripts;
mod server;
mod several;
mod shards;
mod subject;
mod supply;
#[cfg(all(feature = "metrics", feature = "tracing"))]
mod telemetry;
mod text;
mod tidy;
#[cfg(feature = "tls")]
mod tls;
mod together;
mod tool;
#[cfg(feature = "tls")]
mod trust;
mod vectors;
mod wait;
#[cfg(not(feature = "tls"))]
mod without_tls;
