//! Sorts records by time. Only those out of order are kept in memory, up to a bound; more wait in a temporary file.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, Read, Seek, SeekFrom, Write};

use anyhow::{Context, Result};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Records in a block, of which only the earliest time is kept, to learn how far records are out of order.
pub(crate) const BLOCK: u64 = 4096;

/// Anything with a time.
pub(crate) trait At {
    /// In microseconds since 1970.
    fn t_us(&self) -> u64;
}

/// The earliest time that can still follow after a given number of records.
#[derive(Debug, Default)]
pub(crate) struct Horizon {
    /// The earliest time in each block of records; after the end, in the block and all that follow.
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

    /// The earliest time among the records after the first `records`.
    fn after(&self, records: u64) -> u64 {
        if records >= self.records {
            return u64::MAX;
        }
        let block = usize::try_from(records / BLOCK).ok();
        block.and_then(|block| self.least.get(block).copied()).unwrap_or(u64::MAX)
    }
}

/// Records by time; records of the same time keep their order.
pub(crate) struct Sorted<I, T> {
    horizon: Horizon,
    records: I,
    read: u64,
    /// The last block read, in order of time and place: most of it is usually next.
    block: VecDeque<(Place, T)>,
    /// Records before that block that an earlier record may still precede, by time and place.
    waiting: BTreeMap<Place, T>,
    /// The most that wait in memory.
    most: usize,
    runs: Option<Runs<T>>,
}

/// A record's time, and how many were read before it.
type Place = (u64, u64);

/// More than this many waiting records go to a temporary file.
const MOST: usize = 1 << 18;

impl<I, T> Sorted<I, T> {
    /// The horizon has [ended](Horizon::end).
    pub(crate) fn new(horizon: Horizon, records: I) -> Self {
        let (block, waiting) = (VecDeque::new(), BTreeMap::new());
        Self { horizon, records, read: 0, block, waiting, most: MOST, runs: None }
    }
}

impl<T: At + Serialize + DeserializeOwned, I: Iterator<Item = Result<T>>> Sorted<I, T> {
    fn step(&mut self) -> Result<Option<T>> {
        loop {
            let in_block = self.block.front().map(|(place, _)| *place);
            let waiting = self.waiting.first_key_value().map(|(place, _)| *place);
            let spilled = self.runs.as_ref().and_then(Runs::first);
            let first = in_block.into_iter().chain(waiting).chain(spilled).min();
            if first.is_some_and(|(t_us, _)| t_us <= self.horizon.after(self.read)) {
                return match &mut self.runs {
                    _ if first == in_block => Ok(self.block.pop_front().map(|(_, record)| record)),
                    Some(runs) if first == spilled => runs.take(),
                    _ => Ok(self.waiting.pop_first().map(|(_, record)| record)),
                };
            }
            if self.read >= self.horizon.records {
                return Ok(None);
            }
            self.put_aside()?;
            self.read_block()?;
        }
    }

    /// Moves the rest of the block to the waiting records.
    fn put_aside(&mut self) -> Result<()> {
        for (place, record) in self.block.drain(..) {
            if self.waiting.len() >= self.most {
                let runs = match &mut self.runs {
                    Some(runs) => runs,
                    runs => runs.insert(Runs::new()?),
                };
                runs.spill(std::mem::take(&mut self.waiting))?;
            }
            self.waiting.insert(place, record);
        }
        Ok(())
    }

    /// Reads one block, the resolution of the horizon.
    fn read_block(&mut self) -> Result<()> {
        let end = self.read + BLOCK;
        while self.read < end {
            let Some(record) = self.records.next().transpose()? else {
                // The file may have been truncated since the first pass.
                self.read = self.read.max(self.horizon.records);
                break;
            };
            self.block.push_back(((record.t_us(), self.read), record));
            self.read += 1;
        }
        self.block.make_contiguous().sort_by_key(|(place, _)| *place);
        Ok(())
    }
}

impl<T: At + Serialize + DeserializeOwned, I: Iterator<Item = Result<T>>> Iterator for Sorted<I, T> {
    type Item = Result<T>;

    fn next(&mut self) -> Option<Result<T>> {
        self.step().transpose()
    }
}

/// Sorted runs of records in a temporary file, which the system removes when the process ends.
struct Runs<T> {
    file: File,
    end: u64,
    runs: Vec<Run<T>>,
    /// The first remaining record of each run.
    heads: BinaryHeap<Reverse<(Place, usize)>>,
}

/// A part of the file.
struct Run<T> {
    next: u64,
    end: u64,
    /// Its next records.
    block: VecDeque<(u64, T)>,
}

/// How many records of a run are read at a time.
const READ: usize = 128;

impl<T: At + Serialize + DeserializeOwned> Runs<T> {
    fn new() -> Result<Self> {
        let file = tempfile::tempfile().with_context(told)?;
        Ok(Self { file, end: 0, runs: Vec::new(), heads: BinaryHeap::new() })
    }

