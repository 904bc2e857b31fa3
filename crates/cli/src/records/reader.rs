//! Reads records one by one, in whichever format.

use std::io::{self, BufRead};

use super::access::Access;
use super::csv_table::{self, Columns, Named};
use super::field::{quoted, unexpected};
use super::lines::{Lines, too_long};
use super::place::Place;
use super::places::{Line, Places};
use super::sample::Sample;
use super::w3c::Header;
use super::words::Words;
use super::{Format, Identity, KeyField, Record, Unreadable, Wanted};
use super::{access_json, combined, haproxy, jsonl, text};

pub(super) struct Records<R> {
    lines: Lines<R>,
    shape: Shape,
    way: Way,
    /// Whether the first record has been read.
    begun: bool,
    ended: bool,
}

enum Shape {
    Jsonl,
    /// `None` until the header has been read.
    Csv(Option<Columns>),
    Table(Named),
    Combined,
    AccessJson,
    Haproxy,
    W3c(Header),
    /// The places of its lines, once one matched a known format.
    Text(Option<Places>),
}

/// How an access log's line becomes a record.
struct Way {
    wanted: Wanted,
    /// Until enough requests were sampled; `None` if the address doesn't count, or its place is given.
    sample: Option<Sample>,
    /// Whether there was any line.
    any: bool,
    /// The given fields that no line has had so far.
    unseen: Vec<Place>,
    /// Whether a list of addresses is expected, and no line has had one so far.
    unlisted: bool,
}

impl<R: BufRead> Records<R> {
    pub(super) fn new(format: Format, wanted: Wanted, input: R) -> Self {
        let by_address = matches!(wanted.about, Identity::Key(KeyField::Ip) | Identity::Attributes);
        let unsaid = wanted.clients.field.is_none() && !wanted.places.have_ip();
        let shape = match format {
            Format::Jsonl => Shape::Jsonl,
            Format::Csv if wanted.places.have_time() => Shape::Table(Named::default()),
            Format::Csv => Shape::Csv(None),
            Format::Combined => Shape::Combined,
            Format::AccessJson => Shape::AccessJson,
            Format::Haproxy => Shape::Haproxy,
            Format::W3c => Shape::W3c(Header::default()),
            Format::Text => Shape::Text(Some(wanted.places.clone()).filter(Places::have_time)),
        };
        let sample = (by_address && unsaid).then(Sample::default);
        let (unseen, unlisted) = (wanted.places.all().cloned().collect(), wanted.clients.lack_a_field());
        let way = Way { wanted, sample, any: false, unseen, unlisted };
        Self { lines: Lines::new(input), shape, way, begun: false, ended: false }
    }

    fn next_record(&mut self) -> io::Result<Option<Result<Record, Unreadable>>> {
        let about = self.way.wanted.about;
        match &mut self.shape {
            Shape::Jsonl => self.lines.next_record(|line, text| jsonl::parse(line, text, about)),
            Shape::Csv(columns) => csv_table::next_record(&mut self.lines, columns, about),
            Shape::Table(table) => {
                while let Some((line, row)) = table.next(&mut self.lines)? {
                    let read = row.and_then(|row| {
                        let access = self.way.wanted.places.read(&row, None)?;
                        self.way.record(line, &row, access)
                    });
                    if let Some(record) = read.transpose() {
                        return Ok(Some(record.map_err(|reason| Unreadable { line, reason })));
                    }
                }
                Ok(None)
            }
            shape => {
                while let Some(line) = self.lines.next()? {
                    if line.is_blank() {
                        continue;
                    }
                    let number = line.number;
                    let read = match line.too_long {
                        true => Err(too_long("line")),
                        false => self.way.read(shape, number, line.text),
                    };
                    if let Some(record) = read.transpose() {
                        return Ok(Some(record.map_err(|reason| Unreadable { line: number, reason })));
                    }
                }
                Ok(None)
            }
        }
    }

    /// A time in January 1970 is probably in another unit.
    fn doubt_unit(&self, t_us: u64) {
        let unit = match t_us {
            946_684_800..4_102_444_800 => "seconds",
            946_684_800_000..4_102_444_800_000 => "milliseconds",
            _ => return,
        };
        let finding = format!("t_us {t_us} is in January 1970; if it is in {unit}, write it in microseconds");
        self.way.wanted.tally.finding(finding);
    }
}

impl<R: BufRead> Iterator for Records<R> {
    type Item = io::Result<Result<Record, Unreadable>>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        let item = self.next_record();
        if let Ok(Some(Ok(record))) = &item
            && !std::mem::replace(&mut self.begun, true)
        {
            match self.shape {
                Shape::Jsonl | Shape::Csv(_) => self.doubt_unit(record.t_us),
                Shape::Combined => self.way.doubt_end(),
                _ => {}
            }
        }
        // A stream that failed once may fail for ever, and a caller that only counts errors would never end.
        self.ended = !matches!(item, Ok(Some(_)));
        if self.ended {
            self.way.end();
        }
        item.transpose()
    }
}

