//! A limit that keeps its name and gets another algorithm is a new limit: nothing of the old one's state is read, and
//! callers with state of the old one are decided as any others.

use std::time::Duration;

use tollgate::{Algorithm, OnError, Operation, Request, RetryAfter, Rule};
use tollgate_testing::engines::{Engine, time};
use tollgate_testing::rules::{five_of, limit};

/// The rule `api` of one limit, `per-user`, that admits five.
fn five(algorithm: Algorithm) -> Rule {
    let limit = limit(five_of(algorithm)).named("per-user").expect("a name");
    Rule::new("api", limit).expect("a name")
}

fn holds(rule: &Rule) -> bool {
    rule.limits().any(|limit| limit.algorithm().holds())
}

fn pairs() -> Vec<(Algorithm, Algorithm)> {
    let of_one = |one| Algorithm::all().filter(move |other| *other != one).map(move |other| (one, other));
    Algorithm::all().flat_map(of_one).collect()
}

#[test]
fn a_named_limit_of_another_algorithm_starts_unused_and_counts_apart() {
    assert_eq!(pairs().len(), 30);
    for engine in [Engine::redis(), Engine::embedded()] {
        let limiter = engine.limiter.to_builder().on_error(OnError::Closed).build();
        for (old, new) in pairs() {
            let what = format!("{old} becomes {new}");
            let (old, new) = (five(old), five(new));
            let ids = ["id-0", "id-1", "id-2", "id-3", "id-4", "id-5", "id-6"];
            let request = Request::new(&what).at(time(1 << 50));
            let acquire = |rule, id: usize| {
                let answer = engine.runtime.block_on(limiter.acquire(rule, request.id(ids[id])));
                answer.unwrap_or_else(|error| panic!("{what}: {error}"))
            };
            // In use: used up, denied and blocked, and its calls remembered by their ids.
            for id in 0..5 {
                assert!(acquire(&old, id).allowed, "{what}");
            }
            assert!(!acquire(&old, 5).allowed, "{what}");
            engine.call(limiter.block(&old, request, Duration::from_secs(3600)));
            assert!(acquire(&old, 6).blocked, "{what}");

            let seen = engine.call(limiter.peek(&new, request));
            assert_eq!((seen.remaining, seen.reset_after, seen.blocked), (5, Duration::ZERO, false), "{what}");
            if !holds(&new) {
                // Of permits, whatever isn't held is given back already.
                let error =
                    engine.runtime.block_on(limiter.cancel(&new, request.id(ids[0]))).expect_err("not its call");
                assert!(error.is_unknown_id(), "{what}: {error}");
            }
            for id in 0..5 {
                let decision = acquire(&new, id);
                assert!(decision.allowed && decision.by.error().is_none(), "{what}: {decision:?}");
                assert_eq!(decision.remaining, 4 - id as u64, "{what}");
            }
            let denied = acquire(&new, 5);
            assert!(!denied.allowed && !denied.blocked && denied.retry_after != RetryAfter::Never, "{what}");

            // The old one is as it was, until its own state is given back or forgotten.
            assert!(acquire(&old, 6).blocked, "{what}");
            engine.call(limiter.unblock(&old, request));
            let gives_back = if holds(&old) { Operation::Release } else { Operation::Cancel };
            engine.call(limiter.call(gives_back, &old, request.id(ids[0])));
            assert_eq!(engine.call(limiter.peek(&old, request)).remaining, 1, "{what}");
            assert!(!acquire(&new, 5).allowed, "{what}");
            for rule in [&old, &new] {
                engine.call(limiter.reset(rule, request));
                assert_eq!(engine.call(limiter.peek(rule, request)).remaining, 5, "{what}");
            }
        }
    }
}

/// No name of a limit spells the key of another limit: not of one without a name, nor of another algorithm.
#[test]
fn a_limits_name_and_algorithm_are_the_end_of_its_key() {
    let engine = Engine::embedded();
    let keys = |limit: &str, name: Option<&str>| {
        let limit = tollgate_testing::rules::limit(limit);
        let limit = name.map_or(Ok(limit.clone()), |name| limit.named(name)).expect("a name");
        engine.limiter.keys(&Rule::new("api", limit).expect("a name"), "u").expect("keys")
    };
    let mut all = Vec::new();
    for limit in Algorithm::all().map(five_of) {
        all.push(keys(limit, None));
        for name in [
            "token-bucket",
            "token-bucket-10s",
            "10s",
            "fixed-window-day",
            "concurrency",
            "fixed-window",
            "a",
            "a-gcra",
        ] {
            all.push(keys(limit, Some(name)));
        }
    }
    let count = all.len();
    all.sort();
    all.dedup();
    assert_eq!(all.len(), count);
    assert_eq!(keys("gcra 5/10s", Some("a")), ["tollgate:{u}:api/a/token-bucket"]);
    assert_eq!(keys("fixed-window 5/day", Some("a")), ["tollgate:{u}:api/a/calendar-window"]);
    assert_eq!(keys("token-bucket 500/10s shards 2", Some("a")), ["tollgate:{u}:api/a/token-bucket"]);
}

/// Answers name a limit by this alone.
#[test]
fn two_limits_of_one_rule_have_different_names_whatever_their_algorithms() {
    let [gcra, log] = ["gcra 5/10s", "sliding-log 5/10s"].map(|text| limit(text).named("a").expect("a name"));
    let error = Rule::new("api", gcra).and_then(|rule| rule.and(log)).expect_err("one name");
    assert_eq!(error.to_string(), "rule api: two limits are named a");
}
