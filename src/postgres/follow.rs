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
use tokio_postgres::{AsyncMessage, Client, Row, Transaction};

use super::cache::REFRESHED_EVERY;
use super::configuration::Shared;
use super::key_text::KeyId;
use super::keys::{self, KeyRecord, LookedUp, MOST_CHANGES};
use super::snapshot::PARTS;
use super::totals::{Totals, WRITTEN_EVERY};
use super::transactions::{self, one_moment};
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
/// How long a table that somebody has locked holds up the others.
const PATIENCE: &str = "SET LOCAL lock_timeout = '500ms'";
/// The wait before reconnecting; a random share of up to as much again is added.
const PAUSE: Duration = Duration::from_millis(200);

/// The version of the rules in a database into which none were ever written.
const NEVER_HAD_RULES: i64 = 1;

/// The versions that a process, or the database, has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Versions {
    history: String,
    all: i64,
    rules: i64,
    /// What was deleted up to this version may not be found any more.
    truncated: i64,
}

/// What is followed. Each is read in a transaction of its own, so that a lock on its table holds up no other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Rules,
    Users,
    Keys,
}

const PARTS_READ: [Part; 3] = [Part::Rules, Part::Users, Part::Keys];

/// What changed in a part since it was last read.
enum Changes {
    /// `None` if unchanged; an error if they can't be used.
    Rules(Option<Result<RuleSet, PostgresError>>),
    Users {
        users: Vec<(String, Option<Account>)>,
        /// Whether `users` is the complete list.
        are_anew: bool,
    },
    Keys {
        /// In order, so the last change of a key comes last.
        keys: Vec<(KeyId, LookedUp)>,
        /// The current state of the keys that this process knows, if not all changes were read.
        verified: Vec<(KeyId, LookedUp)>,
        /// Not all changes of keys before this version were read.
        oldest: i64,
    },
}

/// Reads all that a process starts with.
pub(super) async fn begin(shared: &Shared, postgres: &Postgres) -> Result<(), PostgresError> {
    let mut connection = postgres.connection().await?;
    let mut version = i64::MAX;
    for part in PARTS_READ {
        let (versions, changes) = read_naming(postgres, &mut connection, part, &Versions::default(), Vec::new).await?;
        match changes {
            Changes::Rules(Some(rules)) => shared.rules.store(Arc::new(rules?)),
            Changes::Rules(None) => {}
            Changes::Users { users, .. } => _ = shared.users.take(users, true),
            Changes::Keys { keys, oldest, .. } => shared.keys.changed(&versions.history, &keys, oldest),
        }
        version = version.min(versions.all);
        shared.history.store(Arc::new(versions.history));
    }
    shared.version.store(version, Ordering::Relaxed);
    Ok(())
}

/// Reads a part, however long that takes within reason. If that waits for a lock in vain, the error names who has it.
async fn read_naming(
    postgres: &Postgres,
    client: &mut Client,
    part: Part,
    before: &Versions,
    known_ids: impl FnOnce() -> Vec<KeyId>,
) -> Result<(Versions, Changes), PostgresError> {
    let pid = in_time(ANSWERED_WITHIN, client.query_one("SELECT pg_backend_pid()", &[])).await?.get(0);
    let all = timeout(READ_WITHIN, read(client, part, before, transactions::READ, known_ids));
    let all = async { all.await.unwrap_or_else(|_| Err(PostgresError::late(postgres.address()))) };
    postgres.naming_blockers(pid, all).await
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
        let pid = in_time(ANSWERED_WITHIN, client.query_one("SELECT pg_backend_pid()", &[])).await?.get(0);
        // Reads everything again: the database may have been restored to an earlier moment meanwhile.
        let mut known = Known::default();
        loop {
            take(shared, postgres, (&mut client, pid), &mut known).await?;
            let _ = timeout(CHECKED_EVERY, changed.notified()).await;
        }
    };
    match select(pin!(heard), pin!(taken)).await {
        Either::Left((lost, _)) | Either::Right((lost, _)) => lost,
    }
}

/// The versions at which each part was last read, and whether somebody held a lock on it then.
#[derive(Default)]
struct Known {
    versions: [Versions; PARTS_READ.len()],
    is_locked: [bool; PARTS_READ.len()],
}

