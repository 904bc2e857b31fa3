//! Where records come from, and in which format: one or several files, and standard input.

use std::cell::RefCell;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use tempfile::SpooledTempFile;
use tokio::sync::mpsc;

use super::log_options::{LogOptions, unknown};
use crate::messages;
use crate::records::{self, Format, Identity, KeyField, Looks, Record, Tally, Unreadable, Wanted};

/// How records are read.
#[derive(Clone, Debug, Args)]
pub(crate) struct Reading {
    /// The records' format.
    ///
    /// Default: detected from the beginning of each file.
    #[arg(long, value_enum, help_heading = "Records")]
    input: Option<Format>,
    #[command(flatten)]
    log: LogOptions,
    /// Stop at the first line that can't be read.
    #[arg(long, help_heading = "Records")]
    pub(super) strict: bool,
}

/// One or several files, one of which may be standard input. Their lines are numbered through, as if they were one.
#[derive(Debug)]
pub(crate) struct Source {
    inputs: Vec<Input>,
    pub(super) reading: Reading,
    about: Identity,
    /// The field to count by, if one was given; only an access log has fields.
    by: Option<KeyField>,
}

#[derive(Debug)]
struct Input {
    path: PathBuf,
    found: Option<Found>,
}

/// What the first pass found in a file.
#[derive(Debug)]
struct Found {
    format: Format,
    /// How many lines the files before it have.
    before: u64,
    records: u64,
    /// A compressed copy, unless it is a plain file, which can be read again.
    copy: Option<SpooledTempFile>,
}

/// A file that is about to be read.
#[derive(Debug)]
pub(super) struct Begun {
    pub(super) name: String,
    pub(super) format: Format,
    pub(super) looks: Looks,
    pub(super) before: u64,
    pub(super) tally: Arc<Tally>,
}

/// What a reading thread sends.
pub(super) enum Event {
    File(Box<Begun>),
    Record(Record),
    Unreadable(Unreadable),
    /// The file can't be read further.
    Broken(io::Error),
    Failed(anyhow::Error),
    End(Box<Source>),
}

/// Records in a chunk between threads, and how many chunks may wait.
pub(super) const CHUNK: usize = 512;
const AHEAD: usize = 8;
/// How much of a copy stays in memory, in bytes.
const IN_MEMORY: usize = 32 << 20;

impl Reading {
    /// The source of these paths, whose records are read for this.
    pub(crate) fn of(&self, paths: &[PathBuf], about: Identity) -> Result<Source> {
        if paths.iter().filter(|path| is_standard_input(path)).count() > 1 {
            bail!("- is given twice, but standard input can be read only once");
        }
        let inputs = paths.iter().map(|path| Input { path: path.clone(), found: None }).collect();
        Ok(Source { inputs, reading: self.clone(), about, by: None })
    }

    /// The same for records by key, which in an access log is this field, by default the client's address.
    pub(crate) fn by_key(&self, paths: &[PathBuf], by: Option<KeyField>) -> Result<Source> {
        Ok(Source { by, ..self.of(paths, Identity::Key(by.unwrap_or(KeyField::Ip)))? })
    }
}

fn is_standard_input(path: &Path) -> bool {
    path.as_os_str() == "-"
}

/// Sends items to another thread in chunks.
struct Chunks<T> {
    sender: mpsc::Sender<Vec<T>>,
    chunk: Vec<T>,
    size: usize,
}

/// The receiver of the items is gone.
struct Gone;

impl<T> Chunks<T> {
    fn push(&mut self, item: T) -> Result<(), Gone> {
        self.chunk.push(item);
        if self.chunk.len() < self.size { Ok(()) } else { self.flush() }
    }

    fn flush(&mut self) -> Result<(), Gone> {
        let chunk = std::mem::replace(&mut self.chunk, Vec::with_capacity(self.size));
        if chunk.is_empty() { Ok(()) } else { self.sender.blocking_send(chunk).map_err(|_| Gone) }
    }
}

