//! What a rule that throttles counts for a request, and by which key.

mod counted_key;
mod limits;
mod overrides;

use std::sync::Arc;

use super::account::Account;
use super::attributes::Attributes;
use super::charge::ChargedBy;
use super::definition::{Cost, Definition, Reading};
use super::error::Field;
use super::names::{API_KEY, Name, Names, TIER, USER};
use super::optional::{self, Adaptable};
use crate::algorithm::numbers::EXACT;
use crate::error::{Error, Kind};
use crate::request::{OwnedRequest, Request};
use crate::rule::Rule;
use crate::rule::fields::Missing;
pub(super) use counted_key::listed_values;
use counted_key::{among_rules, key_of};
pub(super) use limits::{Limits, Refusal};
use limits::{Parts, cost_attribute, min_cost, names, rule};
use overrides::{Override, Overrides};

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
    overrides: Overrides,
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
            let why = "key: it is missing: write what the rule counts by, such as \"user\", \"ip\" or \"global\"";
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
        if definition.cost != Cost::default() && definition.limits.iter().all(|limit| limit.cost.is_some()) {
            return Err((Field::named("cost"), "cost: has no effect, since each limit has a cost of its own".into()));
        }
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
                let why = "another limit takes its cost from the attribute of that name";
                let why = format!("limits: a limit can't be named {name:?}: {why}");
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
        let overrides = Overrides::read(definition, (&key, ipv6_prefix), reading, limits)?;
        let key_among_rules = among_rules(&definition.key.0.join(",").into(), ipv6_prefix);
        let part = |(name, attributes): (String, Names)| {
            let name = name.into();
            Part { among_rules: among_rules(&name, ipv6_prefix), name, attributes }
        };
        let parts = parts.into_iter().map(part).collect();
        Ok(Self {
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
        })
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
            let found = self.overrides.of(&self.key_of(&self.key, request));
            matches!(found, Some((_, Override::Block | Override::Allow)))
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
        let found = self.overrides.of(&key);
        // Overrides are written as text.
        let overridden = found.and_then(|(key, _)| std::str::from_utf8(key).ok());
        let limited = match found.map(|(_, instead)| instead) {
            None => match request.account.filter(|account| self.yields && account.limits_and_key().is_some()) {
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
        // A request has all parts of the limits that apply to it.
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
        let Some((own, key)) = account.limits_and_key() else { return Ok(Throttled::Allow) };
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
            let expected = format!("expected the attribute {attribute} to be a whole number up to 2^53");
            Error::new(Kind::Input, format!("rule {rule}: cost: {expected}, got {got:?}"))
        })
    }

    fn key_of(&self, attributes: &[Name], request: &Attributes<'_>) -> Arc<[u8]> {
        key_of(attributes, request, self.ipv6_prefix)
    }
}
