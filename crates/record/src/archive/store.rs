//! The store of archives: opening it by address, and the objects of each month.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path as FilePath;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::path::Path;
use object_store::prefix::PrefixStore;
use object_store::{ClientConfigKey, Error, ObjectStore, ObjectStoreExt, PutMode, PutPayload, RetryConfig};
use tokio::task::spawn_blocking;

use super::directory::{Directory, FileEntry};
use super::manifest::{MANIFEST_BYTES, Manifest, Part, part_of};
use super::month::Month;
use super::{Archive, ArchiveError};

/// Where objects are stored.
#[derive(Clone)]
pub(super) enum Store {
    Directory(Directory),
    Bucket(Arc<dyn ObjectStore>),
}

const EXPECTED: &str = "expected file:///a/directory or s3://bucket/prefix";
/// How often a request is retried, and for how long.
const RETRIES: usize = 5;
const RETRIED_FOR: Duration = Duration::from_secs(60);
/// How long a request may take unless AWS_TIMEOUT says otherwise: enough for a file of 64 MB at two megabits a second.
const REQUEST_WITHIN: &str = "300s";
pub(super) const FOLDER: &str = "audit";

pub(super) fn open(url: &str) -> Result<Archive, ArchiveError> {
    // An address that can't be read isn't repeated: it may contain credentials.
    let (scheme, rest) = url.split_once("://").ok_or_else(|| input("an address without a scheme"))?;
    if rest.contains(['?', '#']) {
        return Err(input("an address with settings, which belong in the environment"));
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
        return Err(input("a relative path"));
    }
    // Never created here: if a disk should be mounted and isn't, rows would go to another.
    if !FilePath::new(path).is_dir() {
        return Err(ArchiveError::input(format!("archive: no directory at {path}: create it, or mount its disk")));
    }
    Ok(Archive { store: Store::Directory(Directory::new(path.into())), address: format!("file://{path}") })
}

