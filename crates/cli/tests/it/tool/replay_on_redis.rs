//! Replays on a Redis, which decides many records at once.

use std::fmt::Write as _;

use super::*;

/// Records of some keys, busy ones and rare ones, with each operation, ids and costs; the same in each run.
fn records(as_attributes: bool) -> String {
    let mut state = 7_u64;
    let mut below = |bound: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % bound
    };
    let mut all = String::new();
    let mut t_us = 1_700_000_000_000_000_u64;
    for number in 0..2_000 {
        t_us += below(4_000);
        let key = below(60).min(below(60));
        let more = match below(20) {
            0 => ",\"op\":\"refund\"".to_owned(),
            1 => ",\"op\":\"peek\"".to_owned(),
            2 => ",\"op\":\"penalty\",\"cost\":2".to_owned(),
            3 => format!(",\"op\":\"settle\",\"cost\":1,\"id\":\"{}\"", number - below(40).min(number)),
            4 => ",\"op\":\"reset\"".to_owned(),
            5..12 => format!(",\"cost\":{},\"id\":\"{number}\"", below(4)),
            _ => String::new(),
        };
        let whom = match as_attributes {
            true => format!("\"attrs\":{{\"user\":\"u{key}\",\"org\":\"o{}\",\"path\":\"/{}\"}}", key % 7, below(2)),
            false => format!("\"key\":\"u{key}\""),
        };
        writeln!(all, "{{\"t_us\":{t_us},{whom}{more}}}").expect("memory");
    }
    all
}

const RULES: &str = r#"
[[rule]]
name = "zero"
match = { path = "/0" }
key = "user"
limits = ["gcra 20/1s burst 4"]
[[rule]]
name = "trial"
key = "user"
limits = ["sliding-window 3/1s"]
shadow = true
[[rule]]
name = "one"
match = { path = "/1" }
key = "user"
tag = "global"
limits = ["fixed-window 5/1s", { name = "orgs", limit = "sliding-log 12/1s", key = "org" }]
"#;

#[test]
fn a_replay_on_redis_decides_as_the_embedded_engine_does_in_few_round_trips() {
    let server = Server::start();
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).expect("written");
        path.to_str().expect("UTF-8").to_owned()
    };
    let (of_keys, of_sets) = (path("keys", &records(false)), path("attributes", &records(true)));
    let rules = path("rules.toml", RULES);
    let reads = || -> u64 {
        let info: String = cmd("INFO").arg("stats").query(&mut server.connection()).expect("information");
        let (_, reads) = info.split_once("total_reads_processed:").expect("reads");
        reads.lines().next().and_then(|reads| reads.trim().parse().ok()).expect("a number")
    };
    for arguments in [
        vec!["--rule", "gcra 20/1s burst 4", of_keys.as_str()],
        vec!["--rule", "fixed-window 5/1s", "--rule", "sliding-log 12/2s", of_keys.as_str()],
        vec!["--rule", "gcra 20/1s burst 4", "--block-for", "300ms", "--overage", of_keys.as_str()],
        vec!["--rules", rules.as_str(), of_sets.as_str()],
    ] {
        let embedded = tollgate(&[&["replay"], arguments.as_slice()].concat());
        server.reset_command_counts();
        let before = reads();
        let redis = tollgate(&[&["replay", "--url", &server.url()], arguments.as_slice()].concat());
        let reads = reads() - before;
        let calls: u64 =
            server.commands().iter().filter(|(name, _)| name.starts_with("eval")).map(|(_, calls)| calls.0).sum();
        assert_eq!((code(&embedded), code(&redis)), (0, 0), "{}{}", stderr(&embedded), stderr(&redis));
        let expected = stdout(&embedded).replace("\"by\":\"embedded\"", "\"by\":\"redis\"");
        for (expected, got) in expected.lines().zip(stdout(&redis).lines()) {
            assert_eq!(expected, got, "{arguments:?}");
        }
        assert_eq!(expected.lines().count(), stdout(&redis).lines().count(), "{arguments:?}");
        assert!(stdout(&redis).contains("\"allowed\":false"), "{arguments:?}");
        assert!(reads < calls / 2, "{arguments:?}: {reads} reads of {calls} calls");
        let left: u64 = cmd("DBSIZE").query(&mut server.connection()).expect("a size");
        assert_eq!(left, 0, "{arguments:?}");
    }
}

/// Standard input that stays open.
#[test]
fn what_has_come_is_shown_though_more_may_come() {
    let server = Server::start();
    let mut tool = command(&["replay", "--rule", "gcra 5/1d", "--unsorted", "-", "--url", &server.url()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()
        .expect("the tool runs");
    let mut input = tool.stdin.take().expect("piped");
    let mut output = std::io::BufRead::lines(std::io::BufReader::new(tool.stdout.take().expect("piped")));
    for t_us in 1..=3 {
        writeln!(input, "{{\"t_us\":{t_us},\"key\":\"a\"}}").expect("written");
        let line = output.next().expect("a line").expect("text");
        assert!(line.contains(&format!("\"remaining\":{}", 5 - t_us)), "{line}");
    }
    drop(input);
    assert!(tool.wait().expect("it ends").success());
}

#[test]
fn what_was_read_before_a_bad_line_is_decided() {
    let server = Server::start();
    let input = "{\"t_us\":1,\"key\":\"a\"}\n{\"t_us\":2,\"key\":\"a\"}\nno record\n";
    for url in [vec![], vec!["--url".to_owned(), server.url()]] {
        let arguments = ["replay", "--strict", "--input", "jsonl", "--rule", "gcra 5/1d", "--unsorted", "-"];
        let all: Vec<_> = arguments.into_iter().chain(url.iter().map(String::as_str)).collect();
        let output = with_input(&all, input.as_bytes());
        assert_eq!((code(&output), lines(&output).len()), (2, 2), "{}", stderr(&output));
    }
}
