//! A request's attributes that rules can match and count. Each is normalised once, so that no other spelling of the
//! same request evades a rule.

use std::borrow::Cow;
use std::net::{IpAddr, Ipv6Addr};

use ipnet::Ipv6Net;

use super::account::Account;
use super::definition::{Paths, Reading};
use super::named_values::NamedValues;
use super::names::{API_KEY, IP, METHOD, Name, PATH, TIER, USER};
use super::path;
use crate::error::{Error, Kind};

/// What is known of one request, by which a [`RuleSet`](super::RuleSet) finds its rule.
///
/// ```
/// use std::net::IpAddr;
/// use tollgate::rules::Attributes;
///
/// let address = IpAddr::from([192, 0, 2, 1]);
/// let request = Attributes::new().user("42").ip(address).method("GET").path("/api/v1/items").set("org", "acme");
/// ```
///
/// Paths are compared as a server would interpret them: without the query, percent-encoded characters decoded once
/// (slashes too), without double slashes, dot segments and a trailing slash. Methods are upper case, and all that
/// aren't among the nine standard ones count as one. IPv6 addresses that stand for an IPv4 address become that one. An
/// empty attribute counts as missing.
#[derive(Clone, Debug, Default)]
pub struct Attributes<'a> {
    pub(super) ip: Option<IpAddr>,
    pub(super) path: Option<Cow<'a, str>>,
    /// The path as patterns see it, if that isn't how it is counted.
    matched: Option<Cow<'a, str>>,
    /// The path as sent, unless it is normalised already.
    sent: Option<&'a str>,
    pub(super) method: Option<Cow<'a, str>>,
    others: NamedValues<'a>,
    pub(super) account: Option<&'a Account>,
}

impl<'a> Attributes<'a> {
    /// No attributes yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The user behind the request.
    #[must_use]
    pub fn user(self, user: &'a (impl AsRef<[u8]> + ?Sized)) -> Self {
        self.set(USER, user)
    }

    /// The request's API key or, better, its id, since Redis stores it as given unless keys are
    /// [hashed](crate::LimiterBuilder::key_secret).
    #[must_use]
    pub fn api_key(self, key: &'a (impl AsRef<[u8]> + ?Sized)) -> Self {
        self.set(API_KEY, key)
    }

    /// What the user pays for, such as `free`.
    #[must_use]
    pub fn tier(self, tier: &'a (impl AsRef<[u8]> + ?Sized)) -> Self {
        self.set(TIER, tier)
    }

    /// The account behind the request: sets its `user` and, if the account has them, its `api_key` and `tier`, and
    /// discards earlier values of these. The account's own limits replace those of its tier, and a blocked user is
    /// denied whichever rule applies.
    #[must_use]
    pub fn account(self, account: &'a Account) -> Self {
        let mut request = self;
        request.others.remove(&[USER, API_KEY, TIER]);
        let request = request.set(USER, account.user());
        let known = [(API_KEY, account.key_id()), (TIER, account.paid_tier())];
        let known = known.into_iter().filter_map(|(name, value)| Some((name, value?)));
        let request = known.fold(request, |request, (name, value)| request.set(name, value));
        Self { account: Some(account), ..request }
    }

    /// What is known of the request's own user, by
    /// [`RuleSource::account_of_user`](super::RuleSource::account_of_user): its limits, its block and its tier. Unlike
    /// [`account`](Self::account), keeps what the request says itself where the account has nothing. None changes
    /// nothing.
    #[must_use]
    pub fn known_user(self, account: Option<&'a Account>) -> Self {
        let request = match account.and_then(Account::paid_tier) {
            Some(tier) => self.set(TIER, tier),
            None => self,
        };
        Self { account: account.or(request.account), ..request }
    }

    /// The client's address: from the connection, or from a header written by your own proxy. With a header that the
    /// client may write, such as `X-Forwarded-For`, the client chooses whom it counts as.
    #[must_use]
    pub fn ip(mut self, address: IpAddr) -> Self {
        self.ip = Some(address.to_canonical());
        self
    }

    /// The path of its URL, or the whole request target, as the client sent it; an empty one is `/`.
    #[must_use]
    pub fn path(mut self, target: &'a str) -> Self {
        let decoded = path::normalised(target);
        self.sent = matches!(decoded, Cow::Owned(_)).then(|| path::path_of(target));
        Self { path: Some(decoded), matched: None, ..self }
    }

