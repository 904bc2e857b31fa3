//! Permits: held by a value, given back when it goes, expired when its process does.

use std::time::{Duration, UNIX_EPOCH};

use tollgate::redis::cmd;
use tollgate::{Charged, Clock, Embedded, ErrorKind, Limiter, Permit, Redis, Request, RetryAfter, Rule};
use tollgate_testing::polling::{wait_for_value, wait_until};
use tollgate_testing::proxy::Proxy;
use tollgate_testing::redis_server::{Server, patient};
use tollgate_testing::rules::{by_own_id, rule};

const MINUTE: Duration = Duration::from_secs(60);

async fn held(limiter: &Limiter, rule: &Rule) -> Option<Permit> {
    limiter.hold(rule, "key").await.expect("a decision").permit
}

/// Waits until background tasks have left this many permits.
async fn comes_to(limiter: &Limiter, rule: &Rule, remaining: u64) {
    let left = async || limiter.peek(rule, "key").await.expect("a decision").remaining;
    wait_until(&format!("{remaining} remain"), async || left().await == remaining).await;
}

#[tokio::test]
async fn a_permit_goes_back_when_its_value_is_dropped_or_released() {
    let server = Server::start();
    for limiter in [Limiter::new(Embedded::new()), patient(&server.url())] {
        let rule = rule("concurrency 2 ttl 1h");
        let (one, other) = (held(&limiter, &rule).await.expect("one"), held(&limiter, &rule).await.expect("two"));
        assert!(held(&limiter, &rule).await.is_none());
        assert_eq!(other.release().await.expect("an answer").remaining, 1);
        drop(one);
        comes_to(&limiter, &rule, 2).await;
    }
}

#[tokio::test]
async fn a_hold_that_is_given_up_keeps_nothing() {
    let server = Server::start();
    let limiter = Limiter::builder(Redis::open(&server.url()).expect("a good address")).deadline(MINUTE).build();
    let rule = rule("concurrency 1 ttl 1h");
    drop(held(&limiter, &rule).await);
    comes_to(&limiter, &rule, 1).await;
    server.signal("-STOP");
    tokio::time::timeout(Duration::from_millis(50), limiter.hold(&rule, "key")).await.expect_err("gave up");
    server.signal("-CONT");
    comes_to(&limiter, &rule, 1).await;
}

#[tokio::test]
async fn a_denied_hold_gives_back_no_other_permits() {
    let limiter = Limiter::new(Embedded::new());
    let rule = rule("concurrency 1 ttl 1h");
    let permit = held(&limiter, &rule).await.expect("one");
    for _ in 0..10 {
        let denied = limiter.hold(&rule, "key").await.expect("a decision").into_result().expect_err("taken");
        assert!(matches!(denied.decision().retry_after, RetryAfter::After(wait) if wait > Duration::from_secs(3590)));
        tokio::task::yield_now().await;
    }
    assert_eq!(limiter.peek(&rule, "key").await.expect("a decision").remaining, 0);
    drop(permit);
}

#[tokio::test(start_paused = true)]
async fn a_permit_is_renewed_for_as_long_as_it_is_held() {
    let clock = Clock::new(UNIX_EPOCH);
    let limiter = Limiter::new(Embedded::with_clock(clock.clone()));
    let rule = rule("concurrency 1 ttl 3m");
    let permit = held(&limiter, &rule).await.expect("one").renewed();
    for _ in 0..10 {
        tokio::time::sleep(MINUTE).await;
        clock.advance(MINUTE);
        assert!(held(&limiter, &rule).await.is_none(), "still held");
    }
    permit.renew().await.expect("still held");
    drop(permit);
    comes_to(&limiter, &rule, 1).await;
}

#[tokio::test]
async fn a_permit_that_has_expired_is_known_to_be_lost() {
    let clock = Clock::new(UNIX_EPOCH);
    let limiter = Limiter::new(Embedded::with_clock(clock.clone()));
    let rule = rule("concurrency 1 ttl 1m");
    let permit = held(&limiter, &rule).await.expect("one");
    clock.advance(MINUTE);
    assert!(permit.renew().await.expect_err("expired").is_unknown_id());
    let _other = held(&limiter, &rule).await.expect("free again");
}

