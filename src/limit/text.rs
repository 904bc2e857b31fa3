//! The one-line text form of a limit: `token-bucket 100/1m burst 200`.

use std::fmt;
use std::str::{FromStr, SplitWhitespace};
use std::time::Duration;

use super::calendar::{CalendarUnit, UTC};
use super::{Limit, LimitBuilder, MaxDebt, WindowStart};
use crate::algorithm::{Algorithm, Setting};
use crate::error::RuleError;

/// A period in microseconds, printed with one unit, the largest that is exact.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Period(pub(crate) u64);

const UNITS: [(&str, u64); 6] =
    [("d", 86_400_000_000), ("h", 3_600_000_000), ("m", 60_000_000), ("s", 1_000_000), ("ms", 1000), ("us", 1)];

/// What people write for a unit, and its name here.
const OTHER_NAMES: [(&str, &[&str]); 6] = [
    ("us", &["µs", "usec", "usecs", "micro", "micros", "microsecond", "microseconds"]),
    ("ms", &["msec", "msecs", "milli", "millis", "millisecond", "milliseconds"]),
    ("s", &["sec", "secs", "second", "seconds"]),
    ("m", &["min", "mins", "minute", "minutes"]),
    ("h", &["hr", "hrs", "hour", "hours"]),
    ("d", &["day", "days"]),
];

impl FromStr for Limit {
    type Err = RuleError;

    fn from_str(text: &str) -> Result<Self, RuleError> {
        let words: Vec<_> = text.split_whitespace().collect();
        let Some((name, words)) = words.split_first() else {
            return Err(RuleError::new(
                "rule: the limit is missing: write an algorithm and a rate, such as token-bucket 10/1s",
            ));
        };
        if name.starts_with(|first: char| first.is_ascii_digit()) {
            let rate = suggested_rate(&[&[*name], words].concat()).unwrap_or_else(|| "10/1s".into());
            return Err(RuleError::new(format!(
                "rule: expected an algorithm first, such as token-bucket {rate}, got {text:?}"
            )));
        }
        let algorithm = Algorithm::named(name)?;
        if algorithm.holds() {
            let Some((count, options)) = words.split_first() else {
                let what = "how many may be held at once, and a ttl, such as 8 ttl 30s";
                return Err(RuleError::new(format!("{algorithm}: the permits are missing: write {what}")));
            };
            return permits(algorithm, count, options)?.build();
        }
        let (count, period, mut options) = rate(algorithm, words)?;
        let mut limit = match period {
            Every::Period(period) => Limit::builder(algorithm, count, Duration::from_micros(period.0)),
            Every::Window(window) => Limit::calendar(count, window),
        };
        while let Some((option, rest)) = options.split_first() {
            limit = with_option(limit, option, rest.first().copied())?;
            options = rest.get(1..).unwrap_or_default();
        }
        limit.build()
    }
}

/// What a rate is per.
enum Every {
    Period(Period),
    Window(CalendarUnit),
}

