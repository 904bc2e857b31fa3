//! What tests share: servers of their own, random limits and histories, and the oracle that answers are held against.

pub mod acl;
pub mod alone;
#[cfg(feature = "record")]
pub mod api_keys;
pub mod callers;
pub mod certificates;
#[cfg(all(feature = "record", target_os = "linux"))]
pub mod clock;
pub mod cluster;
pub mod console;
pub mod effort;
pub mod engines;
pub mod failures;
pub mod fake_redis;
pub mod histories;
pub mod limits;
pub mod nginx;
pub mod oracle;
pub mod oracle_spec;
pub mod polling;
#[cfg(feature = "record")]
pub mod postgres_server;
pub mod proxy;
pub mod python;
#[cfg(feature = "record")]
pub mod record;
pub mod redis_server;
pub mod repository;
pub mod rules;
pub mod scripts;
pub mod sentinels;
pub mod server_setup;
pub mod tls_server;
