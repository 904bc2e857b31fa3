//! Rules that follow changes of their file.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use arc_swap::ArcSwap;

use super::snapshot::{Seen, Snapshot};
use super::{RuleSet, RuleSetError, file};
use crate::lock::Lock;
use crate::telemetry;

/// How often the file is checked. A change is taken once it looks the same twice, so within twice this interval plus
/// the time to read it.
const INTERVAL: Duration = Duration::from_millis(200);

/// The current rules of a file: a change is taken within a second, as a whole or not at all.
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
/// A separate thread checks the file and its includes five times a second. So it follows files that are written in
/// place, replaced by editors, reached through symlinks (as Kubernetes mounts a ConfigMap), or on a network, where
/// events would be missed. A file that can't be used changes nothing: the last good rules stay, and
/// [`error`](Self::error) says what is wrong until it is fixed. The same goes for a file without rules, which is
/// probably still being written. The thread ends when the last clone is dropped.
#[derive(Clone)]
pub struct WatchedRules {
    shared: Arc<Watched>,
}

struct Watched {
    path: PathBuf,
    current: ArcSwap<RuleSet>,
    error: Lock<Option<RuleSetError>>,
    reloads: AtomicU64,
    failures: AtomicU64,
}

impl WatchedRules {
    /// The rules of this file, followed from now on.
    ///
    /// # Errors
    ///
    /// A file that can't be used now.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, RuleSetError> {
        Self::open_and(path, |_| {})
    }

    /// The same, and calls this after each change of the file: with the rules in force from now on, or with the error,
    /// once for each fault. It runs on the checking thread, which waits for it; a panic in it is printed and otherwise
    /// ignored.
    ///
    /// # Errors
    ///
    /// A file that can't be used now.
    pub fn open_and(
        path: impl AsRef<Path>,
        reloaded: impl Fn(Result<&RuleSet, &RuleSetError>) + Send + 'static,
    ) -> Result<Self, RuleSetError> {
        let path = path.as_ref().to_owned();
        let snapshot = file::read_at_rest(&path);
        let rules = file::compiled(&snapshot)?;
        let digest = snapshot.digest();
        let last = Last { taken: Some(digest), digest, seen: snapshot.into_seen() };
        let shared = Arc::new(Watched {
            path,
            current: ArcSwap::from_pointee(rules),
            error: Lock::default(),
            reloads: AtomicU64::new(0),
            failures: AtomicU64::new(0),
        });
        let watched = Arc::downgrade(&shared);
        let started =
            thread::Builder::new().name("tollgate-rules".into()).spawn(move || follow(&watched, last, &reloaded));
        if let Err(error) = started {
            let why = format!("expected a thread to watch the file with, got: {error}");
            return Err(super::Fault::new(why).in_file(&shared.path, None).into());
        }
        Ok(Self { shared })
    }

    /// The rules in force. A request decided by the returned set is decided by one set, whatever happens to the file
    /// meanwhile.
    #[must_use]
    pub fn current(&self) -> RuleSet {
        self.shared.current.load().as_ref().clone()
    }

    /// The current fault in the file, if the rules in force are older than it.
    #[must_use]
    pub fn error(&self) -> Option<RuleSetError> {
        self.shared.error.lock().clone()
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

fn follow(watched: &Weak<Watched>, mut last: Last, reloaded: &dyn Fn(Result<&RuleSet, &RuleSetError>)) {
    loop {
        thread::sleep(INTERVAL);
        // All users of the rules are gone.
        let Some(shared) = watched.upgrade() else { return };
        let Some(snapshot) = last.changed_for_good(&shared.path) else { continue };
        last.taken = Some(last.digest);
        let read = catch_unwind(AssertUnwindSafe(|| file::compiled(&snapshot)));
        last.seen = snapshot.into_seen();
        let read = read.unwrap_or_else(|_| Err(super::Fault::new("expected rules, got a panic").into()));
        match read {
            Ok(rules) => {
                // Cleared first, so that a caller that sees the new rules doesn't see the old error.
                *shared.error.lock() = None;
                shared.reloads.fetch_add(1, Ordering::Relaxed);
                shared.current.store(Arc::new(rules.clone()));
                tell(reloaded, Ok(&rules));
            }
            Err(error) => {
                *shared.error.lock() = Some(error.clone());
                shared.failures.fetch_add(1, Ordering::Relaxed);
                tell(reloaded, Err(&error));
            }
        }
    }
}

/// After a panic in this call, the next change is reported all the same.
fn tell(reloaded: &dyn Fn(Result<&RuleSet, &RuleSetError>), result: Result<&RuleSet, &RuleSetError>) {
    telemetry::reloaded(result.map(RuleSet::len).map_err(|error| error as &dyn fmt::Display));
    drop(catch_unwind(AssertUnwindSafe(|| reloaded(result))));
}

/// The last state of the files.
struct Last {
    seen: Seen,
    digest: u64,
    /// The content that was last taken or refused.
    taken: Option<u64>,
}

impl Last {
    /// The files, if their content differs from the one last taken and was the same in the previous check.
    fn changed_for_good(&mut self, path: &Path) -> Option<Snapshot> {
        if self.taken == Some(self.digest) && self.seen.is_unchanged_for_sure() {
            return None;
        }
        let snapshot = Snapshot::of(path);
        let digest = snapshot.digest();
        if digest == self.digest && self.taken != Some(digest) && snapshot.is_of_one_moment() {
            return Some(snapshot);
        }
        (self.digest, self.seen) = (digest, snapshot.into_seen());
        None
    }
}
