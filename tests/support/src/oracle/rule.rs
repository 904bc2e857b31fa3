//! A rule's numbers and what a state under it comes to: how much counts as used, what a taking or giving makes of it,
//! and when a wait ends.

use super::calendar::{Window, bounds};
use super::permits::Permit;
use super::{Found, Retry, Spec, Start};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Bucket,
    Window,
    Calendar,
    Counter,
    Log,
    Permits,
}

impl Kind {
    /// Whether more may be taken than there is, to be paid back.
    pub(super) fn owes(self) -> bool {
        match self {
            Kind::Bucket | Kind::Window => true,
            Kind::Calendar | Kind::Counter | Kind::Log | Kind::Permits => false,
        }
    }
}

/// A [`Spec`] as plain numbers: units and microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rule {
    pub(super) kind: Kind,
    pub(super) rate: i128,
    pub(super) period: i128,
    pub(super) capacity: i128,
    pub(super) debt: i128,
    pub(super) tick: i128,
    pub(super) start: Start,
    /// Of the calendar's windows alone.
    pub(super) calendar: Option<(Window, chrono_tz::Tz)>,
}

/// Usage as last written. `used` counts parts of a unit (`Rule::parts`) and is `capacity - level`,
/// so it exceeds the capacity while the key is in debt. `time` is that of the last write.
#[derive(Clone, Debug, PartialEq, Eq)]
#[rustfmt::skip]
pub(super) enum State {
    Bucket {
        used: i128,
        time: i128,
    },
    Window {
        used: i128,
        start: i128,
        time: i128,
    },
    /// What was used in the window of the calendar that ends then.
    Calendar {
        used: i128,
        start: i128,
        end: i128,
        time: i128,
    },
    Counter {
        previous: i128,
        current: i128,
        start: i128,
        time: i128,
    },
    /// Time and cost of each taking not given back, oldest first, never empty: without any, an entry of cost 0 holds
    /// the time of the last write.
    Log {
        entries: Vec<(i128, i128)>,
    },
    Permits {
        held: Vec<Permit>,
        time: i128,
    },
}

impl State {
    pub(super) fn time(&self) -> i128 {
        match self {
            State::Bucket { time, .. } | State::Window { time, .. } | State::Calendar { time, .. } => *time,
            State::Counter { time, .. } | State::Permits { time, .. } => *time,
            State::Log { entries } => entries.last().expect("never empty").0,
        }
    }
}

#[rustfmt::skip]
impl Rule {
    pub(super) fn of(spec: Spec) -> Rule {
        let at0 = Start::At(0);
        let calendar = match spec {
            Spec::CalendarWindow { window, zone, .. } => Some((window, zone)),
            _ => None,
        };
        let (kind, rate, period, capacity, debt, tick, start) = match spec {
            Spec::TokenBucket { rate, period_us, capacity, max_debt, tick_us } => {
                let g = gcd(rate, period_us);
                (Kind::Bucket, rate / g, period_us / g, capacity, max_debt, tick_us, at0)
            }
            Spec::FixedWindow { rate, period_us, capacity, max_debt, start } => {
                (Kind::Window, rate, period_us, capacity, max_debt, 1, start)
            }
            Spec::CalendarWindow { limit, .. } => (Kind::Calendar, limit, 1, limit, 0, 1, at0),
            Spec::SlidingWindow { limit, period_us, tick_us } => {
                (Kind::Counter, limit, period_us, limit, 0, tick_us, at0)
            }
            Spec::SlidingLog { limit, period_us } => {
                (Kind::Log, limit, period_us, limit, 0, 1, at0)
            }
            Spec::Concurrency { limit, ttl_us } => {
                (Kind::Permits, limit, ttl_us, limit, 0, 1, at0)
            }
        };
        assert!(period > 0 && tick > 0 && period % tick == 0, "the tick divides the period");
        assert!(rate > 0 || matches!(kind, Kind::Counter | Kind::Log | Kind::Permits), "something comes back");
        let [rate, period, capacity, debt, tick] =
            [rate, period, capacity, debt, tick].map(i128::from);
        Rule { kind, rate, period, capacity, debt, tick, start, calendar }
    }

