//! `tollgate keys`: API keys of the system of record.

use std::io::{self, Write};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::{Args, Subcommand};
use serde_json::json;
use tollgate_record::{KeyTerms, NewKey, OwnLimits, StoredKey};

use crate::database_output::{Fields, limits, print, print_all, time};
use crate::db::{Author, Database, look_by};
use crate::found;
use crate::messages::note;
use crate::options::{self, Output};
use crate::time_options::end_of;

#[derive(Debug, Subcommand)]
pub(crate) enum Keys {
    /// Create an API key for a user, and print it, this once.
    ///
    /// If it can't be printed, no key is created. Exit code: 0; 2 on an error.
    Create(Create),
    /// Create a key to replace another, which stays valid for a while.
    ///
    /// The new key has the same user, name, tier and limits. If the old one was made for 90 days, the new one is valid
    /// for 90 days from now. It is printed this once; if that fails, nothing changes. Exit code: 0; 2 on an error.
    Rotate(Rotate),
    /// Make a key invalid permanently, in every process within a second.
    ///
    /// Exit code: 0; 2 on an error.
    Revoke(Change),
    /// Show what is known about a key.
    ///
    /// Exit code: 0 if it is valid, 1 if it isn't or doesn't exist.
    Show(One),
    /// List the keys of one user or of all users.
    ///
    /// Exit code: 0; 2 on an error.
    List(List),
}

#[derive(Debug, Args)]
pub(crate) struct Create {
    /// The key's user, as rules count users.
    #[arg(long, value_name = "USER")]
    user: String,
    /// A name for the key.
    #[arg(long, value_name = "NAME", default_value = "")]
    name: String,
    /// The key's tier. Default: its user's tier.
    #[arg(long, value_name = "TIER", help_heading = "Limits")]
    tier: Option<String>,
    /// Units in a second, for this key alone.
    #[arg(long, value_name = "N", value_parser = options::units, help_heading = "Limits")]
    per_second: Option<u64>,
    /// Units in an hour, for this key alone.
    #[arg(long, value_name = "N", value_parser = options::units, help_heading = "Limits")]
    per_hour: Option<u64>,
    /// Units in a day (UTC), for this key alone.
    #[arg(long, value_name = "N", value_parser = options::units, help_heading = "Limits")]
    per_day: Option<u64>,
    /// The most units at once.
    ///
    /// Default: the units of a second or, without these, of an hour.
    #[arg(long, value_name = "N", value_parser = options::units, help_heading = "Limits")]
    burst: Option<u64>,
    /// How long it is valid, such as 90d. Default: until it is revoked.
    #[arg(long = "for", value_name = "D", value_parser = options::time_to_come)]
    length: Option<Duration>,
    #[command(flatten)]
    author: Author,
}

#[derive(Debug, Args)]
pub(crate) struct Rotate {
    #[command(flatten)]
    change: Change,
    /// How long the old key stays valid.
    #[arg(long, value_name = "D", value_parser = options::duration, default_value = "1d")]
    overlap: Duration,
}

#[derive(Debug, Args)]
pub(crate) struct Change {
    /// The key's id (what stands between the first two underscores), or the whole key.
    key: String,
    #[command(flatten)]
    author: Author,
}

#[derive(Debug, Args)]
pub(crate) struct One {
    /// The key's id (what stands between the first two underscores), or the whole key.
    key: String,
    #[command(flatten)]
    shown: Shown,
}

#[derive(Debug, Args)]
pub(crate) struct List {
    /// Only keys of this user.
    #[arg(long, value_name = "USER")]
    user: Option<String>,
    #[command(flatten)]
    shown: Shown,
}

#[derive(Debug, Args)]
pub(crate) struct Shown {
    #[command(flatten)]
    output: Output,
    #[command(flatten)]
    database: Database,
}

