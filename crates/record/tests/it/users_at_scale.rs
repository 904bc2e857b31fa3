//! Many users: each is read once, and later what has changed since, also of a database that was restored.

use std::time::{Duration, Instant};

use tollgate::rules::ApiKeyError;
use tollgate_record::{Configuration, KeyTerms, Postgres as Database};
use tollgate_testing::polling::wait_until;
use tollgate_testing::postgres_server::PostgresServer;
use tollgate_testing::record::{database, limiter, prepared};
use tollgate_testing::rules::rule_set_of_one;

/// Adds users with a tier: as many as are read in two pages, so that the second is full and yet the last.
const MANY: &str =
    "INSERT INTO tollgate.user_quotas (user_id, tier) SELECT 'u' || n, 'paid' FROM generate_series(1, 10000) AS n";

/// Ends a service's connections, as a restart of the server would.
const DISCONNECT: &str = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE application_name = 'tollgate' AND pid <> pg_backend_pid()";

async fn until_blocked(service: &Configuration, user: &str) {
    wait_until("a block", async || service.account_of_user(user).is_some_and(|user| user.block().is_some())).await;
}

#[tokio::test]
async fn users_are_read_once_and_then_only_those_that_changed() {
    let (server, tool) = prepared().await;
    // Users who were only counted aren't read.
    server.run("INSERT INTO tollgate.user_quotas (user_id, total_today) VALUES ('counted', 7)").await;
    server.run(MANY).await;
    let service = database(&server).follow(&limiter()).await.expect("a configuration");
    let all_there = || (1..=10_000).all(|user| service.account_of_user(&format!("u{user}")).is_some());
    assert!(all_there() && service.account_of_user("counted").is_none() && service.account_of_user("u0").is_none());
    assert_eq!(service.status().users_read, 10_000);
    tool.block_user("u7", None, None, "").await.expect("blocked");
    until_blocked(&service, "u7").await;
    assert_eq!(service.status().users_read, 10_001);
    for number in 1..3 {
        server
            .run(&format!(
                "BEGIN;
                UPDATE tollgate.user_quotas SET blocked = true WHERE user_id = 'u{number}1';
                DELETE FROM tollgate.user_quotas WHERE user_id = 'u{number}2';
                {DISCONNECT};
                COMMIT"
            ))
            .await;
    }
    wait_until("the last change", async || service.account_of_user("u22").is_none()).await;
    until_blocked(&service, "u21").await;
    assert!(service.account_of_user("u12").is_none());
    assert_eq!(service.status().users_read, 10_003);
    // A change of many users at once is read in pages, too.
    server.run("UPDATE tollgate.user_quotas SET tier = 'free'").await;
    let is_free = |user: &str| service.account_of_user(user).is_some_and(|user| user.paid_tier() == Some("free"));
    wait_until("all have changed", async || is_free("u1") && is_free("u10000")).await;
}

/// Tables as they were, other changes since, and the same history: as after a restore that nobody announced.
#[tokio::test]
async fn a_restored_database_is_read_anew_also_if_nobody_says_so() {
    let (server, tool) = prepared().await;
    server.run(MANY).await;
    let service = database(&server).follow(&limiter()).await.expect("a configuration");
    server
        .run("CREATE TABLE public.kept AS SELECT version, rules_version, truncated_version FROM tollgate.configuration")
        .await;
    server.run("CREATE TABLE public.kept_versions AS SELECT * FROM tollgate.versions").await;
    for user in ["undone", "u1"] {
        tool.block_user(user, None, None, "").await.expect("blocked");
        until_blocked(&service, user).await;
    }
    let known = service.status();
    // More has changed since than before, so the number of the version doesn't show it.
    server
        .run(
            "BEGIN;
            SET LOCAL session_replication_role = replica;
            DELETE FROM tollgate.user_quotas WHERE user_id = 'undone';
            UPDATE tollgate.user_quotas SET blocked = false, version = (SELECT version FROM public.kept) WHERE user_id = 'u1';
            UPDATE tollgate.configuration SET (version, rules_version, truncated_version) =
                (SELECT version + 5, rules_version, truncated_version FROM public.kept);
            DELETE FROM tollgate.versions;
            INSERT INTO tollgate.versions SELECT * FROM public.kept_versions;
            SET LOCAL session_replication_role = origin;
            UPDATE tollgate.user_quotas SET blocked = true WHERE user_id IN ('u2', 'u3', 'u4');
            COMMIT",
        )
        .await;
    until_blocked(&service, "u4").await;
    let blocked =
        ["undone", "u1", "u2", "u3"].map(|user| service.account_of_user(user).and_then(|user| user.block().cloned()));
    assert_eq!(blocked.map(|block| block.is_some()), [false, false, true, true]);
    wait_until("all users are read again", async || {
        let now = service.status();
        now.version > known.version && now.users_read >= known.users_read + 10_000
    })
    .await;
}

/// Keys as they were in the tables that are kept, and then revoked.
const RESTORED_AND_REVOKED: &str = "
    BEGIN;
    SET LOCAL session_replication_role = replica;
    UPDATE tollgate.api_keys SET version = (SELECT version FROM public.kept);
    UPDATE tollgate.configuration SET version = (SELECT version FROM public.kept);
    DELETE FROM tollgate.versions;
    INSERT INTO tollgate.versions SELECT * FROM public.kept_versions;
    SET LOCAL session_replication_role = origin;
    UPDATE tollgate.api_keys SET revoked_at = now();
    COMMIT";

