//! The same traffic under several rules.

use std::io::Write;

use serde_json::json;

use crate::support::tool::{code, lines, stderr, stdout, tollgate, with_input};

/// Ten requests at the end of a minute and ten at the beginning of the next, each a second.
fn at_the_edge() -> String {
    let seconds = (50..60).chain(60..70);
    seconds.map(|second| format!("{{\"t_us\":{},\"key\":\"k\"}}\n", second * 1_000_000_u64)).collect()
}

#[test]
fn a_fixed_window_lets_twice_its_rate_through_at_its_edge_and_a_log_does_not() {
    let rules = ["fixed-window 10/1m", "sliding-log 10/1m", "token-bucket 10/1m", "concurrency 3 ttl 1h"];
    let output = with_input(&[&["compare"][..], &rules, &["-"]].concat(), at_the_edge().as_bytes());
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    let found = lines(&output);
    let counts: Vec<_> = found.iter().map(|rule| (&rule["rule"], &rule["denied"], &rule["keys_denied"])).collect();
    let expected = [(0, 0), (10, 1), (7, 1), (17, 1)];
    let expected = expected.map(|(denied, keys)| (json!(denied), json!(keys)));
    for ((rule, (got, denied, keys)), expected) in rules.iter().zip(counts).zip(&expected) {
        assert_eq!((got, denied, keys), (&json!(rule), &expected.0, &expected.1));
    }
    let most = |at: usize| found[at]["most_in_a_period"].clone();
    assert_eq!(most(0), json!({"units": 20, "rate": 10, "period_us": 60_000_000}));
    assert_eq!((&most(1)["units"], &most(2)["units"], most(3)), (&json!(10), &json!(13), json!(null)));
    assert_eq!((&found[0]["wait_us"], &found[1]["wait_us"]["max"]), (&json!(null), &json!(50_000_000)));
    assert_eq!(found[3]["wait_us"], json!(null), "another may give a permit back at any time");
    assert!(found.iter().all(|rule| rule["redis_bytes"].as_u64().is_some_and(|bytes| (150..500).contains(&bytes))));
}

/// What each rule decides alone, it decides beside others.
#[test]
fn rules_do_not_see_each_other() {
    let input = at_the_edge();
    let rules = ["token-bucket 10/1m", "token-bucket 5/1m", "token-bucket 10/1m"];
    let together = lines(&with_input(&[&["compare"][..], &rules, &["-"]].concat(), input.as_bytes()));
    for (rule, together) in rules.iter().zip(together) {
        let alone = lines(&with_input(&["replay", "--rule", rule, "-", "--summary"], input.as_bytes()));
        for field in ["denied", "allowed", "keys", "over_time"] {
            assert_eq!(together[field], alone[0][field], "{rule}: {field}");
        }
    }
}

#[test]
fn a_file_and_a_stream_are_played_in_the_order_of_their_clock() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("records");
    let backwards: String = at_the_edge().lines().rev().map(|line| format!("{line}\n")).collect();
    std::fs::write(&file, &backwards).expect("written");
    let file = file.to_str().expect("UTF-8");
    let sorted = lines(&tollgate(&["compare", "fixed-window 10/1m", file]));
    assert_eq!(sorted[0]["denied"], json!(0));
    let table = tollgate(&["compare", "fixed-window 10/1m", file, "--format", "table"]);
    assert!(stdout(&table).starts_with("20 records, 19 out of order"), "{}", stdout(&table));
    let stream = lines(&with_input(&["compare", "fixed-window 10/1m", "-"], backwards.as_bytes()));
    assert_eq!(stream, sorted);
}

#[test]
fn a_table_has_the_rules_side_by_side_and_no_colours_where_there_is_no_terminal() {
    let rules = ["fixed-window 10/1m", "sliding-log 10/1m, fixed-window 100000/1d"];
    let output =
        with_input(&[&["compare"][..], &rules, &["-", "--format", "table"]].concat(), at_the_edge().as_bytes());
    let table = stdout(&output);
    assert!(!table.contains('\u{1b}') && table.lines().all(|line| line.chars().count() <= 80), "{table}");
    for said in ["most in a period", "20, 2.00x", "10, 1.00x", "50.00 %", "a full bar is 100.00 %", "2  sliding-log"] {
        assert!(table.contains(said), "{said}: {table}");
    }
}

#[test]
fn bad_input_is_one_line_that_names_the_value() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_owned();
    let log = "1.2.3.4 - - [17/May/2015:10:05:03 +0000] \"GET / HTTP/1.1\" 200 1\n".repeat(1000);
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    gzip.write_all(log.as_bytes()).expect("written");
    let gzip = gzip.finish().expect("written");
    std::fs::write(at("cut.gz"), &gzip[..gzip.len() / 2]).expect("written");
    std::fs::write(at("list"), "# a list\n1 2 3\n").expect("written");
    std::fs::write(at("log"), &log).expect("written");
    let part =
        "{\"name\": \"a\", \"limits\": [{\"limit\": \"token-bucket 9/1s\", \"key\": \"org\"}], \"tag\": \"org\"}";
    let many = vec!["token-bucket 1/1s"; 13];
    for (arguments, expected) in [
        (vec!["token-bucket 5/1s", &at("cut.gz")], "the gzip data is cut off"),
        (vec!["token-bucket 5/1s", &at("list")], "it begins with \"# a list\""),
        (vec!["token-bucket 5/1s", &at("log"), "--input", "jsonl"], "it looks like combined: give --input combined"),
        (vec!["token-bucket 5/1s"], "expected RULE... FILE"),
        (
            vec!["token-bucket 5/1s", "token-bucket 0/1s", &at("log")],
            "rule 2: rate: expected a whole number from 1 to 2^53, got 0",
        ),
        (vec!["leaky 5/1s", &at("log")], "got \"leaky\""),
        (vec![part, &at("log")], "must count the key alone, but counts or is tagged by org"),
        ([&many[..], &["log"]].concat(), "expected at most 12 rules, got 13"),
        (vec!["token-bucket 5/1s", "no-such-file"], "no-such-file"),
    ] {
        let output = tollgate(&[&["compare"], &arguments[..]].concat());
        let told = stderr(&output);
        let errors: Vec<_> = told.lines().filter(|line| line.starts_with("error: ")).collect();
        assert_eq!((code(&output), errors.len(), stdout(&output).as_str()), (2, 1, ""), "{told}");
        assert!(errors[0].contains(expected), "{told}");
    }
}
