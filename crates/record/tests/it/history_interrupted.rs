//! History that is interrupted: futures that are dropped, runtimes that end, a database that is locked or altered
//! meanwhile.

use std::time::{Duration, Instant};

use tollgate::rules::{Attributes, RuleSet, Verdict};
use tollgate_record::history::{History, HistorySettings};
use tollgate_testing::polling::wait_until;
use tollgate_testing::postgres_server::PostgresServer;
use tollgate_testing::record::{database, limiter, prepared};

async fn verdict() -> Verdict {
    limiter().acquire_by(&RuleSet::default(), &Attributes::new()).await.expect("a verdict")
}

/// Each decision has a number, as its latency.
fn record(history: &History, verdict: &Verdict, numbers: std::ops::Range<u64>) {
    for number in numbers {
        let user = (number % 50).to_string();
        history.record(&Attributes::new().user(&user).path("/"), verdict, Duration::from_micros(number));
    }
}

/// Each is there once, as a row and in the counts.
async fn assert_exact(server: &PostgresServer, decisions: u64) {
    let counted = |width: &str| {
        format!("(SELECT sum(allowed + throttled + blocked) FROM tollgate.rate_limit_metrics WHERE width = '{width}')")
    };
    let select = format!(
        "SELECT concat_ws(' ', (SELECT count(*) FROM tollgate.rate_limit_audit_logs),
            (SELECT count(DISTINCT latency_us) FROM tollgate.rate_limit_audit_logs), {}, {},
            (SELECT sum(requests) FROM tollgate.writers), (SELECT sum(lost) FROM tollgate.writers))",
        counted("minute"),
        counted("day")
    );
    let rows_and_counts = [decisions; 5].map(|count| count.to_string()).join(" ");
    assert_eq!(server.run(&select).await, [format!("{rows_and_counts} 0")]);
}

/// Futures that are dropped while a batch is filled, sent, committed, or after that.
#[tokio::test]
async fn finishing_dropped_at_any_moment_loses_and_duplicates_nothing() {
    let (server, tool) = prepared().await;
    // Room for all: a slow machine writes little before it is dropped.
    let history = tool.record(HistorySettings::new().queue(200_000)).expect("recording");
    let verdict = verdict().await;
    let mut dropped = 0;
    let mut recorded = 0;
    for round in 0..300_u64 {
        let many = if round % 10 == 0 { 4_000 } else { 1 };
        record(&history, &verdict, recorded..recorded + many);
        recorded += many;
        let within = Duration::from_micros(500 + round * 7919 % 21_000);
        dropped += u32::from(tokio::time::timeout(within, history.finish()).await.is_err());
    }
    assert!(dropped > 20, "{dropped}");
    history.finish().await.expect("written");
    assert_exact(&server, recorded).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn finishing_twice_at_once_while_others_record_is_exact() {
    let (server, tool) = prepared().await;
    let history = tool.record(HistorySettings::new()).expect("recording");
    let verdict = verdict().await;
    let finish = |history: History| async move {
        for _ in 0..20 {
            history.finish().await.expect("written");
        }
    };
    let finishing: Vec<_> = (0..2).map(|_| tokio::spawn(finish(history.clone()))).collect();
    for number in 0..60 {
        record(&history, &verdict, number * 500..(number + 1) * 500);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    for finishing in finishing {
        finishing.await.expect("finished");
    }
    history.finish().await.expect("written");
    assert_exact(&server, 30_000).await;
}

/// A batch that was on its way as PostgreSQL went away has no counts: they follow.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn finishing_writes_the_batch_in_flight_and_its_counts() {
    let (mut server, tool) = prepared().await;
    drop(tool);
    let history = database(&server).record(HistorySettings::new()).expect("recording");
    let verdict = verdict().await;
    record(&history, &verdict, 0..1);
    history.finish().await.expect("written");
    for round in 0..2 {
        server.stop();
        record(&history, &verdict, 1 + round * 100..101 + round * 100);
        tokio::time::sleep(Duration::from_millis(1_500)).await;
        server.start_again();
        wait_until("it is written", async || history.finish().await.is_ok()).await;
        assert_exact(&server, 101 + round * 100).await;
    }
}

/// A batch that was on its way, and what followed it, of more users than are counted at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn finishing_writes_the_counts_of_however_many_users() {
    let (mut server, tool) = prepared().await;
    drop(tool);
    let history = database(&server).record(HistorySettings::new()).expect("recording");
    let verdict = verdict().await;
    let record = |numbers: std::ops::Range<u64>| {
        for number in numbers {
            let user = number.to_string();
            history.record(&Attributes::new().user(&user).path("/"), &verdict, Duration::from_micros(number));
        }
    };
    record(0..1);
    history.finish().await.expect("written");
    server.stop();
    record(1..601);
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    record(601..1501);
    assert!(history.finish().await.is_err());
    server.start_again();
    wait_until("it is written", async || history.finish().await.is_ok()).await;
    assert_exact(&server, 1501).await;
}

