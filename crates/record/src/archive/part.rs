//! One Parquet file of a month: written in groups of rows, read back group by group.

use std::sync::Arc;

use bytes::Bytes;
use parquet::basic::{Compression, Encoding, ZstdLevel};
use parquet::column::page::{Page, PageMetadata, PageReader};
use parquet::column::reader::get_column_reader;
use parquet::errors::{ParquetError, Result};
use parquet::file::metadata::{
    ColumnChunkMetaData, KeyValue, ParquetMetaData, ParquetMetaDataReader, RowGroupMetaData, SortingColumn,
};
use parquet::file::properties::{EnabledStatistics, WriterProperties};
use parquet::file::reader::{ChunkReader, Length};
use parquet::file::serialized_reader::SerializedPageReader;
use parquet::file::writer::SerializedFileWriter;

use super::FORMAT;
use super::bounds::{MOST_BYTES, too_large};
use super::checksum::Content;
use super::columns::{Columns, Group, schema};
use super::page_header::PageHeader;
use super::row::{AT, Row, USER};
use crate::history::columns::COLUMNS;

/// Most rows in a group: this many are decoded to find one user's.
const GROUP_ROWS: usize = 128 * 1024;
/// Bytes of text at which a group is written early.
const GROUP_BYTES: usize = 32 << 20;
/// Groups at which a file is finished early, so that its metadata stays small.
pub(super) const GROUPS: usize = 128;
/// Rows decoded at a time.
pub(super) const BATCH_ROWS: usize = 4096;

/// A file being written, in memory.
pub(super) struct PartWriter {
    file: SerializedFileWriter<Vec<u8>>,
    /// The rows of the next group.
    columns: Columns,
    pub(super) content: Content,
    /// Where each group ends.
    ends: Vec<usize>,
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
        Ok(Self { file, columns: Columns::new(), content: Content::default(), ends: Vec::new() })
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

    /// Writes the group. Takes some tenths of a second of processor time.
    pub(super) fn write_group(&mut self) -> Result<()> {
        if self.columns.len() == 0 {
            return Ok(());
        }
        let mut group = self.file.next_row_group()?;
        self.columns.write(&mut group)?;
        group.close()?;
        self.ends.push(self.file.bytes_written());
        Ok(())
    }

    /// Groups written so far.
    pub(super) fn groups(&self) -> usize {
        self.ends.len()
    }

    /// Bytes written so far.
    pub(super) fn bytes(&self) -> usize {
        self.file.bytes_written()
    }

    /// The complete file, and where each of its groups ends.
    pub(super) fn finish(mut self) -> Result<(Bytes, Vec<usize>)> {
        self.write_group()?;
        Ok((self.file.into_inner()?.into(), self.ends))
    }
}

/// A piece of a file: its bytes, and where it begins. Every read must fall within it.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    pub(super) begin: u64,
    pub(super) bytes: Bytes,
    /// Bytes of the whole file.
    pub(super) length: u64,
}

impl Piece {
    fn from(&self, start: u64) -> Result<Bytes> {
        let at = start.checked_sub(self.begin).and_then(|at| usize::try_from(at).ok());
        let at = at.filter(|at| *at <= self.bytes.len());
        at.map(|at| self.bytes.slice(at..)).ok_or_else(|| ParquetError::EOF("an offset beyond its group".to_owned()))
    }
}

impl Length for Piece {
    fn len(&self) -> u64 {
        self.length
    }
}

impl ChunkReader for Piece {
    type T = std::io::Cursor<Bytes>;

    fn get_read(&self, start: u64) -> Result<Self::T> {
        self.from(start).map(std::io::Cursor::new)
    }

    fn get_bytes(&self, start: u64, length: usize) -> Result<Bytes> {
        let bytes = self.from(start)?;
        if bytes.len() < length {
            return Err(ParquetError::EOF("a length beyond its group".to_owned()));
        }
        Ok(bytes.slice(..length))
    }
}

/// A file's metadata, from the piece that follows its groups.
pub(super) fn metadata(end: &Piece) -> Result<ParquetMetaData> {
    let mut reader = ParquetMetaDataReader::new();
    reader.try_parse_sized(&end.bytes, end.length)?;
    let metadata = reader.finish()?;
    let described = metadata.file_metadata().schema_descr();
    let expected = schema()?;
    let is_ours =
        described.num_columns() == COLUMNS.len() && described.root_schema().get_fields() == expected.get_fields();
    if is_ours {
        Ok(metadata)
    } else {
        Err(ParquetError::General("its columns aren't those of the audit log".to_owned()))
    }
}

