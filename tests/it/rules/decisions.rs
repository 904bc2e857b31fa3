//! What the rule that applies decides, on a real Redis.

use std::time::Duration;

use tollgate::redis::cmd;
use tollgate::rules::{Account, Attributes, Definition, Effect, Reason, RuleSet, Verdict};
use tollgate::{DecidedBy, Error, Limiter, RetryAfter, Rule};
use tollgate_testing::polling::wait_for_value;
use tollgate_testing::redis_server::Server;

use super::{limiter, rule_set};

pub(super) async fn verdict(limiter: &Limiter, rules: &RuleSet, request: &Attributes<'_>) -> Verdict {
    limiter.acquire_by(rules, request).await.expect("a verdict")
}

const API: &str = r#"
    [defaults]
    message = "slow down"

    [variables]
    standard = "token-bucket 2/1h"

    [[rule]]
    name = "office"
    priority = 900
    match = { ip = ["10.0.0.0/8", "2001:db8::/32"] }
    action = "allow"

    [[rule]]
    name = "banned"
    priority = 800
    match = { user_agent = "evil" }
    action = "block"

    [[rule]]
    name = "orgs"
    priority = 700
    match = { org = "*", path = "/api/*" }
    key = "user"
    tag = "org"
    limits = ["$standard", { name = "all", limit = "fixed-window 3/1h", key = "org" }]
    overrides = { "user:vip" = "token-bucket 100/1h", "user:mallory" = "block" }
    allow = ["user:robot"]
    status = 420
    retry_after = "1h"

    [[rule]]
    name = "tokens"
    match = { path = "/completions" }
    key = "user"
    limits = ["gcra 100/1h"]
    cost = "tokens"

    [[rule]]
    name = "users"
    priority = -1
    key = "user"
    limits = ["$standard"]
    missing = "skip"

    [[rule]]
    name = "addresses"
    priority = -2
    key = "ip"
    limits = ["gcra 1/1h"]
"#;

#[tokio::test]
async fn one_rule_applies_and_its_limits_decide_together() {
    let server = Server::start();
    let (limiter, rules) = (limiter(&server.tcp_url()), rule_set(API));
    let at = |user: &'static str| Attributes::new().user(user).set("org", "acme").path("/api/items");
    for (user, allowed, left) in [("a", true, 1), ("a", true, 0), ("b", true, 0)] {
        let one = verdict(&limiter, &rules, &at(user)).await;
        let decision = one.decision.expect("a decision");
        assert_eq!((one.rule.as_deref(), one.allowed, decision.remaining), (Some("orgs"), allowed, left), "{user}");
        assert!(one.response.is_none() && decision.by == DecidedBy::Redis);
    }
    // The organisation's three are used up, and the user isn't charged.
    let denied = verdict(&limiter, &rules, &at("b")).await;
    let decision = denied.decision.expect("a decision");
    assert_eq!(decision.denied_by.as_deref(), Some("all"));
    assert_eq!(decision.limits[0].remaining, 1);
    let response = denied.response.expect("how to answer");
    assert_eq!((response.status.get(), response.message.as_deref()), (420, Some("slow down")));
    assert_eq!(response.retry_after, Some(Duration::from_secs(3600)));
    let mut keys: Vec<String> = cmd("KEYS").arg("*").query(&mut server.connection()).expect("keys");
    keys.sort();
    let expected = [
        "tollgate:{org:acme}:orgs/all/fixed-window",
        "tollgate:{org:acme}:user:a:orgs/token-bucket-1h",
        "tollgate:{org:acme}:user:b:orgs/token-bucket-1h",
    ];
    assert_eq!(keys, expected);
    // A key's own limits stand in place of all of the rule's.
    let vip = verdict(&limiter, &rules, &at("vip")).await;
    assert_eq!((vip.allowed, vip.decision.expect("a decision").remaining), (true, 99));
    for (user, allowed, reason, status) in
        [("mallory", false, Reason::Blocked, Some(420)), ("robot", true, Reason::Allowed, None)]
    {
        let one = verdict(&limiter, &rules, &at(user)).await;
        assert_eq!((one.allowed, &one.reason, one.decision.is_none()), (allowed, &reason, true), "{user}");
        assert_eq!(one.response.map(|response| response.status.get()), status, "{user}");
    }
}

