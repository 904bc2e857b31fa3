//! What a replay comes to.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::io::{self, Write};

use serde::Serialize;

use crate::escape::shown;
use crate::options::Shape;
use crate::output::{facts, json};

/// Counts while records are played.
#[derive(Debug, Default)]
pub(super) struct Summary {
    allowed: u64,
    denied: u64,
    unreadable: u64,
    out_of_order: u64,
    /// How often each key was denied.
    keys: HashMap<Vec<u8>, u64>,
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

    pub(super) fn keys(&self) -> impl Iterator<Item = &Vec<u8>> {
        self.keys.keys()
    }

    pub(super) fn print(&self, out: impl Write, shape: Shape, order: Order) -> io::Result<()> {
        let totals = self.totals();
        match shape {
            Shape::Jsonl => json(out, &totals),
            Shape::Table => facts(out, &totals.as_facts(order)),
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
        }
    }
}

impl Totals {
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
