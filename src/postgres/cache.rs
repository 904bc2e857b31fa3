//! The configuration cached in Redis, beside the limiter's keys and through its engine. Processes that start while
//! PostgreSQL is away read it, and an API key is looked up in PostgreSQL once for all processes.
//!
//! Keys are `<prefix>:{%c}:...`, which no limit can have. They share a slot, so that one call reads all of it. Any
//! failure counts as a cache miss. Each entry is [sealed](Seal), since others may write to that Redis.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use arc_swap::ArcSwapOption;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::cached_users::{Digested, NAMES_AT_ONCE, UsersHead, users_part};
use super::key_text::KeyId;
use super::keys::LookedUp;
use super::seal::{Seal, unverified};
use super::snapshot::Changes;
use crate::error::Error;
use crate::limiter::Limiter;
use crate::rules::RuleSet;
use crate::telemetry;

/// Lifetime of rules and users after a process that knows them last wrote them.
pub(super) const RULES_TTL: Duration = Duration::from_secs(300);
/// How often each process sees to it that they are there, even unchanged.
pub(super) const REFRESHED_EVERY: Duration = Duration::from_secs(60);
/// Lifetime of API keys, and of the fact that an id has none.
pub(super) const KEYS_TTL: Duration = Duration::from_secs(600);
pub(super) const HEAD: &str = "head";
const RULES: &str = "rules";
const RULES_HEAD: &str = "rules-head";
/// How long Redis may take: rules, and what is read or written of users at once, may be a megabyte.
const DEADLINE: Duration = Duration::from_secs(2);

#[derive(Clone)]
pub(super) struct Cache {
    limiter: Limiter,
    /// Distinguishes this database from others whose configuration is cached in the same Redis.
    database: String,
    /// `None` until the secret is known, which a process reads from the database unless its service has given one.
    seal: Arc<ArcSwapOption<Seal>>,
    is_own_secret: bool,
    refused: Arc<AtomicU64>,
}

/// Which configuration the cached users belong to or, separately, the cached rules. Processes may refuse rules that
/// others apply, so the two aren't written together.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Head {
    pub(super) history: String,
    /// For rules, the version in which they last changed.
    pub(super) version: i64,
}

/// Rules in the cache, or on their way there.
#[derive(Serialize, Deserialize)]
pub(super) struct HeadedRules {
    pub(super) head: Head,
    pub(super) rules: RuleSet,
}

/// The configuration that a process starts with while PostgreSQL is away.
pub(super) struct Cached {
    pub(super) head: Head,
    pub(super) rules: HeadedRules,
    pub(super) users: Changes,
}

/// What is cached for an API key.
pub(super) enum CachedKey {
    Found(LookedUp),
    /// Somebody wrote it who doesn't have the secret, or has an earlier one.
    Refused,
    Nothing,
}

impl Cache {
    /// The cache for the database at this address.
    pub(super) fn new(limiter: &Limiter, address: &str, seal: Option<&Seal>) -> Self {
        let database = Sha256::digest(address).iter().take(8).map(|byte| format!("{byte:02x}")).collect();
        Self {
            limiter: limiter.clone(),
            database,
            seal: Arc::new(ArcSwapOption::from_pointee(seal.cloned())),
            is_own_secret: seal.is_some(),
            refused: Arc::default(),
        }
    }

    /// Takes the database's secret, unless the service has given one.
    pub(super) fn seal_with(&self, secret: &[u8]) {
        if !self.is_own_secret {
            self.seal.store(Some(Arc::new(Seal::new(secret))));
        }
    }

    /// Entries so far that were refused.
    pub(super) fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    pub(super) fn name(&self, what: &str) -> String {
        format!("{}:{{%c}}:{}:{what}", self.limiter.engine().1, self.database)
    }

    pub(super) async fn ask<T: redis::FromRedisValue>(&self, commands: &redis::Pipeline) -> Result<Option<T>, Error> {
        self.ask_within(DEADLINE, commands).await
    }

