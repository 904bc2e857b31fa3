//! One binary for all tests that run the tool. A missing server is a failure, never a skip.

#[cfg(feature = "postgres")]
mod database;
mod languages;
mod load;
mod on_servers;
mod recording;
mod report;
mod sharing;
mod support;
mod terminal;
mod tool;
mod tool_fuzzing;
mod without_tls;
