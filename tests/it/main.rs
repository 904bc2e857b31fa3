//! One binary for all tests that need more than a single module. A missing redis-server is a failure, never a skip.

mod acquire_wait;
mod batch_order;
mod batching;
mod block_for;
mod calendar_windows;
mod chaos;
mod cluster_and_sentinels;
mod combined_limits;
mod concurrent_operations;
mod contention;
mod corrupted_state;
#[cfg(feature = "postgres")]
mod database;
mod denial_cache;
mod differential;
mod doctor;
mod documented_losses;
mod examples;
mod expiry;
mod faults;
#[cfg(feature = "axum")]
mod http;
mod key_spelling;
mod late_refunds;
mod laws;
mod lease;
mod limit_text;
mod load;
mod malformed_replies;
mod operations;
mod packed;
mod permissions;
mod permits;
mod published_package;
mod recipes;
mod redis_engine;
mod request_ids;
mod reserve_within;
mod rules;
mod script_cache;
mod script_calls;
mod script_files;
mod shards;
mod supply;
mod support;
#[cfg(all(feature = "metrics", feature = "tracing"))]
mod telemetry;
mod tidy;
#[cfg(feature = "tls")]
mod tls;
#[cfg(feature = "tls")]
mod tls_settings;
mod tool;
mod tool_fuzzing;
mod two_versions;
mod vectors;
#[cfg(not(feature = "tls"))]
mod without_tls;
