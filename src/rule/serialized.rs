//! A rule as a limit's line, or as a table as in a rules file: name, limits, tag, and other fields.

use std::fmt;
use std::marker::PhantomData;
use std::num::NonZeroU32;
use std::time::Duration;

use serde::de::value::MapAccessDeserializer;
use serde::de::{Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::{Change, Limit, OnError, Rule, ScopedLimit};
use crate::error::RuleError;
use crate::limit::Period;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    limits: Vec<Entry>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tag: Option<String>,
    #[serde(default = "one", skip_serializing_if = "is_one")]
    cost: u64,
    #[serde(default, skip_serializing_if = "is_default")]
    on_change: Change,
    #[serde(default, skip_serializing_if = "is_default")]
    overage: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    block_for: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    max_hold: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    hash_keys: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    on_error: Option<Policy>,
    /// How many processes share a `local` rule.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    processes: Option<NonZeroU32>,
}

/// The policy while Redis is away, as written; see [`OnError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
#[allow(unreachable_pub, reason = "exported with sets of rules, which are a feature of their own")]
pub enum Policy {
    /// The error.
    Closed,
    /// Allowed.
    Open,
    /// The engine in this process decides by its share; `processes` says how many there are.
    Local,
}

impl Policy {
    /// The policy as written.
    pub(crate) fn parts(policy: Option<OnError>) -> (Option<Self>, Option<NonZeroU32>) {
        match policy {
            None => (None, None),
            Some(OnError::Closed) => (Some(Self::Closed), None),
            Some(OnError::Open) => (Some(Self::Open), None),
            Some(OnError::Local { processes }) => (Some(Self::Local), Some(processes)),
        }
    }

    /// The policy, or what was expected.
    pub(crate) fn of(policy: Option<Self>, processes: Option<NonZeroU32>) -> Result<Option<OnError>, String> {
        match (policy, processes) {
            (None, None) => Ok(None),
            (Some(Self::Closed), None) => Ok(Some(OnError::Closed)),
            (Some(Self::Open), None) => Ok(Some(OnError::Open)),
            (Some(Self::Local), Some(processes)) => Ok(Some(OnError::Local { processes })),
            (Some(Self::Local), None) => {
                Err("processes beside on_error = \"local\", which shares the rule among so many, got none".into())
            }
            (_, Some(processes)) => Err(format!("on_error = \"local\" beside processes = {processes}")),
        }
    }
}

fn one() -> u64 {
    1
}

fn is_one(cost: &u64) -> bool {
    *cost == 1
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// One of the limits: a line, or a table.
enum Entry {
    Line(String),
    Table(EntryTable),
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct EntryTable {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    limit: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    key: Option<String>,
}

impl Serialize for Rule {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let limits = self.limits.iter().map(Entry::of).collect();
        let (name, tag) = (self.name.clone(), self.tag.clone());
        let (on_error, processes) = Policy::parts(self.on_error);
        let (on_change, overage, cost, hash_keys) = (self.on_change, self.counts_denials, self.cost, self.hash_keys);
        let [block_for, max_hold] = [self.block_period(), self.hold_period()].map(|time| Some(time?.to_string()));
        Table { name, limits, tag, cost, on_change, overage, block_for, max_hold, hash_keys, on_error, processes }
            .serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Rule {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let form: LineOr<Table> = LineOr::new("a limit's line, or a table of name, limits and tag");
        match deserializer.deserialize_any(form)? {
            LineOrTable::Line(line) => line.parse(),
            LineOrTable::Table(table) => table.rule(),
        }
        .map_err(D::Error::custom)
    }
}

impl Table {
    fn rule(self) -> Result<Rule, RuleError> {
        let subject = self.name.as_ref().map_or_else(|| "rule".to_owned(), |name| format!("rule {name}"));
        let error = |expected: &str| Err(RuleError::new(format!("{subject}: expected {expected}")));
        let mut limits = self.limits.into_iter().map(Entry::limit);
        let Some(first) = limits.next() else { return error("at least one limit, got none") };
        let on_error = match Policy::of(self.on_error, self.processes) {
            Ok(on_error) => on_error,
            Err(expected) => return error(&expected),
        };
        let (limit, by) = first?;
        let mut rule = Rule::unnamed(limit);
        if let Some(name) = self.name {
            rule = rule.named(&name)?;
        }
        if let Some(tag) = self.tag {
            rule = rule.tagged(&tag);
        }
        if let Some(part) = by {
            rule = rule.by(&part)?;
        }
        for entry in limits {
            let (limit, by) = entry?;
            rule = match by {
                None => rule.and(limit)?,
                Some(part) => rule.and_by(&part, limit)?,
            };
        }
        rule = rule.on_change(self.on_change).count_denials(self.overage).cost(self.cost)?;
        rule.hash_keys = self.hash_keys;
        let time = |field: &str, text: String| -> Result<Duration, RuleError> {
            let read = text.parse().map_err(|error: RuleError| RuleError::new(format!("{field}: {error}")));
            read.map(|Period(us)| Duration::from_micros(us))
        };
        if let Some(text) = self.block_for {
            rule = rule.block_for(time("block_for", text)?)?;
        }
        if let Some(text) = self.max_hold {
            rule = rule.max_hold(time("max_hold", text)?)?;
        }
        match on_error {
            Some(on_error) => rule.on_error(on_error),
            None => Ok(rule),
        }
    }
}

impl Serialize for Change {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Change {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

impl Entry {
    fn of(scoped: &ScopedLimit) -> Self {
        match (scoped.limit.name(), &scoped.by) {
            (None, None) => Self::Line(scoped.limit.to_string()),
            (name, by) => Self::Table(EntryTable {
                name: name.map(str::to_owned),
                limit: scoped.limit.to_string(),
                key: by.clone(),
            }),
        }
    }

    fn limit(self) -> Result<(Limit, Option<String>), RuleError> {
        match self {
            Self::Line(line) => Ok((line.parse()?, None)),
            Self::Table(EntryTable { name, limit, key }) => {
                let limit: Limit = limit.parse()?;
                Ok((if let Some(name) = name { limit.named(&name)? } else { limit }, key))
            }
        }
    }
}

impl Serialize for Entry {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Line(line) => serializer.serialize_str(line),
            Self::Table(table) => table.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for Entry {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let form: LineOr<EntryTable> = LineOr::new("a limit's line, or a table of name, limit and key");
        Ok(match deserializer.deserialize_any(form)? {
            LineOrTable::Line(line) => Self::Line(line),
            LineOrTable::Table(table) => Self::Table(table),
        })
    }
}

pub(crate) enum LineOrTable<T> {
    Line(String),
    Table(T),
}

/// Reads a line or a table, with error messages for each form.
pub(crate) struct LineOr<T> {
    expected: &'static str,
    table: PhantomData<T>,
}

impl<T> LineOr<T> {
    pub(crate) fn new(expected: &'static str) -> Self {
        Self { expected, table: PhantomData }
    }
}

impl<'de, T: Deserialize<'de>> Visitor<'de> for LineOr<T> {
    type Value = LineOrTable<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.expected)
    }

    fn visit_str<E: Error>(self, line: &str) -> Result<LineOrTable<T>, E> {
        Ok(LineOrTable::Line(line.to_owned()))
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<LineOrTable<T>, A::Error> {
        T::deserialize(MapAccessDeserializer::new(map)).map(LineOrTable::Table)
    }
}
