//! Entries in Redis: written only by who applied them, and only by who has the secret.

use std::time::Duration;

use tollgate::redis::{Commands, cmd};
use tollgate::rules::{ApiKeyError, RuleSet};
use tollgate::{Engine, Limiter};
use tollgate_record::{Configuration, KeyTerms, NewKey, Postgres as Database};
use tollgate_testing::polling::{PATIENCE, wait_until};
use tollgate_testing::postgres_server::PostgresServer;
use tollgate_testing::proxy::Proxy;
use tollgate_testing::record::{database, prepared};
use tollgate_testing::redis_server::Server;

fn rules(limit: &str) -> RuleSet {
    format!("[[rule]]\nname = \"all\"\nkey = \"user\"\nlimits = [\"{limit}\"]").parse().expect("rules")
}

async fn follow(database: &Database, redis: &Server) -> Configuration {
    let limiter = Limiter::builder(Engine::open(&redis.tcp_url()).expect("an address")).deadline(PATIENCE).build();
    database.follow(&limiter).await.expect("a configuration")
}

/// The one key in Redis that ends like this.
fn name_of(redis: &Server, end: &str) -> Option<String> {
    let names: Vec<String> = redis.connection().keys(format!("tollgate:{{%c}}:*{end}")).expect("names");
    names.into_iter().next()
}

fn entry(redis: &Server, end: &str) -> Vec<u8> {
    name_of(redis, end).and_then(|name| redis.connection().get(name).expect("an entry")).unwrap_or_default()
}

fn put(redis: &Server, end: &str, entry: &[u8]) {
    let name = name_of(redis, end).expect("an entry");
    let _: () = redis.connection().set(name, entry).expect("set");
}

/// Whether the whole configuration is cached, with this in its rules.
fn are_cached(redis: &Server, text: &str) -> bool {
    String::from_utf8_lossy(&entry(redis, ":rules")).contains(text) && name_of(redis, ":head").is_some()
}

/// All processes here are of one version of tollgate, so row-level security shows an older one rules that it can't use.
#[tokio::test]
async fn a_process_that_refuses_new_rules_leaves_those_that_others_cached() {
    let redis = Server::start();
    let (mut server, tool) = prepared().await;
    tool.push_rules(&rules("gcra 1/1s"), "").await.expect("pushed");
    server
        .run(
            "CREATE ROLE newer LOGIN; CREATE ROLE older LOGIN; GRANT USAGE ON SCHEMA tollgate TO newer, older;
            GRANT SELECT ON ALL TABLES IN SCHEMA tollgate TO newer, older;
            ALTER TABLE tollgate.rate_limit_rules ENABLE ROW LEVEL SECURITY;
            CREATE POLICY newer ON tollgate.rate_limit_rules FOR SELECT TO newer USING (name <> 'unreadable');
            CREATE POLICY older ON tollgate.rate_limit_rules FOR SELECT TO older USING (true)",
        )
        .await;
    let by = |role: &str| Database::open(&server.url_of(role, "postgres")).expect("an address");
    let (by_newer, by_older) = (by("newer"), by("older"));
    let (newer, older) = (follow(&by_newer, &redis).await, follow(&by_older, &redis).await);
    server
        .run(
            r#"UPDATE tollgate.rate_limit_rules SET definition = definition || '{"limits": ["gcra 2/1s"]}';
            INSERT INTO tollgate.rate_limit_rules (name, place, definition)
                VALUES ('unreadable', 1, '{"name": "unreadable", "limits": ["of-the-future 1/1s"]}')"#,
        )
        .await;
    wait_until("one refuses them", async || older.status().failures == 1).await;
    wait_until("the other caches them", async || are_cached(&redis, "gcra 2/1s")).await;
    drop(newer);
    // After a write has failed, everything is written.
    set_maxmemory(&redis, "1");
    tool.block_user("666", None, None, "").await.expect("blocked");
    wait_until("the block is known", async || older.account_of_user("666").is_some()).await;
    let errors = || -> String { cmd("INFO").arg("errorstats").query(&mut redis.connection()).expect("errors") };
    wait_until("the write fails", async || errors().contains("errorstat_OOM")).await;
    let before = entry(&redis, ":head");
    set_maxmemory(&redis, "0");
    wait_until("everything is written", async || entry(&redis, ":head") != before).await;
    assert!(are_cached(&redis, "gcra 2/1s") && older.rules().definitions() == rules("gcra 1/1s").definitions());
    server.stop();
    let third = follow(&by_newer, &redis).await;
    assert!(third.status().is_from_cache && third.account_of_user("666").is_some());
    assert_eq!(third.rules().definitions(), rules("gcra 2/1s").definitions());
    // Once the rules can be used, they are cached.
    server.start_again();
    tool.push_rules(&rules("gcra 3/1s"), "").await.expect("pushed");
    wait_until("they are cached", async || are_cached(&redis, "gcra 3/1s")).await;
}

