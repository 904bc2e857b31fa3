//! The valid values of a record's fields, and the messages about invalid ones.

use std::time::Duration;

use crate::options;

/// The latest time that the arithmetic of decisions handles, in microseconds since 1970 (in the year 2112).
pub(super) const MAX_T_US: u64 = 1 << 52;

/// The largest cost: above it, Lua's numbers aren't exact integers.
pub(super) const MAX_COST: u64 = (1 << 53) - 1;

/// The fields of a record.
pub(super) const INPUT: &[&str] = &["t_us", "op", "key", "cost", "id", "for", "request_time", "status"];

/// The fields that replay's output adds. They are ignored, so that output can be replayed.
pub(super) const OUTPUT: &[&str] = &[
    "rule",
    "allowed",
    "limit",
    "remaining",
    "retry_after_us",
    "reset_after_us",
    "denied_by",
    "by",
    "limits",
    "granted",
    "blocked",
    "overage",
    "reason",
    "missing",
    "override",
    "shadows",
    "error",
];

/// The one of these that only the tool's output has. If it is present, keys and ids are in the form that the tool
/// shows.
pub(super) const OWN: &str = "rule";

pub(super) const KEY: &str = "a non-empty string";
/// Describes an empty value in messages.
pub(super) const EMPTY: &str = "an empty string";

/// The length of a block: `10m`.
pub(super) fn length(text: &str) -> Result<Duration, String> {
    options::duration(text).map_err(|expected| format!("for: {expected}, got {}", quoted(text.as_bytes())))
}

/// The longest that a request can have taken: a day, in seconds.
pub(super) const MAX_SECONDS: u32 = 86_400;

/// When a request ended, given its arrival and its duration in seconds: `0.123`, as nginx writes it.
pub(super) fn ends_us(t_us: u64, seconds: &str) -> Result<u64, String> {
    let took = micros(seconds).ok_or_else(|| {
        let expected = format!("seconds from 0 to {MAX_SECONDS}, such as 0.123");
        unexpected("request_time", &expected, &quoted(seconds.as_bytes()))
    })?;
    Ok((t_us + took).min(MAX_T_US))
}

/// Seconds with one to six decimals or none, in microseconds.
pub(super) fn micros(seconds: &str) -> Option<u64> {
    let (whole, decimals) = seconds.split_once('.').unwrap_or((seconds, "0"));
    let digits = |text: &str, most| (1..=most).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_digit());
    if !digits(whole, 5) || !digits(decimals, 6) {
        return None;
    }
    let us = whole.parse::<u64>().ok()? * 1_000_000 + format!("{decimals:0<6}").parse::<u64>().ok()?;
    (us <= u64::from(MAX_SECONDS) * 1_000_000).then_some(us)
}

/// The HTTP status of a response; `None` if it is something else, as logs write for a request without a response.
pub(super) fn status(text: &[u8]) -> Option<u16> {
    let status = str::from_utf8(text).ok().filter(|_| text.len() == 3)?.parse().ok()?;
    (100..=599).contains(&status).then_some(status)
}

/// The same for a record, where anything else is an error.
pub(super) fn needed_status(text: &[u8]) -> Result<u16, String> {
    status(text).ok_or_else(|| unexpected("status", "an HTTP status, such as 200", &quoted(text)))
}

/// The value as [`shown`], in quotes.
pub(crate) fn quoted(value: &[u8]) -> String {
    format!("\"{}\"", shown(value))
}

/// `t_us: it is missing`
pub(super) fn missing(field: &str) -> String {
    format!("{field}: it is missing")
}

/// `key: expected a non-empty string, got 5`
pub(super) fn unexpected(field: &str, expected: &str, got: &str) -> String {
    format!("{field}: expected {expected}, got {got}")
}

/// `value` if it is a number up to `max`, otherwise a message that shows `got`.
pub(super) fn whole(field: &str, value: Option<u64>, max: u64, got: impl FnOnce() -> String) -> Result<u64, String> {
    value.filter(|n| *n <= max).ok_or_else(|| unexpected(field, &format!("a whole number from 0 to {max}"), &got()))
}

/// A value as one short printable line. Quotes and backslashes are kept, since people will search for the value in
/// their file.
pub(super) fn shown(value: &[u8]) -> String {
    const WIDTH: usize = 60;
    // A character has at most four bytes, so whatever is cut off here wouldn't fit anyway.
    let beginning = &value[..value.len().min(4 * WIDTH + 4)];
    let mut out = String::new();
    let mut width = 0;
    let pieces = beginning.utf8_chunks().flat_map(|chunk| {
        let valid = chunk.valid().chars().map(|c| match c {
            '"' | '\'' | '\\' => String::from(c),
            c => c.escape_debug().to_string(),
        });
        valid.chain(chunk.invalid().iter().map(|byte| format!("\\x{byte:02x}")))
    });
    for piece in pieces {
        // Escapes are ASCII, anything else is one character.
        width += if piece.is_ascii() { piece.len() } else { 1 };
        if width > WIDTH {
            out.push('…');
            break;
        }
        out.push_str(&piece);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shown_value_is_one_short_printable_line() {
        for (value, want) in [
            (&b"u1"[..], "u1"),
            (b"", ""),
            (b"say \"hi\" to C:\\x", "say \"hi\" to C:\\x"),
            (b"a\nb\0\x1b[31m", "a\\nb\\0\\u{1b}[31m"),
            (b"\xff\xc3\xa9\xe2\x80\xa8", "\\xff\u{e9}\\u{2028}"),
        ] {
            assert_eq!(shown(value), want);
        }
        assert_eq!(shown(&[b'x'; 60]), "x".repeat(60));
        assert_eq!(shown(&[b'x'; 61]), format!("{}…", "x".repeat(60)));
        assert_eq!(shown("é".repeat(1_000_000).as_bytes()), format!("{}…", "é".repeat(60)));
        assert_eq!(shown("\u{1f600}".repeat(61).as_bytes()), format!("{}…", "\u{1f600}".repeat(60)));
        assert_eq!(shown(&[0; 100]), format!("{}…", "\\0".repeat(30)));
    }
}
