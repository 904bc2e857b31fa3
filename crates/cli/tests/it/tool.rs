//! The tool, by its standard output, standard error and exit code.

mod addresses;
mod block_for;
mod logs;
mod messages;
mod replay_input;
mod replay_on_redis;
mod rules;
mod service_keys;
mod suggest;
mod version;

use std::collections::BTreeMap;
use std::io::Write;
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};
use tollgate::Limit;
use tollgate::redis::cmd;
use tollgate_testing::oracle_spec::oracle;
use tollgate_testing::redis_server::{Server, free_port};
use tollgate_testing::repository::root;
use tollgate_testing::rules::limit;

use crate::support::tool::{code, command, lines, stderr, stdout, tollgate, with_input};

const LOG: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/access-combined.log");

#[test]
fn probe_allows_five_of_seven_on_the_embedded_engine_and_on_redis() {
    let server = Server::start();
    for engine in [vec![], vec!["--url", &server.tcp_url()], vec!["--url", &server.url()]] {
        let arguments = [&["probe", "token-bucket 5/1d", "user:42", "--count", "7"], engine.as_slice()].concat();
        let output = tollgate(&arguments);
        let verdicts: Vec<_> =
            lines(&output).iter().map(|line| line["allowed"].as_bool().expect("a verdict")).collect();
        if engine.last() == Some(&server.url().as_str()) {
            assert_eq!(verdicts, [false; 7], "the same key of the same server");
        } else {
            assert_eq!(verdicts, [true, true, true, true, true, false, false]);
        }
        assert_eq!(code(&output), 1);
        let waits =
            lines(&output).iter().filter(|line| line["retry_after_us"].as_u64().is_some_and(|us| us > 0)).count();
        assert_eq!(waits, verdicts.iter().filter(|allowed| !*allowed).count(), "each denial says when");
    }
}

#[test]
fn a_line_has_the_names_and_the_order_that_programs_rely_on() {
    let output = tollgate(&["probe", "fixed-window 2/1d start first-hit", "k", "--cost", "2"]);
    assert_eq!(
        stdout(&output),
        "{\"op\":\"acquire\",\"key\":\"k\",\"cost\":2,\"rule\":\"cli\",\"allowed\":true,\"limit\":2,\"remaining\":0,\
         \"retry_after_us\":null,\"reset_after_us\":86400000000,\"denied_by\":null,\"by\":\"embedded\"}\n"
    );
    assert_eq!(code(&output), 0);
    assert!(stderr(&output).contains("embedded engine"), "it says who decides");
    let output = tollgate(&["probe", "fixed-window 2/1d", "k", "--cost", "3"]);
    let line = &lines(&output)[0];
    assert_eq!((&line["retry_after_us"], &line["denied_by"]), (&json!("never"), &json!("fixed-window 2/1d")));
}

#[test]
fn peek_takes_nothing_and_reset_forgets() {
    let server = Server::start();
    let url = server.url();
    let remaining = |arguments: &[&str]| {
        let output = tollgate(&[&["probe", "token-bucket 5/1d", "k", "--url", &url], arguments].concat());
        assert_eq!(code(&output), 0, "{}", stderr(&output));
        lines(&output)[0]["remaining"].clone()
    };
    assert_eq!(remaining(&["--cost", "3"]), 2);
    assert_eq!(remaining(&["--op", "peek"]), 2);
    assert_eq!(remaining(&["--cost", "0"]), 2);
    assert_eq!(remaining(&["--op", "reset"]), 5);
    assert_eq!(remaining(&["--op", "peek"]), 5);
}

#[test]
fn a_table_on_request_shows_verdicts_and_waits() {
    let output = tollgate(&["probe", "token-bucket 1/1d", "k", "--count", "2", "--format", "table"]);
    let text = stdout(&output);
    let rows: Vec<Vec<&str>> = text.lines().map(|row| row.split_whitespace().collect()).collect();
    assert_eq!(rows[0][0], "decision");
    assert_eq!(rows[1][..6], ["allowed", "0", "/", "1", "-", "1d"]);
    assert_eq!(rows[2][0], "denied");
    assert!(!text.contains('\u{1b}'), "no colours where there is no terminal");
}

