//! Versions of a rule in force at once, as in a rollout: what all admit together stays within the largest capacity and
//! the fastest rate among them, nobody waits longer than the longest reset among them, and what a call took is given
//! back as far as it is still owed, by whichever version.

use std::time::{Duration, SystemTime};

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use tollgate::{Algorithm, Embedded, Limit, Limiter, Operation, Request, Rule};
use tollgate_testing::effort::cases;
use tollgate_testing::engines::{Engine, Micros, Subject, answer, micros, time};
use tollgate_testing::histories::call_of;
use tollgate_testing::limits::logarithmic;
use tollgate_testing::oracle::{Answer, Retry};
use tollgate_testing::oracle_spec::oracle;
use tollgate_testing::rules::assert_of_every_algorithm;

/// Calls in a history.
const CALLS: usize = 400;

/// Versions of a limit, and how their calls are spread.
#[derive(Clone, Debug)]
struct Case {
    versions: Vec<Limit>,
    /// The largest capacity and debt, and the fastest rate of all.
    together: Limit,
    /// Whether calls have ids. Without, a refund gives back the newest units, whosever they are.
    ids: bool,
    calls: Vec<Call>,
}

#[derive(Clone, Debug)]
struct Call {
    by: prop::sample::Index,
    /// How long after the call before, in thousandths of the shortest version's longest reset.
    later: u64,
    cost: u64,
    retries: bool,
    operation: Operation,
}

/// An algorithm's versions, two or three. Not of windows from the first hit, which each version may begin at another
/// one.
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
    let rate = prop_oneof![3 => 1_u64..=60, 1 => Just(20)];
    let burst = prop_oneof![2 => 0_u64..=120, 1 => Just(0)];
    let debt = prop_oneof![2 => 0_u64..=60, 1 => Just(30)];
    let numbers = proptest::collection::vec((rate, burst, debt), 2..=3);
    let period = proptest::sample::select(vec!["1s", "7s", "1m", "1h", "30d"]);
    (proptest::sample::select(algorithms.to_vec()), numbers, period).prop_map(|(text, numbers, period)| {
        let limit = |rate: u64, burst: u64, debt: u64| {
            let text = text.replace("RATE", &rate.to_string()).replace("BURST", &burst.to_string());
            let text = text.replace("PERIOD", period).replace("DEBT", &debt.to_string());
            let limit: Limit = text.parse().expect("a limit");
            limit.named("limit").expect("a name")
        };
        let most = |of: fn(&(u64, u64, u64)) -> u64| numbers.iter().map(of).max().expect("two or three");
        let together = limit(most(|n| n.0), most(|n| n.0 + n.1), most(|n| n.2));
        (numbers.iter().map(|(rate, more, debt)| limit(*rate, rate + more, *debt)).collect(), together)
    })
}

fn histories() -> impl Strategy<Value = Case> {
    let call = (
        any::<prop::sample::Index>(),
        prop_oneof![3 => Just(0_u64), 3 => 0_u64..=60, 1 => 0_u64..=900],
        logarithmic(1..=40),
    );
    let operation = prop_oneof![
        12 => Just(Operation::Acquire), 4 => Just(Operation::Reserve), 1 => Just(Operation::Refund),
        1 => Just(Operation::Penalty), 1 => Just(Operation::Block), 2 => Just(Operation::Settle),
        2 => Just(Operation::Cancel),
    ];
    let call = (call, any::<bool>(), operation).prop_map(|((by, later, cost), retries, operation)| Call {
        by,
        later,
        cost,
        retries,
        operation,
    });
    let histories = (limits(), any::<bool>(), proptest::collection::vec(call, CALLS..=CALLS));
    histories.prop_map(|((versions, together), ids, calls)| Case { versions, together, ids, calls })
}

fn call(engine: &Engine, subject: &Subject<'_>, operation: Operation, request: Request<'_>) -> Answer {
    let decision = engine.runtime.block_on(call_of(operation, &engine.limiter, &subject.rule, request));
    answer(&decision.expect("a decision"))
}

