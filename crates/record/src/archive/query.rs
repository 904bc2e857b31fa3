//! Reads one user's rows from an archive: the end of each file, and the groups that may have the user. A piece's
//! SHA-256 is checked before anything in it is used.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::SystemTime;

use parquet::file::metadata::{ParquetMetaData, RowGroupMetaData};

use super::columns::Group;
use super::manifest::Part;
use super::month::Month;
use super::part::{BATCH_ROWS, group};
use super::row::{ArchivedRow, Field, USER, micros, row_time};
use super::{Archive, ArchiveError};
use crate::history::record::{MOST_BYTES, text};

/// One user's rows in an archive, by month and then by time. They are read on demand.
#[derive(Debug)]
pub struct Rows {
    archive: Archive,
    user: String,
    /// Microseconds.
    times: Range<i64>,
    /// The months still to be read; `None` before the first call.
    months: Option<VecDeque<Month>>,
    /// Errors about years within the times that can't be listed.
    unreadable: VecDeque<ArchiveError>,
    parts: VecDeque<(Month, Part)>,
    file: Option<File>,
    open: Option<Open>,
}

/// A file whose groups are being searched.
#[derive(Debug)]
struct File {
    month: Month,
    part: Part,
    described: ParquetMetaData,
    next: usize,
}

/// A group that may have rows of the user.
struct Open {
    /// The file's name.
    name: String,
    month: Month,
    group: Group,
    /// Rows that weren't read yet.
    rest: usize,
}

impl Archive {
    /// One user's archived rows, from one time (inclusive) to another (exclusive). Reads nothing yet.
    ///
    /// ```no_run
    /// # async fn example() -> Result<(), tollgate_record::archive::ArchiveError> {
    /// use tollgate_record::archive::Archive;
    ///
    /// let mut rows = Archive::open("s3://audit-logs/tollgate")?.query("42", None, None);
    /// while let Some(rows) = rows.next().await? {
    ///     rows.iter().for_each(|row| println!("{:?} {}", row.at, row.decision));
    /// }
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn query(&self, user: &str, from: Option<SystemTime>, to: Option<SystemTime>) -> Rows {
        Rows {
            archive: self.clone(),
            user: text(user.as_bytes(), MOST_BYTES).into(),
            times: from.map_or(i64::MIN, micros)..to.map_or(i64::MAX, micros),
            months: None,
            unreadable: VecDeque::new(),
            parts: VecDeque::new(),
            file: None,
            open: None,
        }
    }
}

impl Rows {
    /// The next rows, some thousands at most; `None` when all were read. Holds one group of rows in memory, of at most
    /// 64 MB as stored and 64 MB decompressed, whatever the file is.
    ///
    /// # Errors
    ///
    /// A store that can't be reached: calling again retries. A file that is missing, can't be read or isn't what its
    /// manifest says: calling again continues with the next one.
    pub async fn next(&mut self) -> Result<Option<Vec<ArchivedRow>>, ArchiveError> {
        if self.months.is_none() {
            self.list().await?;
        }
        if let Some(error) = self.unreadable.pop_front() {
            return Err(error);
        }
        let read = self.read().await;
        if read.as_ref().is_err_and(|error| !error.is_unreachable()) {
            (self.open, self.file) = (None, None);
            // If a month's manifest can't be read, none of its files are known, so the month is skipped.
            if self.parts.pop_front().is_none() {
                self.months.as_mut().and_then(VecDeque::pop_front);
            }
        }
        read
    }

    async fn read(&mut self) -> Result<Option<Vec<ArchivedRow>>, ArchiveError> {
        loop {
            if let Some(open) = &mut self.open {
                match open.read(self.user.as_bytes(), &self.times)? {
                    Some(rows) if rows.is_empty() => {}
                    Some(rows) => return Ok(Some(rows)),
                    None => self.open = None,
                }
            } else if let Some(file) = &mut self.file {
                if file.next < file.described.num_row_groups() {
                    self.open = file.group(&self.archive, self.user.as_bytes()).await?;
                    file.next += 1;
                } else {
                    self.file = None;
                    self.parts.pop_front();
                }
            } else if let Some((month, part)) = self.parts.front() {
                self.file = Some(File::open(&self.archive, *month, part).await?);
            } else if !self.next_month().await? {
                return Ok(None);
            }
        }
    }

