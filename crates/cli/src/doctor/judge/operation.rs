//! Whether the server replies, in time and with the right time: replication, cluster, clock, latency, connections,
//! settings.

use std::collections::BTreeSet;
use std::time::Duration;

use indicatif::HumanCount;

use super::super::facts::{Clock, Facts, Finding, Level};
use crate::output::{human, micros};

/// A clock further off than this is wrong.
const CLOCK_OFF: u64 = 1_000_000;
/// A clock that shifts by this much within a second or two has been set.
const CLOCK_STEP: u64 = 50_000;
/// A replica last heard from longer ago than this lags, in seconds.
const REPLICA_LATE: u64 = 10;
/// A call up to this long isn't noticed.
const SLOW: Duration = Duration::from_millis(10);
/// Hash slots in a cluster.
const SLOTS: u64 = 16_384;

pub(super) fn replication(facts: &Facts) -> Option<Finding> {
    let role = facts.info("role")?;
    if role == "slave" {
        let (host, port) = (facts.info("master_host").unwrap_or("?"), facts.info("master_port").unwrap_or("?"));
        let up = facts.info("master_link_status") == Some("up");
        let link = match (up, facts.setting("replica-serve-stale-data")) {
            (true, _) => String::new(),
            (false, Some("no")) => ", which it can't reach, so it answers nothing at all (MASTERDOWN)".to_owned(),
            (false, _) => ", which it can't reach".to_owned(),
        };
        let found = format!("a replica of {host}:{port}{link}: it refuses every decision (READONLY)");
        let finding = Finding::new("replication", Level::Unfit, found).number("role", "replica");
        return Some(finding.advise(format!("decide on the primary: --url redis://{host}:{port}")));
    }
    let replicas = replicas(facts);
    let count = replicas.len();
    let plural = if count == 1 { "" } else { "s" };
    let needed = facts.number("min-replicas-to-write").unwrap_or(0);
    // Reported only if some are required.
    let good = facts.info.as_ref().ok().and_then(|info| info.number("min_slaves_good_slaves"));
    let good = good.unwrap_or(count as u64);
    let late: Vec<_> = replicas.iter().filter(|replica| !replica.online || replica.lag > REPLICA_LATE).collect();
    let refused =
        facts.trials.iter().any(|trial| trial.took.as_ref().is_err_and(|error| error.message.contains("NOREPLICAS")));
    let finding = if refused || good < needed {
        let found = format!(
            "a primary with {good} good replicas of the {needed} that min-replicas-to-write asks for: it refuses every \
             decision (NOREPLICAS)"
        );
        Finding::new("replication", Level::Unfit, found)
            .advise("bring the replicas back")
            .set("min-replicas-to-write", "0")
    } else if let Some(replica) = late.first() {
        let found = format!(
            "a primary with {count} replica{plural}, {} lagging: {} ({}, last heard from {}s ago, {} bytes behind); a \
             failover to it forgets what it lacks; each key may then admit up to one capacity more",
            late.len(),
            replica.address,
            replica.state,
            replica.lag,
            HumanCount(replica.behind)
        );
        Finding::new("replication", Level::Warning, found).advise("look into that replica's log and its network")
    } else if count == 0 {
        Finding::new("replication", Level::Ok, "a primary without replicas: nothing takes over if it fails")
    } else {
        let behind = replicas.iter().map(|replica| replica.behind).max().unwrap_or(0);
        let lag = replicas.iter().map(|replica| replica.lag).max().unwrap_or(0);
        let found = format!(
            "a primary with {count} replica{plural}, {} bytes behind at most, heard from within {lag}s",
            HumanCount(behind)
        );
        if needed == 0 && facts.setting("min-replicas-to-write").is_some() {
            let found = format!(
                "{found}; if cut off from its replicas, it goes on deciding, and a failover forgets those decisions"
            );
            let finding = Finding::new("replication", Level::Note, found).set("min-replicas-to-write", "1");
            finding.set("min-replicas-max-lag", "2")
        } else {
            Finding::new("replication", Level::Ok, found)
        }
    };
    Some(finding.number("role", "primary").number("replicas", count).number("min_replicas_to_write", needed))
}

struct Replica {
    address: String,
    state: String,
    online: bool,
    /// Seconds since it was last heard from.
    lag: u64,
    /// Bytes.
    behind: u64,
}

