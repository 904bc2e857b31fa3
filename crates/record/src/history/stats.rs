//! Reads statistics of decisions: by time, or by user, endpoint or region.

use std::time::{Duration, SystemTime};

use tokio_postgres::Row;
use tokio_postgres::types::ToSql;

use super::histogram::Histogram;
use super::record::{MOST_BYTES, text};
use crate::postgres::{Postgres, PostgresError, in_range};

/// The most rows returned, unless a query sets another maximum.
const MOST_ROWS: u32 = 10_000;

/// The length of the periods that decisions are counted by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Width {
    /// A minute.
    Minute,
    /// An hour of UTC.
    Hour,
    /// A day of UTC.
    Day,
}

/// What a row stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Group {
    Time,
    User,
    Endpoint,
    Region,
}

/// Which decisions to count, and what a row stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StatsQuery {
    width: Width,
    from: SystemTime,
    to: SystemTime,
    user: Option<String>,
    endpoint: Option<String>,
    region: Option<String>,
    group: Group,
    most: u32,
}

/// Statistics for one period, user, endpoint or region.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// When the period began; `None` where rows stand for something else.
    pub began: Option<SystemTime>,
    /// The user, endpoint or region, empty if not known; `None` where rows stand for periods.
    pub name: Option<String>,
    /// Requests let through.
    pub allowed: u64,
    /// Requests that their limits denied.
    pub throttled: u64,
    /// Requests that were blocked.
    pub blocked: u64,
    /// Decisions that a process made from its own memory or from a lease.
    pub cache_hits: u64,
    /// Decisions for which Redis was asked.
    pub cache_misses: u64,
    /// Median latency of a decision, within 2.2 %.
    pub p50: Duration,
    /// 95th percentile of the latency, within 2.2 %.
    pub p95: Duration,
    /// 99th percentile of the latency, within 2.2 %.
    pub p99: Duration,
}

impl Width {
    /// The width in a word: minute, hour or day.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Minute => "minute",
            Self::Hour => "hour",
            Self::Day => "day",
        }
    }
}

/// The name as it was recorded: escaped and cut off.
fn stored(name: &str) -> String {
    text(name.as_bytes(), MOST_BYTES).into()
}

impl StatsQuery {
    /// Periods that begin at or after `from` and before `to`: a row for each one in which there was a decision.
    #[must_use]
    pub fn new(width: Width, from: SystemTime, to: SystemTime) -> Self {
        Self { width, from, to, user: None, endpoint: None, region: None, group: Group::Time, most: MOST_ROWS }
    }

    /// Only this user.
    #[must_use]
    pub fn user(mut self, user: &str) -> Self {
        self.user = Some(stored(user));
        self
    }

    /// Only this endpoint.
    #[must_use]
    pub fn endpoint(mut self, endpoint: &str) -> Self {
        self.endpoint = Some(stored(endpoint));
        self
    }

    /// Only this region.
    #[must_use]
    pub fn region(mut self, region: &str) -> Self {
        self.region = Some(region.to_owned());
        self
    }

    /// A row for each user, most denials first.
    #[must_use]
    pub fn by_user(mut self) -> Self {
        self.group = Group::User;
        self
    }

    /// A row for each endpoint, most denials first.
    #[must_use]
    pub fn by_endpoint(mut self) -> Self {
        self.group = Group::Endpoint;
        self
    }

    /// A row for each region, most denials first.
    #[must_use]
    pub fn by_region(mut self) -> Self {
        self.group = Group::Region;
        self
    }

    /// The most rows returned: the latest periods, or else the rows with most denials. Default: 10,000.
    #[must_use]
    pub fn most(mut self, most: u32) -> Self {
        self.most = most;
        self
    }

    /// The column that rows are grouped by.
    fn column(&self) -> &'static str {
        match self.group {
            Group::Time => "began",
            Group::User => "user_id",
            Group::Endpoint => "endpoint",
            Group::Region => "region",
        }
    }
}

