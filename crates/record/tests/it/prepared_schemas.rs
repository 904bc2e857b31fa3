//! A schema that somebody else has prepared is refused, and its owner named: what is in it would run with the rights of
//! the role that migrates.

use tollgate_record::Postgres as Database;
use tollgate_testing::postgres_server::PostgresServer;
use tollgate_testing::record::database;

/// A server on which the role `mallory` may create in the database and, if `migrate` is run with its rights, becomes a
/// superuser by calling `mallory.take()`.
async fn hostile() -> (PostgresServer, Database) {
    let server = PostgresServer::start();
    server
        .run("CREATE ROLE mallory LOGIN; GRANT CREATE ON DATABASE postgres TO mallory; CREATE ROLE limits LOGIN")
        .await;
    run_as(
        &server,
        "mallory",
        "CREATE SCHEMA mallory; GRANT USAGE ON SCHEMA mallory TO PUBLIC;
        CREATE FUNCTION mallory.take() RETURNS boolean LANGUAGE plpgsql AS $$
            BEGIN
                EXECUTE 'ALTER ROLE mallory SUPERUSER'; RETURN true;
            EXCEPTION WHEN insufficient_privilege THEN RETURN true;
            END $$;
        CREATE FUNCTION mallory.taking() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN PERFORM mallory.take(); RETURN NEW; END $$",
    )
    .await;
    let superuser = database(&server);
    (server, superuser)
}

async fn run_as(server: &PostgresServer, role: &str, sql: &str) {
    let (client, connection) =
        tokio_postgres::connect(&server.url_of(role, "postgres"), tokio_postgres::NoTls).await.expect("connected");
    let connection = tokio::spawn(connection);
    client.batch_execute(sql).await.unwrap_or_else(|error| panic!("{error:?}: {sql}"));
    drop(client);
    connection.await.expect("no panic").expect("a clean end");
}

async fn assert_refused(server: &PostgresServer, database: &Database, expected: &str) {
    let error = database.migrate().await.expect_err(expected).to_string();
    assert!(error.starts_with("schema tollgate: ") && error.contains(expected), "{error}");
    assert_eq!(error.lines().count(), 1, "{error}");
    let rights = server.run("SELECT rolsuper FROM pg_roles WHERE rolname = 'mallory'").await;
    assert_eq!(rights, ["f"], "{expected}");
}

const MIGRATIONS: &str = "CREATE TABLE tollgate.migrations (
    number integer PRIMARY KEY, name text NOT NULL, digest bytea NOT NULL, applied_at timestamptz NOT NULL DEFAULT now());";

#[tokio::test]
async fn a_schema_of_another_role_is_refused_and_its_owner_named() {
    let (server, superuser) = hostile().await;
    let limits = Database::open(&server.url_of("limits", "postgres")).expect("an address");
    let trigger =
        "CREATE TRIGGER t BEFORE INSERT ON tollgate.migrations FOR EACH ROW EXECUTE FUNCTION mallory.taking();
        GRANT ALL ON SCHEMA tollgate TO PUBLIC; GRANT ALL ON ALL TABLES IN SCHEMA tollgate TO PUBLIC;";
    let view = "CREATE VIEW tollgate.migrations AS SELECT 1 AS number, ''::text AS name, ''::bytea AS digest, now() AS applied_at
        WHERE mallory.take();";
    for inside in [String::new(), format!("{MIGRATIONS} {trigger}"), view.to_owned()] {
        run_as(&server, "mallory", &format!("CREATE SCHEMA tollgate; {inside}")).await;
        assert_refused(&server, &superuser, "owned by role mallory, not by role tollgate: migrate as").await;
        assert_refused(&server, &limits, "owned by role mallory, not by role limits: migrate as").await;
        if inside == view {
            // Looking runs nothing of it either.
            assert!(!superuser.schema().await.expect("an answer").is_complete());
        }
        server.run("DROP SCHEMA tollgate CASCADE").await;
    }
    assert_eq!(server.run("SELECT rolsuper FROM pg_roles WHERE rolname = 'mallory'").await, ["f"]);
    // Its own, by the role itself.
    let mallory = Database::open(&server.url_of("mallory", "postgres")).expect("an address");
    assert_eq!(mallory.migrate().await.expect("made").len(), 2);
    assert_eq!(mallory.migrate().await.expect("nothing to do").len(), 0);
    assert_refused(&server, &superuser, "owned by role mallory").await;
}

