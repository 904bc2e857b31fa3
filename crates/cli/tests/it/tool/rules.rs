//! A service's set of rules: checked, explained, compared, and used to reach the keys that the service has.

use std::collections::HashMap;

use tollgate::rules::{Attributes, RuleSet};
use tollgate::{KeySecret, Limiter, Redis};
use tollgate_testing::polling::PATIENCE;
use tollgate_testing::repository::read;

use super::*;
use crate::support::tool::{code, lines, stderr, stdout, tollgate};

mod comparison;
mod continuing;
mod count_by_response;
mod held_permits;
mod import;
mod optional_limits;
mod own_costs;
mod refused_paths;
mod replay;

const EXAMPLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/rules.toml");

/// A file of this name and text in a directory.
fn file(directory: &tempfile::TempDir, name: &str, text: &str) -> String {
    let path = directory.path().join(name);
    std::fs::create_dir_all(path.parent().expect("a directory")).expect("a directory");
    std::fs::write(&path, text).expect("written");
    path.to_str().expect("UTF-8").to_owned()
}

fn directory() -> tempfile::TempDir {
    tempfile::tempdir().expect("a directory")
}

fn keys(server: &Server) -> Vec<String> {
    let mut keys: Vec<String> = tollgate::redis::cmd("KEYS").arg("*").query(&mut server.connection()).expect("keys");
    keys.sort();
    keys
}

#[test]
fn a_good_set_is_counted_and_the_example_is_one() {
    let directory = directory();
    let one = file(&directory, "one.toml", "[[rule]]\nname = \"a\"\naction = \"allow\"\n");
    let output = tollgate(&["rules", "check", EXAMPLE, &one]);
    assert_eq!(
        (stdout(&output), code(&output)),
        (format!("{EXAMPLE}: 8 rules, by ip, megabytes, method, org, path, tier, user\n{one}: 1 rule\n"), 0)
    );
}

#[test]
fn each_fault_is_a_line_with_its_place_in_the_order_of_the_file() {
    let directory = directory();
    let rule = |name: &str, rest: &str| format!("[[rule]]\nname = \"{name}\"\n{rest}\n");
    for (text, expected) in [
        (rule("a", "limits = [\"token-bucket 5/0s\"]\nkey = \"ip\""), &["3:11: rule a: "][..]),
        (rule("a", "acton = \"block\""), &["3:1: rule a: expected a known name (did you mean action?), got"]),
        (rule("a", "match = { path = \"x*\" }\naction = \"block\""), &["3:18: rule a: path: expected"]),
        (rule("a", "match = { ip = \"10.0.0.1/8\" }\naction = \"block\""), &["3:16: rule a: ip: expected"]),
        (rule("a b", "action = \"block\""), &["2:8: rule a b: name: expected"]),
        ("[[rule]\n".to_owned(), &["1:8: "]),
        ("".to_owned(), &[" the rules are missing: write at least one [[rule]]"]),
        ("include = [\"gone.toml\"]\n".to_owned(), &["gone.toml: the file can't be read"]),
        (
            // What hides is found by priority, and told by place.
            [
                rule("z", "action = \"block\"\npriority = 1"),
                rule("y", "limits = [\"token-bucket 1/1s\"]"),
                rule("x", "match = { ip = \"10.0.0.1\" }\naction = \"block\""),
                rule("x", "action = \"allow\"\ncost = 3"),
            ]
            .concat(),
            &["7:10: rule y: key: ", "9:8: rule x: never applies: rule ", "13:8: rule x: name: "],
        ),
    ] {
        let path = file(&directory, "rules.toml", &text);
        let output = tollgate(&["rules", "check", &path]);
        let said = stderr(&output);
        assert_eq!((code(&output), stdout(&output).as_str()), (2, ""), "{said}");
        assert_eq!(said.lines().count(), expected.len(), "{said}");
        for (line, expected) in said.lines().zip(expected) {
            let start = if expected.starts_with("gone") {
                line.contains(expected)
            } else {
                line.starts_with(&format!("{path}:{expected}"))
            };
            assert!(start, "{line}\n{expected}");
        }
    }
    let main = file(&directory, "main.toml", "include = [\"more/*.toml\"]\n");
    let more = file(&directory, "more/one.toml", &rule("a", "cost = 3\naction = \"block\""));
    let output = tollgate(&["rules", "check", &main]);
    assert!(
        stderr(&output).starts_with(&format!("{more}:3:8: rule a: cost: a rule whose action is block can't have it")),
        "{}",
        stderr(&output)
    );
    let output = tollgate(&["probe", "--rules", &main, "a", "k"]);
    assert!(stderr(&output).starts_with(&format!("error: {more}:3:8: rule a: cost")), "{}", stderr(&output));
}

