//! What is suggested from recorded traffic.

use std::io::Write;

use serde_json::json;
use tollgate::Algorithm;
use tollgate_testing::repository::read;
use tollgate_testing::rules::assert_of_every_algorithm;

use super::*;
use crate::support::tool::{code, command, lines, stderr, stdout, tollgate, with_input};

fn file(text: impl AsRef<[u8]>) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().expect("a file");
    file.write_all(text.as_ref()).expect("written");
    file
}

fn suggest(file: &tempfile::NamedTempFile, options: &[&str]) -> Output {
    tollgate(&[&["suggest", file.path().to_str().expect("UTF-8")], options].concat())
}

/// The objects that are printed.
fn suggested(file: &tempfile::NamedTempFile, options: &[&str]) -> Vec<Value> {
    let output = suggest(file, options);
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    lines(&output)
}

fn texts(told: &Value, list: &str, only_recommended: bool) -> Vec<String> {
    let all = told[list].as_array().expect("a list").iter();
    let some = all.filter(|one| !only_recommended || one["recommended"] == true);
    some.map(|one| one["rule"].as_str().expect("a rule").to_owned()).collect()
}

fn record(t_us: u64, key: &str) -> String {
    format!("{{\"t_us\":{t_us},\"key\":\"{key}\"}}\n")
}

/// Ten keys with a request every three seconds, and one with thirty at the start of each minute, for ten minutes.
#[test]
fn bursts_among_steady_traffic_give_the_least_numbers_that_admit_both() {
    let mut text = String::new();
    for second in (0..600).step_by(3) {
        (0..10).for_each(|key| text.push_str(&record(second * 1_000_000, &format!("steady-{key}"))));
        if second % 60 == 0 {
            (0..30).for_each(|_| text.push_str(&record(second * 1_000_000, "bursty")));
        }
    }
    let log = file(text);
    let told = &suggested(&log, &["--deny-at-most", "0%", "--per", "1m"])[0];
    assert_eq!((&told["requests"], &told["keys"], &told["may_deny"]), (&json!(2300), &json!(11), &json!(0)));
    assert_eq!(
        texts(told, "suggestions", true),
        [
            "token-bucket 50/1m burst 30",
            "fixed-window 30/1m",
            // All of the minute before still overlaps at the start of the next.
            "sliding-window 60/1m",
            "sliding-log 30/1m",
        ]
    );
    let never = [Algorithm::CalendarWindow, Algorithm::Concurrency];
    assert_of_every_algorithm(&texts(told, "suggestions", true), &never);
    // At 20 a minute, ten more are wanting after each of the nine minutes between the first burst and the last.
    assert_eq!(texts(told, "frontier", false), ["token-bucket 20/1m burst 120", "token-bucket 50/1m burst 30"]);
    for one in told["suggestions"].as_array().expect("a list") {
        assert_eq!((&one["denied"], &one["keys_hit"], &one["unchecked_keys"]), (&json!(0), &json!(0), &json!(0)));
    }
    // A second of thirty units is period enough.
    let told = &suggested(&log, &["--deny-at-most", "0%"])[0];
    let windows = ["fixed-window 30/1s", "sliding-window 30/1s", "sliding-log 30/1s"];
    assert_eq!(texts(told, "suggestions", true)[1..], windows);
    // Without the one that bursts, which is one of eleven.
    let told = &suggested(&log, &["--deny-at-most", "10%", "--of", "keys", "--per", "1m"])[0];
    assert_eq!(
        (&told["may_deny"], texts(told, "suggestions", true)[0].as_str()),
        (&json!(1), "token-bucket 20/1m burst 1")
    );
    let best = &told["suggestions"][0];
    assert_eq!(
        (&best["keys_hit"], &best["hit"][0]["key"], &best["hit"][0]["first_us"]),
        (&json!(1), &json!("bursty"), &json!(0))
    );
}

/// A hundred keys of which each has one request more than the one before, all at once.
#[test]
fn a_share_of_keys_and_one_of_requests_are_kept_to_exactly() {
    let text: String =
        (1..=100).flat_map(|key| std::iter::repeat_n(record(5_000_000, &format!("k{key}")), key)).collect();
    let log = file(text);
    for (share, of, units) in [
        ("0%", "keys", 100),
        ("1%", "keys", 99),
        ("9.99%", "keys", 91),
        ("10%", "keys", 90),
        ("0%", "requests", 100),
        // 1 of the first key, 2 of the next and so on; of all 5050, 9 may be denied, or 10.
        ("0.19%", "requests", 97),
        ("0.2%", "requests", 96),
    ] {
        let told = &suggested(&log, &["--deny-at-most", share, "--of", of])[0];
        assert_eq!(told["of"], of);
        for one in told["suggestions"].as_array().expect("a list") {
            let sliding = one["algorithm"] == "sliding-window";
            assert_eq!(&one["burst"], &json!(units), "{share} of {of}: {one}");
            assert!(sliding || one["denied"].as_u64() <= Some(5050 / 10), "{one}");
        }
    }
}

