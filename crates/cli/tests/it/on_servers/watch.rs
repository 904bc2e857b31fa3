//! `tollgate watch` as other programs use it: its numbers against those of the server, what it needs, and what it makes
//! of servers and endpoints that fail.

mod failures;

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdout, Output, Stdio};

use serde_json::Value;
use tollgate::redis::cmd;
use tollgate_testing::acl::rights_of;
use tollgate_testing::cluster::ClusterServers;
use tollgate_testing::polling::block_until;
use tollgate_testing::redis_server::Server;
use tollgate_testing::sentinels::Sentinels;

use crate::support::tool::{code, command, lines, stderr, stdout, tollgate};

/// A run that prints an object for each interval, until it is dropped.
pub(super) struct Running {
    process: Child,
    lines: BufReader<ChildStdout>,
}

impl Running {
    pub(super) fn start(arguments: &[&str]) -> Self {
        Self::every("200ms", arguments)
    }

    fn every(interval: &str, arguments: &[&str]) -> Self {
        let common = ["watch", "--format", "jsonl", "--deadline", "10s", "--interval", interval];
        let mut watch = command(&[&common, arguments].concat());
        let mut process = watch.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the tool runs");
        let lines = BufReader::new(process.stdout.take().expect("piped"));
        Self { process, lines }
    }

    pub(super) fn next(&mut self) -> Value {
        let mut line = String::new();
        self.lines.read_line(&mut line).expect("a line");
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line:?}"))
    }

    /// The first object that this holds for.
    pub(super) fn until(&mut self, what: &str, holds: impl Fn(&Value) -> bool) -> Value {
        let mut found = None;
        block_until(what, || {
            found = Some(self.next()).filter(&holds);
            found.is_some()
        });
        found.expect("found")
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It has ended if it was interrupted.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Calls on some keys, in the background, until it is dropped.
struct Load(Child);

impl Load {
    fn start(url: &str, arguments: &[&str]) -> Self {
        let load = ["load", "--no-audit", "--warmup", "0s", "--duration", "60s", "--url", url];
        let mut load = command(&[&load[..], arguments].concat());
        Self(load.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the tool runs"))
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.0.kill().expect("it was running");
        self.0.wait().expect("it ends");
    }
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or(0.0)
}

fn key_of<'a>(snapshot: &'a Value, name: &str) -> Option<&'a Value> {
    snapshot["keys"].as_array()?.iter().find(|key| key["key"] == name)
}

#[test]
fn a_key_that_is_written_and_one_that_is_only_denied_are_told_apart() {
    let server = Server::start();
    let url = server.url();
    let _written = Load::start(&url, &["token-bucket 1000000/1s", "--name", "open", "--keys", "hot", "--rate", "200"]);
    let _denied = Load::start(&url, &["token-bucket 1/1d", "--name", "shut", "--keys", "hot", "--rate", "200"]);
    let mut watch = Running::start(&["--url", &url]);
    let of = |snapshot: &Value, rule: &str, number_of: &str| {
        let keys = snapshot["keys"].as_array().expect("keys");
        keys.iter().find(|key| key["rule"] == rule).map(|key| number(&key[number_of]))
    };
    let seen = watch.until("both keys are seen for what they are", |snapshot| {
        of(snapshot, "open", "writes_per_second").is_some_and(|rate| rate > 0.0)
            && of(snapshot, "shut", "writes_per_second") == Some(0.0)
            && of(snapshot, "shut", "touched_share").is_some_and(|share| share > 0.0)
    });
    assert!(number(&seen["scripts"]["calls_per_second"]) > 0.0, "{seen}");
    let commands = seen["scripts"]["by_command"].as_array().expect("commands");
    assert!(commands.iter().any(|command| command["command"] == "evalsha"), "{seen}");
    assert_eq!(seen["keys"][0]["rule"], "open", "the hottest first: {seen}");
    let rules: BTreeSet<_> =
        seen["rules"].as_array().expect("rules").iter().map(|rule| rule["rule"].as_str()).collect();
    assert_eq!(rules, [Some("open"), Some("shut")].into());
    assert!(seen["keys"][0]["under"].as_str().is_some_and(|under| under.starts_with("load-")), "{seen}");
}

#[test]
fn all_keys_are_scanned_beside_many_in_use_and_at_the_shortest_interval() {
    let server = Server::start();
    let _load = Load::start(&server.url(), &["token-bucket 1000000/1s", "--key-count", "100", "--rate", "1000"]);
    let others = "for n = 1, 500 do redis.call('set', 'tollgate:{user:' .. n .. '}:idle/token-bucket-1s', 'x') end";
    let () = cmd("EVAL").arg(others).arg(0).query(&mut server.connection()).expect("written");
    let mut watch = Running::every("100ms", &["--url", &server.url()]);
    let seen = watch.until("all keys are scanned", |snapshot| {
        let idle = snapshot["rules"].as_array().expect("rules").iter().find(|rule| rule["rule"] == "idle");
        snapshot["sample"]["complete"] == true && idle.is_some()
    });
    let share = number(&seen["nodes"][0]["watch_share"]);
    assert!(share < 0.1, "not much more than its budget, also on a busy machine: {share}");
}

