//! The algorithms: one row and one script for each.

pub(crate) mod numbers;

use std::fmt;

use crate::error::RuleError;
use crate::script::{ARGUMENTS, FRAME, Script};
use numbers::{Exact, Numbers};

/// How a limit counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Algorithm {
    /// `rate` units per `period`, continuously, up to the capacity. Also written `gcra` in the text form: the generic
    /// cell rate algorithm (GCRA) admits the same.
    TokenBucket,
    /// `rate` units per window; unused ones roll over up to the capacity.
    FixedWindow,
    /// `rate` units in each day, week, month or year of the calendar. Also written `fixed-window` in the text form;
    /// built with [`Limit::calendar`](crate::Limit::calendar).
    CalendarWindow,
    /// The previous window's count weighted by its overlap, plus the current window's. The weighted count is rounded
    /// down, so a unit more than `rate` may be admitted around the start of a window: at a rate of 1, two within a
    /// moment. Small limits are exact by [`SlidingLog`](Self::SlidingLog).
    SlidingWindow,
    /// Exactly `rate` units in any `period`, by remembering each request.
    SlidingLog,
    /// At most `rate` permits held at once, each until it is released or a `period` has passed.
    Concurrency,
}

/// An option of the text form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Setting {
    Burst,
    MaxDebt,
    Start,
    Max,
    Ttl,
    Shards,
    Tz,
}

/// How a limit's numbers are packed for its script; the states that it writes end with the same bytes.
#[derive(Debug)]
struct Packing {
    /// The first byte, which says whose state it is: no other algorithm has it. At most 8 if this one reserves, since 8
    /// more is the layout of a state with a debt.
    layout: u8,
    /// The width of each argument in bytes.
    widths: &'static [usize],
    /// How many keys take Redis about 150 microseconds.
    most_keys: usize,
}

/// An algorithm's properties, apart from its script.
#[derive(Debug)]
pub(crate) struct Row {
    algorithm: Algorithm,
    /// The name in the text form.
    name: &'static str,
    pub(crate) script: Script,
    pub(crate) options: &'static [Setting],
    /// Converts numbers to those the script computes with, or says why they don't fit.
    pub(crate) fit: fn(&Numbers) -> Result<Exact, String>,
    /// The most units that a key can have taken or owe, whatever penalties it got: as its script bounds them.
    pub(crate) most_counted: fn(&Exact) -> u64,
    /// The script's own arguments, before cost, mode and now.
    pub(crate) arguments: fn(&Numbers, &Exact) -> Vec<i64>,
    /// How these arguments are packed; none if the script has no packed form.
    packing: Option<Packing>,
    /// What the script's `inspect` appends after `ttl_ms`.
    pub(crate) state: &'static [&'static str],
}

