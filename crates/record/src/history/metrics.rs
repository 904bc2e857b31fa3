//! Statistics of decisions by minute, hour and day: counted here for some seconds, then added to the database.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::{Duration, Instant, UNIX_EPOCH};

use tokio_postgres::Statement;
use tokio_postgres::types::ToSql;

use super::histogram::Histogram;
use super::record::{DecisionRecord, Endpoint, Outcome};
use crate::postgres::PostgresError;
use crate::postgres::client::Transaction;
use crate::spool::numbering::{answered, column};
use crate::spool::set_aside::{Parts, SetAside};

/// Most pairs of user and endpoint in a batch: more would block a thread for too long.
pub(super) const MOST_SERIES: usize = 1_000;
/// How many users and endpoints get counts of their own between two batches. All others share one without a name.
const MOST_NAMES: usize = 10_000;
/// How long counts are collected before they are written: fewer and larger updates of the same rows.
const COUNTED_EVERY: Duration = Duration::from_secs(10);
/// How many paths get counts of their own in an hour, where no router names the endpoint: clients can invent any
/// number.
const MOST_PATHS: usize = 1_000;
const PATHS_FOR: Duration = Duration::from_secs(3600);
/// Names and lengths, in seconds.
const WIDTHS: [(&str, u64); 3] = [("minute", 60), ("hour", 3600), ("day", 86_400)];

/// Counted, but not yet in a batch.
#[derive(Debug)]
pub(super) struct Counting {
    /// By minute.
    series: HashMap<Series, Counts>,
    /// When `names`, the users and endpoints with counts of their own, was last reset.
    since: Instant,
    names: usize,
    paths: HashSet<Box<str>>,
    paths_since: Option<Instant>,
}

/// A batch, in the order in which rows are locked: the same in every process.
#[derive(Debug, Default)]
pub(super) struct Metrics {
    widths: [BTreeMap<Series, Counts>; WIDTHS.len()],
    /// How many decisions it counts.
    pub(super) decisions: u64,
}

/// When the period began, in seconds since the epoch; the user; the endpoint.
type Series = (u64, Box<str>, Box<str>);

#[derive(Clone, Debug, Default)]
struct Counts {
    outcomes: [u64; 3],
    cache_hits: u64,
    cache_misses: u64,
    latency: Histogram,
}

impl Counting {
    pub(super) fn new() -> Self {
        let (series, paths) = (HashMap::new(), HashSet::new());
        Self { series, since: Instant::now(), names: 0, paths, paths_since: None }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.series.is_empty()
    }

    /// Whether the counts fill a batch.
    pub(super) fn is_full(&self) -> bool {
        self.series.len() >= MOST_SERIES
    }

    /// Whether it is time for a batch.
    pub(super) fn is_due(&self) -> bool {
        self.is_full() || (!self.is_empty() && self.since.elapsed() >= COUNTED_EVERY)
    }

    pub(super) fn add(&mut self, record: &DecisionRecord) {
        let seconds = record.at.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let minute = seconds - seconds % 60;
        let user = record.user.as_deref().unwrap_or_default();
        let endpoint = self.told_apart(record.endpoint.as_ref());
        let series = (minute, user.into(), endpoint.into());
        let is_known = self.series.contains_key(&series);
        let has_room = self.names < MOST_NAMES;
        self.names += usize::from(!is_known && has_room);
        let series = if is_known || has_room { series } else { (minute, "".into(), "".into()) };
        let counts = self.series.entry(series).or_default();
        counts.outcomes[record.outcome as usize] += 1;
        counts.cache_hits += u64::from(record.asked == Some(false));
        counts.cache_misses += u64::from(record.asked == Some(true));
        counts.latency.add(record.latency);
    }

    /// The endpoint; empty if it isn't known, or if there are too many paths.
    fn told_apart<'r>(&mut self, endpoint: Option<&'r Endpoint>) -> &'r str {
        match endpoint {
            None => "",
            Some(Endpoint::Route(route)) => route,
            Some(Endpoint::Path(path)) => {
                if self.paths_since.is_none_or(|since| since.elapsed() > PATHS_FOR) {
                    self.paths.clear();
                    self.paths_since = Some(Instant::now());
                }
                if self.paths.contains(path) {
                    return path;
                }
                let has_room = self.paths.len() < MOST_PATHS;
                if has_room {
                    self.paths.insert(path.clone());
                }
                if has_room { path } else { "" }
            }
        }
    }

    /// Takes all counts to be written; `None` if there are none.
    pub(super) fn taken(&mut self) -> Option<Metrics> {
        if self.series.is_empty() {
            return None;
        }
        // Not reset when a full batch is written early: the number of names would then have no bound.
        if self.since.elapsed() >= COUNTED_EVERY {
            (self.since, self.names) = (Instant::now(), 0);
        }
        let mut metrics = Metrics::default();
        for ((minute, user, endpoint), counts) in std::mem::take(&mut self.series) {
            for ((_, seconds), series) in WIDTHS.iter().zip(&mut metrics.widths) {
                let began = minute - minute % seconds;
                series.entry((began, user.clone(), endpoint.clone())).or_default().add(&counts);
            }
            metrics.decisions += counts.outcomes.iter().sum::<u64>();
        }
        Some(metrics)
    }
}

