//! Old months moved out of PostgreSQL: every row is in the archive once, whatever interrupts the move.

mod competing_archivers;
mod hostile_files;
mod interrupted_runs;
mod parquet_and_s3;
#[cfg(unix)]
mod private_files;

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde_json::Value;
use tempfile::TempDir;
use tollgate_record::Postgres as Database;
use tollgate_record::archive::{
    Archive, ArchiveOptions, ArchiveProgress, Archived, ArchivedMonth, ArchivedRow, Month, Step,
};
use tollgate_testing::postgres_server::PostgresServer;
use tollgate_testing::record::prepared;

use crate::support::tool::{code, lines, stderr, stdout, tollgate};

/// Where archives are put, in a directory of the test's own.
struct Place {
    directory: TempDir,
    archive: Archive,
}

impl Place {
    fn new() -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let archive = Archive::open(&format!("file://{}", directory.path().display())).expect("an address");
        Self { directory, archive }
    }

    fn url(&self) -> &str {
        self.archive.address()
    }

    /// All files of a month, by name.
    fn files(&self, month: Month) -> Vec<PathBuf> {
        let Ok(files) = std::fs::read_dir(self.folder(month)) else { return Vec::new() };
        let mut files: Vec<_> = files.map(|file| file.expect("a file").path()).collect();
        files.sort();
        files
    }

    /// The file of a month that begins so, such as `part-0`.
    fn file(&self, month: Month, begins: &str) -> PathBuf {
        let begins = format!("{begins}-");
        let is_it = |file: &PathBuf| file.file_name().is_some_and(|name| name.to_string_lossy().starts_with(&begins));
        self.files(month).into_iter().find(is_it).expect("such a file")
    }

    fn folder(&self, month: Month) -> PathBuf {
        let folder = format!("audit/year={:04}/month={:02}", month.year(), month.month());
        self.directory.path().join(folder)
    }
}

/// A month long past, whatever today is.
fn march() -> Month {
    "2020-03".parse().expect("a month")
}

fn small_files() -> ArchiveOptions {
    let mut options = ArchiveOptions::default();
    options.part_rows = 100;
    options
}

/// Makes a month's table with so many rows, the same each time: every column with and without a value, and odd text.
async fn fill(server: &PostgresServer, month: Month, rows: u32) {
    let (year, number) = (month.year(), month.month());
    let table = format!("tollgate.rate_limit_audit_logs_{year:04}_{number:02}");
    let begin = format!("{month}-01 00:00:00+00");
    let sql = format!(
        r#"SET TIME ZONE 'UTC';
        CREATE TABLE {table} PARTITION OF tollgate.rate_limit_audit_logs
            FOR VALUES FROM ('{begin}') TO ('{begin}'::timestamptz + interval '1 month');
        INSERT INTO tollgate.rate_limit_audit_logs
        SELECT
            '{begin}'::timestamptz + (i * 7919 % 2592000) * interval '1 s' + i * interval '1 us',
            CASE WHEN i % 11 > 0 THEN (ARRAY['alice', 'Bob', 'zoë', '李', 'a "quoted" user', E'two\nlines', ''])[1 + i % 7] END,
            CASE WHEN i % 3 > 0 THEN 'key-' || i % 50 END,
            CASE i % 4 WHEN 0 THEN NULL WHEN 1 THEN '10.0.0.1'::inet + i WHEN 2 THEN '2001:db8::1'::inet + i ELSE '10.1.0.0/16'::inet END,
            CASE WHEN i % 5 > 0 THEN '/items/' || i % 100 || E'\t\'\\ \u2028 😀' END,
            CASE WHEN i % 6 > 0 THEN 'GET' END, CASE WHEN i % 7 > 0 THEN 'api' END,
            (ARRAY['allowed', 'throttled', 'blocked'])[1 + i % 3], (ARRAY['allowed', 'limits', 'missing'])[1 + i % 3],
            CASE WHEN i % 8 > 0 THEN 'gcra 5/1s' END,
            CASE i % 9 WHEN 0 THEN NULL WHEN 1 THEN 9223372036854775807 WHEN 2 THEN -9223372036854775808 ELSE i END,
            CASE WHEN i % 10 > 0 THEN i END, CASE i % 12 WHEN 0 THEN NULL WHEN 1 THEN -32768 WHEN 2 THEN 32767 ELSE 200 END,
            CASE WHEN i % 13 > 0 THEN -1 END, CASE WHEN i % 14 > 0 THEN 'eu' END, CASE WHEN i % 15 > 0 THEN 'app-1' END, i,
            CASE WHEN i % 16 = 0 THEN 'api,everybody' END
        FROM generate_series(1, {rows}) AS i"#
    );
    server.run(&sql).await;
}

