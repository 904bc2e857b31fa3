//! A request in the form that scripts take: its limits, their keys and numbers, and what is asked of them.

use std::borrow::Cow;
use std::sync::Arc;

use smallvec::SmallVec;

use super::handle::Limiter;
use crate::algorithm::numbers::EXACT;
use crate::call::{Ask, Costs, Mode, Terms};
use crate::engine::cluster::slot_of;
use crate::error::{Error, Kind};
use crate::key::{self, Key, Name};
use crate::operation::Operation;
use crate::request::{PlainRequest, Request};
use crate::rule::{Rule, ScopedLimit, Target};
use crate::script::Script;

/// The limits that decide a call.
pub(super) type Targets<'r> = SmallVec<[Target<'r>; 1]>;

impl Limiter {
    /// What to ask of these limits for this request, with calendar windows around the server's time if that is given.
    pub(super) fn ask_for<'r>(
        &self,
        rule: &Rule,
        targets: &[Target<'r>],
        request: &Request<'_>,
        mode: Mode,
        server_us: Option<u64>,
    ) -> Result<Ask<'r>, Error> {
        let now_us = request.now_us()?;
        request.plain().check_costs(rule)?;
        let limits = targets.iter().map(|target| target.scoped);
        let costs = match mode {
            Mode::Call(Operation::Refund) => request.units_to_give_back(rule, limits),
            _ => request.plain().units_of(rule, limits),
        };
        let mut keys: SmallVec<[Key; 1]> = SmallVec::with_capacity(targets.len());
        for target in targets {
            keys.push(self.state_key(rule, *target, request.plain())?);
        }
        let mut terms = Terms { options: rule.options(), ..Terms::of(mode) };
        if let Mode::Call(operation) = mode {
            terms.within_us = request.within_us().filter(|_| matches!(operation, Operation::Reserve | Operation::Peek));
            if operation == Operation::Refund {
                let now = || request.time().unwrap_or_else(|| self.now());
                terms.taken = request.taken(targets.iter().map(|target| &*target.scoped.quota), now);
            }
            if let Some(marker) = self.marker(rule, targets, request, (operation, &costs), &keys)? {
                keys.push(marker);
                terms.id_ttl_ms = Some(request.id_ttl_ms()?);
            }
        }
        if self.engine.is_cluster() && rule.is_joined() && rule.limits().any(|limit| limit.shards() > 1) {
            let names: Vec<_> = rule.each().iter().filter_map(Rule::name).collect();
            let why = "on a cluster, rules that apply together can't have limits with shards";
            return Err(Error::new(Kind::Input, format!("rule {}: {why}", names.join(" + "))));
        }
        let holder = match mode {
            Mode::Call(operation) => holder(targets, request, operation)?,
            Mode::Inspect => targets.iter().any(|target| target.limit.algorithm().holds()).then(Box::default),
        };
        let algorithms = targets.iter().map(|target| target.limit.algorithm());
        Ok(Ask {
            script: Script::for_algorithms(algorithms.clone()),
            numbers: self.numbers(rule, targets, request, now_us, server_us)?,
            keys,
            holder,
            costs,
            terms,
            now_us,
            most_keys: algorithms.map(|algorithm| algorithm.row().most_keys()).min().unwrap_or(1),
            partition: 0,
            across_partitions: false,
        })
    }

    /// The packed numbers of these limits.
    fn numbers<'r>(
        &self,
        rule: &Rule,
        targets: &[Target<'r>],
        request: &Request<'_>,
        now_us: Option<u64>,
        server_us: Option<u64>,
    ) -> Result<Cow<'r, Arc<[u8]>>, Error> {
        let of = |target: &Target<'r>| {
            Ok(match (target.limit.spread(), target.limit.windows(), server_us) {
                (Some(period), ..) => {
                    let own = rule.rule_of(target.scoped);
                    let name = self.name(own, request.plain().counted(own, target.scoped.by.as_deref())?)?;
                    Cow::Owned(target.limit.packed_with_start(key::spread_offset(name.bytes(), period)))
                }
                (_, Some(windows), Some(server_us)) => {
                    Cow::Owned(Arc::clone(&windows.around_server_time(server_us).packed))
                }
                _ => target.limit.packed(now_us, self.server_clock.ahead_us()),
            })
        };
        match targets {
            // A part of rules that apply together has its own rule's options.
            [target] if rule.own_options(target.scoped).is_none() => of(target),
            targets => {
                let mut all = Vec::with_capacity(40 * targets.len());
                for target in targets {
                    all.extend_from_slice(&of(target)?);
                    if let Some(own) = rule.own_options(target.scoped) {
                        own.pack(&mut all);
                    }
                }
                Ok(Cow::Owned(all.into()))
            }
        }
    }

    /// The marker that remembers this call, if it has an id, in the slot of these keys. A rule of permits alone needs
    /// none: they remember it.
    fn marker(
        &self,
        rule: &Rule,
        targets: &[Target<'_>],
        request: &Request<'_>,
        (operation, costs): (Operation, &Costs),
        keys: &[Key],
    ) -> Result<Option<Key>, Error> {
        let remembers = !matches!(operation, Operation::Peek | Operation::Block | Operation::Renew);
        let Some(id) = request.plain().id.filter(|_| remembers) else { return Ok(None) };
        if rule.limits().all(|limit| limit.algorithm().holds()) {
            return Ok(None);
        }
        let got = costs.most();
        if got > EXACT {
            return Err(Error::new(Kind::Input, format!("cost: with an id, expected at most {EXACT}, got {got}")));
        }
        let shard = targets.first().and_then(|target| target.shard);
        let marker = rule.marker(|scoped, part| {
            let own = rule.rule_of(scoped);
            self.name(own, request.plain().counted(own, Some(part))?)
        })?;
        let beside = |own: &Rule, counted| {
            let key = self.name(own, counted)?;
            let tag = (self.tag(own, request.plain(), key)?, shard);
            key::marker_key(&self.prefix, tag, key, &marker, id)
        };
        let marker = beside(rule, request.key())?;
        match (targets, keys) {
            // The first limit counts something else, in a slot of its own.
            ([first, ..], [key, ..]) if self.engine.is_cluster() && slot_of(key) != slot_of(&marker) => {
                let own = rule.rule_of(first.scoped);
                beside(own, request.plain().counted(own, first.scoped.by.as_deref())?).map(Some)
            }
            _ => Ok(Some(marker)),
        }
    }

    pub(super) fn state_key(&self, rule: &Rule, target: Target<'_>, request: &PlainRequest<'_>) -> Result<Key, Error> {
        if rule.name().is_none() {
            let why = "its name is missing: rules without one would share their keys (Rule::named)";
            return Err(Error::new(Kind::Input, format!("rule {rule}: {why}")));
        }
        let Target { scoped, shard, .. } = target;
        let rule = rule.rule_of(scoped);
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
            let why = "it hashes its keys, and the limiter has no secret (LimiterBuilder::key_secret)";
            return Err(Error::new(Kind::Input, format!("rule {}: {why}", rule.name().unwrap_or_default())));
        }
        Name::new(counted, secret.filter(|_| rule.hashes_keys() != Some(false)))
    }
}

