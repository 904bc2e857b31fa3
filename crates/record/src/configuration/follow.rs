//! Follows the database: changes are read when PostgreSQL announces them, and checked for every 2 seconds in any case.
//! Everything is read once; after a lost connection, what has changed since.

use std::collections::HashMap;
use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::future::{Either, select};
use tokio::sync::{Notify, oneshot};
use tokio::time::{sleep, timeout};
use tokio_postgres::types::ToSql;
use tokio_postgres::{AsyncMessage, Row};
use tollgate::rules::RuleSet;

use super::keep_cached::keep_cached;
use super::state::{NOT_APPLIED, Shared};
use crate::chance::jittered;
use crate::postgres::client::{Client, Transaction};
use crate::postgres::connecting::SAFE_PATH;
use crate::postgres::transactions::{self, one_moment};
use crate::postgres::{Postgres, PostgresError, checked_version, in_time};
use crate::stored::key_text::KeyId;
use crate::stored::keys::{self, KeyRecord, LookedUp, MOST_CHANGES};
use crate::stored::users_in_force::{Settings, UserUpdates};
use crate::stored::{rules, users};
use crate::telemetry;

/// How often the version is checked, whatever is announced: this notices a connection that died silently.
const CHECKED_EVERY: Duration = Duration::from_secs(2);
/// The shortest time between two checks: anybody who can connect can announce changes in a loop.
const SHORTEST_PAUSE: Duration = Duration::from_millis(50);
const ANSWERED_WITHIN: Duration = Duration::from_secs(2);
/// For one statement that reads changes: longer than a start waits for locks.
const READ_WITHIN: Duration = Duration::from_secs(12);
/// How long a table that somebody has locked holds up the others.
const PATIENCE: &str = "SET LOCAL lock_timeout = '500ms'";
/// The wait before reconnecting; a random share of up to as much again is added.
const PAUSE: Duration = Duration::from_millis(200);

/// The same if the server rejects the password or a right is missing: somebody has to fix that, and servers log each
/// attempt.
const PAUSE_IF_DENIED: Duration = Duration::from_secs(1);

/// The version of the rules in a database into which none were ever written.
const NEVER_HAD_RULES: i64 = 1;

/// The versions that a process, or the database, has.
#[derive(Clone, Default, PartialEq, Eq)]
struct Versions {
    history: String,
    all: i64,
    /// Distinguishes this version from another with the same number, which a database restored to an earlier moment
    /// makes.
    mark: Option<String>,
    rules: i64,
    /// What was deleted up to this version may not be found any more.
    truncated: i64,
    /// What seals the entries in Redis; no version, but read with these.
    cache_secret: Vec<u8>,
    /// What checksums of API keys are made with.
    key_secret: Vec<u8>,
}

/// The tables that are followed. Each is read in a transaction of its own, so that a lock on one holds up no other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Table {
    Rules,
    Keys,
    Users,
}

/// In this order: there may be very many users, and each table is in force once it is read.
const TABLES: [Table; 3] = [Table::Rules, Table::Keys, Table::Users];

/// What a process knows, from one connection to the next.
#[derive(Default)]
struct Known {
    /// The versions at which each table was last read.
    versions: [Versions; TABLES.len()],
    /// Whether somebody held a lock on a table then.
    is_locked: [bool; TABLES.len()],
    /// Sets of rules that requests may still hold. Dropping ten thousand rules takes a while, which is spent here.
    retired: Vec<RuleSet>,
}

/// Where the outcome of the start is reported, once.
type Begun = Option<oneshot::Sender<Result<(), PostgresError>>>;

/// A table, as of one moment.
struct Read {
    /// The versions at that moment.
    at: Versions,
    /// Whether the database is another one than before, or was restored to an earlier moment: then everything was read.
    is_other: bool,
    changes: RowChanges,
}

