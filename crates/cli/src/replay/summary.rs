//! The summary of a replay.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::io::{self, Write};

use serde::Serialize;
use tollgate::RetryAfter;

use crate::escape::shown;
use crate::output::{QUIET, Shape, facts, json, percent};
use crate::over_time::{Counted, OverTime};
use crate::waits::Waits;

/// Counts while records are played.
#[derive(Debug, Default)]
pub(crate) struct Summary {
    allowed: u64,
    denied: u64,
    unreadable: u64,
    out_of_order: u64,
    refused: u64,
    permits_not_replayed: u64,
    keys: HashMap<Vec<u8>, OfKey>,
    /// For a set: the decisions of each rule, and what each shadow rule would have decided.
    rules: BTreeMap<Option<String>, Counts>,
    shadows: BTreeMap<Option<String>, Counts>,
    over_time: OverTime,
    waits: Waits,
}

/// The decisions on a key.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct OfKey {
    pub(crate) allowed: u64,
    pub(crate) denied: u64,
}

#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Counts {
    /// `None` if no rule applied.
    pub(super) rule: Option<String>,
    pub(super) allowed: u64,
    pub(super) denied: u64,
}

/// The totals, with the field names and order that other programs rely on.
#[derive(Debug, Serialize)]
struct Totals {
    records: u64,
    allowed: u64,
    denied: u64,
    unreadable: u64,
    out_of_order: u64,
    keys: usize,
    busiest_denied: Vec<Busiest>,
    /// For a set: requests that the middleware refuses, since their path can be read in two ways. They count as denied.
    #[serde(skip_serializing_if = "is_zero")]
    refused: u64,
    #[serde(skip_serializing_if = "is_zero")]
    permits_not_replayed: u64,
    /// For a set: by the rule that applied.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    rules: Vec<Counts>,
    /// For a set: what shadow rules would have allowed and denied.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    shadows: Vec<Counts>,
    /// In equal intervals, if there was any record.
    #[serde(skip_serializing_if = "Option::is_none")]
    over_time: Option<Counted>,
}

#[derive(Debug, Serialize)]
struct Busiest {
    key: String,
    denied: u64,
}

/// What happens to records earlier than the ones before them.
#[derive(Clone, Copy, Debug)]
pub(super) enum Order {
    Sorted,
    AsItStands,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
pub(crate) fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// How many of the most denied keys are named.
const NAMED: usize = 10;

impl Summary {
    pub(super) fn unreadable(&mut self, count: u64) {
        self.unreadable += count;
    }

    /// Notes what the first pass found.
    pub(super) fn read_through(&mut self, unreadable: u64, out_of_order: u64) {
        (self.unreadable, self.out_of_order) = (unreadable, out_of_order);
    }

    /// Notes whether a record's time was earlier than one before.
    pub(super) fn in_order(&mut self, out_of_order: bool) {
        self.out_of_order += u64::from(out_of_order);
    }

    /// Adds the counts of other keys.
    pub(super) fn add(&mut self, other: Self) {
        let Self { allowed, denied, unreadable, out_of_order, refused, permits_not_replayed, .. } = other;
        self.allowed += allowed;
        self.denied += denied;
        self.unreadable += unreadable;
        self.out_of_order += out_of_order;
        self.refused += refused;
        self.permits_not_replayed += permits_not_replayed;
        self.keys.extend(other.keys);
        for (all, others) in [(&mut self.rules, other.rules), (&mut self.shadows, other.shadows)] {
            for (rule, Counts { allowed, denied, .. }) in others {
                let counts = all.entry(rule.clone()).or_insert(Counts { rule, ..Counts::default() });
                counts.allowed += allowed;
                counts.denied += denied;
            }
        }
        self.over_time.add(&other.over_time);
        self.waits.add(&other.waits);
    }

    /// Notes the time of a record that isn't decided, so that the counts over time cover it.
    pub(crate) fn passed_over(&mut self, t_us: u64) {
        self.over_time.reach(t_us);
    }

    /// Notes a key that is about to be written.
    pub(super) fn touched(&mut self, key: &[u8]) {
        if !self.keys.contains_key(key) {
            self.keys.insert(key.to_vec(), OfKey::default());
        }
    }

    /// Notes a decision and, of a denial, its wait if that is known.
    pub(super) fn decided(&mut self, key: &[u8], t_us: u64, allowed: bool, wait: Option<RetryAfter>) {
        self.over_time.note(t_us, allowed);
        let of_key = self.keys.get_mut(key);
        if allowed {
            self.allowed += 1;
            of_key.into_iter().for_each(|key| key.allowed += 1);
            return;
        }
        self.denied += 1;
        if let Some(wait) = wait {
            self.waits.note(wait);
        }
        of_key.into_iter().for_each(|key| key.denied += 1);
    }

    /// Counts a request that the middleware refuses before any rule.
    pub(super) fn refused(&mut self) {
        self.refused += 1;
    }

    /// How many lines can't be read, and how many records are earlier than those before them.
    pub(crate) fn unread(&self) -> [u64; 2] {
        [self.unreadable, self.out_of_order]
    }

    pub(super) fn permits_not_replayed(&mut self, count: u64) {
        self.permits_not_replayed = count;
    }

    /// Permits that weren't held as long as in reality.
    pub(crate) fn permits_not_held(&self) -> u64 {
        self.permits_not_replayed
    }

    /// Counts the decision of a rule in a set.
    pub(super) fn decided_by(&mut self, rule: Option<&str>, allowed: bool) {
        Counts::note(&mut self.rules, rule, allowed);
    }

    /// Counts what a shadow rule of a set would have decided.
    pub(super) fn shadow(&mut self, rule: Option<&str>, allowed: bool) {
        Counts::note(&mut self.shadows, rule, allowed);
    }

