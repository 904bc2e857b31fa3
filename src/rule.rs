//! A rule: a named limit, or several that are decided together.

mod change;
#[cfg(feature = "serde")]
pub(crate) mod fields;
#[cfg(feature = "serde")]
pub(crate) mod forms;
mod into_rule;
mod joined;
mod keys;
mod on_error;
mod scoped;
#[cfg(feature = "serde")]
mod serialized;

use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use crate::algorithm::numbers::LONGEST_RESET_US;
use crate::call::Options;
use crate::error::RuleError;
use crate::key;
use crate::limit::{Limit, Period};

pub use change::OnChange;
pub use into_rule::IntoRule;
pub(crate) use joined::RuleOfCalls;
#[allow(unused_imports, reason = "sets of rules join them, which are a feature")]
pub(crate) use joined::{ALL, APART, Joining, apart, is_apart};
pub use on_error::OnError;
pub(crate) use scoped::{OwnCost, ScopedLimit, Target, never_admitted};

/// A named limit, or several that are charged all or none. The name keeps the rule's keys in Redis apart from those of
/// other rules, so a rule without a name decides nothing.
///
/// With the feature `serde`, a rule is read from a limit's text or from a table, and written as a table:
/// `{ name = "api", limits = ["token-bucket 10/1s", { limit = "fixed-window 1000/1m", key = "org" }], cost = 2 }`. There
/// `key` is the [part](Self::and_by) that a limit counts by. The other fields are what the methods set.
///
/// Several rules of a file that apply to a request together are one `Rule` too. What each of them has of its own, such as
/// limits, a name or a cost, can't be changed in it: methods that would change it return an error.
///
/// ```
/// use tollgate::Rule;
///
/// let rule = Rule::new("uploads", "token-bucket 100/1s burst 20, fixed-window 10000/1d")?;
/// assert_eq!(rule.name(), Some("uploads"));
/// assert_eq!(rule.to_string(), "token-bucket 100/1s burst 20, fixed-window 10000/1d");
/// # Ok::<(), tollgate::RuleError>(())
/// ```
// Clones share the fields: each permit has a clone.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Rule {
    /// None for a rule that was parsed by itself, which can't decide yet.
    name: Option<Arc<str>>,
    limits: Arc<[ScopedLimit]>,
    tag: Option<Arc<str>>,
    on_change: OnChange,
    counts_overage: bool,
    /// In whole microseconds.
    block_for: Option<Duration>,
    /// How long permits are renewed, in whole microseconds.
    max_hold: Option<Duration>,
    /// None: the limiter's.
    on_error: Option<OnError>,
    cost: u64,
    /// None: as the limiter says.
    hash_keys: Option<bool>,
    /// The rules that it is made of, if several apply together; each of its limits is as its own rule says.
    rules: Option<Arc<[Self]>>,
}

impl Rule {
    /// A rule with this name, of text (one limit, or several separated by commas), of a [`Limit`], or of another rule,
    /// which is renamed.
    ///
    /// # Errors
    ///
    /// Text that isn't a limit's, or several limits that can't be [combined](Self::and). A name that isn't 1 to 64
    /// letters, digits, `-`, `_` or `.`.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tollgate::{Algorithm, Limit, Rule};
    ///
    /// let rule = Rule::new("api", "token-bucket 100/1m")?;
    /// let limit = Limit::builder(Algorithm::TokenBucket, 100, Duration::from_secs(60)).build()?;
    /// assert_eq!(Rule::new("api", limit)?, rule);
    ///
    /// let from_settings = String::from("token-bucket 100");
    /// let error = Rule::new("api", &from_settings).unwrap_err();
    /// assert_eq!(error.to_string(), r#"rate: expected units per period, such as 10/1s, got "100""#);
    /// # Ok::<(), tollgate::RuleError>(())
    /// ```
    pub fn new(name: &str, limits: impl IntoRule) -> Result<Self, RuleError> {
        limits.into_rule()?.named(name)
    }

    fn unnamed(limit: Limit) -> Self {
        Self::of(vec![ScopedLimit::new("", Arc::new(limit), None, None)])
    }

    fn of(limits: Vec<ScopedLimit>) -> Self {
        Self {
            name: None,
            limits: limits.into(),
            tag: None,
            on_change: OnChange::KeepUsed,
            counts_overage: false,
            block_for: None,
            max_hold: None,
            on_error: None,
            cost: 1,
            hash_keys: None,
            rules: None,
        }
    }

