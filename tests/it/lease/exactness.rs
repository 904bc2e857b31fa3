//! Whatever leases spend, an exact limiter would have admitted at the time at which it was spent.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError, TestRunner};
use tollgate::{DecidedBy, Decision, Lease, Limiter, Request};
use tollgate_testing::effort::{cases, times};

use super::{World, settle};

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
    "token-bucket 40/1s burst 100",
    "token-bucket 7/3s burst 60",
    "fixed-window 100/1s",
    "fixed-window 30/500ms burst 90",
    "token-bucket 500/1s burst 100 max-debt 50",
];

/// The reference takes each unit from an exact limiter of its own at the time at which it is spent.
#[test]
fn leases_spend_no_more_than_an_exact_limiter_would_admit() {
    let (by_leases, directly) = (AtomicU64::new(0), AtomicU64::new(0));
    let config = Config { cases: cases(40), failure_persistence: None, ..Config::default() };
    let worlds = (0..HOT.len(), 1_u32..=3, proptest::collection::vec(step(), 1..=60));
    let outcome = TestRunner::new(config).run(&worlds, |(text, count, steps)| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
        runtime.expect("a runtime").block_on(async {
            let mut world = World::new(HOT[text], count);
            let reference = world.limiter.to_builder().prefix("reference").expect("a prefix").build();
            for step in steps {
                play(&mut world, &reference, &step, [&by_leases, &directly]).await?;
                could_all_be_spent(&world, &reference).await?;
            }
            Ok(())
        })
    });
    outcome.unwrap_or_else(|failure| panic!("{failure}"));
    let least = 100 * u64::from(times());
    let [by_leases, directly] = [by_leases, directly].map(AtomicU64::into_inner);
    assert!(by_leases > least && directly > least, "{by_leases} by leases, {directly} directly: too few to tell");
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
                let counter = if decision.by == DecidedBy::Lease { by_leases } else { directly };
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

/// What is left and all that is held, if it were taken right now.
async fn could_all_be_spent(world: &World, reference: &Limiter) -> Result<(), TestCaseError> {
    let held: u64 = world.leases.iter().map(Lease::unused).sum();
    prop_assert!(world.leases.iter().all(|lease| lease.unused() <= lease.most_unused()));
    let exact = reference.peek(&world.rule, "hot").await.expect("a decision").remaining;
    let left = world.remaining().await;
    prop_assert!(left + held <= exact, "{left} left and {held} held: an exact limiter has {exact}");
    Ok(())
}

/// A lease that refills while it holds much, and keeps it while the limit refills.
#[tokio::test(start_paused = true)]
async fn held_units_leave_room_for_what_the_limit_refills() {
    let mut world = World::new("gcra 100/1s", 1);
    let reference = world.limiter.to_builder().prefix("reference").expect("a prefix").build();
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
