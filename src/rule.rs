//! A rule: a named limit.

use std::fmt;
use std::str::FromStr;

use crate::error::RuleError;
use crate::key;
use crate::limit::Limit;

/// A named limit. The name tells its keys in Redis from those of other rules.
///
/// ```
/// use tollgate::Rule;
///
/// let rule: Rule = "gcra 100/1s burst 20".parse()?;
/// assert_eq!(rule.name(), "default");
/// let rule = rule.named("uploads")?;
/// assert_eq!(rule.to_string(), "gcra 100/1s burst 20");
/// # Ok::<(), tollgate::RuleError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Rule {
    name: String,
    limit: Limit,
    /// `<rule>/<limit>`, the end of each key.
    suffix: String,
}

impl Rule {
    /// A rule of this name.
    ///
    /// # Errors
    ///
    /// A name that isn't 1 to 64 letters, digits, `-`, `_` or `.`.
    pub fn new(name: &str, limit: Limit) -> Result<Self, RuleError> {
        let name = key::checked_name(name)?.to_owned();
        let suffix = format!("{name}/{}", limit.label());
        Ok(Self { name, limit, suffix })
    }

    /// The same limit under another name.
    ///
    /// # Errors
    ///
    /// As [`Rule::new`].
    pub fn named(self, name: &str) -> Result<Self, RuleError> {
        Self::new(name, self.limit)
    }

    /// The name; `default` unless given. Rules of one name share the state of limits alike in algorithm and period.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What it admits.
    #[must_use]
    pub fn limit(&self) -> &Limit {
        &self.limit
    }

    pub(crate) fn suffix(&self) -> &str {
        &self.suffix
    }
}

impl FromStr for Rule {
    type Err = RuleError;

    /// Named `default`: two rules of one algorithm and period need [names](Rule::named), or they share their state.
    fn from_str(text: &str) -> Result<Self, RuleError> {
        Self::new("default", text.parse()?)
    }
}

impl fmt::Display for Rule {
    /// The limit's text form; the name is not part of it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.limit.fmt(f)
    }
}

#[cfg(feature = "serde")]
mod serialized {
    use std::fmt;

    use serde::de::value::MapAccessDeserializer;
    use serde::de::{Error, MapAccess, Visitor};
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use super::{Limit, Rule};

    #[derive(Serialize, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Table {
        name: String,
        limit: Limit,
    }

    impl Serialize for Rule {
        fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            Table { name: self.name.clone(), limit: self.limit.clone() }.serialize(serializer)
        }
    }

    impl<'de> Deserialize<'de> for Rule {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
            deserializer.deserialize_any(LineOrTable)
        }
    }

    /// A limit's line, or a table with a name. Each form tells its own mistakes.
    struct LineOrTable;

    impl<'de> Visitor<'de> for LineOrTable {
        type Value = Rule;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a limit's line, or a table of name and limit")
        }

        fn visit_str<E: Error>(self, line: &str) -> Result<Rule, E> {
            line.parse().map_err(E::custom)
        }

        fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Rule, A::Error> {
            let Table { name, limit } = Table::deserialize(MapAccessDeserializer::new(map))?;
            Rule::new(&name, limit).map_err(A::Error::custom)
        }
    }
}
