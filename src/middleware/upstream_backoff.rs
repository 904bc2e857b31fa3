//! Pauses outgoing calls when the other side says that it takes no more.

use std::borrow::Cow;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use http::StatusCode;
use http::header::{HeaderMap, HeaderValue, RETRY_AFTER};
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
    let request = Request::from(request).deadline(DEADLINE.min(limiter.deadline));
    // Without a cost, nothing but a block makes it wait. If Redis is unreachable, skip: the next response will repeat
    // it.
    let Ok(now) = limiter.peek(rule, request.cost(0)).await else { return };
    let is_longer = now.blocked && now.retry_after.duration().is_some_and(|left| left >= time);
    if !is_longer && let Err(error) = limiter.block(rule, request, time).await {
        telemetry::upstream_backoff_failed(&error);
    }
}

/// How long the other side asks for a pause. Fields from our own layers aren't its word.
fn asked_for(response: &Parts) -> Option<Duration> {
    if response.extensions.get::<Verdict>().is_some() || response.extensions.get::<Error>().is_some() {
        return None;
    }
    let added = response.extensions.get::<Added>().copied().unwrap_or_default();
    let headers = &response.headers;
    let older = exhausted_by_older_fields(headers, !added.older);
    [retry_after(response.status, headers), exhausted(headers, added.lines), older].into_iter().flatten().max()
}

/// A field's value, with whatever isn't text replaced: one item of a list that can't be read doesn't hide the others.
fn text(value: &HeaderValue) -> Cow<'_, str> {
    String::from_utf8_lossy(value.as_bytes())
}

/// For a response that refuses: seconds, or a date.
fn retry_after(status: StatusCode, headers: &HeaderMap) -> Option<Duration> {
    let refusals = [StatusCode::FORBIDDEN, StatusCode::TOO_MANY_REQUESTS, StatusCode::SERVICE_UNAVAILABLE];
    if !refusals.contains(&status) {
        return None;
    }
    let text = text(headers.get(RETRY_AFTER)?);
    let text = text.trim();
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        return Some(Duration::from_secs(text.parse().unwrap_or(u64::MAX)));
    }
    let date = httpdate::parse_http_date(text).ok()?;
    Some(date.duration_since(SystemTime::now()).unwrap_or_default())
}

/// For `RateLimit: "a";r=0;t=30, "b";r=7`: the longest `t` among items with nothing remaining, except in this many
/// lines at the end.
fn exhausted(headers: &HeaderMap, added: usize) -> Option<Duration> {
    let lines = headers.get_all("ratelimit").iter().rev().skip(added);
    let lines: Vec<_> = lines.map(text).collect();
    let empty = lines.iter().flat_map(|line| items(line)).filter(|item| parameter(item, "r") == Some(0));
    empty.filter_map(|item| parameter(item, "t")).max().map(Duration::from_secs)
}

