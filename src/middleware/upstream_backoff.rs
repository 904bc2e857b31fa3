//! Pauses outgoing calls when the other side says that it takes no more.

use std::borrow::Cow;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use http::StatusCode;
use http::header::{DATE, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER};
use http::response::Parts;

use super::answer::Added;
use crate::algorithm::numbers::LONGEST_RESET_US;
use crate::error::Error;
use crate::limiter::Limiter;
use crate::request::{OwnedRequest, Request};
use crate::rule::Rule;
use crate::rules::Verdict;
use crate::telemetry;

/// A Redis that is unreachable must not delay the response for long.
const DEADLINE: Duration = Duration::from_millis(100);

/// Blocks the key for as long as a response asks for a pause, up to `most`, unless it is already blocked for longer.
pub(super) async fn back_off(limiter: &Limiter, rule: &Rule, request: &OwnedRequest, most: Duration, response: &Parts) {
    let Some(time) = asked_for(response).map(|time| time.min(most)).filter(|time| !time.is_zero()) else { return };
    let time = time.min(Duration::from_micros(LONGEST_RESET_US));
    let request = Request::from(request).deadline(DEADLINE.min(limiter.deadline()));
    // Without a cost, nothing but a block makes it wait. If Redis is unreachable, skip: the next response will repeat
    // it.
    let Ok(now) = limiter.peek(rule, request.cost_of_all(0)).await else { return };
    let is_longer = now.blocked && now.retry_after.duration().is_some_and(|left| left >= time);
    if !is_longer && let Err(error) = limiter.block(rule, request, time).await {
        telemetry::upstream_backoff_failed(&error);
    }
}

/// How long the other side asks for a pause. Fields from our own layers don't count.
fn asked_for(response: &Parts) -> Option<Duration> {
    if response.extensions.get::<Verdict>().is_some() || response.extensions.get::<Error>().is_some() {
        return None;
    }
    let added = response.extensions.get::<Added>().copied().unwrap_or_default();
    let headers = &response.headers;
    let now = sent_at(headers);
    let named = HeaderName::from_static;
    let with_x = (!added.older).then_some(("x-ratelimit-remaining", "x-ratelimit-reset"));
    let fields = with_x.into_iter().chain([("ratelimit-remaining", "ratelimit-reset")]);
    let older = fields.filter_map(|(remaining, reset)| by_own_fields(headers, named(remaining), named(reset), now));
    let told = [retry_after(response.status, headers, now), exhausted(headers, added.lines)];
    told.into_iter().flatten().chain(older).max()
}

/// When the response was sent, by the other side's clock, as its dates are; by ours if it doesn't say.
fn sent_at(headers: &HeaderMap) -> SystemTime {
    headers.get(DATE).and_then(|date| httpdate::parse_http_date(text(date).trim()).ok()).unwrap_or_else(SystemTime::now)
}

/// A field's value, with whatever isn't text replaced: one item of a list that can't be read doesn't hide the others.
fn text(value: &HeaderValue) -> Cow<'_, str> {
    String::from_utf8_lossy(value.as_bytes())
}

/// A number that isn't negative, rounded up: some senders have fractions of a second.
fn number(text: &str) -> Option<u64> {
    let text = text.trim();
    let (whole, fraction) = text.split_once('.').unwrap_or((text, "0"));
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    if !digits(whole) || !digits(fraction) {
        return None;
    }
    let more = fraction.bytes().any(|digit| digit != b'0');
    // What overflows is longer than any pause.
    Some(whole.parse::<u64>().unwrap_or(u64::MAX).saturating_add(more.into()))
}

/// For a response that refuses: seconds, or a date. Of several, the longest.
fn retry_after(status: StatusCode, headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    // 403 and 529 are what some send in place of the other two.
    if ![403, 429, 503, 529].contains(&status.as_u16()) {
        return None;
    }
    let waits = headers.get_all(RETRY_AFTER).iter().filter_map(|line| {
        let text = text(line);
        match httpdate::parse_http_date(text.trim()) {
            Ok(date) => Some(date.duration_since(now).unwrap_or_default()),
            // Lines may have been joined on the way.
            Err(_) => text.split(',').filter_map(number).max().map(Duration::from_secs),
        }
    });
    waits.max()
}

