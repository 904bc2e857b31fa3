//! What must hold of every simulation, whatever went wrong in it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::Topology;
use super::callers::{Callers, Kind, OWN, Outcome, Told};
use super::ledger::request_key;
use super::server::Role;
use crate::Charged;

/// How late an answer may be.
const GRAIN: Duration = Duration::from_millis(3);
/// How soon after the last fault every call succeeds.
pub(super) const RECOVERY: Duration = Duration::from_millis(3500);
/// Deadlines that are long enough for an answer where all is well.
pub(super) const ENOUGH: Duration = Duration::from_millis(100);
/// Whether a call of which nothing was written may be told that its charge isn't known.
const KNOWS_WHAT_WAS_WRITTEN: bool = false;

/// What was found broken first, and the numbers of a run.
pub(super) struct Verdict {
    pub(super) broken: Vec<String>,
    pub(super) calls: usize,
    pub(super) failed: usize,
    /// When the last call began after the last fault that failed all the same, in milliseconds after it.
    pub(super) recovered: u64,
}

pub(super) fn judge(callers: &Callers, topology: Topology, confirmed: bool, healed: u64, end: u64) -> Verdict {
    let told = callers.told.lock().expect("nobody panicked").clone();
    let mut judge = Judge { callers, broken: Vec::new() };
    judge.answers_in_time(&told);
    judge.own_keys(&told);
    judge.shared_keys(&told, topology, end);
    if confirmed {
        judge.confirmed_is_kept(&told);
    }
    // Who has to wait for replicas waits for a quarter of the time at most.
    let enough = if confirmed { 5 * ENOUGH } else { ENOUGH };
    let recovered = judge.recovers(&told, healed, enough);
    if KNOWS_WHAT_WAS_WRITTEN {
        judge.unwritten_is_known(&told);
    }
    let failed = told.iter().filter(|told| matches!(told.outcome, Outcome::Failed { .. })).count();
    Verdict { broken: judge.broken, calls: told.len(), failed, recovered }
}

struct Judge<'a> {
    callers: &'a Callers,
    broken: Vec<String>,
}

