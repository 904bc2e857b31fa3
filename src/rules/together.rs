//! Several rules that apply to a request, since those before the last one continue: their limits are one decision.

use std::borrow::Cow;
use std::sync::{Arc, LazyLock, OnceLock};

use quick_cache::sync::Cache;
use smallvec::SmallVec;

use super::applies::{Applies, Effect};
use super::attributes::Attributes;
use super::charge::{Charge, ChargedBy};
use super::compiled::{Compiled, CompiledAction};
use super::statuses::CountedBy;
use super::throttle::Throttle;
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
static OF_ACCOUNT: LazyLock<Arc<str>> = LazyLock::new(|| "\naccount".into());

impl Together {
    /// What these rules, in their order, make of a request.
    pub(super) fn effect<'s>(&self, rules: &[&'s Compiled], request: &Attributes<'_>) -> Result<Applies<'s>, Error> {
        let mut together = Vec::with_capacity(rules.len());
        for rule in rules {
            together.push(rule.effect(request)?);
        }
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
            let is_account = one_more.throttle.is_none();
            charging.push((Charging { counts: !(is_account && has_account), ..one_more }, charge));
            has_account |= is_account;
        }
        let joining = || charging.iter().map(|(charging, _)| charging.joining()).collect::<SmallVec<[_; 4]>>();
        let joined = || Arc::new(Rule::joined(&joining(), |at, own| charging[at].0.part(own)));
        let rule = match charging.iter().map(|(charging, _)| charging.address()).collect::<Option<Joined>>() {
            Some(rules) => {
                // Most sets have no rules that apply together.
                let known = self.0.get_or_init(|| Cache::new(MOST_KEPT));
                known.get(&rules).unwrap_or_else(|| {
                    let rule = joined();
                    known.insert(rules, Arc::clone(&rule));
                    rule
                })
            }
            // An account's own limits aren't the set's, so they aren't kept.
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
    /// What it is to the set; none of an account's own limits.
    throttle: Option<&'c Throttle>,
    /// Whether its limits are charged, and not by another rule already.
    counts: bool,
}

impl<'c> Charging<'c> {
    fn of<'s: 'c>(compiled: &'s Compiled, charge: &'c Charge<'s>) -> Self {
        let throttle = match (&compiled.action, &charge.rule) {
            (CompiledAction::Throttle(throttle), ChargedBy::Rule(_)) => Some(&**throttle),
            _ => None,
        };
        Self { rule: &charge.rule, throttle, counts: true }
    }

    /// Where the rule is, if it stays there for as long as the set does.
    fn address(&self) -> Option<usize> {
        self.throttle.map(|_| std::ptr::from_ref(self.rule).addr())
    }

    /// The name under which its limits are charged: the rule's, or that of all accounts' own limits.
    fn name(&self) -> &'c str {
        self.rule.name().unwrap_or_default()
    }

    /// The part of the request that is its own key.
    fn key(&self) -> &'c Arc<str> {
        self.throttle.map_or(&OF_ACCOUNT, Throttle::key_among_rules)
    }

    /// The part of the request that is this part of the rule.
    fn part(&self, own: &str) -> Arc<str> {
        self.throttle.map_or_else(|| own.into(), |throttle| throttle.part_among_rules(own))
    }

    fn joining(&self) -> Joining<'c> {
        Joining { rule: self.rule, key: self.key(), counts: self.counts }
    }
}

/// What is charged to the limits of all these rules.
fn request<'a>(charging: impl Iterator<Item = &'a (Charging<'a>, &'a Charge<'a>)> + Clone) -> OwnedRequest {
    let mut parts: Vec<(Arc<str>, Arc<[u8]>)> = Vec::with_capacity(4);
    let mut costs = Vec::new();
    let first = charging.clone().next();
    // The first one's is the request's key. It may be the tag of another rule, which has to be a part.
    let is_tag = charging.clone().any(|(own, _)| own.rule.tag().is_some());
    let is_key = |name: &str| !is_tag && first.is_some_and(|(first, _)| **first.key() == *name);
    let mut add = |name: Cow<'_, Arc<str>>, value: &Arc<[u8]>| {
        if !is_key(&name) && !parts.iter().any(|(known, _)| *known == *name) {
            parts.push((name.into_owned(), Arc::clone(value)));
        }
    };
    for (own, charge) in charging.clone() {
        add(Cow::Borrowed(own.key()), charge.request.shared_key());
        charge.request.shared_parts().iter().for_each(|(name, value)| add(Cow::Owned(own.part(name)), value));
        let of_rule = charge.request.cost().map(|units| ("", units));
        let of_limits = charge.request.own_costs();
        costs.extend(of_rule.into_iter().chain(of_limits).map(|(name, units)| (apart(own.name(), name).into(), units)));
    }
    let key = first.map(|(_, charge)| Arc::clone(charge.request.shared_key()));
    OwnedRequest::charging(key.unwrap_or_default(), parts, None, costs)
}
