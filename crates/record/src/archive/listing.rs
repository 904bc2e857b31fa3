//! Which months a store has.

use std::collections::{BTreeMap, BTreeSet};
use std::time::SystemTime;

use futures_util::TryStreamExt;
use object_store::path::Path;

use super::directory::Directory;
use super::manifest::part_of;
use super::month::Month;
use super::store::{FOLDER, MANIFEST, Store, on_disk};
use super::{Archive, ArchiveError};

/// The months of an archive.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Listing {
    /// Complete months, and those of a directory whose folders can't be listed. Manifests are not read.
    pub complete: BTreeSet<Month>,
    /// Months with files but no manifest: an archiver is working on them or was killed, or the manifest is lost.
    pub unfinished: BTreeSet<Month>,
    /// Years whose months can't be listed, and why: folders of a directory without permission.
    pub unreadable: BTreeMap<i16, ArchiveError>,
}

impl Listing {
    /// Complete months that, at `now`, have been kept for this many years after their end. They stay until they are
    /// [deleted](Archive::delete).
    #[must_use]
    pub fn expired(&self, now: SystemTime, years: u16) -> BTreeSet<Month> {
        let is_expired = |month: &Month| month.years_after(years).is_some_and(|at| at <= now);
        self.complete.iter().copied().filter(is_expired).collect()
    }

    /// Adds a file of a month, if tollgate made it.
    fn add(&mut self, month: Month, file: &str) {
        if file == MANIFEST {
            self.unfinished.remove(&month);
            self.complete.insert(month);
        } else if part_of(file).is_some() && !self.complete.contains(&month) {
            self.unfinished.insert(month);
        }
    }
}

impl Archive {
    /// Which months there are. Lists the store: some thousand files a request.
    ///
    /// # Errors
    ///
    /// A store that can't be reached or listed at all.
    pub async fn list(&self) -> Result<Listing, ArchiveError> {
        match &self.store {
            Store::Directory(directory) => on_disk(directory, FOLDER.to_owned(), of_directory).await,
            Store::Bucket(bucket) => {
                let mut listing = Listing::default();
                let mut listed = bucket.list(Some(&Path::from(FOLDER)));
                while let Some(object) = listed.try_next().await.map_err(|error| ArchiveError::store(FOLDER, &error))? {
                    let mut words = object.location.as_ref().split('/').skip(1);
                    let year = words.next().and_then(year_of);
                    let month = words.next().zip(year).and_then(|(word, year)| month_of(year, word));
                    if let (Some(month), Some(file), None) = (month, words.next(), words.next()) {
                        listing.add(month, file);
                    }
                }
                Ok(listing)
            }
        }
    }
}

fn of_directory(directory: &Directory, folder: &str) -> std::io::Result<Listing> {
    let mut listing = Listing::default();
    for entry in directory.list(folder)? {
        let Some(year) = year_of(&entry.name) else { continue };
        let folder = format!("{folder}/{}", entry.name);
        let months = match directory.list(&folder) {
            Ok(months) => months,
            Err(error) => {
                listing.unreadable.insert(year, ArchiveError::file(&folder, &error));
                continue;
            }
        };
        for entry in months {
            let Some(month) = month_of(year, &entry.name) else { continue };
            match directory.list(&format!("{folder}/{}", entry.name)) {
                Ok(files) => files.iter().for_each(|file| listing.add(month, &file.name)),
                // Reading its manifest returns the error.
                Err(_) => drop(listing.complete.insert(month)),
            }
        }
    }
    Ok(listing)
}

/// The year of a folder: `year=2026`.
fn year_of(folder: &str) -> Option<i16> {
    let year = folder.strip_prefix("year=")?;
    year.parse().ok().filter(|number: &i16| format!("{number:04}") == year)
}

/// The month of a folder in that of its year: `month=08`.
fn month_of(year: i16, folder: &str) -> Option<Month> {
    format!("{year:04}-{}", folder.strip_prefix("month=")?).parse().ok()
}
