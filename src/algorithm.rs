//! The algorithms: one row and one script for each.

pub(crate) mod numbers;

use std::fmt;
use std::sync::LazyLock;

use crate::error::RuleError;
use crate::script::Script;
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
    /// moment. [`SlidingLog`](Self::SlidingLog) is exact, and affordable for small limits.
    SlidingWindow,
    /// At most `rate` units in any `period`, exactly: each request is remembered.
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

/// An algorithm's properties, apart from its script.
#[derive(Debug)]
pub(crate) struct Row {
    algorithm: Algorithm,
    /// The name in the text form.
    name: &'static str,
    /// The name of its file in `lua/`, without its ending.
    file: &'static str,
    text: &'static str,
    pub(crate) options: &'static [Setting],
    /// Converts numbers to those the script computes with, or says why they don't fit.
    pub(crate) fit: fn(&Numbers) -> Result<Exact, String>,
    /// The most units that a key can have taken or owe, penalties included, as its script bounds them.
    pub(crate) most_counted: fn(&Exact) -> u64,
    /// The numbers of a limit, in its script's order.
    pub(crate) arguments: fn(&Numbers, &Exact) -> Vec<i64>,
    /// The width in bytes of each of them, packed after the algorithm's number.
    widths: &'static [usize],
    /// How many keys take Redis about 150 microseconds.
    most_keys: usize,
    /// What the script's `inspect` appends after `ttl_ms`.
    pub(crate) state: &'static [&'static str],
}

/// In the order of the algorithms' numbers, from 1: the first byte of a limit's packed numbers, and of its state.
static ROWS: [Row; 6] = [
    Row {
        algorithm: Algorithm::TokenBucket,
        name: "token-bucket",
        file: "token_bucket",
        text: include_str!("../lua/token_bucket.lua"),
        options: &[Setting::Burst, Setting::MaxDebt, Setting::Shards],
        fit: numbers::fit_bucket,
        most_counted: numbers::most_of_bucket,
        arguments: numbers::bucket_arguments,
        widths: &[7, 7, 7, 3, 7],
        most_keys: 80,
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
        file: "fixed_window",
        text: include_str!("../lua/fixed_window.lua"),
        options: &[Setting::Burst, Setting::MaxDebt, Setting::Start, Setting::Shards],
        fit: numbers::fit_window,
        most_counted: numbers::most_of_window,
        arguments: numbers::window_arguments,
        widths: &[7, 7, 7, 7, 7],
        most_keys: 80,
        state: &[
            "time_us",
            "used",
            "window_us",
            "state_capacity",
            "state_rate",
            "state_period",
            "state_start",
            "blocked_us",
            "overage",
        ],
    },
    Row {
        algorithm: Algorithm::CalendarWindow,
        name: "calendar-window",
        file: "calendar_window",
        text: include_str!("../lua/calendar_window.lua"),
        options: &[Setting::Tz, Setting::Shards],
        fit: numbers::fit_calendar,
        most_counted: |_| numbers::EXACT,
        arguments: numbers::calendar_arguments,
        widths: &[7, 7, 7, 7],
        most_keys: 80,
        state: &["time_us", "used", "state_limit", "window_us", "blocked_us", "overage"],
    },
    Row {
        algorithm: Algorithm::SlidingWindow,
        name: "sliding-window",
        file: "sliding_window_counter",
        text: include_str!("../lua/sliding_window_counter.lua"),
        options: &[Setting::Shards],
        fit: numbers::fit_counter,
        // A count times the window must be exact.
        most_counted: |exact| numbers::EXACT / exact.period - 1,
        arguments: numbers::counter_arguments,
        widths: &[7, 7, 3],
        most_keys: 80,
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
        file: "sliding_window_log",
        text: include_str!("../lua/sliding_window_log.lua"),
        options: &[Setting::Max, Setting::Shards],
        fit: numbers::fit_log,
        most_counted: |_| 1 << 39,
        arguments: numbers::log_arguments,
        widths: &[5, 7],
        most_keys: 35,
        state: &["newest_us", "entries", "used", "oldest_us", "state_limit", "state_period", "blocked_us", "overage"],
    },
    Row {
        algorithm: Algorithm::Concurrency,
        name: "concurrency",
        file: "concurrency",
        text: include_str!("../lua/concurrency.lua"),
        options: &[Setting::Ttl, Setting::Shards],
        fit: numbers::fit_log,
        most_counted: |_| 20_000,
        arguments: numbers::log_arguments,
        widths: &[2, 7],
        most_keys: 20,
        state: &["time_us", "held", "first_us", "last_us", "blocked_us", "overage"],
    },
];

/// The script of each set of algorithms, at the index whose bits are the set: the lowest is the first algorithm's.
static SCRIPTS: LazyLock<Vec<Script>> = LazyLock::new(|| {
    let of_set = |set: usize| {
        let rows = ROWS.iter().enumerate().filter(|(at, _)| set & 1 << at != 0);
        let (names, texts): (Vec<_>, Vec<_>) = rows.map(|(_, row)| (row.file, row.text)).unzip();
        Script::new(names.join("+"), texts)
    };
    (0..1 << ROWS.len()).map(of_set).collect()
});

