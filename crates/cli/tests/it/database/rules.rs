//! Rules that the tool pushes, pulls and compares.

use tollgate_testing::postgres_server::PostgresServer;
use tollgate_testing::record::{database, rule_of_tier as rule};

use crate::support::tool::{code, stderr, stdout, tollgate};

#[tokio::test]
async fn the_tool_pushes_and_pulls() {
    let server = PostgresServer::start();
    database(&server).migrate().await.expect("made");
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("rules.toml");
    std::fs::write(&file, [rule("a", "gcra 1/1s"), rule("b", "gcra 1/1s")].concat()).expect("a file");
    let (file, url) = (file.to_str().expect("text").to_owned(), server.url());
    let push = |more: &[&str]| tollgate(&[&["rules", "push", &file, "--database", &url], more].concat());
    let dry = push(&["--dry-run"]);
    assert_eq!((code(&dry), stdout(&dry)), (1, "added     a, b\n2 rules\n".to_owned()));
    assert_eq!((code(&push(&[])), stdout(&push(&["--dry-run"]))), (0, "2 rules, unchanged\n".to_owned()));
    std::fs::write(&file, [rule("b", "gcra 2/1s"), rule("c", "gcra 1/1s")].concat()).expect("a file");
    assert_eq!(stdout(&push(&[])), "added     c\nchanged   b\nremoved   a\n2 rules\n");
    let pulled = tollgate(&["rules", "pull", "--database", &url]);
    std::fs::write(&file, stdout(&pulled)).expect("a file");
    assert_eq!((code(&pulled), stdout(&push(&[]))), (0, "2 rules, unchanged\n".to_owned()));
    // Compared with another file, and with itself.
    let diff = |from: &str, to: &str| tollgate(&["rules", "diff", from, to]);
    let same = diff(&url, &file);
    assert_eq!((code(&same), stdout(&same)), (0, "2 rules, unchanged\n".to_owned()));
    let other = directory.path().join("other.toml").to_str().expect("text").to_owned();
    std::fs::write(&other, rule("b", "gcra 9/1s")).expect("a file");
    let differ = diff(&url, &other);
    assert_eq!((code(&differ), stdout(&differ)), (1, "changed   b\nremoved   c\n1 rule\n".to_owned()));
    let log = directory.path().join("log.jsonl");
    std::fs::write(&log, "{\"t_us\": 1, \"attrs\": {\"tier\": \"b\", \"user\": \"1\"}}\n".repeat(4)).expect("a file");
    let replayed = tollgate(&["rules", "diff", &url, &other, log.to_str().expect("text")]);
    assert!(code(&replayed) == 1 && stdout(&replayed).contains("\"newly_allowed\":"), "{replayed:?}");
    assert!(!format!("{replayed:?}").contains("sesame"), "{replayed:?}");
    std::fs::write(&file, "[[rule]]\nname = \"a\"\n").expect("a file");
    let bad = push(&[]);
    assert!(code(&bad) == 2 && stderr(&bad).contains("rules.toml:"), "{bad:?}");
    assert_eq!(stdout(&tollgate(&["rules", "pull", "--database", &url])), stdout(&pulled), "nothing was lost");
}
