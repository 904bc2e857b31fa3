//! Leases: whatever is spent here could have been decided by an exact limiter, and what isn't spent comes back.

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, UNIX_EPOCH};

use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError, TestRunner};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tollgate::{By, Clock, Decision, Embedded, Lease, Limiter, Redis, Request, Rule};

use crate::server::Server;

const SECOND: Duration = Duration::from_secs(1);
/// Ends a test that would hang; no machine is so slow that it decides one.
const PATIENCE: Duration = Duration::from_secs(60);

fn rule(text: &str) -> Rule {
    text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
}

fn processes(count: u32) -> NonZeroU32 {
    NonZeroU32::new(count).expect("not zero")
}

/// Leases on one key of the embedded engine, on a clock that stands still unless it is moved.
struct World {
    clock: Clock,
    limiter: Limiter,
    rule: Rule,
    leases: Vec<Lease>,
}

impl World {
    fn new(text: &str, count: u32) -> Self {
        let clock = Clock::set_to(UNIX_EPOCH + 1_000_000 * SECOND);
        let limiter = Limiter::new(Embedded::with_clock(clock.clone()));
        let mut world = Self { clock, limiter, rule: rule(text), leases: Vec::new() };
        world.leases = (0..count).map(|_| world.lease(count)).collect();
        world
    }

    fn lease(&self, count: u32) -> Lease {
        self.limiter.lease(&self.rule, "hot", processes(count)).expect("a lease")
    }

    /// Moves the engine's clock and the tasks' time, and lets the tasks run that this wakes.
    async fn wait(&self, time: Duration) {
        self.clock.advance(time);
        tokio::time::advance(time).await;
        settle().await;
    }

    async fn take(&self, cost: u64) -> Decision {
        self.limiter.acquire(&self.rule, Request::new("hot").cost(cost)).await.expect("a decision")
    }

    async fn spend(&self, lease: usize, cost: u64) -> Decision {
        let decision = self.leases[lease].acquire(cost).await.expect("a decision");
        settle().await;
        decision
    }

    async fn remaining(&self) -> u64 {
        self.limiter.peek(&self.rule, "hot").await.expect("a decision").remaining
    }
}

/// Lets other tasks run until they wait for a time to come.
async fn settle() {
    for _ in 0..20 {
        tokio::task::yield_now().await;
    }
}

#[derive(Clone, Debug)]
enum Step {
    /// In one go, or in small steps, which let tasks wake in time.
    Wait {
        us: u64,
        smoothly: bool,
    },
    Spend {
        lease: usize,
        cost: u64,
        times: u64,
    },
    /// Time passes, and before any lease wakes, somebody takes all but so much of what there is then, and this lease
    /// spends.
    Pounce {
        us: u64,
        leaving: u64,
        lease: usize,
    },
    GiveBack {
        lease: usize,
    },
    /// A process ends, and another begins.
    Replace {
        lease: usize,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let wait = || prop_oneof![0_u64..3_000, 0_u64..300_000, 300_000_u64..900_000, 0_u64..3_000_000];
    // One that is more than is held makes a lease look again while it holds much.
    let cost = prop_oneof![3 => 1_u64..=4, 2 => 1_u64..=50];
    prop_oneof![
        4 => (wait(), any::<bool>()).prop_map(|(us, smoothly)| Step::Wait { us, smoothly }),
        8 => (0_usize..3, cost, prop_oneof![1_u64..=3, 1_u64..=25]).prop_map(|(lease, cost, times)| Step::Spend { lease, cost, times }),
        6 => (wait(), prop_oneof![Just(0), 0_u64..60], 0_usize..3)
            .prop_map(|(us, leaving, lease)| Step::Pounce { us, leaving, lease }),
        1 => (0_usize..3).prop_map(|lease| Step::GiveBack { lease }),
        1 => (0_usize..3).prop_map(|lease| Step::Replace { lease }),
    ]
}

const HOT: [&str; 6] = [
    "token-bucket 100/1s",
    "gcra 40/1s burst 100",
    "token-bucket 7/3s burst 60",
    "fixed-window 100/1s",
    "fixed-window 30/500ms burst 90",
    "gcra 500/1s burst 100 max-debt 50",
];

/// The reference takes each unit from an exact limiter of its own at the time at which it is spent.
#[test]
fn what_is_spent_is_what_an_exact_limiter_would_admit() {
    let (by_leases, directly) = (AtomicU64::new(0), AtomicU64::new(0));
    let config = Config { cases: 600, failure_persistence: None, ..Config::default() };
    let cases = (0..HOT.len(), 1_u32..=3, proptest::collection::vec(step(), 1..=60));
    let outcome = TestRunner::new(config).run(&cases, |(text, count, steps)| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
        runtime.expect("a runtime").block_on(async {
            let mut world = World::new(HOT[text], count);
            let reference = world.limiter.clone().prefix("reference").expect("a prefix");
            for step in steps {
                play(&mut world, &reference, &step, [&by_leases, &directly]).await?;
                could_all_be_spent(&world, &reference).await?;
            }
            Ok(())
        })
    });
    outcome.unwrap_or_else(|failure| panic!("{failure}"));
    let [by_leases, directly] = [by_leases, directly].map(AtomicU64::into_inner);
    assert!(by_leases > 5_000 && directly > 5_000, "{by_leases} by leases, {directly} directly: too few to tell");
}

