//! What the tool says of itself, for a report of a fault.

use std::path::Path;
use std::process::Command;

use tollgate_testing::repository::root;

use crate::support::tool::{code, stdout, tollgate};

#[test]
fn the_version_names_the_release_the_commit_and_the_features() {
    let git = Command::new("git").args(["rev-parse", "HEAD"]).current_dir(root()).output();
    // Of an unpacked archive, git knows nothing, and the tool doesn't either.
    let commit = git.ok().filter(|output| output.status.success()).map_or_else(String::new, |output| {
        let name = String::from_utf8(output.stdout).expect("UTF-8");
        format!(" ({})", &name[..12])
    });
    let release = concat!("tollgate ", env!("CARGO_PKG_VERSION"));
    let all = format!("{release}{commit}\nfeatures: +tls +postgres +archive +watch +reports +compression +man\n");
    for (option, expected) in [("--version", all.as_str()), ("-V", &format!("{release}\n"))] {
        let output = tollgate(&[option]);
        assert_eq!((code(&output), stdout(&output).as_str()), (0, expected));
    }
    // The title of a manual page is one line.
    let manual = stdout(&tollgate(&["man"]));
    let title = manual.lines().find(|line| line.starts_with(".TH ")).expect("a title");
    assert!(title.contains(&format!("\"{release}\"")), "{title}");
}

#[test]
fn a_package_names_the_commit_that_cargo_noted_and_a_folder_without_git_none() {
    let folder = tempfile::tempdir().expect("a folder");
    let script = folder.path().join("build-script");
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/build.rs");
    let built = Command::new(rustc).args(["--edition", "2024", source, "-o"]).arg(&script).status();
    assert!(built.expect("rustc, by which this was built").success());

    let package = folder.path().join("package");
    std::fs::create_dir(&package).expect("a folder");
    let names = || commit_of(&script, &package);
    assert_eq!(names(), "");
    // A repository that the package was unpacked in, such as that of a service.
    let git = |arguments: &[&str]| {
        let output = Command::new("git").args(arguments).current_dir(&package).output().expect("git");
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    };
    git(&["init", "--quiet"]);
    let author = ["-c", "user.name=A", "-c", "user.email=a@example.com"];
    git(&[&author[..], &["commit", "--quiet", "--allow-empty", "-m", "theirs"]].concat());
    assert_eq!(names(), "");

    let sha1 = "66b28f97f6899002608abba1df2e36bfeb177dd5";
    let noted = |git: &str| {
        let text = format!("{{\n  \"git\": {{\n    {git}\n  }},\n  \"path_in_vcs\": \"crates/cli\"\n}}");
        std::fs::write(package.join(".cargo_vcs_info.json"), text).expect("written");
    };
    noted(&format!("\"sha1\": \"{sha1}\""));
    assert_eq!(names(), "66b28f97f689");
    noted(&format!("\"sha1\": \"{sha1}\",\n    \"dirty\": true"));
    assert_eq!(names(), "66b28f97f689-dirty");
    noted("\"sha1\": \"nothing of the kind\"");
    assert_eq!(names(), "");
}

/// What the build script says in this folder.
fn commit_of(script: &Path, package: &Path) -> String {
    let output = Command::new(script).current_dir(package).env("CARGO_MANIFEST_DIR", package).output();
    let text = stdout(&output.expect("it runs"));
    let commit = text.lines().find_map(|line| line.strip_prefix("cargo::rustc-env=TOLLGATE_COMMIT="));
    commit.unwrap_or_else(|| panic!("{text}")).to_owned()
}
