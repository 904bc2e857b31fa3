//! Moves months from PostgreSQL to an archive: export, read back, detach, compare once more, drop.
//!
//! A run keeps no state of its own. It looks up where a month is: whether there is a manifest, and whether the table is
//! attached, pending or detached. So no recorded state can be wrong after a crash.

use std::collections::BTreeSet;
use std::pin::pin;
use std::sync::MutexGuard;
use std::time::Duration;

use futures_util::future::{Either, select};

use super::checksum::Content;
use super::export::{content, export};
use super::manifest::{ArchivedMonth, Manifest, part_of};
use super::month::Month;
use super::partitions::{
    Archivable, Attachment, Partition, attachment, check_columns, check_dependents, count, detach, lock, partitions,
    prepare, source,
};
use super::store::LEFT_FOR;
use super::{Archive, ArchiveError};
use crate::lock::Lock;
use crate::postgres::client::Client;
use crate::postgres::{Postgres, PostgresError};

/// How long the server may be silent in a statement that doesn't read a whole table: longer than it waits for locks.
const ANSWERED_WITHIN: Duration = Duration::from_secs(45);
/// The least age: services may still write to last month.
const LEAST_AGE: Duration = Duration::from_secs(31 * 86_400);

/// What to archive, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ArchiveOptions {
    /// How long ago a month must have ended, at least 31 days. Default: 90 days.
    pub older_than: Duration,
    /// Months to archive again from their tables, deleting any existing archive: rows that only the archive has are
    /// lost. Default: none.
    pub replace: BTreeSet<Month>,
    /// Most rows in a file; a file is held in memory while it is written. Default: 1,000,000.
    pub part_rows: u64,
}

impl Default for ArchiveOptions {
    fn default() -> Self {
        Self { older_than: Duration::from_secs(90 * 86_400), replace: BTreeSet::new(), part_rows: 1_000_000 }
    }
}

/// What an archiver is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Step {
    /// Rows are read from the table and written to files.
    Export,
    /// Files are read back and compared.
    ReadBack,
    /// The table is compared with an existing archive.
    Compare,
    /// The table is detached.
    Detach,
    /// The table is compared once more, and dropped.
    Drop,
}

/// The progress of an archiver.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ArchiveProgress {
    /// The current month.
    pub month: Month,
    /// The current step.
    pub step: Step,
    /// Rows processed in this step so far.
    pub rows: u64,
    /// Rows of the month.
    pub of: u64,
}

/// The outcome for a month.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Archived {
    /// The month.
    pub month: Month,
    /// Its archive, if it was moved and its table dropped; otherwise why it wasn't.
    pub result: Result<ArchivedMonth, ArchiveError>,
    /// Rows with a text above 64 KiB, which is cut off in the archive: the user and the time of the first ten. Services
    /// write none, and the table refuses them.
    pub cut: Vec<String>,
}

type Report<'a> = dyn FnMut(&ArchiveProgress) + Send + 'a;

impl Postgres {
    /// Months that ended at least this long ago (31 days or more) and are still in the database, with their rows
    /// counted. Changes nothing.
    ///
    /// # Errors
    ///
    /// No connection; no tables; an age that is too short.
    pub async fn archivable(&self, older_than: Duration) -> Result<Vec<Archivable>, ArchiveError> {
        check(older_than)?;
        let connection = self.connection().await?;
        let mut months = Vec::new();
        for Partition { month, table, attachment, bytes } in partitions(&connection, older_than).await? {
            let rows = count(&connection, &table).await?;
            months.push(Archivable { month, table, attachment, rows, bytes });
        }
        Ok(months)
    }

