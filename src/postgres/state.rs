//! What is in force in a process, shared by those who read it and those who follow the database.

use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use arc_swap::ArcSwap;
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::task::AbortHandle;

use super::cache::Cache;
use super::key_text::KeyId;
use super::keys::{LookedUp, MOST_CHANGES};
use super::look_up::Keys;
use super::own_thread::OwnThread;
use super::totals::Totals;
use super::users_in_force::Users;
use crate::rules::RuleSet;

/// Versions count from 1.
pub(super) const NOT_APPLIED: i64 = 0;

pub(super) struct Shared {
    pub(super) rules: ArcSwap<RuleSet>,
    pub(super) users: Users,
    pub(super) keys: Arc<Keys>,
    pub(super) cache: Cache,
    pub(super) to_cache: Arc<ToCache>,
    /// Which history of the database the version belongs to.
    pub(super) history: ArcSwap<String>,
    pub(super) totals: Arc<Totals>,
    pub(super) version: AtomicI64,
    /// The version in which the rules in force were last changed; [`NOT_APPLIED`] if the database's can't be used.
    pub(super) rules_version: AtomicI64,
    pub(super) connected: Arc<AtomicBool>,
    pub(super) from_cache: AtomicBool,
    pub(super) reloads: AtomicU64,
    pub(super) failures: AtomicU64,
    pub(super) users_read: AtomicU64,
    pub(super) runtime: Handle,
    pub(super) thread: OnceLock<OwnThread>,
    pub(super) ids: OnceLock<AbortHandle>,
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.ids.get().into_iter().for_each(AbortHandle::abort);
        if self.totals.is_used() {
            let totals = Arc::clone(&self.totals);
            self.runtime.spawn(async move { totals.finish().await });
        }
    }
}

/// Changes of keys that aren't in Redis yet. (Changed users and rules are written whenever anything is.)
#[derive(Default)]
pub(super) struct ToCache {
    pub(super) changed: Notify,
    waiting: Mutex<Vec<(KeyId, LookedUp)>>,
}

impl ToCache {
    pub(super) fn add(&self, keys: Vec<(KeyId, LookedUp)>) {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).extend(keys);
        self.changed.notify_one();
    }

    /// Puts keys back for the next write; keeps the latest if there are more than are read at once.
    pub(super) fn put_back(&self, mut keys: Vec<(KeyId, LookedUp)>) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        keys.append(&mut waiting);
        *waiting = keys.split_off(keys.len().saturating_sub(MOST_CHANGES));
    }

    pub(super) fn take(&self) -> Vec<(KeyId, LookedUp)> {
        std::mem::take(&mut *self.waiting.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
