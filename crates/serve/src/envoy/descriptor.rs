//! What a descriptor asks: the attributes that its entries are, and what it takes.

use std::borrow::Cow;
use std::time::Duration;

use envoy_types::pb::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use envoy_types::pb::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::{Entry, RateLimitOverride};
use envoy_types::pb::envoy::r#type::v3::RateLimitUnit;
use tollgate::rules::{Attributes, Effect, RuleRequest, RuleSet};
use tollgate::{Algorithm, CalendarUnit, Limit, Operation};

use crate::failure::Failure;

/// The most descriptors of a request: one script call decides all.
pub(super) const MOST_DESCRIPTORS: usize = 100;

/// The most entries of a descriptor: each is looked for among the others.
pub(super) const MOST_ENTRIES: usize = 100;

/// The most units that scripts compute with.
const MOST_UNITS: u64 = 1 << 53;

/// The limit that stands for an override to nothing, of which no request of two units is ever admitted.
const REFUSED: (u32, u64) = (1, 2);

/// What is asked for a descriptor.
#[derive(Debug)]
pub(super) struct Asked {
    pub(super) operation: Operation,
    cost: Option<u64>,
    limit: Option<Limit>,
}

impl Asked {
    /// What this descriptor asks, with these attributes; the request's units are those of a descriptor without its own.
    ///
    /// # Errors
    ///
    /// More units than can be counted; a limit in no unit of time.
    pub(super) fn of(
        descriptor: &RateLimitDescriptor,
        of_request: u32,
        rules: &RuleSet,
        attributes: &Attributes<'_>,
    ) -> Result<Self, Failure> {
        let own = descriptor.hits_addend.as_ref().map(|units| units.value);
        if let Some(units) = own.filter(|units| *units > MOST_UNITS) {
            return Err(Failure::Request(format!("hits_addend: expected at most 2^53 units, got {units}")));
        }
        // An absent number of units is 0 on the wire too.
        let cost = own.or(Some(u64::from(of_request)).filter(|units| *units > 0));
        let (operation, cost) = match cost {
            // Whether a unit is left.
            Some(0) => (Operation::Peek, Some(1)),
            cost if descriptor.is_negative_hits => (Operation::Refund, cost),
            cost => (Operation::Acquire, cost),
        };
        Self { operation, cost, limit: None }.limited(descriptor, rules, attributes)
    }

    /// The same under the descriptor's own limit, if it has one.
    fn limited(
        mut self,
        descriptor: &RateLimitDescriptor,
        rules: &RuleSet,
        attributes: &Attributes<'_>,
    ) -> Result<Self, Failure> {
        let Some(own) = &descriptor.limit else { return Ok(self) };
        let mut own = *own;
        if own.requests_per_unit == 0 {
            (own.requests_per_unit, self.cost) = (REFUSED.0, Some(REFUSED.1));
            self.operation = Operation::Peek;
        }
        self.limit = Some(limit(own, rules, attributes)?);
        Ok(self)
    }

    /// Whether its own limit admits nothing.
    pub(super) fn is_refused(&self) -> bool {
        self.limit.is_some() && self.operation == Operation::Peek && self.cost == Some(REFUSED.1)
    }

    /// The request to the rules.
    pub(super) fn request<'a>(&'a self, attributes: &'a Attributes<'a>) -> RuleRequest<'a> {
        let request = RuleRequest::new(attributes);
        let request = self.cost.map_or(request, |units| request.cost(units));
        self.limit.as_ref().map_or(request, |limit| request.limit(limit))
    }
}

/// A limit of so many requests, by the algorithm of the rule that it replaces.
fn limit(own: RateLimitOverride, rules: &RuleSet, attributes: &Attributes<'_>) -> Result<Limit, Failure> {
    const DAY: u64 = 24 * 60 * 60;
    let seconds = match own.unit() {
        RateLimitUnit::Second => 1,
        RateLimitUnit::Minute => 60,
        RateLimitUnit::Hour => 60 * 60,
        RateLimitUnit::Day => DAY,
        RateLimitUnit::Month => return calendar(own, CalendarUnit::Month),
        RateLimitUnit::Year => return calendar(own, CalendarUnit::Year),
        RateLimitUnit::Unknown => {
            return Err(Failure::Request(format!("limit: expected a unit from SECOND to YEAR, got {}", own.unit)));
        }
    };
    let applies = rules.applies(attributes)?;
    let algorithm = match &applies.effect {
        Effect::Limit(charge) => charge.rule().limits().map(Limit::algorithm).find(|algorithm| counts(*algorithm)),
        _ => None,
    };
    let algorithm = algorithm.unwrap_or(Algorithm::FixedWindow);
    let limit = Limit::builder(algorithm, own.requests_per_unit.into(), Duration::from_secs(seconds)).build();
    limit.map_err(|error| Failure::Request(format!("limit: {error}")))
}

fn calendar(own: RateLimitOverride, unit: CalendarUnit) -> Result<Limit, Failure> {
    let limit = Limit::calendar(own.requests_per_unit.into(), unit).build();
    limit.map_err(|error| Failure::Request(format!("limit: {error}")))
}

/// Whether it counts units in a period that may be as long as a second.
fn counts(algorithm: Algorithm) -> bool {
    !matches!(algorithm, Algorithm::CalendarWindow | Algorithm::Concurrency)
}

/// The names of the attributes that these entries are: their keys. A key that comes again is numbered, as `rules import`
/// names it: `key.2`.
pub(super) fn names(entries: &[Entry]) -> Vec<Cow<'_, str>> {
    let mut names = Vec::with_capacity(entries.len());
    for (at, Entry { key, .. }) in entries.iter().enumerate() {
        names.push(match entries[..at].iter().filter(|other| other.key == *key).count() {
            0 => Cow::Borrowed(&**key),
            before => Cow::Owned(format!("{key}.{}", before + 1)),
        });
    }
    names
}

/// The attributes of these names that these entries are. A remote address is the client's `ip` too.
pub(super) fn attributes<'a>(domain: &'a str, names: &'a [Cow<'a, str>], entries: &'a [Entry]) -> Attributes<'a> {
    let mut attributes = Attributes::new();
    for (name, Entry { value, .. }) in names.iter().zip(entries) {
        if name == "remote_address" {
            attributes = attributes.set("ip", value);
        }
        attributes = attributes.set(name, value);
    }
    // Set last: no entry of that key pretends to be of another domain.
    attributes.set("domain", domain)
}
