use std::time::Duration;

use jiff::civil::date;

use super::super::facts::{Clock, Facts, Finding, Known, Latency, Level, Missing, Refusal, Trial, Why};
use super::judge;
use crate::info::Fields;

const INFO: &str = "redis_version:8.2.3\nredis_mode:standalone\nuptime_in_seconds:60\nconnected_clients:2\n\
                    maxclients:10000\nused_memory:2000000\nmem_not_counted_for_evict:0\n\
                    total_system_memory:8000000000\nmaxmemory:0\nmaxmemory_policy:noeviction\nloading:0\n\
                    rdb_changes_since_last_save:7\nrdb_last_bgsave_status:ok\nrdb_last_save_time:1700000000\n\
                    aof_enabled:0\naof_last_bgrewrite_status:ok\naof_last_write_status:ok\nrejected_connections:0\n\
                    evicted_keys:0\nlatest_fork_usec:0\nrole:master\nconnected_slaves:0\nmaster_repl_offset:1000\n\
                    cluster_enabled:0";
const CONFIG: &str = "maxmemory:0\nmaxmemory-policy:noeviction\nappendonly:no\nappendfsync:everysec\nsave:3600 1\n\
                      stop-writes-on-bgsave-error:yes\nmin-replicas-to-write:0\nreplica-serve-stale-data:yes\n\
                      busy-reply-threshold:5000\nmaxclients:10000\ntimeout:0\ntcp-keepalive:300\n\
                      lazyfree-lazy-user-flush:no";

/// A redis-server with default settings.
fn sound() -> Facts {
    let trial = |script| Trial { script, took: Ok(()), looked: Ok(()), bytes: Some(Ok(160)), left: None };
    Facts {
        address: "127.0.0.1:6379".into(),
        prefix: "tollgate".into(),
        deadline: Duration::from_millis(500),
        today: date(2026, 11, 22),
        info: Ok(Fields::of_info(INFO)),
        config: Ok(Fields::of_info(CONFIG)),
        cluster: Err("ERR This instance has cluster support disabled".into()),
        moving: Vec::new(),
        of_cluster: false,
        across_slots: None,
        sentinels: None,
        user: "limiter".into(),
        missing: Vec::new(),
        trials: ["token_bucket", "fixed_window", "concurrency"].map(trial).to_vec(),
        clock: Ok(Clock { offset: 12, uncertainty: 40, step: 0, step_uncertainty: 80 }),
        latency: Ok(Latency { of: "a peek", samples: vec![Duration::from_micros(200); 50] }),
    }
}

/// The sound facts with these lines of INFO and these settings replaced.
fn with(info: &str, config: &str) -> Facts {
    let mut facts = sound();
    let replaced = |fields: &mut Result<Fields, String>, by: &str| {
        if let Ok(fields) = fields {
            fields.0.extend(Fields::of_info(by).0);
        }
    };
    replaced(&mut facts.info, info);
    replaced(&mut facts.config, config);
    facts
}

fn finding(facts: &Facts, check: &str) -> Finding {
    let findings = judge(facts);
    let found = findings.iter().find(|finding| finding.check == check);
    found.unwrap_or_else(|| panic!("{check} in {findings:#?}")).clone()
}

fn level(facts: &Facts, check: &str) -> Level {
    finding(facts, check).level
}

fn refused(message: &str, permission: bool) -> Result<(), Refusal> {
    Err(Refusal { permission, message: message.into() })
}

#[test]
fn a_server_as_it_comes_has_notes_at_most() {
    let findings = judge(&sound());
    let worst = findings.iter().max_by_key(|finding| finding.level).expect("some");
    assert_eq!(worst.level, Level::Note, "{worst:?}");
    let notes: Vec<_> = findings.iter().filter(|finding| finding.level == Level::Note).collect();
    assert_eq!(notes.iter().map(|note| note.check).collect::<Vec<_>>(), ["memory", "persistence", "saves"]);
    assert!(notes.iter().all(|note| !note.advice.is_empty()), "{notes:?}");
    assert!(findings.iter().all(|finding| !finding.found.is_empty()), "{findings:?}");
}