#[tokio::test(start_paused = true)]
async fn a_renewed_permit_says_when_it_is_lost() {
    let clock = Clock::new(UNIX_EPOCH);
    let limiter = Limiter::new(Embedded::with_clock(clock.clone()));
    let rule = rule("concurrency 1 ttl 3m");
    let not_renewed = held(&limiter, &rule).await.expect("one");
    assert!(tokio::time::timeout(60 * MINUTE, not_renewed.lost()).await.is_err() && !not_renewed.is_lost());
    not_renewed.release().await.expect("an answer");

    // Its key is forgotten: the next renewal notices, a third of the ttl later at most.
    let permit = held(&limiter, &rule).await.expect("one").renewed();
    assert!(tokio::time::timeout(2 * MINUTE, permit.lost()).await.is_err() && !permit.is_lost());
    limiter.reset(&rule, "key").await.expect("an answer");
    tokio::time::timeout(MINUTE, permit.lost()).await.expect("in time");
    assert!(permit.is_lost());
    permit.lost().await;

    // Its longest hold is over.
    let rule = rule.max_hold(2 * MINUTE).expect("a time");
    let permit = held(&limiter, &rule).await.expect("one").renewed();
    tokio::time::timeout(3 * MINUTE, permit.lost()).await.expect("in time");
    assert!(permit.is_lost());
}

#[tokio::test]
async fn a_permit_that_redis_has_not_renewed_for_a_ttl_is_lost() {
    let mut server = Server::start();
    let limiter = patient(&server.url());
    let rule = rule("concurrency 1 ttl 1s");
    let permit = held(&limiter, &rule).await.expect("one").renewed();
    assert!(!permit.is_lost());
    server.stop();
    tokio::time::timeout(MINUTE, permit.lost()).await.expect("in time");
    assert!(permit.is_lost());
}

/// While the runtime that renews it is blocked, or isn't driven.
#[test]
fn a_permit_is_lost_after_its_ttl_whatever_its_renewals_do() {
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let (server, rule) = (Server::start(), rule("concurrency 1 ttl 300ms"));
    let limiter = patient(&server.url());
    let first = runtime();
    let permit = first.block_on(async {
        let permit = held(&limiter, &rule).await.expect("one").renewed();
        std::thread::sleep(Duration::from_millis(300));
        assert!(permit.is_lost());
        permit
    });
    runtime().block_on(async { tokio::time::timeout(MINUTE, permit.lost()).await.expect("lost already") });
    drop(permit);

    let permit = first.block_on(async { wait_for_value(async || held(&limiter, &rule).await).await.renewed() });
    runtime().block_on(async { tokio::time::timeout(MINUTE, permit.lost()).await.expect("in time") });
}

/// At any moment: before it is sent, as it is written by another thread, and while its answer is on the way.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn holds_that_are_dropped_at_any_moment_leave_no_permit() {
    let server = Server::start();
    let limiter = patient(&server.tcp_url());
    let rule = rule("concurrency 1000 ttl 1h");
    // Redis has the script from here on: a call that has to be sent again may come after what gives it back.
    held(&limiter, &rule).await.expect("one").release().await.expect("an answer");
    let tasks = (0..8_u64).map(|seed| {
        let (limiter, rule) = (limiter.clone(), rule.clone());
        tokio::spawn(async move {
            let mut rng = fastrand::Rng::with_seed(seed);
            for _ in 0..1500 {
                let patience = Duration::from_micros(rng.u64(0..2000));
                let _ = tokio::time::timeout(patience, limiter.hold(&rule, "key")).await;
            }
        })
    });
    for task in tasks.collect::<Vec<_>>() {
        task.await.expect("no panic");
    }
    limiter.finish().await;
    assert_eq!(limiter.peek(&rule, "key").await.expect("a decision").remaining, 1000);
}

