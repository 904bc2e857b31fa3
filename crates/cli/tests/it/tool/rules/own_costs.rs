//! Rules whose limits take different costs: requests, and tokens.

use super::*;
use crate::support::tool::{code, lines, stderr, stdout, tollgate, with_input};

const MODEL: &str = r#"
[[rule]]
name = "model"
key = "user"
limits = [
    { name = "requests", limit = "fixed-window 3/1h start first-hit", cost = 1 },
    { name = "tokens", limit = "fixed-window 1000/1h start first-hit", cost = "tokens" },
    { name = "units", limit = "fixed-window 50/1h start first-hit" },
]
"#;

fn remaining(line: &serde_json::Value) -> Vec<u64> {
    let limits = line["limits"].as_array().expect("limits");
    limits.iter().map(|limit| limit["remaining"].as_u64().expect("a number")).collect()
}

#[test]
fn each_limit_takes_its_own_cost_in_a_probe_a_replay_and_a_suggestion() {
    let directory = directory();
    let rules = file(&directory, "model.toml", MODEL);
    let explained =
        stdout(&tollgate(&["rules", "explain", &rules, "--user", "42", "--attr", "tokens=900", "--format", "table"]));
    for line in [
        "cost       1 unit",
        "limit      requests: fixed-window 3/1h start first-hit of user:42",
        "limit      tokens: fixed-window 1000/1h start first-hit of user:42, 900 units",
    ] {
        assert!(explained.lines().any(|shown| shown.trim_end() == line), "{line}\nin\n{explained}");
    }

    let probe = ["probe", "--rules", &rules, "model", "user:42", "--count", "2", "--format", "jsonl"];
    let output = tollgate(&[&probe[..], &["--attr", "tokens=900"]].concat());
    assert_eq!(code(&output), 1, "{}", stderr(&output));
    let lines_of_both = lines(&output);
    assert_eq!(remaining(&lines_of_both[0]), [2, 100, 49]);
    assert_eq!((&lines_of_both[1]["denied_by"], remaining(&lines_of_both[1])), (&json!("tokens"), vec![2, 100, 49]));
    let inspected = tollgate(&["inspect", "--rules", &rules, "model", "user:42", "--url", &Server::start().url()]);
    assert_eq!(code(&inspected), 0, "the cost's attribute isn't needed: {}", stderr(&inspected));

    let record = |t_us: u64, more: &str| {
        format!(
            "{{\"t_us\": {}, \"attrs\": {{\"user\": \"42\", \"tokens\": \"300\"}}{more}}}\n",
            1_700_000_000_000_000 + t_us
        )
    };
    let records = record(0, "") + &record(1, ", \"cost\": 7") + &record(2, "") + &record(3, "");
    let replay = ["replay", "--rules", &rules, "--input", "jsonl", "-"];
    let output = with_input(&replay, records.as_bytes());
    let replayed = lines(&output);
    let left: Vec<_> = replayed.iter().map(remaining).collect();
    assert_eq!(left, [[2, 700, 49], [1, 400, 42], [0, 100, 41], [0, 100, 41]], "{}", stderr(&output));
    assert_eq!(replayed[3]["denied_by"], json!("requests"));

    // Four requests of 300 tokens in each of some hours: none is denied by so much, and one by less.
    let hours = (0..16).map(|number| record(number / 4 * 3_600_000_000 + number % 4, "")).collect::<String>();
    let rules = file(&directory, "windows.toml", &MODEL.replace(" start first-hit", ""));
    let suggest = ["suggest", "--rules", &rules, "--input", "jsonl", "--deny-at-most", "0%", "--format", "jsonl", "-"];
    let output = with_input(&suggest, hours.as_bytes());
    let suggested = lines(&output);
    let of = |at: usize| suggested[at]["suggestions"][0]["rate"].as_u64();
    assert_eq!([of(0), of(1), of(2)], [Some(4), Some(1200), Some(4)], "{}", stderr(&output));
}

#[test]
fn a_cost_that_is_given_is_that_of_the_limits_without_one_of_their_own() {
    let directory = directory();
    let rules = file(&directory, "model.toml", MODEL);
    let probe = ["probe", "--rules", &rules, "model"];
    let costly = tollgate(&[&probe[..], &["user:43", "--attr", "tokens=900", "--cost", "7"]].concat());
    assert_eq!(remaining(&lines(&costly)[0]), [2, 100, 43], "{}", stderr(&costly));
    let lacking = tollgate(&[&probe[..], &["user:43", "--cost", "7"]].concat());
    assert!(stderr(&lacking).contains("rule model: --attr tokens=VALUE is missing"), "{}", stderr(&lacking));
    let apart = MODEL.replace("start first-hit\" },\n]", "start first-hit\", cost = 2 },\n]");
    let all_apart = file(&directory, "apart.toml", &apart);
    let costly = ["probe", "--rules", &all_apart, "model", "user:43", "--attr", "tokens=900", "--cost", "7"];
    let output = tollgate(&costly);
    let expected = "--cost: has no effect, since each limit of model has a cost of its own: leave out 7";
    assert_eq!((code(&output), stderr(&output).contains(expected)), (2, true), "{}", stderr(&output));

    let least = file(
        &directory,
        "least.toml",
        &MODEL.replace("key = \"user\"\n", "key = \"user\"\ncost = \"work\"\nmin_cost = 20\n"),
    );
    let explain = ["rules", "explain", &least, "--user", "42", "--attr", "tokens=3", "--attr", "work=4"];
    let explained = stdout(&tollgate(&[&explain[..], &["--format", "table"]].concat()));
    for line in
        ["cost       20 units (min_cost 20)", "limit      tokens: fixed-window 1000/1h start first-hit of user:42"]
    {
        assert!(explained.lines().any(|shown| shown.trim_end() == line), "{line}\nin\n{explained}");
    }
}
