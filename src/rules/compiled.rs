//! One rule of a set, validated and ready to be applied.

use std::num::NonZeroU16;
use std::sync::Arc;
use std::time::Duration;

use super::account::{KEY_LIMITS, USER_LIMITS};
use super::attributes::Attributes;
use super::condition::Condition;
use super::definition::{Action, Cost, Definition, OneOrMore, Reading};
use super::error::Field;
use super::names::GLOBAL;
use super::statuses::Statuses;
use super::throttle::{Limits, Refusal, Throttle};
use crate::rule::fields::time;

/// Names that no rule can have, since tollgate itself counts by them under the same keys: limits of single users and of
/// API keys, and look-ups of keys.
const RESERVED: [&str; 3] = [USER_LIMITS, KEY_LIMITS, "api-key-look-ups"];

/// The statuses of denials that aren't about the rate.
const FORBIDDEN: NonZeroU16 = NonZeroU16::new(403).unwrap();
const BAD_REQUEST: NonZeroU16 = NonZeroU16::new(400).unwrap();

#[derive(Debug)]
pub(super) struct Compiled {
    pub(super) name: Arc<str>,
    pub(super) conditions: Box<[Condition]>,
    pub(super) shadow: bool,
    /// Whether the next rule that matches applies as well.
    pub(super) continues: bool,
    pub(super) action: CompiledAction,
    /// By which statuses of responses requests stay charged, if not by all.
    pub(super) counted: Option<Statuses>,
    pub(super) response: Response,
    /// For a denial that isn't about the rate: by a rule that blocks, or of a key that is blocked.
    pub(super) response_if_blocked: Response,
    /// For a request that lacks what the rule counts by: retrying doesn't help.
    pub(super) response_if_missing: Response,
}

/// How to answer a request that a rule denies.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Response {
    /// The HTTP status.
    pub status: NonZeroU16,
    /// The message.
    pub message: Option<Arc<str>>,
    /// The wait to report instead of the true one.
    pub retry_after: Option<Duration>,
}

#[derive(Debug)]
pub(super) enum CompiledAction {
    Throttle(Box<Throttle>),
    Block,
    Allow,
}

impl Compiled {
    pub(super) fn new(definition: &Definition, reading: Reading, limits: &mut Limits) -> Result<Self, Refusal> {
        let name =
            crate::key::checked_name(&definition.name).map_err(|error| (Field::named("name"), error.to_string()))?;
        if RESERVED.contains(&name) {
            let why = format!("name: expected none of the reserved names ({}), got {name:?}", RESERVED.join(", "));
            return Err((Field::named("name"), why));
        }
        let conditions = definition.conditions.iter().map(|(attribute, values)| {
            let at = Field::named("match").entry(attribute);
            let odd = |character: char| character.is_whitespace() || character.is_control();
            if attribute.is_empty() || attribute == GLOBAL || attribute.contains(odd) {
                return Err((at, format!("match: expected the name of an attribute, got {attribute:?}")));
            }
            Condition::new(attribute, &values.0, reading)
                .map_err(|(index, why)| (at.item(index), format!("{attribute}: {why}")))
        });
        let conditions = conditions.collect::<Result<Box<[_]>, _>>()?;
        let action = match definition.action {
            Action::Throttle => CompiledAction::Throttle(Box::new(Throttle::new(definition, reading, limits)?)),
            other => {
                only_for_limits(definition)?;
                if other == Action::Block { CompiledAction::Block } else { CompiledAction::Allow }
            }
        };
        let counted = counted(definition, &action)?;
        let response = Response::new(definition, 429)?;
        let otherwise = |default| {
            let status = if definition.status.is_some() { response.status } else { default };
            Response { status, ..response.clone() }
        };
        let response_if_blocked = otherwise(FORBIDDEN);
        let response_if_missing = otherwise(BAD_REQUEST);
        let shadow = definition.shadow.unwrap_or_default();
        let continues = definition.continues;
        if shadow && continues {
            let why = "continue: a shadow rule can't have it, since the next rule applies in any case";
            return Err((Field::named("continue"), why.into()));
        }
        let name = name.into();
        Ok(Self {
            name,
            conditions,
            shadow,
            continues,
            action,
            counted,
            response,
            response_if_blocked,
            response_if_missing,
        })
    }

    /// Why it doesn't apply to this request, if it doesn't.
    pub(super) fn passes_over(&self, request: &Attributes<'_>) -> Option<String> {
        if let Some(condition) = self.conditions.iter().find(|condition| !condition.holds(request)) {
            let got = request.compared(condition.attribute());
            let got = got.as_deref().map_or("none".into(), String::from_utf8_lossy);
            return Some(format!("applies to {condition}, but the request has {got}"));
        }
        match &self.action {
            CompiledAction::Throttle(throttle) if throttle.skips => throttle
                .skipped(request)
                .map(|attribute| format!("counts by {attribute}, and skips requests without it")),
            _ => None,
        }
    }

