//! The tool while Redis is unreachable.

use serde_json::json;
use tollgate_testing::redis_server::Server;

use crate::support::tool::{code, lines, stderr, stdout, tollgate};

#[test]
fn a_probe_of_a_frozen_server_ends_by_its_deadline_and_names_the_policy_that_answered() {
    let server = Server::start();
    let probe_within = |deadline: &str, on_error: &[&str]| {
        let fixed = ["probe", "token-bucket 5/10s", "k", "--url", &server.tcp_url(), "--deadline", deadline];
        tollgate(&[&fixed, on_error].concat())
    };
    let probe = |on_error: &[&str]| probe_within("200ms", on_error);
    assert_eq!(lines(&probe_within("30s", &[]))[0]["by"], "redis");
    server.signal("-STOP");

    let closed = probe(&["--on-error", "closed"]);
    assert_eq!((code(&closed), stdout(&closed).as_str()), (2, ""));
    assert_eq!(stderr(&closed), "error: the call to redis was not sent within the deadline of 200ms\n");

    let open = probe(&["--on-error", "open"]);
    assert_eq!(
        (code(&open), &lines(&open)[0]["by"], &lines(&open)[0]["error"]),
        (0, &json!("policy"), &json!("deadline"))
    );
    let why = "the call to redis was not sent within the deadline of 200ms";
    assert_eq!(stderr(&open), format!("warning: {why}; answered by policy\n"));

    let local = probe(&["--on-error", "local", "--processes", "2", "--count", "3"]);
    let said: Vec<_> = lines(&local).iter().map(|line| (line["by"].clone(), line["allowed"].clone())).collect();
    assert_eq!(said, [("local", true), ("local", true), ("local", false)].map(|(by, it)| (json!(by), json!(it))));
    assert_eq!((code(&local), stderr(&local).lines().count()), (1, 3), "{}", stderr(&local));

    server.signal("-CONT");
    for on_error in ["closed", "open", "local"] {
        let again = probe_within("30s", &["--on-error", on_error]);
        assert_eq!((&lines(&again)[0]["by"], stderr(&again).as_str()), (&json!("redis"), ""), "{on_error}");
    }
}

#[test]
fn a_local_share_of_less_than_one_unit_is_reported() {
    let output = tollgate(&["probe", "token-bucket 5/1s", "k", "--on-error", "local", "--processes", "6"]);
    let expected = "error: token-bucket 5/1s: expected a burst of at least 6 for 6 processes, got 5\n";
    assert_eq!((code(&output), stderr(&output).as_str()), (2, expected));
}