/// Runtimes that end while their writer writes; what is left is written from another.
#[test]
fn runtimes_may_end_at_any_moment() {
    let keeper = tokio::runtime::Runtime::new().expect("a runtime");
    let (server, _tool) = keeper.block_on(prepared());
    let verdict = keeper.block_on(verdict());
    let mut recorded = 0;
    for round in 0..12_u64 {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let history = runtime.block_on(async {
            let history = database(&server).record(HistorySettings::new()).expect("recording");
            tokio::time::sleep(Duration::from_millis(60)).await;
            record(&history, &verdict, recorded..recorded + 20_000);
            tokio::time::sleep(Duration::from_millis(3 + round * 31)).await;
            history
        });
        recorded += 20_000;
        drop(runtime);
        keeper.block_on(wait_until("it is written", async || history.finish().await.is_ok()));
        drop(history);
    }
    keeper.block_on(assert_exact(&server, recorded));
}

/// However a session shows times, and however many make them at once, partitions are months of UTC.
#[tokio::test]
async fn partitions_are_months_of_utc_and_made_once() {
    let (server, tool) = prepared().await;
    let bounds = "SELECT string_agg(pg_get_expr(relpartbound, oid), ' ' ORDER BY relname) FROM pg_class
        WHERE relispartition AND relname ~ '_20[0-9]{2}_[0-9]{2}$'";
    let expected = server.run(bounds).await;
    drop(tool);
    for (style, zone) in [("German", "Asia/Kolkata"), ("SQL", "Asia/Shanghai"), ("Postgres", "America/St_Johns")] {
        let drop_all = "SELECT string_agg(format('DROP TABLE tollgate.%I', relname), ';') FROM pg_class
            WHERE relispartition AND relname ~ '_20[0-9]{2}_[0-9]{2}$'";
        let drop_all = server.run(drop_all).await.remove(0);
        server.run(&drop_all).await;
        let set = format!(
            "ALTER DATABASE postgres SET datestyle = '{style}'; ALTER DATABASE postgres SET timezone = '{zone}'"
        );
        server.run(&set).await;
        let making = (0..8).map(|_| server.run("SELECT tollgate.make_partitions(2)"));
        let made = futures_util::future::join_all(making).await;
        let made: u32 = made.iter().map(|made| made[0].parse::<u32>().expect("a number")).sum();
        assert_eq!(made, 16);
        server.run("ALTER DATABASE postgres RESET datestyle; ALTER DATABASE postgres RESET timezone").await;
        assert_eq!(server.run(bounds).await, expected, "{style} {zone}");
    }
}