async fn is_gone(server: &PostgresServer, month: Month) -> bool {
    let table = format!("rate_limit_audit_logs_{:04}_{:02}", month.year(), month.month());
    server.run(&format!("SELECT relname FROM pg_class WHERE relname = '{table}'")).await.is_empty()
}

async fn rows_left(server: &PostgresServer) -> String {
    server.run("SELECT count(*) FROM tollgate.rate_limit_audit_logs").await.remove(0)
}

async fn moved(database: &Database, place: &Place, options: &ArchiveOptions) -> Vec<Archived> {
    is_send(database.archive(&place.archive, options, |_| ())).await.expect("a run")
}

/// Whatever runtime a service has.
fn is_send<F: Future + Send>(future: F) -> F {
    future
}

/// The months that the archive has.
async fn complete(place: &Place) -> Vec<Month> {
    place.archive.list().await.expect("an answer").complete.into_iter().collect()
}

/// What has become of the only month.
async fn only(database: &Database, place: &Place, options: &ArchiveOptions) -> Result<ArchivedMonth, String> {
    let mut moved = moved(database, place, options).await;
    assert_eq!(moved.len(), 1, "{moved:?}");
    moved.remove(0).result.map_err(|error| error.to_string())
}

async fn all_of(place: &Place, user: &str, from: Option<SystemTime>, to: Option<SystemTime>) -> Vec<ArchivedRow> {
    let mut rows = place.archive.query(user, from, to);
    let mut found = Vec::new();
    while let Some(more) = is_send(rows.next()).await.expect("rows") {
        assert!(!more.is_empty());
        found.extend(more);
    }
    found
}

/// In the words of PostgreSQL.
fn as_text(row: &ArchivedRow) -> String {
    let micros = row.at.duration_since(SystemTime::UNIX_EPOCH).expect("after 1970").as_micros();
    let text = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".to_owned());
    let number = |number: Option<i64>| number.map_or("-".to_owned(), |number| number.to_string());
    [
        micros.to_string(),
        text(&row.user),
        text(&row.api_key),
        text(&row.ip),
        text(&row.endpoint),
        text(&row.method),
        text(&row.rule),
        row.decision.clone(),
        row.reason.clone(),
        text(&row.limited_by),
        number(row.used),
        number(row.capacity),
        number(row.status.map(Into::into)),
        number(row.retry_after_us),
        text(&row.region),
        text(&row.server),
        row.latency_us.to_string(),
        text(&row.rules),
    ]
    .join("|")
}

const AS_TEXT: &str = "SELECT concat_ws('|', (extract(epoch FROM at) * 1000000)::bigint, coalesce(user_id, '-'),
    coalesce(api_key, '-'), CASE WHEN ip IS NULL THEN '-' ELSE format('%s', ip) END, coalesce(endpoint, '-'),
    coalesce(method, '-'), coalesce(rule, '-'), decision, reason, coalesce(limited_by, '-'), coalesce(used::text, '-'),
    coalesce(capacity::text, '-'), coalesce(status::text, '-'), coalesce(retry_after_us::text, '-'), coalesce(region, '-'),
    coalesce(server, '-'), latency_us, coalesce(rules, '-')) FROM tollgate.rate_limit_audit_logs";

const USERS: [&str; 7] = ["alice", "Bob", "zoë", "李", "a \"quoted\" user", "two\nlines", ""];

