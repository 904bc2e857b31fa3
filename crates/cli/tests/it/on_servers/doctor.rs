//! The doctor, on real servers: a sound one, and one with each of what may be wrong with it.

use std::process::{Command, Output};

use serde_json::Value;
use tollgate::redis::{Connection, cmd};
use tollgate_testing::acl;
use tollgate_testing::polling::block_until;
use tollgate_testing::redis_server::{Server, free_port};
use tollgate_testing::repository::read;

use crate::support::tool::{code, lines, stderr, stdout, tollgate};

/// With a deadline that a busy machine keeps.
fn examine(url: &str) -> Output {
    tollgate(&["doctor", "--url", url, "--deadline", "5s", "--format", "jsonl"])
}

/// What was found by one check.
fn finding(output: &Output, check: &str) -> Value {
    let findings = lines(output);
    let found = findings.iter().find(|finding| finding["check"] == check);
    found.unwrap_or_else(|| panic!("{check} in {}{}", stdout(output), stderr(output))).clone()
}

fn text<'a>(finding: &'a Value, name: &str) -> &'a str {
    finding[name].as_str().unwrap_or_else(|| panic!("{name} in {finding}"))
}

fn advice(finding: &Value) -> String {
    let steps = finding["advice"].as_array().expect("a list");
    steps.iter().map(|step| step.as_str().expect("text")).collect::<Vec<_>>().join("\n")
}

/// The checks that came out so.
fn of_level(output: &Output, level: &str) -> Vec<String> {
    lines(output).iter().filter(|line| line["level"] == level).map(|line| text(line, "check").to_owned()).collect()
}

/// Without those on the server's version, which may have reached its end of life, and on the pace of a busy machine.
fn notes(output: &Output) -> Vec<String> {
    of_level(output, "note").into_iter().filter(|check| !["version", "latency"].contains(&check.as_str())).collect()
}

fn set(server: &Server, setting: &str, value: &str) {
    cmd("CONFIG").arg("SET").arg(setting).arg(value).exec(&mut server.connection()).expect("set");
}

fn info(redis: &mut Connection) -> String {
    cmd("INFO").query(redis).expect("information")
}

#[test]
fn a_server_with_default_settings_is_fit() {
    let server = Server::with(&["--maxmemory-policy", "noeviction", "--save", "3600 1"]);
    for url in [server.url(), server.tcp_url(), format!("{}?protocol=resp3", server.tcp_url())] {
        let output = examine(&url);
        assert_eq!(code(&output), 0, "{}{}", stdout(&output), stderr(&output));
        assert_eq!(text(&finding(&output, "eviction"), "level"), "ok");
        assert_eq!(finding(&output, "scripts")["numbers"]["decide"], 7);
        assert_eq!(finding(&output, "clock")["level"], "ok");
        let sizes = finding(&output, "key size");
        let bucket = sizes["numbers"]["token_bucket"].as_u64().expect("bytes");
        assert!((100..400).contains(&bucket), "{sizes}");
        let latency = finding(&output, "latency");
        assert!(latency["numbers"]["p50_us"].as_u64() <= latency["numbers"]["p99_us"].as_u64(), "{latency}");
    }
}

/// By what it says on its command line, whichever is on the PATH.
#[test]
fn the_server_is_named_by_product_and_version() {
    let said = Command::new("redis-server").arg("--version").output().expect("redis-server on the PATH");
    let said = stdout(&said);
    let (product, rest) = said.split_once(" server v=").expect("a version");
    let version = rest.split_whitespace().next().expect("a version");
    let server = Server::start();
    let finding = finding(&examine(&server.url()), "version");
    let numbers = &finding["numbers"];
    assert_eq!((text(numbers, "product"), text(numbers, "version")), (product, version));
    assert!(text(&finding, "found").starts_with(&format!("{product} {version}")), "{finding}");
    if version.starts_with("7.0.") {
        assert_eq!(finding["level"], "note");
        assert!(text(&finding, "found").contains("end of life after 2024-07-29"), "{finding}");
    }
}

#[test]
fn scripts_that_were_dropped_are_reported_where_the_server_drops_any() {
    let server = Server::start();
    let mut redis = server.connection();
    (0..600).for_each(|n| cmd("EVAL").arg(format!("return {n}")).arg(0).exec(&mut redis).expect("an answer"));
    let drops = info(&mut redis).contains("evicted_scripts:");
    let output = examine(&server.url());
    assert_eq!((code(&output), of_level(&output, "note").contains(&"script cache".to_owned())), (0, drops));
}

