//! What was decided, as the database has it: each decision once, and what they come to.

use std::time::{Duration, SystemTime};

use http::header::HeaderName;
use http::{Request, Response};
use tollgate::middleware::RateLimitLayer;
use tollgate::rules::{Account, Attributes, RuleSet};
use tollgate::{Limiter, RetryAfter};
use tollgate_record::Written;
use tollgate_record::history::{AuditQuery, History, HistorySettings, StatsQuery, Width};
use tollgate_testing::polling::wait_until;
use tollgate_testing::postgres_server::PostgresServer;
use tollgate_testing::record::{database, limiter, prepared};
use tower::{Layer, ServiceExt, service_fn};

use crate::grants::grant_service;

const RULES: &str = r#"
    [[rule]]
    name = "bots"
    match = { user = "bot" }
    action = "block"

    [[rule]]
    name = "api"
    match = { path = "/api/*" }
    key = "user"
    limits = ["fixed-window 3/1h"]
"#;

fn rules() -> RuleSet {
    RULES.parse().expect("rules")
}

fn latency(number: u64) -> Duration {
    Duration::from_micros(100 + number * number % 9973)
}

async fn one(server: &PostgresServer, sql: &str) -> String {
    let rows = server.run(sql).await;
    rows.first().cloned().unwrap_or_default()
}

/// The last hour and the next.
fn around() -> (SystemTime, SystemTime) {
    let now = SystemTime::now();
    (now - Duration::from_secs(3600), now + Duration::from_secs(3600))
}

async fn decide(limiter: &Limiter, rules: &RuleSet, history: &History, request: &Attributes<'_>, took: Duration) {
    let verdict = limiter.acquire_by(rules, request).await.expect("a verdict");
    history.record(request, &verdict, took);
}

#[tokio::test]
async fn a_denial_is_explained() {
    let (server, tool) = prepared().await;
    let settings = HistorySettings::new().region("eu-west-1").server("api-7");
    let history = tool.record(settings).expect("recording");
    let (limiter, rules) = (limiter(), rules());
    let account = Account::new("42").api_key("k1");
    let request = Attributes::new()
        .account(&account)
        .ip("2001:db8::7".parse().expect("an address"))
        .method("get")
        .path("/api/items?page=2");
    for number in 0..4 {
        decide(&limiter, &rules, &history, &request, latency(number)).await;
    }
    decide(&limiter, &rules, &history, &Attributes::new().user("bot").path("/api/items"), latency(4)).await;
    decide(&limiter, &rules, &history, &Attributes::new().path("/api/items"), latency(5)).await;
    decide(&limiter, &rules, &history, &Attributes::new().user("42").path("/else"), latency(6)).await;
    history.finish().await.expect("written");
    assert_eq!((history.status().recorded, history.status().lost, history.status().lag), (7, 0, Duration::ZERO));

    let (from, to) = around();
    let records = tool.audit(&AuditQuery::new("42", from, to)).await.expect("an answer");
    let told: Vec<_> = records
        .iter()
        .map(|record| (record.rule.as_deref(), record.decision.name(), record.reason.as_str(), record.used))
        .collect();
    assert_eq!(
        told,
        [
            (Some("api"), "allowed", "limits", Some(1)),
            (Some("api"), "allowed", "limits", Some(2)),
            (Some("api"), "allowed", "limits", Some(3)),
            (Some("api"), "throttled", "limits", Some(3)),
            (None, "allowed", "no-rule", None),
        ]
    );
    let denied = &records[3];
    assert_eq!(denied.endpoint.as_deref(), Some("/api/items"));
    assert_eq!((denied.method.as_deref(), denied.api_key.as_deref()), (Some("GET"), Some("k1")));
    assert_eq!((denied.region.as_deref(), denied.server.as_deref()), (Some("eu-west-1"), Some("api-7")));
    assert_eq!(denied.ip, "2001:db8::7".parse().ok());
    assert_eq!((denied.capacity, denied.limited_by.as_deref()), (Some(3), Some("fixed-window 3/1h")));
    assert!(matches!(denied.retry_after, Some(RetryAfter::After(wait)) if wait <= Duration::from_secs(3600)));
    assert_eq!((denied.latency, denied.status), (latency(3), None));
    let only_denied = AuditQuery::new("42", from, to).only_denied();
    assert_eq!(tool.audit(&only_denied).await.expect("an answer"), std::slice::from_ref(denied));
    assert_eq!(tool.audit(&AuditQuery::new("42", from, to).most(2)).await.expect("an answer"), records[3..]);
    let bot = tool.audit(&AuditQuery::new("bot", from, to)).await.expect("an answer");
    assert_eq!((bot[0].decision.name(), bot[0].reason.as_str(), bot[0].used), ("blocked", "blocked", None));
    let missing =
        one(&server, "SELECT decision || ' ' || reason FROM tollgate.rate_limit_audit_logs WHERE user_id IS NULL")
            .await;
    assert_eq!(missing, "blocked missing");
}