#[tokio::test]
async fn a_month_is_moved_with_every_value_and_each_users_rows_are_found() {
    let (server, database) = prepared().await;
    let place = Place::new();
    fill(&server, march(), 1000).await;
    let mut expected = Vec::new();
    for user in USERS {
        let quoted = user.replace('\'', "''");
        expected.push(server.run(&format!("{AS_TEXT} WHERE user_id = '{quoted}' ORDER BY at")).await);
    }
    let (mut steps, mut furthest) = (Vec::new(), 0);
    let report = |progress: &ArchiveProgress| {
        assert!(progress.month == march() && progress.rows <= progress.of && progress.of == 1000, "{progress:?}");
        if steps.last() != Some(&progress.step) {
            steps.push(progress.step);
        }
        furthest = furthest.max(progress.rows);
    };
    let mut options = small_files();
    // Files end with their last row, and groups of rows within them.
    options.part_rows = 300;
    let mut moved = database.archive(&place.archive, &options, report).await.expect("a run");
    let month = moved.remove(0).result.expect("moved");
    assert_eq!((steps, furthest), (vec![Step::Export, Step::ReadBack, Step::Detach, Step::Drop], 1000));
    assert_eq!((month.rows, month.parts, month.month), (1000, 4, march()));
    assert!(is_gone(&server, march()).await && rows_left(&server).await == "0");
    assert_eq!(complete(&place).await, [march()]);
    assert_eq!(place.archive.describe(march()).await, Ok(Some(month.clone())));
    assert_eq!(place.archive.verify(march()).await, Ok(month.clone()));
    assert_eq!(place.files(march()).len(), 5);
    for (user, expected) in USERS.into_iter().zip(expected) {
        let found: Vec<_> = all_of(&place, user, None, None).await.iter().map(as_text).collect();
        assert!(expected.len() > 100 && found == expected, "{user}: {found:?}");
    }
    assert!(all_of(&place, "nobody", None, None).await.is_empty());
    let (first, last) = (month.first_at.expect("a row"), month.last_at.expect("a row"));
    let bob = all_of(&place, "Bob", None, None).await;
    let middle = bob[bob.len() / 2].at;
    let [before, after] =
        [(None, Some(middle)), (Some(middle), None)].map(async |(from, to)| all_of(&place, "Bob", from, to).await);
    assert_eq!([before.await, after.await].concat(), bob);
    assert!(all_of(&place, "Bob", Some(last + Duration::from_micros(1)), None).await.is_empty());
    assert!(all_of(&place, "Bob", None, Some(first)).await.is_empty());
    assert!(moved_again(&database, &place).await);
}

/// Nothing is left to do.
async fn moved_again(database: &Database, place: &Place) -> bool {
    moved(database, place, &small_files()).await.is_empty()
}

#[tokio::test]
async fn only_months_that_are_old_enough_are_moved_and_an_empty_one_is_an_archive_of_no_rows() {
    let (server, database) = prepared().await;
    let place = Place::new();
    let february: Month = "2020-02".parse().expect("a month");
    fill(&server, february, 0).await;
    fill(&server, march(), 10).await;
    let tables = tables_of(&server).await;
    let found = database.archivable(Duration::from_secs(31 * 86_400)).await.expect("an answer");
    assert_eq!(found.iter().map(|found| (found.month, found.rows)).collect::<Vec<_>>(), [(february, 0), (march(), 10)]);
    let mut options = small_files();
    options.older_than = Duration::from_secs(30 * 86_400);
    let error = database.archive(&place.archive, &options, |_| ()).await.expect_err("too young");
    assert_eq!(error.to_string(), "older_than: expected at least 31 days, got 30");
    options.older_than = Duration::from_secs(200 * 365 * 86_400);
    assert!(moved(&database, &place, &options).await.is_empty());
    let moved = moved(&database, &place, &small_files()).await;
    let rows: Vec<_> = moved.iter().map(|moved| moved.result.as_ref().expect("moved").rows).collect();
    assert_eq!((rows, tables), (vec![0, 10], 2 + tables_of(&server).await));
    assert_eq!(place.files(february).len(), 1, "the manifest alone");
    assert_eq!(place.archive.verify(february).await.expect("whole").first_at, None);
}

/// Of all months, those that services write to included.
async fn tables_of(server: &PostgresServer) -> usize {
    server.run("SELECT 1 FROM pg_class WHERE relkind = 'r' AND relname LIKE 'rate_limit_audit_logs_2%'").await.len()
}

