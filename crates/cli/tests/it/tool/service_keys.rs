//! How the tool reaches the keys of a service: by the rule's name, the prefix, and the parts that its limits count.

use tollgate::{KeySecret, Limiter, Redis, Request, Rule};
use tollgate_testing::acl::least;
use tollgate_testing::polling::PATIENCE;

use super::*;
use crate::support::tool::{code, command, lines, stderr, stdout, tollgate, with_input};

const API: &str = r#"{"name": "api", "limits": ["token-bucket 10/1d", {"name": "orgs", "limit": "fixed-window 1000/1d", "key": "org"}], "tag": "org"}"#;

fn keys(server: &Server) -> Vec<String> {
    let mut keys: Vec<String> = tollgate::redis::cmd("KEYS").arg("*").query(&mut server.connection()).expect("keys");
    keys.sort();
    keys
}

/// A service whose keys have a prefix and a name of their own, and which has decided on one of them.
async fn service(server: &Server) -> (Limiter, Rule) {
    let redis = Redis::open(&server.url()).expect("a good address");
    let limiter = Limiter::builder(redis).prefix("shop").expect("a good prefix").deadline(PATIENCE).build();
    let rule = Rule::new("api", "token-bucket 10/1d").and_then(|rule| rule.tagged("org")).expect("a rule");
    let orgs = "fixed-window 1000/1d".parse::<Limit>().and_then(|limit| limit.named("orgs")).expect("a limit");
    let rule = rule.and_by("org", orgs).expect("a rule");
    let request = Request::new("user:42").parts(&[("org", b"acme")]).cost(3);
    limiter.acquire(&rule, request).await.expect("a decision");
    (limiter, rule)
}

#[tokio::test]
async fn a_services_keys_are_reached_by_its_rule_as_json_its_prefix_and_its_parts() {
    let server = Server::start();
    let url = server.url();
    let (limiter, rule) = service(&server).await;
    let json = serde_json::to_string(&rule).expect("JSON");
    let there = ["--prefix", "shop", "--attr", "org=acme", "--url", &url];

    let output = tollgate(&[&["inspect", &json, "user:42"], &there[..]].concat());
    let [user, org] = lines(&output).try_into().expect("a line for each limit");
    assert_eq!(
        (&user["redis_key"], &user["remaining"]),
        (&json!("shop:{acme}:user:42:api/token-bucket-1d"), &json!(7))
    );
    assert_eq!((&org["redis_key"], &org["remaining"]), (&json!("shop:{acme}:api/orgs/fixed-window"), &json!(997)));
    assert_eq!((&user["key"], &org["key"], &org["rule"]), (&json!("user:42"), &json!("acme"), &json!("api")));

    let output = tollgate(&[&["probe", &json, "user:42", "--cost", "8"], &there[..]].concat());
    let line = &lines(&output)[0];
    assert_eq!((code(&output), &line["rule"], &line["denied_by"]), (1, &json!("api"), &json!("token-bucket 10/1d")));
    let block = ["--op", "block", "--for", "10m"];
    assert_eq!(code(&tollgate(&[&["probe", &json, "user:42"], &there[..], &block].concat())), 0);
    let request = Request::new("user:42").parts(&[("org", b"acme")]);
    assert!(limiter.peek(&rule, request).await.expect("a decision").blocked);

    let output = tollgate(&[&["probe", &json, "user:42", "--op", "reset"], &there[..]].concat());
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    assert_eq!(limiter.peek(&rule, request).await.expect("a decision").remaining, 10);
}

