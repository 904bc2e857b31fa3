//! `acquire_wait`: callers wait in order, not beyond their bound, and are charged nothing once they give up.

use std::time::Duration;

use tokio::time::Instant;
use tollgate::redis::cmd;
use tollgate::{Charged, Embedded, Limiter, Redis, RetryAfter};

use crate::support::redis_server::Server;
use crate::support::rules::rule;

const SECOND: Duration = Duration::from_secs(1);

#[tokio::test(start_paused = true)]
async fn callers_are_served_in_order_of_arrival() {
    let limiter = Limiter::new(Embedded::new());
    let rule = rule("gcra 1/1s burst 0 max-debt 5");
    let started = Instant::now();
    let mut callers = tokio::task::JoinSet::new();
    for place in 1..=5 {
        let (limiter, rule) = (limiter.clone(), rule.clone());
        callers.spawn(async move {
            let decision = limiter.acquire_wait(&rule, "queue", 10 * SECOND).await.expect("a decision");
            assert!(decision.allowed && decision.retry_after == RetryAfter::Now && decision.granted == 1);
            (place, started.elapsed())
        });
        // Tasks of one thread run when this one waits: so each reserves before the next is there.
        tokio::task::yield_now().await;
    }
    for expected in 1..=5 {
        let (place, waited) = callers.join_next().await.expect("one more").expect("no panic");
        assert_eq!(place, expected);
        // The engine's clock went on by itself between two reservations, the waits are that much shorter.
        assert!(
            waited <= place * SECOND + Duration::from_millis(2) && waited > (place - 1) * SECOND,
            "{place}: {waited:?}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_wait_beyond_the_bound_is_denied_at_once_and_charges_nothing() {
    let limiter = Limiter::new(Embedded::new());
    let rule = rule("token-bucket 1/1h max-debt 9");
    assert!(limiter.acquire_wait(&rule, "key", SECOND).await.expect("a decision").allowed);
    let before = limiter.peek(&rule, "key").await.expect("a decision").reset_after;
    let started = Instant::now();
    let decision = limiter.acquire_wait(&rule, "key", 10 * SECOND).await.expect("a decision");
    assert!(!decision.allowed && decision.granted == 0 && started.elapsed() < SECOND);
    assert!(decision.retry_after.duration().expect("a wait") > 3000 * SECOND, "it says how long it would be");
    assert!(limiter.peek(&rule, "key").await.expect("a decision").reset_after <= before, "and it is not charged");
}

#[tokio::test]
async fn a_denial_carries_jitter_on_request() {
    let limiter = Limiter::new(Embedded::new());
    let rule = rule("fixed-window 1/1h start first-hit");
    let at = std::time::UNIX_EPOCH + SECOND;
    let request = tollgate::Request::new("key").at(at);
    limiter.acquire(&rule, request).await.expect("a decision");
    let mut waits = Vec::new();
    for _ in 0..20 {
        let denied = limiter.acquire(&rule, request.jitter(50)).await.expect("a decision");
        waits.push(denied.retry_after.duration().expect("a wait"));
    }
    assert!(waits.iter().all(|wait| (3600 * SECOND..=5400 * SECOND).contains(wait)), "{waits:?}");
    assert!(waits.iter().any(|wait| *wait != waits[0]), "{waits:?}");
    let exact = limiter.acquire(&rule, request).await.expect("a decision");
    assert_eq!(exact.retry_after, RetryAfter::After(3600 * SECOND));
}

#[tokio::test]
async fn a_caller_that_gives_up_is_not_charged() {
    let server = Server::start();
    for limiter in [Limiter::new(Embedded::new()), Limiter::new(Redis::open(&server.url()).expect("an address"))] {
        let rule = rule("token-bucket 10/1h max-debt 100");
        limiter.acquire(&rule, tollgate::Request::new("key").cost(10)).await.expect("a decision");
        for _ in 0..20 {
            let waiting = limiter.acquire_wait(&rule, "key", 30 * 3600 * SECOND);
            tokio::select! {
                biased;
                decision = waiting => panic!("allowed: {decision:?}"),
                () = tokio::time::sleep(Duration::from_millis(3)) => {}
            }
        }
        // The cancellations are tasks of their own; once all have run, the key is as it was.
        let hour = 3600 * SECOND;
        let mut reset_after = Duration::MAX;
        for _ in 0..1000 {
            reset_after = limiter.peek(&rule, "key").await.expect("a decision").reset_after;
            if reset_after <= hour {
                break;
            }
            tokio::task::yield_now().await;
        }
        assert!(reset_after <= hour, "{reset_after:?}: charged for callers who have gone");
    }
}

/// In real time, on a real Redis: without debt each caller comes back by itself.
#[tokio::test]
async fn a_log_is_waited_for_by_retries() {
    let server = Server::start();
    let limiter = Limiter::new(Redis::open(&server.url()).expect("an address"));
    let rule = rule("sliding-log 2/50ms");
    let mut callers = tokio::task::JoinSet::new();
    for _ in 0..6 {
        let (limiter, rule) = (limiter.clone(), rule.clone());
        callers
            .spawn(async move { limiter.acquire_wait(&rule, "key", 60 * SECOND).await.expect("a decision").allowed });
    }
    let started = Instant::now();
    assert_eq!(callers.join_all().await, [true; 6]);
    assert!(started.elapsed() >= Duration::from_millis(100), "six take three windows");
    let rule = self::rule("sliding-log 1/1d");
    limiter.acquire(&rule, "other").await.expect("a decision");
    let denied = limiter.acquire_wait(&rule, "other", SECOND).await.expect("a decision");
    assert!(!denied.allowed, "a day is more than a second");
}

/// In real time, as the block is: nothing else moves the engine's clock while a caller sleeps.
#[tokio::test]
async fn a_block_is_waited_for_where_it_ends_in_time() {
    let limiter = Limiter::new(Embedded::new());
    for text in ["gcra 5/1s max-debt 5", "gcra 5/1s"] {
        let rule = rule(text);
        // Scripts are compiled at their first call: not while the block runs.
        assert!(limiter.acquire_wait(&rule, text, SECOND).await.expect("a decision").allowed, "{text}");
        limiter.block(&rule, text, Duration::from_millis(500)).await.expect("an answer");
        let denied = limiter.acquire_wait(&rule, text, Duration::from_millis(1)).await.expect("a decision");
        assert!(!denied.allowed && denied.blocked, "{text}");
        assert!(limiter.acquire_wait(&rule, text, 60 * SECOND).await.expect("a decision").allowed, "{text}");
        assert!(!limiter.peek(&rule, text).await.expect("a decision").blocked, "{text}");
    }
}

/// It would have been too long a wait, and what was reserved can't be given back.
#[tokio::test]
async fn a_reservation_that_cannot_be_cancelled_is_not_reported_as_uncharged() {
    let server = Server::start();
    let (name, rights) = ("keeps", "+@all ~*");
    let url = server.user(name, rights);
    let limiter = Limiter::new(Redis::open(&url).expect("a good address")).deadline(Duration::from_secs(30));
    let rule = rule("gcra 1/1h max-debt 5");
    limiter.acquire(&rule, "key").await.expect("a decision");
    cmd("ACL").arg(&["SETUSER", name, "-del"]).exec(&mut server.connection()).expect("set");
    let error = limiter.acquire_wait(&rule, "key", Duration::from_secs(1)).await.expect_err("no right to cancel");
    assert!(error.is_permission() && error.charged() != Charged::No, "{error:?}");
}

#[tokio::test(start_paused = true)]
async fn a_wait_that_is_too_long_names_the_limits_that_deny() {
    let limiter = Limiter::new(Embedded::new());
    let rule = rule("gcra 1000/1s max-debt 9, token-bucket 1/1h max-debt 9");
    assert!(limiter.acquire_wait(&rule, "key", SECOND).await.expect("a decision").allowed);
    let decision = limiter.acquire_wait(&rule, "key", SECOND).await.expect("a decision");
    assert_eq!((decision.allowed, decision.denied_by.as_deref()), (false, Some("token-bucket 1/1h max-debt 9")));
    assert_eq!([0, 1].map(|at| decision.limits[at].allowed), [true, false]);
    assert_eq!(decision.limits[1].retry_after, decision.retry_after);
}
