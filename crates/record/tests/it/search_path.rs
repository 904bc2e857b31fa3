//! What other roles put where a search path leads never runs with the rights of whoever works with the system of
//! record.

use std::time::{Duration, SystemTime};

use tollgate::rules::{Attributes, RuleSet};
use tollgate_record::archive::{Archive, ArchiveOptions};
use tollgate_record::history::{AuditQuery, HistorySettings, StatsQuery, Width};
use tollgate_record::{KeyTerms, OwnLimits, Postgres};
use tollgate_testing::postgres_server::PostgresServer;
use tollgate_testing::record::limiter;

/// Functions and operators of `hostile`: some with the names and arguments of PostgreSQL's, which an earlier place in
/// the path prefers, others with arguments that fit better than PostgreSQL's, which any place does. Each one notes who
/// ran it.
const HOSTILE: &str = "
    CREATE SCHEMA hostile; GRANT USAGE ON SCHEMA hostile TO PUBLIC;
    CREATE TABLE hostile.ran (role text, what text); GRANT INSERT ON hostile.ran TO PUBLIC;
    CREATE FUNCTION hostile.note(what text) RETURNS void LANGUAGE plpgsql SET search_path = pg_catalog AS $$
        BEGIN INSERT INTO hostile.ran VALUES (current_user, what); EXCEPTION WHEN OTHERS THEN RETURN; END $$;
    CREATE FUNCTION hostile.now() RETURNS timestamptz LANGUAGE plpgsql AS $$
        BEGIN PERFORM hostile.note('now'); RETURN pg_catalog.now(); END $$;
    CREATE FUNCTION hostile.pg_backend_pid() RETURNS integer LANGUAGE plpgsql AS $$
        BEGIN PERFORM hostile.note('pg_backend_pid'); RETURN pg_catalog.pg_backend_pid(); END $$;
    CREATE FUNCTION hostile.current_setting(text) RETURNS text LANGUAGE plpgsql AS $$
        BEGIN PERFORM hostile.note('current_setting'); RETURN pg_catalog.current_setting($1); END $$;
    CREATE FUNCTION hostile.same(a text, b text) RETURNS boolean LANGUAGE plpgsql AS $$
        BEGIN PERFORM hostile.note('='); RETURN pg_catalog.texteq(a, b); END $$;
    CREATE OPERATOR hostile.= (LEFTARG = text, RIGHTARG = text, FUNCTION = hostile.same);
    CREATE FUNCTION hostile.later(a bigint, b integer) RETURNS boolean LANGUAGE plpgsql AS $$
        BEGIN PERFORM hostile.note('>'); RETURN pg_catalog.int84gt(a, b); END $$;
    CREATE OPERATOR hostile.> (LEFTARG = bigint, RIGHTARG = integer, FUNCTION = hostile.later);
    CREATE FUNCTION hostile.num_nonnulls(text, bigint, bigint, bigint) RETURNS integer LANGUAGE plpgsql AS $$
        BEGIN PERFORM hostile.note('num_nonnulls'); RETURN 1; END $$;
    CREATE FUNCTION hostile.cardinality(smallint[]) RETURNS integer LANGUAGE plpgsql AS $$
        BEGIN PERFORM hostile.note('cardinality'); RETURN 1; END $$;
    CREATE FUNCTION hostile.joined(a smallint[], b smallint[]) RETURNS smallint[] LANGUAGE plpgsql AS $$
        BEGIN PERFORM hostile.note('||'); RETURN pg_catalog.array_cat(a, b); END $$;
    CREATE OPERATOR hostile.|| (LEFTARG = smallint[], RIGHTARG = smallint[], FUNCTION = hostile.joined);
    CREATE FUNCTION hostile.times(a numeric, b double precision) RETURNS double precision LANGUAGE plpgsql AS $$
        BEGIN PERFORM hostile.note('*'); RETURN pg_catalog.float8mul(a::double precision, b); END $$;
    CREATE OPERATOR hostile.* (LEFTARG = numeric, RIGHTARG = double precision, FUNCTION = hostile.times);";

/// What `hostile` has noted, each once.
async fn ran(server: &PostgresServer, database: &str) -> Vec<String> {
    let select = "SELECT DISTINCT pg_catalog.concat_ws(' as ', what, role) FROM hostile.ran";
    server.run_in(database, &format!("SET search_path = pg_catalog; {select}")).await
}

