//! Limits and rules in files and JSON: a limit's line, or a table.

use serde::de::{Deserializer, Error};
use serde::{Deserialize, Serialize, Serializer};

use super::fields::RuleFields;
use super::forms::{Form, read};
use super::{Limit, OnChange, Rule};
use crate::error::RuleError;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct NamedLimit {
    name: String,
    limit: String,
}

impl Serialize for Limit {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.name() {
            None => serializer.collect_str(self),
            Some(name) => NamedLimit { name: name.to_owned(), limit: self.to_string() }.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for Limit {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        read(deserializer)
    }
}

impl<'de> Form<'de> for Limit {
    const EXPECTED: &'static str = "a limit's line, or a table of name and limit";

    fn text(line: &str) -> Result<Self, RuleError> {
        line.parse()
    }

    fn table<D: Deserializer<'de>>(table: D) -> Result<Self, D::Error> {
        let NamedLimit { name, limit } = NamedLimit::deserialize(table)?;
        limit.parse().and_then(|limit: Self| limit.named(&name)).map_err(D::Error::custom)
    }
}

enum LineOrTable {
    Line(String),
    Table(Box<RuleFields>),
}

impl Serialize for Rule {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.is_joined() {
            return Err(serde::ser::Error::custom("several rules that apply together can't be written as one"));
        }
        RuleFields::of(self).serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Rule {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match read::<LineOrTable, _>(deserializer)? {
            LineOrTable::Line(line) => line.parse(),
            LineOrTable::Table(fields) => fields.rule(),
        }
        .map_err(D::Error::custom)
    }
}

impl<'de> Form<'de> for LineOrTable {
    const EXPECTED: &'static str = "a limit's line, or a table of name, limits and tag";

    fn text(line: &str) -> Result<Self, RuleError> {
        Ok(Self::Line(line.to_owned()))
    }

    fn table<D: Deserializer<'de>>(table: D) -> Result<Self, D::Error> {
        RuleFields::deserialize(table).map(|fields| Self::Table(Box::new(fields)))
    }
}

impl Serialize for OnChange {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for OnChange {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}
