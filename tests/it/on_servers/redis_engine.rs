//! What the Redis engine does besides deciding: its round trips, what it needs of a server, what keys it spells, and
//! how it fails. One test runs in real time: that of expiry.

use std::net::TcpListener;
use std::time::{Duration, Instant, SystemTime};

use futures_util::future::join_all;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use tollgate::deadpool_redis::{Manager, Pool, Runtime};
use tollgate::redis::cmd;
use tollgate::{Charged, ErrorKind, Limiter, Redis, Request, RetryAfter};
use tollgate_testing::engines::Engine;
use tollgate_testing::fake_redis::fake_redis_with_hello;
use tollgate_testing::histories::{beginning, steps};
use tollgate_testing::limits::any_limit;
use tollgate_testing::polling::{PATIENCE, wait_until};
use tollgate_testing::redis_server::{Server, free_port, patient};
use tollgate_testing::rules::{FIVE, rule};

#[tokio::test]
async fn a_decision_is_one_round_trip() {
    let server = Server::start();
    let limiter = limiter(&server.url());
    for rule in FIVE.map(rule) {
        limiter.acquire(&rule, "first").await.expect("a decision");
        server.reset_command_counts();
        for n in 0..20 {
            limiter.acquire(&rule, &format!("k{}", n % 3)).await.expect("a decision");
        }
        for _ in 0..5 {
            limiter.peek(&rule, "k0").await.expect("a decision");
            limiter.inspect(&rule, "k0").await.expect("a state");
        }
        limiter.reset(&rule, "k0").await.expect("an answer");
        let commands = server.commands();
        assert_eq!(commands["evalsha"], (21, 0), "{rule}");
        assert_eq!(commands["evalsha_ro"], (10, 0), "{rule}");
        // Besides what the scripts call and this test's own commands, nothing: no PING, no UNWATCH, no EVAL, no SELECT.
        let scripts = "get getrange strlen exists set setrange time pttl del pexpire pexpireat";
        // HELLO is the connection's own question, where an answer takes long.
        let expected: Vec<_> = scripts.split(' ').chain(["info", "hello"]).collect();
        let others: Vec<_> = commands.keys().filter(|name| !expected.contains(&name.as_str())).collect();
        assert!(others.iter().all(|name| name.starts_with("evalsha") || name.starts_with("config|")), "{others:?}");
    }
}

#[tokio::test]
async fn a_connection_that_takes_longer_than_a_deadline_serves_the_next_call() {
    let server = Server::start();
    let limiter = limiter(&server.tcp_url());
    let rule = rule("gcra 5/10s");
    server.signal("-STOP");
    let error = limiter.acquire(&rule, Request::new("key").deadline(Duration::from_millis(50))).await.unwrap_err();
    server.signal("-CONT");
    assert!(
        error.kind() == ErrorKind::Deadline && error.is_unreachable() && error.charged() == Charged::No,
        "{error:?}"
    );
    server.reset_command_counts();
    assert!(limiter.acquire(&rule, "key").await.expect("a decision").allowed);
    let connects = server.commands().get("hello").map_or(0, |(calls, _)| *calls);
    // More where the first was taken for one that is stuck.
    assert!(connects >= 1, "the first connect went on");
}

#[tokio::test]
async fn a_wrong_password_is_an_error_of_its_own_and_never_shown() {
    let server = Server::with(&["--requirepass", "correct"]);
    let with = |password: &str| server.tcp_url().replace("redis://", &format!("redis://{password}"));
    for url in [with(":hunter2@"), with("somebody:hunter2@"), with("")] {
        let limiter = limiter(&url);
        let error = limiter.acquire(&rule("gcra 5/10s"), "key").await.unwrap_err();
        assert!(error.kind() == ErrorKind::Authentication && error.charged() == Charged::No, "{error:?}");
        let shown = format!("{error} {error:?} {limiter:?}");
        assert!(!shown.contains("hunter2"), "{shown}");
    }
    for url in
        ["redis://somebody:hunter2@host:port/", "rediss://:hunter2@host/db", "hunter2@", "unix://?pass=hunter2&db=x"]
    {
        let error = Redis::open(url).expect_err(url);
        assert!(error.is_input(), "{error:?}");
        assert!(!format!("{error} {error:?}").contains("hunter2"), "{error}");
    }
    let limiter = limiter(&with(":correct@"));
    assert!(limiter.acquire(&rule("gcra 5/10s"), "key").await.expect("a decision").allowed);
}

