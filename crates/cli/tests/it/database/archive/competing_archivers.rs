//! Several archivers at once, late writes of one that was suspended, and files that aren't tollgate's.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::pin::pin;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use futures_util::FutureExt;
use tollgate_record::Postgres as Database;
use tollgate_record::archive::{ArchiveOptions, Month};
use tollgate_testing::polling::wait_until;
use tollgate_testing::postgres_server::PostgresServer;

use super::{Place, fill, is_gone, march, moved, moved_again, only, prepared, rows_left, small_files};
use crate::support::s3::S3;
use crate::support::tool::{code, stderr, stdout, tollgate};

const ROWS: u32 = 200;

fn replacing() -> ArchiveOptions {
    let mut options = small_files();
    options.replace.insert(march());
    options
}

/// As if a day had passed.
fn age(place: &Place) {
    for file in place.files(march()).iter().filter(|file| file.is_file()) {
        let yesterday = SystemTime::now() - Duration::from_secs(86_401);
        std::fs::File::options().append(true).open(file).and_then(|file| file.set_modified(yesterday)).expect("older");
    }
}

/// As if their process was killed.
async fn end_archivers(server: &PostgresServer) {
    server.run("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'tollgate'").await;
}

const HELD: &str = "SELECT 1 FROM pg_locks WHERE relation = 'tollgate.archive_lock'::regclass";

#[tokio::test]
async fn a_suspended_archiver_does_not_harm_the_work_of_another() {
    let (server, database) = prepared().await;
    for polls in (0..).step_by(7) {
        let place = Place::new();
        fill(&server, march(), ROWS).await;
        moved(&database, &place, &small_files()).await;
        fill(&server, march(), ROWS).await;
        let replacing = replacing();
        let mut suspended = pin!(database.archive(&place.archive, &replacing, |_| ()));
        let mut done = None;
        for _ in 0..polls {
            done = suspended.as_mut().now_or_never();
            if done.is_some() {
                break;
            }
            tokio::time::sleep(Duration::from_micros(300)).await;
        }
        if done.is_some() {
            break;
        }
        end_archivers(&server).await;
        wait_until("it is gone", async || server.run(HELD).await.is_empty()).await;
        let options = if polls % 2 == 0 { small_files() } else { replacing.clone() };
        let other = Database::open(&server.url()).expect("an address");
        for moved in moved(&other, &place, &options).await {
            // It may have been dropped already.
            let is_replaced =
                moved.result.as_ref().is_err_and(|error| error.to_string().contains("nothing to archive"));
            assert!(moved.result.is_ok() || is_replaced, "{polls}: {:?}", moved.result);
        }
        match suspended.await {
            Ok(moved) => assert!(polls == 0 || moved.iter().all(|moved| moved.result.is_err()), "{polls}: {moved:?}"),
            Err(error) => assert!(error.is_unreachable(), "{polls}: {error}"),
        }
        for _ in 0..2 {
            assert_eq!(place.archive.verify(march()).await.expect("whole").rows, u64::from(ROWS), "{polls}");
            age(&place);
            assert!(moved_again(&other, &place).await);
        }
        assert!(is_gone(&server, march()).await && rows_left(&server).await == "0");
    }
}

/// A proxy that holds back requests that put a manifest, until they are released.
struct Holding {
    port: u16,
    holds: Arc<AtomicBool>,
    is_held: Arc<AtomicBool>,
}

impl Holding {
    fn before(server: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let [holds, is_held] = [true, false].map(|flag| Arc::new(AtomicBool::new(flag)));
        let held = (Arc::clone(&holds), Arc::clone(&is_held));
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let server = TcpStream::connect(("127.0.0.1", server)).expect("connected");
                let answers = (server.try_clone().expect("a socket"), client.try_clone().expect("a socket"));
                std::thread::spawn(move || pass(answers.0, answers.1, None));
                let held = held.clone();
                std::thread::spawn(move || pass(client, server, Some(held)));
            }
        });
        Self { port, holds, is_held }
    }

    fn release(&self) {
        self.holds.store(false, Ordering::SeqCst);
    }
}

