//! Following the database: what changed is read when PostgreSQL says so, and looked for in any case every 2 seconds.

use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::future::{Either, select};
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};
use tokio_postgres::{AsyncMessage, Client, IsolationLevel, Transaction};

use super::cache::REFRESHED_EVERY;
use super::configuration::Shared;
use super::key_text::KeyId;
use super::keys::{self, KeyRecord, LookedUp};
use super::snapshot::PARTS;
use super::totals::{Totals, WRITTEN_EVERY};
use super::{Postgres, PostgresError, rules, users};
use crate::random::jittered;
use crate::rules::{Account, RuleSet};
use crate::telemetry;

/// The version is looked at this often, whatever is heard: a connection that has died without a word is noticed by that.
const CHECKED_EVERY: Duration = Duration::from_secs(2);
const ANSWERED_WITHIN: Duration = Duration::from_secs(2);
/// For what may be much: all users.
const READ_WITHIN: Duration = Duration::from_secs(30);
/// Before a lost connection is made again, and up to as much longer by chance.
const PAUSE: Duration = Duration::from_millis(200);

/// Which versions a process has, or the database.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Versions {
    all: i64,
    rules: i64,
    deleted: i64,
}

/// What has changed.
struct Changes {
    versions: Versions,
    /// None if they are those that are known; why they can't be used, if so.
    rules: Option<Result<RuleSet, PostgresError>>,
    users: Vec<(String, Option<Account>)>,
    keys: Vec<(KeyId, LookedUp)>,
}

/// Reads all that a process starts with.
pub(super) async fn begin(shared: &Shared, postgres: &Postgres) -> Result<(), PostgresError> {
    let mut connection = postgres.connection().await?;
    let mut changes = timeout(READ_WITHIN, read(&mut connection, Versions::default()))
        .await
        .unwrap_or_else(|_| Err(PostgresError::lost()))?;
    let first = changes.rules.take().unwrap_or_else(|| Ok(RuleSet::default()))?;
    shared.rules.store(Arc::new(first));
    let version = changes.versions.all;
    shared.users.take(changes.users, true);
    shared.keys.changed(changes.keys, changes.versions.deleted);
    shared.version.store(version, Ordering::Relaxed);
    Ok(())
}

/// Listens for as long as anybody has the configuration.
pub(super) async fn follow(shared: Weak<Shared>, postgres: Postgres) {
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
    let row = in_time(ANSWERED_WITHIN, client.query_one(VERSIONS, &[])).await?;
    let now = Versions { all: row.get(0), rules: row.get(1), deleted: row.get(2) };
    let Some(shared) = shared.upgrade() else { return Ok(()) };
    let before = if now.all < known.all { Versions::default() } else { *known };
    if now != before {
        let changes =
            timeout(READ_WITHIN, read(client, before)).await.unwrap_or_else(|_| Err(PostgresError::lost()))?;
        *known = changes.versions;
        apply(&shared, before, changes).await;
    }
    shared.from_cache.store(false, Ordering::Relaxed);
    if !shared.connected.swap(true, Ordering::Relaxed) {
        telemetry::database_found();
    }
    Ok(())
}

/// Puts changes in force.
async fn apply(shared: &Shared, before: Versions, changes: Changes) {
    let Changes { versions, rules, users, keys } = changes;
    if versions.all < shared.version.load(Ordering::Relaxed) {
        // Restored to an earlier moment.
        shared.keys.forget();
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
    let all_anew = before.deleted < versions.deleted;
    let parts = shared.users.take(users, all_anew);
    let known = shared.version.load(Ordering::Relaxed);
    let to_cache: Vec<_> = keys.iter().filter(|(_, found)| found.version > known).cloned().collect();
    shared.keys.changed(keys, if all_anew { versions.deleted } else { 0 });
    shared.version.store(versions.all, Ordering::Relaxed);
    let rules = has_rules.then(|| RuleSet::clone(&shared.rules.load()));
    // Redis may be away: then it is written later, with everything.
    let _ = shared.cache.write(versions.all, rules.as_ref(), &shared.users, parts).await;
    let _ = shared.cache.write_keys(&to_cache, true).await;
}

const VERSIONS: &str = "SELECT version, rules_version, deleted_version FROM tollgate.configuration";

/// All that has changed since these versions, of one moment.
async fn read(client: &mut Client, before: Versions) -> Result<Changes, PostgresError> {
    let transaction = one_moment(client).await?;
    let row = transaction.query_one(VERSIONS, &[]).await?;
    let versions = Versions { all: row.get(0), rules: row.get(1), deleted: row.get(2) };
    let rules = match versions.rules == before.rules {
        true => None,
        false => match rules::read(&transaction).await {
            Err(error) if !error.is_input() => return Err(error),
            rules => Some(rules),
        },
    };
    // Where rows were deleted, all others are read, so that those are missing.
    let since = if before.deleted < versions.deleted { 0 } else { before.all };
    let users = transaction.query(users::CHANGED, &[&since]).await?.iter().map(users::changed).collect();
    let keys = transaction.query(keys::CHANGED, &[&before.all]).await?;
    let keys = keys.iter().filter_map(|row| {
        let id = KeyId::read(row.get("key_id"))?;
        Some((id, LookedUp { version: row.get("version"), key: Some(KeyRecord::of(row)) }))
    });
    let keys = keys.collect();
    transaction.commit().await?;
    Ok(Changes { versions, rules, users, keys })
}

/// All that is read is of one moment.
pub(super) async fn one_moment(client: &mut Client) -> Result<Transaction<'_>, PostgresError> {
    let transaction = client.build_transaction().read_only(true).isolation_level(IsolationLevel::RepeatableRead);
    Ok(transaction.start().await?)
}

/// Keeps the configuration in Redis, for processes that start while PostgreSQL is away.
pub(super) async fn keep_cached(shared: Weak<Shared>) {
    while let Some(shared) = shared.upgrade() {
        let (version, rules) = (shared.version.load(Ordering::Relaxed), RuleSet::clone(&shared.rules.load()));
        let written = shared.cache.write(version, Some(&rules), &shared.users, 0..PARTS).await;
        drop(shared);
        // Where Redis is away, soon again: a restart may need it.
        let pause = if written.is_ok() { REFRESHED_EVERY } else { REFRESHED_EVERY / 10 };
        sleep(jittered(pause, 20)).await;
    }
}

/// Writes what users have used, once a second.
pub(super) async fn write_totals(totals: Weak<Totals>) {
    let mut failed = false;
    loop {
        sleep(jittered(WRITTEN_EVERY, 10)).await;
        let Some(totals) = totals.upgrade() else { return };
        let written = totals.write(false).await;
        if let Err(error) = &written
            && !failed
        {
            telemetry::totals_unwritten(error);
        }
        failed = written.is_err();
        telemetry::totals(totals.lag(), totals.lost());
    }
}

async fn in_time<T>(
    most: Duration,
    work: impl Future<Output = Result<T, tokio_postgres::Error>>,
) -> Result<T, PostgresError> {
    match timeout(most, work).await {
        Ok(done) => Ok(done?),
        Err(_) => Err(PostgresError::lost()),
    }
}