/// `10/1s`, and the words after it; for a fixed window also `10/month`.
fn rate<'w, 't>(algorithm: Algorithm, words: &'w [&'t str]) -> Result<(u64, Every, &'w [&'t str]), RuleError> {
    let expected = |example: &str, got: &str| {
        RuleError::new(format!("rate: expected units per period, such as {example}, got {got}"))
    };
    let usual = if algorithm == Algorithm::CalendarWindow { "250/day" } else { "10/1s" };
    let missing =
        |what: &str, example: &str| RuleError::new(format!("rate: {what}: write units per period, such as {example}"));
    let Some((rate, options)) = words.split_first() else {
        return Err(missing(&format!("it is missing after {algorithm}"), usual));
    };
    let calendar = matches!(algorithm, Algorithm::FixedWindow | Algorithm::CalendarWindow);
    let window = suggested_window(words);
    let meant = match (window.clone(), suggested_rate(words)) {
        (Some(window), _) if calendar => Some(window),
        (Some(window), Some(rate)) if window.ends_with("month") || window.ends_with("year") => {
            Some(format!("{rate}, or fixed-window {window}"))
        }
        (_, rate) => rate,
    };
    let example = meant.as_deref().unwrap_or(usual);
    let Some((count, period)) = rate.split_once('/') else {
        let got = if meant.is_some() { words.join(" ") } else { (*rate).to_owned() };
        return Err(expected(example, &format!("{got:?}")));
    };
    if count.is_empty() || period.is_empty() {
        let (part, side) = if count.is_empty() { ("units are", "before") } else { ("period is", "after") };
        return Err(missing(&format!("the {part} missing {side} the / in {rate:?}"), example));
    }
    let count = whole("rate", count)?;
    if let Some(window) = CalendarUnit::named(period).filter(|_| calendar) {
        return Ok((count, Every::Window(window), options));
    }
    if algorithm == Algorithm::CalendarWindow {
        return Err(expected(suggested_window(words).as_deref().unwrap_or(usual), &format!("{rate:?}")));
    }
    match (period.parse::<Period>(), meant) {
        (Err(_), Some(meant)) => {
            // What was meant may be a window of the calendar, which isn't one of these.
            let units = if window.is_none() { "; the units are us ms s m h d" } else { "" };
            Err(expected(&meant, &format!("{rate:?}{units}")))
        }
        (period, _) => Ok((count, Every::Period(period?), options)),
    }
}

/// The calendar rate meant by `100/days`, `100 per month`, `2/1week` or the like. Several units, such as `2/3months`,
/// aren't one window, so the suggestion is for one.
fn suggested_window(words: &[&str]) -> Option<String> {
    let text = lower_case(words);
    let (count, first, mut rest) = rate_as_people_write_it(&text)?;
    let digits = first.find(|character: char| !character.is_ascii_digit()).unwrap_or(first.len());
    let (several, unit) = first.split_at(digits);
    let unit = if unit.is_empty() { rest.next()? } else { unit };
    let unit = unit.trim_end_matches('.');
    let window = CalendarUnit::named(match unit {
        "daily" => "day",
        "monthly" | "mo" => "month",
        "yearly" | "y" | "yr" => "year",
        "weekly" | "w" => "week",
        _ => unit.trim_end_matches('s'),
    })?;
    // Several days or weeks are a plain period.
    let is_period = !matches!(several, "" | "1") && matches!(window, CalendarUnit::Day | CalendarUnit::Week);
    (!is_period).then(|| format!("{count}/{window}"))
}

/// The rate meant by `100/min`, `100/10 sec`, `100 per minute` or the like, in the text form.
fn suggested_rate(words: &[&str]) -> Option<String> {
    let text = lower_case(words);
    let (count, first, mut rest) = rate_as_people_write_it(&text)?;
    // The count may be separated from its unit.
    let period = suggested_period(first).or_else(|| suggested_period(&format!("{first}{}", rest.next()?)))?;
    Some(format!("{count}/{period}"))
}

fn lower_case(words: &[&str]) -> String {
    words.iter().map(|word| word.to_lowercase()).collect::<Vec<_>>().join(" ")
}

/// The count, the word after `/`, `per` or `a`, and the following words.
fn rate_as_people_write_it(text: &str) -> Option<(&str, &str, SplitWhitespace<'_>)> {
    let (count, period) =
        text.split_once('/').or_else(|| text.split_once(" per ")).or_else(|| text.split_once(" a "))?;
    let (count, mut period) = (count.trim(), period.split_whitespace());
    let first = period.next()?;
    (!count.is_empty() && count.bytes().all(|byte| byte.is_ascii_digit())).then_some((count, first, period))
}

