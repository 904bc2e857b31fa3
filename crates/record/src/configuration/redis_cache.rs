//! The configuration cached in Redis. Processes that start while PostgreSQL is unreachable read it, and an API key is
//! looked up in PostgreSQL once for all processes. Any failure counts as a cache miss.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tollgate::Error;
use tollgate::Limiter;
use tollgate::rules::RuleSet;

use super::cached_users::{Digested, HEAD, NAMES_AT_ONCE, UsersHead, users_part};
use super::entries::{Before, Entries, Head, RULES_TTL, millis};
use crate::postgres::seal::{SEALED_FROM, Seal, unverified};
use crate::stored::key_text::KeyId;
use crate::stored::keys::LookedUp;
use crate::stored::users_in_force::UserUpdates;

/// Lifetime of API keys, and of the fact that an id has none.
pub(crate) const KEYS_TTL: Duration = Duration::from_secs(600);
const RULES: &str = "rules";
const RULES_HEAD: &str = "rules-head";
/// How often a head is compared and written before it is left to the next time.
const ATTEMPTS: usize = 3;

#[derive(Clone)]
pub(crate) struct Cache {
    entries: Entries,
}

/// Rules that are cached, or about to be.
#[derive(Serialize, Deserialize)]
pub(crate) struct HeadedRules {
    pub(crate) head: Head,
    pub(crate) rules: RuleSet,
}

/// The configuration that a process starts with while PostgreSQL is unreachable.
pub(crate) struct Cached {
    pub(crate) head: Head,
    pub(crate) rules: HeadedRules,
    pub(crate) users: UserUpdates,
}

/// What is cached for an API key.
pub(crate) enum CachedKey {
    Found(LookedUp),
    /// It was written without the secret, or with an earlier one.
    Refused,
    Nothing,
}

/// Which existing entry of a key may be overwritten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Over {
    /// None: what a process just read may be older than what another has cached since.
    Nothing,
    /// An older one: this is a change, which may be written late.
    Older,
    /// Any: the existing one can't be used.
    Anything,
}

/// Sets an entry for so many milliseconds unless the one that is there, whose content begins at this byte, has this
/// history and a later version. Whoever reads it verifies it.
const SET_OVER_OLDER: &str = "
    local is = redis.call('GET', KEYS[1])
    if is then
        local read, there = pcall(cjson.decode, string.sub(is, ARGV[3]))
        if read and type(there) == 'table' and there.history == ARGV[4]
            and (tonumber(there.version) or 0) > tonumber(ARGV[5]) then return 0 end
    end
    redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
    return 1";

impl Cache {
    /// The cache for the database at this address.
    pub(crate) fn new(limiter: &Limiter, address: &str, seal: Option<&Seal>) -> Self {
        Self { entries: Entries::new(limiter, address, seal) }
    }

    /// Takes the database's secret, unless the service has given one.
    pub(crate) fn seal_with(&self, secret: &[u8]) {
        self.entries.seal_with(secret);
    }

    /// Entries so far that were refused.
    pub(crate) fn refused(&self) -> u64 {
        self.entries.refused()
    }

    /// Writes the users that have changed, and the rules unless this process couldn't apply those of the database: then
    /// it leaves what others have written. `is_whole`: makes sure that everything stays for another [`RULES_TTL`].
    /// Writes neither over newer ones, nor over those of another history unless this process is connected to the
    /// database.
    pub(crate) async fn write(
        &self,
        of: (Head, bool, bool),
        rules: Option<&HeadedRules>,
        users: &Digested,
    ) -> Result<(), Error> {
        for _ in 0..ATTEMPTS {
            if self.write_unless_changed(of.clone(), rules, users).await? {
                break;
            }
        }
        Ok(())
    }

    /// `false` if another process wrote at the same time.
    async fn write_unless_changed(
        &self,
        (head, is_connected, is_whole): (Head, bool, bool),
        rules: Option<&HeadedRules>,
        users: &Digested,
    ) -> Result<bool, Error> {
        let entries = &self.entries;
        let mut look = tollgate::redis::pipe();
        let [name, rules_name] = [HEAD, RULES_HEAD].map(|what| entries.name(what));
        look.cmd("GET").arg(&name).cmd("GET").arg(rules_name).cmd("PTTL").arg(&name);
        let there = entries.ask::<(Option<Vec<u8>>, Option<Vec<u8>>, i64)>(&look).await?;
        let Some((users_there, rules_there, left)) = there else { return Ok(true) };
        let left = Duration::from_millis(u64::try_from(left).unwrap_or_default());
        let Some(seal) = entries.seal() else {
            // What others have written can't be verified, so it is only kept.
            let users = users_there.as_deref().and_then(|head| serde_json::from_slice(unverified(head)?).ok());
            return if is_whole { self.keep_all(users).await.map(|()| true) } else { Ok(true) };
        };
        let rules_before = Before(rules_there.as_deref());
        let rules_there: Option<Head> = entries.sealed(&seal, RULES_HEAD, rules_there.as_deref());
        let is_ahead = |there: Option<&Head>, own: &Head| {
            there.is_some_and(|there| match there.history == own.history {
                true => there.version > own.version,
                false => !is_connected,
            })
        };
        match rules.filter(|rules| !is_ahead(rules_there.as_ref(), &rules.head)) {
            Some(rules) => {
                let is_there = rules_there.as_ref() == Some(&rules.head);
                let is_missing = !is_there || is_whole && !entries.keep([RULES, RULES_HEAD]).await?;
                if is_missing && !self.write_rules(&seal, rules_before, rules).await? {
                    return Ok(false);
                }
            }
            None if is_whole => _ = entries.keep([RULES, RULES_HEAD]).await?,
            None => {}
        }
        let users_before = Before(users_there.as_deref());
        let users_there: Option<UsersHead> = entries.sealed(&seal, HEAD, users_there.as_deref());
        if is_ahead(users_there.as_ref().map(|there| &there.head), &head) {
            return Ok(true);
        }
        entries.write_users((users_before, users_there, left), head, users, is_whole).await
    }

