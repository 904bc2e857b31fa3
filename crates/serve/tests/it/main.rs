//! The service as its clients see it: on a real Redis, by Envoy's protocol and by HTTP, and its binary.
#![allow(missing_docs)]

mod binary;
mod client;
mod envoy;
mod json;
mod openapi;
mod page;
mod ports;
mod proxies;
mod running;
#[cfg(feature = "otlp")]
mod traces;
