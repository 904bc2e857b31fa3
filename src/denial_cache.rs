//! Denials remembered in this process, so that a caller that retries too early costs no round trip.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use quick_cache::sync::Cache;
use tokio::time::Instant;

use crate::call::Costs;
use crate::decision::Decision;
use crate::runtime::LONGEST_WAIT;

/// Remembers the keys that Redis denied, and denies them in this process until their wait is over: the same cost on the
/// same key, and higher costs, whose true wait may be longer than reported.
///
/// It never denies what Redis would have allowed, unless meanwhile another process gave units back, reset the key or
/// changed its rule (or Redis lost the key, or its clock was stepped), and then for at most [a second](Self::longest).
/// What this process does to a key with [`refund`](crate::Limiter::refund), [`settle`](crate::Limiter::settle),
/// [`reset`](crate::Limiter::reset) and the like takes effect at once, in all clones of the limiter and all limiters
/// that share the cache: these must have the same Redis and prefix. After such a call is dropped or gets no answer, no
/// denial of its keys is remembered for [that time](Self::longest), at most a minute, since Redis may still run it.
/// Permits, remembered ids, counted denials and requests with a time of their own always go to Redis. A denial repeated
/// here doesn't reach Redis, so it doesn't [block](crate::Rule::block_for) the key anew.
///
/// ```
/// use std::time::Duration;
/// use tollgate::{DenialCache, Limiter, Redis};
///
/// let cache = DenialCache::new(50_000).longest(Duration::from_millis(250));
/// let limiter = Limiter::builder(Redis::open("redis://127.0.0.1/")?).denial_cache(cache).build();
/// # Ok::<(), tollgate::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct DenialCache {
    shared: Arc<Shared>,
    longest: Duration,
}

#[derive(Debug)]
struct Shared {
    denials: Cache<Vec<u8>, Denial>,
    /// For each stripe of keys, by their hash: how often this process gave something back to them.
    changes: [AtomicU64; STRIPES],
    /// For each stripe: until when a change of unknown outcome may still take effect, in microseconds since `began`.
    unknown_until: [AtomicU64; STRIPES],
    began: Instant,
}

/// Keys that share a counter of changes may cause each other's denials to be forgotten needlessly.
const STRIPES: usize = 1024;

/// A call that was given up runs within this time, if at all.
const LATEST: Duration = Duration::from_secs(60);

#[derive(Clone, Debug)]
struct Denial {
    decision: Arc<Decision>,
    costs: Costs,
    /// The rule's numbers, and the changes known when the decision was requested.
    seen: Seen,
    /// When the answer came: its waits start there.
    told: Instant,
    until: Instant,
}

/// Identifies a decision about to be requested, to remember its denial or find an earlier one.
#[derive(Debug)]
pub(crate) struct Sighting {
    /// The keys of the limits' states.
    keys: Vec<u8>,
    seen: Seen,
    at: Instant,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Seen {
    rule: u64,
    changes: u64,
}

/// A change in progress. If dropped before it is [done](Self::done), it may still take effect.
#[derive(Debug)]
pub(crate) struct Changing<'a> {
    cache: &'a DenialCache,
    keys: Option<Vec<u8>>,
    is_done: bool,
}

impl DenialCache {
    /// Remembers up to this many keys, each for a second at most.
    #[must_use]
    pub fn new(keys: usize) -> Self {
        let changes = [const { AtomicU64::new(0) }; STRIPES];
        let unknown_until = [const { AtomicU64::new(0) }; STRIPES];
        let shared = Shared { denials: Cache::new(keys), changes, unknown_until, began: Instant::now() };
        let shared = Arc::new(shared);
        Self { shared, longest: Duration::from_secs(1) }
    }

    /// The longest that a denial is remembered, and so the longest that a refund by another process may go unnoticed.
    /// Default: a second.
    #[must_use]
    pub fn longest(mut self, time: Duration) -> Self {
        self.longest = time.min(LONGEST_WAIT);
        self
    }

    /// Before deciding by the rule with these numbers, on these states' keys, each ended by a newline.
    pub(crate) fn sight(&self, keys: Vec<u8>, rule: u64) -> Sighting {
        let seen = Seen { rule, changes: self.changes(&keys) };
        Sighting { keys, seen, at: Instant::now() }
    }

    /// The denial that still applies to these costs.
    pub(crate) fn recall(&self, sighting: &Sighting, costs: &Costs) -> Option<Decision> {
        let Sighting { keys, seen, at } = sighting;
        let denial = self.shared.denials.get(keys)?;
        let holds = denial.seen == *seen && *at < denial.until;
        if !holds {
            self.shared.denials.remove(keys);
        }
        let holds = holds && costs.reach(&denial.costs);
        holds.then(|| Decision::recalled(&denial.decision, at.saturating_duration_since(denial.told)))
    }

    /// Remembers a denial from the time it was requested: Redis decided no earlier.
    pub(crate) fn remember(&self, sighting: Sighting, costs: &Costs, decision: &Decision) {
        if decision.allowed {
            return;
        }
        let Sighting { keys, seen, at } = sighting;
        let now = Instant::now();
        let since = self.since_began(now);
        if stripes(&keys).any(|stripe| self.shared.unknown_until[stripe].load(Ordering::Acquire) > since) {
            return;
        }
        let until = at + decision.retry_after.duration().unwrap_or(self.longest).min(self.longest);
        // The answer may have waited here for others of its batch.
        let told = now.checked_sub(decision.age()).unwrap_or(now).max(at);
        if now < until {
            let (decision, costs) = (Arc::new(decision.clone()), costs.clone());
            self.shared.denials.insert(keys, Denial { decision, costs, seen, told, until });
        }
    }

    /// While this lives, this process changes these keys: denials requested before it is dropped no longer apply.
    pub(crate) fn changing(&self, keys: Vec<u8>) -> Changing<'_> {
        Changing { cache: self, keys: Some(keys), is_done: false }
    }

    /// The same for keys that aren't known one by one.
    pub(crate) fn changing_any(&self) -> Changing<'_> {
        Changing { cache: self, keys: None, is_done: false }
    }

    /// How often these keys were changed.
    fn changes(&self, keys: &[u8]) -> u64 {
        stripes(keys).map(|stripe| self.shared.changes[stripe].load(Ordering::Acquire)).sum()
    }

    fn since_began(&self, at: Instant) -> u64 {
        u64::try_from(at.saturating_duration_since(self.shared.began).as_micros()).unwrap_or(u64::MAX)
    }
}

fn stripes(keys: &[u8]) -> impl Iterator<Item = usize> {
    keys.split_inclusive(|byte| *byte == b'\n').map(|key| {
        let mut hasher = DefaultHasher::new();
        key.hash(&mut hasher);
        usize::try_from(hasher.finish() % STRIPES as u64).unwrap_or(0)
    })
}

impl Changing<'_> {
    /// It has taken effect, or never will.
    pub(crate) fn done(mut self) {
        self.is_done = true;
    }
}

impl Drop for Changing<'_> {
    fn drop(&mut self) {
        let Shared { changes, unknown_until, .. } = &*self.cache.shared;
        // Until then no denial is remembered: it would hide what the call may do meanwhile.
        let until = self.cache.since_began(Instant::now() + self.cache.longest.min(LATEST));
        let changed = |stripe: usize| {
            if !self.is_done {
                unknown_until[stripe].fetch_max(until, Ordering::AcqRel);
            }
            changes[stripe].fetch_add(1, Ordering::AcqRel);
        };
        match &self.keys {
            Some(keys) => stripes(keys).for_each(changed),
            None => (0..STRIPES).for_each(changed),
        }
    }
}
