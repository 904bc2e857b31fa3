//! One call: rule + key + cost -> decision.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::decision::Decision;
use crate::engine::Engine;
use crate::error::{Error, Kind};
use crate::key;
use crate::rule::Rule;
use crate::script::{Call, Mode, Reply};

/// The last microsecond that a decision can be made at, since the epoch: the year 2112.
const LAST_TIME: u64 = 1 << 52;

/// Makes decisions. Cheap to clone, and shared between tasks by cloning or by reference.
///
/// Every method costs one round trip to Redis: two where the server has lost its scripts, and more for the first call,
/// which connects.
#[derive(Clone, Debug)]
pub struct Limiter {
    engine: Engine,
    prefix: String,
    deadline: Duration,
}

/// Whom a call is about, and what it takes. A plain key is a request of cost 1.
///
/// ```
/// use tollgate::Request;
///
/// let request = Request::new("user:42").cost(5);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    key: &'a [u8],
    cost: u64,
    at: Option<SystemTime>,
    deadline: Option<Duration>,
}

/// What a key's state means, and what it consists of.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct State {
    /// The key in Redis.
    pub key: String,
    /// The decision that a peek would have made.
    pub decision: Decision,
    /// Whether there is any state; without, the key is as if never used.
    pub exists: bool,
    /// How long until Redis forgets it; none if it never would, or if there is no state.
    pub expires_after: Option<Duration>,
    /// The script's own numbers, named as in its header.
    pub fields: Vec<(&'static str, i64)>,
}

impl Limiter {
    /// A limiter on this engine, with the prefix `tollgate` and a deadline of 500 ms.
    pub fn new(engine: impl Into<Engine>) -> Self {
        Self { engine: engine.into(), prefix: "tollgate".into(), deadline: Duration::from_millis(500) }
    }

    /// Begins every key in Redis. Default: `tollgate`.
    ///
    /// # Errors
    ///
    /// An empty prefix, or one with braces.
    pub fn prefix(mut self, prefix: &str) -> Result<Self, Error> {
        self.prefix = key::checked_prefix(prefix)?.to_owned();
        Ok(self)
    }

    /// How long a decision may take, connecting included. Default: 500 ms.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Takes the cost now, or is denied and takes nothing.
    ///
    /// # Errors
    ///
    /// No decision could be made; see [`Error`].
    pub async fn acquire<'a>(&self, rule: &Rule, request: impl Into<Request<'a>>) -> Result<Decision, Error> {
        self.decide(rule, &request.into(), Mode::Acquire).await
    }

    /// What [`acquire`](Self::acquire) would answer, taking nothing; `remaining` and `reset_after` are those of the
    /// untouched key.
    ///
    /// # Errors
    ///
    /// No decision could be made; see [`Error`].
    pub async fn peek<'a>(&self, rule: &Rule, request: impl Into<Request<'a>>) -> Result<Decision, Error> {
        self.decide(rule, &request.into(), Mode::Peek).await
    }

    /// Forgets the key. Repairs state that can't be read.
    ///
    /// # Errors
    ///
    /// No answer; see [`Error`].
    pub async fn reset<'a>(&self, rule: &Rule, request: impl Into<Request<'a>>) -> Result<Decision, Error> {
        self.decide(rule, &request.into(), Mode::Reset).await
    }

    /// What the key's state means.
    ///
    /// # Errors
    ///
    /// No answer; see [`Error`].
    pub async fn inspect<'a>(&self, rule: &Rule, request: impl Into<Request<'a>>) -> Result<State, Error> {
        let request = request.into();
        let (key, reply) = self.run(rule, &request, Mode::Inspect).await?;
        let names = rule.limit().algorithm().state_fields();
        let [ttl_ms, fields @ ..] = reply.appended.as_slice() else {
            return Err(Error::new(Kind::Garbled, "inspect: expected a reply with the state appended"));
        };
        Ok(State {
            key: String::from_utf8_lossy(&key).into_owned(),
            decision: self.decision(&request, &reply),
            exists: *ttl_ms != -2,
            expires_after: u64::try_from(*ttl_ms).ok().map(Duration::from_millis),
            fields: names.iter().copied().zip(fields.iter().copied()).collect(),
        })
    }

    async fn decide(&self, rule: &Rule, request: &Request<'_>, mode: Mode) -> Result<Decision, Error> {
        let (_, reply) = self.run(rule, request, mode).await?;
        Ok(self.decision(request, &reply))
    }

    async fn run(&self, rule: &Rule, request: &Request<'_>, mode: Mode) -> Result<(Vec<u8>, Reply), Error> {
        let limit = rule.limit();
        let key = key::state_key(&self.prefix, request.key, request.key, rule.suffix())?;
        let call = Call {
            script: limit.algorithm().script(),
            key: &key,
            arguments: limit.arguments(),
            replaced: limit.spread().map(|(at, period)| (at, key::spread_offset(request.key, period))),
            cost: request.cost,
            mode,
            now_us: request.at.map(microseconds).transpose()?,
        };
        let reply = self.engine.run(&call, request.deadline.unwrap_or(self.deadline)).await?;
        Ok((key, reply))
    }

    fn decision(&self, request: &Request<'_>, reply: &Reply) -> Decision {
        Decision::from_reply(reply.decision, self.engine.by(), request.at.unwrap_or_else(SystemTime::now))
    }
}

impl<'a> Request<'a> {
    /// A request for this key, at a cost of 1. Any bytes will do, but not none.
    #[must_use]
    pub fn new(key: &'a (impl AsRef<[u8]> + ?Sized)) -> Self {
        Self { key: key.as_ref(), cost: 1, at: None, deadline: None }
    }

    /// Units that it takes. Default: 1; 0 takes nothing.
    #[must_use]
    pub fn cost(mut self, units: u64) -> Self {
        self.cost = units;
        self
    }

    /// Decides as if it were this time, from 1970 to 2112. Default: the engine's own clock.
    #[must_use]
    pub fn at(mut self, now: SystemTime) -> Self {
        self.at = Some(now);
        self
    }

    /// How long this call may take. Default: the limiter's deadline.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = Some(deadline);
        self
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
