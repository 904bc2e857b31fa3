//! Limits that requests without their attributes aren't charged to.

use proptest::prelude::*;
use tollgate::rules::{Attributes, Effect, Reason, RuleSet, Verdict};
use tollgate::{Embedded, Limiter};
use tollgate_testing::redis_server::Server;

use super::decisions::verdict;
use super::{limiter, rule_set};

const API: &str = r#"
    [[rule]]
    name = "api"
    match = { path = "/api/*" }
    key = "ip"
    limits = [
        "fixed-window 5/1h start first-hit",
        { limit = "fixed-window 2/1h start first-hit", key = "user", missing = "skip" },
        { name = "tokens", limit = "fixed-window 9/1h start first-hit", cost = "tokens", missing = "skip" },
    ]

    [[rule]]
    name = "others"
    key = "global"
    limits = ["fixed-window 1000/1h start first-hit"]
"#;

/// What remains of each limit that applied, by its name.
fn left(verdict: &Verdict) -> Vec<(String, u64)> {
    let limits = verdict.decision.iter().flat_map(|decision| &decision.limits);
    limits.map(|limit| (limit.name().split(' ').next().unwrap_or_default().to_owned(), limit.remaining)).collect()
}

#[tokio::test]
async fn a_limit_is_left_out_for_want_of_its_own_attribute() {
    let server = Server::start();
    let (limiter, rules) = (limiter(&server.tcp_url()), rule_set(API));
    let request = || Attributes::new().ip([192, 0, 2, 1].into()).path("/api/v1");
    let of = |expected: &[(&str, u64)]| -> Vec<(String, u64)> {
        expected.iter().map(|(name, left)| ((*name).to_owned(), *left)).collect()
    };
    let user = |name: &'static str| request().user(name);
    // The address counts with and without a user.
    for (asked, expected) in [
        (request(), of(&[("fixed-window", 4)])),
        (user("anna"), of(&[("fixed-window", 3), ("user", 1)])),
        (request().set("tokens", "7"), of(&[("fixed-window", 2), ("tokens", 2)])),
        (user("anna").set("tokens", "2"), of(&[("fixed-window", 1), ("user", 0), ("tokens", 0)])),
        (request(), of(&[("fixed-window", 0)])),
    ] {
        let verdict = verdict(&limiter, &rules, &asked).await;
        assert!(verdict.allowed, "{verdict:?}");
        assert_eq!(left(&verdict), expected);
    }
    let other = || Attributes::new().ip([192, 0, 2, 2].into()).path("/api/v1");
    let denied = verdict(&limiter, &rules, &other().user("anna")).await.decision.expect("a decision");
    assert_eq!(denied.denied_by.as_deref(), Some("user"));
    // Of what can't be left out, nothing has changed.
    let missing = verdict(&limiter, &rules, &Attributes::new().user("anna").path("/api/v1")).await;
    assert_eq!(missing.reason, Reason::Missing("ip".to_owned()));
    let error = limiter.acquire_by(&rules, &other().set("tokens", "many")).await.expect_err("no number");
    assert!(error.to_string().contains("expected the attribute tokens to be a whole number up to 2^53"), "{error}");
}

/// A rule of which nothing is left applies as one whose key is missing.
#[tokio::test]
async fn a_rule_without_a_limit_that_applies_denies_or_is_skipped() {
    let limiter = Limiter::new(Embedded::new());
    let only = API.replace("\"fixed-window 5/1h start first-hit\",", "");
    let request = Attributes::new().ip([192, 0, 2, 1].into()).path("/api/v1");
    let denied = verdict(&limiter, &rule_set(&only), &request).await;
    assert_eq!((denied.allowed, denied.reason), (false, Reason::Missing("user".to_owned())));
    let skips = rule_set(&only.replacen("key = \"ip\"", "key = \"ip\"\n    missing = \"skip\"", 1));
    assert_eq!(verdict(&limiter, &skips, &request).await.rule.as_deref(), Some("others"));
    let one = request.clone().user("anna");
    assert_eq!(verdict(&limiter, &skips, &one).await.rule.as_deref(), Some("api"));
}

#[test]
fn the_file_in_the_questions_counts_an_address_a_user_and_everybody() {
    let page = tollgate_testing::repository::read("src/guide/faq.md");
    let (_, rest) = page.split_once("```toml\n").expect("a file");
    let rules = rule_set(rest.split_once("```").expect("its end").0);
    let request = Attributes::new().ip([192, 0, 2, 1].into());
    for (request, expected) in [
        (request.clone(), &["token-bucket 1000/1m", "global"][..]),
        (request.user("42"), &["token-bucket 1000/1m", "user", "global"]),
    ] {
        let Effect::Limit(charge) = rules.applies(&request).expect("a rule").effect else { panic!("it has limits") };
        let names: Vec<_> =
            charge.rule().limits().map(|limit| limit.name().map_or_else(|| limit.to_string(), str::to_owned)).collect();
        assert_eq!(names, expected);
    }
}

