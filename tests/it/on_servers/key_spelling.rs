//! Keys of any bytes: no two are spelled alike, and no caller can choose a key's hash slot.

use std::cell::RefCell;
use std::collections::HashMap;
use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError, TestRunner};
use tollgate::{Algorithm, Charged, Cluster, DenialCache, KeySecret, Limiter, Redis, Request, Rule, redis};
use tollgate_testing::effort::cases;
use tollgate_testing::engines::{Engine, time};
use tollgate_testing::redis_server::Server;

/// What Redis Cluster hashes of a key: what stands between its first brace and the next closing one, if anything does.
fn hashed(name: &str) -> &str {
    let (_, rest) = name.split_once('{').expect("a tag");
    let (tag, _) = rest.split_once('}').expect("a tag that ends");
    assert!(!tag.is_empty(), "{name}: all of it would be hashed");
    tag
}

/// Whatever means something in a key, repeated up to a megabyte.
fn key() -> impl Strategy<Value = Vec<u8>> {
    let telling = prop_oneof![
        proptest::sample::select(b"{}%#:/\0\xff\n a7bd".to_vec()).prop_map(|byte| vec![byte]),
        proptest::sample::select(vec!["%7b", "%7d", "{a}", "}:b", ":test/token-bucket-1d", "#test", "user:42"])
            .prop_map(|text| text.as_bytes().to_vec()),
    ];
    let short = proptest::collection::vec(telling, 1..=4).prop_map(|pieces| pieces.concat());
    let any = proptest::collection::vec(any::<u8>(), 1..=200);
    let times = prop_oneof![8 => Just(1_usize), 2 => 30..=70_usize, 1 => Just(1 << 18)];
    (prop_oneof![3 => short, 1 => any], times).prop_map(|(piece, times)| {
        let mut key = piece.repeat(times);
        key.truncate(1 << 20);
        key
    })
}

/// Names chosen to share another key's slot, or to be taken for it.
fn attacks(on: &[u8]) -> Vec<Vec<u8>> {
    let around = |before: &[u8], after: &[u8]| [before, on, after].concat();
    let mut keys = vec![
        around(b"{", b"}"),
        around(b"x{", b"}y"),
        around(b"}{", b"}"),
        around(b"{}", b""),
        around(b"", b"}"),
        around(b"", b"}:test/token-bucket-1d"),
        around(b"", b":"),
        around(b"", b"\0"),
        around(b"", b" "),
        around(b"%", b""),
        around(b"#", b""),
    ];
    keys.retain(|key| key.len() <= 1 << 20);
    keys
}

#[test]
fn no_two_keys_are_spelled_alike_and_no_key_steers_to_anothers_slot() {
    let engine = Engine::redis();
    let rule = tollgate_testing::rules::rule("gcra 100/1d");
    let beside = rule.clone().tagged("org").expect("a part");
    let (names, tags) = (RefCell::new(HashMap::new()), RefCell::new(HashMap::new()));
    let spelled = |rule: &Rule, tag: Option<&[u8]>, key: &[u8]| {
        let parts = [("org", tag.unwrap_or(key))];
        let request = Request::new(key).parts(if tag.is_some() { &parts } else { &[] });
        let state = engine.runtime.block_on(engine.limiter.inspect(rule, request)).expect("a state");
        state[0].key.clone()
    };
    let seen = |name: String, tag: &[u8], key: &[u8]| -> Result<(), TestCaseError> {
        prop_assert!(name.len() < 512 && name.bytes().all(|byte| byte.is_ascii_graphic()), "{name}");
        let of_tag = tags.borrow_mut().entry(hashed(&name).to_owned()).or_insert_with(|| tag.to_vec()).clone();
        prop_assert!(of_tag == tag, "{name}: the slot of another");
        let whose = (tag.to_vec(), key.to_vec());
        let of_name = names.borrow_mut().entry(name.clone()).or_insert_with(|| whose.clone()).clone();
        prop_assert!(of_name == whose, "{name}: the key of another");
        Ok(())
    };
    let config = Config { cases: cases(50), failure_persistence: None, ..Config::default() };
    let result = TestRunner::new(config).run(&(key(), key()), |(tag, key)| {
        seen(spelled(&rule, None, &key), &key, &key)?;
        seen(spelled(&beside, Some(&tag), &key), &tag, &key)?;
        let before = engine.runtime.block_on(engine.limiter.peek(&rule, Request::new(&key).at(time(1 << 50))));
        let before = before.expect("a decision").remaining;
        for attack in attacks(&key) {
            seen(spelled(&rule, None, &attack), &attack, &attack)?;
            let request = Request::new(&attack).at(time(1 << 50));
            engine.runtime.block_on(engine.limiter.acquire(&rule, request)).expect("a decision");
        }
        let request = Request::new(&key).at(time(1 << 50)).cost(2);
        let decision = engine.runtime.block_on(engine.limiter.acquire(&rule, request)).expect("a decision");
        prop_assert!(!decision.allowed || decision.remaining == before - 2, "shared with another");
        engine.runtime.block_on(engine.limiter.reset(&rule, &key)).expect("forgotten");
        Ok(())
    });
    result.unwrap_or_else(|error| panic!("{error}"));
}

