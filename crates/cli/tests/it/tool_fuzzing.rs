//! The tool on files written to break it.

use std::io::Write;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use serde_json::json;
use tollgate_testing::rules::assert_of_every_algorithm;

use crate::support::tool::{code, command, lines, stderr};

/// What the tool says to a file of these bytes, which it is given no longer than a while to do.
fn replay(arguments: &[&str], input: &[u8]) -> std::process::Output {
    let mut file = tempfile::NamedTempFile::new().expect("a file");
    file.write_all(input).expect("written");
    let begun = Instant::now();
    let output = command(&["replay"]).args(arguments).arg(file.path()).output().expect("the tool runs");
    assert!(begun.elapsed() < Duration::from_secs(60), "{:?} for {} bytes", begun.elapsed(), input.len());
    assert!(!stderr(&output).contains("panicked"), "{}", stderr(&output));
    output
}

/// Lines that can be read, and lines that can't, each with what is said of it.
fn hostile(format: &str) -> Vec<(Vec<u8>, Option<&'static str>)> {
    let deep = |field: &str| format!("{{\"t_us\":1,\"key\":\"a\",\"{field}\":{}", "[".repeat(1 << 20)).into_bytes();
    let long = |start: &str| [start.as_bytes(), &vec![b'x'; 17 << 20]].concat();
    let text = |text: &str| text.as_bytes().to_vec();
    match format {
        "jsonl" => vec![
            (text(r#"{"t_us":1,"key":"a"}"#), None),
            (text(r#"{"t_us":99999999999999999999999999,"key":"a"}"#), Some("t_us: expected a whole number")),
            (text(r#"{"t_us":1e400,"key":"a"}"#), Some("json: ")),
            (text(r#"{"t_us":-0.0,"key":"a"}"#), Some("t_us: expected a whole number")),
            (text(r#"{"t_us":1,"key":"a","cost":9007199254740992}"#), Some("cost: expected a whole number")),
            (text(r#"{"t_us":4503599627370496,"key":"\u0000\u001b[2J","cost":9007199254740991}"#), None),
            (deep("cost"), Some("json: recursion limit")),
            (deep("limits"), Some("json: EOF while parsing a list")),
            (b"{\"t_us\":1,\"key\":\"\xff\"}".to_vec(), Some("line: expected UTF-8")),
            (b"\0\0\0\0".to_vec(), Some("line: expected a JSON object")),
            (b"\x1b]0;gotcha\x07".to_vec(), Some("line: expected a JSON object")),
            (long("{\"t_us\":1,\"key\":\""), Some("line: longer than 16777216 bytes")),
            (
                text(r#"{"t_us":2,"key":"a","op":"block","for":"99999999999d"}"#),
                Some("block: expected at most 71 years"),
            ),
            (text(r#"{"t_us":2,"key":"a"}"#), None),
        ],
        "csv" => vec![
            (text("t_us,key,cost"), None),
            (text("1,a,1"), None),
            (text("99999999999999999999999999,a,1"), Some("t_us: expected a whole number")),
            (text("+1,a,1"), Some("t_us: expected a whole number")),
            (text("1,a"), Some("row: expected 3 fields, got 2")),
            (b"1,\xff\0\x1b[2J,1".to_vec(), None),
            (b"\0\0\0".to_vec(), Some("row: expected 3 fields, got 1")),
            (long("1,"), Some("row: longer than 16777216 bytes")),
            (text("4503599627370496,a,9007199254740991"), None),
        ],
        "access-json" => vec![
            (text(r#"{"ts":1431857103.25,"remote_addr":"1.2.3.4","request":"GET / HTTP/1.1"}"#), None),
            (text(r#"{"ts":1e400,"remote_addr":"a"}"#), Some("json: ")),
            (text(r#"{"ts":-1,"remote_addr":"a"}"#), Some("ts: expected a time such as")),
            (text(r#"{"ts":[[[]]],"remote_addr":"a"}"#), Some("ts: expected a time such as")),
            (text(r#"{"ts":1,"duration":1e300,"remote_addr":"\u0000\u001b[2J"}"#), None),
            (text(r#"{"ts":1,"request":[],"remote_addr":7}"#), Some("no host on this line")),
            (text(r#"{"remote_addr":"a"}"#), Some("time: expected one of start_time, ")),
            (deep("ts"), Some("json: recursion limit")),
            (b"{\"ts\":1,\"remote_addr\":\"\xff\"}".to_vec(), Some("line: expected UTF-8")),
            (b"\0\0\0\0".to_vec(), Some("line: expected a JSON object")),
            (long("{\"ts\":1,\"remote_addr\":\""), Some("line: longer than 16777216 bytes")),
        ],
        _ => vec![
            (text("1.2.3.4 - - [17/May/2015:10:05:03 +0000] \"GET /\" 200 1"), None),
            (text("1.2.3.4 - - [17/May/99999999999:10:05:03 +0000] \"-\" 200 1"), Some("time: expected")),
            (text("1.2.3.4 - - [17/May/2015:10:05:03 +9999999999] \"-\" 200 1"), Some("time: expected")),
            (b"\xff\0 - - [17/May/2015:10:05:03 +0000] \"\\\"".to_vec(), Some("request: expected text")),
            (b"\0\0\0".to_vec(), Some("line: expected host")),
            (long("h - - ["), Some("line: longer than 16777216 bytes")),
            (b"\xff\0 - - [17/May/2015:10:05:03 +0000] \"-\" 1e400 x".to_vec(), None),
        ],
    }
}

#[test]
fn each_unreadable_line_is_reported_and_counted_and_all_others_are_replayed() {
    for format in ["jsonl", "csv", "combined", "access-json"] {
        let written = hostile(format);
        let input = written.iter().map(|(line, _)| line.as_slice()).collect::<Vec<_>>().join(&b'\n');
        let arguments = ["--rule", "gcra 5/1s", "--input", format];
        let output = replay(&[&arguments[..], &["--summary"]].concat(), &input);
        assert_eq!(code(&output), 0, "{format}: {}", stderr(&output));
        let bad = written.iter().filter(|(_, why)| why.is_some()).count();
        let good = written.len() - bad - usize::from(format == "csv");
        let summary = &lines(&output)[0];
        assert_eq!((&summary["records"], &summary["unreadable"]), (&json!(good), &json!(bad)), "{format}");
        let told = stderr(&output);
        assert!(!told.contains(|c: char| c.is_control() && c != '\n'), "{told:?}");
        for (number, why) in (1..).zip(&written).filter_map(|(number, (_, why))| why.map(|why| (number, why))) {
            assert!(told.contains(&format!(": line {number}: {why}")), "{format}: line {number}: {why}: {told}");
        }
        assert!(told.lines().all(|line| line.len() < 400), "{told}");
        let output = replay(&[&arguments[..], &["--strict"]].concat(), &input);
        assert_eq!((code(&output), stderr(&output).matches(": line ").count()), (2, 1), "{format}");
    }
}

#[test]
fn arbitrary_bytes_end_a_replay_as_documented() {
    let line = prop_oneof![
        2 => proptest::collection::vec(any::<u8>(), 0..=60),
        1 => Just(b"{\"t_us\":1,\"key\":\"a\"}".to_vec()),
        1 => Just(b"t_us,key".to_vec()),
        1 => Just(b"1,\"a".to_vec()),
        1 => Just(b"h - - [17/May/2015:10:05:03 +0000] \"-\" 408 0".to_vec()),
    ];
    let format = vec!["jsonl", "csv", "combined", "access-json", "haproxy", "w3c", "text"];
    let format = proptest::sample::select(format);
    let cases = (proptest::collection::vec(line, 0..=12), format, any::<bool>());
    let config = Config { cases: 60, failure_persistence: None, ..Config::default() };
    let result = TestRunner::new(config).run(&cases, |(written, format, strict)| {
        let strict = if strict { &["--strict"][..] } else { &[] };
        let arguments = [&["--rule", "sliding-log 5/1s", "--input", format][..], strict].concat();
        let output = replay(&arguments, &written.join(&b'\n'));
        let told = stderr(&output);
        let nothing = told.contains(" be read as ") && !told.contains("; skipped");
        let broke = !strict.is_empty() && told.contains(": line ") || told.contains("header: expected") || nothing;
        prop_assert_eq!(code(&output), if broke { 2 } else { 0 }, "{}", told);
        Ok(())
    });
    result.unwrap_or_else(|error| panic!("{error}"));
}

/// How many records a line on standard error says were skipped: of many, the last such line has the number.
fn skipped(told: &str) -> usize {
    let more =
        || told.split(": ").last()?.strip_suffix(" more can't be read; skipped")?.split(' ').next()?.parse().ok();
    if told.ends_with("; skipped") { more().unwrap_or(1) } else { 0 }
}

/// Records that can be read and go to the ends of what can be said.
#[test]
fn extreme_records_are_decided_by_every_algorithm() {
    let times = proptest::sample::select(vec![0, 1, 999_999, 1_700_000_000_000_000, (1 << 52) - 1, 1_u64 << 52]);
    let costs = proptest::sample::select(vec![0, 1, 5, 1 << 31, (1 << 52) + 1, (1_u64 << 53) - 1]);
    let ops = vec!["acquire", "peek", "reserve", "at-most", "refund", "penalty", "block", "settle", "cancel", "reset"];
    let record =
        (times, proptest::sample::select(ops), costs, proptest::sample::select(vec!["0s", "1us", "10m", "9000d"]))
            .prop_map(|(t_us, op, cost, length)| {
                let mut record = json!({"t_us": t_us, "key": "k", "op": op, "cost": cost});
                match op {
                    "block" => record["for"] = json!(length),
                    "settle" | "cancel" | "acquire" => record["id"] = json!(format!("i{}", cost % 3)),
                    _ => {}
                }
                record.to_string()
            });
    let rules = vec![
        "token-bucket 5/1s max-debt 9",
        "token-bucket 1000000/30d max-debt unlimited",
        "fixed-window 5/1s start first-hit",
        "fixed-window 5/1s burst 9000000000 start 100ms",
        "fixed-window 5/month tz Europe/Zurich",
        "sliding-window 5/1s",
        "sliding-window 1000000/30d",
        "sliding-log 5/1s",
        "sliding-log 500000000000/1us max 549755813888",
        "gcra 1/1us max-debt 3",
        "gcra 1/23000d",
        "concurrency 8 ttl 30s",
    ];
    assert_of_every_algorithm(&rules, &[]);
    let cases = (proptest::collection::vec(record, 1..=40), proptest::sample::select(rules), any::<bool>());
    let config = Config { cases: 60, failure_persistence: None, ..Config::default() };
    let result = TestRunner::new(config).run(&cases, |(records, rule, unsorted)| {
        let order = if unsorted { &["--unsorted"][..] } else { &[] };
        let output =
            replay(&[&["--rule", rule, "--format", "jsonl"][..], order].concat(), records.join("\n").as_bytes());
        prop_assert_eq!(code(&output), 0, "{}: {}", rule, stderr(&output));
        let told: usize = stderr(&output).lines().map(skipped).sum();
        prop_assert_eq!(lines(&output).len() + told, records.len(), "{}: {}", rule, stderr(&output));
        for line in lines(&output) {
            let number = |name: &str| line[name].as_u64().unwrap_or_else(|| panic!("{rule}: {name} in {line}"));
            prop_assert!(
                number("remaining") <= number("limit") && number("reset_after_us") <= 1 << 53,
                "{rule}: {line}"
            );
        }
        Ok(())
    });
    result.unwrap_or_else(|error| panic!("{error}"));
}
