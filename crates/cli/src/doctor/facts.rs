//! The facts gathered about a Redis, and the form of a finding. No I/O.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::civil::Date;
use serde::Serialize;
use serde_json::Value;

use crate::info::Fields;

/// A value, or why it isn't known, in the server's words.
pub(super) type Known<T> = Result<T, String>;

#[derive(Debug)]
pub(super) struct Facts {
    pub(super) address: String,
    pub(super) prefix: String,
    pub(super) deadline: Duration,
    pub(super) today: Date,
    /// INFO.
    pub(super) info: Known<Fields>,
    /// The relevant settings from CONFIG GET.
    pub(super) config: Known<Fields>,
    /// CLUSTER INFO.
    pub(super) cluster: Known<Fields>,
    /// The slots being moved, as far as the node reports.
    pub(super) moving: Vec<u16>,
    /// Whether the whole cluster is examined rather than this node alone.
    pub(super) of_cluster: bool,
    /// Whether a script may use keys of several of this node's slots; `None` if it isn't a node, or has too few slots.
    pub(super) across_slots: Option<Known<()>>,
    /// The reply of each Sentinel in the address about this primary (SENTINEL MASTER); `None` if no Sentinel was used.
    pub(super) sentinels: Option<Vec<Known<Fields>>>,
    /// The user that this connection is authenticated as.
    pub(super) user: String,
    /// Commands that this user may not run, or that this server doesn't have.
    pub(super) missing: Vec<Missing>,
    pub(super) trials: Vec<Trial>,
    pub(super) clock: Known<Clock>,
    pub(super) latency: Known<Latency>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Missing {
    pub(super) command: &'static str,
    pub(super) why: Why,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Why {
    /// The user may not run the command.
    Command,
    /// The user may not run the command on keys of the prefix.
    Key,
    /// The server doesn't know the command.
    Unknown,
}

/// The outcome of an actual call of a script.
#[derive(Clone, Debug)]
pub(super) struct Trial {
    /// The script's name: those of its algorithms' files, joined by `+`.
    pub(super) script: &'static str,
    /// Taking units, twice.
    pub(super) took: Result<(), Refusal>,
    /// Peek and inspect.
    pub(super) looked: Result<(), Refusal>,
    /// Bytes of the key and its state; `None` for several limits, which have a key each.
    pub(super) bytes: Option<Known<u64>>,
    /// What couldn't be removed afterwards.
    pub(super) left: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    pub(super) permission: bool,
    pub(super) message: String,
}

/// The server's clock compared with this machine's, in microseconds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clock {
    /// Positive if the server is ahead.
    pub(super) offset: i64,
    /// Half the fastest round trip.
    pub(super) uncertainty: u64,
    /// How much further the server's clock moved than this machine's between the readings.
    pub(super) step: i64,
    pub(super) step_uncertainty: u64,
}

#[derive(Clone, Debug)]
pub(super) struct Latency {
    /// What was timed: a peek, or PING.
    pub(super) of: &'static str,
    /// Ascending, not empty.
    pub(super) samples: Vec<Duration>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Level {
    Ok,
    /// Worth knowing.
    Note,
    /// Limits will be lost, late or wrong at some point.
    Warning,
    /// Decisions can't be made, or can't be trusted.
    Unfit,
}

/// One finding, with the field names and order that other programs rely on.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Finding {
    pub(super) check: &'static str,
    pub(super) level: Level,
    pub(super) found: String,
    /// What to do, one step per item.
    pub(super) advice: Vec<String>,
    pub(super) numbers: BTreeMap<&'static str, Value>,
}

impl Facts {
    pub(super) fn info(&self, name: &str) -> Option<&str> {
        self.info.as_ref().ok()?.text(name)
    }

    /// A number from INFO; 0 if it is missing, since older servers don't report all.
    pub(super) fn count(&self, name: &str) -> u64 {
        self.info.as_ref().ok().and_then(|info| info.number(name)).unwrap_or(0)
    }

    /// A setting, by its name in redis.conf. Where CONFIG is forbidden, INFO has some.
    pub(super) fn setting(&self, name: &str) -> Option<&str> {
        let told = self.config.as_ref().ok().and_then(|config| config.text(name));
        told.or_else(|| match name {
            "maxmemory" => self.info("maxmemory"),
            "maxmemory-policy" => self.info("maxmemory_policy"),
            "maxclients" => self.info("maxclients"),
            "appendonly" => self.info("aof_enabled").map(|enabled| if enabled == "1" { "yes" } else { "no" }),
            _ => None,
        })
    }

    pub(super) fn number(&self, name: &str) -> Option<u64> {
        self.setting(name)?.parse().ok()
    }
}

impl Latency {
    pub(super) fn quantile(&self, percent: usize) -> Duration {
        let at = (self.samples.len() * percent).div_ceil(100).max(1) - 1;
        self.samples.get(at).copied().unwrap_or_default()
    }
}

impl Finding {
    pub(super) fn new(check: &'static str, level: Level, found: impl Into<String>) -> Self {
        Self { check, level, found: found.into(), advice: Vec::new(), numbers: BTreeMap::new() }
    }

    pub(super) fn advise(mut self, step: impl Into<String>) -> Self {
        self.advice.push(step.into());
        self
    }

    /// Advises a change of a setting, both at run time and in redis.conf.
    pub(super) fn set(self, setting: &str, value: &str) -> Self {
        self.advise(format!("CONFIG SET {setting} {value}; redis.conf: {setting} {value}"))
    }

    pub(super) fn number(mut self, name: &'static str, value: impl Into<Value>) -> Self {
        self.numbers.insert(name, value.into());
        self
    }
}

impl Level {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Note => "note",
            Self::Warning => "warning",
            Self::Unfit => "unfit",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quantile_is_a_sample_that_so_many_are_not_above() {
        let samples = (1..=50).map(Duration::from_millis).collect();
        let latency = Latency { of: "PING", samples };
        assert_eq!(latency.quantile(50), Duration::from_millis(25));
        assert_eq!(latency.quantile(99), Duration::from_millis(50));
        let latency = Latency { of: "PING", samples: vec![Duration::from_millis(7)] };
        assert_eq!(latency.quantile(50), Duration::from_millis(7));
    }
}