/// `slave0:ip=127.0.0.1,port=7001,state=online,offset=42,lag=0`
fn replicas(facts: &Facts) -> Vec<Replica> {
    let sent = facts.count("master_repl_offset");
    let lines = (0..).map_while(|number| facts.info(&format!("slave{number}")));
    let replica = |line: &str| {
        let field = |name: &str| {
            let mut pairs = line.split(',').filter_map(|pair| pair.split_once('='));
            pairs.find(|(field, _)| *field == name).map(|(_, value)| value.to_owned())
        };
        let number = |name| field(name).and_then(|value| value.parse::<u64>().ok()).unwrap_or(0);
        let state = field("state").unwrap_or_default();
        Replica {
            address: format!("{}:{}", field("ip").unwrap_or_default(), number("port")),
            online: state == "online",
            state,
            lag: number("lag"),
            behind: sent.saturating_sub(number("offset")),
        }
    };
    lines.map(replica).collect()
}

pub(super) fn cluster(facts: &Facts) -> Option<Finding> {
    if facts.info("cluster_enabled")? != "1" {
        return None;
    }
    let cluster = facts.cluster.as_ref().ok()?;
    let state = cluster.text("cluster_state").unwrap_or("unknown");
    let number = |name| cluster.number(name).unwrap_or(0);
    let (covered, nodes, primaries) =
        (number("cluster_slots_ok"), number("cluster_known_nodes"), number("cluster_size"));
    let found = format!(
        "a node of a cluster of {nodes}, {primaries} with slots; cluster_state {state}, {covered} of {SLOTS} slots are \
         fine"
    );
    let decides_few = !facts.of_cluster && primaries > 1;
    let found = if decides_few {
        found + "; through this address, only this node's keys are decided (others: MOVED)"
    } else {
        found
    };
    let finding = if state != "ok" {
        let found = format!("{found}: decisions are refused (CLUSTERDOWN)");
        Finding::new("cluster", Level::Unfit, found).advise("redis-cli --cluster check, then --cluster fix")
    } else if covered < SLOTS {
        let found = format!("{found}: keys in the other slots can't be decided");
        Finding::new("cluster", Level::Warning, found).advise("redis-cli --cluster check, then --cluster fix")
    } else if !facts.moving.is_empty() {
        let slots = facts.moving.iter().take(5).map(ToString::to_string).collect::<Vec<_>>().join(", ");
        let more = facts.moving.len().saturating_sub(5);
        let slots = if more > 0 { format!("{slots} and {more} more") } else { slots };
        let found = format!(
            "{found}; slots {slots} are being moved: until that ends, calls there that use several keys fail \
             (TRYAGAIN) if one of the keys is new: those with an id, those of several limits, and reservations"
        );
        let advice = "if no reshard is running: redis-cli --cluster check, then --cluster fix";
        Finding::new("cluster", Level::Warning, found).advise(advice)
    } else if facts.setting("cluster-require-full-coverage") == Some("yes") {
        let found = format!("{found}; if some slots lose their nodes, all others are refused as well (CLUSTERDOWN)");
        Finding::new("cluster", Level::Warning, found).set("cluster-require-full-coverage", "no")
    } else if decides_few {
        Finding::new("cluster", Level::Warning, found)
    } else {
        Finding::new("cluster", if facts.of_cluster { Level::Ok } else { Level::Note }, found)
    };
    let url = format!("--url redis-cluster://{}", facts.address);
    let finding = if facts.of_cluster { finding } else { finding.advise(url) };
    Some(finding.number("state", state).number("slots_ok", covered).number("nodes", nodes))
}

/// How concurrent decisions on many keys are sent to a cluster's node.
pub(super) fn batches(facts: &Facts) -> Option<Finding> {
    Some(match facts.across_slots.as_ref()? {
        Ok(()) => {
            let found = "concurrent decisions are batched by node: a script may use keys of several of its slots";
            Finding::new("batches", Level::Ok, found).number("by", "node")
        }
        Err(why)
            if why.starts_with("NOPERM") || why.contains("executing the script can") || why.contains("ACL failure") =>
        {
            let found = format!(
                "whether concurrent decisions are batched by node or by slot isn't known: permissions are missing \
                 ({why})"
            );
            Finding::new("batches", Level::Note, found)
        }
        Err(why) => {
            let found = format!(
                "concurrent decisions are batched by slot, which is slower: no script may use keys of several slots \
                 ({why})"
            );
            Finding::new("batches", Level::Note, found).number("by", "slot")
        }
    })
}

