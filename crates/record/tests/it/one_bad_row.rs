//! One row that can't be stored or added to: it is set aside and named, and the others are written.

use std::time::{Duration, SystemTime};

use tollgate::rules::{Account, Attributes, RuleSet};
use tollgate_record::KeyTerms;
use tollgate_record::history::{History, HistorySettings, StatsQuery, Width};
use tollgate_testing::alone::alone;
use tollgate_testing::polling::wait_until;
use tollgate_testing::postgres_server::PostgresServer;
use tollgate_testing::record::{limiter, prepared};

const MOST: u64 = i64::MAX.unsigned_abs();

async fn record(history: &History, users: impl IntoIterator<Item = String>) {
    let verdict = limiter().acquire_by(&RuleSet::default(), &Attributes::new()).await.expect("a verdict");
    for user in users {
        history.record(&Attributes::new().user(&user).path("/"), &verdict, Duration::from_micros(10));
    }
}

async fn one(server: &PostgresServer, sql: &str) -> String {
    server.run(sql).await.remove(0)
}

fn around() -> (SystemTime, SystemTime) {
    let now = SystemTime::now();
    (now - Duration::from_secs(7200), now + Duration::from_secs(7200))
}

/// Counts near 2^63 stay there; those of other users go on, and can be read.
#[tokio::test]
async fn counts_that_are_full_stay_so_and_cost_no_other_series_anything() {
    let (server, tool) = prepared().await;
    let history = tool.record(HistorySettings::new()).expect("recording");
    let users = ["full", "fuller", "other"].map(str::to_owned);
    record(&history, users.clone()).await;
    history.finish().await.expect("written");
    server
        .run(&format!(
            "UPDATE tollgate.rate_limit_metrics SET allowed = {MOST}, throttled = {MOST}, blocked = {MOST},
                cache_hits = {MOST}, cache_misses = {MOST}, latency = ROW('{{1, 2, 3}}', '{{{MOST}, {MOST}, {MOST}}}')
            WHERE user_id LIKE 'full%'; UPDATE tollgate.writers SET requests = {MOST}"
        ))
        .await;
    // Enough for a histogram to be compacted.
    for _ in 0..70 {
        record(&history, users.clone()).await;
    }
    history.finish().await.expect("written");
    assert_eq!(history.status().lost, 0);
    let of = |user: &str, width: &str| {
        format!("SELECT sum(allowed) FROM tollgate.rate_limit_metrics WHERE user_id = '{user}' AND width = '{width}'")
    };
    assert_eq!(one(&server, &of("other", "day")).await, "71");
    assert!(one(&server, &of("full", "day")).await.starts_with("9223372036854775"));
    assert_eq!(one(&server, "SELECT requests FROM tollgate.writers").await, MOST.to_string());
    let (from, to) = around();
    for query in [StatsQuery::new(Width::Minute, from, to), StatsQuery::new(Width::Minute, from, to).by_user()] {
        let stats = tool.stats(&query).await.expect("an answer");
        assert!(stats.iter().any(|row| row.allowed == MOST && row.throttled == MOST), "{stats:?}");
    }
    let stats = tool.stats(&StatsQuery::new(Width::Minute, from, to).by_user()).await.expect("an answer");
    let other: u64 = stats.iter().filter(|row| row.name.as_deref() == Some("other")).map(|row| row.allowed).sum();
    assert_eq!(other, 71);
    let compacted = "SELECT tollgate.summed(ROW('{1, 1, 1}'::smallint[], array_fill(9223372036854775807, ARRAY[3])))";
    assert_eq!(one(&server, compacted).await, format!("({{1}},{{{MOST}}})"));
}

/// The database refuses one user's rows; those of a thousand others are written.
#[test]
fn a_row_of_history_that_is_refused_is_named_and_the_others_are_written() {
    let test = "one_bad_row::a_row_of_history_that_is_refused_is_named_and_the_others_are_written";
    if let Some(text) = alone(test, &[]) {
        for name in [
            "the decision of user \"bad\\\"row\" at 20",
            "the minute at 20",
            "Z of user \"bad\\\"row\" and endpoint \"/\"; the hour at 20",
        ] {
            let named = |line: &str| {
                line.contains("a part of the history cannot be written: it is lost")
                    && line.contains("(SQLSTATE 23514): all rows were stored except ")
                    && line.contains(name)
            };
            assert_eq!(text.lines().filter(|line| named(line)).count(), 1, "{name}: {text}");
        }
        return;
    }
    tracing_subscriber::fmt().with_ansi(false).init();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let (server, tool) = prepared().await;
        server
            .run(
                "ALTER TABLE tollgate.rate_limit_audit_logs ADD CHECK (user_id <> 'bad\"row');
                ALTER TABLE tollgate.rate_limit_metrics ADD CHECK (user_id <> 'bad\"row')",
            )
            .await;
        let history = tool.record(HistorySettings::new()).expect("recording");
        record(&history, (0..900).map(|user| if user == 444 { "bad\"row".to_owned() } else { user.to_string() })).await;
        wait_until("all else is written", async || history.finish().await.is_ok()).await;
        let rows = one(&server, "SELECT count(*) FROM tollgate.rate_limit_audit_logs").await;
        let counts = one(&server, "SELECT sum(allowed) FROM tollgate.rate_limit_metrics WHERE width = 'minute'").await;
        assert_eq!((rows.as_str(), counts.as_str(), history.status().lost), ("899", "899", 2), "a row, and its count");
        wait_until("the loss is reported", async || {
            history.finish().await.is_ok()
                && one(&server, "SELECT requests || ' ' || lost FROM tollgate.writers").await == "899 2"
        })
        .await;
    });
}

