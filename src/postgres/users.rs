//! Users in the database: limits of their own, blocks, and what they have used.

use std::time::SystemTime;

use tokio_postgres::Row;
use tokio_postgres::types::ToSql;

use super::{OwnLimits, Postgres, PostgresError, input};
use crate::rules::Account;

/// What the database has of one user.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoredUser {
    /// The user's name.
    pub user: String,
    /// What the user pays for; none: whatever the service says.
    pub tier: Option<String>,
    /// Limits in place of those of the tier.
    pub limits: OwnLimits,
    /// Whether the user was blocked and that was not lifted. The block may have ended.
    pub blocked: bool,
    /// Why.
    pub blocked_reason: Option<String>,
    /// When the block ends; none: when it is lifted.
    pub blocked_until: Option<SystemTime>,
    /// Requests that were allowed on this day of UTC, as far as services have written them.
    pub total_today: u64,
    /// Requests that were allowed in this month of UTC, as far as services have written them.
    pub total_this_month: u64,
    /// Requests that were denied, ever.
    pub times_exceeded: u64,
    /// When the last request came, to the second or so.
    pub last_request_at: Option<SystemTime>,
    /// When the user was first known.
    pub created_at: SystemTime,
    /// When anything but the totals last changed.
    pub updated_at: SystemTime,
    /// Who changed it.
    pub updated_by: String,
}

const COLUMNS: &str = "user_id, tier, per_hour, per_day, burst, blocked, blocked_reason, blocked_until,
    CASE WHEN today = (now() AT TIME ZONE 'UTC')::date THEN total_today ELSE 0 END AS total_today,
    CASE WHEN this_month = date_trunc('month', now() AT TIME ZONE 'UTC')::date THEN total_this_month ELSE 0 END
        AS total_this_month,
    times_exceeded, last_request_at, created_at, updated_at, updated_by";

impl Postgres {
    /// Denies everything to a user: for this reason, until then or until it is lifted. In force in every process within a
    /// second. A block that is there is replaced. `by` says who does it, in at most 256 bytes.
    ///
    /// # Errors
    ///
    /// No connection; no tables; a user of no or more than 512 bytes, a reason of more than 1,024; text with a NUL.
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
            VALUES ($1, true, $2, $3, $4)
            ON CONFLICT (user_id) DO UPDATE
            SET blocked = true, blocked_reason = excluded.blocked_reason, blocked_until = excluded.blocked_until,
                updated_at = now(), updated_by = excluded.updated_by";
        self.changed(upsert, &[&user, &reason, &until, &by]).await.map(drop)
    }

    /// Lifts a user's block, and says whether there was one.
    ///
    /// # Errors
    ///
    /// No connection; no tables; text that is too long or has a NUL.
    pub async fn unblock_user(&self, user: &str, by: &str) -> Result<bool, PostgresError> {
        input::user(user)?;
        input::by(by)?;
        let update = "
            UPDATE tollgate.user_quotas
            SET blocked = false, blocked_reason = NULL, blocked_until = NULL, updated_at = now(), updated_by = $2
            WHERE user_id = $1 AND blocked";
        Ok(self.changed(update, &[&user, &by]).await? > 0)
    }

    /// Sets what a user pays for, and limits in place of those of the tier: all of them, so that what isn't named is as the
    /// tier says.
    ///
    /// # Errors
    ///
    /// No connection; no tables; limits of a user by the second, of no units or above 2^53; text that is too long or has a
    /// NUL.
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
            let expected = "expected none of a user, whose limits are by the hour and the day";
            return Err(PostgresError::input(format!("per_second: {expected}, got {units}")));
        }
        let upsert = "
            INSERT INTO tollgate.user_quotas (user_id, tier, per_hour, per_day, burst, updated_by)
            VALUES ($1, $2, $3, $4, $5, $6)
            ON CONFLICT (user_id) DO UPDATE
            SET tier = excluded.tier, per_hour = excluded.per_hour, per_day = excluded.per_day, burst = excluded.burst,
                updated_at = now(), updated_by = excluded.updated_by";
        let [per_hour, per_day, burst] = [limits.per_hour, limits.per_day, limits.burst].map(input::column);
        self.changed(upsert, &[&user, &tier, &per_hour, &per_day, &burst, &by]).await.map(drop)
    }

    /// Changes the configuration by one statement, and says how many rows that concerned.
    pub(super) async fn changed(&self, sql: &str, values: &[&(dyn ToSql + Sync)]) -> Result<u64, PostgresError> {
        let mut connection = self.connection().await?;
        let transaction = Self::change(&mut connection).await?;
        let rows = transaction.execute(sql, values).await?;
        transaction.commit().await?;
        Ok(rows)
    }

    /// What is known of a user; none if nothing is, so that the tier's limits hold.
    ///
    /// # Errors
    ///
    /// No connection; no tables; a name that can be no user's.
    pub async fn user(&self, user: &str) -> Result<Option<StoredUser>, PostgresError> {
        input::user(user)?;
        let select = format!("SELECT {COLUMNS} FROM tollgate.user_quotas WHERE user_id = $1");
        let row = self.connection().await?.query_opt(&select, &[&user]).await?;
        Ok(row.as_ref().map(StoredUser::of))
    }

    /// Users whom something sets apart, in the order of their names: a tier, limits or a block of their own.
    ///
    /// # Errors
    ///
    /// No connection; no tables.
    pub async fn users(&self) -> Result<Vec<StoredUser>, PostgresError> {
        let select = format!(
            "SELECT {COLUMNS} FROM tollgate.user_quotas
            WHERE version > 0 AND (blocked OR num_nonnulls(tier, per_hour, per_day, burst) > 0) ORDER BY user_id"
        );
        let rows = self.connection().await?.query(&select, &[]).await?;
        Ok(rows.iter().map(StoredUser::of).collect())
    }
}

