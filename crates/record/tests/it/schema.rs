//! The tables of the system of record: made once, in order, and only by a role with the right to.

use tollgate::rules::RuleSet;
use tollgate_record::{KeyTerms, OwnLimits, Postgres as Database, PostgresError};
use tollgate_testing::polling::wait_until;
use tollgate_testing::postgres_server::PostgresServer;
use tollgate_testing::record::{database, limiter, prepared};

#[tokio::test]
async fn concurrent_and_repeated_migrations_make_the_tables_once() {
    let server = PostgresServer::start();
    let before = database(&server).schema().await.expect("an answer");
    assert!(!before.is_complete() && before.migrations.iter().all(|migration| migration.applied_at.is_none()));
    assert!(before.server_version.split('.').next().is_some_and(|major| major.parse::<u32>().expect("a number") >= 14));
    assert_eq!(
        server.run("SELECT 1 FROM pg_namespace WHERE nspname = 'tollgate'").await.len(),
        0,
        "looking makes none"
    );
    let made = futures_util::future::join_all((0..6).map(|_| async { database(&server).migrate().await })).await;
    let mut made: Vec<_> = made.into_iter().map(|made| made.expect("made").len()).collect();
    made.sort_unstable();
    assert_eq!((&made[..5], made[5]), (&[0; 5][..], before.migrations.len()));
    let after = database(&server).schema().await.expect("an answer");
    assert!(after.is_complete());
    let tables = server
        .run("SELECT relname FROM pg_class WHERE relnamespace = 'tollgate'::regnamespace AND relkind IN ('r', 'p') AND NOT relispartition ORDER BY 1")
        .await;
    let expected = [
        "api_keys",
        "archive_lock",
        "configuration",
        "deletions",
        "migrations",
        "rate_limit_audit_logs",
        "rate_limit_metrics",
        "rate_limit_rules",
        "user_quotas",
        "versions",
        "writers",
    ];
    assert_eq!(tables, expected);
    let partitions =
        async || server.run("SELECT relname FROM pg_class WHERE relispartition AND relkind = 'r'").await.len();
    assert_eq!(partitions().await, 16, "of last month, this one and the two after it");
    assert_eq!(server.run("SELECT tollgate.make_partitions(2)").await, ["0"]);
    assert_eq!(
        (server.run("SELECT tollgate.make_partitions(3)").await, partitions().await),
        (vec!["4".to_owned()], 20)
    );
}

#[tokio::test]
async fn tables_of_another_version_are_left_alone() {
    let server = PostgresServer::start();
    let database = database(&server);
    database.migrate().await.expect("made");
    let refused = async |sql: &str, expected: &str| {
        server.run(sql).await;
        for error in [database.migrate().await.expect_err(sql), database.schema().await.map(|_| ()).expect_err(sql)] {
            assert!(error.is_schema() && error.to_string().contains(expected), "{error}");
        }
    };
    refused(
        "UPDATE tollgate.migrations SET digest = 'other' WHERE number = 1",
        "the database's migration 1 (configuration) differs from migration 1 (configuration) of this version",
    )
    .await;
    server.run("DELETE FROM tollgate.migrations").await;
    let twice = database.migrate().await.expect_err("the tables are there");
    assert!(twice.to_string().contains("already exists (SQLSTATE 42P07)"), "{twice}");
    let server = PostgresServer::start();
    let database = tollgate_testing::record::database(&server);
    database.migrate().await.expect("made");
    server.run("INSERT INTO tollgate.migrations VALUES (3, 'future', 'x')").await;
    let newer = database.migrate().await.expect_err("newer");
    let expected =
        "schema: the database has migration 3 (future), and this version of tollgate knows 2: upgrade tollgate";
    assert_eq!(newer.to_string(), expected);
}

/// Once everything is there, whoever may read that may look again, without a right to create a schema.
#[tokio::test]
async fn only_the_first_migration_needs_the_right_to_create_a_schema() {
    let server = PostgresServer::start();
    server.run("CREATE ROLE limits LOGIN; GRANT CREATE ON DATABASE postgres TO limits").await;
    let limits = Database::open(&server.url_of("limits", "postgres")).expect("an address");
    assert_eq!(limits.migrate().await.expect("made").len(), 2);
    server.run("REVOKE CREATE ON DATABASE postgres FROM limits").await;
    assert_eq!(limits.migrate().await.expect("nothing to do").len(), 0);
    // Nor where somebody else has made the schema for it.
    server.run("DROP SCHEMA tollgate CASCADE; CREATE SCHEMA tollgate AUTHORIZATION limits").await;
    assert_eq!(limits.migrate().await.expect("made").len(), 2);
    server.run("DROP SCHEMA tollgate CASCADE").await;
    let error = limits.migrate().await.expect_err("no right").to_string();
    assert!(error.contains("permission denied for database postgres (SQLSTATE 42501)"), "{error}");
}

