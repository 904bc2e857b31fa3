//! The repository's files, for tests that read them.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

pub(crate) fn read(file: &str) -> String {
    std::fs::read_to_string(root().join(file)).unwrap_or_else(|error| panic!("{file}: {error}"))
}

/// The names of a folder's files with this ending.
pub(crate) fn stems(folder: &str, ending: &str) -> BTreeSet<String> {
    let files = files(folder).into_iter().filter(|path| path.extension().is_some_and(|found| found == ending));
    files.map(|path| path.file_stem().expect("a name").to_string_lossy().into_owned()).collect()
}

/// A module's file and those in its folder, or all of a folder's.
pub(crate) fn rust_files(module: &str) -> Vec<String> {
    let own = format!("{module}.rs");
    let mut found: Vec<_> = root().join(&own).exists().then_some(own).into_iter().collect();
    if root().join(module).is_dir() {
        for path in files(module) {
            let name = format!("{module}/{}", path.file_name().expect("a name").to_string_lossy());
            match name.strip_suffix(".rs") {
                Some(_) => found.push(name),
                None if path.is_dir() => found.extend(rust_files(&name)),
                None => {}
            }
        }
    }
    assert!(!found.is_empty(), "{module}: no such module");
    found
}

fn files(folder: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(root().join(folder)).unwrap_or_else(|error| panic!("{folder}: {error}"));
    entries.map(|entry| entry.expect("an entry").path()).collect()
}
