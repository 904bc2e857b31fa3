//! Old months of the audit log as Parquet files on disk or on S3.
//!
//! [`Postgres::archive`](crate::postgres::Postgres::archive) moves each month whose rows are old enough: its table is
//! read and written to files, the files are read back and compared by count and checksum, and only then is the table
//! detached, compared once more and dropped. It may be ended at any moment: the next run goes on from what it finds,
//! and no row is lost or doubled.
//!
//! A month is `audit/year=2026/month=08/part-0-6a1f0c2b9d4e8f37.parquet` and so on, and `manifest.json`, which is
//! written last: what it doesn't name is of an attempt that was cut off.

mod checksum;
mod columns;
mod copy;
mod error;
mod export;
mod manifest;
mod month;
mod part;
mod partitions;
mod query;
mod read;
mod row;
mod run;
mod store;

pub use error::ArchiveError;
pub use manifest::ArchivedMonth;
pub use month::Month;
pub use partitions::{Archivable, Attachment};
pub use query::Rows;
pub use row::ArchivedRow;
pub use run::{ArchiveOptions, Archived, Progress, Step};

use std::collections::BTreeSet;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use object_store::ObjectStore;

/// The format of files and manifests.
const FORMAT: u32 = 1;

/// Where archives are: a directory, or a bucket of S3 or of what is compatible with it. Cheap to clone.
#[derive(Clone)]
pub struct Archive {
    store: Arc<dyn ObjectStore>,
    /// Where that is one.
    directory: Option<PathBuf>,
    /// Where it is, without what is secret.
    address: String,
}

impl Archive {
    /// The archive at `file:///var/lib/tollgate`, a directory that must exist, or at `s3://bucket/prefix`.
    ///
    /// Of S3 the environment says the rest: `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_SESSION_TOKEN` and
    /// `AWS_REGION`, or the role of the machine; `AWS_ENDPOINT` of what is compatible, with `AWS_ALLOW_HTTP=true`
    /// where it has no TLS. Nothing is connected to yet.
    ///
    /// # Errors
    ///
    /// An address that can't be read, or with credentials in it; a directory that isn't there; settings that S3 can't
    /// use.
    pub fn open(url: &str) -> Result<Self, ArchiveError> {
        store::open(url)
    }

    /// Where it is.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }

    /// What a month's manifest says of it; none if there is no manifest. Reads a small file.
    ///
    /// # Errors
    ///
    /// A store that can't be reached; a manifest that can't be read.
    pub async fn describe(&self, month: Month) -> Result<Option<ArchivedMonth>, ArchiveError> {
        Ok(self.manifest(month).await?.map(|(manifest, _)| manifest.describe(month)))
    }

    /// Months that at this time have been kept for so many years after their end. They stay until they are
    /// [deleted](Self::delete). Lists the store.
    ///
    /// # Errors
    ///
    /// A store that can't be reached.
    pub async fn expired(&self, now: SystemTime, years: u16) -> Result<BTreeSet<Month>, ArchiveError> {
        let mut months = self.months().await?;
        months.retain(|month| month.years_after(years).is_some_and(|at| at <= now));
        Ok(months)
    }

    /// Deletes the archive of a month for good, expired or not, also files without a manifest, and says whether there
    /// was one. If it is ended in the middle, the archive is still listed, and can be deleted again.
    ///
    /// # Errors
    ///
    /// A store that can't be reached, or that refuses.
    pub async fn delete(&self, month: Month) -> Result<bool, ArchiveError> {
        // Whatever the manifest says: it may be damaged.
        let known = self.has_manifest(month).await?;
        self.sweep(month).await?;
        self.remove(month, Duration::ZERO, |_| true).await?;
        self.delete_manifest(month).await?;
        Ok(known)
    }

    /// Reads a month's archive and compares it with its manifest: the bytes of each file, and the count and checksum
    /// of its rows. Costs a read of all of it, and memory for one file.
    ///
    /// # Errors
    ///
    /// No such archive; one that isn't as it was made; a store that can't be reached.
    pub async fn verify(&self, month: Month) -> Result<ArchivedMonth, ArchiveError> {
        let manifest = self.manifest(month).await?;
        let missing = || ArchiveError::missing(format!("archive of {month}: expected one, got none"));
        let (manifest, _) = manifest.ok_or_else(missing)?;
        self.compare(month, &manifest.parts, &mut |_| ()).await.map_err(|error| error.of(month))?;
        Ok(manifest.describe(month))
    }

    /// Files of a month that its manifest doesn't name, left over from interrupted or replaced attempts. A reader that loads
    /// every file in the folder would count rows twice. Those of the table that the archive was made from are deleted by
    /// the next run when they are a day old; others are left, since nothing else may have their rows.
    ///
    /// # Errors
    ///
    /// No such archive; a manifest that can't be read; a store that can't be reached.
    pub async fn leftovers(&self, month: Month) -> Result<Vec<String>, ArchiveError> {
        let missing = || ArchiveError::missing(format!("archive of {month}: expected one, got none"));
        let (manifest, _) = self.manifest(month).await?.ok_or_else(missing)?;
        self.unnamed(month, &manifest).await
    }
}

/// Where it is, without settings.
impl fmt::Debug for Archive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Archive").field("address", &self.address).finish_non_exhaustive()
    }
}
