//! Users in the database: their own limits, blocks and totals.

use std::time::{Duration, SystemTime};

use tokio_postgres::Row;
use tokio_postgres::types::ToSql;
use tollgate::rules::UserBlock;

use super::input::{self, OwnLimits};
use super::users_in_force::{Block, Settings, UserUpdates};
use crate::postgres::client::Transaction;
use crate::postgres::{Postgres, PostgresError, in_time};

/// What the database has on one user.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoredUser {
    /// The user's name.
    pub user: String,
    /// The user's tier; `None`: the tier that the service gives.
    pub tier: Option<String>,
    /// Limits in place of the tier's.
    pub limits: OwnLimits,
    /// The last block, unless it was lifted. It may have expired: [`is_blocked`](Self::is_blocked).
    pub block: Option<UserBlock>,
    /// Requests allowed on the current day of UTC, as far as services have written them.
    pub total_today: u64,
    /// Requests allowed in the current month of UTC, as far as services have written them.
    pub total_this_month: u64,
    /// Requests ever denied.
    pub times_exceeded: u64,
    /// When the last request came, to the second or so.
    pub last_request_at: Option<SystemTime>,
    /// When the user was first stored.
    pub created_at: SystemTime,
    /// When anything but the totals last changed.
    pub updated_at: SystemTime,
    /// Who made that change.
    pub updated_by: String,
    /// When this was read, by the database's clock.
    pub read_at: SystemTime,
}

const COLUMNS: &str = "user_id, tier, per_hour, per_day, burst, blocked, blocked_reason, blocked_until,
    CASE WHEN today >= (now() AT TIME ZONE 'UTC')::date THEN total_today ELSE 0 END AS total_today,
    CASE WHEN this_month >= date_trunc('month', now() AT TIME ZONE 'UTC')::date THEN total_this_month ELSE 0 END
        AS total_this_month,
    times_exceeded, last_request_at, created_at, updated_at, updated_by, now() AS read_at";

impl Postgres {
    /// Denies a user everything, for this reason, until the given moment or until the block is lifted. In force in
    /// every process within a second. Services compare the moment with their own clocks; [`now`](Postgres::now) is the
    /// database's, to compute it from. Replaces an earlier block. `by` says who does it, in at most 256 bytes;
    /// empty: the database's role.
    ///
    /// # Errors
    ///
    /// No connection; no tables; a user name that is empty or above 512 bytes; a reason above 1,024 bytes; text that
    /// contains NUL.
    pub async fn block_user(
        &self,
        user: &str,
        reason: Option<&str>,
        until: Option<SystemTime>,
        by: &str,
    ) -> Result<(), PostgresError> {
        input::user(user)?;
        input::reason(reason)?;
        input::time("until", until)?;
        input::by(by)?;
        let upsert = "
            INSERT INTO tollgate.user_quotas (user_id, blocked, blocked_reason, blocked_until, updated_by)
            VALUES ($1, true, $2, $3, coalesce(nullif($4, ''), current_user))
            ON CONFLICT (user_id) DO UPDATE
            SET blocked = true, blocked_reason = excluded.blocked_reason, blocked_until = excluded.blocked_until,
                updated_at = now(), updated_by = excluded.updated_by";
        self.changed(upsert, &[&user, &reason, &until, &by]).await.map(drop)
    }

    /// Lifts a user's block; returns whether there was one.
    ///
    /// # Errors
    ///
    /// No connection; no tables; text that is too long or contains NUL.
    pub async fn unblock_user(&self, user: &str, by: &str) -> Result<bool, PostgresError> {
        input::user(user)?;
        input::by(by)?;
        let update = "
            UPDATE tollgate.user_quotas
            SET blocked = false, blocked_reason = NULL, blocked_until = NULL, updated_at = now(),
                updated_by = coalesce(nullif($2, ''), current_user)
            WHERE user_id = $1 AND blocked";
        Ok(self.changed(update, &[&user, &by]).await? > 0)
    }

    /// Sets a user's tier, and limits in place of the tier's. Replaces all of them: a limit that isn't given is the
    /// tier's.
    ///
    /// # Errors
    ///
    /// No connection; no tables; a limit by the second, which users can't have; limits of zero units or above 2^53;
    /// text that is too long or contains NUL.
    pub async fn set_user(
        &self,
        user: &str,
        tier: Option<&str>,
        limits: OwnLimits,
        by: &str,
    ) -> Result<(), PostgresError> {
        input::user(user)?;
        input::tier(tier)?;
        input::by(by)?;
        limits.checked()?;
        if let Some(units) = limits.per_second {
            let why = "users have limits per hour and per day only";
            return Err(PostgresError::input(format!("per_second: {why}, got {units}")));
        }
        let upsert = "
            INSERT INTO tollgate.user_quotas (user_id, tier, per_hour, per_day, burst, updated_by)
            VALUES ($1, $2, $3, $4, $5, coalesce(nullif($6, ''), current_user))
            ON CONFLICT (user_id) DO UPDATE
            SET tier = excluded.tier, per_hour = excluded.per_hour, per_day = excluded.per_day, burst = excluded.burst,
                updated_at = now(), updated_by = excluded.updated_by";
        let [per_hour, per_day, burst] = [limits.per_hour, limits.per_day, limits.burst].map(input::column);
        self.changed(upsert, &[&user, &tier, &per_hour, &per_day, &burst, &by]).await.map(drop)
    }

