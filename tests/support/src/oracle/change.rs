//! What a change of the rule's numbers makes of a state.

use super::rule::{Kind, Rule, State, ceil_div, floor_to};
use super::{Found, Oracle, Start, Written};

/// What stays what it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// The units used.
    KeepUsed,
    /// The units left, or owed.
    AsIs,
    /// Nothing but a block: as if never used.
    Reset,
}

impl Oracle {
    /// How states written under other numbers are read from now on. Permits know no strategy.
    pub fn on_change(&mut self, change: Change) {
        self.on_change = change;
    }
}

impl Oracle {
    /// What is written, at its own time: under the numbers that it was written under, or under the call's own.
    pub(super) fn version(&self, written: &Written, now: i128) -> Found {
        let rule = Rule::of(self.spec);
        // A state doesn't say how much debt was allowed.
        let old = Rule { debt: 0, ..Rule::of(written.spec) };
        let (change, changed) = (self.on_change, old != Rule { debt: 0, ..rule });
        let (stays, longest) = match rule.kind {
            _ if !changed => (true, rule.longest()),
            // No window of the calendar is another's, and permits last as long as they were given.
            Kind::Calendar | Kind::Permits => (false, rule.longest()),
            _ if change == Change::KeepUsed && rule.is_no_faster(&old, &written.state) => {
                (true, rule.longest().max(old.longest()))
            }
            // Moved to one entry of the call's own.
            Kind::Log => (false, rule.longest()),
            Kind::Bucket | Kind::Window | Kind::Counter => (false, rule.longest().max(old.longest())),
        };
        let spec = if stays && changed { written.spec } else { self.spec };
        let time = written.state.time();
        // If nobody can tell whether that is another window, it is none.
        let change = if rule.is_beyond_the_windows(&old, time, now) { Change::KeepUsed } else { change };
        let state = if stays { written.state.clone() } else { rule.convert(&old, &written.state, change) };
        let mut life = written.life;
        if let (Change::AsIs, Some(life)) = (change, &mut life) {
            let more = rule.used(&state, state.time()) / rule.parts() - old.used(&written.state, time) / old.parts();
            life.taken += more.max(0);
        }
        let memory = if stays { longest } else { rule.longest() };
        let (at, until, altered, before) = (state.time(), written.until, false, 0);
        Found { spec, state, at, until, altered, changed, longest, memory, before, life }
    }
}

impl Rule {
    /// Whether what is used passes no faster under these numbers than under those that it was written under. What
    /// exceeds the limit can't pass through this rule's windows at its rate.
    fn is_no_faster(&self, old: &Rule, state: &State) -> bool {
        let windows = matches!(self.kind, Kind::Counter | Kind::Log);
        let exceeds = windows && old.used(state, state.time()) > self.capacity;
        let one_log = self.kind == Kind::Log && self.period == old.period;
        !one_log && (old.rate * self.period >= self.rate * old.period || exceeds)
    }

    /// A state written under `old`, at its own time, under these numbers.
    pub(super) fn convert(&self, old: &Rule, state: &State, change: Change) -> State {
        let time = state.time();
        let kept = self.kept(old, old.used(state, time), change);
        // The counters keep what they know beside the sum, if the sum is to stay.
        let used = old.used(state, time);
        let same = kept == used && self.period == old.period;
        match state {
            State::Bucket { .. } => State::Bucket { used: kept, time: ceil_div(time, self.tick) * self.tick },
            State::Window { .. } if kept == 0 => self.place(0, time),
            State::Window { .. } => {
                let State::Window { start, .. } = old.settled(state, time) else { unreachable!("a window") };
                // Windows as long that begin elsewhere count from the later of both starts.
                let begin = match self.start {
                    Start::FirstHit if self.period == old.period => start,
                    Start::At(_) if self.period == old.period => start.max(self.window_at(time)),
                    _ => self.window_at(time),
                };
                State::Window { used: kept, start: begin, time }
            }
            // The same window by another name is no change.
            State::Calendar { start, used, .. } if self.capacity == old.capacity && self.window_at(time) == *start => {
                self.place(*used, time)
            }
            State::Calendar { .. } => self.place(kept, time),
            State::Counter { previous, current, start, .. } => {
                let time = floor_to(time, self.tick);
                let [previous, current] = [previous, current].map(|count| *count.min(&self.most()));
                if same { State::Counter { previous, current, start: *start, time } } else { self.place(kept, time) }
            }
            // Entries expire when they would have, also those that exceed a lowered limit.
            State::Log { .. } if same && change == Change::KeepUsed => state.clone(),
            State::Log { .. } => self.place(kept, time),
            // No permit outlives what this rule could have given by then.
            State::Permits { held, .. } => {
                let mut held = held.clone();
                held.iter_mut().for_each(|permit| permit.expiry = permit.expiry.min(time + self.period));
                State::Permits { held, time }
            }
        }
    }

