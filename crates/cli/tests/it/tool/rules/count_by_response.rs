//! Rules that count requests by the status of their response, over recorded traffic.

use super::*;
use crate::support::tool::{code, lines, stderr, stdout, tollgate, with_input};

const LOGIN: &str = r#"
[[rule]]
name = "login"
match = { path = "/login" }
key = "ip"
limits = ["fixed-window 2/1h start first-hit"]
count = 401
"#;

/// Whether each of these lines is allowed, by this rule.
fn allowed(rules: &str, log: &str, more: &[&str]) -> Vec<bool> {
    let output =
        with_input(&[&["replay", "--rules", rules, "--format", "jsonl"], more, &["-"]].concat(), log.as_bytes());
    assert_eq!(code(&output), 0, "{}\n{log}", stderr(&output));
    lines(&output).iter().map(|line| line["allowed"].as_bool().expect("yes or no")).collect()
}

fn record(ms: u64, more: &str) -> String {
    let t_us = 1_700_000_000_000_000 + ms * 1000;
    format!("{{\"t_us\": {t_us}, \"attrs\": {{\"ip\": \"192.0.2.1\", \"path\": \"/login\"}}{more}}}\n")
}

/// What each format has as status: with it the second request finds what the first one gave back.
#[test]
fn statuses_are_read_from_each_format() {
    let directory = directory();
    let rules = file(&directory, "login.toml", &LOGIN.replace("window 2/", "window 1/"));
    let text = |number: u32, status: &str| match number {
        0 => format!("192.0.2.1 - - [17/May/2015:10:05:03 +0000] \"GET /login HTTP/1.1\" {status} 203 \"-\" \"curl\""),
        1 => format!(
            "192.0.2.1:33317 [06/Feb/2009:12:14:14.655] http static/srv1 10/0/30/69/0 {status} 2750 - - ---- 1/1/1/1/0 0/0 \"GET /login HTTP/1.1\""
        ),
        2 => format!(
            "{{\"msec\": \"1431857103.250\", \"remote_addr\": \"192.0.2.1\", \"request\": \"GET /login HTTP/1.1\", \"status\": \"{status}\"}}"
        ),
        3 => format!(
            "{{\"ts\": 1431857103.25, \"logger\": \"http.log.access\", \"request\": {{\"remote_ip\": \"192.0.2.1\", \"method\": \"GET\", \"uri\": \"/login\"}}, \"status\": {status}}}"
        ),
        4 => format!(
            "{{\"StartUTC\": \"2015-05-17T10:05:03Z\", \"ClientHost\": \"192.0.2.1\", \"RequestMethod\": \"GET\", \"RequestPath\": \"/login\", \"DownstreamStatus\": {status}}}"
        ),
        5 => format!(
            "#Fields: date time c-ip cs-method cs-uri-stem sc-status\n2015-05-17 10:05:03 192.0.2.1 GET /login {status}"
        ),
        6 => format!(
            "[2015-05-17T10:05:03.000Z] \"GET /login HTTP/1.1\" {status} - 0 11 0 0 \"192.0.2.1\" \"curl\" \"-\" \"-\" \"-\""
        ),
        7 => format!(
            "http 2015-05-17T10:05:03.186641Z app/lb/1 192.0.2.1:2817 10.0.0.1:80 0.000 0.000 0.000 {status} 200 34 366 \"GET http://x:80/login HTTP/1.1\" \"curl\" - -"
        ),
        8 => format!(
            "2015-05-17T10:05:03.186641Z lb 192.0.2.1:2817 10.0.0.1:80 0.000 0.000 0.000 {status} 200 0 29 \"GET http://x:80/login HTTP/1.1\" \"curl\" - -"
        ),
        _ => format!(
            "2015-05-17T10:05:03.186641+00:00 heroku[router]: at=info method=GET path=\"/login\" host=x fwd=\"192.0.2.1\" dyno=web.1 connect=0ms service=0ms status={status} bytes=9"
        ),
    };
    for number in 0..=9 {
        for (first, second) in [("200", true), ("401", false)] {
            let log = format!("{}\n{}\n", text(number, first), text(number, "200"));
            assert_eq!(allowed(&rules, &log, &[]), [true, second], "{log}");
        }
    }
    // Any other says where it is.
    for (first, second) in [("200", true), ("401", false)] {
        let log = format!("2015-05-17T10:05:03Z 192.0.2.1 /login is {first}\n").repeat(2);
        let fields = ["--fields", "time=1,ip=2,path=3,status=5"];
        assert_eq!(allowed(&rules, &log, &fields), [true, second], "{log}");
        let csv = format!(
            "t_us,attr.ip,attr.path,status\n1700000000000000,192.0.2.1,/login,{first}\n1700000000000001,192.0.2.1,/login,200\n"
        );
        assert_eq!(allowed(&rules, &csv, &["--input", "csv"]), [true, second], "{csv}");
    }
}