#[test]
fn what_can_be_left_out_is_checked_where_it_is_written() {
    let errors = [
        (
            "\"fixed-window 5/1h start first-hit\"",
            "{ limit = \"gcra 5/1s\", missing = \"skip\" }",
            "missing = \"skip\": expected a limit whose own key or cost is an attribute, got gcra 5/1s",
        ),
        ("key = \"user\", missing", "key = \"global\", missing", "a limit whose own key or cost is an attribute"),
        (
            "missing = \"skip\" },\n        { name",
            "missing = \"x\" },\n        { name",
            "expected one of deny, skip, got \"x\"",
        ),
        (
            "\"fixed-window 5/1h start first-hit\",",
            "{ limit = \"gcra 1/1s\", key = \"a\", missing = \"skip\" }, { limit = \"gcra 1/1s\", key = \"b\", missing = \"skip\" }, { limit = \"gcra 1/1s\", key = \"c\", missing = \"skip\" },",
            "missing = \"skip\": at most 4 limits of a rule can have it",
        ),
    ];
    for (right, wrong, expected) in errors {
        let error = API.replacen(right, wrong, 1).parse::<RuleSet>().expect_err(wrong).to_string();
        assert!(error.contains(expected) && error.starts_with("rules:"), "{error}\nnot {expected}");
    }
    let rules = rule_set(API);
    let written = serde_json::to_string(&rules).expect("JSON");
    let read: RuleSet = serde_json::from_str(&written).expect("a set");
    assert_eq!(read.definitions(), rules.definitions(), "{written}");
    let own = serde_json::json!({"name": "a", "limits": [{"limit": "gcra 5/1s", "key": "org", "missing": "skip"}]});
    let error = serde_json::from_value::<tollgate::Rule>(own).expect_err("no set").to_string();
    assert!(error.contains("the field missing: only a limit in a set of rules can have it"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    /// Against counts of one's own: all limits whose attribute the request has are charged, or none.
    #[test]
    fn exactly_the_limits_that_apply_are_charged(
        limits in proptest::collection::vec((1..6_u64, any::<bool>()), 4),
        requests in proptest::collection::vec(proptest::collection::vec(proptest::option::of(0..2_usize), 4), 1..60),
    ) {
        let line = |(at, (most, optional)): (usize, &(u64, bool))| {
            let missing = if *optional { ", missing = \"skip\"" } else { "" };
            format!("{{ limit = \"fixed-window {most}/1h start first-hit\", key = \"a{at}\"{missing} }}")
        };
        let lines: Vec<_> = limits.iter().enumerate().map(line).collect();
        let rules = rule_set(&format!("[[rule]]\nname = \"r\"\nkey = \"global\"\nlimits = [{}]", lines.join(", ")));
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        let limiter = Limiter::new(Embedded::new());
        let mut used = std::collections::HashMap::new();
        let names = ["a0", "a1", "a2", "a3"];
        for request in &requests {
            let values = ["x", "y"];
            let attributes = names.iter().zip(request).filter_map(|(name, value)| Some((*name, (*value)?)));
            let asked = attributes.clone().fold(Attributes::new(), |asked, (name, value)| asked.set(name, values[value]));
            let got = runtime.block_on(limiter.acquire_by(&rules, &asked)).expect("a verdict");
            let lacks = (0..4).find(|at| request[*at].is_none() && !limits[*at].1);
            let lacks = lacks.or_else(|| (0..4).all(|at| request[at].is_none()).then_some(0));
            let expected = match lacks {
                Some(at) => Reason::Missing(names[at].to_owned()),
                None => Reason::Limits,
            };
            prop_assert_eq!(&got.reason, &expected);
            if expected == Reason::Limits {
                let has_room = |(name, value): (&str, usize)| {
                    let at = names.iter().position(|own| *own == name).expect("its place");
                    used.get(&(at, value)).copied().unwrap_or(0) < limits[at].0
                };
                let allowed = attributes.clone().all(has_room);
                prop_assert_eq!(got.allowed, allowed);
                for (name, value) in attributes.filter(|_| allowed) {
                    let at = names.iter().position(|own| *own == name).expect("its place");
                    *used.entry((at, value)).or_insert(0) += 1;
                }
            }
        }
    }
}
