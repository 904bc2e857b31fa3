//! Calls whose limits' keys are in several slots of a cluster, on several nodes: all are charged or none is, whatever
//! becomes of the nodes and of those who call.

mod careless_callers;

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use tollgate::{
    Charged, Cluster, Decision, Embedded, Error, ErrorKind, Limit, Limiter, OnError, Operation, Request, Rule,
};
use tollgate_testing::cluster::ClusterServers;
use tollgate_testing::effort::cases;
use tollgate_testing::engines::time;
use tollgate_testing::polling::{PATIENCE, in_time, is_pending, wait_until};
use tollgate_testing::proxy::Proxy;
use tollgate_testing::rules::rule;

use super::across_slots::{on_cluster, ran};

/// What befalls a node, by its name.
type Trouble = (&'static str, fn(&Proxy));

/// A rule for users and their organisation.
fn both(user: &str, org: &str) -> Rule {
    let rule = of_users(user).and_by("org", limit_of_orgs(org)).expect("a rule");
    rule.on_error(OnError::Closed).expect("closed")
}

/// The same of one of these alone, by the same key in Redis.
fn of_users(limit: &str) -> Rule {
    rule(limit).named("api").expect("a name")
}

fn of_orgs(limit: &str) -> Rule {
    Rule::new("api", limit_of_orgs(limit)).expect("a rule")
}

fn limit_of_orgs(limit: &str) -> Limit {
    limit.parse::<Limit>().expect("a limit").named("orgs").expect("a name")
}

async fn left(limiter: &Limiter, rule: &Rule, key: &str) -> u64 {
    in_time(limiter.peek(rule, key)).await.expect("an answer").remaining
}

/// A user and an organisation whose keys are on these nodes.
fn on_nodes(servers: &ClusterServers, user: usize, org: usize) -> (String, String) {
    (servers.keys_of(user, 1).remove(0), servers.keys_of(org, 2).remove(1))
}

/// Limits of which either user or organisation has fewer units: those who are allowed are charged once, and nobody
/// else.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn callers_at_once_take_of_every_key_or_of_none() {
    let servers = ClusterServers::of_primaries();
    let (_, limiter) = on_cluster(&servers);
    let (users, org) = (servers.keys_of(0, 4), servers.keys_of(1, 1).remove(0));
    for (round, (of_user, of_org)) in [
        ("gcra 40/30d", "gcra 25/30d"),
        ("sliding-log 3/30d", "fixed-window 100/30d"),
        ("fixed-window 5/30d", "sliding-window 12/30d"),
    ]
    .into_iter()
    .enumerate()
    {
        let name = format!("api-{round}");
        let named = |rule: Rule| rule.named(&name).expect("a name");
        let rule = named(both(of_user, of_org));
        let parts = [("org", org.as_bytes())];
        let calls = (0..60).map(|call| limiter.acquire(&rule, Request::new(&users[call % 4]).parts(&parts)));
        let decisions: Vec<_> =
            in_time(join_all(calls)).await.into_iter().map(|call| call.expect("a decision")).collect();
        limiter.finish().await;
        let (of_users, of_orgs) = (named(of_users(of_user)), named(of_orgs(of_org)));
        let capacity = |rule: &Rule| rule.limits().map(Limit::capacity).min().expect("a limit");
        let mut all = 0;
        for (at, user) in users.iter().enumerate() {
            let allowed = decisions.iter().skip(at).step_by(4).filter(|decision| decision.allowed).count() as u64;
            let expected = capacity(&of_users) - allowed;
            assert_eq!(left(&limiter, &of_users, user).await, expected, "{of_user}, {of_org}: {user}");
            all += allowed;
        }
        assert_eq!(left(&limiter, &of_orgs, &org).await, capacity(&of_orgs) - all, "{of_user}, {of_org}");
        // Users have more than enough, so none of the organisation's units is ever given back.
        assert!(round != 0 || all == capacity(&of_orgs), "{all}");
        let denied = decisions.iter().find(|decision| !decision.allowed).expect("a denial");
        assert!(denied.denied_by.is_some() && denied.limits.len() == 2 && denied.granted == 0, "{denied:?}");
    }
}