#[test]
fn a_server_is_named_by_product_and_version_and_is_one_that_the_scripts_need() {
    for (info, found, expected) in [
        ("redis_version:7.2.0", "Redis 7.2.0", Level::Ok),
        ("redis_version:8.10.2", "Redis 8.10.2", Level::Ok),
        ("redis_version:6.2.14", "Redis 6.2.14: expected Redis 7.0 or newer", Level::Unfit),
        ("redis_version:7.2.4\nvalkey_version:8.1.0", "Valkey 8.1.0", Level::Ok),
        ("redis_version:7.2.4\nvalkey_version:7.2.5", "Valkey 7.2.5", Level::Ok),
        ("redis_version:7.2.4\nredict_version:7.3.6", "Redict 7.3.6", Level::Ok),
        ("redis_version:7.4.0\ndragonfly_version:df-v1.38.0", "Dragonfly 1.38.0, which tollgate isn't", Level::Note),
        ("redis_mode:sentinel", "a Sentinel", Level::Unfit),
    ] {
        let finding = finding(&with(info, ""), "version");
        assert!(finding.level == expected && finding.found.starts_with(found), "{info}: {finding:?}");
    }
    // Valkey's Sentinel reports the mode under another name.
    let mut sentinel = with("valkey_version:9.1.2\nserver_mode:sentinel", "");
    sentinel.info.as_mut().expect("known").0.remove("redis_mode");
    assert_eq!(level(&sentinel, "version"), Level::Unfit);
}

#[test]
fn a_release_at_its_end_of_life_is_a_note_that_says_since_when() {
    let of = |info: &str, today| finding(&Facts { today, ..with(info, "") }, "version");
    let last = date(2024, 7, 29);
    let ended = of("redis_version:7.0.15", date(2024, 7, 30));
    assert_eq!(ended.found, "Redis 7.0.15; end of life after 2024-07-29: 7.0 gets no more security fixes");
    assert_eq!((ended.level, ended.advice.len()), (Level::Note, 1));
    assert_eq!(of("redis_version:7.0.15", last).level, Level::Ok);
    let valkey = "redis_version:7.2.4\nvalkey_version:8.1.8";
    assert_eq!(of(valkey, date(2030, 3, 31)).level, Level::Ok);
    assert_eq!(of(valkey, date(2030, 4, 1)).level, Level::Note);
    assert_eq!(of(valkey, last).numbers["end_of_life"], "2030-03-31");
    // Nothing is known about later versions.
    assert_eq!(of("redis_version:9.0.0", date(2099, 1, 1)).level, Level::Ok);
}

#[test]
fn every_policy_that_evicts_is_a_warning_once_memory_is_bounded() {
    for policy in ["allkeys-lru", "allkeys-lfu", "allkeys-random", "volatile-lru", "volatile-ttl", "volatile-random"] {
        let bounded = with("", &format!("maxmemory:100000000\nmaxmemory-policy:{policy}"));
        let finding = finding(&bounded, "eviction");
        assert_eq!(finding.level, Level::Warning);
        assert!(finding.found.contains(policy) && finding.found.contains("(2% now)"), "{}", finding.found);
        let step = "CONFIG SET maxmemory-policy noeviction; redis.conf: maxmemory-policy noeviction";
        assert_eq!(finding.advice, [step]);
        assert_eq!(level(&with("", &format!("maxmemory-policy:{policy}")), "eviction"), Level::Note);
    }
    assert_eq!(level(&with("", "maxmemory:100000000"), "eviction"), Level::Ok);
}

#[test]
fn full_memory_refuses_or_evicts() {
    for (used, policy, expected) in [
        (50_000_000, "noeviction", Level::Ok),
        (79_999_999, "noeviction", Level::Ok),
        (80_000_000, "noeviction", Level::Warning),
        (100_000_000, "noeviction", Level::Unfit),
        (100_000_000, "allkeys-lru", Level::Warning),
    ] {
        let facts = with(&format!("used_memory:{used}"), &format!("maxmemory:100000000\nmaxmemory-policy:{policy}"));
        assert_eq!(level(&facts, "memory"), expected, "{used} {policy}");
    }
    // Memory for data that replicas have yet to receive isn't counted.
    let facts = with("used_memory:100000000\nmem_not_counted_for_evict:50000000", "maxmemory:100000000");
    assert_eq!(level(&facts, "memory"), Level::Ok);
    assert_eq!(level(&with("", "maxmemory:9000000000"), "memory"), Level::Warning, "more than the machine has");
}

#[test]
fn evictions_so_far_matter_while_the_policy_evicts() {
    assert_eq!(level(&with("evicted_keys:5", "maxmemory-policy:allkeys-lru"), "evicted"), Level::Warning);
    assert_eq!(level(&with("evicted_keys:5", ""), "evicted"), Level::Note);
}

