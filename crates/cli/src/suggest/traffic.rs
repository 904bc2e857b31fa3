//! The recorded traffic: which requests are counted together, and by what.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use indicatif::ProgressBar;
use tollgate::Operation;

use super::counting::{Counting, Place, Present};
use super::spool::{Request, Spool};
use crate::by_time::{BLOCK, Horizon};
use crate::output::counted;
use crate::records::Record;
use crate::replay::{Source, Through};

/// The records of a file, by time.
#[derive(Debug)]
pub(super) struct Traffic {
    pub(super) spool: Spool,
    pub(super) keys: Vec<Key>,
    pub(super) groups: Vec<Group>,
    pub(super) read: Read,
}

/// What was read.
#[derive(Debug, Default)]
pub(super) struct Read {
    pub(super) is_access_log: bool,
    pub(super) records: u64,
    pub(super) unreadable: u64,
    pub(super) out_of_order: u64,
    /// Records that are in no group, by the reason.
    pub(super) left_out: BTreeMap<String, u64>,
}

/// A key in a group.
#[derive(Debug)]
pub(super) struct Key {
    /// The number of the group, and the key.
    bytes: Arc<[u8]>,
    pub(super) group: usize,
    pub(super) requests: u64,
    pub(super) units: u64,
}

/// Keys that share a limit.
#[derive(Debug)]
pub(super) struct Group {
    pub(super) place: Place,
    /// The present limit of its place.
    pub(super) present: Option<Present>,
    pub(super) requests: u64,
    pub(super) keys: u64,
    pub(super) from_us: u64,
    pub(super) to_us: u64,
}

impl Key {
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes[GROUP..]
    }
}

impl Group {
    /// From the first request to the last.
    pub(super) fn span_us(&self) -> u64 {
        self.to_us - self.from_us
    }
}

/// The bytes of a group's number before a key.
const GROUP: usize = 4;

impl Traffic {
    /// Reads the source to its end.
    pub(super) async fn read(source: Source, counting: &Counting, progress: &ProgressBar) -> Result<Self> {
        let shown = source.shown();
        let (mut through, mut reading) = (Through::once(source), Reading::default());
        let read_through = reading.read_through(&mut through, counting, progress).await;
        through.warnings.sum_up();
        read_through?;
        reading.read.is_access_log = through.warnings.are_of_access_logs();
        reading.end(&shown)
    }
}

#[cfg(test)]
impl Traffic {
    /// Traffic of requests with these times, keys and costs.
    pub(super) fn of(requests: &[(u64, &str, u64)]) -> Self {
        let mut reading = Reading::default();
        for (t_us, key, cost) in requests {
            // The order is unknown.
            reading.read.out_of_order = 1;
            reading.count(&Place::Anywhere, None, key.as_bytes(), *t_us, *cost).expect("counted");
        }
        reading.end("requests").expect("some")
    }
}

#[derive(Default)]
struct Reading {
    spool: Option<Spool>,
    horizon: Horizon,
    latest: u64,
    numbers: HashMap<Arc<[u8]>, u32>,
    places: HashMap<Place, usize>,
    keys: Vec<Key>,
    groups: Vec<Group>,
    /// A key with its group, to look up.
    scratch: Vec<u8>,
    read: Read,
}

impl Reading {
    async fn read_through(&mut self, through: &mut Through, counting: &Counting, progress: &ProgressBar) -> Result<()> {
        while let Some(record) = through.next().await? {
            self.note(&record, counting)?;
            if self.read.records.is_multiple_of(BLOCK) {
                progress.set_position(self.read.records + through.unreadable);
            }
        }
        self.read.unreadable = through.unreadable;
        Ok(())
    }

    fn note(&mut self, record: &Record, counting: &Counting) -> Result<()> {
        self.read.records += 1;
        self.read.out_of_order += u64::from(record.t_us < self.latest);
        self.latest = self.latest.max(record.t_us);
        let counted = match record.op {
            Operation::Acquire => counting
                .counted(record, |place, present, key, cost| self.count(place, present, key, record.t_us, cost))?,
            other => Err(format!("the operation {other}")),
        };
        if let Err(why) = counted {
            *self.read.left_out.entry(why).or_default() += 1;
        }
        Ok(())
    }

    /// Counts a request of a key in a group.
    fn count(&mut self, place: &Place, present: Option<Present>, key: &[u8], t_us: u64, cost: u64) -> Result<()> {
        let group = match self.places.get(place) {
            Some(group) => *group,
            None => {
                let (group, place) = (self.groups.len(), place.clone());
                self.places.insert(place.clone(), group);
                self.groups.push(Group { place, present, requests: 0, keys: 0, from_us: t_us, to_us: t_us });
                group
            }
        };
        let prefix = u32::try_from(group).context("too many groups")?;
        self.scratch.clear();
        self.scratch.extend_from_slice(&prefix.to_le_bytes());
        self.scratch.extend_from_slice(key);
        let number = match self.numbers.get(self.scratch.as_slice()) {
            Some(number) => *number,
            None => {
                let number = u32::try_from(self.keys.len()).context("more than 2^32 keys")?;
                let bytes: Arc<[u8]> = self.scratch.as_slice().into();
                self.numbers.insert(Arc::clone(&bytes), number);
                self.keys.push(Key { bytes, group, requests: 0, units: 0 });
                self.groups[group].keys += 1;
                number
            }
        };
        let (of_key, of_group) = (&mut self.keys[number as usize], &mut self.groups[group]);
        of_key.requests += 1;
        of_key.units = of_key.units.saturating_add(cost);
        of_group.requests += 1;
        of_group.from_us = of_group.from_us.min(t_us);
        of_group.to_us = of_group.to_us.max(t_us);
        self.horizon.note(t_us);
        self.spool.get_or_insert_with(Spool::new).push(&Request { t_us, key: number, cost })
    }

    fn end(self, source: &str) -> Result<Traffic> {
        let Self { spool, mut horizon, keys, groups, read, .. } = self;
        let Some(spool) = spool else {
            let why = read.left_out.iter().map(|(why, count)| format!("; {count} with {why}")).collect::<String>();
            let records = counted(read.records, "record");
            let has = match read.is_access_log && read.records > 0 {
                true => " (an access log's requests have ip, method, path and user)",
                false => "",
            };
            bail!("{source}: no requests to count in {records}{why}{has}");
        };
        horizon.end();
        let spool = if read.out_of_order > 0 { spool.by_time(horizon)? } else { spool };
        Ok(Traffic { spool, keys, groups, read })
    }
}
