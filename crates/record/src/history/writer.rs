//! Moves decisions from the queue into the database: a batch a second, or sooner when many are queued; none twice.

use std::ops::Range;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant, SystemTime};

use futures_util::future::select;
use tokio::sync::Notify;
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio::task::yield_now;
use tokio::time::sleep;

use super::columns;
use super::metrics::{Counting, MOST_SERIES, Metrics};
use super::record::{DecisionRecord, Outcome, cut};
use super::{HistorySettings, HistoryStatus};
use crate::chance::jittered;
use crate::postgres::client::Transaction;
use crate::postgres::{Postgres, PostgresError, begin_writing, runtime_with_timers};
use crate::spool::numbering::{PATIENCE, Written, answered, column};
use crate::spool::set_aside::{Parts, SetAside};
use crate::spool::{Backlog, Batch, Spool, WRITTEN_EVERY, finish_in_time, locked};
use crate::telemetry;

/// Decisions in a batch.
const MOST_ROWS: usize = 5_000;
/// After this many, the task yields to others on its thread.
const AT_ONE_GO: usize = 128;
/// How often partitions are maintained, and how soon again after a failure.
const PARTITIONS_EVERY: Duration = Duration::from_secs(3600);
const PARTITIONS_AGAIN: Duration = Duration::from_secs(60);

pub(super) struct Recorder {
    postgres: Postgres,
    settings: Arc<HistorySettings>,
    queue: Sender<Arrived>,
    recorded: AtomicU64,
    backlog: Backlog,
    began: Instant,
    /// When the oldest decision in the queue arrived, in microseconds since `began`; 0: the queue is empty.
    oldest: AtomicU64,
    /// Wakes the writer when the queue is a quarter full.
    much: Arc<Notify>,
    /// Held by the task that writes.
    writing: tokio::sync::Mutex<Writing>,
}

struct Writing {
    queue: Receiver<Arrived>,
    spool: Spool<HistoryBatch>,
    counting: Counting,
    /// The times for which there are partitions, and until when that is assumed.
    times: Option<(Range<SystemTime>, Instant)>,
}

/// A decision, and when it arrived: in microseconds since the recorder's `began`, 1 at least.
type Arrived = (u64, DecisionRecord);

struct HistoryBatch {
    settings: Arc<HistorySettings>,
    content: Content,
    /// Whether the database has refused it once.
    is_refused: bool,
}

/// Rows and counts are written separately, so that rows don't wait for counts, whose rows many services update.
enum Content {
    /// The rows, and how many decisions they stand for: some may only be counted.
    Rows {
        rows: Vec<DecisionRecord>,
        decisions: u64,
        is_full: bool,
    },
    Counts(Metrics),
}

impl Recorder {
    pub(super) fn new(postgres: Postgres, settings: HistorySettings) -> Self {
        let (queue, receiver) = channel(settings.queue);
        Self {
            postgres,
            settings: Arc::new(settings),
            queue,
            recorded: AtomicU64::new(0),
            backlog: Backlog::default(),
            began: Instant::now(),
            oldest: AtomicU64::new(0),
            much: Arc::default(),
            writing: tokio::sync::Mutex::new(Writing {
                queue: receiver,
                spool: Spool::new(Written::History),
                counting: Counting::new(),
                times: None,
            }),
        }
    }

    pub(super) fn settings(&self) -> &HistorySettings {
        &self.settings
    }

    /// Puts a decision into the queue if there is room. The last quarter is reserved for denials, which are looked up
    /// most.
    pub(super) fn record(&self, record: DecisionRecord) {
        let (room, all) = (self.queue.capacity(), self.settings.queue);
        let now = self.now();
        // The time of the first decision; if two come first at once, of either.
        if self.oldest.load(Ordering::Relaxed) == 0 {
            let _ = self.oldest.compare_exchange(0, now, Ordering::Relaxed, Ordering::Relaxed);
        }
        let is_left_out = record.outcome == Outcome::Allowed && room <= all / 4;
        if is_left_out || self.queue.try_send((now, record)).is_err() {
            if self.backlog.lose(1) {
                telemetry::history_full();
            }
            return;
        }
        self.recorded.fetch_add(1, Ordering::Relaxed);
        if room <= all - all / 4 {
            self.much.notify_one();
        }
    }

    pub(super) fn status(&self) -> HistoryStatus {
        HistoryStatus {
            recorded: self.recorded.load(Ordering::Relaxed),
            lost: self.backlog.lost(),
            queued: self.settings.queue - self.queue.capacity(),
            lag: self.lag(),
        }
    }

    /// Age of the oldest decision that isn't in the database yet.
    fn lag(&self) -> Duration {
        self.backlog.lag(self.arrived(self.oldest.load(Ordering::Relaxed)))
    }

