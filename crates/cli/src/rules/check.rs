//! `tollgate rules check`: whether sets of rules are valid.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use tollgate::rules::RuleSet;

use crate::escape::shown;
use crate::messages;
use crate::output::counted;

/// The most faults that the library reports at once.
const MOST: usize = 100;

#[derive(Debug, Args)]
pub(crate) struct Check {
    /// The set, in TOML; several sets are checked separately.
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
}

fn by(rules: &RuleSet) -> String {
    let names: Vec<_> = rules.attributes().collect();
    if names.is_empty() { String::new() } else { format!(", by {}", shown(names.join(", ").as_bytes())) }
}

impl Check {
    pub(super) fn run(self) -> Result<ExitCode> {
        let mut code = ExitCode::SUCCESS;
        for file in &self.files {
            match RuleSet::read(file) {
                Ok(rules) => {
                    let count = counted(rules.len() as u64, "rule");
                    writeln!(anstream::stdout(), "{}: {count}{}", file.display(), by(&rules))?;
                    messages::doubts(&rules);
                    let doubted = !rules.warnings().is_empty() && code == ExitCode::SUCCESS;
                    code = if doubted { ExitCode::from(1) } else { code };
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
