//! A web server's access log, in Common Log Format
//! (`host ident user [time] "request" status bytes`) or Combined (`... "referer" "agent"`), or with the virtual host
//! before that, as Apache's vhost_combined has it.
//!
//! The text after the request is ignored, apart from a duration: real logs truncate or extend it.

use std::borrow::Cow;

use super::access::{self, Access, Time};
use super::clients;
use super::field::{self, quoted, unexpected};
use super::places::micros_with_unit;
use super::time::{self, Zone};

pub(super) fn parse(text: &[u8]) -> Result<Access<'_>, String> {
    let (head, t_us, rest) = at_its_time(text)?;
    let (host, user) = who(head).ok_or_else(|| unexpected("line", EXPECTED, &quoted(text)))?;
    let (request, after) =
        request(rest).ok_or_else(|| unexpected("request", "text between quotes", &quoted(rest.trim_ascii())))?;
    let traefiks = traefiks(after);
    Ok(Access {
        // nginx writes the time at which the request ended, Traefik the time at which it arrived.
        time: if traefiks.is_some() { Time::Began(t_us) } else { Time::Ended(t_us) },
        took: traefiks.or_else(|| took(after)),
        status: after.strip_prefix(b" ").map(|rest| word(rest).0).and_then(field::status),
        host: if host == b"-" { Cow::Borrowed(b"") } else { unescape(host) },
        user: Some(user).filter(|user| !matches!(user, &b"-" | &b"\"\"")).map(unescape),
        method: access::method(request).map(Cow::Borrowed),
        path: access::path(request).map(unescape),
        request: Cow::Borrowed(request),
    })
}

const EXPECTED: &str = "host ident user [time] \"request\" status bytes";

/// How long a request took, if its line ends as Traefik's: `7 "router@file" "http://10.0.0.9:80" 12ms`. Traefik doesn't
/// escape what a client sends, but this end follows all of that.
fn traefiks(after: &[u8]) -> Option<u64> {
    let mut words = after.rsplit(|byte| *byte == b' ');
    let took = words.next().filter(|word| word.ends_with(b"ms"))?;
    let are_quoted = [words.next()?, words.next()?].iter().all(|word| matches!(word, [b'"', .., b'"']));
    let is_number = |word: &[u8]| word == b"-" || (!word.is_empty() && word.iter().all(u8::is_ascii_digit));
    if !are_quoted || !is_number(words.next()?) {
        return None;
    }
    str::from_utf8(took).ok().and_then(micros_with_unit)
}

/// In microseconds: nginx's `$request_time`, which is what `request_time=` or `rt=` names, or else the first number
/// with three decimals; or a number with its unit, as Traefik's `12ms`. A client can't forge one, since what it sends
/// is in quotes.
pub(super) fn took(mut text: &[u8]) -> Option<u64> {
    let seconds = |word: &[u8]| field::micros(str::from_utf8(word).ok()?);
    let mut first = None;
    while !text.is_empty() {
        let (word, rest) = word(text);
        let named = [&b"request_time="[..], b"rt="].into_iter().find_map(|name| word.strip_prefix(name));
        if let Some(named) = named.and_then(|named| seconds(unquoted(named))) {
            return Some(named);
        }
        if first.is_none() && word.iter().rev().position(|byte| *byte == b'.') == Some(3) {
            first = seconds(word);
        } else if first.is_none() && word.ends_with(b"ms") {
            first = str::from_utf8(word).ok().and_then(micros_with_unit);
        }
        text = rest;
    }
    first
}

fn unquoted(text: &[u8]) -> &[u8] {
    text.strip_prefix(b"\"").and_then(|text| text.strip_suffix(b"\"")).unwrap_or(text)
}

/// The text up to the next space that isn't in quotes, and what follows the space.
fn word(text: &[u8]) -> (&[u8], &[u8]) {
    let (mut quoted, mut escaped) = (false, false);
    let end = text.iter().position(|byte| {
        quoted ^= *byte == b'"' && !escaped;
        escaped = *byte == b'\\' && !escaped;
        *byte == b' ' && !quoted
    });
    end.map_or((text, &[]), |end| (&text[..end], &text[end + 1..]))
}

/// The text before the time, the time in microseconds, and the text after it. A user's name may contain ` [`, so the
/// time is at the first bracket that a time and a request follow. No name contains a time, since a colon ends it.
fn at_its_time(text: &[u8]) -> Result<(&[u8], u64, &[u8]), String> {
    let mut first = None;
    for (at, _) in text.windows(2).enumerate().filter(|(_, bytes)| bytes == b" [") {
        let found = time(&text[at + 1..]).map(|(t_us, rest)| (&text[..at], t_us, rest));
        if matches!(found, Ok((_, _, [b' ', b'"', ..]))) {
            return found;
        }
        first.get_or_insert(found);
    }
    first.unwrap_or_else(|| Err(unexpected("line", EXPECTED, &quoted(text))))
}

