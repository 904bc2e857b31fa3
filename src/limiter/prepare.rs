//! A request as a script takes it: keys, arguments, and the holder of what it takes.

use super::Limiter;
use crate::algorithm::numbers::EXACT;
use crate::batch::Ask;
use crate::call::{LimitInput, Marker};
use crate::error::{Error, Kind};
use crate::key::{self, Key, Name};
use crate::operation::Operation;
use crate::request::{PlainRequest, Request};
use crate::rule::{Rule, ScopedLimit, Target};

impl Limiter {
    /// An acquire in the script's packed form, which is decided together with others, if the algorithm has one. For
    /// requests without an id, by rules without [options](Rule::options).
    pub(super) fn ask<'r>(
        &self,
        rule: &Rule,
        target: Target<'r>,
        request: &PlainRequest<'_>,
    ) -> Result<Option<Ask<'r>>, Error> {
        let now_us = request.now_us()?;
        let Some(numbers) = target.limit.packed(now_us, self.server_clock.ahead_us()) else { return Ok(None) };
        Ok(Some(Ask {
            script: target.limit.algorithm().script(),
            numbers,
            key: self.state_key(rule, target, request)?,
            cost: request.units(rule),
            now_us,
            most_keys: target.limit.algorithm().row().most_keys(),
            partition: 0,
            across_partitions: false,
        }))
    }

    /// The marker that remembers this call, if it has an id. Permits alone remember it themselves.
    pub(super) fn marker(
        &self,
        rule: &Rule,
        targets: &[Target<'_>],
        request: &Request<'_>,
        operation: Operation,
    ) -> Result<Option<Marker>, Error> {
        let remembers = !matches!(operation, Operation::Peek | Operation::Block | Operation::Renew);
        let Some(id) = request.id.filter(|_| remembers) else { return Ok(None) };
        if rule.limits().all(|limit| limit.algorithm().holds()) {
            return Ok(None);
        }
        let got = request.units(rule);
        if got > EXACT {
            return Err(Error::new(Kind::Input, format!("cost: with an id, expected at most {EXACT}, got {got}")));
        }
        let key = self.name(rule, request.key())?;
        let tag = (self.tag(rule, request.plain(), key)?, targets.first().and_then(|target| target.shard));
        let key = key::marker_key(&self.prefix, tag, key, &rule.marker(), id)?;
        Ok(Some(Marker { key, ttl_ms: request.id_ttl_ms()? }))
    }

    /// What a call takes of the rule's limits for this request.
    pub(super) fn limit_inputs<'r>(
        &self,
        rule: &Rule,
        targets: &[Target<'r>],
        request: &Request<'_>,
        operation: Operation,
    ) -> Result<Vec<LimitInput<'r>>, Error> {
        let holder = holder(targets, request, operation)?;
        targets.iter().map(|target| self.limit_input(rule, *target, request, &holder)).collect()
    }

    /// What a call takes of one limit of a rule for this request.
    pub(super) fn limit_input<'r>(
        &self,
        rule: &Rule,
        target: Target<'r>,
        request: &Request<'_>,
        holder: &[u8],
    ) -> Result<LimitInput<'r>, Error> {
        let limit = target.limit;
        Ok(LimitInput {
            key: self.state_key(rule, target, request.plain())?,
            script: limit.algorithm().script(),
            arguments: limit.arguments(request.now_us()?, self.server_clock.ahead_us()),
            windows: limit.windows(),
            replaced: match (limit.spread(), limit.holder()) {
                (Some((at, period)), _) => {
                    let name = self.name(rule, request.plain().counted(rule, target.scoped.by.as_deref())?)?;
                    Some((at, key::spread_offset(name.bytes(), period).to_string().into_bytes()))
                }
                (None, Some(at)) => Some((at, holder.to_vec())),
                (None, None) => None,
            },
        })
    }

    pub(super) fn state_key(&self, rule: &Rule, target: Target<'_>, request: &PlainRequest<'_>) -> Result<Key, Error> {
        if rule.name().is_none() {
            let why = "rules without a name would share their keys (Rule::named)";
            return Err(Error::new(Kind::Input, format!("rule {rule}: expected a name, got none: {why}")));
        }
        let Target { scoped, shard, .. } = target;
        let key = self.name(rule, request.counted(rule, scoped.by.as_deref())?)?;
        Ok(key::state_key(&self.prefix, (self.tag(rule, request, key)?, shard), key, &scoped.suffix))
    }

    /// The tag that groups the keys of a decision: this key, unless the rule says otherwise.
    fn tag<'a>(&self, rule: &Rule, request: &PlainRequest<'a>, key: Name<'a>) -> Result<Name<'a>, Error> {
        match rule.tag() {
            None => Ok(key),
            Some(tag) => self.name(rule, request.counted(rule, Some(tag))?),
        }
    }

    /// Hashed if the rule or, by default, the limiter says so.
    fn name<'a>(&self, rule: &Rule, counted: &'a [u8]) -> Result<Name<'a>, Error> {
        let secret = self.key_secret.as_ref();
        if rule.hashes_keys() == Some(true) && secret.is_none() {
            let why = "expected a limiter with a secret to hash its keys by (Limiter::key_secret), got one without";
            return Err(Error::new(Kind::Input, format!("rule {}: {why}", rule.name().unwrap_or_default())));
        }
        Name::new(counted, secret.filter(|_| rule.hashes_keys() != Some(false)))
    }
}

/// The limits that such a call applies to.
pub(super) fn concerned<'r>(
    rule: &'r Rule,
    operation: Operation,
    request: &Request<'_>,
) -> Result<Vec<Target<'r>>, Error> {
    let (which, expected): (fn(&ScopedLimit) -> bool, _) = match operation {
        // Lifts the blocks of all limits, since a denial may have blocked their keys too.
        Operation::Block if request.units(rule) == 0 => (|_| true, "a limit"),
        Operation::Block => (|scoped| scoped.by.is_none(), "a limit that counts the request's key"),
        Operation::Renew | Operation::Release => (|scoped| scoped.limit.algorithm().holds(), "a concurrency limit"),
        _ => (|_| true, "a limit"),
    };
    let targets: Vec<_> = rule.scoped_limits().iter().filter(|scoped| which(scoped)).map(ScopedLimit::whole).collect();
    if targets.is_empty() {
        return Err(Error::new(Kind::Input, format!("{}: expected {expected}, got {rule}", operation.name())));
    }
    Ok(targets)
}

/// The id that permits are held by; empty if the call neither takes nor gives back any.
fn holder(targets: &[Target<'_>], request: &Request<'_>, operation: Operation) -> Result<Key, Error> {
    let Some(permits) = targets.iter().find(|target| target.limit.holder().is_some()) else {
        return Ok(Key::new());
    };
    match request.id {
        Some(id) => key::holder(id),
        None if matches!(operation, Operation::Peek | Operation::Block | Operation::Reset) => Ok(Key::new()),
        None => {
            let expected = match operation {
                Operation::Refund => "the id that holds the permits",
                _ => "an id (Request::id) to give its permits back by, or a call of Limiter::hold, which makes one",
            };
            let (operation, limit) = (operation.name(), &permits.scoped.limit);
            Err(Error::new(Kind::Input, format!("{operation} of {limit}: expected {expected}, got none")))
        }
    }
}
