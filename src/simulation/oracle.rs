//! What must hold in every simulation, whatever its faults.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::Topology;
use super::callers::{CallKind, Callers, OWN, Outcome, Told};
use super::faults::{Expected, RECONNECTED};
use super::ledger::request_key;
use super::server::Role;
use crate::Charged;

/// How late an answer may be.
const GRAIN: Duration = Duration::from_millis(3);
/// How soon after the last fault every call succeeds, whatever the fault was.
pub(super) const RECOVERY: Duration = Duration::from_millis(2500);
/// A deadline long enough for an answer if nothing is wrong.
pub(super) const ENOUGH: Duration = Duration::from_millis(100);

/// The first violation, and a run's numbers.
pub(super) struct Verdict {
    pub(super) broken: Vec<String>,
    pub(super) calls: usize,
    pub(super) failed: usize,
    /// When the last failing call after the last fault began, in milliseconds after that fault.
    pub(super) recovered: u64,
}

pub(super) fn judge(
    callers: &Callers,
    topology: Topology,
    confirmed: bool,
    healed: u64,
    expected: Expected,
) -> Verdict {
    let told = callers.told.lock().expect("nobody panicked").clone();
    let mut judge = Judge { callers, broken: Vec::new() };
    let end = callers.network.medium.ms();
    judge.answers_in_time(&told);
    judge.errors_are_explained(&told, expected);
    judge.own_keys(&told);
    judge.shared_keys(&told, topology, end);
    judge.servers_are_told_apart(healed);
    if confirmed {
        judge.confirmed_is_kept(&told);
    }
    // A call that must wait for replicas waits for at most a quarter of its time.
    let enough = if confirmed { 5 * ENOUGH } else { ENOUGH };
    let recovered = judge.recovers(&told, healed, enough, expected);
    judge.unwritten_is_known(&told);
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

    /// No call returns an error that the faults can't cause.
    fn errors_are_explained(&mut self, all: &[Told], expected: Expected) {
        const CODES: [&str; 9] =
            ["OOM", "NOREPLICAS", "MISCONF", "MASTERDOWN", "CLUSTERDOWN", "LOADING", "BUSY", "READONLY", "TRYAGAIN"];
        for told in all {
            let Outcome::Failed { why, .. } = &told.outcome else { continue };
            let (class, said) = why.split_once(": ").unwrap_or((why, ""));
            let explained = match class {
                "unreachable" | "deadline" | "disconnected" | "unconfirmed" => true,
                "not-now" => true,
                // The rest of a reply that was cut off.
                "garbled" => said.contains("Unexpected end of input"),
                "refused" => CODES.iter().any(|code| said.contains(code)),
                _ => false,
            };
            self.must(explained && !said.contains("NOSCRIPT"), || format!("an error that nothing explains: {told:?}"));
            let agree = !said.contains("nodes don't agree on slot");
            let excused = agree || !expected.nodes_agree || told.kind.has_several_keys();
            self.must(excused, || format!("nodes that agree were misunderstood: {told:?}"));
            let asked = !said.contains("the breaker is open");
            self.must(asked || !expected.is_always_asked, || format!("the breaker opened by too little: {told:?}"));
        }
    }

    /// Compares the answers for each key with what its server did.
    fn own_keys(&mut self, all: &[Told]) {
        let mut by_key: BTreeMap<&str, Vec<&Told>> = BTreeMap::new();
        for told in all.iter().filter(|told| told.kind.is_own() || told.kind == CallKind::OwnPeek) {
            by_key.entry(&told.key).or_default().push(told);
        }
        let (taken, forgotten) = {
            let ledger = self.callers.network.medium.ledger();
            (by_key.keys().map(|key| ledger.of(key)).collect::<Vec<_>>(), ledger.forgotten())
        };
        for ((key, all), taken) in by_key.into_iter().zip(taken) {
            let first = all[0];
            // A forgotten id may be charged again.
            let most = if first.kind == CallKind::OwnById && all.len() > 1 { 1 + forgotten } else { 1 };
            let peeks = first.kind == CallKind::OwnPeek;
            let most = if peeks { 0 } else { most };
            let what = |how: &str| format!("{how}: {key} was charged {taken:?}, and told {all:?}");
            self.must(taken.calls <= most, || what("charged more than once"));
            self.must(taken.units == taken.calls * first.cost, || what("charged for another's cost"));
            let allowed = all.iter().any(|told| matches!(told.outcome, Outcome::Allowed { .. }));
            let never = |told: &&Told| matches!(told.outcome, Outcome::Failed { charged: Charged::No, .. });
            let surely = |told: &&Told| matches!(told.outcome, Outcome::Failed { charged: Charged::Yes, .. });
            self.must(!allowed || taken.calls > 0 || peeks, || what("allowed and not charged"));
            self.must(taken.calls == 0 || !all.iter().all(never), || what("charged, and told it wasn't"));
            self.must(taken.calls > 0 || !all.iter().any(surely), || what("told it was charged"));
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
            let (CallKind::Shared(rule) | CallKind::AtMost(rule)) = told.kind else { continue };
            let (_, told_taken, perhaps) = sums.entry(&told.key).or_insert((rule, 0, 0));
            match &told.outcome {
                Outcome::Allowed { granted, .. } => *told_taken += granted,
                // The answer doesn't say how much of the cost it got.
                Outcome::Failed { charged: Charged::Yes, .. } if matches!(told.kind, CallKind::AtMost(_)) => {
                    *perhaps += told.cost;
                }
                Outcome::Failed { charged: Charged::Yes, .. } => *told_taken += told.cost,
                Outcome::Abandoned | Outcome::Failed { charged: Charged::Unknown, .. } => *perhaps += told.cost,
                _ => {}
            }
        }
        for (key, (rule, admitted, perhaps)) in sums {
            let (taken, forgotten) = {
                let ledger = self.callers.network.medium.ledger();
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
            // During a failover both servers may decide.
            let copies = if topology == Topology::OneNode { 1 } else { 1 + forgotten };
            let most = capacity * (2 + forgotten) + rate * end.div_ceil(1000) * copies;
            self.must(taken <= most, || what("more than the rule"));
        }
        for told in all {
            let (CallKind::Shared(rule) | CallKind::AtMost(rule)) = told.kind else { continue };
            let (Outcome::Allowed { limit, .. } | Outcome::Denied { limit }) = told.outcome else { continue };
            let capacity = self.callers.rules.shared[rule].1;
            // With two limits, the one with the least left is reported.
            self.must(limit == capacity || (rule == 3 && limit == 60), || format!("another's answer: {told:?}"));
        }
    }

    /// No call is decided by a server that reports being a replica; and once callers know that slots have moved, they
    /// don't ask the wrong server for long.
    fn servers_are_told_apart(&mut self, healed: u64) {
        let (misled, moved) = {
            let ledger = self.callers.network.medium.ledger();
            (ledger.misled, ledger.moved.clone())
        };
        self.must(misled == 0, || {
            format!("{misled} scripts were sent to a server that has been a replica all the time")
        });
        let mut after = moved.into_iter().filter(|at| *at > healed);
        let (first, last) = (after.next().unwrap_or_default(), after.next_back().unwrap_or_default());
        let long = last.saturating_sub(first);
        self.must(long < 2000, || {
            format!("for {long} ms, calls are sent to a server that says that the slot has moved")
        });
    }

    /// What a replica has confirmed survives any failover.
    fn confirmed_is_kept(&mut self, all: &[Told]) {
        let network = &self.callers.network;
        let (emptied, carried) = {
            let ledger = network.medium.ledger();
            (ledger.emptied, ledger.carried)
        };
        if emptied > 0 || carried > 0 {
            return;
        }
        let now_us = network.medium.now_us();
        let mut kept = BTreeSet::new();
        for server in network.servers() {
            let mut state = server.state();
            if state.role == Role::Primary {
                state.store.set_time(now_us);
                kept.extend(state.store.keys().iter().map(|key| request_key(key)));
            }
        }
        for told in all.iter().filter(|told| told.kind.is_own()) {
            let allowed = matches!(told.outcome, Outcome::Allowed { .. });
            self.must(!allowed || kept.contains(&told.key), || format!("confirmed, and forgotten: {told:?}"));
        }
    }

    fn recovers(&mut self, all: &[Told], healed: u64, enough: Duration, expected: Expected) -> u64 {
        let enough = if expected.all_succeed { 5 * ENOUGH } else { enough };
        let well_from = match expected.only_connections_fail_from {
            _ if expected.all_succeed => Duration::ZERO,
            // The first call that isn't answered reveals it.
            Some(from) => {
                let unanswered = |told: &&Told| {
                    matches!(told.outcome, Outcome::Failed { .. })
                        && told.ended.is_some_and(|ended| u128::from(ended) >= from.as_millis())
                };
                let first = all.iter().filter(unanswered).map(|told| told.began).min().unwrap_or_default();
                Duration::from_millis(first).max(from) + RECONNECTED
            }
            None => expected.well_from,
        };
        let well_from = well_from.as_millis() as u64;
        let fails = |told: &&Told| {
            let excused = told.deadline < enough || expected.all_succeed && told.kind.has_several_keys();
            !excused && matches!(told.outcome, Outcome::Failed { .. })
        };
        let last = all.iter().filter(fails).max_by_key(|told| told.began);
        let began = last.map_or(0, |told| told.began);
        let well = last.is_none() || began < well_from;
        self.must(well, || format!("fails though all should be well from {well_from} ms on: {last:?}"));
        began.saturating_sub(healed)
    }

    /// If a connection breaks before any of a call is written, its charge is known.
    fn unwritten_is_known(&mut self, all: &[Told]) {
        let (requests, whole) = self.callers.network.medium.requests();
        if !whole {
            return;
        }
        let keys = requests.iter().flatten().filter(|word| word.contains(&b'{')).map(|word| request_key(word));
        let written: BTreeSet<_> = keys.collect();
        for told in all.iter().filter(|told| matches!(told.kind, CallKind::Own)) {
            let doubts = matches!(told.outcome, Outcome::Failed { charged: Charged::Unknown, disconnected: true, .. });
            self.must(!doubts || written.contains(&told.key), || format!("never written, and not known: {told:?}"));
        }
    }
}
