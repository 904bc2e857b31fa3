//! The header fields by which a client learns of its limits.

use axum::response::Response;
use http::{HeaderName, HeaderValue};
use tollgate::middleware::HeaderStyle;
use tollgate::rules::Verdict;

/// Which header fields a client gets, beside `Retry-After` on a denial that ends by waiting.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum HeaderFields {
    /// `RateLimit` and `RateLimit-Policy`, of the draft's latest version.
    #[default]
    Draft,
    /// `X-RateLimit-Limit`, `X-RateLimit-Remaining` and `X-RateLimit-Reset`, in seconds from now.
    XRateLimit,
    /// `RateLimit-Limit`, `RateLimit-Remaining` and `RateLimit-Reset`: the draft's first versions, and what Envoy's own
    /// service writes.
    RateLimit,
    /// None of these.
    Off,
}

impl HeaderFields {
    /// Each as it is named on the command line.
    pub const ALL: [(&'static str, Self); 4] =
        [("draft", Self::Draft), ("x-ratelimit", Self::XRateLimit), ("ratelimit", Self::RateLimit), ("off", Self::Off)];

    /// The fields for a verdict: names in lower case, and values.
    pub(crate) fn of(self, verdict: &Verdict) -> Vec<(&'static str, String)> {
        let style = match self {
            Self::Draft => HeaderStyle::Draft,
            Self::XRateLimit | Self::RateLimit => HeaderStyle::Legacy,
            Self::Off => HeaderStyle::Off,
        };
        let mut fields = verdict.headers(style);
        if self == Self::RateLimit {
            fields.iter_mut().for_each(|(name, _)| *name = name.strip_prefix("x-").unwrap_or(name));
        }
        fields
    }
}

/// Adds header fields to a response.
pub(crate) fn add(response: &mut Response, fields: Vec<(&'static str, String)>) {
    for (name, value) in fields {
        if let Ok(value) = HeaderValue::try_from(value) {
            response.headers_mut().insert(HeaderName::from_static(name), value);
        }
    }
}