    /// What `used` parts of the old rule come to under this one, in its parts, as far as it can count them. Fractions
    /// of a part count as taken.
    fn kept(&self, old: &Rule, used: i128, change: Change) -> i128 {
        let parts = ceil_div(used * self.parts(), old.parts());
        // Of a counter, both counts are put in one.
        let parts = if self.kind == Kind::Counter { parts } else { parts.min(self.most()) };
        match change {
            Change::KeepUsed => parts.min(self.most()),
            // A key without a state is full whatever the capacity; so is one as good as that.
            Change::AsIs if used == 0 => 0,
            Change::AsIs => (parts + (self.capacity - old.capacity) * self.parts()).clamp(0, self.most()),
            Change::Reset => 0,
        }
    }
}

#[cfg(test)]
#[rustfmt::skip]
mod tests {
    use super::super::Retry::{AfterUs, Now};
    use super::super::tests::{Call, bucket, calls, table, window};
    use super::super::Spec;
    use super::*;

    fn owing(capacity: u64, max_debt: u64) -> Spec {
        Spec::TokenBucket { rate: 1, period_us: 10, capacity, max_debt, tick_us: 1 }
    }

    /// A key under `spec` that is read as it is under other numbers.
    fn as_is(spec: Spec) -> Oracle {
        let mut o = Oracle::new(spec);
        o.on_change(Change::AsIs);
        o
    }

