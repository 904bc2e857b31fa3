//! The tool with limits that are split into shards, which they are on a cluster alone.

use serde_json::json;
use tollgate_testing::cluster::{cluster_of_one, cluster_url};
use tollgate_testing::redis_server::Server;

use crate::support::tool::{code, lines, stderr, tollgate, with_input};

#[test]
fn a_cost_above_the_smallest_share_is_denied_for_good_on_a_cluster_alone() {
    let (server, cluster) = (Server::start(), cluster_of_one());
    let (one, several) = (server.url(), cluster_url(&cluster));
    // A key for each: a shard, drawn at random, may be the one that the call before has emptied.
    let probe = |key: &str, more: &[&str]| {
        tollgate(&[&["probe", "token-bucket 100/1s shards 8", key, "--format", "jsonl"], more].concat())
    };
    for (url, never) in [(&[][..], false), (&["--url", &one], false), (&["--url", &several], true)] {
        assert_eq!(code(&probe("share", &[url, &["--cost", "12"]].concat())), 0);
        let above = probe("above", &[url, &["--cost", "13"]].concat());
        let waits = &lines(&above)[0]["retry_after_us"];
        assert_eq!((code(&above) == 1, *waits == json!("never")), (never, never), "{waits}");
        for op in ["at-most", "penalty", "refund"] {
            let done = probe(op, &[url, &["--cost", "70", "--op", op]].concat());
            assert_eq!(code(&done), 0, "{op}: {}", stderr(&done));
        }
    }
}

#[test]
fn the_tool_replays_inspects_and_audits_shards() {
    let (server, cluster) = (Server::start(), cluster_of_one());
    for (url, shards) in [(server.url(), 1), (cluster_url(&cluster), 4)] {
        let record = "{\"t_us\": 1700000000000000, \"key\": \"u1\"}\n".repeat(400);
        let replayed = with_input(
            &["replay", "--rule", "sliding-log 40/1h shards 4", "-", "--summary", "--url", &url],
            record.as_bytes(),
        );
        let summary = &lines(&replayed)[0];
        assert_eq!(
            (code(&replayed), &summary["allowed"], &summary["denied"]),
            (0, &40.into(), &360.into()),
            "{summary}"
        );

        for _ in 0..3 {
            assert_eq!(code(&tollgate(&["probe", "token-bucket 40/1h shards 4", "u1", "--url", &url])), 0);
        }
        let states =
            lines(&tollgate(&["inspect", "token-bucket 40/1h shards 4", "u1", "--format", "jsonl", "--url", &url]));
        let left: u64 = states.iter().filter_map(|state| state["remaining"].as_u64()).sum();
        assert_eq!((states.len(), left), (shards, 37));
        let (last, shard) = (&states[shards - 1], if shards == 4 { "%s3" } else { "" });
        assert_eq!(last["redis_key"], format!("tollgate:{{u1{shard}}}:cli/token-bucket-1h"));
        assert_eq!(last["shard"], if shards == 4 { json!(4) } else { json!(null) });

        let bounds = ["--keys", "hot", "--rate", "400", "--warmup", "100ms", "--duration", "700ms"];
        for rule in [
            "token-bucket 100/1s burst 40 shards 8",
            "sliding-window 40/200ms shards 8",
            "fixed-window 40/200ms shards 8",
        ] {
            let loaded = tollgate(&[&["load", rule, "--format", "jsonl", "--url", &url][..], &bounds].concat());
            let report = &lines(&loaded)[0];
            let told = stderr(&loaded);
            assert_eq!((code(&loaded), &report["audit"]["over_admissions"]), (0, &0.into()), "{report}{told}");
            assert!(report["audit"]["admitted"].as_u64() > Some(40) && report["denied"].as_u64() > Some(0), "{report}");
        }
    }
}
