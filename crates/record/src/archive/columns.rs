//! Rows as columns, the way Parquet stores them: for writing, and as read.

use bytes::Bytes;
use parquet::basic::{LogicalType, Repetition, TimeUnit, Type as Physical};
use parquet::column::reader::ColumnReader;
use parquet::data_type::{ByteArray, ByteArrayType, Int32Type, Int64Type};
use parquet::errors::{ParquetError, Result};
use parquet::file::writer::SerializedRowGroupWriter;
use parquet::schema::types::{Type, TypePtr};

use super::bounds::{MOST_BYTES, too_large};
use super::row::{ColumnType, Field, Row};
use crate::history::columns::{COLUMNS, Column, WIDTH};

/// One column's values, without nulls.
#[derive(Debug)]
enum Values {
    Long(Vec<i64>),
    Short(Vec<i32>),
    Text(Texts),
}

/// Texts stored back to back, with no memory beyond their bytes and ends.
#[derive(Debug, Default)]
struct Texts {
    bytes: Vec<u8>,
    ends: Vec<usize>,
}

/// Rows as columns.
#[derive(Debug)]
pub(super) struct Columns {
    values: Vec<Values>,
    /// For each column and row: 1, or 0 for null.
    levels: Vec<Vec<i16>>,
    rows: usize,
}

/// The names and types of a file's columns.
pub(super) fn schema() -> Result<TypePtr> {
    let field = |column: &Column| {
        let (physical, logical) = match ColumnType::of(column) {
            ColumnType::Time => (Physical::INT64, Some(LogicalType::timestamp(true, TimeUnit::MICROS))),
            ColumnType::Long => (Physical::INT64, None),
            ColumnType::Short => (Physical::INT32, Some(LogicalType::integer(16, true))),
            ColumnType::Text => (Physical::BYTE_ARRAY, Some(LogicalType::String)),
        };
        let repetition = if column.required { Repetition::REQUIRED } else { Repetition::OPTIONAL };
        let field = Type::primitive_type_builder(column.name, physical).with_logical_type(logical);
        field.with_repetition(repetition).build().map(TypePtr::new)
    };
    let fields = COLUMNS.iter().map(field).collect::<Result<Vec<_>>>()?;
    Type::group_type_builder("rate_limit_audit_log").with_fields(fields).build().map(TypePtr::new)
}

impl Columns {
    pub(super) fn new() -> Self {
        let values = COLUMNS.iter().map(|column| match ColumnType::of(column) {
            ColumnType::Time | ColumnType::Long => Values::Long(Vec::new()),
            ColumnType::Short => Values::Short(Vec::new()),
            ColumnType::Text => Values::Text(Texts::default()),
        });
        Self { values: values.collect(), levels: vec![Vec::new(); COLUMNS.len()], rows: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.rows
    }

    /// Total bytes of all texts.
    pub(super) fn text_bytes(&self) -> usize {
        let bytes = |values: &Values| match values {
            Values::Text(texts) => texts.bytes.len(),
            _ => 0,
        };
        self.values.iter().map(bytes).sum()
    }

    /// Adds a row, unless it holds a value that its column can't.
    pub(super) fn push(&mut self, row: &Row<'_>) -> Result<()> {
        for ((field, column), (values, levels)) in
            row.iter().zip(&COLUMNS).zip(self.values.iter_mut().zip(&mut self.levels))
        {
            match (field, values) {
                (Field::Number(number), Values::Long(numbers)) => numbers.push(*number),
                (Field::Number(number), Values::Short(numbers)) => {
                    numbers.push(i16::try_from(*number).map_err(|_| unfit(column))?.into());
                }
                (Field::Text(text), Values::Text(texts)) => {
                    texts.bytes.extend_from_slice(text);
                    texts.ends.push(texts.bytes.len());
                }
                (Field::Null, _) if !column.required => {}
                _ => return Err(unfit(column)),
            }
            levels.push(i16::from(*field != Field::Null));
        }
        self.rows += 1;
        Ok(())
    }

    /// Writes all rows as one group, and clears them.
    pub(super) fn write<W: std::io::Write + Send>(
        &mut self,
        group: &mut SerializedRowGroupWriter<'_, W>,
    ) -> Result<()> {
        let written = std::mem::replace(self, Self::new());
        for ((values, levels), column) in written.values.into_iter().zip(written.levels).zip(&COLUMNS) {
            let Some(mut writer) = group.next_column()? else { return Err(unfit(column)) };
            let levels = (!column.required).then_some(levels.as_slice());
            match values {
                Values::Long(numbers) => writer.typed::<Int64Type>().write_batch(&numbers, levels, None)?,
                Values::Short(numbers) => writer.typed::<Int32Type>().write_batch(&numbers, levels, None)?,
                Values::Text(texts) => writer.typed::<ByteArrayType>().write_batch(&texts.arrays(), levels, None)?,
            };
            writer.close()?;
        }
        Ok(())
    }

    /// Calls `with` for each row.
    pub(super) fn each(&self, mut with: impl FnMut(&Row<'_>)) {
        // For each column, how many values were passed so far.
        let mut passed = [0; WIDTH];
        for at in 0..self.rows {
            let mut row = [Field::Null; WIDTH];
            for (number, field) in row.iter_mut().enumerate() {
                if self.levels[number][at] > 0 {
                    *field = self.values[number].get(passed[number]);
                    passed[number] += 1;
                }
            }
            with(&row);
        }
    }
}

impl Values {
    fn get(&self, at: usize) -> Field<'_> {
        match self {
            Self::Long(numbers) => numbers.get(at).map_or(Field::Null, |number| Field::Number(*number)),
            Self::Short(numbers) => numbers.get(at).map_or(Field::Null, |number| Field::Number((*number).into())),
            Self::Text(texts) => texts.get(at).map_or(Field::Null, Field::Text),
        }
    }
}

impl Texts {
    fn get(&self, at: usize) -> Option<&[u8]> {
        let begin = if at == 0 { 0 } else { *self.ends.get(at - 1)? };
        self.bytes.get(begin..*self.ends.get(at)?)
    }