static ROWS: [Row; 6] = [
    Row {
        algorithm: Algorithm::TokenBucket,
        name: "token-bucket",
        script: Script::algorithm("token_bucket", include_str!("../lua/token_bucket.lua")),
        options: &[Setting::Burst, Setting::MaxDebt, Setting::Shards],
        fit: numbers::fit_bucket,
        most_counted: numbers::most_of_bucket,
        arguments: numbers::bucket_arguments,
        packing: Some(Packing { layout: 1, widths: &[7, 7, 7, 3, 7], most_keys: 80 }),
        state: &[
            "time_us",
            "lead",
            "state_capacity",
            "state_rate",
            "state_period",
            "state_tick",
            "blocked_us",
            "overage",
        ],
    },
    Row {
        algorithm: Algorithm::FixedWindow,
        name: "fixed-window",
        script: Script::algorithm("fixed_window", include_str!("../lua/fixed_window.lua")),
        options: &[Setting::Burst, Setting::MaxDebt, Setting::Start, Setting::Shards],
        fit: numbers::fit_window,
        most_counted: numbers::most_of_window,
        arguments: numbers::window_arguments,
        packing: Some(Packing { layout: 3, widths: &[7, 7, 7, 7, 7], most_keys: 80 }),
        state: &[
            "time_us",
            "window_us",
            "level",
            "state_capacity",
            "state_rate",
            "state_period",
            "blocked_us",
            "overage",
        ],
    },
    Row {
        algorithm: Algorithm::CalendarWindow,
        name: "calendar-window",
        script: Script::algorithm("calendar_window", include_str!("../lua/calendar_window.lua")),
        options: &[Setting::Tz, Setting::Shards],
        fit: numbers::fit_calendar,
        most_counted: numbers::most_of_calendar,
        arguments: numbers::calendar_arguments,
        packing: Some(Packing { layout: 8, widths: &[7, 7, 7, 7], most_keys: 80 }),
        state: &["time_us", "window_us", "used", "state_limit", "blocked_us", "overage"],
    },
    Row {
        algorithm: Algorithm::SlidingWindow,
        name: "sliding-window",
        script: Script::algorithm("sliding_window_counter", include_str!("../lua/sliding_window_counter.lua")),
        options: &[Setting::Shards],
        fit: numbers::fit_counter,
        most_counted: numbers::most_of_counter,
        arguments: numbers::counter_arguments,
        packing: Some(Packing { layout: 4, widths: &[7, 7, 3], most_keys: 80 }),
        state: &[
            "time_us",
            "previous",
            "current",
            "state_limit",
            "state_period",
            "state_tick",
            "blocked_us",
            "overage",
        ],
    },
    Row {
        algorithm: Algorithm::SlidingLog,
        name: "sliding-log",
        script: Script::algorithm("sliding_window_log", include_str!("../lua/sliding_window_log.lua")),
        options: &[Setting::Max, Setting::Shards],
        fit: numbers::fit_log,
        most_counted: numbers::most_of_log,
        arguments: numbers::log_arguments,
        packing: Some(Packing { layout: 6, widths: &[7, 7], most_keys: 35 }),
        state: &["time_us", "entries", "used", "oldest_us", "state_limit", "state_period", "blocked_us", "overage"],
    },
    Row {
        algorithm: Algorithm::Concurrency,
        name: "concurrency",
        script: Script::algorithm("concurrency", include_str!("../lua/concurrency.lua")),
        options: &[Setting::Ttl, Setting::Shards],
        fit: numbers::fit_permits,
        most_counted: numbers::most_of_permits,
        arguments: numbers::permits_arguments,
        packing: None,
        state: &["time_us", "held", "first_us", "last_us", "blocked_us", "overage"],
    },
];

/// Decides several limits at once, running their algorithms' scripts.
pub(crate) static ALL_OR_NOTHING: Script = Script::composed("all_or_nothing", after_all_algorithms);

/// The variables that lua/arguments.lua declares.
const READ: &str = "packed, key_count, a, b, c, d, e, cost, mode, at_us, now_us, layout, several, EACH, repeated, \
    peeks, gives, forced, most_of, unusual, remembers, fast, state, states, answers, missed, version_of, decide, window_of, \
    read, restore, under, wait, remaining_after_debt, owed, move, taken, write, save, inspect";
/// What an algorithm's file declares.
const DEFINED: &str = "NAME, ARGUMENTS, LENGTH, RESERVES, STATE, LAYOUT_AT, valid, longest";

/// Each algorithm's script as a function, with one shared frame, followed by the code that runs them.
fn after_all_algorithms() -> String {
    let mut text = format!(
        "local ALGORITHMS = {{}}\nlocal function arguments(KEYS, ARGV, redis)\n{ARGUMENTS}return {READ}\nend\n\
        local function frame(KEYS, ARGV, redis, {READ}, {DEFINED})\n{FRAME}end\n"
    );
    for Row { script, .. } in &ROWS {
        let (name, file) = (script.name(), script.file().unwrap_or_default());
        text.push_str(&format!(
            "ALGORITHMS['{name}'] = function(KEYS, ARGV, redis)\nlocal {READ} = arguments(KEYS, ARGV, redis)\n{file}\
            return frame(KEYS, ARGV, redis, {READ}, {DEFINED})\nend\n"
        ));
    }
    text + include_str!("../lua/all_or_nothing.lua")
}

