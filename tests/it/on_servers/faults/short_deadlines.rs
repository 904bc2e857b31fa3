//! Callers whose deadlines end before Redis can be known to be unreachable: they neither keep a dead connection alive
//! nor harm others.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::task::JoinSet;
use tollgate::deadpool_redis::{Manager, Pool, Runtime};

use super::*;

/// A new connection would work at once, but no caller waits long enough to find out.
#[tokio::test]
async fn a_dead_connection_is_replaced_although_no_caller_waits_for_it() {
    let server = Server::start();
    let proxy = Proxy::to(server.port()).await;
    let pool =
        Pool::builder(Manager::new(proxy.url()).expect("an address")).max_size(1).runtime(Runtime::Tokio1).build();
    let rule = rule("gcra 100000/1d", OnError::Closed);
    for (what, redis, deadline) in [
        ("by an address", redis(&proxy.url()), Duration::from_secs(5)),
        ("with a short deadline", redis(&proxy.url()), Duration::from_millis(15)),
        ("of a pool", Redis::with_pool(pool.expect("a pool")), Duration::from_secs(5)),
    ] {
        let limiter = Limiter::builder(redis.clone()).deadline(deadline).build();
        answered_again(&limiter, &rule, "key").await;
        proxy.swallow_those_there();
        let decision = wait_for_value(async || {
            let answer = tokio::time::timeout(Duration::from_millis(20), limiter.acquire(&rule, "key")).await;
            answer.ok()?.ok()
        });
        assert_eq!(decision.await.by, DecidedBy::Redis, "{what}");
        // More than two where the machine stood still for long enough.
        assert!(redis.connections() >= 2 && redis.breaker() == BreakerState::Closed, "{what}");
    }
}

/// All wait on one connection that is killed: that is one failure, and callers not yet sent are unaffected.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_connection_under_many_callers_fails_those_on_the_wire_alone() {
    let server = Server::start();
    let redis = redis(&server.tcp_url());
    let limiter = Limiter::builder(redis.clone()).deadline(PATIENCE).build();
    let rule = rule("gcra 1000000/1d", OnError::Closed);
    let over = Arc::new(AtomicBool::new(false));
    let mut callers = JoinSet::new();
    for _ in 0..64 {
        let (limiter, rule, over) = (limiter.clone(), rule.clone(), Arc::clone(&over));
        callers.spawn(async move {
            let (mut answered, mut errors) = (0_u64, Vec::new());
            while !over.load(Ordering::Relaxed) {
                match acquire(&limiter, &rule, "key").await {
                    Ok(_) => answered += 1,
                    Err(error) => errors.push(error),
                }
                // An error that comes at once must not keep the runtime from ending.
                tokio::task::yield_now().await;
            }
            (answered, errors)
        });
    }
    const KILLS: usize = 10;
    for killed in 1..=KILLS {
        until(|| redis.connections() >= killed as u64).await;
        tokio::time::sleep(Duration::from_millis(20)).await;
        run(&server, &["CLIENT", "KILL", "TYPE", "normal"]);
        until(|| redis.connections() > killed as u64).await;
        assert_eq!(redis.breaker(), BreakerState::Closed);
    }
    over.store(true, Ordering::Relaxed);
    let (answered, errors): (Vec<_>, Vec<_>) = callers.join_all().await.into_iter().unzip();
    let errors: Vec<_> = errors.into_iter().flatten().collect();
    for error in &errors {
        assert_eq!((error.kind().name(), error.charged()), ("disconnected", Charged::Unknown), "{error}");
    }
    assert!(answered.iter().all(|answered| *answered > 0));
    // A caller is on the wire once at a time.
    assert!(errors.len() <= 64 * KILLS, "{}", errors.len());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn callers_with_short_deadlines_cost_those_with_long_ones_nothing() {
    let server = Server::start();
    let proxy = Proxy::to(server.port()).await;
    let redis = redis(&proxy.url());
    let limiter = Limiter::new(redis.clone());
    let rule = rule("gcra 1000000/1d", OnError::Closed);
    answered_again(&limiter, &rule, "key").await;
    proxy.delay(Duration::from_millis(30));
    let mut patient = JoinSet::new();
    let over = Arc::new(AtomicBool::new(false));
    let mut hasty = JoinSet::new();
    for caller in 0..64 {
        let (limiter, rule, over) = (limiter.clone(), rule.clone(), Arc::clone(&over));
        hasty.spawn(async move {
            let key = format!("hasty {caller}");
            let mut late = 0;
            while !over.load(Ordering::Relaxed) {
                let request = Request::new(&key).deadline(Duration::from_millis(20));
                late += usize::from(limiter.acquire(&rule, request).await.is_err());
                tokio::task::yield_now().await;
            }
            late
        });
    }
    for caller in 0..64 {
        let (limiter, rule) = (limiter.clone(), rule.clone());
        patient.spawn(async move {
            let key = format!("patient {caller}");
            for _ in 0..10 {
                let request = Request::new(&key).deadline(Duration::from_secs(5));
                limiter.acquire(&rule, request).await.expect("a decision");
            }
        });
    }
    in_time(patient.join_all()).await;
    over.store(true, Ordering::Relaxed);
    assert!(hasty.join_all().await.into_iter().sum::<usize>() > 0);
    assert_eq!(redis.breaker(), BreakerState::Closed);
}

