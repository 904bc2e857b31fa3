//! Permits in a replay: held for as long as the log says that requests took, and otherwise said not to be replayed.

use super::*;
use crate::support::tool::{code, lines, stderr, stdout, with_input};

const JOBS: &str = "[[rule]]\nname = \"jobs\"\nkey = \"ip\"\nlimits = [\"concurrency 2 ttl 10s\"]\n";

/// A line of nginx, which writes it when the request has ended: at this second of a minute.
fn line(second: u32, more: &str) -> String {
    format!(
        "192.0.2.1 - - [17/May/2015:10:05:{second:02} +0000] \"GET / HTTP/1.1\" 200 5 \"-\" \"9.999 rt=9.999\"{more}\n"
    )
}

fn allowed(output: &std::process::Output) -> Vec<bool> {
    lines(output).iter().map(|line| line["allowed"] == true).collect()
}

/// One request after the other, at most one at a time: none is over a limit of two.
#[test]
fn a_request_holds_its_permit_for_as_long_as_it_took() {
    let (server, directory) = (Server::start(), directory());
    let rules = file(&directory, "rules.toml", JOBS);
    let one_by_one: String = (0..50).map(|second| line(second, " 0.900")).collect();
    // Three at a time from the third second on: the third is denied, and the fourth, once one has ended, isn't.
    let together = line(8, " rt=6.000")
        + &line(9, " \"-\" request_time=\"6.000\"")
        + &line(8, " 4.000 1.000")
        + &line(9, " 0.500");
    for engine in [vec![], vec!["--url", &server.url()]] {
        for by in [&["--rules", &rules][..], &["--rule", "concurrency 2 ttl 10s"]] {
            let replay = [&["replay", "--input", "combined", "-"], by, engine.as_slice()].concat();
            let output = with_input(&replay, one_by_one.as_bytes());
            assert_eq!((allowed(&output), stderr(&output).contains("permits")), (vec![true; 50], false), "{replay:?}");
            assert_eq!(lines(&output)[0]["request_time"], "0.900000");
        }
    }
    assert_eq!(keys(&server), [""; 0], "a replay removes its keys");
    let log = directory.path().join("access.log");
    std::fs::write(&log, together).expect("written");
    let output = crate::support::tool::tollgate(&["replay", "--rules", &rules, log.to_str().expect("UTF-8")]);
    let told: Vec<_> = lines(&output).iter().map(|line| (line["t_us"].clone(), line["allowed"] == true)).collect();
    let at = |half_seconds: u64| json!(1_431_857_100_000_000 + half_seconds * 500_000);
    assert_eq!(told, [(at(4), true), (at(6), true), (at(8), false), (at(17), true)], "{}", stderr(&output));
    let again = with_input(&["replay", "--rules", &rules, "-"], &output.stdout);
    assert_eq!(stdout(&again), stdout(&output), "an output can be replayed");
}

#[test]
fn a_permit_is_given_back_after_its_rules_longest_hold() {
    let directory = directory();
    let one = JOBS.replace("concurrency 2 ttl 10s", "concurrency 1 ttl 10s");
    let rules = file(&directory, "rules.toml", &format!("{one}max_hold = \"5s\"\n"));
    let record = |t_us: u64| format!("{{\"t_us\":{t_us},\"attrs\":{{\"ip\":\"192.0.2.1\"}},\"request_time\":60}}\n");
    let input = record(0) + &record(4_999_999) + &record(5_000_000);
    let output = with_input(&["replay", "--rules", &rules, "-"], input.as_bytes());
    assert_eq!(allowed(&output), [true, false, true], "{}", stderr(&output));
}

/// As a service does: the ttl is for those that crash.
#[test]
fn a_request_that_takes_longer_than_the_ttl_keeps_its_permit() {
    let record = |t_us: u64, took: &str| format!("{{\"t_us\":{t_us},\"key\":\"k\",\"request_time\":{took}}}\n");
    let input = record(0, "60") + &record(1, "\"0.5\"") + &record(59_999_999, "0.001") + &record(60_000_000, "0.001");
    let output = with_input(&["replay", "--rule", "concurrency 1 ttl 10s", "-"], input.as_bytes());
    assert_eq!(allowed(&output), [true, false, false, true], "{}", stderr(&output));
    let csv = "t_us,key,request_time\n0,k,60\n1,k,0.5\n60000000,k,\n60000000,k,\n";
    let output = with_input(&["replay", "--rule", "concurrency 1 ttl 10s", "-"], csv.as_bytes());
    assert_eq!(allowed(&output), [true, false, true, true], "{}", stderr(&output));
    assert!(stderr(&output).contains("permits can't be replayed: 2 permits taken by"), "{}", stderr(&output));
    for took in ["-1", "1e5", "86400.1", "true", "\"\"", "0.1234567"] {
        let output = with_input(&["replay", "--rule", "concurrency 1 ttl 10s", "-"], record(0, took).as_bytes());
        let expected = "request_time: expected seconds from 0 to 86400, such as 0.123, got ";
        assert!(code(&output) == 2 && stderr(&output).contains(expected), "{took}: {}", stderr(&output));
    }
}

#[test]
fn permits_of_which_the_log_does_not_say_how_long_they_are_held_deny_nobody_and_are_reported() {
    let directory = directory();
    let rules = file(&directory, "rules.toml", JOBS);
    let log: String = (0..50).map(|second| line(second, "")).collect();
    let said = "permits can't be replayed: 50 permits taken by records that don't say how long a request took";
    let replay = ["replay", "--rules", &rules, "--input", "combined", "--summary", "-"];
    let output = with_input(&replay, log.as_bytes());
    let summary = &lines(&output)[0];
    assert_eq!((&summary["allowed"], &summary["permits_not_replayed"]), (&json!(50), &json!(50)), "{summary}");
    assert_eq!(stderr(&output).matches(said).count(), 1, "{}", stderr(&output));
    let fewer = file(&directory, "fewer.toml", &JOBS.replace('2', "1"));
    let output = with_input(&["rules", "diff", &rules, &fewer, "--input", "combined", "-"], log.as_bytes());
    assert_eq!((code(&output), &lines(&output)[0]["permits_not_replayed"]), (0, &json!(50)));
    assert_eq!(stderr(&output).matches(said).count(), 1, "{}", stderr(&output));
    // Where the log does say it, the sets are compared by it.
    let log = line(8, " 6.000") + &line(9, " 6.000");
    let output = with_input(&["rules", "diff", &rules, &fewer, "--input", "combined", "-"], log.as_bytes());
    assert_eq!((code(&output), &lines(&output)[1]["newly_denied"]), (1, &json!(1)), "{}", stderr(&output));
    // Records of operations may give permits back themselves: if none does, that is said.
    let record = |t_us: u32, more: &str| format!("{{\"t_us\":{t_us},\"key\":\"k\"{more}}}\n");
    let input = record(1, ",\"id\":\"a\"") + &record(2, "") + &record(3, "");
    let replay = ["replay", "--rule", "concurrency 2 ttl 10s", "-"];
    let output = with_input(&replay, input.as_bytes());
    let said = "permits can't be replayed: 2 permits ended by the ttl alone";
    assert_eq!((allowed(&output), stderr(&output).contains(said)), (vec![true, true, false], true));
    let input = input + &record(4, ",\"op\":\"release\",\"id\":\"a\"") + &record(5, "");
    let output = with_input(&replay, input.as_bytes());
    assert_eq!(allowed(&output), [true, true, false, true, true]);
    assert!(!stderr(&output).contains("permits"), "{}", stderr(&output));
}
