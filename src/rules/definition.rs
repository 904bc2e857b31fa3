//! A set of rules as written: in a file, in JSON, or in code.

use std::collections::BTreeMap;
use std::num::NonZeroU32;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::error::RuleError;
use crate::rule::fields::{LimitFields, Missing, OnErrorName, RuleFields, is_default};
use crate::rule::forms::{self, Form};
use crate::rule::{OnChange, OwnCost, Rule};

/// A whole file.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Document {
    /// Files with more rules, relative to this one; a final `*.toml` means every such file in a directory.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) include: Vec<String>,
    #[serde(skip_serializing_if = "is_default")]
    pub(super) ignore_case: bool,
    #[serde(skip_serializing_if = "is_default")]
    pub(super) paths: Paths,
    #[serde(skip_serializing_if = "is_default")]
    pub(super) descriptors: Descriptors,
    /// Limits by name, which rules write as `$name`.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) variables: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "is_default")]
    pub(super) defaults: Defaults,
    #[serde(rename = "rule", skip_serializing_if = "Vec::is_empty")]
    pub(super) rules: Vec<Definition>,
}

impl Document {
    /// A setting in it other than rules.
    pub(super) fn setting(&self) -> Option<&'static str> {
        let settings = [
            ("include", !self.include.is_empty()),
            ("ignore_case", !is_default(&self.ignore_case)),
            ("paths", !is_default(&self.paths)),
            ("descriptors", !is_default(&self.descriptors)),
            ("[variables]", !self.variables.is_empty()),
            ("[defaults]", !is_default(&self.defaults)),
        ];
        settings.into_iter().find(|(_, said)| *said).map(|(name, _)| name)
    }
}

/// Values for what a rule leaves out.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Defaults {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) shadow: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) missing: Option<Missing>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) ipv6_prefix: Option<u8>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) block_for: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) on_error: Option<OnErrorName>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) processes: Option<NonZeroU32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) on_change: Option<OnChange>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) overage: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) hash_keys: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) status: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) message: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) retry_after: Option<String>,
}

/// One rule of a set as written, field by field as in a [file](super#the-file). It is checked when a
/// [`RuleSet`](super::RuleSet) is built from it.
///
/// ```
/// use tollgate::rules::{Definition, RuleSet};
///
/// let mut free = Definition::new("free");
/// free.conditions.insert("tier".into(), ["free"].into());
/// free.key = ["user"].into();
/// free.limits = vec!["token-bucket 1000/1h burst 20".into()];
/// let rules = RuleSet::new([free])?;
/// # Ok::<(), tollgate::rules::RuleSetError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Definition {
    /// 1 to 64 letters, digits, `-`, `_` or `.`, unique in a set; not `user-quota`, `key-quota` or `api-key-look-ups`.
    /// The rule's keys in Redis end with it.
    pub name: String,
    /// Higher priorities first; among equals, the rule that is written first. Default: 0.
    #[serde(default, skip_serializing_if = "is_default")]
    pub priority: i64,
    /// What a request must have: all of these attributes, each with one of these values. `match` in a file.
    #[serde(default, rename = "match", skip_serializing_if = "BTreeMap::is_empty")]
    pub conditions: BTreeMap<String, OneOrMore>,
    /// What it counts by: attributes, or only `global`.
    #[serde(default, skip_serializing_if = "OneOrMore::is_empty")]
    pub key: OneOrMore,
    /// Its limits: a request is charged to all of them, or to none.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "forms::read")]
    pub limits: Vec<LimitDefinition>,
    /// The attribute within which all its keys count, and which they share as hash tag, or `global`. Default: each key
    /// counts by itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
    /// A request's cost: a number of units, or the value of an attribute. Default: 1.
    #[serde(default, skip_serializing_if = "is_default")]
    pub cost: Cost,
    /// The least units that a cost from an attribute counts as. Default: 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_cost: Option<u64>,
    /// The HTTP statuses of responses after which a request stays charged, such as `401` or `4xx`: if its response has
    /// any other, the middleware gives back what the request took. In a file, a single status may be a number. Default:
    /// all.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "statuses")]
    pub count: Option<OneOrMore>,
    /// What happens to a request that it applies to. Default: throttle.
    #[serde(default, skip_serializing_if = "is_default")]
    pub action: Action,
    /// Decides and reports only; the next rule that matches applies. Default: false.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shadow: Option<bool>,
    /// Whether the next rule that matches applies as well: the limits of both are one decision, all or nothing. For
    /// rules that throttle. Default: false.
    #[serde(default, rename = "continue", skip_serializing_if = "is_default")]
    pub continues: bool,
    /// What happens to a request that lacks an attribute that the rule counts by. Default: it is denied.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub missing: Option<Missing>,
    /// The prefix length of the networks that IPv6 addresses count as, in bits, 1 to 128. Default: 64.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv6_prefix: Option<u8>,
    /// How long permits are renewed at most, such as `10m`. Default: for as long as they are held.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_hold: Option<String>,
    /// How long a denied key is blocked, such as `15m`; a shadow rule blocks none. Default: not at all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub block_for: Option<String>,
    /// Other limits for single keys, such as `user:42`; values may also be `block` and `allow`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub overrides: BTreeMap<String, String>,
    /// Keys that are denied, such as `user:42`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub block: Vec<String>,
    /// Keys that are always allowed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub allow: Vec<String>,
    /// The policy while Redis is unreachable. Default: the limiter's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_error: Option<OnErrorName>,
    /// How many processes share a rule whose `on_error` is local.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub processes: Option<NonZeroU32>,
    /// What happens to state when the limits' numbers have changed. Default: what was used stays used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_change: Option<OnChange>,
    /// Whether denied calls are counted. Default: false.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overage: Option<bool>,
    /// Whether its keys are hashed with the limiter's secret. Default: they are if the limiter has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hash_keys: Option<bool>,
    /// The HTTP status of a denial, 400 to 599. Default: 429; 403 if something is blocked, and 400 if the request lacks
    /// what the rule counts by.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<u16>,
    /// A denial's message.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// The wait that a denial reports, such as `1h`, instead of the true one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_after: Option<String>,
}

