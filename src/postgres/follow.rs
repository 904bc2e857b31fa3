//! Follows the database: changes are read when PostgreSQL announces them, and checked for every 2 seconds in any case.
//! Everything is read once; after a lost connection, what has changed since.

use std::collections::HashMap;
use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use futures_util::future::{Either, select};
use tokio::sync::{Notify, oneshot};
use tokio::time::{sleep, timeout};
use tokio_postgres::{AsyncMessage, Client, IsolationLevel, Row, Transaction};

use super::cache::{Head, HeadedRules, REFRESHED_EVERY};
use super::cached_users::Digested;
use super::configuration::{NOT_APPLIED, Shared};
use super::key_text::KeyId;
use super::keys::{self, KeyRecord, LookedUp, MOST_CHANGES};
use super::snapshot;
use super::totals::{Totals, WRITTEN_EVERY};
use super::{Postgres, PostgresError, checked_version, rules, users};
use crate::random::jittered;
use crate::rules::RuleSet;
use crate::telemetry;

/// How often the version is checked, whatever is announced: this notices a connection that died silently.
const CHECKED_EVERY: Duration = Duration::from_secs(2);
const ANSWERED_WITHIN: Duration = Duration::from_secs(2);
/// For one statement that reads changes. Users are read in pages, so a million take no longer at a time than a few.
pub(super) const READ_WITHIN: Duration = Duration::from_secs(10);
/// Changes that come sooner after one another are written to Redis together.
const BETWEEN_WRITES: Duration = Duration::from_secs(1);
/// The wait before reconnecting; a random share of up to as much again is added.
const PAUSE: Duration = Duration::from_millis(200);

/// The versions that a process, or the database, has.
#[derive(Clone, Default, PartialEq, Eq)]
struct Versions {
    history: String,
    all: i64,
    /// Tells this version from another one with the same number, as a database restored to an earlier moment makes.
    mark: Option<String>,
    rules: i64,
    truncated: i64,
    /// What seals the entries in Redis; no version, but read with these.
    cache_secret: Vec<u8>,
    /// What checksums of API keys are made with.
    key_secret: Vec<u8>,
}

/// What a process knows, from one connection to the next.
#[derive(Default)]
struct Known {
    versions: Versions,
    /// Sets of rules that requests may still hold. Dropping ten thousand rules takes a while, which is spent here.
    retired: Vec<RuleSet>,
}

/// Who waits for the start, until it has succeeded or failed.
type Begun = Option<oneshot::Sender<Result<(), PostgresError>>>;

/// Changes since the last read.
struct Changes {
    versions: Versions,
    /// `None` if unchanged; an error if they can't be used.
    rules: Option<Result<RuleSet, PostgresError>>,
    users: snapshot::Changes,
    /// How many rows of users were read.
    users_read: u64,
    /// In order, so the last change of a key comes last.
    keys: Vec<(KeyId, LookedUp)>,
    /// The current state of the keys that this process knows, if not all changes were read.
    verified: Vec<(KeyId, LookedUp)>,
    /// Not all changes of keys before this version were read.
    oldest: i64,
}

/// Reads all that a process starts with, and listens for as long as the configuration is in use. If PostgreSQL is away
/// at the start, begins with what is cached.
pub(super) async fn follow(
    shared: Weak<Shared>,
    connected: Arc<AtomicBool>,
    postgres: Postgres,
    begun: oneshot::Sender<Result<(), PostgresError>>,
) {
    let _following = Following(connected);
    let (mut known, mut begun) = (Known::default(), Some(begun));
    loop {
        let Err(lost) = listen(&shared, &postgres, &mut known, &mut begun).await;
        let Some(shared) = shared.upgrade() else { return };
        if begun.is_some() {
            if let Err(error) = begin_from_cache(&shared, lost).await {
                return begin(&shared, &mut begun, Err(error));
            }
            begin(&shared, &mut begun, Ok(()));
        } else if shared.connected.swap(false, Ordering::Relaxed) {
            telemetry::database_lost(&lost);
        }
        drop(shared);
        sleep(jittered(PAUSE, 100)).await;
    }
}

