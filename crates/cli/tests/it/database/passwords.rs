//! Passwords in addresses: in no message, and on Linux in no list of processes.

#[cfg(target_os = "linux")]
use std::net::TcpListener;
#[cfg(target_os = "linux")]
use std::process::Stdio;

use tollgate_testing::record::prepared;

use crate::support::tool::{code, command, stderr, stdout, tollgate};

#[test]
fn no_message_of_the_tool_repeats_a_password() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("rules.toml").to_str().expect("text").to_owned();
    std::fs::write(&file, "[[rule]]\nname = \"a\"\nkey = \"user\"\nlimits = [\"gcra 1/1s\"]\n").expect("written");
    let url = "postgres://u:open sesame@127.0.0.1:1/db";
    let words = "host=127.0.0.1 port=1 user=u dbname=db password=open sesame=x";
    for arguments in [
        &["rules", "push", url, "--database", url][..],
        &["rules", "push", &file, "--database", url],
        &["rules", "push", &file, "--database", words],
        &["rules", "diff", url, &file],
        &["rules", "diff", &file, words],
        &["rules", "check", url],
        &["rules", "explain", url],
        &["db", "migrate", url],
        &["db", "migrate", "--databse", url],
        &["db", "status", "--database", "postgres://u:open@sesame@127.0.0.1:1/db"],
        &["users", "block", "1", "--for", url, "--database", url],
        &["users", "list", "--database=postgres://u:open@127.0.0.1:sesame/db"],
        &["audit", "--user", "1", "--at", url, "--database", url],
        &["replay", "--rule", "gcra 1/1s", url],
        &["probe", "gcra 1/1s", "k", "--url", "redis://:sesame@127.0.0.1:1"],
        &["probe", "gcra 1/1s", "k", "--ulr", "redis://:sesame@127.0.0.1:1"],
    ] {
        let output = tollgate(arguments);
        let text = stdout(&output) + &stderr(&output);
        assert!(
            code(&output) != 0 && !text.contains("sesame") && text.lines().count() >= 1,
            "{arguments:?}: {output:?}"
        );
    }
}

/// Others of the machine can read the arguments of a process, and not its environment.
#[cfg(target_os = "linux")]
#[test]
fn no_argument_shows_a_password() {
    // Takes connections, and never answers.
    let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = silent.local_addr().expect("its address").port();
    let [postgres, redis] = ["postgres://u", "redis://"].map(|user| format!("{user}:sesame@127.0.0.1:{port}/0"));
    let with_option = format!("--database={postgres}");
    for arguments in [
        &["rules", "diff", &postgres, &postgres][..],
        &["users", "list", "--database", &postgres],
        &["users", "list", &with_option],
        &["probe", "gcra 1/1s", "k", "--deadline", "1h", "--url", &redis],
    ] {
        let mut tool = command(arguments);
        let mut child = tool.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("the tool runs");
        let connected = silent.accept().expect("it connects, so it has read its arguments");
        let shown = std::fs::read(format!("/proc/{}/cmdline", child.id())).expect("its arguments");
        let shown = String::from_utf8_lossy(&shown).into_owned();
        assert!(shown.contains(":***@127.0.0.1") && !shown.contains("sesame"), "{shown}");
        child.kill().expect("ended");
        child.wait().expect("ended");
        drop(connected);
    }
}

#[tokio::test]
async fn rules_are_compared_with_a_database_named_by_a_variable() {
    let (server, tool) = prepared().await;
    let rules = "[[rule]]\nname = \"a\"\nkey = \"user\"\nlimits = [\"gcra 1/1s\"]\n";
    tool.push_rules(&rules.parse().expect("rules"), "").await.expect("pushed");
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), rules).expect("written");
    let path = file.path().to_str().expect("text");
    let diff = |variable: &str| {
        let mut tool = command(&["rules", "diff", variable, path]);
        tool.env("STAGING", server.url()).output().expect("the tool runs")
    };
    let same = diff("env:STAGING");
    assert_eq!((code(&same), stdout(&same)), (0, "1 rule, unchanged\n".to_owned()), "{same:?}");
    let none = diff("env:PRODUCTION");
    let expected = "env:PRODUCTION: this environment variable isn't set to the address of a database";
    assert!(code(&none) == 2 && stderr(&none).contains(expected), "{none:?}");
}