#[test]
fn a_value_that_probably_does_not_match_as_meant_is_a_warning_with_its_place() {
    let directory = directory();
    let doubtful = r#"[[rule]]
name = "a"
match = { path = ["/x/*", "/users/[0-9]+"], tier = "fr*" }
action = "block"

[[rule]]
name = "b"
match = { route = "/users/*" }
key = "user"
limits = ["token-bucket 5/1s"]
overrides = { "user:4*" = "block" }
allow = ["user:1", "user:test-*"]
"#;
    let path = file(&directory, "rules.toml", doubtful);
    let output = tollgate(&["rules", "check", &path]);
    let literally = "expected * for a segment that varies, since everything else is compared literally";
    let expected = [
        format!("3:27: warning: rule a: path: {literally}, got \"/users/[0-9]+\""),
        "3:52: warning: rule a: tier: expected a whole value, since only path has patterns, got \"fr*\"".to_owned(),
        "8:19: warning: rule b: route: expected a route as the router has it, such as /users/{id}, since only path has \
         patterns, got \"/users/*\""
            .to_owned(),
        "11:27: warning: rule b: overrides: expected a whole key, since keys have no patterns, got \"user:4*\"".to_owned(),
        "12:20: warning: rule b: allow: expected a whole key, since keys have no patterns, got \"user:test-*\"".to_owned(),
    ];
    let said: String = expected.iter().map(|line| format!("{path}:{line}\n")).collect();
    assert_eq!(stderr(&output), said);
    assert_eq!((code(&output), stdout(&output)), (1, format!("{path}: 2 rules, by path, route, tier, user\n")));
    // The others are used all the same, and a mistake is worse.
    assert_eq!(code(&tollgate(&["rules", "explain", &path, "--user", "1"])), 0);
    let wrong = file(&directory, "wrong.toml", "");
    assert_eq!(code(&tollgate(&["rules", "check", &wrong, &path])), 2);
}