/// Tells whoever waits for the start how it went.
fn begin(shared: &Arc<Shared>, begun: &mut Begun, result: Result<(), PostgresError>) {
    let Some(begun) = begun.take() else { return };
    if result.is_ok() {
        tokio::spawn(keep_cached(Arc::downgrade(shared), Arc::clone(&shared.to_cache)));
    }
    // Whoever waited may have given up.
    let _ = begun.send(result);
}

/// Takes what other processes left in Redis, if PostgreSQL can't be reached and if there is any.
async fn begin_from_cache(shared: &Shared, error: PostgresError) -> Result<(), PostgresError> {
    let cached = if error.is_unreachable() { shared.cache.read().await.ok().flatten() } else { None };
    let Some(cached) = cached else { return Err(error) };
    telemetry::started_from_cache(&error);
    shared.rules.store(Arc::new(cached.rules.rules));
    shared.rules_version.store(cached.rules.head.version, Ordering::Relaxed);
    shared.users.apply(cached.users);
    shared.version.store(cached.head.version, Ordering::Relaxed);
    shared.keys.changed((&cached.head.history, cached.head.version), [], 0);
    shared.history.store(Arc::new(cached.head.history));
    shared.from_cache.store(true, Ordering::Relaxed);
    shared.connected.store(false, Ordering::Relaxed);
    Ok(())
}

/// Marks the database as disconnected on drop, also when the runtime has ended.
struct Following(Arc<AtomicBool>);

