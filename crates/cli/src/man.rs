//! `tollgate man`: the manual pages.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Args, CommandFactory};
use clap_mangen::Man;

use crate::{Tollgate, found};

#[derive(Debug, Args)]
pub(crate) struct ManPages {
    /// Write a page for each command to this directory: tollgate-probe.1 and so on.
    ///
    /// It is created if it is missing.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

impl ManPages {
    pub(crate) fn run(self) -> Result<ExitCode> {
        let Some(directory) = &self.out else {
            let mut page = Vec::new();
            Man::new(Tollgate::command()).render(&mut page)?;
            return found(ExitCode::SUCCESS, anstream::stdout().write_all(&page));
        };
        let why = || format!("--out: {}", directory.display());
        std::fs::create_dir_all(directory).with_context(why)?;
        clap_mangen::generate_to(Tollgate::command(), directory).with_context(why)?;
        Ok(ExitCode::SUCCESS)
    }
}
