//! What the tool says of itself, for a report of a fault.

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
    let expected = format!("tollgate {}{commit}\nfeatures: +tls +postgres +archive\n", env!("CARGO_PKG_VERSION"));
    for option in ["--version", "-V"] {
        let output = tollgate(&[option]);
        assert_eq!((code(&output), stdout(&output).as_str()), (0, expected.as_str()));
    }
}
