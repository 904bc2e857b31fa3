//! From the queue into the database: a batch a second, or as soon as there is much, and none twice.

use std::ops::Range;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use deadpool_postgres::Transaction;
use futures_util::future::select;
use tokio::sync::Notify;
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio::task::yield_now;
use tokio::time::sleep;
use tokio_postgres::binary_copy::BinaryCopyInWriter;
use tokio_postgres::types::Type;

use super::metrics::{Counting, Metrics};
use super::record::{Outcome, Record};
use super::{HistorySettings, HistoryStatus};
use crate::postgres::writers::{About, Batches, Written, answered, column};
use crate::postgres::{Postgres, PostgresError};
use crate::random::jittered;
use crate::telemetry;

/// How long decisions wait for others before they are written.
const WRITTEN_EVERY: Duration = Duration::from_secs(1);
/// The same of what they come to: fewer and larger changes of the same rows.
const COUNTED_EVERY: Duration = Duration::from_secs(10);
/// Decisions in a batch.
const MOST_ROWS: usize = 5_000;
/// After so many, others on this thread have their turn.
const AT_ONE_GO: usize = 128;
/// Partitions are looked after so often.
const PARTITIONS_EVERY: Duration = Duration::from_secs(3600);

pub(super) struct Recorder {
    postgres: Postgres,
    settings: HistorySettings,
    queue: Sender<Record>,
    recorded: AtomicU64,
    lost: AtomicU64,
    /// When the oldest in the queue came, in microseconds since the epoch; 0: there is none.
    oldest: AtomicU64,
    /// Wakes the writer where much is in the queue.
    much: Arc<Notify>,
    /// When the oldest decision came of the batch that is on its way.
    on_its_way: Mutex<Option<SystemTime>>,
    /// Held by whoever writes.
    writing: tokio::sync::Mutex<Writing>,
}

struct Writing {
    queue: Receiver<Record>,
    batches: Batches,
    /// The batch that is on its way: it may have been written, or not.
    batch: Option<Batch>,
    counting: Counting,
    counted: Instant,
    /// For which times there are partitions, and when that was looked at.
    times: Option<(Range<SystemTime>, Instant)>,
}

