//! Calls of a cluster's node that decide on keys of several of its slots: they answer as calls of one slot each would,
//! whatever becomes of the slots, and of the node.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tollgate::redis::{cmd, from_redis_value};
use tollgate::{Algorithm, BreakerState, Charged, Cluster, Decision, Error, ErrorKind, Limiter, Redis, Request, Rule};
use tollgate_testing::cluster::ClusterServers;
use tollgate_testing::engines::time;
use tollgate_testing::polling::{PATIENCE, block_until};
use tollgate_testing::redis_server::{Server, command_text, run_command};
use tollgate_testing::rules::{assert_of_every_algorithm, rule};

/// A rule of each algorithm that decides on many keys in one call.
const RULES: [&str; 7] = [
    "token-bucket 5/10s",
    "token-bucket 5/10s max-debt 3",
    "fixed-window 5/10s burst 7",
    "fixed-window 5/day",
    "sliding-window 5/10s",
    "sliding-log 5/10s",
    "sliding-log 200/10s",
];

pub(super) fn on_cluster(servers: &ClusterServers) -> (Cluster, Limiter) {
    let cluster = Cluster::open(&servers.url()).expect("a good address");
    (cluster.clone(), Limiter::builder(cluster).deadline(PATIENCE).build())
}

/// All of these at once.
pub(super) async fn many(limiter: &Limiter, rule: &Rule, keys: &[String]) -> Vec<Result<Decision, Error>> {
    limiter.acquire_many(rule, keys.iter().map(String::as_str)).await
}

/// What each has left, where all are allowed.
pub(super) async fn left(limiter: &Limiter, rule: &Rule, keys: &[String]) -> Vec<u64> {
    let answers = many(limiter, rule, keys).await;
    let decisions = answers.into_iter().map(|answer| answer.expect("a decision"));
    decisions.inspect(|decision| assert!(decision.allowed, "{decision:?}")).map(|decision| decision.remaining).collect()
}

/// Script calls that this node ran since it was made to forget; not those that it sent elsewhere.
pub(super) fn ran(node: &Server) -> u64 {
    let counts = node.commands();
    let of = |name: &&str| counts.get(*name).map_or(0, |(calls, failed)| calls - failed);
    ["evalsha", "eval"].iter().map(of).sum()
}

fn names(count: usize) -> Vec<String> {
    (0..count).map(|number| format!("user:{number}")).collect()
}

/// A rule with keys of its own.
fn own(text: &str) -> Rule {
    rule(text).named(&text.replace(|character: char| !character.is_alphanumeric(), "_")).expect("a name")
}

/// Numbers from 0 up to this, the same in each run.
fn numbers(below: u64) -> impl Iterator<Item = u64> {
    let mut state = 7_u64;
    std::iter::repeat_with(move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    })
}

#[tokio::test]
async fn a_cluster_answers_as_one_redis_does() {
    let (servers, server) = (ClusterServers::of_primaries(), Server::start());
    let (_, cluster) = on_cluster(&servers);
    let one = Limiter::builder(Redis::open(&server.url()).expect("a good address")).deadline(PATIENCE).build();
    let keys = names(40);
    cluster.peek(&rule("gcra 1/1d"), "to learn the slots").await.expect("a decision");
    assert_of_every_algorithm(&RULES, &[Algorithm::Concurrency]);
    for text in RULES {
        let rule = own(text);
        // Some hold something else: only their own callers get that error.
        for key in &keys[..4] {
            let name = &one.inspect(&rule, key.as_str()).await.expect("a state")[0].key;
            let owner = servers.primary_of(servers.slot_of(key)).expect("an owner");
            let words: &[&str] = if key.ends_with('1') { &["RPUSH", name, "x"] } else { &["SET", name, "nonsense"] };
            for node in [servers.node(owner), &server] {
                run_command(node, words);
            }
        }
        let (mut costs, mut which, mut now) = (numbers(4), numbers(40), 1 << 50);
        for round in 0..30 {
            now += [0, 700_000, 3_000_000, 11_000_000][round % 4];
            // Some keys several times, at one cost or at several.
            let asked: Vec<_> = (0..60).map(|_| (which.next().unwrap(), costs.next().unwrap())).collect();
            let requests = || {
                let request = |(key, cost): &(u64, u64)| Request::new(&keys[*key as usize]).cost(*cost).at(time(now));
                asked.iter().map(request)
            };
            let (here, there) = (cluster.acquire_many(&rule, requests()), one.acquire_many(&rule, requests()));
            for (asked, (here, there)) in asked.iter().zip(here.await.into_iter().zip(there.await)) {
                assert_eq!(here, there, "{text}, {asked:?} in round {round}");
            }
        }
    }
}