#[test]
fn bad_input_is_one_line_that_names_the_value_and_exits_with_two() {
    let port = free_port().to_string();
    let nobody = format!("redis://:s3cret@127.0.0.1:{port}");
    for (arguments, expected) in [
        (vec!["probe", "token-bucket 0/1s", "k"], "rate: expected a whole number from 1 to 2^53, got 0"),
        (vec!["probe", "token-bucket -5/1s", "k"], "got \"-5\""),
        (vec!["probe", "token-bucket 5/0s", "k"], "period: expected whole microseconds, from 1us to 71 years, got 0us"),
        (vec!["probe", "token-bucket 5/1x", "k"], "got \"1x\""),
        (vec!["probe", "token-bucket 99999999999999999999/1s", "k"], "got \"99999999999999999999\""),
        (vec!["probe", "sliding-window 9007199254740992/30d", "k"], "expected rate at most 3474999711"),
        (vec!["probe", "leaky 5/1s", "k"], "got \"leaky\""),
        (vec!["probe", "sliding-window 5/1s burst 9", "k"], "got \"burst\""),
        (vec!["probe", "sliding-log 20000/1m", "k"], "got 20000"),
        (vec!["probe", "token-bucket 5/1s", ""], "key: expected at least one byte"),
        (vec!["probe", "token-bucket 5/1s", "k", "--cost", "-1"], "'-1'"),
        (vec!["probe", "token-bucket 5/1s", "k", "--count", "many"], "'many'"),
        (vec!["probe", "token-bucket 5/1s", "k", "--op", "acquier"], "'acquier'"),
        (vec!["probe", "token-bucket 5/1s", "k", "--deadline", "soon"], "'soon'"),
        (vec!["probe", "token-bucket 5/1s", "k", "--url", &nobody], port.as_str()),
        (vec!["probe", "token-bucket 5/1s", "k", "--url", "http://:s3cret@localhost"], "http://***@localhost"),
        (vec!["probe", "token-bucket 5/1s"], "KEY"),
        (vec!["probe", "gcra", "5/10s", "k"], "not quoted"),
        (vec!["probe", "token-bucket 5/1s", "token-bucket 9/1s", "k"], "are named token-bucket-1s"),
        (vec!["probe", "sliding-log 5/1s", "k", "--op", "reserve"], "got sliding-log 5/1s"),
        (vec!["replay", "--rule", "token-bucket 5/1s", "no-such-file"], "no-such-file"),
        (vec!["frobnicate"], "'frobnicate'"),
    ] {
        let output = tollgate(&arguments);
        let told: Vec<_> =
            stderr(&output).lines().filter(|line| line.starts_with("error:")).map(str::to_owned).collect();
        assert_eq!(code(&output), 2, "{arguments:?}: {told:?}");
        assert_eq!(told.len(), 1, "{arguments:?}");
        assert!(told[0].contains(expected), "{arguments:?}: {told:?}");
        assert!(!stderr(&output).contains("s3cret"), "{arguments:?} shows a password");
        assert_eq!(stdout(&output), "");
    }
}

#[test]
fn a_wrong_password_is_reported_and_not_shown() {
    let server = Server::with(&["--requirepass", "right"]);
    let url = server.tcp_url().replace("redis://", "redis://:s3cret@");
    let output = tollgate(&["probe", "token-bucket 5/1s", "k", "--url", &url]);
    assert_eq!(code(&output), 2);
    assert!(stderr(&output).contains("refused the user or the password"), "{}", stderr(&output));
    assert!(!stderr(&output).contains("s3cret"));
    let right = server.tcp_url().replace("redis://", "redis://:right@");
    assert_eq!(
        code(&command(&["probe", "token-bucket 5/1s", "k"]).env("TOLLGATE_URL", right).output().expect("runs")),
        0
    );
}

