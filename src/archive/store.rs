//! The store of archives: opening it by address, and the objects of each month.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path as FilePath, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use futures_util::TryStreamExt;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::prefix::PrefixStore;
use object_store::{ClientConfigKey, Error, ObjectMeta, ObjectStore, ObjectStoreExt, PutMode, PutPayload, RetryConfig};
use tokio::task::spawn_blocking;

use super::manifest::{Manifest, Part, part_of};
use super::month::Month;
use super::{Archive, ArchiveError};

const EXPECTED: &str = "expected file:///a/directory or s3://bucket/prefix";
/// How often a request is retried, and for how long.
const RETRIES: usize = 5;
const RETRIED_FOR: Duration = Duration::from_secs(60);
/// How long a request may take unless AWS_TIMEOUT says otherwise: enough for a file of 64 MB at two megabits a second.
const REQUEST_WITHIN: &str = "300s";
const FOLDER: &str = "audit";

pub(super) fn open(url: &str) -> Result<Archive, ArchiveError> {
    // An address that can't be read isn't repeated: it may contain credentials.
    let (scheme, rest) = url.split_once("://").ok_or_else(|| input("one without a scheme"))?;
    if rest.contains(['?', '#']) {
        return Err(input("one with settings, which the environment says"));
    }
    match scheme {
        "file" => directory(rest),
        "s3" => bucket(rest),
        _ => Err(input("another scheme")),
    }
}

fn input(got: &str) -> ArchiveError {
    ArchiveError::input(format!("archive: {EXPECTED}, got {got}"))
}

fn directory(path: &str) -> Result<Archive, ArchiveError> {
    if !path.starts_with('/') {
        return Err(input("a path that isn't from the root"));
    }
    // Never created here: if a disk should be mounted and isn't, rows would go to another.
    if !FilePath::new(path).is_dir() {
        return Err(ArchiveError::input(format!("archive: expected a directory, got none at {path}")));
    }
    let store = LocalFileSystem::new_with_prefix(path).map_err(|error| ArchiveError::store(path, &error))?;
    // Without it, files might pass being read back before they reach the disk, and then the table is dropped.
    let store = store.with_fsync(true);
    Ok(Archive { store: Arc::new(store), directory: Some(path.into()), address: format!("file://{path}") })
}

fn bucket(rest: &str) -> Result<Archive, ArchiveError> {
    if rest.contains('@') {
        return Err(input("one with credentials, which the environment says"));
    }
    let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
    if bucket.is_empty() {
        return Err(input("no bucket"));
    }
    if !bucket.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte)) {
        return Err(input("a bucket that S3 can't have"));
    }
    check_environment()?;
    let mut builder = AmazonS3Builder::from_env().with_bucket_name(bucket);
    if std::env::var_os("AWS_TIMEOUT").is_none() {
        builder = builder.with_config(AmazonS3ConfigKey::Client(ClientConfigKey::Timeout), REQUEST_WITHIN);
    }
    let retry = RetryConfig { max_retries: RETRIES, retry_timeout: RETRIED_FOR, ..RetryConfig::default() };
    let address = format!("s3://{rest}");
    let store = builder.with_retry(retry).build().map_err(|error| ArchiveError::settings(&error))?;
    let prefix = Path::parse(prefix.trim_end_matches('/'));
    let prefix = prefix.map_err(|error| input("a prefix that S3 can't have").caused_by(error))?;
    let store: Arc<dyn ObjectStore> =
        if prefix.as_ref().is_empty() { Arc::new(store) } else { Arc::new(PrefixStore::new(store, prefix)) };
    Ok(Archive { store, directory: None, address })
}

/// Variables whose values become part of requests. Secrets from files often end with a line break, which no header can
/// hold.
const SENT: [&str; 8] = [
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_TOKEN",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "AWS_ENDPOINT",
    "AWS_ENDPOINT_URL",
];

