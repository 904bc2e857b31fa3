//! Recorded traffic through a whole set.

use super::*;
use crate::support::tool::{code, lines, stderr, stdout, tollgate, with_input};

const SET: &str = r#"
paths = "decoded"

[[rule]]
name = "ban"
priority = 3
match = { ip = "192.0.2.66" }
action = "block"

[[rule]]
name = "office"
priority = 2
match = { ip = "10.0.0.0/8" }
action = "allow"

[[rule]]
name = "trial"
priority = 1
match = { path = "/x/*" }
key = "user"
missing = "skip"
limits = ["token-bucket 1/1d burst 1"]
shadow = true

[[rule]]
name = "users"
match = { path = "/x/*" }
key = "user"
tag = "org"
limits = ["token-bucket 5/1d", { name = "orgs", limit = "fixed-window 100/1d start first-hit", key = "org" }]
overrides = { "user:vip" = "token-bucket 50/1d burst 50" }
block = ["user:eve"]
"#;

#[test]
fn a_set_is_replayed_on_both_engines_and_its_output_again() {
    let (server, directory) = (Server::start(), directory());
    let rules = file(&directory, "rules.toml", SET);
    let record = |t_us: u32, attrs: Value| json!({"t_us": t_us, "attrs": attrs}).to_string() + "\n";
    let input = [
        record(1, json!({"user": "u1", "org": "acme", "path": "//x//%61"})),
        record(2, json!({"user": "u1", "org": 7, "path": "/x"})),
        record(3, json!({"user": "eve", "org": "acme", "path": "/x/b"})),
        record(4, json!({"user": "vip", "org": "acme", "path": "/x/b"})),
        record(5, json!({"user": "u2", "path": "/x/b"})),
        record(6, json!({"ip": "192.0.2.66", "path": "/x/b", "user": "u1", "org": "acme"})),
        record(7, json!({"ip": "::ffff:10.1.2.3"})),
        record(8, json!({"path": "/y", "user": "\\n\n"})),
        "{\"t_us\":9,\"op\":\"refund\",\"attrs\":{\"ip\":\"192.0.2.66\"}}\n".to_owned(),
        "{\"t_us\":9,\"op\":\"peek\",\"cost\":9,\"attrs\":{\"user\":\"u1\",\"org\":\"acme\",\"path\":\"/x\"}}\n"
            .to_owned(),
    ]
    .concat();
    let replay = ["replay", "--rules", &rules, "-"];
    let output = with_input(&replay, input.as_bytes());
    let all = lines(&output);
    assert_eq!((code(&output), all.len()), (0, 10), "{}", stderr(&output));
    let told: Vec<_> = all
        .iter()
        .map(|line| (line["rule"].as_str(), line["reason"].as_str().expect("one"), line["allowed"] == true))
        .collect();
    let users = Some("users");
    assert_eq!(
        told,
        [
            (users, "limits", true),
            (users, "limits", true),
            (users, "blocked", false),
            (users, "limits", true),
            (users, "missing", false),
            (Some("ban"), "blocked", false),
            (Some("office"), "allowed", true),
            (None, "no-rule", true),
            (Some("ban"), "blocked", true),
            (users, "limits", false),
        ]
    );
    assert_eq!(
        stdout(&output).lines().next(),
        Some(
            "{\"t_us\":1,\"op\":\"acquire\",\"attrs\":{\"org\":\"acme\",\"path\":\"//x//%61\",\"user\":\"u1\"},\"key\":\"user:u1\",\
             \"cost\":1,\"rule\":\"users\",\"reason\":\"limits\",\"allowed\":true,\"limit\":5,\"remaining\":4,\
             \"retry_after_us\":null,\"reset_after_us\":86400000000,\"denied_by\":null,\"by\":\"embedded\",\"limits\":[\
             {\"name\":\"token-bucket 5/1d\",\"key\":\"user:u1\",\"allowed\":true,\"limit\":5,\"remaining\":4,\
             \"retry_after_us\":null,\"reset_after_us\":17280000000},\
             {\"name\":\"orgs\",\"key\":\"org:acme\",\"allowed\":true,\"limit\":100,\"remaining\":99,\
             \"retry_after_us\":null,\"reset_after_us\":86400000000}],\
             \"shadows\":[{\"rule\":\"trial\",\"reason\":\"limits\",\"allowed\":true,\"key\":\"user:u1\",\"denied_by\":null}]}"
        )
    );
    assert_eq!((&all[1]["shadows"][0]["allowed"], &all[1]["limits"][1]["key"]), (&json!(false), &json!("org:7")));
    assert_eq!((&all[2]["override"], &all[3]["override"]), (&json!("user:eve"), &json!("user:vip")));
    assert_eq!(
        (&all[3]["limits"][0]["name"], all[3]["limits"].as_array().map(Vec::len)),
        (&json!("token-bucket 50/1d"), Some(1))
    );
    assert_eq!((&all[4]["missing"], &all[4]["key"]), (&json!("org"), &Value::Null));
    let nothing = ["limit", "remaining", "reset_after_us", "denied_by", "cost"];
    assert!(nothing.iter().all(|field| all[5][field].is_null()) && all[5]["limits"] == json!([]), "{}", all[5]);
    assert_eq!((&all[5]["retry_after_us"], &all[5]["by"]), (&json!("never"), &json!("rules")));
    assert_eq!((&all[6]["retry_after_us"], &all[7]["by"]), (&Value::Null, &json!("rules")));
    assert_eq!(all[7]["attrs"]["user"], "\\\\n\\n");
    assert_eq!(all[9]["retry_after_us"], "never");

    let again = with_input(&replay, &output.stdout);
    assert_eq!(stdout(&again), stdout(&output), "an output can be replayed");
    let on_redis = with_input(&[&replay[..], &["--url", &server.url()]].concat(), input.as_bytes());
    assert_eq!(stdout(&on_redis).replace("\"by\":\"redis\"", "\"by\":\"embedded\""), stdout(&output));
    assert_eq!(keys(&server), [""; 0], "a replay removes its keys");
    let summary = with_input(&[&replay[..], &["--summary"]].concat(), input.as_bytes());
    let denied = |key: &str, denied: u32| json!({"key": key, "denied": denied});
    let busiest = json!([denied("user:eve", 1), denied("user:u1", 2), denied("user:u2", 1)]);
    let summed = &lines(&summary)[0];
    assert_eq!((&summed["allowed"], &summed["denied"]), (&json!(6), &json!(4)), "{summed}");
    assert_eq!(summed["busiest_denied"].as_array().map(Vec::len), busiest.as_array().map(Vec::len), "{summed}");
    // By hand, from the set and the records above.
    let totals = with_input(&[&replay[..], &["--summary", "--format", "table"]].concat(), input.as_bytes());
    let of = |rule: Value, allowed: u32, denied: u32| json!({"rule": rule, "allowed": allowed, "denied": denied});
    let by_rule = [of(json!("users"), 3, 3), of(json!("ban"), 1, 1), of(Value::Null, 1, 0), of(json!("office"), 1, 0)];
    assert_eq!((&summed["rules"], &summed["shadows"]), (&json!(by_rule), &json!([of(json!("trial"), 4, 2)])));
    let rows = [
        "    allowed     denied  rule\n          3          3  users\n",
        "          1          0  no rule applied\n",
        "would allow would deny  shadow rule\n          4          2  trial\n",
    ];
    assert!(rows.iter().all(|row| stdout(&totals).contains(row)), "{}", stdout(&totals));
    let table = with_input(&[&replay[..], &["--format", "table"]].concat(), input.as_bytes());
    for expected in [
        "would deny by the shadow rule trial: user:u1",
        "users: user:vip (override)",
        "users: no org",
        "no rule applies",
    ] {
        assert!(stdout(&table).contains(expected), "{expected}: {}", stdout(&table));
    }
}

