//! Rules after which the next one applies as well: their limits are one decision.

use tollgate::rules::{Account, Attributes, Effect, Reason, RuleSet, Verdict};
use tollgate::{Charged, Cluster, Embedded, Limiter, OnError, Redis};
use tollgate_testing::cluster::ClusterServers;
use tollgate_testing::polling::{PATIENCE, in_time};
use tollgate_testing::redis_server::Server;

use super::decisions::verdict;
use super::{limiter, rule_set};

const API: &str = r#"
    [[rule]]
    name = "everybody"
    key = "global"
    limits = ["fixed-window 9/1h start first-hit"]
    continue = true
    status = 503

    [[rule]]
    name = "addresses"
    match = { path = "/api/*" }
    key = "ip"
    limits = ["fixed-window 5/1h start first-hit"]
    continue = true
    message = "too many from here"

    [[rule]]
    name = "users"
    key = "user"
    limits = ["fixed-window 3/1h start first-hit", { limit = "fixed-window 4/1h start first-hit", key = "org" }]
    missing = "skip"
    status = 420

    [[rule]]
    name = "nobody"
    priority = -1
    key = "global"
    limits = ["fixed-window 1/1h start first-hit"]
"#;

fn request(user: &'static str) -> Attributes<'static> {
    Attributes::new().user(user).set("org", "acme").ip([192, 0, 2, 1].into()).path("/api/v1")
}

/// What remains of each limit, by its rule and its place.
pub(super) fn left(verdict: &Verdict) -> Vec<(String, u64)> {
    let limits = verdict.decision.iter().flat_map(|decision| &decision.limits);
    limits.map(|limit| (limit.rule().unwrap_or_default().to_owned(), limit.remaining)).collect()
}

fn of(expected: &[(&str, u64)]) -> Vec<(String, u64)> {
    expected.iter().map(|(rule, left)| ((*rule).to_owned(), *left)).collect()
}

fn together(verdict: &Verdict) -> Vec<&str> {
    verdict.together.iter().map(|rule| &**rule).collect()
}

/// All are charged or none, and the first that denies answers.
#[tokio::test]
async fn the_limits_of_all_rules_are_one_decision() {
    let server = Server::start();
    let (limiter, rules) = (limiter(&server.tcp_url()), rule_set(API));
    let all = ["everybody", "addresses", "users"];
    for user in ["a", "b", "a", "b"] {
        let one = verdict(&limiter, &rules, &request(user)).await;
        assert_eq!((one.allowed, one.rule.as_deref(), one.reason.clone()), (true, Some("everybody"), Reason::Limits));
        assert_eq!(together(&one), all);
    }
    // The organisation has used its four; nothing else is charged.
    let denied = verdict(&limiter, &rules, &request("c")).await;
    assert_eq!((denied.allowed, denied.rule.as_deref()), (false, Some("users")));
    assert_eq!(left(&denied), of(&[("everybody", 5), ("addresses", 1), ("users", 3), ("users", 0)]));
    assert_eq!(denied.response.expect("a response").status.get(), 420);
    let decision = denied.decision.expect("a decision");
    assert_eq!((decision.rule(), decision.denied_by.as_deref()), (Some("users"), Some("org")));

    // Without a user the last rule is skipped, and the next one applies.
    let stranger = || Attributes::new().ip([192, 0, 2, 1].into()).path("/api/v1");
    let one = verdict(&limiter, &rules, &stranger()).await;
    assert_eq!(together(&one), ["everybody", "addresses", "nobody"]);
    assert_eq!(left(&one), of(&[("everybody", 4), ("addresses", 0), ("nobody", 0)]));
    // Two deny; the first of them answers, and the wait is the longer one.
    let denied = verdict(&limiter, &rules, &stranger()).await;
    assert_eq!((denied.allowed, denied.rule.as_deref()), (false, Some("addresses")));
    let response = denied.response.expect("a response");
    assert_eq!((response.status.get(), response.message.as_deref()), (429, Some("too many from here")));
    // One rule alone is no rule of several.
    let alone = rule_set("[[rule]]\nname = \"a\"\nkey = \"global\"\nlimits = [\"gcra 9/1s\"]\ncontinue = true");
    let one = verdict(&limiter, &alone, &Attributes::new()).await;
    assert_eq!((one.allowed, one.rule.as_deref(), one.together.len()), (true, Some("a"), 0));
}

/// Nothing is asked of the limits where a rule denies without any.
#[tokio::test]
async fn a_rule_that_blocks_or_misses_an_attribute_denies_and_nothing_is_charged() {
    let limiter = Limiter::new(Embedded::new());
    let rules = rule_set(
        r#"
        [[rule]]
        name = "everybody"
        key = "global"
        limits = ["fixed-window 9/1h start first-hit"]
        block = []
        continue = true

        [[rule]]
        name = "users"
        match = { path = "/users/*" }
        key = "user"
        limits = ["fixed-window 9/1h start first-hit"]
        block = ["user:mallory"]
        allow = ["user:robot"]
        continue = true

        [[rule]]
        name = "banned"
        match = { ip = "192.0.2.0/24" }
        action = "block"
    "#,
    );
    let of_user = |user: &'static str| Attributes::new().path("/users/1").user(user);
    for (request, allowed, rule, reason, asked) in [
        (of_user("anna"), true, "everybody", Reason::Limits, 2),
        (of_user("robot"), true, "everybody", Reason::Limits, 1),
        (of_user("mallory"), false, "users", Reason::Blocked, 0),
        (Attributes::new().path("/users/1"), false, "users", Reason::Missing("user".into()), 0),
        (Attributes::new().path("/"), true, "everybody", Reason::Limits, 1),
        (of_user("anna").ip([192, 0, 2, 7].into()), false, "banned", Reason::Blocked, 0),
    ] {
        let got = verdict(&limiter, &rules, &request).await;
        let limits = got.decision.map_or(0, |decision| decision.limits.len());
        assert_eq!((got.allowed, got.rule.as_deref(), got.reason, limits), (allowed, Some(rule), reason, asked));
    }
    let Effect::Limit(charge) = rules.applies(&of_user("anna")).expect("rules").effect else { panic!("limits") };
    let now = limiter.peek(charge.rule(), charge.request()).await.expect("an answer");
    assert_eq!(
        now.limits.iter().map(|limit| limit.remaining).collect::<Vec<_>>(),
        [6, 8],
        "three, and one, were charged"
    );
}

#[test]
fn where_continue_means_nothing_it_is_refused_and_what_it_reaches_is_no_dead_rule() {
    let rule = |name: &str, more: &str| format!("[[rule]]\nname = \"{name}\"\n{more}\n");
    let limits = "key = \"ip\"\nlimits = [\"gcra 9/1s\"]\n";
    for (set, expected) in [
        (
            rule("a", &format!("{limits}shadow = true\ncontinue = true")),
            "rule a: continue: a shadow rule can't have it",
        ),
        (
            rule("a", "action = \"allow\"\ncontinue = true"),
            "rule a: continue: a rule whose action is allow can't have it",
        ),
        (
            rule("a", "action = \"block\"\ncontinue = true"),
            "rule a: continue: a rule whose action is block can't have it",
        ),
        (
            rule("a", limits) + &rule("b", limits),
            "rule b: never applies: rule \"a\", before it, takes all of its requests: narrow that one, or write continue = true there",
        ),
        (
            rule("a", &format!("{limits}continue = true")) + &rule("b", limits) + &rule("c", limits),
            "rule c: never applies: rule \"b\", before it",
        ),
    ] {
        let error = set.parse::<RuleSet>().expect_err(&set).to_string();
        assert!(error.contains(expected), "{error}\nnot {expected}");
    }
    let rules = rule_set(&(rule("a", &format!("{limits}continue = true")) + &rule("b", limits)));
    let read: RuleSet = serde_json::from_str(&serde_json::to_string(&rules).expect("JSON")).expect("a set");
    assert_eq!(read, rules, "written as it was read");
    let request = Attributes::new().ip([192, 0, 2, 1].into());
    let Effect::Limit(charge) = rules.applies(&request).expect("rules").effect else { panic!("limits") };
    assert!(serde_json::to_string(charge.rule()).is_err(), "no file has several rules in one");
    assert!(charge.rule().clone().named("c").is_err());
}

/// Each limit has the options of its own rule, whatever the others say.
#[tokio::test]
async fn options_are_those_of_each_rule() {
    let rules = |block: &str, change: &str, most: u64| {
        rule_set(&format!(
            r#"
            [[rule]]
            name = "counting"
            key = "user"
            limits = ["fixed-window {most}/1h start first-hit"]
            overage = true
            continue = true

            [[rule]]
            name = "blocking"
            key = "user"
            limits = ["fixed-window 4/1h start first-hit"]
            {block}
            continue = true

            [[rule]]
            name = "resetting"
            key = "user"
            limits = ["fixed-window {most}0/1h start first-hit"]
            {change}
        "#
        ))
    };
    let server = Server::start();
    for limiter in [limiter(&server.tcp_url()), Limiter::new(Embedded::new())] {
        let set = rules("block_for = \"1h\"", "on_change = \"reset\"", 2);
        let request = Attributes::new().user("42");
        for _ in 0..2 {
            assert!(verdict(&limiter, &set, &request).await.allowed);
        }
        // The one that denies counts it; the one that would block has room, and blocks nothing.
        let decision = verdict(&limiter, &set, &request).await.decision.expect("a decision");
        let limits: Vec<_> =
            decision.limits.iter().map(|limit| (limit.allowed, limit.overage, limit.blocked)).collect();
        assert_eq!(limits, [(false, Some(1), false), (true, None, false), (true, None, false)]);
        // Other numbers: the first keeps what was used, the third begins anew.
        let set = rules("block_for = \"1h\"", "on_change = \"reset\"", 9);
        let decision = verdict(&limiter, &set, &request).await.decision.expect("a decision");
        assert_eq!(decision.limits.iter().map(|limit| limit.remaining).collect::<Vec<_>>(), [6, 1, 89]);
        assert!(verdict(&limiter, &set, &request).await.allowed);
        let decision = verdict(&limiter, &set, &request).await.decision.expect("a decision");
        let limits: Vec<_> = decision.limits.iter().map(|limit| (limit.allowed, limit.blocked)).collect();
        assert_eq!(limits, [(true, false), (false, true), (true, false)]);
        // Alone, the rule finds its key blocked, and the others theirs not.
        let Some(Effect::Limit(alone)) = set.by_name("blocking", &request).expect("a rule").map(|own| own.effect)
        else {
            panic!("limits")
        };
        assert!(limiter.peek(alone.rule(), alone.request()).await.expect("an answer").blocked);
    }
}

/// Two rules take different costs of one request, by whatever names.
/// What holds for a whole call can be changed in all of them; what each rule calls its own can't.
#[tokio::test]
async fn rules_that_apply_together_are_changed_as_a_whole_or_not_at_all() {
    let server = Server::start();
    let (limiter, rules) = (limiter(&server.tcp_url()), rule_set(API));
    let request = request("a");
    let Effect::Limit(charge) = rules.applies(&request).expect("a rule").effect else { panic!("limits") };
    let rule = charge.rule().clone();
    let an_hour = std::time::Duration::from_secs(3600);
    for refused in [
        rule.clone().named("other"),
        rule.clone().cost(7),
        rule.clone().cost_of("org", 7),
        rule.clone().block_for(an_hour),
        rule.clone().max_hold(an_hour),
        rule.clone().tagged("org"),
        rule.clone().and("gcra 1/1m".parse().expect("a limit")),
    ] {
        let error = refused.expect_err("several rules").to_string();
        assert_eq!(error, "rule everybody: several rules that apply together can't be changed as one");
    }
    let counting = rule.clone().count_overage(true);
    let overage = async || {
        let decision = limiter.acquire(&counting, charge.request().cost(9)).await.expect("a decision");
        decision.limits.iter().map(|limit| limit.overage).collect::<Vec<_>>()
    };
    assert_eq!(overage().await, [Some(0), Some(1), Some(1), Some(1)], "everybody's would admit it");
    let hashing = limiter.keys(&rule.hash_keys(true), charge.request()).expect_err("no secret").to_string();
    assert!(hashing.contains("it hashes its keys"), "{hashing}");
}

#[tokio::test]
async fn costs_are_those_of_each_rule() {
    let rules = rule_set(
        r#"
        [[rule]]
        name = "by-attribute"
        key = "user"
        limits = ["fixed-window 1000/1h start first-hit"]
        cost = "tokens"
        min_cost = 10
        continue = true

        [[rule]]
        name = "each"
        key = "user"
        limits = [
            "fixed-window 1000/1h start first-hit",
            { name = "tokens", limit = "fixed-window 1000/1h start first-hit" },
            { name = "own", limit = "fixed-window 1000/1h start first-hit", cost = "tokens" },
        ]
        cost = 7
    "#
        .replace("{ name = \"tokens\", limit = \"fixed-window 1000/1h start first-hit\" },", "")
        .as_str(),
    );
    let server = Server::start();
    let limiter = limiter(&server.tcp_url());
    let of = |tokens: &'static str| Attributes::new().user("42").set("tokens", tokens);
    assert_eq!(
        left(&verdict(&limiter, &rules, &of("4")).await),
        self::of(&[("by-attribute", 990), ("each", 993), ("each", 996),])
    );
    let asked = of("100");
    let Effect::Limit(charge) = rules.applies(&asked).expect("rules").effect else { panic!("limits") };
    assert_eq!((charge.cost(), charge.costs(None)), (100, vec![100, 7, 100]));
    // Reserved by an id, then settled at what was used: of all limits that have no cost of their own.
    assert!(limiter.acquire(charge.rule(), charge.request().id("1")).await.expect("a decision").allowed);
    let settled = limiter.settle(charge.rule(), charge.request().id("1").cost(5)).await.expect("settled");
    assert_eq!(settled.limits.iter().map(|limit| limit.remaining).collect::<Vec<_>>(), [985, 988, 896]);
    let unknown = limiter.acquire(charge.rule(), charge.request().costs(&[("money", 5)])).await.expect_err("unknown");
    assert!(unknown.to_string().contains("expected limits of rule"), "{unknown}");
}

/// Rules count networks of different sizes, and share what they count alike.
#[tokio::test]
async fn each_rule_counts_networks_of_its_own_size() {
    let rule = |name: &str, more: &str| {
        format!(
            "[[rule]]\nname = \"{name}\"\nkey = \"ip\"\nlimits = [\"fixed-window 9/1h start first-hit\", \
             {{ limit = \"fixed-window 9/1h start first-hit\", key = [\"ip\", \"user\"] }}]\ncontinue = true\n{more}\n"
        )
    };
    let rules =
        rule_set(&(rule("wide", "ipv6_prefix = 32") + &rule("narrow", "") + &rule("wide-too", "ipv6_prefix = 32")));
    let limiter = Limiter::new(Embedded::new());
    let of = |address: &str| Attributes::new().ip(address.parse().expect("an address")).user("42");
    for (address, expected) in [
        ("2001:db8:1::1", [8, 8, 8, 8, 8, 8]),
        ("2001:db8:2::1", [7, 7, 8, 8, 7, 7]),
        ("2001:db8:1::2", [6, 6, 7, 7, 6, 6]),
    ] {
        let got: Vec<_> = left(&verdict(&limiter, &rules, &of(address)).await).iter().map(|(_, left)| *left).collect();
        assert_eq!(got, expected, "{address}");
    }
    let asked = of("2001:db8:1::1");
    let Effect::Limit(charge) = rules.applies(&asked).expect("rules").effect else { panic!("limits") };
    let keys = limiter.keys(charge.rule(), charge.request()).expect("keys");
    assert_eq!(keys[0], "tollgate:{ip:2001:db8::/32}:wide/fixed-window-1h");
    assert_eq!(keys[2], "tollgate:{ip:2001:db8:1::/64}:narrow/fixed-window-1h");
    assert_eq!(keys[4], "tollgate:{ip:2001:db8::/32}:wide-too/fixed-window-1h");
}

/// Keys, tags and hashing are each rule's own: a rule counts in the same keys alone and together.
#[tokio::test]
async fn a_rule_counts_in_the_same_keys_alone_and_together() {
    let rules = rule_set(
        r#"
        [[rule]]
        name = "tagged"
        key = "user"
        tag = "org"
        limits = ["fixed-window 9/1h", { name = "all", limit = "fixed-window 9/1h", key = "org" }]
        continue = true

        [[rule]]
        name = "plain"
        key = "user"
        limits = ["fixed-window 9/1h", { limit = "fixed-window 9/1h", key = "org" }]
        hash_keys = false
        continue = true

        [[rule]]
        name = "hashed"
        key = ["org", "user"]
        tag = "user"
        limits = ["fixed-window 9/1h", { limit = "fixed-window 9/1h", key = "global" }]
        hash_keys = true
    "#,
    );
    let secret = tollgate::KeySecret::new("some secret of thirty-two bytes or more").expect("a secret");
    let limiter = Limiter::builder(Embedded::new()).key_secret(&secret).build();
    let request = Attributes::new().user("42").set("org", "acme");
    let Effect::Limit(charge) = rules.applies(&request).expect("rules").effect else { panic!("limits") };
    let joined = limiter.keys(charge.rule(), charge.request()).expect("keys");
    let alone = ["tagged", "plain", "hashed"].iter().flat_map(|name| {
        let Some(Effect::Limit(own)) = rules.by_name(name, &request).expect("a rule").map(|own| own.effect) else {
            panic!("limits")
        };
        limiter.keys(own.rule(), own.request()).expect("keys")
    });
    assert_eq!(joined, alone.collect::<Vec<_>>());
    assert!(limiter.acquire(charge.rule(), charge.request()).await.expect("a decision").allowed);
}

/// The strictest policy of the rules answers while Redis is away.
#[tokio::test]
async fn the_strictest_policy_answers() {
    let away = Redis::open("redis://127.0.0.1:1/").expect("an address");
    let rule = |name: &str, policy: &str| {
        format!(
            "[[rule]]\nname = \"{name}\"\nkey = \"global\"\nlimits = [\"fixed-window 8/1h start first-hit\"]\ncontinue = true\n{policy}\n"
        )
    };
    let (open, closed) = ("on_error = \"open\"", "on_error = \"closed\"");
    let local = "on_error = \"local\"\nprocesses = 4";
    for (policies, limiters, expected) in [
        ([open, open], OnError::Closed, Some("policy")),
        ([open, closed], OnError::Open, None),
        ([open, ""], OnError::Closed, None),
        (["", open], OnError::Open, Some("policy")),
        ([local, open], OnError::Open, Some("local")),
        ([local, ""], OnError::Open, Some("local")),
        ([local, closed], OnError::Open, None),
    ] {
        let limiter = Limiter::builder(away.clone()).on_error(limiters).build();
        let rules = rule_set(&(rule("a", policies[0]) + &rule("b", policies[1])));
        let answer = limiter.acquire_by(&rules, &Attributes::new()).await;
        let by = answer.ok().map(|verdict| verdict.decision.expect("a decision").by.name());
        assert_eq!(by, expected, "{policies:?} {limiters:?}");
    }
}

/// What an account has of its own takes the place of two rules' limits, and counts once.
#[tokio::test]
async fn an_accounts_own_limits_count_once_among_several_rules() {
    let tier = |name: &str| {
        format!(
            "[[rule]]\nname = \"{name}\"\nmatch = {{ tier = \"free\" }}\nkey = \"user\"\nlimits = [\"gcra 2/1h\"]\ncontinue = true\n"
        )
    };
    let everybody =
        "[[rule]]\nname = \"everybody\"\nkey = \"global\"\nlimits = [\"fixed-window 100/1h start first-hit\"]\n";
    let rules = rule_set(&(tier("one") + &tier("two") + everybody));
    let limiter = Limiter::new(Embedded::new());
    let own = Account::new("a").tier("free").limits("fixed-window 3/1h start first-hit".parse().expect("a rule"));
    let own = own.expect("limits");
    for expected in [(true, 2, 99), (true, 1, 98), (true, 0, 97), (false, 0, 97)] {
        let one = verdict(&limiter, &rules, &Attributes::new().account(&own)).await;
        let left = left(&one);
        assert_eq!(left.len(), 2, "{left:?}");
        assert_eq!((one.allowed, left[0].1, left[1].1), expected);
        assert_eq!(one.rule.as_deref(), Some("one"), "whose limits these take the place of");
    }
}

/// Permits of one rule, beside another's window.
#[tokio::test]
async fn permits_are_held_beside_other_rules() {
    let rules = rule_set(
        r#"
        [[rule]]
        name = "at-once"
        key = "user"
        limits = ["concurrency 1 ttl 30s"]
        continue = true

        [[rule]]
        name = "hourly"
        key = "org"
        limits = ["fixed-window 9/1h start first-hit"]
    "#,
    );
    let server = Server::start();
    let limiter = limiter(&server.tcp_url());
    let request = Attributes::new().user("42").set("org", "acme");
    let held = limiter.hold_by(&rules, &request).await.expect("a verdict");
    assert_eq!((held.verdict.allowed, held.permits.len()), (true, 1));
    let denied = limiter.hold_by(&rules, &request).await.expect("a verdict");
    assert_eq!((denied.verdict.allowed, denied.verdict.rule.as_deref()), (false, Some("at-once")));
    drop((held, denied));
    limiter.finish().await;
    let again = limiter.hold_by(&rules, &request).await.expect("a verdict");
    assert_eq!(left(&again.verdict), of(&[("at-once", 0), ("hourly", 7)]));
}

/// As where one call decides all of them.
#[tokio::test]
async fn on_several_nodes_each_rule_has_its_own_options() {
    let servers = ClusterServers::of_primaries();
    let limiter = Limiter::builder(Cluster::open(&servers.url()).expect("an address")).deadline(PATIENCE).build();
    let rules = rule_set(
        r#"
        [[rule]]
        name = "users"
        key = "user"
        limits = ["gcra 100/30d"]
        block_for = "1h"
        overage = true
        continue = true

        [[rule]]
        name = "orgs"
        key = "org"
        limits = ["gcra 1/30d"]
    "#,
    );
    for (org, user) in [("acme", "anna"), ("other", "bert"), ("third", "cleo")] {
        let request = Attributes::new().user(user).set("org", org);
        let allowed = [true, false, false];
        for allowed in allowed {
            let verdict = in_time(limiter.acquire_by(&rules, &request)).await.expect("a verdict");
            let decision = verdict.decision.as_ref().expect("a decision");
            assert_eq!((verdict.allowed, decision.blocked), (allowed, false), "{user}, {org}: {verdict:?}");
            assert_eq!(decision.limits.iter().map(|limit| limit.overage).collect::<Vec<_>>(), [Some(0), None]);
        }
    }
}

#[tokio::test]
async fn on_a_cluster_rules_apply_together_whatever_their_slots() {
    let servers = ClusterServers::of_primaries();
    let limiter = Limiter::builder(Cluster::open(&servers.url()).expect("an address")).deadline(PATIENCE).build();
    for (keys, limit, expected) in [
        (["user", "user"], "gcra 5/1d", None),
        (["user", "org"], "gcra 5/1d", None),
        (
            ["user", "user"],
            "gcra 8/1d shards 4",
            Some("rule first + second: on a cluster, rules that apply together can't have limits with shards"),
        ),
        (["org\"\ntag = \"user", "user"], "gcra 5/1d", None),
    ] {
        let rule = |(name, key): (&str, &str)| {
            format!("[[rule]]\nname = \"{name}\"\nkey = \"{key}\"\nlimits = [\"{limit}\"]\ncontinue = true\n")
        };
        let rules: String = ["first", "second"].into_iter().zip(keys).map(rule).collect();
        let rules: RuleSet = rules.parse().expect("rules");
        let asked = Attributes::new().user("anna").set("org", "acme");
        match (in_time(limiter.acquire_by(&rules, &asked)).await, expected) {
            (Ok(verdict), None) => assert!(verdict.allowed && verdict.together.len() == 2, "{keys:?}: {verdict:?}"),
            (Err(error), Some(expected)) => {
                assert!(error.is_input() && error.to_string().starts_with(expected), "{error}");
                assert_eq!(error.charged(), Charged::No);
            }
            (answer, _) => panic!("{keys:?}: {answer:?}"),
        }
    }
}
