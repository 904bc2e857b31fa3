//! Audited load while a server is flushed of its scripts, frozen, cut off and restarted.

use std::process::Stdio;
use std::time::Instant;

use serde_json::Value;

use super::*;
use crate::tool::{code, command, stderr, stdout};

/// How long, in seconds: `TOLLGATE_SOAK_SECONDS` says otherwise.
const SECONDS: u64 = 6;
const KEYS: u64 = 50;
const CAPACITY: u64 = 20;

#[derive(Clone, Copy, Debug)]
enum Event {
    LoseScripts,
    KillConnections,
    Freeze,
    Restart,
}

use Event::*;

/// Restarts alone cost units, so they are left out at first.
#[test]
fn audited_load_admits_no_more_than_documented_whatever_happens_to_the_server() {
    for events in [&[LoseScripts, KillConnections, Freeze][..], &[LoseScripts, KillConnections, Freeze, Restart]] {
        soak(events);
    }
}

fn soak(events: &[Event]) {
    let seconds = std::env::var("TOLLGATE_SOAK_SECONDS").map_or(SECONDS, |text| text.parse().expect("seconds"));
    let mut server = Server::start();
    let rule = format!("gcra {CAPACITY}/1s");
    let (keys, time, url) = (KEYS.to_string(), format!("{seconds}s"), server.tcp_url());
    let load = ["load", &rule, "--rate", "2000", "--key-count", &keys, "--duration", &time, "--url", &url];
    let mut load = command(&[&load[..], &["--deadline", "200ms", "--format", "jsonl"]].concat())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the tool runs");
    let begun = Instant::now();
    // It begins with a second of warming up.
    let over = Duration::from_secs(seconds + 1);
    let mut restarts = 0;
    for event in events.iter().cycle() {
        std::thread::sleep(Duration::from_millis(300));
        if begun.elapsed() + Duration::from_millis(1500) > over {
            break;
        }
        match event {
            LoseScripts => run(&server, &["SCRIPT", "FLUSH"]),
            KillConnections => {
                let mut connection = server.connection();
                for _ in 0..5 {
                    cmd("CLIENT").arg(&["KILL", "TYPE", "normal"]).exec(&mut connection).expect("killed");
                    std::thread::sleep(Duration::from_millis(20));
                }
            }
            Freeze => {
                server.signal("-STOP");
                std::thread::sleep(Duration::from_millis(400));
                server.signal("-CONT");
            }
            Restart => {
                server.restart();
                restarts += 1;
            }
        }
    }
    while load.try_wait().expect("a state").is_none() {
        if begun.elapsed() > over + PATIENCE {
            let _ = load.kill();
            panic!("{events:?}: the load hangs");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let output = load.wait_with_output().expect("an end");
    let report: Value = serde_json::from_str(&stdout(&output)).unwrap_or_else(|_| panic!("{}", stderr(&output)));
    let number = |value: &Value| value.as_u64().unwrap_or_else(|| panic!("{report}"));
    let [over_admissions, false_denials] =
        ["over_admissions", "false_denials"].map(|name| number(&report["audit"][name]));
    println!("{events:?}, {restarts} restarts: {report}");

    assert!(over_admissions <= restarts * KEYS * CAPACITY, "{over_admissions} over-admissions: {report}");
    assert_eq!(false_denials, 0, "{report}");
    assert!(number(&report["answered"]) > 100 * seconds, "{report}");
    // Late by more than a second is no matter of a busy machine.
    assert!(number(&report["longest_us"]) < 1_200_000, "past the deadline: {report}");
    let faults = if over_admissions > 0 { 1 } else { 2 };
    assert_eq!(code(&output), faults, "{}", stderr(&output));
}