/// Where partitions can't be made now, the existing ones are used; and other users of the database go on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_on_the_tables_does_not_stop_rows_from_being_written() {
    let (server, tool) = prepared().await;
    let last =
        server.run("SELECT max(relname::text) FROM pg_class WHERE relname ~ '^rate_limit_audit_logs_[0-9_]+$'").await;
    server.run(&format!("DROP TABLE tollgate.{}", last[0])).await;
    let (client, connection) = tokio_postgres::connect(&server.url(), tokio_postgres::NoTls).await.expect("connected");
    let connection = tokio::spawn(connection);
    client
        .batch_execute("BEGIN; LOCK TABLE tollgate.rate_limit_audit_logs IN SHARE UPDATE EXCLUSIVE MODE")
        .await
        .expect("locked");
    let history = tool.record(HistorySettings::new()).expect("recording");
    record(&history, &verdict().await, 0..100);
    let began = Instant::now();
    history.finish().await.expect("written");
    assert!(began.elapsed() < Duration::from_secs(12), "{:?}", began.elapsed());
    assert_exact(&server, 100).await;
    let waiting = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%make_partitions%' AND state = 'active' AND pid <> pg_backend_pid()";
    assert_eq!(server.run(waiting).await, ["0"]);
    drop(client);
    connection.abort();
}

/// The same without the right to make them.
#[tokio::test]
async fn without_the_right_to_make_partitions_the_existing_ones_are_used() {
    let (server, _tool) = prepared().await;
    server
        .run(
            "CREATE ROLE service LOGIN; GRANT USAGE ON SCHEMA tollgate TO service;
            GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA tollgate TO service;
            REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA tollgate FROM PUBLIC;
            GRANT EXECUTE ON FUNCTION tollgate.added, tollgate.summed TO service",
        )
        .await;
    let service = tollgate_record::Postgres::open(&server.url_of("service", "postgres")).expect("an address");
    let history = service.record(HistorySettings::new()).expect("recording");
    record(&history, &verdict().await, 0..100);
    history.finish().await.expect("written");
    assert_exact(&server, 100).await;
}

/// A partition that is gone is made again; where it can't be, what would be in it is lost, and said to be.
#[tokio::test]
async fn rows_without_a_partition_get_a_new_one_or_are_counted_as_lost() {
    let (server, tool) = prepared().await;
    let history = tool.record(HistorySettings::new()).expect("recording");
    let verdict = verdict().await;
    record(&history, &verdict, 0..100);
    history.finish().await.expect("written");
    let this_month = server.run("SELECT to_char(now() AT TIME ZONE 'UTC', 'YYYY_MM')").await.remove(0);
    let drop_both = format!(
        "DROP TABLE tollgate.rate_limit_audit_logs_{this_month}; DROP TABLE tollgate.rate_limit_metrics_minute_{this_month};"
    );
    server.run(&drop_both).await;
    record(&history, &verdict, 100..150);
    wait_until("it is made again", async || history.finish().await.is_ok()).await;
    let rows = "SELECT count(*) || ' ' || (SELECT sum(allowed) FROM tollgate.rate_limit_metrics WHERE width = 'minute')
        FROM tollgate.rate_limit_audit_logs";
    assert_eq!((server.run(rows).await, history.status().lost), (vec!["50 50".to_owned()], 0));
    server.run(&format!("{drop_both} DROP FUNCTION tollgate.make_partitions")).await;
    record(&history, &verdict, 150..170);
    wait_until("it is given up", async || history.status().lost >= 40 || history.finish().await.is_ok()).await;
    assert_eq!(history.status().lost, 40, "20 rows, and 20 decisions in the counts");
}

/// A batch counts a thousand users at most, so that these need several.
#[tokio::test]
async fn the_lag_is_the_age_of_the_oldest_decision_however_many_users_wait() {
    let (_server, tool) = prepared().await;
    let history = tool.record(HistorySettings::new()).expect("recording");
    let verdict = verdict().await;
    let began = Instant::now();
    for user in 0..5_000 {
        let user = user.to_string();
        history.record(&Attributes::new().user(&user).path("/"), &verdict, Duration::ZERO);
    }
    let recorded_within = began.elapsed();
    let mut seen = 0;
    wait_until("all is written", async || {
        let waited = began.elapsed();
        let status = history.status();
        seen += u32::from(status.queued > 0);
        assert!(status.queued == 0 || status.lag + recorded_within >= waited, "{status:?} after {waited:?}");
        status.queued == 0
    })
    .await;
    assert!(seen > 0);
}
