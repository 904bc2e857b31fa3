//! Access logs whose lines are words: by the given places, or in the formats that some servers and services document.

use std::borrow::Cow;

use super::access;
use super::clients;
use super::places::{DURATIONS, Places, Unit, micros_with_unit};
use super::time;
use super::words::{Words, said};

/// The formats of Envoy, Istio, AWS's balancers and S3, Heroku's router, and nginx with `$time_iso8601` first. Within a
/// mesh, Istio's lines have no forwarded address, only the connection's, in a later field.
const KNOWN: [(&str, Option<i16>); 8] = [
    ("start=1,request=2,status=3,duration=7:ms,ip=9", None),
    ("start=1,request=2,status=3,duration=10:ms,ip=12", Some(20)),
    (AWS[0], None),
    (AWS[1], None),
    ("start=3,ip=4,request=9,status=10,duration=14:ms", None),
    ("time=1,ip=fwd,method=method,path=path,status=status,duration=service", None),
    ("time=1,ip=2,request=3", None),
    ("time=1,ip=2,user=4,request=5", None),
];

/// AWS's balancers write a port after every client, and no brackets around addresses that have colons themselves.
const AWS: [&str; 2] =
    ["time=2,ip=4,request=13,status=9,duration=6+7+8:s", "start=1,ip=3,request=12,status=8,duration=5+6+7:s"];

/// The places of a line in one of these formats.
pub(super) fn known(text: &[u8]) -> Option<Places> {
    let words = Words::of(text);
    let known = KNOWN.iter().filter_map(|(places, peer)| {
        let found = places.parse::<Places>().ok()?.or_peer(*peer);
        Some(if AWS.contains(places) { found.with_ports() } else { found })
    });
    known.into_iter().find(|places| fits(places, &words))
}

fn fits(places: &Places, words: &Words<'_>) -> bool {
    let Ok(Some(access)) = places.read(words, None) else { return false };
    let last = access.host.rsplit(|byte| *byte == b',').next().unwrap_or_default().trim_ascii();
    let is_request = |path: &[u8]| path.starts_with(b"/") || path == b"*";
    access.path.as_deref().is_some_and(is_request) && (last.is_empty() || clients::read(last).is_some())
}

/// Whether the line isn't about a request: in Heroku's log the application's own, in Envoy's a message about itself, as
/// in `[time][1][info][main] [file:line]`.
pub(super) fn is_of_another(words: &Words<'_>) -> bool {
    let source = words.all().get(1).copied().unwrap_or_default();
    let is_envoys = words.all().first().is_some_and(|word| word.windows(2).any(|bytes| bytes == b"]["));
    is_envoys || (matches!(source, [b'a'..=b'z', .., b']', b':']) && !source.starts_with(b"heroku[router]"))
}

/// A suggestion for --fields of such a line, if its words allow one.
pub(super) fn suggested(text: &[u8]) -> Option<String> {
    let words = Words::of(text);
    let place = |fits: &dyn Fn(&[u8]) -> bool| {
        words.all().iter().enumerate().find_map(|(at, word)| match named(word) {
            Some((name, value)) => fits(&value).then_some(name),
            None => fits(&said(word)).then(|| (at + 1).to_string()),
        })
    };
    let time = place(&time::is_one)?;
    let ip = place(&|word| word.len() > 4 && clients::read(word).is_some())?;
    let request = place(&|word| word.contains(&b' ') && access::path(word).is_some_and(|path| path.starts_with(b"/")));
    let method = place(&|word| matches!(word, b"GET" | b"HEAD" | b"POST" | b"PUT" | b"DELETE" | b"PATCH" | b"OPTIONS"));
    let path = place(&|word| word.starts_with(b"/"));
    let of_request = match (request, method.zip(path)) {
        (Some(request), _) => format!(",request={request}"),
        (None, Some((method, path))) => format!(",method={method},path={path}"),
        (None, None) => String::new(),
    };
    let is_duration = |name: &str, value: &[u8]| {
        let text = String::from_utf8_lossy(value);
        let has_unit =
            micros_with_unit(&text).is_some() || (text.parse::<f64>().is_ok() && Unit::of_field(name).is_some());
        has_unit && DURATIONS.iter().any(|part| name.to_ascii_lowercase().contains(part))
    };
    let mut named = words.all().iter().filter_map(|word| named(word));
    let duration = named.find(|(name, value)| is_duration(name, value));
    let duration = duration.map(|(name, _)| format!(",duration={name}")).unwrap_or_default();
    Some(format!("time={time},ip={ip}{of_request}{duration}"))
}

/// The parts of `NAME=value`.
fn named(word: &[u8]) -> Option<(String, Cow<'_, [u8]>)> {
    let equals = word.iter().position(|byte| *byte == b'=').filter(|at| *at > 0)?;
    let (name, value) = (&word[..equals], &word[equals + 1..]);
    let is_name = name.iter().all(|byte| byte.is_ascii_alphanumeric() || b"_-.".contains(byte));
    is_name.then(|| (String::from_utf8_lossy(name).into_owned(), said(value)))
}
