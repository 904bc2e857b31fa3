//! Reads one user's rows from an archive: the end of each file, the users' column of the groups that may have the user,
//! and all columns of those that do.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::SystemTime;

use bytes::Bytes;
use parquet::file::metadata::{ParquetMetaData, RowGroupMetaData};

use super::columns::{Group, read_texts};
use super::manifest::Part;
use super::month::Month;
use super::part::{BATCH_ROWS, Pieces, column, columns, metadata, range};
use super::row::{ArchivedRow, USER, micros, row_time};
use super::{Archive, ArchiveError};
use crate::history::record::{MOST_BYTES, text};

/// How much of a file's end is read at first: enough for the metadata of some ten groups.
const END: u64 = 64 << 10;

/// One user's rows in an archive, by month and then by time. They are read on demand.
#[derive(Debug)]
pub struct Rows {
    archive: Archive,
    user: String,
    /// Microseconds.
    times: Range<i64>,
    /// The months still to be read; `None` before the first call.
    months: Option<VecDeque<Month>>,
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

/// A group that has rows of the user.
struct Open {
    /// The file's name.
    name: String,
    group: Group,
    at: usize,
    ranges: VecDeque<Range<usize>>,
}

impl Archive {
    /// One user's archived rows, from one time (inclusive) to another (exclusive). Reads nothing yet.
    ///
    /// ```no_run
    /// # async fn example() -> Result<(), tollgate::archive::ArchiveError> {
    /// use tollgate::archive::Archive;
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
            parts: VecDeque::new(),
            file: None,
            open: None,
        }
    }
}

impl Rows {
    /// The next rows, some thousands at most; `None` when all were read.
    ///
    /// # Errors
    ///
    /// A store that can't be reached: calling again retries. A file that is missing or can't be read: calling again
    /// continues with the next one.
    pub async fn next(&mut self) -> Result<Option<Vec<ArchivedRow>>, ArchiveError> {
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
                match open.read(&self.times)? {
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

    /// Queues the files of the next month.
    async fn next_month(&mut self) -> Result<bool, ArchiveError> {
        let months = match &mut self.months {
            Some(months) => months,
            none => {
                let all = self.archive.months().await?;
                let overlaps = |month: &Month| {
                    let Range { start, end } = month.micros();
                    start < self.times.end && self.times.start < end
                };
                none.insert(all.into_iter().filter(overlaps).collect())
            }
        };
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
        let (name, length) = (&part.name, part.bytes);
        let wrong = |error| ArchiveError::unreadable(name, &error).of(month);
        let end = archive.get_range(month, name, length.saturating_sub(END)..length).await?;
        let described = match metadata(&end, length).map_err(wrong)? {
            Ok(described) => described,
            Err(needed) => {
                let begin = length.saturating_sub(needed as u64);
                let end = archive.get_range(month, name, begin..length).await?;
                let cut_short =
                    |_| ArchiveError::damaged(format!("{name}: expected Parquet, got a part of it")).of(month);
                metadata(&end, length).map_err(wrong)?.map_err(cut_short)?
            }
        };
        Ok(Self { month, part: part.clone(), described, next: 0 })
    }

    /// The next group, if the user is in it.
    async fn group(&self, archive: &Archive, user: &[u8]) -> Result<Option<Open>, ArchiveError> {
        let group = self.described.row_group(self.next);
        if !may_have(group, user) {
            return Ok(None);
        }
        let wrong = |error| ArchiveError::unreadable(&self.part.name, &error).of(self.month);
        let (begin, length) = group.column(USER).byte_range();
        let users = self.piece(archive, begin..begin.saturating_add(length)).await?;
        let rows = usize::try_from(group.num_rows()).unwrap_or_default();
        let users = column(&users, group, USER).and_then(|reader| read_texts(reader, USER, rows)).map_err(wrong)?;
        let mut ranges: VecDeque<Range<usize>> = VecDeque::new();
        for (at, _) in
            users.iter().enumerate().filter(|(_, name)| name.as_ref().is_some_and(|name| name.data() == user))
        {
            match ranges.back_mut() {
                Some(range) if range.end == at => range.end += 1,
                _ => ranges.push_back(at..at + 1),
            }
        }
        if ranges.is_empty() {
            return Ok(None);
        }
        let whole = self.piece(archive, range(group)).await?;
        let group = columns(&whole, group).map_err(wrong)?;
        let name = format!("{}/{}", self.month.folder(), self.part.name);
        Ok(Some(Open { name, group, at: 0, ranges }))
    }

    async fn piece(&self, archive: &Archive, range: Range<u64>) -> Result<Arc<Pieces>, ArchiveError> {
        let begin = range.start;
        let bytes: Bytes = archive.get_range(self.month, &self.part.name, range).await?;
        Ok(Arc::new(Pieces::new(self.part.bytes, vec![(begin, bytes)])))
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
    /// The next rows within these times; `None` if the group has no more.
    fn read(&mut self, times: &Range<i64>) -> Result<Option<Vec<ArchivedRow>>, ArchiveError> {
        let Some(range) = self.ranges.front_mut() else { return Ok(None) };
        let rows = range.len().min(BATCH_ROWS);
        let skipped = self.group.skip(range.start - self.at);
        let read = skipped.and_then(|()| self.group.read(rows));
        let read = read.map_err(|error| ArchiveError::unreadable(&self.name, &error))?;
        range.start += rows;
        self.at = range.start;
        if range.start >= range.end {
            self.ranges.pop_front();
        }
        let mut found = Vec::new();
        read.each(|row| {
            if row_time(row).is_some_and(|at| times.contains(&at)) {
                found.push(ArchivedRow::of(row));
            }
        });
        Ok(Some(found))
    }
}

impl std::fmt::Debug for Open {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Open").field("name", &self.name).field("ranges", &self.ranges).finish_non_exhaustive()
    }
}
