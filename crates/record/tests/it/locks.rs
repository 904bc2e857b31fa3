//! Locks that others hold, and changes at once: what they hold up, and who is named.

use std::time::{Duration, Instant, SystemTime};

use futures_util::future::join_all;
use tokio_postgres::{Client, NoTls};
use tollgate::rules::{Attributes, RuleSet};
use tollgate_record::history::{AuditQuery, StatsQuery, Width};
use tollgate_record::{KeyTerms, OwnLimits};
use tollgate_testing::alone::alone;
use tollgate_testing::api_keys::Forger;
use tollgate_testing::polling::wait_until;
use tollgate_testing::postgres_server::PostgresServer;
use tollgate_testing::record::{database, limiter, prepared};

fn rules(limit: &str) -> RuleSet {
    format!("[[rule]]\nname = \"all\"\nkey = \"global\"\nlimits = [\"{limit}\"]").parse().expect("rules")
}

/// Somebody who has done this in a transaction that doesn't end, and how errors name that.
async fn holder(server: &PostgresServer, sql: &str) -> (Client, String) {
    let (client, connection) = tokio_postgres::connect(&server.url(), NoTls).await.expect("connected");
    tokio::spawn(connection);
    client.batch_execute(&format!("SET application_name = 'holder'; BEGIN; {sql}")).await.expect("begun");
    let pid: i32 = client.query_one("SELECT pg_backend_pid()", &[]).await.expect("a number").get(0);
    (client, format!("the lock is held by pid {pid} (user tollgate, holder, in a transaction since 20"))
}

/// What is read names the holder, as what is changed does: the runbook begins with reading.
#[tokio::test]
async fn what_cannot_be_read_for_a_lock_names_its_holder() {
    let (server, tool) = prepared().await;
    let tables = "tollgate.user_quotas, tollgate.api_keys, tollgate.rate_limit_rules, tollgate.rate_limit_metrics,
        tollgate.rate_limit_audit_logs, tollgate.writers";
    let (_holder, named) = holder(&server, &format!("LOCK TABLE {tables}")).await;
    // Each on connections of its own.
    let tools = [(); 9].map(|()| database(&server));
    let (from, to) = (SystemTime::UNIX_EPOCH, SystemTime::now());
    let (stats, audit) = (StatsQuery::new(Width::Day, from, to), AuditQuery::new("42", from, to));
    let read = tokio::join!(
        async { tools[0].users().await.map(drop) },
        async { tools[1].user("42").await.map(drop) },
        async { tools[2].keys(None).await.map(drop) },
        async { tools[3].key("aaaaaaaaaaaa").await.map(drop) },
        async { tools[4].rules().await.map(drop) },
        async { tools[5].writers().await.map(drop) },
        async { tools[6].writer_counts().await.map(drop) },
        async { tools[7].stats(&stats).await.map(drop) },
        async { tools[8].audit(&audit).await.map(drop) },
    );
    let read = [read.0, read.1, read.2, read.3, read.4, read.5, read.6, read.7, read.8];
    for (at, read) in read.into_iter().enumerate() {
        let error = read.expect_err("locked").to_string();
        assert!(error.contains(&named), "{at}: {error}: {named}");
    }
    // A lock that nobody but this can take.
    let (_other, named) = holder(&server, "LOCK TABLE tollgate.migrations").await;
    let error = tool.schema().await.expect_err("locked").to_string();
    assert!(error.contains(&named), "{error}: {named}");
}

async fn newest(server: &PostgresServer) -> i64 {
    server.run("SELECT version FROM tollgate.configuration").await[0].parse().expect("a number")
}

