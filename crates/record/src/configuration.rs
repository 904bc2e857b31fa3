//! The configuration in force in a process: rules, users and API keys.

mod cached_users;
mod entries;
mod follow;
mod keep_cached;
mod key_filter;
mod lookup;
mod lookup_batch;
mod own_thread;
mod redis_cache;
mod state;

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use arc_swap::{ArcSwap, ArcSwapOption};
use tokio::sync::oneshot;
use tollgate::Limiter;
use tollgate::rules::{
    Account, ApiKeyError, ApiKeyLookup, Attributes, DecisionSink, FoundAccount, OnResponse, RuleSet, RuleSource,
    Verdict,
};

use crate::postgres::{Postgres, PostgresError, runtime_with_timers};
use crate::stored::users_in_force::Users;
use crate::telemetry;
use crate::totals::{Totals, write_totals};
use lookup::Keys;
use own_thread::OwnThread;
use redis_cache::Cache;
use state::{NOT_APPLIED, Shared};

/// Rules, users and API keys that follow the database: a change is in force in every connected process within a second
/// of its commit, or as soon as its rows are read if it changes very many users at once. A user takes some 90 bytes of
/// memory, more with a long name or reason. Cheap to clone; all clones share one state, which follows the database
/// until the last clone is dropped. The remaining totals are then still written if the runtime keeps running and
/// PostgreSQL is reachable within 15 seconds.
///
/// ```no_run
/// use tollgate_record::Postgres;
/// use tollgate::rules::Attributes;
/// use tollgate::{Limiter, Redis};
///
/// # async fn serve(request_key: &str) -> Result<(), Box<dyn std::error::Error>> {
/// let limiter = Limiter::new(Redis::open("redis://127.0.0.1/")?);
/// let configuration = Postgres::open("postgres://limits@127.0.0.1/app")?.follow(&limiter).await?;
///
/// let account = configuration.account_of_key(request_key).await?;
/// let request = Attributes::new().account(&account).path("/api/v1/items");
/// let verdict = limiter.acquire_by(&configuration.rules(), &request).await?;
/// configuration.count(&request, verdict.allowed);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Configuration {
    shared: Arc<Shared>,
}

/// The state of a process's connection to the database, and of its configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Status {
    /// Version of the configuration last read; it grows with each change. If changed rules can't be used, the previous
    /// ones stay in force.
    pub version: i64,
    /// Whether the database was heard from within the last few seconds. If not, the last known configuration is in
    /// force.
    pub is_connected: bool,
    /// Whether this process started while PostgreSQL couldn't be used, and hasn't read from it since. Its configuration
    /// is then the one that other processes left in Redis. [`outage`](Configuration::outage) says why.
    pub is_from_cache: bool,
    /// Changes of rules put in force so far.
    pub reloads: u64,
    /// Changes of rules that could not be used so far; the previous rules stayed in force.
    pub failures: u64,
    /// Rows of users read so far: all at the start, and those that have changed since.
    pub users_read: u64,
    /// API keys looked up in PostgreSQL so far, since neither this process nor Redis knew them.
    pub key_look_ups: u64,
    /// API keys that this process knows to exist. `None` until it has read their ids, a moment after its start, and if
    /// there are more than five million.
    pub keys_known: Option<u64>,
    /// Entries in Redis so far that were refused, since they weren't sealed with the secret: another program wrote
    /// them, or a process with another secret. PostgreSQL then decides.
    pub cache_refused: u64,
    /// Age of the oldest request that isn't in the database's totals yet.
    pub totals_lag: Duration,
    /// Requests of this process that the totals will never have: there were too many users while PostgreSQL was
    /// unreachable.
    pub totals_lost: u64,
}