/// Host and user, from the text before the time.
fn who(head: &[u8]) -> Option<(&[u8], &[u8])> {
    let (mut host, mut after) = host(head)?;
    let has_more = after.iter().filter(|byte| **byte == b' ').count() >= 2;
    // `v:80 h - -`: the host follows.
    if has_more
        && let Some((next, rest)) = self::host(after)
        && (is_address(next) || ends_with_port(host))
    {
        (host, after) = (next, rest);
    } else if has_more && !is_address(host) && !after.starts_with(b"- ") {
        (host, after) = prefixed(head).unwrap_or((host, after));
    }
    let (_ident, user) = split(after, b' ')?;
    Some((host, user))
}

/// The client and what follows, after a prefix by others: docker compose `web-1 | `, syslog
/// `Nov 26 17:27:31 host nginx: `, Kubernetes a time and `stdout F `. It is the first address before a `-`, or else the
/// last word before `- -`.
fn prefixed(head: &[u8]) -> Option<(&[u8], &[u8])> {
    /// The most words of such a prefix.
    const WORDS: usize = 16;
    let starts = head.iter().enumerate().filter(|(_, byte)| **byte == b' ').map(|(at, _)| at + 1);
    let mut places = starts.take(WORDS).filter_map(|at| host(&head[at..]));
    places.find(|(host, after)| is_address(host) && after.starts_with(b"- ")).or_else(|| {
        let named = head.strip_suffix(b" - -")?;
        let name = named.rsplit(|byte| *byte == b' ').next()?;
        Some((name, &head[named.len() + 1..]))
    })
}

fn is_address(host: &[u8]) -> bool {
    clients::read(last_of(host)).is_some()
}

/// The host, which may be a list in quotes or with spaces after its commas, and what follows.
fn host(text: &[u8]) -> Option<(&[u8], &[u8])> {
    if let Some(quoted) = text.strip_prefix(b"\"") {
        let (list, rest) = split(quoted, b'"')?;
        return Some((list, rest.strip_prefix(b" ")?));
    }
    let spaces = text.iter().enumerate().filter(|(_, byte)| **byte == b' ').map(|(at, _)| at);
    let end = spaces.into_iter().find(|at| !text[..*at].ends_with(b","))?;
    Some((&text[..end], &text[end + 1..]))
}

fn last_of(list: &[u8]) -> &[u8] {
    list.rsplit(|byte| *byte == b',').next().unwrap_or_default().trim_ascii()
}

fn ends_with_port(name: &[u8]) -> bool {
    let port = name.iter().rposition(|byte| *byte == b':').map(|at| &name[at + 1..]);
    port.is_some_and(|port| !port.is_empty() && port.iter().all(u8::is_ascii_digit)) && clients::read(name).is_none()
}

/// `[17/May/2015:10:05:03 +0000]`, or nginx's `[2015-05-17T10:05:03+00:00]`, in microseconds, and the text after it.
fn time(text: &[u8]) -> Result<(u64, &[u8]), String> {
    const EXPECTED: &str = "[dd/Mon/yyyy:hh:mm:ss +zzzz]";
    // No longer than a time can be: a line may have a great many brackets.
    let end = text.iter().take(64).position(|byte| *byte == b']');
    let (time, rest) = end
        .and_then(|end| Some((text[..end].strip_prefix(b"[")?, &text[end + 1..])))
        .ok_or_else(|| unexpected("time", EXPECTED, &quoted(text)))?;
    let found = str::from_utf8(time).ok().and_then(|text| time::common(text, Zone::Needed).or_else(|| time::iso(text)));
    let t_us = found.ok_or_else(|| unexpected("time", EXPECTED, &quoted(time)))??;
    Ok((t_us, rest))
}

/// The text between the quotes, with its escapes, and what follows them.
fn request(text: &[u8]) -> Option<(&[u8], &[u8])> {
    let text = text.strip_prefix(b" \"")?;
    let mut escaped = false;
    let end = text.iter().enumerate().position(|(i, byte)| {
        // If a server doesn't escape quotes, this still works where no space follows one.
        let closes = *byte == b'"' && !escaped && matches!(text.get(i + 1), None | Some(b' '));
        escaped = *byte == b'\\' && !escaped;
        closes
    })?;
    Some((text.get(..end)?, text.get(end + 1..)?))
}