/// No unsent call is reported as a broken connection, or as possibly charged.
#[tokio::test]
async fn calls_still_queued_when_redis_falls_silent_are_reported_as_never_sent() {
    let server = Server::start();
    let redis = redis(&server.tcp_url());
    let limiter = Limiter::builder(redis.clone()).deadline(PATIENCE).build();
    let rule = rule("gcra 1000/30d", OnError::Closed);
    let before = answered_again(&limiter, &rule, "key").await.remaining;
    server.signal("-STOP");
    // One alone, one in a batch, and the others behind them.
    let mut calls = JoinSet::new();
    for number in 0..20 {
        let (limiter, rule) = (limiter.clone(), rule.clone());
        calls.spawn(async move { limiter.acquire(&rule, "key").await });
        if number < 2 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    until(|| redis.breaker() != BreakerState::Closed).await;
    server.signal("-CONT");
    let (mut taken, mut unsent) = (0, 0);
    for answer in in_time(calls.join_all()).await {
        match answer {
            Ok(decision) => taken += u64::from(decision.allowed),
            Err(error) => {
                assert_eq!((error.kind().name(), error.charged()), ("unreachable", Charged::No), "{error}");
                assert!(error.retry_in().is_some());
                unsent += 1;
            }
        }
    }
    assert!(unsent > 0);
    assert_eq!(answered_again(&limiter, &rule, "key").await.remaining, before - taken - 1);
}

#[tokio::test]
async fn an_empty_or_dropped_call_leaves_the_breakers_probe_to_others() {
    let mut server = Server::start();
    let redis = redis(&server.tcp_url());
    let limiter = Limiter::builder(redis.clone()).deadline(PATIENCE).build();
    let two = rule("gcra 1000/1d, fixed-window 1000/1h", OnError::Closed);
    let rule = rule("gcra 1000/1d", OnError::Closed);
    opened(&mut server, &redis, &limiter, &rule).await;
    let alone = in_time(limiter.acquire_many(&two, ["a", "b"])).await;
    assert!(alone.iter().any(Result::is_ok), "decisions that can't be made together look as well: {alone:?}");
    for given_up in [false, true] {
        opened(&mut server, &redis, &limiter, &rule).await;
        if given_up {
            let mut look = Box::pin(limiter.acquire(&rule, "key"));
            let polled = std::future::poll_fn(|context| std::task::Poll::Ready(look.as_mut().poll(context))).await;
            assert!(polled.is_pending() && redis.breaker() == BreakerState::Probing);
        } else {
            assert!(in_time(limiter.acquire_many(&rule, Vec::<&str>::new())).await.is_empty());
        }
        assert!(decided(&limiter, &rule, "key").await.allowed, "given up: {given_up}");
        assert_eq!(redis.breaker(), BreakerState::Closed);
    }
}

/// A caller without time is sent neither alone nor with others, also one that comes back late to its future.
#[tokio::test]
async fn a_call_whose_deadline_has_passed_is_not_sent() {
    let server = Server::start();
    let limiter = Limiter::builder(redis(&server.tcp_url())).deadline(PATIENCE).build();
    let rule = rule("gcra 1000/1d", OnError::Closed);
    decided(&limiter, &rule, "other").await;
    for _ in 0..20 {
        let none = limiter.acquire(&rule, Request::new("key").deadline(Duration::ZERO)).await;
        assert_eq!(none.expect_err("no time").charged(), Charged::No);
    }
    // Requests with an id are decided alone, and prepared with thousands of others.
    let keys: Vec<_> = (0..5_000).map(|key| format!("user:{key}")).collect();
    let requests = keys.iter().enumerate().map(|(at, key)| {
        let request = Request::new(key).deadline(Duration::from_millis(30));
        if at == 0 { request.id("id") } else { request }
    });
    let blocked = async {
        // The first 4,096 are prepared and the caller has let others have their turn.
        std::thread::sleep(Duration::from_millis(60));
    };
    let (answers, ()) = futures_util::future::join(limiter.acquire_many(&rule, requests), blocked).await;
    assert!(answers[0].as_ref().is_err_and(|error| error.charged() == Charged::No), "{:?}", answers[0]);
    assert_eq!(limiter.peek(&rule, "user:0").await.expect("a decision").remaining, 1000);
    assert_eq!(limiter.peek(&rule, "key").await.expect("a decision").remaining, 1000);
}

/// A hundred callers of a millisecond probe all the time, and none waits for its answer.
#[tokio::test]
async fn callers_below_a_round_trip_keep_nobody_from_a_redis_that_is_back() {
    let mut server = Server::start();
    let proxy = Proxy::to(server.port()).await;
    proxy.delay(Duration::from_millis(5));
    let redis = redis(&proxy.url());
    let limiter = Limiter::new(redis.clone());
    let rule = rule("gcra 1000000/1d", OnError::Closed);
    answered_again(&limiter, &rule, "key").await;
    let over = Arc::new(AtomicBool::new(false));
    let mut hasty = JoinSet::new();
    for caller in 0..100 {
        let (limiter, rule, over) = (limiter.clone(), rule.clone(), Arc::clone(&over));
        hasty.spawn(async move {
            let key = format!("hasty {caller}");
            while !over.load(Ordering::Relaxed) {
                let _ = limiter.acquire(&rule, Request::new(&key).deadline(Duration::from_millis(1))).await;
                tokio::time::sleep(Duration::from_millis(4)).await;
            }
        });
    }
    server.stop();
    let patient = async || {
        tokio::time::sleep(Duration::from_secs(1)).await;
        limiter.acquire(&rule, Request::new("patient").deadline(Duration::from_secs(5))).await
    };
    for _ in 0..3 {
        patient().await.expect_err("stopped");
    }
    server.start_again(&[]);
    server.wait_until_it_answers();
    // One would do, on a machine that stands still for no second.
    let mut answers = Vec::new();
    while answers.len() < 4 && !answers.last().is_some_and(Result::is_ok) {
        answers.push(patient().await);
    }
    assert!(answers.last().is_some_and(Result::is_ok), "{answers:?}");
    over.store(true, Ordering::Relaxed);
    hasty.join_all().await;
}