/// A key, a service that follows the database, and what the database is restored to.
async fn to_be_restored() -> (PostgresServer, String, Configuration) {
    let (server, tool) = prepared().await;
    let (key, _) = tool.create_key("42", &KeyTerms::default(), "").await.expect("made");
    let service = database(&server).follow(&limiter()).await.expect("a configuration");
    server.run("CREATE TABLE public.kept AS SELECT version FROM tollgate.configuration").await;
    server.run("CREATE TABLE public.kept_versions AS SELECT * FROM tollgate.versions").await;
    (server, key.secret().to_owned(), service)
}

async fn until_revoked(service: &Configuration, key: &str) {
    wait_until("the key is refused", async || service.account_of_key(key).await.err() == Some(ApiKeyError::Revoked))
        .await;
}

/// Its version from before the restore is higher than that of its revocation after it.
#[tokio::test]
async fn a_key_that_is_revoked_after_a_restore_is_refused() {
    let (server, key, service) = to_be_restored().await;
    let known = service.status().version;
    for days in 1..=9 {
        server.run(&format!("UPDATE tollgate.api_keys SET expires_at = now() + interval '{days} days'")).await;
    }
    wait_until("all changes are taken", async || service.status().version == known + 9).await;
    assert!(service.account_of_key(&key).await.is_ok());
    server.run(RESTORED_AND_REVOKED).await;
    until_revoked(&service, &key).await;
}

/// A change is being read while the database is restored: what is found then isn't what came after the change.
#[tokio::test]
async fn a_restore_is_noticed_whatever_is_being_read() {
    let (server, key, service) = to_be_restored().await;
    for step in 0..40 {
        server.run("UPDATE tollgate.api_keys SET revoked_at = NULL").await;
        wait_until("the key is taken", async || service.account_of_key(&key).await.is_ok()).await;
        server.run("UPDATE tollgate.api_keys SET expires_at = now() + interval '1 day'").await;
        tokio::time::sleep(Duration::from_micros(step * 200)).await;
        server.run(RESTORED_AND_REVOKED).await;
        until_revoked(&service, &key).await;
    }
}

/// A service as its own role, which an operator can lock out.
async fn with_role(server: &PostgresServer) -> Database {
    server
        .run(
            "CREATE ROLE service LOGIN;
            GRANT USAGE ON SCHEMA tollgate TO service;
            GRANT SELECT ON ALL TABLES IN SCHEMA tollgate TO service",
        )
        .await;
    Database::open(&server.url_of("service", "postgres")).expect("an address")
}

#[tokio::test]
async fn what_was_deleted_while_a_process_was_away_for_days_is_noticed() {
    let (server, tool) = prepared().await;
    let service = with_role(&server).await.follow(&limiter()).await.expect("a configuration");
    tool.block_user("deleted", None, None, "").await.expect("blocked");
    until_blocked(&service, "deleted").await;
    server.run("ALTER ROLE service NOLOGIN").await;
    server.run(DISCONNECT).await;
    wait_until("it is unreachable", async || !service.status().is_connected).await;
    server.run("DELETE FROM tollgate.user_quotas WHERE user_id = 'deleted'").await;
    // Two days go by, with changes.
    for user in ["u1", "u2"] {
        server.run("UPDATE tollgate.versions SET made_at = made_at - interval '2 days'").await;
        tool.block_user(user, None, None, "").await.expect("blocked");
    }
    assert_eq!(server.run("SELECT 1 FROM tollgate.deletions").await.len(), 0, "they are kept for a day");
    assert_eq!(server.run("SELECT 1 FROM tollgate.versions").await.len(), 2, "the newest, and the one before it");
    server.run("ALTER ROLE service LOGIN").await;
    until_blocked(&service, "u2").await;
    assert!(service.account_of_user("deleted").is_none());
}

#[tokio::test]
async fn a_table_that_cannot_be_read_keeps_no_other_from_being_followed() {
    let (server, tool) = prepared().await;
    let service = with_role(&server).await.follow(&limiter()).await.expect("a configuration");
    server.run("REVOKE SELECT ON tollgate.rate_limit_rules FROM service").await;
    tool.push_rules(&rule_set_of_one("gcra 7/1s"), "").await.expect("pushed");
    tool.block_user("42", None, None, "").await.expect("blocked");
    until_blocked(&service, "42").await;
    wait_until("what can't be read is reported", async || !service.status().is_connected).await;
    assert!(service.rules().is_empty());
    server.run("GRANT SELECT ON tollgate.rate_limit_rules TO service").await;
    wait_until("the rules are in force", async || service.rules().len() == 1).await;
}

/// Following needs nothing of the service's runtime, so it takes nothing from its decisions.
#[tokio::test(flavor = "current_thread")]
async fn changes_are_in_force_while_the_runtime_is_busy() {
    let (server, tool) = prepared().await;
    let service = database(&server).follow(&limiter()).await.expect("a configuration");
    tool.block_user("u1", None, None, "").await.expect("blocked");
    let began = Instant::now();
    // This never yields.
    while service.account_of_user("u1").is_none() {
        assert!(began.elapsed() < Duration::from_secs(60), "not in force");
        std::thread::sleep(Duration::from_millis(1));
    }
}
