//! Comparing two sets: which requests would be decided differently.

use tollgate_testing::oracle_spec::oracle;

use super::*;
use crate::support::tool::{code, lines, stderr, stdout, tollgate, with_input};

/// Of these limits for the presentations, and for the rest. Some of the log's paths can be read in two ways.
fn set(presentations: &str, rest: &str) -> String {
    format!(
        "paths = \"decoded\"\n[[rule]]\nname = \"talks\"\nmatch = {{ path = \"/presentations/*\" }}\nkey = \"ip\"\nlimits = [\"{presentations}\"]\n\
         [[rule]]\nname = \"rest\"\nkey = \"ip\"\nlimits = [\"{rest}\"]\n"
    )
}

/// By the oracle, each request of a log in the order of its time: the client, the rule, whether it is allowed.
fn by_the_oracle(text: &str, presentations: &str, rest: &str) -> Vec<(String, &'static str, bool)> {
    let target =
        |line: &str| line.split('"').nth(1).and_then(|request| request.split(' ').nth(1)).unwrap_or("").to_owned();
    let mut records: Vec<_> =
        text.lines().map(|line| (time(line), line.split(' ').next().expect("a host"), target(line))).collect();
    records.sort_by_key(|(t_us, ..)| *t_us);
    let mut oracles = HashMap::new();
    let decided = records.into_iter().map(|(t_us, host, target)| {
        let path = target.split('?').next().unwrap_or_default();
        let first = path.split('/').find(|segment| !segment.is_empty());
        let (rule, limit) = if first == Some("presentations") { ("talks", presentations) } else { ("rest", rest) };
        let oracle = oracles.entry((rule, host.to_owned())).or_insert_with(|| oracle(&limit.parse().expect("a limit")));
        (host.to_owned(), rule, oracle.acquire(1, t_us).allowed)
    });
    decided.collect()
}

#[test]
fn comparing_two_sets_on_the_log_gives_the_counts_of_the_oracle() {
    let directory = directory();
    let (before, after) = (
        ("token-bucket 10/1m burst 10", "token-bucket 1/1s burst 8"),
        ("fixed-window 15/1m start first-hit", "token-bucket 1/1s burst 8"),
    );
    let old = file(&directory, "old.toml", &set(before.0, before.1));
    let new = file(&directory, "new.toml", &set(after.0, after.1));
    let text = beginning_of_the_log(2_500);
    let log = file(&directory, "access.log", &text);
    let diff = ["rules", "diff", &old, &new, "--input", "combined", &log];
    let (mut counts, mut by_key) = ([0_u64; 4], HashMap::<String, (u64, u64)>::new());
    for ((host, rule, was), (_, _, is)) in
        by_the_oracle(&text, before.0, before.1).iter().zip(by_the_oracle(&text, after.0, after.1))
    {
        counts[usize::from(!was) * 2 + usize::from(!is)] += 1;
        if *was != is {
            assert_eq!(*rule, "talks");
            let (denied, allowed) = by_key.entry(format!("ip:{host}")).or_default();
            if is { *allowed += 1 } else { *denied += 1 }
        }
    }
    let [both_allowed, newly_denied, newly_allowed, both_denied] = counts;
    assert!(newly_denied > 0 && newly_allowed > 0 && both_denied > 0, "{counts:?}: a comparison of nothing");

    let output = tollgate(&diff);
    assert_eq!(code(&output), 1, "{}", stderr(&output));
    let mut records = lines(&output);
    let totals = records.pop().expect("totals");
    let expected = json!({
        "before": old, "after": new, "records": 2_500, "allowed_by_both": both_allowed, "denied_by_both": both_denied, "newly_denied": newly_denied,
        "newly_allowed": newly_allowed, "other_rule": 0, "undecided": 0, "unreadable": 0,
        "rules": [{"name": "talks", "newly_denied": newly_denied, "newly_allowed": newly_allowed}],
        "keys_affected": by_key.len(), "keys": totals["keys"],
    });
    assert_eq!(totals, expected);
    let named = totals["keys"].as_array().expect("a list");
    let affected = |key: &Value| key["newly_denied"].as_u64().zip(key["newly_allowed"].as_u64()).expect("counts");
    let order: Vec<_> = named.iter().map(|key| affected(key).0 + affected(key).1).collect();
    assert!(named.len() == by_key.len().min(10) && order.is_sorted_by(|one, other| one >= other), "{totals}");
    assert!(named.iter().all(|key| by_key[key["name"].as_str().expect("a name")] == affected(key)), "{totals}");
    assert_eq!(Some(order[0]), by_key.values().map(|(denied, allowed)| denied + allowed).max());

    assert_eq!(records.len() as u64, newly_denied + newly_allowed);
    let denied = records.iter().find(|line| line["change"] == "newly-denied").expect("one");
    assert_eq!((&denied["before"]["allowed"], &denied["after"]["allowed"]), (&json!(true), &json!(false)));
    assert_eq!(
        (&denied["after"]["rule"], &denied["after"]["denied_by"]),
        (&json!("talks"), &json!("fixed-window 15/1m start first-hit"))
    );
    let line =
        text.lines().nth(usize::try_from(denied["line"].as_u64().expect("a line")).expect("fits") - 1).expect("it");
    assert!(line.starts_with(denied["attrs"]["ip"].as_str().expect("an address")), "{line}: {denied}");

    let alone = tollgate(&[&diff[..], &["--summary", "--most", "1"]].concat());
    assert_eq!((lines(&alone).len(), lines(&alone)[0]["keys"].as_array().map(Vec::len)), (1, Some(1)));
    let table = tollgate(&[&diff[..], &["--format", "table"]].concat());
    let shown = stdout(&table);
    assert!(
        shown.contains(&format!("newly denied      {newly_denied}\n")) && shown.lines().all(|line| line.len() <= 80),
        "{shown}"
    );
    let more = format!("and {} more keys: --most shows more\n", by_key.len().saturating_sub(10));
    assert_eq!(shown.ends_with(&more), by_key.len() > 11, "{shown}");
    let same = tollgate(&["rules", "diff", &old, &old, &log]);
    assert_eq!((code(&same), &lines(&same)[0]["denied_by_both"]), (0, &json!(newly_allowed + both_denied)));
}