#[tokio::test]
async fn a_table_with_other_columns_dependents_or_bounds_is_not_archived() {
    let (server, database) = prepared().await;
    let place = Place::new();
    fill(&server, march(), 10).await;
    server.run("ALTER TABLE tollgate.rate_limit_audit_logs ADD COLUMN extra text").await;
    let error = only(&database, &place, &small_files()).await.expect_err("a column more");
    assert!(error.starts_with("archive of 2020-03: rate_limit_audit_logs_2020_03: the column extra text "), "{error}");
    assert!(
        error.ends_with("isn't one that this version of tollgate archives") && rows_left(&server).await == "10",
        "{error}"
    );
    server.run("ALTER TABLE tollgate.rate_limit_audit_logs DROP COLUMN extra").await;
    server.run("CREATE VIEW tollgate.march AS SELECT at FROM tollgate.rate_limit_audit_logs_2020_03").await;
    let error = only(&database, &place, &small_files()).await.expect_err("a view");
    let expected = "rate_limit_audit_logs_2020_03: can't be dropped, because rule _RETURN on view";
    assert!(error.starts_with(&format!("archive of 2020-03: {expected}")), "{error}");
    assert_eq!(rows_left(&server).await, "10", "a part of the log still");
    server.run("DROP VIEW tollgate.march").await;
    // By its name a month, by its bounds two.
    server
        .run(
            "ALTER TABLE tollgate.rate_limit_audit_logs DETACH PARTITION tollgate.rate_limit_audit_logs_2020_03;
            ALTER TABLE tollgate.rate_limit_audit_logs ATTACH PARTITION tollgate.rate_limit_audit_logs_2020_03
                FOR VALUES FROM ('2020-03-01 00:00:00+00') TO ('2020-05-01 00:00:00+00');
            INSERT INTO tollgate.rate_limit_audit_logs (at, decision, reason, latency_us)
                VALUES ('2020-04-02 00:00:00+00', 'allowed', 'allowed', 1)",
        )
        .await;
    let error = only(&database, &place, &small_files()).await.expect_err("a row of another month");
    assert_eq!(error, "archive of 2020-03: at: a row's time isn't in 2020-03");
    assert_eq!(rows_left(&server).await, "11");
    assert!(complete(&place).await.is_empty());
}

#[tokio::test]
async fn an_archive_that_differs_from_its_table_is_left_and_replaced_on_request() {
    let (server, database) = prepared().await;
    let place = Place::new();
    fill(&server, march(), 300).await;
    let april: Month = "2020-04".parse().expect("a month");
    let before = only(&database, &place, &small_files()).await.expect("moved");
    // As a backup that was restored would have it.
    fill(&server, march(), 301).await;
    fill(&server, april, 5).await;
    let files = |place: &Place| -> Vec<_> {
        place.files(march()).iter().map(|file| std::fs::read(file).expect("a file")).collect()
    };
    let stored = files(&place);
    let both = moved(&database, &place, &small_files()).await;
    let error = both[0].result.as_ref().expect_err("another row");
    assert!(error.is_mismatch(), "{error}");
    assert_eq!(error.to_string(), "archive of 2020-03: the table has 301 rows, but the archive has 300");
    assert_eq!((both[1].month, both[1].result.as_ref().expect("moved").rows), (april, 5), "the others go on");
    assert_eq!((rows_left(&server).await.as_str(), files(&place) == stored), ("301", true), "neither is touched");
    server.run("DELETE FROM tollgate.rate_limit_audit_logs WHERE latency_us = 301").await;
    server.run("UPDATE tollgate.rate_limit_audit_logs SET region = 'us' WHERE latency_us = 299").await;
    let arguments = ["archive", "--database", &server.url(), "--store", place.url()];
    server.run("INSERT INTO tollgate.rate_limit_audit_logs (at, decision, reason, latency_us) VALUES ('2020-03-09', 'allowed', 'limits', 1)").await;
    let foretold = stdout(&tollgate(&[&arguments[..], &["--dry-run"]].concat()));
    assert!(foretold.contains("the archive has 300, so both would be left"), "{foretold}");
    server
        .run("DELETE FROM tollgate.rate_limit_audit_logs WHERE user_id IS NULL AND endpoint IS NULL AND latency_us = 1")
        .await;
    let refused = tollgate(&arguments);
    let expected = "error: archive of 2020-03: the table has 300 rows, but the archive has 300 different ones\n";
    assert_eq!((code(&refused), stdout(&refused), stderr(&refused)), (1, String::new(), expected.to_owned()));
    let replaced = tollgate(&[&arguments[..], &["--replace", "2020-03", "--yes"]].concat());
    assert_eq!(code(&replaced), 0, "{}", stderr(&replaced));
    let after = place.archive.verify(march()).await.expect("whole");
    assert!(is_gone(&server, march()).await && after.rows == 300 && after.checksum != before.checksum);
    // The same rows again: nothing has to be made.
    fill(&server, april, 5).await;
    assert_eq!(only(&database, &place, &small_files()).await.expect("the same").rows, 5);
    assert!(is_gone(&server, april).await);
}

