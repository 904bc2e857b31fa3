//! TLS on a cluster and on a primary under Sentinels, whose servers listen by TLS alone.

use tollgate::{Engine, ErrorKind, OnError};
use tollgate_testing::cluster::ClusterServers;
use tollgate_testing::polling::{wait_for_value, wait_until};
use tollgate_testing::redis_server::command_text;
use tollgate_testing::sentinels::Sentinels;
use tollgate_testing::server_setup::ServerSetup;

use super::*;

fn on(url: &str, tls: &Tls) -> Limiter {
    Limiter::builder(Redis::builder().tls(tls).open_engine(url).expect("a good address")).deadline(PATIENCE).build()
}

async fn remaining(limiter: &Limiter, key: &str) -> u64 {
    limiter.acquire(&rule(), key).await.expect("a decision").remaining
}

/// Allowed, if that is the policy's to say: as while a busy machine is too slow to find the nodes in time.
async fn refused_whatever_the_policy(limiter: &Limiter) -> Error {
    let open = rule().on_error(OnError::Open).expect("a rule");
    let error = wait_for_value(async || match limiter.acquire(&open, "key").await {
        Err(error) => Some(error),
        Ok(decision) => {
            let late = decision.by.error().expect("no decision by a server that refuses");
            // By its deadline, or by the breaker after others of them.
            assert!(late.kind() == ErrorKind::Deadline || late.is_unreachable(), "{late}");
            None
        }
    })
    .await;
    assert!(error.charged() == Charged::No && !error.to_string().contains('\n'), "{error:?}");
    error
}

fn keys_there(cluster: &ClusterServers) -> u64 {
    cluster.nodes().iter().map(|node| command_text(node, &["DBSIZE"]).parse::<u64>().expect("a size")).sum()
}

#[tokio::test]
async fn keys_of_all_nodes_of_a_cluster_are_decided_by_tls_and_those_that_move_are_followed() {
    let authority = Authority::new("ours");
    let cluster = ClusterServers::of_primaries_with(ServerSetup::by_tls(&authority));
    let keys: Vec<_> = (0..3).flat_map(|node| cluster.keys_of(node, 5)).collect();
    for (url, left) in [(cluster.url(), 4), (cluster.url().replace("127.0.0.1", "localhost") + "?protocol=resp3", 3)] {
        let limiter = on(&url, &authority.trusted_by(&authority));
        for decision in limiter.acquire_many(&rule(), &keys).await {
            assert_eq!(decision.expect("a decision").remaining, left);
        }
        assert_eq!(keys_there(&cluster), 15);
        for node in cluster.nodes() {
            let clients = command_text(node, &["CLIENT", "LIST"]);
            assert_eq!(clients.contains(" resp=3"), url.ends_with("resp3"), "{clients}");
        }
        // One of either address.
        let key = &keys[usize::from(left == 4)];
        let slot = cluster.slot_of(key);
        cluster.begin_moving(slot, 0, 1);
        assert_eq!(cluster.move_keys(slot, 0, 1), 1);
        cluster.node(0).reset_command_counts();
        assert_eq!(remaining(&limiter, key).await, left - 1);
        cluster.finish_moving(slot, 0, 1);
        assert_eq!(remaining(&limiter, key).await, left - 2);
        let said = command_text(cluster.node(0), &["INFO", "errorstats"]);
        for answer in ["errorstat_ASK:count=1\r", "errorstat_MOVED:count=1\r"] {
            assert!(said.contains(answer), "{said}");
        }
        cluster.wait_until_known(1);
        cluster.begin_moving(slot, 1, 0);
        cluster.move_keys(slot, 1, 0);
        cluster.finish_moving(slot, 1, 0);
        cluster.wait_until_known(0);
        limiter.reset(&rule(), key).await.expect("forgotten");
        assert_eq!(remaining(&limiter, key).await, 4);
    }
}