#[test]
fn a_request_is_explained_step_by_step() {
    let request = ["--user", "42", "--tier", "free", "--path", "/api/v1/%69tems?page=1", "--method", "get"];
    let arguments = |more: &[&'static str]| [&["rules", "explain", EXAMPLE], &request[..], more].concat();
    let output = tollgate(&arguments(&["--ip", "::ffff:192.0.2.1", "--format", "table"]));
    let expected = "\
request      ip 192.0.2.1 (given as ::ffff:192.0.2.1)
             method GET (given as get)
             path /api/v1/items (given as /api/v1/%69tems?page=1)
             tier free
             user 42
rule         free (priority 600)
matches      path /api/*, and tier free
override     user:42
action       throttle by the override of user:42
cost         1 unit
limit        token-bucket 500/1m burst 100 of user:42
redis key    tollgate:{user:42}:free/token-bucket-1m
denied as    status 429, \"Too many requests. See https://api.example.com/limits\"
passed over  office: applies to ip 10.0.0.0/8 or 2001:db8:77::/48, but the
             request has 192.0.2.1
             banned: applies to ip 198.51.100.0/24 or 203.0.113.7/32, but the
             request has 192.0.2.1
             login: applies to method POST, but the request has GET
             search-trial: applies to path /api/*/search, but the request has
             /api/v1/%69tems
             uploads: applies to method POST or PUT, but the request has GET
";
    assert_eq!((stdout(&output).as_str(), code(&output)), (expected, 0), "{}", stderr(&output));
    assert!(read("src/rules/format.md").contains(expected), "the page on the file shows something else");

    let line = &lines(&tollgate(&arguments(&["--ip", "203.0.113.7", "--prefix", "shop"])))[0];
    assert_eq!((&line["rule"], &line["reason"], &line["status"]), (&json!("banned"), &json!("blocked"), &json!(403)));
    assert_eq!((&line["attrs"]["path"], &line["given"]["method"]), (&json!("/api/v1/items"), &json!("get")));
    assert_eq!((&line["limits"], &line["passed_over"][0]["rule"]), (&json!([]), &json!("office")));
    let line =
        &lines(&tollgate(&["rules", "explain", EXAMPLE, "--path", "/api/a/search", "--user", "u", "--prefix", "shop"]))
            [0];
    assert_eq!((&line["rule"], &line["reason"]), (&Value::Null, &json!("no-rule")));
    assert_eq!(line["shadows"][0]["limits"][0]["redis_keys"], json!(["shop:{user:u}:search-trial/token-bucket-1s"]));
    let line =
        &lines(&tollgate(&["rules", "explain", EXAMPLE, "--path", "/login", "--method", "POST", "--user", "a"]))[0];
    assert_eq!((&line["rule"], &line["reason"], &line["missing"]), (&json!("login"), &json!("missing"), &json!("ip")));
    let line =
        &lines(&tollgate(&["rules", "explain", EXAMPLE, "--path", "/api", "--tier", "free", "--user", "666"]))[0];
    assert_eq!((&line["reason"], &line["override"]), (&json!("blocked"), &json!("user:666")));
    assert_eq!(line["key"], json!("user:666"), "as a replay shows it");
}

#[test]
fn a_key_that_an_override_lists_is_decided_without_redis() {
    let probe = |key: &str, more: &[&str]| tollgate(&[&["probe", "--rules", EXAMPLE, "free", key], more].concat());
    let denied = probe("user:666", &["--url", "redis://127.0.0.1:1"]);
    assert_eq!((code(&denied), stderr(&denied).as_str()), (1, ""));
    let expected = json!({
        "op": "acquire", "key": "user:666", "cost": null, "rule": "free", "reason": "blocked", "allowed": false,
        "limit": null, "remaining": null, "retry_after_us": "never", "reset_after_us": null, "denied_by": null,
        "by": "rules", "limits": [], "override": "user:666",
    });
    assert_eq!(lines(&denied), [expected]);
    let table = probe("user:666", &["--format", "table", "--op", "peek"]);
    assert!(
        stdout(&table).contains("blocked") && stdout(&table).ends_with("free: user:666 (override)\n"),
        "{}",
        stdout(&table)
    );
}

#[test]
fn of_very_many_rules_that_were_passed_over_the_first_are_shown() {
    let directory = directory();
    let rule = |n: u32| format!("[[rule]]\nname = \"r{n}\"\nmatch = {{ user = \"u{n}\" }}\naction = \"allow\"\n");
    let path = file(&directory, "rules.toml", &(0..500).map(rule).collect::<String>());
    let output = tollgate(&["rules", "explain", &path, "--user", "\u{1b}[31m", "--format", "table"]);
    let text = stdout(&output);
    assert!(text.ends_with("480 more rules: --all shows them\n"), "{text}");
    assert!(text.starts_with("request      user \\u{1b}[31m\n") && !text.contains('\u{1b}'), "{text}");
    let line = &lines(&tollgate(&["rules", "explain", &path, "--user", "x"]))[0];
    assert_eq!((line["passed_over"].as_array().map(Vec::len), &line["passed_over_more"]), (Some(20), &json!(480)));
    let line = &lines(&tollgate(&["rules", "explain", &path, "--user", "u499", "--all"]))[0];
    assert_eq!((&line["rule"], &line["passed_over_more"]), (&json!("r499"), &json!(0)));
    assert_eq!(line["passed_over"].as_array().map(Vec::len), Some(499));
}

const SECRET: &str = "0123456789abcdef0123456789abcdef";

/// A service that decides by a set: its keys, and those that `explain` names, are the same; and they are looked into,
/// charged, blocked and forgotten by the rule's name.
#[tokio::test]
async fn a_services_keys_are_reached_by_its_own_rules() {
    let (server, directory) = (Server::start(), directory());
    let url = server.url();
    let secret = file(&directory, "secret", SECRET);
    let example = std::fs::read_to_string(EXAMPLE).expect("the example");
    // So slow that nothing comes back during the test.
    let example = ["/1s", "/1m", "/1h"].iter().fold(example, |text, period| text.replace(period, "/1d"));
    let sessions = r#"
        [[rule]]
        name = "sessions"
        priority = 850
        match = { path = "/sessions", method = "POST" }
        key = "user"
        tag = "global"
        limits = ["sliding-log 5/1d", { name = "by-address", limit = "sliding-log 50/1d", key = "ip" }]
    "#;
    let hashed = format!(
        "{example}\n{sessions}\n[[rule]]\nname = \"personal\"\nmatch = {{ path = \"/me\" }}\npriority = 5\nkey = [\"user\", \"path\"]\nlimits = [\"token-bucket 10/1d\"]\nhash_keys = true\n"
    );
    let path = file(&directory, "rules.toml", &hashed);
    let rules = RuleSet::read(&path).expect("a set");
    let redis = Redis::open(&url).expect("a good address");
    let limiter = Limiter::builder(redis).prefix("shop").expect("a good prefix").deadline(PATIENCE).build();
    let limiter = limiter.to_builder().key_secret(&KeySecret::new(SECRET).expect("a secret")).build();
    for (rule, key, attributes, cost) in [
        ("uploads", "user:a|b", &["--attr", "org=acme", "--attr", "megabytes=5"][..], 5),
        ("sessions", "user:u%1", &["--attr", "ip=2001:db8::7"], 1),
        ("free", "user:42", &[], 1),
        ("personal", "user:a\\|b|path:/me", &[], 1),
        ("anybody", "ip:2001:db8::/64", &[], 1),
    ] {
        let user =
            key.strip_prefix("user:").unwrap_or_default().split("|path").next().unwrap_or_default().replace('\\', "");
        let request = match rule {
            "uploads" => {
                Attributes::new().path("/api/1/files/2").method("PUT").set("org", "acme").set("megabytes", "5")
            }
            "sessions" => {
                Attributes::new().path("/sessions").method("POST").ip("2001:db8::7".parse().expect("an address"))
            }
            "free" => Attributes::new().path("/api/x").tier("free"),
            "personal" => Attributes::new().path("/me"),
            _ => Attributes::new().ip("2001:db8::99".parse().expect("an address")),
        };
        let request = if user.is_empty() { request } else { request.user(&user) };
        let verdict = limiter.acquire_by(&rules, &request).await.expect("a verdict");
        assert_eq!((verdict.rule.as_deref(), verdict.allowed), (Some(rule), true));
        let remaining = verdict.decision.expect("a decision").remaining;

        let there = ["--rules", &path, "--prefix", "shop", "--key-secret-file", &secret];
        let on_redis = [&there[..], &["--url", &url]].concat();
        let output = tollgate(&[&["inspect", rule, key], attributes, &on_redis].concat());
        let states = lines(&output);
        let mut seen: Vec<_> =
            states.iter().map(|state| state["redis_key"].as_str().expect("a key").to_owned()).collect();
        seen.sort();
        assert_eq!(seen, keys(&server), "{rule}: {}", stderr(&output));
        assert!(states.iter().all(|state| state["exists"] == true));
        assert_eq!(states.iter().map(|state| state["remaining"].as_u64()).min(), Some(Some(remaining)), "{rule}");
        let overridden = (rule == "free").then(|| json!("user:42"));
        assert_eq!(states[0].get("override"), overridden.as_ref(), "{rule}");

        let output = tollgate(&[&["probe", rule, key], attributes, &on_redis].concat());
        let line = &lines(&output)[0];
        assert_eq!(
            (&line["rule"], &line["cost"], code(&output)),
            (&json!(rule), &json!(cost), 0),
            "{}",
            stderr(&output)
        );
        assert_eq!(line["remaining"], remaining - cost);
        assert_eq!(stderr(&output).contains("has an override"), overridden.is_some());

        let output = tollgate(&[&["block", rule, key, "--for", "10m"], attributes, &on_redis].concat());
        assert_eq!((code(&output), stderr(&output).contains("nobody")), (0, false), "{}", stderr(&output));
        let denied = limiter.acquire_by(&rules, &request).await.expect("a verdict");
        assert!(!denied.allowed && denied.decision.is_some_and(|decision| decision.blocked), "{rule}");
        let output = tollgate(&[&["block", rule, key, "--lift"], attributes, &on_redis].concat());
        assert_eq!(code(&output), 0, "{}", stderr(&output));
        assert!(limiter.acquire_by(&rules, &request).await.expect("a verdict").allowed, "{rule}");

        let output = tollgate(&[&["reset", "--rule", rule, key], attributes, &on_redis].concat());
        assert_eq!((code(&output), keys(&server)), (0, Vec::new()), "{}", stderr(&output));
        let again = limiter.acquire_by(&rules, &request).await.expect("a verdict");
        assert_eq!(again.decision.map(|decision| decision.remaining), Some(remaining), "{rule}");
        let output = tollgate(&[&["reset", "--rule", rule], &on_redis[..]].concat());
        assert_eq!((lines(&output)[0]["forgotten"].as_u64(), code(&output)), (Some(states.len() as u64), 0));
    }
}

/// Without its secret, where the keys are can't be known: everything else is said.
#[test]
fn keys_that_are_hashed_are_named_with_the_secret_alone() {
    let directory = directory();
    let rule = "[[rule]]\nname = \"a\"\nkey = \"user\"\nlimits = [\"token-bucket 8/1d shards 2\"]\nhash_keys = true\n";
    let (path, secret) = (file(&directory, "rules.toml", rule), file(&directory, "secret", SECRET));
    let explain = ["rules", "explain", &path, "--user", "alice"];
    let line = &lines(&tollgate(&explain))[0];
    assert_eq!((&line["limits"][0]["redis_keys"], &line["key"]), (&Value::Null, &json!("user:alice")));
    assert!(line["limits"][0]["unknown"].as_str().is_some_and(|why| why.contains("secret")), "{line}");
    let output = tollgate(&[&explain[..], &["--key-secret-file", &secret]].concat());
    let line = &lines(&output)[0];
    let keys = line["limits"][0]["redis_keys"].as_array().expect("keys");
    let hashed = |key: &Value| {
        key.as_str().is_some_and(|key| key.starts_with("tollgate:{%h") && key.ends_with("}:a/token-bucket-1d"))
    };
    assert!(keys.len() == 1 && keys.iter().all(hashed), "{line}");
    assert!(!stdout(&output).contains(SECRET));
}

#[test]
fn an_unsupported_use_of_a_set_is_one_line_that_says_what_was_expected() {
    let directory = directory();
    let all =
        file(&directory, "all.toml", "[[rule]]\nname = \"all\"\nkey = \"global\"\nlimits = [\"token-bucket 9/1s\"]\n");
    for (arguments, expected) in [
        (vec!["probe", "--rules", EXAMPLE, "fre", "user:1"], "rule: expected one of "),
        (
            vec!["probe", "--rules", EXAMPLE, "fre", "user:1"],
            "(office, banned, login, search-trial, uploads, free, paid, anybody), got fre",
        ),
        (
            vec!["probe", "--rules", EXAMPLE, "office", "user:1"],
            "rule office: has no limits: it allows, and counts nothing",
        ),
        (
            vec!["probe", "--rules", EXAMPLE, "banned", "user:1"],
            "rule banned: has no limits: it blocks, and counts nothing",
        ),
        (vec!["probe", "--rules", EXAMPLE, "free", "42"], "rule free: expected a key of the form user:..., got 42"),
        (vec!["probe", "--rules", EXAMPLE, "free"], "rule free: KEY is missing: give user:..., or --attr user=VALUE"),
        (vec!["inspect", "--rules", EXAMPLE, "free", "user:666"], "rule free: user:666 is blocked by an override"),
        (
            vec!["probe", "--rules", EXAMPLE, "free", "user:666", "--op", "reset"],
            "rule free: user:666 is blocked by an override",
        ),
        (vec!["probe", "--rules", EXAMPLE, "free", "a", "b"], "got 3 words"),
        (vec!["probe", "--rules", EXAMPLE, "free", "user:1", "--attr", "user=2"], "rule free: user is given twice"),
        (
            vec!["probe", "--rules", EXAMPLE, "uploads", "user:1"],
            "rule uploads: --attr org=VALUE is missing, which it counts",
        ),
        (vec!["probe", "--rules", EXAMPLE, "anybody", "ip:here"], "ip: expected an address such as 192.0.2.1"),
        (vec!["probe", "--rules", EXAMPLE, "anybody", "--attr", "ip=here"], "--attr: ip: expected an address"),
        (
            vec!["probe", "--rules", EXAMPLE, "free", "user:1", "--name", "x"],
            "'--rules <FILE>' cannot be used with '--name",
        ),
        (vec!["probe", "--rules", "gone.toml", "free", "user:1"], "gone.toml: the file can't be read"),
        (
            vec!["probe", "--rules", &all, "all", "k"],
            "rule all: expected global, since it counts all requests together, got k",
        ),
        (
            vec!["load", "--rules", &all, "all"],
            "--keys: expected hot, since rule all counts all these calls as one, got uniform",
        ),
        (
            vec!["load", "--rules", EXAMPLE, "free", "paid"],
            "rule: expected the name of one rule with --rules, got 2 names",
        ),
        (
            vec!["replay", "--rules", EXAMPLE, "--rule", "free", "--rule", "paid", LOG],
            "--rule: expected the name of one",
        ),
        (vec!["replay", "--rules", EXAMPLE, "--key", "path", LOG], "'--rules <FILE>' cannot be used with '--key"),
        (vec!["replay", LOG], "--rule <RULE>"),
        (vec!["reset", "--rule", "free", "user:1"], "KEY: needs --rules FILE, which says how"),
        (vec!["reset", "--rules", EXAMPLE, "--rule", "office"], "rule office: has no limits"),
        (vec!["block", "token-bucket 5/1s", "k"], "--for <D>"),
        (vec!["block", "token-bucket 5/1s", "k", "--for", "soon"], "'soon'"),
        (vec!["block", "token-bucket 5/1s", "k", "--for", "1m"], "--url is missing: give the Redis to block a key in"),
        (vec!["block", "token-bucket 5/1s", "k", "--for", "1m", "--lift"], "cannot be used with"),
        (vec!["rules", "explain", EXAMPLE, "--ip", "here"], "--ip: expected an address such as 192.0.2.1"),
        (vec!["rules", "explain", EXAMPLE, "--attr", "x"], "--attr: expected NAME=VALUE"),
        (
            vec!["rules", "explain", EXAMPLE, "--attr", "ip=1.1.1.1", "--ip", "1.1.1.1"],
            "--attr: ip is already given by --ip",
        ),
        (vec!["rules", "explain", EXAMPLE, "--user", ""], "--user: expected at least one byte"),
        (
            vec![
                "rules",
                "explain",
                EXAMPLE,
                "--attr",
                "org=a",
                "--attr",
                "megabytes=many",
                "--user",
                "u",
                "--path",
                "/api/1/files/2",
                "--method",
                "PUT",
            ],
            "cost: expected the attribute megabytes to be a whole number up to 2^53, got \"many\"",
        ),
        (vec!["rules", "diff", EXAMPLE, EXAMPLE, "gone.log"], "gone.log: No such file"),
        (vec!["rules", "diff", EXAMPLE, "gone.toml", LOG], "gone.toml: the file can't be read"),
        (vec!["rules", "diff", EXAMPLE, EXAMPLE, LOG, "--most", "-1"], "'-1'"),
    ] {
        let output = tollgate(&arguments);
        let said = stderr(&output);
        let errors: Vec<_> = said.lines().filter(|line| line.starts_with("error:")).collect();
        assert_eq!((code(&output), errors.len(), stdout(&output).as_str()), (2, 1, ""), "{arguments:?}: {said}");
        assert!(errors[0].contains(expected), "{arguments:?}: {said}");
    }
}

/// Made-up keys are spelled as the rule counts them, so that the audit knows their windows.
#[test]
fn a_rule_of_a_set_is_put_under_load() {
    let directory = directory();
    let rule = "[[rule]]\nname = \"hot\"\nkey = [\"ip\", \"path\"]\ntag = \"ip\"\nlimits = [\"fixed-window 2/1h start spread\"]\nblock = [\"ip:10.0.0.1|path:/key-1\"]\n";
    let path = file(&directory, "rules.toml", rule);
    let server = Server::start();
    let run = ["--count", "300", "--warmup", "0s", "--key-count", "20", "--url", &server.url()];
    let output = tollgate(&[&["load", "--rules", &path, "hot"], &run[..]].concat());
    let report = &lines(&output)[0];
    assert_eq!(
        (code(&output), &report["answered"], &report["audit"]["keys"]),
        (0, &json!(300), &json!(20)),
        "{report}"
    );
    assert!((40..=80).contains(&report["allowed"].as_u64().expect("a count")), "{report}");
    assert_eq!((&report["audit"]["over_admissions"], &report["audit"]["false_denials"]), (&json!(0), &json!(0)));
    assert_eq!(keys(&server), [""; 0]);
}
