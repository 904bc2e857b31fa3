//! How transactions begin: their isolation, how long they wait for a lock, and who held it if they waited in vain.

use std::pin::pin;
use std::time::Duration;

use futures_util::future::{Either, select};
use tokio::time::{sleep, timeout};
use tokio_postgres::Row;
use tokio_postgres::types::ToSql;

use super::client::{Client, Transaction};
use super::connecting::SAFE_PATH;
use super::{Postgres, PostgresError, begin_reading, begin_writing, in_time, migrations};

/// How long a change of the configuration waits for others, and may stay open after its client is gone.
const CHANGE: &str = "SET LOCAL lock_timeout = '10s'; SET LOCAL idle_in_transaction_session_timeout = '10s'";
/// How long it then waits for a row or a table: shorter, so that a lock there fails this change and not all those that
/// wait behind it. A batch of totals whose service has stopped holds its rows for 5 seconds.
const ITS_ROWS: &str = "SET LOCAL lock_timeout = '7s'";
/// How long a read waits for a table that somebody has locked, where no other read waits for this one.
pub(crate) const READ: &str = "SET LOCAL lock_timeout = '10s'";
/// For statements that wait for no lock.
const ANSWERED_WITHIN: Duration = Duration::from_secs(10);
/// How long a change waits for others of this process.
const TURN_WITHIN: Duration = Duration::from_secs(60);
/// When a statement that waits is first looked at, and how often after that.
const LOOKED_AFTER: Duration = Duration::from_millis(150);
const LOOKED_EVERY: Duration = Duration::from_secs(1);

/// The sessions at the head of the queue that a connection waits in. Times of other users' transactions are shown only
/// to members of pg_read_all_stats.
const BLOCKERS: &str = "
    WITH RECURSIVE blocking (pid) AS (
        SELECT unnest(pg_blocking_pids($1)) UNION SELECT unnest(pg_blocking_pids(blocking.pid)) FROM blocking
    )
    SELECT pid, usename::text, application_name,
        to_char(xact_start AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS\"Z\"')
    FROM blocking LEFT JOIN pg_stat_activity USING (pid)
    WHERE cardinality(pg_blocking_pids(pid)) = 0
    ORDER BY xact_start LIMIT 3";

impl Postgres {
    /// Changes the configuration, once all earlier changes have ended: changes run one after the other, and each takes
    /// this lock before any other, so that they can't deadlock. The work is done as a whole or not at all.
    pub(crate) async fn change<T>(
        &self,
        work: impl AsyncFnOnce(&Transaction<'_>) -> Result<T, PostgresError>,
    ) -> Result<T, PostgresError> {
        // Those before it have deadlines too.
        let turn = timeout(self.deadline.unwrap_or(TURN_WITHIN), self.changing.acquire()).await;
        let _turn = turn.map_err(|_| PostgresError::late(&self.address))?;
        let mut connection = self.connection().await?;
        let transaction = in_time(ANSWERED_WITHIN, begin_writing(&mut connection)).await?;
        in_time(ANSWERED_WITHIN, transaction.batch_execute(CHANGE)).await?;
        let pid = transaction.pid().await?;
        let changed = async {
            migrations::expect_this_version(&transaction).await?;
            transaction.execute("SELECT 1 FROM tollgate.configuration FOR UPDATE", &[]).await?;
            transaction.batch_execute(ITS_ROWS).await?;
            work(&transaction).await
        };
        let changed = self.naming_blockers(pid, changed).await?;
        in_time(ANSWERED_WITHIN, transaction.commit()).await?;
        Ok(changed)
    }

    /// A single query, outside a transaction.
    pub(crate) async fn look(&self, select: &str, values: &[&(dyn ToSql + Sync)]) -> Result<Vec<Row>, PostgresError> {
        let connection = self.connection().await?;
        let pid = connection.query_one("SELECT pg_backend_pid()", &[]).await?.get(0);
        self.naming_blockers(pid, connection.query(select, values)).await
    }

    /// Reads the configuration as of one moment.
    pub(crate) async fn at_one_moment<T>(
        &self,
        work: impl AsyncFnOnce(&Transaction<'_>) -> Result<T, PostgresError>,
    ) -> Result<T, PostgresError> {
        let mut connection = self.connection().await?;
        let transaction = begin_reading(&mut connection).await?;
        transaction.batch_execute(READ).await?;
        let pid = transaction.pid().await?;
        let read = async {
            migrations::expect_this_version(&transaction).await?;
            work(&transaction).await
        };
        let read = self.naming_blockers(pid, read).await?;
        transaction.commit().await?;
        Ok(read)
    }

    /// Runs this on the connection with this process id. If it fails because somebody held a lock, the error says who.
    pub(crate) async fn naming_blockers<T>(
        &self,
        pid: i32,
        work: impl Future<Output = Result<T, PostgresError>>,
    ) -> Result<T, PostgresError> {
        let mut work = pin!(work);
        let (mut blockers, mut pause) = (None, LOOKED_AFTER);
        loop {
            match select(work.as_mut(), pin!(sleep(pause))).await {
                Either::Left((done, _)) => return done.map_err(|error| error.held_by(blockers.as_deref())),
                Either::Right(_) => {
                    // The server says who blocks a statement only while it waits.
                    let looked = pin!(self.blockers(pid));
                    match select(work.as_mut(), looked).await {
                        Either::Left((done, _)) => return done.map_err(|error| error.held_by(blockers.as_deref())),
                        Either::Right((found, _)) => blockers = found.or(blockers),
                    }
                }
            }
            pause = LOOKED_EVERY;
        }
    }

    /// Whom a connection waits for: `pid 4711 (user app, psql, in a transaction since 2026-11-24T21:12:07Z)`.
    async fn blockers(&self, pid: i32) -> Option<String> {
        // On a connection of its own: one of the pool belongs to the runtime on which it was made.
        let looked = async {
            let (client, connection) = self.connect().await.ok()?;
            let asked = async {
                client.batch_execute(SAFE_PATH).await?;
                client.query(BLOCKERS, &[&pid]).await
            };
            match select(pin!(asked), pin!(connection)).await {
                Either::Left((rows, _)) => rows.ok(),
                Either::Right(_) => None,
            }
        };
        let rows = timeout(LOOKED_EVERY, looked).await.ok()??;
        let names = rows.iter().map(|row| {
            let pid = row.get::<_, i32>(0);
            if pid == 0 {
                return "a prepared transaction".to_owned();
            }
            let (Some(user), Some(program)) = (row.get::<_, Option<&str>>(1), row.get::<_, Option<&str>>(2)) else {
                return format!("pid {pid}");
            };
            let program = if program.is_empty() { String::new() } else { format!(", {program}") };
            let since = row.get::<_, Option<&str>>(3);
            let since = since.map(|since| format!(", in a transaction since {since}")).unwrap_or_default();
            format!("pid {pid} (user {user}{program}{since})")
        });
        let names: Vec<_> = names.collect();
        (!names.is_empty()).then(|| names.join(", "))
    }
}

/// A transaction that reads the configuration as of one moment, and waits this long for locks.
pub(crate) async fn one_moment<'s>(client: &'s mut Client, patience: &str) -> Result<Transaction<'s>, PostgresError> {
    let transaction = begin_reading(client).await?;
    transaction.batch_execute(patience).await?;
    migrations::expect_this_version(&transaction).await?;
    Ok(transaction)
}
