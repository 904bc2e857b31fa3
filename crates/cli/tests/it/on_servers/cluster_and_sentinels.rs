//! The tool on a cluster and on a primary under Sentinels, while nothing fails.

use std::collections::HashSet;

use serde_json::Value;
use tollgate::redis::cmd;
use tollgate_testing::acl::{least, more};
use tollgate_testing::cluster::ClusterServers;
use tollgate_testing::redis_server::run_command;
use tollgate_testing::sentinels::Sentinels;

use crate::support::tool::{code, lines, stderr, stdout, tollgate, with_input};

/// Every command that takes an address.
fn every_command_works(url: &str, primaries: usize) {
    let probe = tollgate(&["probe", "gcra 3/1d", "user:1", "--count", "4", "--url", url]);
    let allowed: Vec<_> = lines(&probe).iter().map(|line| line["allowed"] == true).collect();
    assert_eq!((code(&probe), allowed), (1, vec![true, true, true, false]), "{}", stderr(&probe));
    assert!(lines(&probe).iter().all(|line| line["by"] == "redis"));

    let both = ["probe", "gcra 3/1d", "fixed-window 9/1d", "user:2", "--id", "call", "--url", url];
    assert_eq!((code(&tollgate(&both)), code(&tollgate(&both))), (0, 0), "several limits and an id");

    let state = tollgate(&["inspect", "gcra 3/1d", "user:1", "--url", url]);
    assert_eq!((code(&state), &lines(&state)[0]["remaining"]), (0, &0.into()), "{}", stderr(&state));

    let load = ["load", "gcra 5/1s", "--key-count", "30", "--rate", "300", "--warmup", "100ms"];
    let load = tollgate(&[&load[..], &["--duration", "1s", "--url", url]].concat());
    let report = &lines(&load)[0];
    assert_eq!(code(&load), 0, "{report} {}", stderr(&load));
    assert_eq!((&report["answered"], &report["audit"]["over_admissions"]), (&300.into(), &0.into()), "{report}");

    let doctor = tollgate(&["doctor", "--url", url, "--deadline", "30s"]);
    let nodes: HashSet<_> = lines(&doctor).iter().map(|line| line["node"].to_string()).collect();
    assert_eq!(nodes.len(), primaries, "{}{}", stdout(&doctor), stderr(&doctor));
    assert!(code(&doctor) < 2, "{}", stdout(&doctor));

    let records: String = (0..20).map(|n| format!("{{\"t_us\": {n}, \"key\": \"u{n}\"}}\n")).collect();
    let replay = with_input(&["replay", "--rule", "gcra 1/1d", "-", "--url", url], records.as_bytes());
    assert_eq!((code(&replay), lines(&replay).len()), (0, 20), "{}", stderr(&replay));

    let reset = tollgate(&["reset", "--rule", "cli", "--url", url]);
    assert_eq!(code(&reset), 0, "{}", stderr(&reset));
    let probe = tollgate(&["probe", "gcra 3/1d", "user:1", "--url", url]);
    assert_eq!(lines(&probe)[0]["remaining"], 2, "forgotten");
}

#[test]
fn every_command_works_on_a_cluster_and_leaves_no_key() {
    let servers = ClusterServers::of_primaries();
    every_command_works(&servers.url(), 3);
    let findings = lines(&tollgate(&["doctor", "--url", &servers.url(), "--deadline", "30s"]));
    let batches: Vec<_> = findings.iter().filter(|finding| finding["check"] == "batches").collect();
    assert!(batches.len() == 3 && batches.iter().all(|batches| batches["numbers"]["by"] == "node"), "{batches:?}");
    let left = servers.nodes().iter().map(|node| cmd("DBSIZE").query::<u64>(&mut node.connection()).expect("a size"));
    assert_eq!(left.sum::<u64>(), 1, "but that of the last probe");
    let blocked =
        tollgate(&["block", "gcra 3/1d", "user:1", "--prefix", "shop", "--for", "1m", "--url", &servers.url()]);
    let there = "; a similar key is in use: tollgate:{user:1}:cli/token-bucket-1d: try --prefix tollgate\n";
    assert!(code(&blocked) == 0 && stderr(&blocked).ends_with(there), "{}", stderr(&blocked));
}