/// Whoever reads or changes the configuration looks whether it knows its tables.
#[tokio::test]
async fn tables_that_are_newer_or_older_are_neither_followed_nor_changed() {
    let (server, tool) = prepared().await;
    let rules: RuleSet = "[[rule]]\nname = \"a\"\naction = \"allow\"".parse().expect("rules");
    tool.push_rules(&rules, "").await.expect("pushed");
    let service = database(&server).follow(&limiter()).await.expect("a configuration");
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
        for refused in [
            tool.follow(&limiter()).await.map(drop),
            tool.set_user("42", Some("paid"), OwnLimits::default(), "").await,
            tool.push_rules(&rules, "").await.map(drop),
            tool.compare_rules(&rules).await.map(drop),
            tool.rules().await.map(drop),
            tool.create_key("42", &KeyTerms::default(), "").await.map(drop),
        ] {
            let error = refused.expect_err(sql);
            assert!(error.is_schema(), "{error}");
            assert_eq!(error.to_string(), expected);
        }
    }
    // One that runs keeps what it has, and says so.
    server.run("UPDATE tollgate.configuration SET version = version + 1; NOTIFY tollgate").await;
    wait_until("it is noticed", async || !service.status().is_connected).await;
    assert_eq!(service.rules().len(), 1);
}

/// Half of a migration is none.
#[tokio::test]
async fn a_migration_that_fails_leaves_nothing() {
    let server = PostgresServer::start();
    // In the way of what is made late.
    server
        .run(
            "CREATE FUNCTION refuse() RETURNS event_trigger LANGUAGE plpgsql AS $$
                BEGIN RAISE EXCEPTION 'in the way'; END $$;
            CREATE EVENT TRIGGER refuse ON ddl_command_start WHEN TAG IN ('CREATE AGGREGATE') EXECUTE FUNCTION refuse()",
        )
        .await;
    let error = database(&server).migrate().await.expect_err("in the way");
    assert!(error.to_string().contains("in the way (SQLSTATE P0001)"), "{error}");
    let tables = server.run("SELECT tablename FROM pg_tables WHERE schemaname = 'tollgate'").await;
    assert_eq!(tables.len(), 0, "{tables:?}");
    server.run("DROP EVENT TRIGGER refuse").await;
    assert_eq!(database(&server).migrate().await.expect("made").len(), 2);
}

#[tokio::test]
async fn errors_are_one_line_without_a_password() {
    let mut server = PostgresServer::start();
    server.run("CREATE ROLE reader LOGIN").await;
    let migrate = async |url: &str| -> PostgresError {
        match Database::open(url) {
            Ok(database) => database.migrate().await.expect_err(url),
            Err(error) => error,
        }
    };
    let port = server.port();
    for (url, expected) in [
        (
            server.url_of("reader:sesame", "postgres"),
            "permission denied for database postgres (SQLSTATE 42501)".to_owned(),
        ),
        (server.url_of("nobody:sesame", "postgres"), "role \"nobody\" does not exist (SQLSTATE 28000)".to_owned()),
        (server.url_of("tollgate:sesame", "none"), "database \"none\" does not exist (SQLSTATE 3D000)".to_owned()),
        ("postgres://u:sesame@127.0.0.1:1/x".to_owned(), "postgres at 127.0.0.1:1/x: ".to_owned()),
        ("mysql://u:sesame@127.0.0.1/x".to_owned(), "expected an address such as postgres://".to_owned()),
        ("postgres://u:sesame@127.0.0.1:port/x".to_owned(), "expected an address such as postgres://".to_owned()),
        ("postgres://u:open@sesame@127.0.0.1/x".to_owned(), "write an @ in the password as %40".to_owned()),
        (String::new(), "the address has no host".to_owned()),
    ] {
        let error = migrate(&url).await;
        let text = error.to_string();
        assert!(text.contains(&expected) && text.starts_with("postgres"), "{url}: {text}");
        assert!(!text.contains("sesame") && text.lines().count() == 1, "{url}: {text}");
        assert!(!format!("{error:?}").contains("sesame"));
    }
    assert!(!format!("{:?}", database(&server)).contains("sesame"));
    server.stop();
    let error = migrate(&server.url()).await;
    assert!(error.is_unreachable() && error.to_string().contains(&format!("127.0.0.1:{port}")), "{error}");
}