/// The period meant by `min`, `10sec` or the like, in the text form.
fn suggested_period(text: &str) -> Option<String> {
    let text = text.to_lowercase();
    let (count, unit) = text.split_at(text.find(|character: char| !character.is_ascii_digit())?);
    let (count, unit) = (if count.is_empty() { "1" } else { count }, unit.trim_end_matches('.'));
    let days = match unit {
        "week" | "weeks" | "w" => 7,
        "month" | "months" | "mo" => 30,
        "year" | "years" | "y" | "yr" => 365,
        _ => 0,
    };
    if days > 0 {
        return Some(format!("{}d", count.parse::<u64>().ok()?.checked_mul(days)?));
    }
    let known = |(name, others): &&(&str, &[&str])| *name == unit || others.contains(&unit);
    OTHER_NAMES.iter().find(known).map(|(name, _)| format!("{count}{name}"))
}

/// `concurrency 8 ttl 30s`: only a count, and how long a permit lasts.
fn permits(algorithm: Algorithm, count: &str, options: &[&str]) -> Result<LimitBuilder, RuleError> {
    if count.contains('/') {
        return Err(RuleError::new(format!(
            "{algorithm}: expected permits and a ttl, such as 8 ttl 30s, got {count:?}"
        )));
    }
    let units = whole("permits", count)?;
    match options {
        ["ttl", ttl] => Ok(Limit::builder(algorithm, units, Duration::from_micros(ttl.parse::<Period>()?.0))),
        [others @ .., "shards", shards] | ["shards", shards, others @ ..] if others.len() == 2 => {
            with_option(permits(algorithm, count, others)?, "shards", Some(shards))
        }
        _ => {
            let ttl = "a ttl such as ttl 30s, after which the permits of a crashed holder expire";
            Err(RuleError::new(match options {
                [] => format!("{algorithm}: the ttl is missing: after {count}, write {ttl}"),
                _ => format!("{algorithm}: expected {ttl}, got {:?}", options.join(" ")),
            }))
        }
    }
}

fn with_option(mut limit: LimitBuilder, option: &str, value: Option<&str>) -> Result<LimitBuilder, RuleError> {
    let unknown = || {
        let (algorithm, options) = (limit.algorithm, limit.algorithm.row().options());
        let after = match limit.calendar {
            Some(window) => format!("{} {}/{window}", Algorithm::FixedWindow, limit.rate),
            None => algorithm.to_string(),
        };
        let hint = match (option, algorithm) {
            ("tz", Algorithm::FixedWindow) => " (tz is for calendar windows, such as 10/day)",
            _ => "",
        };
        RuleError::new(format!("option: expected {options} after {after}, got {option:?}{hint}"))
    };
    let name = if option == "capacity" { Setting::Burst.name() } else { option };
    let Some(setting) = limit.algorithm.row().options.iter().find(|setting| setting.name() == name) else {
        return Err(unknown());
    };
    let value = value.ok_or_else(|| RuleError::new(format!("{option}: its value is missing")))?;
    let again = match setting {
        Setting::Burst => limit.capacity.replace(whole(option, value)?).is_some(),
        Setting::MaxDebt => {
            let debt = if value == "unlimited" { MaxDebt::Unlimited } else { MaxDebt::Units(whole(option, value)?) };
            limit.max_debt.replace(debt).is_some()
        }
        Setting::Start => {
            let start = match value {
                "first-hit" => WindowStart::FirstHit,
                "spread" => WindowStart::Spread,
                _ => {
                    let expected = "expected first-hit, spread, or an offset such as 8h";
                    let offset: Period =
                        value.parse().map_err(|_| RuleError::new(format!("start: {expected}, got {value:?}")))?;
                    WindowStart::At(Duration::from_micros(offset.0))
                }
            };
            limit.start.replace(start).is_some()
        }
        Setting::Max => limit.max.replace(whole(option, value)?).is_some(),
        Setting::Shards => limit.shards.replace(whole(option, value)?).is_some(),
        Setting::Tz => limit.zone.replace(value.to_owned()).is_some(),
        Setting::Ttl => return Err(unknown()),
    };
    if again {
        return Err(RuleError::new(format!("{option}: given twice, the second time as {value:?}")));
    }
    Ok(limit)
}

