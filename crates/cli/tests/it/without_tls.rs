//! The tool that was built with the feature `postgres` alone: it says what is missing, and how to have it.
//! `tests/without_tls.sh` builds it, since the one beside these tests has all features.

use std::process::{Command, Output, Stdio};

use tollgate_testing::redis_server::Server;

use crate::support::tool::{code, stderr, stdout};

/// The tool without TLS, but with the system of record.
fn command(arguments: &[&str]) -> Command {
    let tool = std::env::var_os("TOLLGATE_TEST_WITHOUT_TLS");
    let tool = tool.expect("TOLLGATE_TEST_WITHOUT_TLS names the tool without TLS, which tests/without_tls.sh builds");
    let mut command = Command::new(tool);
    command.args(arguments).env_remove("TOLLGATE_URL").stdin(Stdio::null());
    command
}

fn tollgate(arguments: &[&str]) -> Output {
    command(arguments).output().expect("the tool runs")
}

#[test]
fn its_version_says_what_is_not_built_in() {
    let told = stdout(&tollgate(&["--version"]));
    assert!(told.ends_with("\nfeatures: -tls +postgres -archive -watch -reports -compression -man\n"), "{told}");
}

#[test]
fn whoever_asks_for_tls_is_told_the_feature_and_how_to_install_it() {
    for (options, named) in [
        (&["--url", "rediss://:s3cret@localhost:1"][..], "--url rediss://... needs TLS"),
        (&["--url", "valkeys://localhost:1"], "--url valkeys://... needs TLS"),
        (&["--url", "rediss-cluster://u:s3cret@localhost:1"], "--url rediss-cluster://... needs TLS"),
        (&["--url", "rediss-sentinel://localhost:1/main"], "--url rediss-sentinel://... needs TLS"),
        (&["--tls-ca", "ca.pem", "--url", "redis://localhost:1"], "--tls-ca needs TLS"),
        (&["--tls-cert", "one.pem", "--tls-key", "one.key"], "--tls-cert needs TLS"),
        (&["--tls-key", "one.key"], "--tls-key needs TLS"),
    ] {
        for subcommand in [&["probe", "gcra 5/1s", "k"][..], &["inspect", "gcra 5/1s", "k"], &["doctor"]] {
            let output = tollgate(&[subcommand, options].concat());
            let told = stderr(&output);
            assert_eq!((code(&output), stdout(&output).as_str()), (2, ""), "{told}");
            let why = "and this tollgate was built without its feature tls";
            let install = "cargo install --locked --path crates/cli --features tls";
            assert_eq!(told, format!("error: {named}, {why}: {install}\n"));
        }
    }
    let by_environment = command(&["probe", "gcra 5/1s", "k"]).env("TOLLGATE_TLS_CA", "ca.pem").output().expect("runs");
    assert!(stderr(&by_environment).starts_with("error: --tls-ca needs TLS"), "{}", stderr(&by_environment));
}

#[test]
fn whoever_asks_for_tls_to_postgres_is_told_the_same() {
    let required = "postgres://u:s3cret@localhost:1/x?sslmode=require";
    let by_address =
        "postgres: sslmode=require needs TLS, but this program was built without tollgate's feature \"tls\"";
    let plain = ["--database", "postgres://u:s3cret@localhost:1/x"];
    let why = "needs TLS, and this tollgate was built without its feature tls";
    let by_file = format!("--database-tls-ca {why}: cargo install --locked --path crates/cli --features postgres,tls");
    for (options, expected) in [
        (&["--database", required][..], by_address),
        (&[&plain[..], &["--database-tls-ca", "ca.pem"]].concat(), &by_file),
    ] {
        let output = tollgate(&[&["db", "status"], options].concat());
        assert_eq!((code(&output), stderr(&output)), (2, format!("error: {expected}\n")));
    }
    let output = tollgate(&[&["db", "status", "--database-tls-ca", ""], &plain[..]].concat());
    assert!(stderr(&output).starts_with("error: postgres at localhost:1/x: "), "{}", stderr(&output));
}

#[test]
fn what_needs_another_feature_names_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = |name: &str, content: &[u8]| {
        let path = folder.path().join(name);
        std::fs::write(&path, content).expect("written");
        path.to_str().expect("UTF-8").to_owned()
    };
    let (log, report) = (file("access.log", b""), folder.path().join("report.html").to_string_lossy().into_owned());
    let [gzip, zstd] =
        [("log.gz", &b"\x1f\x8b\x08"[..]), ("log.zst", b"\x28\xb5\x2f\xfd")].map(|(name, head)| file(name, head));
    let replay = ["replay", "--rule", "token-bucket 5/1s"];
    for (arguments, what, feature) in [
        (&["watch"][..], "watch".to_owned(), "watch"),
        (&["man"], "man".into(), "man"),
        (&["archive", "list"], "archive".into(), "archive"),
        (&[&replay[..], &["--report", &report, &log]].concat(), "--report".into(), "reports"),
        (&[&replay[..], &[&gzip]].concat(), format!("{gzip}: gzip"), "compression"),
        (&[&replay[..], &[&zstd]].concat(), format!("{zstd}: zstd"), "compression"),
    ] {
        let output = tollgate(arguments);
        let why = format!("this tollgate is built without the feature {feature}, which provides it");
        let install = format!("cargo install --locked --path crates/cli --features {feature}");
        assert_eq!((code(&output), stderr(&output)), (2, format!("error: {what}: {why}: {install}\n")));
    }
    assert!(!std::path::Path::new(&report).exists());
    assert!(!stdout(&tollgate(&["replay", "--help"])).contains("--report"));
    assert!(!stdout(&tollgate(&["--help"])).contains("watch"));
}

#[test]
fn all_else_is_as_with_it() {
    let server = Server::start();
    for options in [&["--url", &server.tcp_url()][..], &["--tls-ca", ""]] {
        let output = tollgate(&[&["probe", "gcra 5/1s", "k"], options].concat());
        assert_eq!(code(&output), 0, "{}", stderr(&output));
    }
    assert!(stdout(&tollgate(&["probe", "--help"])).contains("--tls-ca <FILE>"));
}