    /// Parts that a unit is counted in. A bucket refills `rate` units in `period / tick` ticks:
    /// with a unit of that many parts, exactly `rate` parts a tick.
    pub(super) fn parts(&self) -> i128 {
        if self.kind == Kind::Bucket { self.period / self.tick } else { 1 }
    }

    /// The longest that any usage but a penalty's can take to vanish: a whole number of ticks.
    pub(super) fn longest(&self) -> i128 {
        let most = self.capacity + self.debt;
        match self.kind {
            Kind::Bucket => ceil_div(most * self.parts(), self.rate) * self.tick,
            Kind::Window => ceil_div(most, self.rate) * self.period,
            Kind::Counter => 2 * self.period,
            Kind::Log | Kind::Permits => self.period,
            Kind::Calendar => 366 * 86_400_000_000,
        }
    }

    /// The window of the calendar that contains `t`, where it ends, and where the next does.
    pub(super) fn windows_at(&self, t: i128) -> [i128; 3] {
        let (window, zone) = self.calendar.expect("a calendar's");
        bounds(window, zone, t.try_into().expect("within range")).map(i128::from)
    }

    /// Whether a state of `time` is further ahead of `now` than this, the longest reset.
    pub(super) fn is_far_ahead(&self, time: i128, now: i128, longest: i128) -> bool {
        if self.kind == Kind::Calendar && time > now {
            let [first, second, stop] = self.windows_at(now);
            return time >= stop || time - now > (second - first).max(stop - second);
        }
        time - now > longest
    }

    /// Whether this state's time lies in neither of the two windows that a call at `at` knows of, so that nobody can
    /// tell whether its window is one of this rule's. Another limit is another rule all the same.
    pub(super) fn is_beyond_the_windows(&self, old: &Self, time: i128, at: i128) -> bool {
        self.kind == Kind::Calendar && self.capacity == old.capacity && time >= self.windows_at(at)[2]
    }

    /// Where the window that contains `t` begins, if it begins afresh.
    pub(super) fn window_at(&self, t: i128) -> i128 {
        if self.kind == Kind::Calendar {
            return self.windows_at(t)[0];
        }
        match self.start {
            Start::At(offset) => i128::from(offset) + floor_to(t - i128::from(offset), self.period),
            Start::FirstHit => t,
        }
    }

    /// The two counts as they stand in the window of `t`.
    pub(super) fn counts(&self, previous: i128, current: i128, start: i128, t: i128) -> (i128, i128) {
        match (self.window_at(t) - start) / self.period {
            0 => (previous, current),
            1 => (current, 0),
            _ => (0, 0),
        }
    }

    /// An entry exactly one period old no longer counts.
    pub(super) fn live(&self, log: &[(i128, i128)], t: i128) -> impl Iterator<Item = (i128, i128)> {
        log.iter().copied().filter(move |(time, _)| t - time < self.period)
    }

    /// What counts as used at `t`, in parts, `t` on a tick and not before the state's time.
    pub(super) fn used(&self, state: &State, t: i128) -> i128 {
        assert!(t >= state.time() && t % self.tick == 0);
        match state {
            State::Bucket { used, time } => (used - self.rate * ((t - time) / self.tick)).max(0),
            State::Window { used, start, .. } => {
                let boundaries = (t - start) / self.period;
                (used - self.rate * boundaries).max(0)
            }
            State::Calendar { used, end, .. } => if t < *end { *used } else { 0 },
            State::Counter { previous, current, start, .. } => {
                let (previous, current) = self.counts(*previous, *current, *start, t);
                let left = self.period - (t - self.window_at(t));
                previous * left / self.period + current
            }
            State::Log { entries } => self.live(entries, t).map(|(_, cost)| cost).sum(),
            State::Permits { held, .. } => held.iter().map(|permit| i128::from(permit.is_live(t))).sum(),
        }
    }

