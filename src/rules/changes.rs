//! What makes one set of rules another.

use std::collections::{BTreeMap, BTreeSet};

use super::RuleSet;

/// What makes one set of rules another, by their names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RuleChanges {
    /// Those that were not there.
    pub added: Vec<String>,
    /// Those that say something else.
    pub changed: Vec<String>,
    /// Those that are not there any more.
    pub removed: Vec<String>,
    /// Whether others stand in another order, which decides between rules of one priority.
    pub reordered: bool,
    /// Whether something that all rules share says otherwise, such as how paths are read.
    pub settings: bool,
}

impl RuleSet {
    /// What makes the other set of this one.
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

    /// Of rules in their order, each by its name.
    pub(crate) fn between<T: PartialEq>(before: &[(String, T)], after: &[(String, T)], settings: bool) -> Self {
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
