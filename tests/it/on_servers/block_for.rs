//! A rule that blocks a key which is denied, on both engines: `block_for`.

use std::time::Duration;

use tollgate::redis::{Connection, cmd};
use tollgate::rules::{Attributes, RuleSet};
use tollgate::{
    Algorithm, Charged, Clock, DecidedBy, Decision, DenialCache, Embedded, Limiter, OnChange, OnError, Redis, Request,
    RetryAfter, Rule,
};
use tollgate_testing::engines::{Engine, Micros, time};
use tollgate_testing::oracle::Retry;
use tollgate_testing::polling::PATIENCE;
use tollgate_testing::redis_server::{Server, free_port, patient};
use tollgate_testing::rules::{FOUR, assert_of_every_algorithm, by_own_id, limit, rule};

const SECOND: Micros = 1_000_000;
const NOW: Micros = 1 << 50;

/// Five at once each; all are free again after 10 s at the latest, or 20 of the counter.
const FIVE: [&str; 5] = [FOUR[0], FOUR[1], FOUR[2], FOUR[3], "concurrency 5 ttl 10s"];

fn on_both(check: impl Fn(&Engine)) {
    for engine in [Engine::embedded(), Engine::redis()] {
        check(&engine);
    }
}

fn blocking(text: &str, seconds: u64) -> Rule {
    rule(text).block_for(Duration::from_secs(seconds)).expect("no shards")
}

fn acquire(engine: &Engine, rule: &Rule, key: &str, cost: u64, now: Micros) -> Decision {
    let request = by_own_id(rule, Request::new(key).cost(cost).at(time(now)));
    engine.runtime.block_on(engine.limiter.acquire(rule, request)).expect("a decision")
}

fn after(seconds: u64) -> RetryAfter {
    RetryAfter::After(Duration::from_secs(seconds))
}

/// All that the server holds: each key's bytes, and when it expires.
fn held(redis: &mut Connection) -> Vec<(String, Vec<u8>, i64)> {
    let mut keys: Vec<String> = cmd("KEYS").arg("*").query(redis).expect("keys");
    keys.sort();
    let of = |key: String| {
        let bytes = cmd("DUMP").arg(&key).query(redis).expect("a dump");
        let expiry = cmd("PEXPIRETIME").arg(&key).query(redis).expect("an expiry");
        (key, bytes, expiry)
    };
    keys.into_iter().map(of).collect()
}

/// What an engine with a server holds; nothing of the embedded one.
fn stored(engine: &Engine) -> Vec<(String, Vec<u8>, i64)> {
    engine.server.as_ref().map(|server| held(&mut server.connection())).unwrap_or_default()
}

#[test]
fn a_denial_blocks_the_key_in_the_same_call_and_denials_meanwhile_write_nothing() {
    assert_of_every_algorithm(&FIVE, &[Algorithm::CalendarWindow]);
    on_both(|engine| {
        for text in FIVE {
            let (rule, key) = (blocking(text, 60), engine.fresh_key());
            assert!(acquire(engine, &rule, &key, 5, NOW).allowed, "{text}");
            let denied = acquire(engine, &rule, &key, 1, NOW + SECOND);
            assert_eq!((denied.allowed, denied.blocked, denied.granted), (false, true, 0), "{text}");
            assert_eq!((denied.remaining, denied.retry_after), (0, after(60)), "{text}");
            assert_eq!(denied.reset_after, Duration::from_secs(60), "{text}");
            let before = stored(engine);
            for (cost, later) in [(1, 1), (5, 30), (0, 40), (1, 59)] {
                let again = acquire(engine, &rule, &key, cost, NOW + (1 + later) * SECOND);
                assert_eq!((again.allowed, again.blocked), (false, true), "{text}");
                assert_eq!(again.retry_after, after(60 - later), "{text}: not extended");
                let request = Request::new(&key).at(time(NOW + 50 * SECOND));
                engine.runtime.block_on(engine.limiter.peek(&rule, request)).expect("a decision");
                assert_eq!(stored(engine), before, "{text}: a denial of a blocked key wrote");
            }
            // To the microsecond; and all that was used has refilled by then.
            let end = NOW + 61 * SECOND;
            assert!(!acquire(engine, &rule, &key, 1, end - 1).allowed, "{text}");
            let allowed = acquire(engine, &rule, &key, 5, end);
            assert_eq!((allowed.allowed, allowed.blocked), (true, false), "{text}");
        }
    });
}

