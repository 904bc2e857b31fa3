//! Load and its audit: short runs against a real server, and one that really admits too much.

use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tollgate::redis::{Connection, cmd};

use crate::server::{Server, free_port};
use crate::tool::{code, command, lines, stderr, stdout, tollgate};

/// A run's report.
fn load(arguments: &[&str]) -> Value {
    let output = tollgate(&[&["load", "--format", "jsonl"], arguments].concat());
    assert_eq!(code(&output), 0, "{}{}", stdout(&output), stderr(&output));
    let [report] = lines(&output).try_into().expect("one object");
    report
}

fn number(report: &Value, name: &str) -> u64 {
    report[name].as_u64().unwrap_or_else(|| panic!("{name} in {report}"))
}

fn no_fault(report: &Value) {
    let audit = &report["audit"];
    assert_eq!((&audit["over_admissions"], &audit["false_denials"]), (&json!(0), &json!(0)), "{report}");
    assert!(number(audit, "calls") >= number(report, "answered"), "{report}");
}

/// How many keys are left.
fn size(redis: &mut Connection) -> u64 {
    cmd("DBSIZE").query(redis).expect("a number")
}

#[test]
fn the_audit_finds_nothing_wrong_with_any_limit_on_redis() {
    let server = Server::start();
    for rules in [
        &["gcra 20/1s"][..],
        &["fixed-window 20/200ms"],
        &["sliding-window 20/1s"],
        &["sliding-log 20/1s"],
        &["token-bucket 20/1s burst 5"],
        &["gcra 20/1s", "fixed-window 50/1d"],
    ] {
        for keys in [&["--keys", "uniform", "--key-count", "50"][..], &["--keys", "hot"]] {
            let report =
                load(&[rules, keys, &["--warmup", "100ms", "--duration", "500ms", "--url", &server.url()]].concat());
            no_fault(&report);
            assert_eq!(report["by"], "redis");
            assert_eq!(report["rules"], json!(rules));
            assert_eq!((number(&report, "sent"), number(&report, "unsent")), (500, 0), "{report}");
            assert_eq!(number(&report, "allowed") + number(&report, "denied"), number(&report, "answered"));
            if keys[1] == "hot" {
                assert!(number(&report, "denied") > 0, "{report}");
                assert!(number(&report["audit"], "exact_admitted") >= 5, "{report}");
            }
        }
    }
    assert_eq!(size(&mut server.connection()), 0, "every run removes its keys");
}

#[test]
fn callers_ask_again_as_soon_as_they_are_answered() {
    let server = Server::start();
    let zipf = ["--keys", "zipf", "--key-count", "100", "--zipf-exponent", "1.2"];
    let run = ["gcra 50/1s", "--callers", "4", "--warmup", "100ms", "--duration", "300ms", "--url", &server.url()];
    let report = load(&[&run[..], &zipf].concat());
    no_fault(&report);
    assert_eq!((&report["mode"], &report["callers"], &report["late"]), (&json!("closed"), &json!(4), &Value::Null));
    assert_eq!((&report["keys"], &report["zipf_exponent"]), (&json!("zipf"), &json!(1.2)));

    let report = load(&["gcra 50/1s", "--callers", "4", "--count", "123", "--warmup", "0s", "--url", &server.url()]);
    assert_eq!(number(&report, "sent"), 123);
}

#[test]
fn the_embedded_engine_is_loaded_where_no_redis_is_named() {
    for how in [&["--rate", "2000"][..], &["--callers", "2"]] {
        let report =
            load(&[&["sliding-log 5/1s", "--keys", "hot", "--warmup", "0s", "--duration", "300ms"], how].concat());
        no_fault(&report);
        assert_eq!(report["by"], "embedded");
        assert!(number(&report, "denied") > 0);
    }
}

