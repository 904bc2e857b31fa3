//! Limits that are split into shards. On a cluster they are together never above the limit, and found again by an id;
//! on one server they aren't there.

mod other_features;

use std::collections::HashSet;
use std::num::NonZeroU32;
use std::time::Duration;

use proptest::prelude::*;
use tollgate::redis::cmd;
use tollgate::{
    Algorithm, Cluster, DecidedBy, DenialCache, Embedded, KeyState, Limit, Limiter, Operation, Request, RetryAfter,
    Rule,
};
use tollgate_testing::cluster::{cluster_of_one, cluster_url};
use tollgate_testing::engines::{Engine, Micros, answer, micros, on_a_cluster, on_both_engines, time};
use tollgate_testing::histories::{beginning, steps};
use tollgate_testing::limits::{sharded, split};
use tollgate_testing::oracle::Oracle;
use tollgate_testing::oracle_spec::spec;
use tollgate_testing::rules::{assert_of_every_algorithm, by_own_id};

const NOW: Micros = 1 << 50;
const MINUTE: Duration = Duration::from_secs(60);

/// One of each algorithm.
const EACH: [&str; 6] = [
    "token-bucket 40/1h shards 4",
    "fixed-window 40/1h shards 4",
    "sliding-window 40/1h shards 4",
    "sliding-log 40/1h shards 4",
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

/// The engines that have all keys in one place.
fn single() -> [Engine; 2] {
    [Engine::embedded(), Engine::redis()]
}

#[test]
fn shards_admit_nothing_that_one_unsharded_limit_would_not_admit() {
    on_a_cluster((sharded(), beginning(), steps(1..=60)), |engine, (limit, begin, steps)| {
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
            prop_assert!(decision.capacity <= share + 1 && decision.remaining <= decision.capacity);
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
    let engine = Engine::cluster();
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

/// Whatever is asked, and the state too is that of the limit without shards.
#[test]
fn on_one_server_a_limit_with_shards_is_the_limit_without_them() {
    on_both_engines((sharded(), beginning(), steps(1..=30)), |engine, (limit, begin, steps)| {
        let (key, aimed) = (engine.fresh_key(), engine.subject(limit.whole()));
        let rules = [limit.clone(), limit.whole()].map(|limit| Rule::new("shards", limit).expect("a rule"));
        // Under another prefix the same key has windows that start at the same time.
        let apart = engine.limiter.to_builder().prefix("apart").expect("a good prefix").build();
        let reserves = limit.algorithm().reserves();
        let holds = limit.algorithm().holds();
        let mut now = begin;
        for (number, step) in steps.into_iter().enumerate() {
            let (cost, then) = step.aim(&aimed, now);
            now = now.max(then);
            let (id, call) = (format!("call-{}", number / 2), request(&key, now).cost(cost));
            let operation = match number % 6 {
                0 | 1 => Operation::Acquire,
                2 if reserves => Operation::Reserve,
                2 => Operation::AtMost,
                3 if holds => Operation::Release,
                3 => Operation::Refund,
                4 => Operation::Penalty,
                _ => Operation::Peek,
            };
            let call = if holds || number % 2 == 1 { call.id(&id) } else { call };
            let [one, other] = [(&engine.limiter, &rules[0]), (&apart, &rules[1])].map(|(limiter, rule)| {
                let decided = engine.runtime.block_on(limiter.call(operation, rule, call));
                decided.map(|decision| (answer(&decision), decision.granted)).map_err(|error| error.to_string())
            });
            prop_assert_eq!(one, other, "{} of {}", operation.name(), limit);
        }
        let states = [(&engine.limiter, &rules[0]), (&apart, &rules[1])]
            .map(|(limiter, rule)| engine.call(limiter.inspect(rule, request(&key, now))));
        let shown = |states: &[KeyState]| states.iter().map(|state| state.fields.clone()).collect::<Vec<_>>();
        prop_assert_eq!((states[0].len(), shown(&states[0])), (1, shown(&states[1])));
        let keys = rules.each_ref().map(|rule| engine.limiter.keys(rule, request(&key, now)).expect("keys"));
        prop_assert_eq!(&keys[0], &keys[1]);
        Ok(())
    });
}

/// What only a whole limit has: one call for many keys, its full capacity in one cost, denials that are remembered.
#[test]
fn on_one_server_calls_on_a_limit_with_shards_share_a_batch_and_may_take_all_of_it() {
    let engine = Engine::redis();
    let server = engine.server.as_ref().expect("redis");
    let rule = rule("gcra 40/1h shards 4");
    engine.call(engine.limiter.acquire(&rule, "warm"));
    server.reset_command_counts();
    let keys: Vec<_> = (0..80).map(|key| key.to_string()).collect();
    let decisions = engine.runtime.block_on(engine.limiter.acquire_many(&rule, &keys));
    assert!(decisions.iter().all(|decision| decision.as_ref().is_ok_and(|decision| decision.remaining == 39)));
    assert_eq!(server.commands().get("evalsha").map(|(calls, _)| *calls), Some(1));
    for engine in single() {
        let limiter = engine.limiter.to_builder().denial_cache(DenialCache::new(100)).build();
        let all = engine.call(limiter.acquire(&rule, Request::new("all").cost(40)));
        assert_eq!((all.allowed, all.capacity, all.remaining), (true, 40, 0));
        assert!(!engine.call(limiter.acquire(&rule, "all")).allowed);
        assert_eq!(engine.call(limiter.acquire(&rule, "all")).by, DecidedBy::DenialCache);
        assert_eq!(engine.call(limiter.acquire(&rule, Request::new("b").cost(41))).retry_after, RetryAfter::Never);
    }
}

#[test]
fn penalties_at_mosts_and_refunds_are_of_one_shard() {
    let engine = Engine::cluster();
    for text in EACH {
        if text.starts_with("concurrency") {
            continue;
        }
        let text = text.replace("shards 4", "shards 2");
        let (rule, key) = (rule(&text), engine.fresh_key());
        let call = |units| request(&key, NOW).cost(units);
        assert_eq!(engine.call(engine.limiter.penalty(&rule, call(5))).remaining, 15, "{text}");
        let granted = engine.call(engine.limiter.at_most(&rule, call(30))).granted;
        assert!([15, 20].contains(&granted), "{text}: {granted}");
        assert_eq!(engine.left(&rule, &key, NOW), 35 - granted, "{text}");
        let refunded = engine.call(engine.limiter.refund(&rule, call(20))).remaining;
        assert_eq!(refunded, 20, "{text}: one is full");
        assert!(engine.left(&rule, &key, NOW) <= 40, "{text}");
    }
}

#[test]
fn law_1_a_denial_and_a_peek_write_nothing() {
    on_a_cluster((sharded(), beginning(), steps(1..=12)), |engine, (limit, begin, steps)| {
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
    let engine = Engine::cluster();
    let mut redis = engine.server.as_ref().expect("redis").connection();
    for text in EACH {
        let (rule, key) = (rule(text), engine.fresh_key());
        for number in 0..30 {
            // The same ids in each run, so that calls are of all shards in each.
            let id = number.to_string();
            engine.call(engine.limiter.acquire(&rule, Request::new(&key).id(&id)));
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
    let engine = Engine::cluster();
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
            assert!(first.allowed && (first.remaining, first.granted) == (again.remaining, again.granted), "{text}");
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

#[tokio::test]
async fn permits_are_renewed_and_released_where_they_are_held() {
    let server = cluster_of_one();
    let limiter =
        Limiter::builder(Cluster::open(&cluster_url(&server)).expect("a good address")).deadline(MINUTE).build();
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

#[test]
fn a_block_and_a_reset_are_of_all_shards() {
    let engine = Engine::cluster();
    for text in EACH {
        let (rule, key) = (rule(text), engine.fresh_key());
        let taken: u64 = (0..20)
            .map(|_| engine.call(engine.limiter.acquire(&rule, by_own_id(&rule, request(&key, NOW)))).granted)
            .sum();
        let blocked = engine.call(engine.limiter.block(&rule, request(&key, NOW), MINUTE));
        assert!(blocked.blocked, "{text}");
        for _ in 0..40 {
            let denied = engine.call(engine.limiter.acquire(&rule, by_own_id(&rule, request(&key, NOW + 1))));
            assert!(!denied.allowed && denied.blocked, "{text}");
        }
        engine.call(engine.limiter.unblock(&rule, request(&key, NOW + 1)));
        assert!(engine.states(&rule, &key, NOW + 1).iter().all(|state| !state.decision.blocked), "{text}");
        assert!(engine.left(&rule, &key, NOW + 1) <= 41 - taken, "{text}: a block forgave");
        let reset = engine.call(engine.limiter.reset(&rule, key.as_str()));
        assert_eq!((reset.remaining, reset.capacity), (10, 10), "{text}");
        assert!(engine.states(&rule, &key, NOW + 1).iter().all(|state| !state.exists), "{text}");
    }
}

#[test]
fn a_cost_above_the_smallest_share_is_refused_or_always_denied() {
    let text = "token-bucket 100/1h burst 11 shards 4";
    for (text, cost, expected) in [
        (text, 3, format!("cost: expected at most 2, the smallest share of {text}, got 3")),
        (
            "gcra 10/1s",
            11,
            "cost: expected at most 10, the most that can ever be admitted by token-bucket 10/1s, got 11".into(),
        ),
        (
            "gcra 10/1s burst 0 max-debt 4",
            5,
            "cost: expected at most 4, the most that can ever be admitted by token-bucket 10/1s burst 0 max-debt 4, \
             got 5"
                .into(),
        ),
    ] {
        assert_eq!(rule(text).cost(cost).expect_err("too much").to_string(), expected);
        assert!(rule(text).cost(cost - 1).is_ok());
    }
    let ten = rule("gcra 10/1s").cost(10).expect("fits");
    let error = ten.and("fixed-window 9/1d".parse().expect("a limit")).expect_err("too much");
    assert!(error.to_string().contains("cost: expected at most 9"), "{error}");
    let engine = Engine::cluster();
    for calls in 0..12 {
        let (rule, key) = (rule(text), engine.fresh_key());
        // Three of four shards hold 3.
        let call = request(&key, NOW).cost(3);
        let id = format!("call-{calls}");
        for call in [call, call.id(&id)] {
            let denied = engine.call(engine.limiter.acquire(&rule, call));
            assert_eq!((denied.allowed, denied.retry_after, denied.capacity), (false, RetryAfter::Never, 2));
        }
        assert_eq!(engine.call(engine.limiter.peek(&rule, call)).retry_after, RetryAfter::Never);
        assert_eq!(engine.left(&rule, &key, NOW), 11);
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
    let engine = Engine::cluster();
    let rule = rule("gcra 2000/1s shards 1000").named("hot").expect("a name");
    let keys: Vec<_> = engine.states(&rule, "user:42", NOW).into_iter().map(|state| state.key).collect();
    assert_eq!(keys[3], "tollgate:{user:42%s3}:hot/token-bucket-1s");
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
