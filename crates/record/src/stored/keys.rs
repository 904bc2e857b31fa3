//! API keys in the database: created, rotated, revoked and looked up.

use std::collections::HashMap;
use std::io;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};
use tokio_postgres::Row;
use tollgate::rules::Account;

use super::input::{self, OwnLimits};
use super::key_text::NewKey;
use super::key_text::{self, Checksums, KeyId};
use crate::postgres::client::Transaction;
use crate::postgres::{Postgres, PostgresError};

/// The terms of a new key.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct KeyTerms {
    /// The owner's name for it.
    pub name: String,
    /// The key's tier; `None`: the user's.
    pub tier: Option<String>,
    /// The key's own limits, in place of the user's and the tier's. They count per key.
    pub limits: OwnLimits,
    /// When it expires, by the clocks of the services, best computed from [`Postgres::now`]; `None`: it is valid until
    /// revoked.
    pub expires_at: Option<SystemTime>,
}

/// A key as the database stores it: without the secret, so it can't be used.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoredKey {
    /// Its public part, which limits count it by.
    pub id: String,
    /// The user it belongs to.
    pub user: String,
    /// The terms it was created with.
    pub terms: KeyTerms,
    /// Requests allowed with it, as far as services have written them.
    pub total: u64,
    /// When it was last used, to the second or so.
    pub last_used_at: Option<SystemTime>,
    /// When it was revoked, if it was.
    pub revoked_at: Option<SystemTime>,
    /// Who revoked it.
    pub revoked_by: Option<String>,
    /// The key that it replaces.
    pub replaces: Option<String>,
    /// When it was created.
    pub created_at: SystemTime,
    /// Who created it.
    pub created_by: String,
    /// When this was read, by the database's clock.
    pub read_at: SystemTime,
}

/// What deciding a request needs of a key; cached in Redis as JSON.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct KeyRecord {
    pub(crate) hash: Vec<u8>,
    pub(crate) user: String,
    tier: Option<String>,
    per_second: Option<u64>,
    per_hour: Option<u64>,
    per_day: Option<u64>,
    burst: Option<u64>,
    pub(crate) expires_at: Option<SystemTime>,
    pub(crate) revoked: bool,
}

/// The result of looking up an id, including that there is no such key.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct LookedUp {
    /// The history and version of the configuration that it was read in.
    pub(crate) history: String,
    pub(crate) version: i64,
    pub(crate) key: Option<KeyRecord>,
}

/// Most changes of keys that are read; beyond these, everything cached is looked up again.
pub(crate) const MOST_CHANGES: usize = 10_000;

/// The latest changes since a version, latest first.
pub(crate) const CHANGED: &str = "
    SELECT key_id, hash, user_id, tier, per_second, per_hour, per_day, burst, expires_at, revoked_at, version
    FROM tollgate.api_keys WHERE version > $1 ORDER BY version DESC LIMIT 10000";

/// Those of these keys that exist.
pub(crate) const OF_IDS: &str = "
    SELECT key_id, hash, user_id, tier, per_second, per_hour, per_day, burst, expires_at, revoked_at
    FROM tollgate.api_keys WHERE key_id = ANY ($1)";

/// Those of these keys that exist, and the version that they are read in; one row without a key if there are none.
const LOOKED_UP: &str = "
    SELECT configuration.history::text AS history, configuration.version AS version, key_id, hash, user_id, tier,
        per_second, per_hour, per_day, burst, expires_at, revoked_at
    FROM tollgate.configuration LEFT JOIN tollgate.api_keys ON key_id = ANY ($1)";

const COLUMNS: &str =
    "key_id, user_id, name, tier, per_second, per_hour, per_day, burst, total, last_used_at, expires_at,
    revoked_at, revoked_by, replaces, greatest(created_at, 'epoch') AS created_at, created_by, now() AS read_at";

impl Postgres {
    /// Creates an API key for a user. The first value returned is the key, which can't be recovered later: the database
    /// stores its SHA-256.
    ///
    /// # Errors
    ///
    /// No connection; no tables; limits of zero units or above 2^53; text that is too long or contains NUL.
    pub async fn create_key(
        &self,
        user: &str,
        terms: &KeyTerms,
        by: &str,
    ) -> Result<(NewKey, StoredKey), PostgresError> {
        self.create_key_and(user, terms, by, |_, _| Ok(())).await
    }

