//! Limits that don't apply to requests that lack an attribute of theirs.

use smallvec::SmallVec;

use super::attributes::Attributes;
use super::definition::{Cost, LimitDefinition};
use super::error::Field;
use super::names::{self, GLOBAL, Name, Names};
use crate::rule::Rule;
use crate::rule::fields::Missing;

/// The most limits of a rule that may be left out: for each choice of them there is a rule.
const MOST: usize = 4;

/// A rule, and what is left of it for requests that some of its limits don't apply to.
#[derive(Debug)]
pub(super) struct Adaptable {
    pub(super) rule: Rule,
    optional: SmallVec<[Optional; 1]>,
    /// By which of these limits are left out, as the bits of a number from 1 on.
    without: Box<[Rule]>,
}

/// A limit that may be left out.
#[derive(Debug)]
struct Optional {
    /// Its place in the rule.
    at: usize,
    /// The attributes of its own key and cost.
    needs: Names,
}

impl Adaptable {
    /// The rule of these limits.
    pub(super) fn new(rule: Rule, limits: &[LimitDefinition]) -> Result<Self, (Field, String)> {
        let fault = |at, why| Err((Field::named("limits").item(at), why));
        let mut optional: SmallVec<[Optional; 1]> = SmallVec::new();
        for (at, limit) in limits.iter().enumerate().filter(|(_, limit)| is_optional(limit)) {
            let needs = needs(limit);
            if needs.is_empty() {
                let why = "missing = \"skip\": expected a limit whose own key or cost is an attribute, got";
                return fault(at, format!("{why} {}", limit.limit));
            }
            if optional.len() == MOST {
                return fault(at, format!("missing = \"skip\": at most {MOST} limits of a rule can have it"));
            }
            optional.push(Optional { at, needs });
        }
        let choices = 1..1_usize << optional.len();
        let without = choices.map(|choice| {
            let is_left_out = |at| optional.iter().enumerate().any(|(bit, own)| own.at == at && choice >> bit & 1 == 1);
            rule.without(is_left_out)
        });
        let without = without.collect();
        Ok(Self { rule, optional, without })
    }

    /// Whether a limit doesn't apply to this request for lack of this attribute.
    #[cfg(feature = "http")]
    pub(super) fn leaves_out(&self, attribute: &str, request: &Attributes<'_>) -> bool {
        self.optional.iter().any(|limit| request.first_missing(&limit.needs) == Some(attribute))
    }

    /// The rule with the limits that apply to this request; or the first attribute that it lacks, if none does.
    pub(super) fn of(&self, request: &Attributes<'_>) -> Result<&Rule, &str> {
        if self.optional.is_empty() {
            return Ok(&self.rule);
        }
        let lacking = self.optional.iter().map(|limit| request.first_missing(&limit.needs));
        let (mut choice, mut first) = (0_usize, None);
        for (bit, lacks) in lacking.enumerate() {
            choice |= usize::from(lacks.is_some()) << bit;
            first = first.or(lacks);
        }
        let rule = choice.checked_sub(1).map_or(&self.rule, |at| &self.without[at]);
        match first {
            Some(attribute) if rule.limits().len() == 0 => Err(attribute),
            _ => Ok(rule),
        }
    }
}

/// These attributes, and those of all limits that can't be left out.
pub(super) fn needed(names: impl Iterator<Item = Name>, limits: &[LimitDefinition]) -> Names {
    let of_limits = limits.iter().filter(|limit| !is_optional(limit)).flat_map(needs);
    let mut needed = Names::new();
    for name in names.chain(of_limits) {
        if !needed.contains(&name) {
            needed.push(name);
        }
    }
    needed
}

/// Whether requests without its attributes are decided by its rule's other limits.
fn is_optional(limit: &LimitDefinition) -> bool {
    limit.missing == Some(Missing::Skip)
}

/// The attributes of a limit's own key and cost.
fn needs(limit: &LimitDefinition) -> Names {
    let cost = match &limit.cost {
        Some(Cost::Attribute(name)) => Some(name),
        _ => None,
    };
    let own = limit.key.0.iter().filter(|name| *name != GLOBAL).chain(cost);
    own.map(|name| names::name(name)).collect()
}
