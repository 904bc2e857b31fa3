//! Follows the database: changes are read when PostgreSQL announces them, and checked for every 2 seconds in any case.

use std::collections::{BTreeSet, HashMap};
use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use futures_util::future::{Either, select};
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};
use tokio_postgres::{AsyncMessage, Client, IsolationLevel, Row, Transaction};

use super::cache::{Head, HeadedRules, REFRESHED_EVERY};
use super::configuration::{NOT_APPLIED, Shared};
use super::key_text::KeyId;
use super::keys::{self, KeyRecord, LookedUp, MOST_CHANGES};
use super::snapshot::PARTS;
use super::totals::{Totals, WRITTEN_EVERY};
use super::{Postgres, PostgresError, rules, users};
use crate::random::jittered;
use crate::rules::{Account, RuleSet};
use crate::telemetry;

/// How often the version is checked, whatever is announced: this notices a connection that died silently.
const CHECKED_EVERY: Duration = Duration::from_secs(2);
const ANSWERED_WITHIN: Duration = Duration::from_secs(2);
/// For reading changes.
const CHANGES_WITHIN: Duration = Duration::from_secs(5);
/// For reading what may be large: all users.
const READ_WITHIN: Duration = Duration::from_secs(30);
/// The wait before reconnecting; a random share of up to as much again is added.
const PAUSE: Duration = Duration::from_millis(200);

/// The versions that a process, or the database, has.
#[derive(Clone, Default, PartialEq, Eq)]
struct Versions {
    history: String,
    all: i64,
    rules: i64,
    truncated: i64,
    /// What seals the entries in Redis; no version, but read with these.
    cache_secret: Vec<u8>,
    /// What checksums of API keys are made with.
    key_secret: Vec<u8>,
}

/// Changes since the last read.
struct Changes {
    versions: Versions,
    /// `None` if unchanged; an error if they can't be used.
    rules: Option<Result<RuleSet, PostgresError>>,
    users: Vec<(String, Option<Account>)>,
    /// Whether `users` is the complete list.
    are_users_anew: bool,
    /// In order, so the last change of a key comes last.
    keys: Vec<(KeyId, LookedUp)>,
    /// The current state of the keys that this process knows, if not all changes were read.
    verified: Vec<(KeyId, LookedUp)>,
    /// Not all changes of keys before this version were read.
    oldest: i64,
}

/// Reads all that a process starts with.
pub(super) async fn begin(shared: &Shared, postgres: &Postgres) -> Result<(), PostgresError> {
    let mut connection = postgres.connection().await?;
    let all = timeout(READ_WITHIN, read(&mut connection, &Versions::default(), Vec::new)).await;
    let changes = all.unwrap_or_else(|_| Err(PostgresError::late(postgres.address())))?;
    shared.cache.seal_with(&changes.versions.cache_secret);
    shared.keys.check_with(&changes.versions.key_secret);
    if let Some(rules) = changes.rules {
        shared.rules.store(Arc::new(rules?));
    }
    shared.rules_version.store(changes.versions.rules, Ordering::Relaxed);
    shared.users.take(changes.users, true);
    shared.keys.changed((&changes.versions.history, changes.versions.all), &changes.keys, changes.oldest);
    shared.history.store(Arc::new(changes.versions.history));
    shared.version.store(changes.versions.all, Ordering::Relaxed);
    Ok(())
}

/// Listens for as long as the configuration is in use.
pub(super) async fn follow(shared: Weak<Shared>, connected: Arc<AtomicBool>, postgres: Postgres) {
    let _following = Following(connected);
    loop {
        let Err(lost) = listen(&shared, &postgres).await;
        let Some(shared) = shared.upgrade() else { return };
        if shared.connected.swap(false, Ordering::Relaxed) {
            telemetry::database_lost(&lost);
        }
        drop(shared);
        sleep(jittered(PAUSE, 100)).await;
    }
}

/// Marks the database as disconnected on drop, also when the runtime has ended.
struct Following(Arc<AtomicBool>);

impl Drop for Following {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

/// Takes each change, on a connection of its own, until that is lost.
async fn listen(shared: &Weak<Shared>, postgres: &Postgres) -> Result<Infallible, PostgresError> {
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
        // Before reading anything, so that no change is missed.
        in_time(ANSWERED_WITHIN, client.batch_execute("LISTEN tollgate")).await?;
        // Reads everything again: the database may have been restored to an earlier moment meanwhile.
        let mut known = Versions::default();
        loop {
            take(shared, &mut client, &mut known).await?;
            let _ = timeout(CHECKED_EVERY, changed.notified()).await;
        }
    };
    match select(pin!(heard), pin!(taken)).await {
        Either::Left((lost, _)) | Either::Right((lost, _)) => lost,
    }
}

/// Takes the changes that aren't known yet.
async fn take(shared: &Weak<Shared>, client: &mut Client, known: &mut Versions) -> Result<(), PostgresError> {
    let now = Versions::of(&in_time(ANSWERED_WITHIN, client.query_one(VERSIONS, &[])).await?);
    let Some(shared) = shared.upgrade() else { return Ok(()) };
    let is_other = now.history != known.history || now.all < known.all;
    let before = if is_other { Versions::default() } else { known.clone() };
    if now != before {
        let within = if is_other { READ_WITHIN } else { CHANGES_WITHIN };
        let read = timeout(within, read(client, &before, || shared.keys.known_ids())).await;
        let changes = read.unwrap_or_else(|_| Err(PostgresError::lost()))?;
        *known = changes.versions.clone();
        apply(&shared, changes);
    }
    shared.from_cache.store(false, Ordering::Relaxed);
    if !shared.connected.swap(true, Ordering::Relaxed) {
        telemetry::database_found();
    }
    Ok(())
}

