//! Two versions of a rule in force at once, as in a rollout: what both admit together stays within the larger one.

use std::time::{Duration, SystemTime};

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use tollgate::{Algorithm, Embedded, Limit, Limiter, Request};
use tollgate_testing::effort::cases;
use tollgate_testing::engines::{Engine, Micros, micros};
use tollgate_testing::limits::logarithmic;
use tollgate_testing::oracle_spec::oracle;
use tollgate_testing::rules::{assert_of_every_algorithm, rule};

/// Calls in a history.
const CALLS: usize = 400;

/// Versions of a limit, and how their calls are spread.
#[derive(Clone, Debug)]
struct Case {
    /// That with the largest capacity is the first.
    versions: Vec<Limit>,
    /// The largest capacity and debt, and the fastest rate of all.
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
    operation: Operation,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operation {
    Acquire,
    /// Where the limit allows debt; else an acquire.
    Reserve,
    Refund,
    /// Of windows of the calendar and logs; else an acquire, since a level forgives a penalty beyond empty.
    Penalty,
    Block,
}

/// An algorithm's versions: two, of which the first has the larger capacity and either may be the faster. Not of windows
/// from the first hit, which each version may begin at another one.
fn limits() -> impl Strategy<Value = (Vec<Limit>, Limit)> {
    let algorithms = [
        "token-bucket RATE/PERIOD burst BURST",
        "token-bucket RATE/PERIOD burst BURST max-debt DEBT",
        "fixed-window RATE/PERIOD burst BURST max-debt DEBT",
        "fixed-window RATE/PERIOD",
        "fixed-window RATE/PERIOD burst BURST",
        "fixed-window RATE/month",
        "sliding-window RATE/PERIOD",
        "sliding-log RATE/PERIOD",
    ];
    let one = |text: &str| text.replace("RATE", "1").replace("BURST", "1").replace("DEBT", "1").replace("PERIOD", "1s");
    // Permits that were taken under other numbers are as they were.
    assert_of_every_algorithm(&algorithms.map(one), &[Algorithm::Concurrency]);
    let numbers = || (1_u64..=60, 0_u64..=3);
    let debts = prop_oneof![1 => [0_u64..=60, 0..=60], 1 => (0_u64..=60).prop_map(|debt| [debt; 2])];
    let period = proptest::sample::select(vec!["1s", "7s", "1m", "1h", "30d"]);
    (proptest::sample::select(algorithms.to_vec()), numbers(), numbers(), 0_u64..=2, period, debts).prop_map(
        |(text, (rate, bursts), (more, more_bursts), faster, period, [debt, other_debt])| {
            let limit = |rate: u64, burst: u64, debt: u64| {
                let text = text.replace("RATE", &rate.to_string()).replace("BURST", &burst.to_string());
                let text = text.replace("PERIOD", period).replace("DEBT", &debt.to_string());
                let limit: Limit = text.parse().expect("a limit");
                limit.named("limit").expect("a name")
            };
            let small = rate + rate * bursts / 2;
            let large = if text.contains("BURST") || faster < 2 { rate + more * faster.min(1) } else { rate };
            let capacity = large.max(small) + more * more_bursts;
            let most = debt.max(other_debt);
            match faster {
                // The one with the smaller capacity is the faster.
                2 if text.contains("BURST") => {
                    let slower = 1 + rate / 2;
                    (vec![limit(slower, capacity, debt), limit(rate, small, other_debt)], limit(rate, capacity, most))
                }
                _ => (vec![limit(large, capacity, debt), limit(rate, small, other_debt)], limit(large, capacity, most)),
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
    let operation = prop_oneof![
        12 => Just(Operation::Acquire), 4 => Just(Operation::Reserve), 1 => Just(Operation::Refund), 1 => Just(Operation::Penalty),
        1 => Just(Operation::Block),
    ];
    let call = (call, any::<bool>(), operation).prop_map(|((by, later, cost), retries, operation)| Call {
        by,
        later,
        cost,
        retries,
        operation,
    });
    (limits(), proptest::collection::vec(call, CALLS..=CALLS)).prop_map(|((versions, together), calls)| Case {
        versions,
        together,
        calls,
    })
}

#[test]
fn what_two_versions_admit_together_stays_within_the_larger() {
    let engine = Engine::embedded();
    let config = Config { cases: cases(125), failure_persistence: None, ..Config::default() };
    let outcome = TestRunner::new(config).run(&histories(), |Case { versions, together, calls }| {
        let first = engine.subject(versions[0].clone());
        let others: Vec<_> = versions[1..].iter().map(|version| first.changed(version.clone())).collect();
        let counts_all = matches!(together.algorithm(), Algorithm::CalendarWindow | Algorithm::SlidingLog);
        let mut together = oracle(&together);
        let mut now: Micros = 1 << 50;
        let longest = u128::from(micros(versions[versions.len() - 1].longest_reset()));
        // From the first call on, all are in force.
        for (number, Call { by, later, cost, retries, operation }) in calls.into_iter().enumerate() {
            now += u64::try_from(longest * u128::from(later) / 1000).expect("small");
            // Later times aren't accepted.
            if now >= 1 << 52 {
                break;
            }
            let which = if number == 0 { 0 } else { by.index(versions.len()) };
            let subject = if which == 0 { &first } else { &others[which - 1] };
            let mut cost = cost.min(subject.limit().capacity());
            match operation {
                Operation::Reserve if subject.limit().max_debt() > 0 => {
                    if subject.reserve(cost, now).allowed {
                        let allowed = together.reserve(cost, now).allowed;
                        prop_assert!(allowed, "a reserve of {} at {} by {}", cost, now, subject.limit());
                    }
                    continue;
                }
                Operation::Refund => {
                    subject.refund(cost, now);
                    together.refund(cost, now);
                    continue;
                }
                Operation::Penalty if counts_all => {
                    subject.penalty(cost, now);
                    together.penalty(cost, now);
                    continue;
                }
                Operation::Block => {
                    subject.block(1, now);
                    continue;
                }
                Operation::Acquire | Operation::Reserve | Operation::Penalty => {}
            }
            let answer = subject.acquire(cost, now);
            let admitted = if !answer.allowed && retries && answer.remaining > 0 {
                cost = answer.remaining;
                subject.acquire(cost, now).allowed
            } else {
                answer.allowed
            };
            if admitted {
                // Where one may be in debt while the other isn't, the bound is the capacity and the debt.
                let lends = versions.iter().any(|version| version.max_debt() != versions[0].max_debt());
                let within = if lends { together.reserve(cost, now) } else { together.acquire(cost, now) };
                prop_assert!(within.allowed, "{} at {} by {}", cost, now, subject.limit());
            }
        }
        Ok(())
    });
    outcome.unwrap_or_else(|failure| panic!("{failure}"));
}

/// Calls by versions of a rule on one key, at times after the first.
struct Versions {
    limiter: Limiter,
    runtime: tokio::runtime::Runtime,
}

impl Versions {
    fn new() -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        Self { limiter: Limiter::new(Embedded::new()), runtime }
    }

    fn request(after: Duration, cost: u64, id: Option<&str>) -> Request<'_> {
        let request = Request::new("key").cost(cost).at(SystemTime::UNIX_EPOCH + Duration::from_secs(1 << 30) + after);
        id.map_or(request, |id| request.id(id))
    }

    fn acquire(&self, text: &str, after: Duration, cost: u64, id: Option<&str>) -> bool {
        let answer = self.runtime.block_on(self.limiter.acquire(&rule(text), Self::request(after, cost, id)));
        answer.expect("a decision").allowed
    }

    /// How long a denied call is to wait.
    fn wait(&self, text: &str, after: Duration, cost: u64) -> Duration {
        let answer = self.runtime.block_on(self.limiter.acquire(&rule(text), Self::request(after, cost, None)));
        answer.expect("a decision").retry_after.duration().expect("a wait")
    }

    fn reserve(&self, text: &str, after: Duration, cost: u64) -> bool {
        let answer = self.runtime.block_on(self.limiter.reserve(&rule(text), Self::request(after, cost, None)));
        answer.expect("a decision").allowed
    }

    fn cancel(&self, text: &str, after: Duration, id: &str) {
        self.runtime.block_on(self.limiter.cancel(&rule(text), Self::request(after, 1, Some(id)))).expect("an answer");
    }
}

const NOW: Duration = Duration::ZERO;
const SECOND: Duration = Duration::from_secs(1);
const MICRO: Duration = Duration::from_micros(1);

#[test]
fn a_version_in_debt_is_kept_until_it_is_out_of_debt() {
    for text in ["token-bucket 1/1s burst BURST", "fixed-window 1/1s burst BURST"] {
        let (versions, of) = (Versions::new(), |burst: &str| text.replace("BURST", burst));
        let (larger, smaller) = (of("2 max-debt 1000"), of("1"));
        assert!(versions.reserve(&larger, NOW, 1002) && !versions.reserve(&larger, 3 * SECOND, 1001));
        assert!(versions.acquire(&smaller, 3 * SECOND, 1, None), "{text}");
        assert!(!versions.reserve(&larger, 3 * SECOND + MICRO, 1001), "{text}");
    }
}

#[test]
fn a_version_gives_back_nothing_of_another_ones_call() {
    for text in ["token-bucket RATE/1s burst 100", "fixed-window RATE/1s burst 100"] {
        let (versions, of) = (Versions::new(), |rate: &str| text.replace("RATE", rate));
        let (fast, slow) = (of("100"), of("1"));
        assert!(versions.acquire(&fast, NOW, 100, Some("a")) && versions.acquire(&fast, SECOND, 100, None));
        versions.cancel(&slow, SECOND, "a");
        assert!(!versions.acquire(&slow, SECOND, 1, None) && !versions.acquire(&fast, SECOND, 1, None), "{text}");
    }
}

/// It had taken no more than there was.
#[test]
fn a_cancelled_call_gives_another_version_no_more_than_it_took_of_it() {
    for text in ["token-bucket RATE/1000s", "fixed-window RATE/1000s"] {
        let (versions, of) = (Versions::new(), |rate: &str| text.replace("RATE", rate));
        let (larger, smaller) = (of("100"), of("10"));
        assert!(versions.acquire(&smaller, NOW, 5, None) && versions.acquire(&larger, NOW, 90, Some("a")));
        versions.cancel(&larger, NOW, "a");
        assert!(!versions.acquire(&smaller, MICRO, 10, None), "{text}");
        assert!(versions.acquire(&larger, MICRO, 95, None), "{text}");
    }
}

/// Charged under windows that start at the first hit, its own start anywhere until it is unused.
#[test]
fn a_version_that_was_given_back_in_full_is_free_wherever_its_windows_start() {
    let versions = Versions::new();
    let (aligned, first_hit) = ("fixed-window 1/10s", "fixed-window 3/10s start first-hit");
    // After the first window of the aligned one.
    let later = 7 * SECOND;
    assert!(versions.acquire(aligned, NOW, 1, None) && versions.acquire(first_hit, later, 2, None));
    let own = rule(first_hit);
    let given = versions.limiter.refund(&own, Versions::request(later, 1, None));
    versions.runtime.block_on(given).expect("an answer");
    assert!(versions.acquire(aligned, later, 1, None));
}

#[test]
fn what_a_settlement_gave_back_is_not_given_back_again() {
    for text in ["token-bucket 1/1s burst 10", "fixed-window 1/1s burst 10"] {
        let versions = Versions::new();
        assert!(versions.acquire(text, NOW, 10, Some("a")));
        let own = rule(text);
        let settled = versions.limiter.settle(&own, Versions::request(5 * SECOND, 5, Some("a")));
        versions.runtime.block_on(settled).expect("an answer");
        assert!(versions.acquire(text, 5 * SECOND, 5, None));
        versions.cancel(text, 5 * SECOND, "a");
        assert!(!versions.acquire(text, 5 * SECOND, 6, None), "{text}");
    }
}

/// They have used nothing, whoever left before them.
#[test]
fn reservations_that_are_given_up_before_their_turn_come_back_in_full() {
    let text = "token-bucket 10/1s burst 10 max-debt 1000";
    let versions = Versions::new();
    let ids: Vec<_> = (0..100).map(|n| format!("{n}")).collect();
    for id in &ids {
        let request = Versions::request(NOW, 1, Some(id));
        let answer = versions.runtime.block_on(versions.limiter.reserve(&rule(text), request));
        assert!(answer.expect("a decision").allowed);
    }
    ids[50..].iter().for_each(|id| versions.cancel(text, SECOND, id));
    ids[40..50].iter().for_each(|id| versions.cancel(text, 2 * SECOND, id));
    // Of 100 units, 20 have refilled and 60 came back.
    let own = rule(text);
    let peek = versions.limiter.peek(&own, Versions::request(2 * SECOND, 1, None));
    let owed = versions.runtime.block_on(peek).expect("a decision").reset_after;
    assert_eq!(owed, 2 * SECOND, "{text}");
}

/// Also where it waits beyond the time for which it would have been kept after its last admission.
#[test]
fn a_denied_version_waits_as_long_as_it_was_told() {
    let bucket = ["token-bucket 530/30d burst 37", "token-bucket 17/30d burst 26"];
    let window = ["sliding-window 51/1h", "sliding-window 27/1h"];
    let of_bucket = [
        (7814, 1, 14),
        (33_171_041_558, 0, 16),
        (1_142_003_040_385, 1, 1),
        (1_142_003_075_066, 0, 1),
        (2_009_633_714_809, 0, 25),
    ];
    // Windows begin 1376 seconds after the first of these times.
    let of_window = [(0, 1, 1), (1_670_056_782, 1, 1), (3_251_615_984, 0, 49), (6_061_107_493, 0, 20)]
        .map(|(at, by, cost)| (at + 1_376_000_000, by, cost));
    let cases = [
        (bucket, &of_bucket[..], (2_029_103_693_802, 26)),
        (window, &of_window[..], (6_380_542_413 + 1_376_000_000, 27)),
    ];
    for (texts, calls, (denied_at, cost)) in cases {
        let versions = Versions::new();
        for (at, by, cost) in calls {
            versions.acquire(texts[*by], Duration::from_micros(*at), *cost, None);
        }
        let now = Duration::from_micros(denied_at);
        let told = versions.wait(texts[1], now, cost);
        assert!(!versions.acquire(texts[1], now + told - MICRO, cost, None), "{}", texts[1]);
        assert!(versions.acquire(texts[1], now + told, cost, None), "{}", texts[1]);
    }
}
