//! What waits to be written to the database, and is written once: in numbered batches, one in flight at a time. A batch
//! that can't be written is kept; one that the database refuses for what is in it is given up, and counted as lost.

pub(crate) mod numbering;
pub(crate) mod set_aside;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::{Mutex, MutexGuard};
use tokio::time::{sleep, timeout};

use crate::lock::Lock;
use crate::postgres::client::Transaction;
use crate::postgres::{Postgres, PostgresError};
use numbering::{Numbering, WriterReport, Written, answered};
use set_aside::SetAside;

/// How long requests wait for others before they are written.
pub(crate) const WRITTEN_EVERY: Duration = Duration::from_secs(1);
/// How long to wait for another task that is writing and may have stalled.
const LOCKED_WITHIN: Duration = Duration::from_secs(15);
/// How long the rest is retried once the last handle is dropped.
const FINISHED_WITHIN: Duration = Duration::from_secs(15);

/// Requests to be written together.
pub(crate) trait Batch {
    /// How many requests it reports.
    fn requests(&self) -> u64;

    /// Adds it to the database, within the transaction that also stores its number. Returns the rows that were set
    /// aside.
    async fn write(&self, transaction: &Transaction<'_>) -> Result<SetAside, PostgresError>;

    /// Notes that the database refused its data. Returns how many requests are lost if it is given up, or `None` if it
    /// should be tried once more, with the rows that are refused set aside.
    fn refused(&mut self) -> Option<u64>;
}

/// The batches of one service. Whoever writes holds a lock on it.
pub(crate) struct Spool<B> {
    numbering: Numbering,
    /// The batch being filled or in flight; whether one in flight was written isn't known.
    pub(crate) batch: Option<B>,
    /// The rows of it that were last set aside.
    set_aside: SetAside,
}

/// What can be read without the spool's lock.
#[derive(Default)]
pub(crate) struct Backlog {
    lost: AtomicU64,
    /// When the oldest request of the batch in flight arrived.
    in_flight_since: Lock<Option<Instant>>,
}

impl Backlog {
    /// Requests that will never reach the database, so far.
    pub(crate) fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    /// Counts requests that are lost. Returns whether they are the first.
    pub(crate) fn lose(&self, requests: u64) -> bool {
        self.lost.fetch_add(requests, Ordering::Relaxed) == 0
    }

    pub(crate) fn begin_flight(&self, since: Option<Instant>) {
        *self.in_flight_since.lock() = since;
    }

    /// Age of the oldest request that isn't in the database yet, in flight or waiting.
    pub(crate) fn lag(&self, waiting: impl IntoIterator<Item = Instant>) -> Duration {
        let in_flight = *self.in_flight_since.lock();
        waiting.into_iter().chain(in_flight).min().map_or(Duration::ZERO, |since| since.elapsed())
    }
}

impl<B: Batch> Spool<B> {
    pub(crate) fn new(writes: Written) -> Self {
        Self { numbering: Numbering::new(writes), batch: None, set_aside: SetAside::default() }
    }

    /// Whether the database knows of this service.
    pub(crate) fn is_known(&self) -> bool {
        self.numbering.is_known()
    }

    /// Writes the batch, or only shows that this service runs, if that is due. Returns the batch once it is written or
    /// given up, and an error if it wasn't written, or not all of it; neither if there was nothing to write. At the
    /// end, the database knows that nothing is missing. Call [`note_killed`](Self::note_killed) afterwards.
    ///
    /// Cancel-safe: the batch is removed as soon as it is known to be written.
    pub(crate) async fn write(
        &mut self,
        postgres: &Postgres,
        backlog: &Backlog,
        is_end: bool,
    ) -> (Option<B>, Result<(), PostgresError>) {
        let report = WriterReport { requests: self.batch.as_ref().map(B::requests), lost: backlog.lost(), is_end };
        if !self.numbering.is_due(report) {
            return (None, Ok(()));
        }
        let written = self.write_batch(postgres, report).await;
        if let Err(error) = &written {
            // Data that can't be stored now never can.
            let refused = self.batch.as_mut().filter(|_| error.is_data()).and_then(B::refused);
            let Some(lost) = refused else { return (None, written) };
            backlog.lose(lost);
        }
        // No await from here on: the caller has the batch as soon as it is known to be written or given up.
        let batch = self.batch.take();
        backlog.begin_flight(None);
        let set_aside = std::mem::take(&mut self.set_aside);
        if written.is_err() {
            self.numbering.done(report, true);
            return (batch, written);
        }
        backlog.lose(set_aside.requests);
        self.numbering.done(WriterReport { lost: report.lost.saturating_add(set_aside.requests), ..report }, false);
        (batch, set_aside.into_result())
    }

    /// Marks other services that were killed, if it is time to look for them.
    pub(crate) async fn note_killed(&mut self, postgres: &Postgres) {
        self.numbering.note_killed(postgres).await;
    }

    /// One transaction: the batch, and its number, which keeps it from being added twice.
    async fn write_batch(&mut self, postgres: &Postgres, report: WriterReport) -> Result<(), PostgresError> {
        let mut connection = postgres.connection().await?;
        let transaction = numbering::begin(&mut connection).await?;
        let pid = answered(transaction.query_one("SELECT pg_backend_pid()", &[])).await?.get(0);
        let Self { numbering, batch, set_aside } = self;
        let added = async {
            let is_new = numbering.is_new(&transaction, report).await?;
            if let Some(batch) = batch.as_ref().filter(|_| is_new) {
                *set_aside = batch.write(&transaction).await?;
            }
            numbering.advance(&transaction, report, (is_new, set_aside.requests)).await
        };
        postgres.naming_blockers(pid, added).await?;
        answered(transaction.commit()).await
    }
}

/// Locks what another task may hold while it writes.
pub(crate) async fn locked<'l, T>(lock: &'l Mutex<T>, postgres: &Postgres) -> Result<MutexGuard<'l, T>, PostgresError> {
    timeout(LOCKED_WITHIN, lock.lock()).await.map_err(|_| PostgresError::late(postgres.address()))
}

/// Writes the rest, again after each failure, until it is written or has been tried for long enough.
pub(crate) async fn finish_in_time<F: Future<Output = Result<(), PostgresError>>>(
    finish: impl Fn() -> F,
) -> Result<(), PostgresError> {
    let began = Instant::now();
    loop {
        let finished = finish().await;
        if finished.is_ok() || began.elapsed() >= FINISHED_WITHIN {
            return finished;
        }
        sleep(WRITTEN_EVERY).await;
    }
}
