//! `tollgate completions`: what a shell needs to complete this command's arguments.

use std::io::Write;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, CommandFactory};
use clap_complete::Shell;

use crate::{Tollgate, found};

#[derive(Debug, Args)]
pub(crate) struct Completions {
    /// The shell.
    shell: Shell,
}

impl Completions {
    pub(crate) fn run(self) -> Result<ExitCode> {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut Tollgate::command(), "tollgate", &mut script);
        found(ExitCode::SUCCESS, anstream::stdout().write_all(&script))
    }
}