#[tokio::test]
async fn a_closed_port_is_unreachable_at_once() {
    let limiter = limiter(&format!("redis://127.0.0.1:{}", free_port()));
    let started = Instant::now();
    let error = limiter.acquire(&rule("gcra 5/10s"), "key").await.unwrap_err();
    assert!(error.is_unreachable() && error.kind() != ErrorKind::Deadline, "{error:?}");
    assert_eq!(error.charged(), Charged::No);
    assert!(started.elapsed() < PATIENCE / 3, "after {:?}", started.elapsed());
}

#[tokio::test]
async fn a_server_that_accepts_and_never_answers_is_unreachable_by_the_deadline() {
    let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
    let limiter = limiter(&format!("redis://{}", silent.local_addr().expect("its address")));
    let deadline = Duration::from_millis(100);
    let started = Instant::now();
    let error = limiter.acquire(&rule("gcra 5/10s"), Request::new("key").deadline(deadline)).await.unwrap_err();
    assert!(error.kind() == ErrorKind::Deadline && error.is_unreachable(), "{error:?}");
    assert_eq!(error.charged(), Charged::No);
    assert!((deadline..PATIENCE / 3).contains(&started.elapsed()), "after {:?}", started.elapsed());
}

#[tokio::test]
async fn a_frozen_server_leaves_the_charge_unknown_and_later_replies_matched() {
    let server = Server::start();
    let limiter = limiter(&server.url());
    let number = |n: u64| (rule(&format!("gcra {n}/30d")), n.to_string());
    let (first, key) = number(1000);
    limiter.acquire(&first, &key).await.expect("a decision");
    server.signal("-STOP");
    // All at once, since the silence of the connection is noticed after a quarter of a second; and with as long a
    // deadline as that allows, since each is to be sent.
    let errors = (1..=20).map(async |n| {
        let (rule, key) = number(n);
        let request = Request::new(&key).deadline(Duration::from_millis(200));
        limiter.acquire(&rule, request).await.unwrap_err()
    });
    for error in join_all(errors).await {
        assert!(error.kind() == ErrorKind::Deadline && !error.is_unreachable(), "{error:?}");
        assert_eq!(error.charged(), Charged::Unknown);
    }
    server.signal("-CONT");
    for n in (1..=20).chain(1000..=1001) {
        let (rule, key) = number(n);
        let decision = limiter.peek(&rule, &key).await.expect("a decision");
        assert_eq!(decision.capacity, n, "another caller's answer");
        assert!(n - decision.remaining <= 1, "charged twice: {decision:?}");
    }
}

#[tokio::test]
async fn a_server_restarted_empty_costs_one_error_at_most() {
    let mut server = Server::start();
    let limiter = limiter(&server.url());
    let rule = rule("gcra 5/30d");
    limiter.acquire(&rule, "key").await.expect("a decision");
    server.restart();
    let mut taken = 0;
    if let Err(error) = limiter.acquire(&rule, "key").await {
        assert!(matches!(error.charged(), Charged::No | Charged::Unknown), "{error:?}");
    } else {
        taken += 1;
    }
    for _ in 0..3 {
        taken += 1;
        assert_eq!(limiter.acquire(&rule, "key").await.expect("a decision").remaining, 5 - taken);
    }
}

