//! Services that write: a batch is known by its number and its mark, so that none is written twice, and none is lost to
//! what somebody else has written under a service's name.

use std::time::Duration;

use tollgate::rules::{Attributes, RuleSet};
use tollgate_record::history::{History, HistorySettings};
use tollgate_record::{Configuration, Postgres as Database};
use tollgate_testing::alone::alone;
use tollgate_testing::polling::wait_until;
use tollgate_testing::postgres_server::PostgresServer;
use tollgate_testing::record::{database, limiter, prepared};

use crate::grants::grant_service;

/// A service that counts and records.
struct Service {
    totals: Configuration,
    history: History,
}

impl Service {
    async fn start(database: &Database) -> Self {
        let totals = database.follow(&limiter()).await.expect("a configuration");
        Self { totals, history: database.record(HistorySettings::new()).expect("recording") }
    }

    /// Counts and records a decision, which isn't written yet.
    async fn decide(&self) {
        let request = Attributes::new().user("42").path("/");
        let verdict = limiter().acquire_by(&RuleSet::default(), &request).await.expect("a verdict");
        self.totals.count(&request, true);
        self.history.record(&request, &verdict, Duration::ZERO);
    }

    async fn finish(&self) {
        self.totals.finish().await.expect("written");
        self.history.finish().await.expect("written");
    }
}

/// The user's total, the rows and the counts of the history, and what the services report.
async fn stored(server: &PostgresServer) -> String {
    let select = "SELECT concat_ws(' ', (SELECT total_today FROM tollgate.user_quotas),
        (SELECT count(*) FROM tollgate.rate_limit_audit_logs),
        (SELECT sum(allowed) FROM tollgate.rate_limit_metrics WHERE width = 'minute'),
        (SELECT sum(requests) FROM tollgate.writers WHERE writes = 'totals'),
        (SELECT sum(requests) FROM tollgate.writers WHERE writes = 'history'), (SELECT sum(lost) FROM tollgate.writers))";
    server.run(select).await.remove(0)
}

/// A batch that is committed, and whose answer is lost with the connection.
#[tokio::test]
async fn a_batch_that_was_written_without_an_answer_is_written_once() {
    let (server, tool) = prepared().await;
    let service = Service::start(&tool).await;
    service.decide().await;
    service.finish().await;
    // Commits are on disk, and wait for a replica that there isn't.
    server.run("ALTER SYSTEM SET synchronous_standby_names = 'none'").await;
    server.run("SELECT pg_reload_conf()").await;
    service.decide().await;
    let lose = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'";
    let mut lost = 0;
    wait_until("both have lost an answer", async || {
        lost += server.run(lose).await.len();
        lost >= 2 && stored(&server).await.starts_with("2 2 ")
    })
    .await;
    server.run("ALTER SYSTEM RESET synchronous_standby_names").await;
    server.run("SELECT pg_reload_conf()").await;
    wait_until("it is known", async || {
        server.run(lose).await;
        service.totals.finish().await.is_ok() && service.history.finish().await.is_ok()
    })
    .await;
    service.decide().await;
    service.finish().await;
    assert_eq!(stored(&server).await, "3 3 3 3 3 0");
    assert_eq!(tool.writers().await.expect("writers").len(), 2, "each under its name");
}

/// What the grants allow a service to do with the others' rows, and what a process of the same name does.
#[tokio::test]
async fn a_number_that_a_service_has_not_written_loses_none_of_its_batches() {
    let (server, _) = prepared().await;
    grant_service(&server).await;
    let as_service = Database::open(&server.url_of("service", "postgres")).expect("an address");
    let service = Service::start(&as_service).await;
    service.decide().await;
    service.finish().await;
    let (other, connection) =
        tokio_postgres::connect(&server.url_of("service", "postgres"), tokio_postgres::NoTls).await.expect("connected");
    tokio::spawn(connection);
    let mut expected = 1;
    for harm in [
        "UPDATE tollgate.writers SET batch = batch + 1",
        "UPDATE tollgate.writers SET batch = 0",
        "UPDATE tollgate.writers SET batch = batch + 1, mark = 4711, written_at = now()",
        "UPDATE tollgate.writers SET mark = 0",
        "UPDATE tollgate.writers SET batch = 9223372036854775807",
    ] {
        other.batch_execute(harm).await.expect(harm);
        for _ in 0..2 {
            service.decide().await;
            service.finish().await;
            expected += 1;
        }
        let counts = [expected; 5].map(|count| count.to_string()).join(" ");
        assert_eq!(stored(&server).await, format!("{counts} 0"), "{harm}");
    }
    assert_eq!((service.totals.status().totals_lost, service.history.status().lost), (0, 0));
    // Under six names each, of which none is taken for one that was killed.
    let states = "SELECT writes || ' ' || count(*) || ' ' || count(*) FILTER (WHERE killed OR ended_at IS NULL)
        FROM tollgate.writers GROUP BY writes ORDER BY 1";
    assert_eq!(server.run(states).await, ["history 6 0", "totals 6 0"]);
    other.batch_execute("DELETE FROM tollgate.writers").await.expect("deleted");
    service.decide().await;
    service.finish().await;
    assert_eq!(stored(&server).await, format!("{0} {0} {0} 1 1 0", expected + 1));
}

