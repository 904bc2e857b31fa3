//! Two versions of a rule in force at once: each has a level of its own, and both take what either admits.

use super::rule::{Kind, Rule, State, ceil_div, floor_to};
use super::{Change, Found, Oracle, Refunds, Spec, Start, Written};

/// A key under other numbers than those it was last written under.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Other {
    spec: Spec,
    state: State,
    /// Until when it is in force in any case, in whole seconds.
    until: i128,
}

const SECOND: i128 = 1_000_000;

impl Oracle {
    /// The state under this rule, and that under the other version in force.
    /// Last, whether the former is one that another version wrote after.
    pub(super) fn version(
        &self,
        rule: &Rule,
        written: &Written,
        at: i128,
        now_us: u64,
    ) -> (State, Option<Other>, bool) {
        let (now, old, state) = (i128::from(now_us), Rule::of(written.spec), &written.state);
        if !rule.kind.has_versions() {
            let is_known = !rule.is_beyond_the_windows(&old, state.time(), at);
            return (if is_known { rule.convert(&old, state, self.on_change) } else { state.clone() }, None, false);
        }
        let other = written.other.as_ref();
        let other = other.filter(|other| now < other.until || other.says_more_than(written, rule, now_us));
        let same = rule.wrote(&old, state);
        if self.on_change != Change::KeepUsed {
            return (rule.convert(&old, state, self.on_change), other.filter(|_| same).cloned(), false);
        }
        if same {
            return (state.clone(), other.cloned(), false);
        }
        let until = state.time() + rule.longest().max(old.longest());
        // After a penalty it may take longer.
        let before = Other { spec: written.spec, state: state.clone(), until: 0 };
        let (its, found) = before.found(state, rule, now_us);
        let until = match its.first(found.at, |t| its.used(&found.state, t) == 0) {
            reset if reset > found.at => until.max(reset),
            _ => until,
        };
        let until = ceil_div(until, SECOND) * SECOND;
        let mut before = Some(Other { spec: written.spec, state: state.clone(), until }).filter(|_| now < until);
        let returns = other.is_some_and(|other| rule.wrote(&Rule::of(other.spec), &other.state));
        let own = match other {
            Some(other) if returns => other.state.clone(),
            Some(other) if Rule::of(other.spec).capacity > old.capacity => {
                before = Some(other.clone());
                // Charged under a rule whose windows start at the first hit, its own may start anywhere.
                let from = Rule { start: Start::FirstHit, ..Rule::of(other.spec) };
                rule.convert(&from, &other.state, self.on_change)
            }
            _ => rule.convert(&old, state, self.on_change),
        };
        (own, before, returns)
    }
}

impl Other {
    /// Whether nothing is used under these numbers.
    pub(super) fn is_unused(&self) -> bool {
        Rule::of(self.spec).used(&self.state, self.state.time()) == 0
    }

    /// Kept until its reset, so that the wait of a denial stays true.
    pub(super) fn keep(&mut self, until: i128) {
        if self.until < until {
            self.until = (until.div_euclid(SECOND) + 1) * SECOND;
        }
    }

    /// Whether it has a larger capacity than the version that was written last, and more is used of it.
    fn says_more_than(&self, written: &Written, caller: &Rule, now_us: u64) -> bool {
        let old = Rule::of(written.spec);
        let (its, found) = self.found(&self.state, caller, now_us);
        let (_, last) = self.found(&its.convert(&old, &written.state, Change::KeepUsed), caller, now_us);
        let [(its_free, its_reset), (free, reset)] = [found, last]
            .map(|Found { state, at, .. }| (its.free(&state, at), its.first(at, |t| its.used(&state, t) == 0)));
        its.capacity > old.capacity && (its_reset > reset || its_free < free)
    }

    /// How a call under the caller's rule finds this state under its numbers.
    fn found(&self, state: &State, caller: &Rule, now_us: u64) -> (Rule, Found) {
        let mut rule = Rule::of(self.spec);
        if let State::Window { start, .. } = self.state {
            rule.start = match caller.start {
                Start::At(_) => Start::At(u64::try_from(start.rem_euclid(rule.period)).expect("not negative")),
                Start::FirstHit => Start::FirstHit,
            };
        }
        let (at, time) = (floor_to(now_us.into(), rule.tick), state.time());
        let (state, at) = if rule.used(state, time) == 0 {
            (rule.place(0, at), at)
        } else if rule.is_far_ahead(time, at) {
            (rule.rebased(state, at), at)
        } else {
            (state.clone(), at.max(time))
        };
        let refunds = Refunds::default();
        (rule, Found { state, at, until: 0, altered: false, moved: 0, other: None, returns: false, refunds })
    }

    /// The same after the call took these units too or, below 0, gave them back.
    pub(super) fn also_charged(&self, caller: &Rule, moved: i128, owes: bool, now_us: u64) -> Self {
        let (rule, mut found) = self.found(&self.state, caller, now_us);
        if moved > 0 {
            // What exceeds a level is forgiven, as by a change to its numbers. Into debt, if the caller is in debt, or can
            // only be in less. Counts count all.
            let lends = owes || rule.debt > caller.debt;
            let most = (rule.capacity + if lends { rule.debt } else { 0 }) * rule.parts();
            let room = match rule.kind {
                Kind::Counter => rule.room(&found),
                Kind::Bucket | Kind::Window => (most - rule.used(&found.state, found.at)).clamp(0, rule.room(&found)),
                Kind::Calendar | Kind::Log | Kind::Permits => unreachable!("one state for all versions"),
            };
            rule.charge(&mut found, room.min(moved * rule.parts()), now_us);
        } else if let Some(state) = rule.give(&found.state, -moved * rule.parts(), found.at) {
            found.state = state;
        }
        Self { state: rule.settled(&found.state, found.at), ..self.clone() }
    }
}

impl Rule {
    /// Whether this state was written under these numbers. It doesn't say how much debt was allowed, nor where windows
    /// start but for its own.
    fn wrote(&self, old: &Rule, state: &State) -> bool {
        let aligned = match (self.start, state) {
            // Where nothing is used, it may have been charged and given back under other windows.
            (Start::At(_), State::Window { used, start, .. }) => *used == 0 || self.window_at(*start) == *start,
            _ => true,
        };
        aligned && *self == (Rule { debt: self.debt, start: self.start, ..*old })
    }
}
