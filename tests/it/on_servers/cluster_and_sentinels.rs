//! The library on a cluster and on a primary under Sentinels, while nothing fails.

use std::time::Duration;

use futures_util::future::join_all;
use tollgate::redis::cmd;
use tollgate::{Charged, Cluster, Engine, ErrorKind, Limiter, OnError, Redis, Request};
use tollgate_testing::acl::{least, more};
use tollgate_testing::cluster::ClusterServers;
use tollgate_testing::polling::{PATIENCE, block_until, wait_for_value};
use tollgate_testing::proxy::Proxy;
use tollgate_testing::redis_server::{Server, command_text, run_command};
use tollgate_testing::rules::rule;
use tollgate_testing::sentinels::Sentinels;

fn on(engine: impl Into<Engine>) -> Limiter {
    Limiter::builder(engine).deadline(PATIENCE).build()
}

fn on_cluster(servers: &ClusterServers) -> Limiter {
    on(Cluster::open(&servers.url()).expect("a good address"))
}

#[tokio::test]
async fn keys_of_all_slots_are_decided_at_once_and_each_by_itself() {
    let servers = ClusterServers::of_primaries();
    let (limiter, rule) = (on_cluster(&servers), rule("gcra 2/1d"));
    let keys: Vec<_> = (0..300).map(|key| format!("user:{key}")).collect();
    for remaining in [1, 0] {
        for decision in limiter.acquire_many(&rule, &keys).await {
            let decision = decision.expect("a decision");
            assert_eq!((decision.allowed, decision.remaining), (true, remaining));
        }
    }
    for decision in join_all(keys.iter().map(|key| limiter.acquire(&rule, key))).await {
        assert!(!decision.expect("a decision").allowed);
    }
    for node in servers.nodes() {
        let calls = node.commands().get("evalsha").map_or(0, |(calls, _)| *calls);
        assert!((3..40).contains(&calls), "{calls}: each node has its part, and calls of one node go together");
    }
}

/// One behind a long way: connecting and asking it for the slots takes four answers of a sixth of a second, which is
/// longer than a caller waits for a node once the slots are known.
#[tokio::test]
async fn a_cluster_whose_only_known_node_is_slow_to_answer_is_found_by_the_first_call() {
    let servers = ClusterServers::of_primaries();
    let proxy = Proxy::to(servers.nodes()[0].port()).await;
    proxy.delay(Duration::from_millis(160));
    let first_call = async || {
        let cluster = Cluster::open(&format!("redis-cluster://127.0.0.1:{}", proxy.port())).expect("a good address");
        on(cluster).acquire(&rule("gcra 20/1d"), "user:1").await.ok()
    };
    // A busy machine may delay one too long.
    let decision = wait_for_value(first_call).await;
    assert!(decision.by.error().is_none() && decision.allowed, "{decision:?}");
}

/// One is chosen by chance for each call.
#[tokio::test]
async fn shards_lie_on_several_nodes_and_admit_no_more_than_the_limit() {
    let servers = ClusterServers::of_primaries();
    let (limiter, rule) = (on_cluster(&servers), rule("gcra 100/1d shards 16"));
    let alone = join_all((0..400).map(|_| limiter.acquire(&rule, "hot"))).await;
    let many = limiter.acquire_many(&rule, vec!["hot"; 800]).await;
    let allowed = alone.into_iter().chain(many).filter(|decision| decision.as_ref().expect("a decision").allowed);
    // So many calls find every shard.
    assert_eq!(allowed.count(), 100);
    let with_keys =
        servers.nodes().iter().filter(|node| cmd("DBSIZE").query::<u64>(&mut node.connection()).expect("a size") > 0);
    assert!(with_keys.count() > 1);
    let call = Request::new("hot").id("a call").cost(3);
    limiter.reset(&rule, "hot").await.expect("forgotten");
    limiter.acquire(&rule, call).await.expect("a decision");
    limiter.cancel(&rule, call).await.expect("found by its id");
    let states = limiter.inspect(&rule, "hot").await.expect("states");
    assert!(states.iter().all(|state| state.decision.remaining == state.decision.capacity), "{states:?}");
}

