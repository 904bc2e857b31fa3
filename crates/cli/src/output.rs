//! What all output is made of: JSON lines that other programs read, tables and texts for people.

use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anstyle::{AnsiColor, Style};
use clap::ValueEnum;
use serde::Serialize;
use serde_json::ser::Formatter;
use tollgate::RetryAfter;

use crate::escape::is_visible;

pub(crate) const RIGHT: Style = AnsiColor::Green.on_default();
pub(crate) const WRONG: Style = AnsiColor::Red.on_default();
pub(crate) const QUIET: Style = Style::new().dimmed();

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Shape {
    /// For people.
    Table,
    /// One JSON object per line.
    Jsonl,
}

/// The chosen format, or the one that suits the output.
pub(crate) fn shape(asked: Option<Shape>) -> Shape {
    let by_terminal = || if io::stdout().is_terminal() { Shape::Table } else { Shape::Jsonl };
    asked.unwrap_or_else(by_terminal)
}

/// The first column, for records.
pub(crate) fn time(t_us: Option<u64>) -> String {
    t_us.map(|t_us| format!("{:<27} ", timestamp(t_us))).unwrap_or_default()
}

/// The remaining units and the waits, in columns.
pub(crate) fn numbers(remaining: u64, limit: u64, retry_after: RetryAfter, reset_after_us: u64) -> String {
    let remaining = format!("{remaining} / {limit}");
    let retry = match retry_after {
        RetryAfter::Now => "-".to_owned(),
        RetryAfter::After(wait) => human(wait),
        RetryAfter::Never => "never".to_owned(),
    };
    let reset = if reset_after_us == 0 { "-".to_owned() } else { human(Duration::from_micros(reset_after_us)) };
    format!("{remaining:>15} {retry:>12} {reset:>12}")
}

/// One JSON object on a line of its own. What can't be seen in a string is escaped: no text may look like another, and
/// what a terminal takes for itself is cut out of the output on its way through a pipe.
pub(crate) fn json(mut out: impl Write, value: &impl Serialize) -> io::Result<()> {
    value.serialize(&mut serde_json::Serializer::with_formatter(&mut out, Visible))?;
    out.write_all(b"\n")
}

/// Compact JSON of visible characters.
struct Visible;

impl Formatter for Visible {
    fn write_string_fragment<W: Write + ?Sized>(&mut self, writer: &mut W, fragment: &str) -> io::Result<()> {
        let mut written = 0;
        if !fragment.is_ascii() || fragment.as_bytes().contains(&0x7f) {
            for (at, character) in fragment.char_indices().filter(|(_, character)| !is_visible(*character)) {
                writer.write_all(&fragment.as_bytes()[written..at])?;
                let mut units = [0; 2];
                for unit in character.encode_utf16(&mut units) {
                    write!(writer, "\\u{unit:04x}")?;
                }
                written = at + character.len_utf8();
            }
        }
        writer.write_all(&fragment.as_bytes()[written..])
    }
}

/// The width of lines: the terminal's, but no more than is comfortable to read.
pub(crate) fn width() -> usize {
    const UNKNOWN: usize = 80;
    const WIDEST: usize = 120;
    console::Term::stdout().size_checked().map_or(UNKNOWN, |(_, columns)| usize::from(columns)).min(WIDEST)
}

