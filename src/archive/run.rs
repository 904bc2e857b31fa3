//! Months moved from PostgreSQL to an archive: exported, read back, detached, compared once more, dropped.
//!
//! Where a run is, it finds out: whether there is a manifest, and whether the table is attached, pending or detached.
//! So there is no state that could be wrong after a crash.

use std::collections::BTreeSet;
use std::pin::pin;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::{Either, select};
use tokio_postgres::Client;

use super::checksum::Content;
use super::export::{content, export};
use super::manifest::{ArchivedMonth, Manifest, part_of};
use super::month::Month;
use super::partitions::{
    Archivable, Attachment, Partition, attachment, check_columns, check_dependents, count, detach, lock, partitions,
    source,
};
use super::store::LEFT_FOR;
use super::{Archive, ArchiveError};
use crate::postgres::{Postgres, PostgresError};
use crate::random::random;

/// The least age: services may still write to last month.
const LEAST_AGE: Duration = Duration::from_secs(31 * 86_400);

/// What is archived, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ArchiveOptions {
    /// How long ago a month must have ended, at least 31 days. Default: 90 days.
    pub older_than: Duration,
    /// Months whose archive, where there is one, is deleted and made anew from their tables: rows that it alone has are lost.
    /// Default: none.
    pub replace: BTreeSet<Month>,
    /// Rows of a file, at most; files are held in memory while they are made. Default: 1,000,000.
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
    /// The table is compared with an archive that was there before.
    Compare,
    /// The table is detached.
    Detach,
    /// The table is compared once more, and dropped.
    Drop,
}

/// How far an archiver is.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Progress {
    /// The month at hand.
    pub month: Month,
    /// What is being done.
    pub step: Step,
    /// Rows of this step so far.
    pub rows: u64,
    /// Rows of the month.
    pub of: u64,
}

/// What has become of a month.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Archived {
    /// Which month.
    pub month: Month,
    /// Its archive, whose table is dropped; or why it was left.
    pub result: Result<ArchivedMonth, ArchiveError>,
}

type Report<'a> = dyn FnMut(&Progress) + Send + 'a;

impl Postgres {
    /// Months that ended so long ago, at least 31 days, and are still in the database, with their rows counted.
    /// Changes nothing.
    ///
    /// # Errors
    ///
    /// No connection; no tables; a time that is too short.
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

