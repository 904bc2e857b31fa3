//! Reports lines that can't be read: each, up to a bound, or that nothing could be read at all.

use std::sync::Arc;

use anyhow::{Result, anyhow, bail};

use super::source::Begun;
use crate::messages;
use crate::output::counted;
use crate::records::{Format, Tally, Unreadable};

/// After this many unreadable lines at the start, and none readable, the input is taken to be in another format.
const MISUSED: usize = 10;
/// The most unreadable lines reported one by one; further ones are only counted.
const TOLD: u64 = 20;

/// Warns of lines that can't be read. Files are read one after the other, and their lines are numbered as if they were
/// one file.
#[derive(Debug)]
pub(crate) struct Warnings {
    /// The name of the whole source.
    source: String,
    files: Vec<Named>,
    strict: bool,
    /// Whether a line of the last file was read, so that its format is right.
    any_read: bool,
    /// Lines held back until one is readable.
    held: Vec<Unreadable>,
    met: u64,
}

/// A file, and the number of lines before it.
#[derive(Debug)]
struct Named {
    name: String,
    before: u64,
    format: Format,
    looks: Option<Format>,
    /// Whether it is known to have this format.
    is_sure: bool,
    /// Whether the format is only a guess, for objects of an unknown kind.
    is_guessed: bool,
    /// A suggestion for --fields, if its lines allow one.
    places: Option<String>,
    /// What its reader counts and finds.
    tally: Arc<Tally>,
}

impl Warnings {
    pub(super) fn new(source: &str, strict: bool) -> Self {
        Self { source: source.to_owned(), files: Vec::new(), strict, any_read: false, held: Vec::new(), met: 0 }
    }

    /// Called before the first line of each file.
    pub(super) fn begin(&mut self, begun: Begun) -> Result<()> {
        self.end()?;
        let Begun { name, format, looks, before, tally } = begun;
        let is_sure = looks.format == Some(format) || looks.begins.is_none();
        let is_guessed = is_sure && looks.is_guessed;
        let (places, looks) = (looks.places, looks.format.filter(|looks| *looks != format));
        self.files.push(Named { name, before, format, looks, is_sure, is_guessed, places, tally });
        self.any_read = false;
        Ok(())
    }

    /// Whether all files are access logs.
    pub(crate) fn are_of_access_logs(&self) -> bool {
        self.files.iter().all(|file| file.format.is_access_log())
    }

    pub(crate) fn read(&mut self) {
        self.any_read = true;
        if !self.held.is_empty() {
            std::mem::take(&mut self.held).iter().for_each(|unreadable| self.tell(unreadable));
        }
    }

    /// Reports an unreadable line and skips it, or ends if continuing is pointless.
    pub(crate) fn unreadable(&mut self, unreadable: Unreadable) -> Result<()> {
        if self.any_read && self.strict {
            bail!("{}", self.placed(&unreadable));
        }
        if self.any_read {
            self.tell(&unreadable);
            return Ok(());
        }
        self.held.push(unreadable);
        if self.strict || self.held.len() >= MISUSED { Err(self.nothing_read()) } else { Ok(()) }
    }

    /// Called after the last line of each file.
    pub(super) fn end(&self) -> Result<()> {
        if !self.held.is_empty() {
            return Err(self.nothing_read());
        }
        if let Some(Named { name, tally, is_sure, .. }) = self.files.last() {
            tally.say(name, self.any_read || *is_sure);
        }
        Ok(())
    }

    /// Reports how many weren't printed.
    pub(crate) fn sum_up(&self) {
        if let more @ 1.. = self.met.saturating_sub(TOLD) {
            messages::note(format!("{}: {} more can't be read; skipped", self.source, counted(more, "line")));
        }
    }

    /// The error when the stream can't be read further.
    pub(crate) fn broken(&self, error: &std::io::Error) -> anyhow::Error {
        let hint = if error.kind() == std::io::ErrorKind::InvalidData { self.hint() } else { String::new() };
        let name = self.files.last().map_or(&self.source, |file| &file.name);
        anyhow!("{name}: {error}{hint}")
    }

    fn tell(&mut self, unreadable: &Unreadable) {
        self.met += 1;
        if self.met <= TOLD {
            messages::note(format!("{}; skipped", self.placed(unreadable)));
        }
    }

    /// The unreadable line with its file, and its number in that file.
    fn placed(&self, unreadable: &Unreadable) -> String {
        match self.files.iter().rev().find(|file| file.before < unreadable.line) {
            Some(Named { name, before, .. }) => {
                let (line, reason) = (unreadable.line - before, unreadable.reason.clone());
                format!("{name}: {}", Unreadable { line, reason })
            }
            None => format!("{}: {unreadable}", self.source),
        }
    }

    fn nothing_read(&self) -> anyhow::Error {
        let Self { files, held, .. } = self;
        let which = match held.len() {
            1 => "its first line".to_owned(),
            count => format!("none of its first {count} lines"),
        };
        let verb = if held.len() == 1 { "can't" } else { "can" };
        let (Some(Named { name, before, format, .. }), Some(Unreadable { line, reason })) =
            (files.last(), held.first())
        else {
            return anyhow!("{}: {which} {verb} be read", self.source);
        };
        let first = Unreadable { line: line.saturating_sub(*before), reason: reason.clone() };
        anyhow!("{name}: {which} {verb} be read as {format}: {first}{}", self.hint())
    }

    fn hint(&self) -> String {
        match self.files.last() {
            Some(Named { looks: Some(looks), .. }) => format!("; it looks like {looks}: give --input {looks}"),
            Some(Named { places: Some(places), .. }) => format!("; without --input, give --fields {places}"),
            Some(Named { is_guessed: true, .. }) => {
                "; if it is another program's log, name its fields with --fields".to_owned()
            }
            Some(Named { is_sure: false, .. }) => "; leave out --input to have its format detected".to_owned(),
            Some(_) | None => String::new(),
        }
    }
}