    /// Like [`create_key`](Self::create_key), and hands the key out before it becomes valid: if that fails, no key is
    /// created. Other changes of the configuration wait meanwhile, and after ten seconds it is too late: the key isn't
    /// created, and the call fails.
    ///
    /// # Errors
    ///
    /// Those of `create_key`; the error of `hand_out`.
    pub async fn create_key_and(
        &self,
        user: &str,
        terms: &KeyTerms,
        by: &str,
        hand_out: impl FnOnce(&NewKey, &StoredKey) -> io::Result<()>,
    ) -> Result<(NewKey, StoredKey), PostgresError> {
        terms.checked()?;
        input::user(user)?;
        input::by(by)?;
        self.change(async |transaction| {
            let (key, stored) = insert(transaction, user, terms, None, by).await?;
            hand_out(&key, &stored).map_err(not_handed_out)?;
            Ok((key, stored))
        })
        .await
    }

    /// Creates a replacement for this key, with the same terms and as long a validity. The old key stays valid for
    /// `overlap`, or until it would have expired. A key is named by its id, with or without `tg_` before it, or by the
    /// whole key.
    ///
    /// # Errors
    ///
    /// No connection; no tables; no such key; a key that has expired, was revoked, or was replaced before.
    pub async fn rotate_key(
        &self,
        id: &str,
        overlap: Duration,
        by: &str,
    ) -> Result<(NewKey, StoredKey), PostgresError> {
        self.rotate_key_and(id, overlap, by, |_, _| Ok(())).await
    }

    /// Like [`rotate_key`](Self::rotate_key), and hands the new key out before it becomes valid: if that fails, no key
    /// is created, and the old one stays as it is. Other changes wait meanwhile, as in
    /// [`create_key_and`](Self::create_key_and).
    ///
    /// # Errors
    ///
    /// Those of `rotate_key`; the error of `hand_out`.
    pub async fn rotate_key_and(
        &self,
        id: &str,
        overlap: Duration,
        by: &str,
        hand_out: impl FnOnce(&NewKey, &StoredKey) -> io::Result<()>,
    ) -> Result<(NewKey, StoredKey), PostgresError> {
        let id = named(id)?;
        input::by(by)?;
        let until = |from: SystemTime| {
            let until = from.checked_add(overlap).filter(|until| input::time("overlap", Some(*until)).is_ok());
            let expected = "expected an end before the year 10000";
            until.ok_or_else(|| PostgresError::input(format!("overlap: {expected}, got {overlap:?}")))
        };
        until(SystemTime::UNIX_EPOCH)?;
        self.change(async |transaction| {
            let select = format!("SELECT {COLUMNS} FROM tollgate.api_keys WHERE key_id = $1 FOR UPDATE");
            let row = transaction.query_opt(&select, &[&id.as_str()]).await?.ok_or_else(|| unknown(id))?;
            let old = StoredKey::of(&row);
            let got = match (old.revoked_at, old.terms.expires_at) {
                (Some(_), _) => Some("was revoked"),
                (None, Some(_)) if !old.is_valid() => Some("has expired"),
                _ => None,
            };
            if let Some(got) = got {
                return Err(PostgresError::input(format!("key: {} {got}, so it can't be rotated", id.as_str())));
            }
            let later = "SELECT key_id FROM tollgate.api_keys WHERE replaces = $1";
            if let Some(row) = transaction.query_opt(later, &[&id.as_str()]).await? {
                let (id, other) = (id.as_str(), row.get::<_, &str>(0));
                return Err(PostgresError::input(format!("key: {id} was already rotated: {other} replaces it")));
            }
            let until = until(old.read_at)?;
            // As long as the old one's validity, from now on.
            let length = old.terms.expires_at.map(|end| end.duration_since(old.created_at).unwrap_or_default());
            let end = input::moment(length.map(|length| old.read_at + length));
            let terms = KeyTerms { expires_at: end, ..old.terms };
            let (key, stored) = insert(transaction, &old.user, &terms, Some(id.as_str()), by).await?;
            let end = "UPDATE tollgate.api_keys SET expires_at = least(expires_at, $2) WHERE key_id = $1";
            transaction.execute(end, &[&id.as_str(), &until]).await?;
            hand_out(&key, &stored).map_err(not_handed_out)?;
            Ok((key, stored))
        })
        .await
    }

