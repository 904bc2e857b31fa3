//! Rules that apply together, in what the tool says of a file and of recorded traffic.

use super::*;
use crate::support::tool::{code, lines, stderr, stdout, tollgate};

const API: &str = r#"
[[rule]]
name = "everybody"
key = "global"
limits = ["fixed-window 6/1h start first-hit"]
continue = true
status = 503

[[rule]]
name = "users"
key = "user"
limits = ["fixed-window 2/1h start first-hit", { limit = "fixed-window 5/1h start first-hit", key = "org" }]
continue = true
block = ["user:mallory"]

[[rule]]
name = "failures"
match = { path = "/login" }
key = "ip"
limits = ["fixed-window 2/1h start first-hit"]
count = "401"
"#;

fn record(ms: u64, user: &str, path: &str, status: u16) -> String {
    let t_us = 1_700_000_000_000_000 + ms * 1000;
    let attrs = json!({"user": user, "org": "acme", "ip": "192.0.2.1", "path": path});
    json!({"t_us": t_us, "attrs": attrs, "status": status, "request_time": 0.001}).to_string() + "\n"
}

#[test]
fn an_explanation_shows_each_rule_and_what_becomes_of_them_together() {
    let directory = directory();
    let rules = file(&directory, "api.toml", API);
    let explain = |user: &str, shape: &str| {
        let request =
            ["--user", user, "--ip", "192.0.2.1", "--path", "/login", "--attr", "org=acme", "--format", shape];
        tollgate(&[&["rules", "explain", &rules][..], &request].concat())
    };
    let text = stdout(&explain("42", "table"));
    let shown: Vec<_> = text.lines().filter(|line| line.starts_with("rule ") || line.starts_with("limit ")).collect();
    assert_eq!(
        shown,
        [
            "rule       everybody (priority 0)",
            "limit      fixed-window 6/1h start first-hit of global",
            "rule       users (priority 0)",
            "limit      fixed-window 2/1h start first-hit of user:42",
            "limit      org: fixed-window 5/1h start first-hit of org:acme",
            "rule       failures (priority 0)",
            "limit      fixed-window 2/1h start first-hit of ip:192.0.2.1",
        ],
        "{text}"
    );
    assert!(text.contains("\ntogether   allowed if all their limits allow, and charged to all or none; the"), "{text}");
    let json = &lines(&explain("42", "jsonl"))[0];
    let names: Vec<_> = json["together"].as_array().expect("rules").iter().map(|step| &step["rule"]).collect();
    assert_eq!(names, ["everybody", "users", "failures"]);
    assert_eq!((&json["rule"], &json["status"]), (&json!("everybody"), &json!(503)));
    assert_eq!(json["together"][2]["count"], "401");
    assert_eq!(json["together"][1]["limits"][1]["redis_keys"], json!(["tollgate:{org:acme}:users/org/fixed-window"]));

    let text = stdout(&explain("mallory", "table"));
    assert!(text.contains("\ntogether   denied by users: no limits are checked, and nothing"), "{text}");
    let json = &lines(&explain("mallory", "jsonl"))[0];
    assert_eq!((&json["rule"], &json["reason"]), (&json!("users"), &json!("blocked")));
    // One rule alone is shown as ever.
    let alone = file(&directory, "alone.toml", &API[..API.find("[[rule]]\nname = \"users\"").expect("a rule")]);
    let alone = &lines(&tollgate(&["rules", "explain", &alone, "--format", "jsonl"]))[0];
    assert!(alone.get("together").is_none() && alone["rule"] == "everybody", "{alone}");
}

