//! A table's rows written to files, in bounded memory.

use parquet::errors::ParquetError;
use tokio::task::spawn_blocking;

use super::checksum::Content;
use super::copy::Copy;
use super::manifest::{Manifest, Part, part_name};
use super::month::Month;
use super::part::{GROUPS, PartWriter};
use super::row::{Field, Row, USER, row_time, time_in};
use super::{Archive, ArchiveError};
use crate::postgres::client::Client;

/// Bytes after which a file is finished early: it is held in memory until it is uploaded.
const PART_BYTES: usize = 64 << 20;
/// How many rows there are between reports of progress.
pub(super) const REPORTED_AFTER: u64 = 4096;

/// The most rows that are named because their texts are cut off.
const MOST_CUT_NAMES: usize = 10;

/// Keeps each user's rows together, ordered by bytes whatever the database's collation, as Parquet's statistics are.
const ORDER: &str = "ORDER BY user_id COLLATE \"C\", at";

/// Writes all rows of a table to new files of a month, and uploads each one when it is full. The attempt is part of
/// their names.
pub(super) async fn export(
    client: &Client,
    archive: &Archive,
    (month, table, attempt): (Month, &str, &str),
    part_rows: u64,
    report: &mut (dyn FnMut(u64) + Send),
) -> Result<Manifest, ArchiveError> {
    let mut copy = Copy::of(client, table, ORDER).await?;
    let mut parts = Vec::new();
    let (mut rows, mut buffer) = (0, Vec::new());
    let mut times: Option<(i64, i64)> = None;
    let mut writer = None;
    while let Some(copied) = copy.next().await? {
        let row = copied.row()?;
        let at = time_in(month, &row)?;
        times = Some(times.map_or((at, at), |(first, last)| (first.min(at), last.max(at))));
        let part: &mut PartWriter = match &mut writer {
            Some(part) => part,
            none => none.insert(PartWriter::new().map_err(|error| unwritable(&error))?),
        };
        part.push(&row, &mut buffer).map_err(|error| unwritable(&error))?;
        rows += 1;
        if rows % REPORTED_AFTER == 0 {
            report(rows);
        }
        let is_last = part.content.rows >= part_rows || part.bytes() >= PART_BYTES || part.groups() >= GROUPS;
        if (is_last || part.is_group_full())
            && let Some(full) = writer.take()
        {
            if is_last {
                parts.push(put(archive, month, part_name(parts.len(), attempt), full).await?);
                report(rows);
            } else {
                writer = Some(write_group(full).await?);
            }
        }
    }
    if let Some(rest) = writer {
        parts.push(put(archive, month, part_name(parts.len(), attempt), rest).await?);
    }
    report(rows);
    Manifest::new(month, &format!("tollgate.{table}"), parts, times)
}

/// On a thread for blocking work.
async fn write_group(mut part: PartWriter) -> Result<PartWriter, ArchiveError> {
    let written = spawn_blocking(move || part.write_group().map(|()| part)).await.map_err(ArchiveError::interrupted)?;
    written.map_err(|error| unwritable(&error))
}

async fn put(archive: &Archive, month: Month, name: String, part: PartWriter) -> Result<Part, ArchiveError> {
    let written = spawn_blocking(move || {
        let content = part.content;
        part.finish().map(|(bytes, ends)| (Part::new(name, content, &bytes, ends), bytes))
    });
    let (part, bytes) = written.await.map_err(ArchiveError::interrupted)?.map_err(|error| unwritable(&error))?;
    archive.put(month, &part.name, bytes).await?;
    Ok(part)
}

fn unwritable(error: &ParquetError) -> ArchiveError {
    ArchiveError::refused(format!("archive: the rows can't be written as Parquet: {error}"))
}

/// The count and checksum of a table's rows, and the names of those whose texts are cut off.
pub(super) async fn content(
    client: &Client,
    table: &str,
    report: &mut (dyn FnMut(u64) + Send),
) -> Result<(Content, Vec<String>), ArchiveError> {
    let mut copy = Copy::of(client, table, "").await?;
    let (mut content, mut buffer, mut cut) = (Content::default(), Vec::new(), Vec::new());
    while let Some(copied) = copy.next().await? {
        let row: Row<'_> = copied.row()?;
        content.add(&row, &mut buffer);
        if copied.is_cut()? && cut.len() < MOST_CUT_NAMES {
            cut.push(name_of(&row));
        }
        if content.rows % REPORTED_AFTER == 0 {
            report(content.rows);
        }
    }
    Ok((content, cut))
}

/// `user "42" at 2026-08-01T12:00:00Z`
fn name_of(row: &Row<'_>) -> String {
    let user = match row[USER] {
        Field::Text(user) => String::from_utf8_lossy(user).chars().take(64).collect(),
        _ => String::new(),
    };
    let at = jiff::Timestamp::from_microsecond(row_time(row).unwrap_or_default()).unwrap_or_default();
    format!("user {user:?} at {at}")
}