    /// As stored in `oldest`.
    fn now(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_micros()).unwrap_or(u64::MAX).max(1)
    }

    fn arrived(&self, oldest: u64) -> Option<Instant> {
        (oldest > 0).then(|| self.began + Duration::from_micros(oldest))
    }

    /// Whether there is anything to write, or this process's end to report.
    pub(super) fn is_used(&self) -> bool {
        self.recorded.load(Ordering::Relaxed) > 0
            // A write in progress may still fail.
            || self.writing.try_lock().map_or(true, |writing| writing.spool.is_known())
    }

    /// Writes all that was recorded before the call, and tells the database that nothing is missing.
    pub(super) async fn finish(&self) -> Result<(), PostgresError> {
        runtime_with_timers()?;
        let recorded = self.recorded.load(Ordering::Relaxed);
        // Enough for rows and counts of each thousand in the queue, and the batch in flight. The bound is needed
        // because others may go on recording.
        let mut writes = (self.settings.queue - self.queue.capacity()) / MOST_SERIES * 2 + 8;
        while !self.write(true).await? {
            writes = writes.saturating_sub(1);
            if writes == 0 && self.recorded.load(Ordering::Relaxed) != recorded {
                break;
            }
        }
        Ok(())
    }

    /// Like `finish`, repeated for some seconds while it fails.
    pub(super) async fn finish_in_time(self: Arc<Self>) {
        if let Err(error) = finish_in_time(|| self.finish()).await {
            telemetry::history_refused(&error);
        }
    }

    /// Writes a batch, if there is anything, and returns whether nothing is left. What can't be written is kept for the
    /// next time. At the end, the database knows that nothing is missing.
    ///
    /// Cancel-safe: what was taken from the queue is in the batch.
    async fn write(&self, is_end: bool) -> Result<bool, PostgresError> {
        let mut writing = locked(&self.writing, &self.postgres).await?;
        let writing = &mut *writing;
        self.look_after_partitions(writing).await?;
        self.fill(writing, is_end).await;
        let (batch, written) = writing.spool.write(&self.postgres, &self.backlog, is_end).await;
        if let Err(error) = &written
            && error.is_data()
        {
            // The cause may be a missing partition, which can be made.
            writing.times = None;
            if batch.is_some() {
                telemetry::history_refused(error);
            }
        }
        if let Some(HistoryBatch { content: Content::Rows { mut rows, .. }, .. }) = batch {
            while !rows.is_empty() {
                rows.truncate(rows.len().saturating_sub(AT_ONE_GO));
                yield_now().await;
            }
        }
        writing.spool.note_killed(&self.postgres).await;
        let is_all = writing.spool.batch.is_none() && writing.queue.is_empty() && writing.counting.is_empty();
        written.map(|()| is_all)
    }

    /// Makes missing partitions, and finds out for which times there are any. If making them fails, the existing ones
    /// are used.
    async fn look_after_partitions(&self, writing: &mut Writing) -> Result<(), PostgresError> {
        if writing.times.as_ref().is_some_and(|(_, until)| Instant::now() < *until) {
            return Ok(());
        }
        let mut connection = self.postgres.connection().await?;
        let made = async {
            let transaction = answered(begin_writing(&mut connection)).await?;
            answered(transaction.batch_execute(PATIENCE)).await?;
            answered(transaction.query_one("SELECT tollgate.make_partitions(2)", &[])).await?;
            answered(transaction.commit()).await
        }
        .await;
        let good_for = match made {
            Ok(()) => PARTITIONS_EVERY,
            Err(error) if error.is_unreachable() => return Err(error),
            Err(error) => {
                telemetry::partitions_unmade(&error);
                PARTITIONS_AGAIN
            }
        };
        let row = answered(connection.query_one(TIMES, &[])).await?;
        writing.times = Some((row.get(0)..row.get(1), Instant::now() + good_for));
        Ok(())
    }

    /// Fills a batch from the queue or, once enough was counted, with the counts.
    async fn fill(&self, writing: &mut Writing, is_end: bool) {
        let Writing { queue, spool: Spool { batch, .. }, counting, times } = writing;
        let new = |content| HistoryBatch { settings: Arc::clone(&self.settings), content, is_refused: false };
        if batch.is_none() {
            if counting.is_due() {
                *batch = counting.taken().map(Content::Counts).map(new);
                return;
            }
            self.backlog.begin_flight(self.arrived(self.oldest.swap(0, Ordering::Relaxed)));
            *batch = Some(new(Content::Rows { rows: Vec::new(), decisions: 0, is_full: false }));
        }
        if let Some(HistoryBatch { content: Content::Rows { rows, decisions, is_full }, .. }) = batch
            && !*is_full
        {
            let mut last = 0;
            let has_partition = |time| times.as_ref().is_none_or(|(times, _)| times.contains(&time));
            while rows.len() < MOST_ROWS && *decisions < MOST_ROWS as u64 * 4 && !counting.is_full() {
                let Ok((arrived, record)) = queue.try_recv() else { break };
                last = arrived;
                if has_partition(record.at) {
                    counting.add(&record);
                    *decisions += 1;
                    rows.extend(Some(record).filter(|record| record.has_row));
                } else if self.backlog.lose(1) {
                    telemetry::history_misdated();
                }
                if (*decisions).is_multiple_of(AT_ONE_GO as u64) {
                    yield_now().await;
                }
            }
            *is_full = true;
            if !queue.is_empty() {
                // The rest of the queue came later, but before what has arrived meanwhile.
                self.oldest.store(last, Ordering::Relaxed);
            }
            if *decisions == 0 {
                self.backlog.begin_flight(None);
                let counts = if is_end { counting.taken() } else { None };
                *batch = counts.map(Content::Counts).map(new);
            }
        }
    }
}