#[test]
fn another_rule_with_the_same_verdict_is_no_difference_and_a_block_is_one_of_its_client() {
    let directory = directory();
    let rule = |name: &str, rest: &str| format!("[[rule]]\nname = \"{name}\"\n{rest}\n");
    let limit = "key = \"user\"\nlimits = [\"token-bucket 1/1d burst 3\"]\nhash_keys = true";
    let old = file(&directory, "old.toml", &rule("a", limit));
    let new = file(
        &directory,
        "new.toml",
        &(rule("ban", "match = { user = \"eve\" }\naction = \"block\"") + &rule("b", limit)),
    );
    let record = |user: &str, more: &str| format!("{{\"t_us\":1,\"attrs\":{{\"user\":\"{user}\"}}{more}}}\n");
    let input = record("bob", "") + &record("eve", ",\"cost\":2") + &record("eve", "") + &record("eve", "") + "{}\n";
    let output = with_input(&["rules", "diff", &old, &new, "-"], input.as_bytes());
    let all = lines(&output);
    assert_eq!((code(&output), all.len()), (1, 3), "{}", stderr(&output));
    assert_eq!((&all[0]["key"], &all[0]["after"]["reason"]), (&json!("user:eve"), &json!("blocked")));
    let totals = &all[2];
    assert_eq!((&totals["allowed_by_both"], &totals["denied_by_both"]), (&json!(1), &json!(1)), "{totals}");
    assert_eq!((&totals["other_rule"], &totals["unreadable"]), (&json!(2), &json!(1)), "{totals}");
    assert_eq!(totals["rules"], json!([{"name": "ban", "newly_denied": 2, "newly_allowed": 0}]));
    let strict = with_input(&["rules", "diff", &old, &new, "-", "--strict"], input.as_bytes());
    assert!(code(&strict) == 2 && stderr(&strict).contains("line 5: t_us: it is missing"), "{}", stderr(&strict));
}