#[test]
fn a_request_counts_until_it_has_its_response() {
    let directory = directory();
    let rules = file(&directory, "login.toml", LOGIN);
    let of = |ms: u64, status: u16, seconds: &str| {
        record(ms, &format!(", \"status\": {status}, \"request_time\": {seconds}"))
    };
    // The first two are still under way when the third comes, and have ended before the fourth.
    let log = of(0, 200, "0.010") + &of(5, 302, "0.010") + &of(9, 200, "0.001") + &of(15, 401, "1") + &of(16, 200, "1");
    assert_eq!(allowed(&rules, &log, &[]), [true, true, false, true, true]);
    // Of these, one stays charged: beside it there is room for one more at a time.
    let log = of(0, 401, "0.001") + &of(10, 200, "0.010") + &of(11, 200, "0.001") + &of(30, 200, "0.001");
    assert_eq!(allowed(&rules, &log, &[]), [true, true, false, true]);
    // A real Redis decides alike, and nothing is left on it.
    let server = Server::start();
    assert_eq!(allowed(&rules, &log, &["--url", &server.url()]), [true, true, false, true]);
    let keys: Vec<String> = tollgate::redis::cmd("KEYS").arg("*").query(&mut server.connection()).expect("keys");
    assert!(keys.is_empty(), "{keys:?}");

    // Without statuses all count, which is said.
    let log = record(0, ", \"status\": null") + &record(1, "") + &record(2, "");
    let output = with_input(&["replay", "--rules", &rules, "--summary", "-"], log.as_bytes());
    assert!(stderr(&output).contains("count can't be replayed: 2 requests without a status"), "{}", stderr(&output));
    let bad = with_input(&["replay", "--rules", &rules, "--strict", "-"], record(0, ", \"status\": 2000").as_bytes());
    assert!(stderr(&bad).contains("status: expected an HTTP status, such as 200, got \"2000\""), "{}", stderr(&bad));
}

#[test]
fn explanations_differences_and_suggestions_know_it() {
    let directory = directory();
    let rules = file(&directory, "login.toml", LOGIN);
    let all = file(&directory, "all.toml", &LOGIN.replace("count = 401\n", ""));
    let explain = ["rules", "explain", &rules, "--path", "/login", "--ip", "192.0.2.1"];
    let explained = stdout(&tollgate(&[&explain[..], &["--format", "table"]].concat()));
    let line = "counts     if its response has status 401; otherwise it is given back";
    assert!(explained.lines().any(|shown| shown.trim_end() == line), "{explained}");
    let json = lines(&tollgate(&[&explain[..], &["--format", "jsonl"]].concat()));
    assert_eq!(json[0]["count"], json!("401"));

    let log: String = (0..5).map(|at| record(10 * at, ", \"status\": 200, \"request_time\": 0.001")).collect();
    let records = file(&directory, "log.jsonl", &log);
    let output = tollgate(&["rules", "diff", &all, &rules, &records, "--summary", "--format", "jsonl"]);
    let totals = lines(&output);
    assert_eq!(
        (&totals[0]["newly_allowed"], &totals[0]["newly_denied"]),
        (&json!(3), &json!(0)),
        "{}",
        stderr(&output)
    );
    let suggest = ["suggest", "--rules", &rules, "--deny-at-most", "0%", "--format", "jsonl", &records];
    let output = tollgate(&suggest);
    assert!(
        stderr(&output).contains("a response that its rule doesn't count"),
        "{}{}",
        stdout(&output),
        stderr(&output)
    );
}
