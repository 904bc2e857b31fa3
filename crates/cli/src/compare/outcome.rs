//! What became of the traffic under one rule.

use std::time::Duration;

use serde::Serialize;

use super::{Contender, memory};
use crate::output::{grouped, human, percent};
use crate::over_time::Counted;
use crate::replay::{Edges, Most, is_zero};
use crate::waits::Quantiles;

/// The result, with the field names and order that other programs rely on.
#[derive(Debug, Serialize)]
pub(super) struct Outcome {
    pub(super) rule: String,
    pub(super) records: u64,
    pub(super) allowed: u64,
    pub(super) denied: u64,
    /// Records that this rule can't decide.
    #[serde(skip_serializing_if = "is_zero")]
    pub(super) not_played: u64,
    pub(super) keys: u64,
    pub(super) keys_denied: u64,
    /// The waits of denied requests, if any has one.
    pub(super) wait_us: Option<Quantiles>,
    /// Denied requests that are never allowed, however long they wait.
    pub(super) never: u64,
    /// None for permits, which have no rate.
    pub(super) most_in_a_period: Option<Most>,
    pub(super) redis_bytes: u64,
    pub(super) over_time: Option<Counted>,
}

impl Outcome {
    pub(super) fn of(contender: &Contender) -> Self {
        let Contender { rule, player, unplayed, .. } = contender;
        let summary = &player.summary;
        let bytes = |edges| memory::bytes(rule, summary.keys().map(|(key, _)| key), edges);
        let redis_bytes = player.edges().map_or(0, bytes);
        Self {
            rule: rule.to_string(),
            records: summary.allowed() + summary.denied(),
            allowed: summary.allowed(),
            denied: summary.denied(),
            not_played: *unplayed,
            keys: summary.decided_keys() as u64,
            keys_denied: summary.keys().filter(|(_, of_key)| of_key.denied > 0).count() as u64,
            wait_us: summary.waits().quantiles(),
            never: summary.waits().never(),
            most_in_a_period: player.edges().and_then(Edges::most),
            redis_bytes,
            over_time: summary.over_time(),
        }
    }

    pub(super) fn share(&self) -> String {
        percent(self.denied as f64 / self.records.max(1) as f64)
    }

    /// The median and the longest wait.
    pub(super) fn waits(&self) -> [String; 2] {
        let shown = |us| human(Duration::from_micros(us));
        self.wait_us.map_or_else(|| ["-", "-"].map(str::to_owned), |Quantiles { p50, max, .. }| [p50, max].map(shown))
    }

    /// `200, 2.00x`: the units, and how many times the rate.
    pub(super) fn most(&self) -> String {
        let most = |most: Most| format!("{}, {:.2}x", grouped(most.units), most.times());
        self.most_in_a_period.map_or_else(|| "-".to_owned(), most)
    }
}
