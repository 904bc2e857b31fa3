//! The repository's files, for tests that read them.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

pub fn root() -> &'static Path {
    static ROOT: LazyLock<PathBuf> = LazyLock::new(|| {
        let own = Path::new(env!("CARGO_MANIFEST_DIR"));
        own.join("../..").canonicalize().expect("the repository")
    });
    &ROOT
}

pub fn read(file: &str) -> String {
    std::fs::read_to_string(root().join(file)).unwrap_or_else(|error| panic!("{file}: {error}"))
}

/// The names of a folder's files with this ending.
pub fn stems(folder: &str, ending: &str) -> BTreeSet<String> {
    let files = files(folder).into_iter().filter(|path| path.extension().is_some_and(|found| found == ending));
    files.map(|path| path.file_stem().expect("a name").to_string_lossy().into_owned()).collect()
}

/// A module's file and those in its folder, or all of a folder's; not what is built there.
pub fn rust_files(module: &str) -> Vec<String> {
    let own = format!("{module}.rs");
    let mut found: Vec<_> = root().join(&own).exists().then_some(own).into_iter().collect();
    if root().join(module).is_dir() {
        add_rust_files(module, &mut found);
    }
    assert!(!found.is_empty(), "{module}: no such module");
    found
}

fn add_rust_files(folder: &str, found: &mut Vec<String>) {
    for path in files(folder) {
        let name = format!("{folder}/{}", path.file_name().expect("a name").to_string_lossy());
        if path.is_dir() && !name.ends_with("/target") {
            add_rust_files(&name, found);
        } else if name.ends_with(".rs") {
            found.push(name);
        }
    }
}

fn files(folder: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(root().join(folder)).unwrap_or_else(|error| panic!("{folder}: {error}"));
    entries.map(|entry| entry.expect("an entry").path()).collect()
}

/// What a code host makes of a heading.
pub fn anchor(heading: &str) -> String {
    let words = heading.trim_start_matches('#').trim().to_lowercase();
    let kept = words.chars().filter(|letter| letter.is_alphanumeric() || ['-', '_', ' '].contains(letter));
    kept.map(|letter| if letter == ' ' { '-' } else { letter }).collect()
}
