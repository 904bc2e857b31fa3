//! A call, in the form that scripts take: an operation on one or several limits, each with its key and its cost; and
//! the reply.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::SystemTime;

use smallvec::SmallVec;

use crate::algorithm::numbers::cost_sent;
use crate::key::Key;
use crate::operation::Operation;
use crate::script::Script;

/// What is asked of an engine.
#[derive(Clone, Debug)]
pub(crate) struct Ask<'a> {
    pub(crate) script: &'static Script,
    /// The numbers of its limits, packed.
    pub(crate) numbers: Cow<'a, Arc<[u8]>>,
    /// The key of each limit's state, and the marker of its id, if it has one.
    pub(crate) keys: SmallVec<[Key; 1]>,
    /// The holder of permits; empty for a call that takes none although a limit has them. Or the receipt by which a
    /// cancel gives units back.
    pub(crate) holder: Option<Box<[u8]>>,
    pub(crate) costs: Costs,
    pub(crate) terms: Terms,
    /// Microseconds since the epoch; the server's time if none.
    pub(crate) now_us: Option<u64>,
    /// Keys in one call of the script; bounded so that it doesn't hold up Redis for long.
    pub(crate) most_keys: usize,
    /// The slot of a cluster. Asks of several partitions share a call only if all of them are `across_partitions`.
    pub(crate) partition: u16,
    /// Whether the node takes calls with keys of several slots.
    pub(crate) across_partitions: bool,
}

/// What a call takes from each of its limits, in units: one cost for all of them, or one for each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Costs(SmallVec<[u64; 2]>);

/// What is asked, whatever the limits are: the end of a shape.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Terms {
    pub(crate) mode: Mode,
    pub(crate) options: Options,
    /// How long a reservation may wait, in microseconds.
    pub(crate) within_us: Option<u64>,
    /// How long the call's id is remembered. 0: not at all, and the caller keeps the call's receipt instead.
    pub(crate) id_ttl_ms: Option<u64>,
    /// The call whose units a refund gives back, as far as they are still owed.
    pub(crate) taken: Option<Taken>,
}

/// What a script is asked to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Mode {
    Call(Operation),
    /// To report what the state consists of.
    Inspect,
}

/// What a rule sets for all its calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Options {
    /// Whether the units left stay as they were when the numbers have changed.
    pub(crate) keeps_left: bool,
    /// Whether the key starts afresh when they have.
    pub(crate) starts_anew: bool,
    pub(crate) counts_overage: bool,
    /// How long a denial blocks its key.
    pub(crate) block_us: Option<u64>,
}

/// When a call took units, and the reset that each limit reported to it, in microseconds.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Taken {
    pub(crate) ago_us: u64,
    pub(crate) resets_us: SmallVec<[u64; 1]>,
}

/// A script's answer to one call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Reply {
    /// Of each limit, in order.
    pub(crate) limits: SmallVec<[LimitReply; 1]>,
    /// What inspect adds: the TTL in milliseconds, and the state's numbers.
    pub(crate) state: Vec<i64>,
    /// For an acquire that asks for one.
    pub(crate) receipt: Option<Receipt>,
    /// This machine's time when it arrived.
    pub(crate) at: SystemTime,
}

/// What a call took, in the form that a cancel needs: what the marker of an id would hold. To be used once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Receipt(pub(crate) Box<[u8]>);

/// The part of a reply for one limit. Times are in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LimitReply {
    pub(crate) allowed: bool,
    pub(crate) remaining: i64,
    /// -1: never.
    pub(crate) retry_after_us: i64,
    pub(crate) reset_after_us: i64,
    pub(crate) blocked: bool,
    /// Units that were taken, if the call asked for that.
    pub(crate) granted: Option<i64>,
    /// Denials counted.
    pub(crate) overage: i64,
}

impl Ask<'_> {
    /// How many limits it is decided by.
    pub(crate) fn limit_count(&self) -> usize {
        self.keys.len() - usize::from(self.terms.id_ttl_ms.is_some_and(|ttl_ms| ttl_ms > 0))
    }

    /// Whether it is an acquire of one limit and nothing else, as most calls are.
    pub(crate) fn is_plain(&self) -> bool {
        self.keys.len() == 1 && self.joins()
    }

    /// Whether identical calls on the same keys form one group: as many of them are allowed as fit one after the other.
    pub(crate) fn joins(&self) -> bool {
        self.terms == Terms::of(Mode::Call(Operation::Acquire)) && self.holder.is_none()
    }
}

impl Costs {
    /// One cost for all limits.
    pub(crate) fn all(cost: u64) -> Self {
        Self(SmallVec::from_slice(&[cost]))
    }

    /// One cost for each limit, in order. If all are equal, they become one cost for all.
    pub(crate) fn each_of(costs: impl Iterator<Item = u64>) -> Self {
        let mut costs: SmallVec<[u64; 2]> = costs.collect();
        if costs.iter().all(|cost| *cost == costs[0]) {
            costs.truncate(1);
        }
        Self(costs)
    }