/// By the service's secret, out of a file or the environment.
#[tokio::test]
async fn a_services_hashed_keys_are_reached_by_its_secret() {
    const SECRET: &str = "0123456789abcdef0123456789abcdef";
    let (server, directory) = (Server::start(), tempfile::tempdir().expect("a directory"));
    let url = server.url();
    let redis = Redis::open(&url).expect("a good address");
    let secret = KeySecret::new(SECRET).expect("a secret");
    let rule = Rule::new("api", "token-bucket 10/1d").expect("a name");
    Limiter::builder(redis)
        .deadline(PATIENCE)
        .key_secret(&secret)
        .build()
        .acquire(&rule, "alice@example.com")
        .await
        .expect("a decision");
    let file = directory.path().join("secret");
    let path = file.to_str().expect("a path");
    let inspect = ["inspect", "token-bucket 10/1d", "alice@example.com", "--name", "api", "--url", &url];

    for end in ["", "\n", "\r\n"] {
        std::fs::write(&file, format!("{SECRET}{end}")).expect("a file");
        let output = tollgate(&[&inspect[..], &["--key-secret-file", path]].concat());
        let line = &lines(&output)[0];
        assert_eq!((&line["remaining"], &line["key"]), (&json!(9), &json!("alice@example.com")), "{}", stderr(&output));
        assert!(line["redis_key"].as_str().is_some_and(|key| key.starts_with("tollgate:{%h")), "{line}");
    }
    let output = command(&inspect).env("TOLLGATE_KEY_SECRET", SECRET).output().expect("a run");
    assert_eq!(lines(&output)[0]["remaining"], json!(9));
    let replayed =
        command(&["probe", "token-bucket 10/1d", "alice@example.com", "--name", "api", "--url", &url, "--op", "reset"])
            .env("TOLLGATE_KEY_SECRET_FILE", path)
            .output()
            .expect("a run");
    assert_eq!((code(&replayed), keys(&server)), (0, Vec::new()), "{}", stderr(&replayed));

    std::fs::write(&file, "too short\n").expect("a file");
    let output = tollgate(&[&inspect[..], &["--key-secret-file", path]].concat());
    let expected = format!("error: --key-secret-file {path}: key secret: expected at least 16 bytes, got 9\n");
    assert_eq!((code(&output), stderr(&output)), (2, expected));
    let output = tollgate(&[&inspect[..], &["--key-secret-file", "/nowhere"]].concat());
    let expected = "error: --key-secret-file /nowhere: No such file or directory (os error 2)\n";
    assert_eq!((code(&output), stderr(&output)), (2, expected.into()));
}

#[test]
fn a_line_on_several_limits_has_the_numbers_of_each() {
    let output = tollgate(&["probe", API, "u", "--attr", "org=acme", "--cost", "11"]);
    let line = &lines(&output)[0];
    let [user, org] = line["limits"].as_array().expect("a list").clone().try_into().expect("two");
    assert_eq!(user.to_string().matches(':').count(), 7, "{user}");
    let expected = json!({
        "name": "token-bucket 10/1d", "key": "u", "allowed": false, "limit": 10, "remaining": 10,
        "retry_after_us": "never", "reset_after_us": 0,
    });
    assert_eq!(user, expected);
    assert_eq!((&org["name"], &org["key"], &org["allowed"]), (&json!("orgs"), &json!("acme"), &json!(true)));
    let names = ["name", "key", "allowed", "limit", "remaining", "retry_after_us", "reset_after_us"];
    let text = stdout(&output);
    let mut rest = &text[text.find("\"limits\":[{").expect("a list")..];
    for name in names {
        let at = rest.find(&format!("\"{name}\":")).unwrap_or_else(|| panic!("{name} in its place: {text}"));
        rest = &rest[at..];
    }

    let output =
        tollgate(&["probe", "token-bucket 2/1d", "fixed-window 9/1d", "k", "--count", "3", "--format", "table"]);
    let text = stdout(&output);
    let rows: Vec<Vec<&str>> = text.lines().map(|row| row.split_whitespace().collect()).collect();
    assert_eq!(rows.len(), 1 + 3 * 3, "{text}");
    assert_eq!(rows[8][..4], ["denied", "0", "/", "2"], "{text}");
    assert!(rows[8].ends_with(&["token-bucket", "2/1d", "of", "k"]), "{text}");
    assert_eq!((&rows[9][..5], rows[9].last()), (&["allowed", "7", "/", "9", "-"][..], Some(&"k")), "{text}");
}

