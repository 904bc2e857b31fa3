//! The tool with limits that are split into shards.

use tollgate_testing::redis_server::Server;

use crate::support::tool::{code, lines, stderr, tollgate, with_input};

#[test]
fn the_tool_refuses_a_cost_that_no_shard_admits_and_denies_one_above_a_limit() {
    let sharded = "gcra 100/1s shards 8";
    for arguments in [&["probe", sharded, "key"][..], &["load", sharded]] {
        let refused = tollgate(&[arguments, &["--cost", "13"]].concat());
        let told = stderr(&refused);
        assert_eq!(code(&refused), 2, "{told}");
        assert!(
            told.lines().last().is_some_and(|line| line.contains("cost: expected at most 12, the smallest share")),
            "{told}"
        );
    }
    assert_eq!(code(&tollgate(&["probe", sharded, "key", "--cost", "12"])), 0);
    for (op, cost) in [("at-most", "90"), ("penalty", "90"), ("refund", "90")] {
        assert_eq!(code(&tollgate(&["probe", sharded, "key", "--cost", cost, "--op", op])), 0, "{op}");
    }
    let denied = tollgate(&["probe", "gcra 10/1s", "key", "--cost", "11", "--format", "jsonl"]);
    assert_eq!((code(&denied), &lines(&denied)[0]["retry_after_us"]), (1, &serde_json::json!("never")));
}

#[test]
fn the_tool_replays_inspects_and_audits_shards() {
    let server = Server::start();
    let url = server.url();
    let record = "{\"t_us\": 1700000000000000, \"key\": \"u1\"}\n".repeat(400);
    let replayed = with_input(
        &["replay", "--rule", "sliding-log 40/1h shards 4", "-", "--summary", "--url", &url],
        record.as_bytes(),
    );
    let summary = &lines(&replayed)[0];
    assert_eq!((code(&replayed), &summary["allowed"], &summary["denied"]), (0, &40.into(), &360.into()), "{summary}");

    for _ in 0..3 {
        assert_eq!(code(&tollgate(&["probe", "gcra 40/1h shards 4", "u1", "--url", &url])), 0);
    }
    let states = lines(&tollgate(&["inspect", "gcra 40/1h shards 4", "u1", "--format", "jsonl", "--url", &url]));
    let left: u64 = states.iter().filter_map(|state| state["remaining"].as_u64()).sum();
    assert_eq!((states.len(), left), (4, 37));
    assert_eq!(states[1]["redis_key"], "tollgate:{u1%s1}:cli/gcra-1h");

    let bounds = ["--keys", "hot", "--rate", "400", "--warmup", "100ms", "--duration", "700ms"];
    for rule in ["gcra 100/1s burst 40 shards 8", "sliding-window 40/200ms shards 8", "fixed-window 40/200ms shards 8"]
    {
        let loaded = tollgate(&[&["load", rule, "--format", "jsonl", "--url", &url][..], &bounds].concat());
        let report = &lines(&loaded)[0];
        assert_eq!((code(&loaded), &report["audit"]["over_admissions"]), (0, &0.into()), "{report}{}", stderr(&loaded));
        assert!(report["audit"]["admitted"].as_u64() > Some(40) && report["denied"].as_u64() > Some(0), "{report}");
    }
}
