//! Limits that are split into shards: together never above the limit, found again by an id, and evenly used.

mod other_features;

use std::collections::HashSet;
use std::num::NonZeroU32;
use std::time::Duration;

use proptest::prelude::*;
use tollgate::redis::cmd;
use tollgate::{Algorithm, Embedded, Limit, Limiter, Redis, Request, RetryAfter, Rule};
use tollgate_testing::engines::{Engine, Micros, micros, on_both_engines, time};
use tollgate_testing::histories::{beginning, steps};
use tollgate_testing::limits::{sharded, split};
use tollgate_testing::oracle::Oracle;
use tollgate_testing::oracle_spec::spec;
use tollgate_testing::redis_server::Server;
use tollgate_testing::rules::{assert_of_every_algorithm, by_own_id};

const NOW: Micros = 1 << 50;
const SECOND: Micros = 1_000_000;
const SECONDS: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);

/// One of each algorithm.
const EACH: [&str; 7] = [
    "token-bucket 40/1h shards 4",
    "fixed-window 40/1h shards 4",
    "sliding-window 40/1h shards 4",
    "sliding-log 40/1h shards 4",
    "gcra 40/1h shards 4",
    "concurrency 40 ttl 1h shards 4",
    "fixed-window 40/month shards 4",
];

/// The rule of this limit; of a sliding window, of one whose shards have so many units, since some are kept back.
fn rule(text: &str) -> Rule {
    let limit: Limit = text.parse().unwrap_or_else(|error| panic!("{text}: {error}"));
    let more = limit.rate() + kept_back(&limit);
    let limit = text.replacen(&limit.rate().to_string(), &more.to_string(), 1);
    tollgate_testing::rules::rule(&limit)
}

/// Units that shards keep back of what they estimate.
fn kept_back(limit: &Limit) -> u64 {
    if limit.algorithm() == Algorithm::SlidingWindow { u64::from(limit.shards()) - 1 } else { 0 }
}

fn request(key: &str, now: Micros) -> Request<'_> {
    Request::new(key).at(time(now))
}

fn both() -> [Engine; 2] {
    [Engine::embedded(), Engine::redis()]
}

#[test]
fn shards_admit_nothing_that_one_unsharded_limit_would_not_admit() {
    on_both_engines((sharded(), beginning(), steps(1..=60)), |engine, (limit, begin, steps)| {
        let key = engine.fresh_key();
        let aimed = engine.subject(limit.whole());
        let rule = Rule::new("shards", limit.clone()).expect("a rule");
        let mut exact = Oracle::new(spec(&limit));
        let (mut now, share) = (begin, (limit.capacity() - kept_back(&limit)) / u64::from(limit.shards()));
        for step in steps {
            let (cost, then) = step.aim(&aimed, now);
            now = now.max(then);
            let cost = cost % (share + 1);
            aimed.acquire(cost, now);
            let decision = engine.call(engine.limiter.acquire(&rule, by_own_id(&rule, request(&key, now).cost(cost))));
            prop_assert!(decision.limit <= share + 1 && decision.remaining <= decision.limit);
            if !decision.allowed {
                prop_assert!(decision.retry_after != RetryAfter::Never);
                continue;
            }
            let answer = exact.acquire(cost, now);
            prop_assert!(answer.allowed, "{limit}: {cost} at {now}: {answer:?}");
        }
        Ok(())
    });
}

#[test]
fn exactly_the_whole_limit_can_be_taken() {
    assert_of_every_algorithm(&EACH, &[]);
    for engine in both() {
        for text in EACH.into_iter().chain([
            "gcra 43/1h shards 4",
            "sliding-log 7/1h shards 7",
            "fixed-window 9/1h burst 11 shards 2",
        ]) {
            let (rule, key) = (rule(text), engine.fresh_key());
            let capacity = rule.limits().map(|limit| limit.capacity() - kept_back(limit)).sum();
            let mut admitted = 0;
            for _ in 0..60 {
                admitted +=
                    u64::from(engine.call(engine.limiter.acquire(&rule, by_own_id(&rule, request(&key, NOW)))).allowed);
            }
            assert_eq!(admitted + engine.left(&rule, &key, NOW), capacity, "{text}: units were lost");
            // Drawn often enough, each shard gives what it has.
            for _ in 0..400 {
                admitted +=
                    u64::from(engine.call(engine.limiter.acquire(&rule, by_own_id(&rule, request(&key, NOW)))).allowed);
            }
            assert_eq!((admitted, engine.left(&rule, &key, NOW)), (capacity, 0), "{text}");
        }
    }
}