/// As an operator would check it, with the tool itself.
#[test]
fn each_limit_for_a_real_log_denies_as_much_in_a_replay_and_one_unit_less_denies_too_much() {
    let log = file(beginning_of_the_log(1_000));
    let log = log.path().to_str().expect("UTF-8");
    let output = tollgate(&["suggest", log]);
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    let told = &lines(&output)[0];
    assert_eq!((&told["requests"], &told["may_deny"]), (&json!(1_000), &json!(1)));
    let recommended = told["suggestions"].as_array().expect("a list").iter().filter(|one| one["recommended"] == true);
    let recommended: Vec<_> = recommended.map(|one| (one["rule"].as_str().expect("a rule"), one)).collect();
    let mut rules: Vec<_> = recommended.iter().map(|(rule, _)| (*rule).to_owned()).collect();
    for (rule, _) in &recommended {
        let limit: Limit = rule.parse().expect("a limit");
        let bucket = rule.contains("burst") || limit.capacity() != limit.rate();
        let less = limit.capacity() - 1;
        rules.push(match bucket {
            true => format!("{} {}/1m burst {less}", limit.algorithm(), limit.rate()),
            false => format!("{} {less}/1m", limit.algorithm()),
        });
    }
    let compared = command(&["compare"]).args(&rules).arg(log).output().expect("the tool runs");
    assert_eq!(code(&compared), 0, "{}", stderr(&compared));
    let compared = lines(&compared);
    let (kept, less) = compared.split_at(recommended.len());
    for ((rule, one), outcome) in recommended.iter().zip(kept) {
        assert_eq!((&outcome["rule"], &outcome["denied"]), (&json!(rule), &one["denied"]));
        assert!(one["denied"].as_u64() <= Some(1), "{rule}");
    }
    assert_eq!(less.len(), recommended.len());
    assert!(less.iter().all(|outcome| outcome["denied"].as_u64() > Some(1)), "{less:?}");
    // Whom it hits.
    let (rule, one) = recommended[0];
    let output = tollgate(&["replay", "--rule", rule, "--summary", log]);
    let named = |list: &Value| {
        let pair = |one: &Value| (one["key"].clone(), one["denied"].clone());
        list.as_array().expect("a list").iter().map(pair).collect::<Vec<_>>()
    };
    assert_eq!(named(&lines(&output)[0]["busiest_denied"]), named(&one["hit"]), "{rule}");
}

#[test]
fn the_guide_shows_what_the_tool_prints() {
    let printed = stdout(&tollgate(&["suggest", LOG, "--format", "table"]));
    assert!(read("src/guide/numbers.md").contains(&printed), "the guide shows something else than\n{printed}");
    // Where the numbers are chosen, the guide shows a part of it.
    let guide = read("src/guide.md");
    let (_, shown) = guide.split_once("```text\nlimit ").expect("the suggestions");
    let (shown, _) = shown.split_once("```").expect("an end");
    assert!(shown.lines().count() > 4 && printed.contains(&format!("limit {shown}")), "{shown}");
}

#[test]
fn standard_input_and_a_compressed_file_are_read_as_the_file_is() {
    let text = beginning_of_the_log(2_000);
    let whole = stdout(&suggest(&file(&text), &["--of", "keys", "--per", "1m"]));
    let piped = with_input(&["suggest", "-", "--of", "keys", "--per", "1m"], text.as_bytes());
    assert_eq!(stdout(&piped), whole, "{}", stderr(&piped));
    let zstd = file(zstd::encode_all(text.as_bytes(), 3).expect("compressed"));
    assert_eq!(stdout(&suggest(&zstd, &["--of", "keys", "--per", "1m"])), whole);
}