impl Postgres {
    /// Statistics of decisions, by time, user, endpoint or region.
    ///
    /// # Errors
    ///
    /// No connection; no tables; no answer within 15 seconds, or the [deadline](Self::deadline).
    pub async fn stats(&self, query: &StatsQuery) -> Result<Vec<Stats>, PostgresError> {
        let (column, is_of_times) = (query.column(), query.group == Group::Time);
        let order = if is_of_times { "key DESC" } else { "throttled::numeric + blocked DESC, allowed DESC, key" };
        // The largest number, if the sum is larger.
        let sum = |column| format!("least(sum({column}), 9223372036854775807)::int8");
        let [allowed, throttled, blocked, hits, misses, count] =
            ["allowed", "throttled", "blocked", "cache_hits", "cache_misses", "count"].map(sum);
        // Histograms are summed by bucket over all rows at once, which is far faster than row by row.
        let select = format!(
            "WITH chosen AS MATERIALIZED (
                SELECT {column} AS key, allowed, throttled, blocked, cache_hits, cache_misses, latency
                FROM tollgate.rate_limit_metrics
                WHERE width = $1 AND began >= $2 AND began < $3 AND ($4::text IS NULL OR user_id = $4)
                    AND ($5::text IS NULL OR endpoint = $5) AND ($6::text IS NULL OR region = $6)
            ), counted AS (
                SELECT * FROM (
                    SELECT key, {allowed} AS allowed, {throttled} AS throttled, {blocked} AS blocked,
                        {hits} AS hits, {misses} AS misses
                    FROM chosen GROUP BY key
                ) AS summed ORDER BY {order} LIMIT $7
            ), times AS (
                SELECT key, array_agg(bucket) AS buckets, array_agg(count) AS counts
                FROM (
                    SELECT key, bucket, {count} AS count
                    FROM chosen JOIN (SELECT key FROM counted) AS shown USING (key),
                        LATERAL unnest((chosen.latency).buckets, (chosen.latency).counts) AS each (bucket, count)
                    WHERE bucket IS NOT NULL AND count > 0
                    GROUP BY key, bucket
                ) AS summed GROUP BY key
            )
            SELECT counted.*, coalesce(buckets, '{{}}') AS buckets, coalesce(counts, '{{}}') AS counts
            FROM counted LEFT JOIN times USING (key) ORDER BY {order}"
        );
        let (width, StatsQuery { user, endpoint, region, .. }) = (query.width.name(), query);
        let ([from, to], most) = ([query.from, query.to].map(in_range), i64::from(query.most));
        let parameters: [&(dyn ToSql + Sync); 7] = [&width, &from, &to, user, endpoint, region, &most];
        let mut rows = self.read(&select, &parameters).await?;
        if is_of_times {
            rows.reverse();
        }
        Ok(rows.iter().map(|row| Stats::of(row, is_of_times)).collect())
    }
}

impl Stats {
    fn of(row: &Row, is_of_times: bool) -> Self {
        let count = |name| u64::try_from(row.get::<_, i64>(name)).unwrap_or_default();
        let mut latency = Histogram::default();
        let (buckets, counts): (Vec<i16>, Vec<i64>) = (row.get("buckets"), row.get("counts"));
        buckets.into_iter().zip(counts).for_each(|(bucket, count)| latency.add_count(bucket, count.unsigned_abs()));
        let percentile = |share| latency.percentile(share).unwrap_or_default();
        Self {
            began: is_of_times.then(|| row.get("key")),
            name: (!is_of_times).then(|| row.get("key")),
            allowed: count("allowed"),
            throttled: count("throttled"),
            blocked: count("blocked"),
            cache_hits: count("hits"),
            cache_misses: count("misses"),
            p50: percentile(0.5),
            p95: percentile(0.95),
            p99: percentile(0.99),
        }
    }
}
