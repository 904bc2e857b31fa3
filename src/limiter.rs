//! One call: rule + key + cost -> decision.

use std::time::{Duration, SystemTime};

use crate::algorithm::ALL_OR_NOTHING;
use crate::decision::{Decision, LimitDecision, RetryAfter};
use crate::engine::{Engine, Swept, Which};
use crate::error::{Error, Kind};
use crate::key;
use crate::limit::exact::EXACT;
use crate::random::jittered;
use crate::request::Request;
use crate::rule::{Count, Rule};
use crate::script::{Call, Marker, Mode, Part, Reply, Script};

/// Makes decisions. Cheap to clone, and shared between tasks by cloning or by reference.
///
/// Unless a method says otherwise, it costs one round trip to Redis: two where the server has lost its scripts, and more for the first call,
/// which connects.
#[derive(Clone, Debug)]
pub struct Limiter {
    engine: Engine,
    prefix: String,
    deadline: Duration,
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
    /// nothing. Whose the units were isn't known: what is given back after it came back by itself counts twice, so give
    /// back soon.
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

    /// Makes the cost what the call of this [id](Request::id) took in the end, once: more is charged, whether it is
    /// there or not (as far as the arithmetic stays exact), and less is given back.
    ///
    /// # Errors
    ///
    /// [`Error::is_unknown_id`] if nothing is remembered of the id; no answer, see [`Error`].
    pub async fn settle<'a>(&self, rule: &Rule, request: impl Into<Request<'a>>) -> Result<Decision, Error> {
        let request = request.into();
        if request.id.is_none() {
            return Err(Error::new(Kind::Input, "settle: expected the id of the call to settle, got none"));
        }
        self.decide(rule, &request, Mode::Settle).await
    }

    /// Gives back what the call of this [id](Request::id) took, and forgets the id.
    ///
    /// # Errors
    ///
    /// [`Error::is_unknown_id`] if nothing is remembered of the id; no answer, see [`Error`].
    pub async fn cancel<'a>(&self, rule: &Rule, request: impl Into<Request<'a>>) -> Result<Decision, Error> {
        let request = request.into();
        if request.id.is_none() {
            return Err(Error::new(Kind::Input, "cancel: expected the id of the call to cancel, got none"));
        }
        self.decide(rule, &request, Mode::Cancel).await
    }

    /// Forgets the key, and the request's id if it has one. Repairs state that can't be read.
    ///
    /// # Errors
    ///
    /// No answer; see [`Error`].
    pub async fn reset<'a>(&self, rule: &Rule, request: impl Into<Request<'a>>) -> Result<Decision, Error> {
        self.decide(rule, &request.into(), Mode::Reset).await
    }

    /// Forgets every key of the rule of this name, and every id, by scanning in small steps: `progress` is called after
    /// each with how far it has come. Returns how many keys were forgotten. Keys written meanwhile may stay.
    ///
    /// Costs two round trips per 500 keys of the whole database; in Redis `SCAN`, `UNLINK` and `DBSIZE`, which deciding
    /// doesn't need.
    ///
    /// # Errors
    ///
    /// A name that no rule can have; no answer, see [`Error`]. What was forgotten by then stays forgotten.
    pub async fn reset_all(&self, rule: &str, mut progress: impl FnMut(Progress)) -> Result<u64, Error> {
        key::checked_name(rule).map_err(|error| Error::new(Kind::Input, error.to_string()))?;
        let prefix = self.prefix.as_str();
        let glob = key::glob_of_rule(prefix, rule);
        let which =
            Which { glob: &glob, exactly: |which, key| key::is_of_rule(key, which.prefix, which.rule), prefix, rule };
        let mut so_far = Progress { keys: self.engine.size(self.deadline).await?, looked_at: 0, forgotten: 0 };
        let mut from = 0;
        loop {
            let Swept { next, looked_at, removed } = self.engine.sweep(from, &which, self.deadline).await?;
            so_far.looked_at = if next == 0 { so_far.keys } else { (so_far.looked_at + looked_at).min(so_far.keys) };
            so_far.forgotten += removed;
            progress(so_far);
            if next == 0 {
                return Ok(so_far.forgotten);
            }
            from = next;
        }
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
            let reply = self.run(part.script, std::slice::from_ref(&part), None, &request, Mode::Inspect).await?;
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
        let mut decision = self.decide_exactly(rule, request, mode).await?;
        if let (false, 1.., RetryAfter::After(wait)) = (decision.allowed, request.jitter, decision.retry_after) {
            decision.retry_after = RetryAfter::After(jittered(wait, request.jitter));
        }
        Ok(decision)
    }

    async fn decide_exactly(&self, rule: &Rule, request: &Request<'_>, mode: Mode) -> Result<Decision, Error> {
        let by = self.engine.by();
        let marker = match mode {
            Mode::Peek | Mode::Inspect => None,
            _ => self.marker(rule, request)?,
        };
        if let ([count], None) = (rule.counts(), &marker) {
            let part = self.part(rule, count, request)?;
            let reply = self.run(part.script, std::slice::from_ref(&part), None, request, mode).await?;
            let granted = granted(request, mode, reply.decision[0] == 1, reply.appended.first());
            return Ok(Decision::of_one(&count.title, reply.decision, granted, by, decided_at(request)));
        }
        let parts = rule.counts().iter().map(|count| self.part(rule, count, request)).collect::<Result<Vec<_>, _>>()?;
        let reply = self.run(&ALL_OR_NOTHING, &parts, marker.as_ref(), request, mode).await?;
        let (fives, rest) = reply.appended.as_chunks::<5>();
        if fives.len() + 1 != parts.len() {
            return Err(Error::new(Kind::Garbled, "expected a decision of each limit, got another count"));
        }
        let allowed = std::iter::once(&reply.decision).chain(fives).all(|reply| reply[0] == 1);
        let granted = granted(request, mode, allowed, rest.first());
        if let [count] = rule.counts() {
            return Ok(Decision::of_one(&count.title, reply.decision, granted, by, decided_at(request)));
        }
        let replies = std::iter::once(&reply.decision).chain(fives);
        let limits = rule.counts().iter().zip(replies).map(|(count, reply)| LimitDecision::new(&count.title, *reply));
        let whole = Decision::of_several(limits.collect(), granted, by, decided_at(request));
        whole.ok_or_else(|| Error::new(Kind::Garbled, "expected a decision of each limit, got none"))
    }

    /// By what this call is remembered, if it has an id.
    fn marker(&self, rule: &Rule, request: &Request<'_>) -> Result<Option<Marker>, Error> {
        let Some(id) = request.id else { return Ok(None) };
        if request.cost > EXACT {
            let got = request.cost;
            return Err(Error::new(Kind::Input, format!("cost: with an id, expected at most {EXACT}, got {got}")));
        }
        let tag = match rule.tag() {
            None => request.key,
            Some(tag) => request.counted(rule, Some(tag))?,
        };
        let key = key::marker_key(&self.prefix, tag, request.key, &rule.marker(), id)?;
        Ok(Some(Marker { key, ttl_ms: request.id_ttl_ms()? }))
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
        marker: Option<&Marker>,
        request: &Request<'_>,
        mode: Mode,
    ) -> Result<Reply, Error> {
        let call = Call { script, limits, marker, cost: request.cost, mode, now_us: request.now_us()? };
        self.engine.run(&call, request.deadline.unwrap_or(self.deadline)).await
    }
}

/// Units that a call took: as the script appends them, else the whole cost or nothing.
fn granted(request: &Request<'_>, mode: Mode, allowed: bool, appended: Option<&i64>) -> u64 {
    match (mode, appended) {
        (Mode::Refund | Mode::Reset | Mode::Cancel, _) => 0,
        (_, Some(granted)) => u64::try_from(*granted).unwrap_or(0),
        (Mode::Acquire | Mode::Reserve | Mode::Penalty, None) if allowed => request.cost,
        _ => 0,
    }
}

fn decided_at(request: &Request<'_>) -> SystemTime {
    request.at.unwrap_or_else(SystemTime::now)
}

/// How far [`Limiter::reset_all`] has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Progress {
    /// Keys in the database as it began, of all rules and programs.
    pub keys: u64,
    /// How many of them have been looked at, about.
    pub looked_at: u64,
    /// How many were the rule's, and have been forgotten.
    pub forgotten: u64,
}
