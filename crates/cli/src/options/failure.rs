//! What happens while Redis is unreachable, and how much is safe when it fails.

use std::num::NonZeroU32;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use tollgate::{OnError, RedisBuilder, Rule};

use super::from_one;

/// Options of commands that make decisions.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct FailureOptions {
    /// What to answer while Redis is unreachable.
    ///
    /// Default: closed, or what a rule in JSON or from --rules says.
    #[arg(long, value_enum, value_name = "HOW", help_heading = "Failure")]
    on_error: Option<OnErrorArgument>,
    /// How many processes share a rule that is decided locally.
    ///
    /// This one decides with its share.
    #[arg(long, value_name = "N", default_value = "1", value_parser = processes, help_heading = "Failure")]
    processes: NonZeroU32,
}

/// Options of commands that write to Redis.
#[derive(Clone, Copy, Debug, Default, Args)]
pub(crate) struct Confirmation {
    /// How many replicas must have what a call took before it is allowed.
    ///
    /// Waits for them for less than half the deadline.
    #[arg(long, value_name = "N", default_value = "0", allow_negative_numbers = true, help_heading = "Failure")]
    confirmed_by: u8,
}

/// What `--on-error` accepts; see [`OnError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum OnErrorArgument {
    /// An error.
    Closed,
    /// Allowed.
    Open,
    /// What the embedded engine decides.
    Local,
}

impl FailureOptions {
    /// The rule with the chosen policy.
    pub(crate) fn follow(self, rule: Rule) -> Result<Rule> {
        let policy = match self.on_error {
            None => return Ok(rule),
            Some(OnErrorArgument::Closed) => OnError::Closed,
            Some(OnErrorArgument::Open) => OnError::Open,
            Some(OnErrorArgument::Local) => OnError::Local { processes: self.processes },
        };
        Ok(rule.on_error(policy)?)
    }

    /// The same for any rule of a set, except that one with less than a unit per process fails closed.
    pub(crate) fn follow_or_close(self, rule: Rule) -> Rule {
        let closed = || rule.clone().on_error(OnError::Closed).ok();
        self.follow(rule.clone()).ok().or_else(closed).unwrap_or(rule)
    }
}

impl Confirmation {
    /// A Redis opened with this has half of the deadline to confirm calls.
    pub(super) fn applied_to(self, builder: RedisBuilder, deadline: Duration) -> RedisBuilder {
        builder.confirmed_by(self.confirmed_by, deadline / 2)
    }

    pub(super) fn check_without_redis(self) -> Result<()> {
        match self.confirmed_by {
            0 => Ok(()),
            _ => bail!("--confirmed-by: needs --url: the embedded engine has no replicas"),
        }
    }
}

fn processes(text: &str) -> Result<NonZeroU32, String> {
    from_one::<u32, { u32::MAX as u64 }>(text).map(|count| NonZeroU32::new(count).unwrap_or(NonZeroU32::MIN))
}
