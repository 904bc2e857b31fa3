//! Responses to gRPC calls, whose status has its own header fields.

use std::borrow::Cow;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use bytes::Bytes;
use http::Response;
use http::header::{CONTENT_TYPE, HeaderValue};

// gRPC's status codes.
pub(super) const INVALID_ARGUMENT: u8 = 3;
pub(super) const PERMISSION_DENIED: u8 = 7;
pub(super) const RESOURCE_EXHAUSTED: u8 = 8;
pub(super) const INTERNAL: u8 = 13;
pub(super) const UNAVAILABLE: u8 = 14;
pub(super) const UNAUTHENTICATED: u8 = 16;

/// A message is sent twice, encoded, and clients refuse headers of more than 8 or 16 KiB altogether.
const LONGEST_ENCODED: usize = 2048;

/// What a longer message ends with.
const CUT: &str = "...";

/// A response of headers only. gRPC's status is in its own header; the HTTP status is always 200.
///
/// With a wait, clients may retry after it; without one they don't.
pub(super) fn answer(code: u8, message: &str, wait: Option<Duration>) -> Response<Bytes> {
    let message = &*shortened(message);
    let mut answer = Response::new(Bytes::new());
    let headers = answer.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    headers.insert("grpc-status", HeaderValue::from(u16::from(code)));
    if let Ok(message) = HeaderValue::try_from(percent_encoded(message)) {
        headers.insert("grpc-message", message);
    }
    let pushback = wait.map_or("-1".to_owned(), |wait| wait.as_nanos().div_ceil(1_000_000).to_string());
    if let Ok(pushback) = HeaderValue::try_from(pushback) {
        headers.insert("grpc-retry-pushback-ms", pushback);
    }
    if let Some(wait) = wait {
        let details =
            STANDARD_NO_PAD.encode(status_with_retry_info(code, message, wait.as_secs(), wait.subsec_nanos()));
        if let Ok(details) = HeaderValue::try_from(details) {
            headers.insert("grpc-status-details-bin", details);
        }
    }
    answer
}

/// The message, or as much of its beginning as fits.
fn shortened(message: &str) -> Cow<'_, str> {
    if beginning(message, LONGEST_ENCODED).len() == message.len() {
        return Cow::Borrowed(message);
    }
    Cow::Owned(format!("{}{CUT}", beginning(message, LONGEST_ENCODED - CUT.len())))
}

/// The longest beginning, in whole characters, that takes at most this many bytes once encoded.
fn beginning(message: &str, most: usize) -> &str {
    let mut left = most;
    let beyond = message.char_indices().find(|(at, letter)| {
        let bytes = message[*at..*at + letter.len_utf8()].bytes();
        let needed: usize = bytes.map(|byte| if is_plain(byte) { 1 } else { 3 }).sum();
        let fits = needed <= left;
        left = left.saturating_sub(needed);
        !fits
    });
    beyond.map_or(message, |(at, _)| &message[..at])
}

/// Whether it is sent as it is.
fn is_plain(byte: u8) -> bool {
    matches!(byte, b' '..=b'~') && byte != b'%'
}

/// As in gRPC over HTTP/2: encodes what isn't printable ASCII, and the percent sign itself.
fn percent_encoded(message: &str) -> String {
    message.bytes().fold(String::with_capacity(message.len()), |mut text, byte| {
        match byte {
            byte if is_plain(byte) => text.push(char::from(byte)),
            _ => text.push_str(&format!("%{byte:02X}")),
        }
        text
    })
}

/// A `google.rpc.Status` with a single detail, a `google.rpc.RetryInfo`, in Protocol Buffers' wire format:
/// <https://github.com/googleapis/googleapis/blob/master/google/rpc/error_details.proto>.
fn status_with_retry_info(code: u8, message: &str, seconds: u64, nanos: u32) -> Vec<u8> {
    let mut duration = Vec::new();
    number(&mut duration, 1, seconds);
    number(&mut duration, 2, u64::from(nanos));
    let mut info = Vec::new();
    bytes(&mut info, 1, &duration);
    let mut any = Vec::new();
    bytes(&mut any, 1, b"type.googleapis.com/google.rpc.RetryInfo");
    bytes(&mut any, 2, &info);
    let mut status = Vec::new();
    number(&mut status, 1, u64::from(code));
    bytes(&mut status, 2, message.as_bytes());
    bytes(&mut status, 3, &any);
    status
}

fn number(out: &mut Vec<u8>, field: u64, value: u64) {
    // Zero is omitted.
    if value > 0 {
        varint(out, field << 3);
        varint(out, value);
    }
}

fn bytes(out: &mut Vec<u8>, field: u64, value: &[u8]) {
    varint(out, field << 3 | 2);
    varint(out, value.len() as u64);
    out.extend_from_slice(value);
}

fn varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push((value & 0x7f) as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}
