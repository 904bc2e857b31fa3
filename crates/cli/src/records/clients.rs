//! The address by which a line's client counts, found as the middleware finds it.

use std::net::IpAddr;

use tollgate::middleware::ClientAddress;
use tollgate::rules::Attributes;

use super::field::{quoted, unexpected};
use super::place::Place;

/// Where the client's address is.
#[derive(Clone, Debug, Default)]
pub(crate) struct Clients {
    /// The field that has it, if it isn't where the format has it.
    pub(super) field: Option<Place>,
    /// The trusted proxies; `None` if the nearest proxy's entry counts.
    proxies: Option<ClientAddress>,
}

impl Clients {
    pub(crate) fn new(field: Option<Place>, proxies: &[String]) -> Result<Self, String> {
        let behind = (!proxies.is_empty()).then(|| ClientAddress::behind(proxies)).transpose();
        Ok(Self { field, proxies: behind.map_err(|error| error.to_string())? })
    }

    /// Whether proxies were named, but not the field in which they write addresses.
    pub(super) fn lack_a_field(&self) -> bool {
        self.proxies.is_some() && self.field.is_none()
    }

    /// The address by which a request counts, from the peer of its connection and the field's list of addresses, whose
    /// last entry the nearest proxy has written. `None` if the peer is a host's name, or there is none.
    pub(super) fn address(&self, peer: &[u8], forwarded: Option<&[u8]>) -> Result<Option<IpAddr>, String> {
        let (peer, forwarded) = match forwarded.filter(|list| !matches!(list.trim_ascii(), b"" | b"-")) {
            Some(list) => (read(peer), list),
            // The line has the list in place of the peer.
            None if peer.contains(&b',') => (None, peer),
            None if peer.iter().any(|byte| byte.is_ascii_whitespace() || *byte == b'"') => {
                return Err(unexpected("client address", "an address or a host's name", &quoted(peer)));
            }
            None => return Ok(read(peer)),
        };
        if let (Some(peer), Some(proxies)) = (peer, &self.proxies) {
            return proxies.of_header(peer, forwarded).map(Some).map_err(|error| error.to_string());
        }
        // The sender isn't known, or is taken for a proxy.
        let mut entries = forwarded.rsplitn(2, |byte| *byte == b',').map(<[u8]>::trim_ascii);
        let last = entries.next().unwrap_or_default();
        let nearest = read(last)
            .ok_or_else(|| unexpected("client address", "an address, or several with commas", &quoted(last)))?;
        let Some(proxies) = &self.proxies else { return Ok(Some(nearest)) };
        proxies.of_header(nearest, entries.next().unwrap_or_default()).map(Some).map_err(|error| error.to_string())
    }
}

/// The address in a text with or without a port, as the middleware reads it; also IPv6 with a port and no brackets, as
/// AWS's balancers, HAProxy and nginx's `$remote_addr:$remote_port` write it, unless it looks like another address.
pub(super) fn read(text: &[u8]) -> Option<IpAddr> {
    ClientAddress::read(text).or_else(|| {
        let (before, port) = split_port(text)?;
        let is_port = !port.is_empty() && port.iter().all(u8::is_ascii_digit);
        str::from_utf8(before).ok().filter(|_| is_port)?.parse().ok().map(|address: IpAddr| address.to_canonical())
    })
}

/// The text before the last colon: the client, in logs that write a port after every client.
pub(super) fn without_port(text: &[u8]) -> Option<&[u8]> {
    split_port(text).map(|(before, _)| before)
}

fn split_port(text: &[u8]) -> Option<(&[u8], &[u8])> {
    text.iter().rposition(|byte| *byte == b':').map(|at| (&text[..at], &text[at + 1..]))
}

/// This address as rules by `ip` count it.
pub(crate) fn counted(address: IpAddr) -> Vec<u8> {
    /// Unless a rule sets another `ipv6_prefix`.
    const IPV6_PREFIX: u8 = 64;
    Attributes::new().ip(address).counted("ip", IPV6_PREFIX).unwrap_or_default().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(
        field: Option<&str>,
        proxies: &[&str],
        peer: &str,
        list: Option<&str>,
    ) -> Result<Option<String>, String> {
        let proxies: Vec<_> = proxies.iter().map(|text| (*text).to_owned()).collect();
        let clients = Clients::new(field.map(|field| field.parse().unwrap()), &proxies).unwrap();
        let found = clients.address(peer.as_bytes(), list.map(str::as_bytes))?;
        Ok(found.map(|address| address.to_string()))
    }

    #[test]
    fn the_address_is_the_one_that_the_middleware_counts_by() {
        let list = Some("192.0.2.9, 198.51.100.7, 10.0.0.2");
        let of = |proxies: &[&str], peer, list| address(Some("xff"), proxies, peer, list).unwrap().unwrap();
        assert_eq!(of(&[], "10.0.0.1", list), "10.0.0.2", "what the nearest proxy saw");
        assert_eq!(of(&["10.0.0.0/8"], "10.0.0.1", list), "198.51.100.7");
        assert_eq!(of(&["10.0.0.0/8"], "192.0.2.1:443", list), "192.0.2.1", "no proxy sent it");
        assert_eq!(of(&["10.0.0.0/8"], "unix:", list), "198.51.100.7");
        assert_eq!(of(&["10.0.0.0/8"], "10.0.0.1", Some("-")), "10.0.0.1", "no header");
        assert_eq!(of(&[], "::ffff:10.0.0.1", Some("")), "10.0.0.1");
        assert_eq!(of(&[], "a, [2001:db8::1]:80", None), "2001:db8::1", "a list as first field");
        assert_eq!(of(&["2001:db8::1"], "192.0.2.5, 2001:db8::1", None), "192.0.2.5");
        assert_eq!(of(&[], "2001:db8:1:2:3:4:5:6:50718", None), "2001:db8:1:2:3:4:5:6", "a port without brackets");
        assert_eq!(of(&[], "2001:db8::1:2:50718", None), "2001:db8::1:2");
        assert_eq!(of(&[], "10.0.0.1", Some("192.0.2.9, 2001:db8::1:2:50718")), "2001:db8::1:2");
        assert_eq!(address(None, &[], "host.example", None), Ok(None));
        assert_eq!(address(None, &[], "host.example:50718", None), Ok(None));
        let agent = address(None, &[], "Mozilla/5.0 (X11)", None).unwrap_err();
        assert_eq!(agent, "client address: expected an address or a host's name, got \"Mozilla/5.0 (X11)\"");
        let unreadable = address(Some("xff"), &[], "10.0.0.1", Some("unknown")).unwrap_err();
        assert_eq!(unreadable, "client address: expected an address, or several with commas, got \"unknown\"");
        let unreadable = address(Some("xff"), &["10.0.0.1"], "10.0.0.1", Some("unknown")).unwrap_err();
        assert!(unreadable.contains("expected an address from the proxy 10.0.0.1, got \"unknown\""), "{unreadable}");
        assert!(Clients::new(None, &["10.0.0.1/8".to_owned()]).unwrap_err().contains("10.0.0.1/8"));
    }
}
