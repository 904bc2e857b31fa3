//! Grants: the rights that the guide names suffice, and a service can change no configuration, whatever it sets.

use tokio_postgres::{Client, NoTls};
use tollgate::rules::Attributes;
use tollgate_record::history::HistorySettings;
use tollgate_record::{KeyTerms, OwnLimits, Postgres as Database};
use tollgate_testing::polling::wait_until;
use tollgate_testing::postgres_server::PostgresServer;
use tollgate_testing::record::{limiter, prepared};
use tollgate_testing::repository::read;

/// All that the guide grants the role `service`.
pub(super) async fn grant_service(server: &PostgresServer) {
    let guide = read("crates/record/src/operations.md");
    let blocks = guide.split("```sql\n").skip(1).filter_map(|rest| rest.split("```").next());
    let grants: String = blocks.filter(|block| block.starts_with("GRANT")).collect();
    assert!(grants.contains("TO service"), "{grants}");
    server.run(&format!("CREATE ROLE service LOGIN; {grants}")).await;
}

async fn connected(server: &PostgresServer, user: &str) -> Client {
    let (client, connection) =
        tokio_postgres::connect(&server.url_of(user, "postgres"), NoTls).await.expect("connected");
    tokio::spawn(connection);
    client
}

#[tokio::test]
async fn a_service_needs_few_rights() {
    let (server, tool) = prepared().await;
    tool.set_user("1", Some("paid"), OwnLimits::default(), "").await.expect("set");
    let (key, stored) = tool.create_key("42", &KeyTerms::default(), "").await.expect("made");
    grant_service(&server).await;
    let as_service = Database::open(&server.url_of("service", "postgres")).expect("an address");
    let service = as_service.follow(&limiter()).await.expect("a configuration");
    let history = as_service.record(HistorySettings::new()).expect("settings");
    let account = service.account_of_key(key.secret()).await.expect("valid");
    service.count(&Attributes::new().account(&account), true);
    service.count(&Attributes::new().user("1"), true);
    for _ in 0..2 {
        service.finish().await.expect("written");
        history.finish().await.expect("written");
        service.count(&Attributes::new().user("1"), true);
    }
    assert_eq!(tool.key(&stored.id).await.expect("an answer").expect("known").total, 1);
    tool.block_user("1", None, None, "").await.expect("blocked");
    wait_until("it is followed", async || service.account_of_user("1").is_some_and(|user| user.block().is_some()))
        .await;
    let rules = "[[rule]]\nname = \"a\"\naction = \"allow\"".parse().expect("rules");
    for error in [
        as_service.revoke_key(&stored.id, "").await.map(drop),
        as_service.create_key("1", &KeyTerms::default(), "").await.map(drop),
        as_service.unblock_user("1", "").await.map(drop),
        as_service.push_rules(&rules, "").await.map(drop),
    ] {
        let error = error.expect_err("no right");
        assert!(error.to_string().contains("permission denied") && error.to_string().contains("42501"), "{error}");
    }
}

/// Nothing that a session can set gives a service more than its grants.
#[tokio::test]
async fn a_service_changes_no_configuration_whatever_it_sets() {
    let (server, tool) = prepared().await;
    tool.block_user("42", Some("fraud"), None, "operator").await.expect("blocked");
    let (_, key) = tool.create_key("42", &KeyTerms::default(), "").await.expect("made");
    tool.revoke_key(&key.id, "operator").await.expect("revoked");
    grant_service(&server).await;
    let service = connected(&server, "service").await;
    let before = server.run("SELECT version FROM tollgate.configuration").await;
    // As this transaction's change would be known, in the way of the triggers' names, and in another's place.
    let settings = "BEGIN;
        SELECT set_config('tollgate.changed_in', pg_current_xact_id()::text, true);
        CREATE TEMP TABLE configuration (version bigint, changed_in xid8, changed_at timestamptz);
        CREATE FUNCTION pg_temp.now() RETURNS timestamptz LANGUAGE sql AS 'SELECT timestamptz ''epoch''';
        SET LOCAL search_path = pg_temp, tollgate, pg_catalog;";
    for sql in [
        "UPDATE tollgate.user_quotas SET blocked = false, blocked_reason = NULL",
        "UPDATE tollgate.user_quotas SET per_hour = 1000000",
        "UPDATE tollgate.user_quotas SET version = NULL",
        "UPDATE tollgate.user_quotas SET user_id = '43'",
        "UPDATE tollgate.user_quotas SET total_today = 1, updated_by = 'operator'",
        "INSERT INTO tollgate.user_quotas (user_id, per_hour) VALUES ('7', 1000000)",
        "INSERT INTO tollgate.user_quotas (user_id, version) VALUES ('7', 1000000)",
        "INSERT INTO tollgate.user_quotas (user_id) VALUES ('42') ON CONFLICT (user_id) DO UPDATE SET blocked = false",
        "DELETE FROM tollgate.user_quotas",
        "TRUNCATE tollgate.user_quotas",
        "UPDATE tollgate.api_keys SET revoked_at = NULL, revoked_by = NULL",
        "UPDATE tollgate.api_keys SET total = 1, expires_at = NULL",
        "UPDATE tollgate.api_keys SET user_id = '43'",
        "UPDATE tollgate.api_keys SET version = 1",
        "INSERT INTO tollgate.api_keys (key_id, hash, user_id) VALUES ('k', sha256('x'), '42')",
        "DELETE FROM tollgate.api_keys",
        "UPDATE tollgate.rate_limit_rules SET enabled = false",
        "DELETE FROM tollgate.rate_limit_rules",
        "UPDATE tollgate.configuration SET changed_in = pg_current_xact_id(), changed_at = pg_catalog.now()",
        "UPDATE tollgate.configuration SET history = gen_random_uuid()",
        "SELECT 1 FROM tollgate.configuration FOR UPDATE",
        "INSERT INTO tollgate.deletions (version, user_id) VALUES (1, '42')",
        "DELETE FROM tollgate.deletions",
        "SELECT tollgate.next_version()",
        "DELETE FROM tollgate.migrations",
        "UPDATE tollgate.writers SET client = '192.0.2.1'",
        "SET session_replication_role = replica",
        "ALTER TABLE tollgate.user_quotas DISABLE TRIGGER updated",
        "ALTER FUNCTION tollgate.next_version() SET search_path = pg_temp",
        "CREATE FUNCTION tollgate.f() RETURNS integer LANGUAGE sql AS 'SELECT 1'",
    ] {
        for settings in ["BEGIN;", settings] {
            service.batch_execute(settings).await.expect(settings);
            let error = service.batch_execute(sql).await.expect_err(sql);
            assert_eq!(error.code().expect("a state").code(), "42501", "{error:?}: {sql}");
            service.batch_execute("ROLLBACK").await.expect("rolled back");
        }
    }
    assert_eq!(server.run("SELECT version FROM tollgate.configuration").await, before);
    let user = tool.user("42").await.expect("an answer").expect("known");
    assert!(user.is_blocked() && user.updated_by == "operator", "{user:?}");
}