    /// The same limits under this name.
    ///
    /// # Errors
    ///
    /// The same as [`Rule::new`].
    pub fn named(mut self, name: &str) -> Result<Self, RuleError> {
        let name = key::checked_name(name)?;
        self.expect_one()?;
        let renamed = |scoped: &ScopedLimit| {
            ScopedLimit::new(name, Arc::clone(&scoped.limit), scoped.by.clone(), scoped.cost.clone())
        };
        self.limits = self.limits.iter().map(renamed).collect();
        self.name = Some(name.into());
        Ok(self)
    }

    /// One more limit on the same key.
    ///
    /// # Errors
    ///
    /// A limit with the same name or, if unnamed, the same algorithm and period as another: answers couldn't tell them
    /// apart. A sharded limit beside another, since each shard has its own slot. A limit that could never admit the
    /// rule's [cost](Self::cost).
    pub fn and(self, limit: Limit) -> Result<Self, RuleError> {
        self.with(Arc::new(limit), None, None)
    }

    /// One more limit, which counts by a [part](crate::Request::parts) of the request instead of its key. Without a
    /// name of its own it has the part's, in which other characters than letters, digits, `-`, `_` and `.` become `-`:
    /// so its keys differ from those of the rule's other limits.
    ///
    /// One Redis decides all limits of a rule in one call. On a cluster their keys may be
    /// [on several nodes](crate::guide::load#keys-on-several-nodes), each of which is called, at the same time; with a
    /// [tag](Self::tagged) all are on one.
    ///
    /// # Errors
    ///
    /// The same as [`Rule::and`], a part without a name, or an unnamed limit by a part whose name is longer than 64
    /// characters.
    ///
    /// ```
    /// use tollgate::Rule;
    ///
    /// let user = Rule::new("api", "token-bucket 10/1s")?;
    /// let rule = user.and_by("org", "fixed-window 1000/1m".parse()?)?;
    /// assert_eq!(rule.limits().nth(1).and_then(|limit| limit.name()), Some("org"));
    /// # Ok::<(), tollgate::RuleError>(())
    /// ```
    pub fn and_by(self, part: &str, limit: Limit) -> Result<Self, RuleError> {
        self.with(Arc::new(limit), Some(part.to_owned()), None)
    }

    /// Counts all keys of a decision within this part of the request, so that they share a slot of Redis Cluster: an
    /// address within `org` has a count for each organisation. Default: each key counts by itself.
    ///
    /// # Errors
    ///
    /// A part without a name.
    pub fn tagged(mut self, part: &str) -> Result<Self, RuleError> {
        self.expect_one()?;
        if part.is_empty() {
            return Err(self.error(NO_PART));
        }
        self.tag = Some(part.into());
        Ok(self)
    }

    /// What happens to the keys' state when a limit's numbers have changed. Default: what was used stays used. Permits
    /// that are held stay held in any case.
    #[must_use]
    pub fn on_change(self, change: OnChange) -> Self {
        self.with_each(|rule| rule.on_change = change)
    }

    /// Whether denied calls are counted, for [`Decision::overage`](crate::Decision::overage). Each denial then causes a
    /// write. Default: no.
    #[must_use]
    pub fn count_overage(self, yes: bool) -> Self {
        self.with_each(|rule| rule.counts_overage = yes)
    }

    /// Blocks a key for this long, as [`Limiter::block`](crate::Limiter::block) does, when a call on it is denied. The
    /// same script does it, at no extra round trip. Denials during the block write nothing and don't extend it.
    /// Default: none.
    ///
    /// Acquires, reservations and at-mosts block; a peek doesn't, and reports the wait without the block that an
    /// acquire would cause. In a rule of several limits, only the keys of those that deny are blocked. A cost that
    /// could never be allowed blocks nothing. [`unblock`](crate::Limiter::unblock) and [`reset`](crate::Limiter::reset)
    /// lift the block.
    ///
    /// # Errors
    ///
    /// Anything but whole microseconds from 1 µs to 71 years. A sharded limit, of which only one shard would be
    /// blocked.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tollgate::Rule;
    ///
    /// let quarter = Duration::from_secs(15 * 60);
    /// let rule = Rule::new("logins", "sliding-log 5/15m")?.block_for(quarter)?;
    /// assert_eq!(rule.blocks_for(), Some(quarter));
    /// # Ok::<(), tollgate::RuleError>(())
    /// ```
    pub fn block_for(mut self, time: Duration) -> Result<Self, RuleError> {
        self.expect_one()?;
        self.block_for = Some(whole(time).map_err(|why| RuleError::new(format!("block_for: {why}")))?);
        self.checked()
    }

