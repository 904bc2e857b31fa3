//! What the facts mean for limits. Pure: facts in, findings out.

mod operation;
mod permissions;
mod storage;
#[cfg(test)]
mod tests;

use super::facts::{Facts, Finding, Level};

/// In the order in which they are told.
pub(super) fn judge(facts: &Facts) -> Vec<Finding> {
    let one_each: [fn(&Facts) -> Option<Finding>; 18] = [
        version,
        loading,
        permissions::scripts,
        permissions::commands,
        storage::eviction,
        storage::memory,
        storage::evicted,
        storage::key_size,
        storage::persistence,
        storage::saves,
        operation::replication,
        operation::cluster,
        operation::sentinels,
        operation::clock,
        operation::latency,
        operation::connections,
        operation::settings,
        operation::refused,
    ];
    one_each.iter().filter_map(|check| check(facts)).chain(unchecked(facts)).collect()
}

fn version(facts: &Facts) -> Option<Finding> {
    let info = facts.info.as_ref().ok()?;
    let valkey = info.text("valkey_version");
    let (name, version, oldest) = match valkey {
        Some(version) => ("Valkey", version, (7, 2)),
        None => ("Redis", info.text("redis_version")?, (7, 0)),
    };
    let mut parts = version.split('.').map(|part| part.parse::<u32>().unwrap_or(0));
    let number = (parts.next().unwrap_or(0), parts.next().unwrap_or(0));
    let found = format!("{name} {version}");
    let finding = if info.text("redis_mode") == Some("sentinel") {
        Finding::new("version", Level::Unfit, "a Sentinel, which keeps no keys: expected the Redis that it watches")
            .advise("SENTINEL GET-MASTER-ADDR-BY-NAME <name> tells its address")
    } else if number < oldest {
        let found = format!("{found}: expected Redis 7.0 or newer, or Valkey 7.2 or newer");
        Finding::new("version", Level::Unfit, found).advise("upgrade the server")
    } else {
        Finding::new("version", Level::Ok, found)
    };
    Some(finding.number("version", version).number("uptime_s", facts.count("uptime_in_seconds")))
}

/// Only while it lasts.
fn loading(facts: &Facts) -> Option<Finding> {
    (facts.count("loading") == 1).then(|| {
        let eta = facts.count("loading_eta_seconds");
        let found = format!("reads its data from disk and refuses every decision (LOADING), for about {eta}s more");
        Finding::new("loading", Level::Unfit, found).advise("wait, and ask again").number("eta_s", eta)
    })
}

/// What a managed Redis or a user's permissions keep from being known.
fn unchecked(facts: &Facts) -> impl Iterator<Item = Finding> {
    let user = &facts.user;
    let unknown = |what: &'static str, why: &str, lost: &str, right: &str| {
        let found = format!("{what} can't be checked: {why}; so {lost}");
        let finding = Finding::new("unchecked", Level::Note, found).number("command", what);
        // A server that doesn't have the command at all can't allow it.
        if why.starts_with("NOPERM") { finding.advise(format!("ACL SETUSER {user} {right}")) } else { finding }
    };
    let info = facts.info.as_ref().err().map(|why| {
        let lost = "version, memory in use, persistence, replication, cluster and connections aren't known";
        unknown("INFO", why, lost, "+info")
    });
    let config = facts.config.as_ref().err().map(|why| {
        let lost = match &facts.info {
            Ok(_) => "save points, min-replicas-to-write, timeout and busy-reply-threshold aren't known",
            Err(_) => "the eviction policy isn't known either",
        };
        unknown("CONFIG GET", why, lost, "+config|get")
    });
    let clustered = facts.count("cluster_enabled") == 1;
    let cluster = facts.cluster.as_ref().err().filter(|_| clustered);
    let cluster = cluster.map(|why| unknown("CLUSTER INFO", why, "the slots covered aren't known", "+cluster|info"));
    let bytes = facts.trials.iter().find_map(|trial| trial.bytes.as_ref()?.as_ref().err());
    let bytes = bytes.map(|why| unknown("MEMORY USAGE", why, "what a key takes isn't known", "+memory|usage"));
    let clock = facts.clock.as_ref().err();
    let clock = clock.map(|why| unknown("TIME", why, "the clock isn't known", "+time"));
    let latency = facts.latency.as_ref().err();
    let latency = latency.map(|why| unknown("PING", why, "the latency isn't known", "+ping"));
    [info, config, cluster, bytes, clock, latency].into_iter().flatten()
}