fn whole(name: &str, text: &str) -> Result<u64, RuleError> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    match text.parse() {
        Ok(number) if digits => Ok(number),
        _ => Err(RuleError::new(format!("{name}: expected a whole number up to 2^53, got {text:?}"))),
    }
}

impl FromStr for Period {
    type Err = RuleError;

    /// `unit | N unit { N unit }`: `s`, `10s`, `1h30m`.
    fn from_str(text: &str) -> Result<Self, RuleError> {
        let bad = || {
            let example = suggested_period(text).unwrap_or_else(|| "10s or 1h30m".into());
            RuleError::new(format!(
                "period: expected a count and a unit (us ms s m h d), such as {example}, got {text:?}"
            ))
        };
        let mut rest = text;
        let mut total: u64 = 0;
        while !rest.is_empty() || total == 0 {
            let digits = rest.find(|c: char| !c.is_ascii_digit()).ok_or_else(bad)?;
            let (count, tail) = rest.split_at(digits);
            let letters = tail.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(tail.len());
            let (unit, tail) = tail.split_at(letters);
            let alone = count.is_empty() && rest == text && tail.is_empty();
            let count: u64 = if alone { 1 } else { count.parse().map_err(|_| bad())? };
            let (_, size) = UNITS.iter().find(|(name, _)| *name == unit).ok_or_else(bad)?;
            let long = || RuleError::new(format!("period: expected at most 71 years, got {text:?}"));
            total = count.checked_mul(*size).and_then(|part| total.checked_add(part)).ok_or_else(long)?;
            rest = tail;
            if rest.is_empty() {
                break;
            }
        }
        Ok(Self(total))
    }
}

impl fmt::Display for Period {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let whole = UNITS.iter().find(|(_, size)| self.0 != 0 && self.0.is_multiple_of(*size));
        let (unit, size) = whole.unwrap_or(&("us", 1));
        write!(f, "{}{unit}", self.0 / size)
    }
}

