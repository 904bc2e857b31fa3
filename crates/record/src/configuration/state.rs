//! What is in force in a process, shared by the code that reads it and the code that follows the database.

use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64};
use std::sync::{Arc, OnceLock};

use arc_swap::{ArcSwap, ArcSwapOption};
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tollgate::rules::RuleSet;

use super::lookup::Keys;
use super::own_thread::OwnThread;
use super::redis_cache::Cache;
use crate::lock::Lock;
use crate::postgres::PostgresError;
use crate::stored::key_text::KeyId;
use crate::stored::keys::{LookedUp, MOST_CHANGES};
use crate::stored::users_in_force::Users;
use crate::totals::Totals;

/// Versions count from 1.
pub(crate) const NOT_APPLIED: i64 = 0;

pub(crate) struct Shared {
    pub(crate) rules: ArcSwap<RuleSet>,
    pub(crate) users: Users,
    pub(crate) keys: Arc<Keys>,
    pub(crate) cache: Cache,
    pub(crate) to_cache: Arc<ToCache>,
    /// Which history of the database the version belongs to.
    pub(crate) history: ArcSwap<String>,
    pub(crate) totals: Arc<Totals>,
    pub(crate) version: AtomicI64,
    /// The version in which the rules in force were last changed; [`NOT_APPLIED`] if the database's can't be used.
    pub(crate) rules_version: AtomicI64,
    pub(crate) connected: Arc<AtomicBool>,
    pub(crate) from_cache: AtomicBool,
    /// Why the database can't be used, unless it can.
    pub(crate) outage: ArcSwapOption<PostgresError>,
    pub(crate) reloads: AtomicU64,
    pub(crate) failures: AtomicU64,
    pub(crate) users_read: AtomicU64,
    pub(crate) runtime: Handle,
    pub(crate) thread: OnceLock<OwnThread>,
    pub(crate) keeps_ids: OnceLock<AbortHandle>,
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.keeps_ids.get().into_iter().for_each(AbortHandle::abort);
        if self.totals.is_used() {
            self.runtime.spawn(Arc::clone(&self.totals).finish_in_time());
        }
    }
}

/// Changes of keys that aren't in Redis yet. (Changed users and rules are written whenever anything is.)
#[derive(Default)]
pub(crate) struct ToCache {
    pub(crate) changed: Notify,
    waiting: Lock<Vec<(KeyId, LookedUp)>>,
}

impl ToCache {
    pub(crate) fn add(&self, keys: Vec<(KeyId, LookedUp)>) {
        self.waiting.lock().extend(keys);
        self.changed.notify_one();
    }

    /// Puts keys back for the next write; keeps the latest if there are more than are read at once.
    pub(crate) fn put_back(&self, mut keys: Vec<(KeyId, LookedUp)>) {
        let mut waiting = self.waiting.lock();
        keys.append(&mut waiting);
        *waiting = keys.split_off(keys.len().saturating_sub(MOST_CHANGES));
    }

    pub(crate) fn take(&self) -> Vec<(KeyId, LookedUp)> {
        std::mem::take(&mut *self.waiting.lock())
    }
}