/// Keys count within their tag, so what is counted across users needs one that they have in common.
#[tokio::test]
async fn an_address_is_counted_whatever_the_account() {
    let server = Server::start();
    let limiter = limiter(&server.tcp_url());
    for (tag, allowed) in [("global", [true, true, false]), ("user", [true, true, true])] {
        let rules = rule_set(&format!(
            "[[rule]]\nname = \"{tag}\"\nkey = \"user\"\ntag = \"{tag}\"\n\
             limits = [\"gcra 5/1h\", {{ name = \"address\", limit = \"gcra 2/1h\", key = \"ip\" }}]"
        ));
        for (user, allowed) in ["a", "b", "c"].into_iter().zip(allowed) {
            let request = Attributes::new().user(user).ip([192, 0, 2, 1].into());
            assert_eq!(verdict(&limiter, &rules, &request).await.allowed, allowed, "{tag}: {user}");
        }
    }
}

#[tokio::test]
async fn rules_that_allow_or_block_send_no_command() {
    let limiter = limiter("redis://127.0.0.1:1");
    let rules = rule_set(API);
    let inside = Attributes::new().ip([10, 1, 2, 3].into()).set("user_agent", "evil");
    let one = verdict(&limiter, &rules, &inside).await;
    assert_eq!((one.allowed, one.rule.as_deref(), one.reason), (true, Some("office"), Reason::Allowed));
    let outside = Attributes::new().ip([192, 0, 2, 1].into()).set("user_agent", "evil");
    let one = verdict(&limiter, &rules, &outside).await;
    assert_eq!((one.allowed, one.rule.as_deref(), one.reason), (false, Some("banned"), Reason::Blocked));
    assert_eq!(one.response.expect("how to answer").status.get(), 403);
    let nothing = verdict(&limiter, &RuleSet::new([]).expect("no rules"), &outside).await;
    assert_eq!((nothing.allowed, nothing.rule, nothing.reason), (true, None, Reason::NoRule));
}

#[tokio::test]
async fn a_request_without_the_counted_attribute_is_denied_or_skipped() {
    let server = Server::start();
    let (limiter, rules) = (limiter(&server.tcp_url()), rule_set(API));
    let nameless = Attributes::new().set("org", "acme").path("/api/items");
    let one = verdict(&limiter, &rules, &nameless).await;
    assert_eq!((one.allowed, one.rule.as_deref()), (false, Some("orgs")));
    assert_eq!((one.reason, one.decision.is_none()), (Reason::Missing("user".into()), true));
    // `users` skips requests without a user, and the address counts.
    let unknown = Attributes::new().ip([192, 0, 2, 1].into());
    for allowed in [true, false] {
        let one = verdict(&limiter, &rules, &unknown).await;
        assert_eq!((one.allowed, one.rule.as_deref(), one.reason), (allowed, Some("addresses"), Reason::Limits));
    }
    let one = verdict(&limiter, &rules, &Attributes::new()).await;
    assert_eq!((one.allowed, one.reason), (false, Reason::Missing("ip".into())));
}

#[tokio::test]
async fn a_request_costs_the_value_of_its_cost_attribute() {
    let server = Server::start();
    let (limiter, rules) = (limiter(&server.tcp_url()), rule_set(API));
    let of = |tokens: &'static str| Attributes::new().user("a").path("/completions").set("tokens", tokens);
    for (tokens, allowed, left) in [("60", true, 40), ("41", false, 40), ("40", true, 0), ("0", false, 0)] {
        let decision = verdict(&limiter, &rules, &of(tokens)).await.decision.expect("a decision");
        assert_eq!((decision.allowed, decision.remaining), (allowed, left), "{tokens}");
    }
    let never = verdict(&limiter, &rules, &of("101")).await.decision.expect("a decision");
    assert_eq!((never.allowed, never.retry_after), (false, RetryAfter::Never));
    for bad in ["-1", "1.5", "many", "99999999999999999999", " 1", "+1"] {
        let error: Error = limiter.acquire_by(&rules, &of(bad)).await.expect_err(bad);
        let expected = "rule tokens: cost: expected the attribute tokens to be a whole number up to 2^53, got";
        assert!(error.is_input() && error.to_string() == format!("{expected} {bad:?}"), "{error}");
    }
    let one = verdict(&limiter, &rules, &Attributes::new().user("a").path("/completions")).await;
    assert_eq!(one.reason, Reason::Missing("tokens".into()));
}

