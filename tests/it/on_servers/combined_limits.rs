//! Rules of several limits: each limit is charged, or none. Against one oracle for each limit.

use std::time::Duration;

use proptest::prelude::*;
use tollgate::{Limit, Request, Rule};
use tollgate_testing::engines::{Engine, answer, on_both_engines, time};
use tollgate_testing::histories::{beginning, steps};
use tollgate_testing::limits::any_limit;
use tollgate_testing::oracle::{Answer, Oracle, Retry};
use tollgate_testing::oracle_spec::oracle;
use tollgate_testing::rules::by_own_id;

/// Rules of two to four limits of any algorithm.
fn rules() -> impl Strategy<Value = Vec<Limit>> {
    proptest::collection::vec(any_limit(), 2..=4)
}

pub(super) fn rule_of(limits: &[Limit]) -> Rule {
    let mut named =
        limits.iter().enumerate().map(|(index, limit)| limit.clone().named(&format!("l{index}")).expect("a good name"));
    let first = Rule::new("several", named.next().expect("a limit")).expect("a good name");
    named.try_fold(first, Rule::and).expect("different names")
}

#[test]
fn either_every_limit_is_charged_or_none() {
    let blocks = proptest::option::weighted(0.4, 1..30_000_000_u64);
    on_both_engines((rules(), beginning(), steps(1..=40), blocks), |engine, (limits, begin, steps, blocks)| {
        let mut rule = rule_of(&limits);
        if let Some(time) = blocks {
            rule = rule.block_for(Duration::from_micros(time)).expect("a good time");
        }
        let key = engine.fresh_key();
        // Times and costs aim at the edges of the first limit.
        let leader = engine.subject(limits[0].clone());
        let mut oracles: Vec<Oracle> = limits.iter().map(oracle).collect();
        let mut now = begin;
        for step in steps {
            let (cost, then) = step.aim(&leader, now);
            leader.acquire(cost, then);
            let request = Request::new(&key).cost(cost).at(time(then));
            let decision =
                engine.runtime.block_on(engine.limiter.acquire(&rule, by_own_id(&rule, request))).expect("a decision");
            let peeks: Vec<Answer> = oracles.iter().map(|oracle| oracle.peek(cost, then)).collect();
            let all = peeks.iter().all(|peek| peek.allowed);
            // What could never be allowed blocks no key, whichever limit says so.
            let never = peeks.iter().any(|peek| peek.retry == Retry::Never);
            oracles.iter_mut().for_each(|oracle| oracle.block_for(blocks.filter(|_| !never)));
            // A limit that denies is called, and may be brought back to now; one that would allow isn't touched.
            let expected: Vec<Answer> = oracles
                .iter_mut()
                .zip(peeks)
                .map(|(oracle, peek)| if all || !peek.allowed { oracle.acquire(cost, then) } else { peek })
                .collect();
            prop_assert_eq!(decision.allowed, all);
            for (own, expected) in decision.limits.iter().zip(&expected) {
                prop_assert_eq!(
                    (own.allowed, own.capacity, own.remaining, own.blocked),
                    (expected.allowed, expected.limit, expected.remaining, expected.blocked)
                );
            }
            let longest = expected.iter().filter_map(|answer| match answer.retry {
                Retry::AfterUs(wait) => Some(wait),
                _ => None,
            });
            let retry = if never { Retry::Never } else { longest.max().map_or(Retry::Now, Retry::AfterUs) };
            prop_assert_eq!(answer(&decision).retry, retry);
            prop_assert_eq!(decision.remaining, expected.iter().map(|answer| answer.remaining).min().expect("some"));
            let whole = answer(&decision);
            prop_assert_eq!(
                whole.reset_after_us,
                expected.iter().map(|answer| answer.reset_after_us).max().expect("some")
            );
            let first = expected.iter().position(|answer| !answer.allowed).map(|index| format!("l{index}"));
            prop_assert_eq!(decision.denied_by.as_deref(), first.as_deref());
            now = then;
        }
        Ok(())
    });
}