    /// Makes a key invalid for good, in every process within a second. A key that was revoked before stays as it is.
    ///
    /// # Errors
    ///
    /// No connection; no tables; no such key.
    pub async fn revoke_key(&self, id: &str, by: &str) -> Result<StoredKey, PostgresError> {
        let id = named(id)?;
        input::by(by)?;
        let update =
            "UPDATE tollgate.api_keys SET revoked_at = now(), revoked_by = coalesce(nullif($2, ''), current_user)
            WHERE key_id = $1 AND revoked_at IS NULL";
        // As part of the change: a key that is revoked and then can't be read would look as if it weren't.
        self.change(async |transaction| {
            transaction.execute(update, &[&id.as_str(), &by]).await?;
            let row = transaction.query_opt(&of_id(), &[&id.as_str()]).await?;
            row.as_ref().map(StoredKey::of).ok_or_else(|| unknown(id))
        })
        .await
    }

    /// What the database has on a key.
    ///
    /// # Errors
    ///
    /// No connection; no tables; an id that no key can have.
    pub async fn key(&self, id: &str) -> Result<Option<StoredKey>, PostgresError> {
        let id = named(id)?;
        Ok(self.look(&of_id(), &[&id.as_str()]).await?.first().map(StoredKey::of))
    }

    /// The keys of a user or, without one, of all users, in the order in which they were created.
    ///
    /// # Errors
    ///
    /// No connection; no tables; a name that no user can have.
    pub async fn keys(&self, user: Option<&str>) -> Result<Vec<StoredKey>, PostgresError> {
        let rows = match user {
            Some(user) => {
                input::user(user)?;
                let select = format!("SELECT {COLUMNS} FROM tollgate.api_keys WHERE user_id = $1 ORDER BY created_at");
                self.look(&select, &[&user]).await?
            }
            None => {
                let select = format!("SELECT {COLUMNS} FROM tollgate.api_keys ORDER BY user_id, created_at");
                self.look(&select, &[]).await?
            }
        };
        Ok(rows.iter().map(StoredKey::of).collect())
    }

    /// What the database has on each of these ids.
    pub(crate) async fn look_up(&self, ids: &[KeyId]) -> Result<HashMap<KeyId, LookedUp>, PostgresError> {
        let connection = self.connection().await?;
        let statement = connection.prepare_cached(LOOKED_UP).await?;
        let texts: Vec<_> = ids.iter().map(KeyId::as_str).collect();
        let rows = connection.query(&statement, &[&texts]).await?;
        let mut found = HashMap::new();
        if let Some(row) = rows.first() {
            let none = LookedUp { history: row.get("history"), version: row.get("version"), key: None };
            found.extend(ids.iter().map(|id| (*id, none.clone())));
        }
        for row in &rows {
            let id = row.get::<_, Option<&str>>("key_id").and_then(KeyId::read);
            if let Some(found) = id.and_then(|id| found.get_mut(&id)) {
                found.key = Some(KeyRecord::of(row));
            }
        }
        Ok(found)
    }
}

fn of_id() -> String {
    format!("SELECT {COLUMNS} FROM tollgate.api_keys WHERE key_id = $1")
}

