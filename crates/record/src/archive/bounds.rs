//! How much memory reading an archived file may take.

use parquet::errors::ParquetError;

/// The most bytes of a group as stored, of its decompressed pages, and of its texts. Groups that are written stay below
/// this, unless a single row has some 20 MB.
pub(super) const MOST_BYTES: u64 = 64 << 20;
/// The most bytes of the metadata that follows the groups: some 10 kB for each.
pub(super) const MOST_BYTES_OF_THE_END: u64 = 4 << 20;

/// The error for a group that would take too much memory.
pub(super) fn too_large() -> ParquetError {
    ParquetError::General(format!("a group that decompresses to more than {MOST_BYTES} bytes"))
}
