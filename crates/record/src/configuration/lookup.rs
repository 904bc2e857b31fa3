//! Finds the account that an API key belongs to: in this process, else in Redis, else in PostgreSQL.
//!
//! Most requests come with a key that this process knows. What isn't spelled as a key, or doesn't have the checksum
//! that only this database's keys have, costs nothing. The others cost a round trip to Redis and, if Redis doesn't know
//! the key, a share in a query; for an id that no key has, a decision of [`LOOK_UPS`] comes first, so that they never
//! hold up keys that exist. Look-ups run as tasks, one at a time for each id, so that callers who give up don't cause
//! new ones.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwapOption;
use quick_cache::sync::Cache as ProcessCache;
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, timeout};
use tollgate::Limiter;
use tollgate::rules::{Account, ApiKeyError};
use tollgate::{OnError, Rule};

use super::key_filter::KeyFilter;
use super::lookup_batch::Lookups;
use super::redis_cache::{Cache, CachedKey, KEYS_TTL, Over};
use crate::lock::Lock;
use crate::postgres::Postgres;
use crate::stored::key_text::{self, Checksums, KeyId};
use crate::stored::keys::{KeyRecord, LookedUp};

/// Look-ups in PostgreSQL of ids that no key has, by all processes that share a limiter's keys: no more than 100 in any
/// second. Such a key was deleted, or was made a moment ago.
const LOOK_UPS: &str = "gcra 90/1s burst 10";
const LOOK_UPS_NAME: &str = "api-key-look-ups";
/// What a process remembers: about 400 bytes for each key, and about 100 for each id without a key.
const MOST_KEYS: usize = 100_000;
const MOST_UNKNOWN: usize = 50_000;
/// Look-ups in flight. Beyond this, Redis is unreachable or there is a flood of requests, and callers are rejected at
/// once.
const MOST_UNDER_WAY: usize = 4096;
/// The same for ids of keys that exist, which others don't hold up.
const MOST_KEYS_UNDER_WAY: usize = 65_536;
/// While Redis can't count these look-ups, each process makes 100 a second.
const BETWEEN_UNCOUNTED: Duration = Duration::from_millis(10);
const TURN_WITHIN: Duration = Duration::from_millis(500);
/// While PostgreSQL is unreachable, known keys stay in use, and are looked up again after this.
const STALE_FOR: Duration = Duration::from_secs(10);

pub(crate) struct Keys {
    /// `None` until the secret is read from the database.
    checksums: ArcSwapOption<Checksums>,
    pub(crate) ids: Arc<KeyFilter>,
    look_ups: Lookups,
    cache: Cache,
    limiter: Limiter,
    rule: Rule,
    runtime: Handle,
    /// Whether PostgreSQL was heard from within the last few seconds.
    connected: Arc<AtomicBool>,
    known: ProcessCache<KeyId, Known>,
    unknown: ProcessCache<KeyId, Instant>,
    under_way: Lock<HashMap<KeyId, Vec<oneshot::Sender<Answer>>>>,
    changes: Lock<ChangedIds>,
    looked_up: AtomicU64,
    /// Held during a look-up while Redis can't count them: one at a time.
    uncounted: tokio::sync::Mutex<()>,
}

/// A key that was looked up.
#[derive(Clone)]
struct Known {
    key: Arc<KeyRecord>,
    /// The account, as far as the key itself determines it.
    account: Account,
    version: i64,
    until: Instant,
}

/// The result of a look-up: a key, or that there is none.
type Answer = Result<Option<Known>, ApiKeyError>;

/// The version in which each id last changed, for as long as something older may be cached anywhere.
#[derive(Default)]
struct ChangedIds {
    /// The database's history; entries from another one are ignored.
    history: String,
    of_ids: HashMap<KeyId, (i64, Instant)>,
    /// The highest version that the database is known to have: no entry in Redis can have a higher one.
    newest: i64,
    /// Anything cached at an older version may have changed since.
    oldest: i64,
    /// How often everything was forgotten, the database being another one or restored to an earlier moment. What was
    /// read before that may have a higher version than any change since.
    forgotten: u64,
}