    fn arrays(self) -> Vec<ByteArray> {
        let bytes = Bytes::from(self.bytes);
        let mut begin = 0;
        let array = |end: &usize| ByteArray::from(bytes.slice(std::mem::replace(&mut begin, *end)..*end));
        self.ends.iter().map(array).collect()
    }
}

/// The columns of a row group, read some rows at a time.
pub(super) struct Group {
    readers: Vec<ColumnReader>,
    /// Bytes of text read so far. A dictionary's text is stored once and may be read for every row.
    text_bytes: u64,
}

impl Group {
    /// From the readers of all columns, in order.
    pub(super) fn new(readers: Vec<ColumnReader>) -> Self {
        Self { readers, text_bytes: 0 }
    }

    /// Reads the next rows, exactly as many as asked for.
    pub(super) fn read(&mut self, rows: usize) -> Result<Columns> {
        let mut read = Columns::new();
        for (at, (reader, column)) in self.readers.iter_mut().zip(&COLUMNS).enumerate() {
            let left = MOST_BYTES.saturating_sub(self.text_bytes);
            self.text_bytes += read_column(reader, column, (rows, left), &mut read.values[at], &mut read.levels[at])?;
        }
        read.rows = rows;
        Ok(read)
    }
}

/// Reads this many rows of one column, with at most so many bytes of text. Returns how many it has.
fn read_column(
    reader: &mut ColumnReader,
    column: &Column,
    (rows, most_bytes): (usize, u64),
    values: &mut Values,
    levels: &mut Vec<i16>,
) -> Result<u64> {
    let mut bytes = 0;
    let (got, count) = match (reader, values) {
        (ColumnReader::Int64ColumnReader(reader), Values::Long(numbers)) => {
            let (got, _, _) = reader.read_records(rows, Some(levels), None, numbers)?;
            (got, numbers.len())
        }
        (ColumnReader::Int32ColumnReader(reader), Values::Short(numbers)) => {
            let (got, _, _) = reader.read_records(rows, Some(levels), None, numbers)?;
            (got, numbers.len())
        }
        (ColumnReader::ByteArrayColumnReader(reader), Values::Text(texts)) => {
            let mut arrays = Vec::new();
            let (got, _, _) = reader.read_records(rows, Some(levels), None, &mut arrays)?;
            bytes = arrays.iter().map(|array: &ByteArray| array.len() as u64).sum();
            if bytes > most_bytes {
                return Err(too_large());
            }
            for array in &arrays {
                texts.bytes.extend_from_slice(array.data());
                texts.ends.push(texts.bytes.len());
            }
            (got, arrays.len())
        }
        _ => return Err(unfit(column)),
    };
    if column.required {
        *levels = vec![1; got];
    }
    let present = levels.iter().filter(|level| **level > 0).count();
    if (got, levels.len(), present) == (rows, rows, count) { Ok(bytes) } else { Err(unfit(column)) }
}

fn unfit(column: &Column) -> ParquetError {
    ParquetError::General(format!("column {}: its values don't fit its type or the number of rows", column.name))
}