    pub(crate) fn keys(&self) -> impl Iterator<Item = (&Vec<u8>, OfKey)> {
        self.keys.iter().map(|(key, counts)| (key, *counts))
    }

    pub(crate) fn allowed(&self) -> u64 {
        self.allowed
    }

    pub(crate) fn denied(&self) -> u64 {
        self.denied
    }

    /// The number of keys of which a request was decided.
    pub(crate) fn decided_keys(&self) -> usize {
        self.keys().filter(|(_, of_key)| of_key.allowed + of_key.denied > 0).count()
    }

    pub(crate) fn waits(&self) -> &Waits {
        &self.waits
    }

    pub(crate) fn over_time(&self) -> Option<Counted> {
        self.over_time.counted()
    }

    /// The keys that were denied most; those of none, by how often they asked.
    pub(crate) fn busiest(&self) -> Vec<(&Vec<u8>, OfKey)> {
        let mut keys: Vec<_> = self.keys().collect();
        let asked = |of_key: &OfKey| if of_key.denied == 0 { of_key.allowed } else { 0 };
        keys.sort_by_key(|(key, of_key)| (Reverse(of_key.denied), Reverse(asked(of_key)), *key));
        keys.truncate(NAMED);
        keys
    }

    /// For a set: by the rule that applied, and what shadow rules would have decided; those that denied most first.
    pub(super) fn by_rule(&self) -> [Vec<Counts>; 2] {
        [&self.rules, &self.shadows].map(most_denied_first)
    }

    pub(super) fn print(&self, out: impl Write, shape: Shape, order: Order) -> io::Result<()> {
        let totals = self.totals();
        match shape {
            Shape::Jsonl => json(out, &totals),
            Shape::Table => totals.print(out, order),
        }
    }

    fn totals(&self) -> Totals {
        let mut denied: Vec<_> =
            self.keys().filter(|(_, of)| of.denied > 0).map(|(key, of)| (Reverse(of.denied), key)).collect();
        denied.sort_unstable();
        let named = denied.iter().take(NAMED);
        let busiest_denied = named.map(|(denied, key)| Busiest { key: shown(key), denied: denied.0 }).collect();
        let Self { allowed, denied, unreadable, out_of_order, refused, permits_not_replayed, .. } = *self;
        Totals {
            records: allowed + denied,
            allowed,
            denied,
            unreadable,
            out_of_order,
            keys: self.decided_keys(),
            busiest_denied,
            refused,
            permits_not_replayed,
            rules: most_denied_first(&self.rules),
            shadows: most_denied_first(&self.shadows),
            over_time: self.over_time.counted(),
        }
    }
}

impl Counts {
    fn note(counts: &mut BTreeMap<Option<String>, Self>, rule: Option<&str>, allowed: bool) {
        let rule = rule.map(str::to_owned);
        let counts = counts.entry(rule.clone()).or_insert(Self { rule, ..Self::default() });
        if allowed { counts.allowed += 1 } else { counts.denied += 1 }
    }
}

fn most_denied_first(counts: &BTreeMap<Option<String>, Counts>) -> Vec<Counts> {
    let mut counts: Vec<_> = counts.values().cloned().collect();
    counts.sort_by_key(|counts| Reverse((counts.denied, counts.allowed)));
    counts
}

/// The decisions of rules, if there were any.
fn table(out: &mut impl Write, names: [&str; 3], rows: &[Counts]) -> io::Result<()> {
    if rows.is_empty() {
        return Ok(());
    }
    let [allowed, denied, rule] = names;
    writeln!(out, "\n{QUIET}{allowed:>11} {denied:>10}  {rule}{QUIET:#}")?;
    for Counts { rule, allowed, denied } in rows {
        let rule = rule.as_deref().unwrap_or("no rule applied");
        writeln!(out, "{allowed:>11} {denied:>10}  {rule}")?;
    }
    Ok(())
}

impl Totals {
    fn print(&self, mut out: impl Write, order: Order) -> io::Result<()> {
        facts(&mut out, &self.as_facts(order))?;
        table(&mut out, ["allowed", "denied", "rule"], &self.rules)?;
        table(&mut out, ["would allow", "would deny", "shadow rule"], &self.shadows)
    }

    fn denied_in_full(&self) -> String {
        match self.denied {
            0 => "0".into(),
            denied => format!("{denied}, {}", percent(denied as f64 / self.records as f64)),
        }
    }

    fn as_facts(&self, order: Order) -> Vec<(&'static str, String)> {
        let why = match order {
            _ if self.out_of_order == 0 => "",
            Order::Sorted => ", earlier than a line before them: played sorted by time",
            Order::AsItStands => {
                ", earlier than a line before them: played as they stand, with a clock that steps back"
            }
        };
        let mut lines = vec![
            ("records", self.records.to_string()),
            ("allowed", self.allowed.to_string()),
            ("denied", self.denied_in_full()),
            ("unreadable", self.unreadable.to_string()),
            ("out of order", format!("{}{why}", self.out_of_order)),
            ("keys", self.keys.to_string()),
        ];
        if self.refused > 0 {
            lines.push(("refused", format!("{}, denied since their path can be read in two ways", self.refused)));
        }
        if self.permits_not_replayed > 0 {
            lines.push(("permits", format!("{} not replayed", self.permits_not_replayed)));
        }
        if let Some(drawn) = self.over_time.as_ref().and_then(Counted::drawn) {
            lines.push(("over time", drawn));
        }
        for (place, Busiest { key, denied }) in self.busiest_denied.iter().enumerate() {
            let name = if place == 0 { "busiest denied" } else { "" };
            lines.push((name, format!("{denied:>8}  {}", key)));
        }
        lines
    }
}
