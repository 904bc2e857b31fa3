//! What a rule's keys have in common.

use super::{Rule, ScopedLimit};

impl Rule {
    /// Whether its limits count different keys, each with a slot of its own; a call's id is remembered beside the
    /// request's own key.
    pub(crate) fn counts_several_keys(&self, has_id: bool) -> bool {
        let own = (self.tag(), self.hash_keys != Some(false));
        let first = self.limits.first().filter(|_| !has_id).map_or(own, |scoped| self.slot(scoped));
        self.limits.iter().any(|scoped| self.slot(scoped) != first)
    }

    /// The part of the request that is the hash tag of this limit's keys, its key if none, and whether it may be hashed.
    fn slot<'r>(&'r self, scoped: &'r ScopedLimit) -> (Option<&'r str>, bool) {
        let rule = self.rule_of(scoped);
        (rule.tag().or(scoped.by.as_deref()), rule.hash_keys != Some(false))
    }

    /// How the markers of this rule's ids begin, after its name: the rule's limits, shortened, since a remembered
    /// answer belongs to them.
    pub(crate) fn marker(&self) -> String {
        let limits: Vec<_> = self.limits.iter().map(|scoped| scoped.suffix.as_str()).collect();
        let digest = sha1_smol::Sha1::from(limits.join(",")).digest().to_string();
        format!("{}#{}-", self.name.as_deref().unwrap_or_default(), &digest[..8])
    }
}
