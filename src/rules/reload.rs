//! Rules that follow their file.

use std::collections::hash_map::DefaultHasher;
use std::fmt;
use std::fs;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread;
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwap;

use super::{RuleSet, RuleSetError, file};

/// How often the file is looked at. A change is taken when it looks the same twice, so within twice this and what reading
/// takes.
const INTERVAL: Duration = Duration::from_millis(200);

/// A file that changed so recently may have changed again without its time of change telling.
const GRAIN: Duration = Duration::from_secs(2);

/// The rules of a file, as it is now: a changed file is taken within a second, as a whole, or not at all.
///
/// ```no_run
/// use tollgate::rules::{Attributes, WatchedRules};
/// # async fn serve(limiter: tollgate::Limiter) -> Result<(), Box<dyn std::error::Error>> {
///
/// let rules = WatchedRules::open_and("rules.toml", |reloaded| match reloaded {
///     Ok(rules) => eprintln!("{} rules are in force", rules.len()),
///     Err(error) => eprintln!("the rules before stay in force: {error}"),
/// })?;
///
/// let request = Attributes::new().user("42").path("/api/v1/items");
/// let verdict = limiter.acquire_by(&rules.current(), &request).await?;
/// # Ok(())
/// # }
/// ```
///
/// A thread of its own looks at the file, and at those that it includes, five times a second: so it follows files that are
/// written in place, that editors replace, that are reached by symlinks (as Kubernetes mounts a ConfigMap), and that lie on
/// a network, where events would be missed. A file that can't be used changes nothing: the last good rules stay, and
/// [`error`](Self::error) says what is wrong until it is mended. So does one that has no rules, since it is more likely
/// about to be written. The thread ends when the last clone is dropped.
#[derive(Clone)]
pub struct WatchedRules {
    shared: Arc<Watched>,
}

struct Watched {
    path: PathBuf,
    current: ArcSwap<RuleSet>,
    error: Mutex<Option<RuleSetError>>,
    reloads: AtomicU64,
    failures: AtomicU64,
}

/// What a file looks like, without reading it.
type Looks = Vec<(PathBuf, Option<(SystemTime, u64, u64)>)>;

impl WatchedRules {
    /// The rules of this file, which are followed from now on.
    ///
    /// # Errors
    ///
    /// A file that can't be used now.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, RuleSetError> {
        Self::open_and(path, |_| {})
    }

    /// The same, and calls this after each change of the file: with the rules that are in force from now on, or with what
    /// is wrong, once for each fault. It is called on the thread that looks, which waits for it.
    ///
    /// # Errors
    ///
    /// A file that can't be used now.
    pub fn open_and(
        path: impl AsRef<Path>,
        reloaded: impl Fn(Result<&RuleSet, &RuleSetError>) + Send + 'static,
    ) -> Result<Self, RuleSetError> {
        let path = path.as_ref().to_owned();
        let mut sight = Sight::new(&path);
        let rules = RuleSet::read(&path)?;
        sight.taken = Some(sight.digest);
        let shared = Arc::new(Watched {
            path,
            current: ArcSwap::from_pointee(rules),
            error: Mutex::default(),
            reloads: AtomicU64::new(0),
            failures: AtomicU64::new(0),
        });
        let watched = Arc::downgrade(&shared);
        let started =
            thread::Builder::new().name("tollgate-rules".into()).spawn(move || follow(&watched, sight, &reloaded));
        if let Err(error) = started {
            let why = format!("expected a thread to watch the file with, got: {error}");
            return Err(super::Fault::new(why).in_file(&shared.path, None).into());
        }
        Ok(Self { shared })
    }

    /// The rules that are in force. A request that is decided by them as they are now is decided by one set, whatever
    /// happens to the file meanwhile.
    #[must_use]
    pub fn current(&self) -> RuleSet {
        self.shared.current.load().as_ref().clone()
    }

    /// What is wrong with the file as it is now, if the rules in force are older than it.
    #[must_use]
    pub fn error(&self) -> Option<RuleSetError> {
        self.shared.error.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// How often a changed file was taken so far.
    #[must_use]
    pub fn reloads(&self) -> u64 {
        self.shared.reloads.load(Ordering::Relaxed)
    }

    /// How often a changed file could not be used so far.
    #[must_use]
    pub fn failures(&self) -> u64 {
        self.shared.failures.load(Ordering::Relaxed)
    }
}

impl fmt::Debug for WatchedRules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WatchedRules").field("path", &self.shared.path).finish_non_exhaustive()
    }
}

fn follow(watched: &Weak<Watched>, mut sight: Sight, reloaded: &dyn Fn(Result<&RuleSet, &RuleSetError>)) {
    loop {
        thread::sleep(INTERVAL);
        // Nobody is left who could ask for the rules.
        let Some(shared) = watched.upgrade() else { return };
        if !sight.has_changed_for_good(&shared.path) {
            continue;
        }
        let read = RuleSet::read(&shared.path);
        // What was read may have been changed meanwhile, or be half of what is being written.
        if sight.digest != digest(&sight.looks) {
            continue;
        }
        sight.taken = Some(sight.digest);
        match read {
            Ok(rules) => {
                // Whoever sees the new rules sees what is said of them, too.
                *shared.error.lock().unwrap_or_else(PoisonError::into_inner) = None;
                shared.reloads.fetch_add(1, Ordering::Relaxed);
                shared.current.store(Arc::new(rules.clone()));
                reloaded(Ok(&rules));
            }
            Err(error) => {
                *shared.error.lock().unwrap_or_else(PoisonError::into_inner) = Some(error.clone());
                shared.failures.fetch_add(1, Ordering::Relaxed);
                reloaded(Err(&error));
            }
        }
    }
}

/// What was last seen of the files.
struct Sight {
    looks: Looks,
    digest: u64,
    /// The content that was last taken, or refused.
    taken: Option<u64>,
}

impl Sight {
    fn new(path: &Path) -> Self {
        let looks = looks(path);
        let digest = digest(&looks);
        Self { looks, digest, taken: None }
    }

    /// Whether the files have another content than the one that was taken, and had it when they were last looked at.
    fn has_changed_for_good(&mut self, path: &Path) -> bool {
        let now = SystemTime::now();
        let is_young = |time: SystemTime| now.duration_since(time).is_ok_and(|age| age < GRAIN) || time > now;
        let young = self.looks.iter().any(|(_, look)| look.is_none_or(|(time, _, _)| is_young(time)));
        if self.taken == Some(self.digest) && !young && self.looks.iter().all(|(path, look)| look_of(path) == *look) {
            return false;
        }
        let before = self.digest;
        *self = Self { taken: self.taken, ..Self::new(path) };
        self.digest == before && self.taken != Some(self.digest)
    }
}

fn looks(path: &Path) -> Looks {
    let watched = file::watched(path).into_iter();
    watched
        .map(|path| {
            let look = look_of(&path);
            (path, look)
        })
        .collect()
}

/// Time of change, length, and which file it is, whatever links lead to it.
fn look_of(path: &Path) -> Option<(SystemTime, u64, u64)> {
    let metadata = fs::metadata(path).ok()?;
    #[cfg(unix)]
    let which = std::os::unix::fs::MetadataExt::ino(&metadata);
    #[cfg(not(unix))]
    let which = 0;
    Some((metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH), metadata.len(), which))
}

/// Of the files' contents.
fn digest(looks: &Looks) -> u64 {
    let mut hasher = DefaultHasher::new();
    for (path, _) in looks {
        (path, fs::read(path).ok()).hash(&mut hasher);
    }
    hasher.finish()
}
