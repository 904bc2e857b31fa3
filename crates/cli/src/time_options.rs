//! Times as people write them: `14:03`, `2026-11-23T14:03`, `2026-11-23`; in UTC unless they have an offset.

use std::ops::Range;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, anyhow, bail};
use jiff::civil::{Date, DateTime, Time};
use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp};
use tollgate_record::Postgres;

/// The day, minute or second that a text names. A time without a day is the most recent one.
pub(crate) fn moment(option: &str, text: &str, now: Timestamp) -> Result<Range<Timestamp>> {
    let expected = "expected a time such as 14:03, 2026-11-23T14:03, 2026-11-23 or 2026-11-23T14:03:07+01:00";
    let wrong = || anyhow!("{option}: {expected}, got '{text}'");
    let begins = |time: DateTime| time.to_zoned(TimeZone::UTC).map(|zoned| zoned.timestamp()).map_err(|_| wrong());
    let lasting = |from: Timestamp, length: SignedDuration| Ok(from..from.checked_add(length).map_err(|_| wrong())?);
    // The colons of an offset don't add to the precision of the time.
    let (date, time) =
        text.split_once(['T', 't', ' ']).unwrap_or(if text.contains(':') { ("", text) } else { (text, "") });
    let clock = time.split(['Z', 'z', '+', '-', '[']).next().unwrap_or_default();
    let unit = match clock.matches(':').count() {
        0 if time.is_empty() => SignedDuration::from_hours(24),
        0 => return Err(wrong()),
        1 => SignedDuration::from_mins(1),
        _ => SignedDuration::from_secs(1),
    };
    if !date.is_empty()
        && let Ok(instant) = text.parse::<Timestamp>()
    {
        return lasting(instant, unit);
    }
    // Anything after the time of day would be an offset, which needs a day.
    if clock != time {
        return Err(wrong());
    }
    if let Some(time) = text.parse::<Time>().ok().filter(|_| text.contains(':') && !text.contains(['-', 'T', ' '])) {
        let today = now.to_zoned(TimeZone::UTC).date();
        let from = begins(today.to_datetime(time))?;
        let from =
            if from > now { from.checked_sub(SignedDuration::from_hours(24)).map_err(|_| wrong())? } else { from };
        return lasting(from, unit);
    }
    let said = match text.contains(':') {
        true => text.parse::<DateTime>(),
        false => text.parse::<Date>().map(DateTime::from),
    };
    lasting(begins(said.map_err(|_| wrong())?)?, unit)
}

/// From the start of one to the end of the other; if that has no day, it is the first such time after the start.
pub(crate) fn span(from: &str, to: Option<&str>, now: Timestamp) -> Result<Range<Timestamp>> {
    let begin = moment("--from", from, now)?.start;
    let Some(to) = to else { return Ok(begin..now) };
    let mut end = moment("--to", to, now)?.end;
    let has_day = to.contains(['-', 'T', ' ']);
    if end <= begin && !has_day {
        end = end.checked_add(SignedDuration::from_hours(24)).unwrap_or(end);
    }
    in_order(Some(begin), Some(end))?;
    Ok(begin..end)
}

/// The same for times that may both be left out, each with its own day.
#[cfg(feature = "archive")]
pub(crate) fn between(from: Option<&str>, to: Option<&str>, now: Timestamp) -> Result<[Option<Timestamp>; 2]> {
    let from = from.map(|from| moment("--from", from, now)).transpose()?.map(|from| from.start);
    let end = to.map(|to| moment("--to", to, now)).transpose()?.map(|to| to.end);
    in_order(from, end).map(|()| [from, end])
}

/// The end must be after the start.
fn in_order(from: Option<Timestamp>, end: Option<Timestamp>) -> Result<()> {
    match (from, end) {
        (Some(from), Some(end)) if from >= end => {
            bail!("--from: expected a time before the end, {end:.0}, got {from:.0}")
        }
        _ => Ok(()),
    }
}

pub(crate) fn times(range: &Range<Timestamp>) -> (SystemTime, SystemTime) {
    (range.start.into(), range.end.into())
}

/// The end of something that begins now and lasts this long, by the database's clock.
pub(crate) async fn end_of(postgres: &Postgres, length: Option<Duration>) -> Result<Option<SystemTime>> {
    let Some(length) = length else { return Ok(None) };
    let end = postgres.now().await?.checked_add(length);
    end.context("--for: ends after the year 9999").map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_moment_is_as_long_as_it_is_exact() {
        let now: Timestamp = "2026-11-23T14:30:00Z".parse().expect("a time");
        for (text, from, to) in [
            ("14:03", "2026-11-23T14:03:00Z", "2026-11-23T14:04:00Z"),
            ("14:30", "2026-11-23T14:30:00Z", "2026-11-23T14:31:00Z"),
            ("14:31", "2026-11-22T14:31:00Z", "2026-11-22T14:32:00Z"),
            ("14:03:07", "2026-11-23T14:03:07Z", "2026-11-23T14:03:08Z"),
            ("2026-11-20", "2026-11-20T00:00:00Z", "2026-11-21T00:00:00Z"),
            ("2026-11-20T14:03", "2026-11-20T14:03:00Z", "2026-11-20T14:04:00Z"),
            ("2026-11-20 14:03", "2026-11-20T14:03:00Z", "2026-11-20T14:04:00Z"),
            ("2026-11-20T14:03Z", "2026-11-20T14:03:00Z", "2026-11-20T14:04:00Z"),
            ("2026-11-20T14:03+01:00", "2026-11-20T13:03:00Z", "2026-11-20T13:04:00Z"),
            ("2026-11-20T14:03:07+01:00", "2026-11-20T13:03:07Z", "2026-11-20T13:03:08Z"),
        ] {
            let range = moment("--at", text, now).expect(text);
            assert_eq!((range.start.to_string(), range.end.to_string()), (from.to_owned(), to.to_owned()), "{text}");
        }
        let span = span("02:00", Some("03:00"), "2026-11-23T02:34:00Z".parse().expect("a time")).expect("an hour");
        assert_eq!(format!("{} {}", span.start, span.end), "2026-11-23T02:00:00Z 2026-11-23T03:01:00Z");
        for (from, to) in [("2026-11-22", "2026-11-20"), ("2026-11-22", "2026-11-21")] {
            let why = super::span(from, Some(to), now).unwrap_err().to_string();
            assert!(why.starts_with("--from: expected a time before the end, 2026-11-2"), "{from} {to}: {why}");
        }
        for text in [
            "",
            "15:03+01:00",
            "15:03Z",
            "2026-11-22T15:03[Europe/Zurich]",
            "2026-11-20T14",
            "2026-11-20 14",
            "yesterday",
            "25:00",
            "2026-13-01",
            "1403",
            "9999-12-31T23:59:60",
            "-1:00",
        ] {
            assert!(moment("--at", text, now).is_err(), "{text}");
        }
    }
}
