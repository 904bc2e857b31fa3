//! What a rule that throttles counts for a request, and by which key.

mod overrides;

use std::sync::Arc;

use hashbrown::HashMap;
use smallvec::SmallVec;

use super::account::Account;
use super::applies::ChargedBy;
use super::attributes::Attributes;
use super::definition::{Cost, Definition, LimitDefinition, Reading};
use super::error::Field;
use super::names::{self, API_KEY, GLOBAL, IP, METHOD, Name, Names, PATH, TIER, USER};
use super::optional::{self, Adaptable};
use crate::algorithm::numbers::EXACT;
use crate::error::{Error, Kind};
use crate::limit::Limit;
use crate::request::{OwnedRequest, Request};
use crate::rule::fields::{self, LimitFields, Missing, Why};
use crate::rule::{OwnCost, Rule, never_admitted};
use overrides::Override;
pub(super) use overrides::listed_values;

/// What is wrong, and where in the definition.
pub(super) type Refusal = (Field, String);

/// The limits of a set's rules by their text. Most rules of a large set have one of a few, and then share its arguments.
pub(super) type Limits = std::collections::HashMap<String, Arc<Limit>>;

/// What limits or a tag count by, by the attributes' names, joined by commas.
type Parts = Vec<(String, Names)>;

/// The separator between the attributes of a composed key.
const BETWEEN: u8 = b'|';

#[derive(Debug)]
pub(super) struct Throttle {
    pub(super) limited: Adaptable,
    /// Empty: all requests count together.
    key: Names,
    /// What its key is called among the parts of several rules.
    key_among_rules: Arc<str>,
    /// What its limits and tag count by that differs from the key.
    parts: Vec<Part>,
    /// The attribute that holds a request's cost.
    cost: Option<Name>,
    /// The attributes that hold what single limits take.
    own_costs: Names,
    /// The attributes that each request must have besides the key's.
    needed: Names,
    /// The least that such a cost counts as: the client may have written it.
    min_cost: u64,
    ipv6_prefix: u8,
    pub(super) skips: bool,
    /// Whether an account's own limits replace its own: true for limits of a tier by user or API key.
    yields: bool,
    overrides: HashMap<Box<[u8]>, Override>,
}

/// What limits or a tag count by in place of a rule's key.
#[derive(Debug)]
struct Part {
    /// Its attributes, joined by commas.
    name: Arc<str>,
    /// What it is called among the parts of several rules.
    among_rules: Arc<str>,
    attributes: Names,
}