    /// Changes the configuration with one statement; returns the number of rows affected.
    pub(crate) async fn changed(&self, sql: &str, values: &[&(dyn ToSql + Sync)]) -> Result<u64, PostgresError> {
        self.change(async |transaction| transaction.execute(sql, values).await).await
    }

    /// What the database has on a user; `None` if nothing, so that the tier's limits apply.
    ///
    /// # Errors
    ///
    /// No connection; no tables; a name that no user can have.
    pub async fn user(&self, user: &str) -> Result<Option<StoredUser>, PostgresError> {
        input::user(user)?;
        let select = format!("SELECT {COLUMNS} FROM tollgate.user_quotas WHERE user_id = $1");
        Ok(self.look(&select, &[&user]).await?.first().map(StoredUser::of))
    }

    /// Users with a tier, limits or a block of their own, in order of name.
    ///
    /// # Errors
    ///
    /// No connection; no tables.
    pub async fn users(&self) -> Result<Vec<StoredUser>, PostgresError> {
        let select = format!(
            "SELECT {COLUMNS} FROM tollgate.user_quotas
            WHERE version > 0 AND (blocked OR num_nonnulls(tier, per_hour, per_day, burst) > 0) ORDER BY user_id"
        );
        let rows = self.look(&select, &[]).await?;
        Ok(rows.iter().map(StoredUser::of).collect())
    }
}

/// Users changed since a version, for a process that decides.
const CHANGED: &str = "
    SELECT user_id, tier, per_hour, per_day, burst, blocked, blocked_reason, blocked_until
    FROM tollgate.user_quotas WHERE version > $1";

/// Rows that are read at once: some milliseconds' work, and well below a megabyte.
const PAGE: u16 = 5000;
const PAGE_WITHIN: Duration = Duration::from_secs(12);

/// Reads the users that changed since a version, in pages, so that no result is held as a whole and each page has all
/// the time for itself. Returns how many rows were read.
pub(crate) async fn read(
    transaction: &Transaction<'_>,
    since: i64,
    users: &mut UserUpdates,
) -> Result<u64, PostgresError> {
    let portal = in_time(PAGE_WITHIN, transaction.bind(CHANGED, &[&since])).await?;
    let mut count = 0;
    loop {
        let rows = in_time(PAGE_WITHIN, transaction.query_portal(&portal, PAGE.into())).await?;
        for row in &rows {
            users.add(row.get(0), &settings(row));
        }
        count += rows.len() as u64;
        if rows.len() < PAGE.into() {
            return Ok(count);
        }
    }
}

/// What a row of [`CHANGED`] says.
fn settings(row: &Row) -> Settings<'_> {
    let [per_hour, per_day, burst] = [2, 3, 4].map(|column| input::units(row.get(column)));
    let block = || Block { reason: row.get(6), until: input::moment(row.get(7)) };
    Settings {
        tier: row.get(1),
        limits: OwnLimits { per_second: None, per_hour, per_day, burst },
        block: row.get::<_, bool>(5).then(block),
    }
}

fn limits(row: &Row) -> OwnLimits {
    let [per_hour, per_day, burst] = ["per_hour", "per_day", "burst"].map(|column| input::units(row.get(column)));
    OwnLimits { per_second: None, per_hour, per_day, burst }
}

impl StoredUser {
    fn of(row: &Row) -> Self {
        let count = |column: &str| row.get::<_, i64>(column).unsigned_abs();
        let block = || UserBlock::new(row.get("blocked_reason"), row.get("blocked_until"));
        Self {
            user: row.get("user_id"),
            tier: row.get("tier"),
            limits: limits(row),
            block: row.get::<_, bool>("blocked").then(block),
            total_today: count("total_today"),
            total_this_month: count("total_this_month"),
            times_exceeded: count("times_exceeded"),
            last_request_at: row.get("last_request_at"),
            created_at: row.get("created_at"),
            updated_at: row.get("updated_at"),
            updated_by: row.get("updated_by"),
            read_at: row.get("read_at"),
        }
    }

    /// Whether the user was denied everything when this was read.
    #[must_use]
    pub fn is_blocked(&self) -> bool {
        let lasts = |block: &UserBlock| block.until.is_none_or(|until| until > self.read_at);
        self.block.as_ref().is_some_and(lasts)
    }
}
