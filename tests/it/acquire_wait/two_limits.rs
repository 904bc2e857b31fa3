//! Waits of a rule with two limits, of which one may refill a thousand times as fast as the other.

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use tollgate::{Algorithm, Limit};
use tollgate_testing::effort::cases;
use tollgate_testing::engines::{Micros, micros};

use super::*;

/// How late a caller is seen to be served: the clock goes in steps of 10 ms.
const LATE: Micros = 25_000;

/// Callers that come at once, and of whom some give up together.
#[derive(Clone, Debug)]
struct Crowd {
    limits: [String; 2],
    /// What each takes of both, and whether it gives up.
    callers: Vec<([u64; 2], bool)>,
    /// When those do who still wait then, in steps of 10 ms.
    give_up_at: u64,
}

/// When a limit that was unused has had so many units to take, from the first call on.
fn refilled_by(limit: &Limit, units: u64) -> Micros {
    let owed = units.saturating_sub(limit.capacity());
    match limit.algorithm() {
        Algorithm::FixedWindow => owed.div_ceil(limit.rate()) * micros(limit.period()),
        _ => (owed * micros(limit.period())).div_ceil(limit.rate()),
    }
}

/// When each was served, if it was.
async fn served(crowd: &Crowd) -> Vec<Option<Micros>> {
    let (world, rule) = (World::new(), rule_of(&crowd.limits));
    let began = Instant::now();
    let mut callers = Vec::new();
    for (costs, gives_up) in &crowd.callers {
        let (limiter, rule, [first, second]) = (world.limiters[0].clone(), rule.clone(), *costs);
        let waiting = tokio::spawn(async move {
            let costs = [("first", first), ("second", second)];
            let request = tollgate::Request::new("key").costs(&costs);
            let decision = limiter.acquire_wait(&rule, request, 3600 * SECOND).await.expect("a decision");
            assert!(decision.allowed, "{decision:?}");
            began.elapsed()
        });
        callers.push((waiting, *gives_up));
        for _ in 0..20 {
            tokio::task::yield_now().await;
        }
    }
    world.pass(Duration::from_millis(10 * crowd.give_up_at)).await;
    callers.iter().filter(|(_, gives_up)| *gives_up).for_each(|(waiting, _)| waiting.abort());
    let all = [0, 1].map(|at| crowd.callers.iter().map(|(costs, _)| costs[at]).sum());
    let longest = rule.limits().zip(all).map(|(limit, all)| refilled_by(limit, all)).max().expect("two limits");
    world.pass(Duration::from_micros(longest) + SECOND).await;
    let mut times = Vec::new();
    for (waiting, _) in callers {
        assert!(waiting.is_finished(), "{crowd:?}: one waits on");
        times.push(waiting.await.ok().map(micros));
    }
    times
}

/// They go in order, as both limits refill, neither earlier nor later: what those who gave up had been promised is
/// there for the others, except what had refilled for them by then.
fn check(crowd: &Crowd, times: &[Option<Micros>]) -> Result<(), String> {
    let limits: Vec<Limit> = crowd.limits.iter().map(|text| text.parse().expect("a limit")).collect();
    let gave_up_at = crowd.give_up_at * 10_000;
    // What was lost in each limit: who gave up could have had it by then, as those before him had given up already, but
    // still waited for the other limit or hadn't noticed yet.
    let (mut stays, mut lost) = ([0, 0], [0, 0]);
    for ((costs, _), time) in crowd.callers.iter().zip(times) {
        for (at, cost) in costs.iter().enumerate() {
            if time.is_some() {
                stays[at] += cost;
            } else if refilled_by(&limits[at], stays[at] + lost[at] + cost) <= gave_up_at + LATE {
                lost[at] += cost;
            }
        }
    }
    let add =
        |units: &mut [u64; 2], costs: &[u64; 2]| units.iter_mut().zip(costs).for_each(|(units, cost)| *units += cost);
    let (mut taken, mut promised, mut last) = ([0, 0], [0, 0], 0);
    for (at, ((costs, _), time)) in crowd.callers.iter().zip(times).enumerate() {
        add(&mut promised, costs);
        let Some(time) = *time else { continue };
        add(&mut taken, costs);
        let first = |units: [u64; 2]| limits.iter().zip(units).map(|(limit, units)| refilled_by(limit, units)).max();
        let earliest = first(taken).unwrap_or_default();
        let told = first(promised).unwrap_or_default();
        let lost = [0, 1].map(|at| taken[at] + lost[at]);
        let latest = told.min(first(lost).unwrap_or_default().max(gave_up_at));
        let what = format!("caller {at} of {crowd:?}, {times:?}: served after {time} us");
        // A turn is counted in whole milliseconds, rounded up.
        if time + 1000 < earliest {
            return Err(format!("{what}, when there was nothing for it before {earliest} us"));
        }
        if time > latest + LATE {
            return Err(format!("{what}, though it could have gone after {latest} us"));
        }
        if time < last {
            return Err(format!("{what}, before an earlier one"));
        }
        last = time;
    }
    Ok(())
}

