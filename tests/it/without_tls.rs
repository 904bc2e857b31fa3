//! The tool that was built without TLS: it says what is missing, and how to have it.

use crate::server::Server;
use crate::tool::{code, command, stderr, stdout, tollgate};

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
            assert_eq!(told, format!("error: {named}, {why}: cargo install --locked --path . --features cli,tls\n"));
        }
    }
    let by_environment = command(&["probe", "gcra 5/1s", "k"]).env("TOLLGATE_TLS_CA", "ca.pem").output().expect("runs");
    assert!(stderr(&by_environment).starts_with("error: --tls-ca needs TLS"), "{}", stderr(&by_environment));
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
