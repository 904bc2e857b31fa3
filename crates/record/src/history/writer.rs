//! Moves decisions from the queue into the database: a batch a second, or sooner when many are queued; none twice.

use std::ops::Range;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use deadpool_postgres::Transaction;
use futures_util::future::select;
use tokio::sync::Notify;
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio::task::yield_now;
use tokio::time::{sleep, timeout};
use tokio_postgres::binary_copy::BinaryCopyInWriter;

use super::columns;
use super::metrics::{Counting, MOST_SERIES, Metrics};
use super::record::{DecisionRecord, Outcome};
use super::{HistorySettings, HistoryStatus};
use crate::chance::jittered;
use crate::lock::Lock;
use crate::postgres::begin_writing;
use crate::postgres::{Postgres, PostgresError};
use crate::telemetry;
use crate::usage::writers::{About, Batches, PATIENCE, Written, answered, column};

/// How long decisions wait for others before they are written.
const WRITTEN_EVERY: Duration = Duration::from_secs(1);
/// Decisions in a batch.
const MOST_ROWS: usize = 5_000;
/// After this many, the task yields to others on its thread.
const AT_ONE_GO: usize = 128;
/// How often partitions are maintained, and how soon again after a failure.
const PARTITIONS_EVERY: Duration = Duration::from_secs(3600);
const PARTITIONS_AGAIN: Duration = Duration::from_secs(60);
/// How long to wait for another task that is writing and may have stalled.
const WRITING_WITHIN: Duration = Duration::from_secs(15);

pub(super) struct Recorder {
    postgres: Postgres,
    settings: HistorySettings,
    queue: Sender<DecisionRecord>,
    recorded: AtomicU64,
    lost: AtomicU64,
    /// When the oldest decision in the queue arrived, in microseconds since the epoch; 0: the queue is empty.
    oldest: AtomicU64,
    /// Wakes the writer when the queue is a quarter full.
    much: Arc<Notify>,
    /// When the oldest decision in the batch in flight arrived.
    on_its_way: Lock<Option<SystemTime>>,
    /// Held by the task that writes.
    writing: tokio::sync::Mutex<Writing>,
}

struct Writing {
    queue: Receiver<DecisionRecord>,
    batches: Batches,
    /// The batch being filled or in flight; whether one in flight was written isn't known.
    batch: Option<HistoryBatch>,
    counting: Counting,
    /// The times for which there are partitions, and until when that is assumed.
    times: Option<(Range<SystemTime>, Instant)>,
}

/// Rows and counts are written separately, so that rows don't wait for counts, whose rows many services update.
enum HistoryBatch {
    /// The rows, and how many decisions they stand for: some may only be counted.
    Rows {
        rows: Vec<DecisionRecord>,
        decisions: u64,
        is_full: bool,
        is_tried: bool,
    },
    Counts {
        metrics: Metrics,
        is_tried: bool,
    },
}

impl Recorder {
    pub(super) fn new(postgres: Postgres, settings: HistorySettings) -> Self {
        let (queue, receiver) = channel(settings.queue);
        Self {
            postgres,
            settings,
            queue,
            recorded: AtomicU64::new(0),
            lost: AtomicU64::new(0),
            oldest: AtomicU64::new(0),
            much: Arc::default(),
            on_its_way: Lock::default(),
            writing: tokio::sync::Mutex::new(Writing {
                queue: receiver,
                batches: Batches::new(Written::History),
                batch: None,
                counting: Counting::new(),
                times: None,
            }),
        }
    }

    pub(super) fn settings(&self) -> &HistorySettings {
        &self.settings
    }

