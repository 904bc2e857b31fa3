//! What is still owed of units that a call took by an id. Units pass in the order in which they were taken, so it is
//! enough to know how many came after the call's, and how many are in use. And of a call that is known only by when it
//! was and the reset that it answered.

use super::rule::{Kind, Rule, State, ceil_div, u64_of};
use super::{Answer, Found, Oracle, Retry, Spec};

/// What is counted from when nothing was used until nothing is used, once an id has taken units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Life {
    number: u64,
    /// Units taken, and units given back.
    pub(super) taken: i128,
    pub(super) given: i128,
    /// Until when units may be owed that a call by an id, or a change of numbers, took; none during that call. And
    /// whether numbers have changed.
    until: Option<i128>,
    altered: bool,
}

/// What a call took, and where in a key's life that was.
#[derive(Clone, Copy, Debug)]
pub struct Taken {
    life: Option<u64>,
    /// Units taken and given back in the life until after the call, without what this call gave back itself.
    taken: i128,
    given: i128,
    /// Units that the call took and didn't give back, and those in use before it.
    units: i128,
    before: i128,
}

impl Oracle {
    /// Whether the next calls have an id.
    pub fn by_id(&mut self, by_id: bool) {
        self.by_id = by_id;
    }

    /// What the call that was just allowed took.
    pub fn taken(&self) -> Taken {
        self.last.expect("a call that takes")
    }

    /// Gives back what is still owed of so many of these units; and what is known of the rest.
    pub fn refund_of(&mut self, taken: Taken, units: u64, now_us: u64) -> (Answer, Taken) {
        let rule = Rule::of(self.spec);
        let mut found = self.find(now_us);
        let given = match found.life {
            Some(life) if Some(life.number) == taken.life => {
                let (after, given_since) = (life.taken - taken.taken, life.given - taken.given);
                // What others gave back may be older than the call's units or newer. If it is older, the call's units
                // came earlier, and more of them have passed: so it is, as far as there were older ones. But if
                // even the newest of the call's units are beyond what may be used, all are still to wait. Under
                // other numbers nobody knows, and without a debt nobody waits.
                let (under, changed) = (found.rule(), found.changed || life.altered);
                let waits = rule.kind.owes()
                    && !changed
                    && found.used() > (rule.capacity + after - given_since) * under.parts();
                let older = if waits { 0 } else { given_since.min(taken.before) };
                let newer = (after - (given_since - older)).max(0);
                found.give(taken.units.min(units.into()), newer)
            }
            _ => 0,
        };
        if found.altered && found.is_blocked(now_us) {
            found.touch();
        }
        let taken = Taken { given: taken.given + given, units: taken.units - given, ..taken };
        (self.close(found, true, Retry::Now, now_us), taken)
    }

    /// Gives back what is still owed of so many units that a call took at `since`, which answered this reset. Returns
    /// how many those are as well.
    pub fn refund_after(&mut self, (since, reset_us): (u64, u64), units: u64, now_us: u64) -> (Answer, u64) {
        let mut found = self.find(now_us);
        let (since, resets, now) = (i128::from(since), i128::from(since) + i128::from(reset_us), i128::from(now_us));
        let mut given = 0;
        if resets > now {
            let (newer, most) = found.rule().newer(&found.state, since, resets, found.at);
            given = found.give(most.min(units.into()), newer);
        }
        if found.altered && found.is_blocked(now_us) {
            found.touch();
        }
        (self.close(found, true, Retry::Now, now_us), u64_of(given))
    }

    /// Whole units in use; of counters, whatever they weigh.
    pub fn in_use(&self, now_us: u64) -> u64 {
        u64_of(self.find(now_us).units())
    }

    /// Takes so many more for the same call, there or not: as if they had come directly after what it took. Returns how
    /// many could be counted as well.
    pub fn penalty_of(&mut self, taken: Taken, units: u64, now_us: u64) -> (Answer, Taken, u64) {
        let units = u64_of(self.room(now_us).min(units.into()));
        // A call that is settled has an id.
        let by_id = std::mem::replace(&mut self.by_id, true);
        let answer = self.penalty(units, now_us);
        self.by_id = by_id;
        let (more, own) = (i128::from(units), self.taken());
        let taken = match taken.life == own.life {
            true => Taken { taken: taken.taken + more, units: taken.units + more, ..taken },
            false => Taken { units: more, ..own },
        };
        (answer, taken, units)
    }
}

