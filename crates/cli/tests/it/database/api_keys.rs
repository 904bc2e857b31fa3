//! API keys that the tool makes, shows, rotates and revokes.

use tollgate_testing::record::prepared;

use crate::support::tool::{code, stderr, stdout, tollgate};

#[tokio::test]
async fn the_tool_makes_keys_and_shows_them_once() {
    let (server, _) = prepared().await;
    let url = server.url();
    let keys = |words: &[&str]| tollgate(&[&["keys"], words, &["--database", &url]].concat());
    let made = keys(&["create", "--user", "42", "--name", "backend", "--per-second", "5", "--for", "90d"]);
    let key = stdout(&made).trim().to_owned();
    let id = key[3..15].to_owned();
    assert!(
        code(&made) == 0 && key.len() == 46 && stderr(&made).contains(&id) && !stderr(&made).contains(&key),
        "{made:?}"
    );
    let shown: serde_json::Value = serde_json::from_str(&stdout(&keys(&["show", &key]))).expect("JSON");
    assert_eq!(
        (&shown["state"], &shown["limits"], &shown["user"]),
        (&"valid".into(), &"5 a second".into(), &"42".into())
    );
    let rotated = keys(&["rotate", &id, "--overlap", "1h"]);
    let successor = stdout(&rotated).trim().to_owned();
    assert!(code(&rotated) == 0 && successor.len() == 46, "{rotated:?}");
    let revoked = keys(&["revoke", &successor]);
    assert!(
        stdout(&revoked).starts_with(&format!("key {} of user 42: revoked at 20", &successor[3..15])),
        "{revoked:?}"
    );
    let list = stdout(&keys(&["list", "--user", "42", "--format", "table"]));
    assert!(list.lines().count() == 3 && list.contains("revoked") && list.contains("valid"), "{list}");
    assert!(!list.contains(&key[16..40]) && !list.contains(&successor[16..40]));
    assert_eq!((code(&keys(&["show", &successor])), code(&keys(&["show", &key]))), (1, 0));
    assert_eq!(code(&keys(&["show", "AAAAAAAAAAAA"])), 1);
    let wrong = keys(&["show", &key[..45]]);
    assert!(code(&wrong) == 2 && !stderr(&wrong).contains(&key[16..40]), "{wrong:?}");
}
