//! Failover under Sentinels: callers follow the primary.

use tollgate_testing::redis_server::run_command;
use tollgate_testing::sentinels::Sentinels;

use super::*;

const SOME_TIME: Duration = Duration::from_secs(1);

/// Waits until another server than this is the primary and has answered calls.
async fn replaced(fleet: &Sentinels, before: usize, callers: &Callers) -> usize {
    let now = wait_for_value(async || fleet.primary().filter(|at| *at != before)).await;
    fleet.server(now).reset_command_counts();
    callers.answered(50).await;
    let scripts = || fleet.server(now).commands().get("evalsha").is_some_and(|(calls, failed)| calls - failed >= 20);
    until(scripts).await;
    now
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_primary_is_followed_through_a_failover_and_a_freeze_without_a_denial() {
    let fleet = Sentinels::start();
    let redis = redis(&fleet.url());
    let limiter = Limiter::builder(redis.clone()).deadline(SOME_TIME).build();
    // So much that only a fault could deny.
    let rule = rule("gcra 1000000/1d", OnError::Closed);
    assert_eq!(decided(&limiter, &rule, "key").await.by, DecidedBy::Redis);
    let keys: Vec<_> = (0..20).map(|key| key.to_string()).collect();
    let callers = Callers::start(8, &limiter, &rule, &keys);
    callers.answered(50).await;

    tokio::task::block_in_place(|| fleet.fail_over());
    let second = replaced(&fleet, 0, &callers).await;
    assert!(redis.restarts() >= 1, "it is another server");
    tokio::task::block_in_place(|| fleet.wait_until_whole());
    // The scripts of the promoted one are lost, too.
    run_command(fleet.server(second), &["SCRIPT", "FLUSH"]);
    callers.answered(50).await;

    fleet.replace_soon();
    fleet.server(second).signal("-STOP");
    let third = replaced(&fleet, second, &callers).await;
    fleet.server(second).signal("-CONT");
    // It has become a replica, and no caller goes back to it.
    until(|| info_says(fleet.server(second), "role:slave")).await;
    callers.answered(50).await;
    assert_eq!(fleet.primary(), Some(third));

    let told = callers.end().await;
    assert_eq!((told.denied(), told.instead), (0, 0), "{told:?}");
    assert!(told.errors.keys().all(|class| OUTAGES.contains(class)), "{:?}", told.errors);
    told.is_in_time(SOME_TIME);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_primary_that_dies_under_load_costs_one_capacity_of_each_key_at_most() {
    const CAPACITY: u64 = 6;
    let mut fleet = Sentinels::start();
    let limiter = limiter(&fleet.url()).to_builder().deadline(SOME_TIME).build();
    let rule = rule(&format!("gcra {CAPACITY}/1d"), OnError::Closed);
    let keys: Vec<_> = (0..300).map(|key| key.to_string()).collect();
    let callers = Callers::start(8, &limiter, &rule, &keys);
    callers.answered(450).await;
    fleet.kill(0);
    replaced(&fleet, 0, &callers).await;
    // Past what they all have.
    callers.answered(300 * CAPACITY).await;
    let told = callers.end().await;
    assert!(told.denied() > 0 && told.instead == 0, "{told:?}");
    assert!(told.errors.keys().all(|class| OUTAGES.contains(class)), "{:?}", told.errors);
    told.is_within(CAPACITY, 1);
    told.is_in_time(SOME_TIME);
}

#[tokio::test]
async fn sentinels_that_are_dead_or_frozen_are_passed_over() {
    let mut fleet = Sentinels::start();
    let rule = rule("gcra 1000/1d", OnError::Closed);
    for (number, frozen) in [(0, true), (1, false)] {
        if frozen {
            fleet.sentinel(number).signal("-STOP");
        } else {
            fleet.kill_sentinel(number);
        }
        let limiter = limiter(&fleet.url()).to_builder().deadline(Duration::from_secs(2)).build();
        answered_again(&limiter, &rule, "key").await;
    }
}

#[tokio::test]
async fn a_primary_that_no_sentinel_knows_is_named_in_one_line() {
    let fleet = Sentinels::start();
    let limiter = limiter(&fleet.url_of("nobody")).to_builder().deadline(PATIENCE).build();
    let error = acquire(&limiter, &rule("gcra 5/1d", OnError::Closed), "key").await.expect_err("nobody");
    let message = error.to_string();
    assert!(message.contains("nobody") && message.lines().count() == 1, "{message}");
    assert_eq!(error.charged(), Charged::No);
    let open = acquire(&limiter, &rule("gcra 5/1d", OnError::Open), "key").await;
    assert!(
        open.as_ref().is_ok_and(|decision| matches!(decision.by, DecidedBy::Policy(_)))
            || open.is_err_and(|error| error.is_input())
    );
}
