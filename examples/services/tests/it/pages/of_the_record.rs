//! The pages on the system of record.

use std::path::PathBuf;
use std::process::Command;

use tollgate_testing::console::Shell;
use tollgate_testing::postgres_server::{PostgresServer, not_as_root, program};
use tollgate_testing::python::python;
use tollgate_testing::redis_server::{Server, free_port};
use tollgate_testing::repository::read;

use super::Page;
use crate::example_service::{call, start};

const ADDRESS: &str = "postgres://limits:password@127.0.0.1";

/// A page whose commands use the database `app` of this server, and psql without a name the server itself.
fn page(name: &'static str, server: &PostgresServer) -> Page {
    let port = server.port();
    Page::new(name, Shell::start())
        .replace(ADDRESS, format!("postgres://limits:password@127.0.0.1:{port}"))
        .replace("postgres://limits:PASSWORD@postgres.internal", format!("postgres://limits:PASSWORD@127.0.0.1:{port}"))
        .replace("--host=postgres.internal", format!("--host=127.0.0.1 --port={port}"))
}

async fn with_database() -> PostgresServer {
    let server = PostgresServer::start();
    server.run("CREATE ROLE limits LOGIN SUPERUSER PASSWORD 'password'").await;
    server.run("CREATE DATABASE app OWNER limits").await;
    server
}

