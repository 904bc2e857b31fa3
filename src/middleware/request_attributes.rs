//! An HTTP request's attributes, for rules to match and count.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use http::header::{AUTHORIZATION, HeaderName};
use http::request::Parts;

use super::client_address::ClientAddress;
use crate::error::{Error, Kind};
use crate::rules::{Attributes, RuleSet};
use crate::telemetry;

pub(super) type Read = Arc<dyn Fn(&Parts) -> Result<Option<Vec<u8>>, Error> + Send + Sync>;
type ReadPeer = Arc<dyn Fn(&Parts) -> Option<IpAddr> + Send + Sync>;

/// Where the attributes of a request come from.
#[derive(Clone)]
pub(super) struct AttributeReaders {
    address: ClientAddress,
    peer: ReadPeer,
    others: Vec<(Arc<str>, Read)>,
}

/// The attributes of one request, as these read them.
pub(super) struct RequestAttributes<'s> {
    /// An error if a trusted proxy's header can't be read.
    ip: Result<Option<IpAddr>, Error>,
    /// Whether the request is outgoing, rather than received by a router here.
    outgoing: bool,
    others: Vec<(&'s str, Vec<u8>)>,
}

impl AttributeReaders {
    pub(super) fn new() -> Self {
        Self { address: ClientAddress::default(), peer: Arc::new(peer), others: Vec::new() }
    }

    pub(super) fn address(&mut self, address: ClientAddress) {
        self.address = address;
    }

    pub(super) fn peer(&mut self, read: ReadPeer) {
        self.peer = read;
    }

    /// The last source for a name wins.
    pub(super) fn attribute(&mut self, name: &str, read: Read) {
        self.others.retain(|(other, _)| **other != *name);
        self.others.push((name.into(), read));
    }

    /// Reports attributes that rules use and no request has.
    pub(super) fn check(&self, rules: &RuleSet, knows_accounts: bool) {
        let known = |name: &str| {
            ["method", "path", "ip"].contains(&name)
                || cfg!(feature = "axum") && name == "route"
                || knows_accounts && ["user", "tier", "api_key"].contains(&name)
                || self.others.iter().any(|(other, _)| **other == *name)
        };
        rules.attributes().filter(|name| !known(name)).for_each(telemetry::unsourced);
    }

    /// # Errors
    ///
    /// A header that appears twice.
    pub(super) fn of<'s>(&'s self, parts: &Parts, outgoing: bool) -> Result<RequestAttributes<'s>, Error> {
        let mut others = Vec::with_capacity(self.others.len() + 1);
        others.extend(route(parts, outgoing).map(|route| ("route", route.as_bytes().to_vec())));
        for (name, read) in &self.others {
            others.extend(read(parts)?.map(|value| (&**name, value)));
        }
        Ok(RequestAttributes { ip: self.address.of(parts, (self.peer)(parts)), outgoing, others })
    }
}

impl RequestAttributes<'_> {
    /// The user, if that is text.
    pub(super) fn user(&self) -> Option<&str> {
        let (_, user) = self.others.iter().find(|(name, _)| *name == "user")?;
        std::str::from_utf8(user).ok()
    }

    /// Whether the address could only be the connection's peer, which the server hasn't provided.
    pub(super) fn lacks_a_peer(&self) -> bool {
        matches!(self.ip, Ok(None)) && self.others.iter().all(|(name, _)| *name != "ip")
    }

    /// The attributes for these rules.
    ///
    /// # Errors
    ///
    /// What the client, or a proxy, sent can't be read, and a rule uses it: without the attribute, rules that deny by it
    /// wouldn't apply.
    pub(super) fn attributes<'a>(&'a self, parts: &'a Parts, rules: &RuleSet) -> Result<Attributes<'a>, Error> {
        let request = Attributes::new().method(parts.method.as_str()).path(path(parts, self.outgoing));
        let own = |name: &str| self.others.iter().any(|(other, _)| *other == name);
        let mut request = match &self.ip {
            Ok(Some(address)) => request.ip(*address),
            Err(error) if rules.uses("ip") && !own("ip") => return Err(error.clone()),
            _ => request,
        };
        for (name, value) in &self.others {
            request = match *name {
                "ip" | "path" | "method" if value.is_empty() => request,
                "ip" | "path" | "method" if rules.uses(name) => request.try_set(name, value)?,
                _ => request.set(name, value),
            };
        }
        Ok(request)
    }
}

