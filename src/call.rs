//! One call of a script: its mode, its keys and arguments, and the reply.

use std::borrow::Cow;
use std::time::SystemTime;

use crate::algorithm::numbers::cost_sent;
use crate::decision::count;
use crate::error::Error;
use crate::key::Key;
use crate::limit::Windows;
use crate::operation::Operation;
use crate::script::Script;
use crate::wall_clock;

/// What a script is asked to do: its `mode` argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Call(Operation),
    /// To say what the state consists of.
    Inspect,
}

/// One run of a script, as an engine needs it.
#[derive(Debug)]
pub(crate) struct Call<'a> {
    pub(crate) script: &'static Script,
    /// One limit, or several that `script` decides together.
    pub(crate) limits: &'a [LimitInput<'a>],
    /// The marker that remembers the call.
    pub(crate) marker: Option<&'a Marker>,
    pub(crate) cost: u64,
    pub(crate) mode: Mode,
    /// The options after the mode: how changed numbers are treated, whether denials are counted, and how long they
    /// block.
    pub(crate) options: &'a str,
    /// How long a reservation may wait, in microseconds.
    pub(crate) within_us: Option<u64>,
    /// Microseconds since the epoch; the server's time if none.
    pub(crate) now_us: Option<u64>,
}

/// One limit of a call: the key of its state, and its own script's arguments.
#[derive(Clone, Debug)]
pub(crate) struct LimitInput<'a> {
    pub(crate) key: Key,
    pub(crate) script: &'static Script,
    /// The script's own arguments, as decimal text.
    pub(crate) arguments: Cow<'a, [String]>,
    /// An argument that depends on the request: its index, and its value.
    pub(crate) replaced: Option<(usize, Vec<u8>)>,
    /// The windows that the arguments come from, if they depend on the server's time.
    pub(crate) windows: Option<&'a Windows>,
}

/// The key that remembers a call by its id, and for how long.
#[derive(Debug)]
pub(crate) struct Marker {
    pub(crate) key: Key,
    pub(crate) ttl_ms: u64,
}

/// A script's answer: the five integers of every reply, and what some modes append.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Reply {
    pub(crate) decision: [i64; 5],
    pub(crate) appended: Vec<i64>,
    /// This machine's time when it arrived.
    pub(crate) at: SystemTime,
}

impl Mode {
    fn text(self) -> &'static str {
        match self {
            Self::Call(operation) => operation.name(),
            Self::Inspect => "inspect",
        }
    }

    /// Whether it takes units.
    pub(crate) fn takes(self) -> bool {
        use Operation::{Acquire, AtMost, Penalty, Reserve, Settle};
        matches!(self, Self::Call(Acquire | Reserve | AtMost | Penalty | Settle))
    }

    /// Whether it may run while writes are refused.
    pub(crate) fn reads_only(self) -> bool {
        matches!(self, Self::Call(Operation::Peek) | Self::Inspect)
    }
}

impl Call<'_> {
    /// KEYS in order.
    pub(crate) fn keys(&self) -> impl Iterator<Item = &[u8]> {
        let limits = self.limits.iter().map(|input| input.key.as_slice());
        limits.chain(self.marker.map(|marker| marker.key.as_slice()))
    }

    /// How many keys there are.
    pub(crate) fn key_count(&self) -> usize {
        self.limits.len() + usize::from(self.marker.is_some())
    }

    /// Whether it is a composed script, which is given the names and arguments of others.
    fn decides_for_others(&self) -> bool {
        self.limits.first().is_none_or(|input| !std::ptr::eq(input.script, self.script))
    }

    /// Hands over ARGV in order: the script's own arguments, or each limit's script name, number of arguments and
    /// arguments, followed by the id's time to live if calls are remembered; then cost, mode and now.
    pub(crate) fn each_argument(&self, mut give: impl FnMut(&[u8])) {
        let for_others = self.decides_for_others();
        for input in self.limits {
            if for_others {
                give(input.script.name().as_bytes());
                give(input.arguments.len().to_string().as_bytes());
            }
            for (index, argument) in input.arguments.iter().enumerate() {
                match &input.replaced {
                    Some((at, value)) if *at == index => give(value),
                    _ => give(argument.as_bytes()),
                }
            }
        }
        if self.script.remembers_calls() {
            give(self.marker.map_or(0, |marker| marker.ttl_ms).to_string().as_bytes());
        }
        give(cost_sent(self.cost).to_string().as_bytes());
        match (self.options, self.within_us) {
            ("", None) => give(self.mode.text().as_bytes()),
            (options, None) => give(format!("{}{options}", self.mode.text()).as_bytes()),
            (options, Some(us)) => give(format!("{}{options}+within={us}", self.mode.text()).as_bytes()),
        }
        match self.now_us {
            Some(now_us) => give(now_us.to_string().as_bytes()),
            None => give(b"-1"),
        }
    }

    /// The most arguments that `each_argument` hands over.
    pub(crate) fn argument_count(&self) -> usize {
        self.limits.iter().map(|input| input.arguments.len() + 2).sum::<usize>() + 4
    }
}

impl Reply {
    /// The reply, or the error if it took something that too few replicas confirmed.
    pub(crate) fn if_confirmed(self, lacking: Option<Error>) -> Result<Self, Error> {
        match lacking {
            Some(error) if self.decision[0] == 1 => Err(error),
            _ => Ok(self),
        }
    }

    /// A reply of these integers; none if there are fewer than five.
    pub(crate) fn from_integers(integers: impl IntoIterator<Item = Option<i64>>) -> Option<Self> {
        let mut integers = integers.into_iter();
        let mut decision = [0; 5];
        for slot in &mut decision {
            *slot = integers.next()??;
        }
        let appended = integers.collect::<Option<Vec<_>>>()?;
        Some(Self { decision, appended, at: wall_clock::now() })
    }
}

/// Units that a call took: the number appended by the script, otherwise the whole cost or nothing. None if no call can
/// have taken that many.
pub(crate) fn granted(cost: u64, operation: Operation, allowed: bool, appended: Option<&i64>) -> Option<u64> {
    match (operation, appended) {
        (
            Operation::Refund
            | Operation::Block
            | Operation::Renew
            | Operation::Release
            | Operation::Reset
            | Operation::Cancel,
            _,
        ) => Some(0),
        (_, Some(granted)) => count(*granted),
        (Operation::Acquire | Operation::Reserve | Operation::Penalty, None) if allowed => Some(cost),
        _ => Some(0),
    }
}
