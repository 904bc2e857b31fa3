//! Totals of users and API keys, added to the database in batches: about one a second, and none twice.
//!
//! Days and times are those of the database's clock: a batch has the age of its requests, so the host's clock need not
//! be right. The service's own clock only separates days while PostgreSQL is unreachable.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::hash::BuildHasher;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, MutexGuard, Weak};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::chance::jittered;
use crate::lock::Lock;
use crate::postgres::client::Transaction;
use crate::postgres::{Postgres, PostgresError, runtime_with_timers};
use crate::spool::numbering::{Written, answered, column};
use crate::spool::set_aside::{Parts, SetAside};
use crate::spool::{Backlog, Batch, Spool, WRITTEN_EVERY, finish_in_time, locked};
use crate::stored::input::{MOST_BYTES_OF_A_KEY, MOST_BYTES_OF_A_USER};
use crate::telemetry;

/// Most rows that a statement adds: a second's work.
const MOST_ROWS: usize = 10_000;
/// Most users counted at a time, each once a day: without a bound, memory would grow while PostgreSQL is unreachable.
/// There are only as many keys as exist.
const MOST_NAMES: usize = 100_000;
const STRIPES: usize = 16;
const SECONDS_OF_A_DAY: u64 = 86_400;

pub(crate) struct Totals {
    postgres: Postgres,
    counts: [Lock<Counts>; STRIPES],
    hasher: std::hash::RandomState,
    names: AtomicUsize,
    backlog: Backlog,
    /// Held by the task that writes.
    spool: tokio::sync::Mutex<Spool<TotalsBatch>>,
}

#[derive(Default)]
struct Counts {
    users: HashMap<String, OfUser>,
    keys: HashMap<String, OfKey>,
    /// Counts of past days.
    before: Vec<(String, OfUser)>,
    /// When the first of these counts came.
    since: Option<Instant>,
}

#[derive(Clone, Copy)]
struct OfUser {
    /// Days since the epoch, by this host's clock.
    day: i32,
    allowed: u64,
    denied: u64,
    last: Instant,
}

#[derive(Clone, Copy)]
struct OfKey {
    allowed: u64,
    last: Instant,
}

/// In the order in which rows are locked: the same in every process.
#[derive(Default)]
struct TotalsBatch {
    /// By day and name.
    users: BTreeMap<(i32, String), OfUser>,
    keys: BTreeMap<String, OfKey>,
    requests: u64,
    /// Whether the database has refused it once.
    is_refused: bool,
}

/// Writes the totals once a second.
pub(crate) async fn write_totals(totals: Weak<Totals>, connected: Arc<AtomicBool>) {
    let mut failed = false;
    loop {
        let Some(totals) = totals.upgrade() else { return };
        telemetry::totals(totals.lag(), totals.lost(), connected.load(Ordering::Relaxed));
        let written = totals.write().await;
        match &written {
            Err(error) if error.is_data() => telemetry::totals_refused(error),
            Err(error) if !failed => telemetry::totals_unwritten(error),
            _ => {}
        }
        failed = written.as_ref().is_err_and(|error| !error.is_data());
        drop(totals);
        tokio::time::sleep(jittered(WRITTEN_EVERY, 10)).await;
    }
}

impl Totals {
    pub(crate) fn new(postgres: Postgres) -> Self {
        Self {
            postgres,
            counts: Default::default(),
            hasher: std::hash::RandomState::new(),
            names: AtomicUsize::new(0),
            backlog: Backlog::default(),
            spool: tokio::sync::Mutex::new(Spool::new(Written::Totals)),
        }
    }

