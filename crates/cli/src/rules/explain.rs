//! `tollgate rules explain`: which rule applies to a request, and why.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use tollgate::{Embedded, Limiter};

use super::explained::Explained;
use crate::attributes::{self, Described};
use crate::options::Output;
use crate::output::{Shape, json};
use crate::rule_arguments::KeyOptions;
use crate::rules_file::RulesFile;

#[derive(Debug, Args)]
pub(crate) struct Explain {
    /// The set of rules, in TOML.
    file: PathBuf,
    #[command(flatten)]
    request: Described,
    /// Show every rule that was passed over, not only the first 20.
    #[arg(long)]
    all: bool,
    #[command(flatten)]
    place: KeyOptions,
    #[command(flatten)]
    output: Output,
}

impl Explain {
    pub(super) fn run(self) -> Result<ExitCode> {
        let service = RulesFile::read(&self.file)?;
        let given = self.request.pairs()?;
        // It decides nothing, and is only needed to spell keys.
        let limiter = self.place.of_service(Limiter::new(Embedded::new()))?;
        let request = attributes::read(&given);
        let explained = Explained::of(&service.rules, &given, &request, &limiter, self.all)?;
        match self.output.shape() {
            Shape::Jsonl => json(anstream::stdout(), &explained)?,
            Shape::Table => explained.print(anstream::stdout())?,
        }
        Ok(ExitCode::SUCCESS)
    }
}