/// The counted attribute is read first, and then the lists, which need nothing else of a request.
#[tokio::test]
async fn blocked_and_allowed_keys_are_so_whatever_else_a_request_lacks() {
    let rules = rule_set(
        "[[rule]]\nname = \"a\"\nkey = \"user\"\nlimits = [\"gcra 5/1s\"]\ncost = \"units\"\n\
         block = [\"user:13\"]\noverrides = { \"user:1\" = \"allow\", \"user:2\" = \"gcra 1/1s\" }",
    );
    let limiter = limiter("redis://127.0.0.1:1");
    for (user, reason, status) in [
        ("13", Reason::Blocked, Some(403)),
        ("1", Reason::Allowed, None),
        ("2", Reason::Missing("units".into()), Some(400)),
        ("3", Reason::Missing("units".into()), Some(400)),
    ] {
        let one = verdict(&limiter, &rules, &Attributes::new().user(user)).await;
        assert_eq!((one.reason, one.response.map(|response| response.status.get())), (reason, status), "{user}");
    }
    // A banned client isn't let through for leaving an attribute out.
    let rules = rule_set(
        "[[rule]]\nname = \"a\"\nkey = \"user\"\nlimits = [\"gcra 5/1s\"]\ncost = \"units\"\nmissing = \"skip\"\n\
         block = [\"user:13\"]",
    );
    for (user, reason) in [("13", Reason::Blocked), ("3", Reason::NoRule)] {
        assert_eq!(verdict(&limiter, &rules, &Attributes::new().user(user)).await.reason, reason, "{user}");
    }
}

#[tokio::test]
async fn a_shadow_rule_decides_and_reports_and_lets_through() {
    let server = Server::start();
    let rules = rule_set(
        r#"
        [[rule]]
        name = "strict"
        shadow = true
        key = "user"
        limits = ["gcra 1/1h"]

        [[rule]]
        name = "banned"
        shadow = true
        match = { user = "mallory" }
        action = "block"

        [[rule]]
        name = "lenient"
        match = { user = ["alice", "mallory"] }
        key = "user"
        limits = ["gcra 3/1h"]

        [[rule]]
        name = "later"
        priority = -1
        shadow = true
        match = { user = "*" }
        action = "block"
    "#,
    );
    let limiter = limiter(&server.tcp_url());
    for (allowed, strictly) in [(true, true), (true, false), (true, false), (false, false)] {
        let one = verdict(&limiter, &rules, &Attributes::new().user("mallory")).await;
        assert_eq!((one.allowed, one.rule.as_deref()), (allowed, Some("lenient")));
        let shadows: Vec<_> = one.shadows.iter().map(|shadow| (&*shadow.rule, shadow.allowed)).collect();
        assert_eq!(shadows, [("strict", strictly), ("banned", false)]);
    }
    let one = verdict(&limiter, &rules, &Attributes::new().user("alice")).await;
    assert_eq!(one.shadows.len(), 1);
}

/// A trial leaves nothing behind: when the rule is switched on, nobody is blocked for what it counted.
#[tokio::test]
async fn a_shadow_rule_blocks_no_key() {
    let server = Server::start();
    let text = |shadow: &str| {
        rule_set(&format!(
            "[[rule]]\nname = \"logins\"\nkey = \"user\"\nlimits = [\"gcra 10/1s burst 1\"]\nblock_for = \"1h\"\n\
             overrides = {{ \"user:eve\" = \"gcra 20/1s burst 1\" }}\n{shadow}"
        ))
    };
    let limiter = limiter(&server.tcp_url());
    for user in ["alice", "eve"] {
        let (request, key) = (Attributes::new().user(user), format!("user:{user}"));
        let mut denied = 0;
        while denied < 3 {
            let trial = verdict(&limiter, &text("shadow = true"), &request).await;
            let shadow = trial.shadows[0].decision.clone().expect("limits").expect("a decision");
            assert!(trial.allowed && !shadow.blocked, "{shadow:?}");
            denied += u32::from(!shadow.allowed);
        }
        let in_force = text("");
        let allowed = wait_for_value(async || {
            let decision = limiter.peek(in_force.rule("logins").expect("a rule"), &key).await.ok()?;
            assert!(!decision.blocked, "{decision:?}");
            decision.allowed.then_some(())
        });
        allowed.await;
        // What it counted stays counted, and in force it blocks.
        let blocked = wait_for_value(async || {
            let decision = verdict(&limiter, &in_force, &request).await.decision.expect("limits");
            decision.blocked.then_some(())
        });
        blocked.await;
    }
}