impl Judge<'_> {
    fn must(&mut self, holds: bool, what: impl FnOnce() -> String) {
        if !holds {
            self.broken.push(what());
        }
    }

    fn answers_in_time(&mut self, all: &[Told]) {
        for told in all {
            let took = told.ended.map(|ended| Duration::from_millis(ended - told.began));
            self.must(took.is_some(), || format!("a call never ended: {told:?}"));
            let late = took.is_some_and(|took| took > told.deadline + GRAIN);
            self.must(!late, || format!("a call took longer than its deadline ({took:?}): {told:?}"));
        }
    }

    /// What was told of each key against what its server did.
    fn own_keys(&mut self, all: &[Told]) {
        let mut by_key: BTreeMap<&str, Vec<&Told>> = BTreeMap::new();
        for told in all.iter().filter(|told| matches!(told.kind, Kind::Own | Kind::OwnById | Kind::OwnPeek)) {
            by_key.entry(&told.key).or_default().push(told);
        }
        let (taken, forgotten) = {
            let ledger = self.callers.network.ledger();
            (by_key.keys().map(|key| ledger.of(key)).collect::<Vec<_>>(), ledger.forgotten())
        };
        for ((key, all), taken) in by_key.into_iter().zip(taken) {
            let first = all[0];
            // An id that is forgotten may be charged again.
            let most = if first.kind == Kind::OwnById && all.len() > 1 { 1 + forgotten } else { 1 };
            let peeks = first.kind == Kind::OwnPeek;
            let most = if peeks { 0 } else { most };
            let what = |how: &str| format!("{how}: {key} was charged {taken:?}, and told {all:?}");
            self.must(taken.calls <= most, || what("charged more than once"));
            self.must(taken.units == taken.calls * first.cost, || what("charged for another's cost"));
            let allowed = all.iter().any(|told| matches!(told.outcome, Outcome::Allowed { .. }));
            let never = |told: &&Told| matches!(told.outcome, Outcome::Failed { charged: Charged::No, .. });
            let surely = |told: &&Told| matches!(told.outcome, Outcome::Failed { charged: Charged::Yes, .. });
            self.must(!allowed || taken.calls > 0 || peeks, || what("allowed and not charged"));
            self.must(taken.calls == 0 || !all.iter().all(|told| never(&told)), || what("charged, and told it wasn't"));
            self.must(taken.calls > 0 || !all.iter().any(|told| surely(&told)), || what("told it was charged"));
            for told in &all {
                let cost = if peeks { 0 } else { told.cost };
                let (limit, remaining) = (OWN, OWN - cost);
                let right = match told.outcome {
                    Outcome::Allowed { granted, .. } if granted != cost => false,
                    Outcome::Allowed { limit: l, remaining: r, .. } => (l, r) == (limit, remaining),
                    Outcome::Denied { .. } => false,
                    Outcome::Abandoned | Outcome::Failed { .. } => true,
                };
                self.must(right, || what("the answer is another's"));
            }
        }
    }

    fn shared_keys(&mut self, all: &[Told], topology: Topology, end: u64) {
        let mut sums: BTreeMap<&str, (usize, u64, u64)> = BTreeMap::new();
        for told in all {
            let (Kind::Shared(rule) | Kind::AtMost(rule)) = told.kind else { continue };
            let (_, told_taken, perhaps) = sums.entry(&told.key).or_insert((rule, 0, 0));
            match &told.outcome {
                Outcome::Allowed { granted, .. } => *told_taken += granted,
                Outcome::Failed { charged: Charged::Yes, .. } => *told_taken += told.cost,
                Outcome::Abandoned | Outcome::Failed { charged: Charged::Unknown, .. } => *perhaps += told.cost,
                _ => {}
            }
        }
        for (key, (rule, admitted, perhaps)) in sums {
            let (taken, forgotten) = {
                let ledger = self.callers.network.ledger();
                (ledger.of(key).units, ledger.forgotten())
            };
            let what = |how: &str| {
                format!(
                    "{how}: of {key}, {taken} units were taken, {admitted} admitted, and of {perhaps} it isn't known"
                )
            };
            self.must(admitted <= taken, || what("admitted and not charged"));
            self.must(taken <= admitted + perhaps, || what("charged, and told it wasn't"));
            let (_, capacity, rate) = &self.callers.rules.shared[rule];
            // While a replica takes over, both may decide.
            let copies = if topology == Topology::OneNode { 1 } else { 1 + forgotten };
            let most = capacity * (2 + forgotten) + rate * end.div_ceil(1000) * copies;
            self.must(taken <= most, || what("more than the rule"));
        }
        for told in all {
            let (Kind::Shared(rule) | Kind::AtMost(rule)) = told.kind else { continue };
            let (Outcome::Allowed { limit, .. } | Outcome::Denied { limit }) = told.outcome else { continue };
            let capacity = self.callers.rules.shared[rule].1;
            // Of two limits, that with the least left is told.
            self.must(limit == capacity || (rule == 3 && limit == 300), || format!("another's answer: {told:?}"));
        }
    }

    /// What a replica has confirmed is there after any failover.
    fn confirmed_is_kept(&mut self, all: &[Told]) {
        let network = &self.callers.network;
        if network.ledger().emptied > 0 {
            return;
        }
        let now_us = network.now_us();
        let mut kept = BTreeSet::new();
        for server in network.servers() {
            let mut state = server.state();
            if state.role == Role::Primary {
                state.store.set_time(now_us);
                kept.extend(state.store.keys().iter().map(|key| request_key(key)));
            }
        }
        for told in all.iter().filter(|told| matches!(told.kind, Kind::Own | Kind::OwnById)) {
            let allowed = matches!(told.outcome, Outcome::Allowed { .. });
            self.must(!allowed || kept.contains(&told.key), || format!("confirmed, and forgotten: {told:?}"));
        }
    }

    fn recovers(&mut self, all: &[Told], healed: u64, enough: Duration) -> u64 {
        let fails = |told: &&Told| {
            told.deadline >= enough && told.began >= healed && matches!(told.outcome, Outcome::Failed { .. })
        };
        let last = all.iter().filter(fails).max_by_key(|told| told.began);
        let after = last.map_or(0, |told| told.began - healed);
        self.must(after < RECOVERY.as_millis() as u64, || format!("fails {after} ms after the last fault: {last:?}"));
        after
    }

    /// A connection that breaks before anything of a call is written leaves no doubt.
    fn unwritten_is_known(&mut self, all: &[Told]) {
        let (requests, whole) = self.callers.network.requests();
        if !whole {
            return;
        }
        let keys = requests.iter().flatten().filter(|word| word.contains(&b'{')).map(|word| request_key(word));
        let written: BTreeSet<_> = keys.collect();
        for told in all.iter().filter(|told| matches!(told.kind, Kind::Own)) {
            let doubts = matches!(told.outcome, Outcome::Failed { charged: Charged::Unknown, disconnected: true, .. });
            self.must(!doubts || written.contains(&told.key), || format!("never written, and not known: {told:?}"));
        }
    }
}