#[test]
fn a_replay_charges_all_or_none_names_the_rule_that_denies_and_counts_each() {
    let directory = directory();
    let rules = file(&directory, "api.toml", API);
    let log = record(0, "a", "/", 200)
        + &record(10, "a", "/login", 401)
        + &record(20, "a", "/", 200)
        + &record(30, "b", "/login", 401)
        + &record(40, "b", "/login", 200)
        + &record(50, "c", "/login", 200)
        + &record(60, "c", "/", 200)
        + &record(70, "d", "/", 200)
        + &record(80, "mallory", "/", 200);
    let records = file(&directory, "log.jsonl", &log);
    let output = tollgate(&["replay", "--rules", &rules, "--format", "jsonl", &records]);
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    let got: Vec<_> = lines(&output)
        .iter()
        .map(|line| {
            let text = |name: &str| line[name].as_str().unwrap_or_default().to_owned();
            (line["allowed"] == true, text("rule"), text("denied_by"), text("key"))
        })
        .collect();
    let of = |allowed: bool, rule: &str, by: &str, key: &str| (allowed, rule.to_owned(), by.to_owned(), key.to_owned());
    let window = "fixed-window 2/1h start first-hit";
    let expected = [
        of(true, "everybody", "", "global"),
        of(true, "everybody", "", "global"),
        of(false, "users", window, "user:a"),
        of(true, "everybody", "", "global"),
        // The address has used its two failures.
        of(false, "failures", window, "ip:192.0.2.1"),
        of(false, "failures", window, "ip:192.0.2.1"),
        of(true, "everybody", "", "global"),
        of(true, "everybody", "", "global"),
        of(false, "users", "", "user:mallory"),
    ];
    assert_eq!(got, expected);
    let first = &lines(&output)[1];
    assert_eq!(first["together"], json!(["everybody", "users", "failures"]));
    let limits: Vec<_> = first["limits"].as_array().expect("limits").iter().collect();
    let shown: Vec<_> = limits.iter().map(|limit| (&limit["rule"], &limit["key"], &limit["remaining"])).collect();
    assert_eq!(
        shown,
        [
            (&json!("everybody"), &json!("global"), &json!(4)),
            (&json!("users"), &json!("user:a"), &json!(0)),
            (&json!("users"), &json!("org:acme"), &json!(3)),
            (&json!("failures"), &json!("ip:192.0.2.1"), &json!(1)),
        ]
    );
    let summary = &lines(&tollgate(&["replay", "--rules", &rules, "--summary", "--format", "jsonl", &records]))[0];
    let counts: Vec<_> = summary["rules"].as_array().expect("rules").iter().collect();
    let counts: Vec<_> = counts.iter().map(|rule| (&rule["rule"], &rule["allowed"], &rule["denied"])).collect();
    assert_eq!(
        counts,
        [
            (&json!("users"), &json!(7), &json!(2)),
            (&json!("failures"), &json!(2), &json!(2)),
            (&json!("everybody"), &json!(8), &json!(0)),
        ],
        "{summary}"
    );
}

#[test]
fn differences_and_suggestions_know_each_rule() {
    let directory = directory();
    let rules = file(&directory, "api.toml", API);
    let one = file(
        &directory,
        "one.toml",
        &API.replacen("continue = true\n", "", 1)
            .replace("[[rule]]\nname = \"users\"", "[[rule]]\npriority = 1\nname = \"users\"")
            .replacen("continue = true\n", "", 1),
    );
    let log: String = (0..12).map(|at| record(10 * at, ["a", "b", "c", "d"][at as usize % 4], "/", 200)).collect();
    let records = file(&directory, "log.jsonl", &log);
    let check = tollgate(&["rules", "check", &rules]);
    assert_eq!(code(&check), 0, "{}", stderr(&check));
    let unreachable = tollgate(&["rules", "check", &one]);
    assert!(stderr(&unreachable).contains("or write continue = true there"), "{}", stderr(&unreachable));
    let fewer = file(&directory, "fewer.toml", &API.replace("fixed-window 6/1h", "fixed-window 3/1h"));
    let output = tollgate(&["rules", "diff", &rules, &fewer, &records, "--summary", "--format", "jsonl"]);
    let totals = &lines(&output)[0];
    assert_eq!((&totals["newly_denied"], &totals["rules"][0]["name"]), (&json!(2), &json!("everybody")), "{totals}");
    let output = tollgate(&["suggest", "--rules", &rules, "--deny-at-most", "0%", "--format", "jsonl", &records]);
    let lines = lines(&output);
    let places: Vec<_> = lines.iter().map(|line| (&line["rule"], &line["keys"], &line["requests"])).collect();
    let twelve = &json!(12);
    assert_eq!(
        places,
        [
            (&json!("everybody"), &json!(1), twelve),
            (&json!("users"), &json!(4), twelve),
            (&json!("users"), &json!(1), twelve),
        ],
        "{}",
        stdout(&output)
    );
}
