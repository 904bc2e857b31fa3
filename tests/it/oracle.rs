//! The test oracle: what every script should answer, from the definitions alone.
//!
//! Each algorithm is one question, "how much counts as used at time t, if nobody calls until
//! then?" (`Rule::used`), and how a taking alters that (`Rule::take`). All else is shared and
//! follows from the answer: a call is allowed if its cost fits beside what is used, and a wait
//! ends at the first tick at which it fits. Waits are searched, not computed, so no closed
//! formula of a script is repeated here. Searching is sound because usage never grows by itself.
//!
//! Whole numbers only (`i128`), so nothing overflows and nothing is rounded by accident.

// The same file serves as a crate and as a test module.
#![allow(unreachable_pub)]

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
    SlidingWindow { limit: u64, period_us: u64, tick_us: u64 },
    SlidingLog { limit: u64, period_us: u64 },
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
}

/// One key under one rule.
#[derive(Clone, Debug)]
pub struct Oracle {
    spec: Spec,
    /// What was last written, and under which numbers: a change of the rule writes nothing, it is
    /// worked out anew from here by each call until one writes.
    written: Option<(Spec, State)>,
}

/// The key as one call finds it: the rule's change applied, the clock settled.
struct Found {
    state: State,
    /// The instant that counts as now, on a tick.
    at: i128,
    /// The state lay too far ahead and was moved back to now.
    rebased: bool,
}

#[rustfmt::skip]
impl Oracle {
    pub fn new(spec: Spec) -> Self {
        let _checked = Rule::of(spec);
        Oracle { spec, written: None }
    }

    /// Takes `cost` if it fits. A denied call or one of cost 0 writes nothing, but for the rebase.
    pub fn acquire(&mut self, cost: u64, now_us: u64) -> Answer {
        let rule = Rule::of(self.spec);
        let mut found = self.find(now_us);
        let retry = rule.retry(&found, cost, now_us);
        let takes = retry == Retry::Now && cost > 0;
        if takes {
            found.state = rule.take(&found.state, cost.into(), found.at, now_us.into());
            found.at = found.state.time();
        }
        if takes || found.rebased {
            self.written = Some((self.spec, found.state.clone()));
        }
        rule.answer(&found, retry, now_us)
    }

    /// Allowed and retry as `acquire` would answer, the rest about the untouched key.
    pub fn peek(&self, cost: u64, now_us: u64) -> Answer {
        let rule = Rule::of(self.spec);
        let found = self.find(now_us);
        rule.answer(&found, rule.retry(&found, cost, now_us), now_us)
    }

    /// Forgets the key.
    pub fn reset(&mut self) -> Answer {
        self.written = None;
        let limit = u64_of(Rule::of(self.spec).capacity);
        Answer { allowed: true, limit, remaining: limit, retry: Retry::Now, reset_after_us: 0 }
    }

    /// New numbers for the same algorithm; what was used stays used (`Rule::convert`).
    pub fn change(&mut self, spec: Spec) {
        let same = std::mem::discriminant(&spec) == std::mem::discriminant(&self.spec);
        assert!(same, "a change keeps the algorithm");
        let _checked = Rule::of(spec);
        self.spec = spec;
    }