/// The columns of a group, from its piece; refused if they would take more memory than a group written by tollgate.
pub(super) fn group(piece: &Arc<Piece>, described: &RowGroupMetaData) -> Result<Group> {
    let rows = usize::try_from(described.num_rows())?;
    if rows > GROUP_ROWS {
        return Err(ParquetError::General(format!("expected groups of at most {GROUP_ROWS} rows, got {rows}")));
    }
    let mut rest = MOST_BYTES;
    let mut readers = Vec::new();
    for (at, chunk) in described.columns().iter().enumerate() {
        check_pages(piece, chunk, &mut rest)?;
        let inner = SerializedPageReader::new(Arc::clone(piece), chunk, rows, None)?;
        let pages: Box<dyn PageReader> = Box::new(Pages { inner, rows });
        readers.push(get_column_reader(described.schema_descr().column(at), pages));
    }
    Ok(Group::new(readers))
}

/// Checks that a column's pages are within the piece, and that they decompress to at most `rest` bytes; subtracts their
/// size from it.
fn check_pages(piece: &Piece, chunk: &ColumnChunkMetaData, rest: &mut u64) -> Result<()> {
    let begin = u64::try_from(chunk.dictionary_page_offset().unwrap_or(chunk.data_page_offset()))?;
    let mut pages = piece.get_bytes(begin, usize::try_from(chunk.compressed_size())?)?;
    while !pages.is_empty() {
        let unreadable = || ParquetError::General("a page without a header".to_owned());
        let header = PageHeader::read(&pages).ok_or_else(unreadable)?;
        *rest = rest.checked_sub(header.decoded as u64).ok_or_else(too_large)?;
        let next = header.length + header.stored;
        if next > pages.len() {
            return Err(ParquetError::EOF("a page beyond its group".to_owned()));
        }
        pages = pages.slice(next..);
    }
    Ok(())
}

/// The pages of a column. Only what tollgate writes is decoded: other encodings turn few bytes into many, as does a
/// dictionary of more values than there are rows.
struct Pages {
    inner: SerializedPageReader<Piece>,
    rows: usize,
}

impl Pages {
    fn check(&self, page: Page) -> Result<Page> {
        let is_known = match page.encoding() {
            Encoding::PLAIN | Encoding::RLE_DICTIONARY | Encoding::PLAIN_DICTIONARY => true,
            Encoding::DELTA_BINARY_PACKED => page.is_data_page(),
            _ => false,
        };
        let values = page.num_values() as usize;
        if is_known && values <= self.rows {
            return Ok(page);
        }
        let got = format!("{values} in {}", page.encoding());
        let expected = format!("expected pages of at most {} values in an encoding that tollgate writes", self.rows);
        Err(ParquetError::General(format!("{expected}, got {got}")))
    }
}

impl Iterator for Pages {
    type Item = Result<Page>;

    fn next(&mut self) -> Option<Result<Page>> {
        self.get_next_page().transpose()
    }
}

impl PageReader for Pages {
    fn get_next_page(&mut self) -> Result<Option<Page>> {
        self.inner.get_next_page()?.map(|page| self.check(page)).transpose()
    }

    fn peek_next_page(&mut self) -> Result<Option<PageMetadata>> {
        self.inner.peek_next_page()
    }

    fn skip_next_page(&mut self) -> Result<()> {
        self.inner.skip_next_page()
    }

    fn at_record_boundary(&mut self) -> Result<bool> {
        self.inner.at_record_boundary()
    }
}

/// The count and checksum of a group's rows.
pub(super) fn content(piece: &Arc<Piece>, described: &RowGroupMetaData) -> Result<Content> {
    let (mut content, mut buffer) = (Content::default(), Vec::new());
    let mut columns = group(piece, described)?;
    let mut rest = usize::try_from(described.num_rows())?;
    while rest > 0 {
        let rows = rest.min(BATCH_ROWS);
        columns.read(rows)?.each(|row| content.add(row, &mut buffer));
        rest -= rows;
    }
    Ok(content)
}
