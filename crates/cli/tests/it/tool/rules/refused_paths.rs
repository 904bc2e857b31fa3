//! Paths that servers read in two ways: the middleware answers 400 before any rule, so `explain`, `replay` and `diff`
//! say so, whatever rule the path as it is decoded would have.

use super::*;
use crate::support::tool::{code, lines, stderr, stdout, tollgate, with_input};

const ITEMS: &str = "[[rule]]\nname = \"items\"\nmatch = { path = \"/api/items\" }\nkey = \"ip\"\nlimits = [\"gcra 1/1d\"]\n\
                     [[rule]]\nname = \"trial\"\npriority = 1\nkey = \"ip\"\nlimits = [\"gcra 1/1d\"]\nshadow = true\n";

const TWO_WAYS: [&str; 4] = ["/api//items", "/api/%69tems", "/api/x/../items", "/api%2Fitems"];

/// An access log's line.
fn line(target: &str) -> String {
    format!("192.0.2.1 - - [17/May/2015:10:05:03 +0000] \"GET {target} HTTP/1.1\" 200 5\n")
}

#[test]
fn explain_names_no_rule_for_a_path_that_is_refused() {
    let directory = directory();
    let path = file(&directory, "rules.toml", ITEMS);
    for target in TWO_WAYS {
        let explain = ["rules", "explain", &path, "--ip", "192.0.2.1", "--path", target];
        let explained = &lines(&tollgate(&explain))[0];
        assert_eq!(
            (&explained["rule"], &explained["reason"], &explained["status"]),
            (&Value::Null, &json!("ambiguous"), &json!(400)),
            "{target}"
        );
        assert_eq!((&explained["shadows"], &explained["passed_over"]), (&json!([]), &json!([])), "{target}");
        let table = tollgate(&[&explain[..], &["--format", "table"]].concat());
        let (text, status) = (stdout(&table), "denied as  status 400\n");
        assert!(text.contains("none is looked for: the middleware refuses") && text.ends_with(status), "{text}");
        // The file says how the service reads it.
        let decoded = file(&directory, "decoded.toml", &format!("paths = \"decoded\"\n{ITEMS}"));
        let explained = &lines(&tollgate(&["rules", "explain", &decoded, "--ip", "192.0.2.1", "--path", target]))[0];
        assert_eq!((&explained["rule"], &explained["reason"]), (&json!("items"), &json!("limits")), "{target}");
    }
    // Rules that don't look at paths have no use for one way of reading it.
    let all = file(&directory, "all.toml", "[[rule]]\nname = \"all\"\nkey = \"ip\"\nlimits = [\"gcra 1/1d\"]\n");
    let explained = &lines(&tollgate(&["rules", "explain", &all, "--ip", "192.0.2.1", "--path", TWO_WAYS[0]]))[0];
    assert_eq!(explained["rule"], "all");
}

#[test]
fn a_replay_denies_what_is_refused_and_counts_it_apart() {
    let directory = directory();
    let path = file(&directory, "rules.toml", ITEMS);
    let log = TWO_WAYS.map(line).concat() + &line("/api/items") + &line("/api/items/?x");
    let replay = ["replay", "--rules", &path, "--input", "combined", "-"];
    let output = with_input(&replay, log.as_bytes());
    let all = lines(&output);
    let told: Vec<_> = all.iter().map(|line| (line["reason"].as_str(), line["allowed"] == true)).collect();
    let refused = (Some("ambiguous"), false);
    let limits = |allowed| (Some("limits"), allowed);
    assert_eq!(told, [refused, refused, refused, refused, limits(true), limits(false)], "{}", stderr(&output));
    assert_eq!((&all[0]["rule"], &all[0]["retry_after_us"]), (&Value::Null, &json!("never")));
    assert_eq!((&all[0]["by"], &all[0]["key"], all[0].get("shadows")), (&json!("rules"), &Value::Null, None));
    let again = with_input(&["replay", "--rules", &path, "-"], &output.stdout);
    assert_eq!(stdout(&again), stdout(&output), "an output can be replayed");
    let summary = &lines(&with_input(&[&replay[..], &["--summary"]].concat(), log.as_bytes()))[0];
    assert_eq!((&summary["denied"], &summary["refused"]), (&json!(5), &json!(4)), "{summary}");
    assert_eq!(summary["rules"], json!([{"rule": "items", "allowed": 1, "denied": 1}]));
    let table = stdout(&with_input(&[&replay[..], &["--format", "table"]].concat(), log.as_bytes()));
    assert_eq!(table.matches("refused: the path can be read in two ways").count(), 4, "{table}");
    let totals = stdout(&with_input(&[&replay[..], &["--format", "table", "--summary"]].concat(), log.as_bytes()));
    assert!(totals.contains("4, denied since their path can be read in two ways\n"), "{totals}");
    // Whichever rule is asked for: the layer is before all of them.
    let one = with_input(&[&replay[..], &["--rule", "items"]].concat(), log.as_bytes());
    assert_eq!(lines(&one)[0]["reason"], "ambiguous");
    // What gives something back isn't a request.
    let refund = b"{\"t_us\":1,\"op\":\"refund\",\"attrs\":{\"path\":\"//api\"}}\n";
    assert_eq!(lines(&with_input(&["replay", "--rules", &path, "-"], refund))[0]["allowed"], true);
}

#[test]
fn a_comparison_finds_no_difference_where_both_sets_refuse_and_one_where_one_does() {
    let directory = directory();
    let old = file(&directory, "old.toml", ITEMS);
    let strict = file(&directory, "strict.toml", &ITEMS.replace("gcra 1/1d", "gcra 1/1d burst 0 max-debt 1"));
    let decoded = file(&directory, "decoded.toml", &format!("paths = \"decoded\"\n{ITEMS}"));
    let log = TWO_WAYS.map(line).concat();
    let output = with_input(&["rules", "diff", &old, &strict, "--input", "combined", "-"], log.as_bytes());
    let totals = &lines(&output)[0];
    assert_eq!((code(&output), &totals["denied_by_both"]), (0, &json!(4)), "{totals}");
    assert_eq!((&totals["refused_by_both"], &totals["other_rule"]), (&json!(4), &json!(0)), "{totals}");
    let table = ["rules", "diff", &old, &strict, "--input", "combined", "--format", "table", "-"];
    let table = stdout(&with_input(&table, log.as_bytes()));
    assert!(table.contains("4 (4 refused: their path can be read in two ways)\n"), "{table}");
    let output = with_input(&["rules", "diff", &decoded, &old, "--input", "combined", "-"], log.as_bytes());
    let all = lines(&output);
    assert_eq!((code(&output), all.len()), (1, 2), "{}", stderr(&output));
    assert_eq!((&all[0]["change"], &all[0]["after"]["reason"]), (&json!("newly-denied"), &json!("ambiguous")));
    assert_eq!(all[1]["rules"], json!([{"name": "ambiguous path", "newly_denied": 1, "newly_allowed": 0}]));
    assert_eq!((&all[1]["denied_by_both"], &all[1]["other_rule"]), (&json!(3), &json!(3)), "{}", all[1]);
}