/// A client that says what its request costs can't say that it costs nothing.
#[tokio::test]
async fn a_cost_from_a_request_is_at_least_one_unless_the_rule_says_otherwise() {
    let rules = |more: &str, limit: &str| {
        format!("[[rule]]\nname = \"uploads\"\nkey = \"user\"\nlimits = [\"{limit}\"]\ncost = \"units\"\n{more}")
    };
    let cost = |text: &str, units: &str| {
        let (rules, request) = (rule_set(text), Attributes::new().user("a").set("units", units));
        match rules.applies(&request).expect("a rule").effect {
            Effect::Limit(charge) => charge.cost(),
            other => panic!("{other:?}"),
        }
    };
    for (more, units, expected) in [
        ("", "0", 1),
        ("", "00", 1),
        ("", "1", 1),
        ("", "7", 7),
        ("min_cost = 5", "0", 5),
        ("min_cost = 5", "7", 7),
        ("min_cost = 0", "0", 0),
    ] {
        assert_eq!(cost(&rules(more, "gcra 10/1s"), units), expected, "{more} {units}");
    }
    // An account's own limits count the same.
    let own = rules("match = { tier = \"free\" }", "gcra 10/1s");
    let account = Account::new("a").tier("free").limits("gcra 9/1s".parse().expect("a rule")).expect("limits");
    let (own, request) = (rule_set(&own), Attributes::new().account(&account).set("units", "0"));
    assert!(matches!(own.applies(&request).expect("a rule").effect, Effect::Limit(charge) if charge.cost() == 1));
    // Permits, too.
    let limiter = Limiter::new(tollgate::Embedded::new());
    let (text, request) = (rules("", "concurrency 1 ttl 1m"), Attributes::new().user("a").set("units", "0"));
    let held = limiter.hold_by(&rule_set(&text), &request).await.expect("an answer");
    assert!(
        held.verdict.allowed && !limiter.hold_by(&rule_set(&text), &request).await.expect("an answer").verdict.allowed
    );
    for (text, expected) in [
        (
            rules("min_cost = 11", "gcra 10/1s"),
            "min_cost: expected at most 10, the most that can ever be admitted by token-bucket 10/1s, got 11",
        ),
        (
            rules("min_cost = 1", "gcra 10/1s").replace("\"units\"", "2"),
            "min_cost: only for a cost that is an attribute, and here it is a number",
        ),
        (rules("max_hold = \"1m\"", "gcra 10/1s"), "max_hold: only a rule with a concurrency limit can have it"),
        (rules("max_hold = \"0s\"", "gcra 10/1s"), "max_hold: expected at least 1us, got \"0s\""),
    ] {
        let error = text.parse::<tollgate::rules::RuleSet>().expect_err(&text).to_string();
        assert!(error.ends_with(expected), "{error}");
    }
}

/// A failure of a shadow rule affects no other rule.
#[tokio::test]
async fn a_shadow_rule_without_a_decision_denies_nothing() {
    let rules = rule_set(
        r#"
        [[rule]]
        name = "shadow"
        shadow = true
        key = "user"
        limits = ["gcra 1/1h"]

        [[rule]]
        name = "open"
        key = "user"
        limits = ["gcra 3/1h"]
        on_error = "open"
    "#,
    );
    let limiter = limiter("redis://127.0.0.1:1");
    let one = verdict(&limiter, &rules, &Attributes::new().user("alice")).await;
    assert_eq!((one.allowed, one.decision.expect("by policy").by.name()), (true, "policy"));
    assert!(one.shadows[0].allowed && matches!(one.shadows[0].decision, Some(Err(_))));
}

#[tokio::test]
async fn the_policy_for_an_outage_is_set_for_all_rules_or_one() {
    let rules = rule_set(
        r#"
        [defaults]
        on_error = "open"

        [[rule]]
        name = "logins"
        match = { path = "/login" }
        key = "user"
        limits = ["gcra 3/1h"]
        on_error = "closed"

        [[rule]]
        name = "others"
        key = "user"
        limits = ["gcra 3/1h"]
    "#,
    );
    let limiter = limiter("redis://127.0.0.1:1");
    let others = verdict(&limiter, &rules, &Attributes::new().user("a").path("/")).await;
    assert_eq!(others.decision.expect("by policy").by.name(), "policy");
    let error = limiter.acquire_by(&rules, &Attributes::new().user("a").path("/login")).await.expect_err("closed");
    assert!(error.is_unreachable(), "{error}");
}

/// A charge can be peeked, settled or given back as any request can.
#[tokio::test]
async fn an_override_keeps_what_was_used_under_the_same_name() {
    let server = Server::start();
    let limiter = limiter(&server.url());
    for (name, limit, instead, left) in [
        ("same", "\"sliding-log 10/1h\"", "sliding-log 20/1h", 16),
        ("period", "\"sliding-log 10/1h\"", "sliding-log 20/2h", 19),
        ("named", "{ name = \"hour\", limit = \"sliding-log 10/1h\" }", "sliding-log 20/1h", 19),
    ] {
        let text = format!("[[rule]]\nname = \"{name}\"\nkey = \"user\"\nlimits = [{limit}]\n");
        let changed = rule_set(&format!("{text}overrides = {{ \"user:42\" = \"{instead}\" }}"));
        let user = Attributes::new().user("42");
        for _ in 0..3 {
            assert!(verdict(&limiter, &rule_set(&text), &user).await.allowed);
        }
        let decision = verdict(&limiter, &changed, &user).await.decision.expect("a decision");
        assert_eq!(decision.remaining, left, "{name}");
    }
}