    /// The same usage, as written at `at`. A log may be left empty.
    pub(super) fn settled(&self, state: &State, at: i128) -> State {
        let used = self.used(state, at);
        match state {
            State::Bucket { .. } => State::Bucket { used, time: at },
            State::Window { start, .. } => {
                // A key at capacity is as new; until then one window follows another.
                let start = match used {
                    0 => self.window_at(at),
                    _ => start + floor_to(at - start, self.period),
                };
                State::Window { used, start, time: at }
            }
            State::Calendar { start, end, .. } if at < *end => State::Calendar { used, start: *start, end: *end, time: at },
            State::Calendar { .. } => self.place(0, at),
            State::Counter { previous, current, start, .. } => {
                let (previous, current) = self.counts(*previous, *current, *start, at);
                State::Counter { previous, current, start: self.window_at(at), time: at }
            }
            State::Log { entries } => State::Log { entries: self.live(entries, at).collect() },
            State::Permits { held, .. } => {
                let held = held.iter().filter(|permit| permit.is_live(at)).cloned().collect();
                State::Permits { held, time: at }
            }
        }
    }

    /// The state with `parts` taken at `at`; `now` is the unfloored time.
    pub(super) fn take(&self, state: &State, parts: i128, at: i128, now: i128) -> State {
        let before = self.used(state, at);
        let mut state = self.settled(state, at);
        match &mut state {
            State::Bucket { used, time } => {
                *used += parts;
                // Late in a tick and nearly full: dated to the tick's begin, the capacity could be
                // taken now and a whole tick's refill at its end, which is more than the rule
                // gives in that time. With more missing than a refill, the bound holds anyway.
                let nearly_full = before <= self.rate;
                if at < now && nearly_full { *time += self.tick }
            }
            State::Window { used, .. } | State::Calendar { used, .. } => *used += parts,
            State::Counter { current, .. } => *current += parts,
            State::Log { entries } if parts > 0 || entries.is_empty() => entries.push((at, parts)),
            State::Log { .. } => {}
            State::Permits { held, .. } => held.extend(Permit::new(None, at + self.period).times(parts)),
        }
        state
    }

    /// The state with up to `parts` given back at `at`, which `newer` parts follow: the newest first. Also what was
    /// given; none if none are taken.
    pub(super) fn give(&self, state: &State, parts: i128, newer: i128, at: i128) -> Option<(State, i128)> {
        let mut state = self.settled(state, at);
        let (mut skip, mut left) = (newer, parts);
        let mut less = |taken: &mut i128| {
            let skipped = skip.min(*taken);
            let given = left.min(*taken - skipped);
            *taken -= given;
            skip -= skipped;
            left -= given;
        };
        match &mut state {
            State::Bucket { used, .. } | State::Window { used, .. } | State::Calendar { used, .. } => less(used),
            State::Counter { previous, current, .. } => [current, previous].into_iter().for_each(less),
            State::Log { entries } => {
                // Where others took newer ones, as many of the oldest: those leave no later.
                let mut given = entries.iter().map(|(_, cost)| cost).sum();
                less(&mut given);
                let mut given = parts - left;
                let mut from = |(_, cost): &mut (i128, i128)| {
                    let part = given.min(*cost);
                    (*cost, given) = (*cost - part, given - part);
                };
                if newer > 0 { entries.iter_mut().for_each(from) } else { entries.iter_mut().rev().for_each(&mut from) }
                entries.retain(|(_, cost)| *cost > 0);
                if entries.is_empty() { entries.push((at, 0)) }
            }
            State::Permits { .. } => unreachable!("given back by an id"),
        }
        (left < parts).then_some((state, parts - left))
    }

