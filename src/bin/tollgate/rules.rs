//! `tollgate rules`: what a service's set of rules says.

mod changes;
mod check;
mod diff;
mod explain;
mod explained;
#[cfg(feature = "postgres")]
mod push;

use std::process::ExitCode;

use anyhow::Result;
use clap::Subcommand;

#[derive(Debug, Subcommand)]
pub(crate) enum Rules {
    /// Say how many rules there are, or what is wrong, of each rule the first, as FILE:LINE:COLUMN: what.
    ///
    /// Exit code: 0, or 2 if anything is wrong.
    Check(check::Check),
    /// Say which rule applies to a request and why, what it would count where, and why others don't apply.
    ///
    /// No Redis is needed. Exit code: 0, also where the request would be denied; 2 if something is wrong.
    Explain(explain::Explain),
    /// Say which rules another set adds, changes and removes or, with a log of traffic, who would be treated differently.
    ///
    /// A set is a file or, with the feature postgres, the one in a database, by its address (postgres://...). With a log,
    /// each set decides by an engine in this process that starts with no keys, on a clock taken from the records. Only
    /// verdicts are compared: that another rule gives the same one is no difference, and is counted apart. What shadow
    /// rules decide isn't compared. Elsewhere than on a terminal each record that is treated differently is printed as
    /// one JSON object, and then the totals.
    ///
    /// Exit code: 0 if nothing and nobody is treated differently, 1 if anybody is, or a rule differs, 2 if something is
    /// wrong.
    Diff(diff::Diff),
    /// Put a set of rules into the database, in place of the one that is there.
    ///
    /// All of it or nothing, once it has been checked; says which rules that changed.
    #[cfg(feature = "postgres")]
    Push(push::Push),
    /// Print the set of rules that is in the database, as a file has it.
    ///
    /// Defaults and variables are filled in.
    #[cfg(feature = "postgres")]
    Pull(push::Pull),
}

impl Rules {
    pub(crate) async fn run(self) -> Result<ExitCode> {
        match self {
            Self::Check(check) => check.run(),
            Self::Explain(explain) => explain.run(),
            Self::Diff(diff) => diff.run().await,
            #[cfg(feature = "postgres")]
            Self::Push(push) => push.run().await,
            #[cfg(feature = "postgres")]
            Self::Pull(pull) => pull.run().await,
        }
    }
}