#[test]
fn each_value_and_each_key_is_counted_by_itself() {
    let attrs = |t_us: u64, tier: &str, user: u64| {
        json!({"t_us": t_us, "attrs": {"tier": tier, "user": format!("u{user}")}}).to_string() + "\n"
    };
    let mut text = String::new();
    for at in 0..60 {
        text += &attrs(at, "free", at % 3);
        text += &attrs(at, "paid", at % 2);
    }
    text += "{\"t_us\":7,\"attrs\":{\"user\":\"u9\"}}\n";
    text += "{\"t_us\":8,\"op\":\"peek\",\"attrs\":{\"user\":\"u9\",\"tier\":\"free\"}}\n";
    let log = file(text);
    let told = suggested(&log, &["--key", "user", "--each", "tier", "--deny-at-most", "0%"]);
    let numbers: Vec<_> = told
        .iter()
        .map(|one| (one["value"].clone(), one["keys"].clone(), one["suggestions"][2]["rate"].clone()))
        .collect();
    assert_eq!(numbers, [(json!("free"), json!(3), json!(20)), (json!("paid"), json!(2), json!(30))]);
    assert_eq!(told[0]["left_out"], json!({"no tier": 1, "the operation peek": 1}));
    let told = &suggested(&log, &["--key", "user", "--deny-at-most", "0%"])[0];
    assert_eq!(
        (&told["requests"], &told["keys"], &told["suggestions"][2]["rate"]),
        (&json!(121), &json!(4), &json!(50))
    );

    // Of an access log, its fields.
    let told =
        suggested(&file(beginning_of_the_log(2_000)), &["--key", "ip", "--each", "method", "--deny-at-most", "0%"]);
    let methods: Vec<_> = told.iter().map(|one| one["value"].clone()).collect();
    assert_eq!(methods, ["GET", "HEAD"]);
}

#[test]
fn the_rules_that_are_there_get_numbers() {
    let rules = r#"
[[rule]]
name = "tried"
shadow = true
priority = 9
key = "user"
limits = "fixed-window 1/1m"

[[rule]]
name = "writes"
match = { method = "POST" }
key = "user"
tag = "org"
cost = 2
limits = ["token-bucket 5/1m", { name = "orgs", limit = "fixed-window 5/1s", key = "org" }, "concurrency 3 ttl 30s"]
overrides = { "user:vip" = "token-bucket 9/1s" }

[[rule]]
name = "reads"
key = "user"
limits = ["sliding-log 1/1m"]
"#;
    let attrs = |t_us: u64, method: &str, user: &str| {
        json!({"t_us": t_us, "attrs": {"method": method, "user": user, "org": "acme"}}).to_string() + "\n"
    };
    let mut text = String::new();
    for at in 0..10 {
        text += &attrs(at * 1_000, "POST", "a");
        text += &attrs(at * 1_000, "POST", "vip");
        text += &attrs(at * 1_000, "GET", "b");
    }
    text += &attrs(120_000_000, "POST", "b");
    let (log, rules) = (file(text), file(rules));
    let rules = rules.path().to_str().expect("UTF-8");
    let told = suggested(&log, &["--rules", rules, "--deny-at-most", "0%"]);
    let numbers: Vec<_> = told
        .iter()
        .map(|one| (one["rule"].as_str().expect("a rule"), one["present"].clone(), texts(one, "suggestions", true)))
        .collect();
    assert_eq!(
        numbers,
        [
            ("tried", json!("fixed-window 1/1m"), vec!["fixed-window 10/1m".to_owned()]),
            ("writes", json!("token-bucket 5/1m"), vec!["token-bucket 5/1m burst 20".to_owned()]),
            ("writes", json!("fixed-window 5/1s"), vec!["fixed-window 20/1s".to_owned()]),
            ("writes", json!("concurrency 3 ttl 30s"), vec![]),
            ("reads", json!("sliding-log 1/1m"), vec!["sliding-log 10/1m".to_owned()]),
        ]
    );
    assert_eq!(told[1]["left_out"], json!({"an override": 10}));
    let table = stdout(&suggest(&log, &["--rules", rules, "--deny-at-most", "0%", "--format", "table"]));
    let pasted = "\n# writes\nlimits = [\"token-bucket 5/1m burst 20\", { name = \"orgs\", limit = \"fixed-window 20/1s\", \
                  key = \"org\" }, \"concurrency 3 ttl 30s\"]\n\n# reads\nlimits = [\"sliding-log 10/1m\"]\n";
    assert!(table.contains(pasted), "{table}");
}