/// One by chance would differ by about 24: of 16 shares of 50, each spread by the root of that. Of two it is 3 to 6, once in
/// some thousand runs 9.
#[test]
fn the_better_of_two_keeps_shards_even() {
    for engine in both() {
        for text in EACH {
            // Permits are in the shard of the id that holds them.
            if text.starts_with("concurrency") {
                continue;
            }
            let text = text.replace("40", "1600").replace("shards 4", "shards 16");
            let (rule, key) = (rule(&text), engine.fresh_key());
            for _ in 0..800 {
                assert!(engine.call(engine.limiter.acquire(&rule, by_own_id(&rule, request(&key, NOW)))).allowed);
            }
            let left: Vec<_> = engine.states(&rule, &key, NOW).iter().map(|state| state.decision.remaining).collect();
            let (least, most) = (left.iter().min().expect("some"), left.iter().max().expect("some"));
            assert_eq!((left.len(), left.iter().sum::<u64>()), (16, 800), "{text}");
            assert!(most - least <= 14, "{text}: {left:?}");

            // Back again: what is given back goes where most is missing.
            for _ in 0..640 {
                engine.call(engine.limiter.refund(&rule, request(&key, NOW)));
            }
            assert_eq!(engine.left(&rule, &key, NOW), 1440, "{text}: given back to one that was full");
        }
    }
}

#[test]
fn penalties_and_at_most_use_the_better_of_two_shards_too() {
    for engine in both() {
        for text in EACH {
            if text.starts_with("concurrency") {
                continue;
            }
            let text = text.replace("shards 4", "shards 2");
            let (rule, key) = (rule(&text), engine.fresh_key());
            let call = |units| request(&key, NOW).cost(units);
            assert_eq!(engine.call(engine.limiter.penalty(&rule, call(5))).remaining, 15, "{text}");
            assert_eq!(engine.call(engine.limiter.penalty(&rule, call(8))).remaining, 12, "{text}");
            assert_eq!(engine.call(engine.limiter.peek(&rule, call(1))).remaining, 15, "{text}");
            assert_eq!(engine.call(engine.limiter.at_most(&rule, call(30))).granted, 15, "{text}");
            assert_eq!(engine.call(engine.limiter.at_most(&rule, call(30))).granted, 12, "{text}");
            assert_eq!(engine.call(engine.limiter.at_most(&rule, call(30))).granted, 0, "{text}");
            assert_eq!(engine.call(engine.limiter.refund(&rule, call(3))).remaining, 3, "{text}");
            assert_eq!(engine.call(engine.limiter.refund(&rule, call(9))).remaining, 9, "{text}: to the emptier one");
        }
    }
}

#[test]
fn a_reservation_goes_to_the_shard_with_the_shorter_wait() {
    for engine in both() {
        for text in ["token-bucket 2/2s burst 2 max-debt 20 shards 2", "gcra 2/2s burst 2 max-debt 20 shards 2"] {
            let (rule, key) = (rule(text), engine.fresh_key());
            let waits: Vec<_> = (0..6)
                .map(|_| engine.call(engine.limiter.reserve(&rule, request(&key, NOW))))
                .map(|decision| decision.retry_after.duration().expect("a wait").as_secs())
                .collect();
            assert_eq!(waits, [0, 0, 2, 2, 4, 4], "{text}");
        }
    }
}

/// An id of each of the two shards, for each of these: an id takes from the same shard on every key.
fn ids(engine: &Engine, rule: &Rule, shards: &[usize]) -> Vec<String> {
    let shard = |id: &String| {
        let key = engine.fresh_key();
        engine.call(engine.limiter.acquire(rule, request(&key, NOW).id(id)));
        engine.states(rule, &key, NOW).iter().position(|state| state.exists)
    };
    let found: Vec<_> = (0..40).map(|id| format!("id-{id}")).map(|id| (shard(&id), id)).collect();
    let mut of = [0, 1].map(|number| found.iter().filter(move |(shard, _)| *shard == Some(number)));
    shards.iter().map(|number| of[*number].next().expect("enough of them").1.clone()).collect()
}

#[test]
fn a_denial_reports_the_shorter_wait_of_two_shards() {
    for engine in both() {
        let (rule, key) = (rule("sliding-log 4/10s shards 2"), engine.fresh_key());
        for (id, second) in ids(&engine, &rule, &[0, 0, 1, 1]).iter().zip([0, 5, 1, 4]) {
            let call = request(&key, NOW + second * SECOND).id(id);
            assert!(engine.call(engine.limiter.acquire(&rule, call)).allowed);
        }
        for _ in 0..10 {
            let denied = engine.call(engine.limiter.acquire(&rule, request(&key, NOW + 6 * SECOND)));
            // The other is sooner as if never used.
            assert_eq!(denied.retry_after, RetryAfter::After(Duration::from_secs(4)));
        }
    }
}