    /// Whether it applies to this request, for which this condition is known to hold.
    pub(super) fn applies(&self, request: &Attributes<'_>, known: Option<u8>) -> bool {
        let known = known.map(usize::from);
        let mut others = self.conditions.iter().enumerate().filter(|(at, _)| Some(*at) != known);
        others.all(|(_, condition)| condition.holds(request)) && !self.skips(request)
    }

    /// Whether it might apply to this request, which lacks this attribute, if the request had one.
    #[cfg(feature = "http")]
    pub(super) fn misses(&self, attribute: &str, request: &Attributes<'_>) -> bool {
        let (by_it, mut others): (Vec<_>, Vec<_>) =
            self.conditions.iter().partition(|condition| condition.attribute() == attribute);
        others.retain(|condition| !condition.holds(request));
        let skips_for_it = match &self.action {
            CompiledAction::Throttle(throttle) if throttle.skips => throttle.skipped(request) == Some(attribute),
            _ => false,
        };
        others.is_empty() && (!by_it.is_empty() || skips_for_it)
    }

    /// Whether rules after it apply to what it matches.
    pub(super) fn lets_through(&self) -> bool {
        self.shadow || self.continues
    }

    /// Whether it applies only to requests that have everything that it counts by.
    pub(super) fn may_skip(&self) -> bool {
        matches!(&self.action, CompiledAction::Throttle(throttle) if throttle.skips)
    }

    fn skips(&self, request: &Attributes<'_>) -> bool {
        matches!(&self.action, CompiledAction::Throttle(throttle) if throttle.skips && throttle.skipped(request).is_some())
    }

    /// Whether the other rule, which comes first, leaves this one nothing to apply to.
    pub(super) fn is_hidden_by(&self, other: &Self) -> bool {
        !other.lets_through()
            && !other.may_skip()
            && other.conditions.iter().all(|condition| condition.follows_from(&self.conditions))
    }
}

impl Response {
    fn new(definition: &Definition, default: u16) -> Result<Self, Refusal> {
        let got = definition.status.unwrap_or(default);
        let status = NonZeroU16::new(got).filter(|_| (400..=599).contains(&got)).ok_or_else(|| {
            (Field::named("status"), format!("status: expected an HTTP status from 400 to 599, got {got}"))
        })?;
        let message = definition.message.as_deref().map(Arc::from);
        let retry_after = definition.retry_after.as_deref().map(|text| time("retry_after", text)).transpose()?;
        Ok(Self { status, message, retry_after })
    }
}

/// The statuses by which requests stay charged, if the rule says.
fn counted(definition: &Definition, action: &CompiledAction) -> Result<Option<Statuses>, Refusal> {
    let (CompiledAction::Throttle(throttle), Some(OneOrMore(patterns))) = (action, &definition.count) else {
        return Ok(None);
    };
    if throttle.rule().limits().all(|limit| limit.algorithm().holds()) {
        let why = "count: expected a limit that counts requests, since permits are released with the response, got";
        return Err((Field::named("count"), format!("{why} {}", throttle.rule())));
    }
    if patterns.is_empty() {
        return Err((Field::named("count"), "count: the list is empty: write at least one status, such as 401".into()));
    }
    Statuses::read(patterns).map(Some).map_err(|(index, why)| (Field::named("count").item(index), why))
}

/// Rejects fields that only rules with limits may have.
fn only_for_limits(definition: &Definition) -> Result<(), Refusal> {
    let Definition { key, limits, tag, cost, count, overrides, block, allow, .. } = definition;
    let says = [
        ("key", !key.0.is_empty()),
        ("limits", !limits.is_empty()),
        ("tag", tag.is_some()),
        ("cost", *cost != Cost::default()),
        ("min_cost", definition.min_cost.is_some()),
        ("count", count.is_some()),
        ("continue", definition.continues),
        ("max_hold", definition.max_hold.is_some()),
        ("overrides", !overrides.is_empty()),
        ("block", !block.is_empty()),
        ("allow", !allow.is_empty()),
        ("missing", definition.missing.is_some()),
        ("ipv6_prefix", definition.ipv6_prefix.is_some()),
        ("block_for", definition.block_for.is_some()),
        ("on_error", definition.on_error.is_some()),
        ("processes", definition.processes.is_some()),
        ("on_change", definition.on_change.is_some()),
        ("overage", definition.overage.is_some()),
        ("hash_keys", definition.hash_keys.is_some()),
    ];
    let answers = [
        ("status", definition.status.is_some()),
        ("message", definition.message.is_some()),
        ("retry_after", definition.retry_after.is_some()),
    ];
    let action = if definition.action == Action::Block { "block" } else { "allow" };
    let more = if definition.action == Action::Allow { &answers[..] } else { &[] };
    match says.iter().chain(more).find(|(_, said)| *said) {
        Some((field, _)) => {
            Err((Field::named(field), format!("{field}: a rule whose action is {action} can't have it")))
        }
        None => Ok(()),
    }
}
