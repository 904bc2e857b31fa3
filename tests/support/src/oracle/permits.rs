//! Concurrency: permits held by ids, until given back or expired.

use super::rule::{Rule, State};
use super::{Answer, Found, Oracle, Retry};

/// One unit held.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Permit {
    /// None where it was taken by an id of its own, that nobody names again.
    id: Option<String>,
    /// From then on nobody holds it.
    pub(super) expiry: i128,
}

impl Permit {
    pub(super) fn new(id: Option<&str>, expiry: i128) -> Self {
        Permit { id: id.map(str::to_owned), expiry }
    }

    pub(super) fn times(self, count: i128) -> impl Iterator<Item = Self> {
        std::iter::repeat_n(self, usize::try_from(count).expect("few enough to hold"))
    }

    pub(super) fn is_live(&self, t: i128) -> bool {
        self.expiry > t
    }

    fn is_of(&self, id: &str) -> bool {
        self.id.as_deref() == Some(id)
    }
}

impl Oracle {
    /// Takes `cost` permits for this id, if they fit beside those of others. What it holds already is renewed, and only
    /// what it lacks is taken: the same call made twice takes once.
    pub fn hold(&mut self, id: &str, cost: u64, now_us: u64) -> Answer {
        let rule = Rule::of(self.spec);
        let mut found = self.find(now_us);
        let kept = found.held(id, found.at);
        // In a block, whether it will still hold them when the block ends: that decides the wait.
        let again = kept >= i128::from(cost) && found.holds(id, found.at.max(found.until));
        let own = match rule.retry(&found.without(id), cost, rule.capacity, now_us) {
            Retry::AfterUs(_) if again => Retry::Now,
            own => own,
        };
        let retry = self.wait_or_block(&mut found, own, now_us);
        if retry == Retry::Now && cost > 0 {
            found.renew(&rule, id);
            found.lend(&rule, id, (i128::from(cost) - kept).max(0));
        }
        self.close(found, retry == Retry::Now, retry, now_us)
    }

    /// Puts off the expiry of all that this id holds. None if it holds nothing: an error, which
    /// writes nothing.
    pub fn renew(&mut self, id: &str, now_us: u64) -> Option<Answer> {
        let mut found = self.find(now_us);
        if !found.holds(id, found.at) {
            return None;
        }
        found.renew(&Rule::of(self.spec), id);
        Some(self.close(found, true, Retry::Now, now_us))
    }

    /// Gives back all that this id holds.
    pub fn release(&mut self, id: &str, now_us: u64) -> Answer {
        self.give_back(id, u64::MAX, now_us)
    }

    /// Gives back up to `cost` of what this id holds, the newest first.
    pub fn give_back(&mut self, id: &str, cost: u64, now_us: u64) -> Answer {
        let mut found = self.find(now_us);
        if cost > 0 && found.holds(id, found.at) {
            let (held, mut left) = (found.permits(), cost);
            held.sort_by_key(|permit| -permit.expiry);
            held.retain(|permit| {
                let gives = left > 0 && permit.is_of(id);
                left -= u64::from(gives);
                !gives
            });
        }
        self.close(found, true, Retry::Now, now_us)
    }

    /// `penalty` by an id, which can give it back.
    pub fn penalty_by(&mut self, id: &str, cost: u64, now_us: u64) -> Answer {
        let rule = Rule::of(self.spec);
        let mut found = self.find(now_us);
        let count = i128::from(cost).min(rule.room(&found.state, found.at));
        if count > 0 {
            // All of a holder's permits expire together.
            found.renew(&rule, id);
            found.lend(&rule, id, count);
        }
        self.close(found, true, Retry::Now, now_us)
    }
}

impl Found {
    /// How many this id holds.
    fn held(&self, id: &str, t: i128) -> i128 {
        let State::Permits { held, .. } = &self.state else { panic!("only permits have ids") };
        held.iter().map(|permit| i128::from(permit.is_of(id) && permit.is_live(t))).sum()
    }

    /// The key as others hold it.
    fn without(&self, id: &str) -> Self {
        let State::Permits { held, time } = &self.state else { panic!("only permits have ids") };
        let held = held.iter().filter(|permit| !permit.is_of(id)).cloned().collect();
        Self { state: State::Permits { held, time: *time }, ..*self }
    }

