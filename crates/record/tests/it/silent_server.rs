//! A server that freezes between a statement and its answer: whichever answer is missing, the call ends by its
//! deadline, and what it says about changes is true.

use std::process::Command;
use std::time::{Duration, SystemTime};

use tokio_postgres::NoTls;
use tollgate::rules::RuleSet;
use tollgate_record::archive::{Archive, ArchiveError, ArchiveOptions};
use tollgate_record::history::{AuditQuery, StatsQuery, Width};
use tollgate_record::{KeyTerms, OwnLimits, Postgres, PostgresError};
use tollgate_testing::polling::{PATIENCE, wait_until};
use tollgate_testing::postgres_server::PostgresServer;
use tollgate_testing::proxy::Proxy;
use tollgate_testing::record::{database, limiter, prepared};
use tollgate_testing::repository::{read, rust_files};

/// Short, so that many can pass. Where a slow machine lets an answer be late, that is one more that is missing.
const DEADLINE: Duration = Duration::from_millis(400);
/// More than any call has, and its repetitions where answers were late.
const MOST_ANSWERS: u64 = 300;

struct Failure {
    text: String,
    is_unreachable: bool,
    is_unknown: bool,
    /// Some of it may have been done, and that stays.
    continues: bool,
}

impl From<PostgresError> for Failure {
    fn from(error: PostgresError) -> Self {
        Self {
            text: error.to_string(),
            is_unreachable: error.is_unreachable(),
            is_unknown: error.is_unknown(),
            continues: false,
        }
    }
}

impl From<ArchiveError> for Failure {
    fn from(error: ArchiveError) -> Self {
        let text = error.to_string();
        let continues = text.ends_with(": the next run continues from here");
        Self { is_unreachable: error.is_unreachable(), is_unknown: false, continues, text }
    }
}

/// Calls with no answer, with the first one alone, with the first two, until all have come. Before each call the
/// database is prepared; `state` is a query for what the call changes.
async fn missing_each_answer(
    server: &PostgresServer,
    (name, prepare, state): (&str, &str, &str),
    call: impl AsyncFn(Postgres) -> Result<(), Failure>,
) {
    for answered in 0.. {
        server.run_in(name, prepare).await;
        let before = server.run_in(name, state).await;
        let proxy = Proxy::to(server.port()).await;
        proxy.answer(answered);
        let url = format!("postgres://tollgate@127.0.0.1:{}/{name}", proxy.port());
        let database = Postgres::open(&url).expect("an address").deadline(DEADLINE);
        let ended = tokio::time::timeout(PATIENCE, call(database)).await;
        let ended = ended.unwrap_or_else(|_| panic!("{name}: no end after {answered} answers"));
        let Err(Failure { text, is_unreachable, is_unknown, continues }) = ended else {
            assert!(answered > 3, "{name}: {answered}");
            return;
        };
        assert!(is_unreachable && !text.contains('\n'), "{name} after {answered}: {text}");
        if is_unknown {
            assert!(text.ends_with("the change may or may not have been made"), "{name} after {answered}: {text}");
            // It has reached the server.
            wait_until("the change is made", async || server.run_in(name, state).await != before).await;
        } else if !continues {
            let is_said = text.ends_with(": nothing was changed") || text.ends_with(": no connection in time");
            assert!(is_said, "{name} after {answered}: {text}");
            assert_eq!(server.run_in(name, state).await, before, "{name} after {answered}: {text}");
        }
        assert!(answered < MOST_ANSWERS, "{name}: {text}");
    }
}

/// A first host that accepts connections and says nothing, as one does that is frozen, leaves time for the second.
#[tokio::test]
async fn of_several_hosts_a_silent_one_is_passed_over() {
    let (server, _tool) = prepared().await;
    let silent = Proxy::to(server.port()).await;
    silent.swallow(true);
    let both = format!("postgres://tollgate@127.0.0.1:{},127.0.0.1:{}/postgres", silent.port(), server.port());
    let database = Postgres::open(&both).expect("an address");
    assert_eq!(database.server().await.expect("the second"), Some(format!("127.0.0.1:{}", server.port())));
    let service = database.follow(&limiter()).await.expect("a configuration");
    assert!(service.status().is_connected && silent.requested() >= 2);
}