#[test]
fn what_a_restart_forgets_is_said_in_units() {
    for (config, expected, words) in [
        ("appendonly:yes", Level::Ok, "last second or two"),
        ("appendonly:yes\nappendfsync:always", Level::Note, "waits for the disk"),
        ("appendonly:yes\nappendfsync:no", Level::Note, "30s"),
        ("save:3600 1", Level::Note, "7 changes"),
        ("save:", Level::Note, "forgets every limit; each key may then admit up to one capacity more"),
    ] {
        let finding = finding(&with("", config), "persistence");
        assert_eq!(finding.level, expected, "{config}");
        assert!(finding.found.contains(words), "{}", finding.found);
    }
}

#[test]
fn a_failed_save_is_unfit_where_it_stops_writes() {
    let failed = "rdb_last_bgsave_status:err";
    assert_eq!(level(&with(failed, ""), "saves"), Level::Unfit);
    assert_eq!(level(&with(failed, "stop-writes-on-bgsave-error:no"), "saves"), Level::Warning);
    assert_eq!(level(&with(failed, "save:"), "saves"), Level::Warning);
    assert_eq!(level(&with("aof_last_write_status:err", "appendonly:yes"), "saves"), Level::Unfit);
    assert_eq!(level(&with("aof_last_bgrewrite_status:err", "appendonly:yes"), "saves"), Level::Warning);
    assert_eq!(level(&with("", "stop-writes-on-bgsave-error:no"), "saves"), Level::Ok);
    // Where CONFIG is forbidden, the scripts' replies decide.
    let mut facts = with(failed, "");
    facts.config = Err("NOPERM".into());
    assert_eq!(level(&facts, "saves"), Level::Warning);
    facts.trials[0].took = refused("redis refused: MISCONF Redis is configured to save RDB snapshots", false);
    assert_eq!(level(&facts, "saves"), Level::Unfit);
}

#[test]
fn replicas_refuse_and_lag() {
    let replica = with("role:slave\nmaster_host:10.0.0.1\nmaster_port:6380\nmaster_link_status:up", "");
    let found = finding(&replica, "replication");
    assert_eq!(found.level, Level::Unfit);
    assert_eq!(found.advice, ["decide on the primary: --url redis://10.0.0.1:6380"]);
    let cut_off = with("role:slave\nmaster_link_status:down", "replica-serve-stale-data:no");
    assert!(finding(&cut_off, "replication").found.contains("MASTERDOWN"));

    let of = |line: &str, needed: u64, good: u64| {
        let info = format!("connected_slaves:1\nslave0:ip=10.0.0.2,port=6379,{line}\nmin_slaves_good_slaves:{good}");
        level(&with(&info, &format!("min-replicas-to-write:{needed}")), "replication")
    };
    assert_eq!(of("state=online,offset=990,lag=1", 0, 1), Level::Note);
    assert_eq!(of("state=online,offset=990,lag=1", 1, 1), Level::Ok);
    assert_eq!(of("state=online,offset=990,lag=11", 0, 1), Level::Warning);
    assert_eq!(of("state=wait_bgsave,offset=0,lag=0", 0, 0), Level::Warning);
    assert_eq!(of("state=online,offset=990,lag=1", 2, 1), Level::Unfit);
    assert_eq!(level(&with("", "min-replicas-to-write:1"), "replication"), Level::Unfit);
}

#[test]
fn a_clock_is_wrong_only_beyond_its_uncertainty() {
    for (offset, uncertainty, step, step_uncertainty, expected) in [
        (900_000, 50, 0, 100, Level::Ok),
        (1_100_000, 50, 0, 100, Level::Warning),
        (-1_100_000, 50, 0, 100, Level::Warning),
        (1_100_000, 200_000, 0, 400_000, Level::Ok),
        (0, 50, -60_000, 100, Level::Warning),
        (0, 50_000, -60_000, 100_000, Level::Ok),
        (i64::MIN, 50, i64::MAX, 100, Level::Warning),
    ] {
        let mut facts = sound();
        facts.clock = Ok(Clock { offset, uncertainty, step, step_uncertainty });
        assert_eq!(level(&facts, "clock"), expected, "{offset} {step}");
    }
}