#[test]
fn a_wait_that_ends_later_than_the_block_is_the_one_reported() {
    on_both(|engine| {
        let (rule, key) = (blocking("gcra 1/10s", 3), engine.fresh_key());
        acquire(engine, &rule, &key, 1, NOW);
        let denied = acquire(engine, &rule, &key, 1, NOW);
        assert_eq!((denied.blocked, denied.retry_after), (true, after(10)));
        // Between the block's end and that time a denial is a new one.
        let denied = acquire(engine, &rule, &key, 1, NOW + 9 * SECOND);
        assert_eq!((denied.blocked, denied.retry_after), (true, after(3)));
        assert!(!acquire(engine, &rule, &key, 1, NOW + 12 * SECOND - 1).allowed);
        assert!(acquire(engine, &rule, &key, 1, NOW + 12 * SECOND).allowed);
    });
}

#[test]
fn reservations_and_at_mosts_block_and_a_peek_does_not() {
    on_both(|engine| {
        let reserving = ["token-bucket 5/10s max-debt 5", "fixed-window 5/10s max-debt 5"];
        for text in reserving {
            let (rule, key) = (blocking(text, 60), engine.fresh_key());
            let reserve = |cost| {
                let request = Request::new(&key).cost(cost).at(time(NOW));
                engine.runtime.block_on(engine.limiter.reserve(&rule, request)).expect("a decision")
            };
            assert!(reserve(10).allowed, "{text}");
            let denied = reserve(1);
            assert_eq!((denied.allowed, denied.blocked, denied.retry_after), (false, true, after(60)), "{text}");
        }
        for text in FIVE {
            let (rule, key) = (blocking(text, 60), engine.fresh_key());
            acquire(engine, &rule, &key, 3, NOW);
            let request = Request::new(&key).cost(9).at(time(NOW));
            let at_most = |request| engine.runtime.block_on(engine.limiter.at_most(&rule, by_own_id(&rule, request)));
            let some = at_most(request).expect("a decision");
            assert_eq!((some.allowed, some.blocked, some.granted), (true, false, 2), "{text}");
            let before = stored(engine);
            let peeked = engine.runtime.block_on(engine.limiter.peek(&rule, request.cost(1))).expect("a decision");
            assert_eq!((peeked.allowed, peeked.blocked), (false, false), "{text}");
            assert!(peeked.retry_after < after(60), "{text}: the wait of a key that nobody blocks");
            assert_eq!(stored(engine), before, "{text}: a peek wrote");
            let none = at_most(request).expect("a decision");
            assert_eq!((none.allowed, none.blocked, none.granted), (false, true, 0), "{text}");
            assert_eq!(none.retry_after, after(60), "{text}");
        }
    });
}

#[test]
fn a_cost_that_can_never_be_allowed_blocks_no_key_and_writes_nothing() {
    on_both(|engine| {
        for text in FIVE {
            let (rule, key) = (blocking(text, 60), engine.fresh_key());
            acquire(engine, &rule, &key, 5, NOW);
            let before = stored(engine);
            let denied = acquire(engine, &rule, &key, 6, NOW);
            assert_eq!(
                (denied.allowed, denied.blocked, denied.retry_after),
                (false, false, RetryAfter::Never),
                "{text}"
            );
            assert_eq!(stored(engine), before, "{text}");
        }
        // Nor where only one of two limits could never allow it, and the other would make it wait.
        let (rule, key) = (blocking("gcra 5/10s, fixed-window 9/1d", 60), engine.fresh_key());
        acquire(engine, &rule, &key, 4, NOW);
        let before = stored(engine);
        let denied = acquire(engine, &rule, &key, 6, NOW);
        assert_eq!((denied.blocked, denied.retry_after), (false, RetryAfter::Never));
        assert_eq!(denied.limits[1].retry_after.duration().map(|wait| wait > Duration::ZERO), Some(true));
        assert_eq!(stored(engine), before);
        assert!(acquire(engine, &rule, &key, 1, NOW).allowed);
    });
}