#[test]
fn the_same_seed_draws_the_same_keys() {
    let run = || {
        let zipf = ["--keys", "zipf", "--key-count", "20", "--seed", "7"];
        load(&[&["sliding-log 20/1d", "--count", "300", "--warmup", "0s", "--rate", "2000"], &zipf[..]].concat())
    };
    let (one, other) = (run(), run());
    assert_eq!(one["seed"], 7);
    assert!(number(&one, "denied") > 0);
    assert_eq!(one["allowed"], other["allowed"]);
}

#[test]
fn a_report_has_the_names_and_the_order_that_programs_rely_on() {
    let output = tollgate(&["load", "gcra 5/1d", "--count", "50", "--warmup", "0s", "--seed", "1", "--key-count", "3"]);
    let text = stdout(&output);
    let begins = "{\"rules\":[\"gcra 5/1d\"],\"by\":\"embedded\",\"mode\":\"open\",\"rate\":1000,\"keys\":\"uniform\",\
                  \"key_count\":3,\"zipf_exponent\":null,\"cost\":1,\"seed\":1,\"sent\":50,\"unsent\":0,\
                  \"answered\":50,\"allowed\":15,\"denied\":35,\
                  \"errors\":{\"deadline\":0,\"unreachable\":0,\"other\":0},\"seconds\":";
    assert!(text.starts_with(begins), "{text}");
    let mut rest = text.as_str();
    for name in [
        "per_second",
        "late",
        "lateness_us",
        "latency_us",
        "min",
        "p50",
        "p90",
        "p99",
        "p99_9",
        "max",
        "mean",
        "audit",
        "calls",
        "keys",
        "admitted",
        "exact_admitted",
        "over_admissions",
        "false_denials",
    ] {
        let at = rest.find(&format!("\"{name}\":")).unwrap_or_else(|| panic!("{name} in its place in {text}"));
        rest = &rest[at..];
    }
}

#[test]
fn a_table_on_request_shows_rates_latencies_and_the_audit() {
    let output =
        tollgate(&["load", "gcra 5/1s", "sliding-log 90/1m", "--count", "50", "--warmup", "0s", "--format", "table"]);
    let text = stdout(&output);
    for words in [
        "gcra 5/1s",
        "sliding-log 90/1m",
        "open loop, 1000 calls a second; 10000 keys, uniform",
        "50 of 50 calls",
        "50 allowed, 0 denied",
        "p99.9",
        "sent late",
        "0 over-admissions, 0 false denials",
        "50 admitted; an exact limiter, about 50",
    ] {
        assert!(text.contains(words), "{words} in {text}");
    }
    assert!(!text.contains('\u{1b}'), "no colours where there is no terminal");
}

#[test]
fn what_the_audit_cannot_judge_is_said() {
    for (arguments, why) in [
        (["concurrency 5 ttl 1s", "--cost=1"], "permits"),
        (["fixed-window 5/1s start first-hit", "--cost=1"], "windows start"),
        (["gcra 5/1s", "--no-audit"], "--no-audit"),
    ] {
        let report = load(&[&arguments[..], &["--count", "20", "--warmup", "0s"]].concat());
        assert_eq!(report["audit"], Value::Null);
        assert!(report["no_audit"].as_str().is_some_and(|told| told.contains(why)), "{report}");
    }
}

