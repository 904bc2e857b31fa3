//! A set's files at one moment, and the metadata that reveals a change.

use std::collections::HashSet;
use std::fs::{self, File, Metadata, OpenOptions};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, Read, Seek};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use super::text::Source;
use super::{Fault, RuleSetError};

/// Enough for some 100,000 rules. A file that grows without end is read no further.
const LONGEST_FILE: u64 = 64 << 20;

/// A file that changed within this time may have changed again without its timestamps showing it.
const GRAIN: Duration = Duration::from_secs(2);

/// A set's file, and those that it includes.
pub(super) struct Snapshot {
    pub(super) sources: Result<Vec<Source>, RuleSetError>,
    seen: Seen,
    /// The set's file, which can be read again once another has taken its name. None where an open file can't be
    /// replaced.
    main: Option<File>,
}

/// The metadata of files and directories when they were read; none if one couldn't be read.
#[derive(Default)]
pub(super) struct Seen(Vec<(PathBuf, Option<Stamp>)>);

/// A file's metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp {
    modified: SystemTime,
    /// When its content, its name or its owner changed; always the same if the system doesn't know.
    changed: SystemTime,
    length: u64,
    /// Identifies the file, whatever links lead to it: its file system, and its number in that.
    which: (u64, u64),
}

impl Snapshot {
    pub(super) fn of(path: &Path) -> Self {
        let (mut seen, mut main) = (Seen::default(), None);
        let sources = sources(path, &mut seen, &mut main);
        Self { sources, seen, main: main.filter(|_| cfg!(unix)) }
    }

    /// Whether no file was replaced or written while others were read; otherwise the snapshot may be a mixture that
    /// never existed.
    pub(super) fn is_of_one_moment(&self) -> bool {
        self.seen.is_unchanged()
    }

    /// Whether this is a single file that nobody has written since it was read, whatever has its name by now. Compares
    /// the content: two writes at nearly the same time leave the same timestamps.
    pub(super) fn is_a_file_that_stayed_the_same(&self) -> bool {
        let (Ok([source]), Some(main)) = (self.sources.as_deref(), &self.main) else { return false };
        let (mut main, mut text) = (main, String::new());
        let read = main.rewind().and_then(|()| main.take(LONGEST_FILE + 1).read_to_string(&mut text));
        read.is_ok() && text == source.text
    }

    /// Whether a file of this snapshot is the beginning of the same file in a later one: what was read of it was not
    /// all.
    pub(super) fn is_continued_in(&self, later: &Self) -> bool {
        let (Ok(sources), Ok(later)) = (&self.sources, &later.sources) else { return false };
        sources.iter().any(|source| {
            let mut same = later.iter().filter(|later| later.path == source.path);
            same.any(|later| later.text.len() > source.text.len() && later.text.starts_with(&source.text))
        })
    }

    /// Identifies these contents, or the error that prevented reading them.
    pub(super) fn digest(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        match &self.sources {
            Ok(sources) => sources.hash(&mut hasher),
            Err(error) => error.to_string().hash(&mut hasher),
        }
        hasher.finish()
    }

    pub(super) fn into_seen(self) -> Seen {
        self.seen
    }
}

impl Seen {
    /// Whether all metadata is unchanged, and old enough that a change would show.
    pub(super) fn is_unchanged_for_sure(&self) -> bool {
        let now = SystemTime::now();
        self.0.iter().all(|(_, look)| look.is_some_and(|look| !look.is_young(now))) && self.is_unchanged()
    }

    fn is_unchanged(&self) -> bool {
        self.0.iter().all(|(path, look)| Stamp::of(path) == *look)
    }

    fn note(&mut self, path: &Path, look: Option<Stamp>) {
        self.0.push((path.to_owned(), look));
    }
}

impl Stamp {
    fn of(path: &Path) -> Option<Self> {
        fs::metadata(path).ok().as_ref().map(Self::from)
    }

    fn is_young(&self, now: SystemTime) -> bool {
        let apart = |time: SystemTime| now.duration_since(time).unwrap_or_else(|ahead| ahead.duration());
        apart(self.modified) < GRAIN || apart(self.changed) < GRAIN
    }
}