impl Script {
    /// The script of each single algorithm.
    pub fn all() -> impl Iterator<Item = &'static Self> {
        Algorithm::all().map(Algorithm::script)
    }

    /// The script that decides limits of these algorithms together.
    ///
    /// ```
    /// use tollgate::{Algorithm, Script};
    ///
    /// let both = Script::for_algorithms([Algorithm::TokenBucket, Algorithm::FixedWindow]);
    /// assert_eq!(both.name(), "token_bucket+fixed_window");
    /// ```
    pub fn for_algorithms(algorithms: impl IntoIterator<Item = Algorithm>) -> &'static Self {
        &SCRIPTS[algorithms.into_iter().fold(0, |set, algorithm| set | 1 << algorithm.place())]
    }
}

impl Algorithm {
    /// Every algorithm.
    pub fn all() -> impl Iterator<Item = Self> {
        ROWS.iter().map(|row| row.algorithm)
    }

    /// The script that decides limits of this algorithm alone, with the name of its file in `lua/`.
    #[must_use]
    pub fn script(self) -> &'static Script {
        Script::for_algorithms([self])
    }

    /// The names of what the script's `inspect` mode appends after the TTL, in order.
    #[must_use]
    pub fn state_fields(self) -> &'static [&'static str] {
        self.row().state
    }

    /// Whether it supports reservations: units may be owed beyond the capacity.
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
        &ROWS[self.place()]
    }

    fn place(self) -> usize {
        ROWS.iter().position(|row| row.algorithm == self).expect("every algorithm has a row")
    }

    /// The name in the text form: `token-bucket`.
    pub(crate) fn name(self) -> &'static str {
        self.row().name
    }

    /// The algorithm with this name in the text form, or with a script of this name, with dashes or underscores.
    pub(crate) fn named(name: &str) -> Result<Self, RuleError> {
        let dashed = |name: &str| name.replace('_', "-");
        let sought = dashed(if name == "gcra" { "token-bucket" } else { name });
        let found = ROWS.iter().find(|row| row.name == sought || dashed(row.file) == sought);
        found.map(|row| row.algorithm).ok_or_else(|| {
            // A calendar window is written as a fixed window whose period says so.
            let rows = ROWS.iter().filter(|row| row.algorithm != Self::CalendarWindow);
            let names: Vec<_> = rows.map(|row| row.name).collect();
            RuleError::new(format!("algorithm: expected one of {}, got {name:?}", names.join(", ")))
        })
    }
}

impl Row {
    /// How many keys a call has at most, so that it doesn't hold up Redis for long.
    pub(crate) fn most_keys(&self) -> usize {
        self.most_keys
    }

    /// A limit's numbers as scripts take them: little-endian, two's complement, after the algorithm's number.
    pub(crate) fn packed(&self, arguments: &[i64]) -> Vec<u8> {
        let number = u8::try_from(self.algorithm.place() + 1).unwrap_or_default();
        let numbers = arguments.iter().zip(self.widths);
        let bytes = numbers.flat_map(|(number, width)| number.to_le_bytes().into_iter().take(*width));
        std::iter::once(number).chain(bytes).collect()
    }

    /// Where a limit's number of this index begins in the packed form.
    pub(crate) fn place_of(&self, index: usize) -> usize {
        1 + self.widths[..index].iter().sum::<usize>()
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
    use super::*;

    const BEGINNING: &str = include_str!("../lua/arguments.lua");
    const END: [&str; 2] = [include_str!("../lua/keys.lua"), include_str!("../lua/decide.lua")];

    #[test]
    fn a_script_is_what_cat_makes_of_its_files() {
        let files = [include_str!("../lua/token_bucket.lua"), include_str!("../lua/fixed_window.lua")];
        let both = Script::for_algorithms([Algorithm::FixedWindow, Algorithm::TokenBucket, Algorithm::FixedWindow]);
        assert_eq!(both.text(), [&[BEGINNING][..], &files, &END].concat().concat());
        assert_eq!(both.name(), "token_bucket+fixed_window");
        assert!(std::ptr::eq(both, Script::for_algorithms([Algorithm::TokenBucket, Algorithm::FixedWindow])));
    }

    #[test]
    fn a_script_for_keys_of_several_slots_is_a_beginning_and_the_script_unchanged() {
        let script = Algorithm::TokenBucket.script();
        let across = script.across_slots();
        assert_eq!(across.text(), [include_str!("../lua/across_slots.lua"), script.text()].concat());
        assert!(across.text().starts_with("#!lua flags=allow-cross-slot-keys\n") && !script.text().contains("#!"));
        assert_ne!(across.digest(), script.digest());
        assert_eq!(across.name(), "token_bucket");
    }
}