#[tokio::test(start_paused = true)]
async fn a_waiting_caller_is_served_when_a_permit_is_released_not_when_it_would_expire() {
    let limiter = Limiter::new(Embedded::new());
    let rule = rule("concurrency 1 ttl 1h");
    let permit = held(&limiter, &rule).await.expect("one");
    let waiter = tokio::spawn({
        let (limiter, rule) = (limiter.clone(), rule.clone());
        async move { limiter.hold_wait(&rule, "key", MINUTE).await.expect("a decision").permit.is_some() }
    });
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert!(!waiter.is_finished());
    permit.release().await.expect("an answer");
    assert!(waiter.await.expect("no panic"));
    let _one = held(&limiter, &rule).await;
    let denied = limiter.hold_wait(&rule, "key", Duration::from_millis(20)).await.expect("a decision");
    assert!(denied.permit.is_none());
}

#[tokio::test]
async fn a_permit_and_a_rate_are_taken_together_or_not_at_all_and_only_the_permit_comes_back() {
    let server = Server::start();
    for limiter in [Limiter::new(Embedded::new()), patient(&server.url())] {
        let rule = rule("concurrency 2 ttl 1h").and("gcra 3/30d".parse().expect("a limit")).expect("two limits");
        for left in [2, 1, 0] {
            let permit = held(&limiter, &rule).await.expect("a permit");
            let now = limiter.peek(&rule, "key").await.expect("a decision");
            assert_eq!((now.limits[0].remaining, now.limits[1].remaining), (1, left));
            permit.release().await.expect("an answer");
        }
        let denied = limiter.hold(&rule, "key").await.expect("a decision").decision;
        assert_eq!(denied.denied_by.as_deref(), Some("token-bucket 3/30d"));
        assert_eq!(limiter.peek(&rule, "key").await.expect("a decision").limits[0].remaining, 2);
        // The same id holds once, and after its release anew.
        limiter.reset(&rule, "key").await.expect("an answer");
        let request = Request::new("key").id("job-7");
        for _ in 0..2 {
            assert!(limiter.acquire(&rule, request).await.expect("a decision").allowed);
        }
        let now = limiter.peek(&rule, "key").await.expect("a decision");
        assert_eq!((now.limits[0].remaining, now.limits[1].remaining), (1, 2));
        limiter.release(&rule, request).await.expect("an answer");
        assert!(limiter.acquire(&rule, request).await.expect("a decision").allowed);
        let now = limiter.peek(&rule, "key").await.expect("a decision");
        assert_eq!((now.limits[0].remaining, now.limits[1].remaining), (1, 1));
    }
}

#[tokio::test]
async fn an_id_that_requests_more_takes_the_difference_and_a_lost_permit_is_not_remembered() {
    let server = Server::start();
    for limiter in [Limiter::new(Embedded::new()), patient(&server.url())] {
        let full = rule("concurrency 10 ttl 1h");
        let of = |id: &'static str, cost| Request::new("key").id(id).cost(cost);
        assert_eq!(limiter.acquire(&full, of("a", 1)).await.expect("a decision").remaining, 9);
        assert_eq!(limiter.acquire(&full, of("b", 7)).await.expect("a decision").remaining, 2);
        assert!(!limiter.acquire(&full, of("a", 4)).await.expect("a decision").allowed);
        assert_eq!(limiter.acquire(&full, of("a", 3)).await.expect("a decision").remaining, 0);
        assert!(limiter.peek(&full, of("a", 3)).await.expect("a decision").allowed, "as an acquire would");
        assert!(!limiter.peek(&full, of("c", 1)).await.expect("a decision").allowed);

        let mixed = rule("concurrency 1 ttl 1h").and("gcra 5/30d".parse().expect("a limit")).expect("two limits");
        let [h1, h2] = ["h1", "h2"].map(|id| Request::new("job").id(id));
        assert!(limiter.acquire(&mixed, h1).await.expect("a decision").allowed);
        assert!(limiter.acquire(&mixed, h1).await.expect("a decision").allowed, "the same again");
        assert_eq!(limiter.peek(&mixed, "job").await.expect("a decision").limits[1].remaining, 4);
        limiter.reset(&mixed, "job").await.expect("an answer");
        assert!(limiter.acquire(&mixed, h2).await.expect("a decision").allowed);
        assert!(!limiter.acquire(&mixed, h1).await.expect("a decision").allowed, "its permit is gone");
        // What the id took of both is given back.
        assert_eq!(limiter.cancel(&mixed, h2).await.expect("an answer").limits[1].remaining, 5);
        let error = limiter.refund(&mixed, h2).await.expect_err("whose permits?");
        assert!(error.is_input() && error.to_string().contains("settle or cancel"), "{error}");
    }
}

