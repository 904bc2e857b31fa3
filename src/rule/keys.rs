//! What a rule's keys have in common.

use super::{Rule, ScopedLimit};
use crate::error::Error;
use crate::key::{Key, Name};

impl Rule {
    /// Whether its limits may count different keys, each with a slot of its own.
    pub(crate) fn counts_several_keys(&self) -> bool {
        let first = self.limits.first().and_then(|scoped| scoped.by.as_ref());
        // Rules that apply together may count one key by different names.
        self.is_joined() || self.tag.is_none() && self.limits.iter().any(|scoped| scoped.by.as_ref() != first)
    }

    /// How the markers of this rule's ids begin, after its name: its limits, shortened, since a remembered answer
    /// belongs to them; each after what it counts, if that is another part of the request than its key.
    pub(crate) fn marker<'a>(
        &self,
        counted: impl Fn(&ScopedLimit, &str) -> Result<Name<'a>, Error>,
    ) -> Result<String, Error> {
        let mut limits = Key::new();
        for (at, scoped) in self.limits.iter().enumerate() {
            if at > 0 {
                limits.push(b',');
            }
            if let Some(part) = &scoped.by {
                counted(scoped, part)?.spell_apart(&mut limits);
                limits.push(b':');
            }
            limits.extend_from_slice(scoped.suffix.as_bytes());
        }
        let digest = sha1_smol::Sha1::from(&limits).digest().to_string();
        Ok(format!("{}#{}-", self.name.as_deref().unwrap_or_default(), &digest[..8]))
    }
}