#[tokio::test]
async fn nothing_that_others_have_put_in_the_search_path_runs() {
    let server = PostgresServer::start();
    server.run("CREATE ROLE somebody LOGIN; CREATE ROLE limits LOGIN; GRANT pg_monitor TO limits").await;
    for (name, path) in [("before", "hostile, pg_catalog"), ("behind", "public, hostile")] {
        server.run(&format!("CREATE DATABASE {name} OWNER somebody")).await;
        server.run(&format!("GRANT CREATE ON DATABASE {name} TO limits")).await;
        server.run_in(name, HOSTILE).await;
        server.run(&format!("ALTER DATABASE {name} SET search_path = {path}")).await;
        let database = Postgres::open(&server.url_of("limits", name)).expect("an address");
        used(&database).await;
        let read = "SELECT tollgate.percentile(tollgate.total(latency), 0.5) FROM tollgate.rate_limit_metrics";
        assert_eq!(server.run_in(name, read).await.len(), 1);
        let summed = "SELECT tollgate.summed(latency) FROM tollgate.rate_limit_metrics";
        assert!(!server.run_in(name, summed).await.is_empty());
        assert_eq!(ran(&server, name).await, [""; 0], "{name}");
        // They would be run otherwise.
        let run = "SELECT num_nonnulls(tier, 1::bigint, 1::bigint, 1::bigint) FROM tollgate.user_quotas";
        server.run_in(name, run).await;
        assert_eq!(ran(&server, name).await, ["num_nonnulls as tollgate"], "{name}");
    }
}

/// Everything that the tool and services do.
async fn used(database: &Postgres) {
    database.migrate().await.expect("made");
    assert!(database.schema().await.expect("an answer").is_complete());
    let rules: RuleSet = "[[rule]]\nname = \"all\"\nkey = \"user\"\nlimits = [\"gcra 1/1s\"]".parse().expect("rules");
    database.push_rules(&rules, "").await.expect("pushed");
    assert!(!database.compare_rules(&rules).await.expect("an answer").has_rules());
    let limiter = limiter();
    let service = database.follow(&limiter).await.expect("a configuration");
    let history = database.record(HistorySettings::new()).expect("settings");
    database.set_user("42", Some("paid"), OwnLimits::default(), "").await.expect("set");
    database.block_user("42", None, None, "").await.expect("blocked");
    assert!(database.unblock_user("42", "").await.expect("an answer"));
    let (key, stored) = database.create_key("42", &KeyTerms::default(), "").await.expect("made");
    let account = service.account_of_key(key.secret()).await.expect("valid");
    for _ in 0..2 {
        let request = Attributes::new().account(&account).path("/");
        let verdict = limiter.acquire_by(&rules, &request).await.expect("a verdict");
        service.count(&request, true);
        history.record(&request, &verdict, Duration::from_micros(10));
        service.finish().await.expect("written");
        history.finish().await.expect("written");
    }
    let (_, next) = database.rotate_key(&stored.id, Duration::ZERO, "").await.expect("made");
    database.revoke_key(&next.id, "").await.expect("revoked");
    assert_eq!(database.keys(None).await.expect("an answer").len(), 2);
    assert_eq!(database.keys(Some("42")).await.expect("an answer").len(), 2);
    assert!(database.key(&next.id).await.expect("an answer").is_some());
    assert_eq!(database.users().await.expect("an answer").len(), 1);
    assert_eq!(database.user("42").await.expect("an answer").expect("known").total_today, 2);
    assert_eq!(database.rules().await.expect("an answer").rules, rules);
    let (from, to) = (SystemTime::now() - Duration::from_secs(7200), SystemTime::now() + Duration::from_secs(7200));
    assert_eq!(database.audit(&AuditQuery::new("42", from, to)).await.expect("an answer").len(), 2);
    for query in [StatsQuery::new(Width::Hour, from, to), StatsQuery::new(Width::Hour, from, to).by_user().user("42")] {
        assert!(!database.stats(&query).await.expect("an answer").is_empty());
    }
    assert_eq!(database.writers().await.expect("an answer").len(), 2);
    assert_eq!(database.writer_counts().await.expect("an answer").all, 2);
    database.now().await.expect("a time");
    database.server().await.expect("an answer");
    let place = tempfile::tempdir().expect("a directory");
    let archive = Archive::open(&format!("file://{}", place.path().display())).expect("an archive");
    assert!(database.archivable(ArchiveOptions::default().older_than).await.expect("an answer").is_empty());
    assert!(database.archive(&archive, &ArchiveOptions::default(), |_| ()).await.expect("run").is_empty());
}