/// A changed rule, user or key is a new version of the configuration. Totals are not.
#[tokio::test]
async fn each_change_is_a_new_version_and_counting_is_none() {
    let server = PostgresServer::start();
    database(&server).migrate().await.expect("made");
    let version = async || -> i64 {
        server.run("SELECT version FROM tollgate.configuration").await.remove(0).parse().expect("a number")
    };
    let mut expected = version().await;
    for (sql, changes) in [
        (r#"INSERT INTO tollgate.rate_limit_rules (name, place, definition) VALUES ('a', 0, '{"name": "a"}')"#, true),
        ("UPDATE tollgate.rate_limit_rules SET enabled = false", true),
        ("DELETE FROM tollgate.rate_limit_rules", true),
        ("INSERT INTO tollgate.user_quotas (user_id) VALUES ('42')", false),
        ("INSERT INTO tollgate.user_quotas (user_id, tier) VALUES ('1', 'a'), ('2', 'a'), ('3', 'a')", true),
        (
            "BEGIN; UPDATE tollgate.user_quotas SET tier = 'b'; DELETE FROM tollgate.user_quotas WHERE user_id = '1'; COMMIT",
            true,
        ),
        ("DELETE FROM tollgate.user_quotas WHERE user_id = 'nobody'", false),
        ("UPDATE tollgate.user_quotas SET tier = 'b'", false),
        ("UPDATE tollgate.user_quotas SET total_today = 9, today = now(), last_request_at = now()", false),
        ("UPDATE tollgate.user_quotas SET blocked = true, blocked_reason = 'spam'", true),
        ("INSERT INTO tollgate.api_keys (key_id, hash, user_id) VALUES ('k', sha256('x'), '42')", true),
        ("UPDATE tollgate.api_keys SET total = 1, last_used_at = now()", false),
        ("UPDATE tollgate.api_keys SET revoked_at = now()", true),
        ("TRUNCATE tollgate.user_quotas", true),
        ("UPDATE tollgate.configuration SET settings = '{\"ignore_case\": true}'", true),
        ("UPDATE tollgate.configuration SET settings = settings", false),
    ] {
        server.run(sql).await;
        expected += i64::from(changes);
        assert_eq!(version().await, expected, "{sql}");
    }
}

/// Whatever a program or a person writes there: what no reader could use is refused.
#[tokio::test]
async fn the_tables_refuse_rows_that_no_reader_could_use() {
    let server = PostgresServer::start();
    database(&server).migrate().await.expect("made");
    let (client, connection) = tokio_postgres::connect(&server.url(), tokio_postgres::NoTls).await.expect("connected");
    tokio::spawn(connection);
    for sql in [
        r#"INSERT INTO tollgate.rate_limit_rules (name, place, definition) VALUES ('a b', 0, '{"name": "a b"}')"#,
        r#"INSERT INTO tollgate.rate_limit_rules (name, place, definition) VALUES ('a', 0, '{"name": "b"}')"#,
        r#"INSERT INTO tollgate.rate_limit_rules (name, place, definition) VALUES ('a', 0, '[]')"#,
        "INSERT INTO tollgate.user_quotas (user_id) VALUES ('')",
        "INSERT INTO tollgate.user_quotas (user_id) VALUES (repeat('x', 513))",
        "INSERT INTO tollgate.user_quotas (user_id, per_hour) VALUES ('a', 0)",
        "INSERT INTO tollgate.user_quotas (user_id, burst) VALUES ('a', 9007199254740993)",
        "INSERT INTO tollgate.user_quotas (user_id, blocked_reason) VALUES ('a', 'but it is not')",
        "INSERT INTO tollgate.user_quotas (user_id, this_month) VALUES ('a', '2026-11-02')",
        "INSERT INTO tollgate.api_keys (key_id, hash, user_id) VALUES ('a', 'short', 'a')",
        "INSERT INTO tollgate.api_keys (key_id, hash, user_id, replaces) VALUES ('a', sha256('a'), 'a', 'none')",
        "INSERT INTO tollgate.configuration (only_row) VALUES (false)",
        "INSERT INTO tollgate.configuration DEFAULT VALUES",
    ] {
        let error = client.batch_execute(sql).await.expect_err(sql);
        let state = error.code().expect("a state").code().to_owned();
        assert!(state.starts_with("23"), "an integrity constraint: {error:?}: {sql}");
    }
}
