//! An HTTP request's attributes, for rules to match and count.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use http::Extensions;
use http::header::{AUTHORIZATION, HOST, HeaderName};
use http::request::Parts;

use super::client_address::ClientAddress;
use super::host;
use super::side::{Side, only, original_uri};
use crate::error::Error;
use crate::rules::{Attributes, RuleSet};
use crate::telemetry;

pub(super) type Read = Arc<dyn Fn(&Parts, Side) -> Result<Option<Vec<u8>>, Error> + Send + Sync>;
type ReadPeer = Arc<dyn Fn(&Parts) -> Option<IpAddr> + Send + Sync>;

/// Where the attributes of a request come from.
#[derive(Clone)]
pub(super) struct AttributeReaders {
    side: Side,
    address: ClientAddress,
    peer: ReadPeer,
    others: Vec<(Arc<str>, Read)>,
}

/// What an earlier layer says of the user behind a request.
const OF_ACCOUNTS: [&str; 3] = ["user", "tier", "api_key"];

/// Sent to the client in place of the error's text, which may name a proxy.
const UNREADABLE_ADDRESS: &str = "the address that this request comes from can't be read";

/// The attributes of one request, as these read them.
pub(super) struct RequestAttributes<'s> {
    /// An error if a trusted proxy's header can't be read.
    ip: Result<Option<IpAddr>, Error>,
    side: Side,
    others: Vec<(&'s str, Vec<u8>)>,
}

impl AttributeReaders {
    pub(super) fn new() -> Self {
        let side = Side::Incoming;
        Self { side, address: ClientAddress::default(), peer: Arc::new(peer), others: Vec::new() }
    }

    pub(super) fn outgoing(&mut self) {
        self.side = Side::Outgoing;
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

    /// Reports attributes that rules use and no request has, judging by the first request; not those of accounts, which
    /// other requests may have.
    pub(super) fn check(&self, rules: &RuleSet, first: &Extensions) {
        let known = |name: &str| {
            ["method", "path", "ip"].contains(&name)
                || OF_ACCOUNTS.contains(&name)
                || name == "route" && route(first, self.side).is_some()
        };
        self.unsourced(rules, |name| !known(name));
    }

    /// The same for attributes of accounts, once no request has come with an account.
    pub(super) fn check_accounts(&self, rules: &RuleSet) {
        self.unsourced(rules, |name| OF_ACCOUNTS.contains(&name));
    }

    fn unsourced(&self, rules: &RuleSet, of: impl Fn(&str) -> bool) {
        let is_read = |name: &str| self.others.iter().any(|(other, _)| **other == *name);
        rules.attributes().filter(|name| of(name) && !is_read(name)).for_each(telemetry::unsourced);
    }

    /// # Errors
    ///
    /// A header that appears twice, or a `Host` that can't be read.
    pub(super) fn of<'s>(&'s self, parts: &Parts) -> Result<RequestAttributes<'s>, Error> {
        let mut others = Vec::with_capacity(self.others.len() + 1);
        others.extend(route(&parts.extensions, self.side).map(|route| ("route", route.as_bytes().to_vec())));
        for (name, read) in &self.others {
            others.extend(read(parts, self.side)?.map(|value| (&**name, value)));
        }
        Ok(RequestAttributes { ip: self.address.of(parts, (self.peer)(parts)), side: self.side, others })
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
    /// What the client, or a proxy, sent can't be read, and a rule that takes effect uses it: without the attribute,
    /// rules that deny by it wouldn't apply. The error comes with the text of the refusal.
    pub(super) fn attributes<'a>(
        &'a self,
        parts: &'a Parts,
        rules: &RuleSet,
    ) -> Result<Attributes<'a>, (&'static str, Error)> {
        let request = Attributes::new().method(parts.method.as_str()).path(path(parts, self.side));
        let own = |name: &str| self.others.iter().any(|(other, _)| *other == name);
        let mut request = match &self.ip {
            Ok(Some(address)) => request.ip(*address),
            Err(error) if rules.enforces("ip") && !own("ip") => return Err((UNREADABLE_ADDRESS, error.clone())),
            _ => request,
        };
        for (name, value) in &self.others {
            request = match *name {
                "ip" | "path" | "method" if value.is_empty() => request,
                "ip" | "path" | "method" if rules.enforces(name) => {
                    let detail = match *name {
                        "ip" => UNREADABLE_ADDRESS,
                        "path" => "the path of this request can't be read",
                        _ => "the method of this request can't be read",
                    };
                    request.try_set(name, value).map_err(|error| (detail, error))?
                }
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
            .field("side", &self.side)
            .field("address", &self.address)
            .field("others", &names)
            .finish_non_exhaustive()
    }
}

/// A header's value. The host is normalised, and HTTP/2 has it outside the headers.
pub(super) fn header(name: HeaderName) -> Read {
    if name == HOST {
        return Arc::new(host::of_request);
    }
    Arc::new(move |parts, _| only(parts, &name))
}

/// The token of `Authorization: Bearer ...`.
pub(super) fn bearer() -> Read {
    Arc::new(|parts, _| {
        let token = |value: Vec<u8>| {
            let (scheme, token) = value.split_at_checked(7)?;
            scheme.eq_ignore_ascii_case(b"bearer ").then(|| token.trim_ascii().to_vec())
        };
        Ok(only(parts, &AUTHORIZATION)?.and_then(token))
    })
}

/// The path that the client asked for, or that the request goes to. For a request received, a router's own note counts,
/// since nested routers and other layers may have cut off its prefix or changed its host since.
fn path(parts: &Parts, side: Side) -> &str {
    original_uri(parts).filter(|_| side == Side::Incoming).unwrap_or(&parts.uri).path()
}

/// The route of a request that none of a router's routes takes: a fallback, or a service nested as such.
#[cfg(feature = "axum")]
const NO_ROUTE: &str = "none";

/// The route that a router matched: `/users/{id}`. None if no router has seen the request, or it is sent on.
#[cfg_attr(not(feature = "axum"), allow(unused_variables, reason = "no router is known"))]
fn route(extensions: &Extensions, side: Side) -> Option<&str> {
    #[cfg(feature = "axum")]
    {
        let of_router = extensions.get::<axum::extract::OriginalUri>().is_some();
        let route = extensions.get().map(axum::extract::MatchedPath::as_str);
        route.or(of_router.then_some(NO_ROUTE)).filter(|_| side == Side::Incoming)
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
