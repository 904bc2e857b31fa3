//! Faults of one Redis, or of a primary with a replica, each made on real servers. Nothing hangs past a deadline, nothing is
//! charged twice, and every answer that didn't come from Redis says so. The guide lists them.

mod away;
mod cut;
mod failover;
mod proxy;
mod refusing;
mod soak;
mod tool;

use std::num::NonZeroU32;
use std::time::Duration;

use tollgate::redis::cmd;
use tollgate::{Breaker, By, Charged, Decision, Error, Limiter, OnError, Redis, Request, Rule};

use crate::server::Server;

/// Ends a test that would hang; no machine is so slow that it decides one.
const PATIENCE: Duration = Duration::from_secs(30);
const DEADLINE: Duration = Duration::from_millis(150);
const LOCAL: OnError = OnError::Local { processes: NonZeroU32::new(2).unwrap() };

fn redis(url: &str) -> Redis {
    Redis::open(url).expect("a good address")
}

fn limiter(url: &str) -> Limiter {
    Limiter::new(redis(url)).deadline(DEADLINE)
}

fn rule(text: &str, on_error: OnError) -> Rule {
    text.parse::<Rule>().and_then(|rule| rule.on_error(on_error)).expect("a rule")
}

async fn in_time<T>(answer: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, answer).await.expect("an answer by the deadline")
}

async fn acquire(limiter: &Limiter, rule: &Rule, key: &str) -> Result<Decision, Error> {
    in_time(limiter.acquire(rule, key)).await
}

/// What each policy answers at this address, where calls fail by one of these classes of errors.
async fn by_policy(url: &str, classes: &[&str]) {
    let error = acquire(&limiter(url), &rule("gcra 6/1d", OnError::Closed), "by policy").await.expect_err("closed");
    assert!(classes.contains(&error.class()), "{}: {error}", error.class());
    assert_ne!(error.charged(), Charged::Yes, "{error}");

    let open = acquire(&limiter(url), &rule("gcra 6/1d", OnError::Open), "by policy").await.expect("open");
    assert!(open.allowed && open.by == By::Policy && open.granted == 1, "{open:?}");
    assert!(open.error.is_some_and(|error| classes.contains(&error.class())));

    // Half of the six are this process's. From the fifth failure on, the breaker answers.
    let (limiter, rule) = (limiter(url), rule("gcra 6/1d", LOCAL));
    for number in 0..7 {
        let local = acquire(&limiter, &rule, "by policy").await.expect("local");
        assert_eq!((local.allowed, local.by, local.limit), (number < 3, By::Local, 3), "{number}: {local:?}");
        assert!(local.error.is_some());
    }
}

/// An acquire that Redis answers, at last.
async fn answered_again(limiter: &Limiter, rule: &Rule, key: &str) -> Decision {
    in_time(async {
        loop {
            match limiter.acquire(rule, key).await {
                Ok(decision) if decision.by == By::Redis => return decision,
                _ => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        }
    })
    .await
}

/// Until the breaker is this way.
async fn until(redis: &Redis, wanted: impl Fn(Breaker) -> bool) {
    in_time(async {
        while !wanted(redis.breaker()) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}

fn run(server: &Server, words: &[&str]) {
    cmd(words[0]).arg(&words[1..]).exec(&mut server.connection()).expect("done");
}
