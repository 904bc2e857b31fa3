//! The request as it comes: the fields of `RateLimitRequest` by their numbers, with bytes where that has text. Envoy hands
//! on what a visitor wrote, and decoding text would refuse the whole request for one byte that isn't UTF-8.

use envoy_types::pb::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use envoy_types::pb::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::{self, RateLimitOverride};
use envoy_types::pb::envoy::service::ratelimit::v3::RateLimitRequest;
use envoy_types::pb::google::protobuf::UInt64Value;
use percent_encoding::{AsciiSet, percent_encode};

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Received {
    #[prost(bytes = "vec", tag = "1")]
    domain: Vec<u8>,
    #[prost(message, repeated, tag = "2")]
    descriptors: Vec<Descriptor>,
    #[prost(uint32, tag = "3")]
    hits_addend: u32,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Descriptor {
    #[prost(message, repeated, tag = "1")]
    entries: Vec<Entry>,
    #[prost(message, optional, tag = "2")]
    limit: Option<RateLimitOverride>,
    #[prost(message, optional, tag = "3")]
    hits_addend: Option<UInt64Value>,
    #[prost(bool, tag = "4")]
    is_negative_hits: bool,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Entry {
    #[prost(bytes = "vec", tag = "1")]
    key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    value: Vec<u8>,
}

impl From<Received> for RateLimitRequest {
    fn from(received: Received) -> Self {
        let Received { domain, descriptors, hits_addend } = received;
        let descriptors = descriptors.into_iter().map(|one| RateLimitDescriptor {
            entries: one.entries.into_iter().map(entry).collect(),
            limit: one.limit,
            hits_addend: one.hits_addend,
            is_negative_hits: one.is_negative_hits,
        });
        Self { domain: text(domain), descriptors: descriptors.collect(), hits_addend }
    }
}

fn entry(Entry { key, value }: Entry) -> rate_limit_descriptor::Entry {
    rate_limit_descriptor::Entry { key: text(key), value: text(value) }
}

/// As it is, if it is UTF-8; else with all bytes above ASCII percent-encoded, as a path has them.
fn text(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes).unwrap_or_else(|odd| percent_encode(odd.as_bytes(), &AsciiSet::EMPTY).to_string())
}
