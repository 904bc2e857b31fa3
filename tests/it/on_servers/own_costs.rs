//! Limits of one rule that take different costs of a request: still all or nothing. Against one oracle for each limit.

use proptest::prelude::*;
use tollgate::{Embedded, Limit, Limiter, Request, Rule};
use tollgate_testing::engines::{Engine, on_both_engines, time};
use tollgate_testing::histories::{beginning, steps};
use tollgate_testing::limits::any_limit;
use tollgate_testing::oracle::{Answer, Oracle};
use tollgate_testing::oracle_spec::oracle;
use tollgate_testing::rules::{by_own_id, rule};

use super::combined_limits::rule_of;

/// Requests and tokens of one user.
fn model() -> Rule {
    let named = |text: &str, name: &str| text.parse::<Limit>().and_then(|limit| limit.named(name)).expect("a limit");
    let rule = Rule::new("model", named("token-bucket 3/1m", "requests")).expect("a name");
    let rule = rule.and(named("token-bucket 1000/1m", "tokens")).expect("another name");
    rule.cost_of("requests", 1).expect("a cost")
}

/// What remains of requests and tokens.
async fn left(limiter: &Limiter, rule: &Rule) -> [u64; 2] {
    let now = limiter.peek(rule, Request::new("user").at(time(1 << 50))).await.expect("an answer");
    [0, 1].map(|at| now.limits[at].remaining)
}

#[test]
fn every_limit_is_charged_its_own_cost_or_none_is() {
    let limits = proptest::collection::vec(any_limit(), 2..=4);
    let costs = proptest::collection::vec(0..4_u64, 4);
    on_both_engines((limits, beginning(), steps(1..=30), costs), |engine, (limits, begin, steps, shares)| {
        let names: Vec<_> = (0..limits.len()).map(|index| format!("l{index}")).collect();
        let rule = rule_of(&limits);
        let key = engine.fresh_key();
        let leader = engine.subject(limits[0].clone());
        let mut oracles: Vec<Oracle> = limits.iter().map(oracle).collect();
        let mut now = begin;
        for step in steps {
            let (cost, then) = step.aim(&leader, now);
            leader.acquire(cost, then);
            // The first limit takes the cost that aims at its edges, the others so many times as much.
            let of = |at: usize| if at == 0 { cost } else { cost.saturating_mul(shares[at]).min(1 << 53) };
            let own: Vec<_> = names.iter().enumerate().map(|(at, name)| (name.as_str(), of(at))).collect();
            let request = Request::new(&key).costs(&own).at(time(then));
            let decision =
                engine.runtime.block_on(engine.limiter.acquire(&rule, by_own_id(&rule, request))).expect("a decision");
            let peeks: Vec<Answer> = oracles.iter().enumerate().map(|(at, oracle)| oracle.peek(of(at), then)).collect();
            let allowed = peeks.iter().all(|peek| peek.allowed);
            prop_assert_eq!(decision.allowed, allowed);
            for (at, (oracle, peek)) in oracles.iter_mut().zip(peeks).enumerate() {
                let expected = if allowed || !peek.allowed { oracle.acquire(of(at), then) } else { peek };
                let own = &decision.limits[at];
                prop_assert_eq!((own.allowed, own.remaining), (expected.allowed, expected.remaining), "{}", at);
                prop_assert_eq!(own.granted, if allowed { of(at) } else { 0 }, "{}", at);
            }
            prop_assert_eq!(decision.granted, decision.limits.iter().map(|own| own.granted).max().unwrap_or_default());
            now = then;
        }
        Ok(())
    });
}

