//! The side of a request that a layer is on, and what is read of the request on either.

use http::Uri;
use http::header::HeaderName;
use http::request::Parts;

use crate::error::{Error, Kind};

/// The side of a request that a layer is on: where it is received, or where it is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Incoming,
    Outgoing,
}

/// What a router has noted of the request's target.
#[cfg_attr(not(feature = "axum"), allow(unused_variables, reason = "no router is known"))]
pub(super) fn original_uri(parts: &Parts) -> Option<&Uri> {
    #[cfg(feature = "axum")]
    return parts.extensions.get().map(|axum::extract::OriginalUri(uri)| uri);
    #[cfg(not(feature = "axum"))]
    None
}

/// Programs disagree on which of two equal headers counts, so sending both could evade a rule.
pub(super) fn only(parts: &Parts, name: &HeaderName) -> Result<Option<Vec<u8>>, Error> {
    let mut values = parts.headers.get_all(name).iter();
    match (values.next(), values.next()) {
        (Some(_), Some(_)) => Err(Error::new(Kind::Input, format!("the header {name} was sent more than once"))),
        // HTTP/2 brings spaces around a value that HTTP/1.1 leaves out: another spelling of the same.
        (value, _) => Ok(value.map(|value| value.as_bytes().trim_ascii().to_vec())),
    }
}
