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
/// use tollgate::middleware::ClientAddress;
///
/// let address = ClientAddress::behind(["10.0.0.0/8", "2001:db8:1::/48"])?;
/// # Ok::<(), tollgate::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct ClientAddress {
    proxies: Vec<IpNet>,
    /// The header in which a proxy names its client. Default: `X-Forwarded-For`.
    header: Option<HeaderName>,
}

impl ClientAddress {
    /// The connection's peer address, whatever headers say.
    #[must_use]
    pub fn of_connection() -> Self {
        Self::default()
    }

    /// The address behind these proxies, given as addresses or networks. On a connection from one of them,
    /// `X-Forwarded-For` is read from its end, where the nearest proxy has written; the first address that isn't a
    /// proxy's is the client's. The client may have written anything before that. On any other connection, the peer
    /// address counts.
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

    /// For a request whose connection has this peer. None if a proxy's header can't be read.
    pub(super) fn of(&self, parts: &Parts, peer: Option<IpAddr>) -> Option<IpAddr> {
        let peer = peer?.to_canonical();
        if !self.trusts(peer) {
            return Some(peer);
        }
        let name = self.header.clone().unwrap_or(HeaderName::from_static("x-forwarded-for"));
        let mut last = None;
        for entry in entries_from_the_end(&parts.headers, &name) {
            let address = entry?;
            if !self.trusts(address) {
                return Some(address);
            }
            last = Some(address);
        }
        // All are proxies: the farthest of them sent its own request.
        Some(last.unwrap_or(peer))
    }

    fn trusts(&self, address: IpAddr) -> bool {
        self.proxies.iter().any(|net| net.contains(&address))
    }
}

/// The entries of all lines of a header, last first; none for an entry that isn't an address.
fn entries_from_the_end(headers: &HeaderMap, name: &HeaderName) -> impl Iterator<Item = Option<IpAddr>> {
    let lines: Vec<_> = headers.get_all(name).iter().collect();
    lines.into_iter().rev().flat_map(|line| match line.to_str() {
        Ok(line) => line.rsplit(',').map(str::trim).filter(|entry| !entry.is_empty()).map(address).collect::<Vec<_>>(),
        Err(_) => vec![None],
    })
}

/// `192.0.2.1`, `192.0.2.1:80`, `2001:db8::1`, `[2001:db8::1]` or `[2001:db8::1]:80`.
fn address(text: &str) -> Option<IpAddr> {
    let bracketed = || text.strip_prefix('[')?.strip_suffix(']')?.parse().ok();
    let with_port = || text.parse::<SocketAddr>().ok().map(|address| address.ip());
    let address: Option<IpAddr> = text.parse().ok().or_else(with_port).or_else(bracketed);
    address.map(|address| address.to_canonical())
}
