//! CSV: a header with the JSON names, then one row per record; a row may span several lines.
//!
//! Rows are split here, by the csv crate's rules. Its own reader reports the wrong line for a row after a blank line or
//! in a file with CRLF. It also silently reads a field whose quote is never closed to the end of the file, into memory:
//! one record swallows all those after it.

use std::borrow::Cow;
use std::io::{self, BufRead};

use tollgate::Operation;

use super::field::{self, missing, unexpected};
use super::lines::{LIMIT, Lines, too_long};
use super::place::Place;
use super::places::Line;
use super::{Identity, Permits, Record, Unreadable};
use crate::attributes;
use crate::operation;
use crate::records::field::quoted;

/// The next row as a record. The first time it reads the header into `columns`.
pub(super) fn next_record<R: BufRead>(
    lines: &mut Lines<R>,
    columns: &mut Option<Columns>,
    about: Identity,
) -> io::Result<Option<Result<Record, Unreadable>>> {
    let columns = match columns {
        Some(columns) => columns,
        None => columns.insert(header(lines, about)?),
    };
    Ok(next_row(lines)?.map(|(line, row)| {
        row.and_then(|row| columns.record(line, &row)).map_err(|reason| Unreadable { line, reason })
    }))
}

fn header<R: BufRead>(lines: &mut Lines<R>, about: Identity) -> io::Result<Columns> {
    let columns = match next_row(lines)? {
        None => Err("there is no header".to_owned()),
        Some((_, row)) => row.and_then(|row| Columns::of(&row, about)),
    };
    columns.map_err(|what| {
        let columns = if about == Identity::Attributes { "attr.NAME for each attribute" } else { "key" };
        let message = format!(
            "header: expected the columns t_us and {columns}, and optionally op, cost, id, for, request_time and \
             status; {what}"
        );
        io::Error::new(io::ErrorKind::InvalidData, message)
    })
}

/// The index of each field in a row.
pub(super) struct Columns {
    t_us: usize,
    /// `None` for records with attributes.
    key: Option<usize>,
    attributes: Vec<(String, usize)>,
    op: Option<usize>,
    cost: Option<usize>,
    id: Option<usize>,
    length: Option<usize>,
    request_time: Option<usize>,
    status: Option<usize>,
    width: usize,
}

impl Columns {
    fn of(header: &Row, about: Identity) -> Result<Self, String> {
        let with_attributes = about == Identity::Attributes;
        let attribute = |name: &[u8]| {
            let name = name.strip_prefix(b"attr.").filter(|name| with_attributes && !name.is_empty())?;
            Some(String::from_utf8_lossy(name).into_owned())
        };
        // Reported first: for a misspelt name, "missing" would be true but unhelpful.
        for (i, name) in header.fields().enumerate() {
            let known = field::INPUT.iter().chain(field::OUTPUT).any(|known| known.as_bytes() == name);
            if !known && attribute(name).is_none() {
                return Err(format!("got the unknown column {}", quoted(name)));
            }
            if header.fields().take(i).any(|earlier| earlier == name) {
                return Err(format!("got the column {} twice", quoted(name)));
            }
        }
        if with_attributes && !header.fields().any(|name| attribute(name).is_some()) {
            let names: Vec<_> = header.fields().collect();
            return Err(format!("got no attr.NAME in {}", quoted(&names.join(&b','))));
        }
        let at = |name: &str| header.fields().position(|field| field == name.as_bytes());
        let required = |name| {
            at(name).ok_or_else(|| {
                let names: Vec<_> = header.fields().collect();
                format!("got no {name} in {}", quoted(&names.join(&b',')))
            })
        };
        Ok(Self {
            t_us: required("t_us")?,
            key: if with_attributes { None } else { Some(required("key")?) },
            attributes: (0..).zip(header.fields()).filter_map(|(at, name)| Some((attribute(name)?, at))).collect(),
            op: at("op"),
            cost: at("cost"),
            id: at("id"),
            length: at("for"),
            request_time: at("request_time"),
            status: at("status"),
            width: header.ends.len(),
        })
    }