async fn play(
    world: &mut World,
    reference: &Limiter,
    step: &Step,
    [by_leases, directly]: [&AtomicU64; 2],
) -> Result<(), TestCaseError> {
    let count = world.leases.len();
    match *step {
        Step::Wait { us, smoothly } => {
            let (steps, rest) = if smoothly { (us / 10_000, us % 10_000) } else { (0, us) };
            for _ in 0..steps {
                world.wait(Duration::from_millis(10)).await;
                could_all_be_spent(world, reference).await?;
            }
            world.wait(Duration::from_micros(rest)).await;
        }
        Step::Spend { lease, cost, times } => {
            for _ in 0..times {
                let decision = world.spend(lease % count, cost).await;
                check(world, reference, &decision, cost).await?;
                let counter = if decision.by == By::Lease { by_leases } else { directly };
                counter.fetch_add(1, Ordering::Relaxed);
            }
        }
        Step::Pounce { us, leaving, lease } => {
            let time = Duration::from_micros(us);
            world.clock.advance(time);
            let cost = world.remaining().await.saturating_sub(leaving);
            let decision = world.take(cost).await;
            check(world, reference, &decision, cost).await?;
            tokio::time::advance(time).await;
            let decision = world.leases[lease % count].acquire(1).await.expect("a decision");
            check(world, reference, &decision, 1).await?;
            settle().await;
        }
        Step::GiveBack { lease } => {
            world.leases[lease % count].give_back().await.expect("an answer");
        }
        Step::Replace { lease } => {
            world.leases[lease % count] = world.lease(u32::try_from(count).expect("few"));
            settle().await;
        }
    }
    Ok(())
}

async fn check(world: &World, reference: &Limiter, decision: &Decision, cost: u64) -> Result<(), TestCaseError> {
    if decision.allowed {
        let exact = reference.acquire(&world.rule, Request::new("hot").cost(cost)).await.expect("a decision");
        prop_assert!(exact.allowed, "{cost} by {}: an exact limiter has {}", decision.by, exact.remaining);
    }
    Ok(())
}

/// What is left and all that is held, if somebody took it right now.
async fn could_all_be_spent(world: &World, reference: &Limiter) -> Result<(), TestCaseError> {
    let held: u64 = world.leases.iter().map(Lease::unused).sum();
    prop_assert!(world.leases.iter().all(|lease| lease.unused() <= lease.most_unused()));
    let exact = reference.peek(&world.rule, "hot").await.expect("a decision").remaining;
    let left = world.remaining().await;
    prop_assert!(left + held <= exact, "{left} left and {held} held: an exact limiter has {exact}");
    Ok(())
}

/// A lease that looks again while it holds much, and keeps it while the limit refills.
#[tokio::test(start_paused = true)]
async fn what_is_held_leaves_room_for_what_the_limit_refills() {
    let mut world = World::new("gcra 100/1s", 1);
    let reference = world.limiter.clone().prefix("reference").expect("a prefix");
    let pounce = |ms: u64, leaving| Step::Pounce { us: 1000 * ms, leaving, lease: 0 };
    let spend = |cost, times| Step::Spend { lease: 0, cost, times };
    let wait = |ms: u64| Step::Wait { us: 1000 * ms, smoothly: true };
    let counters = AtomicU64::new(0);
    let mut most = 0;
    for step in [pounce(0, 50), spend(7, 8), wait(400), spend(1, 1), pounce(230, 0), spend(40, 1), wait(990)] {
        play(&mut world, &reference, &step, [&counters; 2]).await.expect("what an exact limiter would admit");
        could_all_be_spent(&world, &reference).await.expect("what an exact limiter would admit");
        most = most.max(world.leases[0].unused());
    }
    assert!(most > 30, "{most}");
}

