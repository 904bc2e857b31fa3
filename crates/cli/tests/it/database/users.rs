//! Users as the tool changes and shows them.

use tollgate_testing::record::prepared;

use crate::support::tool::{code, stderr, stdout, tollgate};

#[tokio::test]
async fn the_tool_blocks_and_shows() {
    let (server, _) = prepared().await;
    let url = server.url();
    let users = |words: &[&str]| tollgate(&[&["users"], words, &["--database", &url]].concat());
    let none = users(&["show", "42"]);
    assert_eq!((code(&none), stdout(&none)), (1, "user 42: nothing is known\n".to_owned()));
    assert_eq!(stdout(&users(&["block", "42", "--reason", "spam"])), "user 42: blocked until lifted\n");
    let set = users(&["set", "42", "--tier", "paid", "--per-hour", "100", "--burst", "5"]);
    assert_eq!(stdout(&set), "user 42: tier paid; limits 100 an hour, at most 5 at once\n");
    let shown: serde_json::Value = serde_json::from_str(&stdout(&users(&["show", "42"]))).expect("JSON");
    assert_eq!(
        (&shown["blocked"], &shown["blocked_reason"], &shown["tier"]),
        (&true.into(), &"spam".into(), &"paid".into())
    );
    let table = stdout(&users(&["show", "42", "--format", "table"]));
    assert!(table.contains("blocked reason    spam\n") && table.contains("blocked until     -\n"), "{table}");
    let list = stdout(&users(&["list", "--format", "table"]));
    assert!(list.lines().count() == 2 && list.contains("100 an hour, at most 5 at once"), "{list}");
    let for_a_day = users(&["block", "42", "--for", "1d"]);
    assert!(stdout(&for_a_day).starts_with("user 42: blocked until 20"), "{for_a_day:?}");
    assert_eq!((code(&users(&["unblock", "42"])), code(&users(&["unblock", "42"]))), (0, 1));
    let wrong = users(&["set", "42", "--burst", "3"]);
    assert_eq!((code(&wrong), stderr(&wrong).lines().count()), (2, 1), "{wrong:?}");
}