fn check_environment() -> Result<(), ArchiveError> {
    for (name, value) in std::env::vars_os() {
        let (name, value) = (name.to_string_lossy(), value.to_string_lossy());
        if name == "AWS_CONDITIONAL_PUT" && value != "etag" {
            return Err(ArchiveError::input(format!("archive: {name}: expected etag, got another")));
        }
        if !SENT.contains(&&*name) {
            continue;
        }
        if value.contains(|character: char| character.is_whitespace() || character.is_control()) {
            return Err(ArchiveError::input(format!("archive: {name}: expected no white space, got some")));
        }
        let is_url = value.starts_with("http://") || value.starts_with("https://");
        if ["AWS_ENDPOINT", "AWS_ENDPOINT_URL"].contains(&&*name) && !is_url {
            return Err(ArchiveError::input(format!("archive: {name}: expected http:// or https://, got neither")));
        }
    }
    Ok(())
}

/// `audit/year=2026/month=08/part-0.parquet`
fn place(month: Month, name: &str) -> Path {
    Path::from(format!("{FOLDER}/{}/{name}", month.folder()))
}

const MANIFEST: &str = "manifest.json";
/// How long files that no manifest names are kept: younger ones may belong to a running archiver.
pub(super) const LEFT_FOR: Duration = Duration::from_secs(86_400);

fn is_older(object: &ObjectMeta, age: Duration) -> bool {
    age.is_zero() || SystemTime::from(object.last_modified) + age < SystemTime::now()
}

impl Archive {
    /// Complete months; their manifests need not be readable. Lists the store.
    ///
    /// # Errors
    ///
    /// A store that can't be reached.
    pub async fn months(&self) -> Result<BTreeSet<Month>, ArchiveError> {
        Ok(self.folders().await?.into_iter().filter(|(_, is_complete)| *is_complete).map(|(month, _)| month).collect())
    }

    /// Months with files but no manifest: an archiver is working on them or was killed, or the manifest is lost. Lists
    /// the store.
    ///
    /// # Errors
    ///
    /// A store that can't be reached.
    pub async fn unfinished(&self) -> Result<BTreeSet<Month>, ArchiveError> {
        Ok(self.folders().await?.into_iter().filter(|(_, is_complete)| !is_complete).map(|(month, _)| month).collect())
    }

    /// Months that have any file made by tollgate, and whether they have a manifest.
    async fn folders(&self) -> Result<BTreeMap<Month, bool>, ArchiveError> {
        let mut listed = self.store.list(Some(&Path::from(FOLDER)));
        let mut months = BTreeMap::new();
        while let Some(object) = listed.try_next().await.map_err(|error| ArchiveError::store(FOLDER, &error))? {
            let path = object.location.as_ref();
            let mut words = path.split('/').skip(1);
            let year = words.next().and_then(|word| word.strip_prefix("year="));
            let month = words.next().and_then(|word| word.strip_prefix("month="));
            let (Some(year), Some(month), Some(file)) = (year, month, words.next()) else { continue };
            let is_manifest = file == MANIFEST;
            if let Ok(month) = format!("{year}-{month}").parse::<Month>()
                && (is_manifest || part_of(file).is_some())
            {
                *months.entry(month).or_default() |= is_manifest;
            }
        }
        Ok(months)
    }

    /// A month's manifest and its bytes; `None` if there is none.
    pub(super) async fn manifest(&self, month: Month) -> Result<Option<(Manifest, Bytes)>, ArchiveError> {
        match self.get(month, MANIFEST).await {
            Ok(bytes) => Ok(Some((Manifest::read(month, &bytes)?, bytes))),
            Err(error) if error.is_missing() => Ok(None),
            Err(error) => Err(error),
        }
    }

    pub(super) async fn has_manifest(&self, month: Month) -> Result<bool, ArchiveError> {
        let place = place(month, MANIFEST);
        match self.store.head(&place).await {
            Ok(_) => Ok(true),
            Err(Error::NotFound { .. }) => Ok(false),
            Err(error) => Err(ArchiveError::store(place.as_ref(), &error)),
        }
    }

    pub(super) async fn get(&self, month: Month, name: &str) -> Result<Bytes, ArchiveError> {
        let place = place(month, name);
        let got = async { self.store.get(&place).await?.bytes().await };
        got.await.map_err(|error| ArchiveError::store(place.as_ref(), &error))
    }