/// For `RateLimit: "a";r=0;t=30, "b";r=7`, the longest `t` among items with nothing remaining; for `limit=5,
/// remaining=0, reset=30`, as the draft had it before, that time. Ignores this many lines at the end, which inner
/// layers added.
fn exhausted(headers: &HeaderMap, added: usize) -> Option<Duration> {
    let lines = headers.get_all("ratelimit").iter().rev().skip(added).map(text);
    let of_line = |line: Cow<'_, str>| {
        let items = items(&line);
        let members = |name: &'static str| {
            let members = items.iter().filter_map(|item| item.split_once('='));
            members.filter(move |(key, _)| key.trim() == name).map(|(_, value)| number(before_parameters(value)))
        };
        let of_members = longest(members("remaining").zip(members("reset")));
        let empty = items.iter().filter(|item| parameter(item, "r") == Some(0));
        empty.filter_map(|item| parameter(item, "t")).chain(of_members).max()
    };
    lines.filter_map(of_line).max().map(Duration::from_secs)
}

/// The longest time, of pairs of what remains and when there is more, where nothing remains.
fn longest(pairs: impl Iterator<Item = (Option<u64>, Option<u64>)>) -> Option<u64> {
    pairs.filter(|(remaining, _)| *remaining == Some(0)).filter_map(|(_, reset)| reset).max()
}

fn before_parameters(value: &str) -> &str {
    value.split(';').next().unwrap_or_default()
}

/// For `X-RateLimit-Remaining: 0` and `X-RateLimit-Reset: 30`, or without the `X-` as the draft had it at first:
/// seconds from now or, as with GitHub and others, seconds or milliseconds since the epoch. Of several lines, which may
/// have been joined on the way, each is of the same limit as the other field's.
fn by_own_fields(headers: &HeaderMap, remaining: HeaderName, reset: HeaderName, now: SystemTime) -> Option<Duration> {
    let numbers = |name| -> Vec<_> {
        headers.get_all(name).iter().flat_map(|line| text(line).split(',').map(number).collect::<Vec<_>>()).collect()
    };
    let reset = longest(numbers(remaining).into_iter().zip(numbers(reset)))?;
    let now = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    // No wait lasts thirty years: larger numbers are timestamps.
    Some(match reset {
        0..1_000_000_000 => Duration::from_secs(reset),
        1_000_000_000..100_000_000_000 => Duration::from_secs(reset.saturating_sub(now)),
        _ => Duration::from_millis(reset.saturating_sub(now * 1000)),
    })
}

