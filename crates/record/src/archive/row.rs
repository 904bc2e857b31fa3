//! A row of the audit log as it is archived.

use std::time::{Duration, SystemTime};

use super::ArchiveError;
use super::month::Month;
use crate::history::columns::{Column, SqlType, WIDTH};

/// The type of a column of an archive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ColumnType {
    /// Microseconds since the epoch.
    Time,
    Text,
    Long,
    /// 16 bits.
    Short,
}

impl ColumnType {
    pub(super) fn of(column: &Column) -> Self {
        match column.sql {
            SqlType::Timestamptz => Self::Time,
            SqlType::Text | SqlType::Inet => Self::Text,
            SqlType::Bigint => Self::Long,
            SqlType::Smallint => Self::Short,
        }
    }
}

pub(super) const AT: usize = 0;
pub(super) const USER: usize = 1;

/// A row's value in a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Field<'a> {
    Null,
    Number(i64),
    Text(&'a [u8]),
}

pub(super) type Row<'a> = [Field<'a>; WIDTH];

/// The time of a row.
pub(super) fn row_time(row: &Row<'_>) -> Option<i64> {
    match row[AT] {
        Field::Number(at) => Some(at),
        _ => None,
    }
}

/// The time of a row, which must be in this month.
pub(super) fn time_in(month: Month, row: &Row<'_>) -> Result<i64, ArchiveError> {
    match row_time(row) {
        Some(at) if month.micros().contains(&at) => Ok(at),
        _ => Err(ArchiveError::refused(format!("at: a row's time isn't in {month}"))),
    }
}

/// A decision as archived.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ArchivedRow {
    /// When it was decided.
    pub at: SystemTime,
    /// The user.
    pub user: Option<String>,
    /// The id of the API key.
    pub api_key: Option<String>,
    /// The client's address.
    pub ip: Option<String>,
    /// The route that matched or, where that isn't known, the path.
    pub endpoint: Option<String>,
    /// The HTTP method.
    pub method: Option<String>,
    /// The rule that applied; of several, that of the limit below or, if that isn't known, the first.
    pub rule: Option<String>,
    /// `allowed`, `throttled` or `blocked`.
    pub decision: String,
    /// Why.
    pub reason: String,
    /// The limit that denied or, for an allowed request, the one with the least left.
    pub limited_by: Option<String>,
    /// Units of that limit in use after this decision.
    pub used: Option<i64>,
    /// The limit's capacity, in units.
    pub capacity: Option<i64>,
    /// The HTTP status.
    pub status: Option<i16>,
    /// Microseconds until the request would have been allowed; -1: never.
    pub retry_after_us: Option<i64>,
    /// Where it was decided.
    pub region: Option<String>,
    /// Which server decided.
    pub server: Option<String>,
    /// How long the decision took, in microseconds.
    pub latency_us: i64,
    /// All rules that applied, in their order, separated by commas, if several did.
    pub rules: Option<String>,
}

impl ArchivedRow {
    pub(super) fn of(row: &Row<'_>) -> Self {
        let text = |at: usize| match row[at] {
            Field::Text(text) => Some(String::from_utf8_lossy(text).into_owned()),
            _ => None,
        };
        let number = |at: usize| match row[at] {
            Field::Number(number) => Some(number),
            _ => None,
        };
        Self {
            at: time(number(AT).unwrap_or_default()),
            user: text(USER),
            api_key: text(2),
            ip: text(3),
            endpoint: text(4),
            method: text(5),
            rule: text(6),
            decision: text(7).unwrap_or_default(),
            reason: text(8).unwrap_or_default(),
            limited_by: text(9),
            used: number(10),
            capacity: number(11),
            status: number(12).and_then(|status| status.try_into().ok()),
            retry_after_us: number(13),
            region: text(14),
            server: text(15),
            latency_us: number(16).unwrap_or_default(),
            rules: text(17),
        }
    }
}

/// Converts microseconds since the epoch.
pub(super) fn time(micros: i64) -> SystemTime {
    let distance = Duration::from_micros(micros.unsigned_abs());
    let time = if micros < 0 {
        SystemTime::UNIX_EPOCH.checked_sub(distance)
    } else {
        SystemTime::UNIX_EPOCH.checked_add(distance)
    };
    time.unwrap_or(SystemTime::UNIX_EPOCH)
}

/// Microseconds since the epoch.
pub(super) fn micros(time: SystemTime) -> i64 {
    match time.duration_since(SystemTime::UNIX_EPOCH) {
        Ok(since) => i64::try_from(since.as_micros()).unwrap_or(i64::MAX),
        Err(before) => i64::try_from(before.duration().as_micros()).map_or(i64::MIN, |micros| -micros),
    }
}
