//! One Parquet file of a month: written in groups of rows, read back group by group.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use parquet::basic::{Compression, Encoding, ZstdLevel};
use parquet::column::page::PageReader;
use parquet::column::reader::{ColumnReader, get_column_reader};
use parquet::errors::{ParquetError, Result};
use parquet::file::metadata::{KeyValue, ParquetMetaData, ParquetMetaDataReader, RowGroupMetaData, SortingColumn};
use parquet::file::properties::{EnabledStatistics, WriterProperties};
use parquet::file::reader::{ChunkReader, Length};
use parquet::file::serialized_reader::SerializedPageReader;
use parquet::file::writer::SerializedFileWriter;

use super::FORMAT;
use super::checksum::Content;
use super::columns::{Columns, Group, schema};
use super::row::{AT, COLUMNS, Row, USER};

/// Most rows in a group: this many are decoded to find one user's.
pub(super) const GROUP_ROWS: usize = 128 * 1024;
/// Bytes of text at which a group is written early.
const GROUP_BYTES: usize = 32 << 20;
/// Rows decoded at a time.
pub(super) const BATCH_ROWS: usize = 4096;

/// A file being written, in memory.
pub(super) struct PartWriter {
    file: SerializedFileWriter<Vec<u8>>,
    /// The rows of the next group.
    columns: Columns,
    pub(super) content: Content,
}

impl PartWriter {
    pub(super) fn new() -> Result<Self> {
        let sorted = |at: usize| SortingColumn { column_idx: at as i32, descending: false, nulls_first: false };
        let format = KeyValue { key: "tollgate.archive.format".to_owned(), value: Some(FORMAT.to_string()) };
        let properties = WriterProperties::builder()
            .set_created_by(concat!("tollgate ", env!("CARGO_PKG_VERSION")).to_owned())
            .set_compression(Compression::ZSTD(ZstdLevel::default()))
            .set_max_row_group_row_count(Some(GROUP_ROWS))
            // A user's times ascend, and hardly any repeats.
            .set_column_dictionary_enabled(COLUMNS[AT].name.into(), false)
            .set_column_encoding(COLUMNS[AT].name.into(), Encoding::DELTA_BINARY_PACKED)
            // The least and the greatest value of each column in each group: a user's groups are found by these.
            .set_statistics_enabled(EnabledStatistics::Page)
            .set_sorting_columns(Some(vec![sorted(USER), sorted(AT)]))
            .set_key_value_metadata(Some(vec![format]))
            .build();
        let file = SerializedFileWriter::new(Vec::new(), schema()?, Arc::new(properties))?;
        Ok(Self { file, columns: Columns::new(), content: Content::default() })
    }

    pub(super) fn push(&mut self, row: &Row<'_>, buffer: &mut Vec<u8>) -> Result<()> {
        self.columns.push(row)?;
        self.content.add(row, buffer);
        Ok(())
    }

    /// Whether the group has enough rows.
    pub(super) fn is_group_full(&self) -> bool {
        self.columns.len() >= GROUP_ROWS || self.columns.text_bytes() >= GROUP_BYTES
    }

    /// Writes the group. Computes for some tenths of a second.
    pub(super) fn write_group(&mut self) -> Result<()> {
        if self.columns.len() == 0 {
            return Ok(());
        }
        let mut group = self.file.next_row_group()?;
        self.columns.write(&mut group)?;
        group.close().map(drop)
    }

    /// Bytes written so far.
    pub(super) fn bytes(&self) -> usize {
        self.file.bytes_written()
    }

    /// The complete file.
    pub(super) fn finish(mut self) -> Result<Bytes> {
        self.write_group()?;
        self.file.into_inner().map(Bytes::from)
    }
}

/// Fetched ranges of a file; every read must fall within one of them.
#[derive(Debug)]
pub(super) struct Pieces {
    pieces: Vec<(u64, Bytes)>,
    length: u64,
}

impl Pieces {
    pub(super) fn new(length: u64, pieces: Vec<(u64, Bytes)>) -> Self {
        Self { pieces, length }
    }

    fn from(&self, start: u64) -> Result<Bytes> {
        let piece = self.pieces.iter().find(|(begin, bytes)| (*begin..begin + bytes.len() as u64).contains(&start));
        let (begin, bytes) = piece.ok_or_else(|| ParquetError::EOF("an offset beyond what it says".to_owned()))?;
        Ok(bytes.slice(usize::try_from(start - begin)?..))
    }
}

impl Length for Pieces {
    fn len(&self) -> u64 {
        self.length
    }
}

impl ChunkReader for Pieces {
    type T = std::io::Cursor<Bytes>;

    fn get_read(&self, start: u64) -> Result<Self::T> {
        self.from(start).map(std::io::Cursor::new)
    }

    fn get_bytes(&self, start: u64, length: usize) -> Result<Bytes> {
        let bytes = self.from(start)?;
        if bytes.len() < length {
            return Err(ParquetError::EOF("a length beyond what it says".to_owned()));
        }
        Ok(bytes.slice(..length))
    }
}

/// A file's metadata, from its end or a part of that; if the part is too short, how many bytes of the end are needed.
pub(super) fn metadata(end: &Bytes, length: u64) -> Result<std::result::Result<ParquetMetaData, usize>> {
    let mut reader = ParquetMetaDataReader::new();
    match reader.try_parse_sized(end, length) {
        Ok(()) => {}
        Err(ParquetError::NeedMoreData(needed)) => return Ok(Err(needed)),
        Err(error) => return Err(error),
    }
    let metadata = reader.finish()?;
    let described = metadata.file_metadata().schema_descr();
    let expected = schema()?;
    let is_ours =
        described.num_columns() == COLUMNS.len() && described.root_schema().get_fields() == expected.get_fields();
    if !is_ours {
        return Err(ParquetError::General("columns of another format".to_owned()));
    }
    Ok(Ok(metadata))
}

/// A reader of one column of a group.
pub(super) fn column(pieces: &Arc<Pieces>, group: &RowGroupMetaData, at: usize) -> Result<ColumnReader> {
    let rows = usize::try_from(group.num_rows())?;
    let pages = SerializedPageReader::new(Arc::clone(pieces), group.column(at), rows, None)?;
    let pages: Box<dyn PageReader> = Box::new(pages);
    Ok(get_column_reader(group.schema_descr().column(at), pages))
}

/// All columns of a group.
pub(super) fn columns(pieces: &Arc<Pieces>, group: &RowGroupMetaData) -> Result<Group> {
    let readers = (0..COLUMNS.len()).map(|at| column(pieces, group, at)).collect::<Result<Vec<_>>>()?;
    Ok(Group::new(readers))
}

/// The range of a group's bytes.
pub(super) fn range(group: &RowGroupMetaData) -> Range<u64> {
    let ranges = || group.columns().iter().map(|column| column.byte_range());
    let begin = ranges().map(|(begin, _)| begin).min().unwrap_or_default();
    let end = ranges().map(|(begin, length)| begin.saturating_add(length)).max().unwrap_or_default();
    begin..end
}

/// The count and checksum of a group's rows, in a file that was fetched whole.
pub(super) fn content(pieces: &Arc<Pieces>, group: &RowGroupMetaData) -> Result<Content> {
    let (mut content, mut buffer) = (Content::default(), Vec::new());
    let mut rest = usize::try_from(group.num_rows())?;
    let mut columns = columns(pieces, group)?;
    while rest > 0 {
        let rows = rest.min(BATCH_ROWS);
        columns.read(rows)?.each(|row| content.add(row, &mut buffer));
        rest -= rows;
    }
    Ok(content)
}
