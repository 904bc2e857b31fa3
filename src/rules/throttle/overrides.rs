//! The keys of a rule with other limits, or none.

use hashbrown::HashMap;

use super::counted_key::{key_of, listed_values};
use super::limits::{Limits, Refusal, min_cost, rule};
use crate::rules::attributes::{self, Attributes, OTHER_METHOD};
use crate::rules::definition::{Definition, LimitDefinition, Paths, Reading};
use crate::rules::error::Field;
use crate::rules::names::{IP, Name, PATH};
use crate::rules::optional::Adaptable;

/// What a key has in place of the rule's limits.
#[derive(Debug)]
pub(super) enum Override {
    Rule(Box<Adaptable>),
    Block,
    Allow,
}

/// The overrides of a rule, by the keys that it counts.
#[derive(Debug)]
pub(super) struct Overrides(HashMap<Box<[u8]>, Override>);

/// What a rule counts by, and how many bits of IPv6 addresses.
type Key<'a> = (&'a [Name], u8);

impl Overrides {
    /// Reads those of a rule that counts by this key.
    pub(super) fn read(
        definition: &Definition,
        counts_by: Key<'_>,
        reading: Reading,
        known: &mut Limits,
    ) -> Result<Self, Refusal> {
        let mut overrides = Self(HashMap::new());
        for (key, text) in &definition.overrides {
            let at = Field::named("overrides").entry(key);
            let instead = match text.as_str() {
                "block" => Override::Block,
                "allow" => Override::Allow,
                text => {
                    let mut lines: Vec<LimitDefinition> = text.split(',').map(|line| line.trim().into()).collect();
                    if definition.limits.iter().any(|limit| limit.cost.is_some()) {
                        let (count, got) = (definition.limits.len(), lines.len());
                        if got != count {
                            let why = "one for each limit of the rule and in the same order, since each has the \
                                       name, key and cost of the limit that it replaces";
                            return Err((at, format!("{key}: expected {count} limits, {why}, got {got}")));
                        }
                        for (line, own) in lines.iter_mut().zip(&definition.limits) {
                            *line = LimitDefinition { limit: std::mem::take(&mut line.limit), ..own.clone() };
                        }
                    }
                    let rule = rule(definition, &lines, &mut Vec::new(), known).map_err(|(_, why)| {
                        let why = match text.contains(' ') {
                            true => why.trim_start_matches(&format!("rule {}: ", definition.name)).to_owned(),
                            false => format!("expected limits, \"block\" or \"allow\", got {text:?}"),
                        };
                        (at.clone(), format!("{key}: {why}"))
                    })?;
                    min_cost(definition, &rule).map_err(|(_, why)| (at.clone(), format!("{key}: {why}")))?;
                    let limited =
                        Adaptable::new(rule, &lines).map_err(|(_, why)| (at.clone(), format!("{key}: {why}")))?;
                    Override::Rule(Box::new(limited))
                }
            };
            overrides.add(key, instead, at, counts_by, reading)?;
        }
        for (field, keys) in [("block", &definition.block), ("allow", &definition.allow)] {
            for (index, key) in keys.iter().enumerate() {
                let instead = if field == "block" { Override::Block } else { Override::Allow };
                overrides.add(key, instead, Field::named(field).item(index), counts_by, reading)?;
            }
        }
        Ok(overrides)
    }

    /// What takes the place of the rule's limits for this key, and the key as it was listed.
    pub(super) fn of(&self, key: &[u8]) -> Option<(&[u8], &Override)> {
        self.0.get_key_value(key).map(|(key, instead)| (&**key, instead))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn add(
        &mut self,
        key: &str,
        instead: Override,
        at: Field,
        counts_by: Key<'_>,
        reading: Reading,
    ) -> Result<(), Refusal> {
        // A key by path stands for all spellings, some of which such a router serves by another route. A ban may cover
        // them all; what admits more would also cover routes that aren't meant.
        if reading.paths == Paths::Segments
            && counts_by.0.iter().any(|attribute| attribute == PATH)
            && !matches!(instead, Override::Block)
        {
            let why = format!(
                "under paths = \"segments\", a key with a path can only be listed in block (to allow it, or to give it \
                 other limits, write a rule that matches the path), got {key:?}"
            );
            return Err((at, why));
        }
        let spelled = listed_key(key, counts_by, reading).map_err(|why| (at.clone(), why))?;
        if self.0.insert(spelled.into(), instead).is_some() {
            return Err((at, format!("{key:?} is given twice among overrides, block and allow")));
        }
        Ok(())
    }
}

/// The key of an override in the form in which requests are counted: another form would never match.
fn listed_key(key: &str, (attributes, ipv6_prefix): Key<'_>, reading: Reading) -> Result<Vec<u8>, String> {
    if attributes.is_empty() {
        return Err(format!("a rule with key = \"global\" can't have overrides, block or allow, got {key:?}"));
    }
    let expected = || {
        let example: Vec<_> = attributes.iter().map(|attribute| format!("{attribute}:...")).collect();
        let example = example.join("|").replace("ip:...", "ip:192.0.2.1");
        format!("expected a value of the rule's own key, such as {example}, got {key:?}")
    };
    let values = listed_values(key, attributes.len());
    if values.len() != attributes.len() {
        return Err(expected());
    }
    let mut request = Attributes::new();
    for (attribute, value) in attributes.iter().zip(&values) {
        let value = value.strip_prefix(&**attribute).and_then(|rest| rest.strip_prefix(':')).ok_or_else(expected)?;
        // An address may also be written as it is counted, by its network.
        let own = format!("/{ipv6_prefix}");
        let value =
            if attribute == IP && value.contains(':') { value.strip_suffix(&own).unwrap_or(value) } else { value };
        if value.is_empty() {
            return Err(expected());
        }
        request = request.try_set(attribute, value).map_err(|_| expected())?;
    }
    if request.first_missing(attributes).is_some() {
        return Err(expected());
    }
    let method = request.method.as_deref().filter(|method| *method != OTHER_METHOD);
    if method.is_some_and(|method| attributes::counted_method(method) == OTHER_METHOD) {
        return Err(format!("expected a standard method, or {OTHER_METHOD}, which all others count as, got {key:?}"));
    }
    let request = reading.of(&request);
    Ok(key_of(attributes, &request, ipv6_prefix).to_vec())
}
