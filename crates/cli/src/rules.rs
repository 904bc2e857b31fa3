//! `tollgate rules`: works with a service's set of rules.

mod changes;
mod check;
mod diff;
mod explain;
mod explained;
mod import;
#[cfg(feature = "postgres")]
mod push;

use std::process::ExitCode;

use anyhow::Result;
use clap::Subcommand;

#[derive(Debug, Subcommand)]
pub(crate) enum Rules {
    /// Check a set: print how many rules there are, or their mistakes.
    ///
    /// The first mistake of each rule, as FILE:LINE:COLUMN: what. Values that are valid and probably don't match as
    /// meant, such as a regular expression in a path, are warnings in the same form: FILE:LINE:COLUMN: warning: what.
    ///
    /// Exit code: 0; 1 if there is any warning; 2 if there is any mistake.
    Check(check::Check),
    /// Show which rule applies to a request and why, and why others don't.
    ///
    /// Also what it counts, and in which keys. A path that servers read in two ways has no rule: the middleware refuses
    /// it (reason ambiguous), unless the file says how to read it. Needs no Redis. Exit code: 0, even if the request
    /// would be denied; 2 on an error.
    Explain(explain::Explain),
    /// Compare two sets: their rules or, with a log, whom they treat differently.
    ///
    /// A set is a file or, with the feature postgres, the address of a database that has one: postgres://... or, to
    /// keep a password out of the arguments, env: and the name of a variable, such as env:TOLLGATE_DATABASE. With a
    /// log, each set decides with an embedded engine that starts with no keys, on a clock taken from the records. Only
    /// verdicts are compared: if another rule gives the same verdict, that isn't a difference, and is counted
    /// separately. Shadow rules aren't compared. Requests that the middleware refuses, since servers read their path in
    /// two ways, are denied by both. A permit is held as in a replay (see there). If the output isn't a terminal, each
    /// record that is treated differently is printed as one JSON object, followed by the totals.
    ///
    /// Exit code: 0; 1 if a rule differs or, with a log, if anybody is treated differently; 2 on an error.
    Diff(diff::Diff),
    /// Print rules that do what the configuration of another limiter says.
    ///
    /// Of Envoy's rate limit service, of limitador, or of nginx. What the rules do differently or leave out is listed
    /// in comments with its lines, and each difference is a warning: FILE:LINE: warning: what. Needs no Redis.
    ///
    /// Exit code: 0; 1 if there is any warning; 2 on an error.
    Import(import::Import),
    /// Put a set of rules into the database, replacing the one there.
    ///
    /// The set is checked first, and stored completely or not at all; shows which rules changed.
    ///
    /// Exit code: 0, with --dry-run 1 if anything would change; 2 on an error.
    #[cfg(feature = "postgres")]
    Push(push::Push),
    /// Print the set of rules in the database, as a file.
    ///
    /// Defaults and variables are filled in. Exit code: 0; 2 on an error.
    #[cfg(feature = "postgres")]
    Pull(push::Pull),
}

impl Rules {
    pub(crate) async fn run(self) -> Result<ExitCode> {
        match self {
            Self::Check(check) => check.run(),
            Self::Explain(explain) => explain.run(),
            Self::Diff(diff) => diff.run().await,
            Self::Import(import) => import.run(),
            #[cfg(feature = "postgres")]
            Self::Push(push) => push.run().await,
            #[cfg(feature = "postgres")]
            Self::Pull(pull) => pull.run().await,
        }
    }
}