    fn holds(&self, id: &str, t: i128) -> bool {
        self.held(id, t) > 0
    }

    /// The live permits, to be altered and written at `at`.
    fn permits(&mut self) -> &mut Vec<Permit> {
        self.touch();
        let State::Permits { held, .. } = &mut self.state else { panic!("only permits have ids") };
        held
    }

    fn lend(&mut self, rule: &Rule, id: &str, count: i128) {
        let due = self.at + rule.period;
        self.permits().extend(Permit::new(Some(id), due).times(count));
    }

    fn renew(&mut self, rule: &Rule, id: &str) {
        let due = self.at + rule.period;
        self.permits().iter_mut().filter(|permit| permit.is_of(id)).for_each(|permit| permit.expiry = due);
    }
}

#[cfg(test)]
#[rustfmt::skip]
mod tests {
    use super::super::Retry::{AfterUs, Never, Now};
    use super::super::tests::Call::{Acquire, AtMost, Block, GiveBack, Hold, Penalty, PenaltyBy, Release, Renew};
    use super::super::tests::{calls, level};
    use super::super::{Change, Spec};
    use super::*;

    fn permits(limit: u64, ttl_us: u64) -> Spec {
        Spec::Concurrency { limit, ttl_us }
    }

    #[test]
    fn concurrency_by_hand() {
        let mut o = Oracle::new(permits(3, 10));
        calls(&mut o, &[
            (Hold("a"), 0, 100, Some(0), Now, 3, 0), (Hold("a"), 2, 100, Some(2), Now, 1, 10),
            (Hold("b"), 2, 104, None, AfterUs(6), 1, 6), (Hold("b"), 1, 104, Some(1), Now, 0, 10),
            // Again, and nothing more is taken: a's last until 115, b's until 114.
            (Hold("a"), 1, 105, Some(0), Now, 0, 10), (Hold("a"), 4, 105, None, Never, 0, 10), (Hold("a"), 0, 106, Some(0), Now, 0, 9),
            (Hold("c"), 0, 106, Some(0), Now, 0, 9), (Hold("c"), 4, 106, None, Never, 0, 9),
            (Hold("c"), 1, 106, None, AfterUs(8), 0, 9), (Hold("c"), 2, 106, None, AfterUs(9), 0, 9),
            (Renew("b"), 0, 113, Some(0), Now, 0, 10), (Hold("c"), 1, 113, None, AfterUs(2), 0, 10),
        ]);
        assert_eq!((o.renew("c", 113), o.renew("a", 115)), (None, None));
        calls(&mut o, &[
            (GiveBack("a"), 1, 115, Some(0), Now, 2, 8), (Acquire, 2, 115, Some(2), Now, 0, 10), (AtMost, 2, 116, None, AfterUs(7), 0, 9),
            // All of b's until 126, nobody's until 125.
            (PenaltyBy("b"), 2, 116, Some(2), Now, 0, 10), (Hold("c"), 3, 116, None, AfterUs(10), 0, 10),
            (GiveBack("b"), 0, 117, Some(0), Now, 0, 9), (GiveBack("b"), 2, 117, Some(0), Now, 0, 9), (Hold("c"), 1, 117, None, AfterUs(8), 0, 9),
            (Release("b"), 0, 117, Some(0), Now, 1, 8), (Release("b"), 0, 118, Some(0), Now, 1, 7), (Penalty, 1, 118, Some(1), Now, 0, 10),
        ]);
        // Written at 118: until 125 twice, until 128 once. Further back than 10 they move by 11.
        calls(&mut o.clone(), &[(Hold("c"), 1, 108, None, AfterUs(17), 0, 20), (Hold("c"), 1, 107, None, AfterUs(7), 0, 10)]);
        // An error writes nothing, so the clock may come back to where it was.
        assert_eq!(o.renew("c", 107), None);
        calls(&mut o, &[(Hold("c"), 1, 118, None, AfterUs(7), 0, 10)]);
        // Nothing held: the time binds nobody.
        calls(&mut o, &[(Hold("d"), 1, 128, Some(1), Now, 2, 10), (Release("d"), 0, 128, Some(0), Now, 3, 0), (Hold("d"), 3, 120, Some(3), Now, 0, 10)]);
    }

