//! The configuration cached in Redis, beside the limiter's keys and through its engine. Processes that start while
//! PostgreSQL is away read it, and an API key is looked up in PostgreSQL once for all processes.
//!
//! Keys are `<prefix>:{%c}:...`, which no limit can have. They share a slot, so that one call reads all of it. Any
//! failure counts as a cache miss. Each entry is [sealed](Seal), since others may write to that Redis.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use arc_swap::ArcSwapOption;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::key_text::KeyId;
use super::keys::LookedUp;
use super::seal::{Seal, unverified};
use super::snapshot::{PARTS, Users, part_of_json};
use crate::error::Error;
use crate::limiter::Limiter;
use crate::rules::{Account, RuleSet};
use crate::telemetry;

/// Lifetime of rules and users after a process that knows them last wrote them.
const RULES_TTL: Duration = Duration::from_secs(300);
/// How often each process writes them again, even unchanged.
pub(super) const REFRESHED_EVERY: Duration = Duration::from_secs(60);
/// Lifetime of API keys, and of the fact that an id has none.
pub(super) const KEYS_TTL: Duration = Duration::from_secs(600);
const HEAD: &str = "head";
const RULES: &str = "rules";
const RULES_HEAD: &str = "rules-head";
/// How long Redis may take: a snapshot of many users takes some megabytes.
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
    pub(super) users: Vec<(String, Option<Account>)>,
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

    fn name(&self, what: &str) -> String {
        format!("{}:{{%c}}:{}:{what}", self.limiter.engine().1, self.database)
    }

    async fn ask<T: redis::FromRedisValue>(&self, commands: &redis::Pipeline) -> Result<Option<T>, Error> {
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

    /// Writes these parts of the users, and the rules unless this process couldn't apply those of the database: then it
    /// leaves what others have written. `is_whole`: everything, even if it is there. Writes neither over newer ones, nor
    /// over those of another history unless this process is connected to the database.
    pub(super) async fn write(
        &self,
        (head, is_connected, is_whole): (Head, bool, bool),
        rules: Option<HeadedRules>,
        users: &Users,
        parts: impl IntoIterator<Item = usize>,
    ) -> Result<(), Error> {
        let Some(seal) = self.seal.load_full() else {
            // What others have written can't be verified, so it is only kept.
            let everything = [HEAD, RULES_HEAD, RULES].map(str::to_owned).into_iter().chain((0..PARTS).map(users_part));
            return if is_whole { self.keep(&everything.collect::<Vec<_>>()).await } else { Ok(()) };
        };
        let mut look = redis::pipe();
        look.cmd("GET").arg(self.name(HEAD)).cmd("GET").arg(self.name(RULES_HEAD));
        let Some(heads) = self.ask::<[Option<Vec<u8>>; 2]>(&look).await? else { return Ok(()) };
        let [users_head, rules_head] = heads;
        let there = |what: &str, entry: Option<Vec<u8>>| -> Option<Head> {
            serde_json::from_slice(self.verified(&seal, &self.name(what), &entry?)?).ok()
        };
        let is_ahead = |there: &Option<Head>, own: &Head| {
            there.as_ref().is_some_and(|there| match there.history == own.history {
                true => there.version > own.version,
                false => !is_connected,
            })
        };
        let rules_head = there(RULES_HEAD, rules_head);
        let mut write = redis::pipe();
        let mut set = |name: &str, entry: Vec<u8>| {
            write.cmd("SET").arg(name).arg(entry).arg("PX").arg(millis(RULES_TTL));
        };
        let json = |head: &Head| serde_json::to_vec(head).unwrap_or_default();
        match rules.filter(|rules| !is_ahead(&rules_head, &rules.head)) {
            Some(rules) if is_whole || rules_head.as_ref() != Some(&rules.head) => {
                let [rules_name, head_name] = [RULES, RULES_HEAD].map(|what| self.name(what));
                set(&rules_name, seal.seal(&rules_name, &serde_json::to_vec(&rules).unwrap_or_default()));
                set(&head_name, seal.seal(&head_name, &json(&rules.head)));
            }
            Some(_) => {}
            None if is_whole => self.keep(&[RULES_HEAD, RULES].map(str::to_owned)).await?,
            None => {}
        }
        if !is_ahead(&there(HEAD, users_head), &head) {
            let name = self.name(HEAD);
            set(&name, seal.seal(&name, &json(&head)));
            for number in parts {
                let (name, users) = (self.name(&users_part(number)), users.part_as_json(number));
                set(&name, seal.seal(&of_history(&name, &head.history), users.as_bytes()));
                // With many users this takes a while, so other tasks get a turn.
                tokio::task::yield_now().await;
            }
        }
        if write.is_empty() { Ok(()) } else { self.ask::<redis::Value>(&write).await.map(drop) }
    }

    /// All of it, or nothing. Verified, if this process has the secret.
    pub(super) async fn read(&self) -> Result<Option<Cached>, Error> {
        let names: Vec<_> = [HEAD.to_owned(), RULES.to_owned()].into_iter().chain((0..PARTS).map(users_part)).collect();
        let mut read = redis::pipe();
        for name in &names {
            read.cmd("GET").arg(self.name(name));
        }
        let Some(values) = self.ask::<Vec<Option<Vec<u8>>>>(&read).await? else { return Ok(None) };
        let read = || {
            let entries = values.into_iter().collect::<Option<Vec<_>>>()?;
            let name = |at: usize| self.name(&names[at]);
            let head: Head = serde_json::from_slice(self.open(&name(0), entries.first()?)?).ok()?;
            let rules: HeadedRules = serde_json::from_slice(self.open(&name(1), entries.get(1)?)?).ok()?;
            let mut users = Vec::new();
            for (at, entry) in entries.iter().enumerate().skip(2) {
                let part = self.open(&of_history(&name(at), &head.history), entry)?;
                users.extend(part_of_json(std::str::from_utf8(part).ok()?)?);
            }
            (rules.head.history == head.history).then_some(Cached { head, rules, users })
        };
        Ok(read())
    }

    /// Lets these entries live on, if they exist.
    async fn keep(&self, names: &[String]) -> Result<(), Error> {
        let mut keep = redis::pipe();
        for name in names {
            keep.cmd("PEXPIRE").arg(self.name(name)).arg(millis(RULES_TTL));
        }
        self.ask::<redis::Value>(&keep).await.map(drop)
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

fn users_part(number: usize) -> String {
    format!("users:{number}")
}

/// What an entry is sealed by that doesn't name its history itself.
fn of_history(name: &str, history: &str) -> String {
    format!("{name}@{history}")
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