/// A name that the table can't have is no batch's end.
#[tokio::test]
async fn a_total_that_is_refused_is_named_and_the_others_are_added() {
    let (server, tool) = prepared().await;
    let (_, key) = tool.create_key("42", &KeyTerms::default(), "").await.expect("made");
    let service = tool.follow(&limiter()).await.expect("a configuration");
    let hostile = Account::new("41").api_key("a\0b");
    service.count(&Attributes::new().account(&hostile), true);
    service.finish().await.expect("written");
    server
        .run(&format!(
            "ALTER TABLE tollgate.user_quotas ADD CHECK (user_id <> 'refused');
            ALTER TABLE tollgate.api_keys ADD CHECK (key_id <> '{}' OR total < 1)",
            key.id
        ))
        .await;
    for user in 0..500 {
        service.count(&Attributes::new().user(&user.to_string()), user % 2 == 0);
    }
    service.count(&Attributes::new().user("refused"), true);
    service.count(&Attributes::new().user("refused"), false);
    service.count(&Attributes::new().account(&Account::new("43").api_key(&key.id)), true);
    // Another task may have written it meanwhile.
    if let Err(error) = service.finish().await {
        let error = error.to_string();
        assert!(error.contains("all rows were stored except user \"refused\"; key \""), "{error}");
    }
    service.finish().await.expect("written");
    assert_eq!((service.status().totals_lost, service.status().totals_lag), (2, Duration::ZERO));
    let sums = "SELECT sum(total_today) || ' ' || sum(times_exceeded) FROM tollgate.user_quotas";
    assert_eq!(one(&server, sums).await, "252 250");
    wait_until("the loss is reported", async || {
        service.finish().await.is_ok()
            && one(&server, "SELECT requests || ' ' || lost FROM tollgate.writers").await == "502 2"
    })
    .await;
}

/// By a trigger of the owner's that raises an exception, and by a constraint that is checked at the commit.
#[tokio::test]
async fn a_row_that_a_trigger_or_a_commit_refuses_holds_up_no_other() {
    let (server, tool) = prepared().await;
    let service = tool.follow(&limiter()).await.expect("a configuration");
    let history = tool.record(HistorySettings::new()).expect("recording");
    server
        .run(
            "CREATE TABLE customers (id text PRIMARY KEY); INSERT INTO customers SELECT generate_series(0, 99);
            INSERT INTO customers VALUES ('raises');
            ALTER TABLE tollgate.user_quotas ADD FOREIGN KEY (user_id) REFERENCES customers DEFERRABLE INITIALLY DEFERRED;
            CREATE FUNCTION raises() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                IF NEW.user_id = 'raises' THEN RAISE EXCEPTION 'not this one'; END IF; RETURN NEW; END $$;
            CREATE TRIGGER raises BEFORE INSERT ON tollgate.user_quotas FOR EACH ROW EXECUTE FUNCTION raises();
            CREATE TRIGGER raises BEFORE INSERT ON tollgate.rate_limit_audit_logs FOR EACH ROW EXECUTE FUNCTION raises()",
        )
        .await;
    let users = (0..100).map(|user| user.to_string()).chain(["raises", "unknown"].map(str::to_owned));
    for user in users.clone() {
        service.count(&Attributes::new().user(&user), true);
    }
    record(&history, users).await;
    wait_until("the others are written", async || {
        let _ = (service.finish().await, history.finish().await);
        service.status().totals_lag.is_zero() && history.status().queued == 0 && history.status().lag.is_zero()
    })
    .await;
    assert_eq!((service.status().totals_lost, history.status().lost), (2, 1));
    assert_eq!(one(&server, "SELECT count(*) FROM tollgate.user_quotas").await, "100");
    assert_eq!(one(&server, "SELECT count(*) FROM tollgate.rate_limit_audit_logs").await, "101");
}

/// If every row is refused, they are not looked at one by one.
#[tokio::test]
async fn a_batch_of_which_all_is_refused_is_given_up() {
    let (server, tool) = prepared().await;
    let service = tool.follow(&limiter()).await.expect("a configuration");
    server.run("ALTER TABLE tollgate.user_quotas ADD CHECK (user_id = 'other') NOT VALID").await;
    for user in 0..2_000 {
        service.count(&Attributes::new().user(&user.to_string()), true);
    }
    service.count(&Attributes::new().user("other"), true);
    wait_until("it is given up", async || service.finish().await.is_ok() && service.status().totals_lag.is_zero())
        .await;
    let lost = service.status().totals_lost;
    let stored: u64 = one(&server, "SELECT count(*) FROM tollgate.user_quotas").await.parse().expect("a number");
    assert!(lost >= 2_000 && lost + stored == 2_001, "{lost} {stored}");
}
