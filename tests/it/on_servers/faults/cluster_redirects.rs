//! Redirects of a cluster (MOVED, ASK, TRYAGAIN): every call is answered and charged once.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use tollgate::{Engine, ErrorKind};
use tollgate_testing::redis_server::{command_text, free_port, run_command};

use super::*;

const SCRIPTS: [&str; 4] = ["evalsha", "eval", "evalsha_ro", "eval_ro"];
const TOPOLOGY: [&str; 3] = ["cluster|slots", "cluster|shards", "cluster|nodes"];

/// Scripts that ran on each node since the nodes were made to forget. One that isn't there, or is for another node,
/// doesn't run.
fn ran(servers: &ClusterServers) -> Vec<u64> {
    let of = |node: &Server| {
        let counts = node.commands();
        SCRIPTS.iter().filter_map(|command| counts.get(*command)).map(|(calls, failed)| calls - failed).sum()
    };
    servers.nodes().iter().map(of).collect()
}

/// Scripts that a node sent elsewhere, or told to come back.
fn sent_away(node: &Server) -> u64 {
    let info = command_text(node, &["INFO", "commandstats"]);
    let lines = info.lines().filter(|line| line.starts_with("cmdstat_eval"));
    let number = |line: &str| line.split_once("rejected_calls=")?.1.split(',').next()?.trim().parse::<u64>().ok();
    lines.filter_map(number).sum()
}

fn forget(servers: &ClusterServers) {
    servers.nodes().iter().for_each(Server::reset_command_counts);
}

#[tokio::test]
async fn a_slot_that_has_moved_is_followed_and_each_call_is_charged_once() {
    let servers = ClusterServers::of_primaries();
    let (_, limiter) = cluster_limiter(&servers);
    let limiter = limiter.to_builder().deadline(PATIENCE).build();
    let rule = rule("gcra 20/1d", OnError::Closed);
    let key = &servers.keys_of(0, 1)[0];
    let slot = servers.slot_of(key);
    assert_eq!(decided(&limiter, &rule, key).await.remaining, 19);

    servers.begin_moving(slot, 0, 1);
    assert_eq!(servers.move_keys(slot, 0, 1), 1);
    servers.finish_moving(slot, 0, 1);
    forget(&servers);
    // The new node has never heard of the script.
    for left in (14..19).rev() {
        let decision = decided(&limiter, &rule, key).await;
        assert_eq!((decision.by, decision.remaining), (DecidedBy::Redis, left));
    }
    assert_eq!(ran(&servers), [0, 5, 0]);
    // The first was sent on; those that came while it was learnt may have been too.
    assert!(sent_away(servers.node(0)) >= 1);
    wait_for_value(async || {
        let before = sent_away(servers.node(0));
        decided(&limiter, &rule, key).await;
        (sent_away(servers.node(0)) == before).then_some(())
    })
    .await;

    run_command(servers.node(1), &["SCRIPT", "FLUSH"]);
    let before = limiter.peek(&rule, key.as_str()).await.expect("a peek").remaining;
    assert_eq!(acquire(&limiter, &rule, key).await.expect("healed").remaining, before - 1);
}

#[tokio::test]
async fn a_call_on_a_moving_slot_goes_to_the_node_that_has_its_keys() {
    let servers = ClusterServers::of_primaries();
    let (_, limiter) = cluster_limiter(&servers);
    let limiter = limiter.to_builder().deadline(PATIENCE).build();
    let (stays, absent) = (rule("token-bucket 20/1d", OnError::Closed), rule("sliding-log 20/1d", OnError::Closed));
    let key = &servers.keys_of(0, 1)[0];
    let slot = servers.slot_of(key);
    decided(&limiter, &stays, key).await;
    forget(&servers);
    servers.begin_moving(slot, 0, 1);
    for left in [19, 18, 17] {
        // What isn't at the old node is made at the new one; what is, stays until it is moved.
        assert_eq!(acquire(&limiter, &absent, key).await.expect("asked elsewhere").remaining, left);
        assert_eq!(acquire(&limiter, &stays, key).await.expect("still here").remaining, left - 1);
    }
    assert_eq!(ran(&servers), [3, 3, 0]);
    assert_eq!(sent_away(servers.node(0)), 3, "asking elsewhere once isn't moving there");
    assert_eq!(servers.move_keys(slot, 0, 1), 1);
    assert_eq!(acquire(&limiter, &stays, key).await.expect("moved").remaining, 15);
    servers.finish_moving(slot, 0, 1);
    assert_eq!(acquire(&limiter, &stays, key).await.expect("for good").remaining, 14);
    assert_eq!(acquire(&limiter, &absent, key).await.expect("for good").remaining, 16);
}