/// As somebody says who wants none.
#[tokio::test]
async fn the_longest_deadline_is_one() {
    let (server, _tool) = prepared().await;
    let database = database(&server).deadline(Duration::MAX);
    let (from, to) = (SystemTime::UNIX_EPOCH, SystemTime::now());
    assert!(database.stats(&StatsQuery::new(Width::Day, from, to)).await.expect("an answer").is_empty());
    assert!(database.audit(&AuditQuery::new("42", from, to)).await.expect("an answer").is_empty());
    database.set_user("42", None, OwnLimits::default(), "").await.expect("set");
}

fn rules() -> RuleSet {
    "[[rule]]\nname = \"all\"\nkey = \"global\"\nlimits = [\"gcra 7/1s\"]".parse().expect("rules")
}

const USERS: &str = "SELECT concat_ws(' ', user_id, tier, blocked) FROM tollgate.user_quotas ORDER BY user_id";
const KEYS: &str = "SELECT concat_ws(' ', key_id, revoked_at) FROM tollgate.api_keys ORDER BY key_id";
const ONE_KEY: &str = "DELETE FROM tollgate.api_keys; INSERT INTO tollgate.api_keys (key_id, hash, user_id)
    VALUES ('aaaaaaaaaaaa', sha256('x'), '42')";
