//! Keys of any bytes: spelled apart, each in a hash slot of its own choosing by nobody.

use std::cell::RefCell;
use std::collections::HashMap;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError, TestRunner};
use tollgate::{Request, Rule};

use crate::subject::{Engine, time};

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
        proptest::sample::select(vec!["%7b", "%7d", "{a}", "}:b", ":test/gcra-1d", "#test", "user:42"])
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

/// What somebody would call themselves to come to lie beside another, or to be taken for them.
fn attacks(on: &[u8]) -> Vec<Vec<u8>> {
    let around = |before: &[u8], after: &[u8]| [before, on, after].concat();
    let mut keys = vec![
        around(b"{", b"}"),
        around(b"x{", b"}y"),
        around(b"}{", b"}"),
        around(b"{}", b""),
        around(b"", b"}"),
        around(b"", b"}:test/gcra-1d"),
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
    let rule = crate::rule::rule("gcra 100/1d");
    let beside = rule.clone().tagged("org");
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
    let config = Config { cases: 120, failure_persistence: None, ..Config::default() };
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