/// The members of a structured-field list; commas within quotes don't separate.
fn items(line: &str) -> Vec<&str> {
    let (mut items, mut start, mut quoted, mut escaped) = (Vec::new(), 0, false, false);
    for (at, byte) in line.bytes().enumerate() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if quoted => escaped = true,
            b'"' => quoted = !quoted,
            b',' if !quoted => {
                items.push(&line[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    items.push(&line[start..]);
    items
}

/// The text after `"name"`, in which a backslash escapes what would end it.
fn after_the_name(item: &str) -> &str {
    let mut escaped = false;
    let mut ends = item.char_indices().skip_while(|(_, letter)| *letter != '"').skip(1);
    let end = ends.find(|(_, letter)| {
        let ends = !escaped && *letter == '"';
        escaped = !escaped && *letter == '\\';
        ends
    });
    end.map_or(item, |(at, _)| &item[at + 1..])
}

/// A parameter that is a number, from the text after the item's quoted name.
fn parameter(item: &str, name: &str) -> Option<u64> {
    let parameters = after_the_name(item);
    parameters.split(';').skip(1).find_map(|parameter| {
        let (key, value) = parameter.split_once('=')?;
        (key.trim() == name).then(|| number(value))?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(fields: &[(&'static str, &'static str)]) -> HeaderMap {
        fields.iter().fold(HeaderMap::new(), |mut headers, (name, value)| {
            headers.append(*name, HeaderValue::from_static(value));
            headers
        })
    }

    /// What a response with this status and these fields asks for, sent on a Sunday in 1994 by its own clock if none of
    /// them says.
    fn waited(status: u16, fields: &[(&'static str, &'static str)]) -> Option<u64> {
        let mut response = http::Response::new(());
        *response.status_mut() = StatusCode::from_u16(status).unwrap();
        *response.headers_mut() = headers(fields);
        response.headers_mut().append(DATE, HeaderValue::from_static("Sun, 06 Nov 1994 08:30:00 GMT"));
        asked_for(&response.into_parts().0).map(|wait| wait.as_secs())
    }

    #[test]
    fn the_wait_that_is_asked_for_is_read() {
        for (text, expected) in [
            ("30", Some(30)),
            (" 7 ", Some(7)),
            ("1.5", Some(2)),
            ("2.0", Some(2)),
            ("0.001", Some(1)),
            ("0.0", Some(0)),
            ("99999999999999999999", Some(u64::MAX)),
            ("2, 7", Some(7)),
            ("soon", None),
            ("-1", None),
            ("+5", None),
            ("1e3", None),
            ("1.", None),
            (".5", None),
            ("1.2.3", None),
            ("", None),
            ("Sun, 06 Nov 1994 08:30:07 GMT", Some(7)),
            ("Sunday, 06-Nov-94 08:30:07 GMT", Some(7)),
            ("Sun Nov  6 08:30:07 1994", Some(7)),
            ("Sun, 06 Nov 1994 08:29:00 GMT", Some(0)),
        ] {
            for status in [403, 429, 503, 529] {
                assert_eq!(waited(status, &[("retry-after", text)]), expected, "{status} {text}");
            }
            assert_eq!(waited(200, &[("retry-after", text)]), None);
        }
        for lines in [["9", "4"], ["4", "9"], ["Sun, 06 Nov 1994 08:30:09 GMT", "4.2"], ["soon", "8.1"]] {
            assert_eq!(waited(429, &lines.map(|line| ("retry-after", line))), Some(9), "{lines:?}");
        }
    }

    /// By the other side's clock, and ours only if it doesn't say.
    #[test]
    fn a_date_counts_from_that_of_its_response() {
        let http_date = |time: SystemTime| HeaderValue::try_from(httpdate::fmt_http_date(time)).unwrap();
        let hour = Duration::from_secs(3600);
        for clock in [SystemTime::now() + hour, SystemTime::now() - hour] {
            let mut told = headers(&[]);
            told.insert(DATE, http_date(clock));
            told.insert(RETRY_AFTER, http_date(clock + Duration::from_secs(7)));
            let wait = retry_after(StatusCode::TOO_MANY_REQUESTS, &told, sent_at(&told));
            assert_eq!(wait, Some(Duration::from_secs(7)));
        }
        for date in [None, Some("lunchtime")] {
            let mut told = headers(&[]);
            told.extend(date.map(|date| (DATE, HeaderValue::from_static(date))));
            told.insert(RETRY_AFTER, http_date(SystemTime::now() + hour));
            let wait = retry_after(StatusCode::TOO_MANY_REQUESTS, &told, sent_at(&told)).unwrap();
            assert!(wait <= hour && wait > hour / 2, "{date:?}: {wait:?}");
        }
    }

    #[test]
    fn the_longest_wait_of_what_is_used_up_counts() {
        for (lines, expected) in [
            (&["\"a\";r=0;t=30"][..], Some(30)),
            (&["\"a\";r=1;t=30"], None),
            (&["\"5-in-2min\"; r=0; t=120"], Some(120)),
            (&["\"a\";r=0;t=5, \"b\";t=60;r=0,\"c\";r=9;t=900"], Some(60)),
            (&["\"a\";r=0;t=5", "\"b\";r=0;t=7"], Some(7)),
            (&["\"a,\\\";r=0;t=9\";r=3;t=30"], None),
            (&["\"a\";r=0"], None),
            (&["\"a\";r=0;t=30;reason=\"x;t=9\""], Some(30)),
            (&["a;r=0;t=x"], None),
            (&[""], None),
            // The seventh draft.
            (&["limit=5, remaining=0, reset=120"], Some(120)),
            (&["limit=5,reset=7,remaining=0"], Some(7)),
            (&["limit=5;w=60, remaining=0;x=1, reset=2.5;y"], Some(3)),
            (&["limit=5, remaining=1, reset=120"], None),
            (&["limit=5, remaining=0"], None),
            (&["limit=5, remaining=, reset="], None),
            (&["limit=5, remaining=0, reset=5", "limit=9, remaining=3, reset=600"], Some(5)),
            (&["limit=9, remaining=3, reset=600, limit=5, remaining=0, reset=5"], Some(5)),
        ] {
            let fields: Vec<_> = lines.iter().map(|line| ("ratelimit", *line)).collect();
            assert_eq!(waited(200, &fields), expected, "{lines:?}");
        }
        let mut foreign = HeaderMap::new();
        let line = HeaderValue::from_bytes(b"\"caf\xe9\";r=5;t=1, \"b\";r=0;t=7").unwrap();
        foreign.insert("ratelimit", line);
        assert_eq!(exhausted(&foreign, 0), Some(Duration::from_secs(7)));
    }

    #[test]
    fn older_fields_are_read_too() {
        // Of the third draft.
        let drafts = [("ratelimit-limit", "10, 10;w=1"), ("ratelimit-remaining", "0"), ("ratelimit-reset", "50")];
        for (fields, expected) in [
            (&drafts[..], Some(50)),
            (&drafts[..2], None),
            (&[("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "30")], Some(30)),
            (&[("x-ratelimit-remaining", "0.0"), ("x-ratelimit-reset", "1.25")], Some(2)),
            (&[("ratelimit-remaining", "0"), ("ratelimit-reset", "7")], Some(7)),
            (&[("x-ratelimit-remaining", "1"), ("x-ratelimit-reset", "30")], None),
            (&[("x-ratelimit-remaining", "0.5"), ("x-ratelimit-reset", "30")], None),
            (&[("x-ratelimit-remaining", "0")], None),
            (&[("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "-5")], None),
            // Both: whichever is longer.
            (
                &[
                    ("x-ratelimit-remaining", "0"),
                    ("x-ratelimit-reset", "5"),
                    ("ratelimit-remaining", "0"),
                    ("ratelimit-reset", "60"),
                ],
                Some(60),
            ),
            (
                &[
                    ("ratelimit-remaining", "4"),
                    ("ratelimit-remaining", "0"),
                    ("ratelimit-reset", "600"),
                    ("ratelimit-reset", "6"),
                ],
                Some(6),
            ),
            (&[("x-ratelimit-remaining", "4, 0"), ("x-ratelimit-reset", "600, 6")], Some(6)),
            (&[("x-ratelimit-remaining", "0,4"), ("x-ratelimit-reset", "6.5 ,600")], Some(7)),
            (&[("ratelimit-remaining", "0, 0"), ("ratelimit-reset", "5, 50"), ("ratelimit-reset", "500")], Some(50)),
        ] {
            assert_eq!(waited(200, fields), expected, "{fields:?}");
        }
        // Timestamps are of the other side's clock.
        let date = |text| ("date", text);
        let reset =
            |text| [date("Thu, 26 Nov 2026 12:00:00 GMT"), ("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", text)];
        for (text, expected) in
            [("1795694500", 100), ("1795694500.4", 101), ("1795694500000", 100), ("1795694000", 0), ("1200000000", 0)]
        {
            assert_eq!(waited(200, &reset(text)), Some(expected), "{text}");
        }
        let ours = headers(&[("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "30")]);
        let (mut response, ()) = http::Response::new(()).into_parts();
        response.headers = ours;
        response.extensions.insert(Added { lines: 0, older: true });
        assert_eq!(asked_for(&response), None);
    }
}