#[test]
fn a_shard_that_allows_is_preferred_to_one_with_a_shorter_wait() {
    for engine in both() {
        for text in ["token-bucket 1/1s burst 2 max-debt 2 shards 2", "gcra 1/1s burst 2 max-debt 2 shards 2"] {
            let (rule, key) = (rule(text), engine.fresh_key());
            for (id, ms) in ids(&engine, &rule, &[0, 0, 1]).iter().zip([0, 0, 1000]) {
                let call = request(&key, NOW + ms * 1000).id(id);
                assert!(engine.call(engine.limiter.reserve(&rule, call)).allowed);
            }
            // One owes half a unit of the one that it may owe, and the other has nothing left.
            let reserved = engine.call(engine.limiter.reserve(&rule, request(&key, NOW + SECOND)));
            assert_eq!((reserved.allowed, reserved.retry_after), (true, RetryAfter::After(2 * SECONDS)), "{text}");
        }
    }
}

#[test]
fn law_1_a_denial_and_a_peek_write_nothing() {
    on_both_engines((sharded(), beginning(), steps(1..=12)), |engine, (limit, begin, steps)| {
        let (key, aimed) = (engine.fresh_key(), engine.subject(limit.whole()));
        // Few shards, so that all can be seen.
        let limit = split(&limit, 4).expect("fewer than it has");
        let rule = Rule::new("shards", limit.clone()).expect("a rule");
        let mut now = begin;
        let fields = |now| engine.states(&rule, &key, now).into_iter().map(|state| (state.exists, state.fields));
        for step in steps {
            let (cost, then) = step.aim(&aimed, now);
            now = now.max(then);
            let before: Vec<_> = fields(now).collect();
            engine.call(engine.limiter.peek(&rule, request(&key, now).cost(cost)));
            prop_assert_eq!(&fields(now).collect::<Vec<_>>(), &before, "a peek wrote");
            let decision = engine.call(engine.limiter.acquire(&rule, by_own_id(&rule, request(&key, now).cost(cost))));
            let after: Vec<_> = fields(now).collect();
            let changed = before.iter().zip(&after).filter(|(before, after)| before != after).count();
            prop_assert!(changed <= usize::from(decision.allowed && cost > 0), "{} shards changed", changed);
        }
        Ok(())
    });
}

#[test]
fn law_4_every_shard_expires_and_is_then_as_if_never_used() {
    let engine = Engine::redis();
    let mut redis = engine.server.as_ref().expect("redis").connection();
    for text in EACH {
        let (rule, key) = (rule(text), engine.fresh_key());
        for number in 0..30 {
            // The same ids in each run, so that permits are of all shards in each.
            let (id, request) = (number.to_string(), Request::new(&key));
            let request = if text.starts_with("concurrency") { request.id(&id) } else { request };
            engine.call(engine.limiter.acquire(&rule, request));
            engine.call(engine.limiter.penalty(&rule, Request::new(&key).id("p").cost(1)));
        }
        let states = engine.call(engine.limiter.inspect(&rule, key.as_str()));
        assert!(states.iter().filter(|state| state.exists).count() == 4, "{text}");
        for state in &states {
            let ttl: i64 = cmd("PTTL").arg(&state.key).query(&mut redis).expect("a time");
            let (least, most) =
                (state.decision.reset_after, 2 * rule.limits().map(Limit::longest_reset).sum::<Duration>());
            // Shards that don't divide take at most a unit's time longer.
            let (ttl, most) = (Duration::from_millis(u64::try_from(ttl).expect("an expiry")), most + 2 * MINUTE);
            assert!(ttl + Duration::from_secs(1) >= least && ttl <= most, "{text}: {ttl:?} of {least:?} to {most:?}");
        }
        let key = engine.fresh_key();
        let resets = (0..30)
            .map(|_| engine.call(engine.limiter.acquire(&rule, by_own_id(&rule, request(&key, NOW)))).reset_after);
        let latest = NOW + micros(resets.max().expect("some"));
        assert_eq!(engine.left(&rule, &key, latest), 40, "{text}");
        assert!(engine.left(&rule, &key, latest - 1) < 40, "{text}");
    }
}

