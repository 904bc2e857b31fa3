//! A request that borrows nothing.

use std::sync::Arc;

use super::plain::{OwnCosts, Parts, Terms};
use super::{Earlier, PlainRequest, Rare, Request};
use crate::decision::{Decision, LimitDecision};

/// A request that owns its key, parts, id and decision. A reference to one is a [`Request`].
///
/// ```
/// use tollgate::{OwnedRequest, Request};
///
/// struct Customer {
///     user: String,
///     org: String,
/// }
///
/// fn request(customer: &Customer) -> OwnedRequest {
///     let key = format!("user:{}", customer.user);
///     Request::new(&key).parts(&[("org", customer.org.as_bytes())]).into_owned()
/// }
///
/// let request = request(&Customer { user: "42".into(), org: "acme".into() });
/// let of_cost_5 = Request::from(&request).cost(5);
/// ```
#[derive(Clone, Debug)]
pub struct OwnedRequest {
    key: Arc<[u8]>,
    parts: Vec<(Arc<str>, Arc<[u8]>)>,
    costs: Vec<(Arc<str>, u64)>,
    id: Option<Vec<u8>>,
    terms: Terms,
    /// The fields that few requests have, boxed, so that other requests are cheap to move.
    rest: Option<Box<Rest>>,
}

/// The fields that few requests have, and what a refund goes by.
#[derive(Clone, Debug)]
struct Rest {
    rare: Rare,
    answers: Vec<LimitDecision>,
}

impl<'a> From<&'a OwnedRequest> for Request<'a> {
    fn from(owned: &'a OwnedRequest) -> Self {
        let OwnedRequest { key, parts, costs, id, terms, rest } = owned;
        let (parts, costs) = (Parts::Owned(parts), OwnCosts::Owned(costs));
        let plain = PlainRequest { key, id: id.as_deref(), parts, costs, terms: *terms };
        match rest {
            Some(rest) => Self { plain, rare: rest.rare, answers: &rest.answers },
            None => Self::of_plain(plain),
        }
    }
}

impl OwnedRequest {
    /// Copies of what this one borrows.
    pub(super) fn of(request: Request<'_>) -> Self {
        let Request { plain: PlainRequest { key, id, parts, costs, terms }, rare, answers } = request;
        let parts = match parts {
            Parts::Borrowed(parts) => parts.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect(),
            Parts::Owned(parts) => parts.to_vec(),
        };
        let costs = match costs {
            OwnCosts::Borrowed(costs) => costs.iter().map(|(name, units)| ((*name).into(), *units)).collect(),
            OwnCosts::Owned(costs) => costs.to_vec(),
        };
        let has_more = rare != Rare::NONE || !answers.is_empty();
        let rest = has_more.then(|| Box::new(Rest { rare, answers: answers.to_vec() }));
        Self { key: key.into(), parts, costs, id: id.map(<[u8]>::to_vec), terms, rest }
    }

    /// For this key, with these parts, at this cost or the rule's, and at these costs of single limits.
    #[allow(dead_code, reason = "made by sets of rules, which are a feature")]
    pub(crate) fn charging(
        key: Arc<[u8]>,
        parts: Vec<(Arc<str>, Arc<[u8]>)>,
        cost: Option<u64>,
        costs: Vec<(Arc<str>, u64)>,
    ) -> Self {
        let terms = Terms { cost, ..Terms::default() };
        Self { key, parts, costs, id: None, terms, rest: None }
    }

    /// Sets the units that it takes of limits without a cost of their own.
    #[allow(dead_code, reason = "asked by the middleware, which is a feature")]
    pub(crate) fn set_cost(&mut self, units: u64) {
        self.terms.cost = Some(units);
    }

    /// Sets the units that it takes of the limits with this name, before what it has said of them by another.
    #[allow(dead_code, reason = "asked by sets of rules, which are a feature")]
    pub(crate) fn set_cost_of(&mut self, name: &str, units: u64) {
        self.costs.retain(|(other, _)| **other != *name);
        self.costs.insert(0, (name.into(), units));
    }

    /// The call had this decision: see [`Request::following`].
    pub(crate) fn follow(&mut self, decision: &Decision) {
        let none = || Box::new(Rest { rare: Rare::NONE, answers: Vec::new() });
        self.rest.get_or_insert_with(none).rare.after = Some(Earlier::of(decision));
    }

    /// The key.
    #[must_use]
    pub fn key(&self) -> &[u8] {
        &self.key
    }

    #[allow(dead_code, reason = "asked by sets of rules, which are a feature")]
    pub(crate) fn shared_key(&self) -> &Arc<[u8]> {
        &self.key
    }

    #[allow(dead_code, reason = "asked by sets of rules, which are a feature")]
    pub(crate) fn shared_parts(&self) -> &[(Arc<str>, Arc<[u8]>)] {
        &self.parts
    }

    #[allow(dead_code, reason = "asked by sets of rules, which are a feature")]
    pub(crate) fn cost(&self) -> Option<u64> {
        self.terms.cost
    }

    #[allow(dead_code, reason = "asked by sets of rules, which are a feature")]
    pub(crate) fn own_costs(&self) -> impl Iterator<Item = (&str, u64)> {
        self.costs.iter().map(|(name, units)| (&**name, *units))
    }

    /// The parts, by name.
    pub fn parts(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.parts.iter().map(|(name, value)| (&**name, &**value))
    }
}
