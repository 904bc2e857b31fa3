//! The configuration cached in Redis, beside the limiter's keys and through its engine. Processes that start while
//! PostgreSQL is away read it, and an API key is looked up in PostgreSQL once for all processes.
//!
//! Keys are `<prefix>:{%c}:...`, which no limit can have. They share a slot, so that one call reads all of it. Any
//! failure counts as a cache miss.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::key_text::KeyId;
use super::keys::LookedUp;
use super::snapshot::{PARTS, Users, part_of_json};
use crate::error::Error;
use crate::limiter::Limiter;
use crate::rules::{Account, RuleSet};

/// Lifetime of rules and users after a process that knows them last wrote them.
const RULES_TTL: Duration = Duration::from_secs(300);
/// How often each process writes them again, even unchanged.
pub(super) const REFRESHED_EVERY: Duration = Duration::from_secs(60);
/// Lifetime of API keys, and of the fact that an id has none.
pub(super) const KEYS_TTL: Duration = Duration::from_secs(600);
/// How long Redis may take: a snapshot of many users takes some megabytes.
const DEADLINE: Duration = Duration::from_secs(2);

#[derive(Clone)]
pub(super) struct Cache {
    limiter: Limiter,
    /// Distinguishes this database from others whose configuration is cached in the same Redis.
    database: String,
}

/// Which configuration the cached parts belong to.
#[derive(Serialize, Deserialize)]
struct Head {
    history: String,
    version: i64,
}

/// The configuration that a process starts with while PostgreSQL is away.
pub(super) struct Cached {
    pub(super) history: String,
    pub(super) version: i64,
    pub(super) rules: RuleSet,
    pub(super) users: Vec<(String, Option<Account>)>,
}

impl Cache {
    /// The cache for the database at this address.
    pub(super) fn new(limiter: &Limiter, address: &str) -> Self {
        let database = Sha256::digest(address).iter().take(8).map(|byte| format!("{byte:02x}")).collect();
        Self { limiter: limiter.clone(), database }
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

    /// Writes the rules, if asked to, and these parts of the users. Writes nothing if the cache is newer, or if it is
    /// of another history and this process isn't connected to the database.
    pub(super) async fn write(
        &self,
        (history, version, is_connected): (&str, i64, bool),
        rules: Option<&RuleSet>,
        users: &Users,
        parts: impl IntoIterator<Item = usize>,
    ) -> Result<(), Error> {
        let mut look = redis::pipe();
        look.cmd("GET").arg(self.name("head"));
        let Some((head,)) = self.ask::<(Option<Vec<u8>>,)>(&look).await? else { return Ok(()) };
        let head = head.and_then(|head| serde_json::from_slice::<Head>(&head).ok());
        let is_ahead = |head: Head| if head.history == history { head.version > version } else { !is_connected };
        if head.is_some_and(is_ahead) {
            return Ok(());
        }
        let mut write = redis::pipe();
        let mut set = |name: &str, value: String| {
            write.cmd("SET").arg(self.name(name)).arg(value).arg("PX").arg(millis(RULES_TTL));
        };
        set("head", serde_json::to_string(&Head { history: history.to_owned(), version }).unwrap_or_default());
        if let Some(rules) = rules {
            set("rules", serde_json::to_string(rules).unwrap_or_default());
        }
        for number in parts {
            set(&format!("users:{number}"), users.part_as_json(number));
            // With many users this takes a while, so other tasks get a turn.
            tokio::task::yield_now().await;
        }
        self.ask::<redis::Value>(&write).await.map(drop)
    }

    /// All of it, or nothing.
    pub(super) async fn read(&self) -> Result<Option<Cached>, Error> {
        let mut read = redis::pipe();
        let names = ["head".to_owned(), "rules".to_owned()].into_iter();
        for name in names.chain((0..PARTS).map(|number| format!("users:{number}"))) {
            read.cmd("GET").arg(self.name(&name));
        }
        let Some(values) = self.ask::<Vec<Option<String>>>(&read).await? else { return Ok(None) };
        let read = || {
            let mut values = values.into_iter().collect::<Option<Vec<_>>>()?.into_iter();
            let head: Head = serde_json::from_str(&values.next()?).ok()?;
            let rules = serde_json::from_str(&values.next()?).ok()?;
            let users = values.map(|part| part_of_json(&part)).collect::<Option<Vec<_>>>()?;
            Some(Cached {
                history: head.history,
                version: head.version,
                rules,
                users: users.into_iter().flatten().collect(),
            })
        };
        Ok(read())
    }

    /// What is cached for this id.
    pub(super) async fn key(&self, id: KeyId) -> Result<Option<LookedUp>, Error> {
        let mut read = redis::pipe();
        read.cmd("GET").arg(self.name_of_key(id));
        let Some((value,)) = self.ask_within::<(Option<Vec<u8>>,)>(self.limiter.deadline, &read).await? else {
            return Ok(None);
        };
        Ok(value.and_then(|value| serde_json::from_slice(&value).ok()))
    }

    /// Writes what was read for ids. What a process just read may be older than what other processes have cached, so
    /// only a change replaces an entry.
    pub(super) async fn write_keys(&self, keys: &[(KeyId, LookedUp)], is_change: bool) -> Result<(), Error> {
        for some in keys.chunks(500) {
            let mut write = redis::pipe();
            for (id, key) in some {
                let Ok(value) = serde_json::to_string(key) else { continue };
                let set = write.cmd("SET").arg(self.name_of_key(*id)).arg(value).arg("PX").arg(millis(KEYS_TTL));
                if !is_change {
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

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
