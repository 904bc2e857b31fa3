//! Servers that belong together: a cluster, and a primary with replicas under sentinels. Each is a redis-server of the
//! test's own on loopback, and ends with the test.

mod cluster;
mod sentinels;

use std::time::{Duration, Instant};

use tollgate::redis::{Client, RedisResult, Value, cmd};

pub(crate) use cluster::ClusterServers;
pub(crate) use sentinels::Sentinels;

use crate::server::Server;

/// No machine is so slow that servers of one host take longer to agree.
const PATIENCE: Duration = Duration::from_secs(30);

/// Waits until this holds, which servers tell nobody.
pub(crate) fn wait_for(what: &str, mut holds: impl FnMut() -> bool) {
    let began = Instant::now();
    while !holds() {
        assert!(began.elapsed() < PATIENCE, "{what}: not within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// What this one answers, which may be dead or frozen.
pub(crate) fn asked(server: &Server, words: &[&str]) -> RedisResult<Value> {
    const SOON: Duration = Duration::from_millis(500);
    let mut connection = Client::open(server.url())?.get_connection_with_timeout(SOON)?;
    connection.set_read_timeout(Some(SOON))?;
    cmd(words[0]).arg(&words[1..]).query(&mut connection)
}

/// The same as text; empty where it doesn't answer.
pub(crate) fn told(server: &Server, words: &[&str]) -> String {
    asked(server, words).ok().and_then(|value| tollgate::redis::from_redis_value(value).ok()).unwrap_or_default()
}

/// The same where it must be done.
pub(crate) fn ordered(server: &Server, words: &[&str]) -> Value {
    asked(server, words).unwrap_or_else(|error| panic!("{words:?}: {error}"))
}
