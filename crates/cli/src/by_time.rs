//! Records by time, with only those in memory that stand out of order, however many there are.

use std::collections::BTreeMap;

/// Records of which only the least time is kept, to learn how far they are out of order.
pub(crate) const BLOCK: u64 = 4096;

/// What has a time.
pub(crate) trait At {
    /// In microseconds since 1970.
    fn t_us(&self) -> u64;
}

/// From when on, after so many records, none follows that is earlier.
#[derive(Debug, Default)]
pub(crate) struct Horizon {
    /// The least time in each block of records; at the end, also in those after it.
    least: Vec<u64>,
    records: u64,
}

impl Horizon {
    /// Notes the next record's time.
    pub(crate) fn note(&mut self, t_us: u64) {
        if self.records.is_multiple_of(BLOCK) {
            self.least.push(t_us);
        }
        self.records += 1;
        if let Some(least) = self.least.last_mut() {
            *least = t_us.min(*least);
        }
    }

    /// Called after the last record.
    pub(crate) fn end(&mut self) {
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
pub(crate) struct Sorted<I, T> {
    horizon: Horizon,
    records: I,
    read: u64,
    /// Those of which an earlier one may follow, by time and place in the file.
    waiting: BTreeMap<(u64, u64), T>,
}

impl<I, T> Sorted<I, T> {
    /// The horizon has [ended](Horizon::end).
    pub(crate) fn new(horizon: Horizon, records: I) -> Self {
        Self { horizon, records, read: 0, waiting: BTreeMap::new() }
    }
}

impl<T: At, E, I: Iterator<Item = Result<T, E>>> Iterator for Sorted<I, T> {
    type Item = Result<T, E>;

    fn next(&mut self) -> Option<Result<T, E>> {
        loop {
            if let Some(first) = self.waiting.first_entry()
                && first.key().0 <= self.horizon.after(self.read)
            {
                return Some(Ok(first.remove()));
            }
            match self.records.next() {
                Some(Ok(record)) => {
                    self.waiting.insert((record.t_us(), self.read), record);
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
    use std::convert::Infallible;

    use super::*;
    use crate::records::{Format, Identity, KeyField, Record, read};

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
        let mut sorted = Sorted::new(horizon, records.into_iter().map(Ok::<_, Infallible>));
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
