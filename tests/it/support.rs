//! What tests share: servers of their own, random limits and histories, and the oracle that answers are held against.

pub(crate) mod acl;
#[cfg(feature = "postgres")]
pub(crate) mod alone;
#[cfg(feature = "postgres")]
pub(crate) mod api_keys;
pub(crate) mod callers;
#[cfg_attr(not(feature = "tls"), allow(dead_code))]
pub(crate) mod certificates;
pub(crate) mod cluster;
pub(crate) mod effort;
pub(crate) mod engines;
pub(crate) mod example_service;
pub(crate) mod failures;
pub(crate) mod fake_redis;
pub(crate) mod histories;
pub(crate) mod limits;
pub(crate) mod nginx;
pub(crate) mod oracle;
pub(crate) mod oracle_spec;
pub(crate) mod polling;
#[cfg(feature = "postgres")]
pub(crate) mod postgres_server;
pub(crate) mod proxy;
pub(crate) mod python;
pub(crate) mod redis_server;
pub(crate) mod repository;
pub(crate) mod rules;
#[cfg(feature = "archive")]
pub(crate) mod s3;
pub(crate) mod scripts;
pub(crate) mod sentinels;
pub(crate) mod server_setup;
pub(crate) mod tool;
