//! Several rules that apply to a request together: their limits are one rule's, charged all or none, each under the
//! settings of its own rule.

use std::sync::Arc;

use super::{OnChange, OnError, OwnCost, Rule, ScopedLimit};
use crate::call::Options;
use crate::limit::Limit;

/// A rule that applies together with others, and what it counts by among them.
#[allow(dead_code, reason = "sets of rules join them, which are a feature")]
pub(crate) struct Joining<'r> {
    pub(crate) rule: &'r Rule,
    /// The part of the request that is its own key; for the first rule, the request's key.
    pub(crate) key: &'r str,
    /// Whether its limits count, or its policy alone: an account's own limits may replace those of several rules.
    pub(crate) counts: bool,
}

#[allow(dead_code, reason = "sets of rules join them, which are a feature")]
impl Rule {
    /// One rule of all limits of these. Each limit has the name, tag, cost and options of its own rule; the policy is
    /// the strictest one, and `max_hold` the shortest. Its own options combine theirs, so that a call with any option
    /// isn't taken for a plain one.
    ///
    /// `part(at, name)` is what the request calls the part that the rule at this place calls `name`.
    pub(crate) fn joined(rules: &[Joining<'_>], part: impl Fn(usize, &str) -> Arc<str>) -> Self {
        let key = rules[0].key;
        let named = |own: String| Some(own).filter(|name| name != key);
        let of_rule = |(at, joining): (usize, &Joining<'_>)| {
            let of_limit = |scoped: &ScopedLimit| {
                let by = scoped.by.as_ref().map_or_else(|| joining.key.to_owned(), |own| part(at, own).to_string());
                ScopedLimit { by: named(by), rule_at: at, ..scoped.clone() }
            };
            joining.rule.limits.iter().filter(|_| joining.counts).map(of_limit).collect::<Vec<_>>()
        };
        let limits = rules.iter().enumerate().flat_map(of_rule).collect();
        let tagged = |(at, joining): (usize, &Joining<'_>)| {
            let tag = joining.rule.tag.as_ref().map(|tag| part(at, tag));
            Self { tag, ..joining.rule.clone() }
        };
        Self::combined(limits, rules.iter().enumerate().map(tagged).collect())
    }

    /// This rule with one limit in place of its own, which counts its key; of several rules, the first one.
    pub(crate) fn with_limit(&self, limit: &Limit) -> Self {
        let first = &self.each()[0];
        let name = first.name.as_deref().unwrap_or_default();
        let limits = [ScopedLimit::new(name, Arc::new(limit.clone()), None, None)].into();
        // What a request to several rules calls the part of a tag is known to the joined rule alone.
        let tag = first.tag.clone().filter(|_| !self.is_joined());
        Self { limits, tag, rules: None, ..first.clone() }.governed_as(first)
    }

    /// A rule of these limits, each of one of these rules.
    fn combined(limits: Arc<[ScopedLimit]>, rules: Arc<[Self]>) -> Self {
        let first = &rules[0];
        let changes = rules.iter().map(|rule| rule.on_change);
        Self {
            limits,
            on_change: changes.clone().find(|change| *change != OnChange::KeepUsed).unwrap_or_default(),
            counts_overage: rules.iter().any(|rule| rule.counts_overage),
            block_for: rules.iter().filter_map(|rule| rule.block_for).max(),
            max_hold: rules.iter().filter_map(|rule| rule.max_hold).min(),
            on_error: None,
            rules: Some(Arc::clone(&rules)),
            ..first.clone()
        }
    }
}

/// The limits of several calls, as those of one rule.
#[derive(Default)]
pub(crate) struct RuleOfCalls {
    limits: Vec<ScopedLimit>,
    rules: Vec<Rule>,
}

impl RuleOfCalls {
    /// Adds the rule of a call, for whose parts the request has these names; returns its place.
    pub(crate) fn add_rule(&mut self, rule: &Rule, part: impl Fn(&str) -> Arc<str>) -> usize {
        let place = self.rules.len();
        self.rules.extend(rule.each().iter().map(|own| Rule { tag: own.tag.as_deref().map(&part), ..own.clone() }));
        place
    }