impl Rule {
    /// Of the whole units in use at `at`: how many were taken after a call at `since` that said that the key would be
    /// as if never used at `resets`; and of how many its own may be.
    fn newer(&self, state: &State, since: i128, resets: i128, at: i128) -> (i128, i128) {
        let used = self.used(state, at);
        // The most that could be in use now and are gone by then.
        let gone_by_then = |state: &dyn Fn(i128) -> State| {
            let then = at + ceil_div((resets - at).max(0), self.tick) * self.tick;
            let (mut gone, mut left) = (0, 1 << 60);
            while left - gone > 1 {
                let middle = (gone + left) / 2;
                if self.used(&state(middle), then) == 0 { gone = middle } else { left = middle }
            }
            gone
        };
        match self.settled(state, at) {
            State::Bucket { .. } => {
                let left = gone_by_then(&|used| State::Bucket { used, time: at });
                // The reset was rounded up to a tick, in which several units may pass.
                let passed = if self.rate > self.parts() { self.rate - 1 } else { 0 };
                (ceil_div(used - (left - passed).clamp(0, used), self.parts()), used)
            }
            State::Window { start, .. } => {
                let left = gone_by_then(&|used| State::Window { used, start, time: at });
                // All but one of a window's may have passed with it, as part of what fell short of them.
                let passed = if since < start { self.rate - 1 } else { 0 };
                ((used - (left - passed).max(0)).max(0), used)
            }
            State::Calendar { start, .. } => (0, if since >= start { used } else { 0 }),
            State::Counter { current, start, .. } if since >= start => (0, current),
            State::Counter { previous, current, start, .. } => {
                (current, if since >= start - self.period { previous } else { 0 })
            }
            State::Log { entries } => {
                (entries.iter().filter(|(time, _)| *time > since).map(|(_, cost)| cost).sum(), used)
            }
            State::Permits { .. } => unreachable!("given back by an id"),
        }
    }
}

impl Found {
    /// Counts units that the call takes.
    pub(super) fn count(&mut self, units: i128, by_id: bool) {
        let converted = self.is_converted();
        if self.life.is_none() && (by_id || converted) {
            self.life = Some(Life::new());
        }
        if let Some(life) = &mut self.life {
            // More than can be counted isn't.
            if self.before == 0 || life.taken + units > 1 << 53 {
                *life = life.over();
            }
            life.taken += units;
            life.altered |= converted;
            if by_id || converted {
                life.until = None;
            }
        }
    }

    /// Whether the state was written under other numbers and is moved to the call's own. No window of the calendar is
    /// another's, and permits last as long as they were given.
    fn is_converted(&self) -> bool {
        self.changed && !matches!(self.rule().kind, Kind::Calendar | Kind::Permits)
    }

    /// What is written under other numbers than before is noted, whether or not units are taken.
    pub(super) fn note_change(&mut self, own: Spec) {
        if self.is_converted() && self.spec == own && self.used() > 0 {
            let life = self.life.get_or_insert_with(Life::new);
            (life.altered, life.until) = (true, None);
        }
    }

    /// A life ends when nothing is used, and is forgotten when all that an id took has had the time to pass, also what
    /// another version had taken before, beyond the capacity of this one.
    pub(super) fn end_life(&mut self, longest: i128, now_us: u64) {
        let (now, ended) = (i128::from(now_us), self.used() == 0);
        let owes = |life: &Life| life.until.is_none_or(|until| self.before > 0 && now < until);
        self.life = self.life.filter(owes);
        let reset = i128::from(self.own_reset(now_us).max(self.blocked_for(now_us)));
        let until = (self.at.max(now) + longest).max(now + reset);
        self.life.iter_mut().for_each(|life| life.until = life.until.or(Some(until)));
        if let (Some(life), true) = (&mut self.life, ended) {
            *life = life.over();
        }
    }

    /// What this call took.
    pub(super) fn mark(&self, units: i128) -> Taken {
        let (taken, given) = self.life.map_or((0, 0), |life| (life.taken, life.given));
        Taken { life: self.life.map(|life| life.number), taken, given, units, before: self.before }
    }
}

impl Life {
    fn new() -> Self {
        use std::sync::atomic::{AtomicU64, Ordering};
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        Self { number: NUMBER.fetch_add(1, Ordering::Relaxed), taken: 0, given: 0, until: None, altered: false }
    }

    /// The one after this.
    fn over(self) -> Self {
        Self { until: self.until, altered: self.altered, ..Self::new() }
    }
}