/// Whether the Sentinels would find another primary if this one failed.
pub(super) fn sentinels(facts: &Facts) -> Option<Finding> {
    let said = facts.sentinels.as_ref()?;
    let answered: Vec<_> = said.iter().flatten().collect();
    let most = |name| answered.iter().filter_map(|fields| fields.number(name)).max().unwrap_or(0);
    let (all, quorum, replicas) = (most("num-other-sentinels") + 1, most("quorum"), most("num-slaves"));
    let down_after = most("down-after-milliseconds");
    let (here, named) = (answered.len() as u64, said.len());
    let found = format!("{here} of the {named} Sentinels in the address answer; they know of {all}, quorum {quorum}");
    let addresses = answered.iter().map(|fields| (fields.text("ip"), fields.text("port")));
    let agreed = addresses.collect::<BTreeSet<_>>().len() <= 1;
    let silent = said.iter().find_map(|said| said.as_ref().err());
    let finding = if !agreed {
        let found = format!("{found}; they don't name the same primary");
        Finding::new("sentinels", Level::Warning, found)
            .advise("wait until the failover is over, then run doctor again")
    } else if all < 3 || quorum > all || quorum == 0 {
        let found = format!("{found}: surviving the loss of one takes three or more, and a quorum that they can reach");
        Finding::new("sentinels", Level::Warning, found).advise("add Sentinels, on machines of their own")
    } else if let Some(why) = silent {
        let found = format!("{found}; one failed: {why}");
        Finding::new("sentinels", Level::Warning, found).advise("look into that Sentinel's log and its network")
    } else if replicas == 0 {
        Finding::new("sentinels", Level::Warning, format!("{found}; they have no replica to promote"))
            .advise("add a replica")
    } else {
        let after = human(Duration::from_millis(down_after));
        let found = format!("{found}; a primary that doesn't answer for {after} (down-after-milliseconds) is replaced");
        Finding::new("sentinels", Level::Ok, found)
    };
    let finding = finding.number("answered", here).number("known", all).number("quorum", quorum);
    Some(finding.number("replicas", replicas).number("down_after_ms", down_after))
}

pub(super) fn clock(facts: &Facts) -> Option<Finding> {
    let Clock { offset, uncertainty, step, step_uncertainty } = *facts.clock.as_ref().ok()?;
    let us = |number: u64| human(Duration::from_micros(number));
    let relation = |number: i64| if number < 0 { "behind" } else { "ahead of" };
    let found =
        format!("{} {} this machine's, give or take {}", us(offset.unsigned_abs()), relation(offset), us(uncertainty));
    let certainly = |number: i64, uncertainty: u64| number.unsigned_abs().saturating_sub(uncertainty);
    let synchronise = "keep both machines' clocks with NTP (chrony), slewed, not stepped";
    let finding = if certainly(step, step_uncertainty) > CLOCK_STEP {
        let way = if step < 0 { "back" } else { "forward" };
        let found = format!(
            "{found}; one of the two clocks was stepped during the check: the server's {} {way}, or this machine's as \
             much the other way",
            us(step.unsigned_abs())
        );
        Finding::new("clock", Level::Warning, found).advise(synchronise)
    } else if certainly(offset, uncertainty) > CLOCK_OFF {
        let found = format!(
            "{found}: windows begin and end by this clock, and if a step forward corrects it, limits refill by as much"
        );
        Finding::new("clock", Level::Warning, found).advise(synchronise)
    } else {
        Finding::new("clock", Level::Ok, found)
    };
    Some(finding.number("offset_us", offset).number("uncertainty_us", uncertainty).number("step_us", step))
}

pub(super) fn latency(facts: &Facts) -> Option<Finding> {
    let latency = facts.latency.as_ref().ok()?;
    let (p50, p99) = (latency.quantile(50), latency.quantile(99));
    let fork = Duration::from_micros(facts.count("latest_fork_usec"));
    let found = format!(
        "{} takes {} (p50) to {} (p99) in {} measurements",
        latency.of,
        human(p50),
        human(p99),
        latency.samples.len()
    );
    let deadline = facts.deadline;
    let finding = if p99 * 2 > deadline {
        let found = format!("{found}: too close to the deadline of {}", human(deadline));
        let finding = Finding::new("latency", Level::Warning, found);
        finding
            .advise("run the service nearer to Redis, or with a longer deadline; SLOWLOG GET shows what slows it down")
    } else if fork * 2 > deadline {
        let found = format!(
            "{found}; the server's last fork for a save took {}, during which no call is answered",
            human(fork)
        );
        Finding::new("latency", Level::Warning, found)
            .advise("save on a replica, or keep limits in a Redis of their own")
    } else if p50 > SLOW {
        let found = format!("{found}: every decision takes that long");
        Finding::new("latency", Level::Note, found)
            .advise("run the service nearer to Redis, or use a lease for hot keys")
    } else {
        Finding::new("latency", Level::Ok, found)
    };
    let finding = finding.number("p50_us", micros(p50)).number("p99_us", micros(p99));
    Some(finding.number("samples", latency.samples.len()).number("latest_fork_us", micros(fork)))
}

