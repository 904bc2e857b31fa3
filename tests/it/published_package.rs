//! The published packages: all that their users compile and read, and nothing else.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use tollgate_testing::repository::{read, root, rust_files};
use toml::Table;

/// The most bytes that all files of a package have together.
const MOST: u64 = 2_500_000;

struct Published {
    name: &'static str,
    /// Where it is in the repository.
    folder: &'static str,
    /// What it has beside its sources and what every package has.
    others: &'static [&'static str],
}

const PUBLISHED: [Published; 4] = [
    Published { name: "tollgate", folder: "", others: &["lua/", "examples/", "README.md", "CHANGELOG.md"] },
    Published { name: "tollgate-record", folder: "crates/record", others: &["sql/"] },
    Published { name: "tollgate-cli", folder: "crates/cli", others: &["README.md", "build.rs"] },
    Published { name: "tollgate-serve", folder: "crates/serve", others: &["README.md"] },
];

impl Published {
    fn files(&self) -> BTreeSet<String> {
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["package", "--list", "--allow-dirty", "--quiet", "-p", self.name]).current_dir(root());
        let output = cargo.output().expect("cargo runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let list = String::from_utf8(output.stdout).expect("UTF-8");
        // Two of them cargo makes itself.
        let made = [".cargo_vcs_info.json", "Cargo.toml.orig"];
        list.lines().map(|path| path.replace('\\', "/")).filter(|path| !made.contains(&path.as_str())).collect()
    }

    fn path(&self, file: &str) -> PathBuf {
        // The lock file is that of the workspace.
        if file == "Cargo.lock" { root().join(file) } else { root().join(self.folder).join(file) }
    }
}

#[test]
fn each_package_is_small_and_has_neither_tests_nor_logs() {
    for published in PUBLISHED {
        let (name, files) = (published.name, published.files());
        let every = ["src/", "Cargo.toml", "Cargo.lock", "LICENSE-APACHE", "LICENSE-MIT"];
        let expected = [&every, published.others].concat();
        let is_it = |file: &str, known: &str| file == known || known.ends_with('/') && file.starts_with(known);
        for file in &files {
            assert!(expected.iter().any(|known| is_it(file, known)), "{name}: {file}");
            assert!(!file.ends_with(".log") && !file.ends_with(".jsonl"), "{name}: {file}");
        }
        for known in expected {
            assert!(files.iter().any(|file| is_it(file, known)), "{name}: no {known} among {files:?}");
        }
        let sizes = files.iter().map(|file| std::fs::metadata(published.path(file)).expect("a file").len());
        let size: u64 = sizes.sum();
        assert!((100_000..MOST).contains(&size), "{name}: {size} bytes");
    }
}

#[test]
fn each_package_has_every_file_that_its_sources_include() {
    let mut included = 0;
    for published in PUBLISHED {
        let (name, files) = (published.name, published.files());
        let folder = root().join(published.folder).canonicalize().expect("a folder");
        for source in rust_files(Path::new(published.folder).join("src").to_str().expect("text")) {
            let path = root().join(&source);
            let own = path.strip_prefix(&folder).expect("of this package").to_string_lossy().into_owned();
            assert!(files.contains(&own), "{name}: {own}");
            // Not what only the doctests of the repository read.
            let text = read(&source).replace("#[cfg(doctest)]\n#[doc = include_str!", "");
            for rest in text.split("include_str!(\"").skip(1) {
                let file = rest.split('"').next().unwrap_or_default();
                let found = path.parent().expect("a folder").join(file);
                let found = found.canonicalize().unwrap_or_else(|why| panic!("{source}: {file}: {why}"));
                let found = found.strip_prefix(&folder).unwrap_or_else(|_| panic!("{source}: {file} isn't of {name}"));
                assert!(files.contains(&found.to_string_lossy().into_owned()), "{source}: {file}");
                included += 1;
            }
        }
    }
    assert!(included >= 12, "{included}");
}

/// Both take a large part of the time that a build takes.
#[test]
fn the_tool_is_built_without_tls_and_without_large_tables_of_unicode() {
    let manifest: Table = read("crates/cli/Cargo.toml").parse().expect("TOML");
    assert!(manifest["features"].get("tls").is_some() && manifest["features"].get("default").is_none());
    for (name, dependency) in manifest["dependencies"].as_table().expect("dependencies") {
        let features = dependency.get("features").and_then(|features| features.as_array()).into_iter().flatten();
        let tls = features.into_iter().any(|feature| feature.as_str().is_some_and(|name| name.contains("tls")));
        assert!(!tls && !name.contains("tls"), "{name}: {dependency}");
    }
    assert!(!read("Cargo.lock").contains("name = \"icu_"), "cargo update -p idna_adapter --precise 1.1.0");
}