    #[test]
    fn changes_by_hand() {
        let mut o = Oracle::new(permits(3, 10));
        // No strategy alters what is held.
        o.on_change(Change::Reset);
        calls(&mut o, &[(Hold("a"), 2, 104, Some(2), Now, 1, 10), (Hold("b"), 1, 107, Some(1), Now, 0, 10)]);
        // Written at 107, so none lasts beyond 111 under a ttl of 4.
        o.change(permits(3, 4));
        calls(&mut o, &[(Hold("c"), 1, 108, None, AfterUs(3), 0, 3)]);
        // Which wrote nothing: 114 and 117 again.
        o.change(permits(5, 10));
        calls(&mut o, &[(Hold("c"), 3, 108, None, AfterUs(6), 2, 9)]);
        o.change(permits(1, 10));
        calls(&mut o, &[(Hold("c"), 1, 108, None, AfterUs(9), 0, 9)]);
        // Now it is written.
        o.change(permits(4, 4));
        calls(&mut o, &[(Hold("c"), 1, 108, Some(1), Now, 0, 4)]);
        o.change(permits(4, 10));
        calls(&mut o, &[(Hold("d"), 1, 109, None, AfterUs(2), 0, 3), (Renew("a"), 0, 110, Some(0), Now, 0, 10), (Hold("d"), 1, 111, Some(1), Now, 0, 10)]);
    }

    #[test]
    fn blocks_by_hand() {
        let mut o = Oracle::new(permits(3, 10));
        calls(&mut o, &[
            (Hold("a"), 1, 100, Some(1), Now, 2, 10), (Hold("b"), 2, 105, Some(2), Now, 0, 10), (Block, 7, 105, Some(0), Now, 0, 10),
            // At 112, when the block ends, a's is gone and b's aren't.
            (Hold("c"), 0, 106, None, AfterUs(6), 0, 9), (Hold("a"), 1, 106, None, AfterUs(6), 0, 9),
            (Hold("a"), 2, 106, None, AfterUs(9), 0, 9), (Hold("b"), 3, 106, None, AfterUs(6), 0, 9), (Hold("b"), 4, 106, None, Never, 0, 9),
            (Renew("a"), 0, 107, Some(0), Now, 0, 10), (GiveBack("b"), 1, 108, Some(0), Now, 0, 9),
            (Hold("a"), 2, 112, Some(1), Now, 0, 10), (Release("b"), 0, 112, Some(0), Now, 1, 10),
            // With all given back the block stays, and its time binds.
            (Block, 9, 113, Some(0), Now, 0, 9), (Release("a"), 0, 114, Some(0), Now, 0, 8), (Acquire, 3, 104, None, AfterUs(18), 0, 18),
            (Acquire, 3, 103, None, AfterUs(8), 0, 8), (Acquire, 3, 111, Some(3), Now, 0, 10),
        ]);
        let mut o = Oracle::new(permits(1, 10));
        o.count_overage();
        let calls = [o.hold("a", 1, 100), o.hold("b", 1, 101), o.hold("b", 2, 102), o.hold("a", 1, 103)];
        assert_eq!(calls.map(|a| a.overage), [0, 1, 2, 2]);
    }

    #[test]
    fn a_penalty_is_bounded() {
        let mut o = Oracle::new(permits(3, 10));
        let _taken = o.hold("a", 2, 100);
        let _taken = o.penalty(u64::MAX, 100);
        assert_eq!(level(&o, 100), 3 - 20_000);
        assert_eq!(o.penalty(1, 105), o.penalty_by("b", 9, 105));
        assert_eq!((level(&o, 105), o.renew("b", 105)), (3 - 20_000, None));
        let _released = o.release("a", 105);
        let _taken = o.penalty_by("b", 9, 105);
        assert_eq!(level(&o, 105), 3 - 20_000);
        // Above what a penalty may come to, there is no room.
        let mut o = Oracle::new(permits(30_000, 10));
        assert!(o.acquire(25_000, 100).allowed && o.penalty(1, 100).remaining == 5_000);
    }

    #[test]
    #[should_panic(expected = "by an id")]
    fn a_caller_cannot_give_back_permits_of_another() {
        let _panics = Oracle::new(permits(3, 10)).refund(1, 100);
    }

    #[test]
    #[should_panic(expected = "no debt")]
    fn permits_are_not_lent_on_credit() {
        let _panics = Oracle::new(permits(3, 10)).reserve(1, 100);
    }
}