    /// Moves months of the audit log that are old enough to an archive, and reports how far it is. A month that can't
    /// be moved is left as it is, and the others are moved all the same; unless the database or the store can't be
    /// reached.
    ///
    /// Each month is read from one snapshot and written to Parquet; the files are read back, and count and checksum
    /// of their rows compared; then the table is detached, compared once more, so that no row is lost that came
    /// meanwhile, and dropped. Dropped in the middle, this future leaves a state from which the next call goes on.
    /// Needs the right to alter and to drop the tables, which their owner has.
    ///
    /// Costs two reads of each table and a count of its rows, and memory for one file of
    /// [`part_rows`](ArchiveOptions::part_rows) rows: 80 MB for a million.
    ///
    /// # Errors
    ///
    /// No connection; no tables; options that can't be used; another archiver at work. Of a single month in its
    /// [`result`](Archived::result).
    pub async fn archive(
        &self,
        archive: &Archive,
        options: &ArchiveOptions,
        mut progress: impl FnMut(&Progress) + Send,
    ) -> Result<Vec<Archived>, ArchiveError> {
        check(options.older_than)?;
        if options.part_rows == 0 {
            return Err(ArchiveError::input("part_rows: expected at least 1, got 0"));
        }
        // Looks at the version, and is given back.
        drop(self.connection().await?);
        // A connection of its own: it ends with this future, and the lock with it, whatever the server is doing.
        let (client, connection) = self.connect_alone().await?;
        let run = Run { client: &client, archive, options, moved: Mutex::default() };
        let work = pin!(run.all(&mut progress));
        match select(connection, work).await {
            // The lock has ended with it.
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

/// All months on their way.
struct Run<'a> {
    client: &'a Client,
    archive: &'a Archive,
    options: &'a ArchiveOptions,
    moved: Mutex<Moved>,
}

#[derive(Default)]
struct Moved {
    months: Vec<Archived>,
    /// The one at hand.
    at: Option<Month>,
}

impl Run<'_> {
    async fn all(&self, report: &mut Report<'_>) -> Result<(), ArchiveError> {
        let Self { client, archive, options, .. } = self;
        lock(client).await?;
        let mut found = partitions(client, options.older_than).await?;
        let known: BTreeSet<Month> = found.iter().map(|partition| partition.month).collect();
        for &month in options.replace.difference(&known) {
            self.done(
                month,
                Err(ArchiveError::refused("expected a table that is old enough to make it anew, got none")),
            );
        }
        // PostgreSQL detaches no other table while one is pending.
        found.sort_by_key(|partition| (partition.attachment != Attachment::Pending, partition.month));
        for Partition { month, table, attachment, .. } in found {
            self.locked().at = Some(month);
            // First of all, whatever else may be wrong with it.
            if attachment == Attachment::Pending
                && let Err(error) = detach(client, &table).await
            {
                self.done(month, Err(error));
                return Ok(());
            }
            let result = Moving { client, archive, options, month, table: &table }.run(report).await;
            let is_over = result.as_ref().is_err_and(ArchiveError::is_unreachable);
            self.done(month, result);
            if is_over {
                return Ok(());
            }
        }
        // Whatever keeps them from being deleted keeps nothing else: the next run tries again.
        for month in archive.months().await.unwrap_or_default() {
            let _ = archive.remove_leftovers(month, LEFT_FOR).await;
        }
        Ok(())
    }

    fn done(&self, month: Month, result: Result<ArchivedMonth, ArchiveError>) {
        let mut moved = self.locked();
        moved.at = None;
        moved.months.push(Archived { month, result: result.map_err(|error| error.of(month)) });
    }

    /// What has become of each, oldest first.
    fn months(&self) -> Vec<Archived> {
        let mut months = std::mem::take(&mut self.locked().months);
        months.sort_by_key(|archived| archived.month);
        months
    }

    /// What was moved before the connection was lost, and which month wasn't.
    fn lost(&self) -> Result<Vec<Archived>, ArchiveError> {
        let at = self.locked().at;
        let Some(month) = at else { return Err(PostgresError::lost().into()) };
        self.done(month, Err(PostgresError::lost().into()));
        Ok(self.months())
    }

    fn locked(&self) -> MutexGuard<'_, Moved> {
        self.moved.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One month on its way.
struct Moving<'a> {
    client: &'a Client,
    archive: &'a Archive,
    options: &'a ArchiveOptions,
    month: Month,
    table: &'a str,
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
        detach(self.client, self.table).await?;
        self.step(Step::Drop, &manifest, report);
        match self.drop_table(&manifest, report).await {
            // A row came after the export. None can any more, since the table is detached.
            Err(error) if error.is_mismatch() && is_made => {
                manifest = self.make(true, report).await?;
                self.step(Step::Drop, &manifest, report);
                self.drop_table(&manifest, report).await?;
            }
            done => done?,
        }
        // Whatever keeps them from being deleted now, the next run tries again, or a look at the archive tells of them.
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

    /// An archive from before: whether it is whole, and of this table.
    async fn check_known(&self, manifest: &Manifest, report: &mut Report<'_>) -> Result<(), ArchiveError> {
        let of = manifest.rows();
        let compared =
            self.archive.compare(self.month, &manifest.parts, &mut self.reporter(Step::ReadBack, of, report)).await;
        compared.map_err(|error| error.with_remedy("--replace MONTH makes the archive anew from the table"))?;
        let found = content(self.client, self.table, &mut self.reporter(Step::Compare, of, report)).await?;
        same(found, manifest)
    }

    /// Makes the archive, and its manifest last, instead of one that is there, or not. Each attempt has files of its own, by
    /// their names: what an earlier one, or one that was cut off, still writes does no harm.
    async fn make(&self, instead: bool, report: &mut Report<'_>) -> Result<Manifest, ArchiveError> {
        let source = source(self.client, self.table).await?;
        if !instead {
            // Of attempts that were killed, and fill the disk. All their rows are in the table still.
            let is_left = |name: &str| part_of(name).is_some_and(|(_, attempt)| attempt.starts_with(&source));
            self.archive.remove(self.month, LEFT_FOR, is_left).await?;
        }
        let attempt = format!("{source}{:08x}", random() >> 32);
        let written = self.write(&attempt, report).await;
        // A store that isn't reached wouldn't be for this either.
        if written.as_ref().is_err_and(|error| !error.is_unreachable() || self.archive.directory.is_some()) {
            let is_ours = |name: &str| part_of(name).is_some_and(|(_, id)| id == attempt);
            // What went wrong first is what is reported.
            let _ = self.archive.remove(self.month, Duration::ZERO, is_ours).await;
        }
        let manifest = written?;
        // Where the connection has ended, and the lock with it, another archiver may be at work.
        self.client.batch_execute("SELECT 1").await?;
        self.archive.put_manifest(self.month, &manifest, instead).await?;
        Ok(manifest)
    }

    /// Writes the files of an attempt, and reads them back.
    async fn write(&self, attempt: &str, report: &mut Report<'_>) -> Result<Manifest, ArchiveError> {
        let (manifest, of) = within(self.client, "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY", async {
            let of = count(self.client, self.table).await?;
            let mut writing = self.reporter(Step::Export, of, report);
            let month = (self.month, self.table, attempt);
            let written = export(self.client, self.archive, month, self.options.part_rows, &mut writing).await;
            written.map(|manifest| (manifest, of))
        })
        .await?;
        if manifest.rows() != of {
            let got = manifest.rows();
            return Err(ArchiveError::refused(format!("expected the {of} rows of its table, got {got} exported")));
        }
        let mut reading = self.reporter(Step::ReadBack, of, report);
        self.archive.compare(self.month, &manifest.parts, &mut reading).await?;
        Ok(manifest)
    }

    /// Drops the table, if it still holds what the archive does and the archive is there. Nobody else can write to it
    /// meanwhile.
    async fn drop_table(&self, manifest: &Manifest, report: &mut Report<'_>) -> Result<(), ArchiveError> {
        let mut comparing = self.reporter(Step::Drop, manifest.rows(), report);
        within(self.client, "BEGIN", async {
            let lock = format!("LOCK TABLE tollgate.{} IN ACCESS EXCLUSIVE MODE", self.table);
            self.client.batch_execute(&lock).await?;
            if attachment(self.client, self.table).await? != Attachment::Detached {
                let expected = "expected a table that is detached, got one that somebody has attached again";
                return Err(ArchiveError::refused(expected));
            }
            same(content(self.client, self.table, &mut comparing).await?, manifest)?;
            self.archive.sync(self.month).await?;
            self.archive.confirm(self.month, manifest).await?;
            // Once more, since the table may have been waited for, and nothing else has these rows from now on.
            self.archive.compare(self.month, &manifest.parts, &mut |_| ()).await?;
            self.client.batch_execute(&format!("DROP TABLE tollgate.{}", self.table)).await?;
            Ok(())
        })
        .await
    }

    fn step(&self, step: Step, manifest: &Manifest, report: &mut Report<'_>) {
        report(&Progress { month: self.month, step, rows: 0, of: manifest.rows() });
    }

    fn reporter<'a>(&self, step: Step, of: u64, report: &'a mut Report<'_>) -> impl FnMut(u64) + Send + 'a {
        let month = self.month;
        move |rows| report(&Progress { month, step, rows, of })
    }
}

/// Does this in a transaction, which ends with it.
async fn within<T>(
    client: &Client,
    begin: &str,
    work: impl Future<Output = Result<T, ArchiveError>>,
) -> Result<T, ArchiveError> {
    client.batch_execute(begin).await?;
    let done = work.await;
    match &done {
        Ok(_) => client.batch_execute("COMMIT").await?,
        // What went wrong first is what is reported.
        Err(_) => drop(client.batch_execute("ROLLBACK").await),
    }
    done
}

/// Whether a table holds the rows of its archive, all of them and no others.
fn same(table: Content, manifest: &Manifest) -> Result<(), ArchiveError> {
    if manifest.content() == Some(table) {
        return Ok(());
    }
    let (rows, archived) = (table.rows, manifest.rows());
    let others = if rows == archived { " others" } else { "" };
    Err(ArchiveError::mismatch(format!("expected the {rows} rows of its table, got {archived}{others} in the archive")))
}