#[tokio::test]
async fn a_replica_refuses_which_is_no_denial() {
    let server = Server::start();
    let limiter = limiter(&server.url());
    let rule = rule("gcra 5/30d");
    limiter.acquire(&rule, "key").await.expect("a decision");
    let become_replica_of = |host: &str, port: &str| {
        cmd("REPLICAOF").arg(host).arg(port).exec(&mut server.connection()).expect("another role");
    };
    become_replica_of("127.0.0.1", &free_port().to_string());
    for _ in 0..2 {
        let error = limiter.acquire(&rule, "key").await.unwrap_err();
        assert!(error.kind() == ErrorKind::NotNow && error.to_string().contains("READONLY"), "{error:?}");
        assert_eq!(error.charged(), Charged::No);
        assert_eq!(limiter.peek(&rule, "key").await.expect("a replica can be read").remaining, 4);
    }
    become_replica_of("NO", "ONE");
    assert_eq!(limiter.acquire(&rule, "key").await.expect("a decision").remaining, 3);
}

/// By fakes, since neither Redis 6 nor a proxy is available everywhere.
#[tokio::test]
async fn a_server_older_than_redis_7_is_unsupported() {
    let six = "*4\r\n$6\r\nserver\r\n$5\r\nredis\r\n$7\r\nversion\r\n$6\r\n6.2.14\r\n";
    let proxy = "*4\r\n$6\r\nserver\r\n$17\r\nenvoy-redis-proxy\r\n$7\r\nversion\r\n$5\r\n6.0.0\r\n";
    let none = "-ERR unknown command `HELLO`, with args beginning with: \r\n";
    for (hello, named) in [(six, "got 6.2.14"), (proxy, "got envoy-redis-proxy 6.0.0"), (none, "older than 6.2")] {
        let limiter = limiter(&fake_redis_with_hello(hello));
        let error = limiter.acquire(&rule("gcra 5/10s"), "key").await.unwrap_err();
        assert!(error.kind() == ErrorKind::Unsupported && error.charged() == Charged::No, "{error:?}");
        let message = error.to_string();
        assert!(message.contains(named) && message.contains("7.0"), "{message}");
    }
}

#[test]
fn both_protocols_give_the_same_answers() {
    let (two, mut three) = (Engine::redis(), Engine::redis());
    let url = format!("{}?protocol=resp3", three.server.as_ref().expect("a redis").url());
    three.limiter = limiter(&url);
    let config = Config { cases: 100, failure_persistence: None, max_global_rejects: 100_000, ..Config::default() };
    let outcome = TestRunner::new(config).run(&(any_limit(), beginning(), steps(1..=12)), |(limit, begin, steps)| {
        let (two, three) = (two.subject(limit.clone()), three.subject(limit));
        let mut now = begin;
        for step in steps {
            let (cost, then) = step.aim(&two, now);
            prop_assert_eq!(two.peek(cost, then), three.peek(cost, then));
            prop_assert_eq!(two.acquire(cost, then), three.acquire(cost, then));
            prop_assert_eq!(two.state(then), three.state(then));
            now = then;
        }
        Ok(())
    });
    outcome.unwrap_or_else(|failure| panic!("{failure}"));
    let clients: String =
        cmd("CLIENT").arg("LIST").query(&mut three.server.expect("a redis").connection()).expect("it");
    assert!(clients.contains("resp=3"), "{clients}");
}

#[tokio::test]
async fn a_pool_of_the_callers_own_is_not_starved() {
    let server = Server::start();
    let manager = Manager::new(server.url()).expect("a good address");
    let pool = Pool::builder(manager).max_size(1).runtime(Runtime::Tokio1).build().expect("a pool");
    let limiter = Limiter::builder(Redis::with_pool(pool.clone())).deadline(PATIENCE).build();
    assert_eq!(limiter.acquire(&rule("gcra 5/30d"), "key").await.expect("a decision").remaining, 4);
    let mut connection = pool.get().await.expect("its only place is free");
    assert_eq!(limiter.acquire(&rule("gcra 5/30d"), "key").await.expect("a decision").remaining, 3);
    cmd("PING").exec_async(&mut connection).await.expect("an answer");
}

