//! The limit that a decision was made by.

use std::sync::Arc;
use std::time::Duration;

use crate::algorithm::Algorithm;
use crate::limit::{CalendarUnit, Limit, Windows};

/// One limit of a rule, as reported in a [`Decision`](crate::Decision): its units per period, and names.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Quota {
    rule: Option<Arc<str>>,
    title: Arc<str>,
    label: Box<str>,
    algorithm: Algorithm,
    rate: u64,
    period: Duration,
    capacity: u64,
    window: Option<CalendarUnit>,
    is_even: bool,
}

impl Quota {
    /// For a limit in the rule of this name, which is empty if it has none yet.
    pub(crate) fn of(rule: &str, limit: &Limit) -> Self {
        Self {
            rule: (!rule.is_empty()).then(|| rule.into()),
            title: limit.name().map_or_else(|| limit.to_string(), str::to_owned).into(),
            label: limit.label().into(),
            algorithm: limit.algorithm(),
            rate: limit.rate(),
            period: limit.period(),
            capacity: limit.capacity(),
            window: limit.window(),
            is_even: limit.windows().is_none_or(Windows::are_even),
        }
    }

    /// The rule's name.
    pub(crate) fn rule(&self) -> Option<&str> {
        self.rule.as_deref()
    }

    /// The same, shared.
    pub(crate) fn rule_name(&self) -> Option<&Arc<str>> {
        self.rule.as_ref()
    }

    /// The limit's name or, if unnamed, its text, shared.
    pub(crate) fn title(&self) -> &Arc<str> {
        &self.title
    }

    /// The limit's name or, if unnamed, its algorithm and period: `token-bucket-1s`.
    pub(crate) fn label(&self) -> &str {
        &self.label
    }

    /// The algorithm.
    pub(crate) fn algorithm(&self) -> Algorithm {
        self.algorithm
    }

    /// Units per period; for permits, how many at once.
    pub(crate) fn rate(&self) -> u64 {
        self.rate
    }

    /// The period, as in [`Limit::period`].
    pub(crate) fn period(&self) -> Duration {
        self.period
    }

    /// The most units that can be taken at one instant.
    pub(crate) fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Whether its periods are all equally long.
    #[allow(dead_code, reason = "asked by header fields, which are a feature")]
    pub(crate) fn has_even_periods(&self) -> bool {
        self.is_even
    }

    /// The unit of its calendar windows, if it has any: day, week, month or year.
    pub(crate) fn window(&self) -> Option<CalendarUnit> {
        self.window
    }
}
