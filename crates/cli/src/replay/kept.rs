//! Keeps records between the two passes, if all are acquires of a key, so that lines are read only once.

use std::collections::HashMap;
use std::sync::Arc;

use anyhow::Result;
use serde::{Deserialize, Serialize};
use tollgate::Operation;

use crate::by_time::{At, Horizon, Sorted};
use crate::records::{Permits, Record};
use crate::spool::{Packed, Spool};

/// The bytes of a record.
const EACH: usize = 36;

/// An acquire of a key, which is stored by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Acquire {
    t_us: u64,
    line: u64,
    cost: Option<u64>,
    permits: Permits,
    key: u32,
}

/// Records in the order in which they were read, as long as all are plain acquires of a key.
pub(super) struct Kept {
    spool: Spool<Acquire, EACH>,
    keys: Vec<Arc<[u8]>>,
    numbers: HashMap<Arc<[u8]>, u32>,
}

impl Kept {
    pub(super) fn new() -> Self {
        Self { spool: Spool::new(), keys: Vec::new(), numbers: HashMap::new() }
    }

    /// Keeps this record too; `false` if it has more than can be kept.
    pub(super) fn push(&mut self, record: &Record) -> Result<bool> {
        let Record { line, t_us, op, ref key, cost, ref id, length, permits, ref attributes, .. } = *record;
        if op != Operation::Acquire || id.is_some() || length.is_some() || !attributes.is_empty() {
            return Ok(false);
        }
        let number = match self.numbers.get(key.as_slice()) {
            Some(number) => *number,
            None => {
                let Ok(number) = u32::try_from(self.keys.len()) else { return Ok(false) };
                let key: Arc<[u8]> = key.as_slice().into();
                self.keys.push(Arc::clone(&key));
                self.numbers.insert(key, number);
                number
            }
        };
        self.spool.push(&Acquire { t_us, line, cost, permits, key: number }).map(|()| true)
    }

    /// All records again; sorted by time, if there is a horizon.
    pub(super) fn records(self, horizon: Option<Horizon>) -> Result<impl Iterator<Item = Result<Record>>> {
        let Self { spool, keys, .. } = self;
        let requests = spool.into_requests()?;
        let (sorted, as_they_stand) = match horizon {
            Some(horizon) => (Some(Sorted::new(horizon, requests)), None),
            None => (None, Some(requests)),
        };
        let kept = sorted.into_iter().flatten().chain(as_they_stand.into_iter().flatten());
        Ok(kept.map(move |kept| {
            let Acquire { t_us, line, cost, permits, key } = kept?;
            let (op, key) = (Operation::Acquire, keys[key as usize].to_vec());
            let (id, length, status, attributes) = (None, None, None, Vec::new());
            Ok(Record { line, t_us, op, key, cost, id, length, permits, status, attributes })
        }))
    }
}

impl At for Acquire {
    fn t_us(&self) -> u64 {
        self.t_us
    }
}

/// Stands for no cost: more than any valid one.
const NO_COST: u64 = u64::MAX;
/// Stands for permits that records give back: later than any valid time.
const BY_RECORDS: u64 = u64::MAX;
const UNKNOWN: u64 = u64::MAX - 1;

impl Packed<EACH> for Acquire {
    fn pack(&self) -> [u8; EACH] {
        let permits = match self.permits {
            Permits::ByRecords => BY_RECORDS,
            Permits::Unknown => UNKNOWN,
            Permits::Until(t_us) => t_us,
        };
        let numbers = [self.t_us, self.line, self.cost.unwrap_or(NO_COST), permits];
        let mut bytes = [0; EACH];
        let (whole, rest) = bytes.as_chunks_mut::<8>();
        whole.iter_mut().zip(numbers).for_each(|(bytes, number)| *bytes = number.to_le_bytes());
        rest.copy_from_slice(&self.key.to_le_bytes());
        bytes
    }

    fn unpack(bytes: &[u8; EACH]) -> Self {
        let (whole, rest) = bytes.as_chunks::<8>();
        let number = |at: usize| u64::from_le_bytes(whole[at]);
        let permits = match number(3) {
            BY_RECORDS => Permits::ByRecords,
            UNKNOWN => Permits::Unknown,
            t_us => Permits::Until(t_us),
        };
        let key = u32::from_le_bytes(*rest.first_chunk().expect("four bytes are left"));
        let cost = Some(number(2)).filter(|cost| *cost != NO_COST);
        Self { t_us: number(0), line: number(1), cost, permits, key }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_come_back_as_they_were_read_and_those_that_say_more_are_not_kept() {
        let mut random = fastrand::Rng::with_seed(3);
        let (mut kept, mut pushed) = (Kept::new(), Vec::new());
        for line in 1..10_000 {
            let record = Record {
                line,
                t_us: random.u64(..=1 << 52),
                op: Operation::Acquire,
                key: format!("key {}", random.u8(..)).into_bytes(),
                cost: [None, Some(0), Some((1 << 53) - 1)][random.usize(..3)],
                id: None,
                length: None,
                permits: [Permits::ByRecords, Permits::Unknown, Permits::Until(random.u64(..=1 << 52))]
                    [random.usize(..3)],
                status: None,
                attributes: Vec::new(),
            };
            assert!(kept.push(&record).unwrap());
            pushed.push(record);
        }
        for more in [
            Record { op: Operation::Refund, ..pushed[0].clone() },
            Record { id: Some(b"a".to_vec()), ..pushed[0].clone() },
            Record { length: Some(std::time::Duration::ZERO), ..pushed[0].clone() },
            Record { attributes: vec![("user".to_owned(), b"a".to_vec())], ..pushed[0].clone() },
        ] {
            assert!(!kept.push(&more).unwrap());
        }
        let read: Vec<_> = kept.records(None).unwrap().map(Result::unwrap).collect();
        assert!(read == pushed);
    }
}
