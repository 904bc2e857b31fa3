//! What is shown of one interval: plain numbers, which views draw and programs read as JSON.

use serde::Serialize;

use super::key_name::Label;

/// The field names and order are those that other programs rely on. Rates are per second of the interval.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Snapshot {
    pub(super) t_us: u64,
    /// The length of the interval; 0 at first, when there are no rates yet.
    pub(super) seconds: f64,
    pub(super) nodes: Vec<Node>,
    pub(super) scripts: Scripts,
    pub(super) sample: Sample,
    /// By writes, busiest first.
    pub(super) rules: Vec<Rule>,
    pub(super) keys: Vec<Key>,
    /// Only with `--metrics`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) service: Option<Service>,
}

/// One Redis: its numbers, or why there are none.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Node {
    pub(super) address: String,
    pub(super) error: Option<String>,
    #[serde(flatten)]
    pub(super) figures: Option<Figures>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct Figures {
    pub(super) version: String,
    pub(super) role: String,
    pub(super) uptime_seconds: u64,
    /// Whether the process has changed since the interval before, so that there are no rates.
    pub(super) restarted: bool,
    pub(super) used_memory: u64,
    /// 0 if there is no limit.
    pub(super) maxmemory: u64,
    pub(super) maxmemory_policy: String,
    pub(super) keys: u64,
    pub(super) clients: u64,
    pub(super) evicted: u64,
    pub(super) evicted_per_second: Option<f64>,
    pub(super) expired_per_second: Option<f64>,
    pub(super) commands_per_second: Option<f64>,
    /// Commands that ended with an error.
    pub(super) errors_per_second: Option<f64>,
    /// The share of one core that the main thread used.
    pub(super) cpu_share: Option<f64>,
    pub(super) script_calls_per_second: Option<f64>,
    pub(super) script_us_per_call: Option<f64>,
    /// Of EVALSHA since the server's start, in microseconds.
    pub(super) evalsha_p50_us: Option<f64>,
    pub(super) evalsha_p99_us: Option<f64>,
    /// The share of one core that watching cost this server, estimated from its own counts.
    pub(super) watch_share: Option<f64>,
}

/// Script calls on all nodes.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct Scripts {
    pub(super) calls_per_second: Option<f64>,
    pub(super) us_per_call: Option<f64>,
    /// The share of one core, summed over all nodes.
    pub(super) core_share: Option<f64>,
    pub(super) by_command: Vec<Command>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct Command {
    pub(super) command: &'static str,
    pub(super) calls_per_second: f64,
    pub(super) us_per_call: f64,
}

/// How much of the keys and writes was seen.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct Sample {
    /// The recent share of the time in which writes were observed.
    pub(super) time_share: Option<f64>,
    /// Why writes aren't seen.
    pub(super) no_writes: Option<String>,
    /// Writes of limits' keys; several in one turn of the server's event loop count once.
    pub(super) writes_per_second: Option<f64>,
    /// Keys looked at since the scan last began, and how many there are.
    pub(super) scanned: u64,
    pub(super) of: u64,
    /// Whether every key was looked at since the start.
    pub(super) complete: bool,
    /// Why keys aren't scanned.
    pub(super) no_scan: Option<String>,
    /// How touches are detected: `idle` or `freq`.
    pub(super) touches: &'static str,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Rule {
    #[serde(flatten)]
    pub(super) of: Label,
    pub(super) writes_per_second: Option<f64>,
    /// An estimate until all keys were scanned.
    pub(super) keys: Option<u64>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Key {
    pub(super) key: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) shard: Option<u32>,
    #[serde(flatten)]
    pub(super) of: Label,
    pub(super) writes_per_second: Option<f64>,
    /// The share of looks that found the key read or written since the last one.
    pub(super) touched_share: Option<f64>,
    /// OBJECT FREQ, with an LFU policy.
    pub(super) freq: Option<u64>,
}

/// What the service's own metrics say; of several endpoints, all together.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct Service {
    pub(super) endpoints: Vec<Endpoint>,
    pub(super) decisions_per_second: Option<f64>,
    pub(super) decisions: Vec<Decisions>,
    pub(super) latency: Vec<Latency>,
    pub(super) batch_mean: Option<f64>,
    pub(super) batch_p99: Option<f64>,
    pub(super) errors: Vec<ErrorRate>,
    pub(super) breakers_open: Option<f64>,
    pub(super) background_dropped_per_second: Option<f64>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct Endpoint {
    pub(super) url: String,
    pub(super) error: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct Decisions {
    pub(super) rule: String,
    pub(super) algorithm: String,
    pub(super) outcome: String,
    pub(super) source: String,
    pub(super) per_second: Option<f64>,
    pub(super) total: f64,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct Latency {
    pub(super) source: String,
    pub(super) per_second: Option<f64>,
    /// Of the interval if the endpoint exports buckets, else as it exports them; of several endpoints, the largest.
    pub(super) p50_us: Option<f64>,
    pub(super) p99_us: Option<f64>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct ErrorRate {
    pub(super) class: String,
    pub(super) per_second: Option<f64>,
    pub(super) total: f64,
}

/// A number rounded to this many digits.
pub(super) fn rounded(number: f64, digits: i32) -> f64 {
    let scale = 10_f64.powi(digits);
    (number * scale).round() / scale
}

impl Key {
    /// How often it is touched, reads included.
    pub(super) fn touches(&self) -> f64 {
        self.freq.map_or_else(|| self.touched_share.unwrap_or(0.0), |freq| freq as f64)
    }
}