/// One limit of a rule: a line, or a table if it has a name, counts by something other than its rule, or has a cost of
/// its own.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(from = "LimitFields<OneOrMore>", into = "LimitFields<OneOrMore>")]
#[non_exhaustive]
pub struct LimitDefinition {
    /// Its name in its key. Default: its attributes, joined by `-`, if it counts by its own; otherwise its algorithm
    /// and period.
    pub name: Option<String>,
    /// Its text, such as `token-bucket 10/1s`, or `$name` of a variable.
    pub limit: String,
    /// The attributes that it counts by. Default: its rule's.
    pub key: OneOrMore,
    /// What a request takes of it, whatever its rule's `cost` is. Default: its rule's.
    pub cost: Option<Cost>,
    /// What happens to a request that lacks an attribute of its own key or cost: `Skip` leaves this limit out, and the
    /// others decide. Default: what the rule says.
    pub missing: Option<Missing>,
}

/// A string, or a list of them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OneOrMore(pub Vec<String>);

/// How the service behind the rules reads a path; the rules must read it in the same way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Paths {
    /// As `Decoded`, except that the [middleware](crate::middleware) refuses a path that other servers would read
    /// differently, if a rule looks at paths.
    #[default]
    Unambiguous,
    /// Decoded first and then split, as proxies and file servers do: `%2F` is a slash, and `..` leads out of a segment.
    Decoded,
    /// As axum's router does: split first, then compared as it was sent. `%2F` and `..` are part of a segment, an
    /// encoded letter is no letter, and an empty segment, such as after a final slash, makes another path. A key by
    /// `path` is counted as with `Decoded`, so that all spellings which a handler may be given count as one. Single
    /// keys of such a rule may be blocked (in `block`, or as `"block"` in `overrides`), but neither allowed nor given
    /// other limits.
    Segments,
}

/// How a rate limit service decides a gateway's request of several descriptors, each of which is a request to the rules.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Descriptors {
    /// All are allowed, or nothing is taken: one decision, atomic on one Redis.
    #[default]
    Together,
    /// Each takes what it is allowed, whatever becomes of the others, as Envoy's own service does.
    Each,
}