#[test]
fn at_most_grants_what_the_scarcest_limit_has() {
    on_both_engines((rules(), beginning(), 1_u64..=1_000_000), |engine, (limits, now, most)| {
        let rule = rule_of(&limits);
        let key = engine.fresh_key();
        let request = Request::new(&key).cost(most).at(time(now));
        let decision =
            engine.runtime.block_on(engine.limiter.at_most(&rule, by_own_id(&rule, request))).expect("a decision");
        let least = limits.iter().map(Limit::capacity).min().expect("some");
        prop_assert_eq!(decision.granted, most.min(least));
        for (own, limit) in decision.limits.iter().zip(&limits) {
            prop_assert_eq!(own.remaining, limit.capacity() - decision.granted);
        }
        Ok(())
    });
}

/// An address has one count whoever uses it, and all have one together; a user who is called like an address has a
/// count of their own.
#[test]
fn without_a_tag_each_limit_counts_by_its_own_key() {
    for engine in [Engine::redis(), Engine::embedded()] {
        let limit = |text: &str| text.parse::<Limit>().expect("a limit");
        let rule = Rule::new("api", limit("fixed-window 3/1d")).expect("a name");
        let rule = rule.and_by("ip", limit("fixed-window 4/1d")).expect("another key");
        let rule = rule.and_by("all", limit("fixed-window 8/1d")).expect("another key");
        let acquire = |user: &str, address: &[u8]| {
            let parts: [(&str, &[u8]); 2] = [("ip", address), ("all", b"everybody")];
            let request = Request::new(user).parts(&parts).at(time(1 << 50));
            let decision = engine.runtime.block_on(engine.limiter.acquire(&rule, request)).expect("a decision");
            decision.denied_by.as_deref().map(str::to_owned)
        };
        let (here, there) = (b"192.0.2.1", b"192.0.2.2");
        assert_eq!([0; 3].map(|_| acquire("anna", here)), [None, None, None]);
        assert_eq!(acquire("anna", there).as_deref(), Some("fixed-window 3/1d"));
        assert_eq!(acquire("ben", here), None);
        assert_eq!(acquire("ben", here).as_deref(), Some("ip"));
        assert_eq!([0; 2].map(|_| acquire("192.0.2.2", there)), [None, None]);
        assert_eq!([0; 2].map(|_| acquire("ben", there)), [None, None]);
        assert_eq!(acquire("carl", b"192.0.2.3").as_deref(), Some("all"));
        let keys = engine.runtime.block_on(async {
            engine.limiter.keys(&rule, Request::new("anna").parts(&[("ip", here), ("all", b"everybody")]))
        });
        let expected = [
            "tollgate:{anna}:api/fixed-window-1d",
            "tollgate:{192.0.2.1}:api/ip/fixed-window",
            "tollgate:{everybody}:api/all/fixed-window",
        ];
        assert_eq!(keys.expect("keys"), expected);
    }
}

#[test]
fn limits_may_count_different_keys_of_one_tag() {
    let engine = Engine::redis();
    let user: Limit = "fixed-window 3/1d".parse().expect("a limit");
    let org: Limit = "fixed-window 5/1d".parse::<Limit>().and_then(|limit| limit.named("org")).expect("a limit");
    let rule = Rule::new("api", user.clone()).expect("a name");
    let rule = rule.tagged("org").and_then(|rule| rule.and_by("org", org)).expect("a rule");
    let acquire = |user: &str| {
        let request = Request::new(user).parts(&[("org", b"acme")]).at(time(1 << 50));
        let decision = engine.runtime.block_on(engine.limiter.acquire(&rule, request)).expect("a decision");
        decision.denied_by.as_deref().map(str::to_owned)
    };
    for _ in 0..3 {
        assert_eq!(acquire("anna"), None);
    }
    assert_eq!(
        acquire("anna").as_deref(),
        Some("fixed-window 3/1d"),
        "her own limit, and the organisation isn't charged"
    );
    assert_eq!((acquire("ben"), acquire("ben")), (None, None));
    assert_eq!(acquire("ben").as_deref(), Some("org"));
    let missing = engine.runtime.block_on(engine.limiter.acquire(&rule, "anna")).expect_err("no organisation");
    assert!(missing.is_input() && missing.to_string().contains("\"org\""), "{missing}");
    let mut keys: Vec<String> = tollgate::redis::cmd("KEYS")
        .arg("*")
        .query(&mut engine.server.as_ref().expect("redis").connection())
        .expect("keys");
    keys.sort();
    assert_eq!(
        keys,
        [
            "tollgate:{acme}:anna:api/fixed-window-1d",
            "tollgate:{acme}:api/org/fixed-window",
            "tollgate:{acme}:ben:api/fixed-window-1d"
        ]
    );
}

