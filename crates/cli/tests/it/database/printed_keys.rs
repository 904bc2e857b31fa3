//! A key that nobody could read is not valid, and the one that it was to replace stays as it was.

use std::fs::File;
use std::process::{Output, Stdio};

use tollgate_testing::postgres_server::PostgresServer;
use tollgate_testing::record::prepared;

use crate::support::tool::{code, command, stderr, stdout, tollgate};

/// With this standard output.
fn run(server: &PostgresServer, arguments: &[&str], out: Stdio) -> Output {
    let mut tool = command(&[&["keys"], arguments].concat());
    let tool = tool.env("TOLLGATE_DATABASE", server.url()).stdout(out).stderr(Stdio::piped());
    tool.spawn().expect("the tool runs").wait_with_output().expect("its end")
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn a_key_that_cannot_be_printed_is_not_created() {
    let (server, _) = prepared().await;
    let url = server.url();
    let create = ["keys", "create", "--user", "42", "--for", "30d", "--database", &url];
    let key = stdout(&tollgate(&create)).trim().to_owned();
    let keys = async || server.run("SELECT (key_id, expires_at, version)::text FROM tollgate.api_keys").await;
    let before = keys().await;
    let full = || Stdio::from(File::create("/dev/full").expect("a device"));
    let gone = || {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        Stdio::from(writer)
    };
    for arguments in [&["create", "--user", "42"][..], &["rotate", &key, "--overlap", "1h"]] {
        for (out, expected) in [
            (full(), "key: not created, since it could not be handed out: No space left on device"),
            (gone(), "key: not created, since it could not be handed out: Broken pipe"),
            (Stdio::null(), "output: standard output is /dev/null or closed"),
        ] {
            let output = run(&server, arguments, out);
            assert!(code(&output) == 2 && stderr(&output).contains(expected), "{arguments:?}: {output:?}");
            assert_eq!(keys().await, before);
        }
        let closed = std::process::Command::new("sh")
            .args(["-c", "exec \"$0\" \"$@\" >&-", env!("CARGO_BIN_EXE_tollgate"), "keys"])
            .args(arguments)
            .env("TOLLGATE_DATABASE", &url)
            .output()
            .expect("a shell");
        assert!(code(&closed) == 2 && stderr(&closed).contains("standard output is /dev/null or closed"), "{closed:?}");
        assert_eq!(keys().await, before);
    }
    let file = tempfile::NamedTempFile::new().expect("a file");
    let written = run(&server, &["create", "--user", "42"], file.reopen().expect("the same").into());
    assert_eq!((code(&written), std::fs::read_to_string(file.path()).expect("a key").len()), (0, 47), "{written:?}");
}