/// A look-up in flight. When it or its runtime ends, everyone waiting for it gets a reply.
struct UnderWay {
    keys: Arc<Keys>,
    id: KeyId,
    answer: Answer,
}

impl Keys {
    pub(crate) fn new(postgres: &Postgres, cache: &Cache, limiter: &Limiter, connected: &Arc<AtomicBool>) -> Arc<Self> {
        let rule = Rule::new(LOOK_UPS_NAME, LOOK_UPS).and_then(|rule| rule.on_error(OnError::Closed));
        Arc::new(Self {
            checksums: ArcSwapOption::empty(),
            ids: Arc::default(),
            look_ups: Lookups::new(postgres),
            cache: cache.clone(),
            limiter: limiter.clone(),
            rule: rule.expect("a limit that is written above"),
            runtime: Handle::current(),
            connected: Arc::clone(connected),
            known: ProcessCache::new(MOST_KEYS),
            unknown: ProcessCache::new(MOST_UNKNOWN),
            under_way: Lock::default(),
            changes: Lock::default(),
            looked_up: AtomicU64::new(0),
            uncounted: tokio::sync::Mutex::default(),
        })
    }

    /// Takes the database's secret.
    pub(crate) fn check_with(&self, secret: &[u8]) {
        self.checksums.store(Some(Arc::new(Checksums::new(secret))));
    }

    /// Keys looked up in PostgreSQL so far.
    pub(crate) fn looked_up(&self) -> u64 {
        self.looked_up.load(Ordering::Relaxed)
    }

    /// The account that this key belongs to, without the user's own settings.
    pub(crate) async fn account(self: &Arc<Self>, sent: &[u8]) -> Result<Account, ApiKeyError> {
        // A key that this process knows takes no wait, so a task that asks in a loop has to yield here.
        tokio::task::consume_budget().await;
        let (id, hash) = key_text::read(sent, self.checksums.load().as_deref()).ok_or(ApiKeyError::Malformed)?;
        let known = match self.remembered(id) {
            Some(known) => known,
            None => self.ask(id).await?,
        };
        // Details are only for callers who have the whole key.
        let known = known.filter(|known| key_text::is_same(&hash, &known.key.hash)).ok_or(ApiKeyError::Unknown)?;
        if known.key.revoked {
            return Err(ApiKeyError::Revoked);
        }
        match known.key.expires_at {
            Some(end) if end <= SystemTime::now() => Err(ApiKeyError::Expired),
            _ => Ok(known.account),
        }
    }

    /// What this process knows of an id; `None` if it must look the id up.
    fn remembered(&self, id: KeyId) -> Option<Option<Known>> {
        let now = Instant::now();
        if let Some(known) = self.known.get(&id).filter(|known| known.until > now) {
            return Some(Some(known));
        }
        self.unknown.get(&id).filter(|until| *until > now).map(|_| None)
    }

    /// Looks an id up, or joins the look-up in flight.
    async fn ask(self: &Arc<Self>, id: KeyId) -> Answer {
        let (answer, answered) = oneshot::channel();
        {
            let mut under_way = self.under_way.lock();
            if let Some(waiting) = under_way.get_mut(&id) {
                waiting.push(answer);
            } else {
                let exists = self.ids.len().is_some() && self.ids.may_have(id);
                if under_way.len() >= if exists { MOST_KEYS_UNDER_WAY } else { MOST_UNDER_WAY } {
                    return Err(unavailable());
                }
                under_way.insert(id, vec![answer]);
                drop(under_way);
                let look_up = UnderWay { keys: Arc::clone(self), id, answer: Err(unavailable()) };
                self.runtime.spawn(async move {
                    let answer = look_up.keys.look_up(id).await;
                    look_up.answer(answer);
                });
            }
        }
        answered.await.unwrap_or_else(|_| Err(unavailable()))
    }