impl Drop for Following {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

/// Takes each change, on a connection of its own, until that is lost.
async fn listen(
    shared: &Weak<Shared>,
    postgres: &Postgres,
    known: &mut Known,
    begun: &mut Begun,
) -> Result<Infallible, PostgresError> {
    let (mut client, mut connection) = postgres.connect().await?;
    let changed = Notify::new();
    let heard = async {
        loop {
            match poll_fn(|context| connection.poll_message(context)).await {
                Some(Ok(AsyncMessage::Notification(_))) => changed.notify_one(),
                Some(Ok(_)) => {}
                Some(Err(error)) => return Err(PostgresError::from(error)),
                None => return Err(PostgresError::lost()),
            }
        }
    };
    let taken = async {
        in_time(ANSWERED_WITHIN, checked_version(&client)).await??;
        // Before reading anything, so that no change is missed.
        in_time(ANSWERED_WITHIN, client.batch_execute("LISTEN tollgate")).await?;
        loop {
            take(shared, &mut client, known, begun).await?;
            let _ = timeout(CHECKED_EVERY, changed.notified()).await;
        }
    };
    match select(pin!(heard), pin!(taken)).await {
        Either::Left((lost, _)) | Either::Right((lost, _)) => lost,
    }
}

/// Takes the changes that aren't known yet.
async fn take(
    shared: &Weak<Shared>,
    client: &mut Client,
    known: &mut Known,
    begun: &mut Begun,
) -> Result<(), PostgresError> {
    let before = &known.versions;
    let row = in_time(ANSWERED_WITHIN, client.query_one(VERSIONS, &[&before.all, &before.mark])).await?;
    let now = Versions::of(&row);
    // A version that was set by hand has no mark.
    let is_same = now.all == before.all && before.mark.is_none();
    let is_later = is_same || row.get("is_later");
    let Some(shared) = shared.upgrade() else { return Ok(()) };
    // Of a database that was restored to an earlier moment, everything is read again.
    let before = if is_later && now.history == before.history { before.clone() } else { Versions::default() };
    if now != before {
        let changes = read(client, &before, || shared.keys.known_ids()).await?;
        if let (true, Some(Err(error))) = (begun.is_some(), &changes.rules) {
            return Err(error.clone());
        }
        known.versions = changes.versions.clone();
        apply(&shared, changes, &mut known.retired);
    }
    known.retired.retain(RuleSet::is_shared);
    shared.from_cache.store(false, Ordering::Relaxed);
    if !shared.connected.swap(true, Ordering::Relaxed) {
        telemetry::database_found();
    }
    begin(&shared, begun, Ok(()));
    Ok(())
}

/// Puts changes in force, and leaves them to the task that writes them to Redis, without waiting for it.
fn apply(shared: &Shared, changes: Changes, retired: &mut Vec<RuleSet>) {
    let Changes { versions, rules, users, users_read, keys, verified, oldest } = changes;
    if **shared.history.load() != versions.history {
        shared.keys.forget();
        shared.history.store(Arc::new(versions.history.clone()));
    }
    shared.cache.seal_with(&versions.cache_secret);
    shared.keys.check_with(&versions.key_secret);
    match rules {
        Some(Ok(rules)) => {
            if !rules.is_same_as(&shared.rules.load()) {
                // Not at the start, when there were none before.
                if shared.version.load(Ordering::Relaxed) > 0 {
                    telemetry::reloaded(Ok(&rules));
                    shared.reloads.fetch_add(1, Ordering::Relaxed);
                }
                retired.push(RuleSet::clone(&shared.rules.swap(Arc::new(rules))));
            }
            shared.rules_version.store(versions.rules, Ordering::Relaxed);
        }
        Some(Err(error)) => {
            telemetry::reloaded(Err(&error));
            shared.failures.fetch_add(1, Ordering::Relaxed);
            shared.rules_version.store(NOT_APPLIED, Ordering::Relaxed);
        }
        None => {}
    }
    shared.users.apply(users);
    shared.users_read.fetch_add(users_read, Ordering::Relaxed);
    let known = shared.version.swap(versions.all, Ordering::Relaxed);
    // At the start, what others have cached needs no change: whatever is older isn't used.
    let is_start = known == 0;
    let is_new = |found: &LookedUp| !is_start && found.version > known;
    let to_cache: Vec<_> = keys.iter().filter(|(_, found)| is_new(found)).cloned().collect();
    shared.keys.changed((&versions.history, versions.all), keys.iter().chain(&verified), oldest);
    shared.to_cache.add(to_cache);
}

/// The versions of now, and whether they are this known one or came after it.
const VERSIONS: &str = "
    SELECT history::text, version, rules_version, truncated_version, cache_secret, key_secret,
        (SELECT mark::text FROM tollgate.versions WHERE version = configuration.version) AS mark,
        EXISTS (SELECT 1 FROM tollgate.versions WHERE version = $1 AND mark::text = $2) AS is_later
    FROM tollgate.configuration";

const DELETED: &str =
    "SELECT version, user_id, key_id FROM tollgate.deletions WHERE version > $1 ORDER BY version DESC LIMIT 10000";

impl Versions {
    fn of(row: &Row) -> Self {
        Self {
            history: row.get("history"),
            all: row.get("version"),
            mark: row.get("mark"),
            rules: row.get("rules_version"),
            truncated: row.get("truncated_version"),
            cache_secret: row.get("cache_secret"),
            key_secret: row.get("key_secret"),
        }
    }
}

/// All changes since these versions, as of one moment.
async fn read(
    client: &mut Client,
    before: &Versions,
    known_ids: impl FnOnce() -> Vec<KeyId>,
) -> Result<Changes, PostgresError> {
    let transaction = one_moment(client).await?;
    let versions = Versions::of(&transaction.query_one(VERSIONS, &[&before.all, &before.mark]).await?);
    let rules = match versions.rules == before.rules {
        true => None,
        false => match rules::read(&transaction).await {
            Err(error) if !error.is_input() => return Err(error),
            rules => Some(rules),
        },
    };
    let is_truncated = before.truncated < versions.truncated;
    let deleted = transaction.query(DELETED, &[&before.all]).await?;
    let is_all_deleted = deleted.len() < MOST_CHANGES;
    // If tables were truncated, or not all deletions were read, all users are read again.
    let are_users_anew = is_truncated || !is_all_deleted;
    let mut users = snapshot::Changes::new(are_users_anew || before.all == 0);
    // A deleted user may have been created again, so the rows that exist come last.
    for user in deleted.iter().filter_map(|row| row.get::<_, Option<&str>>("user_id")) {
        users.add(user, &snapshot::Settings::default());
    }
    let users_read = users::read(&transaction, if are_users_anew { 0 } else { before.all }, &mut users).await?;
    let found = |version: i64, key| LookedUp { history: versions.history.clone(), version, key };
    let rows = transaction.query(keys::CHANGED, &[&before.all]).await?;
    let changed = rows
        .iter()
        .filter_map(|row| Some((KeyId::read(row.get("key_id"))?, found(row.get("version"), Some(KeyRecord::of(row))))));
    let gone = deleted
        .iter()
        .filter_map(|row| Some((KeyId::read(row.get::<_, Option<&str>>("key_id")?)?, found(row.get("version"), None))));
    let mut keys: Vec<_> = changed.chain(gone).collect();
    // If a key was deleted and created again in one version, the existing row comes last.
    keys.sort_by_key(|(_, found)| (found.version, found.key.is_some()));
    let first_of =
        |rows: &[Row]| rows.last().filter(|_| rows.len() >= MOST_CHANGES).map_or(0, |row| row.get::<_, i64>("version"));
    let truncated = if is_truncated { versions.truncated } else { 0 };
    let oldest = first_of(&rows).max(first_of(&deleted)).max(truncated);
    let known = if oldest == 0 { Vec::new() } else { known_ids() };
    let mut verified = Vec::new();
    if !known.is_empty() {
        let ids: Vec<_> = known.iter().map(KeyId::as_str).collect();
        let rows = transaction.query(keys::OF_IDS, &[&ids]).await?;
        let there: HashMap<_, _> =
            rows.iter().filter_map(|row| Some((KeyId::read(row.get("key_id"))?, KeyRecord::of(row)))).collect();
        verified.extend(known.iter().map(|id| (*id, found(versions.all, there.get(id).cloned()))));
    }
    transaction.commit().await?;
    Ok(Changes { versions, rules, users, users_read, keys, verified, oldest })
}

/// A transaction that reads everything as of one moment.
pub(super) async fn one_moment(client: &mut Client) -> Result<Transaction<'_>, PostgresError> {
    let transaction = client.build_transaction().read_only(true).isolation_level(IsolationLevel::RepeatableRead);
    Ok(transaction.start().await?)
}

