//! A file of records, read twice: first to report what can't be read and to learn how far the records are out of order,
//! then to play them in order. So only as many are in memory as stand out of order, however long the file is.

use std::cell::Cell;
use std::io;
use std::rc::Rc;

use anyhow::{Result, anyhow};
use indicatif::{ProgressBar, ProgressStyle};

use super::source::Source;
use super::unreadable::Warnings;
use crate::by_time::{BLOCK, Horizon, Sorted};
use crate::records::{Format, Record, Unreadable};

/// From this many records, a progress bar is worthwhile.
const LONG: u64 = 2000;

/// Records in the order in which they are played.
pub(crate) type Records<'s> = Box<dyn Iterator<Item = Result<Record>> + 's>;

/// A file that was read once.
pub(crate) struct Recording<'s> {
    source: &'s Source<'s>,
    format: Format,
    order: Order,
    pub(crate) warnings: Warnings,
    /// How many records and unreadable lines it has, and how many records have an earlier time than one before.
    pub(crate) records: u64,
    pub(crate) unreadable: u64,
    pub(crate) out_of_order: u64,
}

enum Order {
    AsItStands,
    ByTime(Horizon),
    /// The records, in order: what isn't a plain file can be read only once.
    Kept(Vec<Record>),
}

impl<'s> Recording<'s> {
    /// Reads it through.
    pub(crate) async fn read(source: &'s Source<'s>, by_time: bool) -> Result<Self> {
        let (items, format, warnings) = source.open()?;
        let order = match (source.is_plain_file(), by_time) {
            (false, _) => Order::Kept(Vec::new()),
            (true, true) => Order::ByTime(Horizon::default()),
            (true, false) => Order::AsItStands,
        };
        let mut read = Self { source, format, order, warnings, records: 0, unreadable: 0, out_of_order: 0 };
        let read_through = read.read_through(items).await;
        if read_through.is_err() {
            read.warnings.sum_up();
        }
        read_through?;
        match &mut read.order {
            Order::ByTime(horizon) => horizon.end(),
            Order::Kept(records) if by_time => records.sort_by_key(|record| record.t_us),
            Order::Kept(_) | Order::AsItStands => {}
        }
        Ok(read)
    }

    async fn read_through(
        &mut self,
        items: impl Iterator<Item = io::Result<Result<Record, Unreadable>>>,
    ) -> Result<()> {
        let (mut latest, spinner) = (0, spinner());
        for item in items {
            match item.map_err(|error| self.warnings.broken(&error))? {
                Err(unreadable) => {
                    self.warnings.unreadable(unreadable)?;
                    self.unreadable += 1;
                }
                Ok(record) => {
                    self.warnings.read();
                    self.records += 1;
                    self.out_of_order += u64::from(record.t_us < latest);
                    latest = latest.max(record.t_us);
                    match &mut self.order {
                        Order::ByTime(horizon) => horizon.note(record.t_us),
                        Order::Kept(records) => records.push(record),
                        Order::AsItStands => {}
                    }
                }
            }
            if (self.records + self.unreadable).is_multiple_of(BLOCK) {
                spinner.set_position(self.records);
                // Signals arrive only while something waits.
                tokio::task::yield_now().await;
            }
        }
        spinner.finish_and_clear();
        self.warnings.end()
    }

    /// The records in order: those that were there when it was read through. What is unreadable was reported then, and
    /// the warnings go on with what can't be played.
    ///
    /// # Errors
    ///
    /// It can't be opened again or, as an item, read further.
    pub(crate) fn in_order(self) -> Result<(Records<'s>, Warnings)> {
        let Self { source, format, order, warnings, records: count, .. } = self;
        let again = || {
            let records = source.again(format)?.filter_map(|item| match item {
                Ok(record) => record.ok().map(Ok),
                Err(error) => Some(Err(anyhow!("{}: {error}", source.shown()))),
            });
            let read = Rc::new(Cell::new(0));
            let (so_far, shown) = (Rc::clone(&read), source.shown());
            let records = records.take(usize::try_from(count).unwrap_or(usize::MAX));
            let records = records.inspect(move |_| so_far.set(so_far.get() + 1));
            // As by a log rotation that copies the file and then cuts it.
            let cut_off = std::iter::once_with(move || {
                let why = format!("{shown}: expected the {count} records that were there before");
                (read.get() < count).then(|| Err(anyhow!("{why}, got {}: it was cut off meanwhile", read.get())))
            });
            Ok::<_, anyhow::Error>(records.chain(cut_off.flatten()))
        };
        let records: Records<'s> = match order {
            Order::AsItStands => Box::new(again()?),
            Order::ByTime(horizon) => Box::new(Sorted::new(horizon, again()?)),
            Order::Kept(records) => Box::new(records.into_iter().map(Ok)),
        };
        Ok((records, warnings))
    }
}

/// A bar on standard error while so many records are played.
pub(crate) fn progress(records: u64) -> ProgressBar {
    if records < LONG {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{wide_bar} {human_pos} of {human_len} records, {eta} left");
    ProgressBar::new(records).with_style(style.expect("a well-formed template"))
}

/// Shows that a long file is being read.
fn spinner() -> ProgressBar {
    let style = ProgressStyle::with_template("{spinner} {human_pos} records read");
    ProgressBar::new_spinner().with_style(style.expect("a well-formed template"))
}