    /// First the change of numbers, at the state's own time; then the clock.
    fn find(&self, now_us: u64) -> Found {
        let rule = Rule::of(self.spec);
        let at = floor_to(now_us.into(), rule.tick);
        let (state, at, rebased) = match &self.written {
            None => (rule.place(0, at), at, false),
            Some((old, state)) => {
                let state = rule.convert(&Rule::of(*old), state);
                let (time, used) = (state.time(), rule.used(&state, state.time()));
                if used == 0 {
                    // The same as no state: its time must not bind anybody.
                    (rule.place(0, at), at, false)
                } else if time - at > rule.longest() {
                    (rule.place(used, at), at, true)
                } else {
                    (state, at.max(time), false)
                }
            }
        };
        Found { state, at, rebased }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Bucket,
    Window,
    Counter,
    Log,
}

/// A [`Spec`] as plain numbers: units and microseconds.
#[derive(Clone, Copy, Debug)]
struct Rule {
    kind: Kind,
    rate: i128,
    period: i128,
    capacity: i128,
    debt: i128,
    tick: i128,
    start: Start,
}

/// Usage as last written. `used` counts parts of a unit (`Rule::parts`) and is `capacity - level`,
/// so it exceeds the capacity while the key is in debt. `time` is that of the last write.
#[derive(Clone, Debug)]
#[rustfmt::skip]
enum State {
    Bucket {
        used: i128,
        time: i128,
    },
    Window {
        used: i128,
        start: i128,
        time: i128,
    },
    Counter {
        previous: i128,
        current: i128,
        start: i128,
        time: i128,
    },
    /// Time and cost of each taking, oldest first, never empty.
    Log {
        entries: Vec<(i128, i128)>,
    },
}

impl State {
    fn time(&self) -> i128 {
        match self {
            State::Bucket { time, .. } | State::Window { time, .. } | State::Counter { time, .. } => *time,
            State::Log { entries } => entries.last().expect("never empty").0,
        }
    }
}

#[rustfmt::skip]
impl Rule {
    fn of(spec: Spec) -> Rule {
        let at0 = Start::At(0);
        let (kind, rate, period, capacity, debt, tick, start) = match spec {
            // By arrival time or by level: the same limiter, told apart by its state only.
            Spec::TokenBucket { rate, period_us, capacity, max_debt, tick_us }
            | Spec::Gcra { rate, period_us, capacity, max_debt, tick_us } => {
                let g = gcd(rate, period_us);
                (Kind::Bucket, rate / g, period_us / g, capacity, max_debt, tick_us, at0)
            }
            Spec::FixedWindow { rate, period_us, capacity, max_debt, start } => {
                (Kind::Window, rate, period_us, capacity, max_debt, 1, start)
            }
            Spec::SlidingWindow { limit, period_us, tick_us } => {
                (Kind::Counter, limit, period_us, limit, 0, tick_us, at0)
            }
            Spec::SlidingLog { limit, period_us } => {
                (Kind::Log, limit, period_us, limit, 0, 1, at0)
            }
        };
        assert!(period > 0 && tick > 0 && period % tick == 0, "the tick divides the period");
        assert!(rate > 0 || matches!(kind, Kind::Counter | Kind::Log), "something comes back");
        let [rate, period, capacity, debt, tick] =
            [rate, period, capacity, debt, tick].map(i128::from);
        Rule { kind, rate, period, capacity, debt, tick, start }
    }

    /// Parts that a unit is counted in. A bucket refills `rate` units in `period / tick` ticks:
    /// with a unit of that many parts, exactly `rate` parts a tick.
    fn parts(&self) -> i128 {
        if self.kind == Kind::Bucket { self.period / self.tick } else { 1 }
    }

    /// The longest that any usage can take to vanish: a whole number of ticks.
    fn longest(&self) -> i128 {
        let most = self.capacity + self.debt;
        match self.kind {
            Kind::Bucket => ceil_div(most * self.parts(), self.rate) * self.tick,
            Kind::Window => ceil_div(most, self.rate) * self.period,
            Kind::Counter => 2 * self.period,
            Kind::Log => self.period,
        }
    }

    /// Where the window that contains `t` begins, if it begins afresh.
    fn window_at(&self, t: i128) -> i128 {
        match self.start {
            Start::At(offset) => i128::from(offset) + floor_to(t - i128::from(offset), self.period),
            Start::FirstHit => t,
        }
    }

    /// The two counts as they stand in the window of `t`.
    fn counts(&self, previous: i128, current: i128, start: i128, t: i128) -> (i128, i128) {
        match (self.window_at(t) - start) / self.period {
            0 => (previous, current),
            1 => (current, 0),
            _ => (0, 0),
        }
    }

    /// An entry exactly one period old no longer counts.
    fn live(&self, log: &[(i128, i128)], t: i128) -> impl Iterator<Item = (i128, i128)> {
        log.iter().copied().filter(move |(time, _)| t - time < self.period)
    }

    /// What counts as used at `t`, in parts, `t` on a tick and not before the state's time.
    fn used(&self, state: &State, t: i128) -> i128 {
        assert!(t >= state.time() && t % self.tick == 0);
        match state {
            State::Bucket { used, time } => (used - self.rate * ((t - time) / self.tick)).max(0),
            State::Window { used, start, .. } => {
                let boundaries = (t - start) / self.period;
                (used - self.rate * boundaries).max(0)
            }
            State::Counter { previous, current, start, .. } => {
                let (previous, current) = self.counts(*previous, *current, *start, t);
                let left = self.period - (t - self.window_at(t));
                previous * left / self.period + current
            }
            State::Log { entries } => self.live(entries, t).map(|(_, cost)| cost).sum(),
        }
    }

    /// Whole units that can be taken at `t`.
    fn free(&self, state: &State, t: i128) -> i128 {
        (self.capacity * self.parts() - self.used(state, t)).max(0) / self.parts()
    }

