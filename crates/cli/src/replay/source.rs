//! Where records come from, and in which format.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use tokio::sync::{mpsc, oneshot};

use super::unreadable::Warnings;
use crate::messages;
use crate::records::{
    self, Clients, Format, Identity, KeyField, Looks, Place, Places, Record, Tally, Unreadable, Wanted,
};

type Item = io::Result<Result<Record, Unreadable>>;

/// How records are read.
#[derive(Clone, Debug, Args)]
pub(crate) struct Reading {
    /// The records' format.
    ///
    /// Default: detected from the beginning of the file.
    #[arg(long, value_enum, help_heading = "Records")]
    input: Option<Format>,
    /// Where an access log has what, such as time=ts,ip=client.ip.
    ///
    /// Of time (of the line, at a request's end) or start, ip, user, method, path or request, and duration; what isn't
    /// given is found as --input says. A FIELD is a name in JSON (with dots into objects), a column's name, NAME in
    /// NAME=VALUE, the position of a word from 1, or from the end from -1 (text in quotes or brackets is one word), or
    /// last-quoted. A duration is a number with its unit, or takes the one given: duration=FIELD:s, ms, us or ns; the sum
    /// of several is FIELD+FIELD.
    #[arg(long, value_name = "NAME=FIELD,...", help_heading = "Records")]
    fields: Option<Places>,
    /// The field of an access log that has the client's address.
    ///
    /// As a proxy or a balancer has written it, such as x_forwarded_for in JSON, last-quoted for nginx's packaged format, or as in --fields. Of a list, the last
    /// entry counts that isn't one of the --proxies; without those, the last, which the nearest proxy has written.
    #[arg(long, value_name = "FIELD", allow_hyphen_values = true, help_heading = "Records")]
    client_address: Option<Place>,
    /// Proxies whose entries in it are trusted, such as 10.0.0.0/8.
    ///
    /// Addresses or networks, with commas between. As with the middleware's ClientAddress::behind: a request that comes from none of them counts by its own address.
    #[arg(long, value_name = "NETWORK,...", value_delimiter = ',', help_heading = "Records")]
    proxies: Vec<String>,
    /// Stop at the first line that can't be read.
    #[arg(long, help_heading = "Records")]
    strict: bool,
}

/// A file, or standard input.
pub(crate) struct Source<'a> {
    path: &'a Path,
    reading: Reading,
    about: Identity,
    /// The field to count by that was asked for, which only an access log has.
    by: Option<KeyField>,
}

/// Standard input's records as they arrive.
pub(crate) struct Stream {
    records: mpsc::Receiver<Item>,
    latest: u64,
}

impl Reading {
    /// The source of this path, whose records are read for this.
    pub(crate) fn of<'p>(&self, path: &'p Path, about: Identity) -> Source<'p> {
        Source { path, reading: self.clone(), about, by: None }
    }

    /// The same for records by key; of an access log, by this field, or by the client's address.
    pub(crate) fn by_key<'p>(&self, path: &'p Path, by: Option<KeyField>) -> Source<'p> {
        Source { by, ..self.of(path, Identity::Key(by.unwrap_or(KeyField::Ip))) }
    }

    /// What records are read for.
    fn wanted(&self, about: Identity) -> Result<Wanted> {
        let clients = Clients::new(self.client_address.clone(), &self.proxies);
        let clients = clients.map_err(|why| anyhow!("--{why}"))?;
        Ok(Wanted { places: self.places(), clients, ..Wanted::from(about) })
    }

    fn places(&self) -> Places {
        self.fields.clone().unwrap_or_default()
    }

    /// Reports lines that can't be read, and what else is to be said.
    fn warnings(&self, source: &str, format: Format, looks: &Looks, tally: &Arc<Tally>) -> Warnings {
        let client = self.client_address.as_ref().map(ToString::to_string);
        Warnings::new(source, format, looks, self.strict).with(Arc::clone(tally), client)
    }
}

impl Stream {
    /// Waits for the next one; none after the last.
    ///
    /// # Errors
    ///
    /// Standard input can't be read further.
    pub(crate) async fn next(&mut self, warnings: &Warnings) -> Result<Option<Result<Record, Unreadable>>> {
        let next = self.records.recv().await.transpose();
        next.map_err(|error| warnings.broken(&error))
    }

    /// Keeps the clock from stepping back: gives the record the latest time so far if its own is earlier, and returns
    /// whether it was.
    pub(crate) fn clamp(&mut self, record: &mut Record) -> bool {
        let is_earlier = record.t_us < self.latest;
        self.latest = self.latest.max(record.t_us);
        record.t_us = self.latest;
        is_earlier
    }

    /// Whether nothing more has arrived yet.
    pub(crate) fn is_drained(&self) -> bool {
        self.records.is_empty()
    }
}