/// Wraps text to lines of at most this width, unless a word is longer.
pub(crate) fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split(' ') {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

/// Names and values, one pair a line.
pub(crate) fn facts(mut out: impl Write, facts: &[(&str, String)]) -> io::Result<()> {
    let width = facts.iter().map(|(name, _)| name.len()).max().unwrap_or_default();
    for (name, value) in facts {
        writeln!(out, "{QUIET}{name:<width$}{QUIET:#}  {value}")?;
    }
    Ok(())
}

/// The last numbers as a line of bars, relative to the largest.
pub(crate) fn bars(numbers: impl DoubleEndedIterator<Item = f64> + Clone, width: usize) -> String {
    const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let last: Vec<_> = numbers.rev().take(width).collect();
    let largest = last.iter().copied().fold(0.0, f64::max);
    let bar = |number: &f64| {
        let level = if largest > 0.0 { (number / largest * 7.0).round() as usize } else { 0 };
        BARS[level.min(7)]
    };
    last.iter().rev().map(bar).collect()
}

/// Whether a terminal has a cursor that can be moved, as far as its name tells.
pub(crate) fn can_be_redrawn() -> bool {
    cfg!(windows) || std::env::var_os("TERM").is_some_and(|term| !term.is_empty() && term != "dumb")
}

/// `1 key`, `2 keys`.
pub(crate) fn counted(count: u64, thing: &str) -> String {
    if count == 1 { format!("1 {thing}") } else { format!("{count} {thing}s") }
}

/// The name of a file without its folders; - is standard input.
fn file_name(path: &Path) -> String {
    if path.as_os_str() == "-" {
        return "standard input".to_owned();
    }
    path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
}

/// `access.log`, or `access.log and 2 more files`.
pub(crate) fn file_names(paths: &[PathBuf]) -> String {
    match paths {
        [] => String::new(),
        [one] => file_name(one),
        [first, rest @ ..] => format!("{} and {}", file_name(first), counted(rest.len() as u64, "more file")),
    }
}

/// `1,234,567`
pub(crate) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// `12 bytes`, `3.4 kB`, `1.2 MB`, `5.0 GB`.
pub(crate) fn bytes(count: u64) -> String {
    match count as f64 {
        count if count < 1e3 => format!("{count} bytes"),
        count if count < 1e6 => format!("{:.1} kB", count / 1e3),
        count if count < 1e9 => format!("{:.1} MB", count / 1e6),
        count => format!("{:.1} GB", count / 1e9),
    }
}

/// `12.30 %`.
pub(crate) fn percent(share: f64) -> String {
    match share * 100.0 {
        percent if percent > 0.0 && percent < 0.01 => "below 0.01 %".into(),
        percent => format!("{percent:.2} %"),
    }
}

/// A time of day in UTC, to the microsecond.
pub(crate) fn timestamp(t_us: u64) -> String {
    let time = i64::try_from(t_us).ok().and_then(|t_us| jiff::Timestamp::from_microsecond(t_us).ok());
    time.map_or_else(|| format!("{t_us}us"), |time| format!("{time:.6}"))
}

/// A duration for people, rounded up to three digits after the point or to the second: `1.976s`, `4m10s`.
pub(crate) fn human(duration: Duration) -> String {
    let us = micros(duration);
    let digits = |thousandths: u64, unit: &str| {
        let (whole, rest) = (thousandths / 1000, thousandths % 1000);
        let text = format!("{whole}.{rest:03}");
        format!("{}{unit}", text.trim_end_matches('0').trim_end_matches('.'))
    };
    match us {
        0..1000 => format!("{us}us"),
        1000..1_000_000 => digits(us, "ms"),
        1_000_000..60_000_000 => digits(us.div_ceil(1000), "s"),
        _ => {
            let seconds = us.div_ceil(1_000_000);
            let parts =
                [("d", seconds / 86_400), ("h", seconds / 3600 % 24), ("m", seconds / 60 % 60), ("s", seconds % 60)];
            parts.iter().filter(|(_, count)| *count > 0).map(|(unit, count)| format!("{count}{unit}")).collect()
        }
    }
}

pub(crate) fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_read_well_and_never_too_short() {
        for (us, expected) in [
            (0, "0us"),
            (999, "999us"),
            (1500, "1.5ms"),
            (250_000, "250ms"),
            (1_975_001, "1.976s"),
            (2_000_000, "2s"),
            (59_999_999, "60s"),
            (250_000_000, "4m10s"),
            (2_592_000_000_000, "30d"),
        ] {
            assert_eq!(human(Duration::from_micros(us)), expected);
        }
    }

    #[test]
    fn json_has_only_characters_that_can_be_seen_and_says_the_same() {
        let text = "a\u{7f}b\u{9b}\u{202e}\u{200b}\u{2028}\u{feff}\u{e0101} Zoë \u{5d0} e\u{301} \u{1f600} \"\\\n";
        let mut out = Vec::new();
        json(&mut out, &text).unwrap();
        let line = String::from_utf8(out).unwrap();
        assert_eq!(serde_json::from_str::<String>(&line).unwrap(), text);
        assert!(line.strip_suffix('\n').unwrap().chars().all(is_visible), "{line:?}");
        assert!(line.starts_with(r#""a\u007fb\u009b\u202e\u200b\u2028\ufeff\udb40\udd01 Zoë"#), "{line}");
    }

    #[test]
    fn a_small_share_is_not_none() {
        assert_eq!([percent(0.0), percent(0.000_01), percent(0.123_45)], ["0.00 %", "below 0.01 %", "12.35 %"]);
    }

    #[test]
    fn lines_break_between_words() {
        assert_eq!(wrapped("one two three", 7), ["one two", "three"]);
        assert_eq!(wrapped("one two three", 4), ["one", "two", "three"]);
        assert_eq!(wrapped("", 4), [""]);
    }

    #[test]
    fn bars_are_of_the_last_numbers_and_as_high_as_these_are() {
        assert_eq!(bars([9.0, 0.0, 1.0, 2.0].into_iter(), 3), "▁▅█");
        assert_eq!(bars([0.0, 0.0].into_iter(), 9), "▁▁");
        assert_eq!(bars(std::iter::empty(), 9), "");
    }

    #[test]
    fn numbers_are_grouped() {
        let texts = [0, 12, 123, 1234, 1_234_567].map(grouped);
        assert_eq!(texts, ["0", "12", "123", "1,234", "1,234,567"]);
        assert_eq!([999, 1_500, 2_000_000, 3_100_000_000].map(bytes), ["999 bytes", "1.5 kB", "2.0 MB", "3.1 GB"]);
    }
}