#[test]
fn an_access_log_and_csv_give_attributes_and_options_give_the_rest() {
    let directory = directory();
    let rules = file(&directory, "rules.toml", SET);
    let csv = b"t_us,attr.user,attr.org,attr.path,cost\n1,u1,acme,/x/1,2\n2,,acme,/x/1,\n3,u1,,/x/1,\n";
    let output = with_input(&["replay", "--rules", &rules, "--input", "csv", "-"], csv);
    let all = lines(&output);
    let told: Vec<_> = all.iter().map(|line| (line["cost"].as_u64(), line["missing"].as_str())).collect();
    assert_eq!(told, [(Some(2), None), (None, Some("user")), (None, Some("org"))], "{}", stderr(&output));
    let bad = with_input(&["replay", "--rules", &rules, "--input", "csv", "-"], b"t_us,key\n1,a\n");
    assert!(stderr(&bad).contains("expected the columns t_us and attr.NAME for each attribute"), "{}", stderr(&bad));

    let log = |host: &str, request: &str| format!("{host} - ann [17/May/2015:10:05:03 +0000] \"{request}\" 200 5\n");
    let input =
        log("192.0.2.1", "GET /x/\\xff?q HTTP/1.1") + &log("2001:db8::1", "-") + &log("a.example", "GET / HTTP/1.1");
    let arguments =
        ["replay", "--rules", &rules, "--input", "combined", "--attr", "org=acme", "--attr", "user=bob", "-"];
    let output = with_input(&arguments, input.as_bytes());
    let all = lines(&output);
    assert_eq!(
        all[0]["attrs"],
        json!({"ip": "192.0.2.1", "method": "GET", "path": "/x/%FF", "user": "ann", "org": "acme"})
    );
    assert_eq!((&all[0]["rule"], &all[1]["rule"], all.len()), (&json!("users"), &Value::Null, 2));
    assert_eq!(all[1]["attrs"], json!({"ip": "2001:db8::1", "user": "ann", "org": "acme"}));
    let said = "line 3: ip: expected an address such as 192.0.2.1 or 2001:db8::1, got \"a.example\"; skipped";
    assert!(stderr(&output).contains(said), "{}", stderr(&output));

    for (line, expected) in [
        ("{\"t_us\":1,\"key\":\"k\"}", "key: a set of rules reads attrs in its place"),
        ("{\"t_us\":1}", "attrs: it is missing"),
        ("{\"t_us\":1,\"attrs\":[]}", "attrs: expected an object, got []"),
        ("{\"t_us\":1,\"attrs\":{\"user\":null}}", "attrs: user: expected a string, got null"),
        ("{\"t_us\":1,\"attrs\":{\"ip\":\"x\"}}", "ip: expected an address"),
    ] {
        let output = with_input(&["replay", "--rules", &rules, "-"], line.as_bytes());
        assert!(code(&output) == 2 && stderr(&output).contains(expected), "{line}: {}", stderr(&output));
    }
    let output = with_input(&["replay", "--rule", "token-bucket 5/1s", "-"], b"{\"t_us\":1,\"attrs\":{}}");
    assert!(stderr(&output).contains("attrs: only read with --rules FILE"), "{}", stderr(&output));
}