/// What changed in a table since it was last read.
enum RowChanges {
    /// `None` if unchanged; an error if they can't be used.
    Rules(Option<Result<RuleSet, PostgresError>>),
    Users {
        users: UserUpdates,
        /// How many rows were read.
        read: u64,
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

/// Reads all that a process starts with, and listens for as long as the configuration is in use. If PostgreSQL can't be
/// used at the start, begins with what is cached.
pub(crate) async fn follow(
    shared: Weak<Shared>,
    connected: Arc<AtomicBool>,
    postgres: Postgres,
    begun: oneshot::Sender<Result<(), PostgresError>>,
) {
    let _following = Following(connected);
    let (mut known, mut begun) = (Known::default(), Some(begun));
    // A server that is unreachable and then rejects the password is reported twice.
    let mut reported = Vec::new();
    loop {
        let Err(lost) = listen(&shared, &postgres, &mut known, &mut begun).await;
        let Some(shared) = shared.upgrade() else { return };
        let (reason, is_denied) = (lost.reason(), lost.is_denied());
        telemetry::database_failed(reason);
        shared.outage.store(Some(Arc::new(lost.clone())));
        if begun.is_some() {
            if let Err(error) = begin_from_cache(&shared, lost).await {
                return begin(&shared, &mut begun, Err(error));
            }
            // Something may have been read before the connection was lost, and replaced by what was cached.
            known = Known::default();
            begin(&shared, &mut begun, Ok(()));
            reported.push(reason);
        } else {
            if shared.connected.swap(false, Ordering::Relaxed) {
                reported.clear();
            }
            if !reported.contains(&reason) {
                telemetry::database_lost(&lost, reason, is_denied);
                reported.push(reason);
            }
        }
        drop(shared);
        sleep(jittered(if is_denied { PAUSE_IF_DENIED } else { PAUSE }, 100)).await;
    }
}

/// Reports the outcome of the start, unless that has been done.
fn begin(shared: &Arc<Shared>, begun: &mut Begun, result: Result<(), PostgresError>) {
    let Some(begun) = begun.take() else { return };
    if result.is_ok() {
        tokio::spawn(keep_cached(Arc::downgrade(shared), Arc::clone(&shared.to_cache)));
    }
    // The receiver may be gone: its caller gave up.
    let _ = begun.send(result);
}

/// Takes what other processes left in Redis, if PostgreSQL can't be used and there is something.
async fn begin_from_cache(shared: &Shared, error: PostgresError) -> Result<(), PostgresError> {
    let cached = if error.is_of_an_outage() { shared.cache.read().await.ok().flatten() } else { None };
    let Some(cached) = cached else { return Err(error) };
    telemetry::started_from_cache(&error, error.reason(), error.is_denied());
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
                Some(Err(error)) => return Err(PostgresError::new(&error)),
                None => return Err(PostgresError::lost()),
            }
        }
    };
    let taken = async {
        in_time(ANSWERED_WITHIN, checked_version(&client)).await?;
        // Before reading anything, so that no change is missed. Without a bound, the server would go on waiting for a
        // lock after its client is gone. The bound is shorter than the wait here, so that the error says who holds the
        // lock.
        let listen = format!("{SAFE_PATH}; SET lock_timeout = '1s'; LISTEN tollgate");
        in_time(ANSWERED_WITHIN, client.batch_execute(&listen)).await?;
        let pid = in_time(ANSWERED_WITHIN, client.query_one("SELECT pg_backend_pid()", &[])).await?.get(0);
        loop {
            take(shared, postgres, (&mut client, pid), known, begun).await?;
            sleep(SHORTEST_PAUSE).await;
            let _ = timeout(CHECKED_EVERY, changed.notified()).await;
        }
    };
    match select(pin!(heard), pin!(taken)).await {
        Either::Left((lost, _)) | Either::Right((lost, _)) => lost,
    }
}