#[test]
fn watching_changes_nothing_and_counts_as_no_use_of_a_key() {
    let server = Server::start();
    let mut redis = server.connection();
    for rule in ["token-bucket 5/1d", "fixed-window 5/1h", "sliding-window 5/1h", "sliding-log 5/1h"] {
        assert_eq!(code(&tollgate(&["probe", rule, "user:1", "--url", &server.url()])), 0);
    }
    let mut names: Vec<String> = cmd("KEYS").arg("*").query(&mut redis).expect("keys");
    names.sort();
    let mut idle = || {
        let idle = names.iter().map(|name| cmd("OBJECT").arg("IDLETIME").arg(name).query::<u64>(&mut redis));
        idle.map(|idle| idle.expect("a key")).min().expect("keys")
    };
    block_until("the keys are idle", || idle() >= 3);
    server.reset_command_counts();
    let output = tollgate(&["watch", "--once", "--deadline", "10s", "--url", &server.url()]);
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    let sent: BTreeSet<_> = server.commands().into_keys().filter(|name| name != "config|resetstat").collect();
    let expected = ["client|tracking", "hello", "info", "object|idletime", "scan", "time", "xread"];
    assert!(sent.iter().all(|name| expected.contains(&name.as_str())), "{sent:?}");
    assert!(idle() >= 3);
    let calls: u64 = server.commands().values().map(|(calls, _)| calls).sum();
    assert!(calls < 500, "{calls} calls");
    let snapshot = &lines(&output)[0];
    assert_eq!((&snapshot["nodes"][0]["keys"], &snapshot["sample"]["complete"]), (&4.into(), &true.into()));
    let keys: u64 =
        snapshot["rules"].as_array().expect("rules").iter().map(|rule| rule["keys"].as_u64().unwrap()).sum();
    assert_eq!(keys, 4, "{snapshot}");
}

/// What the server says of itself at the same time.
#[test]
fn its_numbers_are_the_servers_own() {
    let server = Server::with(&["--maxmemory", "50mb", "--maxmemory-policy", "allkeys-lfu"]);
    let _load = Load::start(&server.url(), &["token-bucket 1000000/1s", "--keys", "hot", "--rate", "100"]);
    let mut watch = Running::start(&["--url", &server.url()]);
    let seen = watch
        .until("a key is seen", |snapshot| key_of(snapshot, "key-0").is_some_and(|key| number(&key["freq"]) > 0.0));
    let node = &seen["nodes"][0];
    assert_eq!((&node["maxmemory"], &node["maxmemory_policy"]), (&(50 << 20).into(), &"allkeys-lfu".into()));
    assert_eq!((&node["role"], &node["error"]), (&"master".into(), &Value::Null));
    assert_eq!(seen["sample"]["touches"], "freq");
    assert_eq!(key_of(&seen, "key-0").expect("the key")["touched_share"], Value::Null);
    let version: String = {
        let info: String = cmd("INFO").arg("server").query(&mut server.connection()).expect("INFO");
        let of = |name: &str| info.lines().find_map(|line| line.strip_prefix(name)).map(str::to_owned);
        of("valkey_version:")
            .map_or_else(|| format!("Redis {}", of("redis_version:").unwrap()), |it| format!("Valkey {it}"))
    };
    assert_eq!(node["version"], version);
}

/// One picture, seen by a user of few rights.
fn once_as_watcher(url: &str) -> Output {
    let url = url.replace("://", "://watcher:sesame@");
    tollgate(&["watch", "--once", "--deadline", "10s", "--url", &url])
}

