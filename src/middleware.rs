//! Rate limits for HTTP services and clients: a tower layer, for axum, tonic and any other tower service, and a
//! decision's header fields for everything else.
//!
#![doc = include_str!("guide/rustdoc_links.md")]
#![doc = "[by-response]: crate::rules#counting-by-the-response\n[format]: crate::rules\n[paths]: crate::rules#paths\n"]
#![cfg_attr(any(not(doctest), feature = "axum"), doc = include_str!("middleware/answers.md"))]

mod answer;
mod api_keys;
mod body;
mod client_address;
mod grpc;
mod headers;
mod host;
mod layer;
mod pending;
mod request_attributes;
mod service;
mod settings;
mod settlement;
mod side;
mod upstream_backoff;

pub use answer::Rejection;
pub use api_keys::{ApiKeyLayer, ApiKeys};
pub use body::{KeptPermits, ResponseBody, ResponsePermits};
pub use client_address::ClientAddress;
pub use headers::HeaderStyle;
pub use host::normalised_host;
pub use layer::RateLimitLayer;
pub use service::RateLimit;
pub use settlement::Usage;