#[test]
fn of_several_limits_the_keys_of_those_that_deny_are_blocked() {
    on_both(|engine| {
        let (rule, key) = (blocking("gcra 2/10s, token-bucket 100/1m, sliding-log 50/1m", 60), engine.fresh_key());
        acquire(engine, &rule, &key, 2, NOW);
        let before = stored(engine);
        let denied = acquire(engine, &rule, &key, 1, NOW);
        assert_eq!((denied.allowed, denied.blocked, denied.retry_after), (false, true, after(60)));
        assert_eq!(denied.denied_by.as_deref(), Some("token-bucket 2/10s"));
        let told: Vec<_> = denied.limits.iter().map(|limit| (limit.allowed, limit.blocked, limit.remaining)).collect();
        assert_eq!(told, [(false, true, 0), (true, false, 98), (true, false, 48)]);
        let then = stored(engine);
        let written = before.iter().zip(&then).filter(|(before, after)| before != after);
        let written: Vec<_> = written.map(|((key, ..), _)| key.rsplit('/').next()).collect();
        assert_eq!((before.len(), then.len()), (3 * usize::from(engine.server.is_some()), before.len()));
        assert!(engine.server.is_none() || written == [Some("token-bucket-10s")], "{written:?}");
        assert!(!acquire(engine, &rule, &key, 1, NOW + 59 * SECOND).allowed);
        assert_eq!(stored(engine), then);
        let allowed = acquire(engine, &rule, &key, 2, NOW + 60 * SECOND);
        assert_eq!((allowed.allowed, allowed.limits[1].remaining), (true, 98));

        // Two that deny are both blocked, also by an at-most; so are keys that are other parts of the request.
        let user = rule_of_two().block_for(Duration::from_secs(60)).expect("no shards");
        let parts: [(&str, &[u8]); 1] = [("org", b"acme")];
        let request = Request::new("ann").parts(&parts).cost(5).at(time(NOW));
        let at_most = || engine.runtime.block_on(engine.limiter.at_most(&user, request)).expect("a decision");
        assert_eq!(at_most().granted, 5);
        let blocked = |decision: &Decision| decision.limits.iter().map(|limit| limit.blocked).collect::<Vec<_>>();
        assert_eq!(blocked(&at_most()), [true, true]);
        let ben = Request::new("ben").parts(&parts).at(time(NOW));
        let denied = engine.runtime.block_on(engine.limiter.acquire(&user, ben)).expect("a decision");
        assert_eq!((denied.allowed, blocked(&denied)), (false, vec![false, true]), "ben's own key isn't");
    });
}

/// Five of a user, and five of an organisation.
fn rule_of_two() -> Rule {
    let org = limit("gcra 5/10s").named("org").expect("a good name");
    let rule = Rule::new("two", limit("gcra 5/10s")).expect("a good name");
    rule.tagged("org").and_then(|rule| rule.and_by("org", org)).expect("a tag")
}

#[test]
fn a_denied_call_with_an_id_blocks_too_and_an_allowed_id_is_still_remembered() {
    on_both(|engine| {
        for text in FOUR {
            let (rule, key) = (blocking(text, 60), engine.fresh_key());
            let call = |id: &'static str, at: Micros| {
                let request = Request::new(&key).cost(5).id(id).at(time(at));
                engine.runtime.block_on(engine.limiter.acquire(&rule, request)).expect("a decision")
            };
            assert!(call("first", NOW).allowed, "{text}");
            let denied = call("second", NOW + SECOND);
            assert_eq!((denied.allowed, denied.blocked, denied.retry_after), (false, true, after(60)), "{text}");
            let before = stored(engine);
            let again = call("second", NOW + 11 * SECOND);
            assert_eq!((again.allowed, again.retry_after), (false, after(50)), "{text}: not extended");
            assert_eq!(stored(engine), before, "{text}");
            assert!(call("first", NOW + 12 * SECOND).allowed, "{text}: its answer again");
            assert!(call("second", NOW + 61 * SECOND).allowed, "{text}");
        }
    });
}

#[test]
fn refunds_and_penalties_do_not_block() {
    on_both(|engine| {
        for text in FOUR {
            let subject = engine.subject(limit(text)).with(OnChange::KeepUsed, false, Some(60 * SECOND));
            subject.acquire(5, NOW);
            for answer in [subject.penalty(1, NOW), subject.refund(1, NOW), subject.penalty(0, NOW)] {
                assert_eq!((answer.allowed, answer.blocked), (true, false), "{text}");
            }
            // They go on beneath a block, and unblock lifts it.
            assert!(subject.acquire(1, NOW).blocked, "{text}");
            assert!(subject.refund(5, NOW).blocked, "{text}");
            assert!(!subject.block(0, NOW).blocked, "{text}");
            assert!(subject.acquire(5, NOW).allowed, "{text}");
        }
        let permits = engine.subject(limit("concurrency 2 ttl 10s")).with(OnChange::KeepUsed, false, Some(60 * SECOND));
        permits.hold("a", 2, NOW);
        assert!(permits.hold("b", 1, NOW).blocked);
        assert_eq!(permits.renew("a", NOW + SECOND).map(|answer| answer.allowed), Some(true));
        assert!(permits.release("a", NOW + SECOND).allowed);
        assert!(!permits.hold("b", 1, NOW + 60 * SECOND - 1).allowed);
        assert!(permits.hold("b", 1, NOW + 60 * SECOND).allowed);
    });
}