/// A log's records by address, in the order of their times: what a replay must come to, by the oracle.
fn by_the_oracle(limit: &Limit, text: &str) -> (u64, u64) {
    let mut records: Vec<(u64, &str)> =
        text.lines().map(|line| (time(line), line.split(' ').next().expect("a host"))).collect();
    records.sort_by_key(|(t_us, _)| *t_us);
    let mut keys = BTreeMap::new();
    let (mut allowed, mut denied) = (0, 0);
    for (t_us, host) in records {
        let oracle = keys.entry(host).or_insert_with(|| oracle(limit));
        if oracle.acquire(1, t_us).allowed { allowed += 1 } else { denied += 1 }
    }
    (allowed, denied)
}

/// Some of the log, where all of it would only take longer.
fn beginning_of_the_log(lines: usize) -> String {
    std::fs::read_to_string(LOG).expect("the log").split_inclusive('\n').take(lines).collect()
}

/// `[17/May/2015:10:05:03 +0000]`; the log is all of May 2015, in UTC.
fn time(line: &str) -> u64 {
    const MAY_2015: u64 = 1_430_438_400;
    let stamp = line.split('[').nth(1).expect("a time");
    let number = |from: usize| stamp[from..from + 2].parse::<u64>().expect("two digits");
    assert_eq!(&stamp[2..12], "/May/2015:");
    (MAY_2015 + (number(0) - 1) * 86_400 + number(12) * 3600 + number(15) * 60 + number(18)) * 1_000_000
}

#[test]
fn a_replayed_access_log_gives_the_oracles_counts_on_both_engines() {
    let server = Server::start();
    let text = beginning_of_the_log(4_000);
    let mut log = tempfile::NamedTempFile::new().expect("a file");
    log.write_all(text.as_bytes()).expect("written");
    let log = log.path().to_str().expect("UTF-8");
    for rule in [
        "sliding-log 30/1m",
        "sliding-window 10/10s",
        "fixed-window 20/1m burst 40 start first-hit",
        "token-bucket 10/1m",
        "token-bucket 2/1s burst 8",
    ] {
        let (allowed, denied) = by_the_oracle(&limit(rule), &text);
        assert!(denied > 0, "{rule} denies nothing");
        for engine in [vec![], vec!["--url", &server.url(), "--deadline", "60s"]] {
            let replay = ["replay", "--rule", rule, "--input", "combined", "--summary", log];
            let output = tollgate(&[&replay[..], &engine].concat());
            assert_eq!(code(&output), 0, "{}", stderr(&output));
            let summary = &lines(&output)[0];
            assert_eq!(summary["records"], 4_000);
            assert_eq!(
                (&summary["allowed"], &summary["denied"]),
                (&json!(allowed), &json!(denied)),
                "{rule} {engine:?}"
            );
        }
    }
    let left: usize = tollgate::redis::cmd("DBSIZE").query(&mut server.connection()).expect("an answer");
    assert_eq!(left, 0, "a replay removes its keys");
}

#[test]
fn replaying_the_log_by_address_denies_87_requests() {
    let output = tollgate(&["replay", "--rule", "sliding-log 60/1m", "--input", "combined", LOG, "--summary"]);
    let printed = stdout(&output);
    let (totals, over_time) = printed.split_once(",\"over_time\":").expect("denials over time");
    assert_eq!(
        totals,
        "{\"records\":10000,\"allowed\":9913,\"denied\":87,\"unreadable\":0,\"out_of_order\":9448,\"keys\":1753,\
         \"busiest_denied\":[{\"key\":\"75.97.9.59\",\"denied\":72},{\"key\":\"130.237.218.86\",\"denied\":15}]"
    );
    let over_time: Value =
        serde_json::from_str(over_time.trim_end().strip_suffix('}').expect("the end")).expect("JSON");
    let hour = 3_600_000_000_u64;
    assert_eq!((&over_time["each_us"], &over_time["from_us"]), (&json!(3 * hour), &json!(1_431_853_200_000_000_u64)));
    let denied: Vec<_> = over_time["denied"].as_array().expect("counts").iter().filter_map(Value::as_u64).collect();
    assert_eq!(denied.iter().copied().filter(|denied| *denied > 0).collect::<Vec<_>>(), [48, 24, 15]);
    let table = tollgate(&["replay", "--rule", "sliding-log 60/1m", LOG, "--summary", "--format", "table"]);
    assert!(stdout(&table).contains("denied          87, 0.87 %\n"), "{}", stdout(&table));
    assert!(
        stdout(&table).contains("denied in each 3h from 2015-05-17T09:00:00Z, 13.52 % at most"),
        "{}",
        stdout(&table)
    );
}