#[tokio::test]
async fn permits_are_given_back_where_redis_is_out_of_memory() {
    let server = Server::start();
    let limiter = patient(&server.url());
    let (rule, mut redis) = (rule("concurrency 5 ttl 1h"), server.connection());
    let [a, b] = ["a", "b"].map(|id| Request::new("key").id(id));
    for request in [a, b] {
        assert!(limiter.acquire(&rule, request).await.expect("a decision").allowed);
    }
    cmd("CONFIG").arg(&["SET", "maxmemory", "1mb"]).exec(&mut redis).expect("full");
    let error = limiter.acquire(&rule, Request::new("key").id("c")).await.expect_err("out of memory");
    assert!(error.kind() == ErrorKind::Refused && error.charged() == Charged::No, "{error:?}");
    assert_eq!(limiter.release(&rule, a).await.expect("an answer").remaining, 4);
    assert_eq!(limiter.peek(&rule, "key").await.expect("a decision").remaining, 4);
}

#[tokio::test]
async fn permit_operations_on_a_limit_without_permits_are_errors() {
    let limiter = Limiter::new(Embedded::new());
    let (bucket, permits) = (rule("gcra 5/1s"), rule("concurrency 5 ttl 1s"));
    let request = Request::new("key").id("id");
    for (error, expected) in [
        (
            limiter.hold(&bucket, "key").await.expect_err("no permits"),
            "hold: expected a concurrency limit, got token-bucket 5/1s",
        ),
        (
            limiter.release(&bucket, request).await.expect_err("none"),
            "release: expected a concurrency limit, got token-bucket 5/1s",
        ),
        (
            limiter.renew(&permits, "key").await.expect_err("no id"),
            "renew: the id that holds the permits is missing (Request::id)",
        ),
        (
            limiter.refund(&permits, "key").await.expect_err("no id"),
            "refund of concurrency 5 ttl 1s: the id that holds the permits is missing (Request::id)",
        ),
        (
            limiter.settle(&permits, request).await.expect_err("not settled"),
            "settle: expected a limit other than concurrency (its permits are released instead), got concurrency 5 ttl 1s",
        ),
    ] {
        assert!(error.is_input());
        assert_eq!(error.to_string(), expected);
    }
    assert!(limiter.renew(&permits, request).await.expect_err("nothing held").is_unknown_id());
    for (text, why) in [
        ("concurrency 5", "concurrency: the ttl is missing: after 5, write a ttl such as ttl 30s"),
        ("concurrency 5/1s ttl 1s", "concurrency: expected permits and a ttl"),
        ("concurrency 10001 ttl 1s", "permits: expected a whole number from 1 to 10000, got 10001"),
        ("concurrency 5 ttl 0s", "ttl: expected"),
        ("concurrency 5 ttl 1s burst 3", "concurrency: expected a ttl"),
    ] {
        let error = text.parse::<Rule>().expect_err(text).to_string();
        assert!(error.starts_with(why), "{text}: {error}");
    }
}