pub(super) fn connections(facts: &Facts) -> Option<Finding> {
    let most = facts.number("maxclients").filter(|most| *most > 0)?;
    let open = facts.info.as_ref().ok()?.number("connected_clients")?;
    let rejected = facts.count("rejected_connections");
    let before = match rejected {
        0 => String::new(),
        rejected => format!("; {} connections were rejected so far", HumanCount(rejected)),
    };
    let found = format!("{open} of maxclients {most}{before}");
    let finding = if open / 4 >= most / 5 {
        Finding::new("connections", Level::Warning, found).set("maxclients", &most.saturating_mul(2).to_string())
    } else if rejected > 0 {
        Finding::new("connections", Level::Note, found).set("maxclients", &most.saturating_mul(2).to_string())
    } else {
        Finding::new("connections", Level::Ok, found)
    };
    Some(finding.number("connected_clients", open).number("maxclients", most).number("rejected_connections", rejected))
}

/// Settings that affect decisions but have no check of their own.
pub(super) fn settings(facts: &Facts) -> Option<Finding> {
    facts.config.as_ref().ok()?;
    let mut finding = Finding::new("settings", Level::Ok, "");
    let mut told = Vec::new();
    if let Some(seconds) = facts.number("timeout") {
        if seconds > 0 {
            told.push(format!(
                "timeout {seconds} closes idle connections: the first decision after such a pause fails"
            ));
            finding = Finding { level: Level::Note, ..finding }.set("timeout", "0");
        }
        finding = finding.number("timeout_s", seconds);
    }
    if facts.number("tcp-keepalive") == Some(0) {
        told.push("tcp-keepalive 0 keeps connections of clients that are gone".into());
        finding = Finding { level: Level::Note, ..finding }.set("tcp-keepalive", "300");
    }
    if let Some(ms) = facts.number("busy-reply-threshold") {
        if ms == 0 {
            told.push("busy-reply-threshold 0: a hanging script is never reported (BUSY), and can't be killed".into());
            finding = Finding { level: Level::Note, ..finding }.set("busy-reply-threshold", "5000");
        } else {
            told.push(format!(
                "a hanging script is reported after {} (busy-reply-threshold)",
                human(Duration::from_millis(ms))
            ));
        }
        finding = finding.number("busy_reply_threshold_ms", ms);
    }
    if facts.setting("replica-serve-stale-data") == Some("no") {
        told.push("replica-serve-stale-data no: if it becomes a replica, it answers nothing while cut off".into());
    }
    if let Some(lazily) = facts.setting("lazyfree-lazy-user-flush") {
        finding = finding.number("lazyfree_lazy_user_flush", lazily);
        if lazily == "no" {
            told.push("a FLUSHALL would block all calls (lazyfree-lazy-user-flush no)".into());
        }
    }
    Some(Finding { found: told.join("; "), ..finding })
}

/// Reported only after evictions: Redis 7.4, Valkey 8 and later keep 500 of the scripts loaded by EVAL.
pub(super) fn script_cache(facts: &Facts) -> Option<Finding> {
    let evicted = facts.count("evicted_scripts");
    let found = format!(
        "{} scripts were dropped so far, since more than 500 different ones came by EVAL: after one of tollgate's was \
         dropped, the next decision by it takes two round trips",
        HumanCount(evicted)
    );
    let finding = Finding::new("script cache", Level::Note, found)
        .advise("let programs pass values as ARGV, not within the text of their scripts");
    (evicted > 0).then(|| finding.number("evicted_scripts", evicted))
}

/// Errors returned to decisions, or to other programs' writes, since the statistics began.
pub(super) fn refused(facts: &Facts) -> Option<Finding> {
    facts.info.as_ref().ok()?;
    let codes = ["OOM", "MISCONF", "NOREPLICAS", "READONLY", "LOADING", "BUSY", "MASTERDOWN", "CLUSTERDOWN"];
    let count = |code: &&'static str| {
        let line = facts.info(&format!("errorstat_{code}"))?;
        Some((*code, line.strip_prefix("count=")?.parse::<u64>().ok()?))
    };
    let counts: Vec<_> = codes.iter().filter_map(count).filter(|(_, count)| *count > 0).collect();
    let finding = if counts.is_empty() {
        Finding::new("refused", Level::Ok, "nothing was refused for want of memory, disk or replicas so far")
    } else {
        let list: Vec<_> = counts.iter().map(|(code, count)| format!("{} {code}", HumanCount(*count))).collect();
        let found = format!("errors so far, in answer to any program: {}", list.join(", "));
        Finding::new("refused", Level::Note, found).advise("CONFIG RESETSTAT resets the counts")
    };
    Some(counts.into_iter().fold(finding, |finding, (code, count)| finding.number(code, count)))
}