    fn record(&self, line: u64, row: &Row) -> Result<Record, String> {
        if row.ends.len() != self.width {
            return Err(format!("row: expected {} fields, got {}", self.width, row.ends.len()));
        }
        // In CSV an empty cell means no value.
        let cell = |column: usize| row.field(column).filter(|cell| !cell.is_empty());
        let whole = |name, cell: &[u8], max| field::whole(name, digits(cell), max, || quoted(cell));

        let t_us = whole("t_us", cell(self.t_us).ok_or_else(|| missing("t_us"))?, field::MAX_T_US)?;
        let op = match self.op.and_then(cell) {
            None => Operation::default(),
            Some(name) => operation::named(&String::from_utf8_lossy(name)).map_err(|e| format!("op: {e}"))?,
        };
        let key = match self.key {
            Some(key) => cell(key).ok_or_else(|| unexpected("key", field::KEY, field::EMPTY))?.to_vec(),
            None => Vec::new(),
        };
        let attributes = self.attributes.iter().filter_map(|(name, at)| Some((name.clone(), cell(*at)?.to_vec())));
        let attributes = attributes.collect();
        attributes::check(&attributes)?;
        let cost = match self.cost.and_then(cell) {
            None => None,
            Some(cost) => Some(whole("cost", cost, field::MAX_COST)?),
        };
        let id = self.id.and_then(cell).map(<[u8]>::to_vec);
        let length =
            self.length.and_then(cell).map(|text| field::length(&String::from_utf8_lossy(text))).transpose()?;
        operation::check(op, id.is_some(), length.is_some())?;
        let permits = match self.request_time.map(cell) {
            None => Permits::ByRecords,
            Some(None) => Permits::Unknown,
            Some(Some(seconds)) => Permits::Until(field::ends_us(t_us, &String::from_utf8_lossy(seconds))?),
        };
        let status = self.status.and_then(cell).map(field::needed_status).transpose()?;
        Ok(Record { line, t_us, op, key, cost, id, length, permits, status, attributes })
    }
}

/// The cells of a row on one line.
pub(super) fn cells(text: &[u8]) -> Vec<String> {
    let mut row = Row::default();
    text.iter().for_each(|byte| row.push(*byte));
    row.end_field();
    row.fields().map(|cell| String::from_utf8_lossy(cell).trim().to_owned()).collect()
}

/// The rows of any table with a header, with access to columns by name.
#[derive(Default)]
pub(super) struct Named {
    columns: Vec<String>,
}

/// A row, and its columns.
pub(super) struct NamedRow<'l> {
    columns: &'l [String],
    row: Row,
}

impl Named {
    /// The next row with the line it starts on, after the header, which is read first.
    pub(super) fn next<R: BufRead>(
        &mut self,
        lines: &mut Lines<R>,
    ) -> io::Result<Option<(u64, Result<NamedRow<'_>, String>)>> {
        if self.columns.is_empty() {
            let Some((_, header)) = next_row(lines)? else { return Ok(None) };
            let header = header.map_err(|why| io::Error::new(io::ErrorKind::InvalidData, why))?;
            self.columns = header.fields().map(|name| String::from_utf8_lossy(name).trim().to_owned()).collect();
        }
        let Some((line, row)) = next_row(lines)? else { return Ok(None) };
        let width = self.columns.len();
        let row = row.and_then(|row| match row.ends.len() {
            got if got == width => Ok(NamedRow { columns: &self.columns, row }),
            got => Err(format!("row: expected {width} fields, got {got}")),
        });
        Ok(Some((line, row)))
    }
}

impl Line for NamedRow<'_> {
    fn at(&self, place: &Place) -> Option<Cow<'_, [u8]>> {
        let at = match place {
            Place::Named(name) => self.columns.iter().position(|column| column == name)?,
            Place::At(at) => usize::try_from(*at).ok()?.checked_sub(1)?,
            Place::LastQuoted => return None,
        };
        self.row.field(at).map(Cow::Borrowed)
    }

    fn forwarded(&self) -> Vec<(Place, Cow<'_, [u8]>)> {
        let telling = |name: &&String| name.to_ascii_lowercase().contains("forwarded");
        let found = self.columns.iter().filter(telling).map(|name| Place::Named(name.clone()));
        found.filter_map(|place| Some((place.clone(), Cow::Owned(self.at(&place)?.into_owned())))).collect()
    }
}