impl fmt::Debug for AttributeReaders {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.others.iter().map(|(name, _)| name).collect();
        f.debug_struct("AttributeReaders")
            .field("address", &self.address)
            .field("others", &names)
            .finish_non_exhaustive()
    }
}

/// A header's value.
pub(super) fn header(name: HeaderName) -> Read {
    Arc::new(move |parts| only(parts, &name))
}

/// The token of `Authorization: Bearer ...`.
pub(super) fn bearer() -> Read {
    Arc::new(|parts| {
        let token = |value: Vec<u8>| {
            let (scheme, token) = value.split_at_checked(7)?;
            scheme.eq_ignore_ascii_case(b"bearer ").then(|| token.trim_ascii().to_vec())
        };
        Ok(only(parts, &AUTHORIZATION)?.and_then(token))
    })
}

/// Programs disagree on which of two equal headers counts, so sending both could evade a rule.
fn only(parts: &Parts, name: &HeaderName) -> Result<Option<Vec<u8>>, Error> {
    let mut values = parts.headers.get_all(name).iter();
    match (values.next(), values.next()) {
        (Some(_), Some(_)) => {
            Err(Error::new(Kind::Input, format!("header {name}: expected it once, got it several times")))
        }
        // HTTP/2 brings spaces around a value that HTTP/1.1 leaves out: another spelling of the same.
        (value, _) => Ok(value.map(|value| value.as_bytes().trim_ascii().to_vec())),
    }
}

/// The requested path: a nested router has cut off its prefix.
#[cfg_attr(not(feature = "axum"), allow(unused_variables, reason = "no router is known"))]
fn path(parts: &Parts, outgoing: bool) -> &str {
    #[cfg(feature = "axum")]
    if let Some(axum::extract::OriginalUri(uri)) = parts.extensions.get()
        && !outgoing
        && !goes_elsewhere(parts)
    {
        return uri.path();
    }
    parts.uri.path()
}

/// Whether a received request is forwarded to another host, with all its extensions: routers keep the host.
#[cfg(feature = "axum")]
fn goes_elsewhere(parts: &Parts) -> bool {
    let original: Option<&axum::extract::OriginalUri> = parts.extensions.get();
    original.is_some_and(|axum::extract::OriginalUri(original)| original.authority() != parts.uri.authority())
}

/// The route of a request that none of a router's routes takes: a fallback, or a service nested as such.
#[cfg(feature = "axum")]
const NO_ROUTE: &str = "none";

/// The route that a router matched: `/users/{id}`. None if no router has seen the request.
#[cfg_attr(not(feature = "axum"), allow(unused_variables, reason = "no router is known"))]
fn route(parts: &Parts, outgoing: bool) -> Option<&str> {
    #[cfg(feature = "axum")]
    {
        let of_router = parts.extensions.get::<axum::extract::OriginalUri>().is_some();
        let route = parts.extensions.get().map(axum::extract::MatchedPath::as_str);
        route.or(of_router.then_some(NO_ROUTE)).filter(|_| !outgoing && !goes_elsewhere(parts))
    }
    #[cfg(not(feature = "axum"))]
    None
}

/// The connection's peer, as provided by the server.
fn peer(parts: &Parts) -> Option<IpAddr> {
    #[cfg(feature = "axum")]
    if let Some(axum::extract::ConnectInfo(address)) = parts.extensions.get::<axum::extract::ConnectInfo<SocketAddr>>()
    {
        return Some(address.ip());
    }
    parts.extensions.get::<SocketAddr>().map(SocketAddr::ip)
}
