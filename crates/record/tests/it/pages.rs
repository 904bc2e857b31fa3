//! Sentences of the pages on operations, tried on a server.

use std::time::{Duration, SystemTime};

use tokio_postgres::{Client, NoTls};
use tollgate::rules::{Attributes, RuleSet};
use tollgate_record::Postgres;
use tollgate_record::history::{AuditQuery, HistorySettings};
use tollgate_testing::polling::{PATIENCE, wait_until};
use tollgate_testing::postgres_server::PostgresServer;
use tollgate_testing::record::{limiter, prepared};
use tollgate_testing::repository::read;

use crate::grants::grant_service;

async fn connected(server: &PostgresServer) -> Client {
    let (client, connection) = tokio_postgres::connect(&server.url(), NoTls).await.expect("connected");
    tokio::spawn(connection);
    client
}

/// "A missing right, a lock or a full disk loses nothing while there is room."
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_missing_right_and_a_full_disk_lose_nothing() {
    let (server, _tool) = prepared().await;
    grant_service(&server).await;
    let full_disk = "CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN RAISE EXCEPTION 'no space left on device' USING ERRCODE = 'disk_full'; END $$;
        CREATE TRIGGER full_disk BEFORE INSERT OR UPDATE ON tollgate.rate_limit_audit_logs
            FOR EACH ROW EXECUTE FUNCTION full_disk();
        CREATE TRIGGER full_disk BEFORE INSERT OR UPDATE ON tollgate.user_quotas
            FOR EACH ROW EXECUTE FUNCTION full_disk()";
    let verdict = limiter().acquire_by(&RuleSet::default(), &Attributes::new()).await.expect("a verdict");
    let mut recorded = 0;
    for (make, state, undo) in [
        (
            "REVOKE INSERT ON tollgate.rate_limit_audit_logs, tollgate.user_quotas FROM service;
            REVOKE INSERT (user_id) ON tollgate.user_quotas FROM service",
            "42501",
            "GRANT INSERT ON tollgate.rate_limit_audit_logs TO service;
            GRANT INSERT (user_id, today, total_today, this_month, total_this_month, times_exceeded, last_request_at)
                ON tollgate.user_quotas TO service",
        ),
        (
            full_disk,
            "53100",
            "DROP TRIGGER full_disk ON tollgate.rate_limit_audit_logs; DROP TRIGGER full_disk ON tollgate.user_quotas",
        ),
    ] {
        let service = Postgres::open(&server.url_of("service", "postgres")).expect("an address");
        let configuration = service.follow(&limiter()).await.expect("a configuration");
        let history = service.record(HistorySettings::new()).expect("settings");
        server.run(make).await;
        for _ in 0..100 {
            let request = Attributes::new().user("42").path("/");
            configuration.count(&request, true);
            history.record(&request, &verdict, Duration::ZERO);
        }
        recorded += 100;
        for _ in 0..3 {
            let ends = [configuration.finish().await, history.finish().await];
            for (error, of) in ends.map(|end| end.expect_err(state).to_string()).iter().zip(["totals", "history"]) {
                assert!(error.contains(&format!("SQLSTATE {state}")), "{of} {state}: {error}");
            }
        }
        server.run(undo).await;
        wait_until("it is written", async || configuration.finish().await.is_ok() && history.finish().await.is_ok())
            .await;
        assert_eq!((configuration.status().totals_lost, history.status().lost), (0, 0), "{state}");
        let written = "SELECT concat_ws(' ', count(*), (SELECT total_today FROM tollgate.user_quotas))
            FROM tollgate.rate_limit_audit_logs";
        assert_eq!(server.run(written).await, [format!("{recorded} {recorded}")], "{state}");
    }
}