#[tokio::test]
async fn a_cluster_that_isnt_trusted_or_spoken_to_plainly_is_an_error_of_one_line_and_charges_nothing() {
    let (ours, theirs) = (Authority::new("ours"), Authority::new("theirs"));
    let cluster = ClusterServers::of_primaries_with(ServerSetup::by_tls(&theirs));
    let (mine, platforms) = (ours.trusted_by(&theirs), Tls::new());
    for limiter in [on(&cluster.url(), &mine), on(&cluster.url(), &platforms)] {
        let error = refused(&limiter).await;
        let message = error.to_string();
        assert!(error.is_unreachable() && message.contains("UnknownIssuer") && !message.contains('\n'), "{message}");
        assert_eq!(error.charged(), Charged::No);
    }
    let unknown = on(&cluster.url(), &theirs.trusted());
    let plainly = Engine::open(&cluster.url().replace("rediss-", "redis-")).expect("a good address");
    for limiter in [unknown, Limiter::builder(plainly).deadline(PATIENCE).build()] {
        let error = refused(&limiter).await;
        assert!(error.is_unreachable() || error.kind() == ErrorKind::Disconnected, "{error:?}");
        assert!(error.charged() == Charged::No && !error.to_string().contains('\n'), "{error:?}");
    }
    assert_eq!(keys_there(&cluster), 0);
    assert_eq!(remaining(&on(&cluster.url(), &theirs.trusted_by(&theirs)), "key").await, 4, "by whom it trusts");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_primary_that_sentinels_know_is_found_by_tls_and_followed_through_a_failover() {
    let (ours, theirs) = (Authority::new("ours"), Authority::new("theirs"));
    let fleet = Sentinels::with(ServerSetup::by_tls(&ours));
    let tls = ours.trusted_by(&ours);
    let limiters = [on(&fleet.url(), &tls), on(&format!("{}?protocol=resp3", fleet.url()), &tls)];
    for (limiter, left) in limiters.iter().zip([4, 3]) {
        assert_eq!(remaining(limiter, "key").await, left);
    }
    let clients = command_text(fleet.server(0), &["CLIENT", "LIST"]);
    assert!(clients.contains(" resp=3"), "{clients}");

    let error = refused(&on(&fleet.url(), &theirs.trusted_by(&ours))).await;
    let message = error.to_string();
    assert!(error.is_unreachable() && message.contains("UnknownIssuer") && !message.contains('\n'), "{message}");
    let plainly = Redis::open(&fleet.url().replace("rediss-", "redis-")).expect("a good address");
    for limiter in [on(&fleet.url(), &ours.trusted()), Limiter::builder(plainly).deadline(PATIENCE).build()] {
        let error = refused(&limiter).await;
        assert!(error.is_unreachable() && error.charged() == Charged::No, "{error:?}");
    }

    tokio::task::block_in_place(|| {
        fleet.fail_over();
        fleet.wait_until_whole();
    });
    let primary = fleet.primary().expect("a primary");
    assert_ne!(primary, 0);
    for limiter in &limiters {
        fleet.server(primary).reset_command_counts();
        // The first call may reach the old primary, now a replica, and be refused.
        wait_until("the new primary answers", async || limiter.acquire(&rule(), "another").await.is_ok()).await;
        assert!(fleet.server(primary).commands().contains_key("evalsha"));
    }
}

#[tokio::test]
async fn nodes_of_a_cluster_require_a_user_and_a_password() {
    let authority = Authority::new("ours");
    let cluster =
        ClusterServers::of_primaries_with(ServerSetup { password: Some("harness"), ..ServerSetup::by_tls(&authority) });
    for node in cluster.nodes() {
        node.user("limiter", "~* +@all");
    }
    let tls = authority.trusted_by(&authority);
    for protocol in ["", "?protocol=resp3"] {
        let limiter = |user: &str| on(&(cluster.url().replace("://", &format!("://{user}")) + protocol), &tls);
        let right = limiter("limiter:sesame@");
        for key in (0..3).flat_map(|node| cluster.keys_of(node, 1)) {
            assert_eq!(remaining(&right, &key).await, if protocol.is_empty() { 4 } else { 3 });
        }
        for user in ["limiter:hunter2@", "nobody:hunter2@", ":hunter2@", ""] {
            let error = refused_whatever_the_policy(&limiter(user)).await;
            assert!(
                error.kind() == ErrorKind::Authentication && !error.to_string().contains("hunter2"),
                "{user}: {error:?}"
            );
        }
    }
    // One that doesn't answer, or isn't there, is no reason to call it an outage.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = silent.local_addr().expect("its address").port();
    let seeds = cluster.url().replace("://", &format!("://limiter:hunter2@127.0.0.1:{port},"));
    let error = refused_whatever_the_policy(&on(&seeds, &tls)).await;
    assert!(error.kind() == ErrorKind::Authentication, "{error:?}");
}

#[tokio::test]
async fn sentinels_and_their_primary_require_passwords_and_errors_name_which_refused() {
    let authority = Authority::new("ours");
    let passwords =
        ServerSetup { password: Some("secret"), of_sentinels: Some("watch"), ..ServerSetup::by_tls(&authority) };
    let mut fleet = Sentinels::with(passwords);
    let tls = authority.trusted_by(&authority);
    let limiter = |primarys: &str, sentinels: &str, protocol: &str| {
        on(&format!("{}?{sentinels}&protocol={protocol}", fleet.url().replace("://", &format!("://{primarys}"))), &tls)
    };
    let (right, of_sentinels) = (":secret@", "sentinel-password=watch");
    for (protocol, left) in [("resp2", 4), ("resp3", 3)] {
        assert_eq!(remaining(&limiter(right, of_sentinels, protocol), "key").await, left);
        let user = "sentinel-user=default&sentinel-password=watch";
        assert_eq!(remaining(&limiter("default:secret@", user, protocol), protocol).await, 4);
        for (primarys, sentinels, who) in [
            (":hunter2@", of_sentinels, "primary main"),
            ("", of_sentinels, "primary main"),
            (right, "sentinel-password=hunter2", "sentinel 127.0.0.1:"),
            (right, "sentinel-user=nobody&sentinel-password=hunter2", "sentinel 127.0.0.1:"),
            (right, "", "sentinel 127.0.0.1:"),
        ] {
            let error = refused_whatever_the_policy(&limiter(primarys, sentinels, protocol)).await;
            let message = error.to_string();
            assert!(
                error.kind() == ErrorKind::Authentication && !message.contains("hunter2"),
                "{sentinels}: {error:?}"
            );
            assert!(message.contains(&format!("refused the user or the password at {who}")), "{message}");
        }
    }
    let wrong = format!("{}?sentinel-password=hunter2", fleet.url().replace("://", "://:secret@"));
    fleet.sentinel(2).signal("-STOP");
    let first = refused_whatever_the_policy(&on(&wrong, &tls)).await;
    fleet.sentinel(2).signal("-CONT");
    fleet.kill_sentinel(2);
    for error in [first, refused_whatever_the_policy(&on(&wrong, &tls)).await] {
        assert!(error.kind() == ErrorKind::Authentication, "the others did refuse: {error:?}");
    }
}