impl fmt::Display for Limit {
    /// The canonical form: the options in the grammar's order, defaults left out.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // All fields are named, so that a new option can't be forgotten.
        let Self {
            name: _,
            algorithm,
            rate,
            period,
            capacity,
            max_debt,
            start,
            max,
            exact: _,
            packed: _,
            shards: _,
            windows,
        } = self;
        let period = Period(*period);
        if let Some(windows) = windows {
            write!(f, "{} {rate}/{}", Algorithm::FixedWindow, windows.unit())?;
        } else if algorithm.holds() {
            write!(f, "{algorithm} {rate} ttl {period}")?;
        } else {
            write!(f, "{algorithm} {rate}/{period}")?;
        }
        if capacity != rate {
            write!(f, " burst {capacity}")?;
        }
        match max_debt {
            MaxDebt::Units(0) => {}
            MaxDebt::Units(units) => write!(f, " max-debt {units}")?,
            MaxDebt::Unlimited => write!(f, " max-debt unlimited")?,
        }
        match start {
            WindowStart::At(Duration::ZERO) => {}
            WindowStart::At(offset) => {
                write!(f, " start {}", Period(u64::try_from(offset.as_micros()).unwrap_or(u64::MAX)))?
            }
            WindowStart::FirstHit => write!(f, " start first-hit")?,
            WindowStart::Spread => write!(f, " start spread")?,
        }
        if *max != super::LOG_MAX {
            write!(f, " max {max}")?;
        }
        if self.shards() > 1 {
            write!(f, " shards {}", self.shards())?;
        }
        if let Some(zone) = self.tz().filter(|zone| *zone != UTC) {
            write!(f, " tz {zone}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(text: &str) -> String {
        text.parse::<Limit>().expect_err(text).to_string()
    }

    #[test]
    fn periods_as_people_write_them_are_told_as_they_are_written_here() {
        for (rate, form) in [
            ("100/min", "100/1m"),
            ("100/minute", "100/1m"),
            ("100/MINUTES", "100/1m"),
            ("100 per minute", "100/1m"),
            ("100 per 10 minutes", "100/10m"),
            ("100 a day", "100/1d"),
            ("100 / 1m", "100/1m"),
            ("100/10 sec", "100/10s"),
            ("100/sec", "100/1s"),
            ("100/hour", "100/1h"),
            ("100/day", "100/1d"),
            ("100/2weeks", "100/14d"),
            ("100/500msec", "100/500ms"),
        ] {
            let told = refused(&format!("gcra {rate} burst 20"));
            assert!(told.starts_with(&format!("rate: expected units per period, such as {form}, got ")), "{told}");
            assert!(format!("gcra {form}").parse::<Limit>().is_ok(), "{form}");
            let told = refused(rate);
            assert!(told.contains(&format!(" such as token-bucket {form}, got {rate:?}")), "{told}");
        }
        assert!(refused("concurrency 8 ttl 30sec").contains("such as 30s, got \"30sec\""));
    }

    #[test]
    fn what_is_missing_is_named() {
        for (text, told) in [
            ("", "rule: the limit is missing: write an algorithm and a rate, such as token-bucket 10/1s"),
            ("gcra", "rate: it is missing after token-bucket: write units per period, such as 10/1s"),
            ("gcra 5", "rate: expected units per period, such as 10/1s, got \"5\""),
            (
                "gcra 100/1min",
                "rate: expected units per period, such as 100/1m, got \"100/1min\"; the units are us ms s m h d",
            ),
            ("gcra 5/", "rate: the period is missing after the / in \"5/\": write units per period, such as 10/1s"),
            ("gcra /1s", "rate: the units are missing before the / in \"/1s\": write units per period, such as 10/1s"),
            ("gcra 5/1s burst", "burst: its value is missing"),
        ] {
            assert_eq!(refused(text), told);
        }
        assert!(
            refused("concurrency")
                .ends_with("are missing: write how many may be held at once, and a ttl, such as 8 ttl 30s")
        );
        assert!(refused("concurrency 8").starts_with("concurrency: the ttl is missing: after 8, write a ttl such as "));
    }

    #[test]
    fn numbers_that_do_not_fit_are_told_with_those_that_would() {
        for (text, fits, most) in [
            ("sliding-window 9007199254740992/30d", "sliding-window {}/30d", Some(3_474_999_711)),
            ("gcra 1/1s burst 9007199254740992", "gcra 1/1s burst {}", Some(2_251_799_813)),
            ("token-bucket 7/1s burst 9007199254740992", "token-bucket 7/1s burst {}", None),
            ("gcra 1/1s burst 1 max-debt 9007199254740992", "gcra 1/1s burst 0 max-debt {}", Some(2_251_799_813)),
            ("gcra 1/1s burst 9007199254740992 max-debt unlimited", "gcra 1/1s burst {} max-debt unlimited", None),
            ("gcra 9007199254740991/30d", "gcra {}/30d", None),
            ("gcra 9007199254740991/1us", "gcra {}/1us", None),
        ] {
            let error = text.parse::<Limit>().unwrap_err().to_string();
            let told = error.split(" at most ").nth(1).and_then(|rest| rest.split(' ').next()).expect("a number");
            let number: u64 = told.parse().expect("a number");
            assert!(most.is_none_or(|most| most == number), "{error}");
            let limit = |number: u64| fits.replace("{}", &number.to_string()).parse::<Limit>();
            limit(number).unwrap_or_else(|why| panic!("{error}, and then {why}"));
            assert!(most.is_none() || limit(number + 1).is_err(), "{error}");
            assert!(error.contains(", got ") && !error.contains('\n'), "{error}");
        }
    }
}
