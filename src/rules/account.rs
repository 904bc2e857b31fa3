//! The account behind a request, from another system's records: the user, the user's tier, and limits of that user's
//! own.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use super::names::{API_KEY, USER};
use crate::error::RuleError;
use crate::rule::Rule;

/// The rule name for a user's own limits: the `rule` of their decisions, also in header fields.
pub(super) const USER_LIMITS: &str = "user-quota";
/// The same for an API key's own limits.
pub(super) const KEY_LIMITS: &str = "key-quota";

/// What is known of the user behind a request, from the system of record or a service's own authentication.
/// [`Attributes::account`](super::Attributes::account) adds it to a request, and the middleware reads it from a
/// request's extensions. Cheap to clone.
///
/// ```
/// # #[cfg(feature = "embedded")]
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use tollgate::rules::{Account, Attributes, RuleSet};
/// use tollgate::{Embedded, Limiter};
///
/// let rules: RuleSet = r#"
///     [[rule]]
///     name = "free"
///     match = { tier = "free" }
///     key = "user"
///     limits = ["fixed-window 100/1d"]
/// "#
/// .parse()?;
///
/// let limiter = Limiter::new(Embedded::new());
/// let account = Account::new("42").tier("free").limits("fixed-window 5000/1d".parse()?)?;
/// let verdict = limiter.acquire_by(&rules, &Attributes::new().account(&account)).await?;
/// assert_eq!(verdict.decision.expect("limits were asked").remaining, 4999);
/// # Ok(())
/// # }
/// # #[cfg(not(feature = "embedded"))]
/// # fn main() {}
/// ```
#[derive(Clone, Debug)]
pub struct Account {
    user: Arc<str>,
    api_key: Option<Arc<str>>,
    tier: Option<Arc<str>>,
    limits: Option<UserLimits>,
    key_limits: Option<Arc<Rule>>,
    block: Option<Arc<UserBlock>>,
}

/// Limits of a user's own, checked once. A clone shares them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UserLimits(Arc<Rule>);

/// Why a user is denied everything, and until when.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct UserBlock {
    /// For the service's operators; clients don't see it.
    pub reason: Option<String>,
    /// None: until it is lifted.
    pub until: Option<SystemTime>,
}

impl UserBlock {
    /// For this reason, until this time; without one, until it is lifted.
    #[must_use]
    pub fn new(reason: Option<&str>, until: Option<SystemTime>) -> Self {
        Self { reason: reason.map(str::to_owned), until }
    }
}

impl Account {
    /// For a user of whom nothing else is known.
    #[must_use]
    pub fn new(user: &str) -> Self {
        Self { user: user.into(), api_key: None, tier: None, limits: None, key_limits: None, block: None }
    }

    /// The id of the request's API key: the attribute `api_key`. Not the key itself.
    #[must_use]
    pub fn api_key(mut self, id: &str) -> Self {
        self.api_key = Some(id.into());
        self
    }

    /// What the user pays for: the attribute `tier`.
    #[must_use]
    pub fn tier(mut self, tier: &str) -> Self {
        self.tier = Some(tier.into());
        self
    }

    /// This user's own limits. They replace all limits of rules that match by `tier` and count only by `user` or
    /// `api_key`, without permits, unless such a rule has an override for the user; shadow rules keep theirs. All
    /// requests of the user count together, whichever of these rules applies, under the name `user-quota`. The count
    /// starts from zero, so a user whose limits are set or removed may once take a full capacity beyond what was
    /// already used. A request's cost, and the policy while Redis is unreachable, are those of the rule that applies; a
    /// policy that these limits can't follow is `closed`. Keys are hashed if the limiter has a
    /// [secret](crate::LimiterBuilder::key_secret), whatever that rule says.
    ///
    /// # Errors
    ///
    /// Limits with a tag, parts or shards.
    pub fn limits(self, limits: Rule) -> Result<Self, RuleError> {
        Ok(self.user_limits(UserLimits::new(limits)?))
    }