#[test]
fn what_cannot_be_used_is_one_line_that_names_the_value() {
    let log = file(record(1, "a"));
    let path = log.path().to_str().expect("UTF-8");
    let text = std::fs::read(LOG).expect("the log");
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    gzip.write_all(&text).expect("written");
    let gzip = gzip.finish().expect("written");
    let cut_off = file(&gzip[..gzip.len() / 2]);
    let (other, empty) = (file("a list of things\n1 2 3\n"), file(""));
    let (peeks, bad_rules) = (file("{\"t_us\":1,\"op\":\"peek\",\"key\":\"a\"}\n"), file("[[rule]]\nname = \"a\"\n"));
    let of = |file: &tempfile::NamedTempFile| file.path().to_str().expect("UTF-8").to_owned();
    for (arguments, expected) in [
        (vec!["no-such-file".to_owned()], "no-such-file"),
        (vec![of(&cut_off)], "the gzip data is cut off"),
        (vec![of(&other)], "it begins with \"a list of things\""),
        (vec![of(&empty)], "no requests to count in 0 records"),
        (vec![of(&peeks)], "no requests to count in 1 record; 1 with the operation peek"),
        (vec![path.into(), "--input".into(), "combined".into()], "its first line can't be read as combined"),
        (vec![path.into(), "--deny-at-most".into(), "0.1".into()], "'0.1'"),
        (vec![path.into(), "--deny-at-most".into(), "-1%".into()], "'-1%'"),
        (vec![path.into(), "--deny-at-most".into(), "101%".into()], "from 0% to 100%"),
        (vec![path.into(), "--of".into(), "users".into()], "'users'"),
        (vec![path.into(), "--per".into(), "0s".into()], "'0s'"),
        (vec![path.into(), "--per".into(), "9000000d".into()], "'9000000d'"),
        (vec![path.into(), "--per".into(), "soon".into()], "'soon'"),
        (vec![path.into(), "--key".into(), "tier".into()], "attrs"),
        (
            vec![LOG.into(), "--key".into(), "tier".into()],
            "10000 with no tier (an access log's requests have ip, method, path and user)",
        ),
        (vec![path.into(), "--rules".into(), of(&bad_rules)], "rule a"),
        (vec![path.into(), "--rules".into(), "none.toml".into()], "none.toml"),
    ] {
        let output = command(&["suggest"]).args(&arguments).output().expect("the tool runs");
        let told = stderr(&output);
        let errors: Vec<_> = told.lines().filter(|line| line.starts_with("error:")).collect();
        assert_eq!((code(&output), errors.len(), stdout(&output).as_str()), (2, 1, ""), "{arguments:?}: {told}");
        assert!(errors[0].contains(expected), "{told}");
        assert!(!told.contains("panicked"), "{told}");
    }
    let few = file(beginning_of_the_log(2_000));
    let full = command(&["suggest", &of(&few)]).env("TMPDIR", "/nowhere").output().expect("the tool runs");
    assert_eq!(code(&full), 0, "little is kept in memory: {}", stderr(&full));
}

#[test]
fn hostile_records_are_counted_or_skipped_and_the_output_stays_readable() {
    let long = "k".repeat(1 << 20);
    let mut text: String = (0..5).map(|at| record(at, &long)).collect();
    // Clocks that jump ahead by a century and back, times that cannot be, and keys that would move the cursor.
    text += &record((1 << 52) - 1, "ahead");
    text += &record(3, "\\u001b[2J\\u0000");
    text += "{\"t_us\":-1,\"key\":\"a\"}\n{\"t_us\":1,\"key\":\"a\",\"cost\":9007199254740991}\n";
    let log = file(text);
    let as_table = suggest(&log, &["--format", "table", "--deny-at-most", "80%"]);
    let as_json = suggest(&log, &["--format", "jsonl", "--deny-at-most", "80%"]);
    for (format, output) in [("table", &as_table), ("jsonl", &as_json)] {
        assert_eq!(code(output), 0, "{}", stderr(output));
        let told = stdout(output);
        assert!(!told.contains(|c: char| c.is_control() && c != '\n'), "{told:.2000}");
        assert!(format == "jsonl" || told.lines().all(|line| line.chars().count() <= 80), "{told:.2000}");
        assert!(stderr(output).lines().all(|line| line.len() < 400), "{}", stderr(output));
    }
    let told = &lines(&as_json)[0];
    assert_eq!((&told["records"], &told["unreadable"], &told["out_of_order"]), (&json!(8), &json!(1), &json!(2)));
    // A cost that no limit admits.
    let too_much = file(record(1, "a") + "{\"t_us\":1,\"key\":\"a\",\"cost\":9007199254740991}\n");
    let told = &suggested(&too_much, &["--deny-at-most", "0%"])[0];
    assert_eq!(texts(told, "suggestions", false), Vec::<String>::new(), "{told:.300}");
}

#[test]
fn a_closed_output_ends_it_quietly() {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    let log = file(record(1, "a"));
    let log = log.path().to_str().expect("UTF-8");
    let output = command(&["suggest", log]).stdout(Stdio::from(writer)).output().expect("the tool runs");
    assert_eq!((code(&output), stderr(&output).contains("panicked")), (0, false), "{}", stderr(&output));
    let full = std::fs::File::options().write(true).open("/dev/full").expect("the full device");
    let output = command(&["suggest", log]).stdout(full).output().expect("the tool runs");
    assert_eq!((code(&output), stderr(&output).contains("error: output: ")), (2, true), "{}", stderr(&output));
}
