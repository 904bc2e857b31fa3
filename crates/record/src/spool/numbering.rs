//! Services that write in batches. Each numbers and marks its batches, so that none is written twice, and none that
//! isn't written is taken for it. A killed service is noticed.

use std::future::Future;
use std::time::{Duration, Instant, SystemTime};

use crate::postgres::client::{Client, Transaction};
use tokio_postgres::types::ToSql;

use crate::chance::{mark, unique_id};
use crate::postgres::{Postgres, PostgresError, begin_writing, in_time};
use crate::telemetry;

/// How long each statement of a batch may take.
const ANSWERED_WITHIN: Duration = Duration::from_secs(15);
/// How often a service shows that it runs, if it has nothing to write.
const HEARD_EVERY: Duration = Duration::from_secs(10);
/// A service silent for longer was killed.
const SILENT_FOR: &str = "30 seconds";

/// What a service writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Written {
    /// Totals of users and API keys.
    Totals,
    /// Single decisions, and statistics of them.
    History,
}

/// A service that writes, as the database knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Writer {
    /// The name that it gave itself.
    pub name: String,
    /// What it writes.
    pub writes: Written,
    /// The address it connects from; `None` over a Unix socket.
    pub client: Option<String>,
    /// Requests in the batches that it wrote.
    pub requests: u64,
    /// Requests that it has lost: it couldn't keep them during an outage, or PostgreSQL refused their rows.
    pub lost: u64,
    /// When it began.
    pub started_at: SystemTime,
    /// When it last wrote, or showed that it runs: every ten seconds at least.
    pub written_at: SystemTime,
    /// When it had written everything and stopped or, if it was killed, was last heard from; `None` while it runs.
    pub ended_at: Option<SystemTime>,
    /// Whether it was killed. What it counted since its last write is then lost, and this is the only record of that.
    pub killed: bool,
}

/// How many services the database knows of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct WriterCounts {
    /// All of them.
    pub all: u64,
    /// Those that haven't ended.
    pub running: u64,
    /// Those that have lost requests.
    pub with_losses: u64,
}

/// The numbers of one service's batches, of which one is in flight at a time.
pub(crate) struct Numbering {
    name: String,
    writes: Written,
    /// The last written batch.
    written: BatchId,
    /// The mark of the batch in flight, which may have been written.
    sent: Option<i64>,
    /// The name under which it wrote before, until the database knows the new one.
    former: Option<String>,
    heard: Option<Instant>,
    /// The number last reported as lost.
    lost: u64,
    /// What was reported as lost under former names.
    lost_before: u64,
    /// Whether the database knows that nothing is missing.
    ended: bool,
    looks_for_killed: bool,
}

/// A batch of a service.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct BatchId {
    number: i64,
    mark: i64,
}

/// What is reported with a batch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WriterReport {
    /// How many requests it holds; `None`: the report only says that the service runs, or has ended.
    pub(crate) requests: Option<u64>,
    /// Requests lost by this service so far.
    pub(crate) lost: u64,
    /// Whether this is the last report.
    pub(crate) is_end: bool,
}

/// Begins a batch's transaction.
pub(crate) async fn begin(connection: &mut Client) -> Result<Transaction<'_>, PostgresError> {
    let transaction = answered(begin_writing(connection)).await?;
    answered(transaction.batch_execute(PATIENCE)).await?;
    Ok(transaction)
}

impl Numbering {
    pub(crate) fn new(writes: Written) -> Self {
        Self {
            name: unique_id("service"),
            writes,
            written: BatchId::default(),
            sent: None,
            former: None,
            heard: None,
            lost: 0,
            lost_before: 0,
            ended: false,
            looks_for_killed: false,
        }
    }

    /// Whether the database knows of this service.
    pub(crate) fn is_known(&self) -> bool {
        self.heard.is_some()
    }

    /// Whether there is something to report.
    pub(crate) fn is_due(&self, report: WriterReport) -> bool {
        let due = self.heard.is_none_or(|heard| heard.elapsed() >= HEARD_EVERY) || report.lost != self.lost;
        report.requests.is_some() || report.is_end || (due && !self.ended)
    }

