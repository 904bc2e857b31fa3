//! HAProxy's HTTP log (`option httplog`), with or without what syslog writes before it.
//!
//! `192.0.2.1:33317 [06/Feb/2009:12:14:14.655] http-in static/srv1 10/0/30/69/109 200 2750 ... "GET / HTTP/1.1"`

use std::borrow::Cow;

use super::access::{self, Access, Time};
use super::clients::{self, without_port};
use super::field::{self, quoted, unexpected};
use super::places::Unit;
use super::time::{self, Zone};
use super::words::Words;

const EXPECTED: &str = "client:port [time] frontend backend/server TR/Tw/Tc/Tr/Ta status ... \"request\"";

/// `None` if it is a message of HAProxy about something else.
pub(super) fn parse<'l>(words: &Words<'l>, text: &'l [u8]) -> Result<Option<Access<'l>>, String> {
    let words = words.all();
    // HAProxy writes a port after every address, and no brackets around those that have colons themselves.
    let client = |word| without_port(word).filter(|client| clients::read(client).is_some());
    let place = |(at, pair): (usize, &[&'l [u8]])| accepted(pair[1]).is_some().then_some((client(pair[0])?, at + 1));
    let Some((client, at)) = words.windows(2).enumerate().find_map(place) else {
        let is_its_own = text.windows(8).any(|bytes| bytes == b"haproxy[" || bytes == b"haproxy:");
        return if is_its_own { Ok(None) } else { Err(unexpected("line", EXPECTED, &quoted(text))) };
    };
    let began = accepted(words[at]).unwrap_or_else(|| Err(unexpected("time", EXPECTED, &quoted(words[at]))))?;
    // A TCP connection's line has three timers and no request, then counts of connections that look like timers.
    let slashes = |word: &[u8]| word.iter().filter(|byte| **byte == b'/').count();
    let mut after_time = words[at..].iter();
    let timers = after_time.find(|word| slashes(word) >= 2 && is_timers(word));
    let Some(timers) = timers.filter(|timers| slashes(timers) == 4) else { return Ok(None) };
    let status = after_time.next().and_then(|word| field::status(word));
    let request = words.iter().rev().find(|word| matches!(word, [b'"', .., b'"']));
    // HAProxy cuts its lines off, by default at 1024 bytes. A quote within a field would be escaped.
    let cut_off = || text.windows(2).position(|bytes| bytes == b" \"").map(|at| &text[at + 2..]);
    let request = request.map(|request| &request[1..request.len() - 1]).or_else(cut_off).unwrap_or_default();
    Ok(Some(Access {
        time: Time::Began(began),
        took: timers.rsplit(|byte| *byte == b'/').next().and_then(milliseconds),
        status,
        host: Cow::Borrowed(client),
        user: None,
        method: access::method(request).map(Cow::Borrowed),
        path: access::path(request).map(Cow::Borrowed),
        request: Cow::Borrowed(request),
    }))
}

fn accepted(word: &[u8]) -> Option<Result<u64, String>> {
    let text = word.strip_prefix(b"[")?.strip_suffix(b"]")?;
    time::common(str::from_utf8(text).ok()?, Zone::MayLack)
}

fn is_timers(word: &[u8]) -> bool {
    word.iter().all(|byte| byte.is_ascii_digit() || b"/+-".contains(byte))
}

/// `109`, or `+109` where the line was written before the end.
fn milliseconds(text: &[u8]) -> Option<u64> {
    Unit::Milliseconds.micros(str::from_utf8(text).ok()?.trim_start_matches('+').parse().ok()?)
}
