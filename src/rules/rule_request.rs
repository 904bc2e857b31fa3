//! A request to a set of rules: its attributes, and what the caller says of its charge.

use std::borrow::Cow;
use std::time::Duration;

use smallvec::SmallVec;

use super::RuleSet;
use super::applies::{Applies, Effect};
use super::attributes::Attributes;
use super::charge::{Charge, ChargedBy};
use crate::limit::Limit;
use crate::request::Request;
use crate::rule::Rule;

/// A request to a set of rules: its attributes and, for a caller that knows better than the rules, what it takes. A
/// reference to [`Attributes`] is a request at the rules' costs.
///
/// ```
/// use tollgate::rules::{Attributes, RuleRequest};
///
/// let attributes = Attributes::new().user("42");
/// let request = RuleRequest::new(&attributes).cost(5).id("7f3a");
/// ```
#[derive(Clone, Copy, Debug)]
pub struct RuleRequest<'a> {
    pub(super) attributes: &'a Attributes<'a>,
    cost: Option<u64>,
    costs: &'a [(&'a str, u64)],
    id: Option<&'a [u8]>,
    id_ttl: Option<Duration>,
    deadline: Option<Duration>,
    limit: Option<&'a Limit>,
}

impl<'a> RuleRequest<'a> {
    /// A request with these attributes, at the rules' costs.
    #[must_use]
    pub fn new(attributes: &'a Attributes<'a>) -> Self {
        Self { attributes, cost: None, costs: &[], id: None, id_ttl: None, deadline: None, limit: None }
    }

    /// Units that it takes of limits without a cost of their own, in place of the rule's `cost`: as
    /// [`Request::cost`](crate::Request::cost).
    #[must_use]
    pub fn cost(self, units: u64) -> Self {
        Self { cost: Some(units), ..self }
    }

    /// Units that it takes of single limits, by the limit's name or by the attribute that its `cost` names, which the
    /// attributes then needn't have. Limits that no rule that applies has are an error.
    #[must_use]
    pub fn costs(self, units: &'a [(&'a str, u64)]) -> Self {
        Self { costs: units, ..self }
    }

    /// A unique id: asked again with it, the request is charged once, as by [`Request::id`](crate::Request::id).
    /// Permits are held by it.
    #[must_use]
    pub fn id(self, id: &'a (impl AsRef<[u8]> + ?Sized)) -> Self {
        Self { id: Some(id.as_ref()), ..self }
    }

    /// How long the id is remembered: as [`Request::id_ttl`](crate::Request::id_ttl).
    #[must_use]
    pub fn id_ttl(self, ttl: Duration) -> Self {
        Self { id_ttl: Some(ttl), ..self }
    }

    /// How long the call may take, in place of the limiter's deadline.
    #[must_use]
    pub fn deadline(self, deadline: Duration) -> Self {
        Self { deadline: Some(deadline), ..self }
    }

    /// A limit in place of all limits of the rule that applies, as an override in a file has. It counts in a key of its
    /// own unless it has the algorithm and the period of one of the rule's unnamed limits. Rules that allow or block
    /// are not affected.
    #[must_use]
    pub fn limit(self, limit: &'a Limit) -> Self {
        Self { limit: Some(limit), ..self }
    }

    /// Its costs as the attributes that they may stand for.
    pub(super) fn costs_as_text(&self) -> SmallVec<[(&'a str, String); 2]> {
        self.costs.iter().map(|(name, units)| (*name, units.to_string())).collect()
    }

    /// Its attributes, and the costs that rules take from attributes which it lacks.
    pub(super) fn attributes_with<'c>(&self, rules: &RuleSet, costs: &'c [(&'a str, String)]) -> Cow<'c, Attributes<'c>>
    where
        'a: 'c,
    {
        let attributes: &'c Attributes<'c> = self.attributes;
        let lacks = |(name, _): &&(&'a str, String)| rules.counts_by(name) && attributes.text(name).is_none();
        let mut lacking = costs.iter().filter(lacks).peekable();
        if lacking.peek().is_none() {
            return Cow::Borrowed(attributes);
        }
        Cow::Owned(lacking.fold(attributes.clone(), |all, (name, units)| all.set(name, units)))
    }

    /// What rules that apply to its attributes make of it, at its own costs.
    pub(super) fn charged_to(&self, applies: &mut Applies<'_>) {
        self.change_if(applies, |_, _| true);
    }

    /// The same of a shadow rule, which may lack the limits that it names.
    pub(super) fn charged_to_shadow(&self, applies: &mut Applies<'_>) {
        self.change_if(applies, Rule::costs_by);
    }

    fn change_if(&self, applies: &mut Applies<'_>, takes: impl Fn(&Rule, &str) -> bool + Copy) {
        let changes_charge = self.cost.is_some()
            || !self.costs.is_empty()
            || self.id.is_some()
            || self.deadline.is_some()
            || self.limit.is_some();
        if !changes_charge {
            return;
        }
        if let Effect::Limit(charge) = &mut applies.effect {
            self.change(charge, takes);
        }
        applies.together.iter_mut().for_each(|own| self.change_if(own, takes));
    }

    fn change(&self, charge: &mut Charge<'_>, takes: impl Fn(&Rule, &str) -> bool) {
        if let Some(limit) = self.limit {
            charge.rule = ChargedBy::Own(Box::new(charge.rule.with_limit(limit)));
        }
        let mut request = Request::from(&charge.request);
        if let Some(units) = self.cost {
            request = request.cost(units);
        }
        if let Some(id) = self.id {
            request = request.id(id);
        }
        if let Some(ttl) = self.id_ttl {
            request = request.id_ttl(ttl);
        }
        if let Some(deadline) = self.deadline {
            request = request.deadline(deadline);
        }
        let mut request = request.into_owned();
        let costs = self.costs.iter().filter(|(name, _)| takes(&charge.rule, name));
        costs.for_each(|(name, units)| request.set_cost_of(name, *units));
        charge.request = request;
    }
}

impl<'a> From<&'a Attributes<'a>> for RuleRequest<'a> {
    fn from(attributes: &'a Attributes<'a>) -> Self {
        Self::new(attributes)
    }
}