    fn spill(&mut self, records: BTreeMap<Place, T>) -> Result<()> {
        let from = self.file.seek(SeekFrom::Start(self.end)).with_context(told)?;
        let mut out = BufWriter::with_capacity(1 << 18, &mut self.file);
        for ((_, place), record) in records {
            serde_json::to_writer(&mut out, &(place, record)).with_context(told)?;
            out.write_all(b"\n").with_context(told)?;
        }
        out.flush().with_context(told)?;
        drop(out);
        self.end = self.file.stream_position().with_context(told)?;
        self.runs.push(Run { next: from, end: self.end, block: VecDeque::new() });
        self.refill(self.runs.len() - 1)
    }

    fn first(&self) -> Option<Place> {
        self.heads.peek().map(|Reverse((place, _))| *place)
    }

    fn take(&mut self) -> Result<Option<T>> {
        let Some(Reverse((_, at))) = self.heads.pop() else { return Ok(None) };
        let taken = self.runs[at].block.pop_front();
        self.refill(at)?;
        Ok(taken.map(|(_, record)| record))
    }

    /// Notes the run's first record.
    fn refill(&mut self, at: usize) -> Result<()> {
        let run = &mut self.runs[at];
        if run.block.is_empty() && run.next < run.end {
            self.file.seek(SeekFrom::Start(run.next)).with_context(told)?;
            let mut lines = BufReader::new((&mut self.file).take(run.end - run.next));
            let mut line = Vec::new();
            while run.block.len() < READ && lines.read_until(b'\n', &mut line).with_context(told)? > 0 {
                run.block.push_back(serde_json::from_slice(&line).with_context(told)?);
                run.next += line.len() as u64;
                line.clear();
            }
        }
        if let Some((place, record)) = run.block.front() {
            self.heads.push(Reverse(((record.t_us(), *place), at)));
        }
        Ok(())
    }
}

/// The name of such a file in messages.
fn told() -> String {
    format!("a temporary file in {}", std::env::temp_dir().display())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::records::{Format, Identity, KeyField, Record, read};

    fn records(times: &[u64]) -> Vec<Record> {
        let lines: String = times.iter().map(|t_us| format!("{{\"t_us\":{t_us},\"key\":\"a\"}}\n")).collect();
        let records = read(Format::Jsonl, Identity::Key(KeyField::Ip), lines.as_bytes());
        records.map(|record| record.unwrap().unwrap()).collect()
    }

    /// What is played, and the most records that were in memory.
    fn played(records: Vec<Record>, at_most: usize) -> (Vec<Record>, usize) {
        let mut horizon = Horizon::default();
        records.iter().for_each(|record| horizon.note(record.t_us));
        horizon.end();
        let mut sorted = Sorted::new(horizon, records.into_iter().map(Ok));
        sorted.most = at_most;
        let (mut played, mut most) = (Vec::new(), 0);
        while let Some(record) = sorted.next() {
            played.push(record.unwrap());
            most = most.max(sorted.waiting.len() + sorted.block.len());
        }
        (played, most)
    }

    #[test]
    fn records_are_played_as_if_all_of_them_had_been_sorted() {
        let block = usize::try_from(BLOCK).unwrap();
        let mut random = fastrand::Rng::with_seed(7);
        for spread in [1, 100, 10_000, 1 << 40] {
            for count in [0, 1, 4_095, 4_096, 4_097, 20_000] {
                let times: Vec<_> = (0..count).map(|at| at * 3 + random.u64(0..spread)).collect();
                let mut expected = records(&times);
                let given = expected.clone();
                expected.sort_by_key(|record| record.t_us);
                for at_most in [MOST, 1_000] {
                    let (played, most) = played(given.clone(), at_most);
                    assert!(played == expected, "{count} records, spread over {spread}, {at_most} in memory");
                    assert!(most <= at_most + block, "{most}");
                }
            }
        }
    }

    #[test]
    fn only_as_many_are_in_memory_as_stand_out_of_order() {
        let block = usize::try_from(BLOCK).unwrap();
        let in_order: Vec<_> = (0..100_000).collect();
        assert!(played(records(&in_order), MOST).1 <= block);
        // Each by up to 500 records.
        let mut random = fastrand::Rng::with_seed(8);
        let nearly: Vec<_> = in_order.iter().map(|at| at + random.u64(0..500)).collect();
        assert!(played(records(&nearly), MOST).1 <= block + 500);
        // Two logs, one after the other.
        let two = [&in_order[..50_000], &in_order[..50_000]].concat();
        assert!((50_000..50_000 + 2 * block).contains(&played(records(&two), MOST).1));
        assert!(played(records(&two), 10_000).1 <= 10_000 + block);
    }
}