#[test]
fn limits_that_would_share_their_state_are_refused() {
    let rule = tollgate_testing::rules::rule("gcra 5/1s");
    let error = rule.and("gcra 50/1s".parse().expect("a limit")).expect_err("one state");
    assert!(error.to_string().contains("named token-bucket-1s"), "{error}");
}

/// What pyrate-limiter's tests say of two logs: the first limit that doesn't fit is named, and nothing is recorded on
/// either when one denies.
#[test]
fn the_first_limit_that_does_not_fit_is_named() {
    for engine in [Engine::embedded(), Engine::redis()] {
        let [a, b] = [("a", "sliding-log 3/1s"), ("b", "sliding-log 5/5s")].map(|(name, limit)| named(limit, name));
        let rule = Rule::new("pyrate", a).and_then(|rule| rule.and(b)).expect("a rule");
        for (ms, cost, denied_by) in
            [(0, 2, None), (0, 2, Some("a")), (0, 1, None), (0, 1, Some("a")), (1500, 2, None), (1500, 1, Some("b"))]
        {
            let request = Request::new("key").cost(cost).at(time((1 << 50) + ms * 1000));
            let decision = engine.runtime.block_on(engine.limiter.acquire(&rule, request)).expect("a decision");
            assert_eq!(decision.denied_by.as_deref(), denied_by, "{cost} at {ms} ms");
        }
    }
}

/// Denials by an integrator's limit must not eat the organisation's.
#[test]
fn a_denial_by_one_limit_does_not_charge_the_other() {
    for engine in [Engine::embedded(), Engine::redis()] {
        let [org, integrator] = [("org", "fixed-window 10/1m"), ("integrator", "fixed-window 5/1m")]
            .map(|(name, limit)| named(limit, name));
        let rule = Rule::new("api", org)
            .and_then(|rule| rule.tagged("org"))
            .and_then(|rule| rule.and_by("integrator", integrator));
        let rule = rule.expect("a rule");
        for (who, times, denied_by) in
            [("i1", 5, None), ("i1", 3, Some("integrator")), ("i2", 5, None), ("i3", 1, Some("org"))]
        {
            for _ in 0..times {
                let parts: [(&str, &[u8]); 2] = [("org", b"o"), ("integrator", who.as_bytes())];
                let request = Request::new("o").parts(&parts).at(time(1 << 50));
                let decision = engine.runtime.block_on(engine.limiter.acquire(&rule, request)).expect("a decision");
                assert_eq!(decision.denied_by.as_deref(), denied_by, "{who}");
            }
        }
    }
}

fn named(limit: &str, name: &str) -> Limit {
    limit.parse::<Limit>().and_then(|limit| limit.named(name)).expect("a limit")
}

