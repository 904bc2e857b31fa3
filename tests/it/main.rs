//! One binary for all tests that need more than a single module. A missing redis-server is a failure, never a skip.

mod concurrency;
mod denials;
mod differential;
mod expiry;
mod faults;
mod ids;
mod laws;
mod lease;
mod limits;
mod load;
mod mixed;
mod operations;
mod oracle;
mod packed;
mod permits;
mod redis;
mod server;
mod several;
mod subject;
mod text;
mod tidy;
mod tls;
mod together;
mod tool;
mod vectors;
mod wait;
