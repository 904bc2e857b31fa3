//! `--block-for`: a key that is denied is blocked, in the same call.

use super::*;
use crate::support::tool::{code, lines, stderr, stdout, tollgate, with_input};

const WAIT: &str = "retry_after_us";

#[test]
fn a_probe_blocks_a_key_that_is_denied() {
    let server = Server::start();
    let url = server.url();
    for engine in [vec![], vec!["--url", &url]] {
        let probe = ["probe", "token-bucket 5/10s", "user:42", "--count", "7", "--block-for", "1h30m"];
        let output = tollgate(&[&probe[..], &engine].concat());
        let lines = lines(&output);
        assert_eq!((code(&output), lines[4]["allowed"].as_bool()), (1, Some(true)), "{}", stderr(&output));
        assert_eq!(
            (&lines[5]["allowed"], &lines[5]["remaining"], &lines[5][WAIT]),
            (&json!(false), &json!(0), &json!(5_400_000_000_u64))
        );
        let again = lines[6][WAIT].as_u64().expect("a wait");
        assert!(again < 5_400_000_000, "not extended: {again}");
    }
    // The block is the key's own: a call without the option is denied too, and reset lifts it.
    let plain = ["probe", "token-bucket 5/10s", "user:42", "--url", &url];
    let wait = lines(&tollgate(&plain))[0][WAIT].as_u64().expect("a wait");
    assert!((5_000_000_000..5_400_000_000).contains(&wait), "{wait}");
    tollgate(&[&plain[..], &["--op", "reset"]].concat());
    assert_eq!(code(&tollgate(&plain)), 0);
}

#[test]
fn a_table_tells_a_block_from_its_end() {
    for (length, word) in [("10m", "block "), ("0s", "unblock ")] {
        let call = ["probe", "token-bucket 5/10s", "k", "--op", "block", "--for", length, "--format", "table"];
        let output = tollgate(&call);
        let row = stdout(&output).lines().nth(1).expect("a row").to_owned();
        assert!(row.starts_with(word), "{row}");
    }
}

#[test]
fn a_replay_blocks_by_the_records_clock_and_by_what_a_rule_in_json_says() {
    let records = b"t_us,key\n0,a\n1000000,a\n1500000,a\n3999999,a\n4000000,a\n";
    let json = r#"{"limits": ["fixed-window 1/1s start first-hit", "token-bucket 100/1s"], "block_for": "2500ms"}"#;
    let minute = r#"{"limits": ["fixed-window 1/1s start first-hit"], "block_for": "1m"}"#;
    for arguments in [
        &["--rule", "fixed-window 1/1s start first-hit", "--block-for", "2500ms"][..],
        &["--rule", json],
        // What is said here counts.
        &["--rule", minute, "--block-for", "2500ms"],
    ] {
        let output = with_input(&[&["replay", "-"], arguments].concat(), records);
        let told: Vec<_> = lines(&output).iter().map(|line| (line["allowed"].clone(), line[WAIT].clone())).collect();
        let allowed = (json!(true), Value::Null);
        let denied = |wait: u64| (json!(false), json!(wait));
        let expected = [allowed.clone(), allowed.clone(), denied(2_500_000), denied(1), allowed];
        assert_eq!(told, expected, "{arguments:?}: {}", stderr(&output));
    }
}

#[test]
fn a_bad_block_for_is_one_line_that_names_it() {
    for (arguments, expected) in [
        (
            &["token-bucket 8/1s shards 2", "k", "--block-for", "15m"][..],
            "error: rule cli: expected a limit without shards beside block_for, since a denial would block one shard \
             alone, got token-bucket 8/1s shards 2 and block_for 15m\n",
        ),
        (
            &["token-bucket 8/1s", "k", "--block-for", "0s"],
            "error: block_for: expected whole microseconds, from 1us to 71 years, got 0ns\n",
        ),
    ] {
        let output = tollgate(&[&["probe"], arguments].concat());
        assert_eq!((code(&output), stderr(&output).as_str()), (2, expected));
    }
    let output = tollgate(&["probe", "token-bucket 8/1s", "k", "--block-for", "soon"]);
    let told = stderr(&output);
    assert!(code(&output) == 2 && told.contains("--block-for") && told.contains("soon"), "{told}");
}