#[test]
fn a_lock_on_one_table_holds_up_no_change_of_another() {
    let test = "locks::a_lock_on_one_table_holds_up_no_change_of_another";
    if let Some(text) = alone(test, &[]) {
        let expected = text.lines().find_map(|line| line.strip_prefix("expected: ")).expect("whose lock it is");
        let line =
            text.lines().find(|line| line.contains("changes cannot be read")).unwrap_or_else(|| panic!("{text}"));
        assert!(line.contains(expected), "{line}: {expected}");
        return;
    }
    tracing_subscriber::fmt().with_ansi(false).init();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let (server, tool) = prepared().await;
        tool.push_rules(&rules("gcra 1/1s"), "").await.expect("pushed");
        let (key, stored) = tool.create_key("42", &KeyTerms::default(), "").await.expect("made");
        let service = database(&server).follow(&limiter()).await.expect("a configuration");
        assert!(service.account_of_key(key.secret()).await.is_ok());
        let newest = async || newest(&server).await;
        let (holder_of_keys, named) = holder(&server, "LOCK TABLE tollgate.api_keys").await;
        println!("expected: {named}");
        tool.push_rules(&rules("gcra 2/1s"), "").await.expect("pushed");
        tool.block_user("42", None, None, "").await.expect("blocked");
        wait_until("rules and users are in force", async || {
            service.rules().definitions()[0].limits[0].limit == "gcra 2/1s" && service.account_of_user("42").is_some()
        })
        .await;
        assert!(service.status().is_connected && service.status().version < newest().await);
        // Once it has been tried again, which is logged no more.
        tokio::time::sleep(Duration::from_secs(3)).await;
        holder_of_keys.batch_execute("COMMIT").await.expect("committed");
        wait_until("everything is read", async || service.status().version == newest().await).await;
        let (_holder_of_rules, _) = holder(&server, "LOCK TABLE tollgate.rate_limit_rules, tollgate.user_quotas").await;
        tool.revoke_key(&stored.id, "").await.expect("revoked");
        wait_until("it is revoked", async || service.account_of_key(key.secret()).await.is_err()).await;
    });
}

/// The tables that every check of the version reads, and every change writes.
#[test]
fn a_lock_on_the_version_is_reported_with_its_holder() {
    let test = "locks::a_lock_on_the_version_is_reported_with_its_holder";
    if let Some(text) = alone(test, &[]) {
        let expected: Vec<_> = text.lines().filter_map(|line| line.strip_prefix("expected: ")).collect();
        assert_eq!(expected.len(), 2, "{text}");
        for named in expected {
            let is_it = |line: &&str| line.contains("changes cannot be read") && line.contains(named);
            assert_eq!(text.lines().filter(is_it).count(), 1, "{named}: {text}");
        }
        assert!(!text.contains("the connection was lost") && !text.contains("unreachable"), "{text}");
        return;
    }
    tracing_subscriber::fmt().with_ansi(false).init();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let (server, tool) = prepared().await;
        tool.push_rules(&rules("gcra 1/1s"), "").await.expect("pushed");
        let service = database(&server).follow(&limiter()).await.expect("a configuration");
        for table in ["configuration", "versions"] {
            let (holder, named) = holder(&server, &format!("LOCK TABLE tollgate.{table}")).await;
            println!("expected: {named}");
            let starting = database(&server);
            let mut error = starting.follow(&limiter()).await.expect_err("locked").to_string();
            // Who holds the lock is asked beside the wait for it, and may be answered too late.
            for _ in 0..4 {
                if !error.contains(&named) {
                    error = starting.follow(&limiter()).await.expect_err("locked").to_string();
                }
            }
            assert!(error.contains("lock timeout (SQLSTATE 55P03)") && error.contains(&named), "{error}: {named}");
            let error = tool.push_rules(&rules("gcra 2/1s"), "").await.expect_err("locked").to_string();
            assert!(error.contains("lock timeout (SQLSTATE 55P03)") && error.contains(&named), "{error}: {named}");
            assert!(service.status().is_connected);
            holder.batch_execute("COMMIT").await.expect("committed");
            let limit = format!("gcra {}/1s", table.len());
            tool.push_rules(&rules(&limit), "").await.expect("pushed");
            wait_until("it is in force", async || service.rules().definitions()[0].limits[0].limit == limit).await;
            // A lock that begins before everything is read is the same to the service.
            wait_until("everything is read", async || service.status().version == newest(&server).await).await;
        }
    });
}

/// A change that waits for the same row fails, and names the holder; others don't.
#[tokio::test]
async fn a_forgotten_commit_is_named_and_holds_up_no_change_of_another_user() {
    let (server, tool) = prepared().await;
    tool.set_user("42", Some("paid"), OwnLimits::default(), "").await.expect("set");
    let (_holder, named) = holder(&server, "UPDATE tollgate.user_quotas SET total_today = 9").await;
    let behind = async {
        let waiting = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'";
        wait_until("the first waits for the row", async || !server.run(waiting).await.is_empty()).await;
        tool.block_user("43", None, None, "").await
    };
    let (of_its_user, of_another) = tokio::join!(tool.block_user("42", None, None, ""), behind);
    of_another.expect("blocked");
    let error = of_its_user.expect_err("locked").to_string();
    assert!(error.contains("lock timeout (SQLSTATE 55P03)") && error.contains(&named), "{error}: {named}");
}