/// One after the other, at times of the test's own: as one server that has all keys.
#[tokio::test]
async fn a_call_of_several_slots_is_decided_as_one_of_a_single_slot() {
    const OPERATIONS: [Operation; 7] = [
        Operation::Acquire,
        Operation::Acquire,
        Operation::Acquire,
        Operation::Peek,
        Operation::AtMost,
        Operation::Penalty,
        Operation::Refund,
    ];
    let servers = ClusterServers::of_primaries();
    let (_, limiter) = on_cluster(&servers);
    let mut random = fastrand::Rng::with_seed(49);
    for (round, limits) in [
        ("token-bucket 7/10s burst 9", "fixed-window 12/20s"),
        ("sliding-window 6/10s", "sliding-log 8/15s"),
        ("fixed-window 9/day", "gcra 5/1s burst 12"),
        ("sliding-log 5/5s", "token-bucket 20/1m burst 30"),
    ]
    .into_iter()
    .enumerate()
    {
        let model = Limiter::new(Embedded::new());
        let rule = both(limits.0, limits.1).named(&format!("api-{round}")).expect("a name");
        let mut now = 1_u64 << 50;
        for step in 0..cases(60) {
            now += [0, 1, 900_000, 4_000_000][random.usize(0..4)];
            let org = ["acme", "other"][random.usize(0..2)];
            let parts = [("org", org.as_bytes())];
            let user = ["anna", "bert", "cleo"][random.usize(0..3)];
            let request = Request::new(user).parts(&parts).cost(random.u64(0..6)).at(time(now));
            let operation = OPERATIONS[random.usize(0..OPERATIONS.len())];
            let got = in_time(limiter.call(operation, &rule, request)).await.expect("a decision");
            let expected = model.call(operation, &rule, request).await.expect("a decision");
            let shown = |decision: &Decision| {
                let limits = decision.limits.iter();
                let limits: Vec<_> = limits
                    .map(|limit| (limit.allowed, limit.remaining, limit.retry_after, limit.reset_after, limit.granted))
                    .collect();
                (decision.allowed, decision.granted, decision.denied_by.clone(), decision.retry_at(), limits)
            };
            assert_eq!(shown(&got), shown(&expected), "{limits:?}, step {step}: {operation} {request:?}");
        }
    }
}

/// Behind a proxy: nothing comes, answers are late or get lost, or the connection breaks. Once all is well, nothing is
/// charged that was not allowed: but by the node that didn't answer, if the call has no id.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_others_took_is_given_back_where_a_node_does_not_answer() {
    const USER: &str = "gcra 40/30d";
    const ORG: &str = "gcra 50/30d";
    let servers = ClusterServers::of_primaries();
    let proxy = Proxy::to(servers.node(0).port()).await;
    servers.announce(0, proxy.port());
    let limiter = Limiter::new(Cluster::open(&servers.url()).expect("an address"));
    let rule = both(USER, ORG);
    let troubles: [Trouble; 4] = [
        ("nothing comes", |proxy| proxy.swallow(true)),
        ("answers are late", |proxy| proxy.delay(Duration::from_secs(3))),
        ("no answer comes", |proxy| proxy.answer(0)),
        ("the connection breaks", |proxy| proxy.cut_after(0)),
    ];
    for (trouble, begin) in troubles {
        let places = [(0, 1), (1, 0)].into_iter();
        let each = places.flat_map(|place| [Operation::AtMost, Operation::Acquire].map(|operation| (operation, place)));
        for (operation, (of_user, of_org)) in each {
            let (user, org) = on_nodes(&servers, of_user, of_org);
            let parts = [("org", org.as_bytes())];
            let request = Request::new(&user).parts(&parts);
            // Both nodes are connected to.
            wait_until("an answer", async || limiter.peek(&rule, request.deadline(PATIENCE)).await.is_ok()).await;
            begin(&proxy);
            let request_in_time = request.deadline(Duration::from_millis(300));
            let asked = in_time(limiter.call(operation, &rule, request_in_time)).await;
            let error = asked.expect_err(trouble);
            assert!(error.charged() != Charged::Yes, "{trouble}: {error}");
            // What is given back is tried meanwhile.
            tokio::time::sleep(Duration::from_millis(400)).await;
            proxy.swallow(false);
            proxy.delay(Duration::ZERO);
            proxy.answer(u64::MAX);
            proxy.cut_after(u64::MAX);
            let may_stay = |node| u64::from(node == 0 && operation == Operation::Acquire);
            let (of_user, of_org) = (40 - may_stay(of_user)..=40, 50 - may_stay(of_org)..=50);
            let whole = async || {
                let left =
                    async |rule: Rule, key: &str| limiter.peek(&rule, Request::new(key).deadline(PATIENCE)).await;
                let left = (left(of_users(USER), &user).await, left(of_orgs(ORG), &org).await);
                let is_whole = |user: u64, org: u64| of_user.contains(&user) && of_org.contains(&org);
                matches!(left, (Ok(user), Ok(org)) if is_whole(user.remaining, org.remaining))
            };
            wait_until(trouble, whole).await;
            limiter.finish().await;
            // The next begins anew.
            wait_until("a reset", async || limiter.reset(&rule, request.deadline(PATIENCE)).await.is_ok()).await;
        }
    }
}

