//! A rule's limits as its definition has them, and the fields that say what they take and count by.

use std::sync::Arc;

use crate::limit::Limit;
use crate::rule::fields::{self, LimitFields, Why};
use crate::rule::{OwnCost, Rule, never_admitted};
use crate::rules::definition::{Cost, Definition, LimitDefinition};
use crate::rules::error::Field;
use crate::rules::names::{self, GLOBAL, IP, METHOD, Name, Names, PATH};

/// What is wrong, and where in the definition.
pub(in crate::rules) type Refusal = (Field, String);

/// The limits of a set's rules by their text. Most rules of a large set have one of a few limits, and share its
/// arguments.
pub(in crate::rules) type Limits = std::collections::HashMap<String, Arc<Limit>>;

/// What limits or a tag count by, by the attributes' names, joined by commas.
pub(super) type Parts = Vec<(String, Names)>;

/// A rule with these limits and the definition's other fields; also returns the parts of a request that they count.
pub(super) fn rule(
    definition: &Definition,
    limits: &[LimitDefinition],
    parts: &mut Parts,
    known: &mut Limits,
) -> Result<Rule, Refusal> {
    let limits = limits.iter().enumerate().map(|(index, LimitDefinition { name, limit, key, cost, missing })| {
        let at = || Field::named("limits").item(index);
        if limit.contains(',') {
            let why = format!(
                "limits: expected one limit in each string of the list, its numbers without commas, got {limit:?}"
            );
            return Err((at(), why));
        }
        // A limit that names the rule's own key counts by that.
        let own = if key.0 == definition.key.0 { &[][..] } else { &key.0 };
        let part = names("key", own).map_err(|(_, why)| (at(), why))?.map(|own| {
            let part = key.0.join(",");
            if !parts.iter().any(|(other, _)| *other == part) {
                parts.push((part.clone(), own));
            }
            part
        });
        let (name, limit, cost) = (name.clone(), limit.clone(), cost.clone().map(OwnCost::from));
        Ok(LimitFields { name, limit, key: part, cost, missing: *missing })
    });
    let read = |text: &str| match known.get(text) {
        Some(limit) => Ok(Arc::clone(limit)),
        None => {
            let limit = Arc::new(text.parse::<Limit>()?);
            known.insert(text.to_owned(), Arc::clone(&limit));
            Ok(limit)
        }
    };
    let rule = definition.fields().build(limits, read)?;
    // A shadow rule has no effect: a block would outlast it, and deny once the rule is switched on.
    Ok(if definition.shadow.unwrap_or_default() { rule.without_block() } else { rule })
}

impl From<fields::Refusal> for Refusal {
    fn from(fields::Refusal { field, item, why }: fields::Refusal) -> Self {
        let at = item.map_or(Field::named(field), |index| Field::named(field).item(index));
        match why {
            Why::NoLimits => {
                let why = "limits: they are missing: write at least one, such as \"token-bucket 100/1m\"";
                (Field::named("name"), why.into())
            }
            Why::Policy(why) => (at, format!("{field}: {why}")),
            Why::NoTime(text) => (at, format!("{field}: expected at least 1us, got {text:?}")),
            Why::Error(error) => (at, error),
        }
    }
}

/// The least cost of a request that gives its own.
pub(super) fn min_cost(definition: &Definition, rule: &Rule) -> Result<u64, Refusal> {
    let fault = |why: String| (Field::named("min_cost"), why);
    let by_attribute = |limit: &LimitDefinition| matches!(limit.cost, Some(Cost::Attribute(_)));
    match (definition.min_cost, &definition.cost) {
        (None, _) => Ok(1),
        (Some(_), Cost::Units(_)) if !definition.limits.iter().any(by_attribute) => {
            Err(fault("min_cost: only for a cost that is an attribute, and here it is a number".into()))
        }
        (Some(least), of_rule) => {
            let takes_it = |at: usize| {
                // An override has the costs of the limits in its places or, without any of their own, the rule's.
                let own = definition.limits.get(at).and_then(|limit| limit.cost.as_ref());
                matches!(own.unwrap_or(of_rule), Cost::Attribute(_))
            };
            let limits = rule.limits().enumerate().filter(|(at, _)| takes_it(*at));
            match limits.filter_map(|(_, limit)| never_admitted(limit, least)).next() {
                Some(why) => Err(fault(format!("min_cost: {why}"))),
                None => Ok(least),
            }
        }
    }
}

/// The attribute that holds a cost, if it isn't a number of units.
pub(super) fn cost_attribute(cost: &Cost) -> Result<Option<Name>, String> {
    let Cost::Attribute(name) = cost else { return Ok(None) };
    let is_number = name.bytes().all(|byte| byte.is_ascii_digit());
    if is_number || [IP, PATH, METHOD, GLOBAL].contains(&name.as_str()) {
        return Err(format!("cost: expected a number without quotes, or the name of an attribute, got {name:?}"));
    }
    if !is_plain(name) {
        let why = "cost: expected units, or the name of an attribute: letters, digits, -, _ or .";
        return Err(format!("{why}, got {name:?}"));
    }
    Ok(Some(names::name(name)))
}

/// Whether rules may count by an attribute of this name.
fn is_plain(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    !name.is_empty() && name.bytes().all(plain)
}

/// A key's attributes: an empty list for `global`, and none if the field is empty.
pub(super) fn names(field: &'static str, names: &[String]) -> Result<Option<Names>, Refusal> {
    match names {
        [] => Ok(None),
        [global] if global == GLOBAL => Ok(Some(Names::new())),
        names => {
            for (at, name) in names.iter().enumerate() {
                if name == GLOBAL || !is_plain(name) {
                    let why = format!("{field}: expected names of attributes, or \"global\" alone, got {name:?}");
                    return Err((Field::named(field), why));
                }
                if names[..at].contains(name) {
                    return Err((Field::named(field), format!("{field}: {name} is given twice")));
                }
            }
            Ok(Some(names.iter().map(|name| names::name(name)).collect()))
        }
    }
}
