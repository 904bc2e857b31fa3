//! The fields of every request: what it counts by, what it takes, and when.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::call::Costs;
use crate::error::{Error, Kind};
use crate::rule::{ALL, APART, Rule, ScopedLimit, is_apart};

/// The last microsecond since the epoch at which a decision can be made: the year 2112.
pub(super) const LAST_TIME: u64 = 1 << 52;

/// The fields of every request: all that an acquire depends on, unless its id has a time of its own. Thousands of
/// acquires may be queued, so it is kept small.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlainRequest<'a> {
    pub(super) key: &'a [u8],
    pub(crate) id: Option<&'a [u8]>,
    pub(super) parts: Parts<'a>,
    pub(super) costs: OwnCosts<'a>,
    pub(super) terms: Terms,
}

/// The fields of a plain request that aren't borrowed.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Terms {
    /// None: the rule's.
    pub(super) cost: Option<u64>,
    /// Whether all limits have that cost, whatever costs are their own.
    pub(super) of_all: bool,
    pub(super) at: Option<SystemTime>,
    pub(super) deadline: Option<Duration>,
    pub(super) jitter: u8,
}

/// Values by name.
#[derive(Debug)]
pub(super) enum ByName<'a, B, O> {
    Borrowed(&'a [(&'a str, B)]),
    Owned(&'a [(Arc<str>, O)]),
}

/// What limits count by instead of the key.
pub(super) type Parts<'a> = ByName<'a, &'a [u8], Arc<[u8]>>;

/// What the limits with these names take.
pub(super) type OwnCosts<'a> = ByName<'a, u64, u64>;

impl<B, O> Clone for ByName<'_, B, O> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B, O> Copy for ByName<'_, B, O> {}

impl<B, O> ByName<'_, B, O> {
    pub(super) const NONE: Self = Self::Borrowed(&[]);

    pub(super) fn is_empty(&self) -> bool {
        match self {
            Self::Borrowed(values) => values.is_empty(),
            Self::Owned(values) => values.is_empty(),
        }
    }
}

impl<'a> PlainRequest<'a> {
    /// The time to decide at, in microseconds since the epoch.
    pub(crate) fn now_us(&self) -> Result<Option<u64>, Error> {
        self.terms.at.map(microseconds).transpose()
    }

    /// The time to decide at, unless it is the engine's.
    pub(crate) fn time(&self) -> Option<SystemTime> {
        self.terms.at
    }

    /// How long this call may take, given the limiter's deadline.
    pub(crate) fn deadline_or(&self, deadline: Duration) -> Duration {
        self.terms.deadline.unwrap_or(deadline)
    }

    /// By how many percent a denial's wait may be lengthened.
    pub(crate) fn wait_jitter(&self) -> u8 {
        self.terms.jitter
    }

    /// Units that it takes of each limit of this rule.
    pub(crate) fn units(&self, rule: &Rule) -> Costs {
        self.units_of(rule, rule.scoped_limits().iter())
    }

    /// The same of some of its limits.
    pub(crate) fn units_of<'r>(&self, rule: &Rule, limits: impl Iterator<Item = &'r ScopedLimit>) -> Costs {
        if self.terms.of_all || self.costs.is_empty() && !rule.has_own_costs() {
            return Costs::all(self.terms.cost.unwrap_or(rule.default_cost()));
        }
        let units = |scoped: &ScopedLimit| {
            let rule = rule.rule_of(scoped);
            let name = rule.name().unwrap_or_default();
            let own = || self.cost_by(|cost| scoped.costs_by(cost));
            let apart = || self.cost_by(|cost| scoped.costs_apart_by(cost, name));
            let of_rule = self.cost_by(|cost| is_apart(cost, name, ALL));
            let said = match scoped.has_own_cost() {
                true => of_rule.or_else(own).or_else(apart).or(scoped.own_cost()).or(self.terms.cost),
                false => of_rule.or_else(own).or(self.terms.cost).or_else(apart),
            };
            said.unwrap_or(rule.default_cost())
        };
        Costs::each_of(limits.map(units))
    }

    /// The cost given by the first such name.
    fn cost_by(&self, is_it: impl Fn(&str) -> bool) -> Option<u64> {
        match self.costs {
            OwnCosts::Borrowed(costs) => costs.iter().find(|(name, _)| is_it(name)).map(|(_, units)| *units),
            OwnCosts::Owned(costs) => costs.iter().find(|(name, _)| is_it(name)).map(|(_, units)| *units),
        }
    }

    /// Refuses costs of limits that the rule doesn't have.
    pub(crate) fn check_costs(&self, rule: &Rule) -> Result<(), Error> {
        if self.costs.is_empty() {
            return Ok(());
        }
        let is_unknown = |name: &str| !rule.costs_by(name);
        let unknown = match self.costs {
            OwnCosts::Borrowed(costs) => costs.iter().map(|(name, _)| *name).find(|name| is_unknown(name)),
            // A set of rules may name costs of single rules: not all of them are this rule's.
            OwnCosts::Owned(costs) => {
                costs.iter().map(|(name, _)| &**name).find(|name| is_unknown(name) && !name.contains(APART))
            }
        };
        let Some(unknown) = unknown else { return Ok(()) };
        let names: Vec<_> = rule.scoped_limits().iter().map(|scoped| &**scoped.quota.title()).collect();
        let (rule, names) = (rule.name().unwrap_or_default(), names.join("; "));
        Err(Error::new(Kind::Input, format!("costs: expected limits of rule {rule} ({names}), got {unknown:?}")))
    }

    /// What a limit counts by: the part with this name, or the key.
    pub(crate) fn counted(&self, rule: &Rule, part: Option<&str>) -> Result<&'a [u8], Error> {
        let Some(name) = part else { return Ok(self.key) };
        let found = match self.parts {
            Parts::Borrowed(parts) => parts.iter().find(|(part, _)| *part == name).map(|(_, value)| *value),
            Parts::Owned(parts) => parts.iter().find(|(part, _)| **part == *name).map(|(_, value)| &**value),
        };
        if found.is_some_and(<[u8]>::is_empty) {
            return Err(Error::new(
                Kind::EmptyKey,
                format!("part {name}: expected at least one byte, got an empty part"),
            ));
        }
        found.ok_or_else(|| {
            let rule = rule.name().unwrap_or_default();
            Error::new(Kind::Input, format!("request: the part {name:?}, which rule {rule} counts by, is missing"))
        })
    }
}

pub(super) fn microseconds(at: SystemTime) -> Result<u64, Error> {
    let since = at.duration_since(UNIX_EPOCH).ok().and_then(|since| u64::try_from(since.as_micros()).ok());
    since
        .filter(|now| *now <= LAST_TIME)
        .ok_or_else(|| Error::new(Kind::Input, format!("now: expected a time from 1970 to 2112, got {at:?}")))
}
