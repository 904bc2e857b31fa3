//! The axum example on the database: several processes, whose configuration changes, with PostgreSQL killed between.

use std::time::{Duration, Instant};

use tollgate::rules::RuleSet;
use tollgate_record::{KeyTerms, Writer, Written};
use tollgate_testing::polling::{block_until, wait_until};
use tollgate_testing::record::prepared;
use tollgate_testing::redis_server::Server;

use crate::example_service::{Running, call, start};

fn service(redis: &Server, database: &str) -> Running {
    start(
        "service",
        Some(&redis.tcp_url()),
        &[
            ("TOLLGATE_DATABASE", database),
            ("TOLLGATE_CACHE_SECRET", "32 bytes by chance, from a vault"),
            ("RULES", "none"),
        ],
    )
}

/// Blocks until this holds in all of them; returns how long that took, which is 15 seconds at most.
fn block_until_all(what: &str, services: &[Running], holds: impl Fn(&str) -> bool) -> Duration {
    let took = block_until(what, || services.iter().all(|service| holds(&service.address)));
    assert!(took < Duration::from_secs(15), "{what}: after {took:?}");
    took
}

fn rules(limit: &str) -> RuleSet {
    let text = format!("[[rule]]\nname = \"all\"\nkey = \"user\"\nlimits = [\"{limit}\"]\nmissing = \"skip\"\n");
    text.parse().expect("rules")
}

#[tokio::test]
async fn two_services_follow_what_is_changed() {
    let redis = Server::start();
    let (mut server, tool) = prepared().await;
    let url = server.url();
    let push = async |limit: &str| tool.push_rules(&rules(limit), "").await.expect("pushed");
    push("fixed-window 1000/1h").await;
    let (key, stored) = tool.create_key("42", &KeyTerms::default(), "").await.expect("made");
    let services = [(); 2].map(|()| service(&redis, &url));
    let bearer = format!("X-Api-Key: {}\r\n", key.secret());
    let status_of = |address: &str, headers: &str| call(address, "GET /", headers).0;
    let limit_of = |address: &str| {
        let (_, text) = call(address, "GET /", "X-User: 1\r\n");
        text.lines()
            .find_map(|line| line.strip_prefix("ratelimit-policy: \"all\";q=")?.split(';').next())
            .map(str::to_owned)
    };
    for round in 0..2 {
        let user = format!("user-{round}");
        let named = format!("X-User: {user}\r\n");
        assert!(services.iter().all(|service| status_of(&service.address, &named) == 200));
        assert!(services.iter().all(|service| status_of(&service.address, &bearer) == 200));
        if round == 1 {
            // Killed, with all requests in flight.
            server.stop();
            block_until_all("PostgreSQL is missed", &services, |address| {
                call(address, "GET /status", "").1.contains("is_connected: false")
            });
            assert!(services.iter().all(|service| status_of(&service.address, &named) == 200), "decisions go on");
            assert!(services.iter().all(|service| status_of(&service.address, &bearer) == 200), "keys, too");
            // A service that starts now, or as soon as the last change is in Redis.
            let mut again = service(&redis, &url);
            block_until("the last change is in Redis", || {
                let has_it = limit_of(&again.address) == limit_of(&services[0].address);
                if !has_it {
                    again = service(&redis, &url);
                }
                has_it
            });
            assert_eq!((status_of(&again.address, &named), status_of(&again.address, &bearer)), (200, 200));
            assert!(call(&again.address, "GET /status", "").1.contains("is_from_cache: true"));
            server.start_again();
        }
        let limit = (1001 + round).to_string();
        push(&format!("fixed-window {limit}/1h")).await;
        let pushed =
            block_until_all("the rule is in force", &services, |address| limit_of(address).as_deref() == Some(&limit));
        tool.block_user(&user, Some("spam"), None, "").await.expect("blocked");
        let blocked = block_until_all("the user is blocked", &services, |address| status_of(address, &named) == 403);
        println!("in force in both: a rule {pushed:?}, a block {blocked:?}");
    }
    tool.revoke_key(&stored.id, "").await.expect("revoked");
    let revoked = block_until_all("the key is revoked", &services, |address| status_of(address, &bearer) == 401);
    println!("in force in both: a revoked key {revoked:?}");
    let (_, metrics) = call(&services[0].address, "GET /metrics", "");
    assert!(metrics.contains("\ntollgate_api_keys_total{outcome=\"revoked\"} "), "{metrics}");
    assert!(metrics.contains("\ntollgate_api_keys_total{outcome=\"valid\"} "), "{metrics}");
    // Each connection that had been open is found out to be lost in its turn, and counts until the next has been made.
    block_until_all("PostgreSQL is connected", &services[..1], |address| {
        call(address, "GET /metrics", "").1.contains("\ntollgate_database_connected 1\n")
    });
}

/// What was decided until a service was killed at a random moment is counted, but for the last batch: its end is
/// reported.
#[tokio::test]
async fn a_service_that_is_killed_loses_its_last_batch_at_most() {
    let redis = Server::start();
    let (server, database) = prepared().await;
    let mut killed = service(&redis, &server.url());
    let began = Instant::now();
    let length = Duration::from_millis(5000 + u64::from(std::process::id()) % 900);
    let mut answered = Vec::new();
    while began.elapsed() < length {
        assert_eq!(call(&killed.address, "GET /", "X-User: 42\r\n").0, 200);
        answered.push(Instant::now());
    }
    killed.child.kill().expect("killed");
    let end = Instant::now();
    let total = database.user("42").await.expect("an answer").expect("known").total_today;
    let total = usize::try_from(total).expect("a number");
    // A batch is written every second or so, and that takes a while where other tests run.
    let batch = answered.iter().filter(|at| end - **at < Duration::from_secs(4)).count();
    let rows = "SELECT count(*) FROM tollgate.rate_limit_audit_logs WHERE user_id = '42' AND status = 200";
    let rows: usize = server.run(rows).await[0].parse().expect("a number");
    println!("{} requests, {total} counted, {rows} recorded", answered.len());
    for written in [total, rows] {
        assert!(
            written <= answered.len() && written >= answered.len() - batch,
            "{written} of {}, {batch}",
            answered.len()
        );
    }
    // Half a minute later, another service reports it.
    server.run("UPDATE tollgate.writers SET written_at = written_at - interval '1 minute'").await;
    let other = service(&redis, &server.url());
    wait_until("it is reported", async || {
        database.writers().await.expect("writers").iter().filter(|writer| writer.killed).count() == 2
    })
    .await;
    let writers = database.writers().await.expect("writers");
    for (writes, requests) in [(Written::Totals, total), (Written::History, rows)] {
        let is_it = |writer: &Writer| writer.killed && writer.writes == writes && writer.requests == requests as u64;
        assert!(writers.iter().any(is_it), "{writers:?}");
    }
    // One that is stopped cleanly loses nothing.
    for _ in 0..50 {
        assert_eq!(call(&other.address, "GET /", "X-User: 43\r\n").0, 200);
    }
    let mut other = other;
    let _ = std::process::Command::new("kill").args(["-INT", &other.child.id().to_string()]).status();
    assert!(other.child.wait().expect("its end").success());
    assert_eq!(database.user("43").await.expect("an answer").expect("known").total_today, 50);
    let rows = "SELECT count(*) || ' ' || min(endpoint) FROM tollgate.rate_limit_audit_logs WHERE user_id = '43'";
    assert_eq!(server.run(rows).await, ["50 /"]);
}
