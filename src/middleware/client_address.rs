//! The client address that a request counts by: never one that the client may choose.

use std::net::{IpAddr, SocketAddr};

use http::header::{HeaderMap, HeaderName};
use http::request::Parts;
use ipnet::IpNet;

use crate::error::{Error, Kind};
use crate::rules;

/// Where a client's address comes from. By default from the connection; from a header only behind named proxies, since
/// any client can send one.
///
/// ```
/// use tollgate::middleware::{ClientAddress, RateLimitLayer};
///
/// # fn behind_proxies(layer: RateLimitLayer) -> Result<RateLimitLayer, tollgate::Error> {
/// Ok(layer.client_address(ClientAddress::behind(["10.0.1.0/28", "2001:db8:1::/64"])?))
/// # }
/// ```
///
/// The proxy must add its client's address to the header, or replace the header by it. One that passes on what the
/// client sent lets clients choose their address. In nginx:
///
/// ```nginx
/// proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
/// ```
///
/// Name no more than the proxies: whoever has an address in these networks, such as another service of a network that
/// all share, can write the address that it counts by.
#[derive(Clone, Debug, Default)]
pub struct ClientAddress {
    proxies: Vec<IpNet>,
    /// The header in which a proxy names its client. Default: `X-Forwarded-For`.
    header: Option<HeaderName>,
}

impl ClientAddress {
    /// The connection's peer address, whatever headers say.
    #[must_use]
    pub fn from_connection() -> Self {
        Self::default()
    }

    /// The address behind these proxies, given as addresses or networks. On a connection from one of them,
    /// `X-Forwarded-For` is read from its end, where the nearest proxy has written; the first address that isn't a
    /// proxy's is the client's. The client may have written anything before that, which isn't read. If all are
    /// proxies', the first of the list counts; without the header, the connection's peer. A request for which a proxy
    /// has written something other than an address there, such as `unknown`, is refused with 400 if any rule uses `ip`.
    /// On any other connection, the peer address counts.
    ///
    /// # Errors
    ///
    /// Text that is no address or network.
    pub fn behind<P: AsRef<str>>(proxies: impl IntoIterator<Item = P>) -> Result<Self, Error> {
        let proxies = proxies.into_iter().map(|text| {
            let text = text.as_ref();
            rules::net(text).map_err(|why| Error::new(Kind::Input, format!("proxies: {why}")))
        });
        Ok(Self { proxies: proxies.collect::<Result<_, _>>()?, header: None })
    }

    /// Another header of the same form, or with a single address, such as `CF-Connecting-IP`. The standard `Forwarded`
    /// isn't read.
    #[must_use]
    pub fn in_header(mut self, name: HeaderName) -> Self {
        self.header = Some(name);
        self
    }

    /// The address that counts for a request from this peer with this value of the header (empty if it had no such
    /// header): for programs that read both from an access log.
    ///
    /// ```
    /// use tollgate::middleware::ClientAddress;
    ///
    /// # fn main() -> Result<(), tollgate::Error> {
    /// let behind = ClientAddress::behind(["10.0.0.0/8"])?;
    /// let client = behind.of_header([10, 0, 0, 1].into(), b"192.0.2.1, 198.51.100.7, 10.0.0.2")?;
    /// assert_eq!(client.to_string(), "198.51.100.7");
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// The entry that counts is no address.
    #[doc(hidden)]
    pub fn of_header(&self, peer: IpAddr, value: &[u8]) -> Result<IpAddr, Error> {
        self.among(peer.to_canonical(), entries_of(value))
    }

    /// The address in a text with or without a port, as proxies and logs have it: `192.0.2.1`, `192.0.2.1:80`,
    /// `2001:db8::1`, `[2001:db8::1]` or `[2001:db8::1]:80`. IPv4-mapped IPv6 becomes IPv4. None if it is no address.
    #[doc(hidden)]
    #[must_use]
    pub fn read(text: &[u8]) -> Option<IpAddr> {
        address(text)
    }

    /// For a request whose connection has this peer, if the server noted one.
    ///
    /// # Errors
    ///
    /// The entry that counts is no address: going on without one would bypass every rule by address.
    pub(super) fn of(&self, parts: &Parts, peer: Option<IpAddr>) -> Result<Option<IpAddr>, Error> {
        let Some(peer) = peer.map(|peer| peer.to_canonical()) else { return Ok(None) };
        self.among(peer, entries_from_the_end(&parts.headers, &self.name())).map(Some)
    }

    /// The address that counts among those of a peer and of the entries of its header, last first.
    fn among<'h>(&self, peer: IpAddr, entries: impl Iterator<Item = &'h [u8]>) -> Result<IpAddr, Error> {
        if !self.trusts(peer) {
            return Ok(peer);
        }
        let mut last = peer;
        for entry in entries {
            let Some(address) = address(entry) else {
                let (name, got) = (self.name(), String::from_utf8_lossy(&entry[..entry.len().min(LONGEST)]));
                let why = format!("header {name}: expected an address from the proxy {last}, got {got:?}");
                return Err(Error::new(Kind::Input, why));
            };
            last = address;
            if !self.trusts(address) {
                break;
            }
        }
        // If all are proxies, the farthest of them sent its own request.
        Ok(last)
    }

    fn name(&self) -> HeaderName {
        self.header.clone().unwrap_or(HeaderName::from_static("x-forwarded-for"))
    }

    fn trusts(&self, address: IpAddr) -> bool {
        self.proxies.iter().any(|net| net.contains(&address))
    }
}

/// The entries of all lines of a header, last first, read only as far as they are asked for: a client may have written
/// any number of them, of any bytes.
fn entries_from_the_end<'h>(headers: &'h HeaderMap, name: &HeaderName) -> impl Iterator<Item = &'h [u8]> {
    headers.get_all(name).into_iter().rev().flat_map(|line| entries_of(line.as_bytes()))
}

/// The entries of one line, last first.
fn entries_of(line: &[u8]) -> impl Iterator<Item = &[u8]> {
    line.rsplit(|byte| *byte == b',').map(<[u8]>::trim_ascii).filter(|entry| !entry.is_empty())
}

/// The longest text of an address is some 60 bytes, with brackets, a scope and a port.
const LONGEST: usize = 64;

/// `192.0.2.1`, `192.0.2.1:80`, `2001:db8::1`, `[2001:db8::1]` or `[2001:db8::1]:80`.
fn address(entry: &[u8]) -> Option<IpAddr> {
    let text = std::str::from_utf8(entry).ok().filter(|text| text.len() <= LONGEST)?;
    let bracketed = || text.strip_prefix('[')?.strip_suffix(']')?.parse().ok().map(IpAddr::V6);
    let with_port = || text.parse::<SocketAddr>().ok().map(|address| address.ip());
    let address: Option<IpAddr> = text.parse().ok().or_else(with_port).or_else(bracketed);
    address.map(|address| address.to_canonical())
}
