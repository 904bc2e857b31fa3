//! Users with a tier, limits or a block of their own, as a process knows them.

use std::collections::{BTreeSet, HashMap};
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use arc_swap::ArcSwap;
use serde::{Deserialize, Serialize};

use crate::rules::{Account, UserBlock};

/// How many parts users are kept in: a change copies one of them.
pub(super) const PARTS: usize = 64;

type Accounts = HashMap<Arc<str>, Account>;

/// Read by every request, without a lock, and changed by one task.
pub(super) struct Users {
    parts: [ArcSwap<Accounts>; PARTS],
    count: AtomicUsize,
}

/// A user as cached in Redis.
#[derive(Serialize, Deserialize)]
struct Cached {
    user: String,
    tier: Option<String>,
    limits: Option<String>,
    block: Option<UserBlock>,
}

/// The same in every process, since parts are cached by number.
fn part_of(user: &str) -> usize {
    let hash = BuildHasherDefault::<DefaultHasher>::default().hash_one(user);
    usize::try_from(hash % PARTS as u64).unwrap_or_default()
}

impl Users {
    pub(super) fn new() -> Self {
        Self { parts: std::array::from_fn(|_| ArcSwap::default()), count: AtomicUsize::new(0) }
    }

    pub(super) fn get(&self, user: &str) -> Option<Account> {
        if self.count.load(Ordering::Relaxed) == 0 {
            return None;
        }
        self.parts[part_of(user)].load().get(user).cloned()
    }

    pub(super) fn len(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    /// Replaces all known users with these, or adds these to them. Returns the numbers of the parts that changed.
    pub(super) fn take(&self, users: Vec<(String, Option<Account>)>, instead: bool) -> BTreeSet<usize> {
        let mut changes: HashMap<usize, Vec<(String, Option<Account>)>> = HashMap::new();
        for (user, account) in users {
            changes.entry(part_of(&user)).or_default().push((user, account));
        }
        let mut changed = BTreeSet::new();
        for number in 0..PARTS {
            let change = changes.remove(&number).unwrap_or_default();
            if change.is_empty() && !instead {
                continue;
            }
            let mut part = if instead { Accounts::new() } else { Accounts::clone(&self.parts[number].load()) };
            for (user, account) in change {
                match account {
                    Some(account) => drop(part.insert(user.into(), account)),
                    None => drop(part.remove(&*user)),
                }
            }
            self.parts[number].store(Arc::new(part));
            changed.insert(number);
        }
        self.count.store(self.parts.iter().map(|part| part.load().len()).sum(), Ordering::Relaxed);
        changed
    }

    /// One part, for the cache.
    pub(super) fn part_as_json(&self, number: usize) -> String {
        let part = self.parts[number].load();
        let users: Vec<_> = part.values().map(Cached::of).collect();
        serde_json::to_string(&users).unwrap_or_default()
    }
}

/// The users of one part, from the cache; `None` if that can't be parsed.
pub(super) fn part_of_json(text: &str) -> Option<Vec<(String, Option<Account>)>> {
    let users: Vec<Cached> = serde_json::from_str(text).ok()?;
    users.into_iter().map(|cached| Some((cached.user.clone(), Some(cached.account()?)))).collect()
}

impl Cached {
    fn of(account: &Account) -> Self {
        Self {
            user: account.user().to_owned(),
            tier: account.paid_tier().map(Into::into),
            limits: account.user_limits().map(ToString::to_string),
            block: account.any_block().cloned(),
        }
    }

    fn account(self) -> Option<Account> {
        let mut account = Account::new(&self.user);
        if let Some(tier) = &self.tier {
            account = account.tier(tier);
        }
        if let Some(limits) = self.limits {
            account = account.limits(limits.parse().ok()?).ok()?;
        }
        Some(match self.block {
            Some(block) => account.blocked(block.reason.as_deref(), block.until),
            None => account,
        })
    }
}
