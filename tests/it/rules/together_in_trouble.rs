//! Rules that apply together where something is away, given back, or in several slots.

use std::num::NonZeroU32;
use std::time::{Duration, SystemTime};

use tollgate::rules::{Account, Attributes, Charge, Effect, RuleSet};
use tollgate::{Cluster, Embedded, Limiter, OnError, Redis};
use tollgate_testing::cluster::ClusterServers;
use tollgate_testing::polling::{PATIENCE, in_time};
use tollgate_testing::redis_server::Server;

use super::decisions::verdict;
use super::{limiter, rule_set};

fn charge<'s>(rules: &'s RuleSet, request: &Attributes<'_>) -> Charge<'s> {
    match rules.applies(request).expect("rules").effect {
        Effect::Limit(charge) => charge,
        other => panic!("expected limits, got {other:?}"),
    }
}

/// Limits of two rules may have one name: each goes by what it answered itself.
#[tokio::test]
async fn a_refund_after_a_decision_gives_each_limit_back_what_is_still_owed_of_it() {
    let server = Server::start();
    let slow_and_fast = rule_set(
        r#"
        [[rule]]
        name = "slow"
        key = "global"
        limits = [{ name = "x", limit = "token-bucket 10/1h" }]
        continue = true

        [[rule]]
        name = "fast"
        key = "user"
        limits = [{ name = "x", limit = "token-bucket 10/1s" }]
    "#,
    );
    let two_costs = rule_set(
        r#"
        [[rule]]
        name = "one"
        key = "global"
        limits = ["fixed-window 100/1h start first-hit"]
        continue = true

        [[rule]]
        name = "seven"
        key = "user"
        limits = ["fixed-window 100/1h start first-hit"]
        cost = 7
    "#,
    );
    for limiter in [limiter(&server.tcp_url()), Limiter::new(Embedded::new())] {
        let request = Attributes::new().user("42");
        let at = |ms: u64| SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000) + Duration::from_millis(ms);
        let both = charge(&slow_and_fast, &request);
        let first = limiter.acquire(both.rule(), both.request().at(at(0))).await.expect("a decision");
        let Some(Effect::Limit(fast)) = slow_and_fast.by_name("fast", &request).expect("a rule").map(|own| own.effect)
        else {
            panic!("limits")
        };
        limiter.acquire(fast.rule(), fast.request().at(at(3000)).cost(7)).await.expect("a decision");
        let refund = both.request().at(at(3001)).after(&first);
        let after = limiter.refund(both.rule(), refund).await.expect("given back");
        let left: Vec<_> = after.limits.iter().map(|limit| limit.remaining).collect();
        assert_eq!(left, [10, 3], "nothing is owed of the fast one any more");

        let both = charge(&two_costs, &request);
        let first = limiter.acquire(both.rule(), both.request()).await.expect("a decision");
        let after = limiter.refund(both.rule(), both.request().after(&first)).await.expect("given back");
        assert_eq!(after.limits.iter().map(|limit| limit.remaining).collect::<Vec<_>>(), [100, 100]);
    }
}

/// What an account has of its own takes the place of two rules' limits, not of their policies.
#[tokio::test]
async fn an_accounts_own_limits_keep_the_policies_of_all_rules() {
    let tier = |name: &str, policy: &str| {
        format!(
            "[[rule]]\nname = \"{name}\"\nmatch = {{ tier = \"free\" }}\nkey = \"user\"\nlimits = [\"gcra 2/1h\"]\n\
             continue = true\non_error = \"{policy}\"\n"
        )
    };
    let rules = rule_set(&(tier("one", "open") + &tier("two", "closed")));
    let limiter = Limiter::new(Redis::open("redis://127.0.0.1:1/").expect("an address"));
    let own = Account::new("a").tier("free").limits("fixed-window 3/1h".parse().expect("a rule")).expect("limits");
    limiter.acquire_by(&rules, &Attributes::new().account(&own)).await.expect_err("closed");
}

