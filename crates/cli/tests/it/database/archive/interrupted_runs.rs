//! Archive runs that are interrupted, rows that arrive during one, and altered files.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Mutex;
use std::task::Poll;
use std::time::{Duration, SystemTime};

use tollgate_record::Postgres as Database;
use tollgate_record::archive::{ArchiveOptions, ArchiveProgress, Archived, ArchivedMonth, Step};
use tollgate_testing::effort::{cases, times};
use tollgate_testing::polling::wait_until;
use tollgate_testing::postgres_server::PostgresServer;

use super::hostile_files::Manifest;
use super::{
    Place, all_of, complete, fill, flip, is_gone, march, moved, only, prepared, remove, rows_left, small_files,
};
use crate::support::tool::command;

const ROWS: u32 = 300;

/// What an archive of these rows is, if nothing goes wrong.
async fn undisturbed(
    server: &PostgresServer,
    database: &Database,
    rows: u32,
    options: &ArchiveOptions,
) -> ArchivedMonth {
    let place = Place::new();
    fill(server, march(), rows).await;
    only(database, &place, options).await.expect("moved")
}

/// Every row is in the archive once, and nowhere else.
async fn assert_moved(server: &PostgresServer, place: &Place, expected: &ArchivedMonth, why: &str) {
    let database = tollgate_testing::record::database(server);
    let found = place.archive.verify(march()).await.unwrap_or_else(|error| panic!("{why}: {error}"));
    assert_eq!((found.rows, &found.checksum), (expected.rows, &expected.checksum), "{why}");
    assert!(is_gone(server, march()).await && rows_left(server).await == "0", "{why}");
    // Files that were left by attempts that were cut off are deleted by a run after a day.
    for file in place.files(march()) {
        let yesterday = SystemTime::now() - Duration::from_secs(86_401);
        std::fs::File::options().append(true).open(&file).and_then(|file| file.set_modified(yesterday)).expect("older");
    }
    database.archive(&place.archive, &ArchiveOptions::default(), |_| ()).await.expect("a run");
    assert_eq!(place.files(march()).len(), expected.parts + 1, "{why}: {:?}", place.files(march()));
    assert!(place.archive.leftovers(march()).await.expect("an answer").is_empty(), "{why}");
}

/// When a run is dropped.
#[derive(Clone, Copy, Debug)]
enum Moment {
    /// Polled so often.
    Polls(usize),
    /// Where it first waits in this step.
    In(Step),
}

/// Runs until this moment, and is dropped then. Answers how it ended, if it did, and where it was.
async fn dropped_at(
    database: &Database,
    place: &Place,
    options: &ArchiveOptions,
    moment: Moment,
) -> (Option<Vec<Archived>>, Option<Step>) {
    let step = Mutex::new(None);
    let mut polls = 0;
    let done = {
        let mut work = pin!(
            database.archive(&place.archive, options, |progress| *step.lock().expect("no panic") = Some(progress.step))
        );
        poll_fn(|context| {
            if let Poll::Ready(done) = work.as_mut().poll(context) {
                return Poll::Ready(Some(done.expect("a run")));
            }
            polls += 1;
            let is_over = match moment {
                Moment::Polls(most) => polls > most,
                Moment::In(last) => *step.lock().expect("no panic") == Some(last),
            };
            if is_over { Poll::Ready(None) } else { Poll::Pending }
        })
        .await
    };
    (done, step.into_inner().expect("no panic"))
}

#[tokio::test]
async fn an_archiver_dropped_at_any_moment_is_resumed_and_no_row_is_lost_or_duplicated() {
    let (server, database) = prepared().await;
    let options = small_files();
    let expected = undisturbed(&server, &database, ROWS, &options).await;
    // In each step, and of all the moments every eighth, or each in the nightly run.
    let steps = [Step::Export, Step::ReadBack, Step::Detach, Step::Drop];
    let polls = (0..).step_by(if times() == 1 { 8 } else { 1 });
    for moment in steps.map(Moment::In).into_iter().chain(polls.map(Moment::Polls)) {
        let place = Place::new();
        fill(&server, march(), ROWS).await;
        let (done, step) = dropped_at(&database, &place, &options, moment).await;
        match (done, moment) {
            (Some(done), Moment::Polls(_)) => {
                assert_eq!(done.len(), 1);
                break;
            }
            (done, Moment::In(expected)) => assert!(done.is_none() && step == Some(expected), "{moment:?}: {step:?}"),
            (None, Moment::Polls(_)) => {}
        }
        // Where nothing was archived yet, all rows are where they were.
        let manifest = complete(&place).await;
        assert!(!manifest.is_empty() || rows_left(&server).await == ROWS.to_string(), "{moment:?}: {step:?}");
        // It ends once more, and then it may finish.
        let again = if let Moment::Polls(polls) = moment { Moment::Polls(polls / 2) } else { moment };
        dropped_at(&database, &place, &options, again).await;
        for moved in moved(&database, &place, &options).await {
            moved.result.unwrap_or_else(|error| panic!("{moment:?}: {step:?}: {error}"));
        }
        assert_moved(&server, &place, &expected, &format!("{moment:?}: {step:?}")).await;
    }
}