impl Way {
    /// The record on this line of an access log; `None` if it isn't about a request.
    fn read(&mut self, shape: &mut Shape, number: u64, text: &[u8]) -> Result<Option<Record>, String> {
        match shape {
            Shape::AccessJson => {
                let object = access_json::object(text)?;
                let access = access_json::access(&object, &self.wanted.places, text)?;
                self.record(number, &object, access)
            }
            Shape::W3c(header) => {
                if header.note(text) {
                    return Ok(None);
                }
                let cells = header.cells(text)?;
                let access = cells.access(&self.wanted.places)?;
                self.record(number, &cells, access)
            }
            Shape::Haproxy => {
                let words = Words::of(text);
                let access = haproxy::parse(&words, text)?;
                self.over(number, &words, access)
            }
            Shape::Text(places) => {
                if places.is_none() {
                    *places = text::known(text);
                }
                let words = Words::of(text);
                // Heroku's router and applications write to the same log.
                if places.is_none() && text::is_of_another(&words) {
                    return self.record(number, &words, None);
                }
                let Some(places) = places else {
                    let expected = "a line of a known log format, or --fields time=FIELD,ip=FIELD,request=FIELD";
                    return Err(unexpected("line", expected, &quoted(text)));
                };
                let is_other = text::is_of_another(&words) && !self.wanted.places.have_time();
                let mut access = if is_other { None } else { places.read(&words, None)? };
                if let Some(access) = access.as_mut().filter(|_| !places.have_duration()) {
                    // nginx's duration, which may end a line.
                    access.took = combined::took(text);
                }
                self.over(number, &words, access)
            }
            // Only Combined gets here: the others are read elsewhere.
            Shape::Combined | Shape::Jsonl | Shape::Csv(_) | Shape::Table(_) => {
                let access = combined::parse(text)?;
                if self.is_simple() {
                    return access.record(number, self.wanted.about, &self.wanted.clients, None).map(Some);
                }
                self.over(number, &Words::of(text), Some(access))
            }
        }
    }

    /// The record of this access; the given places override its fields.
    fn over(&mut self, number: u64, words: &Words<'_>, access: Option<Access<'_>>) -> Result<Option<Record>, String> {
        let access = match access {
            Some(access) => self.wanted.places.read(words, Some(access))?,
            None => None,
        };
        self.record(number, words, access)
    }

    /// Whether a line needs only what its format gives.
    fn is_simple(&self) -> bool {
        let asked = !self.wanted.places.are_none() || self.wanted.clients.field.is_some() || self.unlisted;
        self.sample.is_none() && !asked
    }

    /// Warns once if a line's time is only assumed to be its request's end, since the duration is subtracted from it.
    fn doubt_end(&self) {
        let places = &self.wanted.places;
        if places.have_duration() && !places.have_time() {
            self.wanted.tally.finding(
                "the time of a line is taken as the end of its request, as nginx and gunicorn log it; Apache logs the \
                 arrival: add start=4 to --fields (4 is the place of the time), or time=4 if it is the end"
                    .to_owned(),
            );
        }
    }

    fn record(&mut self, number: u64, line: &dyn Line, access: Option<Access<'_>>) -> Result<Option<Record>, String> {
        let Wanted { about, clients, tally, .. } = &self.wanted;
        self.any = true;
        self.unseen.retain(|place| line.at(place).is_none());
        let Some(access) = access else {
            tally.passed_over();
            return Ok(None);
        };
        if let Some(sample) = &mut self.sample {
            sample.note(&access.host, line);
        }
        self.unlisted &= !access.host.contains(&b',');
        let forwarded = clients.field.as_ref().map(|place| line.addresses(place));
        if let Some(forwarded) = &forwarded {
            tally.client(forwarded.is_some());
        }
        let record = access.record(number, *about, clients, forwarded.flatten().as_deref());
        if self.sample.as_ref().is_some_and(Sample::is_full) {
            self.end_sample();
        }
        record.map(Some)
    }

    fn end(&mut self) {
        self.end_sample();
        if !std::mem::take(&mut self.any) {
            return;
        }
        let tally = &self.wanted.tally;
        for place in std::mem::take(&mut self.unseen) {
            tally.finding(format!("no line has the field {place}, which --fields names"));
        }
        if std::mem::take(&mut self.unlisted) {
            let how = "name the field that holds the list by --client-address";
            tally.finding(format!("--proxies: no line has a list of addresses as its client: {how}"));
        }
    }

    fn end_sample(&mut self) {
        if let Some(finding) = self.sample.take().and_then(|sample| sample.finding()) {
            self.wanted.tally.finding(finding);
        }
    }
}