    pub(super) async fn get_range(&self, month: Month, name: &str, range: Range<u64>) -> Result<Bytes, ArchiveError> {
        let place = place(month, name);
        let got = self.store.get_range(&place, range).await;
        got.map_err(|error| ArchiveError::store(place.as_ref(), &error))
    }

    /// Puts an object that doesn't exist yet. An existing one must be identical: then the reply to this very request
    /// was lost, and the request sent again.
    pub(super) async fn put(&self, month: Month, name: &str, bytes: Bytes) -> Result<(), ArchiveError> {
        let place = place(month, name);
        let payload = PutPayload::from(bytes.clone());
        let put = self.store.put_opts(&place, payload, PutMode::Create.into()).await;
        let Err(error) = put else { return Ok(()) };
        match error {
            Error::AlreadyExists { .. } if self.get(month, name).await? == bytes => return Ok(()),
            Error::NotFound { .. } => return Err(ArchiveError::nowhere(&self.address)),
            _ => {}
        }
        Err(ArchiveError::store(place.as_ref(), &error))
    }

    /// Puts a manifest, deleting the existing one first if it is to be replaced. Nothing is ever overwritten: a late
    /// manifest, from an archiver that is no longer the only one running, is refused.
    pub(super) async fn put_manifest(
        &self,
        month: Month,
        manifest: &Manifest,
        instead: bool,
    ) -> Result<(), ArchiveError> {
        let bytes = Bytes::from(manifest.as_json()?);
        if instead {
            self.delete_manifest(month).await?;
        }
        self.put(month, MANIFEST, bytes).await
    }

    /// The files of a month that tollgate made, except its manifest, by name.
    async fn parts(&self, month: Month) -> Result<BTreeMap<String, ObjectMeta>, ArchiveError> {
        let folder = place(month, "");
        let listed = self.store.list(Some(&folder)).try_collect::<Vec<_>>().await;
        let listed = listed.map_err(|error| ArchiveError::store(folder.as_ref(), &error))?;
        let named = listed.into_iter().filter_map(|object| {
            let name = object.location.as_ref().strip_prefix(folder.as_ref())?.strip_prefix('/')?;
            part_of(name)?;
            Some((name.to_owned(), object))
        });
        Ok(named.collect())
    }

    /// Files of a month that its manifest doesn't name: left by interrupted or replaced attempts.
    pub(super) async fn unnamed(&self, month: Month, manifest: &Manifest) -> Result<Vec<String>, ArchiveError> {
        let names = self.parts(month).await?.into_keys();
        Ok(names.filter(|name| manifest.parts.iter().all(|part| part.name != *name)).collect())
    }

    /// Deletes files of at least this age left by attempts at the table that this archive was made from: the archive
    /// was compared with all of that table's rows. Files from another table may be the only ones with their rows.
    pub(super) async fn remove_leftovers(&self, month: Month, age: Duration) -> Result<(), ArchiveError> {
        let listed = self.parts(month).await?;
        // In this order: a manifest put meanwhile may name files that aren't listed.
        let Some((manifest, _)) = self.manifest(month).await? else { return Ok(()) };
        let is_whole = |part: &Part| listed.get(&part.name).is_some_and(|object| object.size == part.bytes);
        if !manifest.parts.iter().all(is_whole) {
            return Ok(());
        }
        for (name, object) in &listed {
            if manifest.leaves(name) && is_older(object, age) {
                self.delete_object(&object.location).await?;
            }
        }
        Ok(())
    }

    /// Deletes files of a month chosen by name.
    pub(super) async fn remove(
        &self,
        month: Month,
        age: Duration,
        which: impl Fn(&str) -> bool,
    ) -> Result<(), ArchiveError> {
        for (name, object) in self.parts(month).await? {
            if which(&name) && is_older(&object, age) {
                self.delete_object(&object.location).await?;
            }
        }
        Ok(())
    }