    /// Returns whether the batch is still to be written: one sent over a lost connection may have been. If somebody
    /// else has written under this service's name, it goes on under another one.
    pub(crate) async fn is_new(
        &mut self,
        transaction: &Transaction<'_>,
        report: WriterReport,
    ) -> Result<bool, PostgresError> {
        if report.requests.is_some() {
            self.sent.get_or_insert_with(mark);
        }
        let mut last = self.last(transaction).await?;
        let is_sent = |numbering: &Self, last| numbering.in_flight().is_some_and(|sent| sent == last);
        if last != self.written && !is_sent(self, last) {
            // Nobody can know a mark before it is written, so this isn't this service's batch: a process with the same
            // name wrote it (a cloned machine), it is of an earlier moment (a restored backup), or somebody set it by
            // hand. The batch in flight may have been written before that, and is then written twice, which is better
            // than not at all.
            self.rename();
            last = self.last(transaction).await?;
        }
        Ok(report.requests.is_some() && !is_sent(self, last))
    }

    /// The last batch under this service's name, which is registered if it isn't yet.
    async fn last(&mut self, transaction: &Transaction<'_>) -> Result<BatchId, PostgresError> {
        let registered = answered(transaction.execute(REGISTER, &[&self.name, &self.writes.name()])).await?;
        // The previous connection may still be committing the last batch; this query waits for that.
        let row = answered(transaction.query_one(LAST_BATCH, &[&self.name])).await?;
        if registered > 0 {
            // Services that ended long ago are forgotten, and may write again.
            self.written = BatchId::default();
        }
        Ok(BatchId { number: row.get(0), mark: row.get(1) })
    }

    fn in_flight(&self) -> Option<BatchId> {
        Some(BatchId { number: self.written.number.saturating_add(1), mark: self.sent? })
    }

    fn rename(&mut self) {
        let former = std::mem::replace(&mut self.name, unique_id("service"));
        telemetry::writer_renamed(self.writes.name(), &former, &self.name);
        (self.written, self.lost_before) = (BatchId::default(), self.lost);
        self.former = Some(former);
    }

    /// Stores the batch's number, and what was reported with it, at the end of the transaction. `is_new`: whether the
    /// batch is in it; `refused`: how many of its requests are not.
    pub(crate) async fn advance(
        &self,
        transaction: &Transaction<'_>,
        report: WriterReport,
        (is_new, refused): (bool, u64),
    ) -> Result<(), PostgresError> {
        let BatchId { number, mark } = self.in_flight().unwrap_or(self.written);
        let requests = report.requests.filter(|_| is_new).unwrap_or_default().saturating_sub(refused);
        let lost = report.lost.saturating_add(refused).saturating_sub(self.lost_before);
        let (requests, lost) = (column(requests), column(lost));
        let parameters: [&(dyn ToSql + Sync); 6] = [&self.name, &number, &mark, &requests, &lost, &report.is_end];
        answered(transaction.execute(ADVANCE, &parameters)).await?;
        if let Some(former) = &self.former {
            answered(transaction.execute(END, &[former])).await?;
        }
        Ok(())
    }

    /// Records that the batch was written or, if it `failed`, given up. Call it before the next await.
    pub(crate) fn done(&mut self, report: WriterReport, failed: bool) {
        let sent = self.in_flight();
        self.sent = None;
        if !failed {
            self.written = sent.unwrap_or(self.written);
            self.former = None;
        }
        let heard = self.heard.replace(Instant::now());
        (self.lost, self.ended) = (report.lost, report.is_end && !failed);
        self.looks_for_killed = heard.is_some_and(|heard| heard.elapsed() < HEARD_EVERY * 2);
    }

    /// Marks other writers that were killed, once after each report: not after an outage, when every writer looks
    /// silent. If that fails, the next writer does it.
    pub(crate) async fn note_killed(&mut self, postgres: &Postgres) {
        if !std::mem::take(&mut self.looks_for_killed) {
            return;
        }
        let noted = async {
            let mut connection = postgres.connection().await?;
            let transaction = answered(begin_writing(&mut connection)).await?;
            let killed = answered(transaction.query(NOTE_KILLED, &[&SILENT_FOR, &self.name])).await?;
            answered(transaction.commit()).await?;
            Ok::<_, PostgresError>(killed)
        };
        if let Ok(killed) = noted.await {
            killed.iter().for_each(|row| telemetry::writer_killed(row.get(0), row.get(1)));
        }
    }
}

impl Written {
    /// The word for it: totals or history.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Totals => "totals",
            Self::History => "history",
        }
    }
}

