//! The manifest completes an archive: it lists the files and describes their content.
//!
//! Each byte that is read back is covered by a SHA-256: the manifest has one for each piece of a file, and one for
//! itself.

use std::time::SystemTime;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::bounds::{MOST_BYTES, MOST_BYTES_OF_THE_END};
use super::checksum::{Checksum, Content, sha256};
use super::month::Month;
use super::row::{micros, time};
use super::{ArchiveError, FORMAT};

/// An archive of one month, as its manifest describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ArchivedMonth {
    /// The month.
    pub month: Month,
    /// The number of rows.
    pub rows: u64,
    /// Total bytes of all files.
    pub bytes: u64,
    /// The checksum of the rows, in hexadecimal.
    pub checksum: String,
    /// The number of files.
    pub parts: usize,
    /// The time of the first row; `None` if there are no rows.
    pub first_at: Option<SystemTime>,
    /// The time of the last row; `None` if there are no rows.
    pub last_at: Option<SystemTime>,
    /// When the archive was made.
    pub made_at: SystemTime,
    /// The version of tollgate that made it.
    pub made_by: String,
}

impl ArchivedMonth {
    /// When the archive has been kept for this many years, counted from the end of the month.
    #[must_use]
    pub fn expires(&self, years: u16) -> Option<SystemTime> {
        self.month.years_after(years)
    }
}

/// The most bytes of a manifest: enough for some ten thousand files of a million rows.
pub(super) const MANIFEST_BYTES: u64 = 16 << 20;

/// The manifest as it is stored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Manifest {
    format: u32,
    table: String,
    month: String,
    rows: u64,
    bytes: u64,
    checksum: String,
    first_at: Option<String>,
    last_at: Option<String>,
    made_at: String,
    made_by: String,
    pub(super) parts: Vec<Part>,
    /// The hash of this JSON, as tollgate writes it, with an empty text here.
    sha256: String,
}

/// One of the archive's files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Part {
    pub(super) name: String,
    pub(super) rows: u64,
    pub(super) bytes: u64,
    /// The checksum of its rows.
    pub(super) checksum: String,
    /// In order, one after the other: its groups of rows, and what follows them. One group can be read and checked
    /// without the rest of the file.
    pub(super) pieces: Vec<Piece>,
}

/// A piece of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Piece {
    pub(super) bytes: u64,
    /// The hash of these bytes.
    pub(super) sha256: String,
}

/// `part-0-6a1f0c2b9d4e8f37.parquet`: the file's number, and the attempt that made it, so that no attempt writes to
/// another's files. An attempt begins with eight digits that identify the table, so that files left by other attempts
/// at that table are recognised.
pub(super) fn part_name(number: usize, attempt: &str) -> String {
    format!("part-{number}-{attempt}.parquet")
}

/// The number and the attempt in a file's name, if tollgate made it.
pub(super) fn part_of(name: &str) -> Option<(usize, &str)> {
    let (number, attempt) = name.strip_prefix("part-")?.strip_suffix(".parquet")?.split_once('-')?;
    let is_attempt = attempt.len() == 16 && attempt.bytes().all(|byte| byte.is_ascii_hexdigit());
    let is_number = number.bytes().all(|byte| byte.is_ascii_digit());
    Some((number.parse().ok().filter(|_| is_attempt && is_number)?, attempt))
}

impl Part {
    /// A file with these bytes, whose groups of rows have these `ends`.
    pub(super) fn new(name: String, content: Content, bytes: &[u8], mut ends: Vec<usize>) -> Self {
        ends.push(bytes.len());
        let mut begin = 0;
        let piece = |end| {
            let piece = &bytes[std::mem::replace(&mut begin, end)..end];
            Piece { bytes: piece.len() as u64, sha256: sha256(piece) }
        };
        Self {
            name,
            rows: content.rows,
            bytes: bytes.len() as u64,
            checksum: content.checksum.to_string(),
            pieces: ends.into_iter().map(piece).collect(),
        }
    }

    /// Where a piece begins.
    pub(super) fn begin_of(&self, piece: usize) -> u64 {
        self.pieces.iter().take(piece).map(|piece| piece.bytes).sum()
    }

    /// The number of its groups: of its pieces, all but the last.
    pub(super) fn groups(&self) -> usize {
        self.pieces.len().saturating_sub(1)
    }

    /// Checks that the pieces add up to the file, and that none would take too much memory.
    fn check(&self) -> Result<(), ArchiveError> {
        let name = &self.name;
        let bytes = self.pieces.iter().fold(0, |sum: u64, piece| sum.saturating_add(piece.bytes));
        let Some(end) = self.pieces.last().filter(|_| bytes == self.bytes) else {
            return Err(ArchiveError::damaged(format!(
                "{name}: the sizes of its pieces don't add up to that of the file"
            )));
        };
        let too_large = |most: u64, got: u64| {
            Err(ArchiveError::damaged(format!("{name}: expected pieces of at most {most} bytes, got {got}")))
        };
        if end.bytes > MOST_BYTES_OF_THE_END {
            return too_large(MOST_BYTES_OF_THE_END, end.bytes);
        }
        match self.pieces.iter().map(|piece| piece.bytes).max() {
            Some(largest) if largest > MOST_BYTES => too_large(MOST_BYTES, largest),
            _ => Ok(()),
        }
    }

