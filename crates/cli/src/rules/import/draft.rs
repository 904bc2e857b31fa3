//! The rules that a source becomes.

use std::collections::BTreeSet;

use toml::Value;

/// Names that the library uses itself.
const RESERVED: [&str; 3] = ["user-quota", "key-quota", "api-key-look-ups"];

/// The longest name of a rule.
const LONGEST: usize = 64;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Does {
    #[default]
    Limit,
    Block,
    Allow,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Rule {
    pub(super) name: String,
    /// Its line in the source.
    pub(super) line: usize,
    /// Comments above the rule in the file, a line each.
    pub(super) comments: Vec<String>,
    /// Attributes with the values of which one must match.
    pub(super) conditions: Vec<(String, Vec<String>)>,
    /// Empty to count all requests together.
    pub(super) key: Vec<String>,
    pub(super) limit: String,
    /// What the limit counts by, if that isn't the rule's key.
    pub(super) limit_key: Option<Vec<String>>,
    /// Keys that the rule doesn't count.
    pub(super) allow: Vec<String>,
    pub(super) does: Does,
    pub(super) shadow: bool,
    pub(super) continues: bool,
    pub(super) status: Option<u16>,
}

impl Rule {
    /// Adds a condition. False if no request could meet it together with the present ones.
    pub(super) fn must_have(&mut self, attribute: &str, value: &str) -> bool {
        match self.conditions.iter().find(|(name, _)| name == attribute) {
            Some((_, values)) => values.iter().any(|other| other == value),
            None => {
                self.conditions.push((attribute.to_owned(), vec![value.to_owned()]));
                true
            }
        }
    }

    /// Counts by these attributes, except for these values of `by`, which is the rule's key, since `allow` lists values
    /// of that; the limit has a key of its own.
    pub(super) fn count_all_but(&mut self, by: &str, values: &[String], attributes: Vec<String>) {
        self.allow = values.iter().map(|value| format!("{by}:{value}")).collect();
        self.key = vec![by.to_owned()];
        self.limit_key = (attributes != self.key).then_some(attributes);
    }

    /// Allows every request that it would count, whatever later rules say.
    pub(super) fn allow(&mut self) {
        for attribute in std::mem::take(&mut self.key) {
            self.must_be_there(&attribute);
        }
        (self.does, self.limit_key) = (Does::Allow, None);
    }

    /// Denies every request that it would count. False if it can't: a rule that blocks can't exempt a key.
    pub(super) fn deny(&mut self) -> bool {
        let is_possible = self.allow.is_empty();
        self.allow();
        (self.does, self.status) = (Does::Block, Some(429));
        is_possible
    }

    /// Whether all requests of the other match this one.
    pub(super) fn covers(&self, other: &Self) -> bool {
        self.conditions.iter().all(|(name, values)| {
            let theirs = other.conditions.iter().find(|(theirs, _)| theirs == name);
            let takes = |value: &String, of: &str| match &**name {
                "path" => covers_path(value, of),
                _ => value == "*" || value == of,
            };
            theirs.is_some_and(|(_, theirs)| theirs.iter().all(|of| values.iter().any(|value| takes(value, of))))
        })
    }

    /// Whether a request's attribute of this name matters to the rule.
    pub(super) fn asks_for(&self, attribute: &str) -> bool {
        let mut keys = self.key.iter().chain(self.limit_key.iter().flatten());
        self.conditions.iter().any(|(name, _)| name == attribute) || keys.any(|name| name == attribute)
    }

    fn must_be_there(&mut self, attribute: &str) {
        if !self.conditions.iter().any(|(name, _)| name == attribute) {
            self.conditions.push((attribute.to_owned(), vec!["*".to_owned()]));
        }
    }

    /// The rule as it stands in a file.
    pub(super) fn write(&self, file: &mut String) {
        let mut add = |field: &str, value: String| {
            file.push_str(&format!("{field} = {value}\n"));
        };
        add("name", text(&self.name));
        if !self.conditions.is_empty() {
            let condition =
                |(name, values): &(String, Vec<String>)| format!("{} = {}", field(name), one_or_list(values));
            let all: Vec<_> = self.conditions.iter().map(condition).collect();
            add("match", format!("{{ {} }}", all.join(", ")));
        }
        match self.does {
            Does::Limit => self.write_limit(&mut add),
            Does::Block => add("action", text("block")),
            Does::Allow => add("action", text("allow")),
        }
        if let Some(status) = self.status {
            add("status", status.to_string());
        }
        if self.shadow {
            add("shadow", "true".to_owned());
        }
        if self.continues && !self.shadow && self.does == Does::Limit {
            add("continue", "true".to_owned());
        }
    }

    fn write_limit(&self, add: &mut impl FnMut(&str, String)) {
        let global = || text("global");
        add("key", if self.key.is_empty() { global() } else { one_or_list(&self.key) });
        let limit = match &self.limit_key {
            None => text(&self.limit),
            Some(key) => {
                let key = if key.is_empty() { global() } else { one_or_list(key) };
                format!("{{ limit = {}, key = {key} }}", text(&self.limit))
            }
        };
        add("limits", format!("[{limit}]"));
        if !self.allow.is_empty() {
            add("allow", list(&self.allow));
        }
        if !self.key.is_empty() || self.limit_key.as_ref().is_some_and(|key| !key.is_empty()) {
            add("missing", text("skip"));
        }
    }
}

/// Removes the rules that could never apply, since an earlier one blocks all their requests, which is an error in a
/// file. Each is returned with the name of the blocking rule.
pub(super) fn uncovered(rules: Vec<Rule>) -> (Vec<Rule>, Vec<(Rule, String)>) {
    let (mut kept, mut covered) = (Vec::<Rule>::new(), Vec::new());
    for rule in rules {
        let blocks = |other: &&Rule| other.does == Does::Block && !other.shadow && other.covers(&rule);
        match kept.iter().find(blocks).map(|other| other.name.clone()) {
            Some(name) => covered.push((rule, name)),
            None => kept.push(rule),
        }
    }
    (kept, covered)
}

/// Whether a path pattern matches everything that the other matches.
fn covers_path(pattern: &str, other: &str) -> bool {
    let below = pattern.strip_suffix("/*").and_then(|around| other.strip_prefix(around));
    pattern == other || below.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

fn text(text: &str) -> String {
    Value::from(text).to_string()
}

fn list(texts: &[String]) -> String {
    format!("[{}]", texts.iter().map(|one| text(one)).collect::<Vec<_>>().join(", "))
}

fn one_or_list(texts: &[String]) -> String {
    if let [only] = texts { text(only) } else { list(texts) }
}

/// The name of a field, quoted unless it is plain.
fn field(name: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    if !name.is_empty() && name.bytes().all(plain) { name.to_owned() } else { text(name) }
}

/// Names of rules, each once.
#[derive(Debug, Default)]
pub(super) struct Names(BTreeSet<String>);

impl Names {
    /// A valid and unused name, as similar to this as possible.
    pub(super) fn of(&mut self, wanted: &str) -> String {
        let allowed = spelled(wanted);
        let base = allowed.trim_matches('_');
        let base = if base.is_empty() { "rule" } else { base };
        let mut name: String = base.chars().take(LONGEST).collect();
        let mut number = 2;
        while RESERVED.contains(&&*name) || self.0.contains(&name) {
            let end = format!("-{number}");
            name = base.chars().take(LONGEST - end.len()).collect::<String>() + &end;
            number += 1;
        }
        self.0.insert(name.clone());
        name
    }
}

/// Letters, digits, `-`, `_` and `.` stay; anything else is `_`.
pub(super) fn spelled(name: &str) -> String {
    let allowed = |letter: char| letter.is_ascii_alphanumeric() || ['-', '_', '.'].contains(&letter);
    name.chars().map(|letter| if allowed(letter) { letter } else { '_' }).collect()
}

/// A period of whole seconds, in the longest unit that it is a multiple of.
pub(super) fn period(seconds: u64) -> String {
    let units = [(86_400, "d"), (3600, "h"), (60, "m")];
    let fits = units.into_iter().find(|(unit, _)| seconds.is_multiple_of(*unit));
    fits.map_or_else(|| format!("{seconds}s"), |(unit, letter)| format!("{}{letter}", seconds / unit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_valid_and_each_is_given_once() {
        let mut names = Names::default();
        let long = "x".repeat(70);
        let given = ["a b", "a b", "a/b", "", "***", "user-quota", &long, &long].map(|wanted| names.of(wanted));
        let x = |count| "x".repeat(count);
        let expected =
            ["a_b", "a_b-2", "a_b-3", "rule", "rule-2", "user-quota-2", &x(64), &(x(62) + "-2")].map(str::to_owned);
        assert_eq!(given, expected);
    }

    #[test]
    fn a_period_has_the_unit_that_suits_it() {
        let periods = [1, 60, 90, 3600, 86_400, 604_800].map(period);
        assert_eq!(periods, ["1s", "1m", "90s", "1h", "1d", "7d"]);
    }
}