/// The answer that says no comes in time, and what was taken before is given back when its node is there again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_denial_does_not_wait_for_a_node_that_goes_before_it_is_asked_to_give_back() {
    const USER: &str = "gcra 40/30d";
    const ORG: &str = "gcra 1/30d";
    let servers = ClusterServers::of_primaries();
    let proxy = Proxy::to(servers.node(0).port()).await;
    servers.announce(0, proxy.port());
    let limiter = Limiter::builder(Cluster::open(&servers.url()).expect("an address")).deadline(PATIENCE).build();
    let rule = both(USER, ORG);
    let (user, org) = on_nodes(&servers, 0, 1);
    let parts = [("org", org.as_bytes())];
    let request = Request::new(&user).parts(&parts);
    assert!(in_time(limiter.acquire(&rule, request)).await.expect("a decision").allowed);
    // The next reply is that of the call that takes.
    proxy.answer(proxy.requested() + 1);
    let began = std::time::Instant::now();
    let denied = in_time(limiter.acquire(&rule, request)).await.expect("a decision");
    assert!(!denied.allowed && denied.limits[0].allowed && !denied.limits[1].allowed, "{denied:?}");
    assert_eq!((denied.limits[0].remaining, denied.limits[0].granted), (39, 0));
    assert!(began.elapsed() < PATIENCE / 2, "{:?}", began.elapsed());
    proxy.answer(u64::MAX);
    wait_until("all is given back", async || {
        limiter.peek(&of_users(USER), user.as_str()).await.is_ok_and(|state| state.remaining == 39)
    })
    .await;
    limiter.finish().await;
}