    async fn write_rules(&self, seal: &Seal, before: Before<'_>, rules: &HeadedRules) -> Result<bool, Error> {
        let [head, content] =
            [serde_json::to_vec(&rules.head), serde_json::to_vec(rules)].map(Result::unwrap_or_default);
        let contents = [(RULES_HEAD, head), (RULES, content)];
        self.entries.replace(seal, before, &contents, Some(RULES_TTL)).await.map(|written| written.is_some())
    }

    /// All of it, or nothing. Verified, if this process has the secret.
    pub(crate) async fn read(&self) -> Result<Option<Cached>, Error> {
        let entries = &self.entries;
        let mut read = tollgate::redis::pipe();
        read.cmd("GET").arg(entries.name(HEAD)).cmd("GET").arg(entries.name(RULES));
        let Some((Some(head), Some(rules))) = entries.ask::<(Option<Vec<u8>>, Option<Vec<u8>>)>(&read).await? else {
            return Ok(None);
        };
        let parsed = || Some((entries.open::<UsersHead>(HEAD, &head)?, entries.open::<HeadedRules>(RULES, &rules)?));
        let parsed = parsed().filter(|(users, rules)| users.head.history == rules.head.history);
        let Some((UsersHead { head, digests }, rules)) = parsed else { return Ok(None) };
        // Their digests are in the head, so they are verified with it.
        let users = entries.read_users(&digests).await?;
        Ok(users.map(|users| Cached { head, rules, users }))
    }

    async fn keep_all(&self, users: Option<UsersHead>) -> Result<(), Error> {
        self.entries.keep([HEAD, RULES_HEAD, RULES]).await?;
        let digests = users.map(|users| users.digests).unwrap_or_default();
        for some in digests.chunks(NAMES_AT_ONCE) {
            self.entries.keep(some.iter().map(|digest| users_part(digest))).await?;
        }
        Ok(())
    }

    /// What is cached for this id. Nothing, without the secret: an account is never taken unverified.
    pub(crate) async fn key(&self, id: KeyId) -> Result<CachedKey, Error> {
        let Some(seal) = self.entries.seal() else { return Ok(CachedKey::Nothing) };
        let name = self.name_of_key(id);
        let mut read = tollgate::redis::pipe();
        read.cmd("GET").arg(&name);
        let deadline = self.entries.limiter.deadline();
        let entry = self.entries.ask_within::<(Option<Vec<u8>>,)>(deadline, &read).await?;
        let Some(entry) = entry.and_then(|(entry,)| entry) else { return Ok(CachedKey::Nothing) };
        let found =
            self.entries.verified(&seal, &name, &entry).and_then(|content| serde_json::from_slice(content).ok());
        Ok(found.map_or(CachedKey::Refused, CachedKey::Found))
    }

    /// Writes what was read for ids.
    pub(crate) async fn write_keys(&self, keys: &[(KeyId, LookedUp)], over: Over) -> Result<(), Error> {
        let Some(seal) = self.entries.seal() else { return Ok(()) };
        for some in keys.chunks(500) {
            let mut write = tollgate::redis::pipe();
            for (id, key) in some {
                let Ok(content) = serde_json::to_vec(key) else { continue };
                let name = self.name_of_key(*id);
                let entry = seal.seal(&name, &content);
                match over {
                    Over::Nothing => write.cmd("SET").arg(name).arg(entry).arg("PX").arg(millis(KEYS_TTL)).arg("NX"),
                    Over::Older => {
                        let set = write.cmd("EVAL").arg(SET_OVER_OLDER).arg(1).arg(name).arg(entry);
                        set.arg(millis(KEYS_TTL)).arg(SEALED_FROM).arg(&key.history).arg(key.version)
                    }
                    Over::Anything => write.cmd("SET").arg(name).arg(entry).arg("PX").arg(millis(KEYS_TTL)),
                };
            }
            if !write.is_empty() {
                self.entries.ask::<tollgate::redis::Value>(&write).await?;
            }
        }
        Ok(())
    }

    fn name_of_key(&self, id: KeyId) -> String {
        self.entries.name(&format!("key:{}", id.as_str()))
    }
}
