//! Shards with other features: the denial cache, policies, changed rules, a server out of memory.

use std::collections::HashSet;
use std::num::NonZeroU32;

use tollgate::middleware::HeaderStyle;
use tollgate::redis::cmd;
use tollgate::{Charged, Cluster, DecidedBy, DenialCache, Limiter, OnError, Redis, Request, RetryAfter};
use tollgate_testing::engines::Engine;
use tollgate_testing::redis_server::free_port;
use tollgate_testing::rules::by_own_id;

use super::{EACH, NOW, request, rule, single};

#[test]
fn a_shards_denial_is_not_remembered_for_the_others() {
    let engine = Engine::cluster();
    let limiter = engine.limiter.to_builder().denial_cache(DenialCache::new(100)).build();
    let rule = rule("fixed-window 40/30d shards 4");
    let decisions: Vec<_> = (0..400).map(|_| engine.call(limiter.acquire(&rule, "key"))).collect();
    assert!(decisions.iter().all(|decision| decision.by == DecidedBy::Redis));
    assert_eq!(decisions.iter().filter(|decision| decision.allowed).count(), 40);
}

#[tokio::test]
async fn a_share_of_one_process_is_of_the_whole() {
    let nobody = format!("127.0.0.1:{}", free_port());
    let redis = Redis::open(&format!("redis://{nobody}")).expect("a good address");
    let cluster = Cluster::open(&format!("redis-cluster://{nobody}")).expect("a good address");
    let two = NonZeroU32::new(2).expect("not zero");
    let local = rule("gcra 40/1h shards 4").on_error(OnError::Local { processes: two }).expect("a share");
    let open = rule("gcra 40/1h shards 4").on_error(OnError::Open).expect("a rule");
    // The most that one call could take there, by one shard or by the whole limit.
    for (limiter, most) in [(Limiter::new(cluster), 10), (Limiter::new(redis), 40)] {
        for remaining in (0..20).rev() {
            let decision = limiter.acquire(&local, "key").await.expect("decided here");
            assert_eq!(
                (decision.allowed, decision.by.name(), decision.capacity, decision.remaining),
                (true, "local", 20, remaining)
            );
        }
        assert!(!limiter.acquire(&local, "key").await.expect("decided here").allowed);
        for rule in [&local, &open] {
            let decision = limiter.acquire(rule, Request::new("other").cost(most + 1)).await.expect("decided here");
            assert_eq!((decision.allowed, decision.retry_after), (false, RetryAfter::Never), "{}", decision.by);
            let fits = most.min(20);
            assert!(limiter.acquire(rule, Request::new("other").cost(fits)).await.expect("decided here").allowed);
        }
        assert!(limiter.acquire(&open, Request::new("other").cost(most)).await.expect("decided here").allowed);
    }
}

#[test]
fn changed_numbers_keep_what_was_used_of_each_shard() {
    let engine = Engine::cluster();
    for text in EACH {
        let key = engine.fresh_key();
        let mut taken = 0;
        while taken < 20 {
            let call = by_own_id(&rule(text), request(&key, NOW));
            taken += u64::from(engine.call(engine.limiter.acquire(&rule(text), call)).allowed);
        }
        assert_eq!(engine.left(&rule(&text.replace("40", "80")), &key, NOW), 60, "{text}");
        // Of fewer shards those that are no more are forgotten; more of them begin unused.
        let states = engine.states(&rule(text), &key, NOW);
        let left = |of: u64| states.iter().map(move |state| (of + state.decision.remaining).saturating_sub(10));
        let fewer = engine.left(&rule(&text.replace("shards 4", "shards 2")), &key, NOW);
        assert_eq!(fewer, left(20).take(2).sum::<u64>(), "{text}");
        let more = engine.left(&rule(&text.replace("shards 4", "shards 8")), &key, NOW);
        assert_eq!(more, 20 + left(5).sum::<u64>(), "{text}");
    }
}