/// Keys of such a slot are answered, wherever they are, so a cluster that is being enlarged is fit.
#[test]
fn a_slot_that_is_being_moved_is_no_fault_of_a_cluster() {
    let servers = ClusterServers::of_primaries();
    let examine = || tollgate(&["doctor", "--url", &servers.url(), "--deadline", "5s"]);
    let before = examine();
    // Half of the keys that the doctor tries.
    let slots: HashSet<_> = (1..=32).map(|number| servers.slot_of(&format!("user:{number}"))).collect();
    for slot in slots {
        let from = servers.primary_of(slot).expect("an owner");
        servers.begin_moving(slot, from, (from + 1) % 3);
    }
    let during = examine();
    let seen = |output| {
        // How fast this machine is just now is no matter of slots.
        let is_of_slots = |finding: &Value| finding["check"] != "cluster" && finding["check"] != "latency";
        let findings = lines(output).into_iter().filter(is_of_slots);
        findings
            .map(|finding| [&finding["check"], &finding["level"], &finding["numbers"]["by"]].map(ToString::to_string))
            .collect::<Vec<_>>()
    };
    assert!(code(&during) < 2, "{}{}", stdout(&during), stderr(&during));
    assert_eq!(seen(&during), seen(&before));
    let told = lines(&during).into_iter().filter(|finding| finding["check"] == "cluster");
    let told: Vec<_> =
        told.filter(|finding| finding["found"].as_str().is_some_and(|found| found.contains("being moved"))).collect();
    assert!(!told.is_empty() && told.iter().all(|finding| finding["level"] == "warning"), "{told:?}");
}

#[test]
fn every_command_works_on_a_primary_that_sentinels_know() {
    let servers = Sentinels::start();
    every_command_works(&servers.url(), 1);
    let findings = lines(&tollgate(&["doctor", "--url", &servers.url(), "--deadline", "30s"]));
    let sentinels = findings.iter().find(|finding| finding["check"] == "sentinels").expect("a finding");
    assert_eq!((&sentinels["level"], &sentinels["numbers"]["known"]), (&"ok".into(), &3.into()), "{sentinels}");

    // The documented rights suffice, and none can be left out.
    let of_sentinels = more("+sentinel\\|get-master-addr-by-name").into_iter().map(|right| right.replace('\\', ""));
    let of_sentinels: Vec<_> = of_sentinels.collect();
    let user = ["ACL", "SETUSER", "limiter", "reset", "on", ">sesame"];
    (0..3).for_each(|at| drop(run_command(servers.server(at), &[&user[..], &least(), &more("+role")].concat())));
    let url = servers.url().replace("://", "://limiter:sesame@") + "?sentinel-user=limiter&sentinel-password=sesame";
    let examine = |left_out: Option<&str>| {
        let rights: Vec<_> = of_sentinels.iter().map(String::as_str).filter(|right| Some(*right) != left_out).collect();
        (0..3).for_each(|at| drop(run_command(servers.sentinel(at), &[&user[..], &rights].concat())));
        let output = tollgate(&["doctor", "--url", &url, "--deadline", "5s"]);
        let findings = if code(&output) < 2 { lines(&output) } else { Vec::new() };
        findings.iter().any(|finding| finding["check"] == "sentinels" && finding["numbers"]["answered"] == 3)
    };
    assert!(examine(None), "{url}");
    for left_out in &of_sentinels {
        assert!(!examine(Some(left_out)), "without {left_out}");
    }
}

/// It examines each node's own keys, whatever its user may read of the cluster.
#[test]
fn the_doctor_needs_no_more_of_a_cluster_than_its_smallest_user_may() {
    let servers = ClusterServers::of_primaries();
    for node in servers.nodes() {
        let user = ["ACL", "SETUSER", "limiter", "reset", "on", ">sesame"];
        run_command(node, &[&user[..], &least(), &["+cluster|slots", "+cluster|info", "+asking"]].concat());
    }
    let url = servers.url().replace("://", "://limiter:sesame@");
    let output = tollgate(&["doctor", "--url", &url, "--deadline", "30s"]);
    assert!(code(&output) < 2, "{}{}", stdout(&output), stderr(&output));
    servers.node(0).signal("-STOP");
    let output = tollgate(&["doctor", "--url", &servers.url(), "--deadline", "5s"]);
    servers.node(0).signal("-CONT");
    let unfit: Vec<_> = lines(&output).into_iter().filter(|finding| finding["level"] == "unfit").collect();
    assert_eq!((code(&output), unfit.len()), (2, 1), "one of three: {}", stdout(&output));
    assert_eq!(unfit[0]["check"], "reachable");
}
