//! Rules whose limits take different costs of a request.

use tollgate::rules::{Attributes, Effect, Reason, RuleSet};
use tollgate_testing::redis_server::Server;

use super::decisions::verdict;
use super::{limiter, rule_set};

const MODEL: &str = r#"
    [[rule]]
    name = "model"
    key = "user"
    limits = [
        { name = "requests", limit = "token-bucket 3/1h", cost = 1 },
        { name = "tokens", limit = "token-bucket 1000/1h", cost = "tokens" },
    ]
    overrides = { "user:vip" = "token-bucket 300/1h, token-bucket 100000/1h" }
"#;

/// So many requests, and so many tokens, in one decision.
#[tokio::test]
async fn a_limit_may_take_another_cost_than_its_rule() {
    let server = Server::start();
    let (limiter, rules) = (limiter(&server.tcp_url()), rule_set(MODEL));
    assert_eq!(rules.attributes().collect::<Vec<_>>(), ["tokens", "user"]);
    let of = |user: &'static str, tokens: &'static str| Attributes::new().user(user).set("tokens", tokens);
    let left = async |user, tokens| {
        let one = verdict(&limiter, &rules, &of(user, tokens)).await;
        let decision = one.decision.expect("a decision");
        (one.allowed, [0, 1].map(|at| decision.limits[at].remaining), decision.denied_by.as_deref().map(str::to_owned))
    };
    assert_eq!(left("42", "900").await, (true, [2, 100], None));
    assert_eq!(left("42", "200").await, (false, [2, 100], Some("tokens".to_owned())));
    assert_eq!(left("42", "0").await.1, [1, 99], "at least one unit");
    assert_eq!(left("42", "9").await.1, [0, 90]);
    assert_eq!(left("42", "9").await, (false, [0, 90], Some("requests".to_owned())));
    assert_eq!(left("vip", "900").await, (true, [299, 99_100], None), "in the places of the rule's limits");
    let missing = verdict(&limiter, &rules, &Attributes::new().user("42")).await;
    assert_eq!(missing.reason, Reason::Missing("tokens".to_owned()));
    let error = limiter.acquire_by(&rules, &of("42", "many")).await.expect_err("no number");
    let expected = "rule model: cost: expected the attribute tokens to be a whole number up to 2^53, got \"many\"";
    assert_eq!((error.is_input(), error.to_string().as_str()), (true, expected));
    let request = of("42", "900");
    let Effect::Limit(charge) = rules.applies(&request).expect("a rule").effect else { panic!("it has limits") };
    assert_eq!((charge.cost(), charge.costs(None), charge.costs(Some(7))), (1, vec![1, 900], vec![1, 900]));
    assert_eq!(charge.own_costs().collect::<Vec<_>>(), [("tokens", 900)]);
}

#[test]
fn a_limits_own_cost_is_checked_where_it_is_written() {
    let errors = [
        (
            "cost = 1 }",
            "cost = 4 }",
            "cost: expected at most 3, the most that can ever be admitted by token-bucket 3/1h, got 4",
        ),
        (
            "cost = \"tokens\"",
            "cost = \"path\"",
            "cost: expected a number without quotes, or the name of an attribute, got \"path\"",
        ),
        (
            "cost = \"tokens\"",
            "cost = \"12\"",
            "cost: expected a number without quotes, or the name of an attribute, got \"12\"",
        ),
        (
            ", token-bucket 100000/1h",
            "",
            "user:vip: expected 2 limits, one for each limit of the rule and in the same order, since each has \
             the name, key and cost of the limit that it replaces, got 1",
        ),
        ("key = \"user\"", "key = \"user\"\nmin_cost = 2000", "min_cost: expected at most 1000"),
        (
            "name = \"requests\", limit = \"token-bucket 3/1h\", cost = 1",
            "name = \"money\", limit = \"token-bucket 3/1h\", cost = \"requests\" }, { name = \"requests\", limit = \"gcra 3/1s\"",
            "limits: a limit can't be named \"requests\": another limit takes its cost from the attribute of that name",
        ),
    ];
    for (right, wrong, expected) in errors {
        let error = MODEL.replace(right, wrong).parse::<RuleSet>().expect_err(wrong).to_string();
        assert!(error.contains(expected), "{error}\nnot {expected}");
    }
    // Written as it was read.
    let rules = rule_set(MODEL);
    let written = serde_json::to_string(&rules).expect("JSON");
    let read: RuleSet = serde_json::from_str(&written).expect("a set");
    assert_eq!(read.definitions(), rules.definitions(), "{written}");
}
