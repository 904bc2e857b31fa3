//! Addresses as messages show them.

use super::spelling::has_a_raw_password;

/// An address's scheme, hosts and ports, as far as they can't be part of a password.
pub(super) fn without_password(url: &str) -> String {
    let (scheme, rest) = url.split_once("://").map_or(("", url), |(scheme, rest)| (scheme, rest));
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    let (secret, shown) = match authority.rsplit_once('@') {
        _ if has_a_raw_password(url) => ("", "***"),
        Some((_, hosts)) => ("***@", hosts),
        // A password may extend further than it seems.
        None if rest.contains('@') => ("", "***"),
        None => ("", authority),
    };
    let plain = |text: &str| text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._".contains(&byte));
    let clear = |host: &str| {
        let (host, port) = host.split_once(':').unwrap_or((host, ""));
        plain(host) && port.bytes().all(|byte| byte.is_ascii_digit()) && port.len() <= 5
    };
    let slashes = if scheme.is_empty() { "" } else { "://" };
    let scheme = if scheme.contains('@') { "***" } else { scheme };
    format!("{scheme}{slashes}{secret}{}", if shown.split(',').all(clear) { shown } else { "***" })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Redis;

    #[test]
    fn no_part_of_an_address_that_may_be_a_password_is_shown() {
        for (url, shown) in [
            ("http://user:hunter2@example.com:99/0?x=hunter2", "http://***@example.com:99"),
            ("redis://:hunter2", "redis://***"),
            ("redis://user:hunter2", "redis://***"),
            ("redis://u:hunter2%40h", "redis://***"),
            ("redis:/hunter2@h", "***"),
            ("redis-sentinel://h:1/?sentinel-password=a@hunter2", "redis-sentinel://***"),
            ("redis-cluster://h:1,g:2/hunter2@x", "redis-cluster://***"),
            ("redis-cluster://u:hunter2@h:1,g:2/3", "redis-cluster://***@h:1,g:2"),
            ("redis-cluster://u:hunter2,h", "redis-cluster://***"),
            ("redis-sentinel://h/main?sentinel-user=u&sentinel-password=1?hunter2", "redis-sentinel://h"),
            ("redis-sentinel://h/main?sentinel-passwrd=hunter2", "redis-sentinel://h"),
            ("rediss://localhost:6379/x", "rediss://localhost:6379"),
            ("", ""),
        ] {
            assert_eq!(without_password(url), shown);
            let error = Redis::open(url).unwrap_err();
            let source = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
            assert!(!format!("{error} {source}").contains("hunter2"), "{url}");
        }
    }
}