#[test]
fn latency_is_held_against_the_deadline() {
    let of = |ms: u64, slowest: u64| {
        let mut facts = sound();
        let mut samples = vec![Duration::from_millis(ms); 49];
        samples.push(Duration::from_millis(slowest));
        facts.latency = Ok(Latency { of: "PING", samples });
        level(&facts, "latency")
    };
    assert_eq!((of(1, 200), of(11, 200), of(1, 251)), (Level::Ok, Level::Note, Level::Warning));
    assert_eq!(level(&with("latest_fork_usec:300000", ""), "latency"), Level::Warning);
}

#[test]
fn a_missing_command_weighs_what_it_is_needed_for() {
    for (commands, expected, words) in [
        (&["EVALSHA"][..], Level::Unfit, "EVALSHA (for every decision)"),
        (&["TIME"], Level::Unfit, "TIME (for every algorithm)"),
        (&["MGET"], Level::Unfit, "concurrent calls"),
        (&["ZADD", "ZREM"], Level::Warning, "ZADD, ZREM (for concurrency)"),
        (&["EVAL_RO"], Level::Warning, "EVAL_RO (to peek and inspect)"),
        (&["PTTL"], Level::Warning, "PTTL (to inspect)"),
        (&["SCAN"], Level::Note, "SCAN (for `tollgate reset`)"),
    ] {
        let mut facts = sound();
        facts.missing = commands.iter().map(|command| Missing { command, why: Why::Command }).collect();
        let finding = finding(&facts, "permissions");
        assert_eq!(finding.level, expected, "{commands:?}");
        assert!(finding.found.contains(words), "{}", finding.found);
        let rights: Vec<_> = commands.iter().map(|command| format!("+{}", command.to_lowercase())).collect();
        assert_eq!(finding.advice, [format!("ACL SETUSER limiter {}", rights.join(" "))]);
    }
    let mut facts = sound();
    facts.missing = vec![Missing { command: "GET", why: Why::Key }];
    assert_eq!(finding(&facts, "permissions").advice, ["ACL SETUSER limiter ~tollgate:*"]);
}

#[test]
fn scripts_that_are_refused_are_unfit_unless_only_some_may_not_run() {
    let mut facts = sound();
    facts.trials[2].took = refused("redis doesn't let this user run what a decision needs", true);
    assert_eq!(level(&facts, "scripts"), Level::Warning);
    facts.trials[2].took = refused("redis refused: BUSY Redis is busy running a script", false);
    assert_eq!(level(&facts, "scripts"), Level::Unfit);
    assert!(finding(&facts, "scripts").advice[0].contains("SCRIPT KILL"));
    for trial in &mut facts.trials {
        trial.took = refused("no", true);
    }
    let all = finding(&facts, "scripts");
    assert_eq!((all.level, all.found.as_str()), (Level::Unfit, "0 of 3 decide; every script: no"));
}

#[test]
fn a_cluster_is_judged_by_its_state_and_its_slots() {
    let of = |cluster: &str| {
        let mut facts = with("cluster_enabled:1", "");
        facts.cluster = Ok(Fields::of_info(cluster));
        level(&facts, "cluster")
    };
    assert_eq!(of("cluster_state:ok\ncluster_slots_ok:16384\ncluster_size:1"), Level::Note);
    // A service at this address would decide a third of its keys.
    assert_eq!(of("cluster_state:ok\ncluster_slots_ok:16384\ncluster_size:3"), Level::Warning);
    assert_eq!(of("cluster_state:ok\ncluster_slots_ok:16000"), Level::Warning);
    assert_eq!(of("cluster_state:fail\ncluster_slots_ok:5461"), Level::Unfit);
    let mut facts = with("cluster_enabled:1", "");
    (facts.cluster, facts.of_cluster) = (Ok(Fields::of_info("cluster_state:ok\ncluster_slots_ok:16384")), true);
    assert_eq!(level(&facts, "cluster"), Level::Ok);
    if let Ok(config) = &mut facts.config {
        config.0.insert("cluster-require-full-coverage".into(), "yes".into());
    }
    assert_eq!(level(&facts, "cluster"), Level::Warning);
    assert!(judge(&sound()).iter().all(|finding| finding.check != "cluster"));
}

