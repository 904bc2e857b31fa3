//! History: a row for each decision, and statistics by minute, hour and day, in the [system of
//! record](crate).
//!
//! Decisions go into a bounded queue, which is written to PostgreSQL about once a second; no decision waits for that.
//! While PostgreSQL is unreachable the queue fills up, and decisions that don't fit are counted as lost.
//!
//! ```no_run
//! use tollgate_record::history::HistorySettings;
//! use tollgate::middleware::RateLimitLayer;
//! use tollgate_record::Postgres;
//! use tollgate::{Limiter, Redis};
//!
//! # async fn serve() -> Result<(), Box<dyn std::error::Error>> {
//! let limiter = Limiter::new(Redis::open("redis://127.0.0.1/")?);
//! let postgres = Postgres::open("postgres://limits@127.0.0.1/app")?;
//! let configuration = postgres.follow(&limiter).await?;
//! let history = postgres.record(HistorySettings::new().region("eu-west-1").server("api-7"))?;
//!
//! let layer = RateLimitLayer::new(limiter, configuration.clone()).record(history.clone());
//! // Once the service has answered its last request:
//! history.finish().await?;
//! configuration.finish().await?;
//! # Ok(())
//! # }
//! ```

mod audit;
pub(crate) mod columns;
mod histogram;
mod metrics;
pub(crate) mod record;
mod stats;
mod writer;

pub use audit::{AuditQuery, AuditRecord};
pub use record::Outcome;
pub use stats::{Stats, StatsQuery, Width};

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tollgate::rules::{Attributes, DecisionSink, OnResponse, Verdict};

use crate::postgres::{Postgres, PostgresError, runtime_with_timers};
use record::DecisionRecord;
use writer::Recorder;

const MOST_BYTES_OF_A_NAME: usize = 256;
/// Decisions kept while they can't be written.
const QUEUE: usize = 65_536;
const QUEUES: std::ops::RangeInclusive<usize> = 1_000..=10_000_000;

/// Settings of the recording.
#[derive(Clone, Debug, PartialEq)]
pub struct HistorySettings {
    region: String,
    server: String,
    allowed_share: f64,
    queue: usize,
}

impl Default for HistorySettings {
    fn default() -> Self {
        Self { region: String::new(), server: String::new(), allowed_share: 1.0, queue: QUEUE }
    }
}

impl HistorySettings {
    /// A row for each decision, without region or server.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Where this service runs: at most 256 bytes.
    #[must_use]
    pub fn region(mut self, region: &str) -> Self {
        region.clone_into(&mut self.region);
        self
    }

    /// Which of the service's processes this is: at most 256 bytes.
    #[must_use]
    pub fn server(mut self, server: &str) -> Self {
        server.clone_into(&mut self.server);
        self
    }

    /// The fraction of allowed requests, sampled at random, that get a row: 0 to 1. Denials always get one, and
    /// statistics count every request. Default: 1.
    #[must_use]
    pub fn allowed_share(mut self, share: f64) -> Self {
        self.allowed_share = share;
        self
    }

    /// The most decisions kept until they are written: 1,000 to 10,000,000. Each takes about 300 bytes, and 2 KiB at
    /// most. The last quarter is reserved for denials. Default: 65,536.
    #[must_use]
    pub fn queue(mut self, decisions: usize) -> Self {
        self.queue = decisions;
        self
    }

    fn checked(&self) -> Result<(), String> {
        for (field, text) in [("region", &self.region), ("server", &self.server)] {
            if text.len() > MOST_BYTES_OF_A_NAME {
                return Err(format!("{field}: expected at most {MOST_BYTES_OF_A_NAME} bytes, got {}", text.len()));
            }
            if text.contains('\0') {
                return Err(format!("{field}: contains NUL, which PostgreSQL can't store"));
            }
        }
        if !(0.0..=1.0).contains(&self.allowed_share) {
            return Err(format!("allowed_share: expected 0 to 1, got {}", self.allowed_share));
        }
        if !QUEUES.contains(&self.queue) {
            let (least, most) = (QUEUES.start(), QUEUES.end());
            return Err(format!("queue: expected {least} to {most} decisions, got {}", self.queue));
        }
        Ok(())
    }
}

