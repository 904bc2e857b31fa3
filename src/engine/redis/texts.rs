//! Scripts' texts that were sent over a connection. Of many calls that find a script missing, one sends its text, and
//! the others ask by its digest again, after it: a text is some hundred times as long as a call.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::lock::Lock;
use crate::script::Script;

/// How a call names its script.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Eval {
    ByDigest,
    ByText,
}

#[derive(Debug, Default)]
pub(super) struct Texts {
    sent: AtomicU64,
    /// The number of each script's latest text.
    latest: Lock<Vec<(&'static Script, u64)>>,
}

impl Texts {
    /// How many were sent so far.
    pub(super) fn count(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    /// How a call that found this script missing is sent again, given how many texts had been sent before it: by digest
    /// if another call has sent the text since. Otherwise by text, which the caller must send now, before it waits for
    /// anything else.
    pub(super) fn again(&self, script: &'static Script, count: u64) -> Eval {
        let mut latest = self.latest.lock();
        let found = latest.iter().position(|(other, _)| std::ptr::eq(*other, script));
        if found.is_some_and(|at| latest[at].1 > count) {
            return Eval::ByDigest;
        }
        let number = self.sent.fetch_add(1, Ordering::Relaxed) + 1;
        match found {
            Some(at) => latest[at].1 = number,
            None => latest.push((script, number)),
        }
        Eval::ByText
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_of_those_that_miss_a_script_sends_its_text() {
        let scripts: Vec<_> = Script::all().collect();
        let (one, other) = (scripts[0], scripts[1]);
        let texts = Texts::default();
        let before = texts.count();
        assert!(texts.again(one, before) == Eval::ByText);
        assert!((0..9).all(|_| texts.again(one, before) == Eval::ByDigest));
        assert!(texts.again(other, before) == Eval::ByText);
        assert!(texts.again(one, before) == Eval::ByDigest);
        // Lost once more.
        let after = texts.count();
        assert!(texts.again(one, after) == Eval::ByText);
        assert!(texts.again(one, after) == Eval::ByDigest);
    }
}
