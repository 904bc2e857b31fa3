//! Recorded traffic in two passes: the first reports what can't be read and learns how far records are out of order,
//! the second plays them in order, so that memory is bounded. Acquires of keys are kept in a few bytes each; records
//! with more are read again.

use std::collections::VecDeque;

use anyhow::{Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use tokio::sync::mpsc;
use tollgate::Operation;

use super::kept::Kept;
use super::source::{CHUNK, Event, Source, produced};
use super::unreadable::Warnings;
use crate::by_time::{BLOCK, Horizon, Sorted};
use crate::records::Record;

/// From this many records, a progress bar is worthwhile.
const LONG: u64 = 2000;

/// Records in the order in which they are played, read in a thread of their own.
pub(crate) struct Records(mpsc::Receiver<Vec<Result<Record>>>);

impl Records {
    #[cfg(test)]
    pub(super) fn of(records: Vec<Record>) -> Self {
        Self(produced(move || records.into_iter().map(Ok)))
    }

    /// The next records, at least one; `None` after the last. An error comes with the records before it.
    pub(crate) async fn next(&mut self) -> Option<(Vec<Record>, Result<()>)> {
        let chunk = self.0.recv().await?;
        let mut records = Vec::with_capacity(chunk.len());
        for item in chunk {
            match item {
                Ok(record) => records.push(record),
                Err(error) => return Some((records, Err(error))),
            }
        }
        Some((records, Ok(())))
    }
}

/// Records of the first pass.
pub(crate) struct Through {
    events: mpsc::Receiver<Vec<Event>>,
    pending: VecDeque<Event>,
    pub(crate) warnings: Warnings,
    pub(crate) unreadable: u64,
    name: String,
    /// `Some` once all was read.
    source: Option<Source>,
}

impl Through {
    /// For records played in the order in which they are read, each as soon as it arrives.
    pub(crate) fn as_they_come(source: Source) -> Self {
        Self::new(source, 1, false)
    }

    /// For records that are read only once.
    pub(crate) fn once(source: Source) -> Self {
        Self::new(source, CHUNK, false)
    }

    fn new(source: Source, chunk: usize, copied: bool) -> Self {
        let name = source.shown();
        let warnings = Warnings::new(&name, source.reading.strict);
        let (events, pending) = (source.through(chunk, copied), VecDeque::new());
        Self { events, pending, warnings, unreadable: 0, name, source: None }
    }

    /// The next record; none after the last. What can't be read is reported and counted.
    ///
    /// # Errors
    ///
    /// The rest can't be read, or continuing is pointless.
    pub(crate) async fn next(&mut self) -> Result<Option<Record>> {
        loop {
            let Some(event) = self.pending.pop_front() else {
                match self.events.recv().await {
                    Some(events) => self.pending.extend(events),
                    None if self.source.is_some() => return Ok(None),
                    None => bail!("{}: the thread that reads it has ended", self.name),
                }
                continue;
            };
            match event {
                Event::Record(record) => {
                    self.warnings.read();
                    return Ok(Some(record));
                }
                Event::Unreadable(unreadable) => {
                    self.unreadable += 1;
                    self.warnings.unreadable(unreadable)?;
                }
                Event::File(begun) => self.warnings.begin(*begun)?,
                Event::Broken(error) => return Err(self.warnings.broken(&error)),
                Event::Failed(why) => return Err(why),
                Event::End(source) => {
                    self.source = Some(*source);
                    self.warnings.end()?;
                }
            }
        }
    }

    /// Whether nothing more has arrived yet.
    pub(crate) fn is_drained(&self) -> bool {
        self.pending.is_empty() && self.events.is_empty()
    }
}

/// Traffic that was read once.
pub(crate) struct Recording {
    source: Option<Source>,
    /// All records, if they could be kept.
    kept: Option<Kept>,
    /// Set if the records have to be sorted by time.
    horizon: Option<Horizon>,
    pub(crate) warnings: Warnings,
    /// The numbers of records, of unreadable lines, and of records that are earlier than one before them.
    pub(crate) records: u64,
    pub(crate) unreadable: u64,
    pub(crate) out_of_order: u64,
    /// Whether all records are acquires without an id, and are played in the order of their times.
    pub(crate) is_plain: bool,
}

impl Recording {
    /// Makes the first pass.
    pub(crate) async fn read(source: Source, by_time: bool) -> Result<Self> {
        let mut through = Through::new(source, CHUNK, true);
        let (mut horizon, mut latest, spinner) = (Horizon::default(), 0, spinner());
        let (mut records, mut out_of_order, mut is_plain, mut kept) = (0, 0, true, Some(Kept::new()));
        loop {
            let record = match through.next().await {
                Ok(Some(record)) => record,
                Ok(None) => break,
                Err(error) => {
                    through.warnings.sum_up();
                    return Err(error);
                }
            };
            records += 1;
            out_of_order += u64::from(record.t_us < latest);
            latest = latest.max(record.t_us);
            horizon.note(record.t_us);
            is_plain &= record.op == Operation::Acquire && record.id.is_none();
            if let Some(all) = &mut kept
                && !all.push(&record)?
            {
                kept = None;
            }
            if (records + through.unreadable).is_multiple_of(BLOCK) {
                spinner.set_position(records);
            }
        }
        spinner.finish_and_clear();
        horizon.end();
        let Through { warnings, unreadable, source, .. } = through;
        let horizon = (by_time && out_of_order > 0).then_some(horizon);
        let is_plain = is_plain && (horizon.is_some() || out_of_order == 0);
        Ok(Self { source, kept, horizon, warnings, records, unreadable, out_of_order, is_plain })
    }

    /// The records of the first pass, in order. It has reported what is unreadable; its warnings go on with what can't
    /// be played.
    pub(crate) fn in_order(self) -> (Records, Warnings) {
        let Self { source, kept, horizon, warnings, .. } = self;
        let records = produced(move || -> Box<dyn Iterator<Item = Result<Record>>> {
            if let Some(kept) = kept {
                return match kept.records(horizon) {
                    Ok(records) => Box::new(records),
                    Err(error) => Box::new(std::iter::once(Err(error))),
                };
            }
            let again = source.into_iter().flat_map(Source::again);
            match horizon {
                Some(horizon) => Box::new(Sorted::new(horizon, again)),
                None => Box::new(again),
            }
        });
        (Records(records), warnings)
    }
}

/// A progress bar on standard error, if there are enough records.
pub(crate) fn progress(records: u64) -> ProgressBar {
    if records < LONG {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{wide_bar} {human_pos} of {human_len} records, {eta} left");
    ProgressBar::new(records).with_style(style.expect("a well-formed template"))
}

/// Shows that records are being read, before any is played.
fn spinner() -> ProgressBar {
    let style = ProgressStyle::with_template("{spinner} {human_pos} records read, to be played once all are read");
    ProgressBar::new_spinner().with_style(style.expect("a well-formed template"))
}