/// The rule is that of the limit which is reported, and the others are named too.
#[tokio::test]
async fn rules_that_apply_together_are_recorded() {
    let (_server, tool) = prepared().await;
    let history = tool.record(HistorySettings::new()).expect("recording");
    let rules: RuleSet = r#"
        [[rule]]
        name = "everybody"
        key = "global"
        limits = ["fixed-window 5/1h start first-hit"]
        continue = true

        [[rule]]
        name = "users"
        key = "user"
        limits = ["fixed-window 2/1h start first-hit"]
    "#
    .parse()
    .expect("rules");
    let limiter = limiter();
    let (anna, bob) = (Attributes::new().user("anna"), Attributes::new().user("bob"));
    for request in [&anna, &anna, &anna, &bob] {
        decide(&limiter, &rules, &history, request, latency(1)).await;
    }
    history.finish().await.expect("written");
    let (from, to) = around();
    let records = tool.audit(&AuditQuery::new("anna", from, to)).await.expect("an answer");
    let told: Vec<_> =
        records.iter().map(|record| (record.rule.as_deref(), record.decision.name(), record.used)).collect();
    assert_eq!(
        told,
        [
            (Some("users"), "allowed", Some(1)),
            (Some("users"), "allowed", Some(2)),
            (Some("users"), "throttled", Some(2)),
        ]
    );
    assert!(records.iter().all(|record| record.rules.as_deref() == Some("everybody,users")), "{records:?}");
    // Three of five are used by all, one of two by the user.
    let bob = tool.audit(&AuditQuery::new("bob", from, to)).await.expect("an answer");
    assert_eq!((bob[0].rule.as_deref(), bob[0].used, bob[0].capacity), (Some("users"), Some(1), Some(2)));
}

