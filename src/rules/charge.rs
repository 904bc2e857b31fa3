//! What a request is charged to the limits of the rules that apply.

use std::ops::Deref;
use std::sync::Arc;

use super::statuses::{CountedBy, GivenBack};
use crate::request::{OwnedRequest, Request};
use crate::rule::{APART, Rule, is_apart};

/// What a request is charged to the limits of its rule: for [`Limiter::acquire`](crate::Limiter::acquire) or any other
/// call.
#[derive(Clone, Debug)]
pub struct Charge<'s> {
    pub(super) rule: ChargedBy<'s>,
    pub(super) request: OwnedRequest,
    pub(super) counted: CountedBy,
}

/// The limits that a request is charged by.
#[derive(Clone, Debug)]
pub(super) enum ChargedBy<'s> {
    /// The rule's, or those of an override.
    Rule(&'s Rule),
    /// The account's own limits.
    Own(Box<Rule>),
    /// Those of several rules.
    Together(Arc<Rule>),
}

impl Deref for ChargedBy<'_> {
    type Target = Rule;

    fn deref(&self) -> &Rule {
        match self {
            Self::Rule(rule) => rule,
            Self::Own(rule) => rule,
            Self::Together(rule) => rule,
        }
    }
}

impl<'s> Charge<'s> {
    /// The limits.
    #[must_use]
    pub fn rule(&self) -> &Rule {
        &self.rule
    }

    /// What the limits count by, and what they take. Other settings, such as an id, can be added; [`Request::costs`]
    /// replaces all that attributes say of single limits and, if several rules apply, of their costs.
    #[must_use]
    pub fn request(&self) -> Request<'_> {
        Request::from(&self.request)
    }

    /// What the limits count that have no key of their own: `user:42`.
    #[must_use]
    pub fn key(&self) -> &[u8] {
        self.request.key()
    }

    /// What the other limits count, and the hash tag, each by its name in the [rule](Rule::counted_parts).
    pub fn parts(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.request.parts()
    }

    /// Units that it takes of limits without a [cost of their own](Rule::cost_of); of several rules, the first one's.
    #[must_use]
    pub fn cost(&self) -> u64 {
        let first = &self.rule.each()[0];
        let apart = || self.request.own_costs().find(|(name, _)| is_apart(name, first.name().unwrap_or_default(), ""));
        let said = self.request.cost().or_else(|| Some(apart()?.1));
        said.unwrap_or(first.default_cost())
    }

    /// Units that it takes of each limit, in their order; at another cost of those without one of their own, if that is
    /// given.
    #[must_use]
    pub fn costs(&self, cost: Option<u64>) -> Vec<u64> {
        let request = cost.map_or(self.request(), |cost| self.request().cost(cost));
        request.units(&self.rule).each(self.rule.limits().len()).collect()
    }

    /// Whether a rule limits the response statuses after which requests stay charged (`count` in a file). Such a
    /// request needs an [id](crate::Request::id). Once the response's status is known, [settle](crate::Limiter::settle)
    /// the request at [what stays charged](Self::after_response). On a cluster, outside the middleware, the keys of its
    /// limits must share a slot ([`Rule::tagged`](crate::Rule::tagged)).
    #[must_use]
    pub fn counts_by_response(&self) -> bool {
        !self.counted.is_none()
    }

    /// By which statuses requests stay charged.
    #[cfg(feature = "http")]
    pub(crate) fn counted(&self) -> &CountedBy {
        &self.counted
    }

    /// This request, which was charged and has an id, at what it takes once its response has this HTTP status: for
    /// [`Limiter::settle`](crate::Limiter::settle). None if all stays charged.
    #[must_use]
    pub fn after_response(&self, request: Request<'_>, status: u16) -> Option<OwnedRequest> {
        match self.counted.given_back(status) {
            GivenBack::Nothing => None,
            given_back => Some(given_back.taken_off(request.into_owned())),
        }
    }

    /// What single limits take by the request's attributes, each by its name, for
    /// [`Request::costs`](crate::Request::costs).
    pub fn own_costs(&self) -> impl Iterator<Item = (&str, u64)> {
        self.request.own_costs().map(|(name, units)| (name.rsplit(APART).next().unwrap_or(name), units))
    }
}
