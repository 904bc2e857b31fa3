//! The W3C's extended log format, as IIS and CloudFront write it: lines that begin with `#` say which columns follow,
//! with spaces or tabs between them.

use std::borrow::Cow;

use super::access::{self, Access, Time};
use super::field;
use super::place::Place;
use super::places::{Line, Places, Unit};
use super::time;

/// What the lines with `#` have declared so far.
#[derive(Debug, Default)]
pub(super) struct Header {
    columns: Vec<String>,
    /// The unit of time-taken: IIS writes milliseconds, CloudFront seconds.
    unit: Option<Unit>,
}

pub(super) struct Cells<'l> {
    columns: &'l [String],
    cells: Vec<&'l [u8]>,
    unit: Option<Unit>,
}

impl Header {
    /// Whether it is a line with `#`, which is then noted.
    pub(super) fn note(&mut self, text: &[u8]) -> bool {
        let Some(text) = text.strip_prefix(b"#") else { return false };
        let text = String::from_utf8_lossy(text);
        if text.trim_start().starts_with("Software: Microsoft") {
            self.unit = Some(Unit::Milliseconds);
        } else if let Some(fields) = text.trim_start().strip_prefix("Fields:") {
            self.columns = fields.split_whitespace().map(str::to_owned).collect();
            if self.columns.iter().any(|name| name == "x-edge-location") {
                self.unit = Some(Unit::Seconds);
            }
        }
        true
    }

    /// A line's cells.
    pub(super) fn cells<'l>(&'l self, text: &'l [u8]) -> Result<Cells<'l>, String> {
        if self.columns.is_empty() {
            return Err("line: no line before it names its columns, such as #Fields: date time c-ip".to_owned());
        }
        let cells: Vec<_> = match text.contains(&b'\t') {
            true => text.split(|byte| *byte == b'\t').collect(),
            false => text.split(|byte| *byte == b' ').filter(|cell| !cell.is_empty()).collect(),
        };
        match (cells.len(), self.columns.len()) {
            (got, expected) if got != expected => Err(format!("line: expected {expected} columns, got {got}")),
            _ => Ok(Cells { columns: &self.columns, cells, unit: self.unit }),
        }
    }
}

impl Cells<'_> {
    pub(super) fn access(&self, places: &Places) -> Result<Option<Access<'_>>, String> {
        // Read from its given place later, if there is one.
        let time = if places.have_time() { Time::Ended(0) } else { self.time()? };
        places.read(self, Some(self.at_time(time)))
    }

    fn time(&self) -> Result<Time, String> {
        let get = |name: &str| self.cell(name).filter(|cell| !matches!(*cell, b"" | b"-"));
        let expected = "time: no date and time on this line; give time=FIELD in --fields";
        let (date, time) = get("date").zip(get("time")).ok_or(expected)?;
        time::read("time", &[date, b" ", time].concat()).map(Time::Ended)
    }

    fn at_time(&self, time: Time) -> Access<'_> {
        let get = |name: &str| self.cell(name).filter(|cell| !matches!(*cell, b"" | b"-"));
        let took = get("time-taken").and_then(|text| str::from_utf8(text).ok()?.parse().ok());
        Access {
            took: self.unit.zip(took).and_then(|(unit, number)| unit.micros(number)),
            host: get("c-ip").unwrap_or_default().into(),
            status: get("sc-status").and_then(field::status),
            user: get("cs-username").map(Cow::Borrowed),
            method: get("cs-method").map(Cow::Borrowed),
            path: get("cs-uri-stem").or_else(|| get("cs-uri")).map(|uri| access::path_of_target(uri.into())),
            ..Access::at(time)
        }
    }

    fn cell(&self, name: &str) -> Option<&[u8]> {
        let at = self.columns.iter().position(|column| column == name)?;
        let cell = *self.cells.get(at)?;
        Some(cell.strip_prefix(b"\"").and_then(|cell| cell.strip_suffix(b"\"")).unwrap_or(cell))
    }
}

impl Line for Cells<'_> {
    fn at(&self, place: &Place) -> Option<Cow<'_, [u8]>> {
        match place {
            Place::Named(name) => self.cell(name).map(Cow::Borrowed),
            Place::At(at @ 1..) => self.cells.get(usize::try_from(at - 1).ok()?).map(|cell| Cow::Borrowed(*cell)),
            Place::At(_) | Place::LastQuoted => None,
        }
    }

    /// IIS writes a space as `+`, CloudFront as `%20`.
    fn addresses(&self, place: &Place) -> Option<Cow<'_, [u8]>> {
        let list = self.at(place)?;
        Some(Cow::Owned(String::from_utf8_lossy(&list).replace("%20", " ").replace('+', " ").into_bytes()))
    }

    fn forwarded(&self) -> Vec<(Place, Cow<'_, [u8]>)> {
        let telling = |name: &&String| name.to_ascii_lowercase().contains("forwarded");
        let found = self.columns.iter().filter(telling);
        found
            .filter_map(|name| {
                let place = Place::Named(name.clone());
                let text = self.addresses(&place)?;
                Some((place, text))
            })
            .collect()
    }
}