#[test]
fn every_line_is_an_object_with_the_same_names_in_the_same_order() {
    let server = Server::start();
    let output = examine(&server.url());
    assert!(lines(&output).len() > 12);
    for line in stdout(&output).lines() {
        let mut rest = line;
        for name in ["{\"check\":\"", "\"level\":\"", "\"found\":\"", "\"advice\":[", "\"numbers\":{", "\"node\":\""] {
            let at = rest.find(name).unwrap_or_else(|| panic!("{name} in its place in {line}"));
            rest = &rest[at..];
        }
    }
}

#[test]
fn the_doctor_changes_nothing_on_the_server() {
    let server = Server::start();
    cmd("SET").arg("other").arg("untouched").exec(&mut server.connection()).expect("set");
    server.reset_command_counts();
    assert_eq!(code(&examine(&server.url())), 0);
    let commands = server.commands();
    let calls: u64 = commands.values().map(|(calls, _)| calls).sum();
    assert!(calls < 400, "{calls} calls");
    for forbidden in ["keys", "debug", "config|set", "flushall", "flushdb", "script|flush", "save", "bgsave", "monitor"]
    {
        assert!(!commands.contains_key(forbidden), "{forbidden}");
    }
    let keys: Vec<String> = cmd("KEYS").arg("*").query(&mut server.connection()).expect("keys");
    assert_eq!(keys, ["other"]);
}

#[test]
fn a_policy_that_evicts_is_a_warning_that_says_what_to_do() {
    let server = Server::with(&["--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"]);
    for policy in ["allkeys-lru", "volatile-ttl"] {
        set(&server, "maxmemory-policy", policy);
        let output = examine(&server.url());
        assert_eq!(
            (code(&output), of_level(&output, "warning")),
            (1, vec!["eviction".to_owned()]),
            "{}",
            stdout(&output)
        );
        let finding = finding(&output, "eviction");
        assert!(text(&finding, "found").contains(policy), "{finding}");
        assert!(advice(&finding).contains("CONFIG SET maxmemory-policy noeviction"), "{finding}");
    }
}

#[test]
fn a_replica_is_unfit_and_so_is_a_primary_that_lacks_replicas() {
    let primary = Server::start();
    let port = primary.tcp_url().rsplit(':').next().expect("a port").to_owned();
    set(&primary, "repl-diskless-sync-delay", "0");
    let replica = Server::with(&["--replicaof", "127.0.0.1", &port]);
    block_until("the server reports it", || info(&mut primary.connection()).contains("state=online"));
    let output = examine(&replica.url());
    assert_eq!(code(&output), 2);
    let finding_of_replica = finding(&output, "replication");
    assert_eq!(finding_of_replica["level"], "unfit");
    assert!(advice(&finding_of_replica).contains(&format!("redis://127.0.0.1:{port}")), "{finding_of_replica}");

    let output = examine(&primary.url());
    assert_eq!(code(&output), 0, "{}", stdout(&output));
    assert_eq!(finding(&output, "replication")["numbers"]["replicas"], 1);

    set(&primary, "min-replicas-to-write", "2");
    let output = examine(&primary.url());
    assert_eq!(code(&output), 2);
    let found = finding(&output, "replication");
    assert!(text(&found, "found").contains("1 good replicas of the 2"), "{found}");
    assert_eq!(of_level(&output, "unfit"), ["scripts", "replication"]);
}

#[test]
fn a_user_without_evalsha_gets_a_report_that_names_the_command() {
    let server = Server::start();
    let output = examine(&server.user("most", "+@all -evalsha ~*"));
    assert_eq!(code(&output), 2);
    let finding_of = finding(&output, "permissions");
    assert!(text(&finding_of, "found").contains("EVALSHA (for every decision)"), "{finding_of}");
    assert_eq!(advice(&finding_of), "ACL SETUSER most +evalsha");
}

#[test]
fn each_command_that_a_user_lacks_is_named() {
    let server = Server::start();
    for (command, expected) in
        [("setrange", 2), ("mget", 2), ("time", 2), ("set", 2), ("zadd", 1), ("pttl", 1), ("eval_ro", 1), ("dbsize", 0)]
    {
        let output = examine(&server.user(command, &format!("+@all -{command} ~*")));
        assert_eq!(code(&output), expected, "{command}: {}", stdout(&output));
        let finding = finding(&output, "permissions");
        assert_eq!(finding["numbers"]["missing"], serde_json::json!([command.to_uppercase()]), "{finding}");
        assert_eq!(advice(&finding), format!("ACL SETUSER {command} +{command}"));
    }
    let output = examine(&server.user("astray", "+@all ~elsewhere:*"));
    assert_eq!(advice(&finding(&output, "permissions")), "ACL SETUSER astray ~tollgate:*");
    assert_eq!(code(&output), 2);
    let url = server.user("at-home", "+@all ~elsewhere:*");
    let output = tollgate(&["doctor", "--url", &url, "--deadline", "5s", "--prefix", "elsewhere"]);
    assert_eq!(code(&output), 0, "{}", stdout(&output));
}

