//! What the servers did, whatever the callers were answered: which script calls took how much, by key.

use std::collections::BTreeMap;

use crate::engine::embedded::raw::Answer;

#[derive(Default)]
pub(crate) struct Ledger {
    /// By the key of the request.
    pub(super) taken: BTreeMap<String, Taken>,
    /// How often a server restarted empty, or moving keys were lost.
    pub(super) emptied: u64,
    /// Keys moved to another server, whose replica may not have them yet.
    pub(super) carried: usize,
    /// How often a replica took over, possibly lagging.
    pub(super) succeeded: u64,
    /// Scripts sent to a replica over a connection on which it was never the primary.
    pub(super) misled: u64,
    /// When calls were sent to a server that no longer has the slot, in milliseconds.
    pub(super) moved: Vec<u64>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Taken {
    pub(super) calls: u64,
    pub(super) units: u64,
}

impl Ledger {
    /// Records a script call and its answer, and which of its keys it changed.
    pub(super) fn enter(&mut self, keys: &[Vec<u8>], arguments: &[Vec<u8>], answer: &Answer, changed: &[bool]) {
        let Answer::Bytes(records) = answer else { return };
        let shape = Shape::read(&arguments[0]);
        let records: Vec<_> = records.chunks_exact(if shape.is_long { 35 } else { 24 }).collect();
        let calls = keys.chunks_exact(shape.width).zip(changed.chunks_exact(shape.width));
        for (at, ((keys, changed), records)) in calls.zip(records.chunks_exact(shape.limits)).enumerate() {
            let allowed = records.iter().map(|record| allowed(record)).min().unwrap_or(0);
            // An id that is remembered gets its answer again, and nothing is taken: its marker stays as it was.
            let took = if shape.width > shape.limits { changed[shape.limits] } else { changed.contains(&true) };
            if allowed > 0 && took && shape.takes {
                let units = match records[0].get(24..31) {
                    Some(granted) => number(granted),
                    None => allowed * packed_cost(&shape, arguments, at),
                };
                self.take(&keys[0], allowed, units);
            }
        }
    }

    /// How often state was lost.
    pub(super) fn forgotten(&self) -> u64 {
        self.emptied + self.succeeded
    }

    pub(super) fn of(&self, key: &str) -> Taken {
        self.taken.get(key).copied().unwrap_or_default()
    }

    fn take(&mut self, key: &[u8], calls: u64, units: u64) {
        let taken = self.taken.entry(request_key(key)).or_default();
        taken.calls += calls;
        taken.units += units;
    }
}

/// The request's key, which is the tag of the key in Redis.
pub(super) fn request_key(key: &[u8]) -> String {
    let text = String::from_utf8_lossy(key);
    let tag = text.split_once('{').and_then(|(_, rest)| rest.split_once('}'));
    tag.map_or_else(String::new, |(tag, _)| tag.to_owned())
}

/// What the shape of a call says.
struct Shape {
    limits: usize,
    /// Keys of each call.
    width: usize,
    cost: u64,
    /// Whether it is an acquire, a reservation, or takes what there is.
    takes: bool,
    is_long: bool,
}

impl Shape {
    fn read(shape: &[u8]) -> Self {
        let (mut at, mut limits) = (0, 0);
        while shape[at] < 128 {
            // The width of each algorithm's packed numbers.
            at += [32, 36, 29, 18, 13, 10][usize::from(shape[at]) - 1];
            limits += 1;
            if shape[at] == 64 {
                // The limit's own options.
                at += 9;
            }
        }
        let (operation, options) = (shape[at], shape[at + 1]);
        let width = limits + usize::from(options & 32 != 0);
        let cost = number(&shape[at + 2..at + 9]);
        Self { limits, width, cost, takes: operation <= 130, is_long: options & 128 != 0 }
    }
}

/// How many of the calls a limit's record says are allowed.
fn allowed(record: &[u8]) -> u64 {
    let allowed = i32::from_le_bytes([0, record[21], record[22], record[23]]) >> 8;
    u64::try_from(allowed).unwrap_or(0)
}

fn packed_cost(shape: &Shape, arguments: &[Vec<u8>], at: usize) -> u64 {
    let width = 3 + 7 * shape.limits;
    arguments.get(2).map_or(shape.cost, |each| number(&each[width * at + 3..][..7]))
}

fn number(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}