    /// How long a permit that is [renewed](crate::Permit::renewed), as the middleware's are, is held at most, from when
    /// renewal begins: then it is given back, although the work or the response goes on. Default: no end.
    ///
    /// # Errors
    ///
    /// Anything but whole microseconds from 1 µs to 71 years. A rule without a concurrency limit.
    pub fn max_hold(mut self, time: Duration) -> Result<Self, RuleError> {
        self.expect_one()?;
        self.max_hold = Some(whole(time).map_err(|why| RuleError::new(format!("max_hold: {why}")))?);
        let holds = self.limits().any(|limit| limit.algorithm().holds());
        if holds { Ok(self) } else { Err(self.error("max_hold: only a rule with a concurrency limit can have it")) }
    }

    /// Cost of a request that [doesn't set one](crate::Request::cost), in units. Default: 1; 0 takes nothing.
    ///
    /// # Errors
    ///
    /// A cost that one of the limits could never admit, debt included; for a sharded limit, a cost above its smallest
    /// share.
    ///
    /// ```
    /// use tollgate::Rule;
    ///
    /// let rule: Rule = "token-bucket 100/1s shards 8".parse()?;
    /// assert!(rule.clone().cost(12).is_ok());
    /// let error = rule.cost(13).unwrap_err();
    /// let expected = "cost: expected at most 12, the smallest share of token-bucket 100/1s shards 8, got 13";
    /// assert_eq!(error.to_string(), expected);
    /// # Ok::<(), tollgate::RuleError>(())
    /// ```
    pub fn cost(mut self, units: u64) -> Result<Self, RuleError> {
        self.expect_one()?;
        self.cost = units;
        self.checked()
    }

    /// Cost of a request on the limit with this name (of one without a name, its text), whatever the request's
    /// [cost](crate::Request::cost) is for the others; [`Request::costs`](crate::Request::costs) may give another. So
    /// one limit counts requests, and another what they take.
    ///
    /// # Errors
    ///
    /// No limit of this name; a cost that it could never admit, debt included; a limit with shards, which is the only
    /// one of its rule.
    ///
    /// ```
    /// use tollgate::{Limit, Rule};
    ///
    /// let requests: Limit = "token-bucket 60/1m".parse()?;
    /// let tokens: Limit = "token-bucket 100000/1m".parse()?;
    /// let rule = Rule::new("model", requests.named("requests")?)?.and(tokens.named("tokens")?)?;
    /// // A request counts as one, however many tokens it takes.
    /// let rule = rule.cost_of("requests", 1)?;
    /// # Ok::<(), tollgate::RuleError>(())
    /// ```
    pub fn cost_of(mut self, limit: &str, units: u64) -> Result<Self, RuleError> {
        self.expect_one()?;
        let mut limits = self.limits.to_vec();
        let Some(own) = limits.iter_mut().find(|scoped| **scoped.quota.title() == *limit) else {
            let names: Vec<_> = self.limits.iter().map(|scoped| &**scoped.quota.title()).collect();
            return Err(self.error(&format!("cost: expected one of its limits ({}), got {limit:?}", names.join("; "))));
        };
        own.cost = Some(OwnCost::Units(units));
        self.limits = limits.into();
        self.checked()
    }

    /// Whether keys, parts and tags are hashed with the limiter's [secret](crate::LimiterBuilder::key_secret), without
    /// which such a rule decides nothing. Default: they are if the limiter has one.
    #[must_use]
    pub fn hash_keys(self, yes: bool) -> Self {
        self.with_each(|rule| rule.hash_keys = Some(yes))
    }

    /// The [`hash_keys`](Self::hash_keys) setting, if set.
    #[must_use]
    pub fn hashes_keys(&self) -> Option<bool> {
        self.hash_keys
    }

    /// How long a denied key is [blocked](Self::block_for), if it is.
    #[must_use]
    pub fn blocks_for(&self) -> Option<Duration> {
        self.block_for
    }

    /// How long its permits are [renewed](Self::max_hold) at most, if that has an end.
    #[must_use]
    pub fn holds_for(&self) -> Option<Duration> {
        self.max_hold
    }

    /// The name; none for a rule parsed from text and not yet [named](Self::named). Rules with the same name share the
    /// state of limits with the same algorithm and period.
    #[must_use]
    pub fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// The part of the request that its keys share as [hash tag](Self::tagged); none if each key is its own tag.
    #[must_use]
    pub fn tag(&self) -> Option<&str> {
        self.tag.as_deref()
    }

    /// What each limit counts by, in their order: a [part](Self::and_by) of the request, or its key if none.
    pub fn counted_parts(&self) -> impl ExactSizeIterator<Item = Option<&str>> {
        self.limits.iter().map(|scoped| scoped.by.as_deref())
    }