fn set_maxmemory(redis: &Server, bytes: &str) {
    let _: () = cmd("CONFIG").arg(&["SET", "maxmemory", bytes]).query(&mut redis.connection()).expect("set");
}

async fn configuration(server: &PostgresServer, column: &str) -> String {
    server.run(&format!("SELECT {column} FROM tollgate.configuration")).await.remove(0)
}

#[tokio::test]
async fn an_entry_that_somebody_else_wrote_is_refused_and_counted_and_postgres_decides() {
    let redis = Server::start();
    let (server, tool) = prepared().await;
    let (key, stored) = tool.create_key("42", &KeyTerms::default(), "").await.expect("made");
    let (other, other_stored) = tool.create_key("admin", &KeyTerms::default(), "").await.expect("made");
    let first = follow(&database(&server), &redis).await;
    assert!(first.account_of_key(key.secret()).await.is_ok() && first.account_of_key(other.secret()).await.is_ok());
    let [end, other_end] = [&stored, &other_stored].map(|stored| format!(":key:{}", stored.id));
    wait_until("they are cached", async || !entry(&redis, &end).is_empty() && !entry(&redis, &other_end).is_empty())
        .await;
    let sealed = entry(&redis, &end);
    let history = configuration(&server, "history::text").await;
    let content = String::from_utf8(sealed[32..].to_vec()).expect("JSON");
    let version: i64 = configuration(&server, "version").await.parse().expect("a number");
    let as_admin = content.replace("\"42\"", "\"admin\"");
    assert_ne!(as_admin, content);
    let largest = content.replace(&format!("\"version\":{version}"), &format!("\"version\":{}", i64::MAX));
    assert_ne!(largest, content);
    let none = format!("{{\"history\":\"{history}\",\"version\":{},\"key\":null}}", i64::MAX);
    let sealed_by = |mac: &[u8], content: &str| [mac, content.as_bytes()].concat();
    for entry_of_another in [
        sealed_by(&sealed[..32], &as_admin),
        sealed_by(&[0; 32], &as_admin),
        as_admin.clone().into_bytes(),
        sealed_by(&sealed[..32], &largest),
        sealed_by(&[0; 32], &none),
        none.into_bytes(),
        // Another id's, whole.
        entry(&redis, &other_end),
        Vec::new(),
        vec![0xff; 1 << 20],
    ] {
        put(&redis, &end, &entry_of_another);
        let second = follow(&database(&server), &redis).await;
        let account = second.account_of_key(key.secret()).await.expect("PostgreSQL has it");
        assert_eq!(account.user(), "42");
        assert_eq!((second.status().cache_refused, second.status().key_look_ups), (1, 1));
        wait_until("it is replaced", async || entry(&redis, &end) == sealed).await;
    }
    // With the seal in place, nobody asks.
    let second = follow(&database(&server), &redis).await;
    assert_eq!(second.account_of_key(key.secret()).await.expect("valid").user(), "42");
    assert_eq!((second.status().cache_refused, second.status().key_look_ups), (0, 0));
    // A revocation holds, even where an entry from before it is put back.
    tool.revoke_key(&stored.id, "").await.expect("revoked");
    wait_until("it is revoked", async || matches!(first.account_of_key(key.secret()).await, Err(ApiKeyError::Revoked)))
        .await;
    for _ in 0..3 {
        put(&redis, &end, &sealed);
        let third = follow(&database(&server), &redis).await;
        assert_eq!(third.account_of_key(key.secret()).await.expect_err("revoked"), ApiKeyError::Revoked);
        assert_eq!(first.account_of_key(key.secret()).await.expect_err("revoked"), ApiKeyError::Revoked);
    }
}