/// Keys that vanish let callers in anew.
#[test]
fn a_redis_that_loses_its_keys_is_found_to_over_admit() {
    let server = Server::start();
    let mut redis = server.connection();
    let arguments =
        ["load", "gcra 10/1s", "--keys", "hot", "--warmup", "0s", "--count", "1000", "--url", &server.url()];
    let run = command(&arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the tool runs");
    // Once the key has been used up for some time.
    let used_up = |redis: &mut Connection| {
        let calls = cmd("INFO").arg("commandstats").query::<String>(redis).expect("statistics");
        let line = calls.lines().find_map(|line| line.strip_prefix("cmdstat_evalsha:calls="));
        line.and_then(|line| line.split(',').next()?.parse::<u64>().ok()).is_some_and(|calls| calls > 300)
    };
    let began = Instant::now();
    while !used_up(&mut redis) && began.elapsed() < Duration::from_secs(10) {
        std::thread::sleep(Duration::from_millis(10));
    }
    cmd("FLUSHALL").exec(&mut redis).expect("flushed");
    let output = run.wait_with_output().expect("the tool ends");
    let report = &lines(&output)[0];
    assert_eq!(code(&output), 1, "{report}");
    assert!((1..=10).contains(&number(&report["audit"], "over_admissions")), "{report}");
    assert_eq!(number(&report["audit"], "false_denials"), 0, "{report}");
}

#[test]
fn a_redis_elsewhere_is_refused_unless_it_is_asked_for() {
    let output = tollgate(&["load", "gcra 5/1s", "--url", "redis://:s3cret@redis.invalid"]);
    assert_eq!(code(&output), 2);
    assert_eq!(
        stderr(&output),
        "error: url: expected a Redis on this machine (or --remote, to load another), got redis.invalid:6379\n"
    );
    let output = tollgate(&["load", "gcra 5/1s", "--url", "redis://:s3cret@redis.invalid", "--remote"]);
    assert_eq!(code(&output), 2);
    assert!(!stderr(&output).contains("--remote") && !stderr(&output).contains("s3cret"), "{}", stderr(&output));
}

#[test]
fn misuse_is_one_line_and_exits_with_two() {
    let nobody = format!("redis://127.0.0.1:{}", free_port());
    for (arguments, expected) in [
        (&["gcra 5/1x"][..], "got \"1x\""),
        (&["gcra 5/1s", "--rate", "0"], "'0' for '--rate <N>': expected a whole number from 1 to 10000000"),
        (&["gcra 5/1s", "--rate", "-1"], "from 1 to 10000000"),
        (&["gcra 5/1s", "--rate", "5", "--callers", "5"], "cannot be used with"),
        (&["gcra 5/1s", "--callers", "0"], "--callers"),
        (&["gcra 5/1s", "--keys", "round"], "'round'"),
        (&["gcra 5/1s", "--zipf-exponent", "-1"], "'-1' for '--zipf-exponent <S>': expected a number from 0 to 10"),
        (&["gcra 5/1s", "--zipf-exponent", "NaN"], "from 0 to 10"),
        (&["gcra 5/1s", "--zipf-exponent", "1"], "--zipf-exponent: expected --keys zipf beside it, got uniform"),
        (&["gcra 5/1s", "--keys", "hot", "--key-count", "5"], "--key-count: expected --keys uniform or zipf"),
        (&["gcra 5/1s", "--duration", "0s"], "expected more than 0s"),
        (&["gcra 5/1s", "--duration", "99999d"], "at most 30d"),
        (&["gcra 5/1s", "--count", "0"], "'0' for '--count <N>': expected a whole number from 1 to 9007199254740991"),
        (&[], "<RULE>..."),
        (&["gcra 5/1s", "--url", &nobody], "no connection"),
    ] {
        let output = tollgate(&[&["load"], arguments].concat());
        assert_eq!(code(&output), 2, "{arguments:?}");
        let told = stderr(&output);
        assert!(told.contains(expected) && told.lines().count() == 1, "{arguments:?}: {told}");
    }
}

#[cfg(unix)]
#[test]
fn an_interrupted_run_still_reports_and_removes_its_keys() {
    let server = Server::start();
    let mut redis = server.connection();
    let arguments = ["load", "gcra 5/1s", "--warmup", "0s", "--duration", "1m", "--url", &server.url()];
    let run = command(&arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the tool runs");
    let began = Instant::now();
    while size(&mut redis) < 100 && began.elapsed() < Duration::from_secs(10) {
        std::thread::sleep(Duration::from_millis(10));
    }
    let done = std::process::Command::new("kill").arg("-INT").arg(run.id().to_string()).status();
    assert!(done.expect("kill runs").success());
    let output = run.wait_with_output().expect("the tool ends");
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    let report = &lines(&output)[0];
    no_fault(report);
    assert!((50..60_000).contains(&number(report, "answered")), "{report}");
    assert_eq!(size(&mut redis), 0);
}