/// The right to read the log isn't that to read a month's table by its own name.
#[tokio::test]
async fn a_month_that_is_counted_needs_a_right_of_its_own() {
    let (server, _tool) = prepared().await;
    let march = "CREATE TABLE tollgate.rate_limit_audit_logs_2020_03 PARTITION OF tollgate.rate_limit_audit_logs
        FOR VALUES FROM ('2020-03-01 00:00+00') TO ('2020-04-01 00:00+00')";
    server.run(march).await;
    server
        .run(
            "CREATE ROLE reader LOGIN; GRANT USAGE ON SCHEMA tollgate TO reader;
            GRANT SELECT ON tollgate.rate_limit_audit_logs, tollgate.rate_limit_metrics TO reader",
        )
        .await;
    let reader = Postgres::open(&server.url_of("reader", "postgres")).expect("an address");
    let query = AuditQuery::new("42", SystemTime::UNIX_EPOCH, SystemTime::now());
    assert_eq!(reader.audit(&query).await.expect("the log may be read"), []);
    let months = async || reader.archivable(Duration::from_secs(90 * 86_400)).await;
    let error = months().await.expect_err("not by its own name").to_string();
    assert!(error.contains("rate_limit_audit_logs_2020_03") && error.contains("42501"), "{error}");
    let page = read("crates/record/src/operations.md");
    let grant = "ALTER DEFAULT PRIVILEGES FOR ROLE limits IN SCHEMA tollgate GRANT SELECT ON TABLES TO reader";
    assert!(page.contains(grant), "the page has another statement now");
    server.run(&grant.replace("limits", "tollgate")).await;
    server.run("DROP TABLE tollgate.rate_limit_audit_logs_2020_03").await;
    server.run(march).await;
    assert_eq!(months().await.expect("of one made later, they may").len(), 1);
}

/// The page's statements wait for a reader, and nobody waits for them; a plain DROP holds up whoever comes after it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn counts_are_dropped_as_the_page_says_while_somebody_reads() {
    let (server, _tool) = prepared().await;
    let page = read("crates/record/src/operations.md");
    let (_, statements) =
        page.split_once("```sql\nALTER TABLE tollgate.rate_limit_metrics_minute").expect("the page's");
    let statements = format!("ALTER TABLE tollgate.rate_limit_metrics_minute{statements}");
    let (statements, _) = statements.split_once("```").expect("an end");
    let month = server.run("SELECT to_char(now() AT TIME ZONE 'UTC', 'YYYY_MM')").await.remove(0);
    let statements: Vec<_> = statements.split(';').map(|one| one.replace("2026_07", &month)).collect();
    let counts = "SELECT count(*) FROM tollgate.rate_limit_metrics WHERE width = 'minute'";
    let reader = connected(&server).await;
    reader.batch_execute(&format!("BEGIN; {counts}")).await.expect("read");
    let drop = connected(&server).await;
    drop.batch_execute("SET lock_timeout = '100ms'").await.expect("set");
    let plain = drop.batch_execute(&format!("DROP TABLE tollgate.rate_limit_metrics_minute_{month}")).await;
    assert_eq!(plain.expect_err("it waits").code().map(|code| code.code().to_owned()).as_deref(), Some("55P03"));
    let detacher = connected(&server).await;
    let detach = statements[0].clone();
    let detached = tokio::spawn(async move { detacher.batch_execute(&detach).await });
    wait_until("it waits for the reader", async || {
        let waiting = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%DETACH%'";
        !server.run(waiting).await.is_empty()
    })
    .await;
    let another = connected(&server).await;
    another.batch_execute(&format!("SET lock_timeout = '1s'; {counts}")).await.expect("nobody waits");
    assert!(!detached.is_finished());
    reader.batch_execute("COMMIT").await.expect("committed");
    tokio::time::timeout(PATIENCE, detached).await.expect("an end").expect("no panic").expect("detached");
    for statement in &statements[1..] {
        server.run(statement).await;
    }
    let left = format!("SELECT 1 FROM pg_class WHERE relname = 'rate_limit_metrics_minute_{month}'");
    assert_eq!(server.run(&left).await, Vec::<String>::new());
}