    /// Cost of a request that [doesn't set one](crate::Request::cost).
    #[must_use]
    pub fn default_cost(&self) -> u64 {
        self.cost
    }

    /// Whether requests give the cost of one of its limits by this name.
    pub(crate) fn costs_by(&self, name: &str) -> bool {
        self.limits.iter().any(|scoped| scoped.costs_by(name))
    }

    /// Whether a request may take different costs of its limits.
    pub(crate) fn has_own_costs(&self) -> bool {
        self.is_joined() || self.limits.iter().any(|scoped| scoped.cost.is_some())
    }

    /// Its limits.
    pub fn limits(&self) -> impl ExactSizeIterator<Item = &Limit> {
        self.limits.iter().map(|scoped| &*scoped.limit)
    }

    /// The most units that it could ever admit at one instant.
    pub(crate) fn capacity(&self) -> u64 {
        self.limits().map(Limit::capacity).min().unwrap_or_default()
    }

    pub(crate) fn scoped_limits(&self) -> &[ScopedLimit] {
        &self.limits
    }

    /// The same rule without some of its limits, by their places.
    #[allow(dead_code, reason = "asked by sets of rules, which are a feature")]
    pub(crate) fn without(&self, is_left_out: impl Fn(usize) -> bool) -> Self {
        let kept = self.limits.iter().enumerate().filter(|(at, _)| !is_left_out(*at));
        Self { limits: kept.map(|(_, scoped)| scoped.clone()).collect(), ..self.clone() }
    }

    /// The only limit, if it has shards.
    pub(crate) fn sharded(&self) -> Option<&ScopedLimit> {
        match &*self.limits {
            [scoped] if scoped.limit.shards() > 1 => Some(scoped),
            _ => None,
        }
    }

    /// A hash of everything sent for this rule, which changes with the rule.
    pub(crate) fn fingerprint(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.each().iter().for_each(|rule| rule.options().hash(&mut hasher));
        for limit in self.limits() {
            (limit.algorithm(), limit.numbers()).hash(&mut hasher);
        }
        hasher.finish()
    }

    /// The options of all its calls.
    pub(crate) fn options(&self) -> Options {
        Options {
            keeps_left: self.on_change == OnChange::AsIs,
            starts_anew: self.on_change == OnChange::Reset,
            counts_overage: self.counts_overage,
            block_us: self.block_for.map(|time| u64::try_from(time.as_micros()).unwrap_or(u64::MAX)),
        }
    }

    pub(crate) fn counts_overage(&self) -> bool {
        self.counts_overage
    }

    /// The same rule, which blocks no key.
    #[allow(dead_code, reason = "asked by sets of rules, which are a feature")]
    pub(crate) fn without_block(mut self) -> Self {
        self.block_for = None;
        self
    }

    /// How long a denied key is blocked, as written.
    fn block_period(&self) -> Option<Period> {
        self.block_for.map(written)
    }

    /// How long permits are renewed, as written.
    #[cfg(feature = "serde")]
    fn hold_period(&self) -> Option<Period> {
        self.max_hold.map(written)
    }

    /// Refuses to change several rules that apply together.
    fn expect_one(&self) -> Result<(), RuleError> {
        if self.is_joined() {
            return Err(self.error("several rules that apply together can't be changed as one"));
        }
        Ok(())
    }

    /// The same rule with this changed, in all of the rules that it is made of.
    fn with_each(mut self, change: impl Fn(&mut Self)) -> Self {
        change(&mut self);
        let changed = |rule: &Self| {
            let mut rule = rule.clone();
            change(&mut rule);
            rule
        };
        self.rules = self.rules.map(|rules| rules.iter().map(changed).collect());
        self
    }

    fn with(mut self, limit: Arc<Limit>, by: Option<String>, cost: Option<OwnCost>) -> Result<Self, RuleError> {
        self.expect_one()?;
        if by.as_ref().is_some_and(String::is_empty) {
            return Err(self.error(NO_PART));
        }
        let is_named = limit.name().is_some();
        let limit = match &by {
            Some(part) if !is_named => Arc::new(Limit::clone(&limit).named(&name_of_part(part))?),
            _ => limit,
        };
        let label = limit.label();
        if self.limits().any(|other| other.label() == label) {
            let by = if by.is_some() { "key" } else { "algorithm and period" };
            let why = if is_named { String::new() } else { format!(" (a limit without a name is named by its {by})") };
            return Err(self.error(&format!("two limits are named {label}{why}")));
        }
        let one_more = ScopedLimit::new(self.name.as_deref().unwrap_or_default(), limit, by, cost);
        self.limits = self.limits.iter().cloned().chain([one_more]).collect();
        self.checked()
    }

