//! A request that borrows nothing.

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
    key: Vec<u8>,
    parts: Vec<(String, Vec<u8>)>,
    costs: Vec<(String, u64)>,
    id: Option<Vec<u8>>,
    terms: Terms,
    rare: Rare,
    answers: Vec<LimitDecision>,
}

impl<'a> From<&'a OwnedRequest> for Request<'a> {
    fn from(owned: &'a OwnedRequest) -> Self {
        let OwnedRequest { key, parts, costs, id, terms, rare, answers } = owned;
        let (parts, costs) = (Parts::Owned(parts), OwnCosts::Owned(costs));
        let plain = PlainRequest { key, id: id.as_deref(), parts, costs, terms: *terms };
        Self { plain, rare: *rare, answers }
    }
}

impl OwnedRequest {
    /// Copies of what this one borrows.
    pub(super) fn of(request: Request<'_>) -> Self {
        let Request { plain: PlainRequest { key, id, parts, costs, terms }, rare, answers } = request;
        let parts = match parts {
            Parts::Borrowed(parts) => parts.iter().map(|(name, value)| ((*name).to_owned(), value.to_vec())).collect(),
            Parts::Owned(parts) => parts.to_vec(),
        };
        let costs = match costs {
            OwnCosts::Borrowed(costs) => costs.iter().map(|(name, units)| ((*name).to_owned(), *units)).collect(),
            OwnCosts::Owned(costs) => costs.to_vec(),
        };
        let (key, id, answers) = (key.to_vec(), id.map(<[u8]>::to_vec), answers.to_vec());
        Self { key, parts, costs, id, terms, rare, answers }
    }

    /// About this key, with these parts, at this cost or the rule's, and these of single limits.
    #[allow(dead_code, reason = "made by sets of rules, which are a feature")]
    pub(crate) fn charging(
        key: Vec<u8>,
        parts: Vec<(String, Vec<u8>)>,
        cost: Option<u64>,
        costs: Vec<(String, u64)>,
    ) -> Self {
        let terms = Terms { cost, ..Terms::default() };
        Self { key, parts, costs, id: None, terms, rare: Rare::NONE, answers: Vec::new() }
    }

    /// Sets the units that it takes of limits without a cost of their own.
    #[allow(dead_code, reason = "asked by the middleware, which is a feature")]
    pub(crate) fn set_cost(&mut self, units: u64) {
        self.terms.cost = Some(units);
    }

    /// Sets the units that it takes of the limits with this name.
    #[allow(dead_code, reason = "asked by the middleware, which is a feature")]
    pub(crate) fn set_cost_of(&mut self, name: &str, units: u64) {
        self.costs.retain(|(other, _)| other != name);
        self.costs.push((name.to_owned(), units));
    }

    /// The call had this decision: see [`Request::following`].
    pub(crate) fn follow(&mut self, decision: &Decision) {
        self.rare.after = Some(Earlier::of(decision));
    }

    /// The key.
    #[must_use]
    pub fn key(&self) -> &[u8] {
        &self.key
    }

    #[allow(dead_code, reason = "asked by sets of rules, which are a feature")]
    pub(crate) fn cost(&self) -> Option<u64> {
        self.terms.cost
    }

    #[allow(dead_code, reason = "asked by sets of rules, which are a feature")]
    pub(crate) fn own_costs(&self) -> impl Iterator<Item = (&str, u64)> {
        self.costs.iter().map(|(name, units)| (name.as_str(), *units))
    }

    /// The parts, by name.
    pub fn parts(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.parts.iter().map(|(name, value)| (name.as_str(), value.as_slice()))
    }
}
