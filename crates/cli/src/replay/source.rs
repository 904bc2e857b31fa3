//! Where records come from, and in which format.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use clap::Args;
use tokio::sync::{mpsc, oneshot};

use super::log_options::{LogOptions, unknown};
use super::unreadable::Warnings;
use crate::messages;
use crate::records::{self, Format, Identity, KeyField, Looks, Record, Unreadable};

type Item = io::Result<Result<Record, Unreadable>>;

/// How records are read.
#[derive(Clone, Debug, Args)]
pub(crate) struct Reading {
    /// The records' format.
    ///
    /// Default: detected from the beginning of the file.
    #[arg(long, value_enum, help_heading = "Records")]
    input: Option<Format>,
    #[command(flatten)]
    log: LogOptions,
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
        let (looks, file) = records::look(file, unsure, &self.reading.log.places()).with_context(|| self.shown())?;
        let format = self.settled(&looks)?;
        let wanted = self.reading.log.wanted(self.about)?;
        let warnings = Warnings::new(&self.shown(), format, &looks, self.reading.strict).with(&wanted.tally);
        Ok((records::read(format, wanted, file), format, warnings))
    }

    /// The same once more, of a [plain file](Self::is_plain_file).
    pub(crate) fn again(&self, format: Format) -> Result<impl Iterator<Item = Item> + use<>> {
        Ok(records::read(format, self.reading.log.wanted(self.about)?, self.text()?))
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
        let (wanted, unsure) = (self.reading.log.wanted(self.about)?, self.reading.input.is_none());
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
        let warnings = Warnings::new(&self.shown(), format, &looks, self.reading.strict).with(&tally);
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
        self.reading.log.check(&shown, format, what(format), self.by.is_some())?;
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