#[test]
fn a_server_out_of_memory_charges_no_shard_and_a_read_only_one_can_be_peeked() {
    let engine = Engine::cluster();
    let mut redis = engine.server.as_ref().expect("redis").connection();
    for text in EACH {
        let (rule, key) = (rule(text), engine.fresh_key());
        cmd("CONFIG").arg(&["SET", "maxmemory", "1"]).exec(&mut redis).expect("no memory");
        let error =
            engine.runtime.block_on(engine.limiter.acquire(&rule, by_own_id(&rule, key.as_str()))).expect_err(text);
        assert_ne!(error.charged(), Charged::Yes, "{error}");
        cmd("CONFIG").arg(&["SET", "maxmemory", "0"]).exec(&mut redis).expect("memory");
        assert!(engine.states(&rule, &key, NOW).iter().all(|state| !state.exists), "{text}");
        cmd("CLIENT").arg(&["PAUSE", "60000", "WRITE"]).exec(&mut redis).expect("paused");
        assert_eq!(engine.call(engine.limiter.peek(&rule, key.as_str())).remaining, 10);
        cmd("CLIENT").arg("UNPAUSE").exec(&mut redis).expect("goes on");
        assert!(engine.call(engine.limiter.acquire(&rule, by_own_id(&rule, key.as_str()))).allowed);
    }
}

#[test]
fn windows_of_a_spread_start_together_and_parts_and_tags_are_counted() {
    let engine = Engine::cluster();
    let spread = rule("fixed-window 40/1h start spread shards 4").tagged("org").expect("a part");
    let parts: [(&str, &[u8]); 1] = [("org", b"acme")];
    let call = request("anna", NOW).parts(&parts);
    for _ in 0..12 {
        engine.call(engine.limiter.acquire(&spread, call));
    }
    let states = engine.call(engine.limiter.inspect(&spread, call));
    assert_eq!(states[2].key, "tollgate:{acme%s2}:anna:test/fixed-window-1h");
    let starts: HashSet<_> = states
        .iter()
        .filter(|state| state.exists)
        .flat_map(|state| state.fields.iter().filter(|(name, _)| *name == "window_us"))
        .collect();
    assert_eq!(starts.len(), 1, "{starts:?}");
}

#[test]
fn a_rules_cost_is_charged_for_requests_that_do_not_set_one() {
    for engine in single() {
        for rule in [
            rule("gcra 40/1h"),
            rule("gcra 40/1h shards 2"),
            rule("sliding-log 40/1h").and("gcra 40/1h".parse().expect("a limit")).expect("a rule"),
        ] {
            let (rule, key) = (rule.cost(5).expect("fits"), engine.fresh_key());
            let used = |now| {
                40 - if rule.limits().len() > 1 {
                    engine.call(engine.limiter.peek(&rule, request(&key, now))).remaining
                } else {
                    engine.left(&rule, &key, now)
                }
            };
            assert_eq!(engine.call(engine.limiter.acquire(&rule, by_own_id(&rule, request(&key, NOW)))).granted, 5);
            assert_eq!(used(NOW), 5);
            engine.call(engine.limiter.acquire(&rule, by_own_id(&rule, request(&key, NOW).cost(1))));
            assert_eq!(used(NOW), 6);
            engine.call(engine.limiter.refund(&rule, request(&key, NOW)));
            assert_eq!(used(NOW), 1);
            let many = engine
                .runtime
                .block_on(engine.limiter.acquire_many(&rule, [request(&key, NOW), request(&key, NOW).cost(2)]));
            assert!(many.iter().all(|decision| decision.as_ref().is_ok_and(|decision| decision.allowed)));
            assert_eq!(used(NOW), 8);
        }
    }
}

/// Of the whole limit, as in the policy field.
#[test]
fn header_fields_tell_what_remains_of_all_shards_as_far_as_one_tells() {
    let engine = Engine::cluster();
    let rule = rule("fixed-window 1000/1h shards 8");
    for (cost, left) in [(1, 992), (125, 0)] {
        let key = engine.fresh_key();
        let decision = engine.call(engine.limiter.acquire(&rule, request(&key, NOW).cost(cost)));
        assert_eq!((decision.capacity, decision.remaining), (125, 125 - cost));
        let draft = decision.headers(HeaderStyle::Draft);
        assert_eq!(draft[0], ("ratelimit-policy", "\"test\";q=1000;w=3600".to_owned()));
        assert!(draft[1].1.starts_with(&format!("\"test\";r={left};t=")), "{draft:?}");
        let legacy = decision.headers(HeaderStyle::XRateLimit);
        assert_eq!(legacy[1], ("x-ratelimit-remaining", left.to_string()));
    }
}