#[test]
fn a_cluster_is_watched_on_every_primary_and_a_primary_by_its_sentinels() {
    let servers = ClusterServers::of_primaries();
    let _load = Load::start(&servers.url(), &["token-bucket 1000000/1s", "--key-count", "30", "--rate", "300"]);
    let mut watch = Running::start(&["--url", &servers.url()]);
    let seen = watch.until("keys of every node are written", |snapshot| {
        let scripts = |node: &Value| number(&node["script_calls_per_second"]) > 0.0;
        let nodes = snapshot["nodes"].as_array().expect("nodes");
        let written =
            snapshot["keys"].as_array().expect("keys").iter().filter(|key| number(&key["writes_per_second"]) > 0.0);
        nodes.len() == 3 && nodes.iter().all(scripts) && written.count() > 20
    });
    assert_eq!(seen["rules"].as_array().map(Vec::len), Some(1), "{seen}");
    // Keys whose slot moves away are looked at no more, and the rest is.
    let key = seen["keys"][0]["key"].as_str().expect("a key").to_owned();
    let slot = servers.slot_of(&key);
    let from = servers.primary_of(slot).expect("an owner");
    servers.begin_moving(slot, from, (from + 1) % 3);
    servers.move_keys(slot, from, (from + 1) % 3);
    for _ in 0..3 {
        watch.next();
    }
    let seen = watch.until("all keys are scanned", |snapshot| snapshot["sample"]["complete"] == true);
    assert_eq!(seen["sample"]["no_scan"], Value::Null, "{seen}");
    drop(watch);
    // As the smallest user of a cluster.
    let rights = [rights_of("watcher").as_slice(), &["+cluster|slots", "+cluster|info"]].concat().join(" ");
    servers.nodes().iter().for_each(|node| drop(node.user("watcher", &rights)));
    let output = once_as_watcher(&servers.url());
    let sample = &lines(&output)[0]["sample"];
    assert_eq!((code(&output), stderr(&output).as_str()), (0, ""));
    assert_eq!((&sample["no_writes"], &sample["no_scan"]), (&Value::Null, &Value::Null), "{sample}");

    let servers = Sentinels::start();
    let rights = [rights_of("watcher").as_slice(), &["+role"]].concat().join(" ");
    let primary = servers.primary().expect("a primary");
    servers.server(primary).user("watcher", &rights);
    let output = once_as_watcher(&servers.url());
    assert_eq!((code(&output), stderr(&output).as_str()), (0, ""));
    let output = tollgate(&["watch", "--once", "--deadline", "10s", "--url", &servers.url()]);
    assert_eq!((code(&output), &lines(&output)[0]["nodes"][0]["role"]), (0, &"master".into()), "{}", stderr(&output));
}

#[test]
fn the_documented_smallest_user_suffices_and_each_right_that_it_lacks_is_named() {
    let server = Server::start();
    let url = server.url();
    assert_eq!(code(&tollgate(&["probe", "token-bucket 5/1d", "user:1", "--url", &url])), 0);
    let rights = rights_of("watcher");
    let once = |name: &str, rights: &[&str]| {
        let output =
            tollgate(&["watch", "--once", "--deadline", "10s", "--url", &server.user(name, &rights.join(" "))]);
        (code(&output), stderr(&output), lines(&output).pop().unwrap_or_default())
    };
    let (exit, told, seen) = once("watcher", &rights);
    assert_eq!((exit, told.as_str()), (0, ""), "{seen}");
    assert_eq!((&seen["sample"]["no_writes"], &seen["sample"]["no_scan"]), (&Value::Null, &Value::Null));
    assert_eq!(seen["rules"][0]["keys"], 1, "{seen}");

    for (right, lacking) in [
        ("+info", ""),
        ("+scan", "no_scan"),
        ("+object|idletime", "no_scan"),
        ("+client|tracking", "no_writes"),
        ("+xread", "no_writes"),
        ("+time", "no_writes"),
        ("%R~tollgate:*", "no_writes"),
    ] {
        let less: Vec<_> = rights.iter().copied().filter(|other| *other != right).collect();
        assert_eq!(less.len() + 1, rights.len(), "{right} in {rights:?}");
        let mut last = once("less", &less);
        if !lacking.is_empty() {
            // On a busy machine there may be no time to look at a key.
            block_until(right, || {
                let says_why = last.2["sample"][lacking].is_string();
                if !says_why {
                    last = once("less", &less);
                }
                says_why
            });
        }
        let (exit, told, seen) = last;
        if lacking.is_empty() {
            assert!(
                exit == 2
                    && told.contains("doesn't let this user run 'info' (ACL SETUSER ... +info): NOPERM")
                    && told.lines().count() == 1,
                "{right}: {told}"
            );
        } else {
            let why = seen["sample"][lacking].as_str().unwrap_or_else(|| panic!("{right}: {seen}"));
            assert!(exit == 0 && why.contains("NOPERM"), "{right}: {why}");
        }
    }
    let for_lfu = rights.iter().filter(|right| **right == "+object|freq").count();
    let for_written = rights.iter().filter(|right| **right == "+exists").count();
    assert_eq!((for_lfu, for_written, rights.len()), (1, 1, 9), "no right that this test doesn't know: {rights:?}");
}

#[test]
fn a_picture_as_text_has_no_escapes_and_fits_a_page() {
    let server = Server::start();
    assert_eq!(code(&tollgate(&["probe", "token-bucket 5/1d", "user:1", "--url", &server.url()])), 0);
    let output = tollgate(&["watch", "--once", "--deadline", "10s", "--format", "table", "--url", &server.tcp_url()]);
    let text = stdout(&output);
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    assert!(text.starts_with("redis     127.0.0.1:"), "{text}");
    assert!(text.contains("\nrules by writes\n") && text.contains("cli/token-bucket-1d"), "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 80) && !text.contains('\u{1b}'), "{text}");
}