impl Keys {
    pub(crate) async fn run(self) -> Result<ExitCode> {
        match self {
            Self::Create(create) => create.run().await,
            Self::Rotate(Rotate { change: Change { key, author }, overlap }) => {
                expect_a_reader()?;
                let postgres = author.database.open()?;
                let rotated = postgres.rotate_key_and(&key, overlap, &author.by, hand_out).await;
                let (_, stored) = rotated.map_err(look_by(|| "keys list".to_owned()))?;
                Ok(handed_out(&stored))
            }
            Self::Revoke(Change { key, author }) => {
                let revoked = author.database.open()?.revoke_key(&key, &author.by).await;
                // The whole key may be given as its id, so the message doesn't repeat it.
                let revoked = revoked.map_err(look_by(|| "keys show, by the key's id".to_owned()))?;
                let at = time(revoked.revoked_at);
                let line = format!(
                    "key {} of user {}: revoked at {}",
                    revoked.id,
                    crate::escape::shown(revoked.user.as_bytes()),
                    at.as_str().unwrap_or("-")
                );
                found(ExitCode::SUCCESS, writeln!(anstream::stdout(), "{line}"))
            }
            Self::Show(One { key, shown }) => {
                let Some(known) = shown.database.open()?.key(&key).await? else {
                    return found(ExitCode::from(1), writeln!(anstream::stdout(), "there is no key with this id"));
                };
                let code = ExitCode::from(u8::from(!known.is_valid()));
                found(code, print(shown.output.shape(), record(&known)))
            }
            Self::List(List { user, shown }) => {
                let keys = shown.database.open()?.keys(user.as_deref()).await?;
                if keys.is_empty() {
                    note("there are no such keys");
                }
                found(ExitCode::SUCCESS, print_all(shown.output.shape(), keys.iter().map(row).collect()))
            }
        }
    }
}

impl Create {
    async fn run(self) -> Result<ExitCode> {
        let mut own = OwnLimits::default();
        (own.per_second, own.per_hour, own.per_day) = (self.per_second, self.per_hour, self.per_day);
        own.burst = self.burst;
        let mut terms = KeyTerms::default();
        (terms.name, terms.tier, terms.limits) = (self.name, self.tier, own);
        let postgres = self.author.database.open()?;
        terms.expires_at = end_of(&postgres, self.length).await?;
        expect_a_reader()?;
        let created = postgres.create_key_and(&self.user, &terms, &self.author.by, hand_out).await;
        let list = || format!("keys list --user {}", crate::escape::shown(self.user.as_bytes()));
        let (_, stored) = created.map_err(look_by(list))?;
        Ok(handed_out(&stored))
    }
}

/// Prints only the key to standard output, so that a script can read it.
fn hand_out(key: &NewKey, _: &StoredKey) -> io::Result<()> {
    let mut out = anstream::stdout();
    writeln!(out, "{}", key.secret())?;
    out.flush()
}

fn handed_out(stored: &StoredKey) -> ExitCode {
    note(format_args!("this key is shown once: only its hash is stored. Its id is {}", stored.id));
    ExitCode::SUCCESS
}

/// The runtime replaces a closed standard output by /dev/null, where writing the key succeeds and loses it.
fn expect_a_reader() -> Result<()> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::{FileTypeExt, MetadataExt};

        let device = |path| std::fs::metadata(path).ok().filter(|file| file.file_type().is_char_device());
        if let (Some(out), Some(null)) = (device("/dev/stdout"), device("/dev/null"))
            && out.rdev() == null.rdev()
        {
            bail!("output: standard output is /dev/null or closed, so the key would be lost");
        }
    }
    Ok(())
}

fn state(key: &StoredKey) -> &'static str {
    match (key.revoked_at, key.is_valid()) {
        (Some(_), _) => "revoked",
        (None, false) => "expired",
        (None, true) => "valid",
    }
}

/// All fields of a key.
fn record(key: &StoredKey) -> Fields {
    vec![
        ("id", json!(key.id)),
        ("user", json!(key.user)),
        ("name", json!(key.terms.name)),
        ("state", json!(state(key))),
        ("tier", json!(key.terms.tier)),
        ("limits", limits(key.terms.limits)),
        ("total", json!(key.total)),
        ("last_used_at", time(key.last_used_at)),
        ("expires_at", time(key.terms.expires_at)),
        ("revoked_at", time(key.revoked_at)),
        ("revoked_by", json!(key.revoked_by)),
        ("replaces", json!(key.replaces)),
        ("created_at", time(Some(key.created_at))),
        ("created_by", json!(key.created_by)),
    ]
}

fn row(key: &StoredKey) -> Fields {
    let mut fields = record(key);
    fields.retain(|(name, _)| {
        ["id", "user", "name", "state", "tier", "limits", "total", "last_used_at", "expires_at"].contains(name)
    });
    fields
}