#[tokio::test]
async fn an_archive_run_that_was_killed_at_any_moment_is_resumed() {
    const MANY: u32 = 10_000;
    let (server, database) = prepared().await;
    let mut options = ArchiveOptions::default();
    options.part_rows = 1500;
    let expected = undisturbed(&server, &database, MANY, &options).await;
    let (url, mut killed) = (server.url(), 0);
    let tool = |place: &Place| command(&["archive", "--database", &url, "--store", place.url(), "--part-rows", "1500"]);
    let place = Place::new();
    fill(&server, march(), MANY).await;
    let began = std::time::Instant::now();
    assert!(tool(&place).output().expect("the tool runs").status.success());
    let mut whole = began.elapsed();
    let rounds = cases(4);
    for round in 0..rounds {
        let place = Place::new();
        fill(&server, march(), MANY).await;
        let mut child = tool(&place).stdout(std::process::Stdio::null()).spawn().expect("the tool runs");
        let moment = whole * round / rounds;
        tokio::time::sleep(moment).await;
        child.kill().expect("killed");
        if child.wait().expect("ended").success() {
            // The machine has become faster.
            whole = moment;
        } else {
            killed += 1;
        }
        let again = tool(&place).output().expect("the tool runs");
        assert!(again.status.success(), "{round}: {again:?}");
        assert_moved(&server, &place, &expected, &format!("{round} of {rounds}")).await;
    }
    assert!(killed >= rounds / 3, "{killed} were killed before they ended");
}

/// Runs SQL while an archiver waits, from where no other task is run.
fn meanwhile(url: &str, sql: &'static str) {
    let url = url.to_owned();
    let done = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let (client, connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await.expect("connected");
            tokio::spawn(connection);
            client.batch_execute(sql).await.unwrap_or_else(|error| panic!("{error:?}: {sql}"));
        });
    });
    done.join().expect("no panic");
}

