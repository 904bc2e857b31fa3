//! What keeps a process from its database, at its start: it begins with what others have cached, and says why.

use tollgate::rules::RuleSet;
use tollgate::{Engine, Limiter};
use tollgate_record::{Configuration, Postgres};
use tollgate_testing::alone::alone;
use tollgate_testing::polling::wait_until;
use tollgate_testing::postgres_server::PostgresServer;
use tollgate_testing::record::prepared;
use tollgate_testing::redis_server::Server;

fn rules() -> RuleSet {
    "[[rule]]\nname = \"all\"\nkey = \"global\"\nlimits = [\"gcra 7/1s\"]".parse().expect("rules")
}

/// A service's role, by a password.
const ROLE: &str = "
    CREATE ROLE service LOGIN PASSWORD 'sesame';
    GRANT USAGE ON SCHEMA tollgate TO service;
    GRANT SELECT ON ALL TABLES IN SCHEMA tollgate TO service";

fn limiter(redis: &Server) -> Limiter {
    Limiter::new(Engine::open(&redis.tcp_url()).expect("an address"))
}

fn database_of(server: &PostgresServer, user: &str) -> Postgres {
    let database = Postgres::open(&server.url_of(user, "postgres")).expect("an address");
    database.cache_secret("32 bytes by chance, from a vault").expect("long enough")
}

/// A database with a rule and a role, and a service that has cached its configuration.
async fn cached(redis: &Server) -> (PostgresServer, Configuration) {
    let (server, tool) = prepared().await;
    tool.push_rules(&rules(), "").await.expect("pushed");
    server.run(ROLE).await;
    server.let_in("host all service all scram-sha-256").await;
    let first = database_of(&server, "tollgate").follow(&limiter(redis)).await.expect("a configuration");
    let cached = || -> Vec<String> {
        tollgate::redis::cmd("KEYS").arg("tollgate:{%c}:*:head").query(&mut redis.connection()).expect("keys")
    };
    wait_until("it is cached", async || !cached().is_empty()).await;
    (server, first)
}

/// A service starts from the cache and says why; once that is over, it reads the database.
async fn starts_from_the_cache(server: &PostgresServer, redis: &Server, state: &str) -> Configuration {
    let mut service = None;
    // What was changed takes a moment to be in force at the server.
    wait_until(state, async || {
        let started = database_of(server, "service:sesame").follow(&limiter(redis)).await;
        let started = started.unwrap_or_else(|error| panic!("{state}: {error}"));
        service = Some(started).filter(|service| service.status().is_from_cache);
        service.is_some()
    })
    .await;
    let service = service.expect("it has started");
    let outage = service.outage().map(|error| error.to_string()).unwrap_or_default();
    assert!(outage.contains(&format!("(SQLSTATE {state})")), "{outage}: {state}");
    assert!(!outage.contains("sesame") && !service.status().is_connected, "{outage}");
    assert_eq!(service.rules().definitions(), rules().definitions());
    service
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_starts_from_the_cache_whatever_keeps_it_from_the_database() {
    let redis = Server::start();
    let (mut server, first) = cached(&redis).await;
    for (state, make, undo) in [
        ("28P01", "ALTER ROLE service PASSWORD 'another'", "ALTER ROLE service PASSWORD 'sesame'"),
        ("28000", "ALTER ROLE service NOLOGIN", "ALTER ROLE service LOGIN"),
        ("42501", "REVOKE USAGE ON SCHEMA tollgate FROM service", "GRANT USAGE ON SCHEMA tollgate TO service"),
        (
            "42501",
            "REVOKE SELECT ON tollgate.user_quotas FROM service",
            "GRANT SELECT ON tollgate.user_quotas TO service",
        ),
        ("53300", "ALTER ROLE service CONNECTION LIMIT 0", "ALTER ROLE service CONNECTION LIMIT -1"),
        ("55000", "ALTER DATABASE postgres ALLOW_CONNECTIONS false", "ALTER DATABASE postgres ALLOW_CONNECTIONS true"),
    ] {
        // Of grants, those of this database.
        let place = if state == "55000" { "template1" } else { "postgres" };
        server.run_in(place, make).await;
        let service = starts_from_the_cache(&server, &redis, state).await;
        server.run_in(place, undo).await;
        wait_until("the database is heard from", async || service.status().is_connected).await;
        assert!(!service.status().is_from_cache && service.outage().is_none(), "{state}: {:?}", service.status());
    }
    // A replica, and a server that recovers to some moment.
    server.stop();
    server.recovers(true);
    server.start_again();
    let service = starts_from_the_cache(&server, &redis, "25006").await;
    server.stop();
    server.recovers(false);
    server.start_again();
    wait_until("the database is heard from", async || service.status().is_connected).await;
    wait_until("by both", async || first.status().is_connected).await;
}

/// What a cache can't mend: tables of another version, and rules that can't be used.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cache_stands_in_for_no_database_that_answers_with_something_wrong() {
    let redis = Server::start();
    let (server, _first) = cached(&redis).await;
    let starts = async || database_of(&server, "tollgate").follow(&limiter(&redis)).await;
    server.run("INSERT INTO tollgate.migrations VALUES (99, 'future', 'x')").await;
    let error = starts().await.expect_err("newer tables");
    assert!(error.is_schema(), "{error}");
    server.run("DELETE FROM tollgate.migrations WHERE number = 99").await;
    server.run("UPDATE tollgate.rate_limit_rules SET definition = '{\"name\": \"all\", \"limits\": 7}'").await;
    let error = starts().await.expect_err("no rules");
    assert!(error.is_input(), "{error}");
}

/// A server that is back and then rejects the password has another reason than before, which is logged too.
#[test]
fn a_rejected_password_is_an_error_in_the_log_also_where_the_server_was_away_before() {
    let test =
        "starts_without_database::a_rejected_password_is_an_error_in_the_log_also_where_the_server_was_away_before";
    if let Some(text) = alone(test, &[]) {
        let line = |level: &str, words: [&str; 2]| {
            let is_it = |line: &&str| line.contains(level) && words.iter().all(|word| line.contains(word));
            assert_eq!(text.lines().filter(is_it).count(), 1, "{level} {words:?}: {text}");
        };
        line("WARN", ["the configuration cached in Redis is in force", "reason=\"unreachable\""]);
        line("ERROR", ["the last rules stay in force", "reason=\"denied\""]);
        assert!(text.contains("(SQLSTATE 28P01)") && !text.contains("sesame"), "{text}");
        return;
    }
    tracing_subscriber::fmt().with_ansi(false).init();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let redis = Server::start();
        let (mut server, first) = cached(&redis).await;
        drop(first);
        server.run("ALTER ROLE service PASSWORD 'another'").await;
        server.stop();
        let service = database_of(&server, "service:sesame").follow(&limiter(&redis)).await.expect("from the cache");
        assert!(service.status().is_from_cache);
        server.start_again();
        wait_until("the password is rejected", async || {
            service.outage().is_some_and(|error| error.to_string().contains("28P01"))
        })
        .await;
        // Tried again, which is logged no more.
        let rejected = |log: &str| log.matches("password authentication failed").count();
        wait_until("it is rejected again", async || rejected(&server.log()) > 3).await;
    });
}
