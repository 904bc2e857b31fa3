//! Rules from a service's own file: finding one by name, and applying it to a request.

use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow, bail};
use tollgate::rules::{Action, Cost, Definition, Effect, RuleSet};

use crate::attributes::{self, Pairs, of_key};
use crate::escape::shown;
use crate::subject::{Drawn, Subject};

/// The most names to list in a message.
const NAMED: usize = 12;

/// A set of rules, and where it was read.
#[derive(Debug)]
pub(crate) struct RulesFile {
    file: PathBuf,
    pub(crate) rules: RuleSet,
}

/// Which costs the attributes of a request have to give.
#[derive(Clone, Copy)]
pub(crate) enum NeededCosts {
    All,
    /// The rule's is given by --cost.
    OfLimits,
    None,
}

/// What a rule says about a key.
pub(crate) enum Ruling {
    /// Limits, and the key as they count it.
    Limits(Box<Subject>, Vec<u8>),
    Listed(Listed),
}

/// A key that an override allows or blocks, so that no limit counts it.
pub(crate) struct Listed {
    pub(crate) rule: String,
    pub(crate) key: String,
    pub(crate) allowed: bool,
}

impl Ruling {
    /// The limits, for operations that need a counted key.
    pub(crate) fn limits(self) -> Result<(Subject, Vec<u8>)> {
        match self {
            Self::Limits(subject, key) => Ok((*subject, key)),
            Self::Listed(Listed { rule, key, allowed }) => {
                let does = if allowed { "allowed" } else { "blocked" };
                let key = shown(key.as_bytes());
                bail!("rule {rule}: {key} is {does} by an override, so no limit counts it")
            }
        }
    }
}

impl RulesFile {
    pub(crate) fn read(file: &Path) -> Result<Self> {
        expect_no_address(file)?;
        let rules = RuleSet::read(file).map_err(|error| {
            let more = if error.faults().len() > 1 { "; tollgate rules check shows them all" } else { "" };
            anyhow!("{error}{more}")
        })?;
        Ok(Self { file: file.to_owned(), rules })
    }

    /// The definition of the rule with this name.
    pub(crate) fn definition(&self, name: &str) -> Result<&Definition> {
        let definitions = self.rules.definitions();
        definitions.iter().find(|rule| rule.name == name).ok_or_else(|| {
            let mut names: Vec<_> = definitions.iter().take(NAMED).map(|rule| rule.name.as_str()).collect();
            let more = format!("... {} more", definitions.len().saturating_sub(NAMED));
            if definitions.len() > NAMED {
                names.push(&more);
            }
            let (file, names) = (self.file.display(), names.join(", "));
            anyhow!("rule: expected one of {file} ({names}), got {}", shown(name.as_bytes()))
        })
    }

    /// The definition of the rule with this name, which must have limits.
    pub(crate) fn with_limits(&self, name: &str) -> Result<&Definition> {
        let definition = self.definition(name)?;
        let does = match definition.action {
            Action::Block => "blocks",
            Action::Allow => "allows",
            _ => return Ok(definition),
        };
        bail!("rule {name}: has no limits: it {does}, and counts nothing")
    }

    /// The limits that the rule has for a request with this key and these attributes, and the key as it is counted.
    pub(crate) fn ruling(
        &self,
        name: &str,
        key: Option<&[u8]>,
        mut given: Pairs,
        needed: NeededCosts,
    ) -> Result<Ruling> {
        let definition = self.with_limits(name)?;
        let told = |why: String| anyhow!("rule {name}: {why}");
        let attribute = |cost: &Cost| match cost {
            Cost::Attribute(name) => Some(name.clone()),
            _ => None,
        };
        let of_rule = attribute(&definition.cost);
        let of_limits: Vec<_> =
            definition.limits.iter().filter_map(|limit| limit.cost.as_ref().and_then(attribute)).collect();
        let is_cost = |attribute: &str| of_limits.iter().chain(&of_rule).any(|cost| cost == attribute);
        let not_needed = match needed {
            NeededCosts::All => Vec::new(),
            NeededCosts::OfLimits => of_rule.iter().filter(|name| !of_limits.contains(name)).collect(),
            NeededCosts::None => of_limits.iter().chain(&of_rule).collect(),
        };
        for cost in not_needed {
            if !given.iter().any(|(name, _)| name == cost) {
                given.push((cost.clone(), b"1".to_vec()));
            }
        }
        if let Some(key) = key {
            for (attribute, value) in
                of_key(key, key_attributes(definition), definition.ipv6_prefix.unwrap_or(64)).map_err(told)?
            {
                if given.iter().any(|(other, _)| *other == attribute) {
                    return Err(told(format!("{attribute} is given twice, by --attr and in the key")));
                }
                given.push((attribute, value));
            }
        }
        let request = attributes::read(&given);
        let applies = self.rules.by_name(name, &request)?.ok_or_else(|| told("the set has no such rule".into()))?;
        let listed = |allowed: bool| {
            let key = applies.overridden.unwrap_or_default().to_owned();
            Ok(Ruling::Listed(Listed { rule: name.to_owned(), key, allowed }))
        };
        match &applies.effect {
            Effect::Limit(charge) => {
                let subject = Subject::of_charge(charge, applies.overridden);
                Ok(Ruling::Limits(Box::new(subject), charge.key().to_vec()))
            }
            Effect::Missing(attribute)
                if key.is_none() && key_attributes(definition).iter().any(|name| name == attribute) =>
            {
                Err(told(format!("KEY is missing: give {attribute}:..., or --attr {attribute}=VALUE")))
            }
            Effect::Missing(attribute) => {
                let why = if is_cost(attribute) { "which says what a request takes" } else { "which it counts by" };
                Err(told(format!("--attr {attribute}=VALUE is missing, {why}")))
            }
            Effect::Block => listed(false),
            _ => listed(true),
        }
    }

    /// The rule's own limits, for generated requests.
    pub(crate) fn drawn(&self, name: &str, given: Pairs) -> Result<Subject> {
        let mut definition = self.with_limits(name)?.clone();
        definition.overrides.clear();
        definition.block.clear();
        definition.allow.clear();
        let is_given = |name: &String| given.iter().any(|(given, _)| given == name);
        let varying: Vec<_> = key_attributes(&definition).iter().filter(|name| !is_given(name)).cloned().collect();
        let rules = RuleSet::new([definition])?;
        let drawn = Drawn { rules, name: name.to_owned(), given, varying };
        let alone = Self { file: self.file.clone(), rules: drawn.rules.clone() };
        let (subject, _) = alone.ruling(name, None, drawn.attributes(0), NeededCosts::All)?.limits()?;
        Ok(subject.with_drawn(drawn))
    }
}

/// The address isn't repeated: it may contain a password.
pub(crate) fn expect_no_address(file: &Path) -> Result<()> {
    if file.to_string_lossy().contains("://") {
        bail!("expected a file of rules, got an address: tollgate rules pull writes one");
    }
    Ok(())
}

/// The attributes that make up a rule's key; none for `global`.
fn key_attributes(definition: &Definition) -> &[String] {
    match definition.key.0.as_slice() {
        [global] if global == "global" => &[],
        names => names,
    }
}