    /// The cost for the limit at this index.
    pub(crate) fn of(&self, limit: usize) -> u64 {
        let at = if self.0.len() > 1 { limit } else { 0 };
        self.0.get(at).copied().unwrap_or_default()
    }

    /// The costs of this many limits.
    pub(crate) fn each(&self, limits: usize) -> impl Iterator<Item = u64> {
        (0..limits).map(|limit| self.of(limit))
    }

    pub(crate) fn most(&self) -> u64 {
        self.0.iter().copied().max().unwrap_or_default()
    }

    /// The cost, if all limits have the same.
    pub(crate) fn of_all(&self) -> Option<u64> {
        match *self.0 {
            [cost] => Some(cost),
            _ => None,
        }
    }

    /// Whether each is at least the other's for the same limit.
    pub(crate) fn reach(&self, others: &Self) -> bool {
        let limits = self.0.len().max(others.0.len());
        self.each(limits).zip(others.each(limits)).all(|(cost, other)| cost >= other)
    }
}

impl Options {
    /// Appends them to the numbers of a limit whose options differ from its call's.
    pub(crate) fn pack(&self, numbers: &mut Vec<u8>) {
        numbers.extend([64, self.bits()]);
        numbers.extend(seven(self.block_us.unwrap_or_default()));
    }

    fn bits(&self) -> u8 {
        let Self { keeps_left, starts_anew, counts_overage, block_us } = *self;
        bits([keeps_left, starts_anew, counts_overage, block_us.is_some()])
    }
}

/// The first is the lowest.
fn bits<const N: usize>(bits: [bool; N]) -> u8 {
    bits.iter().enumerate().fold(0, |sum, (at, is_set)| sum | u8::from(*is_set) << at)
}

impl Terms {
    /// Without any options.
    pub(crate) fn of(mode: Mode) -> Self {
        Self { mode, options: Options::default(), within_us: None, id_ttl_ms: None, taken: None }
    }

    /// Whether replies say what was granted and how many denials are counted.
    pub(crate) fn are_long(&self) -> bool {
        let grants = matches!(self.mode, Mode::Call(Operation::AtMost) | Mode::Inspect);
        grants || self.id_ttl_ms.is_some() || self.options.counts_overage
    }

    /// The size in bytes of a receipt for this many limits; 0 if the call answers none.
    pub(crate) fn receipt_width(&self, limits: usize) -> usize {
        let answers_one = self.id_ttl_ms == Some(0) && self.mode == Mode::Call(Operation::Acquire);
        if answers_one { 9 + 66 * limits } else { 0 }
    }

    /// Appends them to the numbers of a shape, at this cost.
    pub(crate) fn pack(&self, cost: u64, shape: &mut Vec<u8>) {
        let Self { mode, options, within_us, id_ttl_ms, ref taken } = *self;
        let more = bits([within_us.is_some(), id_ttl_ms.is_some(), taken.is_some(), self.are_long()]);
        shape.extend([mode.code(), options.bits() | more << 4]);
        shape.extend(packed_cost(cost));
        for value in [options.block_us, within_us, id_ttl_ms].into_iter().flatten() {
            shape.extend(seven(value));
        }
        if let Some(Taken { ago_us, resets_us }) = taken {
            shape.extend(seven(*ago_us));
            resets_us.iter().for_each(|reset_us| shape.extend(seven(*reset_us)));
        }
    }
}

impl Mode {
    fn code(self) -> u8 {
        match self {
            Self::Call(Operation::Acquire) => 128,
            Self::Call(Operation::Reserve) => 129,
            Self::Call(Operation::AtMost) => 130,
            Self::Call(Operation::Peek) => 131,
            Self::Inspect => 132,
            Self::Call(Operation::Refund) => 133,
            Self::Call(Operation::Penalty) => 134,
            Self::Call(Operation::Block) => 135,
            Self::Call(Operation::Settle) => 136,
            Self::Call(Operation::Cancel) => 137,
            Self::Call(Operation::Renew) => 138,
            Self::Call(Operation::Release) => 139,
            Self::Call(Operation::Reset) => 140,
        }
    }

    /// Whether it takes units.
    pub(crate) fn takes(self) -> bool {
        use Operation::{Acquire, AtMost, Penalty, Reserve, Settle};
        matches!(self, Self::Call(Acquire | Reserve | AtMost | Penalty | Settle))
    }

    /// Whether what it takes can be used at once, without a wait.
    pub(crate) fn is_at_once(self) -> bool {
        matches!(self, Self::Call(Operation::Acquire | Operation::AtMost))
    }

    /// Whether it may run while writes are refused.
    pub(crate) fn reads_only(self) -> bool {
        matches!(self, Self::Call(Operation::Peek) | Self::Inspect)
    }

    /// Whether it is done whatever the limits say.
    pub(crate) fn is_done_anyway(self) -> bool {
        self.code() > 132
    }
}

/// A cost as an `I7` of `struct.pack`.
pub(crate) fn packed_cost(cost: u64) -> [u8; 7] {
    seven(cost_sent(cost))
}

fn seven(value: u64) -> [u8; 7] {
    let [packed @ .., _] = value.to_le_bytes();
    packed
}
