//! The audit log's tables, one a month: listing and detaching them.

use std::time::{Duration, SystemTime};

use tokio_postgres::Row;
use tokio_postgres::types::FromSql;

use super::ArchiveError;
use super::checksum::sha256;
use super::month::Month;
use crate::history::columns::COLUMNS;
use crate::postgres::client::Client;
use crate::postgres::connecting::SAFE_PATH;
use crate::postgres::{Postgres, PostgresError};

const PARENT: &str = "rate_limit_audit_logs";

/// Held by an archiver until its connection ends, so that two don't run at once. Only the table's owner can take it, so
/// nobody else can hold archivers up. A killed archiver's connection takes a moment to end.
const LOCK: &str = "SET lock_timeout = '5s'; BEGIN; LOCK TABLE tollgate.archive_lock IN EXCLUSIVE MODE";

/// Turns off the server's statement, idle and transaction timeouts, but limits the wait for locks.
const SETTINGS: &str = "
    SELECT set_config(name, '0', false) FROM pg_settings
    WHERE name IN ('statement_timeout', 'idle_in_transaction_session_timeout', 'idle_session_timeout', 'transaction_timeout');
    SET lock_timeout = '30s';
    -- A policy that hides rows would hide them from every comparison, too: then it is refused to read.
    SET row_security = off";
/// Where the platform supports it, the server notices within a second that the archiver it works for was killed.
const NOTICED: &str = "SET client_connection_check_interval = '1s'";

/// Whether a month's table is still part of the audit log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Attachment {
    /// It is part of the audit log.
    Attached,
    /// Detaching it was interrupted.
    Pending,
    /// It is a table of its own.
    Detached,
}

/// A month old enough to be archived.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Archivable {
    /// The month.
    pub month: Month,
    /// Its table, in the schema `tollgate`.
    pub table: String,
    /// Whether the table is still part of the audit log.
    pub attachment: Attachment,
    /// The number of its rows.
    pub rows: u64,
    /// Bytes of the table and its indexes.
    pub bytes: u64,
}

/// A month's table.
#[derive(Clone, Debug)]
pub(super) struct Partition {
    pub(super) month: Month,
    pub(super) table: String,
    pub(super) attachment: Attachment,
    pub(super) bytes: u64,
}

/// Prepares a connection for work that takes long. Returns the server's process.
pub(super) async fn prepare(client: &Client) -> Result<i32, ArchiveError> {
    client.batch_execute(SAFE_PATH).await?;
    client.batch_execute(SETTINGS).await?;
    let _ = client.batch_execute(NOTICED).await;
    Ok(column(&client.query_one("SELECT pg_backend_pid()", &[]).await?, 0)?)
}

/// Keeps other archivers out until this connection ends. It does nothing else: a month is detached outside
/// transactions.
pub(super) async fn lock(postgres: &Postgres, client: &Client) -> Result<(), ArchiveError> {
    let pid = prepare(client).await?;
    let locked = postgres.naming_blockers(pid, client.batch_execute(LOCK)).await;
    locked.map_err(|error| if error.is_locked() { ArchiveError::busy(&error) } else { error.into() })
}

/// The tables of months that ended at least this long ago, oldest first. Both the server's clock and this host's must
/// say so: by a clock that is ahead, a month may look old that services still write to.
pub(super) async fn partitions(client: &Client, older_than: Duration) -> Result<Vec<Partition>, ArchiveError> {
    let now: SystemTime = column(&client.query_one("SELECT now()", &[]).await?, 0)?;
    let before = now.min(SystemTime::now()).checked_sub(older_than).unwrap_or(SystemTime::UNIX_EPOCH);
    let select = format!(
        "SELECT relname, inhrelid IS NOT NULL, coalesce(inhdetachpending, false), pg_total_relation_size(oid)
        FROM pg_class LEFT JOIN pg_inherits ON inhrelid = oid AND inhparent = 'tollgate.{PARENT}'::regclass
        WHERE relnamespace = 'tollgate'::regnamespace AND relkind = 'r' AND relname ~ '^{PARENT}_[0-9]{{4}}_[0-9]{{2}}$'
        ORDER BY relname"
    );
    let mut found = Vec::new();
    for row in client.query(&select, &[]).await? {
        let (table, has_parent, is_pending): (String, bool, bool) =
            (column(&row, 0)?, column(&row, 1)?, column(&row, 2)?);
        let end = table.strip_prefix(PARENT).and_then(|end| end.strip_prefix('_'));
        let Some(month) = end.and_then(Month::of_table).filter(|month| month.ends() <= before) else { continue };
        let attachment = match (has_parent, is_pending) {
            (false, _) => Attachment::Detached,
            (true, true) => Attachment::Pending,
            (true, false) => Attachment::Attached,
        };
        found.push(Partition { month, table, attachment, bytes: column::<i64>(&row, 3)?.unsigned_abs() });
    }
    Ok(found)
}