#[test]
fn a_replayed_line_has_the_time_and_the_decision() {
    let input = b"{\"t_us\":1700000000000000,\"key\":\"u1\"}\n{\"t_us\":1700000000000000,\"op\":\"peek\",\"key\":\"u1\",\"cost\":9}\n";
    let output = with_input(&["replay", "--rule", "token-bucket 10/1m", "-"], input);
    assert_eq!(
        stdout(&output),
        "{\"t_us\":1700000000000000,\"op\":\"acquire\",\"key\":\"u1\",\"cost\":1,\"rule\":\"cli\",\"allowed\":true,\
         \"limit\":10,\"remaining\":9,\"retry_after_us\":null,\"reset_after_us\":6000000,\"denied_by\":null,\
         \"by\":\"embedded\"}\n\
         {\"t_us\":1700000000000000,\"op\":\"peek\",\"key\":\"u1\",\"cost\":9,\"rule\":\"cli\",\"allowed\":true,\
         \"limit\":10,\"remaining\":9,\"retry_after_us\":null,\"reset_after_us\":6000000,\"denied_by\":null,\
         \"by\":\"embedded\"}\n"
    );
    let again = with_input(&["replay", "--rule", "token-bucket 10/1m", "-"], &output.stdout);
    assert_eq!(stdout(&again), stdout(&output), "an output can be replayed");
}

#[test]
fn records_are_played_by_time_and_as_they_stand_on_request() {
    let file = tempfile::NamedTempFile::new().expect("a file");
    let input = "{\"t_us\":60000000,\"key\":\"k\"}\n{\"t_us\":0,\"key\":\"k\"}\n{\"t_us\":60000000,\"key\":\"k\"}\n";
    std::fs::write(&file, input).expect("written");
    let path = file.path().to_str().expect("UTF-8");
    let verdicts = |output: &Output| -> Vec<(u64, bool)> {
        let pair =
            |line: &Value| (line["t_us"].as_u64().expect("a time"), line["allowed"].as_bool().expect("a verdict"));
        lines(output).iter().map(pair).collect()
    };
    let rule = "fixed-window 1/1m";
    let sorted = tollgate(&["replay", "--rule", rule, path]);
    assert_eq!(verdicts(&sorted), [(0, true), (60_000_000, true), (60_000_000, false)]);
    let unsorted = tollgate(&["replay", "--rule", rule, path, "--unsorted"]);
    assert_eq!(verdicts(&unsorted), [(60_000_000, true), (0, false), (60_000_000, false)]);
    for (arguments, file) in [(&["-"][..], &sorted), (&["-", "--unsorted"], &unsorted)] {
        let stream = with_input(&[&["replay", "--rule", rule], arguments].concat(), input.as_bytes());
        assert_eq!(verdicts(&stream), verdicts(file));
    }
    let summary = with_input(&["replay", "--rule", rule, "-", "--summary"], input.as_bytes());
    assert_eq!(lines(&summary)[0]["out_of_order"], 1);
}

#[test]
fn an_unreadable_line_is_reported_by_number_and_skipped_or_ends_a_strict_replay() {
    let input = b"t_us,key,cost\n0,a,1\n0,a,-1\n0,a,1\n";
    let replay = ["replay", "--rule", "fixed-window 9/1m", "--input", "csv", "-"];
    let output = with_input(&[&replay[..], &["--summary"]].concat(), input);
    assert_eq!(code(&output), 0);
    let summary = &lines(&output)[0];
    assert_eq!((&summary["records"], &summary["unreadable"]), (&json!(2), &json!(1)));
    assert!(stderr(&output).contains("line 3: cost: expected"), "{}", stderr(&output));
    let output = with_input(&[&replay[..], &["--strict", "--unsorted"]].concat(), input);
    assert_eq!(code(&output), 2);
    assert!(stderr(&output).contains("line 3: cost: expected"), "{}", stderr(&output));
    assert_eq!(lines(&output).len(), 1, "what was decided before is not lost");
}

