//! Windows of the calendar, by another library and another copy of the time zones than the limiter's own.

use chrono::{Datelike, Days, MappedLocalTime, Months, NaiveDate, NaiveDateTime, TimeDelta, TimeZone, Utc};
use chrono_tz::Tz;

/// What a window is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Window {
    Day,
    /// From Monday on.
    Week,
    Month,
    Year,
}

impl Window {
    fn begin(self, day: NaiveDate) -> NaiveDate {
        let begin = match self {
            Window::Day => Some(day),
            Window::Week => day.checked_sub_days(Days::new(day.weekday().num_days_from_monday().into())),
            Window::Month => day.with_day(1),
            Window::Year => day.with_ordinal(1),
        };
        begin.expect("within range")
    }

    /// The first day of the window so many before or after that which begins on this day.
    fn moved(self, begin: NaiveDate, by: i32) -> NaiveDate {
        let (days, months) = match self {
            Window::Day => (1, 0),
            Window::Week => (7, 0),
            Window::Month => (0, 1),
            Window::Year => (0, 12),
        };
        let count = by.unsigned_abs();
        let (days, months) = (Days::new(u64::from(count) * days), Months::new(count * months));
        let moved = if by < 0 {
            begin.checked_sub_days(days).and_then(|day| day.checked_sub_months(months))
        } else {
            begin.checked_add_days(days).and_then(|day| day.checked_add_months(months))
        };
        moved.expect("within range")
    }
}

/// The starts of the window that contains this instant, of the next, and of the one after, in microseconds since the
/// epoch.
pub fn bounds(window: Window, zone: Tz, at: i64) -> [i64; 3] {
    let now = Utc.timestamp_micros(at).single().expect("within range").with_timezone(&zone);
    let begin = window.begin(now.date_naive());
    let mut starts: Vec<_> = (-1..=5).map(|by| first_instant(zone, window.moved(begin, by))).collect();
    starts.dedup();
    let next = starts.iter().position(|start| *start > at).expect("some are later");
    [starts[next - 1], starts[next], starts[next + 1]]
}

/// Midnight, the first of two, or else the first minute of the day that there is.
pub fn first_instant(zone: Tz, day: NaiveDate) -> i64 {
    let mut local: NaiveDateTime = day.and_hms_opt(0, 0, 0).expect("midnight");
    loop {
        match zone.from_local_datetime(&local) {
            MappedLocalTime::Single(instant) | MappedLocalTime::Ambiguous(instant, _) => {
                return instant.timestamp_micros();
            }
            MappedLocalTime::None => local += TimeDelta::minutes(1),
        }
    }
}