impl Script {
    /// Every script: one for each algorithm, and the one composed of them.
    pub fn all() -> impl Iterator<Item = &'static Self> {
        ROWS.iter().map(|row| &row.script).chain([&ALL_OR_NOTHING])
    }
}

impl Algorithm {
    /// Every algorithm.
    pub fn all() -> impl Iterator<Item = Self> {
        ROWS.iter().map(|row| row.algorithm)
    }

    /// The script that decides, with the name of its file in `lua/`.
    #[must_use]
    pub fn script(self) -> &'static Script {
        &self.row().script
    }

    /// The names of what the script's `inspect` mode appends after the TTL, in order.
    #[must_use]
    pub fn state_fields(self) -> &'static [&'static str] {
        self.row().state
    }

    /// Whether it supports reservations: its level may go below zero.
    #[must_use]
    pub fn reserves(self) -> bool {
        self.row().options.contains(&Setting::MaxDebt)
    }

    /// Whether it counts permits, held by an id until they are released.
    #[must_use]
    pub fn holds(self) -> bool {
        self == Self::Concurrency
    }

    pub(crate) fn row(self) -> &'static Row {
        ROWS.iter().find(|row| row.algorithm == self).expect("every algorithm has a row")
    }

    /// The name in the text form: `token-bucket`.
    pub(crate) fn name(self) -> &'static str {
        self.row().name
    }

    /// The algorithm of that name in the text form, or of its script's, with dashes or underscores.
    pub(crate) fn named(name: &str) -> Result<Self, RuleError> {
        let dashed = |name: &str| name.replace('_', "-");
        let sought = dashed(if name == "gcra" { "token-bucket" } else { name });
        let found = ROWS.iter().find(|row| row.name == sought || dashed(row.script.name()) == sought);
        found.map(|row| row.algorithm).ok_or_else(|| {
            // A calendar window is written as a fixed window whose period says so.
            let rows = ROWS.iter().filter(|row| row.algorithm != Self::CalendarWindow);
            let names: Vec<_> = rows.map(|row| row.name).collect();
            RuleError::new(format!("algorithm: expected one of {}, got {name:?}", names.join(", ")))
        })
    }
}

impl Row {
    /// Keys in one call of the packed form.
    pub(crate) fn most_keys(&self) -> usize {
        self.packing.as_ref().map_or(1, |packing| packing.most_keys)
    }

    /// The numbers in the script's packed form: little-endian, two's complement.
    pub(crate) fn packed(&self, arguments: &[i64]) -> Option<Vec<u8>> {
        let Packing { layout, widths, .. } = self.packing.as_ref()?;
        let bytes =
            arguments.iter().zip(*widths).flat_map(|(number, width)| number.to_le_bytes().into_iter().take(*width));
        Some(std::iter::once(*layout).chain(bytes).collect())
    }

    /// The options, for a message.
    pub(crate) fn options(&self) -> String {
        let names: Vec<_> = self.options.iter().map(|option| option.name()).collect();
        if names.is_empty() { "none".into() } else { names.join(", ") }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Setting {
    /// The name in the text form.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Burst => "burst",
            Self::MaxDebt => "max-debt",
            Self::Start => "start",
            Self::Max => "max",
            Self::Ttl => "ttl",
            Self::Shards => "shards",
            Self::Tz => "tz",
        }
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Keys name the algorithm; other programs that call the scripts may still mix them up, and then take nothing.
    #[test]
    fn no_two_states_have_a_layout_in_common() {
        let mut layouts = Vec::new();
        for row in &ROWS {
            let Some(Packing { layout, .. }) = row.packing else { continue };
            layouts.push(layout);
            if row.algorithm.reserves() {
                // lua/frame.lua tells a state with a debt by it.
                assert!(layout <= 8, "{}: reserves, so expected a layout of at most 8, got {layout}", row.name);
                layouts.push(layout + 8);
            }
            // Of a log that is blocked, or whose denials are counted.
            if row.algorithm == Algorithm::SlidingLog {
                layouts.push(layout + 1);
            }
        }
        assert_eq!(layouts.iter().collect::<BTreeSet<_>>().len(), layouts.len(), "{layouts:?}");
    }
}
