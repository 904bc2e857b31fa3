//! What is depended on: under which licences, in how many versions, from where, and by which Rust. The allowances are
//! read from `deny.toml`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::OnceLock;

use cargo_metadata::semver::{Version, VersionReq};
use cargo_metadata::{CargoOpt, MetadataCommand, Package};
use serde::Deserialize;
use spdx::{Expression, Licensee, ParseMode};
use tollgate_testing::repository::read;
use toml::{Table, Value};

/// What this reads of `deny.toml`.
#[derive(Deserialize)]
struct Deny {
    licenses: Licenses,
    bans: Bans,
}

#[derive(Deserialize)]
struct Licenses {
    allow: Vec<String>,
}

#[derive(Deserialize)]
struct Bans {
    skip: Vec<Skip>,
}

#[derive(Deserialize)]
struct Skip {
    /// `base64@0.22`
    #[serde(rename = "crate")]
    name_and_version: String,
    #[serde(rename = "reason")]
    _reason: String,
}

impl Skip {
    fn matches(&self, package: &Package) -> bool {
        let (name, version) = self.name_and_version.split_once('@').expect("a crate and its version");
        package.name == name && VersionReq::parse(version).expect("a version").matches(&package.version)
    }
}

fn deny() -> Deny {
    toml::from_str(&read("deny.toml")).unwrap_or_else(|error| panic!("deny.toml: {error}"))
}

/// What is handed out; examples and benches are for readers.
const PUBLISHED: [&str; 4] = ["tollgate", "tollgate-record", "tollgate-cli", "tollgate-serve"];

/// These crates and all that they and their tests can depend on, on whatever system.
fn packages() -> &'static [Package] {
    static PACKAGES: OnceLock<Vec<Package>> = OnceLock::new();
    PACKAGES.get_or_init(|| {
        let mut cargo = MetadataCommand::new();
        cargo.manifest_path(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml")).features(CargoOpt::AllFeatures);
        let all = cargo.other_options(["--locked".to_owned(), "--quiet".to_owned()]).exec().expect("what cargo says");
        let nodes: BTreeMap<_, _> =
            all.resolve.iter().flat_map(|resolve| &resolve.nodes).map(|node| (&node.id, &node.dependencies)).collect();
        let ours = all.packages.iter().filter(|package| is_one_of(package, &PUBLISHED));
        let mut left: Vec<_> = ours.map(|package| &package.id).collect();
        let mut reached = BTreeSet::new();
        while let Some(id) = left.pop() {
            if reached.insert(id) {
                left.extend(nodes[id]);
            }
        }
        all.packages.iter().filter(|package| reached.contains(&package.id)).cloned().collect()
    })
}

/// The same without what stands in this repository.
fn dependencies() -> impl Iterator<Item = &'static Package> {
    let ours = [&PUBLISHED[..], &["tollgate-testing"]].concat();
    packages().iter().filter(move |package| !is_one_of(package, &ours))
}

fn is_one_of(package: &Package, names: &[&str]) -> bool {
    names.contains(&package.name.as_str())
}

#[test]
fn every_dependency_comes_under_a_licence_that_is_allowed() {
    // A slash is how some still write OR.
    let mode = ParseMode { allow_slash_as_or_operator: true, ..ParseMode::STRICT };
    let licence = |package: &Package| {
        let stated = package.license.as_ref().unwrap_or_else(|| panic!("{}: no licence", package.id));
        Expression::parse_mode(stated, mode).unwrap_or_else(|error| panic!("{}: {error}", package.id))
    };
    let licences: Vec<_> = dependencies().map(|package| (&package.id, licence(package))).collect();
    let allowed: Vec<_> =
        deny().licenses.allow.iter().map(|name| Licensee::parse(name).unwrap_or_else(|why| panic!("{why}"))).collect();
    for (id, licence) in &licences {
        let satisfied = licence.evaluate(|asked| allowed.iter().any(|one| one.satisfies(asked)));
        assert!(satisfied, "{id}: {licence}");
    }
    for one in &allowed {
        let by_others = |licence: &Expression| {
            licence.evaluate(|asked| allowed.iter().any(|other| other != one && other.satisfies(asked)))
        };
        let needed = licences.iter().any(|(_, licence)| !by_others(licence));
        let preferred = ["MIT", "Apache-2.0"].contains(&one.to_string().as_str());
        assert!(needed || preferred, "deny.toml: nothing needs {one}");
    }
}

#[test]
fn no_crate_comes_in_two_versions_but_for_a_reason() {
    let skipped = deny().bans.skip;
    let mut versions: BTreeMap<&str, BTreeSet<&Version>> = BTreeMap::new();
    for package in packages().iter().filter(|package| !skipped.iter().any(|skip| skip.matches(package))) {
        versions.entry(&package.name).or_default().insert(&package.version);
    }
    for (name, versions) in versions {
        assert_eq!(versions.len(), 1, "{name}: {versions:?}");
    }
    for skip in skipped {
        let met = packages().iter().any(|package| skip.matches(package));
        assert!(met, "deny.toml: skipped, and not there: {}", skip.name_and_version);
    }
}

#[test]
fn every_dependency_comes_from_the_registry() {
    for package in dependencies() {
        let source = package.source.as_ref();
        assert!(source.is_some_and(|source| source.is_crates_io()), "{}: {source:?}", package.id);
    }
}

/// What the standard library asks for, clippy knows.
#[test]
fn the_rust_that_is_asked_for_is_no_older_than_what_the_dependencies_ask_for() {
    let ours = packages().iter().find(|package| package.name == "tollgate").expect("this crate");
    let ours = ours.rust_version.as_ref().expect("a rust-version");
    for package in packages() {
        let theirs = package.rust_version.as_ref();
        assert!(theirs.is_none_or(|theirs| theirs <= ours), "{}: {theirs:?}", package.id);
    }
    let stated = format!("{}.{}", ours.major, ours.minor);
    assert!(read("tests/run.sh").contains(&format!("install Rust {stated} or newer")), "tests/run.sh: {stated}");
}

#[test]
fn unsafe_code_is_forbidden_here_and_in_the_benches_and_clippy_knows_the_rust_that_is_asked_for() {
    fn lint<'a>(of: &'a Table, tool: &str, lint: &str) -> Option<&'a str> {
        of.get("lints")?.get(tool)?.get(lint)?.as_str()
    }
    let root: Table = read("Cargo.toml").parse().expect("TOML");
    let workspace = root["workspace"].as_table().expect("the workspace").clone();
    assert_eq!(lint(&workspace, "rust", "unsafe_code"), Some("forbid"));
    assert_eq!(lint(&workspace, "clippy", "incompatible_msrv"), Some("warn"));
    for folder in [".", "crates/record", "crates/cli", "tests/support", "benches"] {
        let manifest: Table = read(&format!("{folder}/Cargo.toml")).parse().expect("TOML");
        let of_workspace = manifest["lints"].get("workspace").and_then(Value::as_bool) == Some(true);
        assert!(of_workspace || lint(&manifest, "rust", "unsafe_code") == Some("forbid"), "{folder}");
    }
}