/// Of rules and users too, where a process can tell: it has been given the secret.
#[tokio::test]
async fn a_process_with_the_services_secret_verifies_all_that_it_starts_with() {
    let redis = Server::start();
    let (mut server, tool) = prepared().await;
    tool.push_rules(&rules("gcra 1/1s"), "").await.expect("pushed");
    tool.block_user("666", None, None, "").await.expect("blocked");
    tool.block_user("667", None, None, "").await.expect("blocked");
    let (key, _) = tool.create_key("42", &KeyTerms::default(), "").await.expect("made");
    let short = database(&server).cache_secret("15 bytes, short").expect_err("too short");
    assert_eq!(short.to_string(), "cache secret: expected at least 16 bytes, got 15");
    let with = |secret: &str| database(&server).cache_secret(secret).expect("long enough");
    let first = follow(&with("a secret by chance"), &redis).await;
    assert!(first.account_of_key(key.secret()).await.is_ok());
    wait_until("it is cached", async || are_cached(&redis, "gcra 1/1s") && name_of(&redis, ":key:*").is_some()).await;
    let limiter = || Limiter::new(Engine::open(&redis.tcp_url()).expect("an address"));
    let other = with("another secret, by chance");
    let (with, unaware) = (with("a secret by chance"), database(&server));
    server.stop();
    let second = with.follow(&limiter()).await.expect("a configuration");
    assert!(second.status().is_from_cache && second.account_of_user("666").is_some());
    wait_until("its key is accepted", async || second.account_of_key(key.secret()).await.is_ok()).await;
    // Without the secret: rules and users, and no key.
    let third = unaware.follow(&limiter()).await.expect("a configuration");
    assert!(third.status().is_from_cache && third.account_of_user("666").is_some() && third.rules().len() == 1);
    assert!(matches!(third.account_of_key(key.secret()).await, Err(ApiKeyError::Unavailable { .. })));
    assert!(other.follow(&limiter()).await.expect_err("refused").is_unreachable());
    // In a copy, which no process writes to.
    let copy = Server::start();
    let names: Vec<String> = redis.connection().keys("tollgate:{%c}:*").expect("names");
    for name in names {
        let entry: Vec<u8> = redis.connection().get(&name).expect("an entry");
        let _: () = copy.connection().set(name, entry).expect("set");
    }
    let limiter = || Limiter::new(Engine::open(&copy.tcp_url()).expect("an address"));
    let parts: Vec<String> = copy.connection().keys("tollgate:{%c}:*:users:*").expect("names");
    let parts: Vec<_> = parts.iter().filter_map(|name| Some(&name[name.find(":users:")?..])).collect();
    assert_eq!(parts.len(), 2, "{parts:?}");
    for end in [":rules", parts[0], ":head"] {
        let before = entry(&copy, end);
        let mut changed = before.clone();
        *changed.last_mut().expect("bytes") ^= 1;
        put(&copy, end, &changed);
        assert!(with.follow(&limiter()).await.expect_err(end).is_unreachable(), "{end}");
        put(&copy, end, &before);
    }
    // Another part's users, whole.
    let [one, other] = [parts[0], parts[1]].map(|end| entry(&copy, end));
    put(&copy, parts[0], &other);
    assert!(with.follow(&limiter()).await.is_err());
    put(&copy, parts[0], &one);
    assert!(with.follow(&limiter()).await.is_ok());
}

