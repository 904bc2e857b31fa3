//! One call: rule + key + cost -> decision.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::algorithm::ALL_OR_NOTHING;
use crate::decision::{Decision, LimitDecision};
use crate::engine::Engine;
use crate::error::{Error, Kind};
use crate::key;
use crate::rule::{Count, Rule};
use crate::script::{Call, Mode, Part, Reply, Script};

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
    parts: &'a [(&'a str, &'a [u8])],
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

    /// Takes the cost now for later: allowed with a wait, after which it may run. The level may go below zero by the
    /// rule's `max-debt`; later callers see that.
    ///
    /// # Errors
    ///
    /// No decision could be made; see [`Error`]. A sliding window or log can't reserve.
    pub async fn reserve<'a>(&self, rule: &Rule, request: impl Into<Request<'a>>) -> Result<Decision, Error> {
        if let Some(limit) = rule.limits().find(|limit| !limit.algorithm().reserves()) {
            let why = "expected a token bucket, gcra or fixed window, which can owe units";
            return Err(Error::new(Kind::Input, format!("reserve: {why}, got {limit}")));
        }
        self.decide(rule, &request.into(), Mode::Reserve).await
    }

    /// Takes what there is, up to the cost: [`Decision::granted`] says how much. Denied if there is nothing.
    ///
    /// # Errors
    ///
    /// No decision could be made; see [`Error`].
    pub async fn at_most<'a>(&self, rule: &Rule, request: impl Into<Request<'a>>) -> Result<Decision, Error> {
        self.decide(rule, &request.into(), Mode::AtMost).await
    }

    /// Gives the cost back, never above full. In windows and logs the newest units go first, and what has expired gives
    /// nothing.
    ///
    /// # Errors
    ///
    /// No answer; see [`Error`].
    pub async fn refund<'a>(&self, rule: &Rule, request: impl Into<Request<'a>>) -> Result<Decision, Error> {
        self.decide(rule, &request.into(), Mode::Refund).await
    }

    /// Takes the cost whether it is there or not. [`refund`](Self::refund) forgives it.
    ///
    /// # Errors
    ///
    /// No answer; see [`Error`].
    pub async fn penalty<'a>(&self, rule: &Rule, request: impl Into<Request<'a>>) -> Result<Decision, Error> {
        self.decide(rule, &request.into(), Mode::Penalty).await
    }

    /// Forgets the key. Repairs state that can't be read.
    ///
    /// # Errors
    ///
    /// No answer; see [`Error`].
    pub async fn reset<'a>(&self, rule: &Rule, request: impl Into<Request<'a>>) -> Result<Decision, Error> {
        self.decide(rule, &request.into(), Mode::Reset).await
    }

    /// What the state of each of the rule's limits means, in their order. A round trip for each.
    ///
    /// # Errors
    ///
    /// No answer; see [`Error`].
    pub async fn inspect<'a>(&self, rule: &Rule, request: impl Into<Request<'a>>) -> Result<Vec<State>, Error> {
        let request = request.into();
        let mut states = Vec::new();
        for count in rule.counts() {
            let part = self.part(rule, count, &request)?;
            let reply = self.run(part.script, std::slice::from_ref(&part), &request, Mode::Inspect).await?;
            let [ttl_ms, fields @ ..] = reply.appended.as_slice() else {
                return Err(Error::new(Kind::Garbled, "inspect: expected a reply with the state appended"));
            };
            let names = count.limit.algorithm().state_fields();
            let decision = Decision::of_one(&count.title, reply.decision, 0, self.engine.by(), decided_at(&request));
            states.push(State {
                key: String::from_utf8_lossy(&part.key).into_owned(),
                decision,
                exists: *ttl_ms != -2,
                expires_after: u64::try_from(*ttl_ms).ok().map(Duration::from_millis),
                fields: names.iter().copied().zip(fields.iter().copied()).collect(),
            });
        }
        Ok(states)
    }

    async fn decide(&self, rule: &Rule, request: &Request<'_>, mode: Mode) -> Result<Decision, Error> {
        let by = self.engine.by();
        if let [count] = rule.counts() {
            let part = self.part(rule, count, request)?;
            let reply = self.run(part.script, std::slice::from_ref(&part), request, mode).await?;
            let granted = granted(request, mode, reply.decision[0] == 1, reply.appended.first());
            return Ok(Decision::of_one(&count.title, reply.decision, granted, by, decided_at(request)));
        }
        let parts = rule.counts().iter().map(|count| self.part(rule, count, request)).collect::<Result<Vec<_>, _>>()?;
        let reply = self.run(&ALL_OR_NOTHING, &parts, request, mode).await?;
        let (fives, rest) = reply.appended.as_chunks::<5>();
        let replies = std::iter::once(&reply.decision).chain(fives);
        let limits: Vec<_> =
            rule.counts().iter().zip(replies).map(|(count, reply)| LimitDecision::new(&count.title, *reply)).collect();
        let allowed = limits.iter().all(|limit| limit.allowed);
        let granted = granted(request, mode, allowed, rest.first());
        let whole =
            Decision::of_several(limits, granted, by, decided_at(request)).filter(|_| fives.len() + 1 == parts.len());
        whole.ok_or_else(|| Error::new(Kind::Garbled, "expected a decision of each limit, got fewer"))
    }

    /// One limit of a rule, as a script is called for this request.
    fn part<'r>(&self, rule: &'r Rule, count: &'r Count, request: &Request<'_>) -> Result<Part<'r>, Error> {
        let key = request.counted(rule, count.by.as_deref())?;
        let tag = match rule.tag() {
            None => key,
            Some(tag) => request.counted(rule, Some(tag))?,
        };
        let limit = &count.limit;
        Ok(Part {
            key: key::state_key(&self.prefix, tag, key, &count.suffix)?,
            script: limit.algorithm().script(),
            arguments: limit.arguments(),
            replaced: limit.spread().map(|(at, period)| (at, key::spread_offset(key, period))),
        })
    }

    async fn run(
        &self,
        script: &'static Script,
        limits: &[Part<'_>],
        request: &Request<'_>,
        mode: Mode,
    ) -> Result<Reply, Error> {
        let now_us = request.at.map(microseconds).transpose()?;
        let call = Call { script, limits, cost: request.cost, mode, now_us };
        self.engine.run(&call, request.deadline.unwrap_or(self.deadline)).await
    }
}

/// Units that a call took.
fn granted(request: &Request<'_>, mode: Mode, allowed: bool, appended: Option<&i64>) -> u64 {
    match mode {
        Mode::Acquire | Mode::Reserve | Mode::Penalty if allowed => request.cost,
        Mode::AtMost => appended.and_then(|granted| u64::try_from(*granted).ok()).unwrap_or(0),
        _ => 0,
    }
}

fn decided_at(request: &Request<'_>) -> SystemTime {
    request.at.unwrap_or_else(SystemTime::now)
}

impl<'a> Request<'a> {
    /// A request for this key, at a cost of 1. Any bytes will do, but not none.
    #[must_use]
    pub fn new(key: &'a (impl AsRef<[u8]> + ?Sized)) -> Self {
        Self { key: key.as_ref(), parts: &[], cost: 1, at: None, deadline: None }
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

impl Request<'_> {
    /// What a limit counts: the part of this name, or the key.
    fn counted(&self, rule: &Rule, part: Option<&str>) -> Result<&[u8], Error> {
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
