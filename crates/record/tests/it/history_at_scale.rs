//! 10,000 requests through the layer, and a million in the nightly run, on a real Redis, each of which is found again,
//! in PostgreSQL and in the archive: by count and by sum.

use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use http::header::HeaderName;
use http::{Request, Response};
use tokio::sync::Notify;
use tollgate::middleware::RateLimitLayer;
use tollgate::rules::RuleSet;
use tollgate_record::Postgres as Database;
use tollgate_record::archive::{Archive, ArchiveOptions, Step};
use tollgate_record::history::HistorySettings;
use tollgate_testing::effort::times;
use tollgate_testing::polling::wait_until;
use tollgate_testing::python::python;
use tollgate_testing::record::{database, prepared};
use tollgate_testing::redis_server::{Server, patient};
use tower::{Layer, ServiceExt, service_fn};

const REQUESTS: u64 = 1_000;
const LIMIT: u64 = 600;
/// As many as there are users, at most.
const CALLERS: u64 = 10;

/// Of each user's requests, 600 are allowed; what is used grows from 1 to 600 and stays.
const RULES: &str = r#"
    [[rule]]
    name = "yearly"
    match = { path = "/api/*" }
    key = "user"
    limits = ["fixed-window 600/year"]
"#;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_decision_is_found_again() {
    let users = if times() == 1 { 10 } else { 1_000 };
    let redis = Server::start();
    let (mut server, tool) = prepared().await;
    // So that nothing is lost while PostgreSQL is unreachable.
    let settings = HistorySettings::new().queue(1_500_000).region("eu");
    let history = database(&server).record(settings).expect("recording");
    let rules: RuleSet = RULES.parse().expect("rules");
    let limiter = patient(&redis.url());
    // Each request must be decided, however busy the machine is.
    let limiter = limiter.to_builder().deadline(Duration::from_secs(60)).build();
    let layer = RateLimitLayer::new(limiter, rules).header("user", HeaderName::from_static("user"));
    let answer = service_fn(|_: Request<String>| async { Ok::<_, String>(Response::new(String::new())) });
    let service = layer.record(history.clone()).layer(answer);
    let denied = Arc::new(AtomicU64::new(0));
    let callers: Vec<_> = (0..CALLERS)
        .map(|caller| {
            let (service, denied) = (service.clone(), Arc::clone(&denied));
            tokio::spawn(async move {
                for number in 0..users * REQUESTS / CALLERS {
                    let user = caller * (users / CALLERS) + number % (users / CALLERS);
                    let request = Request::builder().uri("/api/items").header("user", user.to_string());
                    let answer = service.clone().oneshot(request.body(String::new()).expect("a request")).await;
                    denied.fetch_add(u64::from(answer.expect("an answer").status() == 429), Ordering::Relaxed);
                }
            })
        })
        .collect();
    // Ten minutes at most, on a machine that is busy.
    for _ in 0..6_000 {
        if history.status().recorded > users * REQUESTS / 2 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!(history.status().recorded > users * REQUESTS / 2);
    server.stop();
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    assert!(history.status().lag > Duration::from_secs(1));
    server.start_again();
    for caller in callers {
        caller.await.expect("all of its requests");
    }
    wait_until("all is written", async || history.finish().await.is_ok()).await;

    assert_eq!(denied.load(Ordering::Relaxed), users * (REQUESTS - LIMIT));
    assert_eq!((history.status().recorded, history.status().lost), (users * REQUESTS, 0));
    let sums = "count(*), count(DISTINCT user_id), count(*) FILTER (WHERE decision = 'throttled' AND status = 429),
        count(*) FILTER (WHERE decision = 'allowed' AND status = 200), sum(used), sum(capacity), sum(user_id::int8)";
    let sums = format!("SELECT concat_ws(' ', {sums}) FROM tollgate.rate_limit_audit_logs");
    let used = LIMIT * (LIMIT + 1) / 2 + (REQUESTS - LIMIT) * LIMIT;
    let expected = [
        users * REQUESTS,
        users,
        users * (REQUESTS - LIMIT),
        users * LIMIT,
        users * used,
        users * REQUESTS * LIMIT,
        REQUESTS * users * (users - 1) / 2,
    ];
    assert_eq!(server.run(&sums).await, [expected.map(|number| number.to_string()).join(" ")]);
    let counted =
        "SELECT concat_ws(' ', sum(allowed), sum(throttled), sum(cache_misses)) FROM tollgate.rate_limit_metrics
        WHERE width = 'minute'";
    let counted = server.run(counted).await;
    assert_eq!(counted, [format!("{} {} {}", users * LIMIT, users * (REQUESTS - LIMIT), users * REQUESTS)]);

    // As if that had been in March 2020: moved to an archive by archivers that end at each step.
    server.run(GROWN_OLD).await;
    assert_eq!(server.run(&sums).await, [expected.map(|number| number.to_string()).join(" ")]);
    let directory = tempfile::tempdir().expect("a temporary directory");
    let archive = Archive::open(&format!("file://{}", directory.path().display())).expect("an address");
    for step in [Step::Export, Step::ReadBack, Step::Detach, Step::Drop] {
        until_step(&tool, &archive, step).await;
    }
    let archived = tool.archive(&archive, &ArchiveOptions::default(), |_| ()).await.expect("archived");
    let march = archived.into_iter().next().and_then(|archived| archived.result.ok()).expect("a month");
    assert_eq!(march.rows, users * REQUESTS);
    assert_eq!(server.run("SELECT count(*) FROM tollgate.rate_limit_audit_logs").await, ["0"]);
    assert_eq!(server.run("SELECT to_regclass('tollgate.rate_limit_audit_logs_2020_03') IS NULL").await, ["t"]);
    // DuckDB has the same words for it.
    let select = sums.replace("user_id::int8", "CAST(user_id AS BIGINT)").replace(
        "tollgate.rate_limit_audit_logs",
        &format!("read_parquet('{}/audit/*/*/*.parquet')", directory.path().display()),
    );
    let script = "import duckdb, sys; print(duckdb.sql(sys.argv[1]).fetchall()[0][0])";
    let read = Command::new(python()).args(["-c", script, &select]).output().expect("Python");
    assert!(read.status.success(), "{}", String::from_utf8_lossy(&read.stderr));
    let read = String::from_utf8_lossy(&read.stdout).trim().to_owned();
    assert_eq!(read, expected.map(|number| number.to_string()).join(" "));
}

/// Drops an archiver as soon as it is this far, and its connection with it.
async fn until_step(tool: &Database, archive: &Archive, step: Step) {
    let (mut is_there, reached) = (None, Notify::new());
    let options = ArchiveOptions::default();
    let archiving = tool.archive(archive, &options, |progress| {
        // Half of it, where it is counted.
        if progress.step == step && (progress.rows >= progress.of / 2 || step == Step::Detach) {
            reached.notify_one();
        }
    });
    tokio::select! {
        () = reached.notified() => is_there = Some(()),
        _ = archiving => {}
    }
    assert!(is_there.is_some(), "{step:?}");
}

/// To a partition of a month that is long over, each row as long after the first as it was.
const GROWN_OLD: &str = "
    CREATE TABLE tollgate.rate_limit_audit_logs_2020_03 PARTITION OF tollgate.rate_limit_audit_logs
        FOR VALUES FROM ('2020-03-01Z') TO ('2020-04-01Z');
    UPDATE tollgate.rate_limit_audit_logs
        SET at = '2020-03-01Z'::timestamptz + (at - (SELECT min(at) FROM tollgate.rate_limit_audit_logs))";