#[tokio::test]
async fn a_row_that_comes_after_the_export_is_not_lost() {
    const LATE: &str = "(at, user_id, decision, reason, latency_us)
        VALUES ('2020-03-31 23:59:59.999999+00', 'late', 'allowed', 'allowed', 1)";
    let (server, database) = prepared().await;
    let sql: [(Step, &'static str); 2] = [
        (Step::ReadBack, "INSERT INTO tollgate.rate_limit_audit_logs"),
        // Once it is detached, only by the table's own name.
        (Step::Drop, "INSERT INTO tollgate.rate_limit_audit_logs_2020_03"),
    ];
    for (at, insert) in sql {
        let insert: &'static str = Box::leak(format!("{insert} {LATE}").into_boxed_str());
        let (place, url, mut done) = (Place::new(), server.url(), false);
        fill(&server, march(), ROWS).await;
        let report = |progress: &ArchiveProgress| {
            if progress.step == at && !std::mem::replace(&mut done, true) {
                meanwhile(&url, insert);
            }
        };
        let mut moved = database.archive(&place.archive, &small_files(), report).await.expect("a run");
        assert_eq!(moved.remove(0).result.expect("moved").rows, u64::from(ROWS) + 1, "{at:?}");
        assert_eq!(all_of(&place, "late", None, None).await.len(), 1, "{at:?}");
        place.archive.verify(march()).await.expect("whole");
        assert!(is_gone(&server, march()).await);
    }
    // If the archiver was killed in between, either is right.
    let place = Place::new();
    fill(&server, march(), ROWS).await;
    until_step(&database, &place, Step::Detach).await;
    assert_eq!(complete(&place).await.len(), 1);
    server.run(&format!("INSERT INTO tollgate.rate_limit_audit_logs_2020_03 {LATE}")).await;
    let error = only(&database, &place, &small_files()).await.expect_err("a row more");
    assert_eq!(error, "archive of 2020-03: the table has 301 rows, but the archive has 300");
    let mut options = small_files();
    options.replace.insert(march());
    assert_eq!(only(&database, &place, &options).await.expect("moved").rows, 301);
}

/// Runs until a step begins, and is dropped then.
async fn until_step(database: &Database, place: &Place, step: Step) {
    let reached = tokio::sync::Notify::new();
    let options = small_files();
    let report = |progress: &ArchiveProgress| {
        if progress.step == step {
            reached.notify_one();
        }
    };
    tokio::select! {
        biased;
        () = reached.notified() => {}
        done = database.archive(&place.archive, &options, report) => panic!("it has ended: {done:?}"),
    }
}

#[tokio::test]
async fn a_detachment_that_was_interrupted_is_finished() {
    let (server, database) = prepared().await;
    let options = small_files();
    let expected = undisturbed(&server, &database, ROWS, &options).await;
    let place = Place::new();
    fill(&server, march(), ROWS).await;
    // A reader of the audit log, for whose end the detachment waits.
    let (reader, connection) = tokio_postgres::connect(&server.url(), tokio_postgres::NoTls).await.expect("connected");
    tokio::spawn(connection);
    reader.batch_execute("BEGIN; SELECT count(*) FROM tollgate.rate_limit_audit_logs").await.expect("a reader");
    let is_pending = async || server.run("SELECT 1 FROM pg_inherits WHERE inhdetachpending").await.len() == 1;
    tokio::select! {
        _ = wait_until("the detachment waits", is_pending) => {}
        done = database.archive(&place.archive, &options, |_| ()) => panic!("it has ended: {done:?}"),
    }
    // The server notices that the archiver has gone.
    let working = "SELECT 1 FROM pg_stat_activity WHERE query LIKE 'ALTER TABLE%' AND pid <> pg_backend_pid()";
    wait_until("the server gives up", async || server.run(working).await.is_empty()).await;
    reader.batch_execute("COMMIT").await.expect("it ends");
    assert!(is_pending().await, "it isn't finished by itself");
    let found = database.archivable(Duration::from_secs(90 * 86_400)).await.expect("an answer");
    assert_eq!(format!("{:?}", found[0].attachment), "Pending");
    only(&database, &place, &options).await.expect("moved");
    assert_moved(&server, &place, &expected, "pending").await;
}

#[tokio::test]
async fn an_altered_file_is_detected_and_no_month_is_dropped() {
    let (server, database) = prepared().await;
    for harm in [flip as fn(&std::path::Path), cut, remove] {
        let place = Place::new();
        fill(&server, march(), ROWS).await;
        let mut done = false;
        let report = |progress: &ArchiveProgress| {
            let is_written = progress.step == Step::Export && progress.rows == progress.of;
            if is_written && !std::mem::replace(&mut done, true) {
                harm(&place.file(march(), "part-2"));
            }
        };
        let mut moved = database.archive(&place.archive, &small_files(), report).await.expect("a run");
        let error = moved.remove(0).result.expect_err("harmed");
        assert!(error.is_damaged() || error.is_missing(), "{error}");
        let is_named = [".parquet: expected ", ".parquet: file not found"].map(|why| error.to_string().contains(why));
        assert!(error.to_string().contains("part-2-") && is_named.contains(&true), "{error}");
        assert_eq!(rows_left(&server).await, ROWS.to_string());
        assert!(complete(&place).await.is_empty(), "no manifest");
        // Made again, it is whole; harmed after that, it isn't dropped either.
        place.files(march()).iter().for_each(|file| remove(file));
        until_step(&database, &place, Step::Detach).await;
        harm(&place.file(march(), "part-2"));
        let error = only(&database, &place, &small_files()).await.expect_err("harmed");
        assert!(error.ends_with(": --replace MONTH makes the archive again from the table"), "{error}");
        assert_eq!(rows_left(&server).await, ROWS.to_string());
        let mut options = small_files();
        options.replace.insert(march());
        assert_eq!(only(&database, &place, &options).await.expect("moved").rows, u64::from(ROWS));
    }
    // What was being written as an archiver was killed.
    let place = Place::new();
    fill(&server, march(), ROWS).await;
    std::fs::create_dir_all(place.folder(march())).expect("a directory");
    std::fs::write(place.folder(march()).join("part-0-0123456789abcdef.parquet#1"), "half").expect("written");
    let moved = only(&database, &place, &small_files()).await.expect("moved");
    assert_eq!(place.files(march()).len(), moved.parts + 1, "{:?}", place.files(march()));
    // Files of other rows than their checksums'.
    let place = Place::new();
    fill(&server, march(), ROWS).await;
    only(&database, &place, &small_files()).await.expect("moved");
    let path = place.folder(march()).join("manifest.json");
    let mut manifest = Manifest::read(&path);
    let checksum = manifest.parts[1].checksum.clone();
    manifest.parts[1].checksum = std::mem::replace(&mut manifest.parts[0].checksum, checksum);
    manifest.write(&path);
    let error = place.archive.verify(march()).await.expect_err("other rows").to_string();
    assert!(
        error.starts_with("archive of 2020-03: part-0-") && error.contains(": expected 100 rows with the checksum "),
        "{error}"
    );
}

fn cut(file: &std::path::Path) {
    let bytes = std::fs::read(file).expect("a file");
    std::fs::write(file, &bytes[..bytes.len() / 2]).expect("written");
}

/// As a full disk would refuse it.
#[cfg(unix)]
#[tokio::test]
async fn a_file_that_cannot_be_written_leaves_the_table_and_no_part_of_the_file() {
    let (server, database) = prepared().await;
    let place = Place::new();
    fill(&server, march(), ROWS).await;
    let mut limited = std::process::Command::new("sh");
    limited.args(["-c", "trap '' XFSZ; ulimit -f 4; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_tollgate"), "archive"]);
    limited.args(["--database", &server.url(), "--store", place.url()]);
    let output = limited.output().expect("sh");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && said.lines().count() == 1, "{output:?}");
    assert!(said.starts_with("error: archive of 2020-03: audit/year=2020/month=03/part-0-"), "{said}");
    assert!(place.files(march()).is_empty(), "{:?}", place.files(march()));
    assert_eq!(rows_left(&server).await, ROWS.to_string());
    assert_eq!(only(&database, &place, &small_files()).await.expect("moved").rows, u64::from(ROWS));
}