#[test]
fn an_id_finds_its_shard_again() {
    for engine in both() {
        for text in EACH {
            if text.starts_with("concurrency") {
                continue;
            }
            let (rule, key) = (rule(&text.replace("40", "400")), engine.fresh_key());
            let ids: Vec<_> = (0..12).map(|id| format!("call-{id}")).collect();
            for (number, id) in ids.iter().enumerate() {
                let call = request(&key, NOW).id(id).cost(2);
                let first = engine.call(engine.limiter.acquire(&rule, call));
                let again = engine.call(engine.limiter.acquire(&rule, call));
                assert!(
                    first.allowed && (first.remaining, first.granted) == (again.remaining, again.granted),
                    "{text}"
                );
                assert_eq!(engine.left(&rule, &key, NOW), 400 - 2 * (number as u64 + 1), "{text}: charged twice");
                if number % 2 == 0 {
                    engine.call(engine.limiter.cancel(&rule, call));
                    engine.runtime.block_on(engine.limiter.settle(&rule, call)).expect_err("forgotten");
                    engine.call(engine.limiter.acquire(&rule, call));
                }
                engine.call(engine.limiter.settle(&rule, request(&key, NOW).id(id).cost(1)));
                engine.call(engine.limiter.cancel(&rule, call));
                assert_eq!(engine.left(&rule, &key, NOW), 400 - 2 * number as u64, "{text}");
                engine.call(engine.limiter.acquire(&rule, call));
            }
            let used = engine.states(&rule, &key, NOW).iter().filter(|state| state.exists).count();
            assert!(used > 1, "{text}: all ids in one shard");
            for id in &ids {
                engine.call(engine.limiter.cancel(&rule, request(&key, NOW).id(id)));
            }
            assert_eq!(engine.left(&rule, &key, NOW), 400, "{text}");
            let more = request(&key, NOW).id("one");
            engine.call(engine.limiter.acquire(&rule, more));
            engine.call(engine.limiter.settle(&rule, more.cost(130)));
            assert_eq!(engine.left(&rule, &key, NOW), 300, "{text}: a settlement beyond the share is its shard's");
        }
    }
}

#[tokio::test]
async fn permits_are_renewed_and_released_where_they_are_held() {
    let server = Server::start();
    for limiter in [Limiter::new(Embedded::new()), Limiter::new(Redis::open(&server.url()).expect("a good address"))] {
        let limiter = limiter.deadline(MINUTE);
        let rule = rule("concurrency 40 ttl 1h shards 4");
        let left = async || {
            let states = limiter.inspect(&rule, "key").await.expect("states");
            states.iter().map(|state| state.decision.remaining).sum::<u64>()
        };
        let mut permits = Vec::new();
        while permits.len() < 20 {
            permits.extend(limiter.hold(&rule, "key").await.expect("a decision").permit);
        }
        assert_eq!(left().await, 20);
        for permit in permits {
            permit.renew().await.expect("held");
            permit.release().await.expect("given back");
        }
        assert_eq!(left().await, 40);
        let by_id = Request::new("key").id("worker-7").cost(3);
        assert!(limiter.acquire(&rule, by_id).await.expect("a decision").allowed);
        limiter.renew(&rule, by_id).await.expect("held");
        assert_eq!(left().await, 37);
        limiter.refund(&rule, by_id.cost(1)).await.expect("given back");
        limiter.release(&rule, by_id).await.expect("given back");
        assert_eq!(left().await, 40);
        assert!(limiter.renew(&rule, by_id).await.unwrap_err().is_unknown_id());
        let waited = limiter.hold_wait(&rule, "key", MINUTE).await.expect("a decision");
        assert!(waited.permit.is_some());
    }
}

#[test]
fn a_block_and_a_reset_are_of_all_shards() {
    for engine in both() {
        for text in EACH {
            let (rule, key) = (rule(text), engine.fresh_key());
            for _ in 0..20 {
                engine.call(engine.limiter.acquire(&rule, by_own_id(&rule, request(&key, NOW))));
            }
            let blocked = engine.call(engine.limiter.block(&rule, request(&key, NOW), MINUTE));
            assert!(blocked.blocked, "{text}");
            for _ in 0..40 {
                let denied = engine.call(engine.limiter.acquire(&rule, by_own_id(&rule, request(&key, NOW + 1))));
                assert!(!denied.allowed && denied.blocked, "{text}");
            }
            engine.call(engine.limiter.unblock(&rule, request(&key, NOW + 1)));
            assert!(engine.states(&rule, &key, NOW + 1).iter().all(|state| !state.decision.blocked), "{text}");
            assert!(engine.left(&rule, &key, NOW + 1) <= 21, "{text}: a block forgave");
            let reset = engine.call(engine.limiter.reset(&rule, key.as_str()));
            assert_eq!((reset.remaining, reset.limit), (10, 10), "{text}");
            assert!(engine.states(&rule, &key, NOW + 1).iter().all(|state| !state.exists), "{text}");
        }
    }
}