#[test]
fn what_a_request_took_of_each_limit_is_settled_cancelled_and_given_back() {
    for engine in [Engine::redis(), Engine::embedded()] {
        engine.runtime.block_on(async {
            let (limiter, rule) = (&engine.limiter, model());
            let request = Request::new("user").costs(&[("tokens", 400)]).at(time(1 << 50));
            // Of what has no cost of its own, the request's cost.
            let at_once = limiter.acquire(&rule, Request::new("user").cost(300).at(time(1 << 50))).await.expect("it");
            assert_eq!((at_once.limits[0].granted, at_once.limits[1].granted, at_once.granted), (1, 300, 300));
            limiter.refund(&rule, Request::new("user").cost(900).at(time(1 << 50)).after(&at_once)).await.expect("it");
            assert_eq!(left(limiter, &rule).await, [3, 1000], "no more than it took of each");

            assert!(limiter.acquire(&rule, request.id("a")).await.expect("a decision").allowed);
            assert!(limiter.acquire(&rule, request.id("b")).await.expect("a decision").allowed);
            assert_eq!(left(limiter, &rule).await, [1, 200]);
            let denied = limiter.acquire(&rule, request.id("c")).await.expect("a decision");
            assert_eq!(denied.denied_by.as_deref(), Some("tokens"));
            assert_eq!(left(limiter, &rule).await, [1, 200]);

            let used = Request::new("user").costs(&[("tokens", 150)]).at(time(1 << 50));
            for _ in 0..2 {
                let settled = limiter.settle(&rule, used.id("a")).await.expect("an answer");
                assert_eq!(settled.limits.iter().map(|limit| limit.granted).collect::<Vec<_>>(), [1, 150]);
                assert_eq!(left(limiter, &rule).await, [1, 450], "a request stays one");
            }
            limiter.cancel(&rule, request.id("b")).await.expect("an answer");
            assert_eq!(left(limiter, &rule).await, [2, 850]);
        });
    }
}

#[test]
fn many_requests_each_take_their_own_costs() {
    for engine in [Engine::redis(), Engine::embedded()] {
        engine.runtime.block_on(async {
            let (limiter, rule) = (&engine.limiter, model());
            let costs = [[("tokens", 300)], [("tokens", 800)], [("tokens", 600)], [("tokens", 100)], [("tokens", 1)]];
            let requests = costs.iter().map(|own| Request::new("user").costs(own).at(time(1 << 50)));
            let decided = limiter.acquire_many(&rule, requests).await;
            let allowed: Vec<_> = decided.iter().map(|decided| decided.as_ref().expect("a decision").allowed).collect();
            assert_eq!(allowed, [true, false, true, true, false], "the last for want of requests");
            assert_eq!(left(limiter, &rule).await, [0, 0]);
        });
    }
}

#[test]
fn a_cost_that_no_limit_has_is_misuse() {
    let engine = Engine::embedded();
    let rule = model();
    let unknown = Request::new("user").costs(&[("tokens", 1), ("money", 2)]);
    let error = engine.runtime.block_on(engine.limiter.acquire(&rule, unknown)).expect_err("no such limit");
    let expected = "costs: expected limits of rule model (requests; tokens), got \"money\"";
    assert_eq!((error.is_input(), error.to_string().as_str()), (true, expected));
    // Nor one that is spelled as a set of rules does for itself.
    for name in ["model\n*", "model\ntokens", "other\ntokens"] {
        let costs = [(name, 7)];
        let spelled = Request::new("user").costs(&costs);
        let error = engine.runtime.block_on(engine.limiter.acquire(&rule, spelled)).expect_err("no such limit");
        assert!(error.is_input() && error.to_string().ends_with(&format!("got {name:?}")), "{error}");
    }
    let at_most = Request::new("user").costs(&[("tokens", 7)]);
    let error = engine.runtime.block_on(engine.limiter.at_most(&rule, at_most)).expect_err("costs that differ");
    assert!(error.is_input() && error.to_string().contains("at_most: the limits of "), "{error}");
    let unknown = model().cost_of("money", 1).expect_err("no such limit").to_string();
    assert_eq!(unknown, "rule model: cost: expected one of its limits (requests; tokens), got \"money\"");
    let too_much = model().cost_of("tokens", 1001).expect_err("it never fits").to_string();
    assert!(too_much.contains("expected at most 1000"), "{too_much}");
}

#[tokio::test]
async fn an_owned_acquire_refuses_the_costs_that_an_acquire_refuses() {
    let limiter = Limiter::new(Embedded::new());
    let rule = rule("token-bucket 5/1d, fixed-window 9/1d");
    for name in ["typo", "typo\nx", "test\n*"] {
        let costs = [(name, 5)];
        let request = Request::new("key").costs(&costs);
        let refused = limiter.acquire(&rule, request).await.expect_err("no such limit");
        let owned = limiter.acquire_owned(&rule, request).await.expect_err("no such limit");
        assert_eq!((owned.kind(), owned.to_string()), (refused.kind(), refused.to_string()), "{name:?}");
    }
    let spawned = tokio::spawn(limiter.acquire_owned(&rule, Request::new("key").cost(2)));
    assert_eq!(spawned.await.expect("no panic").expect("a decision").remaining, 3);
}
