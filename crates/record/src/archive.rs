//! Old months of the audit log as Parquet files on disk or on S3.
//!
//! [`Postgres::archive`](crate::postgres::Postgres::archive) moves each month that is old enough. Its table is read and
//! written to files, and the files are read back and compared by count and checksum; only then is the table detached,
//! compared once more and dropped. The run may be interrupted at any moment: the next one continues from what it finds,
//! and no row is lost or duplicated.
//!
//! Before anything that is read back is shown, it is compared with the recorded SHA-256. Reading takes bounded memory,
//! whatever the file contains.
//!
//! A month is stored as `audit/year=2026/month=08/part-0-6a1f0c2b9d4e8f37.parquet` and so on, and `manifest.json`,
//! which is written last: files that it doesn't name are left over from an interrupted attempt.

mod bounds;
mod checksum;
mod columns;
mod copy;
mod directory;
mod error;
mod export;
mod listing;
mod manifest;
mod month;
mod page_header;
mod part;
mod partitions;
mod query;
mod read;
mod row;
mod run;
mod store;

pub use error::ArchiveError;
pub use listing::Listing;
pub use manifest::ArchivedMonth;
pub use month::Month;
pub use partitions::{Archivable, Attachment};
pub use query::Rows;
pub use row::ArchivedRow;
pub use run::{ArchiveOptions, ArchiveProgress, Archived, Step};

use std::fmt;
use std::time::Duration;

use store::Store;

/// The format of files and manifests.
const FORMAT: u32 = 1;

/// Where archives are stored: a directory, or a bucket on S3 or a compatible store. Cheap to clone.
#[derive(Clone)]
pub struct Archive {
    store: Store,
    /// The address, without secrets.
    address: String,
}

impl Archive {
    /// The archive at `file:///var/lib/tollgate`, a directory that must exist, or at `s3://bucket/prefix`.
    ///
    /// On Unix, new files in a directory have mode 600 and new folders 700, whatever the umask. Symbolic links below
    /// the directory are refused.
    ///
    /// S3 is configured through the environment: `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_SESSION_TOKEN` and
    /// `AWS_REGION`, or the machine's role; for a compatible store `AWS_ENDPOINT`, with `AWS_ALLOW_HTTP=true` if it has
    /// no TLS. Doesn't connect yet.
    ///
    /// # Errors
    ///
    /// An address that can't be read or contains credentials, as may `AWS_ENDPOINT`; a directory that doesn't exist;
    /// invalid settings for S3.
    pub fn open(url: &str) -> Result<Self, ArchiveError> {
        store::open(url)
    }

    /// The address, without secrets.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }

    /// A month's archive according to its manifest; `None` if there is no manifest. Reads one small file.
    ///
    /// # Errors
    ///
    /// A store that can't be reached; a manifest that can't be read.
    pub async fn describe(&self, month: Month) -> Result<Option<ArchivedMonth>, ArchiveError> {
        Ok(self.manifest(month).await?.map(|(manifest, _)| manifest.describe(month)))
    }

    /// Deletes a month's archive permanently, expired or not, including files without a manifest; returns whether there
    /// was one. If this is interrupted, the archive is still listed, and can be deleted again.
    ///
    /// # Errors
    ///
    /// A store that can't be reached, or that refuses the deletion.
    pub async fn delete(&self, month: Month) -> Result<bool, ArchiveError> {
        // Doesn't read the manifest, which may be damaged.
        let deleted = async {
            let known = self.size(month, store::MANIFEST).await?.is_some();
            self.sweep(month).await?;
            self.remove(month, Duration::ZERO, |_| true).await?;
            self.delete_manifest(month).await?;
            Ok(known)
        };
        deleted.await.map_err(|error: ArchiveError| error.of(month))
    }

    /// Reads a month's archive and compares it with its manifest: the bytes of each file, and the count and checksum of
    /// its rows. Reads the whole archive, with memory for one group of rows.
    ///
    /// # Errors
    ///
    /// No such archive; one that differs from its manifest; a store that can't be reached.
    pub async fn verify(&self, month: Month) -> Result<ArchivedMonth, ArchiveError> {
        let manifest = self.manifest(month).await?;
        let missing = || ArchiveError::missing(format!("archive of {month}: this month isn't archived"));
        let (manifest, _) = manifest.ok_or_else(missing)?;
        self.compare(month, &manifest.parts, &mut |_| ()).await.map_err(|error| error.of(month))?;
        Ok(manifest.describe(month))
    }

    /// Files of a month that its manifest doesn't name, left over from interrupted or replaced attempts. A reader that
    /// loads every file in the folder would count rows twice. Files from the table that the archive was made from are
    /// deleted by the next run once they are a day old. Others are kept, since nothing else may have their rows.
    ///
    /// # Errors
    ///
    /// No such archive; a manifest that can't be read; a store that can't be reached.
    pub async fn leftovers(&self, month: Month) -> Result<Vec<String>, ArchiveError> {
        let missing = || ArchiveError::missing(format!("archive of {month}: this month isn't archived"));
        let (manifest, _) = self.manifest(month).await?.ok_or_else(missing)?;
        self.unnamed(month, &manifest).await
    }
}

/// Shows the address only, without settings.
impl fmt::Debug for Archive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Archive").field("address", &self.address).finish_non_exhaustive()
    }
}