    /// Moves months of the audit log that are old enough to an archive, and reports progress. A month that can't be
    /// moved is left as it is, and the run continues with the others, unless the database or the store can't be
    /// reached.
    ///
    /// Each month is read from one snapshot and written to Parquet. The files are read back, and the count and checksum
    /// of their rows compared. Then the table is detached, compared once more, so that rows which arrived meanwhile
    /// aren't lost, and dropped. If this future is dropped midway, the next call continues from the state it left.
    /// Needs the right to alter and drop the tables, which their owner has.
    ///
    /// Reads each table twice and counts its rows, and holds one file of [`part_rows`](ArchiveOptions::part_rows) rows
    /// in memory: 80 MB for a million.
    ///
    /// # Errors
    ///
    /// No connection; no tables; invalid options; another archiver running. An error about a single month is in its
    /// [`result`](Archived::result).
    pub async fn archive(
        &self,
        archive: &Archive,
        options: &ArchiveOptions,
        mut progress: impl FnMut(&ArchiveProgress) + Send,
    ) -> Result<Vec<Archived>, ArchiveError> {
        check(options.older_than)?;
        if options.part_rows == 0 {
            return Err(ArchiveError::input("part_rows: expected at least 1, got 0"));
        }
        // Checks the server's version; the connection goes back to the pool.
        drop(self.connection().await?);
        // Connections of its own: they end with this future, and so does the lock, whatever the server is doing.
        let (client, connection) = self.connect_alone().await?;
        let client = client.within(ANSWERED_WITHIN).of_many_steps();
        let (holder, holding) = self.connect_alone().await?;
        let holder = holder.within(ANSWERED_WITHIN);
        let run = Run { postgres: self, client: &client, holder: &holder, archive, options, moved: Lock::default() };
        let work = pin!(run.all(&mut progress));
        match select(select(connection, holding), work).await {
            // The lock has ended with its connection, or nothing can be done without the other.
            Either::Left(_) => run.lost(),
            Either::Right((done, _)) => done.map(|()| run.months()),
        }
    }
}

fn check(older_than: Duration) -> Result<(), ArchiveError> {
    if older_than >= LEAST_AGE {
        return Ok(());
    }
    let got = (older_than.as_secs_f64() / 864.0).round() / 100.0;
    Err(ArchiveError::input(format!("older_than: expected at least 31 days, got {got}")))
}

/// A run over all months.
struct Run<'a> {
    postgres: &'a Postgres,
    client: &'a Client,
    /// Holds the lock.
    holder: &'a Client,
    archive: &'a Archive,
    options: &'a ArchiveOptions,
    moved: Lock<Moved>,
}

#[derive(Default)]
struct Moved {
    months: Vec<Archived>,
    /// The current month.
    at: Option<Month>,
}

impl Run<'_> {
    async fn all(&self, report: &mut Report<'_>) -> Result<(), ArchiveError> {
        let Self { postgres, client, holder, archive, options, .. } = self;
        lock(postgres, holder).await?;
        let pid = prepare(client).await?;
        let mut found = partitions(client, options.older_than).await?;
        let known: BTreeSet<Month> = found.iter().map(|partition| partition.month).collect();
        for &month in options.replace.difference(&known) {
            let why = "nothing to archive: this month has no table, or it isn't old enough";
            self.done(month, Err(ArchiveError::refused(why)));
        }
        // PostgreSQL detaches no other table while one is pending.
        found.sort_by_key(|partition| (partition.attachment != Attachment::Pending, partition.month));
        for Partition { month, table, attachment, .. } in found {
            self.locked().at = Some(month);
            // Comes first, whatever else may be wrong with the month.
            if attachment == Attachment::Pending
                && let Err(error) = detach(postgres, (client, pid), &table).await
            {
                self.done(month, Err(error));
                return Ok(());
            }
            let cut = Lock::default();
            let moving = Moving { postgres, client, pid, holder, archive, options, month, table: &table, cut: &cut };
            let result = moving.run(report).await;
            let is_over = result.as_ref().is_err_and(ArchiveError::is_unreachable);
            self.done(month, result);
            self.locked().months.last_mut().into_iter().for_each(|month| month.cut = std::mem::take(&mut *cut.lock()));
            if is_over {
                return Ok(());
            }
        }
        // A failure to delete leftovers stops nothing: the next run tries again.
        for month in archive.list().await.unwrap_or_default().complete {
            let _ = archive.remove_leftovers(month, LEFT_FOR).await;
        }
        Ok(())
    }

    fn done(&self, month: Month, result: Result<ArchivedMonth, ArchiveError>) {
        let mut moved = self.locked();
        moved.at = None;
        moved.months.push(Archived { month, result: result.map_err(|error| error.of(month)), cut: Vec::new() });
    }

    /// The outcome for each month, oldest first.
    fn months(&self) -> Vec<Archived> {
        let mut months = std::mem::take(&mut self.locked().months);
        months.sort_by_key(|archived| archived.month);
        months
    }

    /// The outcomes up to the loss of the connection, including the month that failed with it.
    fn lost(&self) -> Result<Vec<Archived>, ArchiveError> {
        let at = self.locked().at;
        let Some(month) = at else { return Err(PostgresError::lost().into()) };
        self.done(month, Err(PostgresError::lost().into()));
        Ok(self.months())
    }

    fn locked(&self) -> MutexGuard<'_, Moved> {
        self.moved.lock()
    }
}