#[tokio::test]
async fn a_node_that_is_killed_or_stands_still_charges_nobody_elsewhere() {
    const USER: &str = "gcra 40/30d";
    const ORG: &str = "gcra 50/30d";
    let mut servers = ClusterServers::of_primaries();
    let (_, limiter) = on_cluster(&servers);
    let rule = both(USER, ORG);
    let (user, org) = on_nodes(&servers, 0, 1);
    let parts = [("org", org.as_bytes())];
    let request = Request::new(&user).parts(&parts);
    assert!(in_time(limiter.acquire(&rule, request)).await.expect("a decision").allowed);

    for (operation, unknown) in [(Operation::AtMost, 0), (Operation::Acquire, 1)] {
        servers.node(1).signal("-STOP");
        let request = request.deadline(Duration::from_millis(300));
        let error = in_time(limiter.call(operation, &rule, request)).await.expect_err("no answer");
        assert_eq!(error.charged(), Charged::Unknown, "{error}");
        wait_until("the user's is given back", async || left(&limiter, &of_users(USER), &user).await == 39).await;
        servers.node(1).signal("-CONT");
        // What it took meanwhile is given back as well, by the call's id if it has one.
        wait_until("the organisation's is given back", async || {
            limiter
                .peek(&of_orgs(ORG), org.as_str())
                .await
                .is_ok_and(|state| (49 - unknown..=49).contains(&state.remaining))
        })
        .await;
        limiter.finish().await;
    }

    servers.kill(1);
    for _ in 0..5 {
        let error = in_time(limiter.acquire(&rule, request)).await.expect_err("nobody is there");
        assert!(error.charged() != Charged::Yes, "{error}");
    }
    wait_until("the user's is given back", async || left(&limiter, &of_users(USER), &user).await == 39).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn futures_dropped_anywhere_leave_nothing_charged_but_what_was_allowed() {
    const USER: &str = "gcra 1000/30d";
    const ORG: &str = "gcra 1500/30d";
    let servers = ClusterServers::of_primaries();
    let (_, limiter) = on_cluster(&servers);
    let rule = both(USER, ORG);
    let (user, org) = on_nodes(&servers, 0, 1);
    let parts = [("org", org.as_bytes())];
    let request = Request::new(&user).parts(&parts);
    let mut allowed = u64::from(in_time(limiter.acquire(&rule, request)).await.expect("a decision").allowed);
    for polls in 0..cases(120) {
        let mut call = pin!(limiter.acquire(&rule, request));
        for _ in 0..polls % 12 {
            if !is_pending(call.as_mut()).await {
                allowed += 1;
                break;
            }
            tokio::time::sleep(Duration::from_micros(u64::from(polls) * 5)).await;
        }
    }
    limiter.finish().await;
    assert_eq!(left(&limiter, &of_users(USER), &user).await, 1000 - allowed);
    assert_eq!(left(&limiter, &of_orgs(ORG), &org).await, 1500 - allowed);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slots_that_move_under_load_admit_exactly_the_limit() {
    const USER: &str = "gcra 1000000/30d";
    const UNITS: u64 = 400;
    const ORG: &str = "gcra 400/30d";
    let servers = ClusterServers::of_primaries();
    let (_, limiter) = on_cluster(&servers);
    let rule = both(USER, ORG);
    let (users, org) = (servers.keys_of(0, 12), servers.keys_of(1, 1).remove(0));
    let moved = Arc::new(AtomicBool::new(false));
    let tasks = users.iter().map(|user| {
        let (limiter, rule, user, org, moved) =
            (limiter.clone(), rule.clone(), user.clone(), org.clone(), Arc::clone(&moved));
        tokio::spawn(async move {
            let (parts, mut allowed, mut denied) = ([("org", org.as_bytes())], 0, 0);
            while !moved.load(Ordering::Relaxed) || denied < 3 {
                match limiter.acquire(&rule, Request::new(&user).parts(&parts)).await {
                    Ok(decision) if decision.allowed => allowed += 1,
                    Ok(_) => denied += 1,
                    Err(error) if error.charged() == Charged::No => tokio::time::sleep(Duration::from_millis(5)).await,
                    Err(error) => panic!("{error}"),
                }
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
            allowed
        })
    });
    let tasks: Vec<_> = tasks.collect();
    tokio::task::block_in_place(|| {
        for (slot, path) in [(servers.slot_of(&org), [1, 2, 0, 1]), (servers.slot_of(&users[0]), [0, 1, 2, 0])] {
            for way in path.windows(2) {
                servers.begin_moving(slot, way[0], way[1]);
                servers.move_keys(slot, way[0], way[1]);
                servers.finish_moving(slot, way[0], way[1]);
                servers.wait_until_known(way[1]);
            }
        }
        moved.store(true, Ordering::Relaxed);
    });
    let mut allowed = 0;
    for task in tasks {
        allowed += task.await.expect("no panic");
    }
    limiter.finish().await;
    assert_eq!(allowed, UNITS);
    assert_eq!(left(&limiter, &of_orgs(ORG), &org).await, 0);
}

#[tokio::test]
async fn permits_are_held_on_their_node_and_given_back_with_the_rest() {
    const PERMITS: &str = "concurrency 2 ttl 1h";
    const ORG: &str = "gcra 3/30d";
    let servers = ClusterServers::of_primaries();
    let (_, limiter) = on_cluster(&servers);
    let rule = both(PERMITS, ORG);
    let (user, org) = on_nodes(&servers, 0, 1);
    let parts = [("org", org.as_bytes())];
    let request = Request::new(&user).parts(&parts);
    let hold = async || in_time(limiter.hold(&rule, request)).await.expect("a decision");
    let permits = async || left(&limiter, &of_users(PERMITS), &user).await;
    let (first, second) = (hold().await, hold().await);
    assert!(first.permit.is_some() && second.permit.is_some());
    let denied = hold().await;
    assert!(denied.permit.is_none() && denied.decision.limits[1].allowed, "{:?}", denied.decision);
    limiter.finish().await;
    assert_eq!((permits().await, left(&limiter, &of_orgs(ORG), &org).await), (0, 1));
    drop(first);
    limiter.finish().await;
    assert_eq!(permits().await, 1);
    in_time(second.permit.expect("a permit").release()).await.expect("an answer");
    assert_eq!((permits().await, left(&limiter, &of_orgs(ORG), &org).await), (2, 1));
    assert!(hold().await.permit.is_some());
    // The organisation denies now, and the permit is free again.
    assert!(hold().await.permit.is_none());
    limiter.finish().await;
    assert_eq!((permits().await, left(&limiter, &of_orgs(ORG), &org).await), (2, 0));
}

/// One of two permits is gone, as after a failover: nobody may go on as if both were held.
#[tokio::test]
async fn a_renewal_is_refused_where_one_node_has_forgotten_the_permit() {
    const PERMITS: &str = "concurrency 2 ttl 1h";
    let servers = ClusterServers::of_primaries();
    let (_, limiter) = on_cluster(&servers);
    let rule = both(PERMITS, PERMITS);
    let (user, org) = on_nodes(&servers, 0, 1);
    let parts = [("org", org.as_bytes())];
    let request = Request::new(&user).parts(&parts);
    let held = in_time(limiter.hold(&rule, request)).await.expect("a decision").permit.expect("a permit");
    in_time(held.renew()).await.expect("both are there");
    tollgate_testing::redis_server::run_command(servers.node(1), &["FLUSHALL"]);
    assert!(in_time(held.renew()).await.expect_err("one is gone").is_unknown_id());
    in_time(held.release()).await.expect("an answer");
    assert_eq!(left(&limiter, &of_users(PERMITS), &user).await, 2);
}

/// It would take a round trip of others' units for nothing.
#[tokio::test]
async fn a_cost_that_one_limit_never_admits_takes_nothing_on_the_way() {
    let servers = ClusterServers::of_primaries();
    let (_, limiter) = on_cluster(&servers);
    let (user, org) = on_nodes(&servers, 0, 1);
    let parts = [("org", org.as_bytes())];
    let rule = both("gcra 40/30d", "gcra 5/30d");
    let decision = in_time(limiter.acquire(&rule, Request::new(&user).parts(&parts).cost(6))).await;
    let decision = decision.expect("a decision");
    assert_eq!((decision.allowed, decision.retry_after), (false, tollgate::RetryAfter::Never));
    assert_eq!(decision.limits.iter().map(|limit| limit.remaining).collect::<Vec<_>>(), [40, 5]);
    let keys: i64 = servers
        .nodes()
        .iter()
        .map(|node| {
            let count: i64 = tollgate::redis::cmd("DBSIZE").query(&mut node.connection()).expect("a number");
            count
        })
        .sum();
    assert_eq!(keys, 0);
}

#[tokio::test]
async fn a_reservation_waits_for_the_later_of_its_turns_and_leaves_nothing_if_it_is_given_up() {
    const USER: &str = "gcra 20/1s burst 1 max-debt 100";
    const ORG: &str = "gcra 1/1h burst 1 max-debt 100";
    let servers = ClusterServers::of_primaries();
    let (_, limiter) = on_cluster(&servers);
    let (user, org) = on_nodes(&servers, 0, 1);
    let parts = [("org", org.as_bytes())];
    let request = Request::new(&user).parts(&parts);
    let other = servers.keys_of(1, 3).remove(2);
    let others = [("org", other.as_bytes())];
    let soon = both(USER, USER);
    for _ in 0..4 {
        let decision =
            in_time(limiter.acquire_wait(&soon, request.parts(&others), PATIENCE)).await.expect("a decision");
        assert!(decision.allowed, "{decision:?}");
    }
    let never = both(USER, ORG);
    assert!(in_time(limiter.acquire_wait(&never, request, PATIENCE)).await.expect("a decision").allowed);
    let asked = limiter.acquire_wait(&never, request, Duration::from_secs(7200));
    assert!(tokio::time::timeout(Duration::from_millis(300), asked).await.is_err(), "an hour is not over");
    let denied = in_time(limiter.acquire_wait(&never, request, Duration::from_secs(60))).await.expect("a decision");
    assert!(!denied.allowed && denied.limits[0].allowed && !denied.limits[1].allowed, "{denied:?}");
    limiter.finish().await;
    let owed = in_time(limiter.reserve(&of_orgs(ORG), Request::new(&org))).await.expect("a decision");
    let wait = owed.retry_after.duration().expect("a wait");
    assert!(owed.allowed && wait <= Duration::from_secs(3600), "it is the first in the queue: {wait:?}");
}

#[tokio::test]
async fn many_requests_at_once_are_decided_as_each_by_itself() {
    let servers = ClusterServers::of_primaries();
    let (_, limiter) = on_cluster(&servers);
    let rule = both("gcra 2/30d", "gcra 7/30d");
    let (users, org) = (servers.keys_of(0, 5), servers.keys_of(1, 1).remove(0));
    let parts = [("org", org.as_bytes())];
    let requests = users.iter().chain(&users).map(|user| Request::new(user).parts(&parts));
    let decisions = in_time(limiter.acquire_many(&rule, requests)).await;
    let allowed = decisions.iter().filter(|decision| decision.as_ref().expect("a decision").allowed).count();
    assert_eq!(allowed, 7);
    limiter.finish().await;
    assert_eq!(left(&limiter, &of_orgs("gcra 7/30d"), &org).await, 0);
}

/// Somebody may send it again while it is given back, and take for nothing what the first call has.
#[tokio::test]
async fn an_id_of_the_callers_own_needs_a_tag() {
    let servers = ClusterServers::of_primaries();
    let (_, limiter) = on_cluster(&servers);
    let (user, org) = on_nodes(&servers, 0, 1);
    let parts = [("org", org.as_bytes())];
    let request = Request::new(&user).parts(&parts).id("job-7");
    servers.nodes().iter().for_each(tollgate_testing::redis_server::Server::reset_command_counts);
    let untagged = both("gcra 5/30d", "gcra 5/30d");
    for operation in [Operation::Acquire, Operation::AtMost] {
        let error: Error = in_time(limiter.call(operation, &untagged, request)).await.expect_err("several nodes");
        assert!(
            error.is_input() && error.to_string().starts_with("rule api: on a cluster, a call with an id needs a tag"),
            "{error}"
        );
        assert_eq!(error.charged(), Charged::No);
    }
    let error = in_time(limiter.cancel(&untagged, request)).await.expect_err("nothing is known of it");
    assert!(error.is_unknown_id(), "{error}");
    assert_eq!(servers.nodes().iter().map(ran).sum::<u64>(), 0);
    // One key, wherever the request's own key is.
    let one = serde_json::json!({"name": "one", "limits": [{"limit": "gcra 5/30d", "key": "org"}]});
    let one: Rule = serde_json::from_value(one).expect("a rule");
    for _ in 0..2 {
        assert_eq!(in_time(limiter.acquire(&one, request)).await.expect("a decision").remaining, 4);
    }
    assert_eq!(in_time(limiter.cancel(&one, request)).await.expect("an answer").remaining, 5);
    let tagged = rule("gcra 5/30d").named("tagged").expect("a name").tagged("org").expect("a part");
    let tagged = tagged.and_by("org", "gcra 9/30d".parse().expect("a limit")).expect("a rule");
    for _ in 0..2 {
        assert_eq!(in_time(limiter.acquire(&tagged, request)).await.expect("a decision").remaining, 4);
    }
}

/// A node that doesn't have the script yet is sent the call again, and a cancellation that came first would find
/// nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_that_are_dropped_before_a_node_has_their_script_leave_nothing_charged() {
    const BUCKET: &str = "gcra 100/30d";
    let servers = ClusterServers::of_primaries();
    let limiter = Limiter::builder(Cluster::open(&servers.url()).expect("an address")).deadline(PATIENCE).build();
    let units = both(BUCKET, BUCKET);
    let permits = both("concurrency 100 ttl 1h", "concurrency 100 ttl 1h");
    let users = servers.keys_of(0, 600);
    let orgs = servers.keys_of(1, 600);
    let mut random = fastrand::Rng::with_seed(57);
    let mut begun = Vec::new();
    for (round, pairs) in users.chunks(12).zip(orgs.chunks(12)).enumerate() {
        for node in servers.nodes() {
            tollgate_testing::redis_server::run_command(node, &["SCRIPT", "FLUSH"]);
        }
        let calls = pairs.0.iter().zip(pairs.1).enumerate().map(|(at, (user, org))| {
            let within = Duration::from_micros(random.u64(0..12_000));
            let (limiter, rule) = (&limiter, if (round + at) % 3 == 2 { &permits } else { &units });
            let operation = [Operation::Reserve, Operation::AtMost, Operation::Acquire][(round + at) % 3];
            async move {
                let parts = [("org", org.as_bytes())];
                let request = Request::new(user).parts(&parts).cost(3);
                let decided = async {
                    match operation {
                        // Its permits are given back as they are dropped.
                        Operation::Acquire => limiter.hold(rule, request).await.is_ok_and(|_| false),
                        _ => limiter.call(operation, rule, request).await.is_ok_and(|decision| decision.allowed),
                    }
                };
                tokio::time::timeout(within, decided).await.unwrap_or(false)
            }
        });
        let allowed = join_all(calls).await;
        let of = |at: usize| if (round + at) % 3 == 2 { &permits } else { &units };
        let pairs = pairs.0.iter().zip(pairs.1).zip(allowed).enumerate();
        begun.extend(pairs.map(|(at, ((user, org), allowed))| (user, org, of(at), if allowed { 97 } else { 100 })));
    }
    limiter.finish().await;
    for (user, org, rule, left) in begun {
        let parts = [("org", org.as_bytes())];
        let decision = in_time(limiter.peek(rule, Request::new(user).parts(&parts))).await.expect("a decision");
        let remaining: Vec<_> = decision.limits.iter().map(|limit| limit.remaining).collect();
        assert_eq!(remaining, [left; 2], "{user} {org} {rule}");
    }
}

/// As one Redis answers: of reservations, debt decides.
#[tokio::test]
async fn a_reservation_that_one_limit_never_admits_is_denied_by_that_one() {
    let servers = ClusterServers::of_primaries();
    let (_, limiter) = on_cluster(&servers);
    let (user, org) = on_nodes(&servers, 0, 1);
    let parts = [("org", org.as_bytes())];
    let request = Request::new(&user).parts(&parts).cost(15);
    let rule = both("token-bucket 10/30d max-debt unlimited", "token-bucket 10/30d max-debt 2");
    let model = Limiter::new(Embedded::new());
    let got = in_time(limiter.reserve(&rule, request)).await.expect("a decision");
    let expected = model.reserve(&rule, request).await.expect("a decision");
    let shown = |decision: &Decision| {
        let limits = decision.limits.iter().map(|limit| (limit.allowed, limit.remaining)).collect::<Vec<_>>();
        (decision.denied_by.clone(), decision.retry_after, limits)
    };
    assert_eq!(shown(&got), shown(&expected));
    assert_eq!(got.denied_by.as_deref(), Some("orgs"));
    limiter.finish().await;
    assert_eq!(in_time(limiter.peek(&rule, request.cost(1))).await.expect("a decision").limits[0].remaining, 10);
}

/// Where a user may take and not give back, no denial says that nothing is charged, and it is given back once he may.
#[tokio::test]
async fn a_missing_right_to_give_back_is_an_error_and_is_made_up_for_once_it_is_granted() {
    let servers = ClusterServers::of_primaries();
    let (_, limiter) = on_cluster(&servers);
    let (user, org) = on_nodes(&servers, 0, 1);
    let parts = [("org", org.as_bytes())];
    let request = Request::new(&user).parts(&parts);
    let rule = both("gcra 10/30d", "gcra 1/30d");
    let other = servers.keys_of(0, 3).remove(2);
    let first = in_time(limiter.acquire(&rule, Request::new(&other).parts(&parts))).await.expect("a decision");
    assert!(first.allowed, "takes the only unit of the organisation");
    let may = |right: &str| {
        tollgate_testing::redis_server::run_command(servers.node(0), &["ACL", "SETUSER", "default", right]);
    };
    for operation in [Operation::Acquire, Operation::Reserve] {
        may("-del");
        let error = in_time(limiter.call(operation, &rule, request)).await.expect_err("it can't be given back");
        assert!(error.kind() == ErrorKind::Permission && error.charged() != Charged::No, "{operation}: {error}");
        may("+del");
        limiter.finish().await;
        let left = in_time(limiter.peek(&rule, request)).await.expect("a decision").limits[0].remaining;
        assert_eq!(left, 10, "{operation}");
    }
}