    #[test]
    fn as_is_by_hand() {
        // One of three left at 100: one of six is left, and by the new rate a fifth more at 101.
        let mut o = as_is(bucket(1, 10, 3, 1));
        table(&mut o, &[(2, 100, Now, 1, 20)]);
        o.change(bucket(1, 5, 6, 1));
        table(&mut o, &[(2, 101, AfterUs(4), 1, 24), (6, 103, AfterUs(22), 1, 22)]);
        // The denials wrote nothing: another strategy starts from the same state.
        o.on_change(Change::KeepUsed);
        table(&mut o, &[(6, 103, AfterUs(7), 4, 7)]);
        o.on_change(Change::AsIs);
        table(&mut o, &[(1, 103, Now, 0, 27)]);
        // Written under these numbers, so no strategy applies.
        o.on_change(Change::Reset);
        table(&mut o, &[(1, 103, AfterUs(2), 0, 27)]);
        // Two of three left are all of one, and then nothing is used: the time binds nobody.
        let mut o = as_is(bucket(1, 10, 3, 1));
        table(&mut o, &[(1, 100, Now, 2, 10)]);
        o.change(bucket(1, 10, 1, 1));
        table(&mut o, &[(1, 95, Now, 0, 10)]);
        // A full key is full whatever the capacity: that of a key given back, or never used.
        let mut o = as_is(bucket(1, 10, 3, 1));
        calls(&mut o, &[(Call::Acquire, 1, 100, Some(1), Now, 2, 10), (Call::Refund, 1, 100, Some(0), Now, 3, 0)]);
        o.change(bucket(1, 10, 6, 1));
        table(&mut o, &[(6, 100, Now, 0, 60)]);

        // Two are owed, whatever the capacity and what the rule lends.
        let mut o = as_is(owing(3, 2));
        calls(&mut o, &[(Call::Reserve, 5, 100, Some(5), AfterUs(20), 0, 50)]);
        for (spec, reset) in [(owing(2, 1), 40), (owing(6, 2), 80), (owing(6, 0), 80), (owing(3, 1), 50)] {
            o.change(spec);
            table(&mut o, &[(0, 100, Now, 0, reset)]);
        }
        // Of thirds, 2.3 units left are 6, and 0.3 owed are 1.
        for (used, capacity, remaining, reset) in [(7, 4, 2, 13), (33, 4, 0, 27)] {
            let mut o = as_is(owing(3, 1));
            o.written = Some(super::super::Written::of(o.spec, State::Bucket { used, time: 101 }));
            o.change(Spec::TokenBucket { rate: 1, period_us: 6, capacity, max_debt: 1, tick_us: 2 });
            table(&mut o, &[(0, 101, Now, remaining, reset)]);
        }

        let mut o = as_is(window(3, 10, 3, Start::At(0)));
        table(&mut o, &[(2, 17, Now, 1, 3)]);
        o.change(window(5, 8, 5, Start::At(4)));
        table(&mut o, &[(4, 18, AfterUs(2), 1, 2)]);

        // One of four left at 15: of six five are taken there, of two one.
        let mut o = as_is(Spec::SlidingWindow { limit: 4, period_us: 10, tick_us: 1 });
        table(&mut o, &[(3, 15, Now, 1, 12)]);
        o.change(Spec::SlidingWindow { limit: 6, period_us: 10, tick_us: 1 });
        table(&mut o, &[(2, 16, AfterUs(5), 1, 13)]);
        o.change(Spec::SlidingWindow { limit: 2, period_us: 10, tick_us: 1 });
        table(&mut o, &[(2, 16, AfterUs(5), 1, 5)]);
        // Older ones too, and those of the window before.
        let mut o = as_is(Spec::SlidingLog { limit: 4, period_us: 10 });
        table(&mut o, &[(1, 13, Now, 3, 10), (2, 15, Now, 1, 10)]);
        o.change(Spec::SlidingLog { limit: 6, period_us: 10 });
        table(&mut o, &[(2, 24, AfterUs(1), 1, 1)]);
        o.change(Spec::SlidingLog { limit: 2, period_us: 10 });
        table(&mut o, &[(2, 16, AfterUs(9), 1, 9), (1, 16, Now, 0, 10)]);
    }

    #[test]
    fn reset_by_hand() {
        for (was, is) in [
            (bucket(1, 10, 3, 1), bucket(1, 5, 3, 1)),
            (window(3, 10, 3, Start::At(0)), window(3, 10, 3, Start::FirstHit)),
            (Spec::SlidingWindow { limit: 4, period_us: 10, tick_us: 1 }, Spec::SlidingWindow { limit: 3, period_us: 10, tick_us: 1 }),
            (Spec::SlidingLog { limit: 4, period_us: 10 }, Spec::SlidingLog { limit: 3, period_us: 10 }),
        ] {
            let mut o = Oracle::new(was);
            o.on_change(Change::Reset);
            assert!(o.acquire(3, 100).allowed);
            o.change(is);
            // Nor does its time bind.
            assert_eq!(o.clone().acquire(3, 95), Oracle::new(is).acquire(3, 95));
            // Back under the first numbers, it was never reset.
            o.change(was);
            assert!(!o.acquire(3, 101).allowed);
            // The block stays, and is all that is written then.
            let _blocked = o.block(20, 101);
            o.change(is);
            calls(&mut o, &[
                (Call::Acquire, 1, 105, None, AfterUs(16), 0, 16), (Call::Block, 10, 106, Some(0), Now, 0, 10),
            ]);
            o.on_change(Change::KeepUsed);
            o.change(was);
            calls(&mut o, &[(Call::Acquire, 3, 107, None, AfterUs(9), 0, 9)]);
        }
    }
}