/// What has changed of users since a version, for a process that decides: of each, what sets the user apart, if anything
/// does now.
pub(super) const CHANGED: &str = "
    SELECT user_id, tier, per_hour, per_day, burst, blocked, blocked_reason, blocked_until
    FROM tollgate.user_quotas WHERE version > $1";

/// A row of [`CHANGED`].
pub(super) fn changed(row: &Row) -> (String, Option<Account>) {
    let user: String = row.get("user_id");
    let tier: Option<&str> = row.get("tier");
    let blocked: bool = row.get("blocked");
    // Limits that were written by hand and can't be used are ignored: the tier's hold.
    let limits = limits(row).rule().ok().flatten();
    if tier.is_none() && !blocked && limits.is_none() {
        return (user, None);
    }
    let account = Account::new(&user);
    let account = tier.map_or(account.clone(), |tier| account.tier(tier));
    let account = limits.and_then(|limits| account.clone().limits(limits).ok()).unwrap_or(account);
    let account = match blocked {
        true => account.blocked(row.get("blocked_reason"), input::moment(row.get("blocked_until"))),
        false => account,
    };
    (user, Some(account))
}

fn limits(row: &Row) -> OwnLimits {
    let [per_hour, per_day, burst] = ["per_hour", "per_day", "burst"].map(|column| input::units(row.get(column)));
    OwnLimits { per_second: None, per_hour, per_day, burst }
}

impl StoredUser {
    fn of(row: &Row) -> Self {
        let count = |column: &str| row.get::<_, i64>(column).unsigned_abs();
        Self {
            user: row.get("user_id"),
            tier: row.get("tier"),
            limits: limits(row),
            blocked: row.get("blocked"),
            blocked_reason: row.get("blocked_reason"),
            blocked_until: row.get("blocked_until"),
            total_today: count("total_today"),
            total_this_month: count("total_this_month"),
            times_exceeded: count("times_exceeded"),
            last_request_at: row.get("last_request_at"),
            created_at: row.get("created_at"),
            updated_at: row.get("updated_at"),
            updated_by: row.get("updated_by"),
        }
    }

    /// Whether the user is denied everything now.
    #[must_use]
    pub fn is_blocked(&self) -> bool {
        self.blocked && self.blocked_until.is_none_or(|until| until > SystemTime::now())
    }
}
