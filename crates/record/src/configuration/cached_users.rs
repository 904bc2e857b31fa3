//! Users in Redis, each part under the SHA-256 of its content. So a part is written once, whichever process has it, is
//! never overwritten, and is verified by its name. The head lists the names, and is sealed.

use std::collections::HashSet;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tollgate::Error;

use super::entries::{Before, Entries, Head, REFRESHED_EVERY, RULES_TTL, millis, sha1};
use crate::stored::users_in_force::{PARTS, Part, UserUpdates};

pub(crate) const HEAD: &str = "head";
/// Parts that are read or written at once: of a million users, some 700 KB.
const AT_ONCE: usize = 16;
/// The same for commands without content.
pub(crate) const NAMES_AT_ONCE: usize = 256;
/// How long a part that was replaced is kept for processes that have just read the head that lists it.
const REPLACED_TTL: Duration = Duration::from_secs(10);

/// Sets all of these keys but the first to expire in so many milliseconds, if the first has this SHA-1.
const EXPIRE: &str = "
    local is = redis.call('GET', KEYS[1])
    if not is or redis.sha1hex(is) ~= ARGV[1] then return 0 end
    for i = 2, #KEYS do redis.call('PEXPIRE', KEYS[i], ARGV[2]) end
    return 1";

/// Which configuration the cached users belong to, and the digests of their parts.
#[derive(PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct UsersHead {
    #[serde(flatten)]
    pub(crate) head: Head,
    pub(crate) digests: Vec<String>,
}

/// The parts as they were last written, and the digest of each, which is empty if the part is.
#[derive(Default)]
pub(crate) struct Digested(Vec<(Arc<Part>, String)>);

impl Digested {
    /// Takes these parts; digests those that have changed.
    pub(crate) async fn update(&mut self, parts: Vec<Arc<Part>>) {
        self.0.resize_with(PARTS, Default::default);
        for ((before, digest), part) in self.0.iter_mut().zip(parts) {
            if Arc::ptr_eq(before, &part) {
                continue;
            }
            *digest = if part.is_empty() { String::new() } else { digest_of(part.bytes()) };
            *before = part;
            // Many parts take a while; changes are followed meanwhile.
            tokio::task::yield_now().await;
        }
    }

    /// The digests of the parts that have users.
    pub(crate) fn digests(&self) -> Vec<String> {
        self.with_users().map(|(_, digest)| digest.clone()).collect()
    }

    fn with_users(&self) -> impl Iterator<Item = &(Arc<Part>, String)> {
        self.0.iter().filter(|(part, _)| !part.is_empty())
    }
}

impl Entries {
    /// Writes the users and a head that lists them, unless the head has changed since it was read; returns whether it
    /// hadn't. What the head lists lives at least as long as the head.
    pub(crate) async fn write_users(
        &self,
        (before, there, left): (Before<'_>, Option<UsersHead>, Duration),
        head: Head,
        users: &Digested,
        is_whole: bool,
    ) -> Result<bool, Error> {
        let Some(seal) = self.seal() else { return Ok(true) };
        let own = UsersHead { head, digests: users.digests() };
        // Another process may have done all of it just now.
        let is_recent = left > RULES_TTL.saturating_sub(REFRESHED_EVERY / 2);
        if there.as_ref() == Some(&own) && (!is_whole || is_recent) {
            return Ok(true);
        }
        // Without a head, whatever else is there may be about to expire.
        let is_whole = is_whole || there.is_none();
        let there = there.map(|there| there.digests).unwrap_or_default();
        self.write_parts(users, &there, is_whole).await?;
        // Last, since it says that the rest is there. It expires together with the first of the rest.
        let content = serde_json::to_vec(&own).unwrap_or_default();
        let replaced = self.replace(&seal, before, &[(HEAD, content)], is_whole.then_some(RULES_TTL)).await?;
        if let Some(entry) = &replaced {
            self.drop_parts(entry, &there, &own.digests).await?;
        }
        Ok(replaced.is_some())
    }

    /// Writes the parts that aren't there yet. `there`: the digests of those that are, unless they have expired;
    /// `prolong`: prolongs these, and writes those that have expired.
    async fn write_parts(&self, users: &Digested, there: &[String], prolong: bool) -> Result<(), Error> {
        let there: HashSet<_> = there.iter().collect();
        let (known, mut missing): (Vec<_>, Vec<_>) = users.with_users().partition(|(_, digest)| there.contains(digest));
        if prolong {
            for some in known.chunks(NAMES_AT_ONCE) {
                let mut keep = tollgate::redis::pipe();
                for (_, digest) in some {
                    keep.cmd("PEXPIRE").arg(self.name_of_users(digest)).arg(millis(RULES_TTL));
                }
                let Some(kept) = self.ask::<Vec<bool>>(&keep).await? else { return Ok(()) };
                missing.extend(some.iter().zip(kept).filter(|(_, kept)| !kept).map(|(part, _)| *part));
            }
        }
        for some in missing.chunks(AT_ONCE) {
            let mut write = tollgate::redis::pipe();
            for (part, digest) in some {
                write.cmd("SET").arg(self.name_of_users(digest)).arg(part.bytes()).arg("PX").arg(millis(RULES_TTL));
            }
            self.ask::<tollgate::redis::Value>(&write).await?;
        }
        Ok(())
    }

    /// Lets parts expire that are no longer listed, unless another head has been written since: it may list them again.
    async fn drop_parts(&self, head: &[u8], there: &[String], listed: &[String]) -> Result<(), Error> {
        let listed: HashSet<_> = listed.iter().collect();
        let replaced: Vec<_> = there.iter().filter(|digest| !listed.contains(digest)).collect();
        for some in replaced.chunks(NAMES_AT_ONCE) {
            let mut expire = tollgate::redis::pipe();
            let command = expire.cmd("EVAL").arg(EXPIRE).arg(some.len() + 1).arg(self.name(HEAD));
            some.iter().for_each(|digest| _ = command.arg(self.name_of_users(digest)));
            command.arg(sha1(head)).arg(millis(REPLACED_TTL));
            self.ask::<tollgate::redis::Value>(&expire).await?;
        }
        Ok(())
    }

    /// The users with these digests, or none if any of them is missing or isn't what its name says.
    pub(crate) async fn read_users(&self, digests: &[String]) -> Result<Option<UserUpdates>, Error> {
        // No process writes more digests, or one twice; reading them could take any amount of memory.
        if digests.len() > PARTS || digests.iter().collect::<HashSet<_>>().len() < digests.len() {
            return Ok(None);
        }
        let mut users = UserUpdates::new(true);
        for some in digests.chunks(AT_ONCE) {
            let mut read = tollgate::redis::pipe();
            for digest in some {
                read.cmd("GET").arg(self.name_of_users(digest));
            }
            let Some(parts) = self.ask::<Vec<Option<Vec<u8>>>>(&read).await? else { return Ok(None) };
            for (digest, part) in some.iter().zip(parts) {
                let part = part.filter(|part| digest_of(part) == *digest);
                if !part.is_some_and(|part| users.add_bytes(&part)) {
                    return Ok(None);
                }
            }
        }
        Ok(Some(users))
    }

    fn name_of_users(&self, digest: &str) -> String {
        self.name(&users_part(digest))
    }
}

pub(crate) fn users_part(digest: &str) -> String {
    format!("users:{digest}")
}

/// The first half of the SHA-256, in hexadecimal digits.
fn digest_of(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(32);
    for byte in Sha256::digest(bytes).iter().take(16) {
        let _ = write!(text, "{byte:02x}");
    }
    text
}