/// Takes the changes that aren't known yet. A part that somebody has locked is left for the next time.
async fn take(
    shared: &Weak<Shared>,
    postgres: &Postgres,
    (client, pid): (&mut Client, i32),
    known: &mut Known,
) -> Result<(), PostgresError> {
    let asked = in_time(ANSWERED_WITHIN, client.query_one(VERSIONS, &[]));
    let now = Versions::of(&postgres.naming_blockers(pid, asked).await?);
    let Some(shared) = shared.upgrade() else { return Ok(()) };
    let (mut taken, mut has_changed) = (Vec::new(), false);
    for part in PARTS_READ {
        let (versions, is_locked) = (&known.versions[part as usize], &mut known.is_locked[part as usize]);
        let is_other = now.history != versions.history || now.all < versions.all;
        let before = if is_other { Versions::default() } else { versions.clone() };
        if now == before {
            continue;
        }
        has_changed = true;
        let within = if is_other { READ_WITHIN } else { CHANGES_WITHIN };
        let read = timeout(within, read(client, part, &before, PATIENCE, || shared.keys.known_ids()));
        let read = async { read.await.unwrap_or_else(|_| Err(PostgresError::lost())) };
        match postgres.naming_blockers(pid, read).await {
            Ok((at, changes)) => {
                *is_locked = false;
                taken.push((part, at, changes));
            }
            Err(error) if error.is_locked() => {
                if !std::mem::replace(is_locked, true) {
                    telemetry::changes_unread(&error);
                }
            }
            Err(error) => return Err(error),
        }
    }
    if has_changed {
        // Without an await, so that nobody sees what changed beside the version before it.
        let mut to_cache = Waiting::default();
        for (part, at, changes) in taken {
            apply(&shared, &at, changes, &mut to_cache);
            known.versions[part as usize] = at;
        }
        // A part that hasn't been read since the connection was made is as it was before.
        if known.versions.iter().all(|versions| versions.history == now.history) {
            let version = known.versions.iter().map(|versions| versions.all).min();
            shared.version.store(version.unwrap_or_default(), Ordering::Relaxed);
        }
        shared.to_cache.add(to_cache);
    }
    shared.from_cache.store(false, Ordering::Relaxed);
    if !shared.connected.swap(true, Ordering::Relaxed) {
        telemetry::database_found();
    }
    Ok(())
}

/// Puts changes in force, and leaves them to the task that writes them to Redis, without waiting for it.
fn apply(shared: &Shared, versions: &Versions, changes: Changes, to_cache: &mut Waiting) {
    if **shared.history.load() != versions.history {
        shared.keys.forget();
        shared.history.store(Arc::new(versions.history.clone()));
    }
    match changes {
        Changes::Rules(Some(Ok(rules))) if !rules.is_same_as(&shared.rules.load()) => {
            telemetry::reloaded(Ok(&rules));
            shared.reloads.fetch_add(1, Ordering::Relaxed);
            shared.rules.store(Arc::new(rules));
            to_cache.0 = true;
        }
        Changes::Rules(Some(Err(error))) => {
            telemetry::reloaded(Err(&error));
            shared.failures.fetch_add(1, Ordering::Relaxed);
        }
        Changes::Rules(_) => {}
        Changes::Users { users, are_anew } => to_cache.1.extend(shared.users.take(users, are_anew)),
        Changes::Keys { keys, verified, oldest } => {
            let known = shared.version.load(Ordering::Relaxed);
            to_cache.2.extend(keys.iter().filter(|(_, found)| found.version > known).cloned());
            shared.keys.changed(&versions.history, keys.iter().chain(&verified), oldest);
        }
    }
}

const VERSIONS: &str = "SELECT history::text, version, rules_version, truncated_version FROM tollgate.configuration";

/// Deleted users, latest first.
const DELETED_USERS: &str = "
    SELECT version, user_id FROM tollgate.deletions WHERE version > $1 AND user_id IS NOT NULL
    ORDER BY version DESC LIMIT 10000";

const DELETED_KEYS: &str = "
    SELECT version, key_id FROM tollgate.deletions WHERE version > $1 AND key_id IS NOT NULL
    ORDER BY version DESC LIMIT 10000";

impl Versions {
    fn of(row: &Row) -> Self {
        Self { history: row.get(0), all: row.get(1), rules: row.get(2), truncated: row.get(3) }
    }
}

/// The changes of one part since these versions, as of one moment, and the versions then.
async fn read(
    client: &mut Client,
    part: Part,
    before: &Versions,
    patience: &str,
    known_ids: impl FnOnce() -> Vec<KeyId>,
) -> Result<(Versions, Changes), PostgresError> {
    let transaction = one_moment(client, patience).await?;
    let versions = Versions::of(&transaction.query_one(VERSIONS, &[]).await?);
    let changes = match part {
        Part::Rules => Changes::Rules(read_rules(&transaction, before, &versions).await?),
        Part::Users => read_users(&transaction, before, &versions).await?,
        Part::Keys => read_keys(&transaction, before, &versions, known_ids).await?,
    };
    transaction.commit().await?;
    Ok((versions, changes))
}