/// Whichever attributes it needs.
#[test]
fn one_rule_of_a_set_is_replayed_by_its_name() {
    let directory = directory();
    let rules = file(&directory, "rules.toml", SET);
    let input = b"{\"t_us\":1,\"attrs\":{\"user\":\"u1\",\"path\":\"/elsewhere\"}}\n";
    let output = with_input(&["replay", "--rules", &rules, "--rule", "users", "--part", "org=acme", "-"], input);
    let line = &lines(&output)[0];
    assert_eq!((&line["rule"], &line["remaining"]), (&json!("users"), &json!(4)), "{}", stderr(&output));
}

#[test]
fn replaying_the_log_by_a_set_gives_the_counts_of_its_rule_alone() {
    let directory = directory();
    let rules =
        file(&directory, "rules.toml", "[[rule]]\nname = \"a\"\nkey = \"ip\"\nlimits = [\"sliding-log 60/1m\"]\n");
    let output = tollgate(&["replay", "--rules", &rules, "--input", "combined", LOG, "--summary"]);
    let summary = &lines(&output)[0];
    assert_eq!((&summary["allowed"], &summary["denied"], &summary["keys"]), (&json!(9913), &json!(87), &json!(1753)));
    assert_eq!(summary["busiest_denied"][0], json!({"key": "ip:75.97.9.59", "denied": 72}));
}

/// As of one rule: each call holds its permits by an id that is shown, and gives them back by it.
#[test]
fn permits_of_a_set_are_held_by_ids_and_leave_no_key() {
    let (server, directory) = (Server::start(), directory());
    let limits = "limits = [\"concurrency 2 ttl 30s\", \"token-bucket 100/1s\"]";
    let rules = file(&directory, "rules.toml", &format!("[[rule]]\nname = \"jobs\"\nkey = \"user\"\n{limits}\n"));
    let record = |t_us: u32, more: &str| format!("{{\"t_us\":{t_us},\"attrs\":{{\"user\":\"u\"}}{more}}}\n");
    let released = ",\"op\":\"release\",\"id\":\"replay-1-1\"";
    let input = record(1, "") + &record(2, "") + &record(3, "") + &record(4, released) + &record(5, "");
    for engine in [vec![], vec!["--url", &server.url()]] {
        let output = with_input(&[&["replay", "--rules", &rules, "-"], engine.as_slice()].concat(), input.as_bytes());
        let told: Vec<_> = lines(&output).iter().map(|line| (line["id"].clone(), line["allowed"] == true)).collect();
        let id = |id: &str, allowed| (json!(id), allowed);
        let [first, second, third] = [id("replay-1-1", true), id("replay-2-2", true), id("replay-3-3", false)];
        assert_eq!(told, [first.clone(), second, third, first, id("replay-5-5", true)], "{}", stderr(&output));
    }
    assert_eq!(keys(&server), [""; 0]);
}

#[test]
fn the_rows_of_a_set_have_the_same_columns_whether_or_not_their_rules_count_denials() {
    let directory = directory();
    let set = r#"
        [[rule]]
        name = "counts"
        match = { path = "/a" }
        key = "user"
        limits = ["token-bucket 1/1d"]
        overage = true

        [[rule]]
        name = "rest"
        key = "user"
        limits = ["token-bucket 1/1d"]
    "#;
    let rules = file(&directory, "rules.toml", set);
    let record = |t_us: u32, path: &str| json!({"t_us": t_us, "attrs": {"user": "u", "path": path}}).to_string() + "\n";
    let input: String = (1..=6).map(|t_us| record(t_us, if t_us % 2 == 0 { "/a" } else { "/b" })).collect();
    let table = with_input(&["replay", "--rules", &rules, "-", "--format", "table"], input.as_bytes());
    let table = stdout(&table);
    let begin = table.lines().next().and_then(|names| names.find(" by ")).expect("a column") + 1;
    let rows: Vec<_> = table.lines().skip(1).collect();
    assert_eq!(rows.len(), 6, "{table}");
    assert!(rows.iter().all(|row| row[begin..].starts_with("embedded")), "{table}");
}
