//! Records the outcome of every call, for the audit. Memory is bounded: of a long run, only some keys are kept, each
//! with all its calls.

use fastrand::Rng;

/// One call. Times are microseconds since the epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Call {
    pub(super) key: u32,
    pub(super) verdict: Verdict,
    /// The decision was made no earlier than this.
    pub(super) sent: u64,
    /// The decision was made no later than this.
    pub(super) answered: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Allowed,
    Denied,
    /// No reply came: it may have been charged, then or later.
    Unknown,
}

#[derive(Debug)]
pub(super) struct Ledger {
    calls: Vec<Call>,
    most: usize,
    seed: u64,
    /// Keys whose random number is at most this are kept.
    chosen: u64,
    until: u64,
    total: u64,
}

impl Ledger {
    /// The most calls that are kept, so that an audit takes seconds: it decides each call three times.
    pub(super) const MOST: usize = 500_000;

    pub(super) fn new(seed: u64, most: usize) -> Self {
        Self { calls: Vec::new(), most, seed, chosen: u64::MAX, until: u64::MAX, total: 0 }
    }

    pub(super) fn add(&mut self, call: Call) {
        self.total += 1;
        if call.sent > self.until || !self.chooses(call.key) {
            return;
        }
        self.calls.push(call);
        if self.calls.len() >= self.most && self.until == u64::MAX {
            self.choose_fewer();
        }
    }

    /// How many calls there were, kept or not.
    pub(super) fn total(&self) -> u64 {
        self.total
    }

    /// The calls by key, in the order sent, and the time until which each kept key's calls are complete.
    pub(super) fn into_calls(mut self) -> (Vec<Call>, u64) {
        self.calls.sort_unstable_by_key(|call| (call.key, call.sent, call.answered));
        (self.calls, self.until)
    }

    /// Keeps half of the keys or, if that would be none, only the calls sent so far.
    fn choose_fewer(&mut self) {
        let before = self.chosen;
        self.chosen /= 2;
        if self.calls.iter().any(|call| self.chooses(call.key)) {
            let calls = std::mem::take(&mut self.calls);
            self.calls = calls.into_iter().filter(|call| self.chooses(call.key)).collect();
        } else {
            self.chosen = before;
            self.until = self.calls.iter().map(|call| call.sent).max().unwrap_or_default();
        }
    }

    fn chooses(&self, key: u32) -> bool {
        Rng::with_seed(self.seed ^ u64::from(key)).u64(..) <= self.chosen
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(key: u32, sent: u64) -> Call {
        Call { key, verdict: Verdict::Allowed, sent, answered: sent + 5 }
    }

    #[test]
    fn a_long_run_keeps_some_keys_with_all_their_calls() {
        let mut ledger = Ledger::new(3, 1000);
        for sent in 0..10_000 {
            ledger.add(call((sent % 100) as u32, sent));
        }
        assert_eq!(ledger.total(), 10_000);
        let (calls, until) = ledger.into_calls();
        assert!((1..1000).contains(&calls.len()), "{}", calls.len());
        assert_eq!(until, u64::MAX);
        for of_a_key in calls.chunk_by(|one, other| one.key == other.key) {
            assert_eq!(of_a_key.len(), 100);
        }
    }

    #[test]
    fn of_a_single_key_the_beginning_is_kept_with_calls_that_are_answered_late() {
        let mut ledger = Ledger::new(3, 1000);
        for sent in 1..5000 {
            ledger.add(call(0, sent));
        }
        ledger.add(call(0, 0));
        let (calls, until) = ledger.into_calls();
        assert_eq!((calls.len(), until), (1001, 1000));
        assert_eq!(calls.iter().map(|call| call.sent).collect::<Vec<_>>(), (0..=1000).collect::<Vec<_>>());
    }
}