fn bucket(rest: &str) -> Result<Archive, ArchiveError> {
    if rest.contains('@') {
        return Err(input("an address with credentials, which belong in the environment"));
    }
    let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
    if bucket.is_empty() {
        return Err(input("an address without a bucket"));
    }
    if !bucket.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte)) {
        return Err(input("an invalid bucket name"));
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
    let prefix = prefix.map_err(|error| input("an invalid prefix").caused_by(error))?;
    let store: Arc<dyn ObjectStore> =
        if prefix.as_ref().is_empty() { Arc::new(store) } else { Arc::new(PrefixStore::new(store, prefix)) };
    Ok(Archive { store: Store::Bucket(store), address })
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
            return Err(ArchiveError::input(format!("archive: {name}: expected etag, got another value")));
        }
        if !SENT.contains(&&*name) {
            continue;
        }
        if value.contains(|character: char| character.is_whitespace() || character.is_control()) {
            return Err(ArchiveError::input(format!(
                "archive: {name}: can't contain white space or control characters"
            )));
        }
        let is_endpoint = ["AWS_ENDPOINT", "AWS_ENDPOINT_URL"].contains(&&*name);
        // An error about an unreachable server would repeat it.
        if is_endpoint && value.contains('@') {
            return Err(ArchiveError::input(format!(
                "archive: {name}: can't contain credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            )));
        }
        let is_url = value.starts_with("http://") || value.starts_with("https://");
        if is_endpoint && !is_url {
            return Err(ArchiveError::input(format!("archive: {name}: must begin with http:// or https://")));
        }
    }
    Ok(())
}

/// `audit/year=2026/month=08/part-0.parquet`
fn place(month: Month, name: &str) -> String {
    format!("{FOLDER}/{}/{name}", month.folder())
}

pub(super) const MANIFEST: &str = "manifest.json";
/// How long files that no manifest names are kept: younger ones may belong to a running archiver.
pub(super) const LEFT_FOR: Duration = Duration::from_secs(86_400);

/// A file of a month.
struct Object {
    bytes: u64,
    modified: SystemTime,
}

impl Object {
    fn is_older(&self, age: Duration) -> bool {
        age.is_zero() || self.modified + age < SystemTime::now()
    }
}

impl Archive {
    /// A month's manifest and its bytes; `None` if there is none.
    pub(super) async fn manifest(&self, month: Month) -> Result<Option<(Manifest, Bytes)>, ArchiveError> {
        let Some(size) = self.size(month, MANIFEST).await.map_err(|error| error.of(month))? else { return Ok(None) };
        if size > MANIFEST_BYTES {
            let expected = format!("manifest: expected at most {MANIFEST_BYTES} bytes, got {size}");
            return Err(ArchiveError::damaged(expected).of(month));
        }
        match self.get_range(month, MANIFEST, 0..size).await {
            Ok(bytes) => Ok(Some((Manifest::read(month, &bytes)?, bytes))),
            Err(error) if error.is_missing() => Ok(None),
            Err(error) => Err(error.of(month)),
        }
    }

    pub(super) fn is_directory(&self) -> bool {
        matches!(self.store, Store::Directory(_))
    }

    /// The bytes of a file; `None` if there is no such file.
    pub(super) async fn size(&self, month: Month, name: &str) -> Result<Option<u64>, ArchiveError> {
        let place = place(month, name);
        let size = match &self.store {
            Store::Directory(directory) => on_disk(directory, place, Directory::size).await,
            Store::Bucket(bucket) => {
                let found = bucket.head(&Path::from(place.as_str())).await;
                found.map(|found| found.size).map_err(|error| ArchiveError::store(&place, &error))
            }
        };
        match size {
            Ok(size) => Ok(Some(size)),
            Err(error) if error.is_missing() => Ok(None),
            Err(error) => Err(error),
        }
    }

    pub(super) async fn get_range(&self, month: Month, name: &str, range: Range<u64>) -> Result<Bytes, ArchiveError> {
        let place = place(month, name);
        match &self.store {
            // S3 has no empty ranges.
            _ if range.is_empty() => Ok(Bytes::new()),
            Store::Directory(directory) => {
                on_disk(directory, place, move |directory, place| directory.read(place, range)).await
            }
            Store::Bucket(bucket) => {
                let got = bucket.get_range(&Path::from(place.as_str()), range).await;
                got.map_err(|error| ArchiveError::store(&place, &error))
            }
        }
    }

    /// Puts an object that doesn't exist yet. An existing one must be identical: then the reply to this request was
    /// lost, and it was sent again.
    pub(super) async fn put(&self, month: Month, name: &str, bytes: Bytes) -> Result<(), ArchiveError> {
        let place = place(month, name);
        let bucket = match &self.store {
            Store::Directory(directory) => {
                let put = on_disk(directory, place, move |directory, place| directory.create(place, &bytes)).await;
                return match put {
                    Err(error) if error.is_missing() => Err(ArchiveError::nowhere(&self.address)),
                    put => put,
                };
            }
            Store::Bucket(bucket) => bucket,
        };
        let payload = PutPayload::from(bytes.clone());
        let put = bucket.put_opts(&Path::from(place.as_str()), payload, PutMode::Create.into()).await;
        let Err(error) = put else { return Ok(()) };
        match error {
            Error::AlreadyExists { .. } if self.has(month, name, &bytes).await? => return Ok(()),
            Error::NotFound { .. } => return Err(ArchiveError::nowhere(&self.address)),
            _ => {}
        }
        Err(ArchiveError::store(&place, &error))
    }

    async fn has(&self, month: Month, name: &str, bytes: &Bytes) -> Result<bool, ArchiveError> {
        let length = bytes.len() as u64;
        let is_as_long = self.size(month, name).await? == Some(length);
        Ok(is_as_long && self.get_range(month, name, 0..length).await? == *bytes)
    }

    /// Puts a manifest, deleting the existing one first if it is to be replaced. Nothing is ever overwritten: a late
    /// manifest, from an archiver that is no longer the only one running, is refused.
    pub(super) async fn put_manifest(
        &self,
        month: Month,
        manifest: &Manifest,
        instead: bool,
    ) -> Result<(), ArchiveError> {
        let json = manifest.as_json()?;
        if json.len() as u64 > MANIFEST_BYTES {
            let why = format!("it would have {} bytes, above the maximum of {MANIFEST_BYTES}", json.len());
            return Err(ArchiveError::refused(format!("manifest: {why}: a larger --part-rows makes fewer files")));
        }
        if instead {
            self.delete_manifest(month).await?;
        }
        self.put(month, MANIFEST, json.into()).await
    }

    /// The files of a month that tollgate made, except its manifest, by name.
    async fn parts(&self, month: Month) -> Result<BTreeMap<String, Object>, ArchiveError> {
        let folder = format!("{FOLDER}/{}", month.folder());
        let mut parts = BTreeMap::new();
        match &self.store {
            Store::Directory(directory) => {
                for FileEntry { name, metadata } in on_disk(directory, folder, Directory::list).await? {
                    if part_of(&name).is_some() && !metadata.is_dir() {
                        let modified = metadata.modified().unwrap_or_else(|_| SystemTime::now());
                        parts.insert(name, Object { bytes: metadata.len(), modified });
                    }
                }
            }
            Store::Bucket(bucket) => {
                let path = Path::from(folder.as_str());
                let listed = bucket.list_with_delimiter(Some(&path)).await;
                for object in listed.map_err(|error| ArchiveError::store(&folder, &error))?.objects {
                    let name = object.location.filename().unwrap_or_default();
                    if part_of(name).is_some() {
                        let found = Object { bytes: object.size, modified: object.last_modified.into() };
                        parts.insert(name.to_owned(), found);
                    }
                }
            }
        }
        Ok(parts)
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
        let is_whole = |part: &Part| listed.get(&part.name).is_some_and(|object| object.bytes == part.bytes);
        if !manifest.parts.iter().all(is_whole) {
            return Ok(());
        }
        for (name, object) in &listed {
            if manifest.leaves(name) && object.is_older(age) {
                self.delete_file(month, name).await?;
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
            if which(&name) && object.is_older(age) {
                self.delete_file(month, &name).await?;
            }
        }
        Ok(())
    }

    /// Checks that this manifest and all the files it names are still there.
    pub(super) async fn confirm(&self, month: Month, manifest: &Manifest) -> Result<(), ArchiveError> {
        let gone = |name: &str| ArchiveError::damaged(format!("{name}: changed or deleted since it was written"));
        if !self.manifest(month).await?.is_some_and(|(now, _)| now == *manifest) {
            return Err(gone(MANIFEST));
        }
        for part in &manifest.parts {
            if self.size(month, &part.name).await? != Some(part.bytes) {
                return Err(gone(&part.name));
            }
        }
        Ok(())
    }

    /// Removes files that an archiver was writing to a directory when it was killed: `part-0-....parquet#1`.
    pub(super) async fn sweep(&self, month: Month) -> Result<(), ArchiveError> {
        let Store::Directory(directory) = &self.store else { return Ok(()) };
        let sweep = |directory: &Directory, folder: &str| {
            for FileEntry { name, .. } in directory.list(folder)? {
                let is_ours = name.split_once('#').is_some_and(|(name, number)| {
                    (name == MANIFEST || part_of(name).is_some()) && number.bytes().all(|byte| byte.is_ascii_digit())
                });
                if is_ours {
                    directory.delete(&format!("{folder}/{name}"))?;
                }
            }
            Ok(())
        };
        on_disk(directory, format!("{FOLDER}/{}", month.folder()), sweep).await
    }

    /// Flushes to disk the names of a month's files and of the directories above them: an attempt may have created
    /// those and been killed before flushing.
    pub(super) async fn sync(&self, month: Month) -> Result<(), ArchiveError> {
        let Store::Directory(directory) = &self.store else { return Ok(()) };
        on_disk(directory, format!("{FOLDER}/{}", month.folder()), Directory::sync).await
    }

    pub(super) async fn delete_manifest(&self, month: Month) -> Result<(), ArchiveError> {
        self.delete_file(month, MANIFEST).await
    }

    /// Deletes a file; a missing one counts as deleted.
    async fn delete_file(&self, month: Month, name: &str) -> Result<(), ArchiveError> {
        let place = place(month, name);
        let deleted = match &self.store {
            Store::Directory(directory) => on_disk(directory, place, Directory::delete).await,
            Store::Bucket(bucket) => {
                let deleted = bucket.delete(&Path::from(place.as_str())).await;
                deleted.map_err(|error| ArchiveError::store(&place, &error))
            }
        };
        match deleted {
            Err(error) if error.is_missing() => Ok(()),
            deleted => deleted,
        }
    }
}

/// Does something with a file or folder of a directory, on a thread for blocking work.
pub(super) async fn on_disk<T: Send + 'static>(
    directory: &Directory,
    place: String,
    work: impl FnOnce(&Directory, &str) -> std::io::Result<T> + Send + 'static,
) -> Result<T, ArchiveError> {
    let directory = directory.clone();
    let done = spawn_blocking(move || work(&directory, &place).map_err(|error| ArchiveError::file(&place, &error)));
    done.await.map_err(ArchiveError::interrupted)?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_that_cannot_be_used_is_one_line_without_credentials() {
        for (url, got) in [
            ("", "an address without a scheme"),
            ("/var/lib", "an address without a scheme"),
            ("gs://sesame/x", "another scheme"),
            ("s3://", "an address without a bucket"),
            ("s3:///x", "an address without a bucket"),
            ("s3://AKIA:sesame@bucket/x", "an address with credentials, which belong in the environment"),
            ("s3://bucket/x?secret=sesame", "an address with settings, which belong in the environment"),
            ("s3://buc ket/x", "an invalid bucket name"),
            ("s3://bucket/a//b", "an invalid prefix"),
            ("file://relative/path", "a relative path"),
        ] {
            let error = Archive::open(url).expect_err(url);
            assert!(error.is_input() && !error.to_string().contains("sesame"), "{error}");
            assert_eq!(error.to_string(), format!("archive: {EXPECTED}, got {got}"), "{url}");
        }
        let error = Archive::open("file:///nowhere/at/all").expect_err("no directory");
        assert_eq!(error.to_string(), "archive: no directory at /nowhere/at/all: create it, or mount its disk");
    }
}