    /// The state with `cost` taken at `at`; `now` is the unfloored time.
    fn take(&self, state: &State, cost: i128, at: i128, now: i128) -> State {
        let before = self.used(state, at);
        match state {
            State::Bucket { .. } => {
                // Late in a tick and nearly full: dated to the tick's begin, the capacity could be
                // taken now and a whole tick's refill at its end, which is more than the rule
                // gives in that time. With more missing than a refill, the bound holds anyway.
                let nearly_full = before <= self.rate;
                let time = if at < now && nearly_full { at + self.tick } else { at };
                State::Bucket { used: before + cost * self.parts(), time }
            }
            State::Window { start, .. } => {
                // A key at capacity is as new; until then one window follows another.
                let start = match before {
                    0 => self.window_at(at),
                    _ => start + floor_to(at - start, self.period),
                };
                State::Window { used: before + cost, start, time: at }
            }
            State::Counter { previous, current, start, .. } => {
                let (previous, current) = self.counts(*previous, *current, *start, at);
                let (current, start) = (current + cost, self.window_at(at));
                State::Counter { previous, current, start, time: at }
            }
            State::Log { entries } => {
                let entries = self.live(entries, at).chain([(at, cost)]).collect();
                State::Log { entries }
            }
        }
    }

    /// A state with all of `used` (parts) taken at `at`. The counters cap it to their limit, the
    /// level-based ones may be in debt.
    fn place(&self, used: i128, at: i128) -> State {
        let capped = used.min(self.capacity);
        let start = self.window_at(at);
        match self.kind {
            Kind::Bucket => State::Bucket { used, time: at },
            Kind::Window => State::Window { used, start, time: at },
            Kind::Counter => State::Counter { previous: 0, current: capped, start, time: at },
            Kind::Log => State::Log { entries: vec![(at, capped)] },
        }
    }

    /// A state written under `old`, at its own time, under these numbers. Unchanged numbers leave
    /// it as it is.
    fn convert(&self, old: &Rule, state: &State) -> State {
        let time = state.time();
        let used = old.used(state, time);
        // Units taken stay taken, up to what this rule could have given; only who was in debt
        // stays in debt. A fraction of a part counts as taken.
        let in_debt = used > old.capacity * old.parts();
        let most = self.capacity + if in_debt { self.debt } else { 0 };
        let kept = ceil_div(used * self.parts(), old.parts()).min(most * self.parts());
        match state {
            State::Bucket { .. } => {
                State::Bucket { used: kept, time: ceil_div(time, self.tick) * self.tick }
            }
            State::Window { start, .. } => {
                // A window on the new grid already is the one that contains the last write.
                let keeps = self.start == Start::FirstHit && self.period == old.period;
                let start = if keeps { *start } else { self.window_at(time) };
                State::Window { used: kept, start, time }
            }
            State::Counter { previous, current, start, .. } => {
                let time = floor_to(time, self.tick);
                let fits = used <= self.capacity && *previous <= self.capacity;
                if self.period == old.period && fits {
                    let (previous, current, start) = (*previous, *current, *start);
                    State::Counter { previous, current, start, time }
                } else {
                    self.place(used, time)
                }
            }
            // Kept entries may exceed a lowered limit: they expire when they would have.
            State::Log { .. } if self.period == old.period => state.clone(),
            State::Log { .. } => self.place(used, time),
        }
    }

    /// The first tick from `at` on at which `ready` holds. It holds at the latest after the
    /// longest reset, and once it holds it does for good.
    fn first(&self, at: i128, ready: impl Fn(i128) -> bool) -> i128 {
        let (mut no, mut yes) = (-1, self.longest() / self.tick);
        assert!(ready(at + yes * self.tick), "not ready after the longest reset");
        while yes - no > 1 {
            let middle = no + (yes - no) / 2;
            if ready(at + middle * self.tick) { yes = middle } else { no = middle }
        }
        at + yes * self.tick
    }

    fn retry(&self, found: &Found, cost: u64, now_us: u64) -> Retry {
        let (cost, now) = (i128::from(cost), i128::from(now_us));
        if cost == 0 || cost <= self.free(&found.state, found.at) {
            Retry::Now
        } else if cost > self.capacity {
            Retry::Never
        } else {
            let when = self.first(found.at, |t| cost <= self.free(&found.state, t));
            Retry::AfterUs(u64_of(when - now))
        }
    }