    /// The count and checksum of its rows, if the checksum can be parsed.
    pub(super) fn content(&self) -> Option<Content> {
        let checksum = self.checksum.parse::<Checksum>().ok()?;
        Some(Content { rows: self.rows, checksum })
    }
}

impl Manifest {
    /// The manifest of exported parts; `times` are those of the first and the last row, in microseconds.
    pub(super) fn new(
        month: Month,
        table: &str,
        parts: Vec<Part>,
        times: Option<(i64, i64)>,
    ) -> Result<Self, ArchiveError> {
        let content = parts.iter().filter_map(Part::content).fold(Content::default(), Content::and);
        let mut manifest = Self {
            format: FORMAT,
            table: table.to_owned(),
            month: month.to_string(),
            rows: content.rows,
            bytes: parts.iter().map(|part| part.bytes).sum(),
            checksum: content.checksum.to_string(),
            first_at: times.map(|(first, _)| text(time(first))),
            last_at: times.map(|(_, last)| text(time(last))),
            made_at: text(SystemTime::now()),
            made_by: concat!("tollgate ", env!("CARGO_PKG_VERSION")).to_owned(),
            parts,
            sha256: String::new(),
        };
        manifest.sha256 = manifest.hash()?;
        // Checked now, before any table is dropped.
        manifest.parts.iter().try_for_each(Part::check)?;
        Ok(manifest)
    }

    /// The hash of all but this hash.
    fn hash(&self) -> Result<String, ArchiveError> {
        Ok(sha256(&Self { sha256: String::new(), ..self.clone() }.as_json()?))
    }

    /// Parses a month's manifest, which must be consistent.
    pub(super) fn read(month: Month, bytes: &[u8]) -> Result<Self, ArchiveError> {
        let wrong = |why: &str| ArchiveError::damaged(format!("manifest: {why}")).of(month);
        let manifest: Self =
            serde_json::from_slice(bytes).map_err(|error| wrong("not a manifest of format 1").caused_by(error))?;
        if manifest.format != FORMAT {
            let got = manifest.format;
            return Err(ArchiveError::refused(format!("manifest: expected format {FORMAT}, got {got}")).of(month));
        }
        if manifest.month != month.to_string() {
            return Err(wrong("made for another month"));
        }
        let expected = manifest.hash()?;
        if manifest.sha256 != expected {
            let error = format!("manifest: its content has the SHA-256 {expected}, not the one it names");
            return Err(ArchiveError::damaged(error).of(month));
        }
        let contents: Option<Vec<_>> = manifest.parts.iter().map(Part::content).collect();
        let content = contents.map(|contents| contents.into_iter().fold(Content::default(), Content::and));
        let bytes: u64 = manifest.parts.iter().fold(0, |sum, part| sum.saturating_add(part.bytes));
        let names = manifest
            .parts
            .iter()
            .enumerate()
            .all(|(at, part)| part_of(&part.name).is_some_and(|(number, _)| number == at));
        if content != manifest.content() || content.is_none() || bytes != manifest.bytes || !names {
            return Err(wrong("its totals or file names are inconsistent"));
        }
        manifest.parts.iter().try_for_each(Part::check).map_err(|error| error.of(month))?;
        Ok(manifest)
    }

    /// The count and checksum of the rows, if the checksum can be parsed.
    pub(super) fn content(&self) -> Option<Content> {
        let checksum = self.checksum.parse::<Checksum>().ok()?;
        Some(Content { rows: self.rows, checksum })
    }

    /// Whether this names a file that was made from the same table and that the manifest doesn't list.
    pub(super) fn leaves(&self, name: &str) -> bool {
        let source = |name| part_of(name).map(|(_, attempt)| attempt.get(..8));
        let is_named = self.parts.iter().any(|part| part.name == name);
        let of = self.parts.first().and_then(|part| source(&part.name));
        !is_named && of.is_some() && source(name) == of
    }

    pub(super) fn rows(&self) -> u64 {
        self.rows
    }

    pub(super) fn as_json(&self) -> Result<Vec<u8>, ArchiveError> {
        let json = serde_json::to_vec_pretty(self);
        let mut json = json.map_err(|error| ArchiveError::refused(format!("manifest: {error}")))?;
        json.push(b'\n');
        Ok(json)
    }

    pub(super) fn describe(&self, month: Month) -> ArchivedMonth {
        ArchivedMonth {
            month,
            rows: self.rows,
            bytes: self.bytes,
            checksum: self.checksum.clone(),
            parts: self.parts.len(),
            first_at: self.first_at.as_deref().and_then(parsed),
            last_at: self.last_at.as_deref().and_then(parsed),
            made_at: parsed(&self.made_at).unwrap_or(SystemTime::UNIX_EPOCH),
            made_by: self.made_by.clone(),
        }
    }
}

/// In UTC, to the microsecond.
fn text(time: SystemTime) -> String {
    Timestamp::from_microsecond(micros(time)).map(|time| format!("{time:.6}")).unwrap_or_default()
}

fn parsed(text: &str) -> Option<SystemTime> {
    text.parse::<Timestamp>().ok().map(SystemTime::from)
}
