//! A shard of a cluster fails, and callers of the others are unaffected.

use std::time::Instant;

use tollgate_testing::redis_server::run_command;

use super::*;

/// Longer than a busy machine keeps one waiting.
const SOME_TIME: Duration = Duration::from_secs(8);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frozen_or_dead_shard_does_not_affect_callers_of_the_others() {
    let mut servers = ClusterServers::of_primaries();
    let (cluster, limiter) = cluster_limiter(&servers);
    let limiter = limiter.to_builder().deadline(SOME_TIME).build();
    let rule = |on_error| rule("gcra 100000/1d", on_error);
    let [closed, open, local] = [OnError::Closed, OnError::Open, LOCAL].map(rule);
    let others: Vec<_> = (0..2).flat_map(|node| servers.keys_of(node, 8)).collect();
    let lost = servers.keys_of(2, 8);
    for key in others.iter().chain(&lost) {
        answered_again(&limiter, &closed, key).await;
    }
    let callers = Callers::start(8, &limiter, &closed, &others);
    callers.answered(50).await;
    for frozen in [true, false] {
        if frozen {
            servers.node(2).signal("-STOP");
        } else {
            servers.kill(2);
        }
        let hasty = limiter.to_builder().deadline(DEADLINE).build();
        // More than enough for a breaker to open.
        for (number, key) in lost.iter().chain(&lost).enumerate() {
            let began = Instant::now();
            let error = acquire(&hasty, &closed, key).await.expect_err("lost");
            assert!(OUTAGES.contains(&error.kind().name()), "{error}");
            assert_ne!(error.charged(), Charged::Yes);
            let instead = acquire(&hasty, &open, key).await.expect("by policy");
            assert!(matches!(instead.by, DecidedBy::Policy(_)) && instead.by.error().is_some(), "{instead:?}");
            let instead = acquire(&hasty, &local, key).await.expect("here");
            assert!(matches!(instead.by, DecidedBy::Local(_)) && instead.by.error().is_some(), "{instead:?}");
            assert!(began.elapsed() < 3 * DEADLINE + SLACK, "{number}: {:?}", began.elapsed());
        }
        let open_ones = cluster.breakers().iter().filter(|(_, breaker)| *breaker != BreakerState::Closed).count();
        assert_eq!(open_ones, 1, "{:?}", cluster.breakers());
        callers.answered(50).await;
        if frozen {
            servers.node(2).signal("-CONT");
            for key in &lost {
                answered_again(&limiter, &closed, key).await;
            }
        }
    }
    callers.answered(50).await;
    let told = callers.end().await;
    told.is_undisturbed(SOME_TIME);
    assert!(told.denied() == 0 && told.allowed() > 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shard_whose_replica_is_promoted_answers_again_with_the_replicated_state() {
    const CAPACITY: u64 = 6;
    let mut servers = ClusterServers::start();
    let (_, limiter) = cluster_limiter(&servers);
    let limiter = limiter.to_builder().deadline(SOME_TIME).build();
    let rule = |text: &str| rule(text, OnError::Closed);
    let kept = rule("gcra 10/1d").named("kept").expect("a name");
    let [watched, loaded] = [rule("gcra 100000/1d"), rule(&format!("gcra {CAPACITY}/1d"))];
    let key = &servers.keys_of(0, 1)[0];
    for left in [9, 8, 7] {
        assert_eq!(decided(&limiter, &kept, key).await.remaining, left);
    }
    let mut connection = servers.node(0).connection();
    cmd("SET").arg(format!("{{{key}}}last")).arg("written").exec(&mut connection).expect("written");
    assert_eq!(cmd("WAIT").arg(1).arg(10_000).query::<u64>(&mut connection).expect("a count"), 1);

    let others: Vec<_> = (1..3).flat_map(|node| servers.keys_of(node, 8)).collect();
    let elsewhere = Callers::start(4, &limiter, &watched, &others);
    // Far more keys than are used up before the fault.
    let here = Callers::start(8, &limiter, &loaded, &servers.keys_of(0, 300));
    elsewhere.answered(50).await;
    here.answered(300).await;
    servers.kill(0);
    until(|| servers.primary_of(servers.slot_of(key)) == Some(servers.partner_of(0))).await;
    let mut unknown = 0;
    let decision = wait_for_value(async || match acquire(&limiter, &kept, key).await {
        Ok(decision) => Some(decision),
        Err(error) => {
            unknown += u64::from(error.charged() == Charged::Unknown);
            None
        }
    })
    .await;
    assert!((6 - unknown..=6).contains(&decision.remaining), "what was replicated counts: {decision:?}");
    here.answered(600).await;
    // As if the promoted one had lost its scripts once more.
    run_command(servers.node(servers.partner_of(0)), &["SCRIPT", "FLUSH"]);
    here.answered(300).await;
    let (elsewhere, here) = (elsewhere.end().await, here.end().await);
    elsewhere.is_undisturbed(SOME_TIME);
    here.is_in_time(SOME_TIME);
    here.is_within(CAPACITY, 1);
    assert!(here.errors.keys().all(|class| OUTAGES.contains(class)), "{:?}", here.errors);
}