/// Digits only: `u64::from_str` would take a plus sign too.
fn digits(cell: &[u8]) -> Option<u64> {
    if !cell.iter().all(u8::is_ascii_digit) {
        return None;
    }
    str::from_utf8(cell).ok()?.parse().ok()
}

/// The next row and the line it starts on; skips blank lines between rows.
fn next_row<R: BufRead>(lines: &mut Lines<R>) -> io::Result<Option<(u64, Result<Row, String>)>> {
    let mut row = Row::default();
    let mut start = None;
    let mut length = 0;
    while let Some(line) = lines.next()? {
        if start.is_none() && line.is_blank() {
            continue;
        }
        let start = *start.get_or_insert(line.number);
        length += line.text.len() + line.ending.len();
        if line.too_long || length > LIMIT {
            return Ok(Some((start, Err(too_long("row")))));
        }
        line.text.iter().for_each(|byte| row.push(*byte));
        if row.at != At::Quoted {
            row.end_field();
            return Ok(Some((start, Ok(row))));
        }
        row.bytes.extend_from_slice(line.ending);
    }
    Ok(start.map(|start| (start, Err("row: expected a closing quote, got the end of the file".to_owned()))))
}

/// The fields of a row, concatenated.
#[derive(Default)]
struct Row {
    bytes: Vec<u8>,
    /// Where each field ends in `bytes`.
    ends: Vec<usize>,
    at: At,
}

#[derive(Default, PartialEq, Eq)]
enum At {
    /// The start of a field: the only place where a quote opens it.
    #[default]
    Start,
    Plain,
    Quoted,
    /// After a quote in a quoted field: the closing quote, or the first half of `""`.
    Quote,
}

impl Row {
    fn push(&mut self, byte: u8) {
        self.at = match (&self.at, byte) {
            (At::Start, b'"') => At::Quoted,
            (At::Quoted, b'"') => At::Quote,
            (At::Start | At::Plain | At::Quote, b',') => {
                self.end_field();
                At::Start
            }
            (at, byte) => {
                let quoted = *at == At::Quoted || (*at == At::Quote && byte == b'"');
                self.bytes.push(byte);
                if quoted { At::Quoted } else { At::Plain }
            }
        };
    }

    fn end_field(&mut self) {
        self.ends.push(self.bytes.len());
    }

    fn field(&self, i: usize) -> Option<&[u8]> {
        let start = if i == 0 { 0 } else { *self.ends.get(i - 1)? };
        self.bytes.get(start..*self.ends.get(i)?)
    }

    fn fields(&self) -> impl Iterator<Item = &[u8]> {
        (0..self.ends.len()).filter_map(|i| self.field(i))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &[u8]) -> Result<Vec<Result<Record, Unreadable>>, String> {
        super::super::read(super::super::Format::Csv, Identity::Key(super::super::KeyField::Ip), text)
            .collect::<io::Result<_>>()
            .map_err(|e| e.to_string())
    }

    fn record(line: u64, t_us: u64, op: Operation, key: &[u8], cost: Option<u64>) -> Result<Record, Unreadable> {
        Ok(Record {
            line,
            t_us,
            op,
            key: key.to_vec(),
            cost,
            id: None,
            length: None,
            permits: Permits::ByRecords,
            status: None,
            attributes: Vec::new(),
        })
    }

    fn unreadable(line: u64, reason: &str) -> Result<Record, Unreadable> {
        Err(Unreadable { line, reason: reason.to_owned() })
    }

    #[test]
    fn columns_come_in_any_order_and_empty_cells_are_defaults() {
        let text = b"cost,key,rule,t_us,op\n2,u1,cli,5,peek\n,u\xff,,6,\n";
        assert_eq!(
            read(text).unwrap(),
            [record(2, 5, Operation::Peek, b"u1", Some(2)), record(3, 6, Operation::Acquire, b"u\xff", None)]
        );
        assert_eq!(read(b"key,t_us\nu1,5").unwrap(), [record(2, 5, Operation::Acquire, b"u1", None)]);
    }