#[tokio::test]
async fn several_limits_of_a_cluster_are_charged_all_or_none() {
    let servers = ClusterServers::of_primaries();
    let limiter = on_cluster(&servers);
    let both =
        rule("gcra 10/1d").tagged("org").expect("a part").and_by("org", "fixed-window 3/1d".parse().expect("a limit"));
    let both = both.expect("a rule");
    for number in 0..30 {
        let (org, user) = (format!("org {}", number % 6), format!("user {number}"));
        let parts = [("org", org.as_bytes())];
        let request = Request::new(&user).parts(&parts).id("call");
        let decision = limiter.acquire(&both, request).await.expect("a decision");
        assert_eq!(decision.allowed, number < 18, "{number}");
    }
}

/// The documented rights suffice on a cluster, and none can be left out.
#[tokio::test]
async fn the_smallest_user_of_a_cluster_is_as_documented() {
    let servers = ClusterServers::of_primaries();
    let more = more("+cluster\\|slots");
    let more: Vec<_> = more.iter().map(|right| right.replace('\\', "")).collect();
    let url = servers.url().replace("://", "://limiter:sesame@");
    let allow = |rights: &[&str]| {
        for node in servers.nodes() {
            let user = ["ACL", "SETUSER", "limiter", "reset", "on", ">sesame"];
            run_command(node, &[&user[..], &least(), rights].concat());
        }
    };
    let all: Vec<_> = more.iter().map(String::as_str).collect();
    allow(&all);
    let slot = servers.slot_of("user:1");
    let from = servers.primary_of(slot).expect("a node");
    servers.begin_moving(slot, from, (from + 1) % 3);
    let decide = async || {
        let limiter = on(Cluster::open(&url).expect("a good address"));
        limiter.acquire(&rule("gcra 9/1d"), "user:1").await
    };
    assert_eq!(decide().await.expect("a decision").remaining, 8);
    for left_out in &more {
        let rest: Vec<_> = all.iter().copied().filter(|right| right != left_out).collect();
        allow(&rest);
        let error = decide().await.expect_err(left_out);
        assert!(error.kind() == ErrorKind::Permission, "{left_out}: {error}");
    }
}

#[tokio::test]
async fn an_answer_waits_for_replicas_where_it_is_asked_to() {
    let servers = Sentinels::start();
    let limiter = |replicas, within| {
        on(Redis::builder().confirmed_by(replicas, within).open(&servers.url()).expect("a good address"))
    };
    let rule = rule("gcra 5/1d");
    assert_eq!(limiter(2, PATIENCE / 2).acquire(&rule, "key").await.expect("a decision").remaining, 4);
    let lacking = limiter(3, Duration::from_millis(50));
    let error = lacking.acquire(&rule, "key").await.expect_err("there are but two");
    assert!(error.kind() == ErrorKind::Unconfirmed && error.kind().name() == "unconfirmed", "{error}");
    assert_eq!(error.charged(), Charged::Yes);
    assert_eq!(lacking.peek(&rule, "key").await.expect("takes nothing").remaining, 3);
    let answers = join_all((0..50).map(|_| lacking.acquire(&rule, "key"))).await;
    let unconfirmed =
        answers.iter().filter(|answer| answer.as_ref().is_err_and(|error| error.kind() == ErrorKind::Unconfirmed));
    assert_eq!(unconfirmed.count(), 3, "denials need nobody's confirmation");
    let open = rule.clone().on_error(OnError::Open).expect("a rule");
    lacking.reset(&rule, "key").await.expect("forgotten");
    let decision = lacking.acquire(&open, "key").await.expect("by policy");
    assert_eq!((decision.allowed, decision.by.name()), (true, "policy"));
}

/// A node that has met no other doesn't know its own address.
#[tokio::test]
async fn a_cluster_of_one_node_is_a_cluster() {
    let server = Server::with(&["--cluster-enabled", "yes"]);
    run_command(&server, &["CLUSTER", "ADDSLOTSRANGE", "0", "16383"]);
    block_until("the node is well", || command_text(&server, &["CLUSTER", "INFO"]).contains("cluster_state:ok"));
    let url = format!("redis-cluster://127.0.0.1:{}", server.port());
    let limiter = on(Cluster::open(&url).expect("a good address"));
    assert_eq!(limiter.acquire(&rule("gcra 2/1d"), "key").await.expect("a decision").remaining, 1);
}

