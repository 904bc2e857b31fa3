//! The configuration in Redis: what a process starts with while PostgreSQL is unreachable.

use std::time::Duration;

use tollgate::rules::{ApiKeyError, RuleSet};
use tollgate::{Engine, Limiter};
use tollgate_record::{KeyTerms, OwnLimits};
use tollgate_testing::cluster::ClusterServers;
use tollgate_testing::polling::wait_until;
use tollgate_testing::record::{database, limiter, prepared};
use tollgate_testing::redis_server::Server;

fn rules() -> RuleSet {
    "ignore_case = true\n[[rule]]\nname = \"all\"\nkey = \"user\"\nlimits = [\"gcra 7/1s\"]".parse().expect("rules")
}

/// Of a whole configuration, of services that share a secret, by the Redis or the cluster at this address.
async fn a_restart_is_served_from(url: &str) {
    let (mut server, tool) = prepared().await;
    tool.push_rules(&rules(), "").await.expect("pushed");
    let mut own = OwnLimits::default();
    own.per_hour = Some(9);
    tool.set_user("42", Some("paid"), own, "").await.expect("set");
    tool.block_user("666", Some("fraud"), None, "").await.expect("blocked");
    let (used, _) = tool.create_key("42", &KeyTerms::default(), "").await.expect("made");
    let (unused, _) = tool.create_key("42", &KeyTerms::default(), "").await.expect("made");
    let limiter = || Limiter::new(Engine::open(url).expect("an address"));
    let services = database(&server).cache_secret("32 bytes by chance, from a vault").expect("long enough");
    let first = services.follow(&limiter()).await.expect("a configuration");
    assert!(first.account_of_key(used.secret()).await.is_ok());
    tool.block_user("667", None, None, "").await.expect("blocked");
    wait_until("the last change is taken", async || first.account_of_user("667").is_some()).await;
    server.stop();
    // As soon as Redis has the last change.
    let mut again = None;
    wait_until("a restarted service serves", async || {
        again = services.follow(&limiter()).await.ok().filter(|again| again.account_of_user("667").is_some());
        again.is_some()
    })
    .await;
    let again = again.expect("it has started");
    let status = again.status();
    assert!(status.is_from_cache && !status.is_connected && status.version == first.status().version, "{status:?}");
    assert_eq!(again.rules().definitions(), rules().definitions());
    let user = again.account_of_user("42").expect("known");
    assert_eq!(user.paid_tier(), Some("paid"));
    assert_eq!(format!("{user:?}"), format!("{:?}", first.account_of_user("42").expect("known")));
    let block = again.account_of_user("666").expect("known").block().cloned().expect("blocked");
    assert_eq!(block.reason.as_deref(), Some("fraud"));
    // Of keys, those that somebody has used.
    wait_until("the key is cached", async || again.account_of_key(used.secret()).await.is_ok()).await;
    let unused = async || again.account_of_key(unused.secret()).await;
    assert!(matches!(unused().await, Err(ApiKeyError::Unavailable { .. })));
    server.start_again();
    wait_until("PostgreSQL is heard from", async || again.status().is_connected).await;
    assert!(!again.status().is_from_cache && unused().await.is_ok());
    tool.unblock_user("666", "").await.expect("unblocked");
    wait_until("a change is taken", async || again.account_of_user("666").is_none()).await;
}