/// SQL that fills a month of the audit log.
fn month(month: &str, rows: u32) -> String {
    let table = format!("tollgate.rate_limit_audit_logs_{}", month.replace('-', "_"));
    format!(
        "psql \"$TOLLGATE_DATABASE\" -q -v ON_ERROR_STOP=1 -c \"CREATE TABLE {table} \
            PARTITION OF tollgate.rate_limit_audit_logs \
            FOR VALUES FROM ('{month}-01 00:00:00+00') TO ('{month}-01 00:00:00+00'::timestamptz + interval '1 month')\" \
            -c \"INSERT INTO tollgate.rate_limit_audit_logs (at, user_id, decision, reason, latency_us) \
            SELECT '{month}-01 00:00:00+00'::timestamptz + i * interval '1 s', '4711', 'allowed', 'allowed', i \
            FROM generate_series(1, {rows}) AS i\""
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn operations_of_the_record() {
    let server = with_database().await;
    let pushed = "tollgate rules push examples/rules.toml && rm rules.toml && \
        sed 's|token-bucket 1000/1h burst 20|token-bucket 900/1h burst 20|' examples/rules.toml >rules.toml";
    // Yesterday's and today's: the most recent of that time is meant.
    let denied = "psql \"$TOLLGATE_DATABASE\" -q -v ON_ERROR_STOP=1 -c \"INSERT INTO tollgate.rate_limit_audit_logs \
        (at, user_id, endpoint, method, rule, decision, reason, limited_by, used, capacity, status, retry_after_us, latency_us) \
        SELECT date_trunc('day', now()) - days * interval '1 day' + interval '14:03:07.113', '4711', '/api/v1/items', \
        'GET', 'api', 'throttled', 'limits', 'token-bucket 100/1m', 100, 100, 429, 600000, 80 \
        FROM generate_series(0, 1) AS days\"";
    let counted = "psql \"$TOLLGATE_DATABASE\" -q -v ON_ERROR_STOP=1 -c \"INSERT INTO tollgate.rate_limit_metrics \
        SELECT width, date_trunc(width, now()), '4711', '/api/v1/items', '', 9, 1, 0, 0, 10, ROW('{100}'::smallint[], '{10}'::bigint[])::tollgate.histogram \
        FROM unnest(ARRAY['minute', 'hour', 'day']) AS width\"";
    let mut page = page("crates/record/src/operations.md", &server)
        .before("tollgate stats --last 7d", counted)
        .codes("tollgate db status", &[1])
        .codes("tollgate rules diff", &[1])
        .before("tollgate rules diff env:TOLLGATE_DATABASE", pushed)
        .before("tollgate audit --user 4711", denied)
        .before("tollgate archive --dry-run", month("2026-07", 1000))
        .before("tollgate archive list --expired", month("2019-10", 10) + " && tollgate archive")
        .codes("tollgate archive --dry-run", &[0, 1])
        .codes("tollgate archive delete --expired", &[0, 1]);
    let archive = page.shell.folder().join("archive");
    std::fs::create_dir(&archive).expect("a folder");
    page = page.replace("s3://audit-logs/tollgate", format!("file://{}", archive.display()));
    page.run();

    let text = read("crates/record/src/operations.md");
    let block = |mark: &str, begins: &str| {
        let mark = format!("```{mark}\n");
        let blocks = text.split(&mark).skip(1).filter_map(|rest| rest.split("```").next());
        let found: Vec<_> = blocks.filter(|block| block.starts_with(begins)).collect();
        assert_eq!(found.len(), 1, "{mark}{begins}");
        found[0].to_owned()
    };
    let secret = format!("psql \"$TOLLGATE_DATABASE\" -q -v ON_ERROR_STOP=1 -c \"{}\"", block("sql", "UPDATE "));
    assert_eq!(page.shell.run(&secret), (0, String::new()));
    let read_back = block("python", "import pyarrow").replace("/var/lib/tollgate", &archive.display().to_string());
    let counted = read_back.replacen("\npyarrow.", "\nprint(pyarrow.", 1).trim_end().to_owned() + ".count_rows())";
    let output = Command::new(python()).args(["-c", &counted]).output().expect("Python");
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "1000", "{output:?}");
    // Every night as a user of its own, what the page runs by hand.
    let line = block("text", "30 3 ");
    let line: Vec<_> = line.split_whitespace().collect();
    assert!(
        line.len() > 6 && line[5] == "tollgate" && line.ends_with(&["/usr/local/bin/tollgate", "archive"]),
        "{line:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn the_runbook_of_the_record() {
    let (server, redis) = (with_database().await, Server::start());
    let url = format!("postgres://limits@127.0.0.1:{}/app", server.port());
    let secret = ("TOLLGATE_CACHE_SECRET", "32 bytes by chance, from a vault");
    let mut page = page("crates/record/src/operations/runbook.md", &server);
    for command in ["db migrate", "rules push rules.toml"] {
        let (code, printed) = page.shell.run(&format!("tollgate {command} --database '{url}'"));
        assert_eq!(code, 0, "{printed}");
    }
    let service = start("service", Some(&redis.tcp_url()), &[("TOLLGATE_DATABASE", &url), secret]);
    assert_eq!(call(&service.address, "GET /", "X-Api-Key: tg_unknown\r\n").0, 401);
    page.replace("http://SERVICE/", format!("http://{}/", service.address))
        .replace("redis-cli ", format!("redis-cli -p {} ", redis.port()))
        .replace("df -h /var/lib/postgresql", "df -h .")
        .run();
}

/// Servers of a page's own, by where their data are: ended with the test, however that ends.
struct Servers(Vec<PathBuf>);

impl Drop for Servers {
    fn drop(&mut self) {
        for data in &self.0 {
            let file = std::fs::read_to_string(data.join("postmaster.pid")).unwrap_or_default();
            if let Some(process) = file.lines().next() {
                let _ = Command::new("kill").args(["-QUIT", process]).status();
            }
        }
    }
}

/// On a server of its own, which the page stops, loses and restores.
#[test]
fn backup_of_the_record() {
    let (port, beside) = (free_port(), free_port());
    let folder = tempfile::tempdir().expect("a temporary directory");
    let here = folder.path().display().to_string();
    // What is on the PATH may be a link.
    let programs = program("initdb").canonicalize().expect("a file");
    let programs = programs.parent().expect("a folder").display().to_string();
    let mut bash = Command::new("bash");
    not_as_root(&mut bash, folder.path());
    bash.env("PGHOST", "127.0.0.1").env("PGPORT", port.to_string()).env("PGUSER", "postgres");
    // The other user may not look where the tool was built.
    std::fs::create_dir(folder.path().join("bin")).expect("a folder");
    std::fs::copy(super::tool(), folder.path().join("bin/tollgate")).expect("the tool");
    let shell = Shell::start_by(bash, folder);
    let mut page = Page::new("crates/record/src/operations/backup.md", shell)
        .replace("postgres://limits:password@127.0.0.1:5433", format!("postgres://limits:password@127.0.0.1:{beside}"))
        .replace("postgres://limits:password@127.0.0.1/", format!("postgres://limits:password@127.0.0.1:{port}/"))
        .replace("/var/lib/postgresql/15/main", format!("{here}/data"))
        .replace("/usr/lib/postgresql/15/bin", &*programs)
        .replace("/srv/", format!("{here}/"))
        .before(
            "psql app -Atc \"SELECT updated_by",
            "tollgate rules push mistake.toml --by bob --database postgres://limits:password@127.0.0.1/app",
        )
        .before("grep 'recovery stopping'", "until grep -q 'recovery stopping' log; do sleep 0.05; done")
        .before(
            "pg_dump --schema",
            format!(
                "cp -a base/2026-11-22 beside && cat >>beside/postgresql.auto.conf <<END && touch beside/recovery.signal\n\
                restore_command = 'cp \"{here}/wal/%f\" \"%p\"'\nrecovery_target_time = '$MOMENT'\n\
                recovery_target_timeline = 'current'\nport = {beside}\narchive_mode = off\nEND\n\
                pg_ctl start --silent --pgdata=beside --log=beside.log && until \
                psql -p {beside} -Atc 'SELECT pg_get_wal_replay_pause_state()' | grep -q paused; do sleep 0.05; done"
            ),
        );
    // Ended before the page's folder is removed.
    let _servers = Servers(["data", "beside"].map(|data| page.shell.folder().join(data)).into());
    let rules = read("examples/rules.toml");
    let (before, rest) = rules.split_once("[[rule]]\nname = \"login\"").expect("the rule");
    let (_, after) = rest.split_once("[[rule]]").expect("another");
    std::fs::write(page.shell.folder().join("mistake.toml"), format!("{before}[[rule]]{after}")).expect("written");
    let url = format!("postgres://limits:password@127.0.0.1:{port}/app");
    let (code, printed) = page.shell.run(&format!(
        "export PATH=$PATH:{programs} && mkdir wal base && \
         initdb --no-sync --no-locale --encoding=UTF8 --username=postgres --auth=trust --wal-segsize=1 -D data && \
         printf \"listen_addresses = '127.0.0.1'\\nport = {port}\\nunix_socket_directories = ''\\nshared_buffers = 16MB\\n\" \
             >>data/postgresql.conf && \
         pg_ctl start --silent --pgdata=data --log=log && \
         psql -q -c \"CREATE USER limits PASSWORD 'password'\" -c 'CREATE DATABASE app' \
             -c 'GRANT CREATE ON DATABASE app TO limits' && \
         tollgate db migrate --database {url} && tollgate rules push rules.toml --database {url}"
    ));
    assert_eq!(code, 0, "{printed}");
    page.run();
}
