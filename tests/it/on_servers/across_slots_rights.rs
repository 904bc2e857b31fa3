//! Users of a cluster who may not run some commands or use some keys, where a call decides on keys of several slots.

use tollgate::{Charged, Cluster, ErrorKind, Limiter, Request};
use tollgate_testing::acl::{least, more};
use tollgate_testing::cluster::ClusterServers;
use tollgate_testing::polling::PATIENCE;
use tollgate_testing::redis_server::run_command;
use tollgate_testing::rules::{by_own_id, rule};

use super::across_slots::{left, many, on_cluster, ran};

/// What a limiter's user of a cluster is allowed, as documented.
fn least_on_a_cluster() -> Vec<String> {
    let more = more("+cluster\\|slots").into_iter().map(|right| right.replace('\\', ""));
    least().into_iter().map(str::to_owned).chain(more).collect()
}

/// Makes the user of these rights on every node, and a limiter of it.
fn limiter_of(servers: &ClusterServers, rights: impl Iterator<Item = String>) -> Limiter {
    let user = ["ACL", "SETUSER", "limiter", "reset", "on", ">sesame"].map(str::to_owned);
    let words: Vec<_> = user.into_iter().chain(rights).collect();
    for node in servers.nodes() {
        run_command(node, &words.iter().map(String::as_str).collect::<Vec<_>>());
    }
    let url = servers.url().replace("://", "://limiter:sesame@");
    Limiter::builder(Cluster::open(&url).expect("a good address")).deadline(PATIENCE).build()
}

#[tokio::test]
async fn the_documented_user_decides_on_keys_of_several_slots_in_one_call() {
    let servers = ClusterServers::of_primaries();
    let limiter = limiter_of(&servers, least_on_a_cluster().into_iter());
    let keys = servers.keys_of(0, 8);
    // Knows the slots from here on.
    let _ = limiter.peek(&rule("gcra 9/30d"), keys[0].as_str()).await;
    let texts = [
        "gcra 9/30d",
        "fixed-window 9/30d",
        "fixed-window 9/year",
        "sliding-window 9/30d",
        "sliding-log 9/30d",
        "concurrency 9 ttl 30d",
        "gcra 9/30d, sliding-log 9/30d",
    ];
    for text in texts {
        let rule = rule(text).named("several").expect("a name");
        for ids in [false, true] {
            servers.nodes().iter().for_each(|node| node.reset_command_counts());
            let id = format!("{text} {ids}");
            let requests = keys.iter().map(|key| {
                let request = by_own_id(&rule, Request::new(key));
                if ids { request.id(&id) } else { request }
            });
            for answer in limiter.acquire_many(&rule, requests).await {
                assert!(answer.expect("a decision").allowed, "{text}");
            }
            let calls: u64 = servers.nodes().iter().map(ran).sum();
            assert!(calls < 8, "{text}: {calls} calls of scripts");
        }
    }
}

/// A user who may not use some keys, or may only read them, gets the error that a call of this key alone gets; and what
/// the same call took of other keys is answered.
#[tokio::test]
async fn a_key_that_a_user_may_not_use_fails_by_itself() {
    let servers = ClusterServers::of_primaries();
    let rule = rule("gcra 9/30d");
    let (_, all) = on_cluster(&servers);
    let keys = servers.keys_of(0, 12);
    assert_eq!(left(&all, &rule, &keys).await, vec![8; 12]);
    let mut patterns = Vec::new();
    for (at, key) in keys.iter().enumerate() {
        let name = &all.inspect(&rule, key.as_str()).await.expect("a state")[0].key;
        patterns.extend(match at % 4 {
            0 => None,
            1 => Some(format!("%R~{name}")),
            _ => Some(format!("~{name}")),
        });
    }
    let rights = least_on_a_cluster().into_iter().filter(|right| !right.starts_with('~'));
    let limiter = limiter_of(&servers, rights.chain(patterns));
    for remaining in [7, 6] {
        for (at, answer) in many(&limiter, &rule, &keys).await.into_iter().enumerate() {
            match answer {
                Ok(decision) => assert_eq!((at % 4 > 1, decision.remaining), (true, remaining), "{at}"),
                Err(error) => {
                    assert!(
                        at % 4 <= 1 && error.kind() == ErrorKind::Permission && error.charged() == Charged::No,
                        "{at}: {error}"
                    );
                }
            }
        }
    }
    let untouched = all.peek(&rule, keys[1].as_str()).await.expect("a decision");
    assert_eq!(untouched.remaining, 8, "what could only be read");
}

#[tokio::test]
async fn a_command_that_a_user_may_not_run_is_reported_as_by_a_call_of_one_key() {
    let servers = ClusterServers::of_primaries();
    let (all, keys) = (on_cluster(&servers).1, servers.keys_of(0, 16));
    let (together, alone) = keys.split_at(8);
    let url = servers.url().replace("://", "://limiter:sesame@");
    let texts = ["time", "get", "set", "setrange"].map(|command| (command, "gcra 9/30d", 1));
    let texts = texts.into_iter().chain([
        ("setrange", "fixed-window 9/30d", 1),
        ("setrange", "fixed-window 9/year", 1),
        ("setrange", "sliding-window 9/30d", 1),
        ("getrange", "sliding-log 9/30d", 1),
        ("exists", "sliding-log 9/30d", 1),
        ("setrange", "sliding-log 90/30d", 30),
        ("strlen", "sliding-log 90/30d", 30),
        ("exists", "concurrency 9 ttl 30d", 1),
        ("zcount", "concurrency 9 ttl 30d", 1),
        ("zscore", "concurrency 9 ttl 30d", 1),
        ("zadd", "concurrency 9 ttl 30d", 1),
    ]);
    for (forbidden, text, taken) in texts {
        let rule = rule(text).named(forbidden).expect("a name");
        let asked = |key| by_own_id(&rule, Request::new(key));
        // Four of each have a state, which is overwritten in place.
        for key in together[..4].iter().chain(&alone[..4]).cycle().take(8 * taken) {
            assert!(all.acquire(&rule, asked(key)).await.expect("a decision").allowed, "{text}");
        }
        for node in servers.nodes() {
            let forbidden = format!("-{forbidden}");
            run_command(node, &["ACL", "SETUSER", "limiter", "reset", "on", ">sesame", "~*", "+@all", &forbidden]);
        }
        let limiter = || Limiter::builder(Cluster::open(&url).expect("a good address")).deadline(PATIENCE).build();
        let (many_at_once, one_by_one) = (limiter(), limiter());
        // Knows the slots from here on.
        let _ = many_at_once.peek(&rule, keys[0].as_str()).await;
        let answers = many_at_once.acquire_many(&rule, together.iter().map(&asked)).await;
        for (at, answer) in answers.into_iter().enumerate() {
            let alone = one_by_one.acquire(&rule, asked(&alone[at])).await;
            match (answer, alone) {
                (Ok(decision), Ok(alone)) => {
                    assert_eq!(decision.remaining, alone.remaining, "{text}: {forbidden}, {at}");
                }
                (Err(error), Err(alone)) => {
                    let told = (alone.to_string(), Charged::No);
                    assert_eq!((error.to_string(), error.charged()), told, "{text}: {forbidden}");
                    assert!(error.kind() == ErrorKind::Permission, "{error}");
                }
                (answer, alone) => panic!("{text}: {forbidden}, {at}: {answer:?}, but alone {alone:?}"),
            }
        }
    }
}