    async fn look_up(&self, id: KeyId) -> Answer {
        let forgotten = self.changes.lock().forgotten;
        let over = match self.cache.key(id).await.unwrap_or(CachedKey::Nothing) {
            CachedKey::Found(found) if self.changes.lock().allow_cached(id, &found) => {
                return Ok(self.take(id, &found, forgotten));
            }
            // A change that is written at the same time stays.
            CachedKey::Found(found) if self.changes.lock().may_be(&found) => Over::Older,
            CachedKey::Found(_) | CachedKey::Refused => Over::Anything,
            CachedKey::Nothing => Over::Nothing,
        };
        match self.in_postgres(id).await {
            Ok(found) => {
                // In a task of its own, so that the caller doesn't wait for it.
                let (cache, write) = (self.cache.clone(), vec![(id, found.clone())]);
                tokio::spawn(async move { cache.write_keys(&write, over).await });
                Ok(self.take(id, &found, forgotten))
            }
            Err(error) => {
                // Held so that no change intervenes.
                let _changes = self.changes.lock();
                match self.known.get(&id) {
                    // It was known, and no change says otherwise. It isn't written to Redis, where others would take it
                    // for new.
                    Some(known) => {
                        let known = Known { until: Instant::now() + STALE_FOR, ..known };
                        self.known.insert(id, known.clone());
                        Ok(Some(known))
                    }
                    None => Err(error),
                }
            }
        }
    }

    async fn in_postgres(&self, id: KeyId) -> Result<LookedUp, ApiKeyError> {
        if !self.connected.load(Ordering::Relaxed) {
            return Err(unavailable());
        }
        let _turn = if self.ids.may_have(id) { None } else { self.turn().await? };
        self.looked_up.fetch_add(1, Ordering::Relaxed);
        self.look_ups.look_up(id).await.ok_or_else(unavailable)
    }

