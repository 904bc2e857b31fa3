//! `tollgate rules check`: whether a service's sets of rules can be used.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use tollgate::rules::{Cost, RuleSet};

use crate::escape::shown;
use crate::output::counted;
use crate::{Outcome, messages};

/// Faults that the library tells at once.
const MOST: usize = 100;

#[derive(Debug, Args)]
pub(crate) struct Check {
    /// The set, in TOML; several are checked each by itself.
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
}

/// The attributes that rules match, count or cost by: one that is misspelled stands out among them.
fn by(rules: &RuleSet) -> String {
    let mut names = BTreeSet::new();
    for rule in rules.definitions() {
        names.extend(rule.conditions.keys().chain(&rule.key.0).chain(&rule.tag));
        names.extend(rule.limits.iter().flat_map(|limit| &limit.key.0));
        if let Cost::Attribute(name) = &rule.cost {
            names.insert(name);
        }
    }
    let names: Vec<_> = names.into_iter().map(String::as_str).filter(|name| *name != "global").collect();
    if names.is_empty() { String::new() } else { format!(", by {}", shown(names.join(", ").as_bytes())) }
}

impl Check {
    pub(super) fn run(self) -> Outcome {
        let mut code = ExitCode::SUCCESS;
        for file in &self.files {
            match RuleSet::read(file) {
                Ok(rules) => {
                    let count = counted(rules.len() as u64, "rule");
                    writeln!(anstream::stdout(), "{}: {count}{}", file.display(), by(&rules))?;
                }
                Err(error) => {
                    error.faults().iter().for_each(messages::fault);
                    if error.faults().len() >= MOST {
                        messages::note(format!("{}: these are the first {MOST}; there may be more", file.display()));
                    }
                    code = ExitCode::from(2);
                }
            }
        }
        Ok(code)
    }
}