impl Postgres {
    /// Reads the configuration and follows it, on a thread of its own, which has one connection to PostgreSQL and one
    /// to Redis: however much is read, tasks of this runtime don't wait for it. A change of rules takes effect as a
    /// whole or, if it can't be used, not at all. While PostgreSQL is unreachable, the last configuration stays in
    /// force.
    ///
    /// The configuration is cached in the limiter's Redis, under its prefix. If PostgreSQL can't be used now, because
    /// it is unreachable, is recovering, refuses connections, or rejects the password or a right, the configuration
    /// that other processes left there in the last five minutes is in force until it can;
    /// [`outage`](Configuration::outage), the log and the metrics say why. Without a
    /// [`cache_secret`](Self::cache_secret) its rules and users can't be verified, and no API key is accepted
    /// meanwhile.
    ///
    /// # Errors
    ///
    /// PostgreSQL can't be used, and nothing is cached; no tables, or those of another version; a server that is too
    /// old; rules that can't be used; no thread.
    pub async fn follow(&self, limiter: &Limiter) -> Result<Configuration, PostgresError> {
        let runtime = runtime_with_timers()?;
        let cache = Cache::new(limiter, &self.name(), self.seal.as_ref());
        let connected = Arc::new(AtomicBool::new(true));
        let shared = Shared {
            rules: ArcSwap::from_pointee(RuleSet::default()),
            users: Users::new(),
            keys: Keys::new(self, &cache, limiter, &connected),
            totals: Arc::new(Totals::new(self.clone())),
            version: AtomicI64::new(0),
            rules_version: AtomicI64::new(NOT_APPLIED),
            connected,
            from_cache: AtomicBool::new(false),
            outage: ArcSwapOption::empty(),
            reloads: AtomicU64::new(0),
            failures: AtomicU64::new(0),
            users_read: AtomicU64::new(0),
            runtime,
            thread: OnceLock::new(),
            keeps_ids: OnceLock::new(),
            to_cache: Arc::default(),
            history: ArcSwap::default(),
            cache,
        };
        let shared = Arc::new(shared);
        let (begun, has_begun) = oneshot::channel();
        let following = follow::follow(Arc::downgrade(&shared), Arc::clone(&shared.connected), self.clone(), begun);
        let no_thread =
            |error| PostgresError::refused(format!("postgres: can't start the thread that follows it: {error}"));
        // The thread ends with the last clone.
        let _ = shared.thread.set(OwnThread::start(following).map_err(no_thread)?);
        has_begun.await.unwrap_or_else(|_| Err(PostgresError::lost()))?;
        if shared.rules.load().is_empty() {
            telemetry::no_rules();
        }
        let ids = tokio::spawn(key_filter::keep_ids(Arc::clone(&shared.keys.ids), self.clone()));
        let _ = shared.keeps_ids.set(ids.abort_handle());
        tokio::spawn(write_totals(Arc::downgrade(&shared.totals), Arc::clone(&shared.connected)));
        Ok(Configuration { shared })
    }
}

impl Configuration {
    /// The rules in force.
    #[must_use]
    pub fn rules(&self) -> RuleSet {
        self.shared.rules.load().as_ref().clone()
    }

    /// The user's own tier, limits or block, if there are any. Makes no round trip, and takes no lock.
    #[must_use]
    pub fn account_of_user(&self, user: &str) -> Option<Account> {
        self.shared.users.get(user)
    }

    /// The account that an API key belongs to. Makes no round trip if this process has seen the key in the last ten
    /// minutes, and none for a text without the checksum of this database's keys, which nobody else can make. Otherwise
    /// it makes one to Redis and, if Redis doesn't know the key, a query, which it shares with all keys that are looked
    /// up at the same time. Of ids that no key has (of a deleted key, or of one made within the last second), all
    /// processes together look up at most 100 in any second, and make one more round trip to Redis for it; keys that
    /// exist don't wait for these.
    ///
    /// After a start from the cache, while PostgreSQL is unreachable, checksums can't be verified and each unknown text
    /// costs a round trip to Redis. Keys are then accepted if the service has given a [secret](Postgres::cache_secret).
    ///
    /// # Errors
    ///
    /// Why the key is rejected, or that this can't be known now.
    pub async fn account_of_key(&self, key: impl AsRef<[u8]>) -> Result<Account, ApiKeyError> {
        let account = self.shared.keys.account(key.as_ref()).await;
        telemetry::api_key(account.as_ref().err().map_or("valid", ApiKeyError::name));
        let account = account?;
        Ok(match self.shared.users.get(account.user()) {
            Some(user) => account.with_user(&user),
            None => account,
        })
    }

