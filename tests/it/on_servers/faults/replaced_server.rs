//! A server that is restarted empty, replaced by another, or changes between primary and replica.

use super::*;

/// A server and a replica of it that has caught up.
async fn pair() -> (Server, Server) {
    let primary = Server::with(&["--repl-diskless-sync-delay", "0"]);
    let replica = Server::with(&["--replicaof", &format!("127.0.0.1 {}", primary.port())]);
    until(|| info_says(&replica, "master_link_status:up")).await;
    (primary, replica)
}

#[tokio::test]
async fn a_server_restarted_empty_is_counted_as_a_restart_and_counts_from_zero() {
    let mut server = Server::start();
    let redis = redis(&server.tcp_url());
    let limiter = Limiter::builder(redis.clone()).deadline(PATIENCE).build();
    let rule = rule("gcra 3/1d", OnError::Closed);
    for allowed in [true, true, true, false] {
        assert_eq!(decided(&limiter, &rule, "key").await.allowed, allowed);
    }
    assert_eq!(redis.restarts(), 0);
    server.restart();
    let decision = answered_again(&limiter, &rule, "key").await;
    // One capacity more, no more than that.
    assert_eq!((decision.allowed, decision.remaining, redis.restarts()), (true, 2, 1));
}

#[tokio::test]
async fn a_server_that_dies_in_flight_leaves_the_charge_unknown() {
    let mut server = Server::start();
    let proxy = Proxy::to(server.port()).await;
    let limiter = limiter(&proxy.url()).to_builder().deadline(PATIENCE).build();
    let (closed, open) = (rule("gcra 1000/1d", OnError::Closed), rule("gcra 1000/1d", OnError::Open));
    decided(&limiter, &closed, "key").await;
    server.signal("-STOP");
    let before = proxy.requested();
    let calls: Vec<_> = (0..40)
        .map(|number| {
            let (limiter, rule) = (limiter.clone(), if number % 2 == 0 { closed.clone() } else { open.clone() });
            tokio::spawn(async move { acquire(&limiter, &rule, "key").await })
        })
        .collect();
    until(|| proxy.requested() > before).await;
    server.stop();
    let mut sent = 0;
    for (number, call) in calls.into_iter().enumerate() {
        match call.await.expect("a task") {
            Ok(decision) => {
                assert!(number % 2 == 1 && matches!(decision.by, DecidedBy::Policy(_)) && decision.by.error().is_some())
            }
            Err(error) => {
                assert!(number % 2 == 0, "{error}");
                sent += u64::from(error.charged() == Charged::Unknown);
            }
        }
    }
    assert!(sent > 0);
}

#[tokio::test]
async fn an_emptied_server_decides_as_for_new_keys() {
    let server = Server::start();
    let limiter = limiter(&server.tcp_url()).to_builder().deadline(PATIENCE).build();
    let rule = rule("gcra 3/1d", OnError::Closed);
    for round in 0..3 {
        for allowed in [true, true, true, false] {
            assert_eq!(decided(&limiter, &rule, "key").await.allowed, allowed, "{round}");
        }
        run(&server, &[["FLUSHALL", "FLUSHDB", "FLUSHALL"][round]]);
    }
}

/// What is evicted is as if never used: one capacity more, and only what has an expiry goes.
#[tokio::test]
async fn an_evicted_key_is_a_new_one() {
    let server = Server::with(&["--maxmemory-policy", "volatile-ttl", "--maxmemory-samples", "64"]);
    let limiter = limiter(&server.tcp_url()).to_builder().deadline(PATIENCE).build();
    let rule = rule("gcra 3/1h", OnError::Closed);
    for _ in 0..3 {
        decided(&limiter, &rule, "key").await;
    }
    let fillers = "for i = 1, 100 do redis.call('SET', 'filler' .. i, string.rep('x', 10000), 'EX', 1000000) end";
    cmd("EVAL").arg(fillers).arg(0).exec(&mut server.connection()).expect("filled");
    let info: String = cmd("INFO").arg("memory").query(&mut server.connection()).expect("a state");
    let used = info.lines().find_map(|line| line.strip_prefix("used_memory:")).expect("memory");
    let less = (used.parse::<u64>().expect("a number") - 500_000).to_string();
    run(&server, &["CONFIG", "SET", "maxmemory", &less]);
    let decision = decided(&limiter, &rule, "key").await;
    assert_eq!((decision.allowed, decision.remaining), (true, 2));
    assert!(!acquire(&limiter, &rule, "key").await.is_ok_and(|decision| decision.remaining != 1));
}

#[tokio::test]
async fn a_primary_that_becomes_a_replica_refuses_its_connection_is_dropped_and_it_is_no_denial() {
    let (primary, other) = pair().await;
    let redis = redis(&primary.tcp_url());
    let limiter = Limiter::builder(redis.clone()).deadline(PATIENCE).build();
    let closed = rule("gcra 5/1d", OnError::Closed);
    decided(&limiter, &closed, "key").await;
    run(&other, &["REPLICAOF", "NO", "ONE"]);
    run(&primary, &["REPLICAOF", "127.0.0.1", &other.port().to_string()]);
    let error = acquire(&limiter, &closed, "key").await.expect_err("a replica");
    assert!(
        error.kind() == ErrorKind::NotNow && error.charged() == Charged::No && error.to_string().contains("READONLY"),
        "{error}"
    );
    assert!(redis.connections() > 1, "another connection may find the new primary");
    by_policy(&primary.tcp_url(), &["not-now", "deadline"]).await;
    run(&primary, &["REPLICAOF", "NO", "ONE"]);
    answered_again(&limiter, &closed, "key").await;
}

#[tokio::test]
async fn calls_to_a_replica_without_its_primary_get_the_policys_answer() {
    let (mut primary, replica) = pair().await;
    run(&replica, &["CONFIG", "SET", "replica-serve-stale-data", "no"]);
    primary.stop();
    until(|| cmd("GET").arg("key").exec(&mut replica.connection()).is_err()).await;
    by_policy(&replica.tcp_url(), &["not-now", "deadline"]).await;
}

/// A name that leads to the promoted replica is followed by itself; what was replicated still counts.
#[tokio::test]
async fn a_promoted_replica_at_the_same_address_is_used_with_the_state_that_it_has() {
    let (mut primary, replica) = pair().await;
    let proxy = Proxy::to(primary.port()).await;
    let redis = redis(&proxy.url());
    let limiter = Limiter::builder(redis.clone()).deadline(PATIENCE).build();
    let rule = rule("gcra 5/1d", OnError::Closed);
    for _ in 0..2 {
        decided(&limiter, &rule, "key").await;
    }
    let mut connection = primary.connection();
    cmd("SET").arg("last").arg("written").exec(&mut connection).expect("written");
    let replicas: u64 = cmd("WAIT").arg(1).arg(10_000).query(&mut connection).expect("a count");
    assert_eq!(replicas, 1);
    primary.stop();
    run(&replica, &["REPLICAOF", "NO", "ONE"]);
    run(&replica, &["SCRIPT", "FLUSH"]);
    proxy.lead_to(replica.port());
    assert_eq!(answered_again(&limiter, &rule, "key").await.remaining, 2);
    assert_eq!(redis.restarts(), 1, "it is another server");
}