    fn error(&self, expected: &str) -> RuleError {
        match &self.name {
            Some(name) => RuleError::new(format!("rule {name}: {expected}")),
            None => RuleError::new(format!("rule: {expected}")),
        }
    }

    /// Returns the rule if its limits may be combined, could admit its cost, and can follow its policy.
    fn checked(self) -> Result<Self, RuleError> {
        for scoped in &*self.limits {
            let (limit, cost) = (&scoped.limit, scoped.own_cost().unwrap_or(self.cost));
            if limit.shards() > 1 && self.limits.len() > 1 {
                let why = "alone in its rule, since each of its shards has a slot of its own";
                return Err(self.error(&format!("expected a limit with shards to be {why}, got {self}")));
            }
            if let (2.., Some(time)) = (limit.shards(), self.block_period()) {
                let why = "without shards beside block_for, since a denial would block one shard alone";
                return Err(self.error(&format!("expected a limit {why}, got {limit} and block_for {time}")));
            }
            if limit.shards() > 1 && scoped.cost.is_some() {
                return Err(
                    self.error(&format!("cost: a limit with shards can't have a cost of its own, got one for {limit}"))
                );
            }
            // Valid on a cluster too, whatever engine decides.
            if let Some(why) = never_admitted(limit, cost) {
                return Err(RuleError::new(format!("cost: {why}")));
            }
        }
        self.can_follow_policy()
    }
}

const NO_PART: &str = "expected the name of a part of the request, got \"\"";

/// The name of a limit that counts by this part and has none of its own.
fn name_of_part(part: &str) -> String {
    let plain = |character: char| character.is_ascii_alphanumeric() || "-_.".contains(character);
    part.chars().map(|character| if plain(character) { character } else { '-' }).collect()
}

/// A time that can be written as a period.
fn whole(time: Duration) -> Result<Duration, String> {
    let us = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
    let good = (1..=LONGEST_RESET_US).contains(&us) && time.subsec_nanos().is_multiple_of(1000);
    good.then_some(time).ok_or_else(|| format!("expected whole microseconds, from 1us to 71 years, got {time:?}"))
}

fn written(time: Duration) -> Period {
    Period(u64::try_from(time.as_micros()).unwrap_or(LONGEST_RESET_US))
}

impl FromStr for Rule {
    type Err = RuleError;

    /// One limit, or several separated by commas. The rule has no name until [`Rule::named`], so that [`Rule::new`] is
    /// shorter.
    fn from_str(text: &str) -> Result<Self, RuleError> {
        let several = text.contains(',');
        let limit = |text: &str| {
            text.parse().map_err(|error| match several {
                true => RuleError::new(format!("{error} (a comma begins another limit)")),
                false => error,
            })
        };
        let (first, others) = text.split_once(',').map_or((text, None), |(first, others)| (first, Some(others)));
        let rule = Self::unnamed(limit(first)?);
        others.into_iter().flat_map(|others| others.split(',')).try_fold(rule, |rule, text| rule.and(limit(text)?))
    }
}

impl fmt::Debug for Rule {
    /// Its name, its limits in their text form, and whatever else was set.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Rule");
        shown.field("name", &self.name()).field("limits", &self.to_string());
        let parts: Vec<_> = self.scoped_limits().iter().filter_map(|scoped| scoped.by.as_deref()).collect();
        let costs: Vec<_> = self.scoped_limits().iter().map(|scoped| scoped.cost.as_ref()).collect();
        let mut set = |name, is_set, value: &dyn fmt::Debug| {
            if is_set {
                shown.field(name, value);
            }
        };
        set("parts", !parts.is_empty(), &parts);
        set("tag", self.tag.is_some(), &self.tag);
        set("on_change", self.on_change != OnChange::KeepUsed, &self.on_change);
        set("count_overage", self.counts_overage, &self.counts_overage);
        set("block_for", self.block_for.is_some(), &self.block_for);
        set("max_hold", self.max_hold.is_some(), &self.max_hold);
        set("on_error", self.on_error.is_some(), &self.on_error);
        set("cost", self.cost != 1, &self.cost);
        set("costs", costs.iter().any(Option::is_some), &costs);
        set("hash_keys", self.hash_keys.is_some(), &self.hash_keys);
        set("rules", self.rules.is_some(), &self.rules);
        shown.finish()
    }
}

impl fmt::Display for Rule {
    /// The limits' text form. Names, parts and settings are not part of it: serialized, a rule keeps them.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, limit) in self.limits().enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            write!(f, "{comma}{limit}")?;
        }
        Ok(())
    }
}