/// In the server's own time, by which the scripts' short way decides.
#[tokio::test]
async fn a_call_of_several_slots_decides_on_each_key_by_itself() {
    let servers = ClusterServers::of_primaries();
    let (_, limiter) = on_cluster(&servers);
    let keys = names(240);
    for text in RULES {
        // So long that nothing refills, and in one window.
        let rule = own(&text.replace("10s", "30d").replace("/day", "/year"));
        let limit = limiter.peek(&rule, "another").await.expect("a decision").capacity;
        assert_eq!(left(&limiter, &rule, &keys).await, vec![limit - 1; 240], "{text}");
        servers.nodes().iter().for_each(Server::reset_command_counts);
        assert_eq!(left(&limiter, &rule, &keys).await, vec![limit - 2; 240], "{text}");
        let calls: Vec<_> = servers.nodes().iter().map(ran).collect();
        assert!(calls.iter().all(|calls| (1..8).contains(calls)), "{text}: {calls:?}");
        // A different cost of each, and some that are denied.
        let costs = |number: usize| 1 + number as u64 % (limit - 1);
        let requests = keys.iter().enumerate().map(|(number, key)| Request::new(key).cost(costs(number)));
        for (number, answer) in limiter.acquire_many(&rule, requests).await.into_iter().enumerate() {
            let (decision, cost) = (answer.expect("a decision"), costs(number));
            let left = if cost <= limit - 2 { limit - 2 - cost } else { limit - 2 };
            assert_eq!((decision.allowed, decision.remaining), (cost <= limit - 2, left), "{text}, {number}");
        }
    }
}

#[tokio::test]
async fn a_node_that_has_lost_the_script_gets_it_with_the_call() {
    let servers = ClusterServers::of_primaries();
    let ((_, limiter), rule, keys) = (on_cluster(&servers), rule("gcra 9/30d"), names(120));
    for remaining in [8, 7, 6] {
        servers.nodes().iter().for_each(|node| _ = run_command(node, &["SCRIPT", "FLUSH"]));
        assert_eq!(left(&limiter, &rule, &keys).await, vec![remaining; 120]);
    }
}