impl Source<'_> {
    pub(crate) fn is_standard_input(&self) -> bool {
        self.path.as_os_str() == "-"
    }

    /// Whether it can be read twice: a pipe can't.
    pub(crate) fn is_plain_file(&self) -> bool {
        self.path.metadata().is_ok_and(|metadata| metadata.is_file())
    }

    /// The records, and their format.
    pub(crate) fn open(&self) -> Result<(impl Iterator<Item = Item> + use<>, Format, Warnings)> {
        let file = self.text()?;
        let unsure = self.reading.input.is_none();
        let (looks, file) = records::look(file, unsure, &self.reading.places()).with_context(|| self.shown())?;
        let format = self.settled(&looks)?;
        let wanted = self.reading.wanted(self.about)?;
        let warnings = self.reading.warnings(&self.shown(), format, &looks, &wanted.tally);
        Ok((records::read(format, wanted, file), format, warnings))
    }

    /// The same once more, of a [plain file](Self::is_plain_file).
    pub(crate) fn again(&self, format: Format) -> Result<impl Iterator<Item = Item> + use<>> {
        Ok(records::read(format, self.reading.wanted(self.about)?, self.text()?))
    }

    fn text(&self) -> Result<impl BufRead + use<>> {
        if self.is_standard_input() {
            return records::decompressed(BufReader::new(io::stdin())).with_context(|| self.shown());
        }
        let file = File::open(self.path).with_context(|| self.shown())?;
        records::decompressed(BufReader::new(file)).with_context(|| self.shown())
    }

    /// Standard input's records. Reading it blocks a thread, which ends with the process.
    pub(crate) async fn stream(&self) -> Result<(Stream, Warnings)> {
        let (tell_looks, looks) = oneshot::channel();
        let (tell_format, format) = oneshot::channel();
        let (sender, records) = mpsc::channel(1024);
        let (wanted, unsure) = (self.reading.wanted(self.about)?, self.reading.input.is_none());
        let tally = Arc::clone(&wanted.tally);
        std::thread::spawn(move || {
            let looked = records::decompressed(BufReader::new(io::stdin()));
            let input = match looked.and_then(|input| records::look(input, unsure, &wanted.places)) {
                Ok((looks, input)) => {
                    // The receiver is gone only if the tool is ending.
                    let _ = tell_looks.send(Ok(looks));
                    input
                }
                Err(error) => return drop(tell_looks.send(Err(error))),
            };
            let Ok(format) = format.blocking_recv() else { return };
            for item in records::read(format, wanted, input) {
                if sender.blocking_send(item).is_err() {
                    return;
                }
            }
        });
        let gone = |_| io::Error::other("its reader has ended");
        let looks = looks.await.map_err(gone).and_then(|looks| looks);
        let looks = looks.with_context(|| self.shown())?;
        let format = self.settled(&looks)?;
        // If the reader has ended, it has sent the reason.
        let _ = tell_format.send(format);
        let warnings = self.reading.warnings(&self.shown(), format, &looks, &tally);
        Ok((Stream { records, latest: 0 }, warnings))
    }

    /// The format to read: the one given, or the one detected.
    fn settled(&self, looks: &Looks) -> Result<Format> {
        let shown = self.shown();
        let format = match (self.reading.input, looks.format, &looks.begins) {
            (Some(given), ..) => given,
            (None, Some(format), _) => {
                messages::note(format!("{shown} looks like {}: read as --input {format}", what(format)));
                format
            }
            (None, None, None) => Format::Jsonl,
            (None, None, Some(begins)) => bail!("{shown}: {}", unknown(looks.places.as_deref(), begins)),
        };
        let has_fields = self.reading.fields.is_some();
        let is_access_log = format.is_access_log() || (format == Format::Csv && self.reading.places().have_time());
        let asked = match (self.by.is_some(), has_fields, self.reading.client_address.is_some()) {
            (true, ..) => "--key",
            (_, true, _) => "--fields",
            (.., true) => "--client-address",
            _ => return Ok(format),
        };
        if !is_access_log {
            bail!("{shown}: expected an access log with {asked}, got {}, which has keys of its own", what(format));
        }
        Ok(format)
    }

    pub(crate) fn shown(&self) -> String {
        if self.is_standard_input() { "standard input".to_owned() } else { self.path.display().to_string() }
    }
}

fn what(format: Format) -> &'static str {
    match format {
        Format::Jsonl => "JSON lines",
        Format::Csv => "CSV",
        Format::Combined | Format::AccessJson | Format::Haproxy | Format::W3c | Format::Text => "an access log",
    }
}

/// How to read what has no known format.
fn unknown(places: Option<&str>, begins: &str) -> String {
    let (how, why) = match places {
        Some(places) => (format!("--fields, such as --fields {places}"), ""),
        None => (
            "--fields time=FIELD,ip=FIELD,request=FIELD".to_owned(),
            ", and in which nothing looks like both a time and an address: every request needs its time",
        ),
    };
    format!("expected {how}, since it has no known format, got what begins with {begins}{why}")
}
