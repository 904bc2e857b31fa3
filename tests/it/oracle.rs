//! The test oracle: what every script should answer, from the definitions alone.
//!
//! Each algorithm is one question, "how much counts as used at time t, if nobody calls until
//! then?" (`Rule::used`), and how a taking or a refund alters that (`Rule::take`, `Rule::give`;
//! of permits, `hold` and its like). All else is shared and follows from the answer: a call is
//! allowed if its cost fits beside what is used and the key isn't blocked, and a wait ends at the
//! first tick at which it fits. Waits are searched, not computed, so no closed formula of a script
//! is repeated here. Searching is sound because usage never grows by itself.
//!
//! Whole numbers only (`i128`), so nothing overflows and nothing is rounded by accident.

// `pub` is what a test may call; the rest is how the answer is found.
#![allow(unreachable_pub)]

mod block;
pub mod calendar;
mod change;
mod permits;
mod rule;

pub use change::Change;

use calendar::Window;
use rule::{Kind, Rule, State, floor_to, u64_of};

/// Where a fixed window begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// Windows begin at this offset from the epoch (microseconds) plus any multiple of the period.
    At(u64),
    /// A window begins at the taking that finds the key at capacity.
    FirstHit,
}

/// A rule's algorithm and numbers. A tick must divide the period, after reduction by the gcd of
/// rate and period for the two buckets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[rustfmt::skip]
pub enum Spec {
    TokenBucket { rate: u64, period_us: u64, capacity: u64, max_debt: u64, tick_us: u64 },
    Gcra { rate: u64, period_us: u64, capacity: u64, max_debt: u64, tick_us: u64 },
    FixedWindow { rate: u64, period_us: u64, capacity: u64, max_debt: u64, start: Start },
    CalendarWindow { limit: u64, window: Window, zone: chrono_tz::Tz },
    SlidingWindow { limit: u64, period_us: u64, tick_us: u64 },
    SlidingLog { limit: u64, period_us: u64 },
    Concurrency { limit: u64, ttl_us: u64 },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retry {
    Now,
    AfterUs(u64),
    Never,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    pub allowed: bool,
    pub limit: u64,
    pub remaining: u64,
    pub retry: Retry,
    pub reset_after_us: u64,
    /// Whether the key is blocked after the call.
    pub blocked: bool,
    /// Denials counted since the first of them, this one included.
    pub overage: u64,
}

/// One key under one rule.
#[derive(Clone, Debug)]
pub struct Oracle {
    spec: Spec,
    on_change: Change,
    /// A change of the rule writes nothing, it is worked out anew from here by each call until one
    /// writes.
    written: Option<Written>,
    counts_denials: bool,
    /// How long a denial blocks the key.
    block_for: Option<u64>,
    /// When calls were denied, as far as that is counted: forgotten all at once (`denials`).
    denied: Vec<u64>,
}

/// What a call wrote last.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Written {
    /// The numbers that it was written under.
    spec: Spec,
    state: State,
    /// The block's end, in microseconds whatever the tick. Without a block it is past: 0.
    until: i128,
}

/// The key as one call finds it: the rule's change applied, the clock settled.
struct Found {
    state: State,
    /// The instant that counts as now for usage, on a tick.
    at: i128,
    /// The block's end, as in `Written`. It is held against the call's own time, not against `at`.
    until: i128,
    /// Not what is written: the state lay too far ahead and was moved to now, or the call altered it.
    altered: bool,
}

#[rustfmt::skip]
impl Oracle {
    pub fn new(spec: Spec) -> Self {
        let _checked = Rule::of(spec);
        Oracle { spec, on_change: Change::KeepUsed, written: None, counts_denials: false, block_for: None, denied: Vec::new() }
    }

    /// From now on denials are counted.
    pub fn count_denials(&mut self) {
        self.counts_denials = true;
    }

    /// Takes `cost` if it fits. A denied call or one of cost 0 writes nothing, but for the rebase.
    pub fn acquire(&mut self, cost: u64, now_us: u64) -> Answer {
        let rule = Rule::of(self.spec);
        let mut found = self.find(now_us);
        let retry = rule.retry(&found, cost, rule.capacity, now_us);
        let retry = self.wait_or_block(&mut found, retry, now_us);
        if retry == Retry::Now {
            rule.charge(&mut found, rule.in_parts(cost), now_us);
        }
        self.close(&found, retry == Retry::Now, retry, now_us)
    }

    /// Allowed and retry as `acquire` would answer, the rest about the untouched key.
    pub fn peek(&self, cost: u64, now_us: u64) -> Answer {
        let rule = Rule::of(self.spec);
        let found = self.find(now_us);
        let retry = found.unblocked(rule.retry(&found, cost, rule.capacity, now_us), now_us);
        self.answer(&found, retry == Retry::Now, retry, now_us)
    }

    /// Takes `cost` now, on credit if need be: up to `max_debt` more than there is. If allowed,
    /// retry is the wait until the debt is paid, else until the same reservation is allowed.
    pub fn reserve(&mut self, cost: u64, now_us: u64) -> Answer {
        let rule = Rule::of(self.spec);
        assert!(matches!(rule.kind, Kind::Bucket | Kind::Window), "counts and permits know no debt");
        let mut found = self.find(now_us);
        let retry = rule.retry(&found, cost, rule.capacity + rule.debt, now_us);
        let mut retry = self.wait_or_block(&mut found, retry, now_us);
        let allowed = retry == Retry::Now;
        if allowed && cost > 0 {
            // As taken at `at` itself, so that a wait is that of an acquire of the same cost.
            let owed = rule.take(&found.state, rule.in_parts(cost), found.at, found.at);
            retry = rule.wait(&found, now_us, |t| rule.used(&owed, t) <= rule.capacity * rule.parts());
            rule.charge(&mut found, rule.in_parts(cost), now_us);
        }
        self.close(&found, allowed, retry, now_us)
    }

    /// Takes what there is of `cost`, and says how much. If there is nothing, one unit is denied.
    pub fn at_most(&mut self, cost: u64, now_us: u64) -> (Answer, u64) {
        let granted = cost.min(self.peek(0, now_us).remaining);
        (self.acquire(granted.max(cost.min(1)), now_us), granted)
    }

