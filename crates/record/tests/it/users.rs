//! Users with limits of their own, and users who are blocked: in every process, whichever rule applies.

use std::time::{Duration, SystemTime};

use axum::body::Body;
use axum::http::{HeaderName, Request, Response};
use tollgate::middleware::RateLimitLayer;
use tollgate::rules::{Account, Attributes, Reason, RuleSet};
use tollgate_record::OwnLimits;
use tollgate_testing::polling::wait_until;
use tollgate_testing::record::{database, limiter, prepared};
use tower::{Layer, ServiceExt, service_fn};

const RULES: &str = r#"
    [[rule]]
    name = "office"
    priority = 9
    match = { org = "ours" }
    action = "allow"

    [[rule]]
    name = "login"
    priority = 8
    match = { path = "/login" }
    key = "user"
    limits = ["fixed-window 2/1h"]

    [[rule]]
    name = "search"
    priority = 7
    match = { tier = "free", path = "/search" }
    key = "user"
    limits = ["fixed-window 3/1h"]
    overrides = { "user:vip" = "fixed-window 9/1h" }
    block = ["user:mallory"]

    [[rule]]
    name = "free"
    match = { tier = "free" }
    key = "user"
    limits = ["fixed-window 3/1h"]
"#;

fn rules() -> RuleSet {
    RULES.parse().expect("rules")
}

fn limits(per_hour: Option<u64>, per_day: Option<u64>, burst: Option<u64>) -> OwnLimits {
    let mut limits = OwnLimits::default();
    (limits.per_hour, limits.per_day, limits.burst) = (per_hour, per_day, burst);
    limits
}

#[tokio::test]
async fn limits_of_an_account_replace_those_of_its_tier_and_no_others() {
    let (limiter, rules) = (limiter(), rules());
    let own = Account::new("42").tier("free").limits("fixed-window 5/1h".parse().expect("a rule")).expect("limits");
    let ask = async |account: &Account, path: &str| {
        let request = Attributes::new().account(account).path(path);
        let verdict = limiter.acquire_by(&rules, &request).await.expect("a verdict");
        let decision = verdict.decision.as_ref().expect("limits were asked");
        (
            verdict.rule.as_deref().unwrap_or_default().to_owned(),
            decision.rule().unwrap_or_default().to_owned(),
            decision.remaining,
        )
    };
    let expected = |rule: &str, counted: &str, left: u64| (rule.to_owned(), counted.to_owned(), left);
    // Both rules of the tier count together.
    assert_eq!(ask(&own, "/items").await, expected("free", "user-quota", 4));
    assert_eq!(ask(&own, "/search").await, expected("search", "user-quota", 3));
    // This one isn't the tier's.
    assert_eq!(ask(&own, "/login").await, expected("login", "login", 1));
    // Other users, and other keys of the user, are as before.
    assert_eq!(ask(&Account::new("43").tier("free"), "/items").await, expected("free", "free", 2));
    let by_key = own.clone().api_key("k1").key_limits("fixed-window 7/1h".parse().expect("a rule")).expect("limits");
    assert_eq!(ask(&by_key, "/items").await, expected("free", "key-quota", 6));
    assert_eq!(ask(&own, "/items").await, expected("free", "user-quota", 2));
    // What a rule says of one user by name stays.
    let vip = Account::new("vip").tier("free").limits("fixed-window 5/1h".parse().expect("a rule")).expect("limits");
    assert_eq!(ask(&vip, "/search").await, expected("search", "search", 8));
    assert_eq!(ask(&vip, "/items").await, expected("free", "user-quota", 4));
    let mallory = Account::new("mallory").tier("free").limits("fixed-window 5/1h".parse().expect("a rule"));
    let mallory = mallory.expect("limits");
    let verdict = limiter.acquire_by(&rules, &Attributes::new().account(&mallory).path("/search")).await;
    assert_eq!(verdict.expect("a verdict").reason, Reason::Blocked);
    // The account goes before what was set of the request.
    let request = Attributes::new().user("other").tier("paid").account(&own);
    assert_eq!(rules.applies(&request).expect("a rule").rule, Some("free"));
    let shards = "gcra 100/1s shards 4".parse().expect("a rule");
    let error = Account::new("1").limits(shards).expect_err("shards");
    assert!(error.to_string().starts_with("limits: expected limits without shards"), "{error}");
}