#[test]
fn a_denial_by_one_limit_leaves_the_others_untouched() {
    for engine in [Engine::embedded(), Engine::redis()] {
        let [small, large] =
            [("small", "gcra 5/1d"), ("large", "token-bucket 10/10s")].map(|(name, limit)| named(limit, name));
        let rule = Rule::new("pair", small).and_then(|rule| rule.and(large.clone())).expect("a rule");
        let at = time(1 << 50);
        // The large one is empty: eight at most are none, and one more in a second.
        let alone = Rule::new("pair", large).expect("a rule");
        engine
            .runtime
            .block_on(engine.limiter.acquire(&alone, Request::new("key").cost(10).at(at)))
            .expect("a decision");
        let request = Request::new("key").cost(8).at(at);
        let decision = engine.runtime.block_on(engine.limiter.at_most(&rule, request)).expect("a decision");
        assert_eq!((decision.denied_by.as_deref(), decision.granted), (Some("large"), 0));
        assert_eq!(answer(&decision).retry, Retry::AfterUs(1_000_000));
        assert_eq!((decision.limits[0].allowed, decision.limits[0].remaining), (true, 5));
    }
}

#[test]
fn a_long_log_among_others_is_read_as_alone() {
    for engine in [Engine::embedded(), Engine::redis()] {
        let [log, bucket] =
            [("log", "sliding-log 100/1h"), ("bucket", "gcra 1000/1s")].map(|(name, limit)| named(limit, name));
        let rule = Rule::new("logs", log).and_then(|rule| rule.and(bucket)).expect("a rule");
        for n in 0..101 {
            let request = Request::new("key").at(time((1 << 50) + n));
            let decision = engine.runtime.block_on(engine.limiter.acquire(&rule, request)).expect("a decision");
            assert_eq!(decision.allowed, n < 100, "{n}");
        }
    }
}

#[test]
fn overages_are_reported_by_the_limits_that_counted_them_also_by_at_most() {
    let engine = Engine::redis();
    let rule = tollgate_testing::rules::rule("gcra 5/1d, gcra 3/1h").count_overage(true);
    let call = |cost| Request::new("key").cost(cost).at(time(1 << 50));
    for cost in [9, 9, 3] {
        engine.runtime.block_on(engine.limiter.acquire(&rule, call(cost))).expect("a decision");
    }
    let told = |decision: tollgate::Decision| -> Vec<_> {
        decision.limits.iter().map(|limit| (limit.allowed, limit.blocked, limit.overage)).collect()
    };
    let granted = told(engine.runtime.block_on(engine.limiter.at_most(&rule, call(1))).expect("a decision"));
    assert_eq!(granted, [(true, false, Some(2)), (false, false, Some(3))]);
    let acquired = told(engine.runtime.block_on(engine.limiter.acquire(&rule, call(1))).expect("a decision"));
    assert_eq!(acquired, [(true, false, Some(2)), (false, false, Some(4))]);
}

#[test]
fn a_key_that_many_calls_of_a_batch_share_is_written_once_and_sees_each_of_them() {
    let engine = Engine::redis();
    let rule: Rule = "fixed-window 100/1d".parse().expect("a rule");
    let organisation = "sliding-window 25/1h".parse().expect("a limit");
    let rule = rule
        .named("shared")
        .expect("a name")
        .tagged("org")
        .and_then(|rule| rule.and_by("org", organisation))
        .expect("two limits");
    let (server, org) = (engine.server.as_ref().expect("a redis"), engine.fresh_key());
    let users: Vec<String> = (0..10).map(|user| format!("{org}:{user}")).collect();
    for (round, allowed, written) in [(0, 10, 11), (1, 10, 11), (2, 5, 6), (3, 0, 0)] {
        server.reset_command_counts();
        let parts = [("org", org.as_bytes())];
        let requests = users.iter().map(|user| Request::new(user).parts(&parts));
        let decisions = engine.runtime.block_on(engine.limiter.acquire_many(&rule, requests));
        let allowing = decisions.iter().filter(|decision| decision.as_ref().expect("a decision").allowed).count();
        assert_eq!(allowing, allowed, "round {round}");
        let commands = server.commands();
        let writes = ["set", "setrange"].map(|name| commands.get(name).map_or(0, |(calls, _)| *calls));
        assert_eq!(writes.iter().sum::<u64>(), written, "round {round}: {commands:?}");
    }
}