    async fn ask_within<T: redis::FromRedisValue>(
        &self,
        deadline: Duration,
        commands: &redis::Pipeline,
    ) -> Result<Option<T>, Error> {
        self.limiter.engine().0.ask(self.name("").as_bytes(), commands, deadline).await
    }

    /// The content of an entry, if this secret sealed it; otherwise counts it as refused.
    fn verified<'e>(&self, seal: &Seal, name: &str, entry: &'e [u8]) -> Option<&'e [u8]> {
        let content = seal.open(name, entry);
        if content.is_none() {
            telemetry::cache_refused(self.refused.fetch_add(1, Ordering::Relaxed) == 0);
        }
        content
    }

    /// The content of an entry; without a secret, whoever wrote it.
    fn open<'e>(&self, name: &str, entry: &'e [u8]) -> Option<&'e [u8]> {
        match &*self.seal.load() {
            Some(seal) => self.verified(seal, name, entry),
            None => unverified(entry),
        }
    }

    /// Writes the users that have changed, and the rules unless this process couldn't apply those of the database: then it
    /// leaves what others have written. `is_whole`: sees to it that everything is there for another [`RULES_TTL`]. Writes
    /// neither over newer ones, nor over those of another history unless this process is connected to the database.
    pub(super) async fn write(
        &self,
        (head, is_connected, is_whole): (Head, bool, bool),
        rules: Option<HeadedRules>,
        users: &Digested,
    ) -> Result<(), Error> {
        let mut look = redis::pipe();
        look.cmd("GET").arg(self.name(HEAD)).cmd("GET").arg(self.name(RULES_HEAD)).cmd("PTTL").arg(self.name(HEAD));
        let Some(there) = self.ask::<(Option<Vec<u8>>, Option<Vec<u8>>, i64)>(&look).await? else { return Ok(()) };
        let (users_there, rules_there, left) = there;
        let left = Duration::from_millis(u64::try_from(left).unwrap_or_default());
        let Some(seal) = self.seal.load_full() else {
            // What others have written can't be verified, so it is only kept.
            let users = users_there.as_deref().and_then(|head| serde_json::from_slice(unverified(head)?).ok());
            return if is_whole { self.keep_all(users).await } else { Ok(()) };
        };
        let users_there: Option<UsersHead> = self.sealed(&seal, HEAD, users_there);
        let rules_there: Option<Head> = self.sealed(&seal, RULES_HEAD, rules_there);
        let is_ahead = |there: Option<&Head>, own: &Head| {
            there.is_some_and(|there| match there.history == own.history {
                true => there.version > own.version,
                false => !is_connected,
            })
        };
        match rules.filter(|rules| !is_ahead(rules_there.as_ref(), &rules.head)) {
            Some(rules) => {
                let is_there = rules_there.as_ref() == Some(&rules.head);
                if !is_there || is_whole && !self.keep([RULES, RULES_HEAD]).await? {
                    self.write_rules(&seal, &rules).await?;
                }
            }
            None if is_whole => _ = self.keep([RULES, RULES_HEAD]).await?,
            None => {}
        }
        if is_ahead(users_there.as_ref().map(|there| &there.head), &head) {
            return Ok(());
        }
        self.write_users(&seal, users_there.map(|there| (there, left)), head, users, is_whole).await
    }

    async fn write_rules(&self, seal: &Seal, rules: &HeadedRules) -> Result<(), Error> {
        let json = [(RULES, serde_json::to_vec(rules)), (RULES_HEAD, serde_json::to_vec(&rules.head))];
        let mut write = redis::pipe();
        for (name, content) in json {
            let name = self.name(name);
            let entry = seal.seal(&name, &content.unwrap_or_default());
            write.cmd("SET").arg(name).arg(entry).arg("PX").arg(millis(RULES_TTL));
        }
        self.ask::<redis::Value>(&write).await.map(drop)
    }

    /// All of it, or nothing. Verified, if this process has the secret.
    pub(super) async fn read(&self) -> Result<Option<Cached>, Error> {
        let mut read = redis::pipe();
        read.cmd("GET").arg(self.name(HEAD)).cmd("GET").arg(self.name(RULES));
        let Some((Some(head), Some(rules))) = self.ask::<(Option<Vec<u8>>, Option<Vec<u8>>)>(&read).await? else {
            return Ok(None);
        };
        let parsed = || -> Option<(UsersHead, HeadedRules)> {
            let head = serde_json::from_slice(self.open(&self.name(HEAD), &head)?).ok()?;
            Some((head, serde_json::from_slice(self.open(&self.name(RULES), &rules)?).ok()?))
        };
        let parsed = parsed().filter(|(users, rules)| users.head.history == rules.head.history);
        let Some((UsersHead { head, digests }, rules)) = parsed else { return Ok(None) };
        // Their digests are in the head, so they are verified with it.
        let users = self.read_users(&digests).await?;
        Ok(users.map(|users| Cached { head, rules, users }))
    }

    /// What an entry says, if there is one and this secret sealed it.
    fn sealed<T: DeserializeOwned>(&self, seal: &Seal, what: &str, entry: Option<Vec<u8>>) -> Option<T> {
        serde_json::from_slice(self.verified(seal, &self.name(what), &entry?)?).ok()
    }

    /// Lets these entries live on; returns whether all of them exist.
    async fn keep(&self, names: impl IntoIterator<Item = impl AsRef<str>>) -> Result<bool, Error> {
        let mut keep = redis::pipe();
        for name in names {
            keep.cmd("PEXPIRE").arg(self.name(name.as_ref())).arg(millis(RULES_TTL));
        }
        Ok(self.ask::<Vec<bool>>(&keep).await?.is_none_or(|kept| kept.iter().all(|kept| *kept)))
    }

    async fn keep_all(&self, users: Option<UsersHead>) -> Result<(), Error> {
        self.keep([HEAD, RULES_HEAD, RULES]).await?;
        let digests = users.map(|users| users.digests).unwrap_or_default();
        for some in digests.chunks(NAMES_AT_ONCE) {
            self.keep(some.iter().map(|digest| users_part(digest))).await?;
        }
        Ok(())
    }

    /// What is cached for this id. Nothing, without the secret: an account is never taken unverified.
    pub(super) async fn key(&self, id: KeyId) -> Result<CachedKey, Error> {
        let Some(seal) = self.seal.load_full() else { return Ok(CachedKey::Nothing) };
        let name = self.name_of_key(id);
        let mut read = redis::pipe();
        read.cmd("GET").arg(&name);
        let entry = self.ask_within::<(Option<Vec<u8>>,)>(self.limiter.deadline, &read).await?;
        let Some(entry) = entry.and_then(|(entry,)| entry) else { return Ok(CachedKey::Nothing) };
        let found = self.verified(&seal, &name, &entry).and_then(|content| serde_json::from_slice(content).ok());
        Ok(found.map_or(CachedKey::Refused, CachedKey::Found))
    }

    /// Writes what was read for ids. What a process just read may be older than what other processes have cached, so
    /// only a change, or an entry for one that can't be used, replaces an entry.
    pub(super) async fn write_keys(&self, keys: &[(KeyId, LookedUp)], replace: bool) -> Result<(), Error> {
        let Some(seal) = self.seal.load_full() else { return Ok(()) };
        for some in keys.chunks(500) {
            let mut write = redis::pipe();
            for (id, key) in some {
                let Ok(content) = serde_json::to_vec(key) else { continue };
                let name = self.name_of_key(*id);
                let entry = seal.seal(&name, &content);
                let set = write.cmd("SET").arg(name).arg(entry).arg("PX").arg(millis(KEYS_TTL));
                if !replace {
                    set.arg("NX");
                }
            }
            if !write.is_empty() {
                self.ask::<redis::Value>(&write).await?;
            }
        }
        Ok(())
    }

    fn name_of_key(&self, id: KeyId) -> String {
        self.name(&format!("key:{}", id.as_str()))
    }
}

pub(super) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
