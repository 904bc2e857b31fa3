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

pub use change::Change;
pub use owed::Taken;

use calendar::Window;
use owed::Life;
use rule::{Kind, Rule, State, ceil_div, floor_to, u64_of};

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
    counts_overage: bool,
    /// How long a denial blocks the key.
    block_for: Option<u64>,
    /// When calls were denied, as far as that is counted: forgotten all at once (`denials`).
    denied: Vec<u64>,
    /// Whether the next calls have an id.
    by_id: bool,
    /// What the last call took, and of what.
    last: Option<Taken>,
}

/// What a call wrote last.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Written {
    /// The numbers that it was written under.
    spec: Spec,
    state: State,
    /// The block's end, in microseconds whatever the tick. Without a block it is past: 0.
    until: i128,
    life: Option<Life>,
}

#[cfg(test)]
impl Written {
    fn of(spec: Spec, state: State) -> Self {
        Self { spec, state, until: 0, life: None }
    }
}

/// The key as one call finds it: the numbers that apply chosen, the clock settled.
struct Found {
    /// The numbers that what is used passes under: the call's own or those that the state was written under. The
    /// capacity and the debt are the call's in either case.
    spec: Spec,
    state: State,
    /// The instant that counts as now for usage, on a tick.
    at: i128,
    /// The block's end, as in `Written`. It is held against the call's own time, not against `at`.
    until: i128,
    /// Not what is written: the state lay too far ahead and was moved to now, or the call altered it.
    altered: bool,
    /// Whether the state is written under other numbers than the call's.
    changed: bool,
    /// The longest reset of both, and for how long denials count.
    longest: i128,
    memory: i128,
    /// Units in use before the call, once a charge has moved them to its own numbers; of counters, whatever they weigh.
    before: i128,
    life: Option<Life>,
}

#[rustfmt::skip]
impl Oracle {
    pub fn new(spec: Spec) -> Self {
        let _checked = Rule::of(spec);
        let (on_change, denied) = (Change::KeepUsed, Vec::new());
        Oracle { spec, on_change, written: None, counts_overage: false, block_for: None, denied, by_id: false, last: None }
    }

    /// From now on denials are counted.
    pub fn count_overage(&mut self) {
        self.counts_overage = true;
    }

    /// Takes `cost` if it fits. A denied call or one of cost 0 writes nothing, but for the rebase.
    pub fn acquire(&mut self, cost: u64, now_us: u64) -> Answer {
        let rule = Rule::of(self.spec);
        let mut found = self.find(now_us);
        let retry = rule.retry(&found, cost, rule.capacity, now_us);
        let retry = self.wait_or_block(&mut found, retry, now_us);
        if retry == Retry::Now { self.charge(&mut found, cost.into(), now_us) }
        self.close(found, retry == Retry::Now, retry, now_us)
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
        let wait = match (own, cost, within) {
            // Until nothing is owed.
            (Retry::Now, 0, Some(_)) => found.wait(now_us, |under, used| used <= rule.capacity * under.parts()),
            (Retry::Now, 1.., _) => {
                // Under its own numbers, as taken at `at` itself, so that a wait is that of an acquire of the same
                // cost.
                let mut taken = self.find(now_us);
                self.rewrite(&mut taken, now_us);
                taken.state = rule.take(&taken.state, i128::from(cost) * rule.parts(), taken.at, taken.at);
                taken.wait(now_us, |under, used| used <= rule.capacity * under.parts())
            }
            _ => Retry::Now,
        };
        if cost > 0 && matches!((within, wait), (Some(within), Retry::AfterUs(us)) if us > within) { own = wait }
        let denied = self.wait_or_block(&mut found, own, now_us);
        if denied != Retry::Now { return self.close(found, false, denied, now_us) }
        let free = match (cost, rule.kind, wait) {
            (0, Kind::Window, Retry::AfterUs(us)) => Some(found.free(&rule, i128::from(now_us) + i128::from(us))),
            _ => None,
        };
        self.charge(&mut found, cost.into(), now_us);
        let answer = self.close(found, true, wait, now_us);
        Answer { remaining: free.map_or(answer.remaining, u64_of), ..answer }
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
        found.give(cost.into(), 0);
        if found.altered && found.is_blocked(now_us) { found.touch() }
        self.close(found, true, Retry::Now, now_us)
    }