/// Limits of a shadow rule, of permits, and of what isn't each user's, stay.
#[tokio::test]
async fn a_users_own_limits_replace_only_limits_counted_for_each_user() {
    let rules: RuleSet = r#"
        [[rule]]
        name = "trial"
        priority = 9
        match = { tier = "free" }
        key = "user"
        limits = ["fixed-window 1/1h"]
        shadow = true

        [[rule]]
        name = "reports"
        priority = 8
        match = { tier = "free", path = "/reports" }
        key = "user"
        limits = ["concurrency 1 ttl 30s"]

        [[rule]]
        name = "shared"
        priority = 7
        match = { tier = "free", path = "/shared" }
        key = "org"
        limits = ["fixed-window 1/1h"]

        [[rule]]
        name = "hashed"
        priority = 6
        match = { tier = "free", path = "/hashed" }
        key = "user"
        limits = ["fixed-window 1/1h"]
        hash_keys = false
        block_for = "1h"

        [[rule]]
        name = "free"
        match = { tier = "free" }
        key = "user"
        limits = ["fixed-window 1/1h"]
    "#
    .parse()
    .expect("rules");
    let limiter = limiter();
    let own = Account::new("42").tier("free").limits("fixed-window 4/1h".parse().expect("a rule")).expect("limits");
    let hold = async |path: &str| {
        limiter
            .hold_by(&rules, &Attributes::new().account(&own).set("org", "acme").path(path))
            .await
            .expect("a verdict")
    };
    let (one, two) = (hold("/reports").await, hold("/reports").await);
    assert_eq!((one.verdict.allowed, two.verdict.allowed), (true, false));
    assert_eq!((hold("/shared").await.verdict.allowed, hold("/shared").await.verdict.allowed), (true, false));
    // Both count together, and the shadow rule has taken nothing of it.
    let paths = ["/items", "/hashed", "/items", "/hashed", "/items"];
    let mut allowed = 0;
    for path in paths {
        allowed += u32::from(hold(path).await.verdict.allowed);
    }
    assert_eq!(allowed, 4);
    assert!(!hold("/items").await.verdict.decision.expect("a decision").blocked);
    // Another account takes nothing over from the one before, nor from what was set.
    let other = Account::new("43");
    let request = Attributes::new().set("tier", "paid").account(&own).account(&other);
    assert_eq!((request.get("tier"), request.get("user").as_deref()), (None, Some(&b"43"[..])));
}

/// What a request takes, and what happens while Redis is unreachable, is as the rule says that applies.
#[tokio::test]
async fn a_users_own_limits_take_the_cost_and_the_policy_of_the_rule() {
    let rules: RuleSet = r#"
        [[rule]]
        name = "uploads"
        match = { tier = "free" }
        key = "user"
        limits = ["token-bucket 10/1h"]
        cost = "megabytes"
        on_error = "open"
    "#
    .parse()
    .expect("rules");
    let own = Account::new("42").tier("free").limits("token-bucket 100/1h".parse().expect("a rule")).expect("limits");
    let limiter = limiter();
    let taken = limiter.acquire_by(&rules, &Attributes::new().account(&own).set("megabytes", "30")).await;
    assert_eq!(taken.expect("a verdict").decision.expect("a decision").remaining, 70);
    let missing = limiter.acquire_by(&rules, &Attributes::new().account(&own)).await.expect("a verdict");
    assert_eq!(missing.reason, Reason::Missing("megabytes".into()));
    let error = limiter.acquire_by(&rules, &Attributes::new().account(&own).set("megabytes", "many")).await;
    assert!(error.expect_err("no number").is_input());
    let away = tollgate::Limiter::new(tollgate::Redis::open("redis://127.0.0.1:1").expect("an address"));
    let open = away.acquire_by(&rules, &Attributes::new().account(&own).set("megabytes", "30")).await;
    assert!(open.expect("open").allowed);
}