/// The bytes before the first `at`, and those after it.
fn split(text: &[u8], at: u8) -> Option<(&[u8], &[u8])> {
    let (before, from) = text.split_at(text.iter().position(|byte| *byte == at)?);
    Some((before, from.get(1..)?))
}

/// The bytes that were sent: Apache writes a quote as `\"` and nginx as `\x22`, and both must be one key.
pub(super) fn unescape(text: &[u8]) -> Cow<'_, [u8]> {
    if !text.contains(&b'\\') {
        return Cow::Borrowed(text);
    }
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text;
    while let [byte, tail @ ..] = rest {
        let (byte, tail) = match rest {
            [b'\\', b'x', high, low, tail @ ..] if high.is_ascii_hexdigit() && low.is_ascii_hexdigit() => {
                (hex(*high) << 4 | hex(*low), tail)
            }
            [b'\\', quoted @ (b'"' | b'\\'), tail @ ..] => (*quoted, tail),
            _ => (*byte, tail),
        };
        out.push(byte);
        rest = tail;
    }
    out.into()
}

/// The value of a hexadecimal digit.
fn hex(digit: u8) -> u8 {
    match digit {
        b'0'..=b'9' => digit - b'0',
        _ => (digit | 0x20).wrapping_sub(b'a').wrapping_add(10),
    }
}

#[cfg(test)]
mod tests {
    use crate::records::clients::Clients;
    use crate::records::{Identity, KeyField, Permits, Record};
    use tollgate::Operation;

    /// 17 May 2015, 10:05:03 UTC.
    const T_US: u64 = 1_431_857_103_000_000;
    const COMBINED: &str = r#"1.2.3.4 - ann [17/May/2015:10:05:03 +0000] "GET /a/b?c=d HTTP/1.1" 200 203 "http://x/" "Mozilla/5.0 (\"x\")""#;

    fn parse(line: u64, text: &[u8], about: Identity) -> Result<Record, String> {
        super::parse(text)?.record(line, about, &Clients::default(), None)
    }

    fn key(text: &str, by: KeyField) -> Result<String, String> {
        parse(1, text.as_bytes(), Identity::Key(by)).map(|record| String::from_utf8_lossy(&record.key).into_owned())
    }