#[tokio::test]
async fn a_value_written_by_another_program_is_not_read_as_permits() {
    let server = Server::start();
    let limiter = patient(&server.url());
    let (rule, mut redis) = (rule("concurrency 5 ttl 10s"), server.connection());
    let name = "tollgate:{key}:test/concurrency";
    for poison in [
        &["SET", name, "5"][..],
        &["RPUSH", name, "a"],
        &["ZADD", name, "5", "1:a"],
        &["ZADD", name, "-5", "1:a"],
        &["ZADD", name, "-inf", "time"],
        &["ZADD", name, "-5", "time", "-inf", "blocked"],
    ] {
        let mut command = cmd(poison[0]);
        command.arg(&poison[1..]).exec(&mut redis).expect("poisoned");
        let before: Vec<u8> = cmd("DUMP").arg(name).query(&mut redis).expect("a dump");
        for error in [limiter.acquire(&rule, by_own_id(&rule, "key")).await, limiter.peek(&rule, "key").await] {
            let error = error.expect_err("can't be read");
            assert!(
                error.kind() == ErrorKind::UnreadableState && error.charged() == Charged::No,
                "{poison:?}: {error:?}"
            );
        }
        assert_eq!(cmd("DUMP").arg(name).query::<Vec<u8>>(&mut redis).expect("a dump"), before, "{poison:?}");
        limiter.reset(&rule, "key").await.expect("repaired");
        assert_eq!(
            limiter.acquire(&rule, by_own_id(&rule, "key")).await.expect("a decision").remaining,
            4,
            "{poison:?}"
        );
        limiter.reset(&rule, "key").await.expect("as before");
    }
}

#[tokio::test]
async fn permits_are_forgotten_after_they_have_expired_and_a_long_block_once_lifted() {
    let server = Server::start();
    let limiter = patient(&server.url());
    let mut redis = server.connection();
    let mut ttl = |name: &str| cmd("PTTL").arg(name).query::<i64>(&mut redis).expect("a ttl");
    // Twice the longest reset, so that few calls write an expiry, in milliseconds.
    for (text, twice) in [
        ("concurrency 5 ttl 10s", 20_000),
        ("gcra 5/10s", 20_000),
        ("sliding-log 5/10s", 20_000),
        ("sliding-window 5/10s", 40_000),
        ("fixed-window 5/10s", 20_000),
    ] {
        let rule = rule(text);
        let name = limiter.inspect(&rule, "key").await.expect("a state").remove(0).key;
        limiter.acquire(&rule, by_own_id(&rule, "key")).await.expect("a decision");
        assert!((twice - 5000..=twice + 1000).contains(&ttl(&name)), "{text}: {}", ttl(&name));
        limiter.block(&rule, "key", 60 * MINUTE).await.expect("an answer");
        assert!((3_599_000..=3_701_000).contains(&ttl(&name)), "{text}: {}", ttl(&name));
        limiter.unblock(&rule, "key").await.expect("an answer");
        assert!(ttl(&name) <= twice + 1000, "{text}: {}", ttl(&name));
    }
}

/// Such a permit could never be given back.
#[tokio::test]
async fn permits_are_taken_by_an_id_or_by_hold() {
    let limiter = Limiter::new(Embedded::new());
    let (permits, beside) = (rule("concurrency 2 ttl 30s"), rule("concurrency 2 ttl 30s, gcra 5/1s"));
    for (rule, mode, answer) in [
        (&permits, "acquire", limiter.acquire(&permits, "key").await),
        (&permits, "at-most", limiter.at_most(&permits, "key").await),
        (&permits, "penalty", limiter.penalty(&permits, "key").await),
        (&permits, "acquire", limiter.acquire_many(&permits, ["key"]).await.remove(0)),
        (&beside, "acquire", limiter.acquire(&beside, "key").await),
    ] {
        let error = answer.expect_err("no id");
        let expected = format!(
            "{mode} of concurrency 2 ttl 30s: the id to release its permits by is missing \
             (Request::id; Limiter::hold makes one)"
        );
        assert!(error.is_input() && error.to_string() == expected, "{rule}: {error}");
    }
    let error = limiter.acquire_wait(&permits, "key", MINUTE).await.expect_err("no permit to give back");
    assert!(error.is_input() && error.to_string().contains("Limiter::hold_wait"), "{error}");
    assert_eq!(limiter.peek(&permits, "key").await.expect("a peek needs none").remaining, 2);
    let decision = limiter.acquire(&permits, Request::new("key").id("mine")).await.expect("a decision");
    assert_eq!((decision.allowed, decision.remaining), (true, 1));
    assert!(limiter.hold(&permits, "key").await.expect("a decision").permit.is_some());
}

