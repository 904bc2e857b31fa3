//! One rule of a set, checked and made ready to be applied.

use std::net::IpAddr;
use std::num::NonZeroU16;
use std::sync::Arc;
use std::time::Duration;

use hashbrown::HashMap;
use smallvec::SmallVec;

use super::attributes::{self, Attributes, IP, Name, PATH};
use super::condition::Condition;
use super::definition::{Action, Cost, Definition, LimitDefinition, Missing};
use super::error::Place;
use super::path;
use crate::error::{Error, Kind};
use crate::limit::{Limit, Period};

use crate::request::{OwnedRequest, Request};
use crate::rule::Rule;
use crate::rule::serialized::Policy;

/// Of a key that isn't any attribute's.
const GLOBAL: &str = "global";

/// The attributes of a key.
type Names = SmallVec<[Name; 1]>;

/// What stands between the attributes of a key that has several.
const BETWEEN: u8 = b'|';

#[derive(Debug)]
pub(super) struct Compiled {
    pub(super) name: Arc<str>,
    pub(super) conditions: Vec<Condition>,
    pub(super) shadow: bool,
    pub(super) does: Does,
    pub(super) response: Response,
    /// Of a request that isn't only too many: by a rule that blocks, or a key that is blocked.
    pub(super) response_if_blocked: Response,
}

/// How to answer a request that a rule denies.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Response {
    /// The HTTP status.
    pub status: NonZeroU16,
    /// What to say.
    pub message: Option<Arc<str>>,
    /// The wait to tell in place of the true one.
    pub retry_after: Option<Duration>,
}

#[derive(Debug)]
pub(super) enum Does {
    Throttle(Box<Throttle>),
    Block,
    Allow,
}

#[derive(Debug)]
pub(super) struct Throttle {
    pub(super) rule: Rule,
    /// None of its own: everybody is counted together.
    key: Names,
    /// What its limits and its tag count by, where that isn't the key.
    parts: Vec<(String, Names)>,
    /// The attribute that says what a request takes.
    cost: Option<Name>,
    ipv6_prefix: u8,
    pub(super) skips: bool,
    overrides: HashMap<Box<[u8]>, Override>,
}

#[derive(Debug)]
enum Override {
    Rule(Box<Rule>),
    Block,
    Allow,
}

