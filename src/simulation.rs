//! The client under faults of time and network, all drawn from a seed. Callers, network and servers are tasks of one
//! thread, whose clock advances only when all of them wait. The same seed repeats the same run, byte for byte.
//!
//! ```text
//! callers    ask the limiter, wait or give up, and remember the answers
//! network    connects them to the servers, if the faults let it
//! wire       carries bytes, as late, as short or never, as the faults say
//! medium     the time, how long messages take, and the record of what happens
//! serving    what servers answer, by the scripts themselves
//! faults     what goes wrong, and when
//! ledger     what was really taken
//! oracle     what must hold of it all
//! dropped    waits, leases, permits and costs that are given back in and after an outage
//! impatient  callers with less time than a round trip takes, in and after an outage
//! ```
//!
//! `tests/simulate.sh` runs any number of seeds. TOLLGATE_SIMULATE_TRACE=1 prints everything that happens.

mod callers;
mod chance;
mod dropped;
mod faults;
mod impatient;
mod ledger;
mod medium;
mod network;
mod oracle;
mod resp;
mod run;
mod server;
mod serving;
mod slots;
mod wire;

use std::cell::RefCell;
use std::sync::Arc;

use network::Network;
use run::{Run, run};

/// What the limiter talks to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Topology {
    OneNode,
    /// Three Sentinels, a primary and its replica.
    Sentinel,
    /// Three primaries with a replica each.
    Cluster,
}

thread_local! {
    static NETWORK: RefCell<Option<Arc<Network>>> = const { RefCell::new(None) };
}

/// The simulated network, if this thread simulates.
pub(crate) fn network() -> Option<Arc<Network>> {
    NETWORK.with_borrow(Clone::clone)
}

/// Seeds that every test run tries, in each of its parts.
const SEEDS: u64 = 15;

/// Runs a part of the seeds: every `of`th, from this one on.
fn seeds(part: usize, of: usize, run: fn(u64) -> Run) {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().expect("a whole number"));
    let from = number("TOLLGATE_SIMULATE_FROM").unwrap_or(1);
    let count = number("TOLLGATE_SIMULATE_SEEDS").unwrap_or(4 * SEEDS);
    let (mut calls, mut failed, mut slowest) = (0, 0, (0, 0));
    let mut broken = Vec::new();
    for seed in (from..from + count).skip(part).step_by(of) {
        let Run { verdict, shown, .. } = run(seed);
        (calls, failed) = (calls + verdict.calls, failed + verdict.failed);
        slowest = slowest.max((verdict.recovered, seed));
        if !verdict.broken.is_empty() {
            eprintln!("{shown}");
            broken.push(seed);
        }
    }
    let (recovered, seed) = slowest;
    if calls == 0 {
        return;
    }
    println!("{calls} calls, {failed} of them failed; the last {recovered} ms after all was well (seed {seed})");
    assert!(broken.is_empty(), "{} of {} seeds broke: {broken:?}", broken.len(), count.div_ceil(of as u64));
}

#[test]
fn seeds_1() {
    seeds(0, 4, run);
}

#[test]
fn seeds_2() {
    seeds(1, 4, run);
}

#[test]
fn seeds_3() {
    seeds(2, 4, run);
}

#[test]
fn seeds_4() {
    seeds(3, 4, run);
}

#[test]
fn seeds_dropped_1() {
    seeds(0, 8, dropped::run);
}

#[test]
fn seeds_dropped_2() {
    seeds(4, 8, dropped::run);
}

#[test]
fn seeds_impatient() {
    seeds(1, 40, impatient::run);
}

#[test]
fn callers_with_enough_time_wait_for_none_of_those_without() {
    let verdict = impatient::crowd(1).verdict;
    assert!(verdict.broken.is_empty(), "{:?}", verdict.broken);
}

/// Otherwise a failed seed could not be investigated.
#[test]
fn a_seed_repeats_its_run_to_the_byte() {
    // The nightly run repeats more of them. A hundred callers without patience take the longest.
    let nightly = std::env::var_os("TOLLGATE_SIMULATE_SEEDS").is_some();
    let repeats = |run: fn(u64) -> Run, seeds: u64| {
        for seed in 1..=if nightly { 40 } else { seeds } {
            let [first, second] = [run(seed), run(seed)];
            assert_eq!(first.digest, second.digest, "seed {seed}");
            assert!(first.digest.1 > 100, "seed {seed}: {:?}", first.digest);
        }
    };
    repeats(run, 2);
    repeats(dropped::run, 2);
    repeats(impatient::run, 1);
}
