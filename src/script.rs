//! A script: its text and its digest.

use std::sync::OnceLock;

/// What every script begins with, and how it ends: reading arguments, then keys, and the decision.
const ARGUMENTS: &str = include_str!("../lua/arguments.lua");
const KEYS: &str = include_str!("../lua/keys.lua");
const DECIDE: &str = include_str!("../lua/decide.lua");
/// What precedes a script that decides on keys in several slots of a cluster's node.
const ACROSS_SLOTS: &str = include_str!("../lua/across_slots.lua");

/// The script that decides limits of some algorithms, as it is sent and hashed: a concatenation of the files in `lua/`.
#[derive(Debug)]
pub struct Script {
    name: String,
    /// The algorithms' own files, in the order of their numbers.
    files: Vec<&'static str>,
    is_across_slots: bool,
    text: OnceLock<String>,
    digest: OnceLock<String>,
    across_slots: OnceLock<Box<Script>>,
}

impl Script {
    /// The number of the contract with callers in other languages, which is in `lua/README.md`: while it stays the
    /// same, so does the meaning of the scripts' arguments and replies.
    pub const CONTRACT: u32 = 2;

    /// The script of these algorithms' files.
    pub(crate) fn new(name: String, files: Vec<&'static str>) -> Self {
        let (text, digest, across_slots) = Default::default();
        Self { name, files, is_across_slots: false, text, digest, across_slots }
    }

    /// The same for keys in several slots of a cluster's node: its name is the same, its text and digest differ.
    pub(crate) fn across_slots(&'static self) -> &'static Self {
        let across = || Self { is_across_slots: true, ..Self::new(self.name.clone(), self.files.clone()) };
        self.across_slots.get_or_init(|| Box::new(across()))
    }

    /// The names of its algorithms' files in `lua/`, without their ending, joined by `+`.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether it takes calendar windows, and may refuse them.
    pub(crate) fn takes_windows(&self) -> bool {
        self.name.split('+').any(|file| file == "calendar_window")
    }

    /// The text that is sent and hashed.
    #[must_use]
    pub fn text(&self) -> &str {
        self.text.get_or_init(|| {
            let before = if self.is_across_slots { ACROSS_SLOTS } else { "" };
            [&[before, ARGUMENTS][..], &self.files, &[KEYS, DECIDE]].concat().concat()
        })
    }

    /// Its SHA-1 digest for EVALSHA, in hexadecimal; computed once.
    pub fn digest(&self) -> &str {
        self.digest.get_or_init(|| sha1_smol::Sha1::from(self.text()).digest().to_string())
    }
}
