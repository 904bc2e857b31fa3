//! Each index is there for a query, which uses it: as PostgreSQL's own plans say, of tables that are large enough.

use std::collections::BTreeSet;
use std::time::{Duration, SystemTime};

use tollgate::rules::{Account, Attributes};
use tollgate_record::history::{AuditQuery, StatsQuery, Width};
use tollgate_record::{KeyTerms, OwnLimits};
use tollgate_testing::polling::wait_until;
use tollgate_testing::postgres_server::PostgresServer;
use tollgate_testing::record::{database, limiter};

#[tokio::test]
async fn each_index_is_used_by_a_query() {
    let server = PostgresServer::start();
    // Plans of all that is run from here on, in the server's log.
    for setting in [
        "session_preload_libraries = 'auto_explain'",
        "auto_explain.log_min_duration = 0",
        "auto_explain.log_nested_statements = on",
    ] {
        server.run(&format!("ALTER DATABASE postgres SET {setting}")).await;
    }
    let tool = database(&server);
    tool.migrate().await.expect("made");
    server
        .run(
            "INSERT INTO tollgate.user_quotas (user_id, tier) SELECT 'u' || n, CASE WHEN n % 50 = 0 THEN 'paid' END
                FROM generate_series(1, 20000) AS n;
            INSERT INTO tollgate.api_keys (key_id, hash, user_id)
                SELECT lpad(n::text, 12, '0'), sha256(n::text::bytea), 'u' || n FROM generate_series(1, 20000) AS n;
            INSERT INTO tollgate.deletions (version, user_id) SELECT 0, 'u' || n FROM generate_series(1, 5000) AS n;
            INSERT INTO tollgate.versions (version) SELECT -n FROM generate_series(1, 5000) AS n;
            INSERT INTO tollgate.writers (writer, writes) SELECT 'w' || n, 'history' FROM generate_series(1, 5000) AS n;
            INSERT INTO tollgate.rate_limit_audit_logs (at, user_id, decision, reason, latency_us)
                SELECT now() - n * interval '1 second', 'u' || n % 500, 'allowed', 'limits', n FROM generate_series(1, 20000) AS n;
            INSERT INTO tollgate.rate_limit_metrics
                SELECT width, date_trunc('month', now(), 'UTC') + n % units * ('1 ' || width)::interval, 'u' || n / units, '', '',
                    1, 0, 0, 0, 0, ROW('{1}', '{1}')::tollgate.histogram
                FROM (VALUES ('minute', 20000), ('hour', 600), ('day', 28)) AS widths (width, units), generate_series(1, 20000) AS n;
            ANALYZE",
        )
        .await;
    let service = database(&server).follow(&limiter()).await.expect("a configuration");
    let (key, stored) = tool.create_key("u7", &KeyTerms::default(), "").await.expect("made");
    tool.set_user("u7", Some("paid"), OwnLimits::default(), "").await.expect("set");
    tool.block_user("u8", None, Some(SystemTime::now() + Duration::from_secs(60)), "").await.expect("blocked");
    wait_until("it is read", async || service.account_of_user("u8").is_some()).await;
    assert_eq!(tool.keys(Some("u7")).await.expect("keys").len(), 2);
    assert!(
        tool.user("u7").await.expect("an answer").is_some() && tool.key(&stored.id).await.expect("an answer").is_some()
    );
    let account = service.account_of_key(key.secret()).await.expect("valid");
    service.count(&Attributes::new().account(&account), true);
    service.count(&Attributes::new().account(&Account::new("u9")), false);
    service.finish().await.expect("written");
    tool.rotate_key(&stored.id, Duration::ZERO, "").await.expect("rotated");
    server.run("DELETE FROM tollgate.api_keys WHERE key_id = '000000000009'").await;
    let (from, to) = (SystemTime::now() - Duration::from_secs(60), SystemTime::now());
    tool.audit(&AuditQuery::new("u7", from, to)).await.expect("an answer");
    let month = server.run("SELECT extract(epoch FROM date_trunc('month', now(), 'UTC'))::int8").await.remove(0);
    let month = SystemTime::UNIX_EPOCH + Duration::from_secs(month.parse().expect("a number"));
    for (width, length) in [(Width::Minute, 300), (Width::Hour, 3600), (Width::Day, 1)] {
        let query = StatsQuery::new(width, month, month + Duration::from_secs(length));
        assert!(!tool.stats(&query).await.expect("an answer").is_empty());
    }
    let rules = "[[rule]]\nname = \"a\"\nkey = \"ip\"\nlimits = [\"gcra 1/1s\"]".parse().expect("rules");
    tool.push_rules(&rules, "").await.expect("pushed");
    let log = server.log();
    let used = |index: &str| {
        // ON CONFLICT names the index by which it finds what is there.
        let ways = [format!("using {index} "), format!("on {index} "), format!("Conflict Arbiter Indexes: {index}")];
        ways.iter().any(|way| log.contains(way))
    };
    let month = server.run("SELECT to_char(now() AT TIME ZONE 'UTC', 'YYYY_MM')").await.remove(0);
    let select = "SELECT relname FROM pg_class WHERE relnamespace = 'tollgate'::regnamespace AND relkind = 'i'";
    let indexes = server.run(select).await;
    // Partitions have indexes of their own, of which this month's is asked; and one table has one row.
    let of_this_month = |index: &str| !index.contains("_20") || index.contains(&format!("_{month}_"));
    let unused: BTreeSet<_> = indexes.into_iter().filter(|index| of_this_month(index) && !used(index)).collect();
    assert_eq!(unused.into_iter().collect::<Vec<_>>(), ["configuration_pkey"]);
    assert!(used(&format!("rate_limit_audit_logs_{month}_user_id_at_idx")));
}
