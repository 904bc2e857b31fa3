//! The file of a report: what it replaces, what it must not, and what is said if it can't be written.

use std::process::Stdio;

use tollgate_testing::polling::block_until;

use super::{report, traffic};
use crate::support::tool::{code, command, stderr, stdout, tollgate};

/// Neither the page nor what was found is left half done.
#[test]
fn a_file_that_cannot_be_written_is_an_error_before_any_work() {
    let folder = tempfile::tempdir().expect("a folder");
    let traffic = traffic(folder.path());
    let file = traffic.to_str().expect("UTF-8");
    let missing = folder.path().join("no-such-folder/out.html");
    let (missing, folder) = (missing.to_str().expect("UTF-8"), folder.path().to_str().expect("UTF-8"));
    for (path, expected) in [
        (missing, format!("--report: expected a file that can be written, got {missing}: No such file or directory")),
        (folder, format!("--report: expected a file that can be written, got {folder}: Is a directory")),
        (file, format!("--report: expected a file other than the one that is read, got {file}")),
        ("-", "--report: expected a file to write, such as report.html, got -".to_owned()),
    ] {
        for arguments in [&["replay", "--rule", "token-bucket 5/1s", file][..], &["compare", "token-bucket 5/1s", file]]
        {
            let output = tollgate(&[arguments, &["--report", path]].concat());
            let told = stderr(&output);
            assert_eq!((code(&output), stdout(&output).as_str(), told.lines().count()), (2, "", 1), "{told}");
            assert!(told.starts_with(&format!("error: {expected}")), "{told}");
        }
    }
    let output = tollgate(&["replay", "--rule", "token-bucket 5/1s", "--summary", file, "--report", "/dev/full"]);
    let told = stderr(&output);
    assert!(code(&output) == 2 && told.contains("error: --report: /dev/full: No space left"), "{told}");
}

#[test]
fn a_run_that_fails_leaves_what_was_there() {
    let folder = tempfile::tempdir().expect("a folder");
    let [old, new] = ["old.html", "new.html"].map(|name| folder.path().join(name));
    std::fs::write(&old, "what was there").expect("written");
    for page in [&old, &new] {
        let output =
            tollgate(&["compare", "token-bucket 5/1s", "no-such-file", "--report", page.to_str().expect("UTF-8")]);
        assert!(code(&output) == 2 && stderr(&output).contains("no-such-file"), "{}", stderr(&output));
    }
    assert_eq!(std::fs::read_to_string(&old).expect("there"), "what was there");
    assert!(!new.exists());
    // A longer page than before, and then a shorter one.
    let traffic = traffic(folder.path());
    let rules = ["token-bucket 5/1s", "sliding-log 5/1s"];
    for rules in [&rules[..], &rules[..1]] {
        let page = report(&[&["compare"], rules, &[traffic.to_str().expect("UTF-8")]].concat(), &old);
        assert!(page.starts_with("<!DOCTYPE html>") && page.ends_with("</html>\n"));
    }
}

#[test]
fn a_page_is_written_though_nobody_reads_the_output_or_it_is_said_that_it_was_not() {
    let folder = tempfile::tempdir().expect("a folder");
    let traffic = traffic(folder.path());
    let file = traffic.to_str().expect("UTF-8");
    let page = folder.path().join("page.html");
    let run = |arguments: &[&str]| {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let arguments = [arguments, &["--report", page.to_str().expect("UTF-8")]].concat();
        command(&arguments).stdout(Stdio::from(writer)).output().expect("the tool runs")
    };
    let output = run(&["suggest", file, "--deny-at-most", "5%"]);
    assert_eq!((code(&output), page.exists()), (0, true), "{}", stderr(&output));
    std::fs::remove_file(&page).expect("removed");
    let output = run(&["replay", "--rule", "token-bucket 5/1s", file]);
    let told = stderr(&output);
    assert_eq!((code(&output), page.exists()), (2, false), "{told}");
    assert!(told.contains("--report: not written, since the output was closed"), "{told}");
}

/// Its being opened and closed before the run would be the end for who reads it.
#[cfg(unix)]
#[test]
fn a_named_pipe_gets_the_whole_page() {
    let folder = tempfile::tempdir().expect("a folder");
    let traffic = traffic(folder.path());
    let pipe = folder.path().join("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().expect("mkfifo runs").success());
    let reader = std::thread::spawn({
        let pipe = pipe.clone();
        move || std::fs::read_to_string(pipe).expect("read")
    });
    let report = ["--report", pipe.to_str().expect("UTF-8")];
    let compare = [&["compare", "token-bucket 5/1s", traffic.to_str().expect("UTF-8")], &report[..]].concat();
    let mut tool = command(&compare).stdout(Stdio::null()).spawn().expect("the tool runs");
    let mut ended = None;
    block_until("it ends", || {
        ended = tool.try_wait().expect("its state");
        ended.is_some()
    });
    assert!(ended.is_some_and(|status| status.success()), "{ended:?}");
    assert!(reader.join().expect("a page").ends_with("</html>\n"));
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    let folder = tempfile::tempdir().expect("a folder");
    let traffic = traffic(folder.path());
    let page = folder.path().join("page.html");
    let report = ["--report", page.to_str().expect("UTF-8")];
    let mut child =
        command(&[&["compare", "token-bucket 5/1s", traffic.to_str().expect("UTF-8")], &report[..]].concat())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the tool runs");
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("the tool ends");
    assert!(code(&output) == 0 && !stderr(&output).contains("error"), "{}", stderr(&output));
    assert!(std::fs::read_to_string(page).expect("a page").ends_with("</html>\n"));
}
