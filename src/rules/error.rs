//! Faults in a set of rules, and where they are.

use std::fmt;
use std::path::{Path, PathBuf};

/// More faults than this aren't worth reading at once.
pub(super) const MOST_FAULTS: usize = 100;

/// A fault may show a value of any length.
const LONGEST_MESSAGE: usize = 1000;

/// A set of rules that can't be used. Displays the first of its [faults](Self::faults), in one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleSetError {
    faults: Vec<Fault>,
}

/// One fault. Displayed as `rules.toml:12:10: rule free: cost: expected ..., got ...`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    file: Option<PathBuf>,
    /// Line and column, from 1.
    pub(super) at: Option<(usize, usize)>,
    message: String,
}

/// A field of a rule's definition, or something in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Field {
    pub(super) name: &'static str,
    pub(super) within: Vec<Step>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Item(usize),
    Entry(String),
}

impl Field {
    pub(super) fn named(name: &'static str) -> Self {
        Self { name, within: Vec::new() }
    }

    /// An item of a list.
    pub(super) fn item(mut self, index: usize) -> Self {
        self.within.push(Step::Item(index));
        self
    }

    /// An entry of a table.
    pub(super) fn entry(mut self, key: &str) -> Self {
        self.within.push(Step::Entry(key.to_owned()));
        self
    }
}

impl RuleSetError {
    pub(super) fn new(faults: Vec<Fault>) -> Self {
        Self { faults: faults.into_iter().take(MOST_FAULTS).collect() }
    }

    pub(super) fn into_faults(self) -> Vec<Fault> {
        self.faults
    }

    /// The faults: the first of each rule, at most a hundred, in the order in which they occur.
    #[must_use]
    pub fn faults(&self) -> &[Fault] {
        &self.faults
    }
}

impl From<Fault> for RuleSetError {
    fn from(fault: Fault) -> Self {
        Self { faults: vec![fault] }
    }
}

impl Fault {
    pub(super) fn new(message: impl Into<String>) -> Self {
        let mut message = message.into().replace(char::is_control, " ");
        if let Some((end, _)) = message.char_indices().nth(LONGEST_MESSAGE) {
            message.truncate(end);
            message.push_str("...");
        }
        Self { file: None, at: None, message }
    }

    pub(super) fn in_file(mut self, file: &Path, at: Option<(usize, usize)>) -> Self {
        (self.file, self.at) = (Some(file.to_owned()), at);
        self
    }

    /// The file with the fault, if it was read from one.
    #[must_use]
    pub fn file(&self) -> Option<&Path> {
        self.file.as_deref()
    }

    /// The line of the fault, from 1, if it was read from a file.
    #[must_use]
    pub fn line(&self) -> Option<usize> {
        self.at.map(|(line, _)| line)
    }

    /// What is wrong, without the location.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.message
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(file) = &self.file {
            write!(f, "{}:", file.display())?;
            if let Some((line, column)) = self.at {
                write!(f, "{line}:{column}:")?;
            }
            f.write_str(" ")?;
        }
        f.write_str(&self.message)
    }
}

impl fmt::Display for RuleSetError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.faults.as_slice() {
            [] => f.write_str("rules: they can't be used"),
            [one] => one.fmt(f),
            [first, others @ ..] => write!(f, "{first} (and {} more)", others.len()),
        }
    }
}

impl std::error::Error for RuleSetError {}