#[tokio::test]
async fn keys_are_any_bytes_and_never_share_a_count() {
    let server = Server::start();
    let limiter = limiter(&server.url());
    let rule = rule("gcra 100/30d");
    let (mut long, plain) =
        (vec![b'x'; 1 << 20], ["user:42", "{", "}", "{}", "a}{b", "{a}b", "%", "%7b", "#", "k\n", "k\0"]);
    let mut keys: Vec<Vec<u8>> = plain.iter().map(|key| key.as_bytes().to_vec()).collect();
    keys.extend([vec![0], vec![0, 0], vec![0xff], vec![0xc3, 0x28], b"k".to_vec(), b"K".to_vec(), b"k ".to_vec()]);
    keys.push(long.clone());
    long[(1 << 20) - 1] = b'y';
    keys.push(long);
    for (units, key) in (1..).zip(&keys) {
        let decision = limiter.acquire(&rule, Request::new(key).cost(units)).await.expect("a decision");
        assert_eq!(decision.remaining, 100 - units, "{:?}", String::from_utf8_lossy(&key[..key.len().min(9)]));
    }
    for (units, key) in (1..).zip(&keys) {
        assert_eq!(limiter.peek(&rule, key).await.expect("a decision").remaining, 100 - units);
    }
    let stored: Vec<Vec<u8>> =
        cmd("KEYS").arg("tollgate:{*}:test/token-bucket-30d").query(&mut server.connection()).expect("");
    assert_eq!(stored.len(), keys.len());
    assert!(stored.iter().all(|key| key.len() < 200 && key.iter().filter(|byte| b"{}".contains(byte)).count() == 2));

    let error = limiter.acquire(&rule, "").await.unwrap_err();
    assert!(error.is_input() && error.charged() == Charged::No, "{error:?}");
    for prefix in ["", "a{b", "a}b", "{a}"] {
        assert!(limiter.to_builder().prefix(prefix).unwrap_err().is_input(), "{prefix:?}");
    }
    let elsewhere = limiter.to_builder().prefix("elsewhere").expect("a prefix").build();
    assert_eq!(elsewhere.peek(&rule, "user:42").await.expect("a decision").remaining, 100);
}

