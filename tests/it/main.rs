//! One binary for all tests of the library that need more than a single module. A missing redis-server is a failure,
//! never a skip.

mod acquire_wait;
mod another_algorithm;
mod batch_order;
mod denial_cache;
mod documented_losses;
mod expiry;
mod http;
mod lease;
mod limit_text;
mod malformed_replies;
mod on_servers;
mod published_package;
mod recipes;
mod rules;
mod runbook;
mod supply;
mod telemetry;
mod tidy;
mod tls_settings;
mod turns;
mod two_versions;
