//! Reading back single decisions: why was this user denied, then?

use std::net::IpAddr;
use std::time::{Duration, SystemTime};

use tokio_postgres::Row;

use super::record::{MOST_BYTES, Outcome, text};
use crate::decision::RetryAfter;
use crate::postgres::{Postgres, PostgresError, in_range};

/// Which decisions to read.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AuditQuery {
    /// Whose.
    pub user: String,
    /// From this moment on.
    pub from: SystemTime,
    /// Up to, and not including, this one.
    pub to: SystemTime,
    /// Only those that were denied.
    pub only_denied: bool,
    /// At most so many, the last ones.
    pub most: u32,
}

/// A decision, as it was recorded.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AuditRecord {
    /// When it was made, by the clock of the service.
    pub at: SystemTime,
    /// The id of the API key that the request came with.
    pub api_key: Option<String>,
    /// The client's address.
    pub ip: Option<IpAddr>,
    /// The route that matched or, where that isn't known, the path.
    pub endpoint: Option<String>,
    /// The HTTP method.
    pub method: Option<String>,
    /// The name of the rule that applied.
    pub rule: Option<String>,
    /// What became of the request.
    pub decision: Outcome,
    /// Why: see [`Reason::name`](crate::rules::Reason::name).
    pub reason: String,
    /// The limit that denied or, of what was allowed, the one with the least left: its name or its text.
    pub limited_by: Option<String>,
    /// Units of it that were taken, after this decision.
    pub used: Option<u64>,
    /// The most units of it that can be.
    pub capacity: Option<u64>,
    /// When it would have been allowed; none of what was allowed, or where that isn't known.
    pub retry_after: Option<RetryAfter>,
    /// The HTTP status, where the middleware answered.
    pub status: Option<u16>,
    /// Where the service ran.
    pub region: Option<String>,
    /// Which of its processes it was.
    pub server: Option<String>,
    /// How long the decision took; where the middleware waits until a request is allowed, with the wait.
    pub latency: Duration,
}

impl AuditQuery {
    /// All decisions for a user from a moment on, up to another: the last 100 at most.
    #[must_use]
    pub fn new(user: &str, from: SystemTime, to: SystemTime) -> Self {
        Self { user: user.to_owned(), from, to, only_denied: false, most: 100 }
    }

    /// Only those that were denied.
    #[must_use]
    pub fn only_denied(mut self) -> Self {
        self.only_denied = true;
        self
    }

    /// At most so many, the last ones.
    #[must_use]
    pub fn most(mut self, most: u32) -> Self {
        self.most = most;
        self
    }
}

const SELECT: &str = "
    SELECT at, api_key, ip, endpoint, method, rule, decision, reason, limited_by, used, capacity, retry_after_us, status,
        region, server, latency_us
    FROM tollgate.rate_limit_audit_logs
    WHERE user_id = $1 AND at >= $2 AND at < $3 AND (decision <> 'allowed' OR NOT $4)
    ORDER BY at DESC LIMIT $5";

impl Postgres {
    /// The decisions that a query asks for, the first one first. Only what hasn't been moved to an archive.
    ///
    /// # Errors
    ///
    /// No connection; no tables; no answer within 15 seconds.
    pub async fn audit(&self, query: &AuditQuery) -> Result<Vec<AuditRecord>, PostgresError> {
        // As it was recorded.
        let user = text(query.user.as_bytes(), MOST_BYTES);
        let (most, denied) = (i64::from(query.most), query.only_denied);
        let [from, to] = [query.from, query.to].map(in_range);
        let mut rows = self.read(SELECT, &[&&*user, &from, &to, &denied, &most]).await?;
        rows.reverse();
        Ok(rows.iter().map(AuditRecord::of).collect())
    }
}

impl AuditRecord {
    fn of(row: &Row) -> Self {
        let count = |name| row.get::<_, Option<i64>>(name).map(i64::unsigned_abs);
        Self {
            at: row.get("at"),
            api_key: row.get("api_key"),
            ip: row.get("ip"),
            endpoint: row.get("endpoint"),
            method: row.get("method"),
            rule: row.get("rule"),
            decision: Outcome::read(row.get("decision")),
            reason: row.get("reason"),
            limited_by: row.get("limited_by"),
            used: count("used"),
            capacity: count("capacity"),
            retry_after: row.get::<_, Option<i64>>("retry_after_us").map(|micros| match micros {
                ..0 => RetryAfter::Never,
                0 => RetryAfter::Now,
                _ => RetryAfter::After(Duration::from_micros(micros.unsigned_abs())),
            }),
            status: row.get::<_, Option<i16>>("status").map(i16::unsigned_abs),
            region: row.get("region"),
            server: row.get("server"),
            latency: Duration::from_micros(row.get::<_, i64>("latency_us").unsigned_abs()),
        }
    }
}