    /// Adds a limit of the rule at this place, which counts this part of the request (or its key) and takes so many
    /// units; returns its place.
    pub(crate) fn add_limit(&mut self, scoped: &ScopedLimit, rule: usize, by: Option<String>, units: u64) -> usize {
        let (cost, rule_at) = (Some(OwnCost::Units(units)), rule + scoped.rule_at);
        self.limits.push(ScopedLimit { by, cost, rule_at, ..scoped.clone() });
        self.limits.len() - 1
    }

    /// Lets the limit at this place take more units, for another call on its key. False if that one's limit has other
    /// numbers.
    pub(crate) fn take_more(&mut self, place: usize, scoped: &ScopedLimit, units: u64) -> bool {
        let limit = &mut self.limits[place];
        if let Some(OwnCost::Units(taken)) = &mut limit.cost {
            *taken = taken.saturating_add(units);
        }
        limit.limit == scoped.limit
    }

    /// All of them.
    pub(crate) fn joined(self) -> Rule {
        Rule::combined(self.limits.into(), self.rules.into())
    }
}

impl Rule {
    /// The rule that one of its limits is of: itself, unless it is made of several.
    pub(crate) fn rule_of(&self, scoped: &ScopedLimit) -> &Self {
        match &self.rules {
            None => self,
            Some(rules) => &rules[scoped.rule_at],
        }
    }

    /// The rules that it is made of: itself, or several.
    pub(crate) fn each(&self) -> &[Self] {
        self.rules.as_deref().unwrap_or(std::slice::from_ref(self))
    }

    /// The rules that have limits of it: itself, or several.
    pub(crate) fn counting(&self) -> impl Iterator<Item = &Self> {
        let counts = |at: usize| self.rules.is_none() || self.limits.iter().any(|scoped| scoped.rule_at == at);
        self.each().iter().enumerate().filter(move |(at, _)| counts(*at)).map(|(_, rule)| rule)
    }

    pub(crate) fn is_joined(&self) -> bool {
        self.rules.is_some()
    }

    /// The options of this limit, unless all limits have those of the call.
    pub(crate) fn own_options(&self, scoped: &ScopedLimit) -> Option<Options> {
        let rules = self.rules.as_ref()?;
        let differ = rules.iter().any(|rule| rule.options() != rules[0].options());
        differ.then(|| self.rule_of(scoped).options())
    }

    /// The answer while Redis is unreachable: the strictest of its rules', or the limiter's where they have none.
    pub(crate) fn policy_or(&self, limiters: OnError) -> OnError {
        let own = |rule: &Self| rule.on_error.unwrap_or(limiters);
        match (&self.rules, self.on_error) {
            (Some(rules), None) => rules.iter().map(own).max_by_key(|policy| policy.strictness()).unwrap_or_default(),
            _ => own(self),
        }
    }
}

impl ScopedLimit {
    /// Whether a joined request gives this limit's cost by this name, which begins with the name of its rule (`rule`).
    /// A limit without a cost of its own has its rule's.
    pub(crate) fn costs_apart_by(&self, name: &str, rule: &str) -> bool {
        let own = match &self.cost {
            Some(OwnCost::Named(own)) => own,
            Some(OwnCost::Units(_)) => return false,
            None => "",
        };
        is_apart(name, rule, own)
    }
}

/// Separates a rule's name from that of a cost, where joined rules take different costs by one name. No name contains
/// it.
pub(crate) const APART: char = '\n';

/// The name of a cost of all limits of a rule, whatever costs are their own.
pub(crate) const ALL: &str = "*";

/// Whether this is the name of such a cost of this rule.
pub(crate) fn is_apart(name: &str, rule: &str, own: &str) -> bool {
    name.strip_prefix(rule).and_then(|rest| rest.strip_prefix(APART)) == Some(own)
}

/// The name of such a cost.
#[allow(dead_code, reason = "sets of rules join them, which are a feature")]
pub(crate) fn apart(rule: &str, own: &str) -> String {
    format!("{rule}{APART}{own}")
}