/// A schema that belongs to the role that migrates, in which others have left something, or may.
#[tokio::test]
async fn a_schema_in_which_others_have_left_something_is_refused() {
    for (prepared, expected) in [
        ("GRANT CREATE ON SCHEMA tollgate TO mallory", "may create objects in it: revoke CREATE from mallory"),
        ("GRANT CREATE ON SCHEMA tollgate TO PUBLIC", "may create objects in it: revoke CREATE from PUBLIC"),
        (
            "CREATE FUNCTION tollgate.f() RETURNS integer LANGUAGE sql AS 'SELECT 1'",
            "has function tollgate.f(), but not",
        ),
        (
            "CREATE FUNCTION tollgate.f() RETURNS integer LANGUAGE sql AS 'SELECT 1';
            ALTER FUNCTION tollgate.f() OWNER TO mallory",
            "function tollgate.f() in it belongs to role mallory, not to role tollgate",
        ),
        (
            "CREATE TABLE tollgate.migrations (); ALTER TABLE tollgate.migrations OWNER TO mallory",
            "table tollgate.migrations in it belongs to role mallory",
        ),
        ("CREATE VIEW tollgate.migrations AS SELECT 1", "tollgate.migrations isn't a table that role tollgate owns"),
    ] {
        let (server, superuser) = hostile().await;
        server.run(&format!("CREATE SCHEMA tollgate; {prepared}")).await;
        assert_refused(&server, &superuser, expected).await;
        server.run("DROP SCHEMA tollgate CASCADE; CREATE SCHEMA tollgate").await;
        assert_eq!(superuser.migrate().await.expect("made").len(), 2);
    }
}

/// Triggers and the like on tollgate's own tables that call another role's functions, where an upgrade would change
/// rows.
#[tokio::test]
async fn tables_that_call_functions_of_others_are_not_migrated() {
    let (server, superuser) = hostile().await;
    superuser.migrate().await.expect("made");
    server
        .run("GRANT USAGE ON SCHEMA tollgate TO mallory; GRANT TRIGGER ON ALL TABLES IN SCHEMA tollgate TO mallory")
        .await;
    for table in ["migrations", "user_quotas"] {
        let trigger = format!(
            "CREATE TRIGGER t BEFORE INSERT ON tollgate.{table} FOR EACH ROW EXECUTE FUNCTION mallory.taking()"
        );
        run_as(&server, "mallory", &trigger).await;
        let expected = format!("trigger t on table tollgate.{table} in it uses function mallory.taking(), which");
        assert_refused(&server, &superuser, &expected).await;
        server.run(&format!("DROP TRIGGER t ON tollgate.{table}")).await;
    }
    // As of a table that was once another's.
    for (sql, undo, expected) in [
        (
            "ALTER TABLE tollgate.migrations ALTER name SET DEFAULT mallory.take()",
            "ALTER TABLE tollgate.migrations ALTER name DROP DEFAULT",
            "default value for column name of table tollgate.migrations in it uses function mallory.take(), which",
        ),
        (
            "ALTER TABLE tollgate.writers ADD CONSTRAINT c CHECK (mallory.take())",
            "ALTER TABLE tollgate.writers DROP CONSTRAINT c",
            "constraint c on table tollgate.writers in it uses function mallory.take(), which",
        ),
        (
            "CREATE RULE r AS ON INSERT TO tollgate.migrations WHERE mallory.take() DO INSTEAD NOTHING",
            "DROP RULE r ON tollgate.migrations",
            "rule r on table tollgate.migrations in it uses function mallory.take(), which",
        ),
    ] {
        server.run(sql).await;
        assert_refused(&server, &superuser, expected).await;
        server.run(undo).await;
    }
    assert_eq!(superuser.migrate().await.expect("nothing to do").len(), 0);
    // A trigger of the role's own is its own affair.
    server
        .run(
            "CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
            CREATE TRIGGER note AFTER UPDATE ON tollgate.writers EXECUTE FUNCTION note()",
        )
        .await;
    assert_eq!(superuser.migrate().await.expect("nothing to do").len(), 0);
}

