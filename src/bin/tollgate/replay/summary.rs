//! What a replay comes to.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::io::{self, Write};

use serde::Serialize;

use crate::escape::shown;
use crate::options::Shape;
use crate::output::{QUIET, facts, json};

/// Counts while records are played.
#[derive(Debug, Default)]
pub(super) struct Summary {
    allowed: u64,
    denied: u64,
    unreadable: u64,
    out_of_order: u64,
    /// How often each key was denied.
    keys: HashMap<Vec<u8>, u64>,
    /// Of a set: what each rule decided, and what each shadow rule would have.
    rules: BTreeMap<Option<String>, Counts>,
    shadows: BTreeMap<Option<String>, Counts>,
}

#[derive(Clone, Debug, Default, Serialize)]
struct Counts {
    /// None where no rule applied.
    rule: Option<String>,
    allowed: u64,
    denied: u64,
}

/// The totals, with the names and the order that other programs rely on.
#[derive(Debug, Serialize)]
struct Totals {
    records: u64,
    allowed: u64,
    denied: u64,
    unreadable: u64,
    out_of_order: u64,
    keys: usize,
    busiest_denied: Vec<Busiest>,
    /// Of a set: by the rule that applied.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    rules: Vec<Counts>,
    /// Of a set: what shadow rules would have allowed and denied.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    shadows: Vec<Counts>,
}

#[derive(Debug, Serialize)]
struct Busiest {
    key: String,
    denied: u64,
}

/// What becomes of records that are earlier than others before them.
#[derive(Clone, Copy, Debug)]
pub(super) enum Order {
    Sorted,
    AsItStands,
    Clamped,
}

/// How many of the keys that were denied most are named.
const NAMED: usize = 10;

impl Summary {
    pub(super) fn unreadable(&mut self) {
        self.unreadable += 1;
    }

    /// A record of this time follows others, the latest of which was at `latest`.
    pub(super) fn in_order(&mut self, t_us: u64, latest: u64) {
        self.out_of_order += u64::from(t_us < latest);
    }

    /// A key is about to be written to.
    pub(super) fn touched(&mut self, key: &[u8]) {
        if !self.keys.contains_key(key) {
            self.keys.insert(key.to_vec(), 0);
        }
    }

    pub(super) fn decided(&mut self, key: &[u8], allowed: bool) {
        if allowed {
            self.allowed += 1;
            return;
        }
        self.denied += 1;
        if let Some(denied) = self.keys.get_mut(key) {
            *denied += 1;
        }
    }

    /// What a rule of a set decided.
    pub(super) fn decided_by(&mut self, rule: Option<&str>, allowed: bool) {
        Counts::note(&mut self.rules, rule, allowed);
    }

    /// What a shadow rule of a set would have decided.
    pub(super) fn shadow(&mut self, rule: Option<&str>, allowed: bool) {
        Counts::note(&mut self.shadows, rule, allowed);
    }

    pub(super) fn keys(&self) -> impl Iterator<Item = &Vec<u8>> {
        self.keys.keys()
    }

    pub(super) fn print(&self, out: impl Write, shape: Shape, order: Order) -> io::Result<()> {
        let totals = self.totals();
        match shape {
            Shape::Jsonl => json(out, &totals),
            Shape::Table => totals.print(out, order),
        }
    }

    fn totals(&self) -> Totals {
        let mut denied: Vec<_> = self.keys.iter().filter(|(_, denied)| **denied > 0).collect();
        denied.sort_by_key(|(key, denied)| (Reverse(**denied), *key));
        let named = denied.iter().take(NAMED);
        let busiest_denied = named.map(|(key, denied)| Busiest { key: shown(key), denied: **denied }).collect();
        let Self { allowed, denied, unreadable, out_of_order, .. } = *self;
        Totals {
            records: allowed + denied,
            allowed,
            denied,
            unreadable,
            out_of_order,
            keys: self.keys.len(),
            busiest_denied,
            rules: most_denied_first(&self.rules),
            shadows: most_denied_first(&self.shadows),
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

/// What rules decided, if there were any.
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

    fn as_facts(&self, order: Order) -> Vec<(&'static str, String)> {
        let why = match order {
            _ if self.out_of_order == 0 => "",
            Order::Sorted => ", earlier than a line before them: played sorted by time",
            Order::AsItStands => ", earlier than a line before them: played so, with a clock that steps back",
            Order::Clamped => ", earlier than a line before them: played at the latest time by then",
        };
        let mut lines = vec![
            ("records", self.records.to_string()),
            ("allowed", self.allowed.to_string()),
            ("denied", self.denied.to_string()),
            ("unreadable", self.unreadable.to_string()),
            ("out of order", format!("{}{why}", self.out_of_order)),
            ("keys", self.keys.to_string()),
        ];
        for (place, Busiest { key, denied }) in self.busiest_denied.iter().enumerate() {
            let name = if place == 0 { "busiest denied" } else { "" };
            lines.push((name, format!("{denied:>8}  {}", key)));
        }
        lines
    }
}
