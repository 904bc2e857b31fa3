//! A host in the one spelling by which it is counted.

use http::header::HOST;
use http::request::Parts;
use url::Host;

use super::side::{Side, only, original_uri};
use crate::error::{Error, Kind};

/// A name has at most 253 characters, each of which may take several bytes before it is encoded.
const LONGEST: usize = 1024;

/// A host, alone or with a port, in the one spelling by which it can be counted: in lower case, without the final dot
/// and the port, international names in their ASCII form, and addresses as they are usually written.
/// [`RateLimitLayer::header`](super::RateLimitLayer::header) reads the header `Host` so by itself.
///
/// Ports are left out, since most servers answer alike whichever port the header names.
///
/// # Errors
///
/// Text that is no host.
///
/// ```
/// use tollgate::middleware::normalised_host;
///
/// for spelling in ["shop.example", "Shop.EXAMPLE.", "shop.example:443"] {
///     assert_eq!(normalised_host(spelling)?, "shop.example");
/// }
/// # Ok::<(), tollgate::Error>(())
/// ```
pub fn normalised_host(host: &str) -> Result<String, Error> {
    read(host).ok_or_else(|| {
        let shown: String = host.chars().take(64).collect();
        Error::new(Kind::Input, format!("host: expected one such as shop.example or 192.0.2.1, got {shown:?}"))
    })
}

fn read(text: &str) -> Option<String> {
    let text = Some(text).filter(|text| text.len() <= LONGEST)?;
    // The colons of an IPv6 address are within brackets.
    let port = text.rfind(':').filter(|at| !text[*at..].contains(']'));
    let (name, port) = port.map_or((text, ""), |at| (&text[..at], &text[at + 1..]));
    if !port.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    match Host::parse(name).ok()? {
        Host::Domain(name) => {
            let name = name.strip_suffix('.').unwrap_or(&name);
            (!name.split('.').any(str::is_empty)).then(|| name.to_owned())
        }
        Host::Ipv4(address) => Some(address.to_string()),
        Host::Ipv6(address) => {
            Some(address.to_ipv4_mapped().map_or_else(|| format!("[{address}]"), |address| address.to_string()))
        }
    }
}

/// The host that a request is for: from its target, where HTTP/2 and requests to a proxy have it, or from its header.
///
/// # Errors
///
/// Text that is no host; two headers; and, in a request received, two hosts, of which servers may take either.
pub(super) fn of_request(parts: &Parts, side: Side) -> Result<Option<Vec<u8>>, Error> {
    let uri = match side {
        Side::Incoming => original_uri(parts).unwrap_or(&parts.uri),
        Side::Outgoing => &parts.uri,
    };
    let target = uri.host().filter(|host| !host.is_empty()).map(normalised_host).transpose()?;
    if target.is_some() && side == Side::Outgoing {
        return Ok(target.map(String::into_bytes));
    }
    let text = |value: Vec<u8>| String::from_utf8_lossy(&value).into_owned();
    let header = only(parts, &HOST)?.filter(|value| !value.is_empty()).map(text);
    let header = header.as_deref().map(normalised_host).transpose()?;
    match (&target, &header) {
        (Some(target), Some(header)) if target != header => {
            let why = format!("header host: expected {target}, the host of the request's target, got {header}");
            Err(Error::new(Kind::Input, why))
        }
        _ => Ok(target.or(header).map(String::into_bytes)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_spellings_of_a_host_are_one() {
        for (expected, spellings) in [
            (
                "victim.example",
                &[
                    "victim.example",
                    "Victim.Example",
                    "VICTIM.EXAMPLE.",
                    "victim.example:80",
                    "victim.example:443",
                    "victim.example.:8443",
                    "victim.example:",
                    "victim%2eexample",
                    "victim\u{3002}example",
                    "\u{ff36}ictim.example",
                ][..],
            ),
            ("xn--bcher-kva.example", &["b\u{fc}cher.example", "B\u{dc}CHER.example.", "XN--bcher-KVA.example:80"]),
            ("127.0.0.1", &["127.0.0.1", "127.1", "0x7f.0.0.1:80", "2130706433", "127.0.0.1.", "[::ffff:127.0.0.1]"]),
            ("[2001:db8::1]", &["[2001:db8::1]", "[2001:DB8:0:0::1]:443", "[2001:0db8::0001]:"]),
            ("localhost", &["localhost", "LOCALHOST:3000"]),
            ("my_service", &["my_service"]),
        ] {
            for spelling in spellings {
                assert_eq!(normalised_host(spelling).expect(spelling), expected, "{spelling}");
                let again = normalised_host(expected).expect(expected);
                assert_eq!(again, expected);
            }
        }
    }

    #[test]
    fn what_is_no_host_is_refused_by_one_line() {
        let long = "a".repeat(1_000_000);
        let bad = [
            "",
            ".",
            "..",
            "a..b",
            "a..",
            ".a",
            ":80",
            "a:b",
            "a:80:80",
            "user@host",
            "a b",
            "a/b",
            "a,b,\u{fffd}",
            "[::1",
            "::1",
            "[::1]x",
            "1.2.3.4.5",
            "256.256.256.256",
            "a\u{0}b",
            &long,
        ];
        for text in bad {
            let error = normalised_host(text).expect_err(text).to_string();
            assert!(error.starts_with("host: expected one such as shop.example or 192.0.2.1, got \""), "{error}");
            assert!(error.lines().count() == 1 && error.len() < 400, "{error}");
        }
    }
}
