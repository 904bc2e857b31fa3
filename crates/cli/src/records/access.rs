//! A line of a web server's access log in any format: who requested what, and when.

use std::borrow::Cow;

use tollgate::Operation;

use super::clients::{Clients, counted};
use super::field::{MAX_T_US, quoted};
use super::{Identity, KeyField, Permits, Record};
use crate::attributes::{self, Pairs};

/// What a line says, as the bytes that were sent.
#[derive(Debug)]
pub(super) struct Access<'a> {
    pub(super) time: Time,
    /// How long the request took, in microseconds, if the line says so.
    pub(super) took: Option<u64>,
    /// The HTTP status of its response.
    pub(super) status: Option<u16>,
    /// The client's address, with or without a port, or its name; or a list with commas, as proxies forward it. Empty
    /// if the line has none.
    pub(super) host: Cow<'a, [u8]>,
    pub(super) user: Option<Cow<'a, [u8]>>,
    /// A request that isn't HTTP has neither method nor path.
    pub(super) method: Option<Cow<'a, [u8]>>,
    /// Without the query string.
    pub(super) path: Option<Cow<'a, [u8]>>,
    /// The request as written, for messages.
    pub(super) request: Cow<'a, [u8]>,
}

/// The time on a line, in microseconds since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Time {
    /// When the request had arrived.
    Began(u64),
    /// When it was answered, which is when most servers write the line.
    Ended(u64),
}

impl Access<'_> {
    /// A line of which only the time is known.
    pub(super) fn at(time: Time) -> Self {
        let nothing = Cow::Borrowed(&b""[..]);
        let (took, status, host) = (None, None, nothing.clone());
        Self { time, took, status, host, user: None, method: None, path: None, request: nothing }
    }

    /// Whether more than the time is known.
    pub(super) fn says_anything(&self) -> bool {
        !self.host.is_empty() || self.method.is_some() || self.path.is_some()
    }

    /// The record of a request whose client's address is in this field of the line, if it is in another than the host.
    pub(super) fn record(
        mut self,
        line: u64,
        about: Identity,
        clients: &Clients,
        forwarded: Option<&[u8]>,
    ) -> Result<Record, String> {
        let address = match about {
            Identity::Key(KeyField::Ip) | Identity::Attributes => clients.address(&self.host, forwarded)?,
            Identity::Key(_) => None,
        };

        let status = self.status;
        let (t_us, permits) = match (self.time, self.took) {
            (Time::Ended(at), Some(took)) => (at.saturating_sub(took), Permits::Until(at)),
            (Time::Began(at), Some(took)) => (at, Permits::Until((at + took).min(MAX_T_US))),
            (Time::Ended(at) | Time::Began(at), None) => (at, Permits::Unknown),
        };
        let (key, attributes) = match (about, address) {
            (Identity::Key(KeyField::Ip), Some(address)) => (counted(address), Vec::new()),
            (Identity::Key(by), _) => (self.key(by)?, Vec::new()),
            (Identity::Attributes, address) => {
                if let Some(address) = address {
                    self.host = address.to_string().into_bytes().into();
                }
                (Vec::new(), self.attributes()?)
            }
        };
        let (op, cost, id, length) = (Operation::Acquire, None, None, None);
        Ok(Record { line, t_us, op, key, cost, id, length, permits, status, attributes })
    }

    fn key(self, by: KeyField) -> Result<Vec<u8>, String> {
        let request = self.request;
        let key = match by {
            KeyField::Ip => Some(self.host),
            KeyField::User => self.user,
            KeyField::Method => self.method,
            KeyField::Path => self.path,
        };
        key.filter(|key| !key.is_empty()).map(Cow::into_owned).ok_or_else(|| match by {
            KeyField::Ip => "no host on this line".to_owned(),
            KeyField::User => "no user on this line".to_owned(),
            KeyField::Method => format!("no method on this line: the request is {}", quoted(&request)),
            KeyField::Path => format!("no path on this line: the request is {}", quoted(&request)),
        })
    }

    /// All attributes on the line.
    fn attributes(self) -> Result<Pairs, String> {
        let path = self.path.map(|path| in_utf8(&path));
        let found = [
            ("ip", Some(self.host.into_owned())),
            ("method", self.method.map(Cow::into_owned)),
            ("path", path),
            ("user", self.user.map(Cow::into_owned)),
        ];
        let found = found.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?)));
        let attributes = found.filter(|(_, value)| !value.is_empty()).collect();
        attributes::check(&attributes)?;
        Ok(attributes)
    }
}

/// The path in UTF-8: other bytes are percent-encoded, as the client should have sent them.
fn in_utf8(path: &[u8]) -> Vec<u8> {
    let mut text = Vec::with_capacity(path.len());
    for chunk in path.utf8_chunks() {
        text.extend_from_slice(chunk.valid().as_bytes());
        text.extend(chunk.invalid().iter().flat_map(|byte| format!("%{byte:02X}").into_bytes()));
    }
    text
}

/// The method in a request line such as `GET /a?b HTTP/1.1`.
pub(super) fn method(request: &[u8]) -> Option<&[u8]> {
    let word = request.split(|byte| *byte == b' ').next()?;
    // Otherwise a TLS client or a port scanner sent it; some servers log only a "-" for that.
    let plausible = word.first()?.is_ascii_alphabetic()
        && word.iter().all(|byte| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(byte));
    plausible.then_some(word)
}

/// The path in a request line.
pub(super) fn path(request: &[u8]) -> Option<&[u8]> {
    method(request)?;
    Some(without_query(request.split(|byte| *byte == b' ').nth(1)?))
}

/// The path of a request target, which may be a whole URL.
pub(super) fn path_of_target(target: Cow<'_, [u8]>) -> Cow<'_, [u8]> {
    match target {
        Cow::Borrowed(target) => Cow::Borrowed(without_query(target)),
        Cow::Owned(target) => Cow::Owned(without_query(&target).to_vec()),
    }
}

fn without_query(target: &[u8]) -> &[u8] {
    let path = target.split(|byte| *byte == b'?').next().unwrap_or_default();
    if path.starts_with(b"/") {
        return path;
    }
    // The form that proxies and balancers get: https://shop.example:443/a.
    let scheme = path.windows(3).position(|bytes| bytes == b"://").filter(|at| *at <= 5);
    match scheme.map(|at| &path[at + 3..]) {
        Some(rest) => rest.iter().position(|byte| *byte == b'/').map_or(b"/", |at| &rest[at..]),
        None => path,
    }
}
