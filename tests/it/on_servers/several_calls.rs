//! Several calls as one (`acquire_all`): all are allowed, or nothing is taken.

use std::collections::HashMap;
use std::time::{Duration, UNIX_EPOCH};

use futures_util::future::join_all;
use tollgate::{Clock, DecidedBy, Embedded, ErrorKind, Limiter, OnError, Request, RetryAfter, Rule};
use tollgate_testing::cluster::ClusterServers;
use tollgate_testing::polling::in_time;
use tollgate_testing::redis_server::{Server, patient};
use tollgate_testing::rules::rule;

use super::across_slots::on_cluster;

fn named(text: &str, name: &str) -> Rule {
    rule(text).named(name).expect("a name")
}

async fn left(limiter: &Limiter, rule: &Rule, key: &str) -> u64 {
    in_time(limiter.peek(rule, key)).await.expect("a decision").remaining
}

/// Random calls on few keys, against counting by hand: each key admits its capacity, and a set of calls is taken whole or
/// not at all.
#[tokio::test]
async fn calls_are_admitted_together_as_counting_by_hand_admits_them() {
    let server = Server::start();
    for limiter in
        [Limiter::new(Embedded::with_clock(Clock::new(UNIX_EPOCH + Duration::from_secs(1)))), patient(&server.url())]
    {
        let capacities = [7, 12, 20];
        let rules: Vec<_> = ["token-bucket 7/30d", "fixed-window 12/30d", "sliding-log 20/30d"]
            .iter()
            .enumerate()
            .map(|(at, text)| named(text, &format!("rule-{at}")))
            .collect();
        let (mut used, mut taken) = (HashMap::<(usize, u64), u64>::new(), 0);
        let mut rng = fastrand::Rng::with_seed(48);
        for round in 0..200 {
            let calls: Vec<(usize, u64, u64)> =
                (0..rng.usize(0..5)).map(|_| (rng.usize(0..3), rng.u64(0..4), rng.u64(0..4))).collect();
            let keys: Vec<_> = calls.iter().map(|(_, key, _)| format!("key:{key}")).collect();
            let asked =
                calls.iter().zip(&keys).map(|((at, _, cost), key)| (&rules[*at], Request::new(key).cost(*cost)));
            let decisions = in_time(limiter.acquire_all(asked)).await.expect("decisions");

            let mut sums = HashMap::<(usize, u64), u64>::new();
            calls.iter().for_each(|(at, key, cost)| *sums.entry((*at, *key)).or_default() += cost);
            let fits = |at: usize, key: u64| {
                used.get(&(at, key)).copied().unwrap_or_default() + sums[&(at, key)] <= capacities[at]
            };
            let expected: Vec<_> = calls.iter().map(|(at, key, _)| fits(*at, *key)).collect();
            let allowed: Vec<_> = decisions.iter().map(|decision| decision.allowed).collect();
            assert_eq!(allowed, expected, "round {round}: {calls:?} of {used:?}");
            let all = expected.iter().all(|fits| *fits);
            if all {
                sums.iter().for_each(|(place, cost)| *used.entry(*place).or_default() += cost);
                taken += 1;
            }
            for ((at, key, _), decision) in calls.iter().zip(&decisions) {
                let used = used.get(&(*at, *key)).copied().unwrap_or_default();
                assert_eq!(decision.remaining, capacities[*at] - used, "round {round}");
                assert_eq!(decision.rule(), rules[*at].name());
                assert!(all || decision.granted == 0, "round {round}");
            }
        }
        assert!((20..180).contains(&taken), "{taken} were taken");
    }
}

/// Transfers that count against both of their accounts, at once by many tasks, on one Redis and on keys of several
/// nodes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn transfers_at_once_count_on_both_sides_or_on_none() {
    let server = Server::start();
    let servers = ClusterServers::of_primaries();
    let (_, on_cluster) = on_cluster(&servers);
    let (sent, received) = (named("token-bucket 20/30d", "sent"), named("fixed-window 15/30d", "received"));
    for limiter in [patient(&server.url()), on_cluster] {
        let accounts: Vec<_> = (0..4).map(|account| format!("account:{account}")).collect();
        let calls = (0..200).map(|call| {
            let (from, to) = (&accounts[call % 4], &accounts[call / 4 % 4]);
            limiter.acquire_all([(&sent, from.as_str()), (&received, to.as_str())])
        });
        let decided = in_time(join_all(calls)).await;
        let made = decided.into_iter().filter(|transfer| transfer.as_ref().expect("decisions").allowed());
        let made = made.count() as u64;
        limiter.finish().await;
        let (mut taken_from, mut taken_to) = (0, 0);
        for account in &accounts {
            taken_from += 20 - left(&limiter, &sent, account).await;
            taken_to += 15 - left(&limiter, &received, account).await;
        }
        assert_eq!((taken_from, taken_to), (made, made));
        assert!(made > 0 && made <= 60, "{made} transfers");
    }
}