    /// The same as [`limits`](Self::limits), checked before and shared by all users who have them.
    #[must_use]
    pub fn user_limits(mut self, limits: UserLimits) -> Self {
        self.limits = Some(limits);
        self
    }

    /// The API key's own limits, which count by its id, under the name `key-quota`. They replace the limits that the
    /// user's own limits would replace, and take precedence over those.
    ///
    /// # Errors
    ///
    /// Limits with a tag, parts or shards.
    pub fn key_limits(mut self, limits: Rule) -> Result<Self, RuleError> {
        self.key_limits = Some(Arc::new(own(limits, KEY_LIMITS)?));
        Ok(self)
    }

    /// Denies everything, whichever rule applies, with this reason, until this time or until it is lifted.
    #[must_use]
    pub fn blocked(mut self, reason: Option<&str>, until: Option<SystemTime>) -> Self {
        self.block = Some(Arc::new(UserBlock { reason: reason.map(Into::into), until }));
        self
    }

    /// The user.
    #[must_use]
    pub fn user(&self) -> &str {
        &self.user
    }

    /// The id of the API key, if the request came with one.
    #[must_use]
    pub fn key_id(&self) -> Option<&str> {
        self.api_key.as_deref()
    }

    /// What the user pays for, if that is known.
    #[must_use]
    pub fn paid_tier(&self) -> Option<&str> {
        self.tier.as_deref()
    }

    /// The block that is in force now.
    #[must_use]
    pub fn block(&self) -> Option<&Arc<UserBlock>> {
        self.block.as_ref().filter(|block| block.until.is_none_or(|until| until > SystemTime::now()))
    }

    /// The limits that replace those of the tier, and the key that they count by: the API key's or the user's.
    pub(super) fn limits_and_key(&self) -> Option<(&Rule, String)> {
        match (&self.key_limits, &self.limits, &self.api_key) {
            (Some(limits), _, Some(id)) => Some((limits, format!("{API_KEY}:{id}"))),
            (_, limits, _) => limits.as_ref().map(|limits| (&*limits.0, format!("{USER}:{}", self.user))),
        }
    }

    /// The user's own limits, if there are any.
    #[doc(hidden)]
    #[must_use]
    pub fn own_limits(&self) -> Option<&UserLimits> {
        self.limits.as_ref()
    }

    /// The block, even if it has ended.
    #[doc(hidden)]
    #[must_use]
    pub fn last_block(&self) -> Option<&UserBlock> {
        self.block.as_deref()
    }

    /// The same, with what another source knows of its user: a tier where this account has none, and the source's
    /// limits and block in place of this account's.
    #[doc(hidden)]
    #[must_use]
    pub fn with_user(mut self, user: &Self) -> Self {
        self.tier = self.tier.or_else(|| user.tier.clone());
        self.limits = user.limits.clone().or(self.limits);
        self.block = user.block.clone().or(self.block);
        self
    }
}

impl UserLimits {
    /// These limits, for [`Account::user_limits`].
    ///
    /// # Errors
    ///
    /// Limits with a tag, parts or shards.
    pub fn new(limits: Rule) -> Result<Self, RuleError> {
        Ok(Self(Arc::new(own(limits, USER_LIMITS)?)))
    }

    /// The limits, as one rule.
    #[must_use]
    pub fn rule(&self) -> &Rule {
        &self.0
    }
}

impl fmt::Display for UserLimits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl UserBlock {
    /// How long it remains in force; none if it has no end.
    #[must_use]
    pub fn left(&self) -> Option<Duration> {
        self.until.map(|until| until.duration_since(SystemTime::now()).unwrap_or_default())
    }
}

fn own(limits: Rule, name: &str) -> Result<Rule, RuleError> {
    if limits.limits().any(|limit| limit.shards() > 1) {
        return Err(RuleError::new(format!("limits: expected limits without shards, got {limits}")));
    }
    if limits.tag().is_some() || limits.counted_parts().any(|part| part.is_some()) {
        return Err(RuleError::new(format!("limits: expected limits without tag and parts, got {limits}")));
    }
    limits.named(name)
}