#[test]
fn a_cost_above_the_smallest_share_is_refused_or_always_denied() {
    let text = "token-bucket 100/1h burst 11 shards 4";
    for (text, cost, expected) in [
        (text, 3, format!("cost: expected at most 2, the smallest share of {text}, got 3")),
        ("gcra 10/1s", 11, "cost: expected at most 10, all that is ever admitted by gcra 10/1s, got 11".into()),
        (
            "gcra 10/1s burst 0 max-debt 4",
            5,
            "cost: expected at most 4, all that is ever admitted by gcra 10/1s burst 0 max-debt 4, got 5".into(),
        ),
    ] {
        assert_eq!(rule(text).cost(cost).expect_err("too much").to_string(), expected);
        assert!(rule(text).cost(cost - 1).is_ok());
    }
    let ten = rule("gcra 10/1s").cost(10).expect("fits");
    let error = ten.and("fixed-window 9/1d".parse().expect("a limit")).expect_err("too much");
    assert!(error.to_string().contains("cost: expected at most 9"), "{error}");
    for engine in both() {
        for calls in 0..12 {
            let (rule, key) = (rule(text), engine.fresh_key());
            // Three of four shards hold 3.
            let call = request(&key, NOW).cost(3);
            let id = format!("call-{calls}");
            for call in [call, call.id(&id)] {
                let denied = engine.call(engine.limiter.acquire(&rule, call));
                assert_eq!((denied.allowed, denied.retry_after, denied.limit), (false, RetryAfter::Never, 2));
            }
            assert_eq!(engine.call(engine.limiter.peek(&rule, call)).retry_after, RetryAfter::Never);
            assert_eq!(engine.left(&rule, &key, NOW), 11);
        }
    }
}

#[test]
fn shards_are_alone_in_their_rule_and_have_no_lease() {
    let sharded: Limit = "gcra 40/1s shards 4".parse().expect("a limit");
    let other: Limit = "fixed-window 1000/1d".parse().expect("a limit");
    for (first, second) in [(sharded.clone(), other.clone()), (other, sharded.clone())] {
        let error = Rule::new("api", first).and_then(|rule| rule.and(second)).expect_err("two limits");
        assert!(error.to_string().contains("expected a limit with shards to be alone"), "{error}");
    }
    let limiter = Limiter::new(Embedded::new());
    let error = limiter.lease(&Rule::new("api", sharded).expect("a rule"), "key", NonZeroU32::MIN).expect_err("shards");
    assert!(error.is_input() && error.to_string().contains("a limit without shards"), "{error}");
}

#[test]
fn shards_have_slots_of_their_own_and_names_that_no_other_key_has() {
    let engine = Engine::redis();
    let rule = rule("gcra 2000/1s shards 1000").named("hot").expect("a name");
    let keys: Vec<_> = engine.states(&rule, "user:42", NOW).into_iter().map(|state| state.key).collect();
    assert_eq!(keys[3], "tollgate:{user:42%s3}:hot/gcra-1s");
    assert_eq!(keys.iter().collect::<HashSet<_>>().len(), 1000);
    let slots: HashSet<_> = keys.iter().map(|key| slot(key)).collect();
    assert!(slots.len() > 900, "{} slots", slots.len());
    for key in ["user:42%s3", "user:42s3", "user:42"] {
        let alone = engine.call(engine.limiter.inspect(&rule.clone(), key));
        assert!(key == "user:42" || alone.iter().all(|state| !keys.contains(&state.key)), "{key}");
    }
    // All are forgotten with their rule.
    for _ in 0..50 {
        engine.call(engine.limiter.acquire(&rule, "user:42"));
    }
    assert!(engine.call(engine.limiter.reset_all("hot", |_| ())) > 30);
    assert!(engine.states(&rule, "user:42", NOW).iter().all(|state| !state.exists));
}

/// As Redis Cluster does: CRC16 (XMODEM) of what stands in the braces.
fn slot(key: &str) -> u16 {
    let tag = key.split_once('{').and_then(|(_, rest)| rest.split_once('}')).expect("a tag").0;
    tag.bytes().fold(0_u16, |crc, byte| {
        (0..8)
            .fold(crc ^ (u16::from(byte) << 8), |crc, _| if crc & 0x8000 > 0 { (crc << 1) ^ 0x1021 } else { crc << 1 })
    }) % 16384
}
