//! `tollgate users`: tiers, limits and blocks of single users, in the system of record.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use clap::{Args, Subcommand};
use serde_json::{Value, json};
use tollgate_record::{OwnLimits, Postgres, StoredUser};

use crate::database_output::{Fields, limits, print, print_all, time};
use crate::db::{Author, Database, look_by};
use crate::escape::shown;
use crate::found;
use crate::messages::note;
use crate::options::{self, Output};
use crate::time_options::end_of;

#[derive(Debug, Subcommand)]
pub(crate) enum Users {
    /// Deny everything to a user, in every process within a second.
    ///
    /// Exit code: 0; 2 on an error.
    Block(Block),
    /// Lift a user's block.
    ///
    /// Exit code: 0, or 1 if there was no block.
    Unblock(Change),
    /// Set a user's tier, and limits that replace those of the tier.
    ///
    /// This replaces everything: what isn't given is removed. The user's own limits replace all of the tier's, so with
    /// only --per-hour there is no daily limit.
    ///
    /// Exit code: 0; 2 on an error.
    Set(Set),
    /// Show what is known about a user: tier, limits, block, and usage.
    ///
    /// Exit code: 0, or 1 if nothing is known.
    Show(One),
    /// List the users with a tier, limits or a block of their own.
    ///
    /// Exit code: 0; 2 on an error.
    List(All),
}

#[derive(Debug, Args)]
pub(crate) struct Block {
    #[command(flatten)]
    change: Change,
    /// How long, such as 10m or 7d. Default: until the block is lifted.
    #[arg(long = "for", value_name = "D", value_parser = options::time_to_come)]
    length: Option<Duration>,
    /// The reason, for operators of the service: clients don't see it.
    #[arg(long, value_name = "TEXT")]
    reason: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct Set {
    #[command(flatten)]
    change: Change,
    /// The tier that the user pays for.
    #[arg(long, value_name = "TIER", required_unless_present_any = ["per_hour", "per_day", "none"])]
    tier: Option<String>,
    /// Remove the user's tier and limits: the defaults apply again.
    #[arg(long, conflicts_with_all = ["tier", "per_hour", "per_day", "burst"], help_heading = "Limits")]
    none: bool,
    /// Units in an hour, refilled continuously.
    #[arg(long, value_name = "N", value_parser = options::units, help_heading = "Limits")]
    per_hour: Option<u64>,
    /// Units in a day (UTC).
    #[arg(long, value_name = "N", value_parser = options::units, help_heading = "Limits")]
    per_day: Option<u64>,
    /// The most units at once. Default: the units of an hour.
    #[arg(long, value_name = "N", value_parser = options::units, requires = "per_hour", help_heading = "Limits")]
    burst: Option<u64>,
}

#[derive(Debug, Args)]
pub(crate) struct Change {
    /// The user, as rules count it: what follows `user:` in a key.
    user: String,
    #[command(flatten)]
    author: Author,
}

#[derive(Debug, Args)]
pub(crate) struct One {
    /// The user, as rules count it: what follows `user:` in a key.
    user: String,
    #[command(flatten)]
    all: All,
}

#[derive(Debug, Args)]
pub(crate) struct All {
    #[command(flatten)]
    output: Output,
    #[command(flatten)]
    database: Database,
}

impl Users {
    pub(crate) async fn run(self) -> Result<ExitCode> {
        match self {
            Self::Block(block) => block.run().await,
            Self::Unblock(Change { user, author: Author { by, database } }) => {
                let lifted = database.open()?.unblock_user(&user, &by).await.map_err(look_by(|| show(&user)))?;
                let done = if lifted { "no longer blocked" } else { "was not blocked" };
                say(&user, done, ExitCode::from(u8::from(!lifted)))
            }
            Self::Set(set) => set.run().await,
            Self::Show(One { user, all }) => {
                let Some(known) = all.database.open()?.user(&user).await? else {
                    return say(&user, "nothing is known", ExitCode::from(1));
                };
                found(ExitCode::SUCCESS, print(all.output.shape(), record(&known)))
            }
            Self::List(all) => {
                let users = all.database.open()?.users().await?;
                if users.is_empty() {
                    note("no user has a tier, limits or a block of its own");
                }
                found(ExitCode::SUCCESS, print_all(all.output.shape(), users.iter().map(row).collect()))
            }
        }
    }
}

impl Block {
    async fn run(self) -> Result<ExitCode> {
        let Change { user, author: Author { by, database } } = self.change;
        warn_of_a_key(&user);
        let postgres = database.open()?;
        let until = end_of(&postgres, self.length).await?;
        let blocked = postgres.block_user(&user, self.reason.as_deref(), until, &by).await;
        blocked.map_err(look_by(|| show(&user)))?;
        match time(until) {
            Value::String(until) => say(&user, &format!("blocked until {until}"), ExitCode::SUCCESS),
            _ => say(&user, "blocked until lifted", ExitCode::SUCCESS),
        }
    }
}

impl Set {
    async fn run(self) -> Result<ExitCode> {
        let Change { user, author: Author { by, database } } = self.change;
        let postgres: Postgres = database.open()?;
        warn_of_a_key(&user);
        let mut own = OwnLimits::default();
        (own.per_hour, own.per_day, own.burst) = (self.per_hour, self.per_day, self.burst);
        let set = postgres.set_user(&user, self.tier.as_deref(), own, &by).await;
        set.map_err(look_by(|| show(&user)))?;
        let said = |value| match value {
            Value::String(text) => text,
            _ => "none of its own".to_owned(),
        };
        let tier = self.tier.map_or("none of its own".to_owned(), |tier| shown(tier.as_bytes()));
        say(&user, &format!("tier {tier}; limits {}", said(limits(own))), ExitCode::SUCCESS)
    }
}

/// The command that shows whether a change of a user was made.
fn show(user: &str) -> String {
    format!("users show {}", shown(user.as_bytes()))
}

/// Rules write `user:42` for the user 42.
fn warn_of_a_key(user: &str) {
    if user.starts_with("user:") {
        note(format_args!("give a user without user: before it; in rules this one is user:{user}"));
    }
}

/// `user 42: blocked until lifted`
fn say(user: &str, what: &str, code: ExitCode) -> Result<ExitCode> {
    use std::io::Write;
    found(code, writeln!(anstream::stdout(), "user {}: {what}", shown(user.as_bytes())))
}

/// All fields of a user.
fn record(user: &StoredUser) -> Fields {
    vec![
        ("user", json!(user.user)),
        ("tier", json!(user.tier)),
        ("limits", limits(user.limits)),
        ("blocked", json!(user.is_blocked())),
        ("blocked_reason", json!(user.block.as_ref().and_then(|block| block.reason.as_deref()))),
        ("blocked_until", time(user.block.as_ref().and_then(|block| block.until))),
        ("total_today", json!(user.total_today)),
        ("total_this_month", json!(user.total_this_month)),
        ("times_exceeded", json!(user.times_exceeded)),
        ("last_request_at", time(user.last_request_at)),
        ("created_at", time(Some(user.created_at))),
        ("updated_at", time(Some(user.updated_at))),
        ("updated_by", json!(user.updated_by)),
    ]
}

/// A user's own tier, limits and block.
fn row(user: &StoredUser) -> Fields {
    let mut fields = record(user);
    fields.retain(|(name, _)| {
        ["user", "tier", "limits", "blocked", "blocked_until", "blocked_reason", "total_today"].contains(name)
    });
    fields
}