#[test]
fn changed_numbers_leave_the_block_and_keep_what_was_used() {
    on_both(|engine| {
        for text in FOUR {
            let subject = engine.subject(limit(text)).with(OnChange::KeepUsed, false, Some(4 * SECOND));
            subject.acquire(5, NOW);
            assert!(subject.acquire(1, NOW).blocked, "{text}");
            let other = subject.changed(limit(&text.replace("5/10s", "9/10s")).named("limit").expect("a good name"));
            let denied = other.acquire(1, NOW + SECOND);
            assert_eq!((denied.allowed, denied.blocked), (false, true), "{text}");
            assert_eq!(denied.retry, Retry::AfterUs(3 * SECOND), "{text}: as long as it was");
            assert!(other.acquire(4, NOW + 4 * SECOND).allowed, "{text}: five of nine are used at most");
            // A rule that says another time counts from then on.
            let longer = other.changed(other.limit().clone()).with(OnChange::KeepUsed, false, Some(100 * SECOND));
            assert_eq!(longer.acquire(9, NOW + 4 * SECOND).retry, Retry::AfterUs(100 * SECOND), "{text}");
        }
    });
}

#[test]
fn denials_of_a_blocked_key_are_counted_where_a_rule_counts_them() {
    on_both(|engine| {
        for text in FIVE {
            let subject = engine.subject(limit(text)).with(OnChange::KeepUsed, true, Some(60 * SECOND));
            subject.acquire(5, NOW);
            for count in 1..4 {
                let denied = subject.acquire(1, NOW + count);
                assert_eq!((denied.overage, denied.blocked), (count, true), "{text}");
                assert_eq!(denied.retry, Retry::AfterUs(60 * SECOND + 1 - count), "{text}");
            }
        }
    });
}

/// In the server's own time, where the key's expiry has to cover the block.
#[tokio::test]
async fn a_block_outlives_what_was_used_and_the_key_outlives_the_block() {
    let server = Server::start();
    let limiter = patient(&server.url());
    for text in FIVE {
        let rule = blocking(text, 600);
        limiter.acquire(&rule, by_own_id(&rule, Request::new("key").cost(5))).await.expect("a decision");
        let denied = limiter.acquire(&rule, by_own_id(&rule, "key")).await.expect("a decision");
        assert_eq!((denied.allowed, denied.blocked, denied.by), (false, true, DecidedBy::Redis), "{text}");
        let (_, _, expiry) = held(&mut server.connection()).remove(0);
        let (seconds, _): (i64, i64) = cmd("TIME").query(&mut server.connection()).expect("the time");
        assert!((599_000..=602_000).contains(&(expiry - seconds * 1000)), "{text}: {expiry}");
        let before = held(&mut server.connection());
        assert!(!limiter.acquire(&rule, by_own_id(&rule, "key")).await.expect("a decision").allowed);
        assert_eq!(held(&mut server.connection()), before, "{text}");
        limiter.reset(&rule, by_own_id(&rule, "key")).await.expect("an answer");
    }
}