/// The owner of a database chooses where everybody's names are looked for.
#[tokio::test]
async fn a_search_path_that_leads_to_another_role_runs_none_of_its_functions() {
    let (server, superuser) = hostile().await;
    server.run("CREATE DATABASE theirs OWNER mallory").await;
    let url = server.url_of("mallory", "theirs");
    let (client, connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await.expect("connected");
    tokio::spawn(connection);
    let take = "EXECUTE 'ALTER ROLE mallory SUPERUSER'";
    let function = |name: &str, takes: &str, gives: &str, value: &str| {
        format!(
            "CREATE FUNCTION evil.{name}({takes}) RETURNS {gives} LANGUAGE plpgsql AS $$
                BEGIN {take}; RETURN {value}; EXCEPTION WHEN insufficient_privilege THEN RETURN {value}; END $$;"
        )
    };
    let functions = [
        function("current_setting", "text", "text", "pg_catalog.current_setting($1)"),
        function("pg_backend_pid", "", "integer", "pg_catalog.pg_backend_pid()"),
        function("to_regnamespace", "text", "regnamespace", "pg_catalog.to_regnamespace($1)"),
        function("to_regclass", "text", "regclass", "pg_catalog.to_regclass($1)"),
        function("pg_get_userbyid", "oid", "name", "pg_catalog.pg_get_userbyid($1)"),
        function("now", "", "timestamptz", "pg_catalog.now()"),
    ];
    let sql = format!(
        "CREATE SCHEMA evil; GRANT USAGE ON SCHEMA evil TO PUBLIC; {}
        ALTER DATABASE theirs SET search_path = evil, pg_catalog",
        functions.concat()
    );
    client.batch_execute(&sql).await.expect("prepared");
    drop(superuser);
    let superuser = Database::open(&server.url_of("tollgate", "theirs")).expect("an address");
    assert_eq!(superuser.migrate().await.expect("made").len(), 2);
    assert_eq!(superuser.migrate().await.expect("nothing to do").len(), 0);
    assert_eq!(server.run("SELECT rolsuper FROM pg_roles WHERE rolname = 'mallory'").await, ["f"]);
}

/// A role that can only connect holds nobody up: it can take every advisory lock, and none of a table.
#[tokio::test]
async fn a_role_that_can_only_connect_holds_up_no_migration() {
    let (server, superuser) = hostile().await;
    let url = server.url_of("limits", "postgres");
    let (client, connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await.expect("connected");
    tokio::spawn(connection);
    for lock in [*b"tollgate", *b"tollarch"].map(i64::from_be_bytes) {
        client.execute("SELECT pg_advisory_lock($1)", &[&lock]).await.expect("locked");
    }
    assert_eq!(superuser.migrate().await.expect("made").len(), 2);
    for table in ["migrations", "archive_lock"] {
        let error = client.batch_execute(&format!("BEGIN; LOCK TABLE tollgate.{table}")).await.expect_err("no right");
        assert_eq!(error.code().expect("a state").code(), "42501", "{error:?}");
        client.batch_execute("ROLLBACK").await.expect("rolled back");
    }
}