/// The state of the recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct HistoryStatus {
    /// Decisions put into the queue so far.
    pub recorded: u64,
    /// Decisions that will never reach the database, so far: the queue was full, PostgreSQL refused them, or this
    /// machine's clock is a day ahead of the database's or more than a month behind it.
    pub lost: u64,
    /// Decisions waiting in the queue.
    pub queued: usize,
    /// Age of the oldest decision whose row isn't in the database yet. Statistics may lag ten seconds more.
    pub lag: Duration,
}

/// Records decisions. Cheap to clone. After the last clone is dropped, the remaining decisions are still written if the
/// runtime keeps running and PostgreSQL is reachable within 15 seconds. [`finish`](Self::finish) waits for that and
/// returns the result.
#[derive(Clone)]
pub struct History {
    shared: Arc<Shared>,
}

struct Shared {
    recorder: Arc<Recorder>,
    runtime: Handle,
}

impl Postgres {
    /// Records decisions from now on, in a task of this runtime. Needs the right to insert into and update the tables
    /// of history and of writers; partitions are created with the rights of the tables' owner. Makes no round trip: if
    /// PostgreSQL can't be reached, the task retries every second.
    ///
    /// # Errors
    ///
    /// Settings out of bounds; a call outside a tokio runtime.
    pub fn record(&self, settings: HistorySettings) -> Result<History, PostgresError> {
        settings.checked().map_err(PostgresError::input)?;
        let runtime = runtime_with_timers()?;
        let recorder = Arc::new(Recorder::new(self.clone(), settings));
        tokio::spawn(writer::write(Arc::downgrade(&recorder), recorder.much()));
        Ok(History { shared: Arc::new(Shared { recorder, runtime }) })
    }
}

impl History {
    /// Records the decision on a request, and how long it took. Makes no round trip and never waits.
    /// [`RateLimitLayer`](tollgate::middleware::RateLimitLayer) calls this itself, and adds the response's status.
    ///
    /// An API key is recorded by its id, and only if the request has an [`Account`](tollgate::rules::Account). Bytes
    /// that aren't UTF-8, and NUL, are recorded as `\xff`; each text is cut off after 512 bytes.
    pub fn record(&self, request: &Attributes<'_>, verdict: &Verdict, latency: Duration) {
        self.shared.recorder.record(self.new_record(request, verdict, latency));
    }

    fn new_record(&self, request: &Attributes<'_>, verdict: &Verdict, latency: Duration) -> DecisionRecord {
        let share = self.shared.recorder.settings().allowed_share;
        let has_row = !verdict.allowed || share >= 1.0 || fastrand::f64() < share;
        DecisionRecord::new(request, verdict, latency, has_row)
    }

    /// The state of the recording.
    #[must_use]
    pub fn status(&self) -> HistoryStatus {
        self.shared.recorder.status()
    }

    /// Writes what isn't in the database yet. Call it after the service has sent its last response.
    ///
    /// # Errors
    ///
    /// Why it couldn't be written, such as a server that didn't answer within about 15 seconds. The decisions are kept,
    /// so the call may be repeated, also after its future was dropped.
    pub async fn finish(&self) -> Result<(), PostgresError> {
        self.shared.recorder.finish().await
    }
}

/// Records each decision once its response is known, or the client has left.
impl DecisionSink for History {
    fn decided(&self, request: &Attributes<'_>, verdict: &Verdict, latency: Duration) -> Option<Box<dyn OnResponse>> {
        Some(Box::new(PendingRecord {
            history: self.clone(),
            record: Some(self.new_record(request, verdict, latency)),
        }))
    }
}

/// A decision whose response isn't known yet. Recorded when dropped.
struct PendingRecord {
    history: History,
    record: Option<DecisionRecord>,
}

impl OnResponse for PendingRecord {
    fn responded(mut self: Box<Self>, status: u16) {
        if let Some(record) = &mut self.record {
            record.status = Some(status);
        }
    }
}

impl Drop for PendingRecord {
    fn drop(&mut self) {
        self.record.take().into_iter().for_each(|record| self.history.shared.recorder.record(record));
    }
}

impl fmt::Debug for History {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (settings, status) = (self.shared.recorder.settings(), self.status());
        f.debug_struct("History").field("settings", settings).field("status", &status).finish_non_exhaustive()
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if self.recorder.is_used() {
            let recorder = Arc::clone(&self.recorder);
            self.runtime.spawn(recorder.finish_in_time());
        }
    }
}
