//! `tollgate rules push` and `pull`: copy a set of rules between a file and the database.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Args;
use tollgate::rules::RuleSet;

use super::changes;
use crate::db::{Author, Database, look_by};
use crate::escape::shown;
use crate::rules_file::expect_no_address;
use crate::{found, messages};

#[derive(Debug, Args)]
pub(crate) struct Push {
    /// The set, in TOML, with the files that it includes.
    file: PathBuf,
    /// Only show what would change.
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    author: Author,
}

#[derive(Debug, Args)]
pub(crate) struct Pull {
    #[command(flatten)]
    database: Database,
}

impl Push {
    pub(super) async fn run(self) -> Result<ExitCode> {
        expect_no_address(&self.file)?;
        let rules = match RuleSet::read(&self.file) {
            Ok(rules) => rules,
            Err(error) => {
                error.faults().iter().for_each(messages::fault);
                return Ok(ExitCode::from(2));
            }
        };
        messages::doubts(&rules);
        let postgres = self.author.database.open()?;
        let changes = match self.dry_run {
            true => postgres.compare_rules(&rules).await?,
            false => {
                let pushed = postgres.push_rules(&rules, &self.author.by).await;
                let dry_run = || format!("rules push --dry-run {}", shown(self.file.as_os_str().as_encoded_bytes()));
                pushed.map_err(look_by(dry_run))?
            }
        };
        let code = if self.dry_run && !changes.is_empty() { ExitCode::from(1) } else { ExitCode::SUCCESS };
        found(code, changes::print(&changes, rules.len()))
    }
}

impl Pull {
    pub(super) async fn run(self) -> Result<ExitCode> {
        let stored = self.database.open()?.rules().await?;
        let text = toml::to_string(&stored.rules).context("rules")?;
        found(ExitCode::SUCCESS, write!(anstream::stdout(), "{text}"))
    }
}