struct Batch {
    rows: Vec<Record>,
    requests: u64,
    metrics: Option<Metrics>,
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
            on_its_way: Mutex::default(),
            writing: tokio::sync::Mutex::new(Writing {
                queue: receiver,
                batches: Batches::new(Written::History),
                batch: None,
                counting: Counting::default(),
                counted: Instant::now(),
                times: None,
            }),
        }
    }

    pub(super) fn settings(&self) -> &HistorySettings {
        &self.settings
    }

    /// Into the queue, if there is room. The last quarter of it is for denials, which are what is asked for most.
    pub(super) fn record(&self, record: Record) {
        let room = self.queue.capacity();
        let at = micros(record.at);
        if (record.outcome == Outcome::Allowed && room <= self.settings.queue / 4)
            || self.queue.try_send(record).is_err()
        {
            if self.lost.fetch_add(1, Ordering::Relaxed) == 0 {
                telemetry::history_full();
            }
            return;
        }
        self.recorded.fetch_add(1, Ordering::Relaxed);
        if self.oldest.load(Ordering::Relaxed) == 0 {
            // Somebody else's is as good.
            let _ = self.oldest.compare_exchange(0, at, Ordering::Relaxed, Ordering::Relaxed);
        }
        if room <= self.settings.queue - self.settings.queue / 4 {
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

    /// How old the oldest decision is that isn't in the database yet.
    fn lag(&self) -> Duration {
        let on_its_way = *self.on_its_way.lock().unwrap_or_else(PoisonError::into_inner);
        let queued = Some(self.oldest.load(Ordering::Relaxed)).filter(|oldest| *oldest > 0);
        let queued = queued.map(|micros| UNIX_EPOCH + Duration::from_micros(micros));
        let oldest = on_its_way.into_iter().chain(queued).min();
        oldest.map_or(Duration::ZERO, |oldest| oldest.elapsed().unwrap_or_default())
    }

    /// Whether there is anything to write, or that this process has ended.
    pub(super) fn is_used(&self) -> bool {
        self.recorded.load(Ordering::Relaxed) > 0
            // Where somebody writes just now, that may fail.
            || self.writing.try_lock().map_or(true, |writing| writing.batches.is_known())
    }

    /// Writes all that was recorded before, and that nothing is missing.
    pub(super) async fn finish(&self) -> Result<(), PostgresError> {
        // What the queue holds, a batch that was on its way, and that this is the end.
        for _ in 0..=self.settings.queue / MOST_ROWS + 2 {
            self.write(true).await?;
            if self.queue.capacity() == self.settings.queue {
                break;
            }
        }
        Ok(())
    }

    /// Writes a batch, if there is anything; what can't be written is kept for the next time. At the end, the database knows
    /// that nothing is missing.
    async fn write(&self, is_end: bool) -> Result<(), PostgresError> {
        let mut writing = self.writing.lock().await;
        let writing = &mut *writing;
        let times = self.times(writing).await?;
        if writing.batch.is_none() {
            writing.batch = self.taken(writing, &times, is_end).await;
        }
        let requests = writing.batch.as_ref().map(|batch| batch.requests);
        let about = About { requests, lost: self.lost.load(Ordering::Relaxed), is_end };
        if !writing.batches.is_due(about) {
            return Ok(());
        }
        let written = self.write_batch(writing, about).await;
        match (&written, requests) {
            (Ok(()), _) => {}
            // What can't be stored now never can.
            (Err(error), Some(requests)) if error.is_data() => _ = self.lost.fetch_add(requests, Ordering::Relaxed),
            (Err(_), _) => return written,
        }
        *self.on_its_way.lock().unwrap_or_else(PoisonError::into_inner) = None;
        writing.batches.done(&self.postgres, about, written.is_err()).await;
        if let Some(Batch { mut rows, .. }) = writing.batch.take() {
            while !rows.is_empty() {
                rows.truncate(rows.len().saturating_sub(AT_ONE_GO));
                yield_now().await;
            }
        }
        written
    }

    /// Of which times there are partitions; they are made first where they are missing.
    async fn times(&self, writing: &mut Writing) -> Result<Range<SystemTime>, PostgresError> {
        if let Some((times, since)) = &writing.times
            && since.elapsed() < PARTITIONS_EVERY
        {
            return Ok(times.clone());
        }
        let connection = self.postgres.connection().await?;
        answered(connection.query_one("SELECT tollgate.make_partitions(2)", &[])).await?;
        let row = answered(connection.query_one(TIMES, &[])).await?;
        let times = row.get(0)..row.get(1);
        writing.times = Some((Range::clone(&times), Instant::now()));
        Ok(times)
    }

    /// What is in the queue, to be written.
    async fn taken(&self, writing: &mut Writing, times: &Range<SystemTime>, is_end: bool) -> Option<Batch> {
        let since = self.oldest.swap(0, Ordering::Relaxed);
        *self.on_its_way.lock().unwrap_or_else(PoisonError::into_inner) =
            (since > 0).then(|| UNIX_EPOCH + Duration::from_micros(since));
        let (mut rows, mut requests) = (Vec::new(), 0);
        while rows.len() < MOST_ROWS && requests < MOST_ROWS as u64 * 4 {
            let Ok(record) = writing.queue.try_recv() else { break };
            if times.contains(&record.at) {
                requests += 1;
                writing.counting.add(&record);
                rows.extend(Some(record).filter(|record| record.has_row));
            } else {
                // By a clock that is wrong by weeks: no partition is for it.
                self.lost.fetch_add(1, Ordering::Relaxed);
            }
            if requests % AT_ONE_GO as u64 == 0 {
                yield_now().await;
            }
        }
        if self.queue.capacity() < self.settings.queue {
            // What is left came later; when, isn't known exactly.
            let _ = self.oldest.compare_exchange(0, micros(SystemTime::now()), Ordering::Relaxed, Ordering::Relaxed);
        }
        let metrics = if is_end || writing.counted.elapsed() >= COUNTED_EVERY {
            writing.counted = Instant::now();
            writing.counting.taken()
        } else {
            None
        };
        (requests > 0 || metrics.is_some()).then_some(Batch { rows, requests, metrics })
    }

    /// One transaction: rows, counts, and the batch's number, by which it isn't written twice.
    async fn write_batch(&self, writing: &Writing, about: About) -> Result<(), PostgresError> {
        let mut connection = self.postgres.connection().await?;
        let (transaction, is_new) = writing.batches.begin(&mut connection, about).await?;
        if let Some(batch) = writing.batch.as_ref().filter(|_| is_new) {
            if !batch.rows.is_empty() {
                self.copy(&transaction, &batch.rows).await?;
            }
            if let Some(metrics) = &batch.metrics {
                metrics.write(&transaction, &self.settings.region).await?;
            }
        }
        answered(transaction.commit()).await
    }

    async fn copy(&self, transaction: &Transaction<'_>, rows: &[Record]) -> Result<(), PostgresError> {
        let HistorySettings { region, server, .. } = &self.settings;
        let [region, server] = [region, server].map(|text| Some(&**text).filter(|text| !text.is_empty()));
        let sink = answered(transaction.copy_in(COPY)).await?;
        let mut writer = pin!(BinaryCopyInWriter::new(sink, &COLUMNS));
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

/// Writes for as long as anybody records.
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

const COPY: &str = "
    COPY tollgate.rate_limit_audit_logs
        (at, user_id, api_key, ip, endpoint, method, rule, decision, reason, limited_by, used, capacity, status,
            retry_after_us, region, server, latency_us)
    FROM STDIN (FORMAT binary)";

const COLUMNS: [Type; 17] = [
    Type::TIMESTAMPTZ,
    Type::TEXT,
    Type::TEXT,
    Type::INET,
    Type::TEXT,
    Type::TEXT,
    Type::TEXT,
    Type::TEXT,
    Type::TEXT,
    Type::TEXT,
    Type::INT8,
    Type::INT8,
    Type::INT2,
    Type::INT8,
    Type::TEXT,
    Type::TEXT,
    Type::INT8,
];
