//! A call of a script in full: its keys, and its arguments as text.

use crate::call::{Call, Reply};
use crate::error::{Error, Kind};
use crate::script::Script;

/// A call as it is sent, which borrows nothing from its caller.
#[derive(Debug)]
pub(crate) struct InFull {
    pub(crate) script: &'static Script,
    /// The bytes of its keys and arguments, one after the other, and where each ends.
    bytes: Vec<u8>,
    ends: Vec<usize>,
    keys: usize,
    /// Whether it may run while writes are refused.
    pub(crate) reads_only: bool,
    /// Whether it takes units.
    pub(crate) takes: bool,
}

impl InFull {
    pub(crate) fn of(call: &Call<'_>) -> Self {
        let keys = call.key_count();
        let words = keys + call.argument_count();
        let (mut bytes, mut ends) = (Vec::with_capacity(24 * words), Vec::with_capacity(words));
        let mut add = |word: &[u8]| {
            bytes.extend_from_slice(word);
            ends.push(bytes.len());
        };
        call.keys().for_each(&mut add);
        call.each_argument(add);
        let (reads_only, takes) = (call.mode.reads_only(), call.mode.takes() && call.cost > 0);
        Self { script: call.script, bytes, ends, keys, reads_only, takes }
    }

    pub(crate) fn key_count(&self) -> usize {
        self.keys
    }

    /// KEYS in order, then ARGV.
    pub(crate) fn words(&self) -> impl ExactSizeIterator<Item = &[u8]> {
        let mut from = 0;
        self.ends.iter().map(move |end| &self.bytes[std::mem::replace(&mut from, *end)..*end])
    }

    /// How many bytes they are.
    pub(crate) fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Reads the script's answer, given the error if too few replicas confirmed what it took.
    pub(crate) fn read(
        &self,
        integers: impl IntoIterator<Item = Option<i64>>,
        lacking: Option<Error>,
    ) -> Result<Reply, Error> {
        let expected = "redis: expected five or more integers from the script, got something else";
        let reply = Reply::from_integers(integers).ok_or_else(|| Error::new(Kind::Garbled, expected))?;
        reply.if_confirmed(lacking.filter(|_| self.takes))
    }
}