    /// Counts a decided request for its user and, if it was allowed, for its API key. Makes no round trip: totals are
    /// written once a second, and lost if the process is killed before that. Users whose names aren't UTF-8, contain
    /// NUL or exceed 512 bytes aren't counted. [`RateLimitLayer`](tollgate::middleware::RateLimitLayer) calls this
    /// itself.
    pub fn count(&self, request: &Attributes<'_>, allowed: bool) {
        if let Some(user) = request.user_name() {
            self.shared.totals.count(user, request.key_id(), allowed);
        }
    }

    /// The state of this process's connection to the database, and of its configuration.
    #[must_use]
    pub fn status(&self) -> Status {
        let Shared { version, connected, from_cache, reloads, failures, users_read, keys, cache, totals, .. } =
            &*self.shared;
        Status {
            version: version.load(Ordering::Relaxed),
            is_connected: connected.load(Ordering::Relaxed),
            is_from_cache: from_cache.load(Ordering::Relaxed),
            reloads: reloads.load(Ordering::Relaxed),
            failures: failures.load(Ordering::Relaxed),
            users_read: users_read.load(Ordering::Relaxed),
            key_look_ups: keys.looked_up(),
            keys_known: keys.ids.len().map(|count| count as u64),
            cache_refused: cache.refused(),
            totals_lag: totals.lag(),
            totals_lost: totals.lost(),
        }
    }

    /// Why the database can't be used; `None` while it can. For whoever operates the service: a rejected password shows
    /// here, while decisions go on by the last known configuration.
    #[must_use]
    pub fn outage(&self) -> Option<PostgresError> {
        self.shared.outage.load().as_deref().cloned()
    }

    /// Writes the totals that aren't in the database yet. Call it after the service has sent its last response.
    ///
    /// # Errors
    ///
    /// Why they couldn't be written, such as a server that didn't answer within about 15 seconds. The totals are kept,
    /// so the call may be repeated; but if PostgreSQL refuses the data itself, they are dropped and counted as lost.
    pub async fn finish(&self) -> Result<(), PostgresError> {
        self.shared.totals.finish().await
    }
}

/// The rules in force, the users' own tiers, limits and blocks, and a count of each user's requests.
impl RuleSource for Configuration {
    fn rules(&self) -> RuleSet {
        self.rules()
    }

    fn knows_users(&self) -> bool {
        true
    }

    fn account_of_user(&self, user: &str) -> Option<Account> {
        self.account_of_user(user)
    }

    fn sink(&self) -> Option<&dyn DecisionSink> {
        Some(self)
    }
}

/// Counts requests, as [`count`](Configuration::count) does.
impl DecisionSink for Configuration {
    fn decided(&self, request: &Attributes<'_>, verdict: &Verdict, _: Duration) -> Option<Box<dyn OnResponse>> {
        self.count(request, verdict.allowed);
        None
    }
}

impl ApiKeyLookup for Configuration {
    fn account_of_key(&self, key: Vec<u8>) -> FoundAccount<'_> {
        Box::pin(self.account_of_key(key))
    }
}

impl fmt::Debug for Configuration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (rules, users, status) = (self.rules().len(), self.shared.users.len(), self.status());
        let mut shown = f.debug_struct("Configuration");
        shown.field("rules", &rules).field("users", &users).field("status", &status).finish_non_exhaustive()
    }
}
