//! Users with a tier, limits or a block of their own, as a process knows them: some 90 bytes each, since there may be
//! millions of them.
//!
//! They are kept in parts by the hash of their name. A part is two slices that never change: the users as
//! [bytes](record), and where each begins, in order of hash. A change rebuilds the part that it is in; accounts are
//! built on request.

mod record;
#[cfg(test)]
mod tests;

use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use arc_swap::ArcSwap;
use quick_cache::sync::Cache;

use super::input::OwnLimits;
use tollgate::rules::{Account, UserLimits};

pub(crate) use record::{Block, Settings};
use record::{UserRecord, UserRecords};

/// How many parts users are kept in. With a million users, a part has a thousand, and is rebuilt in some 0.1 ms.
pub(crate) const PARTS: usize = 1024;
/// Limits that are kept as rules, at some 3 KB each; others are made into a rule by each request.
const MOST_RULES: usize = 4096;

/// Read by every request, without a lock, and changed by one task.
pub(crate) struct Users {
    parts: Box<[ArcSwap<Part>]>,
    count: AtomicUsize,
    /// Limits in use, each once for all users who have it; `None`: limits that can't be used.
    rules: Cache<OwnLimits, Option<UserLimits>>,
}

/// Users whose names have certain hashes.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Part {
    /// In order of hash.
    places: Box<[Place]>,
    records: Box<[u8]>,
}

/// Where the user with this hash is in a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    /// The half of the hash that doesn't choose the part.
    hash: u32,
    at: u32,
}

/// Users to be put in force together.
pub(crate) struct UserUpdates {
    /// By part, in order: the last change of a user counts.
    parts: Box<[Vec<u8>]>,
    /// Whether these are all users that there are.
    are_all: bool,
}

/// The number of a user's part, and the other half of the hash.
fn place_of(user: &str) -> (usize, u32) {
    let hash = BuildHasherDefault::<DefaultHasher>::default().hash_one(user);
    let [number, rest] = [hash % PARTS as u64, hash >> 32];
    (usize::try_from(number).unwrap_or_default(), u32::try_from(rest).unwrap_or_default())
}

impl Users {
    pub(crate) fn new() -> Self {
        let none = Arc::new(Part::default());
        Self {
            parts: (0..PARTS).map(|_| ArcSwap::new(Arc::clone(&none))).collect(),
            count: AtomicUsize::new(0),
            rules: Cache::new(MOST_RULES),
        }
    }

    pub(crate) fn get(&self, user: &str) -> Option<Account> {
        if self.len() == 0 {
            return None;
        }
        let (number, hash) = place_of(user);
        let part = self.parts[number].load();
        self.account(&part.get(hash, user)?)
    }

    pub(crate) fn len(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    /// All of them as of now, for the cache.
    pub(crate) fn parts(&self) -> Vec<Arc<Part>> {
        self.parts.iter().map(ArcSwap::load_full).collect()
    }

    /// Puts changes in force.
    pub(crate) fn apply(&self, changes: UserUpdates) {
        let UserUpdates { parts, are_all } = changes;
        let none = Arc::new(Part::default());
        for (part, changes) in self.parts.iter().zip(parts) {
            if changes.is_empty() && !are_all {
                continue;
            }
            let before = if are_all { Arc::clone(&none) } else { part.load_full() };
            let after = before.changed(&changes);
            // An unchanged part stays the same object, by which the cache knows that it was written.
            if after != **part.load() {
                part.store(Arc::new(after));
            }
        }
        self.count.store(self.parts.iter().map(|part| part.load().places.len()).sum(), Ordering::Relaxed);
    }

    fn account(&self, record: &UserRecord<'_>) -> Option<Account> {
        let Settings { tier, limits, block } = record.settings;
        // Limits that were written by hand and can't be used are ignored: the tier's apply.
        let limits = if limits.is_empty() { None } else { self.rule(limits) };
        if tier.is_none() && limits.is_none() && block.is_none() {
            return None;
        }
        let account = Account::new(record.user);
        let account = tier.map_or(account.clone(), |tier| account.tier(tier));
        let account = limits.map_or(account.clone(), |limits| account.user_limits(limits));
        Some(match block {
            Some(Block { reason, until }) => account.blocked(reason, until),
            None => account,
        })
    }

    fn rule(&self, limits: OwnLimits) -> Option<UserLimits> {
        let made = || limits.rule().ok().flatten().and_then(|rule| UserLimits::new(rule).ok());
        let found = self.rules.get_or_insert_with(&limits, || Ok::<_, std::convert::Infallible>(made()));
        found.unwrap_or_default()
    }
}

impl Part {
    fn get(&self, hash: u32, user: &str) -> Option<UserRecord<'_>> {
        let first = self.places.partition_point(|place| place.hash < hash);
        let same = self.places[first..].iter().take_while(|place| place.hash == hash);
        let mut records = same.filter_map(|place| self.records.get(place.at as usize..));
        records.find(|bytes| record::name(bytes) == Some(user)).and_then(|bytes| Some(record::read(bytes)?.0))
    }

    /// The part after these changes.
    fn changed(&self, changes: &[u8]) -> Self {
        let mut users: Vec<_> = UserRecords(&self.records).chain(UserRecords(changes)).collect();
        // Stable, so that a user's last change is the last of the user's records.
        users.sort_by_cached_key(|record| (place_of(record.user).1, record.user));
        let (mut places, mut records) = (Vec::with_capacity(users.len()), Vec::new());
        for (record, next) in users.iter().zip(users.iter().skip(1).map(Some).chain([None])) {
            let is_last = next.is_none_or(|next| next.user != record.user);
            if is_last && !record.is_gone() {
                // A part has far fewer than 2^32 bytes.
                let at = u32::try_from(records.len()).unwrap_or(u32::MAX);
                places.push(Place { hash: place_of(record.user).1, at });
                records.extend_from_slice(record.bytes);
            }
        }
        Self { places: places.into(), records: records.into() }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// The users as bytes, the same for the same users.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.records
    }
}

impl UserUpdates {
    /// Without any yet.
    pub(crate) fn new(are_all: bool) -> Self {
        Self { parts: vec![Vec::new(); PARTS].into(), are_all }
    }

    /// Adds a user's settings: empty ones if the user was deleted or has none.
    pub(crate) fn add(&mut self, user: &str, settings: &Settings<'_>) {
        record::write(&mut self.parts[place_of(user).0], user, settings);
    }

    /// Adds the users of one part, as bytes. Returns whether all of them could be read.
    pub(crate) fn add_bytes(&mut self, bytes: &[u8]) -> bool {
        let mut records = UserRecords(bytes);
        for record in &mut records {
            self.parts[place_of(record.user).0].extend_from_slice(record.bytes);
        }
        records.0.is_empty()
    }
}
