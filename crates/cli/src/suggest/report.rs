//! What is reported, and its JSON.

use std::collections::BTreeMap;
use std::io::{self, Write};

use serde::Serialize;

use super::counting::Place;
use super::share::{Bound, Of};
use super::suggestion::{Kind, Suggestion};
use super::traffic::{Group, Key, Traffic};
use crate::escape::shown;
use crate::output::{counted, human, json, micros, percent};

/// All that was found.
#[derive(Debug)]
pub(super) struct Report<'r> {
    pub(super) traffic: &'r Traffic,
    /// The groups for which limits are suggested, in order.
    pub(super) groups: &'r [usize],
    /// How many groups are left out.
    pub(super) left: usize,
    pub(super) suggestions: &'r [Suggestion],
    pub(super) bound: Bound,
    /// Whether the period was given.
    pub(super) period_is_given: bool,
    /// The attribute to count by, unless records or rules determine it.
    pub(super) by: Option<&'r str>,
}

/// How many of the keys that are hit are named.
pub(super) const NAMED: usize = 10;

impl Report<'_> {
    /// What is suggested for a group.
    pub(super) fn of_group(&self, at: usize) -> impl Iterator<Item = &Suggestion> {
        self.suggestions.iter().filter(move |suggestion| suggestion.trial.group == at)
    }

    /// What a group's keys are, if that is known.
    pub(super) fn by_of<'g>(&'g self, group: &'g Group) -> Option<&'g str> {
        group.present.as_ref().and_then(|present| present.part.as_deref()).or(self.by)
    }

    pub(super) fn may_deny(&self, group: &Group) -> u64 {
        self.bound.of(group.requests, group.keys)
    }

    /// Caveats about a group's suggestions.
    pub(super) fn notes(&self, at: usize) -> Vec<String> {
        /// With fewer requests than this, or a larger share of one key than below, a suggestion says little.
        const FEW: u64 = 100;
        const MUCH: f64 = 0.25;
        let group = &self.traffic.groups[at];
        let mut notes = Vec::new();
        let recommended = self.of_group(at).find(|suggestion| suggestion.kind == Kind::Recommended);
        let bucket = recommended.filter(|suggestion| suggestion.trial.meter.is_bucket() && group.present.is_none());
        if let Some(best) = bucket.filter(|_| !self.period_is_given) {
            let period = human(best.limit.period());
            notes.push(format!("Rates are per {period}; --per gives another period."));
        }
        if group.requests < FEW {
            let tell = if group.requests == 1 { "tells" } else { "tell" };
            notes.push(format!("{} {tell} little about normal traffic.", counted(group.requests, "request")));
        }
        let of_group = self.traffic.keys.iter().filter(|key| key.group == at);
        let heaviest = of_group.max_by_key(|key| key.requests).filter(|_| group.keys >= 10 && group.requests >= FEW);
        let share = |key: &Key| key.requests as f64 / group.requests as f64;
        if let Some(key) = heaviest.filter(|key| share(key) > MUCH && self.bound.of == Of::Requests) {
            let one_key = (1000_u64.div_ceil(group.keys)) as f64 / 10.0;
            notes.push(format!(
                "{:.60} made {} of these requests. For a limit that may hit it: --of keys --deny-at-most {one_key}%.",
                shown(key.bytes()),
                percent(share(key))
            ));
        }
        notes
    }

    /// A line for each group.
    pub(super) fn print_json(&self, mut out: impl Write) -> io::Result<()> {
        for at in self.groups {
            json(&mut out, &self.told(*at))?;
        }
        out.flush()
    }

    fn told(&self, at: usize) -> Told<'_> {
        let (group, read) = (&self.traffic.groups[at], &self.traffic.read);
        let (rule, value) = match &group.place {
            Place::Anywhere => (None, None),
            Place::Value(value) => (None, Some(shown(value))),
            Place::Rule { name, .. } => (Some(name.as_str()), None),
        };
        let suggested = |kinds: &'static [Kind]| {
            let some = self.of_group(at).filter(move |suggestion| kinds.contains(&suggestion.kind));
            some.map(|suggestion| Suggested::of(suggestion, &self.traffic.keys)).collect()
        };
        Told {
            rule,
            present: group.present.as_ref().map(|present| present.limit.to_string()),
            value,
            records: read.records,
            unreadable: read.unreadable,
            out_of_order: read.out_of_order,
            left_out: &read.left_out,
            by: self.by_of(group),
            requests: group.requests,
            keys: group.keys,
            from_us: group.from_us,
            to_us: group.to_us,
            deny_at_most: self.bound.share.to_string(),
            of: if self.bound.of == Of::Keys { "keys" } else { "requests" },
            may_deny: self.may_deny(group),
            suggestions: suggested(&[Kind::Recommended, Kind::OtherPeriod]),
            frontier: suggested(&[Kind::Frontier]),
        }
    }
}

/// What is suggested for a group, with the field names and the order that other programs rely on.
#[derive(Debug, Serialize)]
struct Told<'r> {
    /// With a set of rules: the rule's name, and its limit as it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    rule: Option<&'r str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    present: Option<String>,
    /// With --each: the value that these requests have.
    #[serde(skip_serializing_if = "Option::is_none")]
    value: Option<String>,
    /// Of the whole file.
    records: u64,
    unreadable: u64,
    out_of_order: u64,
    left_out: &'r BTreeMap<String, u64>,
    /// What its keys are, if that is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    by: Option<&'r str>,
    /// Of the group.
    requests: u64,
    keys: u64,
    from_us: u64,
    to_us: u64,
    deny_at_most: String,
    of: &'static str,
    may_deny: u64,
    suggestions: Vec<Suggested>,
    frontier: Vec<Suggested>,
}

#[derive(Debug, Serialize)]
struct Suggested {
    rule: String,
    algorithm: String,
    rate: u64,
    period_us: u64,
    burst: u64,
    recommended: bool,
    denied: u64,
    keys_hit: usize,
    hit: Vec<HitKey>,
    checked_keys: u64,
    checked_requests: u64,
    unchecked_keys: u64,
}

#[derive(Debug, Serialize)]
struct HitKey {
    key: String,
    denied: u64,
    requests: u64,
    first_us: u64,
    last_us: u64,
}

impl Suggested {
    fn of(suggestion: &Suggestion, keys: &[Key]) -> Self {
        let Suggestion { limit, kind, denied, hits, checked, .. } = suggestion;
        let hit = hits.iter().take(NAMED).map(|hit| {
            let key = &keys[hit.key as usize];
            HitKey {
                key: shown(key.bytes()),
                denied: hit.denied,
                requests: key.requests,
                first_us: hit.first_us,
                last_us: hit.last_us,
            }
        });
        Self {
            rule: limit.to_string(),
            algorithm: limit.algorithm().to_string(),
            rate: limit.rate(),
            period_us: micros(limit.period()),
            burst: limit.capacity(),
            recommended: *kind == Kind::Recommended,
            denied: *denied,
            keys_hit: hits.len(),
            hit: hit.collect(),
            checked_keys: checked.keys,
            checked_requests: checked.requests,
            unchecked_keys: checked.left,
        }
    }
}
