//! The columns of the audit log, defined once for all code that writes, reads or archives it.

use tokio_postgres::types::Type;

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
    /// Whether it is never null.
    #[cfg_attr(not(feature = "archive"), allow(dead_code, reason = "an archive's file says so too"))]
    pub(crate) required: bool,
    pub(crate) sql: SqlType,
}

impl SqlType {
    /// PostgreSQL's name for it.
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

    /// The type in which values are sent.
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

const fn column(name: &'static str, required: bool, sql: SqlType) -> Column {
    Column { name, required, sql }
}

pub(crate) const WIDTH: usize = 18;

/// In the table's order. Changing the order, a name or a type changes the format of archives, too.
pub(crate) static COLUMNS: [Column; WIDTH] = [
    column("at", true, SqlType::Timestamptz),
    column("user_id", false, SqlType::Text),
    column("api_key", false, SqlType::Text),
    column("ip", false, SqlType::Inet),
    column("endpoint", false, SqlType::Text),
    column("method", false, SqlType::Text),
    column("rule", false, SqlType::Text),
    column("decision", true, SqlType::Text),
    column("reason", true, SqlType::Text),
    column("limited_by", false, SqlType::Text),
    column("used", false, SqlType::Bigint),
    column("capacity", false, SqlType::Bigint),
    column("status", false, SqlType::Smallint),
    column("retry_after_us", false, SqlType::Bigint),
    column("region", false, SqlType::Text),
    column("server", false, SqlType::Text),
    column("latency_us", true, SqlType::Bigint),
    column("rules", false, SqlType::Text),
];

/// The columns' names, for a statement.
pub(crate) fn names() -> String {
    COLUMNS.each_ref().map(|column| column.name).join(", ")
}
