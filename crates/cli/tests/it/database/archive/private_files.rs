//! Permissions of an archive's files, months that can't be read, and months that are to be replaced.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use tollgate_testing::python::python;

use super::{Place, fill, is_gone, march, moved, prepared, rows_left, small_files};
use crate::support::tool::{code, lines, stderr, stdout, tollgate};

/// A directory and all that is in it, however deep, with modes.
fn modes(directory: &Path, found: &mut Vec<(PathBuf, u32)>) {
    for entry in std::fs::read_dir(directory).expect("a directory") {
        let entry = entry.expect("an entry");
        let metadata = entry.metadata().expect("metadata");
        found.push((entry.path(), metadata.permissions().mode() & 0o7777));
        if metadata.is_dir() {
            modes(&entry.path(), found);
        }
    }
}

#[tokio::test]
async fn files_and_folders_are_for_their_owner_alone_whatever_the_umask() {
    let (server, _) = prepared().await;
    for umask in ["000", "022", "377"] {
        let place = Place::new();
        fill(&server, march(), 50).await;
        let script = format!("umask {umask}; exec \"$0\" \"$@\"");
        let mut command = Command::new("sh");
        command.args(["-c", &script, env!("CARGO_BIN_EXE_tollgate"), "archive", "--store", place.url()]);
        let output = command.args(["--database", &server.url()]).output().expect("sh");
        assert_eq!(code(&output), 0, "{umask}: {}", stderr(&output));
        let mut found = Vec::new();
        modes(place.directory.path(), &mut found);
        assert_eq!(found.len(), 5, "two files in three folders");
        for (path, mode) in found {
            assert_eq!(mode, if path.is_dir() { 0o700 } else { 0o600 }, "{umask}: {}", path.display());
        }
        // What is there already keeps its mode.
        std::fs::set_permissions(place.folder(march()), PermissionsExt::from_mode(0o750)).expect("changed");
        fill(&server, march(), 50).await;
        let again = ["archive", "--database", &server.url(), "--store", place.url(), "--replace", "2020-03", "--yes"];
        assert_eq!(code(&tollgate(&again)), 0);
        let folder = std::fs::metadata(place.folder(march())).expect("a folder");
        assert_eq!(folder.permissions().mode() & 0o7777, 0o750);
    }
}

/// The tool without root's right to read everything.
fn without_override(arguments: &[&str]) -> Output {
    let id = Command::new("id").arg("-u").output().expect("id");
    let mut command = if stdout(&id).trim() == "0" {
        let mut command = Command::new("setpriv");
        command.args(["--bounding-set", "-dac_override,-dac_read_search", env!("CARGO_BIN_EXE_tollgate")]);
        command
    } else {
        Command::new(env!("CARGO_BIN_EXE_tollgate"))
    };
    command.arg("archive").args(arguments).output().expect("the tool runs")
}

#[tokio::test]
async fn what_may_not_be_read_is_named_and_the_rest_is_listed() {
    let (server, database) = prepared().await;
    let place = Place::new();
    for month in ["2019-05", "2020-01", "2020-02", "2020-03"] {
        fill(&server, month.parse().expect("a month"), 50).await;
    }
    moved(&database, &place, &small_files()).await;
    let at = |path: &str| place.directory.path().join("audit").join(path);
    let unreadable = ["year=2019", "year=2020/month=01", "year=2020/month=02/manifest.json"];
    let set = |path: &str, mode| std::fs::set_permissions(at(path), PermissionsExt::from_mode(mode)).expect("changed");
    unreadable.iter().for_each(|path| set(path, 0));
    let run = |arguments: &[&str]| without_override(&[arguments, &["--store", place.url()]].concat());
    let expected = [
        "error: archive: audit/year=2019: permission denied",
        "error: archive of 2020-01: audit/year=2020/month=01/manifest.json: permission denied",
        "error: archive of 2020-02: audit/year=2020/month=02/manifest.json: permission denied",
    ];
    for command in [&["list"][..], &["verify"], &["query", "--user", "zoë"]] {
        let output = run(command);
        assert_eq!(stderr(&output).lines().collect::<Vec<_>>(), expected, "{command:?}");
        assert!(code(&output) == 1 && stdout(&output).contains("2020-03"), "{command:?}: {output:?}");
    }
    // Of another year nothing is said, and what isn't known isn't deleted.
    let query = run(&["query", "--user", "zoë", "--from", "2020-03-01"]);
    assert_eq!((code(&query), stderr(&query)), (0, String::new()));
    for (month, expected) in [("2019-05", expected[0]), ("2020-01", expected[1])] {
        let deleted = run(&["delete", month, "--yes"]);
        assert_eq!((code(&deleted), stdout(&deleted), stderr(&deleted).trim_end()), (1, String::new(), expected));
    }
    unreadable.iter().for_each(|path| set(path, 0o700));
    assert_eq!(lines(&run(&["list"])).len(), 4);
}