    /// Counts a decided request.
    pub(crate) fn count(&self, user: &str, key: Option<&str>, allowed: bool) {
        if user.is_empty() || user.len() > MOST_BYTES_OF_A_USER || user.contains('\0') {
            // The database can't have such a user.
            return;
        }
        let mut counts = self.stripe(user);
        // Under the lock, so that days come in order.
        let last = Instant::now();
        let seconds = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let day = i32::try_from(seconds / SECONDS_OF_A_DAY).unwrap_or(i32::MAX);
        let now = OfUser { day, allowed: u64::from(allowed), denied: u64::from(!allowed), last };
        counts.since.get_or_insert(last);
        match counts.users.get_mut(user) {
            // A clock that was set back doesn't begin another day.
            Some(of_user) if of_user.day >= day => of_user.add(now),
            Some(of_user) => {
                let before = std::mem::replace(of_user, now);
                if self.has_room() {
                    counts.before.push((user.to_owned(), before));
                } else {
                    self.backlog.lose(before.allowed + before.denied);
                }
            }
            None if self.has_room() => drop(counts.users.insert(user.to_owned(), now)),
            None => {
                self.backlog.lose(1);
                return;
            }
        }
        let is_id = |key: &&str| key.len() <= MOST_BYTES_OF_A_KEY && !key.contains('\0');
        let Some(key) = key.filter(|key| allowed && is_id(key)) else { return };
        match counts.keys.get_mut(key) {
            Some(of_key) => *of_key = OfKey { allowed: of_key.allowed + 1, last },
            None => drop(counts.keys.insert(key.to_owned(), OfKey { allowed: 1, last })),
        }
    }

    /// Whether there is room for another user or day; if so, takes it.
    fn has_room(&self) -> bool {
        let room = self.names.load(Ordering::Relaxed) < MOST_NAMES;
        if room {
            self.names.fetch_add(1, Ordering::Relaxed);
        }
        room
    }

    fn stripe(&self, user: &str) -> MutexGuard<'_, Counts> {
        let stripe = usize::try_from(self.hasher.hash_one(user) % STRIPES as u64).unwrap_or_default();
        self.counts[stripe].lock()
    }

    /// Whether there is anything to write, or this process's end to report.
    pub(crate) fn is_used(&self) -> bool {
        // A write in progress may still fail.
        let has_written = self.spool.try_lock().map_or(true, |spool| spool.is_known() || spool.batch.is_some());
        has_written || self.counts.iter().any(|counts| counts.lock().since.is_some())
    }

    /// Requests that are lost: there were more users than are counted while PostgreSQL is unreachable, or it refused
    /// their data.
    pub(crate) fn lost(&self) -> u64 {
        self.backlog.lost()
    }

    /// Age of the oldest request that isn't in the database yet.
    pub(crate) fn lag(&self) -> Duration {
        self.backlog.lag(self.counts.iter().filter_map(|counts| counts.lock().since))
    }

    /// Writes all that was counted, and tells the database that nothing is missing.
    pub(crate) async fn finish(&self) -> Result<(), PostgresError> {
        runtime_with_timers()?;
        // Held to the end, so that no other task takes counts that this call wouldn't wait for.
        let mut spool = locked(&self.spool, &self.postgres).await?;
        self.write_batch(&mut spool, true).await?;
        // Counts that came in behind a batch in flight.
        if self.counts.iter().any(|counts| counts.lock().since.is_some()) {
            self.write_batch(&mut spool, true).await?;
        }
        Ok(())
    }

    /// Like `finish`, repeated for some seconds while it fails.
    pub(crate) async fn finish_in_time(self: Arc<Self>) {
        if let Err(error) = finish_in_time(|| self.finish()).await {
            telemetry::totals_given_up(&error);
        }
    }

    /// Writes what was counted so far, if there is anything; what can't be written is kept for the next time.
    pub(crate) async fn write(&self) -> Result<(), PostgresError> {
        let mut spool = locked(&self.spool, &self.postgres).await?;
        self.write_batch(&mut spool, false).await
    }

    /// The same under the lock. At the end, the database knows that nothing is missing.
    async fn write_batch(&self, spool: &mut Spool<TotalsBatch>, is_end: bool) -> Result<(), PostgresError> {
        if spool.batch.is_none() {
            spool.batch = self.taken();
        }
        let (_, mut written) = spool.write(&self.postgres, &self.backlog, is_end).await;
        if spool.batch.is_some() && written.as_ref().is_err_and(PostgresError::is_data) {
            // Without the rows that the database refuses.
            (_, written) = spool.write(&self.postgres, &self.backlog, is_end).await;
        }
        spool.note_killed(&self.postgres).await;
        written
    }

    /// Takes all counts, to be written.
    fn taken(&self) -> Option<TotalsBatch> {
        let mut batch = TotalsBatch::default();
        let mut since = None;
        for counts in &self.counts {
            let counts = std::mem::take(&mut *counts.lock());
            self.names.fetch_sub(counts.users.len() + counts.before.len(), Ordering::Relaxed);
            since = since.into_iter().chain(counts.since).min();
            for (user, of_user) in counts.before.into_iter().chain(counts.users) {
                batch.requests += of_user.allowed + of_user.denied;
                match batch.users.entry((of_user.day, user)) {
                    Entry::Occupied(mut known) => known.get_mut().add(of_user),
                    Entry::Vacant(unknown) => drop(unknown.insert(of_user)),
                }
            }
            // A key's requests may have been counted for several users.
            for (key, of_key) in counts.keys {
                let known = batch.keys.entry(key).or_insert(OfKey { allowed: 0, last: of_key.last });
                *known = OfKey { allowed: known.allowed + of_key.allowed, last: known.last.max(of_key.last) };
            }
        }
        self.backlog.begin_flight(since);
        (!batch.users.is_empty()).then_some(batch)
    }
}