#[tokio::test]
async fn where_a_slot_moves_to_a_node_that_is_silent_no_call_asks_the_old_node_twice() {
    let servers = ClusterServers::of_primaries();
    let (_, limiter) = cluster_limiter(&servers);
    let limiter = limiter.to_builder().deadline(Duration::from_millis(300)).build();
    let rule = rule("token-bucket 20/1d", OnError::Closed);
    let key = &servers.keys_of(0, 1)[0];
    answered_again(&limiter, &rule, key).await;
    run_command(servers.node(0), &["FLUSHALL"]);
    servers.begin_moving(servers.slot_of(key), 0, 1);
    servers.node(1).signal("-STOP");
    let mut fast = 0;
    in_time(async {
        // Once the silent node isn't asked any more, calls have time left.
        while fast < 5 {
            let before = sent_away(servers.node(0));
            let error = acquire(&limiter, &rule, key).await.expect_err("nobody has the key");
            assert!(!error.to_string().contains("nodes don't agree on slot"), "{error}");
            fast += usize::from(error.is_unreachable());
            assert!(sent_away(servers.node(0)) <= before + 1, "{error}");
        }
    })
    .await;
    servers.node(1).signal("-CONT");
    answered_again(&limiter, &rule, key).await;
}

/// A decision of two limits, of which one's key has been moved: neither node can decide until the other is.
async fn split(servers: &ClusterServers, key: &str) -> Rule {
    let (_, limiter) = cluster_limiter(servers);
    let two = rule("sliding-log 20/1d", OnError::Closed).and("token-bucket 9/1d".parse().expect("a limit"));
    let two = two.expect("two limits");
    assert_eq!(
        acquire(&limiter.to_builder().deadline(PATIENCE).build(), &two, key).await.expect("a decision").remaining,
        8
    );
    let slot = servers.slot_of(key);
    servers.begin_moving(slot, 0, 1);
    let keys = run_command(servers.node(0), &["CLUSTER", "GETKEYSINSLOT", &slot.to_string(), "10"]);
    let keys: Vec<String> = tollgate::redis::from_redis_value(keys).expect("keys");
    assert_eq!(keys.len(), 2);
    servers.move_key(&keys[0], 0, 1);
    two
}

#[tokio::test]
async fn a_decision_whose_keys_are_at_two_nodes_is_tried_again_and_charged_once() {
    let servers = ClusterServers::of_primaries();
    let key = &servers.keys_of(0, 1)[0];
    let two = split(&servers, key).await;
    let (_, limiter) = cluster_limiter(&servers);
    let limiter = limiter.to_builder().deadline(PATIENCE).build();
    // Where the slot moves to is learnt.
    acquire(&limiter, &rule("gcra 20/1h", OnError::Closed), key).await.expect("a decision");
    let refused = || sent_away(servers.node(0)) + sent_away(servers.node(1));
    let before = refused();
    let waiting = {
        let (limiter, two, key) = (limiter.clone(), two.clone(), key.clone());
        tokio::spawn(async move { acquire(&limiter, &two, &key).await })
    };
    until(|| refused() > before).await;
    let slot = servers.slot_of(key);
    assert_eq!(servers.move_keys(slot, 0, 1), 1);
    servers.finish_moving(slot, 0, 1);
    assert_eq!(in_time(waiting).await.expect("a task").expect("tried again").remaining, 7);
    let decision = acquire(&limiter, &two, key).await.expect("whole again");
    assert_eq!(decision.limits.iter().map(|limit| limit.remaining).collect::<Vec<_>>(), [17, 6]);
}