/// How a set of rules reads requests. In a file, `ignore_case`, `paths` and `descriptors` say so.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Reading {
    /// Whether the ASCII letters of paths and patterns are compared ignoring case. Default: false.
    pub ignore_case: bool,
    /// How paths are read. Default: [`Paths::Unambiguous`].
    pub paths: Paths,
    /// How a rate limit service decides several descriptors. Default: [`Descriptors::Together`].
    pub descriptors: Descriptors,
}

/// A request's cost.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(from = "OwnCost", into = "OwnCost")]
#[non_exhaustive]
pub enum Cost {
    /// A number of units.
    Units(u64),
    /// The value of this attribute, a whole number.
    Attribute(String),
}

/// What happens to a request that a rule applies to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Action {
    /// Its limits decide.
    #[default]
    Throttle,
    /// Denied.
    Block,
    /// Allowed, and nothing is counted.
    Allow,
}

impl Definition {
    /// A rule with this name and nothing else yet.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Self { name: name.to_owned(), ..Self::default() }
    }

    /// A rule with these limits for all requests, counting by these attributes.
    pub(super) fn of(rule: &Rule, key: impl Into<OneOrMore>) -> Self {
        let fields = RuleFields::of(rule);
        let limits = fields.limits.into_iter().map(|LimitFields { name, limit, key, cost, missing }| LimitDefinition {
            name,
            limit,
            key: OneOrMore(key.into_iter().collect()),
            cost: cost.map(Cost::from),
            missing,
        });
        Self {
            name: fields.name.unwrap_or_default(),
            key: key.into(),
            limits: limits.collect(),
            tag: fields.tag,
            cost: Cost::Units(fields.cost),
            block_for: fields.block_for,
            max_hold: fields.max_hold,
            on_error: fields.on_error,
            processes: fields.processes,
            on_change: Some(fields.on_change),
            overage: Some(fields.overage),
            hash_keys: fields.hash_keys,
            ..Self::default()
        }
    }

    /// Its fields that are a rule's own, but for the limits, which overrides replace.
    pub(super) fn fields(&self) -> RuleFields {
        RuleFields {
            name: Some(self.name.clone()),
            limits: Vec::new(),
            tag: self.tag.clone(),
            cost: if let Cost::Units(units) = self.cost { units } else { 1 },
            on_change: self.on_change.unwrap_or_default(),
            overage: self.overage.unwrap_or_default(),
            block_for: self.block_for.clone(),
            max_hold: self.max_hold.clone(),
            hash_keys: self.hash_keys,
            on_error: self.on_error,
            processes: self.processes,
        }
    }

    /// The attributes that it matches, counts or costs by.
    pub(super) fn attributes(&self) -> impl Iterator<Item = &str> {
        let costs = self.limits.iter().filter_map(|limit| limit.cost.as_ref()).chain([&self.cost]);
        let costs = costs.filter_map(|cost| match cost {
            Cost::Attribute(name) => Some(name),
            Cost::Units(_) => None,
        });
        let limits = self.limits.iter().flat_map(|limit| &limit.key.0);
        let names = self.conditions.keys().chain(&self.key.0).chain(&self.tag).chain(limits).chain(costs);
        names.map(String::as_str).filter(|name| *name != "global")
    }

    /// With these defaults for what it leaves out.
    pub(super) fn or(mut self, defaults: &Defaults) -> Self {
        let denies = self.action != Action::Allow;
        let throttles = self.action == Action::Throttle;
        self.shadow = self.shadow.or(defaults.shadow);
        if throttles {
            self.missing = self.missing.or(defaults.missing);
            self.ipv6_prefix = self.ipv6_prefix.or(defaults.ipv6_prefix);
            self.block_for = self.block_for.or_else(|| defaults.block_for.clone());
            if self.on_error.is_none() {
                self.on_error = defaults.on_error;
                self.processes = self.processes.or(defaults.processes);
            }
            self.on_change = self.on_change.or(defaults.on_change);
            self.overage = self.overage.or(defaults.overage);
            self.hash_keys = self.hash_keys.or(defaults.hash_keys);
        }
        if denies {
            self.message = self.message.or_else(|| defaults.message.clone());
            self.retry_after = self.retry_after.or_else(|| defaults.retry_after.clone());
        }
        if throttles {
            self.status = self.status.or(defaults.status);
        }
        self
    }
}