const KEY: &str = "aaaaaaaaaaaa";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_change_whose_answer_is_missing_ends_by_its_deadline_and_says_whether_it_may_be_made() {
    let (server, tool) = prepared().await;
    drop(tool);
    for name in ["blocks", "unblocks", "sets", "creates", "rotates", "revokes", "pushes", "migrates"] {
        server.run_in("template1", &format!("CREATE DATABASE {name} TEMPLATE postgres")).await;
    }
    let (none, blocked) =
        ("DELETE FROM tollgate.user_quotas", "INSERT INTO tollgate.user_quotas (user_id, blocked) VALUES ('42', true)");
    let blocked = format!("{none}; {blocked}");
    tokio::join!(
        missing_each_answer(&server, ("blocks", none, USERS), async |database| {
            Ok(database.block_user("42", None, None, "").await?)
        }),
        missing_each_answer(&server, ("unblocks", &blocked, USERS), async |database| {
            database.unblock_user("42", "").await?;
            Ok(())
        }),
        missing_each_answer(&server, ("sets", none, USERS), async |database| {
            Ok(database.set_user("42", Some("paid"), OwnLimits::default(), "").await?)
        }),
        missing_each_answer(&server, ("creates", "SELECT 1", KEYS), async |database| {
            database.create_key("42", &KeyTerms::default(), "").await?;
            Ok(())
        }),
        missing_each_answer(&server, ("rotates", ONE_KEY, KEYS), async |database| {
            database.rotate_key(KEY, Duration::ZERO, "").await?;
            Ok(())
        }),
        missing_each_answer(&server, ("revokes", ONE_KEY, KEYS), async |database| {
            let revoked = database.revoke_key(KEY, "").await?;
            assert!(revoked.revoked_at.is_some());
            Ok(())
        }),
        missing_each_answer(
            &server,
            ("pushes", "DELETE FROM tollgate.rate_limit_rules", "SELECT name FROM tollgate.rate_limit_rules"),
            async |database| {
                database.push_rules(&rules(), "").await?;
                Ok(())
            }
        ),
        missing_each_answer(
            &server,
            ("migrates", "DROP SCHEMA IF EXISTS tollgate CASCADE", "SELECT to_regclass('tollgate.writers')::text"),
            async |database| {
                database.migrate().await?;
                Ok(())
            }
        ),
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_read_whose_answer_is_missing_ends_by_its_deadline() {
    let (server, tool) = prepared().await;
    tool.push_rules(&rules(), "").await.expect("pushed");
    server.run(ONE_KEY).await;
    let (epoch, now) = (SystemTime::UNIX_EPOCH, SystemTime::now());
    let of = ("postgres", "SELECT 1", "SELECT version FROM tollgate.configuration");
    macro_rules! reads {
        ($($call:expr),* $(,)?) => {
            tokio::join!($(missing_each_answer(&server, of, async |database: Postgres| {
                let call = $call;
                call(&database).await?;
                Ok(())
            })),*)
        };
    }
    reads!(
        async |database: &Postgres| database.user("42").await,
        async |database: &Postgres| database.users().await,
        async |database: &Postgres| database.key(KEY).await,
        async |database: &Postgres| database.keys(None).await,
        async |database: &Postgres| database.keys(Some("42")).await,
        async |database: &Postgres| database.rules().await,
        async |database: &Postgres| database.compare_rules(&rules()).await,
        async |database: &Postgres| database.schema().await,
        async |database: &Postgres| database.writers().await,
        async |database: &Postgres| database.writer_counts().await,
        async |database: &Postgres| database.now().await,
        async |database: &Postgres| database.server().await,
        async |database: &Postgres| database.stats(&StatsQuery::new(Width::Day, epoch, now)).await,
        async |database: &Postgres| database.audit(&AuditQuery::new("42", epoch, now)).await,
        async |database: &Postgres| database.archivable(Duration::from_secs(90 * 86_400)).await,
    );
}

/// Each run continues what the one before it left.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_archiver_whose_answer_is_missing_ends_by_its_deadline_and_loses_no_row() {
    let (server, _tool) = prepared().await;
    let directory = tempfile::tempdir().expect("a directory");
    let archive = Archive::open(&format!("file://{}", directory.path().display())).expect("an address");
    server
        .run(
            "CREATE TABLE tollgate.rate_limit_audit_logs_2020_03 PARTITION OF tollgate.rate_limit_audit_logs
                FOR VALUES FROM ('2020-03-01 00:00+00') TO ('2020-04-01 00:00+00');
            INSERT INTO tollgate.rate_limit_audit_logs (at, user_id, decision, reason, latency_us)
            SELECT '2020-03-05 00:00+00'::timestamptz + n * interval '1 s', n::text, 'allowed', 'allowed', 1
            FROM generate_series(1, 300) AS n",
        )
        .await;
    let state = "SELECT concat_ws(' ', relname, inhdetachpending) FROM pg_class LEFT JOIN pg_inherits ON inhrelid = oid
        WHERE relname = 'rate_limit_audit_logs_2020_03'";
    missing_each_answer(&server, ("postgres", "SELECT 1", state), async |database| {
        for month in database.archive(&archive, &ArchiveOptions::default(), |_| ()).await? {
            month.result?;
        }
        Ok(())
    })
    .await;
    let march = archive.describe("2020-03".parse().expect("a month")).await.expect("a manifest").expect("one");
    assert_eq!((march.rows, server.run(state).await), (300, Vec::new()));
}

/// What has a deadline is the client in `postgres`: no other file has another.
#[test]
fn no_statement_is_sent_but_by_the_client_that_has_a_deadline() {
    let files = rust_files("crates/record/src");
    let others = files.iter().filter(|file| !file.starts_with("crates/record/src/postgres"));
    for file in others {
        for line in read(file).lines().filter(|line| line.contains("tokio_postgres") || line.contains("deadpool")) {
            let words: Vec<_> = line.split(|letter: char| !letter.is_alphanumeric() && letter != '_').collect();
            let forbidden = ["deadpool_postgres", "Client", "Transaction", "Config", "connect", "CopyInSink"];
            assert!(!words.iter().any(|word| forbidden.contains(word)), "{file}: {line}");
        }
    }
}

/// The server's process is stopped, and its kernel goes on acknowledging what arrives.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopped_server_process_holds_no_call_for_ever() {
    let (server, _tool) = prepared().await;
    let (holder, connection) = tokio_postgres::connect(&server.url(), NoTls).await.expect("connected");
    tokio::spawn(connection);
    holder.batch_execute("BEGIN; SELECT 1 FROM tollgate.configuration FOR UPDATE").await.expect("held");
    // Less than it waits for a lock.
    let tool = database(&server).deadline(Duration::from_secs(6));
    let blocking = tokio::spawn(async move { tool.block_user("42", None, None, "").await });
    let mut stopped = String::new();
    wait_until("it waits for the lock", async || {
        let waiting =
            "SELECT pid FROM pg_stat_activity WHERE application_name = 'tollgate' AND wait_event_type = 'Lock'";
        stopped = server.run(waiting).await.pop().unwrap_or_default();
        !stopped.is_empty()
    })
    .await;
    let signal = |name: &str| Command::new("kill").args([name, &stopped]).status().expect("kill").success();
    assert!(signal("-STOP"));
    holder.batch_execute("COMMIT").await.expect("released");
    let ended = tokio::time::timeout(PATIENCE, blocking).await;
    assert!(signal("-CONT"), "the server's end waits for it otherwise");
    let error = ended.expect("an end").expect("no panic").expect_err("no answer").to_string();
    assert!(error.ends_with("no answer within 6s: nothing was changed"), "{error}");
    wait_until("the process has ended what it did", async || {
        server
            .run(&format!("SELECT 1 FROM pg_stat_activity WHERE pid = {stopped} AND state <> 'idle'"))
            .await
            .is_empty()
    })
    .await;
    assert_eq!(server.run(USERS).await, Vec::<String>::new());
}