/// Takes the changes that aren't known yet. A table that somebody has locked is left for the next time, but not at the
/// start, which waits for it. One that can't be read doesn't keep the others from being read: its error is returned at
/// the end.
async fn take(
    shared: &Weak<Shared>,
    postgres: &Postgres,
    (client, pid): (&mut Client, i32),
    known: &mut Known,
    begun: &mut Begun,
) -> Result<(), PostgresError> {
    let patience = if begun.is_some() { transactions::READ } else { PATIENCE };
    let mut failed = Ok(());
    for table in TABLES {
        let before = &known.versions[table as usize];
        let known_version: [&(dyn ToSql + Sync); 2] = [&before.all, &before.mark];
        let asked = in_time(ANSWERED_WITHIN, client.query_one(VERSIONS, &known_version));
        let row = match postgres.naming_blockers(pid, asked).await {
            Err(error) if error.is_locked() && begun.is_none() => {
                // Then no table can be read.
                if std::mem::replace(&mut known.is_locked, [true; TABLES.len()]) == [false; TABLES.len()] {
                    telemetry::changes_unread(&error);
                }
                return failed;
            }
            asked => asked?,
        };
        let now = Versions::of(&row);
        if now == *before && now.are_after(before, &row) {
            known.is_locked[table as usize] = false;
            continue;
        }
        let Some(shared) = shared.upgrade() else { return Ok(()) };
        let read = read(client, table, before, patience, || shared.keys.remembered_ids());
        let is_locked = &mut known.is_locked[table as usize];
        match postgres.naming_blockers(pid, read).await {
            Ok(Read { changes: RowChanges::Rules(Some(Err(error))), .. }) if begun.is_some() => return Err(error),
            Ok(Read { at, is_other, changes }) => {
                *is_locked = false;
                if is_other && table == Table::Keys {
                    // Their versions are of another history, and may be higher.
                    shared.keys.forget();
                }
                shared.to_cache.add(apply(&shared, &at, changes, &mut known.retired));
                known.versions[table as usize] = at;
            }
            Err(error) if error.is_locked() && begun.is_none() => {
                if !std::mem::replace(is_locked, true) {
                    telemetry::changes_unread(&error);
                }
            }
            Err(error) if begun.is_some() || error.is_unreachable() => return Err(error),
            Err(error) => failed = failed.and(Err(error)),
        }
    }
    failed?;
    let Some(shared) = shared.upgrade() else { return Ok(()) };
    // There was no await since users, the last table, were put in force: nobody sees them with the version before.
    let [_, _, users] = &known.versions;
    if **shared.history.load() != users.history {
        shared.history.store(Arc::new(users.history.clone()));
    }
    let version = known.versions.iter().map(|versions| versions.all).min();
    shared.version.store(version.unwrap_or_default(), Ordering::Relaxed);
    known.retired.retain(RuleSet::is_shared);
    shared.from_cache.store(false, Ordering::Relaxed);
    shared.outage.store(None);
    if !shared.connected.swap(true, Ordering::Relaxed) {
        telemetry::database_found();
    }
    begin(&shared, begun, Ok(()));
    Ok(())
}

/// Puts changes in force; returns those of keys that are to be written to Redis.
fn apply(
    shared: &Shared,
    versions: &Versions,
    changes: RowChanges,
    retired: &mut Vec<RuleSet>,
) -> Vec<(KeyId, LookedUp)> {
    shared.cache.seal_with(&versions.cache_secret);
    shared.keys.check_with(&versions.key_secret);
    // At the start, there was nothing before.
    let known = shared.version.load(Ordering::Relaxed);
    let is_start = known == 0;
    match changes {
        RowChanges::Rules(Some(Ok(rules))) => {
            if rules != **shared.rules.load() {
                if !is_start {
                    telemetry::reloaded(Ok(rules.len()));
                    shared.reloads.fetch_add(1, Ordering::Relaxed);
                }
                retired.push(RuleSet::clone(&shared.rules.swap(Arc::new(rules))));
            }
            shared.rules_version.store(versions.rules, Ordering::Relaxed);
        }
        RowChanges::Rules(Some(Err(error))) => {
            telemetry::reloaded(Err(&error));
            shared.failures.fetch_add(1, Ordering::Relaxed);
            shared.rules_version.store(NOT_APPLIED, Ordering::Relaxed);
        }
        RowChanges::Rules(None) => {}
        RowChanges::Users { users, read } => {
            shared.users_read.fetch_add(read, Ordering::Relaxed);
            shared.users.apply(users);
        }
        RowChanges::Keys { keys, verified, oldest } => {
            // Entries that others cached before the start need no change: older ones aren't used.
            let is_new = |found: &LookedUp| !is_start && found.version > known;
            shared.keys.changed((&versions.history, versions.all), keys.iter().chain(&verified), oldest);
            return keys.into_iter().filter(|(_, found)| is_new(found)).collect();
        }
    }
    Vec::new()
}

/// The current versions, and whether they are the known one or came after it. Deletions are kept as long as versions.
const VERSIONS: &str = "
    SELECT history::text, version, rules_version, cache_secret, key_secret,
        greatest(truncated_version, (SELECT min(version) FROM tollgate.versions)) AS truncated_version,
        (SELECT mark::text FROM tollgate.versions WHERE version = configuration.version) AS mark,
        EXISTS (SELECT 1 FROM tollgate.versions WHERE version = $1 AND mark::text = $2) AS is_later
    FROM tollgate.configuration";

