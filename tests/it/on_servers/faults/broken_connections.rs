//! Connections that break, and callers that give up.

use std::sync::atomic::{AtomicBool, Ordering};

use tollgate::deadpool_redis::{Manager, Pool, Runtime};

use super::*;

/// Connections are killed under load, and no more is admitted than the limit.
#[tokio::test]
async fn killed_connections_leave_the_charge_unknown_and_admit_nothing_twice() {
    // Few enough that none comes back while the test runs.
    const UNITS: u64 = 10_000;
    let server = Server::start();
    let limiter = limiter(&server.tcp_url()).to_builder().deadline(PATIENCE).build();
    let rule = rule(&format!("gcra {UNITS}/30d"), OnError::Closed);
    let over = std::sync::Arc::new(AtomicBool::new(false));
    let killer = {
        let (mut connection, over) = (server.connection(), std::sync::Arc::clone(&over));
        std::thread::spawn(move || {
            let mut rounds = 0;
            while !over.load(Ordering::Relaxed) {
                rounds += 1;
                cmd("CLIENT").arg(&["KILL", "TYPE", "normal"]).exec(&mut connection).expect("killed");
                std::thread::sleep(Duration::from_millis(2));
            }
            rounds
        })
    };
    let (mut allowed, mut unknown, mut unsent) = (0, 0, 0);
    while allowed < 200 || unknown == 0 {
        let calls = (0..20).map(|_| acquire(&limiter, &rule, "key"));
        for answer in futures_util::future::join_all(calls).await {
            match answer {
                Ok(decision) => allowed += u64::from(decision.allowed),
                Err(error) if error.charged() == Charged::Unknown => {
                    assert!(error.kind() == ErrorKind::Disconnected, "{error}");
                    unknown += 1;
                }
                Err(error) => {
                    assert_eq!((error.is_unreachable(), error.charged()), (true, Charged::No), "{error}");
                    unsent += 1;
                }
            }
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    over.store(true, Ordering::Relaxed);
    assert!(killer.join().expect("a thread") > 0);
    let left = answered_again(&limiter, &rule, "key").await.remaining;
    let charged = UNITS - 1 - left;
    let most = allowed + unknown;
    assert!(
        (allowed..=most).contains(&charged),
        "{charged} charged: {allowed} allowed, {unknown} unknown, {unsent} not"
    );
}

/// As a server with a `timeout` and many proxies do with a connection that is idle.
#[tokio::test]
async fn a_connection_that_is_closed_while_idle_costs_no_answer() {
    let server = Server::start();
    for protocol in ["resp2", "resp3"] {
        let limiter =
            limiter(&format!("{}?protocol={protocol}", server.tcp_url())).to_builder().deadline(PATIENCE).build();
        let rule = rule("gcra 1000/30d", OnError::Closed);
        for round in 0..20 {
            let decision = decided(&limiter, &rule, protocol).await;
            assert_eq!(decision.remaining, 999 - round, "charged once");
            run(&server, &["CLIENT", "KILL", "TYPE", "normal"]);
            tokio::time::sleep(Duration::from_millis(10)).await;
            // The runtime may wake this task before the connection's, which sees the end.
            tokio::task::yield_now().await;
        }
    }
}

#[tokio::test]
async fn a_connection_of_a_pool_that_is_closed_while_idle_costs_no_answer() {
    let server = Server::start();
    let manager = Manager::new(server.tcp_url()).expect("an address");
    let pool = Pool::builder(manager).max_size(1).runtime(Runtime::Tokio1).build().expect("a pool");
    let redis = Redis::with_pool(pool);
    let limiter = Limiter::builder(redis.clone()).deadline(PATIENCE).build();
    let rule = rule("gcra 1000/30d", OnError::Closed);
    for round in 0..2 {
        let decision = decided(&limiter, &rule, "key").await;
        assert_eq!(decision.remaining, 999 - round, "charged once");
        run(&server, &["CLIENT", "KILL", "TYPE", "normal"]);
        tokio::time::sleep(Duration::from_millis(1050)).await;
    }
    assert!(redis.connections() >= 2 && redis.breaker() == BreakerState::Closed);
}

/// Wherever a reply is cut short, every answer that arrives is the caller's own.
#[tokio::test]
async fn a_truncated_reply_reaches_no_other_caller() {
    let server = Server::start();
    let proxy = Proxy::to(server.port()).await;
    let rules: Vec<_> = (1..=20).map(|burst| rule(&format!("gcra 1/1d burst {burst}"), OnError::Closed)).collect();
    let mut disconnected = 0;
    for bytes in (0..400).step_by(7) {
        let limiter = limiter(&proxy.url());
        answered_again(&limiter, &rules[0], "a connection").await;
        proxy.cut_after(bytes);
        let key = format!("cut after {bytes}");
        let calls = rules.iter().map(|rule| acquire(&limiter, rule, &key));
        for (at, answer) in futures_util::future::join_all(calls).await.into_iter().enumerate() {
            match answer {
                Ok(decision) => assert_eq!(decision.capacity, at as u64 + 1),
                Err(error) => disconnected += u64::from(error.kind() == ErrorKind::Disconnected),
            }
        }
        proxy.cut_after(u64::MAX);
    }
    assert!(disconnected > 0);
}

#[tokio::test]
async fn a_black_hole_ends_at_deadlines_and_its_connection_is_given_up() {
    let server = Server::start();
    let proxy = Proxy::to(server.port()).await;
    let redis = redis(&proxy.url());
    let limiter = Limiter::builder(redis.clone()).deadline(DEADLINE).build();
    let closed = rule("gcra 1000/1d", OnError::Closed);
    decided(&limiter, &closed, "key").await;
    proxy.swallow(true);
    by_policy(&proxy.url(), &["deadline", "unreachable"]).await;
    while redis.breaker() == BreakerState::Closed {
        let error = acquire(&limiter, &closed, "key").await.expect_err("swallowed");
        assert!(error.kind() == ErrorKind::Deadline || error.charged() == Charged::No, "{error}");
    }
    proxy.swallow(false);
    // The old connection would work again: what counts is that another is made.
    answered_again(&limiter, &closed, "key").await;
    assert!(redis.connections() >= 2 && proxy.accepted() < 100, "{} of {}", redis.connections(), proxy.accepted());
}

#[tokio::test]
async fn callers_that_give_up_are_charged_at_most_once_and_later_replies_stay_matched() {
    const CALLS: u64 = 600;
    let server = Server::start();
    let limiter = limiter(&server.tcp_url()).to_builder().deadline(PATIENCE).build();
    let rule = rule("gcra 1000/30d", OnError::Closed);
    let mut answered = 0;
    for number in 0..CALLS / 20 {
        // Dropped between a poll and some hundred.
        let calls = (0..20).map(|caller| {
            let (limiter, rule) = (&limiter, &rule);
            async move {
                let mut call = std::pin::pin!(limiter.acquire(rule, "key"));
                for _ in 0..(number * 7 + caller * 5) % 60 {
                    if let std::task::Poll::Ready(decision) =
                        std::future::poll_fn(|context| std::task::Poll::Ready(call.as_mut().poll(context))).await
                    {
                        return u64::from(decision.expect("a decision").allowed);
                    }
                    tokio::task::yield_now().await;
                }
                0
            }
        });
        answered += futures_util::future::join_all(calls).await.into_iter().sum::<u64>();
    }
    let left = answered_again(&limiter, &rule, "key").await.remaining;
    let charged = 1000 - 1 - left;
    assert!((answered..=CALLS).contains(&charged), "{charged} charged, {answered} answered");
    assert!(answered < CALLS, "somebody gave up");
}

/// Callers with long deadlines wait for replies that never come, and delay no other.
#[tokio::test]
async fn a_long_wait_on_a_dead_connection_delays_no_other_caller() {
    let server = Server::start();
    let proxy = Proxy::to(server.port()).await;
    let limiter = limiter(&proxy.url());
    let rule = rule("gcra 1000/1d", OnError::Closed);
    decided(&limiter, &rule, "key").await;
    proxy.swallow(true);
    let before = proxy.requested();
    let patient: Vec<_> = (0..3)
        .map(|_| {
            let (limiter, rule) = (limiter.clone(), rule.clone());
            let request = Request::new("key").deadline(Duration::from_secs(3600));
            tokio::spawn(async move { limiter.acquire(&rule, request).await })
        })
        .collect();
    // What the first of them sends, and the batch of the others.
    until(|| proxy.requested() >= before + 2).await;
    proxy.swallow(false);
    answered_again(&limiter, &rule, "key").await;
    patient.iter().for_each(tokio::task::JoinHandle::abort);
}

/// As a program may have it that makes a runtime for each call and keeps it.
#[test]
fn a_runtime_that_is_no_longer_driven_does_not_stop_others_from_connecting() {
    let server = Server::start();
    let limiter = limiter(&server.tcp_url());
    let rule = rule("gcra 1000/1d", OnError::Closed);
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let (idle, driven) = (runtime(), runtime());
    server.signal("-STOP");
    idle.block_on(acquire(&limiter, &rule, "key")).expect_err("frozen");
    server.signal("-CONT");
    driven.block_on(answered_again(&limiter, &rule, "key"));
    drop(idle);
}

/// Of calls that leave together, one finds its script and is allowed, too few replicas have it, and as the other's
/// script is sent the connection breaks.
#[tokio::test]
async fn a_pipeline_that_breaks_while_a_script_is_loaded_confirms_nothing() {
    // Seven bytes each of what remains, the reset and the wait, and three of how many are allowed.
    let record = [8_i64, 1000, 0, 1].into_iter().zip([7, 7, 7, 3]);
    let allowed: Vec<u8> = record.flat_map(|(number, width)| number.to_le_bytes()[..width].to_vec()).collect();
    let evalshas = std::sync::atomic::AtomicUsize::new(0);
    let address = tollgate_testing::fake_redis::fake_redis(move |words| {
        let word = words[0].to_ascii_uppercase();
        match word.as_slice() {
            b"HELLO" => Some(b"*4\r\n$7\r\nversion\r\n$5\r\n7.0.0\r\n$5\r\nproto\r\n:2\r\n".to_vec()),
            // The fixed window's shape begins with its number.
            b"EVALSHA" if words.iter().any(|word| word.first() == Some(&2) && word.len() == 45) => {
                Some(b"-NOSCRIPT No matching script. Please use EVAL.\r\n".to_vec())
            }
            b"EVALSHA" => {
                if evalshas.fetch_add(1, Ordering::Relaxed) == 0 {
                    // The one that is alone, while the others are queued.
                    std::thread::sleep(Duration::from_millis(50));
                }
                Some([b"$24\r\n", allowed.as_slice(), b"\r\n"].concat())
            }
            b"EVAL" => None,
            b"WAIT" => Some(b":0\r\n".to_vec()),
            _ => Some(b"+OK\r\n".to_vec()),
        }
    });
    let confirmed = Redis::builder().confirmed_by(1, Duration::from_millis(10));
    let redis = confirmed.open(&address).expect("a good address");
    let limiter = Limiter::builder(redis).deadline(PATIENCE).build();
    let (found, missing) =
        (rule("gcra 9/1d", OnError::Closed), rule("fixed-window 9/1d start first-hit", OnError::Closed));
    let calls = [&found, &found, &missing].map(|rule| acquire(&limiter, rule, "key"));
    let answers = futures_util::future::join_all(calls).await;
    let classes: Vec<_> =
        answers.iter().map(|answer| answer.as_ref().expect_err("no confirmation").kind().name()).collect();
    assert_eq!(classes, ["unconfirmed", "unconfirmed", "disconnected"], "{answers:?}");
}

/// The connection becomes a black hole before a renewal.
#[tokio::test]
async fn a_renewal_that_is_lost_is_tried_again_within_the_ttl() {
    let server = Server::start();
    let proxy = Proxy::to(server.port()).await;
    let through = Limiter::new(redis(&proxy.url()));
    let direct = Limiter::builder(redis(&server.tcp_url())).deadline(PATIENCE).build();
    let rule = rule("concurrency 1 ttl 9s", OnError::Closed);
    let first = Request::new("key").deadline(PATIENCE);
    let permit = through.hold(&rule, first).await.expect("a decision").permit.expect("free").renewed();
    for _ in 0..2 {
        proxy.swallow_those_there();
        for _ in 0..120 {
            assert!(direct.hold(&rule, "key").await.expect("a decision").permit.is_none(), "it was lost");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
    permit.renew().await.expect("it is held");
}
