//! The tool and the system of record.

mod api_keys;
#[cfg(feature = "archive")]
mod archive;
#[cfg(target_os = "linux")]
mod clocks;
#[cfg(feature = "tls")]
mod encrypted_connections;
mod history;
mod passwords;
mod printed_keys;
mod report;
mod rules;
mod silent_server;
mod usage_totals;
mod users;
mod writers;

use tollgate_testing::postgres_server::PostgresServer;
use tollgate_testing::record::prepared;

use crate::support::tool::{code, stderr, stdout, tollgate};

#[tokio::test]
async fn the_tool_makes_the_tables_and_shows_them() {
    let server = PostgresServer::start();
    let url = server.url();
    let run = |command: &str| tollgate(&["db", command, "--database", &url]);
    let status = run("status");
    assert_eq!(code(&status), 1);
    let (first, rest) =
        stdout(&status).split_once('\n').map(|(first, rest)| (first.to_owned(), rest.to_owned())).expect("lines");
    assert!(first.starts_with(&format!("127.0.0.1:{}/postgres: PostgreSQL 1", server.port())), "{first}");
    assert_eq!(rest, "   1 configuration    pending\n   2 history          pending\n");
    let made = run("migrate");
    assert!(code(&made) == 0 && stdout(&made).starts_with("   1 configuration    applied 20"), "{made:?}");
    assert_eq!(stdout(&run("migrate")), "nothing to do: the database has all migrations\n");
    let status = run("status");
    assert!(code(&status) == 0 && stdout(&status).contains("   1 configuration    applied 20"), "{status:?}");
    let none = tollgate(&["db", "status"]);
    assert!(code(&none) == 2 && stderr(&none).contains("--database <URL>"), "{none:?}");
    assert!(!format!("{:?}{:?}", run("status"), run("migrate")).contains("sesame"));
}

/// Of two hosts, the first isn't there.
#[tokio::test]
async fn of_several_hosts_the_one_that_answers_is_named() {
    let (server, _) = prepared().await;
    let port = server.port();
    let hosts = format!("127.0.0.1:1,127.0.0.1:{port}");
    let status = tollgate(&["db", "status", "--database", &format!("postgres://tollgate@{hosts}/postgres")]);
    let expected = format!("{hosts}/postgres, connected to 127.0.0.1:{port}: PostgreSQL 1");
    assert!(code(&status) == 0 && stdout(&status).starts_with(&expected), "{status:?}");
    let neither = tollgate(&["db", "status", "--database", "postgres://tollgate@127.0.0.1:1,127.0.0.1:2/postgres"]);
    let expected = "error: postgres at 127.0.0.1:1,127.0.0.1:2/postgres: ";
    assert!(code(&neither) == 2 && stderr(&neither).starts_with(expected), "{neither:?}");
}

#[tokio::test]
async fn nothing_is_changed_in_tables_that_are_newer_or_older() {
    let (server, _) = prepared().await;
    for (sql, expected) in [
        (
            "INSERT INTO tollgate.migrations VALUES (3, 'future', 'x')",
            "schema: the database has migration 3 (future), and this version of tollgate knows 2: upgrade tollgate",
        ),
        (
            "DELETE FROM tollgate.migrations WHERE number > 1",
            "schema: the database has 1 of 2 migrations: run tollgate db migrate",
        ),
    ] {
        server.run(sql).await;
        let set = tollgate(&["users", "set", "42", "--tier", "paid", "--database", &server.url()]);
        assert_eq!((code(&set), stderr(&set)), (2, format!("error: {expected}\n")));
    }
}
