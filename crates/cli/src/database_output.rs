//! Prints records from the database: one as names and values, several as a table, or JSON.

use std::io::{self, Write};
use std::time::SystemTime;

use serde_json::{Map, Value};
use tollgate_record::OwnLimits;

use crate::escape::shown;
use crate::output::{QUIET, Shape, facts, json};

/// One record's fields: name and value. Empty fields are `null`.
pub(crate) type Fields = Vec<(&'static str, Value)>;

/// Prints a single record.
pub(crate) fn print(shape: Shape, fields: Fields) -> io::Result<()> {
    let mut out = anstream::stdout();
    match shape {
        Shape::Jsonl => json(&mut out, &object(fields)),
        Shape::Table => {
            let said: Vec<_> = fields.iter().map(|(name, value)| (*name, text(value))).collect();
            let names: Vec<_> = said.iter().map(|(name, value)| (name.replace('_', " "), value)).collect();
            let lines: Vec<_> = names.iter().map(|(name, value)| (name.as_str(), (*value).clone())).collect();
            facts(&mut out, &lines)
        }
    }
}

/// Prints several records, one a line.
pub(crate) fn print_all(shape: Shape, records: Vec<Fields>) -> io::Result<()> {
    let mut out = anstream::stdout();
    if shape == Shape::Jsonl {
        return records.into_iter().try_for_each(|fields| json(&mut out, &object(fields)));
    }
    let Some(first) = records.first() else { return Ok(()) };
    let heads: Vec<_> = first.iter().map(|(name, _)| name.replace('_', " ")).collect();
    let rows: Vec<Vec<_>> =
        records.iter().map(|fields| fields.iter().map(|(_, value)| text(value)).collect()).collect();
    let width = |column: usize| {
        let cells = rows.iter().map(|row| row[column].chars().count());
        cells.max().unwrap_or_default().max(heads[column].len())
    };
    let widths: Vec<_> = (0..heads.len()).map(width).collect();
    let line = |cells: &[String]| {
        let cells: Vec<_> = cells.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        cells.join("  ").trim_end().to_owned()
    };
    writeln!(out, "{QUIET}{}{QUIET:#}", line(&heads))?;
    rows.iter().try_for_each(|row| writeln!(out, "{}", line(row)))
}

fn object(fields: Fields) -> Map<String, Value> {
    fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

/// The value as text that is safe for a terminal.
fn text(value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::String(text) => shown(text.as_bytes()),
        Value::Bool(true) => "yes".to_owned(),
        Value::Bool(false) => "no".to_owned(),
        other => other.to_string(),
    }
}

/// The time in UTC, to the second.
pub(crate) fn time(time: Option<SystemTime>) -> Value {
    let time = time.and_then(|time| jiff::Timestamp::try_from(time).ok());
    time.map_or(Value::Null, |time| Value::String(format!("{time:.0}")))
}

/// `1000 an hour, at most 20 at once`.
pub(crate) fn limits(limits: OwnLimits) -> Value {
    let each = [(limits.per_second, "a second"), (limits.per_hour, "an hour"), (limits.per_day, "a day")];
    let mut said: Vec<_> = each.iter().filter_map(|(units, period)| Some(format!("{} {period}", (*units)?))).collect();
    said.extend(limits.burst.map(|burst| format!("at most {burst} at once")));
    if said.is_empty() { Value::Null } else { Value::String(said.join(", ")) }
}
