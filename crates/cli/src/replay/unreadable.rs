//! Reports lines that can't be read: each, up to a bound, or that nothing could be read at all.

use std::sync::Arc;

use anyhow::{Result, anyhow, bail};

use crate::messages;
use crate::output::counted;
use crate::records::{Format, Looks, Tally, Unreadable};

/// After this many unreadable lines at the start, and none readable, the input is taken to be in another format.
const MISUSED: usize = 10;
/// The most unreadable lines reported one by one; further ones are only counted.
const TOLD: u64 = 20;

/// Warns of lines that can't be read.
#[derive(Debug)]
pub(crate) struct Warnings {
    /// The name of the input.
    source: String,
    format: Format,
    looks: Option<Format>,
    /// Whether it is known to have this format.
    is_sure: bool,
    /// What to give as --fields, if that can be seen.
    places: Option<String>,
    tally: Arc<Tally>,
    strict: bool,
    /// Whether a line was read, so that the format is right.
    any_read: bool,
    /// Held back until a line was read.
    held: Vec<Unreadable>,
    met: u64,
}

impl Warnings {
    pub(crate) fn new(source: &str, format: Format, looks: &Looks, strict: bool) -> Self {
        let (source, places) = (source.to_owned(), looks.places.clone());
        let is_sure = looks.format == Some(format) || looks.begins.is_none();
        let looks = looks.format.filter(|looks| *looks != format);
        let (tally, held) = (Arc::default(), Vec::new());
        Self { source, format, looks, is_sure, places, tally, strict, any_read: false, held, met: 0 }
    }

    /// Says at the end what was noted here.
    pub(crate) fn with(self, tally: &Arc<Tally>) -> Self {
        Self { tally: Arc::clone(tally), ..self }
    }

    pub(crate) fn read(&mut self) {
        self.any_read = true;
        for unreadable in std::mem::take(&mut self.held) {
            self.tell(&unreadable);
        }
    }

    /// Reports an unreadable line and skips it, or ends if continuing is pointless.
    pub(crate) fn unreadable(&mut self, unreadable: Unreadable) -> Result<()> {
        if self.any_read && self.strict {
            bail!("{}: {unreadable}", self.source);
        }
        if self.any_read {
            self.tell(&unreadable);
            return Ok(());
        }
        self.held.push(unreadable);
        if self.strict || self.held.len() >= MISUSED { Err(self.nothing_read()) } else { Ok(()) }
    }

    /// Called after the last line.
    pub(crate) fn end(&self) -> Result<()> {
        if !self.held.is_empty() {
            return Err(self.nothing_read());
        }
        self.tally.say(&self.source, self.any_read);
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
        anyhow!("{}: {error}{hint}", self.source)
    }

    fn tell(&mut self, unreadable: &Unreadable) {
        self.met += 1;
        if self.met <= TOLD {
            messages::note(format!("{}: {unreadable}; skipped", self.source));
        }
    }

    fn nothing_read(&self) -> anyhow::Error {
        let Self { source, format, held, .. } = self;
        let which = match held.len() {
            1 => "its first line".to_owned(),
            count => format!("none of its first {count} lines"),
        };
        let verb = if held.len() == 1 { "can't" } else { "can" };
        let first = held.first().map(ToString::to_string).unwrap_or_default();
        anyhow!("{source}: {which} {verb} be read as {format}: {first}{}", self.hint())
    }

    fn hint(&self) -> String {
        match (self.looks, &self.places) {
            (Some(looks), _) => format!("; it looks like {looks}: give --input {looks}"),
            (None, Some(places)) => format!("; without --input, give --fields {places}"),
            (None, None) if self.is_sure => String::new(),
            (None, None) => "; without --input, its format is detected".to_owned(),
        }
    }
}
