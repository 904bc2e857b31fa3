//! Load and its audit: short runs against a real server, and one that really admits too much.

use std::process::Stdio;
use std::time::Duration;

use serde_json::{Value, json};
use tollgate::redis::{Connection, cmd};
use tollgate_testing::polling::block_until;
use tollgate_testing::redis_server::{Server, free_port};

use crate::support::tool::{code, command, lines, stderr, stdout, tollgate};

/// A run's report. Each call is answered, however busy the machine is: where it stood still for half a second, Redis is
/// taken for silent, and the run is made again.
fn load(arguments: &[&str]) -> Value {
    let run = || tollgate(&[&["load", "--format", "jsonl", "--deadline", "30s"], arguments].concat());
    let all_answered = |output: &std::process::Output| !stderr(output).contains("were not answered");
    let output = (0..4).map(|_| run()).find(all_answered).unwrap_or_else(run);
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
        &["token-bucket 20/1s"][..],
        &["fixed-window 20/200ms"],
        &["sliding-window 20/1s"],
        &["sliding-log 20/1s"],
        &["token-bucket 20/1s burst 5"],
        &["token-bucket 20/1s", "fixed-window 50/1d"],
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
fn a_rate_that_was_reached_is_the_rate_that_is_reported() {
    let report = load(&["gcra 50/1s", "--rate", "100", "--count", "10", "--warmup", "0s"]);
    assert_eq!(report["planned_seconds"], 0.1);
    // Nine tenths of the time lie between the first call and the last, or more on a busy machine.
    assert!(report["per_second"].as_f64().is_some_and(|rate| rate > 0.0 && rate <= 100.0), "{report}");
    let report = load(&["gcra 50/1s", "--count", "1", "--warmup", "0s"]);
    assert_eq!(report["per_second"], Value::Null, "a single answer has no rate");
}

#[test]
fn permits_are_released_once_the_call_is_answered() {
    let server = Server::start();
    for rules in [&["concurrency 1 ttl 1h"][..], &["concurrency 1 ttl 1h", "gcra 1000/1s"]] {
        let run = ["--callers", "1", "--keys", "hot", "--count", "50", "--warmup", "50ms", "--url", &server.url()];
        let report = load(&[rules, &run].concat());
        let counts = ["allowed", "denied", "unreleased"].map(|name| number(&report, name));
        assert_eq!(counts, [50, 0, 0], "{report}");
    }
    assert_eq!(size(&mut server.connection()), 0);
    assert_eq!(load(&["gcra 5/1s", "--count", "5", "--warmup", "0s"])["unreleased"], Value::Null);
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
    let output =
        tollgate(&["load", "token-bucket 5/1d", "--count", "50", "--warmup", "0s", "--seed", "1", "--key-count", "3"]);
    let text = stdout(&output);
    let begins = "{\"rules\":[\"token-bucket 5/1d\"],\"by\":\"embedded\",\"mode\":\"open\",\"rate\":1000,\"keys\":\"uniform\",\
                  \"key_count\":3,\"zipf_exponent\":null,\"cost\":1,\"seed\":1,\"sent\":50,\"unsent\":0,\
                  \"answered\":50,\"allowed\":15,\"denied\":35,\
                  \"errors\":{\"deadline\":0,\"unreachable\":0,\"other\":0},\"longest_us\":";
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
        "latency_histogram",
        "up_to_us",
        "calls",
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
    let output = tollgate(&[
        "load",
        "token-bucket 5/1s",
        "sliding-log 90/1m",
        "--count",
        "50",
        "--warmup",
        "0s",
        "--format",
        "table",
    ]);
    let text = stdout(&output);
    for words in [
        "token-bucket 5/1s",
        "sliding-log 90/1m",
        "open loop, 1000 calls a second; 10000 keys, uniform",
        "50 of 50 calls",
        "50 allowed, 0 denied",
        "p99.9",
        "sent late",
        "\ntook up to  ",
        "0 over-admissions, 0 false denials",
        "50 admitted; an exact limiter, about 50",
    ] {
        assert!(text.contains(words), "{words} in {text}");
    }
    assert!(!text.contains('\u{1b}'), "no colours where there is no terminal");
}

#[test]
fn every_call_is_in_the_histogram_of_latencies() {
    let report = load(&["gcra 50/1s", "--rate", "500", "--count", "200", "--warmup", "0s"]);
    let buckets = report["latency_histogram"].as_array().expect("buckets");
    let calls: u64 = buckets.iter().map(|bucket| number(bucket, "calls")).sum();
    assert_eq!(calls, number(&report, "answered"), "{report}");
    let (first, last) = (&buckets[0], &buckets[buckets.len() - 1]);
    assert!(number(first, "up_to_us") >= number(&report["latency_us"], "min"), "{report}");
    assert!(number(last, "up_to_us") >= number(&report["latency_us"], "max"), "{report}");
    assert!(number(first, "calls") > 0 && number(last, "calls") > 0, "{report}");
}

#[test]
fn the_audit_reports_what_it_cannot_judge() {
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

/// Keys that vanish let callers in anew. Nothing refills within the run, so its pace doesn't matter, and a single
/// caller's calls each are one of a script.
#[test]
fn a_redis_that_loses_its_keys_is_found_to_over_admit() {
    let server = Server::start();
    let calls = ["--callers", "1", "--count", "3000", "--warmup", "0s", "--url", &server.url()];
    let arguments = [&["load", "gcra 10/1d", "--keys", "hot"][..], &calls].concat();
    let run = command(&arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the tool runs");
    // The tool calls some 70 scripts before the load, whose key is used up after ten.
    let called = |count: u64| server.commands().get("evalsha").is_some_and(|calls| calls.0 >= count);
    block_until("300 calls", || called(300));
    cmd("FLUSHALL").exec(&mut server.connection()).expect("flushed");
    let output = run.wait_with_output().expect("the tool ends");
    let report = &lines(&output)[0];
    assert_eq!(code(&output), 1, "{report}");
    assert_eq!(number(&report["audit"], "over_admissions"), 10, "{report}");
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
        (&["gcra 5/1s", "--zipf-exponent", "1"], "--zipf-exponent: needs --keys zipf, got --keys uniform"),
        (&["gcra 5/1s", "--keys", "hot", "--key-count", "5"], "--key-count: needs --keys uniform or zipf"),
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

/// A user that may read and not write: the run begins, and every call of it fails.
#[test]
fn a_run_without_an_answer_is_reported_and_exits_with_two() {
    let server = Server::start();
    let url = server.user("reader", "~* +hello +evalsha_ro +eval_ro +get +pttl +time +scan +unlink +dbsize");
    for how in [&["--rate", "1000"][..], &["--callers", "2"]] {
        let run = ["load", "gcra 5/1s", "--count", "30", "--warmup", "20ms", "--url", &url];
        let output = tollgate(&[&run[..], how].concat());
        assert_eq!(code(&output), 2);
        let told = stderr(&output);
        assert!(told.starts_with("error: 30 of 30 calls were not answered: 30 others; first: "), "{told}");
        assert!(told.contains("; in the warm-up ") && told.lines().count() == 1, "{told}");
        assert!(!told.contains("lower --"), "fewer calls would fare no better: {told}");
        let report = &lines(&output)[0];
        assert_eq!((number(report, "sent"), number(report, "answered")), (30, 0), "{report}");
        assert_eq!(report["errors"]["other"], 30);
        assert!(number(&report["warmup"], "errors") > 0, "{report}");
        assert_eq!((&report["latency_us"], &report["per_second"]), (&Value::Null, &Value::Null));
    }
}

/// A server without memory writes nothing, until it has some.
#[test]
fn calls_admitted_by_a_policy_are_reported_apart_and_do_not_fail_the_audit() {
    let server = Server::start();
    let (mut redis, url) = (server.connection(), server.url());
    for (policy, stand_in) in [("open", "policy"), ("local", "local"), ("closed", "")] {
        let limits = ["load", "gcra 1000/1s", "--keys", "hot", "--warmup", "0s", "--duration", "1m", "--rate", "500"];
        let arguments = [&limits[..], &["--on-error", policy, "--url", &url]].concat();
        server.reset_command_counts();
        let run = command(&arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the tool runs");
        let counts = || server.commands().get("evalsha").copied().unwrap_or_default();
        block_until("some calls", || counts().0 >= 50);
        // The first ones may have failed, until the script was loaded.
        let (_, before) = counts();
        cmd("CONFIG").arg(&["SET", "maxmemory", "1"]).exec(&mut redis).expect("set");
        block_until("calls without memory", || counts().1 >= before + 20);
        cmd("CONFIG").arg(&["SET", "maxmemory", "0"]).exec(&mut redis).expect("set");
        let (after, _) = counts();
        block_until("calls with memory again", || counts().0 >= after + 20);
        interrupt(&run);
        let output = run.wait_with_output().expect("the tool ends");
        let report = &lines(&output)[0];
        assert!(number(&report["audit"], "left_out") > 0, "{report}");
        assert_eq!(report["audit"]["total"], report["audit"]["calls"], "{report}");
        assert_eq!(report["audit"]["over_admissions"], 0, "{report}");
        let sent = number(report, "sent");
        assert_eq!(report["by"], "redis", "{report}");
        if stand_in.is_empty() {
            assert_eq!((code(&output), &report["answered_by"]), (2, &Value::Null), "{report}");
            let told = stderr(&output);
            assert!(told.contains(&format!(" of {sent} calls were not answered: ")), "{told}");
        } else {
            assert_eq!((code(&output), stderr(&output).as_str()), (0, ""), "{report}");
            let by = &report["answered_by"];
            assert!(number(by, stand_in) > 0 && number(by, "redis") > 0, "{report}");
            assert_eq!(number(by, stand_in) + number(by, "redis"), sent, "{report}");
            assert_eq!(number(by, stand_in), number(&report["audit"], "left_out"), "{report}");
        }
    }
}

/// As Ctrl-C does.
fn interrupt(run: &std::process::Child) {
    let done = std::process::Command::new("kill").arg("-INT").arg(run.id().to_string()).status();
    assert!(done.expect("kill runs").success());
}

#[cfg(unix)]
#[test]
fn calls_past_their_deadline_are_counted_and_a_lower_rate_is_advised() {
    let server = Server::start();
    let mut redis = server.connection();
    let arguments =
        ["load", "gcra 5/1s", "--warmup", "0s", "--duration", "1m", "--deadline", "100ms", "--url", &server.url()];
    let run = command(&arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the tool runs");
    block_until("100 keys", || size(&mut redis) >= 100);
    server.signal("-STOP");
    std::thread::sleep(Duration::from_millis(300));
    interrupt(&run);
    std::thread::sleep(Duration::from_millis(300));
    server.signal("-CONT");
    let output = run.wait_with_output().expect("the tool ends");
    let (told, report) = (stderr(&output), &lines(&output)[0]);
    assert_eq!(code(&output), 2, "{told}");
    assert!(told.contains(" past the deadline") && told.trim_end().ends_with("lower --rate"), "{told}");
    assert!(number(&report["errors"], "deadline") > 0, "{report}");
    no_fault(report);
    assert_eq!(size(&mut redis), 0, "once it answers again, its keys are removed");
}

#[cfg(unix)]
#[test]
fn an_interrupted_run_still_reports_and_removes_its_keys() {
    let server = Server::start();
    let mut redis = server.connection();
    let arguments = ["load", "gcra 5/1s", "--warmup", "0s", "--duration", "1m", "--url", &server.url()];
    let run = command(&arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the tool runs");
    block_until("100 keys", || size(&mut redis) >= 100);
    interrupt(&run);
    let output = run.wait_with_output().expect("the tool ends");
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    let report = &lines(&output)[0];
    no_fault(report);
    assert!((50..60_000).contains(&number(report, "answered")), "{report}");
    assert_eq!(size(&mut redis), 0);
}