/// The other keys of its call are answered by it, and those of the slot are asked for again, and charged once.
#[tokio::test]
async fn a_slot_that_moves_costs_only_its_own_keys_another_round_trip() {
    let servers = ClusterServers::of_primaries();
    let ((cluster, limiter), rule) = (on_cluster(&servers), rule("gcra 20/30d"));
    let keys = servers.keys_of(0, 60);
    // Two of one slot: one that has a state, and one that hasn't yet.
    let slot = servers.slot_of(&keys[7]);
    let tagged = rule.clone().tagged("org").expect("a part");
    let parts = [("org", keys[7].as_bytes())];
    let in_slot = async |user: &str| {
        let decision = limiter.acquire(&tagged, Request::new(user).parts(&parts)).await;
        decision.expect("a decision").remaining
    };
    assert_eq!(left(&limiter, &rule, &keys).await, vec![19; 60]);
    assert_eq!(in_slot("first").await, 19);
    let calls = || {
        let calls = [ran(servers.node(0)), ran(servers.node(1))];
        servers.nodes().iter().for_each(Server::reset_command_counts);
        calls
    };
    // Before it moves.
    calls();
    assert_eq!(left(&limiter, &rule, &keys).await, vec![18; 60]);
    assert_eq!(calls(), [1, 0]);
    // While its keys are still here, the call decides them too.
    servers.begin_moving(slot, 0, 1);
    assert_eq!(left(&limiter, &rule, &keys).await, vec![17; 60]);
    assert_eq!(calls(), [1, 0]);
    // Once they have gone, they are decided at the other node.
    assert_eq!(servers.move_keys(slot, 0, 1), 2);
    for remaining in [16, 15] {
        assert_eq!(left(&limiter, &rule, &keys).await, vec![remaining; 60]);
        assert_eq!(calls(), [1, 1]);
    }
    assert_eq!(in_slot("second").await, 19);
    // The slot is the other's for good, of which the client learns by a call.
    servers.finish_moving(slot, 0, 1);
    calls();
    assert_eq!(left(&limiter, &rule, &keys).await, vec![14; 60]);
    assert_eq!(calls(), [1, 1]);
    assert_eq!(left(&limiter, &rule, &keys).await, vec![13; 60]);
    assert_eq!((in_slot("first").await, in_slot("second").await), (18, 18));
    assert!(cluster.breakers().iter().all(|(_, breaker)| *breaker == BreakerState::Closed));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slots_that_move_under_load_admit_exactly_the_limit_of_each_key() {
    const UNITS: u64 = 60;
    /// More than all keys admit.
    const CALLS: u64 = 4000;
    const MOVES: usize = 6;
    let servers = ClusterServers::of_primaries();
    let ((_, limiter), rule) = (on_cluster(&servers), rule(&format!("gcra {UNITS}/30d")));
    let keys = servers.keys_of(0, 20);
    let slots: Vec<_> = keys[..5].iter().map(|key| servers.slot_of(key)).collect();
    let (moved, answered) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let tasks: Vec<_> = (0..40)
        .map(|task| {
            let (limiter, rule, keys) = (limiter.clone(), rule.clone(), keys.clone());
            let (moved, answered) = (Arc::clone(&moved), Arc::clone(&answered));
            tokio::spawn(async move {
                let mut admitted = vec![0; keys.len()];
                for round in 0.. {
                    if moved.load(Ordering::Relaxed) && answered.load(Ordering::Relaxed) >= CALLS {
                        break;
                    }
                    let at = (task + round) % keys.len();
                    match limiter.acquire(&rule, keys[at].as_str()).await {
                        Ok(decision) => admitted[at] += u64::from(decision.allowed),
                        // On a busy machine a node may be silent for so long that it isn't asked for a while.
                        Err(error) if error.is_unreachable() && error.charged() == Charged::No => {
                            tokio::time::sleep(Duration::from_millis(5)).await;
                            continue;
                        }
                        Err(error) => panic!("{error}"),
                    }
                    answered.fetch_add(1, Ordering::Relaxed);
                }
                admitted
            })
        })
        .collect();
    let met = || {
        let enough = answered.load(Ordering::Relaxed) + 60;
        block_until("more calls", || answered.load(Ordering::Relaxed) >= enough);
    };
    let (mut at, mut last) = ([0; 5], 0);
    tokio::task::block_in_place(|| {
        for moves in 0..MOVES {
            let (slot, from) = (slots[moves % 5], at[moves % 5]);
            // A node takes a new epoch for the slot, which older claims lose to, unless it took the last one.
            let to = (0..3).find(|node| ![from, last].contains(node)).expect("one of three");
            servers.begin_moving(slot, from, to);
            met();
            servers.move_keys(slot, from, to);
            met();
            servers.finish_moving(slot, from, to);
            servers.wait_until_known(to);
            (at[moves % 5], last) = (to, to);
            met();
        }
        moved.store(true, Ordering::Relaxed);
    });
    let mut admitted = vec![0; keys.len()];
    for task in tasks {
        let of_task = task.await.expect("no error");
        admitted.iter_mut().zip(of_task).for_each(|(all, one)| *all += one);
    }
    assert_eq!(admitted, vec![UNITS; keys.len()]);
}

/// As one that is out of memory refuses them, before they run.
#[tokio::test]
async fn a_node_that_refuses_such_calls_is_asked_slot_by_slot() {
    let servers = ClusterServers::of_primaries();
    let ((_, limiter), rule) = (on_cluster(&servers), rule("gcra 3/30d"));
    let keys = servers.keys_of(0, 30);
    for remaining in [2, 1, 0] {
        assert_eq!(left(&limiter, &rule, &keys).await, vec![remaining; 30]);
    }
    let (denied, fresh) = (&keys, servers.keys_of(0, 60).split_off(30));
    run_command(servers.node(0), &["CONFIG", "SET", "maxmemory", "1"]);
    let both = [denied.as_slice(), &fresh].concat();
    for (at, answer) in many(&limiter, &rule, &both).await.into_iter().enumerate() {
        match answer {
            Ok(decision) => assert!(at < 30 && !decision.allowed, "{at}: {decision:?}"),
            Err(error) => {
                assert!(
                    at >= 30 && error.kind() == ErrorKind::Refused && error.to_string().contains("OOM"),
                    "{at}: {error}"
                );
                assert_eq!(error.charged(), Charged::No);
            }
        }
    }
    run_command(servers.node(0), &["CONFIG", "SET", "maxmemory", "0"]);
    servers.node(0).reset_command_counts();
    assert_eq!(left(&limiter, &rule, &fresh).await, vec![2; 30]);
    assert_eq!(ran(servers.node(0)), 30, "a call for each key, and no other");
    assert_eq!(left(&limiter, &rule, &servers.keys_of(1, 30)).await, vec![2; 30]);
    assert!(ran(servers.node(1)) <= 3, "another node");
}

#[tokio::test]
async fn a_cluster_that_is_down_refuses_every_key_as_it_does_alone() {
    let servers = ClusterServers::of_primaries();
    let ((_, limiter), rule) = (on_cluster(&servers), rule("gcra 9/30d"));
    let keys = servers.keys_of(0, 20);
    assert_eq!(left(&limiter, &rule, &keys).await, vec![8; 20]);
    let node = servers.node(0);
    let (lost, state) = (servers.slot_of("nobody").to_string(), || command_text(node, &["CLUSTER", "INFO"]));
    let owner = servers.node(servers.primary_of(servers.slot_of("nobody")).expect("an owner"));
    run_command(node, &["CONFIG", "SET", "cluster-require-full-coverage", "yes"]);
    servers.nodes().iter().for_each(|node| _ = run_command(node, &["CLUSTER", "DELSLOTS", &lost]));
    block_until("the node finds the cluster down", || state().contains("cluster_state:fail"));
    let hasty = limiter.to_builder().deadline(Duration::from_secs(2)).build();
    for answer in many(&hasty, &rule, &keys).await {
        let error = answer.expect_err("down");
        assert!(
            ["not-now", "unreachable"].contains(&error.kind().name()) || error.kind() == ErrorKind::Deadline,
            "{error}"
        );
        assert_eq!(error.charged(), Charged::No, "{error}");
    }
    run_command(owner, &["CLUSTER", "ADDSLOTS", &lost]);
    run_command(node, &["CONFIG", "SET", "cluster-require-full-coverage", "no"]);
    block_until("the node finds the cluster well", || state().contains("cluster_state:ok"));
    let again = async || many(&limiter, &rule, &keys[..1]).await[0].is_ok();
    tollgate_testing::polling::wait_until("it decides again", again).await;
    assert_eq!(left(&limiter, &rule, &keys[1..]).await, vec![7; 19]);
}

/// The former primary refuses such a call, which names no key that it could redirect.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_primary_that_becomes_a_replica_charges_nobody() {
    let servers = ClusterServers::start();
    let ((_, limiter), rule) = (on_cluster(&servers), rule("gcra 9/30d"));
    let keys = servers.keys_of(0, 40);
    assert_eq!(left(&limiter, &rule, &keys).await, vec![8; 40]);
    tokio::task::block_in_place(|| {
        // It has all that was taken, and the primary lets it.
        servers.hand_over(0);
        let info = || command_text(servers.node(0), &["INFO", "replication"]);
        block_until("the primary is one no more", || info().contains("role:slave"));
    });
    for remaining in [7, 6] {
        assert_eq!(left(&limiter, &rule, &keys).await, vec![remaining; 40]);
    }
}