    /// Puts a decision into the queue if there is room. The last quarter is reserved for denials, which are asked for
    /// most.
    pub(super) fn record(&self, record: DecisionRecord) {
        let (room, all) = (self.queue.capacity(), self.settings.queue);
        // The first decision's time; where two are first at once, either.
        if self.oldest.load(Ordering::Relaxed) == 0 {
            let _ = self.oldest.compare_exchange(0, micros(SystemTime::now()), Ordering::Relaxed, Ordering::Relaxed);
        }
        let is_left_out = record.outcome == Outcome::Allowed && room <= all / 4;
        if is_left_out || self.queue.try_send(record).is_err() {
            if self.lost.fetch_add(1, Ordering::Relaxed) == 0 {
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
            lost: self.lost.load(Ordering::Relaxed),
            queued: self.settings.queue - self.queue.capacity(),
            lag: self.lag(),
        }
    }

    /// Age of the oldest decision that isn't in the database yet.
    fn lag(&self) -> Duration {
        let on_its_way = *self.on_its_way.lock();
        let queued = Some(self.oldest.load(Ordering::Relaxed)).filter(|oldest| *oldest > 0);
        let queued = queued.map(|micros| UNIX_EPOCH + Duration::from_micros(micros));
        let oldest = on_its_way.into_iter().chain(queued).min();
        oldest.map_or(Duration::ZERO, |oldest| oldest.elapsed().unwrap_or_default())
    }

    /// Whether there is anything to write, or this process's end to report.
    pub(super) fn is_used(&self) -> bool {
        self.recorded.load(Ordering::Relaxed) > 0
            // A write in progress may still fail.
            || self.writing.try_lock().map_or(true, |writing| writing.batches.is_known())
    }

    /// Writes all that was recorded before the call, and tells the database that nothing is missing.
    pub(super) async fn finish(&self) -> Result<(), PostgresError> {
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

    /// Like `finish`, retried for this long.
    pub(super) async fn finish_within(&self, most: Duration) {
        let began = Instant::now();
        while let Err(error) = self.finish().await {
            if began.elapsed() >= most {
                telemetry::history_refused(&error);
                return;
            }
            sleep(WRITTEN_EVERY).await;
        }
    }

    /// Writes a batch, if there is anything, and returns whether nothing is left. What can't be written is kept for the
    /// next time. At the end, the database knows that nothing is missing.
    ///
    /// Cancel-safe: what was taken from the queue is in the batch, and the batch is removed as soon as it is known to
    /// be written.
    async fn write(&self, is_end: bool) -> Result<bool, PostgresError> {
        let writing = timeout(WRITING_WITHIN, self.writing.lock()).await;
        let mut writing = writing.map_err(|_| PostgresError::late(self.postgres.address()))?;
        let writing = &mut *writing;
        self.look_after_partitions(writing).await?;
        self.fill(writing, is_end).await;
        let requests = writing.batch.as_ref().map(HistoryBatch::decisions);
        let about = About { requests, lost: self.lost.load(Ordering::Relaxed), is_end };
        if !writing.batches.is_due(about) {
            return Ok(true);
        }
        let written = self.write_batch(writing, about).await;
        if let Err(error) = &written {
            let Some(batch) = writing.batch.as_mut().filter(|_| error.is_data()) else {
                return written.map(|()| false);
            };
            // The cause may be a missing partition, which can be made.
            writing.times = None;
            if !std::mem::replace(batch.is_tried(), true) {
                return written.map(|()| false);
            }
            self.lost.fetch_add(batch.lost(), Ordering::Relaxed);
            telemetry::history_refused(error);
        }
        // No await until the batch is removed.
        let batch = writing.batch.take();
        *self.on_its_way.lock() = None;
        let is_time = writing.batches.done(about, written.is_err());
        if let Some(HistoryBatch::Rows { mut rows, .. }) = batch {
            while !rows.is_empty() {
                rows.truncate(rows.len().saturating_sub(AT_ONE_GO));
                yield_now().await;
            }
        }
        if is_time {
            writing.batches.note_killed(&self.postgres).await;
        }
        let is_all = writing.queue.is_empty() && writing.counting.is_empty();
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
        let Writing { queue, batch, counting, times, .. } = writing;
        if batch.is_none() {
            if counting.is_due() {
                *batch = counting.taken().map(|metrics| HistoryBatch::Counts { metrics, is_tried: false });
                return;
            }
            let since = self.oldest.swap(0, Ordering::Relaxed);
            *self.on_its_way.lock() = (since > 0).then(|| UNIX_EPOCH + Duration::from_micros(since));
            *batch = Some(HistoryBatch::Rows { rows: Vec::new(), decisions: 0, is_full: false, is_tried: false });
        }
        if let Some(HistoryBatch::Rows { rows, decisions, is_full, .. }) = batch
            && !*is_full
        {
            let has_partition = |time| times.as_ref().is_none_or(|(times, _)| times.contains(&time));
            while rows.len() < MOST_ROWS && *decisions < MOST_ROWS as u64 * 4 && !counting.is_full() {
                let Ok(record) = queue.try_recv() else { break };
                if has_partition(record.at) {
                    counting.add(&record);
                    *decisions += 1;
                    rows.extend(Some(record).filter(|record| record.has_row));
                } else if self.lost.fetch_add(1, Ordering::Relaxed) == 0 {
                    telemetry::history_misdated();
                }
                if (*decisions).is_multiple_of(AT_ONE_GO as u64) {
                    yield_now().await;
                }
            }
            *is_full = true;
            if !queue.is_empty() {
                // The rest of the queue came later; when exactly isn't known.
                let now = micros(SystemTime::now());
                let _ = self.oldest.compare_exchange(0, now, Ordering::Relaxed, Ordering::Relaxed);
            }
            if *decisions == 0 {
                *self.on_its_way.lock() = None;
                let counts = if is_end { counting.taken() } else { None };
                *batch = counts.map(|metrics| HistoryBatch::Counts { metrics, is_tried: false });
            }
        }
    }

    /// One transaction: the batch, and its number, which keeps it from being written twice.
    async fn write_batch(&self, writing: &Writing, about: About) -> Result<(), PostgresError> {
        let mut connection = self.postgres.connection().await?;
        let (transaction, is_new, pid) = writing.batches.begin(&mut connection, about).await?;
        let written = async {
            match writing.batch.as_ref().filter(|_| is_new) {
                Some(HistoryBatch::Rows { rows, .. }) if !rows.is_empty() => self.copy(&transaction, rows).await,
                Some(HistoryBatch::Counts { metrics, .. }) => metrics.write(&transaction, &self.settings.region).await,
                _ => Ok(()),
            }
        };
        self.postgres.naming_blockers(pid, written).await?;
        answered(transaction.commit()).await
    }

    async fn copy(&self, transaction: &Transaction<'_>, rows: &[DecisionRecord]) -> Result<(), PostgresError> {
        let HistorySettings { region, server, .. } = &self.settings;
        let [region, server] = [region, server].map(|text| Some(&**text).filter(|text| !text.is_empty()));
        let copy = format!("COPY tollgate.rate_limit_audit_logs ({}) FROM STDIN (FORMAT binary)", columns::names());
        let sink = answered(transaction.copy_in(&copy)).await?;
        let types = columns::COLUMNS.each_ref().map(|column| column.sql.wire());
        let mut writer = pin!(BinaryCopyInWriter::new(sink, &types));
        for (at, row) in rows.iter().enumerate() {
            let endpoint = row.endpoint.as_ref().map(super::record::Endpoint::text);
            let (used, capacity) = (row.used.map(column), row.capacity.map(column));
            let status = row.status.and_then(|status| i16::try_from(status).ok());
            let latency = i64::try_from(row.latency.as_micros()).unwrap_or(i64::MAX);
            answered(writer.as_mut().write(&[
                &row.at,
                &row.user.as_deref(),
                &row.api_key.as_deref(),
                &row.ip,
                &endpoint,
                &row.method.as_deref(),
                &row.rule.as_deref(),
                &row.outcome.name(),
                &row.reason,
                &row.limited_by.as_deref(),
                &used,
                &capacity,
                &status,
                &row.retry_after,
                &region,
                &server,
                &latency,
            ]))
            .await?;
            if at % AT_ONE_GO == 0 {
                yield_now().await;
            }
        }
        answered(writer.finish()).await.map(drop)
    }
}

impl HistoryBatch {
    /// How many decisions the batch records. Decisions in counts are recorded with their rows.
    fn decisions(&self) -> u64 {
        match self {
            Self::Rows { decisions, .. } => *decisions,
            Self::Counts { .. } => 0,
        }
    }

    /// How many decisions are missing, in rows or in counts, if the batch can't be written.
    fn lost(&self) -> u64 {
        match self {
            Self::Rows { rows, .. } => rows.len() as u64,
            Self::Counts { metrics, .. } => metrics.decisions,
        }
    }

    /// Whether the database has refused the batch once.
    fn is_tried(&mut self) -> &mut bool {
        match self {
            Self::Rows { is_tried, .. } | Self::Counts { is_tried, .. } => is_tried,
        }
    }
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
        drop(recorder);
        let pause = sleep(jittered(WRITTEN_EVERY, 10));
        if failed {
            pause.await;
        } else if !is_much {
            select(pin!(pause), pin!(much.notified())).await;
        }
    }
}

impl Recorder {
    pub(super) fn much(&self) -> Arc<Notify> {
        Arc::clone(&self.much)
    }
}

fn micros(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(1, |since| u64::try_from(since.as_micros()).unwrap_or(u64::MAX))
}

const TIMES: &str = "
    SELECT (date_trunc('month', now() AT TIME ZONE 'UTC') - interval '1 month') AT TIME ZONE 'UTC',
        now() + interval '1 day'";
