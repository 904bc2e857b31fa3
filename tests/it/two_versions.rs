//! Two versions of a rule in force at once, as in a rollout: what both admit together stays within the larger one.

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use tollgate::Limit;

use crate::support::effort::cases;
use crate::support::engines::{Engine, Micros, micros};
use crate::support::limits::logarithmic;
use crate::support::oracle_spec::oracle;

/// Calls in a history.
const CALLS: usize = 400;

/// Versions of a limit, and how their calls are spread.
#[derive(Clone, Debug)]
struct Case {
    /// That with the largest capacity is the first.
    versions: Vec<Limit>,
    /// The largest capacity and the fastest rate of all.
    together: Limit,
    calls: Vec<Call>,
}

#[derive(Clone, Debug)]
struct Call {
    by: prop::sample::Index,
    /// How long after the call before, in thousandths of the last version's longest reset.
    later: u64,
    cost: u64,
    retries: bool,
}

/// An algorithm's versions: two, of which the first has the larger capacity and either may be the faster. Not of windows
/// from the first hit, which each version may begin at another one.
fn limits() -> impl Strategy<Value = (Vec<Limit>, Limit)> {
    let algorithms = [
        "token-bucket RATE/PERIOD burst BURST",
        "gcra RATE/PERIOD burst BURST",
        "fixed-window RATE/PERIOD",
        "fixed-window RATE/PERIOD burst BURST",
        "fixed-window RATE/month",
        "sliding-window RATE/PERIOD",
        "sliding-log RATE/PERIOD",
    ];
    let numbers = || (1_u64..=60, 0_u64..=3);
    let period = proptest::sample::select(vec!["1s", "7s", "1m", "1h", "30d"]);
    (proptest::sample::select(algorithms.to_vec()), numbers(), numbers(), 0_u64..=2, period).prop_map(
        |(text, (rate, bursts), (more, more_bursts), faster, period)| {
            let limit = |rate: u64, burst: u64| {
                let text = text.replace("RATE", &rate.to_string()).replace("BURST", &burst.to_string());
                let limit: Limit = text.replace("PERIOD", period).parse().expect("a limit");
                limit.named("limit").expect("a name")
            };
            let small = rate + rate * bursts / 2;
            let large = if text.contains("BURST") || faster < 2 { rate + more * faster.min(1) } else { rate };
            let capacity = large.max(small) + more * more_bursts;
            match faster {
                // The one with the smaller capacity is the faster.
                2 if text.contains("BURST") => {
                    let slower = 1 + rate / 2;
                    (vec![limit(slower, capacity), limit(rate, small)], limit(rate, capacity))
                }
                _ => (vec![limit(large, capacity), limit(rate, small)], limit(large, capacity)),
            }
        },
    )
}

fn histories() -> impl Strategy<Value = Case> {
    let call = (
        any::<prop::sample::Index>(),
        prop_oneof![3 => Just(0_u64), 3 => 0_u64..=60, 1 => 0_u64..=900],
        logarithmic(1..=40),
    );
    let call = (call, any::<bool>()).prop_map(|((by, later, cost), retries)| Call { by, later, cost, retries });
    (limits(), proptest::collection::vec(call, CALLS..=CALLS)).prop_map(|((versions, together), calls)| Case {
        versions,
        together,
        calls,
    })
}

#[test]
fn what_two_versions_admit_together_stays_within_the_larger() {
    let engine = Engine::embedded();
    let config = Config { cases: cases(250), failure_persistence: None, ..Config::default() };
    let outcome = TestRunner::new(config).run(&histories(), |Case { versions, together, calls }| {
        let first = engine.subject(versions[0].clone());
        let others: Vec<_> = versions[1..].iter().map(|version| first.changed(version.clone())).collect();
        let mut together = oracle(&together);
        let mut now: Micros = 1 << 50;
        let longest = u128::from(micros(versions[versions.len() - 1].longest_reset()));
        // From the first call on, all are in force.
        for (number, Call { by, later, cost, retries }) in calls.into_iter().enumerate() {
            now += u64::try_from(longest * u128::from(later) / 1000).expect("small");
            let which = if number == 0 { 0 } else { by.index(versions.len()) };
            let subject = if which == 0 { &first } else { &others[which - 1] };
            let mut cost = cost.min(subject.limit().capacity());
            let answer = subject.acquire(cost, now);
            let admitted = if !answer.allowed && retries && answer.remaining > 0 {
                cost = answer.remaining;
                subject.acquire(cost, now).allowed
            } else {
                answer.allowed
            };
            if admitted {
                prop_assert!(together.acquire(cost, now).allowed, "{} at {} by {}", cost, now, subject.limit());
            }
        }
        Ok(())
    });
    outcome.unwrap_or_else(|failure| panic!("{failure}"));
}