/// A process of its own in all but name: a connection, and a lease.
fn process(server: &Server, rule: &Rule, of: u32) -> (Limiter, Lease) {
    let limiter = Limiter::new(Redis::open(&server.url()).expect("a good address")).deadline(PATIENCE);
    let lease = limiter.lease(rule, "hot", processes(of)).expect("a lease");
    (limiter, lease)
}

/// Tasks that each try to take a unit so many times: how many they got, and how many of those from a lease.
async fn together(leases: &[Lease], tasks: usize, tries: usize) -> (u64, u64) {
    let mut running = JoinSet::new();
    for lease in leases.iter().cycle().take(leases.len() * tasks) {
        let lease = lease.clone();
        running.spawn(async move {
            let (mut admitted, mut here) = (0, 0);
            for _ in 0..tries {
                let decision = lease.acquire(1).await.expect("a decision");
                admitted += u64::from(decision.allowed);
                here += u64::from(decision.by == By::Lease);
                tokio::task::yield_now().await;
            }
            (admitted, here)
        });
    }
    running.join_all().await.into_iter().fold((0, 0), |sum, (admitted, here)| (sum.0 + admitted, sum.1 + here))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn processes_never_exceed_a_window_and_return_what_they_have_not_spent() {
    let server = Server::start();
    let rule = rule("fixed-window 3000/3650d");
    let (limiters, leases): (Vec<_>, Vec<_>) = (0..3).map(|_| process(&server, &rule, 3)).unzip();
    // Not quite used up: something is left to come back.
    let (mut spent, here) = together(&leases, 8, 110).await;
    assert_eq!(spent, 3 * 8 * 110);
    assert!(here > 0);
    for lease in &leases {
        let unused = lease.unused();
        assert!(unused <= lease.most_unused());
        assert!(lease.give_back().await.expect("an answer") <= lease.most_unused());
        assert_eq!(lease.unused(), 0);
    }
    assert_eq!(limiters[0].peek(&rule, "hot").await.expect("a decision").remaining, 3000 - spent);
    spent += together(&leases, 8, 100).await.0;
    assert!(spent <= 3000, "{spent}");
    for lease in &leases {
        lease.give_back().await.expect("an answer");
    }
    assert_eq!(limiters[0].peek(&rule, "hot").await.expect("a decision").remaining, 3000 - spent);
    while leases[0].acquire(1).await.expect("a decision").allowed {
        spent += 1;
    }
    assert_eq!(spent, 3000);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn processes_never_exceed_a_rate() {
    let server = Server::start();
    for text in ["gcra 100/1s burst 600", "token-bucket 400/1s burst 100"] {
        let rule = rule(text);
        let (_limiters, leases): (Vec<_>, Vec<_>) = (0..2).map(|_| process(&server, &rule, 2)).unzip();
        let begun = std::time::Instant::now();
        let (admitted, here) = together(&leases, 8, 300).await;
        let limit = rule.limits().next().expect("a limit");
        let most = limit.capacity() as f64 + limit.rate() as f64 * begun.elapsed().as_secs_f64();
        assert!(admitted as f64 <= most, "{text}: {admitted} of {most}");
        assert!(here > 0, "{text}");
        drop(leases);
    }
}

#[tokio::test(start_paused = true)]
async fn a_cold_limit_is_asked_directly() {
    let world = World::new("gcra 10/1s burst 1000", 2);
    for left in (500..1000).rev() {
        let decision = world.spend(0, 1).await;
        assert!(decision.allowed && decision.by == By::Embedded && decision.remaining == left, "{decision:?}");
    }
    // From here on it is hot, which the last direct answer says.
    assert_eq!(world.spend(0, 1).await.by, By::Embedded);
    let decision = world.spend(0, 1).await;
    assert!(decision.allowed && decision.by == By::Lease, "{decision:?}");
    assert_eq!((decision.limit, decision.granted, decision.remaining), (1000, 1, world.leases[0].unused()));
    let exact = world.limiter.peek(&world.rule, "hot").await.expect("a decision");
    assert_eq!(decision.reset_after, exact.reset_after);
    // What must be spent within milliseconds isn't worth its calls.
    let world = World::new("gcra 1000000/1s burst 1000", 2);
    world.take(900).await;
    for left in (90..100).rev() {
        let decision = world.spend(0, 1).await;
        assert!(decision.allowed && decision.by == By::Embedded && decision.remaining == left, "{decision:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_cost_above_the_share_is_asked_directly_and_a_denial_is_exact() {
    let world = World::new("fixed-window 100/30d", 2);
    world.take(60).await;
    assert_eq!(world.spend(0, 1).await.by, By::Embedded);
    assert_eq!(world.spend(0, 1).await.by, By::Lease);
    assert_eq!(world.leases[0].most_unused(), 25);
    let decision = world.spend(0, 26).await;
    assert!(decision.allowed && decision.by == By::Embedded);
    let left = world.remaining().await;
    let denied = world.spend(1, left + 1).await;
    let exact = world.take(left + 1).await;
    assert!(!denied.allowed && denied.by == By::Embedded, "{denied:?}");
    assert_eq!((denied.retry_after, denied.remaining), (exact.retry_after, left));
    assert_eq!(world.spend(0, 0).await.granted, 0);
}

#[tokio::test(start_paused = true)]
async fn what_is_held_comes_back_when_it_expires_when_it_is_dropped_and_when_it_is_given_back() {
    let mut world = World::new("fixed-window 100/30d", 2);
    world.take(60).await;
    let mut spent = 60;
    let hold = async |world: &World, spent: &mut u64| {
        for _ in 0..100 {
            if world.leases[0].unused() > 0 {
                return world.leases[0].unused();
            }
            assert!(world.spend(0, 1).await.allowed);
            *spent += 1;
        }
        panic!("nothing is held")
    };
    let held = hold(&world, &mut spent).await;
    assert_eq!(world.remaining().await, 100 - spent - held);
    assert_eq!(world.leases[0].give_back().await.expect("an answer"), held);
    assert_eq!((world.leases[0].unused(), world.remaining().await), (0, 100 - spent));
    assert_eq!(world.leases[0].give_back().await.expect("an answer"), 0);

    let held = hold(&world, &mut spent).await;
    world.wait(SECOND - Duration::from_millis(2)).await;
    assert_eq!(world.leases[0].unused(), held, "until a second has passed");
    world.wait(Duration::from_millis(4)).await;
    assert_eq!((world.leases[0].unused(), world.remaining().await), (0, 100 - spent), "nobody asked for it");

    let held = hold(&world, &mut spent).await;
    let clone = world.leases[0].clone();
    world.leases.clear();
    settle().await;
    assert_eq!((clone.unused(), world.remaining().await), (held, 100 - spent - held), "a clone holds it");
    drop(clone);
    settle().await;
    assert_eq!(world.remaining().await, 100 - spent);
}

#[tokio::test(start_paused = true)]
async fn what_has_expired_is_neither_spent_nor_returned_where_the_limit_has_refilled() {
    let world = World::new("gcra 100/1s", 1);
    world.take(90).await;
    world.spend(0, 1).await;
    assert_eq!(world.spend(0, 1).await.by, By::Lease);
    let held = world.leases[0].unused();
    assert!(held > 0);
    world.wait(10 * SECOND).await;
    assert_eq!(world.take(100).await.remaining, 0);
    let decision = world.spend(0, 1).await;
    assert!(!decision.allowed && decision.by == By::Embedded, "{decision:?}");
    assert_eq!((world.leases[0].unused(), world.remaining().await), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_block_makes_nothing_last_longer() {
    let world = World::new("gcra 100/1s", 1);
    world.take(90).await;
    world.spend(0, 1).await;
    assert_eq!(world.spend(0, 1).await.by, By::Lease);
    let held = world.leases[0].unused();
    world.limiter.block(&world.rule, "hot", 3600 * SECOND).await.expect("an answer");
    // Late enough for another look, which finds the block.
    world.wait(Duration::from_millis(250)).await;
    let denied = world.spend(0, held + 1).await;
    assert!(!denied.allowed && denied.blocked && world.leases[0].unused() == held, "{denied:?}");
    world.limiter.unblock(&world.rule, "hot").await.expect("an answer");
    world.wait(SECOND).await;
    assert_eq!((world.leases[0].unused(), world.remaining().await), (0, 100));
    assert_eq!(world.spend(0, 1).await.by, By::Embedded);
}

#[tokio::test(start_paused = true)]
async fn a_batch_grows_while_it_is_used_up_and_shrinks_while_it_is_not() {
    let world = World::new("fixed-window 10000/30d", 2);
    let lease = &world.leases[0];
    world.take(5500).await;
    assert_eq!(world.spend(0, 1).await.by, By::Embedded);
    let mut most = 0;
    for n in 0..3000 {
        let decision = world.spend(0, 1).await;
        assert!(decision.allowed && decision.by == By::Lease, "{decision:?}");
        assert!(n > 0 || lease.unused() < 8, "it begins small");
        most = most.max(lease.unused());
        assert!(most <= lease.most_unused());
    }
    assert!(most > 1000, "{most}");
    let mut last = u64::MAX;
    for _ in 0..5 {
        // It comes back unused.
        world.wait(2 * SECOND).await;
        assert_eq!(lease.unused(), 0);
        assert_eq!(world.spend(0, 1).await.by, By::Lease);
        let batch = lease.unused() + 1;
        assert!(batch <= last / 2, "{batch} after {last}");
        last = batch;
    }
    // It is used up, but slowly.
    let mut rounds = 0;
    while last > 2 {
        for _ in 0..lease.unused() {
            world.spend(0, 1).await;
        }
        world.wait(Duration::from_millis(300)).await;
        world.spend(0, 1).await;
        let batch = lease.unused() + 1;
        last = last.min(batch);
        rounds += 1;
        assert!(rounds < 50, "{last}");
    }
}

#[tokio::test]
async fn a_lease_saves_most_calls() {
    let server = Server::start();
    let rule = rule("fixed-window 20000/3650d");
    let (limiter, lease) = process(&server, &rule, 1);
    limiter.acquire(&rule, Request::new("hot").cost(10_001)).await.expect("a decision");
    server.forget_commands();
    for _ in 0..5000 {
        assert!(lease.acquire(1).await.expect("a decision").allowed);
    }
    let calls: u64 = server.commands().iter().filter(|(name, _)| name.starts_with("eval")).map(|(_, (n, _))| n).sum();
    assert!((1..1000).contains(&calls), "{calls}");
}

#[tokio::test(start_paused = true)]
async fn a_caller_who_gives_up_loses_no_units() {
    let world = World::new("fixed-window 100/30d", 2);
    world.take(60).await;
    assert!(world.spend(0, 1).await.allowed);
    // Polled once, which begins a refill, and dropped.
    let begun = Instant::now();
    let _ = tokio::time::timeout(Duration::ZERO, world.leases[0].acquire(1)).await;
    settle().await;
    assert_eq!(begun.elapsed(), Duration::ZERO);
    let held = world.leases[0].unused();
    assert!(held > 0);
    assert_eq!(world.remaining().await, 100 - 61 - held);
}

#[tokio::test]
async fn what_cannot_be_leased_says_so() {
    let limiter = Limiter::new(Embedded::new());
    let two = rule("gcra 10/1s").and("gcra 10/1m".parse().expect("a limit")).expect("two limits");
    for (rule, expected) in [
        (two, "lease: expected a rule of one limit, got gcra 10/1s, gcra 10/1m"),
        (rule("sliding-log 10/1s"), "lease: expected a token bucket, gcra or fixed window, got sliding-log 10/1s"),
        (rule("sliding-window 9/1s"), "lease: expected a token bucket, gcra or fixed window, got sliding-window 9/1s"),
        (
            rule("concurrency 9 ttl 1s"),
            "lease: expected a token bucket, gcra or fixed window, got concurrency 9 ttl 1s",
        ),
        (
            rule("fixed-window 9/1s start first-hit"),
            "lease: expected a fixed window that doesn't start at the first hit, which a batch would be, \
             got fixed-window 9/1s start first-hit",
        ),
        (
            rule("gcra 10/1s").count_denials(true),
            "lease: expected a rule that doesn't count denials, which a batch's would be, got gcra 10/1s",
        ),
        (rule("gcra 5/1s"), "lease: expected a burst of at least twice the 3 processes, got gcra 5/1s"),
    ] {
        let error = limiter.lease(&rule, "key", processes(3)).expect_err(expected);
        assert!(error.is_input());
        assert_eq!(error.to_string(), expected);
    }
    let ten = rule("gcra 10/1s");
    for request in [Request::new("key").id("id"), Request::new("key").at(UNIX_EPOCH), Request::new("key").cost(2)] {
        let error = limiter.lease(&ten, request, processes(3)).expect_err("not a batch's");
        assert!(error.is_input() && error.to_string().starts_with("lease: expected a request without"), "{error}");
    }
    assert_eq!(limiter.lease(&ten, "key", processes(5)).expect("a lease").most_unused(), 1);
    assert_eq!(By::Lease.to_string(), "lease");
}
