//! Callers who ask for what can't be done, give up, or ask for much at once: nothing of it stays in Redis.

use tollgate::{DenialCache, ErrorKind};

use super::*;

/// What is left of users' units and of their permits.
const USER: &str = "fixed-window 40/30d start first-hit, concurrency 9 ttl 1h";
const USED_UP: &str = "fixed-window 1/30d start first-hit";

/// A rule of a user's units and permits, and of the organisation's units.
fn with_permits(org: &str) -> Rule {
    let rule = rule(USER).named("api").and_then(|rule| rule.and_by("org", limit_of_orgs(org))).expect("a rule");
    rule.on_error(OnError::Closed).expect("closed")
}

/// Of the user's limits.
async fn left_of_user(limiter: &Limiter, user: &str) -> Vec<u64> {
    let rule = rule(USER).named("api").expect("a name");
    let now = in_time(limiter.peek(&rule, user)).await.expect("an answer");
    now.limits.iter().map(|limit| limit.remaining).collect()
}

/// Every key of the limiter's.
fn keys(servers: &ClusterServers) -> Vec<String> {
    let of = |node: &tollgate_testing::redis_server::Server| -> Vec<String> {
        tollgate::redis::cmd("KEYS").arg("tollgate:*").query(&mut node.connection()).expect("keys")
    };
    servers.nodes().iter().flat_map(of).collect()
}

#[tokio::test]
async fn a_denied_call_leaves_no_key_of_a_user_who_had_none() {
    let servers = ClusterServers::of_primaries();
    let (_, limiter) = on_cluster(&servers);
    let strangers = servers.keys_of(2, 20);
    let limits = ["gcra 40/30d", "fixed-window 40/30d start first-hit", "sliding-window 40/30d", "sliding-log 40/30d"];
    for (at, user_limit) in limits.into_iter().enumerate() {
        let name = format!("api-{at}");
        let rule = both(user_limit, USED_UP).named(&name).expect("a name");
        let (user, org) = on_nodes(&servers, 0, 1);
        let parts = [("org", org.as_bytes())];
        let request = |user| Request::new(user).parts(&parts);
        assert!(in_time(limiter.acquire(&rule, request(&user))).await.expect("a decision").allowed);
        let mine = |key: &String| key.contains(&format!(":{name}/"));
        let before = keys(&servers).into_iter().filter(mine).count();
        for stranger in &strangers {
            assert!(!in_time(limiter.acquire(&rule, request(stranger))).await.expect("a decision").allowed);
        }
        limiter.finish().await;
        assert_eq!((before, keys(&servers).into_iter().filter(mine).count()), (2, 2), "{user_limit}");
    }
}

#[tokio::test]
async fn a_penalty_that_lacks_an_id_is_imposed_nowhere() {
    let servers = ClusterServers::of_primaries();
    let (_, limiter) = on_cluster(&servers);
    let (rule, (user, org)) = (with_permits("gcra 40/30d"), on_nodes(&servers, 0, 1));
    let parts = [("org", org.as_bytes())];
    let error = in_time(limiter.penalty(&rule, Request::new(&user).parts(&parts))).await.expect_err("no id");
    assert!(error.is_input() && error.charged() == Charged::No, "{error}");
    assert_eq!(left_of_user(&limiter, &user).await, [40, 9]);
    assert_eq!(keys(&servers), [""; 0]);
}

/// However soon its id is to be forgotten.
#[tokio::test]
async fn a_hold_that_is_denied_or_given_up_gives_back_units_and_permits() {
    let servers = ClusterServers::of_primaries();
    let (_, limiter) = on_cluster(&servers);
    let (rule, (user, org)) = (with_permits(USED_UP), on_nodes(&servers, 0, 1));
    let parts = [("org", org.as_bytes())];
    let request = Request::new(&user).parts(&parts).id_ttl(Duration::from_millis(1));
    let held = in_time(limiter.hold(&rule, request)).await.expect("a decision").permit.expect("a permit");
    for _ in 0..20 {
        assert!(in_time(limiter.hold(&rule, request)).await.expect("a decision").permit.is_none());
    }
    // Of many at once, dropped after more and more polls.
    for polls in 0..60 {
        let calls = (0..4).map(|_| async {
            let mut call = pin!(limiter.hold(&rule, request));
            for _ in 0..polls {
                if !is_pending(call.as_mut()).await {
                    return;
                }
                tokio::task::yield_now().await;
            }
        });
        join_all(calls).await;
        // Releases of this rule, which others may join.
        let permit = in_time(limiter.hold(&rule, request)).await.expect("a decision").permit;
        assert!(permit.is_none());
    }
    in_time(limiter.finish()).await;
    assert_eq!(left_of_user(&limiter, &user).await, [39, 8]);
    in_time(held.release()).await.expect("given back");
    assert_eq!(left_of_user(&limiter, &user).await, [39, 9]);
}