/// The one test in real time: all others say what time it is.
#[tokio::test]
async fn in_real_time_a_bucket_refills_and_a_key_expires() {
    let server = Server::start();
    let limiter = limiter(&server.url());
    let bucket = rule("token-bucket 1/50ms");
    let started = Instant::now();
    assert!(limiter.acquire(&bucket, "key").await.expect("a decision").allowed);
    let denied = loop {
        let decision = limiter.acquire(&bucket, "key").await.expect("a decision");
        match decision.retry_after {
            RetryAfter::After(wait) => assert!(wait <= Duration::from_millis(50), "{wait:?}"),
            _ => break decision,
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
        assert!(started.elapsed() < PATIENCE, "it never refills");
    };
    assert!(denied.allowed && started.elapsed() >= Duration::from_millis(50));

    for text in
        ["fixed-window 3/200ms start first-hit", "gcra 3/200ms", "sliding-window 3/200ms", "sliding-log 3/200ms"]
    {
        let (rule, used) = (rule(text), Instant::now());
        assert!(limiter.acquire(&rule, "gone").await.expect("a decision").allowed);
        let key = limiter.keys(&rule, "gone").expect("keys").remove(0);
        let mut redis = server.connection();
        let mut exists = || cmd("EXISTS").arg(&key).query::<bool>(&mut redis).expect("an answer");
        let longest = rule.limits().next().expect("a limit").longest_reset();
        assert!(exists() || used.elapsed() >= longest, "{text}");
        while exists() {
            tokio::time::sleep(Duration::from_millis(5)).await;
            assert!(used.elapsed() < PATIENCE + longest, "{text}: still there");
        }
    }
}

fn limiter(url: &str) -> Limiter {
    patient(url)
}

/// By what the server says of itself, whichever is on the PATH.
#[tokio::test]
async fn a_server_that_is_too_old_is_refused_and_every_other_decides() {
    let server = Server::start();
    let info: String = cmd("INFO").arg("server").query(&mut server.connection()).expect("information");
    let version = info.lines().find_map(|line| line.strip_prefix("redis_version:")).expect("a version");
    let decision = limiter(&server.url()).acquire(&rule("gcra 5/30d"), "key").await;
    if version.starts_with(['2', '3', '4', '5', '6']) {
        let error = decision.expect_err("too old");
        let message = error.to_string();
        assert!(error.kind() == ErrorKind::Unsupported && message.contains("expected Redis 7.0 or newer"), "{message}");
        assert!(message.ends_with(&format!("got {version}")), "{message}");
    } else {
        assert_eq!(decision.expect("a decision").remaining, 4);
    }
}

/// As after a clock was set back a little, or a call at a later time: nothing has refilled until that time.
#[tokio::test]
async fn a_state_that_lies_a_little_ahead_of_the_servers_time_is_decided_as_of_its_own() {
    let server = Server::start();
    let limiter = patient(&server.url());
    for text in ["gcra 5/5h", "token-bucket 5/5h max-debt 3", "fixed-window 5/5h start first-hit", "sliding-log 5/5h"] {
        let rule = rule(text).named(&text[..4]).expect("a name");
        let ahead = SystemTime::now() + Duration::from_secs(90 * 60);
        assert!(limiter.acquire(&rule, Request::new("key").cost(2).at(ahead)).await.expect("a decision").allowed);
        let denied = limiter.acquire(&rule, Request::new("key").cost(4)).await.expect("a decision");
        assert_eq!((denied.allowed, denied.remaining), (false, 3), "{text}");
        let allowed = limiter.acquire(&rule, Request::new("key").cost(3)).await.expect("a decision");
        assert_eq!((allowed.allowed, allowed.remaining), (true, 0), "{text}");
    }
}

/// Such as after a clock was set back. Of plain calls, the short way must not answer by it.
#[tokio::test]
async fn a_state_that_lies_far_ahead_of_the_servers_time_counts_from_now() {
    let server = Server::start();
    let limiter = patient(&server.url());
    let period = Duration::from_secs(5 * 3600);
    for text in ["token-bucket 5/5h", "fixed-window 5/5h", "fixed-window 5/5h start first-hit", "sliding-window 5/5h"] {
        let rule = rule(text).named(&text[..4]).expect("a name");
        let request = Request::new(text).cost(5);
        let ahead = limiter.acquire(&rule, request.at(SystemTime::now() + 10 * period)).await;
        assert!(ahead.expect("a decision").allowed, "{text}");
        let denied = limiter.acquire(&rule, text).await.expect("a decision");
        let waits = [denied.reset_after, denied.retry_after.duration().unwrap_or_default()];
        // Of two windows that slide, what is counted reaches into the second.
        assert!(!denied.allowed && waits.iter().all(|wait| *wait <= 2 * period), "{text}: {waits:?}");
        assert!(waits[1] <= period || text.starts_with("sliding"), "{text}: {waits:?}");
    }
}

/// Of a log, also by the short way of plain calls.
#[tokio::test]
async fn a_denied_cost_of_two_waits_until_two_entries_have_left() {
    let server = Server::start();
    let limiter = patient(&server.url());
    let (rule, minute) = (rule("sliding-log 3/1h"), Duration::from_secs(60));
    for ago in [20, 10, 1] {
        let taken = limiter.acquire(&rule, Request::new("key").at(SystemTime::now() - ago * minute)).await;
        assert!(taken.expect("a decision").allowed);
    }
    for (cost, minutes) in [(1, 39..=40), (2, 49..=50), (3, 58..=59)] {
        let denied = limiter.acquire(&rule, Request::new("key").cost(cost)).await.expect("a decision");
        let wait = denied.retry_after.duration().expect("a wait");
        assert!(!denied.allowed && minutes.contains(&(wait.as_secs() / 60)), "{cost}: {wait:?}");
    }
}

/// Denied calls bring it back too: it doesn't stay there until its time comes.
#[tokio::test]
async fn a_state_that_lies_far_ahead_of_the_servers_time_ends_a_period_from_now() {
    let server = Server::start();
    let limiter = patient(&server.url());
    for text in [
        "token-bucket 5/200ms",
        "fixed-window 5/200ms",
        "fixed-window 5/200ms start first-hit",
        "sliding-window 5/200ms",
        "sliding-log 5/200ms",
        "token-bucket 5/200ms, fixed-window 1000000/1h",
        "fixed-window 5/200ms, token-bucket 1000000/1h",
    ] {
        let rule = rule(text).named(&text[..4]).expect("a name");
        let ahead = SystemTime::now() + Duration::from_secs(86_400);
        let taken = limiter.acquire(&rule, Request::new(text).cost(5).at(ahead)).await.expect("a decision");
        assert!(taken.allowed, "{text}");
        wait_until(&format!("a unit of {text}"), async || {
            limiter.acquire(&rule, text).await.expect("a decision").allowed
        })
        .await;
    }
}

/// Numbers of which a product is above 2^53 are decided in coarser ticks, also by the short ways.
#[tokio::test]
async fn in_coarse_ticks_a_day_of_units_comes_back_in_a_day() {
    let server = Server::start();
    let limiter = patient(&server.url());
    for (text, units, too_many) in [
        ("token-bucket 999983/1d burst 1000000000", 1_000_000, 1_000_000_000),
        ("sliding-window 999983/1d", 400_000, 400_000),
    ] {
        let rule = rule(text).named(&text[..5]).expect("a name");
        let request = || Request::new("key").cost(units);
        let first = limiter.acquire(&rule, request()).await.expect("a decision");
        let second = limiter.acquire(&rule, request()).await.expect("a decision");
        // In what such a test takes at most, no more than some thousand come back.
        let taken = first.remaining - second.remaining;
        assert!((units - 5000..=units).contains(&taken), "{text}: {taken}");
        let reset = second.reset_after;
        assert!(reset > Duration::from_secs(23 * 3600), "{text}: {reset:?}");
        // The state is as of a tick, of some 10 ms, which may lie ahead; then no short way answers.
        tokio::time::sleep(Duration::from_millis(30)).await;
        let denied = limiter.acquire(&rule, Request::new("key").cost(too_many)).await.expect("a decision");
        let waits = [denied.reset_after, denied.retry_after.duration().expect("a wait")];
        assert!(!denied.allowed && waits.iter().all(|wait| *wait > Duration::from_secs(3600)), "{text}: {waits:?}");
    }
}

/// `MULTI` and `EXEC` are answered too, and by as many answers the next caller's would be off.
#[tokio::test]
async fn an_atomic_pipeline_of_a_services_own_is_refused() {
    let server = Server::start();
    let limiter = patient(&server.url());
    let mut commands = tollgate::redis::pipe();
    commands.set("key", 1).get("key");
    let answer = limiter.engine().query::<(String, u64)>(b"key", &commands, PATIENCE).await.expect("answers");
    assert_eq!(answer, Some(("OK".to_owned(), 1)));
    let refused = limiter.engine().query::<(String, u64)>(b"key", commands.atomic(), PATIENCE).await;
    let refused = refused.expect_err("an atomic pipeline");
    assert!(
        refused.is_input() && refused.to_string().starts_with("query: an atomic pipeline can't be sent"),
        "{refused}"
    );
}
