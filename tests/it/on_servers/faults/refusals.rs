//! A server that refuses: no memory, no permission, too many clients.

use super::*;

/// Charged nothing, answered by policy, and taken back once the server is put right.
async fn refused_until(server: &Server, classes: &[&str], put_right: impl AsyncFnOnce(&Server)) {
    let limiter = limiter(&server.tcp_url()).to_builder().deadline(PATIENCE).build();
    let closed = rule("gcra 5/1d", OnError::Closed);
    let error = acquire(&limiter, &closed, "key").await.expect_err("refused");
    assert!(
        classes.contains(&error.kind().name()) && error.charged() == Charged::No,
        "{}: {error}",
        error.kind().name()
    );
    by_policy(&server.tcp_url(), classes).await;
    put_right(server).await;
    assert_eq!(answered_again(&limiter, &closed, "key").await.remaining, 4);
}

#[tokio::test]
async fn a_server_out_of_memory_refuses_and_keeps_nothing() {
    let server = Server::start();
    run(&server, &["CONFIG", "SET", "maxmemory", "1"]);
    refused_until(&server, &["refused"], async |server| {
        let keys: u64 = cmd("DBSIZE").query(&mut server.connection()).expect("a count");
        assert_eq!(keys, 0);
        run(server, &["CONFIG", "SET", "maxmemory", "0"]);
    })
    .await;
}

#[tokio::test]
async fn a_server_that_cannot_write_its_snapshot_refuses() {
    let server = Server::with(&["--save", "3600 1"]);
    // A folder stands where the file would be.
    std::fs::create_dir(server.directory().join("dump.rdb")).expect("a folder");
    run(&server, &["SET", "something", "to save"]);
    run(&server, &["BGSAVE"]);
    until(|| info_says(&server, "rdb_last_bgsave_status:err")).await;
    refused_until(&server, &["refused"], async |server| {
        run(server, &["CONFIG", "SET", "stop-writes-on-bgsave-error", "no"]);
    })
    .await;
}

#[tokio::test]
async fn a_primary_with_too_few_replicas_refuses() {
    let server = Server::with(&["--min-replicas-to-write", "1"]);
    refused_until(&server, &["refused"], async |server| {
        run(server, &["CONFIG", "SET", "min-replicas-to-write", "0"]);
    })
    .await;
}

/// Neither policy opens what the server forbids.
async fn stays_closed(url: &str, class: &str) {
    stays_closed_on(url, "key", class).await;
}

async fn stays_closed_on(url: &str, key: &str, class: &str) {
    for on_error in [OnError::Closed, OnError::Open, LOCAL] {
        // No server is silent here, only slow.
        let limiter = limiter(url).to_builder().deadline(PATIENCE).build();
        for _ in 0..7 {
            let error = acquire(&limiter, &rule("gcra 5/1d", on_error), key).await.expect_err("forbidden");
            assert_eq!((error.kind().name(), error.charged()), (class, Charged::No), "{on_error}: {error}");
        }
    }
}

#[tokio::test]
async fn a_lost_permission_is_an_error_under_every_policy() {
    let server = Server::start();
    let url = server.user("service", "+@all ~*");
    let (limiter, closed) = (limiter(&url).to_builder().deadline(PATIENCE).build(), rule("gcra 5/1d", OnError::Closed));
    decided(&limiter, &closed, "key").await;
    run(&server, &["ACL", "SETUSER", "service", "-evalsha"]);
    stays_closed(&url, "permission").await;
    assert!(acquire(&limiter, &closed, "key").await.expect_err("forbidden").kind() == ErrorKind::Permission);
    run(&server, &["ACL", "SETUSER", "service", "+evalsha"]);
    assert_eq!(decided(&limiter, &closed, "key").await.remaining, 3);
}

