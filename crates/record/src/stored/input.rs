//! Checks values before they are written, so that the message can name them; the database would refuse them less
//! clearly.

use std::time::{SystemTime, UNIX_EPOCH};

use crate::postgres::{LAST_TIME, PostgresError, in_range};

pub(crate) const MOST_BYTES_OF_A_USER: usize = 512;
pub(crate) const MOST_BYTES_OF_A_KEY: usize = 64;
/// Whole numbers that a limit counts exactly.
const EXACT: u64 = 1 << 53;
const MOST_BYTES_OF_A_TIER: usize = 64;
const MOST_BYTES_OF_A_NAME: usize = 256;
const MOST_BYTES_OF_A_REASON: usize = 1024;

/// Limits of one user or one API key, in place of the tier's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct OwnLimits {
    /// Units a second, refilled continuously; for API keys only.
    pub per_second: Option<u64>,
    /// Units an hour, refilled continuously.
    pub per_hour: Option<u64>,
    /// Units a day of UTC.
    pub per_day: Option<u64>,
    /// The most units that can be taken at one instant; needs `per_second` or `per_hour`, and applies to `per_second`
    /// if both are set. Default: that limit's units.
    pub burst: Option<u64>,
}

impl OwnLimits {
    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    pub(crate) fn checked(&self) -> Result<(), PostgresError> {
        let Self { per_second, per_hour, per_day, burst } = *self;
        for (name, units) in
            [("per_second", per_second), ("per_hour", per_hour), ("per_day", per_day), ("burst", burst)]
        {
            if let Some(units) = units
                && !(1..=EXACT).contains(&units)
            {
                return Err(PostgresError::input(format!("{name}: expected 1 to {EXACT} units, got {units}")));
            }
        }
        if let (Some(burst), None, None) = (burst, per_second, per_hour) {
            let why = "needs a limit per second or per hour";
            return Err(PostgresError::input(format!("burst: {why}, got {burst} alone")));
        }
        // Values that fit their columns may still be no limit, such as a rate that needs too fine a clock.
        self.rule().map(drop)
    }

    /// The limits as a rule; `None` if there are none.
    pub(crate) fn rule(&self) -> Result<Option<tollgate::Rule>, PostgresError> {
        let mut limits = Vec::new();
        let mut burst = self.burst;
        for (units, period) in [(self.per_second, "1s"), (self.per_hour, "1h")] {
            if let Some(units) = units {
                let capacity = burst.take().unwrap_or(units);
                limits.push(format!("token-bucket {units}/{period} burst {capacity}"));
            }
        }
        limits.extend(self.per_day.map(|units| format!("fixed-window {units}/1d")));
        if limits.is_empty() {
            return Ok(None);
        }
        let rule = limits.join(", ").parse();
        rule.map(Some).map_err(|error: tollgate::RuleError| PostgresError::input(format!("limits: {error}")))
    }
}

pub(crate) fn user(text: &str) -> Result<(), PostgresError> {
    if text.is_empty() {
        return Err(PostgresError::input("user: the name is empty"));
    }
    bounded("user", text, MOST_BYTES_OF_A_USER)
}

pub(crate) fn tier(text: Option<&str>) -> Result<(), PostgresError> {
    if text == Some("") {
        return Err(PostgresError::input("tier: the name is empty"));
    }
    text.map_or(Ok(()), |text| bounded("tier", text, MOST_BYTES_OF_A_TIER))
}

pub(crate) fn reason(text: Option<&str>) -> Result<(), PostgresError> {
    text.map_or(Ok(()), |text| bounded("reason", text, MOST_BYTES_OF_A_REASON))
}

pub(crate) fn name(text: &str) -> Result<(), PostgresError> {
    bounded("name", text, MOST_BYTES_OF_A_NAME)
}

pub(crate) fn by(text: &str) -> Result<(), PostgresError> {
    bounded("by", text, MOST_BYTES_OF_A_NAME)
}

/// Checks that a column can hold a moment.
pub(crate) fn time(field: &str, time: Option<SystemTime>) -> Result<(), PostgresError> {
    match time.map(|time| time.duration_since(UNIX_EPOCH)) {
        None => Ok(()),
        Some(Ok(since)) if since <= LAST_TIME => Ok(()),
        Some(since) => {
            let seconds = since
                .map_or_else(|before| format!("-{}", before.duration().as_secs()), |since| since.as_secs().to_string());
            Err(PostgresError::input(format!("{field}: expected a time from 1970 to 9999, got {seconds} s after 1970")))
        }
    }
}

/// A column's moment, clamped: someone may have written `infinity`, or a time before 1970, by hand.
pub(crate) fn moment(column: Option<SystemTime>) -> Option<SystemTime> {
    column.map(in_range)
}

fn bounded(field: &str, text: &str, most: usize) -> Result<(), PostgresError> {
    if text.len() > most {
        return Err(PostgresError::input(format!("{field}: expected at most {most} bytes, got {}", text.len())));
    }
    if text.contains('\0') {
        return Err(PostgresError::input(format!("{field}: contains NUL, which PostgreSQL can't store")));
    }
    Ok(())
}

/// Units as a column stores them.
pub(crate) fn column(units: Option<u64>) -> Option<i64> {
    units.and_then(|units| i64::try_from(units).ok())
}

/// Units from a column.
pub(crate) fn units(column: Option<i64>) -> Option<u64> {
    column.map(i64::unsigned_abs)
}
