//! A limit that is suggested, and whom it would hit.

use std::cmp::Reverse;

use anyhow::Result;
use tollgate::Limit;

use super::spool::Spool;
use super::traffic::Key;
use super::trial::{Member, Trial, follow};

/// A limit that is suggested.
#[derive(Debug)]
pub(super) struct Suggestion {
    pub(super) trial: Trial,
    pub(super) limit: Limit,
    pub(super) kind: Kind,
    pub(super) denied: u64,
    /// The most denied first.
    pub(super) hits: Vec<Hit>,
    pub(super) checked: Checked,
}

/// What a suggestion is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// To paste.
    Recommended,
    /// A point on the frontier of rate against burst.
    Frontier,
    /// A window of another period.
    OtherPeriod,
}

/// A key with denied requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hit {
    pub(super) key: u32,
    pub(super) denied: u64,
    pub(super) first_us: u64,
    pub(super) last_us: u64,
}

/// What a replay has confirmed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Checked {
    /// The requests that were replayed, and their keys.
    pub(super) requests: u64,
    pub(super) keys: u64,
    /// Keys that it could hit and that were not replayed, or not with all their requests.
    pub(super) left: u64,
}

impl Suggestion {
    /// `None` if nothing fits.
    pub(super) fn of(trial: Trial, kind: Kind) -> Option<Self> {
        let limit = trial.limit()?;
        Some(Self { trial, limit, kind, denied: 0, hits: Vec::new(), checked: Checked::default() })
    }

    /// The limit as pasted, with its burst even if that is the default.
    pub(super) fn text(&self) -> String {
        let text = self.limit.to_string();
        let implied = self.trial.meter.is_bucket() && self.limit.capacity() == self.limit.rate();
        if implied { format!("{text} burst {}", self.limit.capacity()) } else { text }
    }

    pub(super) fn units(&self) -> u64 {
        self.limit.capacity()
    }
}

/// Finds whom each suggestion hits, and when.
pub(super) fn find_hits(spool: &mut Spool, keys: &[Key], suggestions: &mut [Suggestion]) -> Result<()> {
    let mut members: Vec<Member> = Vec::new();
    for (at, Suggestion { trial, .. }) in suggestions.iter().enumerate() {
        members.extend(trial.heaviest.above(trial.units.unwrap_or_default()).map(|key| (key, at)));
    }
    members.sort_unstable();
    let trials: Vec<_> = suggestions.iter().map(|suggestion| suggestion.trial.bare()).collect();
    follow(
        spool,
        keys,
        &trials,
        members.into_iter(),
        || (0, 0, 0),
        |trial, state, request, (denied, first_us, last_us)| {
            let Trial { meter, units, .. } = &trials[trial];
            if meter.asks(state, request.t_us, request.cost) <= units.unwrap_or_default() {
                meter.take(state, request.t_us, request.cost);
                return;
            }
            if *denied == 0 {
                *first_us = request.t_us;
            }
            (*denied, *last_us) = (*denied + 1, request.t_us);
        },
        |(key, at), (denied, first_us, last_us)| {
            if denied > 0 {
                suggestions[at].denied += denied;
                suggestions[at].hits.push(Hit { key, denied, first_us, last_us });
            }
        },
    )?;
    for suggestion in suggestions {
        suggestion.hits.sort_by_key(|hit| (Reverse(hit.denied), hit.first_us, hit.key));
    }
    Ok(())
}