impl From<&Metadata> for Stamp {
    fn from(metadata: &Metadata) -> Self {
        let modified = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
        #[cfg(unix)]
        let (which, changed) = {
            use std::os::unix::fs::MetadataExt;
            let time = |seconds: i64, nanoseconds: i64| {
                let nanoseconds = u32::try_from(nanoseconds).unwrap_or_default();
                let since = Duration::new(u64::try_from(seconds).unwrap_or_default(), nanoseconds);
                SystemTime::UNIX_EPOCH.checked_add(since).unwrap_or(modified)
            };
            ((metadata.dev(), metadata.ino()), time(metadata.ctime(), metadata.ctime_nsec()))
        };
        #[cfg(not(unix))]
        let (which, changed) = ((0, 0), modified);
        Self { modified, changed, length: metadata.len(), which }
    }
}

/// The file, which is left open, and those that it includes.
fn sources(path: &Path, seen: &mut Seen, opened: &mut Option<File>) -> Result<Vec<Source>, RuleSetError> {
    let (file, text) = text_of(path, seen)?;
    *opened = Some(file);
    let main = Source::new(path.to_owned(), text);
    including(main, path.parent().unwrap_or(Path::new("")), seen)
}

/// This, and what it includes.
pub(super) fn including(main: Source, directory: &Path, seen: &mut Seen) -> Result<Vec<Source>, RuleSetError> {
    let include = main.include()?;
    let mut known = HashSet::from([canonical(&main.path)]);
    let mut sources = vec![main];
    for (entry, pattern) in include.iter().enumerate() {
        let fault = |why: &str| sources[0].fault_of_include(entry, why);
        let mut files = included(directory, pattern, seen).map_err(|why| fault(&why))?;
        // A pattern may match its own file, and files already included.
        files.retain(|path| known.insert(canonical(path)));
        let texts = files.into_iter().map(|path| match text_of(&path, seen) {
            Ok((_, text)) => Ok(Source::new(path, text)),
            Err(error) => Err(fault(&error.to_string())),
        });
        let more: Vec<_> = texts.collect::<Result<_, _>>()?;
        sources.extend(more);
    }
    Ok(sources)
}

/// One canonical name for a file that has several.
fn canonical(path: &Path) -> PathBuf {
    fs::canonicalize(path).unwrap_or_else(|_| path.to_owned())
}

/// A file's text. Refuses anything but a regular file, which might have no end.
fn text_of(path: &Path, seen: &mut Seen) -> Result<(File, String), Fault> {
    let fault = |why: String| Fault::new(why).in_file(path, None);
    let unreadable = |error: io::Error| match error.kind() {
        io::ErrorKind::InvalidData => fault("the file isn't UTF-8".into()),
        _ => fault(format!("the file can't be read: {error}")),
    };
    // Of the opened file, whatever its name leads to by now.
    let opened = open(path).and_then(|file| Ok((file.metadata()?, file)));
    let (metadata, file) = opened.map_err(|error| {
        seen.note(path, Stamp::of(path));
        unreadable(error)
    })?;
    seen.note(path, Some(Stamp::from(&metadata)));
    if !metadata.is_file() {
        let what = if metadata.is_dir() { "a directory" } else { "not a regular file" };
        return Err(fault(format!("not a file of rules: it is {what}")));
    }
    let mut text = String::new();
    (&file).take(LONGEST_FILE + 1).read_to_string(&mut text).map_err(unreadable)?;
    if text.len() as u64 > LONGEST_FILE {
        return Err(fault(format!("the file is larger than {} MiB", LONGEST_FILE >> 20)));
    }
    Ok((file, text))
}

/// Opens a file without waiting for a pipe's writer.
fn open(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true);
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt;
        options.custom_flags(libc::O_NONBLOCK);
    }
    options.open(path)
}

/// The files of one entry of `include`.
fn included(directory: &Path, pattern: &str, seen: &mut Seen) -> Result<Vec<PathBuf>, String> {
    let path = directory.join(pattern);
    if path.file_name().is_none_or(|name| name != "*.toml") {
        return if pattern.contains('*') {
            Err(format!("expected a file, or *.toml at the end for all of a directory, got {pattern:?}"))
        } else {
            Ok(vec![path])
        };
    }
    let within = path.parent().filter(|within| !within.as_os_str().is_empty()).unwrap_or(Path::new("."));
    seen.note(within, Stamp::of(within));
    let entries =
        fs::read_dir(within).map_err(|error| format!("the directory of {pattern:?} can't be read: {error}"))?;
    let mut files: Vec<PathBuf> = entries
        .filter_map(|entry| entry.ok().map(|entry| within.join(entry.file_name())))
        .filter(|path| path.extension().is_some_and(|extension| extension == "toml"))
        // Names of files that editors and mounts keep beside a file begin with a dot.
        .filter(|path| !path.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.')))
        .collect();
    files.sort();
    Ok(files)
}
