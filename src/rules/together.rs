//! Several rules that apply to a request, since those before the last one continue: their limits are one decision.

use std::sync::{Arc, OnceLock};

use quick_cache::sync::Cache;
use smallvec::SmallVec;

use super::applies::{Applies, Charge, ChargedBy, Effect};
use super::attributes::Attributes;
use super::compiled::{Compiled, CompiledAction};
use super::names::IP;
use super::statuses::CountedBy;
use crate::error::Error;
use crate::request::OwnedRequest;
use crate::rule::{Joining, Rule, apart};

/// Which rules were joined, by where their limits are.
type Joined = SmallVec<[usize; 4]>;

/// Rules that were joined before. Which ones apply together depends on the request.
#[derive(Debug, Default)]
pub(super) struct Together(OnceLock<Cache<Joined, Arc<Rule>>>);

/// The most that are kept.
const MOST_KEPT: usize = 256;

/// The key of an account's own limits, which no attribute has.
const OF_ACCOUNT: &str = "\naccount";

impl Together {
    /// What these rules, in their order, make of a request.
    pub(super) fn effect<'s>(&self, rules: &[&'s Compiled], request: &Attributes<'_>) -> Result<Applies<'s>, Error> {
        let together = rules.iter().map(|rule| rule.effect(request)).collect::<Result<Vec<_>, _>>()?;
        let denies = |own: &&Applies<'_>| matches!(own.effect, Effect::Block | Effect::Missing(_));
        let limits = || together.iter().filter(|own| matches!(own.effect, Effect::Limit(_)));
        let decisive = together.iter().find(denies).or_else(|| limits().next()).or(together.first());
        let Some(decisive) = decisive else { return Ok(Applies::none()) };
        let effect = match &decisive.effect {
            Effect::Allow => Effect::Allow,
            Effect::Block => Effect::Block,
            Effect::Missing(attribute) => Effect::Missing(attribute),
            Effect::Limit(only) if limits().count() == 1 => Effect::Limit(only.clone()),
            Effect::Limit(_) => Effect::Limit(self.charge(rules, &together)),
        };
        let (rule, rule_name, response, overridden) =
            (decisive.rule, decisive.rule_name, decisive.response, decisive.overridden);
        Ok(Applies { rule, effect, response, overridden, user_block: None, together, rule_name })
    }

    /// The limits of these rules that have some, as one rule, and what is charged to them.
    fn charge<'s>(&self, rules: &[&'s Compiled], together: &[Applies<'s>]) -> Charge<'s> {
        let mut charging: SmallVec<[_; 4]> = SmallVec::new();
        let mut has_account = false;
        for (compiled, own) in rules.iter().zip(together) {
            let Effect::Limit(charge) = &own.effect else { continue };
            let one_more = Charging::of(compiled, charge);
            // An account's own limits take the place of several rules', and count once.
            let is_account = one_more.address.is_none();
            charging.push((Charging { counts: !(is_account && has_account), ..one_more }, charge));
            has_account |= is_account;
        }
        let joining = || charging.iter().map(|(charging, _)| charging.joining()).collect::<SmallVec<[_; 4]>>();
        let joined = || Arc::new(Rule::joined(&joining(), part));
        let rule = match charging.iter().map(|(charging, _)| charging.address).collect::<Option<Joined>>() {
            Some(rules) => {
                // Most sets have no rules that apply together.
                let known = self.0.get_or_init(|| Cache::new(MOST_KEPT));
                known.get(&rules).unwrap_or_else(|| {
                    let rule = joined();
                    known.insert(rules, Arc::clone(&rule));
                    rule
                })
            }
            // What an account has of its own isn't the set's.
            None => joined(),
        };
        let counting = || charging.iter().filter(|(own, _)| own.counts);
        let counted = CountedBy::joined(counting().map(|(own, charge)| (own.name(), &charge.counted)));
        Charge { rule: ChargedBy::Together(rule), request: request(counting()), counted }
    }
}

/// A rule whose limits are charged together with others.
struct Charging<'c> {
    rule: &'c Rule,
    /// Where the rule is, if it stays there for as long as the set does.
    address: Option<usize>,
    key: &'c str,
    ipv6_prefix: u8,
    /// Whether its limits are charged, and not by another rule already.
    counts: bool,
}

impl<'c> Charging<'c> {
    fn of<'s: 'c>(compiled: &'s Compiled, charge: &'c Charge<'s>) -> Self {
        let (key, ipv6_prefix) = match &compiled.action {
            CompiledAction::Throttle(throttle) => throttle.key_name(),
            _ => ("", 0),
        };
        let (address, key) = match &charge.rule {
            ChargedBy::Rule(rule) => (Some(std::ptr::from_ref(*rule).addr()), key),
            _ => (None, OF_ACCOUNT),
        };
        Self { rule: &charge.rule, address, key, ipv6_prefix, counts: true }
    }

    /// The name under which its limits are charged: the rule's, or that of all accounts' own limits.
    fn name(&self) -> &'c str {
        self.rule.name().unwrap_or_default()
    }

    fn joining(&self) -> Joining<'c> {
        let Self { rule, ipv6_prefix, counts, .. } = *self;
        Joining { rule, key: part_of(self.key, ipv6_prefix), ipv6_prefix, counts }
    }
}

/// The name of a rule's part among the parts of rules that apply together.
fn part(joining: &Joining<'_>, own: &str) -> String {
    part_of(own, joining.ipv6_prefix)
}

/// Attributes count as the same in all rules, but for addresses, of which rules may count more or fewer bits.
fn part_of(attributes: &str, ipv6_prefix: u8) -> String {
    match attributes.split(',').any(|attribute| attribute == IP) {
        true => format!("{attributes}/{ipv6_prefix}"),
        false => attributes.to_owned(),
    }
}

/// What is charged to the limits of all these rules.
fn request<'a>(charging: impl Iterator<Item = &'a (Charging<'a>, &'a Charge<'a>)>) -> OwnedRequest {
    let mut key = None;
    let mut parts: Vec<(String, Vec<u8>)> = Vec::new();
    let mut costs = Vec::new();
    let mut add = |name: String, value: &[u8]| {
        if !parts.iter().any(|(known, _)| *known == name) {
            parts.push((name, value.to_vec()));
        }
    };
    for (own, charge) in charging {
        // The first one's is the request's key, and may be the tag of another rule.
        key.get_or_insert_with(|| charge.key().to_vec());
        add(part_of(own.key, own.ipv6_prefix), charge.key());
        charge.request.parts().for_each(|(name, value)| add(part_of(name, own.ipv6_prefix), value));
        let of_rule = charge.request.cost().map(|units| ("", units));
        let of_limits = charge.request.own_costs();
        costs.extend(of_rule.into_iter().chain(of_limits).map(|(name, units)| (apart(own.name(), name), units)));
    }
    OwnedRequest::charging(key.unwrap_or_default(), parts, None, costs)
}