/// Eight hexadecimal digits that identify a table: they differ from those of any other table, also on other servers,
/// and from those of a table created again under the same name.
pub(super) async fn source(client: &Client, table: &str) -> Result<String, ArchiveError> {
    let select = "SELECT concat_ws('/', system_identifier, current_database(), to_regclass('tollgate.' || $1)::oid)
        FROM pg_control_system()";
    let identity: String = column(&client.query_one(select, &[&table]).await?, 0)?;
    let mut digits = sha256(identity.as_bytes());
    digits.truncate(8);
    Ok(digits)
}

/// The number of rows in a table.
pub(super) async fn count(client: &Client, table: &str) -> Result<u64, ArchiveError> {
    let row = client.query_whole_table(&format!("SELECT count(*) FROM ONLY tollgate.{table}")).await?;
    Ok(column::<i64>(&row, 0)?.unsigned_abs())
}

/// Refuses a table whose columns aren't those that an archive holds.
pub(super) async fn check_columns(client: &Client, table: &str) -> Result<(), ArchiveError> {
    let select = "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute
        WHERE attrelid = to_regclass('tollgate.' || $1) AND attnum > 0 AND NOT attisdropped";
    let mut found = Vec::new();
    for row in client.query(select, &[&table]).await? {
        found.push((column::<String>(&row, 0)?, column::<String>(&row, 1)?));
    }
    for (name, sql_type) in &found {
        if !COLUMNS.iter().any(|column| column.name == name && column.sql.name() == sql_type) {
            let why = "isn't one that this version of tollgate archives";
            return Err(ArchiveError::refused(format!("{table}: the column {name} {sql_type} {why}")));
        }
    }
    for column in &COLUMNS {
        if !found.iter().any(|(name, _)| column.name == name) {
            return Err(ArchiveError::refused(format!("{table}: the column {} is missing", column.name)));
        }
    }
    Ok(())
}

/// Refuses a table that other objects depend on: they would keep it from being dropped after it was detached.
pub(super) async fn check_dependents(client: &Client, table: &str) -> Result<(), ArchiveError> {
    // Not its own checks and policies, which are dropped with it.
    let select = "SELECT pg_describe_object(classid, objid, objsubid) FROM pg_depend AS d
        WHERE refclassid = 'pg_class'::regclass AND refobjid = to_regclass('tollgate.' || $1) AND deptype = 'n'
            AND NOT EXISTS (SELECT FROM pg_depend AS own WHERE own.deptype IN ('a', 'i') AND own.refclassid = d.refclassid
                AND (own.classid, own.objid, own.refobjid) = (d.classid, d.objid, d.refobjid))
        ORDER BY 1 LIMIT 1";
    let rows = client.query(select, &[&table]).await?;
    let Some(row) = rows.first() else { return Ok(()) };
    let dependent: String = column(row, 0)?;
    Err(ArchiveError::refused(format!("{table}: can't be dropped, because {dependent} depends on it")))
}

/// Detaches a table from the audit log while that is in use, whatever state an earlier attempt left it in.
pub(super) async fn detach(
    postgres: &Postgres,
    (client, pid): (&Client, i32),
    table: &str,
) -> Result<(), ArchiveError> {
    let how = match attachment(client, table).await? {
        Attachment::Attached => "CONCURRENTLY",
        Attachment::Pending => "FINALIZE",
        Attachment::Detached => return Ok(()),
    };
    let alter = format!("ALTER TABLE tollgate.{PARENT} DETACH PARTITION tollgate.{table} {how}");
    Ok(postgres.naming_blockers(pid, client.alter(&alter)).await?)
}

pub(super) async fn attachment(client: &Client, table: &str) -> Result<Attachment, ArchiveError> {
    let select = "SELECT inhdetachpending FROM pg_inherits WHERE inhrelid = to_regclass('tollgate.' || $1)";
    Ok(match client.query(select, &[&table]).await?.first() {
        None => Attachment::Detached,
        Some(row) if column(row, 0)? => Attachment::Pending,
        Some(_) => Attachment::Attached,
    })
}

/// The value in this column of a row, by its place.
fn column<'r, T: FromSql<'r>>(row: &'r Row, at: usize) -> Result<T, PostgresError> {
    row.try_get(at).map_err(|error| PostgresError::new(&error))
}
