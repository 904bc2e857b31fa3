//! Which requests count together, and by which key.

use std::borrow::Cow;

use anyhow::Result;
use tollgate::Limit;
use tollgate::rules::{Applies, Attributes, Effect, RuleSet};

use crate::attributes;
use crate::held::ByResponse;
use crate::records::{Identity, KeyField, Record, counted};
use crate::verdict::counted_keys;

/// How records are counted.
#[derive(Debug)]
pub(super) enum Counting {
    /// By the record's key; in an access log, by the client's address.
    Key,
    /// By an attribute, separately for each value of another one if that is given.
    Attribute { key: String, each: Option<String> },
    /// As a service's rules count, including shadow rules.
    Rules(RuleSet),
}

/// Which requests share a limit.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Place {
    /// All requests.
    Anywhere,
    /// Those with this value of the attribute.
    Value(Vec<u8>),
    /// Those of the rule of this name, by one of its limits.
    Rule { name: String, at: usize },
}

/// A limit of a rule as it is.
#[derive(Clone, Debug)]
pub(super) struct Present {
    pub(super) limit: Limit,
    /// What it counts, if that isn't the rule's key.
    pub(super) part: Option<String>,
}

impl Place {
    /// The name of its rule, if it belongs to one.
    pub(super) fn rule(&self) -> Option<&str> {
        match self {
            Self::Rule { name, .. } => Some(name),
            Self::Anywhere | Self::Value(_) => None,
        }
    }

    /// The position of its rule among these names, and that of its limit.
    pub(super) fn in_order(&self, names: &[&str]) -> (Option<usize>, usize) {
        match self {
            Self::Rule { name, at } => (names.iter().position(|other| other == name), *at),
            Self::Anywhere | Self::Value(_) => (None, 0),
        }
    }
}

impl Counting {
    /// What the source is read for.
    pub(super) fn identity(&self) -> Identity {
        match self {
            Self::Key => Identity::Key(KeyField::Ip),
            Self::Attribute { .. } | Self::Rules(_) => Identity::Attributes,
        }
    }

    /// Calls back with each key that the record counts for and its cost; the error says why there is none.
    pub(super) fn counted(
        &self,
        record: &Record,
        mut count: impl FnMut(&Place, Option<Present>, &[u8], u64) -> Result<()>,
    ) -> Result<Result<(), String>> {
        let cost = record.cost.unwrap_or(1);
        match self {
            Self::Key => count(&Place::Anywhere, None, &record.key, cost).map(Ok),
            Self::Attribute { key, each } => {
                // An address, as rules by ip count it.
                let value = |name: &str| {
                    let (_, value) = record.attributes.iter().find(|(own, _)| own == name)?;
                    let address = if name == "ip" { Attributes::new().set(name, value).address() } else { None };
                    Some(address.map_or(Cow::Borrowed(value), |address| Cow::Owned(counted(address))))
                };
                let Some(counted) = value(key) else { return Ok(Err(format!("no {key}"))) };
                let place = match each.as_deref().map(|each| value(each).ok_or(each)) {
                    None => Place::Anywhere,
                    Some(Ok(value)) => Place::Value(value.into_owned()),
                    Some(Err(each)) => return Ok(Err(format!("no {each}"))),
                };
                count(&place, None, &counted, cost).map(Ok)
            }
            Self::Rules(rules) => by_rules(rules, record, count),
        }
    }
}

fn by_rules(
    rules: &RuleSet,
    record: &Record,
    mut count: impl FnMut(&Place, Option<Present>, &[u8], u64) -> Result<()>,
) -> Result<Result<(), String>> {
    let request = attributes::read(&record.attributes);
    if rules.reads_two_ways(&request) {
        return Ok(Err("a path that can be read in two ways".to_owned()));
    }
    for shadow in rules.shadows(&request) {
        // A shadow rule that leaves it out doesn't matter to the rule that decides.
        let _left_out = by_rule(rules, &shadow, record, &mut count)?;
    }
    match rules.applies(&request) {
        Ok(applies) if matches!(applies.effect, Effect::Limit(_)) && !applies.together.is_empty() => {
            let mut counted = Vec::new();
            for own in applies.together.iter().filter(|own| matches!(own.effect, Effect::Limit(_))) {
                counted.push(by_rule(rules, own, record, &mut count)?);
            }
            // The record is counted if any of them counts it.
            Ok(counted.iter().find(|by_one| by_one.is_ok()).or(counted.first()).cloned().unwrap_or(Ok(())))
        }
        Ok(applies) => by_rule(rules, &applies, record, count),
        Err(error) if error.is_input() => Ok(Err("attributes that the rule can't use".to_owned())),
        Err(error) => Err(error.into()),
    }
}

/// Counts the record by a rule, if that has limits for it.
fn by_rule(
    rules: &RuleSet,
    applies: &Applies<'_>,
    record: &Record,
    mut count: impl FnMut(&Place, Option<Present>, &[u8], u64) -> Result<()>,
) -> Result<Result<(), String>> {
    let left_out = |why: &str| Ok(Err(why.to_owned()));
    let charge = match &applies.effect {
        Effect::Limit(charge) => charge,
        Effect::Missing(name) => return Ok(Err(format!("no {name}"))),
        Effect::Block => return left_out("a rule that blocks"),
        _ => return left_out("no rule that limits"),
    };
    if applies.overridden.is_some() {
        return left_out("an override");
    }
    // Its units are given back with the response.
    if matches!(ByResponse::of(charge, charge.request(), record), ByResponse::GivenBack(_)) {
        return left_out("a response that its rule doesn't count");
    }
    // How much it denies depends on the length of its blocks, whatever its numbers.
    if charge.rule().blocks_for().is_some() {
        return left_out("a rule that blocks the keys it denies");
    }
    let rule = charge.rule();
    let (keys, costs) = (counted_keys(charge), charge.costs(record.cost));
    let limits = rule.limits().zip(rule.counted_parts()).zip(keys.iter().zip(costs));
    let name = applies.rule.unwrap_or_default();
    // Some limits may not apply to this request.
    let all: Vec<_> = rules.rule(name).map(|rule| rule.limits().collect()).unwrap_or_default();
    for ((limit, part), (key, cost)) in limits {
        let at = all.iter().position(|one| *one == limit).unwrap_or_default();
        let place = Place::Rule { name: name.to_owned(), at };
        count(&place, Some(Present { limit: limit.clone(), part: part.map(str::to_owned) }), key, cost)?;
    }
    Ok(Ok(()))
}