/// Each limit under its own rule: its settings, its parts, and its costs by name.
#[tokio::test]
async fn each_call_counts_by_its_own_rule() {
    let limiter = Limiter::new(Embedded::new());
    let blocking = named("fixed-window 1/30d", "blocking").block_for(Duration::from_secs(3600)).expect("a time");
    let by_org = rule("fixed-window 100/30d").and_by("org", "fixed-window 3/1h".parse().expect("a limit"));
    let by_org = by_org.and_then(|rule| rule.named("by-org")).expect("two limits");
    let call = |org| Request::new("user:1").parts(org);
    let [one, two]: [[(&str, &[u8]); 1]; 2] = [[("org", b"one")], [("org", b"two")]];
    for allowed in [true, false] {
        let decisions = limiter
            .acquire_all([(&by_org, call(&one)), (&by_org, call(&two).cost(2)), (&blocking, Request::new("user:1"))])
            .await
            .expect("decisions");
        let each: Vec<_> = decisions.iter().map(|decision| decision.allowed).collect();
        assert_eq!(each, [true, allowed, allowed]);
        assert_eq!((decisions.allowed(), decisions.retry_after() == RetryAfter::Now), (allowed, allowed));
        let denied = decisions.clone().into_result().map(|decisions| decisions.len());
        assert_eq!(
            denied.map_err(|denied| denied.to_string()),
            if allowed { Ok(3) } else { Err("rule blocking: denied by fixed-window 1/30d: blocked".to_owned()) }
        );
        assert_eq!(decisions.iter().map(|decision| decision.limits.len()).collect::<Vec<_>>(), [2, 2, 1]);
        // What both calls count: the user's limit.
        assert_eq!(decisions[0].limits[0].remaining, 97);
        assert_eq!(decisions[0].limits[1].remaining, 2);
        assert_eq!(decisions[1].limits[1].remaining, 1);
    }
    let blocked = limiter.peek(&blocking, "user:1").await.expect("a decision");
    assert!(blocked.blocked, "its own rule blocks");
    assert!(limiter.acquire(&by_org, call(&one)).await.expect("a decision").allowed, "another's doesn't");
}

#[tokio::test]
async fn what_cannot_be_one_decision_is_an_error_that_names_why() {
    let limiter = Limiter::new(Embedded::new());
    let api = named("fixed-window 5/1h", "api");
    assert!(limiter.acquire_all(Vec::<(&Rule, &str)>::new()).await.expect("none").is_empty());
    let one = limiter.acquire_all([(&api, "key")]).await.expect("a decision");
    assert!(one.len() == 1 && one[0].allowed);

    let by_id = limiter.acquire_all([(&api, Request::new("a")), (&api, Request::new("b").id("x"))]).await;
    let other = named("fixed-window 6/1h", "api");
    let two = limiter.acquire_all([(&api, "a"), (&other, "a")]).await;
    let part = rule("fixed-window 5/1h").and_by("org", "fixed-window 3/30d".parse().expect("a limit")).expect("two");
    let lacks = limiter.acquire_all([(&api, "a"), (&part, "a")]).await;
    for (answer, why) in [(by_id, "id"), (two, "different numbers"), (lacks, "org")] {
        let error = answer.expect_err("no decision");
        assert!(error.kind() == ErrorKind::Input && error.to_string().contains(why), "{error}");
    }
    assert_eq!(left(&limiter, &api, "a").await, 5);

    let keys: Vec<_> = (0..1001).map(|key| format!("key:{key}")).collect();
    let most = limiter.acquire_all(keys[1..].iter().map(|key| (&api, key))).await.expect("decisions");
    assert!(most.len() == 1000 && most.iter().all(|decision| decision.allowed));
    let error = limiter.acquire_all(keys.iter().map(|key| (&api, key))).await.expect_err("too many");
    assert_eq!(error.to_string(), "acquire_all: expected at most 1000 calls, got 1001");
}

#[tokio::test]
async fn while_redis_is_away_the_strictest_policy_answers_all() {
    let mut server = Server::start();
    server.stop();
    let limiter = patient(&server.tcp_url()).to_builder().deadline(Duration::from_millis(200)).build();
    let open = named("fixed-window 5/1h", "open").on_error(OnError::Open).expect("a policy");
    let closed = named("fixed-window 5/1h", "closed").on_error(OnError::Closed).expect("a policy");
    let allowed = limiter.acquire_all([(&open, "a"), (&open, "b")]).await.expect("a policy's answer");
    assert_eq!(allowed.len(), 2);
    assert!(allowed.iter().all(|decision| decision.allowed && matches!(decision.by, DecidedBy::Policy(Some(_)))));
    assert!(limiter.acquire_all([(&open, "a"), (&closed, "b")]).await.expect_err("closed").is_unreachable());
}
