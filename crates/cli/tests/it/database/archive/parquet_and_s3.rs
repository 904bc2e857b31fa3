//! Archives read by another implementation of Parquet, and archives on a server of S3.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::time::Duration;

use tollgate_testing::python::python;
use tollgate_testing::repository::read;

use super::{Place, fill, is_gone, march, only, prepared, small_files};
use crate::support::s3::S3;
use crate::support::tool::{code, command, lines, stderr, stdout};

/// In the words of both PostgreSQL and DuckDB.
const SUMS: [&str; 12] = [
    "count(*)",
    "count(user_id)",
    "count(distinct user_id)",
    "sum(length(endpoint))",
    "count(ip)",
    "sum(used::numeric(38, 0))",
    "sum(status)",
    "min(status)",
    "sum(retry_after_us)",
    "sum(latency_us)",
    "md5(string_agg(coalesce(user_id, '-') || decision || coalesce(endpoint, ''), ',' ORDER BY latency_us))",
    "md5(string_agg((extract(epoch FROM \"at\") * 1000000)::bigint::text, ',' ORDER BY latency_us))",
];

#[tokio::test]
async fn another_reader_of_parquet_finds_the_same() {
    let (server, database) = prepared().await;
    let place = Place::new();
    fill(&server, march(), 5000).await;
    let sums = SUMS.map(|sum| {
        // DuckDB counts in halves what it converts through a double.
        let sum = sum.replace("(extract(epoch FROM \"at\") * 1000000)::bigint", "EPOCH");
        (sum.replace("EPOCH", "(extract(epoch FROM at) * 1000000)::bigint"), sum.replace("EPOCH", "epoch_us(\"at\")"))
    });
    let mut expected = Vec::new();
    for (sum, _) in &sums {
        expected.push(server.run(&format!("SELECT ({sum})::text FROM tollgate.rate_limit_audit_logs")).await.remove(0));
    }
    let mut options = small_files();
    options.part_rows = 2000;
    only(&database, &place, &options).await.expect("moved");
    let script = "
import duckdb, sys
pattern = sys.argv[1] + '/audit/*/*/*.parquet'
for sum in sys.argv[2:]:
    sql = f\"SELECT ({sum})::text FROM read_parquet('{pattern}', hive_partitioning = true) WHERE year = 2020 AND month = '03'\"
    print(duckdb.sql(sql).fetchall()[0][0])
types = duckdb.sql(f\"DESCRIBE SELECT * FROM read_parquet('{pattern}', hive_partitioning = false)\").fetchall()
print(','.join(f'{row[0]} {row[1]}' for row in types))
";
    let mut reader = Command::new(python());
    reader.args(["-c", script]).arg(place.directory.path()).args(sums.iter().map(|(_, sum)| sum));
    let output = reader.output().expect("Python");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let said = String::from_utf8(output.stdout).expect("UTF-8");
    let mut said: Vec<_> = said.lines().collect();
    let types = said.pop().expect("types");
    for ((sum, expected), found) in SUMS.iter().zip(&expected).zip(&said) {
        assert_eq!(found, expected, "{sum}");
    }
    assert_eq!(said.len(), SUMS.len());
    let expected = "at TIMESTAMP WITH TIME ZONE,user_id VARCHAR,api_key VARCHAR,ip VARCHAR,endpoint VARCHAR,method VARCHAR,\
                    rule VARCHAR,decision VARCHAR,reason VARCHAR,limited_by VARCHAR,used BIGINT,capacity BIGINT,status SMALLINT,\
                    retry_after_us BIGINT,region VARCHAR,server VARCHAR,latency_us BIGINT,rules VARCHAR";
    assert_eq!(types, expected);
}

#[tokio::test]
async fn a_month_is_moved_to_s3_and_read_from_there() {
    let (server, _) = prepared().await;
    let s3 = S3::start();
    fill(&server, march(), 500).await;
    let users = server.run("SELECT count(*) FROM tollgate.rate_limit_audit_logs WHERE user_id = '李'").await.remove(0);
    let database = server.url();
    let arguments = ["--database", database.as_str(), "--part-rows", "200"];
    // Files left by an earlier archiver don't matter; a run killed in the middle is resumed.
    let stray = "/logs/of/tollgate/audit/year%3D2020/month%3D03/part-0-0123456789abcdef.parquet";
    assert_eq!(s3.put(stray, "", "left by somebody"), 200);
    let mut child = s3.tool(&arguments).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the tool runs");
    tokio::time::sleep(Duration::from_millis(100)).await;
    child.kill().expect("killed");
    child.wait().expect("ended");
    let moved = s3.run(&arguments);
    assert_eq!(code(&moved), 0, "{}", stderr(&moved));
    assert!(is_gone(&server, march()).await);
    assert_eq!(stdout(&s3.run(&["verify"])), "2020-03: 500 rows intact\n");
    assert_eq!(lines(&s3.run(&["query", "--user", "李"])).len().to_string(), users);
    // That it does what `PutMode::Create` relies on.
    let manifest = "/logs/of/tollgate/audit/year%3D2020/month%3D03/manifest.json";
    assert_eq!(s3.put(manifest, "If-None-Match: *\r\n", "{}"), 412);
    assert_eq!(s3.put(stray, "", "PAR1 it is not"), 200);
    let damaged = s3.run(&["verify"]);
    assert_eq!(code(&damaged), 1);
    assert!(
        stderr(&damaged).starts_with("error: archive of 2020-03: part-0-0123456789abcdef.parquet: left over from"),
        "{damaged:?}"
    );
    assert_eq!(stdout(&s3.run(&["delete", "2020-03", "--yes"])), "2020-03: deleted\n");
    assert_eq!(stdout(&s3.run(&["list"])), "");
    // Nothing that is secret is said.
    for (name, value) in
        [("AWS_ENDPOINT", "http://127.0.0.1:1"), ("AWS_ALLOW_HTTP", "false"), ("AWS_ALLOW_HTTP", "maybe")]
    {
        let output = s3.tool(&["list"]).env(name, value).output().expect("the tool runs");
        let said = format!("{}{}", stdout(&output), stderr(&output));
        assert!(code(&output) == 2 && said.lines().count() == 1, "{said}");
        assert!(!said.contains("sesame") && !said.contains("AKIA"), "{said}");
    }
}

/// The guide's queries, as it prints them, on what a test has archived.
#[tokio::test]
async fn the_queries_of_the_operations_guide_run() {
    let guide = read("crates/record/src/operations.md");
    let (server, database) = prepared().await;
    let place = Place::new();
    fill(&server, march(), 500).await;
    only(&database, &place, &small_files()).await.expect("moved");
    let (_, rest) = guide.split_once("```sql\n-- DuckDB\n").expect("the queries");
    let (queries, _) = rest.split_once("```").expect("their end");
    let mut ran = 0;
    for query in queries.split(';').map(str::trim).filter(|query| !query.is_empty()) {
        let query = query
            .replace("s3://audit-logs/tollgate", &place.directory.path().display().to_string())
            .replace("2026", "2020")
            .replace("07", "03")
            .replace("'4711'", "'zoë'");
        let script = "import duckdb, sys; print(duckdb.sql(sys.argv[1]).aggregate('count(*)').fetchall()[0][0])";
        let output = Command::new(python()).args(["-c", script, &query]).output().expect("Python");
        let rows = stdout(&output).trim().parse::<u64>();
        assert!(rows.is_ok_and(|rows| rows > 0), "{query}: {output:?}");
        ran += 1;
    }
    assert_eq!(ran, 2);
}

/// Whatever a server repeats of a request, and wherever a password may stand.
#[test]
fn no_secret_is_said_whatever_a_server_answers() {
    for (status, type_of) in [("403", "xml"), ("400", "html"), ("500", "text"), ("301", "location"), ("200", "text")] {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("an address").port();
        std::thread::spawn(move || {
            for mut client in listener.incoming().map_while(Result::ok) {
                let mut request = [0; 8192];
                let length = client.read(&mut request).unwrap_or_default();
                let said = String::from_utf8_lossy(&request[..length]).replace(['\r', '\n'], " ");
                let body = match type_of {
                    "xml" => format!("<?xml version='1.0'?><Error><Code>No</Code><Message>{said}</Message></Error>"),
                    "html" => format!("<html>{said}</html>"),
                    _ => said,
                };
                let location = format!("http://AKIATOLLGATE:sesame@127.0.0.1:{port}/");
                let header = format!("Location: {location}\r\nContent-Length: {}\r\nConnection: close", body.len());
                let _ = client.write_all(format!("HTTP/1.1 {status} X\r\n{header}\r\n\r\n{body}").as_bytes());
            }
        });
        let endpoint = format!("http://127.0.0.1:{port}");
        let with_password = format!("http://me:sesame@127.0.0.1:{port}");
        for (arguments, name, value) in [
            (&["list"][..], "AWS_ENDPOINT", endpoint.as_str()),
            (&["verify", "2020-03"], "AWS_ENDPOINT", &endpoint),
            (&["list"], "AWS_ENDPOINT", &with_password),
            (&["list"], "HTTP_PROXY", "http://me:sesame@127.0.0.1:1"),
        ] {
            let mut tool = command(&[&["archive"], arguments, &["--store", "s3://logs/of"]].concat());
            tool.env("AWS_ENDPOINT", &endpoint).env("AWS_ALLOW_HTTP", "true").env("AWS_REGION", "eu-west-1");
            tool.env("AWS_ACCESS_KEY_ID", "AKIATOLLGATE").env("AWS_SECRET_ACCESS_KEY", "sesame");
            tool.env("AWS_SESSION_TOKEN", "sesame-token").env(name, value).env("AWS_TIMEOUT", "1s");
            let output = tool.output().expect("the tool runs");
            let said = format!("{}{}", stdout(&output), stderr(&output));
            assert!(code(&output) > 0 && said.lines().count() == 1, "{status}: {said}");
            assert!(!said.contains("sesame") && !said.contains("AKIA"), "{status}, {name}: {said}");
        }
    }
}

#[tokio::test]
async fn only_the_owner_of_the_tables_may_move_them() {
    let (server, _) = prepared().await;
    let place = Place::new();
    fill(&server, march(), 10).await;
    server
        .run(
            "CREATE ROLE owner LOGIN IN ROLE tollgate;
            CREATE ROLE reader LOGIN;
            GRANT USAGE ON SCHEMA tollgate TO reader;
            GRANT SELECT ON ALL TABLES IN SCHEMA tollgate TO reader",
        )
        .await;
    let of = |user: &str| tollgate_record::Postgres::open(&server.url_of(user, "postgres")).expect("an address");
    let seen = of("reader").archivable(Duration::from_secs(90 * 86_400)).await.expect("it may look");
    assert_eq!(seen.iter().map(|month| month.rows).collect::<Vec<_>>(), [10]);
    let error = of("reader").archive(&place.archive, &small_files(), |_| ()).await.expect_err("no right").to_string();
    assert_eq!(error, "postgres: permission denied for table archive_lock (SQLSTATE 42501)");
    assert!(!is_gone(&server, march()).await);
    assert_eq!(only(&of("owner"), &place, &small_files()).await.expect("moved").rows, 10);
    assert!(is_gone(&server, march()).await);
}