/// Callers of one slot need no such call.
#[tokio::test]
async fn keys_of_one_slot_are_declared() {
    let server = Server::with(&["--cluster-enabled", "yes", "--slowlog-log-slower-than", "0"]);
    run_command(&server, &["CLUSTER", "ADDSLOTSRANGE", "0", "16383"]);
    block_until("the node is well", || command_text(&server, &["CLUSTER", "INFO"]).contains("cluster_state:ok"));
    let cluster = Cluster::open(&format!("redis-cluster://127.0.0.1:{}", server.port())).expect("a good address");
    let (limiter, rule) =
        (Limiter::builder(cluster).deadline(PATIENCE).build(), rule("gcra 9/1d").tagged("org").expect("a part"));
    let users = names(20);
    let declared = async |orgs: [&'static str; 2]| {
        run_command(&server, &["SLOWLOG", "RESET"]);
        let parts = orgs.map(|org| [("org", org.as_bytes())]);
        let requests = users.iter().enumerate().map(|(at, user)| Request::new(user).parts(&parts[at % 2]));
        for answer in join_all(requests.map(|request| limiter.acquire(&rule, request))).await {
            answer.expect("a decision");
        }
        let log: Vec<Vec<tollgate::redis::Value>> =
            cmd("SLOWLOG").arg("GET").arg(64).query(&mut server.connection()).expect("a log");
        // A shape isn't text.
        let words = log.into_iter().map(|mut entry| from_redis_value::<Vec<Vec<u8>>>(entry.remove(3)).expect("words"));
        let calls = words.filter(|words| words[0].starts_with(b"EVAL"));
        calls.map(|words| String::from_utf8_lossy(&words[2]).into_owned()).collect::<HashSet<_>>()
    };
    // The first goes alone.
    let some = |counts: [&str; 2]| counts.map(str::to_owned).into_iter().collect::<HashSet<_>>();
    assert_eq!(declared(["one", "one"]).await, some(["1", "19"]));
    let of_two = declared(["one", "other"]).await;
    assert!(of_two.contains("0") && of_two.is_subset(&some(["1", "0"])), "{of_two:?}");
}