/// Where the database or the role has another isolation as its default, changes at once wait for each other too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn changes_at_once_succeed_at_any_default_isolation() {
    let (server, _) = prepared().await;
    server
        .run(
            "ALTER ROLE tollgate SET default_transaction_isolation = 'serializable';
            ALTER DATABASE postgres SET default_transaction_read_only = on",
        )
        .await;
    database(&server).migrate().await.expect("nothing to do");
    let changes = (0..8).map(|number| {
        let (tool, user) = (database(&server), (number % 3).to_string());
        tokio::spawn(async move {
            let service = tool.follow(&limiter()).await?;
            for round in 0..10 {
                tool.block_user(&user, None, None, "").await?;
                tool.push_rules(&rules(&format!("gcra {}/1s", round + number + 1)), "").await?;
                service.count(&Attributes::new().user("42"), true);
                service.finish().await?;
            }
            Ok::<_, tollgate_record::PostgresError>(())
        })
    });
    for changed in join_all(changes).await {
        changed.expect("no panic").expect("changed");
    }
    assert_eq!(database(&server).user("42").await.expect("an answer").expect("counted").total_today, 80);
}

/// A server doesn't notice that a client which waits has gone.
#[tokio::test]
async fn look_ups_that_were_given_up_end_at_the_server_too() {
    let (server, tool) = prepared().await;
    let service = database(&server).follow(&limiter()).await.expect("a configuration");
    let (key, _) = tool.create_key("42", &KeyTerms::default(), "").await.expect("made");
    let (_holder, _) = holder(&server, "LOCK TABLE tollgate.api_keys").await;
    assert!(service.account_of_key(key.secret()).await.is_err());
    wait_until("nothing waits for the lock any more", async || {
        let waiting = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%key_id = ANY%'";
        server.run(waiting).await.is_empty()
    })
    .await;
}

/// One query of a thousand ids waits; those that wait for the next have waited as long.
#[tokio::test]
async fn a_crowd_of_keys_waits_for_a_locked_table_together() {
    const KEYS: usize = 5000;
    let (server, tool) = prepared().await;
    let forger = Forger::of(&server).await;
    let keys: Vec<_> = (0..KEYS).map(|number| forger.unknown(number as u64)).collect();
    let rows: Vec<_> = keys.iter().map(|key| format!("('{}', sha256('{key}'), '42')", &key[3..15])).collect();
    server.run(&format!("INSERT INTO tollgate.api_keys (key_id, hash, user_id) VALUES {}", rows.join(","))).await;
    let service = tool.follow(&limiter()).await.expect("a configuration");
    wait_until("the ids are known", async || service.status().keys_known == Some(KEYS as u64)).await;
    let (holder, _) = holder(&server, "LOCK TABLE tollgate.api_keys").await;
    let began = Instant::now();
    let answers = join_all(keys.iter().map(|key| service.account_of_key(key))).await;
    assert!(answers.iter().all(Result::is_err));
    // One after another, they would take minutes.
    assert!(began.elapsed() < Duration::from_secs(60), "{:?}", began.elapsed());
    holder.batch_execute("COMMIT").await.expect("committed");
    // On a busy machine some of them may have to be asked again.
    let answer = async || join_all(keys.iter().map(|key| service.account_of_key(key))).await.iter().all(Result::is_ok);
    wait_until("all are answered", answer).await;
}

/// Changes wait for one another, and not with the connections that look-ups need.
#[tokio::test]
async fn changes_that_wait_hold_up_no_look_up() {
    let (server, tool) = prepared().await;
    let mut keys = Vec::new();
    for number in 0..5 {
        keys.push(tool.create_key(&number.to_string(), &KeyTerms::default(), "").await.expect("made").0);
    }
    let service = tool.follow(&limiter()).await.expect("a configuration");
    wait_until("the ids are known", async || service.status().keys_known == Some(5)).await;
    let (_holder, _) = holder(&server, "SELECT 1 FROM tollgate.configuration FOR UPDATE").await;
    for number in 0..8 {
        let tool = tool.clone();
        tokio::spawn(async move { tool.block_user(&number.to_string(), None, None, "").await });
    }
    let waiting = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'";
    wait_until("changes wait", async || !server.run(waiting).await.is_empty()).await;
    for key in &keys {
        service.account_of_key(key.secret()).await.expect("looked up");
    }
}
