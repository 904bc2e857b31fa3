//! Rules with limits that don't apply to every request.

use super::*;
use crate::support::tool::{lines, stderr, stdout, tollgate, with_input};

const API: &str = r#"
[[rule]]
name = "api"
key = "ip"
limits = [
    { limit = "fixed-window 2/1h", key = "user", missing = "skip" },
    { name = "all", limit = "fixed-window 4/1h" },
]
"#;

#[test]
fn a_limit_that_is_left_out_is_named_and_the_others_are_counted_as_themselves() {
    let directory = directory();
    let rules = file(&directory, "api.toml", API);
    let explain = |more: &[&str]| {
        let words = ["rules", "explain", &rules, "--ip", "192.0.2.1", "--format", "table"];
        stdout(&tollgate(&[&words[..], more].concat()))
    };
    let line = "left out   user: the request lacks an attribute of its key or cost";
    let has = |text: &str| text.lines().any(|shown| shown.trim_end() == line);
    let (without, with) = (explain(&[]), explain(&["--user", "42"]));
    assert!(has(&without) && without.contains("all: fixed-window 4/1h of ip:192.0.2.1"), "{without}");
    assert!(!has(&with) && with.contains("user: fixed-window 2/1h of user:42"), "{with}");

    // Six of an address each hour, of which a user makes three.
    let record = |at: u64, user: &str| {
        let t_us = 1_700_002_800_000_000 + at / 6 * 3_600_000_000 + at;
        format!("{{\"t_us\": {t_us}, \"attrs\": {{\"ip\": \"192.0.2.1\"{user}}}}}\n")
    };
    let users = ["", ", \"user\": \"42\""];
    let log: String = (0..96).map(|at| record(at as u64, users[at % 2])).collect();
    let replayed = with_input(&["replay", "--rules", &rules, "--format", "jsonl", "-"], log.as_bytes());
    let allowed: Vec<_> = lines(&replayed)[..6].iter().map(|line| line["allowed"].as_bool()).collect();
    assert_eq!(allowed, [true, true, true, true, false, false].map(Some), "{}", stderr(&replayed));
    let suggest = ["suggest", "--rules", &rules, "--input", "jsonl", "--deny-at-most", "0%", "--format", "jsonl", "-"];
    let output = with_input(&suggest, log.as_bytes());
    let rates: Vec<_> = lines(&output).iter().map(|line| line["suggestions"][0]["rate"].as_u64()).collect();
    assert_eq!(rates, [Some(3), Some(6)], "{}{}", stdout(&output), stderr(&output));
}