#[tokio::test]
async fn many_calls_denied_at_once_block_once() {
    let server = Server::start();
    let limiter =
        Limiter::builder(Redis::open(&server.url()).expect("a good address")).deadline(Duration::from_secs(30)).build();
    let rule = blocking("gcra 5/1d", 60);
    let calls = (0..50).map(|_| limiter.acquire(&rule, "key"));
    let decisions = futures_util::future::join_all(calls).await;
    let mut waits: Vec<_> = decisions.into_iter().map(|decision| decision.expect("a decision").retry_after).collect();
    assert_eq!(waits.iter().filter(|wait| **wait == RetryAfter::Now).count(), 5);
    waits.sort();
    // The first denial's own wait is longer than its block, so that wait is reported to all.
    assert!(waits[5..].iter().all(|wait| *wait > after(3600)), "{waits:?}");
    limiter.refund(&rule, Request::new("key").cost(5)).await.expect("an answer");
    let left = limiter.acquire(&rule, "key").await.expect("a decision");
    assert!(left.blocked && left.retry_after < after(60), "since the first of them: {left:?}");

    // None of them goes with others, by a form that knows no options.
    let keys: Vec<_> = (0..20).map(|n| format!("k{}", n % 10)).collect();
    let small = blocking("fixed-window 1/1d", 60);
    let many = limiter.acquire_many(&small, &keys).await;
    let blocked = many.into_iter().filter(|decision| decision.as_ref().expect("a decision").blocked).count();
    assert_eq!(blocked, 10, "each key's second call");
}

#[tokio::test]
async fn a_server_out_of_memory_refuses_to_block_and_keeps_the_state() {
    let server = Server::start();
    let limiter = patient(&server.url());
    let mut redis = server.connection();
    let mut memory = |bytes: &str| cmd("CONFIG").arg("SET").arg("maxmemory").arg(bytes).exec(&mut redis).expect("set");
    for text in [FIVE.as_slice(), &["gcra 5/10s, fixed-window 9/1d"]].concat() {
        let rule = blocking(&text.replace("10s", "1d"), 60);
        limiter.acquire(&rule, by_own_id(&rule, Request::new("key").cost(5))).await.expect("a decision");
        let before = held(&mut server.connection());
        memory("1");
        let error = limiter.acquire(&rule, by_own_id(&rule, "key")).await.expect_err("refused");
        assert_eq!((error.kind().name(), error.charged()), ("refused", Charged::No), "{text}: {error}");
        assert_eq!(held(&mut server.connection()), before, "{text}");
        memory("0");
        let denied = limiter.acquire(&rule, by_own_id(&rule, "key")).await.expect("a decision");
        assert_eq!((denied.allowed, denied.blocked), (false, true), "{text}");
        limiter.reset(&rule, by_own_id(&rule, "key")).await.expect("an answer");
    }
}

#[tokio::test]
async fn while_redis_is_unreachable_the_process_blocks_locally() {
    let nobody = Redis::open(&format!("redis://127.0.0.1:{}", free_port())).expect("a good address");
    let limiter = Limiter::builder(nobody).deadline(PATIENCE).build();
    let processes = std::num::NonZeroU32::new(2).expect("two");
    let rule = blocking("gcra 10/1d", 600).on_error(OnError::Local { processes }).expect("five for each");
    assert!(limiter.acquire(&rule, Request::new("key").cost(5)).await.expect("a decision").allowed);
    let denied = limiter.acquire(&rule, "key").await.expect("a decision");
    assert_eq!((denied.allowed, denied.blocked, denied.by.name()), (false, true, "local"));
    // Longer than it would take without the block: a tenth of a day, of five units.
    assert!(denied.retry_after > after(590));
    let again = limiter.acquire(&rule, "key").await.expect("a decision");
    assert!(again.blocked && again.retry_after <= denied.retry_after);
}

/// What it answers from memory, Redis would have denied at that time too.
#[tokio::test(start_paused = true)]
async fn the_denial_cache_remembers_a_block_and_denies_nothing_that_the_engine_would_allow() {
    let clock = Clock::new(time(NOW));
    let plain = Limiter::new(Embedded::with_clock(clock.clone()));
    let cached = plain.to_builder().denial_cache(DenialCache::new(10).longest(Duration::from_secs(1000))).build();
    for (text, block, wait) in [("gcra 5/10s", 60, 60), ("gcra 5/500s", 60, 100)] {
        let rule = blocking(text, block).named(&format!("rule-{wait}")).expect("a good name");
        let acquire = || async { cached.acquire(&rule, "key").await.expect("a decision") };
        cached.acquire(&rule, Request::new("key").cost(5)).await.expect("a decision");
        let first = acquire().await;
        assert_eq!((first.by, first.blocked, first.retry_after), (DecidedBy::Embedded, true, after(wait)));
        for passed in 1..=wait {
            clock.advance(Duration::from_secs(1));
            tokio::time::advance(Duration::from_secs(1)).await;
            let peeked = plain.peek(&rule, "key").await.expect("a decision");
            let denied = acquire().await;
            assert_eq!(denied.allowed, peeked.allowed, "{text} after {passed} s");
            assert_eq!(denied.allowed, passed == wait, "{text} after {passed} s");
            if !denied.allowed {
                assert_eq!((denied.by, denied.retry_after), (DecidedBy::DenialCache, after(wait - passed)), "{text}");
            }
        }
    }
}