    /// Takes `cost` whether it is there or not, as far as it can be counted (`Rule::room`).
    pub fn penalty(&mut self, cost: u64, now_us: u64) -> Answer {
        let mut found = self.find(now_us);
        let units = self.room(now_us).min(cost.into());
        self.charge(&mut found, units, now_us);
        self.close(found, true, Retry::Now, now_us)
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
    fn close(&mut self, mut found: Found, allowed: bool, retry: Retry, now_us: u64) -> Answer {
        if self.counts_overage && !allowed {
            if self.denials(&found, now_us) == 0 { self.denied.clear() }
            self.denied.push(now_us);
            found.touch();
        }
        if found.altered {
            if (!self.counts_overage || allowed) && self.denials(&found, now_us) == 0 {
                self.denied.clear();
            }
            // A block that is over isn't written again.
            let until = if found.is_blocked(now_us) { found.until } else { 0 };
            let longest = if found.spec == self.spec { Rule::of(self.spec).longest() } else { found.longest };
            found.note_change(self.spec);
            found.end_life(longest, now_us);
            // A key as if never used is forgotten.
            let forgotten = found.used() == 0 && until == 0 && self.denied.is_empty() && found.life.is_none();
            let (spec, state, life) = (found.spec, found.state.clone(), found.life);
            self.written = (!forgotten).then_some(Written { spec, state, until, life });
        }
        let answer = self.answer(&found, allowed, retry, now_us);
        // Even where so short a memory has forgotten it by the next call.
        if self.counts_overage && !allowed { Answer { overage: self.denied.len() as u64, ..answer } } else { answer }
    }

    fn answer(&self, found: &Found, allowed: bool, retry: Retry, now_us: u64) -> Answer {
        let rule = Rule::of(self.spec);
        let blocked = found.is_blocked(now_us);
        Answer {
            allowed,
            limit: u64_of(rule.capacity),
            remaining: if blocked { 0 } else { u64_of(found.free(&rule, found.at)) },
            retry,
            reset_after_us: found.own_reset(now_us).max(found.blocked_for(now_us)),
            blocked,
            overage: self.denials(found, now_us),
        }
    }

    /// Denials counted so far: since the first of them, and for as long as usage could last.
    fn denials(&self, found: &Found, now_us: u64) -> u64 {
        let (rule, now) = (Rule::of(self.spec), i128::from(now_us));
        let counts = self.denied.first().is_some_and(|first| match i128::from(*first) {
            // In the window of now alone.
            first if rule.kind == Kind::Calendar => first <= now && first >= rule.window_at(found.at),
            first => first <= now && now - first < found.memory,
        });
        if counts { self.denied.len() as u64 } else { 0 }
    }

    /// First the change of numbers, at the state's own time; then the clock.
    fn find(&self, now_us: u64) -> Found {
        let (rule, now) = (Rule::of(self.spec), i128::from(now_us));
        let at = floor_to(now, rule.tick);
        let unused = Found {
            spec: self.spec, state: rule.place(0, at), at, until: 0, altered: false, changed: false,
            longest: rule.longest(), memory: rule.longest(), before: 0, life: None,
        };
        let Some(written) = &self.written else { return unused };
        let found = self.version(written, now);
        let (under, time, until) = (found.rule(), found.state.time(), written.until);
        let (used, far) = (under.used(&found.state, time) > 0, under.is_far_ahead(time, now, found.longest));
        // A block goes back with the rest.
        let until = if far { until - (time - now) } else { until };
        let altered = far && (used || written.until > 0 || written.life.is_some() || rule.kind == Kind::Permits);
        let on_tick = floor_to(now, under.tick);
        // What has passed by now is as if never used, even if a count is there that weighs nothing.
        let used = used && (far || under.used(&found.state, on_tick.max(time)) > 0);
        let mut found = match (used, far) {
            // Its time binds nobody.
            (false, _) => Found { spec: self.spec, state: unused.state, at, ..found },
            (true, true) => Found { state: under.rebased(&found.state, on_tick), at: on_tick, ..found },
            (true, false) => Found { at: on_tick.max(time), ..found },
        };
        (found.until, found.altered) = (until, altered);
        found.before = found.units();
        found
    }

    /// The state under the call's own numbers, as it is once the call takes units.
    fn rewrite(&self, found: &mut Found, now_us: u64) {
        let (rule, old) = (Rule::of(self.spec), found.rule());
        if found.spec != self.spec {
            let (used, state) = (found.used(), old.settled(&found.state, found.at));
            let at = if rule.kind == Kind::Bucket { ceil_div(found.at, rule.tick) * rule.tick } else { floor_to(found.at, rule.tick) };
            found.at = at.max(floor_to(now_us.into(), rule.tick));
            found.state = match used {
                0 => rule.place(0, found.at),
                // Where entries so old don't count any more, it is one of now: the charge forgives nothing.
                _ if rule.kind == Kind::Log && found.at - state.time() >= rule.period => rule.place(used, found.at),
                _ => rule.convert(&old, &state, Change::KeepUsed),
            };
            found.spec = self.spec;
        }
        // Nor does the time of a state lie further ahead than this rule's longest reset.
        if found.changed && rule.is_far_ahead(found.at, now_us.into(), rule.longest()) {
            found.at = floor_to(now_us.into(), rule.tick);
            found.state = rule.rebased(&found.state, found.at);
        }
        if found.changed {
            found.before = found.units();
        }
    }

    /// Takes units, for good. The call then counts as made when the taking is dated.
    fn charge(&mut self, found: &mut Found, units: i128, now_us: u64) {
        if units > 0 {
            let rule = Rule::of(self.spec);
            self.rewrite(found, now_us);
            found.count(units, self.by_id);
            found.state = rule.take(&found.state, units * rule.parts(), found.at, now_us.into());
            found.at = found.state.time();
            found.altered = true;
        }
        self.last = Some(found.mark(units));
    }

    /// Units that a penalty can still take.
    fn room(&self, now_us: u64) -> i128 {
        let mut found = self.find(now_us);
        self.rewrite(&mut found, now_us);
        Rule::of(self.spec).room(&found.state, found.at)
    }
}

impl Found {
    /// The numbers that what is used passes under.
    fn rule(&self) -> Rule {
        Rule::of(self.spec)
    }