fn pass(mut from: TcpStream, mut to: TcpStream, held: Option<(Arc<AtomicBool>, Arc<AtomicBool>)>) {
    let mut bytes = [0; 1 << 16];
    while let Ok(length @ 1..) = from.read(&mut bytes) {
        let text = String::from_utf8_lossy(&bytes[..length]);
        if let Some((holds, is_held)) = &held
            && text.starts_with("PUT ")
            && text.contains("manifest.json")
        {
            is_held.store(true, Ordering::SeqCst);
            while holds.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        if to.write_all(&bytes[..length]).is_err() {
            return;
        }
    }
}

#[tokio::test]
async fn a_manifest_that_arrives_when_another_has_moved_the_month_is_refused() {
    let (server, _) = prepared().await;
    let s3 = S3::start();
    let holding = Holding::before(s3.port);
    let database = server.url();
    let arguments = ["--database", database.as_str()];
    fill(&server, march(), ROWS).await;
    assert_eq!(code(&s3.run(&arguments)), 0);
    fill(&server, march(), ROWS).await;
    let mut killed = s3.tool(&[&arguments[..], &["--replace", "2020-03", "--yes"]].concat());
    killed.env("AWS_ENDPOINT", format!("http://127.0.0.1:{}", holding.port)).stdout(Stdio::null());
    let mut killed = killed.spawn().expect("the tool runs");
    wait_until("the manifest is held", async || holding.is_held.load(Ordering::SeqCst)).await;
    killed.kill().expect("killed");
    killed.wait().expect("ended");
    end_archivers(&server).await;
    let moved = s3.run(&arguments);
    assert_eq!(code(&moved), 0, "{}", stderr(&moved));
    assert!(is_gone(&server, march()).await);
    holding.release();
    tokio::time::sleep(Duration::from_millis(500)).await;
    let verified = s3.run(&["verify"]);
    assert!(stdout(&verified).starts_with(&format!("2020-03: {ROWS} rows intact")), "{verified:?}");
}

#[tokio::test]
async fn files_that_do_not_belong_to_the_archived_table_are_never_deleted() {
    let (server, database) = prepared().await;
    let place = Place::new();
    fill(&server, march(), ROWS).await;
    only(&database, &place, &small_files()).await.expect("moved");
    let folder = place.folder(march());
    let first = place.files(march());
    let manifest = std::fs::read(folder.join("manifest.json")).expect("a file");
    let others = ["SHA256SUMS", "notes #1.txt", "part-0.parquet", "kept/part-0-0123456789abcdef.parquet"];
    std::fs::create_dir(folder.join("kept")).expect("a directory");
    for other in others {
        std::fs::write(folder.join(other), "of somebody else").expect("written");
    }
    // Files of another table, whose rows nothing else may have.
    std::fs::write(folder.join("part-0-0123456789abcdef.parquet"), "of another table").expect("written");
    fill(&server, march(), ROWS + 1).await;
    only(&database, &place, &replacing()).await.expect("moved");
    assert!(first.iter().all(|file| file.ends_with("manifest.json") || !file.exists()), "replaced on request");
    // A backup of the manifest is put back: what it names is gone, and the rest is all that there is.
    let newest = std::fs::read(folder.join("manifest.json")).expect("a file");
    std::fs::write(folder.join("manifest.json"), manifest).expect("written");
    age(&place);
    let before = place.files(march());
    assert!(moved_again(&database, &place).await);
    assert_eq!(place.files(march()), before, "nothing is deleted");
    std::fs::write(folder.join("manifest.json"), newest).expect("written");
    assert_eq!(place.archive.verify(march()).await.expect("whole").rows, u64::from(ROWS) + 1);
    assert_eq!(place.archive.leftovers(march()).await.expect("names"), ["part-0-0123456789abcdef.parquet"]);
    assert_eq!(place.archive.delete(march()).await, Ok(true));
    let mut left = place.files(march());
    left.retain(|file| file.is_file());
    assert_eq!(left.len(), 3, "{left:?}");
    assert!(others.iter().all(|other| folder.join(other).exists()));
    assert!(place.archive.list().await.expect("an answer").unfinished.is_empty());
}

#[tokio::test]
async fn attempts_that_failed_leave_nothing_and_those_that_were_killed_are_gone_after_a_day() {
    let (server, database) = prepared().await;
    let place = Place::new();
    fill(&server, march(), ROWS).await;
    server.run("INSERT INTO tollgate.rate_limit_audit_logs_2020_03 (at, decision, reason, latency_us) VALUES ('2020-03-31', 'allowed', '', 1)").await;
    // The manifest's place is taken by what can't be a manifest.
    std::fs::create_dir_all(place.folder(march()).join("manifest.json/taken")).expect("a directory");
    for _ in 0..2 {
        only(&database, &place, &small_files()).await.expect_err("no place");
    }
    let parts = |place: &Place| place.files(march()).iter().filter(|file| file.is_file()).count();
    // What became of the manifest isn't known, so its files are left.
    let after = parts(&place);
    age(&place);
    only(&database, &place, &small_files()).await.expect_err("no place");
    assert!(parts(&place) <= after / 2 + 1, "those of before are gone");
    std::fs::remove_dir_all(place.folder(march()).join("manifest.json")).expect("removed");
    let moved = only(&database, &place, &small_files()).await.expect("moved");
    assert_eq!(place.files(march()).len(), moved.parts + 1);
}

/// Somebody who has done this in a transaction that doesn't end, and how errors name that.
async fn holder(server: &PostgresServer, user: &str, sql: &str) -> (tokio_postgres::Client, String) {
    let url = server.url_of(user, "postgres");
    let (client, connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await.expect("connected");
    tokio::spawn(connection);
    client.batch_execute(&format!("SET application_name = 'holder'; BEGIN; {sql}")).await.expect("begun");
    let pid: i32 = client.query_one("SELECT pg_backend_pid()", &[]).await.expect("a number").get(0);
    (client, format!("the lock is held by pid {pid} (user {user}, holder, in a transaction since 20"))
}

#[tokio::test]
async fn another_archiver_is_named_and_whoever_can_only_connect_is_none() {
    let (server, _) = prepared().await;
    let place = Place::new();
    fill(&server, march(), ROWS).await;
    let url = server.url();
    let arguments = ["archive", "--database", &url, "--store", place.url()];
    let (_archiver, named) = holder(&server, "tollgate", "LOCK TABLE tollgate.archive_lock IN EXCLUSIVE MODE").await;
    let output = tollgate(&arguments);
    let said = stderr(&output);
    assert!(said.starts_with("error: archive: another archiver is running on this database: postgres: "), "{said}");
    assert!(code(&output) == 2 && said.lines().count() == 1 && said.contains(&named), "{said}: {named}");
    drop(_archiver);
    server.run("CREATE ROLE anybody LOGIN").await;
    let every_lock = "SELECT pg_advisory_lock(8390043843561677672)";
    let (_anybody, _) = holder(&server, "anybody", every_lock).await;
    let output = tollgate(&arguments);
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    assert!(is_gone(&server, march()).await);
}

#[tokio::test]
async fn a_month_to_be_replaced_that_has_no_table_is_reported() {
    let (server, database) = prepared().await;
    let place = Place::new();
    fill(&server, march(), ROWS).await;
    let other: Month = "2020-09".parse().expect("a month");
    let mut options = small_files();
    options.replace.insert(other);
    let months = moved(&database, &place, &options).await;
    assert!(months[0].month == march() && months[0].result.is_ok());
    let error = months[1].result.as_ref().expect_err("no table");
    let expected = "archive of 2020-09: nothing to archive: this month has no table, or it isn't old enough";
    assert_eq!(error.to_string(), expected);
}