#[tokio::test]
async fn a_block_of_a_user_reaches_every_process_also_after_a_postgres_outage() {
    let (mut server, tool) = prepared().await;
    tool.push_rules(&rules(), "").await.expect("pushed");
    let limiter = limiter();
    let mut services = Vec::new();
    for _ in 0..2 {
        services.push(database(&server).follow(&limiter).await.expect("a configuration"));
    }
    let blocked = async |user: &str| {
        let known: Vec<_> = services.iter().map(|service| service.account_of_user(user)).collect();
        known.iter().all(|account| account.as_ref().is_some_and(|account| account.block().is_some()))
    };
    let hour = SystemTime::now() + Duration::from_secs(3600);
    tool.block_user("42", Some("spam"), Some(hour), "me").await.expect("blocked");
    let took = wait_until("a user is blocked", async || blocked("42").await).await;
    println!("blocked after {took:?}");
    let account = services[0].account_of_user("42").expect("known");
    // Whichever rule applies, also one that allows.
    for path in ["/login", "/search", "/other"] {
        let request = Attributes::new().set("org", "ours").account(&account).path(path);
        let verdict = limiter.acquire_by(&services[0].rules(), &request).await.expect("a verdict");
        let Reason::UserBlocked(block) = &verdict.reason else { panic!("{verdict:?}") };
        assert_eq!((block.reason.as_deref(), verdict.rule), (Some("spam"), None));
        let response = verdict.response.expect("a response");
        let wait = response.retry_after.expect("an end");
        assert!(response.status.get() == 403 && wait > Duration::from_secs(3590) && wait <= Duration::from_secs(3600));
    }
    // One whose end has come is none.
    let past = SystemTime::now() - Duration::from_secs(1);
    tool.block_user("43", None, Some(past), "me").await.expect("blocked");
    server.stop();
    wait_until("PostgreSQL is missed", async || services.iter().all(|service| !service.status().is_connected)).await;
    assert!(blocked("42").await, "the last configuration serves");
    server.start_again();
    assert!(tool.unblock_user("42", "me").await.expect("unblocked"));
    let took = wait_until("a block is lifted", async || {
        services.iter().all(|service| service.account_of_user("42").is_none())
    })
    .await;
    println!("lifted after {took:?}");
    assert!(!tool.unblock_user("42", "me").await.expect("an answer"), "there was none any more");
    let past = services[0].account_of_user("43").expect("known");
    assert!(past.block().is_none());
    let verdict = limiter.acquire_by(&services[0].rules(), &Attributes::new().account(&past).tier("free")).await;
    assert!(verdict.expect("a verdict").allowed);
}

/// Rows deleted by any program are noticed.
#[tokio::test]
async fn deleted_and_restored_users_are_noticed() {
    let (server, tool) = prepared().await;
    for user in ["1", "2", "3"] {
        tool.set_user(user, Some("paid"), OwnLimits::default(), "").await.expect("set");
    }
    let service = database(&server).follow(&limiter()).await.expect("a configuration");
    let known = async |users: [bool; 3]| ["1", "2", "3"].map(|user| service.account_of_user(user).is_some()) == users;
    assert!(known([true; 3]).await);
    server.run("DELETE FROM tollgate.user_quotas WHERE user_id = '2'").await;
    wait_until("a user is deleted", async || known([true, false, true]).await).await;
    server.run("UPDATE tollgate.user_quotas SET user_id = '2' WHERE user_id = '3'").await;
    wait_until("a user is renamed", async || known([true, true, false]).await).await;
    tool.set_user("1", None, OwnLimits::default(), "").await.expect("set");
    wait_until("a user is as others again", async || known([false, true, false]).await).await;
    // As after a restore: an older version, and other rows.
    server
        .run("TRUNCATE tollgate.user_quotas; UPDATE tollgate.configuration SET version = 1, truncated_version = 1, history = gen_random_uuid()")
        .await;
    wait_until("the past is taken", async || known([false; 3]).await && service.status().version == 1).await;
    tool.set_user("3", Some("paid"), OwnLimits::default(), "").await.expect("set");
    wait_until("and goes on", async || known([false, false, true]).await).await;
}