#[tokio::test]
async fn archives_that_have_expired_are_listed_and_deleted_on_request_only() {
    let (server, database) = prepared().await;
    let place = Place::new();
    let old: Month = "2012-12".parse().expect("a month");
    for month in [old, march()] {
        fill(&server, month, 5).await;
    }
    moved(&database, &place, &small_files()).await;
    let listed = async |now: SystemTime| -> Vec<Month> {
        place.archive.list().await.expect("an answer").expired(now, 7).into_iter().collect()
    };
    let moment = "2027-04".parse::<Month>().expect("a month").begins();
    assert_eq!(listed(moment - Duration::from_secs(1)).await, [old]);
    assert_eq!(listed(moment).await, [old, march()], "7 years after its end");
    let run = |arguments: &[&str]| tollgate(&[&["archive"], arguments, &["--store", place.url()]].concat());
    let expired = run(&["list", "--expired", "--keep-years", "13"]);
    assert!(lines(&expired).iter().all(|line| line["month"] == "2012-12"), "{expired:?}");
    for (arguments, said, left) in [
        (&["delete", "--expired", "--keep-years", "100"][..], "nothing to delete\n", 2),
        (&["delete", "--expired", "--keep-years", "13"], "2012-12: would be deleted by --yes\n", 2),
        (&["delete", "2020-03"], "2020-03: would be deleted by --yes\n", 2),
        (&["delete", "--expired", "--keep-years", "13", "--yes"], "2012-12: deleted\n", 1),
        (&["delete", "2012-12", "--yes"], "2012-12: not archived\n", 1),
        (&["delete", "2020-03", "--yes"], "2020-03: deleted\n", 0),
    ] {
        let output = run(arguments);
        let expected = i32::from(said.ends_with("not archived\n"));
        assert_eq!((stdout(&output).as_str(), code(&output)), (said, expected), "{arguments:?}");
        assert_eq!(lines(&run(&["list"])).len(), left, "{arguments:?}");
    }
    assert!(place.files(march()).is_empty() && place.files(old).is_empty());
    // Files whose manifest is lost are noticed, and deleted on request.
    fill(&server, march(), 5).await;
    moved(&database, &place, &small_files()).await;
    std::fs::remove_file(place.folder(march()).join("manifest.json")).expect("removed");
    let verified = run(&["verify"]);
    assert!(
        code(&verified) == 1 && stderr(&verified).contains("archive of 2020-03: manifest.json is missing"),
        "{verified:?}"
    );
    assert_eq!(stdout(&run(&["delete", "2020-03", "--yes"])), "2020-03: deleted\n");
    assert!(place.files(march()).is_empty());
    let none = run(&["delete"]);
    assert_eq!(code(&none), 2, "{none:?}");
}

#[tokio::test]
async fn a_month_that_cannot_be_read_keeps_none_of_the_others_from_being_used() {
    let (server, database) = prepared().await;
    let place = Place::new();
    let [april, may] = ["2020-04", "2020-05"].map(|month| month.parse().expect("a month"));
    for month in [march(), april, may] {
        fill(&server, month, 200).await;
    }
    moved(&database, &place, &small_files()).await;
    std::fs::write(place.folder(march()).join("manifest.json"), "{}").expect("written");
    remove(&place.file(april, "part-0"));
    let run = |arguments: &[&str]| tollgate(&[&["archive"], arguments, &["--store", place.url()]].concat());
    let listed = run(&["list"]);
    let months: Vec<_> = lines(&listed).into_iter().map(|line| line["month"].clone()).collect();
    assert_eq!((code(&listed), months), (1, vec!["2020-04".into(), "2020-05".into()]));
    let damaged = "error: archive of 2020-03: manifest: not a manifest of format 1\n";
    assert_eq!(stderr(&listed), damaged);
    let found = run(&["query", "--user", "alice"]);
    let said = stderr(&found);
    assert!(
        said.starts_with(damaged) && said.contains("year=2020/month=04/part-0-") && said.lines().count() == 2,
        "{said}"
    );
    let of = |month: &str| lines(&found).iter().filter(|row| row["at"].to_string().contains(month)).count();
    assert_eq!((code(&found), of("2020-03")), (1, 0));
    assert!(of("2020-04-") > 0 && of("2020-04-") < of("2020-05-"), "{found:?}");
    assert_eq!(stdout(&run(&["delete", "2020-03", "--yes"])), "2020-03: deleted\n");
    assert_eq!(stderr(&run(&["list"])), "");
}