#[test]
fn a_writer_that_is_renamed_says_so_once() {
    let test = "writers::a_writer_that_is_renamed_says_so_once";
    if let Some(text) = alone(test, &[]) {
        let lines: Vec<_> = text.lines().filter(|line| line.contains("that is not its own")).collect();
        assert!(lines.len() == 1 && lines[0].contains("WARN") && lines[0].contains("writes=\"totals\""), "{text}");
        return;
    }
    tracing_subscriber::fmt().with_ansi(false).init();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let (server, _) = prepared().await;
        let service = database(&server).follow(&limiter()).await.expect("a configuration");
        for round in 0..3 {
            service.count(&Attributes::new().user("42"), true);
            service.finish().await.expect("written");
            if round == 0 {
                server.run("UPDATE tollgate.writers SET batch = 9223372036854775807").await;
            }
        }
    });
}

/// The bounds of the tables, whatever a role may write.
#[tokio::test]
async fn what_a_service_may_write_is_within_what_can_be_read_and_added_to() {
    let (server, tool) = prepared().await;
    grant_service(&server).await;
    let service = Service::start(&tool).await;
    service.decide().await;
    service.finish().await;
    let (other, connection) =
        tokio_postgres::connect(&server.url_of("service", "postgres"), tokio_postgres::NoTls).await.expect("connected");
    tokio::spawn(connection);
    let row = |columns: &str, values: &str| {
        format!(
            "INSERT INTO tollgate.rate_limit_audit_logs (at, decision, reason, latency_us, {columns})
            VALUES (now(), 'allowed', 'allowed', 1, {values})"
        )
    };
    let updates = [
        "tollgate.writers SET batch = -1",
        "tollgate.writers SET requests = -1",
        "tollgate.writers SET lost = -1",
        "tollgate.writers SET written_at = '-infinity'",
        "tollgate.writers SET ended_at = 'infinity'",
        "tollgate.user_quotas SET total_today = -1",
        "tollgate.user_quotas SET last_request_at = '-infinity'",
        "tollgate.user_quotas SET today = 'infinity'",
        "tollgate.rate_limit_metrics SET allowed = -1",
        "tollgate.rate_limit_metrics SET latency = ROW('{{1},{2}}', '{{1},{2}}')::tollgate.histogram",
        "tollgate.rate_limit_metrics SET latency = ROW('{1}', '{1,2}')::tollgate.histogram",
        "tollgate.rate_limit_metrics SET latency = ROW('{1}', '{-1}')::tollgate.histogram",
        "tollgate.rate_limit_metrics SET latency = ROW(NULL, '{1,2}')::tollgate.histogram",
        "tollgate.rate_limit_metrics SET latency = ROW('{1,NULL}', '{1,2}')::tollgate.histogram",
        "tollgate.rate_limit_metrics SET latency = ROW('{1}', '{NULL}')::tollgate.histogram",
        "tollgate.rate_limit_metrics SET latency = ROW('{}', '{}')::tollgate.histogram",
        "tollgate.rate_limit_metrics SET latency = ROW('{2000}', '{1}')::tollgate.histogram",
        "tollgate.rate_limit_metrics SET latency = ROW(array_fill(1, ARRAY[3000]), array_fill(1, ARRAY[3000]))::tollgate.histogram",
        "tollgate.rate_limit_metrics SET endpoint = repeat('x', 513)",
    ];
    let updates = updates.iter().map(|update| format!("UPDATE {update}"));
    let rows = ["user_id", "api_key", "endpoint", "method", "rule", "limited_by", "region", "server", "rules"];
    let rows = rows.iter().map(|column| row(column, "repeat('x', 2000000)"));
    for sql in updates.chain(rows) {
        let error = other.batch_execute(&sql).await.expect_err(&sql);
        assert_eq!(error.code().expect("a state").code(), "23514", "{error:?}: {sql}");
    }
}
