//! The tool on a host whose clock is wrong: the database's clock counts.

use tollgate_testing::clock::{AHEAD, clock};
use tollgate_testing::record::prepared;

use crate::support::tool::{code, command, stdout};

/// Ends that the tool computes from a length.
#[tokio::test]
async fn a_block_and_a_key_last_as_long_as_asked_for_by_any_clock() {
    let (server, _) = prepared().await;
    let directory = tempfile::tempdir().expect("a directory");
    let (clock, url) = (clock(directory.path()), server.url());
    for ahead in ["-3600", "34560000"] {
        let tool = |arguments: &[&str]| {
            let mut tool = command(arguments);
            let output = tool.env("TOLLGATE_DATABASE", &url).env("LD_PRELOAD", &clock).env(AHEAD, ahead).output();
            let output = output.expect("the tool runs");
            assert_eq!(code(&output), 0, "{output:?}");
            stdout(&output)
        };
        tool(&["users", "block", "42", "--for", "10m"]);
        assert!(tool(&["users", "show", "42"]).contains("\"blocked\":true"));
        let key = tool(&["keys", "create", "--user", "42", "--for", "10m"]);
        tool(&["keys", "show", key.trim()]);
        let successor = tool(&["keys", "rotate", key.trim(), "--overlap", "10m"]);
        tool(&["keys", "show", key.trim()]);
        tool(&["keys", "show", successor.trim()]);
        let ends = "SELECT blocked_until FROM tollgate.user_quotas UNION ALL SELECT expires_at FROM tollgate.api_keys";
        let wrong =
            format!("SELECT 1 FROM ({ends}) AS e (at) WHERE at NOT BETWEEN now() + '9 min' AND now() + '10 min'");
        assert_eq!(server.run(&wrong).await.len(), 0, "{ahead}");
        assert_eq!(server.run("DELETE FROM tollgate.api_keys RETURNING 1").await.len(), 2);
    }
}