/// Changes of one user at once wait for each other, and never for each other in a ring.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_changes_of_users_are_serialised() {
    let (server, _) = prepared().await;
    let tasks = (0..4).map(|task| {
        let tool = database(&server);
        tokio::spawn(async move {
            for _ in 0..40 {
                match task {
                    0 | 1 => tool.block_user("42", Some("spam"), None, "").await,
                    2 => tool.unblock_user("42", "").await.map(drop),
                    _ => tool.set_user("42", Some("paid"), OwnLimits::default(), "").await,
                }
                .expect("changed");
            }
        })
    });
    for task in futures_util::future::join_all(tasks).await {
        task.expect("no error");
    }
}

#[tokio::test]
async fn a_layer_knows_users_by_the_database() {
    let (server, tool) = prepared().await;
    tool.push_rules(&rules(), "").await.expect("pushed");
    tool.set_user("42", Some("free"), limits(Some(7), Some(100), None), "me").await.expect("set");
    tool.block_user("666", Some("fraud"), None, "me").await.expect("blocked");
    let configuration = database(&server).follow(&limiter()).await.expect("a configuration");
    let layer = RateLimitLayer::new(limiter(), configuration.clone()).header("user", HeaderName::from_static("x-user"));
    let ask = async |user: &'static str| {
        let hello =
            service_fn(|_: Request<Body>| async { Ok::<_, std::convert::Infallible>(Response::new(Body::empty())) });
        let request = Request::builder().uri("/items").header("x-user", user).body(Body::empty()).expect("a request");
        layer.layer(hello).oneshot(request).await.expect("infallible")
    };
    let answer = ask("42").await;
    let policy = answer.headers()["ratelimit-policy"].to_str().expect("text");
    let expected = "\"user-quota/token-bucket-1h\";q=7;w=3600, \"user-quota/fixed-window-1d\";q=100;w=86400";
    assert_eq!((answer.status().as_u16(), policy), (200, expected));
    let denied = ask("666").await;
    assert_eq!(denied.status().as_u16(), 403);
    assert!(denied.headers().get("retry-after").is_none(), "it has no end");
    assert!(matches!(
        &denied.extensions().get::<tollgate::rules::Verdict>().expect("why").reason,
        Reason::UserBlocked(block) if block.reason.as_deref() == Some("fraud")
    ));
    // Nobody knows a tier of this one, so no rule applies.
    assert_eq!(ask("43").await.status().as_u16(), 200);
    configuration.finish().await.expect("written");
    let totals = async |user: &str| {
        let user = tool.user(user).await.expect("an answer").expect("known");
        (user.total_today, user.total_this_month, user.times_exceeded, user.last_request_at.is_some())
    };
    assert_eq!(totals("42").await, (1, 1, 0, true));
    assert_eq!(totals("666").await, (0, 0, 1, true));
    assert_eq!(totals("43").await, (1, 1, 0, true));
}

/// What the database doesn't have of a user stays as the service says.
#[tokio::test]
async fn a_tier_that_the_service_gives_holds_for_users_whom_the_database_gives_none() {
    let (server, tool) = prepared().await;
    tool.push_rules(&rules(), "").await.expect("pushed");
    tool.set_user("own", None, limits(Some(7), None, None), "").await.expect("set");
    tool.block_user("past", None, None, "").await.expect("blocked");
    server
        .run("UPDATE tollgate.user_quotas SET blocked_until = now() - interval '1 hour' WHERE user_id = 'past'")
        .await;
    tool.set_user("paid", Some("paid"), OwnLimits::default(), "").await.expect("set");
    let configuration = database(&server).follow(&limiter()).await.expect("a configuration");
    let layer = RateLimitLayer::new(limiter(), configuration).attribute("tier", |_| Some("free"));
    let layer = layer.header("user", HeaderName::from_static("x-user"));
    for (user, expected) in
        [("own", Some("user-quota")), ("past", Some("free")), ("other", Some("free")), ("paid", None)]
    {
        let hello =
            service_fn(|_: Request<Body>| async { Ok::<_, std::convert::Infallible>(Response::new(Body::empty())) });
        let request = Request::builder().uri("/items").header("x-user", user).body(Body::empty()).expect("a request");
        let answer = layer.layer(hello).oneshot(request).await.expect("infallible");
        let policy = answer.headers().get("ratelimit-policy").map(|policy| policy.to_str().expect("text").to_owned());
        assert_eq!(policy.is_some(), expected.is_some(), "{user}: {policy:?}");
        let is_expected =
            expected.is_none_or(|name| policy.as_deref().is_some_and(|policy| policy[1..].starts_with(name)));
        assert!(is_expected, "{user}: {policy:?}");
    }
}