#[test]
fn a_user_with_the_least_permissions_is_fit_and_checks_that_it_may_not_make_are_notes() {
    let server = Server::start();
    let output = examine(&server.user("least", &acl::least().join(" ")));
    assert_eq!(code(&output), 0, "{}", stdout(&output));
    assert_eq!(finding(&output, "scripts")["level"], "ok");
    let findings = lines(&output);
    let unchecked = findings.iter().filter(|line| line["check"] == "unchecked");
    let commands: Vec<_> = unchecked.map(|line| text(&line["numbers"], "command")).collect();
    assert_eq!(commands, ["INFO", "CONFIG GET", "MEMORY USAGE"]);
    assert!(stdout(&output).contains("NOPERM"));
    let keys: Vec<String> = cmd("KEYS").arg("*").query(&mut server.connection()).expect("keys");
    assert!(keys.is_empty(), "{keys:?}");
}

#[test]
fn a_server_with_the_commands_forbidden_by_managed_services_is_examined_as_far_as_possible() {
    let rename = |command| ["--rename-command", command, ""];
    let server = Server::with(&["CONFIG", "MEMORY", "ACL"].map(rename).concat());
    let output = examine(&server.url());
    assert_eq!(code(&output), 0, "{}{}", stdout(&output), stderr(&output));
    assert_eq!(finding(&output, "eviction")["level"], "ok", "INFO tells the policy too");
    assert!(stdout(&output).contains("CONFIG GET failed"));

    let server = Server::with(&["INFO", "CONFIG", "MEMORY"].map(rename).concat());
    assert_eq!(code(&examine(&server.url())), 0);
    let server = Server::with(&rename("EVALSHA"));
    let output = examine(&server.url());
    assert_eq!(code(&output), 2);
    assert!(advice(&finding(&output, "permissions")).contains("rename-command"));
}

#[test]
fn full_memory_is_unfit() {
    let server = Server::start();
    cmd("SET").arg("filler").arg("x".repeat(2 << 20)).exec(&mut server.connection()).expect("set");
    set(&server, "maxmemory", "1mb");
    let output = examine(&server.url());
    assert_eq!(code(&output), 2);
    assert_eq!(of_level(&output, "unfit"), ["scripts", "memory"]);
    assert!(advice(&finding(&output, "memory")).contains("CONFIG SET maxmemory "));
}

#[test]
fn a_save_that_failed_is_unfit_while_it_stops_writes() {
    let server = Server::start();
    set(&server, "save", "3600 1");
    let mut redis = server.connection();
    let (_, directory): (String, String) = cmd("CONFIG").arg("GET").arg("dir").query(&mut redis).expect("a directory");
    // Nothing can be put in its place.
    std::fs::create_dir(format!("{directory}/dump.rdb")).expect("a directory");
    cmd("BGSAVE").exec(&mut redis).expect("begun");
    block_until("the server reports it", || info(&mut redis).contains("rdb_last_bgsave_status:err"));
    let output = examine(&server.url());
    assert_eq!((code(&output), of_level(&output, "unfit")), (2, vec!["scripts".to_owned(), "saves".to_owned()]));
    assert!(advice(&finding(&output, "saves")).contains("CONFIG SET stop-writes-on-bgsave-error no"));
    set(&server, "stop-writes-on-bgsave-error", "no");
    let output = examine(&server.url());
    assert_eq!((code(&output), of_level(&output, "warning")), (1, vec!["saves".to_owned()]));
}

#[test]
fn a_node_of_a_cluster_is_judged_by_the_slots_that_are_covered() {
    let server = Server::with(&["--cluster-enabled", "yes", "--cluster-require-full-coverage", "no"]);
    let output = examine(&server.tcp_url());
    assert_eq!(code(&output), 2, "{}", stdout(&output));

    let mut redis = server.connection();
    cmd("CLUSTER").arg("ADDSLOTSRANGE").arg(0).arg(8191).exec(&mut redis).expect("slots");
    block_until("the server reports it", || {
        cmd("CLUSTER").arg("INFO").query::<String>(&mut redis).expect("state").contains("cluster_state:ok")
    });
    let output = examine(&server.tcp_url());
    assert_eq!((code(&output), of_level(&output, "warning")), (1, vec!["cluster".to_owned()]), "{}", stdout(&output));

    cmd("CLUSTER").arg("ADDSLOTSRANGE").arg(8192).arg(16383).exec(&mut redis).expect("slots");
    block_until("the server reports it", || {
        cmd("CLUSTER").arg("INFO").query::<String>(&mut redis).expect("state").contains("slots_ok:16384")
    });
    let output = examine(&server.tcp_url());
    assert_eq!(code(&output), 0, "{}", stdout(&output));
}