#[test]
fn what_versions_admit_together_stays_within_the_largest_and_nobody_waits_longer_than_the_slowest() {
    let engine = Engine::embedded();
    let config = Config { cases: cases(20), failure_persistence: None, ..Config::default() };
    let outcome = TestRunner::new(config).run(&histories(), |Case { versions, together, ids, calls }| {
        let first = engine.subject(versions[0].clone());
        let subjects: Vec<_> = versions.iter().map(|version| first.changed(version.clone())).collect();
        let resets = || versions.iter().map(|version| micros(version.longest_reset()));
        let (shortest, longest) = (resets().min().expect("some"), resets().max().expect("some"));
        // Times are rounded up to each version's own clock.
        let ticks: Micros = versions.iter().map(|version| micros(version.tick())).sum();
        let mut together = oracle(&together);
        let mut now: Micros = 1 << 50;
        // Ids of calls that can be settled or cancelled, and what they took of all versions together.
        let mut open = Vec::new();
        // A penalty may be deeper than any version's debt, until what is left of it is not, by each version.
        let mut deep = false;
        for (number, Call { by, later, cost, retries, operation }) in calls.into_iter().enumerate() {
            now += u64::try_from(u128::from(shortest) * u128::from(later) / 1000).expect("small");
            // Later times aren't accepted.
            if now >= 1 << 52 {
                break;
            }
            let subject = &subjects[by.index(subjects.len())];
            let cost = cost.min(subject.limit().capacity());
            let id = format!("{number}");
            let request = Request::new(subject.key.as_str()).at(time(now)).cost(cost).id_ttl(Duration::from_hours(24));
            let said = format!("{operation:?} of {cost} at {now} by {}", subject.limit());
            let answer = match operation {
                Operation::Settle | Operation::Cancel if !open.is_empty() => {
                    let (id, since, taken, took, settled): (String, _, _, u64, bool) =
                        open.swap_remove(by.index(open.len()));
                    // Remembered for a day of the caller's time.
                    if now - since >= 86_400_000_000 {
                        continue;
                    }
                    if settled && operation == Operation::Settle {
                        // Answered as before.
                        call(&engine, subject, operation, request.id(&id));
                        open.push((id, since, taken, took, settled));
                        continue;
                    }
                    if operation == Operation::Cancel {
                        together.refund_of(taken, took, now);
                    } else {
                        deep |= cost > took;
                        let (taken, took) = match cost.checked_sub(took) {
                            Some(more) if more > 0 => {
                                let (_, taken, more) = together.penalty_of(taken, more, now);
                                (taken, took + more)
                            }
                            _ => (together.refund_of(taken, took - cost, now).1, cost),
                        };
                        open.push((id.clone(), since, taken, took, true));
                    }
                    call(&engine, subject, operation, request.id(&id))
                }
                Operation::Refund if !ids => {
                    together.refund(cost, now);
                    subject.refund(cost, now)
                }
                Operation::Penalty => {
                    deep = true;
                    together.by_id(false);
                    together.penalty(cost, now);
                    subject.penalty(cost, now)
                }
                Operation::Block => {
                    subject.block(1, now);
                    continue;
                }
                _ => {
                    let reserves = operation == Operation::Reserve && subject.limit().max_debt() > 0;
                    let operation = if reserves { Operation::Reserve } else { Operation::Acquire };
                    let (mut cost, by_id) = (cost, ids && number % 3 > 0);
                    let request = if by_id { request.id(&id) } else { request };
                    let mut answer = call(&engine, subject, operation, request);
                    if !answer.allowed && retries && answer.remaining > 0 {
                        cost = answer.remaining;
                        answer = call(&engine, subject, operation, request.cost(cost));
                    }
                    if answer.allowed {
                        together.by_id(by_id);
                        let within = match operation {
                            Operation::Reserve => together.reserve(cost, now),
                            _ => together.acquire(cost, now),
                        };
                        prop_assert!(within.allowed, "{}, {} admitted", said, cost);
                        if by_id {
                            open.push((id.clone(), now, together.taken(), cost, false));
                        }
                    }
                    answer
                }
            };
            let most = longest + ticks;
            prop_assert!(deep || answer.reset_after_us <= most, "{}: {:?}", said, answer);
            if let (Retry::AfterUs(wait), false) = (answer.retry, deep) {
                prop_assert!(wait <= most, "{}: {:?}", said, answer);
            }
            deep &= subjects.iter().any(|subject| subject.peek(0, now).reset_after_us > most);
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

    fn refund(&self, text: &str, after: Duration, cost: u64) {
        self.runtime.block_on(self.limiter.refund(&rule(text), Self::request(after, cost, None))).expect("an answer");
    }

    fn settle(&self, text: &str, after: Duration, cost: u64, id: &str) {
        self.runtime.block_on(self.limiter.settle(&rule(text), Self::request(after, cost, Some(id)))).expect("settled");
    }

    fn cancel(&self, text: &str, after: Duration, id: &str) {
        self.runtime.block_on(self.limiter.cancel(&rule(text), Self::request(after, 1, Some(id)))).expect("an answer");
    }
}

/// Named, so that versions of another period find the same state.
fn rule(text: &str) -> Rule {
    let limit = text.parse::<Limit>().and_then(|limit| limit.named("limit")).expect("a limit");
    Rule::new("test", limit).expect("a good name")
}

const NOW: Duration = Duration::ZERO;
const SECOND: Duration = Duration::from_secs(1);
const MICRO: Duration = Duration::from_micros(1);

/// What is used is used by all, whichever version took it.
#[test]
fn what_one_version_owes_another_owes_too() {
    for text in ["token-bucket 1/1s burst BURST", "fixed-window 1/1s burst BURST"] {
        let (versions, of) = (Versions::new(), |burst: &str| text.replace("BURST", burst));
        let (larger, smaller) = (of("2 max-debt 1000"), of("1"));
        assert!(versions.reserve(&larger, NOW, 1002) && !versions.reserve(&larger, 3 * SECOND, 1001));
        assert_eq!(versions.wait(&smaller, 3 * SECOND, 1), 999 * SECOND, "{text}");
        assert!(!versions.acquire(&smaller, 1002 * SECOND - MICRO, 1, None), "{text}");
        assert!(versions.acquire(&smaller, 1002 * SECOND, 1, None), "{text}");
    }
}

/// At the faster rate until the next charge, whichever version asks, and at the charging one's rate from then on.
#[test]
fn until_a_charge_units_pass_at_the_faster_rate_and_then_at_the_chargers() {
    let versions = Versions::new();
    let (fast, slow) = ("token-bucket 10/1s burst 100", "token-bucket 1/1s burst 100");
    assert!(versions.acquire(slow, NOW, 100, None));
    // The slow one's state, at its own rate for the slow one; at the fast one's for itself, from the taking on.
    assert_eq!(versions.wait(slow, SECOND, 10), 9 * SECOND);
    assert!(versions.acquire(fast, SECOND, 10, None) && !versions.acquire(slow, SECOND, 1, None));
    // Now at the fast one's for both, until the slow one charges.
    assert!(versions.acquire(slow, 2 * SECOND, 10, None));
    assert_eq!(versions.wait(slow, 2 * SECOND, 1), SECOND);
    assert_eq!(versions.wait(fast, 2 * SECOND, 1), SECOND / 10);
}

/// More than a smaller limit stays in the windows that it was taken in, though the smaller one's are faster.
#[test]
fn what_exceeds_a_smaller_limit_is_not_forgiven_by_its_shorter_windows() {
    for text in ["sliding-window RATE", "sliding-log RATE"] {
        let (versions, of) = (Versions::new(), |rate: &str| text.replace("RATE", rate));
        let (large, small) = (of("100/1m"), of("5/1s"));
        assert!(versions.acquire(&large, NOW, 100, None));
        assert!(!versions.acquire(&small, 3 * SECOND, 1, None), "{text}");
        assert!(versions.wait(&small, 3 * SECOND, 1) > 30 * SECOND, "{text}");
        assert!(!versions.acquire(&large, 3 * SECOND, 1, None), "{text}");
    }
}

/// Windows as long that start elsewhere: 19 of 10, if each version counted by its own start.
#[test]
fn windows_that_start_elsewhere_count_from_the_later_start_while_anything_is_used() {
    let versions = Versions::new();
    let (here, there) = ("fixed-window 10/10s", "fixed-window 10/10s start 5s");
    // Windows of the former begin at 6 seconds, of the latter at 1.
    assert!(versions.acquire(here, NOW, 1, None) && versions.acquire(there, 2 * SECOND, 9, None));
    for text in [here, there] {
        assert!(!versions.acquire(text, 7 * SECOND, 9, None), "{text}");
        assert!(!versions.acquire(text, 11 * SECOND - MICRO, 1, None), "{text}");
    }
    assert!(versions.acquire(here, 11 * SECOND, 10, None));
}

const FORMS: [&str; 4] =
    ["token-bucket LIMIT/100s", "fixed-window LIMIT/100s", "sliding-window LIMIT/100s", "sliding-log LIMIT/100s"];

/// Once its units have passed and others took them anew, nothing is owed: else 190 of 100 would be admitted.
#[test]
fn a_call_whose_units_have_passed_is_cancelled_and_settled_by_any_version_for_nothing() {
    for (text, by, settles) in FORMS.into_iter().flat_map(|text| {
        ["100", "50", "150"].into_iter().flat_map(move |by| [false, true].map(|settles| (text, by, settles)))
    }) {
        let (versions, of) = (Versions::new(), |limit: &str| text.replace("LIMIT", limit));
        let (own, other) = (of("100"), of(by));
        assert!(versions.acquire(&own, NOW, 90, Some("a")));
        let later = 300 * SECOND;
        assert!(versions.acquire(&own, later, 100, Some("b")), "{text}");
        if settles {
            versions.settle(&other, later, 0, "a")
        } else {
            versions.cancel(&other, later, "a")
        }
        assert!(!versions.acquire(&own, later, 1, None), "{text} by {by}");
    }
}

/// Units that another call's refund gave back aren't given back again: else 180 of 100 would be admitted.
#[test]
fn a_call_whose_units_were_given_back_is_cancelled_by_any_version_for_nothing() {
    for (text, by) in FORMS.into_iter().flat_map(|text| ["100", "50", "150"].map(|by| (text, by))) {
        let (versions, of) = (Versions::new(), |limit: &str| text.replace("LIMIT", limit));
        let (own, other) = (of("100"), of(by));
        assert!(versions.acquire(&own, NOW, 80, Some("a")));
        versions.refund(&other, NOW, 80);
        assert!(versions.acquire(&own, NOW, 100, Some("b")), "{text}");
        versions.cancel(&other, NOW, "a");
        assert!(!versions.acquire(&own, NOW, 1, None), "{text} by {by}");
    }
}

/// Of what is still in use of it, all comes back, by whichever version, and a second time nothing.
#[test]
fn a_call_is_cancelled_by_another_version_for_what_it_still_owes() {
    for (text, by) in FORMS.into_iter().flat_map(|text| ["50", "150"].map(|by| (text, by))) {
        let (versions, of) = (Versions::new(), |limit: &str| text.replace("LIMIT", limit));
        let (own, other) = (of("100"), of(by));
        assert!(versions.acquire(&own, NOW, 10, None) && versions.acquire(&own, NOW, 80, Some("a")), "{text}");
        versions.cancel(&other, NOW, "a");
        assert!(!versions.acquire(&own, NOW, 91, None) && versions.acquire(&own, NOW, 90, None), "{text} by {by}");
    }
}

#[test]
fn a_version_gives_back_nothing_of_another_ones_call_that_has_passed() {
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

/// Whoever's windows those were.
#[test]
fn a_key_that_was_given_back_in_full_is_free_wherever_windows_start() {
    let versions = Versions::new();
    let (aligned, first_hit) = ("fixed-window 1/10s", "fixed-window 3/10s start first-hit");
    // After the first window of the aligned one.
    let later = 7 * SECOND;
    assert!(versions.acquire(aligned, NOW, 1, None) && versions.acquire(first_hit, later, 2, None));
    assert!(!versions.acquire(aligned, later, 1, None));
    versions.refund(first_hit, later, 2);
    assert!(versions.acquire(aligned, later, 1, None));
    assert_eq!(versions.wait(aligned, later, 1), 9 * SECOND);
}

#[test]
fn what_a_settlement_gave_back_is_not_given_back_again() {
    for text in ["token-bucket 1/1s burst 10", "fixed-window 1/1s burst 10"] {
        let versions = Versions::new();
        assert!(versions.acquire(text, NOW, 10, Some("a")));
        versions.settle(text, 5 * SECOND, 5, "a");
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
