//! The keys of a rule with other limits, or none.

use super::{Limits, Refusal, Throttle, min_cost, rule};
use crate::rules::attributes::{self, Attributes, OTHER_METHOD};
use crate::rules::definition::{Definition, LimitDefinition, Paths, Reading};
use crate::rules::error::Field;
use crate::rules::names::{IP, PATH};
use crate::rules::optional::Adaptable;

/// What a key has in place of the rule's limits.
#[derive(Debug)]
pub(super) enum Override {
    Rule(Box<Adaptable>),
    Block,
    Allow,
}

impl Throttle {
    /// Reads the definition's keys of this kind.
    pub(super) fn override_keys(
        &mut self,
        definition: &Definition,
        reading: Reading,
        known: &mut Limits,
    ) -> Result<(), Refusal> {
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
                            let why = "in the order of the rule's, whose names, keys and costs they have";
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
            self.override_key(key, instead, at, reading)?;
        }
        for (field, keys) in [("block", &definition.block), ("allow", &definition.allow)] {
            for (index, key) in keys.iter().enumerate() {
                let instead = if field == "block" { Override::Block } else { Override::Allow };
                self.override_key(key, instead, Field::named(field).item(index), reading)?;
            }
        }
        Ok(())
    }

    fn override_key(&mut self, key: &str, instead: Override, at: Field, reading: Reading) -> Result<(), Refusal> {
        // A key by path is that of all spellings, some of which such a router serves by another route: a ban holds for
        // all of them, and what admits more would hold for what isn't meant too.
        if reading.paths == Paths::Segments
            && self.key.iter().any(|attribute| attribute == PATH)
            && !matches!(instead, Override::Block)
        {
            let why = format!(
                "expected only block for a key by path under paths = \"segments\" (a rule that matches the path may allow \
                 it, or have other limits), got more for {key:?}"
            );
            return Err((at, why));
        }
        let spelled = self.listed_key(key, reading).map_err(|why| (at.clone(), why))?;
        if self.overrides.insert(spelled.into(), instead).is_some() {
            return Err((at, format!("expected each key once among overrides, block and allow, got {key:?} again")));
        }
        Ok(())
    }

    /// The key of an override in the form in which requests are counted: another form would never match.
    fn listed_key(&self, key: &str, reading: Reading) -> Result<Vec<u8>, String> {
        if self.key.is_empty() {
            return Err(format!("expected no overrides of a rule that counts all requests together, got {key:?}"));
        }
        let expected = || {
            let example: Vec<_> = self.key.iter().map(|attribute| format!("{attribute}:...")).collect();
            let example = example.join("|").replace("ip:...", "ip:192.0.2.1");
            format!("expected a key that the rule counts by, such as {example}, got {key:?}")
        };
        let values = listed_values(key, self.key.len());
        if values.len() != self.key.len() {
            return Err(expected());
        }
        let mut request = Attributes::new();
        for (attribute, value) in self.key.iter().zip(&values) {
            let value =
                value.strip_prefix(&**attribute).and_then(|rest| rest.strip_prefix(':')).ok_or_else(expected)?;
            // An address may also be written as it is counted, by its network.
            let own = format!("/{}", self.ipv6_prefix);
            let value =
                if attribute == IP && value.contains(':') { value.strip_suffix(&own).unwrap_or(value) } else { value };
            if value.is_empty() {
                return Err(expected());
            }
            request = request.try_set(attribute, value).map_err(|_| expected())?;
        }
        if request.first_missing(&self.key).is_some() {
            return Err(expected());
        }
        let method = request.method.as_deref().filter(|method| *method != OTHER_METHOD);
        if method.is_some_and(|method| attributes::counted_method(method) == OTHER_METHOD) {
            return Err(format!(
                "expected a standard method, or {OTHER_METHOD}, which all others count as, got {key:?}"
            ));
        }
        let request = reading.of(&request);
        Ok(self.key_of(&self.key, &request).to_vec())
    }
}

/// A listed key's attributes, of which it should have so many.
pub(in crate::rules) fn listed_values(key: &str, attributes: usize) -> Vec<String> {
    if attributes == 1 { vec![key.to_owned()] } else { unescaped(key) }
}

/// A composed key's attributes, split and without the backslashes that escape them.
fn unescaped(key: &str) -> Vec<String> {
    let (mut values, mut rest) = (vec![String::new()], key.chars());
    while let Some(character) = rest.next() {
        match (character, values.last_mut()) {
            ('|', _) => values.push(String::new()),
            ('\\', Some(value)) => value.extend(rest.next()),
            (character, Some(value)) => value.push(character),
            (_, None) => {}
        }
    }
    values
}