/// For `X-RateLimit-Remaining: 0` and `X-RateLimit-Reset: 30`, or without the `X-`: seconds from now or, as with GitHub
/// and others, seconds or milliseconds since the epoch.
fn exhausted_by_older_fields(headers: &HeaderMap, with_x: bool) -> Option<Duration> {
    let number = |name: &str| text(headers.get(name)?).trim().parse::<u64>().ok();
    let of = |remaining: &str, reset: &str| number(reset).filter(|_| number(remaining) == Some(0));
    let with_x = of("x-ratelimit-remaining", "x-ratelimit-reset").filter(|_| with_x);
    let reset = with_x.or(of("ratelimit-remaining", "ratelimit-reset"))?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
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

/// A parameter that is a whole number, from the text after the item's quoted name.
fn parameter(item: &str, name: &str) -> Option<u64> {
    let parameters = after_the_name(item);
    parameters.split(';').skip(1).find_map(|parameter| {
        let (key, value) = parameter.split_once('=')?;
        (key.trim() == name).then(|| value.trim().parse().ok())?
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

    #[test]
    fn the_wait_that_is_asked_for_is_read() {
        let refused = StatusCode::TOO_MANY_REQUESTS;
        for (text, expected) in
            [("30", Some(30)), (" 7 ", Some(7)), ("soon", None), ("-1", None), ("+5", None), ("", None)]
        {
            let told = headers(&[("retry-after", text)]);
            assert_eq!(retry_after(refused, &told), expected.map(Duration::from_secs), "{text}");
            assert_eq!(retry_after(StatusCode::OK, &told), None);
        }
        let past = headers(&[("retry-after", "Sun, 06 Nov 1994 08:49:37 GMT")]);
        assert_eq!(retry_after(refused, &past), Some(Duration::ZERO));
        for old in ["Sunday, 06-Nov-94 08:49:37 GMT", "Sun Nov  6 08:49:37 1994"] {
            let told = headers(&[("retry-after", old)]);
            assert_eq!(retry_after(refused, &told), Some(Duration::ZERO), "{old}");
        }
        let endless = headers(&[("retry-after", "99999999999999999999")]);
        assert_eq!(retry_after(refused, &endless), Some(Duration::from_secs(u64::MAX)));
        let future = headers(&[("retry-after", "Sat, 06 Nov 2094 08:49:37 GMT")]);
        assert!(retry_after(refused, &future).is_some_and(|wait| wait > Duration::from_secs(86_400)));
    }

    #[test]
    fn the_longest_wait_of_what_is_used_up_counts() {
        for (lines, expected) in [
            (&["\"a\";r=0;t=30"][..], Some(30)),
            (&["\"a\";r=1;t=30"], None),
            (&["\"a\";r=0;t=5, \"b\";t=60;r=0,\"c\";r=9;t=900"], Some(60)),
            (&["\"a\";r=0;t=5", "\"b\";r=0;t=7"], Some(7)),
            (&["\"a,\\\";r=0;t=9\";r=3;t=30"], None),
            (&["\"a\";r=0"], None),
            (&["\"a\";r=0;t=30;reason=\"x;t=9\""], Some(30)),
            (&["a;r=0;t=x"], None),
            (&[""], None),
        ] {
            let fields: Vec<_> = lines.iter().map(|line| ("ratelimit", *line)).collect();
            assert_eq!(exhausted(&headers(&fields), 0), expected.map(Duration::from_secs), "{lines:?}");
        }
        let mut foreign = HeaderMap::new();
        let line = HeaderValue::from_bytes(b"\"caf\xe9\";r=5;t=1, \"b\";r=0;t=7").unwrap();
        foreign.insert("ratelimit", line);
        assert_eq!(exhausted(&foreign, 0), Some(Duration::from_secs(7)));
    }

    #[test]
    fn older_fields_are_read_too() {
        let soon = (SystemTime::now() + Duration::from_secs(100)).duration_since(UNIX_EPOCH).unwrap();
        let soon = soon.as_secs().to_string();
        for (fields, expected) in [
            (&[("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "30")][..], Some(30)),
            (&[("ratelimit-remaining", "0"), ("ratelimit-reset", "7")], Some(7)),
            (&[("x-ratelimit-remaining", "1"), ("x-ratelimit-reset", "30")], None),
            (&[("x-ratelimit-remaining", "0")], None),
            (&[("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "1200000000")], Some(0)),
            (&[("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "-5")], None),
        ] {
            assert_eq!(
                exhausted_by_older_fields(&headers(fields), true),
                expected.map(Duration::from_secs),
                "{fields:?}"
            );
        }
        let mut fields = headers(&[("x-ratelimit-remaining", "0")]);
        fields.insert("x-ratelimit-reset", HeaderValue::from_str(&soon).unwrap());
        let wait = exhausted_by_older_fields(&fields, true).unwrap().as_secs();
        assert!((95..=100).contains(&wait), "{wait}");
        fields.insert("x-ratelimit-reset", HeaderValue::from_str(&format!("{soon}000")).unwrap());
        let wait = exhausted_by_older_fields(&fields, true).unwrap().as_secs();
        assert!((95..=100).contains(&wait), "{wait}");
        assert_eq!(exhausted_by_older_fields(&fields, false), None);
    }
}