/// The limits that such a call applies to.
pub(super) fn concerned<'r>(rule: &'r Rule, request: &Request<'_>, operation: Operation) -> Result<Targets<'r>, Error> {
    let (which, expected): (fn(&ScopedLimit) -> bool, _) = match operation {
        // Lifts the blocks of all limits, since a denial may have blocked their keys too.
        Operation::Block if request.units(rule).of_all() == Some(0) => (|_| true, "a limit"),
        Operation::Block => (|scoped| scoped.counts_key, "a limit that counts the request's key"),
        Operation::Renew | Operation::Release => (|scoped| scoped.limit.algorithm().holds(), "a concurrency limit"),
        _ => (|_| true, "a limit"),
    };
    let targets: Targets<'_> =
        rule.scoped_limits().iter().filter(|scoped| which(scoped)).map(ScopedLimit::whole).collect();
    if targets.is_empty() {
        return Err(Error::new(Kind::Input, format!("{}: expected {expected}, got {rule}", operation.name())));
    }
    Ok(targets)
}

/// The id that permits are held by, if a limit has permits: empty if the call neither takes nor gives back any.
pub(super) fn holder(
    targets: &[Target<'_>],
    request: &Request<'_>,
    operation: Operation,
) -> Result<Option<Box<[u8]>>, Error> {
    let Some(permits) = targets.iter().find(|target| target.limit.algorithm().holds()) else {
        return Ok(None);
    };
    match request.plain().id {
        Some(id) => key::holder(id).map(|holder| Some(holder.as_slice().into())),
        None if matches!(operation, Operation::Peek | Operation::Block | Operation::Reset) => Ok(Some(Box::default())),
        None => {
            let missing = match operation {
                Operation::Refund => "the id that holds the permits is missing (Request::id)",
                _ => "the id to release its permits by is missing (Request::id; Limiter::hold makes one)",
            };
            let (operation, limit) = (operation.name(), &permits.scoped.limit);
            Err(Error::new(Kind::Input, format!("{operation} of {limit}: {missing}")))
        }
    }
}
