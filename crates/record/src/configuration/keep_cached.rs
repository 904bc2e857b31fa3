//! Keeps the configuration in Redis, for processes that start while PostgreSQL is unreachable.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout_at};
use tollgate::rules::RuleSet;

use super::cached_users::Digested;
use super::entries::{Head, REFRESHED_EVERY};
use super::redis_cache::{HeadedRules, Over};
use super::state::{NOT_APPLIED, Shared, ToCache};
use crate::chance::jittered;

/// Changes that come sooner after one another are written to Redis together.
const BETWEEN_WRITES: Duration = Duration::from_millis(100);

/// Writes changes within a tenth of a second or so, and everything each minute.
pub(crate) async fn keep_cached(shared: Weak<Shared>, to_cache: Arc<ToCache>) {
    let (mut is_whole, mut users, mut next_whole) = (true, Digested::default(), Instant::now());
    loop {
        let Some(shared) = shared.upgrade() else { return };
        let keys = to_cache.take();
        // As of one moment: on this thread nothing changes until the next await.
        let head = |version| Head { history: shared.history.load().as_ref().clone(), version };
        let of = (head(shared.version.load(Ordering::Relaxed)), shared.connected.load(Ordering::Relaxed), is_whole);
        let rules = match shared.rules_version.load(Ordering::Relaxed) {
            NOT_APPLIED => None,
            version => Some(HeadedRules { head: head(version), rules: RuleSet::clone(&shared.rules.load()) }),
        };
        users.update(shared.users.parts()).await;
        // Keys first: a process that starts with the version that is written next would take older entries of these
        // keys for current. If this fails, the rest waits for the next attempt, but not longer.
        let mut written = shared.cache.write_keys(&keys, Over::Older).await;
        if written.is_ok() || is_whole {
            written = written.and(shared.cache.write(of, rules.as_ref(), &users).await);
        }
        if written.is_err() {
            to_cache.put_back(keys);
        }
        drop(shared);
        // After a failure everything is written once Redis is back: a restart may have emptied it.
        let pause = if written.is_ok() { REFRESHED_EVERY } else { REFRESHED_EVERY / 10 };
        if is_whole || written.is_err() {
            next_whole = Instant::now() + jittered(pause, 20);
        }
        sleep(BETWEEN_WRITES).await;
        // Changes don't delay it.
        let _ = timeout_at(next_whole, to_cache.changed.notified()).await;
        is_whole = Instant::now() >= next_whole || written.is_err();
    }
}