/// Runs the tool on a terminal, where somebody answers.
fn answered(arguments: &[&str], answer: &str) -> Output {
    let script = "
import os, pty, subprocess, sys
ours, theirs = pty.openpty()
child = subprocess.Popen(sys.argv[2:], stdin=theirs, stdout=subprocess.PIPE, stderr=theirs)
os.close(theirs)
os.write(ours, sys.argv[1].encode())
out, said = child.stdout.read(), b''
try:
    while more := os.read(ours, 4096):
        said += more
except OSError:
    pass
os.write(1, out)
os.write(2, said)
sys.exit(child.wait())
";
    let mut command = Command::new(python());
    command.args(["-c", script, answer, env!("CARGO_BIN_EXE_tollgate")]).args(arguments);
    command.output().expect("Python")
}

#[tokio::test]
async fn an_archive_is_replaced_only_by_consent_that_knows_how_many_rows_are_lost() {
    let (server, database) = prepared().await;
    let place = Place::new();
    fill(&server, march(), 100).await;
    moved(&database, &place, &small_files()).await;
    fill(&server, march(), 7).await;
    let url = server.url();
    let arguments = ["archive", "--database", &url, "--store", place.url(), "--replace", "2020-03"];
    let would = "2020-03: the archive's 100 rows would be replaced by the 7 rows of its table";
    let refused = tollgate(&arguments);
    let expected = format!("error: archive: --replace: needs --yes where there is no terminal: {would}\n");
    assert_eq!((code(&refused), stdout(&refused), stderr(&refused)), (2, String::new(), expected));
    let refused = answered(&arguments, "n\n");
    assert!(code(&refused) == 2 && stderr(&refused).contains(would), "{refused:?}");
    assert!(stderr(&refused).contains("nothing was changed"), "{refused:?}");
    assert_eq!(place.archive.verify(march()).await.expect("whole").rows, 100);
    assert_eq!(rows_left(&server).await, "7");
    let replaced = answered(&arguments, "y\n");
    assert!(code(&replaced) == 0 && stdout(&replaced).starts_with("2020-03: 7 rows archived"), "{replaced:?}");
    assert!(is_gone(&server, march()).await);
    // One that can't be read; and where nothing would be lost, nobody is asked.
    fill(&server, march(), 9).await;
    std::fs::write(place.folder(march()).join("manifest.json"), "{").expect("written");
    let refused = tollgate(&arguments);
    let would = "2020-03: an archive that can't be read would be replaced by the 9 rows of its table";
    assert!(code(&refused) == 2 && stderr(&refused).contains(would), "{refused:?}");
    let replaced = tollgate(&[&arguments[..], &["--yes"]].concat());
    assert_eq!(code(&replaced), 0, "{}", stderr(&replaced));
    assert!(place.archive.delete(march()).await.expect("deleted"));
    fill(&server, march(), 9).await;
    assert_eq!(code(&tollgate(&arguments)), 0);
    let alone = tollgate(&["archive", "--database", &url, "--store", place.url(), "--yes"]);
    assert_eq!(code(&alone), 2, "{alone:?}");
}

#[tokio::test]
async fn a_clock_of_the_database_that_is_ahead_makes_no_month_old() {
    let (server, _) = prepared().await;
    fill(&server, march(), 5).await;
    server.clock_ahead("4000 days").await;
    assert_eq!(server.run("SELECT now() - clock_timestamp() > interval '3999 days'").await, ["t"], "it is ahead");
    let database = tollgate_testing::record::database(&server);
    let found = database.archivable(Duration::from_secs(90 * 86_400)).await.expect("an answer");
    assert_eq!(found.iter().map(|found| found.month).collect::<Vec<_>>(), [march()]);
}
