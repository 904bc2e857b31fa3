//! The fields of a rule as written, and the rule that they make: in a table of its own, and in a set's file.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::forms::{Form, read};
use super::{Limit, OnChange, OnError, OwnCost, Rule, ScopedLimit, whole};
use crate::error::RuleError;
use crate::limit::Period;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RuleFields {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) name: Option<String>,
    pub(crate) limits: Vec<LimitFields>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tag: Option<String>,
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub(crate) cost: u64,
    #[serde(default, skip_serializing_if = "is_default")]
    pub(crate) on_change: OnChange,
    #[serde(default, skip_serializing_if = "is_default")]
    pub(crate) overage: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) block_for: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) max_hold: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) hash_keys: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) on_error: Option<OnErrorName>,
    /// How many processes share a `local` rule.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) processes: Option<NonZeroU32>,
}

/// One of the limits: its line, or a table. A rule's own limit counts by one part of a request, a set's by several
/// attributes: `K`.
#[derive(Clone, Debug)]
pub(crate) struct LimitFields<K = Option<String>> {
    pub(crate) name: Option<String>,
    pub(crate) limit: String,
    pub(crate) key: K,
    pub(crate) cost: Option<OwnCost>,
    /// Only in a set's rules, which find the attributes in requests.
    pub(crate) missing: Option<Missing>,
}

/// The policy while Redis is unreachable, as written; see [`OnError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
#[allow(unreachable_pub, reason = "exported with sets of rules, which are a feature of their own")]
pub enum OnErrorName {
    /// The error.
    Closed,
    /// Allowed.
    Open,
    /// The engine in this process decides by its share; `processes` says how many there are.
    Local,
}

/// What happens to a request that lacks an attribute that its rule, or one of its limits, counts by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
#[allow(unreachable_pub, reason = "exported with sets of rules, which are a feature of their own")]
pub enum Missing {
    /// Denied.
    #[default]
    Deny,
    /// The next rule that matches applies; of a limit, its rule's others.
    Skip,
}

/// Why fields make no rule.
#[allow(dead_code, reason = "sets of rules, which are a feature, also say where")]
pub(crate) struct Refusal {
    pub(crate) field: &'static str,
    /// Which one of the limits, if it is one of them.
    pub(crate) item: Option<usize>,
    pub(crate) why: Why,
}

/// Faults that each form of a rule reports in its own words, and errors in the same words for all.
#[allow(dead_code, reason = "sets of rules, which are a feature, also say what was written")]
pub(crate) enum Why {
    NoLimits,
    /// What is wrong with `on_error` and `processes` together.
    Policy(String),
    /// The text of a time that is zero.
    NoTime(String),
    Error(String),
}

impl RuleFields {
    pub(crate) fn of(rule: &Rule) -> Self {
        let (on_error, processes) = OnErrorName::parts(rule.on_error);
        let [block_for, max_hold] = [rule.block_period(), rule.hold_period()].map(|time| Some(time?.to_string()));
        Self {
            name: rule.name().map(str::to_owned),
            limits: rule.limits.iter().map(LimitFields::of).collect(),
            tag: rule.tag().map(str::to_owned),
            cost: rule.cost,
            on_change: rule.on_change,
            overage: rule.counts_overage,
            block_for,
            max_hold,
            hash_keys: rule.hash_keys,
            on_error,
            processes,
        }
    }

    /// The rule of a table of its own.
    pub(super) fn rule(mut self) -> Result<Rule, RuleError> {
        let limits = std::mem::take(&mut self.limits);
        if limits.iter().any(|limit| limit.missing.is_some()) {
            return Err(RuleError::new("the field missing: only a limit in a set of rules can have it"));
        }
        self.build(limits.into_iter().map(Ok), |text| text.parse().map(Arc::new)).map_err(
            |Refusal { field, why, .. }| {
                let subject = self.name.map_or_else(|| "rule".to_owned(), |name| format!("rule {name}"));
                RuleError::new(match why {
                    Why::NoLimits => format!("{subject}: limits: they are missing: write at least one"),
                    Why::Policy(why) => format!("{subject}: {why}"),
                    Why::NoTime(_) => format!("{field}: {}", whole(Duration::ZERO).err().unwrap_or_default()),
                    Why::Error(error) => error,
                })
            },
        )
    }

    /// The rule with these limits in place of its own. The first mistake is reported, in the order of the name, the
    /// limits and the other fields; that may be one which was found in a limit before it came here.
    pub(crate) fn build<E: From<Refusal>>(
        &self,
        limits: impl IntoIterator<Item = Result<LimitFields, E>>,
        mut read: impl FnMut(&str) -> Result<Arc<Limit>, RuleError>,
    ) -> Result<Rule, E> {
        let mut rule = self.without_limits().map_err(|error| Refusal::of("name", &error))?;
        for (item, limit) in limits.into_iter().enumerate() {
            let more = limit?.added_to(rule, &mut read);
            rule = more.map_err(|error| Refusal { item: Some(item), ..Refusal::of("limits", &error) })?;
        }
        if rule.limits.is_empty() {
            return Err(Refusal { field: "limits", item: None, why: Why::NoLimits }.into());
        }
        Ok(self.with_limits(rule)?)
    }

    fn without_limits(&self) -> Result<Rule, RuleError> {
        let rule = Rule {
            tag: self.tag.as_deref().map(Arc::from),
            on_change: self.on_change,
            counts_overage: self.overage,
            hash_keys: self.hash_keys,
            ..Rule::of(Vec::new())
        };
        match &self.name {
            Some(name) => rule.named(name),
            None => Ok(rule),
        }
    }