#[tokio::test]
async fn a_restart_without_postgres_is_served_from_redis() {
    let redis = Server::start();
    a_restart_is_served_from(&redis.tcp_url()).await;
    // Each of its keys expires.
    let keys: Vec<String> =
        tollgate::redis::cmd("KEYS").arg("tollgate:{%c}:*").query(&mut redis.connection()).expect("keys");
    assert!(keys.len() > 4, "{keys:?}");
    for key in keys {
        let ttl: i64 = tollgate::redis::cmd("PTTL").arg(&key).query(&mut redis.connection()).expect("a time");
        let most = if key.contains(":key:") { 600_000 } else { 300_000 };
        // Users that were replaced expire within ten seconds.
        let is_replaced = key.contains(":users:") && ttl <= 10_000;
        assert!(is_replaced || ttl > most - 60_000 && ttl <= most, "{key}: {ttl}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_without_postgres_is_served_from_a_cluster() {
    let cluster = ClusterServers::of_primaries();
    a_restart_is_served_from(&cluster.url()).await;
}

#[tokio::test]
async fn without_postgres_and_without_a_cache_a_process_does_not_start() {
    let redis = Server::start();
    let (mut server, _) = prepared().await;
    server.stop();
    let with_redis = Limiter::new(Engine::open(&redis.tcp_url()).expect("an address"));
    for limiter in [limiter(), with_redis] {
        let error = database(&server).follow(&limiter).await.expect_err("nothing");
        assert!(error.is_unreachable(), "{error}");
    }
    // Half of a cache is none.
    server.start_again();
    database(&server).block_user("42", None, None, "").await.expect("blocked");
    let limiter = || Limiter::new(Engine::open(&redis.tcp_url()).expect("an address"));
    let service = database(&server).follow(&limiter()).await.expect("a configuration");
    let cached = || -> Vec<String> {
        tollgate::redis::cmd("KEYS").arg("tollgate:{%c}:*").query(&mut redis.connection()).expect("keys")
    };
    // The head is written last.
    wait_until("it is cached", async || cached().iter().any(|key| key.ends_with(":head"))).await;
    drop(service);
    server.stop();
    assert!(database(&server).follow(&limiter()).await.is_ok(), "the whole cache is one");
    let part = cached().into_iter().find(|key| key.contains(":users:")).expect("a part");
    let some: u64 = tollgate::redis::cmd("DEL").arg(part).query(&mut redis.connection()).expect("gone");
    assert_eq!(some, 1);
    assert!(database(&server).follow(&limiter()).await.is_err());
}

/// How many values Redis has been told so far, and how many bytes it has got.
fn written(redis: &Server) -> (u64, u64) {
    let number = |section: &str, before: &str| -> u64 {
        let info: String = tollgate::redis::cmd("INFO").arg(section).query(&mut redis.connection()).expect("numbers");
        let (_, rest) = info.split_once(before).unwrap_or(("", "0"));
        rest.split(|c: char| !c.is_ascii_digit()).next().and_then(|digits| digits.parse().ok()).expect("a number")
    };
    (number("commandstats", "cmdstat_set:calls="), number("stats", "total_net_input_bytes:"))
}

#[tokio::test]
async fn users_are_written_to_redis_once_and_then_the_part_that_changed() {
    let redis = Server::start();
    let (server, tool) = prepared().await;
    tool.push_rules(&rules(), "").await.expect("pushed");
    server
        .run(
            "INSERT INTO tollgate.user_quotas (user_id, blocked, blocked_reason)
            SELECT 'user-' || n, true, repeat(md5(n::text), 10) FROM generate_series(1, 5000) AS n",
        )
        .await;
    let limiter = || Limiter::new(Engine::open(&redis.tcp_url()).expect("an address"));
    let head = || -> (String, Option<Vec<u8>>) {
        let mut connection = redis.connection();
        let keys: Vec<String> =
            tollgate::redis::cmd("KEYS").arg("tollgate:{%c}:*:head").query(&mut connection).expect("keys");
        let name = keys.first().cloned().unwrap_or_default();
        (name.clone(), tollgate::redis::cmd("GET").arg(name).query(&mut connection).expect("a value"))
    };
    let first = database(&server).follow(&limiter()).await.expect("a configuration");
    wait_until("it is cached", async || head().1.is_some()).await;
    // Another process finds everything there, and a change is one part, not the two megabytes of all.
    let second = database(&server).follow(&limiter()).await.expect("a configuration");
    let (sets, bytes) = written(&redis);
    let (_, before) = head();
    tool.block_user("user-7", None, None, "").await.expect("blocked");
    wait_until("the change is cached", async || head().1 != before).await;
    wait_until("both processes are done", async || {
        first.status().version == second.status().version && head().1 != before
    })
    .await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    let (sets, bytes) = (written(&redis).0 - sets, written(&redis).1 - bytes);
    assert!(sets <= 4, "a part and a head for each process: {sets}");
    assert!(bytes < 400_000, "{bytes}");
    // What is about to expire is prolonged, and what has expired is written again.
    let keys = || -> Vec<String> {
        tollgate::redis::cmd("KEYS").arg("tollgate:{%c}:*").query(&mut redis.connection()).expect("keys")
    };
    let part = keys().into_iter().filter(|key| key.contains(":users:")).min().expect("a part");
    let _: u64 = tollgate::redis::cmd("DEL").arg(&part).query(&mut redis.connection()).expect("gone");
    for key in keys() {
        let _: u64 = tollgate::redis::cmd("PEXPIRE").arg(key).arg(60_000).query(&mut redis.connection()).expect("set");
    }
    let (sets, _) = written(&redis);
    let third = database(&server).follow(&limiter()).await.expect("a configuration");
    let left =
        |key: &str| -> i64 { tollgate::redis::cmd("PTTL").arg(key).query(&mut redis.connection()).expect("a time") };
    wait_until("the head is prolonged", async || left(&head().0) > 200_000).await;
    let (again, prolonged) = (left(&part), keys().iter().filter(|key| left(key) > 200_000).count());
    assert!(again > 200_000 && prolonged > 900, "{again} {prolonged}");
    let sets = written(&redis).0 - sets;
    assert!(sets <= 5, "the part, rules and a head: {sets}");
    assert_eq!(third.status().users_read, 5000);
}

/// Each process writes only over what it has read, so that the newest version stands, whoever writes last.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_many_processes_that_write_at_once_the_newest_version_stands() {
    let redis = Server::start();
    let (server, tool) = prepared().await;
    let limiter = || Limiter::new(Engine::open(&redis.tcp_url()).expect("an address"));
    let mut services = Vec::new();
    for _ in 0..6 {
        services.push(database(&server).follow(&limiter()).await.expect("a configuration"));
    }
    for number in 0..10 {
        let limits = format!("[[rule]]\nname = \"all\"\nkey = \"global\"\nlimits = [\"gcra {}/1s\"]", number + 1);
        tool.push_rules(&limits.parse().expect("rules"), "").await.expect("pushed");
        tool.block_user("42", Some(&number.to_string()), None, "").await.expect("blocked");
    }
    let newest: i64 = server.run("SELECT version FROM tollgate.configuration").await[0].parse().expect("a number");
    wait_until("all follow", async || services.iter().all(|service| service.status().version == newest)).await;
    let head = || -> Vec<String> {
        let mut connection = redis.connection();
        let keys: Vec<String> =
            tollgate::redis::cmd("KEYS").arg("tollgate:{%c}:*head").query(&mut connection).expect("keys");
        let value = |key| tollgate::redis::cmd("GET").arg(key).query::<Vec<u8>>(&mut connection).expect("a value");
        keys.iter().map(value).map(|value| String::from_utf8_lossy(&value).into_owned()).collect()
    };
    let is_newest = |head: &String| {
        let (_, version) = head.split_once("\"version\":").expect("a head");
        version.trim_end_matches(|c: char| !c.is_ascii_digit()).starts_with(&newest.to_string())
    };
    wait_until("the newest is cached", async || head().iter().any(is_newest)).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(head().iter().any(is_newest), "{:?}: {newest}", head());
}

/// An unreachable Redis stops no process.
#[tokio::test]
async fn a_configuration_needs_no_redis() {
    let (server, tool) = prepared().await;
    tool.push_rules(&rules(), "").await.expect("pushed");
    let (key, _) = tool.create_key("42", &KeyTerms::default(), "").await.expect("made");
    let limiter = Limiter::new(Engine::open("redis://127.0.0.1:1").expect("an address"));
    let service = database(&server).follow(&limiter).await.expect("a configuration");
    assert_eq!((service.rules().len(), service.account_of_key(key.secret()).await.is_ok()), (1, true));
    tool.revoke_key(key.secret(), "").await.expect("revoked");
    wait_until("it is revoked", async || service.account_of_key(key.secret()).await.is_err()).await;
}
