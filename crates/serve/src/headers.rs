//! The header fields by which a client learns of its limits.

use axum::response::Response;
use http::{HeaderName, HeaderValue};

/// Adds header fields to a response.
pub(crate) fn add(response: &mut Response, fields: Vec<(&'static str, String)>) {
    for (name, value) in fields {
        if let Ok(value) = HeaderValue::try_from(value) {
            response.headers_mut().insert(HeaderName::from_static(name), value);
        }
    }
}