#[tokio::test]
async fn a_decision_whose_keys_stay_at_two_nodes_is_answered_by_policy_and_delays_no_other() {
    let servers = ClusterServers::of_primaries();
    let keys = servers.keys_of(0, 1);
    let two = split(&servers, &keys[0]).await;
    let (_, limiter) = cluster_limiter(&servers);
    let (limiter, patient) = (
        limiter.to_builder().deadline(Duration::from_millis(300)).build(),
        limiter.to_builder().deadline(PATIENCE).build(),
    );
    let others: Vec<_> = (0..2).flat_map(|node| servers.keys_of(node, 6)).filter(|other| *other != keys[0]).collect();
    let elsewhere = rule("gcra 20/1d", OnError::Closed);
    let mut explained = 0;
    for round in 0..12 {
        // As many as would open a breaker.
        for answer in futures_util::future::join_all((0..8).map(|_| acquire(&limiter, &two, &keys[0]))).await {
            let error = answer.expect_err("split");
            let says_why = error.kind().name() == "not-now" && error.to_string().contains("TRYAGAIN");
            assert!(says_why || error.kind() == ErrorKind::Deadline, "{round}: {error}");
            explained += u32::from(says_why);
            // The last of its attempts may be under way as the deadline passes.
            assert!(error.charged() == Charged::No || error.kind() == ErrorKind::Deadline, "{round}: {error}");
        }
        for other in &others {
            let decision = acquire(&patient, &elsewhere, other).await;
            assert_eq!(decision.expect("another slot").remaining, 19 - round, "{other}");
        }
        if round >= 5 && explained > 0 {
            break;
        }
    }
    assert!(explained > 0, "every deadline passed within an attempt, of which there are pauses between");
    let open = two.on_error(OnError::Open).expect("a policy");
    let instead = acquire(&limiter, &open, &keys[0]).await.expect("by policy");
    assert!(matches!(instead.by, DecidedBy::Policy(_)) && instead.by.error().is_some(), "{instead:?}");
}

/// Callers of one organisation's keys leave in calls of several keys, which neither node decides while the slot moves.
#[tokio::test]
async fn keys_that_share_a_slot_are_decided_one_by_one_while_it_moves() {
    let servers = ClusterServers::of_primaries();
    let tag = &servers.keys_of(0, 1)[0];
    let (cluster, limiter) = cluster_limiter(&servers);
    let (limiter, rule) = (
        limiter.to_builder().deadline(PATIENCE).build(),
        rule("gcra 12/1d", OnError::Closed).tagged("org").expect("a part"),
    );
    let users: Vec<_> = (0..20).map(|user| format!("of one organisation {user}")).collect();
    let parts = [("org", tag.as_bytes())];
    let all = async || {
        let requests = users.iter().map(|user| Request::new(user).parts(&parts));
        let alone = futures_util::future::join_all(requests.clone().map(|request| limiter.acquire(&rule, request)));
        let answers = alone.await.into_iter().chain(limiter.acquire_many(&rule, requests).await);
        answers.map(|answer| answer.expect("a decision").remaining).max()
    };
    assert_eq!(all().await, Some(11));
    let slot = servers.slot_of(tag);
    servers.begin_moving(slot, 0, 1);
    let keys = run_command(servers.node(0), &["CLUSTER", "GETKEYSINSLOT", &slot.to_string(), "10"]);
    let keys: Vec<String> = tollgate::redis::from_redis_value(keys).expect("keys");
    keys.iter().for_each(|key| servers.move_key(key, 0, 1));
    for remaining in [9, 7, 5] {
        assert_eq!(all().await, Some(remaining));
    }
    assert!(cluster.breakers().iter().all(|(_, breaker)| *breaker == BreakerState::Closed));
}