    /// The rule, which has its limits, with the fields that are checked against them.
    fn with_limits(&self, rule: Rule) -> Result<Rule, Refusal> {
        let mut rule = rule.cost(self.cost).map_err(|error| Refusal::of("cost", &error))?;
        if let Some(text) = &self.block_for {
            rule = rule.block_for(time("block_for", text)?).map_err(|error| Refusal::of("block_for", &error))?;
        }
        if let Some(text) = &self.max_hold {
            rule = rule.max_hold(time("max_hold", text)?).map_err(|error| Refusal::of("max_hold", &error))?;
        }
        match OnErrorName::of(self.on_error, self.processes)? {
            Some(policy) => rule.on_error(policy).map_err(|error| Refusal::of("limits", &error)),
            None => Ok(rule),
        }
    }
}

/// A time as written in this field.
pub(crate) fn time(field: &'static str, text: &str) -> Result<Duration, Refusal> {
    let why = match text.parse::<Period>() {
        Ok(Period(0)) => Why::NoTime(text.to_owned()),
        Ok(Period(us)) => return Ok(Duration::from_micros(us)),
        Err(error) => Why::Error(format!("{field}: {error}")),
    };
    Err(Refusal { field, item: None, why })
}

impl Refusal {
    fn of(field: &'static str, error: &RuleError) -> Self {
        Self { field, item: None, why: Why::Error(error.to_string()) }
    }
}

impl OnErrorName {
    fn parts(policy: Option<OnError>) -> (Option<Self>, Option<NonZeroU32>) {
        let Some(policy) = policy else { return (None, None) };
        match policy.processes() {
            Some(processes) => (Some(Self::Local), Some(processes)),
            None if policy == OnError::Open => (Some(Self::Open), None),
            None => (Some(Self::Closed), None),
        }
    }

    fn of(policy: Option<Self>, processes: Option<NonZeroU32>) -> Result<Option<OnError>, Refusal> {
        let (field, why) = match (policy, processes) {
            (None, None) => return Ok(None),
            (Some(Self::Closed), None) => return Ok(Some(OnError::Closed)),
            (Some(Self::Open), None) => return Ok(Some(OnError::Open)),
            (Some(Self::Local), Some(processes)) => match OnError::local(processes) {
                Ok(local) => return Ok(Some(local)),
                Err(why) => ("on_error", why.to_owned()),
            },
            (Some(Self::Local), None) => {
                let why = "processes is missing: on_error = \"local\" shares the rule among that many processes";
                ("on_error", why.to_owned())
            }
            (_, Some(processes)) => {
                ("processes", format!("expected on_error = \"local\" beside processes = {processes}"))
            }
        };
        Err(Refusal { field, item: None, why: Why::Policy(why) })
    }
}

impl LimitFields {
    fn of(scoped: &ScopedLimit) -> Self {
        let ScopedLimit { limit, by, cost, .. } = scoped;
        let (name, cost) = (limit.name().map(str::to_owned), cost.clone());
        Self { name, limit: limit.to_string(), key: by.clone(), cost, missing: None }
    }

    fn added_to(
        self,
        rule: Rule,
        read: &mut impl FnMut(&str) -> Result<Arc<Limit>, RuleError>,
    ) -> Result<Rule, RuleError> {
        let mut limit = read(&self.limit)?;
        if let Some(name) = self.name {
            limit = Arc::new(Limit::clone(&limit).named(&name)?);
        }
        rule.with(limit, self.key, self.cost)
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct LimitTable<K: Default + PartialEq> {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    limit: String,
    #[serde(default, skip_serializing_if = "is_default")]
    key: K,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    cost: Option<OwnCost>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    missing: Option<Missing>,
}

impl<K: Clone + Default + PartialEq + Serialize> Serialize for LimitFields<K> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self { name, limit, key, cost, missing } = self;
        if name.is_none() && is_default(key) && cost.is_none() && missing.is_none() {
            return serializer.serialize_str(limit);
        }
        let (name, limit, key, cost) = (name.clone(), limit.clone(), key.clone(), cost.clone());
        LimitTable { name, limit, key, cost, missing: *missing }.serialize(serializer)
    }
}

impl<'de, K: Default + PartialEq + Deserialize<'de>> Deserialize<'de> for LimitFields<K> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        read(deserializer)
    }
}

impl<'de, K: Default + PartialEq + Deserialize<'de>> Form<'de> for LimitFields<K> {
    const EXPECTED: &'static str = "a limit's line, or a table of name, limit, key, cost and missing";

    fn text(line: &str) -> Result<Self, RuleError> {
        Ok(Self { name: None, limit: line.to_owned(), key: K::default(), cost: None, missing: None })
    }

    fn table<D: Deserializer<'de>>(table: D) -> Result<Self, D::Error> {
        let LimitTable { name, limit, key, cost, missing } = LimitTable::deserialize(table)?;
        Ok(Self { name, limit, key, cost, missing })
    }
}

impl Serialize for OwnCost {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Units(units) => serializer.serialize_u64(*units),
            Self::Named(name) => serializer.serialize_str(name),
        }
    }
}

impl<'de> Deserialize<'de> for OwnCost {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        read(deserializer)
    }
}

impl<'de> Form<'de> for OwnCost {
    const EXPECTED: &'static str = "units, or the name of an attribute that gives them";

    fn text(name: &str) -> Result<Self, RuleError> {
        Ok(Self::Named(name.into()))
    }

    fn units(units: u64) -> Option<Self> {
        Some(Self::Units(units))
    }
}

fn one() -> u64 {
    1
}

fn is_one(cost: &u64) -> bool {
    *cost == 1
}

pub(crate) fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}
