//! Whom a call is about, and what it takes.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::error::{Error, Kind};
use crate::rule::Rule;

/// The last microsecond that a decision can be made at, since the epoch: the year 2112.
const LAST_TIME: u64 = 1 << 52;

/// How long an id is remembered unless said.
const ID_TTL: Duration = Duration::from_secs(600);

/// Whom a call is about, and what it takes. A plain key is a request of the rule's [cost](Rule::cost).
///
/// ```
/// use tollgate::Request;
///
/// let request = Request::new("user:42").cost(5);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    pub(crate) key: &'a [u8],
    pub(crate) parts: &'a [(&'a str, &'a [u8])],
    pub(crate) id: Option<&'a [u8]>,
    pub(crate) id_ttl: Duration,
    /// What the rule says, if none.
    cost: Option<u64>,
    pub(crate) at: Option<SystemTime>,
    pub(crate) deadline: Option<Duration>,
    pub(crate) jitter: u8,
}

impl<'a> Request<'a> {
    /// A request for this key, at the rule's cost. Any bytes will do, but not none.
    #[must_use]
    pub fn new(key: &'a (impl AsRef<[u8]> + ?Sized)) -> Self {
        Self {
            key: key.as_ref(),
            parts: &[],
            id: None,
            id_ttl: ID_TTL,
            cost: None,
            at: None,
            deadline: None,
            jitter: 0,
        }
    }

    /// What limits count that don't count the key, by name; see [`Rule::and_by`].
    ///
    /// ```
    /// use tollgate::Request;
    ///
    /// let request = Request::new("user:42").parts(&[("org", b"acme")]);
    /// ```
    #[must_use]
    pub fn parts(mut self, parts: &'a [(&'a str, &'a [u8])]) -> Self {
        self.parts = parts;
        self
    }

    /// A name for this call, of any bytes. While it is remembered, the same id for the same key and rule gets the same
    /// answer and is charged once, so a call that got no answer can be sent again; and what it took can be
    /// [settled](crate::Limiter::settle). Only allowed calls are remembered, and where a rule has permits, which are
    /// held by this id, only for as long as they are held.
    #[must_use]
    pub fn id(mut self, id: &'a (impl AsRef<[u8]> + ?Sized)) -> Self {
        self.id = Some(id.as_ref());
        self
    }

    /// How long the id is remembered. Default: 10 minutes.
    #[must_use]
    pub fn id_ttl(mut self, ttl: Duration) -> Self {
        self.id_ttl = ttl;
        self
    }

    /// Units that it takes; 0 takes nothing. Default: the [rule's](Rule::cost), which is 1 unless said.
    #[must_use]
    pub fn cost(mut self, units: u64) -> Self {
        self.cost = Some(units);
        self
    }

    /// Decides as if it were this time, from 1970 to 2112. Default: the engine's own clock.
    #[must_use]
    pub fn at(mut self, now: SystemTime) -> Self {
        self.at = Some(now);
        self
    }

    /// Makes the wait of a denial longer by chance, by up to so many hundredths of it, so that callers who were denied
    /// together don't come back together. Default: 0, the exact wait.
    #[must_use]
    pub fn jitter(mut self, hundredths: u8) -> Self {
        self.jitter = hundredths;
        self
    }

    /// How long this call may take. Default: the limiter's deadline.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = Some(deadline);
        self
    }
}

/// A request that outlives what it was made of.
#[derive(Clone, Debug)]
pub(crate) struct OwnedRequest {
    key: Vec<u8>,
    parts: Vec<(String, Vec<u8>)>,
    id: Option<Vec<u8>>,
    cost: Option<u64>,
    at: Option<SystemTime>,
    deadline: Option<Duration>,
}

impl OwnedRequest {
    pub(crate) fn deadline(&self) -> Option<Duration> {
        self.deadline
    }

    pub(crate) fn parts(&self) -> Vec<(&str, &[u8])> {
        self.parts.iter().map(|(name, value)| (name.as_str(), value.as_slice())).collect()
    }

    pub(crate) fn borrowed<'a>(&'a self, parts: &'a [(&'a str, &'a [u8])]) -> Request<'a> {
        let Self { id, cost, at, deadline, .. } = self;
        Request {
            key: &self.key,
            parts,
            id: id.as_deref(),
            id_ttl: ID_TTL,
            cost: *cost,
            at: *at,
            deadline: *deadline,
            jitter: 0,
        }
    }
}

impl Request<'_> {
    /// The time to decide at, in microseconds since the epoch.
    pub(crate) fn now_us(&self) -> Result<Option<u64>, Error> {
        self.at.map(microseconds).transpose()
    }

    /// How long the id is remembered, in milliseconds.
    pub(crate) fn id_ttl_ms(&self) -> Result<u64, Error> {
        let ttl_ms = u64::try_from(self.id_ttl.as_millis()).ok().filter(|ms| (1..=LAST_TIME).contains(ms));
        let got = self.id_ttl;
        ttl_ms.ok_or_else(|| Error::new(Kind::Input, format!("id_ttl: expected a millisecond or more, got {got:?}")))
    }

    /// Units that it takes by this rule.
    pub(crate) fn units(&self, rule: &Rule) -> u64 {
        self.cost.unwrap_or(rule.default_cost())
    }

    /// Whether it says itself what it takes.
    pub(crate) fn has_cost(&self) -> bool {
        self.cost.is_some()
    }

    pub(crate) fn has_id(&self) -> bool {
        self.id.is_some()
    }

    /// Keeps the id at least as long as it is waited for.
    pub(crate) fn id_remembered_beyond(mut self, wait: Duration) -> Self {
        self.id_ttl = wait + ID_TTL;
        self
    }

    pub(crate) fn to_owned(self) -> OwnedRequest {
        OwnedRequest {
            key: self.key.to_vec(),
            parts: self.parts.iter().map(|(name, value)| ((*name).to_owned(), value.to_vec())).collect(),
            id: self.id.map(<[u8]>::to_vec),
            cost: self.cost,
            at: self.at,
            deadline: self.deadline,
        }
    }

    /// What a limit counts: the part of this name, or the key.
    pub(crate) fn counted(&self, rule: &Rule, part: Option<&str>) -> Result<&[u8], Error> {
        let Some(name) = part else { return Ok(self.key) };
        let found = self.parts.iter().find(|(part, _)| *part == name).map(|(_, value)| *value);
        found.ok_or_else(|| {
            Error::new(
                Kind::Input,
                format!("request: expected the part {name:?} that rule {} counts, got none", rule.name()),
            )
        })
    }
}

impl<'a, K: AsRef<[u8]> + ?Sized> From<&'a K> for Request<'a> {
    fn from(key: &'a K) -> Self {
        Self::new(key)
    }
}

fn microseconds(at: SystemTime) -> Result<u64, Error> {
    let since = at.duration_since(UNIX_EPOCH).ok().and_then(|since| u64::try_from(since.as_micros()).ok());
    since
        .filter(|now| *now <= LAST_TIME)
        .ok_or_else(|| Error::new(Kind::Input, format!("now: expected a time from 1970 to 2112, got {at:?}")))
}