    /// Checks that this manifest and all the files it names are still there.
    pub(super) async fn confirm(&self, month: Month, manifest: &Manifest) -> Result<(), ArchiveError> {
        let gone =
            |name: &str| ArchiveError::damaged(format!("{name}: expected it as it was put, got another or none"));
        if !self.manifest(month).await?.is_some_and(|(now, _)| now == *manifest) {
            return Err(gone(MANIFEST));
        }
        for part in &manifest.parts {
            let place = place(month, &part.name);
            let found = self.store.head(&place).await;
            let found = found.map_err(|error| ArchiveError::store(place.as_ref(), &error))?;
            if found.size != part.bytes {
                return Err(gone(&part.name));
            }
        }
        Ok(())
    }

    /// Removes files that an archiver was writing to a directory when it was killed: `part-0-....parquet#1`. The store
    /// doesn't list these.
    pub(super) async fn sweep(&self, month: Month) -> Result<(), ArchiveError> {
        let Some(folder) = self.folder(month) else { return Ok(()) };
        let swept = spawn_blocking(move || {
            let files = match std::fs::read_dir(&folder) {
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
                files => files?,
            };
            for file in files {
                let file = file?;
                let name = file.file_name();
                let unfinished = name.to_str().and_then(|name| name.split_once('#'));
                let is_ours = unfinished.is_some_and(|(name, number)| {
                    (name == MANIFEST || part_of(name).is_some()) && number.bytes().all(|byte| byte.is_ascii_digit())
                });
                if is_ours {
                    std::fs::remove_file(file.path())?;
                }
            }
            Ok(())
        });
        swept.await?.map_err(|error: std::io::Error| ArchiveError::refused(format!("archive: {FOLDER}: {error}")))
    }

    /// Flushes to disk the names of a month's files and of the directories above them: an attempt may have created
    /// those and been killed before flushing.
    pub(super) async fn sync(&self, month: Month) -> Result<(), ArchiveError> {
        let (Some(folder), Some(root)) = (self.folder(month), self.directory.clone()) else { return Ok(()) };
        let synced = spawn_blocking(move || {
            let within = folder.ancestors().take_while(|path| path.starts_with(&root));
            within.map(std::fs::File::open).try_for_each(|directory| directory?.sync_all())
        });
        synced.await?.map_err(|error: std::io::Error| ArchiveError::refused(format!("archive: {FOLDER}: {error}")))
    }

    /// The directory of a month's files.
    fn folder(&self, month: Month) -> Option<PathBuf> {
        self.directory.as_ref().map(|directory| directory.join(FOLDER).join(month.folder()))
    }

    pub(super) async fn delete_manifest(&self, month: Month) -> Result<(), ArchiveError> {
        self.delete_object(&place(month, MANIFEST)).await
    }

    /// Deletes an object; a missing one counts as deleted.
    async fn delete_object(&self, place: &Path) -> Result<(), ArchiveError> {
        match self.store.delete(place).await {
            Ok(()) | Err(Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(ArchiveError::store(place.as_ref(), &error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_that_cannot_be_used_is_one_line_without_credentials() {
        for (url, got) in [
            ("", "one without a scheme"),
            ("/var/lib", "one without a scheme"),
            ("gs://sesame/x", "another scheme"),
            ("s3://", "no bucket"),
            ("s3:///x", "no bucket"),
            ("s3://AKIA:sesame@bucket/x", "one with credentials, which the environment says"),
            ("s3://bucket/x?secret=sesame", "one with settings, which the environment says"),
            ("s3://buc ket/x", "a bucket that S3 can't have"),
            ("s3://bucket/a//b", "a prefix that S3 can't have"),
            ("file://relative/path", "a path that isn't from the root"),
        ] {
            let error = Archive::open(url).expect_err(url);
            assert!(error.is_input() && !error.to_string().contains("sesame"), "{error}");
            assert_eq!(error.to_string(), format!("archive: {EXPECTED}, got {got}"), "{url}");
        }
        let error = Archive::open("file:///nowhere/at/all").expect_err("no directory");
        assert_eq!(error.to_string(), "archive: expected a directory, got none at /nowhere/at/all");
    }
}
