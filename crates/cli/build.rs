//! Tells the tool which commit it is built from, for `tollgate --version`: of a published package as cargo has noted it
//! there, of a clone as git says. Neither is needed.

use std::env;
use std::fs::read_to_string;
use std::path::Path;
use std::process::Command;

/// How much of a commit's name is shown: enough for millions of commits.
const DIGITS: usize = 12;

/// What cargo notes in a package.
const NOTED: &str = ".cargo_vcs_info.json";

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let noted = read_to_string(NOTED).ok();
    let commit = match &noted {
        Some(noted) => noted_commit(noted),
        None => git_commit(),
    };
    if noted.is_some() {
        println!("cargo::rerun-if-changed={NOTED}");
    }
    println!("cargo::rustc-env=TOLLGATE_COMMIT={}", commit.unwrap_or_default());
}

/// `{"git": {"sha1": "...", "dirty": true}, ...}`, where `dirty` is left out of a package of just what was committed.
fn noted_commit(noted: &str) -> Option<String> {
    let (_, rest) = noted.split_once("\"sha1\"")?;
    let commit = shortened(rest.split('"').nth(1)?)?;
    let dirty = noted.split_once("\"dirty\"").map(|(_, rest)| rest.trim_start_matches([':', ' ']));
    let changed = dirty.is_some_and(|rest| rest.starts_with("true"));
    Some(if changed { commit + "-dirty" } else { commit })
}

/// Only of a repository that this file belongs to: the package may have been unpacked in another one.
fn git_commit() -> Option<String> {
    git(&["ls-files", "--error-unmatch", "build.rs"])?;
    let commit = shortened(&git(&["rev-parse", "HEAD"])?)?;
    // HEAD names a branch, and its log changes with each commit.
    for file in ["HEAD", "logs/HEAD"] {
        let path = git(&["rev-parse", "--git-path", file])?;
        if Path::new(&path).exists() {
            println!("cargo::rerun-if-changed={path}");
        }
    }
    Some(commit)
}

fn git(arguments: &[&str]) -> Option<String> {
    let folder = env::var_os("CARGO_MANIFEST_DIR")?;
    let output = Command::new("git").args(arguments).current_dir(folder).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}

/// The beginning of a commit's name; nothing of what is none.
fn shortened(commit: &str) -> Option<String> {
    let is_name = commit.len() >= DIGITS && commit.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_name.then(|| commit[..DIGITS].to_owned())
}