/// Puts changes in force, and leaves them to the task that writes them to Redis, without waiting for it.
fn apply(shared: &Shared, changes: Changes) {
    let Changes { versions, rules, users, are_users_anew, keys, verified, oldest } = changes;
    if **shared.history.load() != versions.history {
        shared.keys.forget();
        shared.history.store(Arc::new(versions.history.clone()));
    }
    shared.cache.seal_with(&versions.cache_secret);
    shared.keys.check_with(&versions.key_secret);
    match rules {
        Some(Ok(rules)) => {
            if !rules.is_same_as(&shared.rules.load()) {
                telemetry::reloaded(Ok(&rules));
                shared.reloads.fetch_add(1, Ordering::Relaxed);
                shared.rules.store(Arc::new(rules));
            }
            // After the rules, so that older ones are never taken for these.
            shared.rules_version.store(versions.rules, Ordering::Release);
        }
        Some(Err(error)) => {
            telemetry::reloaded(Err(&error));
            shared.failures.fetch_add(1, Ordering::Relaxed);
            shared.rules_version.store(NOT_APPLIED, Ordering::Release);
        }
        None => {}
    }
    let parts = shared.users.take(users, are_users_anew);
    let known = shared.version.swap(versions.all, Ordering::Relaxed);
    let to_cache: Vec<_> = keys.iter().filter(|(_, found)| found.version > known).cloned().collect();
    shared.keys.changed((&versions.history, versions.all), keys.iter().chain(&verified), oldest);
    shared.to_cache.add(parts, to_cache);
}

const VERSIONS: &str = "
    SELECT history::text, version, rules_version, truncated_version, cache_secret, key_secret
    FROM tollgate.configuration";

const DELETED: &str =
    "SELECT version, user_id, key_id FROM tollgate.deletions WHERE version > $1 ORDER BY version DESC LIMIT 10000";

impl Versions {
    fn of(row: &Row) -> Self {
        Self {
            history: row.get(0),
            all: row.get(1),
            rules: row.get(2),
            truncated: row.get(3),
            cache_secret: row.get(4),
            key_secret: row.get(5),
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
    let versions = Versions::of(&transaction.query_one(VERSIONS, &[]).await?);
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
    // A deleted user may have been created again, so the rows that exist come last.
    let gone = deleted.iter().filter_map(|row| Some((row.get::<_, Option<String>>("user_id")?, None)));
    let since = if are_users_anew { 0 } else { before.all };
    let changed = transaction.query(users::CHANGED, &[&since]).await?;
    let users = gone.chain(changed.iter().map(users::changed)).collect();
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
    Ok(Changes { versions, rules, users, are_users_anew, keys, verified, oldest })
}

/// A transaction that reads everything as of one moment.
pub(super) async fn one_moment(client: &mut Client) -> Result<Transaction<'_>, PostgresError> {
    let transaction = client.build_transaction().read_only(true).isolation_level(IsolationLevel::RepeatableRead);
    Ok(transaction.start().await?)
}

/// Keeps the configuration in Redis, for processes that start while PostgreSQL is away: changes at once, and everything
/// each minute.
pub(super) async fn keep_cached(shared: Weak<Shared>, to_cache: Arc<ToCache>) {
    let mut is_whole = true;
    loop {
        let Some(shared) = shared.upgrade() else { return };
        let (parts, keys) = to_cache.take();
        let head = |version| Head { history: shared.history.load().as_ref().clone(), version };
        let of = (head(shared.version.load(Ordering::Relaxed)), shared.connected.load(Ordering::Relaxed), is_whole);
        let rules = match shared.rules_version.load(Ordering::Acquire) {
            NOT_APPLIED => None,
            version => Some(HeadedRules { head: head(version), rules: RuleSet::clone(&shared.rules.load()) }),
        };
        let parts: Vec<_> = if is_whole { (0..PARTS).collect() } else { parts.into_iter().collect() };
        let written = shared.cache.write(of, rules, &shared.users, parts).await;
        let written = written.and(shared.cache.write_keys(&keys, true).await);
        if written.is_err() {
            to_cache.put_back(keys);
        }
        drop(shared);
        // After a failure everything is written once Redis is back: a restart may have emptied it.
        let pause = if written.is_ok() { REFRESHED_EVERY } else { REFRESHED_EVERY / 10 };
        is_whole = timeout(jittered(pause, 20), to_cache.changed.notified()).await.is_err() || written.is_err();
    }
}

/// Changes that aren't in Redis yet.
#[derive(Default)]
pub(super) struct ToCache {
    changed: Notify,
    waiting: Mutex<Waiting>,
}

/// Which parts of the users, and which keys. (Changed rules are written whenever anything is.)
type Waiting = (BTreeSet<usize>, Vec<(KeyId, LookedUp)>);

impl ToCache {
    fn add(&self, parts: BTreeSet<usize>, keys: Vec<(KeyId, LookedUp)>) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.0.extend(parts);
        waiting.1.extend(keys);
        self.changed.notify_one();
    }

    /// Puts keys back for the next write; keeps the latest if there are more than are read at once.
    fn put_back(&self, mut keys: Vec<(KeyId, LookedUp)>) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        keys.append(&mut waiting.1);
        waiting.1 = keys.split_off(keys.len().saturating_sub(MOST_CHANGES));
    }

    fn take(&self) -> Waiting {
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