fn run(crowd: &Crowd) -> Result<Vec<Option<Micros>>, String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build();
    let times = runtime.expect("a runtime").block_on(served(crowd));
    check(crowd, &times).map(|()| times)
}

/// Every second of forty gives up after half a second: the others go one by one, ten a second.
#[test]
fn callers_go_as_the_slower_of_two_limits_refills_when_others_give_up() {
    for faster in [
        "token-bucket 1000/1s burst 1000 max-debt 1",
        "fixed-window 1000/1s max-debt 1",
        "token-bucket 500/1s burst 20 max-debt 30",
    ] {
        for swapped in [false, true] {
            let mut limits = ["token-bucket 10/1s burst 1 max-debt 50".to_owned(), faster.to_owned()];
            if swapped {
                limits.swap(0, 1);
            }
            let callers = (0..40).map(|at| ([1, 1], at % 2 == 1)).collect();
            let times = run(&Crowd { limits, callers, give_up_at: 55 }).unwrap_or_else(|wrong| panic!("{wrong}"));
            let times: Vec<_> = times.into_iter().flatten().collect();
            let rest: Vec<_> = times.windows(2).skip(6).map(|two| two[1] - two[0]).collect();
            assert!(rest.len() > 12 && rest.iter().all(|gap| (80_000..=120_000).contains(gap)), "{rest:?}");
        }
    }
}

fn limit() -> impl Strategy<Value = String> {
    let rate = || proptest::sample::select(vec![3_u64, 5, 10, 40, 200, 1000]);
    prop_oneof![
        2 => (rate(), prop_oneof![0_u64..=5, Just(1000)])
            .prop_map(|(rate, burst)| format!("token-bucket {rate}/1s burst {burst} max-debt 100")),
        1 => (rate(), proptest::sample::select(vec!["100ms", "1s"]))
            .prop_map(|(rate, period)| format!("fixed-window {rate}/{period} start first-hit max-debt 100")),
    ]
}

#[test]
fn whatever_two_limits_a_rule_has_its_waiters_go_in_order_as_both_refill() {
    let callers = proptest::collection::vec(([1_u64..=3, 1_u64..=3], proptest::bool::weighted(0.4)), 2..=16);
    let crowds = ([limit(), limit()], callers, 0_u64..=150);
    let config = Config { cases: cases(50), failure_persistence: None, ..Config::default() };
    let outcome = TestRunner::new(config).run(&crowds, |(limits, callers, give_up_at)| {
        let crowd = Crowd { limits, callers, give_up_at };
        run(&crowd).map(|_| ()).map_err(TestCaseError::fail)
    });
    outcome.unwrap_or_else(|failure| panic!("{failure}"));
}

/// With names, since the two may be alike in algorithm and period.
fn rule_of(limits: &[String; 2]) -> Rule {
    let named = |at: usize, name| limits[at].parse::<Limit>().and_then(|limit| limit.named(name)).expect("a limit");
    Rule::new("two", named(0, "first")).and_then(|rule| rule.and(named(1, "second"))).expect("two limits")
}
