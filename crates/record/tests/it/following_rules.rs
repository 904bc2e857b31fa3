//! Rules that follow the database: in every process, after each change, and after PostgreSQL was unreachable.

use std::time::Duration;

use tollgate::middleware::RateLimitLayer;
use tollgate::rules::RuleSet;
use tollgate_record::Configuration;
use tollgate_testing::polling::wait_until;
use tollgate_testing::postgres_server::PostgresServer;
use tollgate_testing::record::{database, limiter};
use tollgate_testing::rules::rule_set_of_one;
use tower::{Layer, ServiceExt, service_fn};

/// Waits until the rules have this limit; returns how long that took.
async fn until_in_force(rules: &Configuration, limit: &str) -> Duration {
    wait_until(limit, async || rules.rules().definitions()[0].limits[0].limit == limit).await
}

#[tokio::test]
async fn a_change_reaches_every_process_also_after_a_postgres_outage() {
    let mut server = PostgresServer::start();
    let tool = database(&server);
    tool.migrate().await.expect("made");
    tool.push_rules(&rule_set_of_one("gcra 1/1s"), "").await.expect("pushed");
    let services = [database(&server), database(&server)];
    let mut followed = Vec::new();
    for service in &services {
        followed.push(service.follow(&limiter()).await.expect("rules"));
    }
    let push = async |limit: &str| {
        tool.push_rules(&rule_set_of_one(limit), "").await.expect("pushed");
        let mut longest = Duration::ZERO;
        for rules in &followed {
            longest = longest.max(until_in_force(rules, limit).await);
        }
        longest
    };
    for number in 2..6 {
        let took = push(&format!("gcra {number}/1s")).await;
        println!("in force after {took:?}");
    }
    // It is heard of, and not only looked for every two seconds: most of them sooner, however busy the machine is.
    let mut soon = 0;
    for number in 100..120 {
        soon += u32::from(push(&format!("gcra {number}/1s")).await < Duration::from_millis(500));
    }
    assert!(soon >= 10, "{soon} of 20");
    push("gcra 5/1s").await;
    // Killed: the last rules serve, and say so.
    server.stop();
    for rules in &followed {
        wait_until("the connection is reported as lost", async || !rules.status().is_connected).await;
        assert_eq!(rules.rules().definitions()[0].limits[0].limit, "gcra 5/1s");
    }
    server.start_again();
    let took = push("gcra 9/1s").await;
    println!("after PostgreSQL was unreachable: in force after {took:?}");
    wait_until("they are connected", async || followed.iter().all(|rules| rules.status().is_connected)).await;
    assert!(followed.iter().all(|rules| rules.status().reloads == 26 && rules.status().failures == 0));
    // A user is no rule.
    server.run("INSERT INTO tollgate.user_quotas (user_id, blocked) VALUES ('42', true)").await;
    let newest: i64 = server.run("SELECT version FROM tollgate.configuration").await[0].parse().expect("a number");
    let followed_it = async || followed.iter().all(|rules| rules.status().version == newest);
    wait_until("the newest version", followed_it).await;
    assert!(followed.iter().all(|rules| rules.status().reloads == 26));
}

#[tokio::test]
async fn an_invalid_configuration_does_not_replace_the_one_in_force() {
    let server = PostgresServer::start();
    let tool = database(&server);
    assert!(tool.follow(&limiter()).await.expect_err("no tables").is_schema());
    tool.migrate().await.expect("made");
    tool.push_rules(&rule_set_of_one("gcra 1/1s"), "").await.expect("pushed");
    let rules = tool.follow(&limiter()).await.expect("rules");
    server.run("UPDATE tollgate.rate_limit_rules SET definition = '{\"name\": \"all\", \"limits\": [\"gcra\"]}'").await;
    wait_until("a failure", async || rules.status().failures > 0).await;
    assert_eq!((rules.status().reloads, rules.rules().definitions()[0].limits[0].limit.as_str()), (0, "gcra 1/1s"));
    tool.push_rules(&rule_set_of_one("gcra 2/1s"), "").await.expect("pushed");
    until_in_force(&rules, "gcra 2/1s").await;
    assert_eq!((rules.status().reloads, rules.status().failures), (1, 1));
}

/// A table that somebody has emptied is as an empty file: probably a mistake, which would allow everything.
#[tokio::test]
async fn an_emptied_table_changes_nothing() {
    let server = PostgresServer::start();
    let tool = database(&server);
    tool.migrate().await.expect("made");
    assert!(tool.follow(&limiter()).await.expect("no rules yet").rules().is_empty());
    let error = tool.push_rules(&RuleSet::default(), "").await.expect_err("no rules");
    assert_eq!(error.to_string(), "rules: the set has none, which would allow everything");
    for (times, empty) in ["DELETE FROM", "TRUNCATE", "UPDATE"].into_iter().enumerate() {
        tool.push_rules(&rule_set_of_one("gcra 1/1s"), "").await.expect("pushed");
        let rules = tool.follow(&limiter()).await.expect("rules");
        let more = if empty == "UPDATE" { "SET enabled = false" } else { "" };
        server.run(&format!("{empty} tollgate.rate_limit_rules {more}")).await;
        wait_until("it is refused", async || rules.status().failures == 1).await;
        assert_eq!((rules.rules().len(), rules.status().reloads), (1, 0), "{times}");
        let error = tool.follow(&limiter()).await.expect_err("no rules any more");
        assert_eq!(error.to_string(), "rules in the database: none is enabled, which would allow everything");
    }
}

/// A layer follows too, and dropping the rules closes the connection.
#[tokio::test]
async fn a_layer_decides_by_the_rules_in_force() {
    let server = PostgresServer::start();
    let tool = database(&server);
    tool.migrate().await.expect("made");
    tool.push_rules(&rule_set_of_one("fixed-window 1/1h"), "").await.expect("pushed");
    let rules = tool.follow(&limiter()).await.expect("rules");
    let layer = RateLimitLayer::new(limiter(), rules.clone());
    let ask = async || {
        let service = service_fn(|_: axum::http::Request<()>| async {
            Ok::<_, std::convert::Infallible>(axum::http::Response::new(axum::body::Body::empty()))
        });
        layer.layer(service).oneshot(axum::http::Request::new(())).await.expect("infallible").status().as_u16()
    };
    assert_eq!((ask().await, ask().await), (200, 429));
    tool.push_rules(&rule_set_of_one("fixed-window 2/1h"), "").await.expect("pushed");
    until_in_force(&rules, "fixed-window 2/1h").await;
    assert_eq!((ask().await, ask().await), (200, 429));
    let listening = async || {
        let sql = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'tollgate'";
        server.run(sql).await[0].parse::<u64>().expect("a number")
    };
    assert!(listening().await >= 1);
    drop((layer, rules, tool));
    let took = wait_until("the connection is closed", async || listening().await == 0).await;
    assert!(took < Duration::from_secs(10), "{took:?}");
}
