//! A month: the unit of archiving.

use std::fmt;
use std::str::FromStr;
use std::time::SystemTime;

use jiff::civil::Date;
use jiff::tz::TimeZone;
use jiff::{Timestamp, ToSpan};

use super::ArchiveError;

/// A month of UTC, such as `2026-08`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Month(Date);

impl Month {
    /// # Errors
    ///
    /// A month that isn't from 1 to 12, or a year that isn't from 1970 to 9998.
    pub fn new(year: i16, month: i8) -> Result<Self, ArchiveError> {
        let date = Date::new(year, month, 1).ok().filter(|_| (1970..9999).contains(&year));
        let wrong = || format!("month: expected one such as 2026-08, got {year:04}-{month:02}");
        date.map(Self).ok_or_else(|| ArchiveError::input(wrong()))
    }

    /// Parses the month at the end of a table's name: `2026_08`.
    pub(super) fn of_table(end: &str) -> Option<Self> {
        end.replace('_', "-").parse().ok()
    }

    /// `year=2026/month=08`, which Parquet readers recognise.
    pub(super) fn folder(self) -> String {
        format!("year={:04}/month={:02}", self.0.year(), self.0.month())
    }

    /// The year.
    #[must_use]
    pub fn year(self) -> i16 {
        self.0.year()
    }

    /// The month, from 1 to 12.
    #[must_use]
    pub fn month(self) -> i8 {
        self.0.month()
    }

    /// When it begins.
    #[must_use]
    pub fn begins(self) -> SystemTime {
        start(self.0).into()
    }

    /// When it ends, which is when the next one begins.
    #[must_use]
    pub fn ends(self) -> SystemTime {
        start(self.next()).into()
    }

    /// Its start and end, in microseconds since the epoch.
    pub(super) fn micros(self) -> std::ops::Range<i64> {
        start(self.0).as_microsecond()..start(self.next()).as_microsecond()
    }

    /// The moment this many years after its end.
    pub(super) fn years_after(self, years: u16) -> Option<SystemTime> {
        Some(start(self.next().checked_add(i64::from(years).years()).ok()?).into())
    }

    fn next(self) -> Date {
        self.0.saturating_add(1.month())
    }
}

/// The start of a day in UTC.
fn start(date: Date) -> Timestamp {
    date.to_zoned(TimeZone::UTC).map(|zoned| zoned.timestamp()).unwrap_or(Timestamp::MAX)
}

impl fmt::Display for Month {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04}-{:02}", self.0.year(), self.0.month())
    }
}

impl FromStr for Month {
    type Err = ArchiveError;

    fn from_str(text: &str) -> Result<Self, ArchiveError> {
        let wrong = || ArchiveError::input(format!("month: expected one such as 2026-08, got {text}"));
        let digits = |text: &str, count: usize| text.len() == count && text.bytes().all(|byte| byte.is_ascii_digit());
        let (year, month) = text.split_once('-').ok_or_else(wrong)?;
        if !digits(year, 4) || !digits(month, 2) {
            return Err(wrong());
        }
        Self::new(year.parse().map_err(|_| wrong())?, month.parse().map_err(|_| wrong())?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn months_are_read_and_written() {
        let month: Month = "2026-12".parse().expect("a month");
        assert_eq!((month.to_string(), month.folder()), ("2026-12".into(), "year=2026/month=12".into()));
        assert_eq!(month.micros(), 1_796_083_200_000_000..1_798_761_600_000_000);
        let begins = |text: &str| text.parse::<Month>().map(Month::begins).ok();
        assert_eq!(Some(month.ends()), begins("2027-01"));
        assert_eq!(Month::of_table("2026_12"), Some(month));
        assert_eq!(month.years_after(7), begins("2034-01"));
        for wrong in ["2026", "2026-13", "2026-00", "2026-1", "+026-01", "20260-1", "1969-12", "9999-01", ""] {
            let error = wrong.parse::<Month>().expect_err(wrong);
            assert!(error.to_string().starts_with("month: expected one such as 2026-08, got "), "{error}");
        }
    }
}