impl Batch for TotalsBatch {
    fn requests(&self) -> u64 {
        self.requests
    }

    async fn write(&self, transaction: &Transaction<'_>) -> Result<SetAside, PostgresError> {
        let mut set_aside = SetAside::default();
        // A statement can't change a user's row twice.
        let mut days: BTreeMap<i32, Vec<(&str, &OfUser)>> = BTreeMap::new();
        for ((day, user), counts) in &self.users {
            days.entry(*day).or_default().push((user, counts));
        }
        for users in days.values().flat_map(|users| users.chunks(MOST_ROWS)) {
            if !self.is_refused {
                add_users(transaction, users).await?;
                continue;
            }
            let mut parts = Parts::of(users);
            while let Some(part) = parts.begin(transaction).await? {
                let added = add_users(transaction, part).await;
                let Some(error) = parts.end(transaction, part, added).await? else { continue };
                for (user, counts) in part {
                    set_aside.requests += counts.allowed + counts.denied;
                    set_aside.add(|| format!("user {user:?}"), &error);
                }
            }
        }
        let keys: Vec<_> = self.keys.iter().collect();
        for keys in keys.chunks(MOST_ROWS) {
            if !self.is_refused {
                add_keys(transaction, keys).await?;
                continue;
            }
            let mut parts = Parts::of(keys);
            while let Some(part) = parts.begin(transaction).await? {
                let added = add_keys(transaction, part).await;
                let Some(error) = parts.end(transaction, part, added).await? else { continue };
                // Their requests are in the totals of users.
                part.iter().for_each(|(id, _)| set_aside.add(|| format!("key {id:?}"), &error));
            }
        }
        Ok(set_aside)
    }

    fn refused(&mut self) -> Option<u64> {
        std::mem::replace(&mut self.is_refused, true).then_some(self.requests)
    }
}

async fn add_users(transaction: &Transaction<'_>, users: &[(&str, &OfUser)]) -> Result<(), PostgresError> {
    let names: Vec<_> = users.iter().map(|(user, _)| *user).collect();
    let allowed: Vec<_> = users.iter().map(|(_, counts)| column(counts.allowed)).collect();
    let denied: Vec<_> = users.iter().map(|(_, counts)| column(counts.denied)).collect();
    let ages: Vec<_> = users.iter().map(|(_, counts)| age(counts.last)).collect();
    answered(transaction.execute(ADD_USERS, &[&names, &allowed, &denied, &ages])).await.map(drop)
}

