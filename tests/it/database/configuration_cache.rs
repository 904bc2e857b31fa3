//! The configuration in Redis: what a process starts with while PostgreSQL is away.

use std::time::Duration;

use tollgate::postgres::{ApiKeyError, KeyTerms, OwnLimits};
use tollgate::rules::RuleSet;
use tollgate::{Engine, Limiter};

use super::{database, limiter, prepared};
use crate::support::cluster::ClusterServers;
use crate::support::polling::wait_until;
use crate::support::redis_server::Server;

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
    assert!(keys.len() > 60, "{keys:?}");
    for key in keys {
        let ttl: i64 = tollgate::redis::cmd("PTTL").arg(&key).query(&mut redis.connection()).expect("a time");
        let most = if key.contains(":key:") { 600_000 } else { 300_000 };
        assert!(ttl > most - 60_000 && ttl <= most, "{key}: {ttl}");
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
    let limiter = || Limiter::new(Engine::open(&redis.tcp_url()).expect("an address"));
    drop(database(&server).follow(&limiter()).await.expect("a configuration"));
    let cached = || -> Vec<String> {
        tollgate::redis::cmd("KEYS").arg("tollgate:{%c}:*").query(&mut redis.connection()).expect("keys")
    };
    wait_until("it is cached", async || {
        let _keep = database(&server).follow(&limiter()).await.expect("a configuration");
        tokio::time::sleep(Duration::from_millis(50)).await;
        cached().len() == 67
    })
    .await;
    server.stop();
    let part = cached().into_iter().find(|key| key.ends_with(":users:7")).expect("a part");
    let some: u64 = tollgate::redis::cmd("DEL").arg(part).query(&mut redis.connection()).expect("gone");
    assert_eq!(some, 1);
    assert!(database(&server).follow(&limiter()).await.is_err());
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
