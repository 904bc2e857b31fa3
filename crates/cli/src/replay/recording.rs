//! A file of records, read twice: first to report what can't be read and to learn how far the records are out of order,
//! then to play them in order. So only as many are in memory as stand out of order, however long the file is.

use std::collections::BTreeMap;
use std::io;

use anyhow::{Result, anyhow};
use indicatif::{ProgressBar, ProgressStyle};

use super::source::Source;
use super::unreadable::Warnings;
use crate::records::{Format, Record, Unreadable};

/// Records of which only the least time is kept, to learn how far they are out of order.
const BLOCK: u64 = 4096;

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
            Ok::<_, anyhow::Error>(records.take(usize::try_from(count).unwrap_or(usize::MAX)))
        };
        let records: Records<'s> = match order {
            Order::AsItStands => Box::new(again()?),
            Order::ByTime(horizon) => {
                Box::new(Sorted { horizon, records: again()?, read: 0, waiting: BTreeMap::new() })
            }
            Order::Kept(records) => Box::new(records.into_iter().map(Ok)),
        };
        Ok((records, warnings))
    }
}

/// Shows that a long file is being read.
fn spinner() -> ProgressBar {
    let style = ProgressStyle::with_template("{spinner} {human_pos} records read");
    ProgressBar::new_spinner().with_style(style.expect("a well-formed template"))
}

/// From when on, after so many records, none follows that is earlier.
#[derive(Debug, Default)]
struct Horizon {
    /// The least time in each block of records; at the end, also in those after it.
    least: Vec<u64>,
    records: u64,
}

impl Horizon {
    /// Notes the next record's time.
    fn note(&mut self, t_us: u64) {
        if self.records.is_multiple_of(BLOCK) {
            self.least.push(t_us);
        }
        self.records += 1;
        if let Some(least) = self.least.last_mut() {
            *least = t_us.min(*least);
        }
    }

    /// Called after the last record.
    fn end(&mut self) {
        let mut after = u64::MAX;
        for least in self.least.iter_mut().rev() {
            after = after.min(*least);
            *least = after;
        }
    }

    /// None of the records after the first so many is earlier than this.
    fn after(&self, records: u64) -> u64 {
        if records >= self.records {
            return u64::MAX;
        }
        let block = usize::try_from(records / BLOCK).ok();
        block.and_then(|block| self.least.get(block).copied()).unwrap_or(u64::MAX)
    }
}

/// Records by time; those of one time in the order of the file.
struct Sorted<I> {
    horizon: Horizon,
    records: I,
    read: u64,
    /// Those of which an earlier one may follow, by time and place in the file.
    waiting: BTreeMap<(u64, u64), Record>,
}

impl<I: Iterator<Item = Result<Record>>> Iterator for Sorted<I> {
    type Item = Result<Record>;

    fn next(&mut self) -> Option<Result<Record>> {
        loop {
            if let Some(first) = self.waiting.first_entry()
                && first.key().0 <= self.horizon.after(self.read)
            {
                return Some(Ok(first.remove()));
            }
            match self.records.next() {
                Some(Ok(record)) => {
                    self.waiting.insert((record.t_us, self.read), record);
                    self.read += 1;
                }
                Some(Err(error)) => return Some(Err(error)),
                // The file has become shorter since.
                None => return self.waiting.pop_first().map(|(_, record)| Ok(record)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::records::{Identity, KeyField, read};

    fn records(times: &[u64]) -> Vec<Record> {
        let lines: String = times.iter().map(|t_us| format!("{{\"t_us\":{t_us},\"key\":\"a\"}}\n")).collect();
        let records = read(Format::Jsonl, Identity::Key(KeyField::Ip), lines.as_bytes());
        records.map(|record| record.unwrap().unwrap()).collect()
    }

    /// What is played, and the most records that were in memory.
    fn played(records: Vec<Record>) -> (Vec<Record>, usize) {
        let mut horizon = Horizon::default();
        records.iter().for_each(|record| horizon.note(record.t_us));
        horizon.end();
        let mut sorted = Sorted { horizon, records: records.into_iter().map(Ok), read: 0, waiting: BTreeMap::new() };
        let (mut played, mut most) = (Vec::new(), 0);
        while let Some(record) = sorted.next() {
            played.push(record.unwrap());
            most = most.max(sorted.waiting.len());
        }
        (played, most)
    }

    #[test]
    fn records_are_played_as_if_all_of_them_had_been_sorted() {
        let mut random = fastrand::Rng::with_seed(7);
        for spread in [1, 100, 10_000, 1 << 40] {
            for count in [0, 1, 4_095, 4_096, 4_097, 20_000] {
                let times: Vec<_> = (0..count).map(|at| at * 3 + random.u64(0..spread)).collect();
                let mut expected = records(&times);
                let (played, _) = played(expected.clone());
                expected.sort_by_key(|record| record.t_us);
                assert!(played == expected, "{count} records, spread over {spread}");
            }
        }
    }

    #[test]
    fn only_as_many_are_in_memory_as_stand_out_of_order() {
        let block = usize::try_from(BLOCK).unwrap();
        let in_order: Vec<_> = (0..100_000).collect();
        assert!(played(records(&in_order)).1 <= block);
        // Each by up to 500 records.
        let mut random = fastrand::Rng::with_seed(8);
        let nearly: Vec<_> = in_order.iter().map(|at| at + random.u64(0..500)).collect();
        assert!(played(records(&nearly)).1 <= block + 500);
        // Two logs, one after the other.
        let two = [&in_order[..50_000], &in_order[..50_000]].concat();
        assert!((50_000..50_000 + 2 * block).contains(&played(records(&two)).1));
    }
}