/// A node removed from the cluster answers CLUSTERDOWN for every slot.
#[tokio::test]
async fn a_node_removed_from_the_cluster_is_no_longer_used() {
    let servers = ClusterServers::of_primaries();
    let (cluster, limiter) = cluster_limiter(&servers);
    let (key, rule) = (&servers.keys_of(0, 1)[0], rule("gcra 9/1d", OnError::Closed));
    decided(&limiter, &rule, key).await;
    let slot = servers.slot_of(key);
    servers.begin_moving(slot, 0, 1);
    servers.move_keys(slot, 0, 1);
    servers.finish_moving(slot, 0, 1);
    run(servers.node(0), &["FLUSHALL"]);
    run(servers.node(0), &["CLUSTER", "RESET", "HARD"]);
    assert_eq!(answered_again(&limiter, &rule, key).await.remaining, 7);
    assert!(cluster.refreshes() > 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slot_that_moves_under_load_admits_exactly_the_limit_without_an_error() {
    const UNITS: u64 = 3000;
    const CALLS: u64 = 4800;
    const TASKS: u64 = 64;
    let deadline = Duration::from_secs(5);
    let servers = ClusterServers::of_primaries();
    let (_, limiter) = cluster_limiter(&servers);
    let limiter = limiter.to_builder().deadline(deadline).build();
    let rule = rule(&format!("gcra {UNITS}/30d"), OnError::Closed);
    let key = &servers.keys_of(0, 1)[0];
    let slot = servers.slot_of(key);
    let (left, answered) = (Arc::new(AtomicU64::new(TASKS)), Arc::new(AtomicU64::new(0)));
    let tasks: Vec<_> = (0..TASKS)
        .map(|_| {
            let (limiter, rule, key) = (limiter.clone(), rule.clone(), key.clone());
            let (left, answered) = (Arc::clone(&left), Arc::clone(&answered));
            tokio::spawn(async move {
                let mut admitted = 0;
                for _ in 0..CALLS / TASKS {
                    let began = Instant::now();
                    let decision = decided(&limiter, &rule, &key).await;
                    assert!(began.elapsed() < deadline + SLACK, "{:?}", began.elapsed());
                    admitted += u64::from(decision.allowed);
                    answered.fetch_add(1, Ordering::Relaxed);
                }
                left.fetch_sub(1, Ordering::Relaxed);
                admitted
            })
        })
        .collect();
    let over = || left.load(Ordering::Relaxed) < TASKS;
    // Every step is met by some calls.
    let met = async || {
        let enough = answered.load(Ordering::Relaxed) + TASKS / 2;
        until(|| answered.load(Ordering::Relaxed) >= enough || over()).await;
    };
    let (mut at, mut moves) = (0, 0);
    while !over() {
        let to = (at + 1) % 3;
        servers.begin_moving(slot, at, to);
        met().await;
        servers.move_keys(slot, at, to);
        met().await;
        servers.finish_moving(slot, at, to);
        servers.wait_until_known(to);
        (at, moves) = (to, moves + 1);
        met().await;
    }
    let mut admitted = 0;
    for task in tasks {
        admitted += in_time(task).await.expect("no error");
    }
    assert!(moves > 0, "{moves}");
    assert_eq!(admitted, UNITS, "after {moves} moves");
}

#[tokio::test]
async fn keys_that_share_a_tag_are_one_decision() {
    let servers = ClusterServers::of_primaries();
    let (_, limiter) = cluster_limiter(&servers);
    let limiter = limiter.to_builder().deadline(PATIENCE).build();
    forget(&servers);
    let two = rule("gcra 5/1d", OnError::Open).tagged("org").expect("a part");
    let two = two.and_by("org", "gcra 50/1h".parse().expect("a limit")).expect("a tag");
    let error = acquire(&limiter, &two, "user").await.expect_err("of no organisation");
    assert!(error.is_input() && error.to_string().contains("org"), "{error}");
    assert_eq!(ran(&servers), [0, 0, 0]);
    assert_eq!(servers.nodes().iter().map(sent_away).sum::<u64>(), 0);

    let parts = [("org", &b"acme"[..])];
    let decision = in_time(limiter.acquire(&two, Request::new("user").parts(&parts))).await.expect("one slot");
    assert_eq!(decision.limits.iter().map(|limit| limit.remaining).collect::<Vec<_>>(), [4, 49]);

    // Many at once are as many decisions, wherever each is made.
    let single = rule("gcra 5/1d", OnError::Closed);
    let keys: Vec<_> = (0..3).flat_map(|node| servers.keys_of(node, 10)).collect();
    for left in [4, 3] {
        forget(&servers);
        for (key, answer) in
            keys.iter().zip(in_time(limiter.acquire_many(&single, keys.iter().map(String::as_str))).await)
        {
            let decision = answer.expect("a decision");
            assert_eq!((decision.by, decision.remaining), (DecidedBy::Redis, left), "{key}");
        }
        assert!(ran(&servers).iter().all(|ran| (1..=10).contains(ran)));
    }
}

#[tokio::test]
async fn a_call_whose_reply_is_lost_is_charged_once_at_most_and_not_sent_again() {
    let servers = ClusterServers::of_primaries();
    let proxy = Proxy::to(servers.node(0).port()).await;
    servers.announce(0, proxy.port());
    let (_, limiter) = cluster_limiter(&servers);
    let limiter = limiter.to_builder().deadline(PATIENCE).build();
    let rule = rule("gcra 100/1d", OnError::Closed);
    let (cut, whole) = (&servers.keys_of(0, 1)[0], &servers.keys_of(1, 1)[0]);
    for (key, left) in [(cut, 99), (whole, 99)] {
        assert_eq!(decided(&limiter, &rule, key).await.remaining, left);
    }
    let mut charged = 1;
    for bytes in [0, 1, 3, 7] {
        forget(&servers);
        proxy.cut_after(bytes);
        let error = acquire(&limiter, &rule, cut).await.expect_err("cut");
        // What is left of a reply can't be read.
        assert!(error.kind() == ErrorKind::Disconnected || bytes > 0 && error.kind().name() == "garbled", "{error}");
        assert_eq!(error.charged(), Charged::Unknown, "{error}");
        // Others don't notice.
        let began = Instant::now();
        acquire(&limiter, &rule, whole).await.expect("another shard");
        assert!(began.elapsed() < SLACK);
        // On a busy machine, the connection may be cut off before the node has read the call.
        let ran = ran(&servers);
        assert!(ran[0] <= 1 && ran[1..] == [1, 0], "asked again: {ran:?}");
        proxy.cut_after(u64::MAX);
        let taken = 100 - charged - answered_again(&limiter, &rule, cut).await.remaining;
        assert!((1..=2).contains(&taken), "{taken} taken");
        charged += taken;
    }
    // All at once, which may share a call.
    proxy.cut_after(0);
    let hasty = limiter.to_builder().deadline(Duration::from_secs(1)).build();
    let answers = futures_util::future::join_all((0..30).map(|_| acquire(&hasty, &rule, cut))).await;
    let mut unknown = 0;
    for error in answers.into_iter().map(|answer| answer.expect_err("cut")) {
        match error.charged() {
            Charged::Unknown => assert!(error.kind() == ErrorKind::Disconnected, "{error}"),
            _ => assert!(error.charged() == Charged::No && error.is_unreachable(), "{error}"),
        }
        unknown += u64::from(error.charged() == Charged::Unknown);
    }
    proxy.cut_after(u64::MAX);
    let left = answered_again(&limiter, &rule, cut).await.remaining;
    assert!(99 - charged - left <= unknown, "{left} left of {}, {unknown} unknown", 100 - charged);
}

/// Few callers request the slot map, however many a dead shard has.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn callers_of_a_dead_shard_send_few_slot_map_requests_to_the_others() {
    let mut servers = ClusterServers::of_primaries();
    let (cluster, limiter) = cluster_limiter(&servers);
    let limiter = limiter.to_builder().deadline(DEADLINE).build();
    let rule = rule("gcra 1000/1d", OnError::Open);
    let keys: Vec<_> = (0..3).flat_map(|node| servers.keys_of(node, 5)).collect();
    for key in &keys {
        answered_again(&limiter, &rule, key).await;
    }
    servers.kill(2);
    let alive = [servers.node(0), servers.node(1)];
    alive.iter().for_each(|node| node.reset_command_counts());
    let before = cluster.refreshes();
    let callers = Callers::start(100, &limiter, &rule, &keys[10..]);
    tokio::time::sleep(Duration::from_secs(1)).await;
    let told = callers.end().await;
    assert!(told.errors.is_empty() && told.instead > 500 && told.allowed() == 0, "{told:?}");
    told.is_in_time(DEADLINE);
    let asked: u64 = alive
        .iter()
        .map(|node| {
            let counts = node.commands();
            TOPOLOGY.iter().filter_map(|command| counts.get(*command)).map(|(calls, _)| calls).sum::<u64>()
        })
        .sum();
    let refreshes = cluster.refreshes() - before;
    assert!((1..30).contains(&asked) && refreshes > 0, "{asked} times, {refreshes} refreshes, {told:?}");
}

#[tokio::test]
async fn one_reachable_seed_is_enough_to_find_the_cluster() {
    let servers = ClusterServers::of_primaries();
    let rule = rule("gcra 1000/1d", OnError::Closed);
    let silent = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let silent = format!("127.0.0.1:{}", silent.local_addr().expect("an address").port());
    let dead = format!("127.0.0.1:{}", free_port());
    let live = format!("127.0.0.1:{}", servers.node(1).port());
    for seeds in [format!("{dead},{live}"), format!("{live},{dead}"), format!("{silent},{dead},{live}")] {
        let url = format!("redis-cluster://{seeds}");
        for engine in [Engine::open(&url), Cluster::open(&url).map(Engine::from)] {
            let limiter = Limiter::builder(engine.expect("an address")).deadline(Duration::from_secs(2)).build();
            for node in 0..3 {
                answered_again(&limiter, &rule, &servers.keys_of(node, 1)[0]).await;
            }
        }
    }
    let nowhere = Cluster::open(&format!("redis-cluster://{dead},127.0.0.1:{}", free_port())).expect("an address");
    let error =
        acquire(&Limiter::builder(nowhere).deadline(DEADLINE).build(), &rule, "user").await.expect_err("nobody");
    assert!(error.is_unreachable() && error.charged() == Charged::No, "{error}");
    assert_eq!(error.to_string().lines().count(), 1);
}

#[test]
fn an_invalid_address_is_an_error_of_one_line_without_its_password() {
    for url in [
        "redis-cluster://",
        "redis-cluster://:hunter2@",
        "redis-cluster://user:hunter2@localhost:99999",
        "redis-cluster://user:hunter2@localhost:1,:2",
        "redis-cluster://user:hunter2@localhost:1,,localhost:2",
        "redis-cluster:user:hunter2@localhost:1",
        "redis-sentinel://",
        "redis-sentinel://:hunter2@localhost:1",
        "redis-sentinel://:hunter2@localhost:1/",
        "redis-sentinel://:hunter2@localhost:x/main",
        "redis-sentinel://:hunter2@/main",
        "redis-elsewhere://:hunter2@localhost:1",
    ] {
        let mut errors = vec![Engine::open(url).expect_err(url)];
        errors.extend(Cluster::open(url).err());
        errors.extend(Redis::open(url).err());
        for error in errors {
            let message = error.to_string();
            assert!(
                error.is_input() && message.starts_with("url: ") && message.lines().count() == 1,
                "{url}: {message}"
            );
            assert!(!message.contains("hunter2"), "{url}: {message}");
        }
    }
    for url in ["redis://localhost", "redis-cluster://localhost:7000,localhost:7001", "redis-sentinel://localhost/main"]
    {
        Engine::open(url).expect(url);
    }
    Cluster::open("redis://localhost").expect_err("not of a cluster");
    Redis::open("redis-cluster://localhost").expect_err("of a cluster");
}