/// What a rule that throttles makes of a request.
#[derive(Debug)]
pub(super) enum Throttled<'s> {
    Charge { rule: &'s Rule, request: OwnedRequest },
    Block,
    Allow,
    Missing(&'s str),
}

/// What is wrong, and where in the definition.
pub(super) type Fault = (Place, String);

impl Compiled {
    pub(super) fn new(definition: &Definition, ignores_case: bool) -> Result<Self, Fault> {
        let name =
            crate::key::checked_name(&definition.name).map_err(|error| (Place::field("name"), error.to_string()))?;
        let conditions = definition.conditions.iter().map(|(attribute, values)| {
            let at = || Place::of("match", attribute);
            if attribute.is_empty() || attribute == GLOBAL {
                return Err((at(), format!("expected the name of an attribute, got {attribute:?}")));
            }
            Condition::new(attribute, &values.0, ignores_case).map_err(|why| (at(), format!("{attribute}: {why}")))
        });
        let conditions = conditions.collect::<Result<_, _>>()?;
        let does = match definition.action {
            Action::Throttle => Does::Throttle(Box::new(Throttle::new(definition, ignores_case)?)),
            action => {
                only_for_limits(definition)?;
                if action == Action::Block { Does::Block } else { Does::Allow }
            }
        };
        let response = Response::new(definition, 429)?;
        let response_if_blocked = Response::new(definition, 403)?;
        let shadow = definition.shadow.unwrap_or_default();
        Ok(Self { name: name.into(), conditions, shadow, does, response, response_if_blocked })
    }

    /// Why it doesn't apply to this request, if so.
    pub(super) fn passes_over(&self, request: &Attributes<'_>) -> Option<String> {
        if let Some(condition) = self.conditions.iter().find(|condition| !condition.holds(request)) {
            let got = request.counted(condition.attribute(), 128);
            let got = got.map_or("none".to_owned(), |got| String::from_utf8_lossy(&got).into_owned());
            return Some(format!("expected {condition}, got {got}"));
        }
        match &self.does {
            Does::Throttle(throttle) if throttle.skips => throttle
                .missing(request)
                .map(|attribute| format!("counts by {attribute}, got none, and skips such requests")),
            _ => None,
        }
    }

    /// Whether it applies to this request.
    pub(super) fn applies(&self, request: &Attributes<'_>) -> bool {
        self.conditions.iter().all(|condition| condition.holds(request)) && !self.skips(request)
    }

    /// Whether it applies only to requests that have all that it counts by.
    pub(super) fn may_skip(&self) -> bool {
        matches!(&self.does, Does::Throttle(throttle) if throttle.skips)
    }

    fn skips(&self, request: &Attributes<'_>) -> bool {
        matches!(&self.does, Does::Throttle(throttle) if throttle.skips && throttle.missing(request).is_some())
    }

    /// Whether nothing that it would apply to is left by the other, which goes before.
    pub(super) fn is_hidden_by(&self, other: &Self) -> bool {
        !other.shadow
            && !other.may_skip()
            && other.conditions.iter().all(|condition| condition.follows_from(&self.conditions))
    }
}

impl Response {
    fn new(definition: &Definition, default: u16) -> Result<Self, Fault> {
        let got = definition.status.unwrap_or(default);
        let status = NonZeroU16::new(got).filter(|_| (400..=599).contains(&got)).ok_or_else(|| {
            (Place::field("status"), format!("status: expected an HTTP status from 400 to 599, got {got}"))
        })?;
        let message = definition.message.as_deref().map(Arc::from);
        Ok(Self { status, message, retry_after: time("retry_after", definition.retry_after.as_deref())? })
    }
}

impl Throttle {
    fn new(definition: &Definition, ignores_case: bool) -> Result<Self, Fault> {
        let key = names("key", &definition.key.0)?;
        let Some(key) = key else {
            let why = "key: expected what it counts by, such as \"user\", \"ip\" or \"global\", got none";
            return Err((Place::field("limits"), why.into()));
        };
        let ipv6_prefix = definition.ipv6_prefix.unwrap_or(64);
        if !(1..=128).contains(&ipv6_prefix) {
            let why = format!("ipv6_prefix: expected a length from 1 to 128, got {ipv6_prefix}");
            return Err((Place::field("ipv6_prefix"), why));
        }
        let mut parts: Vec<(String, Names)> = Vec::new();
        let rule = rule(definition, &definition.limits, &mut parts)?;
        if let Some(tag) = rule.tag()
            && !parts.iter().any(|(name, _)| name == tag)
        {
            let own = names("tag", &[tag.to_owned()])?.unwrap_or_default();
            parts.push((tag.to_owned(), own));
        }
        let cost = match &definition.cost {
            Cost::Units(_) => None,
            Cost::Attribute(name) if name.is_empty() || name.bytes().all(|byte| byte.is_ascii_digit()) => {
                let why = format!("cost: expected a number without quotes, or the name of an attribute, got {name:?}");
                return Err((Place::field("cost"), why));
            }
            Cost::Attribute(name) => Some(attributes::name(name)),
        };
        let skips = definition.missing == Some(Missing::Skip);
        let mut throttle = Self { rule, key, parts, cost, ipv6_prefix, skips, overrides: HashMap::new() };
        throttle.override_keys(definition, ignores_case)?;
        Ok(throttle)
    }

    fn override_keys(&mut self, definition: &Definition, ignores_case: bool) -> Result<(), Fault> {
        for (key, text) in &definition.overrides {
            let at = Place::of("overrides", key);
            let instead = match text.as_str() {
                "block" => Override::Block,
                "allow" => Override::Allow,
                text => {
                    let lines: Vec<LimitDefinition> = text.split(',').map(|line| line.trim().into()).collect();
                    let rule = rule(definition, &lines, &mut Vec::new());
                    Override::Rule(Box::new(rule.map_err(|(_, why)| (at.clone(), format!("{key}: {why}")))?))
                }
            };
            self.override_key(key, instead, at, ignores_case)?;
        }
        for (field, keys) in [("block", &definition.block), ("allow", &definition.allow)] {
            for (index, key) in keys.iter().enumerate() {
                let instead = if field == "block" { Override::Block } else { Override::Allow };
                self.override_key(key, instead, Place::at(field, index), ignores_case)?;
            }
        }
        Ok(())
    }

    fn override_key(&mut self, key: &str, instead: Override, at: Place, ignores_case: bool) -> Result<(), Fault> {
        let spelled = self.spelled(key, ignores_case).map_err(|why| (at.clone(), why))?;
        if self.overrides.insert(spelled.into_bytes().into(), instead).is_some() {
            return Err((at, format!("expected each key once among overrides, block and allow, got {key:?} again")));
        }
        Ok(())
    }

    /// A key of an override as requests are counted by it.
    fn spelled(&self, key: &str, ignores_case: bool) -> Result<String, String> {
        let Some(first) = self.key.first() else {
            return Err(format!("expected no overrides of a rule that counts all requests together, got {key:?}"));
        };
        let expected = || {
            let example: Vec<_> = self.key.iter().map(|attribute| format!("{attribute}:...")).collect();
            format!("expected a key that the rule counts by, {}, got {key:?}", example.join("|"))
        };
        let value = key.strip_prefix(&**first).and_then(|rest| rest.strip_prefix(':')).ok_or_else(expected)?;
        if value.is_empty() {
            return Err(expected());
        }
        Ok(match (&**first, self.key.len()) {
            (IP, 1) => {
                let address: IpAddr = value.parse().map_err(|_| expected())?;
                let counted =
                    Attributes::new().ip(address).counted(IP, self.ipv6_prefix).unwrap_or_default().into_owned();
                format!("{IP}:{}", String::from_utf8_lossy(&counted))
            }
            (PATH, 1) => {
                let path = path::normalised(value);
                format!("{PATH}:{}", if ignores_case { path.to_ascii_lowercase() } else { path.into_owned() })
            }
            _ => key.to_owned(),
        })
    }

    /// The first attribute that it counts by and the request doesn't have.
    fn missing(&self, request: &Attributes<'_>) -> Option<&str> {
        let counted = self.key.iter().chain(self.parts.iter().flat_map(|(_, part)| part)).chain(&self.cost);
        first_missing(counted, request)
    }

    /// What it makes of this request, and the key of the override that says so, if one does.
    ///
    /// # Errors
    ///
    /// What the request takes, as an attribute says, is no number.
    pub(super) fn throttled(&self, request: &Attributes<'_>) -> Result<(Throttled<'_>, Option<&str>), Error> {
        if let Some(attribute) = first_missing(&self.key, request) {
            return Ok((Throttled::Missing(attribute), None));
        }
        let key = self.spelled_of(&self.key, request);
        let found = self.overrides.get_key_value(&*key);
        // Overrides are written as text.
        let overridden = found.and_then(|(key, _)| std::str::from_utf8(key).ok());
        let rule = match found.map(|(_, instead)| instead) {
            None => &self.rule,
            Some(Override::Rule(rule)) => rule,
            Some(Override::Block) => return Ok((Throttled::Block, overridden)),
            Some(Override::Allow) => return Ok((Throttled::Allow, overridden)),
        };
        if let Some(attribute) = self.missing(request) {
            return Ok((Throttled::Missing(attribute), overridden));
        }
        let parts: Vec<_> =
            self.parts.iter().map(|(name, part)| (name.as_str(), self.spelled_of(part, request))).collect();
        let parts: Vec<_> = parts.iter().map(|(name, value)| (*name, value.as_slice())).collect();
        let made = Request::new(&key).parts(&parts);
        let made = match &self.cost {
            Some(attribute) => made.cost(units(attribute, request)?),
            None => made,
        };
        Ok((Throttled::Charge { rule, request: made.into_owned() }, overridden))
    }

    /// `user:42`, or `user:42|path:/x` of several. No two requests that differ in them have the same.
    fn spelled_of(&self, attributes: &[Name], request: &Attributes<'_>) -> Vec<u8> {
        if attributes.is_empty() {
            return GLOBAL.into();
        }
        let mut key = Vec::with_capacity(32);
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
        key
    }
}

/// The first of these that the request doesn't have.
fn first_missing<'n>(names: impl IntoIterator<Item = &'n Name>, request: &Attributes<'_>) -> Option<&'n str> {
    let has = |name: &str| match name {
        IP => request.ip.is_some(),
        name => request.counted(name, 128).is_some(),
    };
    names.into_iter().map(|name| &**name).find(|name| !has(name))
}

fn units(attribute: &str, request: &Attributes<'_>) -> Result<u64, Error> {
    let value = request.other(attribute).unwrap_or_default();
    let digits = !value.is_empty() && value.iter().all(u8::is_ascii_digit);
    let units = std::str::from_utf8(value).ok().and_then(|text| text.parse().ok()).filter(|_| digits);
    units.ok_or_else(|| {
        let got = String::from_utf8_lossy(value);
        Error::new(Kind::Input, format!("cost: expected the attribute {attribute} to be a whole number, got {got:?}"))
    })
}

/// A rule of these limits, with what else the definition says; and which parts of a request they count.
fn rule(definition: &Definition, limits: &[LimitDefinition], parts: &mut Vec<(String, Names)>) -> Result<Rule, Fault> {
    let whole = |error: crate::error::RuleError| (Place::field("limits"), error.to_string());
    let mut rule: Option<Rule> = None;
    for (index, text) in limits.iter().enumerate() {
        let at = || Place::at("limits", index);
        let fault = |error: crate::error::RuleError| (at(), error.to_string());
        if text.limit.starts_with('$') {
            let why = format!("limits: expected a limit or the name of a variable, got {:?}", text.limit);
            return Err((at(), why));
        }
        if text.limit.contains(',') {
            let why = format!("limits: expected one limit in each string of the list, got {:?}", text.limit);
            return Err((at(), why));
        }
        let limit: Limit = text.limit.parse().map_err(fault)?;
        let limit = match &text.name {
            Some(name) => limit.named(name).map_err(fault)?,
            None => limit,
        };
        let part = match names("key", &text.key.0).map_err(|(_, why)| (at(), why))? {
            None => None,
            Some(own) => {
                let name = text.key.0.join(",");
                if !parts.iter().any(|(other, _)| *other == name) {
                    parts.push((name.clone(), own));
                }
                Some(name)
            }
        };
        rule = Some(match (rule, part) {
            (None, part) => {
                let mut rule = Rule::new(&definition.name, limit).map_err(fault)?;
                if let Some(tag) = &definition.tag {
                    rule = rule.tagged(tag);
                }
                match part {
                    Some(part) => rule.by(&part).map_err(fault)?,
                    None => rule,
                }
            }
            (Some(rule), Some(part)) => rule.and_by(&part, limit).map_err(fault)?,
            (Some(rule), None) => rule.and(limit).map_err(fault)?,
        });
    }
    let Some(mut rule) = rule else {
        let why = "limits: expected at least one limit, such as \"token-bucket 100/1m\", got none".into();
        return Err((Place::field("name"), why));
    };
    rule =
        rule.on_change(definition.on_change.unwrap_or_default()).count_denials(definition.overage.unwrap_or_default());
    if let Cost::Units(units) = definition.cost {
        rule = rule.cost(units).map_err(|error| (Place::field("cost"), error.to_string()))?;
    }
    if let Some(yes) = definition.hash_keys {
        rule = rule.hash_keys(yes);
    }
    if let Some(time) = time("block_for", definition.block_for.as_deref())? {
        rule = rule.block_for(time).map_err(|error| (Place::field("block_for"), error.to_string()))?;
    }
    let policy = Policy::of(definition.on_error, definition.processes);
    let field = if definition.processes.is_some() { "processes" } else { "on_error" };
    let policy = policy.map_err(|why| (Place::field(field), format!("{field}: expected {why}")))?;
    match policy {
        Some(policy) => rule.on_error(policy).map_err(whole),
        None => Ok(rule),
    }
}

/// The attributes that a key is of: none of `global`, and no list where nothing is said.
fn names(field: &'static str, names: &[String]) -> Result<Option<Names>, Fault> {
    match names {
        [] => Ok(None),
        [global] if global == GLOBAL => Ok(Some(Names::new())),
        names => {
            for (at, name) in names.iter().enumerate() {
                let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
                if name.is_empty() || name == GLOBAL || !name.bytes().all(plain) {
                    let why = format!("{field}: expected names of attributes, or \"global\" alone, got {name:?}");
                    return Err((Place::field(field), why));
                }
                if names[..at].contains(name) {
                    return Err((
                        Place::field(field),
                        format!("{field}: expected each attribute once, got {name} again"),
                    ));
                }
            }
            Ok(Some(names.iter().map(|name| attributes::name(name)).collect()))
        }
    }
}

fn time(field: &'static str, text: Option<&str>) -> Result<Option<Duration>, Fault> {
    let Some(text) = text else { return Ok(None) };
    match text.parse::<Period>() {
        Ok(Period(0)) => Err((Place::field(field), format!("{field}: expected at least 1us, got {text:?}"))),
        Ok(Period(us)) => Ok(Some(Duration::from_micros(us))),
        Err(error) => Err((Place::field(field), format!("{field}: {error}"))),
    }
}

/// A rule that blocks or allows has nothing to count.
fn only_for_limits(definition: &Definition) -> Result<(), Fault> {
    let Definition { key, limits, tag, cost, overrides, block, allow, .. } = definition;
    let says = [
        ("key", !key.0.is_empty()),
        ("limits", !limits.is_empty()),
        ("tag", tag.is_some()),
        ("cost", *cost != Cost::default()),
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
            Err((Place::field(field), format!("{field}: expected none of a rule whose action is {action}, got one")))
        }
        None => Ok(()),
    }
}