/// So that a stalled process holds up nobody, and what is confirmed as written is on the server's disk.
pub(crate) const PATIENCE: &str = "
    SELECT set_config('synchronous_commit', 'on', true) WHERE current_setting('synchronous_commit') = 'off';
    SET LOCAL lock_timeout = '5s'; SET LOCAL idle_in_transaction_session_timeout = '5s';
    SET LOCAL statement_timeout = '10s'";

const REGISTER: &str = "INSERT INTO tollgate.writers (writer, writes) VALUES ($1, $2) ON CONFLICT DO NOTHING";

const LAST_BATCH: &str = "SELECT batch, mark FROM tollgate.writers WHERE writer = $1 FOR UPDATE";

const ADVANCE: &str = "
    UPDATE tollgate.writers
    SET batch = $2, mark = $3, requests = least(requests::numeric + $4::int8, 9223372036854775807)::int8, lost = $5,
        written_at = now(), killed = false, ended_at = CASE WHEN $6 THEN now() END
    WHERE writer = $1";

/// Ends a name that this service no longer uses. A process that still uses it undoes that with its next batch.
const END: &str = "
    UPDATE tollgate.writers SET ended_at = now()
    WHERE writer = (SELECT writer FROM tollgate.writers WHERE writer = $1 AND ended_at IS NULL FOR UPDATE SKIP LOCKED)";

/// Marks silent writers as killed, and forgets those that ended long ago.
const NOTE_KILLED: &str = "
    WITH forgotten AS (
        DELETE FROM tollgate.writers WHERE ended_at < now() - interval '90 days' AND writer <> $2
    ), silent AS (
        SELECT writer FROM tollgate.writers
        WHERE ended_at IS NULL AND written_at < now() - $1::text::interval AND writer <> $2
        FOR UPDATE SKIP LOCKED
    )
    UPDATE tollgate.writers AS w SET killed = true, ended_at = written_at FROM silent WHERE w.writer = silent.writer
    RETURNING w.writer, w.written_at";

/// The result of a batch's statement, within the time allowed.
pub(crate) async fn answered<T>(work: impl Future<Output = Result<T, PostgresError>>) -> Result<T, PostgresError> {
    in_time(ANSWERED_WITHIN, work).await
}

pub(crate) fn column(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

impl Postgres {
    /// The services that write, or did in the last 90 days, at most 100: first those that have lost something, then
    /// those that run, those that were killed, and the latest to start. A service that writes both totals and history
    /// appears twice. [`writer_counts`](Self::writer_counts) counts all of them.
    ///
    /// # Errors
    ///
    /// No connection; no tables.
    pub async fn writers(&self) -> Result<Vec<Writer>, PostgresError> {
        let select =
            "SELECT writer, writes, host(client) AS client, requests, lost, started_at, written_at, ended_at, killed
            FROM tollgate.writers
            ORDER BY lost > 0 DESC, ended_at IS NULL DESC, killed DESC, started_at DESC LIMIT 100";
        let rows = self.look(select, &[]).await?;
        let writer = |row: &tokio_postgres::Row| Writer {
            name: row.get("writer"),
            writes: if row.get::<_, &str>("writes") == "history" { Written::History } else { Written::Totals },
            client: row.get("client"),
            requests: row.get::<_, i64>("requests").unsigned_abs(),
            lost: row.get::<_, i64>("lost").unsigned_abs(),
            started_at: row.get("started_at"),
            written_at: row.get("written_at"),
            ended_at: row.get("ended_at"),
            killed: row.get("killed"),
        };
        Ok(rows.iter().map(writer).collect())
    }

    /// How many services write, or did in the last 90 days.
    ///
    /// # Errors
    ///
    /// No connection; no tables.
    pub async fn writer_counts(&self) -> Result<WriterCounts, PostgresError> {
        let select = "SELECT count(*), count(*) FILTER (WHERE ended_at IS NULL), count(*) FILTER (WHERE lost > 0)
            FROM tollgate.writers";
        let rows = self.look(select, &[]).await?;
        let [row] = &*rows else {
            return Err(PostgresError::refused("writers: the query for their number didn't return one row"));
        };
        let [all, running, with_losses] = [0, 1, 2].map(|column| row.get::<_, i64>(column).unsigned_abs());
        Ok(WriterCounts { all, running, with_losses })
    }
}