    /// Gives units back, never above full.
    pub fn refund(&mut self, cost: u64, now_us: u64) -> Answer {
        let rule = Rule::of(self.spec);
        assert!(rule.kind != Kind::Permits, "permits are given back by an id");
        let mut found = self.find(now_us);
        if let Some(state) = rule.give(&found.state, rule.in_parts(cost), found.at) {
            (found.state, found.altered) = (state, true);
            if found.is_blocked(now_us) {
                found.touch(&rule);
            }
        }
        self.close(&found, true, Retry::Now, now_us)
    }

    /// Takes `cost` whether it is there or not, as far as it can be counted (`Rule::room`).
    pub fn penalty(&mut self, cost: u64, now_us: u64) -> Answer {
        let rule = Rule::of(self.spec);
        let mut found = self.find(now_us);
        let parts = rule.in_parts(cost).min(rule.room(&found));
        rule.charge(&mut found, parts, now_us);
        self.close(&found, true, Retry::Now, now_us)
    }

    /// Forgets the key.
    pub fn reset(&mut self) -> Answer {
        self.written = None;
        self.denied.clear();
        self.peek(0, 0)
    }

    /// New numbers for the same algorithm; what becomes of the state is `on_change`'s.
    pub fn change(&mut self, spec: Spec) {
        let same = std::mem::discriminant(&spec) == std::mem::discriminant(&self.spec);
        assert!(same, "a change keeps the algorithm");
        let _checked = Rule::of(spec);
        self.spec = spec;
    }

    /// Writes what the call altered and counts its denial, and answers.
    fn close(&mut self, found: &Found, allowed: bool, retry: Retry, now_us: u64) -> Answer {
        if found.altered {
            if self.denials(now_us) == 0 { self.denied.clear() }
            // A block that is over isn't written again.
            let until = if found.is_blocked(now_us) { found.until } else { 0 };
            self.written = Some(Written { spec: self.spec, state: found.state.clone(), until });
        }
        if self.counts_denials && !allowed {
            if self.denials(now_us) == 0 { self.denied.clear() }
            self.denied.push(now_us);
            // Counting writes beside the state, where a block that is over is left out too.
            if let (false, Some(written)) = (found.is_blocked(now_us), &mut self.written) {
                written.until = 0;
            }
            // Even where so short a memory has forgotten it by the next call.
            return Answer { overage: self.denied.len() as u64, ..self.answer(found, allowed, retry, now_us) };
        }
        self.answer(found, allowed, retry, now_us)
    }

    fn answer(&self, found: &Found, allowed: bool, retry: Retry, now_us: u64) -> Answer {
        let (rule, Found { state, at, .. }) = (Rule::of(self.spec), found);
        let own_reset = if rule.used(state, *at) == 0 {
            0
        } else {
            rule.first(*at, |t| rule.used(state, t) == 0) - i128::from(now_us)
        };
        let blocked = found.is_blocked(now_us);
        Answer {
            allowed,
            limit: u64_of(rule.capacity),
            remaining: if blocked { 0 } else { u64_of(rule.free(state, *at)) },
            retry,
            reset_after_us: u64_of(own_reset).max(found.blocked_for(now_us)),
            blocked,
            overage: self.denials(now_us),
        }
    }

    /// Denials counted so far: since the first of them, and for as long as usage could last.
    fn denials(&self, now_us: u64) -> u64 {
        let rule = Rule::of(self.spec);
        let longest = rule.longest();
        match self.denied.first() {
            // In the window of now alone.
            Some(&first) if rule.kind == Kind::Calendar => {
                let counts = first <= now_us && i128::from(first) >= rule.window_at(now_us.into());
                if counts { self.denied.len() as u64 } else { 0 }
            }
            Some(&first) if now_us >= first && i128::from(now_us - first) < longest => self.denied.len() as u64,
            _ => 0,
        }
    }

    /// First the change of numbers, at the state's own time; then the clock.
    fn find(&self, now_us: u64) -> Found {
        let rule = Rule::of(self.spec);
        let at = floor_to(now_us.into(), rule.tick);
        let unused = Found { state: rule.place(0, at), at, until: 0, altered: false };
        let Some(Written { spec, state, until }) = &self.written else { return unused };
        let old = Rule::of(*spec);
        let is_known = !rule.is_beyond_the_windows(&old, state.time(), at);
        let state = if is_known { rule.convert(&old, state, self.on_change) } else { state.clone() };
        let (time, until) = (state.time(), *until);
        if rule.used(&state, time) == 0 && until <= now_us.into() {
            // The same as no state: its time must not bind anybody.
            unused
        } else if rule.is_far_ahead(time, at) {
            let gap = time - at;
            Found { state: rule.rebased(&state, at), at, until: until - gap, altered: true }
        } else {
            Found { state, at: at.max(time), until, altered: false }
        }
    }
}

#[cfg(test)]
#[rustfmt::skip]
mod tests {
    use super::rule::*;
    use super::*;
    use Retry::{AfterUs, Never, Now};

