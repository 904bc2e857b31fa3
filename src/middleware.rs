//! HTTP services and clients under rules: a tower layer, for axum, tonic and anything on tower, and the header fields of a
//! decision for everything else.
//!
#![doc = include_str!("middleware/answers.md")]

mod answer;
mod body;
mod client_address;
mod grpc;
mod headers;
mod layer;
mod restraint;
mod service;
mod sources;

pub use answer::Rejection;
pub use body::{HeldPermits, Permits, ResponseBody, Usage};
pub use client_address::ClientAddress;
pub use headers::HeaderStyle;
pub use layer::{RateLimitLayer, Rules};
pub use service::RateLimit;