#[test]
fn names_and_prefixes_are_part_of_the_keys() {
    let server = Server::start();
    let url = server.url();
    let there = ["--name", "api", "--prefix", "shop", "--url", &url];
    let output = tollgate(&[&["probe", "token-bucket 10/1d", "fixed-window 250/1d", "u1"], &there[..]].concat());
    assert_eq!((code(&output), &lines(&output)[0]["rule"]), (0, &json!("api")), "{}", stderr(&output));
    assert_eq!(keys(&server), ["shop:{u1}:api/fixed-window-1d", "shop:{u1}:api/token-bucket-1d"]);
    // Limits go after commas too, as a rule prints them.
    let output = tollgate(&[&["inspect", "token-bucket 10/1d, fixed-window 250/1d", "u1"], &there[..]].concat());
    let remaining: Vec<_> = lines(&output).iter().map(|line| line["remaining"].clone()).collect();
    assert_eq!(remaining, [9, 249]);

    let none = tollgate(&["reset", "--rule", "api", "--url", &url]);
    assert_eq!((code(&none), stdout(&none).as_str()), (0, "{\"rule\":\"api\",\"forgotten\":0}\n"));
    assert_eq!(stderr(&none), "tollgate: no key of rule api under the prefix tollgate: --prefix chooses another\n");
    tollgate(&["probe", "token-bucket 10/1d", "u2", "--prefix", "shop", "--url", &url]);
    let table = ["--format", "table"];
    let reset = ["reset", "--rule", "api", "--rule", "cli", "--rule", API, "--prefix", "shop", "--url", &url];
    let output = tollgate(&[&reset[..], &table].concat());
    assert_eq!(
        stdout(&output),
        "2 keys of rule api forgotten\n1 key of rule cli forgotten\n0 keys of rule api forgotten\n"
    );
    assert_eq!(keys(&server), [""; 0]);
}

#[test]
fn replays_and_loads_reach_no_key_of_the_service() {
    let server = Server::start();
    let url = server.url();
    let there = ["--prefix", "shop", "--name", "api", "--url", &url];
    assert_eq!(code(&tollgate(&[&["probe", "token-bucket 1/1d", "key 0"], &there[..]].concat())), 0);
    let before = keys(&server);
    let load = ["load", "token-bucket 1/1d", "--keys", "hot", "--count", "5", "--warmup", "0s"];
    let output = tollgate(&[&load[..], &there].concat());
    assert_eq!((code(&output), &lines(&output)[0]["allowed"]), (0, &json!(1)), "{}", stderr(&output));
    let record = b"{\"t_us\":1,\"key\":\"key 0\"}\n";
    let output = with_input(&[&["replay", "--rule", "token-bucket 1/1d", "-"], &there[..]].concat(), record);
    assert_eq!((&lines(&output)[0]["rule"], &lines(&output)[0]["allowed"]), (&json!("api"), &json!(true)));
    assert_eq!(keys(&server), before);

    // A user limited to the service's keys may replay and load.
    let shop = server.user("shop", "~shop:* +@all");
    let there = ["--prefix", "shop", "--url", &shop];
    assert_eq!(code(&tollgate(&[&load[..], &there].concat())), 0);
    assert_eq!(code(&with_input(&[&["replay", "--rule", "token-bucket 1/1d", "-"], &there[..]].concat(), record)), 0);
}