impl Batch for HistoryBatch {
    /// Decisions in counts are recorded with their rows.
    fn requests(&self) -> u64 {
        match &self.content {
            Content::Rows { decisions, .. } => *decisions,
            Content::Counts(_) => 0,
        }
    }

    async fn write(&self, transaction: &Transaction<'_>) -> Result<SetAside, PostgresError> {
        let mut set_aside = SetAside::default();
        match &self.content {
            Content::Rows { rows, .. } if rows.is_empty() => {}
            Content::Rows { rows, .. } if self.is_refused => {
                let mut parts = Parts::of(rows);
                while let Some(part) = parts.begin(transaction).await? {
                    let added = copy(transaction, part, &self.settings).await;
                    let Some(error) = parts.end(transaction, part, added).await? else { continue };
                    set_aside.requests += part.len() as u64;
                    part.iter().for_each(|row| set_aside.add(|| name_of(row), &error));
                }
            }
            Content::Rows { rows, .. } => copy(transaction, rows, &self.settings).await?,
            Content::Counts(metrics) => {
                metrics.write(transaction, &self.settings.region, self.is_refused.then_some(&mut set_aside)).await?;
            }
        }
        Ok(set_aside)
    }

    /// Once more, since the cause may be a missing partition, or a single row. What is lost is missing in rows or in
    /// counts.
    fn refused(&mut self) -> Option<u64> {
        let lost = match &self.content {
            Content::Rows { rows, .. } => rows.len() as u64,
            Content::Counts(metrics) => metrics.decisions,
        };
        std::mem::replace(&mut self.is_refused, true).then_some(lost)
    }
}

/// Names a decision by its user and its time.
fn name_of(row: &DecisionRecord) -> String {
    let at = jiff::Timestamp::try_from(row.at).unwrap_or_default();
    format!("the decision of user {:?} at {at:.6}", row.user.as_deref().unwrap_or_default())
}

async fn copy(
    transaction: &Transaction<'_>,
    rows: &[DecisionRecord],
    settings: &HistorySettings,
) -> Result<(), PostgresError> {
    let HistorySettings { region, server, .. } = settings;
    let [region, server] = [region, server].map(|text| Some(&**text).filter(|text| !text.is_empty()));
    let copy = format!("COPY tollgate.rate_limit_audit_logs ({}) FROM STDIN (FORMAT binary)", columns::names());
    let types = columns::COLUMNS.each_ref().map(|column| column.sql.wire());
    let mut writer = answered(transaction.copy_in(&copy, &types)).await?;
    for (at, row) in rows.iter().enumerate() {
        let endpoint = row.endpoint.as_ref().map(super::record::Endpoint::text);
        let (used, capacity) = (row.used.map(column), row.capacity.map(column));
        let status = row.status.and_then(|status| i16::try_from(status).ok());
        let latency = i64::try_from(row.latency.as_micros()).unwrap_or(i64::MAX);
        answered(writer.write(&[
            &row.at,
            &row.user.as_deref(),
            &row.api_key.as_deref(),
            &row.ip,
            &endpoint,
            &row.method.as_deref(),
            &row.rule.as_deref().map(cut),
            &row.outcome.name(),
            &row.reason,
            &row.limited_by.as_deref().map(cut),
            &used,
            &capacity,
            &status,
            &row.retry_after,
            &region,
            &server,
            &latency,
            &row.rules.as_deref().map(cut),
        ]))
        .await?;
        if at % AT_ONE_GO == 0 {
            yield_now().await;
        }
    }
    answered(writer.finish()).await.map(drop)
}

/// Writes for as long as there is a recorder.
pub(super) async fn write(recorder: Weak<Recorder>, much: Arc<Notify>) {
    let mut failed = false;
    loop {
        let Some(recorder) = recorder.upgrade() else { return };
        let status = recorder.status();
        telemetry::history(status.lag, status.lost);
        let written = recorder.write(false).await;
        if let Err(error) = &written
            && !failed
        {
            telemetry::history_unwritten(error);
        }
        failed = written.is_err();
        let is_much = recorder.queue.capacity() <= recorder.settings.queue - recorder.settings.queue / 4;
        // A batch holds a limited number of users and endpoints, so even a short queue may be old.
        let is_behind = recorder.lag() > WRITTEN_EVERY;
        drop(recorder);
        let pause = sleep(jittered(WRITTEN_EVERY, 10));
        if failed {
            pause.await;
        } else if !is_much && !is_behind {
            select(pin!(pause), pin!(much.notified())).await;
        }
    }
}

impl Recorder {
    pub(super) fn much(&self) -> Arc<Notify> {
        Arc::clone(&self.much)
    }
}

const TIMES: &str = "
    SELECT (date_trunc('month', now() AT TIME ZONE 'UTC') - interval '1 month') AT TIME ZONE 'UTC',
        now() + interval '1 day'";
