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

/// Numbers of a version, and how its calls are spread.
#[derive(Clone, Debug)]
struct Case {
    larger: Limit,
    smaller: Limit,
    calls: Vec<Call>,
}

#[derive(Clone, Debug)]
struct Call {
    by_larger: bool,
    /// How long after the call before, in thousandths of the smaller one's longest reset.
    later: u64,
    cost: u64,
    retries: bool,
}

/// An algorithm's two limits: of the larger no number is below the smaller's. Not of windows from the first hit, which
/// each version may begin at another one.
fn limits() -> impl Strategy<Value = (Limit, Limit)> {
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
    (proptest::sample::select(algorithms.to_vec()), numbers(), numbers(), 0_u64..=1, period).prop_map(
        |(text, (rate, bursts), (more, more_bursts), faster, period)| {
            let limit = |rate: u64, burst: u64| {
                let text = text.replace("RATE", &rate.to_string()).replace("BURST", &burst.to_string());
                let limit: Limit = text.replace("PERIOD", period).parse().expect("a limit");
                limit.named("limit").expect("a name")
            };
            let small = rate + rate * bursts / 2;
            let large = rate + more * faster;
            (limit(large, large.max(small) + more * more_bursts), limit(rate, small))
        },
    )
}

fn histories() -> impl Strategy<Value = Case> {
    let call = (any::<bool>(), prop_oneof![3 => Just(0_u64), 3 => 0_u64..=60, 1 => 0_u64..=900], logarithmic(1..=40));
    let call =
        (call, any::<bool>()).prop_map(|((by_larger, later, cost), retries)| Call { by_larger, later, cost, retries });
    (limits(), proptest::collection::vec(call, CALLS..=CALLS)).prop_map(|((larger, smaller), calls)| Case {
        larger,
        smaller,
        calls,
    })
}

#[test]
fn what_two_versions_admit_together_stays_within_the_larger() {
    let engine = Engine::embedded();
    let config = Config { cases: cases(250), failure_persistence: None, ..Config::default() };
    let outcome = TestRunner::new(config).run(&histories(), |Case { larger, smaller, calls }| {
        let by_larger = engine.subject(larger.clone());
        let by_smaller = by_larger.changed(smaller.clone());
        let mut together = oracle(&larger);
        let mut now: Micros = 1 << 50;
        let longest = u128::from(micros(smaller.longest_reset()));
        // From the first call on, both are in force.
        for (first, Call { by_larger: is_larger, later, cost, retries }) in calls.into_iter().enumerate() {
            let is_larger = is_larger || first == 0;
            now += u64::try_from(longest * u128::from(later) / 1000).expect("small");
            let subject = if is_larger { &by_larger } else { &by_smaller };
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