/// For any role that may change users: a change is in force whatever the session sets; totals make no version.
#[tokio::test]
async fn each_change_is_a_version_of_its_own_whatever_a_session_sets() {
    let (server, tool) = prepared().await;
    tool.block_user("42", None, None, "").await.expect("blocked");
    let version = async || -> i64 {
        server.run("SELECT version FROM tollgate.configuration").await.remove(0).parse().expect("a number")
    };
    let before = version().await;
    let evade = "SELECT set_config('tollgate.changed_in', pg_current_xact_id()::text, true)";
    server.run(&format!("BEGIN; {evade}; UPDATE tollgate.user_quotas SET blocked = false; COMMIT")).await;
    assert_eq!(version().await, before + 1);
    server.run("UPDATE tollgate.user_quotas SET version = NULL").await;
    assert_eq!(version().await, before + 2);
    assert_eq!(server.run("SELECT version FROM tollgate.user_quotas").await, [(before + 2).to_string()]);
    // A transaction's changes are one version, also around a savepoint that is given up.
    server
        .run(
            "BEGIN; SAVEPOINT s; UPDATE tollgate.user_quotas SET tier = 'a'; ROLLBACK TO s;
            UPDATE tollgate.user_quotas SET tier = 'b'; UPDATE tollgate.user_quotas SET tier = 'c'; COMMIT",
        )
        .await;
    assert_eq!(version().await, before + 3);
    // As after a restore, when this transaction's number was another's before.
    server
        .run(
            "BEGIN; UPDATE tollgate.configuration SET changed_in = pg_current_xact_id(), changed_at = now() - interval '1 day';
            UPDATE tollgate.user_quotas SET tier = 'd'; COMMIT",
        )
        .await;
    assert_eq!(version().await, before + 4);
    server.run("INSERT INTO tollgate.user_quotas (user_id, version) VALUES ('7', 1000000)").await;
    assert_eq!(server.run("SELECT max(version) FROM tollgate.user_quotas").await, [(before + 5).to_string()]);
    server.run("UPDATE tollgate.user_quotas SET total_today = 1, today = now()").await;
    assert_eq!(version().await, before + 5);
}

/// Partitions are made by whoever was granted that, and not for years to come.
#[tokio::test]
async fn partitions_are_made_by_services_alone_and_within_bounds() {
    let (server, _) = prepared().await;
    server.run("CREATE ROLE anybody LOGIN; GRANT USAGE ON SCHEMA tollgate TO anybody").await;
    grant_service(&server).await;
    let [anybody, service] = [connected(&server, "anybody").await, connected(&server, "service").await];
    let error = anybody.batch_execute("SELECT tollgate.make_partitions(2)").await.expect_err("no right");
    assert_eq!(error.code().expect("a state").code(), "42501");
    service.batch_execute("SELECT tollgate.make_partitions(2)").await.expect("made");
    for months in ["2000000000", "25", "-1", "NULL"] {
        let error = service.batch_execute(&format!("SELECT tollgate.make_partitions({months})")).await;
        let error = error.expect_err("out of bounds");
        assert!(error.as_db_error().expect("a state").message().contains("expected 0 to 24 months ahead"), "{error:?}");
    }
}

/// Where nobody says who makes a change, the role does.
#[tokio::test]
async fn a_change_by_nobody_is_one_by_its_role() {
    let (server, tool) = prepared().await;
    let rules = "[[rule]]\nname = \"a\"\naction = \"allow\"".parse().expect("rules");
    tool.push_rules(&rules, "").await.expect("pushed");
    tool.block_user("1", None, None, "").await.expect("blocked");
    tool.block_user("2", None, None, "me").await.expect("blocked");
    tool.unblock_user("2", "").await.expect("unblocked");
    tool.set_user("3", None, OwnLimits::default(), "").await.expect("set");
    let (_, key) = tool.create_key("42", &KeyTerms::default(), "").await.expect("made");
    let revoked = tool.revoke_key(&key.id, "").await.expect("revoked");
    assert_eq!((key.created_by.as_str(), revoked.revoked_by.as_deref()), ("tollgate", Some("tollgate")));
    let by =
        "SELECT DISTINCT updated_by FROM tollgate.user_quotas UNION SELECT updated_by FROM tollgate.rate_limit_rules";
    assert_eq!(server.run(by).await, ["tollgate"]);
}