    /// The HTTP method. As a key, HEAD counts as GET, and those that aren't standard (RFC 9110, and PATCH) as `OTHER`.
    #[must_use]
    pub fn method(mut self, method: &'a str) -> Self {
        self.method = (!method.is_empty()).then(|| upper_case(method));
        self
    }

    /// An attribute of your own. `ip`, `path` and `method` are read as by their own methods. If one of those can't be
    /// read, it counts as missing; [`try_set`](Self::try_set) returns an error instead.
    #[must_use]
    pub fn set(mut self, name: &'a str, value: &'a (impl AsRef<[u8]> + ?Sized)) -> Self {
        let bytes = value.as_ref();
        let text = || std::str::from_utf8(bytes).ok();
        match name {
            IP => Self {
                ip: text().and_then(|text| text.parse().ok()).map(|address: IpAddr| address.to_canonical()),
                ..self
            },
            PATH => match text() {
                Some(path) => self.path(path),
                None => Self { path: None, matched: None, sent: None, ..self },
            },
            METHOD => self.method(text().unwrap_or_default()),
            _ => {
                self.others.set(name, bytes);
                self
            }
        }
    }

    /// The same, for names that aren't known in advance.
    ///
    /// # Errors
    ///
    /// An `ip` that is no address, or a `path` or `method` that isn't UTF-8.
    pub fn try_set(self, name: &'a str, value: &'a (impl AsRef<[u8]> + ?Sized)) -> Result<Self, Error> {
        let (bytes, given) = (value.as_ref(), self.set(name, value));
        let expected = match name {
            IP if given.ip.is_none() => "an address such as 192.0.2.1 or 2001:db8::1",
            PATH | METHOD if std::str::from_utf8(bytes).is_err() => "UTF-8",
            _ => return Ok(given),
        };
        let got = String::from_utf8_lossy(bytes);
        Err(Error::new(Kind::Input, format!("{name}: expected {expected}, got {got:?}")))
    }

    /// An attribute as rules see it, with address and path normalised. None if the request doesn't have it.
    ///
    /// ```
    /// use tollgate::rules::Attributes;
    ///
    /// let request = Attributes::new().path("//api/./items?page=2");
    /// assert_eq!(request.get("path").as_deref(), Some(&b"/api/items"[..]));
    /// assert_eq!(request.get("user"), None);
    /// ```
    #[must_use]
    pub fn get(&self, name: &str) -> Option<Cow<'_, [u8]>> {
        self.value(name, 128)
    }

    /// The user, if that is text.
    #[must_use]
    pub fn user_name(&self) -> Option<&str> {
        std::str::from_utf8(self.text(USER)?).ok()
    }

    /// The id of the request's API key, if its owner is known: from its [`account`](Self::account).
    #[must_use]
    pub fn key_id(&self) -> Option<&str> {
        self.account.and_then(Account::key_id)
    }

    /// The client's address.
    #[must_use]
    pub fn address(&self) -> Option<IpAddr> {
        self.ip
    }

    /// The first of these that it lacks.
    pub(super) fn first_missing<'n>(&self, names: impl IntoIterator<Item = &'n Name>) -> Option<&'n str> {
        let has = |name: &str| match name {
            IP => self.ip.is_some(),
            name => self.counted(name, 128).is_some(),
        };
        names.into_iter().map(|name| &**name).find(|name| !has(name))
    }

    /// Whether servers disagree on its path.
    pub(super) fn reads_two_ways(&self) -> bool {
        self.sent.or(self.path.as_deref()).is_some_and(path::is_ambiguous)
    }

    /// The path as patterns see it.
    pub(super) fn matched_path(&self) -> Option<&str> {
        self.matched.as_deref().or(self.path.as_deref())
    }

    /// The attributes that are compared as given: all but address and path.
    pub(super) fn texts(&self) -> impl Iterator<Item = (&str, &[u8])> {
        let methods = self.values(METHOD).map(|method| (METHOD, method));
        self.others.iter().filter(|(_, value)| !value.is_empty()).chain(methods)
    }

    /// What a condition on one of these may name: its value and, for a method that isn't a standard one, `OTHER`.
    pub(super) fn values(&self, name: &str) -> impl Iterator<Item = &[u8]> {
        let other = self.method.as_deref().filter(|method| name == METHOD && !is_standard(method));
        self.text(name).into_iter().chain(other.map(|_| OTHER_METHOD.as_bytes()))
    }

    /// The bytes of one of these.
    pub(super) fn text(&self, name: &str) -> Option<&[u8]> {
        if name == METHOD {
            return self.method.as_deref().map(str::as_bytes);
        }
        self.others.get(name).filter(|value| !value.is_empty())
    }

    /// What conditions compare an attribute as, for a message.
    pub(super) fn compared(&self, name: &str) -> Option<Cow<'_, [u8]>> {
        match (name, self.matched_path()) {
            (PATH, path) => path.map(|path| Cow::Borrowed(path.as_bytes())),
            _ => self.value(name, 128),
        }
    }

    /// What a rule counts an attribute as: its text or, for an IPv6 address, its network of this many bits, the rule's
    /// `ipv6_prefix` (64 unless it sets another). None if the request doesn't have it.
    ///
    /// ```
    /// use tollgate::rules::Attributes;
    ///
    /// let request = Attributes::new().set("ip", "2001:db8::a:1").method("HEAD");
    /// assert_eq!(request.counted("ip", 64).as_deref(), Some(&b"2001:db8::/64"[..]));
    /// assert_eq!(request.counted("method", 64).as_deref(), Some(&b"GET"[..]));
    /// ```
    #[must_use]
    pub fn counted(&self, name: &str, ipv6_prefix: u8) -> Option<Cow<'_, [u8]>> {
        match (name, &self.method) {
            (METHOD, Some(method)) => Some(Cow::Borrowed(counted_method(method).as_bytes())),
            _ => self.value(name, ipv6_prefix),
        }
    }

    /// Its text or, for an IPv6 address, its network with this prefix length.
    fn value(&self, name: &str, ipv6_prefix: u8) -> Option<Cow<'_, [u8]>> {
        match name {
            IP => self.ip.map(|address| Cow::Owned(network(address, ipv6_prefix).into_bytes())),
            PATH => self.path.as_deref().map(|path| Cow::Borrowed(path.as_bytes())),
            _ => self.text(name).map(Cow::Borrowed),
        }
    }
}