#[test]
fn a_rule_set_blocks_as_its_definitions_say() {
    let text = r#"
        [defaults]
        block_for = "1h"

        [[rule]]
        name = "logins"
        match = { path = "/login" }
        key = "user"
        limits = ["sliding-log 1/1m"]
        block_for = "15m"

        [[rule]]
        name = "rest"
        key = "user"
        limits = ["gcra 1/1m"]
        overrides = { "user:vip" = "gcra 2/1m" }
    "#;
    let engine = Engine::embedded();
    let rules: RuleSet = text.parse().expect("rules");
    let denied = |user: &str, path: &str, allowed: usize| {
        let request = Attributes::new().user(user).path(path);
        let acquire = || engine.runtime.block_on(engine.limiter.acquire_by(&rules, &request)).expect("a verdict");
        (0..allowed).for_each(|_| assert!(acquire().allowed, "{user} {path}"));
        acquire().decision.expect("a decision")
    };
    for (user, path, allowed, wait) in [("42", "/login", 1, 900), ("42", "/", 1, 3600), ("vip", "/", 2, 3600)] {
        let decision = denied(user, path, allowed);
        assert_eq!((decision.blocked, decision.retry_after), (true, after(wait)), "{user} {path}");
    }
    let sharded = text.replace("gcra 1/1m", "gcra 8/1m shards 2");
    let error = sharded.parse::<RuleSet>().expect_err("shards").to_string();
    assert!(error.contains("expected a limit without shards beside block_for"), "{error}");
}

#[test]
fn a_rule_that_cannot_block_on_denial_is_refused_when_it_is_built() {
    let minute = Duration::from_secs(60);
    let plain = rule("gcra 8/1s");
    assert_eq!((plain.blocks_for(), plain.clone().block_for(minute).expect("good").blocks_for()), (None, Some(minute)));
    for (time, got) in [
        (Duration::ZERO, "0ns"),
        (Duration::from_nanos(1500), "1.5µs"),
        (Duration::from_micros((1 << 51) + 1), "2251799813.685249s"),
    ] {
        let error = plain.clone().block_for(time).expect_err("out of range").to_string();
        assert_eq!(error, format!("block_for: expected whole microseconds, from 1us to 71 years, got {got}"));
    }
    assert!(plain.clone().block_for(Duration::from_micros(1 << 51)).is_ok());
    let expected = "rule test: expected a limit without shards beside block_for, since a denial would block one shard \
                    alone, got token-bucket 8/1s shards 2 and block_for 1m";
    let sharded = rule("gcra 8/1s shards 2");
    assert_eq!(sharded.block_for(minute).expect_err("shards").to_string(), expected);

    let engine = Engine::embedded();
    let one = std::num::NonZeroU32::MIN;
    let error = engine.limiter.lease(&blocking("gcra 8/1s", 60), "key", one).expect_err("no lease").to_string();
    assert_eq!(
        error,
        "lease: expected a rule without block_for, since a batch that is denied would block everybody, got token-bucket 8/1s"
    );
}

/// A denial blocks whatever key denied it, so lifting a block lifts all of them.
#[tokio::test]
async fn a_block_by_a_denial_can_be_lifted_whatever_the_key_counts() {
    let limiter = Limiter::new(Embedded::new());
    let all: tollgate::Limit = "gcra 1/1h".parse().expect("a limit");
    let rule = rule("gcra 100/1h")
        .tagged("org")
        .expect("a part")
        .and_by("org", all.named("all").expect("a name"))
        .expect("two limits");
    let rule = rule.block_for(Duration::from_secs(7200)).expect("a time");
    let parts: [(&str, &[u8]); 1] = [("org", b"acme")];
    let request = || Request::new("user:1").parts(&parts);
    assert!(limiter.acquire(&rule, request()).await.expect("a decision").allowed);
    assert!(limiter.acquire(&rule, request()).await.expect("a decision").blocked);
    limiter.unblock(&rule, request()).await.expect("an answer");
    let peeked = limiter.peek(&rule, request()).await.expect("a decision");
    assert!(!peeked.blocked && !peeked.allowed, "{peeked:?}");
}