    #[test]
    fn a_record_has_the_line_it_starts_on() {
        for ending in ["\n", "\r\n"] {
            let text = "t_us,key\n\n1,\"a,\n\nb\"\"\"\n\n2,c\n\"3\",\"d\"".replace('\n', ending);
            let key = format!("a,{ending}{ending}b\"");
            assert_eq!(
                read(text.as_bytes()).unwrap(),
                [
                    record(3, 1, Operation::Acquire, key.as_bytes(), None),
                    record(7, 2, Operation::Acquire, b"c", None),
                    record(8, 3, Operation::Acquire, b"d", None),
                ]
            );
        }
    }

    #[test]
    fn a_bad_row_does_not_stop_the_next() {
        let text = b"t_us,key,op,cost\n1,a\n1,a,,,\n,a,,\n1,,,\n+1,a,,\n1,a,take,\n1,a,,-1\n1,a,,1e3\n1,a,,\n";
        let cost = "cost: expected a whole number from 0 to 9007199254740991, got";
        assert_eq!(
            read(text).unwrap(),
            [
                unreadable(2, "row: expected 4 fields, got 2"),
                unreadable(3, "row: expected 4 fields, got 5"),
                unreadable(4, "t_us: it is missing"),
                unreadable(5, "key: expected a non-empty string, got an empty string"),
                unreadable(6, "t_us: expected a whole number from 0 to 4503599627370496, got \"+1\""),
                unreadable(
                    7,
                    "op: expected acquire, peek, reserve, at-most, refund, penalty, block, renew, release, settle, cancel or reset, got \"take\""
                ),
                unreadable(8, &format!("{cost} \"-1\"")),
                unreadable(9, &format!("{cost} \"1e3\"")),
                record(10, 1, Operation::Acquire, b"a", None),
            ]
        );
    }

    #[test]
    fn a_quote_that_is_never_closed_is_not_a_record() {
        assert_eq!(
            read(b"t_us,key\n1,a\n2,\"b\n3,c\n").unwrap(),
            [
                record(2, 1, Operation::Acquire, b"a", None),
                unreadable(3, "row: expected a closing quote, got the end of the file"),
            ]
        );
    }

    #[test]
    fn without_a_header_of_records_nothing_is_read() {
        for (text, want) in [
            ("", "there is no header"),
            ("\n\r\n", "there is no header"),
            ("t_us,cost\n1,2\n", "got no key in \"t_us,cost\""),
            ("key\n1\n", "got no t_us in \"key\""),
            ("t_us,key,keys\n1,2,3\n", "got the unknown column \"keys\""),
            ("t_us,key,\n", "got the unknown column \"\""),
            ("t_us,key,t_us\n", "got the column \"t_us\" twice"),
            ("\"t_us,key\n", "row: expected a closing quote, got the end of the file"),
        ] {
            let expected = "header: expected the columns t_us and key, and optionally op, cost, id, for, request_time \
                and status; ";
            assert_eq!(read(text.as_bytes()), Err(format!("{expected}{want}")));
        }
        let mut records =
            super::super::read(super::super::Format::Csv, Identity::Key(super::super::KeyField::Ip), &b"a\n1\n2\n"[..]);
        assert_eq!(records.next().unwrap().unwrap_err().kind(), io::ErrorKind::InvalidData);
        assert!(records.next().is_none());
    }

    #[test]
    fn rows_split_as_the_csv_crate_splits_them() {
        let mut random = super::super::tests::Lcg(1);
        for _ in 0..5_000 {
            let mut text: Vec<u8> = (0..random.below(24)).map(|_| b"ab,,\"\"\"\n"[random.below(8)]).collect();
            text.push(b'\n');
            let mut lines = Lines::new(text.as_slice());
            let mut rows: Vec<Vec<Vec<u8>>> = Vec::new();
            let mut open = false;
            while let Some((_, row)) = next_row(&mut lines).unwrap() {
                match row {
                    Ok(row) => rows.push(row.fields().map(<[u8]>::to_vec).collect()),
                    Err(_) => open = true,
                }
            }
            let mut reader = csv::ReaderBuilder::new().has_headers(false).flexible(true).from_reader(text.as_slice());
            let mut want: Vec<Vec<Vec<u8>>> =
                reader.byte_records().map(|row| row.unwrap().iter().map(<[u8]>::to_vec).collect()).collect();
            // The csv crate takes the text after an unclosed quote for a row.
            if open {
                want.pop();
            }
            assert_eq!(rows, want, "{:?}", String::from_utf8_lossy(&text));
        }
    }
}