#[test]
fn limits_on_parts_are_replayed_and_loaded_too() {
    let part = ["--attr", "org=acme"];
    let record = b"{\"t_us\":1,\"key\":\"a\"}\n{\"t_us\":1,\"key\":\"b\"}\n";
    let output = with_input(&[&["replay", "--rule", API, "-"], &part[..]].concat(), record);
    let left: Vec<_> = lines(&output).iter().map(|line| line["limits"][1]["remaining"].clone()).collect();
    assert_eq!(left, [999, 998]);
    let again = with_input(&[&["replay", "--rule", API, "-"], &part[..]].concat(), &output.stdout);
    assert_eq!(stdout(&again), stdout(&output));
    let load = ["load", API, "--count", "20", "--warmup", "0s"];
    let output = tollgate(&[&load[..], &part].concat());
    let report = &lines(&output)[0];
    assert_eq!((code(&output), &report["answered"], &report["audit"]), (0, &json!(20), &Value::Null), "{report}");
    assert!(report["no_audit"].as_str().is_some_and(|why| why.contains("a part that all keys share")), "{report}");
}

#[test]
fn settings_of_a_rule_in_json_hold_unless_an_option_overrides_them() {
    let rule = r#"{"name": "jobs", "limits": ["token-bucket 5/1d"], "cost": 3, "overage": true, "on_error": "open"}"#;
    let output = tollgate(&["probe", rule, "k", "--count", "2"]);
    let counts: Vec<_> = lines(&output).iter().map(|line| (line["cost"].clone(), line["overage"].clone())).collect();
    assert_eq!(counts, [(json!(3), json!(0)), (json!(3), json!(1))], "{}", stdout(&output));
    let away = ["--url", "redis://127.0.0.1:1"];
    assert_eq!(code(&tollgate(&[&["probe", rule, "k"], &away[..]].concat())), 0);
    assert_eq!(code(&tollgate(&[&["probe", rule, "k", "--on-error", "closed"], &away[..]].concat())), 2);
    assert_eq!(lines(&tollgate(&["probe", rule, "k", "--cost", "5"]))[0]["remaining"], 0);
    let record = b"{\"t_us\":1,\"key\":\"k\"}\n{\"t_us\":1,\"key\":\"k\",\"cost\":1}\n";
    let replayed = lines(&with_input(&["replay", "--rule", rule, "-"], record));
    assert_eq!([&replayed[0]["cost"], &replayed[1]["cost"]], [3, 1]);
    let unnamed = r#"{"limits": ["token-bucket 5/1d"]}"#;
    assert_eq!(lines(&tollgate(&["probe", unnamed, "k", "--name", "jobs"]))[0]["rule"], "jobs");
    assert_eq!(lines(&tollgate(&["probe", unnamed, "k"]))[0]["rule"], "cli");
}

