//! Crowds of calls that take Redis longer, such as those of several limits: few are in flight, and nobody else waits
//! for them.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use tollgate::Charged;
use tollgate::redis::cmd;
use tollgate_testing::polling::wait_for_value;
use tollgate_testing::redis_server::Server;
use tollgate_testing::rules::rule;

use super::batching::{at_once, limiter};

/// Each takes Redis as long as four acquires of one limit.
const TWO_LIMITS: &str = "gcra 100000/30d, fixed-window 100000/30d";

#[tokio::test]
async fn of_a_crowd_with_several_limits_few_are_in_flight_and_who_was_not_sent_learns_that() {
    let server = Server::start();
    let (limiter, rule) = (limiter(&server), Arc::new(rule(TWO_LIMITS)));
    limiter.acquire(&rule, "key").await.expect("a decision");
    server.signal("-STOP");
    let short = limiter.to_builder().deadline(Duration::from_millis(300)).build();
    let answers = at_once(&short, (0..3000).map(|n| (Arc::clone(&rule), format!("k{n}"), 1)).collect()).await;
    server.signal("-CONT");
    let errors: Vec<_> = answers.into_iter().map(|answer| answer.expect_err("no answer")).collect();
    let unknown = errors.iter().filter(|error| error.charged() == Charged::Unknown).count();
    // One by itself, and two batches of 256.
    assert!((1..=513).contains(&unknown), "{unknown} were sent");
    let untouched = errors.iter().filter(|error| error.charged() == Charged::No).count();
    assert_eq!(unknown + untouched, 3000);
    // On a slow machine, its breaker has opened.
    let decision = wait_for_value(async || match limiter.acquire(&rule, "key").await {
        Err(error) if error.charged() == Charged::No => None,
        answer => Some(answer.expect("a decision")),
    });
    assert_eq!(decision.await.remaining, 100_000 - 2);
    let charged = cmd("DBSIZE").query::<usize>(&mut server.connection()).expect("a count") / 2 - 1;
    assert!(charged <= unknown, "{charged} were charged, and {unknown} were told that they may be");
}

#[tokio::test]
async fn who_asks_for_one_limit_waits_for_no_crowd_with_several() {
    let server = Server::start();
    let (limiter, several, one) = (limiter(&server), Arc::new(rule(TWO_LIMITS)), rule("gcra 9/30d"));
    limiter.acquire(&one, "first").await.expect("a decision");
    let mut crowd = pin!(at_once(&limiter, (0..3000).map(|n| (Arc::clone(&several), format!("k{n}"), 1)).collect()));
    assert!(poll_fn(|context| Poll::Ready(crowd.as_mut().poll(context).is_pending())).await);
    let mut behind = 0;
    let single = async {
        // Lets all of them be queued.
        for _ in 0..20 {
            tokio::task::yield_now().await;
        }
        let decision = limiter.acquire(&one, "single").await;
        behind = cmd("DBSIZE").query::<u64>(&mut server.connection()).expect("a count");
        decision
    };
    let single = tokio::select! {
        decision = single => decision,
        _ = &mut crowd => panic!("the single caller was answered last"),
    };
    assert!(single.expect("a decision").allowed && behind < 4000, "{behind} keys were decided before");
    assert!(crowd.await.iter().all(Result::is_ok));
}
