//! Following the database: what changed is read when PostgreSQL says so, and looked for in any case every 2 seconds.

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

use super::cache::REFRESHED_EVERY;
use super::configuration::Shared;
use super::key_text::KeyId;
use super::keys::{self, KeyRecord, LookedUp, MOST_CHANGES};
use super::snapshot::PARTS;
use super::totals::{Totals, WRITTEN_EVERY};
use super::{Postgres, PostgresError, rules, users};
use crate::random::jittered;
use crate::rules::{Account, RuleSet};
use crate::telemetry;

/// The version is looked at this often, whatever is heard: a connection that has died without a word is noticed by that.
const CHECKED_EVERY: Duration = Duration::from_secs(2);
const ANSWERED_WITHIN: Duration = Duration::from_secs(2);
/// For what has changed.
const CHANGES_WITHIN: Duration = Duration::from_secs(5);
/// For what may be much: all users.
const READ_WITHIN: Duration = Duration::from_secs(30);
/// Before a lost connection is made again, and up to as much longer by chance.
const PAUSE: Duration = Duration::from_millis(200);

/// Which versions a process has, or the database.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Versions {
    history: String,
    all: i64,
    rules: i64,
    truncated: i64,
}

/// What has changed.
struct Changes {
    versions: Versions,
    /// None if they are those that are known; why they can't be used, if so.
    rules: Option<Result<RuleSet, PostgresError>>,
    users: Vec<(String, Option<Account>)>,
    /// Whether those are all there are.
    are_users_anew: bool,
    /// The last change of a key comes last.
    keys: Vec<(KeyId, LookedUp)>,
    /// Keys that this process knows, where not all changes were read.
    verified: Vec<(KeyId, LookedUp)>,
    /// Changes of keys before this version weren't all read.
    oldest: i64,
}

/// Reads all that a process starts with.
pub(super) async fn begin(shared: &Shared, postgres: &Postgres) -> Result<(), PostgresError> {
    let mut connection = postgres.connection().await?;
    let all = timeout(READ_WITHIN, read(&mut connection, &Versions::default(), Vec::new)).await;
    let changes = all.unwrap_or_else(|_| Err(PostgresError::late(postgres.address())))?;
    if let Some(rules) = changes.rules {
        shared.rules.store(Arc::new(rules?));
    }
    shared.users.take(changes.users, true);
    shared.keys.changed(&changes.versions.history, &changes.keys, changes.oldest);
    shared.history.store(Arc::new(changes.versions.history));
    shared.version.store(changes.versions.all, Ordering::Relaxed);
    Ok(())
}

/// Listens for as long as anybody has the configuration.
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

/// Says that nothing is heard any more, also where the runtime has ended.
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
        // Before anything is read, so that no change is missed.
        in_time(ANSWERED_WITHIN, client.batch_execute("LISTEN tollgate")).await?;
        // All anew: the database may have been restored to an earlier moment meanwhile.
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

/// Takes what isn't known yet.
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

/// Puts changes in force, and leaves them for the task that writes them to Redis: nothing waits for that.
fn apply(shared: &Shared, changes: Changes) {
    let Changes { versions, rules, users, are_users_anew, keys, verified, oldest } = changes;
    if **shared.history.load() != versions.history {
        shared.keys.forget();
        shared.history.store(Arc::new(versions.history.clone()));
    }
    let has_rules = match rules {
        Some(Ok(rules)) if !rules.is_same_as(&shared.rules.load()) => {
            telemetry::reloaded(Ok(&rules));
            shared.reloads.fetch_add(1, Ordering::Relaxed);
            shared.rules.store(Arc::new(rules));
            true
        }
        Some(Err(error)) => {
            telemetry::reloaded(Err(&error));
            shared.failures.fetch_add(1, Ordering::Relaxed);
            false
        }
        _ => false,
    };
    let parts = shared.users.take(users, are_users_anew);
    let known = shared.version.swap(versions.all, Ordering::Relaxed);
    let to_cache: Vec<_> = keys.iter().filter(|(_, found)| found.version > known).cloned().collect();
    shared.keys.changed(&versions.history, keys.iter().chain(&verified), oldest);
    shared.to_cache.add(has_rules, parts, to_cache);
}

const VERSIONS: &str = "SELECT history::text, version, rules_version, truncated_version FROM tollgate.configuration";

const DELETED: &str =
    "SELECT version, user_id, key_id FROM tollgate.deletions WHERE version > $1 ORDER BY version DESC LIMIT 10000";

impl Versions {
    fn of(row: &Row) -> Self {
        Self { history: row.get(0), all: row.get(1), rules: row.get(2), truncated: row.get(3) }
    }
}

/// All that has changed since these versions, of one moment.
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
    // Where deletions weren't all read, as where tables were truncated, all users are read.
    let are_users_anew = is_truncated || !is_all_deleted;
    // A user that was deleted may have come back: what there is counts.
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
    // Of a key that was deleted and made again in one version, what there is comes last.
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

/// All that is read is of one moment.
pub(super) async fn one_moment(client: &mut Client) -> Result<Transaction<'_>, PostgresError> {
    let transaction = client.build_transaction().read_only(true).isolation_level(IsolationLevel::RepeatableRead);
    Ok(transaction.start().await?)
}

/// Keeps the configuration in Redis, for processes that start while PostgreSQL is away: what has changed at once, and all of
/// it every minute.
pub(super) async fn keep_cached(shared: Weak<Shared>, to_cache: Arc<ToCache>) {
    let mut is_whole = true;
    loop {
        let Some(shared) = shared.upgrade() else { return };
        let (has_rules, parts, keys) = to_cache.take();
        let (version, history) = (shared.version.load(Ordering::Relaxed), shared.history.load_full());
        let of = (history.as_str(), version, shared.connected.load(Ordering::Relaxed));
        let rules = (is_whole || has_rules).then(|| RuleSet::clone(&shared.rules.load()));
        let parts: Vec<_> = if is_whole { (0..PARTS).collect() } else { parts.into_iter().collect() };
        let written = shared.cache.write(of, rules.as_ref(), &shared.users, parts).await;
        let written = written.and(shared.cache.write_keys(&keys, true).await);
        if written.is_err() {
            to_cache.put_back(keys);
        }
        drop(shared);
        // Where Redis is away, all of it is written once that is back: a restart may need it.
        let pause = if written.is_ok() { REFRESHED_EVERY } else { REFRESHED_EVERY / 10 };
        is_whole = timeout(jittered(pause, 20), to_cache.changed.notified()).await.is_err() || written.is_err();
    }
}

/// What has changed and isn't in Redis yet.
#[derive(Default)]
pub(super) struct ToCache {
    changed: Notify,
    waiting: Mutex<Waiting>,
}

/// Whether the rules, which parts of the users, and which keys.
type Waiting = (bool, BTreeSet<usize>, Vec<(KeyId, LookedUp)>);

impl ToCache {
    fn add(&self, has_rules: bool, parts: BTreeSet<usize>, keys: Vec<(KeyId, LookedUp)>) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.0 |= has_rules;
        waiting.1.extend(parts);
        waiting.2.extend(keys);
        self.changed.notify_one();
    }

    /// For the next time. Of more than are read at once, the last.
    fn put_back(&self, mut keys: Vec<(KeyId, LookedUp)>) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        keys.append(&mut waiting.2);
        waiting.2 = keys.split_off(keys.len().saturating_sub(MOST_CHANGES));
    }

    fn take(&self) -> Waiting {
        std::mem::take(&mut *self.waiting.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Writes what users have used, once a second.
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