/// Nothing of whom it is about stands in Redis, neither in keys nor in values, whatever the call.
#[tokio::test]
async fn hashed_keys_appear_hashed_everywhere_in_redis() {
    let server = Server::start();
    let secret = KeySecret::new("0123456789abcdef0123456789abcdef").expect("a secret");
    let redis = Redis::open(&server.url()).expect("a good address");
    let limiter = Limiter::builder(redis.clone()).deadline(tollgate_testing::polling::PATIENCE).build();
    let limiter = limiter.to_builder().key_secret(&secret).denial_cache(DenialCache::new(100)).build();
    let texts = [
        "token-bucket 5/1d",
        "fixed-window 5/1d start spread",
        "fixed-window 5/month tz Europe/Zurich",
        "sliding-window 5/1d",
        "sliding-log 5/1d",
    ];
    // Permits are below.
    tollgate_testing::rules::assert_of_every_algorithm(&texts, &[Algorithm::Concurrency]);
    let mut rules: Vec<_> = texts.into_iter().map(tollgate_testing::rules::rule).collect();
    rules.push(
        tollgate_testing::rules::rule("gcra 9/1d")
            .tagged("org")
            .expect("a part")
            .and_by("org", "gcra 7/2d".parse().expect("a limit"))
            .expect("a rule"),
    );
    let request = Request::new("alice@example.com").parts(&[("org", b"example.org")]);
    for rule in &rules {
        let first = limiter.acquire(rule, request).await.expect("a decision");
        let second = limiter.acquire(rule, request.id("call-1")).await.expect("a decision");
        assert!(second.allowed && second.capacity == first.capacity, "{rule}");
        limiter.block(rule, request, Duration::from_secs(60)).await.expect("a block");
        assert!(limiter.acquire(rule, request).await.expect("a decision").blocked, "{rule}");
    }
    let permits = tollgate_testing::rules::rule("concurrency 3 ttl 1h");
    limiter.acquire(&permits, request.id("call-2")).await.expect("a decision");
    limiter.acquire_many(&rules[0], [request; 3]).await;

    let mut connection = server.connection();
    let keys: Vec<Vec<u8>> = redis::cmd("KEYS").arg("*").query(&mut connection).expect("keys");
    assert!(keys.len() > rules.len(), "{}", keys.len());
    for key in keys {
        let dumped: Vec<u8> = redis::cmd("DUMP").arg(&key).query(&mut connection).expect("a value");
        let kept = [String::from_utf8_lossy(&key), String::from_utf8_lossy(&dumped)].concat();
        assert!(kept.contains("%h") && !kept.contains("alice") && !kept.contains("example"), "{kept}");
    }

    // As are those of shards.
    let cluster = Cluster::open("redis-cluster://127.0.0.1").expect("a good address");
    let split = tollgate_testing::rules::rule("gcra 4000/1d shards 8");
    let keys = Limiter::builder(cluster).key_secret(&secret).build().keys(&split, request).expect("keys");
    assert!(
        keys.len() == 8 && keys.iter().all(|key| key.starts_with("tollgate:{%h") && key.contains("%s")),
        "{keys:?}"
    );

    // Other secrets, and none, count apart.
    let other = KeySecret::new("another secret of 32 bytes......").expect("a secret");
    let plain = Limiter::builder(redis.clone()).deadline(tollgate_testing::polling::PATIENCE).build();
    for limiter in [plain.to_builder().key_secret(&other).build(), plain.clone()] {
        let decision = limiter.acquire(&rules[0], request).await.expect("a decision");
        assert_eq!((decision.allowed, decision.remaining), (true, 4));
    }
    let decision = limiter.acquire(&rules[0].clone().hash_keys(false), request).await.expect("a decision");
    assert_eq!((decision.allowed, decision.remaining), (true, 3), "as by the one without a secret");
    let error = plain.acquire(&rules[0].clone().hash_keys(true), request).await.expect_err("no secret");
    assert_eq!(error.charged(), Charged::No);
    let expected = "it hashes its keys, and the limiter has no secret (LimiterBuilder::key_secret)";
    assert_eq!(error.to_string(), format!("rule test: {expected}"));
}
