//! The subject of a command: a rule, and what its limits count of a request.

use anyhow::{Result, bail};
use tollgate::rules::{Charge, Effect, RuleSet};
use tollgate::{Limit, LimitDecision, Rule};

use crate::attributes::{self, Pairs};
use crate::escape::shown;
use crate::messages;
use crate::options::FailureOptions;

/// A rule, and what is known of the request apart from its key.
#[derive(Debug)]
pub(crate) struct Subject {
    pub(crate) rule: Rule,
    /// The cost of a request that doesn't set one.
    pub(crate) cost: u64,
    /// Whether no limit takes the cost that a request sets, since each has one of its own.
    costs_apart: bool,
    /// What single limits take, by their names.
    own_costs: Vec<(String, u64)>,
    /// The part that each limit counts, in the rule's order; `None` if it counts the key.
    counted: Vec<Option<String>>,
    parts: Pairs,
    /// The key of the override that replaces the limits of a rule in a set, if one does.
    pub(crate) overridden: Option<String>,
    /// Generates requests for a rule in a service's set.
    drawn: Option<Drawn>,
}

/// Generated requests for one rule, by number, each with other values of the varying attributes.
#[derive(Debug)]
pub(crate) struct Drawn {
    /// The rule alone, without overrides.
    pub(crate) rules: RuleSet,
    pub(crate) name: String,
    pub(crate) given: Pairs,
    /// The attributes that it counts by and that weren't given.
    pub(crate) varying: Vec<String>,
}

impl Subject {
    /// The subject that is this rule, with the parts that the request has apart from its key.
    pub(crate) fn of(rule: Rule, parts: Pairs) -> Result<Self> {
        let counted: Vec<_> = rule.counted_parts().map(|part| part.map(str::to_owned)).collect();
        let (tag, cost) = (rule.tag().map(str::to_owned), rule.default_cost());
        let needed = counted.iter().flatten().chain(&tag);
        if let Some((unknown, _)) = parts.iter().find(|(given, _)| !needed.clone().any(|name| name == given)) {
            let mut names: Vec<_> = needed.map(String::as_str).collect();
            names.sort_unstable();
            names.dedup();
            let name = rule.name().unwrap_or_default();
            if names.is_empty() {
                bail!("--attr: rule {name} counts the key alone: leave out {unknown}");
            }
            bail!("--attr: expected {} for rule {name}, got {unknown}", names.join(", "));
        }
        if let Some(missing) = needed.clone().find(|name| !parts.iter().any(|(given, _)| given == *name)) {
            let why = match counted.iter().position(|part| part.as_ref() == Some(missing)) {
                Some(at) => format!("which {} counts", rule.limits().nth(at).map(title).unwrap_or_default()),
                None => "the tag of its keys".to_owned(),
            };
            let name = rule.name().unwrap_or_default();
            bail!("rule {name}: --attr {missing}=VALUE is missing, {why}");
        }
        let (own_costs, costs_apart) = (Vec::new(), false);
        Ok(Self { rule, cost, costs_apart, own_costs, counted, parts, overridden: None, drawn: None })
    }

    /// The subject that a rule of a set charges.
    pub(crate) fn of_charge(charge: &Charge<'_>, overridden: Option<&str>) -> Self {
        let rule = charge.rule().clone();
        let counted = rule.counted_parts().map(|part| part.map(str::to_owned)).collect();
        let parts = charge.parts().map(|(name, value)| (name.to_owned(), value.to_vec())).collect();
        let own_costs = charge.own_costs().map(|(name, units)| (name.to_owned(), units)).collect();
        let (cost, overridden) = (charge.cost(), overridden.map(str::to_owned));
        let costs_apart = charge.costs(Some(0)) == charge.costs(Some(1));
        Self { cost, costs_apart, own_costs, rule, counted, parts, overridden, drawn: None }
    }

    /// The cost of a request for which --cost says this.
    pub(crate) fn cost_or_own(&self, given: Option<u64>) -> Result<u64> {
        match given.filter(|_| self.costs_apart) {
            Some(cost) => {
                bail!(
                    "--cost: has no effect, since each limit of {} has a cost of its own: leave out {cost}",
                    self.name()
                )
            }
            None => Ok(given.unwrap_or(self.cost)),
        }
    }