#[test]
fn sentinels_are_judged_by_whether_they_could_replace_the_primary() {
    let says = |numbers: [u64; 3], port: &str| {
        let said = ["num-other-sentinels", "quorum", "num-slaves"].into_iter().zip(numbers);
        let said = said.map(|(name, number)| (name.to_owned(), number.to_string()));
        Ok(Fields(said.chain([("port".to_owned(), port.to_owned())]).collect()))
    };
    let of = |said: &[Known<Fields>]| {
        let facts = Facts { sentinels: Some(said.to_vec()), ..sound() };
        level(&facts, "sentinels")
    };
    let well = || says([2, 2, 1], "6379");
    assert_eq!(of(&[well(), well(), well()]), Level::Ok);
    assert_eq!(of(&[well(), Err("no answer".into()), well()]), Level::Warning);
    assert_eq!(of(&[well(), says([2, 2, 1], "6380")]), Level::Warning);
    for numbers in [[1, 2, 1], [2, 4, 1], [2, 2, 0]] {
        assert_eq!(of(&[says(numbers, "6379")]), Level::Warning, "{numbers:?}");
    }
    assert!(judge(&sound()).iter().all(|finding| finding.check != "sentinels"));
}

#[test]
fn connections_need_headroom() {
    assert_eq!(level(&with("connected_clients:8000", ""), "connections"), Level::Warning);
    assert_eq!(level(&with("connected_clients:7999", ""), "connections"), Level::Ok);
    assert_eq!(level(&with("rejected_connections:3", ""), "connections"), Level::Note);
}

#[test]
fn settings_and_past_errors_are_notes() {
    assert_eq!(level(&sound(), "settings"), Level::Ok);
    assert_eq!(level(&with("", "timeout:60"), "settings"), Level::Note);
    assert_eq!(level(&with("", "busy-reply-threshold:0"), "settings"), Level::Note);
    let past = finding(&with("errorstat_OOM:count=12", ""), "refused");
    assert_eq!((past.level, past.numbers["OOM"].as_u64()), (Level::Note, Some(12)));
}

#[test]
fn a_server_that_loads_is_unfit_until_it_has() {
    assert_eq!(level(&with("loading:1\nloading_eta_seconds:9", ""), "loading"), Level::Unfit);
    assert!(judge(&sound()).iter().all(|finding| finding.check != "loading"));
}

#[test]
fn what_is_forbidden_is_a_note_with_the_right_that_it_takes() {
    let mut facts = sound();
    facts.info = Err("NOPERM this user has no permissions to run the 'info' command".into());
    facts.config = Err("ERR unknown command 'CONFIG', with args beginning with: 'GET'".into());
    facts.trials[0].bytes = Some(Err("NOPERM this user has no permissions to run the 'memory|usage' command".into()));
    let unchecked: Vec<_> = judge(&facts).into_iter().filter(|finding| finding.check == "unchecked").collect();
    assert!(unchecked.iter().all(|finding| finding.level == Level::Note));
    let advice: Vec<_> = unchecked.iter().map(|finding| finding.advice.join("")).collect();
    assert_eq!(advice, ["ACL SETUSER limiter +info", "", "ACL SETUSER limiter +memory|usage"]);
    // INFO alone reports the policy too.
    let mut facts = with("maxmemory:100000000\nmaxmemory_policy:allkeys-lru", "");
    facts.config = Err("NOPERM".into());
    assert_eq!(level(&facts, "eviction"), Level::Warning);
}

#[test]
fn scripts_that_were_dropped_are_a_note_that_says_what_they_cost() {
    let findings = judge(&with("evicted_scripts:0", ""));
    assert!(findings.iter().all(|finding| finding.check != "script cache"), "{findings:?}");
    let dropped = finding(&with("evicted_scripts:1234", ""), "script cache");
    assert_eq!((dropped.level, dropped.numbers["evicted_scripts"].as_u64()), (Level::Note, Some(1234)));
    assert!(dropped.found.contains("1,234") && dropped.advice[0].contains("ARGV"), "{dropped:?}");
}

#[test]
fn batches_of_a_cluster_go_by_node_unless_the_node_refuses() {
    let of = |across_slots| finding(&Facts { across_slots: Some(across_slots), ..sound() }, "batches");
    let (by_node, by_slot) = (of(Ok(())), of(Err("ERR Unexpected flag in script shebang".into())));
    assert_eq!((by_node.level, &by_node.numbers["by"]), (Level::Ok, &"node".into()));
    assert_eq!((by_slot.level, &by_slot.numbers["by"]), (Level::Note, &"slot".into()));
    assert!(by_slot.found.contains("by slot, ") && by_slot.found.contains("Unexpected flag"), "{}", by_slot.found);
    // The user is the cause, not the node.
    let unknown = of(Err("NOPERM this user has no permissions to run the 'eval' command".into()));
    assert!(unknown.found.contains("permissions are missing") && !unknown.numbers.contains_key("by"), "{unknown:?}");
}
