//! Entries in Redis beside the limiter's keys, each [sealed](Seal), since others may write to that Redis.
//!
//! Keys are `<prefix>:{%c}:...`, which no limit can have. They share a slot, so that one call reads all of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use arc_swap::ArcSwapOption;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tollgate::Error;
use tollgate::Limiter;
use tollgate::redis::{FromRedisValue, Pipeline, Value};

use crate::postgres::seal::{Seal, unverified};
use crate::telemetry;

/// Lifetime of rules and users after a process that knows them last wrote them.
pub(crate) const RULES_TTL: Duration = Duration::from_secs(300);
/// How often each process renews them, even if unchanged.
pub(crate) const REFRESHED_EVERY: Duration = Duration::from_secs(60);
/// How long Redis may take: rules, and what is read or written of users at once, may be a megabyte.
const DEADLINE: Duration = Duration::from_secs(2);

/// Writes entries, unless the first of them has changed since it was read: another process may have been faster. Takes
/// the names; the SHA-1 of what the first one was, or nothing; the lifetime in milliseconds, or 0 to keep it; and the
/// entries.
const REPLACE: &str = "
    local is = redis.call('GET', KEYS[1])
    if (is and redis.sha1hex(is) or '') ~= ARGV[1] then return 0 end
    for i, key in ipairs(KEYS) do
        if ARGV[2] == '0' then
            redis.call('SET', key, ARGV[i + 2], 'KEEPTTL')
        else
            redis.call('SET', key, ARGV[i + 2], 'PX', ARGV[2])
        end
    end
    return 1";

#[derive(Clone)]
pub(crate) struct Entries {
    pub(crate) limiter: Limiter,
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
pub(crate) struct Head {
    pub(crate) history: String,
    /// For rules, the version in which they last changed.
    pub(crate) version: i64,
}

/// An entry as it was read, to be compared before it is replaced.
pub(crate) struct Before<'e>(pub(crate) Option<&'e [u8]>);

impl Entries {
    /// The entries for the database at this address.
    pub(crate) fn new(limiter: &Limiter, address: &str, seal: Option<&Seal>) -> Self {
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
    pub(crate) fn seal_with(&self, secret: &[u8]) {
        if !self.is_own_secret {
            self.seal.store(Some(Arc::new(Seal::new(secret))));
        }
    }

    pub(crate) fn seal(&self) -> Option<Arc<Seal>> {
        self.seal.load_full()
    }

    /// Entries so far that were refused.
    pub(crate) fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    pub(crate) fn name(&self, what: &str) -> String {
        format!("{}:{{%c}}:{}:{what}", self.limiter.prefix(), self.database)
    }

    pub(crate) async fn ask<T: FromRedisValue>(&self, commands: &Pipeline) -> Result<Option<T>, Error> {
        self.ask_within(DEADLINE, commands).await
    }

    pub(crate) async fn ask_within<T: FromRedisValue>(
        &self,
        deadline: Duration,
        commands: &Pipeline,
    ) -> Result<Option<T>, Error> {
        self.limiter.engine().query(self.name("").as_bytes(), commands, deadline).await
    }

    /// The content of an entry, if this secret sealed it; otherwise counts it as refused.
    pub(crate) fn verified<'e>(&self, seal: &Seal, name: &str, entry: &'e [u8]) -> Option<&'e [u8]> {
        let content = seal.open(name, entry);
        if content.is_none() {
            telemetry::cache_refused(self.refused.fetch_add(1, Ordering::Relaxed) == 0);
        }
        content
    }

    /// What an entry says, if there is one and this secret sealed it.
    pub(crate) fn sealed<T: DeserializeOwned>(&self, seal: &Seal, what: &str, entry: Option<&[u8]>) -> Option<T> {
        serde_json::from_slice(self.verified(seal, &self.name(what), entry?)?).ok()
    }

    /// What an entry says; without a secret, it can't be verified.
    pub(crate) fn open<T: DeserializeOwned>(&self, what: &str, entry: &[u8]) -> Option<T> {
        match self.seal() {
            Some(seal) => self.sealed(&seal, what, Some(entry)),
            None => serde_json::from_slice(unverified(entry)?).ok(),
        }
    }

    /// Prolongs these entries; returns whether all of them exist.
    pub(crate) async fn keep(&self, names: impl IntoIterator<Item = impl AsRef<str>>) -> Result<bool, Error> {
        let mut keep = tollgate::redis::pipe();
        for name in names {
            keep.cmd("PEXPIRE").arg(self.name(name.as_ref())).arg(millis(RULES_TTL));
        }
        Ok(self.ask::<Vec<bool>>(&keep).await?.is_none_or(|kept| kept.iter().all(|kept| *kept)))
    }

    /// Seals and writes these entries, for the given time or for what is left of theirs, unless the first has changed
    /// since `before`. Returns the first as written, or `None` if nothing was.
    pub(crate) async fn replace(
        &self,
        seal: &Seal,
        Before(before): Before<'_>,
        contents: &[(&str, Vec<u8>)],
        ttl: Option<Duration>,
    ) -> Result<Option<Vec<u8>>, Error> {
        let mut replace = tollgate::redis::pipe();
        let command = replace.cmd("EVAL").arg(REPLACE).arg(contents.len());
        let names: Vec<_> = contents.iter().map(|(what, _)| self.name(what)).collect();
        command.arg(&names).arg(before.map(sha1).unwrap_or_default()).arg(ttl.map_or(0, millis));
        let entries: Vec<_> = names.iter().zip(contents).map(|(name, (_, content))| seal.seal(name, content)).collect();
        command.arg(&entries);
        let replaced = self.ask::<(Value,)>(&replace).await?;
        let is_replaced = replaced.is_none_or(|(replaced,)| replaced == Value::Int(1));
        Ok(entries.into_iter().next().filter(|_| is_replaced))
    }
}

pub(crate) fn sha1(bytes: &[u8]) -> String {
    sha1_smol::Sha1::from(bytes).digest().to_string()
}

pub(crate) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
