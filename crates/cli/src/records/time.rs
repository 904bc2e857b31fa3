//! Reads the times of logs, in microseconds since 1970.

use jiff::civil::DateTime;
use jiff::tz::Offset;
use jiff::{Timestamp, civil};

use super::field::{MAX_T_US, quoted, unexpected};

/// Up to this, a number is seconds, until the year 5138; larger ones are milliseconds, microseconds, then nanoseconds.
const MOST_SECONDS: f64 = 1e11;

/// A time as RFC 3339, as in the Common Log Format, or as seconds, milliseconds, microseconds or nanoseconds since
/// 1970. One without a zone counts as UTC.
pub(super) fn read(name: &str, text: &[u8]) -> Result<u64, String> {
    let found = str::from_utf8(text).ok().and_then(|text| {
        if text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.') {
            return text.parse::<f64>().ok().and_then(since_1970).map(Ok);
        }
        iso(text).or_else(|| common(text.trim_start_matches('[').trim_end_matches(']'), Zone::MayLack))
    });
    let expected =
        "a time such as 2015-05-17T10:05:03Z, 17/May/2015:10:05:03 +0000 or 1431857103.25, from 1970 to 2112";
    found.unwrap_or_else(|| Err(unexpected(name, expected, &quoted(text))))
}

/// Whether this is clearly a time: not just whole seconds since 1970, which any number could be.
pub(super) fn is_one(text: &[u8]) -> bool {
    let is_number = text.iter().all(|byte| byte.is_ascii_digit() || *byte == b'.');
    (!is_number || text.len() >= 10) && read("", text).is_ok_and(|t_us| t_us > 946_684_800_000_000)
}

pub(super) fn since_1970(number: f64) -> Option<u64> {
    let scale = match number {
        _ if !(0.0..=MOST_SECONDS * 1e9).contains(&number) => return None,
        _ if number < MOST_SECONDS => 1e6,
        _ if number < MOST_SECONDS * 1e3 => 1e3,
        _ if number < MOST_SECONDS * 1e6 => 1.0,
        _ => 1e-3,
    };
    let us = (number * scale).round();
    (us <= MAX_T_US as f64).then_some(us as u64)
}

/// `2015-05-17T10:05:03.25+00:00`, with a space or without a zone too, and `2015/05/17 10:05:03`, as programs in Go and
/// Caddy's `wall` have it; `None` if it isn't such a time.
pub(super) fn iso(text: &str) -> Option<Result<u64, String>> {
    // Not dates alone, nor years.
    if text.len() < 19 || !text.as_bytes()[0].is_ascii_digit() {
        return None;
    }
    if matches!(text.as_bytes(), [_, _, _, _, b'/', _, _, b'/', ..]) {
        return iso(&text.replacen('/', "-", 2));
    }
    let civil = || text.parse::<DateTime>().ok()?.to_zoned(jiff::tz::TimeZone::UTC).ok().map(|at| at.timestamp());
    let at = text.parse::<Timestamp>().ok().or_else(civil)?;
    Some(in_range(at, text))
}

/// Whether a time may lack its zone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Zone {
    Needed,
    MayLack,
}

/// `17/May/2015:10:05:03 +0000`, with decimals too; `None` if it isn't such a time.
pub(super) fn common(text: &str, zone: Zone) -> Option<Result<u64, String>> {
    const MONTHS: &[u8; 36] = b"JanFebMarAprMayJunJulAugSepOctNovDec";
    let bytes = text.as_bytes();
    let (at, rest) = bytes.split_at_checked(20)?;
    let separators = [(2, b'/'), (6, b'/'), (11, b':'), (14, b':'), (17, b':')];
    if separators.iter().any(|(place, byte)| at[*place] != *byte) {
        return None;
    }
    let number = |from: usize, to: usize| {
        at[from..to]
            .iter()
            .try_fold(0_i16, |number, byte| byte.is_ascii_digit().then(|| number * 10 + i16::from(byte - b'0')))
    };
    let small = |from| number(from, from + 2).and_then(|number| i8::try_from(number).ok());
    let month = MONTHS.chunks(3).position(|name| name == &at[3..6])? as i8 + 1;
    // A leap second counts as the second before it.
    let second = small(18)?;
    let second = if second == 60 { 59 } else { second };
    let date = civil::Date::new(number(7, 11)?, month, small(0)?).ok()?;
    let (nanoseconds, rest) = decimals(rest)?;
    let time = civil::Time::new(small(12)?, small(15)?, second, nanoseconds).ok()?;
    let offset = match rest {
        [] if zone == Zone::MayLack => Offset::UTC,
        [b' ', sign @ (b'+' | b'-'), digits @ ..] if digits.len() == 4 && digits.iter().all(u8::is_ascii_digit) => {
            let digit = |at: usize| i32::from(digits[at] - b'0');
            let (hours, minutes) = (digit(0) * 10 + digit(1), digit(2) * 10 + digit(3));
            if minutes > 59 {
                return None;
            }
            let seconds = hours * 3600 + minutes * 60;
            Offset::from_seconds(if *sign == b'-' { -seconds } else { seconds }).ok()?
        }
        _ => return None,
    };
    let at = offset.to_timestamp(date.to_datetime(time)).ok()?;
    Some(in_range(at, text))
}

/// `.25` in nanoseconds, and what follows.
fn decimals(text: &[u8]) -> Option<(i32, &[u8])> {
    let Some((b'.', text)) = text.split_first() else { return Some((0, text)) };
    let digits = text.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let (decimals, rest) = text.split_at(digits);
    let padded = decimals.iter().copied().chain(std::iter::repeat(b'0')).take(9);
    (1..=9).contains(&digits).then(|| (padded.fold(0, |sum, digit| sum * 10 + i32::from(digit - b'0')), rest))
}

/// The time in microseconds since 1970.
fn in_range(at: Timestamp, text: &str) -> Result<u64, String> {
    let t_us = u64::try_from(at.as_microsecond()).ok().filter(|t_us| *t_us <= MAX_T_US);
    t_us.ok_or_else(|| unexpected("time", "a time from 1970 to 2112", &quoted(text.as_bytes())))
}

#[cfg(test)]
mod tests {
    use jiff::fmt::strtime;

    use super::*;

    #[test]
    fn a_common_time_is_the_same_as_by_its_format() {
        const FORMAT: &str = "%d/%b/%Y:%H:%M:%S %z";
        let mut random = fastrand::Rng::with_seed(13);
        let by_format = |text: &str| strtime::parse(FORMAT, text).ok()?.to_timestamp().ok();
        let mut seen = 0;
        for at in 0..20_000 {
            let second = random.i64(0..4_400_000_000);
            let offset = Offset::from_seconds(random.i32(-1439..1440) * 60).expect("within a day");
            let zoned = Timestamp::from_second(second).expect("a time").to_zoned(offset.to_time_zone());
            let mut text = zoned.strftime(FORMAT).to_string().into_bytes();
            if at % 2 == 0 {
                let place = random.usize(0..text.len());
                text[place] = b"0123456789/: +-JanFebz"[random.usize(0..22)];
            }
            let text = String::from_utf8(text).expect("ASCII");
            let found = common(&text, Zone::Needed).and_then(Result::ok);
            let expected = by_format(&text).and_then(|at| u64::try_from(at.as_microsecond()).ok());
            assert!(found.is_none() || found == expected, "{text}: {found:?}");
            seen += usize::from(found.is_some());
            if at % 2 == 1 {
                assert_eq!(found, u64::try_from(second * 1_000_000).ok(), "{text}");
            }
        }
        assert!(seen > 11_000, "{seen}");
    }
}