impl OneOrMore {
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl<T: Into<String>, const N: usize> From<[T; N]> for OneOrMore {
    fn from(values: [T; N]) -> Self {
        Self(values.into_iter().map(Into::into).collect())
    }
}

impl From<&str> for OneOrMore {
    fn from(value: &str) -> Self {
        [value].into()
    }
}

impl From<&str> for LimitDefinition {
    fn from(line: &str) -> Self {
        Self { limit: line.to_owned(), ..Self::default() }
    }
}

impl Default for Cost {
    fn default() -> Self {
        Self::Units(1)
    }
}

impl Serialize for OneOrMore {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0.as_slice() {
            [one] => serializer.serialize_str(one),
            several => several.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for OneOrMore {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        forms::read(deserializer)
    }
}

impl<'de> Form<'de> for OneOrMore {
    const EXPECTED: &'static str = "a string, or a list of strings";

    fn text(one: &str) -> Result<Self, RuleError> {
        Ok(one.into())
    }

    fn list<D: Deserializer<'de>>(list: D) -> Result<Self, D::Error> {
        Vec::deserialize(list).map(Self)
    }
}

/// Statuses, each a number or a text.
struct Statuses(OneOrMore);

/// One of them.
struct Status(String);

fn statuses<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<OneOrMore>, D::Error> {
    forms::read(deserializer).map(|Statuses(statuses)| Some(statuses))
}

impl<'de> Form<'de> for Statuses {
    const EXPECTED: &'static str = "a status, or a list of them, such as [401, \"5xx\"]";

    fn text(one: &str) -> Result<Self, RuleError> {
        Ok(Self(one.into()))
    }

    fn units(one: u64) -> Option<Self> {
        Some(Self(one.to_string().as_str().into()))
    }

    fn list<D: Deserializer<'de>>(list: D) -> Result<Self, D::Error> {
        let each = Vec::<Status>::deserialize(list)?;
        Ok(Self(OneOrMore(each.into_iter().map(|Status(text)| text).collect())))
    }
}

impl<'de> Deserialize<'de> for Status {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        forms::read(deserializer)
    }
}

impl<'de> Form<'de> for Status {
    const EXPECTED: &'static str = "a status, such as 401 or \"4xx\"";

    fn text(one: &str) -> Result<Self, RuleError> {
        Ok(Self(one.to_owned()))
    }

    fn units(one: u64) -> Option<Self> {
        Some(Self(one.to_string()))
    }
}

impl<'de> Form<'de> for Vec<LimitDefinition> {
    const EXPECTED: &'static str = "a list of limits, such as [\"token-bucket 10/1s\"]";

    fn text(one: &str) -> Result<Self, RuleError> {
        Ok(vec![one.into()])
    }

    fn list<D: Deserializer<'de>>(list: D) -> Result<Self, D::Error> {
        Self::deserialize(list)
    }
}

impl From<OwnCost> for Cost {
    fn from(cost: OwnCost) -> Self {
        match cost {
            OwnCost::Units(units) => Self::Units(units),
            OwnCost::Named(name) => Self::Attribute((*name).to_owned()),
        }
    }
}

impl From<Cost> for OwnCost {
    fn from(cost: Cost) -> Self {
        match cost {
            Cost::Units(units) => Self::Units(units),
            Cost::Attribute(name) => Self::Named(name.into()),
        }
    }
}

impl From<LimitFields<OneOrMore>> for LimitDefinition {
    fn from(LimitFields { name, limit, key, cost, missing }: LimitFields<OneOrMore>) -> Self {
        Self { name, limit, key, cost: cost.map(Cost::from), missing }
    }
}

impl From<LimitDefinition> for LimitFields<OneOrMore> {
    fn from(LimitDefinition { name, limit, key, cost, missing }: LimitDefinition) -> Self {
        Self { name, limit, key, cost: cost.map(OwnCost::from), missing }
    }
}