async fn insert(
    transaction: &Transaction<'_>,
    user: &str,
    terms: &KeyTerms,
    replaces: Option<&str>,
    by: &str,
) -> Result<(NewKey, StoredKey), PostgresError> {
    let secret = transaction.query_one("SELECT key_secret FROM tollgate.configuration", &[]).await?;
    let key = NewKey::make(&Checksums::new(secret.get(0)))?;
    let insert = format!(
        "INSERT INTO tollgate.api_keys
            (key_id, hash, user_id, name, tier, per_second, per_hour, per_day, burst, expires_at, replaces, created_by)
        VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, coalesce(nullif($12, ''), current_user))
        RETURNING {COLUMNS}"
    );
    let OwnLimits { per_second, per_hour, per_day, burst } = terms.limits;
    let [per_second, per_hour, per_day, burst] = [per_second, per_hour, per_day, burst].map(input::column);
    let hash = key.hash();
    let row = transaction
        .query_one(
            &insert,
            &[
                &key.id(),
                &hash.as_slice(),
                &user,
                &terms.name,
                &terms.tier,
                &per_second,
                &per_hour,
                &per_day,
                &burst,
                &terms.expires_at,
                &replaces,
                &by,
            ],
        )
        .await?;
    Ok((key, StoredKey::of(&row)))
}

/// The id of a key that is named by its id or in full; then its checksum isn't looked at.
fn named(text: &str) -> Result<KeyId, PostgresError> {
    if let Some((id, _)) = key_text::read(text.as_bytes(), None) {
        return Ok(id);
    }
    KeyId::read(text.strip_prefix("tg_").unwrap_or(text)).ok_or_else(|| {
        // It may be part of a key, so the message doesn't repeat it.
        PostgresError::input("key: expected the 12 digits and letters of its id, or the whole key, got another text")
    })
}

#[allow(clippy::needless_pass_by_value, reason = "for map_err")]
fn not_handed_out(error: io::Error) -> PostgresError {
    PostgresError::refused(format!("key: not created, since it could not be handed out: {error}"))
}

fn unknown(id: KeyId) -> PostgresError {
    PostgresError::input(format!("key: there is no key {}", id.as_str()))
}

impl KeyTerms {
    fn checked(&self) -> Result<(), PostgresError> {
        input::name(&self.name)?;
        input::tier(self.tier.as_deref())?;
        input::time("expires_at", self.expires_at)?;
        self.limits.checked()
    }
}

impl StoredKey {
    fn of(row: &Row) -> Self {
        Self {
            id: row.get("key_id"),
            user: row.get("user_id"),
            terms: KeyTerms {
                name: row.get("name"),
                tier: row.get("tier"),
                limits: limits(row),
                expires_at: input::moment(row.get("expires_at")),
            },
            total: row.get::<_, i64>("total").unsigned_abs(),
            last_used_at: row.get("last_used_at"),
            revoked_at: row.get("revoked_at"),
            revoked_by: row.get("revoked_by"),
            replaces: row.get("replaces"),
            created_at: row.get("created_at"),
            created_by: row.get("created_by"),
            read_at: row.get("read_at"),
        }
    }

    /// Whether requests with it were accepted when this was read.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        self.revoked_at.is_none() && self.terms.expires_at.is_none_or(|end| end > self.read_at)
    }
}

impl KeyRecord {
    pub(crate) fn of(row: &Row) -> Self {
        let OwnLimits { per_second, per_hour, per_day, burst } = limits(row);
        Self {
            hash: row.get("hash"),
            user: row.get("user_id"),
            tier: row.get("tier"),
            per_second,
            per_hour,
            per_day,
            burst,
            expires_at: input::moment(row.get("expires_at")),
            revoked: row.get::<_, Option<SystemTime>>("revoked_at").is_some(),
        }
    }

    /// The account that the key belongs to, without the user's own settings.
    pub(crate) fn account(&self, id: KeyId) -> Account {
        let Self { per_second, per_hour, per_day, burst, .. } = *self;
        let account = Account::new(&self.user).api_key(id.as_str());
        let account = self.tier.as_deref().map_or(account.clone(), |tier| account.tier(tier));
        let limits = OwnLimits { per_second, per_hour, per_day, burst }.rule().ok().flatten();
        limits.and_then(|limits| account.clone().key_limits(limits).ok()).unwrap_or(account)
    }
}

fn limits(row: &Row) -> OwnLimits {
    let columns = ["per_second", "per_hour", "per_day", "burst"];
    let [per_second, per_hour, per_day, burst] = columns.map(|column| input::units(row.get(column)));
    OwnLimits { per_second, per_hour, per_day, burst }
}
