//! Reads single decisions back: why was this user denied at that moment?

use std::net::IpAddr;
use std::time::{Duration, SystemTime};

use tokio_postgres::Row;
use tollgate::RetryAfter;

use super::columns;
use super::record::{MOST_BYTES, Outcome, text};
use crate::postgres::{Postgres, PostgresError, in_range};

/// Which decisions to read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditQuery {
    user: String,
    from: SystemTime,
    to: SystemTime,
    only_denied: bool,
    most: u32,
}

/// A recorded decision.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AuditRecord {
    /// When the decision was made, by the service's clock.
    pub at: SystemTime,
    /// The id of the request's API key.
    pub api_key: Option<String>,
    /// The client's address.
    pub ip: Option<IpAddr>,
    /// The matched route or, where that isn't known, the path.
    pub endpoint: Option<String>,
    /// The HTTP method.
    pub method: Option<String>,
    /// The name of the rule that applied; of several, that of the limit below or, if that isn't known, the first.
    pub rule: Option<String>,
    /// The names of all rules that applied, in their order, separated by commas, if several did.
    pub rules: Option<String>,
    /// The outcome.
    pub decision: Outcome,
    /// Why; see [`Reason::name`](tollgate::rules::Reason::name).
    pub reason: String,
    /// The limit that denied or, for an allowed request, the one with the least left: its name or its text.
    pub limited_by: Option<String>,
    /// Units of that limit in use after this decision.
    pub used: Option<u64>,
    /// The limit's capacity, in units.
    pub capacity: Option<u64>,
    /// When the request would have been allowed; `None` if it was allowed, or if that isn't known.
    pub retry_after: Option<RetryAfter>,
    /// The HTTP status, if the middleware sent the response.
    pub status: Option<u16>,
    /// Where the service ran.
    pub region: Option<String>,
    /// Which of the service's processes decided.
    pub server: Option<String>,
    /// How long the decision took, including the wait where the middleware waits until a request is allowed.
    pub latency: Duration,
}

impl AuditQuery {
    /// All decisions for a user in a period: `from` included, `to` excluded, at most the last 100.
    #[must_use]
    pub fn new(user: &str, from: SystemTime, to: SystemTime) -> Self {
        Self { user: user.to_owned(), from, to, only_denied: false, most: 100 }
    }

    /// Only denials.
    #[must_use]
    pub fn only_denied(mut self) -> Self {
        self.only_denied = true;
        self
    }

    /// The most decisions returned: the latest ones.
    #[must_use]
    pub fn most(mut self, most: u32) -> Self {
        self.most = most;
        self
    }
}

fn select() -> String {
    format!(
        "SELECT {} FROM tollgate.rate_limit_audit_logs
        WHERE user_id = $1 AND at >= $2 AND at < $3 AND (decision <> 'allowed' OR NOT $4)
        ORDER BY at DESC LIMIT $5",
        columns::names()
    )
}

impl Postgres {
    /// The decisions that match a query, oldest first. Decisions moved to an archive aren't included.
    ///
    /// # Errors
    ///
    /// No connection; no tables; no answer within 15 seconds, or the [deadline](Self::deadline).
    pub async fn audit(&self, query: &AuditQuery) -> Result<Vec<AuditRecord>, PostgresError> {
        // Escaped and cut off as it was when recorded.
        let user = text(query.user.as_bytes(), MOST_BYTES);
        let (most, denied) = (i64::from(query.most), query.only_denied);
        let [from, to] = [query.from, query.to].map(in_range);
        let mut rows = self.read(&select(), &[&&*user, &from, &to, &denied, &most]).await?;
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
            rules: row.get("rules"),
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
