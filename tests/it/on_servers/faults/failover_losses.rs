//! What a failover loses, in units: of a replica that kept up, and of one that was cut off for a while; as Redis comes,
//! with `min-replicas-to-write`, and where each answer waits for the replica.

use futures_util::future::join_all;

use super::*;

const KEYS: usize = 20;
const CAPACITY: u64 = 200;
/// A unit of each key in each.
const ROUNDS: u32 = 20;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Care {
    None,
    MinReplicas,
    Wait,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Link {
    Whole,
    /// For so long before the primary died.
    Cut(Duration),
}

/// What became of the calls of all keys.
#[derive(Debug, Default)]
struct Calls {
    allowed: u64,
    unconfirmed: u64,
    refused: u64,
    other: u64,
}

/// Units beyond the rule, of `KEYS * CAPACITY`.
#[tokio::test]
async fn a_failover_forgets_at_most_a_capacity_of_each_key_and_nothing_where_answers_wait_for_the_replica() {
    let cut = Link::Cut(Duration::from_millis(3500));
    let measured = join_all(
        [
            (Care::None, Link::Whole),
            (Care::MinReplicas, Link::Whole),
            (Care::Wait, Link::Whole),
            (Care::None, cut),
            (Care::MinReplicas, cut),
            (Care::Wait, cut),
        ]
        .map(|(care, link)| failover(care, link)),
    )
    .await;
    let bound = KEYS as u64 * CAPACITY;
    let of = |care: Care, cut: bool| {
        let found = measured.iter().find(|(of, link, ..)| (*of, *link != Link::Whole) == (care, cut));
        found.map(|(_, _, over, _)| *over).expect("measured")
    };
    for (care, link, over, calls) in &measured {
        println!("{care:?}, {link:?}: {over} of {bound} units forgotten; {calls:?}");
        assert!(*over <= bound, "{care:?}, {link:?}: {over}");
    }
    assert_eq!((of(Care::Wait, false), of(Care::Wait, true)), (0, 0), "what was answered is on the replica");
    let (careless, careful) = (of(Care::None, true), of(Care::MinReplicas, true));
    assert!(careless >= KEYS as u64 * 15, "what was taken while the replica was cut off: {careless}");
    assert!(careful < careless, "refused from two seconds on: {careful} of {careless}");
}

async fn failover(care: Care, link: Link) -> (Care, Link, u64, Calls) {
    let mut primary = Server::with(&["--repl-diskless-sync-delay", "0"]);
    let to_primary = Proxy::to(primary.port()).await;
    let upstream = to_primary.url().replace("redis://", "").replace(':', " ");
    let replica = Server::with(&["--replicaof", &upstream]);
    until(|| info_says(&replica, "master_link_status:up")).await;
    if care == Care::MinReplicas {
        run(&primary, &["CONFIG", "SET", "min-replicas-max-lag", "1"]);
        run(&primary, &["CONFIG", "SET", "min-replicas-to-write", "1"]);
        until(|| info_says(&primary, "min_slaves_good_slaves:1")).await;
    }
    let way = Proxy::to(primary.port()).await;
    let replicas = if care == Care::Wait { 1 } else { 0 };
    let confirmed = Redis::builder().confirmed_by(replicas, DEADLINE / 6);
    let redis = confirmed.open(&way.url()).expect("a good address");
    let limiter = Limiter::builder(redis).deadline(PATIENCE).build();
    let rule = rule(&format!("gcra {CAPACITY}/30d"), OnError::Closed);

    let mut calls = Calls::default();
    for _ in 0..ROUNDS {
        round(&limiter, &rule, &mut calls).await;
    }
    if let Link::Cut(time) = link {
        // What was taken so far is on the replica: only what follows can be forgotten.
        until(|| replicated(&primary, "master_repl_offset") <= replicated(&replica, "slave_repl_offset")).await;
        to_primary.swallow(true);
        let pause = time / ROUNDS;
        for _ in 0..ROUNDS {
            round(&limiter, &rule, &mut calls).await;
            tokio::time::sleep(pause).await;
        }
    }
    primary.stop();
    run(&replica, &["REPLICAOF", "NO", "ONE"]);
    way.lead_to(replica.port());
    // The promoted one has no replica that it could wait for.
    let limiter = Limiter::builder(Redis::open(&way.url()).expect("a good address")).deadline(PATIENCE).build();
    answered_again(&limiter, &rule, "another key").await;
    // Nothing refills: what is left now and was taken before add up to the capacity, but for what the failover lost.
    let left = join_all(keys().map(async |key| limiter.peek(&rule, &key).await.expect("a decision").remaining)).await;
    let forgotten = (calls.allowed + left.iter().sum::<u64>()).saturating_sub(KEYS as u64 * CAPACITY);
    (care, link, forgotten, calls)
}

/// How far in bytes, by this field of INFO.
fn replicated(server: &Server, field: &str) -> u64 {
    let info: String = cmd("INFO").arg("replication").query(&mut server.connection()).expect("an answer");
    let value = info.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    value.and_then(|value| value.trim().parse().ok()).expect("a number")
}

fn keys() -> impl Iterator<Item = String> {
    (0..KEYS).map(|key| key.to_string())
}

async fn round(limiter: &Limiter, rule: &Rule, calls: &mut Calls) {
    let answers = join_all(keys().map(async |key| acquire(limiter, rule, &key).await)).await;
    for answer in answers {
        match answer {
            Ok(decision) => calls.allowed += u64::from(decision.allowed),
            Err(error) if error.kind() == ErrorKind::Unconfirmed => {
                assert_eq!(error.charged(), Charged::Yes, "{error}");
                calls.unconfirmed += 1;
            }
            Err(error) if matches!(error.kind(), ErrorKind::Refused | ErrorKind::NotNow) => calls.refused += 1,
            Err(_) => calls.other += 1,
        }
    }
}