impl Reading {
    /// The request, read in this way.
    pub(super) fn of<'r, 'a>(self, request: &'r Attributes<'a>) -> Cow<'r, Attributes<'a>> {
        let Some(path) = request.path.as_deref() else { return Cow::Borrowed(request) };
        let upper = |path: &str| self.ignore_case && path.bytes().any(|byte| byte.is_ascii_uppercase());
        let sent = request.sent.filter(|_| self.paths == Paths::Segments);
        if sent.is_none() && !upper(path) {
            return Cow::Borrowed(request);
        }
        let cased = |path: Cow<'a, str>| if upper(&path) { Cow::Owned(path.to_ascii_lowercase()) } else { path };
        // Counted in its normalised form: to the handler of a route that takes the rest, an encoded slash and a plain
        // one are the same.
        let matched = sent.map(|sent| cased(Cow::Borrowed(sent)));
        Cow::Owned(Attributes { path: Some(cased(Cow::Owned(path.to_owned()))), matched, ..request.clone() })
    }
}

/// The methods of RFC 9110, and PATCH.
const METHODS: [&str; 9] = ["GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH"];

/// Every other method: a client may invent as many as it likes.
pub(super) const OTHER_METHOD: &str = "OTHER";

/// Whether it is one of the nine, in upper case.
pub(super) fn is_standard(method: &str) -> bool {
    METHODS.contains(&method)
}

/// What a method is counted as: HEAD as GET, as in conditions, and methods that aren't standard as one.
pub(super) fn counted_method(method: &str) -> &str {
    match method {
        "HEAD" => "GET",
        method if is_standard(method) => method,
        _ => OTHER_METHOD,
    }
}

pub(super) fn upper_case(method: &str) -> Cow<'_, str> {
    if method.bytes().any(|byte| byte.is_ascii_lowercase()) {
        Cow::Owned(method.to_ascii_uppercase())
    } else {
        Cow::Borrowed(method)
    }
}

/// An IPv4 address, or an IPv6 address's network: a client with one IPv6 address usually has 2^64.
fn network(address: IpAddr, ipv6_prefix: u8) -> String {
    match address {
        IpAddr::V4(address) => address.to_string(),
        IpAddr::V6(address) if ipv6_prefix >= 128 => address.to_string(),
        IpAddr::V6(address) => {
            let network = Ipv6Net::new(address, ipv6_prefix).map_or(Ipv6Addr::UNSPECIFIED, |net| net.network());
            format!("{network}/{ipv6_prefix}")
        }
    }
}
