//! The published package: all that its users compile and read, and nothing else.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use crate::support::repository::{read, root, rust_files};

/// The most bytes that all of its files have together.
const MOST: u64 = 2_500_000;

fn packaged() -> BTreeSet<String> {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["package", "--list", "--allow-dirty", "--quiet"]).current_dir(root());
    let output = cargo.output().expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let list = String::from_utf8(output.stdout).expect("UTF-8");
    // Two of them cargo makes itself.
    let made = [".cargo_vcs_info.json", "Cargo.toml.orig"];
    list.lines().map(|path| path.replace('\\', "/")).filter(|path| !made.contains(&path.as_str())).collect()
}

#[test]
fn the_package_is_small_and_has_neither_tests_nor_logs() {
    let files = packaged();
    let folders = ["src/", "lua/", "sql/", "examples/"];
    let others = ["Cargo.toml", "Cargo.lock", "README.md", "CHANGELOG.md", "LICENSE-APACHE", "LICENSE-MIT"];
    for file in &files {
        let expected = folders.iter().any(|folder| file.starts_with(folder)) || others.contains(&file.as_str());
        assert!(expected && !file.ends_with(".log") && !file.ends_with(".jsonl"), "{file}");
    }
    assert!(others.iter().all(|file| files.contains(*file)), "{files:?}");
    let sizes = files.iter().map(|file| std::fs::metadata(root().join(file)).expect("a file").len());
    let size: u64 = sizes.sum();
    assert!((100_000..MOST).contains(&size), "{size} bytes");
}

#[test]
fn the_package_has_every_file_that_its_sources_include() {
    let files = packaged();
    let mut included = 0;
    for source in rust_files("src") {
        assert!(files.contains(&source), "{source}");
        for rest in read(&source).split("include_str!(\"").skip(1) {
            let path = rest.split('"').next().unwrap_or_default();
            let folder = Path::new(&source).parent().expect("a folder");
            let found = root().join(folder).join(path).canonicalize().unwrap_or_else(|why| panic!("{path}: {why}"));
            let found = found.strip_prefix(root().canonicalize().expect("a folder")).expect("of this crate").to_owned();
            assert!(files.contains(&found.to_string_lossy().into_owned()), "{source}: {path}");
            included += 1;
        }
    }
    assert!(included >= 12, "{included}");
}

/// Both take a large part of the time that a build takes.
#[test]
fn the_tool_is_built_without_tls_and_without_large_tables_of_unicode() {
    let manifest = read("Cargo.toml");
    let (_, after) = manifest.split_once("\ncli = [").expect("the tool's feature");
    let cli = after.split(']').next().unwrap_or_default();
    assert!(cli.contains("\"dep:clap\"") && !cli.contains("tls"), "{cli}");
    assert!(!read("Cargo.lock").contains("name = \"icu_"), "cargo update -p idna_adapter --precise 1.1.0");
}