/// What a new thread produces, in chunks of this size. The thread ends with the process, whatever it waits for.
fn in_thread<T: Send + 'static>(
    size: usize,
    work: impl FnOnce(&mut dyn FnMut(T) -> Result<(), Gone>) -> Result<(), Gone> + Send + 'static,
) -> mpsc::Receiver<Vec<T>> {
    // A chunk of one is for records that are followed live; otherwise the channel fills only if reading is much faster.
    let (sender, receiver) = mpsc::channel(if size == 1 { CHUNK } else { AHEAD });
    std::thread::spawn(move || {
        let mut chunks = Chunks { sender, chunk: Vec::with_capacity(size), size };
        if work(&mut |item| chunks.push(item)).is_ok() {
            // The receiver is gone only when the tool ends.
            let _ = chunks.flush();
        }
    });
    receiver
}

impl Source {
    /// Reads everything in a new thread. If it will be read [again](Self::again), anything but a plain file is copied.
    pub(super) fn through(mut self, chunk: usize, copied: bool) -> mpsc::Receiver<Vec<Event>> {
        in_thread(chunk, move |tell| {
            let mut before = 0;
            for at in 0..self.inputs.len() {
                match self.read(at, before, copied, tell)? {
                    Ok(lines) => before = lines,
                    Err(why) => return tell(Event::Failed(why)),
                }
            }
            tell(Event::End(Box::new(self)))
        })
    }

    /// Reads the file at this place, after so many lines of the files before it. Returns the number of its last line
    /// with a record or unreadable.
    fn read(
        &mut self,
        at: usize,
        before: u64,
        copied: bool,
        tell: &mut dyn FnMut(Event) -> Result<(), Gone>,
    ) -> Result<Result<u64>, Gone> {
        let path = self.inputs[at].path.clone();
        let name = shown(&path);
        let copied = copied && !is_plain_file(&path);
        let (text, copy) = match open(&path, copied).with_context(|| name.clone()) {
            Ok(opened) => opened,
            Err(why) => return Ok(Err(why)),
        };
        let (unsure, log) = (self.reading.input.is_none(), &self.reading.log);
        let looked = records::look(text, unsure, &log.places()).with_context(|| name.clone());
        let settled =
            looked.and_then(|(looks, text)| Ok((self.settled(&name, &looks)?, log.wanted(self.about)?, looks, text)));
        let (format, wanted, looks, text) = match settled {
            Ok(settled) => settled,
            Err(why) => return Ok(Err(why)),
        };
        let tally = Arc::clone(&wanted.tally);
        tell(Event::File(Box::new(Begun { name, format, looks, before, tally })))?;
        let (mut records, mut last) = (0, before);
        for item in records::read(format, wanted, text) {
            match item {
                Ok(Ok(mut record)) => {
                    record.line += before;
                    (records, last) = (records + 1, record.line);
                    tell(Event::Record(record))?;
                }
                Ok(Err(mut unreadable)) => {
                    unreadable.line += before;
                    last = unreadable.line;
                    tell(Event::Unreadable(unreadable))?;
                }
                Err(error) => {
                    tell(Event::Broken(error))?;
                    return Ok(Ok(last));
                }
            }
        }
        let copy = match copy.map(finished).transpose() {
            Ok(copy) => copy,
            Err(error) => return Ok(Err(error).context(told())),
        };
        self.inputs[at].found = Some(Found { format, before, records, copy });
        Ok(Ok(last))
    }

    /// All records again, as many as the [first pass](Self::through) read, which has reported what is unreadable.
    pub(super) fn again(self) -> impl Iterator<Item = Result<Record>> {
        let Self { inputs, reading, about, .. } = self;
        inputs.into_iter().flat_map(move |Input { path, found }| {
            let again = |found: Found| found.again(&path, reading.log.wanted(about)?);
            let items = found.map(|found| again(found).with_context(|| shown(&path)));
            let (items, failed) = match items.transpose() {
                Ok(items) => (items, None),
                Err(error) => (None, Some(Err(error))),
            };
            failed.into_iter().chain(items.into_iter().flatten())
        })
    }

    /// The format to read: the one given, or the one detected.
    fn settled(&self, shown: &str, looks: &Looks) -> Result<Format> {
        if let Some(what) = looks.foreign {
            bail!("{shown}: expected text, or text in gzip or zstd, got {what}");
        }
        let format = match (self.reading.input, looks.format, &looks.begins) {
            (Some(given), ..) => given,
            (None, Some(format), _) => {
                messages::note(format!("{shown} looks like {}: read as --input {format}", what(format)));
                format
            }
            (None, None, None) => Format::Jsonl,
            (None, None, Some(_)) if looks.otherwise.is_some() => {
                let got = looks.otherwise.as_deref().unwrap_or_default();
                bail!("{shown}: expected the lines of a log, got {got}, then pipe them in as -");
            }
            (None, None, Some(begins)) => bail!("{shown}: {}", unknown(looks.places.as_deref(), begins)),
        };
        self.reading.log.check(shown, format, what(format), self.by.is_some())?;
        Ok(format)
    }

