//! Reads whole files back, and compares them with what was written.

use std::sync::Arc;

use bytes::Bytes;
use parquet::file::metadata::ParquetMetaData;
use tokio::task::spawn_blocking;

use super::checksum::{Content, sha256};
use super::manifest::Part;
use super::month::Month;
use super::part::{Pieces, content, metadata};
use super::{Archive, ArchiveError};

impl Archive {
    /// Reads all files of a month back: their bytes, and the count and checksum of their rows, must be those recorded.
    /// Reports how many rows were read so far.
    pub(super) async fn compare(
        &self,
        month: Month,
        parts: &[Part],
        report: &mut (dyn FnMut(u64) + Send),
    ) -> Result<(), ArchiveError> {
        let mut rows = 0;
        for part in parts {
            let bytes = self.get(month, &part.name).await?;
            let (name, length) = (&part.name, bytes.len() as u64);
            if length != part.bytes {
                let expected = part.bytes;
                return Err(ArchiveError::damaged(format!("{name}: expected {expected} bytes, got {length}")));
            }
            let whole = bytes.clone();
            let got = spawn_blocking(move || sha256(&whole)).await?;
            if got != part.sha256 {
                return Err(ArchiveError::damaged(format!("{name}: expected the SHA-256 {}, got {got}", part.sha256)));
            }
            let read = self.content_of(name, bytes, &mut |so_far| report(rows + so_far)).await?;
            if part.content() != Some(read) {
                let Content { rows, checksum } = read;
                let (noted, sum) = (part.rows, &part.checksum);
                let expected = format!("{name}: expected {noted} rows of checksum {sum}");
                return Err(ArchiveError::damaged(format!("{expected}, got {rows} of {checksum}")));
            }
            rows += read.rows;
        }
        Ok(())
    }

    async fn content_of(
        &self,
        name: &str,
        bytes: Bytes,
        report: &mut (dyn FnMut(u64) + Send),
    ) -> Result<Content, ArchiveError> {
        let length = bytes.len() as u64;
        let described = metadata(&bytes, length).map_err(|error| ArchiveError::unreadable(name, &error))?;
        let cut_short = |_| ArchiveError::damaged(format!("{name}: expected Parquet, got a part of it"));
        let described: Arc<ParquetMetaData> = Arc::new(described.map_err(cut_short)?);
        let pieces = Arc::new(Pieces::new(length, vec![(0, bytes)]));
        let mut sum = Content::default();
        for at in 0..described.num_row_groups() {
            let (pieces, described) = (Arc::clone(&pieces), Arc::clone(&described));
            let group = spawn_blocking(move || content(&pieces, described.row_group(at))).await?;
            sum = sum.and(group.map_err(|error| ArchiveError::unreadable(name, &error))?);
            report(sum.rows);
        }
        Ok(sum)
    }
}