/// Keeps the configuration in Redis, for processes that start while PostgreSQL is away: changes at once, and everything
/// each minute.
pub(super) async fn keep_cached(shared: Weak<Shared>, to_cache: Arc<ToCache>) {
    let (mut is_whole, mut users) = (true, Digested::default());
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
        let written = shared.cache.write(of, rules, &users).await;
        let written = written.and(shared.cache.write_keys(&keys, true).await);
        if written.is_err() {
            to_cache.put_back(keys);
        }
        drop(shared);
        // After a failure everything is written once Redis is back: a restart may have emptied it.
        let pause = if written.is_ok() { REFRESHED_EVERY } else { REFRESHED_EVERY / 10 };
        sleep(BETWEEN_WRITES).await;
        is_whole = timeout(jittered(pause, 20), to_cache.changed.notified()).await.is_err() || written.is_err();
    }
}

/// Changes of keys that aren't in Redis yet. (Changed users and rules are written whenever anything is.)
#[derive(Default)]
pub(super) struct ToCache {
    changed: Notify,
    waiting: Mutex<Vec<(KeyId, LookedUp)>>,
}

impl ToCache {
    fn add(&self, keys: Vec<(KeyId, LookedUp)>) {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).extend(keys);
        self.changed.notify_one();
    }

    /// Puts keys back for the next write; keeps the latest if there are more than are read at once.
    fn put_back(&self, mut keys: Vec<(KeyId, LookedUp)>) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        keys.append(&mut waiting);
        *waiting = keys.split_off(keys.len().saturating_sub(MOST_CHANGES));
    }

    fn take(&self) -> Vec<(KeyId, LookedUp)> {
        std::mem::take(&mut *self.waiting.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Writes the totals once a second.
pub(super) async fn write_totals(totals: Weak<Totals>, connected: Arc<AtomicBool>) {
    let mut failed = false;
    loop {
        let Some(totals) = totals.upgrade() else { return };
        telemetry::totals(totals.lag(), totals.lost(), connected.load(Ordering::Relaxed));
        let written = totals.write(false).await;
        if let Err(error) = &written
            && !failed
        {
            telemetry::totals_unwritten(error);
        }
        failed = written.is_err();
        drop(totals);
        sleep(jittered(WRITTEN_EVERY, 10)).await;
    }
}

pub(super) async fn in_time<T>(
    most: Duration,
    work: impl Future<Output = Result<T, tokio_postgres::Error>>,
) -> Result<T, PostgresError> {
    match timeout(most, work).await {
        Ok(done) => Ok(done?),
        Err(_) => Err(PostgresError::lost()),
    }
}