/// For whoever knows the response without the middleware.
#[tokio::test]
async fn a_charge_knows_by_which_statuses_it_counts() {
    let text = "[[rule]]\nname = \"login\"\nmatch = { path = \"/login\" }\nkey = \"ip\"\ncount = [401, \"5xx\"]\n\
                limits = [\"fixed-window 3/1h start first-hit\"]\noverrides = { \"ip:192.0.2.9\" = \"fixed-window 9/1d\" }\n\
                [[rule]]\nname = \"all\"\nkey = \"ip\"\nlimits = [\"fixed-window 3/1h start first-hit\"]\n";
    let rules = rule_set(text);
    let limiter = Limiter::new(tollgate::Embedded::new());
    for (path, address, by_response) in
        [("/login", "192.0.2.1", true), ("/login", "192.0.2.9", true), ("/", "192.0.2.1", false)]
    {
        let request = Attributes::new().ip(address.parse().expect("an address")).path(path);
        let Effect::Limit(charge) = rules.applies(&request).expect("good").effect else { panic!("no limits") };
        assert_eq!(charge.counts_by_response(), by_response);
        let counted: Vec<_> =
            (100..600).filter(|status| charge.after_response(charge.request(), *status).is_none()).collect();
        let expected = |status: &u16| !by_response || *status == 401 || *status >= 500;
        assert_eq!(counted, (100..600).filter(expected).collect::<Vec<_>>());
        let request = charge.request().id("a");
        let took = limiter.acquire(charge.rule(), request).await.expect("an answer").remaining;
        let back = limiter.cancel(charge.rule(), request).await.expect("an answer").remaining;
        assert_eq!(back, took + 1);
    }
    // Permits alone are given back with the response anyway.
    let rules = rule_set(&text.replace("= \"fixed-window 9/1d\"", "= \"concurrency 9 ttl 1m\""));
    let request = Attributes::new().ip("192.0.2.9".parse().expect("an address")).path("/login");
    let Effect::Limit(charge) = rules.applies(&request).expect("good").effect else { panic!("no limits") };
    assert!(!charge.counts_by_response());
}

#[tokio::test]
async fn units_charged_by_a_rule_can_be_given_back() {
    let server = Server::start();
    let (limiter, rules) = (limiter(&server.tcp_url()), rule_set(API));
    let request = Attributes::new().user("a").path("/completions").set("tokens", "70");
    let applies = rules.applies(&request).expect("a rule");
    let Effect::Limit(charge) = &applies.effect else { panic!("{applies:?}") };
    let taken = limiter.acquire(charge.rule(), charge.request().id("call")).await.expect("a decision");
    assert_eq!(taken.remaining, 30);
    let settled = limiter.settle(charge.rule(), charge.request().id("call").cost(20)).await.expect("settled");
    assert_eq!(settled.remaining, 80);
    assert_eq!(rules.rule("tokens").and_then(Rule::name), Some("tokens"));
    assert!(rules.rule("office").is_none() && rules.rule("nobody").is_none());
}

#[test]
fn a_set_in_code_in_a_file_and_in_json_is_the_same() {
    let rules = rule_set(API);
    let of_code = RuleSet::new(rules.definitions().iter().cloned()).expect("the same");
    assert_eq!(of_code.definitions(), rules.definitions());
    let json = serde_json::to_string(&rules).expect("JSON");
    let of_json: RuleSet = serde_json::from_str(&json).expect("the same");
    assert_eq!(of_json.definitions(), rules.definitions());
    let bad = json.replace("gcra 100/1h", "gcra 100/1x");
    let error = serde_json::from_str::<RuleSet>(&bad).expect_err("a bad limit").to_string();
    assert!(error.starts_with("rule tokens: period: expected"), "{error}");
    let mut rule = Definition::new("users");
    rule.limits = vec!["gcra 1/1s".into()];
    let error = RuleSet::new([rule]).expect_err("no key");
    assert_eq!(
        error.to_string(),
        "rule users: key: it is missing: write what the rule counts by, such as \"user\", \"ip\" or \"global\""
    );
}
