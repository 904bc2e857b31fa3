//! One binary for all tests that run the tool. A missing server is a failure, never a skip.

mod chaos;
mod cluster_and_sentinels;
mod contention;
#[cfg(feature = "postgres")]
mod database;
mod doctor;
mod faults;
mod load;
mod script_files;
mod shards;
mod support;
#[cfg(feature = "tls")]
mod tls;
mod tool;
mod tool_fuzzing;
mod without_tls;
