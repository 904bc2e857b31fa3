//! Rules that follow changes of their file.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;

use super::snapshot::{Seen, Snapshot};
use super::{RuleSet, RuleSetError, file};
use crate::lock::Lock;
use crate::telemetry;

/// How often the file is checked, and for how long it must not have been written before it is taken.
const INTERVAL: Duration = Duration::from_millis(200);
/// How long that is waited for. After that, what was read between two writes is taken, if it is a set of rules.
const LONGEST_WAIT: Duration = Duration::from_secs(1);
/// The least time between two such writes. One save may be several writes; they follow each other faster.
const PAUSE: Duration = Duration::from_millis(20);

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
/// events would be missed, and changes that follow each other faster than it checks. It reads the new rules, and frees
/// the old ones once no request uses them any more. A file that can't be used changes nothing: the last good rules
/// stay, and [`error`](Self::error) says what is wrong until it is fixed. The same goes for a file without rules, which
/// is probably still being written. The thread ends when the last clone is dropped.
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

impl Watched {
    fn open(path: PathBuf) -> Result<(Arc<Self>, Looks), RuleSetError> {
        let snapshot = file::read_at_rest(&path);
        let rules = file::compiled(&snapshot)?;
        file::warn(&rules);
        let looks = Looks { known: snapshot.digest(), seen: snapshot.into_seen(), found: None, changing_since: None };
        let shared = Self {
            path,
            current: ArcSwap::from_pointee(rules),
            error: Lock::default(),
            reloads: AtomicU64::new(0),
            failures: AtomicU64::new(0),
        };
        Ok((Arc::new(shared), looks))
    }
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
        let fault = |why: String| RuleSetError::from(super::Fault::new(why).in_file(&path, None));
        let (answer, opened) = mpsc::sync_channel(1);
        let watching = {
            let path = path.clone();
            // All sets are made by one thread, so that the allocator gives the next the memory of the one before.
            move || match Watched::open(path) {
                Ok((shared, looks)) => {
                    let watched = Arc::downgrade(&shared);
                    drop(answer.send(Ok(shared)));
                    follow(&watched, looks, &reloaded);
                }
                Err(error) => drop(answer.send(Err(error))),
            }
        };
        thread::Builder::new()
            .name("tollgate-rules".into())
            .spawn(watching)
            .map_err(|error| fault(format!("the thread that watches the file can't be started: {error}")))?;
        let shared = opened.recv().map_err(|_| fault("reading the rules panicked".into()))??;
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

fn follow(watched: &Weak<Watched>, mut looks: Looks, reloaded: &dyn Fn(Result<&RuleSet, &RuleSetError>)) {
    // Sets that requests may still use: freeing a large one takes too long to be done by a request.
    let mut retired: Vec<RuleSet> = Vec::new();
    loop {
        thread::sleep(looks.next());
        retired.retain(RuleSet::is_shared);
        // All users of the rules are gone.
        let Some(shared) = watched.upgrade() else { return };
        match looks.look(&shared.path) {
            None => {}
            Some(Ok(rules)) => {
                file::warn(&rules);
                // Cleared first, so that a caller that sees the new rules doesn't see the old error.
                *shared.error.lock() = None;
                shared.reloads.fetch_add(1, Ordering::Relaxed);
                retired.push(RuleSet::clone(&shared.current.swap(Arc::new(rules.clone()))));
                tell(reloaded, Ok(&rules));
            }
            Some(Err(error)) => {
                *shared.error.lock() = Some(error.clone());
                shared.failures.fetch_add(1, Ordering::Relaxed);
                tell(reloaded, Err(&error));
            }
        }
        looks.read();
    }
}

/// After a panic in this call, the next change is reported all the same.
fn tell(reloaded: &dyn Fn(Result<&RuleSet, &RuleSetError>), result: Result<&RuleSet, &RuleSetError>) {
    telemetry::reloaded(result.map(RuleSet::len).map_err(|error| error as &dyn fmt::Display));
    drop(catch_unwind(AssertUnwindSafe(|| reloaded(result))));
}

/// What successive looks at the files have found.
struct Looks {
    /// The content that is in force, or was last refused.
    known: u64,
    /// The metadata of the files when they were last seen with it.
    seen: Seen,
    /// Another content.
    found: Option<Found>,
    /// When the first content was found that has not been taken.
    changing_since: Option<Instant>,
}

/// A content that isn't known yet. Its rules are read before it is known to be whole, which it nearly always is.
struct Found {
    at: Instant,
    snapshot: Snapshot,
    digest: u64,
    rules: Option<Result<RuleSet, RuleSetError>>,
    /// Whether nothing changed while it was read.
    at_rest: bool,
    /// Whether nothing changed for a moment afterwards either. Only known where changes go on.
    in_a_pause: bool,
}

impl Looks {
    /// How long until the next look.
    fn next(&self) -> Duration {
        self.found.as_ref().map_or(INTERVAL, |found| INTERVAL.saturating_sub(found.at.elapsed()))
    }

    /// Looks at the files. Returns what the look before found, if that was whole and isn't known yet.
    fn look(&mut self, path: &Path) -> Option<Result<RuleSet, RuleSetError>> {
        if self.found.is_none() && self.seen.is_unchanged_for_sure() {
            return None;
        }
        let snapshot = file::read_at_rest(path);
        let now = Found::new(snapshot, self.goes_on());
        let taken = self.found.take().filter(|before| self.is_whole(before, &now));
        if let Some(before) = &taken {
            (self.known, self.changing_since) = (before.digest, None);
        }
        if now.digest == self.known {
            (self.seen, self.changing_since) = (now.snapshot.into_seen(), None);
        } else {
            self.changing_since.get_or_insert(now.at);
            self.found = Some(now);
        }
        taken?.rules
    }

    /// Whether the content has been changing for longer than is waited for.
    fn goes_on(&self) -> bool {
        self.changing_since.is_some_and(|since| since.elapsed() >= LONGEST_WAIT)
    }

    /// Whether what was found before is a whole set, as far as its files show by now.
    fn is_whole(&self, before: &Found, now: &Found) -> bool {
        // Files that belong together may be replaced one after the other, so that only a single one is whole at once.
        let was_replaced = || before.snapshot.is_a_file_that_stayed_the_same();
        let is_a_set = matches!(before.rules, Some(Ok(_)));
        let was_rewritten = || before.in_a_pause && is_a_set && !before.snapshot.is_continued_in(&now.snapshot);
        before.at_rest && (before.digest == now.digest || was_replaced() || (self.goes_on() && was_rewritten()))
    }

    /// Reads the rules in what was found, for the next look to take.
    fn read(&mut self) {
        let Some(found) = &mut self.found else { return };
        let rules = catch_unwind(AssertUnwindSafe(|| file::compiled(&found.snapshot)));
        found.rules = Some(rules.unwrap_or_else(|panic| {
            let said = panic.downcast_ref::<&str>().map(|said| (*said).to_owned());
            let said = said.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
            Err(super::Fault::new(format!("reading the rules panicked: {said}")).into())
        }));
    }
}

impl Found {
    fn new(snapshot: Snapshot, goes_on: bool) -> Self {
        let (at, digest, at_rest) = (Instant::now(), snapshot.digest(), snapshot.is_of_one_moment());
        if goes_on {
            thread::sleep(PAUSE);
        }
        let in_a_pause = goes_on && snapshot.is_of_one_moment();
        Self { at, snapshot, digest, rules: None, at_rest, in_a_pause }
    }
}
