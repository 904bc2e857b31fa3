//! What is depended on: under which licences, in how many versions, from where, and by which Rust. The allowances are
//! read from `deny.toml`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::OnceLock;

use cargo_metadata::semver::{Version, VersionReq};
use cargo_metadata::{CargoOpt, Metadata, MetadataCommand, Package};
use serde::Deserialize;
use spdx::{Expression, Licensee, ParseMode};
use toml::Table;

use crate::support::repository::read;

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

/// This crate and all that it can depend on, on whatever system.
fn packages() -> &'static [Package] {
    static METADATA: OnceLock<Metadata> = OnceLock::new();
    let metadata = METADATA.get_or_init(|| {
        let mut cargo = MetadataCommand::new();
        cargo.manifest_path(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml")).features(CargoOpt::AllFeatures);
        cargo.other_options(["--locked".to_owned(), "--quiet".to_owned()]).exec().expect("what cargo says")
    });
    &metadata.packages
}

#[test]
fn every_dependency_comes_under_a_licence_that_is_allowed() {
    // A slash is how some still write OR.
    let mode = ParseMode { allow_slash_as_or_operator: true, ..ParseMode::STRICT };
    let licence = |package: &Package| {
        let stated = package.license.as_ref().unwrap_or_else(|| panic!("{}: no licence", package.id));
        Expression::parse_mode(stated, mode).unwrap_or_else(|error| panic!("{}: {error}", package.id))
    };
    let licences: Vec<_> = packages().iter().map(|package| (&package.id, licence(package))).collect();
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
    for package in packages().iter().filter(|package| package.name != "tollgate") {
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
    let lint = |manifest: &str, tool: &str, lint: &str| {
        let manifest: Table = read(manifest).parse().expect("TOML");
        manifest.get("lints")?.get(tool)?.get(lint)?.as_str().map(str::to_owned)
    };
    for manifest in ["Cargo.toml", "benches/Cargo.toml"] {
        assert_eq!(lint(manifest, "rust", "unsafe_code").as_deref(), Some("forbid"), "{manifest}");
    }
    assert_eq!(lint("Cargo.toml", "clippy", "incompatible_msrv").as_deref(), Some("warn"));
}
