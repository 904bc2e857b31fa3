//! Options of every command: where to decide, how long to wait, how to print.

mod failure;
pub(crate) mod tls;

use std::time::Duration;

use anyhow::{Result, anyhow};
use clap::Args;
use tollgate::{Clock, DecidedBy, Embedded, Engine, Limiter, Redis};

use crate::messages;
use crate::output::{Shape, shape};
pub(crate) use failure::{Confirmation, FailureOptions};
use tls::TlsFiles;

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// The Redis that decides, such as redis://127.0.0.1:6379.
    ///
    /// Also unix:///run/redis.sock, redis-sentinel://host:26379,host:26379/primary and
    /// redis-cluster://host:7000,host:7001; with user and password redis://user:password@host, in which @ : / ? # and
    /// space are percent-encoded. Without one, probe, replay and load use the embedded engine; the other
    /// commands need a Redis.
    #[arg(long, short, env = "TOLLGATE_URL", hide_env_values = true, help_heading = "Redis")]
    url: Option<String>,
    /// The deadline of each call.
    #[arg(
        long,
        value_name = "D",
        env = "TOLLGATE_DEADLINE",
        hide_env_values = true,
        default_value = "500ms",
        value_parser = duration,
        help_heading = "Redis"
    )]
    deadline: Duration,
    #[command(flatten)]
    tls: TlsFiles,
    #[command(flatten)]
    output: Output,
}

/// How to print.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct Output {
    /// Output format. Default: a table on a terminal, otherwise a JSON object per line.
    #[arg(long, value_enum, help_heading = "Output")]
    format: Option<Shape>,
}

impl Options {
    pub(crate) fn url(&self) -> Option<&str> {
        self.url.as_deref()
    }

    pub(crate) fn deadline(&self) -> Duration {
        self.deadline
    }

    /// The address of the Redis, if it isn't on this machine.
    pub(crate) fn remote(&self) -> Result<Option<String>> {
        Ok(self.redis()?.and_then(|engine| engine.remote_address()))
    }

    /// The engine that decides, unless a policy answers in its place.
    pub(crate) fn engine(&self) -> DecidedBy {
        if self.url().is_some() { DecidedBy::Redis } else { DecidedBy::Embedded }
    }

    /// A limiter on the chosen engine.
    pub(crate) fn limiter(&self, confirmation: Confirmation) -> Result<Limiter> {
        self.limiter_by(Clock::default(), confirmation)
    }

    /// The same, with this clock for the embedded engine.
    pub(crate) fn limiter_by(&self, clock: Clock, confirmation: Confirmation) -> Result<Limiter> {
        let engine = self.redis_confirmed(confirmation)?.unwrap_or_else(|| Embedded::with_clock(clock).into());
        Ok(Limiter::builder(engine).deadline(self.deadline).build())
    }

    /// Reports who decides, if it isn't a Redis.
    pub(crate) fn say_who_decides(&self) {
        if self.url().is_none() {
            messages::note("no --url, so the embedded engine decides: its state ends with this command");
        }
    }

    /// A limiter on the chosen Redis, for commands on its state, which need one.
    pub(crate) fn limiter_on_redis(&self, to: &str, confirmation: Confirmation) -> Result<Limiter> {
        match self.redis_confirmed(confirmation)? {
            Some(redis) => Ok(Limiter::builder(redis).deadline(self.deadline).build()),
            None => Err(no_redis(to)),
        }
    }

    /// The chosen Redis, if any.
    pub(crate) fn redis(&self) -> Result<Option<Engine>> {
        self.redis_confirmed(Confirmation::default())
    }

    /// The same, whose calls are confirmed so.
    fn redis_confirmed(&self, confirmation: Confirmation) -> Result<Option<Engine>> {
        let builder = confirmation.applied_to(Redis::builder(), self.deadline);
        let engine = self.tls.open(self.url(), builder)?;
        if engine.is_none() {
            confirmation.check_without_redis()?;
        }
        Ok(engine)
    }

    pub(crate) fn shape(&self) -> Shape {
        self.output.shape()
    }
}

impl Output {
    pub(crate) fn shape(self) -> Shape {
        shape(self.format)
    }
}

/// The error when a command needs a Redis and none was given.
pub(crate) fn no_redis(to: &str) -> anyhow::Error {
    anyhow!("--url is missing: give the Redis to {to}, such as redis://127.0.0.1:6379 (--url or TOLLGATE_URL)")
}

/// A duration such as `200ms` or `1m30s`.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    // A day has 24 hours, as in a rule.
    let days = text.split_once('d').and_then(|(days, rest)| Some((days.trim().parse::<i64>().ok()?, rest)));
    let (days, rest) = days.unwrap_or((0, text));
    let rest = if rest.is_empty() && days > 0 { "0s" } else { rest };
    let parsed = rest
        .parse::<jiff::SignedDuration>()
        .ok()
        .and_then(|rest| rest.checked_add(jiff::SignedDuration::try_from_hours(days.checked_mul(24)?)?));
    let parsed = parsed.and_then(|signed| Duration::try_from(signed).ok());
    parsed.ok_or_else(|| "expected a duration such as 200ms, 1m30s or 7d".into())
}

/// Like `duration`, but above zero.
#[cfg(feature = "postgres")]
pub(crate) fn time_to_come(text: &str) -> Result<Duration, String> {
    duration(text).ok().filter(|time| !time.is_zero()).ok_or_else(|| "expected a duration such as 10m or 7d".into())
}

/// A whole number that a script can compute with.
pub(crate) fn units(text: &str) -> Result<u64, String> {
    const MOST: u64 = (1 << 53) - 1;
    let number = text.parse().ok().filter(|number| *number <= MOST);
    number.ok_or_else(|| format!("expected a whole number from 0 to {MOST}"))
}

/// How many of something to show.
pub(crate) fn from_zero(text: &str) -> Result<usize, String> {
    text.parse().map_err(|_| "expected a whole number from 0 up".into())
}

/// A whole number from 1 up.
pub(crate) fn from_one<N: TryFrom<u64>, const MOST: u64>(text: &str) -> Result<N, String> {
    let number = text.parse().ok().filter(|number| (1..=MOST).contains(number)).map(N::try_from);
    number.and_then(Result::ok).ok_or_else(|| format!("expected a whole number from 1 to {MOST}"))
}
