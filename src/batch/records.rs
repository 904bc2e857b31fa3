//! What a call answers: in its packed form a record of each group, and of that the reply to each ask.

use std::time::SystemTime;

use super::{GroupId, Position};
use crate::call::Reply;
use crate::error::{Error, Kind};
use crate::script::Script;

/// Noted in the error of an ask that shared a call with others, and got no decision from it. Nothing was taken, and it
/// can be asked again by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AskApart {
    /// The node can't read or write this key now, or its user may not: asked alone, it says why.
    Key,
    /// The node refused the whole call, whose keys are of several slots of a cluster.
    Call,
    /// The user may not use one of the keys that the call declares, and so the whole call was refused.
    Others,
}

/// A call's answer.
#[derive(Debug)]
pub(crate) enum Answer {
    Packed(Records),
    InFull(Reply),
}

/// The answer of a call in its packed form: one record for each group.
#[derive(Debug)]
pub(crate) struct Records {
    pub(super) records: Vec<PackedRecord>,
    pub(super) script: &'static Script,
    pub(super) limit: i64,
    pub(super) at: SystemTime,
    /// The error if too few replicas confirmed what was taken.
    pub(super) lacking: Option<Error>,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PackedRecord {
    /// How many of the asks are allowed; -1 if the key is blocked, -2 if its state can't be read, -3 if the script got
    /// windows that don't contain the time `retry_after_us`, -4 if a command failed on the key.
    allowed: i64,
    remaining: i64,
    /// The wait of the first ask that isn't allowed.
    retry_after_us: i64,
    reset_after_us: i64,
    /// Whether the ask has a cost.
    costs: bool,
}

impl Answer {
    /// The reply to the ask at this position.
    pub(crate) fn reply(&self, position: Position) -> Result<Reply, Error> {
        match self {
            Self::Packed(records) => records.reply(position),
            Self::InFull(reply) => Ok(reply.clone()),
        }
    }
}

impl Records {
    /// The reply to the only ask.
    pub(crate) fn only(&self) -> Result<Reply, Error> {
        self.reply(Position { group: GroupId { call: 0, group: 0 }, before: 0 })
    }

    /// The reply to the ask at this position.
    pub(crate) fn reply(&self, position: Position) -> Result<Reply, Error> {
        let PackedRecord { allowed, remaining, retry_after_us, reset_after_us, costs } =
            self.records[position.group.group as usize];
        let reply = |allowed: bool, appended| {
            let wait = if allowed { 0 } else { retry_after_us };
            Reply { decision: [allowed.into(), self.limit, remaining, wait, reset_after_us], appended, at: self.at }
        };
        match allowed {
            0.. => {
                let allowed = i64::from(position.before) < allowed;
                match &self.lacking {
                    Some(lacking) if allowed && costs => Err(lacking.clone()),
                    _ => Ok(reply(allowed, Vec::new())),
                }
            }
            // Blocked, and no denials counted.
            -1 => Ok(reply(false, vec![1, 0])),
            -3 => Err(Error::stale(retry_after_us.unsigned_abs())),
            -4 => {
                let why = "the node could not use this key in a call with keys of other slots";
                Err(Error::new(Kind::NotNow, why).redirected(AskApart::Key))
            }
            _ => {
                let what = "expected the limit's state, which a reset would restore";
                let name = self.script.name();
                let why = format!("BADSTATE {name}: the key holds something else than this limit's state");
                Err(Error::new(Kind::Unreadable, format!("{what}: {why}")))
            }
        }
    }
}

impl PackedRecord {
    /// Reads a key's record: remaining and reset or, if not all of its asks are allowed, -1 - remaining, reset, wait,
    /// and how many are allowed. None if it is malformed.
    pub(super) fn read(numbers: &mut impl Iterator<Item = i64>, least: i64, asks: u32, costs: bool) -> Option<Self> {
        let (first, reset_after_us) = (numbers.next()?, numbers.next()?);
        let record = match first {
            0.. => Self { allowed: asks.into(), remaining: first, retry_after_us: 0, reset_after_us, costs },
            _ => {
                let (retry_after_us, allowed) = (numbers.next()?, numbers.next()?);
                Self { allowed, remaining: -1 - first, retry_after_us, reset_after_us, costs }
            }
        };
        (least..=i64::from(asks)).contains(&record.allowed).then_some(record)
    }
}

/// Reads struct's i7.
pub(crate) fn packed_number(number: [u8; 7]) -> i64 {
    let [a, b, c, d, e, f, g] = number;
    // The sign is the highest bit of the highest byte.
    i64::from_le_bytes([0, a, b, c, d, e, f, g]) >> 8
}