fn remove(file: &Path) {
    std::fs::remove_file(file).expect("removed");
}

#[tokio::test]
async fn the_tool_moves_the_months_that_it_listed() {
    let (server, _) = prepared().await;
    let place = Place::new();
    fill(&server, march(), 250).await;
    let database = server.url();
    let arguments = ["archive", "--database", &database, "--store", place.url()];
    let shown = tollgate(&[&arguments[..], &["--dry-run"]].concat());
    let said = stdout(&shown);
    assert!(code(&shown) == 0 && said.starts_with("2020-03: 250 rows, ") && said.lines().count() == 1, "{shown:?}");
    assert!(place.files(march()).is_empty() && rows_left(&server).await == "250", "nothing is changed");
    let moved = tollgate(&[&arguments[..], &["--part-rows", "100"]].concat());
    let said = stdout(&moved);
    assert!(code(&moved) == 0 && said.starts_with("2020-03: 250 rows archived in 3 files of "), "{moved:?}");
    assert_eq!(stderr(&moved), "", "no bar where there is no terminal");
    assert_eq!(stdout(&tollgate(&arguments)), "", "nothing to do, for nobody to see");
    let run = |arguments: &[&str]| tollgate(&[&["archive"], arguments, &["--store", place.url()]].concat());
    assert_eq!(stdout(&run(&["verify"])), "2020-03: 250 rows intact\n");
    let listed = lines(&run(&["list"])).remove(0);
    assert_eq!(
        (&listed["rows"], &listed["files"], &listed["expires_at"]),
        (&Value::from(250), &3.into(), &"2027-04-01T00:00:00Z".into())
    );
    let query = run(&["query", "--user", "zoë", "--from", "2020-03-05", "--to", "2020-03-20T11:59"]);
    let found = lines(&query);
    assert!(
        !found.is_empty() && found.iter().all(|row| row["user_id"] == "zoë" && row["endpoint"] != "-"),
        "{found:?}"
    );
    let inside = |row: &Value| row["at"].as_str().is_some_and(|at| ("2020-03-05".."2020-03-20T12").contains(&at));
    assert!(found.iter().all(inside), "{found:?}");
    let nobody = run(&["query", "--user", "nobody"]);
    assert_eq!((code(&nobody), stdout(&nobody)), (1, String::new()));
    assert_eq!(stderr(&nobody), "tollgate: this user has no archived rows in this period\n");
    for to in ["2020-03-04", "2020-03-01"] {
        let backwards = run(&["query", "--user", "zoë", "--from", "2020-03-05", "--to", to]);
        let why = stderr(&backwards);
        assert!(code(&backwards) == 2 && why.contains("--from: expected a time before the end, 2020-03-0"), "{why}");
    }
    // In the middle of a file.
    let file = place.file(march(), "part-1");
    flip(&file);
    let damaged = run(&["verify", "2020-03"]);
    assert_eq!(code(&damaged), 1, "{damaged:?}");
    assert!(
        stderr(&damaged).starts_with("error: archive of 2020-03: part-1-")
            && stderr(&damaged).contains(".parquet: expected the SHA-256 "),
        "{damaged:?}"
    );
    let one = tollgate(&["archive", "--store", place.url()]);
    assert!(code(&one) == 2 && !stderr(&one).contains("panicked"), "{one:?}");
}

/// One bit of a file.
fn flip(file: &Path) {
    let mut bytes = std::fs::read(file).expect("a file");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(file, bytes).expect("written");
}
