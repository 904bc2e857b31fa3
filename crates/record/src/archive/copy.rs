//! Reads rows as PostgreSQL sends them, a few at a time.

use std::error::Error;

use tokio_postgres::binary_copy::BinaryCopyOutRow;
use tokio_postgres::types::{FromSql, Type};

use super::ArchiveError;
use super::row::{ColumnType, Field, Row};
use crate::history::columns::{COLUMNS, Column, SqlType, WIDTH};
use crate::postgres::PostgresError;
use crate::postgres::client::{Client, CopyOut};

/// From 1970 to PostgreSQL's epoch, the year 2000, in microseconds.
const EPOCH: i64 = 946_684_800_000_000;

/// The bytes of the longest text that is archived whole, and the characters that are kept of a longer one. The table
/// refuses texts that are far shorter; somebody may have altered it. A row of any size could be neither held in memory
/// nor read back.
const MOST_BYTES: usize = 64 << 10;
const KEPT: usize = 8 << 10;

/// The rows of a table.
pub(super) struct Copy(CopyOut);

/// One row.
pub(super) struct Copied(BinaryCopyOutRow);

/// The bytes of a value.
struct Raw<'a>(&'a [u8]);

impl<'a> FromSql<'a> for Raw<'a> {
    fn from_sql(_: &Type, raw: &'a [u8]) -> Result<Self, Box<dyn Error + Sync + Send>> {
        Ok(Self(raw))
    }

    fn accepts(_: &Type) -> bool {
        true
    }
}

impl Copy {
    /// All rows of a table in the schema `tollgate`, in this order: `ORDER BY ...` or nothing.
    pub(super) async fn of(client: &Client, table: &str, order: &str) -> Result<Self, ArchiveError> {
        let columns: Vec<_> = COLUMNS.iter().map(selected).collect();
        let columns = columns.join(", ");
        let texts = COLUMNS.iter().filter(|column| column.sql == SqlType::Text);
        let texts: Vec<_> = texts.map(|column| format!("octet_length({})", column.name)).collect();
        let is_cut = format!("greatest({}) > {MOST_BYTES}", texts.join(", "));
        let copy = format!(
            "COPY (SELECT {columns}, coalesce({is_cut}, false) FROM ONLY tollgate.{table} {order}) TO STDOUT (FORMAT binary)"
        );
        let types = COLUMNS.iter().map(|column| match ColumnType::of(column) {
            ColumnType::Time => Type::TIMESTAMPTZ,
            ColumnType::Text => Type::TEXT,
            ColumnType::Long => Type::INT8,
            ColumnType::Short => Type::INT2,
        });
        let types: Vec<_> = types.chain([Type::BOOL]).collect();
        Ok(Self(client.copy_out(&copy, &types).await?))
    }

    pub(super) async fn next(&mut self) -> Result<Option<Copied>, ArchiveError> {
        Ok(self.0.next().await?.map(Copied))
    }
}

/// An address as PostgreSQL displays it: with a mask only if it has one. Of a text that is too long, its beginning, and
/// how long it is.
fn selected(column: &Column) -> String {
    let name = column.name;
    match column.sql {
        SqlType::Inet => format!("textin(inet_out({name}))"),
        SqlType::Text => format!(
            "CASE WHEN octet_length({name}) > {MOST_BYTES}
                THEN left({name}, {KEPT}) || '... (cut off, of ' || octet_length({name}) || ' bytes)' ELSE {name} END"
        ),
        _ => name.to_owned(),
    }
}

impl Copied {
    /// Whether one of its texts was too long, and is cut off.
    pub(super) fn is_cut(&self) -> Result<bool, ArchiveError> {
        Ok(self.0.try_get(WIDTH).map_err(|error| PostgresError::new(&error))?)
    }

    pub(super) fn row(&self) -> Result<Row<'_>, ArchiveError> {
        let mut row = [Field::Null; WIDTH];
        for (at, (field, column)) in row.iter_mut().zip(&COLUMNS).enumerate() {
            let raw = self.0.try_get::<Option<Raw<'_>>>(at).map_err(|error| PostgresError::new(&error))?;
            let Some(Raw(raw)) = raw else { continue };
            *field = value(ColumnType::of(column), raw).ok_or_else(|| unfit(column))?;
        }
        Ok(row)
    }
}

fn value(kind: ColumnType, raw: &[u8]) -> Option<Field<'_>> {
    Some(match kind {
        ColumnType::Text => Field::Text(raw),
        ColumnType::Long => Field::Number(i64::from_be_bytes(raw.try_into().ok()?)),
        ColumnType::Short => Field::Number(i16::from_be_bytes(raw.try_into().ok()?).into()),
        ColumnType::Time => Field::Number(i64::from_be_bytes(raw.try_into().ok()?).checked_add(EPOCH)?),
    })
}

fn unfit(column: &Column) -> ArchiveError {
    ArchiveError::refused(format!("{}: PostgreSQL sent an invalid {}", column.name, column.sql.name()))
}
