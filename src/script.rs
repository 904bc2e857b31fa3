//! A script: its text and its digest.

use std::sync::OnceLock;

/// The text common to all algorithms' scripts, before and after the algorithm's own file.
pub(crate) const ARGUMENTS: &str = include_str!("../lua/arguments.lua");
pub(crate) const FRAME: &str = include_str!("../lua/frame.lua");
/// What comes before an algorithm's script that decides on keys of several slots of a cluster's node.
const ACROSS_SLOTS: &str = include_str!("../lua/across_slots.lua");

/// A complete script, as it is sent and hashed.
#[derive(Debug)]
pub struct Script {
    name: &'static str,
    source: Source,
    text: OnceLock<String>,
    digest: OnceLock<String>,
    across_slots: OnceLock<Box<Script>>,
}

#[derive(Debug)]
enum Source {
    /// An algorithm's file.
    Algorithm(&'static str),
    /// An algorithm's script, for keys of several slots of a cluster's node.
    AcrossSlots(&'static Script),
    /// Composed of files, once.
    Composed(fn() -> String),
}

impl Script {
    /// The number of the contract with callers in other languages, which `lua/README.md` has: while it stays the same,
    /// so do the meaning of the scripts' arguments and of their replies.
    pub const CONTRACT: u32 = 1;

    pub(crate) const fn algorithm(name: &'static str, file: &'static str) -> Self {
        Self::new(name, Source::Algorithm(file))
    }

    pub(crate) const fn composed(name: &'static str, compose: fn() -> String) -> Self {
        Self::new(name, Source::Composed(compose))
    }

    const fn new(name: &'static str, source: Source) -> Self {
        Self { name, source, text: OnceLock::new(), digest: OnceLock::new(), across_slots: OnceLock::new() }
    }

    /// The form of an algorithm's script that decides, packed, on keys of several slots of a cluster's node: of the same
    /// name, with a text and a digest of its own.
    pub(crate) fn across_slots(&'static self) -> &'static Self {
        self.across_slots.get_or_init(|| Box::new(Self::new(self.name, Source::AcrossSlots(self))))
    }

    /// The file's name in `lua/`, without its ending.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Whether its arguments include how long a call is remembered by its id.
    pub(crate) fn remembers_calls(&self) -> bool {
        matches!(self.source, Source::Composed(_))
    }

    /// Whether it takes calendar windows, and may refuse them.
    pub(crate) fn takes_windows(&self) -> bool {
        self.name == "calendar_window"
    }

    /// The text that is sent and hashed.
    #[must_use]
    pub fn text(&self) -> &str {
        self.text.get_or_init(|| match self.source {
            Source::Algorithm(file) => [ARGUMENTS, file, FRAME].concat(),
            Source::AcrossSlots(script) => [ACROSS_SLOTS, script.text()].concat(),
            Source::Composed(compose) => compose(),
        })
    }

    /// The algorithm's own file; none for the composed script.
    pub(crate) fn file(&self) -> Option<&'static str> {
        match self.source {
            Source::Algorithm(file) => Some(file),
            Source::AcrossSlots(_) | Source::Composed(_) => None,
        }
    }

    /// Its SHA-1 digest for EVALSHA, in hexadecimal; computed once.
    pub fn digest(&self) -> &str {
        self.digest.get_or_init(|| sha1_smol::Sha1::from(self.text()).digest().to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    static SCRIPT: Script = Script::algorithm("token_bucket", include_str!("../lua/token_bucket.lua"));

    #[test]
    fn a_script_for_keys_of_several_slots_is_a_beginning_and_the_script_unchanged() {
        let across = SCRIPT.across_slots();
        assert_eq!(across.text(), [ACROSS_SLOTS, SCRIPT.text()].concat());
        assert!(across.text().starts_with("#!lua flags=allow-cross-slot-keys\n") && !SCRIPT.text().contains("#!"));
        assert_ne!(across.digest(), SCRIPT.digest());
        assert_eq!((across.name(), across.file(), across.takes_windows()), ("token_bucket", None, false));
    }
}
