//! Holding back where the other side of an outgoing call says that it takes no more.

use std::time::Duration;

use http::StatusCode;
use http::header::{HeaderMap, RETRY_AFTER};
use http::response::Parts;
use jiff::Timestamp;
use jiff::fmt::rfc2822;

use crate::limiter::Limiter;
use crate::request::{OwnedRequest, Request};
use crate::rule::Rule;
use crate::telemetry;

/// Blocks the key for as long as a response asks to be left alone, at most so long, unless it is blocked for longer.
pub(super) async fn heed(limiter: &Limiter, rule: &Rule, request: &OwnedRequest, most: Duration, response: &Parts) {
    let asked = [retry_after(response.status, &response.headers), exhausted(&response.headers)];
    let Some(time) = asked.into_iter().flatten().max().map(|time| time.min(most)).filter(|time| !time.is_zero()) else {
        return;
    };
    let request = Request::from(request);
    // Redis away: the next response says it again.
    let Ok(now) = limiter.peek(rule, request).await else { return };
    let is_longer = now.blocked && now.retry_after.duration().is_some_and(|left| left >= time);
    if !is_longer && let Err(error) = limiter.block(rule, request, time).await {
        telemetry::unheeded(&error);
    }
}

/// Of a response that refuses: seconds, or a date.
fn retry_after(status: StatusCode, headers: &HeaderMap) -> Option<Duration> {
    if ![StatusCode::TOO_MANY_REQUESTS, StatusCode::SERVICE_UNAVAILABLE].contains(&status) {
        return None;
    }
    let text = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        return Some(Duration::from_secs(text.parse().unwrap_or(u64::MAX)));
    }
    let date = rfc2822::parse(text).ok()?.timestamp();
    Some(date.duration_since(Timestamp::now()).try_into().unwrap_or_default())
}

/// Of `RateLimit: "a";r=0;t=30, "b";r=7`: the longest `t` of those of which nothing remains.
fn exhausted(headers: &HeaderMap) -> Option<Duration> {
    let items = headers.get_all("ratelimit").iter().filter_map(|line| line.to_str().ok()).flat_map(items);
    let empty = items.filter(|item| parameter(item, "r") == Some(0));
    empty.filter_map(|item| parameter(item, "t")).max().map(Duration::from_secs)
}

/// The members of a list of structured fields: commas within quotes don't separate.
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

/// A parameter that is a whole number: what follows the item's name, which stands in quotes.
fn parameter(item: &str, name: &str) -> Option<u64> {
    let item = item.rsplit_once('"').map_or(item, |(_, parameters)| parameters);
    item.split(';').skip(1).find_map(|parameter| {
        let (key, value) = parameter.split_once('=')?;
        (key.trim() == name).then(|| value.trim().parse().ok())?
    })
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

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
            (&["a;r=0;t=x"], None),
            (&[""], None),
        ] {
            let fields: Vec<_> = lines.iter().map(|line| ("ratelimit", *line)).collect();
            assert_eq!(exhausted(&headers(&fields)), expected.map(Duration::from_secs), "{lines:?}");
        }
    }
}
