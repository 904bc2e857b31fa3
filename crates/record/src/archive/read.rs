//! Reads files back piece by piece, and compares them with what was written.

use std::sync::Arc;

use parquet::file::metadata::ParquetMetaData;
use tokio::task::spawn_blocking;

use super::checksum::{Content, sha256};
use super::manifest::Part;
use super::month::Month;
use super::part::{Piece, content, metadata};
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
            let (name, expected) = (&part.name, part.bytes);
            let missing = || ArchiveError::missing(format!("{name}: file not found"));
            let got = self.size(month, name).await?.ok_or_else(missing)?;
            if got != expected {
                return Err(ArchiveError::damaged(format!("{name}: expected {expected} bytes, got {got}")));
            }
            let read = self.content_of(month, part, &mut |so_far| report(rows + so_far)).await?;
            if part.content() != Some(read) {
                let Content { rows, checksum } = read;
                let (noted, sum) = (part.rows, &part.checksum);
                let expected = format!("{name}: expected {noted} rows with the checksum {sum}");
                return Err(ArchiveError::damaged(format!("{expected}, got {rows} with {checksum}")));
            }
            rows += read.rows;
        }
        Ok(())
    }

    async fn content_of(
        &self,
        month: Month,
        part: &Part,
        report: &mut (dyn FnMut(u64) + Send),
    ) -> Result<Content, ArchiveError> {
        let described = Arc::new(self.metadata(month, part).await?);
        let mut sum = Content::default();
        for at in 0..part.groups() {
            let piece = Arc::new(self.piece(month, part, at).await?);
            let described = Arc::clone(&described);
            let group = spawn_blocking(move || content(&piece, described.row_group(at)))
                .await
                .map_err(ArchiveError::interrupted)?;
            sum = sum.and(group.map_err(|error| ArchiveError::unreadable(&part.name, &error))?);
            report(sum.rows);
        }
        Ok(sum)
    }

    /// A file's metadata, which must describe the groups that the manifest has.
    pub(super) async fn metadata(&self, month: Month, part: &Part) -> Result<ParquetMetaData, ArchiveError> {
        let end = self.piece(month, part, part.groups()).await?;
        let described = metadata(&end).map_err(|error| ArchiveError::unreadable(&part.name, &error))?;
        let (expected, got) = (part.groups(), described.num_row_groups());
        if expected == got {
            return Ok(described);
        }
        Err(ArchiveError::damaged(format!("{}: expected {expected} groups of rows, got {got}", part.name)))
    }

    /// A piece of a file. Its bytes are those recorded.
    pub(super) async fn piece(&self, month: Month, part: &Part, at: usize) -> Result<Piece, ArchiveError> {
        let (begin, piece) = (part.begin_of(at), &part.pieces[at]);
        let end = begin + piece.bytes;
        let bytes = self.get_range(month, &part.name, begin..end).await?;
        let hashed = bytes.clone();
        let got = spawn_blocking(move || sha256(&hashed)).await.map_err(ArchiveError::interrupted)?;
        if got == piece.sha256 {
            return Ok(Piece { begin, bytes, length: part.bytes });
        }
        let (name, expected) = (&part.name, &piece.sha256);
        let error = format!("{name}: expected the SHA-256 {expected} of bytes {begin} to {end}, got {got}");
        Err(ArchiveError::damaged(error))
    }
}
