//! Where records come from, and in which format.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::Path;

use anyhow::{Context, Result, bail};
use tokio::sync::{mpsc, oneshot};

use super::unreadable::Warnings;
use crate::messages;
use crate::records::{self, Format, Identity, Looks, Record, Unreadable};

type Item = io::Result<Result<Record, Unreadable>>;
pub(crate) type Records = mpsc::Receiver<Item>;

/// A file, or standard input.
pub(crate) struct Source<'a> {
    pub(crate) path: &'a Path,
    /// `None`: detected.
    pub(crate) format: Option<Format>,
    pub(crate) about: Identity,
    pub(crate) strict: bool,
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
        let (looks, file) = records::look(file, self.format.is_none()).with_context(|| self.shown())?;
        let format = self.settled(&looks)?;
        let warnings = Warnings::new(&self.shown(), format, &looks, self.strict);
        Ok((records::read(format, self.about, file), format, warnings))
    }

    /// The same once more, of a [plain file](Self::is_plain_file).
    pub(crate) fn again(&self, format: Format) -> Result<impl Iterator<Item = Item> + use<>> {
        Ok(records::read(format, self.about, self.text()?))
    }

    fn text(&self) -> Result<impl BufRead + use<>> {
        if self.is_standard_input() {
            return records::decompressed(BufReader::new(io::stdin())).with_context(|| self.shown());
        }
        let file = File::open(self.path).with_context(|| self.shown())?;
        records::decompressed(BufReader::new(file)).with_context(|| self.shown())
    }

    /// Standard input's records. Reading it blocks a thread, which ends with the process.
    pub(crate) async fn stream(&self) -> Result<(Records, Warnings)> {
        let (tell_looks, looks) = oneshot::channel();
        let (tell_format, format) = oneshot::channel();
        let (sender, records) = mpsc::channel(1024);
        let (about, unsure) = (self.about, self.format.is_none());
        std::thread::spawn(move || {
            let looked = records::decompressed(BufReader::new(io::stdin()));
            let input = match looked.and_then(|input| records::look(input, unsure)) {
                Ok((looks, input)) => {
                    // The receiver is gone only if the tool is ending.
                    let _ = tell_looks.send(Ok(looks));
                    input
                }
                Err(error) => return drop(tell_looks.send(Err(error))),
            };
            let Ok(format) = format.blocking_recv() else { return };
            for item in records::read(format, about, input) {
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
        Ok((records, Warnings::new(&self.shown(), format, &looks, self.strict)))
    }

    /// The format to read: the one given, or the one detected.
    fn settled(&self, looks: &Looks) -> Result<Format> {
        let shown = self.shown();
        match (self.format, looks.format, &looks.begins) {
            (Some(given), ..) => Ok(given),
            (None, Some(format), _) => {
                let what = match format {
                    Format::Jsonl => "JSON lines",
                    Format::Csv => "CSV",
                    Format::Combined | Format::AccessJson => "an access log",
                };
                messages::note(format!("{shown} looks like {what}: read as --input {format}"));
                Ok(format)
            }
            (None, None, None) => Ok(Format::Jsonl),
            (None, None, Some(begins)) => {
                let why = "expected --input jsonl, csv, combined or access-json, since it looks like none of them";
                bail!("{shown}: {why}, got what begins with {begins}")
            }
        }
    }

    pub(crate) fn shown(&self) -> String {
        if self.is_standard_input() { "standard input".to_owned() } else { self.path.display().to_string() }
    }
}
