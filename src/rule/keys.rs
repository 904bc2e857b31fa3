//! What a rule's keys have in common.

use super::Rule;

impl Rule {
    /// Whether its limits may count different keys, each with a slot of its own.
    pub(crate) fn counts_several_keys(&self) -> bool {
        let first = self.limits.first().and_then(|scoped| scoped.by.as_ref());
        // Rules that apply together may count one key by different names.
        self.is_joined() || self.tag.is_none() && self.limits.iter().any(|scoped| scoped.by.as_ref() != first)
    }

    /// How the markers of this rule's ids begin, after its name: the rule's limits, shortened, since a remembered
    /// answer belongs to them.
    pub(crate) fn marker(&self) -> String {
        let limits: Vec<_> = self.limits.iter().map(|scoped| scoped.suffix.as_str()).collect();
        let digest = sha1_smol::Sha1::from(limits.join(",")).digest().to_string();
        format!("{}#{}-", self.name.as_deref().unwrap_or_default(), &digest[..8])
    }
}
