//! Services that write what users have used, as the tool shows them.

use tollgate::rules::Attributes;
use tollgate_testing::record::{database, limiter, prepared};

use crate::support::tool::{stdout, tollgate};

#[tokio::test]
async fn the_tool_shows_which_services_were_killed_and_what_was_lost() {
    let (server, _) = prepared().await;
    let service = database(&server).follow(&limiter()).await.expect("a configuration");
    service.count(&Attributes::new().user("42"), true);
    service.finish().await.expect("written");
    // Others, which no longer report, and one that has lost some.
    server
        .run(
            "INSERT INTO tollgate.writers (writer, writes, requests, lost, written_at, ended_at) VALUES
                ('gone', 'totals', 17, 0, now() - interval '1 minute', NULL),
                ('left', 'history', 9, 0, now() - interval '1 minute', NULL),
                ('full', 'history', 1000, 1300, now(), now())",
        )
        .await;
    service.count(&Attributes::new().user("42"), true);
    service.finish().await.expect("written");
    let status = stdout(&tollgate(&["db", "status", "--database", &server.url()]));
    for expected in [
        "gone from 127.0.0.1: totals of 17 requests; killed: what it had not yet written",
        "left from 127.0.0.1: history of 9 requests; killed: what it had not yet written",
        "full from 127.0.0.1: history of 1000 requests, 1300 lost; ended ",
        ": totals of 2 requests; ended ",
    ] {
        assert!(status.contains(expected), "{expected}: {status}");
    }
    // A service's role names itself as it likes.
    server.run("INSERT INTO tollgate.writers (writer, writes) VALUES (E'w\\n  all is well\\x1b[2J', 'totals')").await;
    let status = stdout(&tollgate(&["db", "status", "--database", &server.url()]));
    assert!(status.contains("  w\\n  all is well\\u{1b}[2J from "), "{status}");
}