/// What a rule that throttles makes of a request.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "boxing the request would be an allocation for each")]
pub(super) enum Throttled<'s> {
    Charge { rule: ChargedBy<'s>, request: OwnedRequest },
    Block,
    Allow,
    Missing(&'s str),
}

impl Throttle {
    pub(super) fn new(definition: &Definition, reading: Reading, limits: &mut Limits) -> Result<Self, Refusal> {
        let key = names("key", &definition.key.0)?;
        let Some(key) = key else {
            let why = "key: expected what it counts by, such as \"user\", \"ip\" or \"global\", got none";
            return Err((Field::named("limits"), why.into()));
        };
        let ipv6_prefix = definition.ipv6_prefix.unwrap_or(64);
        if !(1..=128).contains(&ipv6_prefix) {
            let why = format!("ipv6_prefix: expected a length from 1 to 128, got {ipv6_prefix}");
            return Err((Field::named("ipv6_prefix"), why));
        }
        let mut parts: Parts = Vec::new();
        let rule = rule(definition, &definition.limits, &mut parts, limits)?;
        if let Some(tag) = rule.tag()
            && !parts.iter().any(|(name, _)| name == tag)
        {
            let own = names("tag", &[tag.to_owned()])?.unwrap_or_default();
            parts.push((tag.to_owned(), own));
        }
        let cost = cost_attribute(&definition.cost).map_err(|why| (Field::named("cost"), why))?;
        let mut own_costs = Names::new();
        for (index, limit) in definition.limits.iter().enumerate() {
            let own = limit.cost.as_ref().map(cost_attribute).transpose();
            let own = own.map_err(|why| (Field::named("limits").item(index), why))?.flatten();
            own_costs.extend(own.filter(|own| !own_costs.contains(own)));
        }
        for (index, limit) in definition.limits.iter().enumerate() {
            let by = |name: &String| matches!(&limit.cost, Some(Cost::Attribute(cost)) if cost == name);
            let named = limit.name.as_ref().filter(|name| own_costs.iter().any(|own| **own == ***name) && !by(name));
            if let Some(name) = named {
                let why =
                    format!("limits: expected no name that is the attribute of another limit's cost, got {name:?}");
                return Err((Field::named("limits").item(index), why));
            }
        }
        let min_cost = min_cost(definition, &rule)?;
        let has_permits = rule.limits().any(|limit| limit.algorithm().holds());
        let tag = rule.tag().and_then(|tag| parts.iter().find(|(name, _)| name == tag)).map(|(_, names)| names);
        let always = tag.into_iter().flatten().chain(&cost).cloned();
        let mut needed = optional::needed(always, &definition.limits);
        needed.retain(|name| !key.contains(name));
        let limited = Adaptable::new(rule, &definition.limits)?;
        let skips = definition.missing == Some(Missing::Skip);
        let is_shadow = definition.shadow.unwrap_or_default();
        let by_one = matches!(key.as_slice(), [name] if *name == USER || *name == API_KEY) && parts.is_empty();
        let yields = definition.conditions.contains_key(TIER) && by_one && !has_permits && !is_shadow;
        let overrides = HashMap::new();
        let key_among_rules = among_rules(&definition.key.0.join(",").into(), ipv6_prefix);
        let part = |(name, attributes): (String, Names)| {
            let name = name.into();
            Part { among_rules: among_rules(&name, ipv6_prefix), name, attributes }
        };
        let parts = parts.into_iter().map(part).collect();
        let mut throttle = Self {
            limited,
            key,
            key_among_rules,
            parts,
            cost,
            own_costs,
            needed,
            min_cost,
            ipv6_prefix,
            skips,
            yields,
            overrides,
        };
        throttle.override_keys(definition, reading, limits)?;
        Ok(throttle)
    }

    /// What its key is called among the parts of several rules.
    pub(super) fn key_among_rules(&self) -> &Arc<str> {
        &self.key_among_rules
    }

    /// The same of what its limits or its tag count by these attributes.
    pub(super) fn part_among_rules(&self, attributes: &str) -> Arc<str> {
        let known = self.parts.iter().find(|part| *part.name == *attributes);
        known.map_or_else(|| among_rules(&attributes.into(), self.ipv6_prefix), |part| Arc::clone(&part.among_rules))
    }

    /// The rule, with all of its limits.
    pub(super) fn rule(&self) -> &Rule {
        &self.limited.rule
    }

    /// The first attribute that it counts by and the request lacks.
    pub(super) fn missing(&self, request: &Attributes<'_>) -> Option<&str> {
        request.first_missing(self.key.iter().chain(&self.needed)).or_else(|| self.limited.of(request).err())
    }

    /// The same, unless its key is blocked or allowed, which needs no other attribute.
    pub(super) fn skipped(&self, request: &Attributes<'_>) -> Option<&str> {
        let missing = self.missing(request)?;
        let listed = || {
            let found = self.overrides.get(&*self.key_of(&self.key, request));
            matches!(found, Some(Override::Block | Override::Allow))
        };
        let counted = request.first_missing(&self.key).is_none();
        (!(counted && !self.overrides.is_empty() && listed())).then_some(missing)
    }

    /// What it makes of this request, and the key of the override that decides it, if one does.
    ///
    /// # Errors
    ///
    /// The cost, taken from an attribute, is no number.
    pub(super) fn throttled(&self, request: &Attributes<'_>) -> Result<(Throttled<'_>, Option<&str>), Error> {
        if let Some(attribute) = request.first_missing(&self.key) {
            return Ok((Throttled::Missing(attribute), None));
        }
        let key = self.key_of(&self.key, request);
        let found = self.overrides.get_key_value(&*key);
        // Overrides are written as text.
        let overridden = found.and_then(|(key, _)| std::str::from_utf8(key).ok());
        let limited = match found.map(|(_, instead)| instead) {
            None => match request.account.filter(|account| self.yields && account.own_limits().is_some()) {
                Some(account) => return Ok((self.charged_by(account, request)?, None)),
                None => &self.limited,
            },
            Some(Override::Rule(limited)) => limited,
            Some(Override::Block) => return Ok((Throttled::Block, overridden)),
            Some(Override::Allow) => return Ok((Throttled::Allow, overridden)),
        };
        let rule = match request.first_missing(&self.needed).map_or_else(|| limited.of(request), Err) {
            Ok(rule) => rule,
            Err(attribute) => return Ok((Throttled::Missing(attribute), overridden)),
        };
        // Of limits that apply, the request has them all.
        let parts = self.parts.iter().filter(|part| request.first_missing(&part.attributes).is_none());
        let parts = parts.map(|part| (Arc::clone(&part.name), self.key_of(&part.attributes, request))).collect();
        let cost = self.cost.as_ref().map(|attribute| self.units(attribute, request)).transpose()?;
        let own_cost = |attribute: &Name| Ok((Arc::from(&**attribute), self.units(attribute, request)?));
        let own_costs = self.own_costs.iter().filter(|name| rule.costs_by(name));
        let own_costs = own_costs.map(own_cost).collect::<Result<_, Error>>()?;
        let request = OwnedRequest::charging(key, parts, cost, own_costs);
        Ok((Throttled::Charge { rule: ChargedBy::Rule(rule), request }, overridden))
    }

    /// What the account's own limits make of this request, in place of the rule's.
    fn charged_by(&self, account: &Account, request: &Attributes<'_>) -> Result<Throttled<'_>, Error> {
        let Some((own, key)) = account.own_limits() else { return Ok(Throttled::Allow) };
        let rule = own.governed_as(self.rule());
        let cost = match &self.cost {
            Some(attribute) if request.first_missing([attribute]).is_some() => {
                return Ok(Throttled::Missing(attribute));
            }
            Some(attribute) => self.units(attribute, request)?,
            None => self.rule().default_cost(),
        };
        Ok(Throttled::Charge {
            rule: ChargedBy::Own(Box::new(rule)),
            request: Request::new(&key).cost(cost).into_owned(),
        })
    }

    /// The cost, taken from this attribute of the request.
    fn units(&self, attribute: &str, request: &Attributes<'_>) -> Result<u64, Error> {
        let value = request.text(attribute).unwrap_or_default();
        let digits = !value.is_empty() && value.iter().all(u8::is_ascii_digit);
        let units = std::str::from_utf8(value).ok().and_then(|text| text.parse().ok()).filter(|_| digits);
        units.filter(|units| *units <= EXACT).map(|units: u64| units.max(self.min_cost)).ok_or_else(|| {
            let (rule, got) = (self.rule().name().unwrap_or_default(), String::from_utf8_lossy(value));
            let expected = format!("expected the attribute {attribute} to be a whole number");
            Error::new(Kind::Input, format!("rule {rule}: cost: {expected}, got {got:?}"))
        })
    }

    /// `user:42`, or `user:42|path:/x` for several attributes. Requests that differ in them never share a key.
    fn key_of(&self, attributes: &[Name], request: &Attributes<'_>) -> Arc<[u8]> {
        if attributes.is_empty() {
            return GLOBAL.as_bytes().into();
        }
        let mut key = SmallVec::<[u8; 64]>::new();
        for (at, attribute) in attributes.iter().enumerate() {
            if at > 0 {
                key.push(BETWEEN);
            }
            key.extend_from_slice(attribute.as_bytes());
            key.push(b':');
            let value = request.counted(attribute, self.ipv6_prefix).unwrap_or_default();
            if attributes.len() == 1 {
                key.extend_from_slice(&value);
            } else {
                for &byte in &*value {
                    if byte == BETWEEN || byte == b'\\' {
                        key.push(b'\\');
                    }
                    key.push(byte);
                }
            }
        }
        key.as_slice().into()
    }
}

/// What limits count by these attributes, among the parts of several rules: they count as the same in all, but for
/// addresses, of which rules may count more or fewer bits.
fn among_rules(attributes: &Arc<str>, ipv6_prefix: u8) -> Arc<str> {
    match attributes.split(',').any(|attribute| attribute == IP) {
        true => format!("{attributes}/{ipv6_prefix}").into(),
        false => Arc::clone(attributes),
    }
}

/// A rule with these limits and the definition's other fields; also returns the parts of a request that they count.
fn rule(
    definition: &Definition,
    limits: &[LimitDefinition],
    parts: &mut Parts,
    known: &mut Limits,
) -> Result<Rule, Refusal> {
    let limits = limits.iter().enumerate().map(|(index, LimitDefinition { name, limit, key, cost, missing })| {
        let at = || Field::named("limits").item(index);
        if limit.contains(',') {
            let why = format!("limits: expected one limit in each string of the list, got {limit:?}");
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
    // A trial has no effect: a block would outlast it, and deny once the rule is switched on.
    Ok(if definition.shadow.unwrap_or_default() { rule.without_block() } else { rule })
}

impl From<fields::Refusal> for Refusal {
    fn from(fields::Refusal { field, item, why }: fields::Refusal) -> Self {
        let at = item.map_or(Field::named(field), |index| Field::named(field).item(index));
        match why {
            Why::NoLimits => {
                let why = "limits: expected at least one limit, such as \"token-bucket 100/1m\", got none";
                (Field::named("name"), why.into())
            }
            Why::Policy(expected) => (at, format!("{field}: expected {expected}")),
            Why::NoTime(text) => (at, format!("{field}: expected at least 1us, got {text:?}")),
            Why::Error(error) => (at, error),
        }
    }
}

/// The least cost of a request that says its own.
fn min_cost(definition: &Definition, rule: &Rule) -> Result<u64, Refusal> {
    let fault = |why: String| (Field::named("min_cost"), why);
    let by_attribute = |limit: &LimitDefinition| matches!(limit.cost, Some(Cost::Attribute(_)));
    match (definition.min_cost, &definition.cost) {
        (None, _) => Ok(1),
        (Some(_), Cost::Units(_)) if !definition.limits.iter().any(by_attribute) => {
            Err(fault("min_cost: expected none of a rule whose cost is a number, got one".into()))
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
fn cost_attribute(cost: &Cost) -> Result<Option<Name>, String> {
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
fn names(field: &'static str, names: &[String]) -> Result<Option<Names>, Refusal> {
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
                    return Err((
                        Field::named(field),
                        format!("{field}: expected each attribute once, got {name} again"),
                    ));
                }
            }
            Ok(Some(names.iter().map(|name| names::name(name)).collect()))
        }
    }
}
