//! The columns of the audit log: once, for those who write, read and archive it.

use tokio_postgres::types::Type;

/// The type of a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ColumnType {
    /// Microseconds since the epoch.
    Time,
    Text,
    Long,
    /// 16 bits.
    Short,
}

/// The type of a column of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SqlType {
    Timestamptz,
    Text,
    Inet,
    Bigint,
    Smallint,
}

/// A column of the audit log and of its archive; both use the same name.
#[derive(Debug)]
pub(crate) struct Column {
    pub(crate) name: &'static str,
    pub(crate) kind: ColumnType,
    pub(crate) required: bool,
    pub(crate) sql: SqlType,
}

impl SqlType {
    /// As PostgreSQL names it.
    #[cfg_attr(not(feature = "archive"), allow(dead_code, reason = "the archive checks the table"))]
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Timestamptz => "timestamp with time zone",
            Self::Text => "text",
            Self::Inet => "inet",
            Self::Bigint => "bigint",
            Self::Smallint => "smallint",
        }
    }

    /// As values are sent.
    pub(crate) fn wire(self) -> Type {
        match self {
            Self::Timestamptz => Type::TIMESTAMPTZ,
            Self::Text => Type::TEXT,
            Self::Inet => Type::INET,
            Self::Bigint => Type::INT8,
            Self::Smallint => Type::INT2,
        }
    }
}

const fn column(name: &'static str, kind: ColumnType, required: bool, sql: SqlType) -> Column {
    Column { name, kind, required, sql }
}

pub(crate) const WIDTH: usize = 17;

/// In the table's order. Changing the order, a name or a type changes the format of archives, too.
pub(crate) static COLUMNS: [Column; WIDTH] = [
    column("at", ColumnType::Time, true, SqlType::Timestamptz),
    column("user_id", ColumnType::Text, false, SqlType::Text),
    column("api_key", ColumnType::Text, false, SqlType::Text),
    column("ip", ColumnType::Text, false, SqlType::Inet),
    column("endpoint", ColumnType::Text, false, SqlType::Text),
    column("method", ColumnType::Text, false, SqlType::Text),
    column("rule", ColumnType::Text, false, SqlType::Text),
    column("decision", ColumnType::Text, true, SqlType::Text),
    column("reason", ColumnType::Text, true, SqlType::Text),
    column("limited_by", ColumnType::Text, false, SqlType::Text),
    column("used", ColumnType::Long, false, SqlType::Bigint),
    column("capacity", ColumnType::Long, false, SqlType::Bigint),
    column("status", ColumnType::Short, false, SqlType::Smallint),
    column("retry_after_us", ColumnType::Long, false, SqlType::Bigint),
    column("region", ColumnType::Text, false, SqlType::Text),
    column("server", ColumnType::Text, false, SqlType::Text),
    column("latency_us", ColumnType::Long, true, SqlType::Bigint),
];

/// The columns' names, for a statement.
pub(crate) fn names() -> String {
    COLUMNS.each_ref().map(|column| column.name).join(", ")
}