/// What redis-rs hands on without a code, or a script meets within.
#[tokio::test]
async fn refused_connections_and_commands_are_classified_whatever_form_the_error_has() {
    let locked = Server::with(&["--requirepass", "secret"]);
    stays_closed(&format!("redis://127.0.0.1:{}/1", locked.port()), "authentication").await;
    let server = Server::start();
    let url = server.user("no-select", "+@all -select ~*");
    stays_closed(&format!("{url}/1"), "permission").await;
    for command in ["TIME", "EVALSHA", "HELLO"] {
        let renamed = Server::with(&["--rename-command", command, "GONE"]);
        stays_closed(&renamed.tcp_url(), "unsupported").await;
    }
    stays_closed(&format!("{}/99", server.tcp_url()), "unsupported").await;
    let cluster = tollgate_testing::cluster::ClusterServers::of_primaries();
    let elsewhere = cluster.keys_of(1, 1).remove(0);
    stays_closed_on(&cluster.node(0).tcp_url(), &elsewhere, "unsupported").await;
    let sentinels = tollgate_testing::sentinels::Sentinels::start();
    stays_closed(&sentinels.sentinel(0).tcp_url(), "unsupported").await;
}

#[tokio::test]
async fn a_changed_password_is_an_error_under_every_policy_and_never_shown() {
    let server = Server::start();
    let url = server.user("service", "+@all ~*");
    let (limiter, closed) = (limiter(&url).to_builder().deadline(PATIENCE).build(), rule("gcra 5/1d", OnError::Closed));
    decided(&limiter, &closed, "key").await;
    run(&server, &["ACL", "SETUSER", "service", "resetpass", ">rotated"]);
    run(&server, &["CLIENT", "KILL", "USER", "service"]);
    stays_closed(&url, "authentication").await;
    in_time(async {
        loop {
            let error = limiter.acquire(&closed, "key").await.expect_err("the connection was closed");
            assert!(!format!("{error} {error:?} {limiter:?}").contains("sesame"));
            if error.kind() == ErrorKind::Authentication {
                return;
            }
            assert!(error.kind() == ErrorKind::Disconnected, "{error}");
        }
    })
    .await;
    run(&server, &["ACL", "SETUSER", "service", ">sesame"]);
    answered_again(&limiter, &closed, "key").await;
}

#[tokio::test]
async fn a_server_with_too_many_clients_is_unreachable_and_gets_few_attempts_to_connect() {
    let server = Server::start();
    let mut occupied = server.connection();
    cmd("CONFIG").arg(&["SET", "maxclients", "1"]).exec(&mut occupied).expect("set");
    let redis = redis(&server.tcp_url());
    let limiter = Limiter::builder(redis.clone()).deadline(DEADLINE).build();
    let open = rule("gcra 5/1d", OnError::Open);
    for _ in 0..500 {
        let decision = acquire(&limiter, &open, "key").await.expect("open");
        assert!(decision.by.error().is_some_and(|error| error.is_unreachable()));
    }
    // In the server's own words, until the breaker answers, and then with the breaker's.
    for url in [server.tcp_url(), server.url()] {
        let closed = rule("gcra 5/1d", OnError::Closed);
        let error = acquire(&Limiter::builder(self::redis(&url)).deadline(PATIENCE).build(), &closed, "key")
            .await
            .expect_err("full");
        let said = error.to_string();
        assert!(error.is_unreachable() && said.ends_with(": ERR max number of clients reached"), "{said}");
    }
    let info: String = cmd("INFO").arg("stats").query(&mut occupied).expect("statistics");
    let rejected = info.lines().find_map(|line| line.strip_prefix("rejected_connections:")).expect("a count");
    assert!(rejected.parse::<u64>().expect("a number") < 50, "{rejected} attempts to connect");
    cmd("CONFIG").arg(&["SET", "maxclients", "100"]).exec(&mut occupied).expect("set");
    answered_again(&limiter, &open, "key").await;
}

/// An open breaker refuses at once, so nothing else makes such a caller wait.
#[tokio::test]
async fn a_caller_who_is_refused_again_and_again_lets_others_have_their_turn() {
    let redis = redis(&format!("redis://127.0.0.1:{}", free_port()));
    let limiter = Limiter::builder(redis.clone()).deadline(DEADLINE).build();
    for policy in [OnError::Closed, OnError::Open] {
        let rule = rule("gcra 1/1d", policy);
        while !matches!(redis.breaker(), BreakerState::Open(_)) {
            _ = acquire(&limiter, &rule, "key").await;
        }
        let turns = turns_of_others(async || _ = limiter.acquire(&rule, "key").await).await;
        assert!(turns > 10, "{policy}: {turns} turns");
    }
}