/// A key that a process has used, and how the name of its entry in Redis ends.
async fn cached_key(tool: &Database, redis: &Server) -> (NewKey, String) {
    let (key, stored) = tool.create_key("42", &KeyTerms::default(), "").await.expect("made");
    let service = follow(tool, redis).await;
    assert!(service.account_of_key(key.secret()).await.is_ok());
    let end = format!(":key:{}", stored.id);
    wait_until("it is cached", async || name_of(redis, &end).is_some()).await;
    (key, end)
}

/// As Redis may have it of a database that was restored to an earlier moment without a new history.
#[tokio::test]
async fn an_entry_of_a_version_that_the_database_does_not_have_is_not_used() {
    let redis = Server::start();
    let (server, tool) = prepared().await;
    let (key, _) = cached_key(&tool, &redis).await;
    server
        .run(
            "SET session_replication_role = replica;
            UPDATE tollgate.api_keys SET revoked_at = now(), version = 1;
            UPDATE tollgate.configuration SET version = 1",
        )
        .await;
    let second = follow(&database(&server), &redis).await;
    assert_eq!(second.account_of_key(key.secret()).await.expect_err("revoked"), ApiKeyError::Revoked);
}

/// Deletions are only kept for a day or so.
#[tokio::test]
async fn an_entry_of_a_key_that_was_deleted_long_ago_is_not_used() {
    let redis = Server::start();
    let (server, tool) = prepared().await;
    let (key, end) = cached_key(&tool, &redis).await;
    let before = entry(&redis, &end);
    server.run("DELETE FROM tollgate.api_keys").await;
    for user in ["1", "2", "3"] {
        server.run("UPDATE tollgate.versions SET made_at = made_at - interval '2 days'").await;
        tool.block_user(user, None, None, "").await.expect("blocked");
    }
    assert!(server.run("SELECT 1 FROM tollgate.deletions").await.is_empty());
    let second = follow(&database(&server), &redis).await;
    put(&redis, &end, &before);
    assert!(matches!(
        second.account_of_key(key.secret()).await,
        Err(ApiKeyError::Unknown | ApiKeyError::Unavailable { .. })
    ));
}

/// A process that reaches Redis again, and PostgreSQL not, writes what it knew of a key before.
#[tokio::test]
async fn a_change_that_is_written_late_replaces_no_later_one() {
    let redis = Server::start();
    let (server, tool) = prepared().await;
    let (key, stored) = tool.create_key("42", &KeyTerms::default(), "").await.expect("made");
    server.run("CREATE ROLE cut LOGIN SUPERUSER").await;
    let to_redis = Proxy::to(redis.port()).await;
    let limiter = Limiter::new(Engine::open(&to_redis.url()).expect("an address"));
    let cut = Database::open(&server.url_of("cut", "postgres")).expect("an address");
    let cut = cut.follow(&limiter).await.expect("a configuration");
    let other = follow(&database(&server), &redis).await;
    assert!(cut.account_of_key(key.secret()).await.is_ok() && other.account_of_key(key.secret()).await.is_ok());
    let end = format!(":key:{}", stored.id);
    let is_cached = |text: &str| {
        name_of(&redis, &end).is_some_and(|_| String::from_utf8_lossy(&entry(&redis, &end)).contains(text))
    };
    wait_until("it is cached", async || is_cached("\"revoked\":false")).await;
    to_redis.swallow(true);
    server.run("UPDATE tollgate.api_keys SET tier = 'paid'").await;
    wait_until("both know its tier", async || {
        let tier = async |service: &Configuration| {
            let account = service.account_of_key(key.secret()).await;
            account.is_ok_and(|account| account.paid_tier() == Some("paid"))
        };
        tier(&cut).await && tier(&other).await && is_cached("paid")
    })
    .await;
    server.run("ALTER ROLE cut NOLOGIN").await;
    server.run("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'cut'").await;
    wait_until("it is cut off", async || !cut.status().is_connected).await;
    tool.revoke_key(&stored.id, "").await.expect("revoked");
    // A table that was read just before the revocation holds the head back until it is read again.
    let version = format!("\"version\":{},", configuration(&server, "version").await);
    wait_until("the revocation and its version are cached", async || {
        is_cached("\"revoked\":true") && String::from_utf8_lossy(&entry(&redis, ":head")).contains(&version)
    })
    .await;
    let head = entry(&redis, ":head");
    to_redis.swallow(false);
    // It writes all that it has, keys last, and leaves what is newer.
    let written = || -> Option<String> {
        let counts: String = cmd("INFO").arg("commandstats").query(&mut redis.connection()).expect("counts");
        counts.lines().find(|line| line.starts_with("cmdstat_pexpire:")).map(ToOwned::to_owned)
    };
    let before = written();
    wait_until("what is there is prolonged", async || written() != before).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(is_cached("\"revoked\":true"), "{}", String::from_utf8_lossy(&entry(&redis, &end)));
    assert_eq!(String::from_utf8_lossy(&entry(&redis, ":head")), String::from_utf8_lossy(&head));
}