    fn answer(&self, found: &Found, retry: Retry, now_us: u64) -> Answer {
        let Found { state, at, .. } = found;
        let reset_after = if self.used(state, *at) == 0 {
            0
        } else {
            self.first(*at, |t| self.used(state, t) == 0) - i128::from(now_us)
        };
        Answer {
            allowed: retry == Retry::Now,
            limit: u64_of(self.capacity),
            remaining: u64_of(self.free(state, *at)),
            retry,
            reset_after_us: u64_of(reset_after),
        }
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

fn ceil_div(a: i128, b: i128) -> i128 {
    -(-a).div_euclid(b)
}

/// The last multiple of `step` not after `t`, which may be negative.
fn floor_to(t: i128, step: i128) -> i128 {
    t.div_euclid(step) * step
}

fn u64_of(n: i128) -> u64 {
    u64::try_from(n).expect("answers are not negative and fit")
}

#[cfg(test)]
#[rustfmt::skip]
mod tests {
    use super::*;
    use Retry::{AfterUs, Never, Now};

    /// `(cost, now, retry, remaining, reset_after)` of successive acquires.
    fn table(oracle: &mut Oracle, rows: &[(u64, u64, Retry, u64, u64)]) {
        for &(cost, now, retry, remaining, reset_after_us) in rows {
            let a = oracle.acquire(cost, now);
            let got = (a.retry, a.remaining, a.reset_after_us);
            assert_eq!(got, (retry, remaining, reset_after_us), "{cost} at {now}: {oracle:?}");
            assert_eq!(a.allowed, retry == Now);
        }
    }

    fn bucket(rate: u64, period_us: u64, capacity: u64, tick_us: u64) -> Spec {
        Spec::TokenBucket { rate, period_us, capacity, max_debt: 0, tick_us }
    }

    fn window(rate: u64, period_us: u64, capacity: u64, start: Start) -> Spec {
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
        assert_eq!(o.peek(1, 95), Answer { allowed: false, limit: 3, remaining: 0, retry: AfterUs(4), reset_after_us: 24 });
        assert_eq!(o.reset(), Answer { allowed: true, limit: 3, remaining: 3, retry: Now, reset_after_us: 0 });
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
        o.written = Some((o.spec, State::Bucket { used: 50, time: 100 }));
        table(&mut o, &[(0, 100, Now, 0, 50), (1, 100, AfterUs(30), 0, 50)]);
        o.change(Spec::Gcra { rate: 1, period_us: 10, capacity: 2, max_debt: 2, tick_us: 1 });
        table(&mut o, &[(1, 100, AfterUs(30), 0, 40)]);
        // 7 tenths used are 2.1 thirds, counted as 3; 101 is ceiled to 102.
        let mut o = Oracle::new(bucket(1, 10, 3, 1));
        table(&mut o, &[(1, 98, Now, 2, 10)]);
        o.written = Some((o.spec, State::Bucket { used: 7, time: 101 }));
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

    /// A linear congruential generator, so that the loop below repeats exactly.
    struct Random(u64);

    impl Random {
        fn below(&mut self, n: u64) -> u64 {
            self.0 = self
                .0
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 33) % n
        }

        fn spec(&mut self, algorithm: u64) -> Spec {
            let (capacity, max_debt) = (self.below(6), self.below(3));
            let (rate, period_us) = (1 + self.below(4), 1 + self.below(12));
            let reduced = period_us / gcd(rate, period_us);
            let divisor = |r: &mut Self, n: u64| match 1 + r.below(n) {
                d if n.is_multiple_of(d) => d,
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
                _ => Spec::SlidingLog { limit: capacity, period_us },
            }
        }
    }

    /// Remaining, retry and reset mean what they say, on any history: clocks that step back and
    /// rules that change included.
    #[test]
    fn answers_keep_their_word() {
        let mut random = Random(1);
        for round in 0..3_000 {
            let mut o = Oracle::new(random.spec(round % 5));
            let mut now = 1000;
            for _ in 0..25 {
                match random.below(16) {
                    0 => o.change(random.spec(round % 5)),
                    1 => now -= random.below(60),
                    2 => now += random.below(60),
                    _ => now += random.below(5),
                }
                let (cost, peeked, untouched) = (random.below(5), o.clone(), o.peek(0, now));
                let a = o.acquire(cost, now);
                let p = peeked.peek(cost, now);
                assert_eq!((p.allowed, p.retry), (a.allowed, a.retry), "{peeked:?}");
                assert_eq!(
                    (p.remaining, p.reset_after_us),
                    (untouched.remaining, untouched.reset_after_us)
                );
                if cost == 0 || !a.allowed {
                    assert_eq!(a, p, "{cost} at {now}: {peeked:?}");
                }
                assert!(
                    o.peek(a.remaining, now).allowed && !o.peek(a.remaining + 1, now).allowed,
                    "{o:?}"
                );
                match a.retry {
                    AfterUs(wait) => {
                        assert!(
                            (now..now + wait).all(|t| !o.peek(cost, t).allowed),
                            "{cost} at {now}: {o:?}"
                        );
                        assert!(o.peek(cost, now + wait).allowed, "{cost} at {now}: {o:?}");
                    }
                    Never => assert!(cost > a.limit),
                    Now => {}
                }
                // One microsecond before its reset the key still answers as used, from then on as new.
                let (mut used, mut new, reset) =
                    (o.clone(), Oracle::new(o.spec), now + a.reset_after_us);
                if a.reset_after_us > 0 {
                    assert_ne!(o.peek(0, reset - 1), new.peek(0, reset - 1), "{now}: {o:?}");
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
                if o.acquire(cost, now).allowed {
                    taken.push((i128::from(now), i128::from(cost)));
                }
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