#[test]
fn an_unreachable_server_is_reported_in_one_line() {
    let server = Server::with(&["--requirepass", "right"]);
    let stopped = Server::start();
    stopped.signal("-STOP");
    let nobody = format!("redis://127.0.0.1:{}", free_port());
    let wrong = server.tcp_url().replace("redis://", "redis://:s3cret@");
    for (arguments, expected) in [
        (vec!["--url", &nobody], nobody.trim_start_matches("redis://")),
        (vec!["--url", &wrong], "refused the user or the password"),
        (vec!["--url", &stopped.tcp_url(), "--deadline", "200ms"], "within the deadline of 200ms"),
        (vec!["--url", "http://localhost"], "expected redis[s]://"),
        (vec!["--url", &nobody, "--prefix", "{"], "prefix: expected some text without braces"),
        (vec![], "--url or TOLLGATE_URL"),
    ] {
        let output = tollgate(&[&["doctor"], arguments.as_slice()].concat());
        let told = stderr(&output);
        assert_eq!(
            (code(&output), told.lines().count(), stdout(&output).as_str()),
            (2, 1, ""),
            "{arguments:?}: {told}"
        );
        assert!(told.starts_with("error: ") && told.contains(expected), "{arguments:?}: {told}");
        assert!(!told.contains("s3cret"));
    }
    stopped.signal("-CONT");
}

/// Also where only its second connection, which looks around, is refused.
#[test]
fn a_server_with_too_many_clients_is_reported_in_its_own_words() {
    let server = Server::start();
    let mut occupied = server.connection();
    for (most, command) in [(1, "doctor"), (2, "doctor"), (1, "watch")] {
        cmd("CONFIG").arg(&["SET", "maxclients", &most.to_string()]).exec(&mut occupied).expect("set");
        let output = tollgate(&[command, "--url", &server.tcp_url(), "--deadline", "5s"]);
        let told = stderr(&output);
        assert_eq!((code(&output), told.lines().count()), (2, 1), "{command}, {most}: {told}");
        assert!(told.ends_with(": ERR max number of clients reached\n"), "{command}, {most}: {told}");
    }
}

#[test]
fn a_table_on_request_is_no_wider_than_a_page_and_ends_with_a_verdict() {
    let server = Server::with(&["--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"]);
    let output = tollgate(&["doctor", "--url", &server.tcp_url(), "--deadline", "5s", "--format", "table"]);
    let text = stdout(&output);
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    assert!(!text.contains('\u{1b}'), "no colours where there is no terminal");
    assert!(text.contains("\nwarning  eviction     maxmemory-policy allkeys-lru"), "{text}");
    let last = text.lines().last().expect("a verdict");
    assert!(last.starts_with("fit for limits, with warnings: 1 warning, "), "{last}");
}

#[test]
fn each_user_of_the_redis_conf_can_do_its_task() {
    let server = Server::start();
    let file = read("examples/redis.conf");
    let users = file.lines().filter_map(|line| line.strip_prefix("# user ")?.split_once(" on >PASSWORD "));
    let users: Vec<_> = users.collect();
    let [("limiter", least), ("operator", more), ("admin", all)] = users[..] else { panic!("{users:?}") };
    assert!(
        file.ends_with("\n# user default off\n") && read("src/operations.md").contains("`ACL SETUSER default off`")
    );
    let words = |rights: &str| rights.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(
        (words(least), words(more)),
        (words(&acl::least().join(" ")), words(&acl::rights_of("operator").join(" ")))
    );
    assert_eq!(code(&examine(&server.user("admin", all))), 0);
    let output = examine(&server.user("operator", more));
    assert_eq!(code(&output), 0, "{}", stdout(&output));
    assert_eq!(notes(&output), ["memory", "persistence"], "{}", stdout(&output));
}

#[test]
fn the_redis_conf_to_start_from_is_fit() {
    let server = Server::with_file(concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/redis.conf"));
    let output = examine(&server.tcp_url());
    assert_eq!(code(&output), 0, "{}", stdout(&output));
    assert_eq!(notes(&output), Vec::<String>::new(), "{}", stdout(&output));
}
