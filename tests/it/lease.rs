//! Leases: together never more than the rule, and what isn't spent comes back.

mod exactness;
mod runtimes;

use std::num::NonZeroU32;
use std::time::{Duration, UNIX_EPOCH};

use tokio::task::JoinSet;
use tokio::time::Instant;
use tollgate::{Clock, DecidedBy, Decision, Embedded, Lease, Limiter, Redis, Request, Rule};
use tollgate_testing::polling::{once_sent, wait_until};
use tollgate_testing::redis_server::Server;
use tollgate_testing::rules::rule;

const SECOND: Duration = Duration::from_secs(1);
/// Ends a test that would hang; no machine is so slow that it decides one.
const PATIENCE: Duration = Duration::from_secs(60);

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
        let clock = Clock::new(UNIX_EPOCH + 1_000_000 * SECOND);
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

/// A process of its own in all but name: a connection, and a lease.
fn process(server: &Server, rule: &Rule, of: u32) -> (Limiter, Lease) {
    let limiter = Limiter::builder(Redis::open(&server.url()).expect("a good address")).deadline(PATIENCE).build();
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
                let decision = once_sent(|| lease.acquire(1)).await;
                admitted += u64::from(decision.allowed);
                here += u64::from(decision.by == DecidedBy::Lease);
                tokio::task::yield_now().await;
            }
            (admitted, here)
        });
    }
    running.join_all().await.into_iter().fold((0, 0), |sum, (admitted, here)| (sum.0 + admitted, sum.1 + here))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn processes_never_exceed_a_window_and_return_unspent_units() {
    let server = Server::start();
    let rule = rule("fixed-window 3000/3650d");
    let (limiters, leases): (Vec<_>, Vec<_>) = (0..3).map(|_| process(&server, &rule, 3)).unzip();
    // Not quite used up: something is left to come back.
    let (mut spent, here) = together(&leases, 8, 110).await;
    // Towards the end some may be denied what lies in another's lease.
    assert!((2000..=3 * 8 * 110).contains(&spent) && here > 0, "{spent}, {here} of them here");
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
    for text in ["token-bucket 100/1s burst 600", "token-bucket 400/1s burst 100"] {
        // What the first rule admitted would still be used under the second.
        let server = Server::start();
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
        assert!(decision.allowed && decision.by == DecidedBy::Embedded && decision.remaining == left, "{decision:?}");
    }
    // From here on it is hot, which the last direct answer says.
    assert_eq!(world.spend(0, 1).await.by, DecidedBy::Embedded);
    let decision = world.spend(0, 1).await;
    assert!(decision.allowed && decision.by == DecidedBy::Lease, "{decision:?}");
    assert_eq!((decision.capacity, decision.granted, decision.remaining), (1000, 1, world.leases[0].unused()));
    let exact = world.limiter.peek(&world.rule, "hot").await.expect("a decision");
    assert_eq!(decision.reset_after, exact.reset_after);
    // What must be spent within milliseconds isn't worth its calls.
    let world = World::new("gcra 1000000/1s burst 1000", 2);
    world.take(900).await;
    for left in (90..100).rev() {
        let decision = world.spend(0, 1).await;
        assert!(decision.allowed && decision.by == DecidedBy::Embedded && decision.remaining == left, "{decision:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_cost_above_the_share_is_asked_directly_and_a_denial_is_exact() {
    let world = World::new("fixed-window 100/30d", 2);
    world.take(60).await;
    assert_eq!(world.spend(0, 1).await.by, DecidedBy::Embedded);
    assert_eq!(world.spend(0, 1).await.by, DecidedBy::Lease);
    assert_eq!(world.leases[0].most_unused(), 25);
    let decision = world.spend(0, 26).await;
    assert!(decision.allowed && decision.by == DecidedBy::Embedded);
    let left = world.remaining().await;
    let denied = world.spend(1, left + 1).await;
    let exact = world.take(left + 1).await;
    assert!(!denied.allowed && denied.by == DecidedBy::Embedded, "{denied:?}");
    assert_eq!((denied.retry_after, denied.remaining), (exact.retry_after, left));
    assert_eq!(world.spend(0, 0).await.granted, 0);
}

#[tokio::test(start_paused = true)]
async fn held_units_come_back_on_expiry_on_drop_and_on_request() {
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
async fn expired_units_are_neither_spent_nor_returned_where_the_limit_has_refilled() {
    let world = World::new("gcra 100/1s", 1);
    world.take(90).await;
    world.spend(0, 1).await;
    assert_eq!(world.spend(0, 1).await.by, DecidedBy::Lease);
    let held = world.leases[0].unused();
    assert!(held > 0);
    world.wait(10 * SECOND).await;
    assert_eq!(world.take(100).await.remaining, 0);
    let decision = world.spend(0, 1).await;
    assert!(!decision.allowed && decision.by == DecidedBy::Embedded, "{decision:?}");
    assert_eq!((world.leases[0].unused(), world.remaining().await), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_block_makes_nothing_last_longer() {
    let world = World::new("gcra 100/1s", 1);
    world.take(90).await;
    world.spend(0, 1).await;
    assert_eq!(world.spend(0, 1).await.by, DecidedBy::Lease);
    let held = world.leases[0].unused();
    world.limiter.block(&world.rule, "hot", 3600 * SECOND).await.expect("an answer");
    // Late enough for another look, which finds the block.
    world.wait(Duration::from_millis(250)).await;
    let denied = world.spend(0, held + 1).await;
    assert!(!denied.allowed && denied.blocked && world.leases[0].unused() == held, "{denied:?}");
    world.limiter.unblock(&world.rule, "hot").await.expect("an answer");
    world.wait(Duration::from_millis(900)).await;
    assert_eq!((world.leases[0].unused(), world.remaining().await), (0, 100), "the limit has refilled meanwhile");
    assert_eq!(world.spend(0, 1).await.by, DecidedBy::Embedded);
}

#[tokio::test(start_paused = true)]
async fn a_batch_grows_while_it_is_used_up_and_shrinks_while_it_is_not() {
    let world = World::new("fixed-window 10000/30d", 2);
    let lease = &world.leases[0];
    world.take(5500).await;
    assert_eq!(world.spend(0, 1).await.by, DecidedBy::Embedded);
    let mut most = 0;
    for n in 0..3000 {
        let decision = world.spend(0, 1).await;
        assert!(decision.allowed && decision.by == DecidedBy::Lease, "{decision:?}");
        assert!(n > 0 || lease.unused() < 8, "it begins small");
        assert!(lease.unused() > 0, "the next one is here before the last is used up");
        most = most.max(lease.unused());
        assert!(most <= lease.most_unused());
    }
    assert!(most > 1000, "{most}");
    let mut last = u64::MAX;
    for _ in 0..5 {
        // It comes back unused.
        world.wait(2 * SECOND).await;
        assert_eq!(lease.unused(), 0);
        assert_eq!(world.spend(0, 1).await.by, DecidedBy::Lease);
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

fn scripts(server: &Server) -> u64 {
    server.commands().iter().filter(|(name, _)| name.starts_with("eval")).map(|(_, (calls, _))| calls).sum()
}

#[tokio::test]
async fn a_lease_saves_most_calls() {
    let server = Server::start();
    let rule = rule("fixed-window 20000/3650d");
    let (limiter, lease) = process(&server, &rule, 1);
    limiter.acquire(&rule, Request::new("hot").cost(10_001)).await.expect("a decision");
    server.reset_command_counts();
    for _ in 0..5000 {
        assert!(lease.acquire(1).await.expect("a decision").allowed);
    }
    let calls = scripts(&server);
    assert!((1..1000).contains(&calls), "{calls}");
    while lease.acquire(1).await.expect("a decision").allowed {}
    server.reset_command_counts();
    for _ in 0..100 {
        assert!(!lease.acquire(1).await.expect("a decision").allowed);
    }
    let calls = scripts(&server);
    assert!((100..=110).contains(&calls), "{calls}: a denial is one call");
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_gives_up_loses_no_leased_units() {
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
async fn a_limit_that_cannot_be_leased_is_an_error() {
    let limiter = Limiter::new(Embedded::new());
    let two = rule("gcra 10/1s").and("gcra 10/1m".parse().expect("a limit")).expect("two limits");
    for (rule, expected) in [
        (two, "lease: expected a rule of one limit, got token-bucket 10/1s, token-bucket 10/1m"),
        (rule("sliding-log 10/1s"), "lease: expected a token bucket or fixed window, got sliding-log 10/1s"),
        (rule("sliding-window 9/1s"), "lease: expected a token bucket or fixed window, got sliding-window 9/1s"),
        (rule("concurrency 9 ttl 1s"), "lease: expected a token bucket or fixed window, got concurrency 9 ttl 1s"),
        (
            rule("fixed-window 9/1s start first-hit"),
            "lease: expected a fixed window that doesn't start at the first hit (a batch would be that hit), \
             got fixed-window 9/1s start first-hit",
        ),
        (
            rule("gcra 10/1s").count_overage(true),
            "lease: expected a rule without count_overage, since the denials of batches would be counted, got token-bucket 10/1s",
        ),
        (
            rule("gcra 5/1s"),
            "lease: expected a burst of at least 6, two for each of the 3 processes, got token-bucket 5/1s",
        ),
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
    assert_eq!(DecidedBy::Lease.to_string(), "lease");
}

/// A lease costs calls: rare calls go to Redis directly.
#[tokio::test(start_paused = true)]
async fn rare_calls_go_to_redis_and_frequent_calls_are_served_from_the_lease() {
    let world = World::new("fixed-window 1000/30d", 2);
    world.take(600).await;
    let mut by = Vec::new();
    for _ in 0..12 {
        by.push(world.spend(0, 1).await.by.name());
        world.wait(SECOND * 3 / 2).await;
    }
    assert_eq!(by[6..], ["embedded"; 6], "{by:?}");
    world.wait(SECOND * 10).await;
    for _ in 0..40 {
        by.push(world.spend(0, 1).await.by.name());
        world.wait(Duration::from_millis(5)).await;
    }
    assert_eq!(by[22..], ["lease"; 30], "{by:?}");
}

#[tokio::test]
async fn the_longest_deadline_is_one() {
    let limiter = Limiter::builder(Embedded::new()).deadline(Duration::MAX).build();
    let lease = limiter.lease(&rule("token-bucket 4/1h"), "key", processes(1)).expect("a lease");
    for number in 0..5 {
        assert_eq!(lease.acquire(1).await.expect("a decision").allowed, number < 4);
    }
}
