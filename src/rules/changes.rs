//! The differences between two sets of rules.

use std::collections::{BTreeMap, BTreeSet};

use super::RuleSet;

/// The differences between two sets of rules, by the rules' names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RuleChanges {
    /// Rules that are new.
    pub added: Vec<String>,
    /// Rules that differ.
    pub changed: Vec<String>,
    /// Rules that are gone.
    pub removed: Vec<String>,
    /// Whether other rules changed places, which decides between rules of the same priority.
    pub reordered: bool,
    /// Whether a setting shared by all rules differs, such as how paths are read.
    pub settings: bool,
}

impl RuleSet {
    /// The changes from this set to the other.
    #[must_use]
    pub fn changes_to(&self, after: &Self) -> RuleChanges {
        let named =
            |set: &Self| -> Vec<_> { set.definitions().iter().map(|rule| (rule.name.clone(), rule.clone())).collect() };
        RuleChanges::between(&named(self), &named(after), self.shared.reading != after.shared.reading)
    }
}

impl RuleChanges {
    /// Whether the sets are the same.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Whether rules differ, or their places, rather than settings alone.
    #[must_use]
    pub fn has_rules(&self) -> bool {
        self.reordered || [&self.added, &self.changed, &self.removed].into_iter().any(|names| !names.is_empty())
    }

    /// The changes between rules kept in another form, each with its name and in order.
    #[doc(hidden)]
    #[must_use]
    pub fn between<T: PartialEq>(before: &[(String, T)], after: &[(String, T)], settings: bool) -> Self {
        let said: BTreeMap<_, _> = before.iter().map(|(name, said)| (name, said)).collect();
        let still: BTreeSet<_> = after.iter().map(|(name, _)| name).collect();
        let names = |rules: &[(String, T)], kept: &dyn Fn(&String) -> bool| -> Vec<String> {
            rules.iter().map(|(name, _)| name).filter(|name| kept(name)).cloned().collect()
        };
        let changed = after.iter().filter(|(name, now)| said.get(name).is_some_and(|said| *said != now));
        Self {
            changed: changed.map(|(name, _)| name.clone()).collect(),
            reordered: names(before, &|name| still.contains(name)) != names(after, &|name| said.contains_key(name)),
            added: names(after, &|name| !said.contains_key(name)),
            removed: names(before, &|name| !still.contains(name)),
            settings,
        }
    }
}
