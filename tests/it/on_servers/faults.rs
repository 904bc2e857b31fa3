//! Faults of one Redis, of a primary with replicas, and of a cluster, each made on real servers. Nothing hangs past a
//! deadline, nothing is charged twice, and every answer that didn't come from Redis says so. The guide lists them.

mod abandoned_calls;
mod broken_connections;
mod busy_server;
mod cluster_redirects;
mod failover_losses;
#[cfg(unix)]
mod forks;
mod refusals;
mod replaced_server;
mod runtimes;
mod sentinel_failover;
mod shard_outage;
mod short_deadlines;
mod unavailable_server;
mod unpolled_futures;

use std::num::NonZeroU32;
use std::time::Duration;

use tollgate::redis::cmd;
use tollgate::{
    Balance, BreakerState, Charged, Cluster, DecidedBy, Decision, Error, ErrorKind, Limiter, OnError, Redis, Request,
    Rule,
};
use tollgate_testing::callers::{Callers, SLACK};
use tollgate_testing::cluster::ClusterServers;
use tollgate_testing::polling::{
    PATIENCE, in_time, is_pending, once_sent, turns_of_others, wait_for_value, wait_until,
};
use tollgate_testing::proxy::Proxy;
use tollgate_testing::redis_server::{Server, free_port, run_command};

/// The classes of errors that a call may end with while its server is unreachable.
const OUTAGES: [&str; 4] = ["unreachable", "disconnected", "deadline", "not-now"];
const DEADLINE: Duration = Duration::from_millis(150);
const LOCAL: OnError = OnError::Local { processes: NonZeroU32::new(2).unwrap() };

fn redis(url: &str) -> Redis {
    Redis::open(url).expect("a good address")
}

fn limiter(url: &str) -> Limiter {
    Limiter::builder(redis(url)).deadline(DEADLINE).build()
}

fn cluster_limiter(servers: &ClusterServers) -> (Cluster, Limiter) {
    let cluster = Cluster::open(&servers.url()).expect("a good address");
    (cluster.clone(), Limiter::new(cluster))
}

fn rule(text: &str, on_error: OnError) -> Rule {
    tollgate_testing::rules::rule(text).on_error(on_error).expect("a policy")
}

/// Waits until the breaker is open and its pause is over, while Redis answers again.
async fn opened(server: &mut Server, redis: &Redis, limiter: &Limiter, rule: &Rule) {
    server.stop();
    while redis.breaker() == BreakerState::Closed {
        acquire(limiter, rule, "key").await.expect_err("stopped");
    }
    server.start_again(&[]);
    server.wait_until_it_answers();
    until(|| redis.breaker() == BreakerState::Open(Duration::ZERO)).await;
}

async fn acquire(limiter: &Limiter, rule: &Rule, key: &str) -> Result<Decision, Error> {
    in_time(limiter.acquire(rule, key)).await
}

/// What a server decides that is well, however busy the machine is.
async fn decided(limiter: &Limiter, rule: &Rule, key: &str) -> Decision {
    once_sent(|| limiter.acquire(rule, Request::new(key).deadline(PATIENCE))).await
}

/// Checks each policy's answer at this address, where calls fail with one of these classes of errors.
async fn by_policy(url: &str, classes: &[&str]) {
    // Unless it is silent, the server is only slow.
    let deadline = if classes.contains(&"deadline") { DEADLINE } else { PATIENCE };
    let limiter = |url: &str| limiter(url).to_builder().deadline(deadline).build();
    let error = acquire(&limiter(url), &rule("gcra 6/1d", OnError::Closed), "by policy").await.expect_err("closed");
    assert!(classes.contains(&error.kind().name()), "{}: {error}", error.kind().name());
    assert_ne!(error.charged(), Charged::Yes, "{error}");

    let open = acquire(&limiter(url), &rule("gcra 6/1d", OnError::Open), "by policy").await.expect("open");
    assert!(open.allowed && matches!(open.by, DecidedBy::Policy(_)) && open.granted == 1, "{open:?}");
    let error = open.by.error().expect("why");
    assert!(classes.contains(&error.kind().name()), "{}: {error}", error.kind().name());

    // Half of the six are this process's. From the fifth failure on, the breaker answers.
    let (limiter, rule) = (limiter(url), rule("gcra 6/1d", LOCAL));
    for number in 0..7 {
        let local = acquire(&limiter, &rule, "by policy").await.expect("local");
        assert_eq!((local.allowed, local.by.name(), local.capacity), (number < 3, "local", 3), "{number}: {local:?}");
        assert!(local.by.error().is_some());
    }
}

async fn until(mut holds: impl FnMut() -> bool) {
    wait_until("the condition", async || holds()).await;
}

/// An acquire that Redis answers.
async fn answered_again(limiter: &Limiter, rule: &Rule, key: &str) -> Decision {
    wait_for_value(async || limiter.acquire(rule, key).await.ok().filter(|decision| decision.by == DecidedBy::Redis))
        .await
}

/// Whether INFO says this, if it is answered at all.
fn info_says(server: &Server, line: &str) -> bool {
    let connection = tollgate::redis::Client::open(server.url()).and_then(|client| client.get_connection());
    connection.and_then(|mut redis| cmd("INFO").query::<String>(&mut redis)).is_ok_and(|info| info.contains(line))
}

fn run(server: &Server, words: &[&str]) {
    cmd(words[0]).arg(&words[1..]).exec(&mut server.connection()).expect("done");
}