    /// The name of the whole source in messages.
    pub(crate) fn shown(&self) -> String {
        match self.inputs.as_slice() {
            [one] => shown(&one.path),
            several => format!("{} files", several.len()),
        }
    }
}

impl Found {
    fn again(self, path: &Path, wanted: Wanted) -> Result<impl Iterator<Item = Result<Record>> + use<>> {
        let Self { format, before, records: count, copy } = self;
        let text = match copy {
            Some(copy) => records::decompressed(BufReader::new(copy)).and_then(records::decompressed)?,
            None => records::decompressed(BufReader::new(File::open(path)?))?,
        };
        let shown = shown(path);
        let mut items = records::read(format, wanted, text);
        let mut read = 0;
        Ok(std::iter::from_fn(move || {
            while read < count {
                match items.next() {
                    Some(Ok(Ok(mut record))) => {
                        read += 1;
                        record.line += before;
                        return Some(Ok(record));
                    }
                    Some(Ok(Err(_))) => {}
                    Some(Err(error)) => {
                        read = count;
                        return Some(Err(anyhow!("{shown}: {error}")));
                    }
                    // As by a log rotation that copies the file and then truncates it.
                    None => {
                        let got = std::mem::replace(&mut read, count);
                        let why = format!("only {got} of its {count} records are left");
                        return Some(Err(anyhow!("{shown}: {why}: it was truncated while it was read")));
                    }
                }
            }
            None
        }))
    }
}

/// The items of an iterator that runs in a new thread, in order, with those before an error sent before it.
pub(super) fn produced<I: Iterator<Item = Result<Record>>>(
    make: impl FnOnce() -> I + Send + 'static,
) -> mpsc::Receiver<Vec<Result<Record>>> {
    in_thread(CHUNK, move |tell| {
        for item in make() {
            let is_last = item.is_err();
            tell(item)?;
            if is_last {
                break;
            }
        }
        Ok(())
    })
}

/// A reader that keeps a compressed copy of what it reads.
struct Copying<R> {
    input: R,
    copy: Copy,
}

type Copy = Rc<RefCell<records::Copy<SpooledTempFile>>>;

impl<R: Read> Read for Copying<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.input.read(into)?;
        let written = self.copy.borrow_mut().write_all(&into[..read]);
        written.map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", told()))).map(|()| read)
    }
}

fn open(path: &Path, copied: bool) -> io::Result<(Box<dyn BufRead>, Option<Copy>)> {
    let input: Box<dyn Read> =
        if is_standard_input(path) { Box::new(io::stdin()) } else { Box::new(File::open(path)?) };
    if !copied {
        return Ok((records::decompressed(BufReader::new(input))?, None));
    }
    let copy = Rc::new(RefCell::new(records::copy(SpooledTempFile::new(IN_MEMORY))?));
    let input = Copying { input, copy: Rc::clone(&copy) };
    Ok((records::decompressed(BufReader::new(input))?, Some(copy)))
}

/// The finished copy, positioned at its beginning.
fn finished(copy: Copy) -> io::Result<SpooledTempFile> {
    let copy = Rc::into_inner(copy).ok_or_else(|| io::Error::other("it is still being written"))?;
    let mut copy = records::finished(copy.into_inner())?;
    copy.rewind()?;
    Ok(copy)
}

fn told() -> String {
    format!("a temporary file in {}", std::env::temp_dir().display())
}

/// Whether it can be read twice: a pipe can't.
fn is_plain_file(path: &Path) -> bool {
    !is_standard_input(path) && path.metadata().is_ok_and(|metadata| metadata.is_file())
}

fn shown(path: &Path) -> String {
    if is_standard_input(path) { "standard input".to_owned() } else { path.display().to_string() }
}

fn what(format: Format) -> &'static str {
    match format {
        Format::Jsonl => "JSON lines",
        Format::Csv => "CSV",
        Format::Combined | Format::AccessJson | Format::Haproxy | Format::W3c | Format::Text => "an access log",
    }
}