/// Counts by minute, hour and day are those of the rows, also of several services, and percentiles are within their
/// error.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn counts_equal_the_rows() {
    let (server, tool) = prepared().await;
    let services: Vec<_> = ["eu", "us"]
        .iter()
        .map(|region| database(&server).record(HistorySettings::new().region(region)).expect("recording"))
        .collect();
    let (limiter, rules) = (limiter(), rules());
    let users: Vec<_> = (0..40).map(|user| format!("user-{user}")).chain(["bot".to_owned()]).collect();
    for number in 0..12_000_u64 {
        let user = &users[usize::try_from(number * 7 % 41).expect("small")];
        let path = ["/api/a", "/api/b", "/else"][usize::try_from(number % 3).expect("small")];
        let request = Attributes::new().user(user).path(path);
        decide(&limiter, &rules, &services[usize::from(number % 5 == 0)], &request, latency(number)).await;
        if number == 5_000 {
            services[0].finish().await.expect("written");
        }
    }
    for service in &services {
        service.finish().await.expect("written");
    }
    for width in ["minute", "hour", "day"] {
        let differing = format!(
            "WITH raw AS (
                SELECT date_trunc('{width}', at, 'UTC') AS began, coalesce(user_id, '') AS user_id,
                    coalesce(endpoint, '') AS endpoint, coalesce(region, '') AS region,
                    count(*) FILTER (WHERE decision = 'allowed') AS allowed,
                    count(*) FILTER (WHERE decision = 'throttled') AS throttled,
                    count(*) FILTER (WHERE decision = 'blocked') AS blocked,
                    percentile_disc(ARRAY[0.5, 0.95, 0.99]) WITHIN GROUP (ORDER BY latency_us) AS exact
                FROM tollgate.rate_limit_audit_logs GROUP BY 1, 2, 3, 4
            )
            SELECT count(*)
            FROM raw FULL JOIN (SELECT * FROM tollgate.rate_limit_metrics WHERE width = '{width}') AS m
                USING (began, user_id, endpoint, region)
            WHERE (raw.allowed, raw.throttled, raw.blocked) IS DISTINCT FROM (m.allowed, m.throttled, m.blocked)
                OR abs(tollgate.percentile(latency, 0.5) / exact[1] - 1) > 0.0222
                OR abs(tollgate.percentile(latency, 0.95) / exact[2] - 1) > 0.0222
                OR abs(tollgate.percentile(latency, 0.99) / exact[3] - 1) > 0.0222"
        );
        assert_eq!(one(&server, &differing).await, "0", "{width}");
    }
    assert_eq!(one(&server, "SELECT count(*) FROM tollgate.rate_limit_audit_logs").await, "12000");

    // Read back: everything together, with percentiles of histograms added up.
    let (from, to) = around();
    let exact = server
        .run("SELECT unnest(percentile_disc(ARRAY[0.5, 0.95, 0.99]) WITHIN GROUP (ORDER BY latency_us)) FROM tollgate.rate_limit_audit_logs")
        .await;
    let one_row = tool.stats(&StatsQuery::new(Width::Hour, from, to).by_region().region("eu")).await.expect("stats");
    assert_eq!((one_row.len(), one_row[0].name.as_deref()), (1, Some("eu")));
    let everything =
        tool.stats(&StatsQuery::new(Width::Day, from - Duration::from_secs(86_400), to)).await.expect("stats");
    let total: u64 = everything.iter().map(|row| row.allowed + row.throttled + row.blocked).sum();
    assert_eq!(total, 12_000);
    if let [day] = &everything[..] {
        for (got, exact) in [day.p50, day.p95, day.p99].iter().zip(&exact) {
            let exact: f64 = exact.parse().expect("a number");
            assert!((got.as_secs_f64() * 1e6 / exact - 1.0).abs() < 0.0222, "{got:?} for {exact}");
        }
    }
    let users_stats = tool.stats(&StatsQuery::new(Width::Minute, from, to).by_user()).await.expect("stats");
    assert_eq!(users_stats.len(), 41);
    assert!(users_stats.is_sorted_by_key(|row| std::cmp::Reverse(row.throttled + row.blocked)));
    let of_one = tool.stats(&StatsQuery::new(Width::Hour, from, to).user("bot").by_endpoint()).await.expect("stats");
    assert_eq!(of_one.len(), 3);
    let bots = users_stats.iter().find(|row| row.name.as_deref() == Some("bot")).expect("the bot");
    assert_eq!(of_one.iter().map(|row| row.blocked).sum::<u64>(), bots.blocked);
    assert_eq!(bots.allowed, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_decision_is_stored_once_also_after_postgres_was_killed() {
    let (mut server, tool) = prepared().await;
    let history = database(&server).record(HistorySettings::new()).expect("recording");
    let (limiter, rules) = (limiter(), rules());
    for number in 0..9_000_u64 {
        let user = (number % 100).to_string();
        decide(&limiter, &rules, &history, &Attributes::new().user(&user).path("/api"), Duration::from_micros(number))
            .await;
        if number % 3_000 == 1_000 {
            tokio::time::sleep(Duration::from_millis(1_200)).await;
            server.stop();
        }
        if number % 3_000 == 2_000 {
            tokio::time::sleep(Duration::from_millis(200)).await;
            assert!(history.status().lag > Duration::ZERO);
            server.start_again();
        }
    }
    wait_until("all is written", async || history.finish().await.is_ok()).await;
    let found = one(&server, "SELECT count(*) || ' ' || sum(latency_us) FROM tollgate.rate_limit_audit_logs").await;
    assert_eq!(found, format!("9000 {}", (0..9_000_u64).sum::<u64>()));
    let counted =
        one(&server, "SELECT sum(allowed + throttled + blocked) FROM tollgate.rate_limit_metrics WHERE width = 'day'")
            .await;
    assert_eq!(counted, "9000");
    let writers = tool.writers().await.expect("writers");
    assert_eq!((writers.len(), writers[0].requests, writers[0].writes), (1, 9_000, Written::History));
    assert!(writers[0].ended_at.is_some() && !writers[0].killed && writers[0].lost == 0);
}

#[tokio::test]
async fn a_share_of_allowed_decisions_is_kept_and_all_are_counted() {
    let (server, tool) = prepared().await;
    let history = tool.record(HistorySettings::new().allowed_share(0.1)).expect("recording");
    let (limiter, rules) = (limiter(), rules());
    for number in 0..4_000_u64 {
        let user = if number % 4 == 0 { "bot" } else { "42" };
        decide(&limiter, &rules, &history, &Attributes::new().user(user).path("/else"), latency(number)).await;
    }
    history.finish().await.expect("written");
    let select = "SELECT count(*) FROM tollgate.rate_limit_audit_logs WHERE decision";
    assert_eq!(one(&server, &format!("{select} = 'blocked'")).await, "1000");
    let kept: u64 = one(&server, &format!("{select} = 'allowed'")).await.parse().expect("a number");
    assert!((200..400).contains(&kept), "{kept} of 3,000, where a tenth was asked for");
    let (from, to) = around();
    let stats = tool.stats(&StatsQuery::new(Width::Hour, from, to).by_region()).await.expect("stats");
    assert_eq!((stats[0].allowed, stats[0].blocked), (3_000, 1_000));
    assert_eq!(tool.writers().await.expect("writers")[0].requests, 4_000);
}

/// While PostgreSQL is unreachable the queue fills up, denials last, and what has no room is counted.
#[tokio::test]
async fn decisions_beyond_the_queue_are_counted_as_lost() {
    let (mut server, tool) = prepared().await;
    let history = database(&server).record(HistorySettings::new().queue(1_000)).expect("recording");
    server.stop();
    let (limiter, rules) = (limiter(), rules());
    for number in 0..2_000_u64 {
        decide(&limiter, &rules, &history, &Attributes::new().user("42").path("/else"), latency(number)).await;
    }
    assert_eq!((history.status().recorded, history.status().lost), (750, 1_250));
    for number in 0..300_u64 {
        decide(&limiter, &rules, &history, &Attributes::new().user("bot").path("/else"), latency(number)).await;
    }
    let status = history.status();
    assert_eq!((status.recorded, status.lost), (1_000, 1_300));
    server.start_again();
    wait_until("all is written", async || history.finish().await.is_ok()).await;
    assert_eq!(one(&server, "SELECT count(*) FROM tollgate.rate_limit_audit_logs").await, "1000");
    let writers = tool.writers().await.expect("writers");
    assert_eq!((writers[0].requests, writers[0].lost), (1_000, 1_300));
}

/// A service may write any row of counts: one that is none counts as none.
#[tokio::test]
async fn malformed_histograms_are_left_out() {
    let (server, tool) = prepared().await;
    // The table refuses them, unless somebody has dropped its bounds.
    server
        .run(
            "ALTER TABLE tollgate.rate_limit_metrics DROP CONSTRAINT latency_is_a_histogram;
            ALTER TABLE tollgate.rate_limit_metrics DROP CONSTRAINT rate_limit_metrics_throttled_check",
        )
        .await;
    for latency in ["ARRAY[1, 2]::int2[], ARRAY[5]::int8[]", "ARRAY[NULL]::int2[], ARRAY[NULL]::int8[]", "NULL, NULL"] {
        server
            .run(&format!(
                "INSERT INTO tollgate.rate_limit_metrics
                VALUES ('minute', date_trunc('minute', now()), gen_random_uuid(), '', '', 1, -5, 0, 0, 1, ROW({latency}))"
            ))
            .await;
    }
    let (from, to) = around();
    let stats = tool.stats(&StatsQuery::new(Width::Minute, from, to)).await.expect("statistics");
    let counts: Vec<_> = stats.iter().map(|stats| (stats.allowed, stats.throttled)).collect();
    assert_eq!(counts, [(3, 0)]);
}

/// Whatever a client writes is stored as text that a terminal can show, within bounds.
#[tokio::test]
async fn hostile_text_is_stored() {
    let (server, tool) = prepared().await;
    let history = tool.record(HistorySettings::new()).expect("recording");
    let (limiter, rules) = (limiter(), rules());
    let long = "x".repeat(100_000);
    let hostile: [&[u8]; 7] = [
        b"'; DROP TABLE tollgate.rate_limit_audit_logs; --",
        b"a\0b",
        b"\xff\xfe",
        "ünïcödé \u{202e}".as_bytes(),
        b"\\N\t\n\r",
        long.as_bytes(),
        b"{1,2}",
    ];
    for text in hostile {
        let path = format!("/else/{}", String::from_utf8_lossy(text));
        let request = Attributes::new().set("user", text).set("route", text).path(&path).method("B'D");
        decide(&limiter, &rules, &history, &request, Duration::MAX).await;
    }
    history.finish().await.expect("written");
    assert_eq!(one(&server, "SELECT count(*) FROM tollgate.rate_limit_audit_logs").await, "7");
    assert_eq!(one(&server, "SELECT max(length(user_id)) FROM tollgate.rate_limit_audit_logs").await, "512");
    let (from, to) = around();
    for text in
        [&b"'; DROP TABLE tollgate.rate_limit_audit_logs; --"[..], "ünïcödé \u{202e}".as_bytes(), long.as_bytes()]
    {
        let user = std::str::from_utf8(text).expect("text");
        assert_eq!(tool.audit(&AuditQuery::new(user, from, to)).await.expect("an answer").len(), 1, "{user}");
    }
    let stats = tool.stats(&StatsQuery::new(Width::Minute, from, to).by_user()).await.expect("stats");
    assert_eq!(stats.len(), 7);
    assert!(stats.iter().all(|row| row.allowed == 1));
    let of_one = tool.stats(&StatsQuery::new(Width::Minute, from, to).user(&long)).await.expect("stats");
    assert_eq!(of_one.iter().map(|row| row.allowed).sum::<u64>(), 1, "as it was cut off");
}

/// Invented paths are counted one by one up to a bound, routes always.
#[tokio::test]
async fn invented_paths_and_users_make_a_bounded_number_of_rows() {
    let (server, tool) = prepared().await;
    let history = tool.record(HistorySettings::new()).expect("recording");
    let (limiter, rules) = (limiter(), rules());
    for number in 0..12_000_u64 {
        let (user, path) = (format!("user-{number}"), format!("/else/{number}"));
        decide(&limiter, &rules, &history, &Attributes::new().user(&user).path(&path), latency(number)).await;
    }
    for number in 0..20_u64 {
        let route = format!("/routes/{number}");
        let request = Attributes::new().user("user-0").path("/else/0").set("route", &route);
        decide(&limiter, &rules, &history, &request, latency(number)).await;
    }
    history.finish().await.expect("written");
    let (from, to) = around();
    let endpoints =
        tool.stats(&StatsQuery::new(Width::Day, from - Duration::from_secs(86_400), to).by_endpoint()).await;
    let endpoints = endpoints.expect("stats");
    assert!(endpoints.len() <= 1_021, "{}", endpoints.len());
    assert_eq!(endpoints.iter().map(|row| row.allowed).sum::<u64>(), 12_020, "all are counted");
    let users = one(&server, "SELECT count(DISTINCT user_id) FROM tollgate.rate_limit_metrics").await;
    assert!(users.parse::<u64>().expect("a number") <= 12_001, "{users}");
}

/// A clock that is wrong by months makes no batch fail: there is no partition for its time, so what it says is lost.
#[tokio::test]
async fn decisions_by_a_clock_that_is_wrong_by_months_are_counted_as_lost() {
    let (server, tool) = prepared().await;
    server.clock_ahead("70 days").await;
    let history = database(&server).record(HistorySettings::new()).expect("recording");
    let (limiter, rules) = (limiter(), rules());
    decide(&limiter, &rules, &history, &Attributes::new().user("42").path("/else"), latency(0)).await;
    history.finish().await.expect("said");
    assert_eq!((history.status().lost, history.status().queued), (1, 0));
    drop(tool);
    assert_eq!(one(&server, "SELECT count(*) FROM tollgate.rate_limit_audit_logs").await, "0");
    assert_eq!(one(&server, "SELECT lost FROM tollgate.writers").await, "1");
}

#[tokio::test]
async fn settings_out_of_bounds_are_named() {
    let tool = tollgate_record::Postgres::open("postgres://limits@127.0.0.1/app").expect("an address");
    for (settings, said) in [
        (HistorySettings::new().region(&"x".repeat(257)), "region: expected at most 256 bytes, got 257"),
        (HistorySettings::new().server("a\0"), "server: contains NUL, which PostgreSQL can't store"),
        (HistorySettings::new().allowed_share(1.5), "allowed_share: expected 0 to 1, got 1.5"),
        (HistorySettings::new().allowed_share(f64::NAN), "allowed_share: expected 0 to 1, got NaN"),
        (HistorySettings::new().queue(10), "queue: expected 1000 to 10000000 decisions, got 10"),
    ] {
        assert_eq!(tool.record(settings).expect_err("refused").to_string(), said);
    }
}

/// Recorded decisions are written although no caller waits for it.
#[tokio::test]
async fn queued_decisions_are_written_when_the_last_clone_is_dropped() {
    let (server, tool) = prepared().await;
    let history = tool.record(HistorySettings::new()).expect("recording");
    let (limiter, rules) = (limiter(), rules());
    decide(&limiter, &rules, &history, &Attributes::new().user("42").path("/else"), latency(0)).await;
    drop((history.clone(), history));
    wait_until("it is written", async || {
        one(&server, "SELECT count(*) FROM tollgate.writers WHERE ended_at IS NOT NULL AND NOT killed").await == "1"
    })
    .await;
    assert_eq!(one(&server, "SELECT count(*) FROM tollgate.rate_limit_audit_logs").await, "1");
    assert_eq!(one(&server, "SELECT count(*) FROM tollgate.rate_limit_metrics").await, "3");
}

/// A service needs no right to make tables, and says what it lacks.
#[tokio::test]
async fn a_service_has_few_rights() {
    let (server, tool) = prepared().await;
    grant_service(&server).await;
    drop(tool);
    let this_month = one(&server, "SELECT to_char(now() AT TIME ZONE 'UTC', 'YYYY_MM')").await;
    server.run(&format!("DROP TABLE tollgate.rate_limit_audit_logs_{this_month}")).await;
    let service = tollgate_record::Postgres::open(&server.url_of("service", "postgres")).expect("an address");
    let history = service.record(HistorySettings::new()).expect("recording");
    let (limiter, rules) = (limiter(), rules());
    decide(&limiter, &rules, &history, &Attributes::new().user("42").path("/else"), latency(0)).await;
    history.finish().await.expect("written, in a partition that the owner's function made");
    assert_eq!(one(&server, "SELECT count(*) FROM tollgate.rate_limit_audit_logs").await, "1");
}

/// By the layer: with the status of the answer, also of requests whose client has gone before there was one.
#[tokio::test]
async fn a_layer_records_each_answer() {
    let (server, tool) = prepared().await;
    let history = tool.record(HistorySettings::new()).expect("recording");
    let answer = service_fn(async move |request: Request<String>| match request.uri().path() {
        "/api/slow" => std::future::pending().await,
        "/api/broken" => Err("broken"),
        path => Ok(Response::builder()
            .status(if path == "/else" { 404 } else { 201 })
            .body(String::new())
            .expect("an answer")),
    });
    let layer = RateLimitLayer::new(limiter(), rules()).header("user", HeaderName::from_static("user"));
    let service = layer.record(history.clone()).layer(answer);
    let ask = |user: &str, path: &str| {
        let request = Request::builder().method("PUT").uri(path).header("user", user).body(String::new());
        service.clone().oneshot(request.expect("a request"))
    };
    assert_eq!(ask("a", "/api/x?secret=1").await.expect("an answer").status(), 201);
    assert_eq!(ask("a", "/else").await.expect("an answer").status(), 404);
    ask("a", "/api/broken").await.expect_err("the service's own error");
    let gone = tokio::time::timeout(Duration::from_millis(50), ask("a", "/api/slow")).await;
    assert!(gone.is_err());
    assert_eq!(ask("a", "/api/x").await.expect("an answer").status(), 429);
    assert_eq!(ask("bot", "/else").await.expect("an answer").status(), 403);
    history.finish().await.expect("written");
    let rows = server
        .run("SELECT concat_ws(' ', user_id, method, endpoint, decision, coalesce(status::text, '-')) FROM tollgate.rate_limit_audit_logs ORDER BY at")
        .await;
    let expected = [
        "a PUT /api/x allowed 201",
        "a PUT /else allowed 404",
        "a PUT /api/broken allowed -",
        "a PUT /api/slow allowed -",
        "a PUT /api/x throttled 429",
        "bot PUT /else blocked 403",
    ];
    assert_eq!(rows, expected);
}