/// The first one's release is on its way when the second is asked for.
#[tokio::test]
async fn a_hold_by_the_id_of_a_permit_just_dropped_keeps_its_permit() {
    let server = Server::start();
    for limiter in [Limiter::new(Embedded::new()), patient(&server.url())] {
        let (one, mixed) = (rule("concurrency 1 ttl 1h"), rule("concurrency 1 ttl 1h, gcra 100/30d"));
        let request = Request::new("key").id("job-7");
        for rule in [&one, &mixed.named("mixed").expect("a good name")] {
            let hold = async || limiter.hold(rule, request).await.expect("a decision").permit.expect("a permit");
            let mut permit = hold().await;
            for _ in 0..50 {
                drop(permit);
                permit = hold().await;
            }
            // Its release has begun, and then others wait for it.
            drop(permit);
            tokio::task::yield_now().await;
            let permit = hold().await;
            limiter.finish().await;
            let now = limiter.peek(rule, "key").await.expect("a decision");
            assert_eq!(now.remaining, 0, "{rule}: it is held");
            if let [_, rate] = &now.limits[..] {
                assert_eq!(rate.remaining, 48, "each hold was charged");
            }
            permit.release().await.expect("an answer");
        }
    }
}

/// A rate that denies is waited for by its own time, and a wait that is too long is denied at once.
#[tokio::test(start_paused = true)]
async fn a_rate_beside_permits_is_not_polled() {
    let limiter = Limiter::new(Embedded::new());
    let rule = rule("concurrency 2 ttl 1h, gcra 1/1h");
    let _one = held(&limiter, &rule).await.expect("one");
    let began = tokio::time::Instant::now();
    let denied = limiter.hold_wait(&rule, "key", MINUTE).await.expect("a decision");
    assert_eq!(denied.decision.denied_by.as_deref(), Some("token-bucket 1/1h"));
    assert_eq!(began.elapsed(), Duration::ZERO, "no wait helps");
    // In real time, as the engine's is.
    tokio::time::resume();
    let (server, rule) = (Server::start(), self::rule("concurrency 2 ttl 1h, gcra 1/200ms"));
    let limiter = patient(&server.url());
    for _ in 0..2 {
        assert!(limiter.hold_wait(&rule, "key", MINUTE).await.expect("a decision").permit.is_some());
    }
    limiter.finish().await;
    let calls: u64 = ["evalsha", "eval"].iter().filter_map(|name| Some(server.commands().get(*name)?.0)).sum();
    assert!(calls <= 7, "{calls} calls: three to hold, of which one is sent twice, and two to release");
}

#[tokio::test]
async fn a_permit_whose_longest_hold_is_over_is_not_released_for_another_holder() {
    let limiter = Limiter::new(Embedded::new());
    let rule = rule("concurrency 2 ttl 1h").max_hold(Duration::from_millis(20)).expect("a time");
    let first = limiter.hold(&rule, Request::new("key").id("job")).await.expect("a decision").permit.expect("one");
    let first = first.renewed();
    comes_to(&limiter, &rule, 2).await;
    let second = limiter.hold(&rule, Request::new("key").id("job")).await.expect("a decision").permit.expect("one");
    assert_eq!(first.renewed().release().await.expect("an answer").remaining, 1);
    assert_eq!(second.release().await.expect("an answer").remaining, 2);
}

