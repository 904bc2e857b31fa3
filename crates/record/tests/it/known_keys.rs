//! Ids of API keys that a process knows: keys that exist are looked up at once, whatever else is asked for.

use std::time::Instant;

use futures_util::future::join_all;
use tollgate::rules::ApiKeyError;
use tollgate_record::{Configuration, KeyTerms, Postgres as Database};
use tollgate_testing::api_keys::{Forger, made_up};
use tollgate_testing::polling::wait_until;
use tollgate_testing::record::{database, limiter, prepared};
use tollgate_testing::redis_server::{Server, patient};

async fn until_known(service: &Configuration, count: u64) {
    wait_until("the ids are known", async || service.status().keys_known == Some(count)).await;
}

async fn make(tool: &Database, user: &str) -> String {
    tool.create_key(user, &KeyTerms::default(), "").await.expect("made").0.secret().to_owned()
}

/// Random texts cost nothing, and keys that were deleted little; neither holds up keys that exist.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_valid_key_is_answered_after_a_start_whatever_else_is_asked_for() {
    const VALID: u64 = 500;
    let redis = Server::start();
    let (server, tool) = prepared().await;
    let mut valid = Vec::new();
    for number in 0..VALID {
        valid.push(make(&tool, &number.to_string()).await);
    }
    let forger = Forger::of(&server).await;
    // Each with a cache of its own.
    for (wait, prefix) in [(false, "a"), (true, "b")] {
        let limiter = patient(&redis.tcp_url());
        let limiter = limiter.to_builder().prefix(prefix).expect("a prefix").build();
        let service = database(&server).follow(&limiter).await.expect("a configuration");
        if wait {
            until_known(&service, VALID).await;
        }
        let strangers = join_all((0..1000).map(async |number| {
            assert_eq!(service.account_of_key(made_up(number)).await.expect_err("random"), ApiKeyError::Malformed);
        }));
        let deleted = join_all((0..1000).map(async |number| {
            let error = service.account_of_key(forger.unknown(number)).await.expect_err("no such key");
            assert!(matches!(error, ApiKeyError::Unknown | ApiKeyError::Unavailable { .. }), "{error}");
            u64::from(error == ApiKeyError::Unknown)
        }));
        let asked = join_all(valid.iter().map(|key| service.account_of_key(key)));
        let (_, deleted, answers) = tokio::join!(strangers, deleted, asked);
        for (answer, user) in answers.into_iter().zip(0..) {
            assert_eq!(answer.expect("valid").user(), format!("{user}"));
        }
        let looked_up = service.status().key_look_ups;
        assert_eq!(looked_up, VALID + deleted.iter().sum::<u64>(), "none of the random ones");
    }
}

#[tokio::test]
async fn ids_follow_the_database() {
    let (server, tool) = prepared().await;
    let first = make(&tool, "1").await;
    let service = database(&server).follow(&limiter()).await.expect("a configuration");
    until_known(&service, 1).await;
    // One that was just made is accepted, whether its id has come or not.
    let second = make(&tool, "2").await;
    assert_eq!(service.account_of_key(&second).await.expect("valid").user(), "2");
    until_known(&service, 2).await;
    // Renamed, which only somebody who has the secret makes a key of.
    let renamed = Forger::of(&server).await.unknown(7);
    let update = "UPDATE tollgate.api_keys SET key_id = $1";
    let update = update.replace("$1", &format!("'{}'", &renamed[3..15]));
    server.run(&format!("{update}, hash = sha256('{renamed}') WHERE key_id = '{}'", &first[3..15])).await;
    wait_until("it has another name", async || service.account_of_key(&renamed).await.is_ok()).await;
    until_known(&service, 2).await;
    assert_eq!(service.account_of_key(&first).await.expect_err("renamed"), ApiKeyError::Unknown);
    // Revoked: its id stays.
    tool.revoke_key(&second, "").await.expect("revoked");
    wait_until("it is revoked", async || matches!(service.account_of_key(&second).await, Err(ApiKeyError::Revoked)))
        .await;
    assert_eq!(service.status().keys_known, Some(2));
    server.run(&format!("DELETE FROM tollgate.api_keys WHERE key_id = '{}'", &second[3..15])).await;
    until_known(&service, 1).await;
    // Ids that no key of tollgate has count for nothing.
    server.run("INSERT INTO tollgate.api_keys (key_id, hash, user_id) VALUES ('by hand', sha256('x'), '1')").await;
    let third = make(&tool, "3").await;
    until_known(&service, 2).await;
    server.run("TRUNCATE tollgate.api_keys").await;
    until_known(&service, 0).await;
    assert_eq!(service.account_of_key(&third).await.expect_err("gone"), ApiKeyError::Unknown);
    // Restored to an earlier moment, where no trigger runs.
    server
        .run(&format!(
            "SET session_replication_role = replica;
            INSERT INTO tollgate.api_keys (key_id, hash, user_id, version)
                SELECT lpad(n::text, 12, '0'), sha256(n::text::bytea), 'u', 1 FROM generate_series(1, 30000) AS n;
            INSERT INTO tollgate.api_keys (key_id, hash, user_id, version)
                VALUES ('{}', sha256('{third}'), '3', 1);
            UPDATE tollgate.configuration SET history = gen_random_uuid(), version = 5",
            &third[3..15]
        ))
        .await;
    until_known(&service, 30_001).await;
    assert_eq!(service.account_of_key(&third).await.expect("restored").user(), "3");
}