    /// Queues the months within the times.
    async fn list(&mut self) -> Result<(), ArchiveError> {
        let listing = self.archive.list().await?;
        let overlaps = |month: &Month| {
            let Range { start, end } = month.micros();
            start < self.times.end && self.times.start < end
        };
        let is_asked = |year: i16| (1..=12).any(|month| Month::new(year, month).is_ok_and(|month| overlaps(&month)));
        self.months = Some(listing.complete.into_iter().filter(overlaps).collect());
        self.unreadable =
            listing.unreadable.into_iter().filter(|(year, _)| is_asked(*year)).map(|(_, error)| error).collect();
        Ok(())
    }

    /// Queues the files of the next month.
    async fn next_month(&mut self) -> Result<bool, ArchiveError> {
        let Some(months) = &mut self.months else { return Ok(false) };
        let Some(month) = months.front().copied() else { return Ok(false) };
        // A month deleted meanwhile has no rows.
        if let Some((manifest, _)) = self.archive.manifest(month).await? {
            self.parts.extend(manifest.parts.into_iter().map(|part| (month, part)));
        }
        months.pop_front();
        Ok(true)
    }
}

impl File {
    async fn open(archive: &Archive, month: Month, part: &Part) -> Result<Self, ArchiveError> {
        let described = archive.metadata(month, part).await.map_err(|error| error.of(month))?;
        Ok(Self { month, part: part.clone(), described, next: 0 })
    }

    /// The next group, if the user may be in it.
    async fn group(&self, archive: &Archive, user: &[u8]) -> Result<Option<Open>, ArchiveError> {
        let described = self.described.row_group(self.next);
        if !may_have(described, user) {
            return Ok(None);
        }
        let piece = archive.piece(self.month, &self.part, self.next).await.map_err(|error| error.of(self.month))?;
        let name = self.part.name.clone();
        let group = group(&Arc::new(piece), described)
            .map_err(|error| ArchiveError::unreadable(&name, &error).of(self.month))?;
        Ok(Some(Open {
            name,
            month: self.month,
            group,
            rest: usize::try_from(described.num_rows()).unwrap_or_default(),
        }))
    }
}

/// Whether a user sorts between a group's first and last user.
fn may_have(group: &RowGroupMetaData, user: &[u8]) -> bool {
    let Some(statistics) = group.column(USER).statistics() else { return true };
    let is_before = statistics.min_bytes_opt().is_some_and(|least| user < least);
    let is_after = statistics.max_bytes_opt().is_some_and(|greatest| user > greatest);
    !is_before && !is_after
}

impl Open {
    /// The user's rows among the next, within these times; `None` if the group has no more.
    fn read(&mut self, user: &[u8], times: &Range<i64>) -> Result<Option<Vec<ArchivedRow>>, ArchiveError> {
        let rows = self.rest.min(BATCH_ROWS);
        if rows == 0 {
            return Ok(None);
        }
        let read = self.group.read(rows);
        let read = read.map_err(|error| ArchiveError::unreadable(&self.name, &error).of(self.month))?;
        self.rest -= rows;
        let mut found = Vec::new();
        read.each(|row| {
            if row[USER] == Field::Text(user) && row_time(row).is_some_and(|at| times.contains(&at)) {
                found.push(ArchivedRow::of(row));
            }
        });
        Ok(Some(found))
    }
}

impl std::fmt::Debug for Open {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Open").field("name", &self.name).field("rest", &self.rest).finish_non_exhaustive()
    }
}
