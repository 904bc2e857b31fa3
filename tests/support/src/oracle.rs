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
mod owed;
mod permits;
mod rule;
#[rustfmt::skip]
#[cfg(test)]
mod tests;
mod versions;

pub use change::Change;
pub use owed::Taken;

use calendar::Window;
use owed::Refunds;
use rule::{Kind, Rule, State, floor_to, u64_of};
use versions::Other;

/// Where a fixed window begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// Windows begin at this offset from the epoch (microseconds) plus any multiple of the period.
    At(u64),
    /// A window begins at the taking that finds the key at capacity.
    FirstHit,
}

/// A rule's algorithm and numbers. A tick must divide the period, after reduction by the gcd of
/// rate and period for the bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[rustfmt::skip]
pub enum Spec {
    TokenBucket { rate: u64, period_us: u64, capacity: u64, max_debt: u64, tick_us: u64 },
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
    /// The same key under other numbers in force.
    other: Option<Other>,
    refunds: Refunds,
}

#[cfg(test)]
impl Written {
    fn of(spec: Spec, state: State) -> Self {
        Self { spec, state, until: 0, other: None, refunds: Refunds::default() }
    }
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
    /// Units taken by the call or, below 0, given back.
    moved: i128,
    other: Option<Other>,
    /// Whether another version wrote after this one.
    returns: bool,
    refunds: Refunds,
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
            found.moved = cost.into();
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
        self.reserve_within(cost, None, now_us)
    }

    /// The same, but a wait longer than `within` is a denial with that wait; and with it, a cost of 0
    /// answers how long until nothing is owed, and of windows what remains then.
    pub fn reserve_within(&mut self, cost: u64, within: Option<u64>, now_us: u64) -> Answer {
        let rule = Rule::of(self.spec);
        assert!(rule.kind.owes(), "counts and permits know no debt");
        let mut found = self.find(now_us);
        let mut own = rule.retry(&found, cost, rule.capacity + rule.debt, now_us);
        let mut wait = Retry::Now;
        if own == Retry::Now && (cost > 0 || within.is_some()) {
            // As taken at `at` itself, so that a wait is that of an acquire of the same cost.
            let owed = rule.take(&found.state, rule.in_parts(cost), found.at, found.at);
            wait = rule.wait(&found, now_us, |t| rule.used(&owed, t) <= rule.capacity * rule.parts());
        }
        if cost > 0 && matches!((within, wait), (Some(within), Retry::AfterUs(us)) if us > within) { own = wait }
        let denied = self.wait_or_block(&mut found, own, now_us);
        if denied != Retry::Now { return self.close(&found, false, denied, now_us) }
        rule.charge(&mut found, rule.in_parts(cost), now_us);
        found.moved = cost.into();
        let mut answer = self.close(&found, true, wait, now_us);
        if let (0, Kind::Window, Retry::AfterUs(us)) = (cost, rule.kind, wait) {
            answer.remaining = u64_of(rule.free(&found.state, i128::from(now_us) + i128::from(us)));
        }
        answer
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
            found.moved = -i128::from(cost);
            found.refunds.add(cost, now_us, false);
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
        // Where nothing fits, neither version is charged.
        found.moved = if parts > 0 { cost.into() } else { 0 };
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
            let rule = Rule::of(self.spec);
            let owes = rule.used(&found.state, found.at) > rule.capacity * rule.parts();
            let other = found.other.as_ref().map(|other| other.also_charged(&rule, found.moved, owes, now_us));
            // A key as if never used is forgotten.
            let forgotten = rule.used(&found.state, found.at) == 0
                && until == 0
                && self.denials(now_us) == 0
                && !found.refunds.are_kept()
                && other.as_ref().is_none_or(Other::is_unused);
            let refunds = found.refunds;
            self.written =
                (!forgotten).then(|| Written { spec: self.spec, state: found.state.clone(), until, other, refunds });
        }
        if !allowed && !found.altered && found.returns {
            let reset = i128::from(now_us) + i128::from(self.answer(found, allowed, retry, now_us).reset_after_us);
            let other = self.written.as_mut().and_then(|written| written.other.as_mut());
            other.into_iter().for_each(|other| other.keep(reset));
        }
        if self.counts_denials && !allowed {
            if self.denials(now_us) == 0 { self.denied.clear() }
            self.denied.push(now_us);
            if self.written.is_none() {
                // Counted in a state in which nothing is used.
                let (spec, state, refunds) = (self.spec, found.state.clone(), Refunds::default());
                self.written = Some(Written { spec, state, until: 0, other: None, refunds });
            }
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
        let (other, refunds) = (None, Refunds::default());
        let unused = Found { state: rule.place(0, at), at, until: 0, altered: false, moved: 0, other, returns: false, refunds };
        let Some(written) = &self.written else { return unused };
        let (state, other, returns) = self.version(&rule, written, at, now_us);
        let refunds = written.refunds.of_late(&rule, now_us);
        let (time, until) = (state.time(), written.until);
        if rule.used(&state, time) == 0 && until <= now_us.into() {
            // The same as no state: its time must not bind anybody.
            Found { other, returns, refunds, ..unused }
        } else if rule.is_far_ahead(time, at) {
            let gap = time - at;
            let state = rule.rebased(&state, at);
            Found { state, at, until: until - gap, altered: true, moved: 0, other, returns, refunds }
        } else {
            Found { state, at: at.max(time), until, altered: false, moved: 0, other, returns, refunds }
        }
    }
}