/// Before a process has read them, and where nothing can be read.
#[tokio::test]
async fn a_process_that_starts_without_postgres_reads_the_ids_once_it_is_back() {
    let redis = Server::start();
    let (mut server, tool) = prepared().await;
    let limiter = || patient(&redis.tcp_url());
    let services = database(&server).cache_secret("32 bytes by chance, from a vault").expect("long enough");
    let (used, unused) = (make(&tool, "1").await, make(&tool, "2").await);
    let first = services.follow(&limiter()).await.expect("a configuration");
    assert!(first.account_of_key(&used).await.is_ok());
    server.stop();
    let mut second = None;
    wait_until("a restarted service serves", async || {
        second = services.follow(&limiter()).await.ok();
        second.is_some()
    })
    .await;
    let second = second.expect("it has started");
    wait_until("what is cached is accepted", async || second.account_of_key(&used).await.is_ok()).await;
    assert_eq!(second.status().keys_known, None);
    for other in [&unused, &made_up(7)] {
        let error = second.account_of_key(other).await.expect_err("nothing is known of it");
        assert!(matches!(error, ApiKeyError::Unavailable { .. }), "{error}");
    }
    server.start_again();
    until_known(&second, 2).await;
    wait_until("PostgreSQL is heard from", async || second.status().is_connected).await;
    assert!(second.account_of_key(&unused).await.is_ok());
    assert_eq!(second.account_of_key(made_up(7)).await.expect_err("made up"), ApiKeyError::Malformed);
}

/// Measures: `TOLLGATE_TEST_KEYS=1000000 cargo test --release ... a_start_with_many_keys -- --nocapture`.
#[tokio::test]
async fn a_start_with_many_keys_waits_for_none_of_their_ids() {
    let keys: u64 = std::env::var("TOLLGATE_TEST_KEYS").map_or(50_000, |keys| keys.parse().expect("a number"));
    let (server, tool) = prepared().await;
    server
        .run(&format!(
            "SET session_replication_role = replica;
            INSERT INTO tollgate.api_keys (key_id, hash, user_id, version)
                SELECT left(md5(n::text), 12), sha256(n::text::bytea), 'u' || n, 1 FROM generate_series(1, {keys}) AS n
                ON CONFLICT DO NOTHING;
            ANALYZE tollgate.api_keys"
        ))
        .await;
    let keys = server.run("SELECT count(*) FROM tollgate.api_keys").await[0].parse::<u64>().expect("a number");
    let before = resident_bytes();
    let began = Instant::now();
    let service = database(&server).follow(&limiter()).await.expect("a configuration");
    let started = began.elapsed();
    until_known(&service, keys).await;
    println!("{keys} keys: started after {started:?}, ids known after {:?}", began.elapsed());
    println!("resident memory grew by {} bytes a key", (resident_bytes().saturating_sub(before)) / keys);
    let key = make(&tool, "42").await;
    assert_eq!(service.account_of_key(&key).await.expect("valid").user(), "42");
    until_known(&service, keys + 1).await;
}

fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let kilobytes = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB"));
    kilobytes.and_then(|number| number.parse::<u64>().ok()).unwrap_or_default() * 1024
}