    /// The most parts that can be in use, or of a counter that one count can hold: numbers stay exact, and so do waits.
    fn bound(&self) -> i128 {
        let (exact, longest) = (1 << 53, 1 << 51);
        match self.kind {
            Kind::Bucket => (exact - self.parts()).min(longest * self.rate / self.tick),
            Kind::Window => (exact - self.rate).min(longest / self.period * self.rate),
            Kind::Calendar => exact,
            Kind::Counter => exact / (self.period / self.tick) - 1,
            Kind::Log => 1 << 39,
            Kind::Permits => 20_000,
        }
    }

    /// The same in whole units.
    pub(super) fn most(&self) -> i128 {
        floor_to(self.bound(), self.parts())
    }

    /// Units that a penalty can still take.
    pub(super) fn room(&self, state: &State, at: i128) -> i128 {
        let taken = match self.settled(state, at) {
            // Only the current count: the previous one was bounded when it was current.
            State::Counter { current, .. } => current,
            _ => self.used(state, at),
        };
        (self.bound() - taken).max(0) / self.parts()
    }

    /// A state with all of `used` (parts) taken at `at`.
    pub(super) fn place(&self, used: i128, at: i128) -> State {
        let start = if self.kind == Kind::Calendar { 0 } else { self.window_at(at) };
        match self.kind {
            Kind::Bucket => State::Bucket { used, time: at },
            Kind::Window => State::Window { used, start, time: at },
            Kind::Calendar => {
                let [start, end, _] = self.windows_at(at);
                State::Calendar { used, start, end, time: at }
            }
            Kind::Counter => State::Counter { previous: 0, current: used, start, time: at },
            Kind::Log => State::Log { entries: vec![(at, used)] },
            Kind::Permits => {
                State::Permits { held: Permit::new(None, at + self.period).times(used).collect(), time: at }
            }
        }
    }

    /// What is used at the state's own time, as used at `at`. A permit keeps how long it has left.
    pub(super) fn rebased(&self, state: &State, at: i128) -> State {
        let time = state.time();
        match self.settled(state, time) {
            State::Permits { mut held, .. } => {
                held.iter_mut().for_each(|permit| permit.expiry -= time - at);
                State::Permits { held, time: at }
            }
            State::Bucket { .. }
            | State::Window { .. }
            | State::Calendar { .. }
            | State::Log { .. } => self.place(self.used(state, time), at),
            // One count can't hold as much as two.
            State::Counter { .. } => self.place(self.used(state, time).min(self.most()), at),
        }
    }

    /// The first tick from `at` on at which `ready` holds. Once it holds it does for good.
    pub(super) fn first(&self, at: i128, ready: impl Fn(i128) -> bool) -> i128 {
        let (mut no, mut yes) = (-1, 0);
        while !ready(at + yes * self.tick) {
            assert!(yes < 1 << 60, "not ready after any debt");
            (no, yes) = (yes, 2 * yes + 1);
        }
        while yes - no > 1 {
            let middle = no + (yes - no) / 2;
            if ready(at + middle * self.tick) { yes = middle } else { no = middle }
        }
        at + yes * self.tick
    }

    /// When `cost` fits beside what is used, in `most` units.
    pub(super) fn retry(&self, found: &Found, cost: u64, most: i128, now_us: u64) -> Retry {
        match i128::from(cost) {
            0 => Retry::Now,
            cost if cost > most => Retry::Never,
            cost => found.wait(now_us, |under, used| used <= (most - cost) * under.parts()),
        }
    }
}

pub(super) fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

pub(super) fn ceil_div(a: i128, b: i128) -> i128 {
    -(-a).div_euclid(b)
}

/// The last multiple of `step` not after `t`, which may be negative.
pub(super) fn floor_to(t: i128, step: i128) -> i128 {
    t.div_euclid(step) * step
}

pub(super) fn u64_of(n: i128) -> u64 {
    u64::try_from(n).expect("answers are not negative and fit")
}
