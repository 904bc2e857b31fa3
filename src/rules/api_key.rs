//! API keys that come with requests: how they are looked up, and why one is rejected.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use super::Account;

/// Finds the account that an API key belongs to: [`ApiKeyLayer`](crate::middleware::ApiKeyLayer) (feature `http`) asks
/// it for each request. `Configuration` of the crate `tollgate-record` knows the keys of its PostgreSQL. One of your
/// own:
///
/// ```
/// use std::collections::HashMap;
///
/// use tollgate::rules::{Account, ApiKeyError, ApiKeyLookup, FoundAccount};
///
/// /// The users of a few keys, which a secret store has handed out.
/// struct Keys(HashMap<Vec<u8>, String>);
///
/// impl ApiKeyLookup for Keys {
///     fn account_of_key(&self, key: Vec<u8>) -> FoundAccount<'_> {
///         let found = self.0.get(&key).map(|user| Account::new(user)).ok_or(ApiKeyError::Unknown);
///         Box::pin(async move { found })
///     }
/// }
/// ```
pub trait ApiKeyLookup: Send + Sync + 'static {
    /// The account that this key, as it was sent, belongs to; or why the request is refused.
    fn account_of_key(&self, key: Vec<u8>) -> FoundAccount<'_>;
}

/// The answer of an [`ApiKeyLookup`].
pub type FoundAccount<'a> = Pin<Box<dyn Future<Output = Result<Account, ApiKeyError>> + Send + 'a>>;

/// Why an API key is rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ApiKeyError {
    /// It isn't spelled as a key: it is mistyped, truncated, made up, or another system's. Nothing was looked up.
    Malformed,
    /// There is no such key.
    Unknown,
    /// It was revoked.
    Revoked,
    /// It has expired.
    Expired,
    /// Whether the key exists can't be known now: what holds the keys is unreachable, or too many keys that it doesn't
    /// know are being looked up. Retry after the given wait.
    Unavailable {
        /// How long to wait before a retry.
        retry_after: Duration,
    },
}

impl ApiKeyError {
    /// The error in a word: malformed, unknown, revoked, expired or unavailable.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Malformed => "malformed",
            Self::Unknown => "unknown",
            Self::Revoked => "revoked",
            Self::Expired => "expired",
            Self::Unavailable { .. } => "unavailable",
        }
    }
}

impl fmt::Display for ApiKeyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Malformed => "api key: it doesn't have the form of a key",
            Self::Unknown => "api key: there is no such key",
            Self::Revoked => "api key: it was revoked",
            Self::Expired => "api key: it has expired",
            Self::Unavailable { .. } => "api key: it can't be looked up now",
        })
    }
}

impl std::error::Error for ApiKeyError {}