/// Some keys are in one slot, and those of others in several: a node that doesn't answer concerns the first alone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_in_several_slots_do_not_wait_for_others_of_a_frozen_node() {
    let servers = ClusterServers::of_primaries();
    let (_, limiter) = on_cluster(&servers);
    let rule = both("gcra 40/30d", "gcra 40/30d");
    let (frozen, others) = (servers.keys_of(2, 1).remove(0), on_nodes(&servers, 0, 1));
    // An account by itself: its user and its organisation have one name, and so one slot.
    let (alone, both) = ([("org", frozen.as_bytes())], [("org", others.1.as_bytes())]);
    let [alone, both] = [Request::new(&frozen).parts(&alone), Request::new(&others.0).parts(&both)];
    assert!(in_time(limiter.acquire_many(&rule, [alone, both])).await.iter().all(Result::is_ok));
    servers.node(2).signal("-STOP");
    // As long for both, so that neither has time left after the other.
    let asked = [alone, both].map(|request| request.deadline(Duration::from_secs(5)));
    let answers = in_time(limiter.acquire_many(&rule, asked)).await;
    servers.node(2).signal("-CONT");
    assert!(answers[0].is_err() && answers[1].as_ref().is_ok_and(|decision| decision.allowed), "{answers:?}");
}

/// More of them than the background has places for: whoever waits for a denial gives back by itself.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crowd_that_is_denied_leaves_nothing_charged() {
    const USER: &str = "fixed-window 1000000/30d start first-hit";
    let servers = ClusterServers::of_primaries();
    let (cluster, limiter) = on_cluster(&servers);
    let (users, org) = (servers.keys_of(0, 20), servers.keys_of(1, 1).remove(0));
    let parts = [("org", org.as_bytes())];
    let request = |call: usize| Request::new(&users[call % users.len()]).parts(&parts);
    for round in 0..5 {
        let named = |rule: Rule| rule.named(&format!("api-{round}")).expect("a name");
        let (rule, of_users) = (named(both(USER, USED_UP)), named(of_users(USER)));
        assert!(in_time(limiter.acquire(&rule, request(0))).await.expect("a decision").allowed);
        let before = cluster.connections();
        let answers = in_time(join_all((0..9000).map(|call| limiter.acquire(&rule, request(call))))).await;
        in_time(limiter.finish()).await;
        // What is under way as a connection breaks may stay charged.
        if cluster.connections() > before {
            continue;
        }
        assert!(answers.into_iter().all(|answer| !answer.expect("a decision").allowed));
        for (at, user) in users.iter().enumerate() {
            assert_eq!(left(&limiter, &of_users, user).await, 1_000_000 - u64::from(at == 0), "{user}");
        }
        return;
    }
    panic!("a connection broke each time");
}

/// What this process gives back of a call that its caller has left may be had at once.
#[tokio::test]
async fn a_denial_is_not_remembered_beyond_what_is_given_back_in_the_background() {
    let servers = ClusterServers::of_primaries();
    let cache = DenialCache::new(1000);
    let limiter = Limiter::builder(Cluster::open(&servers.url()).expect("an address")).deadline(PATIENCE).build();
    let limiter = limiter.to_builder().denial_cache(cache).build();
    let (users, org) = (servers.keys_of(0, 20), servers.keys_of(1, 20));
    let rule = both("gcra 1/30d", "gcra 1/30d");
    let mut denied = 0;
    for (user, org) in users.iter().zip(&org) {
        let parts = [("org", org.as_bytes())];
        let request = Request::new(user).parts(&parts);
        // Both nodes are connected to.
        in_time(limiter.peek(&rule, request)).await.expect("an answer");
        let mut left_alone = Box::pin(limiter.acquire(&rule, request));
        assert!(is_pending(left_alone.as_mut()).await);
        drop(left_alone);
        let is_denied = !in_time(limiter.acquire(&rule, request)).await.expect("a decision").allowed;
        in_time(limiter.finish()).await;
        if is_denied {
            denied += 1;
            let then = in_time(limiter.acquire(&rule, request)).await.expect("a decision");
            assert!(then.allowed, "{then:?}");
        }
    }
    assert!(denied > 0, "the one that was left comes first");
}

/// Whichever of the limits it is, since nobody is to be admitted by accident.
#[tokio::test]
async fn a_missing_right_is_an_error_where_another_node_is_away() {
    let servers = ClusterServers::of_primaries();
    let limiter = Limiter::builder(Cluster::open(&servers.url()).expect("an address")).deadline(PATIENCE).build();
    let rule = both("gcra 40/30d", "gcra 40/30d").on_error(OnError::Open).expect("open");
    for (user, org) in [on_nodes(&servers, 0, 1), on_nodes(&servers, 1, 0)] {
        let parts = [("org", org.as_bytes())];
        let request = Request::new(&user).parts(&parts);
        in_time(limiter.acquire(&rule, request)).await.expect("a decision");
        let set = |right: &str| {
            let mut user = tollgate::redis::cmd("ACL");
            user.arg("SETUSER").arg("default").arg(right).exec(&mut servers.node(0).connection()).expect("set");
        };
        set("-@scripting");
        servers.node(1).signal("-STOP");
        for operation in [Operation::Acquire, Operation::AtMost, Operation::Peek] {
            let asked = async || limiter.call(operation, &rule, request.deadline(Duration::from_millis(500))).await;
            wait_until("a missing right", async || {
                asked().await.is_err_and(|error| error.kind() == ErrorKind::Permission)
            })
            .await;
        }
        servers.node(1).signal("-CONT");
        set("+@scripting");
        wait_until("an answer", async || limiter.peek(&rule, request.deadline(PATIENCE)).await.is_ok()).await;
    }
}