/// A cost that one rule could never admit is denied by that one, whatever answers.
#[tokio::test]
async fn while_redis_is_away_a_cost_is_denied_by_the_rule_that_could_never_admit_it() {
    let rules = rule_set(
        r#"
        [[rule]]
        name = "has-room"
        key = "user"
        limits = ["fixed-window 100/1h start first-hit"]
        overage = true
        continue = true
        status = 503

        [[rule]]
        name = "tokens"
        key = "user"
        limits = ["fixed-window 10/1h start first-hit"]
        cost = "tokens"
        status = 420
    "#,
    );
    let away = Redis::open("redis://127.0.0.1:1/").expect("an address");
    let two = OnError::Local { processes: NonZeroU32::new(2).expect("two") };
    for (policy, by) in [(OnError::Open, "policy"), (two, "local")] {
        let limiter = Limiter::builder(away.clone()).on_error(policy).build();
        let denied = verdict(&limiter, &rules, &Attributes::new().user("42").set("tokens", "50")).await;
        let status = denied.response.as_ref().map(|response| response.status.get());
        assert_eq!((denied.allowed, denied.rule.as_deref(), status), (false, Some("tokens"), Some(420)), "{policy:?}");
        let decision = denied.decision.expect("a decision");
        assert_eq!(decision.by.name(), by);
        let limits: Vec<_> = decision.limits.iter().map(|limit| (limit.allowed, limit.overage)).collect();
        if by == "local" {
            assert_eq!(limits, [(true, Some(0)), (false, None)], "the other has room, and denies nothing");
        }
        let allowed = verdict(&limiter, &rules, &Attributes::new().user("42").set("tokens", "4")).await;
        assert!(allowed.allowed, "{allowed:?}");
    }
}

/// One key is in one slot, whatever the rules call it.
#[tokio::test]
async fn on_a_cluster_rules_count_one_key_by_whatever_attributes() {
    let servers = ClusterServers::of_primaries();
    let limiter = Limiter::builder(Cluster::open(&servers.url()).expect("an address")).deadline(PATIENCE).build();
    let rule = |name: &str, more: &str| {
        format!("[[rule]]\nname = \"{name}\"\nlimits = [\"gcra 50/1d\"]\ncontinue = true\n{more}\n")
    };
    let own = Account::new("a").tier("free").limits("fixed-window 3/1h".parse().expect("a rule")).expect("limits");
    let user = || Attributes::new().user("a").ip([192, 0, 2, 1].into());
    for (sets, request) in [
        (["key = \"user\"", "key = \"user\"\nmatch = { tier = \"free\" }"], user().account(&own)),
        (["key = \"user\"\nhash_keys = false", "key = \"user\""], user()),
        (["key = \"user\"", "key = \"ip\"\ntag = \"user\""], user()),
        (["key = \"ip\"\ntag = \"user\"", "key = \"user\""], user()),
        (["key = \"ip\"\nipv6_prefix = 48", "key = \"ip\""], user()),
    ] {
        let rules = rule_set(&(rule("first", sets[0]) + &rule("second", sets[1])));
        let asked = in_time(limiter.acquire_by(&rules, &request)).await;
        assert!(asked.as_ref().is_ok_and(|verdict| verdict.allowed), "{sets:?}: {asked:?}");
        let charge = charge(&rules, &request);
        let by_id = in_time(limiter.acquire(charge.rule(), charge.request().id(sets[1]))).await;
        assert!(by_id.as_ref().is_ok_and(|decision| decision.allowed), "{sets:?}: {by_id:?}");
    }
    // Of an address of IPv6, two networks.
    let rules = rule_set(&(rule("first", "key = \"ip\"\nipv6_prefix = 48") + &rule("second", "key = \"ip\"")));
    let request = Attributes::new().ip("2001:db8::1".parse().expect("an address"));
    let charge = charge(&rules, &request);
    let error = in_time(limiter.acquire(charge.rule(), charge.request().id("id"))).await.expect_err("two slots");
    assert!(error.is_input() && error.to_string().contains("on a cluster, a call with an id needs a tag"), "{error}");
    assert!(in_time(limiter.acquire_by(&rules, &request)).await.expect("a verdict").allowed);
}
