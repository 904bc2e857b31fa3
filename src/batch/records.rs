//! A call's answer: a record for each limit of each group, from which the reply to each ask is made.

use std::time::SystemTime;

use super::{GroupId, Position};
use crate::call::{LimitReply, Receipt, Reply};
use crate::error::{Error, Kind};

/// Noted in the error of an ask that shared a call with others, and got no decision from it. Nothing was taken, and it
/// can be asked again by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AskApart {
    /// The node can't read or write one of its keys now, or its user may not: asked alone, the node says why.
    Key,
    /// The node refused the whole call, whose keys are of several slots of a cluster.
    Call,
    /// The user may not use one of the keys that the call declares, and so the whole call was refused.
    Others,
}

/// A call's answer.
#[derive(Debug)]
pub(crate) struct Records {
    /// Of each limit of each group, in order.
    pub(super) records: Vec<Record>,
    pub(super) groups: Vec<Answered>,
    /// How many limits the call has.
    pub(super) limits: usize,
    pub(super) script: &'static str,
    pub(super) is_done_anyway: bool,
    /// What inspect adds.
    pub(super) state: Vec<i64>,
    /// One for each group, in order, if the call asks for them; empty for a group without asks.
    pub(super) receipts: Vec<Receipt>,
    pub(super) at: SystemTime,
    /// The error if too few replicas confirmed what was taken.
    pub(super) lacking: Option<Error>,
}

/// What a group asked.
#[derive(Clone, Copy, Debug)]
pub(super) struct Answered {
    pub(super) asks: u32,
    /// Whether an ask takes units if it is allowed.
    pub(super) takes: bool,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Record {
    /// How many of the asks are allowed, or [`BLOCKED`]; from [`UNREADABLE`] down, why nothing was decided.
    pub(super) allowed: i64,
    pub(super) remaining: i64,
    /// The wait of the first ask that this limit doesn't allow.
    pub(super) retry_after_us: i64,
    pub(super) reset_after_us: i64,
    pub(super) granted: Option<i64>,
    pub(super) overage: i64,
}

/// Units and microseconds of a record, at most.
pub(super) const MOST_COUNT: i64 = 1 << 53;

/// The key is blocked, and what remains is the time until that ends.
pub(super) const BLOCKED: i64 = -1;
/// A key holds something else.
pub(super) const UNREADABLE: i64 = -2;
/// The script got windows that don't contain the server's time, which is in the place of the wait.
pub(super) const STALE: i64 = -3;
/// A command failed on the key.
pub(super) const FAILED: i64 = -4;
/// Nothing is remembered for the id.
pub(super) const UNKNOWN_ID: i64 = -5;
/// The id is of another operation.
pub(super) const OTHER_ID: i64 = -6;

impl Records {
    /// The reply to the only ask.
    pub(crate) fn only(&self) -> Result<Reply, Error> {
        self.reply(Position { group: GroupId { call: 0, group: 0 }, before: 0 })
    }

    /// The reply to the ask at this position.
    pub(crate) fn reply(&self, position: Position) -> Result<Reply, Error> {
        let group = position.group.group as usize;
        let Answered { asks, takes } = self.groups[group];
        let records = &self.records[group * self.limits..][..self.limits];
        if let Some(refused) = records.iter().find(|record| record.allowed < -1) {
            return Err(self.refusal(refused));
        }
        // A blocked key allows only what is done anyway.
        let blocked = if self.is_done_anyway { asks.into() } else { 0 };
        let fits = records.iter().map(|record| if record.allowed < 0 { blocked } else { record.allowed });
        let fits = fits.min().unwrap_or(0);
        let allowed = i64::from(position.before) < fits;
        let receipt = self.receipts.get(group).cloned();
        if let Some(lacking) = self.lacking.as_ref().filter(|_| allowed && takes) {
            let lacking = lacking.clone();
            return Err(if let Some(receipt) = receipt { lacking.redirected(receipt) } else { lacking });
        }
        let of_limit = |record: &Record| LimitReply {
            allowed: allowed || record.retry_after_us == 0,
            remaining: if record.allowed < 0 { 0 } else { record.remaining },
            // Of several asks, the wait of the first that isn't allowed.
            retry_after_us: if allowed && fits < asks.into() { 0 } else { record.retry_after_us },
            reset_after_us: record.reset_after_us,
            blocked: record.allowed < 0,
            granted: record.granted,
            overage: record.overage,
        };
        let limits = records.iter().map(of_limit).collect();
        let reply = Reply { limits, state: self.state.clone(), receipt, at: self.at };
        if !allowed && reply.limits.iter().all(|limit| limit.allowed) {
            return Err(Error::new(
                Kind::Garbled,
                "the script's reply can't be used: it denies the call, but no limit denies",
            ));
        }
        Ok(reply)
    }

    fn refusal(&self, record: &Record) -> Error {
        match record.allowed {
            STALE => Error::stale(record.retry_after_us.unsigned_abs()),
            FAILED => {
                let why = "the node could not use this key in a call with keys of other slots";
                Error::new(Kind::NotNow, why).redirected(AskApart::Key)
            }
            UNKNOWN_ID => Error::unknown_id("BADID tollgate: no charge is remembered for this id"),
            OTHER_ID => {
                let why = "BADARG tollgate: another operation has used this id: give each operation its own";
                Error::new(Kind::Input, format!("a script refused its arguments: {why}"))
            }
            // UNREADABLE.
            _ => {
                let what = "the limit's state can't be read (a reset repairs it)";
                let why = format!("BADSTATE {}: the key holds something other than this limit's state", self.script);
                Error::new(Kind::Unreadable, format!("{what}: {why}"))
            }
        }
    }
}

impl Record {
    /// The bytes of a record, and of a long one.
    pub(super) const WIDTHS: [usize; 2] = [24, 35];

    /// Whether a script can give this record.
    pub(super) fn is_in_range(&self) -> bool {
        let counts = [self.remaining, self.reset_after_us, self.retry_after_us.max(0)];
        self.retry_after_us >= -1 && counts.into_iter().all(|count| (0..=MOST_COUNT).contains(&count))
    }

    /// Whether these can be of one group: each limit allows as many asks, or its key is blocked.
    pub(super) fn agree(records: &[Self]) -> bool {
        let mut counts = records.iter().map(|record| record.allowed).filter(|allowed| *allowed != BLOCKED);
        counts.next().is_none_or(|first| counts.all(|other| other == first))
    }

    pub(super) fn read(bytes: &[u8]) -> Self {
        let number = |at: usize| bytes[at..at + 7].try_into().map_or(0, packed_number);
        let allowed = i64::from(i32::from_le_bytes([0, bytes[21], bytes[22], bytes[23]]) >> 8);
        let overage = bytes.get(31..35).and_then(|bytes| bytes.try_into().ok()).map_or(0, u32::from_le_bytes);
        Self {
            allowed,
            remaining: number(0),
            reset_after_us: number(7),
            retry_after_us: number(14),
            granted: (bytes.len() > 24).then(|| number(24)),
            overage: overage.into(),
        }
    }
}

/// Reads struct's i7.
pub(crate) fn packed_number(number: [u8; 7]) -> i64 {
    let [a, b, c, d, e, f, g] = number;
    // The sign is the highest bit of the highest byte.
    i64::from_le_bytes([0, a, b, c, d, e, f, g]) >> 8
}

pub(super) fn unexpected() -> Error {
    Error::new(Kind::Garbled, "the script's reply can't be used: expected a decision for each key")
}