#[tokio::test]
async fn two_archivers_at_once_are_kept_apart() {
    let (server, database) = prepared().await;
    let options = small_files();
    let expected = undisturbed(&server, &database, ROWS, &options).await;
    let place = Place::new();
    fill(&server, march(), ROWS).await;
    let (one, two) = tokio::join!(moved(&database, &place, &options), moved(&database, &place, &options));
    let results: Vec<_> = one.into_iter().chain(two).map(|moved| moved.result.expect("moved").rows).collect();
    assert_eq!(results, [u64::from(ROWS)], "one of them has moved it");
    assert_moved(&server, &place, &expected, "two").await;
}

/// Rows that a policy hides would be hidden from every comparison, and dropped.
#[tokio::test]
async fn a_policy_that_hides_rows_keeps_a_month_from_being_moved() {
    let (server, _database) = prepared().await;
    let place = Place::new();
    fill(&server, march(), 50).await;
    server
        .run(
            "CREATE ROLE owner LOGIN; GRANT USAGE, CREATE ON SCHEMA tollgate TO owner;
            ALTER TABLE tollgate.archive_lock OWNER TO owner;
            ALTER TABLE tollgate.rate_limit_audit_logs OWNER TO owner;
            ALTER TABLE tollgate.rate_limit_audit_logs_2020_03 OWNER TO owner;
            ALTER TABLE tollgate.rate_limit_audit_logs_2020_03 ENABLE ROW LEVEL SECURITY;
            ALTER TABLE tollgate.rate_limit_audit_logs_2020_03 FORCE ROW LEVEL SECURITY;
            CREATE POLICY partly ON tollgate.rate_limit_audit_logs_2020_03 USING (latency_us < 10)",
        )
        .await;
    let owner = Database::open(&server.url_of("owner", "postgres")).expect("an address");
    let error = only(&owner, &place, &small_files()).await.expect_err("hidden");
    assert!(error.contains("row-level security"), "{error}");
    assert_eq!(rows_left(&server).await, "50");
}