#[test]
fn a_missing_or_wrong_part_is_one_line_that_says_what_to_give() {
    for (arguments, told) in [
        (&[API][..], "rule api: --attr org=VALUE is missing, which orgs counts"),
        (
            &[r#"{"name": "a", "limits": ["token-bucket 5/1s"], "tag": "org"}"#],
            "rule a: --attr org=VALUE is missing, the tag of its keys",
        ),
        (&["token-bucket 5/1s", "--attr", "org=acme"], "--attr: rule cli counts the key alone: leave out org"),
        (&[API, "--attr", "org=a", "--attr", "team=b"], "--attr: expected org for rule api, got team"),
        (&[API, "--attr", "org=a", "--attr", "org=b"], "--attr: org is given twice; the second is org=b"),
        (&[API, "--attr", "org"], "--attr: expected NAME=VALUE, such as org=acme, got org"),
        (&[API, "--attr", "=acme"], "--attr: expected NAME=VALUE, such as org=acme, got =acme"),
        (&[API, "--attr", "org="], "--attr: expected at least one byte after the =, got org="),
        (&[API, "--attr", "org=a", "--name", "web"], "--name: expected api, as the rule in JSON says, got web"),
        (&[r#"{"name": "api", "limits": ["token-bucket 5/1s"]"#], "EOF while parsing an object"),
        (&[r#"{"name": "api", "limit": "token-bucket 5/1s"}"#], "unknown field `limit`"),
        (&[r#"{"name": "api", "limits": ["token-bucket 5/1min"]}"#], "such as 5/1m, got \"5/1min\""),
        (&["token-bucket 5/1s", API], "a rule in JSON takes no others beside it"),
        (&["token-bucket 5/1s", "--name", "a b"], "got \"a b\""),
        (&["token-bucket 5/1s", "--prefix", "a{b"], "got \"a{b\""),
        (&["token-bucket 5/1s,"], "rule: the limit is missing: "),
        (&["{\"name\": \"a\", \"li\\nmits\": []}"], "unknown field `li mits`"),
        (&[r#"{"name": "a", "name": "b", "limits": ["token-bucket 5/1s"]}"#], "duplicate field `name`"),
    ] {
        // The key stands before the options.
        let at = arguments.iter().position(|word| word.starts_with("--")).unwrap_or(arguments.len());
        let (rules, options) = arguments.split_at(at);
        let output = tollgate(&[&["probe"], rules, &["k"], options].concat());
        let said = stderr(&output);
        assert!(said.starts_with("error: ") && said.contains(told), "{arguments:?}: {said}");
        assert_eq!((code(&output), said.lines().count(), stdout(&output).as_str()), (2, 1, ""), "{said}");
    }
}

#[test]
fn permits_that_are_taken_without_an_id_are_shown_with_one_to_give_them_back_by() {
    let server = Server::start();
    let url = server.url();
    for op in ["acquire", "at-most", "penalty"] {
        let about = ["probe", "concurrency 2 ttl 1h", op, "--url", &url, "--deadline", "1m"];
        let probe = |options: &[&str]| tollgate(&[&about[..], options].concat());
        let held = lines(&probe(&["--op", op, "--count", "2"]));
        let ids: Vec<_> = held.iter().map(|line| line["id"].as_str().expect("an id")).collect();
        assert_ne!(ids[0], ids[1]);
        assert_eq!(held[1]["remaining"], 0);
        let released = probe(&["--op", "release", "--id", ids[0]]);
        assert_eq!((code(&released), &lines(&released)[0]["remaining"]), (0, &json!(1)), "{}", stderr(&released));
        let table = stdout(&probe(&["--op", op, "--format", "table"]));
        assert!(table.contains(&format!(" {op}  id probe-")), "{table}");
        assert_eq!(lines(&probe(&["--op", "peek"]))[0]["id"], Value::Null);
    }
}

#[test]
fn a_replay_of_permits_names_each_call_and_names_it_so_again() {
    let input = b"{\"t_us\":1,\"key\":\"k\"}\n{\"t_us\":1,\"key\":\"k\",\"id\":\"mine\"}\n{\"t_us\":1,\"key\":\"k\"}\n\
        {\"t_us\":2,\"op\":\"release\",\"key\":\"k\",\"id\":\"mine\"}\n{\"t_us\":3,\"key\":\"k\"}\n";
    for rules in
        [&["--rule", "concurrency 2 ttl 1h"][..], &["--rule", "concurrency 2 ttl 1h", "--rule", "token-bucket 9/1d"]]
    {
        let server = Server::start();
        let replay = [&["replay", "-"], rules].concat();
        let output = with_input(&replay, input);
        let said: Vec<_> = lines(&output).iter().map(|line| (line["id"].clone(), line["allowed"].clone())).collect();
        let expected =
            [("replay-1-1", true), ("mine", true), ("replay-1-3", false), ("mine", true), ("replay-3-5", true)];
        assert_eq!(said, expected.map(|(id, allowed)| (json!(id), json!(allowed))), "{}", stderr(&output));
        let on_redis = with_input(&[&replay[..], &["--url", &server.url()]].concat(), &output.stdout);
        assert_eq!(stdout(&on_redis).replace("\"redis\"", "\"embedded\""), stdout(&output));
        assert_eq!(keys(&server), [""; 0], "a replay removes its keys");
    }
}

#[test]
fn blocking_or_resetting_an_unused_key_names_one_that_was_probably_meant() {
    let server = Server::start();
    let run = |arguments: &[&str]| {
        let output = tollgate(&[arguments, &["--url", &server.url()]].concat());
        assert_eq!(code(&output), 0, "{}", stderr(&output));
        stderr(&output)
    };
    let block = |options: &[&str]| run(&[&["block", "token-bucket 5/1d", "k"], options].concat());
    let unused = "tollgate: this key has no state (never used, or expired): tollgate:{k}:web/token-bucket-1d; check \
        --prefix and the rule's name\n";
    assert_eq!(block(&["--name", "web", "--lift"]), unused);
    run(&["probe", "token-bucket 5/1d", "k", "--name", "api", "--prefix", "shop"]);

    // Nothing is scanned for a key that is there.
    server.reset_command_counts();
    assert_eq!(block(&["--name", "api", "--prefix", "shop", "--for", "1m"]), "");
    assert!(!server.commands().contains_key("scan"), "{:?}", server.commands());

    let there = "a similar key is in use: shop:{k}:api/token-bucket-1d";
    let warning = |named: &str, rest: &str| {
        format!("warning: this key has no state (never used, or expired): {named}/token-bucket-1d; {rest}\n")
    };
    let meant = warning("tollgate:{k}:cli", &format!("{there}: try --prefix shop --name api"));
    assert_eq!(block(&["--for", "1m"]), meant);
    assert_eq!(lines(&tollgate(&["probe", "token-bucket 5/1d", "k", "--url", &server.url()]))[0]["blocked"], true);
    let reset = run(&["probe", "token-bucket 5/1d", "other", "--name", "api", "--op", "reset"]);
    assert_eq!(reset, warning("tollgate:{other}:api", &format!("{there}: try --prefix shop")));
    assert_eq!(block(&["--name", "web", "--prefix", "shop", "--lift"]), warning("shop:{k}:web", there));
    assert_eq!(keys(&server), ["shop:{k}:api/token-bucket-1d", "tollgate:{k}:cli/token-bucket-1d"]);
}

#[test]
fn a_slip_in_one_name_is_told_from_a_new_user_and_foreign_text_is_no_command() {
    let server = Server::start();
    let lift = |rule: &str, key: &str, name: &str, prefix: &str| {
        let block = ["block", rule, key, "--name", name, "--prefix", prefix, "--lift", "--url", &server.url()];
        let output = tollgate(&block);
        assert_eq!(code(&output), 0, "{}", stderr(&output));
        stderr(&output)
    };
    let set = |key: &str| cmd("SET").arg(key).arg("").exec(&mut server.connection()).expect("set");
    set("shop:{user:42}:api/token-bucket-1h");
    for (rule, key, name) in [
        ("token-bucket 100/1h", "user:42", "apis"),
        ("token-bucket 100/1m", "user:42", "api"),
        ("fixed_window 100/1h", "user:42", "api"),
        ("token-bucket 100/1h", "42", "api"),
    ] {
        let said = lift(rule, key, name, "shop");
        assert!(
            said.starts_with("warning: ")
                && said.ends_with("; a similar key is in use: shop:{user:42}:api/token-bucket-1h\n"),
            "{said}"
        );
    }
    // Only the user is new, and production isn't suggested for staging.
    ["staging:{old}:api/token-bucket-1h", "prod:{new}:api/token-bucket-1h"].into_iter().for_each(set);
    let said = lift("token-bucket 100/1h", "new", "api", "staging");
    assert_eq!(said, "tollgate: this key has no state (never used, or expired): staging:{new}:api/token-bucket-1h\n");

    set("a;b\u{1b}[2J:{u}:web/token-bucket-1h");
    let said = lift("token-bucket 100/1h", "u", "web", "shop");
    assert!(said.ends_with("; a similar key is in use: a;b\\u{1b}[2J:{u}:web/token-bucket-1h\n"), "{said}");
}

#[test]
fn the_key_that_was_meant_is_looked_for_in_a_bounded_part_of_the_database_and_only_by_who_may_scan() {
    let server = Server::start();
    // The rule's keys are everywhere, this one nowhere.
    let fill = "for n = 1, 30000 do redis.call('SET', 'shop:{' .. n .. '}:api/token-bucket-1d', '') end";
    cmd("EVAL").arg(fill).arg(0).exec(&mut server.connection()).expect("filled");
    let rights = least().join(" ");
    for (user, rights, scans) in [("may", format!("{rights} +scan"), 40), ("may-not", rights, 0)] {
        server.reset_command_counts();
        let block = ["block", "token-bucket 5/1d", user, "--name", "api", "--for", "1m", "--deadline", "10s"];
        let output = tollgate(&[&block[..], &["--url", &server.user(user, &rights)]].concat());
        let said = stderr(&output);
        assert_eq!((code(&output), said.lines().count()), (0, 1), "{said}");
        assert_eq!(said.ends_with(": try --prefix shop\n"), scans > 0, "{said}");
        let (sent, failed) = server.commands().get("scan").copied().unwrap_or_default();
        assert_eq!(sent - failed, scans, "{said}");
        assert_eq!(
            lines(&tollgate(&["probe", "token-bucket 5/1d", user, "--name", "api", "--url", &server.url()]))[0]["blocked"],
            true
        );
    }
}

#[test]
fn a_reset_of_several_rules_forgets_none_if_one_cannot_be_meant() {
    let server = Server::start();
    let url = server.url();
    tollgate(&["probe", "token-bucket 5/1d", "k", "--name", "api", "--url", &url]);
    let output = tollgate(&["reset", "--rule", "api", "--rule", "b b", "--url", &url]);
    assert_eq!((code(&output), stdout(&output).as_str()), (2, ""));
    assert!(stderr(&output).contains("got \"b b\""), "{}", stderr(&output));
    assert_eq!(
        lines(&tollgate(&["probe", "token-bucket 5/1d", "k", "--name", "api", "--url", &url]))[0]["remaining"],
        3
    );
}

#[test]
fn a_key_without_a_file_of_rules_is_told_what_forgets_it() {
    let alone = stderr(&tollgate(&["reset", "--rule", "api", "user:42"]));
    assert!(alone.contains("KEY: needs --rules FILE, ") && alone.contains("counts \"user:42\"; for a rule"), "{alone}");
    assert!(alone.contains("probe --op reset RULE KEY"), "{alone}");
    let nameless = stderr(&tollgate(&["reset", "user:42"]));
    assert!(nameless.contains("--rule <NAME>") && !nameless.contains("--rules"), "{nameless}");
}

#[test]
fn an_empty_address_decides_nothing_and_a_mistyped_name_is_reported_with_the_known_ones() {
    for (arguments, told) in [
        (&["probe", "token-bucket 5/1s", "k", "--url", ""][..], "url: expected redis"),
        (&["porbe", "token-bucket 5/1s", "k"], "'probe'"),
        (&["probe", "token-bucket 5/1s", "k", "--processes", "0"], "a whole number from 1 to"),
        (&["probe", "token-bucket 1,000/1s", "k"], "(a comma begins another limit)"),
        (&["probe", "[\"token-bucket 5/1s\"]", "k"], "rule in JSON"),
    ] {
        let output = tollgate(arguments);
        let said = stderr(&output);
        assert_eq!((code(&output), said.lines().count(), stdout(&output).as_str()), (2, 1, ""), "{said}");
        assert!(said.contains(told), "{arguments:?}: {said}");
    }
}