/// `None` if they are as before; an error if they can't be used.
async fn read_rules(
    transaction: &Transaction<'_>,
    before: &Versions,
    now: &Versions,
) -> Result<Option<Result<RuleSet, PostgresError>>, PostgresError> {
    if now.rules == before.rules {
        return Ok(None);
    }
    match rules::read(transaction).await {
        Err(error) if !error.is_input() => Err(error),
        // There were some: as with a file, that is a mistake, and would allow everything.
        Ok(rules) if rules.is_empty() && now.rules > NEVER_HAD_RULES => {
            let why = "rules in the database: expected at least one that is enabled, got none";
            Ok(Some(Err(PostgresError::input(why))))
        }
        rules => Ok(Some(rules)),
    }
}

async fn read_users(
    transaction: &Transaction<'_>,
    before: &Versions,
    now: &Versions,
) -> Result<Changes, PostgresError> {
    let deleted = transaction.query(DELETED_USERS, &[&before.all]).await?;
    // Unless all deletions were read, all users are read again.
    let are_anew = before.all < now.truncated || deleted.len() >= MOST_CHANGES;
    // A deleted user may have been created again, so the rows that exist come last.
    let gone = deleted.iter().map(|row| (row.get("user_id"), None));
    let since = if are_anew { 0 } else { before.all };
    let changed = transaction.query(users::CHANGED, &[&since]).await?;
    Ok(Changes::Users { users: gone.chain(changed.iter().map(users::changed)).collect(), are_anew })
}

async fn read_keys(
    transaction: &Transaction<'_>,
    before: &Versions,
    now: &Versions,
    known_ids: impl FnOnce() -> Vec<KeyId>,
) -> Result<Changes, PostgresError> {
    let deleted = transaction.query(DELETED_KEYS, &[&before.all]).await?;
    let found = |version: i64, key| LookedUp { history: now.history.clone(), version, key };
    let rows = transaction.query(keys::CHANGED, &[&before.all]).await?;
    let changed = rows
        .iter()
        .filter_map(|row| Some((KeyId::read(row.get("key_id"))?, found(row.get("version"), Some(KeyRecord::of(row))))));
    let gone =
        deleted.iter().filter_map(|row| Some((KeyId::read(row.get("key_id"))?, found(row.get("version"), None))));
    let mut keys: Vec<_> = changed.chain(gone).collect();
    // If a key was deleted and created again in one version, the existing row comes last.
    keys.sort_by_key(|(_, found)| (found.version, found.key.is_some()));
    let first_of =
        |rows: &[Row]| rows.last().filter(|_| rows.len() >= MOST_CHANGES).map_or(0, |row| row.get::<_, i64>("version"));
    let truncated = if before.all < now.truncated { now.truncated } else { 0 };
    let oldest = first_of(&rows).max(first_of(&deleted)).max(truncated);
    let known = if oldest == 0 { Vec::new() } else { known_ids() };
    let mut verified = Vec::new();
    if !known.is_empty() {
        let ids: Vec<_> = known.iter().map(KeyId::as_str).collect();
        let rows = transaction.query(keys::OF_IDS, &[&ids]).await?;
        let there: HashMap<_, _> =
            rows.iter().filter_map(|row| Some((KeyId::read(row.get("key_id"))?, KeyRecord::of(row)))).collect();
        verified.extend(known.iter().map(|id| (*id, found(now.all, there.get(id).cloned()))));
    }
    Ok(Changes::Keys { keys, verified, oldest })
}

/// Keeps the configuration in Redis, for processes that start while PostgreSQL is away: changes at once, and everything
/// each minute.
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

/// Whether the rules changed, which parts of the users, and which keys.
type Waiting = (bool, BTreeSet<usize>, Vec<(KeyId, LookedUp)>);

impl ToCache {
    fn add(&self, (has_rules, parts, keys): Waiting) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.0 |= has_rules;
        waiting.1.extend(parts);
        waiting.2.extend(keys);
        self.changed.notify_one();
    }

    /// Puts keys back for the next write; keeps the latest if there are more than are read at once.
    fn put_back(&self, mut keys: Vec<(KeyId, LookedUp)>) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        keys.append(&mut waiting.2);
        waiting.2 = keys.split_off(keys.len().saturating_sub(MOST_CHANGES));
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
