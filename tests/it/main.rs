//! One binary for all tests that need more than a single module. A missing redis-server is a failure, never a skip.

mod beyond;
mod block;
mod calendar;
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
mod hostile;
#[cfg(feature = "axum")]
mod http;
mod ids;
mod keys;
mod laws;
mod lease;
mod load;
mod lua;
mod merges;
mod mixed;
mod operations;
mod package;
mod packed;
mod permissions;
mod permits;
mod poison;
mod recipes;
mod redis;
mod replies;
mod rules;
mod script_cache;
mod scripts;
mod several;
mod shards;
mod supply;
mod support;
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