    /// What single limits take, by their names.
    pub(crate) fn own_costs(&self) -> Vec<(&str, u64)> {
        self.own_costs.iter().map(|(name, units)| (name.as_str(), *units)).collect()
    }

    /// The subject with generated requests.
    pub(crate) fn with_drawn(self, drawn: Drawn) -> Self {
        Self { drawn: Some(drawn), ..self }
    }

    /// Whether all generated requests count as one.
    pub(crate) fn counts_all_as_one(&self) -> bool {
        self.drawn.as_ref().is_some_and(Drawn::is_one)
    }

    /// The key and attributes of the generated request with this number.
    pub(crate) fn drawn(&self, number: u32) -> (Vec<u8>, Pairs) {
        let charged = self.drawn.as_ref().and_then(|drawn| drawn.request(number));
        charged.unwrap_or_else(|| (format!("key-{number}").into_bytes(), self.parts.clone()))
    }

    /// Reports it if the key has limits of its own.
    pub(crate) fn say_who_overrides(&self) {
        if let Some(key) = &self.overridden {
            let (name, rule) = (self.name(), &self.rule);
            messages::note(format!("{} has an override in rule {name}: {rule}", shown(key.as_bytes())));
        }
    }

    pub(crate) fn name(&self) -> &str {
        self.rule.name().unwrap_or_default()
    }

    /// What the request has apart from its key.
    pub(crate) fn parts(&self) -> Vec<(&str, &[u8])> {
        self.parts.iter().map(|(name, value)| (name.as_str(), value.as_slice())).collect()
    }

    /// The first limit that counts something other than the key, if any.
    pub(crate) fn counts_a_part(&self) -> Option<&Limit> {
        self.rule.limits().zip(&self.counted).find(|(_, part)| part.is_some()).map(|(limit, _)| limit)
    }

    /// What this limit of the rule counts for a request with this key.
    pub(crate) fn counted_by<'a>(&'a self, limit: &LimitDecision, key: &'a [u8]) -> &'a [u8] {
        self.counted(self.rule.limits().position(|other| *title(other) == **limit.name()), key)
    }

    /// What the limit at this position in the rule counts for a request with this key.
    pub(crate) fn counted<'a>(&'a self, at: Option<usize>, key: &'a [u8]) -> &'a [u8] {
        let part = at.and_then(|at| self.counted.get(at)).and_then(Option::as_ref);
        let value = part.and_then(|name| self.parts.iter().find(|(given, _)| given == name));
        value.map_or(key, |(_, value)| value)
    }

    /// Whether its calls hold permits, each with an id of its own.
    pub(crate) fn holds(&self) -> bool {
        self.rule.limits().any(|limit| limit.algorithm().holds())
    }

    /// Sets the chosen policy for when Redis is unreachable.
    pub(crate) fn follow_policy(mut self, policy: FailureOptions) -> Result<Self> {
        self.rule = policy.follow(self.rule)?;
        Ok(self)
    }
}

impl Drawn {
    /// Whether all requests count as one.
    pub(crate) fn is_one(&self) -> bool {
        self.varying.is_empty()
    }

    /// The key and attributes of the request with this number.
    pub(crate) fn request(&self, number: u32) -> Option<(Vec<u8>, Pairs)> {
        let given = self.attributes(number);
        let applies = self.rules.by_name(&self.name, &attributes::read(&given)).ok()??;
        let Effect::Limit(charge) = applies.effect else { return None };
        let parts = charge.parts().map(|(name, value)| (name.to_owned(), value.to_vec())).collect();
        Some((charge.key().to_vec(), parts))
    }

    pub(crate) fn attributes(&self, number: u32) -> Pairs {
        let mut all = self.given.clone();
        for name in &self.varying {
            let value = match name.as_str() {
                // Private addresses, of a range large enough for a run.
                "ip" => std::net::Ipv4Addr::from(0x0a00_0000 | (number & 0x00ff_ffff)).to_string(),
                "path" => format!("/key-{number}"),
                _ => format!("key-{number}"),
            };
            all.push((name.clone(), value.into_bytes()));
        }
        all
    }
}

/// The name of a limit in decisions.
pub(crate) fn title(limit: &Limit) -> String {
    limit.name().map_or_else(|| limit.to_string(), str::to_owned)
}
