//! Addresses, read and shown.

use deadpool_redis::redis::{ConnectionAddr, ConnectionInfo, IntoConnectionInfo};

use crate::error::{Error, Kind};

/// What an address says, to be sent to at once.
pub(super) fn address(url: &str) -> Result<ConnectionInfo, Error> {
    let malformed = |why: &str| {
        let expected = "expected redis[s]://[user:password@]host[:port][/db] or unix:///path/of.sock";
        Error::new(Kind::Input, format!("url: {expected}, got {:?}{why}", without_password(url)))
    };
    let for_tls = ["rediss:", "valkeys:"].iter().any(|scheme| url.starts_with(scheme));
    let lacking = for_tls && !cfg!(feature = "tls");
    let why = if lacking { ", which is TLS: this program was built without tollgate's feature \"tls\"" } else { "" };
    let info = url.into_connection_info().map_err(|_| malformed(why))?;
    if matches!(info.addr(), ConnectionAddr::TcpTls { insecure: true, .. }) {
        return Err(malformed(", whose #insecure would leave the server's certificate unchecked"));
    }
    let at_once = info.tcp_settings().clone().set_nodelay(true);
    Ok(info.set_tcp_settings(at_once))
}

pub(super) fn by_tls(info: &ConnectionInfo) -> bool {
    matches!(info.addr(), ConnectionAddr::TcpTls { .. })
}

/// The scheme, the host and the port of an address, so far as they can't be part of a password.
pub(super) fn without_password(url: &str) -> String {
    let (scheme, rest) = url.split_once("://").map_or(("", url), |(scheme, rest)| (scheme, rest));
    let (secret, shown) = rest.rsplit_once('@').map_or(("", rest), |(_, host)| ("***@", host));
    let shown = shown.split(['/', '?', '#']).next().unwrap_or_default();
    let (host, port) = shown.split_once(':').unwrap_or((shown, ""));
    let plain = |text: &str| text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._".contains(&byte));
    let clear = plain(host) && port.bytes().all(|byte| byte.is_ascii_digit()) && port.len() <= 5;
    let slashes = if scheme.is_empty() { "" } else { "://" };
    format!("{scheme}{slashes}{secret}{}", if clear { shown } else { "***" })
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
            ("redis:/hunter2@h", "***@h"),
            ("rediss://localhost:6379/x", "rediss://localhost:6379"),
            ("", ""),
        ] {
            assert_eq!(without_password(url), shown);
            assert!(!Redis::open(url).unwrap_err().to_string().contains("hunter2"), "{url}");
        }
    }

    #[cfg(not(feature = "tls"))]
    #[test]
    fn without_tls_its_addresses_name_what_is_missing() {
        for url in ["rediss://:hunter2@localhost", "valkeys://:hunter2@localhost"] {
            let error = Redis::open(url).unwrap_err();
            let message = error.to_string();
            assert!(error.is_input() && message.ends_with("without tollgate's feature \"tls\""), "{message}");
            assert!(!message.contains("hunter2"), "{message}");
        }
    }

    #[test]
    fn an_address_is_sent_to_at_once_by_tls_too() {
        let plain = address("redis://127.0.0.1").expect("an address");
        assert!(plain.tcp_settings().nodelay());
        #[cfg(feature = "tls")]
        {
            let secured = address("rediss://127.0.0.1").expect("an address");
            assert!(secured.tcp_settings().nodelay());
            assert!(crate::Tls::new().applied_to(secured).expect("an address").tcp_settings().nodelay());
        }
    }
}