#[test]
fn several_rules_are_all_or_nothing_for_concurrent_tools() {
    let server = Server::start();
    let url = server.url();
    let (small, large) = ("fixed-window 300/1h start first-hit", "token-bucket 1000/30d burst 1000");
    let tools: Vec<_> = (0..8)
        .map(|_| {
            let arguments = ["probe", small, large, "k", "--count", "100", "--url", &url, "--deadline", "1m"];
            command(&arguments).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("the tool runs")
        })
        .collect();
    let outputs: Vec<_> = tools.into_iter().map(|tool| tool.wait_with_output().expect("the tool ends")).collect();
    let allowed = outputs.iter().flat_map(lines).filter(|line| line["allowed"] == true).count();
    assert_eq!(allowed, 300);
    let denied = outputs.iter().flat_map(lines).find(|line| line["allowed"] == false).expect("a denial");
    assert_eq!(denied["denied_by"], small);
    let left = tollgate(&["probe", large, "k", "--op", "peek", "--url", &url]);
    assert_eq!(lines(&left)[0]["remaining"], 700);
}

/// A trace of every operation, hand-checked: `tests/data/operations.jsonl`, and what a replay prints of it.
#[test]
fn a_trace_of_every_operation_replays_to_the_golden_lines() {
    let server = Server::start();
    let data = |name: &str| root().join("tests/data").join(name).display().to_string();
    let golden = std::fs::read_to_string(data("operations.golden.jsonl")).expect("the golden lines");
    for (engine, by) in [(vec![], "embedded"), (vec!["--url", &server.url()], "redis")] {
        let replay = ["replay", "--rule", "token-bucket 10/10s max-debt 5", &data("operations.jsonl")];
        let output = tollgate(&[&replay[..], &engine].concat());
        assert_eq!(code(&output), 0, "{}", stderr(&output));
        assert_eq!(stdout(&output), golden.replace("\"embedded\"", &format!("\"{by}\"")));
    }
    let left: usize = tollgate::redis::cmd("DBSIZE").query(&mut server.connection()).expect("an answer");
    assert_eq!(left, 0, "ids are removed too");
    let input = b"{\"t_us\":0,\"op\":\"settle\",\"key\":\"k\",\"id\":\"nobody\"}\n{\"t_us\":0,\"op\":\"settle\",\"key\":\"k\"}\n";
    let output = with_input(&["replay", "--rule", "token-bucket 5/1s", "-", "--summary"], input);
    assert_eq!(lines(&output)[0]["unreadable"], 2);
    assert!(
        stderr(&output).contains("line 1: id: ") && stderr(&output).contains("line 2: id: it is missing"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn an_interrupted_replay_says_so_and_removes_its_keys() {
    let server = Server::start();
    for (engine, signal) in [(vec![], "-INT"), (vec!["--url", &server.url()], "-TERM")] {
        let arguments = [&["replay", "--rule", "token-bucket 5/1d", "--unsorted", "-"], engine.as_slice()].concat();
        let [stdin, stdout, stderr] = [Stdio::piped(), Stdio::piped(), Stdio::piped()];
        let mut child = command(&arguments).stdin(stdin).stdout(stdout).stderr(stderr).spawn().expect("the tool runs");
        let mut input = child.stdin.take().expect("piped");
        input.write_all(b"{\"t_us\":0,\"key\":\"k\"}\n").expect("written");
        let mut decided = String::new();
        let mut reader = std::io::BufReader::new(child.stdout.take().expect("piped"));
        std::io::BufRead::read_line(&mut reader, &mut decided).expect("a decision");
        assert!(decided.contains("\"allowed\":true"), "{decided}");
        let killed = Command::new("kill").arg(signal).arg(child.id().to_string()).status().expect("kill runs");
        assert!(killed.success());
        // Its standard input stays open: only the signal ends it.
        let output = child.wait_with_output().expect("the tool ends");
        drop(input);
        assert_eq!(code(&output), 2);
        assert!(crate::support::tool::stderr(&output).contains("interrupted"));
    }
    let left: usize = tollgate::redis::cmd("DBSIZE").query(&mut server.connection()).expect("an answer");
    assert_eq!(left, 0);
}

#[test]
fn other_fields_of_a_log_can_be_counted() {
    let output = tollgate(&[
        "replay",
        "--rule",
        "fixed-window 100/1h",
        "--input",
        "combined",
        "--key",
        "method",
        "--summary",
        LOG,
    ]);
    let keys = lines(&output)[0]["keys"].as_u64();
    assert_eq!(keys, Some(4), "GET, HEAD, POST and OPTIONS");
}

#[test]
fn reset_forgets_every_key_of_one_rule_and_of_no_other() {
    let server = Server::start();
    let url = server.url();
    let mut redis = server.connection();
    let probe = |key: &str, id: &str| {
        let output = tollgate(&["probe", "token-bucket 5/1d", "fixed-window 9/1d", key, "--id", id, "--url", &url]);
        assert_eq!(code(&output), 0, "{}", stderr(&output));
    };
    for key in ["u1", "x:cli/y", "{z}"] {
        probe(key, "r1");
    }
    // Others' keys that look alike: another rule with this key, another prefix, a longer name.
    let others = [
        "tollgate:{x:cli/y}:other/token-bucket-1d",
        "t:{u1}:cli/token-bucket-1d",
        "tollgate:{u1}:xcli/token-bucket-1d",
        "tollgate:{u1}:clip/token-bucket-1d",
    ];
    for key in others {
        let () = tollgate::redis::cmd("SET").arg(key).arg("v").query(&mut redis).expect("set");
    }
    let mut filler = tollgate::redis::pipe();
    for n in 0..3000 {
        filler.cmd("SET").arg(format!("filler:{n}")).arg("v").ignore();
    }
    filler.exec(&mut redis).expect("set");
    let output = tollgate(&["reset", "--rule", "cli", "--url", &url]);
    assert_eq!((stdout(&output).as_str(), code(&output)), ("{\"rule\":\"cli\",\"forgotten\":9}\n", 0));
    let left: Vec<String> = tollgate::redis::cmd("KEYS").arg("t*").query(&mut redis).expect("keys");
    assert_eq!(left.len(), others.len(), "{left:?}");
    let output = tollgate(&["reset", "--rule", "a b", "--url", &url]);
    assert!(code(&output) == 2 && stderr(&output).contains("got \"a b\""), "{}", stderr(&output));
}

#[test]
fn inspect_explains_a_state_and_reports_a_missing_one() {
    let server = Server::start();
    let url = server.url();
    let inspect = |shape: &str| tollgate(&["inspect", "token-bucket 5/10s", "k", "--url", &url, "--format", shape]);
    let none = &lines(&inspect("jsonl"))[0];
    assert_eq!((&none["exists"], &none["state"], &none["ttl_ms"]), (&json!(false), &Value::Null, &Value::Null));
    tollgate(&["probe", "token-bucket 5/10s", "k", "--count", "2", "--url", &url]);
    let some = &lines(&inspect("jsonl"))[0];
    assert_eq!(some["redis_key"], "tollgate:{k}:cli/token-bucket-10s");
    assert_eq!((&some["remaining"], &some["state"]["state_capacity"]), (&json!(3), &json!(5)));
    assert!(some["ttl_ms"].as_u64().is_some_and(|ttl| (18_000..=21_000).contains(&ttl)), "{some}");
    let table = stdout(&inspect("table"));
    assert!(table.contains("3 of 5 units") && table.contains("tollgate:{k}:cli/token-bucket-10s"), "{table}");
    let mut connection = server.connection();
    let () = tollgate::redis::cmd("SET")
        .arg("tollgate:{k}:cli/token-bucket-10s")
        .arg("junk")
        .query(&mut connection)
        .expect("set");
    let output = inspect("table");
    assert_eq!(code(&output), 2);
    assert!(stderr(&output).contains("a reset repairs it"), "{}", stderr(&output));
}
