//! A state in units for people.

use std::time::Duration;

use tollgate::{KeyState, RetryAfter};

use crate::escape::shown;
use crate::output::{counted, human, timestamp};

/// Names and explanations of the state of a limit's key.
pub(super) fn explained(state: &KeyState) -> Vec<(&'static str, String)> {
    let decision = &state.decision;
    let full = if decision.reset_after.is_zero() {
        "now: nothing is in use".to_owned()
    } else {
        format!("in {}, if nothing more is taken", human(decision.reset_after))
    };
    let next = match decision.retry_after {
        RetryAfter::Now => "a request of cost 1 is allowed now".to_owned(),
        RetryAfter::After(wait) => format!("a request of cost 1 is denied, and allowed in {}", human(wait)),
        RetryAfter::Never => "a request of cost 1 is never allowed".to_owned(),
    };
    let mut lines = vec![
        ("redis key", shown(state.key.as_bytes())),
        ("remaining", format!("{} of {}", decision.remaining, counted(decision.capacity, "unit"))),
        ("full again", full),
        ("next", next),
    ];
    if !state.exists {
        lines.push(("state", "none: the key is as if never used".to_owned()));
        return lines;
    }
    let expiry = state.expires_after.map_or_else(|| "never".to_owned(), |ttl| format!("in {}", human(ttl)));
    lines.push(("expires", expiry));
    let fields = Fields { fields: &state.fields };
    lines.extend(state.fields.iter().map(|(name, number)| (*name, fields.decoded(name, *number))));
    lines.extend(fields.arrival().map(|arrival| ("arrival", arrival)));
    lines
}

/// The script's own numbers.
struct Fields<'a> {
    fields: &'a [(&'static str, i64)],
}

impl Fields<'_> {
    fn value(&self, name: &str) -> Option<i64> {
        self.fields.iter().find(|(field, _)| *field == name).map(|(_, value)| *value)
    }

    /// A number in its unit, and raw.
    fn decoded(&self, name: &str, number: i64) -> String {
        let period = self.value("state_period");
        match (name, period) {
            ("blocked_us" | "overage" | "first_us" | "last_us", _) if number == 0 => "-".to_owned(),
            ("blocked_us", _) => format!("for {}", human(of_micros(number))),
            // A period is in ticks, and a tick in microseconds.
            ("state_period", _) => {
                let ticks = self.value("state_tick").unwrap_or(1);
                format!("{} ({number})", human(of_micros(number.saturating_mul(ticks))))
            }
            ("state_tick", _) => format!("{} ({number})", human(of_micros(number))),
            (name, _) if name.ends_with("_us") => u64::try_from(number).map_or_else(|_| number.to_string(), timestamp),
            // A bucket stores fractions of a unit, windows store whole units.
            ("lead", Some(period)) => in_units(number, period),
            _ => number.to_string(),
        }
    }

    /// When a caller that keeps to the rate is expected to send the next request.
    fn arrival(&self) -> Option<String> {
        let (lead, rate, tick) = (self.value("lead")?, self.value("state_rate")?, self.value("state_tick")?);
        let ahead = lead.max(0).unsigned_abs().div_ceil(rate.max(1).unsigned_abs()) * tick.max(0).unsigned_abs();
        let arrival = self.value("time_us").unwrap_or(0).max(0).unsigned_abs() + ahead;
        Some(format!("{}, {} ahead", timestamp(arrival), human(Duration::from_micros(ahead))))
    }
}

fn in_units(number: i64, period: i64) -> String {
    let units = format!("{:.6}", number as f64 / period as f64);
    let units = units.trim_end_matches('0').trim_end_matches('.');
    format!("{units} {} ({number} / {period})", if units == "1" { "unit" } else { "units" })
}

fn of_micros(number: i64) -> Duration {
    Duration::from_micros(number.max(0).unsigned_abs())
}
