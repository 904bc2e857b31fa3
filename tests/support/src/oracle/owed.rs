//! What is still owed of units that a call took: not what has come back by itself since, nor what refunds gave back.

use super::rule::{Rule, State, ceil_div};
use super::{Answer, Found, Oracle, Retry};

/// What was given back to a key of late.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Refunds {
    units: i128,
    last: Option<i128>,
}

/// What a call took, and how the key was then.
#[derive(Clone, Copy, Debug)]
pub struct Taken {
    since: i128,
    took: i128,
    missed: i128,
    rule: Rule,
    refunded: i128,
}

impl Refunds {
    /// What counts now: until a longest reset after the last one.
    pub(super) fn of_late(self, rule: &Rule, now_us: u64) -> Self {
        self.last.filter(|last| i128::from(now_us) < last + rule.longest()).map_or_else(Self::default, |_| self)
    }

    /// One more; the first only where it is of units that are known.
    pub(super) fn add(&mut self, units: u64, now_us: u64, known: bool) {
        if known || self.last.is_some() {
            self.units = (self.units + i128::from(units)).min(1 << 53);
            self.last = Some(now_us.into());
        }
    }
}

impl Refunds {
    pub(super) fn are_kept(&self) -> bool {
        self.last.is_some()
    }
}

impl Oracle {
    /// What the call that was just allowed took.
    pub fn taken(&self, took: u64, now_us: u64) -> Taken {
        let (rule, found) = (Rule::of(self.spec), self.find(now_us));
        let state = rule.settled(&found.state, found.at);
        let (since, missed) = match state {
            State::Bucket { used, time } => (time, used),
            State::Window { used, start, .. } => (start, used),
            State::Calendar { .. } | State::Counter { .. } | State::Log { .. } | State::Permits { .. } => {
                (now_us.into(), 0)
            }
        };
        Taken { since, took: took.into(), missed, rule, refunded: found.refunds.units }
    }

    /// Gives back what is still owed of these units.
    pub fn refund_of(&mut self, taken: Taken, cost: u64, now_us: u64) -> Answer {
        let rule = Rule::of(self.spec);
        let mut found = self.find(now_us);
        let (parts, waits) = rule.owed(&found, taken, cost.into());
        let given = if parts > 0 { rule.give_of(&found, taken.since, parts) } else { None };
        if let Some(state) = given {
            // Under the other version's numbers too, only what hasn't begun is surely owed still.
            (found.state, found.altered) = (state, true);
            found.moved = if waits { -(parts / rule.parts()) } else { 0 };
            let units = ceil_div(parts, rule.parts());
            found.refunds.add(u64::try_from(units).expect("above 0"), now_us, rule.kind.owes());
            if found.is_blocked(now_us) {
                found.touch(&rule);
            }
        }
        self.close(&found, true, Retry::Now, now_us)
    }
}

impl Taken {
    /// After so many more units were charged for the same call.
    #[must_use]
    pub fn and(self, more: u64) -> Self {
        let more = i128::from(more);
        Self { took: self.took + more, missed: self.missed + more * self.rule.parts(), ..self }
    }

    /// After so many units were given back.
    #[must_use]
    pub fn less(self, units: u64) -> Self {
        Self { took: self.took - i128::from(units), ..self }
    }
}

impl Rule {
    /// Parts of the units that are still owed, and whether they are a reservation's that is still to wait. Nothing of
    /// another version's call is known to be.
    fn owed(&self, found: &Found, taken: Taken, units: i128) -> (i128, bool) {
        let Taken { since, took, missed, rule, refunded } = taken;
        let state = self.settled(&found.state, found.at);
        if self.kind.has_versions() && (Rule { debt: self.debt, start: self.start, ..rule }) != *self {
            return (0, false);
        }
        let left = |missed: i128| match state {
            State::Bucket { .. } => missed - (found.at - since).max(0) / self.tick * self.rate,
            State::Window { start, .. } => missed - (start - since).max(0) / self.period * self.rate,
            State::Calendar { .. } | State::Counter { .. } | State::Log { .. } | State::Permits { .. } => 0,
        };
        let waits = left(missed) > self.capacity * self.parts();
        // Others gave back what they took before or after this call: at most all that was missing before it. But a
        // reservation that is still to wait has used nothing.
        let others = if waits { 0 } else { (found.refunds.units - refunded).max(0) };
        let missed = (missed - others * self.parts()).max(missed.min(took * self.parts()));
        let owed = match state {
            State::Bucket { .. } => (units * self.parts()).min(left(missed).max(0)),
            State::Window { .. } => units.min(left(missed).max(0)),
            State::Calendar { start, used, .. } => {
                if since >= start {
                    units.min(used)
                } else {
                    0
                }
            }
            State::Counter { previous, current, start, .. } => match since {
                since if since >= start => units.min(current),
                since if since >= start - self.period => units.min(previous),
                _ => 0,
            },
            State::Log { .. } if found.at - since >= self.period => 0,
            State::Log { entries } => units.min(entries.iter().map(|(_, cost)| cost).sum()),
            State::Permits { .. } => unreachable!("given back by an id"),
        };
        (owed, waits)
    }

    /// The state with parts given back that were taken then.
    fn give_of(&self, found: &Found, since: i128, mut parts: i128) -> Option<State> {
        match self.settled(&found.state, found.at) {
            State::Counter { previous, current, start, time } if since < start => {
                Some(State::Counter { previous: previous - parts, current, start, time })
            }
            State::Log { mut entries } if entries.iter().any(|(time, cost)| *time > since && *cost > 0) => {
                for (_, cost) in &mut entries {
                    let given = parts.min(*cost);
                    (*cost, parts) = (*cost - given, parts - given);
                }
                entries.retain(|(_, cost)| *cost > 0);
                entries.push((found.at, 0));
                Some(State::Log { entries })
            }
            State::Bucket { .. }
            | State::Window { .. }
            | State::Calendar { .. }
            | State::Counter { .. }
            | State::Log { .. }
            | State::Permits { .. } => self.give(&found.state, parts, found.at),
        }
    }
}
