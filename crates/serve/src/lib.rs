//! A rate limit service: the rules of a [`tollgate`] file or database for gateways that ask by [Envoy's
//! protocol][envoy], and for every language by HTTP with JSON.
//!
//! The binary `tollgate-serve` is this library with flags; the crate's README says how to run it. A service of your own
//! puts the same into its process:
//!
//! ```no_run
//! use tollgate::rules::WatchedRules;
//! use tollgate::{Limiter, Redis};
//! use tollgate_serve::Service;
//!
//! # async fn serve() -> Result<(), Box<dyn std::error::Error>> {
//! let limiter = Limiter::new(Redis::open("redis://127.0.0.1/")?);
//! let service = Service::new(limiter, WatchedRules::open("rules.toml")?);
//! let listener = tokio::net::TcpListener::bind("127.0.0.1:8080").await?;
//! // HTTP with JSON and, on the same port, gRPC.
//! axum::serve(listener, service.http().merge(service.grpc())).await?;
//! # Ok(())
//! # }
//! ```
//!
//! [envoy]: https://www.envoyproxy.io/docs/envoy/latest/api-v3/service/ratelimit/v3/rls.proto

mod answer;
mod auth;
mod envoy;
mod failure;
mod headers;
mod http;
pub mod listen;
mod metrics;
mod named;
mod ready;
mod service;
mod stream;
#[cfg(feature = "tls")]
pub mod tls;
mod token;
mod unread;
mod warning;

pub use metrics::describe_metrics;
pub use service::{Service, ServiceBuilder, Unmatched};
pub use token::Tokens;