    fn requesting(request: &str) -> String {
        format!(r#"::1 - - [17/May/2015:10:05:03 +0000] "{request}" 400 0"#)
    }

    #[test]
    fn any_of_its_fields_can_be_the_key() {
        let record = parse(9, COMBINED.as_bytes(), Identity::Key(KeyField::Ip)).unwrap();
        let want = Record {
            line: 9,
            t_us: T_US,
            op: Operation::Acquire,
            key: b"1.2.3.4".to_vec(),
            cost: None,
            id: None,
            length: None,
            permits: Permits::Unknown,
            status: Some(200),
            attributes: Vec::new(),
        };
        assert_eq!(record, want);
        assert_eq!(key(COMBINED, KeyField::Path).unwrap(), "/a/b");
        assert_eq!(key(COMBINED, KeyField::Method).unwrap(), "GET");
        assert_eq!(key(COMBINED, KeyField::User).unwrap(), "ann");
    }

    #[test]
    fn what_follows_the_request_does_not_matter() {
        let head = r#"h - - [17/May/2015:10:05:03 +0000] "GET / HTTP/1.1""#;
        for tail in ["", " 200 -", r#" 200 5 "-" "cut off"#, r#" 200 5 "-" "agent" 0.003 "more""#] {
            assert_eq!(key(&format!("{head}{tail}"), KeyField::Path).unwrap(), "/");
        }
        let line = [head.as_bytes(), b" 200 5 \"-\" \"\xe4\xf6\xff\""].concat();
        assert_eq!(parse(1, &line, Identity::Key(KeyField::Ip)).unwrap().key, b"h");
    }

    #[test]
    fn the_time_that_nginx_says_a_request_took_is_found_and_a_clients_text_is_not() {
        let head = r#"h - - [17/May/2015:10:05:03 +0000] "GET / HTTP/1.1" 200 5"#;
        for (tail, took) in [
            ("", None),
            (" 0.003", Some(3_000)),
            (r#" "-" "agent" 0.003"#, Some(3_000)),
            (r#" "-" "agent" 1.003 0.900"#, Some(1_003_000)),
            (r#" "-" "agent" 0.900 rt=1.003"#, Some(1_003_000)),
            (r#" "-" "agent" "10.0.0.1" request_time="1.003""#, Some(1_003_000)),
            (r#" "-" "a \" 0.003 \" rt=0.003" 3.21 1700000000.123"#, None),
            (r#" "-" "0.003" "rt=0.003""#, None),
            (r#" "-" "-" 7 "router@file" 12ms"#, Some(12_000)),
            (r#" "-" "agent" 1234"#, None),
            (r#" "-" "cut off 0.003"#, None),
        ] {
            let record = parse(1, format!("{head}{tail}").as_bytes(), Identity::Key(KeyField::Ip)).unwrap();
            let expected = match took {
                Some(took) => (T_US - took, Permits::Until(T_US)),
                None => (T_US, Permits::Unknown),
            };
            assert_eq!((record.t_us, record.permits), expected, "{tail}");
        }
    }

    #[test]
    fn traefiks_time_is_when_a_request_came_and_a_client_cannot_write_how_long_it_took() {
        let head = r#"h - - [17/May/2015:10:05:03 +0000] "GET / HTTP/1.1" 200 5"#;
        for (tail, took) in [
            (r#" "-" "curl" 7 "router@file" "http://10.0.0.9:80" 12ms"#, 12_000),
            (r#" "-" "-" - "-" "-" 0ms"#, 0),
            (r#" "-" "x" 99999ms "" 7 "router@file" "http://10.0.0.9:80" 12ms"#, 12_000),
            (r#" "-" "x" 7 "a" "b" 99999ms" 7 "router@file" "http://10.0.0.9:80" 12ms"#, 12_000),
        ] {
            let record = parse(1, format!("{head}{tail}").as_bytes(), Identity::Key(KeyField::Ip)).unwrap();
            assert_eq!((record.t_us, record.permits), (T_US, Permits::Until(T_US + took)), "{tail}");
        }
    }

    #[test]
    fn the_offset_counts() {
        let at = |time: &str| {
            parse(1, format!(r#"h - - [{time}] "-" 408 0"#).as_bytes(), Identity::Key(KeyField::Ip)).map(|r| r.t_us)
        };
        assert_eq!(at("17/May/2015:12:35:03 +0230"), Ok(T_US));
        assert_eq!(at("16/May/2015:22:05:03 -1200"), Ok(T_US));
        assert_eq!(at("01/Jan/1970:00:00:00 +0000"), Ok(0));
        assert_eq!(at("30/Jun/2015:23:59:60 +0000"), at("30/Jun/2015:23:59:59 +0000"), "a leap second");

        for time in ["31/Dec/1969:23:59:59 +0000", "01/Jan/1970:00:00:00 +0100", "01/Jan/2113:00:00:00 +0000"] {
            assert_eq!(at(time), Err(format!("time: expected a time from 1970 to 2112, got \"{time}\"")));
        }
        for time in [
            "",
            "31/Feb/2015:10:05:03 +0000",
            "17/May/2015:10:05:03",
            "17/May/2015:10:05:03 +9999999999",
            "17-May-2015:10:05:03 +0000",
            "2015-05-17",
            "17/May/2015:24:00:00 +0000",
        ] {
            assert_eq!(at(time), Err(format!("time: expected [dd/Mon/yyyy:hh:mm:ss +zzzz], got \"{time}\"")));
        }
    }

    #[test]
    fn only_the_field_that_counts_must_be_there() {
        for request in ["-", "", r"\x16\x03\x01", r#"\"\\"#, " / ", "/a b"] {
            let line = requesting(request);
            assert_eq!(key(&line, KeyField::Ip).unwrap(), "::/64");
            for (by, name) in [(KeyField::Method, "method"), (KeyField::Path, "path")] {
                let want = format!("no {name} on this line: the request is \"{request}\"");
                assert_eq!(key(&line, by), Err(want));
            }
            assert_eq!(key(&line, KeyField::User), Err("no user on this line".to_owned()));
        }
        for request in ["GET", "GET ", "GET ?a", "GET  HTTP/1.1"] {
            assert_eq!(key(&requesting(request), KeyField::Method).unwrap(), "GET");
            assert!(key(&requesting(request), KeyField::Path).is_err());
        }
    }

    #[test]
    fn escapes_are_the_bytes_they_stand_for() {
        for (request, want) in [
            (r#"GET /a\"b HTTP/1.1"#, "/a\"b"),
            (r"GET /a\x22b HTTP/1.1", "/a\"b"),
            (r#"GET /a\\" HTTP/1.1"#, r"/a\"),
            (r"GET /\xc3\xA9 HTTP/1.1", "/é"),
            (r"GET /a\\x22 HTTP/1.1", r"/a\x22"),
            (r"GET /a\q\x2 HTTP/1.1", r"/a\q\x2"),
            (r#"GET /a"b HTTP/1.1"#, "/a\"b"),
            ("GET /a", "/a"),
        ] {
            assert_eq!(key(&requesting(request), KeyField::Path).unwrap(), want, "{request}");
        }
    }

    #[test]
    fn the_client_stands_behind_a_virtual_host_and_is_the_last_of_a_list() {
        for (head, client, user) in [
            ("shop.example:443 192.0.2.1 - ann", "192.0.2.1", Some("ann")),
            ("shop.example:80 client.example - -", "client.example", None),
            ("10.0.0.5:80 2001:db8::7 - -", "2001:db8::/64", None),
            ("shop.example 192.0.2.1 - -", "192.0.2.1", None),
            ("shop.example:80 192.0.2.1, 10.0.0.1 - -", "10.0.0.1", None),
            ("192.0.2.1, 198.51.100.7 - ann", "198.51.100.7", Some("ann")),
            ("192.0.2.1,198.51.100.7 - -", "198.51.100.7", None),
            ("\"192.0.2.1, 198.51.100.7\" - -", "198.51.100.7", None),
            ("192.0.2.1 - Ann Smith", "192.0.2.1", Some("Ann Smith")),
            ("::ffff:192.0.2.1 - -", "192.0.2.1", None),
            ("[2001:db8::7]:4711 - -", "2001:db8::/64", None),
            ("192.0.2.1:4711 - -", "192.0.2.1", None),
            // After a prefix by others.
            ("Nov 26 17:27:31 host nginx: 192.0.2.1 - ann", "192.0.2.1", Some("ann")),
            ("Nov 26 17:27:31 10.0.0.5 nginx[12]: 192.0.2.1 - -", "192.0.2.1", None),
            ("<190>1 2026-11-26T17:27:31Z host nginx 12 - - 192.0.2.1 - -", "192.0.2.1", None),
            ("<190>1 2026-11-26T17:27:31Z 10.0.0.5 nginx - - - 192.0.2.1 - ann", "192.0.2.1", Some("ann")),
            ("web-1  | 192.0.2.1 - Ann Smith", "192.0.2.1", Some("Ann Smith")),
            ("web-1  | 192.0.2.1, 198.51.100.7 - -", "198.51.100.7", None),
            ("web-1  | client.example - -", "client.example", None),
            ("2026-11-26T17:27:31.123456789Z stdout F 2001:db8::7 - -", "2001:db8::/64", None),
            ("[pod/web-1/nginx] 192.0.2.1 - -", "192.0.2.1", None),
            // A client can choose any user's name.
            ("192.0.2.1 - x [y", "192.0.2.1", Some("x [y")),
            ("192.0.2.1 - x [17/May/2015", "192.0.2.1", Some("x [17/May/2015")),
            ("192.0.2.1 - 198.51.100.7 - x", "192.0.2.1", Some("198.51.100.7 - x")),
            ("192.0.2.1 - 198.51.100.7 - -", "192.0.2.1", Some("198.51.100.7 - -")),
            ("client.example - 198.51.100.7 - -", "client.example", Some("198.51.100.7 - -")),
            ("web-1 | 192.0.2.1 - 198.51.100.7 - -", "192.0.2.1", Some("198.51.100.7 - -")),
        ] {
            let line = format!("{head} [2015-05-17T10:05:03+00:00] \"GET / HTTP/1.1\" 200 1");
            assert_eq!(key(&line, KeyField::Ip).as_deref(), Ok(client), "{head}");
            assert_eq!(key(&line, KeyField::User).ok().as_deref(), user, "{head}");
            assert_eq!(parse(1, line.as_bytes(), Identity::Key(KeyField::Ip)).unwrap().t_us, T_US, "{head}");
        }
    }

    #[test]
    fn another_format_is_refused() {
        let expected = r#"line: expected host ident user [time] "request" status bytes, got "#;
        assert_eq!(key("hello world", KeyField::Ip), Err(format!("{expected}\"hello world\"")));
        for (line, want) in [
            ("h - - [17/May/2015:10:05:03 +0000", "time: expected ["),
            (
                "h - - [17/May/2015:10:05:03 +0000] \"GET /cut",
                "request: expected text between quotes, got \"\"GET /cut\"",
            ),
            ("h - - [17/May/2015:10:05:03 +0000] GET / 200", "request: expected text between quotes"),
            ("h - [17/May/2015:10:05:03 +0000] \"-\" 408 0", "line: expected host ident user [time] "),
            (" - - [17/May/2015:10:05:03 +0000] \"-\" 408 0", "no host on this line"),
        ] {
            let reason = key(line, KeyField::Ip).unwrap_err();
            assert!(reason.starts_with(want), "{line}: {reason}");
        }
    }
}