#[tokio::test]
async fn hostile_text_is_stored_or_refused() {
    let (server, tool) = prepared().await;
    let configuration = database(&server).follow(&limiter()).await.expect("a configuration");
    for text in ["'; DROP TABLE tollgate.user_quotas; --", "\\u0000 $1 %s {}", "\u{202e}\u{1f600}", " ", "\u{7f}\r\n\t"]
    {
        tool.block_user(text, Some(text), None, text).await.expect("stored");
        tool.set_user(text, Some(text), limits(Some(1), None, None), text).await.expect("stored");
        let stored = tool.user(text).await.expect("an answer").expect("stored");
        assert_eq!(
            (stored.user.as_str(), stored.tier.as_deref(), stored.updated_by.as_str()),
            (text, Some(text), text)
        );
        assert_eq!(stored.block.and_then(|block| block.reason).as_deref(), Some(text));
        wait_until("it is known", async || {
            configuration.account_of_user(text).is_some_and(|user| user.block().is_some())
        })
        .await;
    }
    let most = (1_u64 << 53).to_string();
    let long = "x".repeat(2000);
    let block = async |user: &str, reason: &str, by: &str| tool.block_user(user, Some(reason), None, by).await;
    for (refused, expected) in [
        (block("", "", "").await, "user: the name is empty".to_owned()),
        (block(&long, "", "").await, "user: expected at most 512 bytes, got 2000".to_owned()),
        (block("a\0b", "", "").await, "user: contains NUL, which PostgreSQL can't store".to_owned()),
        (block("a", &long, "").await, "reason: expected at most 1024 bytes, got 2000".to_owned()),
        (block("a", "\0", "").await, "reason: contains NUL, which PostgreSQL can't store".to_owned()),
        (block("a", "", &long).await, "by: expected at most 256 bytes, got 2000".to_owned()),
        (
            tool.block_user("a", None, Some(SystemTime::UNIX_EPOCH + Duration::from_secs(1 << 40)), "").await,
            "until: expected a time from 1970 to 9999, got 1099511627776 s after 1970".to_owned(),
        ),
        (
            tool.block_user("a", None, Some(SystemTime::UNIX_EPOCH - Duration::from_secs(1)), "").await,
            "until: expected a time from 1970 to 9999, got -1 s after 1970".to_owned(),
        ),
        (tool.set_user("a", Some(""), OwnLimits::default(), "").await, "tier: the name is empty".to_owned()),
        (
            tool.set_user("a", None, limits(Some(0), None, None), "").await,
            format!("per_hour: expected 1 to {most} units, got 0"),
        ),
        (
            tool.set_user("a", None, limits(None, Some((1 << 53) + 1), None), "").await,
            format!("per_day: expected 1 to {most} units, got {}", (1_u64 << 53) + 1),
        ),
        (
            tool.set_user("a", None, limits(None, Some(5), Some(3)), "").await,
            "burst: needs a limit per second or per hour, got 3 alone".to_owned(),
        ),
    ] {
        let error = refused.expect_err(&expected);
        assert!(error.is_input(), "{error}");
        assert_eq!(error.to_string(), expected);
    }
    // What a client may send as its name.
    for bytes in [&b"\xff\xfe"[..], b"a\0b", &[b'x'; 3000], "\u{202e}'; --".as_bytes()] {
        configuration.count(&Attributes::new().user(bytes), true);
    }
    configuration.finish().await.expect("written");
    assert_eq!(tool.user("\u{202e}'; --").await.expect("an answer").expect("counted").total_today, 1);
    assert_eq!(server.run("SELECT count(*) FROM tollgate.user_quotas").await, ["6"]);
}