/// While the node is stopped, only the requests that may wait until it goes on get its answer, and those behind them,
/// whose answers are there by then.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_of_many_requests_ends_by_its_own_deadline() {
    let servers = ClusterServers::of_primaries();
    let ((_, limiter), rule) = (on_cluster(&servers), rule("gcra 9/30d"));
    let keys = servers.keys_of(0, 20);
    assert_eq!(left(&limiter, &rule, &keys).await, vec![8; 20]);
    let short = Duration::from_millis(100);
    let is_short = |at: usize| at < 10 || at % 2 == 1;
    servers.node(0).signal("-STOP");
    let began = Instant::now();
    // Those with an id go in another call of a script.
    let ids: Vec<_> = (0..20).map(|number| format!("call {number}")).collect();
    let requests = keys.iter().enumerate().map(|(at, key)| {
        let request = Request::new(key).deadline(if is_short(at) { short } else { PATIENCE });
        if at % 4 < 2 { request.id(&ids[at]) } else { request }
    });
    let asked = limiter.acquire_many(&rule, requests);
    let goes_on = async {
        tokio::time::sleep_until((began + 3 * short).into()).await;
        servers.node(0).signal("-CONT");
    };
    let (answers, ()) = futures_util::future::join(asked, goes_on).await;
    for (at, answer) in answers.into_iter().enumerate() {
        match answer {
            Ok(decision) => assert!(at >= 10 && decision.allowed, "{at}: {decision:?}"),
            Err(error) => assert!(is_short(at) && error.kind() == ErrorKind::Deadline, "{at}: {error}"),
        }
    }
}