#[tokio::test]
async fn a_seed_that_is_silent_doesnt_hold_up_the_first_call() {
    let servers = ClusterServers::of_primaries();
    let silent = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = silent.local_addr().expect("its address").port();
    let url = servers.url().replace("://", &format!("://127.0.0.1:{port},"));
    let mut late = Vec::new();
    for _ in 0..20 {
        let limiter = Limiter::new(Cluster::open(&url).expect("a good address"));
        late.extend(limiter.acquire(&rule("gcra 90/1d"), "key").await.err());
    }
    // A busy machine may delay some.
    assert!(late.len() <= 10, "{late:?}");
}

/// What was taken once isn't taken again while the caller waits for its turn.
#[tokio::test]
async fn a_waiting_caller_is_not_charged_again_for_an_answer_that_no_replica_confirmed() {
    let server = Server::start();
    let redis =
        Redis::builder().confirmed_by(1, Duration::from_millis(20)).open(&server.url()).expect("a good address");
    let limiter = Limiter::new(redis);
    let local = OnError::Local { processes: 2.try_into().expect("two") };
    // Of Redis's four units two are left, of this process's two none.
    let rule = rule("sliding-log 4/20s").on_error(local).expect("a rule");
    limiter.acquire(&rule, Request::new("key").cost(2)).await.expect("by policy");
    server.reset_command_counts();
    let waited = limiter.acquire_wait(&rule, Request::new("key").cost(1), PATIENCE).await.expect("by policy");
    let calls: u64 = ["evalsha", "eval"]
        .iter()
        .filter_map(|name| server.commands().get(*name).copied())
        .map(|(calls, failed)| calls - failed)
        .sum();
    assert_eq!((waited.by.name(), waited.allowed, calls), ("local", false, 1), "{waited:?}");
}

/// WAIT lasts for as long as the most patient of a batch has time, and replicas that are there need but a moment.
#[tokio::test]
async fn replicas_that_are_there_confirm_whatever_the_deadlines() {
    let servers = Sentinels::start();
    let redis = Redis::builder().confirmed_by(1, PATIENCE).open(&servers.url()).expect("a good address");
    let limiter = on(redis);
    let rule = rule("gcra 100000/1d");
    limiter.acquire(&rule, "first").await.expect("a decision");
    for _ in 0..20 {
        let calls = (0..100_u64).map(async |number| {
            let (key, hasty) = (format!("user:{number}"), Duration::from_millis(60 + number));
            let request = Request::new(&key);
            let request = if number % 2 == 1 { request.deadline(hasty) } else { request };
            limiter.acquire(&rule, request).await
        });
        for answer in join_all(calls).await {
            // A busy machine may keep the hasty ones waiting.
            assert!(
                answer.as_ref().is_ok() || answer.as_ref().is_err_and(|error| error.kind() != ErrorKind::Unconfirmed),
                "{answer:?}"
            );
        }
    }
}

#[tokio::test]
async fn a_rule_is_forgotten_in_slots_that_are_moving_too() {
    let servers = ClusterServers::of_primaries();
    let (limiter, rule) = (on_cluster(&servers), rule("gcra 9/1d").named("moving").expect("a name"));
    let tag = &servers.keys_of(0, 1)[0];
    let tagged = rule.tagged("org").expect("a part");
    let users: Vec<_> = (0..40).map(|user| format!("user:{user}")).collect();
    let parts = [("org", tag.as_bytes())];
    let requests = users.iter().map(|user| Request::new(user).parts(&parts));
    let taken = limiter.acquire_many(&tagged, requests).await;
    assert!(taken.iter().all(Result::is_ok));
    let slot = servers.slot_of(tag);
    servers.begin_moving(slot, 0, 1);
    let keys = run_command(servers.node(0), &["CLUSTER", "GETKEYSINSLOT", &slot.to_string(), "15"]);
    let keys: Vec<String> = tollgate::redis::from_redis_value(keys).expect("keys");
    keys.iter().for_each(|key| servers.move_key(key, 0, 1));
    assert_eq!(limiter.reset_all("moving", |_| ()).await.expect("forgotten"), 40);
}