    /// Waits for a turn to look up an id that no key has; a guard that is returned is held during the look-up.
    async fn turn(&self) -> Result<Option<tokio::sync::MutexGuard<'_, ()>>, ApiKeyError> {
        match self.limiter.acquire(&self.rule, "postgres").await {
            Ok(decision) if decision.allowed => Ok(None),
            Ok(decision) => {
                let retry_after = decision.retry_after.duration().unwrap_or_default().max(Duration::from_secs(1));
                Err(ApiKeyError::Unavailable { retry_after })
            }
            Err(_) => {
                let turn = timeout(TURN_WITHIN, self.uncounted.lock()).await.map_err(|_| unavailable())?;
                sleep(BETWEEN_UNCOUNTED).await;
                Ok(Some(turn))
            }
        }
    }

    /// Remembers what was found. If it has changed meanwhile, or everything was forgotten since the look-up began, it
    /// is returned but not remembered.
    fn take(&self, id: KeyId, found: &LookedUp, forgotten: u64) -> Option<Known> {
        let until = Instant::now() + KEYS_TTL;
        let known = found.key.as_ref().map(|key| Known {
            account: key.account(id),
            key: Arc::new(key.clone()),
            version: found.version,
            until,
        });
        // Held until the result is remembered, so that no change intervenes.
        let mut changes = self.changes.lock();
        if changes.forgotten != forgotten {
            return known;
        }
        if changes.is_of_now(found) {
            changes.newest = changes.newest.max(found.version);
        }
        let newer = self.known.get(&id).filter(|known| changes.is_of_now(found) && known.version > found.version);
        if newer.is_some() {
            return newer;
        }
        if changes.allow(id, found) {
            match &known {
                Some(known) => {
                    self.unknown.remove(&id);
                    self.known.insert(id, known.clone());
                }
                None => {
                    self.known.remove(&id);
                    self.unknown.insert(id, until);
                }
            }
        }
        drop(changes);
        known
    }

    /// Applies the changes since the last call, in order. The first call gets the latest changes before this process
    /// started, since something older may be cached in Redis.
    pub(crate) fn changed<'c>(
        &self,
        (history, newest): (&str, i64),
        changed: impl IntoIterator<Item = &'c (KeyId, LookedUp)>,
        oldest: i64,
    ) {
        let mut changes = self.changes.lock();
        changes.history = history.to_owned();
        changes.newest = newest;
        let now = Instant::now();
        changes.forget_until(now);
        // Anything cached at an older version may have changed since.
        let is_older = oldest > changes.oldest;
        changes.oldest = changes.oldest.max(oldest);
        for (id, found) in changed {
            self.ids.change(*id, found.key.is_some());
            changes.of_ids.insert(*id, (found.version, now + KEYS_TTL * 2));
            self.unknown.remove(id);
            // Skipped if a look-up has read something newer.
            let Some(_) = self.known.get(id).filter(|known| known.version <= found.version) else { continue };
            match &found.key {
                Some(key) => {
                    let (account, key) = (key.account(*id), Arc::new(key.clone()));
                    let known = Known { key, account, version: found.version, until: now + KEYS_TTL };
                    self.known.insert(*id, known);
                }
                None => drop(self.known.remove(id)),
            }
        }
        if is_older {
            // Remembered while the changes were being read.
            self.known.retain(|_, known| known.version >= oldest);
            self.unknown.clear();
            self.ids.reload();
        }
    }

    /// The ids of the keys that this process remembers.
    pub(crate) fn remembered_ids(&self) -> Vec<KeyId> {
        self.known.iter().map(|(id, _)| id).collect()
    }

    /// Forgets everything, since the database is another one than before.
    pub(crate) fn forget(&self) {
        let mut changes = self.changes.lock();
        *changes = ChangedIds { forgotten: changes.forgotten + 1, ..ChangedIds::default() };
        self.ids.forget();
        self.known.clear();
        self.unknown.clear();
    }
}

impl ChangedIds {
    /// Forgets changes that are long past. Somebody who may write to Redis can put back an entry from before one of
    /// them, so entries as old as that aren't used any more.
    fn forget_until(&mut self, now: Instant) {
        let Self { of_ids, oldest, .. } = self;
        of_ids.retain(|_, (version, until)| {
            let is_recent = *until > now;
            if !is_recent {
                *oldest = (*oldest).max(*version);
            }
            is_recent
        });
    }

    /// Whether the database has such a version.
    fn may_be(&self, found: &LookedUp) -> bool {
        self.is_of_now(found) && found.version <= self.newest
    }

    /// Whether what Redis has on an id can be used.
    fn allow_cached(&self, id: KeyId, found: &LookedUp) -> bool {
        self.may_be(found) && self.allow(id, found)
    }

    /// Whether what was read of an id is still current, as far as this process knows.
    fn allow(&self, id: KeyId, found: &LookedUp) -> bool {
        let is_known = |changed: &(i64, Instant)| found.version >= changed.0;
        self.is_of_now(found) && found.version >= self.oldest && self.of_ids.get(&id).is_none_or(is_known)
    }

    /// Whether it belongs to the database's current history.
    fn is_of_now(&self, found: &LookedUp) -> bool {
        found.history == self.history
    }
}

impl UnderWay {
    fn answer(mut self, answer: Answer) {
        self.answer = answer;
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        for waiting in self.keys.under_way.lock().remove(&self.id).unwrap_or_default() {
            // The receiver may be gone: its caller gave up.
            let _ = waiting.send(self.answer.clone());
        }
    }
}

fn unavailable() -> ApiKeyError {
    ApiKeyError::Unavailable { retry_after: Duration::from_secs(1) }
}