impl Counts {
    fn add(&mut self, other: &Self) {
        self.outcomes.iter_mut().zip(other.outcomes).for_each(|(count, more)| *count += more);
        self.cache_hits += other.cache_hits;
        self.cache_misses += other.cache_misses;
        self.latency.add_all(&other.latency);
    }
}

impl Metrics {
    /// Adds all counts; if `set_aside` is given, those that the database refuses are put there instead.
    pub(super) async fn write(
        &self,
        transaction: &Transaction<'_>,
        region: &str,
        mut set_aside: Option<&mut SetAside>,
    ) -> Result<(), PostgresError> {
        let statement = answered(transaction.prepare_cached(ADD)).await?;
        // A decision counts in each width, and is lost once.
        let mut lost = 0;
        for ((width, _), series) in WIDTHS.iter().zip(&self.widths) {
            let rows: Vec<_> = series.iter().collect();
            let Some(set_aside) = &mut set_aside else {
                if !rows.is_empty() {
                    add(transaction, &statement, (width, region), &rows).await?;
                }
                continue;
            };
            let (mut parts, mut refused) = (Parts::of(&rows), 0);
            while let Some(part) = parts.begin(transaction).await? {
                let added = add(transaction, &statement, (width, region), part).await;
                let Some(error) = parts.end(transaction, part, added).await? else { continue };
                for (series, counts) in part {
                    refused += counts.outcomes.iter().sum::<u64>();
                    set_aside.add(|| name_of(width, series), &error);
                }
            }
            lost = refused.max(lost);
        }
        set_aside.into_iter().for_each(|set_aside| set_aside.requests += lost);
        Ok(())
    }
}

/// `the minute at 2026-11-26T14:03:00Z of user "42" and endpoint "/"`
fn name_of(width: &str, (seconds, user, endpoint): &Series) -> String {
    let began = jiff::Timestamp::from_second(i64::try_from(*seconds).unwrap_or_default()).unwrap_or_default();
    format!("the {width} at {began} of user {user:?} and endpoint {endpoint:?}")
}

async fn add(
    transaction: &Transaction<'_>,
    statement: &Statement,
    (width, region): (&str, &str),
    rows: &[(&Series, &Counts)],
) -> Result<(), PostgresError> {
    let starts: Vec<_> = rows.iter().map(|((seconds, _, _), _)| UNIX_EPOCH + Duration::from_secs(*seconds)).collect();
    let users: Vec<_> = rows.iter().map(|((_, user, _), _)| &**user).collect();
    let endpoints: Vec<_> = rows.iter().map(|((_, _, endpoint), _)| &**endpoint).collect();
    let outcome = |outcome: Outcome| -> Vec<_> {
        rows.iter().map(|(_, counts)| column(counts.outcomes[outcome as usize])).collect()
    };
    let [allowed, throttled, blocked] = [Outcome::Allowed, Outcome::Throttled, Outcome::Blocked].map(outcome);
    let hits: Vec<_> = rows.iter().map(|(_, counts)| column(counts.cache_hits)).collect();
    let misses: Vec<_> = rows.iter().map(|(_, counts)| column(counts.cache_misses)).collect();
    let (buckets, counts): (Vec<_>, Vec<_>) = rows.iter().map(|(_, counts)| counts.latency.columns()).unzip();
    let parameters: [&(dyn ToSql + Sync); 12] = [
        &width, &region, &starts, &users, &endpoints, &allowed, &throttled, &blocked, &hits, &misses, &buckets, &counts,
    ];
    answered(transaction.execute(statement, &parameters)).await.map(drop)
}

/// Sums that are too large stay at the largest number.
const ADD: &str = "
    INSERT INTO tollgate.rate_limit_metrics AS m
        (width, began, user_id, endpoint, region, allowed, throttled, blocked, cache_hits, cache_misses, latency)
    SELECT $1, began, user_id, endpoint, $2, allowed, throttled, blocked, cache_hits, cache_misses,
        ROW(buckets::smallint[], counts::bigint[])::tollgate.histogram
    FROM unnest($3::timestamptz[], $4::text[], $5::text[], $6::int8[], $7::int8[], $8::int8[], $9::int8[], $10::int8[],
            $11::text[], $12::text[])
        AS counted (began, user_id, endpoint, allowed, throttled, blocked, cache_hits, cache_misses, buckets, counts)
    ON CONFLICT (width, began, user_id, endpoint, region) DO UPDATE
    SET allowed = least(m.allowed::numeric + excluded.allowed, 9223372036854775807)::int8,
        throttled = least(m.throttled::numeric + excluded.throttled, 9223372036854775807)::int8,
        blocked = least(m.blocked::numeric + excluded.blocked, 9223372036854775807)::int8,
        cache_hits = least(m.cache_hits::numeric + excluded.cache_hits, 9223372036854775807)::int8,
        cache_misses = least(m.cache_misses::numeric + excluded.cache_misses, 9223372036854775807)::int8,
        latency = tollgate.added(m.latency, excluded.latency)";
