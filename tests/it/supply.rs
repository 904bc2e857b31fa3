//! What is depended on: under which licences, in how many versions, from where, and by which Rust. The allowances are
//! read from `deny.toml`.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;
use std::sync::OnceLock;

use serde_json::Value;

use crate::support::repository::read;

/// What cargo says of this crate and of all that it can depend on, on whatever system.
fn metadata() -> &'static Value {
    static METADATA: OnceLock<Value> = OnceLock::new();
    METADATA.get_or_init(|| {
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["metadata", "--format-version", "1", "--all-features", "--locked", "--quiet"]);
        let output = cargo.current_dir(env!("CARGO_MANIFEST_DIR")).output().expect("cargo runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).expect("JSON")
    })
}

fn packages() -> impl Iterator<Item = &'static Value> {
    metadata()["packages"].as_array().expect("packages").iter()
}

fn text<'a>(package: &'a Value, field: &str) -> &'a str {
    package[field].as_str().unwrap_or_else(|| panic!("{}: no {field}", package["id"]))
}

/// The strings of a list in `deny.toml`, and all that stands in it.
fn allowed(list: &str) -> (Vec<String>, String) {
    let file = read("deny.toml");
    let (_, after) = file.split_once(&format!("\n{list} = [")).unwrap_or_else(|| panic!("deny.toml: {list}"));
    let inside = after.split("]\n").next().unwrap_or_default();
    (inside.split('"').skip(1).step_by(2).map(str::to_owned).collect(), inside.to_owned())
}

#[test]
fn every_dependency_comes_under_a_licence_that_is_allowed() {
    let (allowed, _) = allowed("allow");
    let allowed: BTreeSet<_> = allowed.iter().map(String::as_str).collect();
    for package in packages() {
        let licence = text(package, "license");
        assert!(satisfies(licence, &allowed), "{}: {licence}", package["id"]);
    }
    for one in &allowed {
        let mut others = allowed.clone();
        others.remove(one);
        let needed = packages().any(|package| !satisfies(text(package, "license"), &others));
        let preferred = *one == "MIT" || *one == "Apache-2.0";
        assert!(needed || preferred, "deny.toml: nothing needs {one}");
    }
}

#[test]
fn licences_are_read_as_spdx_says() {
    let allowed = BTreeSet::from(["MIT", "Unicode-3.0"]);
    for (expression, expected) in [
        ("MIT", true),
        ("GPL-3.0", false),
        ("GPL-3.0 OR MIT", true),
        ("MIT/GPL-3.0", true),
        ("MIT AND GPL-3.0", false),
        ("(MIT OR GPL-3.0) AND Unicode-3.0", true),
        ("GPL-3.0 OR MIT AND Zlib", false),
        ("MIT AND (Zlib OR (GPL-3.0 OR Unicode-3.0))", true),
        ("MIT WITH Some-exception", false),
    ] {
        assert_eq!(satisfies(expression, &allowed), expected, "{expression}");
    }
}

/// Whether what is allowed satisfies an SPDX expression; a slash is how some still write OR. A licence with an exception
/// is one of its own.
fn satisfies(expression: &str, allowed: &BTreeSet<&str>) -> bool {
    fn alternatives<'a>(words: &mut &[&'a str], allowed: &BTreeSet<&'a str>) -> bool {
        let mut any = together(words, allowed);
        while let ["OR", rest @ ..] = words {
            *words = rest;
            any |= together(words, allowed);
        }
        any
    }
    fn together<'a>(words: &mut &[&'a str], allowed: &BTreeSet<&'a str>) -> bool {
        let mut all = one(words, allowed);
        while let ["AND", rest @ ..] = words {
            *words = rest;
            all &= one(words, allowed);
        }
        all
    }
    fn one<'a>(words: &mut &[&'a str], allowed: &BTreeSet<&'a str>) -> bool {
        let (found, rest) = match words {
            ["(", rest @ ..] => {
                *words = rest;
                let inner = alternatives(words, allowed);
                let [")", rest @ ..] = words else { panic!("a parenthesis that isn't closed") };
                (inner, rest)
            }
            [_, "WITH", _, rest @ ..] => (false, rest),
            [licence, rest @ ..] => (allowed.contains(licence), rest),
            [] => panic!("a licence is missing"),
        };
        *words = rest;
        found
    }
    let spaced = expression.replace('(', " ( ").replace(')', " ) ").replace('/', " OR ");
    let words: Vec<_> = spaced.split_whitespace().collect();
    let mut rest = words.as_slice();
    let satisfied = alternatives(&mut rest, allowed);
    assert!(rest.is_empty(), "{expression}");
    satisfied
}

#[test]
fn no_crate_comes_in_two_versions_but_for_a_reason() {
    let (_, skipped) = allowed("skip");
    let skipped: BTreeSet<_> = skipped
        .lines()
        .filter(|line| line.contains("crate = "))
        .map(|line| {
            assert!(line.contains("reason = \""), "deny.toml: no reason: {line}");
            line.split('"').nth(1).expect("a crate")
        })
        .collect();
    let mut versions: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    let mut met = BTreeSet::new();
    for package in packages() {
        let (name, version) = (text(package, "name"), text(package, "version"));
        let skip = skipped.iter().find(|skip| format!("{name}@{version}.").starts_with(&format!("{skip}.")));
        match skip {
            Some(skip) => _ = met.insert(*skip),
            None => _ = versions.entry(name).or_default().insert(version),
        }
    }
    for (name, versions) in versions {
        assert_eq!(versions.len(), 1, "{name}: {versions:?}");
    }
    assert_eq!(met, skipped, "deny.toml: what is skipped and not there");
}

#[test]
fn every_dependency_comes_from_the_registry() {
    for package in packages().filter(|package| package["name"] != "tollgate") {
        let source = text(package, "source");
        assert_eq!(source, "registry+https://github.com/rust-lang/crates.io-index", "{}", package["id"]);
    }
}

/// What the standard library asks for, clippy knows.
#[test]
fn the_rust_that_is_asked_for_is_no_older_than_what_the_dependencies_ask_for() {
    let rust = |package: &Value| -> Option<Vec<u32>> {
        let stated = package["rust_version"].as_str()?;
        let mut numbers: Vec<u32> = stated.split('.').map(|number| number.parse().expect("a number")).collect();
        numbers.resize(3, 0);
        Some(numbers)
    };
    let ours = packages().find(|package| package["name"] == "tollgate").and_then(rust).expect("a rust-version");
    for package in packages() {
        assert!(rust(package).is_none_or(|theirs| theirs <= ours), "{}: {}", package["id"], package["rust_version"]);
    }
    let stated = format!("{}.{}", ours[0], ours[1]);
    assert!(read("tests/run.sh").contains(&format!("install Rust {stated} or newer")), "tests/run.sh: {stated}");
}

#[test]
fn unsafe_code_is_forbidden_here_and_in_the_benches_and_clippy_knows_the_rust_that_is_asked_for() {
    for manifest in ["Cargo.toml", "benches/Cargo.toml"] {
        let text = read(manifest);
        let (_, lints) = text.split_once("\n[lints.rust]\n").unwrap_or_else(|| panic!("{manifest}: no lints"));
        let lints = lints.split("\n[").next().unwrap_or_default();
        assert!(lints.lines().any(|line| line == "unsafe_code = \"forbid\""), "{manifest}: {lints}");
    }
    let clippy = "\n[lints.clippy]\nincompatible_msrv = \"warn\"\n";
    assert!(read("Cargo.toml").contains(clippy), "Cargo.toml: {clippy}");
}