async fn add_keys(transaction: &Transaction<'_>, keys: &[(&String, &OfKey)]) -> Result<(), PostgresError> {
    let ids: Vec<_> = keys.iter().map(|(id, _)| id.as_str()).collect();
    let allowed: Vec<_> = keys.iter().map(|(_, counts)| column(counts.allowed)).collect();
    let ages: Vec<_> = keys.iter().map(|(_, counts)| age(counts.last)).collect();
    answered(transaction.execute(ADD_KEYS, &[&ids, &allowed, &ages])).await.map(drop)
}

/// Adds usage, at most one row of each user. Usage that arrives after its day or month is over no longer counts towards
/// that total. A stored day that is yet to come, by a clock that has been set back since, counts as today.
const ADD_USERS: &str = "
    WITH clock AS (
        SELECT (now() AT TIME ZONE 'UTC')::date AS today, date_trunc('month', now() AT TIME ZONE 'UTC')::date AS month
    ), counted AS (
        SELECT user_id, allowed, denied, now() - age * interval '1 microsecond' AS last
        FROM unnest($1::text[], $2::int8[], $3::int8[], $4::int8[]) AS counted (user_id, allowed, denied, age)
    )
    INSERT INTO tollgate.user_quotas AS q
        (user_id, today, total_today, this_month, total_this_month, times_exceeded, last_request_at)
    SELECT user_id, (last AT TIME ZONE 'UTC')::date, allowed, date_trunc('month', last AT TIME ZONE 'UTC')::date, allowed,
        denied, last
    FROM counted
    ON CONFLICT (user_id) DO UPDATE
    SET (today, total_today) = (
            SELECT greatest(known, excluded.today), CASE
                WHEN known = excluded.today THEN least(q.total_today::numeric + excluded.total_today, 9223372036854775807)::int8
                WHEN known > excluded.today THEN q.total_today
                ELSE excluded.total_today END
            FROM (SELECT CASE WHEN q.today > clock.today THEN clock.today ELSE q.today END AS known FROM clock) AS known),
        (this_month, total_this_month) = (
            SELECT greatest(known, excluded.this_month), CASE
                WHEN known = excluded.this_month THEN least(q.total_this_month::numeric + excluded.total_this_month, 9223372036854775807)::int8
                WHEN known > excluded.this_month THEN q.total_this_month
                ELSE excluded.total_this_month END
            FROM (SELECT CASE WHEN q.this_month > month THEN month ELSE q.this_month END AS known FROM clock) AS known),
        times_exceeded = least(q.times_exceeded::numeric + excluded.times_exceeded, 9223372036854775807)::int8,
        last_request_at = greatest(
            CASE WHEN q.last_request_at > now() THEN now() ELSE q.last_request_at END, excluded.last_request_at)";

const ADD_KEYS: &str = "
    UPDATE tollgate.api_keys AS k
    SET total = least(k.total::numeric + counted.allowed, 9223372036854775807)::int8,
        last_used_at = greatest(
            CASE WHEN k.last_used_at > now() THEN now() ELSE k.last_used_at END,
            now() - counted.age * interval '1 microsecond')
    FROM unnest($1::text[], $2::int8[], $3::int8[]) AS counted (key_id, allowed, age)
    WHERE k.key_id = counted.key_id";

/// In microseconds.
fn age(last: Instant) -> i64 {
    i64::try_from(last.elapsed().as_micros()).unwrap_or_default()
}

impl OfUser {
    fn add(&mut self, now: Self) {
        self.allowed += now.allowed;
        self.denied += now.denied;
        self.last = now.last;
    }
}