#[tokio::test]
async fn entries_under_an_earlier_secret_are_refused_and_replaced() {
    let redis = Server::start();
    let (server, tool) = prepared().await;
    tool.push_rules(&rules("gcra 1/1s"), "").await.expect("pushed");
    let (key, stored) = tool.create_key("42", &KeyTerms::default(), "").await.expect("made");
    let before = configuration(&server, "encode(cache_secret, 'hex')").await;
    assert_eq!(before.len(), 64, "32 bytes");
    let first = follow(&database(&server), &redis).await;
    assert!(first.account_of_key(key.secret()).await.is_ok());
    let end = format!(":key:{}", stored.id);
    wait_until("it is cached", async || are_cached(&redis, "gcra 1/1s") && !entry(&redis, &end).is_empty()).await;
    let old = [entry(&redis, ":rules"), entry(&redis, ":head"), entry(&redis, &end)];
    server.run("UPDATE tollgate.configuration SET cache_secret = DEFAULT").await;
    assert_ne!(configuration(&server, "encode(cache_secret, 'hex')").await, before);
    // One that starts then refuses what is there, and replaces it.
    let second = follow(&database(&server), &redis).await;
    assert_eq!(second.account_of_key(key.secret()).await.expect("PostgreSQL has it").user(), "42");
    assert!(second.status().cache_refused > 0 && second.status().key_look_ups == 1);
    wait_until("all is replaced", async || {
        [entry(&redis, ":rules"), entry(&redis, ":head"), entry(&redis, &end)].iter().zip(&old).all(|(a, b)| a != b)
    })
    .await;
    // The one from before takes the new secret, too: it uses what the other one has cached.
    wait_until("the first process verifies with it", async || {
        // A key that was just made is looked up within the limit of those that don't exist.
        let (fresh, stored) = tool.create_key("42", &KeyTerms::default(), "").await.expect("made");
        if second.account_of_key(fresh.secret()).await.is_err() {
            return false;
        }
        wait_until("it is cached", async || name_of(&redis, &format!(":key:{}", stored.id)).is_some()).await;
        let before = first.status().key_look_ups;
        first.account_of_key(fresh.secret()).await.is_ok() && first.status().key_look_ups == before
    })
    .await;
    let shown = format!("{:?}{:?}", database(&server), second);
    let secret = configuration(&server, "encode(cache_secret, 'hex')").await;
    assert!(!shown.contains(&secret) && shown.contains("cache_refused"), "{shown}");
}