/// Deleted users, latest first.
const DELETED_USERS: &str = "
    SELECT version, user_id FROM tollgate.deletions WHERE version > $1 AND user_id IS NOT NULL
    ORDER BY version DESC LIMIT 10000";

const DELETED_KEYS: &str = "
    SELECT version, key_id FROM tollgate.deletions WHERE version > $1 AND key_id IS NOT NULL
    ORDER BY version DESC LIMIT 10000";

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

    /// Whether these, of the same row, are the ones known before or came after them.
    fn are_after(&self, before: &Self, row: &Row) -> bool {
        // A version that was set by hand has no mark.
        let is_same = self.all == before.all && before.mark.is_none();
        self.history == before.history && (is_same || row.get("is_later"))
    }
}

/// The changes of one table since these versions, as of one moment. Whether the database is another one is also asked
/// as of that moment: it may have been restored since the caller asked.
async fn read(
    client: &mut Client,
    table: Table,
    before: &Versions,
    patience: &str,
    remembered_ids: impl FnOnce() -> Vec<KeyId>,
) -> Result<Read, PostgresError> {
    let transaction = answered(one_moment(client, patience)).await?;
    let row = in_time(READ_WITHIN, transaction.query_one(VERSIONS, &[&before.all, &before.mark])).await?;
    let at = Versions::of(&row);
    let is_other = !at.are_after(before, &row);
    let nothing = Versions::default();
    let before = if is_other { &nothing } else { before };
    let changes = match table {
        Table::Rules => RowChanges::Rules(answered(read_rules(&transaction, before, &at)).await?),
        Table::Users => read_users(&transaction, before, &at).await?,
        Table::Keys => answered(read_keys(&transaction, before, &at, remembered_ids)).await?,
    };
    in_time(READ_WITHIN, transaction.commit()).await?;
    Ok(Read { at, is_other, changes })
}

/// What is read, or an error if the server doesn't answer in time.
async fn answered<T>(read: impl Future<Output = Result<T, PostgresError>>) -> Result<T, PostgresError> {
    timeout(READ_WITHIN, read).await.unwrap_or_else(|_| Err(PostgresError::lost()))
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
        // There were rules before: as with a file, that is a mistake, and would allow everything.
        Ok(rules) if rules.is_empty() && now.rules > NEVER_HAD_RULES => {
            let why = "rules in the database: none is enabled, which would allow everything";
            Ok(Some(Err(PostgresError::input(why))))
        }
        rules => Ok(Some(rules)),
    }
}

async fn read_users(
    transaction: &Transaction<'_>,
    before: &Versions,
    now: &Versions,
) -> Result<RowChanges, PostgresError> {
    let deleted = in_time(READ_WITHIN, transaction.query(DELETED_USERS, &[&before.all])).await?;
    // Unless all deletions were read, all users are read again.
    let are_anew = before.all < now.truncated || deleted.len() >= MOST_CHANGES;
    let mut users = UserUpdates::new(are_anew || before.all == 0);
    // A deleted user may have been created again, so the rows that exist come last.
    for row in &deleted {
        users.add(row.get("user_id"), &Settings::default());
    }
    let read = users::read(transaction, if are_anew { 0 } else { before.all }, &mut users).await?;
    Ok(RowChanges::Users { users, read })
}

async fn read_keys(
    transaction: &Transaction<'_>,
    before: &Versions,
    now: &Versions,
    remembered_ids: impl FnOnce() -> Vec<KeyId>,
) -> Result<RowChanges, PostgresError> {
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
    let known = if oldest == 0 { Vec::new() } else { remembered_ids() };
    let mut verified = Vec::new();
    if !known.is_empty() {
        let ids: Vec<_> = known.iter().map(KeyId::as_str).collect();
        let rows = transaction.query(keys::OF_IDS, &[&ids]).await?;
        let there: HashMap<_, _> =
            rows.iter().filter_map(|row| Some((KeyId::read(row.get("key_id"))?, KeyRecord::of(row)))).collect();
        verified.extend(known.iter().map(|id| (*id, found(now.all, there.get(id).cloned()))));
    }
    Ok(RowChanges::Keys { keys, verified, oldest })
}