    /// What is used, in parts.
    fn used(&self) -> i128 {
        self.rule().used(&self.state, self.at)
    }

    /// Whole units in use; of counters, whatever they weigh.
    fn units(&self) -> i128 {
        match self.rule().settled(&self.state, self.at) {
            State::Counter { previous, current, .. } if self.used() > 0 => previous + current,
            _ => ceil_div(self.used(), self.rule().parts()),
        }
    }

    /// How long until nothing is used.
    fn own_reset(&self, now_us: u64) -> u64 {
        let under = self.rule();
        match self.used() {
            0 => 0,
            _ => u64_of(under.first(self.at, |t| under.used(&self.state, t) == 0) - i128::from(now_us)),
        }
    }

    /// Whole units that can be taken at `t` of this rule's capacity.
    fn free(&self, own: &Rule, t: i128) -> i128 {
        let under = self.rule();
        (own.capacity * under.parts() - under.used(&self.state, t)).max(0) / under.parts()
    }

    /// How long until what is used then, in parts of these numbers, is little enough.
    fn wait(&self, now_us: u64, little: impl Fn(&Rule, i128) -> bool) -> Retry {
        let under = self.rule();
        match under.first(self.at, |t| little(&under, under.used(&self.state, t))) {
            when if when == self.at => Retry::Now,
            when => Retry::AfterUs(u64_of(when - i128::from(now_us))),
        }
    }

    /// Gives back up to so many units that so many newer ones follow. Returns how many whole ones it gave.
    fn give(&mut self, units: i128, newer: i128) -> i128 {
        let under = self.rule();
        let Some((state, given)) = under.give(&self.state, units * under.parts(), newer * under.parts(), self.at)
        else {
            return 0;
        };
        let given = given / under.parts();
        (self.state, self.altered) = (state, true);
        self.life.iter_mut().for_each(|life| life.given += given);
        given
    }
}