    /// `(cost, now, retry, remaining, reset_after)` of successive acquires.
    pub(super) fn table(oracle: &mut Oracle, rows: &[(u64, u64, Retry, u64, u64)]) {
        for &(cost, now, retry, remaining, reset_after_us) in rows {
            let a = oracle.acquire(cost, now);
            let got = (a.retry, a.remaining, a.reset_after_us);
            assert_eq!(got, (retry, remaining, reset_after_us), "{cost} at {now}: {oracle:?}");
            assert_eq!(a.allowed, retry == Now);
        }
    }

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(super) enum Call {
        Acquire,
        Reserve,
        AtMost,
        Refund,
        Penalty,
        /// For as many microseconds as the cost.
        Block,
        Hold(&'static str),
        /// Of permits that are held.
        Renew(&'static str),
        Release(&'static str),
        GiveBack(&'static str),
        PenaltyBy(&'static str),
    }
    use Call::{Acquire, AtMost, Block, GiveBack, Hold, Penalty, PenaltyBy, Refund, Release, Renew, Reserve};

    impl Call {
        /// The answer, and the units taken.
        pub(super) fn on(self, o: &mut Oracle, cost: u64, now: u64) -> (Answer, u64) {
            let before = level(o, now);
            let (a, at_most) = match self {
                Acquire => (o.acquire(cost, now), cost),
                Reserve => (o.reserve(cost, now), cost),
                AtMost => o.at_most(cost, now),
                Refund => (o.refund(cost, now), 0),
                Penalty => (o.penalty(cost, now), cost),
                Block => (o.block(cost, now), 0),
                // Nothing if the id had it already.
                Hold(id) => (o.hold(id, cost, now), u64_of(before - level(o, now))),
                Renew(id) => (o.renew(id, now).expect("held"), 0),
                Release(id) => (o.release(id, now), 0),
                GiveBack(id) => (o.give_back(id, cost, now), 0),
                PenaltyBy(id) => (o.penalty_by(id, cost, now), cost),
            };
            (a, if a.allowed { at_most } else { 0 })
        }
    }

    /// Call, cost, now; units taken if allowed, retry, remaining, reset_after.
    pub(super) type Row = (Call, u64, u64, Option<u64>, Retry, u64, u64);

    pub(super) fn calls(oracle: &mut Oracle, rows: &[Row]) {
        for &(call, cost, now, taken, retry, remaining, reset_after_us) in rows {
            let (a, units) = call.on(oracle, cost, now);
            let got = (a.allowed.then_some(units), a.retry, a.remaining, a.reset_after_us);
            let expected = (taken, retry, remaining, reset_after_us);
            assert_eq!(got, expected, "{call:?} {cost} at {now}: {oracle:?}");
            assert_eq!(a.blocked, !oracle.peek(0, now).allowed, "{call:?} {cost} at {now}: {oracle:?}");
        }
    }

    /// Capacity minus used, in parts.
    pub(super) fn level(o: &Oracle, now: u64) -> i128 {
        let (rule, found) = (Rule::of(o.spec), o.find(now));
        rule.capacity * rule.parts() - rule.used(&found.state, found.at)
    }

    pub(super) fn bucket(rate: u64, period_us: u64, capacity: u64, tick_us: u64) -> Spec {
        Spec::TokenBucket { rate, period_us, capacity, max_debt: 0, tick_us }
    }

    pub(super) fn window(rate: u64, period_us: u64, capacity: u64, start: Start) -> Spec {
        Spec::FixedWindow { rate, period_us, capacity, max_debt: 0, start }
    }

    #[test]
    fn bucket_by_hand() {
        // 2 units in 20 us is 1 in 10; capacity 3: empty to full in 30.
        let mut o = Oracle::new(bucket(2, 20, 3, 1));
        table(&mut o, &[
            (0, 90, Now, 3, 0), (4, 95, Never, 3, 0),
            (2, 100, Now, 1, 20), (2, 105, AfterUs(5), 1, 15), (2, 110, Now, 0, 30),
            // The clock steps back: within 30 the state's time counts as now ...
            (1, 80, AfterUs(40), 0, 60),
            // ... and further back the usage moves to now.
            (1, 79, AfterUs(10), 0, 30), (1, 89, Now, 0, 30),
        ]);
        let new = Answer { allowed: true, limit: 3, remaining: 3, retry: Now, reset_after_us: 0, blocked: false, overage: 0 };
        assert_eq!(o.peek(1, 95), Answer { allowed: false, remaining: 0, retry: AfterUs(4), reset_after_us: 24, ..new });
        assert_eq!(o.reset(), new);
        table(&mut o, &[(3, 0, Now, 0, 30)]);
        // Ticks of 5: half a unit each. Full at 7, so the taking is dated to 10.
        let mut o = Oracle::new(bucket(1, 10, 2, 5));
        table(&mut o, &[(1, 7, Now, 1, 13), (1, 8, Now, 0, 22), (1, 19, AfterUs(1), 0, 11), (1, 20, Now, 0, 20)]);
        // One and a half used at 27: not nearly full, so dated to 25.
        table(&mut o, &[(0, 31, Now, 1, 9), (1, 31, Now, 0, 19)]);
    }

    #[test]
    fn fixed_window_by_hand() {
        // Boundaries at ..., 3, 13, 23, ...; 2 come back at each, up to 5.
        let mut o = Oracle::new(window(2, 10, 5, Start::At(23)));
        table(&mut o, &[
            (5, 1, Now, 0, 22), (1, 2, AfterUs(1), 0, 21), (4, 3, AfterUs(10), 2, 20),
            (4, 13, Now, 0, 30), (6, 13, Never, 0, 30), (0, 42, Now, 4, 1), (0, 43, Now, 5, 0),
        ]);
        let mut o = Oracle::new(window(2, 10, 3, Start::FirstHit));
        table(&mut o, &[
            // Empty at 4; two come at 14 and the third at 24; from then on a taking starts a window.
            (3, 4, Now, 0, 20), (1, 13, AfterUs(1), 0, 11), (1, 15, Now, 1, 9),
            (1, 27, Now, 2, 10), (3, 36, AfterUs(1), 2, 1), (3, 37, Now, 0, 20),
        ]);
    }

    #[test]
    fn sliding_by_hand() {
        let mut o = Oracle::new(Spec::SlidingWindow { limit: 4, period_us: 10, tick_us: 1 });
        table(&mut o, &[
            // Four in the window [10, 20) weigh floor(4 * (10 - e) / 10) in the next: 3 from e = 1.
            (4, 15, Now, 0, 13), (1, 20, AfterUs(1), 0, 8), (2, 21, AfterUs(2), 1, 7),
            (2, 23, Now, 0, 13), (5, 23, Never, 0, 13), (0, 35, Now, 3, 1), (0, 36, Now, 4, 0),
        ]);
        // Ticks of 5: the count moves at 25 only.
        let mut o = Oracle::new(Spec::SlidingWindow { limit: 4, period_us: 10, tick_us: 5 });
        table(&mut o, &[(4, 17, Now, 0, 13), (1, 23, AfterUs(2), 0, 7), (1, 26, Now, 1, 9)]);

        let mut o = Oracle::new(Spec::SlidingLog { limit: 4, period_us: 10 });
        table(&mut o, &[
            (1, 1, Now, 3, 10), (2, 3, Now, 1, 10), (3, 5, AfterUs(8), 1, 8), (2, 10, AfterUs(1), 1, 3),
            (2, 11, Now, 0, 10), (1, 12, AfterUs(1), 0, 9), (1, 1, AfterUs(12), 0, 20), (1, 0, AfterUs(10), 0, 10),
        ]);
    }

    #[test]
    fn changes_by_hand() {
        // Two of three used at 100. Then 1 in 5, up to 6: still two used at 100.
        let mut o = Oracle::new(bucket(1, 10, 3, 1));
        table(&mut o, &[(2, 100, Now, 1, 20)]);
        o.change(bucket(1, 5, 6, 1));
        table(&mut o, &[(6, 103, AfterUs(7), 4, 7)]);
        // The denial wrote nothing, so the next change counts from the first numbers: capped to 1.
        o.change(bucket(1, 20, 1, 1));
        table(&mut o, &[(1, 103, AfterUs(17), 0, 17)]);
        // A debt stays a debt, within the new bound: 5 of 3 used become 4, of 2 and 2.
        let mut o = Oracle::new(Spec::Gcra { rate: 1, period_us: 10, capacity: 3, max_debt: 2, tick_us: 1 });
        o.written = Some(Written { spec: o.spec, state: State::Bucket { used: 50, time: 100 }, until: 0 });
        table(&mut o, &[(0, 100, Now, 0, 50), (1, 100, AfterUs(30), 0, 50)]);
        o.change(Spec::Gcra { rate: 1, period_us: 10, capacity: 2, max_debt: 2, tick_us: 1 });
        table(&mut o, &[(1, 100, AfterUs(30), 0, 40)]);
        // 7 tenths used are 2.1 thirds, counted as 3; 101 is ceiled to 102.
        let mut o = Oracle::new(bucket(1, 10, 3, 1));
        table(&mut o, &[(1, 98, Now, 2, 10)]);
        o.written = Some(Written { spec: o.spec, state: State::Bucket { used: 7, time: 101 }, until: 0 });
        o.change(bucket(1, 6, 3, 2));
        table(&mut o, &[(0, 102, Now, 2, 6)]);

        let mut o = Oracle::new(window(3, 10, 3, Start::At(0)));
        table(&mut o, &[(2, 17, Now, 1, 3)]);
        o.change(window(5, 8, 5, Start::At(4)));
        table(&mut o, &[(4, 18, AfterUs(2), 3, 2)]);
        o.change(window(3, 8, 3, Start::FirstHit));
        table(&mut o, &[(2, 18, AfterUs(7), 1, 7)]);
        o.change(window(3, 10, 3, Start::FirstHit));
        table(&mut o, &[(2, 18, AfterUs(2), 1, 2)]);

        // Three used at 15 of a limit lowered to 2: the counter caps, the log lets them expire.
        let mut o = Oracle::new(Spec::SlidingWindow { limit: 4, period_us: 10, tick_us: 1 });
        table(&mut o, &[(3, 15, Now, 1, 12)]);
        o.change(Spec::SlidingWindow { limit: 2, period_us: 10, tick_us: 1 });
        table(&mut o, &[(1, 16, AfterUs(5), 0, 10)]);
        let mut o = Oracle::new(Spec::SlidingLog { limit: 4, period_us: 10 });
        table(&mut o, &[(1, 13, Now, 3, 10), (2, 15, Now, 1, 10)]);
        o.change(Spec::SlidingLog { limit: 2, period_us: 10 });
        table(&mut o, &[(1, 16, AfterUs(9), 0, 9), (1, 23, AfterUs(2), 0, 2)]);
        o.change(Spec::SlidingLog { limit: 5, period_us: 20 });
        table(&mut o, &[(3, 23, AfterUs(12), 2, 12), (2, 23, Now, 0, 20)]);
    }

    #[test]
    fn reserve_by_hand() {
        // 1 in 10, capacity 2, debt 3: up to 5 at once.
        let spec = Spec::TokenBucket { rate: 1, period_us: 10, capacity: 2, max_debt: 3, tick_us: 1 };
        let mut o = Oracle::new(spec);
        calls(&mut o, &[
            (Reserve, 6, 100, None, Never, 2, 0), (Reserve, 0, 100, Some(0), Now, 2, 0),
            (Reserve, 2, 100, Some(2), Now, 0, 20), (Reserve, 1, 105, Some(1), AfterUs(5), 0, 25),
            (Reserve, 0, 105, Some(0), Now, 0, 25), (Acquire, 2, 105, None, AfterUs(25), 0, 25),
            // Half a unit is owed, so two can be had and not three.
            (Reserve, 3, 105, None, AfterUs(5), 0, 25), (Reserve, 2, 105, Some(2), AfterUs(25), 0, 45),
            // More than the rule's own 50 is owed; then it has to be paid back to 50 first.
            (Penalty, 4, 110, Some(4), Now, 0, 80), (Reserve, 1, 110, None, AfterUs(40), 0, 80),
            (Acquire, 1, 110, None, AfterUs(70), 0, 80), (Refund, 7, 110, Some(0), Now, 1, 10),
        ]);
        // More than capacity from full: the debt of 2 is paid after 20, whatever a full bucket holds.
        let mut o = Oracle::new(spec);
        calls(&mut o, &[(Reserve, 4, 100, Some(4), AfterUs(20), 0, 40)]);
        // Ticks of 5, nearly full at 7: the debt is dated to 10, the wait counts from 5.
        let mut o = Oracle::new(Spec::Gcra { rate: 1, period_us: 10, capacity: 1, max_debt: 1, tick_us: 5 });
        calls(&mut o, &[(Reserve, 2, 7, Some(2), AfterUs(8), 0, 23), (Reserve, 1, 8, None, AfterUs(12), 0, 22)]);
        // Capacity 0: one every 10.
        let mut o = Oracle::new(Spec::Gcra { rate: 1, period_us: 10, capacity: 0, max_debt: 2, tick_us: 1 });
        calls(&mut o, &[
            (Reserve, 1, 100, Some(1), AfterUs(10), 0, 10), (Reserve, 1, 100, Some(1), AfterUs(20), 0, 20),
            (Reserve, 1, 100, None, AfterUs(10), 0, 20), (AtMost, 1, 100, None, Never, 0, 20),
            // Back by the longest reset, 20, the clock stands still; further back, the debt moves.
            (Reserve, 1, 80, None, AfterUs(30), 0, 40), (Reserve, 1, 79, None, AfterUs(10), 0, 20),
            (Reserve, 1, 89, Some(1), AfterUs(20), 0, 20),
        ]);
        // A window from the reservation at 4 on, 2 at each boundary.
        let mut o = Oracle::new(Spec::FixedWindow { rate: 2, period_us: 10, capacity: 3, max_debt: 4, start: Start::FirstHit });
        calls(&mut o, &[
            (Reserve, 4, 4, Some(4), AfterUs(10), 0, 20), (Reserve, 4, 13, None, AfterUs(1), 0, 11),
            (Reserve, 3, 13, Some(3), AfterUs(11), 0, 31), (Penalty, 1, 14, Some(1), Now, 0, 30),
        ]);
    }

    #[test]
    fn at_most_by_hand() {
        let mut o = Oracle::new(bucket(2, 20, 3, 1));
        calls(&mut o, &[
            (AtMost, 0, 100, Some(0), Now, 3, 0), (AtMost, 2, 100, Some(2), Now, 1, 20),
            (AtMost, 9, 105, Some(1), Now, 0, 25), (AtMost, 9, 106, None, AfterUs(4), 0, 24),
            (AtMost, 0, 106, Some(0), Now, 0, 24), (AtMost, 9, 120, Some(2), Now, 0, 30),
        ]);
        for mut o in [
            Oracle::new(Spec::SlidingWindow { limit: 0, period_us: 10, tick_us: 1 }),
            Oracle::new(Spec::SlidingLog { limit: 0, period_us: 10 }),
        ] {
            calls(&mut o, &[(AtMost, 2, 100, None, Never, 0, 0), (AtMost, 0, 100, Some(0), Now, 0, 0)]);
        }
    }

    #[test]
    fn refund_by_hand() {
        let mut o = Oracle::new(bucket(1, 10, 3, 1));
        calls(&mut o, &[
            (Refund, 1, 100, Some(0), Now, 3, 0), (Acquire, 3, 100, Some(3), Now, 0, 30),
            (Refund, 1, 115, Some(0), Now, 2, 5), (Refund, 0, 118, Some(0), Now, 2, 2),
            // Written at 115: at 110 the refund waits for it, and is itself written there.
            (Acquire, 1, 110, Some(1), Now, 1, 20), (Refund, 9, 110, Some(0), Now, 3, 0),
        ]);
        assert_eq!(o.find(0).at, 0, "a full key's time binds nobody");
        // A refund is not dated to the next tick.
        let mut o = Oracle::new(bucket(3, 20, 6, 20));
        calls(&mut o, &[(Acquire, 6, 20, Some(6), Now, 0, 40), (Refund, 1, 45, Some(0), Now, 4, 15)]);

        let mut o = Oracle::new(window(2, 10, 5, Start::At(23)));
        calls(&mut o, &[(Acquire, 5, 1, Some(5), Now, 0, 22), (Refund, 1, 4, Some(0), Now, 3, 9), (Refund, 9, 5, Some(0), Now, 5, 0)]);
        let mut o = Oracle::new(window(2, 10, 5, Start::FirstHit));
        calls(&mut o, &[(Acquire, 5, 1, Some(5), Now, 0, 30), (Refund, 1, 14, Some(0), Now, 3, 7), (Refund, 9, 15, Some(0), Now, 5, 0)]);

        // Four of the window before weigh 2 at 24; of 3 given back one is of this window.
        let mut o = Oracle::new(Spec::SlidingWindow { limit: 4, period_us: 10, tick_us: 1 });
        calls(&mut o, &[
            (Acquire, 4, 15, Some(4), Now, 0, 13), (Acquire, 1, 24, Some(1), Now, 1, 7),
            (Refund, 3, 24, Some(0), Now, 3, 2), (Refund, 3, 26, Some(0), Now, 4, 0),
        ]);

        let mut o = Oracle::new(Spec::SlidingLog { limit: 6, period_us: 10 });
        calls(&mut o, &[
            (Acquire, 2, 1, Some(2), Now, 4, 10), (Acquire, 2, 5, Some(2), Now, 2, 10), (Acquire, 2, 8, Some(2), Now, 0, 10),
            // Those of 8, and one of those of 5, which is then the newest.
            // Its time is 9 all the same, so that at 6 it counts as 9.
            (Refund, 3, 9, Some(0), Now, 3, 6), (Acquire, 1, 6, Some(1), Now, 2, 13), (Refund, 1, 6, Some(0), Now, 3, 9),
            // Those of 1 are gone, so one is left to give.
            (Refund, 3, 11, Some(0), Now, 6, 0),
        ]);
        assert_eq!(o.find(0).at, 0);
    }

    #[test]
    fn penalty_by_hand() {
        let deep = Spec::TokenBucket { rate: 1, period_us: 10, capacity: 2, max_debt: 0, tick_us: 1 };
        let mut o = Oracle::new(deep);
        calls(&mut o, &[
            (Penalty, 0, 100, Some(0), Now, 2, 0), (Penalty, 5, 100, Some(5), Now, 0, 50),
            (Acquire, 1, 100, None, AfterUs(40), 0, 50), (Acquire, 1, 140, Some(1), Now, 0, 20),
            (Penalty, 5, 150, Some(5), Now, 0, 60),
            // The rule's longest reset, 20, is still what bounds a step back; the usage moves whole.
            (AtMost, 1, 130, None, AfterUs(70), 0, 80), (AtMost, 1, 129, None, AfterUs(50), 0, 60),
        ]);
        // Numbers unchanged, even if written otherwise, leave the depth; a change caps it.
        o.change(bucket(2, 20, 2, 1));
        calls(&mut o, &[(Refund, 0, 129, Some(0), Now, 0, 60)]);
        o.change(bucket(1, 5, 3, 1));
        calls(&mut o, &[(Refund, 0, 129, Some(0), Now, 0, 15)]);
        o.change(Spec::TokenBucket { rate: 1, period_us: 10, capacity: 2, max_debt: 1, tick_us: 1 });
        // What debt is allowed is no part of a state.
        calls(&mut o, &[(Refund, 0, 129, Some(0), Now, 0, 60)]);
        // Ticks of 5, full at 7: dated to 10, as a taking.
        let mut o = Oracle::new(bucket(1, 10, 2, 5));
        calls(&mut o, &[(Penalty, 3, 7, Some(3), Now, 0, 33)]);

        let mut o = Oracle::new(window(2, 10, 2, Start::At(0)));
        calls(&mut o, &[(Penalty, 7, 15, Some(7), Now, 0, 35), (Acquire, 1, 15, None, AfterUs(25), 0, 35), (Acquire, 1, 40, Some(1), Now, 0, 10)]);
        // Six weigh 6, 5.4, ...: under four from 24 on; and a refund takes from the raw six.
        let mut o = Oracle::new(Spec::SlidingWindow { limit: 4, period_us: 10, tick_us: 1 });
        calls(&mut o, &[(Penalty, 6, 15, Some(6), Now, 0, 14), (Acquire, 1, 16, None, AfterUs(8), 0, 13), (Refund, 5, 22, Some(0), Now, 4, 0)]);
        let mut o = Oracle::new(Spec::SlidingLog { limit: 4, period_us: 10 });
        calls(&mut o, &[(Penalty, 6, 15, Some(6), Now, 0, 10), (Acquire, 1, 16, None, AfterUs(9), 0, 9), (Refund, 3, 16, Some(0), Now, 1, 9)]);
        // Moved back to now, a count is within its limit again (`Rule::place`), even by a refund of nothing.
        calls(&mut o, &[(Penalty, 6, 17, Some(6), Now, 0, 10), (Refund, 0, 6, Some(0), Now, 0, 10), (Refund, 1, 7, Some(0), Now, 1, 9)]);
    }

    /// A penalty of more than can be counted takes what can be: the numbers are worked out by hand.
    #[test]
    fn penalty_is_bounded() {
        let (two, used) = (2i128, |o: &Oracle| {
            let found = o.find(0);
            Rule::of(o.spec).used(&found.state, found.at)
        });
        for (spec, most) in [
            // 3 parts a unit: 2^51 is no multiple of 3, 2^51 - 2 is.
            (bucket(1, 3, 1, 1), two.pow(51) - 2),
            (Spec::Gcra { rate: 7, period_us: 3, capacity: 1, max_debt: 0, tick_us: 1 }, two.pow(53) - 2),
            // 2^51 * 2 / 3 is 1501199875790165 and a third, an odd number of halves.
            (bucket(2, 3, 1, 3), 1_501_199_875_790_165),
            (bucket(2, 9, 1, 3), 1_501_199_875_790_163),
            (window(7, 1, 7, Start::At(0)), two.pow(53) - 7),
            (window(5, 1000, 7, Start::FirstHit), 2_251_799_813_685 * 5),
            (Spec::SlidingWindow { limit: 1, period_us: 10, tick_us: 5 }, two.pow(52) - 1),
            (Spec::SlidingWindow { limit: 1, period_us: 3, tick_us: 1 }, 3_002_399_751_580_329),
            (Spec::SlidingLog { limit: 1, period_us: 3 }, two.pow(39)),
        ] {
            let mut o = Oracle::new(spec);
            let _ = (o.penalty(1, 0), o.penalty(u64::MAX, 0));
            assert_eq!(used(&o), most, "{spec:?}");
            let a = o.acquire(1, 0);
            assert!(matches!(a.retry, AfterUs(_)), "{spec:?}: {a:?}");
            assert_eq!(a, Answer { allowed: false, retry: a.retry, ..o.penalty(9, 0) });
            assert_eq!(used(&o), most, "{spec:?}");
            assert_eq!(o.refund(u64::MAX, 0), Oracle::new(spec).peek(0, 0));
        }
    }

    #[test]
    fn overage_by_hand() {
        // One in 10, which is also how long denials are remembered: 101 until 111.
        let mut o = Oracle::new(bucket(1, 10, 1, 1));
        calls(&mut o, &[(Acquire, 1, 100, Some(1), Now, 0, 10), (Acquire, 1, 100, None, AfterUs(10), 0, 10)]);
        assert_eq!(o.peek(0, 100).overage, 0, "off");
        o.count_denials();
        for (call, cost, now, allowed, overage) in [
            (Acquire, 1, 101, false, 1), (Reserve, 1, 101, false, 2), (AtMost, 1, 102, false, 3), (Acquire, 2, 103, false, 4),
            (Refund, 0, 104, true, 4), (Acquire, 1, 110, true, 4), (Refund, 0, 111, true, 0),
            // Nothing was written: the clock steps back to where they count. Before the first they don't.
            (Refund, 0, 110, true, 4), (Refund, 0, 100, true, 0), (Refund, 0, 101, true, 4),
            (Acquire, 1, 112, false, 1), (Acquire, 1, 111, false, 1), (Acquire, 1, 112, false, 2),
            // A block's denials count, the block doesn't.
            (Block, 9, 112, true, 2), (Acquire, 0, 113, false, 3), (Block, 0, 113, true, 3),
        ] {
            let (a, _) = call.on(&mut o, cost, now);
            assert_eq!((a.allowed, a.overage), (allowed, overage), "{call:?} {cost} at {now}: {o:?}");
            assert_eq!(o.peek(9, now).overage, overage, "a peek isn't counted");
        }
        // As long as the rule's longest reset of now: 3 is 1 too many for those of 111 at 114.
        o.change(bucket(1, 3, 1, 1));
        assert_eq!((o.peek(0, 113).overage, o.peek(0, 114).overage), (3, 0));
        assert_eq!((o.reset().overage, o.peek(0, 113).overage), (0, 0));
        // Nothing lasts, so a denial counts itself only.
        let mut o = Oracle::new(bucket(1, 10, 0, 1));
        o.count_denials();
        assert_eq!([o.acquire(1, 5).overage, o.acquire(1, 5).overage, o.peek(1, 5).overage], [1, 1, 0]);
        // A key that was never used is none for having been denied.
        let mut o = Oracle::new(bucket(1, 10, 1, 1));
        o.count_denials();
        assert_eq!((o.acquire(2, 100).overage, o.find(0).at), (1, 0));
        table(&mut o, &[(1, 50, Now, 0, 10)]);
    }

    #[test]
    fn vectors() {
        const MINUTE: u64 = 60_000_000;
        // iv-08
        let mut o = Oracle::new(window(10, MINUTE, 10, Start::At(0)));
        calls(&mut o, &[
            (Acquire, 5, 0, Some(5), Now, 5, MINUTE), (Acquire, 6, MINUTE, Some(6), Now, 4, MINUTE),
            (Acquire, 10, MINUTE, None, AfterUs(MINUTE), 4, MINUTE),
        ]);
        // iv-09
        let mut o = Oracle::new(Spec::FixedWindow { rate: 10, period_us: MINUTE, capacity: 10, max_debt: 11, start: Start::At(0) });
        for (call, cost, now, left, retry) in [
            (Acquire, 5, 0, 5, Now), (Reserve, 16, MINUTE, -6, AfterUs(MINUTE)), (Reserve, 5, MINUTE / 2 * 3, -11, AfterUs(MINUTE / 2 * 3)),
        ] {
            let (a, _) = call.on(&mut o, cost, now);
            assert_eq!((a.allowed, a.retry, level(&o, now)), (true, retry, left));
        }
        // tb-30
        let mut o = Oracle::new(bucket(10, 30_000_000, 10, 1));
        for (call, cost, remaining) in [(Acquire, 1, 9), (Refund, 1, 10), (Acquire, 10, 0), (Refund, 1, 1)] {
            let (a, _) = call.on(&mut o, cost, 0);
            assert_eq!((a.allowed, a.remaining), (true, remaining));
        }
        // fw-12, for every algorithm.
        let two_days = 2880 * MINUTE;
        for spec in [
            bucket(10, two_days, 10, 1),
            Spec::Gcra { rate: 10, period_us: two_days, capacity: 10, max_debt: 0, tick_us: 1 },
            window(10, two_days, 10, Start::At(0)),
            Spec::SlidingWindow { limit: 10, period_us: two_days, tick_us: 1 },
            Spec::SlidingLog { limit: 10, period_us: two_days },
        ] {
            let mut o = Oracle::new(spec);
            for (call, cost, remaining) in [(Acquire, 8, 2), (Refund, 2, 4), (Refund, 3, 7), (Acquire, 5, 2), (Acquire, 2, 0), (Refund, 3, 3)] {
                let (a, _) = call.on(&mut o, cost, 0);
                assert_eq!((a.allowed, a.remaining), (true, remaining), "{spec:?}");
            }
        }
    }

    /// A linear congruential generator, so that the loop below repeats exactly.
    pub(super) struct Random(pub(super) u64);

    impl Random {
        pub(super) fn below(&mut self, n: u64) -> u64 {
            self.0 = self
                .0
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 33) % n
        }

        pub(super) fn spec(&mut self, algorithm: u64) -> Spec {
            let (capacity, max_debt) = (self.below(6), self.below(3));
            let (rate, period_us) = (1 + self.below(4), 1 + self.below(12));
            let reduced = period_us / gcd(rate, period_us);
            // A bucket that admits nothing resets in no time, so not even a penalty's date by a coarse
            // tick may lie ahead. There is no such rule.
            let admits = capacity + max_debt > 0 || algorithm > 1;
            let divisor = |r: &mut Self, n: u64| match 1 + r.below(n) {
                d if n.is_multiple_of(d) && admits => d,
                _ => 1,
            };
            match algorithm {
                0 => Spec::TokenBucket {
                    rate,
                    period_us,
                    capacity,
                    max_debt,
                    tick_us: divisor(self, reduced),
                },
                1 => Spec::Gcra {
                    rate,
                    period_us,
                    capacity,
                    max_debt,
                    tick_us: divisor(self, reduced),
                },
                2 => {
                    let offset = self.below(40);
                    let start = if offset < 15 { Start::FirstHit } else { Start::At(offset) };
                    Spec::FixedWindow { rate, period_us, capacity, max_debt, start }
                }
                3 => Spec::SlidingWindow {
                    limit: capacity,
                    period_us,
                    tick_us: divisor(self, period_us),
                },
                4 => Spec::SlidingLog { limit: capacity, period_us },
                _ => Spec::Concurrency { limit: capacity, ttl_us: period_us },
            }
        }
    }

    /// Without a count of denials.
    fn quiet(o: &Oracle) -> Oracle {
        Oracle { counts_denials: false, denied: Vec::new(), ..o.clone() }
    }

    /// Every answer means what it says, on any history: clocks that step back, rules that change
    /// and blocks included.
    #[test]
    fn answers_keep_their_word() {
        let mut random = Random(1);
        for round in 0..6_000 {
            let algorithm = round % 6;
            let mut o = Oracle::new(random.spec(algorithm));
            let mut now = 1000;
            // More than the rule could have lent: by a penalty, or under a larger debt.
            let mut deep = false;
            let counts_denials = random.below(2) == 0;
            if counts_denials { o.count_denials() }
            let mut denied = Vec::new();
            for _ in 0..25 {
                match random.below(18) {
                    0 => {
                        let debt = Rule::of(o.spec).debt;
                        o.change(random.spec(algorithm));
                        deep |= debt > Rule::of(o.spec).debt;
                    }
                    1 => now -= random.below(60),
                    2 => now += random.below(60),
                    3 => o.on_change([Change::KeepUsed, Change::AsIs, Change::Reset][random.below(3) as usize]),
                    _ => now += random.below(5),
                }
                let id = ["a", "b"][random.below(2) as usize];
                let call = match (random.below(13), algorithm) {
                    (0, 5) => Acquire,
                    (1..=3, 5) => Hold(id),
                    (4, 5) if o.clone().renew(id, now).is_some() => Renew(id),
                    (8, 5) => Release(id),
                    (9..=10, 5) => GiveBack(id),
                    (11, 5) => if random.below(2) == 0 { Penalty } else { PenaltyBy(id) },
                    (0..=3, _) => Acquire,
                    (4..=6, 0..3) => Reserve,
                    (4..=7, _) => AtMost,
                    (8..=10, _) => Refund,
                    (11, _) => Penalty,
                    _ => Block,
                };
                deep |= call == Penalty;
                let (cost, before, untouched) = (random.below(6), o.clone(), o.peek(0, now));
                let cost = if call == Block { random.below(4) * random.below(12) } else { cost };
                let (a, taken) = call.on(&mut o, cost, now);
                let context = format!("{call:?} {cost} at {now}: {before:?}, then {o:?}");
                let (p, found) = (before.peek(cost, now), before.find(now));
                let rule = Rule::of(o.spec);
                assert_eq!((p.remaining, p.reset_after_us), (untouched.remaining, untouched.reset_after_us));
                assert_eq!(a.blocked, !o.peek(0, now).allowed, "{context}");
                assert!(!o.peek(a.remaining + 1, now).allowed, "{context}");
                assert!(o.peek(a.remaining, now).allowed || (a.blocked && a.remaining == 0), "{context}");
                let altered = match call {
                    Block | Renew(_) | Release(_) => true,
                    _ => cost > 0 && a.allowed && (call != Refund || untouched.reset_after_us > 0),
                };
                if !altered {
                    assert_eq!((a.remaining, a.reset_after_us), (p.remaining, p.reset_after_us), "{context}");
                    // Counts may be too old to weigh anything, and still be given back.
                    // Counting a denial drops a block that is over.
                    let over = before.counts_denials && before.written.as_ref().is_some_and(|w| (1..=now.into()).contains(&w.until));
                    let raw = call == Refund && matches!(found.state, State::Counter { .. });
                    assert!(found.altered || raw || over || o.written == before.written, "{context}");
                }
                if !deep && !a.blocked {
                    let found = o.find(now);
                    let reset = i128::from(now + a.reset_after_us) - found.at;
                    assert!(a.reset_after_us == 0 || reset <= rule.longest(), "{context}");
                }
                // The first of the denials that count is at most the longest reset old.
                let live = |first: u64| now >= first && i128::from(now - first) < rule.longest();
                let remembered = denied.first().is_some_and(|&first| live(first));
                // What is too old goes with the next write.
                if !remembered && o.denied.is_empty() { denied.clear() }
                if counts_denials && !a.allowed {
                    if !remembered { denied.clear() }
                    denied.push(now);
                }
                let counted = if remembered || !a.allowed { denied.len() as u64 } else { 0 };
                assert_eq!(a.overage, counted, "{context}");
                // The call that is denied until now + retry, on the key as it was left.
                let again = match call {
                    AtMost => Acquire,
                    other => other,
                };
                let unit = if call == AtMost { cost.min(1) } else { cost };
                let is_allowed = |t| again.on(&mut o.clone(), unit, t).0.allowed;
                match (a.allowed, a.retry) {
                    (false, AfterUs(wait)) => {
                        assert!(!(now..now + wait).any(is_allowed) && is_allowed(now + wait), "{context}");
                    }
                    (false, Never) if call == Reserve => {
                        assert!(i128::from(cost) > rule.capacity + rule.debt, "{context}");
                    }
                    (false, Never) => assert!(unit > a.limit, "{context}"),
                    (true, AfterUs(_)) => assert_eq!(call, Reserve),
                    (true, Now) => {}
                    other => panic!("{other:?}: {context}"),
                }
                match call {
                    Acquire => assert_eq!((p.allowed, p.retry), (a.allowed, a.retry), "{context}"),
                    Reserve if a.allowed && cost > 0 => {
                        if cost <= a.limit {
                            assert_eq!(a.retry, p.retry, "{context}");
                        }
                        // The debt is paid when the wait is over, but for what is dated later.
                        let wait = if let AfterUs(wait) = a.retry { wait } else { 0 };
                        assert!((now..now + wait).all(|t| level(&o, t) < 0), "{context}");
                        let late = o.find(now).at - found.at;
                        assert!(level(&o, now + wait + u64_of(late)) >= 0, "{context}");
                    }
                    AtMost => assert_eq!(taken, cost.min(untouched.remaining), "{context}"),
                    Refund => {
                        let most = (untouched.remaining + cost).min(a.limit);
                        assert!((untouched.remaining..=most).contains(&a.remaining), "{context}");
                        if matches!(rule.kind, Kind::Bucket | Kind::Window) {
                            let full = rule.in_parts(a.limit);
                            let level_then = (level(&before, now) + rule.in_parts(cost)).min(full);
                            assert_eq!(level(&o, now), level_then, "{context}");
                        }
                    }
                    Penalty | PenaltyBy(_) => {
                        assert_eq!(a.remaining, untouched.remaining.saturating_sub(cost), "{context}");
                    }
                    Reserve => {}
                    Block => {
                        assert_eq!(level(&o, now), level(&before, now), "{context}");
                        assert!((now..now + cost).all(|t| !o.peek(0, t).allowed), "{context}");
                        assert!(o.peek(0, now + cost).allowed, "{context}");
                    }
                    Hold(id) if a.allowed && cost > 0 => {
                        assert!(taken == cost || taken < cost && before.clone().renew(id, now).is_some(), "{context}");
                        let renewed = o.find(now + u64_of(rule.period) - 1);
                        assert!(rule.used(&renewed.state, renewed.at) > 0, "{context}");
                    }
                    Hold(_) => assert_eq!(taken, 0, "{context}"),
                    Renew(_) => assert_eq!(level(&o, now), level(&before, now), "{context}"),
                    Release(id) => assert_eq!(o.clone().renew(id, now), None, "{context}"),
                    GiveBack(_) => {
                        let given = level(&o, now) - level(&before, now);
                        assert!((0..=i128::from(cost)).contains(&given), "{context}");
                    }
                }
                // What was taken can be given back at once, and all of it is as new, but for a block.
                let (mut back, mut all) = (o.clone(), quiet(&o));
                match call {
                    Hold(id) | PenaltyBy(id) => {
                        assert_eq!(back.give_back(id, taken, now).remaining, untouched.remaining, "{context}");
                    }
                    Refund | Block => {}
                    _ if algorithm < 5 => {
                        assert_eq!(back.refund(taken, now).remaining, untouched.remaining, "{context}");
                    }
                    _ => {}
                }
                if algorithm < 5 {
                    let mut new = Oracle::new(o.spec);
                    if a.blocked { new.block(o.find(now).blocked_for(now), now); }
                    let expected = Answer { allowed: true, retry: Now, ..new.peek(0, now) };
                    assert_eq!(all.refund(u64::MAX, now), expected, "{context}");
                }
                // One microsecond before its reset the key still answers as used, from then on as new.
                let (mut used, mut new, reset) =
                    (quiet(&o), Oracle::new(o.spec), now + a.reset_after_us);
                if a.reset_after_us > 0 {
                    assert_ne!(used.peek(0, reset - 1), new.peek(0, reset - 1), "{now}: {o:?}");
                }
                let mut t = reset;
                for _ in 0..6 {
                    let cost = random.below(5);
                    assert_eq!(used.acquire(cost, t), new.acquire(cost, t), "{now}: {o:?}");
                    t += random.below(8);
                }
            }
        }
    }

    /// Between any two takings no more than the capacity and what came back in between.
    #[test]
    fn never_over_admits() {
        let mut random = Random(2);
        for round in 0..3_000 {
            let spec = random.spec([0, 1, 4][round % 3]);
            let (rule, mut o) = (Rule::of(spec), Oracle::new(spec));
            let (mut now, mut taken) = (1000, Vec::new());
            for _ in 0..40 {
                now += random.below(4);
                let cost = random.below(3);
                let call = if random.below(4) == 0 { AtMost } else { Acquire };
                let (_, units) = call.on(&mut o, cost, now);
                taken.push((i128::from(now), i128::from(units)));
            }
            for (i, (from, _)) in taken.iter().enumerate() {
                let mut sum = 0;
                for (to, cost) in &taken[i..] {
                    sum += cost;
                    match rule.kind {
                        Kind::Log => assert!(to - from >= rule.period || sum <= rule.capacity),
                        _ => assert!(
                            sum * rule.period
                                <= rule.capacity * rule.period + rule.rate * (to - from),
                            "{spec:?}: {taken:?}"
                        ),
                    }
                }
            }
        }
    }
}
