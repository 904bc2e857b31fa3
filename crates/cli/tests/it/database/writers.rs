//! The services that `db status` shows.

use tollgate_testing::record::prepared;

use crate::support::tool::{code, stdout, tollgate};

/// More than are shown, and the older the more important.
#[tokio::test]
async fn services_that_lost_something_or_run_are_shown_first_and_the_rest_is_counted() {
    let (server, _) = prepared().await;
    let writers = async |name: &str, count: u32, age: &str, columns: &str, values: &str| {
        let insert = format!(
            "INSERT INTO tollgate.writers (writer, writes, started_at, written_at, {columns})
            SELECT '{name}-' || n, 'history', now() - interval '{age}', now(), {values}
            FROM generate_series(1, {count}) AS n"
        );
        server.run(&insert).await;
    };
    let status = || {
        let status = tollgate(&["db", "status", "--database", &server.url()]);
        assert_eq!(code(&status), 0, "{status:?}");
        stdout(&status)
    };
    let shown = |status: &str, name: &str| status.lines().filter(|line| line.contains(name)).count();
    writers("ended", 90, "1 hour", "ended_at", "now()").await;
    writers("runs", 5, "30 days", "ended_at", "NULL").await;
    assert!(shown(&status(), "ended-") == 90 && !status().contains(" more, "), "{}", status());
    writers("ended-later", 60, "1 minute", "ended_at", "now()").await;
    writers("lost", 3, "60 days", "ended_at, lost", "now(), 7").await;
    writers("runs-and-lost", 1, "80 days", "lost", "17").await;
    let status_now = status();
    let first = status_now.lines().find(|line| line.contains(" from ")).expect("a service");
    assert!(first.contains("runs-and-lost-1 ") && first.contains(", 17 lost; running; last heard from "), "{first}");
    assert_eq!((shown(&status_now, "lost-"), shown(&status_now, " runs-")), (4, 6), "{status_now}");
    let last = status_now.lines().last().expect("lines");
    assert_eq!(last, "  and 59 more, of which 0 run and 0 have lost something: SELECT * FROM tollgate.writers");
    writers("many", 120, "1 minute", "lost", "1").await;
    let last = status().lines().last().expect("lines").to_owned();
    assert_eq!(last, "  and 179 more, of which 26 run and 24 have lost something: SELECT * FROM tollgate.writers");
}
