//! What the facts mean for limits. Pure: facts in, findings out.

mod operation;
mod permissions;
mod product;
mod storage;
#[cfg(test)]
mod tests;

use super::facts::{Facts, Finding, Level};

/// In the order in which they are printed.
pub(super) fn judge(facts: &Facts) -> Vec<Finding> {
    let one_each: [fn(&Facts) -> Option<Finding>; 19] = [
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
        operation::batches,
        operation::sentinels,
        operation::clock,
        operation::latency,
        operation::connections,
        operation::settings,
        operation::script_cache,
        operation::refused,
    ];
    let version = product::version(facts);
    match version {
        // The other findings would all follow from this one.
        Some(unfit) if unfit.level == Level::Unfit => vec![unfit],
        version => version
            .into_iter()
            .chain(one_each.iter().filter_map(|check| check(facts)))
            .chain(unchecked(facts))
            .collect(),
    }
}

/// Reported only while Redis is loading.
fn loading(facts: &Facts) -> Option<Finding> {
    (facts.count("loading") == 1).then(|| {
        let eta = facts.count("loading_eta_seconds");
        let found = format!("reads its data from disk and refuses every decision (LOADING), for about {eta}s more");
        Finding::new("loading", Level::Unfit, found).advise("wait, then run doctor again").number("eta_s", eta)
    })
}

/// What can't be checked because of a managed Redis or the user's permissions.
fn unchecked(facts: &Facts) -> impl Iterator<Item = Finding> {
    let user = &facts.user;
    let unknown = |what: &'static str, why: &str, lost: &str, right: &str| {
        let found = format!("{what} failed: {why}; so {lost}");
        let finding = Finding::new("unchecked", Level::Note, found).number("command", what);
        // A command that the server doesn't have can't be permitted.
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
