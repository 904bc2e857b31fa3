//! What the servers did, whatever the callers were answered: which script calls took how much, by key.

use std::collections::BTreeMap;

use crate::batch::packed_number;
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
    /// Records a call and its answer; `changed` says whether it changed its keys.
    pub(super) fn enter(&mut self, keys: &[Vec<u8>], arguments: &[Vec<u8>], answer: &Answer, changed: bool) {
        match answer {
            Answer::Bytes(records) => {
                let mut numbers = records.as_chunks::<7>().0.iter().map(|number| packed_number(*number));
                for (at, key) in keys.iter().enumerate() {
                    let allowed = allowed(&mut numbers, packed_calls(arguments, at));
                    if allowed > 0 {
                        self.take(key, allowed, allowed * packed_cost(arguments, at));
                    }
                }
            }
            Answer::Array(items) if changed && items.first() == Some(&Answer::Integer(1)) => {
                let [.., cost, mode, _] = arguments else { return };
                let [cost, mode] = [cost, mode].map(|text| String::from_utf8_lossy(text).into_owned());
                let units = match (mode.split('+').next(), items.get(5)) {
                    (Some("acquire"), _) => cost.parse().unwrap_or(0),
                    (Some("at-most"), Some(Answer::Integer(granted))) => *granted as u64,
                    _ => return,
                };
                self.take(&keys[0], 1, units);
            }
            _ => {}
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

/// How many calls on a key were allowed: all of them if the first number is `remaining`, otherwise the fourth number
/// says.
fn allowed(numbers: &mut impl Iterator<Item = i64>, calls: u64) -> u64 {
    match (numbers.next(), numbers.next()) {
        (Some(0..), Some(_)) => calls,
        _ => numbers.nth(1).and_then(|allowed| allowed.try_into().ok()).unwrap_or(0),
    }
}

fn packed_calls(arguments: &[Vec<u8>], at: usize) -> u64 {
    match arguments {
        [_, _, several] => {
            several[10 * at + 7..10 * at + 10].iter().rev().fold(0, |calls, byte| calls << 8 | u64::from(*byte))
        }
        _ => 1,
    }
}

fn packed_cost(arguments: &[Vec<u8>], at: usize) -> u64 {
    let seven = |bytes: &[u8]| bytes.iter().rev().fold(0, |cost, byte| cost << 8 | u64::from(*byte));
    match arguments {
        [_, _, several] => seven(&several[10 * at..10 * at + 7]),
        [numbers, ..] => seven(&numbers[numbers.len() - 7..]),
        [] => 0,
    }
}