/// The month being moved.
struct Moving<'a> {
    postgres: &'a Postgres,
    client: &'a Client,
    pid: i32,
    holder: &'a Client,
    archive: &'a Archive,
    options: &'a ArchiveOptions,
    month: Month,
    table: &'a str,
    /// Rows that are cut off.
    cut: &'a Lock<Vec<String>>,
}

impl Moving<'_> {
    async fn run(&self, report: &mut Report<'_>) -> Result<ArchivedMonth, ArchiveError> {
        check_columns(self.client, self.table).await?;
        check_dependents(self.client, self.table).await?;
        self.archive.sweep(self.month).await?;
        let known = self.archive.manifest(self.month).await;
        let is_known = matches!(known, Ok(Some(_)));
        let is_replaced = self.options.replace.contains(&self.month);
        let (mut manifest, replaced) = if is_replaced {
            // It may be replaced because it can't be read.
            let replaced = known.ok().flatten().map(|(manifest, _)| manifest);
            (self.make(true, report).await?, replaced)
        } else if let Some((manifest, _)) = known? {
            self.check_known(&manifest, report).await?;
            (manifest, None)
        } else {
            (self.make(false, report).await?, None)
        };
        let is_made = is_replaced || !is_known;
        self.step(Step::Detach, &manifest, report);
        detach(self.postgres, (self.client, self.pid), self.table).await?;
        self.step(Step::Drop, &manifest, report);
        match self.drop_table(&manifest, report).await {
            // A row came after the export. No more can come, since the table is detached.
            Err(error) if error.is_mismatch() && is_made => {
                manifest = self.make(true, report).await?;
                self.step(Step::Drop, &manifest, report);
                self.drop_table(&manifest, report).await?;
            }
            done => done?,
        }
        // If deleting fails now, the next run tries again, and `Archive::leftovers` lists the files.
        let _ = self.archive.remove_leftovers(self.month, Duration::ZERO).await;
        if let Some(replaced) = replaced {
            let is_replaced = |name: &str| {
                let names = |manifest: &Manifest| manifest.parts.iter().any(|part| part.name == name);
                names(&replaced) && !names(&manifest)
            };
            let _ = self.archive.remove(self.month, Duration::ZERO, is_replaced).await;
        }
        Ok(manifest.describe(self.month))
    }

    /// Checks that an existing archive is intact and has this table's rows.
    async fn check_known(&self, manifest: &Manifest, report: &mut Report<'_>) -> Result<(), ArchiveError> {
        let of = manifest.rows();
        let compared =
            self.archive.compare(self.month, &manifest.parts, &mut self.reporter(Step::ReadBack, of, report)).await;
        compared.map_err(|error| error.with_remedy("--replace MONTH makes the archive again from the table"))?;
        let (found, _) = content(self.client, self.table, &mut self.reporter(Step::Compare, of, report)).await?;
        same(found, manifest)
    }

    /// Makes the archive, writing its manifest last; `instead` replaces an existing one. Each attempt names its own
    /// files, so an earlier or interrupted attempt that is still writing does no harm.
    async fn make(&self, instead: bool, report: &mut Report<'_>) -> Result<Manifest, ArchiveError> {
        let source = source(self.client, self.table).await?;
        if !instead {
            // Leftovers of killed attempts fill the disk. All their rows are still in the table.
            let is_left = |name: &str| part_of(name).is_some_and(|(_, attempt)| attempt.starts_with(&source));
            self.archive.remove(self.month, LEFT_FOR, is_left).await?;
        }
        let attempt = format!("{source}{:08x}", fastrand::u32(..));
        let written = self.write(&attempt, report).await;
        // If the store can't be reached, it can't delete either.
        if written.as_ref().is_err_and(|error| !error.is_unreachable() || self.archive.is_directory()) {
            let is_ours = |name: &str| part_of(name).is_some_and(|(_, id)| id == attempt);
            // Report the original error instead.
            let _ = self.archive.remove(self.month, Duration::ZERO, is_ours).await;
        }
        let manifest = written?;
        // If its connection has ended, so has the lock, and another archiver may be running.
        self.holder.batch_execute("SELECT 1").await?;
        self.archive.put_manifest(self.month, &manifest, instead).await?;
        Ok(manifest)
    }

    /// Writes the files of an attempt, and reads them back.
    async fn write(&self, attempt: &str, report: &mut Report<'_>) -> Result<Manifest, ArchiveError> {
        let (manifest, of) = within(self.client, READING, async {
            let of = count(self.client, self.table).await?;
            let mut writing = self.reporter(Step::Export, of, report);
            let month = (self.month, self.table, attempt);
            let written = export(self.client, self.archive, month, self.options.part_rows, &mut writing).await;
            written.map(|manifest| (manifest, of))
        })
        .await?;
        if manifest.rows() != of {
            let got = manifest.rows();
            return Err(ArchiveError::refused(format!("the table has {of} rows, but {got} were exported")));
        }
        let mut reading = self.reporter(Step::ReadBack, of, report);
        self.archive.compare(self.month, &manifest.parts, &mut reading).await?;
        Ok(manifest)
    }

    /// Drops the table, if it still holds the same rows as the archive and the archive is there. Nobody else can write
    /// to the table meanwhile.
    async fn drop_table(&self, manifest: &Manifest, report: &mut Report<'_>) -> Result<(), ArchiveError> {
        let mut comparing = self.reporter(Step::Drop, manifest.rows(), report);
        within(self.client, "BEGIN", async {
            let lock = format!("LOCK TABLE tollgate.{} IN ACCESS EXCLUSIVE MODE", self.table);
            self.postgres.naming_blockers(self.pid, self.client.batch_execute(&lock)).await?;
            if attachment(self.client, self.table).await? != Attachment::Detached {
                let why = "the table isn't dropped, because somebody has attached it to the audit log again";
                return Err(ArchiveError::refused(why));
            }
            let (found, cut) = content(self.client, self.table, &mut comparing).await?;
            *self.cut.lock() = cut;
            same(found, manifest)?;
            self.archive.sync(self.month).await?;
            self.archive.confirm(self.month, manifest).await?;
            // Once more: the lock may have taken a while to get, and from now on only the archive has these rows.
            self.archive.compare(self.month, &manifest.parts, &mut |_| ()).await?;
            self.client.batch_execute(&format!("DROP TABLE tollgate.{}", self.table)).await?;
            Ok(())
        })
        .await
    }

    fn step(&self, step: Step, manifest: &Manifest, report: &mut Report<'_>) {
        report(&ArchiveProgress { month: self.month, step, rows: 0, of: manifest.rows() });
    }

    fn reporter<'a>(&self, step: Step, of: u64, report: &'a mut Report<'_>) -> impl FnMut(u64) + Send + 'a {
        let month = self.month;
        move |rows| report(&ArchiveProgress { month, step, rows, of })
    }
}

/// Begins a transaction that changes nothing.
const READING: &str = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY";

/// Runs `work` in a transaction, and ends that.
async fn within<T>(
    client: &Client,
    begin: &str,
    work: impl Future<Output = Result<T, ArchiveError>>,
) -> Result<T, ArchiveError> {
    client.batch_execute(begin).await?;
    let done = work.await;
    match &done {
        Ok(_) if begin == READING => client.batch_execute("COMMIT").await?,
        // Also removes the files of a dropped table, which may take long.
        Ok(_) => client.alter("COMMIT").await?,
        // The server wouldn't answer.
        Err(error) if error.is_unreachable() => {}
        // Report the original error instead.
        Err(_) => drop(client.batch_execute("ROLLBACK").await),
    }
    done
}

/// Whether a table and its archive hold exactly the same rows.
fn same(table: Content, manifest: &Manifest) -> Result<(), ArchiveError> {
    if manifest.content() == Some(table) {
        return Ok(());
    }
    let (rows, archived) = (table.rows, manifest.rows());
    let others = if rows == archived { " different ones" } else { "" };
    Err(ArchiveError::mismatch(format!("the table has {rows} rows, but the archive has {archived}{others}")))
}