/// It can't be sent from there.
#[test]
fn a_permit_dropped_on_a_runtime_without_timers_goes_back() {
    let server = Server::start();
    let full = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
    let limiter = patient(&server.url());
    let rule = rule("concurrency 2 ttl 1h");
    for id in [None, Some("job")] {
        let request = Request::new("key");
        let request = id.map_or(request, |id| request.id(id));
        let permit = full.block_on(limiter.hold(&rule, request)).expect("a decision").permit.expect("one");
        let plain = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        plain.block_on(async { drop(permit) });
        plain.block_on(limiter.finish());
        assert_eq!(full.block_on(limiter.peek(&rule, "key")).expect("a decision").remaining, 2, "{id:?}");
    }
}

/// Those that wait for a server that is unreachable pause, and hold up no release that needs none.
#[tokio::test]
async fn permits_held_in_this_process_go_back_while_many_wait_for_redis() {
    let mut server = Server::start();
    let limiter = Limiter::builder(Redis::open(&server.tcp_url()).expect("a good address")).deadline(MINUTE).build();
    let many = rule("concurrency 1000 ttl 1h").named("many").expect("a name");
    let local = tollgate::OnError::Local { processes: std::num::NonZeroU32::MIN };
    let few = rule("concurrency 4 ttl 1h").on_error(local).expect("a policy");
    let mut held = Vec::new();
    for _ in 0..700 {
        held.push(limiter.hold(&many, "key").await.expect("a decision").permit.expect("one"));
    }
    server.stop();
    drop(held);
    let began = tokio::time::Instant::now();
    for _ in 0..200 {
        let permit = limiter.hold(&few, "key").await.expect("a decision").permit;
        drop(permit.expect("at most four are held"));
        // The release is made by another task.
        comes_to(&limiter, &few, 4).await;
    }
    assert!(began.elapsed() < Duration::from_secs(25), "{:?}", began.elapsed());
}

/// By an id that others know, what Redis may have done isn't done again: the next holder may have the permit by then.
#[tokio::test]
async fn a_release_without_an_answer_takes_no_permit_from_the_next_holder() {
    let server = Server::start();
    let proxy = Proxy::to(server.port()).await;
    let there = patient(&server.tcp_url());
    for how in ["in vain", "dropped", "overdue"] {
        let key = format!("key {how}");
        // Whoever drops its release doesn't wait for an answer.
        let deadline = if how == "dropped" { MINUTE } else { Duration::from_millis(300) };
        let slow = Limiter::builder(Redis::open(&proxy.url()).expect("a good address")).deadline(deadline).build();
        let rule = rule("concurrency 1 ttl 30s");
        let rule = match how {
            "overdue" => rule.max_hold(Duration::from_millis(500)).expect("a time"),
            _ => rule,
        };
        let request = Request::new(&key).id("job-7");
        // By one id, so that a try whose answer was late is no other's.
        let first = wait_for_value(async || slow.hold(&rule, request).await.ok()?.permit).await;
        proxy.delay(Duration::from_millis(500));
        let released = tokio::spawn(async move {
            match how {
                "overdue" => {
                    let first = first.renewed();
                    tokio::time::sleep(Duration::from_secs(2)).await;
                    drop(first);
                }
                "dropped" => {
                    let released = tokio::time::timeout(Duration::from_millis(200), first.release()).await;
                    assert!(released.is_err(), "no answer in time");
                }
                _ => {
                    let error = first.release().await.expect_err("no answer in time");
                    assert_eq!(error.charged(), Charged::Unknown);
                }
            }
        });
        wait_until("it is given back", async || there.peek(&rule, &key).await.expect("an answer").remaining == 1).await;
        let second = there.hold(&rule, request).await.expect("an answer").permit.expect("a permit");
        released.await.expect("no panic");
        proxy.delay(Duration::ZERO);
        slow.finish().await;
        second.renew().await.expect("it is still held");
    }
}
